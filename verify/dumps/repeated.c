/* SPDX-License-Identifier: Apache-2.0 */
/* A dump's tensor read in another arrangement: dimensions of one index repeated, samples in another order. */
#include "ref/core/size.h"
#include "verify/dump/dump_private.h"
#include "verify/dumps/verify_impl.h"

/* A tensor of this shape with room for the boxes of another's parts, each to be made by `make`; false: it is empty. */
typedef bool (*make_box)(ar_dump_box *to, const ar_dump_box *from, const size_t *by, int ndim);

static ar_status make_boxes(ari_rearranged *s, const ar_dump_tensor *t, make_box make, const size_t *by,
                            ari_arena *arena)
{
    size_t boxes = 0;
    for (size_t i = 0; i < t->parts; i++)
        boxes += t->part[i].boxes;
    AR_TRY(ARI_TAKE(&s->part, arena, t->parts, t->name));
    AR_TRY(ARI_TAKE(&s->box, arena, boxes, t->name));
    s->tensor.count = ari_volume(s->tensor.shape, t->ndim);
    s->tensor.whole = NULL;
    s->tensor.part = s->part;
    ar_dump_box *box = s->box;
    for (size_t i = 0; i < t->parts; i++) {
        s->part[i] = t->part[i];
        s->part[i].box = box;
        s->part[i].boxes = 0;
        for (size_t b = 0; b < t->part[i].boxes; b++)
            s->part[i].boxes += make(&box[s->part[i].boxes], &t->part[i].box[b], by, t->ndim);
        box += s->part[i].boxes;
    }
    return AR_OK;
}

static bool repeat_box(ar_dump_box *to, const ar_dump_box *from, const size_t *shape, int ndim)
{
    *to = *from;
    for (int d = 0; d < ndim; d++) {
        if (shape[d] == 0)
            continue;
        to->extent[d] = shape[d];
        to->stride[d] = 0;
    }
    return true;
}

ar_status ari_repeated_init(ari_rearranged *s, const ar_dump_tensor *t, const size_t *shape, ari_arena *arena)
{
    size_t times[AR_ST_MAX_DIMS] = {0}; /* 0: as it is */
    *s = (ari_rearranged){.tensor = *t};
    for (int d = 0; d < t->ndim; d++) {
        times[d] = t->shape[d] == 1 && shape[d] > 1 ? shape[d] : 0;
        s->tensor.shape[d] = times[d] ? times[d] : t->shape[d];
    }
    return make_boxes(s, t, repeat_box, times, arena);
}

/* The boxes of a box's samples. */
static size_t split_box(ar_dump_box *to, const ar_dump_box *from, size_t rows, const size_t *place)
{
    size_t n = 0;
    for (size_t row = from->global[0], end = row + from->extent[0]; row < end; n++) {
        const size_t next = (row / rows + 1) * rows < end ? (row / rows + 1) * rows : end;
        to[n] = *from;
        to[n].at = from->at + (row - from->global[0]) * from->stride[0];
        to[n].global[0] = place[row / rows] * rows + row % rows;
        to[n].extent[0] = next - row;
        row = next;
    }
    return n;
}

ar_status ari_reordered_init(ari_rearranged *s, const ar_dump_tensor *t, const size_t *place, ari_arena *arena)
{
    size_t boxes = 0;
    for (size_t i = 0; i < t->parts; i++)
        for (size_t b = 0; b < t->part[i].boxes; b++)
            boxes += t->part[i].box[b].extent[0] / t->sample_rows + 2;
    *s = (ari_rearranged){.tensor = *t};
    AR_TRY(ARI_TAKE(&s->part, arena, t->parts, t->name));
    AR_TRY(ARI_TAKE(&s->box, arena, boxes, t->name));
    s->tensor.whole = NULL;
    s->tensor.part = s->part;
    for (size_t i = 0, n = 0; i < t->parts; i++) {
        s->part[i] = t->part[i];
        s->part[i].box = &s->box[n];
        s->part[i].boxes = 0;
        for (size_t b = 0; b < t->part[i].boxes; b++) {
            const size_t some = split_box(&s->box[n], &t->part[i].box[b], t->sample_rows, place);
            s->part[i].boxes += some;
            n += some;
        }
    }
    return AR_OK;
}

bool ari_same_shape(const ar_dump_tensor *a, const ar_dump_tensor *b)
{
    return ari_same_extents(a->ndim, a->shape, b->ndim, b->shape);
}

/* --- one for many ------------------------------------------------------------------------------------------------- */

/* Spread evenly over the elements. */
static size_t sample_step(size_t n)
{
    enum { SAMPLES = 512 };
    return n > SAMPLES ? n / SAMPLES + 1 : 1;
}

/* Element i of the larger tensor at index 0 of the dimensions that the other has one index of. */
static size_t first_of(const ar_dump_tensor *large, const ar_dump_tensor *small, size_t i)
{
    size_t at = 0, stride = 1;
    for (int d = large->ndim - 1; d >= 0; d--) {
        at += small->shape[d] == 1 ? 0 : i % large->shape[d] * stride;
        i /= large->shape[d];
        stride *= large->shape[d];
    }
    return at;
}

ar_status ari_verify_repeats(int *which, const ar_dump_tensor *reference, const ar_dump_tensor *other)
{
    const int small = other->count < reference->count;
    const ar_dump_tensor *a = small ? other : reference, *b = small ? reference : other;
    *which = -1;
    if (a->ndim != b->ndim || a->count == b->count || a->parts == 0 || ar_dtype_bytes(a->dtype) == 0)
        return AR_OK;
    for (int d = 0; d < a->ndim; d++) {
        if (a->shape[d] != b->shape[d] && a->shape[d] != 1)
            return AR_OK;
    }
    for (size_t i = 0; i < b->count; i += sample_step(b->count)) {
        double x = 0.0, y = 0.0;
        const size_t from = first_of(b, a, i);
        ar_status st = ari_dump_read_f64(b, i, 1, &x);
        st = st == AR_OK ? ari_dump_read_f64(b, from, 1, &y) : st;
        if (st == AR_ERR_DTYPE || (st == AR_OK && x != y))
            return AR_OK;
        AR_TRY(st);
    }
    *which = small;
    return AR_OK;
}
