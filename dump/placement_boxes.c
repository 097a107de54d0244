/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "dump/parts_cover.h"
#include "dump/placement.h"
#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/io/safetensors.h"

static void row_major(size_t stride[AR_ST_MAX_DIMS], const ar_st_entry *e)
{
    size_t step = 1;
    for (int d = e->ndim - 1; d >= 0; d--) {
        stride[d] = step;
        step *= e->count > 0 ? e->shape[d] : 1; /* of an empty tensor the other extents may be anything */
    }
}

static ar_status invalid(const char *file, const ar_st_entry *e, const char *problem)
{
    char shape[24 * AR_ST_MAX_DIMS];
    ari_st_shape_text(shape, sizeof shape, e->ndim, e->shape);
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: tensor '%s', which is %s in the file: %s", ARI_SHOW(file),
                        ARI_SHOW(e->name), shape, problem);
}

/* The box lies in the file's tensor, and in the full one where its shape is told. */
static ar_status check_box(const ar_dump_box *b, const size_t *local, const ari_placed *t, const ar_st_entry *e,
                           const char *file)
{
    for (int d = 0; d < e->ndim; d++) {
        if (local[d] > e->shape[d] || b->extent[d] > e->shape[d] - local[d])
            return invalid(file, e, "a box reaches beyond it");
        if (b->global[d] > SIZE_MAX - b->extent[d] ||
            (t->has_shape && (b->global[d] > t->shape[d] || b->extent[d] > t->shape[d] - b->global[d])))
            return invalid(file, e, "a box reaches beyond the full tensor");
    }
    return AR_OK;
}

/* Every element of the file's tensor is in one of its boxes. */
static ar_status check_local(const ari_placed *t, const ar_st_entry *e, const char *file)
{
    ar_dump_box *local = NULL;
    ari_cover_box *cover = NULL;
    ari_cover result = {.fault = ARI_COVERED};
    ar_status st = AR_OK;
    size_t n = 0;
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&local, t->boxes, sizeof *local, "boxes of a placement"));
    AR_TRY_TO(done, st, ari_alloc((void **)&cover, t->boxes, sizeof *cover, "boxes of a placement"));
    for (size_t i = 0; i < t->boxes; i++) {
        bool empty = false;
        for (int d = 0; d < e->ndim; d++) {
            local[i].global[d] = t->local[i][d];
            local[i].extent[d] = t->box[i].extent[d];
            empty |= t->box[i].extent[d] == 0;
        }
        if (!empty)
            cover[n++] = (ari_cover_box){&local[i], i};
    }
    if (e->count > 0)
        ari_cover_check(&result, e->ndim, e->shape, cover, n);
    if (result.fault == ARI_COVER_GAP)
        st = invalid(file, e, "its boxes have fewer elements");
    else if (result.fault != ARI_COVERED)
        st = invalid(file, e, "its boxes overlap in the file");
done:
    free(local);
    free(cover);
    return st;
}

static ar_status resolve_boxes(ar_dump_box *box, const ari_placed *t, const ar_st_entry *e, const char *file)
{
    for (size_t i = 0; i < t->boxes; i++) {
        box[i] = t->box[i];
        box[i].at = 0;
        row_major(box[i].stride, e);
        AR_TRY(check_box(&box[i], t->local[i], t, e, file));
        for (int d = 0; d < e->ndim; d++)
            box[i].at += e->count > 0 ? t->local[i][d] * box[i].stride[d] : 0;
    }
    return check_local(t, e, file);
}

ar_status ari_placed_resolve(ar_dump_box **gives, size_t *boxes, const ari_placed *t, const ar_st_entry *e,
                             const char *file)
{
    ar_status st = AR_OK;
    ar_dump_box *box = NULL;
    const size_t none[AR_ST_MAX_DIMS] = {0};
    const size_t n = t == NULL || t->boxes == 0 ? 1 : t->boxes;
    if (t != NULL && t->ndim >= 0 && t->ndim != e->ndim)
        return invalid(file, e, "its place has another number of dimensions");
    AR_TRY(ari_alloc_zero((void **)&box, n, sizeof *box, "boxes of a dump"));
    if (t != NULL && t->boxes > 0) {
        AR_TRY_TO(done, st, resolve_boxes(box, t, e, file));
    } else {
        memcpy(box->extent, e->shape, (size_t)e->ndim * sizeof *e->shape);
        if (t != NULL)
            memcpy(box->global, t->offset, sizeof t->offset);
        row_major(box->stride, e);
        if (t != NULL)
            AR_TRY_TO(done, st, check_box(box, none, t, e, file));
    }
    *gives = box;
    *boxes = n;
    box = NULL;
done:
    free(box);
    return st;
}
