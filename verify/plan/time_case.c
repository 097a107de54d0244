/* SPDX-License-Identifier: Apache-2.0 */
/* What moves, and the cases of the list of operations whose time is added up. */
#include <math.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/plan/time_impl.h"

/* --- what moves --------------------------------------------------------------------------------------------------- */

static void add_row(ari_traffic *to, const ari_traffic_row *from, double times)
{
    int i = 0;
    while (i < to->n && (to->row[i].over != from->over || strcmp(to->row[i].call, from->call) != 0 ||
                         to->row[i].between != from->between))
        i++;
    if (i == ARI_TRAFFIC_ROWS || from->calls == 0.0 || from->ranks <= 1.0)
        return;
    ari_traffic_row *row = &to->row[i];
    if (i == to->n) {
        to->n++;
        *row = (ari_traffic_row){.over = from->over, .call = from->call, .between = from->between};
    }
    row->ranks = fmax(row->ranks, from->ranks);
    row->calls += times * from->calls;
    row->bytes += times * from->bytes;
    row->seconds += times * from->seconds;
}

void ari_traffic_count(ari_traffic *m, ari_time_kind over, const char *call, const ari_links *l, double calls,
                       double bytes, double seconds)
{
    const ari_traffic_row row = {over, call, l->n, l->between, calls, bytes, seconds};
    add_row(m, &row, 1.0);
}

void ari_traffic_add(ari_traffic *to, const ari_traffic *from, double times)
{
    for (int i = 0; i < from->n; i++)
        add_row(to, &from->row[i], times);
}

/* --- cases of the list ------------------------------------------------------------------------------------------- */

/* A production system moves what anyrank moves in fp32 and, as bits, in the embedding's 32-bit integers, as 16 bits;
 * the loss's three numbers a token stay what they are. */
double ari_time_element(const ari_time_options *o, const ari_operation *op, const ari_op_call *call)
{
    const bool values = call->dtype == AR_F32 || call->dtype == AR_I32;
    if (op->kind == ARI_OPERATION_GRADIENT_SUM && o->fp32_sums)
        return (double)ar_dtype_bytes(AR_F32);
    if (o->cost_model == ARI_COST_PRODUCTION && values && op->kind != ARI_OPERATION_LOSS)
        return (double)ar_dtype_bytes(AR_BF16);
    return (double)ar_dtype_bytes(call->dtype);
}

/* Megatron-LM's, 40 million parameters or a million for each rank of the sum, so that a long ring's latency is paid
 * seldom. */
static size_t usual_bucket(int ranks)
{
    const size_t million = 1000000;
    return (size_t)(ranks > 40 ? ranks : 40) * million * sizeof(float);
}

ari_step_case ari_time_case(const ari_planned *p, const ari_time_options *o, const ar_config *config)
{
    ari_step_case c = ari_planned_whole(p);
    ar_run *run = &c.run;
    const int summing = ari_extent(&run->parallel, ARI_CUTS_DATA);
    c.config = config;
    run->parallel.zero = run->parallel.zero > 0;
    run->parallel.dp_replicate = 1;
    if (o->cost_model == ARI_COST_PRODUCTION) {
        run->numerics = AR_NUMERICS_NATIVE;
        run->parallel.recompute.what = AR_RECOMPUTE_NONE; /* ari_time_compose adds it */
    } else if (!p->step.run.parallel.own_schedule) {      /* a search's passes are those of all schedules */
        run->parallel.schedule = p->step.run.parallel.schedule;
        c.halves = p->step.run.parallel.pp > 1 && run->parallel.schedule == AR_PP_ZERO_BUBBLE;
    }
    if (run->ddp.bucket_bytes == ARI_BUCKETS_USUAL)
        run->ddp.bucket_bytes = o->cost_model == ARI_COST_OWN ? AR_BUCKET_BYTES : usual_bucket(summing);
    return c;
}

ari_step_case ari_time_rank_case(const ari_planned *p, const ari_time_options *o)
{
    ari_step_case c = ari_time_case(p, o, p->step.config);
    c.run.parallel.pp = p->step.run.parallel.pp;
    c.run.parallel.virtual_stages = p->step.run.parallel.virtual_stages;
    c.run.parallel.stages = p->step.run.parallel.stages;
    if (p->step.run.batch < (size_t)ari_at_least_one(p->step.run.parallel.dp)) /* who is idle sums when the loss is */
        c.run.ddp.mode = AR_BUCKETS_EAGER;
    return c;
}
