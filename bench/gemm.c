/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/gemm.h"

#include <stdint.h>
#include <stdlib.h>

#include "anyrank/device.h"
#include "bench/measure.h"
#include "bench/on_device.h"
#include "ref/core/size.h"

const ar_bench_gemm_row ari_bench_gemm_shapes[ARI_BENCH_GEMM_SHAPES] = {
    {.batch = 1, .m = 1024, .n = 768, .k = 3072}, {.batch = 1, .m = 1024, .n = 3072, .k = 768},
    {.batch = 1, .m = 768, .n = 3072, .k = 1024}, {.batch = 1, .m = 1024, .n = 768, .k = 768},
    {.batch = 24, .m = 512, .n = 512, .k = 64},   {.batch = 24, .m = 512, .n = 64, .k = 512},
};

const ar_bench_gemm_row ari_bench_gemm_gpu_shapes[ARI_BENCH_GEMM_SHAPES] = {
    {.batch = 1, .m = 4096, .n = 4096, .k = 4096},  {.batch = 1, .m = 2048, .n = 11008, .k = 4096},
    {.batch = 1, .m = 2048, .n = 4096, .k = 11008}, {.batch = 1, .m = 11008, .n = 4096, .k = 2048},
    {.batch = 64, .m = 1024, .n = 1024, .k = 128},  {.batch = 64, .m = 1024, .n = 128, .k = 1024},
};

const ar_bench_gemm_row *ari_bench_gemm_shapes_for(const ar_device_choice *which)
{
    return which->kind == AR_DEVICE_CUDA ? ari_bench_gemm_gpu_shapes : ari_bench_gemm_shapes;
}

/* One side of a product: values, its exponents, its integers. */
typedef struct operand {
    ar_tensor values; /* [batch, rows, k] */
    ar_buf exponents; /* [batch, rows] */
    ar_packed *packed;
} operand;

typedef struct gemm_bench {
    ari_bench_device on;
    operand x, w;
    ar_buf c; /* [batch, k] */
    ar_tensor y;
} gemm_bench;

static ar_status create_tensor(const ari_bench_device *on, ar_tensor *t, size_t batch, size_t rows, size_t cols,
                               uint64_t seed)
{
    size_t count = 0;
    ar_buf memory = {NULL};
    AR_TRY(ari_mul_size(&count, batch, rows));
    AR_TRY(ari_mul_size(&count, count, cols));
    AR_TRY(ari_bench_values(on, &memory, count, seed));
    return ar_tensor_view(t, AR_F32, 3, (const size_t[]){batch, rows, cols}, memory);
}

static ar_status operand_create(const ari_bench_device *on, operand *o, size_t batch, size_t rows, size_t k, bool split)
{
    const ar_device_ops *ops = on->d->ops;
    AR_TRY(create_tensor(on, &o->values, batch, rows, k, rows * k + (split ? 1 : 2)));
    AR_TRY(ops->alloc(on->d, &o->exponents, batch * rows * sizeof(int32_t)));
    return ops->packed_create(on->d, &o->packed, batch, rows, k, split);
}

static void operand_destroy(ar_device *d, operand *o)
{
    d->ops->packed_destroy(d, o->packed);
    d->ops->free(d, o->exponents);
    d->ops->free(d, o->values.data);
}

static ar_status quantise(gemm_bench *b, operand *o, int sign)
{
    ar_device *d = b->on.d;
    AR_TRY(d->ops->row_exponents(d, b->on.q, o->exponents, &o->values, ar_const(b->c), sign, false));
    return d->ops->pack(d, b->on.q, o->packed, 0, 0, &o->values, ar_const(b->c), sign, ar_const(o->exponents));
}

static ar_status prepare_weight(gemm_bench *b)
{
    AR_TRY(b->on.d->ops->col_exponents(b->on.d, b->on.q, b->c, &b->w.values, false));
    return quantise(b, &b->w, -1);
}

static ar_status run_prepared(gemm_bench *b)
{
    AR_TRY(quantise(b, &b->x, 1));
    return b->on.d->ops->gemm_round(b->on.d, b->on.q, &b->y, b->x.packed, b->w.packed, ar_const(b->x.exponents),
                                    ar_const(b->w.exponents), (ar_cbuf){NULL}, AR_ACT_NONE, NULL);
}

/* times[0..3) = native, exact, exact with prepared weights. */
static ar_status repetition(gemm_bench *b, double times[3])
{
    const ari_bench_device *on = &b->on;
    double at[4];
    AR_TRY(ari_bench_clock(on, &at[0]));
    AR_TRY(on->d->ops->gemm_f32(on->d, on->q, &b->y, &b->x.values, &b->w.values, false, AR_PRECISION_F32));
    AR_TRY(ari_bench_clock(on, &at[1]));
    AR_TRY(prepare_weight(b));
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(on, &at[2]));
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(on, &at[3]));
    for (int i = 0; i < 3; i++)
        times[i] = at[i + 1] - at[i];
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

ar_status ari_bench_gemm(ar_bench_gemm_row *row, const ar_device_choice *which, int threads, size_t repetitions)
{
    gemm_bench b = {0};
    ar_status st = AR_OK;
    if (row->batch == 0 || row->m == 0 || row->n == 0 || row->k == 0 || repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench gemm: batch %zu, m %zu, n %zu, k %zu, repetitions %zu: all must be > 0",
                            row->batch, row->m, row->n, row->k, repetitions);
    AR_TRY(ari_bench_device_create(&b.on, which, threads));
    ar_device *d = b.on.d;
    AR_TRY_TO(done, st, operand_create(&b.on, &b.x, row->batch, row->m, row->k, true));
    AR_TRY_TO(done, st, operand_create(&b.on, &b.w, row->batch, row->n, row->k, false));
    AR_TRY_TO(done, st, create_tensor(&b.on, &b.y, row->batch, row->m, row->n, 3));
    AR_TRY_TO(done, st, d->ops->alloc(d, &b.c, row->batch * row->k * sizeof(int32_t)));
    st = measure(&b, row, repetitions);
done:
    d->ops->free(d, b.c);
    d->ops->free(d, b.y.data);
    operand_destroy(d, &b.w);
    operand_destroy(d, &b.x);
    ari_bench_device_destroy(&b.on);
    return st;
}
