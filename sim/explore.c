/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/sim.h"

static ar_status check_exploration(const ar_sim_options *o, uint64_t seed, uint64_t seeds, const uint64_t *failing)
{
    if (!failing)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: no place for the failing seed");
    if (seeds == 0)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: 0 seeds; at least 1 expected");
    if (seeds - 1 > UINT64_MAX - seed)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: %llu seeds from %llu on; the last seed is %llu",
                            (unsigned long long)seeds, (unsigned long long)seed, (unsigned long long)UINT64_MAX);
    if (o && o->trace && seeds > 1)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: one trace for %llu runs; trace the run of one seed",
                            (unsigned long long)seeds);
    return AR_OK;
}

ar_status ar_sim_explore(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg,
                         ar_status (*begin)(void *arg), uint64_t seed, uint64_t seeds, uint64_t *failing)
{
    AR_TRY(check_exploration(options, seed, seeds, failing));
    ar_sim_options o = {.algorithm = AR_SIM_AUTO};
    if (options)
        o = *options;
    o.explore = true;
    for (uint64_t i = 0; i < seeds; i++) {
        *failing = o.schedule_seed = seed + i;
        if (begin)
            AR_TRY(begin(arg));
        AR_TRY(ar_sim_run(ranks, &o, fn, arg, NULL));
    }
    return AR_OK;
}
