/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/cpu/row_sum.h"
#include "ref/cpu/storage.h"

/* LayerNorm (Ba, Kiros, Hinton 2016) and RMSNorm (Zhang, Sennrich 2019), forward and backward, row by row. Formulas, in
 * the order in which they are rounded: numerics.md, "Sums along a row". */

/* Returns a row's exponent. The bits of magnitudes have the order of the magnitudes, with infinities and then NaNs
 * above all finite values, so the exponent of the largest magnitude is the largest exponent. */
ARI_ROW_LOOP int32_t exponent_of(const float *x, size_t n)
{
    uint32_t top = 0;
    for (size_t j = 0; j < n; j++) {
        const uint32_t bits = ari_row_magnitude32(x[j]);
        top = bits > top ? bits : top;
    }
    return ari_exponent32(ari_float32(top));
}

/* Row sum of n fp32 values whose exponent is e. */
ARI_ROW_LOOP double sum_of(const float *x, size_t n, int32_t e, int32_t p)
{
    return ari_row_value(ari_row_integer(x, n, e, p), n, e, p);
}

/* Returns the row sum of the n exact squares of fp32 values; the largest value has the magnitude bits `top`. */
ARI_ROW_LOOP double sum_of_squares(const float *x, size_t n, uint32_t top, int32_t p)
{
    const double largest = (double)ari_float32(top);
    const int32_t e = ari_exponent64(largest * largest);
    const double step = ari_row_step(e, p);
    uint64_t sum = 0;
    for (size_t j = 0; j < n; j++)
        sum += ari_row_biased((double)x[j] * (double)x[j], step);
    return ari_row_value(sum, n, e, p);
}

/* y holds d = fl32(x - mean) between the two sums. y may be x. */
ARI_ROW_KERNEL void layer_forward(float *y, double *mean, float *rstd, const float *x, const float *gamma,
                                  const float *beta, double eps, size_t h)
{
    const int32_t p = ari_rowsum_bits(h);
    const double m = sum_of(x, h, exponent_of(x, h), p) / (double)h;
    uint32_t top = 0;
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float d = ari_layernorm_d(x[j], m);
        const uint32_t bits = ari_row_magnitude32(d);
        top = bits > top ? bits : top;
        y[j] = d;
    }
    const float r = ari_norm_rstd(sum_of_squares(y, h, top, p) / (double)h, eps);
    *mean = m;
    *rstd = r;
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float xhat = y[j] * r;
        y[j] = beta ? ari_layernorm_y(xhat, gamma[j], beta[j]) : ari_mul32(xhat, gamma[j]);
    }
}

/* y may be x. */
ARI_ROW_KERNEL void rms_forward(float *y, float *rstd, const float *x, const float *gamma, double eps, size_t h)
{
    const int32_t p = ari_rowsum_bits(h);
    uint32_t top = 0;
    for (size_t j = 0; j < h; j++) {
        const uint32_t bits = ari_row_magnitude32(x[j]);
        top = bits > top ? bits : top;
    }
    const float r = ari_norm_rstd(sum_of_squares(x, h, top, p) / (double)h, eps);
    *rstd = r;
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float xhat = x[j] * r;
        y[j] = ari_mul32(xhat, gamma[j]);
    }
}

/** Slot norm_forward. y may be x. h = 0 or rows = 0: does nothing. Errors: AR_ERR_MEMORY (bf16 needs a row of scratch
 *  per thread); nothing is written then. */
ar_status ari_cpu_norm_forward(ar_device *d, ARI_AT_ONCE, ar_norm_kind kind, const ar_tensor *y, ar_buf mean,
                               ar_buf rstd, const ar_tensor *x, ar_cbuf gamma, ar_cbuf beta, double eps)
{
    const ar_tensor x_rows = ari_tensor_rows(x);
    const size_t rows = x_rows.shape[0], h = x_rows.shape[1];
    if (h == 0)
        return AR_OK;
    const float *gains = gamma.ptr, *shifts = beta.ptr;
    float *r = rstd.ptr;
    double *m = mean.ptr;
    const size_t threads = (size_t)ari_threads_for(d, rows, rows * h);
    const size_t stride = x->dtype == AR_BF16 || y->dtype == AR_BF16 ? h + ARI_LINE : 0;
    ARI_OWNED void *scratch = NULL;
    AR_TRY(ari_alloc(&scratch, threads * stride, sizeof(float), "norm_forward's scratch"));
    ARI_PARALLEL_FOR (i, rows, d, rows * h) {
        const ptrdiff_t offset = (ptrdiff_t)(i * h);
        float *room = (float *)scratch + ari_thread_number() * stride, *out = ari_run_at(y, offset, room);
        const float *input = ari_run_load(x, offset, h, room);
        if (kind == AR_NORM_LAYER)
            layer_forward(out, m + i, r + i, input, gains, shifts, eps, h);
        else
            rms_forward(out, r + i, input, gains, eps, h);
        ari_run_store(y, offset, h, out);
    }
    return AR_OK;
}

/* Inputs and outputs of the backward pass for one row. */
typedef struct norm_row {
    float *dx, *sum, *dgamma, *dbeta; /* [h] outputs; sum, and the terms dgamma and dbeta, may be NULL: not wanted */
    const float *dy, *x, *gamma;      /* [h] */
    const float *residual;            /* [h]; NULL: no residual */
    double mean;                      /* LayerNorm's; unused for RMSNorm */
    float rstd;
    float *g, *xhat;         /* [h] scratch, kept between the passes over the row */
    const char *next_row[2]; /* the next row's x and dy in memory */
    size_t next_words;
} norm_row;

/* The magnitudes' bits of the largest g, and of the largest g*xhat as fp32 rounds it. */
typedef struct norm_tops {
    uint32_t g, product;
} norm_tops;

/* Pass 1: computes g, xhat and the terms of dgamma and dbeta; a sum stores their NaNs. The forward pass saved only mean
 * and rstd: recomputing xhat costs less than its memory traffic. */
ARI_ROW_LOOP norm_tops backward_terms(const norm_row *row, size_t h, int centred)
{
    uint32_t largest_g = 0, largest = 0;
    const norm_row r = *row; /* a copy whose fields no store can change */
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float dy = r.dy[j];
        const float xhat = (centred ? ari_layernorm_d(r.x[j], r.mean) : r.x[j]) * r.rstd;
        const float g = dy * r.gamma[j];
        const uint32_t bits_g = ari_row_magnitude32(g), bits = ari_row_magnitude32(g * xhat);
        largest_g = bits_g > largest_g ? bits_g : largest_g;
        largest = bits > largest ? bits : largest;
        if (r.dgamma)
            r.dgamma[j] = dy * xhat;
        if (r.dbeta)
            r.dbeta[j] = dy;
        r.xhat[j] = xhat;
        r.g[j] = g;
    }
    return (norm_tops){largest_g, largest};
}

/* Returns the exponent of the largest |g*xhat|, exact in binary64. Rounding to fp32 keeps the order and changes the
 * exponent only at a power of two; if it overflows or is subnormal, the products themselves are read too. */
ARI_ROW_LOOP int32_t product_exponent(const norm_row *row, size_t h, uint32_t rounded)
{
    if ((rounded & 0x7fffffu) != 0 && rounded >= 0x00800000u && rounded < 0x7f800000u)
        return ari_exponent32(ari_float32(rounded));
    uint64_t largest = 0;
    for (size_t j = 0; j < h; j++) {
        const uint64_t bits = ari_row_magnitude64((double)row->g[j] * (double)row->xhat[j]);
        largest = bits > largest ? bits : largest;
    }
    return ari_exponent64(ari_float64(largest));
}

/* Pass 2: a = S(g)/h, 0 if not centred, and b = S(g*xhat)/h. */
ARI_ROW_LOOP void backward_means(const norm_row *row, size_t h, int centred, norm_tops top, double *a, double *b)
{
    const int32_t p = ari_rowsum_bits(h), e_g = ari_exponent32(ari_float32(top.g));
    const int32_t e = product_exponent(row, h, top.product);
    const double step_g = ari_row_step(e_g, p), step = ari_row_step(e, p);
    uint64_t sum_g = 0, sum = 0;
    for (size_t j = 0; j < h; j++) {
        const double g = (double)row->g[j];
        if (centred)
            sum_g += ari_row_biased(g, step_g);
        sum += ari_row_biased(g * (double)row->xhat[j], step);
    }
    *a = centred ? ari_row_value(sum_g, h, e_g, p) / (double)h : 0.0;
    *b = ari_row_value(sum, h, e, p) / (double)h;
}

ARI_ROW_LOOP void backward_row(const norm_row *row, size_t h, int centred)
{
    double a, b;
    const float *g = row->g, *xhat = row->xhat, *residual = row->residual, rstd = row->rstd;
    float *dx = row->dx, *sum = residual ? row->sum : NULL;
    backward_means(row, h, centred, backward_terms(row, h, centred), &a, &b);
    for (size_t i = 0; i < 2; i++) /* while this row's are written */
        ari_fetch(row->next_row[i], row->next_words);
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float d = centred ? ari_layernorm_dx(g[j], a, b, xhat[j], rstd) : ari_rmsnorm_dx(g[j], b, xhat[j], rstd);
        if (sum)
            sum[j] = ari_add32(residual[j], d);
        dx[j] = d;
    }
}

ARI_ROW_KERNEL void layer_backward(const norm_row *row, size_t h)
{
    backward_row(row, h, 1);
}

ARI_ROW_KERNEL void rms_backward(const norm_row *row, size_t h)
{
    backward_row(row, h, 0);
}

/* Inputs and outputs of all rows. */
typedef struct norm_rows {
    ar_norm_kind kind;
    size_t h;
    const ar_tensor *dx, *sum, *dy, *x, *residual; /* sum and residual may be NULL: not wanted */
    const float *gamma, *rstd;
    const double *mean;
    float *scratch;        /* SCRATCH rows a thread */
    float *dgamma, *dbeta; /* terms of a block of rows; NULL: not wanted, or (dbeta) dy itself */
} norm_rows;

/* Rows in a thread's scratch: two kept between the passes, and those stored as bf16. dx may use x's scratch, and sum
 * the residual's. */
enum { G, XHAT, X_ROOM, DY_ROOM, RESIDUAL_ROOM, SCRATCH };

static float *scratch_row(const norm_rows *n, int which)
{
    const size_t thread_stride = SCRATCH * n->h + ARI_LINE;
    return n->scratch + ari_thread_number() * thread_stride + (size_t)which * n->h;
}

static void make_row(const void *user, size_t i, size_t in_block)
{
    const norm_rows *n = user;
    const size_t h = n->h;
    const ptrdiff_t offset = (ptrdiff_t)(i * h);
    const ar_tensor *residual = n->residual;
    const size_t width = ar_dtype_bytes(n->x->dtype), next_offset = ((size_t)offset + h) * width;
    const norm_row row = {
        .dx = ari_run_at(n->dx, offset, scratch_row(n, X_ROOM)),
        .sum = residual ? ari_run_at(n->sum, offset, scratch_row(n, RESIDUAL_ROOM)) : NULL,
        .dgamma = n->dgamma ? n->dgamma + in_block * h : NULL,
        .dbeta = n->dbeta ? n->dbeta + in_block * h : NULL,
        .dy = ari_run_load(n->dy, offset, h, scratch_row(n, DY_ROOM)),
        .x = ari_run_load(n->x, offset, h, scratch_row(n, X_ROOM)),
        .gamma = n->gamma,
        .residual = residual ? ari_run_load(residual, offset, h, scratch_row(n, RESIDUAL_ROOM)) : NULL,
        .mean = n->kind == AR_NORM_LAYER ? n->mean[i] : 0.0,
        .rstd = n->rstd[i],
        .g = scratch_row(n, G),
        .xhat = scratch_row(n, XHAT),
        .next_row = {(const char *)n->x->data.ptr + next_offset, (const char *)n->dy->data.ptr + next_offset},
        .next_words = h * width / sizeof(float)};
    if (n->kind == AR_NORM_LAYER)
        layer_backward(&row, h);
    else
        rms_backward(&row, h);
    ari_run_store(n->dx, offset, h, row.dx);
    if (residual)
        ari_run_store(n->sum, offset, h, row.sum);
}

/** Slot norm_backward. Errors: AR_ERR_MEMORY (a few rows of scratch a thread, and the terms of a block of rows),
 *  nothing is written then. */
ar_status ari_cpu_norm_backward(ar_device *d, ARI_AT_ONCE, ar_norm_kind kind, const ar_tensor *dx, const ar_tensor *sum,
                                const ar_tensor *dy, const ar_tensor *x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma,
                                const ar_tensor *residual, const ar_row_sum *dgamma, const ar_row_sum *dbeta)
{
    const ar_tensor x_rows = ari_tensor_rows(x);
    const size_t rows = x_rows.shape[0], h = x_rows.shape[1];
    if (rows == 0 || h == 0)
        return AR_OK;
    const size_t threads = (size_t)ari_threads_for(d, rows, rows * h), block = ari_block_rows(d, rows, h);
    const size_t scratch_size = (SCRATCH * h + ARI_LINE) * threads, terms = block * h;
    /* dbeta's terms are dy, unless dx overwrites dy */
    const bool copied = ari_sum_requested(dbeta) && dx->data.ptr == dy->data.ptr;
    ARI_OWNED void *memory = NULL;
    AR_TRY(ari_alloc(&memory, scratch_size + 2 * terms, sizeof(float), "norm_backward's scratch"));
    float *scratch = memory;
    const norm_rows n = {.kind = kind,
                         .h = h,
                         .dx = dx,
                         .sum = sum,
                         .dy = dy,
                         .x = x,
                         .gamma = gamma.ptr,
                         .rstd = rstd.ptr,
                         .residual = residual,
                         .mean = mean.ptr,
                         .scratch = scratch,
                         .dgamma = ari_sum_requested(dgamma) ? scratch + scratch_size : NULL,
                         .dbeta = copied ? scratch + scratch_size + terms : NULL};
    ar_tensor slopes = x_rows, of_block[2] = {x_rows, x_rows};
    slopes.dtype = dy->dtype;
    slopes.data = dy->data;
    slopes.stride[0] = (ptrdiff_t)h;
    for (int i = 0; i < 2; i++) {
        of_block[i].dtype = AR_F32;
        of_block[i].data.ptr = scratch + scratch_size + (size_t)i * terms;
        of_block[i].stride[0] = (ptrdiff_t)h;
    }
    const ari_row_pass p = {.rows = rows,
                            .cols = h,
                            .make_row = make_row,
                            .user = &n,
                            .sums = 2,
                            .sum = {{dgamma, of_block[0], true}, {dbeta, copied ? of_block[1] : slopes, copied}}};
    ari_make_rows(d, &p);
    return AR_OK;
}
