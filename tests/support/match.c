/* SPDX-License-Identifier: Apache-2.0 */
#include "support/match.h"

#include <math.h>
#include <stdio.h>

#include "anyrank/activation.h"
#include "anyrank/parallel.h"
#include "ref/baseline/baseline_private.h"
#include "ref/context/context.h"
#include "ref/context/context_private.h"
#include "ref/core/size.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/param_private.h"
#include "ref/layers/parts.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/placement/parallel_private.h"
#include "support/bits.h"
#include "tests/support/scoped.h"

enum { MOST_RANKS = 32, MOST_PARTS = 4 };

const float *match_weights_find(void *user, const char *name, size_t count)
{
    const match_weights *w = user;
    for (size_t i = 0; i < w->count; i++) {
        if (w->at[i].n == count && strcmp(w->at[i].name, name) == 0)
            return w->at[i].values;
    }
    return NULL;
}

void match_fill(float *values, size_t count, unsigned seed, const char *name, match_draw draw, double scale)
{
    static const double scales[MATCH_DRAWS] = {
        [MATCH_USUAL] = 0.5, [MATCH_HUGE] = 1e25,       [MATCH_LARGEST] = 1e37, [MATCH_TIES] = 3.0,
        [MATCH_ZEROS] = 8.0, [MATCH_SUBNORMAL] = 1e-39, [MATCH_MIXED] = 1.0};
    for (const char *p = name; *p; p++)
        seed = seed * 31u + (unsigned char)*p;
    fill_values(values, count, seed, draw == MATCH_USUAL && scale > 0.0 ? scale : scales[draw]);
    for (size_t i = 0; i < count; i++) {
        if (draw == MATCH_TIES)
            values[i] = truncf(values[i]) / 4.0f;
        else if (draw == MATCH_ZEROS)
            values[i] = fabsf(values[i]) > 1.0f ? copysignf(0.0f, values[i]) : values[i];
        else if (draw == MATCH_MIXED) /* the mantissa's low bits are as good as drawn again */
            values[i] = ldexpf(values[i], (int)(fmodf(fabsf(values[i]) * 0x1p20f, 1.0f) * 180.0f) - 140);
    }
    for (size_t i = 5; i < count; i += 13)
        values[i] = -0.0f; /* a bit pattern that a sum with zeros would lose */
}

const float *match_weights_make(void *user, const char *name, size_t count)
{
    match_weights *w = user;
    const float *known = match_weights_find(w, name, count);
    if (known || w->count == sizeof w->at / sizeof w->at[0])
        return known;
    float *values = malloc(count * sizeof *values);
    if (!values)
        return NULL;
    match_fill(values, count, w->seed, name, w->draw, w->scale);
    snprintf(w->at[w->count].name, sizeof w->at[0].name, "%s", name);
    w->at[w->count].n = count;
    w->at[w->count++].values = values;
    return values;
}

void match_weights_fini(match_weights *w)
{
    while (w->count > 0)
        free(w->at[--w->count].values);
}

ar_status match_baseline(const match_case *c, match_weights *w, ari_reference *r)
{
    ar_baseline_options o = ari_reference_options(&c->run, r);
    o.seed = c->seed;
    o.weights = match_weights_make;
    o.weights_user = w;
    if (c->x)
        AR_TRY(ari_baseline_block(&c->config, &o, &c->batch, c->x, c->dy));
    else
        AR_TRY(ar_baseline_run(&c->config, &o, &c->batch, &r->loss));
    return ari_reference_finish(r);
}

typedef struct job {
    const match_case *c;
    match_weights *w;
    float loss[MOST_RANKS];
} job;

/* This rank's part of a value between the regions: its own positions of each sequence. */
static ar_status upload_own(ar_ctx *ctx, ar_tensor *t, const match_case *c, const float *full)
{
    const ar_positions p = ari_local_positions(ctx, c->batch.seq, true);
    const size_t own = ari_positions_count(&p), h = c->config.hidden, shape[3] = {c->batch.batch, own, h};
    OWNED(free) float *part = malloc((c->batch.batch * own * h + 1) * sizeof *part);
    if (!part)
        return AR_ERR_MEMORY;
    for (size_t i = 0; i < c->batch.batch * own; i++)
        memcpy(part + i * h, full + (i / own * c->batch.seq + ari_positions_at(&p, i % own)) * h, h * sizeof *part);
    return rank_upload(ctx, t, 3, shape, part);
}

static ar_status block_step(ar_ctx *ctx, const job *j, ar_module *block, ar_saved *saved)
{
    enum { MOST = 64 };
    const match_case *c = j->c;
    ar_param *params[MOST];
    ar_tensor x, y, dy, dx;
    const size_t n = ar_module_params(block, params, MOST, false);
    for (size_t i = 0; i < n; i++) {
        const size_t count = ari_volume(params[i]->layout.shape, params[i]->layout.ndim);
        const float *full = match_weights_find(j->w, params[i]->name, count);
        if (!full)
            return ar_error_set(AR_ERR_NOT_FOUND, "the baseline has no parameter %s", params[i]->name);
        AR_TRY(ar_param_set(params[i], ctx, full));
        AR_TRY(ari_param_tap(params[i], ctx, 'i', &params[i]->value));
    }
    AR_TRY(upload_own(ctx, &x, c, c->x));
    AR_TRY(upload_own(ctx, &dy, c, c->dy));
    AR_TRY(ar_module_forward(block, ctx, saved, &y, &x, &c->batch));
    AR_TRY(ar_module_backward(block, ctx, saved, &dx, &dy, &c->batch));
    return ar_module_reduce_grads(block, ctx);
}

static ar_status plan_of(const match_case *c, ar_plan *plan)
{
    *plan = (ar_plan){0};
    return ari_plan_add_mlp_order(plan, c->config.arch, c->run.plan.mlp_order);
}

static ar_status run_block(ar_ctx *ctx, void *user)
{
    const job *j = user;
    ar_plan plan;
    ar_block_options o;
    ar_block_split split;
    char name[96];
    OWNED(ar_module_destroy) ar_module *block = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    AR_TRY(plan_of(j->c, &plan));
    AR_TRY(ari_config_block(&j->c->config, 0, &o, name, sizeof name));
    AR_TRY(ari_plan_block(&plan, &j->c->config, 0, ari_ctx_sp(ctx), &split));
    o.split = &split;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_block_create(&block, ctx, name, &o));
    return block_step(ctx, j, block, saved);
}

/* The rank's own samples, in micro-batches. */
static ar_status forward_backward(ar_ctx *ctx, const match_case *c, ar_model *model, ar_saved *saved)
{
    const ar_parallel *p = &c->run.parallel;
    const int n = ari_at_least_one(p->micro_batches);
    ar_batch part[MOST_PARTS];
    if (n > MOST_PARTS)
        return ar_error_set(AR_ERR_ARG, "no room for %d micro-batches", n);
    for (int i = 0; i < n; i++) {
        ari_parallel_slice(&part[i], p, &c->batch, ari_ctx_data_rank(ctx), i);
        part[i].targets = ari_batch_targets(&c->batch);
        if (part[i].batch > 0)
            AR_TRY(ari_model_forward(model, ctx, saved, &part[i]));
        if (part[i].batch > 0 && !p->forward_first)
            AR_TRY(ari_model_backward(model, ctx, saved, &part[i]));
    }
    for (int i = n - 1; i >= 0 && p->forward_first; i--) {
        if (part[i].batch > 0)
            AR_TRY(ari_model_backward(model, ctx, saved, &part[i]));
    }
    return AR_OK;
}

static ar_status run_model(ar_ctx *ctx, void *user)
{
    job *j = user;
    ar_plan plan;
    OWNED(ar_model_destroy) ar_model *model = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(plan_of(j->c, &plan));
    AR_TRY(ar_model_create(&model, ctx, &j->c->config, &plan));
    AR_TRY(ari_model_set(model, ctx, match_weights_find, j->w));
    AR_TRY(forward_backward(ctx, j->c, model, saved));
    AR_TRY(ari_model_loss(model, ctx, &j->loss[ar_comm_rank(ctx->world)], ari_batch_targets(&j->c->batch)));
    return ar_module_reduce_grads(ar_model_module(model), ctx);
}

/* A rank's taps: compared as they come, and each must be the next of the baseline's. Gradients of parameters, and the
 * loss, are complete later than where the baseline has them. */
typedef struct listener {
    ari_comparator compare;
    size_t next;
    char misplaced[200];
} listener;

static bool comes_later(const char *name, char pass)
{
    return pass == 'g' || strcmp(name, "loss") == 0;
}

static ar_status listen(void *user, const ar_tap_event *e)
{
    listener *l = user;
    const ari_reference *r = l->compare.reference;
    const size_t i = ari_reference_find(r, e->name, e->pass);
    while (l->next < r->count && comes_later(r->tensor[l->next].name, r->tensor[l->next].pass))
        l->next++;
    const bool again = i < r->count && l->compare.finding[i].is_reported; /* of another micro-batch */
    if (again || comes_later(e->name, e->pass))
        return ari_comparator_tap(&l->compare, e);
    if (i != l->next && !l->misplaced[0])
        snprintf(l->misplaced, sizeof l->misplaced, "%.80s%s where the baseline has %.80s%s", e->name,
                 ari_pass_suffix(e->pass), l->next < r->count ? r->tensor[l->next].name : "nothing",
                 l->next < r->count ? ari_pass_suffix(r->tensor[l->next].pass) : "");
    l->next++;
    return ari_comparator_tap(&l->compare, e);
}

ar_status match_found(const ari_comparator *ranks, int n, const ari_reference *r)
{
    for (int k = 0; k < n; k++) {
        if (ranks[k].unexpected[0])
            return ar_error_set(AR_ERR_DATA, "rank %d of %d: %s", k, n, ranks[k].unexpected);
    }
    for (size_t i = 0; i < r->count; i++) {
        const ari_ref_tensor *t = &r->tensor[i];
        const ari_verdict v = ari_verdict_of(ranks, n, i);
        if (!v.complete)
            return ar_error_set(AR_ERR_DATA, "%d ranks: %s%s of step %d is not covered once", n, t->name,
                                ari_pass_suffix(t->pass), t->step);
        if (v.different > 0)
            return ar_error_set(AR_ERR_DATA,
                                "rank %d of %d: %s%s[%zu] of step %d is %a, expected %a; %zu of %zu differ", v.rank, n,
                                t->name, ari_pass_suffix(t->pass), v.first_index, t->step, (double)v.actual,
                                (double)t->values[v.first_index], v.different, t->count);
    }
    return AR_OK;
}

static ar_status judge(const listener *l, const ari_reference *r, int tp, const float *loss)
{
    ari_comparator ranks[MOST_RANKS] = {{.unexpected = ""}};
    for (int k = 0; k < tp; k++) {
        ranks[k] = l[k].compare;
        if (l[k].misplaced[0])
            return ar_error_set(AR_ERR_DATA, "tp=%d rank %d: %s", tp, k, l[k].misplaced);
    }
    AR_TRY(match_found(ranks, tp, r));
    for (int k = 0; loss && k < tp; k++) {
        if ((double)loss[k] != r->loss && !(isnan(loss[k]) && isnan(r->loss)))
            return ar_error_set(AR_ERR_DATA, "tp=%d rank %d: the loss is %a, expected %a", tp, k, (double)loss[k],
                                r->loss);
    }
    return AR_OK;
}

/* The listeners of a run's ranks. */
typedef struct listeners {
    listener at[MOST_RANKS];
} listeners;

static void end_listeners(listeners **l)
{
    for (int k = 0; *l && k < MOST_RANKS; k++)
        ari_comparator_fini(&(*l)->at[k].compare);
    free(*l);
}

ar_status match_taps(const ari_reference *r, const ar_run *run, rank_fn fn, void *user, const float *loss)
{
    const int ranks = ar_parallel_world(&run->parallel);
    SCOPED(end_listeners) listeners *l = calloc(1, sizeof *l);
    void *users[MOST_RANKS];
    if (!l || ranks > MOST_RANKS)
        return ar_error_set(AR_ERR_ARG, "no room for %d ranks", ranks);
    for (int k = 0; k < ranks; k++) {
        users[k] = &l->at[k];
        AR_TRY(ari_comparator_init(&l->at[k].compare, r, NULL));
    }
    AR_TRY(rank_run_heard(run, listen, users, fn, user));
    return judge(l->at, r, ranks, loss);
}

ar_status match_ranks(const match_case *c, match_weights *w, const ari_reference *r, int tp)
{
    job j = {.c = c, .w = w};
    ar_run run = c->run;
    run.parallel.tp = tp;
    run.seed = c->seed;
    return match_taps(r, &run, c->x ? run_block : run_model, &j, c->x ? NULL : j.loss);
}

ar_status match_run(const match_case *c, match_weights *w, const ar_run *run)
{
    job j = {.c = c, .w = w};
    return rank_run(run, c->x ? run_block : run_model, &j);
}

ar_status match(const match_case *c, const int *tps, size_t *tensors)
{
    SCOPED(match_weights_fini) match_weights w = {.seed = c->seed, .scale = c->scale};
    SCOPED(ari_reference_fini) ari_reference r = {0};
    ar_status st = match_baseline(c, &w, &r);
    if (tensors)
        *tensors = r.count;
    for (const int *tp = tps; *tp && st == AR_OK; tp++)
        st = match_ranks(c, &w, &r, *tp);
    return st;
}

ar_config match_config(ar_arch arch, size_t layers)
{
    ar_config c = {.arch = arch,
                   .name = "small",
                   .vocab = 11,
                   .hidden = 12,
                   .layers = layers,
                   .heads = 4,
                   .kv_heads = arch == AR_ARCH_GPT2 ? 4 : 2,
                   .head_dim = 4,
                   .ffn = 8,
                   .max_positions = 9,
                   .activation = AR_ACT_GELU_TANH,
                   .norm = AR_NORM_LAYER,
                   .norm_eps = 1e-5,
                   .rope.theta = 100.0,
                   .final_norm = arch != AR_ARCH_STACK,
                   .causal = true,
                   .mlp_bias = true,
                   .initializer_range = 0.3};
    if (arch != AR_ARCH_GPT2 && arch != AR_ARCH_STACK) {
        c.activation = AR_ACT_SILU;
        c.gated = true;
        c.rope.kind = AR_ROPE_DEFAULT;
        c.norm = AR_NORM_RMS;
        c.mlp_bias = false;
    }
    if (arch == AR_ARCH_GPT2)
        c.qkv_bias = c.out_bias = c.learned_positions = c.tied = true;
    return c;
}

/* A number below n from the lowest digits of *from, which are gone then. */
static size_t digit(size_t *from, size_t n)
{
    const size_t last = *from % n;
    *from /= n;
    return last;
}

void match_draw_norms(ar_config *c, size_t number)
{
    if (c->arch == AR_ARCH_QWEN3 || c->arch == AR_ARCH_OLMO2) {
        c->norm = AR_NORM_RMS;
        c->qk_norm = (ar_qk_norm)digit(&number, 3);
    }
    if (c->arch == AR_ARCH_OLMO2)
        c->norm_place = (ar_norm_place)digit(&number, 3);
    c->norm_plus_one = c->norm == AR_NORM_RMS && digit(&number, 2) == 0;
    c->score_cap = digit(&number, 3) == 0 ? 0.75 : 0.0;
    c->logit_cap = c->arch != AR_ARCH_STACK && digit(&number, 3) == 0 ? 0.5 : 0.0;
    c->query_scalar = digit(&number, 3) == 0 ? 3.5 : 0.0;
    c->embed_scale = !c->learned_positions && digit(&number, 3) == 0 ? 1.75 : 0.0;
    c->pads = c->arch != AR_ARCH_GPT2 && digit(&number, 2) == 0;
    c->pad_id = c->pads ? number % c->vocab : 0;
}
