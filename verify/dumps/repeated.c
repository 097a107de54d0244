/* SPDX-License-Identifier: Apache-2.0 */
/* A dump's tensor with dimensions of one index repeated, beside one that has more of them. */
#include "ref/core/size.h"
#include "verify/dump/dump_private.h"
#include "verify/dumps/verify_impl.h"

ar_status ari_repeated_init(ari_repeated *s, const ar_dump_tensor *t, const size_t *shape, ari_arena *arena)
{
    size_t boxes = 0;
    for (size_t i = 0; i < t->parts; i++)
        boxes += t->part[i].boxes;
    *s = (ari_repeated){.tensor = *t};
    AR_TRY(ARI_TAKE(&s->part, arena, t->parts, t->name));
    AR_TRY(ARI_TAKE(&s->box, arena, boxes, t->name));
    ar_dump_box *box = s->box;
    for (size_t i = 0; i < t->parts; i++) {
        s->part[i] = t->part[i];
        s->part[i].box = box;
        for (size_t b = 0; b < t->part[i].boxes; b++, box++) {
            *box = t->part[i].box[b];
            for (int d = 0; d < t->ndim; d++) {
                if (t->shape[d] != 1 || shape[d] < 2)
                    continue;
                box->extent[d] = shape[d];
                box->stride[d] = 0;
            }
        }
    }
    for (int d = 0; d < t->ndim; d++)
        s->tensor.shape[d] = t->shape[d] == 1 && shape[d] > 1 ? shape[d] : t->shape[d];
    s->tensor.count = ari_volume(s->tensor.shape, t->ndim);
    s->tensor.whole = NULL;
    s->tensor.part = s->part;
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
