/* SPDX-License-Identifier: Apache-2.0 */
/* -DANYRANK_BLAS=openblas: its threads, and which of its kernels run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "ref/cpu/blas/vendor.h"

/* As its own header has them, but for const. */
char *openblas_get_config(void);
char *openblas_get_corename(void);
int openblas_get_parallel(void);
int openblas_get_num_threads(void);
void openblas_set_num_threads(int n);
enum { NO_THREADS, PTHREADS, OPENMP }; /* openblas_get_parallel */

/* Built with threads of its own it has one setting for the process: at 1 a call neither wakes nor waits for another
 * thread. Built with OpenMP it asks OpenMP at every call for the number of this thread's team, in which it also
 * ignores its own setting; that of the caller, who may be a user's thread, is put back. */
int ari_blas_alone(void)
{
    int before = 1;
    if (openblas_get_parallel() != OPENMP && openblas_get_num_threads() != 1)
        openblas_set_num_threads(1);
#if defined(_OPENMP)
    if (openblas_get_parallel() == OPENMP) {
        before = omp_get_max_threads();
        if (before != 1)
            omp_set_num_threads(1);
    }
#endif
    return before;
}

void ari_blas_together(int threads)
{
#if defined(_OPENMP)
    if (threads != 1)
        omp_set_num_threads(threads);
#endif
    (void)threads;
}

/* It knows new processors, and reads OPENBLAS_CORETYPE when it is loaded. */
void ari_blas_start(void)
{
}

ar_status ari_blas_check(void)
{
    if (strstr(openblas_get_config(), "USE64BITINT"))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "cpu device: OpenBLAS was built with 64-bit integers (USE64BITINT), expected 32-bit ones");
    /* Without either its buffers are everyone's at once: wrong results where two ranks multiply. */
    if (openblas_get_parallel() == NO_THREADS && !strstr(openblas_get_config(), "USE_LOCKING"))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "cpu device: OpenBLAS was built without threads and without locks, so that only one "
                            "thread may call it; expected one with pthreads, OpenMP, or USE_LOCKING");
#if !defined(_OPENMP)
    if (openblas_get_parallel() == OPENMP)
        return ar_error_set(
            AR_ERR_UNSUPPORTED,
            "cpu device: OpenBLAS was built with OpenMP, whose threads a build of anyrank without OpenMP "
            "cannot hold to one: expected one with pthreads");
#endif
    return AR_OK;
}

void ari_blas_describe(ar_cpu_info *out)
{
    static const char *const threads[] = {[NO_THREADS] = "no threads", [PTHREADS] = "pthreads", [OPENMP] = "OpenMP"};
    const char *set = getenv("OPENBLAS_CORETYPE");
    const int parallel = openblas_get_parallel();
    char version[24] = "of unknown version";
    (void)sscanf(openblas_get_config(), "OpenBLAS %23s", version);
    (void)snprintf(out->blas, sizeof out->blas, "OpenBLAS");
    (void)snprintf(out->blas_version, sizeof out->blas_version, "%s (%s)", version,
                   parallel >= NO_THREADS && parallel <= OPENMP ? threads[parallel] : "unknown threads");
    (void)snprintf(out->blas_kernels, sizeof out->blas_kernels, "%s", openblas_get_corename());
    if (set)
        (void)snprintf(out->blas_reason, sizeof out->blas_reason, "%s=%.16s is set", "OPENBLAS_CORETYPE", set);
    else
        (void)snprintf(out->blas_reason, sizeof out->blas_reason, "OpenBLAS's own choice");
}
