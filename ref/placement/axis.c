/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/placement/axis.h"

#include "ref/context/context.h"
#include "ref/core/size.h"

ari_axis ari_axis_of(int ndim, const size_t *shape, int dim, int parts)
{
    return (ari_axis){.before = ari_volume(shape, dim),
                      .extent = shape[dim],
                      .after = ari_volume(shape + dim + 1, ndim - dim - 1),
                      .parts = parts};
}

static size_t part_extent(const ari_axis *a, int part, size_t *start)
{
    size_t count = 0;
    ar_split_uneven(a->extent, a->parts, part, start, &count);
    return count;
}

void ari_axis_counts(size_t *counts, const ari_axis *a)
{
    size_t start = 0;
    for (int i = 0; i < a->parts; i++)
        counts[i] = a->before * part_extent(a, i, &start) * a->after;
}

/* A copy between the two orders. */
typedef struct orders {
    ar_buf whole, packed;
    ar_dtype dtype;
    bool pack; /* from whole to packed */
} orders;

/* Parts [first, first + n), which have one extent, in one pass; packed begins with the first of them. */
static ar_status copy_parts(ar_ctx *ctx, const orders *o, const ari_axis *a, int first, size_t n)
{
    size_t start = 0;
    const size_t own = part_extent(a, first, &start), row = own * a->after;
    if (n * a->before * row == 0)
        return AR_OK;
    const size_t width = ar_dtype_bytes(o->dtype);
    ar_tensor whole = {.dtype = o->dtype,
                       .ndim = 3,
                       .shape = {n, a->before, row},
                       .stride = {(ptrdiff_t)row, (ptrdiff_t)(a->extent * a->after), 1},
                       .data = ar_buf_at(o->whole, start * a->after * width)};
    ar_tensor packed = whole;
    packed.stride[0] = (ptrdiff_t)(a->before * row);
    packed.stride[1] = (ptrdiff_t)row;
    packed.data = o->packed;
    return ARI_KERNEL(ctx, copy_strided, o->pack ? &packed : &whole, o->pack ? &whole : &packed);
}

/* All parts: those that are as long as the first in one pass, then the shorter one; what follows is empty. */
static ar_status copy_all(ar_ctx *ctx, orders o, const ari_axis *a)
{
    size_t start = 0, first = part_extent(a, 0, &start);
    const size_t n = first > 0 ? a->extent / first : 0;
    AR_TRY(copy_parts(ctx, &o, a, 0, n));
    if (n == (size_t)a->parts)
        return AR_OK;
    o.packed = ar_buf_at(o.packed, n * a->before * first * a->after * ar_dtype_bytes(o.dtype));
    return copy_parts(ctx, &o, a, (int)n, 1);
}

static ar_buf read_only(ar_cbuf b)
{
    return (ar_buf){(void *)(uintptr_t)b.ptr};
}

ar_status ari_axis_pack(ar_ctx *ctx, ar_buf packed, ar_cbuf whole, const ari_axis *a, ar_dtype t)
{
    return copy_all(ctx, (orders){read_only(whole), packed, t, true}, a);
}

ar_status ari_axis_unpack(ar_ctx *ctx, ar_buf whole, ar_cbuf packed, const ari_axis *a, ar_dtype t)
{
    return copy_all(ctx, (orders){whole, read_only(packed), t, false}, a);
}

ar_status ari_axis_take(ar_ctx *ctx, ar_buf block, ar_cbuf whole, const ari_axis *a, int part, ar_dtype t)
{
    return copy_parts(ctx, &(orders){read_only(whole), block, t, true}, a, part, 1);
}

ar_status ari_axis_put(ar_ctx *ctx, ar_buf whole, ar_cbuf block, const ari_axis *a, int part, ar_dtype t)
{
    return copy_parts(ctx, &(orders){whole, read_only(block), t, false}, a, part, 1);
}

ar_dtype ari_moved_as(ar_dtype t)
{
    static const ar_dtype by_width[] = {[1] = AR_U8, [2] = AR_BF16, [4] = AR_I32, [8] = AR_I64};
    return t == AR_F32 ? AR_F32 : by_width[ar_dtype_bytes(t)];
}

ar_status ari_axis_gather(ar_ctx *ctx, ar_comm *over, ar_buf whole, ar_cbuf block, const ari_axis *a, ar_dtype t,
                          const char *tag)
{
    const bool in_order = a->before == 1;
    ARI_OWNED size_t *counts = NULL;
    ar_buf packed = whole;
    if (!in_order)
        AR_TRY(ari_step_alloc(ctx, &packed, a->before * a->extent * a->after * ar_dtype_bytes(t)));
    AR_TRY(ARI_ALLOC(&counts, (size_t)a->parts, "sizes of the ranks' parts"));
    ari_axis_counts(counts, a);
    AR_TRY(ar_comm_all_gather(over, ctx->queue, packed, block, counts, ari_moved_as(t), tag));
    if (in_order)
        return AR_OK;
    AR_TRY(ari_axis_unpack(ctx, whole, ar_const(packed), a, t));
    ari_step_free(ctx, packed);
    return AR_OK;
}
