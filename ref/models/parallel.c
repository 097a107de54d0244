/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/parallel.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/comm.h"
#include "anyrank/model.h"
#include "ref/core/size.h"
#include "ref/models/stages.h"

int ar_parallel_world(const ar_parallel *p)
{
    return ari_at_least_one(p->tp) * ari_at_least_one(p->dp) * ari_at_least_one(p->cp) * ari_at_least_one(p->pp);
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

static void append_recompute(char *out, size_t cap, const ar_recomputation *r)
{
    char text[64];
    if (r->what == AR_RECOMPUTE_NONE)
        return;
    if (r->every > 1)
        snprintf(text, sizeof text, "recompute=%s/%d", ar_recompute_name(r->what), r->every);
    else
        snprintf(text, sizeof text, "recompute=%s", ar_recompute_name(r->what));
    append(out, cap, text, 0);
}

static void append_pipeline(char *out, size_t cap, const ar_parallel *p)
{
    char text[64];
    if (ari_at_least_one(p->pp) == 1)
        return;
    append(out, cap, "pp", p->pp);
    append(out, cap, p->own_schedule ? "(own schedule)" : ar_pp_schedule_name(p->schedule), 0);
    if (ari_at_least_one(p->virtual_stages) > 1) {
        snprintf(text, sizeof text, "(%d stages each)", p->virtual_stages);
        append(out, cap, text, 0);
    }
}

/* Last, as it may be long. */
static void append_stages(char *out, size_t cap, const ar_parallel *p)
{
    char layers[ARI_STAGES_TEXT], text[sizeof layers + 8];
    if (ari_at_least_one(p->pp) == 1 || p->stages.n == 0)
        return;
    ari_stages_text(layers, &p->stages);
    snprintf(text, sizeof text, "stages=%s", layers);
    append(out, cap, text, 0);
}

void ar_parallel_text(char *out, size_t cap, const ar_parallel *p)
{
    const int tp = ari_at_least_one(p->tp), dp = ari_at_least_one(p->dp), micro = ari_at_least_one(p->micro_batches);
    const int cp = ari_at_least_one(p->cp), inner = ari_at_least_one(p->cp_inner);
    char neighbours[32];
    if (cap == 0)
        return;
    out[0] = '\0';
    append_pipeline(out, cap, p);
    if (dp > 1)
        append(out, cap, "dp", dp);
    if (cp > 1)
        append(out, cap, "cp", cp);
    if (cp > 1 && inner > 1) {
        snprintf(neighbours, sizeof neighbours, "(inner %d)", inner);
        append(out, cap, neighbours, 0);
    }
    if (cp > 1 && p->zigzag)
        append(out, cap, "zigzag", 0);
    if (tp > 1 || (dp == 1 && cp == 1 && micro == 1 && ari_at_least_one(p->pp) == 1))
        append(out, cap, "tp", tp);
    if (p->sp && tp > 1)
        append(out, cap, p->keep_gathered ? "sp (kept)" : "sp", 0);
    if (p->sp && tp > 1 && p->overlap > 1)
        append(out, cap, "overlap", p->overlap);
    append_recompute(out, cap, &p->recompute);
    if (p->zero > 0 && dp * cp > 1)
        append(out, cap, "zero", p->zero);
    if (ari_at_least_one(p->dp_replicate) > 1)
        append(out, cap, "replicate", p->dp_replicate);
    if (micro > 1)
        append(out, cap, "micro-batches", micro);
    if (p->forward_first && micro > 1)
        append(out, cap, "(forward first)", 0);
    append_stages(out, cap, p);
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

/* The number of ranks where an int may be too small: two extents fit, and another one as far as that goes. */
static uint64_t ranks_of(const ar_parallel *p)
{
    const uint64_t two = (uint64_t)ari_at_least_one(p->tp) * (uint64_t)ari_at_least_one(p->cp);
    const uint64_t three = two > (uint64_t)INT_MAX ? two : two * (uint64_t)ari_at_least_one(p->dp);
    return three > (uint64_t)INT_MAX ? three : three * (uint64_t)ari_at_least_one(p->pp);
}

static ar_status check_replicas(const ar_parallel *p)
{
    const int dp = ari_at_least_one(p->dp), replicas = ari_at_least_one(p->dp_replicate);
    if (p->dp_replicate < 0 || dp % replicas != 0)
        return ar_error_set(AR_ERR_ARG, "dp=%d is not %d groups of as many ranks; use replicas that divide it", dp,
                            p->dp_replicate);
    if (replicas > 1 && p->zero == 0)
        return ar_error_set(AR_ERR_ARG, "%d replicas of shares, and zero=0 shares nothing out; use zero=1 or more",
                            replicas);
    return AR_OK;
}

ar_status ar_parallel_check(const ar_parallel *p, const ar_config *c, const ar_plan *plan, size_t batch, size_t seq)
{
    if (p->tp < 0 || p->dp < 0 || p->micro_batches < 0 || p->cp < 0 || p->cp_inner < 0 || p->pp < 0 ||
        p->virtual_stages < 0)
        return ar_error_set(AR_ERR_ARG,
                            "tp=%d, dp=%d, cp=%d, inner cp=%d, pp=%d, virtual stages=%d, micro-batches=%d: extents are "
                            "at least 1",
                            p->tp, p->dp, p->cp, p->cp_inner, p->pp, p->virtual_stages, p->micro_batches);
    if (ranks_of(p) > (uint64_t)INT_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "tp=%d, cp=%d, dp=%d, pp=%d: more ranks than an int can number", p->tp,
                            p->cp, p->dp, p->pp);
    if (p->zero < 0 || p->zero > 3)
        return ar_error_set(
            AR_ERR_ARG,
            "zero=%d: 0, or of the optimizer's state (1), of gradients too (2), of weights too (3) each "
            "rank keeps its share",
            p->zero);
    AR_TRY(check_replicas(p));
    if (p->overlap < 0 || p->recompute.every < 0 || (unsigned)p->recompute.what >= AR_RECOMPUTES)
        return ar_error_set(AR_ERR_ARG, "overlap=%d, recompute %d of every %d: chunks and blocks are at least 1",
                            p->overlap, (int)p->recompute.what, p->recompute.every);
    const int tp = ari_at_least_one(p->tp);
    const bool sequence = ar_plan_by_tokens(plan, tp, p->sp);
    AR_TRY(ar_plan_check(plan, c, sequence));
    AR_TRY(ar_config_check_tp(c, tp, plan));
    AR_TRY(ari_stages_check(p, c));
    AR_TRY(check_batch(p, batch));
    AR_TRY(ar_parallel_check_sequence(p, seq));
    return ar_config_check_inner(c, tp, ari_at_least_one(p->cp_inner), plan);
}

/* --- samples ------------------------------------------------------------------------------------------------------ */

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
    out->documents = global->documents ? global->documents + tokens : NULL;
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
    out->longest = ar_batch_longest(global);
}
