/* SPDX-License-Identifier: Apache-2.0 */
/* Effects of the injected faults of multi-token prediction. */

#include "ref/layers/faults.h"

/* Each rank rolls the runs of positions that it has, as if they were all. */
static void forget_others(const ar_ctx *ctx, const ar_batch *b, int64_t *ids, size_t depth)
{
    const ar_positions own = ari_own_positions(ctx, b->seq, false);
    int64_t *labels = ids + b->batch * b->seq;
    for (size_t i = 0; i < b->batch * ar_positions_count(&own); i++) {
        const size_t row = i / ar_positions_count(&own), at = ar_positions_at(&own, i % ar_positions_count(&own));
        size_t run = 0;
        while (run < 1 && (at < own.first[run] || at >= own.first[run] + own.count[run]))
            run++;
        if (at + depth < own.first[run] + own.count[run])
            continue;
        ids[row * b->seq + at] = 0;
        if (at + 1 < b->seq)
            labels[row * b->seq + at + 1] = AR_IGNORE_INDEX;
    }
}

/* The targets of the rank's own positions. */
static size_t own_targets(const ar_ctx *ctx, const ar_batch *rolled)
{
    const ar_positions own = ari_own_positions(ctx, rolled->seq, false);
    const size_t each = ar_positions_count(&own);
    size_t n = 0;
    for (size_t i = 0; i < rolled->batch * each; i++) {
        const size_t at = ar_positions_at(&own, i % each), from = i / each * rolled->seq + at;
        n += at + 1 < rolled->seq && rolled->labels[from + 1] != AR_IGNORE_INDEX &&
             (!rolled->documents || rolled->documents[from] == rolled->documents[from + 1]);
    }
    return n;
}

ar_status ari_fault_roll(const ar_ctx *ctx, ar_batch *rolled, int64_t **memory, const ar_batch *b, size_t depth)
{
    const bool over = b->documents && ar_faulty(ctx, AR_FAULT_mtp_rolled_over_documents);
    ar_batch one = *b;
    one.documents = over ? NULL : b->documents;
    AR_TRY(ar_batch_roll(rolled, memory, &one, depth));
    rolled->documents = b->documents;
    rolled->targets_cross = rolled->targets_cross || over;
    if (ar_faulty(ctx, AR_FAULT_mtp_rolled_after_cut) && ari_all_positions(ctx, 1) > 1)
        forget_others(ctx, b, *memory, depth);
    if (ar_faulty(ctx, AR_FAULT_mtp_mean_over_all))
        rolled->targets = b->targets;
    if (ar_faulty(ctx, AR_FAULT_mtp_mean_of_own))
        rolled->targets = own_targets(ctx, rolled);
    if (ar_faulty(ctx, AR_FAULT_mtp_not_divided))
        rolled->targets = 1;
    return AR_OK;
}

void ari_fault_further_use(const ar_ctx *ctx, ar_param *head, bool begins)
{
    if (ar_faulty(ctx, AR_FAULT_mtp_head_grad_lost))
        head->requires_grad = !begins;
}
