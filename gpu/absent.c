/* SPDX-License-Identifier: Apache-2.0 */
/* Stubs for devices that are not in this build. */
#include <stdio.h>

#include "gpu/device_private.h"
#include "gpu/native.h"
#include "gpu/profile/profile.h"

#if !ANYRANK_HAVE_CUDA
static const char no_cuda[] = "this build has no CUDA device: " ANYRANK_WHY_NO_CUDA;

ar_status ari_device_cuda_create(ar_device **result, int index)
{
    (void)result;
    (void)index;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s", no_cuda);
}

void ari_gpu_describe(char *text, size_t size)
{
    snprintf(text, size, "not in this build: " ANYRANK_WHY_NO_CUDA);
}

int ari_gpu_count(void)
{
    return 0;
}

ar_status ari_gpu_info_get(ar_gpu_info *out, int index)
{
    (void)out;
    (void)index;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s", no_cuda);
}

ar_status ari_gpu_native_stream(ar_device *d, ar_queue *q, void **borrows)
{
    (void)d;
    (void)q;
    (void)borrows;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s", no_cuda);
}

ar_status ari_gpu_choose(ar_device *d)
{
    (void)d;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s", no_cuda);
}

ar_status ari_gpu_trim(ar_device *d)
{
    (void)d;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s", no_cuda);
}

void ari_gpu_set_timeout(ar_device *d, uint64_t timeout_ns)
{
    (void)d;
    (void)timeout_ns;
}

bool ari_gpu_reaches(int gpu, int peer)
{
    (void)gpu;
    (void)peer;
    return false;
}

ar_status ari_gpu_bus_id(char *text, int size)
{
    (void)text;
    (void)size;
    return ar_error_set(AR_ERR_UNSUPPORTED, "%s", no_cuda);
}
#endif

#if !ANYRANK_HAVE_EMULATED
ar_status ari_device_emulated_create(ar_device **device)
{
    (void)device;
    return ar_error_set(AR_ERR_UNSUPPORTED, "this build has no emulated device: install a C++ compiler (g++), and "
                                            "configure again with -DANYRANK_EMULATED=ON");
}

ar_status ari_profile_begin(ari_profile **profile, ar_device *d)
{
    (void)profile;
    (void)d;
    return ar_error_set(AR_ERR_UNSUPPORTED, "this build has no profiles: install a C++ compiler (g++), and configure "
                                            "again with -DANYRANK_EMULATED=ON");
}

ar_status ari_profile_read(ari_profile *p, ari_profile_row *rows, size_t *n)
{
    (void)p;
    (void)rows;
    *n = 0;
    return AR_OK;
}

void ari_profile_end(ari_profile *p)
{
    (void)p;
}

void *ari_profile_part(ar_device *d, ar_queue *q, const char *part)
{
    (void)d;
    (void)q;
    (void)part;
    return NULL;
}

void ari_profile_part_end(ar_device *d, ar_queue *q, void *begun)
{
    (void)d;
    (void)q;
    (void)begun;
}
#endif
