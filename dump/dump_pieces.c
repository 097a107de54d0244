/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "dump/dump.h"
#include "ref/core/out.h"
#include "ref/core/size.h"

void ari_piece_fini(ari_piece *p)
{
    free(p->name);
    free(p->box);
}

/* Whether box b goes on where a ends, in the full tensor and in the file. */
static bool continues(const ar_dump_box *a, const ar_dump_box *b, int ndim, int along)
{
    if (b->at != a->at + a->extent[along] * a->stride[along])
        return false;
    for (int k = 0; k < ndim; k++) {
        const size_t start = a->global[k] + (k == along ? a->extent[k] : 0);
        if (b->global[k] != start || b->stride[k] != a->stride[k] || (k != along && b->extent[k] != a->extent[k]))
            return false;
    }
    return true;
}

void ari_piece_join_boxes(ari_piece *p, int ndim, const size_t *shape, size_t count)
{
    if (p->boxes < 2 || p->entry->count != count || count == 0)
        return;
    ar_dump_box all = p->box[0];
    for (size_t i = 1; i < p->boxes; i++) {
        int k = 0;
        while (k < ndim && !continues(&all, &p->box[i], ndim, k))
            k++;
        if (k == ndim)
            return;
        all.extent[k] += p->box[i].extent[k];
    }
    if (memcmp(all.extent, shape, (size_t)ndim * sizeof *shape) != 0)
        return;
    p->box[0] = all;
    p->boxes = 1;
}

ar_status ari_piece_add(ari_piece **added, ar_dump *d, const char *name)
{
    AR_TRY(ari_grow(&d->piece, &d->cap_pieces, d->pieces, sizeof *d->piece, "parts of a dump"));
    ari_piece *p = &d->piece[d->pieces];
    *p = (ari_piece){.name = strdup(name)};
    if (p->name == NULL)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for a tensor's name", ARI_SHOW(d->path));
    d->pieces++;
    *added = p;
    return AR_OK;
}

/* Which summand of how many a rank's partial tensor is: by its coordinates along what is summed over; without them each
 * rank is one. */
static void set_term(ari_piece *p, const ari_placement *rank, const ari_placed *t)
{
    p->partial = t->partial;
    p->term = p->rank < 0 ? 0 : (size_t)p->rank;
    if (t->partial_over == 0 || !rank->has_at)
        return;
    p->term = 0;
    p->terms = 1;
    for (size_t i = 0; i < rank->dims; i++)
        if ((t->partial_over >> i & 1u) != 0) {
            p->term = p->term * (size_t)rank->mesh[i].size + (size_t)rank->at[i];
            p->terms *= (size_t)rank->mesh[i].size;
        }
}

/* Where no shape is told: as far as the boxes reach. */
static void set_end(ari_piece *p)
{
    for (size_t i = 0; i < p->boxes; i++)
        for (int k = 0; k < p->ndim; k++) {
            const size_t end = p->box[i].global[k] + p->box[i].extent[k];
            p->shape[k] = end > p->shape[k] ? end : p->shape[k];
        }
}

static ar_status add_entry(ar_dump *d, size_t file, const ar_st_entry *e)
{
    const ari_dump_file *f = &d->file[file];
    const ari_placed *t = ari_placement_find(&f->placement, e->name);
    ari_piece *p = NULL;
    AR_TRY(ari_piece_add(&p, d, e->name));
    p->file = file;
    p->rank = f->rank;
    p->entry = e;
    p->ndim = e->ndim;
    p->told = t != NULL;
    AR_TRY(ari_placed_resolve(&p->box, &p->boxes, t, e, f->path));
    if (f->npy != NULL)
        p->box[0] = f->npy->box;
    p->has_shape = t == NULL || t->has_shape;
    if (t != NULL && t->has_shape)
        memcpy(p->shape, t->shape, sizeof p->shape);
    else
        set_end(p);
    if (t != NULL) {
        p->replica = t->replica;
        p->replicas = t->replicas;
        set_term(p, &f->placement, t);
    }
    return AR_OK;
}

/* What a placement names is there. */
static ar_status check_names(const ari_dump_file *f)
{
    for (size_t i = 0; i < f->placement.tensors; i++)
        if (ar_st_find(f->st, f->placement.tensor[i].name) == NULL)
            return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: places tensor '%s', which it does not hold",
                                ARI_SHOW(f->path), ARI_SHOW(f->placement.tensor[i].name));
    return AR_OK;
}

static int compare_pieces(const void *a, const void *b)
{
    const ari_piece *p = a, *q = b;
    const int by_name = strcmp(p->name, q->name);
    if (by_name != 0)
        return by_name;
    if (p->rank != q->rank)
        return p->rank < q->rank ? -1 : 1;
    return p->file < q->file ? -1 : p->file > q->file;
}

void ari_piece_sort(ari_piece *p, size_t n)
{
    if (n > 1)
        qsort(p, n, sizeof *p, compare_pieces);
}

size_t ari_piece_group(const ari_piece *p, size_t n)
{
    size_t same = 1;
    while (same < n && strcmp(p[0].name, p[same].name) == 0)
        same++;
    return same;
}

ar_status ari_dump_list_pieces(ar_dump *d, const ari_map *map)
{
    for (size_t i = 0; i < d->files; i++) {
        AR_TRY(check_names(&d->file[i]));
        for (size_t k = 0; k < ari_dump_entries(&d->file[i]); k++)
            AR_TRY(add_entry(d, i, ari_dump_entry(&d->file[i], k)));
    }
    ari_piece_sort(d->piece, d->pieces);
    return map == NULL ? AR_OK : ari_dump_map_pieces(d, map);
}
