/* SPDX-License-Identifier: Apache-2.0 */
/* A layer of one's own, y = x + s * (x W^T) with a matrix W and a scale s for each feature: forward, backward, its
 * parameters, and nothing about ranks. The library trains it under DDP, checks it on four ranks, and finds the mistake
 * in a backward pass that forgets s. */
#include "anyrank/check_module.h"
#include <stdio.h>
#include <stdlib.h>

enum { WIDTH = 6, SAMPLES = 20, SAVED_X = 0, SAVED_F = 1 };

typedef struct scaled_residual {
    ar_module base; /* first */
    ar_param weight, scale;
    bool forgetful;
} scaled_residual;

static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    scaled_residual *l = (scaled_residual *)m;
    ar_tensor f, s, sf;
    (void)batch;
    AR_TRY(ar_contract(ctx, &f, x, &l->weight)); /* f = x W^T */
    AR_TRY(ar_spread_rows(ctx, &s, &l->scale.value, &f));
    AR_TRY(ar_mul(ctx, &sf, &s, &f));
    AR_TRY(ar_saved_push(saved, l, SAVED_X, x)); /* not in l: several forward passes may be under way */
    AR_TRY(ar_saved_push(saved, l, SAVED_F, &f));
    return ar_add(ctx, y, x, &sf);
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    scaled_residual *l = (scaled_residual *)m;
    ar_tensor x, f, s, df, ds, through;
    (void)batch;
    AR_TRY(ar_saved_pop(saved, l, SAVED_F, &f));
    AR_TRY(ar_saved_pop(saved, l, SAVED_X, &x));
    AR_TRY(ar_mul(ctx, &ds, dy, &f)); /* ds = the sum of dy * f over all rows of all samples */
    AR_TRY(ar_grad_add_rows(ctx, &l->scale, &ds));
    AR_TRY(ar_spread_rows(ctx, &s, &l->scale.value, dy));
    AR_TRY(ar_mul(ctx, &df, dy, &s));
    AR_TRY(ar_contract_backward(ctx, &through, l->forgetful ? dy : &df, &x, &l->weight)); /* dW = df^T x */
    return dx ? ar_add(ctx, dx, dy, &through) : AR_OK;
}

static size_t params(const ar_module *m, ar_param **out, size_t cap)
{
    scaled_residual *l = (scaled_residual *)(uintptr_t)m;
    if (cap > 0)
        out[0] = &l->weight;
    if (cap > 1)
        out[1] = &l->scale;
    return 2;
}

static void destroy(ar_module *m)
{
    scaled_residual *l = (scaled_residual *)m;
    ar_param_fini(&l->weight);
    ar_param_fini(&l->scale);
    free(l);
}

static ar_status build(void *forgetful, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_module_ops ops = {
        .kind = "scaled_residual", .forward = forward, .backward = backward, .params = params, .destroy = destroy};
    const size_t matrix[] = {WIDTH, WIDTH}, vector[] = {WIDTH};
    scaled_residual *l = (scaled_residual *)calloc(1, sizeof *l);
    if (!l)
        return AR_ERR_MEMORY;
    *module = &l->base; /* the caller destroys it, also where what follows fails */
    l->forgetful = *(const bool *)forgetful;
    AR_TRY(ar_module_init(&l->base, &ops, "layer", AR_HELD_WHOLE));
    AR_TRY(ar_param_init_whole(&l->weight, ctx, "layer", "weight", 2, matrix, AR_INIT_XAVIER_NORMAL));
    AR_TRY(ar_param_init_whole(&l->scale, ctx, "layer", "scale", 1, vector, AR_INIT_UNIFORM_BIAS));
    return ar_squared_error_create(loss, ctx, "loss");
}

/* The task: to turn the features round by one place. */
static ar_status batch(void *user, int step, ar_batch *b)
{
    static float x[SAMPLES][WIDTH], t[SAMPLES][WIDTH];
    (void)user, (void)step;
    for (int i = 0; i < SAMPLES * WIDTH; i++)
        x[i / WIDTH][i % WIDTH] = t[i / WIDTH][(i + 1) % WIDTH] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
    *b = (ar_batch){.batch = SAMPLES, .input = x[0], .sample_ndim = 1, .sample_shape = {WIDTH}};
    b->target = t[0];
    b->target_width = WIDTH;
    return AR_OK;
}

int main(void)
{
    static char text[8192];
    bool forgetful[] = {false, true}, ok = true;
    const ar_parallel layouts[] = {{.dp = 4}, {.dp = 2, .micro_batches = 3}};
    const ar_ddp_options buckets = ar_ddp_defaults();
    ar_check_module_options o = {.run = {.steps = 20}, .parallel = layouts, .layouts = 2, .ddp = &buckets};
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    for (int i = 0; i < 2 && ok; i++) {
        const ar_module_case c = {i ? "forgets s" : "right", build, batch, &forgetful[i], false};
        bool right = false;
        ok = ar_prove_module(&right, text, sizeof text, &c, &o) == AR_OK && right == !forgetful[i];
        printf("%s\n", text);
    }
    return ok ? 0 : 1;
}
