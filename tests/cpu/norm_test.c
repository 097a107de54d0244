/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/row_support.h"

static const double eps = 1e-5;

/* One row of h values, everything the formulas of numerics.md name. */
typedef struct plain_norm {
    double mean;
    float rstd;
    float *d, *xhat, *y, *dx, *dgamma; /* [h] */
    double *terms;                     /* [h] */
} plain_norm;

static plain_norm plain_new(size_t h)
{
    plain_norm p = {.d = calloc(h, 4), .xhat = calloc(h, 4), .y = calloc(h, 4), .dx = calloc(h, 4)};
    p.dgamma = calloc(h, 4);
    p.terms = calloc(h, 8);
    return p;
}

static void plain_free(plain_norm *p)
{
    free(p->d), free(p->xhat), free(p->y), free(p->dx), free(p->dgamma), free(p->terms);
}

static void plain_forward(plain_norm *p, ar_norm_kind kind, const float *x, const float *gamma, const float *beta,
                          size_t h)
{
    for (size_t j = 0; j < h; j++)
        p->terms[j] = (double)x[j];
    p->mean = kind == AR_NORM_LAYER ? plain_row_sum(p->terms, h) / (double)h : 0.0;
    for (size_t j = 0; j < h; j++) {
        p->d[j] = kind == AR_NORM_LAYER ? (float)((double)x[j] - p->mean) : x[j];
        p->terms[j] = (double)p->d[j] * (double)p->d[j];
    }
    p->rstd = stored((float)(1.0 / sqrt(plain_row_sum(p->terms, h) / (double)h + eps)));
    for (size_t j = 0; j < h; j++) {
        p->xhat[j] = p->d[j] * p->rstd;
        const float scaled = p->xhat[j] * gamma[j];
        p->y[j] = stored(kind == AR_NORM_LAYER ? scaled + beta[j] : scaled);
    }
}

static void plain_backward(plain_norm *p, ar_norm_kind kind, const float *dy, const float *gamma, size_t h)
{
    OWNED(free) float *g = calloc(h, sizeof *g);
    for (size_t j = 0; j < h; j++) {
        g[j] = dy[j] * gamma[j];
        p->terms[j] = (double)g[j];
    }
    const double a = plain_row_sum(p->terms, h) / (double)h;
    for (size_t j = 0; j < h; j++)
        p->terms[j] = (double)g[j] * (double)p->xhat[j];
    const double b = plain_row_sum(p->terms, h) / (double)h;
    for (size_t j = 0; j < h; j++) {
        const double inner = kind == AR_NORM_LAYER ? (double)g[j] - a : (double)g[j];
        p->dx[j] = stored((float)((inner - (double)p->xhat[j] * b) * (double)p->rstd));
        p->dgamma[j] = stored(dy[j] * p->xhat[j]);
    }
}

typedef struct norm_case {
    ar_norm_kind kind;
    size_t h;
    enum values values;
    int threads;
    bool exact; /* the sums of the parameters' gradients */
} norm_case;

static void check_rows(const norm_case *c, const float *x, const float *gamma, const float *beta, const float *dy,
                       const float *residual)
{
    const size_t h = c->h, n = ROWS * h;
    ar_device d = test_device(c->threads);
    OWNED(free) float *y = new_copy(x, n), *rstd = new_copy(x, ROWS), *dx = new_copy(x, n), *sum = new_copy(x, n);
    SCOPED(plain_sum_free) plain_sum dgamma = plain_sum_new(h, c->exact), expected_dgamma = plain_sum_copy(&dgamma);
    SCOPED(plain_sum_free) plain_sum dbeta = plain_sum_new(h, c->exact), expected_dbeta = plain_sum_copy(&dbeta);
    OWNED(free) double *mean = calloc(ROWS, sizeof *mean);
    const ar_cbuf shift = cbuf(c->kind == AR_NORM_LAYER ? beta : NULL);
    const ar_tensor tx = view2((float *)(uintptr_t)x, ROWS, h, h), tdy = view2((float *)(uintptr_t)dy, ROWS, h, h);
    const ar_tensor tdx = view2(dx, ROWS, h, h), tsum = view2(sum, ROWS, h, h);
    const ar_tensor beside = view2((float *)(uintptr_t)residual, ROWS, h, h);
    SCOPED(plain_free) plain_norm p = plain_new(h);
    assert_ok(ari_cpu_norm_forward(&d, NULL, c->kind, rows_of(y, ROWS, h), buf(mean), buf(rstd), rows_of(x, ROWS, h),
                                   cbuf(gamma), shift, eps));
    assert_ok(ari_cpu_norm_backward(&d, NULL, c->kind, &tdx, &tsum, &tdy, &tx, cbuf(mean), cbuf(rstd), cbuf(gamma),
                                    &beside, &dgamma.at, &dbeta.at));
    for (size_t i = 0; i < ROWS; i++) {
        plain_forward(&p, c->kind, x + i * h, gamma, beta, h);
        plain_backward(&p, c->kind, dy + i * h, gamma, h);
        assert_bits(y + i * h, p.y, h, "y");
        assert_bits(&rstd[i], &p.rstd, 1, "rstd");
        cr_assert(c->kind == AR_NORM_RMS || isnan(p.mean) || memcmp(&mean[i], &p.mean, 8) == 0, "mean of row %zu", i);
        assert_bits(dx + i * h, p.dx, h, "dx");
        for (size_t j = 0; j < h; j++) {
            plain_add(&expected_dgamma, j, p.dgamma[j]);
            plain_add(&expected_dbeta, j, dy[i * h + j]);
        }
        for (size_t j = 0; j < h; j++)
            p.y[j] = stored(residual[i * h + j] + p.dx[j]);
        assert_bits(sum + i * h, p.y, h, "residual + dx");
    }
    assert_sum(&dgamma, &expected_dgamma, "dgamma");
    assert_sum(&dbeta, &expected_dbeta, "dbeta");
}

static void check_case(const norm_case *c)
{
    const size_t n = ROWS * c->h;
    float *x = new_values(n, c->values, 1), *gamma = new_values(c->h, ORDINARY, 2),
          *beta = new_values(c->h, ORDINARY, 3);
    float *dy = new_values(n, c->values, 4), *residual = new_values(n, c->values, 5);
    check_rows(c, x, gamma, beta, dy, residual);
    free(x), free(gamma), free(beta), free(dy), free(residual);
}

Test(norm, forward_and_backward_match_the_formulas)
{
    for (int kind = AR_NORM_LAYER; kind <= AR_NORM_RMS; kind++)
        for (size_t i = 0; i < ROW_LENGTHS; i++)
            for (int values = 0; values < VALUE_KINDS; values++)
                for (int way = 0; way < 4; way++) {
                    const norm_case c = {(ar_norm_kind)kind, row_lengths[i], (enum values)values, 1 + way / 2, way % 2};
                    check_case(&c);
                }
}

/* (1 + 2^-23)(1 - 2^-23) is below 1 and rounds to it: the sum's step is that of numbers below 1. It shows in dx[1], for
 * which dy[1] is nearly xhat[1] times the sum's mean. */
Test(norm, the_step_of_a_row_is_that_of_its_largest_product_and_not_of_what_it_rounds_to)
{
    enum { h = 16 };
    const norm_case c = {AR_NORM_RMS, h, ORDINARY, 1, false};
    float *x = new_values(ROWS * h, ORDINARY, 1), *dy = new_values(ROWS * h, ORDINARY, 2), gamma[h];
    SCOPED(plain_free) plain_norm p = plain_new(h);
    for (size_t j = 0; j < h; j++)
        gamma[j] = 1.0f;
    for (float *row = x, *g = dy; row < x + ROWS * h; row += h, g += h) {
        double small = 0.0;
        for (size_t j = 0; j < h; j++)
            row[j] = j % 2 ? 0.9f : -0.9f;
        for (int i = 0; i < 20; i++) { /* ends where xhat[0] is that number */
            plain_forward(&p, AR_NORM_RMS, row, gamma, gamma, h);
            row[0] = 0x1.fffffcp-1f / p.rstd;
        }
        for (size_t j = 2; j < h; j++)
            small += (double)p.xhat[j] * (double)(g[j] *= 0x1p-18f);
        g[0] = 1.0f + 0x1p-23f;
        g[1] = (float)((double)p.xhat[1] * (1.0 + small) / (h - (double)p.xhat[1] * (double)p.xhat[1]));
        cr_assert(p.xhat[0] == 0x1.fffffcp-1f && g[0] * p.xhat[0] == 1.0f);
    }
    check_rows(&c, x, gamma, gamma, dy, x);
    free(x), free(dy);
}

/* Threads that shared scratch would differ only when they run at the same moment: many runs, more threads than
 * cores. */
Test(norm, backward_gives_the_same_bits_on_every_run_with_four_threads)
{
    ar_device one = test_device(1), four = test_device(4);
    const size_t h = 1025, n = ROWS * h;
    OWNED(free) float *x = new_values(n, ORDINARY, 15), *dy = new_values(n, ORDINARY, 16);
    OWNED(free) float *gamma = new_values(h, ORDINARY, 17);
    OWNED(free) float *rstd = new_values(ROWS, ORDINARY, 18), *dx = new_copy(x, n), *again = new_copy(x, n);
    OWNED(free) double *mean = calloc(ROWS, sizeof *mean);
    const ar_tensor tx = view2(x, ROWS, h, h), tdy = view2(dy, ROWS, h, h);
    const ar_tensor first = view2(dx, ROWS, h, h), other = view2(again, ROWS, h, h);
    SCOPED(plain_sum_free) plain_sum sum = plain_sum_new(h, false), start = plain_sum_copy(&sum);
    assert_ok(ari_cpu_norm_backward(&one, NULL, AR_NORM_LAYER, &first, NULL, &tdy, &tx, cbuf(mean), cbuf(rstd),
                                    cbuf(gamma), NULL, &sum.at, &unsummed));
    for (int run = 0; run < 100; run++) {
        SCOPED(plain_sum_free) plain_sum same = plain_sum_copy(&start);
        assert_ok(ari_cpu_norm_backward(&four, NULL, AR_NORM_LAYER, &other, NULL, &tdy, &tx, cbuf(mean), cbuf(rstd),
                                        cbuf(gamma), NULL, &same.at, &unsummed));
        assert_bits(again, dx, n, "dx on four threads");
        assert_sum(&same, &sum, "dgamma on four threads");
    }
}

Test(norm, rows_longer_than_2_to_the_22_use_fewer_bits)
{
    const size_t h = ((size_t)1 << 22) + 5; /* P' = 39 */
    ar_device d = test_device(1);
    float *x = new_values(h, ORDINARY, 6), *y = new_copy(x, h), *ones = new_copy(x, h), rstd = 0.0f;
    double mean = 0.0;
    for (size_t j = 0; j < h; j++)
        ones[j] = 1.0f;
    SCOPED(plain_free) plain_norm p = plain_new(h);
    plain_forward(&p, AR_NORM_LAYER, x, ones, ones, h);
    assert_ok(ari_cpu_norm_forward(&d, NULL, AR_NORM_LAYER, rows_of(y, 1, h), buf(&mean), buf(&rstd), rows_of(x, 1, h),
                                   cbuf(ones), cbuf(ones), eps));
    cr_assert(memcmp(&mean, &p.mean, 8) == 0, "mean %a, expected %a", mean, p.mean);
    assert_bits(&rstd, &p.rstd, 1, "rstd");
    assert_bits(y, p.y, h, "y");
    free(x), free(y), free(ones);
}

Test(norm, of_constant_rows_without_eps_is_nan_and_of_zero_rows_with_eps_is_beta)
{
    ar_device d = test_device(1);
    const float x[] = {0, 0, -0.0f, 0}, gamma[] = {1, 2, 3, 4}, beta[] = {1, -2, 3, 0};
    float y[4], rstd = 0.0f;
    double mean = 1.0;
    assert_ok(ari_cpu_norm_forward(&d, NULL, AR_NORM_LAYER, rows_of(y, 1, 4), buf(&mean), buf(&rstd), rows_of(x, 1, 4),
                                   cbuf(gamma), cbuf(beta), eps));
    assert_bits(y, beta, 4, "a zero row");
    assert_ok(ari_cpu_norm_forward(&d, NULL, AR_NORM_LAYER, rows_of(y, 1, 4), buf(&mean), buf(&rstd), rows_of(x, 1, 4),
                                   cbuf(gamma), cbuf(beta), 0.0));
    const uint32_t nan[] = {0x7fc00000u, 0x7fc00000u, 0x7fc00000u, 0x7fc00000u}; /* x86 gives 0 * inf a sign bit */
    assert_bits(y, nan, 4, "LayerNorm, 0 * (1/sqrt(0))");
    assert_ok(ari_cpu_norm_forward(&d, NULL, AR_NORM_RMS, rows_of(y, 1, 4), buf(NULL), buf(&rstd), rows_of(x, 1, 4),
                                   cbuf(gamma), cbuf(NULL), 0.0));
    assert_bits(y, nan, 4, "RMSNorm, 0 * (1/sqrt(0))");
}

Test(norm, forward_in_place_and_in_parts_of_the_rows_gives_the_same_bits)
{
    ar_device d = test_device(2);
    const size_t h = 257, n = ROWS * h, part = 13;
    for (int kind = AR_NORM_LAYER; kind <= AR_NORM_RMS; kind++) {
        OWNED(free) float *x = new_values(n, ORDINARY, 9), *y = new_copy(x, n), *gamma = new_values(h, ORDINARY, 10);
        OWNED(free) float *rstd = new_copy(x, ROWS);
        OWNED(free) double *mean = calloc(ROWS, sizeof *mean);
        assert_ok(ari_cpu_norm_forward(&d, NULL, (ar_norm_kind)kind, rows_of(y, ROWS, h), buf(mean), buf(rstd),
                                       rows_of(x, ROWS, h), cbuf(gamma), cbuf(gamma), eps));
        for (size_t from = 0; from < ROWS; from += part) {
            const size_t rows = from + part < ROWS ? part : ROWS - from;
            assert_ok(ari_cpu_norm_forward(&d, NULL, (ar_norm_kind)kind, rows_of(x + from * h, rows, h), buf(mean),
                                           buf(rstd), rows_of(x + from * h, rows, h), cbuf(gamma), cbuf(gamma), eps));
        }
        assert_bits(x, y, n, "y, in x's place and in parts");
    }
}

/* dx in the place of dy, and sum in the place of the residual; then dx in the place of x and no sums. */
static void check_backward_in_place(ar_norm_kind kind, bool exact)
{
    ar_device d = test_device(2);
    const size_t h = 257, n = ROWS * h;
    OWNED(free) float *x = new_values(n, ORDINARY, 11), *dy = new_values(n, ORDINARY, 12);
    OWNED(free) float *gamma = new_values(h, ORDINARY, 13);
    OWNED(free) float *residual = new_values(n, ORDINARY, 14), *rstd = new_copy(x, ROWS), *dx = new_copy(x, n);
    OWNED(free) float *sum = new_copy(x, n), *dx2 = new_copy(dy, n), *sum2 = new_copy(residual, n);
    const ar_tensor tx = view2(x, ROWS, h, h), tdy = view2(dy, ROWS, h, h), beside = view2(residual, ROWS, h, h);
    const ar_tensor tdx = view2(dx, ROWS, h, h), tsum = view2(sum, ROWS, h, h);
    const ar_tensor tdx2 = view2(dx2, ROWS, h, h), tsum2 = view2(sum2, ROWS, h, h);
    SCOPED(plain_sum_free) plain_sum gain = plain_sum_new(h, exact), shift = plain_sum_copy(&gain);
    SCOPED(plain_sum_free) plain_sum gain2 = plain_sum_copy(&gain), shift2 = plain_sum_copy(&gain);
    OWNED(free) double *mean = calloc(ROWS, sizeof *mean);
    assert_ok(ari_cpu_norm_forward(&d, NULL, kind, rows_of(dx, ROWS, h), buf(mean), buf(rstd), rows_of(x, ROWS, h),
                                   cbuf(gamma), cbuf(gamma), eps));
    assert_ok(ari_cpu_norm_backward(&d, NULL, kind, &tdx, &tsum, &tdy, &tx, cbuf(mean), cbuf(rstd), cbuf(gamma),
                                    &beside, &gain.at, &shift.at));
    assert_ok(ari_cpu_norm_backward(&d, NULL, kind, &tdx2, &tsum2, &tdx2, &tx, cbuf(mean), cbuf(rstd), cbuf(gamma),
                                    &tsum2, &gain2.at, &shift2.at));
    assert_bits(dx2, dx, n, "dx in dy's place");
    assert_bits(sum2, sum, n, "the sum in the residual's place");
    assert_sum(&gain2, &gain, "dgamma beside it");
    assert_sum(&shift2, &shift, "dbeta of a dy that is lost");
    assert_ok(ari_cpu_norm_backward(&d, NULL, kind, &tx, NULL, &tdy, &tx, cbuf(mean), cbuf(rstd), cbuf(gamma), NULL,
                                    &unsummed, &unsummed));
    assert_bits(x, dx, n, "dx in x's place, alone");
}

Test(norm, backward_in_place_gives_the_same_bits)
{
    for (int exact = 0; exact < 2; exact++) {
        check_backward_in_place(AR_NORM_LAYER, exact);
        check_backward_in_place(AR_NORM_RMS, exact);
    }
}
