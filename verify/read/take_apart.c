/* SPDX-License-Identifier: Apache-2.0 */
/* Derives tensors from tensors of a dump: boxes under new names, or the same data in another shape or order. Values are
 * not copied; only the boxes of the parts change. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "verify/read/dump.h"
#include "verify/read/roles.h"

/* --- boxes -------------------------------------------------------------------------------------------------------- */

/* Removes the first dimensions, each of which has one element. */
static void drop_dims(ar_dump_box *b, int ndim, int drop)
{
    for (int d = 0; d + drop < ndim; d++) {
        b->global[d] = b->global[d + drop];
        b->extent[d] = b->extent[d + drop];
        b->stride[d] = b->stride[d + drop];
    }
}

/* Splits the first dimension into two; the second one has `fold` elements. Returns false if the box contains part of
 * such a row. */
static bool unfold_box(ar_dump_box *b, int ndim, size_t fold)
{
    if (b->global[0] % fold != 0 || b->extent[0] % fold != 0)
        return false;
    for (int d = ndim; d > 0; d--) {
        b->global[d] = b->global[d - 1];
        b->extent[d] = b->extent[d - 1];
        b->stride[d] = b->stride[d - 1];
    }
    b->global[0] /= fold;
    b->extent[0] /= fold;
    b->stride[0] *= fold;
    b->global[1] = 0;
    b->extent[1] = fold;
    return true;
}

/* Restricts the box to elements 0, every, 2*every, .. of the last sharded dimension. Returns false if nothing
 * remains. */
static bool thin_box(ar_dump_box *b, int d, size_t every)
{
    const size_t skip = (every - b->global[d] % every) % every;
    if (skip >= b->extent[d])
        return false;
    b->offset += skip * b->stride[d];
    b->global[d] = (b->global[d] + skip) / every;
    b->extent[d] = (b->extent[d] - skip + every - 1) / every;
    b->stride[d] *= every;
    return true;
}

static void exchange(size_t x[2])
{
    const size_t saved = x[0];
    x[0] = x[1];
    x[1] = saved;
}

/* Intersects a box with a cut. *has_overlap: whether they overlap. Returns false if the box cannot be cut there. */
static bool cut_box(ar_dump_box *dst, bool *has_overlap, const ar_dump_box *src, int ndim, const ari_tensor_cut *c)
{
    *has_overlap = ari_dump_box_cut(dst, src, ndim, c->start, c->extent);
    for (int d = 0; d < ndim && *has_overlap; d++)
        dst->global[d] -= c->start[d];
    if (*has_overlap && c->every > 0)
        *has_overlap = thin_box(dst, ndim - 1, c->every);
    drop_dims(dst, ndim, c->drop);
    if (c->turned) {
        exchange(dst->global);
        exchange(dst->extent);
        exchange(dst->stride);
    }
    return !*has_overlap || c->fold == 0 || unfold_box(dst, ndim - c->drop, c->fold);
}

static void set_shape(ar_dump_tensor *t, const ar_dump_tensor *src, const ari_tensor_cut *c)
{
    t->ndim = src->ndim - c->drop + (c->fold > 0);
    for (int d = 0; d < t->ndim; d++) {
        const int src_dim = c->fold > 0 && d > 0 ? d - 1 : d;
        t->shape[d] = c->extent[src_dim + c->drop];
    }
    if (c->fold > 0) {
        t->shape[0] /= c->fold;
        t->shape[1] = c->fold;
    }
    if (c->every > 0)
        t->shape[t->ndim - 1] = (t->shape[t->ndim - 1] + c->every - 1) / c->every;
    if (c->turned)
        exchange(t->shape);
    t->count = ari_volume(t->shape, t->ndim);
    t->whole = c->drop == 0 && t->count == src->count ? src->whole : NULL;
}

/* Cuts a tensor. *fits false: a box cannot be cut. Parts that do not overlap with the cut are left out. */
static ar_status cut_tensor(ar_dump_tensor *t, ari_arena *arena, bool *fits, const ar_dump_tensor *src,
                            const ari_tensor_cut *c)
{
    size_t boxes = 0;
    char *name = NULL;
    ar_dump_part *part = NULL;
    ar_dump_box *box = NULL;
    for (size_t i = 0; i < src->parts; i++)
        boxes += src->part[i].boxes;
    AR_TRY(ARI_TAKE(&part, arena, src->parts, "parts of a tensor"));
    AR_TRY(ARI_TAKE(&box, arena, boxes, "parts of a tensor"));
    AR_TRY(ari_arena_text(arena, &name, c->name, "a tensor's name"));
    *t = (ar_dump_tensor){.name = name, .dtype = src->dtype, .order = src->order, .part = part};
    set_shape(t, src, c);
    for (size_t i = 0; i < src->parts; i++) {
        ar_dump_part *p = &part[t->parts];
        *p = src->part[i];
        p->box = box;
        p->boxes = 0;
        for (size_t k = 0; k < src->part[i].boxes; k++) {
            bool has_overlap = false;
            *fits = *fits && cut_box(&box[p->boxes], &has_overlap, &src->part[i].box[k], src->ndim, c);
            p->boxes += has_overlap;
        }
        box += p->boxes;
        t->parts += p->boxes > 0;
    }
    return AR_OK;
}

ar_status ari_tensor_cuts_add(ari_tensor_cuts *cuts, const ar_dump_tensor *t, const char *name, const char *rest)
{
    AR_TRY(ARI_GROW_IN(cuts->arena, &cuts->cut, &cuts->capacity, cuts->n, "the list of tensors"));
    ari_tensor_cut *c = &cuts->cut[cuts->n];
    *c = (ari_tensor_cut){.drop = 0};
    memcpy(c->extent, t->shape, sizeof c->extent);
    if (snprintf(c->name, sizeof c->name, "%s%s", name, rest) >= (int)sizeof c->name)
        return ar_error_set(AR_ERR_OVERFLOW, "tensor '%s': the name of a part of it has more than %zu bytes",
                            ARI_SHOW(t->name), sizeof c->name - 1);
    cuts->n++;
    return AR_OK;
}

void ari_tensor_cut_expert(ari_tensor_cut *c, int ndim, size_t expert, size_t row, size_t rows, size_t every)
{
    const int d = every > 0 ? ndim - 1 : 1;
    c->drop = 1;
    c->start[0] = expert;
    c->extent[0] = 1;
    c->start[d] = row;
    c->extent[d] = every > 0 ? c->extent[d] - row : rows;
    c->every = every;
    c->turned = every > 0 && ndim == 3;
}

/* --- a dump ------------------------------------------------------------------------------------------------------- */

typedef struct taking {
    ar_dump_tensor *tensor; /* the next free tensors of the dump */
    size_t tensors, cap_tensors;
    ari_arena *arena; /* the dump's arena, for the tensors' memory */
    bool any;         /* some tensor was cut */
} taking;

static ar_status keep_tensor(taking *k, const ar_dump_tensor *t)
{
    AR_TRY(ARI_GROW_IN(k->arena, &k->tensor, &k->cap_tensors, k->tensors, "the list of tensors"));
    k->tensor[k->tensors++] = *t;
    return AR_OK;
}

/* Applies all cuts to a tensor, or none. */
static ar_status take_all(taking *k, const ar_dump_tensor *t, const ari_tensor_cuts *cuts)
{
    const size_t tensors = k->tensors;
    bool fits = cuts->n > 0;
    for (size_t i = 0; i < cuts->n && fits; i++) {
        ar_dump_tensor result;
        AR_TRY(cut_tensor(&result, k->arena, &fits, t, &cuts->cut[i]));
        AR_TRY(keep_tensor(k, &result));
    }
    k->any = k->any || fits;
    if (fits)
        return AR_OK;
    k->tensors = tensors; /* the new tensors live as long as the dump */
    return keep_tensor(k, t);
}

ar_status ari_dump_split(ar_dump *d, ari_tensor_cuts_of cuts_of, void *user)
{
    taking k = {.arena = &d->arena};
    ari_tensor_cuts cuts = {.arena = &d->arena};
    for (size_t i = 0; i < d->tensors; i++) {
        cuts.n = 0;
        AR_TRY(cuts_of(user, &d->tensor[i], &cuts));
        AR_TRY(take_all(&k, &d->tensor[i], &cuts));
    }
    if (!k.any)
        return AR_OK;
    ARI_SORT(k.tensor, k.tensors, ari_by_name);
    d->tensor = k.tensor;
    d->tensors = k.tensors;
    return AR_OK;
}

/* --- samples ------------------------------------------------------------------------------------------------------ */

/* Splits a box into the boxes of its samples, each at its new position. Returns their number. */
static size_t split_box(ar_dump_box *dst, const ar_dump_box *src, size_t rows, const size_t *place)
{
    size_t n = 0;
    for (size_t row = src->global[0], end = row + src->extent[0]; row < end; n++) {
        const size_t sample_end = (row / rows + 1) * rows < end ? (row / rows + 1) * rows : end;
        dst[n] = *src;
        dst[n].offset = src->offset + (row - src->global[0]) * src->stride[0];
        dst[n].global[0] = place[row / rows] * rows + row % rows;
        dst[n].extent[0] = sample_end - row;
        row = sample_end;
    }
    return n;
}

static ar_status reorder_tensor(ar_dump_tensor *t, const size_t *place, ari_arena *arena)
{
    size_t boxes = 0;
    ar_dump_part *part = NULL;
    ar_dump_box *box = NULL;
    for (size_t i = 0; i < t->parts; i++)
        for (size_t b = 0; b < t->part[i].boxes; b++)
            boxes += t->part[i].box[b].extent[0] / t->sample_rows + 2;
    AR_TRY(ARI_TAKE(&part, arena, t->parts, t->name));
    AR_TRY(ARI_TAKE(&box, arena, boxes, t->name));
    for (size_t i = 0; i < t->parts; i++) {
        ar_dump_part *p = &part[i];
        *p = t->part[i];
        p->box = box;
        p->boxes = 0;
        for (size_t b = 0; b < t->part[i].boxes; b++)
            p->boxes += split_box(&box[p->boxes], &t->part[i].box[b], t->sample_rows, place);
        box += p->boxes;
    }
    t->part = part;
    t->whole = NULL;
    t->reordered = true;
    return AR_OK;
}

ar_status ari_dump_reorder(ar_dump *d, const ari_sample_order *order, size_t orders)
{
    for (size_t i = 0; i < d->tensors && orders > 0; i++) {
        ar_dump_tensor *t = &d->tensor[i];
        const ari_order_key key = ari_order_of(t->name, d->path);
        if (!strchr("fb", key.pass) || t->sample_rows == 0 || t->ndim == 0)
            continue;
        for (size_t k = 0; k < orders && !t->reordered; k++) {
            if (order[k].step == key.step && t->shape[0] == order[k].samples * t->sample_rows)
                AR_TRY(reorder_tensor(t, order[k].place, &d->arena));
        }
    }
    return AR_OK;
}
