/* SPDX-License-Identifier: Apache-2.0 */
/* A linear layer without ranks, from the definitions alone: Y = X W^T + b and its gradients, in exact numbers (the
 * plain definition of a contraction, one of them per sample for dW; the plain accumulator) or in binary64. */
#pragma once

#include <float.h>

#include "ref/numerics/accumulator.h"
#include "tests/support/contraction.h"
#include "tests/support/test.h"

typedef struct plain_shape {
    size_t samples, each; /* tokens = samples * each */
    size_t in, out;
} plain_shape;

/* Full, unsharded tensors. Given: x, w, b (NULL: none), dy. Computed: the rest. */
typedef struct plain_linear {
    plain_shape n;
    const float *x, *w, *b, *dy; /* [tokens, in], [out, in], [out], [tokens, out] */
    float *y, *dx, *dw, *db;     /* [tokens, out], [tokens, in], [out, in], [out] */
} plain_linear;

static inline float *plain_new(size_t n)
{
    float *p = calloc(n ? n : 1, sizeof *p);
    cr_assert_not_null(p);
    return p;
}

/* c[m,n] = sum_k a b. Strides: of a row, of k. */
static inline void plain_contract(float *c, size_t m, size_t n, size_t k, const float *a, size_t a_row, size_t a_k,
                                  const float *b, size_t b_row, size_t b_k)
{
    cr_assert_ok(ar_contract_definition(c, m, n, k, a, (ptrdiff_t)a_row, (ptrdiff_t)a_k, b, (ptrdiff_t)b_row,
                                        (ptrdiff_t)b_k, true, false));
}

/* values [terms, n] -> sum [n] */
static inline void plain_accumulate(float *sum, const float *values, size_t terms, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint8_t t = 0;
        int64_t h = 0, l = 0;
        for (size_t k = 0; k < terms; k++)
            ari_acc_add(&t, &h, &l, values[k * n + i], false);
        sum[i] = ari_acc_value(t, h, l, false);
    }
}

/* Fills in y, dx, dw, db (allocated here; plain_linear_fini). */
static inline void plain_linear_exact(plain_linear *p)
{
    const size_t tokens = p->n.samples * p->n.each, in = p->n.in, out = p->n.out;
    OWNED(free) float *per_sample = plain_new(p->n.samples * out * in);
    p->y = plain_new(tokens * out);
    p->dx = plain_new(tokens * in);
    p->dw = plain_new(out * in);
    p->db = plain_new(out);
    plain_contract(p->y, tokens, out, in, p->x, in, 1, p->w, in, 1);
    for (size_t i = 0; p->b && i < tokens * out; i++)
        p->y[i] += p->b[i % out];
    plain_contract(p->dx, tokens, in, out, p->dy, out, 1, p->w, 1, in);
    for (size_t s = 0; s < p->n.samples; s++)
        plain_contract(per_sample + s * out * in, out, in, p->n.each, p->dy + s * p->n.each * out, 1, out,
                       p->x + s * p->n.each * in, 1, in);
    plain_accumulate(p->dw, per_sample, p->n.samples, out * in);
    plain_accumulate(p->db, p->dy, tokens, out);
}

static inline void plain_linear_fini(plain_linear *p)
{
    free(p->y);
    free(p->dx);
    free(p->dw);
    free(p->db);
}

/* A value in binary64 and the sum of its terms' magnitudes. */
typedef struct plain_sum {
    double value, magnitude;
} plain_sum;

static inline plain_sum plain_dot(size_t k, const float *a, size_t a_k, const float *b, size_t b_k)
{
    plain_sum s = {0.0, 0.0};
    for (size_t i = 0; i < k; i++) {
        const double term = (double)a[i * a_k] * (double)b[i * b_k];
        s.value += term;
        s.magnitude += term < 0.0 ? -term : term;
    }
    return s;
}

/* An fp32 sum of n products in any order is within gamma_n * sum|terms|, gamma_n = n*u/(1 - n*u), u = 2^-24 (Higham,
 * Accuracy and Stability, section 3.1). One addition more (a bias, a sum that is added to) is one more of n. */
static inline void expect_near(const char *what, float actual, plain_sum expected, size_t n)
{
    const double nu = (double)n * 0x1p-24, bound = nu / (1.0 - nu) * expected.magnitude + (double)FLT_TRUE_MIN;
    cr_assert(fabs((double)actual - expected.value) <= bound, "%s is %a, expected %a within %a", what, (double)actual,
              expected.value, bound);
}
