/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Matrix products computed by a library: gpu/cuda/blas.cu uses cuBLAS, gpu/emulated/blas.cc plain loops. Matrices are
 * row-major: c [m, n], a [m, k], b [n, k], c (+)= a b^T. ld is the number of elements from one row to the next; a batch
 * has `step` elements from one matrix to the next (for a and b, 0: the same matrix each time). No extent is 0. */
#include "gpu/kernel.h"
#include "gpu/tiles/plan.h"

namespace ARI_GPU
{

/* Returns the machine model for blas_int8, of the library and the GPU. The host's numbers are so small that even small
 * results have several tiles in both dimensions. */
ari_tile_machine blas_machine(ar_device *d);

struct blas_shape {
    size_t m, n, k, batch;
};
struct blas_matrix {
    ar_buf data; /* only read if it belongs to a or b */
    size_t ld, step;
    bool transposed; /* float only: the rows are the columns of the stored matrix, ld apart */
};

/* Computes an int32 product of int8 operands, exact if every sum fits int32. ld and k of a and b are multiples of 16,
 * and so are their addresses and, with several matrices, their steps; n and ld of c are multiples of 4. The emulated
 * device checks this. Errors: AR_ERR_DEVICE, AR_ERR_MEMORY, AR_ERR_INTERNAL (misaligned operands), AR_ERR_UNSUPPORTED:
 * the library has no such product or refuses this size, and nothing was enqueued. */
ar_status blas_int8(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                    const blas_matrix &b);
/* Computes the same product for any size, by a kernel of gpu/int8.cu if the library refuses it.
 * ari_gpu_refused_products lists the refused shapes. Errors: those of blas_int8. */
ar_status int8_product(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                       const blas_matrix &b);
/* Computes a product with fp32 sums. a and b are fp32 or, for AR_PRECISION_BF16, bf16 of two bytes; c is AR_F32, or
 * AR_BF16 if a and b are bf16, as `result` says. c is not transposed. Errors: those of blas_int8. */
ar_status blas_float(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                     const blas_matrix &b, bool add, ar_precision operands, ar_dtype result);

#if defined(__CUDACC__)
/* Creates and destroys a CUDA device's state for the library, on a thread whose GPU is the device's. Errors:
 * AR_ERR_MEMORY, AR_ERR_UNSUPPORTED (cuBLAS is missing or has another version). */
ar_status blas_create(void **handle);
/* Allocates for q now what cuBLAS would otherwise allocate with the first product: that may wait for the GPU while a
 * collective waits for another rank. */
ar_status blas_prepare(ar_device *d, ar_queue *q);
void blas_destroy(void *blas); /* accepts NULL */
/* The device's state from blas_create: gpu/cuda/runtime.cu. */
void *blas_of(ar_device *d);
#endif

} // namespace ARI_GPU
