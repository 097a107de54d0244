/* SPDX-License-Identifier: Apache-2.0 */
/* A module for a fault that no transformer shows, because a transformer uses all its parameters. */
#include "verify/faults/fault_case.h"

#include <stdlib.h>

#include "ref/core/size.h"

enum { WIDTH = 8, SAVED_X = 0 };

typedef struct pair {
    ar_module base;
    ar_param weight[2]; /* [WIDTH, WIDTH] weights; the second is unused */
} pair;

static ar_status pair_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                              const ar_batch *batch)
{
    pair *p = (pair *)m;
    (void)batch;
    AR_TRY(ar_saved_push(saved, p, SAVED_X, x));
    return ar_contract(ctx, y, x, &p->weight[0]);
}

static ar_status pair_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                               const ar_batch *batch)
{
    pair *p = (pair *)m;
    ar_tensor x;
    (void)batch;
    AR_TRY(ar_saved_pop(saved, p, SAVED_X, &x));
    return ar_contract_backward(ctx, dx, dy, &x, &p->weight[0]);
}

typedef struct samples {
    const ari_fault_case *fault_case;
    float *x; /* [2, fault_case->batch, WIDTH]: inputs, then targets */
} samples;

static ar_status build_pair(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_module_ops ops = {.kind = "pair",
                                      .forward = pair_forward,
                                      .backward = pair_backward,
                                      .params_at = offsetof(pair, weight),
                                      .params_count = 2};
    static const size_t shape[2] = {WIDTH, WIDTH};
    pair *p = NULL;
    (void)user;
    AR_TRY(ARI_ALLOC_ZERO(&p, 1, "a module"));
    *module = &p->base;
    AR_TRY(ar_module_init(&p->base, &ops, "pair", AR_HELD_UNKNOWN));
    AR_TRY(ar_param_init_whole(&p->weight[0], ctx, "pair", "weight", 2, shape, AR_INIT_XAVIER_NORMAL));
    AR_TRY(ar_param_init_whole(&p->weight[1], ctx, "pair", "spare", 2, shape, AR_INIT_XAVIER_NORMAL));
    return ar_squared_error_create(loss, ctx, "loss");
}

/* Creates a batch whose task is to flip all signs. */
static ar_status give_batch(void *user, int step, ar_batch *b)
{
    const samples *s = user;
    (void)step;
    *b = (ar_batch){.batch = s->fault_case->run.batch,
                    .input = s->x,
                    .sample_ndim = 1,
                    .sample_shape = {WIDTH},
                    .target_width = WIDTH};
    b->target = s->x + s->fault_case->run.batch * WIDTH;
    return AR_OK;
}

ar_status ari_fault_module_check(ar_check_report **out, const ari_fault_case *f, const char *fault,
                                 const ari_fault_bases *bases)
{
    samples s = {.fault_case = f};
    const size_t n = f->run.batch * WIDTH;
    const ar_module_case c = {.name = f->run.model, .build = build_pair, .batch = give_batch, .user = &s};
    const ar_check_module_options o = {.run = ari_fault_run_of(f, fault, bases->threads, bases->seed),
                                       .parallel = &f->run.parallel,
                                       .layouts = 1,
                                       .ddp = &f->run.ddp,
                                       .explain = bases->explain};
    AR_TRY(ARI_ALLOC(&s.x, 2 * n, "samples"));
    for (size_t i = 0; i < n; i++) {
        s.x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
        s.x[n + i] = -s.x[i];
    }
    const ar_status st = ar_check_module(out, &c, &o);
    free(s.x);
    return st;
}
