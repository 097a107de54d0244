/* SPDX-License-Identifier: Apache-2.0 */
/* Placement of values between layers over the tensor-parallel ranks: checks, redistribution and reports. */

#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/faults.h"
#include "ref/layers/layers_private.h"
#include "ref/placement/axis.h"

const ar_placement ari_replicated = {AR_REPLICATE, 0}, ari_shard_features = {AR_SHARD, -1},
                   ari_shard_tokens = {AR_SHARD, -2};

const char *ari_style_name(ar_style s)
{
    static const char *const names[] = {
        [AR_STYLE_REPLICATE] = "replicate", [AR_STYLE_COLWISE] = "colwise", [AR_STYLE_ROWWISE] = "rowwise",
        [AR_STYLE_VOCAB] = "vocab",         [AR_STYLE_HIDDEN] = "hidden",   [AR_STYLE_SEQUENCE] = "sequence",
        [AR_STYLE_PREPARE] = "prepare"};
    return (unsigned)s < sizeof names / sizeof *names ? names[s] : "?";
}

ar_branch_split ari_branch_of(ar_style first_style, ar_style second, ar_placement stream)
{
    const bool shard = first_style == AR_STYLE_COLWISE && second == AR_STYLE_ROWWISE;
    const ar_placement middle = shard ? ari_shard_features : ari_replicated;
    return (ar_branch_split){.enter = {stream, stream},
                             .first = {first_style, stream, middle},
                             .second = {second, middle, stream},
                             .leave = {stream, stream}};
}

ar_branch_split ari_experts_split(bool cut, ar_placement stream)
{
    const ar_placement replicated = ari_replicated, middle = cut ? ari_shard_features : replicated;
    return (ar_branch_split){.enter = {stream, replicated},
                             .first = {cut ? AR_STYLE_COLWISE : AR_STYLE_REPLICATE, replicated, middle},
                             .second = {cut ? AR_STYLE_ROWWISE : AR_STYLE_REPLICATE, middle, replicated},
                             .leave = {replicated, stream}};
}

ar_placement ari_placed_stream(const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) ? ari_shard_tokens : ari_replicated;
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

bool ari_placed_full(ar_placement p)
{
    return p.kind == AR_REPLICATE || p.kind == AR_INVARIANT;
}

bool ari_placed_equal(ar_placement a, ar_placement b)
{
    return (ari_placed_full(a) && ari_placed_full(b)) || (a.kind == b.kind && (a.kind != AR_SHARD || a.dim == b.dim));
}

ar_placement ari_placed_gradient(ar_placement p)
{
    return p.kind == AR_SHARD ? p : (ar_placement){AR_INVARIANT, 0};
}

ar_tp_redistribution ari_tp_redistribution_backward(ar_tp_redistribution change)
{
    return (ar_tp_redistribution){ari_placed_gradient(change.dst), ari_placed_gradient(change.src)};
}

ar_status ari_note_gradient(ar_ctx *ctx, ar_param *p, const ar_tensor *x, const ar_tensor *dy)
{
    const bool cut = p->value.ndim == 1 && p->value.shape[0] != p->layout.shape[0];
    const ar_placement dy_placement = cut ? ari_shard_features : p->spread ? ari_shard_tokens : ari_replicated;
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_WEIGHT_GRADIENT, .name = p->name, .input = {dy, x}, .param = &p,
                    .params = 1, .input_placement = p->value.ndim == 1 ? &dy_placement : NULL);
}

/* --- features ----------------------------------------------------------------------------------------------------- */

size_t ari_features_sum(const ari_features *f)
{
    size_t total = 0;
    for (int i = 0; i < f->n; i++)
        total += f->width[i];
    return total;
}

/* Copies block by block between rows of all features and rows of `n` ranks from `first_rank` on, one rank after the
 * other, each with its part of every block side by side. */
static ar_status copy_blocks(ar_ctx *ctx, const ar_tensor *full, const ar_tensor *parts, const ari_features *f,
                             int first_rank, size_t n, bool extract)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->tp), total_width = ari_features_sum(f),
                 local_width = total_width / ranks;
    const size_t rows = ari_tensor_rows(full).shape[0], element_bytes = ar_dtype_bytes(full->dtype);
    size_t column = 0;
    for (int i = 0; i < f->n; i++) {
        const size_t width = f->width[i] / ranks;
        const ar_tensor in_whole = {.dtype = full->dtype,
                                    .ndim = 3,
                                    .shape = {n, rows, width},
                                    .stride = {(ptrdiff_t)width, (ptrdiff_t)total_width, 1},
                                    .data =
                                        ar_buf_at(full->data, (column + (size_t)first_rank * width) * element_bytes)};
        ar_tensor in_parts = in_whole;
        in_parts.stride[0] = (ptrdiff_t)(rows * local_width);
        in_parts.stride[1] = (ptrdiff_t)local_width;
        in_parts.data = ar_buf_at(parts->data, column / ranks * element_bytes);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, extract ? &in_parts : &in_whole, extract ? &in_whole : &in_parts));
        column += f->width[i];
    }
    return AR_OK;
}

static ari_axis features_axis(const ar_ctx *ctx, const ar_tensor *full)
{
    return ari_axis_of(full->ndim, full->shape, full->ndim - 1, ar_comm_size(ctx->tp));
}

/* Gathers y [.., s, f] from all ranks' x [.., s/N, f]: an all-gather, reordered by sequence. */
static ar_status gather_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    const int n = ar_comm_size(ctx->tp), dim = x->ndim - 2;
    ar_tensor rows, shape = *x;
    shape.shape[dim] *= (size_t)n;
    if (ari_faulty(ctx, "gather_batch_order")) {
        AR_TRY(ari_gather_rank_major(ctx, &rows, x, tag));
        return ar_tensor_view(y, x->dtype, x->ndim, shape.shape, rows.data);
    }
    const ari_axis a = ari_axis_of(x->ndim, shape.shape, dim, n);
    AR_TRY(ar_ctx_tensor(ctx, y, x->dtype, x->ndim, shape.shape));
    AR_TRY(ari_axis_gather(ctx, ctx->tp, y->data, ar_const(x->data), &a, x->dtype, tag));
    return ari_fault_gathered(ctx, y);
}

/* Returns the local positions of an x that is replicated here. Errors: AR_ERR_INDIVISIBLE. */
static ar_status own_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    AR_TRY(ari_like_own_tokens(ctx, y, x, x->shape[x->ndim - 1]));
    const ari_axis a = ari_axis_of(x->ndim, x->shape, x->ndim - 2, ar_comm_size(ctx->tp));
    return ari_axis_take(ctx, y->data, ar_const(x->data), &a, ar_comm_rank(ctx->tp), x->dtype);
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
    size_t start = 0, local_width = ari_features_sum(f) / (size_t)n;
    if (f->n > 1) {
        AR_TRY(ari_like(ctx, y, x, local_width));
        return copy_blocks(ctx, x, y, f, r, 1, true);
    }
    const ari_axis a = features_axis(ctx, x);
    ari_split_uneven(f->width[0], n, r, &start, &local_width);
    AR_TRY(ari_like(ctx, y, x, local_width));
    return ari_axis_take(ctx, y->data, ar_const(x->data), &a, r, x->dtype);
}

/* --- redistribution ----------------------------------------------------------------------------------------------- */

static ar_status sum_terms(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    AR_TRY(ari_like(ctx, y, x, x->shape[x->ndim - 1]));
    return ar_comm_all_reduce(ctx->tp, ctx->queue, y->data, ar_const(x->data), ar_tensor_count(x), x->dtype, AR_SUM,
                              tag);
}

static ar_status make_whole(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f,
                            ar_placement from_placement, const char *tag)
{
    if (ari_placed_by_tokens(from_placement))
        return gather_tokens(ctx, y, x, tag);
    if (ari_placed_by_features(from_placement))
        return gather_features(ctx, y, x, f, tag);
    if (from_placement.kind == AR_PARTIAL_SUM)
        return sum_terms(ctx, y, x, tag);
    *y = *x;
    return AR_OK;
}

static ar_status take_part(ar_ctx *ctx, ar_tensor *y, const ar_tensor *full, const ari_features *f,
                           ar_placement to_placement)
{
    if (ari_placed_by_tokens(to_placement))
        return own_tokens(ctx, y, full);
    if (ari_placed_by_features(to_placement))
        return own_features(ctx, y, full, f);
    *y = *full;
    return AR_OK;
}

/* The value between the two steps is released with the second. */
ar_status ari_tp_redistribute_of(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f,
                                 ar_tp_redistribution change, const char *tag, bool releases_input, const char *name)
{
    const ar_tensor input = *x; /* y may be x */
    ar_tensor src = *x, full;
    *y = *x;
    if (ar_comm_size(ctx->tp) == 1 || ari_placed_equal(change.src, change.dst))
        return AR_OK;
    AR_TRY(make_whole(ctx, &full, x, f, change.src, tag));
    if (releases_input)
        ari_release_placed(ctx, &src, &full);
    AR_TRY(take_part(ctx, y, &full, f, change.dst));
    if (releases_input || full.data.ptr != x->data.ptr)
        ari_release_placed(ctx, &full, y);
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_REDISTRIBUTE, .name = name, .input = {&input}, .out = {y},
                    .input_placement = &change.src, .output_placement = &change.dst);
}

ar_status ari_tp_redistribute(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ari_features *f,
                              ar_tp_redistribution change, const char *tag, bool releases_input)
{
    return ari_tp_redistribute_of(ctx, y, x, f, change, tag, releases_input, tag);
}

/* --- taps --------------------------------------------------------------------------------------------------------- */

/* Shifts dimension 0 of every box to this rank's samples of a sharded batch. */
static void place_samples(ar_layout *o, const ar_ctx *ctx)
{
    if (ctx->samples == 0 || o->ndim < 1)
        return;
    o->shape[0] = ctx->samples;
    for (size_t k = 0; k < o->nbox; k++)
        o->box[k].global[0] = ctx->first_sample;
}

/* Copies every box's part of a run of positions, which begins at `local_begin` in the rank's own order and at
 * `global_begin` in the sequence. */
static void place_run(ar_layout *dst, const ar_layout *src, int dim, size_t local_begin, size_t global_begin,
                      size_t count)
{
    for (size_t k = 0; k < src->nbox; k++) {
        const size_t box_begin = src->box[k].global[dim], end = box_begin + src->box[k].extent[dim];
        const size_t start = box_begin > local_begin ? box_begin : local_begin,
                     stop = end < local_begin + count ? end : local_begin + count;
        if (start >= stop)
            continue;
        ar_box *b = &dst->box[dst->nbox++];
        *b = src->box[k];
        b->local[dim] += start - box_begin;
        b->global[dim] = global_begin + (start - local_begin);
        b->extent[dim] = stop - start;
    }
}

/* Converts boxes of the rank's positions along a dimension to boxes of all positions. At most half of the possible
 * boxes are used. */
static void place_positions(ar_layout *o, int dim, const ar_positions *positions, size_t seq)
{
    const ar_layout before = *o;
    o->nbox = 0;
    o->shape[dim] = seq;
    place_run(o, &before, dim, 0, positions->first[0], positions->count[0]);
    place_run(o, &before, dim, positions->count[0], positions->first[1], positions->count[1]);
}

static ar_status tap(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t, ar_layout *layout)
{
    const int dim = layout->ndim - 2;
    char name[160];
    AR_TRY(ari_path(name, sizeof name, base, part));
    place_samples(layout, ctx);
    if (ar_comm_size(ctx->sequence) > 1 && dim > 0) {
        const size_t seq = ari_all_positions(ctx, layout->shape[dim]);
        const ar_positions positions = ari_local_positions(ctx, seq, false);
        place_positions(layout, dim, &positions, seq);
    }
    return ari_tap(ctx, name, pass, t, layout);
}

ar_status ari_tap_tokens(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t)
{
    return ari_tap_placed(ctx, base, part, pass, t, 0, ari_placed_stream(ctx));
}

ar_status ari_tap_full(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t)
{
    if (!ari_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ari_layout_replicate(&layout, t->ndim, t->shape, ar_comm_rank(ctx->tp), ar_comm_size(ctx->tp)));
    return tap(ctx, base, part, pass, t, &layout);
}

ar_status ari_tap_copies(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t, int dim,
                         size_t full, int copies)
{
    if (!ari_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    size_t shape[AR_MAX_DIMS] = {0};
    for (int d = 0; d < t->ndim; d++)
        shape[d] = d == dim ? full : t->shape[d];
    const int r = ar_comm_rank(ctx->tp), n = ar_comm_size(ctx->tp);
    AR_TRY(ari_layout_shard_uneven(&layout, t->ndim, shape, dim, r / copies, n / copies));
    layout.replica = r % copies;
    layout.replicas = copies;
    return tap(ctx, base, part, pass, t, &layout);
}

ar_status ari_tap_queries(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t, size_t heads,
                          size_t head_start, int copies, const ar_positions *rows, size_t seq)
{
    char name[160];
    if (!ari_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, base, part));
    AR_TRY(ari_layout_replicate(&layout, t->ndim, t->shape, ar_comm_rank(ctx->tp) % copies, copies));
    layout.shape[1] = heads;
    layout.box[0].global[1] = head_start;
    place_samples(&layout, ctx);
    place_positions(&layout, 2, rows, seq);
    return ari_tap(ctx, name, pass, t, &layout);
}

ar_status ari_tap_world(ar_ctx *ctx, const char *name, char pass, const ar_tensor *t)
{
    if (!ari_tapped(ctx))
        return AR_OK;
    ar_layout layout;
    AR_TRY(ari_layout_replicate(&layout, t->ndim, t->shape, ari_ctx_place(ctx, ARI_ALL_AXES),
                                ari_extent(&ctx->layout, ARI_ALL_AXES)));
    return ari_tap(ctx, name, pass, t, &layout);
}

ar_status ari_tap_number(ar_ctx *ctx, const char *name, char pass, float value)
{
    ar_tensor t;
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_F32, 0, NULL));
    AR_TRY(ar_ctx_upload(ctx, &t, &value));
    AR_TRY(ari_tap_world(ctx, name, pass, &t));
    ar_ctx_release(ctx, &t);
    return AR_OK;
}

ar_status ari_tap_placed(ar_ctx *ctx, const char *base, const char *part, char pass, const ar_tensor *t,
                         size_t features, ar_placement p)
{
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_REPORT, .name = base, .input = {t}, .input_placement = &p, .pass = pass));
    if (ari_placed_by_features(p))
        return ari_tap_copies(ctx, base, part, pass, t, t->ndim - 1, features, 1);
    if (ari_placed_by_tokens(p) && t->ndim > 1)
        return ari_tap_copies(ctx, base, part, pass, t, t->ndim - 2,
                              t->shape[t->ndim - 2] * (size_t)ar_comm_size(ctx->tp), 1);
    return ari_tap_full(ctx, base, part, pass, t);
}
