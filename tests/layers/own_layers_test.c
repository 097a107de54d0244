/* SPDX-License-Identifier: Apache-2.0 */
/* What layers and losses of one's own are made of. */
#include "anyrank/activation.h"
#include "anyrank/context.h"
#include "anyrank/layers.h"
#include "anyrank/loss.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/module_private.h"
#include "ref/layers/param_private.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

/* One rank without peers. */
typedef struct alone {
    ar_device *device;
    ar_ctx *ctx;
    ar_saved *saved;
} alone;

static alone begin(void)
{
    alone a = {NULL};
    cr_assert_ok(ar_device_cpu_create(&a.device, 1));
    cr_assert_ok(ar_ctx_create(&a.ctx, &(ar_ctx_options){.device = a.device}));
    cr_assert_ok(ar_saved_create(&a.saved));
    return a;
}

static void end(alone *a)
{
    ar_saved_destroy(a->saved);
    ar_ctx_destroy(a->ctx);
    ar_device_destroy(a->device);
}

static ar_tensor tensor(alone *a, int ndim, const size_t *shape, const float *values)
{
    ar_tensor t;
    cr_assert_ok(ar_ctx_tensor(a->ctx, &t, AR_F32, ndim, shape));
    cr_assert_ok(ar_ctx_upload(a->ctx, &t, values));
    return t;
}

static void expect_values(alone *a, const ar_tensor *t, const float *expected)
{
    float got[64];
    cr_assert_leq(ar_tensor_count(t), 64u);
    cr_assert_ok(ar_ctx_download(a->ctx, got, t));
    for (size_t i = 0; i < ar_tensor_count(t); i++)
        cr_expect_eq(got[i], expected[i], "element %zu is %g, expected %g", i, (double)got[i], (double)expected[i]);
}

static size_t targets_of(const ar_loss *loss, const ar_ctx *ctx, const ar_batch *batch)
{
    size_t count = 0;
    cr_assert_ok(ar_loss_targets(&count, loss, ctx, batch));
    return count;
}

/* --- the context -------------------------------------------------------------------------------------------------- */

Test(own_layers, the_end_of_a_step_frees_its_memory)
{
    SCOPED(end) alone a = begin();
    size_t now = 0, first = 0, peak = 0;
    for (uint32_t step = 1; step <= 1000; step++) {
        ar_ctx_begin_step(a.ctx, step);
        const ar_tensor x = tensor(&a, 1, (size_t[]){16}, (float[16]){0});
        ar_tensor y;
        cr_assert_ok(ar_add(a.ctx, &y, &x, &x));
        ar_ctx_memory(a.ctx, &now, &peak);
        cr_expect_eq(now, 128u);
        ar_ctx_end_step(a.ctx);
        ar_ctx_memory(a.ctx, &now, NULL);
        first = step == 1 ? peak : first;
        cr_assert_eq(now, 0u);
    }
    cr_expect_eq(peak, first);
}

Test(own_layers, host_memory_of_another_length_is_refused)
{
    SCOPED(end) alone a = begin();
    float host[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    const ar_tensor t = tensor(&a, 2, (size_t[]){2, 4}, host);
    host[7] = -1;
    cr_expect_refused(ar_ctx_download_floats(a.ctx, host, 7, &t), AR_ERR_SHAPE,
                      "download of a tensor of 8 elements to memory for 7 numbers");
    cr_expect_eq(host[7], -1);
    cr_expect_refused(ar_ctx_upload_floats(a.ctx, &t, host, 7), AR_ERR_SHAPE,
                      "upload of 7 numbers to a tensor of 8 elements");
    cr_assert_ok(ar_ctx_upload_floats(a.ctx, &t, host, 8));
    cr_assert_ok(ar_ctx_download_floats(a.ctx, host, 8, &t));
    expect_values(&a, &t, (float[]){1, 2, 3, 4, 5, 6, 7, -1});
}

/* --- losses ------------------------------------------------------------------------------------------------------- */

enum { ROWS = 3, CLASSES = 4 };
static const float logits[ROWS * CLASSES] = {1, 2, 3, 4, 0.5f, -1, 0, 2, -3, 3, 1, 1};
static const int64_t labels[ROWS] = {3, 0, AR_IGNORE_INDEX};
static const ar_batch classified = {.batch = ROWS, .seq = 1, .labels = labels};

Test(own_layers, cross_entropy_is_the_mean_of_minus_log_softmax_of_the_labels)
{
    SCOPED(end) alone a = begin();
    OWNED(ar_loss_destroy) ar_loss *loss = NULL;
    ar_tensor dy;
    const size_t shape[2] = {ROWS, CLASSES};
    const ar_tensor y = tensor(&a, 2, shape, logits);
    float value = 0.0f, d[ROWS * CLASSES];
    cr_assert_ok(ar_cross_entropy_create(&loss, a.ctx, "loss", CLASSES, AR_HELD_WHOLE));
    cr_expect_eq(targets_of(loss, a.ctx, &classified), 2u);
    cr_assert_ok(ar_loss_forward(loss, a.ctx, a.saved, &y, &classified));
    cr_assert_ok(ar_loss_backward(loss, a.ctx, a.saved, &dy, &classified));
    cr_assert_ok(ar_loss_value(loss, a.ctx, &value, 2));
    cr_assert_ok(ar_ctx_download(a.ctx, d, &dy));
    double expected = 0.0;
    for (size_t r = 0; r < 2; r++) {
        double sum = 0.0;
        for (size_t k = 0; k < CLASSES; k++)
            sum += exp((double)logits[r * CLASSES + k]);
        expected += log(sum) - (double)logits[r * CLASSES + (size_t)labels[r]];
        for (size_t k = 0; k < CLASSES; k++) {
            const double p = exp((double)logits[r * CLASSES + k]) / sum - (k == (size_t)labels[r]);
            /* exp, the division, the subtraction and the division by T round once each */
            cr_expect_float_eq((double)d[r * CLASSES + k], p / 2.0, 4 * 0x1p-24);
        }
    }
    cr_expect_float_eq((double)value, expected / 2.0, 4 * 0x1p-24 * expected);
    for (size_t k = 0; k < CLASSES; k++)
        cr_expect_eq(d[2 * CLASSES + k], 0.0f, "a row that is ignored");
}

typedef struct shard_job {
    bool sharded;
    float loss, d[ROWS * CLASSES]; /* d: the full gradient; each rank writes its own columns */
} shard_job;

static ar_status shard_rank(ar_ctx *ctx, void *user)
{
    shard_job *j = user;
    const size_t n = j->sharded ? ranks_of(ctx) : 1, r = j->sharded ? rank_of(ctx) : 0, width = CLASSES / n;
    const size_t shape[2] = {ROWS, width};
    float own[ROWS * CLASSES], value = 0.0f;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    OWNED(ar_loss_destroy) ar_loss *loss = NULL;
    ar_tensor y, dy;
    for (size_t i = 0; i < ROWS * width; i++)
        own[i] = logits[i / width * CLASSES + r * width + i % width];
    AR_TRY(ar_saved_create(&saved));
    AR_TRY(ar_cross_entropy_create(&loss, ctx, "loss", CLASSES, j->sharded ? AR_HELD_SHARD : AR_HELD_WHOLE));
    AR_TRY(rank_upload(ctx, &y, 2, shape, own));
    AR_TRY(ar_loss_forward(loss, ctx, saved, &y, &classified));
    AR_TRY(ar_loss_backward(loss, ctx, saved, &dy, &classified));
    AR_TRY(ar_loss_value(loss, ctx, &value, 2));
    AR_TRY(ar_ctx_download(ctx, own, &dy));
    if (rank_of(ctx) == 0)
        j->loss = value;
    for (size_t i = 0; (j->sharded || rank_of(ctx) == 0) && i < ROWS * width; i++)
        j->d[i / width * CLASSES + r * width + i % width] = own[i];
    return AR_OK;
}

static void expect_same_loss(const ar_loss_options *o)
{
    shard_job one = {0};
    cr_assert_ok(rank_run(&(ar_run){.parallel.tp = 1, .loss = *o}, shard_rank, &one));
    for (int ranks = 2; ranks <= 4; ranks += 2) {
        for (int sharded = 0; sharded < 2; sharded++) {
            shard_job j = {.sharded = sharded};
            cr_assert_ok(rank_run(&(ar_run){.parallel.tp = ranks, .loss = *o}, shard_rank, &j));
            cr_expect_eq(memcmp(&j.loss, &one.loss, sizeof j.loss), 0, "%d ranks, %d", ranks, sharded);
            cr_expect_eq(memcmp(j.d, one.d, sizeof j.d), 0, "%d ranks, %d", ranks, sharded);
        }
    }
}

Test(own_layers, a_classifiers_loss_has_the_same_bits_whoever_holds_the_logits)
{
    expect_same_loss(&(ar_loss_options){0});
    expect_same_loss(&(ar_loss_options){.label_smoothing = 0.2, .z_loss = 0.1});
    shard_job j = {.sharded = true};
    /* Ranks 0 to 2 of 3 have 2, 2 and none of the classes: one each does not fit. */
    cr_expect_eq(rank_run(&(ar_run){.parallel.tp = 3}, shard_rank, &j), AR_ERR_SHAPE);
}

Test(own_layers, labels_that_do_not_fit_are_named)
{
    static const int64_t wrong[ROWS] = {0, 1, CLASSES};
    SCOPED(end) alone a = begin();
    ar_loss *loss = NULL;
    const size_t shape[2] = {ROWS, CLASSES}, narrow[2] = {ROWS, CLASSES - 1};
    const ar_tensor y = tensor(&a, 2, shape, logits), thin = tensor(&a, 2, narrow, logits);
    ar_batch b = classified;
    cr_assert_ok(ar_cross_entropy_create(&loss, a.ctx, "loss", CLASSES, AR_HELD_WHOLE));
    b.labels = wrong;
    cr_expect_refused(ar_loss_forward(loss, a.ctx, NULL, &y, &b), AR_ERR_DATA,
                      "labels[2, 0] is 4, neither a class below 4 nor -100");
    b = classified;
    b.batch = 2;
    cr_expect_eq(ar_loss_forward(loss, a.ctx, NULL, &y, &b), AR_ERR_SHAPE);
    b.labels = NULL;
    cr_expect_eq(ar_loss_forward(loss, a.ctx, NULL, &y, &b), AR_ERR_SHAPE);
    cr_expect_eq(ar_loss_forward(loss, a.ctx, NULL, &thin, &classified), AR_ERR_SHAPE);
    ar_loss_destroy(loss);
    cr_expect_eq(ar_cross_entropy_create(&loss, a.ctx, "loss", 0, AR_HELD_WHOLE), AR_ERR_ARG);
    cr_expect_eq(ar_cross_entropy_create(&loss, a.ctx, "loss", 2, AR_HELD_UNKNOWN), AR_ERR_ARG);
}

Test(own_layers, squared_error_is_the_mean_over_elements)
{
    static const float given[4] = {1, 2, 3, 5}, wanted[4] = {1, 1, 1, 1}, expected[4] = {0, 0.5f, 1, 2};
    static const ar_batch b = {.batch = 2, .target = wanted, .target_width = 2};
    SCOPED(end) alone a = begin();
    OWNED(ar_loss_destroy) ar_loss *loss = NULL;
    ar_tensor dy;
    const size_t shape[2] = {2, 2};
    const ar_tensor y = tensor(&a, 2, shape, given);
    float value = 0.0f;
    cr_assert_ok(ar_squared_error_create(&loss, a.ctx, "loss"));
    cr_assert_ok(ar_loss_forward(loss, a.ctx, a.saved, &y, &b));
    cr_assert_ok(ar_loss_backward(loss, a.ctx, a.saved, &dy, &b));
    cr_assert_ok(ar_loss_value(loss, a.ctx, &value, targets_of(loss, a.ctx, &b)));
    cr_expect_eq(value, 5.25f);
    expect_values(&a, &dy, expected);
    const ar_batch other = {.batch = 2, .target = wanted, .target_width = 1};
    cr_expect_eq(ar_loss_forward(loss, a.ctx, NULL, &y, &other), AR_ERR_SHAPE);
}

/* A loss of a user's: the mean of all outputs. */
static size_t mean_targets(const void *self, const ar_batch *batch)
{
    return batch->batch * *(const size_t *)self;
}

static ar_status mean_forward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                              const ar_batch *batch)
{
    (void)batch;
    AR_TRY(ar_saved_push(saved, self, 0, y));
    return ar_loss_add(loss, ctx, y);
}

static ar_status mean_backward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                               const ar_batch *batch, double t)
{
    ar_tensor y;
    (void)loss, (void)batch;
    AR_TRY(ar_saved_pop(saved, self, 0, &y));
    AR_TRY(ar_like(ctx, dy, &y));
    return ar_ctx_device(ctx)->ops->fill(ar_ctx_device(ctx), ar_ctx_queue(ctx), dy, (float)(1.0 / t));
}

Test(own_layers, a_loss_of_ones_own_adds_up_over_micro_batches)
{
    static const ar_loss_ops ops = {
        .kind = "mean", .targets = mean_targets, .forward = mean_forward, .backward = mean_backward, .destroy = free};
    static const float first[2] = {1, 2}, second[4] = {3, 4, 5, 9}, sixth[2] = {1.0f / 6, 1.0f / 6};
    const ar_batch micro[2] = {{.batch = 1, .global_batch = 3, .targets = 6},
                               {.batch = 2, .global_batch = 3, .first_sample = 1, .targets = 6}};
    SCOPED(end) alone a = begin();
    size_t *width = malloc(sizeof *width);
    cr_assert_not_null(width);
    *width = 2;
    ar_loss *loss = NULL;
    ar_tensor dy;
    float value = 0.0f;
    const ar_tensor y[2] = {tensor(&a, 2, (size_t[]){1, 2}, first), tensor(&a, 2, (size_t[]){2, 2}, second)};
    cr_assert_ok(ar_loss_create(&loss, a.ctx, "mean", &ops, width));
    cr_expect_eq(targets_of(loss, a.ctx, &micro[1]), 4u);
    for (size_t i = 0; i < 2; i++) {
        cr_assert_ok(ar_loss_forward(loss, a.ctx, a.saved, &y[i], &micro[i]));
        cr_assert_ok(ar_loss_backward(loss, a.ctx, a.saved, &dy, &micro[i]));
    }
    cr_assert_ok(ar_loss_value(loss, a.ctx, &value, 6));
    cr_expect_eq(value, 4.0f);
    dy.shape[0] = 1;
    expect_values(&a, &dy, sixth);
    ar_loss_destroy(loss);
    const ar_loss_ops half = {.kind = "half", .destroy = free};
    cr_expect_eq(ar_loss_create(&loss, a.ctx, "half", &half, malloc(1)), AR_ERR_ARG);
}

/* --- layers ------------------------------------------------------------------------------------------------------- */

/* The first gradient of each parameter of the module. */
static void first_gradients(alone *a, ar_module *m, float out[4])
{
    ar_param *p[4];
    cr_assert_eq(ar_module_params(m, p, 4, false), 4u);
    for (size_t i = 0; i < 4; i++) {
        float values[4];
        ar_tensor g;
        cr_assert_ok(ar_ctx_tensor(a->ctx, &g, AR_F32, p[i]->value.ndim, p[i]->value.shape));
        cr_assert_ok(ar_param_grad_value(p[i], a->ctx, &g));
        cr_assert_ok(ar_ctx_download(a->ctx, values, &g));
        out[i] = values[0];
    }
}

Test(own_layers, zeroing_clears_the_gradients_of_all_children_and_of_frozen_parameters)
{
    static const float ones[4] = {1, 1, 1, 1};
    const ar_linear_options o = {.bias = true};
    SCOPED(end) alone a = begin();
    OWNED(ar_module_destroy) ar_module *s = NULL;
    ar_module *child[2] = {NULL};
    ar_param *p[4];
    float before[4], after[4];
    ar_tensor y;
    const ar_tensor x = tensor(&a, 2, (size_t[]){2, 2}, ones);
    for (size_t i = 0; i < 2; i++)
        cr_assert_ok(ar_column_linear_create(&child[i], a.ctx, i ? "b" : "a", 2, 2, &o));
    cr_assert_ok(ar_sequential_create(&s, "s", child, 2, true));
    cr_assert_ok(ar_module_fresh(s, a.ctx, 1));
    cr_assert_ok(ar_module_forward(s, a.ctx, a.saved, &y, &x, NULL));
    cr_assert_ok(ar_module_backward(s, a.ctx, a.saved, NULL, &x, NULL));
    first_gradients(&a, s, before);
    cr_assert_eq(ar_module_params(s, p, 4, false), 4u);
    p[3]->requires_grad = false;
    cr_assert_ok(ar_module_zero_grad(s, a.ctx));
    first_gradients(&a, s, after);
    for (size_t i = 0; i < 4; i++) {
        cr_expect(before[i] != 0.0f && after[i] == 0.0f, "%s: %g, then %g", p[i]->name, (double)before[i],
                  (double)after[i]);
        cr_expect_not(p[i]->has_grad, "%s", p[i]->name);
    }
}

Test(own_layers, layers_of_a_sequence_follow_each_other_forward_and_back)
{
    static const float in[4] = {-1, 2, -3, 4}, relu[4] = {0, 2, 0, 4}, dy[4] = {5, 6, 7, 8}, back[4] = {0, 6, 0, 8};
    SCOPED(end) alone a = begin();
    ar_module *child[2] = {NULL}, *s = NULL, *nothing = NULL;
    ar_tensor y, dx;
    const size_t shape[2] = {2, 2};
    const ar_tensor x = tensor(&a, 2, shape, in), d = tensor(&a, 2, shape, dy);
    for (size_t i = 0; i < 2; i++)
        cr_assert_ok(ar_activation_create(&child[i], a.ctx, i ? "b" : "a", AR_ACT_RELU, AR_HELD_WHOLE));
    cr_assert_ok(ar_sequential_create(&s, "s", child, 2, false));
    cr_assert_ok(ar_module_forward(s, a.ctx, a.saved, &y, &x, NULL));
    expect_values(&a, &y, relu);
    cr_assert_ok(ar_module_backward(s, a.ctx, a.saved, &dx, &d, NULL));
    expect_values(&a, &dx, back);
    cr_expect_eq(ar_module_backward(s, a.ctx, a.saved, &dx, &d, NULL), AR_ERR_ARG, "nothing is saved any more");
    cr_assert_ok(ar_sequential_create(&nothing, "nothing", NULL, 0, true));
    cr_assert_ok(ar_module_forward(nothing, a.ctx, a.saved, &y, &x, NULL));
    expect_values(&a, &y, in);
    ar_module_destroy(nothing);
    ar_module_destroy(s); /* borrowed children live on */
    cr_assert_ok(ar_sequential_create(&s, "s", child, 2, true));
    ar_module_destroy(s);
    ar_module *hole[2] = {NULL, NULL};
    cr_expect_eq(ar_sequential_create(&s, "s", hole, 2, true), AR_ERR_ARG);
}

/* Counts the modules that are destroyed. */
static int destroyed;

static ar_status no_pass(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    (void)m, (void)ctx, (void)saved, (void)batch;
    *y = *x;
    return AR_OK;
}

static void count_destroyed(ar_module *m)
{
    (void)m;
    destroyed++;
}

Test(own_layers, a_chain_of_creations_leaves_nothing_where_it_fails)
{
    static const ar_module_ops ops = {"none", no_pass, no_pass, .destroy = count_destroyed};
    ar_module one, *child[2] = {&one, NULL}, *s = NULL;
    cr_assert_ok(ar_module_init(&one, &ops, "one", AR_HELD_WHOLE));
    cr_expect_eq(ar_sequential_made(&s, "s", child, 2, AR_ERR_MEMORY), AR_ERR_MEMORY);
    cr_expect_eq(destroyed, 1);
    cr_expect_eq(ar_sequential_made(&s, "s", child, 2, AR_OK), AR_ERR_ARG); /* the second is missing */
    cr_expect_eq(destroyed, 2);
    cr_expect_eq(ar_residual_made(&s, "r", child, 2, AR_HELD_WHOLE, AR_OK), AR_ERR_ARG);
    cr_expect_eq(destroyed, 3);
    cr_expect_null(s);
    cr_assert_ok(ar_residual_made(&s, "r", child, 1, AR_HELD_WHOLE, AR_OK));
    ar_module_destroy(s);
    cr_expect_eq(destroyed, 4);
}

static ar_status gradient_of_rows(alone *a, float *dw, int ndim, const size_t *shape, const ar_batch *b)
{
    static const float in[6] = {0.1f, -2, 3, 0.7f, 1e3f, -1e-3f}, out[9] = {1, 0.3f, -1, 2, 0.1f, 5, -7, 0.9f, 1e-4f};
    OWNED(ar_module_destroy) ar_module *m = NULL;
    ar_param *w = NULL;
    ar_tensor x = tensor(a, ndim, shape, in), y, dx;
    size_t wide[3] = {shape[0], shape[1], shape[2]};
    wide[ndim - 1] = 3;
    const ar_tensor dy = tensor(a, ndim, wide, out);
    AR_TRY(ar_column_linear_create(&m, a->ctx, "m", 2, 3, &(ar_linear_options){.gather_output = true}));
    ar_module_params(m, &w, 1, false);
    AR_TRY(ar_module_fresh(m, a->ctx, 1));
    AR_TRY(ar_module_forward(m, a->ctx, a->saved, &y, &x, b));
    AR_TRY(ar_module_backward(m, a->ctx, a->saved, &dx, &dy, b));
    return rank_read_gradient(a->ctx, dw, w);
}

Test(own_layers, rows_of_a_global_batch_are_samples_and_others_one_samples_tokens)
{
    static const ar_batch all = {.batch = 3, .seq = 1, .global_batch = 3};
    const size_t flat[3] = {3, 2, 0}, samples[3] = {3, 1, 2}, tokens[3] = {1, 3, 2};
    float placed[6], by_sample[6], bare[6], by_token[6];
    SCOPED(end) alone a = begin();
    cr_assert_ok(gradient_of_rows(&a, bare, 2, flat, NULL));
    cr_assert_ok(gradient_of_rows(&a, by_token, 3, tokens, NULL));
    cr_assert_ok(gradient_of_rows(&a, by_sample, 3, samples, NULL));
    cr_assert_ok(gradient_of_rows(&a, placed, 2, flat, &all));
    cr_expect_eq(memcmp(placed, by_sample, sizeof placed), 0);
    cr_expect_eq(memcmp(bare, by_token, sizeof bare), 0);
    cr_expect_neq(memcmp(placed, bare, sizeof bare), 0, "a sum rounded once is not one rounded sample by sample");
}

Test(own_layers, normal_values_are_not_all_zero)
{
    SCOPED(end) alone a = begin();
    ar_param w;
    float values[4];
    cr_assert_ok(ar_param_init_whole(&w, a.ctx, "m", "weight", 2, (size_t[]){2, 2}, AR_INIT_NORMAL));
    cr_assert_ok(ari_param_fresh(&w, a.ctx, 5));
    cr_assert_ok(ar_ctx_download(a.ctx, values, &w.value));
    for (int i = 0; i < 4; i++)
        cr_expect(values[i] != 0.0f && fabsf(values[i]) < 0.12f, "%g", (double)values[i]);
    ar_param_fini(&w);
}

Test(own_layers, a_product_with_a_whole_matrix_has_the_bits_of_a_linear_layer)
{
    static const float in[6] = {0.1f, -2, 3, 0.7f, 1e3f, -1e-3f};
    const size_t shape[2] = {3, 2}, square[2] = {2, 2};
    SCOPED(end) alone a = begin();
    OWNED(ar_module_destroy) ar_module *linear = NULL;
    ar_param w, *other = NULL;
    ar_tensor y, expected, dx, dx_expected;
    float values[6];
    const ar_tensor x = tensor(&a, 2, shape, in);
    cr_assert_ok(ar_column_linear_create(&linear, a.ctx, "m", 2, 2, &(ar_linear_options){.bias = false}));
    cr_assert_ok(ar_module_fresh(linear, a.ctx, 5));
    cr_assert_ok(ar_param_init_whole(&w, a.ctx, "m", "weight", 2, square, AR_INIT_XAVIER_NORMAL));
    cr_assert_ok(ari_param_fresh(&w, a.ctx, 5));
    cr_assert_eq(ar_module_params(linear, &other, 1, false), 1u);
    cr_expect_str_eq(w.name, other->name);
    cr_assert_ok(ar_module_forward(linear, a.ctx, a.saved, &expected, &x, NULL));
    cr_assert_ok(ar_module_backward(linear, a.ctx, a.saved, &dx_expected, &expected, NULL));
    cr_assert_ok(ar_contract(a.ctx, &y, &x, &w));
    cr_assert_ok(ar_contract_backward(a.ctx, &dx, &y, &x, &w));
    cr_assert_ok(ar_ctx_download(a.ctx, values, &expected));
    expect_values(&a, &y, values);
    cr_assert_ok(ar_ctx_download(a.ctx, values, &dx_expected));
    expect_values(&a, &dx, values);
    const ar_tensor wrong = tensor(&a, 2, (size_t[]){2, 3}, in);
    cr_expect_eq(ar_contract(a.ctx, &y, &wrong, &w), AR_ERR_SHAPE);
    cr_expect_eq(ar_grad_add_rows(a.ctx, &w, &y), AR_ERR_SHAPE, "a matrix is no vector");
    ar_param_fini(&w);
}

Test(own_layers, vectors_are_spread_over_rows_and_shapes_are_checked)
{
    static const float v[2] = {3, -4}, in[4] = {1, 2, 5, 6}, spread[4] = {3, -4, 3, -4}, sum[4] = {4, -2, 8, 2};
    SCOPED(end) alone a = begin();
    ar_tensor y, z;
    const ar_tensor x = tensor(&a, 2, (size_t[]){2, 2}, in), row = tensor(&a, 1, (size_t[]){2}, v);
    const ar_tensor line = tensor(&a, 2, (size_t[]){1, 4}, in);
    cr_assert_ok(ar_spread_rows(a.ctx, &y, &row, &x));
    expect_values(&a, &y, spread);
    cr_assert_ok(ar_add(a.ctx, &z, &x, &y));
    expect_values(&a, &z, sum);
    cr_expect_eq(ar_spread_rows(a.ctx, &y, &row, &line), AR_ERR_SHAPE);
    cr_expect_eq(ar_mul(a.ctx, &z, &x, &line), AR_ERR_SHAPE);
    cr_expect_eq(ari_batch_input(a.ctx, &z, &(ar_batch){.batch = 1, .sample_ndim = 1}), AR_ERR_ARG);
    cr_expect_eq(ari_batch_input(a.ctx, &z, &(ar_batch){.batch = 1, .input = in, .sample_ndim = 4}), AR_ERR_ARG);
}

static void no_destroy(ar_module *m)
{
    (void)m;
}

Test(own_layers, a_module_without_what_it_needs_is_refused)
{
    static const ar_module_ops half = {.kind = "half", .destroy = no_destroy};
    char name[200];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    SCOPED(end) alone a = begin();
    ar_module m, *made = NULL;
    cr_expect_eq(ar_module_init(&m, &half, "half", AR_HELD_WHOLE), AR_ERR_ARG);
    cr_expect_eq(ar_activation_create(&made, a.ctx, name, AR_ACT_RELU, AR_HELD_WHOLE), AR_ERR_ARG);
    cr_expect_eq(ar_activation_create(&made, a.ctx, "none", AR_ACT_NONE, AR_HELD_WHOLE), AR_ERR_ARG);
    cr_expect_eq(ar_dropout_create(&made, a.ctx, "drop", 1, 4, AR_HELD_UNKNOWN), AR_ERR_ARG);
    cr_expect_null(made);
}

Test(own_layers, a_name_that_is_one_byte_too_long_is_refused)
{
    SCOPED(end) alone a = begin();
    SCOPED(ar_param_fini) ar_param p;
    ar_layout layout;
    const size_t shape = 1;
    char name[sizeof p.name + 1];
    memset(name, 'n', sizeof name);
    cr_assert_ok(ari_layout_replicate(&layout, 1, &shape, 0, 1));
    name[sizeof p.name] = '\0';
    cr_expect_eq(ar_param_init(&p, a.ctx, name, &layout, false), AR_ERR_ARG);
    name[sizeof p.name - 1] = '\0';
    cr_assert_ok(ar_param_init(&p, a.ctx, name, &layout, false));
    cr_expect_str_eq(p.name, name);
}
