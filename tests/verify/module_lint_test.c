/* SPDX-License-Identifier: Apache-2.0 */
/* A user's module judged without a number: what is right has no finding, twelve mistakes are named, and the same mistakes
 * are found by their numbers. */

#include "anyrank/activation.h"
#include "anyrank/loss.h"
#include "ref/layers/module_private.h"
#include "support/own_lm.h"
#include "support/rank_run.h"
#include "tests/support/test.h"
#include "verify/lint/lint_private.h"

OWNER(ar_module_inspection, ar_module_inspection_destroy)

enum { SAMPLES = 4, POSITIONS = 4, WIDTH = 8, FFN = 16 };

typedef enum mistake {
    RIGHT,
    TERMS_LEAVE,   /* what leaves is not summed */
    SUMMED_TWICE,  /* and here twice */
    DX_NOT_SUMMED, /* the gradient of what enters is not summed */
    DX_SUMMED_TWICE,
    HELD_AS_SHARD,      /* the whole is reported as a part */
    PART_HELD_AS_WHOLE, /* and a part as the whole */
    FUNCTION_OF_TERMS,
    ADDED_TO_TERMS,
    PRODUCT_OF_TERMS,
    GRADIENT_OF_OWN_POSITIONS, /* under sequence parallelism a vector's gradient is not summed */
    GRADIENT_SUMMED,           /* without it, it is */
    MARKED_AS_EXPERTS,         /* a matrix that every rank has */
    MISTAKES
} mistake;

/* y = (x + down(gelu(up(x)))) * scale */
typedef struct layer {
    ar_module base;
    ar_param up, down, scale;
    mistake mistake;
} layer;

enum { SAVED_IN, SAVED_UP, SAVED_ACT, SAVED_SUM };

/* What the mistake makes of the terms of the sum. */
static ar_status spoil_terms(const layer *l, ar_ctx *ctx, ar_tensor *terms, const ar_tensor *x)
{
    ar_tensor t = *terms;
    if (l->mistake == FUNCTION_OF_TERMS)
        return ar_bias_act_forward(ctx, terms, &t, NULL, AR_ACT_RELU);
    if (l->mistake == ADDED_TO_TERMS)
        return ar_add(ctx, terms, &t, x);
    return l->mistake == PRODUCT_OF_TERMS ? ar_mul(ctx, terms, &t, &t) : AR_OK;
}

static ar_status leave(const layer *l, ar_ctx *ctx, ar_tensor *y, const ar_tensor *terms)
{
    ar_tensor once;
    if (l->mistake == TERMS_LEAVE) {
        *y = *terms;
        return AR_OK;
    }
    AR_TRY(ar_leave_region(ctx, &once, terms));
    *y = once;
    return l->mistake == SUMMED_TWICE ? ar_reduce_from_region(ctx, y, &once) : AR_OK;
}

static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    layer *l = (layer *)m;
    ar_tensor in, up, act, terms, out, sum, scale;
    (void)batch;
    AR_TRY(ar_enter_region(ctx, &in, x));
    AR_TRY(ar_contract(ctx, &up, &in, &l->up));
    AR_TRY(ar_tap_value(ctx, "layer.up", 'f', &up, l->mistake == PART_HELD_AS_WHOLE ? AR_HELD_WHOLE : AR_HELD_SHARD));
    AR_TRY(ar_bias_act_forward(ctx, &act, &up, NULL, AR_ACT_GELU_TANH));
    AR_TRY(ar_contract(ctx, &terms, &act, &l->down));
    AR_TRY(spoil_terms(l, ctx, &terms, x));
    AR_TRY(leave(l, ctx, &out, &terms));
    AR_TRY(ar_add(ctx, &sum, x, &out));
    AR_TRY(ar_spread_rows(ctx, &scale, &l->scale.value, &sum));
    AR_TRY(ar_saved_push(saved, l, SAVED_IN, &in));
    AR_TRY(ar_saved_push(saved, l, SAVED_UP, &up));
    AR_TRY(ar_saved_push(saved, l, SAVED_ACT, &act));
    AR_TRY(ar_saved_push(saved, l, SAVED_SUM, &sum));
    return ar_mul(ctx, y, &sum, &scale);
}

static ar_status enter_backward(const layer *l, ar_ctx *ctx, ar_tensor *dx, const ar_tensor *din)
{
    ar_tensor once;
    if (l->mistake == DX_NOT_SUMMED) {
        *dx = *din;
        return AR_OK;
    }
    AR_TRY(ar_enter_region_backward(ctx, &once, din));
    *dx = once;
    return l->mistake == DX_SUMMED_TWICE ? ar_copy_to_region_backward(ctx, dx, &once) : AR_OK;
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    layer *l = (layer *)m;
    ar_tensor in, up, act, sum, scale, terms, dsum, dout, dact, dup, din, entered;
    (void)batch;
    AR_TRY(ar_saved_pop(saved, l, SAVED_SUM, &sum));
    AR_TRY(ar_saved_pop(saved, l, SAVED_ACT, &act));
    AR_TRY(ar_saved_pop(saved, l, SAVED_UP, &up));
    AR_TRY(ar_saved_pop(saved, l, SAVED_IN, &in));
    AR_TRY(ar_mul(ctx, &terms, dy, &sum));
    AR_TRY(ar_grad_add_rows(ctx, &l->scale, &terms));
    AR_TRY(ar_spread_rows(ctx, &scale, &l->scale.value, dy));
    AR_TRY(ar_mul(ctx, &dsum, dy, &scale));
    AR_TRY(ar_leave_region_backward(ctx, &dout, &dsum));
    AR_TRY(ar_contract_backward(ctx, &dact, &dout, &act, &l->down));
    AR_TRY(ar_bias_act_backward(ctx, &dup, &dact, &up, NULL, AR_ACT_GELU_TANH));
    AR_TRY(ar_contract_backward(ctx, &din, &dup, &in, &l->up));
    AR_TRY(enter_backward(l, ctx, &entered, &din));
    return dx ? ar_add(ctx, dx, &dsum, &entered) : AR_OK;
}

static size_t params(const ar_module *m, ar_param **out, size_t cap)
{
    layer *l = (layer *)(uintptr_t)m;
    ar_param *const all[] = {&l->up, &l->down, &l->scale};
    for (size_t i = 0; i < 3 && i < cap; i++)
        out[i] = all[i];
    return 3;
}

static void destroy(ar_module *m)
{
    OWNED(free) layer *l = (layer *)m;
    ar_param_fini(&l->up);
    ar_param_fini(&l->down);
    ar_param_fini(&l->scale);
}

static ar_status layer_create(ar_module **gives, ar_ctx *ctx, mistake of)
{
    static const ar_module_ops ops = {
        .kind = "layer", .forward = forward, .backward = backward, .params = params, .destroy = destroy};
    layer *l = calloc(1, sizeof *l);
    if (!l)
        return AR_ERR_MEMORY;
    *gives = &l->base;
    l->mistake = of;
    AR_TRY(ar_module_init(&l->base, &ops, "layer", of == HELD_AS_SHARD ? AR_HELD_SHARD : AR_HELD_WHOLE));
    AR_TRY(ar_param_init_shard(&l->up, ctx, "layer", "up", (size_t[]){FFN, WIDTH}, 0, AR_INIT_XAVIER_NORMAL));
    AR_TRY(ar_param_init_shard(&l->down, ctx, "layer", "down", (size_t[]){WIDTH, FFN}, 1, AR_INIT_XAVIER_NORMAL));
    AR_TRY(ar_param_init_whole(&l->scale, ctx, "layer", "scale", 1, (size_t[]){WIDTH}, AR_INIT_UNIFORM_BIAS));
    l->up.expert = of == MARKED_AS_EXPERTS;
    l->scale.spread = of == GRADIENT_OF_OWN_POSITIONS ? false : of == GRADIENT_SUMMED || l->scale.spread;
    return AR_OK;
}

/* Two of them, so that the first one's dx is wanted too. */
static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_module *m[2] = {NULL};
    ar_status st = ar_norm_create(&m[0], ctx, "norm", AR_NORM_RMS, WIDTH, 1e-5);
    if (st == AR_OK)
        st = layer_create(&m[1], ctx, *(const mistake *)user);
    if (st == AR_OK)
        st = ar_sequential_create(module, "net", m, 2, true);
    if (st != AR_OK) {
        ar_module_destroy(m[0]);
        ar_module_destroy(m[1]);
        return st;
    }
    return ar_squared_error_create(loss, ctx, "loss");
}

static float numbers[2][SAMPLES * POSITIONS * WIDTH];

static ar_status batch(void *user, int step, ar_batch *b)
{
    (void)user, (void)step;
    *b = (ar_batch){.batch = SAMPLES,
                    .seq = 1,
                    .input = numbers[0],
                    .sample_ndim = 2,
                    .sample_shape = {POSITIONS, WIDTH},
                    .target = numbers[1],
                    .target_width = POSITIONS * WIDTH};
    return AR_OK;
}

static ar_module_case case_of(const mistake *m)
{
    for (int i = 0; i < SAMPLES * POSITIONS * WIDTH; i++) {
        numbers[0][i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
        numbers[1][i] = (float)((i * 104729 + 7919) % 1000) / 500.0f - 1.0f;
    }
    return (ar_module_case){.name = "net", .build = build, .batch = batch, .user = (void *)(uintptr_t)m};
}

static ar_run run_of(ar_parallel parallel)
{
    return (ar_run){.steps = 1,
                    .threads = 1,
                    .parallel = parallel,
                    .ddp = ar_ddp_defaults(),
                    .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD)};
}

static ar_module_inspection *inspect(const ar_module_case *c, const ar_run *run)
{
    ar_module_inspection *m = NULL;
    cr_assert_ok(ar_inspect_module(&m, c, run));
    return m;
}

/* --- findings ----------------------------------------------------------------------------------------------------- */

static const struct {
    mistake mistake;
    ar_parallel parallel;
    ar_lint_rule rule;
    const char *module, *pass, *has, *needs;
} expected[] = {
    {TERMS_LEAVE, {.tp = 2}, AR_LINT_whole_added_to_partial, "layer", "forward", "P(sum)", "R"},
    {SUMMED_TWICE, {.tp = 2}, AR_LINT_redundant_reduction, "layer", "forward", "R", "P(sum)"},
    {DX_NOT_SUMMED, {.tp = 2}, AR_LINT_whole_added_to_partial, "layer", "backward", "P(sum)", "R"},
    {DX_SUMMED_TWICE, {.tp = 2}, AR_LINT_redundant_reduction, "layer", "backward", "R", "P(sum)"},
    {HELD_AS_SHARD, {.tp = 2}, AR_LINT_missing_slice, "layer", "forward", "R", "S(-1)"},
    {PART_HELD_AS_WHOLE, {.tp = 2}, AR_LINT_missing_gather, "layer.up", "forward", "S(-1)", "R"},
    {FUNCTION_OF_TERMS, {.tp = 2}, AR_LINT_nonlinear_of_partial, "layer", "forward", "P(sum)", "R"},
    {ADDED_TO_TERMS, {.tp = 2}, AR_LINT_whole_added_to_partial, "layer", "forward", "P(sum)", "R"},
    {PRODUCT_OF_TERMS, {.tp = 2}, AR_LINT_product_of_partials, "layer", "forward", "P(sum)", "P(sum)"},
    {GRADIENT_OF_OWN_POSITIONS,
     {.tp = 2, .sp = true},
     AR_LINT_unsummed_gradient,
     "layer.scale",
     "backward",
     "S(-2)",
     "R"},
    {GRADIENT_SUMMED, {.tp = 2}, AR_LINT_redundant_reduction, "layer.scale", "backward", "R", "S(-2)"},
    {MARKED_AS_EXPERTS, {.dp = 2, .ep = 2}, AR_LINT_wrong_placement, "layer.up", "forward", "I", "rows by expert"},
};
enum { EXPECTED = sizeof expected / sizeof *expected };

Test(module_lint, what_is_right_has_no_finding)
{
    static const ar_parallel layouts[] = {
        {.tp = 2}, {.tp = 4, .sp = true}, {.tp = 2, .sp = true, .cp = 2, .pp = 3, .micro_batches = 2}, {.dp = 2}};
    const mistake right = RIGHT;
    const own_lm lm = {.tied = false};
    const ar_module_case of[] = {case_of(&right), own_lm_case(&lm)};
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        for (size_t k = layouts[i].cp > 1 ? 1 : 0; k < 2; k++) {
            const ar_run run = run_of(layouts[i]);
            char text[4096];
            OWNED(ar_module_inspection_destroy) ar_module_inspection *m = inspect(&of[k], &run);
            ar_inspect_module_text(m, true, text, sizeof text);
            cr_expect_eq(m->lint->count, 0u, "%s", text);
            cr_expect_gt(m->operations, 10, "%s", text);
            cr_expect(m->memory.peak > 0);
        }
    }
}

Test(module_lint, mistakes_are_named_with_module_placements_and_repair)
{
    for (size_t i = 0; i < EXPECTED; i++) {
        const ar_module_case c = case_of(&expected[i].mistake);
        const ar_run run = run_of(expected[i].parallel);
        char text[4096];
        OWNED(ar_module_inspection_destroy) ar_module_inspection *m = inspect(&c, &run);
        ar_inspect_module_text(m, false, text, sizeof text);
        cr_expect_geq(m->lint->count, 1u, "mistake %zu: %s", i, text);
        const ar_lint_finding *f = m->lint->finding;
        if (m->lint->count == 0)
            continue;
        cr_expect_eq(f->rule, expected[i].rule, "mistake %zu: %s", i, text);
        cr_expect_str_eq(f->module, expected[i].module, "mistake %zu: %s", i, text);
        cr_expect_str_eq(f->pass, expected[i].pass, "mistake %zu: %s", i, text);
        cr_expect_str_eq(f->has, expected[i].has, "mistake %zu: %s", i, text);
        cr_expect_str_eq(f->needs, expected[i].needs, "mistake %zu: %s", i, text);
        cr_expect_str_not_empty(f->repair, "mistake %zu: %s", i, text);
    }
}

Test(module_lint, a_table_of_which_two_stages_have_copies_has_an_unsummed_gradient)
{
    for (int broken = 0; broken < 2; broken++) {
        const own_lm lm = {.tied = broken == 0, .copied = broken == 1};
        const ar_module_case c = own_lm_case(&lm);
        const ar_run run = run_of((ar_parallel){.pp = 2, .micro_batches = 2});
        OWNED(ar_module_inspection_destroy) ar_module_inspection *m = inspect(&c, &run);
        cr_assert_eq(m->lint->count, (size_t)broken);
        if (!broken)
            continue;
        cr_expect_eq(m->lint->finding[0].rule, AR_LINT_unsummed_gradient);
        cr_expect_str_eq(m->lint->finding[0].module, "embed.weight");
        cr_expect_str_eq(m->lint->finding[0].axis, "pp");
    }
}

Test(module_lint, the_same_mistakes_differ_from_one_rank_and_the_check_says_what_lint_found)
{
    for (size_t i = 0; i < EXPECTED; i++) {
        const ar_module_case c = case_of(&expected[i].mistake);
        const ar_check_module_options o = {
            .run = run_of((ar_parallel){.tp = 2}), .parallel = &expected[i].parallel, .layouts = 1};
        OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
        cr_assert_ok(ar_check_module(&r, &c, &o));
        cr_expect_neq(r->run[0].result, AR_CHECK_SAME, "mistake %zu", i);
        if (r->run[0].has_difference)
            cr_expect_not_null(strstr(r->run[0].first.hint, ari_lint_rule_name(expected[i].rule)), "mistake %zu: %s", i,
                               r->run[0].first.hint);
    }
}

/* --- a context that checks placements ----------------------------------------------------------------------------- */

static ar_status check_rank(ar_ctx *ctx, void *user)
{
    const mistake *m = user;
    OWNED(ar_module_destroy) ar_module *module = NULL;
    OWNED(ar_loss_destroy) ar_loss *loss = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    ar_batch b;
    ar_tensor x, y, dy;
    AR_TRY(build((void *)(uintptr_t)m, ctx, &module, &loss));
    AR_TRY(ar_module_fresh(module, ctx, 1));
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(batch(NULL, 1, &b));
    AR_TRY(ari_batch_input(ctx, &x, &b));
    AR_TRY(ar_module_forward(module, ctx, saved, &y, &x, &b));
    AR_TRY(ar_loss_forward(loss, ctx, saved, &y, &b));
    AR_TRY(ar_loss_backward(loss, ctx, saved, &dy, &b));
    AR_TRY(ar_module_backward(module, ctx, saved, NULL, &dy, &b));
    return AR_OK;
}

Test(module_lint, a_declared_placement_that_a_value_does_not_have_is_an_error_of_a_checking_context)
{
    mistake m = RIGHT;
    case_of(&m);
    const ar_run o = {.parallel.tp = 2, .placements = AR_DECLARED_CHECKED};
    cr_expect_ok(rank_run(&o, check_rank, &m));
    m = SUMMED_TWICE;
    cr_expect_eq(rank_run(&o, check_rank, &m), AR_ERR_DATA);
    cr_expect_not_null(
        strstr(ar_error_message(), "layer, reduce_from_region (forward): the value is R, and is declared P(sum)"), "%s",
        ar_error_message());
    cr_expect_not_null(strstr(ar_error_message(), "rank "), "%s", ar_error_message());
}
