/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that memory bounds: what they move, how fast, and beside a copy of as many bytes. */
#include <stdlib.h>

#include "bench/bench.h"
#include "bench/harness.h"
#include "ref/core/size.h"
#include "ref/numerics/optimizer.h"

/* The tensors of one dtype, [rows, cols]: x, dy and up are read, y and z written. */
typedef struct operands {
    ar_tensor x, dy, up, y, z;
} operands;

/* An operand of a product as it is in memory, or the other way round. */
typedef struct quantised {
    ar_tensor values; /* a view of x */
    ar_buf c, e;      /* exponents of its columns and of its scaled rows */
    ar_packed *packed;
} quantised;

typedef struct kernel_bench {
    ari_bench_device on;
    size_t rows, cols;
    operands as[2];    /* fp32, bf16 */
    ar_tensor copy[2]; /* from, to: f32, half of the most bytes that a kernel moves each */
    ar_buf row;        /* f32 [cols]: gains, offsets */
    ar_buf no_bias; /* f32 [cols] of zeros: an activation keeps its input with the bias, which would grow each call */
    ar_buf mean, rstd; /* of x's rows */
    ar_buf sum[2];     /* f32 [cols]: gradients of parameters */
    ar_buf cos, sin;   /* of rope */
    ar_buf sums;       /* int64 [rows, cols] */
    ar_buf t, hl;      /* accumulators of [rows, cols] */
    quantised plain, transposed;
    ar_buf key, key_sum;    /* of rows: int32, 8 bytes */
    ar_buf row_of, visible; /* int64 [rows], int32 [rows, 2] */
    ar_buf valid, norm;     /* u8 [rows]; int64 [2] */
    ar_buf exponent;        /* int32: of all of x */
} kernel_bench;

/* bytes: of the tensors that one call must read and write, an element: of the tensors of the dtype, and of others. */
typedef struct kernel {
    const char *name;
    size_t tensors, others;
    bool bf16;
    ar_status (*run)(const kernel_bench *b, const operands *o);
} kernel;

#define RUN(b, slot, ...) (b)->on.d->ops->slot((b)->on.d, (b)->on.q, __VA_ARGS__)
/* One that is a call of a slot, with arguments out of b and o. */
#define KERNEL(name, slot, ...)                                           \
    static ar_status run_##name(const kernel_bench *b, const operands *o) \
    {                                                                     \
        (void)o;                                                          \
        return RUN(b, slot, __VA_ARGS__);                                 \
    }

/* --- element-wise ------------------------------------------------------------------------------------------------- */

static const ar_row_sum unsummed = {.f32 = {NULL}};

KERNEL(add, add, &o->y, &o->x, &o->dy)
KERNEL(scale, scale, &o->y, &o->x, 0.75f)

static ar_status run_transpose(const kernel_bench *b, const operands *o)
{
    const size_t shape[2] = {b->cols, b->rows};
    ar_tensor y;
    const ar_tensor x = ar_tensor_transposed(&o->x);
    AR_TRY(ar_tensor_view(&y, o->y.dtype, 2, shape, o->y.data));
    return RUN(b, copy_strided, &y, &x);
}

static ar_status run_dropout(const kernel_bench *b, const operands *o)
{
    const ar_dropout which = {
        .key = 1, .threshold = UINT32_MAX / 10, .scale = 10.0f / 9.0f, .stride = {o->x.shape[1], 1}};
    return RUN(b, dropout, NULL, &o->y, &o->x, &o->up, &which);
}

KERNEL(gelu, bias_act, &o->z, ar_const(b->no_bias), AR_ACT_GELU_ERF, &o->y)
KERNEL(gelu_backward, act_backward, &o->y, &o->dy, &o->x, AR_ACT_GELU_ERF, &(ar_row_sum){.f32 = b->sum[0]})
KERNEL(gelu_tanh, bias_act, &o->z, ar_const(b->no_bias), AR_ACT_GELU_TANH, &o->y)
KERNEL(gated, gated_forward, &o->y, &o->x, &o->up, AR_ACT_SILU)
KERNEL(gated_backward, gated_backward, &o->y, &o->z, &o->dy, &o->x, &o->up, AR_ACT_SILU, &unsummed, &unsummed)

static ar_status run_optimizer(const kernel_bench *b, const operands *o)
{
    const ar_optimizer_options options = {
        .kind = AR_OPTIMIZER_ADAMW, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    ari_optimizer_clock clock = {0};
    ari_optimizer_tick(&clock, &options);
    const ari_optimizer_constants k = ari_optimizer_constants_of(&clock, &options, 1.0, options.weight_decay);
    return RUN(b, optimizer_step, &o->y, (ar_buf){NULL}, o->z.data, b->sums, &o->dy, &k);
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

KERNEL(norm, norm_forward, AR_NORM_LAYER, &o->y, b->mean, b->rstd, &o->x, ar_const(b->row), ar_const(b->row), 1e-5)
KERNEL(norm_backward, norm_backward, AR_NORM_LAYER, &o->y, &o->z, &o->dy, &o->x, ar_const(b->mean), ar_const(b->rstd),
       ar_const(b->row), &o->up, &(ar_row_sum){.f32 = b->sum[0]}, &(ar_row_sum){.f32 = b->sum[1]})
KERNEL(rms, norm_forward, AR_NORM_RMS, &o->y, b->mean, b->key_sum, &o->x, ar_const(b->row), (ar_cbuf){NULL}, 1e-5)

/* Heads of 64, or one of an even number of columns. */
static size_t head_of(size_t cols)
{
    return cols % 64 == 0 ? 64 : cols - cols % 2;
}

static ar_status run_rope(const kernel_bench *b, const operands *o)
{
    const size_t d = head_of(b->cols);
    ar_tensor view[2] = {o->x, o->y};
    for (int i = 0; i < 2; i++) {
        view[i].ndim = 4;
        const size_t shape[4] = {1, b->rows, b->cols / d, d};
        const ptrdiff_t stride[4] = {0, (ptrdiff_t)b->cols, (ptrdiff_t)d, 1};
        for (int k = 0; k < 4; k++) {
            view[i].shape[k] = shape[k];
            view[i].stride[k] = stride[k];
        }
    }
    return RUN(b, rope, &view[1], &view[0], ar_const(b->cos), ar_const(b->sin), 1);
}

/* Every query sees every key. */
static ar_scores scores_of(const kernel_bench *b)
{
    return (ar_scores){1, 1, b->rows, b->cols, {.matrices = 1, .rows = b->rows, .cols = b->cols}};
}

static ar_status run_softmax(const kernel_bench *b, const operands *o)
{
    const ar_mask mask = {.visible = ar_const(b->visible)};
    const ar_scores scores = scores_of(b);
    return RUN(b, softmax_forward, o->y.data, ar_const(o->x.data), (ar_cbuf){NULL}, b->key, b->key_sum, false, 0.125f,
               &scores, &mask);
}

static ar_status run_softmax_backward(const kernel_bench *b, const operands *o)
{
    const ar_mask mask = {.visible = ar_const(b->visible)};
    const ar_scores scores = scores_of(b);
    return RUN(b, softmax_backward, o->y.data, ar_const(o->up.data), o->dy.data, b->key_sum, false, 0.125f, &scores,
               &mask);
}

KERNEL(gather, gather_rows, &o->y, &o->x, ar_const(b->row_of), (ar_cbuf){NULL}, 1)
KERNEL(loss_max, ce_max, b->key, &o->x)
KERNEL(loss_sum, ce_sum, b->key_sum, &o->x, ar_const(b->key), b->cols)
KERNEL(loss_backward, ce_backward, &o->y, &o->x, ar_const(b->key), ar_const(b->key_sum), ar_const(b->row_of),
       ar_const(b->valid), &(ar_loss_options){0}, (double)b->rows, b->cols)
KERNEL(sum_rows, sum_rows_f32, b->sum[0], 1, &o->x, (ar_cbuf){NULL})
KERNEL(squares, sum_squares, b->norm, &o->x, ar_const(b->exponent))

/* --- exact numerics ----------------------------------------------------------------------------------------------- */

static ar_status col_exponents(const kernel_bench *b, const quantised *v)
{
    return RUN(b, col_exponents, v->c, &v->values, false);
}

static ar_status row_exponents(const kernel_bench *b, const quantised *v)
{
    return RUN(b, row_exponents, v->e, &v->values, ar_const(v->c), -1, false, false);
}

static ar_status pack(const kernel_bench *b, const quantised *v)
{
    return RUN(b, pack, v->packed, 0, 0, &v->values, ar_const(v->c), -1, ar_const(v->e));
}

/* Times the contraction of an operand as it is in memory, and of its transpose. */
#define BOTH(name)                                                                     \
    static ar_status run_##name(const kernel_bench *b, const operands *o)              \
    {                                                                                  \
        (void)o;                                                                       \
        return name(b, &b->plain);                                                     \
    }                                                                                  \
    static ar_status run_##name##_transposed(const kernel_bench *b, const operands *o) \
    {                                                                                  \
        (void)o;                                                                       \
        return name(b, &b->transposed);                                                \
    }
BOTH(col_exponents)
BOTH(row_exponents)
BOTH(pack)

KERNEL(round, round_i64, o->y.data, ar_const(b->sums), 1, 0, b->rows * b->cols, b->cols, ar_const(b->plain.e),
       ar_const(b->transposed.e))
KERNEL(acc_rows, acc_add, b->t, b->hl, false, 1, &o->x, (ar_cbuf){NULL})
KERNEL(acc_each, acc_add, b->t, b->hl, false, b->rows, &o->x, (ar_cbuf){NULL})
KERNEL(acc_scatter, acc_add, b->t, b->hl, false, b->rows, &o->x, ar_const(b->row_of))
KERNEL(acc_raise, acc_raise, b->t, b->hl, ar_const(b->t), b->rows * b->cols)
KERNEL(acc_value, acc_value, &o->y, ar_const(b->t), ar_const(b->hl), b->rows * b->cols, false)

enum { STATE = 17 }; /* bytes of an accumulator */

static const kernel kernels[] = {
    {"add", 3, 0, true, run_add},
    {"scale", 2, 0, true, run_scale},
    {"transpose", 2, 0, true, run_transpose},
    {"dropout + residual", 3, 0, true, run_dropout},
    {"bias + GELU (erf)", 3, 0, true, run_gelu},
    {"bias + GELU (tanh)", 3, 0, true, run_gelu_tanh},
    {"GELU (erf) + bias backward", 3, 0, true, run_gelu_backward},
    {"SiLU gate", 3, 0, true, run_gated},
    {"SiLU gate backward", 5, 0, true, run_gated_backward},
    {"AdamW", 7, 0, false, run_optimizer},
    {"LayerNorm", 2, 0, true, run_norm},
    {"LayerNorm backward", 5, 0, true, run_norm_backward},
    {"RMSNorm", 2, 0, true, run_rms},
    {"rope", 2, 0, true, run_rope},
    {"softmax", 2, 0, false, run_softmax},
    {"softmax backward", 3, 0, false, run_softmax_backward},
    {"embedding", 2, 0, true, run_gather},
    {"loss: largest", 1, 0, true, run_loss_max},
    {"loss: sum", 1, 0, true, run_loss_sum},
    {"loss backward", 2, 0, true, run_loss_backward},
    {"sum over rows", 1, 0, true, run_sum_rows},
    {"squares of gradients", 1, 0, true, run_squares},
    {"column exponents", 1, 0, false, run_col_exponents},
    {"column exponents, transposed", 1, 0, false, run_col_exponents_transposed},
    {"row exponents", 1, 0, false, run_row_exponents},
    {"row exponents, transposed", 1, 0, false, run_row_exponents_transposed},
    {"quantisation", 1, 4, false, run_pack},
    {"quantisation, transposed", 1, 4, false, run_pack_transposed},
    {"rounding of int64 sums", 1, 8, false, run_round},
    {"accumulator: sum over rows", 1, 0, false, run_acc_rows},
    {"accumulator: each its own", 1, 2 * STATE, false, run_acc_each},
    {"accumulator: rows of a table", 1, 2 * STATE, false, run_acc_scatter},
    {"accumulator: raise", 0, 2 * STATE + 1, false, run_acc_raise},
    {"accumulator: value", 1, STATE, false, run_acc_value},
};
enum { KERNELS = sizeof kernels / sizeof *kernels };

static size_t bytes_of(const kernel *k, ar_dtype dtype)
{
    return k->tensors * ar_dtype_bytes(dtype) + k->others;
}

/* --- creation ----------------------------------------------------------------------------------------------------- */

static ar_status operands_create(kernel_bench *b)
{
    const size_t shape[2] = {b->rows, b->cols};
    ar_tensor *const wide[5] = {&b->as[0].x, &b->as[0].dy, &b->as[0].up, &b->as[0].y, &b->as[0].z};
    ar_tensor *const narrow[5] = {&b->as[1].x, &b->as[1].dy, &b->as[1].up, &b->as[1].y, &b->as[1].z};
    for (size_t i = 0; i < 5; i++) {
        AR_TRY(ari_bench_tensor(&b->on, wide[i], 2, shape, i + 1));
        AR_TRY(ari_bench_tensor_as(&b->on, narrow[i], wide[i], AR_BF16));
    }
    return AR_OK;
}

static ar_status quantised_create(kernel_bench *b, quantised *v, ar_tensor values)
{
    v->values = values;
    AR_TRY(ari_bench_alloc(&b->on, &v->c, values.shape[1] * sizeof(int32_t)));
    AR_TRY(ari_bench_alloc(&b->on, &v->e, values.shape[0] * sizeof(int32_t)));
    AR_TRY(RUN(b, packed_create, &v->packed, 1, values.shape[0], values.shape[1], false));
    AR_TRY(col_exponents(b, v));
    return row_exponents(b, v);
}

/* Operands of row kernels besides values. */
static ar_status rows_create(kernel_bench *b)
{
    ARI_OWNED void *memory = NULL;
    AR_TRY(ari_alloc_zero(&memory, b->rows, sizeof(int64_t) + 2 * sizeof(int32_t) + 1, "a benchmark's rows"));
    int64_t *row_of = memory;
    int32_t *visible = (int32_t *)(void *)(row_of + b->rows);
    uint8_t *valid = (uint8_t *)(visible + 2 * b->rows);
    const size_t targets = b->rows < b->cols ? b->rows : b->cols; /* rows of a table, and classes */
    for (size_t i = 0; i < b->rows; i++) {
        row_of[i] = (int64_t)((i * 5 + 3) % targets);
        visible[2 * i + 1] = (int32_t)b->cols;
        valid[i] = 1;
    }
    const size_t n = b->rows;
    AR_TRY(ari_bench_alloc(&b->on, &b->row_of, n * sizeof *row_of));
    AR_TRY(ari_bench_alloc(&b->on, &b->visible, 2 * n * sizeof *visible));
    AR_TRY(ari_bench_alloc(&b->on, &b->valid, n));
    AR_TRY(RUN(b, copy, b->row_of, (ar_cbuf){row_of}, n * sizeof *row_of));
    AR_TRY(RUN(b, copy, b->visible, (ar_cbuf){visible}, 2 * n * sizeof *visible));
    AR_TRY(RUN(b, copy, b->valid, (ar_cbuf){valid}, n));
    return ar_queue_sync(b->on.q, 0);
}

/* Two buffers of f32 in pieces that a thread copies at once, short enough that memcpy writes them as a kernel does. */
enum { PIECE = 4096 };

static ar_tensor copied(const kernel_bench *b, int side, size_t bytes)
{
    const size_t words = bytes * b->rows * b->cols / (2 * sizeof(float));
    const size_t pieces = words / PIECE > 0 ? words / PIECE : 1, length = words / pieces;
    return (ar_tensor){.dtype = AR_F32,
                       .ndim = 3,
                       .shape = {pieces, 1, length},
                       .stride = {(ptrdiff_t)length, (ptrdiff_t)length, 1},
                       .data = b->copy[side].data};
}

static ar_status buffers_create(kernel_bench *b)
{
    static const ar_rope rope = {.kind = AR_ROPE_DEFAULT, .theta = 1e4};
    const size_t n = b->rows * b->cols, half = head_of(b->cols) / 2;
    size_t most = 0;
    for (size_t i = 0; i < KERNELS; i++)
        most = bytes_of(&kernels[i], AR_F32) > most ? bytes_of(&kernels[i], AR_F32) : most;
    for (int i = 0; i < 2; i++) {
        AR_TRY(ari_bench_tensor(&b->on, &b->copy[i], 1, (const size_t[]){n * most / (2 * sizeof(float)) + 1}, 9));
        AR_TRY(ari_bench_values(&b->on, &b->sum[i], b->cols, 8));
    }
    AR_TRY(ari_bench_values(&b->on, &b->row, b->cols, 6));
    AR_TRY(ari_bench_alloc(&b->on, &b->no_bias, b->cols * sizeof(float)));
    AR_TRY(RUN(b, zero, b->no_bias, b->cols * sizeof(float)));
    AR_TRY(ari_bench_values(&b->on, &b->rstd, b->rows, 7));
    AR_TRY(ari_bench_values(&b->on, &b->sums, 2 * n, 10));
    AR_TRY(RUN(b, zero, b->sums, n * sizeof(float))); /* of which AdamW has its second moments */
    AR_TRY(ari_bench_alloc(&b->on, &b->mean, b->rows * sizeof(double)));
    AR_TRY(ari_bench_alloc(&b->on, &b->key, b->rows * sizeof(int32_t)));
    AR_TRY(ari_bench_alloc(&b->on, &b->key_sum, b->rows * sizeof(double)));
    AR_TRY(ari_bench_alloc(&b->on, &b->t, n));
    AR_TRY(RUN(b, zero, b->t, n));
    AR_TRY(ari_bench_alloc(&b->on, &b->hl, 2 * n * sizeof(int64_t)));
    AR_TRY(RUN(b, zero, b->hl, 2 * n * sizeof(int64_t)));
    AR_TRY(ari_bench_alloc(&b->on, &b->norm, 2 * sizeof(int64_t)));
    AR_TRY(RUN(b, zero, b->norm, 2 * sizeof(int64_t)));
    AR_TRY(ari_bench_alloc(&b->on, &b->cos, b->rows * half * sizeof(float)));
    AR_TRY(ari_bench_alloc(&b->on, &b->sin, b->rows * half * sizeof(float)));
    AR_TRY(RUN(b, rope_tables, b->cos, b->sin, b->rows, 2 * half, &rope));
    AR_TRY(ari_bench_alloc(&b->on, &b->exponent, sizeof(int32_t)));
    const ar_tensor all = {
        .dtype = AR_F32, .ndim = 2, .shape = {1, n}, .stride = {(ptrdiff_t)n, 1}, .data = b->as[0].x.data};
    return RUN(b, row_exponents, b->exponent, &all, (ar_cbuf){NULL}, 1, false, false);
}

static void kernels_destroy(kernel_bench *b)
{
    ar_device *d = b->on.d;
    if (!d)
        return;
    d->ops->packed_destroy(d, b->on.q, b->plain.packed);
    d->ops->packed_destroy(d, b->on.q, b->transposed.packed);
    ari_bench_device_destroy(&b->on);
}

static ar_status kernels_create(kernel_bench *b, const ari_bench_session *s)
{
    size_t elements = 0;
    if (b->cols < 2)
        return ar_error_set(AR_ERR_ARG, "bench kernels: [%zu, %zu]: at least one row and two columns", b->rows,
                            b->cols);
    AR_TRY(ari_mul_size(&elements, b->rows, b->cols));
    AR_TRY(ari_mul_size(&elements, elements, 64));
    AR_TRY(ari_bench_device_create(&b->on, &s->device, s->threads));
    AR_TRY(operands_create(b));
    AR_TRY(buffers_create(b));
    AR_TRY(rows_create(b));
    AR_TRY(quantised_create(b, &b->plain, b->as[0].x));
    AR_TRY(quantised_create(b, &b->transposed, ar_tensor_transposed(&b->as[0].x)));
    return run_norm(b, &b->as[0]); /* means and deviations */
}

/* --- times -------------------------------------------------------------------------------------------------------- */

/* Sides of a repetition: the kernel, and a copy of as many bytes, in fp32 and then in bf16. */
enum { KERNEL, COPY, WAYS, MOST_SIDES = 2 * WAYS, MOST_CALLS = 4096 };
#define BLOCK_SECONDS 0.0005 /* calls that are shorter are timed together */

typedef struct timed {
    const kernel_bench *b;
    const kernel *k;
    size_t sides, calls[MOST_SIDES];
} timed;

static ar_status run_calls(const timed *t, size_t side, size_t calls)
{
    const kernel_bench *b = t->b;
    const operands *o = &b->as[side / WAYS];
    const size_t bytes = bytes_of(t->k, o->x.dtype);
    const ar_tensor from = copied(b, 0, bytes), to = copied(b, 1, bytes);
    for (size_t i = 0; i < calls; i++)
        AR_TRY(side % WAYS == KERNEL ? t->k->run(b, o) : RUN(b, copy_strided, &to, &from));
    return AR_OK;
}

/* Several calls begin with one that brings what fits a cache there. */
static ar_status time_sides(void *user, double *times)
{
    timed *t = user;
    for (size_t side = 0; side < t->sides; side++) {
        const size_t calls = t->calls[side];
        double from, to;
        AR_TRY(run_calls(t, side, calls > 1 ? 1 : 0));
        AR_TRY(ari_bench_clock(&t->b->on, &from));
        AR_TRY(run_calls(t, side, calls));
        AR_TRY(ari_bench_clock(&t->b->on, &to));
        times[side] = (to - from) / (double)calls;
    }
    return AR_OK;
}

/* From one call of each, after one that only warms. */
static ar_status count_calls(timed *t)
{
    double times[MOST_SIDES];
    for (int i = 0; i < 2; i++)
        AR_TRY(time_sides(t, times));
    for (size_t side = 0; side < t->sides; side++) {
        const double calls = BLOCK_SECONDS / (times[side] > 1e-9 ? times[side] : 1e-9);
        t->calls[side] = calls < 1.0 ? 1 : calls > MOST_CALLS ? MOST_CALLS : (size_t)calls;
    }
    return AR_OK;
}

typedef struct kernel_row {
    const char *name, *dtype;
    size_t rows, cols;
    size_t bytes;     /* an element, of the tensors that one call reads and writes at the least */
    double seconds;   /* median of a call */
    double gbps;      /* those bytes in that time */
    double over_copy; /* median of (time)/(time of the copy) */
    double spread;    /* of that ratio */
} kernel_row;

#define ARI_ROW kernel_row
static const ari_field kernel_fields[] = {
    ARI_FIELD("kernel", "kernel", TEXT, name),
    ARI_FIELD("dtype", "type", TEXT, dtype),
    ARI_FIELD("rows", "rows", COUNT, rows),
    ARI_FIELD("cols", "columns", COUNT, cols),
    ARI_FIELD("bytes_per_element", "bytes", COUNT, bytes),
    ARI_FIELD("seconds", "time", MILLISECONDS, seconds),
    ARI_FIELD("gbps", "GB/s", RATIO, gbps),
    ARI_FIELD("over_copy", "times a copy", RATIO, over_copy),
    ARI_FIELD("spread", "spread", SHARE, spread),
};
#undef ARI_ROW

/* Adds the kernel's rows: in fp32, and in bf16 where it has that. */
static ar_status time_kernel(kernel_row *rows, size_t *n, const kernel_bench *b, const kernel *k, size_t repetitions)
{
    ARI_ENDED(ari_bench_series_destroy) ari_bench_series s = {0};
    timed t = {.b = b, .k = k, .sides = k->bf16 ? MOST_SIDES : WAYS, .calls = {1, 1, 1, 1}};
    AR_TRY(count_calls(&t));
    AR_TRY(ari_bench_repeat(&s, t.sides, repetitions, 1, time_sides, &t));
    for (size_t first = 0; first < t.sides; first += WAYS) {
        const ar_dtype dtype = b->as[first / WAYS].x.dtype;
        const size_t bytes = bytes_of(k, dtype);
        const ari_bench_stat ratio = ari_bench_ratio_of(&s, first + KERNEL, first + COPY);
        const double seconds = ari_bench_times_of(&s, first + KERNEL).median;
        rows[(*n)++] = (kernel_row){.name = k->name,
                                    .dtype = dtype == AR_F32 ? "f32" : "bf16",
                                    .rows = b->rows,
                                    .cols = b->cols,
                                    .bytes = bytes,
                                    .seconds = seconds,
                                    .gbps = (double)(bytes * b->rows * b->cols) / seconds * 1e-9,
                                    .over_copy = ratio.median,
                                    .spread = ratio.spread};
    }
    return AR_OK;
}

enum { SIZES = 2 };

/* All kernels in one size, the one after `begun` others. */
static ar_status time_size(ari_bench_session *s, kernel_row *rows, size_t *n, const size_t size[2], size_t begun)
{
    ARI_ENDED(kernels_destroy) kernel_bench b = {.rows = size[0], .cols = size[1]};
    AR_TRY(kernels_create(&b, s));
    for (size_t i = 0; i < KERNELS; i++) {
        ari_bench_progress(s, begun * KERNELS + i, SIZES * KERNELS);
        AR_TRY(time_kernel(rows, n, &b, &kernels[i], s->repetitions));
    }
    return AR_OK;
}

/* Tensors of 128 KiB, of which a second cache level holds all that a kernel moves, and of 64 MiB, of which no cache
 * does. */
ar_status ari_bench_kernels(ari_bench_session *s)
{
    static const size_t sizes[SIZES][2] = {{32, 1024}, {16384, 1024}};
    const size_t given[2] = {s->v->m ? s->v->m : 2048, s->v->n ? s->v->n : 2048};
    const bool one = s->v->m || s->v->n;
    kernel_row rows[SIZES * 2 * KERNELS];
    size_t n = 0;
    for (size_t i = 0; i < (one ? 1 : SIZES); i++)
        AR_TRY(time_size(s, rows, &n, one ? given : sizes[i], i));
    return ari_bench_end(
        s, ARI_ROWS(kernel_fields, rows, n), s->threads,
        "\nKernels on tensors of [rows, columns], %d thread%s; medians. 'bytes': of an element, in the tensors that a "
        "call\nmust read and write. 'GB/s': those bytes in that time. 'times a copy': over the time in which the same "
        "threads\ncopy half as many bytes, which reads and writes as many: near 1, memory is what the kernel waits "
        "for; "
        "above,\nits arithmetic. 'spread': of that ratio, (largest - smallest)/median.\n",
        s->threads, ARI_PLURAL(s->threads));
}
