/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO over a list of parameters whose gradients are given by hand, against one rank with an optimizer of whole
 * parameters: slices of every size, parameters without gradient, state that is kept and put back. */
#include "anyrank/train.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/param_private.h"
#include "tests/train/zero_run.h"

static const int rank_counts[] = {1, 2, 3, 5, 8};
static const size_t bucket_sizes[] = {0, 8, 100, AR_BUCKET_BYTES};

/* 48 elements over 5 ranks, a bias of 6 over 8, one number over any: slices are uneven or empty. */
Test(zero_params, every_bucket_size_and_number_of_ranks_has_one_ranks_bits)
{
    values start;
    start_values(&start);
    for (ar_optimizer_kind kind = AR_OPTIMIZER_SGD; kind <= AR_OPTIMIZER_ADAMW; kind++) {
        job one = job_of(kind, &start);
        run(&one, 1, AR_NUMERICS_EXACT);
        for (size_t n = 0; n < sizeof rank_counts / sizeof *rank_counts; n++) {
            for (size_t b = 0; b < sizeof bucket_sizes / sizeof *bucket_sizes; b++) {
                char what[96];
                job j = job_of(kind, &start);
                j.zero = 1 + (int)(n + b + kind) % 3;
                j.ddp.bucket_bytes = bucket_sizes[b];
                j.ddp.mode = n % 2 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
                j.ddp.order = b % 2 ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE;
                snprintf(what, sizeof what, "%s, %d ranks, zero=%d, buckets of %zu bytes", ari_optimizer_name(kind),
                         rank_counts[n], j.zero, bucket_sizes[b]);
                run(&j, rank_counts[n], AR_NUMERICS_EXACT);
                expect_same_end(&j, rank_counts[n], &one, what);
            }
        }
    }
}

Test(zero_params, native_shares_have_the_bits_of_whole_parameters_in_the_same_buckets)
{
    values start;
    start_values(&start);
    for (size_t b = 0; b < sizeof bucket_sizes / sizeof *bucket_sizes; b++) {
        job whole = job_of(AR_OPTIMIZER_ADAMW, &start), j = whole;
        whole.ddp.bucket_bytes = j.ddp.bucket_bytes = bucket_sizes[b];
        j.zero = 1 + (int)b % 3;
        run(&whole, 5, AR_NUMERICS_NATIVE);
        run(&j, 5, AR_NUMERICS_NATIVE);
        expect_same_end(&j, 5, &whole, "native");
    }
}

/* Two dtypes, so at least two buckets; the owner keeps the fp32 weights, the others get 16 bits. */
Test(zero_params, weights_stored_in_bf16_have_the_bits_of_whole_parameters)
{
    values start;
    start_values(&start);
    for (size_t b = 0; b < sizeof bucket_sizes / sizeof *bucket_sizes; b++) {
        job whole = job_of(AR_OPTIMIZER_ADAM, &start), j = whole;
        size_t bytes = 0;
        whole.ddp.bucket_bytes = j.ddp.bucket_bytes = bucket_sizes[b];
        j.zero = 1 + (int)b % 3;
        run_stored(&whole, 3, AR_NUMERICS_NATIVE, AR_BF16);
        run_stored(&j, 3, AR_NUMERICS_NATIVE, AR_BF16);
        expect_same_end(&j, 3, &whole, "bf16");
        expect_same(&j.kept[2], &whole.kept[2], "master");
        for (int r = 0; r < 3; r++)
            bytes += j.bytes[r];
        cr_expect_eq(bytes, sizeof(float) * (2 * 48 + 41), "%zu bytes: two moments, and the matrices", bytes);
        cr_expect_neq(j.kept[2].at[0][0], j.end[0].at[0][0], "the weight is not rounded");
    }
}

/* Some gradients are whole on each rank, others shared out. */
Test(zero_params, a_norm_counts_whole_and_shared_gradients_once)
{
    values start;
    start_values(&start);
    job one = job_of(AR_OPTIMIZER_ADAM, &start);
    run(&one, 1, AR_NUMERICS_EXACT);
    for (int apart = 1; apart < PARAMS; apart++) {
        job j = one;
        j.zero = 1;
        j.apart = apart;
        run(&j, 3, AR_NUMERICS_EXACT);
        cr_expect_eq(memcmp(&j.norm[2], &one.norm[0], sizeof(float)), 0, "%a, not %a", (double)j.norm[2],
                     (double)one.norm[0]);
    }
}

Test(zero_params, a_parameter_without_gradient_stays_and_so_does_its_state)
{
    values start;
    start_values(&start);
    for (int silent = 0; silent < PARAMS; silent++) {
        job one = job_of(AR_OPTIMIZER_ADAM, &start), j;
        one.silent = silent;
        run(&one, 1, AR_NUMERICS_EXACT);
        j = one;
        j.zero = 1 + silent % 3;
        j.ddp.find_unused = true;
        run(&j, 3, AR_NUMERICS_EXACT);
        expect_same_end(&j, 3, &one, names[silent]);
        cr_expect_eq(j.versions[2][silent], 0);
        cr_expect_eq(first_different_bits(j.end[2].at[silent], start.at[silent], counts[silent]), counts[silent]);
    }
}

/* Interrupted after two steps under one layout, gone on with under another. */
Test(zero_params, state_goes_from_any_layout_to_any_other)
{
    static const struct {
        int zero, ranks;
    } layouts[] = {{0, 1}, {0, 2}, {1, 1}, {1, 2}, {1, 5}};
    enum { LAYOUTS = sizeof layouts / sizeof *layouts };
    static const ar_optimizer_kind kinds[] = {AR_OPTIMIZER_SGD, AR_OPTIMIZER_ADAMW};
    values start;
    start_values(&start);
    for (size_t k = 0; k < 2; k++) {
        job whole = job_of(kinds[k], &start);
        run(&whole, 1, AR_NUMERICS_EXACT);
        for (size_t from = 0; from < LAYOUTS; from++) {
            job before = job_of(kinds[k], &start);
            before.zero = layouts[from].zero;
            before.last = 2;
            run(&before, layouts[from].ranks, AR_NUMERICS_EXACT);
            for (size_t to = 0; to < LAYOUTS; to++) {
                job after = job_of(kinds[k], &before.end[0]);
                after.zero = layouts[to].zero;
                after.ddp.bucket_bytes = 100;
                after.first = 3;
                after.state[0] = &before.kept[0];
                after.state[1] = &before.kept[1];
                run(&after, layouts[to].ranks, AR_NUMERICS_EXACT);
                expect_same(&after.end[0], &whole.end[0], "resumed");
            }
        }
    }
}

Test(zero_params, state_that_is_not_there_is_named)
{
    values start, none;
    start_values(&start);
    start_values(&none);
    job j = job_of(AR_OPTIMIZER_ADAM, &start);
    j.zero = 1;
    j.first = 2;
    j.state[0] = &none;
    const ar_run o = {.parallel.dp = 2};
    j.ddp.zero = 1;
    cr_expect_refused(rank_run(&o, rank_main, &j), AR_ERR_NOT_FOUND, "exp_avg_sq of ");
}

static ar_status create_without_zero(ar_ctx *ctx, void *user)
{
    const ar_ddp_options options = ar_ddp_defaults();
    const ar_optimizer_options *o = user;
    OWNED(ar_ddp_destroy) ar_ddp *ddp = NULL;
    OWNED(ar_optimizer_destroy) ar_optimizer *made = NULL;
    AR_TRY(ar_ddp_create_params(&ddp, ctx, "list", NULL, 0, &options));
    return ar_optimizer_create_sharded(&made, ctx, ddp, o);
}

Test(zero_params, a_ddp_without_zero_is_refused)
{
    ar_optimizer_options options = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    const ar_run o = {.parallel.tp = 1};
    cr_expect_refused(rank_run(&o, create_without_zero, &options), AR_ERR_ARG, "need a zero of 1 to 3");
}

/* --- an optimizer whose shares are those of another object -------------------------------------------------------- */

/* Two orders of the same three parameters in one bucket; the last one registered comes first in it. */
enum { SHARED = 3, SHARERS = 3 };
typedef struct two_orders {
    size_t size[SHARED];
    int of_optimizer[SHARED], of_gradients[SHARED]; /* as registered */
    ar_status status[SHARERS];
    char message[SHARERS][300];
} two_orders;

static ar_status make_in_order(ar_ddp **d, ar_ctx *ctx, const char *name, ar_param *p, const int *order)
{
    ar_param *list[SHARED];
    ar_ddp_options o = ar_ddp_defaults();
    o.zero = 1;
    for (int i = 0; i < SHARED; i++) {
        list[i] = &p[order[i]];
        list[i]->hooks = 0; /* one object at a time holds a parameter */
    }
    return ar_ddp_create_params(d, ctx, name, list, SHARED, &o);
}

/* The step's own error is a result: no rank ends before all have one. */
static ar_status shared_step(ar_ctx *ctx, ar_ddp *d, ar_optimizer *o, ar_param *p, two_orders *t)
{
    const size_t r = (size_t)ar_comm_rank(ctx->dp);
    AR_TRY(ar_ddp_start(d));
    for (size_t i = 0; i < SHARED; i++) {
        const float ones[MOST] = {1};
        AR_TRY(rank_add_gradient(ctx, &p[i], ones));
    }
    AR_TRY(ar_ddp_wait(d));
    t->status[r] = ar_optimizer_step(o, ctx, 1.0f);
    snprintf(t->message[r], sizeof t->message[r], "%s", t->status[r] == AR_OK ? "" : ar_error_message());
    return ar_comm_barrier(ctx->dp, ctx->queue, "each has stepped or refused");
}

static ar_status step_of_two_orders(ar_ctx *ctx, void *user)
{
    static const char *const called[SHARED] = {"p0", "p1", "p2"};
    two_orders *t = user;
    const ar_optimizer_options options = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    SCOPED(rank_params_end) rank_params p;
    OWNED(ar_ddp_destroy) ar_ddp *d = NULL;
    OWNED(ar_ddp_destroy) ar_ddp *other = NULL;
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    rank_params_begin(&p);
    for (size_t i = 0; i < SHARED; i++) {
        const float zeros[MOST] = {0};
        ar_layout layout;
        AR_TRY(ari_layout_replicate(&layout, 1, &t->size[i], 0, 1));
        AR_TRY(ar_param_init(p.all[i], ctx, called[i], &layout, false));
        AR_TRY(ar_param_set(p.all[i], ctx, zeros));
    }
    AR_TRY(make_in_order(&other, ctx, "other", p.at, t->of_optimizer));
    AR_TRY(ar_optimizer_create_sharded(&o, ctx, other, &options));
    AR_TRY(make_in_order(&d, ctx, "object", p.at, t->of_gradients));
    for (size_t i = 0; i < SHARED; i++)
        AR_TRY(ari_param_zero_grad(p.all[i], ctx));
    return shared_step(ctx, d, o, p.at, t);
}

/* says: what each rank is told; NULL: nothing is refused. */
static void expect_refused_by_each(two_orders *t, const char *const *says)
{
    const ar_run o = {.parallel.dp = SHARERS};
    cr_expect_ok(rank_run(&o, step_of_two_orders, t));
    for (int r = 0; r < SHARERS; r++) {
        cr_expect_eq(t->status[r], says ? AR_ERR_ARG : AR_OK, "rank %d: %s", r, t->message[r]);
        cr_expect(!says || strstr(t->message[r], says[r]), "rank %d: '%s' does not say '%s'", r, t->message[r],
                  says ? says[r] : "");
    }
}

/* Gradients p1 p0 p2, the optimizer p0 p1 p2, six elements in all, two for each rank. Rank 0 has the same start of p0
 * but another count of it, rank 1 as many elements of it from another place, rank 2 none of what it keeps state of. */
Test(zero_params, shares_that_differ_in_their_start_or_their_count_alone_are_refused_by_each_rank)
{
    static const char *const says[SHARERS] = {
        "p0: this rank has elements 0 to 1 of the gradient, the optimizer keeps state of 0 to 2",
        "p0: this rank has elements 1 to 3 of the gradient, the optimizer keeps state of 2 to 4",
        "p1: this rank has elements 0 to 0 of the gradient, the optimizer keeps state of 0 to 1"};
    two_orders t = {.size = {4, 1, 1}, .of_optimizer = {2, 1, 0}, .of_gradients = {2, 0, 1}};
    expect_refused_by_each(&t, says);
}

/* What counts is which elements a rank has, not whose object says so. */
Test(zero_params, an_optimizer_of_another_object_with_the_same_shares_steps)
{
    two_orders t = {.size = {4, 1, 1}, .of_optimizer = {2, 1, 0}, .of_gradients = {2, 1, 0}};
    expect_refused_by_each(&t, NULL);
}
