/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/layers.h"
#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/faults.h"
#include "ref/numerics/philox.h"
#include "ref/placement/parallel_private.h"

ar_status ari_dropout_init(ari_dropout *d, const char *base, const char *part, size_t width, size_t positions)
{
    *d = (ari_dropout){.width = width, .positions = positions};
    return ari_path(d->name, sizeof d->name, base, part);
}

bool ari_dropout_on(const ar_ctx *ctx)
{
    return ctx->dropout > 0.0;
}

/* Position of a local value in the full value; dimension 0 is the samples. */
typedef struct place {
    size_t extent[AR_MAX_DIMS]; /* extents of the full value; [0] is unused */
    size_t start[AR_MAX_DIMS];
    uint64_t seed;
} place;

/* The number of an element: sample by sample, then as the full value's dimensions say. */
static ar_status number_elements(ar_dropout *w, const ari_dropout *d, ar_ctx *ctx, const ar_tensor *x, const place *p)
{
    const size_t samples = ctx->samples > 0 ? ctx->samples : x->shape[0];
    size_t stride = 1;
    for (int i = x->ndim - 1; i >= 0; i--) {
        if (i > 0 && p->start[i] + x->shape[i] > p->extent[i])
            return ar_error_set(AR_ERR_SHAPE, "%s: dimension %d reaches %zu, of %zu that are numbered", d->name, i,
                                p->start[i] + x->shape[i], p->extent[i]);
        w->stride[i] = stride;
        w->first += (uint64_t)stride * p->start[i];
        if (ari_mul_size(&stride, stride, i > 0 ? p->extent[i] : samples) != AR_OK)
            return ar_error_set(AR_ERR_OVERFLOW,
                                "%s: %zu samples of %zu positions have more elements than 64 bits can number", d->name,
                                samples, d->positions);
    }
    return AR_OK;
}

/* y = drop(x) and sum = residual + y, in the kernel's form; NULL as there. */
typedef struct dropped {
    const ar_tensor *y, *sum, *x, *residual;
} dropped;

static ar_status drop_numbered(const ari_dropout *d, ar_ctx *ctx, const dropped *v, const place *p)
{
    ar_dropout w = {.key = ari_stream_key(p->seed, d->name),
                    .step = ari_fault_mask_step(ctx),
                    .threshold = ari_dropout_threshold(ctx->dropout),
                    .scale = ari_dropout_scale(ctx->dropout)};
    AR_TRY(number_elements(&w, d, ctx, v->x, p));
    return ARI_KERNEL(ctx, dropout, v->y, v->sum, v->x, v->residual, &w);
}

/* This rank's part along each dimension. */
typedef struct dropped_part {
    ar_tensor y, sum, x, residual;
    dropped view;
} dropped_part;

static const ar_tensor *slice(ar_tensor *part, const ar_tensor *t, int dim, size_t start, size_t count)
{
    if (!t)
        return NULL;
    *part = ar_tensor_slice(t, dim, start, count);
    return part;
}

static const dropped *part_of(dropped_part *p, const dropped *v, int dim, size_t start, size_t count)
{
    p->view = (dropped){.y = slice(&p->y, v->y, dim, start, count),
                        .sum = slice(&p->sum, v->sum, dim, start, count),
                        .x = slice(&p->x, v->x, dim, start, count),
                        .residual = slice(&p->residual, v->residual, dim, start, count)};
    return &p->view;
}

/* Copies of samples use the numbers of their originals. */
static ar_status drop(const ari_dropout *d, ar_ctx *ctx, const dropped *v, const place *origin)
{
    const size_t distinct = ctx->distinct, samples = v->x->shape[0];
    if (distinct == 0 || origin->start[0] + samples <= distinct)
        return drop_numbered(d, ctx, v, origin);
    for (size_t i = 0, n; i < samples; i += n) {
        dropped_part part;
        place p = *origin;
        p.start[0] = (origin->start[0] + i) % distinct;
        n = distinct - p.start[0] < samples - i ? distinct - p.start[0] : samples - i;
        AR_TRY(drop_numbered(d, ctx, part_of(&part, v, 0, i, n), &p));
    }
    return AR_OK;
}

/* Drops a value [samples, positions, ..] with these positions. Consecutive elements of a sample have consecutive
 * numbers within each run of positions. */
static ar_status drop_positions(const ari_dropout *d, ar_ctx *ctx, const dropped *v, const place *origin,
                                const ar_positions *local_positions)
{
    place p = *origin;
    p.start[1] = local_positions->first[0];
    if (local_positions->count[1] == 0)
        return drop(d, ctx, v, &p);
    for (size_t i = 0; i < v->x->shape[0]; i++) {
        dropped_part sample, run_of;
        const dropped *v_i = part_of(&sample, v, 0, i, 1);
        p.start[0] = origin->start[0] + i;
        for (int run = 0; run < 2; run++) {
            const size_t run_begin = run ? local_positions->count[0] : 0;
            p.start[1] = local_positions->first[run];
            AR_TRY(drop(d, ctx, part_of(&run_of, v_i, 1, run_begin, local_positions->count[run]), &p));
        }
    }
    return AR_OK;
}

static ar_status drop_tokens(const ari_dropout *d, ar_ctx *ctx, const dropped *v)
{
    const ar_tensor *x = v->x;
    const size_t r = (size_t)ar_comm_rank(ctx->tp);
    const size_t ranks = ari_sequence_ranks(ctx), seq = ari_all_positions(ctx, x->shape[1] * ranks);
    ar_positions local_positions = ari_local_positions(ctx, seq, false);
    local_positions = ari_positions_part(&local_positions,
                                         ranks > 1 && !ari_faulty(ctx, "dropout_same_mask_in_shard") ? r : 0, ranks);
    place p = {.extent = {0, d->positions, d->width}, .start = {ctx->first_sample}, .seed = ctx->seed};
    if (!ari_ctx_sp(ctx) && ari_faulty(ctx, "dropout_different_mask_in_replica"))
        p.seed += r;
    return drop_positions(d, ctx, v, &p, &local_positions);
}

ar_status ari_drop_tokens(const ari_dropout *d, ar_ctx *ctx, char pass, const ar_tensor *y, const ar_tensor *x)
{
    AR_TRY(drop_tokens(d, ctx, &(dropped){.y = y, .x = x}));
    ari_work_moves(ARI_GPU_MOVES_DROPOUT, pass == 'b', ar_tensor_count(y));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_DROPOUT, .input = {x}, .out = {y}));
    return pass ? ari_tap_tokens(ctx, d->name, NULL, pass, y) : AR_OK;
}

ar_status ari_drop_add_tokens(const ari_dropout *d, ar_ctx *ctx, const ar_tensor *sum, const ar_tensor *residual,
                              const ar_tensor *x)
{
    const bool tapped = ari_tapped(ctx);
    AR_TRY(drop_tokens(d, ctx, &(dropped){.y = tapped ? x : NULL, .sum = sum, .x = x, .residual = residual}));
    ari_work_moves(ARI_GPU_MOVES_DROPOUT, false, ar_tensor_count(x));
    return tapped ? ari_tap_tokens(ctx, d->name, NULL, 'f', x) : AR_OK;
}

/* Drops a value [samples, width] or [samples, positions, width], or (sharded) the tensor-parallel rank's block of its
 * features. With sequence parallelism a replicated value has the local positions. Not tapped. */
static ar_status drop_features(const ari_dropout *d, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *x, bool sharded)
{
    const size_t r = (size_t)ar_comm_rank(ctx->tp), n = sharded ? (size_t)ar_comm_size(ctx->tp) : 1;
    const int last_dim = x->ndim - 1;
    if ((last_dim != 1 && last_dim != 2) || !ari_tensor_is_contiguous(x) || x->shape[last_dim] * n != d->width)
        return ar_error_set(
            AR_ERR_SHAPE,
            "%s: dropout takes [samples, features] or [samples, positions, features] of %zu features, contiguous",
            d->name, d->width / n);
    if (!sharded && last_dim == 2)
        return ari_drop_tokens(d, ctx, '\0', y, x);
    place p = {.extent = {0, d->positions, d->width}, .start = {ctx->first_sample}, .seed = ctx->seed};
    p.extent[last_dim] = d->width;
    p.start[last_dim] = sharded ? r * x->shape[last_dim] : 0;
    const dropped v = {.y = y, .x = x};
    if (last_dim == 1)
        return drop(d, ctx, &v, &p);
    const ar_positions local_positions = ari_local_positions(ctx, ari_all_positions(ctx, x->shape[1]), false);
    return drop_positions(d, ctx, &v, &p, &local_positions);
}

ar_status ari_drop_heads(const ari_dropout *d, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *x,
                         const size_t origin[AR_MAX_DIMS])
{
    const place p = {.extent = {0, d->width, d->positions, d->positions},
                     .start = {ctx->first_sample + origin[0], origin[1], origin[2], origin[3]},
                     .seed = ctx->seed};
    return drop(d, ctx, &(dropped){.y = y, .x = x}, &p);
}

/* --- as a module -------------------------------------------------------------------------------------------------- */

typedef struct dropout_module {
    ar_module base;
    ari_dropout place;
} dropout_module;

/* The gradient is dropped as the value was: the mask is drawn again. */
static ar_status drop_value(ar_module *base, ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    const dropout_module *m = (const dropout_module *)base;
    *y = *x;
    if (!ari_dropout_on(ctx))
        return AR_OK;
    AR_TRY(ar_like(ctx, y, x));
    return drop_features(&m->place, ctx, y, x, base->tap == AR_HELD_SHARD);
}

static ar_status dropout_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                 const ar_batch *batch)
{
    (void)saved, (void)batch;
    return drop_value(base, ctx, y, x);
}

static ar_status dropout_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                  const ar_batch *batch)
{
    (void)saved, (void)batch;
    return dx ? drop_value(base, ctx, dx, dy) : AR_OK;
}

ar_status ar_dropout_create(ar_module **out, ar_ctx *ctx, const char *name, size_t positions, size_t width,
                            ar_held placement)
{
    static const ar_module_ops ops = {.kind = "dropout", .forward = dropout_forward, .backward = dropout_backward};
    (void)ctx;
    dropout_module *m = NULL;
    if (placement == AR_HELD_UNKNOWN)
        return ar_error_set(AR_ERR_ARG, "%s: dropout needs to know whether its features are whole or a shard", name);
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, placement));
    return ari_module_end(out, &m->base, ari_dropout_init(&m->place, name, NULL, width, positions));
}
