/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Accuracy of contractions (numerics.md, section 2): relative Frobenius error against binary64 sums of the native sgemm, of
 * the exact contraction, and of the same without step 0, on the data that tell them apart. */
#include <math.h>
#include <stdint.h>

#include "ref/cpu/blas/blas.h"
#include "ref/numerics/scalar.h"
#include "tests/support/contraction.h"
#include "tests/support/scoped.h"

typedef enum accuracy_data {
    ACCURACY_GAUSSIAN,
    ACCURACY_CHANNELS,  /* 1 % of channels x100 in A, /100 in B */
    ACCURACY_MASSIVE,   /* one activation x3000 on a weight column x1/1000 */
    ACCURACY_SINK,      /* attention: 0.9 on a value vector x1/100, a flat tail on the others */
    ACCURACY_DLOGITS,   /* softmax minus one-hot, times a Gaussian table */
    ACCURACY_TOKENS,    /* log-normal token magnitudes in both operands */
    ACCURACY_LOGNORMAL, /* every element: a sign times exp of a Gaussian */
    ACCURACY_STUDENT,   /* every element: Student's t of 3 degrees of freedom */
    ACCURACY_OUTLIERS,  /* 1 % of channels x100 in A alone */
    ACCURACY_PEAKED     /* softmax of Gaussian scores of standard deviation 4, times a Gaussian V */
} accuracy_data;

typedef struct accuracy_row {
    const char *name;
    accuracy_data data;
    size_t k;
} accuracy_row;

typedef struct accuracy_result {
    double sgemm, exact, unscaled;
    double narrow; /* of operands rounded to bf16, with integers of 15 bits, before the result is rounded to bf16 */
    double stored; /* what that rounding alone does to the right result */
} accuracy_result;

static inline double accuracy_normal(uint64_t stream, uint64_t index)
{
    return (double)ari_random_normal(stream, index, 1.0);
}

/* Gaussian over the root of a third of the sum of three squares. */
static inline double accuracy_student(double g, uint64_t stream, uint64_t index)
{
    double squares = 0.0;
    for (uint64_t i = 0; i < 3; i++) {
        const double n = accuracy_normal(stream, 3 * index + i);
        squares += n * n;
    }
    return g / sqrt(squares / 3.0);
}

static inline void accuracy_fill_softmax(float *a, size_t rows, size_t k)
{
    for (size_t i = 0; i < rows; i++) {
        double sum = 0.0;
        for (size_t j = 0; j < k; j++)
            sum += exp(4.0 * accuracy_normal(22, i * k + j));
        for (size_t j = 0; j < k; j++)
            a[i * k + j] = (float)(exp(4.0 * accuracy_normal(22, i * k + j)) / sum);
    }
}

static inline void accuracy_fill_dlogits(float *a, size_t rows, size_t k)
{
    for (size_t i = 0; i < rows; i++) {
        double sum = 0.0;
        for (size_t j = 0; j < k; j++)
            sum += exp(accuracy_normal(21, i * k + j));
        for (size_t j = 0; j < k; j++)
            a[i * k + j] = (float)(exp(accuracy_normal(21, i * k + j)) / sum - (j == i * 7 % k ? 1.0 : 0.0));
    }
}

/* One element of an operand [rows,k]; is_b tells which. */
static inline float accuracy_element(accuracy_data data, int is_b, size_t row, size_t j, size_t k)
{
    const double g = accuracy_normal(is_b ? 12 : 11, row * k + j);
    switch (data) {
    case ACCURACY_CHANNELS:
        return (float)(j % 100 == 37 ? (is_b ? g / 100.0 : g * 100.0) : g);
    case ACCURACY_MASSIVE:
        return (float)(j == 37 ? (is_b ? g / 1000.0 : g * 3000.0) : g);
    case ACCURACY_SINK:
        if (is_b)
            return (float)(j == 0 ? g / 100.0 : g);
        return (float)(j == 0 ? 0.9 : 0.1 / (double)(k - 1));
    case ACCURACY_TOKENS:
        return (float)(g * exp(accuracy_normal(is_b ? 14 : 13, j)));
    case ACCURACY_DLOGITS:
        return (float)(0.02 * g);
    case ACCURACY_LOGNORMAL:
        return (float)copysign(exp(accuracy_normal(is_b ? 16 : 15, row * k + j)), g);
    case ACCURACY_STUDENT:
        return (float)accuracy_student(g, is_b ? 18 : 17, row * k + j);
    case ACCURACY_OUTLIERS:
        return (float)(j % 100 == 37 && !is_b ? g * 100.0 : g);
    case ACCURACY_PEAKED:
    case ACCURACY_GAUSSIAN:
        break;
    }
    return (float)g;
}

static inline double accuracy_distance(const float *c, const double *want, size_t count)
{
    double off = 0.0, norm = 0.0;
    for (size_t i = 0; i < count; i++) {
        off += ((double)c[i] - want[i]) * ((double)c[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(off / norm);
}

static inline void accuracy_sums(double *want, const float *a, const float *b, size_t m, size_t k)
{
    for (size_t i = 0; i < m * m; i++) {
        want[i] = 0.0;
        for (size_t j = 0; j < k; j++)
            want[i] += (double)a[i / m * k + j] * (double)b[i % m * k + j];
    }
}

/* x[0..n) as bf16 numbers. */
static inline void accuracy_to_bf16(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = ari_f32_of_bf16(ari_bf16_of_f32(x[i]));
}

/* Those of bf16: a, b and what they made are theirs afterwards. */
static inline void accuracy_measure_narrow(accuracy_result *r, float *c, double *want, float *a, float *b, size_t m,
                                           size_t k)
{
    const ptrdiff_t stride = (ptrdiff_t)k;
    accuracy_to_bf16(a, m * k);
    accuracy_to_bf16(b, m * k);
    accuracy_sums(want, a, b, m, k);
    if (ar_contract_definition(c, m, m, k, a, stride, 1, b, stride, 1, true, true) == AR_OK)
        r->narrow = accuracy_distance(c, want, m * m);
    for (size_t i = 0; i < m * m; i++)
        c[i] = ari_f32_of_bf16(ari_bf16_of_f32((float)want[i]));
    r->stored = accuracy_distance(c, want, m * m);
}

/** Measures one row of the table on m x m results; NaN on a failure. */
static inline accuracy_result accuracy_measure(const accuracy_row *row, size_t m)
{
    const size_t k = row->k;
    const ptrdiff_t stride = (ptrdiff_t)k;
    accuracy_result r = {(double)NAN, (double)NAN, (double)NAN, (double)NAN, (double)NAN};
    OWNED(free) float *a = malloc(m * k * sizeof *a);
    OWNED(free) float *b = malloc(m * k * sizeof *b);
    OWNED(free) float *c = malloc(m * m * sizeof *c);
    OWNED(free) double *want = malloc(m * m * sizeof *want);
    if (a == NULL || b == NULL || c == NULL || want == NULL)
        return r;
    for (size_t i = 0; i < m * k; i++) {
        a[i] = accuracy_element(row->data, 0, i / k, i % k, k);
        b[i] = accuracy_element(row->data, 1, i / k, i % k, k);
    }
    if (row->data == ACCURACY_DLOGITS)
        accuracy_fill_dlogits(a, m, k);
    if (row->data == ACCURACY_PEAKED)
        accuracy_fill_softmax(a, m, k);
    accuracy_sums(want, a, b, m, k);
    ari_blas_sgemm(c, (ari_blas_view){m, m, (ptrdiff_t)m, 1}, a, (ari_blas_view){m, k, stride, 1}, b,
                   (ari_blas_view){k, m, 1, stride}, false);
    r.sgemm = accuracy_distance(c, want, m * m);
    if (ar_contract_definition(c, m, m, k, a, stride, 1, b, stride, 1, true, false) == AR_OK)
        r.exact = accuracy_distance(c, want, m * m);
    if (ar_contract_definition(c, m, m, k, a, stride, 1, b, stride, 1, false, false) == AR_OK)
        r.unscaled = accuracy_distance(c, want, m * m);
    accuracy_measure_narrow(&r, c, want, a, b, m, k);
    return r;
}
