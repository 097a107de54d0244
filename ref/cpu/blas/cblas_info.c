/* SPDX-License-Identifier: Apache-2.0 */
/* -DANYRANK_BLAS=cblas: any library with CBLAS. If the linker finds OpenBLAS's own functions, more is reported. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "ref/cpu/blas/blas.h"
#include "ref/cpu/device.h"

#if defined(__ELF__)
/* Declarations of OpenBLAS's header, except for const. */
char *openblas_get_config(void) __attribute__((weak));
char *openblas_get_corename(void) __attribute__((weak));
int openblas_get_parallel(void) __attribute__((weak));
void openblas_set_num_threads(int n) __attribute__((weak));
#define IS_OPENBLAS (openblas_get_config && openblas_get_corename && openblas_get_parallel && openblas_set_num_threads)
#else
#define IS_OPENBLAS 0
#define openblas_get_config() ""
#define openblas_get_corename() ""
#define openblas_get_parallel() 0
#define openblas_set_num_threads(n) (void)(n)
#endif
enum { NO_THREADS, PTHREADS, OPENMP }; /* openblas_get_parallel */

void ari_blas_start(void)
{
#if defined(__APPLE__)
    (void)setenv("VECLIB_MAXIMUM_THREADS", "1", 0); /* Accelerate's */
#endif
}

ar_status ari_blas_check(void)
{
    if (!IS_OPENBLAS)
        return AR_OK;
    const char *problem = NULL;
    if (strstr(openblas_get_config(), "USE64BITINT"))
        problem = "64-bit integers (USE64BITINT), expected 32-bit ones";
    /* Without either, all threads share its buffers: wrong results if two ranks multiply at the same time. */
    else if (openblas_get_parallel() == NO_THREADS && !strstr(openblas_get_config(), "USE_LOCKING"))
        problem = "neither threads nor locks, so that only one thread may call it: expected pthreads or USE_LOCKING";
    else if (openblas_get_parallel() == OPENMP)
        problem = "OpenMP, whose threads cannot be held to one: expected pthreads";
    if (problem)
        return ar_error_set(AR_ERR_UNSUPPORTED, "cpu device: OpenBLAS was built with %s", problem);
    /* Ranks call it from their own threads. With several threads it would use cores that other ranks compute on. */
    openblas_set_num_threads(1);
    return AR_OK;
}

/* Returns OpenBLAS's name of the kernels that this processor can run if `core` names kernels without AVX2, otherwise
 * NULL. A version of OpenBLAS that is older than the processor takes it for an old one and multiplies at a fifth of the
 * speed. */
static const char *newer_core(const char *core)
{
    static const char *const old[] = {"Prescott", "Core2",        "Penryn",    "Dunnington", "Nehalem",     "Atom",
                                      "Opteron",  "Opteron_SSE3", "Barcelona", "Bobcat",     "Sandybridge", "Generic"};
    for (size_t i = 0; i < sizeof old / sizeof *old; i++) {
        if (strcasecmp(core, old[i]) == 0)
            return ari_cpu_has("avx512f avx512bw avx512dq avx512vl") ? "SkylakeX"
                   : ari_cpu_has("avx2 fma")                         ? "Haswell"
                                                                     : NULL;
    }
    return NULL;
}

void ari_blas_describe(ar_cpu_info *out)
{
    char version[24] = "of unknown version";
    const char *newer = IS_OPENBLAS ? newer_core(openblas_get_corename()) : NULL;
    if (IS_OPENBLAS)
        (void)sscanf(openblas_get_config(), "OpenBLAS %23s", version);
    (void)snprintf(out->blas, sizeof out->blas, "%s", IS_OPENBLAS ? "OpenBLAS" : "CBLAS");
    (void)snprintf(out->blas_version, sizeof out->blas_version, "%s", version);
    (void)snprintf(out->blas_kernels, sizeof out->blas_kernels, "%s",
                   IS_OPENBLAS ? openblas_get_corename() : "unknown");
    (void)snprintf(out->blas_reason, sizeof out->blas_reason, "the library's own choice%s%.9s",
                   newer ? "; this processor has more: OPENBLAS_CORETYPE=" : "", newer ? newer : "");
}
