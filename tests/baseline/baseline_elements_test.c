/* SPDX-License-Identifier: Apache-2.0 */
/* Norms, RoPE, activations, residuals and the loss of exact runs, recomputed from the emitted tensors with the shared
 * element definitions. Equal bits. */
#include "tests/baseline/support.h"

#include "ref/baseline/run.h"
#include "ref/numerics/scalar.h"
#include "support/together.h"

enum { B = 3, S = 5, W = 8, HEADS = 4, D = 4, F = 12, V = 11, T = B * S };

#define LAYER "model.layers.0."

static tape t;

static float at(const char *name, char pass, size_t i)
{
    return (float)tape_find(&t, name, pass)->values[i];
}

static void same(float want, const char *name, char pass, size_t i)
{
    const uint32_t emitted = ari_bits32(at(name, pass, i)), expected = ari_bits32(want);
    cr_assert(emitted == expected, "%s:%c[%zu] is %08x, the definition gives %08x", name, pass, i, emitted, expected);
}

static double row_sum(const double *x, size_t n)
{
    int32_t e = ARI_EXP_ZERO;
    int64_t s = 0;
    for (size_t i = 0; i < n; i++)
        e = ari_exponent64(x[i]) > e ? ari_exponent64(x[i]) : e;
    for (size_t i = 0; i < n; i++)
        s += ari_rowsum_quantise(x[i], e, ari_rowsum_bits(n));
    return ari_rowsum_value(s, e, ari_rowsum_bits(n));
}

typedef struct norm_names {
    const char *in, *norm, *dout, *weight, *bias; /* x:fwd, the norm, dy:bwd, parameters */
    double eps;
    bool centred;
} norm_names;

/* Forward, backward and both gradients of one norm. */
static void check_norm(const norm_names *n)
{
    struct {
        uint8_t t;
        int64_t h, l;
    } dgamma[W] = {0}, dbeta[W] = {0};
    for (size_t row = 0; row < T; row++) {
        double x[W], square[W], g[W], product[W];
        float d[W], xhat[W];
        for (size_t i = 0; i < W; i++)
            x[i] = (double)at(n->in, 'f', row * W + i);
        const double mean = n->centred ? row_sum(x, W) / W : 0.0;
        for (size_t i = 0; i < W; i++) {
            d[i] = n->centred ? ari_layernorm_d((float)x[i], mean) : (float)x[i];
            square[i] = (double)d[i] * (double)d[i];
        }
        const float rstd = ari_norm_rstd(row_sum(square, W) / W, n->eps);
        for (size_t i = 0; i < W; i++) {
            const float gamma = at(n->weight, 'i', i), dy = at(n->dout, 'b', row * W + i);
            xhat[i] = ari_mul32(d[i], rstd);
            same(n->centred ? ari_layernorm_y(xhat[i], gamma, at(n->bias, 'i', i)) : ari_mul32(xhat[i], gamma), n->norm,
                 'f', row * W + i);
            g[i] = (double)ari_mul32(dy, gamma);
            product[i] = g[i] * (double)xhat[i];
            ari_acc_add(&dgamma[i].t, &dgamma[i].h, &dgamma[i].l, ari_mul32(dy, xhat[i]));
            ari_acc_add(&dbeta[i].t, &dbeta[i].h, &dbeta[i].l, dy);
        }
        const double a = row_sum(g, W) / W, b = row_sum(product, W) / W;
        for (size_t i = 0; i < W; i++)
            same(n->centred ? ari_layernorm_dx((float)g[i], a, b, xhat[i], rstd)
                            : ari_rmsnorm_dx((float)g[i], b, xhat[i], rstd),
                 n->norm, 'b', row * W + i);
    }
    for (size_t i = 0; i < W; i++) {
        same(ari_acc_value(dgamma[i].t, dgamma[i].h, dgamma[i].l), n->weight, 'g', i);
        if (n->centred)
            same(ari_acc_value(dbeta[i].t, dbeta[i].h, dbeta[i].l), n->bias, 'g', i);
    }
}

/* Rows of width 2: dx is what rounding leaves of a difference of equals, so the order of its operations shows. */
static void check_narrow_norm(void)
{
    ar_config c = tiny_config(AR_ARCH_STACK, 1);
    const ar_baseline_options o = {.mode = AR_MODE_EXACT};
    ari_bl_run run = {.c = &c, .o = &o, .b = 1, .s = 1, .tokens = 1};
    c.hidden = 2;
    for (uint64_t i = 0; i < 400; i++) {
        double g[2], xhat[2], product[2], dx[2], rstd = (double)ari_random_uniform(3, i, 1.0);
        const double ones[2] = {1.0, 1.0};
        for (size_t k = 0; k < 2; k++) {
            g[k] = (double)ari_random_normal(1, 2 * i + k, 1.0);
            xhat[k] = (k == 0 ? 1.0 : -1.0) * (double)(1.0F - ari_random_uniform(2, i, 0x1p-18) - 0x1p-18F);
            product[k] = g[k] * xhat[k];
        }
        const ari_bl_norm norm = {"", 2, 1, ones, ones};
        const ari_bl_norm_saved saved = {.xhat = xhat, .rstd = &rstd};
        cr_assert_ok(ari_bl_norm_backward(&run, &norm, dx, g, &saved));
        for (size_t k = 0; k < 2; k++)
            cr_assert_eq(ari_bits32((float)dx[k]),
                         ari_bits32(ari_layernorm_dx((float)g[k], row_sum(g, 2) / 2.0, row_sum(product, 2) / 2.0,
                                                     (float)xhat[k], (float)rstd)));
    }
}

/* features of q or k [T, heads*D] before and after the rotation, or after and before with sign -1. */
static void check_rope(const char *from, const char *to, char pass, size_t heads, float sign, double factor)
{
    for (size_t row = 0; row < T; row++)
        for (size_t k = 0; k < heads * D / 2; k++) {
            const size_t i = k % (D / 2), first = row * heads * D + k / (D / 2) * D + i, second = first + D / 2;
            const float angle = ari_rope_angle(row % S, ari_rope_scaled(ari_rope_inv_freq(100.0, i, D), factor));
            const float c = ari_cos32(angle), s = sign * ari_sin32(angle);
            const float x1 = at(from, pass, first), x2 = at(from, pass, second);
            same(ari_rope_first(x1, x2, c, s), to, pass, first);
            same(ari_rope_second(x1, x2, c, s), to, pass, second);
        }
}

CLAIM(rmsnorm_and_layernorm_are_their_definitions)
{
    const ar_batch batch = tiny_batch();
    const ar_config llama = tiny_config(AR_ARCH_LLAMA, 1), gpt2 = tiny_config(AR_ARCH_GPT2, 1);
    const norm_names rms = {.in = "model.embed_tokens",
                            .norm = LAYER "input_layernorm",
                            .dout = LAYER "self_attn",
                            .weight = LAYER "input_layernorm.weight",
                            .eps = 1e-5};
    const norm_names layer = {.in = "transformer.h.0",
                              .norm = "transformer.ln_f",
                              .dout = "lm_head",
                              .weight = "transformer.ln_f.weight",
                              .bias = "transformer.ln_f.bias",
                              .eps = 1e-5,
                              .centred = true};
    run_or_fail(&llama, AR_MODE_EXACT, &batch, &t);
    check_norm(&rms);
    tape_clear(&t);
    run_or_fail(&gpt2, AR_MODE_EXACT, &batch, &t);
    check_norm(&layer);
    tape_clear(&t);
    check_narrow_norm();
}

CLAIM(rotary_positions_are_their_definition_and_turn_back)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    c.rope.kind = AR_ROPE_LINEAR;
    c.rope.factor = 3.0;
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    check_rope(LAYER "self_attn.q_proj", LAYER "self_attn.q_rope", 'f', HEADS, 1.0F, 3.0);
    check_rope(LAYER "self_attn.k_proj", LAYER "self_attn.k_rope", 'f', HEADS / 2, 1.0F, 3.0);
    check_rope(LAYER "self_attn.q_rope", LAYER "self_attn.q", 'b', HEADS, -1.0F, 3.0);
    check_rope(LAYER "self_attn.k_rope", LAYER "self_attn.k", 'b', HEADS / 2, -1.0F, 3.0);
    tape_clear(&t);
}

CLAIM(gated_and_plain_activations_are_their_definitions)
{
    const ar_config llama = tiny_config(AR_ARCH_LLAMA, 1), gpt2 = tiny_config(AR_ARCH_GPT2, 1);
    const ar_batch batch = tiny_batch();
    run_or_fail(&llama, AR_MODE_EXACT, &batch, &t);
    for (size_t i = 0; i < T * F; i++) {
        const float gate = at(LAYER "mlp.gate_proj", 'f', i), up = at(LAYER "mlp.up_proj", 'f', i);
        const float dy = at(LAYER "mlp.down_proj", 'b', i);
        same(ari_gated(gate, up), LAYER "mlp.act", 'f', i);
        same(ari_gated_dup(AR_ACT_SILU, dy, gate), LAYER "mlp.up", 'b', i);
        same(ari_gated_dgate(AR_ACT_SILU, dy, up, gate), LAYER "mlp.gate", 'b', i);
    }
    tape_clear(&t);
    run_or_fail(&gpt2, AR_MODE_EXACT, &batch, &t);
    for (size_t i = 0; i < T * F; i++) {
        const float x = at("transformer.h.0.mlp.c_fc", 'f', i), dy = at("transformer.h.0.mlp.c_proj", 'b', i);
        same(ari_gelu_tanh32(x), "transformer.h.0.mlp.act", 'f', i);
        same(ari_mul32(dy, ari_dgelu_tanh32(x)), "transformer.h.0.mlp.fc", 'b', i);
    }
    tape_clear(&t);
}

CLAIM(residuals_and_positions_are_single_additions)
{
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    const ar_batch batch = tiny_batch();
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    for (size_t i = 0; i < T * W; i++) {
        const size_t id = (size_t)tiny_ids[i / W], position = i / W % S;
        same(at("transformer.wte.weight", 'i', id * W + i % W), "transformer.wte", 'f', i);
        same(ari_add32(at("transformer.wte", 'f', i), at("transformer.wpe.weight", 'i', position * W + i % W)),
             "transformer.drop", 'f', i);
        same(ari_add32(at("transformer.drop", 'f', i), at("transformer.h.0.attn.c_proj", 'f', i)),
             "transformer.h.0.attn_residual", 'f', i);
        same(ari_add32(at("transformer.h.0.attn_residual", 'b', i), at("transformer.h.0.ln_1", 'b', i)),
             "transformer.h.0", 'b', i);
    }
    tape_clear(&t);
}

/* What the loss and its gradient are made of, of one row of logits. */
typedef struct row_parts {
    float e[V]; /* exp(x - m) */
    double l, lse, mean;
} row_parts;

static row_parts parts_of(size_t row)
{
    row_parts r;
    double x[V];
    int32_t m = INT32_MIN;
    int64_t s = 0;
    for (size_t i = 0; i < V; i++) {
        const int32_t key = ari_key32(at("lm_head", 'f', row * V + i));
        m = key > m ? key : m;
        x[i] = (double)at("lm_head", 'f', row * V + i);
    }
    for (size_t i = 0; i < V; i++) {
        r.e[i] = ari_softmax_exp((float)x[i], ari_key32_value(m));
        s += ari_rowsum_quantise((double)r.e[i], 1, ari_rowsum_bits(V));
    }
    r.l = ari_rowsum_value(s, 1, ari_rowsum_bits(V));
    r.lse = ari_ce_lse(ari_key32_value(m), r.l);
    r.mean = row_sum(x, V) / (double)V;
    return r;
}

static void expect_loss(const ar_loss_options *o)
{
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_baseline_options run = {.mode = AR_MODE_EXACT, .seed = 7, .loss = *o, .emit = tape_emit, .emit_user = &t};
    double loss = 0.0;
    uint8_t top = 0;
    int64_t high = 0, low = 0;
    cr_assert_ok(ar_baseline_run(&c, &run, &batch, &loss));
    for (size_t row = 0; row < T; row++) {
        const row_parts r = parts_of(row);
        const bool last = row % S == S - 1; /* predicts nothing: 12 targets */
        const size_t target = last ? V : (size_t)tiny_ids[row + 1];
        for (size_t i = 0; i < V; i++)
            same(last ? 0.0F
                      : ari_ce_dlogit(ari_softmax_p(r.e[i], r.l), ari_ce_weight(r.lse, o),
                                      ari_ce_label(i == target, V, o), 12.0),
                 "lm_head.logits", 'b', row * V + i);
        if (!last)
            ari_acc_add(&top, &high, &low, ari_ce_term(r.lse, at("lm_head", 'f', row * V + target), r.mean, o));
    }
    same((float)((double)ari_acc_value(top, high, low) / 12.0), "loss", 'f', 0);
    tape_clear(&t);
}

CLAIM(cross_entropy_is_its_definition)
{
    static const ar_loss_options losses[] = {
        {0}, {.label_smoothing = 0.1}, {.z_loss = 1e-4}, {.label_smoothing = 0.6, .z_loss = 0.25}};
    for (size_t i = 0; i < sizeof losses / sizeof *losses; i++)
        expect_loss(&losses[i]);
}

EVERY_CLAIM(baseline_elements)
