/* SPDX-License-Identifier: Apache-2.0 */
/* What differences that are known explain of others: gradients' of new weights, and weights' of outputs. */
#include <math.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/roles.h"

/* --- what gradients explain --------------------------------------------------------------------------------------- */

static void see_reach(void *user, const double *x)
{
    double *reach = user;
    *reach = isfinite(x[1] - x[0]) ? fmax(*reach, fabs(x[1] - x[0])) : *reach;
}

ar_status ari_doubt_reach(double *reach, const ar_dump *reference, int step)
{
    *reach = 0.0;
    for (ari_walk w = ari_walk_of(reference, NULL, "n", step); ari_walk_next(&w);) {
        const ar_dump_tensor *const moved[] = {ari_weight_before(reference, w.t->name, w.key.stem, step), w.t};
        if (moved[0] && moved[0]->count == w.t->count)
            AR_TRY(ari_read_beside(moved, 2, 0, w.t->count, see_reach, reach));
    }
    return AR_OK;
}

typedef struct doubting {
    double *apart, *beside, reach;
} doubting;

/* The root s of a second moment is a norm of the gradients so far, whatever their weights. If each gradient is off by
 * at most y of its size, s is off by d <= y s, and the bound's d/(s - d) is at most y/(1 - y). */
static void doubt_update(void *user, const double *x)
{
    doubting *d = user;
    const double apart = fabs(x[1] - x[0]);
    double *y = d->apart++;
    *y = apart > 0.0 && isfinite(apart) ? fmax(*y, apart / fabs(x[0])) : *y;
    *d->beside++ += 2.0 * d->reach * (*y < 0.5 ? *y / (1.0 - *y) : 1.0);
}

ar_status ari_doubt_read(double *beside, const ari_doubt *d, size_t start, size_t n)
{
    enum { CHUNK = 1024 };
    double apart[CHUNK];
    for (size_t i = 0; i < n; i++) {
        const size_t at = start + i, column = d->width ? at % d->width : 0;
        beside[i] = d->all + (d->bias ? d->bias[column] : 0.0);
        beside[i] += d->weight ? d->weight[column] * d->row[at / d->width] : 0.0;
    }
    for (size_t at = 0, here; at < n && d->steps > 0; at += here) {
        here = n - at < CHUNK ? n - at : CHUNK;
        memset(apart, 0, sizeof apart);
        for (int k = 0; k < d->steps; k++)
            AR_TRY(ari_read_beside(d->grad[k], 2, start + at, here, doubt_update,
                                   &(doubting){apart, beside + at, d->reach[k]}));
    }
    return AR_OK;
}

/* Sums of squares by row and by column of a matrix. */
typedef struct squares {
    size_t cols, at;
    double *row, *column, all;
} squares;

static void add_squares(void *user, const double *x)
{
    squares *s = user;
    const size_t row = s->at / s->cols, column = s->at++ % s->cols;
    const double apart = (x[1] - x[0]) * (x[1] - x[0]);
    s->row[row] += apart;
    s->column[column] += apart;
    s->all += x[0] * x[0];
}

static void add_apart(void *user, const double *x)
{
    double **apart = user;
    *(*apart)++ = fabs(x[1] - x[0]);
}

/* The output j is w_j x, a row or a column of the matrix times the input, or an element of a vector times its own, and
 * so is the input's gradient. An input of n elements is taken to be in no direction of the matrix: |W x|^2 = |W|^2 |x|^2 / n. */
static ar_status doubt_matrix(ari_doubt *d, const ar_dump_tensor *const *weight, ari_arena *arena)
{
    const ar_dump_tensor *w = weight[0];
    squares s = {.cols = w->ndim > 0 ? w->shape[w->ndim - 1] : 0};
    const size_t rows = s.cols ? w->count / s.cols : 0;
    if (w->count == 0 || weight[1]->count != w->count || (rows != d->width && s.cols != d->width))
        return AR_OK;
    AR_TRY(ARI_TAKE(&s.row, arena, rows, w->name));
    AR_TRY(ARI_TAKE(&s.column, arena, s.cols, w->name));
    memset(s.row, 0, rows * sizeof *s.row);
    memset(s.column, 0, s.cols * sizeof *s.column);
    AR_TRY(ari_read_beside(weight, 2, 0, w->count, add_squares, &s));
    double *of = rows == d->width ? s.row : s.column;
    const double inputs = (double)(w->ndim < 2 ? d->width : w->count / d->width);
    for (size_t j = 0; j < d->width; j++) {
        const double most = rows == s.cols ? fmax(s.row[j], s.column[j]) : of[j];
        of[j] = s.all > 0.0 ? sqrt(inputs * most / s.all) : 0.0;
    }
    d->weight = of;
    return AR_OK;
}

static void add_row(void *user, const double *x)
{
    squares *s = user;
    s->row[s->at++ / s->cols] += x[0] * x[0];
}

static double largest_of(const double *x, size_t n)
{
    double most = 0.0;
    for (size_t i = 0; x && i < n; i++)
        most = fmax(most, x[i]);
    return most;
}

ar_status ari_doubt_output(ari_doubt *d, const ar_dump_tensor *output, const ar_dump_tensor *const *weight,
                           const ar_dump_tensor *const *bias, ari_arena *arena)
{
    d->width = output->ndim > 1 ? output->shape[output->ndim - 1] : 0;
    if (d->width == 0 || output->count == 0)
        return AR_OK;
    const size_t rows = output->count / d->width;
    if (weight)
        AR_TRY(doubt_matrix(d, weight, arena));
    if (d->weight) {
        AR_TRY(ARI_TAKE(&d->row, arena, rows, output->name));
        memset(d->row, 0, rows * sizeof *d->row);
        AR_TRY(ari_read_beside(&output, 1, 0, output->count, add_row, &(squares){.cols = d->width, .row = d->row}));
        for (size_t i = 0; i < rows; i++)
            d->row[i] = sqrt(d->row[i]);
    }
    if (bias && bias[0]->count == d->width && bias[1]->count == d->width) {
        AR_TRY(ARI_TAKE(&d->bias, arena, d->width, output->name));
        AR_TRY(ari_read_beside(bias, 2, 0, d->width, add_apart, &(double *){d->bias}));
    }
    d->most = largest_of(d->weight, d->width) * largest_of(d->row, rows) + largest_of(d->bias, d->width);
    return AR_OK;
}
