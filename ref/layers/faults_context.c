/* SPDX-License-Identifier: Apache-2.0 */
/* Injected faults of context parallelism, and of the order in which tokens of several ranks are combined. */

#include "ref/context/context_private.h"
#include "ref/layers/faults.h"
#include "ref/placement/parallel_private.h"

/* Fault: returns the next one of the rank's own tokens, wherever it is in the sequence; the last has none. */
int64_t ari_fault_target(const ar_ctx *ctx, const ar_batch *batch, size_t row, const ar_positions *positions, size_t i,
                         int64_t target)
{
    const int64_t *labels = batch->labels ? batch->labels : batch->input_ids;
    if (!ari_faulty(ctx, "labels_after_cut") || ar_comm_size(ctx->sequence) == 1)
        return target;
    return i + 1 < ari_positions_count(positions) ? labels[row * batch->seq + ari_positions_at(positions, i + 1)]
                                                  : AR_IGNORE_INDEX;
}

/* Fault: writes a zigzag's chunks as contiguous ones, or the other way round where possible. */
ar_positions ari_fault_chunk(const ar_ctx *ctx, size_t seq, int place, ar_positions positions)
{
    const int n = ar_comm_size(ctx->ring);
    if (!ari_faulty(ctx, "allgather_token_order") || seq % (2 * (size_t)n) != 0)
        return positions;
    return ari_positions_ring((size_t)n, !ctx->layout.zigzag, seq, (size_t)place);
}

/* Orders the ranks' rows as if rank r had the r-th chunk from either end. */
ar_status ari_fault_gathered(ar_ctx *ctx, ar_tensor *y)
{
    const int n = ar_comm_size(ctx->tp), dim = y->ndim - 2;
    const size_t seq = y->shape[dim], local_seq = seq / (size_t)n;
    ar_tensor moved;
    if (!ari_faulty(ctx, "allgather_token_order") || n == 1 || local_seq % 2 != 0)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &moved, y->dtype, y->ndim, y->shape));
    for (int r = 0; r < n; r++) {
        const ar_positions p = ari_positions_ring((size_t)n, true, seq, (size_t)r);
        for (int run = 0; run < 2; run++) {
            const ar_tensor src = ar_tensor_slice(y, dim, (size_t)r * local_seq + (run ? p.count[0] : 0), p.count[run]);
            const ar_tensor dst = ar_tensor_slice(&moved, dim, p.first[run], p.count[run]);
            AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
        }
    }
    ar_ctx_release(ctx, y);
    *y = moved;
    return AR_OK;
}

/* Fault: each rank begins with its own rows and uses the order of arrival instead of the order of ranks, or of
 * samples. */
ar_status ari_fault_chunk_put(ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src)
{
    const size_t n = dst->shape[0], r = (size_t)ar_comm_rank(ctx->tp), sample_stride = (size_t)dst->stride[1],
                 rank_stride = sample_stride / n;
    for (size_t p = 0; p < n && ari_faulty(ctx, "allgather_token_order"); p++) {
        const ar_tensor place = ar_tensor_slice(dst, 0, p, 1), rows = ar_tensor_slice(src, 0, (r + p) % n, 1);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &place, &rows));
    }
    if (!ari_faulty(ctx, "gather_batch_order"))
        return AR_OK;
    ar_tensor by_rank = *dst;
    by_rank.stride[0] = (ptrdiff_t)(rank_stride * dst->shape[1]);
    by_rank.stride[1] = (ptrdiff_t)rank_stride;
    return ARI_KERNEL(ctx, copy_strided, &by_rank, src);
}

ar_status ari_fault_tail(ar_ctx *ctx, const ar_tensor *x, const ar_positions *rows, size_t seq)
{
    const size_t unit = 2 * (size_t)ar_comm_size(ctx->sequence), count = ari_positions_count(rows);
    size_t retained = count;
    while (retained > 0 && ari_positions_at(rows, retained - 1) >= seq / unit * unit)
        retained--;
    if (unit == 2 || retained == count || !ari_faulty(ctx, "cp_tail_dropped"))
        return AR_OK;
    const ar_tensor lost = ar_tensor_slice(x, 2, retained, count - retained);
    ar_tensor zeros;
    AR_TRY(ar_ctx_tensor(ctx, &zeros, lost.dtype, lost.ndim, lost.shape));
    AR_TRY(ARI_KERNEL(ctx, fill, &zeros, 0.0f));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &lost, &zeros));
    ar_ctx_release(ctx, &zeros);
    return AR_OK;
}
