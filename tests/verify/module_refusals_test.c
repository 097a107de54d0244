/* SPDX-License-Identifier: Apache-2.0 */
/* What a new user gives by mistake to a module, a list, a plan or a run: refused by name, and never a crash. */
#include "anyrank/check_module.h"
#include "anyrank/grads.h"
#include "anyrank/plan_walk.h"
#include "anyrank/training.h"
#include "ref/layers/layers_private.h"
#include "support/rank_run.h"
#include "support/together.h"

/* --- layers, on one rank ------------------------------------------------------------------------------------------ */

/* The first call that was not refused as expected, in the message. */
#define REFUSED(code, call, says)                                                                  \
    do {                                                                                           \
        const ar_status got = (call);                                                              \
        if (got != (code) || !strstr(ar_error_message(), (says)))                                  \
            return ar_error_set(AR_ERR_INTERNAL, "line %d: %s: %s", __LINE__, ar_status_name(got), \
                                got == AR_OK ? "accepted" : ar_error_message());                   \
    } while (0)

static ar_status refuse_layers(ar_ctx *ctx, void *user)
{
    ar_module *m = NULL, *hole[2] = {NULL, NULL};
    ar_ddp *d = NULL;
    ar_param p = {0};
    ar_tensor x;
    ar_plan_walk w = {.plan = NULL};
    const ar_ddp_options ddp = ar_ddp_defaults();
    (void)user;
    AR_TRY(rank_upload(ctx, &x, 2, (size_t[]){1, 4}, (const float[]){1, 2, 3, 4}));
    REFUSED(AR_ERR_ARG, ar_sequential_create(&m, "list", NULL, 2, false), "list: a list of 2 modules is NULL");
    REFUSED(AR_ERR_ARG, ar_sequential_made(&m, "list", NULL, 2, AR_OK), "list: a list of 2 modules is NULL");
    REFUSED(AR_ERR_ARG, ar_sequential_made(&m, "list", hole, 2, AR_OK), "list: child 0 of 2 is NULL");
    REFUSED(AR_ERR_ARG, ari_residual_create(&m, "sum", NULL, AR_HELD_WHOLE, false), "sum: a residual without a branch");
    REFUSED(AR_ERR_ARG, ar_ddp_create(&d, ctx, NULL, &ddp), "a module that is NULL");
    REFUSED(AR_ERR_ARG, ar_module_forward(NULL, ctx, NULL, &x, &x, NULL), "a module that is NULL");
    REFUSED(AR_ERR_ARG, ar_plan_prepare_create(&m, ctx, &w, "own", -7, NULL), "own: argument -7");
    REFUSED(AR_ERR_SHAPE, ar_param_init_whole(&p, ctx, "m", "w", 2, (size_t[]){0, 4}, AR_INIT_NORMAL), "no elements");
    REFUSED(AR_ERR_SHAPE, ar_norm_create(&m, ctx, "norm", AR_NORM_RMS, 0, 1e-5), "norm.weight: shape [0]");
    REFUSED(AR_ERR_SHAPE, ar_mlp_create(&m, ctx, "mlp", &(ar_mlp_options){.hidden = 0}), "no elements");
    REFUSED(AR_ERR_SHAPE, ar_embedding_create(&m, ctx, AR_EMBEDDING_VOCAB, "e", 0, 4, 0.5, NULL, 0, NULL), "e.weight");
    REFUSED(AR_ERR_SHAPE, ar_plan_linear_create(&m, ctx, &w, "up", 0, 0, true), "up.weight");
    REFUSED(AR_ERR_ARG, ar_contract_backward_all(ctx, &x, &x, &x, NULL, 0), "0 weights");
    return AR_OK;
}

CLAIM(layers_of_nothing_are_refused_by_name)
{
    cr_expect_ok(rank_run(&(ar_run){.parallel.tp = 1}, refuse_layers, NULL));
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

static ar_status build(void *user, ar_ctx *ctx, ar_module **module, ar_loss **loss)
{
    (void)user;
    AR_TRY(ar_norm_create(module, ctx, "norm", AR_NORM_RMS, 4, 1e-5));
    return ar_squared_error_create(loss, ctx, "loss");
}

static ar_status batch(void *user, int step, ar_batch *b)
{
    static const float x[2 * 4] = {1, 2, 3, 4, 5, 6, 7, 8};
    (void)user, (void)step;
    *b = (ar_batch){.batch = 2, .seq = 1, .input = x, .sample_ndim = 1, .sample_shape = {4}, .target = x};
    b->target_width = 4;
    return AR_OK;
}

static const ar_module_case right = {.name = "net", .build = build, .batch = batch};

CLAIM(illegal_layouts_of_a_training_run_are_refused_before_a_rank_runs)
{
    static const struct {
        ar_parallel parallel;
        const char *says;
    } rows[] = {{{.tp = -3}, "extents are at least 1"},
                {{.micro_batches = -1}, "extents are at least 1"},
                {{.zero = 7}, "zero=7"},
                {{.dp = 2, .dp_replicate = 3, .zero = 1}, "replicas"},
                {{.ep = 2}, "ep=2 does not divide the 1 ranks"},
                {{.recompute = {(ar_recompute)9, 1}}, "recompute 9"},
                {{.overlap = -1}, "overlap=-1"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ar_training_options o = ar_training_defaults();
        ar_training_report *r = NULL;
        o.module = &right;
        o.run.parallel = rows[i].parallel;
        cr_expect_neq(ar_train_run(&r, &o), AR_OK, "row %zu", i);
        cr_expect_says(rows[i].says);
        cr_expect_null(strstr(ar_error_message(), "rank 0 failed"), "%s", ar_error_message());
    }
}

CLAIM(options_that_are_missing_are_refused)
{
    ar_training_report *r = NULL;
    ar_check_report *c = NULL;
    ar_training_options o = ar_training_defaults();
    cr_expect_eq(ar_train_run(&r, NULL), AR_ERR_ARG);
    cr_expect_eq(ar_check_module(&c, &right, &(ar_check_module_options){.layouts = 2}), AR_ERR_ARG);
    cr_expect_says("a check needs at least one layout");
    o.module = &right;
    o.run.placements = (ar_declared_check)9;
    cr_expect_eq(ar_train_run(&r, &o), AR_ERR_ARG);
    cr_expect_says("placements 9");
}

CLAIM(enumerators_that_are_none_are_refused)
{
    static const struct {
        ar_run run;
        const char *says;
    } rows[] = {{{.numerics = (ar_numerics)6}, "numerics 6, expected 0 to 1"},
                {{.precision = (ar_precision)9}, "precision 9"},
                {{.storage = AR_I64}, "storage 18"},
                {{.placements = (ar_declared_check)3}, "placements 3"},
                {{.sim.algorithm = (ar_sim_algorithm)4}, "algorithm 4, expected 0 to 3"},
                {{.sim.paced = true}, "links are paced by a cluster"},
                {{.device = {AR_DEVICE_KINDS, 0}}, "device 3"},
                {{.plan.mlp_order = (ar_mlp_order)2}, "order of the MLP 2"}};
    ar_check_report *r = NULL;
    ar_grads_result g;
    ar_config c;
    cr_assert_ok(ar_config_load(&c, TEST_GOLDEN_DIR "/llama-mqa-tied-tiny"));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        ar_run run = rows[i].run;
        run.batch = 1;
        run.seq = 2;
        cr_expect_refused(ar_run_check(&run, &c), AR_ERR_ARG, rows[i].says);
    }
    const ar_run unknown = {.batch = 1, .seq = 2, .fault = "none"};
    cr_expect_refused(ar_run_check(&unknown, &c), AR_ERR_NOT_FOUND, "there is no fault 'none'");
    ar_run far = {.batch = 1, .seq = 2, .device = {AR_DEVICE_CUDA, 1000}};
    cr_expect(ar_run_check(&far, &c) != AR_OK, "there is no such GPU");
    const ar_check_options none = {.run = {.model = TEST_GOLDEN_DIR "/llama-mqa-tied-tiny", .batch = 1, .seq = 2},
                                   .layouts = 1};
    cr_expect_refused(ar_check(&r, &none), AR_ERR_ARG, "a check needs at least one layout");
    const ar_grads_options of = {.run.model = "x", .input = "x", .out = "/tmp", .sensitivity_of = AR_SENSITIVITY_COUNT};
    cr_expect_refused(ar_grads(&g, &of), AR_ERR_ARG, "arithmetic of the sensitivity 6, expected 0 to 5");
}

EVERY_CLAIM(module_refusals)
