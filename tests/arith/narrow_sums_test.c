/* SPDX-License-Identifier: Apache-2.0 */
/* A bucket of bf16 gradients that is summed over one group and then over another: nothing is rounded in between. */
#include "ref/context/context.h"
#include "ref/numerics/accumulator.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

/* MANY: more than is exchanged at once. */
enum { RANKS = 4, LENGTH = 4000, MANY = (1 << 21) + LENGTH };

/* A bf16 number of rank r, from 2^-12 to 2^12. */
static float value_of(int r, size_t i)
{
    const uint64_t mixed = ((uint64_t)i * RANKS + (uint64_t)r + 1) * 0x9e3779b97f4a7c15u; /* Knuth's golden ratio */
    const float significand = (float)(128 + (mixed >> 32) % 128) / 128.0f;
    return ldexpf(mixed >> 63 ? -significand : significand, (int)((mixed >> 40) % 25) - 12);
}

/* What is added to the first sum: half of it takes the other ranks' values out again, so that no bit may be missing. */
static float second_value_of(int r, size_t i)
{
    return i % 2 ? -value_of(r, i) : value_of(r, i + LENGTH);
}

/* The sum of all ranks' first values, and of all but the first rank's second ones. */
static float expected(size_t i)
{
    uint8_t t = 0;
    int64_t h = 0, l = 0;
    for (int r = 0; r < RANKS; r++) {
        ari_acc_add(&t, &h, &l, value_of(r, i), true);
        if (r > 0)
            ari_acc_add(&t, &h, &l, second_value_of(r, i), true);
    }
    return ari_acc_value(t, h, l, true);
}

/* The same with a rounding in between. */
static float rounded_between(size_t i)
{
    float sum = 0.0f;
    for (int r = 0; r < RANKS; r++)
        sum += value_of(r, i);
    sum = ari_f32_of_bf16(ari_bf16_of_f32(sum));
    for (int r = 1; r < RANKS; r++)
        sum += second_value_of(r, i);
    return ari_f32_of_bf16(ari_bf16_of_f32(sum));
}

typedef struct sum_job {
    size_t n;
    const size_t *counts; /* of the last sum; NULL: every rank has all */
    ar_most_terms first;
    float *sum[RANKS]; /* [n] */
} sum_job;

static ar_status add_up(ar_ctx *ctx, ar_buf bucket, ar_buf room, const ar_tensor *x, const ar_tensor *y,
                        const sum_job *j)
{
    const ar_arith_ops *ops = ctx->arith;
    const ar_most_terms last = {.before = j->first.after};
    AR_TRY(ops->bucket_put(ctx, ctx->queue, bucket, ar_const(x->data), j->n, AR_BF16));
    AR_TRY(ops->bucket_reduce(ctx, ctx->queue, bucket, room, j->n, AR_BF16, ctx->tp, NULL, &j->first, "first"));
    if (ar_comm_rank(ctx->tp) > 0)
        AR_TRY(ops->bucket_put(ctx, ctx->queue, bucket, ar_const(y->data), j->n, AR_BF16));
    AR_TRY(ops->bucket_reduce(ctx, ctx->queue, bucket, room, j->n, AR_BF16, ctx->tp, j->counts, &last, "last"));
    return ops->bucket_take(ctx, ctx->queue, x->data, ar_const(bucket), j->n, 0, j->n, AR_BF16);
}

static ar_status sum_twice(ar_ctx *ctx, void *user)
{
    sum_job *j = user;
    const int rank = ar_comm_rank(ctx->tp);
    const size_t shape[] = {j->n};
    ARI_OWNED float *first = malloc(2 * j->n * sizeof *first);
    float *second = first + j->n;
    ar_tensor x, y;
    ar_buf bucket, room;
    cr_assert_not_null(first);
    for (size_t i = 0; i < j->n; i++) {
        first[i] = value_of(rank, i);
        second[i] = second_value_of(rank, i);
    }
    AR_TRY(rank_upload(ctx, &x, 1, shape, first));
    AR_TRY(rank_upload(ctx, &y, 1, shape, second));
    AR_TRY(ari_ctx_alloc(ctx, &bucket, ctx->arith->bucket_bytes(j->n, AR_BF16)));
    AR_TRY(ari_ctx_alloc(ctx, &room, ctx->arith->bucket_room(j->n, AR_BF16, ctx->tp, NULL)));
    ar_status st = add_up(ctx, bucket, room, &x, &y, j);
    ctx->device->ops->free(ctx->device, ctx->queue, room);
    ctx->device->ops->free(ctx->device, ctx->queue, bucket);
    if (st == AR_OK)
        st = ar_ctx_download(ctx, j->sum[rank], &x);
    return st;
}

/* Ranks' shares of the sums: those of counts, or all. */
static void expect_sums(sum_job *j, const char *what)
{
    const ar_run o = {.parallel.tp = RANKS};
    size_t told_apart = 0;
    ARI_OWNED float *all = malloc(RANKS * j->n * sizeof *all);
    cr_assert_not_null(all);
    for (int r = 0; r < RANKS; r++)
        j->sum[r] = all + (size_t)r * j->n;
    cr_assert_ok(rank_run(&o, sum_twice, j));
    size_t end[RANKS];
    for (size_t r = 0, at = 0; r < RANKS; r++)
        end[r] = at += j->counts ? j->counts[r] : 0;
    for (size_t i = 0; i < j->n; i++) {
        const float sum = expected(i);
        told_apart += sum != rounded_between(i);
        for (int r = 0; r < RANKS; r++) {
            if (j->counts && (i < end[r] - j->counts[r] || i >= end[r]))
                continue;
            cr_assert_eq(ari_bits32(j->sum[r][i]), ari_bits32(sum), "%s, after %zu, rank %d, element %zu: %a, not %a",
                         what, j->first.after, r, i, (double)j->sum[r][i], (double)sum);
        }
    }
    cr_expect_gt(told_apart, j->n / 10);
}

Test(narrow_sums, are_not_rounded_where_others_follow)
{
    const size_t after[] = {RANKS, 100, 200, 40000, SIZE_MAX}; /* every form of a state of several values */
    for (size_t k = 0; k < sizeof after / sizeof *after; k++) {
        sum_job j = {.n = LENGTH, .first = {1, after[k]}};
        expect_sums(&j, "at once");
    }
}

Test(narrow_sums, of_many_elements_are_exchanged_in_parts)
{
    const size_t counts[RANKS] = {MANY / 2 + 5, 0, 7, MANY / 2 - 12};
    sum_job whole = {.n = MANY, .first = {1, RANKS}}, shared = {.n = MANY, .counts = counts, .first = {1, RANKS}};
    expect_sums(&whole, "in parts");
    expect_sums(&shared, "in parts of shares");
}
