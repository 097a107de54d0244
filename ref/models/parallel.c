/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/parallel.h"

#include <stdio.h>
#include <string.h>

#include "anyrank/comm.h"
#include "anyrank/model.h"
#include "ref/core/size.h"

int ar_parallel_world(const ar_parallel *p)
{
    return ari_at_least_one(p->tp) * ari_at_least_one(p->dp);
}

/* Appends " word" or " word=extent" to a text of `cap` bytes; what does not fit is cut. */
static void append(char *out, size_t cap, const char *word, int extent)
{
    const size_t used = strlen(out);
    const char *space = used > 0 ? " " : "";
    if (extent > 0)
        snprintf(out + used, cap - used, "%s%s=%d", space, word, extent);
    else
        snprintf(out + used, cap - used, "%s%s", space, word);
}

void ar_parallel_text(char *out, size_t cap, const ar_parallel *p)
{
    const int tp = ari_at_least_one(p->tp), dp = ari_at_least_one(p->dp), micro = ari_at_least_one(p->micro_batches);
    if (cap == 0)
        return;
    out[0] = '\0';
    if (dp > 1)
        append(out, cap, "dp", dp);
    if (tp > 1 || (dp == 1 && micro == 1))
        append(out, cap, "tp", tp);
    if (p->sp && tp > 1)
        append(out, cap, p->keep_gathered ? "sp (kept)" : "sp", 0);
    if (p->zero > 0 && dp > 1)
        append(out, cap, "zero", p->zero);
    if (micro > 1)
        append(out, cap, "micro-batches", micro);
    if (p->forward_first && micro > 1)
        append(out, cap, "(forward first)", 0);
}

static ar_status check_batch(const ar_parallel *p, size_t batch)
{
    const size_t dp = (size_t)ari_at_least_one(p->dp), micro = (size_t)ari_at_least_one(p->micro_batches);
    const size_t most = (batch + dp - 1) / dp;
    if (batch == 0)
        return AR_OK;
    if (micro > most)
        return ar_error_set(
            AR_ERR_ARG, "%zu micro-batches cannot share the %zu samples of a rank; use at most %zu, or a larger batch",
            micro, most, most);
    return AR_OK;
}

ar_status ar_parallel_check(const ar_parallel *p, const ar_config *c, const ar_plan *plan, size_t batch, size_t seq)
{
    if (p->tp < 0 || p->dp < 0 || p->micro_batches < 0)
        return ar_error_set(AR_ERR_ARG, "tp=%d, dp=%d, micro-batches=%d: extents are at least 1", p->tp, p->dp,
                            p->micro_batches);
    if (p->zero < 0 || p->zero > 1)
        return ar_error_set(AR_ERR_ARG, "zero=%d: 0, or 1 for stage 1 (optimizer states)", p->zero);
    const int tp = ari_at_least_one(p->tp);
    const bool sequence = ar_plan_by_tokens(plan, tp, p->sp);
    AR_TRY(ar_plan_check(plan, c, sequence));
    AR_TRY(ar_config_check_tp(c, tp, plan));
    AR_TRY(check_batch(p, batch));
    if (p->sp && seq % (size_t)tp != 0)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "a sequence of %zu cannot be split over tp=%d (sequence parallelism); use a seq that tp divides", seq, tp);
    return AR_OK;
}

void ar_parallel_rows(const ar_parallel *p, size_t batch, int dp_rank, int micro, size_t *start, size_t *count)
{
    size_t rank_start = 0, rank_count = 0;
    ar_comm_slice(batch, ari_at_least_one(p->dp), dp_rank, &rank_start, &rank_count);
    ar_comm_slice(rank_count, ari_at_least_one(p->micro_batches), micro, start, count);
    *start += rank_start;
}

void ar_parallel_slice(ar_batch *out, const ar_parallel *p, const ar_batch *global, int dp_rank, int micro)
{
    size_t start = 0, count = 0;
    ar_parallel_rows(p, global->batch, dp_rank, micro, &start, &count);
    const size_t tokens = start * global->seq;
    *out = *global;
    out->batch = count;
    out->input_ids = global->input_ids ? global->input_ids + tokens : NULL;
    out->labels = global->labels ? global->labels + tokens : NULL;
    out->position_ids = global->position_ids ? global->position_ids + tokens : NULL;
    out->padding_mask = global->padding_mask ? global->padding_mask + tokens : NULL;
    if (global->additive_mask && global->mask_batch > 1) {
        out->additive_mask = global->additive_mask + start * global->mask_heads * global->seq * global->seq;
        out->mask_batch = count;
    }
    size_t width = 1;
    for (int d = 0; d < global->sample_ndim; d++)
        width *= global->sample_shape[d];
    out->input = global->input ? global->input + start * width : NULL;
    out->target = global->target ? global->target + start * global->target_width : NULL;
    out->global_batch = global->batch;
    out->first_sample = start;
}
