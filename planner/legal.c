/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a layout can be, before what it takes. */
#include "planner/search.h"
#include "ref/core/size.h"

ar_status ari_planned_world(int *ranks, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const int extents[] = {layout->tp, layout->cp, p->pp, layout->dp};
    size_t world = 1;
    for (int i = 0; i < 4; i++) {
        if (extents[i] < 0)
            return ar_error_set(AR_ERR_ARG, "an extent of %d ranks: extents are at least 1", extents[i]);
        world *= (size_t)ari_at_least_one(extents[i]);
        if (world > ARI_MOST_RANKS)
            return ar_error_set(AR_ERR_ARG, "tp=%d, cp=%d, pp=%d, dp=%d are more than %d ranks", extents[0], extents[1],
                                extents[2], extents[3], ARI_MOST_RANKS);
    }
    *ranks = (int)world;
    return AR_OK;
}

static ar_status check_stages(const ari_planned *p)
{
    const size_t layers = p->step.config->layers, pp = (size_t)ari_at_least_one(p->pp);
    const size_t chunks = (size_t)ari_at_least_one(p->chunks);
    const int micro = ari_at_least_one(p->step.run.parallel.micro_batches);
    if (p->pp < 0 || p->chunks < 0)
        return ar_error_set(AR_ERR_ARG, "pp=%d, chunks=%d: extents are at least 1", p->pp, p->chunks);
    if (chunks > 1 && pp == 1)
        return ar_error_set(AR_ERR_ARG, "chunks=%zu are parts of a pipeline's stages; pp=1 has none", chunks);
    if (pp > layers || chunks > layers / pp)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%zu layers cannot be split over pp=%zu, chunks=%zu: each part needs one", layers, pp,
                            chunks);
    if (chunks > 1 && (size_t)micro % pp != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "chunks=%zu take turns for pp=%zu micro-batches each, which does not divide %d", chunks, pp,
                            micro);
    return AR_OK;
}

static ar_status check_samples(const ari_planned *p)
{
    const ar_run *run = &p->step.run;
    const size_t dp = (size_t)ari_at_least_one(run->parallel.dp);
    const size_t micro = (size_t)ari_at_least_one(run->parallel.micro_batches);
    if (run->batch < dp)
        return ar_error_set(AR_ERR_ARG,
                            "a batch of %zu has no sample for each of dp=%zu ranks; use a batch of at least "
                            "%zu, or a smaller dp",
                            run->batch, dp, dp);
    if (!ari_planned_runs(p) && run->batch % (dp * micro) != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "a batch of %zu cannot be split evenly over dp=%zu and %zu micro-batches, as a layout that "
                            "this version does not run must be",
                            run->batch, dp, micro);
    return AR_OK;
}

ar_status ari_planned_check(const ari_planned *p)
{
    const ar_run *run = &p->step.run;
    ar_parallel layout = run->parallel;
    int world = 0;
    if (layout.zero < 0 || layout.zero > 3)
        return ar_error_set(AR_ERR_ARG, "zero=%d: a stage from 0 to 3", layout.zero);
    layout.zero = layout.zero > 0;
    AR_TRY(ari_planned_world(&world, p));
    AR_TRY(ar_parallel_check(&layout, p->step.config, &run->plan, run->batch, run->seq));
    if (run->parallel.zero > 0 && ari_at_least_one(layout.dp) * ari_at_least_one(layout.cp) == 1)
        return ar_error_set(AR_ERR_ARG, "zero=%d shares out to the ranks of dp and cp: there is one",
                            run->parallel.zero);
    AR_TRY(check_stages(p));
    return check_samples(p);
}
