/* SPDX-License-Identifier: Apache-2.0 */
/* One linear layer forward and backward on N ranks, and what each of them should then hold of the layer without
 * ranks. */
#pragma once

#include "anyrank/layers.h"
#include "anyrank/param.h"
#include "support/bits.h"
#include "support/rank_run.h"
#include "tests/layers/plain_linear.h"

enum { MOST_RANKS = 4 };
typedef enum style { COLUMN, ROW } style;

typedef struct linear_case {
    style style;
    bool flag; /* column: gather_output, row: input_is_sharded */
    int ndim;  /* of X: 2 makes the tokens one sample */
    int ranks;
    ar_numerics numerics;
    bool sp, keep_gathered;
    int overlap; /* of ar_ctx_options */
} linear_case;

/* One rank's tensors, in the shapes it holds. */
typedef struct rank_result {
    size_t x_at, x_width, y_at, y_width;     /* features of X, dX and of Y, dY that this rank has */
    size_t x_first, x_each, y_first, y_each; /* positions of each sample likewise */
    float *y, *dx, *dw, *db;
    size_t dw_rows, dw_cols, dw_row_at, dw_col_at, db_n, db_at;
} rank_result;

typedef struct linear_job {
    linear_case c;
    const plain_linear *full;
    rank_result rank[MOST_RANKS];
} linear_job;

/* Positions [first, first + each) of every sample, features [at, at + width). */
static inline float *part_of(const float *full, plain_shape n, size_t cols, size_t first, size_t each, size_t at,
                             size_t width)
{
    float *part = malloc((n.samples * each * width + 1) * sizeof *part);
    for (size_t i = 0; part && i < n.samples * each; i++)
        memcpy(part + i * width, full + (i / each * n.each + first + i % each) * cols + at, width * sizeof *part);
    return part;
}

/* What each rank should hold: the conventions of parallelism.md, section 2. */
static inline void set_parts(rank_result *r, const linear_job *j, size_t rank)
{
    const size_t n = (size_t)j->c.ranks, in = j->full->n.in, out = j->full->n.out;
    const bool column = j->c.style == COLUMN;
    const bool y_sharded = column && !j->c.flag, x_sharded = !column && j->c.flag;
    r->x_width = x_sharded ? in / n : in;
    r->x_at = x_sharded ? rank * r->x_width : 0;
    r->y_width = y_sharded ? out / n : out;
    r->y_at = y_sharded ? rank * r->y_width : 0;
    /* Sequence parallelism: features that are whole are of the own positions. */
    const size_t s = j->full->n.each, own = s / n;
    r->x_each = j->c.sp && !x_sharded ? own : s;
    r->x_first = j->c.sp && !x_sharded ? rank * own : 0;
    r->y_each = j->c.sp && !y_sharded ? own : s;
    r->y_first = j->c.sp && !y_sharded ? rank * own : 0;
    r->dw_rows = column ? out / n : out;
    r->dw_row_at = column ? rank * r->dw_rows : 0;
    r->dw_cols = column ? in : in / n;
    r->dw_col_at = column ? 0 : rank * r->dw_cols;
    r->db_n = r->dw_rows;
    r->db_at = r->dw_row_at;
}

static inline ar_status download_gradient(ar_ctx *ctx, float **to, const ar_param *p)
{
    *to = malloc((ar_tensor_count(&p->value) + 1) * sizeof **to);
    return *to ? rank_read_gradient(ctx, *to, p) : AR_ERR_MEMORY;
}

static inline ar_status upload_part(ar_ctx *ctx, ar_tensor *t, int ndim, plain_shape n, size_t each, size_t width,
                                    float *part)
{
    const size_t shape[3] = {n.samples, each, width};
    const ar_status st = part ? rank_upload(ctx, t, ndim, ndim == 3 ? shape : shape + 1, part) : AR_ERR_MEMORY;
    free(part);
    return st;
}

static inline ar_status download(ar_ctx *ctx, float **to, const ar_tensor *t, int ndim, size_t each, size_t width)
{
    if (t->ndim != ndim || t->shape[ndim - 1] != width || t->shape[ndim - 2] != each)
        return ar_error_set(AR_ERR_SHAPE, "[.., %zu, %zu], expected [.., %zu, %zu]", t->shape[t->ndim - 2],
                            t->shape[t->ndim - 1], each, width);
    *to = malloc((ar_tensor_count(t) + 1) * sizeof **to);
    return *to ? ar_ctx_download(ctx, *to, t) : AR_ERR_MEMORY;
}

static inline ar_status forward_backward(ar_ctx *ctx, linear_job *j, ar_module *m, ar_saved *saved)
{
    const plain_linear *f = j->full;
    rank_result *r = &j->rank[rank_of(ctx)];
    ar_param *p[2] = {NULL, NULL};
    ar_tensor x, y, dx, dy;
    const size_t params = ar_module_params(m, p, 2, true);
    const int ndim = j->c.ndim;
    AR_TRY(ar_param_set(p[0], ctx, f->w));
    if (params > 1)
        AR_TRY(ar_param_set(p[1], ctx, f->b));
    AR_TRY(upload_part(ctx, &x, ndim, f->n, r->x_each, r->x_width,
                       part_of(f->x, f->n, f->n.in, r->x_first, r->x_each, r->x_at, r->x_width)));
    AR_TRY(upload_part(ctx, &dy, ndim, f->n, r->y_each, r->y_width,
                       part_of(f->dy, f->n, f->n.out, r->y_first, r->y_each, r->y_at, r->y_width)));
    AR_TRY(ar_module_forward(m, ctx, saved, &y, &x, NULL));
    AR_TRY(ar_module_backward(m, ctx, saved, &dx, &dy, NULL));
    AR_TRY(ar_module_reduce_grads(m, ctx));
    AR_TRY(download(ctx, &r->y, &y, ndim, r->y_each, r->y_width));
    AR_TRY(download(ctx, &r->dx, &dx, ndim, r->x_each, r->x_width));
    AR_TRY(download_gradient(ctx, &r->dw, p[0]));
    return params > 1 ? download_gradient(ctx, &r->db, p[1]) : AR_OK;
}

static inline ar_status linear_rank(ar_ctx *ctx, void *user)
{
    linear_job *j = user;
    const plain_linear *f = j->full;
    const ar_linear_options o = {.bias = f->b, .gather_output = j->c.flag, .input_is_sharded = j->c.flag};
    OWNED(ar_module_destroy) ar_module *m = NULL;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    set_parts(&j->rank[rank_of(ctx)], j, rank_of(ctx));
    AR_TRY(ar_saved_create(&saved));
    if (j->c.style == COLUMN)
        AR_TRY(ar_column_linear_create(&m, ctx, "l", f->n.in, f->n.out, &o));
    else
        AR_TRY(ar_row_linear_create(&m, ctx, "l", f->n.in, f->n.out, &o));
    return forward_backward(ctx, j, m, saved);
}

static inline void run_linear(linear_job *j)
{
    const ar_run o = {
        .parallel = {.tp = j->c.ranks, .sp = j->c.sp, .keep_gathered = j->c.keep_gathered, .overlap = j->c.overlap},
        .numerics = j->c.numerics};
    cr_assert_eq(rank_run(&o, linear_rank, j), AR_OK, "%s, option %d, %d ranks: %s",
                 j->c.style == COLUMN ? "column" : "row", j->c.flag, j->c.ranks, ar_error_message());
}

static inline void linear_job_fini(linear_job *j)
{
    for (int r = 0; r < j->c.ranks; r++) {
        free(j->rank[r].y);
        free(j->rank[r].dx);
        free(j->rank[r].dw);
        free(j->rank[r].db);
    }
}

/* Given tensors of a layer with 24 inputs and 36 outputs, whose rows and columns vary in magnitude. */
static inline plain_linear given(size_t samples, size_t each, bool bias)
{
    enum { IN = 24, OUT = 36, MOST_TOKENS = 60 };
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

static inline void expect_same(const linear_case *c, const char *what, int rank, const float *actual, float *expected,
                               size_t n)
{
    cr_assert_not_null(expected);
    cr_assert_eq(first_different_bits(actual, expected, n), n,
                 "%s, option %d, %d dimensions, rank %d of %d: %s differs", c->style == COLUMN ? "column" : "row",
                 c->flag, c->ndim, rank, c->ranks, what);
    free(expected);
}

static inline void expect_plain_bits(const linear_job *j)
{
    const plain_linear *f = j->full;
    for (int k = 0; k < j->c.ranks; k++) {
        const rank_result *r = &j->rank[k];
        expect_same(&j->c, "Y", k, r->y, part_of(f->y, f->n, f->n.out, r->y_first, r->y_each, r->y_at, r->y_width),
                    f->n.samples * r->y_each * r->y_width);
        expect_same(&j->c, "dX", k, r->dx, part_of(f->dx, f->n, f->n.in, r->x_first, r->x_each, r->x_at, r->x_width),
                    f->n.samples * r->x_each * r->x_width);
        const plain_shape rows = {1, f->n.out, 0, 0}, row = {1, 1, 0, 0};
        expect_same(&j->c, "dW", k, r->dw,
                    part_of(f->dw, rows, f->n.in, r->dw_row_at, r->dw_rows, r->dw_col_at, r->dw_cols),
                    r->dw_rows * r->dw_cols);
        if (f->b)
            expect_same(&j->c, "db", k, r->db, part_of(f->db, row, f->n.out, 0, 1, r->db_at, r->db_n), r->db_n);
    }
}

/* The token that row i of a rank's part is. */
static inline size_t token_at(plain_shape n, size_t first, size_t each, size_t i)
{
    return i / each * n.each + first + i % each;
}

static inline void expect_within_bounds(const linear_job *j)
{
    const plain_linear *f = j->full;
    const size_t in = f->n.in, out = f->n.out, tokens = f->n.samples * f->n.each;
    for (int k = 0; k < j->c.ranks; k++) {
        const rank_result *r = &j->rank[k];
        for (size_t i = 0; i < f->n.samples * r->y_each * r->y_width; i++) {
            const size_t t = token_at(f->n, r->y_first, r->y_each, i / r->y_width), o = r->y_at + i % r->y_width;
            plain_sum s = plain_dot(in, f->x + t * in, 1, f->w + o * in, 1);
            s.value += f->b ? (double)f->b[o] : 0.0;
            s.magnitude += f->b ? fabs((double)f->b[o]) : 0.0;
            expect_near("Y", r->y[i], s, in + 1);
        }
        for (size_t i = 0; i < f->n.samples * r->x_each * r->x_width; i++) {
            const size_t t = token_at(f->n, r->x_first, r->x_each, i / r->x_width);
            expect_near("dX", r->dx[i], plain_dot(out, f->dy + t * out, 1, f->w + r->x_at + i % r->x_width, in), out);
        }
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
