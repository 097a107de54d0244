/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The exact contraction's own kernel for compute capability 9.0, in place of the library's products: the CUDA device
 * launches it (gpu/cuda/gemm_sm90.cu), the emulated one runs it on a model of that machine (gpu/emulated/gemm_sm90.cc).
 * The same bits. */
#include "gpu/epilogue.h"
#include "gpu/tiles/plan.h"

namespace ARI_GPU
{

/* True if this device is to run the kernel (ANYRANK_IMMA_KERNEL, gpu/native.h), and it can take these non-empty
 * operands. */
bool sm90_takes(const ar_device *d, const packed &a, const packed &b);

#if defined(__CUDACC__)
/* Properties of the driver and the GPU that the kernel's launches need, found once for a device. */
struct sm90_launcher;
/* For GPU `index`, the calling thread's; gives; `free`. Errors: AR_ERR_UNSUPPORTED, saying why this GPU cannot run it,
 * AR_ERR_DEVICE, AR_ERR_MEMORY. */
ar_status sm90_create(sm90_launcher **gives, int index);
/* The device's launcher: gpu/cuda/runtime.cu. */
const sm90_launcher *sm90_of(const ar_device *d);
#endif

/* A part of the contraction of a and b (gpu/tiles/plan.h), each result given to `out`. Errors: AR_ERR_DEVICE. */
ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &part,
                    const integers_out &out);
ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &part,
                    const values_out<false> &out);
ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &part,
                    const values_out<true> &out);
ar_status sm90_gemm(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &part,
                    const accumulator_out &out);

} // namespace ARI_GPU
