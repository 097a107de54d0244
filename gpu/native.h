/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_NATIVE_H
#define ARI_GPU_NATIVE_H

/* What libraries beside the device's own kernels must know of a CUDA device. */
#include "anyrank/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Makes the GPU of d the calling thread's, and gives the cudaStream_t that q, an inline queue of d, stands on. Errors:
 *  AR_ERR_DEVICE; AR_ERR_UNSUPPORTED: a build without CUDA. */
AR_NODISCARD ar_status ari_gpu_native_stream(ar_device *d, ar_queue *q, void **borrows);
/** The first half of that alone: the thread does not count as one that enqueues. Errors: the same. */
AR_NODISCARD ar_status ari_gpu_choose(ar_device *d);
/** "0000:3b:00.0": where the calling thread's GPU is in its machine; cut off where it does not fit. Errors: the
 *  same. */
AR_NODISCARD ar_status ari_gpu_bus_id(char *text, int size);

#ifdef __cplusplus
}
#endif

#endif
