/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/parts.h"

#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/faults.h"

ar_status ari_path(char *out, size_t cap, const char *base, const char *part)
{
    const int n = part ? snprintf(out, cap, "%s.%s", base, part) : snprintf(out, cap, "%s", base);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "name '%s.%s' is longer than %zu bytes", base, part ? part : "", cap - 1);
    return AR_OK;
}

/* The own samples of a batch that is shared out: dimension 0 of every box moves to their place. */
static void place_samples(ar_layout *o, const ar_ctx *ctx)
{
    if (ctx->samples == 0 || o->ndim < 1)
        return;
    o->shape[0] = ctx->samples;
    for (size_t k = 0; k < o->nbox; k++)
        o->box[k].global[0] = ctx->first_sample;
}

/* Every box's part of a run of positions, which is `at` in the order of the rank's own and `first` in the sequence. */
static void place_run(ar_layout *to, const ar_layout *own, int dim, size_t at, size_t first, size_t count)
{
    for (size_t k = 0; k < own->nbox; k++) {
        const size_t from = own->box[k].global[dim], end = from + own->box[k].extent[dim];
        const size_t start = from > at ? from : at, stop = end < at + count ? end : at + count;
        if (start >= stop)
            continue;
        ar_box *b = &to->box[to->nbox++];
        *b = own->box[k];
        b->local[dim] += start - from;
        b->global[dim] = first + (start - at);
        b->extent[dim] = stop - start;
    }
}

/* Boxes of the rank's own positions along a dimension become boxes of all of them. At most half of the boxes that there
 * can be are used. */
static void place_positions(ar_layout *o, int dim, const ar_positions *own, size_t seq)
{
    const ar_layout before = *o;
    o->nbox = 0;
    o->shape[dim] = seq;
    place_run(o, &before, dim, 0, own->first[0], own->count[0]);
    place_run(o, &before, dim, own->count[0], own->first[1], own->count[1]);
}

static ar_status tap(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t, ar_layout *layout)
{
    const int dim = layout->ndim - 2;
    char name[160];
    AR_TRY(ari_path(name, sizeof name, base, part));
    place_samples(layout, ctx);
    if (ar_comm_size(ctx->sequence) > 1 && dim > 0) {
        const size_t seq = ari_all_positions(ctx, layout->shape[dim]);
        const ar_positions own = ari_own_positions(ctx, seq, false);
        place_positions(layout, dim, &own, seq);
    }
    return ar_tap(ctx, name, pass, t, layout);
}

ar_status ari_tap_tokens(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t)
{
    return ari_tap_placed(ctx, base, part, pass, t, 0, ari_placed_stream(ctx));
}

ar_status ari_tap_whole(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t)
{
    if (!ar_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ar_layout_replicate(&layout, t->ndim, t->shape, ar_comm_rank(ctx->tp), ar_comm_size(ctx->tp)));
    return tap(ctx, base, part, pass, t, &layout);
}

ar_status ari_tap_copies(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t, int dim,
                         size_t full, int copies)
{
    if (!ar_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    size_t shape[AR_MAX_DIMS] = {0};
    for (int d = 0; d < t->ndim; d++)
        shape[d] = d == dim ? full : t->shape[d];
    const int r = ar_comm_rank(ctx->tp), n = ar_comm_size(ctx->tp);
    AR_TRY(ar_layout_shard_uneven(&layout, t->ndim, shape, dim, r / copies, n / copies));
    layout.replica = r % copies;
    layout.replicas = copies;
    return tap(ctx, base, part, pass, t, &layout);
}

ar_status ari_tap_queries(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t, size_t heads,
                          size_t head_start, int copies, const ar_positions *rows)
{
    char name[160];
    if (!ar_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, base, part));
    AR_TRY(ar_layout_replicate(&layout, t->ndim, t->shape, ar_comm_rank(ctx->tp) % copies, copies));
    layout.shape[1] = heads;
    layout.box[0].global[1] = head_start;
    place_samples(&layout, ctx);
    place_positions(&layout, 2, rows, t->shape[3]);
    return ar_tap(ctx, name, pass, t, &layout);
}

ar_status ari_tap_world(ar_ctx *ctx, const char *name, char pass, const ar_tensor *t)
{
    if (!ar_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ar_layout_replicate(&layout, t->ndim, t->shape, ari_ctx_place(ctx, ARI_ALL_AXES),
                               ari_extent(&ctx->layout, ARI_ALL_AXES)));
    return ar_tap(ctx, name, pass, t, &layout);
}

ar_status ari_check_features(const char *name, const char *what, const ar_tensor *t, size_t features)
{
    if (t->ndim >= 2 && t->shape[t->ndim - 1] == features && ar_tensor_is_contiguous(t))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: %s of %zu features (%d dimensions), expected %zu, contiguous", name, what,
                        t->ndim > 0 ? t->shape[t->ndim - 1] : 0, t->ndim, features);
}

void ari_own_ids(ar_ctx *ctx, size_t vocab, size_t *start, size_t *rows)
{
    ar_split_uneven(vocab, ar_comm_size(ctx->tp), ar_comm_rank(ctx->tp), start, rows);
    ari_fault_own_ids(ctx, vocab, start, rows);
}

ar_status ari_like(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features)
{
    ar_tensor shape = *x;
    shape.shape[x->ndim - 1] = features;
    return ar_ctx_tensor(ctx, y, x->dtype, x->ndim, shape.shape);
}

ar_status ari_like_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t positions, size_t features)
{
    ar_tensor shape = *x;
    shape.shape[x->ndim - 2] = positions;
    return ari_like(ctx, y, &shape, features);
}

ar_status ari_numbers(ar_ctx *ctx, ar_tensor *t, ar_dtype dtype, size_t n, const void *host)
{
    AR_TRY(ar_ctx_tensor(ctx, t, dtype, 1, &n));
    return ar_ctx_upload(ctx, t, host);
}

ar_status ari_cast(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_dtype dtype)
{
    *y = *x;
    if (x->dtype == dtype)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, y, dtype, x->ndim, x->shape));
    return ARI_KERNEL(ctx, copy_strided, y, x);
}

ar_status ari_equal_counts(size_t **gives, const ar_comm *over, size_t count)
{
    const size_t n = (size_t)ar_comm_size(over);
    AR_TRY(ari_alloc((void **)gives, n, sizeof **gives, "sizes of the ranks' parts"));
    for (size_t i = 0; i < n; i++)
        (*gives)[i] = count;
    return AR_OK;
}

ar_status ari_combine(ar_ctx *ctx, ar_comm *over, void *numbers, size_t n, ar_dtype type, ar_op op, const char *tag)
{
    ar_tensor t;
    AR_TRY(ari_numbers(ctx, &t, type, n, numbers));
    AR_TRY(ar_comm_all_reduce(over, ctx->queue, t.data, ar_const(t.data), n, type, op, tag));
    AR_TRY(ar_ctx_download(ctx, numbers, &t));
    ar_ctx_release(ctx, &t);
    return AR_OK;
}
