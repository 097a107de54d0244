/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/gemm.h"

#include <stdint.h>
#include <stdlib.h>

#include "anyrank/device.h"
#include "bench/measure.h"
#include "ref/core/size.h"

const ar_bench_gemm_row ari_bench_gemm_shapes[ARI_BENCH_GEMM_SHAPES] = {
    {.batch = 1, .m = 1024, .n = 768, .k = 3072}, {.batch = 1, .m = 1024, .n = 3072, .k = 768},
    {.batch = 1, .m = 768, .n = 3072, .k = 1024}, {.batch = 1, .m = 1024, .n = 768, .k = 768},
    {.batch = 24, .m = 512, .n = 512, .k = 64},   {.batch = 24, .m = 512, .n = 64, .k = 512},
};

/* One side of a product: values, its exponents, its integers. */
typedef struct operand {
    ar_tensor values; /* [batch, rows, k] */
    ar_buf exponents; /* [batch, rows] */
    ar_packed *packed;
} operand;

typedef struct gemm_bench {
    ar_device *d;
    operand x, w;
    ar_buf c; /* [batch, k] */
    ar_tensor y;
} gemm_bench;

static ar_status create_tensor(ar_device *d, ar_tensor *t, size_t batch, size_t rows, size_t cols)
{
    size_t count = 0;
    ar_buf memory = {NULL};
    AR_TRY(ari_mul_size(&count, batch, rows));
    AR_TRY(ari_mul_size(&count, count, cols));
    AR_TRY(ari_mul_size(&count, count, sizeof(float)));
    AR_TRY(d->ops->alloc(d, &memory, count));
    return ar_tensor_view(t, AR_F32, 3, (const size_t[]){batch, rows, cols}, memory);
}

static ar_status operand_create(ar_device *d, operand *o, size_t batch, size_t rows, size_t k, bool split)
{
    AR_TRY(create_tensor(d, &o->values, batch, rows, k));
    ari_bench_fill(o->values.data.ptr, ar_tensor_count(&o->values), rows * k + (split ? 1 : 2));
    AR_TRY(d->ops->alloc(d, &o->exponents, batch * rows * sizeof(int32_t)));
    return d->ops->packed_create(d, &o->packed, batch, rows, k, split);
}

static void operand_destroy(ar_device *d, operand *o)
{
    d->ops->packed_destroy(d, o->packed);
    d->ops->free(d, o->exponents);
    d->ops->free(d, o->values.data);
}

static ar_status prepare_weight(gemm_bench *b)
{
    const ar_device_ops *ops = b->d->ops;
    AR_TRY(ops->col_exponents(b->d, NULL, b->c, &b->w.values, false));
    AR_TRY(ops->row_exponents(b->d, NULL, b->w.exponents, &b->w.values, ar_const(b->c), -1, false));
    return ops->pack(b->d, NULL, b->w.packed, 0, 0, &b->w.values, ar_const(b->c), -1, ar_const(b->w.exponents));
}

static ar_status run_prepared(gemm_bench *b)
{
    const ar_device_ops *ops = b->d->ops;
    AR_TRY(ops->row_exponents(b->d, NULL, b->x.exponents, &b->x.values, ar_const(b->c), 1, false));
    AR_TRY(ops->pack(b->d, NULL, b->x.packed, 0, 0, &b->x.values, ar_const(b->c), 1, ar_const(b->x.exponents)));
    return ops->gemm_round(b->d, NULL, &b->y, b->x.packed, b->w.packed, ar_const(b->x.exponents),
                           ar_const(b->w.exponents), (ar_cbuf){NULL}, AR_ACT_NONE, NULL);
}

/* times[0..3) = native, exact, exact with prepared weights. */
static ar_status repetition(gemm_bench *b, double times[3])
{
    const double start = ari_bench_seconds();
    AR_TRY(b->d->ops->gemm_f32(b->d, NULL, &b->y, &b->x.values, &b->w.values, false, AR_PRECISION_F32));
    const double native = ari_bench_seconds();
    AR_TRY(prepare_weight(b));
    AR_TRY(run_prepared(b));
    const double exact = ari_bench_seconds();
    AR_TRY(run_prepared(b));
    times[0] = native - start;
    times[1] = exact - native;
    times[2] = ari_bench_seconds() - exact;
    return AR_OK;
}

static ar_status measure(gemm_bench *b, ar_bench_gemm_row *row, size_t repetitions)
{
    void *memory = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc(&memory, repetitions, 3 * sizeof(double), "the benchmark's times"));
    double *native = memory, *exact = native + repetitions, *prepared = exact + repetitions, times[3];
    AR_TRY_TO(done, st, repetition(b, times)); /* warms caches, page tables and BLIS's buffers */
    for (size_t i = 0; i < repetitions; i++) {
        AR_TRY_TO(done, st, repetition(b, times));
        native[i] = times[0];
        exact[i] = times[1] / times[0];
        prepared[i] = times[2] / times[0];
    }
    const ari_bench_stat ratio = ari_bench_stat_of(exact, repetitions);
    const double operations = 2.0 * (double)row->batch * (double)row->m * (double)row->n * (double)row->k;
    row->native_gflops = 1e-9 * operations / ari_bench_stat_of(native, repetitions).median;
    row->exact_over_native = ratio.median;
    row->exact_over_native_prepared = ari_bench_stat_of(prepared, repetitions).median;
    row->spread = ratio.spread;
done:
    free(memory);
    return st;
}

ar_status ari_bench_gemm(ar_bench_gemm_row *row, int threads, size_t repetitions)
{
    gemm_bench b = {0};
    ar_status st = AR_OK;
    if (row->batch == 0 || row->m == 0 || row->n == 0 || row->k == 0 || repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench gemm: batch %zu, m %zu, n %zu, k %zu, repetitions %zu: all must be > 0",
                            row->batch, row->m, row->n, row->k, repetitions);
    AR_TRY(ar_device_cpu_create(&b.d, threads));
    AR_TRY_TO(done, st, operand_create(b.d, &b.x, row->batch, row->m, row->k, true));
    AR_TRY_TO(done, st, operand_create(b.d, &b.w, row->batch, row->n, row->k, false));
    AR_TRY_TO(done, st, create_tensor(b.d, &b.y, row->batch, row->m, row->n));
    AR_TRY_TO(done, st, b.d->ops->alloc(b.d, &b.c, row->batch * row->k * sizeof(int32_t)));
    st = measure(&b, row, repetitions);
done:
    b.d->ops->free(b.d, b.c);
    b.d->ops->free(b.d, b.y.data);
    operand_destroy(b.d, &b.w);
    operand_destroy(b.d, &b.x);
    ar_device_destroy(b.d);
    return st;
}
