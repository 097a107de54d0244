/* SPDX-License-Identifier: Apache-2.0 */
/* A plan that splits a norm and two products, and prepares the input of a module of one's own between them, which sees all
 * positions; and what finds a declaration of that input that is wrong. */
#include "anyrank/check_module.h"
#include "anyrank/plan_walk.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SAMPLES = 3, POSITIONS = 8, WIDTH = 8, FFN = 16, MODULES = 6 };

/* out_t = in_t + in_(t - 1), or of a gradient in_(t + 1). */
static ar_status add_neighbour(ar_ctx *ctx, ar_tensor *out, const ar_tensor *in, bool back)
{
    float x[SAMPLES * POSITIONS * WIDTH], y[SAMPLES * POSITIONS * WIDTH];
    const size_t n = ar_tensor_count(in), sample = n / in->shape[0];
    AR_TRY(ar_ctx_download_floats(ctx, x, sizeof x / sizeof *x, in));
    for (size_t i = 0; i < n; i++) {
        const bool alone = back ? i % sample + WIDTH >= sample : i % sample < WIDTH;
        y[i] = alone ? x[i] : x[i] + (back ? x[i + WIDTH] : x[i - WIDTH]);
    }
    AR_TRY(ar_like(ctx, out, in));
    return ar_ctx_upload_floats(ctx, out, y, n);
}

static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    (void)m, (void)saved, (void)batch;
    return add_neighbour(ctx, y, x, false);
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    (void)m, (void)saved, (void)batch;
    return dx ? add_neighbour(ctx, dx, dy, true) : AR_OK;
}

static ar_status shift_create(ar_module **gives)
{
    static const ar_module_ops ops = {.kind = "shift", .forward = forward, .backward = backward};
    *gives = (ar_module *)calloc(1, sizeof **gives);
    return *gives ? ar_module_init(*gives, &ops, "shift", AR_HELD_WHOLE) : AR_ERR_MEMORY;
}

static ar_status build(void *plan, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_plan_walk w = {.plan = (const ar_plan *)plan};
    ar_module *m[MODULES] = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(made, st, ar_plan_norm_create(&m[0], ctx, &w, "norm", AR_NORM_LAYER, WIDTH, 1e-5));
    AR_TRY_TO(made, st, ar_plan_prepare_create(&m[1], ctx, &w, "shift", 0, "x"));
    AR_TRY_TO(made, st, shift_create(&m[2]));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[3], ctx, &w, "up", WIDTH, FFN, true));
    AR_TRY_TO(made, st, ar_plan_linear_create(&m[4], ctx, &w, "down", FFN, WIDTH, true));
    AR_TRY_TO(made, st, ar_plan_redistribute_create(&m[5], ctx, &w, "out", (ar_placement){AR_REPLICATE, 0}));
    AR_TRY_TO(made, st, ar_plan_end(&w, "net"));
made:
    AR_TRY(ar_sequential_made(module, "net", m, MODULES, st));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *plan, int step, ar_batch *b)
{
    static float x[SAMPLES * POSITIONS * WIDTH];
    (void)plan, (void)step;
    for (int i = 0; i < SAMPLES * POSITIONS * WIDTH; i++)
        x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
    *b = (ar_batch){.batch = SAMPLES, .seq = 1, .input = x, .sample_ndim = 2, .sample_shape = {POSITIONS, WIDTH}};
    b->target = x;
    b->target_width = POSITIONS * WIDTH;
    return AR_OK;
}

/* The norm's style, and what the rule of shift declares to arrive: the norm leaves S(1), a rank's own positions, or R. */
#define RULES(style, from)                                                                                           \
    "{\"rules\": [{\"modules\": \"norm\", \"style\": \"" style "\"}, {\"modules\": \"up\", \"style\": \"colwise\"}," \
    " {\"modules\": \"shift\", \"style\": \"prepare\", \"named_input\": {\"x\": [\"" from "\", \"R\"]}},"            \
    " {\"modules\": \"down\", \"style\": \"rowwise\", \"output\": \"S(1)\"}]}"

int main(void)
{
    static const char *const rules[] = {RULES("sequence", "S(1)"), RULES("replicate", "P(sum)")};
    const ar_parallel layouts[] = {{.tp = 2}, {.tp = 2, .dp = 2}};
    ar_check_module_options o = {.parallel = layouts, .layouts = 2};
    static char said[8192];
    bool right[2] = {false, false};
    for (int i = 0; i < 2; i++) {
        ar_plan plan = {.rules = 0};
        const ar_module_case c = {i ? "wrong" : "right", build, batch, &plan, false};
        const ar_status st = ar_plan_parse(&plan, rules[i], strlen(rules[i]), c.name);
        printf("%s\n", st || ar_prove_module(&right[i], said, sizeof said, &c, &o) ? ar_error_message() : said);
        ar_plan_fini(&plan);
    }
    return right[0] && !right[1] ? 0 : 1;
}
