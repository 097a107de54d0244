/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer over shards and copies: what it keeps, counts and refuses. Its steps are held to the formulas by
 * tests/cpu/optimizer_kernels_test.c and tests/baseline/baseline_optimizer_test.c, on ranks by uneven_test.c and
 * frozen_test.c. */
#include "ref/core/optimizer_private.h"
#include "ref/train/optimizer_private.h"
#include "ref/train/train_private.h"
#include "tests/support/test.h"
#include "tests/train/two_params.h"

typedef struct job {
    ar_optimizer_options options;
    bool freeze_vector, twice;
    size_t bytes[MOST_RANKS];
} job;

static ar_status make(ar_ctx *ctx, void *user, ar_param *matrix, ar_param *vector)
{
    job *j = user;
    ar_param *const all[3] = {matrix, vector, matrix};
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    vector->requires_grad = !j->freeze_vector;
    AR_TRY(ar_optimizer_create(&o, ctx, all, j->twice ? 3 : 2, &j->options));
    j->bytes[rank_of(ctx)] = ari_optimizer_bytes(o);
    return AR_OK;
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    const two_values start = two_values_of(1, 2, 2.0);
    return with_two_params(ctx, &start, make, user);
}

static const struct {
    ar_optimizer_options options;
    size_t floats; /* an element: none, the momentum, two moments */
} kinds[] = {
    {{.kind = AR_OPTIMIZER_SGD, .lr = 0.1}, 0},
    {{.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .weight_decay = 0.03}, 0},
    {{.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.9}, 1},
    {{.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.7, .nesterov = true}, 1},
    {{.kind = AR_OPTIMIZER_ADAM, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}, 2},
    {{.kind = AR_OPTIMIZER_ADAMW, .lr = 0.01, .beta1 = 0.0, .beta2 = 0.0, .eps = 1e-8}, 2},
    /* A parameter that no layer calls a matrix is AdamW's. */
    {{.kind = AR_OPTIMIZER_MUON, .lr = 0.01, .momentum = 0.9, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8}, 2},
};

Test(optimizer, moments_are_as_large_as_the_shards_that_require_a_gradient)
{
    for (size_t i = 0; i < 2 * sizeof kinds / sizeof *kinds; i++) {
        job j = {.options = kinds[i / 2].options, .freeze_vector = i % 2};
        const size_t elements = MATRIX / 2 + (i % 2 ? 0 : VECTOR);
        cr_assert_ok(rank_run(&(ar_run){.parallel.tp = 2}, rank_main, &j));
        cr_expect_eq(j.bytes[1], kinds[i / 2].floats * sizeof(float) * elements, "kind %zu, frozen %zu", i / 2, i % 2);
    }
}

Test(optimizer, a_parameter_given_twice_is_refused)
{
    job j = {.options = kinds[0].options, .twice = true};
    cr_expect_refused(rank_run(&(ar_run){.parallel.tp = 1}, rank_main, &j), AR_ERR_ARG, "matrix twice");
}

Test(optimizer, defaults_are_pytorchs_and_pass_the_check)
{
    for (ar_optimizer_kind kind = AR_OPTIMIZER_SGD; kind <= AR_OPTIMIZER_MUON; kind++) {
        const ar_optimizer_options o = ar_optimizer_defaults(kind);
        cr_expect_ok(ari_optimizer_check(&o));
        const bool muon = kind == AR_OPTIMIZER_MUON;
        cr_expect(o.kind == kind && o.lr == 1e-3 && o.momentum == (muon ? 0.95 : 0.0) && o.nesterov == muon);
        cr_expect(o.beta1 == 0.9 && o.beta2 == 0.999 && o.eps == 1e-8);
        cr_expect_eq(o.weight_decay, muon ? 0.1 : kind == AR_OPTIMIZER_ADAMW ? 0.01 : 0.0);
    }
    cr_expect_str_eq(ari_optimizer_name(AR_OPTIMIZER_SGD), "sgd");
    cr_expect_str_eq(ari_optimizer_name(AR_OPTIMIZER_ADAM), "adam");
    cr_expect_str_eq(ari_optimizer_name(AR_OPTIMIZER_ADAMW), "adamw");
    cr_expect_str_eq(ari_optimizer_name(AR_OPTIMIZER_MUON), "muon");
}

static void expect_refused(const ar_optimizer_options *o, const char *option)
{
    cr_expect_refused(ari_optimizer_check(o), AR_ERR_ARG, option);
}

Test(optimizer, an_option_out_of_its_range_is_refused_by_name)
{
    const double wrong[] = {-1e-9, NAN, INFINITY};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ar_optimizer_options o[6];
        for (size_t k = 0; k < 6; k++)
            o[k] = ar_optimizer_defaults(k == 2 ? AR_OPTIMIZER_SGD : AR_OPTIMIZER_ADAM);
        o[0].lr = o[1].weight_decay = o[2].momentum = o[3].beta1 = o[4].beta2 = o[5].eps = wrong[i];
        static const char *const names[] = {"lr", "weight_decay", "momentum", "beta1", "beta2", "eps"};
        for (size_t k = 0; k < 6; k++)
            expect_refused(&o[k], names[k]);
    }
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.beta2 = 1.0;
    expect_refused(&o, "beta2");
    o = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.eps = 0.0;
    expect_refused(&o, "eps");
    o.eps = 1e-50; /* 0 in fp32: 0/0 where a weight has never had a gradient */
    expect_refused(&o, "eps");
    o = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    o.nesterov = true;
    expect_refused(&o, "nesterov");
    o.kind = (ar_optimizer_kind)7;
    expect_refused(&o, "kind 7");
}

Test(optimizer, options_of_another_kind_are_not_looked_at)
{
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_SGD);
    o.beta1 = 2.0;
    o.eps = -1.0;
    cr_expect_ok(ari_optimizer_check(&o));
    o = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    o.momentum = 5.0;
    cr_expect_ok(ari_optimizer_check(&o));
}
