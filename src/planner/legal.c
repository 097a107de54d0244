/* SPDX-License-Identifier: Apache-2.0 */
/* Checks whether a layout is legal, before its cost. */
#include "planner/search.h"
#include "ref/core/size.h"

ar_status ari_planned_world(int *ranks, const ari_planned *p)
{
    const ari_choice c = ari_choice_of(&p->step.run.parallel);
    size_t world = 1;
    for (int i = 0; i < ARI_LAYOUT_AXES; i++) {
        char text[ARI_CHOICE_TEXT];
        if (c.extent[i] < 0)
            return ar_error_set(AR_ERR_ARG, "an extent of %d ranks: extents are at least 1", c.extent[i]);
        world *= (size_t)ari_at_least_one(c.extent[i]);
        if (world > ARI_MOST_GPUS)
            return ar_error_set(AR_ERR_ARG, "%s are more than %d ranks",
                                ari_choice_text(text, &c, ARI_LAYOUT_AXES, ", "), ARI_MOST_GPUS);
    }
    *ranks = (int)world;
    return AR_OK;
}

ar_status ari_planned_check(const ari_planned *p)
{
    const ar_run *run = &p->step.run;
    const ar_parallel layout = run->parallel;
    int world = 0;
    if (layout.zero < 0 || layout.zero > 3)
        return ar_error_set(AR_ERR_ARG, "zero=%d: a stage from 0 to 3", layout.zero);
    AR_TRY(ari_planned_world(&world, p));
    AR_TRY(ar_parallel_check(&layout, p->step.config, &run->plan, run->batch, run->seq));
    if (run->parallel.zero > 0 && ari_extent(&layout, ARI_CUTS_DATA) == 1)
        return ar_error_set(AR_ERR_ARG, "zero=%d shares out to the ranks of %s and %s: there is one",
                            run->parallel.zero, ari_layout_axes[ARI_LAYOUT_DP].name,
                            ari_layout_axes[ARI_LAYOUT_CP].name);
    const size_t items = (size_t)ar_parallel_stages(&layout) * (size_t)ari_at_least_one(layout.micro_batches);
    if (ari_extent(&layout, ARI_CUTS_LAYERS) > 1 && items > AR_MAX_STAGE_MICRO_BATCHES)
        return ar_error_set(AR_ERR_OVERFLOW, "%d stages of %d micro-batches: a schedule has at most %d passes forward",
                            ar_parallel_stages(&layout), ari_at_least_one(layout.micro_batches),
                            AR_MAX_STAGE_MICRO_BATCHES);
    const size_t dp = (size_t)ari_at_least_one(layout.dp);
    if (run->batch < dp)
        return ar_error_set(AR_ERR_ARG,
                            "a batch of %zu has no sample for each of dp=%zu ranks; use a batch of at least "
                            "%zu, or a smaller dp",
                            run->batch, dp, dp);
    return AR_OK;
}
