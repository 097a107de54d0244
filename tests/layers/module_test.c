/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/layers.h"

TestSuite(module, .timeout = 300);

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

Test(module, parameters_are_listed_however_many_there_are)
{
    static const ar_module_ops ops = {
        .kind = "wide", .params = wide_params, .children = wide_children, .destroy = unused_destroy};
    static wide_module w = {.base = {.ops = &ops, .name = "wide"}};
    ar_device *device = NULL;
    ar_ctx *ctx = NULL;
    cr_assert_eq(ar_device_cpu_create(&device, 1), AR_OK);
    cr_assert_eq(ar_ctx_create(&ctx, &(ar_ctx_options){.device = device}), AR_OK);
    for (int i = 0; i < CHILDREN; i++) {
        char name[32];
        snprintf(name, sizeof name, "wide.norm%d", i);
        cr_assert_eq(ar_norm_create(&w.child[i], ctx, name, AR_NORM_RMS, 4, 1e-5), AR_OK);
    }
    ar_param *all[OWN + CHILDREN] = {NULL};
    cr_expect_eq(ar_module_params(&w.base, NULL, 0, false), (size_t)(OWN + CHILDREN));
    cr_expect_eq(ar_module_params(&w.base, all, OWN + CHILDREN, false), (size_t)(OWN + CHILDREN));
    cr_expect_eq(all[OWN - 1], &w.own[OWN - 1]);
    cr_expect_str_eq(all[OWN + CHILDREN - 1]->name, "wide.norm99.weight");
    cr_expect_eq(ar_module_params(&w.base, all, OWN + CHILDREN, true), (size_t)CHILDREN, "own ones are frozen");
    for (int i = 0; i < CHILDREN; i++)
        ar_module_destroy(w.child[i]);
    ar_ctx_destroy(ctx);
    ar_device_destroy(device);
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
    ar_device *device = NULL;
    ar_ctx *ctx = NULL;
    ar_module *block = NULL, *fused = NULL;
    ar_param *all[PARAMS] = {NULL};
    cr_assert_eq(ar_device_cpu_create(&device, 1), AR_OK);
    cr_assert_eq(ar_ctx_create(&ctx, &(ar_ctx_options){.device = device}), AR_OK);
    cr_assert_eq(ar_block_create(&block, ctx, "b", &o), AR_OK);
    cr_assert_eq(ar_module_params(block, all, PARAMS, false), (size_t)PARAMS);
    for (int i = 0; i < PARAMS; i++)
        cr_expect_str_eq(all[i]->name, expected[i]);
    cr_assert_eq(ar_attention_create(&fused, ctx, "a", &packed), AR_OK);
    cr_assert_eq(ar_module_params(fused, all, PARAMS, false), 4u);
    cr_expect_str_eq(all[0]->name, "a.qkv.weight");
    cr_expect_str_eq(all[3]->name, "a.out.bias");
    ar_module_destroy(fused);
    ar_module_destroy(block);
    ar_ctx_destroy(ctx);
    ar_device_destroy(device);
}
