/* SPDX-License-Identifier: Apache-2.0 */
/* The record of a step without data, and the bytes that the formulas predict, beside what runs do: collectives and
 * products, in native numerics and under plans. Random layouts are compared with their traces in random_layouts_test;
 * tests/cli/plan_test.py has the shapes and placements of a record by hand, traffic_test.c what a layer moves. */
#include "ref/models/parallel_private.h"
#include "support/row.h"
#include "tests/support/plan_draw.h"
#include "tests/verify/support.h"
#include "verify/bytes/bytes.h"
#include "verify/check/check_run.h"

enum { BATCH = 5, SEQ = 12, STEPS = 2 };

/* The collectives and products that the ranks record are those of the record, and the bytes that they count those of
 * the formulas. */
static ar_status run_and_compare(const ar_config *c, ar_run run, bool forward_only)
{
    int64_t ids[BATCH * SEQ];
    for (size_t i = 0; i < BATCH * SEQ; i++)
        ids[i] = (int64_t)(i * 7 % c->vocab);
    const ar_batch one = {.batch = BATCH, .seq = SEQ, .input_ids = ids}, batch[STEPS] = {one, one};
    ar_sim_cluster timed; /* so that products are recorded */
    ari_cluster_result result = {.bytes = 0};
    OWNED(ar_trace_destroy) ar_trace *trace = NULL;
    uint64_t bytes = 0;
    AR_TRY(ar_sim_cluster_parse(&timed, "inside=1us:1GB/s flops=1G"));
    AR_TRY(ar_trace_create(&trace));
    run.batch = BATCH;
    run.seq = SEQ;
    run.threads = 1;
    run.sim =
        (ar_sim_options){.algorithm = run.sim.algorithm, .trace = trace, .cluster = &timed, .timeout_ns = 60000000000u};
    const ari_cluster_options o = {.config = c, .run = run, .batch = batch, .forward_only = forward_only};
    const ari_step_case t = {.run = run, .config = c, .forward_only = forward_only};
    const ar_status st = ari_cluster_run(&result, &o);
    free(result.loss);
    AR_TRY(st);
    AR_TRY(ari_recorded_calls(&(const char *){NULL}, NULL, &o, trace));
    AR_TRY(ari_bytes_predict(&bytes, &t));
    return result.bytes == bytes
               ? AR_OK
               : ar_error_set(AR_ERR_DATA, "%zu bytes counted, %zu predicted", (size_t)result.bytes, (size_t)bytes);
}

static const char *const models[] = {LLAMA(31, 24, 36, 2, 24, 12, 4, false), LLAMA(31, 12, 36, 2, 12, 2, 2, true),
                                     GPT2(31, 24, 36, 2, 12), STACK(31, 24, 36, 2, 24, 4)};
enum { MODELS = sizeof models / sizeof *models };

/* Native numerics, in which sums stay fp32 or bf16; exact ones are compared in random_layouts_test. Samples are uneven,
 * and KV heads have copies. Exponents of weights and what comes before a backward pass, also without one. */
Test(ops, runs_make_the_collectives_and_products_of_the_record)
{
    static const struct {
        ar_parallel parallel;
        bool forward_only;
    } cases[] = {{{.tp = 2}, false},
                 {{.tp = 3, .sp = true}, false},
                 {{.tp = 4, .sp = true, .keep_gathered = true, .micro_batches = 2}, false},
                 {{.tp = 12}, false},
                 {{.tp = 2, .dp = 3, .micro_batches = 2, .forward_first = true}, false},
                 {{.dp = 4, .zero = 1}, false},
                 {{.tp = 2, .dp = 2, .zero = 1, .sp = true}, false},
                 {{.pp = 2, .dp = 2, .micro_batches = 2}, false},
                 {{.pp = 2, .tp = 4, .sp = true, .stages = {2, {0, 2}}, .micro_batches = 3}, false},
                 {{.tp = 3, .sp = true, .micro_batches = 2}, true},
                 {{.tp = 2, .dp = 2}, true},
                 {{.tp = 12}, true}};
    static const size_t bucket_bytes[] = {0, 3000, AR_BUCKET_BYTES};
    int runs = 0;
    for (size_t m = 0; m < MODELS; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            const bool forward_only = cases[i].forward_only, native = !forward_only;
            const ar_run run =
                ROW(.plan = plan_of(c.arch, (m + i) % 2 ? AR_MLP_ROW_COLUMN : AR_MLP_COLUMN_ROW),
                    .parallel = cases[i].parallel, .steps = native ? STEPS : 0,
                    .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW), .clip = native && i % 2 ? 0.1 : 0.0,
                    .numerics = native ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                    .precision = native && i % 3 == 1 ? AR_PRECISION_BF16 : AR_PRECISION_F32,
                    .storage = native && i % 3 == 0 ? AR_BF16 : 0,
                    .ddp = {.bucket_bytes = bucket_bytes[(m + i) % 3],
                            .order = i % 2 ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE,
                            .find_unused = m % 2 == 1},
                    .sim.algorithm = (m + i) % 2 ? AR_SIM_DIRECT : AR_SIM_RING);
            if (ari_parallel_check(&run.parallel, &c, &run.plan, BATCH, SEQ) != AR_OK)
                continue; /* GPT-2 has no copies of KV heads */
            runs++;
            cr_expect_eq(run_and_compare(&c, run, forward_only), AR_OK, "model %zu, case %zu: %s", m, i,
                         ar_error_message());
        }
    }
    cr_expect_gt(runs, 34);
}

/* Every collective of every rank under plans of all kinds, which split each layer in its own way, in both numerics. */
Test(ops, runs_of_random_plans_make_the_collectives_of_the_record)
{
    int runs = 0;
    for (uint64_t i = 0; i < (uint64_t)by_scale(12, 24, 200); i++) {
        uint64_t seed = i + 1000;
        char text[PLAN_DRAW_TEXT];
        SCOPED(ar_plan_fini) ar_plan plan;
        const ar_config c = config_of(models[i % MODELS]);
        const ar_parallel p = {.tp = 2 + (int)plan_draw_below(&seed, 3),
                               .dp = 1 + (int)(i % 5 == 0),
                               .sp = plan_draw_below(&seed, 2),
                               .keep_gathered = plan_draw_below(&seed, 2),
                               .micro_batches = 1 + (int)(i % 3 == 0)};
        plan_draw(text, &seed, &c, (plan_draw_options){.sp = p.sp, .wrong = i % 3 == 2});
        cr_assert_ok(ar_plan_parse(&plan, text, strlen(text), "drawn"));
        const ar_run run = ROW(.plan = plan, .placements = AR_DECLARED_TRUSTED, .parallel = p,
                               .steps = i % 2 ? STEPS : 0, .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                               .numerics = i / 4 % 2 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT,
                               .precision = i / 4 % 4 == 3 ? AR_PRECISION_BF16 : AR_PRECISION_F32);
        const ar_status fits = ari_parallel_check(&p, &c, &plan, BATCH, SEQ);
        cr_expect(fits == AR_OK || fits == AR_ERR_INDIVISIBLE, "%s", ar_error_message()); /* KV heads */
        if (fits == AR_OK)
            cr_expect_eq(run_and_compare(&c, run, false), AR_OK, "draw %d: %s: %s", (int)i, text, ar_error_message());
        runs += fits == AR_OK;
    }
    cr_expect_geq(runs, by_scale(8, 14, 100));
}

/* A record of another layout must not pass. */
Test(ops, another_step_than_the_runs_is_rejected)
{
    const ar_config c = config_of(models[0]);
    ar_run run = {.parallel = {.tp = 2, .dp = 2}};
    cr_expect_ok(run_and_compare(&c, run, false));
    run.fault = "column_dx_not_reduced";
    cr_expect_eq(run_and_compare(&c, run, false), AR_ERR_DATA);
    run.fault = "dp_group_missing";
    cr_expect_eq(run_and_compare(&c, run, false), AR_ERR_DATA);
}

static const char *cause_of_calls(double clip_of_run, double clip_of_record)
{
    const ar_config c = config_of(STACK(31, 24, 36, 1, 24, 4));
    const int64_t tokens[24] = {0};
    const ar_batch batch = {.batch = 2, .seq = 12, .input_ids = tokens};
    const char *cause = NULL;
    ari_cluster_result result;
    ari_cluster_options o = ROW(.config = &c, .batch = &batch,
                                .run = {.parallel = {.tp = 2},
                                        .batch = 2,
                                        .seq = 12,
                                        .steps = 1,
                                        .clip = clip_of_run,
                                        .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                        .ddp = ar_ddp_defaults(),
                                        .threads = 1});
    cr_assert_ok(ar_trace_create(&o.run.sim.trace));
    cr_assert_ok(ari_cluster_run(&result, &o));
    o.run.clip = clip_of_record;
    cr_expect_eq(ari_recorded_calls(&cause, NULL, &o, o.run.sim.trace) == AR_OK, clip_of_run == clip_of_record);
    cr_expect(clip_of_run >= clip_of_record || strstr(ar_error_message(), "rank 0: the layout has all_reduce"), "%s",
              ar_error_message());
    free(result.loss);
    ar_trace_destroy(o.run.sim.trace);
    return cause;
}

Test(ops, a_collective_more_or_less_than_the_records_is_named)
{
    cr_expect_null(cause_of_calls(0.1, 0.1));
    cr_expect_str_eq(cause_of_calls(0.1, 0.0), "collective_added");
    cr_expect_str_eq(cause_of_calls(0.0, 0.1), "collective_left_out");
}
