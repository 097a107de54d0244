/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"

/* Private functions of anyrank/device.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Parses "cpu", "cuda" (AR_GPU_EACH), "cuda:1", "emulated". Errors: AR_ERR_ARG, naming the valid forms. */
AR_NODISCARD ar_status ari_device_choice_parse(ar_device_choice *c, const char *text);
/** Creates the CUDA device on one GPU, which any number of ranks may share, each with its own device and streams. Its
 *  exact products use int8 digits, 16 or 10 products depending on the number of terms, or as the environment variable
 *  ANYRANK_IMMA_PATH ("imma16", "imma10") says. Products with fewer rows or columns than ANYRANK_IMMA_MIN_ROWS use the
 *  kernel for shapes that cuBLAS refuses. Bits are equal either way, here and on the emulated device. Errors:
 *  AR_ERR_ARG (another value of those variables), AR_ERR_UNSUPPORTED (a build without CUDA, no driver, no such GPU, or
 *  one too old), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_device_cuda_create(ar_device **result, int index);
/** Creates a device that runs the CUDA device's kernels on the host, in memory that only they and `copy` can access.
 *  The environment variable ANYRANK_EMULATED_STREAMS says when the streams of all such devices of the process run their
 *  tasks: "eager", at once (default); "late:SEED", when the host waits, in an order drawn with SEED among the streams
 *  that can run; "latest:SEED", some streams, drawn at each wait, as far as they can, the others only as far as the
 *  wait needs. Bits are equal under all of these unless a wait is missing. A kernel's late error is the AR_ERR_DEVICE
 *  of the next wait and of every later call until the last queue is destroyed. Errors: AR_ERR_UNSUPPORTED (a build
 *  without it), AR_ERR_ARG (another value), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_device_emulated_create(ar_device **result);
/** Describes CUDA in this build and on this machine: versions and libraries, or why CUDA is missing. Truncates to
 *  size. */
void ari_gpu_describe(char *text, size_t size);
/** Returns the GPU for ranks that share one: c->index; 0 for AR_GPU_EACH. */
int ari_gpu_index(const ar_device_choice *c);
/** Returns the number of GPUs; 0 without a GPU or without CUDA. */
int ari_gpu_count(void);
/** Gets information without creating a context on the GPU. Errors: AR_ERR_ARG (no such GPU), AR_ERR_UNSUPPORTED. */
AR_NODISCARD ar_status ari_gpu_info_get(ar_gpu_info *out, int index);

AR_END_DECLS
