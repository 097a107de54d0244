/* SPDX-License-Identifier: Apache-2.0 */
/* A check beside what else the simulated cluster can do: record, predict, schedule, and let transports fail. */
#include "sim/sim_private.h"
#include "tests/verify/support.h"

static const ar_parallel layouts[] = {{.dp = 2, .tp = 2}, {.tp = 2, .sp = true}};
static const ar_sim_cluster cluster = {
    .ranks_per_node = 2, .inside = {1e-6, 1e11}, .between = {5e-6, 1e10}, .flops = 1e12};

typedef struct place {
    char folder[64];
    ar_check_options o;
} place;

static void place_init(place *p, size_t n)
{
    make_folder(p->folder);
    write_file(p->folder, "config.json", tiny_models[TINY_LLAMA]);
    p->o = check_layouts(p->folder, layouts, n, 2, 12);
    p->o.run.steps = 2;
    p->o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    p->o.run.clip = 1.0;
}

static void place_fini(place *p)
{
    remove_folder(p->folder);
}

static void refused(const ar_check_options *o, const char *says)
{
    ar_check_report *r = NULL;
    cr_expect_refused(ar_check(&r, o), AR_ERR_ARG, says);
    cr_expect_null(r);
}

Test(cluster_check, has_the_same_bits_recorded_or_timed_or_verified)
{
    SCOPED(place_fini) place p;
    place_init(&p, 2);
    OWNED(ar_check_report_destroy) ar_check_report *plain = check_or_fail(&p.o);
    expect_same(plain, "plain");
    for (int i = 0; i < 3; i++) {
        p.o.run.sim.cluster = i == 0 ? &cluster : NULL;
        p.o.run.sim.verify_transfers = i == 1;
        p.o.schedules = i == 2 ? 3 : 0;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&p.o);
        expect_same(r, "watched");
        for (size_t k = 0; k < r->runs; k++) {
            cr_expect_eq(r->run[k].bytes_counted, plain->run[k].bytes_counted);
            cr_expect_eq(r->run[k].bytes_per_rank_max, plain->run[k].bytes_per_rank_max);
            cr_expect_eq(memcmp(r->run[k].calls, plain->run[k].calls, sizeof plain->run[k].calls), 0);
            cr_expect_eq(r->run[k].has_predicted, i == 0);
            cr_expect_eq(r->run[k].schedules, i == 2 ? 3 : 0);
        }
    }
}

Test(cluster_check, predicts_the_same_time_whatever_really_happened)
{
    SCOPED(place_fini) place p;
    ar_trace_summary first[2];
    place_init(&p, 2);
    p.o.run.sim.cluster = &cluster;
    for (int i = 0; i < 3; i++) {
        p.o.schedules = i > 0;
        p.o.run.sim.schedule_seed = (uint64_t)i;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&p.o);
        for (size_t k = 0; k < 2; k++) {
            const ar_trace_summary *s = &r->run[k].predicted;
            first[k] = i == 0 ? *s : first[k];
            cr_expect(s->seconds > 0 && s->compute > 0 && s->communication > 0 && s->parts > 0);
            cr_expect_eq(s->bytes, r->run[k].bytes_counted);
            cr_expect(s->seconds == first[k].seconds && s->compute == first[k].compute &&
                          s->communication == first[k].communication && s->path_compute == first[k].path_compute,
                      "run %d: %.17g s against %.17g", i, s->seconds, first[k].seconds);
        }
    }
}

Test(cluster_check, records_the_one_run_also_where_it_ends_in_an_error)
{
    for (int faulty = 0; faulty < 2; faulty++) {
        SCOPED(place_fini) place p;
        ar_trace_summary s;
        place_init(&p, 1);
        p.o.run.fault = faulty ? "collective_size_mismatch" : NULL;
        cr_assert_ok(ar_trace_create(&p.o.run.sim.trace));
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&p.o);
        cr_expect_eq(r->result, faulty ? AR_CHECK_ERROR : AR_CHECK_SAME);
        cr_assert_ok(ar_trace_summarise(&s, p.o.run.sim.trace, AR_TRACE_REAL));
        cr_expect(s.seconds > 0 && s.collectives > 20, "%g s, %zu collectives", s.seconds, s.collectives);
        cr_expect(!r->run[0].has_predicted && r->run[0].seconds > 0);
        ar_trace_destroy(p.o.run.sim.trace);
    }
}

Test(cluster_check, stops_at_the_schedule_that_is_not_the_same)
{
    SCOPED(place_fini) place p;
    place_init(&p, 1);
    p.o.schedules = 50;
    p.o.run.sim.schedule_seed = 7;
    p.o.run.fault = "norm_backward_missing";
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&p.o);
    cr_expect(r->run[0].result == AR_CHECK_DIFFERENT && r->run[0].schedules == 1 && r->run[0].schedule_seed == 7);
}

/* A run, and one whose transfers are verified. After two splits the third collective is the broadcast of a parameter,
 * which rank 2 reads. */
Test(cluster_check, hears_of_faults_of_the_transport)
{
    static const struct {
        ar_sim_fault fault;
        ar_check_result result[2];
    } rows[] = {
        {{.kind = AR_SIM_KILL, .rank = 3, .collective = 50}, {AR_CHECK_ERROR, AR_CHECK_ERROR}},
        {{.kind = AR_SIM_STALL, .rank = 1, .collective = 50}, {AR_CHECK_ERROR, AR_CHECK_ERROR}},
        {{.kind = AR_SIM_DELAY, .rank = 0, .collective = 50, .ns = 50000000}, {AR_CHECK_SAME, AR_CHECK_SAME}},
        {{.kind = AR_SIM_CORRUPT, .rank = 2, .collective = 3, .bit = 22}, {AR_CHECK_DIFFERENT, AR_CHECK_ERROR}},
        {{.kind = AR_SIM_CORRUPT, .rank = 2, .collective = 1000000, .bit = 22}, {AR_CHECK_SAME, AR_CHECK_SAME}},
    };
    for (size_t i = 0; i < 2 * (small_only() ? 3 : sizeof rows / sizeof *rows); i++) {
        const ar_sim_fault *f = &rows[i / 2].fault;
        char text[128];
        SCOPED(place_fini) place p;
        place_init(&p, 1);
        p.o.run.sim.faults = f;
        p.o.run.sim.fault_count = 1;
        p.o.run.sim.verify_transfers = i % 2;
        p.o.run.sim.timeout_ns = f->kind == AR_SIM_STALL ? 300000000u : p.o.run.sim.timeout_ns;
        ari_sim_fault_describe(f, text, sizeof text);
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&p.o);
        cr_expect_eq(r->result, rows[i / 2].result[i % 2], "%s, verified %zu: %s", text, i % 2, first_of(&r->run[0]));
        for (int k = 0; r->result == AR_CHECK_ERROR && k < 4; k++)
            cr_expect(strcmp(r->run[0].reports[k].status, "AR_OK") != 0, "%s: rank %d", text, k);
    }
}

Test(cluster_check, refuses_options_that_contradict_each_other)
{
    const ar_sim_fault kill = {.kind = AR_SIM_KILL, .rank = 4, .collective = 1};
    OWNED(ar_trace_destroy) ar_trace *trace = NULL;
    SCOPED(place_fini) place p;
    place_init(&p, 2);
    cr_assert_ok(ar_trace_create(&trace));
    const ar_check_options good = p.o;
    p.o.run.sim.trace = trace;
    refused(&p.o, "one layout");
    p.o.layouts = 1;
    p.o.schedules = 2;
    refused(&p.o, "at most one schedule");
    p.o = good;
    p.o.run.sim.faults = &kill;
    p.o.run.sim.fault_count = 1;
    refused(&p.o, "strike one run");
    p.o.layouts = 1;
    refused(&p.o, "rank 4 of 4");
    p.o = good;
    p.o.run.sim.algorithm = AR_SIM_LAST;
    refused(&p.o, "direct or ring");
}

Test(cluster_check, auto_moves_data_directly)
{
    SCOPED(place_fini) place p;
    ar_check_report *r[2];
    place_init(&p, 1);
    for (int i = 0; i < 2; i++) {
        p.o.run.sim.algorithm = i == 0 ? AR_SIM_AUTO : AR_SIM_DIRECT;
        r[i] = check_or_fail(&p.o);
        expect_same(r[i], "auto");
    }
    cr_expect_eq(r[0]->run[0].bytes_per_rank_max, r[1]->run[0].bytes_per_rank_max);
    cr_expect(r[0]->run[0].bytes_per_rank_max * 4 < r[0]->run[0].bytes_counted * 2, "one rank moves half of all");
    ar_check_report_destroy(r[0]);
    ar_check_report_destroy(r[1]);
}
