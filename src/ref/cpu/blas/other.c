/* SPDX-License-Identifier: Apache-2.0 */
/* -DANYRANK_BLAS=accelerate, or cblas: any library of which no more is known than that it has CBLAS. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/cpu/blas/vendor.h"

int ari_blas_alone(void)
{
    return 1;
}

void ari_blas_together(int threads)
{
    (void)threads;
}

/* Its threads cannot be asked away call by call. Accelerate reads this variable; another library's is its user's. */
void ari_blas_start(void)
{
#if defined(__APPLE__)
    (void)setenv("VECLIB_MAXIMUM_THREADS", "1", 0);
#endif
}

ar_status ari_blas_check(void)
{
    return AR_OK;
}

void ari_blas_describe(ar_cpu_info *out)
{
    (void)snprintf(out->blas, sizeof out->blas, "%s", ARI_BLAS_NAME);
    (void)snprintf(out->blas_version, sizeof out->blas_version, "of unknown version");
    (void)snprintf(out->blas_kernels, sizeof out->blas_kernels, "unknown");
    (void)snprintf(out->blas_reason, sizeof out->blas_reason, "the library's own choice");
}
