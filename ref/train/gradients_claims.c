/* SPDX-License-Identifier: Apache-2.0 */
/* Each rank's claims about its parameters, gathered over the groups of ranks that hold copies of them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"
#include "ref/numerics/philox.h"
#include "ref/train/gradients.h"

const char *const ari_state_name[ARI_STATES] = {"exp_avg", "exp_avg_sq", "momentum_buffer", "master"};

static const char tag[] = "gradients:verify";

_Static_assert(sizeof(ari_claim) % sizeof(uint64_t) == 0 && sizeof(ari_claims_header) % sizeof(uint64_t) == 0,
               "claims travel as words");

/* --- hashes, which travel in place of copies ---------------------------------------------------------------------- */

/* FNV-1a in 64 bits, word by word. */
static uint64_t hash_word(uint64_t hash, uint64_t word)
{
    return (hash ^ word) * ARI_FNV1A_PRIME;
}

/* Which elements of the full tensor a rank holds: copies of the same ones have the same number. */
static uint64_t place_of(const ar_layout *o)
{
    uint64_t hash = ARI_FNV1A_BASIS;
    for (size_t k = 0; k < o->nbox; k++) {
        for (int d = 0; d < o->ndim; d++) {
            hash = hash_word(hash, o->box[k].global[d]);
            hash = hash_word(hash, o->box[k].extent[d]);
        }
    }
    return hash;
}

/* Goes on with n values; every NaN counts as the quiet one. */
static uint64_t hash_values(uint64_t hash, const float *v, size_t n)
{
    static const uint32_t quiet_nan = 0x7fc00000u;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = quiet_nan;
        if (!isnan(v[i]))
            memcpy(&bits, &v[i], sizeof bits);
        hash = hash_word(hash, bits);
    }
    return hash;
}

/* The values of a tensor of this rank, on the host. Gives; free(). */
static ar_status values_of(float **gives, ar_ctx *ctx, const ar_tensor *t)
{
    ARI_OWNED float *values = NULL;
    AR_TRY(ARI_ALLOC(&values, ar_tensor_count(t), "copies to compare"));
    AR_TRY(ar_ctx_download_floats(ctx, values, t));
    *gives = values;
    values = NULL;
    return AR_OK;
}

/* Summary of the elements of a tensor in the boxes of `layout`: each at its position, boxes one after another. */
typedef struct elements {
    uint64_t hash;
    size_t bad; /* not finite */
    float first_bad;
    bool nonzero;
} elements;

static void look_at_run(void *user, const ari_box_run *r)
{
    elements *e = user;
    e->hash = hash_values(e->hash, r->local, r->count);
    for (size_t i = 0; i < r->count; i++) {
        e->nonzero = e->nonzero || r->local[i] != 0.0f;
        if (!isfinite(r->local[i]) && e->bad++ == 0)
            e->first_bad = r->local[i];
    }
}

/* Nothing of a layout without boxes: its place stays 0. */
static ar_status look_at(elements *e, ari_copy *c, ar_ctx *ctx, const ar_tensor *local, const ar_layout *layout)
{
    ARI_OWNED float *values = NULL;
    *e = (elements){.hash = ARI_FNV1A_BASIS};
    if (layout->nbox == 0 || ar_tensor_count(local) == 0)
        return AR_OK;
    AR_TRY(values_of(&values, ctx, local));
    ar_tensor host = *local; /* contiguous, or it could not have been copied */
    host.dtype = AR_F32;
    host.data.ptr = values;
    ari_for_each_run(&host, layout, look_at_run, e);
    *c = (ari_copy){place_of(layout), e->hash};
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Summarises the elements whose gradient is complete here: all, or a share of them. */
static ar_status claim_gradient(ari_claim *s, ar_ctx *ctx, const ar_param *p)
{
    ar_layout own = p->layout;
    ar_tensor t;
    elements e;
    if (p->own_count < ar_tensor_count(&p->value))
        AR_TRY(ari_share_layout(&own, p, ctx, p->own_start, p->own_count));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, p->value.ndim, p->value.shape));
    ar_status st = ar_param_grad_value(p, ctx, &t);
    if (st == AR_OK)
        st = look_at(&e, &s->copy[ARI_COPY_GRADIENT], ctx, &t, &own);
    ar_ctx_release(ctx, &t);
    AR_TRY(st);
    s->flags |= e.nonzero ? ARI_CLAIM_NONZERO : 0;
    s->bad = e.bad;
    memcpy(&s->first_bad, &e.first_bad, sizeof e.first_bad);
    return AR_OK;
}

static ar_status claim_value(ari_claim *s, ar_ctx *ctx, const ar_param *p)
{
    ar_tensor t;
    ar_layout o;
    elements e;
    AR_TRY(ari_value_begin(&t, &o, ctx, p));
    const ar_status st = look_at(&e, &s->copy[ARI_COPY_VALUE], ctx, &t, &o);
    ari_value_end(&t, ctx, p);
    return st;
}

/* --- optimizer state ---------------------------------------------------------------------------------------------- */

typedef struct state_job {
    const ar_gradients *g;
    ari_claim *row; /* [n] */
} state_job;

static ar_status claim_state(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                             const ar_layout *layout)
{
    const state_job *j = user;
    size_t i = 0;
    int k = 0;
    while (i < j->g->n && j->g->params[i] != p)
        i++;
    while (k < ARI_STATES && strcmp(ari_state_name[k], state) != 0)
        k++;
    if (k == ARI_STATES)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: optimizer state '%s' cannot be compared", p->name, state);
    if (i == j->g->n)
        return AR_OK;
    ari_copy one = {0, 0}, *c = &j->row[i].copy[ARI_COPY_STATE + k];
    elements e;
    AR_TRY(look_at(&e, &one, j->g->ctx, local, layout));
    /* A share may come in several pieces. */
    *c = c->place == 0 ? one : (ari_copy){hash_word(c->place, one.place), hash_word(c->hash, one.hash)};
    return AR_OK;
}

/* ------------------------------------------------------------------------------------------------------------------ */

static ar_status claim_param(ari_claim *s, ar_ctx *ctx, const ar_param *p, const ar_gradients_verify_options *o)
{
    const bool holds = ar_tensor_count(&p->value) > 0;
    s->name = p->expert ? ARI_FNV1A_BASIS : ari_fnv1a(p->name);
    s->flags = (holds ? ARI_CLAIM_HOLDS : 0) | (p->requires_grad ? ARI_CLAIM_TRAINABLE : 0) |
               (p->has_grad ? ARI_CLAIM_GRADIENT : 0);
    if (o->values)
        AR_TRY(claim_value(s, ctx, p));
    return o->gradients && holds && p->requires_grad && p->has_grad ? claim_gradient(s, ctx, p) : AR_OK;
}

/* Ranks have other experts in one place of the list: those are no copies of each other. */
static void place_experts(ari_claim *row, const ar_gradients *g)
{
    for (size_t i = 0; i < g->n; i++) {
        for (size_t k = 0; g->params[i]->expert && k < sizeof row->copy / sizeof *row->copy; k++) {
            ari_copy *c = &row[i].copy[k];
            c->place = c->place == 0 ? 0 : hash_word(c->place, ari_fnv1a(g->params[i]->name));
        }
    }
}

static ar_status claim_all(uint64_t *words, const ar_gradients *g, const ar_gradients_verify_options *o)
{
    const ar_ctx *ctx = g->ctx;
    ari_claims_header *h = (ari_claims_header *)words;
    ari_claim *row = (ari_claim *)(h + 1);
    h->rank = (uint64_t)ari_ctx_place(ctx, ARI_ALL_AXES);
    h->steps = o->optimizer ? ar_optimizer_steps(o->optimizer) : 0;
    for (size_t i = 0; i < g->n; i++)
        AR_TRY(claim_param(&row[i], g->ctx, g->params[i], o));
    state_job job = {g, row};
    if (o->optimizer)
        AR_TRY(ar_optimizer_save(o->optimizer, g->ctx, claim_state, &job));
    place_experts(row, g);
    return AR_OK;
}

/* Claims of the ranks that have the same stages: gathered over the tensor-parallel, then the data-parallel group. */
static ar_status exchange_over_stages(ari_claims *t, const ar_gradients *g, const ar_gradients_verify_options *o)
{
    const ar_ctx *ctx = g->ctx;
    const size_t tp = (size_t)ar_comm_size(ctx->tp), dp = (size_t)ar_comm_size(ctx->dp);
    const size_t words = (sizeof(ari_claims_header) + g->n * sizeof(ari_claim)) / sizeof(uint64_t);
    *t = (ari_claims){.ranks = dp * tp, .n = g->n, .row_words = words, .params = g->params};
    AR_TRY(ARI_ALLOC_ZERO(&t->words, dp * tp * words, "what the ranks say"));
    uint64_t *const group = t->words + (size_t)ar_comm_rank(ctx->dp) * tp * words;
    AR_TRY(claim_all(group + (size_t)ar_comm_rank(ctx->tp) * words, g, o));
    AR_TRY(ari_gather_words(g->ctx, ctx->tp, group, words, tag));
    return ari_gather_words(g->ctx, ctx->dp, t->words, tp * words, tag);
}

/* The header and some rows of each rank of `from`, of all ranks of a group, in whose order they stand. */
static ar_status gather_rows(ari_claims *t, ar_ctx *ctx, ar_comm *over, const ari_claims *from)
{
    const size_t groups = (size_t)ar_comm_size(over), me = (size_t)ar_comm_rank(over);
    t->row_words = (sizeof(ari_claims_header) + t->n * sizeof(ari_claim)) / sizeof(uint64_t);
    t->ranks = groups * from->ranks;
    AR_TRY(ARI_ALLOC_ZERO(&t->words, t->ranks * t->row_words, "what the ranks say"));
    for (size_t r = 0; r < from->ranks; r++) {
        uint64_t *to = t->words + (me * from->ranks + r) * t->row_words;
        ari_claim *row = (ari_claim *)((ari_claims_header *)to + 1);
        memcpy(to, ari_claims_header_of(from, r), sizeof(ari_claims_header));
        for (size_t i = 0, k = 0; i < from->n && k < t->n; i++) {
            if (from->params[i] == t->params[k])
                row[k++] = *ari_claim_of(from, r, i);
        }
    }
    return ari_gather_words(ctx, over, t->words, from->ranks * t->row_words, tag);
}

static ar_status exchange_over_ends(ari_claims *t, const ar_gradients *g, const ari_claims *own)
{
    if (ar_comm_size(g->ctx->ends) == 1)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&t->params, g->n, "tied parameters"));
    for (size_t i = 0; i < g->n; i++) {
        if (g->params[i]->ends)
            t->params[t->n++] = g->params[i];
    }
    return t->n > 0 ? gather_rows(t, g->ctx, g->ctx->ends, own) : AR_OK;
}

ar_status ari_gradients_exchange_claims(ari_all_claims *gives, const ar_gradients *g,
                                        const ar_gradients_verify_options *o)
{
    AR_TRY(exchange_over_stages(&gives->own, g, o));
    if (ar_comm_size(g->ctx->pipeline) == 1)
        return AR_OK;
    AR_TRY(exchange_over_ends(&gives->ends, g, &gives->own));
    return gather_rows(&gives->heads, g->ctx, g->ctx->pipeline, &gives->own);
}

void ari_all_claims_free(ari_all_claims *t)
{
    free(t->own.words);
    free(t->ends.words);
    free(t->ends.params);
    free(t->heads.words);
}
