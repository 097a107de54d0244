/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters that a rank, or every rank, did without: the right gradients, or an error that names them, and never a
 * rank that waits for ever. */
#include "anyrank/ddp.h"
#include "anyrank/train.h"
#include "ref/layers/param_private.h"
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

/* Four parameters on three data-parallel ranks. Which ranks use p1, and in which of two micro-batches: */
enum { RANKS = 3, P1 = 1u << 1 };
typedef struct use {
    const char *what;
    unsigned skips[RANKS][2];
    bool complete; /* a rank that has samples has a gradient for p1 */
    bool anywhere;
} use;
static const use matrix[] = {
    {"by all", {{0}}, true, true},
    {"by one", {{P1, P1}, {0}, {P1, P1}}, false, true},
    {"by all but one", {{0}, {P1, P1}, {0}}, false, true},
    {"by none", {{P1, P1}, {P1, P1}, {P1, P1}}, false, false},
    {"by all in the first micro-batch", {{0, P1}, {0, P1}, {0, P1}}, true, true},
    {"by all in the last micro-batch", {{P1, 0}, {P1, 0}, {P1, 0}}, true, true},
    {"by some in the first, by others in the last", {{0, P1}, {P1, 0}, {0, P1}}, true, true},
    {"by one in the first", {{0, P1}, {P1, P1}, {P1, P1}}, false, true},
    {"by all; one rank has no samples", {{0}, {TOY_IDLE, TOY_IDLE}, {0}}, true, true},
    {"by all; one rank has one micro-batch", {{0}, {0, TOY_IDLE}, {0}}, true, true},
    {"by none; one rank has no samples", {{P1, P1}, {P1, P1}, {TOY_IDLE, TOY_IDLE}}, false, false},
};
enum { USES = sizeof matrix / sizeof *matrix };

static toy four(const use *u)
{
    toy t = {
        .n = 4, .size = {30, 20, 10, 5}, .micro = 2, .steps = 2, .run.parallel = {.dp = RANKS, .micro_batches = 2}};
    for (int r = 0; r < RANKS; r++)
        memcpy(t.skips[r], u->skips[r], sizeof u->skips[r]);
    return t;
}

/* The sum that accumulation without buckets gives. */
static void expect_right(const toy *t, const use *u)
{
    toy plain = *t;
    plain.plain = true;
    cr_assert_ok(toy_run(&plain));
    for (int r = 0; r < RANKS; r++) {
        cr_expect_eq(memcmp(t->rank[r].grad, plain.rank[r].grad, sizeof plain.rank[r].grad), 0, "used %s: rank %d",
                     u->what, r);
        cr_expect_eq(t->rank[r].has[1], u->anywhere, "used %s: rank %d", u->what, r);
        cr_expect(t->rank[r].has[0] && t->rank[r].has[3], "used %s: rank %d", u->what, r);
        cr_expect_str_eq(t->rank[r].unused, u->anywhere ? "" : "p1", "used %s: rank %d says '%s'", u->what, r,
                         t->rank[r].unused);
    }
}

static void run_all(ar_ddp_options ddp, bool native)
{
    for (size_t i = 0; i < USES; i++) {
        toy t = four(&matrix[i]);
        t.ddp = ddp;
        t.run.numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
        const ar_status st = toy_run(&t);
        if (ddp.find_unused || matrix[i].complete) {
            cr_assert_eq(st, AR_OK, "used %s: %s", matrix[i].what, ar_error_message());
            if (!native || ddp.bucket_bytes == 0) /* else the ring sums other slices */
                expect_right(&t, &matrix[i]);
            continue;
        }
        cr_expect_eq(st, AR_ERR_DATA, "used %s", matrix[i].what);
        cr_expect_not_null(strstr(ar_error_message(), "no gradient for 1 of 4 parameters: p1. "), "used %s: %s",
                           matrix[i].what, ar_error_message());
    }
}

/* Capacities of 0, of two parameters, of all. */
Test(ddp_unused, the_matrix_with_unused_parameters_looked_for)
{
    static const size_t capacity[] = {0, 120, 4000};
    for (size_t c = 0; c < 3; c++) {
        run_all((ar_ddp_options){.bucket_bytes = capacity[c], .find_unused = true}, false);
        run_all((ar_ddp_options){.bucket_bytes = capacity[c], .find_unused = true, .mode = AR_BUCKETS_EAGER}, false);
    }
    run_all((ar_ddp_options){.bucket_bytes = 0, .find_unused = true}, true);
    run_all((ar_ddp_options){.bucket_bytes = 120, .find_unused = true}, true);
}

Test(ddp_unused, the_matrix_without)
{
    static const size_t capacity[] = {0, 120, 4000};
    for (size_t c = 0; c < 3; c++) {
        run_all((ar_ddp_options){.bucket_bytes = capacity[c]}, false);
        run_all((ar_ddp_options){.bucket_bytes = capacity[c], .mode = AR_BUCKETS_EAGER}, false);
    }
    run_all((ar_ddp_options){.bucket_bytes = 0}, true);
    run_all((ar_ddp_options){.bucket_bytes = 120}, true);
}

/* Whatever rank 0 does with its error, the other one hears of it, too. */
static ar_status swallow(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const toy t = {.n = n, .size = {3, 4, 5}, .skips = {{P1}}};
    const ar_status st = toy_step(ctx, &t, params, d, 0);
    if (st != AR_OK)
        snprintf(out->buckets, sizeof out->buckets, "%.200s", ar_error_message());
    return AR_OK;
}

Test(ddp_unused, a_rank_to_which_nothing_is_missing_is_told_the_name)
{
    toy t = {.n = 3, .size = {3, 4, 5}, .run.parallel = {.dp = 2}, .body = swallow, .ddp = {.bucket_bytes = 1000}};
    for (int mode = 0; mode < 2; mode++) {
        t.ddp.mode = mode ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        cr_expect_neq(toy_run(&t), AR_OK);
        for (int r = 0; r < 2; r++)
            cr_expect_not_null(strstr(t.rank[r].buckets, "no gradient for 1 of 3 parameters: p1."), "rank %d: %s", r,
                               t.rank[r].buckets);
    }
}

Test(ddp_unused, one_rank_is_held_to_the_same)
{
    toy t = {.n = 3, .size = {3, 4, 5}, .skips = {{P1}}, .run.parallel = {.dp = 1}};
    cr_expect_eq(toy_run(&t), AR_ERR_DATA);
    t.ddp.find_unused = true;
    cr_assert_ok(toy_run(&t));
    cr_expect_str_eq(t.rank[0].unused, "p1");
    cr_expect(!t.rank[0].has[1] && t.rank[0].has[0]);
}

Test(ddp_unused, many_names_are_cut_and_counted)
{
    toy t = {.n = 8, .size = {1, 1, 1, 1, 1, 1, 1, 1}, .skips = {{0}, {0x7e}}, .run.parallel = {.dp = 2}};
    cr_expect_refused(toy_run(&t), AR_ERR_DATA,
                      "rank 1 has no gradient for 6 of 8 parameters: p1, p2, p3, p4 and 2 more.");
}

Test(ddp_unused, frozen_parameters_are_not_missing)
{
    toy t = {
        .n = 3, .size = {3, 4, 5}, .frozen = {false, true, false}, .skips = {{P1}, {P1}}, .run.parallel = {.dp = 2}};
    for (int find = 0; find < 2; find++) {
        t.ddp.find_unused = find != 0;
        cr_assert_ok(toy_run(&t));
        cr_expect_str_eq(t.rank[0].unused, "");
        cr_expect(!t.rank[0].has[1]);
    }
}

static ar_status thaw(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)ctx, (void)n, (void)out;
    params[1]->requires_grad = true;
    return ar_ddp_start(d);
}

/* Frozen later, it has no gradient and nobody misses it. */
static ar_status freeze(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const toy t = {.n = n, .size = {3, 4, 5}, .skips = {{P1}, {P1}}};
    params[1]->requires_grad = false;
    AR_TRY(toy_step(ctx, &t, params, d, 0));
    out->has[5] = params[0]->has_grad && !params[1]->has_grad;
    return AR_OK;
}

Test(ddp_unused, a_parameter_thawed_after_creation_is_refused_and_a_frozen_one_left_alone)
{
    toy t = {.n = 3, .size = {3, 4, 5}, .frozen = {false, true, false}, .run.parallel = {.dp = 2}, .body = thaw};
    cr_expect_refused(toy_run(&t), AR_ERR_ARG, "p1 requires a gradient, but did not");
    t.frozen[1] = false;
    t.body = freeze;
    cr_assert_ok(toy_run(&t));
    cr_expect(t.rank[0].has[5] && t.rank[1].has[5]);
}

/* Without an object: the optimizer leaves what no rank has used alone, as it does on one rank. */
static ar_status update_plainly(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const ar_optimizer_options options = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    const toy t = {.n = n, .size = {3, 4, 5}, .plain = true, .skips = {{P1 | 1}, {P1}}};
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    (void)d;
    for (size_t i = 0; i < n; i++)
        AR_TRY(ari_param_fresh(params[i], ctx, 3));
    AR_TRY(ar_optimizer_create(&o, ctx, params, n, &options));
    AR_TRY(toy_step(ctx, &t, params, NULL, 0));
    AR_TRY(ar_optimizer_step(o, ctx, 1.0f));
    out->has[0] = params[0]->has_grad;
    out->has[1] = params[1]->has_grad;
    out->bytes = params[1]->version;
    return AR_OK;
}

Test(ddp_unused, without_an_object_a_parameter_used_nowhere_keeps_no_gradient)
{
    for (int dp = 1; dp <= 2; dp++) {
        toy t = {.n = 3, .size = {3, 4, 5}, .plain = true, .run.parallel = {.dp = dp}, .body = update_plainly};
        cr_assert_ok(toy_run(&t));
        for (int r = 0; r < dp; r++) {
            cr_expect_eq(t.rank[r].has[0], dp > 1, "dp %d, rank %d: used by rank 1 alone", dp, r);
            cr_expect_not(t.rank[r].has[1], "dp %d, rank %d", dp, r);
            cr_expect_eq(t.rank[r].bytes, 3, "dp %d, rank %d: the version after creation and two draws", dp, r);
        }
    }
}

/* A pass that comes after the synchronised one: its gradients would stay this rank's own. */
static ar_status pass_late(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const toy t = {.n = n, .size = {3, 4, 5}};
    AR_TRY(ar_ddp_start(d));
    AR_TRY(toy_pass(ctx, &t, params, 0, 0));
    ar_ddp_set_sync(d, false);
    if (out->has[9]) /* after the end of the step it is the caller's own affair */
        AR_TRY(ar_ddp_wait(d));
    return toy_pass(ctx, &t, params, 1, 0);
}

static ar_status wait_first(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    out->has[9] = true;
    return pass_late(ctx, d, params, n, out);
}

Test(ddp_unused, a_pass_after_the_synchronised_one_is_refused_until_the_step_has_ended)
{
    toy t = {.n = 3, .size = {3, 4, 5}, .run.parallel = {.dp = 2}, .body = pass_late};
    cr_expect_refused(toy_run(&t), AR_ERR_ARG, "the gradient of p2 changed after bucket 0 was reduced");
    t.body = wait_first;
    cr_expect_ok(toy_run(&t));
}

/* A step in which p1 is used, then one in which it is not. */
static ar_status one_then_none(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    toy t = {.n = n, .size = {30, 20, 10, 5}};
    AR_TRY(toy_step(ctx, &t, params, d, 0));
    out->has[5] = params[1]->has_grad && ar_ddp_unused(d, NULL, 0) == 0;
    for (int r = 0; r < RANKS; r++)
        t.skips[r][0] = P1;
    AR_TRY(toy_step(ctx, &t, params, d, 1));
    out->has[6] = !params[1]->has_grad && ar_ddp_unused(d, NULL, 0) == 1;
    AR_TRY(ar_ddp_start(d));
    out->has[7] = ar_ddp_unused(d, NULL, 0) == 0;
    return toy_gradients(out, ctx, &t, params);
}

Test(ddp_unused, the_query_is_about_the_last_step)
{
    toy t = four(&matrix[0]);
    t.body = one_then_none;
    t.ddp.find_unused = true;
    cr_assert_ok(toy_run(&t));
    for (int r = 0; r < RANKS; r++)
        cr_expect(t.rank[r].has[5] && t.rank[r].has[6] && t.rank[r].has[7], "rank %d: %d %d %d", r, t.rank[r].has[5],
                  t.rank[r].has[6], t.rank[r].has[7]);
}
