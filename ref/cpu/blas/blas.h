/* SPDX-License-Identifier: Apache-2.0 */
/* Products by the library that the build is linked with (-DANYRANK_BLAS): one of the files in this folder is compiled.
 * Sharing work over threads, splitting and converting happen above this interface, so that every library is used in the
 * same way. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/device.h"

/* Row and column strides are free, so that transposition is a matter of strides. */
typedef struct ari_blas_view {
    size_t rows, cols;
    ptrdiff_t row_stride, col_stride; /* elements */
} ari_blas_view;

/** c[m,n] = a[m,k] b[k,n] + (add ? c : 0), in the calling thread alone: the library's own threads take no part. Any
 *  extent may be 0. Without `add` c is not read, so that a NaN there does not survive. c overlaps neither a nor b. */
void ari_blas_sgemm(float *c, ari_blas_view cv, const float *a, ari_blas_view av, const float *b, ari_blas_view bv,
                    bool add);
/** The same of binary64. If all are integers and no sum of magnitudes exceeds 2^53 the result must be exact in any
 *  order: true of every library that forms the k products of an element and adds them up, not of Strassen's. */
void ari_blas_dgemm(double *c, ari_blas_view cv, const double *a, ari_blas_view av, const double *b, ari_blas_view bv,
                    bool add);

/** ari_cpu_select_kernels of this library. */
void ari_blas_start(void);
/** For a new device: whether ranks can share the library, which is held to one thread of each call where it can be.
 *  Errors: AR_ERR_UNSUPPORTED (an OpenBLAS that they cannot share). */
AR_NODISCARD ar_status ari_blas_check(void);
/** Fills the four fields of the library. */
void ari_blas_describe(ar_cpu_info *out);
