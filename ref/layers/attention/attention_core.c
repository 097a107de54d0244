/* SPDX-License-Identifier: Apache-2.0 */
/* What lies between the projections and the output layer. Inside a rank everything works on local head counts. Memory:
 * the projections' output is [b, s, q | k | v]; queries, keys and values are then laid out head by head, [b, heads,
 * s, d], so that the query heads of a KV head's group are consecutive rows of one matrix: [b, kv heads, group * s, d]. */
#include "ref/layers/attention/attention.h"

#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/faults.h"
#include "ref/layers/parts.h"
#include "ref/numerics/scalar.h"

enum { SAVED_Q, SAVED_K, SAVED_V, SAVED_PROBS, SAVED_PADDING, SAVED_ADDITIVE, SAVED_COS, SAVED_SIN };

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
static ar_tensor grouped(const ari_attention *m, const ar_tensor *t)
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

/* Reports queries (copies 1), keys or values [b, s, heads, d], however they lie in memory, as the features
 * [b, s, heads * d] that they are, one head after the other. */
static ar_status tap_heads(const ari_attention *m, ar_ctx *ctx, const char *part, char pass, const ar_tensor *t,
                           size_t heads, int copies)
{
    const size_t d = m->o.head_dim, shape[3] = {t->shape[0], t->shape[1], t->shape[2] * d};
    ar_tensor features;
    if (!ar_tapped(ctx))
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &features, AR_F32, 3, shape));
    const ar_tensor by_head = projected(&features, 0, t->shape[2], d);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &by_head, t));
    AR_TRY(ari_tap_copies(ctx, m->base.name, part, pass, &features, 2, heads * d, copies));
    ar_ctx_release(ctx, &features);
    return AR_OK;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* The rows of the tables at a batch's positions, [b * s, d/2]; empty where all rows have 0 .. s-1. */
typedef struct rotation {
    ar_tensor cos, sin;
} rotation;

/* The position of every token. */
static ar_status upload_positions(ar_ctx *ctx, ar_tensor *at, const ar_batch *batch)
{
    const size_t n = batch->batch * batch->seq;
    int64_t *host = NULL;
    AR_TRY(ari_alloc((void **)&host, n, sizeof *host, "positions"));
    for (size_t i = 0; i < n; i++)
        host[i] = (int64_t)ar_batch_position(batch, i / batch->seq, i % batch->seq);
    ar_status st = ar_ctx_tensor(ctx, at, AR_I64, 1, &n);
    if (st == AR_OK)
        st = ar_ctx_upload(ctx, at, host);
    free(host);
    return st;
}

static ar_status rotation_of(ari_attention *m, ar_ctx *ctx, ar_saved *saved, rotation *r, const ar_batch *batch)
{
    const size_t n = batch->batch * batch->seq, half = m->o.head_dim / 2;
    *r = (rotation){.cos = {0}};
    if (m->o.rope && (batch->position_ids || batch->documents)) {
        const size_t whole[2] = {m->positions, half}, rows[2] = {n, half};
        ar_tensor at, cos, sin;
        AR_TRY(upload_positions(ctx, &at, batch));
        AR_TRY(ar_tensor_view(&cos, AR_F32, 2, whole, m->cos));
        AR_TRY(ar_tensor_view(&sin, AR_F32, 2, whole, m->sin));
        AR_TRY(ar_ctx_tensor(ctx, &r->cos, AR_F32, 2, rows));
        AR_TRY(ar_ctx_tensor(ctx, &r->sin, AR_F32, 2, rows));
        AR_TRY(ARI_KERNEL(ctx, gather_rows, r->cos.data, &cos, ar_const(at.data), n));
        AR_TRY(ARI_KERNEL(ctx, gather_rows, r->sin.data, &sin, ar_const(at.data), n));
        ar_ctx_release(ctx, &at);
    }
    AR_TRY(ar_saved_push(saved, m, SAVED_COS, &r->cos));
    return ar_saved_push(saved, m, SAVED_SIN, &r->sin);
}

/* [b, s, heads, d], each sample by its own positions where the batch has some. */
static ar_status rotate(ari_attention *m, ar_ctx *ctx, const ar_tensor *to, const ar_tensor *from, const rotation *r,
                        int direction)
{
    if (!r->cos.ndim)
        return ARI_KERNEL(ctx, rope, to, from, ar_const(m->cos), ar_const(m->sin), direction);
    for (size_t i = 0; i < from->shape[0]; i++) {
        const size_t at = i * from->shape[1] * (m->o.head_dim / 2) * sizeof(float);
        const ar_tensor y = ar_tensor_slice(to, 0, i, 1), x = ar_tensor_slice(from, 0, i, 1);
        AR_TRY(ARI_KERNEL(ctx, rope, &y, &x, ar_cbuf_at(ar_const(r->cos.data), at),
                          ar_cbuf_at(ar_const(r->sin.data), at), direction));
    }
    return AR_OK;
}

/* Queries, keys or values head by head; r: rotated, where the model does that. */
static ar_status lay_out(ari_attention *m, ar_ctx *ctx, ar_tensor *to, const ar_tensor *from, const rotation *r)
{
    AR_TRY(new_heads(ctx, to, from->shape[0], from->shape[2], from->shape[1], from->shape[3]));
    const ar_tensor view = swapped(to);
    if (m->o.rope && r)
        return rotate(m, ctx, &view, from, r, +1);
    return ARI_KERNEL(ctx, copy_strided, &view, from);
}

/* The global number of this rank's first query head. */
static size_t head_start(const ari_attention *m, const ar_ctx *ctx)
{
    return (size_t)(ar_comm_rank(ctx->tp) / m->copies) * m->heads;
}

static ar_status upload_masks(ar_ctx *ctx, ar_saved *saved, const ari_attention *m, ar_mask *mask,
                              const ar_batch *batch)
{
    *mask = (ar_mask){.causal = m->o.causal, .window = m->o.window, .head_start = head_start(m, ctx)};
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

/* The heads' outputs side by side, [b, s, heads * d]. */
static ar_status assemble(ari_attention *m, ar_ctx *ctx, ar_tensor *context, const ar_tensor *per_head)
{
    const size_t b = per_head->shape[0], s = per_head->shape[2], d = m->o.head_dim;
    const size_t shape[3] = {b, s, m->heads * d};
    AR_TRY(ar_ctx_tensor(ctx, context, AR_F32, 3, shape));
    size_t filled = m->heads;
    AR_TRY(ari_fault_heads(ctx, context, &filled));
    const ar_tensor all = projected(context, 0, m->heads, d), from_all = swapped(per_head);
    const ar_tensor to = ar_tensor_slice(&all, 2, 0, filled), from = ar_tensor_slice(&from_all, 2, 0, filled);
    return ARI_KERNEL(ctx, copy_strided, &to, &from);
}

/* The probabilities that weigh the values: what dropout leaves, as a tensor of its own, or `probs` itself. Drawn again
 * in the backward pass, not kept. */
static ar_status weights_of(ari_attention *m, ar_ctx *ctx, ar_tensor *weights, const ar_tensor *probs)
{
    *weights = *probs;
    if (!ari_dropout_on(ctx))
        return AR_OK;
    AR_TRY(ari_like(ctx, weights, probs, probs->shape[3]));
    return ari_drop_heads(&m->dropout, ctx, weights, probs, head_start(m, ctx));
}

static void release_weights(ar_ctx *ctx, ar_tensor *weights)
{
    if (ari_dropout_on(ctx))
        ar_ctx_release(ctx, weights);
}

ar_status ari_attend(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *context, ar_tensor *qkv,
                     const ar_batch *batch)
{
    const size_t b = qkv->shape[0], s = qkv->shape[1], d = m->o.head_dim;
    const ar_tensor q = projected(qkv, 0, m->heads, d), k = projected(qkv, m->heads, m->kv_heads, d);
    const ar_tensor v = projected(qkv, m->heads + m->kv_heads, m->kv_heads, d);
    ar_tensor qh, kh, vh, probs, weights, o;
    ar_mask mask;
    rotation r;
    AR_TRY(rotation_of(m, ctx, saved, &r, batch));
    AR_TRY(lay_out(m, ctx, &qh, &q, &r));
    AR_TRY(lay_out(m, ctx, &kh, &k, &r));
    AR_TRY(lay_out(m, ctx, &vh, &v, NULL));
    ar_ctx_release(ctx, qkv);
    if (m->o.rope) {
        const ar_tensor tq = swapped(&qh), tk = swapped(&kh);
        AR_TRY(tap_heads(m, ctx, "q_rope", 'f', &tq, m->o.heads, m->copies));
        AR_TRY(tap_heads(m, ctx, "k_rope", 'f', &tk, m->o.kv_heads, m->kv_copies));
    }
    AR_TRY(new_heads(ctx, &probs, b, m->heads, s, s));
    const ar_tensor scores = grouped(m, &probs), queries = grouped(m, &qh);
    AR_TRY(product(ctx, &scores, &queries, &kh, false, m->base.name));
    AR_TRY(upload_masks(ctx, saved, m, &mask, batch));
    AR_TRY(ARI_KERNEL(ctx, softmax_forward, probs.data, ar_const(probs.data), b, m->heads, s, ari_softmax_scale(d),
                      &mask));
    AR_TRY(ari_tap_copies(ctx, m->base.name, "probs", 'f', &probs, 1, m->o.heads, m->copies));
    AR_TRY(weights_of(m, ctx, &weights, &probs));
    if (ari_dropout_on(ctx))
        AR_TRY(ari_tap_copies(ctx, m->base.name, ARI_DROPPED_PROBS, 'f', &weights, 1, m->o.heads, m->copies));
    AR_TRY(new_heads(ctx, &o, b, m->heads, s, d));
    const ar_tensor values = ar_tensor_transposed(&vh), out = grouped(m, &o);
    const ar_tensor weighing = grouped(m, &weights);
    AR_TRY(product(ctx, &out, &weighing, &values, true, m->base.name));
    release_weights(ctx, &weights);
    AR_TRY(assemble(m, ctx, context, &o));
    ar_ctx_release(ctx, &o);
    AR_TRY(ari_tap_copies(ctx, m->base.name, "context", 'f', context, 2, m->o.heads * d, m->copies));
    AR_TRY(ar_saved_push(saved, m, SAVED_Q, &qh));
    AR_TRY(ar_saved_push(saved, m, SAVED_K, &kh));
    AR_TRY(ar_saved_push(saved, m, SAVED_V, &vh));
    return ar_saved_push(saved, m, SAVED_PROBS, &probs);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

typedef struct gradients {
    ar_tensor q, k, v; /* [b, heads or kv_heads, s, d], contiguous, of the rotated q and k */
} gradients;

/* What the forward pass kept. */
typedef struct kept {
    ar_tensor qh, kh, vh, probs;
    ar_mask mask;
    rotation r;
} kept;

static ar_status take_back(ari_attention *m, ar_ctx *ctx, ar_saved *saved, kept *f)
{
    ar_tensor padding, additive;
    AR_TRY(ar_saved_pop(saved, m, SAVED_PROBS, &f->probs));
    AR_TRY(ar_saved_pop(saved, m, SAVED_V, &f->vh));
    AR_TRY(ar_saved_pop(saved, m, SAVED_K, &f->kh));
    AR_TRY(ar_saved_pop(saved, m, SAVED_Q, &f->qh));
    AR_TRY(ar_saved_pop(saved, m, SAVED_ADDITIVE, &additive));
    AR_TRY(ar_saved_pop(saved, m, SAVED_PADDING, &padding));
    AR_TRY(ar_saved_pop(saved, m, SAVED_SIN, &f->r.sin));
    AR_TRY(ar_saved_pop(saved, m, SAVED_COS, &f->r.cos));
    f->mask = (ar_mask){.causal = m->o.causal,
                        .window = m->o.window,
                        .padding = ar_const(padding.data),
                        .additive = ar_const(additive.data),
                        .mask_batch = additive.shape[0],
                        .mask_heads = additive.shape[1],
                        .head_start = head_start(m, ctx)};
    return AR_OK;
}

/* ds, the gradient of the scores, from doh, that of the heads' outputs. */
static ar_status score_gradients(ari_attention *m, ar_ctx *ctx, ar_tensor *ds, const kept *f, const ar_tensor *doh)
{
    const size_t b = f->qh.shape[0], s = f->qh.shape[2], d = m->o.head_dim;
    ar_tensor dprobs;
    AR_TRY(new_heads(ctx, &dprobs, b, m->heads, s, s));
    AR_TRY(new_heads(ctx, ds, b, m->heads, s, s));
    const ar_tensor dp = grouped(m, &dprobs), dout = grouped(m, doh);
    AR_TRY(product(ctx, &dp, &dout, &f->vh, false, m->base.name));
    if (ari_dropout_on(ctx))
        AR_TRY(ari_drop_heads(&m->dropout, ctx, &dprobs, &dprobs, head_start(m, ctx)));
    AR_TRY(ARI_KERNEL(ctx, softmax_backward, ds->data, ar_const(f->probs.data), dprobs.data, b, m->heads, s,
                      ari_softmax_scale(d), &f->mask));
    AR_TRY(ari_tap_copies(ctx, m->base.name, "probs", 'b', &dprobs, 1, m->o.heads, m->copies));
    ar_ctx_release(ctx, &dprobs);
    return AR_OK;
}

/* A KV head's dK and dV are one contraction over (query heads of its group x queries), whichever ranks hold those:
 * completed before the rounding and before RoPE's backward. */
static ar_status head_gradients(ari_attention *m, ar_ctx *ctx, gradients *g, const kept *f, const ar_tensor *ds,
                                const ar_tensor *doh)
{
    const size_t b = f->qh.shape[0], s = f->qh.shape[2], d = m->o.head_dim;
    const product_options over_group = {.scale = true,
                                        .over = m->replicas,
                                        .k_full = m->group_full * s,
                                        .partial = ar_faulty(ctx, AR_FAULT_kv_replica_grad_local)};
    ar_tensor weights;
    AR_TRY(new_heads(ctx, &g->q, b, m->heads, s, d));
    AR_TRY(new_heads(ctx, &g->k, b, m->kv_heads, s, d));
    AR_TRY(new_heads(ctx, &g->v, b, m->kv_heads, s, d));
    AR_TRY(weights_of(m, ctx, &weights, &f->probs));
    const ar_tensor dscores = grouped(m, ds), dscores_t = ar_tensor_transposed(&dscores);
    const ar_tensor p = grouped(m, &weights), p_t = ar_tensor_transposed(&p), dq = grouped(m, &g->q);
    const ar_tensor q = grouped(m, &f->qh), q_t = ar_tensor_transposed(&q), dout = grouped(m, doh);
    const ar_tensor k_t = ar_tensor_transposed(&f->kh), do_t = ar_tensor_transposed(&dout);
    AR_TRY(product(ctx, &dq, &dscores, &k_t, true, m->base.name));
    AR_TRY(product_over(ctx, &g->k, &dscores_t, &q_t, &over_group, m->base.name));
    AR_TRY(product_over(ctx, &g->v, &p_t, &do_t, &over_group, m->base.name));
    release_weights(ctx, &weights);
    return AR_OK;
}

/* The heads' gradients back into [b, s, q | k | v], unrotated. */
static ar_status collect(ari_attention *m, ar_ctx *ctx, ar_tensor *dqkv, const gradients *g, const rotation *r)
{
    const size_t d = m->o.head_dim;
    const ar_tensor to_q = projected(dqkv, 0, m->heads, d), to_k = projected(dqkv, m->heads, m->kv_heads, d);
    const ar_tensor to_v = projected(dqkv, m->heads + m->kv_heads, m->kv_heads, d);
    const ar_tensor q = swapped(&g->q), k = swapped(&g->k), v = swapped(&g->v);
    if (m->o.rope) {
        AR_TRY(tap_heads(m, ctx, "q_rope", 'b', &q, m->o.heads, m->copies));
        AR_TRY(tap_heads(m, ctx, "k_rope", 'b', &k, m->o.kv_heads, m->kv_copies));
        AR_TRY(rotate(m, ctx, &to_q, &q, r, -1));
        AR_TRY(rotate(m, ctx, &to_k, &k, r, -1));
    } else {
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &to_q, &q));
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &to_k, &k));
    }
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &to_v, &v));
    AR_TRY(tap_heads(m, ctx, "v", 'b', &to_v, m->o.kv_heads, m->kv_copies));
    AR_TRY(tap_heads(m, ctx, "q", 'b', &to_q, m->o.heads, m->copies));
    return tap_heads(m, ctx, "k", 'b', &to_k, m->o.kv_heads, m->kv_copies);
}

ar_status ari_attend_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dqkv,
                              const ar_tensor *dcontext)
{
    kept f;
    gradients g;
    ar_tensor doh, ds;
    AR_TRY(take_back(m, ctx, saved, &f));
    const size_t shape[3] = {f.qh.shape[0], f.qh.shape[2], (m->heads + 2 * m->kv_heads) * m->o.head_dim};
    AR_TRY(new_heads(ctx, &doh, shape[0], m->heads, shape[1], m->o.head_dim));
    const ar_tensor doh_view = swapped(&doh), from = projected(dcontext, 0, m->heads, m->o.head_dim);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &doh_view, &from));
    AR_TRY(score_gradients(m, ctx, &ds, &f, &doh));
    AR_TRY(head_gradients(m, ctx, &g, &f, &ds, &doh));
    ar_tensor *const used[] = {&ds, &doh, &f.probs, &f.vh, &f.kh, &f.qh};
    for (size_t i = 0; i < sizeof used / sizeof *used; i++)
        ar_ctx_release(ctx, used[i]);
    AR_TRY(ar_ctx_tensor(ctx, dqkv, AR_F32, 3, shape));
    AR_TRY(collect(m, ctx, dqkv, &g, &f.r));
    ar_tensor *const ended[] = {&g.q, &g.k, &g.v};
    for (size_t i = 0; i < sizeof ended / sizeof *ended; i++)
        ar_ctx_release(ctx, ended[i]);
    return AR_OK;
}
