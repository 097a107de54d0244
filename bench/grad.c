/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/grad.h"

#include <stdlib.h>

#include "anyrank/arith.h"
#include "bench/measure.h"
#include "bench/on_device.h"
#include "ref/core/size.h"

const ar_bench_grad_row ari_bench_grad_shapes[ARI_BENCH_GRAD_SHAPES] = {
    {.out = 3072, .in = 768, .tokens = 1024, .seq = 512},
    {.out = 3072, .in = 768, .tokens = 1024, .seq = 128},
    {.out = 3072, .in = 768, .tokens = 1024, .seq = 32},
};

typedef struct bench {
    ari_bench_device on;
    ar_ctx *ctx; /* with a queue of its own */
    ar_param weight;
    ar_tensor dy, x, dw; /* [tokens, out], [tokens, in], [out, in] */
} bench;

static ar_status create_matrix(const ari_bench_device *on, ar_tensor *t, size_t rows, size_t cols, uint64_t seed)
{
    size_t count = 0;
    ar_buf memory = {NULL};
    AR_TRY(ari_mul_size(&count, rows, cols));
    AR_TRY(ari_bench_values(on, &memory, count, seed));
    return ar_tensor_view(t, AR_F32, 2, (const size_t[]){rows, cols}, memory);
}

static ar_status create(bench *b, const ar_bench_grad_row *row, const ar_device_choice *which, int threads)
{
    AR_TRY(ari_bench_device_create(&b->on, which, threads));
    const ar_ctx_options options = {.device = b->on.d};
    ar_layout layout;
    AR_TRY(ar_ctx_create(&b->ctx, &options));
    AR_TRY(ar_layout_replicate(&layout, 2, (const size_t[]){row->out, row->in}, 0, 1));
    AR_TRY(ar_param_init(&b->weight, b->ctx, "weight", &layout, false));
    AR_TRY(create_matrix(&b->on, &b->dy, row->tokens, row->out, 1));
    AR_TRY(create_matrix(&b->on, &b->x, row->tokens, row->in, 2));
    return create_matrix(&b->on, &b->dw, row->out, row->in, 3);
}

static void destroy(bench *b)
{
    ar_device *d = b->on.d;
    ar_param_fini(&b->weight);
    if (d) {
        d->ops->free(d, b->dy.data);
        d->ops->free(d, b->x.data);
        d->ops->free(d, b->dw.data);
    }
    ar_ctx_destroy(b->ctx);
    ari_bench_device_destroy(&b->on);
}

/* dY^T X over all tokens as one exact contraction, quantisation included. */
static ar_status contraction(bench *b)
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

/* times: native, contraction, gradient. */
static ar_status repetition(bench *b, size_t samples, double times[3])
{
    const ar_tensor dy = ar_tensor_transposed(&b->dy), x = ar_tensor_transposed(&b->x);
    const ari_bench_device on = {b->on.d, ar_ctx_queue(b->ctx)};
    double start = 0.0, native = 0.0, plain = 0.0, end = 0.0;
    AR_TRY(ari_bench_clock(&on, &start));
    AR_TRY(on.d->ops->gemm_f32(on.d, on.q, &b->dw, &dy, &x, false, AR_PRECISION_F32));
    AR_TRY(ari_bench_clock(&on, &native));
    AR_TRY(contraction(b));
    AR_TRY(ari_bench_clock(&on, &plain));
    AR_TRY(ar_ctx_arith(b->ctx)->grad_contract(b->ctx, &b->weight, &b->dy, &b->x, samples, NULL, "dW"));
    ar_ctx_end_step(b->ctx);
    AR_TRY(ari_bench_clock(&on, &end));
    times[0] = native - start;
    times[1] = plain - native;
    times[2] = end - plain;
    return AR_OK;
}

static ar_status measure(bench *b, ar_bench_grad_row *row, size_t repetitions)
{
    double *seconds = NULL, times[3];
    ar_status st = AR_OK;
    AR_TRY(ari_alloc((void **)&seconds, repetitions, 3 * sizeof(double), "the benchmark's times"));
    double *plain = seconds + repetitions, *native = plain + repetitions;
    AR_TRY_TO(done, st, repetition(b, row->tokens / row->seq, times)); /* warms caches, page tables, BLIS's buffers */
    for (size_t i = 0; i < repetitions; i++) {
        AR_TRY_TO(done, st, repetition(b, row->tokens / row->seq, times));
        seconds[i] = times[2];
        plain[i] = times[2] / times[1];
        native[i] = times[2] / times[0];
    }
    const ari_bench_stat ratio = ari_bench_stat_of(plain, repetitions);
    row->seconds = ari_bench_stat_of(seconds, repetitions).median;
    row->over_contraction = ratio.median;
    row->over_native = ari_bench_stat_of(native, repetitions).median;
    row->spread = ratio.spread;
done:
    free(seconds);
    return st;
}

ar_status ari_bench_grad(ar_bench_grad_row *row, const ar_device_choice *which, int threads, size_t repetitions)
{
    bench b = {0};
    ar_status st = AR_OK;
    if (row->out == 0 || row->in == 0 || row->seq == 0 || row->tokens == 0 || row->tokens % row->seq != 0 ||
        repetitions == 0)
        return ar_error_set(AR_ERR_ARG,
                            "bench grad: out %zu, in %zu, tokens %zu, seq %zu, repetitions %zu: all must be > 0, and "
                            "seq must divide tokens",
                            row->out, row->in, row->tokens, row->seq, repetitions);
    AR_TRY_TO(done, st, create(&b, row, which, threads));
    st = measure(&b, row, repetitions);
done:
    destroy(&b);
    return st;
}
