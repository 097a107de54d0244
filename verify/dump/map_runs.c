/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <string.h>

#include "ref/core/text.h"
#include "verify/dump/map.h"

ar_status ari_map_misfit(const ari_map_place *p, const char *format, ...)
{
    char text[384];
    ARI_FORMAT(text, format);
    if (p->rank < 0)
        return ari_map_bad(p->m, p->r, "tensor '%s': %s", ARI_SHOW(p->entry->name), text);
    return ari_map_bad(p->m, p->r, "tensor '%s' of rank %d: %s", ARI_SHOW(p->entry->name), p->rank, text);
}

/* One dimension of a tensor is followed from the full tensor down to what a rank has: a list of runs, divided once for
 * every dimension of the mesh that divides it. What each rank's file has tells where an uneven split falls. */
typedef struct axis {
    const ari_map_place *p;
    int dim;
    size_t own;                               /* elements of it in this file */
    const ari_map_split *split[AR_MESH_DIMS]; /* in the order in which they divide */
    size_t splits;
    bool missing; /* a rank that was asked for has no such tensor */
} axis;

ar_status ari_map_runs_add(const ari_map_place *p, ari_map_runs *runs, size_t local, size_t full, size_t count)
{
    ari_map_run *last = runs->n > 0 ? &runs->run[runs->n - 1] : NULL;
    if (count == 0)
        return AR_OK;
    if (last != NULL && last->local + last->count == local && last->full + last->count == full) {
        last->count += count;
        return AR_OK;
    }
    AR_TRY(ARI_GROW_IN(p->arena, &runs->run, &runs->capacity, runs->n, "the pieces of a tensor"));
    runs->run[runs->n++] = (ari_map_run){local, full, count};
    return AR_OK;
}

static size_t held(const ari_map_runs *runs)
{
    return runs->n == 0 ? 0 : runs->run[runs->n - 1].local + runs->run[runs->n - 1].count;
}

/* Appends elements [offset, offset + count) of `in`, which is a gapless list of what a group of ranks has. */
static ar_status pick(const axis *a, ari_map_runs *out, const ari_map_runs *in, size_t offset, size_t count)
{
    for (size_t i = 0; i < in->n; i++) {
        size_t start = 0, common = 0;
        if (ari_overlap(&start, &common, in->run[i].local, in->run[i].count, offset, count))
            AR_TRY(ari_map_runs_add(a->p, out, held(out), in->run[i].full + (start - in->run[i].local), common));
    }
    return AR_OK;
}

/* --- what ranks have ---------------------------------------------------------------------------------------------- */
static ar_status local_extent(axis *a, const int *at, size_t *out)
{
    const ari_map_place *p = a->p;
    int rank = 0;
    for (int d = 0; d < p->m->mesh.ndim; d++)
        rank = rank * p->m->mesh.dim[d].size + at[d];
    const ar_st_entry *e = rank == p->rank ? p->entry : p->peer(p->user, rank, p->entry->name);
    if (e == NULL)
        a->missing = true; /* a shard that is missing is not found out here: it is taken to be as large as this one */
    else if (e->ndim != p->entry->ndim)
        return ari_map_misfit(p, "has %d dimensions, on rank %d it has %d", p->entry->ndim, rank, e->ndim);
    *out = e == NULL ? a->own : e->shape[a->dim];
    return AR_OK;
}

/* Elements that the ranks with these coordinates have together, those of the splits from `level` on left open. */
static ar_status extent(axis *a, const int *at, size_t level, size_t *out)
{
    const ari_map_place *p = a->p;
    if (p->peer == NULL) {
        *out = a->own;
        for (size_t k = level; k < a->splits; k++)
            AR_TRY(ari_mul_size(out, *out, (size_t)p->m->mesh.dim[a->split[k]->mesh].size));
        return AR_OK;
    }
    if (level == a->splits)
        return local_extent(a, at, out);
    int inner[AR_MESH_DIMS];
    size_t sum = 0;
    memcpy(inner, at, sizeof inner);
    for (int c = 0; c < p->m->mesh.dim[a->split[level]->mesh].size; c++) {
        size_t n = 0;
        inner[a->split[level]->mesh] = c;
        AR_TRY(extent(a, inner, level + 1, &n));
        AR_TRY(ari_add_size(&sum, sum, n));
    }
    *out = sum;
    return AR_OK;
}

/* The same for coordinate c of the split at `level`, this rank's for those before it. */
static ar_status piece(axis *a, size_t level, int c, size_t *out)
{
    int at[AR_MESH_DIMS];
    memcpy(at, a->p->at, sizeof at);
    at[a->split[level]->mesh] = c;
    return extent(a, at, level + 1, out);
}

/* --- contiguous splits -------------------------------------------------------------------------------------------- */
/* Rank c's share of n among k: by torch's chunk, all equal except the last ones; or balanced, the first ones with one
 * more. */
static void share_extent(bool balanced, size_t n, size_t k, size_t c, size_t *offset, size_t *count)
{
    const size_t each = n / k, more = n % k;
    if (balanced) {
        *offset = c * each + (c < more ? c : more);
        *count = each + (c < more);
        return;
    }
    const size_t chunk = each + (more > 0);
    *offset = chunk > 0 && c > n / chunk ? n : c * chunk < n ? c * chunk : n;
    *count = n - *offset < chunk ? n - *offset : chunk;
}

/* If a rank's part is missing, the rule's shape can place the others. */
static bool share_of_shape(const axis *a, size_t level, size_t *offset, size_t *count)
{
    const ari_map_rule *r = a->p->r;
    const int mesh = a->split[level]->mesh;
    if (!a->missing || a->splits != 1 || a->dim >= r->shape_dims || !r->shape_given[a->dim])
        return false;
    share_extent(false, r->shape[a->dim], (size_t)a->p->m->mesh.dim[mesh].size, (size_t)a->p->at[mesh], offset, count);
    return *count == a->own;
}

static ar_status divide(axis *a, size_t level, const ari_map_runs *in, ari_map_runs *out)
{
    const ari_map_split *s = a->split[level];
    const int ranks = a->p->m->mesh.dim[s->mesh].size, mine = a->p->at[s->mesh];
    size_t offset = 0, count = 0;
    AR_TRY(piece(a, level, mine, &count));
    for (int c = 0; c < ranks; c++) {
        size_t n = count;
        if (c < mine || s->zigzag)
            AR_TRY(piece(a, level, c, &n));
        if (s->zigzag && (n != count || n % 2 != 0))
            return ari_map_misfit(
                a->p, "dimension %d: zigzag pieces are all of one even extent, but '%s' %d has %zu and %d has %zu",
                a->dim, a->p->m->mesh.dim[s->mesh].name, mine, count, c, n);
        offset += c < mine ? n : 0;
    }
    if (!s->zigzag) {
        share_of_shape(a, level, &offset, &count);
        return pick(a, out, in, offset, count);
    }
    const size_t half = count / 2;
    AR_TRY(pick(a, out, in, (size_t)mine * half, half));
    return pick(a, out, in, (2 * (size_t)ranks - 1 - (size_t)mine) * half, half);
}

/* --- packed blocks, each divided by itself ------------------------------------------------------------------------ */
static size_t sum_of_blocks(const ari_map_rule *r)
{
    size_t sum = 0; /* at most 64 * 2^40 */
    for (size_t k = 0; k < r->blocks; k++)
        sum += r->block[k];
    return sum;
}

ar_status ari_map_block_dim(const ari_map_place *p, int *dim)
{
    const ari_map_rule *r = p->r;
    const int given = r->dim != INT_MAX ? r->dim : r->splits > 0 ? r->split[0].dim : 0;
    *dim = given < 0 ? given + p->entry->ndim : given;
    if (*dim < 0 || *dim >= p->entry->ndim)
        return ari_map_misfit(p, "has %d dimensions, none of them is %d", p->entry->ndim, given);
    return AR_OK;
}

ar_status ari_map_block_size(const ari_map_place *p, size_t full, size_t k, size_t *out)
{
    const ari_map_rule *r = p->r;
    const size_t sum = sum_of_blocks(r), groups = r->groups > 0 ? r->groups : 1;
    const bool fits = full % groups == 0 && full / groups % sum == 0;
    if (!fits || (r->unit > 0 && full / groups / sum != r->unit))
        return ari_map_misfit(p, "%zu elements are not %zu times blocks of %zu in all, of unit %zu", full, groups, sum,
                              r->unit > 0 ? r->unit : 1);
    *out = r->block[k] * (full / groups / sum); /* no more than full */
    return AR_OK;
}

typedef struct packing {
    size_t sum, unit; /* unit: elements that stay together */
    bool balanced;
} packing;

/* Rank c's piece of block k, in elements from the block's start. Heads that are fewer than ranks are held by
 * several. */
static ar_status block_piece(const axis *a, const packing *f, size_t k, size_t c, size_t *offset, size_t *count)
{
    const ari_map_rule *r = a->p->r;
    const size_t ranks = (size_t)a->p->m->mesh.dim[a->split[0]->mesh].size;
    const size_t units = r->unit > 0 ? r->block[k] : r->block[k] * f->unit, width = r->unit > 0 ? f->unit : 1;
    if (r->unit > 0 && units < ranks) {
        if (ranks % units != 0)
            return ari_map_misfit(a->p, "block %zu has %zu units, which %zu ranks cannot hold alike", k, units, ranks);
        *offset = c / (ranks / units);
        *count = 1;
    } else {
        share_extent(f->balanced, units, ranks, c, offset, count);
    }
    *offset *= width;
    *count *= width;
    return AR_OK;
}

/* True if every rank has its expected part; *off: the first that has not, and the expectation. */
static ar_status packing_fits(axis *a, const packing *f, bool *fits, size_t off[3])
{
    const int ranks = a->p->m->mesh.dim[a->split[0]->mesh].size;
    *fits = true;
    for (int c = 0; c < ranks && *fits; c++) {
        size_t wanted = 0, has = 0;
        for (size_t k = 0; k < a->p->r->blocks; k++) {
            size_t offset = 0, count = 0;
            AR_TRY(block_piece(a, f, k, (size_t)c, &offset, &count));
            wanted += count;
        }
        a->missing = false;
        AR_TRY(piece(a, 0, c, &has));
        *fits = wanted == has || (a->missing && c != a->p->at[a->split[0]->mesh]);
        off[0] = (size_t)c;
        off[1] = has;
        off[2] = wanted;
    }
    return AR_OK;
}

static ar_status find_packing(axis *a, size_t full, packing *f)
{
    bool fits = false;
    size_t off[3] = {0}, ignored[3];
    f->balanced = false;
    AR_TRY(packing_fits(a, f, &fits, off));
    if (!fits) {
        f->balanced = true;
        AR_TRY(packing_fits(a, f, &fits, ignored));
    }
    return fits ? AR_OK
                : ari_map_misfit(
                      a->p, "'%s' %zu holds %zu of dimension %d, its pieces of %zu blocks, of %zu in all, would be %zu",
                      a->p->m->mesh.dim[a->split[0]->mesh].name, off[0], off[1], a->dim, a->p->r->blocks, full, off[2]);
}

/* *full: of the tensor; runs: what this rank's coordinate in the first split has of it. */
static ar_status divide_blocks(axis *a, ari_map_runs *out, size_t *full)
{
    const ari_map_rule *r = a->p->r;
    packing f = {.sum = sum_of_blocks(r), .unit = r->unit};
    size_t start = 0;
    if (r->unit == 0) {
        AR_TRY(extent(a, a->p->at, 0, full));
        if (*full % f.sum != 0)
            return ari_map_misfit(a->p, "the %zu of dimension %d do not divide into blocks of %zu in all", *full,
                                  a->dim, f.sum);
        f.unit = *full / f.sum;
    }
    AR_TRY(ari_mul_size(full, f.sum, f.unit));
    AR_TRY(find_packing(a, *full, &f));
    for (size_t k = 0; k < r->blocks; k++) {
        size_t offset = 0, count = 0;
        AR_TRY(block_piece(a, &f, k, (size_t)a->p->at[a->split[0]->mesh], &offset, &count));
        AR_TRY(ari_map_runs_add(a->p, out, held(out), start + offset, count));
        start += r->block[k] * f.unit;
    }
    return AR_OK;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */
static ar_status collect_splits(axis *a)
{
    const ari_map_rule *r = a->p->r;
    const int ndim = a->p->entry->ndim;
    for (size_t i = 0; i < r->splits; i++) {
        const int dim = r->split[i].dim < 0 ? r->split[i].dim + ndim : r->split[i].dim;
        if (dim < 0 || dim >= ndim)
            return ari_map_misfit(a->p, "has %d dimensions, none of them is %d", ndim, r->split[i].dim);
        if (dim == a->dim)
            a->split[a->splits++] = &r->split[i];
    }
    return AR_OK;
}

/* Rows that only fill up to a round number are dropped. */
static ar_status clip(const axis *a, ari_map_runs *runs, size_t *full)
{
    const ari_map_rule *r = a->p->r;
    if (a->dim >= r->shape_dims || !r->shape_given[a->dim])
        return AR_OK;
    const size_t given = r->shape[a->dim];
    size_t kept = 0;
    if (given > *full && !a->missing)
        return ari_map_misfit(a->p, "the rule's shape has %zu in dimension %d, all ranks together have %zu", given,
                              a->dim, *full);
    for (size_t i = 0; i < runs->n; i++) {
        ari_map_run run = runs->run[i];
        if (run.full >= given)
            continue;
        run.count = run.count < given - run.full ? run.count : given - run.full;
        runs->run[kept++] = run;
    }
    runs->n = kept;
    *full = given;
    return AR_OK;
}

ar_status ari_map_runs_of(const ari_map_place *p, int dim, ari_map_runs *runs, size_t *full)
{
    axis a = {.p = p, .dim = dim, .own = p->entry->shape[dim]};
    int packed = -1;
    size_t level = 0;
    *runs = (ari_map_runs){0};
    AR_TRY(collect_splits(&a));
    if (p->r->blocks > 0 && p->r->groups == 0 && p->r->per_block && a.splits > 0)
        AR_TRY(ari_map_block_dim(p, &packed));
    if (packed == dim) {
        AR_TRY(divide_blocks(&a, runs, full));
        level = 1;
    } else {
        AR_TRY(extent(&a, p->at, 0, full));
        if (a.missing && dim < p->r->shape_dims && p->r->shape_given[dim] && *full < p->r->shape[dim])
            *full = p->r->shape[dim];
        AR_TRY(ari_map_runs_add(p, runs, 0, 0, *full));
    }
    for (; level < a.splits; level++) {
        ari_map_runs next = {0};
        AR_TRY(divide(&a, level, runs, &next));
        *runs = next;
    }
    if (held(runs) != a.own)
        return ari_map_misfit(p, "has %zu in dimension %d, by the rule it would have %zu", a.own, dim, held(runs));
    return clip(&a, runs, full);
}
