/* SPDX-License-Identifier: Apache-2.0 */
/* A pre-norm transformer block of one's own, r = x + attention(norm1(x)), y = r + mlp(norm2(r)): a module of four
 * others, whose positions tensor-parallel (sp) and context-parallel ranks share out. */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/layers.h"
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 3, POSITIONS = 8, WIDTH = 8, PARTS = 4 };

typedef struct block {
    ar_module base; /* first */
    ar_module *part[PARTS];
} block;

/* By pairs of a norm and a branch: at + branch(norm(at)). */
static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    ar_module *const *part = ((block *)m)->part;
    ar_tensor at = *x, normed, out;
    for (int i = 0; i < PARTS; i += 2, at = *y) {
        AR_TRY(ar_module_forward(part[i], ctx, saved, &normed, &at, batch));
        AR_TRY(ar_module_forward(part[i + 1], ctx, saved, &out, &normed, batch));
        AR_TRY(ar_add(ctx, y, &at, &out));
    }
    return AR_OK;
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    ar_module *const *part = ((block *)m)->part;
    ar_tensor at = *dy, dnormed, through, sum;
    for (int i = PARTS - 2; i >= 0; i -= 2, at = sum) {
        AR_TRY(ar_module_backward(part[i + 1], ctx, saved, &dnormed, &at, batch));
        AR_TRY(ar_module_backward(part[i], ctx, saved, &through, &dnormed, batch));
        AR_TRY(ar_add(ctx, &sum, &at, &through));
    }
    if (dx)
        *dx = sum;
    return AR_OK;
}

static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_module_ops ops = {"block", forward, backward, .children_at = offsetof(block, part),
                                      .children_count = PARTS};
    const ar_attention_options a = {.hidden = WIDTH, .heads = 4, .kv_heads = 2, .head_dim = 2, .causal = true};
    const ar_mlp_options mlp = {.hidden = WIDTH, .ffn = 16, .activation = AR_ACT_GELU_TANH, .bias = true};
    block *b = (block *)calloc(1, sizeof *b);
    (void)user;
    if (!b)
        return AR_ERR_MEMORY;
    *module = &b->base;
    AR_TRY(ar_module_init(&b->base, &ops, "block", AR_HELD_WHOLE));
    AR_TRY(ar_norm_create(&b->part[0], ctx, "norm1", AR_NORM_LAYER, WIDTH, 1e-5));
    AR_TRY(ar_attention_create(&b->part[1], ctx, "attention", &a));
    AR_TRY(ar_norm_create(&b->part[2], ctx, "norm2", AR_NORM_LAYER, WIDTH, 1e-5));
    AR_TRY(ar_mlp_create(&b->part[3], ctx, "mlp", &mlp));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    static float x[SAMPLES * POSITIONS * WIDTH];
    (void)user, (void)step;
    for (int i = 0; i < SAMPLES * POSITIONS * WIDTH; i++)
        x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
    *b = (ar_batch){
        .batch = SAMPLES, .seq = POSITIONS, .input = x, .sample_ndim = 2, .sample_shape = {POSITIONS, WIDTH}};
    b->target = x;
    b->target_width = POSITIONS * WIDTH;
    return AR_OK;
}

int main(void)
{
    const ar_parallel layouts[] = {{.tp = 2, .sp = true}, {.cp = 4, .zigzag = true}, {.tp = 2, .cp = 2, .sp = true}};
    const ar_module_case c = {"own block", build, batch, NULL, false};
    ar_check_module_options o = {.run = {.steps = 3}, .parallel = layouts, .layouts = 3};
    static char text[8192];
    bool right = false;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    printf("%s", ar_prove_module(&right, text, sizeof text, &c, &o) ? ar_error_message() : text);
    return right ? 0 : 1;
}
