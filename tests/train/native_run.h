/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps of a small model in native numerics, with what only they have: loss scaling and bf16 storage. Every
 * step goes through the same batch. */
#pragma once

#include <string.h>

#include "anyrank/context.h"
#include "anyrank/ddp.h"
#include "anyrank/param.h"
#include "ref/train/train_private.h"
#include "support/match.h"
#include "verify/run/cluster_run.h"

enum { NATIVE_RANKS = 4, NATIVE_STEPS = 12, NATIVE_WEIGHTS = 2048, NATIVE_B = 4, NATIVE_S = 8 };

/* What a rank had at the end. */
typedef struct native_rank {
    float loss[NATIVE_STEPS], norm[NATIVE_STEPS];
    bool skipped[NATIVE_STEPS];
    double scale[NATIVE_STEPS]; /* after each step */
    ar_loss_scaling scaling;
    uint64_t updates;
    size_t n, matrices;            /* elements: all, and those of parameters of two dimensions, which come first */
    float weights[NATIVE_WEIGHTS]; /* of the matrices, then of the vectors */
    float masters[NATIVE_WEIGHTS]; /* of the matrices: the optimizer's own */
    size_t n_masters;
} native_rank;

typedef struct native_run {
    ar_run run;
    ar_loss_scaling *scaling; /* how every rank begins; NULL: none */
    bool no_ddp;              /* each gradient is summed on its own, after the backward pass */
    bool large;       /* gradients of more than 4, which 2^126 times is more than fp32 holds: norms' weights of 64 */
    bool set_between; /* all weights become 0.25 before the last step */
    native_rank rank[NATIVE_RANKS];
} native_run;

static inline ar_status native_append(native_rank *r, ar_ctx *ctx, const ar_param *p)
{
    const size_t count = ar_tensor_count(&p->value);
    if (r->n + count > NATIVE_WEIGHTS)
        return ar_error_set(AR_ERR_INTERNAL, "more than %d weights", NATIVE_WEIGHTS);
    AR_TRY(ar_ctx_download_floats(ctx, r->weights + r->n, NATIVE_WEIGHTS - r->n, &p->value));
    r->n += count;
    return AR_OK;
}

/* Matrices come in the order in which their master copies do. */
static inline ar_status native_keep_weights(native_rank *r, ar_ctx *ctx, const ari_trainer *t)
{
    for (size_t i = 0; i < t->n; i++)
        if (t->params[i]->layout.ndim == 2)
            AR_TRY(native_append(r, ctx, t->params[i]));
    r->matrices = r->n;
    for (size_t i = 0; i < t->n; i++)
        if (t->params[i]->layout.ndim != 2)
            AR_TRY(native_append(r, ctx, t->params[i]));
    return AR_OK;
}

typedef struct native_keep {
    native_rank *rank;
    ar_ctx *ctx;
} native_keep;

static inline ar_status native_keep_state(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                                          const ar_layout *layout)
{
    native_keep *k = user;
    (void)p, (void)layout;
    if (strcmp(state, "master") != 0)
        return AR_OK;
    AR_TRY(ar_ctx_download(k->ctx, k->rank->masters + k->rank->n_masters, local));
    k->rank->n_masters += ar_tensor_count(local);
    return AR_OK;
}

/* All weights, or only those of vectors. */
static inline ar_status native_set(const ari_trainer *t, ar_ctx *ctx, float value, bool vectors)
{
    float values[NATIVE_WEIGHTS];
    for (size_t i = 0; i < NATIVE_WEIGHTS; i++)
        values[i] = value;
    for (size_t i = 0; i < t->n; i++)
        if (!vectors || t->params[i]->layout.ndim == 1)
            AR_TRY(ar_param_set(t->params[i], ctx, values));
    return AR_OK;
}

static inline ar_status native_steps(native_run *run, native_rank *r, ar_ctx *ctx, ari_trainer *t)
{
    int64_t ids[NATIVE_B * NATIVE_S];
    for (size_t i = 0; i < NATIVE_B * NATIVE_S; i++)
        ids[i] = (int64_t)((i * 7 + i / NATIVE_S) % 11);
    const ar_batch batch = {.batch = NATIVE_B, .seq = NATIVE_S, .input_ids = ids};
    if (run->large)
        AR_TRY(native_set(t, ctx, 64.0f, true));
    for (size_t i = 0; i < run->run.steps; i++) {
        ar_train_result result;
        if (run->set_between && i + 1 == run->run.steps)
            AR_TRY(native_set(t, ctx, 0.25f, false));
        AR_TRY(ar_train_step(&result, t->model, ctx, t->optimizer, &batch, (uint32_t)i + 1, &t->step));
        r->loss[i] = result.loss;
        r->norm[i] = result.norm;
        r->skipped[i] = result.skipped;
        r->scale[i] = r->scaling.scale;
    }
    return AR_OK;
}

static inline ar_status native_main(ar_ctx *ctx, void *user)
{
    native_run *run = user;
    native_rank *r = &run->rank[(size_t)ar_comm_rank(ar_ctx_dp(ctx)) * ranks_of(ctx) + rank_of(ctx)];
    const ar_config config = match_config(AR_ARCH_LLAMA, 1);
    ari_cluster_options o = {.config = &config, .run = run->run};
    ari_trainer t;
    ar_status st = AR_OK;
    o.run.steps = 1;
    o.run.seed = 3;
    AR_TRY(ari_trainer_create(&t, ctx, &o));
    if (run->no_ddp) {
        ar_ddp_destroy(t.ddp);
        t.ddp = t.step.ddp = NULL;
    }
    if (run->scaling) {
        r->scaling = *run->scaling;
        t.step.scaling = &r->scaling;
    }
    st = native_steps(run, r, ctx, &t);
    native_keep keep = {r, ctx};
    r->updates = ari_optimizer_steps(t.optimizer);
    if (st == AR_OK && t.ddp)
        st = ar_ddp_gather_parameters(t.ddp);
    const ar_status kept = native_keep_weights(r, ctx, &t);
    if (st == AR_OK)
        st = kept;
    if (st == AR_OK)
        st = ar_optimizer_save(t.optimizer, ctx, native_keep_state, &keep);
    ari_trainer_destroy(&t);
    return st;
}

/** Fills run->rank. */
static inline ar_status native_train(native_run *run)
{
    memset(run->rank, 0, sizeof run->rank);
    return rank_run(&run->run, native_main, run);
}
