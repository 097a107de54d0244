/* SPDX-License-Identifier: Apache-2.0 */
/* A training loop by hand, without ar_module_train_step: micro-batches, an ar_ddp, gradient clipping. A thousand steps on
 * one rank and on three give the same losses, bit for bit, and no step needs more memory than the first. */
#include "anyrank/activation.h"
#include "anyrank/layers.h"
#include "anyrank/sim.h"
#include "anyrank/train.h"
#include <stdio.h>
#include <string.h>

enum { SAMPLES = 24, IN = 4, HIDDEN = 16, STEPS = 1000, MICRO_BATCHES = 2, PARAMS = 8 };
static float input[SAMPLES][IN], target[SAMPLES];

/* What rank 0 reports. */
typedef struct report {
    float loss[STEPS];
    size_t peak[STEPS]; /* most bytes of step memory so far, after each step */
} report;

/* The objects of one rank. */
typedef struct trainer {
    ar_ctx *ctx;
    ar_module *mlp;
    ar_loss *loss;
    ar_ddp *ddp;
    ar_optimizer *optimizer;
    ar_param *param[PARAMS];
    size_t params;
    ar_saved *saved;
} trainer;

/* Linear(4, 16) - GELU - Linear(16, 1), with the mean squared error. */
static ar_status build(trainer *t)
{
    const ar_linear_options column = {.bias = true}, row = {.bias = true, .input_is_sharded = true};
    ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    const ar_ddp_options buckets = ar_ddp_defaults();
    ar_module *layer[3] = {NULL};
    ar_status st = AR_OK;
    adamw.lr = 0.01;
    AR_TRY_TO(made, st, ar_column_linear_create(&layer[0], t->ctx, "up", IN, HIDDEN, &column));
    AR_TRY_TO(made, st, ar_activation_create(&layer[1], t->ctx, "act", AR_ACT_GELU_TANH, AR_HELD_SHARD));
    AR_TRY_TO(made, st, ar_row_linear_create(&layer[2], t->ctx, "down", HIDDEN, 1, &row));
made:
    AR_TRY(ar_sequential_made(&t->mlp, "mlp", layer, 3, st));
    AR_TRY(ar_module_fresh(t->mlp, t->ctx, 42));
    AR_TRY(ar_squared_error_create(&t->loss, t->ctx, "loss"));
    AR_TRY(ar_ddp_create(&t->ddp, t->ctx, t->mlp, &buckets)); /* equal weights on all ranks, hooks, buckets */
    t->params = ar_module_params(t->mlp, t->param, PARAMS, true);
    AR_TRY(ar_optimizer_create(&t->optimizer, t->ctx, t->param, t->params, &adamw));
    return ar_saved_create(&t->saved);
}

/* Forward and backward pass of `rows` samples from number `first` of the global batch. */
static ar_status run_micro_batch(trainer *t, size_t first, size_t rows)
{
    const size_t shape[2] = {rows, IN};
    ar_tensor x, y, dy;
    const ar_batch b = {.batch = rows,
                        .seq = 1,
                        .global_batch = SAMPLES,
                        .first_sample = first,
                        .targets = SAMPLES, /* by which the loss is divided, on every rank */
                        .target = target + first,
                        .target_width = 1};
    AR_TRY(ar_ctx_tensor(t->ctx, &x, AR_F32, 2, shape));
    AR_TRY(ar_ctx_upload_floats(t->ctx, &x, input[first], rows * IN));
    AR_TRY(ar_module_forward(ar_ddp_as_module(t->ddp), t->ctx, t->saved, &y, &x, &b));
    AR_TRY(ar_loss_forward(t->loss, t->ctx, t->saved, &y, &b));
    AR_TRY(ar_loss_backward(t->loss, t->ctx, t->saved, &dy, &b));
    return ar_module_backward(ar_ddp_as_module(t->ddp), t->ctx, t->saved, NULL, &dy, &b);
}

static ar_status run_step(trainer *t, uint32_t step, float *loss)
{
    const int rank = ar_comm_rank(ar_ctx_dp(t->ctx)), ranks = ar_comm_size(ar_ctx_dp(t->ctx));
    const size_t rows = (size_t)(SAMPLES / (ranks * MICRO_BATCHES));
    float norm;
    ar_ctx_begin_step(t->ctx, step);
    AR_TRY(ar_ddp_start(t->ddp)); /* gradients become zero */
    AR_TRY(ar_loss_zero(t->loss, t->ctx));
    for (int m = 0; m < MICRO_BATCHES; m++) {
        ar_ddp_set_sync(t->ddp, m + 1 == MICRO_BATCHES); /* the last backward pass starts the reductions */
        AR_TRY(run_micro_batch(t, (size_t)(rank * MICRO_BATCHES + m) * rows, rows));
        ar_ctx_end_step(t->ctx); /* frees the activations */
    }
    AR_TRY(ar_loss_value(t->loss, t->ctx, loss, SAMPLES));
    AR_TRY(ar_ddp_wait(t->ddp)); /* gradients are complete */
    AR_TRY(ar_gradient_norm(&norm, t->ctx, t->param, t->params));
    AR_TRY(ar_optimizer_step(t->optimizer, t->ctx, norm > 1.0f ? 1.0f / norm : 1.0f));
    ar_ctx_end_step(t->ctx); /* frees what these needed */
    return AR_OK;
}

static ar_status train(ar_comm *world, void *arg)
{
    report *r = (report *)arg;
    ar_ctx_options o = {.device = NULL, .tp = NULL, .dp = world};
    trainer t = {.ctx = NULL};
    ar_status st = ar_device_cpu_create(&o.device, 1);
    AR_TRY_TO(done, st, ar_ctx_create(&t.ctx, &o));
    AR_TRY_TO(done, st, build(&t));
    for (uint32_t i = 0; i < STEPS; i++) {
        float loss;
        AR_TRY_TO(done, st, run_step(&t, i + 1, &loss));
        if (ar_comm_rank(world) == 0) {
            r->loss[i] = loss;
            ar_ctx_memory(t.ctx, NULL, &r->peak[i]);
        }
    }
done:
    ar_saved_destroy(t.saved);
    ar_optimizer_destroy(t.optimizer);
    ar_ddp_destroy(t.ddp);
    ar_loss_destroy(t.loss);
    ar_module_destroy(t.mlp);
    ar_ctx_destroy(t.ctx);
    ar_device_destroy(o.device);
    return st;
}

int main(void)
{
    static report one, three;
    for (int i = 0; i < SAMPLES; i++) {
        for (int k = 0; k < IN; k++)
            input[i][k] = (float)((i * 7 + k * 5) % 11) / 11.0f - 0.5f;
        target[i] = input[i][0] * input[i][1] - input[i][2] + 0.5f;
    }
    if (ar_sim_run(1, NULL, train, &one, NULL) || ar_sim_run(3, NULL, train, &three, NULL)) {
        printf("%s\n", ar_error_message());
        return 1;
    }
    const bool same = memcmp(one.loss, three.loss, sizeof one.loss) == 0;
    const bool steady = one.peak[STEPS - 1] == one.peak[0] && three.peak[STEPS - 1] == three.peak[0];
    printf("loss %.6f in step 1, %.6f in step %d; on three ranks %s\n", (double)one.loss[0],
           (double)one.loss[STEPS - 1], STEPS, same ? "the same bits in every step" : "OTHER BITS");
    printf("step memory of rank 0: at most %zu bytes on one rank, %zu on three; %s\n", one.peak[STEPS - 1],
           three.peak[STEPS - 1], steady ? "no step needs more than the first" : "IT GROWS");
    return same && steady && one.loss[STEPS - 1] < one.loss[0] / 100 ? 0 : 1;
}
