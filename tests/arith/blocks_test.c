/* SPDX-License-Identifier: Apache-2.0 */
/* A contraction whose A comes in blocks, with terms on several ranks, has the bits of its definition. */
#include "anyrank/context.h"
#include "ref/comm/comm_private.h"
#include "ref/core/tensor_private.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

enum { MOST_RANKS = 3, M = 12, N = 5, MOST_K = 8211 };

typedef struct blocked {
    size_t k;
    bool scatter; /* of the result each rank has some rows, else all */
    float a[M * MOST_K], b[N * MOST_K];
    float y[MOST_RANKS][M * N];
} blocked;

/* Blocks, each of one rank's rows, cover A's columns [start, start + count) without its last row, which is zero. */
static ar_status each_block(ar_ctx *ctx, ar_blocks *s, const ar_tensor *a, size_t start, size_t count,
                            ar_status (*f)(ar_ctx *ctx, ar_blocks *s, const ar_part *at, const ar_tensor *a))
{
    static const size_t rows[] = {0, 1, 4, 6, 8, M - 1}, cuts[] = {0, 1, 5, 7};
    for (size_t r = 0; r + 1 < sizeof rows / sizeof *rows; r++)
        for (size_t c = 0; c < 3; c++) {
            const size_t from = count * cuts[c] / 7, to = count * cuts[c + 1] / 7;
            const ar_part at = {0, 1, rows[r], rows[r + 1] - rows[r], from, to - from};
            const ar_part place = {0, 1, at.row, at.rows, start + from, to - from};
            const ar_tensor part = ari_tensor_part(a, &place);
            AR_TRY(f(ctx, s, &at, &part));
        }
    return AR_OK;
}

static ar_status blocks_rank(ar_ctx *ctx, void *user)
{
    blocked *x = user;
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t r = rank_of(ctx), n = ranks_of(ctx), a_shape[3] = {1, M, x->k}, b_shape[3] = {1, N, x->k};
    const size_t y_shape[3] = {1, x->scatter ? M / n : M, N};
    ar_tensor a, b, y;
    ar_blocks *s = NULL;
    size_t start = 0, count = 0;
    AR_TRY(rank_upload(ctx, &a, 3, a_shape, x->a));
    AR_TRY(rank_upload(ctx, &b, 3, b_shape, x->b));
    AR_TRY(ar_ctx_tensor(ctx, &y, AR_F32, 3, y_shape));
    ari_comm_slice(x->k, (int)n, (int)r, &start, &count);
    const ar_tensor own = ar_tensor_slice(&b, 2, start, count);
    const ar_blocks_options o = {.rows = M,
                                 .k_full = x->k,
                                 .places = x->scatter ? ar_ctx_tp(ctx) : NULL,
                                 .replicas = x->scatter ? NULL : ar_ctx_tp(ctx),
                                 .tag = "the sum"};
    AR_TRY(arith->blocks_begin(ctx, &s, &own, &o));
    AR_TRY(each_block(ctx, s, &a, start, count, arith->blocks_measure));
    AR_TRY(arith->blocks_measured(ctx, s));
    AR_TRY(each_block(ctx, s, &a, start, count, arith->blocks_add));
    AR_TRY(arith->blocks_end(ctx, &y, s, AR_ALL));
    return ar_ctx_download(ctx, x->y[r], &y);
}

/* K = 8211: two int64 a sum. Rows of other exponents, and one of zeros. */
Test(blocks, give_every_rank_its_rows_of_the_definition)
{
    static blocked x;
    static float expected[M * N];
    for (size_t k = 33; k <= 8211; k += 8178)
        for (size_t ranks = 1; ranks <= MOST_RANKS; ranks++)
            for (int scatter = 0; scatter < 2; scatter++) {
                x = (blocked){.k = k, .scatter = scatter};
                fill_values(x.a, M * k, 1, 1.0);
                fill_values(x.b, N * k, 2, 1.0);
                for (size_t i = 0; i < M * k; i++)
                    x.a[i] = i / k == M - 1 ? 0.0f : ldexpf(x.a[i], (int)(i / k) - 4);
                plain_contract(expected, M, N, k, x.a, k, 1, x.b, k, 1);
                const ar_run o = {.parallel.tp = (int)ranks};
                cr_assert_ok(rank_run(&o, blocks_rank, &x));
                for (size_t r = 0; r < ranks; r++) {
                    const size_t rows = scatter ? M / ranks : M, first = scatter ? r * rows : 0;
                    const size_t at = first_different_bits(x.y[r], expected + first * N, rows * N);
                    cr_expect_eq(at, rows * N, "k=%zu, rank %zu of %zu%s: element %zu is %a, not %a", k, r, ranks,
                                 scatter ? ", scattered" : "", at, (double)x.y[r][at],
                                 (double)expected[first * N + at]);
                }
            }
}
