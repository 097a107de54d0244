/* SPDX-License-Identifier: Apache-2.0 */
/* The time of one layout, of whose parts nothing is kept. */
#include <math.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

ar_status ari_time_of(ari_time *t, const ari_planned *p, const ari_time_options *o)
{
    ari_passes passes;
    ari_outside outside;
    ar_pipeline_schedule *schedule = NULL;
    AR_TRY(ari_passes_init(&passes, p, o));
    ar_status st = ari_outside_init(&outside, p, o, NULL);
    if (st == AR_OK) {
        if (ari_extent(&p->step.run.parallel, ARI_CUTS_LAYERS) > 1)
            st = ar_parallel_schedule(&schedule, &p->step.run.parallel);
        if (st == AR_OK)
            st = ari_time_compose(t, p, o, &passes, &outside, schedule, 0.0);
        ar_pipeline_schedule_destroy(schedule);
        ari_outside_fini(&outside);
    }
    ari_passes_fini(&passes);
    return st;
}

typedef struct start {
    ari_links links;
    double seconds;
} start;

/* Broadcasts follow each other along the chain of ranks: after the first one each takes as long as between two
 * neighbours. */
static ar_status add_start(void *user, const ari_operation *op)
{
    start *s = user;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const double n = (double)call->elements, width = (double)ar_dtype_bytes(call->dtype);
        if (call->kind == ARI_CALL_BROADCAST && s->seconds > 0.0)
            s->seconds += ari_links_send(&s->links, n * width);
        else
            s->seconds += ari_links_call(&s->links, call->kind, n, width);
    }
    return AR_OK;
}

ar_status ari_time_start(double *seconds, const ari_planned *p, const ari_time_options *o)
{
    const ari_step_case c = ari_time_rank_case(p, o);
    const int pp = ari_at_least_one(c.run.parallel.pp), each = ar_parallel_world(&c.run.parallel) / pp;
    *seconds = 0.0;
    for (int r = 0; r < pp; r++) {
        start s = {.links = ari_links_of(p, o, ARI_OVER_DP)};
        AR_TRY(ari_operations_start(&c, r * each, add_start, &s));
        *seconds = fmax(*seconds, s.seconds);
    }
    return AR_OK;
}
