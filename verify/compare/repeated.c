/* SPDX-License-Identifier: Apache-2.0 */
/* Compares a dump's tensor with one of another shape: repeats dimensions of extent 1, or merges or splits adjacent
 * dimensions. */
#include <math.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/dump_private.h"

/* Copies the tensor with its parts and boxes. */
static ar_status copy_boxes(ari_repeated *s, const ar_dump_tensor *t, ari_arena *arena)
{
    size_t boxes = 0;
    for (size_t i = 0; i < t->parts; i++)
        boxes += t->part[i].boxes;
    *s = (ari_repeated){.tensor = *t};
    AR_TRY(ARI_TAKE(&s->part, arena, t->parts, t->name));
    AR_TRY(ARI_TAKE(&s->box, arena, boxes, t->name));
    s->boxes = boxes;
    ar_dump_box *box = s->box;
    for (size_t i = 0; i < t->parts; i++) {
        s->part[i] = t->part[i];
        s->part[i].box = box;
        for (size_t b = 0; b < t->part[i].boxes; b++)
            *box++ = t->part[i].box[b];
    }
    s->tensor.part = s->part;
    return AR_OK;
}

ar_status ari_repeated_init(ari_repeated *s, const ar_dump_tensor *t, const size_t *shape, ari_arena *arena)
{
    AR_TRY(copy_boxes(s, t, arena));
    for (int d = 0; d < t->ndim; d++) {
        if (t->shape[d] != 1 || shape[d] < 2)
            continue;
        s->tensor.shape[d] = shape[d];
        for (size_t b = 0; b < s->boxes; b++) {
            s->box[b].extent[d] = shape[d];
            s->box[b].stride[d] = 0;
        }
    }
    s->tensor.count = ari_volume(s->tensor.shape, t->ndim);
    s->tensor.whole = NULL;
    return AR_OK;
}

/* Spread evenly over the elements. */
static size_t sample_step(size_t n)
{
    enum { SAMPLES = 512 };
    return n > SAMPLES ? n / SAMPLES + 1 : 1;
}

/* --- neighbouring dimensions in one ------------------------------------------------------------------------------- */

/* Moves the entries for dimensions from `src_dim` on to `dst_dim` on. */
static void shift(size_t *x, int ndim, int src_dim, int dst_dim)
{
    memmove(x + dst_dim, x + src_dim, (size_t)(ndim - src_dim) * sizeof *x);
}

static void shift_box(ar_dump_box *b, int ndim, int src_dim, int dst_dim)
{
    shift(b->global, ndim, src_dim, dst_dim);
    shift(b->extent, ndim, src_dim, dst_dim);
    shift(b->stride, ndim, src_dim, dst_dim);
}

/* Merges dimensions d and d + 1, the second of which has `inner` elements. Returns false if the box cannot be
 * merged. */
static bool merge_box(ar_dump_box *b, int ndim, int d, size_t inner)
{
    const bool rows = b->extent[d + 1] == inner && (b->stride[d] == inner * b->stride[d + 1] || b->extent[d] == 1);
    if (!rows && b->extent[d] != 1)
        return false;
    b->global[d] = b->global[d] * inner + b->global[d + 1];
    b->extent[d] *= b->extent[d + 1];
    b->stride[d] = b->stride[d + 1];
    shift_box(b, ndim, d + 2, d + 1);
    return true;
}

/* Splits dimension d into two, the second with `inner` elements. The box must contain whole rows, or part of one
 * row. */
static bool split_box(ar_dump_box *b, int ndim, int d, size_t inner)
{
    const size_t begin = b->global[d], n = b->extent[d], stride = b->stride[d];
    const bool rows = begin % inner == 0 && n % inner == 0;
    if (!rows && begin / inner != (begin + n - 1) / inner)
        return false;
    shift_box(b, ndim, d + 1, d + 2);
    b->global[d] = begin / inner;
    b->extent[d] = rows ? n / inner : 1;
    b->stride[d] = stride * inner;
    b->global[d + 1] = rows ? 0 : begin % inner;
    b->extent[d + 1] = rows ? inner : n;
    b->stride[d + 1] = stride;
    return true;
}

static bool merge(ari_repeated *s, int d)
{
    ar_dump_tensor *t = &s->tensor;
    for (size_t b = 0; b < s->boxes; b++) {
        if (!merge_box(&s->box[b], t->ndim, d, t->shape[d + 1]))
            return false;
    }
    t->shape[d] *= t->shape[d + 1];
    shift(t->shape, t->ndim--, d + 2, d + 1);
    return true;
}

static bool split(ari_repeated *s, int d, size_t inner)
{
    ar_dump_tensor *t = &s->tensor;
    for (size_t b = 0; b < s->boxes; b++) {
        if (!split_box(&s->box[b], t->ndim, d, inner))
            return false;
    }
    shift(t->shape, t->ndim++, d + 1, d + 2);
    t->shape[d] /= inner;
    t->shape[d + 1] = inner;
    return true;
}

/* Reshapes from dimension d on, where one requested dimension is several of the tensor's, or several are one. */
static bool reshape_at(ari_repeated *s, int d, int ndim, const size_t *shape)
{
    ar_dump_tensor *t = &s->tensor;
    const bool merges = t->shape[d] < shape[d];
    size_t inner = 1;
    if (merges) {
        while (d + 1 < t->ndim && t->shape[d] < shape[d]) {
            if (!merge(s, d))
                return false;
        }
        return t->shape[d] == shape[d];
    }
    for (int k = d + 1; k < ndim && shape[d] * inner < t->shape[d]; k++)
        inner *= shape[k];
    return shape[d] * inner == t->shape[d] && inner > 1 && t->ndim < AR_ST_MAX_DIMS && split(s, d, inner);
}

static ar_status reshape(bool *fits, ari_repeated *s, const ar_dump_tensor *t, int ndim, const size_t *shape,
                         ari_arena *arena)
{
    *fits = t->parts > 0 && t->count > 0 && t->count == ari_volume(shape, ndim) && t->ndim != ndim && t->ndim > 0 &&
            ndim > 0;
    if (!*fits)
        return AR_OK;
    AR_TRY(copy_boxes(s, t, arena));
    for (int d = 0; *fits && (d < ndim || d < s->tensor.ndim); d++)
        *fits = d < ndim && d < s->tensor.ndim && (s->tensor.shape[d] == shape[d] || reshape_at(s, d, ndim, shape));
    s->tensor.sample_rows = s->tensor.shape[0] == t->shape[0] ? t->sample_rows : 0;
    return AR_OK;
}

static void swap(size_t *x, int a, int b)
{
    const size_t of_a = x[a];
    x[a] = x[b];
    x[b] = of_a;
}

/* Reshapes [b, s, h d] to [b, h, s, d], with heads before tokens. */
static ar_status reshape_heads(bool *fits, ari_repeated *s, const ar_dump_tensor *t, int ndim, const size_t *shape,
                               ari_arena *arena)
{
    *fits = t->ndim == 3 && ndim == 4;
    if (!*fits)
        return AR_OK;
    const size_t token_major[4] = {shape[0], shape[2], shape[1], shape[3]};
    AR_TRY(reshape(fits, s, t, ndim, token_major, arena));
    for (size_t b = 0; *fits && b < s->boxes; b++) {
        swap(s->box[b].global, 1, 2);
        swap(s->box[b].extent, 1, 2);
        swap(s->box[b].stride, 1, 2);
    }
    swap(s->tensor.shape, 1, 2);
    s->tensor.whole = NULL;
    return AR_OK;
}

/* Measures how much two tensors of one shape differ in a sample of their elements. */
static ar_status distance(double *delta, const ar_dump_tensor *a, const ar_dump_tensor *b)
{
    *delta = 0.0;
    for (size_t i = 0; i < a->count; i += sample_step(a->count)) {
        double x = 0.0, y = 0.0;
        AR_TRY(ari_dump_read_f64(a, i, 1, &x));
        AR_TRY(ari_dump_read_f64(b, i, 1, &y));
        *delta += isfinite(x - y) ? fabs(x - y) : 0.0;
    }
    return AR_OK;
}

ar_status ari_reshaped_init(bool *fits, ari_repeated *s, const ar_dump_tensor *t, const ar_dump_tensor *target,
                            ari_arena *arena)
{
    ari_repeated heads;
    bool fits_heads = false;
    double deltas[2] = {0.0, 0.0};
    *fits = false;
    if (!ari_is_readable(t) || !ari_is_readable(target))
        return AR_OK;
    AR_TRY(reshape(fits, s, t, target->ndim, target->shape, arena));
    AR_TRY(reshape_heads(&fits_heads, &heads, t, target->ndim, target->shape, arena));
    if (*fits && fits_heads) { /* there are as many heads as tokens, so the values decide */
        AR_TRY(distance(&deltas[0], &s->tensor, target));
        AR_TRY(distance(&deltas[1], &heads.tensor, target));
    }
    if (fits_heads && (!*fits || deltas[1] < deltas[0]))
        *s = heads;
    *fits = *fits || fits_heads;
    return AR_OK;
}

bool ari_same_shape(const ar_dump_tensor *a, const ar_dump_tensor *b)
{
    return ari_same_extents(a->ndim, a->shape, b->ndim, b->shape);
}

/* --- one for many ------------------------------------------------------------------------------------------------- */

/* Returns the element of the smaller tensor for element i of the larger one: index 0 in dimensions of extent 1. */
static size_t first_of(const ar_dump_tensor *large, const ar_dump_tensor *small, size_t i)
{
    size_t index = 0, stride = 1;
    for (int d = large->ndim - 1; d >= 0; d--) {
        index += small->shape[d] == 1 ? 0 : i % large->shape[d] * stride;
        i /= large->shape[d];
        stride *= large->shape[d];
    }
    return index;
}

ar_status ari_verify_repeats(int *which, const ar_dump_tensor *reference, const ar_dump_tensor *candidate)
{
    const int small = candidate->count < reference->count;
    const ar_dump_tensor *a = small ? candidate : reference, *b = small ? reference : candidate;
    *which = -1;
    if (a->ndim != b->ndim || a->count == b->count || a->parts == 0 || ar_dtype_bytes(a->dtype) == 0)
        return AR_OK;
    for (int d = 0; d < a->ndim; d++) {
        if (a->shape[d] != b->shape[d] && a->shape[d] != 1)
            return AR_OK;
    }
    for (size_t i = 0; i < b->count; i += sample_step(b->count)) {
        double x = 0.0, y = 0.0;
        const size_t src_index = first_of(b, a, i);
        ar_status st = ari_dump_read_f64(b, i, 1, &x);
        st = st == AR_OK ? ari_dump_read_f64(b, src_index, 1, &y) : st;
        if (st == AR_ERR_DTYPE || (st == AR_OK && x != y))
            return AR_OK;
        AR_TRY(st);
    }
    *which = small;
    return AR_OK;
}
