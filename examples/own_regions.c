/* SPDX-License-Identifier: Apache-2.0 */
/* A column-parallel and a row-parallel product by hand, y = (relu(x U^T)) D^T: f enters the tensor-parallel region, f*
 * leaves it, and with sequence parallelism they are g and g*. A lint finds where f* is forgotten. */
#include "anyrank/activation.h"
#include "anyrank/check_module.h"
#include "anyrank/layers.h"
#include <stdio.h>
#include <stdlib.h>

enum { SAMPLES = 4, POSITIONS = 8, WIDTH = 8, FFN = 16, SAVED_IN = 0, SAVED_UP, SAVED_ACT };

typedef struct regions {
    ar_module base;     /* first */
    ar_param weight[2]; /* U, D */
    bool forgets;       /* f* */
} regions;

static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    regions *l = (regions *)m;
    ar_tensor in, up, act, terms;
    (void)batch;
    AR_TRY(ar_enter_region(ctx, &in, x));              /* f */
    AR_TRY(ar_contract(ctx, &up, &in, &l->weight[0])); /* the own rows of U: the own features */
    AR_TRY(ar_bias_act_forward(ctx, &act, &up, NULL, AR_ACT_RELU));
    AR_TRY(ar_contract(ctx, l->forgets ? y : &terms, &act, &l->weight[1])); /* the own columns of D: terms of a sum */
    AR_TRY(ar_saved_push(saved, l, SAVED_IN, &in));
    AR_TRY(ar_saved_push(saved, l, SAVED_UP, &up));
    AR_TRY(ar_saved_push(saved, l, SAVED_ACT, &act));
    return l->forgets ? AR_OK : ar_leave_region(ctx, y, &terms); /* f* */
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    regions *l = (regions *)m;
    ar_tensor in, up, act, d, dact, dup, din;
    (void)batch;
    AR_TRY(ar_saved_pop(saved, l, SAVED_ACT, &act));
    AR_TRY(ar_saved_pop(saved, l, SAVED_UP, &up));
    AR_TRY(ar_saved_pop(saved, l, SAVED_IN, &in));
    AR_TRY(ar_leave_region_backward(ctx, &d, dy));
    AR_TRY(ar_contract_backward(ctx, &dact, &d, &act, &l->weight[1]));
    AR_TRY(ar_bias_act_backward(ctx, &dup, &dact, &up, NULL, AR_ACT_RELU));
    AR_TRY(ar_contract_backward(ctx, dx ? &din : NULL, &dup, &in, &l->weight[0]));
    return dx ? ar_enter_region_backward(ctx, dx, &din) : AR_OK;
}

static ar_status build(void *forgets, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    static const ar_module_ops ops = {"regions", forward, backward, .params_at = offsetof(regions, weight),
                                      .params_count = 2};
    const size_t up[] = {FFN, WIDTH}, down[] = {WIDTH, FFN};
    regions *l = (regions *)calloc(1, sizeof *l);
    if (!l)
        return AR_ERR_MEMORY;
    *module = &l->base;
    l->forgets = *(const bool *)forgets;
    AR_TRY(ar_module_init(&l->base, &ops, "mlp", AR_HELD_WHOLE));
    AR_TRY(ar_param_init_shard(&l->weight[0], ctx, "mlp", "up", up, 0, AR_INIT_XAVIER_NORMAL));
    AR_TRY(ar_param_init_shard(&l->weight[1], ctx, "mlp", "down", down, 1, AR_INIT_XAVIER_NORMAL));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    static float x[SAMPLES * POSITIONS * WIDTH]; /* the task: to give x back */
    (void)user, (void)step;
    for (int i = 0; i < SAMPLES * POSITIONS * WIDTH; i++)
        x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
    *b = (ar_batch){.batch = SAMPLES, .seq = 1, .input = x, .sample_ndim = 2, .sample_shape = {POSITIONS, WIDTH}};
    b->target = x;
    b->target_width = POSITIONS * WIDTH;
    return AR_OK;
}

int main(void)
{
    const ar_parallel layouts[] = {{.tp = 2}, {.tp = 4, .sp = true}, {.tp = 2, .dp = 2, .cp = 2}};
    bool forgets[] = {false, true};
    const ar_module_case right = {"regions", build, batch, &forgets[0], false};
    const ar_module_case wrong = {"no f*", build, batch, &forgets[1], false};
    ar_check_module_options o = {.run = {.parallel = {.tp = 2}, .steps = 2}, .parallel = layouts, .layouts = 3};
    static char text[2][8192];
    ar_module_inspection *m = NULL;
    bool ok = false;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    ar_status st = ar_prove_module(&ok, text[0], sizeof *text, &right, &o);
    if (st == AR_OK)
        st = ar_inspect_module(&m, &wrong, &o.run);
    if (st == AR_OK)
        ar_inspect_module_text(m, true, text[1], sizeof *text);
    printf("%s\n%s", st == AR_OK ? text[0] : ar_error_message(), text[1]);
    ok = ok && m && m->lint->count > 0;
    ar_module_inspection_destroy(m);
    return ok ? 0 : 1;
}
