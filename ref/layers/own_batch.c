/* SPDX-License-Identifier: Apache-2.0 */
/* Part of a batch that a rank has of a module's input, labels and targets: its positions of every sample. */
#include <stdlib.h>
#include <string.h>

#include "ref/core/axis.h"
#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"
#include "ref/placement/parallel_private.h"

size_t ari_batch_positions(const ar_batch *batch)
{
    if (!batch->input)
        return batch->seq;
    return batch->sample_ndim > 1 ? batch->sample_shape[0] : 1;
}

/* True if ranks share out the positions of a sample. */
static bool shares_positions(const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) || ar_comm_size(ctx->sequence) > 1;
}

/* Gets this rank's positions of a sample. */
static ar_status own_positions(ar_positions *positions, const ar_ctx *ctx, const ar_batch *batch, bool stream)
{
    const size_t s = ari_batch_positions(batch);
    if (shares_positions(ctx) && s <= 1)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s parallelism shares out positions, and a sample of this batch has none: its input is "
                            "[positions, features], or ids; leave %s out",
                            ari_ctx_sp(ctx) ? "sequence" : "context",
                            ari_ctx_sp(ctx) ? "sp" : ari_layout_axes[ARI_LAYOUT_CP].name);
    if (shares_positions(ctx))
        AR_TRY(ari_check_sequence(ctx, s));
    *positions = ari_local_positions(ctx, s, stream);
    return AR_OK;
}

/* Copies these positions of src [b, s, width] to dst [b, positions, width]; elements have `size` bytes. */
static void take_positions(void *dst, const void *src, const ar_batch *batch, const ar_positions *positions,
                           size_t width, size_t size)
{
    const size_t s = ari_batch_positions(batch), n = ari_positions_count(positions), bytes = width * size;
    for (size_t i = 0; i < batch->batch * n; i++)
        memcpy((char *)dst + i * bytes, (const char *)src + (i / n * s + ari_positions_at(positions, i % n)) * bytes,
               bytes);
}

/* --- labels and targets ------------------------------------------------------------------------------------------- */

static ar_status take_labels(ari_local_batch *o, const ar_ctx *ctx, const ar_batch *batch,
                             const ar_positions *positions, bool predicts_next)
{
    const size_t n = ari_positions_count(positions);
    AR_TRY(ARI_ALLOC(&o->labels, batch->batch * n, "labels"));
    if (!predicts_next)
        take_positions(o->labels, batch->labels, batch, positions, 1, sizeof *o->labels);
    for (size_t i = 0; predicts_next && i < batch->batch * n; i++)
        o->labels[i] = ari_local_target(ctx, batch, i / n, positions, i % n);
    o->batch.labels = o->labels;
    return AR_OK;
}

ar_status ari_local_batch_init(ari_local_batch *o, const ar_ctx *ctx, const ar_batch *batch, bool stream,
                               bool predicts_next)
{
    const size_t s = ari_batch_positions(batch);
    const bool shared = shares_positions(ctx);
    predicts_next = predicts_next || (!batch->labels && batch->input_ids);
    ar_positions positions;
    *o = (ari_local_batch){.batch = *batch};
    AR_TRY(own_positions(&positions, ctx, batch, stream));
    const size_t n = ari_positions_count(&positions);
    if (predicts_next || (shared && batch->labels && batch->seq == s))
        AR_TRY(take_labels(o, ctx, batch, &positions, predicts_next));
    if (shared && batch->target && batch->target_width % s == 0) {
        const size_t width = batch->target_width / s;
        AR_TRY(ARI_ALLOC(&o->target, batch->batch * n * width, "targets"));
        take_positions(o->target, batch->target, batch, &positions, width, sizeof *o->target);
        o->batch.target = o->target;
        o->batch.target_width = n * width;
    }
    if (batch->seq == s)
        o->batch.seq = n;
    return AR_OK;
}

void ari_local_batch_fini(ari_local_batch *o)
{
    free(o->labels);
    free(o->target);
}

/* --- input -------------------------------------------------------------------------------------------------------- */

static ar_status ids_input(ar_ctx *ctx, ar_tensor *x, const ar_batch *batch, const ar_positions *positions)
{
    const size_t shape[2] = {batch->batch, ari_positions_count(positions)};
    ARI_OWNED int64_t *ids = NULL;
    AR_TRY(ARI_ALLOC(&ids, shape[0] * shape[1], "ids"));
    take_positions(ids, batch->input_ids, batch, positions, 1, sizeof *ids);
    AR_TRY(ar_ctx_tensor(ctx, x, AR_I64, 2, shape));
    return ar_ctx_upload(ctx, x, ids);
}

static ar_status number_input(ar_ctx *ctx, ar_tensor *x, const ar_batch *batch, const ar_positions *positions)
{
    const size_t width = ari_volume(batch->sample_shape + 1, batch->sample_ndim - 1);
    size_t shape[AR_MAX_DIMS] = {batch->batch};
    ARI_OWNED float *part = NULL;
    for (int d = 0; d < batch->sample_ndim; d++)
        shape[d + 1] = batch->sample_shape[d];
    shape[1] = shares_positions(ctx) ? ari_positions_count(positions) : shape[1];
    AR_TRY(ar_ctx_tensor(ctx, x, ctx->activations, batch->sample_ndim + 1, shape));
    if (!shares_positions(ctx))
        return ar_ctx_upload_floats(ctx, x, batch->input, ar_tensor_count(x));
    AR_TRY(ARI_ALLOC(&part, ar_tensor_count(x), "positions of the input"));
    take_positions(part, batch->input, batch, positions, width, sizeof *part);
    return ar_ctx_upload_floats(ctx, x, part, ar_tensor_count(x));
}

ar_status ari_batch_input(ar_ctx *ctx, ar_tensor *x, const ar_batch *batch)
{
    ar_positions positions;
    if (batch->input ? batch->sample_ndim < 1 || batch->sample_ndim > AR_SAMPLE_DIMS : !batch->input_ids)
        return ar_error_set(
            AR_ERR_ARG,
            "a batch has input_ids, or numbers in `input` and a sample_ndim of 1 to %d; this one has %s and %d",
            AR_SAMPLE_DIMS, batch->input ? "input" : "none", batch->sample_ndim);
    AR_TRY(own_positions(&positions, ctx, batch, true));
    AR_TRY(batch->input ? number_input(ctx, x, batch, &positions) : ids_input(ctx, x, batch, &positions));
    const ar_placement placed = ari_placed_stream(ctx);
    return batch->input
               ? ARI_NOTE(ctx, .kind = ARI_LEDGER_REPORT, .name = "input", .input = {x}, .input_placement = &placed)
               : AR_OK;
}
