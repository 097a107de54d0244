/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_BLIS_CALLS_H
#define ARI_CPU_BLIS_CALLS_H

#include <stddef.h>

/* The two products that the project asks of BLIS, by its expert interface: the number of threads goes with the call,
 * not into the process-wide setting. Row and column strides are free, so that transposition is a matter of strides.
 *   c[m,n] = a[m,k] b[k,n] + (add ? c : 0) */
typedef struct ari_blis_view {
    size_t rows, cols;
    ptrdiff_t row_stride, col_stride; /* elements */
} ari_blis_view;

void ari_blis_sgemm(float *c, ari_blis_view cv, const float *a, ari_blis_view av, const float *b, ari_blis_view bv,
                    int add, int threads);
void ari_blis_dgemm(double *c, ari_blis_view cv, const double *a, ari_blis_view av, const double *b, ari_blis_view bv,
                    int add, int threads);

#endif
