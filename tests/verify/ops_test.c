/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations beside what runs record: collectives and products, in native numerics and under plans.
 * Random layouts are compared with their traces in random_layouts_test; tests/cli/plan_test.py has the shapes and
 * placements of a list by hand, traffic_test.c what a layer moves. */
#include "ref/models/parallel_private.h"
#include "support/row.h"
#include "tests/support/plan_draw.h"
#include "tests/verify/ops_find.h"
#include "verify/check/check_run.h"

static ari_step_case native_of(const ar_config *c, ar_parallel parallel, size_t batch, size_t seq)
{
    return case_of(c, parallel, batch, seq, AR_NUMERICS_NATIVE);
}

enum { BATCH = 5, SEQ = 12, STEPS = 2 };

/* The collectives and products that the ranks record are those of the list, and so are the bytes that they count. */
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
    AR_TRY(ari_traffic_bytes(&bytes, &t));
    return result.bytes == bytes
               ? AR_OK
               : ar_error_set(AR_ERR_DATA, "%zu bytes counted, %zu predicted", (size_t)result.bytes, (size_t)bytes);
}

static const char *const models[] = {LLAMA(31, 24, 36, 2, 24, 12, 4, false), LLAMA(31, 12, 36, 2, 12, 2, 2, true),
                                     GPT2(31, 24, 36, 2, 12), STACK(31, 24, 36, 2, 24, 4)};
enum { MODELS = sizeof models / sizeof *models };

/* Native numerics, in which sums stay fp32 or bf16; exact ones are compared in random_layouts_test. Samples are uneven,
 * and KV heads have copies. Exponents of weights and what comes before a backward pass, also without one. */
Test(ops, runs_make_the_collectives_and_products_of_the_list)
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
Test(ops, runs_of_random_plans_make_the_collectives_of_the_list)
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

/* A list that is told another layout must not pass. */
Test(ops, another_step_than_the_runs_is_rejected)
{
    const ar_config c = config_of(models[0]);
    ar_run run = {.parallel = {.tp = 2, .dp = 2}};
    cr_expect_ok(run_and_compare(&c, run, false));
    run.fault = AR_FAULT_column_dx_not_reduced;
    cr_expect_eq(run_and_compare(&c, run, false), AR_ERR_DATA);
    run.fault = AR_FAULT_dp_group_missing;
    cr_expect_eq(run_and_compare(&c, run, false), AR_ERR_DATA);
}

/* Counts operations, up to a norm where `ends` says so. */
typedef struct count {
    size_t visits;
    bool ends;
} count;

static ar_status tally(void *user, const ari_operation *op)
{
    count *n = user;
    n->visits++;
    return n->ends && op->kind == ARI_OPERATION_NORM ? ar_error_set(AR_ERR_DATA, "enough") : AR_OK;
}

/* Some thousands of operations, whatever the world is. */
Test(ops, the_list_of_a_rank_does_not_grow_with_the_world)
{
    const ar_config c = config_of(LLAMA(128256, 16384, 53248, 126, 128, 8, 128, false));
    size_t visits[2];
    for (int i = 0; i < 2; i++) {
        const ar_parallel p = {.tp = 8, .dp = i == 0 ? 1 : 2048, .sp = true, .micro_batches = i == 0 ? 1 : 1000};
        ari_step_case t = native_of(&c, p, 2048 * 1000, 8192);
        t.run.ddp = ar_ddp_defaults();
        count n = {0};
        uint64_t bytes = 0;
        cr_assert_ok(ari_operations(&t, ARI_OPS_ONCE, 7, tally, &n));
        cr_assert_ok(ari_traffic_bytes(&bytes, &t));
        visits[i] = n.visits;
    }
    cr_expect_lt(visits[1], 3 * visits[0]);
    cr_expect_lt(visits[1], 20000);
}

Test(ops, a_visitor_ends_the_walk_and_sizes_that_overflow_are_refused)
{
    const ar_config c = config_of(STACK(32000, 768, 2048, 2, 12, 12));
    const ar_parallel tp2 = {.tp = 2};
    const ari_step_case t = native_of(&c, tp2, 4, 512), huge = native_of(&c, tp2, (size_t)1 << 40, (size_t)1 << 40);
    count n = {0};
    cr_expect_eq(ari_operations(&huge, ARI_OPS_STEP, 0, tally, &n), AR_ERR_OVERFLOW);
    n = (count){.ends = true};
    cr_expect_eq(ari_operations(&t, ARI_OPS_STEP, 0, tally, &n), AR_ERR_DATA);
    cr_expect_eq(n.visits, 2); /* the embedding, the first norm */
}
