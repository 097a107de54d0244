/* SPDX-License-Identifier: Apache-2.0 */
/* Data parallelism over a list of vectors whose gradients are drawn: who uses which of them, in which micro-batch, is
 * literal. Rank threads return statuses; the main thread looks at the results. */
#pragma once

#include <stdio.h>

#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/param_private.h"
#include "ref/train/ddp_private.h"
#include "support/rank_run.h"
#include "support/scoped.h"

enum { TOY_MOST = RANK_PARAMS, TOY_RANKS = 6, TOY_ELEMENTS = 2000, TOY_MICRO = 3 };

typedef struct toy_result {
    float grad[TOY_ELEMENTS]; /* of the last step, parameter after parameter */
    bool has[TOY_MOST];
    char buckets[256]; /* "[p2 p1] [p0]" */
    char unused[128];  /* "p0 p3" */
    size_t bytes;      /* of the buckets' storage */
    uint64_t collectives, moved;
    int how; /* the toy's own, for its body */
} toy_result;

typedef struct toy {
    size_t size[TOY_MOST], n;
    bool frozen[TOY_MOST], spread[TOY_MOST], bf16[TOY_MOST];
    bool plain; /* without a DDP object: ari_params_reduce */
    bool twice; /* the last micro-batch goes backward twice, both times synchronised */
    bool by_hand;
    ar_ddp_options ddp;
    int micro, steps;                     /* 0: 1 */
    unsigned skips[TOY_RANKS][TOY_MICRO]; /* bit i: parameter i is not used there; TOY_IDLE: there is no micro-batch */
    /* Called on every rank when the object stands, and in place of the steps where it gives a status. NULL: not. */
    ar_status (*body)(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out);
    int how;
    ar_run run;
    toy_result rank[TOY_RANKS];
} toy;
#define TOY_IDLE (~0u)

/* Small numbers of different sizes, drawn. */
static inline float toy_term(int rank, int micro, size_t param, size_t i, int step)
{
    uint64_t x =
        (uint64_t)rank * 7919 + (uint64_t)micro * 104729 + param * 1299709 + i * 15485863 + (uint64_t)step * 31;
    x = (x ^ x >> 31) * UINT64_C(0x9e3779b97f4a7c15);
    x ^= x >> 29;
    return (float)((double)(x >> 40) * 0x1p-24 - 0.5) * (x & 3 ? 1.0f : 1e-4f);
}

static inline ar_status toy_init(ar_param *p, ar_ctx *ctx, const toy *t, size_t i)
{
    char name[32];
    ar_layout layout;
    snprintf(name, sizeof name, "p%zu", i);
    AR_TRY(ari_layout_replicate(&layout, 1, &t->size[i], ar_comm_rank(ar_ctx_tp(ctx)), ar_comm_size(ar_ctx_tp(ctx))));
    AR_TRY(ar_param_init(p, ctx, name, &layout, false));
    p->requires_grad = !t->frozen[i];
    p->spread = t->spread[i];
    p->value.dtype = t->bf16[i] ? AR_BF16 : AR_F32; /* in memory for fp32 numbers */
    p->init = AR_INIT_NORMAL;
    p->init_range = 1.0;
    return ari_param_fresh(p, ctx, (uint64_t)ar_comm_rank(ar_ctx_dp(ctx)));
}

static inline ar_status toy_add(ar_ctx *ctx, ar_param *p, size_t i, int micro, int step)
{
    const size_t n = ar_tensor_count(&p->value);
    const int rank = ar_comm_rank(ar_ctx_dp(ctx)) + (p->spread ? 10 * ar_comm_rank(ar_ctx_tp(ctx)) : 0);
    float host[TOY_ELEMENTS];
    for (size_t k = 0; k < n; k++)
        host[k] = toy_term(rank, micro, i, k, step);
    return rank_add_gradient(ctx, p, host);
}

/* One micro-batch: forward uses, backward adds, the last parameter first. */
static inline ar_status toy_pass(ar_ctx *ctx, const toy *t, ar_param **params, int micro, int step)
{
    const unsigned skips = t->skips[ar_comm_rank(ar_ctx_dp(ctx))][micro];
    if (skips == TOY_IDLE)
        return AR_OK;
    for (size_t i = 0; i < t->n; i++) {
        if (!(skips >> i & 1))
            ari_param_use(params[i]);
    }
    for (size_t i = t->n; i-- > 0;) {
        if (skips >> i & 1)
            continue;
        if (!t->frozen[i])
            AR_TRY(toy_add(ctx, params[i], i, micro, step));
        AR_TRY(ari_param_done(params[i], ctx));
    }
    return AR_OK;
}

static inline ar_status toy_step(ar_ctx *ctx, const toy *t, ar_param **params, ar_ddp *d, int step)
{
    const int micro = t->micro > 1 ? t->micro : 1;
    if (t->plain) {
        for (size_t i = 0; i < t->n; i++)
            AR_TRY(ari_param_zero_grad(params[i], ctx));
        for (int m = 0; m < micro; m++)
            AR_TRY(toy_pass(ctx, t, params, m, step));
        return ari_params_reduce(params, t->n, ctx);
    }
    AR_TRY(ar_ddp_start(d));
    for (int m = 0; m < micro; m++) {
        ar_ddp_set_sync(d, !t->by_hand && m + 1 == micro);
        AR_TRY(toy_pass(ctx, t, params, m, step));
    }
    if (t->twice)
        AR_TRY(toy_pass(ctx, t, params, micro - 1, step));
    return t->by_hand ? ar_ddp_reduce_gradients(d) : ar_ddp_wait(d);
}

static inline void toy_describe(toy_result *out, const ar_ddp *d)
{
    const char *names[TOY_MOST];
    size_t used = 0;
    for (size_t b = 0; b < ar_ddp_buckets(d); b++) {
        const ar_bucket_info info = ari_ddp_bucket(d, b);
        for (size_t i = 0; i < info.params; i++)
            used += (size_t)snprintf(out->buckets + used, sizeof out->buckets - used, "%s%s%s",
                                     i > 0   ? " "
                                     : b > 0 ? " ["
                                             : "[",
                                     info.param[i]->name, i + 1 == info.params ? "]" : "");
    }
    used = 0;
    const size_t n = ar_ddp_unused(d, names, TOY_MOST);
    for (size_t i = 0; i < n; i++)
        used += (size_t)snprintf(out->unused + used, sizeof out->unused - used, "%s%s", i > 0 ? " " : "", names[i]);
    out->bytes = ari_ddp_bytes(d);
}

static inline ar_status toy_gradients(toy_result *out, ar_ctx *ctx, const toy *t, ar_param **params)
{
    size_t at = 0;
    for (size_t i = 0; i < t->n; i++) {
        AR_TRY(rank_read_gradient(ctx, out->grad + at, params[i]));
        out->has[i] = params[i]->has_grad;
        at += t->size[i];
    }
    return AR_OK;
}

/* Of those that sum gradients. */
static inline uint64_t toy_collectives(const ar_ctx *ctx)
{
    return ari_ctx_calls(ctx, "all_reduce") + ari_ctx_calls(ctx, "all_to_all") + ari_ctx_calls(ctx, "all_gather");
}

static inline ar_status toy_work(ar_ctx *ctx, const toy *t, ar_param **params, ar_ddp *d, toy_result *out)
{
    uint64_t read = 0, written = 0, read_before = 0, written_before = 0;
    if (t->body)
        return t->body(ctx, d, params, t->n, out);
    const uint64_t calls = toy_collectives(ctx);
    ari_ctx_counted(ctx, &read_before, &written_before);
    for (int s = 0; s < (t->steps > 1 ? t->steps : 1); s++)
        AR_TRY(toy_step(ctx, t, params, d, s));
    ari_ctx_counted(ctx, &read, &written);
    out->moved = read + written - read_before - written_before;
    out->collectives = toy_collectives(ctx) - calls;
    AR_TRY(toy_gradients(out, ctx, t, params));
    if (d)
        toy_describe(out, d);
    return AR_OK;
}

static inline ar_status toy_main(ar_ctx *ctx, void *user)
{
    toy *t = user;
    const int tp = ar_comm_size(ar_ctx_tp(ctx));
    toy_result *out = &t->rank[ar_comm_rank(ar_ctx_dp(ctx)) * tp + ar_comm_rank(ar_ctx_tp(ctx))];
    SCOPED(rank_params_end) rank_params p;
    OWNED(ar_ddp_destroy) ar_ddp *d = NULL;
    rank_params_begin(&p);
    out->how = t->how;
    for (size_t i = 0; i < t->n; i++)
        AR_TRY(toy_init(p.all[i], ctx, t, i));
    if (!t->plain)
        AR_TRY(ar_ddp_create_params(&d, ctx, "toy", p.all, t->n, &t->ddp));
    return toy_work(ctx, t, p.all, d, out);
}

/* With the ranks' results in t->rank. The message is in ar_error_message. */
static inline ar_status toy_run(toy *t)
{
    memset(t->rank, 0, sizeof t->rank);
    return rank_run(&t->run, toy_main, t);
}
