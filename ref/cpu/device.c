/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/device.h"

#include <stdlib.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "ref/core/size.h"
#include "ref/cpu/blas/blas.h"
#include "ref/cpu/kernels.h"

ar_status ari_cpu_queue_create(ar_device *d, ar_queue **out, ar_queue_kind kind, const char *name)
{
    (void)d;
    return ar_queue_create(out, kind, name);
}

void ari_cpu_destroy(ar_device *d)
{
    ari_pool_fini(&((ari_cpu_device *)d)->pool);
    free(d);
}

#define FILL_SLOT(slot) .slot = ari_cpu_##slot,
static const ar_device_ops cpu_ops = {.name = "cpu", .host_reaches = true, AR_DEVICE_SLOTS(FILL_SLOT)};

const ar_device *ari_cpu_form(void)
{
    static const ar_device form = {.ops = &cpu_ops, .threads = 1, .block_bytes = AR_CPU_BLOCK_BYTES};
    return &form;
}

/* Checks that the processor handles subnormals, which the promised results include. Bits 15 (flush to zero) and 6
 * (denormals are zero) of MXCSR must be clear, as must bits 24 (flush to zero) and 0 (flush inputs to zero) of ARM's
 * FPCR. They belong to a thread, and a library linked with -ffast-math sets them without notice. */
static ar_status check_subnormals(void)
{
#if defined(__SSE__)
    const unsigned int flags = _mm_getcsr() & 0x8040u;
    if (flags != 0)
        return ar_error_set(AR_ERR_DATA, "cpu device: flush-to-zero is on in this thread (MXCSR bits %#x)", flags);
#elif defined(__aarch64__)
    uint64_t flags = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(flags));
    flags &= 0x1000001u;
    if (flags != 0)
        return ar_error_set(AR_ERR_DATA, "cpu device: flush-to-zero is on in this thread (FPCR bits %#x)",
                            (unsigned int)flags);
#endif
    return AR_OK;
}

ar_status ar_device_cpu_create(ar_device **out, int threads)
{
    void *memory = NULL;
    if (!out || threads < 1)
        return ar_error_set(AR_ERR_ARG, "cpu device: %d threads, expected at least 1", threads);
    ari_exact_choice exact;
    AR_TRY(check_subnormals());
    AR_TRY(ari_blas_check());
    AR_TRY(ari_exact_choose(&exact));
    AR_TRY(ari_alloc(&memory, 1, sizeof(ari_cpu_device), "the cpu device"));
    ari_cpu_device *d = memory;
    ari_pool_init(&d->pool);
    d->exact = exact;
    d->base = (ar_device){.ops = &cpu_ops, .threads = threads, .block_bytes = AR_CPU_BLOCK_BYTES};
    *out = &d->base;
    return AR_OK;
}
