/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks of a run held beside what the planner's own account of the layout says. */
#include <stdio.h>

#include "planner/planner.h"
#include "ref/core/size.h"
#include "verify/check/check_run.h"

static size_t sum_of(const ari_memory *m, ari_memory_kind first, ari_memory_kind last)
{
    double sum = 0.0;
    for (int k = (int)first; k <= (int)last; k++)
        sum += m->of[k];
    return (size_t)sum;
}

static ar_rank_memory as_counted(const ari_memory *m)
{
    return (ar_rank_memory){.weights = (size_t)m->of[ARI_MEMORY_WEIGHTS],
                            .operands = (size_t)m->of[ARI_MEMORY_OPERANDS],
                            .gradients = (size_t)m->of[ARI_MEMORY_GRADIENTS],
                            .optimizer = (size_t)(m->of[ARI_MEMORY_MASTER] + m->of[ARI_MEMORY_OPTIMIZER]),
                            .buckets = (size_t)m->of[ARI_MEMORY_BUCKETS],
                            .stored = sum_of(m, ARI_MEMORY_ATTENTION, ARI_MEMORY_UNITS),
                            .peak = sum_of(m, ARI_MEMORY_ATTENTION, ARI_MEMORY_UNITS) +
                                    (size_t)m->of[ARI_MEMORY_WORKSPACE]};
}

ar_status ari_memory_of_rank(ar_rank_memory *m, const ari_cluster_options *o, int rank)
{
    ari_planned p = {
        .step = {.run = o->run, .config = o->config, .forward_only = o->forward_only, .tapped = o->tap != NULL}};
    ari_memory own;
    p.step.run.batch = o->batch->batch;
    p.step.run.seq = o->batch->seq;
    AR_TRY(ari_memory_own(&own, &p, rank));
    *m = as_counted(&own);
    return AR_OK;
}

static void raise(ar_rank_memory *most, const ar_rank_memory *m)
{
#define RAISE(field, json, title) most->field = m->field > most->field ? m->field : most->field;
    AR_RANK_MEMORY_TABLE(RAISE)
#undef RAISE
}

/* What nobody predicts to the byte: a GPU packs operands of products, and cuts scores into blocks, in its own way. With
 * ZeRO-3 the root unit's operands stay for a step. */
static bool is_left_out(const ari_cluster_options *o, size_t field)
{
    return o->run.device.kind != AR_DEVICE_CPU &&
           (field == offsetof(ar_rank_memory, operands) || field == offsetof(ar_rank_memory, peak) ||
            (field == offsetof(ar_rank_memory, stored) && o->run.parallel.zero == 3));
}

static void compare(ar_check_run *run, const ari_cluster_options *o, int rank, const ar_rank_memory *counted,
                    const ar_rank_memory *predicted)
{
#define COMPARE(field, json, title)                                                                                    \
    if (!run->memory_difference[0] && !is_left_out(o, offsetof(ar_rank_memory, field)) &&                              \
        counted->field != predicted->field)                                                                            \
        snprintf(run->memory_difference, sizeof run->memory_difference,                                                \
                 "memory of rank %d, %s: %zu bytes are counted, the layout predicts %zu", rank, title, counted->field, \
                 predicted->field);
    AR_RANK_MEMORY_TABLE(COMPARE)
#undef COMPARE
}

/* Nobody predicts what is no model, batches of several sizes, masks, positions and documents of a batch's own. */
static bool is_predicted(const ari_cluster_options *o)
{
    bool plain = !o->body;
    for (size_t i = 0; plain && i < ari_run_steps(&o->run); i++) {
        const ar_batch *b = &o->batch[i];
        plain = b->batch == o->batch->batch && b->seq == o->batch->seq && !b->padding_mask && !b->additive_mask &&
                !b->position_ids && !b->documents;
    }
    return plain;
}

ar_status ari_check_memory(ar_check_run *run, const ari_cluster_options *o, const ar_rank_memory *counted)
{
    ar_rank_memory predicted;
    run->has_memory_predicted = is_predicted(o);
    for (int r = 0; r < ar_parallel_world(&o->run.parallel); r++) {
        raise(&run->memory, &counted[r]);
        if (!run->has_memory_predicted)
            continue;
        AR_TRY(ari_memory_of_rank(&predicted, o, r));
        raise(&run->memory_predicted, &predicted);
        compare(run, o, r, &counted[r], &predicted);
    }
    return AR_OK;
}
