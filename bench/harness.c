/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/harness.h"

#include <stdlib.h>

#include "gpu/profile/profile.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

double ari_bench_seconds(void)
{
    return 1e-9 * (double)ari_now_ns();
}

/* --- repetitions -------------------------------------------------------------------------------------------------- */

ar_status ari_bench_series_create(ari_bench_series *s, size_t sides, size_t n)
{
    *s = (ari_bench_series){.sides = sides, .n = n};
    AR_TRY(ari_alloc_zero((void **)&s->times, n, (sides + 1) * sizeof(double), "the benchmark's times"));
    s->work = s->times + sides * n;
    return AR_OK;
}

void ari_bench_series_destroy(ari_bench_series *s)
{
    free(s->times);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static ari_bench_stat stat_of_work(const ari_bench_series *s)
{
    qsort(s->work, s->n, sizeof *s->work, by_value);
    const double median = 0.5 * (s->work[(s->n - 1) / 2] + s->work[s->n / 2]);
    return (ari_bench_stat){.median = median, .spread = (s->work[s->n - 1] - s->work[0]) / median};
}

ari_bench_stat ari_bench_times_of(const ari_bench_series *s, size_t side)
{
    for (size_t i = 0; i < s->n; i++)
        s->work[i] = s->times[i * s->sides + side];
    return stat_of_work(s);
}

ari_bench_stat ari_bench_ratio_of(const ari_bench_series *s, size_t side, size_t to)
{
    for (size_t i = 0; i < s->n; i++)
        s->work[i] = s->times[i * s->sides + side] / s->times[i * s->sides + to];
    return stat_of_work(s);
}

ar_status ari_bench_repeat(ari_bench_series *s, size_t sides, size_t n, size_t warm, ari_bench_fn fn, void *user)
{
    AR_TRY(ari_bench_series_create(s, sides, n));
    for (size_t i = 0; i < warm; i++)
        AR_TRY(fn(user, s->times));
    for (size_t i = 0; i < n; i++)
        AR_TRY(fn(user, s->times + i * sides));
    return AR_OK;
}

ar_status ari_bench_sides(ari_bench_side *row, size_t sides, double operations, size_t n, size_t warm, ari_bench_fn fn,
                          void *user)
{
    enum { FIRST, PRODUCTS };
    ARI_ENDED(ari_bench_series_destroy) ari_bench_series s = {0};
    AR_TRY(ari_bench_repeat(&s, sides + 1, n, warm, fn, user));
    for (size_t i = 0; i < sides; i++) {
        const size_t side = i == 0 ? FIRST : PRODUCTS + i;
        const ari_bench_stat seconds = ari_bench_times_of(&s, side), ratio = ari_bench_ratio_of(&s, side, FIRST);
        row[i] = (ari_bench_side){.seconds = seconds.median,
                                  .gflops = 1e-9 * operations / seconds.median,
                                  .gemm_fraction = ari_bench_ratio_of(&s, PRODUCTS, side).median,
                                  .over_first = ratio.median,
                                  .spread = i == 0 ? seconds.spread : ratio.spread};
    }
    return AR_OK;
}

/* --- a device ----------------------------------------------------------------------------------------------------- */

ar_status ari_bench_device_create(ari_bench_device *b, const ar_device_choice *which, int threads)
{
    const ar_device_choice cpu = {AR_DEVICE_CPU, 0};
    *b = (ari_bench_device){.d = NULL};
    AR_TRY(ar_device_create(&b->d, which ? which : &cpu, threads));
    const ar_status st = b->d->ops->queue_create(b->d, &b->q, AR_QUEUE_INLINE, "bench");
    if (st != AR_OK)
        ari_bench_device_destroy(b);
    return st;
}

void ari_bench_free(ari_bench_device *b)
{
    for (size_t i = 0; i < b->count; i++)
        b->d->ops->free(b->d, b->q, b->memory[i]);
    free(b->memory);
    b->memory = NULL;
    b->count = b->capacity = 0;
}

void ari_bench_device_destroy(ari_bench_device *b)
{
    ari_bench_free(b);
    ar_queue_destroy(b->q);
    ar_device_destroy(b->d);
    *b = (ari_bench_device){.d = NULL};
}

ar_status ari_bench_alloc(ari_bench_device *b, ar_buf *gives, size_t bytes)
{
    AR_TRY(ARI_GROW(&b->memory, &b->capacity, b->count, "a benchmark's memory"));
    AR_TRY(b->d->ops->alloc(b->d, b->q, gives, bytes));
    b->memory[b->count++] = *gives;
    return AR_OK;
}

ar_status ari_bench_clock(const ari_bench_device *b, double *seconds)
{
    AR_TRY(ar_queue_sync(b->q, 0));
    *seconds = 1e-9 * (double)ari_device_clock_ns(b->d);
    return AR_OK;
}

/* A linear congruence (Knuth's MMIX constants); magnitudes lie within a factor of four of each other as blocks. */
static void fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const float unit = (float)((int64_t)(seed >> 40) - (1 << 23)) * 0x1p-23f;
        x[i] = unit * (float)(1 + (seed >> 62)) * 0.25f;
    }
}

ar_status ari_bench_values(ari_bench_device *b, ar_buf *gives, size_t n, uint64_t seed)
{
    size_t bytes = 0;
    ARI_OWNED void *values = NULL;
    AR_TRY(ari_mul_size(&bytes, n, sizeof(float)));
    AR_TRY(ari_bench_alloc(b, gives, bytes));
    if (b->d->ops->host_reaches) {
        fill(gives->ptr, n, seed);
        return AR_OK;
    }
    AR_TRY(ari_alloc(&values, n, sizeof(float), "a benchmark's values"));
    fill(values, n, seed);
    AR_TRY(b->d->ops->copy(b->d, b->q, *gives, (ar_cbuf){values}, bytes));
    return ar_queue_sync(b->q, 0);
}

ar_status ari_bench_tensor(ari_bench_device *b, ar_tensor *gives, int ndim, const size_t *shape, uint64_t seed)
{
    size_t count = 1;
    ar_buf memory = {NULL};
    for (int i = 0; i < ndim; i++)
        AR_TRY(ari_mul_size(&count, count, shape[i]));
    AR_TRY(ari_bench_values(b, &memory, count, seed));
    return ar_tensor_view(gives, AR_F32, ndim, shape, memory);
}

ar_status ari_bench_tensor_as(ari_bench_device *b, ar_tensor *gives, const ar_tensor *of, ar_dtype dtype)
{
    *gives = *of;
    gives->dtype = dtype;
    AR_TRY(ari_bench_alloc(b, &gives->data, ar_tensor_count(of) * ar_dtype_bytes(dtype)));
    return b->d->ops->copy_strided(b->d, b->q, gives, of);
}

ar_status ari_bench_take_bits(ari_sha256 *to, const ari_bench_device *b, const ar_tensor *t)
{
    size_t bytes = 0;
    ARI_OWNED void *host = NULL;
    AR_TRY(ari_mul_size(&bytes, ar_tensor_count(t), ar_dtype_bytes(t->dtype)));
    AR_TRY(ari_alloc(&host, bytes, 1, "a benchmark's result"));
    AR_TRY(b->d->ops->copy(b->d, b->q, (ar_buf){host}, ar_const(t->data), bytes));
    AR_TRY(ar_queue_sync(b->q, 0));
    ari_sha256_update(to, host, bytes);
    return AR_OK;
}
