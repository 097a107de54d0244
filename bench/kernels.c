/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that memory bounds: what they move, and how fast, of numbers of 32 bits and of 16. */
#include "bench/harness.h"
#include "ref/core/size.h"

/* The tensors of one dtype, [rows, cols]; x, dy and up are read, y and z written. */
typedef struct operands {
    ar_tensor x, dy, up, y, z;
} operands;

typedef struct kernel_bench {
    ari_bench_device on;
    const struct kernel *kernel;
    operands as[2];    /* fp32, bf16 */
    ar_buf row;        /* f32 [cols]: gains, offsets, a bias */
    ar_buf mean, rstd; /* of x's rows */
    ar_buf sum[2];     /* f32 [cols]: gradients of parameters */
} kernel_bench;

/* reads, writes: tensors that one call must read and write at the least. */
typedef struct kernel {
    const char *name;
    size_t reads, writes;
    ar_status (*run)(const kernel_bench *b, const operands *o);
} kernel;

#define RUN(b, slot, ...) (b)->on.d->ops->slot((b)->on.d, (b)->on.q, __VA_ARGS__)

static ar_status run_add(const kernel_bench *b, const operands *o)
{
    return RUN(b, add, &o->y, &o->x, &o->dy);
}

static ar_status run_dropout(const kernel_bench *b, const operands *o)
{
    const ar_dropout which = {
        .key = 1, .threshold = UINT32_MAX / 10, .scale = 10.0f / 9.0f, .stride = {o->x.shape[1], 1}};
    return RUN(b, dropout, NULL, &o->y, &o->x, &o->up, &which);
}

static ar_status run_norm(const kernel_bench *b, const operands *o)
{
    return RUN(b, norm_forward, AR_NORM_LAYER, &o->y, b->mean, b->rstd, &o->x, ar_const(b->row), ar_const(b->row),
               1e-5);
}

static ar_status run_norm_backward(const kernel_bench *b, const operands *o)
{
    const ar_row_sum gain = {.f32 = b->sum[0]}, offset = {.f32 = b->sum[1]};
    return RUN(b, norm_backward, AR_NORM_LAYER, &o->y, &o->z, &o->dy, &o->x, ar_const(b->mean), ar_const(b->rstd),
               ar_const(b->row), &o->up, &gain, &offset);
}

static ar_status run_gelu(const kernel_bench *b, const operands *o)
{
    return RUN(b, bias_act, &o->x, ar_const(b->row), AR_ACT_GELU_ERF, &o->y);
}

static ar_status run_gelu_backward(const kernel_bench *b, const operands *o)
{
    return RUN(b, act_backward, &o->y, &o->dy, &o->x, AR_ACT_GELU_ERF, &(ar_row_sum){.f32 = b->sum[0]});
}

static ar_status run_gated(const kernel_bench *b, const operands *o)
{
    return RUN(b, gated_forward, &o->y, &o->x, &o->up, AR_ACT_SILU);
}

static ar_status run_gated_backward(const kernel_bench *b, const operands *o)
{
    const ar_row_sum none = {.f32 = {NULL}};
    return RUN(b, gated_backward, &o->y, &o->z, &o->dy, &o->x, &o->up, AR_ACT_SILU, &none, &none);
}

static const kernel kernels[ARI_BENCH_KERNELS] = {
    {"add", 2, 1, run_add},          {"dropout + residual", 2, 1, run_dropout},
    {"LayerNorm", 1, 1, run_norm},   {"LayerNorm backward", 3, 2, run_norm_backward},
    {"bias + GELU", 1, 2, run_gelu}, {"GELU + bias backward", 2, 1, run_gelu_backward},
    {"SiLU gate", 2, 1, run_gated},  {"SiLU gate backward", 3, 2, run_gated_backward}};

static ar_status operands_create(kernel_bench *b, size_t rows, size_t cols)
{
    const size_t shape[2] = {rows, cols};
    ar_tensor *const wide[5] = {&b->as[0].x, &b->as[0].dy, &b->as[0].up, &b->as[0].y, &b->as[0].z};
    ar_tensor *const narrow[5] = {&b->as[1].x, &b->as[1].dy, &b->as[1].up, &b->as[1].y, &b->as[1].z};
    for (size_t i = 0; i < 5; i++) {
        ar_buf half;
        AR_TRY(ari_bench_tensor(&b->on, wide[i], 2, shape, i + 1));
        AR_TRY(b->on.d->ops->alloc(b->on.d, b->on.q, &half, ar_tensor_count(wide[i]) * ar_dtype_bytes(AR_BF16)));
        *narrow[i] = *wide[i];
        narrow[i]->dtype = AR_BF16;
        narrow[i]->data = half;
        AR_TRY(RUN(b, copy_strided, narrow[i], wide[i]));
    }
    return AR_OK;
}

static ar_status bench_create(kernel_bench *b, const ar_bench_kernel_row *row, const ar_device_choice *which,
                              int threads)
{
    size_t elements = 0;
    AR_TRY(ari_mul_size(&elements, row->rows, row->cols));
    AR_TRY(ari_bench_device_create(&b->on, which, threads));
    AR_TRY(operands_create(b, row->rows, row->cols));
    AR_TRY(ari_bench_values(&b->on, &b->row, row->cols, 6));
    AR_TRY(ari_bench_values(&b->on, &b->rstd, row->rows, 7));
    AR_TRY(b->on.d->ops->alloc(b->on.d, b->on.q, &b->mean, row->rows * sizeof(double)));
    for (int i = 0; i < 2; i++)
        AR_TRY(ari_bench_values(&b->on, &b->sum[i], row->cols, 8));
    return run_norm(b, &b->as[0]); /* means and deviations */
}

static void bench_destroy(kernel_bench *b)
{
    ar_device *d = b->on.d;
    if (!d)
        return;
    ar_buf *const all[5] = {&b->row, &b->mean, &b->rstd, &b->sum[0], &b->sum[1]};
    for (int i = 0; i < 2; i++) {
        const operands *o = &b->as[i];
        const ar_buf of[5] = {o->x.data, o->dy.data, o->up.data, o->y.data, o->z.data};
        for (int k = 0; k < 5; k++)
            d->ops->free(d, b->on.q, of[k]);
    }
    for (int i = 0; i < 5; i++)
        d->ops->free(d, b->on.q, *all[i]);
    ari_bench_device_destroy(&b->on);
}

static ar_status time_kernel(void *user, double times[2])
{
    const kernel_bench *b = user;
    for (int i = 0; i < 2; i++) {
        double from, to;
        AR_TRY(ari_bench_clock(&b->on, &from));
        AR_TRY(b->kernel->run(b, &b->as[i]));
        AR_TRY(ari_bench_clock(&b->on, &to));
        times[i] = to - from;
    }
    return AR_OK;
}

ar_status ari_bench_kernel(ar_bench_kernel_row row[2], size_t i, const ar_device_choice *which, int threads,
                           size_t repetitions)
{
    kernel_bench b = {.kernel = &kernels[i < ARI_BENCH_KERNELS ? i : 0]};
    ari_bench_series s = {0};
    ar_status st = AR_OK;
    if (i >= ARI_BENCH_KERNELS || row->rows == 0 || row->cols == 0 || repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench kernels: number %zu, [%zu, %zu], repetitions %zu: all must be > 0", i,
                            row->rows, row->cols, repetitions);
    AR_TRY_TO(done, st, bench_create(&b, row, which, threads));
    AR_TRY_TO(done, st, ari_bench_repeat(&s, 2, repetitions, 1, time_kernel, &b));
    for (size_t side = 0; side < 2; side++) {
        const ari_bench_stat time = ari_bench_times_of(&s, side), ratio = ari_bench_ratio_of(&s, side, 0);
        const ar_dtype dtype = side == 0 ? AR_F32 : AR_BF16;
        const size_t bytes = (b.kernel->reads + b.kernel->writes) * ar_dtype_bytes(dtype);
        row[side] = (ar_bench_kernel_row){.name = b.kernel->name,
                                          .dtype = dtype,
                                          .rows = row->rows,
                                          .cols = row->cols,
                                          .bytes = bytes,
                                          .seconds = time.median,
                                          .gbps = (double)(bytes * row->rows * row->cols) / time.median * 1e-9,
                                          .over_f32 = ratio.median,
                                          .spread = side == 0 ? time.spread : ratio.spread};
    }
done:
    ari_bench_series_destroy(&s);
    bench_destroy(&b);
    return st;
}
