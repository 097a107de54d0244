/* SPDX-License-Identifier: Apache-2.0 */
/* What a step makes of the gradients: the sum of all ranks', whatever the buckets, their mode and their order. */
#include <stdatomic.h>

#include "anyrank/context.h"
#include "ref/layers/param_private.h"
#include "ref/train/ddp_private.h"
#include "tests/support/small.h"
#include "tests/support/test.h"
#include "tests/train/ddp_toy.h"

/* Seven vectors of 700 elements together, of which p2 and p5 are spread where tp says so. */
static toy seven(ar_parallel p)
{
    return (toy){.n = 7,
                 .size = {100, 50, 7, 300, 1, 42, 200},
                 .spread = {[2] = p.tp > 1, [5] = p.tp > 1},
                 .run.parallel = p,
                 .micro = p.micro_batches};
}

static void run(toy *t)
{
    cr_assert_ok(toy_run(t));
}

static void expect_same(const toy *a, const toy *b, const char *what)
{
    for (int r = 0; r < ar_parallel_world(&a->run.parallel); r++)
        cr_expect_eq(memcmp(a->rank[r].grad, b->rank[r].grad, sizeof a->rank[r].grad), 0, "%s: rank %d", what, r);
}

static const ar_parallel layouts[] = {
    {.dp = 2}, {.dp = 3, .micro_batches = 2}, {.tp = 2, .dp = 2}, {.tp = 3, .dp = 2, .micro_batches = 3}, {.tp = 2}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

Test(ddp_step, exact_bits_depend_neither_on_buckets_nor_on_mode_nor_on_order)
{
    static const size_t capacity[] = {0, 4, 40, 400, 1000, 1204, AR_BUCKET_BYTES};
    for (size_t l = 0; l < LAYOUTS; l++) {
        toy whole = seven(layouts[l]);
        whole.plain = true;
        run(&whole);
        for (size_t c = 0; c < sizeof capacity / sizeof *capacity; c++) {
            for (int how = 0; how < (small_only() ? 1 : 4); how++) {
                toy t = seven(layouts[l]);
                t.ddp = (ar_ddp_options){.bucket_bytes = capacity[c],
                                         .mode = how & 1 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP,
                                         .order = how & 2 ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE};
                run(&t);
                expect_same(&t, &whole, t.rank[0].buckets);
            }
        }
    }
}

Test(ddp_step, native_bits_do_not_depend_on_the_mode)
{
    for (size_t l = 0; l < LAYOUTS; l++) {
        toy eager = seven(layouts[l]), overlap = seven(layouts[l]);
        eager.run.numerics = overlap.run.numerics = AR_NUMERICS_NATIVE;
        eager.ddp = (ar_ddp_options){.bucket_bytes = 500, .mode = AR_BUCKETS_EAGER};
        overlap.ddp = (ar_ddp_options){.bucket_bytes = 500};
        run(&eager);
        run(&overlap);
        expect_same(&eager, &overlap, "native");
    }
}

/* Integers: every sum is a number, in fp32 and (up to 256) in bf16 too. */
static ar_status integers(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const int rank = ar_comm_rank(ar_ctx_dp(ctx));
    AR_TRY(ar_ddp_start(d));
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        float host[TOY_ELEMENTS];
        for (size_t k = 0; k < ar_tensor_count(&params[i]->value); k++)
            host[k] = (float)(rank + 1) * (float)(i + k + 1);
        AR_TRY(rank_add_gradient(ctx, params[i], host));
    }
    AR_TRY(ar_ddp_wait(d));
    for (size_t i = 0; i < n; at += ar_tensor_count(&params[i++]->value))
        AR_TRY(rank_read_gradient(ctx, out->grad + at, params[i]));
    return AR_OK;
}

static void expect_integers(toy t, float times)
{
    t.n = 3;
    t.size[0] = 4, t.size[1] = 1, t.size[2] = 6;
    t.body = integers;
    t.run.parallel.dp = 4; /* 1 + 2 + 3 + 4 = 10 */
    run(&t);
    static const float unit[11] = {1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8};
    for (int r = 0; r < 4; r++) {
        for (size_t i = 0; i < 11; i++)
            cr_expect_eq(t.rank[r].grad[i], times * unit[i], "rank %d, element %zu: %g", r, i,
                         (double)t.rank[r].grad[i]);
    }
}

Test(ddp_step, gives_the_sum_and_the_mean_in_both_numerics_and_storages)
{
    for (int native = 0; native < 2; native++) {
        toy t = {.run.numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT, .ddp = {.bucket_bytes = 16}};
        expect_integers(t, 10.0f);
        t.ddp.mean = true;
        expect_integers(t, 2.5f);
        t.ddp.mode = AR_BUCKETS_EAGER;
        expect_integers(t, 2.5f);
    }
    toy half = {.run.numerics = AR_NUMERICS_NATIVE, .bf16 = {true, false, true}, .ddp = {.bucket_bytes = 1000}};
    expect_integers(half, 10.0f);
}

/* --- counts, bytes, memory ---------------------------------------------------------------------------------------- */

Test(ddp_step, buckets_make_fewer_collectives_of_the_same_bytes)
{
    toy each = seven((ar_parallel){.dp = 2}), one = each, plain = each;
    each.ddp.bucket_bytes = 0;
    one.ddp.bucket_bytes = AR_BUCKET_BYTES;
    plain.plain = true;
    run(&each);
    run(&one);
    run(&plain);
    cr_expect_eq(each.rank[0].collectives, 14, "an all-to-all and an all-gather for each of 7 parameters");
    cr_expect_eq(one.rank[0].collectives, 2);
    cr_expect_eq(plain.rank[0].collectives, 15, "and one of which parameters got a gradient");
    uint64_t moved[3] = {0};
    for (int r = 0; r < 2; r++) {
        moved[0] += each.rank[r].moved;
        moved[1] += one.rank[r].moved;
        moved[2] += plain.rank[r].moved;
    }
    cr_expect_eq(moved[0], 700 * (17 + 4), "%llu", (unsigned long long)moved[0]);
    cr_expect_eq(moved[1], moved[0]);
    cr_expect_eq(moved[2], 700 * (17 + 17) + 2 * 7, "sums that others may follow come back as they went");
    one.run.numerics = AR_NUMERICS_NATIVE;
    run(&one);
    cr_expect_eq(one.rank[0].collectives, 1);
    cr_expect_eq(one.rank[0].moved + one.rank[1].moved, 2 * 700 * 4);
}

Test(ddp_step, one_rank_moves_nothing_and_has_no_storage)
{
    toy t = seven((ar_parallel){.dp = 1}), plain = t;
    plain.plain = true;
    run(&t);
    run(&plain);
    expect_same(&t, &plain, "one rank");
    cr_expect_eq(t.rank[0].collectives, 0);
    cr_expect_eq(t.rank[0].moved, 0);
    cr_expect_eq(t.rank[0].bytes, 0);
    cr_expect(t.rank[0].has[0] && t.rank[0].has[6]);
}

/* The CPU device's table but for one slot, which counts; on any thread. */
typedef struct counting {
    ar_device_ops ops; /* first: a device's table is found at the same address */
    const ar_device_ops *real;
    atomic_size_t allocations;
} counting;

static ar_status count_alloc(ar_device *d, ar_queue *q, ar_buf *gives, size_t bytes)
{
    counting *c = (counting *)(uintptr_t)d->ops;
    atomic_fetch_add(&c->allocations, 1);
    return c->real->alloc(d, q, gives, bytes);
}

/* Ten steps of gradients that need no memory: the terms lie ready. */
static ar_status ten_steps(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    ar_device *device = ar_ctx_device(ctx);
    ar_tensor terms[TOY_MOST];
    for (size_t i = 0; i < n; i++) {
        const size_t shape[2] = {1, ar_tensor_count(&params[i]->value)};
        AR_TRY(ar_ctx_tensor(ctx, &terms[i], AR_F32, 2, shape));
        AR_TRY(device->ops->fill(device, NULL, &terms[i], 1.0f));
    }
    counting own = {.ops = *device->ops, .real = device->ops};
    own.ops.alloc = count_alloc;
    device->ops = &own.ops;
    ar_status st = AR_OK;
    for (int step = 0; step < 10 && st == AR_OK; step++) {
        st = ar_ddp_start(d);
        for (size_t i = n; i-- > 0 && st == AR_OK;) {
            ari_param_use(params[i]);
            st = ar_ctx_arith(ctx)->grad_rows(ctx, params[i], &terms[i], (ar_cbuf){NULL});
            if (st == AR_OK)
                st = ari_param_done(params[i], ctx);
        }
        if (st == AR_OK)
            st = ar_ddp_wait(d);
    }
    device->ops = own.real;
    out->moved = atomic_load(&own.allocations);
    return st;
}

/* In exact numerics each gradient's accumulator gives way to its value, and comes again. */
Test(ddp_step, takes_no_other_memory_in_ten_steps_than_that_of_sums)
{
    const unsigned exact = 7 * 2 * 10;
    for (int native = 0; native < 2; native++) {
        toy t = seven((ar_parallel){.tp = 2, .dp = 2});
        t.run.numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
        t.ddp = (ar_ddp_options){.bucket_bytes = 500, .find_unused = true};
        t.body = ten_steps;
        run(&t);
        for (int r = 0; r < 4; r++)
            cr_expect_eq(t.rank[r].moved, native ? 0 : exact, "rank %d: %llu allocations", r,
                         (unsigned long long)t.rank[r].moved);
    }
}

/* --- accumulation and hooks --------------------------------------------------------------------------------------- */

Test(ddp_step, accumulation_reduces_once_and_gives_one_big_batchs_bits)
{
    toy t = seven((ar_parallel){.dp = 2, .micro_batches = 3}), hand = t;
    t.ddp.bucket_bytes = hand.ddp.bucket_bytes = 400;
    hand.by_hand = true;
    run(&t);
    run(&hand);
    toy one = seven((ar_parallel){.dp = 2});
    one.ddp.bucket_bytes = 400;
    run(&one);
    cr_expect_eq(t.rank[0].collectives, one.rank[0].collectives);
    expect_same(&t, &hand, "by hand");
    toy plain = seven((ar_parallel){.dp = 2, .micro_batches = 3});
    plain.plain = true;
    run(&plain);
    expect_same(&t, &plain, "without buckets");
}

Test(ddp_step, a_second_backward_pass_after_the_reduction_is_an_error_that_names_the_parameter)
{
    toy t = seven((ar_parallel){.dp = 2});
    t.twice = true;
    cr_expect_refused(toy_run(&t), AR_ERR_ARG, "the gradient of p6 changed after bucket 0 was reduced");
    t.ddp.mode = AR_BUCKETS_EAGER; /* nothing is under way before the wait: both passes count */
    toy both = seven((ar_parallel){.dp = 2});
    both.plain = true;
    run(&t);
    run(&both);
    cr_expect_eq(t.rank[0].grad[0], 2 * both.rank[0].grad[0]);
}

/* A weight with two uses: its bucket waits for the second. */
static ar_status two_uses(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const toy t = {.n = n, .size = {5, 5}};
    AR_TRY(ar_ddp_start(d));
    ari_param_use(params[0]);
    ari_param_use(params[0]);
    ari_param_use(params[1]);
    AR_TRY(toy_add(ctx, params[1], 1, 0, 0));
    AR_TRY(ari_param_done(params[1], ctx));
    AR_TRY(toy_add(ctx, params[0], 0, 0, 0));
    AR_TRY(ari_param_done(params[0], ctx));
    out->has[5] = ari_ddp_bucket(d, 1).state == AR_BUCKET_FILLING && ari_ddp_bucket(d, 1).ready == 0;
    AR_TRY(toy_add(ctx, params[0], 0, 0, 0));
    AR_TRY(ari_param_done(params[0], ctx));
    out->has[6] = ari_ddp_bucket(d, 1).state == AR_BUCKET_IN_FLIGHT;
    AR_TRY(ar_ddp_wait(d));
    out->has[7] = ari_ddp_bucket(d, 1).state == AR_BUCKET_REDUCED && params[0]->pending == 0;
    return toy_gradients(out, ctx, &t, params);
}

Test(ddp_step, a_tied_weight_is_reduced_after_its_last_use)
{
    toy t = {.n = 2, .size = {5, 5}, .run.parallel = {.dp = 2}, .body = two_uses};
    run(&t);
    cr_expect(t.rank[0].has[5]);
    cr_expect(t.rank[0].has[6]);
    cr_expect(t.rank[0].has[7]);
    const float both = toy_term(0, 0, 0, 0, 0) + toy_term(1, 0, 0, 0, 0);
    cr_expect_eq(t.rank[0].grad[0], 2 * both);
}

static ar_status by_hand(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const toy t = {.n = n, .size = {5, 6, 7}};
    AR_TRY(ar_ddp_start(d));
    ar_ddp_set_sync(d, false);
    AR_TRY(toy_pass(ctx, &t, params, 0, 0));
    AR_TRY(ar_ddp_reduce_all(d));
    out->has[3] = ar_ddp_reduce_gradients(d) == AR_ERR_ARG;
    AR_TRY(ar_ddp_wait(d));
    AR_TRY(ar_ddp_wait(d));
    return toy_gradients(out, ctx, &t, params);
}

Test(ddp_step, buckets_can_be_reduced_by_hand)
{
    toy t = {.n = 3, .size = {5, 6, 7}, .run.parallel = {.dp = 2}, .body = by_hand}, plain = t;
    for (int mode = 0; mode < 2; mode++) {
        t.ddp.mode = mode ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        run(&t);
        cr_expect(t.rank[0].has[3]);
        plain.plain = true;
        plain.body = NULL;
        run(&plain);
        expect_same(&t, &plain, "by hand");
    }
}

/* Bucket 1 alone, then what is left. p1 is in the middle one of three buckets. */
static ar_status one_bucket(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const toy t = {.n = n, .size = {5, 6, 7}};
    ar_bucket_info info[3];
    size_t index = 9;
    AR_TRY(ar_ddp_start(d));
    ar_ddp_set_sync(d, false);
    AR_TRY(toy_pass(ctx, &t, params, 0, 0));
    out->has[0] = ar_ddp_wait_bucket(d, 0) == AR_ERR_ARG; /* not launched: it would never end */
    AR_TRY(ar_ddp_bucket_index(d, params[1], &index));
    AR_TRY(ar_ddp_reduce_bucket(d, index));
    AR_TRY(ar_ddp_wait_bucket(d, index));
    for (size_t i = 0; i < 3; i++)
        AR_TRY(ar_ddp_bucket(d, i, &info[i]));
    out->has[1] = index == 1 && info[1].state == AR_BUCKET_REDUCED && info[2].state == AR_BUCKET_FILLING;
    AR_TRY(toy_gradients(out, ctx, &t, params));
    out->how = out->grad[5] == toy_term(0, 0, 1, 0, 0) + toy_term(1, 0, 1, 0, 0); /* the first element of p1 */
    out->has[2] = ar_ddp_bucket(d, 3, &info[0]) == AR_ERR_ARG && ar_ddp_reduce_bucket(d, 3) == AR_ERR_ARG &&
                  ar_ddp_wait_bucket(d, 3) == AR_ERR_ARG;
    ar_param other = *params[0];
    other.hooks = 0;
    out->has[3] = ar_ddp_bucket_index(d, &other, &index) == AR_ERR_NOT_FOUND;
    AR_TRY(ar_ddp_wait(d));
    return toy_gradients(out, ctx, &t, params);
}

Test(ddp_step, one_bucket_can_be_reduced_and_waited_for)
{
    toy t = {.n = 3, .size = {5, 6, 7}, .run.parallel = {.dp = 2}, .body = one_bucket}, plain = t;
    for (int mode = 0; mode < 2; mode++) {
        t.ddp = (ar_ddp_options){.mode = mode ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP};
        run(&t);
        for (int i = 0; i < 4; i++)
            cr_expect(t.rank[0].has[i], "claim %d, mode %d", i, mode);
        cr_expect(t.rank[0].how, "the sum of p1 is there after the wait, mode %d", mode);
        plain.plain = true;
        plain.body = NULL;
        run(&plain);
        expect_same(&t, &plain, "one bucket first");
    }
}

static ar_status starts(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    (void)d, (void)n;
    return ar_ctx_download(ctx, out->grad, &params[0]->value);
}

Test(ddp_step, ranks_that_drew_different_weights_start_from_the_first_ones)
{
    toy t = {.n = 1, .size = {5}, .run.parallel = {.dp = 3}, .body = starts}, own = t;
    own.ddp.keep_weights = true;
    run(&t);
    run(&own);
    for (int r = 1; r < 3; r++) {
        cr_expect_eq(memcmp(t.rank[r].grad, t.rank[0].grad, sizeof t.rank[0].grad), 0, "rank %d", r);
        cr_expect_neq(memcmp(own.rank[r].grad, own.rank[0].grad, sizeof own.rank[0].grad), 0, "rank %d", r);
    }
    cr_expect_eq(memcmp(t.rank[0].grad, own.rank[0].grad, sizeof own.rank[0].grad), 0);
}

/* Each rank changes a trained and a frozen parameter, and then gets the first one's values. */
static ar_status set_and_broadcast(ar_ctx *ctx, ar_ddp *d, ar_param **params, size_t n, toy_result *out)
{
    const float rank = (float)ar_comm_rank(ar_ctx_dp(ctx));
    for (size_t i = 0; i < n; i++)
        AR_TRY(ar_param_set(params[i], ctx, (float[2]){rank + (float)i, 9.0f}));
    AR_TRY(ar_ddp_broadcast_parameters(d));
    for (size_t i = 0; i < n; i++)
        AR_TRY(ar_ctx_download(ctx, out->grad + 2 * i, &params[i]->value));
    return AR_OK;
}

Test(ddp_step, weights_are_broadcast_again_on_request)
{
    static const float first[4] = {0, 9, 1, 9};
    toy t = {.n = 2, .size = {2, 2}, .frozen = {[1] = true}, .run.parallel = {.dp = 3}, .body = set_and_broadcast};
    run(&t);
    for (int r = 0; r < 3; r++)
        cr_expect_eq(memcmp(t.rank[r].grad, first, sizeof first), 0, "rank %d", r);
}
