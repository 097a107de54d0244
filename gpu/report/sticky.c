/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/report/sticky.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

/* State of the process, as CUDA's contexts are. The message is written once, before `lost`. */
static atomic_bool lost;
static char message[400];

bool ari_gpu_error_is_sticky(int code)
{
#define NUMBER(name, number) number,
    static const int sticky[] = {ARI_GPU_STICKY(NUMBER) ARI_GPU_STICKY_NEWER(NUMBER)};
    for (size_t i = 0; i < sizeof sticky / sizeof *sticky; i++)
        if (sticky[i] == code)
            return true;
    return false;
}

bool ari_gpu_is_lost(void)
{
    return atomic_load_explicit(&lost, memory_order_acquire);
}

ar_status ari_gpu_check_lost(void)
{
    return ari_gpu_is_lost() ? ar_error_set(AR_ERR_DEVICE, "%s", message) : AR_OK;
}

ar_status ari_gpu_failed(int code, const char *label, const char *text, const char *name)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (!ari_gpu_error_is_sticky(code)) {
        AR_TRY(ari_gpu_check_lost());
        return ar_error_set(AR_ERR_DEVICE, "the GPU failed: %s: %s (%s)", label, text, name);
    }
    pthread_mutex_lock(&lock);
    if (!ari_gpu_is_lost()) {
        snprintf(message, sizeof message, "the GPU failed: %.100s: %.200s (%.60s)", label, text, name);
        atomic_store_explicit(&lost, true, memory_order_release);
    }
    pthread_mutex_unlock(&lock);
    return ari_gpu_check_lost();
}
