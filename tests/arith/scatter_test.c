/* SPDX-License-Identifier: Apache-2.0 */
/* A sum over ranks whose rows are scattered: rank r gets rows [r*m/N, (r+1)*m/N) of what every rank gets otherwise, and
 * what follows the rounding is done on those. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <string.h>

#include "anyrank/arith.h"
#include "ref/numerics/scalar.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

TestSuite(scatter, .timeout = 300);

enum { MOST_RANKS = 4, M = 12, N = 7, MOST_K = 8200 };

typedef struct scattered {
    size_t k, rows, batch;
    float a[M * MOST_K], b[N * MOST_K], bias[N];
    float y[M * N], z[M * N]; /* each rank writes its own rows */
    uint64_t gathers[MOST_RANKS];
} scattered;

static ar_status multiply(ar_ctx *ctx, const scattered *s, const ar_tensor *y, const ar_epilogue *ep)
{
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t a_shape[3] = {s->batch, s->rows, s->k}, b_shape[3] = {s->batch, N, s->k};
    ar_tensor a, b;
    size_t start = 0, count = 0;
    const ar_operand *oa = NULL, *ob = NULL;
    ar_sum *sum = NULL;
    AR_TRY(rank_upload(ctx, &a, 3, a_shape, s->a));
    AR_TRY(rank_upload(ctx, &b, 3, b_shape, s->b));
    ar_comm_slice(s->k, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    const ar_parts pa = {.n = 1, .part = {ar_tensor_slice(&a, 2, start, count)}};
    const ar_parts pb = {.n = 1, .part = {ar_tensor_slice(&b, 2, start, count)}};
    AR_TRY(arith->operand_b(ctx, &ob, &pb, true, s->k, ar_ctx_tp(ctx), NULL, "b"));
    AR_TRY(arith->operand_a(ctx, &oa, &pa, ob, "a"));
    AR_TRY(arith->contract(ctx, &sum, oa, ob));
    AR_TRY(arith->fold(ctx, sum, ar_ctx_queue(ctx), ar_ctx_tp(ctx), AR_SCATTER_ROWS, "the sum"));
    return arith->round(ctx, y, sum, ep);
}

static ar_status scatter_rank(ar_ctx *ctx, void *user)
{
    scattered *s = user;
    const size_t r = rank_of(ctx), own[2] = {s->rows / ranks_of(ctx), N}, cols = N;
    ar_tensor y, z, bias;
    AR_TRY(rank_upload(ctx, &bias, 1, &cols, s->bias));
    AR_TRY(ar_ctx_tensor(ctx, &y, AR_F32, 2, own));
    AR_TRY(ar_ctx_tensor(ctx, &z, AR_F32, 2, own));
    const ar_epilogue ep = {.bias = ar_const(bias.data), .act = AR_ACT_SILU, .z = &z};
    AR_TRY(multiply(ctx, s, &y, &ep));
    AR_TRY(ar_ctx_download(ctx, s->y + r * own[0] * N, &y));
    s->gathers[r] = ar_comm_calls(ar_ctx_tp(ctx), "all_gather");
    return ar_ctx_download(ctx, s->z + r * own[0] * N, &z);
}

static scattered *given(size_t k)
{
    static scattered s;
    s = (scattered){.k = k, .rows = M, .batch = 1};
    fill_values(s.a, M * k, 1, 1.0);
    fill_values(s.b, N * k, 2, 1.0);
    fill_values(s.bias, N, 3, 1.0);
    for (size_t i = 0; i < M * k; i++)
        s.a[i] = ldexpf(s.a[i], (int)(i / k) - 4); /* exponents that differ from row to row */
    return &s;
}

/* K = 8200: two int64 a sum. */
Test(scatter, every_rank_has_its_rows_of_the_definition)
{
    static float expected[M * N];
    for (size_t k = 24; k <= 8200; k += 8176) {
        scattered *s = given(k);
        plain_contract(expected, M, N, k, s->a, k, 1, s->b, k, 1);
        for (int ranks = 1; ranks <= 4; ranks++) {
            const rank_run_options o = {.ranks = ranks};
            memset(s->y, 0, sizeof s->y);
            cr_assert_eq(rank_run(&o, scatter_rank, s), AR_OK, "%s", ar_error_message());
            for (size_t i = 0; i < M * N; i++) {
                const float y = expected[i] + s->bias[i % N], z = ari_act32(AR_ACT_SILU, y);
                cr_assert_eq(first_different_bits(&s->y[i], &y, 1), 1, "k=%zu ranks=%d element %zu", k, ranks, i);
                cr_assert_eq(first_different_bits(&s->z[i], &z, 1), 1, "k=%zu ranks=%d element %zu", k, ranks, i);
            }
            cr_assert_eq(s->gathers[ranks - 1], 0, "nothing is gathered");
        }
    }
}

/* gamma_n = n*u/(1 - n*u), u = 2^-24: Higham, Accuracy and Stability of Numerical Algorithms, section 3.1. */
Test(scatter, native_rows_stay_within_the_bound)
{
    scattered *s = given(24);
    const double nu = 25 * 0x1p-24;
    for (int ranks = 1; ranks <= 4; ranks++) {
        const rank_run_options o = {.ranks = ranks, .numerics = AR_NUMERICS_NATIVE};
        cr_assert_eq(rank_run(&o, scatter_rank, s), AR_OK, "%s", ar_error_message());
        for (size_t i = 0; i < M * N; i++) {
            plain_sum sum = plain_dot(24, s->a + i / N * 24, 1, s->b + i % N * 24, 1);
            sum.value += (double)s->bias[i % N];
            sum.magnitude += fabs((double)s->bias[i % N]);
            cr_assert_leq(fabs((double)s->y[i] - sum.value), nu / (1.0 - nu) * sum.magnitude + (double)FLT_TRUE_MIN,
                          "ranks=%d element %zu", ranks, i);
        }
    }
}

static ar_status whole_rank(ar_ctx *ctx, void *user)
{
    const scattered *s = user;
    const size_t shape[3] = {s->batch, s->rows, N};
    ar_tensor y;
    AR_TRY(ar_ctx_tensor(ctx, &y, AR_F32, 3, shape));
    return multiply(ctx, s, &y, NULL);
}

Test(scatter, rows_that_do_not_divide_and_several_matrices_are_refused)
{
    for (int numerics = 0; numerics < 2; numerics++) {
        const rank_run_options o = {.ranks = 2, .numerics = (ar_numerics)numerics};
        scattered *s = given(24);
        s->rows = 5;
        cr_assert_eq(rank_run(&o, whole_rank, s), AR_ERR_INDIVISIBLE, "%s", ar_error_message());
        cr_assert_not_null(strstr(ar_error_message(), "5 rows"), "%s", ar_error_message());
        s->rows = 2;
        s->batch = 3;
        cr_assert_eq(rank_run(&o, whole_rank, s), AR_ERR_UNSUPPORTED, "%s", ar_error_message());
    }
}
