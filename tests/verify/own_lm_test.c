/* SPDX-License-Identifier: Apache-2.0 */
/* A user's language model under layouts that share out positions, features, samples and layers: the same bits, and the
 * right gradients. */

#include "anyrank/activation.h"
#include "anyrank/training.h"
#include "ref/layers/param_private.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/parallel_private.h"
#include "support/own_lm.h"
#include "support/rank_run.h"
#include "tests/support/test.h"
#include "verify/check/check_module_private.h"

static ar_check_module_options options(const ar_parallel *layouts, size_t n)
{
    ar_check_module_options o = {.parallel = layouts, .layouts = n, .run = {.steps = 2, .clip = 1.0, .threads = 1}};
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    return o;
}

static void expect_same(const ar_check_report *r)
{
    for (size_t i = 0; i < r->runs; i++) {
        char text[96];
        ari_parallel_text(text, sizeof text, &r->run[i].parallel);
        const ar_check_run *run = &r->run[i];
        cr_expect_eq(run->result, AR_CHECK_SAME, "%s: %s %s %s", text, run->first.tensor, run->first.pattern,
                     run->error ? run->error : "");
        cr_expect_eq(run->bytes_counted, run->bytes_predicted, "%s: %llu bytes, %llu predicted", text,
                     (unsigned long long)run->bytes_counted, (unsigned long long)run->bytes_predicted);
        cr_expect_str_empty(run->memory_difference, "%s: %s", text, run->memory_difference);
        cr_expect(run->has_memory_predicted);
    }
}

Test(own_lm, positions_are_shared_out_with_the_same_bits)
{
    static const ar_parallel layouts[] = {{.tp = 2},
                                          {.tp = 2, .sp = true},
                                          {.tp = 4, .sp = true, .keep_gathered = true},
                                          {.cp = 2},
                                          {.cp = 4, .zigzag = true},
                                          {.cp = 2, .cp_inner = 2},
                                          {.cp = 2, .tp = 2, .sp = true},
                                          {.cp = 2, .dp = 2, .micro_batches = 2, .zero = 1},
                                          {.dp = 2, .tp = 2, .sp = true, .zero = 3}};
    const own_lm lm = {.tied = false};
    const ar_module_case c = own_lm_case(&lm);
    const ar_check_module_options o = options(layouts, sizeof layouts / sizeof *layouts);
    OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
    cr_assert_ok(ar_check_module(&r, &c, &o));
    expect_same(r);
}

/* --- values that are held one way forward and another back -------------------------------------------------------- */

/* relu(x U^T), whose y is the own features and dx whole, or a D^T of it, the other way round. */
typedef struct half {
    ar_module base;
    ar_param weight;
    bool row;
} half;

static ar_status half_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                              const ar_batch *b)
{
    half *h = (half *)m;
    ar_tensor in = *x, made;
    (void)b;
    if (!h->row)
        AR_TRY(ar_enter_region(ctx, &in, x));
    AR_TRY(ar_contract(ctx, &made, &in, &h->weight));
    AR_TRY(ar_saved_push(saved, m, 0, &in));
    AR_TRY(ar_saved_push(saved, m, 1, &made));
    return h->row ? ar_leave_region(ctx, y, &made) : ar_bias_act_forward(ctx, y, &made, NULL, AR_ACT_RELU);
}

static ar_status half_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                               const ar_batch *b)
{
    half *h = (half *)m;
    ar_tensor in, made, d, din;
    (void)b;
    AR_TRY(ar_saved_pop(saved, m, 0, &in));
    AR_TRY(ar_saved_pop(saved, m, 1, &made));
    AR_TRY(h->row ? ar_leave_region_backward(ctx, &d, dy)
                  : ar_bias_act_backward(ctx, &d, dy, &made, NULL, AR_ACT_RELU));
    AR_TRY(ar_contract_backward(ctx, dx ? &din : NULL, &d, &in, &h->weight));
    if (dx && h->row)
        *dx = din;
    return dx && !h->row ? ar_enter_region_backward(ctx, dx, &din) : AR_OK;
}

static ar_status half_create(ar_module **gives, ar_ctx *ctx, const char *name, bool row, bool told)
{
    static const ar_module_ops ops = {"half", half_forward, half_backward, .params_at = offsetof(half, weight),
                                      .params_count = 1};
    half *h = calloc(1, sizeof *h);
    if (!h)
        return AR_ERR_MEMORY;
    *gives = &h->base;
    h->row = row;
    AR_TRY(ar_module_init(&h->base, &ops, name, row ? AR_HELD_WHOLE : AR_HELD_SHARD));
    if (told)
        h->base.tap_dx = row ? AR_HELD_SHARD : AR_HELD_WHOLE;
    return ar_param_init_shard(&h->weight, ctx, name, "w", (size_t[]){row ? 8 : 16, row ? 16 : 8}, row,
                               AR_INIT_XAVIER_NORMAL);
}

static ar_status build_halves(void *told, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_module *m[3] = {NULL};
    ar_status st = ar_norm_create(&m[0], ctx, "norm", AR_NORM_RMS, 8, 1e-5);
    for (int i = 0; i < 2 && st == AR_OK; i++)
        st = half_create(&m[1 + i], ctx, i ? "down" : "up", i == 1, *(const bool *)told);
    if (st == AR_OK)
        st = ar_sequential_create(module, "halves", m, 3, true);
    for (int i = 0; i < 3 && st != AR_OK; i++)
        ar_module_destroy(m[i]);
    return st == AR_OK ? ar_squared_error_create(loss, ctx, "loss") : st;
}

static ar_status batch_of_halves(void *told, int step, ar_batch *b)
{
    static float x[4 * 4 * 8];
    (void)told, (void)step;
    for (int i = 0; i < 4 * 4 * 8; i++)
        x[i] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
    *b = (ar_batch){.batch = 4, .seq = 1, .input = x, .sample_ndim = 2, .sample_shape = {4, 8}};
    b->target = x;
    b->target_width = 4 * 8;
    return AR_OK;
}

Test(own_lm, y_and_dx_are_reported_as_each_is_held)
{
    static const ar_parallel layouts[] = {{.tp = 2}, {.tp = 4, .sp = true}, {.tp = 2, .cp = 2}};
    bool told[] = {true, false};
    const ar_check_module_options o = options(layouts, 3);
    for (int i = 0; i < 2; i++) {
        const ar_module_case c = {.name = "halves", .build = build_halves, .batch = batch_of_halves, .user = &told[i]};
        OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
        cr_assert_ok(ar_check_module(&r, &c, &o));
        for (size_t k = 0; k < 3; k++)
            cr_expect_eq(r->run[k].result == AR_CHECK_SAME, told[i], "%s, layout %zu: %s", told[i] ? "told" : "not", k,
                         r->run[k].first.tensor);
    }
}

/* The same from weights so small that the loss does not tell them from none. */
static ar_status build_tiny(void *told, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_param *w[3];
    AR_TRY(build_halves(told, ctx, module, loss));
    for (size_t i = 0; i < ar_module_params(*module, w, 3, true); i++) {
        w[i]->init = AR_INIT_NORMAL;
        w[i]->init_range = 1e-7;
    }
    return AR_OK;
}

Test(own_lm, gradients_that_cannot_be_seen_are_no_verdict_and_the_text_says_what_to_do)
{
    bool told = true;
    const ar_module_case c = {.name = "tiny", .build = build_tiny, .batch = batch_of_halves, .user = &told};
    const ar_check_module_options o = options(NULL, 0);
    OWNED(free) ar_gradcheck_module_report *r = NULL;
    char text[2048];
    cr_assert_ok(ar_gradcheck_module(&r, &c, &o));
    ari_gradcheck_module_text(r, text, sizeof text);
    cr_expect(!r->ok && r->wrong == 0, "%s", text);
    cr_expect_not_null(strstr(text, "larger first values, ar_param.init_range"), "%s", text);
}

Test(own_lm, stages_of_a_list_are_a_pipeline)
{
    static const ar_parallel layouts[] = {
        {.pp = 2},
        {.pp = 3, .micro_batches = 4},
        {.pp = 2, .micro_batches = 2, .schedule = AR_PP_GPIPE},
        {.pp = 2, .virtual_stages = 3, .micro_batches = 4, .schedule = AR_PP_INTERLEAVED},
        {.pp = 2, .micro_batches = 4, .schedule = AR_PP_ZERO_BUBBLE},
        {.pp = 2, .stages = {2, {5, 1}}},
        {.pp = 2, .dp = 2, .zero = 3, .micro_batches = 2},
        {.pp = 2, .tp = 2, .sp = true, .cp = 2}};
    for (int tied = 0; tied < 2; tied++) { /* the ends have copies of the embedding then */
        const own_lm lm = {.tied = tied == 1};
        const ar_module_case c = own_lm_case(&lm);
        const ar_check_module_options o = options(layouts, sizeof layouts / sizeof *layouts);
        OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
        cr_assert_ok(ar_check_module(&r, &c, &o));
        expect_same(r);
    }
}

/* Three norms that are one, each in a stage of its own. */
static ar_status build_one_of_three(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    ar_module *m[2] = {NULL};
    (void)user;
    ar_status st = ar_norm_create(&m[0], ctx, "norm", AR_NORM_RMS, 8, 1e-5);
    AR_TRY(ar_sequential_made(&m[1], "one", m, 1, st));
    st = ar_sequential_create(module, "three", (ar_module *[]){m[1], m[1], m[1]}, 3, false);
    if (st == AR_OK)
        st = ar_sequential_cut(*module, ctx, 0, 3, 2, (size_t[]){4, 8});
    ar_module_destroy(m[1]);
    return st == AR_OK ? ar_squared_error_create(loss, ctx, "loss") : st;
}

Test(own_lm, a_parameter_of_a_middle_stage_and_another_is_refused)
{
    const ar_parallel layout = {.pp = 3};
    bool told = true;
    const ar_module_case c = {.name = "three", .build = build_one_of_three, .batch = batch_of_halves, .user = &told};
    ar_training_options o = ar_training_defaults();
    ar_training_report *r = NULL;
    o.module = &c;
    o.run.parallel = layout;
    cr_expect_eq(ar_train_run(&r, &o), AR_ERR_UNSUPPORTED);
    cr_expect_says("one and one share norm.weight, and are in stages of two ranks, expected the first and the last: "
                   "give both to one stage");
}

/* --- terms that nothing has added up ------------------------------------------------------------------------------ */

static ar_status add_terms(ar_ctx *ctx, void *user)
{
    static const float in[4 * 8] = {1, 2, 3};
    ar_param w[2] = {0};
    ar_tensor x, terms, y;
    ar_status st = AR_OK;
    (void)user;
    for (int dim = 0; dim < 2 && st == AR_OK; dim++)
        st = ar_param_init_shard(&w[dim], ctx, "mlp", dim ? "down" : "up", (size_t[]){8, 8}, dim, AR_INIT_NORMAL);
    AR_TRY_TO(done, st, ari_param_fresh(&w[1], ctx, 1));
    AR_TRY_TO(done, st, rank_upload(ctx, &x, 2, (size_t[]){4, w[1].value.shape[1]}, in));
    AR_TRY_TO(done, st, ar_contract(ctx, &terms, &x, &w[1]));
    const ar_status all = ar_contract_backward_all(ctx, &y, &x, &x, (ar_param *[]){&w[0], &w[1]}, 2);
    const bool named = strstr(ar_error_message(), "mlp.up and mlp.down: expected weights of one input");
    if (all != AR_ERR_SHAPE || !named)
        AR_TRY_TO(done, st, ar_error_set(AR_ERR_INTERNAL, "weights cut in two ways were taken"));
    st = ar_add(ctx, &y, &terms, &terms);
done:
    ar_param_fini(&w[0]);
    ar_param_fini(&w[1]);
    return st;
}

Test(own_lm, terms_without_a_value_are_refused_by_the_weight_s_name)
{
    cr_expect_eq(rank_run(&(ar_run){.parallel.tp = 2}, add_terms, NULL), AR_ERR_ARG);
    cr_expect_says("sum takes the product with mlp.down, whose terms have no value until ar_leave_region");
}

/* --- random layouts ----------------------------------------------------------------------------------------------- */

/* As many as ANYRANK_TEST_DRAWS says, of the seed ANYRANK_TEST_SEED. */
enum { USUAL = 60, MOST_RANKS = 12 };

static size_t number_of(const char *variable, size_t usual)
{
    const char *text = getenv(variable);
    return text ? (size_t)strtoull(text, NULL, 10) : usual;
}

static int draw(uint64_t *state, int n)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int)(*state >> 33) % n;
}

static ar_parallel draw_layout(uint64_t *state)
{
    static const int powers[] = {1, 2, 4};
    ar_parallel p = {.tp = powers[draw(state, 3)], .cp = powers[draw(state, 3)], .pp = 1 + draw(state, 3)};
    p.sp = p.tp > 1 && draw(state, 2);
    p.zigzag = p.cp > 1 && draw(state, 2);
    p.cp_inner = p.cp > 1 && p.tp < 4 && draw(state, 2) ? 2 : 1;
    p.dp = 1 + draw(state, 3);
    p.zero = draw(state, 4);
    p.keep_gathered = draw(state, 2);
    p.overlap = p.sp && draw(state, 2) ? 2 : 0;
    p.recompute = (ar_recomputation){(ar_recompute)draw(state, AR_RECOMPUTES), 1 + draw(state, 2)};
    p.micro_batches = p.pp > 1 || p.dp > 1 ? 1 + draw(state, 2) : 1 + draw(state, 4);
    p.schedule = draw(state, 2) ? AR_PP_1F1B : draw(state, 2) ? AR_PP_GPIPE : AR_PP_ZERO_BUBBLE;
    return p;
}

static bool fits(const ar_parallel *p)
{
    return ar_parallel_world(p) > 1 && ar_parallel_world(p) <= MOST_RANKS &&
           ari_parallel_check_sequence(p, OWN_LM_SEQ) == AR_OK;
}

/* --- hooks of gradients ------------------------------------------------------------------------------------------- */

/* Five bits of each element. */
static ar_status compress(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n)
{
    (void)user, (void)b, (void)p, (void)start;
    for (size_t i = 0; i < n; i++) {
        int exponent = 0;
        const float bits = frexpf(g[i], &exponent);
        g[i] = ldexpf(rintf(bits * 32.0f), exponent - 5);
    }
    return AR_OK;
}

/* The same with error feedback (Seide et al. 2014, 1-bit SGD): what was rounded off is added in the next step. */
static ar_status compress_with_feedback(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g,
                                        size_t n)
{
    if (!b->hook_state)
        return ar_error_set(AR_ERR_INTERNAL, "a hook without its state");
    for (size_t i = 0; i < n; i++) {
        const float whole = g[i] + b->hook_state[i];
        g[i] = whole;
        AR_TRY(compress(user, b, p, start, &g[i], 1));
        b->hook_state[i] = whole - g[i];
    }
    return AR_OK;
}

/* A factor that depends on how many elements came before, of whichever rank: no two runs have the same one, and what
 * is said of logits.weight differs from run to run. */
static ar_status scale_by_calls(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g,
                                size_t n)
{
    _Atomic size_t *calls = user;
    (void)b, (void)p, (void)start;
    for (size_t i = 0; i < n; i++)
        g[i] *= 1.0f + 0.001f * (float)((*calls)++ % 512);
    return AR_OK;
}

/* Divides by the largest of those that it is given, which are others under another layout. */
static ar_status normalise(void *user, const ar_bucket_info *b, const ar_param *p, size_t start, float *g, size_t n)
{
    float largest = 0.0f;
    (void)user, (void)b, (void)p, (void)start;
    for (size_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(g[i]));
    for (size_t i = 0; i < n && largest > 0.0f; i++)
        g[i] /= largest;
    return AR_OK;
}

Test(own_lm, a_hook_that_looks_at_other_elements_is_a_difference_of_gradients)
{
    static const ar_parallel layouts[] = {{.dp = 2}, {.dp = 2, .zero = 2}, {.dp = 2, .zero = 3}, {.tp = 2}};
    const own_lm lm = {.tied = false};
    const ar_module_case c = own_lm_case(&lm);
    ar_ddp_options ddp = ar_ddp_defaults();
    ar_check_module_options o = options(layouts, 4);
    ddp.hook = normalise;
    o.ddp = &ddp;
    OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
    cr_assert_ok(ar_check_module(&r, &c, &o));
    cr_expect_eq(r->run[0].result, AR_CHECK_SAME); /* which has all elements, and so the largest */
    for (size_t i = 1; i < 4; i++) {
        cr_expect_eq(r->run[i].result, AR_CHECK_DIFFERENT, "layout %zu", i);
        cr_expect_str_eq(r->run[i].first.pass, "backward", "layout %zu: %s %s", i, r->run[i].first.tensor,
                         r->run[i].first.pass);
    }
}

Test(own_lm, state_of_a_hook_is_the_object_s_and_not_what_ranks_and_runs_share)
{
    static const ar_parallel layouts[] = {{.dp = 2}, {.dp = 2, .zero = 2}, {.tp = 2}, {.pp = 2, .dp = 2}};
    const own_lm lm = {.tied = false};
    const ar_module_case c = own_lm_case(&lm);
    _Atomic size_t calls = 0;
    ar_ddp_options ddp = ar_ddp_defaults();
    ar_check_module_options o = options(layouts, 4);
    ddp.hook = scale_by_calls;
    ddp.hook_user = &calls;
    o.ddp = &ddp;
    o.run.steps = 3;
    OWNED(ar_check_report_destroy) ar_check_report *shared = NULL, *own = NULL, *without = NULL;
    cr_assert_ok(ar_check_module(&shared, &c, &o));
    ddp.hook = compress;
    cr_assert_ok(ar_check_module(&without, &c, &o));
    ddp.hook = compress_with_feedback;
    ddp.hook_state = true;
    cr_assert_ok(ar_check_module(&own, &c, &o));
    for (size_t i = 0; i < 4; i++) {
        cr_expect_eq(shared->run[i].result, AR_CHECK_DIFFERENT, "layout %zu", i);
        cr_expect_eq(own->run[i].result, AR_CHECK_SAME, "layout %zu: %s %s", i, own->run[i].first.tensor,
                     own->run[i].error);
    }
    cr_expect(own->loss[0] == without->loss[0] && own->loss[own->steps - 1] != without->loss[own->steps - 1]);
    ar_training_options saved = ar_training_defaults();
    ar_training_report *r = NULL;
    saved.module = &c;
    saved.run.ddp = ddp;
    saved.save = "nowhere";
    cr_expect_eq(ar_train_run(&r, &saved), AR_ERR_UNSUPPORTED);
    cr_expect_says("a hook's state is in no checkpoint");
}

/* The second third of the layouts has a hook with state, and tied weights, the last is in bf16. */
Test(own_lm, random_layouts_have_the_same_bits_bytes_and_memory)
{
    const size_t n = number_of("ANYRANK_TEST_DRAWS", USUAL);
    ar_ddp_options ddp = ar_ddp_defaults();
    ddp.bucket_bytes = 2048;
    ddp.hook = compress_with_feedback;
    ddp.hook_state = true;
    OWNED(free) ar_parallel *layouts = calloc(n, sizeof *layouts);
    uint64_t state = number_of("ANYRANK_TEST_SEED", 44);
    float loss[3] = {0};
    for (size_t i = 0; i < n; i += fits(&layouts[i]))
        layouts[i] = draw_layout(&state);
    for (size_t third = 0; third < 3; third++) {
        const own_lm lm = {.tied = third == 1};
        const ar_module_case c = own_lm_case(&lm);
        const size_t from = third * n / 3;
        ar_check_module_options o = options(layouts + from, (third + 1) * n / 3 - from);
        o.ddp = third == 1 ? &ddp : NULL;
        o.run.precision = third == 2 ? AR_PRECISION_BF16 : AR_PRECISION_F32;
        OWNED(ar_check_report_destroy) ar_check_report *r = NULL;
        cr_assert_ok(ar_check_module(&r, &c, &o));
        cr_expect_eq(r->runs, o.layouts);
        expect_same(r);
        loss[third] = r->loss[0];
    }
    cr_expect(loss[2] != loss[0] && fabsf(loss[2] - loss[0]) < 0.01f * loss[0], "%g in bf16, %g", (double)loss[2],
              (double)loss[0]);
}

Test(own_lm, layers_of_a_list_are_recomputed_as_the_layout_says)
{
    const own_lm lm = {.tied = false};
    const ar_module_case c = own_lm_case(&lm);
    static const ar_recomputation less[] = {{AR_RECOMPUTE_FULL, 1},
                                            {AR_RECOMPUTE_FULL, 2},
                                            {AR_RECOMPUTE_SELECTIVE, 1},
                                            {AR_RECOMPUTE_SELECTIVE, 2},
                                            {AR_RECOMPUTE_NONE, 1}};
    size_t stored[5];
    for (int i = 0; i < 5; i++) {
        const ar_run run = {.steps = 1,
                            .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_SGD),
                            .parallel = {.dp = 2, .recompute = less[i]}};
        ar_module_inspection *m = NULL;
        cr_assert_ok(ar_inspect_module(&m, &c, &run));
        stored[i] = m->memory.stored;
        ar_module_inspection_destroy(m);
    }
    cr_expect(stored[0] < stored[1] && stored[1] < stored[4], "full: %zu, %zu, %zu", stored[0], stored[1], stored[4]);
    cr_expect(stored[0] < stored[2] && stored[2] < stored[3] && stored[3] < stored[4], "selective: %zu, %zu", stored[2],
              stored[3]);
}

/* --- a training run ----------------------------------------------------------------------------------------------- */

static ar_training_report *train(const ar_module_case *c, ar_parallel layout)
{
    ar_training_options o = ar_training_defaults();
    ar_training_report *r = NULL;
    o.module = c;
    o.run.steps = 3;
    o.run.parallel = layout;
    o.run.threads = 1;
    cr_assert_ok(ar_train_run(&r, &o));
    return r;
}

Test(own_lm, a_training_run_has_the_same_weights_on_any_ranks_and_the_bytes_of_a_dry_run)
{
    static const ar_parallel layouts[] = {{.tp = 2, .sp = true, .dp = 2, .zero = 1},
                                          {.pp = 2, .cp = 2, .micro_batches = 2}};
    const own_lm lm = {.tied = false};
    const ar_module_case c = own_lm_case(&lm);
    OWNED(ar_training_report_destroy) ar_training_report *one = train(&c, (ar_parallel){0});
    cr_expect_eq(one->steps, 3u);
    cr_expect_eq(one->bytes, 0u);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
        OWNED(ar_training_report_destroy) ar_training_report *r = train(&c, layouts[i]);
        cr_expect_str_eq(r->weights_hash, one->weights_hash);
        cr_expect_eq(memcmp(r->loss, one->loss, 3 * sizeof *r->loss), 0);
        cr_expect(!r->bytes_differ && r->bytes > 0 && r->bytes == r->bytes_predicted, "%s", r->message);
    }
}

Test(own_lm, a_training_run_needs_the_module_s_name)
{
    const own_lm lm = {.tied = false};
    const ar_module_case c = own_lm_case(&lm), nameless = {.build = c.build, .batch = c.batch};
    ar_training_options o = ar_training_defaults();
    ar_training_report *r = NULL;
    o.module = &nameless;
    cr_expect_eq(ar_train_run(&r, &o), AR_ERR_ARG);
}

Test(own_lm, gradients_agree_with_differences)
{
    const own_lm lm = {.tied = true};
    const ar_module_case c = own_lm_case(&lm);
    const ar_check_module_options o = options(NULL, 0);
    OWNED(free) ar_gradcheck_module_report *r = NULL;
    char text[4096];
    cr_assert_ok(ar_gradcheck_module(&r, &c, &o));
    ari_gradcheck_module_text(r, text, sizeof text);
    cr_expect(r->ok, "%s", text);
}
