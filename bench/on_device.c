/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/on_device.h"

#include <stdlib.h>

#include "bench/measure.h"
#include "ref/core/size.h"

ar_status ari_bench_device_create(ari_bench_device *b, const ar_device_choice *which, int threads)
{
    const ar_device_choice cpu = {AR_DEVICE_CPU, 0};
    *b = (ari_bench_device){NULL, NULL};
    AR_TRY(ar_device_create(&b->d, which ? which : &cpu, threads));
    const ar_status st = b->d->ops->queue_create(b->d, &b->q, AR_QUEUE_INLINE, "bench");
    if (st != AR_OK)
        ari_bench_device_destroy(b);
    return st;
}

void ari_bench_device_destroy(ari_bench_device *b)
{
    ar_queue_destroy(b->q);
    ar_device_destroy(b->d);
    *b = (ari_bench_device){NULL, NULL};
}

ar_status ari_bench_values(const ari_bench_device *b, ar_buf *gives, size_t n, uint64_t seed)
{
    size_t bytes = 0;
    void *values = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_mul_size(&bytes, n, sizeof(float)));
    AR_TRY(b->d->ops->alloc(b->d, gives, bytes));
    if (b->d->ops->host_reaches) {
        ari_bench_fill(gives->ptr, n, seed);
        return AR_OK;
    }
    AR_TRY_TO(done, st, ari_alloc(&values, n, sizeof(float), "a benchmark's values"));
    ari_bench_fill(values, n, seed);
    AR_TRY_TO(done, st, b->d->ops->copy(b->d, b->q, *gives, (ar_cbuf){values}, bytes));
    st = ar_queue_sync(b->q, 0);
done:
    free(values);
    return st;
}

ar_status ari_bench_clock(const ari_bench_device *b, double *seconds)
{
    AR_TRY(ar_queue_sync(b->q, 0));
    *seconds = ari_bench_seconds();
    return AR_OK;
}
