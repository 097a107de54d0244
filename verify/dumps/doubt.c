/* SPDX-License-Identifier: Apache-2.0 */
/* What differences that are known explain of others: gradients' of new weights, and weights' of outputs. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/dump/dump_private.h"
#include "verify/dumps/verify_impl.h"

/* --- tensors side by side ----------------------------------------------------------------------------------------- */

ari_beside ari_beside_of(const ar_dump_tensor *const *tensor, int tensors, size_t from, size_t n)
{
    return (ari_beside){.tensor = tensor, .tensors = tensors, .from = from, .n = n, .at = SIZE_MAX};
}

bool ari_beside_next(ari_beside *b)
{
    const size_t at = ++b->at; /* to 0 before the first */
    const size_t some = b->n - at < ARI_BESIDE_AT_ONCE ? b->n - at : ARI_BESIDE_AT_ONCE;
    for (int k = 0; at < b->n && at % ARI_BESIDE_AT_ONCE == 0 && k < b->tensors && b->status == AR_OK; k++)
        b->status = b->tensor[k] ? ari_dump_read_f64(b->tensor[k], b->from + at, some, b->read[k]) : AR_OK;
    for (int k = 0; k < b->tensors; k++)
        b->x[k] = b->read[k][at % ARI_BESIDE_AT_ONCE];
    return at < b->n && b->status == AR_OK;
}

const ar_dump_tensor *ari_tensor_of_step(const ar_dump *d, const char *stem, size_t n, const char *kind, int step)
{
    char name[512];
    const int length = step > 1 ? snprintf(name, sizeof name, "%.*s:%s@%d", (int)n, stem, kind, step)
                                : snprintf(name, sizeof name, "%.*s:%s", (int)n, stem, kind);
    return length > 0 && (size_t)length < sizeof name ? ari_find_readable(d, name) : NULL;
}

const ar_dump_tensor *ari_weight_before(const ar_dump *d, const char *stem, size_t n, int step)
{
    return step > 1 ? ari_tensor_of_step(d, stem, n, "new", step - 1) : ari_tensor_of_step(d, stem, n, "init", 1);
}

/* --- what gradients explain --------------------------------------------------------------------------------------- */

ar_status ari_doubt_reach(double *reach, const ar_dump *reference, int step)
{
    *reach = 0.0;
    for (ari_walk w = ari_walk_of(reference, NULL, "n", step); ari_walk_next(&w);) {
        const ar_dump_tensor *const moved[] = {ari_weight_before(reference, w.t->name, w.key.stem, step), w.t};
        ari_beside b = ari_beside_of(moved, 2, 0, moved[0] && moved[0]->count == w.t->count ? w.t->count : 0);
        while (ari_beside_next(&b))
            *reach = isfinite(b.x[1] - b.x[0]) ? fmax(*reach, fabs(b.x[1] - b.x[0])) : *reach;
        AR_TRY(b.status);
    }
    return AR_OK;
}

ar_status ari_largest_rms(double *rms, const ar_dump *reference, const char *passes, int step)
{
    *rms = 0.0;
    for (ari_walk w = ari_walk_of(reference, NULL, passes, step); ari_walk_next(&w);) {
        double squares = 0.0;
        ari_beside b = ari_beside_of(&w.t, 1, 0, w.t->count);
        while (ari_beside_next(&b))
            squares += isfinite(b.x[0]) ? b.x[0] * b.x[0] : 0.0;
        AR_TRY(b.status);
        *rms = w.t->count > 0 ? fmax(*rms, sqrt(squares / (double)w.t->count)) : *rms;
    }
    return AR_OK;
}

/* The root s of a second moment is a norm of the gradients so far, whatever their weights. If each gradient is off by
 * at most y of its size, s is off by d <= y s, and the bound's d/(s - d) is at most y/(1 - y). */
ar_status ari_doubt_read(double *beside, const ari_doubt *d, size_t start, size_t n)
{
    enum { CHUNK = 1024 };
    for (size_t i = 0; i < n; i++) {
        const size_t at = start + i, column = d->width ? at % d->width : 0;
        beside[i] = d->all + (d->bias ? d->bias[column] : 0.0);
        beside[i] += d->weight ? d->weight[column] * d->row[at / d->width] : 0.0;
    }
    for (size_t at = 0; at < n && d->steps > 0; at += CHUNK) {
        double y[CHUNK] = {0.0};
        for (int k = 0; k < d->steps; k++) {
            ari_beside b = ari_beside_of(d->grad[k], 2, start + at, n - at < CHUNK ? n - at : CHUNK);
            while (ari_beside_next(&b)) {
                const double apart = fabs(b.x[1] - b.x[0]);
                double *const most = &y[b.at];
                *most = apart > 0.0 && isfinite(apart) ? fmax(*most, apart / fabs(b.x[0])) : *most;
                beside[at + b.at] += 2.0 * d->reach[k] * (*most < 0.5 ? *most / (1.0 - *most) : 1.0);
            }
            AR_TRY(b.status);
        }
    }
    return AR_OK;
}

/* The output j is w_j x, a row or a column of the matrix times the input, or an element of a vector times its own, and
 * so is the input's gradient. An input of n elements is taken to be in no direction of the matrix: |W x|^2 = |W|^2 |x|^2 / n. */
static ar_status doubt_matrix(ari_doubt *d, const ar_dump_tensor *const *weight, ari_arena *arena)
{
    const ar_dump_tensor *w = weight[0];
    const size_t cols = w->ndim > 0 ? w->shape[w->ndim - 1] : 0, rows = cols ? w->count / cols : 0;
    double *row = NULL, *column = NULL, all = 0.0; /* sums of squares */
    if (w->count == 0 || weight[1]->count != w->count || (rows != d->width && cols != d->width))
        return AR_OK;
    AR_TRY(ARI_TAKE(&row, arena, rows, w->name));
    AR_TRY(ARI_TAKE(&column, arena, cols, w->name));
    ari_beside b = ari_beside_of(weight, 2, 0, w->count);
    while (ari_beside_next(&b)) {
        const double apart = (b.x[1] - b.x[0]) * (b.x[1] - b.x[0]);
        row[b.at / cols] += apart;
        column[b.at % cols] += apart;
        all += b.x[0] * b.x[0];
    }
    AR_TRY(b.status);
    double *of = rows == d->width ? row : column;
    const double inputs = (double)(w->ndim < 2 ? d->width : w->count / d->width);
    for (size_t j = 0; j < d->width; j++) {
        const double most = rows == cols ? fmax(row[j], column[j]) : of[j];
        of[j] = all > 0.0 ? sqrt(inputs * most / all) : 0.0;
    }
    d->weight = of;
    return AR_OK;
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
        ari_beside b = ari_beside_of(&output, 1, 0, output->count);
        while (ari_beside_next(&b))
            d->row[b.at / d->width] += b.x[0] * b.x[0];
        AR_TRY(b.status);
        for (size_t i = 0; i < rows; i++)
            d->row[i] = sqrt(d->row[i]);
    }
    if (bias && bias[0]->count == d->width && bias[1]->count == d->width) {
        AR_TRY(ARI_TAKE(&d->bias, arena, d->width, output->name));
        ari_beside b = ari_beside_of(bias, 2, 0, d->width);
        while (ari_beside_next(&b))
            d->bias[b.at] = fabs(b.x[1] - b.x[0]);
        AR_TRY(b.status);
    }
    d->most = largest_of(d->weight, d->width) * largest_of(d->row, rows) + largest_of(d->bias, d->width);
    return AR_OK;
}
