/* SPDX-License-Identifier: Apache-2.0 */
/* Time of a step's passes in a pipeline: its ranks follow the same lists as a run (anyrank/schedule.h). */
#include "planner/time_impl.h"
#include "ref/core/size.h"

static void note_last(void *user, int rank, const ar_pp_operation *o, double begin, double end)
{
    ari_stages_run *run = user;
    (void)rank;
    if (o->kind == AR_PP_BACKWARD || o->kind == AR_PP_BACKWARD_WEIGHT)
        run->last[o->stage] = (ari_span){begin, end};
}

ar_status ari_stages_run_of(ari_stages_run *out, const ar_pipeline_schedule *s, const ar_pp_times *times)
{
    ar_pp_run run;
    *out = (ari_stages_run){.ranks = ar_pipeline_schedule_shape(s).ranks};
    AR_TRY(ar_pipeline_schedule_run(&run, s, times, note_last, out));
    out->end = run.makespan;
    return AR_OK;
}
