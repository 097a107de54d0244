/* SPDX-License-Identifier: Apache-2.0 */
/* The query heads of a KV head's group are consecutive rows of one matrix: [b, kv heads, group * s, d]. */
#include "ref/layers/attention/core.h"

#include "ref/numerics/scalar.h"

enum { SAVED_PROBS = 16, SAVED_PADDING, SAVED_ADDITIVE };

/* --- views -------------------------------------------------------------------------------------------------------- */

/* Contiguous [b, heads, rows, cols] as [b, kv heads, group * rows, cols]. */
static ar_tensor grouped(const ari_core *c, const ar_tensor *t)
{
    const size_t shape[4] = {t->shape[0], c->kv_heads, c->heads / c->kv_heads * t->shape[2], t->shape[3]};
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

/* --- queries of some positions ------------------------------------------------------------------------------------ */

/* Copies between rows [b, heads, rows, d] and their places among all positions, [b, heads, seq, d]. */
static ar_status copy_rows(const ari_core *c, ar_ctx *ctx, const ar_tensor *whole, const ar_tensor *rows, bool spread)
{
    for (size_t run = 0, at = 0; run < 2; at += c->rows.count[run++]) {
        const ar_tensor there = ar_tensor_slice(whole, 2, c->rows.first[run], c->rows.count[run]);
        const ar_tensor here = ar_tensor_slice(rows, 2, at, c->rows.count[run]);
        if (c->rows.count[run] > 0)
            AR_TRY(ARI_KERNEL(ctx, copy_strided, spread ? &there : &here, spread ? &here : &there));
    }
    return AR_OK;
}

static bool has_all_rows(const ari_core *c)
{
    return ar_positions_count(&c->rows) == c->seq;
}

/* *y = rows among zeros for the other positions; x itself where it has all of them. */
static ar_status spread_rows(const ari_core *c, ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    *y = *x;
    if (has_all_rows(c))
        return AR_OK;
    AR_TRY(new_heads(ctx, y, x->shape[0], x->shape[1], c->seq, x->shape[3]));
    AR_TRY(ARI_KERNEL(ctx, zero, y->data, ar_tensor_count(y) * sizeof(float)));
    return copy_rows(c, ctx, y, x, true);
}

/* x becomes its rows at the positions here. */
static ar_status own_rows(const ari_core *c, ar_ctx *ctx, ar_tensor *x)
{
    ar_tensor rows;
    if (has_all_rows(c))
        return AR_OK;
    AR_TRY(new_heads(ctx, &rows, x->shape[0], x->shape[1], ar_positions_count(&c->rows), x->shape[3]));
    AR_TRY(copy_rows(c, ctx, x, &rows, false));
    ar_ctx_release(ctx, x);
    *x = rows;
    return AR_OK;
}

static void release_spread(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    if (y->data.ptr != x->data.ptr)
        ar_ctx_release(ctx, y);
}

static ar_status tap_rows(const ari_core *c, ar_ctx *ctx, const char *part, char pass, const ar_tensor *t)
{
    ar_tensor rows = *t;
    if (!ar_tapped(ctx))
        return AR_OK;
    if (!has_all_rows(c)) {
        AR_TRY(new_heads(ctx, &rows, t->shape[0], t->shape[1], ar_positions_count(&c->rows), t->shape[3]));
        AR_TRY(copy_rows(c, ctx, t, &rows, false));
    }
    AR_TRY(ari_tap_queries(ctx, c->name, part, pass, &rows, c->heads_full, c->head_start, c->copies, &c->rows));
    release_spread(ctx, &rows, t);
    return AR_OK;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static ar_status upload_masks(ar_ctx *ctx, ar_saved *saved, const void *owner, const ari_core *c, ar_mask *mask,
                              const ar_batch *batch)
{
    *mask = (ar_mask){.causal = c->causal, .window = c->window, .head_start = c->head_start};
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
    AR_TRY(ar_saved_push(saved, owner, SAVED_PADDING, &padding));
    return ar_saved_push(saved, owner, SAVED_ADDITIVE, &additive);
}

/* The probabilities that weigh the values: what dropout leaves, as a tensor of its own, or `probs` itself. Drawn again
 * in the backward pass, not kept. */
static ar_status weights_of(const ari_core *c, ar_ctx *ctx, ar_tensor *weights, const ar_tensor *probs)
{
    *weights = *probs;
    if (!ari_dropout_on(ctx))
        return AR_OK;
    AR_TRY(ari_like(ctx, weights, probs, probs->shape[3]));
    return ari_drop_heads(c->dropout, ctx, weights, probs, c->head_start);
}

static void release_weights(ar_ctx *ctx, ar_tensor *weights)
{
    if (ari_dropout_on(ctx))
        ar_ctx_release(ctx, weights);
}

ar_status ari_core_forward(const ari_core *c, ar_ctx *ctx, ar_saved *saved, const void *owner, ar_tensor *o,
                           const ar_tensor *q, const ar_tensor *k, const ar_tensor *v, const ar_batch *batch)
{
    const size_t b = q->shape[0], s = c->seq, d = c->head_dim;
    ar_tensor all_q, probs, weights;
    ar_mask mask;
    AR_TRY(spread_rows(c, ctx, &all_q, q));
    AR_TRY(new_heads(ctx, &probs, b, c->heads, s, s));
    const ar_tensor scores = grouped(c, &probs), queries = grouped(c, &all_q);
    AR_TRY(product(ctx, &scores, &queries, k, false, c->name));
    release_spread(ctx, &all_q, q);
    AR_TRY(upload_masks(ctx, saved, owner, c, &mask, batch));
    AR_TRY(ARI_KERNEL(ctx, softmax_forward, probs.data, ar_const(probs.data), b, c->heads, s, ari_softmax_scale(d),
                      &mask));
    AR_TRY(tap_rows(c, ctx, "probs", 'f', &probs));
    AR_TRY(weights_of(c, ctx, &weights, &probs));
    if (ari_dropout_on(ctx))
        AR_TRY(tap_rows(c, ctx, ARI_DROPPED_PROBS, 'f', &weights));
    AR_TRY(new_heads(ctx, o, b, c->heads, s, d));
    const ar_tensor values = ar_tensor_transposed(v), out = grouped(c, o), weighing = grouped(c, &weights);
    AR_TRY(product(ctx, &out, &weighing, &values, true, c->name));
    release_weights(ctx, &weights);
    AR_TRY(own_rows(c, ctx, o));
    return ar_saved_push(saved, owner, SAVED_PROBS, &probs);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* What the forward pass kept, and its inputs. */
typedef struct kept {
    ar_tensor qh, kh, vh, probs;
    ar_mask mask;
} kept;

static ar_status take_back(const ari_core *c, ar_saved *saved, const void *owner, kept *f)
{
    ar_tensor padding, additive;
    AR_TRY(ar_saved_pop(saved, owner, SAVED_PROBS, &f->probs));
    AR_TRY(ar_saved_pop(saved, owner, SAVED_ADDITIVE, &additive));
    AR_TRY(ar_saved_pop(saved, owner, SAVED_PADDING, &padding));
    f->mask = (ar_mask){.causal = c->causal,
                        .window = c->window,
                        .padding = ar_const(padding.data),
                        .additive = ar_const(additive.data),
                        .mask_batch = additive.shape[0],
                        .mask_heads = additive.shape[1],
                        .head_start = c->head_start};
    return AR_OK;
}

/* ds, the gradient of the scores, from doh, that of the heads' outputs. */
static ar_status score_gradients(const ari_core *c, ar_ctx *ctx, ar_tensor *ds, const kept *f, const ar_tensor *doh)
{
    const size_t b = f->qh.shape[0], s = f->qh.shape[2], d = c->head_dim;
    ar_tensor dprobs;
    AR_TRY(new_heads(ctx, &dprobs, b, c->heads, s, s));
    AR_TRY(new_heads(ctx, ds, b, c->heads, s, s));
    const ar_tensor dp = grouped(c, &dprobs), dout = grouped(c, doh);
    AR_TRY(product(ctx, &dp, &dout, &f->vh, false, c->name));
    if (ari_dropout_on(ctx))
        AR_TRY(ari_drop_heads(c->dropout, ctx, &dprobs, &dprobs, c->head_start));
    AR_TRY(ARI_KERNEL(ctx, softmax_backward, ds->data, ar_const(f->probs.data), dprobs.data, b, c->heads, s,
                      ari_softmax_scale(d), &f->mask));
    AR_TRY(tap_rows(c, ctx, "probs", 'b', &dprobs));
    ar_ctx_release(ctx, &dprobs);
    return AR_OK;
}

/* A KV head's dK and dV are one contraction over (query heads of its group x queries), whichever ranks hold those:
 * completed before the rounding and before RoPE's backward. */
static ar_status head_gradients(const ari_core *c, ar_ctx *ctx, ar_tensor g[3], const kept *f, const ar_tensor *ds,
                                const ar_tensor *doh)
{
    const size_t b = f->qh.shape[0], s = f->qh.shape[2], d = c->head_dim;
    const product_options over_group = {.scale = true,
                                        .over = ar_comm_size(ctx->cp.ring) > 1 ? ctx->cp.ring : c->replicas,
                                        .k_full = c->group_full * s,
                                        .partial = ar_faulty(ctx, AR_FAULT_kv_replica_grad_local)};
    ar_tensor weights;
    AR_TRY(new_heads(ctx, &g[0], b, c->heads, s, d));
    AR_TRY(new_heads(ctx, &g[1], b, c->kv_heads, s, d));
    AR_TRY(new_heads(ctx, &g[2], b, c->kv_heads, s, d));
    AR_TRY(weights_of(c, ctx, &weights, &f->probs));
    const ar_tensor dscores = grouped(c, ds), dscores_t = ar_tensor_transposed(&dscores);
    const ar_tensor p = grouped(c, &weights), p_t = ar_tensor_transposed(&p), dq = grouped(c, &g[0]);
    const ar_tensor q = grouped(c, &f->qh), q_t = ar_tensor_transposed(&q), dout = grouped(c, doh);
    const ar_tensor k_t = ar_tensor_transposed(&f->kh), do_t = ar_tensor_transposed(&dout);
    AR_TRY(product(ctx, &dq, &dscores, &k_t, true, c->name));
    AR_TRY(product_over(ctx, &g[1], &dscores_t, &q_t, &over_group, c->name));
    AR_TRY(product_over(ctx, &g[2], &p_t, &do_t, &over_group, c->name));
    release_weights(ctx, &weights);
    return AR_OK;
}

ar_status ari_core_backward(const ari_core *c, ar_ctx *ctx, ar_saved *saved, const void *owner, ar_tensor g[3],
                            const ar_tensor *dout, const ar_tensor *q, const ar_tensor *k, const ar_tensor *v)
{
    kept f;
    ar_tensor all_dout, ds;
    if (c->replicas && ar_comm_size(ctx->cp.ring) > 1)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: a ring over ranks with copies of a KV head is not in this version",
                            c->name);
    AR_TRY(take_back(c, saved, owner, &f));
    AR_TRY(spread_rows(c, ctx, &f.qh, q));
    AR_TRY(spread_rows(c, ctx, &all_dout, dout));
    f.kh = *k;
    f.vh = *v;
    AR_TRY(score_gradients(c, ctx, &ds, &f, &all_dout));
    AR_TRY(head_gradients(c, ctx, g, &f, &ds, &all_dout));
    ar_ctx_release(ctx, &ds);
    ar_ctx_release(ctx, &f.probs);
    release_spread(ctx, &all_dout, dout);
    release_spread(ctx, &f.qh, q);
    for (int i = 0; i < 3; i++)
        AR_TRY(own_rows(c, ctx, &g[i]));
    return AR_OK;
}
