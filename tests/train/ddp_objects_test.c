/* SPDX-License-Identifier: Apache-2.0 */
/* Data-parallel objects over few parameters or none, two of them at once, made and ended again and again, and hooks
 * that come at the wrong time. */
#include "anyrank/ddp.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { MOST = 4, LENGTH = 5, MOST_RANKS = 4 };

typedef struct job {
    size_t params;
    ar_ddp_options options;
    ar_status status[MOST_RANKS];
    char text[MOST_RANKS][400];
    float grad[MOST_RANKS][MOST][LENGTH];
    bool has[MOST_RANKS][MOST];
} job;

typedef struct params {
    ar_param at[MOST], *list[MOST];
} params;

static ar_status make(params *p, ar_ctx *ctx, size_t n)
{
    static const char *const names[MOST] = {"a", "b", "c", "d"};
    const size_t length = LENGTH;
    ar_layout layout;
    for (size_t i = 0; i < n; i++) {
        AR_TRY(ar_layout_replicate(&layout, 1, &length, 0, 1));
        AR_TRY(ar_param_init(&p->at[i], ctx, names[i], &layout, false));
        AR_TRY(ar_ctx_device(ctx)->ops->zero(ar_ctx_device(ctx), NULL, p->at[i].value.data, LENGTH * sizeof(float)));
        p->list[i] = &p->at[i];
    }
    return AR_OK;
}

static void unmake(params *p)
{
    for (size_t i = 0; i < MOST; i++)
        ar_param_fini(&p->at[i]);
}

static ar_status add(ar_ctx *ctx, ar_param *p, float value)
{
    const float values[LENGTH] = {value, 2 * value, 0.0f, -value, value / 2};
    return rank_add_gradient(ctx, p, values);
}

static int dp_rank(const ar_ctx *ctx)
{
    return ar_comm_rank(ar_ctx_dp(ctx));
}

/* A pass that uses a parameter once: rank r adds (i + 1)(r + 1), 0 beyond `ranks`. */
static ar_status pass(ar_ctx *ctx, ar_param *p, size_t i)
{
    ar_param_use(p);
    AR_TRY(add(ctx, p, (float)((i + 1) * (size_t)(dp_rank(ctx) + 1))));
    return ar_param_done(p, ctx);
}

static ar_status read_grads(job *j, ar_ctx *ctx, const params *p)
{
    const int r = dp_rank(ctx);
    for (size_t i = 0; i < MOST && p->list[i]; i++) {
        AR_TRY(rank_read_gradient(ctx, j->grad[r][i], p->list[i]));
        j->has[r][i] = p->list[i]->has_grad;
    }
    return AR_OK;
}

/* What a rank does with some parameters and the object over them. */
typedef ar_status (*body_fn)(ar_ctx *ctx, job *j, ar_ddp *d, const params *p);

/* Wraps j->params of them, and leaves their gradients in the job. */
static ar_status wrapped(ar_ctx *ctx, job *j, const char *name, body_fn body)
{
    params p = {0};
    ar_ddp *d = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, make(&p, ctx, j->params));
    AR_TRY_TO(done, st, ar_ddp_create_params(&d, ctx, name, p.list, j->params, &j->options));
    AR_TRY_TO(done, st, body(ctx, j, d, &p));
    AR_TRY_TO(done, st, read_grads(j, ctx, &p));
done:
    ar_ddp_destroy(d);
    unmake(&p);
    return st;
}

/* --- small lists -------------------------------------------------------------------------------------------------- */

static ar_status step_once(ar_ctx *ctx, ar_ddp *d, const params *p, size_t n)
{
    AR_TRY(ar_ddp_start(d));
    for (size_t i = n; i-- > 0;)
        AR_TRY(pass(ctx, p->list[i], i));
    return ar_ddp_wait(d);
}

static ar_status three_steps(ar_ctx *ctx, job *j, ar_ddp *d, const params *p)
{
    for (int step = 0; step < 3; step++)
        AR_TRY(step_once(ctx, d, p, j->params));
    return AR_OK;
}

static ar_status train_list(ar_ctx *ctx, void *user)
{
    return wrapped(ctx, user, "few", three_steps);
}

static void expect_sums(const job *j, int ranks, size_t n, const char *what)
{
    for (int r = 0; r < ranks; r++) {
        for (size_t i = 0; i < n; i++) {
            const float sum = (float)((i + 1) * (size_t)(ranks * (ranks + 1) / 2));
            const float expected[LENGTH] = {sum, 2 * sum, 0.0f, -sum, sum / 2};
            cr_expect_eq(memcmp(j->grad[r][i], expected, sizeof expected), 0, "%s: rank %d of %d, parameter %zu: %g",
                         what, r, ranks, i, (double)j->grad[r][i][0]);
            cr_expect(j->has[r][i], "%s: rank %d, parameter %zu", what, r, i);
        }
    }
}

Test(ddp_objects, any_number_of_parameters_on_any_number_of_ranks_is_summed)
{
    static const ar_ddp_options options[] = {{.bucket_bytes = 0},
                                             {.bucket_bytes = 40, .mode = AR_BUCKETS_EAGER},
                                             {.bucket_bytes = 40, .find_unused = true},
                                             {.bucket_bytes = AR_BUCKET_BYTES, .order = AR_BUCKETS_BY_SIZE}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        for (int ranks = 1; ranks <= 3; ranks++) {
            for (size_t n = 0; n <= MOST; n += n < 2 ? 1 : 2) {
                static job j;
                const rank_run_options o = {.ranks = ranks, .dp = ranks, .numerics = (ar_numerics)(n % 2)};
                j = (job){.params = n, .options = options[i]};
                cr_assert_ok(rank_run(&o, train_list, &j));
                expect_sums(&j, ranks, n, "one object");
            }
        }
    }
}

/* --- two objects -------------------------------------------------------------------------------------------------- */

/* Parameters of the two become ready in turns. */
static ar_status train_two(ar_ctx *ctx, void *user)
{
    job *j = user;
    params p = {0};
    ar_ddp *d[2] = {NULL, NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, make(&p, ctx, MOST));
    ar_param *const first[2] = {p.list[0], p.list[2]}, *const second[2] = {p.list[1], p.list[3]};
    AR_TRY_TO(done, st, ar_ddp_create_params(&d[0], ctx, "first", first, 2, &j->options));
    AR_TRY_TO(done, st, ar_ddp_create_params(&d[1], ctx, "second", second, 2, &j->options));
    for (int step = 0; step < 3; step++) {
        AR_TRY_TO(done, st, ar_ddp_start(d[0]));
        AR_TRY_TO(done, st, ar_ddp_start(d[1]));
        for (size_t i = MOST; i-- > 0;)
            AR_TRY_TO(done, st, pass(ctx, p.list[i], i));
        AR_TRY_TO(done, st, ar_ddp_wait(d[step % 2]));
        AR_TRY_TO(done, st, ar_ddp_wait(d[1 - step % 2]));
    }
    AR_TRY_TO(done, st, read_grads(j, ctx, &p));
done:
    ar_ddp_destroy(d[0]);
    ar_ddp_destroy(d[1]);
    unmake(&p);
    return st;
}

Test(ddp_objects, two_over_disjoint_parameters_do_not_disturb_each_other)
{
    static const ar_bucket_mode modes[] = {AR_BUCKETS_OVERLAP, AR_BUCKETS_EAGER};
    for (size_t i = 0; i < 2; i++) {
        static job j;
        const rank_run_options o = {.ranks = 4, .dp = 4};
        j = (job){.options = {.mode = modes[i]}};
        cr_assert_ok(rank_run(&o, train_two, &j));
        expect_sums(&j, 4, MOST, "two objects");
    }
}

static ar_status wrap_again(ar_ctx *ctx, job *j, ar_ddp *first, const params *p)
{
    const int r = dp_rank(ctx);
    OWNED(ar_ddp_destroy) ar_ddp *second = NULL;
    j->status[r] = ar_ddp_create_params(&second, ctx, "second", p->list + 1, 1, &j->options);
    snprintf(j->text[r], sizeof j->text[r], "%s", ar_error_message());
    return step_once(ctx, first, p, 2);
}

static ar_status share_one(ar_ctx *ctx, void *user)
{
    return wrapped(ctx, user, "first", wrap_again);
}

Test(ddp_objects, one_parameter_belongs_to_one_of_them)
{
    static job j;
    const rank_run_options o = {.ranks = 2, .dp = 2};
    j = (job){.params = 2};
    cr_assert_ok(rank_run(&o, share_one, &j));
    for (int r = 0; r < 2; r++) {
        cr_expect_eq(j.status[r], AR_ERR_ARG);
        cr_expect(strstr(j.text[r], "second: b belongs to another data-parallel object"), "%s", j.text[r]);
    }
    expect_sums(&j, 2, 2, "the first one"); /* which goes on as if nothing had happened */
}

/* --- made and ended ----------------------------------------------------------------------------------------------- */

/* In turns after a step, in the middle of one, and without one. */
static ar_status make_many(ar_ctx *ctx, void *user)
{
    job *j = user;
    params p = {0};
    ar_ddp *d = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, make(&p, ctx, MOST));
    for (int i = 0; i < 24; i++) {
        const ar_ddp_options turns = {.mode = i % 2 == 0 ? AR_BUCKETS_OVERLAP : AR_BUCKETS_EAGER};
        AR_TRY_TO(done, st, ar_ddp_create_params(&d, ctx, "again", p.list, MOST, &turns));
        if (i % 3 == 0)
            AR_TRY_TO(done, st, step_once(ctx, d, &p, MOST));
        if (i % 3 == 1) {
            AR_TRY_TO(done, st, ar_ddp_start(d));
            AR_TRY_TO(done, st, pass(ctx, p.list[3], 3));
            AR_TRY_TO(done, st, pass(ctx, p.list[2], 2));
        }
        ar_ddp_destroy(d);
        d = NULL;
    }
    AR_TRY_TO(done, st, ar_ddp_create_params(&d, ctx, "last", p.list, MOST, &j->options));
    AR_TRY_TO(done, st, step_once(ctx, d, &p, MOST));
    AR_TRY_TO(done, st, read_grads(j, ctx, &p));
done:
    ar_ddp_destroy(d);
    unmake(&p);
    return st;
}

Test(ddp_objects, one_can_be_made_and_ended_at_any_time)
{
    static job j[MOST_RANKS];
    const rank_run_options o = {.ranks = 3, .dp = 3};
    memset(j, 0, sizeof j);
    cr_assert_ok(rank_run(&o, make_many, j));
    expect_sums(j, 3, MOST, "the last one");
}

/* --- hooks -------------------------------------------------------------------------------------------------------- */

/* Parameter c says twice that it is ready. */
static ar_status done_again(ar_ctx *ctx, job *j, ar_ddp *d, const params *p)
{
    (void)j;
    AR_TRY(ar_ddp_start(d));
    AR_TRY(pass(ctx, p->list[3], 3));
    AR_TRY(pass(ctx, p->list[2], 2));
    AR_TRY(ar_param_done(p->list[2], ctx));
    AR_TRY(pass(ctx, p->list[1], 1));
    AR_TRY(pass(ctx, p->list[0], 0));
    return ar_ddp_wait(d);
}

static ar_status ready_twice(ar_ctx *ctx, void *user)
{
    return wrapped(ctx, user, "net", done_again);
}

Test(ddp_objects, a_hook_that_comes_twice_counts_once_while_its_bucket_fills)
{
    static const ar_ddp_options options[] = {{.bucket_bytes = 60}, /* d, c and b; a */
                                             {.bucket_bytes = 0, .mode = AR_BUCKETS_EAGER},
                                             {.bucket_bytes = 0, .order = AR_BUCKETS_BY_SIZE}}; /* behind a and b */
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        static job j;
        const rank_run_options o = {.ranks = 2, .dp = 2};
        j = (job){.params = MOST, .options = options[i]};
        cr_assert_ok(rank_run(&o, ready_twice, &j));
        expect_sums(&j, 2, MOST, "ready twice");
    }
}

Test(ddp_objects, one_that_comes_after_its_bucket_has_gone_is_an_error_that_names_the_parameter)
{
    static job j;
    const rank_run_options o = {.ranks = 2, .dp = 2};
    j = (job){.params = MOST, .options = {.bucket_bytes = 0}};
    cr_expect_refused(rank_run(&o, ready_twice, &j), AR_ERR_ARG,
                      "net: the gradient of c changed after bucket 1 was reduced");
}

/* --- gradients of nothing ----------------------------------------------------------------------------------------- */

/* Rank 1 has no samples; parameter b gets zeros. */
static ar_status some_samples(ar_ctx *ctx, job *j, ar_ddp *d, const params *p)
{
    (void)j;
    AR_TRY(ar_ddp_start(d));
    for (size_t i = MOST; i-- > 0 && dp_rank(ctx) != 1;)
        AR_TRY(add(ctx, p->list[i], i == 1 ? 0.0f : 1.0f));
    return ar_ddp_wait(d);
}

static ar_status train_some(ar_ctx *ctx, void *user)
{
    return wrapped(ctx, user, "net", some_samples);
}

Test(ddp_objects, a_rank_without_samples_gets_the_others_sums_and_a_gradient_of_zeros_is_one)
{
    static const ar_ddp_options options[] = {
        {.bucket_bytes = 40}, {.bucket_bytes = 0, .mode = AR_BUCKETS_EAGER}, {.bucket_bytes = 0, .find_unused = true}};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        static job j;
        const rank_run_options o = {.ranks = 3, .dp = 3};
        j = (job){.params = MOST, .options = options[i]};
        cr_assert_ok(rank_run(&o, train_some, &j));
        for (int r = 0; r < 3; r++) {
            for (size_t k = 0; k < MOST; k++) {
                cr_expect_eq(j.grad[r][k][0], k == 1 ? 0.0f : 2.0f, "rank %d, parameter %zu", r, k);
                cr_expect(j.has[r][k], "rank %d, parameter %zu", r, k);
            }
        }
    }
}
