/* SPDX-License-Identifier: Apache-2.0 */
/* A list of parameters whose gradients are given by hand, trained by shares or as a whole. */
#pragma once

#include "anyrank/context.h"
#include "anyrank/ddp.h"
#include "anyrank/train.h"
#include "ref/context/context.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/param_private.h"
#include "ref/train/train_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "support/scoped.h"
#include "tests/support/test.h"

/* A transposed matrix, a matrix, a vector, and one number; the last gets no gradient where a case says so. */
enum { PARAMS = 4, MOST_RANKS = 8, STEPS = 4, MOST = 64, KINDS = 3 };
static const size_t shapes[PARAMS][2] = {{3, 7}, {5, 4}, {6, 0}, {1, 0}};
static const char *const names[PARAMS] = {"conv.weight", "linear.weight", "linear.bias", "gain"};
static const size_t counts[PARAMS] = {21, 20, 6, 1};

typedef struct values {
    float at[PARAMS][MOST];
} values;

typedef struct job {
    ar_optimizer_options options;
    ar_ddp_options ddp;
    int zero;                            /* stage of an optimizer of shares, over DDP; 0: of whole parameters */
    int silent;                          /* a parameter that never gets a gradient; -1: none */
    int apart;                           /* the first parameter of a DDP object of its own without ZeRO; 0: none */
    float clip;                          /* scale of the gradients */
    unsigned first, last;                /* steps, from 1 */
    const values *start, *state[KINDS];  /* state NULL: none is put back */
    values end[MOST_RANKS], kept[KINDS]; /* kept: put together from all ranks; NaN where no rank has given it */
    size_t bytes[MOST_RANKS];
    uint64_t versions[MOST_RANKS][PARAMS];
    float norm[MOST_RANKS];
} job;

/* What data-parallel rank r of n adds to the gradients: the terms of samples r, r + n, .. of 8. */
static inline ar_status add_gradients(ar_ctx *ctx, const job *j, ar_param **p, unsigned step)
{
    const size_t rank = (size_t)ar_comm_rank(ctx->dp), ranks = (size_t)ar_comm_size(ctx->dp);
    for (size_t sample = rank; sample < 8; sample += ranks) {
        for (size_t i = 0; i < PARAMS; i++) {
            float g[MOST];
            if ((int)i == j->silent)
                continue;
            fill_values(g, counts[i], (unsigned)(1000 * step + 10 * sample + i), 0.5);
            AR_TRY(rank_add_gradient(ctx, p[i], g));
        }
    }
    return AR_OK;
}

/* The first object of all or some parameters, the second of the others or NULL; NULL both: one rank alone. */
typedef struct reducers {
    ar_ddp *first, *second;
} reducers;

static inline void reducers_end(reducers *r)
{
    ar_ddp_destroy(r->second);
    ar_ddp_destroy(r->first);
}

static inline ar_status for_each_ddp(const reducers *r, ar_status (*f)(ar_ddp *))
{
    if (r->first)
        AR_TRY(f(r->first));
    return r->second ? f(r->second) : AR_OK;
}

static inline ar_status one_step(ar_ctx *ctx, job *j, ar_param **p, const reducers *r, ar_optimizer *o, unsigned step)
{
    for (size_t i = 0; i < PARAMS; i++)
        AR_TRY(ari_param_zero_grad(p[i], ctx));
    AR_TRY(for_each_ddp(r, ar_ddp_start));
    AR_TRY(add_gradients(ctx, j, p, step));
    AR_TRY(for_each_ddp(r, ar_ddp_wait));
    AR_TRY(ar_gradient_norm(&j->norm[ar_comm_rank(ctx->dp)], ctx, p, PARAMS));
    AR_TRY(ar_optimizer_step(o, ctx, j->clip));
    ar_ctx_end_step(ctx);
    return AR_OK;
}

static inline size_t index_of(const char *name)
{
    size_t i = 0;
    while (strcmp(names[i], name) != 0)
        i++;
    return i;
}

static inline size_t kind_of(const char *state)
{
    return strcmp(state, "master") == 0 ? 2 : strcmp(state, "exp_avg_sq") == 0;
}

/* Ranks write elements of their own; a copy is not theirs. */
static inline ar_status keep(void *user, const ar_param *p, const char *state, const ar_tensor *local,
                             const ar_layout *o)
{
    job *j = user;
    float *full = j->kept[kind_of(state)].at[index_of(p->name)];
    for (size_t k = 0; k < o->nbox && o->replica == 0; k++) {
        const ar_box *b = &o->box[k];
        const size_t cols = o->ndim > 1 ? b->extent[1] : 1, width = o->ndim > 1 ? o->shape[1] : 1;
        for (size_t r = 0; r < b->extent[0]; r++) {
            for (size_t c = 0; c < cols; c++) {
                const size_t at = (b->local[0] + r) * width + (o->ndim > 1 ? b->local[1] : 0) + c;
                const size_t to = (b->global[0] + r) * width + (o->ndim > 1 ? b->global[1] : 0) + c;
                full[to] = isnan(full[to]) ? ((const float *)local->data.ptr)[at] : 12345.0f; /* given twice */
            }
        }
    }
    return AR_OK;
}

static inline const float *find(void *user, const char *param, const char *state, size_t count)
{
    const job *j = user;
    const values *v = j->state[kind_of(state)];
    const size_t i = index_of(param);
    return v && count == counts[i] ? v->at[i] : NULL;
}

static inline ar_status make_reducers(reducers *r, ar_ctx *ctx, const job *j, ar_param **p)
{
    const size_t first = j->apart > 0 ? (size_t)j->apart : PARAMS;
    ar_ddp_options whole = j->ddp;
    if (!j->zero && ar_comm_size(ctx->dp) == 1)
        return AR_OK;
    AR_TRY(ar_ddp_create_params(&r->first, ctx, "list", p, first, &j->ddp));
    whole.zero = 0;
    return first < PARAMS ? ar_ddp_create_params(&r->second, ctx, "rest", p + first, PARAMS - first, &whole) : AR_OK;
}

static inline ar_status train(ar_ctx *ctx, job *j, ar_param **p)
{
    const size_t rank = (size_t)ar_comm_rank(ctx->dp);
    SCOPED(reducers_end) reducers r = {NULL, NULL};
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    uint64_t version[PARAMS];
    AR_TRY(make_reducers(&r, ctx, j, p));
    if (j->zero)
        AR_TRY(ar_optimizer_create_sharded(&o, ctx, r.first, &j->options));
    else
        AR_TRY(ar_optimizer_create(&o, ctx, p, PARAMS, &j->options));
    if (j->first > 1)
        AR_TRY(ar_optimizer_load(o, ctx, j->first - 1, find, j));
    for (size_t i = 0; i < PARAMS; i++)
        version[i] = p[i]->version;
    for (unsigned step = j->first; step <= j->last; step++)
        AR_TRY(one_step(ctx, j, p, &r, o, step));
    j->bytes[rank] = ari_optimizer_bytes(o);
    if (r.first)
        AR_TRY(ar_ddp_gather_parameters(r.first));
    for (size_t i = 0; i < PARAMS; i++) {
        j->versions[rank][i] = p[i]->version - version[i];
        AR_TRY(ar_ctx_download_floats(ctx, j->end[rank].at[i], ar_tensor_count(&p[i]->value), &p[i]->value));
    }
    return ar_optimizer_save(o, ctx, keep, j);
}

static inline ar_status rank_main(ar_ctx *ctx, void *user)
{
    job *j = user;
    SCOPED(rank_params_end) rank_params p;
    rank_params_begin(&p);
    for (size_t i = 0; i < PARAMS; i++) {
        ar_layout layout;
        AR_TRY(ari_layout_replicate(&layout, shapes[i][1] ? 2 : 1, shapes[i], 0, 1));
        AR_TRY(ar_param_init(p.all[i], ctx, names[i], &layout, i == 0));
        AR_TRY(ar_param_set(p.all[i], ctx, j->start->at[i]));
    }
    return train(ctx, j, p.all);
}

static inline void start_values(values *v)
{
    for (size_t i = 0; i < PARAMS; i++)
        fill_values(v->at[i], counts[i], (unsigned)i + 1, 2.0);
}

static inline job job_of(ar_optimizer_kind kind, const values *start)
{
    job j = {.options = ar_optimizer_defaults(kind),
             .ddp = ar_ddp_defaults(),
             .silent = -1,
             .clip = 0.375f,
             .first = 1,
             .last = STEPS,
             .start = start};
    j.options.lr = 0.05;
    j.options.momentum = kind == AR_OPTIMIZER_SGD ? 0.9 : 0.0;
    return j;
}

static inline void run_stored(job *j, int ranks, ar_numerics numerics, ar_dtype storage)
{
    const ar_run o = {.parallel.dp = ranks, .numerics = numerics, .storage = storage};
    j->ddp.zero = j->zero;
    for (size_t k = 0; k < KINDS; k++) {
        for (size_t i = 0; i < PARAMS * MOST; i++)
            j->kept[k].at[i / MOST][i % MOST] = NAN;
    }
    cr_assert_ok(rank_run(&o, rank_main, j));
}

static inline void run(job *j, int ranks, ar_numerics numerics)
{
    run_stored(j, ranks, numerics, AR_F32);
}

static inline void expect_same(const values *a, const values *b, const char *what)
{
    for (size_t i = 0; i < PARAMS; i++)
        cr_expect_eq(first_different_bits(a->at[i], b->at[i], counts[i]), counts[i], "%s: %s differs", what, names[i]);
}

/* Weights of every rank, and all state. */
static inline void expect_same_end(const job *got, int ranks, const job *want, const char *what)
{
    for (int r = 0; r < ranks; r++) {
        expect_same(&got->end[r], &want->end[0], what);
        cr_expect_eq(memcmp(&got->norm[r], &want->norm[0], sizeof(float)), 0, "%s: norm %a, not %a", what,
                     (double)got->norm[r], (double)want->norm[0]);
        cr_expect_eq(memcmp(got->versions[r], want->versions[0], sizeof want->versions[0]), 0, "%s: versions", what);
    }
    for (size_t k = 0; k < (got->options.kind == AR_OPTIMIZER_SGD ? 1 : 2); k++)
        expect_same(&got->kept[k], &want->kept[k], what);
}
