/* SPDX-License-Identifier: Apache-2.0 */
/* Backward kernels that do several things in one pass over their tensors, beside each of these in a pass of its own. */
#include "anyrank/arith.h"
#include "bench/bench.h"
#include "bench/harness.h"

enum { X, DY, RESIDUAL, DX, SUM, UP, DUP, TERMS, TENSORS };

typedef struct fused_bench fused_bench;

typedef struct fused_case {
    const char *name;
    size_t cols[2]; /* on the CPU, on a GPU */
    ar_norm_kind norm;
    ar_activation act;
    ar_status (*fused)(fused_bench *b), (*apart)(fused_bench *b);
} fused_case;

/* Operands of the kernels. */
struct fused_bench {
    const fused_case *c;
    ari_bench_device made, on; /* on: with the context's queue */
    ar_ctx *ctx;               /* of one of the numerics, which says what a sum is */
    ar_tensor t[TENSORS];      /* [rows, cols] */
    ar_tensor mean, rstd;      /* [rows] */
    ar_param gain, offset;
    size_t moved; /* tensors [rows, cols] that are read or written, of the kernels since it was 0 */
};

/* --- in one pass -------------------------------------------------------------------------------------------------- */

static ar_status sum_of(fused_bench *b, ar_param *p, ar_row_sum *sum)
{
    return ar_ctx_arith(b->ctx)->grad_sum(b->ctx, p, sum);
}

static ar_status norm_fused(fused_bench *b)
{
    ar_row_sum gain, offset = {.t = {NULL}};
    AR_TRY(sum_of(b, &b->gain, &gain));
    if (b->c->norm == AR_NORM_LAYER)
        AR_TRY(sum_of(b, &b->offset, &offset));
    b->moved += 5; /* x, dy, residual; dx, sum */
    return b->on.d->ops->norm_backward(b->on.d, b->on.q, b->c->norm, &b->t[DX], &b->t[SUM], &b->t[DY], &b->t[X],
                                       ar_const(b->mean.data), ar_const(b->rstd.data), ar_const(b->gain.value.data),
                                       &b->t[RESIDUAL], &gain, &offset);
}

static ar_status act_fused(fused_bench *b)
{
    ar_row_sum bias;
    AR_TRY(sum_of(b, &b->gain, &bias));
    b->moved += 3; /* x, dy; dx */
    return b->on.d->ops->act_backward(b->on.d, b->on.q, &b->t[DX], &b->t[DY], &b->t[X], b->c->act, &bias);
}

static ar_status gated_fused(fused_bench *b)
{
    ar_row_sum gate, up;
    AR_TRY(sum_of(b, &b->gain, &gate));
    AR_TRY(sum_of(b, &b->offset, &up));
    b->moved += 5; /* dy, gate, up; dgate, dup */
    return b->on.d->ops->gated_backward(b->on.d, b->on.q, &b->t[DX], &b->t[DUP], &b->t[DY], &b->t[X], &b->t[UP],
                                        b->c->act, &gate, &up);
}

static const ar_dropout dropped = {.key = 1, .threshold = 0x1999999au, .scale = 1.1111112f, .stride = {0, 1}};

/* The kernel's description for tensors of so many columns. */
static ar_dropout dropped_of(const fused_bench *b)
{
    ar_dropout w = dropped;
    w.stride[0] = b->t[X].shape[1];
    return w;
}

static ar_status dropout_fused(fused_bench *b)
{
    const ar_dropout w = dropped_of(b);
    b->moved += 3; /* x, residual; sum */
    return b->on.d->ops->dropout(b->on.d, b->on.q, NULL, &b->t[SUM], &b->t[X], &b->t[RESIDUAL], &w);
}

/* --- one thing after the other ------------------------------------------------------------------------------------ */

static ar_status add_rows(fused_bench *b, ar_param *p, const ar_tensor *terms)
{
    b->moved += 1;
    return ar_ctx_arith(b->ctx)->grad_rows(b->ctx, p, terms, (ar_cbuf){NULL});
}

static ar_status add(fused_bench *b, const ar_tensor *y, const ar_tensor *x)
{
    b->moved += 3;
    return b->on.d->ops->add(b->on.d, b->on.q, y, &b->t[RESIDUAL], x);
}

static const ar_row_sum unsummed = {.t = {NULL}};

/* x is taken for the normalised one, of which the terms are the product with dy. */
static ar_status norm_apart(fused_bench *b)
{
    const ar_device_ops *ops = b->on.d->ops;
    b->moved += 3 + 3; /* x, dy; dx: x, dy; terms */
    AR_TRY(ops->norm_backward(b->on.d, b->on.q, b->c->norm, &b->t[DX], NULL, &b->t[DY], &b->t[X],
                              ar_const(b->mean.data), ar_const(b->rstd.data), ar_const(b->gain.value.data), NULL,
                              &unsummed, &unsummed));
    AR_TRY(ops->mul(b->on.d, b->on.q, &b->t[TERMS], &b->t[DY], &b->t[X]));
    AR_TRY(add_rows(b, &b->gain, &b->t[TERMS]));
    if (b->c->norm == AR_NORM_LAYER)
        AR_TRY(add_rows(b, &b->offset, &b->t[DY]));
    return add(b, &b->t[SUM], &b->t[DX]);
}

static ar_status act_apart(fused_bench *b)
{
    b->moved += 3;
    AR_TRY(b->on.d->ops->act_backward(b->on.d, b->on.q, &b->t[DX], &b->t[DY], &b->t[X], b->c->act, &unsummed));
    return add_rows(b, &b->gain, &b->t[DX]);
}

static ar_status gated_apart(fused_bench *b)
{
    b->moved += 5;
    AR_TRY(b->on.d->ops->gated_backward(b->on.d, b->on.q, &b->t[DX], &b->t[DUP], &b->t[DY], &b->t[X], &b->t[UP],
                                        b->c->act, &unsummed, &unsummed));
    AR_TRY(add_rows(b, &b->gain, &b->t[DX]));
    return add_rows(b, &b->offset, &b->t[DUP]);
}

static ar_status dropout_apart(fused_bench *b)
{
    const ar_dropout w = dropped_of(b);
    b->moved += 2;
    AR_TRY(b->on.d->ops->dropout(b->on.d, b->on.q, &b->t[DX], NULL, &b->t[X], NULL, &w));
    return add(b, &b->t[SUM], &b->t[DX]);
}

/* --- the cases ---------------------------------------------------------------------------------------------------- */

typedef struct fused_row {
    const char *kernel, *numerics;
    size_t rows, cols;  /* elements of one tensor */
    double bytes;       /* that the kernel reads and writes, of fp32 tensors, an element */
    double bytes_apart; /* that one thing after the other does */
    double seconds;     /* median of the kernel */
    double gbps;        /* its bytes over that time */
    double apart_over;  /* median of (time one after the other)/(time) */
    double spread;      /* of that ratio */
} fused_row;

/* With the shapes that take the device's time: of the CPU's blocks of width 768, of a GPU's of width 4096. */
static const fused_case cases[] = {
    {"LayerNorm", {768, 4096}, AR_NORM_LAYER, AR_ACT_NONE, norm_fused, norm_apart},
    {"RMSNorm", {768, 4096}, AR_NORM_RMS, AR_ACT_NONE, norm_fused, norm_apart},
    {"bias + GELU", {3072, 16384}, AR_NORM_LAYER, AR_ACT_GELU_TANH, act_fused, act_apart},
    {"bias + ReLU", {3072, 16384}, AR_NORM_LAYER, AR_ACT_RELU, act_fused, act_apart},
    {"bias + SiLU gate", {2048, 11008}, AR_NORM_LAYER, AR_ACT_SILU, gated_fused, gated_apart},
    {"dropout + residual", {768, 4096}, AR_NORM_LAYER, AR_ACT_NONE, dropout_fused, dropout_apart},
};
enum { CASES = sizeof cases / sizeof *cases };

static ar_status create(fused_bench *b, const fused_row *row, ar_numerics numerics, const ari_bench_session *s)
{
    AR_TRY(ari_bench_device_create(&b->made, &s->device, s->threads));
    const ar_ctx_options options = {.device = b->made.d, .numerics = numerics};
    const size_t shape[2] = {row->rows, row->cols};
    ar_layout layout;
    AR_TRY(ar_ctx_create(&b->ctx, &options));
    b->on = (ari_bench_device){b->made.d, ar_ctx_queue(b->ctx)};
    AR_TRY(ar_layout_replicate(&layout, 1, &row->cols, 0, 1));
    AR_TRY(ar_param_init(&b->gain, b->ctx, "gain", &layout, false));
    AR_TRY(ar_param_init(&b->offset, b->ctx, "offset", &layout, false));
    AR_TRY(ar_param_fresh(&b->gain, b->ctx, 1));
    for (size_t i = 0; i < TENSORS; i++)
        AR_TRY(ari_bench_tensor(&b->on, &b->t[i], 2, shape, i + 1));
    AR_TRY(ari_bench_tensor(&b->on, &b->rstd, 1, &row->rows, 11));
    return ari_bench_tensor(&b->on, &b->mean, 1, (const size_t[]){2 * row->rows}, 12); /* binary64: two words each */
}

static void destroy(fused_bench *b)
{
    ar_device *d = b->made.d;
    ar_param_fini(&b->gain);
    ar_param_fini(&b->offset);
    for (size_t i = 0; i < TENSORS && d; i++)
        d->ops->free(d, b->made.q, b->t[i].data);
    if (d) {
        d->ops->free(d, b->made.q, b->rstd.data);
        d->ops->free(d, b->made.q, b->mean.data);
    }
    ar_ctx_destroy(b->ctx);
    ari_bench_device_destroy(&b->made);
}

enum { FUSED, APART, SIDES };

/* One repetition; bytes of an element that each side moves. */
static ar_status run_side(fused_bench *b, int side, double *seconds, double *bytes)
{
    double start, end;
    b->moved = 0;
    AR_TRY(ari_bench_clock(&b->on, &start));
    AR_TRY((side == FUSED ? b->c->fused : b->c->apart)(b));
    AR_TRY(ari_bench_clock(&b->on, &end));
    *seconds = end - start;
    *bytes = (double)(b->moved * sizeof(float));
    return AR_OK;
}

typedef struct fused_sides {
    fused_bench bench;
    double bytes[SIDES];
} fused_sides;

static ar_status time_sides(void *user, double times[SIDES])
{
    fused_sides *s = user;
    for (int side = 0; side < SIDES; side++)
        AR_TRY(run_side(&s->bench, side, &times[side], &s->bytes[side]));
    return AR_OK;
}

static ar_status time_case(fused_row *row, const fused_case *c, ar_numerics numerics, const ari_bench_session *session)
{
    fused_sides k = {.bench.c = c};
    ari_bench_series s = {0};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, create(&k.bench, row, numerics, session));
    AR_TRY_TO(done, st, ari_bench_repeat(&s, SIDES, session->repetitions, 1, time_sides, &k));
    const ari_bench_stat ratio = ari_bench_ratio_of(&s, APART, FUSED);
    row->bytes = k.bytes[FUSED];
    row->bytes_apart = k.bytes[APART];
    row->seconds = ari_bench_times_of(&s, FUSED).median;
    row->gbps = 1e-9 * row->bytes * (double)row->rows * (double)row->cols / row->seconds;
    row->apart_over = ratio.median;
    row->spread = ratio.spread;
done:
    ari_bench_series_destroy(&s);
    destroy(&k.bench);
    return st;
}

#define ARI_ROW fused_row
static const ari_field fused_fields[] = {
    ARI_FIELD("kernel", "kernel", TEXT, kernel),
    ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("rows", "rows", COUNT, rows),
    ARI_FIELD("cols", "columns", COUNT, cols),
    ARI_FIELD("bytes", "bytes", RATE, bytes),
    ARI_FIELD("bytes_apart", "apart", RATE, bytes_apart),
    ARI_FIELD("seconds", "time", MILLISECONDS, seconds),
    ARI_FIELD("gbps", "GB/s", RATE, gbps),
    ARI_FIELD("apart_over", "apart takes", RATIO, apart_over),
    ARI_FIELD("spread", "spread", SHARE, spread),
};
#undef ARI_ROW

ar_status ari_bench_fused(ari_bench_session *s)
{
    static const ar_numerics both[] = {AR_NUMERICS_NATIVE, AR_NUMERICS_EXACT};
    enum { n = 2 * CASES };
    const bool gpu = s->device.kind == AR_DEVICE_CUDA;
    fused_row rows[n];
    for (size_t i = 0; i < n; i++) {
        const fused_case *c = &cases[i % CASES];
        const ar_numerics numerics = both[i / CASES];
        ari_bench_progress(s, i, n);
        rows[i] = (fused_row){.kernel = c->name,
                              .numerics = ari_numerics_names[numerics],
                              .rows = gpu ? 4096 : 1024,
                              .cols = c->cols[gpu]};
        AR_TRY(time_case(&rows[i], c, numerics, s));
    }
    return ari_bench_end(
        s, ARI_ROWS(fused_fields, rows, n), s->threads,
        "\nWith the sums of the parameters' gradients, %d thread%s; medians. 'bytes': of the tensors that the "
        "kernel moves,\nan element; 'apart': where dX, each sum and the residual have a pass of their own, whose "
        "time is 'apart takes'\ntimes the kernel's. 'spread': of that ratio, (largest - smallest)/median.\n",
        s->threads, ARI_PLURAL(s->threads));
}
