/* SPDX-License-Identifier: Apache-2.0 */
/* Products of the native arithmetic below fp32: what enters them is rounded, in bf16, where both are stored so, what
 * leaves them too; what is added up is not. */
#include "ref/context/context_private.h"
#include "ref/core/device_private.h"
#include "ref/core/float_bits.h"
#include "ref/core/tensor_private.h"
#include "support/rank_run.h"
#include "tests/support/test.h"

enum { M = 2, K = 3 };

typedef struct precision_job {
    float a[M * K], b[M * K], bias[M];
    bool shared; /* K is shared out to the ranks, one column each */
    bool turned; /* operands are views of transposed matrices */
    float y[K][M * M], gradient[M * M];
} precision_job;

/* As activations are stored. */
static ar_status store(ar_ctx *ctx, ar_tensor *t, const size_t shape[2], const float *values)
{
    AR_TRY(ar_ctx_tensor(ctx, t, ari_ctx_activations(ctx), 2, shape));
    return ar_ctx_upload_floats(ctx, t, values, ar_tensor_count(t));
}

static ar_status upload(ar_ctx *ctx, ar_tensor *t, const float *values, bool turned)
{
    const size_t shape[2] = {M, K}, other[2] = {K, M};
    float copy[M * K];
    if (!turned)
        return store(ctx, t, shape, values);
    for (size_t i = 0; i < M * K; i++)
        copy[i % K * M + i / K] = values[i];
    AR_TRY(store(ctx, t, other, copy));
    *t = ari_tensor_transposed(t);
    return AR_OK;
}

static ar_status product_rank(ar_ctx *ctx, void *user)
{
    precision_job *j = user;
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    const size_t y_shape[2] = {M, M}, bias_shape[1] = {M}, r = rank_of(ctx);
    const ar_operand *oa = NULL, *ob = NULL;
    ar_sum *sum = NULL;
    ar_parts a = {.n = 1}, b = {.n = 1};
    ar_tensor y, bias;
    AR_TRY(upload(ctx, &a.part[0], j->a, j->turned));
    AR_TRY(upload(ctx, &b.part[0], j->b, j->turned));
    AR_TRY(rank_upload(ctx, &bias, 1, bias_shape, j->bias));
    if (j->shared) {
        a.part[0] = ar_tensor_slice(&a.part[0], 1, r, 1);
        b.part[0] = ar_tensor_slice(&b.part[0], 1, r, 1);
    }
    ar_comm *over = j->shared ? ar_ctx_tp(ctx) : NULL;
    AR_TRY(arith->operand_b(ctx, &ob, &b, true, K, over, NULL, "b"));
    AR_TRY(arith->operand_a(ctx, &oa, &a, ob, "a"));
    AR_TRY(arith->contract(ctx, &sum, oa, ob));
    AR_TRY(arith->fold(ctx, sum, ar_ctx_queue(ctx), over, AR_ALL, "fold"));
    AR_TRY(ar_ctx_tensor(ctx, &y, ari_ctx_activations(ctx), 2, y_shape));
    const ar_epilogue epilogue = {.bias = ar_const(bias.data), .act = AR_ACT_NONE};
    AR_TRY(arith->round(ctx, &y, sum, &epilogue));
    return ar_ctx_download_floats(ctx, j->y[r], M * M, &y);
}

static void run(precision_job *j, ar_precision precision, int ranks)
{
    const ar_run o = {.parallel.tp = ranks, .numerics = AR_NUMERICS_NATIVE, .precision = precision};
    cr_assert_ok(rank_run(&o, product_rank, j));
}

/* 1 + 2^-9 has 10 bits of significand, 1 + 2^-12 has 13, (1 + 2^-6)^2 = 1 + 2^-5 + 2^-12 has 13. */
#define NINE (1.0f + 0x1p-9f)
#define TWELVE (1.0f + 0x1p-12f)
#define SIX (1.0f + 0x1p-6f)

Test(precision, operands_are_rounded_and_in_bf16_results_too)
{
    static const float expected[AR_PRECISION_COUNT][4] = {
        [AR_PRECISION_F32] = {NINE, TWELVE, 1.0f + 0x1p-5f + 0x1p-12f, NINE},
        [AR_PRECISION_TF32] = {NINE, 1.0f, 1.0f + 0x1p-5f + 0x1p-12f, NINE},
        [AR_PRECISION_BF16] = {1.0f, 1.0f, 1.0f + 0x1p-5f, 1.0f}};
    for (int p = 0; p < AR_PRECISION_COUNT; p++) {
        for (int turned = 0; turned < 2; turned++) {
            precision_job nine = {.a = {NINE}, .b = {1.0f}, .turned = turned};
            precision_job twelve = {.a = {1.0f}, .b = {TWELVE}, .turned = turned};
            precision_job six = {.a = {SIX}, .b = {SIX}, .turned = turned};
            precision_job with_bias = {.a = {1.0f}, .b = {1.0f}, .bias = {0x1p-9f}, .turned = turned};
            precision_job *all[4] = {&nine, &twelve, &six, &with_bias};
            for (int i = 0; i < 4; i++) {
                run(all[i], (ar_precision)p, 1);
                cr_expect_eq(all[i]->y[0][0], expected[p][i], "%s, case %d, turned %d: %a",
                             ari_precision_name((ar_precision)p), i, turned, (double)all[i]->y[0][0]);
            }
        }
    }
}

/* 1 + 2^-8 + 2^-8: each term alone would be lost beside 1 in bf16; together they are a bf16 number. */
Test(precision, products_add_up_in_fp32)
{
    precision_job j = {.a = {1.0f, 0x1p-8f, 0x1p-8f}, .b = {1.0f, 1.0f, 1.0f}};
    run(&j, AR_PRECISION_BF16, 1);
    cr_expect_eq(j.y[0][0], 1.0f + 0x1p-7f, "%a", (double)j.y[0][0]);
}

/* A rank's part of the sum leaves its product, and is rounded. */
Test(precision, partial_sums_leave_a_product_too)
{
    precision_job j = {.a = {SIX, -1.0f}, .b = {SIX, 1.0f}, .shared = true}; /* 2^-5 + 2^-12 is a bf16 number */
    run(&j, AR_PRECISION_BF16, 3);
    for (int r = 0; r < 3; r++)
        cr_expect_eq(j.y[r][0], 0x1p-5f, "%a", (double)j.y[r][0]);
}

static ar_status gradient_rank(ar_ctx *ctx, void *user)
{
    precision_job *j = user;
    const size_t shape[2] = {M, M};
    SCOPED(ar_param_fini) ar_param w = {0};
    ar_layout layout;
    ar_tensor x, dy, g;
    AR_TRY(ari_layout_replicate(&layout, 2, shape, 0, 1));
    AR_TRY(ar_param_init(&w, ctx, "w", &layout, false));
    for (int i = 0; i < 2; i++) {
        AR_TRY(store(ctx, &x, shape, j->a));
        AR_TRY(store(ctx, &dy, shape, j->b));
        AR_TRY(ar_ctx_arith(ctx)->grad_contract(ctx, &(ar_grad_terms){&w, dy}, 1, &x, 1, NULL));
    }
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, 2, shape));
    AR_TRY(ar_ctx_arith(ctx)->grad_value(ctx, &g, &w));
    return ar_ctx_download(ctx, j->gradient, &g);
}

/* Twice SIX*SIX, 13 bits of significand: an fp32 sum has them, one that is stored in bf16 is rounded after each
 * micro-batch; of TWELVE nothing but 1 enters. */
Test(precision, gradients_of_weights_are_stored_as_the_weights_are)
{
    for (int p = AR_PRECISION_TF32; p <= AR_PRECISION_BF16; p++) {
        const float six = 2.0f * (1.0f + 0x1p-5f + (p == AR_PRECISION_TF32 ? 0x1p-12f : 0.0f));
        precision_job j = {.a = {SIX, 0.0f, 0.0f, 0.0f}, .b = {SIX, TWELVE, 0.0f, 0.0f}};
        const ar_run o = {.parallel.tp = 1, .numerics = AR_NUMERICS_NATIVE, .precision = (ar_precision)p};
        cr_assert_ok(rank_run(&o, gradient_rank, &j));
        cr_expect_eq(j.gradient[0], six, "%a", (double)j.gradient[0]);
        cr_expect_eq(j.gradient[M], 2.0f * SIX, "%a", (double)j.gradient[M]);
    }
}

Test(precision, exact_numerics_have_products_of_fp32_and_bf16)
{
    for (int p = 0; p <= AR_PRECISION_COUNT; p++) {
        const ar_run o = {.parallel.tp = 1, .precision = (ar_precision)p};
        const bool known = p == AR_PRECISION_F32 || p == AR_PRECISION_BF16;
        cr_expect_eq(rank_run(&o, rank_nothing, NULL), known ? AR_OK : AR_ERR_ARG);
    }
}

Test(precision, eight_bits_are_bf16s)
{
    for (uint64_t i = 0; i < UINT64_C(1) << 32; i += 9973) {
        const float x = ari_float32((uint32_t)i), bf16 = ari_f32_of_bf16(ari_bf16_of_f32(x));
        cr_assert_eq(ari_bits32(ari_f32_to_bits(x, 8)), ari_bits32(bf16), "%a", (double)x);
    }
}

Test(precision, ties_go_to_even_and_overflow_to_infinity)
{
    cr_expect_eq(ari_f32_to_bits(1.0f + 0x1p-11f, 11), 1.0f);
    cr_expect_eq(ari_f32_to_bits(1.0f + 0x3p-11f, 11), 1.0f + 0x1p-9f);
    cr_expect_eq(ari_f32_to_bits(-1.0f - 0x1.8p-11f, 11), -1.0f - 0x1p-10f);
    cr_expect_eq(ari_f32_to_bits(0x1.fffffep127f, 11), INFINITY);
    cr_expect_eq(ari_f32_to_bits(-INFINITY, 11), -INFINITY);
    cr_expect(isnan(ari_f32_to_bits(ari_float32(0x7f800001u), 11)));
    cr_expect_eq(ari_f32_to_bits(0x3p-149f, 23), 0x4p-149f, "subnormals have fp32's last bit");
}
