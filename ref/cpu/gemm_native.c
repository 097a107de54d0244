/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/blis_calls.h"
#include "ref/cpu/contract_kernels.h"
#include "ref/cpu/matrix.h"
#include "ref/cpu/parallel.h"

/** Slot gemm_f32. c[..,m,n] (+)= a[..,m,k] b[..,n,k]^T by BLIS's sgemm, any strides; k = 0 gives +0 (or leaves c).
 *  A batch is spread over the threads with one BLIS thread each: the small products of attention gain nothing from
 *  threads inside. Numerics: fp32 in BLIS's blocking. Errors: none. */
ar_status ari_cpu_gemm_f32(ar_device *d, ar_queue *q, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b,
                           bool add)
{
    (void)q;
    const ari_matrices cm = ari_matrices_of(c), am = ari_matrices_of(a), bm = ari_matrices_of(b);
    if (cm.batch == 0 || cm.rows == 0 || cm.cols == 0)
        return AR_OK;
    const ari_blis_view cv = {cm.rows, cm.cols, cm.row_stride, cm.col_stride};
    const ari_blis_view av = {am.rows, am.cols, am.row_stride, am.col_stride};
    const ari_blis_view bv = {bm.cols, bm.rows, bm.col_stride, bm.row_stride};
    const size_t work = cm.rows * cm.cols * (am.cols + 1);
    if (cm.batch == 1) {
        ari_blis_sgemm(c->data.ptr, cv, a->data.ptr, av, b->data.ptr, bv, add, ari_threads_for(d, cm.rows, work / 8));
        return AR_OK;
    }
    const int threads = ari_threads_for(d, cm.batch, work / 8 * cm.batch);
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < cm.batch; i++)
        ari_blis_sgemm(ari_matrix_at(c, i), cv, ari_matrix_at(a, i), av, ari_matrix_at(b, i), bv, add, 1);
    return AR_OK;
}
