/* SPDX-License-Identifier: Apache-2.0 */
/* A sum over ranks whose rows are scattered: rank r gets rows [r*m/N, (r+1)*m/N) of what every rank gets otherwise, and
 * what follows the rounding is done on those. */
#include "anyrank/activation.h"
#include "anyrank/context.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/numerics/activation.h"
#include "ref/numerics/scalar.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

enum { M = 12, N = 7, MOST_K = 8200 };

typedef struct scattered {
    size_t k, rows, batch;
    size_t chunks; /* of the rows, each scattered beside the product of the next one */
    float a[M * MOST_K], b[N * MOST_K], bias[N];
    float y[M * N], z[M * N]; /* each rank writes its own rows */
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
    ari_comm_slice(s->k, (int)ranks_of(ctx), (int)rank_of(ctx), &start, &count);
    const ar_parts pa = {.n = 1, .part = {ar_tensor_slice(&a, 2, start, count)}};
    const ar_parts pb = {.n = 1, .part = {ar_tensor_slice(&b, 2, start, count)}};
    AR_TRY(arith->operand_b(ctx, &ob, &pb, true, s->k, ar_ctx_tp(ctx), NULL, "b"));
    AR_TRY(arith->operand_a(ctx, &oa, &pa, ob, "a"));
    AR_TRY(arith->contract(ctx, &sum, oa, ob));
    AR_TRY(arith->fold(ctx, sum, ar_ctx_queue(ctx), ar_ctx_tp(ctx), AR_SCATTER_ROWS, "the sum"));
    return arith->round(ctx, y, sum, ep);
}

/* Chunk i of A's rows, those of rank 0, then of rank 1, ..; its own rows of y are [i * each, i * each + rows / ranks).
 * */
typedef struct chunk {
    ar_part part;
    const ar_operand *a;
    ar_sum *sum;
} chunk;

static ar_status begin_chunk(ar_ctx *ctx, chunk *c, const ar_operand *a, const ar_operand *b)
{
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const ari_communication *overlapped = NULL;
    AR_TRY(ari_ctx_overlapped(ctx, &overlapped));
    AR_TRY(arith->operand_part(ctx, &c->a, a, &c->part));
    AR_TRY(arith->contract(ctx, &c->sum, c->a, b));
    return arith->fold(ctx, c->sum, overlapped->queue, overlapped->tp, AR_SCATTER_ROWS, "a chunk's sum");
}

static ar_status end_chunk(ar_ctx *ctx, chunk *c, const ar_tensor *y, const ar_epilogue *ep)
{
    const size_t ranks = ranks_of(ctx), first = c->part.row / ranks, rows = c->part.rows / ranks;
    const ar_tensor own = ar_tensor_slice(y, 0, first, rows), z = ar_tensor_slice(ep->z, 0, first, rows);
    const ar_epilogue of_own = {.bias = ep->bias, .act = ep->act, .z = &z};
    AR_TRY(ar_ctx_arith(ctx)->round(ctx, &own, c->sum, &of_own));
    ar_ctx_arith(ctx)->operand_done(ctx, c->a);
    return AR_OK;
}

/* Both operands in two parts side by side, all chunks under way before the first is rounded. */
static ar_status multiply_chunks(ar_ctx *ctx, const scattered *s, const ar_tensor *y, const ar_epilogue *ep)
{
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t a_shape[2] = {s->rows, s->k}, b_shape[2] = {N, s->k}, ranks = ranks_of(ctx), own = s->rows / ranks;
    const size_t each = (own + s->chunks - 1) / s->chunks;
    ar_tensor a, b;
    size_t start = 0, count = 0;
    const ar_operand *oa = NULL, *ob = NULL;
    chunk chunks[M];
    AR_TRY(rank_upload(ctx, &a, 2, a_shape, s->a));
    AR_TRY(rank_upload(ctx, &b, 2, b_shape, s->b));
    ari_comm_slice(s->k, (int)ranks, (int)rank_of(ctx), &start, &count);
    const size_t half = count / 2, rest = count - half;
    const ar_parts pa = {
        2, {ar_tensor_slice(&a, 1, start, half), ar_tensor_slice(&a, 1, start + half, rest)}, .along_k = true};
    const ar_parts pb = {
        2, {ar_tensor_slice(&b, 1, start, half), ar_tensor_slice(&b, 1, start + half, rest)}, .along_k = true};
    AR_TRY(arith->operand_b(ctx, &ob, &pb, true, s->k, ar_ctx_tp(ctx), NULL, "b"));
    AR_TRY(arith->operand_a(ctx, &oa, &pa, ob, "a"));
    for (size_t i = 0; i * each < own; i++) {
        const size_t rows = own - i * each < each ? own - i * each : each;
        chunks[i].part = (ar_part){.matrices = 1, .row = i * each * ranks, .rows = rows * ranks, .cols = count};
        AR_TRY(begin_chunk(ctx, &chunks[i], oa, ob));
    }
    for (size_t i = 0; i * each < own; i++)
        AR_TRY(end_chunk(ctx, &chunks[i], y, ep));
    return AR_OK;
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
    AR_TRY(multiply_chunks(ctx, s, &y, &ep));
    AR_TRY(ar_ctx_download(ctx, s->y + r * own[0] * N, &y));
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

/* The row of A that row i of a rank's own is, cut into chunks. */
static size_t row_of(const scattered *s, size_t ranks, size_t i)
{
    const size_t own = s->rows / ranks, rank = i / own, each = (own + s->chunks - 1) / s->chunks;
    const size_t first = i % own / each * each, rows = own - first < each ? own - first : each;
    return first * ranks + rank * rows + i % own - first;
}

/* 6, 4 and 3 rows a rank in 1 to 5 chunks, also uneven ones: 4 as 2 and 2, 3 as 2 and 1, .. */
Test(scatter, chunks_of_the_rows_beside_other_products_have_the_bits_of_the_definition)
{
    static float expected[M * N];
    for (size_t k = 25; k <= 8200; k += 8175) {
        scattered *s = given(k);
        plain_contract(expected, M, N, k, s->a, k, 1, s->b, k, 1);
        for (int i = 0; i < 15; i++) {
            const int ranks = 2 + i % 3;
            const ar_run o = {.parallel.tp = ranks};
            s->chunks = (size_t)(1 + i / 3);
            memset(s->y, 0, sizeof s->y);
            cr_assert_ok(rank_run(&o, scatter_rank, s));
            for (size_t e = 0; e < M * N; e++) {
                const float y = expected[row_of(s, (size_t)ranks, e / N) * N + e % N] + s->bias[e % N];
                const float z = ari_act32(AR_ACT_SILU, y);
                cr_assert_eq(first_different_bits(&s->y[e], &y, 1), 1, "k=%zu case %d element %zu", k, i, e);
                cr_assert_eq(first_different_bits(&s->z[e], &z, 1), 1, "k=%zu case %d element %zu", k, i, e);
            }
        }
    }
}

/* All rows of a sum, which are gathered once they are rounded, on another queue. */
static ar_status beside_rank(ar_ctx *ctx, void *user)
{
    const ari_communication *overlapped = NULL;
    const size_t shape[2] = {2, 2};
    const float ones[4] = {1, 1, 1, 1};
    const ar_operand *oa = NULL, *ob = NULL;
    ar_parts p = {.n = 1};
    ar_sum *sum = NULL;
    (void)user;
    AR_TRY(rank_upload(ctx, &p.part[0], 2, shape, ones));
    AR_TRY(ari_ctx_overlapped(ctx, &overlapped));
    AR_TRY(ar_ctx_arith(ctx)->operand_b(ctx, &ob, &p, true, 4, ar_ctx_tp(ctx), NULL, "b"));
    AR_TRY(ar_ctx_arith(ctx)->operand_a(ctx, &oa, &p, ob, "a"));
    AR_TRY(ar_ctx_arith(ctx)->contract(ctx, &sum, oa, ob));
    return ar_ctx_arith(ctx)->fold(ctx, sum, overlapped->queue, overlapped->tp, AR_ALL, "the sum");
}

Test(scatter, all_rows_of_a_sum_on_another_queue_are_refused)
{
    for (int numerics = 0; numerics < 2; numerics++) {
        const ar_run o = {.parallel.tp = 2, .numerics = (ar_numerics)numerics};
        cr_assert_refused(rank_run(&o, beside_rank, NULL), AR_ERR_UNSUPPORTED, "on the context's queue alone");
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
        const ar_run o = {.parallel.tp = 2, .numerics = (ar_numerics)numerics};
        scattered *s = given(24);
        s->rows = 5;
        cr_assert_refused(rank_run(&o, whole_rank, s), AR_ERR_INDIVISIBLE, "5 rows");
        s->rows = 2;
        s->batch = 3;
        cr_assert_eq(rank_run(&o, whole_rank, s), AR_ERR_UNSUPPORTED, "%s", ar_error_message());
    }
}
