/* SPDX-License-Identifier: Apache-2.0 */
/* The positions of a rank, and what moves along a sequence between the tensor-parallel regions. */

#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/faults.h"
#include "ref/placement/axis.h"
#include "ref/placement/parallel_private.h"

/* Returns the layout for which the context's groups were created, as far as it divides sequences. */
static ar_parallel layout_of(const ar_ctx *ctx)
{
    ar_parallel layout = ctx->layout;
    layout.sp = ctx->sp;
    return layout;
}

ar_status ari_check_sequence(const ar_ctx *ctx, size_t seq)
{
    const ar_parallel layout = layout_of(ctx);
    return ari_parallel_check_sequence(&layout, seq);
}

ar_positions ari_local_positions(const ar_ctx *ctx, size_t seq, bool stream)
{
    const ar_positions positions = ari_parallel_positions(&ctx->layout, seq, ari_ctx_place(ctx, ARI_CUTS_POSITIONS));
    return stream && ari_ctx_sp(ctx)
               ? ari_positions_part(&positions, (size_t)ar_comm_rank(ctx->tp), (size_t)ar_comm_size(ctx->tp))
               : positions;
}

size_t ari_all_positions(const ar_ctx *ctx, size_t local_count)
{
    return local_count * (size_t)ar_comm_size(ctx->sequence);
}

size_t ari_token_at(const ar_ctx *ctx, const ar_batch *batch, size_t i, bool rank_major)
{
    const ar_positions positions = ari_local_positions(ctx, batch->seq, false);
    const size_t local_count = ari_positions_count(&positions) / (rank_major ? ari_sequence_ranks(ctx) : 1);
    const size_t sample = i / local_count % batch->batch, rank = i / local_count / batch->batch;
    return sample * batch->seq + ari_positions_at(&positions, rank * local_count + i % local_count);
}

int64_t ari_local_target(const ar_ctx *ctx, const ar_batch *batch, size_t row, const ar_positions *positions, size_t i)
{
    const int64_t target = ari_batch_target(batch, row, ari_positions_at(positions, i));
    return ari_fault_target(ctx, batch, row, positions, i, target);
}

ar_status ari_token_positions(ar_ctx *ctx, ar_tensor *position_ids, const ar_batch *batch,
                              const ar_positions *positions)
{
    const size_t per_sample = ari_positions_count(positions), n = batch->batch * per_sample;
    ARI_OWNED int64_t *host = NULL;
    AR_TRY(ARI_ALLOC(&host, n, "positions"));
    for (size_t i = 0; i < n; i++) {
        const size_t place = ari_positions_at(positions, i % per_sample);
        const bool ignores_documents = ari_faulty(ctx, "positions_over_documents");
        host[i] = (int64_t)(ignores_documents ? place : ari_batch_position(batch, i / per_sample, place));
    }
    return ari_numbers(ctx, position_ids, AR_I64, n, host);
}

/* Describes the positions of an x with all of them as divided among the ranks. */
static ar_status positions_of(ari_axis *a, const ar_ctx *ctx, const ar_tensor *x)
{
    *a = ari_axis_of(x->ndim, x->shape, x->ndim - 2, ar_comm_size(ctx->tp));
    if (a->extent % (size_t)a->parts != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "a sequence of %zu positions cannot be split over tp=%d; use a multiple of %d", a->extent,
                            a->parts, a->parts);
    return AR_OK;
}

ar_status ari_like_own_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features)
{
    ari_axis a;
    AR_TRY(positions_of(&a, ctx, x));
    return ari_like_tokens(ctx, y, x, a.extent / (size_t)a.parts, features);
}

ar_status ari_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x)
{
    ari_axis a;
    AR_TRY(positions_of(&a, ctx, x));
    *rows = ari_tensor_rows(x);
    if (a.before == 1)
        return AR_OK;
    AR_TRY(ari_new_rows(ctx, rows, x->dtype, a.before * a.extent, a.after));
    return ari_axis_pack(ctx, rows->data, ar_const(x->data), &a, x->dtype);
}

ar_status ari_gather_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x, const char *tag)
{
    const int n = ar_comm_size(ctx->tp);
    const ar_tensor local_rows = ari_tensor_rows(x);
    AR_TRY(ari_new_rows(ctx, rows, x->dtype, (size_t)n * local_rows.shape[0], local_rows.shape[1]));
    const ari_axis a = ari_axis_of(2, rows->shape, 0, n);
    return ari_axis_gather(ctx, ctx->tp, rows->data, ar_const(x->data), &a, x->dtype, tag);
}
