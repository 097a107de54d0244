/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/faults.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/context/context_private.h"
#include "ref/core/param_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/attention/context_parallel.h"
#include "ref/layers/linear/product.h"
#include "ref/placement/axis.h"
#include "ref/placement/context_private.h"

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* Fault init_per_shard_seed: uses the indices of the group's first rank. A single box begins at 0 there, also if the
 * ranks' parts differ in size; one of several (q | k | v) at the beginning of its part. */
static void move_to_first_shard(ar_layout *o, int rank)
{
    for (size_t k = 0; k < o->nbox; k++) {
        for (int d = 0; d < o->ndim; d++) {
            ar_box *b = &o->box[k];
            const size_t back = o->nbox == 1 ? b->global[d] : b->extent[d] * (size_t)rank;
            if (b->extent[d] < o->shape[d] && back <= b->global[d])
                b->global[d] -= back;
        }
    }
}

void ari_fault_draw(ari_draw *d, const ar_param *p, const ar_ctx *ctx)
{
    if (ari_faulty(ctx, "init_replica_differs") && p->layout.replicas > 1)
        d->seed += (uint64_t)ar_comm_rank(ctx->tp);
    if (ari_faulty(ctx, "init_per_shard_seed"))
        move_to_first_shard(&d->src_layout, ar_comm_rank(ctx->tp));
    if (ari_faulty(ctx, "init_local_fan") && p->layout.replicas == 1 && ar_comm_size(ctx->tp) > 1) {
        const ar_tensor local = ari_param_matrix(p);
        d->fan_out = local.ndim > 1 ? local.shape[0] : d->fan_out;
        d->fan_in = local.ndim > 1 ? local.shape[1] : d->fan_in;
    }
    ari_fault_source(&d->src_layout, ctx);
}

/* kv_replica_wrong_head: neighbouring ranks hold copies of parts, and rank r takes part r mod P of P parts.
 * gate_up_interleaved_wrong: a rank takes the N-th part of all rows of packed blocks (q | k | v) as if they were one
 * block. */
void ari_fault_source(ar_layout *src_layout, const ar_ctx *ctx)
{
    const bool head = src_layout->replicas > 1 && ari_faulty(ctx, "kv_replica_wrong_head");
    const bool one_block = src_layout->nbox > 1 && ari_faulty(ctx, "gate_up_interleaved_wrong");
    const size_t n = (size_t)ar_comm_size(ctx->tp), r = (size_t)ar_comm_rank(ctx->tp);
    for (size_t k = 0; (head || one_block) && k < src_layout->nbox; k++) {
        for (int d = 0; d < src_layout->ndim; d++) {
            ar_box *b = &src_layout->box[k];
            if (b->extent[d] < src_layout->shape[d])
                b->global[d] = head ? r % (n / (size_t)src_layout->replicas) * b->extent[d]
                                    : r * (src_layout->shape[d] / n) + b->local[d];
        }
    }
}

/* Returns the layer's number within its stage. */
static size_t local_layer(const ar_ctx *ctx, size_t layer)
{
    const size_t stages = (size_t)(ar_comm_size(ctx->pipeline) * ctx->layout.virtual_stages);
    size_t first_layer = 0, count = 0;
    for (size_t i = 0; i < stages && layer >= first_layer + count; i++)
        ari_stage_layers(&first_layer, &count, &ctx->layout.stages, ctx->layers, stages, i);
    return layer - first_layer;
}

const char *ari_fault_layer_name(char *out, size_t cap, const ar_ctx *ctx, const char *name)
{
    const char *dot = ctx->layers > 0 && ari_faulty(ctx, "pp_layers_local") ? strchr(name, '.') : NULL;
    for (; dot; dot = strchr(dot + 1, '.')) {
        char *end = NULL;
        const size_t layer = isdigit((unsigned char)dot[1]) ? strtoul(dot + 1, &end, 10) : ctx->layers;
        if (layer >= ctx->layers || *end != '.')
            continue;
        snprintf(out, cap, "%.*s.%zu%s", (int)(dot - name), name, local_layer(ctx, layer), end);
        return out;
    }
    return name;
}

/* Fault: reduces gradients in the order in which they become ready, so adjacent ones are swapped. */
size_t ari_fault_turn(const ar_ctx *ctx, size_t i, size_t n)
{
    const bool own_order = ari_faulty(ctx, "collective_order_swapped") && ar_comm_rank(ctx->world) == 1;
    return own_order && (i ^ 1) < n ? i ^ 1 : i;
}

/* Gives every rank the first rank's shard, as far as it fits. */
ar_status ari_fault_broadcast_over_world(ar_param *p, ar_ctx *ctx)
{
    int64_t count = (int64_t)ar_tensor_count(&p->value);
    AR_TRY(ari_combine(ctx, ctx->world, &count, 1, AR_I64, AR_MIN, p->name));
    return ar_comm_broadcast(ctx->world, ctx->queue, p->value.data, (size_t)count, p->value.dtype, 0, p->name);
}

ar_dtype ari_fault_broadcast_dtype(const ar_ctx *ctx, ar_dtype right)
{
    const ar_dtype wrong = right == AR_F32 ? AR_BF16 : AR_F16;
    return ari_faulty(ctx, "collective_dtype_mismatch") && ar_comm_rank(ctx->dp) == 1 ? wrong : right;
}

/* --- recomputation ------------------------------------------------------------------------------------------------ */

/* Fault: the second forward pass continues the stream of random numbers, so it draws the masks of a step that no run
 * reaches. */
uint32_t ari_fault_mask_step(const ar_ctx *ctx)
{
    return ctx->recomputing && ari_faulty(ctx, "recompute_new_dropout_mask") ? ~ctx->step : ctx->step;
}

/* Creates a matrix filled with one number. */
static ar_status filled(ar_ctx *ctx, ar_tensor *t, ar_dtype dtype, const size_t shape[2], float x)
{
    AR_TRY(ar_ctx_tensor(ctx, t, dtype, 2, shape));
    return ARI_KERNEL(ctx, fill, t, x);
}

/* --- linear ------------------------------------------------------------------------------------------------------- */

ar_status ari_fault_linear_output(ar_ctx *ctx, bool row, const ari_output *o, const ar_tensor *x)
{
    const ar_tensor *y = &o->y, rows = ari_tensor_rows(y), z_rows = ari_tensor_rows(&o->z);
    int times = 0;
    if (row && ari_faulty(ctx, "row_bias_every_rank"))
        times = ar_comm_size(ctx->tp) - 1;
    if (ari_faulty(ctx, "bias_added_twice"))
        times = 1;
    for (int i = 0; o->bias.ptr && i < times; i++)
        AR_TRY(ARI_KERNEL(ctx, bias_act, &rows, o->bias, o->act, &z_rows));
    if (row && ar_comm_size(ctx->tp) > 1 && ari_faulty(ctx, "allreduce_aliases_input")) {
        const size_t nx = ar_tensor_count(x), ny = ar_tensor_count(y);
        AR_TRY(ARI_KERNEL(ctx, copy, x->data, ar_const(y->data), (nx < ny ? nx : ny) * ar_dtype_bytes(y->dtype)));
    }
    return AR_OK;
}

/* Fault: the module holds a single saved input, so the next forward pass overwrites the one whose backward pass is
 * still to come. */
ar_status ari_fault_saved_input(ar_ctx *ctx, ar_saved *saved, const void *owner, const ar_tensor *x)
{
    ar_tensor before;
    if (!ari_faulty(ctx, "saved_input_overwritten") || !saved || ar_saved_pop(saved, owner, 0, &before) != AR_OK)
        return AR_OK;
    const size_t old = ar_tensor_count(&before), new = ar_tensor_count(x);
    AR_TRY(ARI_KERNEL(ctx, copy, before.data, ar_const(x->data), (old < new ? old : new) * ar_dtype_bytes(x->dtype)));
    return ar_saved_push(saved, owner, 0, &before);
}

ar_status ari_fault_partial_dx(ar_ctx *ctx, const ar_tensor *dx_rows, ar_sum *s, size_t total_rows, const char *tag)
{
    AR_TRY(ctx->arith->fold(ctx, s, ctx->queue, ctx->tp, AR_KEEP, tag));
    if (dx_rows->shape[0] == total_rows)
        return ctx->arith->round(ctx, dx_rows, s, NULL);
    const size_t bytes = ar_tensor_count(dx_rows) * ar_dtype_bytes(dx_rows->dtype);
    ar_tensor wide;
    AR_TRY(ari_new_rows(ctx, &wide, dx_rows->dtype, total_rows, dx_rows->shape[1]));
    AR_TRY(ctx->arith->round(ctx, &wide, s, NULL));
    return ARI_KERNEL(ctx, copy, dx_rows->data, ar_cbuf_at(ar_const(wide.data), (size_t)ar_comm_rank(ctx->tp) * bytes),
                      bytes);
}

ar_status ari_fault_narrow_dx(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *slice)
{
    const size_t n = (size_t)ar_comm_size(ctx->tp), width = slice->shape[slice->ndim - 1];
    AR_TRY(ari_like(ctx, dx, slice, n * width));
    AR_TRY(ARI_KERNEL(ctx, fill, dx, 0.0f));
    const ar_tensor dx_rows = ari_tensor_rows(dx), slice_rows = ari_tensor_rows(slice);
    const ar_tensor local_cols = ar_tensor_slice(&dx_rows, 1, (size_t)ar_comm_rank(ctx->tp) * width, width);
    return ARI_KERNEL(ctx, copy_strided, &local_cols, &slice_rows);
}

void ari_fault_weight_rows(const ar_ctx *ctx, const ar_tensor *x, ar_tensor *x_rows, ar_tensor *dy_rows,
                           size_t *samples)
{
    if (*samples <= 1 || x->ndim <= 2 || !ari_faulty(ctx, "weight_grad_leading_dims"))
        return;
    *x_rows = ar_tensor_slice(x_rows, 0, 0, x->shape[x->ndim - 2]);
    *dy_rows = ar_tensor_slice(dy_rows, 0, 0, x->shape[x->ndim - 2]);
    *samples = 1;
}

/* bias_grad_wrong_axis: the sum of token t over features is stored in element t. */
static ar_status sum_features(ar_ctx *ctx, ar_tensor *dy)
{
    const size_t tokens = dy->shape[0] < dy->shape[1] ? dy->shape[0] : dy->shape[1];
    const size_t shape[2] = {dy->shape[1], dy->shape[1]};
    ar_tensor zeros;
    AR_TRY(filled(ctx, &zeros, dy->dtype, shape, 0.0f));
    const ar_tensor swapped = ari_tensor_transposed(dy);
    const ar_tensor src = ar_tensor_slice(&swapped, 1, 0, tokens), wrong = ar_tensor_slice(&zeros, 1, 0, tokens);
    *dy = zeros;
    return ARI_KERNEL(ctx, copy_strided, &wrong, &src);
}

/* row_bias_partial_grad: a row-parallel bias is treated as if each rank had a part of it. */
static ar_status divide_by_ranks(ar_ctx *ctx, ar_tensor *dy)
{
    ar_tensor part;
    AR_TRY(ari_copy_of(ctx, &part, dy));
    *dy = part;
    return ARI_KERNEL(ctx, scale, &part, &part, 1.0f / (float)ar_comm_size(ctx->tp));
}

bool ari_fault_moves_bias_rows(const ar_ctx *ctx, bool row)
{
    return ari_faulty(ctx, "bias_grad_wrong_axis") ||
           (row && ar_comm_size(ctx->tp) > 1 && ari_faulty(ctx, "row_bias_partial_grad"));
}

ar_status ari_fault_bias_rows(ar_ctx *ctx, bool row, ar_tensor *dy)
{
    if (ari_faulty(ctx, "bias_grad_wrong_axis"))
        return sum_features(ctx, dy);
    return ari_fault_moves_bias_rows(ctx, row) ? divide_by_ranks(ctx, dy) : AR_OK;
}

/* Fault: autograd does not know the collective, so a rank's summand gets the gradient of the sum that this rank
 * received. */
ar_status ari_fault_own_gradient(ar_ctx *ctx, ar_tensor *dy, const ar_tensor *local_dy)
{
    const int n = ar_comm_size(ctx->tp), positions = local_dy->ndim - 2;
    size_t shape[AR_MAX_DIMS];
    for (int d = 0; d < local_dy->ndim; d++)
        shape[d] = local_dy->shape[d] * (d == positions ? (size_t)n : 1);
    AR_TRY(ar_ctx_tensor(ctx, dy, local_dy->dtype, local_dy->ndim, shape));
    AR_TRY(ARI_KERNEL(ctx, zero, dy->data, ar_tensor_count(dy) * ar_dtype_bytes(local_dy->dtype)));
    const ari_axis a = ari_axis_of(local_dy->ndim, shape, positions, n);
    return ari_axis_put(ctx, dy->data, ar_const(local_dy->data), &a, ar_comm_rank(ctx->tp), local_dy->dtype);
}

ar_status ari_fault_latents(ar_ctx *ctx, size_t shared, const ar_tensor *dy)
{
    const ar_tensor rows = ari_tensor_rows(dy), latents = ar_tensor_slice(&rows, 1, 0, rows.shape[1] - shared);
    ar_tensor work;
    if (shared == 0 || !ari_faulty(ctx, "latent_grads_summed_again"))
        return AR_OK;
    AR_TRY(ari_copy_of(ctx, &work, &latents));
    AR_TRY(ARI_KERNEL(ctx, scale, &work, &work, (float)ar_comm_size(ctx->tp)));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &latents, &work));
    ar_ctx_release(ctx, &work);
    return AR_OK;
}

ar_status ari_fault_gather_again(ar_ctx *ctx, const ar_tensor *x, const ari_features *f, ar_tp_redistribution change,
                                 const char *tag)
{
    for (int repeat = 0; repeat < 2 && ari_faulty(ctx, "qkv_gathered_three_times"); repeat++) {
        ar_tensor copy;
        AR_TRY(ari_tp_redistribute(ctx, &copy, x, f, change, tag, false));
        ari_release_placed(ctx, &copy, x);
    }
    return AR_OK;
}

/* --- norm --------------------------------------------------------------------------------------------------------- */

/* Rows of a wider matrix whose further columns are zero. */
static ar_status pad(ar_ctx *ctx, ar_tensor *wide, const ar_tensor *rows, size_t width)
{
    const size_t shape[2] = {rows->shape[0], width};
    AR_TRY(filled(ctx, wide, rows->dtype, shape, 0.0f));
    const ar_tensor dst = ar_tensor_slice(wide, 1, 0, rows->shape[1]);
    return ARI_KERNEL(ctx, copy_strided, &dst, rows);
}

static ar_status pad_param(ar_ctx *ctx, ar_tensor *wide, const ar_param *p, size_t width)
{
    const size_t row[2] = {1, ar_tensor_count(&p->value)};
    ar_tensor t;
    AR_TRY(ar_tensor_view(&t, AR_F32, 2, row, p->value.data));
    AR_TRY(pad(ctx, wide, &t, width));
    if (!p->plus_one)
        return AR_OK;
    ar_tensor ones;
    AR_TRY(filled(ctx, &ones, wide->dtype, wide->shape, 1.0f));
    return ARI_KERNEL(ctx, add, wide, wide, &ones);
}

/* norm_padded_lanes: as in vectorised kernels, statistics cover the width rounded up to a power of two, and the padded
 * rows are kept for the backward pass. */
static ar_status normalise_padded(ar_ctx *ctx, ar_norm_kind kind, double eps, const ar_param *weight,
                                  const ar_param *bias, const ar_tensor *y, const ar_tensor *mean,
                                  const ar_tensor *rstd, const ar_tensor *x)
{
    size_t width = 1;
    ar_tensor wide, wide_y, wide_weight, wide_bias = {.data = {NULL}};
    while (width < x->shape[1])
        width *= 2;
    AR_TRY(pad(ctx, &wide, x, width));
    AR_TRY(ar_ctx_tensor(ctx, &wide_y, wide.dtype, wide.ndim, wide.shape));
    AR_TRY(pad_param(ctx, &wide_weight, weight, width));
    if (bias)
        AR_TRY(pad_param(ctx, &wide_bias, bias, width));
    AR_TRY(ARI_KERNEL(ctx, norm_forward, kind, &wide_y, mean->data, rstd->data, &wide, ar_const(wide_weight.data),
                      ar_const(wide_bias.data), eps));
    const ar_tensor src = ar_tensor_slice(&wide_y, 1, 0, y->shape[1]);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, y, &src));
    ARI_RELEASE(ctx, &wide_bias, &wide_weight, &wide_y);
    return AR_OK;
}

ar_status ari_fault_norm_output(ar_ctx *ctx, ar_norm_kind kind, double eps, const ar_param *weight,
                                const ar_param *bias, const ar_tensor *y, const ar_tensor *mean, const ar_tensor *rstd,
                                const ar_tensor *x)
{
    if (ari_faulty(ctx, "norm_padded_lanes"))
        return normalise_padded(ctx, kind, eps, weight, bias, y, mean, rstd, x);
    if (ari_faulty(ctx, "norm_fp16_store")) /* rounded to the 16 bits of bf16 */
        return y->dtype == AR_F32 ? ARI_KERNEL(ctx, round_bits, y, y, 8) : AR_OK;
    return AR_OK;
}

ar_status ari_fault_norm_gradient(ar_ctx *ctx, const ar_tensor *dx, const ar_tensor *sum, const ar_tensor *residual)
{
    const size_t n = ar_tensor_count(dx);
    if (!residual || !ari_faulty(ctx, "norm_backward_missing"))
        return AR_OK;
    AR_TRY(ARI_KERNEL(ctx, fill, dx, 0.0f));
    return ARI_KERNEL(ctx, copy, sum->data, ar_const(residual->data), n * ar_dtype_bytes(sum->dtype));
}

/* --- vocabulary, loss, attention ---------------------------------------------------------------------------------- */

/* silent_truncation: divides what N ranks can share evenly, and ignores the rest. */
void ari_fault_own_ids(const ar_ctx *ctx, size_t vocab, size_t *start, size_t *rows)
{
    const int n = ar_comm_size(ctx->tp);
    const size_t shared = vocab - vocab % (size_t)n;
    if (ari_faulty(ctx, "world_rank_in_group"))
        ari_split_uneven(vocab, n, ar_comm_rank(ctx->world), start, rows);
    if (ari_faulty(ctx, "silent_truncation") && *start + *rows > shared)
        *rows = *start < shared ? shared - *start : 0;
}

/* Fault: two ranks own an id. The last row of a shard also answers for the first id of the next shard. */
ar_status ari_fault_token_rows(ar_ctx *ctx, const ar_tensor *y, const ar_param *token, size_t start, size_t rows,
                               const ar_batch *batch)
{
    const size_t n = ari_tensor_rows(y).shape[0], row_bytes = y->shape[y->ndim - 1] * ar_dtype_bytes(y->dtype);
    if (rows == 0 || !ari_faulty(ctx, "embedding_edge_twice"))
        return AR_OK;
    for (size_t i = 0; i < n; i++) {
        if ((size_t)batch->input_ids[ari_token_at(ctx, batch, i, true)] == start + rows)
            AR_TRY(ARI_KERNEL(ctx, copy, ar_buf_at(y->data, i * row_bytes),
                              ar_cbuf_at(ar_const(token->value.data), (rows - 1) * row_bytes), row_bytes));
    }
    return AR_OK;
}

/* Rows of ids that no rank owns have no logits, so they are left out of the softmax. */
ar_status ari_fault_logits(ar_ctx *ctx, const ar_tensor *logits, size_t vocab)
{
    size_t start, owned;
    if (!ari_faulty(ctx, "silent_truncation"))
        return AR_OK;
    ari_local_ids(ctx, vocab, &start, &owned);
    const ar_tensor rows = ari_tensor_rows(logits);
    const ar_tensor lost = ar_tensor_slice(&rows, 1, owned, rows.shape[1] - owned);
    ar_tensor nothing;
    AR_TRY(filled(ctx, &nothing, lost.dtype, lost.shape, -INFINITY));
    return ARI_KERNEL(ctx, copy_strided, &lost, &nothing);
}

/* Shifts the range by one, so that the first id of the next shard counts as this rank's. */
void ari_fault_targets_at_edge(const ar_ctx *ctx, const ari_cross_entropy *c, int64_t *ids, size_t n)
{
    const int64_t edge = (int64_t)(c->start + c->owned), first_id = (int64_t)c->start;
    if (!ari_faulty(ctx, "vocab_target_off_by_shard") || !c->group || ar_comm_size(c->group) == 1)
        return;
    for (size_t i = 0; i < n; i++)
        ids[i] = ids[i] == edge && c->owned > 0       ? edge - 1
                 : ids[i] == first_id && first_id > 0 ? AR_IGNORE_INDEX
                                                      : ids[i];
}

size_t ari_fault_token_count(const ar_ctx *ctx, size_t n)
{
    return ari_faulty(ctx, "collective_size_mismatch") && ar_comm_rank(ctx->tp) == 1 ? n - 1 : n;
}

ar_status ari_fault_heads(ar_ctx *ctx, const ar_tensor *context, size_t *heads)
{
    if (!ari_faulty(ctx, "heads_divided_twice"))
        return AR_OK;
    *heads /= (size_t)ar_comm_size(ctx->tp);
    return ARI_KERNEL(ctx, fill, context, 0.0f);
}

ar_status ari_fault_ring_keys(ar_ctx *ctx, ar_tensor gathered[2], const ar_tensor local[2])
{
    const int n = ar_comm_size(ctx->ring);
    for (int place = 0; place < n && n > 1 && ari_faulty(ctx, "ring_backward_first_kv"); place++) {
        AR_TRY(ari_ring_place(ctx, &gathered[0], &local[0], place));
        AR_TRY(ari_ring_place(ctx, &gathered[1], &local[1], place));
    }
    return AR_OK;
}

/* --- experts ------------------------------------------------------------------------------------------------------ */

ar_status ari_fault_clear_remote(ar_ctx *ctx, const ar_tensor *weight, const ar_tensor *expert, size_t first_expert,
                                 size_t count)
{
    const size_t slots = ar_tensor_count(weight);
    ARI_OWNED float *host = NULL;
    ARI_OWNED int32_t *chosen = NULL;
    AR_TRY(ARI_ALLOC(&host, slots, "weights of slots"));
    AR_TRY(ARI_ALLOC(&chosen, slots, "experts of slots"));
    AR_TRY(ar_ctx_download_floats(ctx, host, slots, weight));
    AR_TRY(ar_ctx_download(ctx, chosen, expert));
    for (size_t i = 0; i < slots; i++)
        host[i] = (size_t)chosen[i] - first_expert < count ? host[i] : 0.0f;
    return ar_ctx_upload(ctx, weight, host);
}
