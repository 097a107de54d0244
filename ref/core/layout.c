/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/tensor.h"

void ar_split_uneven(size_t n, int parts, int part, size_t *start, size_t *count)
{
    const size_t p = (size_t)parts, chunk = n / p + (n % p != 0);
    const size_t first = chunk * (size_t)part;
    *start = first < n ? first : n;
    *count = n - *start < chunk ? n - *start : chunk;
}

static ar_status begin(ar_layout *o, int ndim, const size_t *shape, int dim, int part, int parts)
{
    if (ndim < 0 || ndim > AR_MAX_DIMS || dim < 0 || (ndim > 0 && dim >= ndim) || parts < 1 || part < 0 ||
        part >= parts)
        return ar_error_set(AR_ERR_ARG, "layout: part %d of %d along dimension %d of %d is not a layout", part, parts,
                            dim, ndim);
    *o = (ar_layout){.ndim = ndim, .replicas = 1};
    for (int d = 0; d < ndim; d++)
        o->shape[d] = shape[d];
    return AR_OK;
}

/* Adds a box over the whole tensor but for `dim`, where it copies local [local, +extent) <-> global [global,
 * +extent). */
static void add_box(ar_layout *o, int dim, size_t global, size_t local, size_t extent)
{
    ar_box *b = &o->box[o->nbox++];
    *b = (ar_box){{0}, {0}, {0}};
    for (int d = 0; d < o->ndim; d++)
        b->extent[d] = o->shape[d];
    if (o->ndim > 0) {
        b->global[dim] = global;
        b->local[dim] = local;
        b->extent[dim] = extent;
    }
}

ar_status ar_layout_replicate(ar_layout *o, int ndim, const size_t *shape, int replica, int replicas)
{
    AR_TRY(begin(o, ndim, shape, 0, replica, replicas));
    add_box(o, 0, 0, 0, ndim > 0 ? shape[0] : 1);
    o->replica = replica;
    o->replicas = replicas;
    return AR_OK;
}

static ar_status check_divides(int dim, size_t extent, int parts)
{
    if (extent % (size_t)parts != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "dimension %d has %zu elements, which %d ranks do not divide", dim,
                            extent, parts);
    return AR_OK;
}

ar_status ar_layout_shard(ar_layout *o, int ndim, const size_t *shape, int dim, int part, int parts)
{
    return ar_layout_packed(o, ndim, shape, dim, &shape[dim], 1, part, parts);
}

ar_status ar_layout_shard_uneven(ar_layout *o, int ndim, const size_t *shape, int dim, int part, int parts)
{
    AR_TRY(begin(o, ndim, shape, dim, part, parts));
    size_t start = 0, count = 0;
    ar_split_uneven(shape[dim], parts, part, &start, &count);
    if (count > 0)
        add_box(o, dim, start, 0, count);
    return AR_OK;
}

ar_status ar_layout_packed(ar_layout *o, int ndim, const size_t *shape, int dim, const size_t *block, int n, int part,
                           int parts)
{
    AR_TRY(begin(o, ndim, shape, dim, part, parts));
    if (n < 1 || n > AR_MAX_BOXES)
        return ar_error_set(AR_ERR_ARG, "layout: %d packed blocks, 1 to %d are possible", n, AR_MAX_BOXES);
    size_t global = 0, local = 0;
    for (int i = 0; i < n; i++) {
        AR_TRY(check_divides(dim, block[i], parts));
        const size_t extent = block[i] / (size_t)parts;
        add_box(o, dim, global + extent * (size_t)part, local, extent);
        global += block[i];
        local += extent;
    }
    if (global != shape[dim])
        return ar_error_set(AR_ERR_SHAPE, "layout: packed blocks hold %zu elements, dimension %d has %zu", global, dim,
                            shape[dim]);
    return AR_OK;
}

size_t ar_layout_local(const ar_layout *o, int dim)
{
    size_t end = 0;
    for (size_t i = 0; i < o->nbox; i++) {
        const size_t e = o->box[i].local[dim] + o->box[i].extent[dim];
        end = e > end ? e : end;
    }
    return end;
}
