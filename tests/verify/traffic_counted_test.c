/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes counted inside the communicators against those predicted from config and layout alone. */
#include "tests/verify/support.h"

#include "run/cluster_run.h"
#include "sim/plan/bytes.h"

enum { BATCH = 5, SEQ = 12, STEPS = 2 };

/* What is run and predicted alike. */
typedef struct traffic_run {
    const ar_config *config;
    ar_mlp_order order;
    ar_parallel parallel;
    ar_numerics numerics;
    ar_dtype storage;
    bool forward_only;
    int steps;
    double clip;
    ar_loss_options loss;
    ar_sim_algorithm algorithm;
    ar_fault fault;
    size_t bucket_bytes;
    bool find_unused;
} traffic_run;

static uint64_t predicted(const traffic_run *r)
{
    uint64_t bytes = 0;
    const ari_step_case t = {.config = r->config,
                             .run.plan = plan_of(r->config->arch, r->order),
                             .run.parallel = r->parallel,
                             .run.batch = BATCH,
                             .run.seq = SEQ,
                             .run.steps = (uint64_t)r->steps,
                             .run.clip = r->clip > 0.0,
                             .run.loss = r->loss,
                             .run.numerics = r->numerics,
                             .run.storage = r->storage,
                             .forward_only = r->forward_only,
                             .run.ddp.find_unused = r->find_unused};
    cr_assert_ok(ari_traffic_bytes(&bytes, &t));
    return bytes;
}

static ari_cluster_result counted(const traffic_run *r)
{
    int64_t ids[BATCH * SEQ];
    for (size_t i = 0; i < BATCH * SEQ; i++)
        ids[i] = (int64_t)(i * 7 % r->config->vocab);
    const ar_batch batch[STEPS] = {{.batch = BATCH, .seq = SEQ, .input_ids = ids},
                                   {.batch = BATCH, .seq = SEQ, .input_ids = ids}};
    ari_cluster_result result;
    const ari_cluster_options o = {.config = r->config,
                                   .run.plan = plan_of(r->config->arch, r->order),
                                   .run.parallel = r->parallel,
                                   .batch = batch,
                                   .run.steps = (uint64_t)r->steps,
                                   .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                   .run.clip = r->clip,
                                   .run.loss = r->loss,
                                   .run.numerics = r->numerics,
                                   .run.storage = r->storage,
                                   .forward_only = r->forward_only,
                                   .run.fault = r->fault,
                                   .run.ddp = {.bucket_bytes = r->bucket_bytes, .find_unused = r->find_unused},
                                   .run.threads = 1,
                                   .run.sim = {.algorithm = r->algorithm, .timeout_ns = 60000000000u}};
    cr_assert_ok(ari_cluster_run(&result, &o));
    free(result.loss);
    result.loss = NULL;
    return result;
}

static void expect_predicted(const traffic_run *r)
{
    char layout[96];
    const uint64_t want = predicted(r), got = counted(r).bytes;
    ar_parallel_text(layout, sizeof layout, &r->parallel);
    cr_expect_eq(got, want, "%s %s %s, order %d, %s, steps %d, clip %g, %s: %zu counted, %zu predicted",
                 r->config->name, r->numerics == AR_NUMERICS_EXACT ? "exact" : "native", layout, (int)r->order,
                 r->forward_only ? "forward" : "both", r->steps, r->clip,
                 r->algorithm == AR_SIM_RING ? "ring" : "direct", (size_t)got, (size_t)want);
}

static const char *const models[] = {LLAMA(31, 24, 36, 1, 24, 12, 4, false), LLAMA(31, 12, 36, 2, 12, 2, 2, true),
                                     GPT2(31, 24, 36, 1, 12), STACK(31, 24, 36, 1, 24, 4),
                                     LLAMA(8200, 12, 12, 1, 12, 12, 2, false)};

/* Uneven samples (5 over 2, 3 and 4), replicas of KV heads, micro-batches. */
static const ar_parallel layouts[] = {{.tp = 2},
                                      {.tp = 12},
                                      {.tp = 2, .sp = true},
                                      {.tp = 3, .sp = true, .keep_gathered = true},
                                      {.tp = 4, .sp = true},
                                      {.tp = 6, .sp = true, .micro_batches = 2},
                                      {.dp = 4},
                                      {.tp = 2, .dp = 2, .micro_batches = 2},
                                      {.tp = 4, .dp = 3},
                                      {.tp = 2, .dp = 2, .micro_batches = 3, .forward_first = true},
                                      {.tp = 2, .dp = 2, .sp = true},
                                      {.tp = 4, .dp = 2, .sp = true, .keep_gathered = true, .micro_batches = 2},
                                      {.pp = 2, .dp = 2, .micro_batches = 2},
                                      {.pp = 2, .tp = 3, .stages = {2, {1, 0}}},
                                      {.pp = 2, .tp = 4, .sp = true, .stages = {2, {0, 1}}, .micro_batches = 3},
                                      {.pp = 2, .tp = 2, .dp = 2, .stages = {2, {1, 1}}}};

/* Every check compares counted and predicted bytes too, so that a part of the cases is enough for every ./test. */
static bool left_out(size_t i)
{
    return i % (size_t)by_scale(3, 2, 1) != 0;
}

static void count_all(ar_numerics numerics)
{
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            traffic_run r = {.config = &c, .parallel = layouts[i], .numerics = numerics};
            const ar_plan other = plan_of(c.arch, AR_MLP_ROW_COLUMN);
            if (left_out(m + i) || ar_parallel_check(&r.parallel, &c, &other, BATCH, SEQ) != AR_OK)
                continue; /* GPT-2 has no replicas of KV heads */
            if (numerics == AR_NUMERICS_NATIVE && (m + i) % 3 != 0)
                continue; /* by the rules of exact runs: each layout and model, not each pair */
            r.algorithm = (m + i) % 2 == 0 ? AR_SIM_RING : AR_SIM_DIRECT;
            for (size_t kind = 0; kind < 3; kind++) { /* both passes, forward, the other order */
                r.forward_only = kind == 1;
                r.order = kind == 2 ? AR_MLP_ROW_COLUMN : AR_MLP_COLUMN_ROW;
                if (!left_out(kind + (m + i) / 3))
                    expect_predicted(&r);
            }
        }
    }
}

Test(traffic_counted, exact_runs_count_what_is_predicted)
{
    count_all(AR_NUMERICS_EXACT);
}

Test(traffic_counted, native_runs_count_what_is_predicted)
{
    count_all(AR_NUMERICS_NATIVE);
}

/* Weights are new in the second step; clipping asks all tp ranks for their norm. */
Test(traffic_counted, training_counts_what_is_predicted)
{
    for (size_t m = 0; m < 4; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            traffic_run r = {.config = &c, .parallel = layouts[i], .steps = STEPS, .clip = i % 2 ? 0.1 : 0.0};
            const ar_plan usual = plan_of(c.arch, AR_MLP_COLUMN_ROW);
            if (left_out(m + i) || ar_parallel_check(&r.parallel, &c, &usual, BATCH, SEQ) != AR_OK)
                continue;
            r.numerics = (m + i) % 3 == 0 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
            expect_predicted(&r);
        }
    }
}

/* Gradients scattered, weights gathered, the norm over both groups; whatever the buckets are. */
Test(traffic_counted, zero_counts_what_is_predicted_with_any_bucket_size)
{
    static const size_t bucket_bytes[] = {0, 1000, AR_BUCKET_BYTES};
    for (size_t m = 0; m < 4; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            traffic_run r = {.config = &c, .parallel = layouts[i], .steps = i % 3 ? STEPS : 0, .clip = i % 2 ? 0.1 : 0};
            const ar_plan usual = plan_of(c.arch, AR_MLP_COLUMN_ROW);
            r.parallel.zero = 1;
            if (left_out(m + i) || r.parallel.dp < 2 || ar_parallel_check(&r.parallel, &c, &usual, BATCH, SEQ) != AR_OK)
                continue;
            r.numerics = (m + i) % 3 == 0 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT;
            r.algorithm = (m + i) % 2 == 0 ? AR_SIM_RING : AR_SIM_DIRECT;
            for (size_t b = 0; b < sizeof bucket_bytes / sizeof *bucket_bytes; b++) {
                r.bucket_bytes = bucket_bytes[b];
                expect_predicted(&r);
            }
        }
    }
}

/* Half the bytes for matrices, and as many as ever for norms and biases. */
Test(traffic_counted, matrices_in_bf16_count_what_is_predicted)
{
    for (size_t m = 0; m < 4; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            traffic_run r = {.config = &c, .parallel = layouts[i], .steps = STEPS, .numerics = AR_NUMERICS_NATIVE};
            r.storage = AR_BF16;
            r.order = i % 2 ? AR_MLP_ROW_COLUMN : AR_MLP_COLUMN_ROW;
            const ar_plan usual = plan_of(c.arch, r.order);
            if (left_out(m + i) || ar_parallel_check(&r.parallel, &c, &usual, BATCH, SEQ) != AR_OK)
                continue;
            expect_predicted(&r);
            r.parallel.zero = r.parallel.dp > 1 ? 1 : 0;
            if (r.parallel.zero)
                expect_predicted(&r);
        }
    }
}

/* Twelve bytes a token more for smoothed labels, which the whole group of tp moves twice over; none for a z-loss. */
Test(traffic_counted, smoothed_labels_count_what_is_predicted)
{
    const ar_config c = config_of(models[0]);
    traffic_run r = {.config = &c, .parallel = {.tp = 4, .dp = 2, .sp = true}};
    const uint64_t plain = predicted(&r);
    r.loss.z_loss = 0.01;
    cr_expect_eq(predicted(&r), plain);
    expect_predicted(&r);
    r.loss.label_smoothing = 0.1;
    cr_expect_eq(predicted(&r), plain + (uint64_t)2 * 3 * 12 * BATCH * SEQ);
    expect_predicted(&r);
    r.forward_only = true;
    r.numerics = AR_NUMERICS_NATIVE;
    expect_predicted(&r);
}

/* A byte for each parameter, agreed over dp. */
Test(traffic_counted, a_search_for_unused_parameters_counts_what_is_predicted)
{
    for (size_t m = 0; m < 4; m++) {
        const ar_config c = config_of(models[m]);
        traffic_run r = {.config = &c, .parallel = {.tp = 2, .dp = 2}, .steps = STEPS, .find_unused = true};
        expect_predicted(&r);
        r.parallel = (ar_parallel){.dp = 3, .zero = 1};
        expect_predicted(&r);
    }
}

/* A collective left out is bytes that are missing: the counts come from what is really copied. */
Test(traffic_counted, a_dropped_collective_shows)
{
    const ar_config c = config_of(models[0]);
    const traffic_run all[] = {
        {.config = &c, .parallel = {.tp = 2}, .fault = AR_FAULT_column_dx_not_reduced},
        {.config = &c, .parallel = {.dp = 2}, .fault = AR_FAULT_dp_group_missing},
        {.config = &c, .parallel = {.tp = 2, .sp = true}, .fault = AR_FAULT_sp_norm_grad_local},
        {.config = &c, .parallel = {.dp = 2, .zero = 1}, .steps = 1, .fault = AR_FAULT_zero_gather_missing},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        traffic_run r = all[i];
        const uint64_t want = predicted(&r);
        cr_expect_lt(counted(&r).bytes, want, "%s", ar_fault_name(r.fault));
        r.fault = AR_FAULT_NONE;
        cr_expect_eq(counted(&r).bytes, want, "without %s", ar_fault_name(all[i].fault));
    }
}

/* --- numbers of collectives --------------------------------------------------------------------------------------- */

typedef struct calls {
    uint64_t all_reduce, reduce_scatter, all_gather;
} calls;

/* Of one layer: those of two less those of one, native, on one rank. */
static calls calls_of_layer(ar_mlp_order order, ar_parallel parallel, bool forward_only)
{
    const ar_config one = config_of(LLAMA(31, 12, 36, 1, 12, 12, 2, false));
    const ar_config two = config_of(LLAMA(31, 12, 36, 2, 12, 12, 2, false));
    const traffic_run a = {.config = &one,
                           .order = order,
                           .parallel = parallel,
                           .numerics = AR_NUMERICS_NATIVE,
                           .forward_only = forward_only};
    traffic_run b = a;
    b.config = &two;
    const ari_cluster_result ra = counted(&a), rb = counted(&b);
    return (calls){rb.calls[0] - ra.calls[0], rb.calls[1] - ra.calls[1], rb.calls[2] - ra.calls[2]};
}

static void expect_calls(const char *what, calls got, calls want)
{
    cr_expect(got.all_reduce == want.all_reduce && got.reduce_scatter == want.reduce_scatter &&
                  got.all_gather == want.all_gather,
              "%s: %zu all-reduces, %zu reduce-scatters, %zu all-gathers; expected %zu, %zu, %zu", what,
              (size_t)got.all_reduce, (size_t)got.reduce_scatter, (size_t)got.all_gather, (size_t)want.all_reduce,
              (size_t)want.reduce_scatter, (size_t)want.all_gather);
}

Test(traffic_counted, a_layer_makes_as_few_collectives_as_are_known)
{
    const ar_parallel tp = {.tp = 3}, sp = {.tp = 3, .sp = true};
    const ar_parallel kept = {.tp = 3, .sp = true, .keep_gathered = true};
    expect_calls("tp forward", calls_of_layer(AR_MLP_COLUMN_ROW, tp, true), (calls){2, 0, 0});
    expect_calls("tp both", calls_of_layer(AR_MLP_COLUMN_ROW, tp, false), (calls){4, 0, 0});
    expect_calls("sp forward", calls_of_layer(AR_MLP_COLUMN_ROW, sp, true), (calls){0, 2, 2});
    /* Two RMSNorms' gradients; the gathered inputs again unless they were kept. */
    expect_calls("sp both, kept", calls_of_layer(AR_MLP_COLUMN_ROW, kept, false), (calls){2, 4, 4});
    expect_calls("sp both", calls_of_layer(AR_MLP_COLUMN_ROW, sp, false), (calls){2, 4, 6});
    /* Row-column: an all-reduce in the middle, an all-gather at the end. */
    expect_calls("row-column forward", calls_of_layer(AR_MLP_ROW_COLUMN, tp, true), (calls){2, 0, 1});
    expect_calls("row-column both", calls_of_layer(AR_MLP_ROW_COLUMN, tp, false), (calls){4, 0, 2});
    expect_calls("row-column sp forward", calls_of_layer(AR_MLP_ROW_COLUMN, sp, true), (calls){1, 1, 3});
}
