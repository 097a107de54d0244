/* SPDX-License-Identifier: Apache-2.0 */
/* A loss of one's own, the mean absolute error: the mean of |y - target| over all elements. Two checks: every layout
 * gives the loss and the gradients of one rank, bit for bit, and the gradients are those of the loss. */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/layers.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 6, POSITIONS = 8, WIDTH = 4, SLOT_Y = 0 };

/* Number of targets in these rows: the loss is divided by that of the global batch. */
static size_t count_targets(const void *self, const ar_batch *batch)
{
    (void)self;
    return batch->batch * batch->target_width;
}

/* y on the host, after a check that the batch has a target for each element. The caller frees *y. */
static ar_status read_output(float **y, size_t *n, ar_ctx *ctx, const ar_tensor *t, const ar_batch *batch)
{
    *n = ar_tensor_count(t);
    if (!batch->target || *n != count_targets(NULL, batch))
        return AR_ERR_SHAPE;
    *y = (float *)malloc(*n * sizeof **y);
    return *y ? ar_ctx_download_floats(ctx, *y, *n, t) : AR_ERR_MEMORY;
}

/* Adds the terms |y - target|. */
static ar_status forward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                         const ar_batch *batch)
{
    float *value = NULL;
    size_t n = 0;
    ar_tensor terms;
    ar_status st = read_output(&value, &n, ctx, y, batch);
    for (size_t i = 0; st == AR_OK && i < n; i++)
        value[i] = fabsf(value[i] - batch->target[i]);
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &terms, AR_F32, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_upload_floats(ctx, &terms, value, n));
    AR_TRY_TO(done, st, ar_loss_add(loss, ctx, &terms));
    AR_TRY_TO(done, st, ar_saved_push(saved, self, SLOT_Y, y));
done:
    free(value);
    return st;
}

/* dy = sign(y - target)/t, where t is the number of targets of the global batch. */
static ar_status backward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch,
                          double t)
{
    float *value = NULL;
    size_t n = 0;
    ar_tensor y;
    (void)loss;
    AR_TRY(ar_saved_pop(saved, self, SLOT_Y, &y));
    ar_status st = read_output(&value, &n, ctx, &y, batch);
    for (size_t i = 0; st == AR_OK && i < n; i++) {
        const float error = value[i] - batch->target[i];
        value[i] = t > 0.0 ? (float)((double)((error > 0.0f) - (error < 0.0f)) / t) : 0.0f;
    }
    AR_TRY_TO(done, st, ar_like(ctx, dy, &y));
    AR_TRY_TO(done, st, ar_ctx_upload_floats(ctx, dy, value, n));
done:
    free(value);
    return st;
}

static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_loss_ops ops = {"absolute_error", count_targets, forward, backward, free};
    static const size_t sample[2] = {POSITIONS, WIDTH};
    const ar_mlp_options o = {.hidden = WIDTH, .ffn = 16, .activation = AR_ACT_GELU_TANH, .bias = true};
    ar_module *layer[2] = {NULL};
    ar_status st = AR_OK;
    (void)user;
    AR_TRY_TO(made, st, ar_mlp_create(&layer[0], ctx, "mlp0", &o));
    AR_TRY_TO(made, st, ar_mlp_create(&layer[1], ctx, "mlp1", &o));
made:
    AR_TRY(ar_sequential_made(module, "net", layer, 2, st));
    AR_TRY(ar_sequential_cut(*module, ctx, 0, 2, 2, sample));  /* pipeline stages of one layer */
    return ar_loss_create(loss, ctx, "loss", &ops, malloc(1)); /* no options; owns what is saved */
}

static ar_status fill_batch(void *user, int step, ar_batch *batch)
{
    static float x[SAMPLES][POSITIONS][WIDTH], target[SAMPLES][POSITIONS][WIDTH];
    (void)user, (void)step;
    for (int i = 0; i < SAMPLES * POSITIONS * WIDTH; i++) {
        (&x[0][0][0])[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
        (&target[0][0][0])[i] = (float)((i * 6007 + 3571) % 1000) / 250.0f - 2.0f;
    }
    *batch = (ar_batch){
        .batch = SAMPLES, .seq = POSITIONS, .input = x[0][0], .sample_ndim = 2, .sample_shape = {POSITIONS, WIDTH}};
    batch->target = target[0][0];
    batch->target_width = POSITIONS * WIDTH;
    return AR_OK;
}

int main(void)
{
    const ar_parallel layouts[] = {{.dp = 3},
                                   {.tp = 2},
                                   {.tp = 2, .sp = true},
                                   {.cp = 4, .zigzag = true},
                                   {.tp = 2, .dp = 2, .micro_batches = 3},
                                   {.dp = 3, .zero = 3},
                                   {.pp = 2, .micro_batches = 2},
                                   {.dp = 2, .cp = 2}};
    const ar_module_case c = {"absolute error", build, fill_batch, NULL, false};
    ar_check_module_options o = {.run = {.steps = 3}, .parallel = layouts, .layouts = 8};
    static char text[16384];
    bool right = false;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    printf("%s", ar_prove_module(&right, text, sizeof text, &c, &o) ? ar_error_message() : text);
    return right ? 0 : 1;
}
