/* SPDX-License-Identifier: Apache-2.0 */
/* Attention with heads divided over ranks. With fewer KV heads than ranks, neighbouring ranks have copies of one KV
 * head, each with some of its query heads. */
#include <stdlib.h>

#include "ref/core/tensor_private.h"
#include "ref/layers/attention/attention.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/faults.h"
#include "ref/layers/layers_private.h"
#include "ref/numerics/rope_check.h"

/* --- forward ------------------------------------------------------------------------------------------------------ */

static void free_tables(ari_attention *m, ar_queue *q)
{
    if (!m->device)
        return;
    m->device->ops->free(m->device, q, m->cos);
    m->device->ops->free(m->device, q, m->sin);
    m->cos = m->sin = (ar_buf){NULL};
    m->positions = 0;
}

/* Creates tables for as many positions as the batch has, because a config may allow a hundred thousand. If the
 * frequencies depend on the length of a sequence, all batches of a step have the length of the global one. */
static ar_status ensure_tables(ari_attention *m, ar_ctx *ctx, const ar_batch *batch)
{
    const ar_rope *rope = &m->o.rope;
    size_t positions = batch->seq;
    if (!rope->kind)
        return AR_OK;
    for (size_t i = 0; batch->position_ids && i < batch->batch * batch->seq; i++) {
        if ((size_t)batch->position_ids[i] >= positions)
            positions = (size_t)batch->position_ids[i] + 1;
    }
    const size_t length = ari_rope_length(rope, ari_batch_longest(batch));
    if (positions <= m->positions && length == m->length)
        return AR_OK;
    const size_t bytes = (positions * (ar_rope_dim(rope, m->o.head_dim) / 2) + 1) * sizeof(float);
    const ar_rope effective_rope = ari_rope_at(rope, ari_batch_longest(batch), m->o.head_dim);
    free_tables(m, ctx->queue);
    m->device = ctx->device;
    AR_TRY(ari_ctx_alloc(ctx, &m->cos, bytes));
    AR_TRY(ari_ctx_alloc(ctx, &m->sin, bytes));
    AR_TRY(ARI_KERNEL(ctx, rope_tables, m->cos, m->sin, positions, m->o.head_dim, &effective_rope));
    m->positions = positions;
    m->length = length;
    return AR_OK;
}

static ar_status tap_projections(ari_attention *m, ar_ctx *ctx, const ar_tensor *qkv)
{
    static const char *const fused_names[3] = {"q", "k", "v"};
    for (int i = 0; i < 3; i++) {
        const ar_tensor heads = ari_heads_of(m, qkv, i);
        AR_TRY(ari_tap_heads(m, ctx, i, m->o.fused ? fused_names[i] : ari_leaf_of(m, m->qkv_name[i]), 'f', &heads));
    }
    return AR_OK;
}

/* Fault: gathers the projections' input for each of them, although they share one product and its gather. */
static ar_status gather_for_each(const ari_attention *m, ar_ctx *ctx, const ar_tensor *input)
{
    const ar_tp_redistribution change = {m->split.first.input, ari_replicated};
    const bool gathers = m->split.first.style != AR_STYLE_ROWWISE;
    return gathers ? ari_fault_gather_again(ctx, input, &m->qkv.in_features, change, m->qkv.weight[0]->name) : AR_OK;
}

static ar_status check_input(const ari_attention *m, const ar_ctx *ctx, const ar_tensor *x, const ar_batch *batch)
{
    const size_t ranks = ari_placed_by_tokens(m->split.enter.src) ? (size_t)ar_comm_size(ctx->tp) : 1;
    const size_t shared = ranks * (size_t)ar_comm_size(ctx->sequence);
    AR_TRY(batch ? ari_check_sequence(ctx, batch->seq) : AR_OK);
    if (x->ndim != 3 || !batch || x->shape[0] != batch->batch || x->shape[1] * shared != batch->seq)
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: input must be [batch, seq, hidden] of the batch given with it, or this rank's "
                            "positions of that",
                            m->base.name);
    if (m->o.rope.kind && batch->seq > m->o.max_positions)
        return ar_error_set(AR_ERR_SHAPE, "%s: a sequence of %zu is longer than the %zu positions of the model",
                            m->base.name, batch->seq, m->o.max_positions);
    if (batch->additive_mask && batch->mask_heads != 1 && batch->mask_heads != m->o.heads)
        return ar_error_set(AR_ERR_SHAPE, "%s: additive_mask has %zu heads, expected 1 or %zu", m->base.name,
                            batch->mask_heads, m->o.heads);
    return ari_batch_check(batch, m->o.rope.kind ? m->o.max_positions : SIZE_MAX);
}

/* Computes everything except the output layer. */
static ar_status make_context(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *context, const ar_tensor *x,
                              const ar_batch *batch)
{
    ar_tensor input, qkv;
    AR_TRY(check_input(m, ctx, x, batch));
    AR_TRY(ensure_tables(m, ctx, batch));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, &input, x, m->split.enter, false));
    if (m->latent) {
        AR_TRY(ari_latent_forward(m, ctx, saved, &qkv, &input));
        return ari_attend(m, ctx, saved, context, &qkv, batch);
    }
    AR_TRY(gather_for_each(m, ctx, &input));
    AR_TRY(ari_linear_forward(&m->qkv, ctx, saved, &qkv, &input, AR_ACT_NONE, NULL));
    AR_TRY(tap_projections(m, ctx, &qkv));
    return ari_attend(m, ctx, saved, context, &qkv, batch);
}

static ar_status attention_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                   const ar_batch *batch)
{
    ari_attention *m = (ari_attention *)base;
    ar_tensor context, out;
    AR_TRY(make_context(m, ctx, saved, &context, x, batch));
    AR_TRY(ari_linear_forward(&m->out, ctx, saved, &out, &context, AR_ACT_NONE, NULL));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, y, &out, m->split.leave, true));
    return ari_tap_placed(ctx, m->out_name, NULL, 'f', y, m->o.hidden, m->split.leave.dst);
}

static ar_status recompute_saved(ar_module *base, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                 const ar_batch *batch)
{
    ari_attention *m = (ari_attention *)base;
    ar_tensor context;
    AR_TRY(make_context(m, ctx, saved, &context, x, batch));
    return ari_linear_recompute(&m->out, ctx, saved, &context);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

static ar_status attention_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                    const ar_batch *batch)
{
    (void)batch;
    ari_attention *m = (ari_attention *)base;
    ar_tensor dout, dcontext, dqkv, din;
    ari_input_prefetch prefetch = {.layer = &m->qkv};
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, &dout, dy, ari_tp_redistribution_backward(m->split.leave), false));
    AR_TRY(ari_linear_backward(&m->out, ctx, saved, &dcontext, &dout, m->out_name, m->latent ? NULL : &prefetch));
    ari_release_placed(ctx, &dout, dy);
    AR_TRY(ari_attend_backward(m, ctx, saved, &dqkv, &dcontext));
    ar_ctx_release(ctx, &dcontext);
    /* q, k and v share one dX: the whole attention's, or c_attn's */
    AR_TRY(m->latent ? ari_latent_backward(m, ctx, saved, dx ? &din : NULL, &dqkv)
                     : ari_linear_backward(&m->qkv, ctx, saved, dx ? &din : NULL, &dqkv,
                                           m->o.fused ? m->qkv_name[0] : base->name, &prefetch));
    ar_ctx_release(ctx, &dqkv);
    return dx ? ARI_REDISTRIBUTE(m, ctx, dx, &din, ari_tp_redistribution_backward(m->split.enter), true) : AR_OK;
}

/* --- construction ------------------------------------------------------------------------------------------------- */

static size_t attention_params(const ar_module *base, ar_param **out, size_t cap)
{
    ari_attention *m = (ari_attention *)(uintptr_t)base;
    size_t n = m->latent ? ari_latent_params(m, out, cap) : ari_linear_params(&m->qkv, out, cap);
    n += ari_qk_norm_params(m, out + (n < cap ? n : cap), n < cap ? cap - n : 0);
    if (m->o.sinks && n < cap)
        out[n] = &m->sinks;
    n += m->o.sinks;
    return n + ari_linear_params(&m->out, out + (n < cap ? n : cap), n < cap ? cap - n : 0);
}

static void attention_destroy(ar_module *base)
{
    ari_attention *m = (ari_attention *)base;
    ari_linear_fini(&m->qkv);
    ari_latent_destroy(m);
    ari_qk_norm_fini(m);
    ar_param_fini(&m->sinks);
    ari_linear_fini(&m->out);
    ari_ring_transfers_fini(&m->hops);
    free(m->largest);
    free(m->clip);
    free_tables(m, NULL);
    free(m);
}

static ar_status check_heads(ari_attention *m, ar_ctx *ctx)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->tp);
    const bool by_heads = ari_placed_by_features(m->split.first.output);
    const size_t n = by_heads ? ranks : 1, inner = (size_t)ar_comm_size(ctx->inner); /* number of ranks that divide
                                                                                        the heads */
    const ar_attention_options *o = &m->o;
    if (o->heads == 0 || o->kv_heads == 0 || o->heads % o->kv_heads != 0)
        return ar_error_set(AR_ERR_ARG, "%s: %zu query heads cannot share %zu KV heads", m->base.name, o->heads,
                            o->kv_heads);
    if (o->heads % n != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s: %zu query heads cannot be split over tp=%zu; use a tp that divides %zu", m->base.name,
                            o->heads, n, o->heads);
    if (o->kv_heads % n != 0 && n % o->kv_heads != 0)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%s: %zu KV heads cannot be split over or copied to tp=%zu; use a tp that divides %zu or is "
            "a multiple of it",
            m->base.name, o->kv_heads, n, o->kv_heads);
    if (o->fused && o->kv_heads % n != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s: %zu KV heads in one parameter with the queries cannot be split over tp=%zu, and it "
                            "has no copies of a head; use a tp that divides %zu",
                            m->base.name, o->kv_heads, n, o->kv_heads);
    if (o->kv_heads % n != 0 && m->split.first.style != AR_STYLE_COLWISE)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s: %zu KV heads of %s projections cannot be split over tp=%zu; only colwise ones have "
                            "copies of a head",
                            m->base.name, o->kv_heads, ari_style_name(m->split.first.style), n);
    AR_TRY(ari_head_shares_check(m->base.name, ctx, o->heads / n, o->kv_heads > n ? o->kv_heads / n : 1));
    m->copies = (int)(ranks / n);
    m->kv_copies = n > o->kv_heads ? (int)(n / o->kv_heads) : m->copies;
    m->heads = o->heads / n;
    m->kv_heads = o->kv_heads > n ? o->kv_heads / n : 1;
    m->group_full = o->heads / o->kv_heads;
    return n * inner > o->kv_heads ? ari_ctx_replicas(ctx, &m->replicas, (int)o->kv_heads, by_heads) : AR_OK;
}

static ar_status init_linears(ari_attention *m, ar_ctx *ctx)
{
    const ar_attention_options *o = &m->o;
    const size_t q = o->heads * o->head_dim, kv = o->kv_heads * o->head_dim;
    const bool by_heads = ari_placed_by_features(m->split.first.output); /* otherwise rows need not belong to heads */
    ari_linear_spec qkv = {.split = m->split.first,
                           .n = 3,
                           .in_features = o->hidden,
                           .bias = o->qkv_bias,
                           .transposed = o->transposed,
                           .owns_input = !ari_placed_equal(m->split.enter.src, m->split.enter.dst)};
    for (int i = 0; i < 3; i++)
        qkv.part[i] = (ari_linear_part){
            .name = m->qkv_name[i], .out = i == 0 ? q : kv, .copies = i > 0 && by_heads ? m->kv_copies : 1};
    if (o->fused) {
        qkv.n = 1;
        qkv.part[0] = (ari_linear_part){
            .name = m->qkv_name[0], .out = q + 2 * kv, .blocks = o->by_head ? 0 : 3, .block = {q, kv, kv}};
    }
    const ari_linear_spec out = {.split = m->split.second,
                                 .n = 1,
                                 .part = {{.name = m->out_name, .out = o->hidden}},
                                 .in_features = o->heads * m->value_dim,
                                 .bias = o->out_bias,
                                 .transposed = o->transposed,
                                 .owns_input = true};
    AR_TRY(m->latent ? AR_OK : ari_linear_init(&m->qkv, ctx, &qkv));
    return ari_linear_init(&m->out, ctx, &out);
}

/* Cut as the heads are. */
static ar_status init_sinks(ari_attention *m, ar_ctx *ctx)
{
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    const bool by_heads = ari_placed_by_features(m->split.first.output);
    char name[ARI_PART_PATH];
    ar_layout layout;
    if (!m->o.sinks)
        return AR_OK;
    AR_TRY(ari_path(name, sizeof name, m->base.name, "sinks"));
    AR_TRY(by_heads ? ar_layout_shard(&layout, 1, &m->o.heads, 0, r, n)
                    : ari_layout_replicate(&layout, 1, &m->o.heads, r, n));
    AR_TRY(ar_param_init(&m->sinks, ctx, name, &layout, false));
    m->sinks.init = AR_INIT_UNIFORM_BIAS;
    m->sinks.fan_in = m->sinks.fan_out = m->o.head_dim;
    return AR_OK;
}

ar_status ari_attention_paths(char qkv[3][ARI_PART_PATH], char out[ARI_PART_PATH], const char *name,
                              const ar_attention_options *o)
{
    const char *const parts[3] = {o->q ? o->q : o->fused ? "qkv" : "q", o->k ? o->k : "k", o->v ? o->v : "v"};
    for (int i = 0; i < (o->fused ? 1 : 3); i++)
        AR_TRY(ari_path(qkv[i], ARI_PART_PATH, name, parts[i]));
    return ari_path(out, ARI_PART_PATH, name, o->out ? o->out : "out");
}

static ar_status init_attention(ari_attention *m, ar_ctx *ctx, const ar_attention_options *o)
{
    const char *name = m->base.name;
    m->o = *o;
    m->value_dim = o->latent.kv_rank > 0 ? o->latent.value_dim : o->head_dim;
    m->split = o->split ? *o->split : ari_branch_of(AR_STYLE_COLWISE, AR_STYLE_ROWWISE, ari_placed_stream(ctx));
    AR_TRY(ari_attention_paths(m->qkv_name, m->out_name, name, o));
    AR_TRY(ari_dropout_init(&m->dropout, name, ARI_DROPPED_PROBS, o->heads, o->max_positions));
    AR_TRY(check_heads(m, ctx));
    AR_TRY(ari_ring_transfers_init(&m->hops, ctx, name));
    AR_TRY(ari_qk_norm_init(m, ctx));
    AR_TRY(init_sinks(m, ctx));
    AR_TRY(ari_latent_create(m, ctx));
    return init_linears(m, ctx);
}

static const ar_module_ops attention_ops = {.kind = "attention",
                                            .forward = attention_forward,
                                            .backward = attention_backward,
                                            .recompute = recompute_saved,
                                            .params = attention_params,
                                            .selective = true,
                                            .destroy = attention_destroy};

ari_attention *ari_attention_of(ar_module *m)
{
    return m->ops == &attention_ops ? (ari_attention *)m : NULL;
}

ar_status ar_attention_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_attention_options *o)
{
    ari_attention *m = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&m, &attention_ops, name, AR_HELD_UNKNOWN));
    return ari_module_end(out, &m->base, init_attention(m, ctx, o));
}
