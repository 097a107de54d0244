/* SPDX-License-Identifier: Apache-2.0 */
/* Which OpenBLAS can be used: asked when a device is made, and by the build that chooses (openblas_fits.c). */
#pragma once

#include <stddef.h>
#include <string.h>

/* As its own header has them, but for const. */
char *openblas_get_config(void);
char *openblas_get_corename(void);
int openblas_get_parallel(void);
int openblas_get_num_threads(void);
void openblas_set_num_threads(int n);
enum { NO_THREADS, PTHREADS, OPENMP }; /* openblas_get_parallel */

/** Why it cannot be used; NULL: it can. */
static inline const char *openblas_problem(void)
{
    if (strstr(openblas_get_config(), "USE64BITINT"))
        return "was built with 64-bit integers (USE64BITINT), expected 32-bit ones";
    /* Without either its buffers are everyone's at once: wrong results where two ranks multiply. */
    if (openblas_get_parallel() == NO_THREADS && !strstr(openblas_get_config(), "USE_LOCKING"))
        return "was built without threads and without locks, so that only one thread may call it: expected one with "
               "pthreads, OpenMP, or USE_LOCKING";
#if !defined(_OPENMP)
    if (openblas_get_parallel() == OPENMP)
        return "was built with OpenMP, whose threads a build of anyrank without OpenMP cannot hold to one: expected "
               "one with pthreads";
#endif
    return NULL;
}
