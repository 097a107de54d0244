/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Errors that CUDA calls sticky: after a kernel has failed, every later call of the process returns the same error, and
 * calls that release resources may take seconds. The first error is the actual one, and all callers get it from then
 * on. Plain C, so that it can be tested without a GPU. */
#include <stdbool.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Sticky errors by name and number (cudaError_t): those whose description ends with "the process must be terminated",
 * and memory errors, which end the context as well. */
#define ARI_GPU_STICKY(X)                \
    X(cudaErrorECCUncorrectable, 214)    \
    X(cudaErrorNvlinkUncorrectable, 220) \
    X(cudaErrorIllegalAddress, 700)      \
    X(cudaErrorLaunchTimeout, 702)       \
    X(cudaErrorContextIsDestroyed, 709)  \
    X(cudaErrorAssert, 710)              \
    X(cudaErrorHardwareStackError, 714)  \
    X(cudaErrorIllegalInstruction, 715)  \
    X(cudaErrorMisalignedAddress, 716)   \
    X(cudaErrorInvalidAddressSpace, 717) \
    X(cudaErrorInvalidPc, 718)           \
    X(cudaErrorLaunchFailure, 719)       \
    X(cudaErrorMpsClientTerminated, 810)
/* Sticky errors that CUDA 12.0 does not have. */
#define ARI_GPU_STICKY_NEWER(X)       \
    X(cudaErrorContained, 226)        \
    X(cudaErrorTensorMemoryLeak, 721) \
    X(cudaErrorExternalDevice, 911)

bool ari_gpu_error_is_sticky(int code);

/** Sets and returns the error of a CUDA call: AR_ERR_DEVICE, "the GPU failed: WHAT: TEXT (NAME)"; after a sticky error,
 *  always returns that error. Threads: any. */
ar_status ari_gpu_failed(int code, const char *label, const char *text, const char *name);

/** AR_OK, or the sticky error again. */
ar_status ari_gpu_check_lost(void);
/** Returns true after a sticky error: then no GPU resource must be released, and CUDA calls are useless. Sets no
 *  error. */
bool ari_gpu_is_lost(void);

AR_END_DECLS
