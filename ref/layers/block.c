/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/record.h"
#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"

/* A branch of a block, whose output is added to the residual: an attention or MLP with optional norms of its input and
 * output, and dropout. */
enum { BEFORE, OF, AFTER, PARTS };
typedef struct branch {
    ar_module **part; /* [PARTS] parts of the block */
    ari_dropout dropout;
    float scale; /* factor of the branch's output; 0: none */
    ari_use use; /* purpose of the memory for the input of OF */
} branch;

typedef struct block_module {
    ar_module base;
    ar_module *part[2 * PARTS]; /* parts in order of first use */
    branch attention, mlp;
    ar_residual residual;
} block_module;

/* Computes y = residual + dropout(scale*x). Ends x, an attention's or MLP's output, which is not saved. */
static ar_status add_residual(const branch *b, ar_ctx *ctx, ar_tensor *y, const ar_tensor *residual, ar_tensor *x)
{
    const ari_dropout *d = &b->dropout;
    AR_TRY(ari_like(ctx, y, residual, residual->shape[residual->ndim - 1]));
    if (b->scale != 0.0f)
        AR_TRY(ARI_KERNEL(ctx, scale, x, x, b->scale));
    AR_TRY(ari_dropout_on(ctx) ? ari_drop_add_tokens(d, ctx, y, residual, x) : ARI_KERNEL(ctx, add, y, residual, x));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .input = {x, residual}, .out = {y}));
    ar_ctx_release(ctx, x);
    ari_work_moves(ARI_GPU_MOVES_RESIDUAL, false, ar_tensor_count(y));
    return AR_OK;
}

/* Gets the branch's input: x itself, or normalised. */
static ar_status branch_input(const branch *b, ar_ctx *ctx, ar_saved *saved, ar_tensor *input, const ar_tensor *x,
                              const ar_batch *batch)
{
    *input = *x;
    return b->part[BEFORE] ? ar_module_forward(b->part[BEFORE], ctx, saved, input, x, batch) : AR_OK;
}

/* Computes y = x + the branch's output for `input`. */
static ar_status apply_branch(const branch *b, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                              const ar_tensor *input, const ar_batch *batch)
{
    ar_tensor output, normed;
    ctx->use = b->use;
    AR_TRY(ar_module_forward(b->part[OF], ctx, saved, &output, input, batch));
    ctx->use = ARI_USE_BETWEEN;
    if (!b->part[AFTER])
        return add_residual(b, ctx, y, x, &output);
    AR_TRY(ar_module_forward(b->part[AFTER], ctx, saved, &normed, &output, batch));
    return add_residual(b, ctx, y, x, &normed);
}

/* r = x + attention, and the MLP's input. */
static ar_status up_to_mlp(block_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *r, ar_tensor *input,
                           const ar_tensor *x, const ar_batch *batch)
{
    ar_tensor attention_input;
    AR_TRY(branch_input(&m->attention, ctx, saved, &attention_input, x, batch));
    AR_TRY(apply_branch(&m->attention, ctx, saved, r, x, &attention_input, batch));
    *input = attention_input;
    if (m->residual == AR_RESIDUAL_PARALLEL_ONE_NORM)
        return AR_OK;
    if (m->residual == AR_RESIDUAL_PARALLEL)
        return branch_input(&m->mlp, ctx, saved, input, x, batch);
    AR_TRY(ari_tap_tokens(ctx, m->base.name, "attn_residual", 'f', r));
    return branch_input(&m->mlp, ctx, saved, input, r, batch);
}

static ar_status block_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                               const ar_batch *batch)
{
    block_module *m = (block_module *)base;
    ar_tensor r, input;
    AR_TRY(up_to_mlp(m, ctx, saved, &r, &input, x, batch));
    AR_TRY(apply_branch(&m->mlp, ctx, saved, y, &r, &input, batch));
    return ari_tap_tokens(ctx, base->name, NULL, 'f', y);
}

/* The norm of the MLP's output needs that output, so nothing of the MLP is left out. */
static ar_status recompute_saved(ar_module *base, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                 const ar_batch *batch)
{
    block_module *m = (block_module *)base;
    ar_tensor r, input, output, normed;
    AR_TRY(up_to_mlp(m, ctx, saved, &r, &input, x, batch));
    if (!m->mlp.part[AFTER])
        return ari_module_recompute_saved(m->mlp.part[OF], ctx, saved, &input, batch);
    AR_TRY(ar_module_forward(m->mlp.part[OF], ctx, saved, &output, &input, batch));
    return ar_module_forward(m->mlp.part[AFTER], ctx, saved, &normed, &output, batch);
}

/* Computes dy before the branch's dropout and scale: a new tensor, or dy itself. */
static ar_status drop_backward(const branch *b, ar_ctx *ctx, ar_tensor *dropped, const ar_tensor *dy)
{
    *dropped = *dy;
    if (!ari_dropout_on(ctx) && b->scale == 0.0f)
        return AR_OK;
    AR_TRY(ari_like(ctx, dropped, dy, dy->shape[dy->ndim - 1]));
    if (ari_dropout_on(ctx))
        AR_TRY(ari_drop_tokens(&b->dropout, ctx, 'b', dropped, dy));
    return b->scale != 0.0f ? ARI_KERNEL(ctx, scale, dropped, ari_dropout_on(ctx) ? dropped : dy, b->scale) : AR_OK;
}

ar_status ari_add_gradient(ar_ctx *ctx, const ar_tensor *dx, ar_tensor *extra)
{
    AR_TRY(ARI_KERNEL(ctx, add, dx, dx, extra));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .input = {extra, dx}, .out = {dx}));
    ari_work_moves(ARI_GPU_MOVES_RESIDUAL, true, 2 * ar_tensor_count(dx));
    ar_ctx_release(ctx, extra);
    return AR_OK;
}

/* Computes the gradient of the branch's input from dy, the gradient of its contribution to the residual. */
static ar_status back_through(const branch *b, ar_ctx *ctx, ar_saved *saved, ar_tensor *din, const ar_tensor *dy,
                              const ar_batch *batch)
{
    ar_tensor dropped, normed;
    AR_TRY(drop_backward(b, ctx, &dropped, dy));
    normed = dropped;
    if (b->part[AFTER])
        AR_TRY(ar_module_backward(b->part[AFTER], ctx, saved, &normed, &dropped, batch));
    ctx->use = b->use;
    AR_TRY(ar_module_backward(b->part[OF], ctx, saved, din, &normed, batch));
    ctx->use = ARI_USE_BETWEEN;
    ari_release_placed(ctx, &normed, &dropped);
    ari_release_placed(ctx, &dropped, dy);
    return AR_OK;
}

/* Computes dx = dy + the gradient through the branch, which ends. */
static ar_status back_past(const branch *b, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *din,
                           const ar_tensor *dy)
{
    ar_tensor normed;
    if (!b->part[BEFORE]) {
        AR_TRY(ari_like(ctx, dx, dy, dy->shape[dy->ndim - 1]));
        AR_TRY(ARI_KERNEL(ctx, add, dx, dy, din));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .input = {din, dy}, .out = {dx}));
        ari_work_moves(ARI_GPU_MOVES_RESIDUAL, true, 2 * ar_tensor_count(dx));
        ar_ctx_release(ctx, din);
        return AR_OK;
    }
    ari_span_begin("%s:bwd", b->part[BEFORE]->name);
    AR_TRY(ari_span_end(ari_norm_backward(b->part[BEFORE], ctx, saved, &normed, dx, din, dy)));
    AR_TRY(ari_module_done(b->part[BEFORE], ctx));
    ARI_RELEASE(ctx, din, &normed);
    return AR_OK;
}

/* Backward pass of a block whose branches share a norm: dx = dy + the gradient of the sum of both branches through the
 * norm. */
static ar_status back_through_one_norm(const block_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                       const ar_tensor *dy, const ar_batch *batch)
{
    ar_tensor din, of_mlp;
    AR_TRY(back_through(&m->mlp, ctx, saved, &of_mlp, dy, batch));
    AR_TRY(back_through(&m->attention, ctx, saved, &din, dy, batch));
    AR_TRY(ari_add_gradient(ctx, &din, &of_mlp));
    return back_past(&m->attention, ctx, saved, dx, &din, dy);
}

static ar_status block_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                const ar_batch *batch)
{
    block_module *m = (block_module *)base;
    const bool in_turn = m->residual == AR_RESIDUAL_IN_TURN;
    ar_tensor din, dr, unwanted;
    if (!dx)
        dx = &unwanted;
    if (m->residual == AR_RESIDUAL_PARALLEL_ONE_NORM) {
        AR_TRY(back_through_one_norm(m, ctx, saved, dx, dy, batch));
        return ari_tap_tokens(ctx, base->name, NULL, 'b', dx);
    }
    AR_TRY(back_through(&m->mlp, ctx, saved, &din, dy, batch));
    AR_TRY(back_past(&m->mlp, ctx, saved, &dr, &din, dy));
    if (in_turn)
        AR_TRY(ari_tap_tokens(ctx, base->name, "attn_residual", 'b', &dr));
    AR_TRY(back_through(&m->attention, ctx, saved, &din, in_turn ? &dr : dy, batch));
    AR_TRY(back_past(&m->attention, ctx, saved, dx, &din, &dr));
    ar_ctx_release(ctx, &dr);
    return ari_tap_tokens(ctx, base->name, NULL, 'b', dx);
}

/* Sets the options of the branches to the block's split. */
static void split_branches(ar_block_options *o)
{
    if (!o->split)
        return;
    o->attention.split = &o->split->attention;
    o->mlp.split = &o->split->mlp;
    o->experts.split = &o->split->mlp;
}

ar_status ari_block_norm(ar_module **out, ar_ctx *ctx, const char *block, const char *part, const ar_block_options *o,
                         ar_placement placement)
{
    const ari_norm_options norm = {.kind = o->norm,
                                   .h = o->attention.hidden,
                                   .eps = o->norm_eps,
                                   .plus_one = o->norm_plus_one,
                                   .no_bias = o->norm_no_bias};
    char name[96];
    AR_TRY(ari_path(name, sizeof name, block, part));
    return ari_norm_create(out, ctx, name, &norm, (ar_tp_redistribution){ari_placed_stream(ctx), placement});
}

static ar_status create_children(block_module *m, ar_ctx *ctx, ar_block_options o)
{
    const size_t h = o.attention.hidden, positions = o.attention.max_positions;
    const ar_placement stream = ari_placed_stream(ctx);
    const bool before = o.norm_place != AR_NORM_AFTER, after = o.norm_place != AR_NORM_BEFORE;
    char name[96];
    split_branches(&o);
    m->residual = o.residual;
    m->attention.part = m->part;
    m->mlp.part = m->part + PARTS;
    m->attention.use = ARI_USE_ATTENTION;
    m->mlp.use = ARI_USE_MLP;
    m->attention.scale = m->mlp.scale = (float)o.branch_scale;
    if (before)
        AR_TRY(ari_block_norm(&m->attention.part[BEFORE], ctx, m->base.name, o.norm1 ? o.norm1 : "norm1", &o,
                              o.split ? o.split->norm1 : stream));
    AR_TRY(ari_path(name, sizeof name, m->base.name, o.attention_name ? o.attention_name : "attention"));
    AR_TRY(ar_attention_create(&m->attention.part[OF], ctx, name, &o.attention));
    AR_TRY(ari_dropout_init(&m->attention.dropout, name, ARI_DROPPED_ATTENTION, h, positions));
    if (after)
        AR_TRY(ari_block_norm(&m->attention.part[AFTER], ctx, m->base.name,
                              o.attention_norm ? o.attention_norm : "attention_norm", &o, stream));
    if (before && o.residual != AR_RESIDUAL_PARALLEL_ONE_NORM)
        AR_TRY(ari_block_norm(&m->mlp.part[BEFORE], ctx, m->base.name, o.norm2 ? o.norm2 : "norm2", &o,
                              o.split ? o.split->norm2 : stream));
    AR_TRY(ari_path(name, sizeof name, m->base.name, o.mlp_name ? o.mlp_name : "mlp"));
    AR_TRY(ari_dropout_init(&m->mlp.dropout, name, ARI_DROPPED_MLP, h, positions));
    AR_TRY(o.experts.n > 0 ? ar_experts_create(&m->mlp.part[OF], ctx, name, &o.experts)
                           : ar_mlp_create(&m->mlp.part[OF], ctx, name, &o.mlp));
    return after ? ari_block_norm(&m->mlp.part[AFTER], ctx, m->base.name, o.mlp_norm ? o.mlp_norm : "mlp_norm", &o,
                                  stream)
                 : AR_OK;
}

ar_status ar_block_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_block_options *o)
{
    static const ar_module_ops ops = {.kind = "block",
                                      .forward = block_forward,
                                      .backward = block_backward,
                                      .recompute = recompute_saved,
                                      .children_at = offsetof(block_module, part),
                                      .children_count = 2 * PARTS};
    const bool recomputes = o->index % (size_t)ari_at_least_one(ctx->recompute.every) == 0;
    block_module *m = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, AR_HELD_UNKNOWN));
    ar_status st = create_children(m, ctx, *o);
    if (st == AR_OK && recomputes)
        st = ari_module_recompute(&m->base, ctx->recompute.part);
    return ari_module_end(out, &m->base, st);
}
