/* SPDX-License-Identifier: Apache-2.0 */
/* The mistakes of buckets: what each makes of the gradients, in every run the same. */
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

/* Three parameters of 4, 4 and 2 elements on two ranks, in buckets [p2 p1] [p0]: grad[0], grad[4] and grad[8] are the
 * first elements of each. */
static toy three(ar_fault fault, int steps)
{
    return (toy){
        .n = 3, .size = {4, 4, 2}, .parallel = {.dp = 2}, .ddp = {.bucket_bytes = 24}, .fault = fault, .steps = steps};
}

static const size_t first[3] = {0, 4, 8};

/* The right gradient of a parameter's first element, and rank r's own part of it. */
static float own(int r, size_t param, int step)
{
    return toy_term(r, 0, param, 0, step);
}

static float sum(size_t param, int step)
{
    return own(0, param, step) + own(1, param, step);
}

static void run(toy *t)
{
    cr_assert_ok(toy_run(t));
    cr_assert_str_eq(t->rank[0].buckets, "[p2 p1] [p0]");
}

static void expect(const toy *t, int r, size_t param, float value)
{
    cr_expect_eq(t->rank[r].grad[first[param]], value, "rank %d, p%zu: %.9g, not %.9g", r, param,
                 (double)t->rank[r].grad[first[param]], (double)value);
}

Test(ddp_faults, without_one_every_rank_has_the_sum)
{
    toy t = three(AR_FAULT_NONE, 2);
    run(&t);
    for (int r = 0; r < 2; r++) {
        for (size_t p = 0; p < 3; p++)
            expect(&t, r, p, sum(p, 1));
    }
}

Test(ddp_faults, bucket_first_ready_loses_what_was_not_written_yet)
{
    toy t = three(AR_FAULT_bucket_first_ready, 1);
    run(&t);
    for (int r = 0; r < 2; r++) {
        expect(&t, r, 2, sum(2, 0));
        expect(&t, r, 1, 0.0f);
        expect(&t, r, 0, sum(0, 0));
    }
}

Test(ddp_faults, comm_before_producer_loses_the_gradient_written_last)
{
    toy t = three(AR_FAULT_comm_before_producer, 1);
    run(&t);
    for (int r = 0; r < 2; r++) {
        expect(&t, r, 2, sum(2, 0));
        expect(&t, r, 1, 0.0f);
        expect(&t, r, 0, 0.0f);
    }
}

Test(ddp_faults, bucket_reduced_twice_doubles_on_two_ranks)
{
    toy t = three(AR_FAULT_bucket_reduced_twice, 1);
    for (int mode = 0; mode < 2; mode++) {
        t.ddp.mode = mode ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        run(&t);
        for (size_t p = 0; p < 3; p++)
            expect(&t, 1, p, 2 * sum(p, 0));
    }
}

Test(ddp_faults, bucket_not_packed_gives_what_it_held_before)
{
    toy t = three(AR_FAULT_bucket_not_packed, 1);
    run(&t);
    for (size_t p = 0; p < 3; p++)
        expect(&t, 0, p, 0.0f);
}

Test(ddp_faults, bucket_stale_done_shows_in_the_second_step)
{
    toy one = three(AR_FAULT_bucket_stale_done, 1), two = three(AR_FAULT_bucket_stale_done, 2);
    run(&one);
    run(&two);
    for (int r = 0; r < 2; r++) {
        for (size_t p = 0; p < 3; p++) {
            expect(&one, r, p, sum(p, 0));
            expect(&two, r, p, own(r, p, 1));
        }
    }
}

static void expect_own(ar_fault fault)
{
    toy t = three(fault, 1);
    run(&t);
    for (int r = 0; r < 2; r++) {
        for (size_t p = 0; p < 3; p++)
            expect(&t, r, p, own(r, p, 0));
    }
}

Test(ddp_faults, step_before_copy_back_leaves_each_rank_its_own)
{
    expect_own(AR_FAULT_step_before_copy_back);
}

/* Bucket [p2 p1] is overwritten by p0, of 4 elements: both elements of p2, and two of p1. */
Test(ddp_faults, stale_activation_reuse_gives_a_bucket_the_next_ones_values)
{
    toy t = three(AR_FAULT_stale_activation_reuse, 1);
    run(&t);
    for (int r = 0; r < 2; r++) {
        expect(&t, r, 2, sum(0, 0));
        expect(&t, r, 0, sum(0, 0));
        cr_expect_neq(t.rank[r].grad[4], sum(1, 0));
        cr_expect_eq(t.rank[r].grad[6], toy_term(0, 0, 1, 2, 0) + toy_term(1, 0, 1, 2, 0), "the rest is right");
    }
}

Test(ddp_faults, dp_group_missing_leaves_each_rank_its_own)
{
    expect_own(AR_FAULT_dp_group_missing);
}

Test(ddp_faults, collective_order_swapped_names_both_buckets)
{
    toy t = three(AR_FAULT_collective_order_swapped, 1);
    cr_expect_refused(toy_run(&t), AR_ERR_MISMATCH, "bucket 0: p2");
    cr_expect_says("bucket 1: p0");
}

/* A rank's own failure in the middle of a step: the others hear of it, with its message. */
static ar_status fail_between(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const toy t = {.n = n, .size = {4, 4, 2}, .skips = {{0}, {1}}};
    (void)out;
    AR_TRY(ar_ddp_start(d));
    AR_TRY(toy_pass(ctx, &t, params, 0, 0));
    return ar_ddp_wait(d);
}

Test(ddp_faults, an_error_of_one_rank_ends_all_with_one_message)
{
    toy t = three(AR_FAULT_NONE, 1);
    t.body = fail_between;
    t.sim.timeout_ns = 30000000000u;
    cr_expect_refused(toy_run(&t), AR_ERR_DATA, "rank 1 has no gradient for 1 of 3 parameters: p0.");
}

Test(ddp_faults, a_killed_rank_ends_all_in_every_bucket)
{
    for (uint64_t c = 1; c <= 12; c++) {
        const ar_sim_fault kill = {.kind = AR_SIM_KILL, .rank = 1, .collective = c};
        toy t = three(AR_FAULT_NONE, 3);
        t.sim = (ar_sim_options){.faults = &kill, .fault_count = 1, .timeout_ns = 30000000000u};
        cr_expect_eq(toy_run(&t), AR_ERR_ABORTED, "collective %llu", (unsigned long long)c);
        cr_expect_says("rank 1 was killed");
    }
}
