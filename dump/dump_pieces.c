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

/* The box of the full tensor's elements [offset, offset + shape), row-major in the file. */
static ar_dump_box whole_box(const ar_st_entry *e)
{
    ar_dump_box b = {.replicas = 1};
    size_t stride = 1;
    for (int k = e->ndim - 1; k >= 0; k--) {
        b.extent[k] = e->shape[k];
        b.stride[k] = stride;
        stride *= e->count > 0 ? e->shape[k] : 1; /* of an empty tensor the product of some extents may wrap */
    }
    return b;
}

static ar_status add_piece(ari_piece **added, ar_dump *d, const char *name)
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

static ar_status add_whole(ar_dump *d, size_t file, const ar_st_entry *e)
{
    ari_piece *p = NULL;
    AR_TRY(add_piece(&p, d, e->name));
    p->file = file;
    p->rank = d->file[file].rank;
    p->entry = e;
    p->ndim = e->ndim;
    memcpy(p->shape, e->shape, sizeof p->shape);
    p->has_shape = true;
    AR_TRY(ari_alloc((void **)&p->box, 1, sizeof *p->box, "boxes of a dump"));
    p->box[0] = whole_box(e);
    p->boxes = 1;
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

ar_status ari_dump_list_pieces(ar_dump *d, const char *map)
{
    if (map != NULL)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: mapping files are not read yet", ARI_SHOW(map));
    for (size_t i = 0; i < d->files; i++)
        for (size_t k = 0; k < ari_dump_entries(&d->file[i]); k++)
            AR_TRY(add_whole(d, i, ari_dump_entry(&d->file[i], k)));
    if (d->pieces > 1)
        qsort(d->piece, d->pieces, sizeof *d->piece, compare_pieces);
    return AR_OK;
}
