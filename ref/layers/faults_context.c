/* SPDX-License-Identifier: Apache-2.0 */
/* Injected faults of context parallelism, and of the order in which tokens of several ranks are put together. */

#include "ref/layers/faults.h"

/* --- positions and labels ----------------------------------------------------------------------------------------- */

ar_positions ari_fault_positions(const ar_ctx *ctx, size_t seq, bool stream, ar_positions own)
{
    ar_parallel contiguous = ctx->layout;
    contiguous.zigzag = false;
    if (!ctx->layout.zigzag || !ar_faulty(ctx, AR_FAULT_zigzag_positions))
        return own;
    own = ar_parallel_positions(&contiguous, seq, ari_ctx_place(ctx, ARI_CUTS_POSITIONS));
    return stream
               ? ar_positions_part(&own, ari_ctx_sp(ctx) ? (size_t)ar_comm_rank(ctx->tp) : 0, ari_sequence_ranks(ctx))
               : own;
}

size_t ari_fault_position(const ar_ctx *ctx, const ar_batch *batch, size_t row, size_t at)
{
    return ar_faulty(ctx, AR_FAULT_positions_over_documents) ? at : ar_batch_position(batch, row, at);
}

/* The next of the rank's own tokens, wherever that is in the sequence; the last has none. */
int64_t ari_fault_target(const ar_ctx *ctx, const ar_batch *batch, size_t row, const ar_positions *own, size_t i,
                         int64_t target)
{
    const int64_t *labels = batch->labels ? batch->labels : batch->input_ids;
    if (!ar_faulty(ctx, AR_FAULT_labels_after_cut) || ar_comm_size(ctx->sequence) == 1)
        return target;
    return i + 1 < ar_positions_count(own) ? labels[row * batch->seq + ar_positions_at(own, i + 1)] : AR_IGNORE_INDEX;
}

/* --- documents ---------------------------------------------------------------------------------------------------- */

/* Within the own positions documents end where they do among as many first ones of the row. Those before them, and the
 * first of the own, are what they are. */
static void end_as_the_first(int32_t *documents, const int32_t *of_row, const ar_positions *rows, size_t seq)
{
    int32_t last = of_row[rows->first[0]];
    for (size_t at = 0; at < seq; at++)
        documents[at] = at < rows->first[0] ? of_row[at] : INT32_MAX;
    for (size_t i = 0; i < ar_positions_count(rows); i++) {
        last += i > 0 && of_row[i] != of_row[i - 1];
        documents[ar_positions_at(rows, i)] = last;
    }
    for (size_t at = seq; at-- > rows->first[0];) /* between two chunks: of the document that goes on after them */
        documents[at] = documents[at] == INT32_MAX && at + 1 < seq ? documents[at + 1] : documents[at];
}

ar_status ari_fault_documents(ar_batch *seen, int32_t **made, const ar_ctx *ctx, const ar_batch *batch,
                              const ar_positions *rows)
{
    *seen = *batch;
    *made = NULL;
    if (ar_faulty(ctx, AR_FAULT_attention_over_documents))
        seen->documents = NULL;
    if (!batch->documents || !ar_faulty(ctx, AR_FAULT_document_boundaries_local))
        return AR_OK;
    AR_TRY(ARI_ALLOC(made, batch->batch * batch->seq, "documents"));
    for (size_t row = 0; row < batch->batch; row++)
        end_as_the_first(*made + row * batch->seq, batch->documents + row * batch->seq, rows, batch->seq);
    seen->documents = *made;
    return AR_OK;
}

/* --- order -------------------------------------------------------------------------------------------------------- */

/* A zigzag's chunks as contiguous ones, or the other way round where that is possible. */
ar_positions ari_fault_chunk(const ar_ctx *ctx, size_t seq, int place, ar_positions positions)
{
    const int n = ar_comm_size(ctx->ring);
    if (!ar_faulty(ctx, AR_FAULT_allgather_token_order) || seq % (2 * (size_t)n) != 0)
        return positions;
    return ar_ring_positions((size_t)n, !ctx->layout.zigzag, seq, (size_t)place);
}

/* Each rank's rows as the r-th chunks from either end. */
ar_status ari_fault_gathered(ar_ctx *ctx, ar_tensor *y)
{
    const int n = ar_comm_size(ctx->tp), dim = y->ndim - 2;
    const size_t seq = y->shape[dim], own = seq / (size_t)n;
    ar_tensor moved;
    if (!ar_faulty(ctx, AR_FAULT_allgather_token_order) || n == 1 || own % 2 != 0)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &moved, y->dtype, y->ndim, y->shape));
    for (int r = 0; r < n; r++) {
        const ar_positions p = ar_ring_positions((size_t)n, true, seq, (size_t)r);
        for (int run = 0; run < 2; run++) {
            const ar_tensor from = ar_tensor_slice(y, dim, (size_t)r * own + (run ? p.count[0] : 0), p.count[run]);
            const ar_tensor to = ar_tensor_slice(&moved, dim, p.first[run], p.count[run]);
            AR_TRY(ARI_KERNEL(ctx, copy_strided, &to, &from));
        }
    }
    ar_ctx_release(ctx, y);
    *y = moved;
    return AR_OK;
}

/* Each rank begins with its own rows, and takes the order of arrival for that of the ranks; or for that of the
 * samples. */
ar_status ari_fault_chunk_put(ar_ctx *ctx, const ar_tensor *to, const ar_tensor *from)
{
    const size_t n = to->shape[0], r = (size_t)ar_comm_rank(ctx->tp), all = (size_t)to->stride[1], own = all / n;
    for (size_t p = 0; p < n && ar_faulty(ctx, AR_FAULT_allgather_token_order); p++) {
        const ar_tensor place = ar_tensor_slice(to, 0, p, 1), rows = ar_tensor_slice(from, 0, (r + p) % n, 1);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &place, &rows));
    }
    if (!ar_faulty(ctx, AR_FAULT_gather_batch_order))
        return AR_OK;
    ar_tensor by_rank = *to;
    by_rank.stride[0] = (ptrdiff_t)(own * to->shape[1]);
    by_rank.stride[1] = (ptrdiff_t)own;
    return ARI_KERNEL(ctx, copy_strided, &by_rank, from);
}

/* As with one buffer for all chunks. */
ar_status ari_fault_chunk_rows(ar_ctx *ctx, const ar_tensor *rows, ar_buf before)
{
    if (!ar_faulty(ctx, AR_FAULT_chunk_not_awaited))
        return AR_OK;
    return ARI_KERNEL(ctx, copy, rows->data, ar_const(before), ar_tensor_count(rows) * ar_dtype_bytes(rows->dtype));
}

ar_status ari_fault_tail(ar_ctx *ctx, const ar_tensor *x, const ar_positions *rows, size_t seq)
{
    const size_t unit = 2 * (size_t)ar_comm_size(ctx->sequence), kept = seq / unit * unit;
    if (unit == 2 || !ar_faulty(ctx, AR_FAULT_cp_tail_dropped))
        return AR_OK;
    for (size_t i = 0; i < ar_positions_count(rows); i++) {
        ar_tensor lost = ar_tensor_slice(x, 2, i, 1), nothing;
        if (ar_positions_at(rows, i) < kept)
            continue;
        AR_TRY(ar_ctx_tensor(ctx, &nothing, lost.dtype, lost.ndim, lost.shape));
        AR_TRY(ARI_KERNEL(ctx, fill, &nothing, 0.0f));
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &lost, &nothing));
        ar_ctx_release(ctx, &nothing);
    }
    return AR_OK;
}
