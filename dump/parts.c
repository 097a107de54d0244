/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "dump/dump.h"
#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/io/safetensors.h"

/* Where one box of a part is the whole tensor in row-major order: its elements. */
static const void *whole_data(const ar_dump_tensor *t, const ar_dump_part *p)
{
    const size_t bytes = ar_dtype_bytes(t->dtype);
    size_t stride = 1;
    if (p->boxes != 1 || p->partial || (bytes == 0 && p->box->at != 0))
        return NULL;
    for (int k = t->ndim - 1; k >= 0; k--) {
        if (p->box->extent[k] != t->shape[k] || (p->box->stride[k] != stride && t->shape[k] > 1))
            return NULL;
        stride *= t->count > 0 ? t->shape[k] : 1;
    }
    return (const char *)p->entry->data + p->box->at * bytes;
}

/* --- the full shape ----------------------------------------------------------------------------------------------- */
static ar_status differ(const ar_dump *d, const ari_piece *a, const ari_piece *b)
{
    char x[24 * AR_ST_MAX_DIMS], y[24 * AR_ST_MAX_DIMS];
    ari_st_shape_text(x, sizeof x, a->ndim, a->shape);
    ari_st_shape_text(y, sizeof y, b->ndim, b->shape);
    const bool untold = !a->told && !b->told;
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: tensor '%s': %s %s by %s, %s %s by %s%s", ARI_SHOW(a->name),
                        ar_dtype_name(a->entry->dtype), x, ARI_SHOW(d->file[a->file].path),
                        ar_dtype_name(b->entry->dtype), y, ARI_SHOW(d->file[b->file].path),
                        untold ? "; parts of a tensor need a placement or a mapping that says so" : "");
}

/* The largest end over all pieces, which is within what is told. */
static ar_status find_shape(const ar_dump *d, ar_dump_tensor *t, const ari_piece *piece)
{
    const ari_piece *told = NULL;
    for (size_t i = 0; i < t->parts; i++) {
        const ari_piece *p = &piece[i];
        if (p->ndim != t->ndim || p->entry->dtype != t->dtype)
            return differ(d, piece, p);
        if (p->has_shape && told != NULL && memcmp(p->shape, told->shape, sizeof p->shape) != 0)
            return differ(d, told, p);
        told = p->has_shape && told == NULL ? p : told;
        for (int k = 0; k < t->ndim; k++)
            t->shape[k] = p->shape[k] > t->shape[k] ? p->shape[k] : t->shape[k];
    }
    for (size_t i = 0; told != NULL && i < t->parts; i++)
        if (memcmp(t->shape, told->shape, sizeof t->shape) != 0 && !piece[i].has_shape)
            for (int k = 0; k < t->ndim; k++)
                if (piece[i].shape[k] > told->shape[k])
                    return differ(d, told, &piece[i]);
    return AR_OK;
}

static ar_status count_elements(ar_dump_tensor *t, const char *path)
{
    uint64_t count = 0;
    if (!ari_st_count(&count, t->ndim, t->shape) || count > SIZE_MAX / 64)
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: tensor '%s': its full shape has too many elements",
                            ARI_SHOW(path), ARI_SHOW(t->name));
    t->count = (size_t)count;
    return AR_OK;
}

/* --- tensors ------------------------------------------------------------------------------------------------------ */
static ar_dump_part part_of(const ar_dump *d, const ari_piece *p)
{
    ar_dump_part o = {.rank = p->rank,
                      .file = d->file[p->file].path,
                      .entry = p->entry,
                      .boxes = p->boxes,
                      .box = p->box,
                      .replica = p->boxes > 0 ? p->box[0].replica : 0,
                      .replicas = 1,
                      .partial = p->partial};
    for (size_t k = 0; k < p->boxes; k++) {
        o.replica = p->box[k].replica < o.replica ? p->box[k].replica : o.replica;
        o.replicas = p->box[k].replicas > o.replicas ? p->box[k].replicas : o.replicas;
    }
    return o;
}

ar_status ari_parts_shape(ar_dump_tensor *t, const ar_dump *d, const ari_piece *piece, size_t n)
{
    *t = (ar_dump_tensor){
        .name = piece->name, .dtype = piece->entry->dtype, .ndim = piece->ndim, .order = SIZE_MAX, .parts = n};
    AR_TRY(find_shape(d, t, piece));
    return count_elements(t, d->path);
}

/* Where every rank has all of it, blocks that lie as in the full tensor are one box. Elsewhere a block may be another
 * rank's copy, and stays what it is. */
static void join_boxes(const ar_dump_tensor *t, ari_piece *piece, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (piece[i].entry->count != t->count)
            return;
    for (size_t i = 0; i < n; i++)
        ari_piece_join_boxes(&piece[i], t->ndim, t->shape, t->count);
}

static ar_status make_tensor(const ar_dump *d, ar_dump_tensor *t, ar_dump_part *part, ari_piece *piece, size_t n)
{
    AR_TRY(ari_parts_shape(t, d, piece, n));
    t->part = part;
    join_boxes(t, piece, n);
    AR_TRY(ari_parts_check(d, t, piece));
    for (size_t i = 0; i < n; i++) {
        part[i] = part_of(d, &piece[i]);
        if (part[i].replica == 0 && t->whole == NULL)
            t->whole = whole_data(t, &part[i]);
    }
    return AR_OK;
}

ar_status ari_dump_make_tensors(ar_dump *d)
{
    size_t tensors = 0;
    for (size_t i = 0; i < d->pieces; i++)
        tensors += i == 0 || strcmp(d->piece[i].name, d->piece[i - 1].name) != 0;
    AR_TRY(ari_alloc((void **)&d->tensor, tensors, sizeof *d->tensor, "tensors of a dump"));
    AR_TRY(ari_alloc((void **)&d->part, d->pieces, sizeof *d->part, "parts of a dump"));
    for (size_t i = 0, n = 0; i < d->pieces; i += n) {
        n = ari_piece_group(&d->piece[i], d->pieces - i);
        AR_TRY(make_tensor(d, &d->tensor[d->tensors], &d->part[i], &d->piece[i], n));
        d->tensors++;
    }
    return AR_OK;
}
