/* SPDX-License-Identifier: Apache-2.0 */
/* The column- and row-parallel layers against a linear layer without ranks. Exact numbers: equal bits on every rank.
 * Native numbers: within the rounding error bound of fp32 sums. */
#include "tests/layers/linear_case.h"

/* bias x batch 1, 2, 5 x tp 1, 2, 4. */
static void sweep(style layer, bool flag, int ndim)
{
    static const size_t batches[] = {1, 2, 5};
    for (size_t i = 0; i < 3; i++) {
        for (int bias = 0; bias < 2; bias++) {
            SCOPED(plain_linear_fini)
            plain_linear f = ndim == 3 ? given(batches[i], 4, bias) : given(1, batches[i], bias);
            plain_linear_exact(&f);
            for (int ranks = 1; ranks <= 4; ranks *= 2) {
                SCOPED(linear_job_fini) linear_job j = {.c = {layer, flag, ndim, ranks, AR_NUMERICS_EXACT}, .full = &f};
                run_linear(&j);
                expect_plain_bits(&j);
            }
        }
    }
}

Test(linear, every_layer_has_the_plain_layers_bits_with_its_option_and_without)
{
    for (int variant = 0; variant < 8; variant++)
        sweep(variant & 1 ? ROW : COLUMN, variant & 2, variant & 4 ? 3 : 2);
}

/* A 2-D input is one sample, a 3-D one as many as its first extent: dW is rounded once per sample, so the same tokens
 * in other samples may give other bits. The layer must not confuse the two. */
Test(linear, samples_are_the_first_extent_of_a_3d_input_only)
{
    SCOPED(plain_linear_fini) plain_linear one = given(1, 20, false), five = given(5, 4, false);
    plain_linear_exact(&one);
    plain_linear_exact(&five);
    cr_assert_eq(memcmp(one.y, five.y, 20 * 36 * sizeof(float)), 0);
    cr_assert_neq(memcmp(one.dw, five.dw, 36 * 24 * sizeof(float)), 0, "this data does not tell them apart");
}

Test(linear, native_layers_stay_within_the_rounding_error_bound)
{
    for (int variant = 0; variant < 8; variant++) {
        const int ndim = variant & 4 ? 3 : 2;
        plain_linear f = ndim == 3 ? given(5, 4, true) : given(1, 5, variant & 1);
        for (int ranks = 1; ranks <= 4; ranks *= 2) {
            SCOPED(linear_job_fini)
            linear_job j = {.c = {variant & 1 ? ROW : COLUMN, variant & 2, ndim, ranks, AR_NUMERICS_NATIVE},
                            .full = &f};
            run_linear(&j);
            expect_within_bounds(&j);
        }
    }
}
