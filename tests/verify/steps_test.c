/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of whole training steps: layouts of every kind, dropout, native numerics, the step in which a run leaves. */
#include "tests/verify/support.h"

#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/models/parallel_private.h"
#include "verify/check/check_private.h"
#include "verify/check/check_run.h"

/* Every kind of layout, for models whose heads divide by 12; of three samples two ranks have two and one. */
static const ar_parallel layouts[] = {
    {.tp = 1},
    {.tp = 2},
    {.tp = 3, .sp = true},
    {.tp = 4, .sp = true, .keep_gathered = true},
    {.dp = 2},
    {.dp = 3, .tp = 2},
    {.dp = 2, .tp = 2, .sp = true},
    {.micro_batches = 3},
    {.dp = 2, .tp = 2, .micro_batches = 2, .forward_first = true},
    {.dp = 2, .tp = 3, .sp = true, .micro_batches = 2},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts, BATCH = 3, SEQ = 12 };

/* The last ones have all kinds at once. */
enum { FEW_LAYOUTS = 2 };

static void check_steps(int model, double dropout, ar_optimizer_kind kind, ar_sim_algorithm algorithm)
{
    OWNED(end_folder) char *folder = new_model(tiny_models[model]);
    const size_t n = small_only() ? FEW_LAYOUTS : LAYOUTS;
    ar_check_options o = check_layouts(folder, layouts + LAYOUTS - n, n, BATCH, SEQ);
    o.layouts = 1;
    OWNED(ar_check_report_destroy) ar_check_report *untrained = check_or_fail(&o);
    o.layouts = n;
    o.run.steps = 3;
    o.run.optimizer = ar_optimizer_defaults(kind);
    o.run.optimizer.lr = 0.01;
    o.run.clip = 0.5;
    o.run.dropout = dropout;
    o.run.sim.algorithm = algorithm;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    expect_same(r, tiny_names[model]);
    cr_expect(r->steps == 3 && r->loss[2] != r->loss[0], "%s: the loss does not move", tiny_names[model]);
    cr_expect_str_neq(r->weights_hash, untrained->weights_hash, "%s: these are the initial weights", tiny_names[model]);
    cr_expect_str_neq(r->gradients_hash, untrained->gradients_hash);
}

Test(steps, three_of_adamw_with_clipping_have_the_baselines_bits_in_every_layout)
{
    for (int m = 0; m < TINY_MODELS; m += small_only() ? 2 : 1)
        check_steps(m, 0.0, AR_OPTIMIZER_ADAMW, m % 2 ? AR_SIM_RING : AR_SIM_DIRECT);
}

Test(steps, dropout_has_the_baselines_bits_in_every_layout)
{
    check_steps(TINY_LLAMA, 0.2, AR_OPTIMIZER_SGD, AR_SIM_DIRECT);
    if (small_only())
        return;
    check_steps(TINY_GPT2, 0.2, AR_OPTIMIZER_ADAM, AR_SIM_RING);
    if (by_scale(0, 0, 1) == 0)
        return;
    check_steps(TINY_STACK, 0.2, AR_OPTIMIZER_ADAMW, AR_SIM_DIRECT);
}

Test(steps, each_has_rows_of_its_own)
{
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_LLAMA]);
    ar_check_options o = check_layouts(folder, layouts, 1, BATCH, SEQ);
    o.run.steps = 2;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    o.run.optimizer.lr = 0.0; /* the same weights in both steps */
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    cr_expect(r->loss[0] != r->loss[1], "both steps saw the same text");
}

/* One step: the gradients are those of the initial weights, the weights are not. */
Test(steps, the_weights_hash_is_that_of_the_new_weights)
{
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_STACK]);
    ar_check_options o = check_layouts(folder, layouts, 2, BATCH, SEQ);
    o.run.steps = 1;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    OWNED(ar_check_report_destroy) ar_check_report *slow = check_or_fail(&o);
    o.run.optimizer.lr *= 2.0;
    OWNED(ar_check_report_destroy) ar_check_report *fast = check_or_fail(&o);
    cr_expect_str_eq(slow->gradients_hash, fast->gradients_hash);
    cr_expect_str_neq(slow->weights_hash, fast->weights_hash);
    cr_expect_str_neq(slow->run[1].weights_hash, fast->run[1].weights_hash);
}

/* --- native numerics ---------------------------------------------------------------------------------------------- */

static ar_check_report *native(const char *model, const ar_parallel *p, size_t n, size_t batch, size_t seq,
                               const char *fault)
{
    ar_check_options o = check_layouts(model, p, n, batch, seq);
    o.run.steps = 2;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.clip = 1.0;
    o.run.numerics = AR_NUMERICS_NATIVE;
    o.run.fault = fault;
    return check_or_fail(&o);
}

static void expect_within(const char *model, const char *name)
{
    static const ar_parallel some[] = {{.tp = 1}, {.tp = 4, .sp = true}, {.dp = 2, .tp = 2}};
    OWNED(ar_check_report_destroy) ar_check_report *r = native(model, some, 3, 2, 4, NULL);
    cr_expect_eq(r->numerics, AR_NUMERICS_NATIVE);
    for (size_t i = 0; i < r->runs; i++) {
        const ar_check_run *run = &r->run[i];
        cr_expect_eq(run->result, AR_CHECK_SAME, "%s, layout %zu: %s", name, i, first_of(run));
        cr_expect(run->max_ratio > 0.0 && run->max_ratio < 1.0, "%s, layout %zu: ratio %g of %s", name, i,
                  run->max_ratio, run->ratio_tensor);
        cr_expect(run->tensors_different == 0 && run->elements_different == 0 && run->ratio_tensor[0] != '\0');
        cr_expect_eq(run->bytes_counted, run->bytes_predicted);
        cr_expect_str_neq(run->gradients_hash, r->gradients_hash, "%s: these are the exact bits", name);
    }
}

/* A step in bf16 whose bytes are those predicted; gives them, of the last layout. */
static uint64_t expect_bytes(const char *model, size_t batch, size_t seq, size_t documents, ar_bucket_order order)
{
    static const ar_parallel some[] = {{.cp = 2},
                                       {.dp = 2, .cp = 2},
                                       {.tp = 2, .cp = 2, .zigzag = true},
                                       {.dp = 2, .cp = 2, .zero = 1},
                                       {.cp = 2, .zero = 1},
                                       {.cp = 2, .zero = 2, .micro_batches = 2},
                                       {.dp = 2, .cp = 2, .zero = 1, .dp_replicate = 2},
                                       {.tp = 2, .cp = 2, .sp = true}};
    const size_t n = sizeof some / sizeof *some;
    OWNED(end_folder) char *folder = new_model(model);
    ar_check_options o = check_layouts(folder, some, n, batch, seq);
    o.documents = documents;
    o.run.steps = 1;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.precision = AR_PRECISION_BF16;
    o.run.ddp.order = order;
    o.run.ddp.bucket_bytes = 1 << 20;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    for (size_t i = 0; i < r->runs; i++) {
        cr_expect_eq(r->run[i].result, AR_CHECK_SAME, "layout %zu: %s", i, first_of(&r->run[i]));
        cr_expect_eq(r->run[i].bytes_counted, r->run[i].bytes_predicted, "layout %zu", i);
    }
    return r->run[n - 1].bytes_counted;
}

static const char *const with_tables[] = {LLAMA(96, 16, 12, 1, 4, 2, 4, false), LLAMA(96, 16, 12, 1, 4, 2, 4, true),
                                          GPT2(96, 16, 24, 1, 4)};

/* Tables that are tied or not, and positions, in either order of buckets. */
Test(steps, bytes_of_gradients_in_bf16_over_ranks_of_a_sequence_are_predicted)
{
    for (size_t m = 0; m < sizeof with_tables / sizeof *with_tables; m++)
        expect_bytes(with_tables[m], 2, 8, 1, AR_BUCKETS_BY_SIZE);
}

/* A row of the table of positions is the sum of eight values, which move in five bytes; of up to 512, in eight,
 * where documents begin anew at position 0. */
Test(steps, rows_of_positions_are_sums_of_one_value_a_sample_unless_positions_repeat)
{
    const uint64_t once = expect_bytes(with_tables[2], 8, 32, 1, AR_BUCKETS_REVERSE);
    const uint64_t repeated = expect_bytes(with_tables[2], 8, 32, 4, AR_BUCKETS_REVERSE);
    cr_expect_lt(once, repeated);
}

/* Of the bundled models the small one; all of them where hours are allowed. */
Test(steps, native_numerics_stay_within_what_rounding_does)
{
    for (int m = 0; m < TINY_MODELS; m += small_only() ? 2 : 1) {
        OWNED(end_folder) char *folder = new_model(tiny_models[m]);
        expect_within(folder, tiny_names[m]);
    }
    if (small_only())
        return;
    expect_within("stack-demo", "stack-demo");
    if (!getenv("ANYRANK_TEST_EXTENDED"))
        return;
    expect_within("llama-demo", "llama-demo");
    expect_within("gpt2-demo", "gpt2-demo");
}

Test(steps, native_numerics_do_not_hide_a_fault)
{
    static const ar_parallel two[] = {{.tp = 2}}, shared[] = {{.tp = 2, .sp = true}}, over[] = {{.dp = 2}};
    static const struct {
        const char *fault;
        int model;
        const ar_parallel *layout;
        const char *tensor;
    } cases[] = {
        {"row_bias_every_rank", TINY_GPT2, two, "transformer.h.0.attn.c_proj:fwd"},
        {"column_dx_not_reduced", TINY_LLAMA, two, "lm_head:bwd"},
        {"sp_norm_grad_local", TINY_LLAMA, shared, "model.norm.weight:grad"},
        {"dp_group_missing", TINY_LLAMA, over, "lm_head.weight:grad"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += small_only() ? 3 : 1) {
        OWNED(end_folder) char *folder = new_model(tiny_models[cases[i].model]);
        OWNED(ar_check_report_destroy) ar_check_report *r = native(folder, cases[i].layout, 1, 2, 8, cases[i].fault);
        const ar_check_run *run = &r->run[0];
        cr_expect(run->result == AR_CHECK_DIFFERENT && run->max_ratio > 1.0, "case %zu: ratio %g", i, run->max_ratio);
        cr_expect_str_eq(run->first.tensor, cases[i].tensor);
    }
}

/* --- the step in which a run leaves ------------------------------------------------------------------------------- */

static const int64_t ids[2 * 2 * 5] = {3, 1, 256, 128, 5, 9, 129, 6, 64, 3, 7, 8, 200, 100, 1, 0, 12, 90, 33, 5};

typedef struct two_steps {
    ar_config config;
    ar_batch batch[2];
    ari_reference ref;
    ari_cluster_options cluster;
} two_steps;

Test(steps, a_run_that_ends_at_a_norm_that_is_no_number_still_names_where_it_began)
{
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_GPT2]);
    const ar_parallel thirds = {.tp = 3}; /* of a vocabulary that 3 does not divide */
    ar_check_options o = check_layouts(folder, &thirds, 1, BATCH, SEQ);
    o.run.steps = 1;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    o.run.clip = 1.0;
    o.run.fault = "silent_truncation";
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    const ar_check_run *run = &r->run[0];
    cr_assert(run->result == AR_CHECK_ERROR && run->error && run->has_difference);
    cr_expect(strstr(run->error, "norm is not finite"), "%s", run->error);
    cr_expect_str_eq(run->first.tensor, "lm_head:fwd");
    cr_expect(run->first.rank == 2 && isinf(run->first.actual), "rank %d", run->first.rank);
}

/* A rank that ends before it has reported half of the tensors: those say nothing. */
static ar_status body_that_ends_early(void *user, ar_ctx *ctx)
{
    const ari_reference *ref = user;
    const ari_ref_tensor *t = &ref->tensor[0];
    ar_layout layout;
    ar_tensor value;
    AR_TRY(
        ari_layout_replicate(&layout, t->ndim, t->shape, ar_comm_rank(ar_ctx_tp(ctx)), ar_comm_size(ar_ctx_tp(ctx))));
    AR_TRY(ar_ctx_tensor(ctx, &value, AR_F32, t->ndim, t->shape));
    AR_TRY(ar_ctx_upload(ctx, &value, t->values));
    if (ar_comm_rank(ar_ctx_tp(ctx)) == 0)
        AR_TRY(ari_tap(ctx, t->name, t->pass, &value, &layout));
    return ar_error_set(AR_ERR_DATA, "enough");
}

/* Two steps of SGD with momentum. */
static void two_steps_init(two_steps *t)
{
    double losses[2];
    *t = (two_steps){.config = config_of(tiny_models[TINY_STACK])};
    for (size_t i = 0; i < 2; i++)
        t->batch[i] = (ar_batch){.batch = 2, .seq = 5, .input_ids = ids + i * 10};
    ar_optimizer_options optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    optimizer.momentum = 0.9;
    t->cluster = (ari_cluster_options){.config = &t->config,
                                       .run.parallel = {.tp = 2, .dp = 2},
                                       .batch = t->batch,
                                       .run.steps = 2,
                                       .run.optimizer = optimizer,
                                       .run.threads = 1,
                                       .run.sim = {.timeout_ns = 60000000000u}};
    const ar_baseline_options b = ari_reference_options(&t->cluster.run, &t->ref);
    cr_assert_ok(ar_baseline_run(&t->config, &b, t->batch, losses));
    cr_assert_ok(ari_reference_finish(&t->ref));
}

static void expect_first(two_steps *t, int step, const char *pass, const char *tensor)
{
    SCOPED(ari_check_run_fini) ar_check_run run = {0};
    cr_assert_ok(ari_check_run(&run, &t->ref, &t->cluster));
    cr_assert(run.has_difference && !run.error, "%s: %s", tensor, run.error);
    cr_expect_eq(run.first.step, step, "%s: %s in step %d", tensor, run.first.tensor, run.first.step);
    cr_expect_str_eq(run.first.pass, pass);
    cr_expect_str_eq(run.first.tensor, tensor);
}

Test(steps, what_a_failed_run_did_not_come_to_report_is_no_difference)
{
    two_steps t;
    two_steps_init(&t);
    t.cluster.body = body_that_ends_early;
    t.cluster.body_user = &t.ref;
    SCOPED(ari_check_run_fini) ar_check_run run = {0};
    cr_assert_ok(ari_check_run(&run, &t.ref, &t.cluster));
    cr_expect(run.result == AR_CHECK_ERROR && !run.has_difference, "%s: %s", run.first.tensor, run.first.pattern);
    ari_reference_fini(&t.ref);
}

/* The first step of a momentum is without it: another one shows in the second one's weights alone. */
Test(steps, another_optimizer_is_found_in_the_step_that_it_changes_first)
{
    static const struct {
        double momentum, lr; /* times the right one */
        int step;
        const char *tensor;
    } cases[] = {{0.5, 1.0, 2, "embed.weight:new"}, {0.0, 1.0, 1, "embed.weight:m"}, {1.0, 1.5, 1, "embed.weight:new"}};
    two_steps t;
    two_steps_init(&t);
    const ar_optimizer_options right = t.cluster.run.optimizer;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        t.cluster.run.optimizer = right;
        t.cluster.run.optimizer.momentum *= cases[i].momentum;
        t.cluster.run.optimizer.lr *= cases[i].lr;
        expect_first(&t, cases[i].step, "update", cases[i].tensor);
    }
    ari_reference_fini(&t.ref);
}

Test(steps, one_bit_of_the_second_step_is_that_steps_alone)
{
    two_steps t;
    two_steps_init(&t);
    static const struct {
        const char *name, *pass, *tensor;
        char letter;
    } flips[] = {{"layers.1.mlp.act", "forward", "layers.1.mlp.act:fwd", 'f'},
                 {"layers.0.ln1.bias", "backward", "layers.0.ln1.bias:grad", 'g'},
                 {"layers.0.ln1.bias", "update", "layers.0.ln1.bias:new", 'n'}};
    for (size_t i = 0; i < sizeof flips / sizeof *flips; i++) {
        const size_t at = ari_reference_find_in(&t.ref, flips[i].name, flips[i].letter, 2);
        cr_assert_lt(at, t.ref.count);
        float *v = &t.ref.tensor[at].values[3];
        const float was = *v;
        *v = nextafterf(was, INFINITY);
        expect_first(&t, 2, flips[i].pass, flips[i].tensor);
        *v = was;
    }
    ari_reference_fini(&t.ref);
}

/* --- which layouts ------------------------------------------------------------------------------------------------ */

/* Their names with commas between, those without a pipeline left out if wanted. */
static const char *texts_of(const ar_parallel *p, size_t n, bool pipelines_alone)
{
    static char all[2048];
    char text[96];
    all[0] = '\0';
    for (size_t i = 0; i < n; i++) {
        if (pipelines_alone && p[i].pp == 1)
            continue;
        ari_parallel_text(text, sizeof text, &p[i]);
        cr_assert_lt(strlen(all) + strlen(text) + 2, sizeof all);
        snprintf(all + strlen(all), sizeof all - strlen(all), "%s%s", all[0] ? ", " : "", text);
    }
    return all;
}

#define LLAMA_LAYOUTS                                                                                   \
    "tp=1, tp=2, tp=4, tp=4 sp, tp=8 sp, dp=2, dp=2 tp=2 sp, dp=2 tp=2 zero=1, dp=3, micro-batches=2, " \
    "micro-batches=4, cp=2 zigzag, cp=4 (inner 2) tp=2 sp zero=1, pp=2 1f1b micro-batches=4"

Test(steps, default_layouts_are_of_every_kind_and_legal)
{
    static const struct {
        const char *model, *layouts;
        size_t seq;
    } cases[] = {
        {"llama-demo", LLAMA_LAYOUTS ", pp=2 interleaved (2 stages each) dp=2 tp=2 sp zero=1 micro-batches=2", 64},
        {"stack-demo", LLAMA_LAYOUTS ", pp=2 1f1b dp=2 tp=2 sp zero=1 micro-batches=2", 64}, /* of two layers */
        {"gpt2-demo",
         "tp=1, tp=3 sp, tp=6, dp=2, dp=2 tp=3 sp, dp=2 tp=2 zero=1, dp=3, micro-batches=2, micro-batches=4, "
         "cp=3 zigzag, cp=2 (inner 2) tp=2 sp zero=1, pp=3 zero-bubble micro-batches=4, "
         "pp=2 1f1b dp=2 tp=3 sp zero=1 micro-batches=2",
         72},
        {"gpt2-demo", /* 64 positions do not divide by 3 */
         "tp=1, tp=4 sp, tp=6, dp=2, dp=2 tp=2 sp, dp=2 tp=2 zero=1, dp=3, micro-batches=2, micro-batches=4, "
         "cp=2 zigzag, cp=2 (inner 2) tp=2 sp zero=1, pp=3 zero-bubble micro-batches=4, "
         "pp=2 1f1b dp=2 tp=2 sp zero=1 micro-batches=2",
         64}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char folder[600];
        ar_parallel p[32];
        ar_config c;
        const ar_plan plan = {0};
        cr_assert_ok(ar_model_path(folder, sizeof folder, cases[i].model));
        cr_assert_ok(ar_config_load(&c, folder));
        const size_t n = ari_check_default_layouts(&c, &plan, 8, cases[i].seq, p, 32);
        cr_expect_str_eq(texts_of(p, n, false), cases[i].layouts, "case %zu, %s", i, cases[i].model);
        cr_expect_eq(ari_check_default_layouts(&c, &plan, 8, cases[i].seq, p, 2), 2, "more than there is room for");
    }
}

Test(steps, a_sequence_fits_the_layouts_where_nobody_says_how_long_it_is)
{
    static const struct {
        size_t heads;
        size_t max_positions;
        ar_parallel p; /* of no ranks: there is none */
        size_t seq;
    } cases[] = {
        {12, 1024, {.tp = 0}, 72},
        {12, 1024, {.tp = 3}, 64},
        {12, 1024, {.tp = 3, .sp = true}, 66},
        {12, 1024, {.tp = 1, .sp = true}, 64},
        {12, 1024, {.cp = 3}, 66},
        {12, 1024, {.cp = 6, .cp_inner = 2, .zigzag = true}, 66},
        {12, 1024, {.cp = 5, .tp = 3, .sp = true, .zigzag = true}, 90},
        {12, 50, {.tp = 0}, 48},
        {12, 50, {.tp = 3}, 50},
        {12, 2, {.tp = 3, .sp = true}, 2}, /* no multiple of 3: the layout is refused, not the length */
        {8, 2048, {.tp = 0}, 64},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_config c = {.heads = cases[i].heads, .max_positions = cases[i].max_positions};
        const ar_parallel *p = cases[i].p.tp || cases[i].p.cp ? &cases[i].p : NULL;
        cr_expect_eq(ari_check_default_seq(&c, p), cases[i].seq, "case %zu", i);
    }
}

/* The tied llama: 12 heads and KV heads. Up to three ranks with two samples of 6 positions: dp=3 has no sample left, and
 * a zigzag over two places four chunks. */
Test(steps, a_sweep_lists_every_legal_layout_by_world_size)
{
    ar_parallel p[40];
    const ar_config c = config_of(tiny_models[TINY_TIED]);
    const ar_plan plan = {0};
    const size_t n = ari_check_sweep(&c, &plan, 2, 6, 3, p, 40);
    cr_assert_leq(n, 40, "%zu layouts", n);
    cr_expect_str_eq(
        texts_of(p, n, false),
        "tp=1, micro-batches=2, dp=2, dp=2 zero=1, cp=2, cp=2 micro-batches=2, cp=2 zero=1, "
        "cp=2 zero=1 micro-batches=2, cp=2 (inner 2), cp=2 (inner 2) micro-batches=2, cp=2 (inner 2) zero=1, "
        "cp=2 (inner 2) zero=1 micro-batches=2, tp=2, tp=2 sp, tp=2 micro-batches=2, tp=2 sp micro-batches=2, cp=3, "
        "cp=3 micro-batches=2, cp=3 zero=1, cp=3 zero=1 micro-batches=2, cp=3 zigzag, cp=3 zigzag micro-batches=2, "
        "cp=3 zigzag zero=1, cp=3 zigzag zero=1 micro-batches=2, cp=3 (inner 3), cp=3 (inner 3) micro-batches=2, "
        "cp=3 (inner 3) zero=1, cp=3 (inner 3) zero=1 micro-batches=2, tp=3, tp=3 sp, tp=3 micro-batches=2, "
        "tp=3 sp micro-batches=2");
    cr_expect_eq(ari_check_sweep(&c, &plan, 2, 6, 3, NULL, 0), n, "counts without room too");
}

/* Four layers, one sample of 6 positions: meshes with a pipeline, by world size. */
Test(steps, a_sweep_takes_the_schedules_of_pipelines_in_turn)
{
    ar_parallel p[60];
    ar_config c = config_of(tiny_models[TINY_TIED]);
    const ar_plan plan = {0};
    c.layers = 4;
    const size_t n = ari_check_sweep(&c, &plan, 1, 6, 4, p, 60);
    cr_assert_leq(n, 60, "%zu layouts", n);
    cr_expect_str_eq(
        texts_of(p, n, true),
        "pp=2 1f1b, pp=3 gpipe, pp=2 interleaved (2 stages each) cp=2, pp=2 interleaved (2 stages each) cp=2 zero=1, "
        "pp=2 zero-bubble cp=2 (inner 2), pp=2 zero-bubble cp=2 (inner 2) zero=1, pp=4 1f1b, pp=2 gpipe tp=2, "
        "pp=2 gpipe tp=2 sp");
}

Test(steps, a_check_runs_central_differences_where_it_is_asked_to)
{
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_TIED]);
    ar_check_options o = check_layouts(folder, layouts, 1, BATCH, SEQ);
    OWNED(ar_check_report_destroy) ar_check_report *without = check_or_fail(&o);
    o.gradcheck = true;
    OWNED(ar_check_report_destroy) ar_check_report *with = check_or_fail(&o);
    cr_expect(!without->has_gradcheck && with->has_gradcheck);
    cr_expect(with->gradcheck.ok && with->gradcheck.max_relative_error < 1e-6, "%g in %s",
              with->gradcheck.max_relative_error, with->gradcheck.worst_tensor);
    cr_expect(with->gradcheck.parameters > 0 && with->gradcheck.rows == AR_GRADCHECK_STEPS);
    cr_expect_eq(with->result, AR_CHECK_SAME);
}
