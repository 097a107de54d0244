/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_BLAS_H
#define ARI_GPU_BLAS_H

/* Matrix products that a library does: gpu/blas_cublas.cu by cuBLAS, gpu/blas_host.cc by plain loops. Matrices are
 * row-major: c [m, n], a [m, k], b [n, k], c (+)= a b^T; ld: elements from one row to the next; batch: so many, `step`
 * elements apart (0: the same one each time). */
#include "gpu/runtime.h"

namespace ARI_GPU
{

struct blas_shape {
    size_t m, n, k, batch;
};
struct blas_matrix {
    ar_buf data; /* read where it is a or b */
    size_t ld, step;
    bool transposed; /* float alone: the rows are the columns of what lies in memory, ld from one of them to the next */
};

/* int32 = int8 times int8, exact: k up to 131071 of digits of at most 64. ld and k of a and b: multiples of 16, and so
 * are the addresses; n: a multiple of 4. */
ar_status blas_int8(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                    const blas_matrix &b, bool add);
/* fp32 words, added up in fp32. c is not transposed. */
ar_status blas_float(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                     const blas_matrix &b, bool add, ar_precision operands);

} // namespace ARI_GPU

#endif
