/* SPDX-License-Identifier: Apache-2.0 */
/* -DANYRANK_BLAS=mkl, linked with MKL's sequential layer: it has no threads. */
#include <stdio.h>
#include <string.h>

#include "ref/cpu/blas/vendor.h"

void MKL_Get_Version_String(char *text, int size);

int ari_blas_alone(void)
{
    return 1;
}

void ari_blas_together(int threads)
{
    (void)threads;
}

void ari_blas_start(void)
{
}

ar_status ari_blas_check(void)
{
    return AR_OK;
}

/* "Intel(R) oneAPI Math Kernel Library Version 2024.2-Product Build 20240605 for ..." */
static void version_of(char *out, size_t cap)
{
    char text[200] = "";
    MKL_Get_Version_String(text, (int)sizeof text);
    const char *at = strstr(text, "Version ");
    const size_t length = at ? strcspn(at + strlen("Version "), " -") : 0;
    (void)snprintf(out, cap, "%.*s", (int)length, at ? at + strlen("Version ") : "");
}

void ari_blas_describe(ar_cpu_info *out)
{
    (void)snprintf(out->blas, sizeof out->blas, "MKL");
    version_of(out->blas_version, sizeof out->blas_version);
    (void)snprintf(out->blas_kernels, sizeof out->blas_kernels, "unknown");
    (void)snprintf(out->blas_reason, sizeof out->blas_reason, "MKL's own choice, which it does not say");
}
