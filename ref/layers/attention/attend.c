/* SPDX-License-Identifier: Apache-2.0 */
/* Attention between the projections and the output layer: rotation, context-parallel exchanges, attention (core.h). The
 * projections' output is [b, s, q | k | v] for this rank's positions; queries, keys and values are then stored head by
 * head, [b, heads, s, d]. */
#include "ref/core/record.h"
#include "ref/layers/attention/attention.h"

#include <string.h>

#include "ref/context/context_private.h"
#include "ref/layers/attention/core.h"
#include "ref/layers/faults.h"
#include "ref/placement/parallel_private.h"

enum { SAVED_Q, SAVED_K, SAVED_V, SAVED_COS, SAVED_SIN };

/* --- views -------------------------------------------------------------------------------------------------------- */

/* Views [b, s, heads, d] as [b, heads, s, d], or the reverse. */
static ar_tensor swapped(const ar_tensor *t)
{
    ar_tensor v = *t;
    v.shape[1] = t->shape[2];
    v.shape[2] = t->shape[1];
    v.stride[1] = t->stride[2];
    v.stride[2] = t->stride[1];
    return v;
}

static ar_status new_heads(ar_ctx *ctx, ar_tensor *t, ar_dtype dtype, size_t b, size_t heads, size_t rows, size_t cols)
{
    const size_t shape[4] = {b, heads, rows, cols};
    return ar_ctx_tensor(ctx, t, dtype, 4, shape);
}

const char *ari_leaf_of(const ari_attention *m, const char *path)
{
    return path + strlen(m->base.name) + 1;
}

ar_status ari_tap_heads(const ari_attention *m, ar_ctx *ctx, int which, const char *part, char pass, const ar_tensor *t)
{
    const size_t d = t->shape[3], shape[3] = {t->shape[0], t->shape[1], t->shape[2] * d};
    ar_tensor features;
    if (!ari_tapped(ctx))
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &features, t->dtype, 3, shape));
    const ar_tensor by_head = ari_heads_view(&features, 0, t->shape[2], 1, d);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &by_head, t));
    AR_TRY(ari_tap_copies(ctx, m->base.name, part, pass, &features, 2, (which == 0 ? m->o.heads : m->o.kv_heads) * d,
                          which == 0 ? m->copies : m->kv_copies));
    ar_ctx_release(ctx, &features);
    return AR_OK;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Positions of this rank's tokens in their rows, and rows of the table at these positions, [b * local positions,
 * pairs]; empty if a token's position equals its index. */
typedef struct rotation {
    ar_positions local_positions;
    ar_tensor cos, sin;
} rotation;

static ar_status rotation_of(ari_attention *m, ar_ctx *ctx, ar_saved *saved, rotation *r, const ar_batch *batch)
{
    *r = (rotation){.local_positions = ari_local_positions(ctx, batch->seq, false)};
    const size_t n = batch->batch * ari_positions_count(&r->local_positions),
                 half = ar_rope_dim(&m->o.rope, m->o.head_dim) / 2;
    if (m->o.rope.kind && (batch->position_ids || batch->documents)) {
        const size_t table_shape[2] = {m->positions, half}, rows[2] = {n, half};
        ar_tensor positions, cos, sin;
        AR_TRY(ari_token_positions(ctx, &positions, batch, &r->local_positions));
        AR_TRY(ar_tensor_view(&cos, AR_F32, 2, table_shape, m->cos));
        AR_TRY(ar_tensor_view(&sin, AR_F32, 2, table_shape, m->sin));
        AR_TRY(ar_ctx_tensor(ctx, &r->cos, AR_F32, 2, rows));
        AR_TRY(ar_ctx_tensor(ctx, &r->sin, AR_F32, 2, rows));
        AR_TRY(ARI_KERNEL(ctx, gather_rows, &r->cos, &cos, ar_const(positions.data), (ar_cbuf){NULL}, 1));
        AR_TRY(ARI_KERNEL(ctx, gather_rows, &r->sin, &sin, ar_const(positions.data), (ar_cbuf){NULL}, 1));
        ar_ctx_release(ctx, &positions);
    }
    AR_TRY(ar_saved_push(saved, m, SAVED_COS, &r->cos));
    return ar_saved_push(saved, m, SAVED_SIN, &r->sin);
}

/* The tokens [first_token, first_token + n) of some samples, rotated by rows of the tables from `row` on. */
typedef struct stretch {
    size_t sample, samples, first_token, n, row;
} stretch;

static ar_status rotate_stretch(ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src, ar_cbuf cos, ar_cbuf sin,
                                const stretch *s, int direction)
{
    const size_t turning = src->shape[3], table_offset = s->row * (turning / 2) * sizeof(float);
    const ar_tensor of_y = ar_tensor_slice(dst, 0, s->sample, s->samples);
    const ar_tensor of_x = ar_tensor_slice(src, 0, s->sample, s->samples);
    const ar_tensor y = ar_tensor_slice(&of_y, 1, s->first_token, s->n),
                    x = ar_tensor_slice(&of_x, 1, s->first_token, s->n);
    return ARI_KERNEL(ctx, rope, &y, &x, ar_cbuf_at(cos, table_offset), ar_cbuf_at(sin, table_offset), direction);
}

/* Rotates the rotary features, [b, s, heads, n]: each run of consecutive positions at once, or each sample by its own
 * positions. */
static ar_status rotate_turning(const ari_attention *m, ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src,
                                const rotation *r, int direction)
{
    const size_t b = src->shape[0], local_seq = src->shape[1];
    for (size_t i = 0; r->cos.ndim && i < b; i++)
        AR_TRY(rotate_stretch(ctx, dst, src, ar_const(r->cos.data), ar_const(r->sin.data),
                              &(stretch){.sample = i, .samples = 1, .n = local_seq, .row = i * local_seq}, direction));
    for (size_t run = 0, run_begin = 0; !r->cos.ndim && run < 2; run_begin += r->local_positions.count[run++]) {
        const stretch s = {.samples = b,
                           .first_token = run_begin,
                           .n = r->local_positions.count[run],
                           .row = r->local_positions.first[run]};
        if (s.n > 0)
            AR_TRY(rotate_stretch(ctx, dst, src, ar_const(m->cos), ar_const(m->sin), &s, direction));
    }
    return AR_OK;
}

/* Rotates interleaved pairs, which are rearranged as halves. */
static ar_status rotate_pairs(const ari_attention *m, ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src,
                              const rotation *r, int direction)
{
    ar_tensor halves;
    AR_TRY(new_heads(ctx, &halves, src->dtype, src->shape[0], src->shape[1], src->shape[2], src->shape[3]));
    if (direction > 0)
        AR_TRY(ari_part_pairs(ctx, &halves, src, true));
    AR_TRY(direction > 0 ? rotate_turning(m, ctx, dst, &halves, r, direction)
                         : rotate_turning(m, ctx, &halves, src, r, direction));
    if (direction < 0)
        AR_TRY(ari_part_pairs(ctx, dst, &halves, false));
    ar_ctx_release(ctx, &halves);
    return AR_OK;
}

/* Rotates [b, s, heads, d]. */
static ar_status rotate(const ari_attention *m, ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src,
                        const rotation *r, int direction)
{
    const size_t d = m->o.head_dim, turning = ar_rope_dim(&m->o.rope, d);
    const size_t turning_start = m->o.rope.last ? d - turning : 0, passing_start = turning_start > 0 ? 0 : turning;
    const ar_tensor y = ar_tensor_slice(dst, 3, turning_start, turning),
                    x = ar_tensor_slice(src, 3, turning_start, turning);
    AR_TRY((m->o.rope.interleaved ? rotate_pairs : rotate_turning)(m, ctx, &y, &x, r, direction));
    if (turning == d)
        return AR_OK;
    const ar_tensor passing_dst = ar_tensor_slice(dst, 3, passing_start, d - turning);
    const ar_tensor passing = ar_tensor_slice(src, 3, passing_start, d - turning);
    return ARI_KERNEL(ctx, copy_strided, &passing_dst, &passing);
}

/* Reorders queries, keys or values by head; r: rotation, if the model has one. */
static ar_status lay_out(ari_attention *m, ar_ctx *ctx, ar_tensor *dst, const ar_tensor *src, const rotation *r)
{
    AR_TRY(new_heads(ctx, dst, src->dtype, src->shape[0], src->shape[2], src->shape[1], src->shape[3]));
    const ar_tensor view = swapped(dst);
    if (!m->o.rope.kind || !r)
        return ARI_KERNEL(ctx, copy_strided, &view, src);
    AR_TRY(rotate(m, ctx, &view, src, r, +1));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_ROPE, .input = {src}, .out = {&view});
}

/* Describes this rank's part of the attention: its tensor-parallel rank's heads, or its share of them among inner
 * neighbours. */
static ari_core core_of(const ari_attention *m, const ar_ctx *ctx, size_t seq)
{
    const size_t n = (size_t)ar_comm_size(ctx->inner), i = (size_t)ar_comm_rank(ctx->inner);
    const ari_head_share q = ari_head_share_of(m->heads, n, i), kv = ari_head_share_of(m->kv_heads, n, i);
    return (ari_core){.name = m->base.name,
                      .heads = q.count,
                      .kv_heads = kv.count,
                      .heads_full = m->o.heads,
                      .head_start = (size_t)(ar_comm_rank(ctx->tp) / m->copies) * m->heads + q.first_head,
                      .group_full = m->group_full,
                      .copies = m->copies,
                      .replicas = m->replicas,
                      .seq = seq,
                      .rows = ari_ring_positions(ctx, seq, ar_comm_rank(ctx->ring)),
                      .causal = m->o.causal,
                      .window = m->o.window,
                      .query_scalar = m->o.query_scalar > 0.0 ? m->o.query_scalar : (double)m->o.head_dim,
                      .cap = m->o.score_cap,
                      .dropout = &m->dropout,
                      .sinks = m->o.sinks ? (ar_param *)(uintptr_t)&m->sinks : NULL,
                      .first_sink = q.first_head};
}

/* The heads' outputs side by side, [b, s, heads * d]. */
static ar_status join_heads(ari_attention *m, ar_ctx *ctx, ar_tensor *context, const ar_tensor *per_head)
{
    const size_t b = per_head->shape[0], s = per_head->shape[2], d = per_head->shape[3];
    const size_t shape[3] = {b, s, m->heads * d};
    AR_TRY(ar_ctx_tensor(ctx, context, per_head->dtype, 3, shape));
    size_t filled = m->heads;
    AR_TRY(ari_fault_heads(ctx, context, &filled));
    const ar_tensor context_heads = ari_heads_view(context, 0, m->heads, 1, d), from_all = swapped(per_head);
    const ar_tensor dst = ar_tensor_slice(&context_heads, 2, 0, filled), src = ar_tensor_slice(&from_all, 2, 0, filled);
    return ARI_KERNEL(ctx, copy_strided, &dst, &src);
}

/* Normalises queries (`which` 0) or keys if the model does, then reorders them like lay_out. */
static ar_status lay_out_normed(ari_attention *m, ar_ctx *ctx, ar_saved *saved, int which, ar_tensor *dst,
                                const ar_tensor *src, const rotation *r)
{
    ar_tensor y, memory;
    if (!ari_qk_normed(m))
        return lay_out(m, ctx, dst, src, r);
    AR_TRY(ari_qk_norm_forward(m, ctx, saved, which, &y, &memory, src));
    AR_TRY(ari_tap_heads(m, ctx, which, ari_leaf_of(m, m->norm.name[which]), 'f', &y));
    AR_TRY(lay_out(m, ctx, dst, &y, r));
    ar_ctx_release(ctx, &memory);
    return AR_OK;
}

ar_tensor ari_heads_of(const ari_attention *m, const ar_tensor *qkv, int which)
{
    const size_t d = m->o.head_dim, offsets[3] = {0, m->heads * d, (m->heads + m->kv_heads) * d};
    const size_t heads = which == 0 ? m->heads : m->kv_heads, width = which == 2 ? m->value_dim : d;
    const ar_tensor by_head = ari_heads_view(qkv, 0, heads, 1, 3 * d);
    if (m->o.by_head)
        return ar_tensor_slice(&by_head, 3, (size_t)which * d, d);
    const ar_tensor part = ar_tensor_slice(qkv, 2, offsets[which], heads * width);
    return ari_heads_view(&part, 0, heads, 1, width);
}

static const char *const turned_names[2] = {"q_rope", "k_rope"};

/* Queries, keys and values of this rank's positions and all its heads, rotated. */
static ar_status split_heads(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor x[3], ar_tensor *qkv,
                             const rotation *r)
{
    for (int i = 0; i < 3; i++) {
        const ar_tensor src = ari_heads_of(m, qkv, i);
        AR_TRY(i < 2 ? lay_out_normed(m, ctx, saved, i, &x[i], &src, r) : lay_out(m, ctx, &x[i], &src, NULL));
    }
    ar_ctx_release(ctx, qkv);
    if (!m->o.rope.kind)
        return AR_OK;
    ari_work_moves(ARI_GPU_MOVES_ROPE, false, ar_tensor_count(&x[0]) + ar_tensor_count(&x[1]));
    for (int i = 0; i < 2; i++) {
        const ar_tensor turned = swapped(&x[i]);
        AR_TRY(ari_tap_heads(m, ctx, i, turned_names[i], 'f', &turned));
    }
    return AR_OK;
}

ar_status ari_attend(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *context, ar_tensor *qkv,
                     const ar_batch *batch)
{
    const size_t heads[3] = {m->heads, m->kv_heads, m->kv_heads};
    ari_core core = core_of(m, ctx, batch->seq);
    ar_batch core_batch = *batch;
    ar_tensor x[3], gathered[2], o; /* x: queries, keys, values; gathered: keys and values of all positions */
    rotation r;
    AR_TRY(ari_qk_clip_track(&core.largest, m, ctx));
    AR_TRY(rotation_of(m, ctx, saved, &r, batch));
    AR_TRY(split_heads(m, ctx, saved, x, qkv, &r));
    AR_TRY(ari_heads_scatter(ctx, x, heads, 3, m->base.name));
    AR_TRY(ari_ring_gather(ctx, gathered, &x[1], batch->seq, &m->hops));
    if (ari_faulty(ctx, "attention_over_documents"))
        core_batch.documents = NULL;
    AR_TRY(ari_core_forward(&core, ctx, saved, m, &o, &x[0], &gathered[0], &gathered[1], &core_batch));
    const ar_tensor seen_as[4] = {swapped(&x[0]), swapped(&gathered[0]), swapped(&gathered[1]), swapped(&o)};
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ATTENTION, .input = {&seen_as[0], &seen_as[1], &seen_as[2]},
                    .out = {&seen_as[3]}, .param = &core.sinks, .params = core.sinks ? 1 : 0));
    AR_TRY(ari_fault_tail(ctx, &o, &core.rows, batch->seq));
    ari_ring_release(ctx, gathered, &x[1]);
    AR_TRY(ari_heads_together(ctx, &o, heads, 1, m->base.name));
    AR_TRY(join_heads(m, ctx, context, &o));
    ar_ctx_release(ctx, &o);
    AR_TRY(ari_tap_copies(ctx, m->base.name, "context", 'f', context, 2, m->o.heads * m->value_dim, m->copies));
    for (int i = 0; i < 3; i++)
        AR_TRY(ar_saved_push(saved, m, SAVED_Q + i, &x[i]));
    return AR_OK;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* The heads' gradients back into [b, s, q | k | v], unrotated. */
static ar_status collect_head_gradients(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dqkv,
                                        const ar_tensor g[3], const rotation *r)
{
    static const char *const names[3] = {"q", "k", "v"};
    ar_tensor dst[3];
    for (int i = 0; i < 3; i++) {
        const ar_tensor src = swapped(&g[i]);
        const bool turned = m->o.rope.kind && i < 2;
        dst[i] = ari_heads_of(m, dqkv, i);
        if (turned)
            AR_TRY(ari_tap_heads(m, ctx, i, turned_names[i], 'b', &src));
        AR_TRY(turned ? rotate(m, ctx, &dst[i], &src, r, -1) : ARI_KERNEL(ctx, copy_strided, &dst[i], &src));
        if (turned)
            AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ROPE, .input = {&src}, .out = {&dst[i]}));
    }
    if (m->o.rope.kind)
        ari_work_moves(ARI_GPU_MOVES_ROPE, true, ar_tensor_count(&g[0]) + ar_tensor_count(&g[1]));
    for (int i = 0; i < 2 && ari_qk_normed(m); i++) {
        AR_TRY(ari_qk_norm_backward(m, ctx, saved, i, &dst[i]));
        AR_TRY(ari_tap_heads(m, ctx, i, ari_leaf_of(m, m->norm.name[i]), 'b', &dst[i]));
    }
    for (int i = 2; i < 5; i++) /* values first */
        AR_TRY(ari_tap_heads(m, ctx, i % 3, names[i % 3], 'b', &dst[i % 3]));
    return AR_OK;
}

ar_status ari_attend_backward(ari_attention *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dqkv,
                              const ar_tensor *dcontext)
{
    const size_t heads[3] = {m->heads, m->kv_heads, m->kv_heads};
    const size_t shape[3] = {dcontext->shape[0], dcontext->shape[1],
                             (m->heads + m->kv_heads) * m->o.head_dim + m->kv_heads * m->value_dim};
    ar_tensor x[3], gathered[2], dout;
    ar_tensor g[3]; /* gradients of x for this rank's positions */
    rotation r;
    for (int i = 2; i >= 0; i--)
        AR_TRY(ar_saved_pop(saved, m, SAVED_Q + i, &x[i]));
    AR_TRY(ar_saved_pop(saved, m, SAVED_SIN, &r.sin));
    AR_TRY(ar_saved_pop(saved, m, SAVED_COS, &r.cos));
    r.local_positions = ari_local_positions(ctx, ari_all_positions(ctx, dcontext->shape[1]), false);
    AR_TRY(new_heads(ctx, &dout, dcontext->dtype, shape[0], m->heads, shape[1], m->value_dim));
    const ar_tensor dst = swapped(&dout), src = ari_heads_view(dcontext, 0, m->heads, 1, m->value_dim);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
    AR_TRY(ari_heads_scatter(ctx, &dout, heads, 1, m->base.name));
    const size_t seq = x[0].shape[2] * (size_t)ar_comm_size(ctx->ring);
    const ari_core core = core_of(m, ctx, seq);
    AR_TRY(ari_fault_tail(ctx, &dout, &core.rows, seq));
    AR_TRY(ari_ring_gather(ctx, gathered, &x[1], seq, &m->hops));
    AR_TRY(ari_fault_ring_keys(ctx, gathered, &x[1]));
    AR_TRY(ari_core_backward(&core, ctx, saved, m, g, &dout, &x[0], &gathered[0], &gathered[1]));
    const ar_tensor seen_as[4] = {swapped(&dout), swapped(&g[0]), swapped(&g[1]), swapped(&g[2])};
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ATTENTION, .input = {&seen_as[0]},
                    .out = {&seen_as[1], &seen_as[2], &seen_as[3]}, .copies = core.replicas));
    if (core.sinks)
        AR_TRY(ari_note_gradient(ctx, core.sinks, NULL, &dout));
    ari_ring_release(ctx, gathered, &x[1]);
    ar_ctx_release(ctx, &dout);
    for (int i = 2; i >= 0; i--)
        ar_ctx_release(ctx, &x[i]);
    AR_TRY(ari_heads_together(ctx, g, heads, 3, m->base.name));
    AR_TRY(ar_ctx_tensor(ctx, dqkv, dcontext->dtype, 3, shape));
    AR_TRY(collect_head_gradients(m, ctx, saved, dqkv, g, &r));
    for (int i = 0; i < 3; i++)
        ar_ctx_release(ctx, &g[i]);
    return AR_OK;
}
