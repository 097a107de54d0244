/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of experts that ranks share out: added to those of other experts, or of no rows. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

enum { MOST_EXPERTS = 4096, ASKED = 16 };

/* --- no rows ------------------------------------------------------------------------------------------------------ */

/* *chosen: some token of a dump has a weight for the expert, as far as is known. */
static ar_status is_chosen(bool *chosen, const ari_case *c, const ar_dump *dump, size_t expert)
{
    const ar_dump_tensor *w = dump ? ari_replay_value(c, dump, ARI_ROUTES, 'f') : NULL;
    const size_t experts = w && w->ndim > 0 ? w->shape[w->ndim - 1] : 0;
    for (size_t i = expert; expert < experts && i < w->count && !*chosen; i += experts) {
        float weight = 0.0f;
        AR_TRY(ar_dump_read_f32(w, i, 1, &weight));
        *chosen = weight != 0.0f;
    }
    return AR_OK;
}

ar_status ari_measure_empty_expert(ari_trace *t, const ari_case *c)
{
    const size_t expert = ari_expert_of(c->d->name);
    bool chosen = false;
    if (expert == SIZE_MAX || !(c->is & ARI_IS_EXPERT) || c->max_ref != 0.0)
        return AR_OK;
    AR_TRY(is_chosen(&chosen, c, c->known->reference, expert));
    AR_TRY(is_chosen(&chosen, c, c->known->other, expert));
    if (!chosen)
        ari_trace_set(t, ARI_FOUND_EXPERTS, ARI_IF(ZERO));
    return AR_OK;
}

/* --- other experts' ----------------------------------------------------------------------------------------------- */

/* The same weight's gradient of all experts of a layer. */
typedef struct experts {
    const ar_dump_tensor *of[MOST_EXPERTS];
    size_t n, own;
    float *sum, *one; /* [elements] */
} experts;

/* sum[count] of elements from `from` on, over the experts that n ranks have in this one's place. */
static ar_status add_all(experts *e, size_t n, size_t from, size_t count)
{
    const size_t each = e->n / n;
    memset(e->sum, 0, count * sizeof *e->sum);
    for (size_t i = e->own % each; i < e->n; i += each) {
        AR_TRY(ar_dump_read_f32(e->of[i], from, count, e->one));
        for (size_t k = 0; k < count; k++)
            e->sum[k] += e->one[k];
    }
    return AR_OK;
}

/* True if some elements that differ are the sum, or may be. */
static ar_status may_be(bool *is, experts *e, const ari_case *c, size_t n)
{
    size_t asked = 0;
    *is = true;
    for (size_t i = 0; i < c->count && asked < ASKED && *is; i += c->count / (4 * ASKED) + 1) {
        if (!ari_off(c, i))
            continue;
        AR_TRY(add_all(e, n, i, 1));
        *is = fabs((double)c->val[i] - (double)e->sum[0]) <= 2.0 * c->absolute + ARI_SEEN * fabs((double)e->sum[0]);
        asked++;
    }
    return AR_OK;
}

static ar_status look_at_sums(ari_trace *t, experts *e, const ari_case *c)
{
    const ari_hypothesis h = {ari_expect_values, .c = c, .of = e->sum, .beside = ARI_SUMS * c->survey.max_reference};
    ari_residual left;
    for (size_t n = 2; n <= e->n && t->kind == ARI_FOUND_NOTHING; n++) {
        bool is = false;
        if (e->n % n == 0)
            AR_TRY(may_be(&is, e, c, n));
        if (!is)
            continue;
        AR_TRY(add_all(e, n, 0, c->count));
        if (!ari_holds_all(&left, &h))
            continue;
        ari_trace_set(t, ARI_FOUND_SHARDS_ADDED, ARI_IF(OF_EP));
        ari_explained(t, &left);
        ARI_FACTS(t, {"n", .count = n});
        ari_text others = ari_list(t, "others");
        for (size_t i = e->own % (e->n / n), k = 0; i < e->n; i += e->n / n, k++)
            ari_say(&others, "%s%zu", k == 0 ? "" : k + 1 == n ? " and " : ", ", i);
    }
    return AR_OK;
}

ar_status ari_measure_experts_added(ari_trace *t, const ari_case *c)
{
    const ari_role role = ari_module_of(c->reference->name, c->own.stem).role;
    experts *e = NULL;
    size_t found = 0;
    if (!(c->is & ARI_IS_EXPERT))
        return AR_OK;
    AR_TRY(ARI_TAKE(&e, c->arena, 1, "experts"));
    e->own = ari_expert_of(c->reference->name);
    for (ari_walk w = ari_walk_of(c->known->reference, c->path, "g", c->own.step); ari_walk_next(&w);) {
        const size_t expert = ari_expert_of(w.t->name);
        if (expert >= MOST_EXPERTS || !ari_same_shape(w.t, c->reference) || w.key.layer != c->own.layer ||
            ari_module_of(w.t->name, w.key.stem).role != role)
            continue;
        found += e->of[expert] == NULL;
        e->of[expert] = w.t;
        e->n = expert + 1 > e->n ? expert + 1 : e->n;
    }
    if (found < e->n || e->own >= e->n)
        return AR_OK;
    AR_TRY(ARI_TAKE(&e->sum, c->arena, c->count, "gradients of experts"));
    AR_TRY(ARI_TAKE(&e->one, c->arena, c->count, "gradients of experts"));
    return look_at_sums(t, e, c);
}
