/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/layers.h"

TestSuite(module, .timeout = 10);

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
