/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/core/record.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"

typedef struct block_module {
    ar_module base;
    ar_module *norm1, *attention, *norm2, *mlp;
    ari_dropout after_attention, after_mlp; /* of what each adds to the residual */
} block_module;

/* y = residual + drop(x). Ends x, an attention's or MLP's output, which nothing keeps. */
static ar_status add(const ari_dropout *d, ar_ctx *ctx, ar_tensor *y, const ar_tensor *residual, ar_tensor *x)
{
    AR_TRY(ari_like(ctx, y, residual, residual->shape[residual->ndim - 1]));
    AR_TRY(ari_dropout_on(ctx) ? ari_drop_add_tokens(d, ctx, y, residual, x) : ARI_KERNEL(ctx, add, y, residual, x));
    ar_ctx_release(ctx, x);
    return AR_OK;
}

/* dy as it reaches an attention or an MLP: a tensor of its own, or dy itself. */
static ar_status drop_backward(const ari_dropout *d, ar_ctx *ctx, ar_tensor *dropped, const ar_tensor *dy)
{
    *dropped = *dy;
    if (!ari_dropout_on(ctx))
        return AR_OK;
    AR_TRY(ari_like(ctx, dropped, dy, dy->shape[dy->ndim - 1]));
    return ari_drop_tokens(d, ctx, 'b', dropped, dy);
}

static void release_dropped(ar_ctx *ctx, ar_tensor *dropped)
{
    if (ari_dropout_on(ctx))
        ar_ctx_release(ctx, dropped);
}

/* r = x + attention(norm1(x)), and norm2(r). */
static ar_status up_to_mlp(block_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *r, ar_tensor *n2,
                           const ar_tensor *x, const ar_batch *batch)
{
    ar_tensor n1, a;
    AR_TRY(ar_module_forward(m->norm1, ctx, saved, &n1, x, batch));
    AR_TRY(ar_module_forward(m->attention, ctx, saved, &a, &n1, batch));
    AR_TRY(add(&m->after_attention, ctx, r, x, &a));
    AR_TRY(ari_tap_tokens(ctx, m->base.name, "attn_residual", 'f', r));
    return ar_module_forward(m->norm2, ctx, saved, n2, r, batch);
}

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    block_module *m = (block_module *)base;
    ar_tensor r, n2, f;
    AR_TRY(up_to_mlp(m, ctx, saved, &r, &n2, x, batch));
    AR_TRY(ar_module_forward(m->mlp, ctx, saved, &f, &n2, batch));
    AR_TRY(add(&m->after_mlp, ctx, y, &r, &f));
    return ari_tap_tokens(ctx, base->name, NULL, 'f', y);
}

static ar_status again(ar_module *base, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x, const ar_batch *batch)
{
    block_module *m = (block_module *)base;
    ar_tensor r, n2;
    AR_TRY(up_to_mlp(m, ctx, saved, &r, &n2, x, batch));
    return ar_module_again(m->mlp, ctx, saved, &n2, batch);
}

static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    block_module *m = (block_module *)base;
    ar_tensor dropped, df, dn2, dr, da, dn1, unwanted;
    AR_TRY(drop_backward(&m->after_mlp, ctx, &dropped, dy));
    AR_TRY(ar_module_backward(m->mlp, ctx, saved, &df, &dropped, batch));
    release_dropped(ctx, &dropped);
    ari_span_begin("%s:bwd", m->norm2->name);
    AR_TRY(ari_span_end(ari_norm_backward(m->norm2, ctx, saved, &dn2, &dr, &df, dy)));
    AR_TRY(ari_module_done(m->norm2, ctx));
    ar_ctx_release(ctx, &df);
    ar_ctx_release(ctx, &dn2);
    AR_TRY(ari_tap_tokens(ctx, base->name, "attn_residual", 'b', &dr));
    AR_TRY(drop_backward(&m->after_attention, ctx, &dropped, &dr));
    AR_TRY(ar_module_backward(m->attention, ctx, saved, &da, &dropped, batch));
    release_dropped(ctx, &dropped);
    if (!dx)
        dx = &unwanted;
    ari_span_begin("%s:bwd", m->norm1->name);
    AR_TRY(ari_span_end(ari_norm_backward(m->norm1, ctx, saved, &dn1, dx, &da, &dr)));
    AR_TRY(ari_module_done(m->norm1, ctx));
    ar_tensor *const ended[] = {&dr, &da, &dn1};
    for (size_t i = 0; i < sizeof ended / sizeof *ended; i++)
        ar_ctx_release(ctx, ended[i]);
    return ari_tap_tokens(ctx, base->name, NULL, 'b', dx);
}

static size_t children(const ar_module *base, ar_module **out, size_t cap)
{
    const block_module *m = (const block_module *)base;
    ar_module *const all[4] = {m->norm1, m->attention, m->norm2, m->mlp};
    for (size_t i = 0; i < 4 && i < cap; i++)
        out[i] = all[i];
    return 4;
}

static void destroy(ar_module *base)
{
    block_module *m = (block_module *)base;
    ar_module_destroy(m->norm1);
    ar_module_destroy(m->attention);
    ar_module_destroy(m->norm2);
    ar_module_destroy(m->mlp);
    free(m);
}

/* The options of the branches as the block's split has them. */
static void split_branches(ar_block_options *o)
{
    if (!o->split)
        return;
    o->attention.split = &o->split->attention;
    o->mlp.split = &o->split->mlp;
}

static ar_status create_children(block_module *m, ar_ctx *ctx, ar_block_options o)
{
    const size_t h = o.attention.hidden, positions = o.attention.max_positions;
    const ar_placement stream = ari_placed_stream(ctx);
    const ar_hop norm1 = {stream, o.split ? o.split->norm1 : stream},
                 norm2 = {stream, o.split ? o.split->norm2 : stream};
    char name[96];
    split_branches(&o);
    AR_TRY(ari_path(name, sizeof name, m->base.name, o.norm1 ? o.norm1 : "norm1"));
    AR_TRY(ari_norm_create(&m->norm1, ctx, name, o.norm, h, o.norm_eps, norm1));
    AR_TRY(ari_path(name, sizeof name, m->base.name, o.attention_name ? o.attention_name : "attention"));
    AR_TRY(ar_attention_create(&m->attention, ctx, name, &o.attention));
    AR_TRY(ari_dropout_init(&m->after_attention, name, ARI_DROPPED_ATTENTION, h, positions));
    AR_TRY(ari_path(name, sizeof name, m->base.name, o.norm2 ? o.norm2 : "norm2"));
    AR_TRY(ari_norm_create(&m->norm2, ctx, name, o.norm, h, o.norm_eps, norm2));
    AR_TRY(ari_path(name, sizeof name, m->base.name, o.mlp_name ? o.mlp_name : "mlp"));
    AR_TRY(ari_dropout_init(&m->after_mlp, name, ARI_DROPPED_MLP, h, positions));
    return ar_mlp_create(&m->mlp, ctx, name, &o.mlp);
}

ar_status ar_block_create(ar_module **gives, ar_ctx *ctx, const char *name, const ar_block_options *o)
{
    static const ar_module_ops ops = {.kind = "block",
                                      .forward = forward,
                                      .backward = backward,
                                      .again = again,
                                      .children = children,
                                      .destroy = destroy};
    const bool recomputes = o->index % (size_t)ari_at_least_one(ctx->recompute.every) == 0;
    block_module *m = NULL;
    AR_TRY(ari_module_begin((void **)&m, sizeof *m, &ops, name, AR_HELD_UNTOLD));
    const ar_status st = create_children(m, ctx, *o);
    if (st == AR_OK && recomputes && ctx->recompute.what == AR_RECOMPUTE_SELECTIVE)
        ar_module_recompute(m->attention);
    if (st == AR_OK && recomputes && ctx->recompute.what == AR_RECOMPUTE_FULL)
        ar_module_recompute(&m->base);
    return ari_module_end(gives, &m->base, st);
}
