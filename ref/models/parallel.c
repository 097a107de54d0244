/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/parallel.h"

#include <limits.h>

#include "ref/comm/comm_private.h"
#include "ref/core/axis.h"
#include "ref/core/context_private.h"
#include "ref/core/schedule_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/layers/batch_private.h"
#include "ref/models/model.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "ref/models/stages.h"
#include "ref/placement/parallel_private.h"

int ar_parallel_world(const ar_parallel *p)
{
    int world = 1;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        world *= ari_layout_extent(p, i);
    return world;
}

/* Returns the separator between a word and the preceding text. */
static const char *space(const ari_text *t)
{
    return t->used > 0 ? " " : "";
}

static void say_extent(ari_text *t, const char *word, int extent)
{
    ari_say(t, "%s%s=%d", space(t), word, extent);
}

static void say_recompute(ari_text *t, const ar_recomputation *r)
{
    if (r->part == AR_RECOMPUTE_NONE)
        return;
    ari_say(t, "%srecompute=%s", space(t), ari_recompute_name(r->part));
    if (r->every > 1)
        ari_say(t, "/%d", r->every);
}

static void say_pipeline(ari_text *t, const ar_parallel *p)
{
    ari_say(t, " %s", p->own_schedule ? "(own schedule)" : ari_pp_schedule_name(p->schedule));
    if (ari_at_least_one(p->virtual_stages) > 1)
        ari_say(t, " (%d stages each)", p->virtual_stages);
}

/* Appended last, because the text may be long. */
static void say_stages(ari_text *t, const ar_parallel *p)
{
    char layers[ARI_STAGES_TEXT];
    if (ari_extent(p, ARI_CUTS_LAYERS) == 1 || p->stages.n == 0)
        return;
    ari_stages_text(layers, &p->stages);
    ari_say(t, " stages=%s", layers);
}

static void say_context(ari_text *t, const ar_parallel *p)
{
    if (ari_at_least_one(p->cp_inner) > 1)
        ari_say(t, " (inner %d)", p->cp_inner);
    if (p->zigzag)
        ari_say(t, " zigzag");
}

static void say_sequence(ari_text *t, const ar_parallel *p)
{
    if (p->sp)
        ari_say(t, p->keep_gathered ? " sp (kept)" : " sp");
    if (p->sp && p->overlap > 1)
        say_extent(t, "overlap", p->overlap);
}

void ari_parallel_text(char *out, size_t cap, const ar_parallel *p)
{
    static void (*const details[ARI_LAYOUT_AXES])(ari_text *, const ar_parallel *) = {
        [ARI_LAYOUT_PP] = say_pipeline, [ARI_LAYOUT_CP] = say_context, [ARI_LAYOUT_TP] = say_sequence};
    const int micro = ari_at_least_one(p->micro_batches);
    const bool alone = ar_parallel_world(p) == 1 && micro == 1;
    ari_text t = ari_plain_text_in(out, cap);
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        const int ranks = ari_layout_extent(p, i);
        if (ranks > 1 || (alone && i == ARI_LAYOUT_TP))
            say_extent(&t, ari_layout_axes[i].name, ranks);
        if (ranks > 1 && details[i])
            details[i](&t, p);
    }
    if (ari_at_least_one(p->ep) > 1)
        say_extent(&t, "ep", p->ep);
    if (ari_experts_routed(p) && p->dispatch != AR_DISPATCH_ALL_TO_ALL)
        ari_say(&t, "%s(all-gather)", space(&t));
    if (ari_experts_unsplit(p))
        say_extent(&t, "etp", 1);
    say_recompute(&t, &p->recompute);
    if (p->zero > 0 && ari_extent(p, ARI_CUTS_DATA) > 1)
        say_extent(&t, "zero", p->zero);
    if (ari_at_least_one(p->dp_replicate) > 1)
        say_extent(&t, "replicate", p->dp_replicate);
    if (micro > 1)
        say_extent(&t, "micro-batches", micro);
    if (p->forward_first && micro > 1)
        ari_say(&t, " (forward first)");
    say_stages(&t, p);
}

static ar_status check_batch(const ar_parallel *p, size_t batch)
{
    const size_t dp = (size_t)ari_at_least_one(p->dp), micro = (size_t)ari_at_least_one(p->micro_batches);
    const size_t max_micro = (batch + dp - 1) / dp;
    if (batch == 0)
        return AR_OK;
    if (micro > max_micro)
        return ar_error_set(
            AR_ERR_ARG, "%zu micro-batches cannot share the %zu sample%s of a rank; use at most %zu, or a larger batch",
            micro, max_micro, ARI_PLURAL(max_micro), max_micro);
    return AR_OK;
}

static ar_status check_extents(const ar_parallel *p)
{
    char text[ARI_EXTENTS_TEXT];
    uint64_t ranks = 1; /* a product that exceeds an int is not multiplied further */
    for (int i = 0; i < ARI_LAYOUT_AXES; i++)
        ranks *= ranks > (uint64_t)INT_MAX ? 1 : (uint64_t)ari_layout_extent(p, i);
    ari_extents_text(text, p);
    if (ari_extents_negative(p))
        return ar_error_set(AR_ERR_ARG,
                            "%s, cp_inner=%d, virtual stages=%d, micro-batches=%d: extents are at "
                            "least 1",
                            text, p->cp_inner, p->virtual_stages, p->micro_batches);
    if (ranks > (uint64_t)INT_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: more ranks than an int can number", text);
    return AR_OK;
}

static ar_status check_expert_width(const ar_parallel *p, const ar_config *c)
{
    const int tp = ari_at_least_one(p->tp);
    if (c->experts.n == 0)
        return ar_error_set(AR_ERR_ARG, "etp=%d is about experts, and %s has none", p->etp, c->name);
    if (p->etp != tp && p->etp != 1)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "etp=%d of tp=%d: an expert is cut over all tensor-parallel ranks, etp=%d, or none, etp=1",
                            p->etp, tp, tp);
    if (ari_experts_unsplit(p) && !p->sp)
        return ar_error_set(AR_ERR_ARG,
                            "etp=1 with tp=%d: each of these ranks has experts for positions of its own, which takes "
                            "sequence parallelism (sp)",
                            tp);
    return AR_OK;
}

/* Checks the groups of ranks that could share experts. */
static ar_status check_expert_ranks(const ar_parallel *p)
{
    const int ep = ari_at_least_one(p->ep), expert_ranks = ari_extent(p, ari_expert_axes(p));
    const int sharers = expert_ranks / ari_at_least_one(p->dp);
    if (expert_ranks % ep != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "ep=%d does not divide the %d ranks of dp * cp%s, of which each has some experts", ep,
                            expert_ranks, ari_experts_unsplit(p) ? " * tp" : "");
    const int per_replica = expert_ranks / ari_at_least_one(p->dp_replicate);
    if (per_replica % ep != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "ep=%d does not divide the %d ranks of each of the %d replicas of shares, which have all "
                            "experts between them",
                            ep, per_replica, p->dp_replicate);
    if (ep % sharers != 0 && sharers % ep != 0)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "ep=%d, and %d ranks share a sequence: these are in one group of ep, or are several; use an "
            "ep that divides %d, or a multiple of it",
            ep, sharers, sharers);
    return AR_OK;
}

/* Checks the groups of ranks that share the experts. */
static ar_status check_experts(const ar_parallel *p, const ar_config *c, size_t batch)
{
    const int ep = ari_at_least_one(p->ep), dp = ari_at_least_one(p->dp),
              expert_ranks = ari_extent(p, ari_expert_axes(p));
    const int sharers = expert_ranks / dp;
    if (p->etp > 0)
        AR_TRY(check_expert_width(p, c));
    if ((unsigned)p->dispatch >= AR_DISPATCHES)
        return ar_error_set(AR_ERR_ARG, "dispatch %d, expected 0 (all-to-all) or 1 (all-gather)", (int)p->dispatch);
    if (p->dispatch != AR_DISPATCH_ALL_TO_ALL && ep == 1)
        return ar_error_set(AR_ERR_ARG,
                            "tokens reach experts by %s where several ranks share these out; give ep, or "
                            "leave the dispatch out",
                            ari_dispatch_name(p->dispatch));
    if (ep == 1)
        return AR_OK;
    if (c->experts.n == 0)
        return ar_error_set(AR_ERR_ARG, "ep=%d shares out experts, and %s has none", ep, c->name);
    if (c->experts.n % (size_t)ep != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "the %zu expert%s cannot be shared out to ep=%d; use an ep that divides %zu", c->experts.n,
                            ARI_PLURAL(c->experts.n), ep, c->experts.n);
    AR_TRY(check_expert_ranks(p));
    if (ep > sharers && batch % (size_t)dp != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "ep=%d: the dp=%d ranks send each other tokens, and %zu sample%s not as many for each; "
                            "use a batch that dp divides",
                            ep, dp, batch, batch == 1 ? " is" : "s are");
    return AR_OK;
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

static ar_status check_numbers(const ar_parallel *p)
{
    AR_TRY(check_extents(p));
    AR_TRY(ari_parallel_check_sequence(p, 0)); /* otherwise inner neighbours without cp would be counted as ranks
                                                  below */
    if (p->zero < 0 || p->zero > 3)
        return ar_error_set(
            AR_ERR_ARG,
            "zero=%d: 0, or of the optimizer's state (1), of gradients too (2), of weights too (3) each "
            "rank keeps its share",
            p->zero);
    AR_TRY(check_replicas(p));
    if (p->overlap < 0 || p->recompute.every < 0 || (unsigned)p->recompute.part >= AR_RECOMPUTES)
        return ar_error_set(AR_ERR_ARG, "overlap=%d, recompute %d of every %d: chunks and blocks are at least 1",
                            p->overlap, (int)p->recompute.part, p->recompute.every);
    return AR_OK;
}

ar_status ari_parallel_check_ranks(const ar_parallel *p)
{
    AR_TRY(check_numbers(p));
    return check_expert_ranks(p);
}

ar_status ari_parallel_check(const ar_parallel *p, const ar_config *c, const ar_plan *plan, size_t batch, size_t seq)
{
    AR_TRY(check_numbers(p));
    const int tp = ari_at_least_one(p->tp);
    const bool sequence = ari_plan_by_tokens(plan, tp, p->sp);
    AR_TRY(ari_plan_check(plan, c, sequence));
    AR_TRY(ari_config_check_tp(c, tp, ari_experts_unsplit(p) ? 1 : tp, plan));
    AR_TRY(ari_stages_check(p, c));
    AR_TRY(check_batch(p, batch));
    AR_TRY(check_experts(p, c, batch));
    AR_TRY(ari_parallel_check_sequence(p, seq));
    return ari_config_check_inner(c, tp, ari_at_least_one(p->cp_inner), plan);
}

/* --- samples ------------------------------------------------------------------------------------------------------ */

void ari_parallel_rows(const ar_parallel *p, size_t batch, int dp_rank, int micro, size_t *start, size_t *count)
{
    size_t rank_start = 0, rank_count = 0;
    ari_comm_slice(batch, ari_at_least_one(p->dp), dp_rank, &rank_start, &rank_count);
    ari_comm_slice(rank_count, ari_at_least_one(p->micro_batches), micro, start, count);
    *start += rank_start;
}

void ari_parallel_slice(ar_batch *out, const ar_parallel *p, const ar_batch *global, int dp_rank, int micro)
{
    size_t start = 0, count = 0;
    ari_parallel_rows(p, global->batch, dp_rank, micro, &start, &count);
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
    const size_t width = ari_volume(global->sample_shape, global->sample_ndim);
    out->input = global->input ? global->input + start * width : NULL;
    out->target = global->target ? global->target + start * global->target_width : NULL;
    out->global_batch = global->batch;
    out->first_sample = start;
    out->longest = ari_batch_longest(global);
    out->tokens = ari_batch_tokens(global);
}
