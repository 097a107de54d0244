/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/context.h"
#include "anyrank/layers.h"
#include "anyrank/module.h"
#include "ref/layers/parts.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

/* A user's module with more children and more own parameters than any list in the library is long. */
enum { CHILDREN = 100, OWN = 40 };

typedef struct wide_module {
    ar_module base;
    ar_module *child[CHILDREN];
    ar_param own[OWN];
} wide_module;

static size_t wide_params(const ar_module *m, ar_param **out, size_t cap)
{
    wide_module *w = (wide_module *)(uintptr_t)m;
    for (size_t i = 0; i < OWN && i < cap; i++)
        out[i] = &w->own[i];
    return OWN;
}

static size_t wide_children(const ar_module *m, ar_module **out, size_t cap)
{
    const wide_module *w = (const wide_module *)m;
    for (size_t i = 0; i < CHILDREN && i < cap; i++)
        out[i] = w->child[i];
    return CHILDREN;
}

static void unused_destroy(ar_module *m)
{
    (void)m;
}

Test(module, a_context_refuses_a_fault_that_is_in_no_table)
{
    OWNED(ar_device_destroy) ar_device *device = NULL;
    OWNED(ar_ctx_destroy) ar_ctx *ctx = NULL;
    cr_assert_ok(ar_device_cpu_create(&device, 1));
    cr_expect_refused(ar_ctx_create(&ctx, &(ar_ctx_options){.device = device, .fault = "norm_backward_mising"}),
                      AR_ERR_NOT_FOUND, "did you mean 'norm_backward_missing'");
}

Test(module, parameters_are_listed_however_many_there_are)
{
    static const ar_module_ops ops = {
        .kind = "wide", .params = wide_params, .children = wide_children, .destroy = unused_destroy};
    static wide_module w = {.base = {.ops = &ops, .name = "wide"}};
    OWNED(ar_device_destroy) ar_device *device = NULL;
    OWNED(ar_ctx_destroy) ar_ctx *ctx = NULL;
    cr_assert_ok(ar_device_cpu_create(&device, 1));
    cr_assert_ok(ar_ctx_create(&ctx, &(ar_ctx_options){.device = device}));
    for (int i = 0; i < CHILDREN; i++) {
        char name[32];
        snprintf(name, sizeof name, "wide.norm%d", i);
        cr_assert_ok(ar_norm_create(&w.child[i], ctx, name, AR_NORM_RMS, 4, 1e-5));
    }
    ar_param *all[OWN + CHILDREN] = {NULL};
    cr_expect_eq(ar_module_params(&w.base, NULL, 0, false), (size_t)(OWN + CHILDREN));
    cr_expect_eq(ar_module_params(&w.base, all, OWN + CHILDREN, false), (size_t)(OWN + CHILDREN));
    cr_expect_eq(all[OWN - 1], &w.own[OWN - 1]);
    cr_expect_str_eq(all[OWN + CHILDREN - 1]->name, "wide.norm99.weight");
    cr_expect_eq(ar_module_params(&w.base, all, OWN + CHILDREN, true), (size_t)CHILDREN, "own ones are frozen");
    for (int i = 0; i < CHILDREN; i++)
        ar_module_destroy(w.child[i]);
}

/* A parameter's name chooses its random numbers: two of one name would start as copies of each other. */
Test(module, parts_of_a_block_that_were_given_no_names_have_different_ones)
{
    static const char *const expected[] = {
        "b.norm1.weight",         "b.norm1.bias",         "b.attention.q.weight", "b.attention.q.bias",
        "b.attention.k.weight",   "b.attention.k.bias",   "b.attention.v.weight", "b.attention.v.bias",
        "b.attention.out.weight", "b.attention.out.bias", "b.norm2.weight",       "b.norm2.bias",
        "b.mlp.fc1.weight",       "b.mlp.fc1.bias",       "b.mlp.fc2.weight",     "b.mlp.fc2.bias"};
    enum { PARAMS = sizeof expected / sizeof *expected };
    const ar_attention_options heads = {
        .hidden = 4, .heads = 2, .kv_heads = 2, .head_dim = 2, .qkv_bias = true, .out_bias = true};
    ar_attention_options packed = heads;
    packed.fused = true;
    const ar_block_options o = {
        .norm = AR_NORM_LAYER, .attention = heads, .mlp = {.hidden = 4, .ffn = 8, .bias = true}};
    OWNED(ar_device_destroy) ar_device *device = NULL;
    OWNED(ar_ctx_destroy) ar_ctx *ctx = NULL;
    OWNED(ar_module_destroy) ar_module *block = NULL, *fused = NULL;
    ar_param *all[PARAMS] = {NULL};
    cr_assert_ok(ar_device_cpu_create(&device, 1));
    cr_assert_ok(ar_ctx_create(&ctx, &(ar_ctx_options){.device = device}));
    cr_assert_ok(ar_block_create(&block, ctx, "b", &o));
    cr_assert_eq(ar_module_params(block, all, PARAMS, false), (size_t)PARAMS);
    for (int i = 0; i < PARAMS; i++)
        cr_expect_str_eq(all[i]->name, expected[i]);
    cr_assert_ok(ar_attention_create(&fused, ctx, "a", &packed));
    cr_assert_eq(ar_module_params(fused, all, PARAMS, false), 4u);
    cr_expect_str_eq(all[0]->name, "a.qkv.weight");
    cr_expect_str_eq(all[3]->name, "a.out.bias");
}

/* --- recomputation ------------------------------------------------------------------------------------------------ */

enum { B = 2, S = 5, H = 8, HEARD = 64, GRADIENTS = 1024 };

/* What a forward and a backward pass give, what they report, and bytes of the step between them and after them. */
typedef struct passes {
    float y[B * S * H], dx[B * S * H], gradient[GRADIENTS];
    size_t gradients, between, after;
    char heard[HEARD][64];
    int reports, ready;
} passes;

static ar_status hear(void *user, const ar_tap_event *event)
{
    passes *p = user;
    if (p->reports < HEARD)
        snprintf(p->heard[p->reports], sizeof p->heard[0], "%s:%c", event->name, event->pass);
    p->reports++;
    return AR_OK;
}

static ar_status count_ready(void *user, ar_param *param)
{
    (void)param;
    ((passes *)user)->ready++;
    return AR_OK;
}

static void read_gradients(passes *p, ar_ctx *ctx, ar_module *m)
{
    ar_param *all[32];
    const size_t n = ar_module_params(m, all, 32, false);
    for (size_t i = 0; i < n; i++) {
        const size_t count = ar_tensor_count(&all[i]->value);
        cr_assert_leq(p->gradients + count, GRADIENTS);
        cr_assert_ok(rank_read_gradient(ctx, p->gradient + p->gradients, all[i]));
        p->gradients += count;
    }
}

/* Two forward passes, then the backward passes in reverse order: only the first one's results are taken. */
static void go(passes *p, ar_ctx *ctx, ar_module *m)
{
    static const int64_t ids[B * S];
    const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids};
    const size_t shape[3] = {B, S, H};
    ar_param *all[32];
    ar_tensor x, y, dy, dx, other;
    OWNED(ar_saved_destroy) ar_saved *saved = NULL;
    float values[B * S * H];
    size_t peak = 0;
    const size_t n = ar_module_params(m, all, 32, false);
    for (size_t i = 0; i < n; i++)
        cr_assert_ok(ar_param_add_hook(all[i], (ar_param_hook){count_ready, p}));
    for (size_t i = 0; i < B * S * H; i++)
        values[i] = (float)((i * 37) % 19) / 8.0f - 1.0f;
    cr_assert_ok(ar_module_fresh(m, ctx, 5));
    cr_assert_ok(ar_module_zero_grad(m, ctx));
    cr_assert_ok(ar_saved_create(&saved));
    cr_assert_ok(ar_ctx_tensor(ctx, &x, AR_F32, 3, shape));
    cr_assert_ok(ar_ctx_tensor(ctx, &dy, AR_F32, 3, shape));
    cr_assert_ok(ar_ctx_upload(ctx, &x, values));
    cr_assert_ok(ar_ctx_upload(ctx, &dy, values));
    cr_assert_ok(ar_module_forward(m, ctx, saved, &y, &x, &batch));
    cr_assert_ok(ar_module_forward(m, ctx, saved, &other, &dy, &batch));
    ar_ctx_memory(ctx, &p->between, &peak);
    cr_assert_ok(ar_module_backward(m, ctx, saved, &other, &dy, &batch));
    cr_expect_eq(p->ready, 0, "a gradient is complete after the last backward pass");
    cr_assert_ok(ar_module_backward(m, ctx, saved, &dx, &dy, &batch));
    ar_ctx_memory(ctx, &p->after, &peak);
    cr_assert_ok(ar_ctx_download(ctx, p->y, &y));
    cr_assert_ok(ar_ctx_download(ctx, p->dx, &dx));
    read_gradients(p, ctx, m);
    cr_expect_eq(p->ready, (int)n);
    cr_expect_eq(ari_saved_count(saved), 0, "everything has been taken back");
    cr_expect_eq(ar_module_backward(m, ctx, saved, &dx, &dy, &batch), AR_ERR_ARG);
}

/* A block and, behind it, a sequence of two norms with a dropout between them. */
static void run(passes *p, ar_recomputation r, bool also)
{
    const ar_block_options o = {
        .norm = AR_NORM_LAYER,
        .norm_eps = 1e-5,
        .attention = {.hidden = H, .heads = 2, .kv_heads = 1, .head_dim = 4, .qkv_bias = true, .max_positions = S},
        .mlp = {.hidden = H, .ffn = 6, .bias = true},
        .index = 2};
    OWNED(ar_device_destroy) ar_device *device = NULL;
    OWNED(ar_ctx_destroy) ar_ctx *ctx = NULL;
    ar_module *block = NULL, *tail[3] = {NULL}, *behind = NULL, *all = NULL;
    *p = (passes){.reports = 0};
    cr_assert_ok(ar_device_cpu_create(&device, 1));
    cr_assert_ok(ar_ctx_create(
        &ctx,
        &(ar_ctx_options){.device = device, .dropout = 0.3, .seed = 3, .recompute = r, .tap = hear, .tap_user = p}));
    cr_assert_ok(ar_block_create(&block, ctx, "b", &o));
    cr_assert_ok(ar_norm_create(&tail[0], ctx, "n0", AR_NORM_RMS, H, 1e-5));
    cr_assert_ok(ar_dropout_create(&tail[1], ctx, "d", S, H, AR_HELD_WHOLE));
    cr_assert_ok(ar_norm_create(&tail[2], ctx, "n1", AR_NORM_RMS, H, 1e-5));
    cr_assert_ok(ar_sequential_create(&behind, "s", tail, 3, true));
    cr_assert_ok(ar_sequential_create(&all, "all", (ar_module *const[]){block, behind}, 2, true));
    if (also) { /* one in another too */
        ar_module_recompute(behind);
        ar_module_recompute(all);
    }
    go(p, ctx, all);
    ar_module_destroy(all);
}

Test(module, that_is_recomputed_has_the_same_bits_and_reports_and_keeps_less)
{
    static const struct {
        ar_recomputation r;
        bool also;
    } cases[] = {{{AR_RECOMPUTE_SELECTIVE, 1}, false},
                 {{AR_RECOMPUTE_FULL, 2}, false},
                 {{AR_RECOMPUTE_NONE, 1}, true},
                 {{AR_RECOMPUTE_SELECTIVE, 1}, true},
                 {{AR_RECOMPUTE_FULL, 1}, true}};
    static passes plain, again;
    run(&plain, (ar_recomputation){AR_RECOMPUTE_NONE, 1}, false);
    cr_assert_gt(plain.reports, 40);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        run(&again, cases[i].r, cases[i].also);
        cr_expect_arr_eq(again.y, plain.y, sizeof plain.y, "case %zu", i);
        cr_expect_arr_eq(again.dx, plain.dx, sizeof plain.dx, "case %zu", i);
        cr_expect_arr_eq(again.gradient, plain.gradient, sizeof plain.gradient, "case %zu", i);
        cr_expect_eq(again.reports, plain.reports, "case %zu: %d reports, not %d", i, again.reports, plain.reports);
        for (int k = 0; k < plain.reports && k < HEARD; k++)
            cr_expect_str_eq(again.heard[k], plain.heard[k], "case %zu, report %d", i, k);
        cr_expect_lt(again.between, plain.between, "case %zu", i);
        cr_expect_lt(again.after, plain.after, "case %zu", i);
    }
    /* Of all: x, dy and y of both passes; then dx too. */
    const size_t tensor = B * S * H * sizeof(float);
    cr_expect_eq(again.between, 4 * tensor);
    cr_expect_eq(again.after, 6 * tensor);
    run(&again, (ar_recomputation){AR_RECOMPUTE_FULL, 3}, false);
    cr_expect_eq(again.between, plain.between, "block 2 is not the first of three");
}
