/* SPDX-License-Identifier: Apache-2.0 */
/* Attention with the heads split over ranks. Inside a rank everything works on local head counts, computed once. Where
 * there are fewer KV heads than ranks, neighbouring ranks are copies of one KV head, each with some of its query heads.
 * Memory: the projections' output is [b, s, q | k | v]; queries and keys are then laid out head by head, [b, heads, s,
 * d], so that the query heads of a KV head's group are consecutive rows of one matrix: [b, kv heads, group * s, d]. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/dropout.h"
#include "ref/layers/linear.h"
#include "ref/layers/parts.h"
#include "ref/numerics/scalar.h"

typedef struct attention_module {
    ar_module base;
    ar_attention_options o;
    char qkv_name[3][96], out_name[96];
    ari_linear qkv, out;
    size_t heads, kv_heads, group; /* of this rank; group = query heads of one KV head */
    size_t group_full;             /* query heads of a KV head on all ranks that hold it */
    int copies;                    /* ranks that hold each KV head */
    ar_comm *replicas;             /* those that hold this rank's, borrowed; NULL: it alone */
    ari_dropout dropout;           /* of the probabilities */
    ar_buf cos, sin;               /* [positions, d/2], made for the longest sequence so far */
    size_t positions;
    ar_device *device; /* that owns the tables */
} attention_module;

enum { SAVED_QKV, SAVED_Q, SAVED_K, SAVED_PROBS, SAVED_PADDING, SAVED_ADDITIVE };

/* --- views -------------------------------------------------------------------------------------------------------- */

/* Heads [first, first + heads) of the projections' output, as [b, s, heads, d]. */
static ar_tensor projected(const ar_tensor *qkv, size_t first, size_t heads, size_t d)
{
    const ptrdiff_t width = (ptrdiff_t)qkv->shape[2];
    ar_tensor t = {.dtype = AR_F32,
                   .ndim = 4,
                   .shape = {qkv->shape[0], qkv->shape[1], heads, d},
                   .stride = {width * (ptrdiff_t)qkv->shape[1], width, (ptrdiff_t)d, 1},
                   .data = ar_buf_at(qkv->data, first * d * sizeof(float))};
    return t;
}

/* [b, s, heads, d] <-> [b, heads, s, d], as a view. */
static ar_tensor swapped(const ar_tensor *t)
{
    ar_tensor v = *t;
    v.shape[1] = t->shape[2];
    v.shape[2] = t->shape[1];
    v.stride[1] = t->stride[2];
    v.stride[2] = t->stride[1];
    return v;
}

/* Contiguous [b, heads, rows, cols] as [b, kv heads, group * rows, cols]. */
static ar_tensor grouped(const attention_module *m, const ar_tensor *t)
{
    const size_t shape[4] = {t->shape[0], m->kv_heads, m->group * t->shape[2], t->shape[3]};
    ar_tensor v = *t;
    ptrdiff_t stride = 1;
    for (int i = 3; i >= 0; i--) {
        v.shape[i] = shape[i];
        v.stride[i] = stride;
        stride *= (ptrdiff_t)shape[i];
    }
    return v;
}

static ar_status new_heads(ar_ctx *ctx, ar_tensor *t, size_t b, size_t heads, size_t rows, size_t cols)
{
    const size_t shape[4] = {b, heads, rows, cols};
    return ar_ctx_tensor(ctx, t, AR_F32, 4, shape);
}

/* y = a b^T for every (sample, head). scale: equilibrate by b's columns. over: the group that shares the k_full terms,
 * or NULL; partial: a mistake leaves each rank its own. */
typedef struct product_options {
    bool scale;
    ar_comm *over;
    size_t k_full;
    bool partial;
} product_options;

static ar_status product_over(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b,
                              const product_options *o, const char *tag)
{
    const ar_operand *oa = NULL, *ob = NULL;
    ar_sum *s = NULL;
    const ar_parts pa = {.n = 1, .part = {*a}}, pb = {.n = 1, .part = {*b}};
    AR_TRY(ctx->arith->operand_b(ctx, &ob, &pb, o->scale, o->k_full, o->over, NULL, tag));
    AR_TRY(ctx->arith->operand_a(ctx, &oa, &pa, ob, tag));
    AR_TRY(ctx->arith->contract(ctx, &s, oa, ob));
    AR_TRY(ctx->arith->fold(ctx, s, o->over, o->partial ? AR_KEEP : AR_ALL, tag));
    AR_TRY(ctx->arith->round(ctx, y, s, NULL));
    ctx->arith->operand_done(ctx, oa);
    ctx->arith->operand_done(ctx, ob);
    return AR_OK;
}

/* The same with all terms here. */
static ar_status product(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b, bool scale,
                         const char *tag)
{
    const product_options o = {.scale = scale, .k_full = b->shape[3]};
    return product_over(ctx, y, a, b, &o, tag);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static void free_tables(attention_module *m)
{
    if (!m->device)
        return;
    m->device->ops->free(m->device, m->cos);
    m->device->ops->free(m->device, m->sin);
    m->cos = m->sin = (ar_buf){NULL};
    m->positions = 0;
}

/* Tables for as many positions as a sequence has: a config may allow a hundred thousand. */
static ar_status ensure_tables(attention_module *m, ar_ctx *ctx, size_t positions)
{
    if (!m->o.rope || positions <= m->positions)
        return AR_OK;
    const size_t bytes = (positions * (m->o.head_dim / 2) + 1) * sizeof(float);
    free_tables(m);
    m->device = ctx->device;
    AR_TRY(ctx->device->ops->alloc(ctx->device, &m->cos, bytes));
    AR_TRY(ctx->device->ops->alloc(ctx->device, &m->sin, bytes));
    AR_TRY(ctx->device->ops->rope_tables(ctx->device, ctx->queue, m->cos, m->sin, positions, m->o.head_dim,
                                         m->o.rope_theta, m->o.rope_factor));
    m->positions = positions;
    return AR_OK;
}

/* Queries or keys head by head, rotated. */
static ar_status lay_out(attention_module *m, ar_ctx *ctx, ar_tensor *to, const ar_tensor *from)
{
    AR_TRY(new_heads(ctx, to, from->shape[0], from->shape[2], from->shape[1], from->shape[3]));
    const ar_tensor view = swapped(to);
    if (m->o.rope)
        return ctx->device->ops->rope(ctx->device, ctx->queue, &view, from, ar_const(m->cos), ar_const(m->sin), +1);
    return ctx->device->ops->copy_strided(ctx->device, ctx->queue, &view, from);
}

static ar_status tap_projections(attention_module *m, ar_ctx *ctx, const ar_tensor *qkv)
{
    static const char *const fused_names[3] = {"q", "k", "v"};
    const size_t local[3] = {m->heads, m->kv_heads, m->kv_heads};
    const size_t full[3] = {m->o.heads, m->o.kv_heads, m->o.kv_heads};
    const int copies[3] = {1, m->copies, m->copies};
    size_t at = 0;
    for (int i = 0; i < 3; i++) {
        const ar_tensor t = ar_tensor_slice(qkv, 2, at * m->o.head_dim, local[i] * m->o.head_dim);
        AR_TRY(ari_tap_copies(ctx, m->o.fused ? m->base.name : m->qkv_name[i], m->o.fused ? fused_names[i] : NULL, 'f',
                              &t, 2, full[i] * m->o.head_dim, copies[i]));
        at += local[i];
    }
    return AR_OK;
}

/* The global number of this rank's first query head. */
static size_t head_start(const attention_module *m, const ar_ctx *ctx)
{
    return (size_t)ar_comm_rank(ctx->tp) * m->heads;
}

static ar_status upload_masks(ar_ctx *ctx, ar_saved *saved, const attention_module *m, ar_mask *mask,
                              const ar_batch *batch)
{
    *mask = (ar_mask){.causal = m->o.causal, .head_start = head_start(m, ctx)};
    ar_tensor padding = {0}, additive = {0};
    if (batch->padding_mask) {
        const size_t shape[2] = {batch->batch, batch->seq};
        AR_TRY(ar_ctx_tensor(ctx, &padding, AR_U8, 2, shape));
        AR_TRY(ar_ctx_upload(ctx, &padding, batch->padding_mask));
        mask->padding = ar_const(padding.data);
    }
    if (batch->additive_mask) {
        const size_t shape[4] = {batch->mask_batch, batch->mask_heads, batch->seq, batch->seq};
        AR_TRY(ar_ctx_tensor(ctx, &additive, AR_F32, 4, shape));
        AR_TRY(ar_ctx_upload(ctx, &additive, batch->additive_mask));
        mask->additive = ar_const(additive.data);
        mask->mask_batch = batch->mask_batch;
        mask->mask_heads = batch->mask_heads;
    }
    AR_TRY(ar_saved_push(saved, m, SAVED_PADDING, &padding));
    return ar_saved_push(saved, m, SAVED_ADDITIVE, &additive);
}

/* The heads' outputs side by side, [b, s, heads * d]; a mistake fills only a part of them. */
static ar_status assemble(attention_module *m, ar_ctx *ctx, ar_tensor *context, const ar_tensor *per_head)
{
    const size_t b = per_head->shape[0], s = per_head->shape[2], d = m->o.head_dim;
    const size_t shape[3] = {b, s, m->heads * d};
    AR_TRY(ar_ctx_tensor(ctx, context, AR_F32, 3, shape));
    size_t filled = m->heads;
    if (ar_faulty(ctx, AR_FAULT_heads_divided_twice)) {
        filled /= (size_t)ar_comm_size(ctx->tp);
        AR_TRY(ctx->device->ops->fill(ctx->device, ctx->queue, context->data, 0.0f, ar_tensor_count(context)));
    }
    const ar_tensor all = projected(context, 0, m->heads, d), from_all = swapped(per_head);
    const ar_tensor to = ar_tensor_slice(&all, 2, 0, filled), from = ar_tensor_slice(&from_all, 2, 0, filled);
    return ctx->device->ops->copy_strided(ctx->device, ctx->queue, &to, &from);
}

/* The probabilities that weigh the values: what dropout leaves, as a tensor of its own, or `probs` itself. Drawn again
 * in the backward pass, not kept. */
static ar_status weights_of(attention_module *m, ar_ctx *ctx, ar_tensor *weights, const ar_tensor *probs)
{
    *weights = *probs;
    if (!ari_dropout_on(ctx))
        return AR_OK;
    AR_TRY(ari_like(ctx, weights, probs, probs->shape[3]));
    return ari_drop_heads(&m->dropout, ctx, weights, probs, head_start(m, ctx));
}

static ar_status attend(attention_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *context, const ar_tensor *qkv,
                        const ar_batch *batch)
{
    const size_t b = qkv->shape[0], s = qkv->shape[1], d = m->o.head_dim;
    const ar_tensor q = projected(qkv, 0, m->heads, d), k = projected(qkv, m->heads, m->kv_heads, d);
    const ar_tensor v = projected(qkv, m->heads + m->kv_heads, m->kv_heads, d);
    ar_tensor qh, kh, probs, weights, o;
    ar_mask mask;
    AR_TRY(lay_out(m, ctx, &qh, &q));
    AR_TRY(lay_out(m, ctx, &kh, &k));
    if (m->o.rope) {
        const ar_tensor tq = swapped(&qh), tk = swapped(&kh);
        AR_TRY(ari_tap_shard(ctx, m->base.name, "q_rope", 'f', &tq, 2, m->o.heads));
        AR_TRY(ari_tap_copies(ctx, m->base.name, "k_rope", 'f', &tk, 2, m->o.kv_heads, m->copies));
    }
    AR_TRY(new_heads(ctx, &probs, b, m->heads, s, s));
    const ar_tensor scores = grouped(m, &probs), queries = grouped(m, &qh);
    AR_TRY(product(ctx, &scores, &queries, &kh, false, m->base.name));
    AR_TRY(upload_masks(ctx, saved, m, &mask, batch));
    AR_TRY(ctx->device->ops->softmax_forward(ctx->device, ctx->queue, probs.data, ar_const(probs.data), b, m->heads, s,
                                             ari_softmax_scale(d), &mask));
    AR_TRY(ari_tap_shard(ctx, m->base.name, "probs", 'f', &probs, 1, m->o.heads));
    AR_TRY(weights_of(m, ctx, &weights, &probs));
    if (ari_dropout_on(ctx))
        AR_TRY(ari_tap_shard(ctx, m->base.name, ARI_DROPPED_PROBS, 'f', &weights, 1, m->o.heads));
    AR_TRY(new_heads(ctx, &o, b, m->heads, s, d));
    const ar_tensor vh = swapped(&v), values = ar_tensor_transposed(&vh), out = grouped(m, &o);
    const ar_tensor weighing = grouped(m, &weights);
    AR_TRY(product(ctx, &out, &weighing, &values, true, m->base.name));
    if (ari_dropout_on(ctx))
        ar_ctx_release(ctx, &weights);
    AR_TRY(assemble(m, ctx, context, &o));
    ar_ctx_release(ctx, &o);
    AR_TRY(ari_tap_shard(ctx, m->base.name, "context", 'f', context, 2, m->o.heads * d));
    AR_TRY(ar_saved_push(saved, m, SAVED_QKV, qkv));
    AR_TRY(ar_saved_push(saved, m, SAVED_Q, &qh));
    AR_TRY(ar_saved_push(saved, m, SAVED_K, &kh));
    return ar_saved_push(saved, m, SAVED_PROBS, &probs);
}

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    attention_module *m = (attention_module *)base;
    const size_t ranks = ari_ctx_sp(ctx) ? (size_t)ar_comm_size(ctx->tp) : 1;
    if (x->ndim != 3 || !batch || x->shape[0] != batch->batch || x->shape[1] * ranks != batch->seq)
        return ar_error_set(AR_ERR_SHAPE, "%s: input must be [batch, seq, hidden] of the batch given with it",
                            base->name);
    if (m->o.rope && batch->seq > m->o.max_positions)
        return ar_error_set(AR_ERR_SHAPE, "%s: a sequence of %zu is longer than the %zu positions of the model",
                            base->name, batch->seq, m->o.max_positions);
    ar_tensor qkv, context;
    AR_TRY(ensure_tables(m, ctx, batch->seq));
    AR_TRY(ari_linear_forward(&m->qkv, ctx, saved, &qkv, x, AR_ACT_NONE, NULL));
    AR_TRY(tap_projections(m, ctx, &qkv));
    AR_TRY(attend(m, ctx, saved, &context, &qkv, batch));
    AR_TRY(ari_linear_forward(&m->out, ctx, saved, y, &context, AR_ACT_NONE, NULL));
    return ari_tap_tokens(ctx, m->out_name, NULL, 'f', y);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

typedef struct gradients {
    ar_tensor q, k, v; /* [b, heads or kv_heads, s, d], contiguous, of the rotated q and k */
} gradients;

static ar_status attend_backward(attention_module *m, ar_ctx *ctx, ar_saved *saved, gradients *g, ar_tensor *qkv,
                                 const ar_tensor *dcontext)
{
    ar_tensor qh, kh, probs, weights, padding, additive, doh, dprobs, ds;
    AR_TRY(ar_saved_pop(saved, m, SAVED_PROBS, &probs));
    AR_TRY(ar_saved_pop(saved, m, SAVED_K, &kh));
    AR_TRY(ar_saved_pop(saved, m, SAVED_Q, &qh));
    AR_TRY(ar_saved_pop(saved, m, SAVED_QKV, qkv));
    AR_TRY(ar_saved_pop(saved, m, SAVED_ADDITIVE, &additive));
    AR_TRY(ar_saved_pop(saved, m, SAVED_PADDING, &padding));
    const size_t b = qkv->shape[0], s = qkv->shape[1], d = m->o.head_dim;
    const ar_mask mask = {.causal = m->o.causal,
                          .padding = ar_const(padding.data),
                          .additive = ar_const(additive.data),
                          .mask_batch = additive.shape[0],
                          .mask_heads = additive.shape[1],
                          .head_start = head_start(m, ctx)};
    AR_TRY(new_heads(ctx, &doh, b, m->heads, s, d));
    const ar_tensor doh_view = swapped(&doh), from = projected(dcontext, 0, m->heads, d);
    AR_TRY(ctx->device->ops->copy_strided(ctx->device, ctx->queue, &doh_view, &from));

    const ar_tensor v = projected(qkv, m->heads + m->kv_heads, m->kv_heads, d), vh = swapped(&v);
    AR_TRY(new_heads(ctx, &dprobs, b, m->heads, s, s));
    AR_TRY(new_heads(ctx, &ds, b, m->heads, s, s));
    const ar_tensor dp = grouped(m, &dprobs), dout = grouped(m, &doh);
    AR_TRY(product(ctx, &dp, &dout, &vh, false, m->base.name));
    if (ari_dropout_on(ctx))
        AR_TRY(ari_drop_heads(&m->dropout, ctx, &dprobs, &dprobs, head_start(m, ctx)));
    AR_TRY(ctx->device->ops->softmax_backward(ctx->device, ctx->queue, ds.data, ar_const(probs.data), dprobs.data, b,
                                              m->heads, s, ari_softmax_scale(d), &mask));
    AR_TRY(ari_tap_shard(ctx, m->base.name, "probs", 'b', &dprobs, 1, m->o.heads));
    ar_ctx_release(ctx, &dprobs);

    /* A KV head's dK and dV are one contraction over (query heads of its group x queries), whichever ranks hold those:
     * completed before the rounding and before RoPE's backward. */
    const product_options over_group = {.scale = true,
                                        .over = m->replicas,
                                        .k_full = m->group_full * s,
                                        .partial = ar_faulty(ctx, AR_FAULT_kv_replica_grad_local)};
    AR_TRY(new_heads(ctx, &g->q, b, m->heads, s, d));
    AR_TRY(new_heads(ctx, &g->k, b, m->kv_heads, s, d));
    AR_TRY(new_heads(ctx, &g->v, b, m->kv_heads, s, d));
    const ar_tensor dscores = grouped(m, &ds), dscores_t = ar_tensor_transposed(&dscores);
    AR_TRY(weights_of(m, ctx, &weights, &probs));
    const ar_tensor p = grouped(m, &weights), p_t = ar_tensor_transposed(&p), dq = grouped(m, &g->q);
    const ar_tensor q = grouped(m, &qh), q_t = ar_tensor_transposed(&q);
    const ar_tensor k_t = ar_tensor_transposed(&kh), do_t = ar_tensor_transposed(&dout);
    AR_TRY(product(ctx, &dq, &dscores, &k_t, true, m->base.name));
    AR_TRY(product_over(ctx, &g->k, &dscores_t, &q_t, &over_group, m->base.name));
    AR_TRY(product_over(ctx, &g->v, &p_t, &do_t, &over_group, m->base.name));
    ar_ctx_release(ctx, &ds);
    ar_ctx_release(ctx, &doh);
    if (ari_dropout_on(ctx))
        ar_ctx_release(ctx, &weights);
    ar_ctx_release(ctx, &probs);
    ar_ctx_release(ctx, &kh);
    ar_ctx_release(ctx, &qh);
    return AR_OK;
}

/* The heads' gradients back into [b, s, q | k | v], unrotated. */
static ar_status collect(attention_module *m, ar_ctx *ctx, ar_tensor *dqkv, const gradients *g)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t d = m->o.head_dim;
    const ar_tensor to_q = projected(dqkv, 0, m->heads, d), to_k = projected(dqkv, m->heads, m->kv_heads, d);
    const ar_tensor to_v = projected(dqkv, m->heads + m->kv_heads, m->kv_heads, d);
    const ar_tensor q = swapped(&g->q), k = swapped(&g->k), v = swapped(&g->v);
    if (m->o.rope) {
        AR_TRY(ari_tap_shard(ctx, m->base.name, "q_rope", 'b', &q, 2, m->o.heads));
        AR_TRY(ari_tap_copies(ctx, m->base.name, "k_rope", 'b', &k, 2, m->o.kv_heads, m->copies));
        AR_TRY(dev->rope(ctx->device, ctx->queue, &to_q, &q, ar_const(m->cos), ar_const(m->sin), -1));
        AR_TRY(dev->rope(ctx->device, ctx->queue, &to_k, &k, ar_const(m->cos), ar_const(m->sin), -1));
    } else {
        AR_TRY(dev->copy_strided(ctx->device, ctx->queue, &to_q, &q));
        AR_TRY(dev->copy_strided(ctx->device, ctx->queue, &to_k, &k));
    }
    AR_TRY(dev->copy_strided(ctx->device, ctx->queue, &to_v, &v));
    AR_TRY(ari_tap_copies(ctx, m->base.name, "v", 'b', &to_v, 2, m->o.kv_heads, m->copies));
    AR_TRY(ari_tap_shard(ctx, m->base.name, "q", 'b', &to_q, 2, m->o.heads));
    return ari_tap_copies(ctx, m->base.name, "k", 'b', &to_k, 2, m->o.kv_heads, m->copies);
}

static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    (void)batch;
    attention_module *m = (attention_module *)base;
    ar_tensor dcontext, qkv, dqkv;
    gradients g;
    AR_TRY(ari_linear_backward(&m->out, ctx, saved, &dcontext, dy, m->out_name));
    AR_TRY(attend_backward(m, ctx, saved, &g, &qkv, &dcontext));
    AR_TRY(ari_like(ctx, &dqkv, &qkv, qkv.shape[2]));
    AR_TRY(collect(m, ctx, &dqkv, &g));
    ar_ctx_release(ctx, &g.q);
    ar_ctx_release(ctx, &g.k);
    ar_ctx_release(ctx, &g.v);
    ar_ctx_release(ctx, &qkv);
    ar_ctx_release(ctx, &dcontext);
    /* q, k and v share one dX: the whole attention's, or c_attn's. */
    AR_TRY(ari_linear_backward(&m->qkv, ctx, saved, dx, &dqkv, m->o.fused ? m->qkv_name[0] : base->name));
    ar_ctx_release(ctx, &dqkv);
    return AR_OK;
}

/* --- construction ------------------------------------------------------------------------------------------------- */

static size_t params(const ar_module *base, ar_param **out, size_t cap)
{
    attention_module *m = (attention_module *)(uintptr_t)base;
    const size_t n = ari_linear_params(&m->qkv, out, cap);
    return n + ari_linear_params(&m->out, out + (n < cap ? n : cap), n < cap ? cap - n : 0);
}

static void destroy(ar_module *base)
{
    attention_module *m = (attention_module *)base;
    ari_linear_fini(&m->qkv);
    ari_linear_fini(&m->out);
    free_tables(m);
    free(m);
}

static ar_status check_heads(attention_module *m, ar_ctx *ctx)
{
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    const ar_attention_options *o = &m->o;
    if (o->heads == 0 || o->kv_heads == 0 || o->heads % o->kv_heads != 0)
        return ar_error_set(AR_ERR_ARG, "%s: %zu query heads cannot share %zu KV heads", m->base.name, o->heads,
                            o->kv_heads);
    if (o->fused && o->heads != o->kv_heads)
        return ar_error_set(AR_ERR_ARG,
                            "%s: one parameter for q, k and v needs as many KV heads (%zu) as query heads (%zu)",
                            m->base.name, o->kv_heads, o->heads);
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
    m->copies = n > o->kv_heads ? (int)(n / o->kv_heads) : 1;
    m->heads = o->heads / n;
    m->kv_heads = o->kv_heads > n ? o->kv_heads / n : 1;
    m->group = m->heads / m->kv_heads;
    m->group_full = o->heads / o->kv_heads;
    return m->copies > 1 ? ari_ctx_replicas(ctx, &m->replicas, (int)o->kv_heads) : AR_OK;
}

static ar_status init_linears(attention_module *m, ar_ctx *ctx)
{
    const ar_attention_options *o = &m->o;
    const size_t q = o->heads * o->head_dim, kv = o->kv_heads * o->head_dim;
    ari_linear_spec qkv = {
        .style = ARI_COLUMN, .in = o->hidden, .bias = o->qkv_bias, .transposed = o->fused, .sequence = ari_ctx_sp(ctx)};
    if (o->fused) {
        qkv.n = 1;
        qkv.part[0] = (ari_linear_part){.name = m->qkv_name[0], .out = 3 * q, .blocks = 3};
    } else {
        qkv.n = 3;
        for (int i = 0; i < 3; i++)
            qkv.part[i] =
                (ari_linear_part){.name = m->qkv_name[i], .out = i == 0 ? q : kv, .copies = i == 0 ? 1 : m->copies};
    }
    const ari_linear_spec out = {.style = ARI_ROW,
                                 .n = 1,
                                 .part = {{.name = m->out_name, .out = o->hidden}},
                                 .in = q,
                                 .bias = o->out_bias,
                                 .transposed = o->fused,
                                 .input_is_sharded = true,
                                 .sequence = ari_ctx_sp(ctx)};
    AR_TRY(ari_linear_init(&m->qkv, ctx, &qkv));
    return ari_linear_init(&m->out, ctx, &out);
}

ar_status ar_attention_create(ar_module **gives, ar_ctx *ctx, const char *name, const ar_attention_options *o)
{
    static const ar_module_ops ops = {
        .kind = "attention", .forward = forward, .backward = backward, .params = params, .destroy = destroy};
    attention_module *m = NULL;
    AR_TRY(ari_alloc_zero((void **)&m, 1, sizeof *m, name));
    m->base.ops = &ops;
    m->o = *o;
    const char *const parts[3] = {o->q, o->k, o->v};
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ari_path(m->base.name, sizeof m->base.name, name, NULL));
    for (int i = 0; i < (o->fused ? 1 : 3); i++)
        AR_TRY_TO(failed, st, ari_path(m->qkv_name[i], sizeof m->qkv_name[i], name, parts[i]));
    AR_TRY_TO(failed, st, ari_path(m->out_name, sizeof m->out_name, name, o->out));
    AR_TRY_TO(failed, st, ari_dropout_init(&m->dropout, name, ARI_DROPPED_PROBS, o->heads, o->max_positions));
    AR_TRY_TO(failed, st, check_heads(m, ctx));
    AR_TRY_TO(failed, st, init_linears(m, ctx));
    *gives = &m->base;
    return AR_OK;
failed:
    destroy(&m->base);
    return st;
}
