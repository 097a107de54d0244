/* SPDX-License-Identifier: Apache-2.0 */
/* ar_check as a whole: the same bits, hashes and predicted bytes in every layout, and runs that cannot end well. */
#include "anyrank/context.h"
#include "anyrank/grads.h"
#include "anyrank/training.h"
#include "support/row.h"
#include "tests/verify/support.h"

#include "ref/context/context.h"
#include "ref/layers/batch_private.h"
#include "verify/check/check_run.h"

/* --- the same everywhere ------------------------------------------------------------------------------------------ */

static void check_everywhere(const char *json, const char *name, const int *tp, size_t layouts, size_t batch,
                             size_t seq, const ar_plan *plan)
{
    OWNED(end_folder) char *folder = new_model(json);
    for (int algorithm = AR_SIM_DIRECT; algorithm <= AR_SIM_RING; algorithm++) {
        if (by_scale(1, 1, 0) && algorithm != AR_SIM_DIRECT + (int)(batch / 2 % 2)) /* each with some shapes */
            continue;
        ar_check_options o = check_of(folder, tp, layouts, batch, seq);
        o.run.plan = *plan;
        o.run.sim.algorithm = (ar_sim_algorithm)algorithm;
        o.run.seed = batch * 10 + seq;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        expect_same(r, name);
    }
}

Test(check, odd_shapes_have_the_baselines_bits_in_both_mlp_orders)
{
    static const int tp[] = {1, 2, 3, 4, 6};
    static const size_t shapes[][2] = {{1, 1}, {1, 2}, {3, 1}, {3, 7}, {2, 13}};
    for (int m = 0; m < TINY_MODELS; m++) {
        const ar_config c = config_of(tiny_models[m]);
        for (int order = AR_MLP_COLUMN_ROW; order <= AR_MLP_ROW_COLUMN; order++) {
            const ar_plan plan = plan_of(c.arch, (ar_mlp_order)order);
            for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s += small_only() ? 3 : 1)
                check_everywhere(tiny_models[m], tiny_names[m], tp, small_only() ? 3 : 5, shapes[s][0], shapes[s][1],
                                 &plan);
        }
    }
}

/* One rank has all rows, or all have one but for some: they must agree which buckets a parameter can share. */
Test(check, vocabularies_of_fewer_rows_than_ranks_have_the_baselines_bits)
{
    static const char *const models[] = {LLAMA(1, 8, 12, 1, 4, 4, 2, false), LLAMA(1, 8, 12, 1, 4, 4, 2, true),
                                         LLAMA(3, 8, 12, 1, 4, 4, 2, false)};
    static const ar_parallel layouts[] = {{.tp = 2, .sp = true}, {.tp = 4, .sp = true}, {.tp = 2, .dp = 3, .zero = 3}};
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        OWNED(end_folder) char *folder = new_model(models[m]);
        ar_check_options o = check_layouts(folder, layouts, sizeof layouts / sizeof *layouts, 3, 4);
        o.run.ddp = ar_ddp_defaults();
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        expect_same(r, models[m]);
    }
}

/* Sums of more than 8191 terms are kept in two limbs: in the head's dX (over the vocabulary), in the MLP's second layer
 * (over ffn), and in dX of gate and up, which is one sum over both. */
Test(check, sums_of_two_limbs_have_the_baselines_bits)
{
    static const int all[] = {1, 2, 3, 4};
    const int *tp = small_only() ? all + 2 : all;
    const size_t layouts = small_only() ? 2 : 4;
    const ar_plan plan = plan_of(AR_ARCH_LLAMA, AR_MLP_COLUMN_ROW), other = plan_of(AR_ARCH_LLAMA, AR_MLP_ROW_COLUMN);
    check_everywhere(LLAMA(8200, 12, 12, 1, 12, 12, 2, false), "vocabulary", tp, layouts, 2, 3, &plan);
    check_everywhere(LLAMA(8193, 12, 12, 1, 12, 12, 2, true), "tied vocabulary", tp, layouts, 2, 3, &plan);
    check_everywhere(LLAMA(30, 12, 8196, 1, 12, 12, 2, false), "ffn", tp, layouts, 2, 3, &plan);
    check_everywhere(LLAMA(30, 12, 4104, 1, 12, 12, 2, false), "gate and up", tp, layouts, 2, 3, &plan);
    check_everywhere(LLAMA(30, 12, 8196, 1, 12, 12, 2, false), "ffn, the other order", tp, layouts, 2, 3, &other);
}

Test(check, seeds_and_threads_change_what_they_should_and_nothing_else)
{
    const int tp = 2;
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_LLAMA]);
    ar_check_options o = check_of(folder, &tp, 1, 2, 6);
    OWNED(ar_check_report_destroy) ar_check_report *one = check_or_fail(&o);
    o.run.threads = 4;
    OWNED(ar_check_report_destroy) ar_check_report *four = check_or_fail(&o);
    o.run.seed = 1;
    OWNED(ar_check_report_destroy) ar_check_report *other = check_or_fail(&o);
    cr_expect_str_eq(one->gradients_hash, four->gradients_hash);
    cr_expect_str_eq(one->run[0].gradients_hash, four->run[0].gradients_hash);
    cr_expect_str_neq(one->weights_hash, other->weights_hash);
    cr_expect_str_neq(one->gradients_hash, other->gradients_hash);
    expect_same(other, "seed 1");
}

Test(check, the_binary64_baseline_says_how_exact_the_exact_one_is)
{
    const int tp = 2;
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_GPT2]);
    ar_check_options o = check_of(folder, &tp, 1, 2, 12);
    OWNED(ar_check_report_destroy) ar_check_report *without = check_or_fail(&o);
    o.skip_f64 = false;
    OWNED(ar_check_report_destroy) ar_check_report *with = check_or_fail(&o);
    cr_expect(isnan(without->max_error_vs_f64));
    /* As in golden_test.c: at most 40 contractions of at most 257 terms. */
    cr_expect(with->max_error_vs_f64 > 0.0 && with->max_error_vs_f64 < 6.1e-6, "%g", with->max_error_vs_f64);
}

/* --- runs that go wrong ------------------------------------------------------------------------------------------- */

static const int64_t ids[] = {3, 1, 256, 128, 5, 9, 129, 6, 64, 3};

typedef struct failing {
    int rank;    /* which one fails */
    int at, now; /* at which of its taps */
} failing;

static ar_status tap_that_fails(void *user, const ar_tap_event *e)
{
    failing *f = user;
    if (f && f->now++ == f->at)
        return ar_error_set(AR_ERR_DATA, "no more of %s", e->name);
    return AR_OK;
}

/* Rank `tp - 1` gives up at its tap number `at`; every rank returns, the reports name it. */
static void fail_at(const ar_config *c, int tp, int at, ar_sim_algorithm algorithm)
{
    failing f = {.at = at};
    void *users[8] = {NULL};
    const ar_batch batch = {.batch = 2, .seq = 5, .input_ids = ids};
    ari_cluster_result result;
    users[tp - 1] = &f;
    ari_cluster_options o = cluster_of(c, &batch, tp);
    o.run.sim.algorithm = algorithm;
    o.tap = tap_that_fails;
    o.tap_user = users;
    const ar_status st = ari_cluster_run(&result, &o);
    cr_expect_eq(st, AR_ERR_DATA, "tp=%d, tap %d: %s", tp, at, ar_status_name(st));
    cr_expect(strstr(ar_error_message(), "no more of"), "%s", ar_error_message());
    cr_assert_not_null(result.reports);
    for (int r = 0; r < tp; r++)
        cr_expect_eq(result.reports[r].rank, r);
    cr_expect_str_eq(result.reports[tp - 1].status, "AR_ERR_DATA");
    free(result.reports);
}

Test(check, a_rank_that_fails_anywhere_ends_the_run_for_all)
{
    const ar_config c = config_of(tiny_models[TINY_GPT2]);
    static const int at[] = {0, 27, 28, 40, 60, 61, 62, 80, 107}; /* 28 :init, 34 forward, 46 backward taps */
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        fail_at(&c, 2, at[i], AR_SIM_DIRECT);
        fail_at(&c, 2, at[i], AR_SIM_RING);
        fail_at(&c, 6, at[i], i % 2 ? AR_SIM_RING : AR_SIM_DIRECT);
    }
}

/* All ranks meet once; then rank 1 gives up, and the others would wait for it. */
static ar_status body_that_fails(void *user, ar_ctx *ctx)
{
    (void)user;
    int32_t value = 1, sum = 0;
    ar_comm *tp = ar_ctx_tp(ctx);
    AR_TRY(ar_comm_all_reduce(tp, ctx->queue, (ar_buf){&sum}, (ar_cbuf){&value}, 1, AR_I32, AR_SUM, "a sum"));
    if (ar_comm_rank(tp) == 1)
        return ar_error_set(AR_ERR_DATA, "rank 1 had enough");
    return ar_comm_all_reduce(tp, ctx->queue, (ar_buf){&sum}, (ar_cbuf){&value}, 1, AR_I32, AR_SUM, "another sum");
}

Test(check, a_failed_run_is_a_result_with_the_table_of_ranks)
{
    ar_config c = config_of(tiny_models[TINY_STACK]);
    const ar_batch batch = {.batch = 2, .seq = 5, .input_ids = ids};
    SCOPED(ari_reference_fini) ari_reference ref = reference_of(&c, &batch);
    ari_cluster_options o = cluster_of(&c, &batch, 3);
    o.body = body_that_fails;
    SCOPED(ari_check_run_fini) ar_check_run run = {0};
    cr_assert_ok(ari_check_run(&run, &ref, &o));
    cr_expect_eq(run.result, AR_CHECK_ERROR);
    cr_assert(run.error && run.reports && !run.has_difference);
    cr_expect(strstr(run.error, "rank 1 had enough"), "%s", run.error);
    cr_expect_str_eq(run.reports[1].status, "AR_ERR_DATA");
    /* The others may still be leaving the first collective when rank 1 has failed. */
    cr_expect(strstr(run.reports[1].last, "a sum"), "rank 1 finished %s", run.reports[1].last);
    cr_expect(strstr(run.error, run.reports[1].last), "not in the table: %s", run.reports[1].last);
}

/* A body that reports nothing at all: every tensor is missing. */
static ar_status body_that_is_idle(void *user, ar_ctx *ctx)
{
    (void)user, (void)ctx;
    return AR_OK;
}

Test(check, a_run_that_reports_nothing_differs_in_every_tensor)
{
    ar_config c = config_of(tiny_models[TINY_STACK]);
    const ar_batch batch = {.batch = 2, .seq = 5, .input_ids = ids};
    SCOPED(ari_reference_fini) ari_reference ref = reference_of(&c, &batch);
    ari_cluster_options o = cluster_of(&c, &batch, 2);
    o.body = body_that_is_idle;
    SCOPED(ari_check_run_fini) ar_check_run run = {0};
    cr_assert_ok(ari_check_run(&run, &ref, &o));
    cr_expect(run.result == AR_CHECK_DIFFERENT && run.tensors_different == ref.count);
    cr_expect_str_eq(run.first.tensor, "embed.weight:init");
}

/* Weights so large that products overflow: what arises are infinities and NaNs. user: the two tables. */
enum { MOST_WEIGHTS = 1 << 15 };
typedef struct huge {
    float norm[MOST_WEIGHTS], other[MOST_WEIGHTS];
} huge;

static void huge_init(huge *w)
{
    for (size_t i = 0; i < MOST_WEIGHTS; i++) {
        w->norm[i] = (float)((int)(i * 37 % 11) - 5);
        w->other[i] = 0x1p+120f * w->norm[i];
    }
}

static const float *huge_weights(void *user, const char *name, size_t count)
{
    const huge *w = user;
    return count > MOST_WEIGHTS ? NULL : strstr(name, "ln_") ? w->norm : w->other;
}

Test(check, overflow_gives_the_same_bits_and_names_a_nan)
{
    static huge w;
    ar_config c = config_of(tiny_models[TINY_GPT2]);
    const ar_batch batch = {.batch = 2, .seq = 5, .input_ids = ids};
    SCOPED(ari_reference_fini) ari_reference ref = {0};
    huge_init(&w);
    const ar_baseline_options b = ROW(.mode = AR_MODE_EXACT, .weights = huge_weights, .weights_user = &w,
                                      .emit = ari_reference_emit, .emit_user = &ref);
    cr_assert_ok(ar_baseline_run(&c, &b, &batch, &ref.loss));
    cr_assert_ok(ari_reference_finish(&ref));
    cr_assert(isnan(ref.loss), "these weights were to overflow, the loss is %g", ref.loss);
    for (int tp = 2; tp <= 6; tp += 2) {
        ari_cluster_options o = cluster_of(&c, &batch, tp);
        o.weights = huge_weights;
        o.weights_user = &w;
        SCOPED(ari_check_run_fini) ar_check_run run = {0};
        cr_assert_ok(ari_check_run(&run, &ref, &o));
        cr_expect(run.tensors_different == 0 && !run.error, "tp=%d: %s", tp, first_of(&run));
    }
}

/* --- input that is refused ---------------------------------------------------------------------------------------- */

static void expect_refused(ar_check_options o, ar_status st, const char *says)
{
    ar_check_report *r = NULL;
    const ar_status got = ar_check(&r, &o);
    cr_expect_eq(got, st, "%s: %s, expected %s", says, ar_status_name(got), ar_status_name(st));
    cr_expect(strstr(ar_error_message(), says), "no \"%s\" in \"%s\"", says, ar_error_message());
    cr_expect_null(r);
}

/* What a run can have, but not this kind of run. */
Test(check, what_of_a_run_has_no_place_in_a_check_or_in_gradients_or_in_training_is_refused)
{
    const int two = 2;
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_GPT2]);
    ar_check_options o = check_of(folder, &two, 1, 2, 6);
    o.run.numerics = AR_NUMERICS_NATIVE;
    o.run.storage = AR_BF16;
    expect_refused(o, AR_ERR_UNSUPPORTED, "storage in bf16");
    o = check_of(folder, &two, 1, 2, 6);
    o.run.steps = UINT64_C(1) << 31;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    expect_refused(o, AR_ERR_ARG, "2147483648 steps");

    ar_grads_options g = {.run.model = folder, .run.dropout = 0.1, .input = "none", .out = folder};
    ar_grads_result files;
    cr_expect_refused(ar_grads(&files, &g), AR_ERR_ARG, "dropout");
    g.run.dropout = 0.0;
    g.run.numerics = AR_NUMERICS_NATIVE;
    g.run.storage = AR_BF16;
    cr_expect_eq(ar_grads(&files, &g), AR_ERR_UNSUPPORTED);

    ar_training_options t = ar_training_defaults();
    ar_training_report *r = NULL;
    t.run.model = folder;
    t.run.seq = 6;
    t.run.numerics = AR_NUMERICS_NATIVE;
    t.run.precision = AR_PRECISION_BF16;
    t.run.storage = AR_F32;
    cr_expect_refused(ar_train_run(&r, &t), AR_ERR_ARG, "storage in f32 with precision bf16");
}

/* Cuts that fall on one place make fewer documents; of so many rows some have 1, and some the most. */
Test(check, random_documents_are_legal_and_those_of_their_seed)
{
    enum { ROWS = 60, SEQ = 40, MOST = 4 };
    int32_t *documents[3] = {NULL};
    size_t with[MOST + 1] = {0};
    for (uint64_t i = 0; i < 3; i++) {
        ar_batch batch[2] = {{.batch = ROWS, .seq = SEQ}, {.batch = ROWS, .seq = SEQ}};
        cr_assert_ok(ari_random_documents(&documents[i], batch, 2, MOST, i / 2));
        for (size_t step = 0; step < 2; step++) {
            cr_assert_ok(ari_batch_check(&batch[step], 1));
            for (size_t row = 0; row < ROWS; row++) {
                const int32_t last = batch[step].documents[row * SEQ + SEQ - 1];
                cr_assert_lt(last, MOST);
                with[last + 1]++;
            }
        }
        cr_assert_neq(memcmp(batch[0].documents, batch[1].documents, ROWS * SEQ * sizeof(int32_t)), 0);
    }
    for (size_t n = 1; n <= MOST; n++)
        cr_expect_gt(with[n], 0U, "no row has %zu documents", n);
    cr_expect_eq(memcmp(documents[0], documents[1], 2 * ROWS * SEQ * sizeof(int32_t)), 0, "one seed");
    cr_expect_neq(memcmp(documents[0], documents[2], 2 * ROWS * SEQ * sizeof(int32_t)), 0, "two seeds");
    for (size_t i = 0; i < 3; i++)
        free(documents[i]);
    ar_batch short_one = {.batch = 1, .seq = 1};
    cr_expect_eq(ari_random_documents(&documents[0], &short_one, 1, 2, 0), AR_ERR_ARG, "more than tokens");
    cr_assert_ok(ari_random_documents(&documents[0], &short_one, 1, 1, 0));
    cr_expect_eq(documents[0][0], 0);
    free(documents[0]);
}

Test(check, impossible_requests_are_refused_by_name)
{
    static const struct {
        int tp;
        size_t layouts, batch, seq;
        ar_status status;
        const char *says;
    } rows[] = {{2, 1, 0, 6, AR_ERR_ARG, "batch"},
                {2, 0, 2, 6, AR_ERR_ARG, "layout"},
                {5, 1, 2, 6, AR_ERR_INDIVISIBLE, "heads"},
                {48, 1, 2, 6, AR_ERR_INDIVISIBLE, "heads"},
                {2, 1, 2, 129, AR_ERR_SHAPE, "128"},
                {2, 1, (size_t)1 << 62, 100, AR_ERR_OVERFLOW, ""},
                {2, 1, (size_t)1 << 34, 100, AR_ERR_ARG, "memory"}};
    char path[80];
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_GPT2]);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect_refused(check_of(folder, &rows[i].tp, rows[i].layouts, rows[i].batch, rows[i].seq), rows[i].status,
                       rows[i].says);
    snprintf(path, sizeof path, "%s/no", folder);
    expect_refused(check_of(path, &rows[0].tp, 1, 1, 1), AR_ERR_NOT_FOUND, "no");
    ar_check_options o = check_of(folder, &rows[0].tp, 1, 2, 6);
    o.padding = SIZE_MAX; /* with which there would be 1 row */
    expect_refused(o, AR_ERR_OVERFLOW, "");
    o.padding = 0;
    o.text = path;
    expect_refused(o, AR_ERR_IO, "no");
    write_file(folder, "text", "");
    snprintf(path, sizeof path, "%s/text", folder);
    expect_refused(o, AR_ERR_DATA, "empty");
}
