/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a layout can be, before what it takes. */
#include "planner/search.h"
#include "ref/core/size.h"

ar_status ari_planned_world(int *ranks, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const int extents[] = {layout->tp, layout->cp, layout->pp, layout->dp};
    size_t world = 1;
    for (int i = 0; i < 4; i++) {
        if (extents[i] < 0)
            return ar_error_set(AR_ERR_ARG, "an extent of %d ranks: extents are at least 1", extents[i]);
        world *= (size_t)ari_at_least_one(extents[i]);
        if (world > ARI_MOST_GPUS)
            return ar_error_set(AR_ERR_ARG, "tp=%d, cp=%d, pp=%d, dp=%d are more than %d ranks", extents[0], extents[1],
                                extents[2], extents[3], ARI_MOST_GPUS);
    }
    *ranks = (int)world;
    return AR_OK;
}

static ar_status check_samples(const ari_planned *p)
{
    const ar_run *run = &p->step.run;
    const size_t dp = (size_t)ari_at_least_one(run->parallel.dp);
    if (run->batch < dp)
        return ar_error_set(AR_ERR_ARG,
                            "a batch of %zu has no sample for each of dp=%zu ranks; use a batch of at least "
                            "%zu, or a smaller dp",
                            run->batch, dp, dp);
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
    if (run->parallel.zero > 0 && ari_at_least_one(layout.dp) * ari_at_least_one(layout.cp) == 1)
        return ar_error_set(AR_ERR_ARG, "zero=%d shares out to the ranks of dp and cp: there is one",
                            run->parallel.zero);
    const size_t items = (size_t)ar_parallel_stages(&layout) * (size_t)ari_at_least_one(layout.micro_batches);
    if (ari_at_least_one(layout.pp) > 1 && items > AR_MAX_STAGE_MICRO_BATCHES)
        return ar_error_set(AR_ERR_OVERFLOW, "%d stages of %d micro-batches: a schedule has at most %d passes forward",
                            ar_parallel_stages(&layout), ari_at_least_one(layout.micro_batches),
                            AR_MAX_STAGE_MICRO_BATCHES);
    return check_samples(p);
}
