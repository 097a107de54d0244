/* SPDX-License-Identifier: Apache-2.0 */
/* Whole checks in a program of its own, for ThreadSanitizer: two small models on 2, 4 and 8 ranks, with both ways to
 * move data, and training steps on a mesh; one run of each with a fault, so that differences are explained, one that
 * ends in an error, and what the simulated cluster does beside. */
#include "anyrank/check.h"
#include "anyrank/config.h"
#include "ref/io/file.h"
#include "tests/support/temporary.h"
#include "tests/verify/tiny.h"
#include "verify/run/cluster_run.h"

static const char *const models[] = {LLAMA(61, 32, 48, 2, 16, 8, 4, false), GPT2(61, 32, 48, 2, 8)};
enum { MODELS = 2 };

static int failures;

static void expect(int holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "check_main: %s (%s)\n", what, ar_error_message());
        failures++;
    }
}

static int write_config(const char *folder, const char *json)
{
    char path[200];
    snprintf(path, sizeof path, "%s/config.json", folder);
    return ari_file_write(path, json, strlen(json)) == AR_OK;
}

/* A check of these layouts, of one pass. */
static ar_check_options options(const char *folder, const ar_parallel *layouts, size_t n, size_t seq,
                                ar_sim_algorithm algorithm)
{
    return (ar_check_options){.parallel = layouts,
                              .layouts = n,
                              .run = {.model = folder,
                                      .batch = 2,
                                      .seq = seq,
                                      .threads = 16,
                                      .sim = {.algorithm = algorithm, .timeout_ns = 120000000000u}},
                              .strict_predictions = true,
                              .skip_f64 = true};
}

static void expect_runs(const ar_check_options *o, ar_check_result wanted, const char *what)
{
    OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
    expect(ar_check(&r, o) == AR_OK, what);
    for (size_t i = 0; r && i < r->runs; i++) {
        expect(r->run[i].result == wanted, r->run[i].error ? r->run[i].error : what);
        expect(r->run[i].has_predicted == (o->run.sim.cluster != NULL), "a time was not predicted");
    }
}

static void check(const char *folder, ar_sim_algorithm algorithm, const char *fault, ar_check_result wanted)
{
    static const ar_parallel layouts[] = {{.tp = 2}, {.tp = 4}, {.tp = 8}};
    ar_check_options o = options(folder, layouts, 3, 6, algorithm);
    o.run.fault = fault;
    expect_runs(&o, wanted, "a check has another result");
}

/* Two steps with dropout and clipping on 8 ranks: data, tensors, positions and micro-batches shared out at once. */
static void train(const char *folder, ar_sim_algorithm algorithm, ar_numerics numerics)
{
    static const ar_parallel layouts[] = {{.dp = 2, .tp = 4, .sp = true},
                                          {.dp = 4, .tp = 2, .micro_batches = 2, .forward_first = true}};
    ar_check_options o = options(folder, layouts, 2, 8, algorithm);
    o.run.batch = 7;
    o.run.steps = 2;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.clip = o.run.dropout = 0.1;
    o.run.numerics = numerics;
    expect_runs(&o, AR_CHECK_SAME, "steps have another result");
}

/* Recorded and timed; under a schedule; and with a transport that fails. */
static void watch(const char *folder)
{
    static const ar_parallel layout = {.dp = 2, .tp = 2};
    const ar_sim_cluster cluster = {.inside = {1e-6, 1e11}, .flops = 1e12};
    const ar_sim_fault faults[] = {{.kind = AR_SIM_KILL, .rank = 3, .collective = 40},
                                   {.kind = AR_SIM_CORRUPT, .rank = 2, .collective = 3, .bit = 20}};
    for (int i = 0; i < 4; i++) {
        ar_check_options o = options(folder, &layout, 1, 6, AR_SIM_AUTO);
        o.run.threads = 4;
        o.schedules = i == 1;
        o.run.sim.cluster = i < 2 ? &cluster : NULL;
        o.run.sim.verify_transfers = i == 3;
        o.run.sim.faults = i < 2 ? NULL : &faults[i - 2];
        o.run.sim.fault_count = i >= 2;
        expect(ar_trace_create(&o.run.sim.trace) == AR_OK, "no trace");
        expect_runs(&o, i < 2 ? AR_CHECK_SAME : AR_CHECK_ERROR, "a watched check has another result");
        ar_trace_destroy(o.run.sim.trace);
    }
}

static ar_status tap_that_fails(void *user, const ar_tap_event *e)
{
    int *left = user;
    return left && (*left)-- == 0 ? ar_error_set(AR_ERR_DATA, "no more of %s", e->name) : AR_OK;
}

/* The last of eight ranks gives up in the middle while the others compute and wait. */
static void fail_in_the_middle(const char *json, ar_sim_algorithm algorithm)
{
    static const int64_t ids[] = {1, 2, 3, 4, 5, 6};
    ar_config c;
    int left = 50;
    void *users[8] = {NULL};
    ari_cluster_result result;
    const ar_batch batch = {.batch = 2, .seq = 3, .input_ids = ids};
    const ari_cluster_options o = {.config = &c,
                                   .run.parallel = {.tp = 8},
                                   .batch = &batch,
                                   .run.threads = 1,
                                   .run.sim = {.algorithm = algorithm, .timeout_ns = 120000000000u},
                                   .tap = tap_that_fails,
                                   .tap_user = users};
    users[7] = &left;
    expect(ar_config_parse(&c, json, strlen(json), "tiny") == AR_OK, "a config was refused");
    expect(ari_cluster_run(&result, &o) == AR_ERR_DATA, "a failing rank did not end the run");
    free(result.reports);
}

int main(void)
{
    SCOPED(temp_end) const temp_path folder = temp_folder();
    for (int m = 0; m < MODELS; m++) {
        expect(write_config(folder.path, models[m]), "config.json was not written");
        for (int a = AR_SIM_DIRECT; a <= AR_SIM_RING; a++) {
            check(folder.path, (ar_sim_algorithm)a, NULL, AR_CHECK_SAME);
            train(folder.path, (ar_sim_algorithm)a, a == AR_SIM_RING ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT);
            fail_in_the_middle(models[m], (ar_sim_algorithm)a);
        }
        check(folder.path, AR_SIM_DIRECT, "column_dx_not_reduced", AR_CHECK_DIFFERENT);
        watch(folder.path);
    }
    return failures ? 1 : 0;
}
