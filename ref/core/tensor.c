/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/tensor.h"

#include <string.h>

#include "anyrank/param.h"
#include "ref/core/param_private.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/core/text.h"

ar_status ar_tensor_view(ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape, ar_buf data)
{
    if (ndim < 0 || ndim > AR_MAX_DIMS)
        return ar_error_set(AR_ERR_ARG, "a tensor has 0 to %d dimensions, not %d", AR_MAX_DIMS, ndim);
    ar_tensor view = {.dtype = dtype, .ndim = ndim, .data = data};
    size_t elements = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        view.shape[d] = shape[d];
        view.stride[d] = (ptrdiff_t)elements;
        AR_TRY(ari_mul_size(&elements, elements, shape[d] ? shape[d] : 1));
    }
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, elements, 8)); /* ensures that a byte offset never overflows, whatever the dtype */
    *t = view;
    return AR_OK;
}

size_t ar_tensor_count(const ar_tensor *t)
{
    return ari_volume(t->shape, t->ndim);
}

bool ari_tensor_is_contiguous(const ar_tensor *t)
{
    size_t expected = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] != 1 && t->stride[d] != (ptrdiff_t)expected)
            return false;
        expected *= t->shape[d] ? t->shape[d] : 1;
    }
    return true;
}

ar_tensor ari_tensor_flat(ar_dtype dtype, ar_buf data, size_t n)
{
    return (ar_tensor){.dtype = dtype, .ndim = 1, .shape = {n}, .stride = {1}, .data = data};
}

ar_tensor ari_tensor_rows(const ar_tensor *t)
{
    const size_t cols = t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
    const size_t rows = ari_volume(t->shape, t->ndim - 1);
    ar_tensor v = {.dtype = t->dtype,
                   .ndim = 2,
                   .shape = {rows, cols},
                   .stride = {t->ndim > 1 ? t->stride[t->ndim - 2] : (ptrdiff_t)cols, 1},
                   .data = t->data};
    return v;
}

ar_tensor ari_tensor_transposed(const ar_tensor *t)
{
    ar_tensor v = *t;
    const int a = t->ndim - 2, b = t->ndim - 1;
    v.shape[a] = t->shape[b];
    v.shape[b] = t->shape[a];
    v.stride[a] = t->stride[b];
    v.stride[b] = t->stride[a];
    return v;
}

ar_tensor ari_param_matrix(const ar_param *p)
{
    return p->transposed ? ari_tensor_transposed(&p->value) : p->value;
}

ar_tensor ar_tensor_slice(const ar_tensor *t, int dim, size_t start, size_t extent)
{
    ar_tensor v = *t;
    v.shape[dim] = extent;
    v.data = ar_buf_at(t->data, start * (size_t)t->stride[dim] * ar_dtype_bytes(t->dtype));
    return v;
}

static bool is_inside(size_t start, size_t extent, size_t full_extent)
{
    return start <= full_extent && extent <= full_extent - start;
}

ar_status ari_part_check(const ar_part *p, size_t batch, size_t rows, size_t cols, const char *label)
{
    if (is_inside(p->matrix, p->matrices, batch) && is_inside(p->row, p->rows, rows) &&
        is_inside(p->col, p->cols, cols))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE,
                        "%s: [%zu, %zu, %zu] at matrix %zu, row %zu, column %zu is outside [%zu, %zu, %zu]", label,
                        p->matrices, p->rows, p->cols, p->matrix, p->row, p->col, batch, rows, cols);
}

ar_tensor ari_tensor_part(const ar_tensor *t, const ar_part *p)
{
    const ptrdiff_t *stride = t->stride + t->ndim - 2, step = t->ndim > 2 ? stride[-1] : 0;
    const ptrdiff_t offset =
        (ptrdiff_t)p->matrix * step + (ptrdiff_t)p->row * stride[0] + (ptrdiff_t)p->col * stride[1];
    return (ar_tensor){.dtype = t->dtype,
                       .ndim = 3,
                       .shape = {p->matrices, p->rows, p->cols},
                       .stride = {step, stride[0], stride[1]},
                       .data = {(char *)t->data.ptr + offset * (ptrdiff_t)ar_dtype_bytes(t->dtype)}};
}

/* --- data types --------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t bits;
} table[AR_DTYPE_COUNT] = {
#define DTYPE_ROW(type, width) [AR_##type] = {#type, width},
    AR_DTYPE_TABLE(DTYPE_ROW)
#undef DTYPE_ROW
};

const char *ar_dtype_name(ar_dtype t)
{
    return (unsigned)t < AR_DTYPE_COUNT ? table[t].name : "?";
}

size_t ari_dtype_bits(ar_dtype t)
{
    return (unsigned)t < AR_DTYPE_COUNT ? table[t].bits : 0;
}

size_t ar_dtype_bytes(ar_dtype t)
{
    const size_t bits = ari_dtype_bits(t);
    return bits % 8 == 0 ? bits / 8 : 0;
}

ar_status ari_dtype_parse(ar_dtype *t, const char *name)
{
    for (int i = 0; i < AR_DTYPE_COUNT; i++) {
        if (strcmp(name, table[i].name) == 0) {
            *t = (ar_dtype)i;
            return AR_OK;
        }
    }
    return ar_error_set(AR_ERR_DTYPE, "'%s' is not a data type (F32, BF16, I64 and the like are)", ARI_SHOW(name));
}

/* --- layouts ------------------------------------------------------------------------------------------------------ */

void ari_split_uneven(size_t n, int parts, int part, size_t *start, size_t *count)
{
    const size_t p = (size_t)parts, chunk = n / p + (n % p != 0);
    const size_t begin = chunk * (size_t)part;
    *start = begin < n ? begin : n;
    *count = n - *start < chunk ? n - *start : chunk;
}

static ar_status begin_layout(ar_layout *o, int ndim, const size_t *shape, int dim, int part, int parts)
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

/* Adds a box over the full tensor except along `dim`, where it copies local [local, +extent) <-> global [global,
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

ar_status ari_layout_replicate(ar_layout *o, int ndim, const size_t *shape, int replica, int replicas)
{
    AR_TRY(begin_layout(o, ndim, shape, 0, replica, replicas));
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
    return ari_layout_packed(o, ndim, shape, dim, &shape[dim], 1, part, parts);
}

ar_status ari_layout_shard_uneven(ar_layout *o, int ndim, const size_t *shape, int dim, int part, int parts)
{
    AR_TRY(begin_layout(o, ndim, shape, dim, part, parts));
    size_t start = 0, count = 0;
    ari_split_uneven(shape[dim], parts, part, &start, &count);
    if (count > 0)
        add_box(o, dim, start, 0, count);
    return AR_OK;
}

ar_status ari_layout_packed(ar_layout *o, int ndim, const size_t *shape, int dim, const size_t *block, int n, int part,
                            int parts)
{
    AR_TRY(begin_layout(o, ndim, shape, dim, part, parts));
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

size_t ari_layout_local(const ar_layout *o, int dim)
{
    size_t end = 0;
    for (size_t i = 0; i < o->nbox; i++) {
        const size_t e = o->box[i].local[dim] + o->box[i].extent[dim];
        end = e > end ? e : end;
    }
    return end;
}

size_t ari_tensor_span(const ar_tensor *t)
{
    ptrdiff_t last_offset = 0;
    for (int d = 0; d < t->ndim; d++)
        last_offset += t->shape[d] > 0 ? (ptrdiff_t)(t->shape[d] - 1) * t->stride[d] : 0;
    return ((size_t)last_offset + 1) * ar_dtype_bytes(t->dtype);
}
