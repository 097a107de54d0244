/* SPDX-License-Identifier: Apache-2.0 */
/* What explanations read besides the tensor that differs: each such tensor may be missing, empty, a scalar, of integers,
 * BOOL or complex, or NaN. Every measure and replay then leaves what it cannot read; and the tensor itself may be
 * infinite in one element. */
#include "ref/core/tensor_private.h"
#include "tests/verify/two_dumps.h"

TestSuite(odd_inputs);

/* Tensors that differ; their dimensions fit those of the others. */
static const struct {
    const char *name;
    int ndim;
    size_t shape[4];
} outputs[] = {
    {"layers.0.mlp.act_fn:fwd", 3, {B, S, H}},
    {"layers.0.mlp:fwd", 3, {B, S, H}},
    {"layers.0.mlp.down_proj:fwd", 3, {B, S, H}},
    {"layers.0.mlp.gate:fwd", 3, {B, S, H}},
    {"layers.0.mlp.experts:fwd", 3, {B, S, H}},
    {"layers.0.mlp.experts.1.down_proj.weight:grad", 2, {H, H}},
    {"layers.0.self_attn:fwd", 3, {B, S, H}},
    {"layers.0.self_attn.o_proj:fwd", 3, {B, S, H}},
    {"layers.0.self_attn.q_proj:fwd", 3, {B, S, H}},
    {"layers.0.self_attn.softmax:fwd", 4, {B, 4, S, S}},
    {"layers.0.input_layernorm:fwd", 3, {B, S, H}},
    {"layers.0:fwd", 3, {B, S, H}},
    {"layers.0.down:fwd", 3, {B, S, H}},
    {"embed_tokens:fwd", 3, {B, S, H}},
    {"embed_tokens.weight:grad", 2, {IDS, H}},
    {"embed_tokens.weight:new", 2, {IDS, H}},
    {"lm_head:fwd", 3, {B, S, IDS}},
    {"lm_head.weight:grad", 2, {IDS, H}},
    {"layers.0.mlp:bwd", 3, {B, S, H}},
    {"lm_head:bwd", 3, {B, S, H}},
    {"loss:fwd", 0, {0}},
    {"grad_norm:clip", 0, {0}},
    {"layers.0.self_attn.q_proj.weight:grad", 2, {H, H}},
    {"layers.0.input_layernorm.weight:grad", 1, {H}},
    {"layers.0.mlp.gate.weight:grad", 2, {H, H}},
};

static const struct {
    const char *name;
    int ndim;
    size_t shape[4];
} others[] = {
    {"input_ids", 2, {B, S}},
    {"position_ids", 2, {B, S}},
    {"embed_tokens.weight:init", 2, {IDS, H}},
    {"embed_tokens:fwd", 3, {B, S, H}},
    {"layers.0.input_layernorm:fwd", 3, {B, S, H}},
    {"layers.0.input_layernorm.weight:init", 1, {H}},
    {"layers.0.post_attention_layernorm:fwd", 3, {B, S, H}},
    {"layers.0.self_attn.q_proj:fwd", 3, {B, S, H}},
    {"layers.0.self_attn.k_proj:fwd", 3, {B, S, H}},
    {"layers.0.self_attn.v_proj:fwd", 3, {B, S, H}},
    {"layers.0.self_attn.o_proj.weight:init", 2, {H, H}},
    {"layers.0.self_attn.sinks:init", 1, {4}},
    {"layers.0.self_attn:fwd", 3, {B, S, H}},
    {"layers.0.mlp.gate_proj:fwd", 3, {B, S, H}},
    {"layers.0.mlp.up_proj:fwd", 3, {B, S, H}},
    {"layers.0.mlp.act_fn:fwd", 3, {B, S, H}},
    {"layers.0.mlp.down_proj.weight:init", 2, {H, H}},
    {"layers.0.mlp.gate.weight:init", 2, {H, H}},
    {"layers.0.mlp.gate:fwd", 3, {B, S, H}},
    {"layers.0.mlp.experts.0.down_proj.weight:grad", 2, {H, H}},
    {"layers.0.mlp.experts.0.gate_proj.weight:init", 2, {H, H}},
    {"layers.0:fwd", 3, {B, S, H}},
    {"layers.0.mlp:bwd", 3, {B, S, H}},
    {"layers.0.self_attn:bwd", 3, {B, S, H}},
    {"norm:fwd", 3, {B, S, H}},
    {"lm_head.weight:init", 2, {IDS, H}},
    {"lm_head:bwd", 3, {B, S, H}},
    {"lm_head.logits:fwd", 3, {B, S, IDS}},
    {"lm_head.logits:bwd", 3, {B, S, IDS}},
    {"embed_tokens.weight:m", 2, {IDS, H}},
    {"embed_tokens.weight:v", 2, {IDS, H}},
    {"lm_head.weight:new", 2, {IDS, H}},
};
enum { OUTPUTS = sizeof outputs / sizeof *outputs, OTHERS = sizeof others / sizeof *others };

enum { RIGHT, WRONG, MISSING, EMPTY, NO_TOKENS, SCALAR, INTEGERS, BOOLS, COMPLEX, NANS, ONE_ROW, KINDS };

static ar_st_tensor tensor_of(size_t i, int kind)
{
    ar_st_tensor t = {.name = others[i].name, .dtype = AR_F32, .ndim = others[i].ndim};
    memcpy(t.shape, others[i].shape, sizeof others[i].shape);
    t.dtype = kind == INTEGERS ? AR_I64 : kind == BOOLS ? AR_BOOL : kind == COMPLEX ? AR_C64 : AR_F32;
    if (kind == EMPTY)
        t.shape[0] = 0;
    if (kind == NO_TOKENS)
        t.shape[t.ndim > 2] = 0;
    if (kind == SCALAR)
        t.ndim = 0;
    if (kind == ONE_ROW)
        t.shape[0] = t.ndim > 1 ? 1 : t.shape[0];
    return t;
}

static void put_other(made *m, size_t i, int kind)
{
    static unsigned char data[2][B * S * IDS * H * 8];
    const ar_st_tensor t = tensor_of(i, kind);
    const size_t bytes = count_of(&t) * (ari_dtype_bits(t.dtype) / 8);
    memset(data, 0, sizeof data);
    for (size_t k = 0; k < bytes / 4 && kind != BOOLS && kind != INTEGERS; k++) {
        for (size_t side = 0; side < 2; side++) {
            const float x = kind == NANS ? NAN : noise(k + 977 * i + (kind == WRONG ? 31 * side : 0));
            memcpy(data[side] + 4 * k, &x, 4);
        }
    }
    for (size_t k = 0; k < bytes && kind == INTEGERS; k += 8)
        data[0][k] = data[1][k] = (unsigned char)(k / 8 % IDS);
    for (size_t k = 0; k < bytes && kind == BOOLS; k++)
        data[0][k] = data[1][k] = k % 3 == 0;
    put_pair(m, t, data[0], data[1]);
}

/* An output, and all others of one kind, or of one kind each in turn. */
static void look_at(size_t output, int kind, bool mixed, bool infinite)
{
    made m = {.n = 0};
    for (size_t i = 0; i < OTHERS; i++) {
        const int own = mixed ? (int)((i * 5 + (size_t)kind + output) % KINDS) : kind;
        if (own != MISSING && strcmp(others[i].name, outputs[output].name) != 0)
            put_other(&m, i, own);
    }
    ar_st_tensor t = {.name = outputs[output].name, .dtype = AR_F32, .ndim = outputs[output].ndim};
    memcpy(t.shape, outputs[output].shape, sizeof outputs[output].shape);
    put_pair(&m, t, NULL, NULL);
    float *const x = other_of(&m);
    for (size_t i = 0; i < count_of(&t); i++)
        x[i] = infinite ? i == 3 ? INFINITY : x[i] : (i % 7 == 3 ? 1.1f : 1.3f) * x[i] + 0.01f * noise(i + 5);
    ar_verify_row row = look(&m, (ari_explain_case){.heads = 4, .kv_heads = 2});
    cr_expect_not_null(row.evidence.cause, "%s, kind %d%s", outputs[output].name, kind, mixed ? ", mixed" : "");
}

Test(odd_inputs, leave_every_output_explained)
{
    for (size_t output = 0; output < OUTPUTS; output++) {
        for (int kind = 0; kind < KINDS; kind++) {
            look_at(output, kind, false, false);
            look_at(output, kind, true, false);
            look_at(output, kind, true, true);
        }
    }
}
