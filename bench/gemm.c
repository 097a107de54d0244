/* SPDX-License-Identifier: Apache-2.0 */
/* The price of an exact product: Y[m,n] = X[m,k] W[n,k]^T on one device, exact against native (sgemm of the best BLAS
 * that the library was built with, or cuBLAS), in one process and, on the CPU, on the same number of threads.
 *
 *   build/bench/gemm [--m M --n N --k K] [--device cuda] [--threads T] [--repetitions R] [--json FILE]
 *
 * native_gflops             median rate of the native product, 2*batch*m*n*k operations
 * exact_over_native         ratio of times, everything included: exponents, both operands packed
 * exact_over_native_prepared  the same with W's exponents and integers made before, as weights are
 * bf16_over_native          of bf16 numbers, whose integers are narrow, over the same sgemm
 * pack_, products_, sums_seconds parts of one more prepared product: X's exponents and integers; the products; the pass
 *                           that combines their sums, NaN if the device does both at once
 * bits                      SHA-256 of the exact Y: one for each shape, whatever computed it */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "bench/harness.h"
#include "gpu/report/device_private.h"
#include "ref/arith/exact.h"
#include "ref/io/json.h"

typedef struct gemm_shape {
    size_t batch, m, n, k; /* batch matrices */
} gemm_shape;

/* Those of a transformer block of width 768 on 1024 tokens, then attention's at 12 heads, 2 sequences of 512. A GPU's:
 * 4096^3; a block of width 4096 on 2048 tokens; attention at 32 heads, 2 sequences of 1024. */
enum { SHAPES = 6 };
static const gemm_shape cpu_shapes[SHAPES] = {{1, 1024, 768, 3072}, {1, 1024, 3072, 768}, {1, 768, 3072, 1024},
                                              {1, 1024, 768, 768},  {24, 512, 512, 64},   {24, 512, 64, 512}};
static const gemm_shape gpu_shapes[SHAPES] = {{1, 4096, 4096, 4096},  {1, 2048, 11008, 4096}, {1, 2048, 4096, 11008},
                                              {1, 11008, 4096, 2048}, {64, 1024, 1024, 128},  {64, 1024, 128, 1024}};

/* One side of a product: values, its exponents, its integers. */
typedef struct operand {
    ar_tensor values; /* [batch, rows, k] */
    ar_buf exponents; /* [batch, rows] */
    ar_packed *packed;
} operand;

typedef struct gemm_bench {
    ari_bench_device device;
    operand x, w, x16, w16; /* the latter of bf16 numbers */
    ar_buf c;               /* [batch, k] */
    ar_tensor y;
} gemm_bench;

/* wide NULL: new numbers; else the same, rounded to bf16. */
static ar_status operand_create(ari_bench_device *device, operand *o, const size_t shape[3], bool is_left,
                                const operand *wide)
{
    if (wide)
        AR_TRY(ari_bench_tensor_as(device, &o->values, &wide->values, AR_BF16));
    else
        AR_TRY(ari_bench_tensor(device, &o->values, 3, shape, shape[1] * shape[2] + (is_left ? 1 : 2)));
    AR_TRY(ari_bench_alloc(device, &o->exponents, shape[0] * shape[1] * sizeof(int32_t)));
    return device->d->ops->packed_create(device->d, device->q, &o->packed, shape[0], shape[1], shape[2],
                                         ari_exact_form(is_left, wide != NULL));
}

static ar_status quantise(gemm_bench *b, operand *o, int sign)
{
    ar_device *d = b->device.d;
    const bool narrow = o->values.dtype == AR_BF16;
    AR_TRY(d->ops->row_exponents(d, b->device.q, o->exponents, &o->values, ar_const(b->c), sign, false, narrow));
    return d->ops->pack(d, b->device.q, o->packed, 0, 0, &o->values, ar_const(b->c), sign, ar_const(o->exponents));
}

static ar_status prepare_weight(gemm_bench *b, operand *w)
{
    AR_TRY(b->device.d->ops->col_exponents(b->device.d, b->device.q, b->c, &w->values, false));
    return quantise(b, w, -1);
}

static ar_status run_product(gemm_bench *b, operand *x, const operand *w)
{
    AR_TRY(quantise(b, x, 1));
    return b->device.d->ops->gemm_round(b->device.d, b->device.q, &b->y, x->packed, w->packed, ar_const(x->exponents),
                                        ar_const(w->exponents), (ar_cbuf){NULL}, AR_ACT_NONE, NULL, NULL);
}

static ar_status run_prepared(gemm_bench *b)
{
    return run_product(b, &b->x, &b->w);
}

enum { NATIVE, NARROW, EXACT, PREPARED, GEMMS };

static ar_status time_gemms(void *user, double times[GEMMS])
{
    gemm_bench *b = user;
    const ari_bench_device *device = &b->device;
    double timestamps[GEMMS + 1];
    AR_TRY(ari_bench_clock(device, &timestamps[0]));
    AR_TRY(device->d->ops->gemm_f32(device->d, device->q, &b->y, &b->x.values, &b->w.values, false, AR_PRECISION_F32));
    AR_TRY(ari_bench_clock(device, &timestamps[1]));
    AR_TRY(prepare_weight(b, &b->w16));
    AR_TRY(run_product(b, &b->x16, &b->w16));
    AR_TRY(ari_bench_clock(device, &timestamps[2]));
    AR_TRY(prepare_weight(b, &b->w)); /* last, for it leaves c for the prepared products */
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(device, &timestamps[3]));
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(device, &timestamps[4]));
    for (int i = 0; i < GEMMS; i++)
        times[i] = timestamps[i + 1] - timestamps[i];
    return AR_OK;
}

/* Splits the time of a prepared product into its parts: packing, products, sums. */
static ar_status split_prepared(gemm_bench *b, double seconds[3])
{
    ARI_OWNED_BY(ari_profile_end) ari_profile *profile = NULL;
    ari_profile_row found[ARI_PROFILE_ROWS];
    size_t n = 0;
    double product = 0.0, parts = 0.0, pack = 0.0;
    AR_TRY(ari_profile_begin(&profile, b->device.d));
    for (int i = 0; i < 2; i++) { /* the first makes the events of the second */
        AR_TRY(run_prepared(b));
        AR_TRY(ari_profile_read(profile, found, &n));
    }
    for (size_t i = 0; i < n; i++) {
        double *total = found[i].part ? &parts : strcmp(found[i].name, "gemm_round") == 0 ? &product : &pack;
        *total += found[i].seconds;
    }
    seconds[0] = pack;
    seconds[1] = parts > 0.0 ? parts : product;
    seconds[2] = parts > 0.0 ? product - parts : (double)NAN;
    return AR_OK;
}

static ar_status gemm_bench_create(gemm_bench *b, const ari_bench *bench, const gemm_shape *shape)
{
    ari_bench_device *device = &b->device;
    const size_t left[3] = {shape->batch, shape->m, shape->k}, right[3] = {shape->batch, shape->n, shape->k};
    AR_TRY(ar_device_create(&device->d, &bench->device, (int)bench->threads));
    AR_TRY(device->d->ops->queue_create(device->d, &device->q, AR_QUEUE_INLINE, "bench"));
    AR_TRY(operand_create(device, &b->x, left, true, NULL));
    AR_TRY(operand_create(device, &b->w, right, false, NULL));
    AR_TRY(operand_create(device, &b->x16, left, true, &b->x));
    AR_TRY(operand_create(device, &b->w16, right, false, &b->w));
    AR_TRY(ari_bench_tensor(device, &b->y, 3, (const size_t[]){shape->batch, shape->m, shape->n}, 3));
    return ari_bench_alloc(device, &b->c, shape->batch * shape->k * sizeof(int32_t));
}

static void gemm_bench_destroy(gemm_bench *b)
{
    operand *const operands[] = {&b->x, &b->w, &b->x16, &b->w16};
    for (size_t i = 0; b->device.d && i < sizeof operands / sizeof *operands; i++)
        b->device.d->ops->packed_destroy(b->device.d, NULL, operands[i]->packed);
    ari_bench_free(&b->device);
    ar_queue_destroy(b->device.q);
    ar_device_destroy(b->device.d);
}

static ar_status time_shape(ari_bench *bench, const gemm_shape *shape)
{
    ARI_ENDED(gemm_bench_destroy) gemm_bench b = {0};
    ARI_ENDED(ari_bench_series_destroy) ari_bench_series s = {0};
    double parts[3];
    char bits[65];
    ari_sha256 hash;
    AR_TRY(gemm_bench_create(&b, bench, shape));
    AR_TRY(ari_bench_repeat(&s, GEMMS, bench->repetitions, 1, time_gemms, &b));
    AR_TRY(split_prepared(&b, parts));
    ari_sha256_init(&hash);
    AR_TRY(ari_bench_take_bits(&hash, &b.device, &b.y));
    ari_sha256_final(&hash, bits);
    const ari_bench_stat ratio = ari_bench_ratio_of(&s, EXACT, NATIVE);
    const double operations = 2.0 * (double)shape->batch * (double)shape->m * (double)shape->n * (double)shape->k;
    return ari_bench_add(
        bench, "rows",
        json_pack("{s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:s}", "batch",
                  (json_int_t)shape->batch, "m", (json_int_t)shape->m, "n", (json_int_t)shape->n, "k",
                  (json_int_t)shape->k, "native_gflops", 1e-9 * operations / ari_bench_times_of(&s, NATIVE).median,
                  "exact_over_native", ratio.median, "exact_over_native_prepared",
                  ari_bench_ratio_of(&s, PREPARED, NATIVE).median, "spread", ratio.spread, "bf16_over_native",
                  ari_bench_ratio_of(&s, NARROW, NATIVE).median, "pack_seconds", parts[0], "products_seconds", parts[1],
                  "sums_seconds", ari_json_number(parts[2]), "bits", bits));
}

static ar_status time_shapes(ari_bench *b, const gemm_shape *requested)
{
    const gemm_shape *shapes = b->device.kind == AR_DEVICE_CUDA ? gpu_shapes : cpu_shapes;
    char refused[600];
    if (requested->m * requested->n * requested->k > 0)
        return time_shape(b, requested);
    if (requested->m + requested->n + requested->k > 0)
        return ar_error_set(AR_ERR_ARG, "--m, --n and --k go together");
    for (size_t i = 0; i < SHAPES; i++)
        AR_TRY(time_shape(b, &shapes[i]));
    if (ari_gpu_refused_products(refused, sizeof refused) > 0) /* then a GPU's figures are not those of cuBLAS alone */
        fprintf(stderr, "int8 products that cuBLAS refused, done by a kernel: %s\n", refused);
    return AR_OK;
}

int main(int argc, char **argv)
{
    gemm_shape requested = {.batch = 1};
    const ari_bench_option options[] = {
        {"m", "rows of X; with --n and --k: one shape in place of six", .number = &requested.m},
        {"n", "rows of W", .number = &requested.n},
        {"k", "columns of both", .number = &requested.k}};
    ari_bench b = {.name = "gemm", .threads = 1, .repetitions = 7};
    (void)argc;
    ari_bench_begin(&b, argv, options, sizeof options / sizeof *options);
    return ari_bench_end(&b, time_shapes(&b, &requested));
}
