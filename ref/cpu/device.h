/* SPDX-License-Identifier: Apache-2.0 */
/* An instance of the CPU device, and its memory. */
#pragma once

#include <pthread.h>

#include "anyrank/device.h"
#include "ref/cpu/gemm.h"

/* Memory of a device. Large buffers that are given back are kept for the next one of about their size: a training step
 * asks for the same sizes again and again, and fresh pages cost time. What is in use and what is kept are together
 * at most a quarter (1/ARI_POOL_SLACK) more than what users needed at some moment before. Any thread may call. */
#define ARI_POOL_KEPT 256
#define ARI_POOL_SLACK 4

typedef struct ari_block ari_block;

typedef struct ari_pool {
    pthread_mutex_t lock;
    size_t requested, peak; /* bytes of large buffers that users need now, and at most so far */
    size_t in_use, cached;  /* bytes of the blocks that they have, and of those that wait */
    size_t n;
    ari_block *block[ARI_POOL_KEPT]; /* the kept ones, the longest kept first */
} ari_pool;

void ari_pool_init(ari_pool *p);
/** Frees what is kept. All buffers must have been given back. */
void ari_pool_fini(ari_pool *p);
/** Gives `bytes` bytes (0: a valid pointer all the same), 64-byte aligned, contents undefined; ari_pool_free. Errors:
 *  AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_pool_alloc(ari_pool *p, void **out, size_t bytes);
/** Accepts NULL. */
void ari_pool_free(ari_pool *p, void *memory);

/* The path of sums of at least path->least_terms terms, that of shorter ones, and why it is the former, in words that
 * remain valid. */
typedef struct ari_exact_choice {
    const ari_exact_path *path, *brief;
    const char *why;
} ari_exact_choice;

typedef struct ari_cpu_device {
    ar_device base; /* first: an ar_device of this kind is one of these */
    ari_pool pool;
    ari_exact_choice exact; /* how it makes the integer sums of an exact contraction */
} ari_cpu_device;

/** The part common to every CPU device, with no memory and no path: for queries of sizes. Static storage. */
const ar_device *ari_cpu_form(void);

/* --- the processor ------------------------------------------------------------------------------------------------ */

/** True if it has all of these, space-separated, as /proc/cpuinfo of Linux spells them: "avx2 fma avx_vnni avx512f
 *  avx512dq avx512bw avx512vl avx512_vnni avx512vbmi amx_int8" are known on x86, "asimd asimddp i8mm bf16 sve sve2" on
 *  ARM. The operating system saves the registers of AVX and AVX-512 that are reported; a program asks it for those of
 *  AMX. */
bool ari_cpu_has(const char *names);

#define ARI_EXACT_VARIABLE "ANYRANK_EXACT_PATH"
/** The paths of this build, the fastest first; NULL from the end of the list on. */
const ari_exact_path *ari_exact_path_at(size_t i);
/** The path that the environment variable ANYRANK_EXACT_PATH names, for a device that is created now, or the first that
 *  the processor has. Every path gives the same integers. Errors: AR_ERR_ARG (a name that is not in the list),
 *  AR_ERR_UNSUPPORTED (this processor lacks what the path needs). */
AR_NODISCARD ar_status ari_exact_choose(ari_exact_choice *choice);
