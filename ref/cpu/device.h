/* SPDX-License-Identifier: Apache-2.0 */
/* An instance of the CPU device and its memory. */
#pragma once

#include <pthread.h>

#include "anyrank/device.h"
#include "ref/cpu/gemm.h"

/* Memory pool of a device. Large freed buffers are kept for the next request of about their size, because a training
 * step requests the same sizes repeatedly, and new pages cost time. Used and kept memory together exceed the largest
 * past demand by at most a quarter (1/ARI_POOL_SLACK). Any thread may call these functions. */
#define ARI_POOL_KEPT 256
#define ARI_POOL_SLACK 4

typedef struct ari_block ari_block;

typedef struct ari_pool {
    pthread_mutex_t lock;
    size_t requested, peak; /* bytes of large buffers that users currently need, and their maximum so far */
    size_t in_use, cached;  /* bytes of the blocks in use, and of the free blocks kept */
    size_t n;
    ari_block *block[ARI_POOL_KEPT]; /* free blocks, the oldest first */
} ari_pool;

void ari_pool_init(ari_pool *p);
/** Frees the kept blocks. All buffers must have been freed before. */
void ari_pool_fini(ari_pool *p);
/** Allocates `bytes` bytes, 64-byte aligned, with undefined contents; 0 bytes give a valid pointer. The caller releases
 *  them with ari_pool_free. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_pool_alloc(ari_pool *p, void **out, size_t bytes);
/** Accepts NULL. */
void ari_pool_free(ari_pool *p, void *memory);

/* The kernel for sums of at least path->least_terms terms, the kernel for shorter sums, and the reason for the choice
 * in a text that remains valid. */
typedef struct ari_exact_choice {
    const ari_exact_path *path, *brief;
    const char *why;
} ari_exact_choice;

typedef struct ari_cpu_device {
    ar_device base; /* the base must be the first field, since an ar_device * points to it */
    ari_pool pool;
    ari_exact_choice exact; /* kernel for the integer sums of exact contractions */
} ari_cpu_device;

/** Returns the part common to all CPU devices, without memory and kernels, for queries of sizes. Static storage. */
const ar_device *ari_cpu_form(void);

/* --- the processor ------------------------------------------------------------------------------------------------ */

/** Returns true if the processor has all of these space-separated features, named as in Linux's /proc/cpuinfo: "avx2
 *  fma avx_vnni avx512f avx512dq avx512bw avx512vl avx512_vnni avx512vbmi amx_int8" on x86, "asimd asimddp i8mm bf16
 *  sve sve2" on ARM. The operating system saves the registers of reported AVX and AVX-512 features; a program must
 *  request AMX from it. */
bool ari_cpu_has(const char *names);

#define ARI_EXACT_VARIABLE "ANYRANK_EXACT_PATH"
/** The paths of this build, the fastest first; NULL from the end of the list on. */
const ari_exact_path *ari_exact_path_at(size_t i);
/** Chooses the kernel named by the environment variable ANYRANK_EXACT_PATH for a device that is being created, or the
 *  first kernel that the processor supports. All kernels give the same integers. Errors: AR_ERR_ARG (a name that is not
 *  in the list), AR_ERR_UNSUPPORTED (the processor lacks a required feature). */
AR_NODISCARD ar_status ari_exact_choose(ari_exact_choice *choice);
