/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/dump.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/io/safetensors_private.h"

static ar_status add_piece(ari_piece **added, ar_dump *d, const char *name)
{
    AR_TRY(ARI_GROW_IN(&d->arena, &d->piece, &d->cap_pieces, d->pieces, "parts of a dump"));
    ari_piece *p = &d->piece[d->pieces++];
    *p = (ari_piece){.name = NULL};
    *added = p;
    return ari_arena_text(&d->arena, &p->name, name, "a tensor's name");
}

/* Sets which summand of a partial tensor the rank holds: by its coordinates along the summed dimensions, or without
 * coordinates one summand per rank. */
static void set_term(ari_piece *p, const ari_placement *rank, const ari_placed *t)
{
    p->partial = t->partial;
    p->term = p->rank < 0 ? 0 : (size_t)p->rank;
    if (t->partial_over != 0 && rank->has_at)
        ari_piece_set_term(p, &rank->mesh, rank->coords, t->partial_over);
}

/* Sets the end of the boxes as the shape if no shape is stated. */
static void set_end(ari_piece *p)
{
    for (size_t i = 0; i < p->boxes; i++)
        for (int k = 0; k < p->ndim; k++) {
            const size_t end = p->box[i].global[k] + p->box[i].extent[k];
            p->shape[k] = end > p->shape[k] ? end : p->shape[k];
        }
}

static ar_status add_entry(ar_dump *d, size_t file, const ar_st_entry *e, bool is_mapped)
{
    const ari_dump_file *f = &d->file[file];
    const ari_placed *t = ari_placement_find(&f->placement, e->name);
    ari_piece *p = NULL;
    AR_TRY(add_piece(&p, d, e->name));
    p->file = file;
    p->rank = f->rank;
    p->entry = e;
    p->ndim = e->ndim;
    p->is_placed = t != NULL && !(is_mapped && t->assumed);
    AR_TRY(ari_placed_resolve(&p->box, &p->boxes, &d->arena, t, e, f->path));
    if (f->npy != NULL)
        p->box[0] = f->npy->box;
    p->sample_rows = t != NULL ? (size_t)t->sample_rows : 0;
    if (t != NULL && t->left_out != NULL) /* the placement ends before the piece */
        AR_TRY(ari_arena_text(&d->arena, &p->left_out, t->left_out, "the placement of a tensor"));
    p->has_shape = t == NULL || t->has_shape;
    if (t != NULL && t->has_shape)
        memcpy(p->shape, t->shape, sizeof p->shape);
    else
        set_end(p);
    if (t != NULL && (p->is_placed || !is_mapped)) {
        p->replica = t->replica;
        p->replicas = t->replicas;
        set_term(p, &f->placement, t);
    }
    return AR_OK;
}

/* Checks that the tensors named by a placement exist. */
static ar_status check_names(const ari_dump_file *f)
{
    for (size_t i = 0; i < f->placement.tensors; i++)
        if (ari_st_find(f->st, f->placement.tensor[i].name) == NULL)
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
    ARI_ASCENDING(p->rank, q->rank);
    return p->file < q->file ? -1 : p->file > q->file;
}

static void sort_pieces(ari_piece *p, size_t n)
{
    ARI_SORT(p, n, compare_pieces);
}

/* --- mappings ----------------------------------------------------------------------------------------------------- */
/* Applies a mapping to an array. The boxes of the mapping's targets point into the array, which is itself combined from
 * boxes of files (of a placement, or of an array in Fortran order). The intersection of two boxes is a box. */

/* Writes the boxes of a piece that make up a target to `box`, which has sufficient space, and counts them. */
static void compose(ar_dump_box *box, size_t *n, const ari_piece *p, const ar_st_entry *array, const ari_piece *t)
{
    size_t stride[AR_ST_MAX_DIMS];
    ari_row_major(stride, array->ndim, array->shape);
    for (size_t i = 0; i < t->boxes && array->count > 0; i++) {
        const ar_dump_box *b = &t->box[i];
        size_t start[AR_ST_MAX_DIMS] = {0}, offset = b->offset; /* position in the array where the box begins */
        for (int k = 0; k < array->ndim; k++) {
            start[k] = offset / stride[k];
            offset %= stride[k];
        }
        for (size_t k = 0; k < p->boxes; k++) {
            ar_dump_box cut;
            if (!ari_dump_box_cut(&cut, &p->box[k], array->ndim, start, b->extent))
                continue;
            for (int d = 0; d < array->ndim; d++)
                cut.global[d] = cut.global[d] - start[d] + b->global[d];
            box[(*n)++] = cut;
        }
    }
}

static ar_status add_target(ar_dump *d, const ari_piece *p, const ar_st_entry *array, const ari_piece *t)
{
    ari_piece *o = NULL;
    size_t max_boxes = 0;
    AR_TRY(ari_mul_size(&max_boxes, p->boxes, t->boxes));
    AR_TRY(add_piece(&o, d, t->name));
    char *name = o->name;
    *o = *t;
    o->name = name;
    o->boxes = 0;
    o->box = NULL;
    o->file = p->file;
    o->rank = p->rank;
    o->entry = p->entry;
    if (p->is_placed || p->rank < 0) { /* a mapping does not number copies: ranks with equal boxes hold copies */
        o->replica = p->replica;
        o->replicas = p->replicas;
    }
    if (!t->partial) {
        o->partial = p->partial;
        o->term = p->term;
        o->terms = p->terms;
    }
    AR_TRY(ARI_TAKE(&o->box, &d->arena, max_boxes, "boxes of a dump"));
    compose(o->box, &o->boxes, p, array, t);
    return AR_OK;
}

/* Returns the number of elements that two boxes share at the same position in the file. */
static size_t agreeing(const ar_dump_box *a, const ar_dump_box *b, int ndim)
{
    ar_dump_box x, y;
    if (!ari_dump_box_cut(&x, a, ndim, b->global, b->extent) || !ari_dump_box_cut(&y, b, ndim, a->global, a->extent))
        return 0;
    for (int k = 0; k < ndim; k++) {
        if (x.extent[k] > 1 && x.stride[k] != y.stride[k])
            return 0;
    }
    return x.offset == y.offset ? ari_dump_box_count(ndim, &x) : 0;
}

/* Compares the position a given by a rule with b given by a file; the file may leave open which summand it has. */
static bool same_place(const ari_piece *a, const ari_piece *b)
{
    size_t count[2] = {0, 0}, agreed = 0;
    if (strcmp(a->name, b->name) != 0 || a->ndim != b->ndim || a->partial != b->partial ||
        memcmp(a->shape, b->shape, sizeof a->shape) != 0 || (a->partial && b->terms > 0 && a->term != b->term))
        return false;
    for (size_t i = 0; i < a->boxes; i++)
        for (size_t k = 0; k < b->boxes; k++)
            agreed += agreeing(&a->box[i], &b->box[k], a->ndim);
    for (size_t i = 0; i < a->boxes; i++)
        count[0] += ari_dump_box_count(a->ndim, &a->box[i]);
    for (size_t k = 0; k < b->boxes; k++)
        count[1] += ari_dump_box_count(b->ndim, &b->box[k]);
    return agreed == count[0] && agreed == count[1];
}

/* "a summand of [0:2, 0:4] of [4, 4]". */
static const char *place_text(char *text, size_t cap, const ari_piece *p)
{
    char region[ARI_REGION_TEXT] = "nothing";
    if (p->boxes > 0)
        ari_region_text(region, p->ndim, p->box->global, p->box->extent);
    snprintf(text, cap, "%s%.150s%s of %s", p->partial ? "a summand of " : "", region, p->boxes > 1 ? " and more" : "",
             ARI_SHOW_SHAPE(p->ndim, p->shape));
    return text;
}

/* Checks that a file's placement and the rule agree. file_target: the n targets that the rule gives for the file's
 * placement. */
static ar_status check_agreement(const ar_dump *d, ari_map *map, const ari_piece *p, const ari_piece *file_target,
                                 size_t n)
{
    const ari_map_rule *rule = ari_map_places(map, p->name);
    ari_piece *target = NULL;
    size_t targets = 0;
    if (!rule)
        return AR_OK;
    AR_TRY(ari_map_apply(map, &(ari_map_source){.rank = p->rank, .entry = p->entry}, &target, &targets));
    for (size_t i = 0; i < n && i < targets; i++) {
        char by_rule[256], by_file[256];
        if (!same_place(&target[i], &file_target[i]))
            return ari_map_bad(map, rule,
                               "tensor '%s' of rank %d: by the rule it is %s, by %s itself %s; one of them is wrong",
                               ARI_SHOW(p->name), p->rank, place_text(by_rule, sizeof by_rule, &target[i]),
                               ARI_SHOW(d->file[p->file].path), place_text(by_file, sizeof by_file, &file_target[i]));
    }
    return AR_OK;
}

/* Maps a piece by the rule of its tensor. array: full array that p is a part of with a known position, so the rule's
 * placement applies to the full tensor; NULL: a rank's tensor whose position only the mapping knows. */
static ar_status map_piece(ar_dump *d, ari_map *map, const ari_piece *p, const ar_st_entry *array)
{
    const ari_map_source source = {.rank = map->mesh.ndim > 0 ? p->rank : -1,
                                   .entry = array ? array : p->entry,
                                   .is_full = array && map->mesh.ndim > 0 && p->rank >= 0};
    ari_piece *target = NULL;
    size_t targets = 0;
    const size_t before = d->pieces;
    AR_TRY(ari_map_apply(map, &source, &target, &targets));
    for (size_t k = 0; k < targets; k++)
        AR_TRY(add_target(d, p, source.entry, &target[k]));
    return source.is_full ? check_agreement(d, map, p, &d->piece[before], d->pieces - before) : AR_OK;
}

/* Maps n pieces of one name. */
static ar_status map_array(ar_dump *d, ari_map *map, const ari_piece *p, size_t n)
{
    ar_dump_tensor t = {0};
    ar_st_entry array = {0};
    for (size_t i = 0; i < n; i++) {
        if (map->mesh.ndim > 0 && p[i].rank >= 0 && !p[i].is_placed) {
            AR_TRY(map_piece(d, map, &p[i], NULL));
            continue;
        }
        if (array.name == NULL) {
            AR_TRY(ari_parts_shape(&t, d, p, n));
            array = (ar_st_entry){.name = t.name, .dtype = t.dtype, .ndim = t.ndim, .count = t.count};
            memcpy(array.shape, t.shape, sizeof array.shape);
            array.bytes = t.count * ari_dtype_bits(t.dtype) / 8;
            array.data = p->entry->data;
        }
        AR_TRY(map_piece(d, map, &p[i], &array));
    }
    return AR_OK;
}

static ar_status check_rules_match(const ar_dump *d, const ari_map *map)
{
    for (size_t i = 0; i < map->rules; i++) {
        ari_map_match found;
        size_t k = 0;
        while (k < d->pieces && !ari_map_glob_match(map->rule[i].match, d->piece[k].name, &found))
            k++;
        if (k == d->pieces)
            return ari_map_bad(map, &map->rule[i], "matches none of the tensors of %s, as each rule must (all_matched)",
                               ARI_SHOW(d->path));
    }
    return AR_OK;
}

static ar_status map_pieces(ar_dump *d, ari_map *map)
{
    ari_piece *old = d->piece;
    const size_t n = d->pieces;
    d->piece = NULL;
    d->pieces = d->cap_pieces = 0;
    for (size_t i = 0, group_size = 0; i < n; i += group_size) {
        group_size = ari_piece_group(&old[i], n - i);
        AR_TRY(map_array(d, map, &old[i], group_size));
    }
    sort_pieces(d->piece, d->pieces);
    return AR_OK;
}

ar_status ari_dump_list_pieces(ar_dump *d, ari_map *map)
{
    for (size_t i = 0; i < d->files; i++) {
        AR_TRY(check_names(&d->file[i]));
        for (size_t k = 0; k < ari_dump_entries(&d->file[i]); k++)
            AR_TRY(add_entry(d, i, ari_dump_entry(&d->file[i], k), map != NULL));
    }
    sort_pieces(d->piece, d->pieces);
    if (map != NULL && d->all_matched)
        AR_TRY(check_rules_match(d, map));
    return map == NULL ? AR_OK : map_pieces(d, map);
}
