/* SPDX-License-Identifier: Apache-2.0 */
/* Data parallelism of two ways through a module, of which a rank's samples may take one alone: a gradient may be missing,
 * buckets go largest first, and a hook clips each element of a sum. */
#include "anyrank/check_module.h"
#include <stdio.h>
#include <stdlib.h>

enum { N = 6, W = 4 };

typedef struct ways {
    ar_module base; /* first */
    ar_param path[2];
} ways;

/* out = in + in W^T, W as a sample's label says; x: of a gradient, back. A W that no sample takes gets no gradient. */
static ar_status pass(ways *m, ar_ctx *ctx, ar_tensor *out, const ar_tensor *in, const ar_tensor *x,
                      const ar_batch *batch)
{
    *out = *in;
    for (int p = 0; p < 2; p++) {
        ar_tensor mask, chosen, part, sum = *out;
        float ones[N * W];
        bool any = false;
        for (size_t i = 0; i < ar_tensor_count(in); i++)
            any = (ones[i] = batch->labels[i / W] == p ? 1.0f : 0.0f) > 0.0f || any;
        if (!any)
            continue;
        AR_TRY(ar_like(ctx, &mask, in));
        AR_TRY(ar_ctx_upload_floats(ctx, &mask, ones, ar_tensor_count(in)));
        AR_TRY(ar_mul(ctx, &chosen, in, &mask));
        AR_TRY(x ? ar_contract_backward(ctx, &part, &chosen, x, &m->path[p])
                 : ar_contract(ctx, &part, &chosen, &m->path[p]));
        AR_TRY(ar_add(ctx, out, &sum, &part));
    }
    return AR_OK;
}

static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    AR_TRY(ar_saved_push(saved, m, 0, x));
    return pass((ways *)m, ctx, y, x, NULL, batch);
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    ar_tensor x, unused;
    AR_TRY(ar_saved_pop(saved, m, 0, &x));
    return pass((ways *)m, ctx, dx ? dx : &unused, dy, &x, batch);
}

static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_module_ops ops = {"ways", forward, backward, .params_at = offsetof(ways, path), .params_count = 2};
    const size_t shape[] = {W, W};
    ways *m = (ways *)calloc(1, sizeof *m);
    (void)user;
    if (!m)
        return AR_ERR_MEMORY;
    *module = &m->base;
    AR_TRY(ar_module_init(&m->base, &ops, "ways", AR_HELD_WHOLE));
    for (int i = 0; i < 2; i++)
        AR_TRY(ar_param_init_whole(&m->path[i], ctx, "ways", i ? "b" : "a", 2, shape, AR_INIT_NORMAL));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    static float x[N * W];
    static const int64_t way[][N] = {{0, 0, 0, 1, 1, 1}, {1, 1, 1, 1, 1, 1}}; /* in step 2 nobody takes 0 */
    (void)user;
    for (int i = 0; i < N * W; i++)
        x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
    *b = (ar_batch){.batch = N, .seq = 1, .labels = way[step == 2], .input = x, .sample_ndim = 1, .sample_shape = {W}};
    b->target = x, b->target_width = W;
    return AR_OK;
}

/* The rule that keeps it honest in exact numerics: a function of each element of the sum by itself. */
static ar_status clip(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n)
{
    (void)user, (void)b, (void)p, (void)start;
    for (size_t i = 0; i < n; i++)
        g[i] = g[i] > 0.05f ? 0.05f : g[i] < -0.05f ? -0.05f : g[i];
    return AR_OK;
}

int main(void)
{
    const ar_parallel layouts[] = {{.dp = 2}, {.dp = 3, .micro_batches = 2}, {.dp = 2, .zero = 1}};
    ar_ddp_options ddp = {.order = AR_BUCKETS_BY_SIZE, .find_unused = true, .hook = clip};
    const ar_module_case c = {"ways", build, batch, NULL, false};
    ar_check_module_options o = {.run = {.steps = 3}, .parallel = layouts, .layouts = 3, .ddp = &ddp};
    static char text[8192];
    bool right = false;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    printf("%s", ar_prove_module(&right, text, sizeof text, &c, &o) ? ar_error_message() : text);
    return right ? 0 : 1;
}
