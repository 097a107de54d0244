/* SPDX-License-Identifier: Apache-2.0 */
/* Two data-parallel objects at once, objects made and ended again and again, and hooks that come at the wrong time:
 * every rank has the sums that there are without an object. */
#include "anyrank/context.h"
#include "ref/layers/param_private.h"
#include "tests/support/row.h"
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

enum { RANKS = 3, MOST = 4 };

static toy four(ar_ddp_options o)
{
    return (toy){.n = MOST, .size = {5, 5, 5, 5}, .run.parallel = {.dp = RANKS}, .ddp = o};
}

/* Runs t, whose `body` makes a step of all parameters. */
static void expect_sums(toy *t, const char *what)
{
    toy plain = four(t->ddp);
    plain.plain = true;
    cr_assert_ok(toy_run(&plain));
    cr_assert_eq(toy_run(t), AR_OK, "%s: %s", what, ar_error_message());
    for (int r = 0; r < RANKS; r++)
        cr_expect_eq(memcmp(t->rank[r].grad, plain.rank[r].grad, sizeof plain.rank[r].grad), 0, "%s: rank %d", what, r);
}

static const toy all = {.n = MOST, .size = {5, 5, 5, 5}};

/* Parameters of two objects become ready in turns; which is waited for first changes from step to step. */
static ar_status two_objects(ar_ctx *ctx, ar_ddp *unused, ar_param **params, size_t n, toy_result *out)
{
    (void)unused, (void)n;
    const ar_ddp_options o = {.mode = out->how ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP};
    ar_param *const first[2] = {params[0], params[2]}, *const second[2] = {params[1], params[3]};
    OWNED(ar_ddp_destroy) ar_ddp *a = NULL, *b = NULL;
    AR_TRY(ar_ddp_create_params(&a, ctx, "first", first, 2, &o));
    AR_TRY(ar_ddp_create_params(&b, ctx, "second", second, 2, &o));
    for (int step = 2; step >= 0; step--) {
        AR_TRY(ar_ddp_start(a));
        AR_TRY(ar_ddp_start(b));
        AR_TRY(toy_pass(ctx, &all, params, 0, step));
        AR_TRY(ar_ddp_wait(step % 2 ? a : b));
        AR_TRY(ar_ddp_wait(step % 2 ? b : a));
    }
    return toy_gradients(out, ctx, &all, params);
}

/* The refused one leaves the first one's hooks alone. */
static ar_status refused_beside(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const ar_ddp_options o = ar_ddp_defaults();
    OWNED(ar_ddp_destroy) ar_ddp *second = NULL;
    if (ar_ddp_create_params(&second, ctx, "second", params + 1, n - 1, &o) != AR_ERR_ARG)
        return ar_error_set(AR_ERR_INTERNAL, "two objects of one parameter");
    AR_TRY(toy_step(ctx, &all, params, d, 0));
    return toy_gradients(out, ctx, &all, params);
}

/* In turns after a step, in the middle of one, and without one. */
static ar_status made_again(ar_ctx *ctx, ar_ddp *unused, ar_param **params, size_t n, toy_result *out)
{
    (void)unused;
    for (int i = 24; i >= 0; i--) {
        const ar_ddp_options turns = {.mode = i % 2 == 0 ? AR_BUCKETS_OVERLAP : AR_BUCKETS_EAGER};
        OWNED(ar_ddp_destroy) ar_ddp *d = NULL;
        AR_TRY(ar_ddp_create_params(&d, ctx, "again", params, n, &turns));
        if (i % 3 == 0)
            AR_TRY(toy_step(ctx, &all, params, d, i));
        if (i % 3 == 1) {
            AR_TRY(ar_ddp_start(d));
            ari_param_use(params[3]);
            AR_TRY(toy_add(ctx, params[3], 3, 0, i));
            AR_TRY(ari_param_done(params[3], ctx));
        }
    }
    return toy_gradients(out, ctx, &all, params);
}

/* Parameter p2 says twice that it is ready. */
static ar_status ready_twice(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    AR_TRY(ar_ddp_start(d));
    for (size_t i = n; i-- > 0;) {
        ari_param_use(params[i]);
        AR_TRY(toy_add(ctx, params[i], i, 0, 0));
        AR_TRY(ari_param_done(params[i], ctx));
        if (i == 2)
            AR_TRY(ari_param_done(params[i], ctx));
    }
    AR_TRY(ar_ddp_wait(d));
    return toy_gradients(out, ctx, &all, params);
}

static const struct {
    const char *what;
    ar_status (*body)(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out);
    bool own_objects; /* in place of the toy's */
    int how;
    ar_ddp_options options;
} cases[] = {
    ROW("two objects", two_objects, .own_objects = true),
    ROW("two objects, eager", two_objects, .own_objects = true, .how = 1),
    ROW("one object of a parameter", refused_beside, .options = {.bucket_bytes = 40}),
    ROW("made and ended at any time", made_again, .own_objects = true),
    ROW("ready twice in [p3 p2 p1] [p0]", ready_twice, .options = {.bucket_bytes = 60}),
    ROW("ready twice, eager", ready_twice, .options = {.mode = AR_BUCKETS_EAGER}),
    ROW("ready twice, behind p0 and p1", ready_twice, .options = {.order = AR_BUCKETS_BY_SIZE}),
};

Test(ddp_objects, whatever_becomes_of_others_gradients_are_the_sums)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        toy t = four(cases[i].options);
        t.body = cases[i].body;
        t.plain = cases[i].own_objects;
        t.how = cases[i].how;
        expect_sums(&t, cases[i].what);
    }
}

Test(ddp_objects, a_hook_that_comes_after_its_bucket_has_gone_is_an_error_that_names_the_parameter)
{
    toy t = four((ar_ddp_options){.bucket_bytes = 0});
    t.body = ready_twice;
    cr_expect_refused(toy_run(&t), AR_ERR_ARG, "the gradient of p2 changed after bucket 1 was reduced");
}

/* Rank 1 has no samples; parameter p1 gets zeros, which are a gradient. */
static ar_status some_samples(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    AR_TRY(ar_ddp_start(d));
    for (size_t i = n; i-- > 0 && ar_comm_rank(ar_ctx_dp(ctx)) != 1;) {
        const float values[5] = {i == 1 ? 0.0f : 1.0f};
        AR_TRY(rank_add_gradient(ctx, params[i], values));
    }
    AR_TRY(ar_ddp_wait(d));
    return toy_gradients(out, ctx, &all, params);
}

Test(ddp_objects, a_rank_without_samples_gets_the_others_sums_and_a_gradient_of_zeros_is_one)
{
    static const ar_ddp_options options[] = {
        {.bucket_bytes = 40}, {.bucket_bytes = 0, .mode = AR_BUCKETS_EAGER}, {.bucket_bytes = 0, .find_unused = true}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        toy t = four(options[i]);
        t.body = some_samples;
        cr_assert_ok(toy_run(&t));
        for (int r = 0; r < RANKS; r++) {
            for (size_t k = 0; k < MOST; k++) {
                cr_expect_eq(t.rank[r].grad[5 * k], k == 1 ? 0.0f : 2.0f, "rank %d, parameter %zu", r, k);
                cr_expect(t.rank[r].has[k], "rank %d, parameter %zu", r, k);
            }
        }
    }
}
