/* SPDX-License-Identifier: Apache-2.0 */
/* Exact products beside native ones. */
#include <math.h>
#include <string.h>

#include "anyrank/arith.h"
#include "bench/bench.h"
#include "bench/harness.h"
#include "gpu/profile/profile.h"
#include "ref/arith/exact.h"

typedef struct gemm_row {
    size_t batch, m, n, k;             /* batch matrices */
    double native_gflops;              /* median rate of the native product, 2*batch*m*n*k operations */
    double exact_over_native;          /* median ratio of times, everything included: c, e, f, both operands packed */
    double exact_over_native_prepared; /* the same with W's c, f and integers made before, as weights are */
    double spread;                     /* of the first ratio */
    double bf16_over_native; /* the first ratio of bf16 numbers, whose integers are narrow, over the same sgemm */
    /* Parts of one more prepared product: X's exponents and integers; the products; the pass that combines their sums,
     * NaN if the device does both at once. */
    double pack_seconds, products_seconds, sums_seconds;
    char bits[65]; /* SHA-256 of the exact Y: one for each shape, whatever computed it */
} gemm_row;

enum { GEMM_SHAPES = 6 };
/* The shapes that take the device's time, not a user's. The CPU's: those of a transformer block of width 768 on 1024
 * tokens, then attention's at 12 heads, 2 sequences of 512. A GPU's: 4096^3; a block of width 4096 on 2048 tokens;
 * attention at 32 heads, 2 sequences of 1024. */
static const gemm_row *shapes_for(const ar_device_choice *which)
{
    static const gemm_row cpu[GEMM_SHAPES] = {
        {.batch = 1, .m = 1024, .n = 768, .k = 3072}, {.batch = 1, .m = 1024, .n = 3072, .k = 768},
        {.batch = 1, .m = 768, .n = 3072, .k = 1024}, {.batch = 1, .m = 1024, .n = 768, .k = 768},
        {.batch = 24, .m = 512, .n = 512, .k = 64},   {.batch = 24, .m = 512, .n = 64, .k = 512},
    };
    static const gemm_row gpu[GEMM_SHAPES] = {
        {.batch = 1, .m = 4096, .n = 4096, .k = 4096},  {.batch = 1, .m = 2048, .n = 11008, .k = 4096},
        {.batch = 1, .m = 2048, .n = 4096, .k = 11008}, {.batch = 1, .m = 11008, .n = 4096, .k = 2048},
        {.batch = 64, .m = 1024, .n = 1024, .k = 128},  {.batch = 64, .m = 1024, .n = 128, .k = 1024},
    };
    return which->kind == AR_DEVICE_CUDA ? gpu : cpu;
}

/* One side of a product: values, its exponents, its integers. */
typedef struct operand {
    ar_tensor values; /* [batch, rows, k] */
    ar_buf exponents; /* [batch, rows] */
    ar_packed *packed;
} operand;

typedef struct gemm_bench {
    ari_bench_device on;
    operand x, w, x16, w16; /* the latter of bf16 numbers */
    ar_buf c;               /* [batch, k] */
    ar_tensor y;
} gemm_bench;

static ar_status operand_create(ari_bench_device *on, operand *o, const gemm_row *row, bool left)
{
    const ar_device_ops *ops = on->d->ops;
    const size_t rows = left ? row->m : row->n;
    AR_TRY(ari_bench_tensor(on, &o->values, 3, (const size_t[]){row->batch, rows, row->k},
                            rows * row->k + (left ? 1 : 2)));
    AR_TRY(ari_bench_alloc(on, &o->exponents, row->batch * rows * sizeof(int32_t)));
    return ops->packed_create(on->d, on->q, &o->packed, row->batch, rows, row->k, ari_exact_form(left, false));
}

/* The same numbers, rounded to bf16. */
static ar_status narrow_create(ari_bench_device *on, operand *o, const operand *of, bool left)
{
    const ar_device_ops *ops = on->d->ops;
    const size_t *shape = of->values.shape;
    AR_TRY(ari_bench_tensor_as(on, &o->values, &of->values, AR_BF16));
    AR_TRY(ari_bench_alloc(on, &o->exponents, shape[0] * shape[1] * sizeof(int32_t)));
    return ops->packed_create(on->d, on->q, &o->packed, shape[0], shape[1], shape[2], ari_exact_form(left, true));
}

static ar_status quantise(gemm_bench *b, operand *o, int sign)
{
    ar_device *d = b->on.d;
    const bool narrow = o->values.dtype == AR_BF16;
    AR_TRY(d->ops->row_exponents(d, b->on.q, o->exponents, &o->values, ar_const(b->c), sign, false, narrow));
    return d->ops->pack(d, b->on.q, o->packed, 0, 0, &o->values, ar_const(b->c), sign, ar_const(o->exponents));
}

static ar_status prepare_weight(gemm_bench *b, operand *w)
{
    AR_TRY(b->on.d->ops->col_exponents(b->on.d, b->on.q, b->c, &w->values, false));
    return quantise(b, w, -1);
}

static ar_status run_product(gemm_bench *b, operand *x, const operand *w)
{
    AR_TRY(quantise(b, x, 1));
    return b->on.d->ops->gemm_round(b->on.d, b->on.q, &b->y, x->packed, w->packed, ar_const(x->exponents),
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
    const ari_bench_device *on = &b->on;
    double at[GEMMS + 1];
    AR_TRY(ari_bench_clock(on, &at[0]));
    AR_TRY(on->d->ops->gemm_f32(on->d, on->q, &b->y, &b->x.values, &b->w.values, false, AR_PRECISION_F32));
    AR_TRY(ari_bench_clock(on, &at[1]));
    AR_TRY(prepare_weight(b, &b->w16));
    AR_TRY(run_product(b, &b->x16, &b->w16));
    AR_TRY(ari_bench_clock(on, &at[2]));
    AR_TRY(prepare_weight(b, &b->w)); /* last, for it leaves c for the prepared products */
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(on, &at[3]));
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(on, &at[4]));
    for (int i = 0; i < GEMMS; i++)
        times[i] = at[i + 1] - at[i];
    return AR_OK;
}

/* Splits the time of a prepared product into its parts. */
static ar_status split_prepared(gemm_bench *b, gemm_row *row)
{
    ARI_OWNED_BY(ari_profile_end) ari_profile *profile = NULL;
    ari_profile_row found[ARI_PROFILE_ROWS];
    size_t n = 0;
    double product = 0.0, parts = 0.0;
    AR_TRY(ari_profile_begin(&profile, b->on.d));
    for (int i = 0; i < 2; i++) { /* the first makes the events of the second */
        AR_TRY(run_prepared(b));
        AR_TRY(ari_profile_read(profile, found, &n));
    }
    row->pack_seconds = 0.0;
    for (size_t i = 0; i < n; i++) {
        double *to = found[i].part ? &parts : strcmp(found[i].name, "gemm_round") == 0 ? &product : &row->pack_seconds;
        *to += found[i].seconds;
    }
    row->products_seconds = parts > 0.0 ? parts : product;
    row->sums_seconds = parts > 0.0 ? product - parts : (double)NAN;
    return AR_OK;
}

static ar_status hash_product(gemm_bench *b, char hex[65])
{
    ari_sha256 bits;
    ari_sha256_init(&bits);
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_take_bits(&bits, &b->on, &b->y));
    ari_sha256_final(&bits, hex);
    return AR_OK;
}

static void gemm_bench_destroy(gemm_bench *b)
{
    operand *const all[] = {&b->x, &b->w, &b->x16, &b->w16};
    for (size_t i = 0; b->on.d && i < sizeof all / sizeof *all; i++)
        b->on.d->ops->packed_destroy(b->on.d, NULL, all[i]->packed);
    ari_bench_device_destroy(&b->on);
}

static ar_status time_shape(gemm_row *row, const ari_bench_session *session)
{
    ARI_ENDED(gemm_bench_destroy) gemm_bench b = {0};
    ARI_ENDED(ari_bench_series_destroy) ari_bench_series s = {0};
    AR_TRY(ari_bench_device_create(&b.on, &session->device, session->threads));
    AR_TRY(operand_create(&b.on, &b.x, row, true));
    AR_TRY(operand_create(&b.on, &b.w, row, false));
    AR_TRY(narrow_create(&b.on, &b.x16, &b.x, true));
    AR_TRY(narrow_create(&b.on, &b.w16, &b.w, false));
    AR_TRY(ari_bench_tensor(&b.on, &b.y, 3, (const size_t[]){row->batch, row->m, row->n}, 3));
    AR_TRY(ari_bench_alloc(&b.on, &b.c, row->batch * row->k * sizeof(int32_t)));
    AR_TRY(ari_bench_repeat(&s, GEMMS, session->repetitions, 1, time_gemms, &b));
    const ari_bench_stat ratio = ari_bench_ratio_of(&s, EXACT, NATIVE);
    const double operations = 2.0 * (double)row->batch * (double)row->m * (double)row->n * (double)row->k;
    row->native_gflops = 1e-9 * operations / ari_bench_times_of(&s, NATIVE).median;
    row->exact_over_native = ratio.median;
    row->exact_over_native_prepared = ari_bench_ratio_of(&s, PREPARED, NATIVE).median;
    row->spread = ratio.spread;
    row->bf16_over_native = ari_bench_ratio_of(&s, NARROW, NATIVE).median;
    AR_TRY(hash_product(&b, row->bits));
    return split_prepared(&b, row);
}

#define ARI_ROW gemm_row
static const ari_field gemm_fields[] = {
    ARI_FIELD("batch", "batch", COUNT, batch),
    ARI_FIELD("m", "m", COUNT, m),
    ARI_FIELD("n", "n", COUNT, n),
    ARI_FIELD("k", "k", COUNT, k),
    ARI_FIELD("native_gflops", "native GF/s", RATE, native_gflops),
    ARI_FIELD("exact_over_native", "exact/native", RATIO, exact_over_native),
    ARI_FIELD("exact_over_native_prepared", "weights prepared", RATIO, exact_over_native_prepared),
    ARI_FIELD("spread", "spread", SHARE, spread),
    ARI_FIELD("bf16_over_native", "in bf16", RATIO, bf16_over_native),
    ARI_FIELD("pack_seconds", "pack", MILLISECONDS, pack_seconds),
    ARI_FIELD("products_seconds", "products", MILLISECONDS, products_seconds),
    ARI_FIELD("sums_seconds", "sums", MILLISECONDS, sums_seconds),
    ARI_FIELD("bits", NULL, WORDS, bits),
};
#undef ARI_ROW

/* Prints why a GPU's figures are not those of cuBLAS alone. */
static void print_refused(void)
{
    char refused[600];
    if (ar_gpu_refused_products(refused, sizeof refused) > 0)
        fprintf(stderr, "int8 products that cuBLAS refused, done by a kernel: %s\n", refused);
}

ar_status ari_bench_gemm(ari_bench_session *s)
{
    const ari_bench_options *v = s->v;
    gemm_row rows[GEMM_SHAPES];
    const int given = (v->m > 0) + (v->n > 0) + (v->k > 0);
    const size_t n = given ? 1 : GEMM_SHAPES;
    if (given != 0 && given != 3)
        return ar_error_set(AR_ERR_ARG, "--m, --n and --k go together");
    memcpy(rows, shapes_for(&s->device), sizeof rows);
    if (given)
        rows[0] = (gemm_row){.batch = v->r.run.batch ? v->r.run.batch : 1, .m = v->m, .n = v->n, .k = v->k};
    for (size_t i = 0; i < n; i++) {
        ari_bench_progress(s, i, n);
        AR_TRY(time_shape(&rows[i], s));
    }
    print_refused();
    return ari_bench_end(
        s, ARI_ROWS(gemm_fields, rows, n), s->threads,
        "\nY[m,n] = X[m,k] W[n,k]^T, %d thread%s; time of the exact product over that of sgemm, medians. 'weights\n"
        "prepared': W's exponents and integers were made before, as in a training step. 'spread': of the repetitions'\n"
        "exact/native, (largest - smallest)/median. 'in bf16': exact/native, of bf16 numbers. 'pack', 'products',\n"
        "'sums': the parts of one prepared product.\n",
        s->threads, ARI_PLURAL(s->threads));
}
