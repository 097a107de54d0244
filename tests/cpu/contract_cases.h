/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/device.h"
#include "ref/core/size.h"
#include "ref/numerics/bits.h"

/* Operands that try to break a contraction, and the steps of one through the device's table. No assertions here: a
 * plain main uses it too. */

typedef enum data_kind {
    DATA_PLAIN,     /* magnitudes 2^-7 .. 1 */
    DATA_SPREAD,    /* exponents over the whole of fp32, subnormals and zeros among them */
    DATA_TINY_COLS, /* every third column all zero, its neighbours near 1e-6 */
    DATA_LARGEST,   /* +-FLT_MAX: every integer is of the largest magnitude */
    DATA_SUBNORMAL, /* subnormals alone */
    DATA_NONFINITE, /* a NaN, an infinity, an all-zero row, an all-zero column that meets a NaN */
    DATA_ONES,      /* 1 - 2^-24: all integers 2^25 - 2, the longest sums */
    DATA_ZERO,      /* +0 and -0 */
    DATA_KINDS
} data_kind;

static inline uint32_t case_random(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX */
    return (uint32_t)(*state >> 32);
}

static inline float case_plain(uint64_t *state)
{
    const float unit = (float)((int32_t)case_random(state) / 256) * 0x1p-23f;
    return unit * ari_float32((uint32_t)(127 - (int)(case_random(state) % 7)) << 23);
}

static inline float case_any_finite(uint64_t *state)
{
    const uint32_t bits = case_random(state);
    if (bits % 11 == 0)
        return bits % 2 ? 0.0f : -0.0f;
    const float x = ari_float32(case_random(state));
    return isfinite(x) ? x : 1.0f;
}

/* x[rows, cols] row-major. */
static inline void case_fill(float *x, size_t rows, size_t cols, data_kind kind, uint64_t seed)
{
    uint64_t state = seed * 2654435761u + (uint64_t)kind;
    for (size_t i = 0; i < rows; i++)
        for (size_t k = 0; k < cols; k++) {
            const float plain = case_plain(&state);
            const float sign = case_random(&state) & 1u ? 1.0f : -1.0f;
            float v = plain;
            if (kind == DATA_SPREAD)
                v = case_any_finite(&state);
            else if (kind == DATA_TINY_COLS)
                v = k % 3 == 1 ? 0.0f : k % 3 == 2 ? plain * 1e-6f : plain;
            else if (kind == DATA_LARGEST)
                v = sign * ari_float32(0x7f7fffffu);
            else if (kind == DATA_SUBNORMAL)
                v = sign * ari_float32(case_random(&state) & 0x7fffffu);
            else if (kind == DATA_ONES)
                v = 0x1.fffffep-1f;
            else if (kind == DATA_ZERO)
                v = sign * 0.0f;
            else if (kind == DATA_NONFINITE && (i == 2 || k % 5 == 4))
                v = 0.0f;
            x[i * cols + k] = v;
        }
    if (kind == DATA_NONFINITE && rows > 0 && cols > 0) {
        x[cols - 1] = ari_float32(0xffc12345u); /* a NaN with a payload and a sign */
        x[(rows - 1) * cols] = rows > 2 ? INFINITY : x[(rows - 1) * cols];
    }
}

/* One row each whose products cancel in pairs: the sum is 0, and on the way to it the partial sums of positive terms
 * grow to k/2 times the largest product. The second half is in an order of its own, so that what rounding does to one
 * half is not what it does to the other. */
static inline void case_fill_cancelling(float *a, float *b, size_t k)
{
    uint64_t state = k;
    for (size_t i = 0; i < k / 2; i++) {
        /* Near the largest, but for every eighth of b, whose integer may be odd: an odd sum shows a lost bit. */
        a[i] = 1.0f - (float)((case_random(&state) >> 13) + 1) * 0x1p-24f;
        b[i] = i % 8 == 7 ? 0.25f + (float)(case_random(&state) >> 9) * 0x1p-25f
                          : 1.0f - (float)((case_random(&state) >> 13) + 1) * 0x1p-24f;
        const size_t pair = k / 2 + (i * 7 + 1234) % (k / 2);
        a[pair] = -a[i];
        b[pair] = b[i];
    }
}

static inline void *case_alloc(size_t count, size_t size)
{
    void *p = calloc(count ? count : 1, size);
    if (!p)
        abort();
    return p;
}

static inline ar_tensor case_view2(float *x, size_t rows, size_t cols)
{
    return (ar_tensor){.dtype = AR_F32, .ndim = 2, .shape = {rows, cols}, .stride = {(ptrdiff_t)cols, 1}, .data = {x}};
}

/* Exponents and integers of both operands: what a layer does before its product. */
typedef struct prepared {
    ar_packed *a, *b;
    ar_buf c, e, f;
} prepared;

static inline size_t case_batch(const ar_tensor *t)
{
    return ari_volume(t->shape, t->ndim - 2);
}

static inline ar_status prepared_create(prepared *p, ar_device *d, const ar_tensor *a, const ar_tensor *b, bool scale,
                                        bool narrow)
{
    const ar_device_ops *ops = d->ops;
    const size_t batch = case_batch(a), m = a->shape[a->ndim - 2], n = b->shape[b->ndim - 2], k = a->shape[a->ndim - 1];
    *p = (prepared){.c = {case_alloc(batch * k, 4)}, .e = {case_alloc(batch * m, 4)}, .f = {case_alloc(batch * n, 4)}};
    const ar_cbuf c = {scale ? p->c.ptr : NULL};
    const unsigned form = narrow ? AR_PACKED_NARROW : 0;
    if (scale)
        AR_TRY(ops->col_exponents(d, NULL, p->c, b, false));
    AR_TRY(ops->row_exponents(d, NULL, p->e, a, c, 1, false, narrow));
    AR_TRY(ops->row_exponents(d, NULL, p->f, b, c, -1, false, narrow));
    AR_TRY(ops->packed_create(d, NULL, &p->a, batch, m, k, AR_PACKED_LEFT | form));
    AR_TRY(ops->packed_create(d, NULL, &p->b, batch, n, k, form));
    AR_TRY(ops->pack(d, NULL, p->a, 0, 0, a, c, 1, ar_const(p->e)));
    return ops->pack(d, NULL, p->b, 0, 0, b, c, -1, ar_const(p->f));
}

static inline void prepared_destroy(prepared *p, ar_device *d)
{
    d->ops->packed_destroy(d, NULL, p->a);
    d->ops->packed_destroy(d, NULL, p->b);
    free(p->c.ptr);
    free(p->e.ptr);
    free(p->f.ptr);
}

/* y = a b^T rounded, all steps. */
static inline ar_status case_product(ar_device *d, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b,
                                     bool scale, bool narrow)
{
    prepared p;
    ar_status st = prepared_create(&p, d, a, b, scale, narrow);
    if (st == AR_OK)
        st = d->ops->gemm_round(d, NULL, y, p.a, p.b, ar_const(p.e), ar_const(p.f), (ar_cbuf){NULL}, AR_ACT_NONE, NULL,
                                NULL);
    prepared_destroy(&p, d);
    return st;
}

/* The first index at which the bits differ; n if none does. */
static inline size_t case_first_difference(const float *got, const float *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (ari_bits32(got[i]) != ari_bits32(want[i]))
            return i;
    return n;
}
