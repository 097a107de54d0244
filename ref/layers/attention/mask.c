/* SPDX-License-Identifier: Apache-2.0 */
/* Keys that a query sees: an interval given by order (causal, sliding window, document), and masks. */
#include <stdlib.h>

#include "ref/layers/attention/core.h"
#include "ref/layers/batch_private.h"
#include "ref/placement/parallel_private.h"

ari_order ari_core_order(const ari_core *c)
{
    return (ari_order){.rows = c->rows, .seq = c->seq, .causal = c->causal, .window = c->window};
}

static void fill_sample(ari_keys *visible, const ari_core *c, const ar_batch *batch, size_t sample)
{
    const ari_order by_order = ari_core_order(c);
    const size_t rows = ari_positions_count(&c->rows);
    size_t begin = 0, end = 0; /* range of the document */
    for (size_t i = 0; i < rows; i++) {
        const size_t p = ari_positions_at(&c->rows, i);
        const ari_keys order = ari_order_keys(&by_order, p);
        if (p < begin || p >= end)
            ari_batch_document(batch, sample, p, &begin, &end);
        visible[i].begin = order.begin > (int32_t)begin ? order.begin : (int32_t)begin;
        visible[i].end = order.end < (int32_t)end ? order.end : (int32_t)end;
    }
}

/* Returns the keys that a query sees in at least one of n > 0 samples, `step` apart. */
static ari_keys seen_by_any(const ari_keys *visible, size_t n, size_t step)
{
    ari_keys merged = visible[0];
    for (size_t i = 1; i < n; i++) {
        const ari_keys sample_keys = visible[i * step];
        merged.begin = sample_keys.begin < merged.begin ? sample_keys.begin : merged.begin;
        merged.end = sample_keys.end > merged.end ? sample_keys.end : merged.end;
    }
    return merged;
}

static ar_status upload_padding(ar_ctx *ctx, ari_core_saved *state, const ar_batch *batch)
{
    const size_t shape[2] = {batch->batch, batch->seq};
    if (!batch->padding_mask)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &state->padding, AR_U8, 2, shape));
    return ar_ctx_upload(ctx, &state->padding, batch->padding_mask);
}

/* Uploads this rank's rows of the additive mask. */
static ar_status upload_additive(const ari_core *c, ar_ctx *ctx, ari_core_saved *state, const ar_batch *batch)
{
    const size_t rows = ari_positions_count(&c->rows), planes = batch->mask_batch * batch->mask_heads;
    const size_t shape[4] = {batch->mask_batch, batch->mask_heads, rows, c->seq};
    if (!batch->additive_mask)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &state->additive, AR_F32, 4, shape));
    for (size_t plane = 0; plane < planes; plane++) {
        size_t row_offset = plane * rows;
        for (int run = 0; run < 2; run++) {
            const size_t count[2] = {c->rows.count[run], c->seq};
            ar_tensor part;
            AR_TRY(ar_tensor_view(&part, AR_F32, 2, count,
                                  ar_buf_at(state->additive.data, row_offset * c->seq * sizeof(float))));
            AR_TRY(ar_ctx_upload(ctx, &part, batch->additive_mask + (plane * c->seq + c->rows.first[run]) * c->seq));
            row_offset += count[0];
        }
    }
    return AR_OK;
}

static void kept_destroy(ar_ctx *ctx, void *object)
{
    ari_core_saved *state = object;
    ar_tensor *const tensors[] = {&state->keys, &state->padding, &state->additive, &state->max, &state->sum};
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        ar_ctx_release(ctx, tensors[i]);
    free(state->visible_union);
    free(state->visible);
    free(state);
}

/* The keys of every query. They stay on the host if documents decide them. */
static ar_status upload_keys(const ari_core *c, ar_ctx *ctx, ari_core_saved *state, const ar_batch *batch, size_t rows)
{
    const size_t shape[3] = {batch->batch, rows, 2};
    ari_keys *visible = NULL;
    size_t n = 0;
    AR_TRY(ar_ctx_tensor(ctx, &state->keys, AR_I32, 3, shape));
    if (ctx->device->hollow && !batch->documents)
        return AR_OK;
    AR_TRY(ari_mul_size(&n, batch->batch, rows));
    AR_TRY(ARI_ALLOC(&state->visible_union, rows, "the keys that queries see"));
    AR_TRY(ARI_ALLOC(&visible, n, "the keys that queries see"));
    for (size_t i = 0; i < batch->batch; i++)
        fill_sample(visible + i * rows, c, batch, i);
    for (size_t i = 0; i < rows; i++)
        state->visible_union[i] = seen_by_any(visible + i, batch->batch, rows);
    const ar_status st = ar_ctx_upload(ctx, &state->keys, visible);
    if (batch->documents)
        state->visible = visible;
    else
        free(visible);
    return st;
}

ar_status ari_core_masks(const ari_core *c, ar_ctx *ctx, ari_core_saved **out, const ar_batch *batch)
{
    const size_t rows = ari_positions_count(&c->rows);
    ari_core_saved *state = NULL;
    if (c->seq >= INT32_MAX)
        return ar_error_set(AR_ERR_SHAPE, "%s: a sequence of %zu positions; attention numbers fewer than %d", c->name,
                            c->seq, INT32_MAX);
    AR_TRY(ARI_ALLOC_ZERO(&state, 1, "what an attention keeps"));
    AR_TRY(ari_step_own(ctx, state, kept_destroy));
    state->batch = batch->batch;
    AR_TRY(upload_keys(c, ctx, state, batch, rows));
    AR_TRY(upload_padding(ctx, state, batch));
    AR_TRY(upload_additive(c, ctx, state, batch));
    *out = state;
    return AR_OK;
}

ar_mask ari_core_mask(const ari_core *c, const ari_core_saved *state)
{
    return (ar_mask){.visible = ar_const(state->keys.data),
                     .padding = ar_const(state->padding.data),
                     .additive = ar_const(state->additive.data),
                     .mask_batch = state->additive.shape[0],
                     .mask_heads = state->additive.shape[1],
                     .head_start = c->head_start};
}
