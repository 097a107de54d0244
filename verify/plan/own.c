/* SPDX-License-Identifier: Apache-2.0 */
/* Computes anyrank's memory: a rank of the layout takes a step on the dry-run device (ref/record), with all tokens
 * zero. */

#include "anyrank/config.h"
#include "anyrank/schedule.h"
#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "verify/plan/cost.h"
#include "verify/run/cluster_run.h"

/* --- what is run -------------------------------------------------------------------------------------------------- */

/* Returns a number of micro-batches at which a rank already uses as much memory as with all of them. Except under
 * GPipe, memory stops growing after a few micro-batches per stage. Interleaved stages take turns every pp
 * micro-batches. */
static int enough_micro_batches(const ar_parallel *layout)
{
    const int micro = ari_at_least_one(layout->micro_batches), pp = ari_at_least_one(layout->pp);
    const int enough = 3 * pp + micro % pp;
    return layout->schedule != AR_PP_GPIPE && micro > enough ? enough : micro;
}

/* Removes identical micro-batches of the rank that need no further memory. */
static void shorten(ar_run *r, int rank)
{
    ar_parallel *p = &r->parallel;
    const int pieces = ari_at_least_one(p->micro_batches), dp = ari_at_least_one(p->dp);
    const ar_parallel_rank coords = ari_parallel_rank_of(p, rank);
    const int enough = enough_micro_batches(p);
    size_t start = 0, first_rows = 0, last_rows = 0;
    ari_parallel_rows(p, r->batch, coords.dp, 0, &start, &first_rows);
    ari_parallel_rows(p, r->batch, coords.dp, pieces - 1, &start, &last_rows);
    if (enough >= pieces || first_rows != last_rows || p->forward_first || p->own_schedule || p->zero > 1)
        return;
    p->micro_batches = enough;
    r->batch = first_rows * (size_t)enough * (size_t)dp;
}

/* Ids of the rows up to the rank's last. Release the result with free(). */
static ar_status make_ids(int64_t **out, const ar_run *r, int rank)
{
    const ar_parallel *p = &r->parallel;
    size_t start = 0, count = 0, n = 0;
    ari_parallel_rows(p, r->batch, ari_parallel_rank_of(p, rank).dp, ari_at_least_one(p->micro_batches) - 1, &start,
                      &count);
    AR_TRY(ari_mul_size(&n, start + count, r->seq));
    return ARI_ALLOC_ZERO(out, n, "the tokens of a dry run");
}

static ar_status nobody(void *user, const ar_tap_event *event)
{
    (void)user, (void)event;
    return AR_OK;
}

/* Positions beyond the model's are no matter here. */
static ar_status run_dry(ari_dry_memory *dry, const ari_step_case *c, int rank)
{
    ari_cluster_options o = {.run = c->run, .forward_only = c->forward_only, .tap = c->tapped ? nobody : NULL};
    ar_config config = *c->config;
    ARI_OWNED int64_t *ids = NULL;
    shorten(&o.run, rank);
    AR_TRY(make_ids(&ids, &o.run, rank));
    const ar_batch batch = {.batch = o.run.batch, .seq = o.run.seq, .input_ids = ids};
    if (!config.learned_positions && config.max_positions < batch.seq)
        config.max_positions = batch.seq;
    o.config = &config;
    o.batch = &batch;
    return ari_cluster_dry(dry, &o, rank, NULL);
}

/* --- a rank ------------------------------------------------------------------------------------------------------- */

static const ari_memory_kind kind_of[ARI_USES] = {[ARI_USE_OUTER] = ARI_MEMORY_OUTER,
                                                  [ARI_USE_ATTENTION] = ARI_MEMORY_ATTENTION,
                                                  [ARI_USE_MLP] = ARI_MEMORY_MLP,
                                                  [ARI_USE_BETWEEN] = ARI_MEMORY_BETWEEN,
                                                  [ARI_USE_LOGITS] = ARI_MEMORY_LOGITS};

ar_status ari_memory_own(ari_memory *m, const ari_planned *p, int rank)
{
    ari_dry_memory dry;
    if (p->flash)
        return ar_error_set(AR_ERR_UNSUPPORTED, "memory of a run of this version: it has no flash attention");
    AR_TRY(run_dry(&dry, &p->step, rank));
    double accounted_bytes = 0.0;
    *m = (ari_memory){{0}};
    m->bytes[ARI_MEMORY_WEIGHTS] = (double)dry.rank.weights;
    m->bytes[ARI_MEMORY_OPERANDS] = (double)dry.rank.operands;
    m->bytes[ARI_MEMORY_GRADIENTS] = (double)dry.rank.gradients;
    m->bytes[ARI_MEMORY_OPTIMIZER] = (double)dry.rank.optimizer; /* master weights too */
    m->bytes[ARI_MEMORY_BUCKETS] = (double)dry.rank.buckets;
    for (int use = 0; use < ARI_USES; use++) {
        m->bytes[kind_of[use]] = (double)dry.stored[use];
        accounted_bytes += (double)dry.stored[use];
    }
    m->bytes[ARI_MEMORY_UNITS] = (double)dry.rank.stored - accounted_bytes;
    m->bytes[ARI_MEMORY_WORKSPACE] = (double)(dry.rank.peak - dry.rank.stored);
    return AR_OK;
}

/* --- several ------------------------------------------------------------------------------------------------------ */

/* Computes the memory of the rank that needs most. Among ranks with equal work the earlier ones hold more
 * micro-batches. */
ar_status ari_memory_own_most(ari_memory *m, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    ari_pipeline l;
    const size_t pp = (size_t)ari_at_least_one(layout->pp), stage_ranks = (size_t)ar_parallel_world(layout) / pp;
    *m = (ari_memory){{0.0}};
    ari_pipeline_of(&l, p);
    for (size_t i = 0; i < (layout->own_schedule ? pp : l.classes); i++) {
        const size_t stage = layout->own_schedule ? i : (size_t)l.rank_class[i].first_rank;
        ari_memory stage_memory;
        AR_TRY(ari_memory_own(&stage_memory, p, (int)(stage * stage_ranks)));
        if (i == 0 || ari_memory_sum(&stage_memory) > ari_memory_sum(m))
            *m = stage_memory;
    }
    return AR_OK;
}

ar_status ari_memory_own_all(double *bytes, const ari_planned *p)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const int dp = ari_at_least_one(layout->dp), pp = ari_at_least_one(layout->pp);
    const int replica_ranks = ar_parallel_world(layout) / dp / pp;
    const int longer = (int)(p->step.run.batch % (size_t)dp); /* ranks with one more sample; these come first */
    *bytes = 0.0;
    for (int i = 0; i < pp; i++) {
        for (int r = 0; r < dp; r = r < longer ? longer : dp) {
            ari_memory m;
            AR_TRY(ari_memory_own(&m, p, (i * dp + r) * replica_ranks));
            *bytes += (double)replica_ranks * (r < longer ? longer : dp - longer) * ari_memory_sum(&m);
        }
    }
    return AR_OK;
}
