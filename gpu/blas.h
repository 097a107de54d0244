/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Matrix products that a library does: gpu/cuda/blas.cu by cuBLAS, gpu/emulated/blas.cc by plain loops. Matrices are
 * row-major: c [m, n], a [m, k], b [n, k], c (+)= a b^T; ld: elements from one row to the next; batch: so many, `step`
 * elements apart (a and b, 0: the same one each time). No extent is 0. */
#include "gpu/kernel.h"
#include "gpu/tiles/plan.h"

namespace ARI_GPU
{

/* The machine model of blas_int8: of the library and the GPU. On the host, numbers so small that small results meet
 * several tiles in both dimensions. */
ari_tile_machine blas_machine(ar_device *d);

struct blas_shape {
    size_t m, n, k, batch;
};
struct blas_matrix {
    ar_buf data; /* read where it is a or b */
    size_t ld, step;
    bool transposed; /* float alone: the rows are the columns of what lies in memory, ld from one of them to the next */
};

/* int32 = int8 times int8, exact where every sum fits int32. ld and k of a and b: multiples of 16, and so are the
 * addresses and, where there are several matrices, steps; n and ld of c: multiples of 4. The emulated device checks all
 * of it. Errors: AR_ERR_DEVICE, AR_ERR_MEMORY, AR_ERR_INTERNAL (operands that are not so), AR_ERR_UNSUPPORTED: the
 * library has no such product, or takes no such size; nothing was enqueued. */
ar_status blas_int8(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                    const blas_matrix &b);
/* The same of any size, by a kernel of gpu/int8.cu where the library has none: ari_gpu_refused_products lists these
 * shapes. Errors: as above. */
ar_status int8_product(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                       const blas_matrix &b);
/* a and b: fp32 words or, for AR_PRECISION_BF16, bf16 numbers of two bytes; c: AR_F32 or, where a and b are bf16
 * numbers, AR_BF16, as `result` says; the sums: fp32. c is not transposed. Errors: as above. */
ar_status blas_float(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                     const blas_matrix &b, bool add, ar_precision operands, ar_dtype result);

#if defined(__CUDACC__)
/* A CUDA device's state for the library: created and destroyed with it, in a thread whose GPU is the device's. Errors:
 * AR_ERR_MEMORY, AR_ERR_UNSUPPORTED (no cuBLAS is found, or another version). */
ar_status blas_create(void **handle);
/* Takes for q now what cuBLAS would take with the first product: that may wait for the GPU, where a collective may wait
 * for another rank. */
ar_status blas_prepare(ar_device *d, ar_queue *q);
void blas_destroy(void *blas); /* accepts NULL */
/* The device's state from blas_create: gpu/cuda/runtime.cu. */
void *blas_of(ar_device *d);
#endif

} // namespace ARI_GPU
