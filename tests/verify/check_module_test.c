/* SPDX-License-Identifier: Apache-2.0 */
/* The check of a user's module: what is right is the same under every layout; each mistake is found and named. */
#include <stdatomic.h>

#include "anyrank/check_module.h"
#include "anyrank/context.h"
#include "anyrank/layers.h"
#include "ref/layers/param_private.h"
#include "ref/models/parallel_private.h"
#include "support/own_module.h"
#include "support/small.h"
#include "tests/support/test.h"
#include "verify/check/check_module_private.h"

enum { SAMPLES = 7, WIDTH = 8, CLASSES = 4, MOST = 10 };

/* What is built, and what stands in the data. */
typedef struct given {
    own_mistake mistake;
    bool twice;        /* the user's layer stands in the sequence twice */
    bool other_scale;  /* its scale starts elsewhere on each tensor-parallel rank */
    atomic_int *drift; /* elsewhere each time it is built; NULL: not */
    bool frozen;       /* its scale takes no gradient */
    ar_activation act;
    bool fails; /* build gives an error on two tensor-parallel ranks */
    float x[SAMPLES][WIDTH];
    int64_t label[SAMPLES];
} given;

static void fill(given *g)
{
    for (int i = 0; i < SAMPLES * WIDTH; i++)
        g->x[i / WIDTH][i % WIDTH] = (float)((i * 7919 + 104729) % 1000) / 500.0f - 1.0f;
    for (int i = 0; i < SAMPLES; i++)
        g->label[i] = i == 5 ? AR_IGNORE_INDEX : (i * i) % CLASSES;
}

/* A module that is another one, which it does not own: a layer that stands in the model twice. */
typedef struct again {
    ar_module base;
    ar_module *of;
} again;

static ar_status again_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                               const ar_batch *b)
{
    return ar_module_forward(((again *)m)->of, ctx, saved, y, x, b);
}

static ar_status again_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                const ar_batch *b)
{
    return ar_module_backward(((again *)m)->of, ctx, saved, dx, dy, b);
}

static void again_destroy(ar_module *m)
{
    free(m);
}

static ar_status own_layer_again(ar_module **gives, ar_module *of)
{
    static const ar_module_ops ops = {
        .kind = "again", .forward = again_forward, .backward = again_backward, .destroy = again_destroy};
    again *a = calloc(1, sizeof *a);
    if (!a)
        return ar_error_set(AR_ERR_MEMORY, "again");
    a->of = of;
    *gives = &a->base;
    return ar_module_init(&a->base, &ops, "again", AR_HELD_UNKNOWN);
}

/* in (column) - activation - dropout - middle (row) - own layer (once or twice) - dropout - norm - out (column: classes
 * stay sharded) */
static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    const given *g = user;
    const ar_linear_options column = {.bias = true}, row = {.bias = true, .input_is_sharded = true};
    ar_module *m[MOST] = {NULL};
    ar_param *own[2] = {NULL};
    size_t n = 0;
    ar_status st = AR_OK;
    if (g->fails && ar_comm_size(ar_ctx_tp(ctx)) == 2)
        return ar_error_set(AR_ERR_UNSUPPORTED, "not on two ranks");
    AR_TRY_TO(failed, st, ar_column_linear_create(&m[n++], ctx, "in", WIDTH, 12, &column));
    AR_TRY_TO(failed, st, ar_activation_create(&m[n++], ctx, "act", g->act, AR_HELD_SHARD));
    AR_TRY_TO(failed, st, ar_dropout_create(&m[n++], ctx, "part", 1, 12, AR_HELD_SHARD));
    AR_TRY_TO(failed, st, ar_row_linear_create(&m[n++], ctx, "middle", 12, WIDTH, &row));
    AR_TRY_TO(failed, st, own_layer_create(&m[n++], ctx, "own", WIDTH, g->mistake));
    ar_module_params(m[n - 1], own, 2, false);
    own[1]->requires_grad = !g->frozen;
    if (g->twice)
        AR_TRY_TO(failed, st, own_layer_again(&m[n], m[n - 1]));
    n += g->twice;
    AR_TRY_TO(failed, st, ar_dropout_create(&m[n++], ctx, "drop", 1, WIDTH, AR_HELD_WHOLE));
    AR_TRY_TO(failed, st, ar_norm_create(&m[n++], ctx, "norm", AR_NORM_LAYER, WIDTH, 1e-5));
    AR_TRY_TO(failed, st, ar_column_linear_create(&m[n++], ctx, "out", WIDTH, CLASSES, &column));
    AR_TRY_TO(failed, st, ar_sequential_create(module, "net", m, n, true));
    AR_TRY(ar_module_fresh(*module, ctx, 3));
    if (g->other_scale)
        AR_TRY(ari_param_fresh(own[1], ctx, (uint64_t)ar_comm_rank(ar_ctx_tp(ctx))));
    if (g->drift)
        AR_TRY(ari_param_fresh(own[1], ctx, (uint64_t)++ * g->drift));
    return ar_cross_entropy_create(loss, ctx, "loss", CLASSES, AR_HELD_SHARD);
failed:
    for (size_t i = 0; i < MOST; i++)
        ar_module_destroy(m[i]);
    return st;
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    const given *g = user;
    (void)step;
    *b = (ar_batch){
        .batch = SAMPLES, .seq = 1, .input = g->x[0], .sample_ndim = 1, .sample_shape = {WIDTH}, .labels = g->label};
    return AR_OK;
}

/* Of two steps. */
static ar_check_module_options options(const ar_parallel *p, size_t layouts)
{
    return (ar_check_module_options){.parallel = p,
                                     .layouts = layouts,
                                     .run = {.steps = 2,
                                             .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                             .clip = 0.25,
                                             .dropout = 0.2,
                                             .loss = {.label_smoothing = 0.1, .z_loss = 0.01},
                                             .seed = 3}};
}

static ar_module_case case_of(given *g)
{
    fill(g);
    return (ar_module_case){.name = "net", .build = build, .batch = batch, .user = g};
}

static ar_check_report *check_with(given *g, const ar_check_module_options *o)
{
    ar_module_case c = case_of(g);
    ar_check_report *r = NULL;
    c.own_weights = g->other_scale || g->drift || g->mistake != OWN_RIGHT;
    cr_assert_ok(ar_check_module(&r, &c, o));
    return r;
}

/* The report of one layout. */
static ar_check_report *check_one(given *g, ar_parallel p)
{
    const ar_check_module_options o = options(&p, 1);
    return check_with(g, &o);
}

Test(check_module, a_right_module_has_the_same_bits_under_every_layout)
{
    static const ar_parallel layouts[] = {{.tp = 1},
                                          {.tp = 2},
                                          {.tp = 4},
                                          {.dp = 2, .micro_batches = 2},
                                          {.dp = 4},
                                          {.dp = 7, .forward_first = true},
                                          {.dp = 9}, /* two ranks without a sample */
                                          {.dp = 2, .tp = 2, .micro_batches = 4, .forward_first = true},
                                          {.dp = 3, .zero = 1},
                                          {.dp = 2, .tp = 2, .zero = 1}};
    enum { LAYOUTS = sizeof layouts / sizeof *layouts };
    const ar_ddp_options small_buckets = {.bucket_bytes = 200},
                         eager = {.bucket_bytes = 1000, .mode = AR_BUCKETS_EAGER};
    const ar_ddp_options *ddp[] = {NULL, &small_buckets, &eager};
    given g = {.mistake = OWN_RIGHT};
    char hash[65] = "";
    for (size_t k = 0; k < 3; k++) {
        ar_check_module_options o = options(layouts, LAYOUTS);
        o.ddp = ddp[k];
        OWNED(ar_check_report_destroy) ar_check_report *r = check_with(&g, &o);
        for (size_t i = 0; i < LAYOUTS; i++) {
            char text[96];
            ari_parallel_text(text, sizeof text, &layouts[i]);
            cr_expect_eq(r->run[i].result, AR_CHECK_SAME, "%s: %s %s %s", text, r->run[i].first.tensor,
                         r->run[i].error ? r->run[i].error : "", r->run[i].memory_difference);
            cr_expect_eq(memcmp(r->run[i].loss, r->loss, 2 * sizeof(float)), 0, "%s", text);
            cr_expect_str_eq(r->run[i].weights_hash, r->weights_hash);
        }
        cr_expect(k == 0 || strcmp(hash, r->weights_hash) == 0);
        memcpy(hash, r->weights_hash, sizeof hash);
    }
}

/* The user's mistakes without dropout, with weights of the user's own; the library's are named as in a model. */
Test(check_module, what_depends_on_the_layout_is_found_and_named)
{
    static const struct {
        own_mistake mistake;
        bool other_scale;
        const char *fault;
        ar_parallel parallel;
        const char *first; /* NULL: this layout cannot show it */
    } rows[] = {
        {OWN_SEES_THE_BATCH, false, NULL, {.dp = 2}, "own:fwd"},
        {OWN_SEES_THE_BATCH, false, NULL, {.micro_batches = 2}, "own:fwd"},
        {OWN_SEES_THE_BATCH, false, NULL, {.tp = 2}, NULL},
        {OWN_KEEPS_IN_ITSELF, false, NULL, {.micro_batches = 7, .forward_first = true}, "own.weight:grad"},
        {OWN_KEEPS_IN_ITSELF, false, NULL, {.dp = 2, .micro_batches = 2}, NULL},
        {OWN_PARTIAL_SUM, false, NULL, {.tp = 2}, "own:fwd"},
        {OWN_PARTIAL_SUM, false, NULL, {.dp = 2}, NULL},
        {OWN_RIGHT, true, NULL, {.tp = 2}, "own.scale:init"},
        {OWN_RIGHT, true, NULL, {.dp = 2}, NULL},
        {OWN_RIGHT, false, "column_dx_not_reduced", {.tp = 2}, "out:bwd"},
        {OWN_RIGHT, false, "dp_group_missing", {.dp = 2}, "out.bias:grad"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        given g = {.mistake = rows[i].mistake, .other_scale = rows[i].other_scale};
        ar_check_module_options o = options(&rows[i].parallel, 1);
        o.run.fault = rows[i].fault;
        o.run.dropout = rows[i].fault ? o.run.dropout : 0.0;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_with(&g, &o);
        const ar_check_run *run = &r->run[0];
        char text[4096];
        cr_expect_eq(run->result, rows[i].first ? AR_CHECK_DIFFERENT : AR_CHECK_SAME, "row %zu: %s", i,
                     run->error ? run->error : run->first.tensor);
        cr_expect_str_eq(run->first.tensor, rows[i].first ? rows[i].first : "", "row %zu", i);
        cr_expect_eq(run->has_difference, rows[i].first != NULL, "row %zu", i);
        ar_check_module_text(r, text, sizeof text);
        cr_expect(!rows[i].first || strstr(text, "first in step 1, "), "row %zu: %s", i, text);
    }
}

Test(check_module, values_that_change_from_run_to_run_are_told)
{
    atomic_int drift = 0;
    given g = {.drift = &drift};
    const ar_parallel two = {.tp = 2};
    ar_check_module_options o = options(&two, 1);
    o.explain = true;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_with(&g, &o);
    cr_expect_eq(r->run[0].result, AR_CHECK_DIFFERENT);
    cr_expect_str_eq(r->run[0].first.cause, "unordered_sum");
    cr_expect(strstr(r->run[0].first.hint, "other values the second time"), "%s", r->run[0].first.hint);
}

Test(check_module, a_layer_used_twice_is_compared_use_by_use)
{
    given g = {.mistake = OWN_RIGHT, .twice = true};
    ar_check_report *r = check_one(&g, (ar_parallel){.dp = 2, .tp = 2, .micro_batches = 2});
    const size_t twice = r->tensors;
    cr_expect_eq(r->result, AR_CHECK_SAME, "%s", r->run[0].first.tensor);
    ar_check_report_destroy(r);
    g = (given){.mistake = OWN_RIGHT};
    r = check_one(&g, (ar_parallel){.dp = 1});
    cr_expect_eq(twice, r->tensors + 4, "two activations and two gradients of them in two steps");
    ar_check_report_destroy(r);
}

Test(check_module, a_layout_that_cannot_be_built_is_an_error_of_that_run_alone)
{
    static const ar_parallel layouts[] = {{.tp = 2},
                                          {.dp = 2},
                                          {.tp = 4, .sp = true},
                                          {.cp = 2, .zigzag = true},
                                          {.dp = -1},
                                          {.dp = 2, .zero = 4},
                                          {.dp = 2, .micro_batches = -1},
                                          {.pp = 2},
                                          {.pp = 2, .virtual_stages = -2},
                                          {.dp = 2, .ep = 3},
                                          {.cp = 4, .cp_inner = 3},
                                          {.dp = 3, .dp_replicate = 2, .zero = 1},
                                          {.dp = 3}};
    static const char *const says[] = {"not on two ranks",
                                       NULL,
                                       "leave sp out",
                                       "leave cp out",
                                       "extents are at least 1",
                                       "zero=4",
                                       "extents are at least 1",
                                       "pp",
                                       "extents are at least 1",
                                       "ep=3",
                                       "3",
                                       "2",
                                       NULL};
    enum { LAYOUTS = sizeof layouts / sizeof *layouts };
    given g = {.mistake = OWN_RIGHT, .fails = true};
    const ar_check_module_options o = options(layouts, LAYOUTS);
    OWNED(ar_check_report_destroy) ar_check_report *r = check_with(&g, &o);
    char text[2048];
    for (size_t i = 0; i < LAYOUTS; i++) {
        cr_assert_eq(r->run[i].result, says[i] ? AR_CHECK_ERROR : AR_CHECK_SAME, "layout %zu: %d", i,
                     (int)r->run[i].result);
        cr_expect(!says[i] || strstr(r->run[i].error, says[i]), "layout %zu: %s", i, r->run[i].error);
    }
    cr_expect_eq(r->result, AR_CHECK_ERROR);
    ar_check_module_text(r, text, sizeof text);
    cr_expect_not_null(strstr(text, "ERROR"));
    cr_expect_not_null(strstr(text, "whether its mathematics is right, a gradcheck tells"));
}

Test(check_module, what_cannot_be_checked_is_refused)
{
    static const ar_parallel one = {.tp = 1};
    given g = {.mistake = OWN_RIGHT};
    ar_module_case c = case_of(&g);
    const ar_check_module_options right = options(&one, 1);
    ar_check_module_options o[] = {right, right, right, right};
    static const ar_status status[] = {AR_ERR_ARG, AR_ERR_ARG, AR_ERR_UNSUPPORTED, AR_ERR_UNSUPPORTED};
    ar_check_report *r = NULL;
    o[0].layouts = 0;
    o[1].run.steps = UINT64_C(1) << 32;
    o[2].run.numerics = AR_NUMERICS_NATIVE;
    o[3].run.sim.explore = true;
    for (size_t i = 0; i < sizeof o / sizeof *o; i++)
        cr_expect_eq(ar_check_module(&r, &c, &o[i]), status[i], "case %zu", i);
    g.label[2] = CLASSES;
    cr_expect_refused(ar_check_module(&r, &c, &right), AR_ERR_DATA, "labels[2, 0] is 4");
    c.build = NULL;
    cr_expect_eq(ar_check_module(&r, &c, &right), AR_ERR_ARG);
    cr_expect_null(r);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static ar_gradcheck_module_report *gradcheck(given *g, uint64_t seed)
{
    const ar_module_case c = case_of(g);
    const ar_check_module_options o = {.run.dropout = 0.2, .run.seed = seed};
    ar_gradcheck_module_report *r = NULL;
    cr_assert_ok(ar_gradcheck_module(&r, &c, &o));
    return r;
}

/* The tensor's row, or one without probes. */
static ar_gradcheck_tensor tensor_of(const ar_gradcheck_module_report *r, const char *name)
{
    for (size_t i = 0; i < r->tensors; i++) {
        if (strcmp(r->tensor[i].name, name) == 0)
            return r->tensor[i];
    }
    return (ar_gradcheck_tensor){0};
}

Test(check_module, right_gradients_agree_with_differences_whatever_the_seed)
{
    const uint64_t seeds = (uint64_t)by_scale(4, 8, 24);
    for (uint64_t seed = 0; seed < seeds; seed++) {
        given g = {.mistake = OWN_RIGHT, .twice = seed % 2 == 1, .act = (ar_activation)(seed % AR_ACT_NONE)};
        OWNED(free) ar_gradcheck_module_report *r = gradcheck(&g, seed);
        char text[4096];
        ari_gradcheck_module_text(r, text, sizeof text);
        cr_expect(r->ok, "seed %d: %s", (int)seed, text);
        cr_expect_eq(r->tensors, 11u);
        cr_expect(tensor_of(r, "input").probes >= 3);
    }
}

Test(check_module, a_wrong_backward_pass_disagrees_and_the_tensor_is_named)
{
    static const struct {
        own_mistake mistake;
        const char *wrong, *right;
    } rows[] = {{OWN_FORGETS_FACTOR, "own.weight", "own.scale"},
                {OWN_FORGETS_GRADIENT, "own.scale", "own.weight"},
                {OWN_HALF_GRADIENT, "own.scale", "in.weight"},
                {OWN_ONE_ELEMENT, "own.scale", "middle.bias"},
                {OWN_WRONG_DX, "middle.bias", "own.weight"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        for (uint64_t seed = 0; seed < (uint64_t)by_scale(1, 2, 4); seed++) {
            given g = {.mistake = rows[i].mistake};
            OWNED(free) ar_gradcheck_module_report *r = gradcheck(&g, seed);
            cr_expect(!r->ok, "mistake %zu", i);
            cr_expect_gt(tensor_of(r, rows[i].wrong).wrong, 0u, "mistake %zu, seed %d", i, (int)seed);
            cr_expect_eq(tensor_of(r, rows[i].right).wrong, 0u, "mistake %zu, seed %d", i, (int)seed);
        }
    }
}

Test(check_module, a_frozen_parameter_keeps_its_bits_and_is_not_asked_for_its_gradient)
{
    given right = {.mistake = OWN_RIGHT, .frozen = true}, g = {.mistake = OWN_FORGETS_GRADIENT, .frozen = true};
    OWNED(ar_check_report_destroy) ar_check_report *same = check_one(&right, (ar_parallel){.dp = 2, .zero = 1});
    cr_expect_eq(same->result, AR_CHECK_SAME, "%s", same->run[0].first.tensor);
    OWNED(free) ar_gradcheck_module_report *r = gradcheck(&g, 1);
    cr_expect(r->ok);
    cr_expect_eq(tensor_of(r, "own.scale").probes, 0u);
}
