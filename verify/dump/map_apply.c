/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "verify/dump/map.h"

/* --- the rule ----------------------------------------------------------------------------------------------------- */
/* True if a rule applies to this rank's coordinates. */
static bool is_at(const ari_map *m, const ari_map_rule *r, const ari_map_place *p)
{
    for (int d = 0; d < m->mesh.ndim; d++) {
        const json_t *list = r->at_list[d];
        bool found = !r->at[d] || (p->rank >= 0 && json_is_integer(list) && json_integer_value(list) == p->at[d]);
        for (size_t i = 0; i < json_array_size(list) && p->rank >= 0; i++)
            found = found || json_integer_value(json_array_get(list, i)) == p->at[d];
        if (!found)
            return false;
    }
    return true;
}

static const ari_map_rule *find_rule(ari_map_place *p)
{
    for (size_t i = 0; i < p->m->rules; i++) {
        const ari_map_rule *r = &p->m->rule[i];
        if (is_at(p->m, r, p) && ari_map_glob_match(&r->glob, p->entry->name, &p->match))
            return r;
    }
    return NULL;
}

static ar_status check_fit(const ari_map_place *p)
{
    const ari_map_rule *r = p->r;
    const int ndim = p->entry->ndim;
    const int left = ndim - (r->unstack != NULL);
    if (r->shape_dims > 0 && r->shape_dims != ndim)
        return ari_map_misfit(p, "has %d dimensions, the rule's shape has %d", ndim, r->shape_dims);
    if (r->transpose && left < 2)
        return ari_map_misfit(p, "has %d dimensions, there are no two to transpose", left);
    if (r->permuted > 0 && r->permuted != left)
        return ari_map_misfit(p, "has %d dimensions, 'permute' has %d", left, r->permuted);
    if (p->rank < 0 && (r->splits > 0 || r->partial != 0))
        return ari_map_misfit(p, "is divided over ranks, but its file is no rank's: key 'files' tells which is");
    return AR_OK;
}

/* --- packed tensors ----------------------------------------------------------------------------------------------- */

/* Names of modules that hold q, k and v, or gate and up, side by side: those that anyrank.capture refuses too.
 * Megatron's linear_qkv is none of them: its heads alternate, and one cut goes straight through. */
static const char *const packed_names[] = {"c_attn", "qkv_proj",       "Wqkv",         "query_key_value",
                                           "qkv",    "in_proj_weight", "in_proj_bias", "gate_up_proj"};

/* True if one of the last two parts of a name is such a module's: "h.0.attn.c_attn.weight:grad". The gradient of its
 * input is not packed. */
static bool looks_packed(const char *name)
{
    const size_t value = strcspn(name, "@"), n = strcspn(name, ":");
    const char *end = name + (n < value ? n : value);
    if (value >= 4 && memcmp(name + value - 4, ":bwd", 4) == 0)
        return false;
    for (int parts = 0; parts < 2 && end > name; parts++) {
        const char *begin = end;
        while (begin > name && begin[-1] != '.')
            begin--;
        for (size_t i = 0; i < sizeof packed_names / sizeof *packed_names; i++) {
            if ((size_t)(end - begin) == strlen(packed_names[i]) &&
                memcmp(begin, packed_names[i], (size_t)(end - begin)) == 0)
                return true;
        }
        end = begin > name ? begin - 1 : name;
    }
    return false;
}

/* A rank has a piece of each block, which one cut straight across does not give it. */
static ar_status check_packed(const ari_map_place *p, const char *target)
{
    const ari_map_rule *r = p->r;
    bool cut = false;
    for (size_t i = 0; i < r->splits; i++) {
        const ar_mesh_dim *d = &p->m->mesh.dim[r->split[i].mesh];
        cut = cut || (strcmp(d->name, "tp") == 0 && d->size > 1);
    }
    if (!cut || r->blocks > 0 || r->straight || !(looks_packed(p->entry->name) || looks_packed(target)))
        return AR_OK;
    return ari_map_misfit(
        p, "looks like several tensors packed in one, of which each rank of tp has a piece; say their "
           "relative sizes, such as \"blocks\": [1, 1, 1], or \"blocks\": null where one cut goes straight "
           "through all of it");
}

/* --- one target --------------------------------------------------------------------------------------------------- */
/* A full tensor in the order of the file's dimensions: where each one's elements stand. */
typedef struct view {
    int dims;
    int dim[AR_ST_MAX_DIMS]; /* which of the file's */
    const ari_map_runs *runs[AR_ST_MAX_DIMS];
    size_t full[AR_ST_MAX_DIMS];
    size_t at; /* the file's element of index 0 of the dimensions that are left out */
} view;

void ari_piece_set_term(ari_piece *p, const ar_mesh *mesh, const int *at, unsigned over)
{
    p->partial = over != 0;
    p->term = 0;
    p->terms = 1;
    for (int d = 0; d < mesh->ndim; d++) {
        if ((over >> d & 1u) == 0)
            continue;
        p->term = p->term * (size_t)mesh->dim[d].size + (size_t)at[d];
        p->terms *= (size_t)mesh->dim[d].size;
    }
}

/* Dimension i of the full tensor is which of the view's. */
static int permuted(const ari_map_rule *r, int i, int dims)
{
    if (r->permuted > 0)
        return r->permute[i];
    return r->transpose && i >= dims - 2 ? 2 * dims - 3 - i : i;
}

/* A box for each choice of a run in every dimension. */
static ar_status fill_boxes(const ari_map_place *p, const view *v, ari_piece *t)
{
    size_t stride[AR_ST_MAX_DIMS], n = 1;
    for (int k = 0; k < v->dims; k++)
        AR_TRY(ari_mul_size(&n, n, v->runs[k]->n));
    if (n > ARI_MAP_BOXES)
        return ari_map_misfit(p, "would be %zu pieces, at most %d are supported", n, ARI_MAP_BOXES);
    AR_TRY(ARI_TAKE(&t->box, p->arena, n, "the pieces of a tensor"));
    t->boxes = n;
    ari_row_major(stride, p->entry->ndim, p->entry->shape);
    for (size_t b = 0; b < n; b++) {
        ari_map_run run[AR_ST_MAX_DIMS];
        ar_dump_box *box = &t->box[b];
        size_t rest = b;
        box->at = v->at;
        for (int k = v->dims - 1; k >= 0; k--) {
            run[k] = v->runs[k]->run[rest % v->runs[k]->n];
            rest /= v->runs[k]->n;
            box->at += run[k].local * stride[v->dim[k]];
        }
        for (int i = 0; i < v->dims; i++) {
            const int k = permuted(p->r, i, v->dims);
            box->global[i] = run[k].full;
            box->extent[i] = run[k].count;
            box->stride[i] = stride[v->dim[k]];
        }
    }
    return AR_OK;
}

static ar_status name_target(const ari_map_place *p, const char *pattern, size_t index, char **name)
{
    const char *problem = NULL;
    if (pattern == NULL)
        return ari_arena_text(p->arena, name, p->entry->name, "a name");
    const ar_status st = ari_map_fill(name, pattern, p, index, &problem);
    return problem == NULL ? st : ari_map_misfit(p, "name '%s' %s", ARI_SHOW(pattern), problem);
}

static ar_status fill_target(const ari_map_place *p, const view *v, const char *pattern, size_t index, ari_piece *t)
{
    ari_piece_set_term(t, &p->m->mesh, p->at, p->r->partial); /* copies are whoever holds the same */
    t->ndim = v->dims;
    for (int i = 0; i < v->dims; i++)
        t->shape[i] = v->full[permuted(p->r, i, v->dims)];
    AR_TRY(name_target(p, pattern, index, &t->name));
    AR_TRY(check_packed(p, t->name));
    return fill_boxes(p, v, t);
}

/* --- one tensor, or several --------------------------------------------------------------------------------------- */
typedef struct targets {
    ari_piece *t;
    size_t n, capacity;
} targets;

static ar_status add_target(const ari_map_place *p, targets *list, ari_piece **t)
{
    AR_TRY(ARI_GROW_IN(p->arena, &list->t, &list->capacity, list->n, "the tensors of a mapping"));
    *t = &list->t[list->n++];
    **t = (ari_piece){.given = true, .has_shape = true, .more_copies = true};
    return AR_OK;
}

/* The runs of block k within those of the packed dimension: from its own start on, group after group. */
static ar_status cut_block(const ari_map_place *p, const ari_map_runs *runs, size_t full, size_t k, ari_map_runs *out,
                           size_t *block_full)
{
    const size_t groups = p->r->groups > 0 ? p->r->groups : 1, period = full / groups;
    size_t first = 0, size = 0;
    for (size_t i = 0; i <= k; i++) {
        first += size;
        AR_TRY(ari_map_block_size(p, full, i, &size));
    }
    *block_full = size * groups;
    for (size_t i = 0; i < runs->n; i++) {
        const ari_map_run *run = &runs->run[i];
        for (size_t g = run->full / period; g < groups && g * period < run->full + run->count; g++) {
            size_t start = 0, count = 0;
            if (!ari_overlap(&start, &count, run->full, run->count, g * period + first, size))
                continue;
            AR_TRY(ari_map_runs_add(p, out, run->local + (start - run->full), g * size + (start - g * period - first),
                                    count));
            if (out->n > ARI_MAP_BOXES)
                return ari_map_misfit(p, "would be more than %d pieces", ARI_MAP_BOXES);
        }
    }
    return AR_OK;
}

static ar_status take_blocks(const ari_map_place *p, const view *whole, targets *list)
{
    int dim = 0;
    AR_TRY(ari_map_block_dim(p, &dim));
    if (dim < p->r->shape_dims && p->r->shape_given[dim])
        return ari_map_misfit(p, "the rule's shape tells dimension %d, which 'into' takes apart", dim);
    for (size_t k = 0; k < p->r->blocks; k++) {
        ari_map_runs runs = {0};
        view v = *whole;
        ari_piece *t = NULL;
        if (p->r->into[k] == NULL)
            continue;
        AR_TRY(cut_block(p, whole->runs[dim], whole->full[dim], k, &runs, &v.full[dim]));
        v.runs[dim] = &runs;
        AR_TRY(add_target(p, list, &t));
        AR_TRY(fill_target(p, &v, p->r->into[k], 0, t));
    }
    return AR_OK;
}

static ar_status take_indices(const ari_map_place *p, const view *whole, targets *list)
{
    int dim = 0;
    size_t stride[AR_ST_MAX_DIMS];
    view v = *whole;
    AR_TRY(ari_map_block_dim(p, &dim));
    ari_row_major(stride, p->entry->ndim, p->entry->shape);
    for (v.dims = 0; v.dims < whole->dims - 1; v.dims++) {
        const int from = v.dims + (v.dims >= dim);
        v.dim[v.dims] = from;
        v.runs[v.dims] = whole->runs[from];
        v.full[v.dims] = whole->full[from];
    }
    if (p->entry->shape[dim] > ARI_MAP_TARGETS)
        return ari_map_misfit(p, "would be %zu tensors, at most %d are supported", p->entry->shape[dim],
                              ARI_MAP_TARGETS);
    for (size_t i = 0; i < whole->runs[dim]->n; i++) {
        const ari_map_run *run = &whole->runs[dim]->run[i];
        for (size_t k = 0; k < run->count; k++) {
            ari_piece *t = NULL;
            v.at = (run->local + k) * stride[dim];
            AR_TRY(add_target(p, list, &t));
            AR_TRY(fill_target(p, &v, p->r->unstack, run->full + k, t));
        }
    }
    return AR_OK;
}

const char *ari_repeated_name(const char **name, size_t n)
{
    ARI_SORT(name, n, ari_by_name);
    for (size_t i = 1; i < n; i++)
        if (strcmp(name[i - 1], name[i]) == 0)
            return name[i];
    return NULL;
}

static ar_status check_names(const ari_map_place *p, const targets *list)
{
    const char **names = NULL;
    AR_TRY(ARI_TAKE(&names, p->arena, list->n, "names"));
    for (size_t i = 0; i < list->n; i++)
        names[i] = list->t[i].name;
    const char *repeated = ari_repeated_name(names, list->n);
    if (repeated == NULL)
        return AR_OK;
    return ari_map_misfit(p, "is taken apart into two tensors of one name, '%s'", ARI_SHOW(repeated));
}

static ar_status apply_rule(const ari_map_place *p, targets *list)
{
    ari_map_runs runs[AR_ST_MAX_DIMS] = {{0}};
    view v = {.dims = p->entry->ndim};
    ari_piece *t = NULL;
    AR_TRY(check_fit(p));
    for (int d = 0; d < v.dims; d++) {
        AR_TRY(ari_map_runs_of(p, d, &runs[d], &v.full[d]));
        v.dim[d] = d;
        v.runs[d] = &runs[d];
    }
    if (p->r->intos > 0) {
        AR_TRY(take_blocks(p, &v, list));
    } else if (p->r->unstack != NULL) {
        AR_TRY(take_indices(p, &v, list));
    } else {
        AR_TRY(add_target(p, list, &t));
        AR_TRY(fill_target(p, &v, p->r->rename, 0, t));
    }
    return check_names(p, list);
}

static ari_map_place place_of(const ari_map *m, int rank, const ar_st_entry *entry)
{
    ari_map_place p = {.m = m, .entry = entry, .rank = rank};
    ar_mesh_coords(&m->mesh, rank < 0 ? 0 : rank, p.at);
    p.r = find_rule(&p);
    return p;
}

static ar_status apply(ari_map_place *p, ari_piece **gives, size_t *n)
{
    static const ari_map_rule whole = {.per_block = true};
    targets list = {0};
    if (p->rank >= p->m->ranks)
        return ari_map_bad(p->m, NULL, "rank %d is none of the mesh's %d", p->rank, p->m->ranks);
    if (p->r == NULL && p->m->all_ruled)
        return ari_map_misfit(p, "no rule matches it; with \"unmatched\": \"whole\" it is a copy on each rank");
    if (p->r == NULL)
        p->r = &whole;
    if (!p->r->leave)
        AR_TRY(apply_rule(p, &list));
    *gives = list.t;
    *n = list.n;
    return AR_OK;
}

ar_status ari_map_apply(ari_map *m, int rank, const ar_st_entry *entry, ari_map_peer peer, void *user,
                        ari_piece **gives, size_t *n)
{
    ari_map_place p = place_of(m, rank, entry);
    p.arena = &m->arena;
    p.peer = peer;
    p.user = user;
    return apply(&p, gives, n);
}

ar_status ari_map_apply_to_whole(ari_map *m, int rank, const ar_st_entry *entry, ari_piece **gives, size_t *n)
{
    ari_map_place p = place_of(m, rank, entry);
    p.arena = &m->arena;
    ari_map_rule rule;
    if (p.r != NULL) {
        rule = *p.r;
        if (rule.dim == INT_MAX && rule.splits > 0)
            rule.dim = rule.split[0].dim;
        rule.splits = 0;
        rule.partial = 0;
        p.r = &rule;
    }
    return apply(&p, gives, n);
}

bool ari_map_places(const ari_map *m, int rank, const char *name, const ari_map_rule **rule)
{
    const ar_st_entry entry = {.name = name};
    const ari_map_place p = place_of(m, rank, &entry);
    *rule = p.r;
    return p.r != NULL && !p.r->leave && (p.r->splits > 0 || p.r->partial != 0);
}
