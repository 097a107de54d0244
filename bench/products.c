/* SPDX-License-Identifier: Apache-2.0 */
/* Exact products beside native ones: one product, and a weight's gradient. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/arith.h"
#include "bench/harness.h"
#include "gpu/native.h"
#include "gpu/profile/profile.h"

/* --- one product -------------------------------------------------------------------------------------------------- */

const ar_bench_gemm_row *ari_bench_gemm_shapes_for(const ar_device_choice *which)
{
    static const ar_bench_gemm_row cpu[ARI_BENCH_GEMM_SHAPES] = {
        {.batch = 1, .m = 1024, .n = 768, .k = 3072}, {.batch = 1, .m = 1024, .n = 3072, .k = 768},
        {.batch = 1, .m = 768, .n = 3072, .k = 1024}, {.batch = 1, .m = 1024, .n = 768, .k = 768},
        {.batch = 24, .m = 512, .n = 512, .k = 64},   {.batch = 24, .m = 512, .n = 64, .k = 512},
    };
    static const ar_bench_gemm_row gpu[ARI_BENCH_GEMM_SHAPES] = {
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
    ari_bench_device pedantic; /* the same GPU, with another sgemm; all NULL elsewhere */
    operand x, w;
    ar_buf c; /* [batch, k] */
    ar_tensor y;
} gemm_bench;

static ar_status operand_create(const ari_bench_device *on, operand *o, size_t batch, size_t rows, size_t k, bool split)
{
    const ar_device_ops *ops = on->d->ops;
    AR_TRY(ari_bench_tensor(on, &o->values, 3, (const size_t[]){batch, rows, k}, rows * k + (split ? 1 : 2)));
    AR_TRY(ops->alloc(on->d, on->q, &o->exponents, batch * rows * sizeof(int32_t)));
    return ops->packed_create(on->d, on->q, &o->packed, batch, rows, k, split);
}

static void operand_destroy(ar_device *d, operand *o)
{
    d->ops->packed_destroy(d, NULL, o->packed);
    d->ops->free(d, NULL, o->exponents);
    d->ops->free(d, NULL, o->values.data);
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
                                    ar_const(b->w.exponents), (ar_cbuf){NULL}, AR_ACT_NONE, NULL, NULL);
}

static ar_status sgemm(gemm_bench *b, const ari_bench_device *on)
{
    return on->d->ops->gemm_f32(on->d, on->q, &b->y, &b->x.values, &b->w.values, false, AR_PRECISION_F32);
}

enum { NATIVE, EXACT, PREPARED, PEDANTIC, GEMMS };

static ar_status time_gemms(void *user, double times[GEMMS])
{
    gemm_bench *b = user;
    const ari_bench_device *on = &b->on;
    double at[GEMMS + 1];
    AR_TRY(ari_bench_clock(on, &at[0]));
    AR_TRY(sgemm(b, on));
    AR_TRY(ari_bench_clock(on, &at[1]));
    AR_TRY(prepare_weight(b));
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(on, &at[2]));
    AR_TRY(run_prepared(b));
    AR_TRY(ari_bench_clock(on, &at[3]));
    if (b->pedantic.d) {
        AR_TRY(sgemm(b, &b->pedantic));
        AR_TRY(ari_bench_clock(&b->pedantic, &at[4]));
    }
    for (int i = 0; i < GEMMS; i++)
        times[i] = i < PEDANTIC || b->pedantic.d ? at[i + 1] - at[i] : (double)NAN;
    return AR_OK;
}

/* A second device of a GPU, made while the environment asks for the other sgemm. */
static ar_status create_pedantic(ari_bench_device *on, const ar_device_choice *which, int threads)
{
    if (!which || which->kind != AR_DEVICE_CUDA)
        return AR_OK;
    const char *set = getenv(ARI_SGEMM_VARIABLE);
    char *before = set ? strdup(set) : NULL;
    if ((set && !before) || setenv(ARI_SGEMM_VARIABLE, "pedantic", 1) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory to set %s", ARI_SGEMM_VARIABLE);
    const ar_status st = ari_bench_device_create(on, which, threads);
    if (!before)
        (void)unsetenv(ARI_SGEMM_VARIABLE);
    else if (setenv(ARI_SGEMM_VARIABLE, before, 1) != 0)
        abort(); /* it was there */
    free(before);
    return st;
}

/* Where the time of a prepared product goes. */
static ar_status split_prepared(gemm_bench *b, ar_bench_gemm_row *row)
{
    ari_profile *profile = NULL;
    ari_profile_row found[ARI_PROFILE_ROWS];
    size_t n = 0;
    double product = 0.0, parts = 0.0;
    AR_TRY(ari_profile_begin(&profile, b->on.d));
    ar_status st = AR_OK;
    for (int i = 0; i < 2 && st == AR_OK; i++) { /* the first makes the events of the second */
        st = run_prepared(b);
        if (st == AR_OK)
            st = ari_profile_read(profile, found, &n);
    }
    ari_profile_end(profile);
    AR_TRY(st);
    row->pack_seconds = 0.0;
    for (size_t i = 0; i < n; i++) {
        double *to = found[i].part ? &parts : strcmp(found[i].name, "gemm_round") == 0 ? &product : &row->pack_seconds;
        *to += found[i].seconds;
    }
    row->products_seconds = parts > 0.0 ? parts : product;
    row->sums_seconds = parts > 0.0 ? product - parts : (double)NAN;
    return AR_OK;
}

ar_status ari_bench_gemm(ar_bench_gemm_row *row, const ar_device_choice *which, int threads, size_t repetitions)
{
    gemm_bench b = {0};
    ari_bench_series s = {0};
    ar_status st = AR_OK;
    if (row->batch == 0 || row->m == 0 || row->n == 0 || row->k == 0 || repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench gemm: batch %zu, m %zu, n %zu, k %zu, repetitions %zu: all must be > 0",
                            row->batch, row->m, row->n, row->k, repetitions);
    AR_TRY(ari_bench_device_create(&b.on, which, threads));
    ar_device *d = b.on.d;
    AR_TRY_TO(done, st, create_pedantic(&b.pedantic, which, threads));
    AR_TRY_TO(done, st, operand_create(&b.on, &b.x, row->batch, row->m, row->k, true));
    AR_TRY_TO(done, st, operand_create(&b.on, &b.w, row->batch, row->n, row->k, false));
    AR_TRY_TO(done, st, ari_bench_tensor(&b.on, &b.y, 3, (const size_t[]){row->batch, row->m, row->n}, 3));
    AR_TRY_TO(done, st, d->ops->alloc(d, b.on.q, &b.c, row->batch * row->k * sizeof(int32_t)));
    AR_TRY_TO(done, st, ari_bench_repeat(&s, GEMMS, repetitions, 1, time_gemms, &b));
    const ari_bench_stat ratio = ari_bench_ratio_of(&s, EXACT, NATIVE);
    const double operations = 2.0 * (double)row->batch * (double)row->m * (double)row->n * (double)row->k;
    row->native_gflops = 1e-9 * operations / ari_bench_times_of(&s, NATIVE).median;
    row->exact_over_native = ratio.median;
    row->exact_over_native_prepared = ari_bench_ratio_of(&s, PREPARED, NATIVE).median;
    row->spread = ratio.spread;
    row->pedantic_over_native = ari_bench_ratio_of(&s, PEDANTIC, NATIVE).median;
    st = split_prepared(&b, row);
done:
    ari_bench_series_destroy(&s);
    ari_bench_device_destroy(&b.pedantic);
    d->ops->free(d, b.on.q, b.c);
    d->ops->free(d, b.on.q, b.y.data);
    operand_destroy(d, &b.w);
    operand_destroy(d, &b.x);
    ari_bench_device_destroy(&b.on);
    return st;
}

/* --- a weight's gradient ------------------------------------------------------------------------------------------ */

const ar_bench_grad_row ari_bench_grad_shapes[ARI_BENCH_GRAD_SHAPES] = {
    {.out = 3072, .in = 768, .tokens = 1024, .seq = 512},
    {.out = 3072, .in = 768, .tokens = 1024, .seq = 128},
    {.out = 3072, .in = 768, .tokens = 1024, .seq = 32},
};

typedef struct grad_bench {
    ari_bench_device on;
    ar_ctx *ctx; /* with a queue of its own */
    size_t samples;
    ar_param weight;
    ar_tensor dy, x, dw; /* [tokens, out], [tokens, in], [out, in] */
} grad_bench;

static ar_status grad_create(grad_bench *b, const ar_bench_grad_row *row, const ar_device_choice *which, int threads)
{
    AR_TRY(ari_bench_device_create(&b->on, which, threads));
    const ar_ctx_options options = {.device = b->on.d};
    const size_t shape[2] = {row->out, row->in};
    ar_layout layout;
    b->samples = row->tokens / row->seq;
    AR_TRY(ar_ctx_create(&b->ctx, &options));
    AR_TRY(ar_layout_replicate(&layout, 2, shape, 0, 1));
    AR_TRY(ar_param_init(&b->weight, b->ctx, "weight", &layout, false));
    AR_TRY(ari_bench_tensor(&b->on, &b->dy, 2, (const size_t[]){row->tokens, row->out}, 1));
    AR_TRY(ari_bench_tensor(&b->on, &b->x, 2, (const size_t[]){row->tokens, row->in}, 2));
    return ari_bench_tensor(&b->on, &b->dw, 2, shape, 3);
}

static void grad_destroy(grad_bench *b)
{
    ar_device *d = b->on.d;
    ar_param_fini(&b->weight);
    if (d) {
        d->ops->free(d, b->on.q, b->dy.data);
        d->ops->free(d, b->on.q, b->x.data);
        d->ops->free(d, b->on.q, b->dw.data);
    }
    ar_ctx_destroy(b->ctx);
    ari_bench_device_destroy(&b->on);
}

/* dY^T X over all tokens as one exact contraction, quantisation included. */
static ar_status contraction(grad_bench *b)
{
    const ar_arith_ops *arith = ar_ctx_arith(b->ctx);
    const ar_operand *oa = NULL, *ob = NULL;
    ar_sum *s = NULL;
    const ar_parts pa = {.n = 1, .part = {ar_tensor_transposed(&b->dy)}};
    const ar_parts pb = {.n = 1, .part = {ar_tensor_transposed(&b->x)}};
    AR_TRY(arith->operand_b(b->ctx, &ob, &pb, true, b->x.shape[0], NULL, NULL, "dW"));
    AR_TRY(arith->operand_a(b->ctx, &oa, &pa, ob, "dW"));
    AR_TRY(arith->contract(b->ctx, &s, oa, ob));
    AR_TRY(arith->round(b->ctx, &b->dw, s, NULL));
    ar_ctx_end_step(b->ctx);
    return AR_OK;
}

enum { SGEMM, CONTRACTION, GRADIENT, GRADS };

static ar_status time_grads(void *user, double times[GRADS])
{
    grad_bench *b = user;
    const ar_tensor dy = ar_tensor_transposed(&b->dy), x = ar_tensor_transposed(&b->x);
    const ari_bench_device on = {b->on.d, ar_ctx_queue(b->ctx)};
    double at[GRADS + 1];
    AR_TRY(ari_bench_clock(&on, &at[0]));
    AR_TRY(on.d->ops->gemm_f32(on.d, on.q, &b->dw, &dy, &x, false, AR_PRECISION_F32));
    AR_TRY(ari_bench_clock(&on, &at[1]));
    AR_TRY(contraction(b));
    AR_TRY(ari_bench_clock(&on, &at[2]));
    AR_TRY(
        ar_ctx_arith(b->ctx)->grad_contract(b->ctx, &(ar_grad_terms){&b->weight, b->dy}, 1, &b->x, b->samples, NULL));
    ar_ctx_end_step(b->ctx);
    AR_TRY(ari_bench_clock(&on, &at[3]));
    for (int i = 0; i < GRADS; i++)
        times[i] = at[i + 1] - at[i];
    return AR_OK;
}

ar_status ari_bench_grad(ar_bench_grad_row *row, const ar_device_choice *which, int threads, size_t repetitions)
{
    grad_bench b = {0};
    ari_bench_series s = {0};
    ar_status st = AR_OK;
    if (row->out == 0 || row->in == 0 || row->seq == 0 || row->tokens == 0 || row->tokens % row->seq != 0 ||
        repetitions == 0)
        return ar_error_set(AR_ERR_ARG,
                            "bench grad: out %zu, in %zu, tokens %zu, seq %zu, repetitions %zu: all must be > 0, and "
                            "seq must divide tokens",
                            row->out, row->in, row->tokens, row->seq, repetitions);
    AR_TRY_TO(done, st, grad_create(&b, row, which, threads));
    AR_TRY_TO(done, st, ari_bench_repeat(&s, GRADS, repetitions, 1, time_grads, &b));
    const ari_bench_stat ratio = ari_bench_ratio_of(&s, GRADIENT, CONTRACTION);
    row->seconds = ari_bench_times_of(&s, GRADIENT).median;
    row->over_contraction = ratio.median;
    row->over_native = ari_bench_ratio_of(&s, GRADIENT, SGEMM).median;
    row->spread = ratio.spread;
done:
    ari_bench_series_destroy(&s);
    grad_destroy(&b);
    return st;
}
