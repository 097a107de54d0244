/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer over shards and copies: what it keeps, counts and refuses. Its steps are held to the formulas by
 * tests/cpu/optimizer_kernels_test.c and tests/baseline/baseline_optimizer_test.c, on ranks by train_step_test.c. */
#include "tests/support/test.h"
#include "tests/train/two_params.h"

/* Of the five steps the gradients of three are scaled. */
static const float scales[STEPS] = {1.0f, 0.37f, 1.0f, 0.001f, 3.0f};

typedef two_values weights;

static weights start_values(void)
{
    weights w = two_values_of(1, 2, 2.0);
    w.matrix[4] = w.vector[1] = -0.0f;
    w.matrix[7] = 0x1p-140f;
    return w;
}

static weights gradients_of(unsigned step)
{
    weights g = two_values_of(10 + step, 20 + step, 0.5);
    g.matrix[4] = g.vector[1] = 0.0f;
    g.matrix[9] = 0x1p-130f;
    g.matrix[11] = 1e25f; /* its square overflows */
    return g;
}

typedef struct job {
    ar_optimizer_options options;
    bool freeze_vector, twice;
    unsigned freeze_from;           /* the step from which on the vector requires no gradient; 0: none */
    weights out[STEPS][MOST_RANKS]; /* each rank's vector, and its own rows of the matrix in the first one's */
    uint64_t steps[MOST_RANKS], versions[MOST_RANKS];
    size_t bytes[MOST_RANKS];
} job;

static ar_status one_step(ar_ctx *ctx, job *j, ar_optimizer *o, ar_param *matrix, ar_param *vector, unsigned step)
{
    const weights g = gradients_of(step);
    const size_t r = rank_of(ctx), own = own_rows(ctx);
    AR_TRY(set_gradient(ctx, matrix, g.matrix + own));
    AR_TRY(set_gradient(ctx, vector, g.vector));
    AR_TRY(ar_optimizer_step(o, ctx, scales[step - 1]));
    AR_TRY(ar_ctx_download(ctx, j->out[step - 1][0].matrix + own, &matrix->value));
    AR_TRY(ar_ctx_download(ctx, j->out[step - 1][r].vector, &vector->value));
    ar_ctx_end_step(ctx);
    return AR_OK;
}

static ar_status train(ar_ctx *ctx, void *user, ar_param *matrix, ar_param *vector)
{
    job *j = user;
    const size_t r = rank_of(ctx);
    ar_param *const all[3] = {matrix, vector, matrix};
    OWNED(ar_optimizer_destroy) ar_optimizer *o = NULL;
    ar_status st = AR_OK;
    vector->requires_grad = !j->freeze_vector;
    AR_TRY(ar_optimizer_create(&o, ctx, all, j->twice ? 3 : 2, &j->options));
    const uint64_t version = matrix->version;
    for (unsigned step = 1; step <= STEPS && st == AR_OK; step++) {
        vector->requires_grad = vector->requires_grad && step != j->freeze_from;
        st = one_step(ctx, j, o, matrix, vector, step);
    }
    j->steps[r] = ar_optimizer_steps(o);
    j->bytes[r] = ar_optimizer_bytes(o);
    j->versions[r] = matrix->version - version;
    return st;
}

static ar_status rank_main(ar_ctx *ctx, void *user)
{
    const weights start = start_values();
    return with_two_params(ctx, &start, train, user);
}

static ar_status run(job *j, int ranks, ar_numerics numerics)
{
    const rank_run_options o = {.ranks = ranks, .numerics = numerics};
    return rank_run(&o, rank_main, j);
}

/* --- the claims --------------------------------------------------------------------------------------------------- */

static const ar_optimizer_options kinds[] = {
    {.kind = AR_OPTIMIZER_SGD, .lr = 0.1},
    {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .weight_decay = 0.03},
    {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.9},
    {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.7, .nesterov = true, .weight_decay = 0.2},
    {.kind = AR_OPTIMIZER_ADAM, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8},
    {.kind = AR_OPTIMIZER_ADAM, .lr = 0.01, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.3},
    {.kind = AR_OPTIMIZER_ADAMW, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.4},
    {.kind = AR_OPTIMIZER_ADAMW, .lr = 0.01, .beta1 = 0.0, .beta2 = 0.0, .eps = 1e-8},
};

Test(optimizer, native_gradients_take_the_same_steps_on_any_number_of_ranks)
{
    job exact = {.options = kinds[6]};
    cr_assert_ok(run(&exact, 1, AR_NUMERICS_EXACT));
    for (int ranks = 1; ranks <= 4; ranks *= 2) {
        job j = {.options = kinds[6]};
        cr_assert_ok(run(&j, ranks, AR_NUMERICS_NATIVE));
        for (unsigned step = 0; step < STEPS; step++) {
            cr_expect_eq(first_different_bits(j.out[step][0].matrix, exact.out[step][0].matrix, MATRIX), MATRIX,
                         "%d ranks, step %u, matrix", ranks, step + 1);
            for (int r = 0; r < ranks; r++)
                cr_expect_eq(first_different_bits(j.out[step][r].vector, exact.out[step][0].vector, VECTOR), VECTOR,
                             "%d ranks, step %u, vector of rank %d", ranks, step + 1, r);
        }
    }
}

Test(optimizer, moments_are_as_large_as_the_shards)
{
    /* floats an element: none, the momentum, two moments */
    static const size_t floats[] = {0, 0, 1, 1, 2, 2, 2, 2};
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        job j = {.options = kinds[kind]};
        cr_assert_ok(run(&j, 2, AR_NUMERICS_EXACT));
        cr_expect_eq(j.bytes[1], floats[kind] * sizeof(float) * (MATRIX / 2 + VECTOR), "kind %zu", kind);
    }
}

Test(optimizer, a_step_is_counted_and_makes_a_new_version_of_each_weight)
{
    job j = {.options = kinds[0]};
    cr_assert_ok(run(&j, 2, AR_NUMERICS_EXACT));
    cr_expect(j.steps[0] == STEPS && j.steps[1] == STEPS);
    cr_expect(j.versions[0] == STEPS && j.versions[1] == STEPS);
}

Test(optimizer, a_parameter_that_requires_no_gradient_stays_and_has_no_moments)
{
    const weights start = start_values();
    job j = {.options = kinds[4], .freeze_vector = true};
    cr_assert_ok(run(&j, 2, AR_NUMERICS_EXACT));
    cr_expect_eq(first_different_bits(j.out[STEPS - 1][1].vector, start.vector, VECTOR), VECTOR);
    cr_expect_eq(j.bytes[0], 2 * sizeof(float) * MATRIX / 2);
}

Test(optimizer, a_parameter_that_stops_requiring_a_gradient_stays_from_then_on)
{
    job j = {.options = kinds[4], .freeze_from = 3};
    cr_assert_ok(run(&j, 2, AR_NUMERICS_EXACT));
    cr_expect_eq(first_different_bits(j.out[STEPS - 1][1].vector, j.out[1][1].vector, VECTOR), VECTOR);
    cr_expect_neq(j.out[1][1].vector[0], j.out[0][1].vector[0]);
}

Test(optimizer, a_parameter_given_twice_is_refused)
{
    job j = {.options = kinds[0], .twice = true};
    cr_expect_refused(run(&j, 1, AR_NUMERICS_EXACT), AR_ERR_ARG, "matrix twice");
}

/* --- options ------------------------------------------------------------------------------------------------------ */

Test(optimizer, defaults_are_pytorchs_and_pass_the_check)
{
    for (ar_optimizer_kind kind = AR_OPTIMIZER_SGD; kind <= AR_OPTIMIZER_ADAMW; kind++) {
        const ar_optimizer_options o = ar_optimizer_defaults(kind);
        cr_expect_ok(ar_optimizer_check(&o));
        cr_expect(o.kind == kind && o.lr == 1e-3 && o.momentum == 0.0 && !o.nesterov);
        cr_expect(o.beta1 == 0.9 && o.beta2 == 0.999 && o.eps == 1e-8);
        cr_expect_eq(o.weight_decay, kind == AR_OPTIMIZER_ADAMW ? 0.01 : 0.0);
    }
    cr_expect_str_eq(ar_optimizer_name(AR_OPTIMIZER_SGD), "sgd");
    cr_expect_str_eq(ar_optimizer_name(AR_OPTIMIZER_ADAM), "adam");
    cr_expect_str_eq(ar_optimizer_name(AR_OPTIMIZER_ADAMW), "adamw");
}

static void expect_refused(const ar_optimizer_options *o, const char *option)
{
    cr_expect_refused(ar_optimizer_check(o), AR_ERR_ARG, option);
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
    cr_expect_ok(ar_optimizer_check(&o));
    o = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    o.momentum = 5.0;
    cr_expect_ok(ar_optimizer_check(&o));
}
