/* SPDX-License-Identifier: Apache-2.0 */
/* The element definitions of numerics.md section 4: worked values, and inputs at which another order of evaluation
 * or another precision would give other bits. */
#include "anyrank/activation.h"
#include "ref/numerics/activation.h"
#include "ref/numerics/scalar.h"
#include "support/together.h"

static void same(float got, float want, const char *what)
{
    cr_assert(ari_bits32(got) == ari_bits32(want), "%s: %08x (%a), expected %08x (%a)", what, ari_bits32(got),
              (double)got, ari_bits32(want), (double)want);
}

CLAIM(norm_rstd_is_binary64_inside)
{
    same(ari_norm_rstd(0.25, 0.0), 2.0f, "rstd of 1/4");
    same(ari_norm_rstd(2.0 / 3.0, 1e-5), 0x1.398848p+0f, "variance of 1, 2, 3");
    same(ari_norm_rstd(146.0 / 7.0, 1e-5), 0x1.c07024p-3f, "a sum rounded to fp32 would give ...22");
    same(ari_norm_rstd((double)INFINITY, 1e-5), 0.0f, "rstd of infinity");
    same(ari_norm_rstd((double)NAN, 1e-5), ari_nan32(), "rstd of NaN");
}

CLAIM(layernorm_keeps_the_mean_in_binary64)
{
    same(ari_layernorm_d(1.0f, 1.0 - 0x1p-40), 0x1p-40f, "a mean that fp32 would round to 1");
    same(ari_layernorm_y(3.0f, 0x1.000002p0f, -3.0f), 0x1p-21f, "the product is rounded before beta is added");
    same(ari_layernorm_y(0x1.000002p0f, 0x1.000002p0f, -1.0f), 0x1p-22f, "a fused product would keep 2^-46");
}

CLAIM(layernorm_dx_of_one_two_three)
{
    /* g constant: a = g and b = g*S(xhat)/h = 0, so dx = 0 exactly. */
    same(ari_layernorm_dx(0.75f, 0.75, 0.0, 1.2247449f, 1.2247449f), 0.0f, "constant gradient");
    same(ari_layernorm_dx(1.0f, 0.25, 0.5, 0.5f, 2.0f), 1.0f, "((1 - 1/4) - 1/2*1/2)*2");
    same(ari_layernorm_dx(1.0f, 0x1p-40, 0.0, 5.0f, 1.0f), 0x1p0f, "1 - 2^-40 rounds to 1 only at the end");
    same(ari_layernorm_dx(1.0f, 0x1p-40, 1.0, 1.0f, 1.0f), -0x1p-40f, "and the rest survives until then");
    same(ari_rmsnorm_dx(1.0f, 1.0 - 0x1p-45, 1.0f, 2.0f), 0x1p-44f, "RMSNorm's difference is binary64");
}

CLAIM(softmax_and_attention)
{
    same(ari_softmax_scale(64), 0.125f, "scale of 64");
    same(ari_softmax_scale(80), 0x1.c9f25cp-4f, "scale of 80");
    same(ari_softmax_exp(3.0f, 3.0f), 1.0f, "exp of 0");
    same(ari_softmax_p(1.0f, 3.0), 0x1.555556p-2f, "a third");
    same(ari_attention_ds(0.5f, 1.0f, 1.0 - 0x1p-40, 0.125f), 0x1p-44f, "the inner difference is binary64");
    same(ari_attention_ds(0.0f, 5.0f, 1.0, 0.125f), 0.0f, "masked");
    /* p*(dp - D) = 1 + 2^-24 + 2^-40 rounds up to 1 + 2^-23 before the scale; scale 1 + 2^-23 then doubles it. */
    same(ari_attention_ds(1.0f, 1.0f, -0x1p-24 - 0x1p-40, 0x1.000002p0f), 0x1.000004p0f, "rounded before the scale");
}

CLAIM(rotary_positions)
{
    same(ari_rope_inv_freq(10000.0, 0, 64), 1.0f, "frequency 0");
    same(ari_rope_inv_freq(10000.0, 16, 64), 0.01f, "half way");
    same(ari_rope_inv_freq(500000.0, 63, 128), (float)pow(500000.0, -126.0 / 128.0), "the slowest of Llama 3");
    same(ari_rope_scaled(1.0f, 3.0), 0x1.555556p-2f, "linear scaling");
    same(ari_rope_angle(16777217, 0x1p-24f), 1.0f, "2^24 + 1 times 2^-24, rounded once");
    same(ari_rope_angle(16777217, 3.0f), 50331652.0f, "the position is not rounded by itself");
    same(ari_rope_first(1.0f, 2.0f, 0.5f, 0.25f), 0.0f, "1*c - 2*s");
    same(ari_rope_second(1.0f, 2.0f, 0.5f, 0.25f), 1.25f, "2*c + 1*s");
    same(ari_rope_first(0x1.000002p0f, 1.0f, 0x1.000002p0f, 1.0f), 0x1p-22f, "no fused product");
    same(ari_rope_second(1.0f, 0x1.000002p0f, 0x1.000002p0f, -1.0f), 0x1p-22f, "no fused product");
}

CLAIM(gated_mlp_rounds_the_activation_first)
{
    const float gate = 1.7f, up = -2.3f, dy = 0.9f;
    const float a = (float)((double)gate / (1.0 + exp(-(double)gate)));
    same(ari_gated_act(AR_ACT_SILU, gate, up), a * up, "silu(gate)*up");
    same(ari_gated_act(AR_ACT_RELU, -1.0f, up), -0.0f, "relu(-1)*up");
    same(ari_gated_dup(AR_ACT_SILU, dy, up, gate), dy * a, "dup");
    const float product = dy * up;
    same(ari_gated_dgate(AR_ACT_RELU, dy, up, gate), product, "dgate of relu");
    same(ari_gated_dgate(AR_ACT_SILU, dy, up, gate), product * ari_dsilu32(gate), "dgate");
}

CLAIM(experts)
{
    cr_assert(ari_route_prefers(2.0f, 5, 1.0f, 0) && !ari_route_prefers(1.0f, 0, 2.0f, 5), "the larger logit");
    cr_assert(ari_route_prefers(1.0f, 1, 1.0f, 2) && !ari_route_prefers(1.0f, 2, 1.0f, 1), "the lower number");
    cr_assert(ari_route_prefers(-0.0f, 0, 0.0f, 1) && !ari_route_prefers(0.0f, 1, -0.0f, 0), "zeros are equal");
    same(ari_route_weight(1.0f, 3.0f), 0x1.555556p-2f, "a third");
    same(ari_route_dlogit(0x1.000002p0f, 1.0f, -0x1p-24f), 0x1.000002p0f, "the difference is rounded by itself");
    same(ari_add_gated32(-1.0f, 0x1.000002p0f, 0x1.000002p0f), 0x1p-22f, "no fused product");
    same(ari_dsigmoid32(2.0f, 0.5f), 0.5f, "2/4");
    same(ari_dsigmoid32(3.0f, 0.1f), (float)(3.0 * ((double)0.1f * (1.0 - (double)0.1f))), "binary64 inside");
}

CLAIM(cross_entropy)
{
    static const ar_loss_options none = {0}, both = {.label_smoothing = 0.25, .z_loss = 0.5};
    same(ari_ce_term(ari_ce_lse(5.0f, 1.0), 5.0f, 0.0, &none), 0.0f, "certain");
    same(ari_ce_term(ari_ce_lse(0.0f, 2.0), 0.0f, 0.0, &none), (float)log(2.0), "one in two");
    same(ari_ce_term(ari_ce_lse(1e8f, 2.0), 1e8f, 0.0, &none), (float)((1e8 + log(2.0)) - 1e8),
         "log l survives beside a large m in binary64");
    same(ari_ce_term(4.0, 2.0f, 1.0, &both), 0.75f * 2.0f + 0.25f * 3.0f + 0.5f * 16.0f, "three parts");
    same((float)ari_ce_weight(3.0, &both), 4.0f, "1 + 2*c*lse");
    same((float)ari_ce_label(1, 8, &both), 0.78125f, "3/4 + 1/32");
    same((float)ari_ce_label(0, 8, &both), 0.03125f, "1/32");
    same(ari_ce_dlogit(0.25f, 1.0, 1.0, 3.0), -0.25f, "(1/4 - 1)/3");
    same(ari_ce_dlogit(0.25f, 1.0, 0.0, 4.0), 0.0625f, "another entry");
    same(ari_ce_dlogit(0.25f, 4.0, 0.5, 2.0), 0.25f, "(4/4 - 1/2)/2");
    same(ari_ce_dlogit(0x1p-25f, 1.0, 1.0, 1.0), -1.0f + 0.0f, "p - 1 is rounded to fp32 before the division");
}

CLAIM(every_definition_returns_the_canonical_nan)
{
    const float bad = ari_float32(0xffc00001u), inf = INFINITY;
    const float results[] = {ari_mul32(inf, 0.0f),
                             ari_add32(inf, -inf),
                             ari_route_weight(bad, bad),
                             ari_route_dlogit(1.0f, inf, inf),
                             ari_add_gated32(inf, 0.0f, inf),
                             ari_dsigmoid32(bad, 0.5f),
                             ari_norm_rstd(-1.0, 0.0),
                             ari_layernorm_d(bad, 0.0),
                             ari_layernorm_y(bad, 1.0f, 1.0f),
                             ari_layernorm_dx(inf, (double)INFINITY, 0.0, 1.0f, 1.0f),
                             ari_rmsnorm_dx(inf, (double)INFINITY, 1.0f, 1.0f),
                             ari_attention_ds(0.0f, inf, 0.0, 1.0f),
                             ari_softmax_exp(inf, inf),
                             ari_softmax_p(0.0f, 0.0),
                             ari_rope_first(inf, inf, 1.0f, 1.0f),
                             ari_rope_second(inf, inf, -1.0f, 1.0f),
                             ari_gated_act(AR_ACT_SILU, bad, 1.0f),
                             ari_gated_act(AR_ACT_RELU, inf, 0.0f),
                             ari_gated_dup(AR_ACT_NONE, 0.0f, 1.0f, inf),
                             ari_gated_dgate(AR_ACT_SILU, inf, 0.0f, 1.0f),
                             ari_ce_term(INFINITY, inf, 0.0, &(ar_loss_options){0}),
                             ari_ce_dlogit(bad, 1.0, 0.0, 2.0)};
    for (size_t i = 0; i < sizeof results / sizeof results[0]; i++)
        cr_assert(ari_bits32(results[i]) == ARI_NAN_BITS, "result %zu: %08x", i, ari_bits32(results[i]));
}

EVERY_CLAIM(element)
