/* SPDX-License-Identifier: Apache-2.0 */
/* The time of one layout, of whose parts nothing is kept. */
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
