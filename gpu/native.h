/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Interface of the device for C in addition to its table of operations. */
#include <stdbool.h>

#include "anyrank/device.h"

AR_BEGIN_DECLS

/* Properties of the CUDA device that libraries besides its own kernels need. */

/** Selects d's GPU for the calling thread, and returns the cudaStream_t of q, an inline queue of d. Errors:
 *  AR_ERR_DEVICE; AR_ERR_UNSUPPORTED: a build without CUDA. */
AR_NODISCARD ar_status ari_gpu_native_stream(ar_device *d, ar_queue *q, void **borrows);
/** Only selects the GPU. Errors: the same. */
AR_NODISCARD ar_status ari_gpu_choose(ar_device *d);
/** Returns this process's cached memory on d's GPU to the GPU once its work is done, for a library that allocates
 *  memory itself and found none. Errors: those of ari_gpu_choose, AR_ERR_TIMEOUT. */
AR_NODISCARD ar_status ari_gpu_trim(ar_device *d);
/** Sets how long d waits for work that occupies memory which it needs; 60 s before the first call. */
void ari_gpu_set_timeout(ar_device *d, uint64_t timeout_ns);
/** Writes the bus address of the calling thread's GPU, such as "0000:3b:00.0", truncated to size. Errors: those of
 *  ari_gpu_choose. */
AR_NODISCARD ar_status ari_gpu_bus_id(char *text, int size);
/** True if GPU `gpu` can read and write the memory of GPU `peer`. Needs no device, and creates no context. */
bool ari_gpu_reaches(int gpu, int peer);

/* State of CUDA's run-time library on a machine where it finds no GPU. */
typedef struct ari_gpu_machine {
    int runtime, driver; /* versions of CUDA, 13000 for 13.0; driver: the newest version that it supports, 0: no
                            driver */
    int code;            /* error code (cudaError_t) of the call; its text and name */
    const char *text, *name;
    bool loaded; /* true if the driver is loaded in the kernel */
} ari_gpu_machine;
enum { ARI_CUDA_INSUFFICIENT_DRIVER = 35, ARI_CUDA_NO_DEVICE = 100 };
/** Sets and returns the error that explains why there is no GPU: AR_ERR_UNSUPPORTED. It is plain C, so that it is
 *  tested without CUDA. */
ar_status ari_gpu_why_none(const ari_gpu_machine *m);

/* How the GPU computes the integer sums of an exact contraction: an integer of 26 bits is four digits of base 128, and
 * products of digits are int8 GEMMs into int32 (IMMA, the tensor cores' integer instructions). Both variants give the
 * same bits. */
typedef enum ari_imma_path {
    ARI_IMMA_16,  /* all 16 products of digits, in 7 sums of equal weight */
    ARI_IMMA_10,  /* 10 products by applying Karatsuba's method twice, in 9 sums */
    ARI_IMMA_AUTO /* chosen by the number of terms */
} ari_imma_path;

#define ARI_IMMA_VARIABLE "ANYRANK_IMMA_PATH"
#define ARI_IMMA_ROWS_VARIABLE "ANYRANK_IMMA_MIN_ROWS"

typedef struct ari_imma {
    ari_imma_path path;
    size_t min_rows; /* int8 products of fewer rows or columns are not asked of the library */
} ari_imma;

/** Reads the environment's choice for a new device: ANYRANK_IMMA_PATH ("imma16", "imma10"; ARI_IMMA_AUTO if unset) and
 *  ANYRANK_IMMA_MIN_ROWS (0 if unset). Errors: AR_ERR_ARG (another value). */
AR_NODISCARD ar_status ari_imma_choose(ari_imma *imma);

/* Mode of cuBLAS's fp32 GEMMs: its default (CUBLAS_COMPUTE_32F; never TF32), or each operation exactly as in the
 * formula (CUBLAS_COMPUTE_32F_PEDANTIC), which excludes some kernels. */
#define ARI_SGEMM_VARIABLE "ANYRANK_SGEMM"

/** Reads the environment's choice for a new CUDA device: ANYRANK_SGEMM ("default", "pedantic"). Errors: AR_ERR_ARG
 *  (another value). */
AR_NODISCARD ar_status ari_sgemm_choose(bool *pedantic);

AR_END_DECLS
