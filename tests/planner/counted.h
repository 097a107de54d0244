/* SPDX-License-Identifier: Apache-2.0 */
/* Floating-point operations of a training step as the planner times them: what the formulas are held to. */
#pragma once

#include "ref/core/size.h"
#include "verify/plan/time.h"

/* Operations for a token without flash attention, and thus of all scores: what one rank would do, and what all ranks of
 * tp do together, with products of KV copies and what recomputation repeats. */
static void flops_counted(double *model, double *hardware, const ari_planned *p)
{
    ari_planned one = *p;
    ari_time t, u;
    ari_time_options o = {.fp32_sums = false};
    cr_assert_ok(ar_sim_cluster_parse(&o.cluster, "inside=1us:1GB/s flops=1T"));
    const double tokens = (double)(p->step.run.batch * p->step.run.seq),
                 ranks = ari_at_least_one(p->step.run.parallel.tp);
    one.step.run.parallel.tp = 1;
    one.step.run.parallel.recompute.part = AR_RECOMPUTE_NONE;
    cr_assert_ok(ari_time_of(&t, &one, &o));
    cr_assert_ok(ari_time_of(&u, p, &o));
    *model = 1e12 * t.seconds[ARI_TIME_PRODUCTS] / tokens;
    *hardware = 1e12 * ranks * (u.seconds[ARI_TIME_PRODUCTS] + u.seconds[ARI_TIME_RECOMPUTE]) / tokens;
}
