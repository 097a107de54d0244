/* SPDX-License-Identifier: Apache-2.0 */
/* The column- and row-parallel layers against a linear layer without ranks. Exact numbers: equal bits on every rank.
 * Native numbers: within the rounding error bound of fp32 sums. */
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/layers.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

TestSuite(linear, .timeout = 120);

enum { MOST_RANKS = 4 };
typedef enum style { COLUMN, ROW } style;

typedef struct linear_case {
    style style;
    bool flag; /* column: gather_output, row: input_is_sharded */
    int ndim;  /* of X: 2 makes the tokens one sample */
    int ranks;
    ar_numerics numerics;
} linear_case;

/* One rank's tensors, in the shapes it holds. */
typedef struct rank_result {
    size_t x_at, x_width, y_at, y_width; /* features of X, dX and of Y, dY that this rank has */
    float *y, *dx, *dw, *db;
    size_t dw_rows, dw_cols, dw_row_at, dw_col_at, db_n, db_at;
} rank_result;

typedef struct linear_job {
    linear_case c;
    const plain_linear *full;
    rank_result rank[MOST_RANKS];
} linear_job;

static float *columns_of(const float *full, size_t rows, size_t cols, size_t at, size_t width)
{
    float *part = malloc((rows * width + 1) * sizeof *part);
    for (size_t i = 0; part && i < rows; i++)
        memcpy(part + i * width, full + i * cols + at, width * sizeof *part);
    return part;
}

/* What each rank should hold: the conventions of docs/parallelism.md, section 2. */
static void set_parts(rank_result *r, const linear_job *j, size_t rank)
{
    const size_t n = (size_t)j->c.ranks, in = j->full->n.in, out = j->full->n.out;
    const bool column = j->c.style == COLUMN;
    const bool y_sharded = column && !j->c.flag, x_sharded = !column && j->c.flag;
    r->x_width = x_sharded ? in / n : in;
    r->x_at = x_sharded ? rank * r->x_width : 0;
    r->y_width = y_sharded ? out / n : out;
    r->y_at = y_sharded ? rank * r->y_width : 0;
    r->dw_rows = column ? out / n : out;
    r->dw_row_at = column ? rank * r->dw_rows : 0;
    r->dw_cols = column ? in : in / n;
    r->dw_col_at = column ? 0 : rank * r->dw_cols;
    r->db_n = r->dw_rows;
    r->db_at = r->dw_row_at;
}

static ar_status download_gradient(ar_ctx *ctx, float **to, const ar_param *p)
{
    ar_tensor g;
    *to = malloc((ar_tensor_count(&p->value) + 1) * sizeof **to);
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ar_ctx_arith(ctx)->grad_value(ctx, &g, p));
    return *to ? ar_ctx_download(ctx, *to, &g) : AR_ERR_MEMORY;
}

static ar_status forward_backward(ar_ctx *ctx, linear_job *j, ar_module *m, ar_saved *saved)
{
    const plain_linear *f = j->full;
    rank_result *r = &j->rank[rank_of(ctx)];
    const size_t tokens = f->n.samples * f->n.each;
    size_t shape[3] = {f->n.samples, f->n.each, r->x_width};
    ar_param *p[2] = {NULL, NULL};
    ar_tensor x, y, dx, dy;
    const size_t params = ar_module_params(m, p, 2, true);
    AR_TRY(ar_param_set(p[0], ctx, f->w));
    if (params > 1)
        AR_TRY(ar_param_set(p[1], ctx, f->b));
    float *part = columns_of(f->x, tokens, f->n.in, r->x_at, r->x_width);
    ar_status st = rank_upload(ctx, &x, j->c.ndim, j->c.ndim == 3 ? shape : shape + 1, part);
    free(part);
    AR_TRY(st);
    shape[2] = r->y_width;
    part = columns_of(f->dy, tokens, f->n.out, r->y_at, r->y_width);
    st = rank_upload(ctx, &dy, j->c.ndim, j->c.ndim == 3 ? shape : shape + 1, part);
    free(part);
    AR_TRY(st);
    AR_TRY(ar_module_forward(m, ctx, saved, &y, &x, NULL));
    AR_TRY(ar_module_backward(m, ctx, saved, &dx, &dy, NULL));
    if (y.shape[y.ndim - 1] != r->y_width || dx.shape[dx.ndim - 1] != r->x_width || y.ndim != j->c.ndim)
        return ar_error_set(AR_ERR_SHAPE, "Y has %zu features, dX %zu", y.shape[y.ndim - 1], dx.shape[dx.ndim - 1]);
    r->y = malloc((tokens * r->y_width + 1) * sizeof(float));
    r->dx = malloc((tokens * r->x_width + 1) * sizeof(float));
    AR_TRY(ar_ctx_download(ctx, r->y, &y));
    AR_TRY(ar_ctx_download(ctx, r->dx, &dx));
    AR_TRY(download_gradient(ctx, &r->dw, p[0]));
    return params > 1 ? download_gradient(ctx, &r->db, p[1]) : AR_OK;
}

static ar_status linear_rank(ar_ctx *ctx, void *user)
{
    linear_job *j = user;
    const plain_linear *f = j->full;
    const ar_linear_options o = {.bias = f->b, .gather_output = j->c.flag, .input_is_sharded = j->c.flag};
    ar_module *m = NULL;
    ar_saved *saved = NULL;
    ar_status st = AR_OK;
    set_parts(&j->rank[rank_of(ctx)], j, rank_of(ctx));
    AR_TRY_TO(done, st, ar_saved_create(&saved));
    if (j->c.style == COLUMN)
        AR_TRY_TO(done, st, ar_column_linear_create(&m, ctx, "l", f->n.in, f->n.out, &o));
    else
        AR_TRY_TO(done, st, ar_row_linear_create(&m, ctx, "l", f->n.in, f->n.out, &o));
    AR_TRY_TO(done, st, forward_backward(ctx, j, m, saved));
done:
    ar_module_destroy(m);
    ar_saved_destroy(saved);
    return st;
}

static void run_linear(linear_job *j)
{
    const rank_run_options o = {.ranks = j->c.ranks, .numerics = j->c.numerics};
    cr_assert_eq(rank_run(&o, linear_rank, j), AR_OK, "%d ranks: %s", j->c.ranks, ar_error_message());
}

static void linear_job_fini(linear_job *j)
{
    for (int r = 0; r < j->c.ranks; r++) {
        free(j->rank[r].y);
        free(j->rank[r].dx);
        free(j->rank[r].dw);
        free(j->rank[r].db);
    }
}

/* Given tensors of a layer with 24 inputs and 20 outputs, whose rows and columns vary in magnitude. */
static plain_linear given(size_t samples, size_t each, bool bias)
{
    enum { IN = 24, OUT = 20, MOST_TOKENS = 20 };
    static float x[MOST_TOKENS * IN], w[OUT * IN], b[OUT], dy[MOST_TOKENS * OUT];
    fill_values(x, MOST_TOKENS * IN, 1, 1.0);
    fill_values(w, OUT * IN, 2, 0.5);
    fill_values(b, OUT, 3, 0.25);
    fill_values(dy, MOST_TOKENS * OUT, 4, 0.125);
    for (size_t i = 0; i < MOST_TOKENS * IN; i++)
        x[i] = ldexpf(x[i], (int)(i % 7) * (i % 5 == 0 ? 4 : -2));
    for (size_t i = 0; i < MOST_TOKENS * OUT; i++)
        dy[i] = i % 11 == 0 ? 0.0f : ldexpf(dy[i], -(int)(i % 9));
    return (plain_linear){.n = {samples, each, IN, OUT}, .x = x, .w = w, .b = bias ? b : NULL, .dy = dy};
}

/* --- exact numbers
 * --------------------------------------------------------------------------------------------------------- */

static void expect_part(const char *what, int rank, const float *actual, const float *full, size_t rows, size_t cols,
                        size_t at, size_t width)
{
    float *expected = columns_of(full, rows, cols, at, width);
    cr_assert_not_null(expected);
    cr_assert_eq(first_different_bits(actual, expected, rows * width), rows * width, "rank %d: %s differs", rank, what);
    free(expected);
}

static void expect_plain_bits(const linear_job *j)
{
    const plain_linear *f = j->full;
    const size_t tokens = f->n.samples * f->n.each;
    for (int k = 0; k < j->c.ranks; k++) {
        const rank_result *r = &j->rank[k];
        expect_part("Y", k, r->y, f->y, tokens, f->n.out, r->y_at, r->y_width);
        expect_part("dX", k, r->dx, f->dx, tokens, f->n.in, r->x_at, r->x_width);
        expect_part("dW", k, r->dw, f->dw + r->dw_row_at * f->n.in, r->dw_rows, f->n.in, r->dw_col_at, r->dw_cols);
        if (f->b)
            expect_part("db", k, r->db, f->db + r->db_at, 1, r->db_n, 0, r->db_n);
    }
}

/* bias x batch 1, 2, 5 x tp 1, 2, 4. */
static void sweep(style layer, bool flag, int ndim)
{
    static const size_t batches[] = {1, 2, 5};
    for (size_t i = 0; i < 3; i++) {
        for (int bias = 0; bias < 2; bias++) {
            plain_linear f = ndim == 3 ? given(batches[i], 4, bias) : given(1, batches[i], bias);
            plain_linear_exact(&f);
            for (int ranks = 1; ranks <= 4; ranks *= 2) {
                linear_job j = {.c = {layer, flag, ndim, ranks, AR_NUMERICS_EXACT}, .full = &f};
                run_linear(&j);
                expect_plain_bits(&j);
                linear_job_fini(&j);
            }
            plain_linear_fini(&f);
        }
    }
}

Test(linear, column_with_sharded_output_has_the_plain_layers_bits)
{
    sweep(COLUMN, false, 2);
    sweep(COLUMN, false, 3);
}

Test(linear, column_with_gathered_output_has_the_plain_layers_bits)
{
    sweep(COLUMN, true, 2);
    sweep(COLUMN, true, 3);
}

Test(linear, row_with_replicated_input_has_the_plain_layers_bits)
{
    sweep(ROW, false, 2);
    sweep(ROW, false, 3);
}

Test(linear, row_with_sharded_input_has_the_plain_layers_bits)
{
    sweep(ROW, true, 2);
    sweep(ROW, true, 3);
}

/* A 2-D input is one sample, a 3-D one as many as its first extent: dW is rounded once per sample, so the same tokens
 * in other samples may give other bits. The layer must not confuse the two. */
Test(linear, samples_are_the_first_extent_of_a_3d_input_only)
{
    plain_linear one = given(1, 20, false), five = given(5, 4, false);
    plain_linear_exact(&one);
    plain_linear_exact(&five);
    cr_assert_eq(memcmp(one.y, five.y, 20 * 20 * sizeof(float)), 0);
    cr_assert_neq(memcmp(one.dw, five.dw, 20 * 24 * sizeof(float)), 0, "this data does not tell them apart");
    plain_linear_fini(&one);
    plain_linear_fini(&five);
}

/* --- native numbers
 * -------------------------------------------------------------------------------------------------------- */

/* An fp32 sum of n products in any order is within gamma_n * sum|terms|, gamma_n = n*u/(1 - n*u), u = 2^-24 (Higham,
 * Accuracy and Stability, section 3.1). One addition more (a bias, a sum that is added to) is one more of n. */
static void expect_near(const char *what, float actual, plain_sum expected, size_t n)
{
    const double nu = (double)n * 0x1p-24, bound = nu / (1.0 - nu) * expected.magnitude + (double)FLT_TRUE_MIN;
    cr_assert(fabs((double)actual - expected.value) <= bound, "%s is %a, expected %a within %a", what, (double)actual,
              expected.value, bound);
}

static void expect_within_bounds(const linear_job *j)
{
    const plain_linear *f = j->full;
    const size_t in = f->n.in, out = f->n.out, tokens = f->n.samples * f->n.each;
    for (int k = 0; k < j->c.ranks; k++) {
        const rank_result *r = &j->rank[k];
        for (size_t i = 0; i < tokens * r->y_width; i++) {
            const size_t t = i / r->y_width, o = r->y_at + i % r->y_width;
            plain_sum s = plain_dot(in, f->x + t * in, 1, f->w + o * in, 1);
            s.value += f->b ? (double)f->b[o] : 0.0;
            s.magnitude += f->b ? fabs((double)f->b[o]) : 0.0;
            expect_near("Y", r->y[i], s, in + 1);
        }
        for (size_t i = 0; i < tokens * r->x_width; i++)
            expect_near("dX", r->dx[i],
                        plain_dot(out, f->dy + i / r->x_width * out, 1, f->w + r->x_at + i % r->x_width, in), out);
        for (size_t i = 0; i < r->dw_rows * r->dw_cols; i++)
            expect_near(
                "dW", r->dw[i],
                plain_dot(tokens, f->dy + r->dw_row_at + i / r->dw_cols, out, f->x + r->dw_col_at + i % r->dw_cols, in),
                tokens + 1);
        const float one = 1.0f;
        for (size_t i = 0; f->b && i < r->db_n; i++)
            expect_near("db", r->db[i], plain_dot(tokens, f->dy + r->db_at + i, out, &one, 0), tokens);
    }
}

Test(linear, native_layers_stay_within_the_rounding_error_bound)
{
    for (int variant = 0; variant < 8; variant++) {
        const int ndim = variant & 4 ? 3 : 2;
        plain_linear f = ndim == 3 ? given(5, 4, true) : given(1, 5, variant & 1);
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            linear_job j = {.c = {variant & 1 ? ROW : COLUMN, variant & 2, ndim, ranks, AR_NUMERICS_NATIVE},
                            .full = &f};
            run_linear(&j);
            expect_within_bounds(&j);
            linear_job_fini(&j);
        }
    }
}

/* --- worked examples
 * --------------------------------------------------------------------------------------------------------- */

/* One token, one input feature: column r of dW and db are dY's own block. */
Test(linear, gathered_output_takes_the_own_block_of_dy)
{
    const float x[1] = {1.0f}, w[8] = {0}, b[8] = {0}, dy[8] = {10, 11, 12, 13, 14, 15, 16, 17};
    const plain_linear f = {.n = {1, 1, 1, 8}, .x = x, .w = w, .b = b, .dy = dy};
    linear_job j = {.c = {COLUMN, true, 3, 4, AR_NUMERICS_EXACT}, .full = &f};
    run_linear(&j);
    const float expected[2] = {14, 15}; /* rank 2 of 4, 8 outputs: dY[:, 4:6] */
    cr_assert_eq(j.rank[2].db_n, 2);
    cr_assert_eq(first_different_bits(j.rank[2].dw, expected, 2), 2);
    cr_assert_eq(first_different_bits(j.rank[2].db, expected, 2), 2);
    linear_job_fini(&j);
}

Test(linear, bias_gradient_of_three_ones_is_three)
{
    const float x[3] = {1, 2, 3}, w[2] = {1, 1}, b[2] = {0}, dy[6] = {1, 1, 1, 1, 1, 1};
    const plain_linear f = {.n = {3, 1, 1, 2}, .x = x, .w = w, .b = b, .dy = dy};
    for (int ndim = 2; ndim <= 3; ndim++) {
        plain_linear g = f;
        g.n = ndim == 3 ? f.n : (plain_shape){1, 3, 1, 2};
        linear_job j = {.c = {COLUMN, true, ndim, 1, AR_NUMERICS_EXACT}, .full = &g};
        run_linear(&j);
        const float expected[2] = {3, 3};
        cr_assert_eq(first_different_bits(j.rank[0].db, expected, 2), 2);
        linear_job_fini(&j);
    }
}

typedef struct shapes {
    size_t w[2][2], y[2][3]; /* [rank] */
} shapes;

static ar_status shapes_of(ar_ctx *ctx, shapes *s, ar_module *m, size_t width)
{
    const size_t r = rank_of(ctx), shape[3] = {4, 512, width};
    ar_param *p = NULL;
    ar_tensor x, y;
    ar_module_params(m, &p, 1, true);
    AR_TRY(ar_module_fresh(m, ctx, 1));
    float *zeros = calloc(4 * 512 * width, sizeof *zeros);
    const ar_status st = zeros ? rank_upload(ctx, &x, 3, shape, zeros) : AR_ERR_MEMORY;
    free(zeros);
    AR_TRY(st);
    AR_TRY(ar_module_forward(m, ctx, NULL, &y, &x, NULL));
    memcpy(s->w[r], p->value.shape, sizeof s->w[r]);
    memcpy(s->y[r], y.shape, sizeof s->y[r]);
    return AR_OK;
}

static ar_status column_shapes(ar_ctx *ctx, void *user)
{
    const ar_linear_options o = {.bias = true};
    ar_module *m = NULL;
    AR_TRY(ar_column_linear_create(&m, ctx, "l", 768, 2048, &o));
    const ar_status st = shapes_of(ctx, user, m, 768);
    ar_module_destroy(m);
    return st;
}

static ar_status row_shapes(ar_ctx *ctx, void *user)
{
    const ar_linear_options o = {.bias = true, .input_is_sharded = true};
    ar_module *m = NULL;
    AR_TRY(ar_row_linear_create(&m, ctx, "l", 2048, 512, &o));
    const ar_status st = shapes_of(ctx, user, m, 1024);
    ar_module_destroy(m);
    return st;
}

Test(linear, column_of_768_to_2048_over_two_ranks_has_shards_of_1024)
{
    shapes s = {0};
    const rank_run_options o = {.ranks = 2, .numerics = AR_NUMERICS_NATIVE}; /* shapes do not depend on the numerics */
    cr_assert_eq(rank_run(&o, column_shapes, &s), AR_OK, "%s", ar_error_message());
    const size_t w[2] = {1024, 768}, y[3] = {4, 512, 1024};
    for (int r = 0; r < 2; r++) {
        cr_assert_arr_eq(s.w[r], w, sizeof w);
        cr_assert_arr_eq(s.y[r], y, sizeof y);
    }
}

Test(linear, row_of_2048_to_512_over_two_ranks_has_shards_of_1024)
{
    shapes s = {0};
    const rank_run_options o = {.ranks = 2, .numerics = AR_NUMERICS_NATIVE};
    cr_assert_eq(rank_run(&o, row_shapes, &s), AR_OK, "%s", ar_error_message());
    const size_t w[2] = {512, 1024}, y[3] = {4, 512, 512};
    for (int r = 0; r < 2; r++) {
        cr_assert_arr_eq(s.w[r], w, sizeof w);
        cr_assert_arr_eq(s.y[r], y, sizeof y);
    }
}
