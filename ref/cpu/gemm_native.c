/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/blis_calls.h"
#include "ref/cpu/contract_kernels.h"
#include "ref/cpu/matrix.h"
#include "ref/cpu/parallel.h"

/* Parts of a cut dimension are multiples of this many rows or columns, which all of BLIS's register tiles divide or
 * nearly do. */
#define STEP ((size_t)48)

/* One product whose rows or columns, whichever are more, are shared out. BLIS's own threads meet at barriers that spin
 * for ever, which costs a time slice each where another process or rank has the core; these meet once, at the end. */
static void shared_product(const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add, int threads)
{
    const ari_matrices cm = ari_matrices_of(c), am = ari_matrices_of(a), bm = ari_matrices_of(b);
    const bool down = cm.rows >= cm.cols;
    const size_t extent = down ? cm.rows : cm.cols, steps = (extent + STEP - 1) / STEP;
    const size_t parts = steps < (size_t)threads ? steps : (size_t)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < parts; i++) {
        const size_t from = i * steps / parts * STEP, end = (i + 1) * steps / parts * STEP;
        const size_t n = (end < extent ? end : extent) - from;
        const ptrdiff_t at = (ptrdiff_t)from;
        const ari_blis_view cv = {down ? n : cm.rows, down ? cm.cols : n, cm.row_stride, cm.col_stride};
        const ari_blis_view av = {cv.rows, am.cols, am.row_stride, am.col_stride};
        const ari_blis_view bv = {bm.cols, cv.cols, bm.col_stride, bm.row_stride};
        ari_blis_sgemm((float *)c->data.ptr + at * (down ? cm.row_stride : cm.col_stride), cv,
                       (const float *)a->data.ptr + (down ? at * am.row_stride : 0), av,
                       (const float *)b->data.ptr + (down ? 0 : at * bm.row_stride), bv, add, 1);
    }
}

/** Slot gemm_f32. c[..,m,n] (+)= a[..,m,k] b[..,n,k]^T by BLIS's sgemm, any strides; k = 0 gives +0 (or leaves c).
 *  Batches and parts of a product are spread over the threads with one BLIS thread each.
 *  Numerics: fp32 in BLIS's blocking. Errors: none. */
ar_status ari_cpu_gemm_f32(ar_device *d, ar_queue *q, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                           bool add, ar_precision operands)
{
    (void)q;
    (void)operands; /* every product of them is exact in fp32 anyway */
    const ari_matrices cm = ari_matrices_of(c), am = ari_matrices_of(a), bm = ari_matrices_of(b);
    if (cm.batch == 0 || cm.rows == 0 || cm.cols == 0)
        return AR_OK;
    const size_t work = cm.rows * cm.cols * (am.cols + 1);
    if (cm.batch == 1) {
        shared_product(c, a, b, add, ari_threads_for(d, cm.rows > cm.cols ? cm.rows : cm.cols, work / 8));
        return AR_OK;
    }
    const ari_blis_view cv = {cm.rows, cm.cols, cm.row_stride, cm.col_stride};
    const ari_blis_view av = {am.rows, am.cols, am.row_stride, am.col_stride};
    const ari_blis_view bv = {bm.cols, bm.rows, bm.col_stride, bm.row_stride};
    const int threads = ari_threads_for(d, cm.batch, work / 8 * cm.batch);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < cm.batch; i++)
        ari_blis_sgemm(ari_matrix_at(c, i), cv, ari_matrix_at(a, i), av, ari_matrix_at(b, i), bv, add, 1);
    return AR_OK;
}
