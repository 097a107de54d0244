/* SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "dump/dump.h"
#include "ref/core/out.h"
#include "ref/core/size.h"

/* What a mapping makes of an array: boxes of its targets point into the array, and the array is itself put together of
 * boxes of files (a placement's, or those of an array in Fortran order). One box through the other is a box again. */

/* The array's own dimension that each dimension of a target's box runs along. */
typedef struct axes {
    int of[AR_ST_MAX_DIMS];
    size_t start[AR_ST_MAX_DIMS]; /* where the box begins in the array */
} axes;

static void row_major(size_t stride[AR_ST_MAX_DIMS], int ndim, const size_t *shape)
{
    size_t step = 1;
    for (int k = ndim - 1; k >= 0; k--) {
        stride[k] = step;
        step *= shape[k];
    }
}

/* False: a dimension of the target runs along none of the array's, or two along the same. */
static bool find_axes(axes *a, const ari_map_target *t, const ar_dump_box *b, int ndim, const size_t *shape)
{
    size_t stride[AR_ST_MAX_DIMS], at = b->at;
    bool taken[AR_ST_MAX_DIMS] = {false};
    row_major(stride, ndim, shape);
    for (int k = 0; k < ndim; k++) {
        a->start[k] = at / stride[k];
        at %= stride[k];
    }
    for (int j = 0; j < t->ndim; j++) {
        int k = 0;
        while (k < ndim && (taken[k] || shape[k] < 2 || stride[k] != b->stride[j]))
            k++;
        a->of[j] = b->extent[j] == 1 ? -1 : k;
        if (b->extent[j] != 1 && (k == ndim || b->extent[j] > shape[k] - a->start[k]))
            return false;
        if (b->extent[j] != 1)
            taken[k] = true;
    }
    return true;
}

/* The part of target box b that lies in `held`, a box of the array. False: nothing does. */
static bool through(ar_dump_box *out, const ari_map_target *t, const ar_dump_box *b, const ar_dump_box *held,
                    const axes *a, int ndim)
{
    size_t from[AR_ST_MAX_DIMS], extent[AR_ST_MAX_DIMS];
    *out = (ar_dump_box){.at = held->at};
    for (int k = 0; k < ndim; k++) {
        size_t along = 1;
        for (int j = 0; j < t->ndim; j++)
            along = a->of[j] == k ? b->extent[j] : along;
        if (!ari_overlap(&from[k], &extent[k], a->start[k], along, held->global[k], held->extent[k]))
            return false;
        out->at += (from[k] - held->global[k]) * held->stride[k];
    }
    for (int j = 0; j < t->ndim; j++) {
        const int k = a->of[j];
        out->global[j] = b->global[j] + (k < 0 ? 0 : from[k] - a->start[k]);
        out->extent[j] = k < 0 ? 1 : extent[k];
        out->stride[j] = k < 0 ? 0 : held->stride[k];
    }
    return true;
}

/* Whether the piece is the array as it lies in the file: then a target's boxes are boxes of the file. */
static bool is_plain(const ari_piece *p, const ar_st_entry *array)
{
    size_t stride[AR_ST_MAX_DIMS];
    if (p->boxes != 1 || p->entry->count != array->count)
        return false;
    row_major(stride, array->ndim, array->shape);
    for (int k = 0; k < array->ndim; k++)
        if (p->box->extent[k] != array->shape[k] || p->box->stride[k] != stride[k])
            return false;
    return true;
}

static bool is_empty(const ar_dump_box *b, int ndim)
{
    bool empty = false;
    for (int k = 0; k < ndim; k++)
        empty |= b->extent[k] == 0;
    return empty;
}

/* The boxes of a piece that a target is of, in `box`, which has room for them; how many. */
static ar_status compose(ar_dump_box *box, size_t *n, const ari_piece *p, const ar_st_entry *array,
                         const ari_map_target *t)
{
    const bool plain = is_plain(p, array);
    for (size_t i = 0; i < t->boxes; i++) {
        axes a = {{0}, {0}};
        if (plain) {
            box[*n] = t->box[i];
            box[(*n)++].at += p->box->at;
            continue;
        }
        if (array->count == 0 || is_empty(&t->box[i], t->ndim))
            continue;
        if (!find_axes(&a, t, &t->box[i], array->ndim, array->shape))
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "InvalidMapping: tensor '%s': its rule cannot be applied to parts with a placement",
                                ARI_SHOW(array->name));
        for (size_t k = 0; k < p->boxes; k++)
            *n += through(&box[*n], t, &t->box[i], &p->box[k], &a, array->ndim);
    }
    return AR_OK;
}

static ar_status add_target(ar_dump *d, const ari_piece *p, const ar_st_entry *array, const ari_map_target *t)
{
    ari_piece *o = NULL;
    size_t most = 0, n = 0;
    AR_TRY(ari_mul_size(&most, p->boxes, t->boxes));
    AR_TRY(ari_piece_add(&o, d, t->name));
    AR_TRY(ari_alloc((void **)&o->box, most, sizeof *o->box, "boxes of a dump"));
    AR_TRY(compose(o->box, &n, p, array, t));
    o->boxes = n;
    o->file = p->file;
    o->rank = p->rank;
    o->entry = p->entry;
    o->told = true;
    o->ndim = t->ndim;
    memcpy(o->shape, t->shape, (size_t)t->ndim * sizeof *t->shape);
    o->has_shape = true;
    o->replica = d->mapped ? 0 : p->replica; /* a mapping does not number copies: they are whoever holds the same */
    o->replicas = d->mapped ? 0 : p->replicas;
    o->more_copies = true;
    o->partial = t->partial || p->partial;
    o->term = t->partial ? t->term : p->term;
    o->terms = t->partial ? t->terms : p->terms;
    return AR_OK;
}

/* The file's own array of this name, of any file of the rank. */
static const ar_st_entry *peer(void *user, int rank, const char *name)
{
    const ar_dump *d = user;
    size_t low = 0, high = d->files;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (d->file[middle].rank < rank)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < d->files && d->file[low].rank == rank; low++) {
        const ari_dump_file *f = &d->file[low];
        const ar_st_entry *e = f->st != NULL                      ? ar_st_find(f->st, name)
                               : strcmp(f->array.name, name) == 0 ? &f->array
                                                                  : NULL;
        if (e != NULL)
            return e;
    }
    return NULL;
}

/* n pieces of one array: of one file, where the mapping says whose it is, else of the full tensor. */
static ar_status map_array(ar_dump *d, const ari_map *map, const ari_piece *p, size_t n)
{
    ar_dump_tensor t;
    ari_map_target *target = NULL;
    size_t targets = 0;
    AR_TRY(ari_parts_shape(&t, d, p, n));
    ar_st_entry array = {.name = t.name, .dtype = t.dtype, .ndim = t.ndim, .count = t.count};
    memcpy(array.shape, t.shape, sizeof array.shape);
    array.bytes = t.count * ar_dtype_bits(t.dtype) / 8;
    array.data = p->entry->data;
    AR_TRY(ari_map_apply(map, d->mapped ? p->rank : -1, &array, d->mapped ? peer : NULL, d, &target, &targets));
    ar_status st = AR_OK;
    for (size_t k = 0; k < targets && st == AR_OK; k++)
        for (size_t i = 0; i < n && st == AR_OK; i++)
            st = add_target(d, &p[i], &array, &target[k]);
    ari_map_targets_free(target, targets);
    return st;
}

ar_status ari_dump_map_pieces(ar_dump *d, const ari_map *map)
{
    ari_piece *old = d->piece;
    const size_t n = d->pieces;
    ar_status st = AR_OK;
    d->piece = NULL;
    d->pieces = d->cap_pieces = 0;
    for (size_t i = 0, same = 0; i < n && st == AR_OK; i += same) {
        same = d->mapped ? 1 : ari_piece_group(&old[i], n - i);
        st = map_array(d, map, &old[i], same);
    }
    for (size_t i = 0; i < n; i++)
        ari_piece_fini(&old[i]);
    free(old);
    ari_piece_sort(d->piece, d->pieces);
    return st;
}
