/* SPDX-License-Identifier: Apache-2.0 */
/* A step's closed forms: pipelines against the walk of their schedules, collectives beside GEMMs by hand. */
#include "anyrank/config.h"
#include "ref/core/schedule_private.h"
#include "ref/models/parallel_private.h"
#include "ref/pipeline/schedule.h"
#include "support/together.h"
#include "tests/planner/shapes.h"
#include "verify/plan/cost.h"

static ari_time_options on(const char *cluster)
{
    ari_time_options o = {.fp32_sums = false};
    cr_assert_ok(ar_sim_cluster_parse(&o.cluster, cluster));
    return o;
}

static ari_planned planned_of(const ar_config *c, int pp, int stages, int micro, ar_pp_schedule schedule)
{
    ari_planned p = shape_planned(c, 1, false, (size_t)micro, 64);
    p.step.run.parallel = (ar_parallel){
        .tp = 1, .pp = pp, .virtual_stages = stages, .micro_batches = micro, .schedule = schedule, .dp = 1};
    p.step.run.ddp.bucket_bytes = ARI_BUCKETS_USUAL;
    return p;
}

static double pass_seconds(const ari_pass_cost *c)
{
    double sum = 0.0;
    for (int k = 0; k < ARI_TIME_KINDS; k++)
        sum += c->seconds[k];
    return sum;
}

/* What each stage takes, by the costs of the parts that it has: as if it were a rank. */
static void stage_times(ar_pp_times times[], ari_planned p, const ari_micro_cost *m, double transfer)
{
    static ari_pipeline l;
    ar_parallel *layout = &p.step.run.parallel;
    layout->pp *= ari_at_least_one(layout->virtual_stages);
    layout->virtual_stages = 1;
    ari_pipeline_of(&l, &p);
    for (size_t i = 0; i < l.classes; i++) {
        ar_pp_times t = {.transfer = transfer};
        for (int k = 0; k < ARI_MODEL_PARTS; k++) {
            const ari_pass_cost *back = &m->part[k].pass[ARI_BACKWARD];
            const double n = l.rank_class[i].rank.count[k];
            t.forward += n * pass_seconds(&m->part[k].pass[ARI_FORWARD]);
            t.backward_input += n * (pass_seconds(back) - back->weights);
            t.backward_weight += n * back->weights;
        }
        for (int rank = l.rank_class[i].first_rank; rank <= l.rank_class[i].last_rank; rank++)
            times[rank] = t;
    }
}

/* The planned seconds of the passes over those of the schedule, operation by operation. */
static double share_of_schedule(const ari_planned *p, const ari_time_options *o)
{
    static ari_pipeline l;
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *schedule = NULL;
    ari_micro_cost m;
    ari_time t;
    ar_pp_times times[AR_MAX_STAGES];
    ar_pp_run run;
    const int first = 0;
    const ari_links next = ari_links_of(p, o, ARI_OVER_PP);
    cr_assert_ok(ari_micro_cost_of(&m, p, o, NULL));
    ari_pipeline_of(&l, p);
    const ari_sync sync = ari_sync_of(p, o, &m, &l, 0, NULL);
    stage_times(times, *p, &m, ari_links_send(&next, 2.0 * 64.0 * (double)p->step.config->hidden));
    cr_assert_ok(ari_parallel_schedule(&schedule, &p->step.run.parallel));
    cr_assert_ok(ari_schedule_walk(&run, schedule, &(ari_pp_timed){times, &first, 1, false}, NULL, NULL));
    cr_assert_ok(ari_time_of(&t, p, o));
    return (ari_time_step(&t) - sync.numbers - sync.stage_numbers) / run.makespan;
}

/* Stages are uneven: the first has the embedding, the last the head, and both may have fewer layers. GPipe is exact,
 * the others are within what was measured over 400 draws each. */
CLAIM(pipelines_take_as_long_as_their_schedules)
{
    static const struct {
        ar_pp_schedule schedule;
        int stages;
        double most; /* error */
    } rows[] = {{AR_PP_1F1B, 1, 0.05},
                {AR_PP_GPIPE, 1, 1e-9},
                {AR_PP_INTERLEAVED, 2, 0.08},
                {AR_PP_INTERLEAVED, 3, 0.12},
                {AR_PP_ZERO_BUBBLE, 1, 0.15}};
    static const int ranks[] = {2, 4, 8}, micros[] = {1, 2, 3, 8, 13, 32};
    const ari_time_options links[] = {on("inside=0s:inf flops=1T"), on("inside=300us:1GB/s flops=1T")};
    const ar_config c = shape_llama(46, 256, 1024, 4, 4, 4096);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (size_t k = 0; k < 3 * 6 * 2; k++) {
            const ari_planned p = planned_of(&c, ranks[k % 3], rows[i].stages, micros[k / 3 % 6], rows[i].schedule);
            const double share = share_of_schedule(&p, &links[k / 18]);
            cr_expect_leq(fabs(share - 1.0), rows[i].most, "%s x %d, pp=%d, %d micro-batches: %+.2f %%",
                          ari_pp_schedule_name(rows[i].schedule), rows[i].stages, p.step.run.parallel.pp,
                          p.step.run.parallel.micro_batches, 100.0 * (share - 1.0));
        }
    }
}

/* K chunks of a collective that takes t_a and of a product that takes t_g each: t_a + (K-1) max(t_a, t_g) + t_g.
 * Forward a block gathers for q|k|v and for gate|up, and scatters after the output projection and after down. */
CLAIM(chunks_hide_collectives_beside_products)
{
    const ar_config c = shape_llama(1, 1024, 4096, 8, 8, 512);
    const double tokens = 2048.0, h = 1024.0, f = 4096.0, bytes = 2.0 * tokens * h, rate = 1e13;
    const double products[] = {2.0 * tokens * h * 3.0 * h / 2.0 / rate, 2.0 * tokens * h * h / 2.0 / rate,
                               2.0 * tokens * h * 2.0 * f / 2.0 / rate, 2.0 * tokens * h * f / 2.0 / rate};
    for (int i = 0; i < 8; i++) {
        const double links = i < 4 ? 10e9 : 1e9; /* products are longer than collectives, and shorter */
        const ari_time_options o = on(i < 4 ? "inside=0s:10GB/s flops=10T" : "inside=0s:1GB/s flops=10T");
        const int k = 1 << i % 4;
        ari_planned p = shape_planned(&c, 2, true, 1, 2048);
        ari_micro_cost m;
        double want = 0.0;
        p.step.run.parallel.overlap = k;
        cr_assert_ok(ari_micro_cost_of(&m, &p, &o, NULL));
        for (int product = 0; product < 4; product++) {
            const double one = bytes / 2.0 / links / k; /* half of it comes from the other rank */
            want += one + (k - 1) * fmax(0.0, one - products[product] / k);
        }
        const ari_pass_cost *forward = &m.part[ARI_PART_DENSE].pass[ARI_FORWARD];
        cr_expect_float_eq(forward->seconds[ARI_TIME_TP] / want, 1.0, 1e-9, "%d chunks: %g s, by hand %g", k,
                           forward->seconds[ARI_TIME_TP], want);
    }
}

/* GPipe's lists as a schedule of the user's own take and hold what GPipe does. */
CLAIM(an_own_schedule_is_walked)
{
    const ar_config c = shape_llama(6, 256, 1024, 4, 4, 4096);
    const ari_time_options o = on("inside=300us:1GB/s flops=1T");
    ari_planned p = planned_of(&c, 4, 1, 6, AR_PP_GPIPE), own = p;
    OWNED(ari_pipeline_schedule_destroy) ar_pipeline_schedule *schedule = NULL;
    ari_time t, u;
    cr_assert_ok(ari_parallel_schedule(&schedule, &p.step.run.parallel));
    own.step.run.parallel.schedule = AR_PP_1F1B;
    own.step.run.parallel.own_schedule = schedule;
    cr_assert_ok(ari_time_of(&t, &p, &o));
    cr_assert_ok(ari_time_of(&u, &own, &o));
    cr_expect_float_eq(ari_time_step(&u) / ari_time_step(&t), 1.0, 1e-9, "%.9g", ari_time_step(&u) / ari_time_step(&t));
    const ari_memory m = shape_memory(&p), n = shape_memory(&own);
    cr_expect_eq(ari_memory_sum(&m), ari_memory_sum(&n));
}

EVERY_CLAIM(step)
