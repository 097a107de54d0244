/* SPDX-License-Identifier: Apache-2.0 */
/* Values between layers: how they are placed over the tensor-parallel ranks, and what is made of that. */
#include "ref/layers/parts.h"

#include "ref/placement/axis.h"
#include "ref/placement/redistribute.h"

const ar_placement ari_shard_features = {AR_SHARD, -1}, ari_shard_tokens = {AR_SHARD, -2};

const char *ar_style_name(ar_style s)
{
    static const char *const names[] = {
        [AR_STYLE_REPLICATE] = "replicate", [AR_STYLE_COLWISE] = "colwise", [AR_STYLE_ROWWISE] = "rowwise",
        [AR_STYLE_VOCAB] = "vocab",         [AR_STYLE_HIDDEN] = "hidden",   [AR_STYLE_SEQUENCE] = "sequence",
        [AR_STYLE_PREPARE] = "prepare"};
    return (unsigned)s < sizeof names / sizeof *names ? names[s] : "?";
}

ar_branch_split ar_branch_of(ar_style first, ar_style second, ar_placement stream)
{
    const bool shard = first == AR_STYLE_COLWISE && second == AR_STYLE_ROWWISE;
    const ar_placement middle = shard ? ari_shard_features : (ar_placement){AR_REPLICATE, 0};
    return (ar_branch_split){.enter = {stream, stream},
                             .first = {first, stream, middle},
                             .second = {second, middle, stream},
                             .leave = {stream, stream}};
}

ar_placement ari_placed_stream(const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) ? ari_shard_tokens : (ar_placement){AR_REPLICATE, 0};
}

/* --- kinds of placements ------------------------------------------------------------------------------------------ */

bool ari_placed_by_features(ar_placement p)
{
    return p.kind == AR_SHARD && p.dim == ari_shard_features.dim;
}

bool ari_placed_by_tokens(ar_placement p)
{
    return p.kind == AR_SHARD && p.dim == ari_shard_tokens.dim;
}

bool ari_placed_whole(ar_placement p)
{
    return p.kind == AR_REPLICATE || p.kind == AR_INVARIANT;
}

bool ari_placed_alike(ar_placement a, ar_placement b)
{
    return (ari_placed_whole(a) && ari_placed_whole(b)) || (a.kind == b.kind && (a.kind != AR_SHARD || a.dim == b.dim));
}

ar_placement ari_placed_gradient(ar_placement p)
{
    return p.kind == AR_SHARD ? p : (ar_placement){AR_INVARIANT, 0};
}

ar_hop ari_hop_back(ar_hop hop)
{
    return (ar_hop){ari_placed_gradient(hop.to), ari_placed_gradient(hop.from)};
}

/* --- features ----------------------------------------------------------------------------------------------------- */

size_t ari_features_sum(const ari_features *f)
{
    size_t total = 0;
    for (int i = 0; i < f->n; i++)
        total += f->width[i];
    return total;
}

/* Block by block between rows of all features and those of `n` ranks from `first` on, one rank after the other, each
 * with its part of every block side by side. */
static ar_status copy_blocks(ar_ctx *ctx, const ar_tensor *whole, const ar_tensor *parts, const ari_features *f,
                             int first, size_t n, bool take)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->tp), all = ari_features_sum(f), own = all / ranks;
    const size_t rows = ar_tensor_rows(whole).shape[0], each = ar_dtype_bytes(whole->dtype);
    size_t at = 0;
    for (int i = 0; i < f->n; i++) {
        const size_t width = f->width[i] / ranks;
        const ar_tensor in_whole = {.dtype = whole->dtype,
                                    .ndim = 3,
                                    .shape = {n, rows, width},
                                    .stride = {(ptrdiff_t)width, (ptrdiff_t)all, 1},
                                    .data = ar_buf_at(whole->data, (at + (size_t)first * width) * each)};
        ar_tensor in_parts = in_whole;
        in_parts.stride[0] = (ptrdiff_t)(rows * own);
        in_parts.stride[1] = (ptrdiff_t)own;
        in_parts.data = ar_buf_at(parts->data, at / ranks * each);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, take ? &in_parts : &in_whole, take ? &in_whole : &in_parts));
        at += f->width[i];
    }
    return AR_OK;
}

static ari_axis features_axis(const ar_ctx *ctx, const ar_tensor *whole)
{
    return ari_axis_of(whole->ndim, whole->shape, whole->ndim - 1, ar_comm_size(ctx->tp));
}

static ar_status gather_features(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f, const char *tag)
{
    ar_tensor parts;
    AR_TRY(ari_like(ctx, y, x, ari_features_sum(f)));
    if (f->n == 1) {
        const ari_axis a = features_axis(ctx, y);
        return ari_axis_gather(ctx, ctx->tp, y->data, ar_const(x->data), &a, x->dtype, tag);
    }
    AR_TRY(ari_gather_rank_major(ctx, &parts, x, tag));
    AR_TRY(copy_blocks(ctx, y, &parts, f, 0, (size_t)ar_comm_size(ctx->tp), false));
    ar_ctx_release(ctx, &parts);
    return AR_OK;
}

static ar_status own_features(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f)
{
    const int r = ar_comm_rank(ctx->tp), n = ar_comm_size(ctx->tp);
    size_t start = 0, own = ari_features_sum(f) / (size_t)n;
    if (f->n > 1) {
        AR_TRY(ari_like(ctx, y, x, own));
        return copy_blocks(ctx, x, y, f, r, 1, true);
    }
    const ari_axis a = features_axis(ctx, x);
    ar_split_uneven(f->width[0], n, r, &start, &own);
    AR_TRY(ari_like(ctx, y, x, own));
    return ari_axis_take(ctx, y->data, ar_const(x->data), &a, r, x->dtype);
}

/* --- redistribution ----------------------------------------------------------------------------------------------- */

static ar_status sum_terms(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    AR_TRY(ari_like(ctx, y, x, x->shape[x->ndim - 1]));
    return ar_comm_all_reduce(ctx->tp, ctx->queue, y->data, ar_const(x->data), ar_tensor_count(x), x->dtype, AR_SUM,
                              tag);
}

static ar_status make_whole(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f, ar_placement from,
                            const char *tag)
{
    if (ari_placed_by_tokens(from))
        return ari_gather_tokens(ctx, y, x, tag);
    if (ari_placed_by_features(from))
        return gather_features(ctx, y, x, f, tag);
    if (from.kind == AR_PARTIAL_SUM)
        return sum_terms(ctx, y, x, tag);
    *y = *x;
    return AR_OK;
}

static ar_status take_part(ar_ctx *ctx, ar_tensor *y, const ar_tensor *whole, const ari_features *f, ar_placement to)
{
    if (ari_placed_by_tokens(to))
        return ari_own_tokens(ctx, y, whole);
    if (ari_placed_by_features(to))
        return own_features(ctx, y, whole, f);
    *y = *whole;
    return AR_OK;
}

/* What is between the two steps ends with the second. */
ar_status ari_place(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f, ar_hop hop, const char *tag,
                    bool ends)
{
    ar_tensor first = *x, whole;
    *y = *x;
    if (ar_comm_size(ctx->tp) == 1 || ari_placed_alike(hop.from, hop.to))
        return AR_OK;
    AR_TRY(make_whole(ctx, &whole, x, f, hop.from, tag));
    if (ends)
        ari_release_placed(ctx, &first, &whole);
    AR_TRY(take_part(ctx, y, &whole, f, hop.to));
    if (ends || whole.data.ptr != x->data.ptr)
        ari_release_placed(ctx, &whole, y);
    return AR_OK;
}

void ari_release_placed(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    if (y->data.ptr != x->data.ptr)
        ar_ctx_release(ctx, y);
}

ar_status ari_tap_placed(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t,
                         size_t features, ar_placement p)
{
    if (ari_placed_by_features(p))
        return ari_tap_copies(ctx, base, part, pass, t, t->ndim - 1, features, 1);
    if (ari_placed_by_tokens(p) && t->ndim > 1)
        return ari_tap_copies(ctx, base, part, pass, t, t->ndim - 2,
                              t->shape[t->ndim - 2] * (size_t)ar_comm_size(ctx->tp), 1);
    return ari_tap_whole(ctx, base, part, pass, t);
}
