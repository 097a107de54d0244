/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/gradients.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/layers/param_private.h"
#include "ref/layers/parts.h"
#include "ref/numerics/philox.h"
#include "ref/train/gradients_private.h"
#include "ref/train/train_private.h"

/* --- judging ------------------------------------------------------------------------------------------------------ */

/* Findings from the ranks' claims: the same everywhere, since all ranks judge the same table. */

/* --- findings ----------------------------------------------------------------------------------------------------- */

static ar_status add_finding(ar_finding **out, ar_gradients *g, ar_finding_kind kind, const char *param)
{
    AR_TRY(ARI_GROW(&g->finding, &g->capacity, g->findings, "findings"));
    ar_finding *f = &g->finding[g->findings++];
    *f = (ar_finding){.kind = kind, .warning = kind == AR_FOUND_ZERO, .against = -1};
    snprintf(f->param, sizeof f->param, "%s", param);
    *out = f;
    return AR_OK;
}

static void add_rank(ar_finding *f, const ari_claims *t, size_t r)
{
    if (f->ranks < AR_FINDING_RANKS)
        f->rank[f->ranks] = (int)ari_claims_header_of(t, r)->rank;
    f->ranks++;
}

/* Returns the next rank from r on that holds elements of parameter i and has all flags in `these` and none in `not`;
 * t->ranks: none. */
static size_t next_rank(const ari_claims *t, size_t i, size_t r, uint64_t these, uint64_t not )
{
    these |= ARI_CLAIM_HOLDS;
    while (r < t->ranks && (ari_claim_of(t, r, i)->flags & (these | not )) != these)
        r++;
    return r;
}

static size_t count_ranks(const ari_claims *t, size_t i, uint64_t these)
{
    size_t n = 0;
    for (size_t r = next_rank(t, i, 0, these, 0); r < t->ranks; r = next_rank(t, i, r + 1, these, 0))
        n++;
    return n;
}

/* Creates a finding that names those ranks, if there are any. */
static ar_status find_ranks(ar_finding **out, ar_gradients *g, const ari_claims *t, size_t i, ar_finding_kind kind,
                            uint64_t these, uint64_t not )
{
    ar_finding *f = NULL;
    for (size_t r = next_rank(t, i, 0, these, not ); r < t->ranks; r = next_rank(t, i, r + 1, these, not )) {
        if (!f)
            AR_TRY(add_finding(&f, g, kind, t->params[i]->name));
        add_rank(f, t, r);
    }
    *out = f;
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static ar_status judge_bad(ar_gradients *g, const ari_claims *t, size_t i)
{
    ar_finding *f = NULL;
    for (size_t r = 0; r < t->ranks; r++) {
        const ari_claim *s = ari_claim_of(t, r, i);
        float bad_value = 0.0f;
        if (s->bad == 0)
            continue;
        memcpy(&bad_value, &s->first_bad, sizeof bad_value);
        if (!f) {
            AR_TRY(add_finding(&f, g, AR_FOUND_NOT_FINITE, t->params[i]->name));
            f->value = (double)bad_value;
        }
        f->elements += s->bad;
        add_rank(f, t, r);
    }
    return AR_OK;
}

static ar_status judge_gradient(ar_gradients *g, const ari_claims *t, size_t i, bool allow_unused)
{
    const uint64_t trains = ARI_CLAIM_TRAINABLE, gradient_flags = ARI_CLAIM_TRAINABLE | ARI_CLAIM_GRADIENT;
    const size_t training = count_ranks(t, i, trains), gradient_ranks = count_ranks(t, i, gradient_flags);
    ar_finding *f = NULL;
    if (training == 0)
        return AR_OK;
    AR_TRY(find_ranks(&f, g, t, i, AR_FOUND_FROZEN, 0, trains));
    AR_TRY(find_ranks(&f, g, t, i, AR_FOUND_MISSING, trains, ARI_CLAIM_GRADIENT));
    if (f)
        f->warning = gradient_ranks == 0 && allow_unused;
    AR_TRY(judge_bad(g, t, i));
    if (gradient_ranks > 0 && count_ranks(t, i, gradient_flags | ARI_CLAIM_NONZERO) == 0)
        AR_TRY(find_ranks(&f, g, t, i, AR_FOUND_ZERO, gradient_flags, 0));
    return AR_OK;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* Compares copy[r] of all ranks r: ranks with the same `place` should have equal values. place 0: no value. */

/* Returns the rank with the correct copy among the ranks from `first_rank` on that hold copies of the same elements. */
static size_t right_copy(const ari_copy *copy, size_t ranks, size_t first_rank)
{
    const uint64_t place = copy[first_rank].place;
    size_t copies = 0;
    for (size_t r = first_rank; r < ranks; r++)
        copies += copy[r].place == place;
    for (size_t r = first_rank; r < ranks && copies > 2; r++) {
        size_t matches = 0;
        for (size_t k = r; k < ranks && copy[r].place == place; k++)
            matches += copy[k].place == place && copy[k].hash == copy[r].hash;
        if (2 * matches > copies)
            return r;
    }
    return first_rank;
}

static bool has_copy_below(const ari_copy *copy, size_t r)
{
    for (size_t k = 0; k < r; k++) {
        if (copy[k].place == copy[r].place)
            return true;
    }
    return false;
}

/* Judges the copies of which rank `first_rank` is the lowest holder; prototype: the finding's kind, parameter and
 * state. */
static ar_status judge_copies_of(ar_gradients *g, const ari_claims *t, const ari_copy *copy, size_t first_rank,
                                 const ar_finding *prototype)
{
    const size_t right = right_copy(copy, t->ranks, first_rank);
    ar_finding *f = NULL;
    for (size_t r = first_rank; r < t->ranks; r++) {
        if (copy[r].place != copy[right].place || copy[r].hash == copy[right].hash)
            continue;
        if (!f) {
            AR_TRY(add_finding(&f, g, prototype->kind, prototype->param));
            f->against = (int)ari_claims_header_of(t, right)->rank;
            f->value = prototype->kind == AR_FOUND_STEPS ? (double)copy[r].hash : 0.0;
            memcpy(f->state, prototype->state, sizeof f->state);
        }
        add_rank(f, t, r);
    }
    return AR_OK;
}

static ar_status judge_copies(ar_gradients *g, const ari_claims *t, size_t i)
{
    static const ar_finding_kind kinds[] = {AR_FOUND_VALUE, AR_FOUND_GRADIENT};
    ARI_OWNED ari_copy *copy = NULL;
    AR_TRY(ARI_ALLOC(&copy, t->ranks, "copies to compare"));
    for (int which = 0; which < ARI_COPIES; which++) {
        const bool state = which >= ARI_COPY_STATE;
        ar_finding prototype = {.kind = state ? AR_FOUND_STATE : kinds[which]};
        snprintf(prototype.param, sizeof prototype.param, "%s", t->params[i]->name);
        snprintf(prototype.state, sizeof prototype.state, "%s", state ? ari_state_name[which - ARI_COPY_STATE] : "");
        for (size_t r = 0; r < t->ranks; r++)
            copy[r] = ari_claim_of(t, r, i)->copy[which];
        for (size_t r = 0; r < t->ranks; r++) {
            if (copy[r].place != 0 && !has_copy_below(copy, r))
                AR_TRY(judge_copies_of(g, t, copy, r, &prototype));
        }
    }
    return AR_OK;
}

/* ------------------------------------------------------------------------------------------------------------------ */

/* Rows that speak of different parameters can be compared no further. */
static ar_status check_lists(const ari_claims *t)
{
    for (size_t i = 0; i < t->n; i++) {
        for (size_t r = 1; r < t->ranks; r++) {
            if (ari_claim_of(t, r, i)->name != ari_claim_of(t, 0, i)->name)
                return ar_error_set(AR_ERR_MISMATCH,
                                    "parameter %zu of %zu is another one on rank %zu than on rank 0 ('%s' here)", i,
                                    t->n, (size_t)ari_claims_header_of(t, r)->rank, t->params[i]->name);
        }
    }
    return AR_OK;
}

static ar_status judge_steps(ar_gradients *g, const ari_claims *t)
{
    const ar_finding prototype = {.kind = AR_FOUND_STEPS};
    ARI_OWNED ari_copy *copy = NULL;
    AR_TRY(ARI_ALLOC(&copy, t->ranks, "copies to compare"));
    for (size_t r = 0; r < t->ranks; r++)
        copy[r] = (ari_copy){.place = 1, .hash = ari_claims_header_of(t, r)->steps};
    return judge_copies_of(g, t, copy, 0, &prototype);
}

static ar_status judge_table(ar_gradients *g, const ari_claims *t, size_t i, const ar_gradients_verify_options *o)
{
    if (o->gradients)
        AR_TRY(judge_gradient(g, t, i, o->allow_unused));
    return judge_copies(g, t, i);
}

/* Judges all claims. The first stage also judges parameters that both ends of a pipeline share, and the step counts of
 * all ranks. */
static ar_status gradients_judge(ar_gradients *g, const ari_all_claims *t, const ar_gradients_verify_options *o)
{
    const bool is_first_stage = ar_comm_rank(g->ctx->pipeline) == 0;
    size_t tied = 0;
    g->findings = 0;
    AR_TRY(check_lists(&t->stages));
    if (is_first_stage)
        AR_TRY(judge_steps(g, t->heads.words ? &t->heads : &t->stages));
    for (size_t i = 0; i < t->stages.n; i++) {
        if (tied == t->tied_weights.n || t->stages.params[i] != t->tied_weights.params[tied])
            AR_TRY(judge_table(g, &t->stages, i, o));
        else if (tied++, is_first_stage)
            AR_TRY(judge_table(g, &t->tied_weights, tied - 1, o));
    }
    return AR_OK;
}

/* --- of all stages ------------------------------------------------------------------------------------------------ */

enum { FINDING_WORDS = (sizeof(ar_finding) + sizeof(uint64_t) - 1) / sizeof(uint64_t) };

/* Reads the findings of all ranks. found: [ranks][max_findings] of FINDING_WORDS words; rank r has count[r]
 * findings. */
static ar_status take_findings(ar_gradients *g, const uint64_t *found, const uint64_t *count, size_t ranks,
                               size_t max_findings)
{
    g->findings = 0;
    for (size_t r = 0; r < ranks; r++) {
        for (size_t i = 0; i < count[r]; i++) {
            AR_TRY(ARI_GROW(&g->finding, &g->capacity, g->findings, "findings"));
            memcpy(&g->finding[g->findings++], found + (r * max_findings + i) * FINDING_WORDS, sizeof *g->finding);
        }
    }
    return AR_OK;
}

/* Collects the findings of all stages, in the order of stages, into g on each rank of the pipeline. Collective over the
 * pipeline. */
static ar_status gradients_share_findings(ar_gradients *g)
{
    static const char tag[] = "gradients:verify";
    ar_comm *group = g->ctx->pipeline;
    const size_t ranks = (size_t)ar_comm_size(group), me = (size_t)ar_comm_rank(group);
    ARI_OWNED uint64_t *count = NULL, *found = NULL;
    size_t max_findings = 0;
    if (ranks == 1)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&count, ranks, "numbers of findings"));
    count[me] = g->findings;
    AR_TRY(ari_gather_words(g->ctx, group, count, 1, tag));
    for (size_t r = 0; r < ranks; r++)
        max_findings = count[r] > max_findings ? (size_t)count[r] : max_findings;
    if (max_findings == 0)
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&found, ranks * max_findings, FINDING_WORDS * sizeof *found, "findings"));
    for (size_t i = 0; i < g->findings; i++)
        memcpy(found + (me * max_findings + i) * FINDING_WORDS, &g->finding[i], sizeof *g->finding);
    AR_TRY(ari_gather_words(g->ctx, group, found, max_findings * FINDING_WORDS, tag));
    return take_findings(g, found, count, ranks, max_findings);
}

/* --- as text ------------------------------------------------------------------------------------------------------ */

/* "rank 3", "ranks 0-1, 4", "ranks 0-63 and 12 more". */
static void ranks_text(char *out, size_t cap, const ar_finding *f)
{
    char list[256], extra[32] = "";
    const size_t shown = f->ranks < AR_FINDING_RANKS ? f->ranks : AR_FINDING_RANKS;
    ari_ranks_describe(f->rank, (int)shown, list, sizeof list);
    if (f->ranks > shown)
        snprintf(extra, sizeof extra, " and %zu more", f->ranks - shown);
    snprintf(out, cap, "rank%s %s%s", ARI_PLURAL(f->ranks), list, extra);
}

void ari_finding_text(char *out, size_t cap, const ar_finding *f)
{
    char ranks[320];
    ranks_text(ranks, sizeof ranks, f);
    switch (f->kind) {
    case AR_FOUND_MISSING:
        snprintf(out, cap, "%s: no gradient on %s", f->param, ranks);
        return;
    case AR_FOUND_FROZEN:
        snprintf(out, cap, "%s: requires no gradient on %s, but elsewhere", f->param, ranks);
        return;
    case AR_FOUND_NOT_FINITE:
        snprintf(out, cap, "%s: %zu element%s of the gradient not finite on %s, the first %g", f->param, f->elements,
                 ARI_PLURAL(f->elements), ranks, f->value);
        return;
    case AR_FOUND_ZERO:
        snprintf(out, cap, "%s: the gradient is zero everywhere", f->param);
        return;
    case AR_FOUND_VALUE:
        snprintf(out, cap, "%s: the copy of %s differs from that of rank %d", f->param, ranks, f->against);
        return;
    case AR_FOUND_GRADIENT:
        snprintf(out, cap, "%s: the gradient of %s differs from that of rank %d", f->param, ranks, f->against);
        return;
    case AR_FOUND_STATE:
        snprintf(out, cap, "%s: %s of %s differs from that of rank %d", f->param, f->state, ranks, f->against);
        return;
    case AR_FOUND_STEPS:
        snprintf(out, cap, "the optimizer of %s is at step %.0f, not where that of rank %d is", ranks, f->value,
                 f->against);
        return;
    }
}

/* --- claims ------------------------------------------------------------------------------------------------------- */

/* Names of the optimizer's states in a rank's claims, which are gathered over the groups of ranks that hold copies of
 * its parameters. */

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

/* Returns a number that identifies the elements of the full tensor that a rank holds: copies have equal numbers. */
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

/* Continues a hash with n values; every NaN counts as the quiet NaN. */
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

/* The values of a tensor of this rank, on the host. Release the result with free(). */
static ar_status values_of(float **out, ar_ctx *ctx, const ar_tensor *t)
{
    ARI_OWNED float *values = NULL;
    AR_TRY(ARI_ALLOC(&values, ar_tensor_count(t), "copies to compare"));
    AR_TRY(ar_ctx_download_floats(ctx, values, ar_tensor_count(t), t));
    *out = values;
    values = NULL;
    return AR_OK;
}

/* Summary of a tensor's elements in the boxes of `layout`, each at its position in the full tensor, one box after the
 * other. */
typedef struct elements {
    uint64_t hash;
    size_t bad; /* number of values that are not finite */
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

/* Summarises a tensor. A layout without boxes leaves the summary at 0. */
static ar_status look_at(elements *e, ari_copy *c, ar_ctx *ctx, const ar_tensor *local, const ar_layout *layout)
{
    ARI_OWNED float *values = NULL;
    *e = (elements){.hash = ARI_FNV1A_BASIS};
    if (layout->nbox == 0 || ar_tensor_count(local) == 0)
        return AR_OK;
    AR_TRY(values_of(&values, ctx, local));
    ar_tensor host = *local; /* contiguous, since it was copied to the host */
    host.dtype = AR_F32;
    host.data.ptr = values;
    ari_for_each_run(&host, layout, look_at_run, e);
    *c = (ari_copy){place_of(layout), e->hash};
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Summarises the elements whose gradient is complete on this rank: all, or a shard. */
static ar_status claim_gradient(ari_claim *s, ar_ctx *ctx, const ar_param *p)
{
    ar_layout layout = p->layout;
    ar_tensor t;
    elements e;
    if (p->own_count < ar_tensor_count(&p->value))
        AR_TRY(ari_share_layout(&layout, p, ctx, p->own_start, p->own_count));
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, p->value.ndim, p->value.shape));
    ar_status st = ar_param_grad_value(p, ctx, &t);
    if (st == AR_OK)
        st = look_at(&e, &s->copy[ARI_COPY_GRADIENT], ctx, &t, &layout);
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
    ari_copy copy = {0, 0}, *c = &j->row[i].copy[ARI_COPY_STATE + k];
    elements e;
    AR_TRY(look_at(&e, &copy, j->g->ctx, local, layout));
    /* a shard may consist of several pieces */
    *c = c->place == 0 ? copy : (ari_copy){hash_word(c->place, copy.place), hash_word(c->hash, copy.hash)};
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

/* Marks the ranks' experts. At one index of the list, ranks may have different experts, which are not copies of each
 * other. */
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
    h->steps = o->optimizer ? ari_optimizer_steps(o->optimizer) : 0;
    for (size_t i = 0; i < g->n; i++)
        AR_TRY(claim_param(&row[i], g->ctx, g->params[i], o));
    state_job job = {g, row};
    if (o->optimizer)
        AR_TRY(ar_optimizer_save(o->optimizer, g->ctx, claim_state, &job));
    place_experts(row, g);
    return AR_OK;
}

/* Gathers the claims of the ranks with the same stages: first over the tensor-parallel group, then over the
 * data-parallel group. */
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

/* Gathers the header and some rows of each rank in `src` from all ranks of a group, in the group's order. */
static ar_status gather_rows(ari_claims *t, ar_ctx *ctx, ar_comm *group, const ari_claims *src)
{
    const size_t groups = (size_t)ar_comm_size(group), me = (size_t)ar_comm_rank(group);
    t->row_words = (sizeof(ari_claims_header) + t->n * sizeof(ari_claim)) / sizeof(uint64_t);
    t->ranks = groups * src->ranks;
    AR_TRY(ARI_ALLOC_ZERO(&t->words, t->ranks * t->row_words, "what the ranks say"));
    for (size_t r = 0; r < src->ranks; r++) {
        uint64_t *dst = t->words + (me * src->ranks + r) * t->row_words;
        ari_claim *row = (ari_claim *)((ari_claims_header *)dst + 1);
        memcpy(dst, ari_claims_header_of(src, r), sizeof(ari_claims_header));
        for (size_t i = 0, k = 0; i < src->n && k < t->n; i++) {
            if (src->params[i] == t->params[k])
                row[k++] = *ari_claim_of(src, r, i);
        }
    }
    return ari_gather_words(ctx, group, t->words, src->ranks * t->row_words, tag);
}

static ar_status exchange_over_ends(ari_claims *t, const ar_gradients *g, const ari_claims *stage_claims)
{
    if (ar_comm_size(g->ctx->ends) == 1)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&t->params, g->n, "tied parameters"));
    for (size_t i = 0; i < g->n; i++) {
        if (g->params[i]->ends)
            t->params[t->n++] = g->params[i];
    }
    return t->n > 0 ? gather_rows(t, g->ctx, g->ctx->ends, stage_claims) : AR_OK;
}

/* Exchanges claims so that every rank has all of them. Collective. The caller releases *out with all_claims_free, also
 * after a failure. */
static ar_status gradients_exchange_claims(ari_all_claims *out, const ar_gradients *g,
                                           const ar_gradients_verify_options *o)
{
    AR_TRY(exchange_over_stages(&out->stages, g, o));
    if (ar_comm_size(g->ctx->pipeline) == 1)
        return AR_OK;
    AR_TRY(exchange_over_ends(&out->tied_weights, g, &out->stages));
    return gather_rows(&out->heads, g->ctx, g->ctx->pipeline, &out->stages);
}

/* Frees the claims. */
static void all_claims_free(ari_all_claims *t)
{
    free(t->stages.words);
    free(t->tied_weights.words);
    free(t->tied_weights.params);
    free(t->heads.words);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

ar_status ar_gradients_create(ar_gradients **out, ar_ctx *ctx, ar_param *const *params, size_t n)
{
    ARI_OWNED ar_gradients *gradients = NULL;
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < i; k++) {
            if (params[k] == params[i])
                return ar_error_set(AR_ERR_ARG, "gradients are given the parameter %s twice", params[i]->name);
        }
    }
    AR_TRY(ARI_ALLOC_ZERO(&gradients, 1, "a gradient manager"));
    *gradients = (ar_gradients){.ctx = ctx, .n = n};
    AR_TRY(ARI_ALLOC(&gradients->params, n, "a list of parameters"));
    if (n > 0)
        memcpy(gradients->params, params, n * sizeof *params);
    *out = gradients;
    gradients = NULL;
    return AR_OK;
}

ar_status ar_gradients_create_module(ar_gradients **out, ar_ctx *ctx, ar_module *m)
{
    ARI_OWNED ar_param **params = NULL;
    size_t n = 0;
    AR_TRY(ari_module_list(&params, &n, m));
    return ar_gradients_create(out, ctx, params, n);
}

void ar_gradients_destroy(ar_gradients *g)
{
    if (!g)
        return;
    free(g->finding);
    free(g->params);
    free(g);
}

size_t ari_gradients_trainable(const ar_gradients *g, ar_param **out, size_t cap)
{
    size_t n = 0;
    for (size_t i = 0; i < g->n; i++) {
        if (!g->params[i]->requires_grad)
            continue;
        if (n < cap)
            out[n] = g->params[i];
        n++;
    }
    return n;
}

ar_status ar_gradients_zero(ar_gradients *g)
{
    for (size_t i = 0; i < g->n; i++)
        AR_TRY(ari_param_zero_grad(g->params[i], g->ctx));
    return AR_OK;
}

ar_status ar_gradients_sync(ar_gradients *g, ar_ddp *ddp)
{
    if (ddp)
        return ar_ddp_wait(ddp);
    ARI_OWNED ar_param **trainable = NULL;
    AR_TRY(ARI_ALLOC(&trainable, g->n, "a list of parameters"));
    const size_t n = ari_gradients_trainable(g, trainable, g->n);
    return ari_params_reduce(trainable, n, g->ctx);
}

ar_verdict ari_gradients_last(const ar_gradients *g)
{
    ar_verdict v = {.findings = g->findings, .finding = g->finding};
    for (size_t i = 0; i < g->findings; i++)
        v.warnings += g->finding[i].warning;
    v.errors = v.findings - v.warnings;
    v.ok = v.errors == 0;
    return v;
}

ar_status ar_gradients_verify(ar_gradients *g, ar_verdict *v, const ar_gradients_verify_options *o)
{
    ARI_ENDED(all_claims_free) ari_all_claims claims = {.stages.words = NULL};
    AR_TRY(gradients_exchange_claims(&claims, g, o));
    AR_TRY(gradients_judge(g, &claims, o));
    AR_TRY(gradients_share_findings(g));
    *v = ari_gradients_last(g);
    return AR_OK;
}

ar_status ar_verdict_status(const ar_verdict *v)
{
    char text[512], extra[48] = "";
    for (size_t i = 0; i < v->findings; i++) {
        if (v->finding[i].warning)
            continue;
        ari_finding_text(text, sizeof text, &v->finding[i]);
        if (v->errors > 1)
            snprintf(extra, sizeof extra, " (and %zu more)", v->errors - 1);
        return ar_error_set(AR_ERR_DATA, "%s%s", text, extra);
    }
    return AR_OK;
}
