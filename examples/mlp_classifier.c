/* SPDX-License-Identifier: Apache-2.0 */
/* A model that is no transformer: an MLP learns which of two spirals a point lies on, with data-parallel training on
 * one rank and on four. Both reach the same weights, bit for bit. Then two checks: that every layout computes what one
 * rank computes, and that the gradients are those of the loss. */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/layers.h"
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { POINTS = 90, HIDDEN = 32, CLASSES = 2, STEPS = 300 };
static float points[POINTS][2];
static int64_t spiral[POINTS];

static void draw_spirals(void)
{
    for (int i = 0; i < POINTS; i++) {
        const double turn = 1.0 + 4.0 * (i / 2) / (POINTS / 2.0), side = i % 2 ? 1.0 : -1.0;
        points[i][0] = (float)(side * turn * cos(turn) / 3.0);
        points[i][1] = (float)(side * turn * sin(turn) / 3.0);
        spiral[i] = i % 2;
    }
}

/* Linear(2, 32) - GELU - Linear(32, 32) - GELU - Linear(32, 2); the middle is split over tensor-parallel ranks. */
static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    const ar_linear_options column = {.bias = true}, row = {.bias = true, .input_is_sharded = true};
    const ar_linear_options whole = {.bias = true, .gather_output = true};
    ar_module *m[5] = {NULL};
    ar_status st = AR_OK;
    (void)user;
    AR_TRY_TO(made, st, ar_column_linear_create(&m[0], ctx, "in", 2, HIDDEN, &column));
    AR_TRY_TO(made, st, ar_activation_create(&m[1], ctx, "act1", AR_ACT_GELU_ERF, AR_HELD_SHARD));
    AR_TRY_TO(made, st, ar_row_linear_create(&m[2], ctx, "middle", HIDDEN, HIDDEN, &row));
    AR_TRY_TO(made, st, ar_activation_create(&m[3], ctx, "act2", AR_ACT_GELU_ERF, AR_HELD_WHOLE));
    AR_TRY_TO(made, st, ar_column_linear_create(&m[4], ctx, "out", HIDDEN, CLASSES, &whole));
made:
    AR_TRY(ar_sequential_made(module, "mlp", m, 5, st));
    return ar_cross_entropy_create(loss, ctx, "loss", CLASSES, AR_HELD_WHOLE);
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    (void)user, (void)step;
    *b = (ar_batch){
        .batch = POINTS, .seq = 1, .labels = spiral, .input = points[0], .sample_ndim = 1, .sample_shape = {2}};
    return AR_OK;
}

/* Training by hand, as one rank does it. */
static ar_status train(ar_comm *world, void *losses)
{
    ar_ctx_options o = {.dp = world};
    ar_train_options step = {.parallel = {.dp = ar_comm_size(world), .micro_batches = 2}};
    ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    const ar_ddp_options buckets = ar_ddp_defaults();
    ar_ctx *ctx = NULL;
    ar_module *mlp = NULL;
    ar_loss *loss = NULL;
    ar_optimizer *optimizer = NULL;
    ar_param *params[16];
    ar_batch b;
    ar_train_result result;
    adamw.lr = 0.01;
    ar_status st = ar_device_cpu_create(&o.device, 1);
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &o));
    AR_TRY_TO(done, st, build(NULL, ctx, &mlp, &loss));
    AR_TRY_TO(done, st, ar_module_fresh(mlp, ctx, 42));
    AR_TRY_TO(done, st, ar_ddp_create(&step.ddp, ctx, mlp, &buckets));
    AR_TRY_TO(done, st, ar_optimizer_create(&optimizer, ctx, params, ar_module_params(mlp, params, 16, true), &adamw));
    AR_TRY_TO(done, st, batch(NULL, 1, &b));
    for (uint32_t i = 0; i < STEPS; i++) {
        AR_TRY_TO(done, st, ar_module_train_step(&result, mlp, loss, ctx, optimizer, &b, i + 1, &step));
        if (ar_comm_rank(world) == 0)
            ((float *)losses)[i] = result.loss;
    }
done:
    ar_optimizer_destroy(optimizer);
    ar_ddp_destroy(step.ddp);
    ar_loss_destroy(loss);
    ar_module_destroy(mlp);
    ar_ctx_destroy(ctx);
    ar_device_destroy(o.device);
    return st;
}

int main(void)
{
    static float one[STEPS], four[STEPS];
    static char text[8192];
    const ar_parallel layouts[] = {{.dp = 4}, {.tp = 2}, {.tp = 2, .dp = 2, .micro_batches = 3}, {.dp = 3, .zero = 1}};
    const ar_module_case c = {.name = "mlp", .build = build, .batch = batch};
    const ar_check_module_options o = {
        .run = {.steps = 3, .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW)}, .parallel = layouts, .layouts = 4};
    bool right = false;
    draw_spirals();
    bool ok = !ar_sim_run(1, NULL, train, one, NULL) && !ar_sim_run(4, NULL, train, four, NULL);
    const bool same = memcmp(one, four, sizeof one) == 0;
    printf("loss %.4f at first, %.4f after %d steps; on four ranks %s\n\n", (double)one[0], (double)one[STEPS - 1],
           STEPS, same ? "the same bits in every step" : "OTHER BITS");
    ok = ok && same && one[STEPS - 1] < 0.1f && !ar_prove_module(&right, text, sizeof text, &c, &o) && right;
    printf("%s", ok ? text : ar_error_message());
    return ok ? 0 : 1;
}
