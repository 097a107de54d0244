/* SPDX-License-Identifier: Apache-2.0 */
/* The conjugate operators at the ends of the tensor-parallel regions, and redistributions as modules. */
#include "ref/arith/arith_private.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/parts.h"
#include "ref/placement/axis.h"
#include "ref/placement/placement_private.h"

/* A redistribution over the tensor-parallel group, of equal parts, with sums in the communicator's order. */
static ar_status redistribute_equal(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_placement from_placement,
                                    ar_placement to_placement, const char *operation, const char *tag)
{
    const ar_tensor input = *x; /* y may be x */
    const int n = ar_comm_size(ctx->tp);
    const ar_mesh_groups groups = {.mesh = {1, {{"tp", n}}}, .coords = {ar_comm_rank(ctx->tp)}, .comm = {ctx->tp}};
    ar_redistribution r = {.ndim = x->ndim, .src = {from_placement}, .dst = {to_placement}};
    size_t part[AR_MAX_DIMS];
    bool is_folded = false;
    if (from_placement.kind == AR_PARTIAL_SUM)
        AR_TRY(ari_unsummed_take(&is_folded, ctx, y, &input, to_placement, tag));
    for (int d = 0; d < x->ndim && !is_folded; d++)
        r.shape[d] = x->shape[d] * (from_placement.kind == AR_SHARD &&
                                            d == from_placement.dim + (from_placement.dim < 0 ? x->ndim : 0)
                                        ? (size_t)n
                                        : 1);
    if (!is_folded) {
        AR_TRY(ar_placements_region(NULL, part, &groups.mesh, groups.coords, &to_placement, x->ndim, r.shape, false));
        AR_TRY(ari_redistribute(ctx, &groups, y, &input, &r, ari_arith_native(AR_PRECISION_F32), tag));
    }
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_REDISTRIBUTE, .operation = operation, .input = {&input}, .out = {y},
                    .input_placement = &from_placement, .output_placement = &to_placement);
}

static ar_status redistribute_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, ar_placement from_placement,
                                       ar_placement to_placement, const char *operation, const char *tag)
{
    ar_placement dfrom, dto;
    AR_TRY(ari_placement_gradient(&dfrom, from_placement));
    AR_TRY(ari_placement_gradient(&dto, to_placement));
    return redistribute_equal(ctx, dx, dy, dto, dfrom, operation, tag);
}

static const ar_placement invariant = {AR_INVARIANT, 0}, partial = {AR_PARTIAL_SUM, 0};

/* Returns the placement between two regions: replicated, or with sequence parallelism the rank's own positions. */
static ar_placement stream_of(const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) ? ari_shard_tokens : invariant;
}

#define CONJUGATE(name, from, to)                                                                  \
    ar_status ar_##name(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)                             \
    {                                                                                              \
        return redistribute_equal(ctx, y, x, from, to, #name, #name);                              \
    }                                                                                              \
    ar_status ar_##name##_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy)                \
    {                                                                                              \
        return redistribute_backward(ctx, dx, dy, from, to, #name " backward", #name " backward"); \
    }
CONJUGATE(copy_to_region, invariant, ari_replicated)
CONJUGATE(reduce_from_region, partial, invariant)
CONJUGATE(gather_from_region, ari_shard_features, invariant)
CONJUGATE(scatter_to_region, invariant, ari_shard_features)
CONJUGATE(gather_tokens, ari_shard_tokens, ari_replicated)
CONJUGATE(scatter_tokens, partial, ari_shard_tokens)
CONJUGATE(enter_region, stream_of(ctx), ari_replicated)
CONJUGATE(leave_region, partial, stream_of(ctx))

/* --- features and the stream -------------------------------------------------------------------------------------- */

ar_status ari_features_to_stream(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    return redistribute_equal(ctx, y, x, ari_shard_features, stream_of(ctx), "gather", tag);
}

ar_status ari_stream_to_features(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    return redistribute_equal(ctx, y, x, stream_of(ctx), ari_shard_features, "scatter", tag);
}

/* --- a redistribution as a module --------------------------------------------------------------------------------- */

typedef struct redistribution_module {
    ar_module base;
    ar_placement from_placement, to_placement;
} redistribution_module;

static ar_status move_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                              const ar_batch *batch)
{
    const redistribution_module *m = (const redistribution_module *)base;
    (void)saved, (void)batch;
    return redistribute_equal(ctx, y, x, m->from_placement, m->to_placement, base->ops->kind, base->name);
}

static ar_status move_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                               const ar_batch *batch)
{
    const redistribution_module *m = (const redistribution_module *)base;
    (void)saved, (void)batch;
    return dx ? redistribute_backward(ctx, dx, dy, m->from_placement, m->to_placement, base->ops->kind, base->name)
              : AR_OK;
}

ar_status ari_redistribution_create(ar_module **out, ar_ctx *ctx, const char *name, ar_placement from_placement,
                                    ar_placement to_placement)
{
    static const ar_module_ops ops = {.kind = "redistribution", .forward = move_forward, .backward = move_backward};
    redistribution_module *m = NULL;
    ar_placement gradient;
    (void)ctx;
    AR_TRY(ari_placement_gradient(&gradient, from_placement));
    AR_TRY(ari_placement_gradient(&gradient, to_placement));
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, AR_HELD_UNKNOWN));
    m->from_placement = from_placement;
    m->to_placement = to_placement;
    *out = &m->base;
    return AR_OK;
}
