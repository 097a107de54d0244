/* SPDX-License-Identifier: Apache-2.0 */
/* Products by the library that the build is linked with (-DANYRANK_BLAS): one of the files in this folder is compiled.
 * Sharing work over threads, splitting and converting happen above this interface, so that every library is used in the
 * same way. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/device.h"

/* A matrix with arbitrary row and column strides, so that transposition only changes strides. */
typedef struct ari_blas_view {
    size_t rows, cols;
    ptrdiff_t row_stride, col_stride; /* elements */
} ari_blas_view;

/** Computes c[m,n] = a[m,k] b[k,n] + (add ? c : 0) in the calling thread only, without the library's threads. Any
 *  extent may be 0. Without `add`, c is not read, so a NaN in it has no effect. c overlaps neither a nor b. */
void ari_blas_sgemm(float *c, ari_blas_view cv, const float *a, ari_blas_view av, const float *b, ari_blas_view bv,
                    bool add);
/** Does the same in binary64. If all elements are integers and no sum of magnitudes exceeds 2^53, the result must be
 *  exact in any order. This holds for every library that computes an element's k products and adds them, but not for
 *  Strassen's algorithm. */
void ari_blas_dgemm(double *c, ari_blas_view cv, const double *a, ari_blas_view av, const double *b, ari_blas_view bv,
                    bool add);

/** ari_cpu_select_kernels of this library. */
void ari_blas_start(void);
/** Checks for a new device whether ranks can share the library, and limits the library to one thread per call if
 *  possible. Errors: AR_ERR_UNSUPPORTED (an OpenBLAS that ranks cannot share). */
AR_NODISCARD ar_status ari_blas_check(void);
/** Fills the four fields of the library. */
void ari_blas_describe(ar_cpu_info *out);
