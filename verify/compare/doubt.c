/* SPDX-License-Identifier: Apache-2.0 */
/* Differences that known differences explain: new weights by differences of gradients, and outputs by differences of
 * weights. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/dump_private.h"

/* --- tensors side by side ----------------------------------------------------------------------------------------- */

ari_lockstep ari_lockstep_begin(const ar_dump_tensor *const *tensor, int tensors, size_t start, size_t n)
{
    return (ari_lockstep){.tensor = tensor, .tensors = tensors, .start = start, .n = n, .index = SIZE_MAX};
}

bool ari_lockstep_next(ari_lockstep *b)
{
    const size_t index = ++b->index; /* wraps to 0 before the first element */
    const size_t count = b->n - index < ARI_LOCKSTEP_ELEMENTS ? b->n - index : ARI_LOCKSTEP_ELEMENTS;
    for (int k = 0; index < b->n && index % ARI_LOCKSTEP_ELEMENTS == 0 && k < b->tensors && b->status == AR_OK; k++)
        b->status = b->tensor[k] ? ari_dump_read_f64(b->tensor[k], b->start + index, count, b->read[k]) : AR_OK;
    for (int k = 0; k < b->tensors; k++)
        b->x[k] = b->read[k][index % ARI_LOCKSTEP_ELEMENTS];
    return index < b->n && b->status == AR_OK;
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

ar_status ari_uncertainty_reach(double *reach, const ar_dump *reference, int step)
{
    *reach = 0.0;
    for (ari_walk w = ari_walk_of(reference, NULL, "n", step); ari_walk_next(&w);) {
        const ar_dump_tensor *const moved[] = {ari_weight_before(reference, w.t->name, w.key.stem, step), w.t};
        ari_lockstep b = ari_lockstep_begin(moved, 2, 0, moved[0] && moved[0]->count == w.t->count ? w.t->count : 0);
        while (ari_lockstep_next(&b))
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
        ari_lockstep b = ari_lockstep_begin(&w.t, 1, 0, w.t->count);
        while (ari_lockstep_next(&b))
            squares += isfinite(b.x[0]) ? b.x[0] * b.x[0] : 0.0;
        AR_TRY(b.status);
        *rms = w.t->count > 0 ? fmax(*rms, sqrt(squares / (double)w.t->count)) : *rms;
    }
    return AR_OK;
}

/* Returns an element's index along the dimension of the weights, and which vector along that dimension contains it. */
static size_t column_of(const ari_uncertainty *d, size_t element)
{
    return element / d->inner % d->width;
}

static size_t row_of(const ari_uncertainty *d, size_t element)
{
    return element / (d->inner * d->width) * d->inner + element % d->inner;
}

/* The root s of a second moment is a norm of past gradients, for any weights. If each gradient is off by at most y of
 * its size, s is off by d <= y s, and the bound d/(s - d) is at most y/(1 - y). */
static ar_status read_gradients(double *extra, const ari_uncertainty *d, size_t start, size_t n)
{
    enum { CHUNK = 1024 };
    for (size_t offset = 0; offset < n && d->steps > 0; offset += CHUNK) {
        double y[CHUNK] = {0.0};
        for (int k = 0; k < d->steps; k++) {
            ari_lockstep b = ari_lockstep_begin(d->grad[k], 2, start + offset, n - offset < CHUNK ? n - offset : CHUNK);
            while (ari_lockstep_next(&b)) {
                const double delta = fabs(b.x[1] - b.x[0]);
                double *const max_ratio = &y[b.index];
                *max_ratio = delta > 0.0 && isfinite(delta) ? fmax(*max_ratio, delta / fabs(b.x[0])) : *max_ratio;
                extra[offset + b.index] +=
                    2.0 * d->reach[k] * (*max_ratio < 0.5 ? *max_ratio / (1.0 - *max_ratio) : 1.0);
            }
            AR_TRY(b.status);
        }
    }
    return AR_OK;
}

/* A step turns a moment m into d m + w g, or v into d v + w g^2, with d and w at most 1. The difference of m remains,
 * and that of g is added. The term w g is at most as large as the two moments together, and w g^2 at most v. Hence the
 * term is off by at most the fraction y by which the gradient is off, for any w and any scale of the gradients. */
static ar_status read_moment(double *extra, const ari_uncertainty *d, size_t start, size_t n)
{
    ari_lockstep past = ari_lockstep_begin(d->before, 2, start, n);
    while (ari_lockstep_next(&past))
        extra[past.index] += isfinite(past.x[1] - past.x[0]) ? fabs(past.x[1] - past.x[0]) : 0.0;
    AR_TRY(past.status);
    const ar_dump_tensor *const tensors[] = {d->added[0], d->added[1], d->moment, d->before[0]};
    ari_lockstep b = ari_lockstep_begin(tensors, 4, start, d->added[0] ? n : 0);
    while (ari_lockstep_next(&b)) {
        const double g = fabs(b.x[0]), delta = fabs(b.x[1] - b.x[0]), y = delta / g;
        const double part = d->squared ? (2.0 + y) * y * fabs(b.x[2]) : y * (fabs(b.x[2]) + fabs(b.x[3]));
        const double limit = d->squared ? (2.0 * g + delta) * delta : delta;
        extra[b.index] += delta > 0.0 && isfinite(delta) ? fmin(part, limit) : 0.0;
    }
    return b.status;
}

ar_status ari_uncertainty_read(double *extra, const ari_uncertainty *d, size_t start, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const size_t column = d->width ? column_of(d, start + i) : 0;
        extra[i] = d->uniform + (d->bias ? d->bias[column] : 0.0);
        extra[i] += d->weight ? d->weight[column] * d->row[row_of(d, start + i)] : 0.0;
    }
    AR_TRY(read_moment(extra, d, start, n));
    return read_gradients(extra, d, start, n);
}

/* --- what weights explain of outputs ------------------------------------------------------------------------------ */

/* Returns true for modules whose outputs have features before positions: [sample, feature, position, ..]. transformers'
 * Conv1D is a linear module. */
static bool has_features_first(const char *name)
{
    static const char *const kinds[] = {"Conv1d",    "Conv2d",       "Conv3d",    "ConvTranspose",
                                        "BatchNorm", "InstanceNorm", "GroupNorm", "PReLU"};
    for (size_t i = 0; name && i < sizeof kinds / sizeof *kinds; i++) {
        if (strstr(name, kinds[i]))
            return true;
    }
    return false;
}

static bool has_features_last(const char *name)
{
    static const char *const kinds[] = {"Linear", "LayerNorm", "RMSNorm", "Embedding", "Conv1D"};
    for (size_t i = 0; name && i < sizeof kinds / sizeof *kinds; i++) {
        if (strcmp(name, kinds[i]) == 0)
            return true;
    }
    return false;
}

/* Returns true if weights apply along a dimension of `width` features: they have as many outputs, or as many inputs in
 * some groups. */
static bool fits_features(const ar_dump_tensor *weight, size_t width)
{
    const size_t outputs = weight->ndim > 0 ? weight->shape[0] : 0, second = weight->ndim > 1 ? weight->shape[1] : 1;
    return width > 0 && outputs > 0 && second > 0 &&
           (outputs == width || (weight->ndim > 1 && width % second == 0 && outputs % (width / second) == 0));
}

/* Returns the dimension along which a module's weights apply. A convolution's weights have spatial dimensions after
 * their outputs and inputs, and its output has one more dimension in front, or none for a single sample. If the class
 * is unknown, it is the last dimension if its size matches the weights. */
static int dimension_of(const ar_dump_tensor *output, const ar_dump_tensor *weight, const ar_dump_tensor *bias,
                        const char *name)
{
    const ar_dump_tensor *param = weight ? weight : bias;
    const bool places = weight && weight->ndim > 2;
    const int last_dim = output->ndim - 1, feature_dim = places && output->ndim == weight->ndim - 1 ? 0 : 1;
    if (!param || output->ndim < 2 || has_features_last(name) || (places && output->ndim < weight->ndim - 1))
        return last_dim;
    const size_t param_width = param->shape[param->ndim - 1];
    const bool fits =
        places ? fits_features(param, output->shape[feature_dim]) : param->count == output->shape[feature_dim];
    if (!fits || (!has_features_first(name) &&
                  (output->shape[last_dim] == param_width || (places && output->ndim != param->ndim))))
        return last_dim;
    return feature_dim;
}

/* Output j is w_j x: a row or column of the matrix times the input, or an element of a vector times the input's
 * element. The same holds for the input's gradient. A convolution's w_j covers all positions, and its inputs may be
 * those of a group. An input of n elements is assumed to have no preferred direction: |W x|^2 = |W|^2 |x|^2 / n. */
static ar_status doubt_matrix(ari_uncertainty *d, const ar_dump_tensor *const *weight, ari_arena *arena)
{
    const ar_dump_tensor *w = weight[0];
    if (w->count == 0 || w->ndim == 0 || weight[1]->count != w->count)
        return AR_OK;
    const bool places = w->ndim > 2 && d->inner > 1;
    const size_t cols = places ? w->shape[1] : w->shape[w->ndim - 1];
    const size_t rows = places ? w->shape[0] : w->count / cols, inner = w->count / (rows * cols);
    const size_t groups = places && rows != d->width && fits_features(w, d->width) ? d->width / cols : 1;
    if (rows != d->width && groups * cols != d->width)
        return AR_OK;
    double *row = NULL, *column = NULL, total = 0.0; /* sums of squares */
    AR_TRY(ARI_TAKE(&row, arena, rows, w->name));
    AR_TRY(ARI_TAKE(&column, arena, groups * cols, w->name));
    ari_lockstep b = ari_lockstep_begin(weight, 2, 0, w->count);
    while (ari_lockstep_next(&b)) {
        const double squared_delta = (b.x[1] - b.x[0]) * (b.x[1] - b.x[0]);
        const size_t in_row = b.index / (cols * inner), group = in_row / (rows / groups);
        row[in_row] += squared_delta;
        column[group * cols + b.index / inner % cols] += squared_delta;
        total += b.x[0] * b.x[0];
    }
    AR_TRY(b.status);
    double *line_sums = rows == d->width ? row : column;
    const double inputs = (double)(w->ndim < 2 ? d->width : w->count / d->width);
    for (size_t j = 0; j < d->width; j++) {
        const double max_sum = rows == cols ? fmax(row[j], column[j]) : line_sums[j];
        line_sums[j] = total > 0.0 ? sqrt(inputs * max_sum / total) : 0.0;
    }
    d->weight = line_sums;
    return AR_OK;
}

static double largest_of(const double *x, size_t n)
{
    double largest = 0.0;
    for (size_t i = 0; x && i < n; i++)
        largest = fmax(largest, x[i]);
    return largest;
}

ar_status ari_uncertainty_output(ari_uncertainty *d, const ar_dump_tensor *output, const ar_dump_tensor *const *weight,
                                 const ar_dump_tensor *const *bias, const char *name, ari_arena *arena)
{
    if (output->ndim < 2 || output->count == 0)
        return AR_OK;
    const int dimension = dimension_of(output, weight ? weight[0] : NULL, bias ? bias[0] : NULL, name);
    d->width = output->shape[dimension];
    d->inner = 1;
    for (int i = dimension + 1; i < output->ndim; i++)
        d->inner *= output->shape[i];
    const size_t rows = output->count / d->width;
    if (weight)
        AR_TRY(doubt_matrix(d, weight, arena));
    if (d->weight) {
        AR_TRY(ARI_TAKE(&d->row, arena, rows, output->name));
        ari_lockstep b = ari_lockstep_begin(&output, 1, 0, output->count);
        while (ari_lockstep_next(&b))
            d->row[row_of(d, b.index)] += b.x[0] * b.x[0];
        AR_TRY(b.status);
        for (size_t i = 0; i < rows; i++)
            d->row[i] = sqrt(d->row[i]);
    }
    if (bias && bias[0]->count == d->width && bias[1]->count == d->width) {
        AR_TRY(ARI_TAKE(&d->bias, arena, d->width, output->name));
        ari_lockstep b = ari_lockstep_begin(bias, 2, 0, d->width);
        while (ari_lockstep_next(&b))
            d->bias[b.index] = fabs(b.x[1] - b.x[0]);
        AR_TRY(b.status);
    }
    d->max_element = largest_of(d->weight, d->width) * largest_of(d->row, rows) + largest_of(d->bias, d->width);
    return AR_OK;
}
