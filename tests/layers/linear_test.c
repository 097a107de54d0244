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

/* --- native numbers ----------------------------------------------------------------------------------------------- */

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

/* --- worked examples ---------------------------------------------------------------------------------------------- */

/* One token, one input feature: column r of dW and db are dY's own block. */
Test(linear, gathered_output_takes_the_own_block_of_dy)
{
    const float x[1] = {1.0f}, w[8] = {0}, b[8] = {0}, dy[8] = {10, 11, 12, 13, 14, 15, 16, 17};
    const plain_linear f = {.n = {1, 1, 1, 8}, .x = x, .w = w, .b = b, .dy = dy};
    SCOPED(linear_job_fini) linear_job j = {.c = {COLUMN, true, 3, 4, AR_NUMERICS_EXACT}, .full = &f};
    run_linear(&j);
    const float expected[2] = {14, 15}; /* rank 2 of 4, 8 outputs: dY[:, 4:6] */
    cr_assert_eq(j.rank[2].db_n, 2);
    cr_assert_eq(first_different_bits(j.rank[2].dw, expected, 2), 2);
    cr_assert_eq(first_different_bits(j.rank[2].db, expected, 2), 2);
}

Test(linear, bias_gradient_of_three_ones_is_three)
{
    const float x[3] = {1, 2, 3}, w[2] = {1, 1}, b[2] = {0}, dy[6] = {1, 1, 1, 1, 1, 1};
    const plain_linear f = {.n = {3, 1, 1, 2}, .x = x, .w = w, .b = b, .dy = dy};
    for (int ndim = 2; ndim <= 3; ndim++) {
        plain_linear g = f;
        g.n = ndim == 3 ? f.n : (plain_shape){1, 3, 1, 2};
        SCOPED(linear_job_fini) linear_job j = {.c = {COLUMN, true, ndim, 1, AR_NUMERICS_EXACT}, .full = &g};
        run_linear(&j);
        const float expected[2] = {3, 3};
        cr_assert_eq(first_different_bits(j.rank[0].db, expected, 2), 2);
    }
}

typedef struct shapes {
    size_t w[2][2], y[2][3]; /* [rank] */
} shapes;

/* Of either layer: [4, 512, width] of an input of which a rank holds `width` features. */
static ar_status shapes_of(ar_ctx *ctx, shapes *s, bool column)
{
    const ar_linear_options o = {.bias = true, .input_is_sharded = true};
    const size_t r = rank_of(ctx), width = column ? 768 : 1024, shape[3] = {4, 512, width};
    OWNED(ar_module_destroy) ar_module *m = NULL;
    OWNED(free) float *zeros = calloc(4 * 512 * width, sizeof *zeros);
    ar_param *p = NULL;
    ar_tensor x, y;
    AR_TRY(column ? ar_column_linear_create(&m, ctx, "l", 768, 2048, &o)
                  : ar_row_linear_create(&m, ctx, "l", 2048, 512, &o));
    ar_module_params(m, &p, 1, true);
    AR_TRY(ar_module_fresh(m, ctx, 1));
    AR_TRY(zeros ? rank_upload(ctx, &x, 3, shape, zeros) : AR_ERR_MEMORY);
    AR_TRY(ar_module_forward(m, ctx, NULL, &y, &x, NULL));
    memcpy(s->w[r], p->value.shape, sizeof s->w[r]);
    memcpy(s->y[r], y.shape, sizeof s->y[r]);
    return AR_OK;
}

static ar_status both_shapes(ar_ctx *ctx, void *user)
{
    AR_TRY(shapes_of(ctx, user, true));
    return shapes_of(ctx, (shapes *)user + 1, false);
}

Test(linear, a_column_of_768_to_2048_and_a_row_of_2048_to_512_over_two_ranks_have_shards_of_1024)
{
    static const size_t w[2][2] = {{1024, 768}, {512, 1024}}, y[2][3] = {{4, 512, 1024}, {4, 512, 512}};
    shapes s[2];
    const rank_run_options o = {.ranks = 2, .numerics = AR_NUMERICS_NATIVE}; /* shapes do not depend on the numerics */
    memset(s, 0, sizeof s);
    cr_assert_ok(rank_run(&o, both_shapes, s));
    for (int i = 0; i < 4; i++) {
        cr_assert_arr_eq(s[i / 2].w[i % 2], w[i / 2], sizeof w[0], "%s, rank %d", i < 2 ? "column" : "row", i % 2);
        cr_assert_arr_eq(s[i / 2].y[i % 2], y[i / 2], sizeof y[0], "%s, rank %d", i < 2 ? "column" : "row", i % 2);
    }
}
