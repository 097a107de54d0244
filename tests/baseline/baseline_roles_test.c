/* SPDX-License-Identifier: Apache-2.0 */
/* What is contracted with what, and what shares exponents: the emitted tensors of an exact run, recomputed one from
 * another with the 128-bit contraction, the (t, H, L) accumulator and the element definitions. Equal bits. */
#include "tests/baseline/support.h"

#include "ref/numerics/scalar.h"
#include "tests/support/contraction.h"

/* A tied Llama of one layer with two groups of query heads: b 3, s 5, h 8, H 4, G 2, F 12, V 11; d 6, so that the scale
 * of the scores is no power of two and each of its roundings shows. */
enum { B = 3, S = 5, W = 8, HEADS = 4, GROUPS = 2, D = 6, F = 12, V = 11, T = B * S, Q = HEADS * D, KV = GROUPS * D };

#define LAYER "model.layers.0."

static tape t;

static void record(void)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    ar_batch batch = tiny_batch();
    static const int64_t labels[] = {-100, 1, 4, 1, 5, /**/ 9, 2, 6, -100, 3, /**/ 5, 8, 9, -100, -100};
    c.tied = true;
    c.head_dim = D;
    batch.labels = labels;
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
}

/* Columns [at, at + cols) of out [rows, ld] from the tensor [rows, cols]. */
static void read_into(float *out, size_t ld, size_t at, const char *name, char pass, size_t cols)
{
    const taped *a = tape_find(&t, name, pass);
    for (size_t i = 0; i < a->count; i++)
        out[i / cols * ld + at + i % cols] = (float)a->values[i];
}

static void read_all(float *out, const char *name, char pass)
{
    read_into(out, 1, 0, name, pass, 1);
}

/* Columns [at, at + cols) of got [rows, ld] against the emitted tensor [rows, cols]. */
static void expect(const float *got, size_t ld, size_t at, const char *name, char pass, size_t cols)
{
    const taped *a = tape_find(&t, name, pass);
    for (size_t i = 0; i < a->count; i++) {
        const uint32_t emitted = ari_bits32((float)a->values[i]), want = ari_bits32(got[i / cols * ld + at + i % cols]);
        cr_assert(emitted == want, "%s:%c[%zu] is %08x, the definition gives %08x", name, pass, i, emitted, want);
    }
}

static void contract(float *c, size_t m, size_t n, size_t k, const float *a, size_t a_row, size_t a_k, const float *b,
                     size_t b_row, size_t b_k, bool scale)
{
    cr_assert_ok(ar_contract_definition(c, m, n, k, a, (ptrdiff_t)a_row, (ptrdiff_t)a_k, b, (ptrdiff_t)b_row,
                                        (ptrdiff_t)b_k, scale));
}

typedef struct sums {
    uint8_t t[64 * 64];
    int64_t h[64 * 64], l[64 * 64];
} sums;

static void sums_add(sums *s, const float *v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ari_acc_add(&s->t[i], &s->h[i], &s->l[i], v[i]);
}

static void sums_expect(const sums *s, const char *name, size_t n)
{
    float value[64 * 64];
    for (size_t i = 0; i < n; i++)
        value[i] = ari_acc_value(s->t[i], s->h[i], s->l[i]);
    cr_assert_eq(tape_find(&t, name, 'g')->count, n);
    expect(value, 1, 0, name, 'g', 1);
}

/* dW [out, in]: per sample one contraction over its tokens, dy the A and x the B. */
static void expect_weight_gradient(const char *name, const float *dy, size_t ld, size_t at, size_t out, const float *x,
                                   size_t in)
{
    static sums s;
    float dw[64 * 64];
    memset(&s, 0, sizeof s);
    for (size_t n = 0; n < B; n++) {
        contract(dw, out, in, S, dy + n * S * ld + at, 1, ld, x + n * S * in, 1, in, true);
        sums_add(&s, dw, out * in);
    }
    sums_expect(&s, name, out * in);
}

static float qkv_weight[(Q + 2 * KV) * W];

static void read_qkv_weight(void)
{
    read_all(qkv_weight, LAYER "self_attn.q_proj.weight", 'i');
    read_all(qkv_weight + Q * W, LAYER "self_attn.k_proj.weight", 'i');
    read_all(qkv_weight + (Q + KV) * W, LAYER "self_attn.v_proj.weight", 'i');
}

TestSuite(baseline_roles, .init = record);

Test(baseline_roles, projections_of_one_input_share_one_equilibration)
{
    enum { ALL = Q + 2 * KV };
    static float x[T * W], y[T * ALL], gate_up[2 * F * W], z[T * 2 * F];
    read_all(x, LAYER "input_layernorm", 'f');
    read_qkv_weight();
    contract(y, T, ALL, W, x, W, 1, qkv_weight, W, 1, true);
    expect(y, ALL, 0, LAYER "self_attn.q_proj", 'f', Q);
    expect(y, ALL, Q, LAYER "self_attn.k_proj", 'f', KV);
    expect(y, ALL, Q + KV, LAYER "self_attn.v_proj", 'f', KV);
    read_all(x, LAYER "post_attention_layernorm", 'f');
    read_all(gate_up, LAYER "mlp.gate_proj.weight", 'i');
    read_all(gate_up + F * W, LAYER "mlp.up_proj.weight", 'i');
    contract(z, T, 2 * F, W, x, W, 1, gate_up, W, 1, true);
    expect(z, 2 * F, 0, LAYER "mlp.gate_proj", 'f', F);
    expect(z, 2 * F, F, LAYER "mlp.up_proj", 'f', F);
}

Test(baseline_roles, gradients_that_meet_are_one_contraction_over_all_outputs)
{
    enum { ALL = Q + 2 * KV };
    static float dy[T * ALL], dx[T * W], x[T * W], dz[T * 2 * F], gate_up[2 * F * W];
    read_qkv_weight();
    read_into(dy, ALL, 0, LAYER "self_attn.q", 'b', Q);
    read_into(dy, ALL, Q, LAYER "self_attn.k", 'b', KV);
    read_into(dy, ALL, Q + KV, LAYER "self_attn.v", 'b', KV);
    contract(dx, T, W, ALL, dy, ALL, 1, qkv_weight, 1, W, true);
    expect(dx, W, 0, LAYER "self_attn", 'b', W);
    read_all(x, LAYER "input_layernorm", 'f');
    expect_weight_gradient(LAYER "self_attn.q_proj.weight", dy, ALL, 0, Q, x, W);
    expect_weight_gradient(LAYER "self_attn.k_proj.weight", dy, ALL, Q, KV, x, W);
    expect_weight_gradient(LAYER "self_attn.v_proj.weight", dy, ALL, Q + KV, KV, x, W);
    read_into(dz, 2 * F, 0, LAYER "mlp.gate", 'b', F);
    read_into(dz, 2 * F, F, LAYER "mlp.up", 'b', F);
    read_all(gate_up, LAYER "mlp.gate_proj.weight", 'i');
    read_all(gate_up + F * W, LAYER "mlp.up_proj.weight", 'i');
    contract(dx, T, W, 2 * F, dz, 2 * F, 1, gate_up, 1, W, true);
    expect(dx, W, 0, LAYER "mlp", 'b', W);
}

/* Softmax over the visible keys of a causal row, from the rotated q and k; then O. */
Test(baseline_roles, attention_is_its_element_definitions)
{
    static float q[T * Q], k[T * KV], v[T * KV], probs[B * HEADS * S * S], context[T * Q];
    read_all(q, LAYER "self_attn.q_rope", 'f');
    read_all(k, LAYER "self_attn.k_rope", 'f');
    read_all(v, LAYER "self_attn.v_proj", 'f');
    for (size_t at = 0; at < B * HEADS; at++) {
        const size_t n = at / HEADS, head = at % HEADS, group = head / (HEADS / GROUPS);
        float scores[S * S], out[S * D], *p = probs + at * S * S;
        contract(scores, S, S, D, q + n * S * Q + head * D, Q, 1, k + n * S * KV + group * D, KV, 1, false);
        for (size_t i = 0; i < S; i++) {
            int32_t m = INT32_MIN;
            int64_t sum = 0;
            for (size_t j = 0; j <= i; j++) {
                scores[i * S + j] = ari_mul32(scores[i * S + j], ari_softmax_scale(D));
                m = ari_key32(scores[i * S + j]) > m ? ari_key32(scores[i * S + j]) : m;
            }
            for (size_t j = 0; j <= i; j++) {
                p[i * S + j] = ari_softmax_exp(scores[i * S + j], ari_key32_value(m));
                sum += ari_rowsum_quantise((double)p[i * S + j], 1, ari_rowsum_bits(S));
            }
            for (size_t j = 0; j <= i; j++)
                p[i * S + j] = ari_softmax_p(p[i * S + j], ari_rowsum_value(sum, 1, ari_rowsum_bits(S)));
        }
        contract(out, S, D, S, p, S, 1, v + n * S * KV + group * D, 1, KV, true);
        for (size_t i = 0; i < S * D; i++)
            context[(n * S + i / D) * Q + head * D + i % D] = out[i];
    }
    expect(probs, 1, 0, LAYER "self_attn.probs", 'f', 1);
    expect(context, 1, 0, LAYER "self_attn.context", 'f', 1);
}

/* dS [B, HEADS, S, S] from the emitted probabilities and dP. */
static void read_ds(float *ds, float *probs)
{
    static float dp[B * HEADS * S * S];
    read_all(probs, LAYER "self_attn.probs", 'f');
    read_all(dp, LAYER "self_attn.probs", 'b');
    for (size_t row = 0; row < B * HEADS * S; row++) {
        const float *p = probs + row * S;
        const int32_t bits = ari_rowsum_bits(S);
        int32_t e = ARI_EXP_ZERO;
        int64_t sum = 0;
        for (size_t j = 0; j < S; j++) {
            const int32_t of_product = ari_exponent64((double)p[j] * (double)dp[row * S + j]);
            e = of_product > e ? of_product : e;
        }
        for (size_t j = 0; j < S; j++)
            sum += ari_rowsum_quantise((double)p[j] * (double)dp[row * S + j], e, bits);
        for (size_t j = 0; j < S; j++)
            ds[row * S + j] = j > row % S ? 0.0F
                                          : ari_attention_ds(p[j], dp[row * S + j], ari_rowsum_value(sum, e, bits),
                                                             ari_softmax_scale(D));
    }
}

Test(baseline_roles, gradient_of_the_probabilities_is_zero_at_masked_keys)
{
    static float v[T * KV], dout[T * Q], dp[B * HEADS * S * S];
    read_all(v, LAYER "self_attn.v_proj", 'f');
    read_all(dout, LAYER "self_attn.o_proj", 'b');
    for (size_t at = 0; at < B * HEADS; at++) {
        const size_t n = at / HEADS, head = at % HEADS, group = head / (HEADS / GROUPS);
        float *one = dp + at * S * S;
        contract(one, S, S, D, dout + n * S * Q + head * D, Q, 1, v + n * S * KV + group * D, KV, 1, false);
        for (size_t i = 0; i < S * S; i++)
            one[i] = i % S > i / S ? 0.0F : one[i];
    }
    expect(dp, 1, 0, LAYER "self_attn.probs", 'b', 1);
}

Test(baseline_roles, key_and_value_gradients_are_one_contraction_over_heads_and_queries)
{
    enum { MEMBERS = HEADS / GROUPS, K = MEMBERS * S };
    static float ds[B * HEADS * S * S], probs[B * HEADS * S * S], q[T * Q], k[T * KV], dout[T * Q];
    static float dq[T * Q], dk[T * KV], dv[T * KV];
    read_ds(ds, probs);
    read_all(q, LAYER "self_attn.q_rope", 'f');
    read_all(k, LAYER "self_attn.k_rope", 'f');
    read_all(dout, LAYER "self_attn.o_proj", 'b');
    for (size_t at = 0; at < B * GROUPS; at++) {
        const size_t n = at / GROUPS, group = at % GROUPS, first = group * MEMBERS;
        float q_rows[K * D], dout_rows[K * D], one[S * D];
        for (size_t i = 0; i < K * D; i++) {
            const size_t from = (n * S + i / D % S) * Q + (first + i / D / S) * D + i % D;
            q_rows[i] = q[from];
            dout_rows[i] = dout[from];
        }
        const size_t square = (n * HEADS + first) * S * S;
        contract(one, S, D, K, ds + square, 1, S, q_rows, 1, D, true);
        for (size_t i = 0; i < S * D; i++)
            dk[(n * S + i / D) * KV + group * D + i % D] = one[i];
        contract(one, S, D, K, probs + square, 1, S, dout_rows, 1, D, true);
        for (size_t i = 0; i < S * D; i++)
            dv[(n * S + i / D) * KV + group * D + i % D] = one[i];
        for (size_t member = 0; member < MEMBERS; member++) {
            contract(one, S, D, S, ds + square + member * S * S, S, 1, k + n * S * KV + group * D, 1, KV, true);
            for (size_t i = 0; i < S * D; i++)
                dq[(n * S + i / D) * Q + (first + member) * D + i % D] = one[i];
        }
    }
    expect(dk, 1, 0, LAYER "self_attn.k_rope", 'b', 1);
    expect(dv, 1, 0, LAYER "self_attn.v", 'b', 1);
    expect(dq, 1, 0, LAYER "self_attn.q_rope", 'b', 1);
}

/* A tied weight: per sample one value from the head's contraction, per token one from the embedding, in one sum. */
Test(baseline_roles, tied_weight_sums_both_uses_at_once)
{
    static sums s;
    static float dlogits[T * V], x[T * W], dx[T * W], dw[V * W];
    read_all(dlogits, "lm_head.logits", 'b');
    read_all(x, "model.norm", 'f');
    read_all(dx, "model.layers.0", 'b');
    memset(&s, 0, sizeof s);
    for (size_t i = 0; i < T * W; i++) {
        const size_t at = (size_t)tiny_ids[i / W] * W + i % W;
        ari_acc_add(&s.t[at], &s.h[at], &s.l[at], dx[i]);
    }
    for (size_t n = 0; n < B; n++) {
        contract(dw, V, W, S, dlogits + n * S * V, 1, V, x + n * S * W, 1, W, true);
        sums_add(&s, dw, V * W);
    }
    sums_expect(&s, "model.embed_tokens.weight", V * W);
}
