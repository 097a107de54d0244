/* SPDX-License-Identifier: Apache-2.0 */
/* The native product, over whichever library multiplies (blas.h). */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/cpu/blas/blas.h"
#include "ref/cpu/storage.h"

/* Parts of a cut dimension are multiples of this many rows or columns, which the register tiles of most libraries'
 * kernels divide or nearly do. */
#define STEP ((size_t)48)

static ari_blas_view view_of(const ar_tensor *m)
{
    return (ari_blas_view){m->shape[0], m->shape[1], m->stride[0], m->stride[1]};
}

/* c (+)= a b^T of fp32 matrices. */
static void multiply_f32(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add)
{
    const ar_tensor columns = ari_tensor_transposed(b);
    ari_blas_sgemm(c->data.ptr, view_of(c), a->data.ptr, view_of(a), columns.data.ptr, view_of(&columns), add);
}

/* --- of bf16 numbers: pieces of the matrices are widened, and those of c rounded when all their terms are there --- */

/* Rows, columns and terms of a piece: each number is widened once for 512 products, and three pieces fit 3 MiB. */
#define PIECE ((size_t)512)

static size_t at_most_piece(size_t n)
{
    return n < PIECE ? n : PIECE;
}

/* The rows from `row` and the columns from `col` on, as many as a piece has. */
static ar_tensor piece_of(const ar_tensor *m, size_t row, size_t col)
{
    const ar_tensor rows = ar_tensor_slice(m, 0, row, at_most_piece(m->shape[0] - row));
    return ar_tensor_slice(&rows, 1, col, at_most_piece(m->shape[1] - col));
}

/* Returns the piece itself if it is fp32, otherwise fp32 memory from *room on in the piece's order. */
static ar_tensor fp32_of(const ar_tensor *piece, float **scratch, bool with_values)
{
    if (piece->dtype != AR_BF16)
        return *piece;
    const bool turned = piece->stride[1] != 1 && piece->stride[0] == 1;
    ar_tensor wide = *piece;
    wide.dtype = AR_F32;
    wide.stride[0] = turned ? 1 : (ptrdiff_t)piece->shape[1];
    wide.stride[1] = turned ? (ptrdiff_t)piece->shape[0] : 1;
    wide.data.ptr = *scratch;
    *scratch += piece->shape[0] * piece->shape[1];
    if (with_values)
        ari_convert(&wide, piece);
    return wide;
}

/* Returns the number of floats of scratch that a product needs. */
static size_t room_of(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b)
{
    const size_t m = at_most_piece(c->shape[c->ndim - 2]), n = at_most_piece(c->shape[c->ndim - 1]);
    const size_t k = at_most_piece(a->shape[a->ndim - 1]);
    const bool any = c->dtype == AR_BF16 || a->dtype == AR_BF16 || b->dtype == AR_BF16;
    return any ? m * n + m * k + n * k + ARI_LINE : 0;
}

/* c (+)= a b^T. */
static void multiply_pieces(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, float *scratch)
{
    const size_t terms = a->shape[1];
    for (size_t row = 0; row < c->shape[0]; row += PIECE)
        for (size_t col = 0; col < c->shape[1]; col += PIECE) {
            float *free_room = scratch;
            const ar_tensor result = piece_of(c, row, col), sum = fp32_of(&result, &free_room, add);
            for (size_t k = 0; k == 0 || k < terms; k += PIECE) {
                float *rest = free_room;
                const ar_tensor a_piece = piece_of(a, row, k), b_piece = piece_of(b, col, k);
                const ar_tensor left = fp32_of(&a_piece, &rest, true), right = fp32_of(&b_piece, &rest, true);
                multiply_f32(&sum, &left, &right, add || k > 0);
            }
            if (result.dtype == AR_BF16)
                ari_convert(&result, &sum);
        }
}

/* room: room_of floats; NULL if all operands are fp32. */
static void multiply_operands(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, float *scratch)
{
    if (scratch)
        multiply_pieces(c, a, b, add, scratch);
    else
        multiply_f32(c, a, b, add);
}

/* Multiply-adds that take as long as one elementwise operation of other kernels. Products of a million multiply-adds,
 * about 20 us, and more are divided among threads; threads spin between two products for this purpose (cli/main.c). */
#define OPERATION ((size_t)32)

/* --- shared out --------------------------------------------------------------------------------------------------- */

/* Computes one product whose rows or columns, whichever are more, are split over threads. A library's own threads meet
 * at spinning barriers (BLIS's spin without limit), which cost a time slice each if another process or rank has the
 * core. These threads meet once, at the end. */
static void shared_product(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, int threads,
                           float *rooms, size_t capacity)
{
    const bool down = c->shape[0] >= c->shape[1];
    const size_t extent = down ? c->shape[0] : c->shape[1], steps = (extent + STEP - 1) / STEP;
    const size_t parts = steps < (size_t)threads ? steps : (size_t)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < parts; i++) {
        const size_t begin = i * steps / parts * STEP, end = (i + 1) * steps / parts * STEP;
        const size_t n = (end < extent ? end : extent) - begin;
        const ar_tensor own_c = ar_tensor_slice(c, down ? 0 : 1, begin, n);
        const ar_tensor own_a = down ? ar_tensor_slice(a, 0, begin, n) : *a;
        const ar_tensor own_b = down ? *b : ar_tensor_slice(b, 0, begin, n);
        multiply_operands(&own_c, &own_a, &own_b, add, rooms ? rooms + ari_thread_number() * capacity : NULL);
    }
}

/** Slot gemm_f32. Computes c[..,m,n] (+)= a[..,m,k] b[..,n,k]^T with the library's sgemm for any strides; k = 0 gives
 *  +0 (or leaves c). The matrices of a batch, such as attention's heads, or the parts of one product are distributed
 *  over the threads, and the library computes each in the calling thread. Numerics: fp32 with the library's blocking.
 *  Errors: AR_ERR_MEMORY (bf16 needs scratch for three pieces per thread); nothing is written then. */
ar_status ari_cpu_gemm_f32(ar_device *d, ARI_AT_ONCE, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                           bool add, ar_precision operands)
{
    (void)operands; /* products of such operands are exact in fp32 anyway */
    const ari_matrices m = ari_matrices_of(c);
    const size_t work = m.rows * m.cols * (a->shape[a->ndim - 1] + 1), capacity = room_of(c, a, b);
    if (m.batch == 0 || m.rows == 0 || m.cols == 0)
        return AR_OK;
    const size_t longer = m.rows > m.cols ? m.rows : m.cols, pieces = m.batch == 1 ? longer : m.batch;
    const int threads = ari_threads_for(d, pieces, work / OPERATION * m.batch);
    ARI_OWNED void *rooms = NULL;
    if (capacity > 0)
        AR_TRY(ari_alloc(&rooms, (size_t)threads * capacity, sizeof(float), "the widened pieces of a product"));
    if (m.batch == 1) {
        const ar_tensor result = ari_matrix_view(c, 0), left = ari_matrix_view(a, 0), right = ari_matrix_view(b, 0);
        shared_product(&result, &left, &right, add, threads, rooms, capacity);
    } else {
        ARI_PARALLEL_FOR (i, m.batch, d, work / OPERATION * m.batch) {
            const ar_tensor dst = ari_matrix_view(c, i), left = ari_matrix_view(a, i), right = ari_matrix_view(b, i);
            multiply_operands(&dst, &left, &right, add, rooms ? (float *)rooms + ari_thread_number() * capacity : NULL);
        }
    }
    return AR_OK;
}
