/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/placement/placement_private.h"
#include "verify/read/dump.h"

/* One tensor of one file, and the rule that matches its name. */
typedef struct place {
    const ari_map *m;
    ari_arena *arena; /* the mapping's */
    const ari_map_rule *r;
    const ari_map_source *source;
    const ar_st_entry *entry;
    int coords[AR_MESH_DIMS];
    ari_map_match match;
} place;

static ar_status misfit(const place *p, const char *format, ...) AR_PRINTF(2, 3);
static ar_status misfit(const place *p, const char *format, ...)
{
    char text[384], rank[32] = "";
    ARI_FORMAT(text, format);
    if (p->source->rank >= 0)
        snprintf(rank, sizeof rank, " of rank %d", p->source->rank);
    return ari_map_bad(p->m, p->r, "tensor '%s'%s: %s", ARI_SHOW(p->entry->name), rank, text);
}

/* --- where a dimension's elements stand --------------------------------------------------------------------------- */
/* `count` consecutive elements of a dimension, which start at `local` in the file's tensor and at `full` in the full
 * tensor. */
typedef struct run {
    size_t local, full, count;
} run;
typedef struct runs {
    run *run;
    size_t n, capacity;
    size_t full; /* elements of the full tensor's dimension */
} runs;

/* The elements of one dimension that a rank has, as a list of runs. The list starts as the full dimension and is
 * divided evenly once for every mesh dimension that divides it. */
typedef struct axis {
    const place *p;
    int dim;
    const ari_map_split *split[AR_MESH_DIMS]; /* the divisions, in order */
    size_t splits;
} axis;

static ar_status add_run(const place *p, runs *r, size_t local, size_t full, size_t count)
{
    run *last_run = r->n > 0 ? &r->run[r->n - 1] : NULL;
    if (count == 0)
        return AR_OK;
    if (last_run && last_run->local + last_run->count == local && last_run->full + last_run->count == full) {
        last_run->count += count;
        return AR_OK;
    }
    if (r->n == ARI_MAP_BOXES)
        return misfit(p, "would be more than %d pieces", ARI_MAP_BOXES);
    AR_TRY(ARI_GROW_IN(p->arena, &r->run, &r->capacity, r->n, "the pieces of a tensor"));
    r->run[r->n++] = (run){local, full, count};
    return AR_OK;
}

static size_t count_elements(const runs *r)
{
    return r->n == 0 ? 0 : r->run[r->n - 1].local + r->run[r->n - 1].count;
}

/* Appends elements [offset, offset + count) of `src`, a gapless list of the elements that a group of ranks has. */
static ar_status pick(const axis *a, runs *out, const runs *src, size_t offset, size_t count)
{
    for (size_t i = 0; i < src->n; i++) {
        size_t start = 0, common = 0;
        if (ari_overlap(&start, &common, src->run[i].local, src->run[i].count, offset, count))
            AR_TRY(add_run(a->p, out, count_elements(out), src->run[i].full + (start - src->run[i].local), common));
    }
    return AR_OK;
}

/* Computes the runs of `src` that a rank has: piece c of equal pieces (the last ones may be shorter); of zigzag pieces,
 * one from each end. */
static ar_status divide(const axis *a, const ari_map_split *s, const runs *src, runs *out)
{
    const size_t n = (size_t)a->p->m->mesh.dim[s->mesh].size * (s->zigzag ? 2 : 1), total = count_elements(src),
                 piece_size = (total + n - 1) / n, c = (size_t)a->p->coords[s->mesh];
    if (s->zigzag && total % n != 0)
        return misfit(a->p, "dimension %d: the %zu elements are not %zu zigzag pieces of one size, two for each '%s'",
                      a->dim, total, n, a->p->m->mesh.dim[s->mesh].name);
    AR_TRY(pick(a, out, src, c * piece_size, piece_size));
    return s->zigzag ? pick(a, out, src, (n - 1 - c) * piece_size, piece_size) : AR_OK;
}

static size_t sum_of_blocks(const ari_map_rule *r)
{
    size_t sum = 0; /* at most 64 * 2^40 */
    for (size_t k = 0; k < r->blocks; k++)
        sum += r->block[k];
    return sum;
}

/* The first split divides every block by itself. */
static ar_status divide_blocks(axis *a, size_t full, runs *out)
{
    const ari_map_rule *r = a->p->r;
    const ari_map_split *s = a->split[0];
    const size_t ranks = (size_t)a->p->m->mesh.dim[s->mesh].size, sum = sum_of_blocks(r);
    size_t start = 0;
    if (full % sum != 0)
        return misfit(a->p, "the %zu of dimension %d do not divide into blocks of %zu in all", full, a->dim, sum);
    for (size_t k = 0; k < r->blocks; k++) {
        const size_t size = r->block[k] * (full / sum), per_rank = size / ranks;
        if (size % ranks != 0)
            return misfit(a->p, "block %zu of dimension %d is %zu, which %zu ranks of '%s' cannot have alike", k,
                          a->dim, size, ranks, a->p->m->mesh.dim[s->mesh].name);
        AR_TRY(add_run(a->p, out, count_elements(out), start + (size_t)a->p->coords[s->mesh] * per_rank, per_rank));
        start += size;
    }
    return AR_OK;
}

/* Rows that only fill up to a round number are dropped. */
static void clip(runs *r, size_t extent)
{
    size_t kept_count = 0;
    for (size_t i = 0; i < r->n; i++) {
        run segment = r->run[i];
        if (segment.full >= extent)
            continue;
        segment.count = segment.count < extent - segment.full ? segment.count : extent - segment.full;
        r->run[kept_count++] = segment;
    }
    r->n = kept_count;
    r->full = extent;
}

/* Finds the dimension of a rule. Without `dim`, a rule for blocks uses the sharded dimension, otherwise the first
 * one. */
static ar_status find_dim(const place *p, int rule_dim, int *dim)
{
    *dim = rule_dim < 0 ? rule_dim + p->entry->ndim : rule_dim;
    return *dim >= 0 && *dim < p->entry->ndim
               ? AR_OK
               : misfit(p, "has %d dimensions, none of them is %d", p->entry->ndim, rule_dim);
}

static ar_status find_block_dim(const place *p, int *dim)
{
    return find_dim(p, p->r->dim != INT_MAX ? p->r->dim : p->r->splits > 0 ? p->r->split[0].dim : 0, dim);
}

/* Assumes that every rank has as many elements as this rank. If the division is uneven, the rule's shape gives the
 * size. */
static ar_status find_runs(const place *p, int dim, runs *out)
{
    const ari_map_rule *r = p->r;
    const bool has_extent = dim < r->shape_dims && r->shape_given[dim];
    axis a = {.p = p, .dim = dim};
    int packed = -1;
    size_t full = p->entry->shape[dim], level = 0;
    for (size_t i = 0; i < r->splits && !p->source->is_full; i++) {
        int divided = 0;
        AR_TRY(find_dim(p, r->split[i].dim, &divided));
        if (divided != dim)
            continue;
        a.split[a.splits++] = &r->split[i];
        AR_TRY(ari_mul_size(&full, full, (size_t)p->m->mesh.dim[r->split[i].mesh].size));
    }
    if (r->blocks > 0)
        AR_TRY(find_block_dim(p, &packed));
    full = has_extent && a.splits > 0 && full < r->shape[dim] ? r->shape[dim] : full;
    *out = (runs){.full = full};
    level = packed == dim && r->groups == 0 && a.splits > 0;
    AR_TRY(level > 0 ? divide_blocks(&a, full, out) : add_run(p, out, 0, 0, full));
    for (; level < a.splits; level++) {
        runs next_runs = {.full = full};
        AR_TRY(divide(&a, a.split[level], out, &next_runs));
        *out = next_runs;
    }
    if (count_elements(out) != p->entry->shape[dim] || (has_extent && full < r->shape[dim]))
        return misfit(p, "has %zu in dimension %d, by the rule it would have %zu of %zu", p->entry->shape[dim], dim,
                      count_elements(out), has_extent ? r->shape[dim] : full);
    if (has_extent)
        clip(out, r->shape[dim]);
    return AR_OK;
}

/* --- targets ------------------------------------------------------------------------------------------------------ */
/* Names of modules that store q, k and v, or gate and up, side by side. anyrank.capture refuses the same names.
 * Megatron's linear_qkv is not among them: its heads alternate, so it can be divided as a whole. */
static const char *const packed_names[] = {"c_attn", "qkv_proj",       "Wqkv",         "query_key_value",
                                           "qkv",    "in_proj_weight", "in_proj_bias", "gate_up_proj"};

/* Returns true if one of the last two components of a name is such a module: "h.0.attn.c_attn.weight:grad". The
 * gradient of the module's input is not packed. */
static bool looks_packed(const char *name)
{
    const char *value = strchr(name, ':');
    bool is_last_packed = false, before = false;
    if (value && strncmp(value, ":bwd", 4) == 0)
        return false;
    for (size_t n = 0;; name += n + 1) {
        n = strcspn(name, ".:@");
        before = is_last_packed;
        is_last_packed = false;
        for (size_t i = 0; i < sizeof packed_names / sizeof *packed_names; i++)
            is_last_packed = is_last_packed || (n == strlen(packed_names[i]) && memcmp(name, packed_names[i], n) == 0);
        if (name[n] != '.')
            return is_last_packed || before;
    }
}

/* Refuses to divide a packed tensor as a whole, because each rank has a piece of each block. */
static ar_status check_packed(const place *p, const char *target)
{
    const ari_map_rule *r = p->r;
    bool cut = false;
    for (size_t i = 0; i < r->splits && !p->source->is_full; i++) {
        const ar_mesh_dim *d = &p->m->mesh.dim[r->split[i].mesh];
        cut = cut || (strcmp(d->name, "tp") == 0 && d->size > 1);
    }
    if (!cut || r->blocks > 0 || r->straight || !(looks_packed(p->entry->name) || looks_packed(target)))
        return AR_OK;
    return misfit(p, "looks like several tensors packed in one, of which each rank of tp has a piece; say their "
                     "relative sizes, such as \"blocks\": [1, 1, 1], or \"blocks\": null where one cut goes straight "
                     "through all of it");
}

/* A box for each choice of a run in every dimension. */
static ar_status fill_boxes(const place *p, const runs *along, ari_piece *t)
{
    size_t stride[AR_ST_MAX_DIMS], n = 1;
    for (int k = 0; k < t->ndim; k++)
        AR_TRY(ari_mul_size(&n, n, along[k].n));
    if (n > ARI_MAP_BOXES)
        return misfit(p, "would be %zu pieces, at most %d are supported", n, ARI_MAP_BOXES);
    AR_TRY(ARI_TAKE(&t->box, p->arena, n, "the pieces of a tensor"));
    t->boxes = n;
    ari_row_major(stride, t->ndim, p->entry->shape);
    for (size_t b = 0; b < n; b++) {
        ar_dump_box *box = &t->box[b];
        size_t rest = b;
        *box = (ar_dump_box){.offset = 0};
        for (int k = t->ndim - 1; k >= 0; k--) {
            const run segment = along[k].run[rest % along[k].n];
            rest /= along[k].n;
            box->offset += segment.local * stride[k];
            box->global[k] = segment.full;
            box->extent[k] = segment.count;
            box->stride[k] = stride[k];
        }
    }
    return AR_OK;
}

void ari_piece_set_term(ari_piece *p, const ar_mesh *mesh, const int *coords, unsigned summed_dims)
{
    p->partial = summed_dims != 0;
    p->term = 0;
    p->terms = 1;
    for (int d = 0; d < mesh->ndim; d++) {
        if ((summed_dims >> d & 1u) == 0)
            continue;
        p->term = p->term * (size_t)mesh->dim[d].size + (size_t)coords[d];
        p->terms *= (size_t)mesh->dim[d].size;
    }
}

static ar_status fill_target(const place *p, const runs *along, const char *pattern, ari_piece *t)
{
    *t = (ari_piece){.is_placed = true, .has_shape = true, .more_copies = true, .ndim = p->entry->ndim};
    ari_piece_set_term(t, &p->m->mesh, p->coords, p->source->is_full ? 0 : p->r->partial);
    for (int k = 0; k < t->ndim; k++)
        t->shape[k] = along[k].full;
    AR_TRY(pattern ? ari_map_fill(&t->name, p->arena, pattern, &p->match)
                   : ari_arena_text(p->arena, &t->name, p->entry->name, "a name"));
    AR_TRY(check_packed(p, t->name));
    return fill_boxes(p, along, t);
}

/* The runs of a block, `block_begin` and `size` of each group's elements, within those of the packed dimension. */
static ar_status cut_block(const place *p, const runs *packed_runs, size_t groups, size_t block_begin, size_t size,
                           runs *out)
{
    const size_t period = packed_runs->full / groups;
    *out = (runs){.full = size * groups};
    for (size_t i = 0; i < packed_runs->n; i++) {
        const run *segment = &packed_runs->run[i];
        for (size_t g = segment->full / period; g < groups && g * period < segment->full + segment->count; g++) {
            size_t start = 0, count = 0;
            if (ari_overlap(&start, &count, segment->full, segment->count, g * period + block_begin, size))
                AR_TRY(add_run(p, out, segment->local + (start - segment->full),
                               g * size + (start - g * period - block_begin), count));
        }
    }
    return AR_OK;
}

/* Splits a packed tensor into one target for each named block. */
static ar_status take_blocks(const place *p, runs *along, ari_piece *t, size_t *n)
{
    const size_t groups = p->r->groups > 0 ? p->r->groups : 1, sum = sum_of_blocks(p->r);
    int dim = 0;
    size_t block_begin = 0, names = 0;
    const char *name[ARI_MAP_BLOCKS];
    AR_TRY(find_block_dim(p, &dim));
    const runs packed_runs = along[dim];
    if (dim < p->r->shape_dims && p->r->shape_given[dim])
        return misfit(p, "the rule's shape tells dimension %d, which 'into' takes apart", dim);
    if (packed_runs.full % groups != 0 || packed_runs.full / groups % sum != 0)
        return misfit(p, "%zu elements are not %zu times blocks of %zu in all", packed_runs.full, groups, sum);
    for (size_t k = 0; k < p->r->blocks; k++) {
        const size_t size = p->r->block[k] * (packed_runs.full / groups / sum);
        if (p->r->into[k] && packed_runs.full > 0) {
            AR_TRY(cut_block(p, &packed_runs, groups, block_begin, size, &along[dim]));
            AR_TRY(fill_target(p, along, p->r->into[k], &t[*n]));
            name[names++] = t[(*n)++].name;
        }
        block_begin += size;
    }
    const char *repeated = ari_repeated_name(name, names);
    return repeated ? misfit(p, "is taken apart into two tensors of one name, '%s'", ARI_SHOW(repeated)) : AR_OK;
}

const char *ari_repeated_name(const char **name, size_t n)
{
    ARI_SORT(name, n, ari_by_name);
    for (size_t i = 1; i < n; i++)
        if (strcmp(name[i - 1], name[i]) == 0)
            return name[i];
    return NULL;
}

static const ari_map_rule *find_rule(const ari_map *m, const char *name, ari_map_match *match)
{
    for (size_t i = 0; i < m->rules; i++)
        if (ari_map_glob_match(m->rule[i].match, name, match))
            return &m->rule[i];
    return NULL;
}

const ari_map_rule *ari_map_places(const ari_map *m, const char *name)
{
    ari_map_match match;
    const ari_map_rule *r = find_rule(m, name, &match);
    return r && !r->leave && (r->splits > 0 || r->partial != 0) ? r : NULL;
}

ar_status ari_map_apply(ari_map *m, const ari_map_source *source, ari_piece **out, size_t *n)
{
    static const ari_map_rule default_rule = {.dim = INT_MAX};
    place p = {.m = m, .arena = &m->arena, .source = source, .entry = source->entry};
    runs along[AR_ST_MAX_DIMS] = {{0}};
    *n = 0;
    ari_mesh_coords(&m->mesh, source->rank < 0 ? 0 : source->rank, p.coords);
    p.r = find_rule(m, source->entry->name, &p.match);
    if (source->rank >= m->ranks)
        return ari_map_bad(m, NULL, "rank %d is none of the mesh's %d", source->rank, m->ranks);
    if (p.r == NULL && m->all_ruled)
        return misfit(&p, "no rule matches it; with \"unmatched\": \"whole\" it is a copy on each rank");
    p.r = p.r ? p.r : &default_rule;
    if (p.r->leave)
        return AR_OK;
    if (p.r->shape_dims > 0 && p.r->shape_dims != p.entry->ndim)
        return misfit(&p, "has %d dimensions, the rule's shape has %d", p.entry->ndim, p.r->shape_dims);
    if (source->rank < 0 && !source->is_full && (p.r->splits > 0 || p.r->partial != 0))
        return misfit(&p, "is divided over ranks, but its file is no rank's: key 'files' tells which is");
    for (int d = 0; d < p.entry->ndim; d++)
        AR_TRY(find_runs(&p, d, &along[d]));
    AR_TRY(ARI_TAKE(out, &m->arena, p.r->intos > 0 ? p.r->intos : 1, "the tensors of a mapping"));
    if (p.r->intos > 0)
        return take_blocks(&p, along, *out, n);
    *n = 1;
    return fill_target(&p, along, p.r->rename, *out);
}
