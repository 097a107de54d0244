/* SPDX-License-Identifier: Apache-2.0 */
/* What a run emits, in which order: lists written by hand from models.md for one-layer models. */
#include "tests/baseline/support.h"

#include "ref/numerics/philox.h"
#include "support/together.h"

typedef struct expected_tensor {
    const char *name;
    char pass;
    int ndim;
    size_t shape[4];
} expected_tensor;

/* b 3, s 5, h 8, H 4, G 2, d 4, F 12, V 11 */
static const expected_tensor llama_list[] = {
    {"model.embed_tokens.weight", 'i', 2, {11, 8}},
    {"model.layers.0.input_layernorm.weight", 'i', 1, {8}},
    {"model.layers.0.self_attn.q_proj.weight", 'i', 2, {16, 8}},
    {"model.layers.0.self_attn.k_proj.weight", 'i', 2, {8, 8}},
    {"model.layers.0.self_attn.v_proj.weight", 'i', 2, {8, 8}},
    {"model.layers.0.self_attn.o_proj.weight", 'i', 2, {8, 16}},
    {"model.layers.0.post_attention_layernorm.weight", 'i', 1, {8}},
    {"model.layers.0.mlp.gate_proj.weight", 'i', 2, {12, 8}},
    {"model.layers.0.mlp.up_proj.weight", 'i', 2, {12, 8}},
    {"model.layers.0.mlp.down_proj.weight", 'i', 2, {8, 12}},
    {"model.norm.weight", 'i', 1, {8}},
    {"lm_head.weight", 'i', 2, {11, 8}},
    {"model.embed_tokens", 'f', 3, {3, 5, 8}},
    {"model.layers.0.input_layernorm", 'f', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.q_proj", 'f', 3, {3, 5, 16}},
    {"model.layers.0.self_attn.k_proj", 'f', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.v_proj", 'f', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.q_rope", 'f', 3, {3, 5, 16}},
    {"model.layers.0.self_attn.k_rope", 'f', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.probs", 'f', 4, {3, 4, 5, 5}},
    {"model.layers.0.self_attn.context", 'f', 3, {3, 5, 16}},
    {"model.layers.0.self_attn.o_proj", 'f', 3, {3, 5, 8}},
    {"model.layers.0.attn_residual", 'f', 3, {3, 5, 8}},
    {"model.layers.0.post_attention_layernorm", 'f', 3, {3, 5, 8}},
    {"model.layers.0.mlp.gate_proj", 'f', 3, {3, 5, 12}},
    {"model.layers.0.mlp.up_proj", 'f', 3, {3, 5, 12}},
    {"model.layers.0.mlp.act", 'f', 3, {3, 5, 12}},
    {"model.layers.0.mlp.down_proj", 'f', 3, {3, 5, 8}},
    {"model.layers.0", 'f', 3, {3, 5, 8}},
    {"model.norm", 'f', 3, {3, 5, 8}},
    {"lm_head", 'f', 3, {3, 5, 11}},
    {"loss", 'f', 0, {0}},
    {"lm_head.logits", 'b', 3, {3, 5, 11}},
    {"lm_head", 'b', 3, {3, 5, 8}},
    {"lm_head.weight", 'g', 2, {11, 8}},
    {"model.norm", 'b', 3, {3, 5, 8}},
    {"model.norm.weight", 'g', 1, {8}},
    {"model.layers.0.mlp.down_proj", 'b', 3, {3, 5, 12}},
    {"model.layers.0.mlp.down_proj.weight", 'g', 2, {8, 12}},
    {"model.layers.0.mlp.gate", 'b', 3, {3, 5, 12}},
    {"model.layers.0.mlp.up", 'b', 3, {3, 5, 12}},
    {"model.layers.0.mlp", 'b', 3, {3, 5, 8}},
    {"model.layers.0.mlp.gate_proj.weight", 'g', 2, {12, 8}},
    {"model.layers.0.mlp.up_proj.weight", 'g', 2, {12, 8}},
    {"model.layers.0.post_attention_layernorm", 'b', 3, {3, 5, 8}},
    {"model.layers.0.post_attention_layernorm.weight", 'g', 1, {8}},
    {"model.layers.0.attn_residual", 'b', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.o_proj", 'b', 3, {3, 5, 16}},
    {"model.layers.0.self_attn.o_proj.weight", 'g', 2, {8, 16}},
    {"model.layers.0.self_attn.probs", 'b', 4, {3, 4, 5, 5}},
    {"model.layers.0.self_attn.q_rope", 'b', 3, {3, 5, 16}},
    {"model.layers.0.self_attn.k_rope", 'b', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.v", 'b', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.q", 'b', 3, {3, 5, 16}},
    {"model.layers.0.self_attn.k", 'b', 3, {3, 5, 8}},
    {"model.layers.0.self_attn", 'b', 3, {3, 5, 8}},
    {"model.layers.0.self_attn.q_proj.weight", 'g', 2, {16, 8}},
    {"model.layers.0.self_attn.k_proj.weight", 'g', 2, {8, 8}},
    {"model.layers.0.self_attn.v_proj.weight", 'g', 2, {8, 8}},
    {"model.layers.0.input_layernorm", 'b', 3, {3, 5, 8}},
    {"model.layers.0.input_layernorm.weight", 'g', 1, {8}},
    {"model.layers.0", 'b', 3, {3, 5, 8}},
    {"model.embed_tokens.weight", 'g', 2, {11, 8}},
};

/* H = G = 4, tied */
static const expected_tensor gpt2_list[] = {
    {"transformer.wte.weight", 'i', 2, {11, 8}},
    {"transformer.wpe.weight", 'i', 2, {9, 8}},
    {"transformer.h.0.ln_1.weight", 'i', 1, {8}},
    {"transformer.h.0.ln_1.bias", 'i', 1, {8}},
    {"transformer.h.0.attn.c_attn.weight", 'i', 2, {8, 48}},
    {"transformer.h.0.attn.c_attn.bias", 'i', 1, {48}},
    {"transformer.h.0.attn.c_proj.weight", 'i', 2, {16, 8}},
    {"transformer.h.0.attn.c_proj.bias", 'i', 1, {8}},
    {"transformer.h.0.ln_2.weight", 'i', 1, {8}},
    {"transformer.h.0.ln_2.bias", 'i', 1, {8}},
    {"transformer.h.0.mlp.c_fc.weight", 'i', 2, {8, 12}},
    {"transformer.h.0.mlp.c_fc.bias", 'i', 1, {12}},
    {"transformer.h.0.mlp.c_proj.weight", 'i', 2, {12, 8}},
    {"transformer.h.0.mlp.c_proj.bias", 'i', 1, {8}},
    {"transformer.ln_f.weight", 'i', 1, {8}},
    {"transformer.ln_f.bias", 'i', 1, {8}},
    {"transformer.wte", 'f', 3, {3, 5, 8}},
    {"transformer.drop", 'f', 3, {3, 5, 8}},
    {"transformer.h.0.ln_1", 'f', 3, {3, 5, 8}},
    {"transformer.h.0.attn.q", 'f', 3, {3, 5, 16}},
    {"transformer.h.0.attn.k", 'f', 3, {3, 5, 16}},
    {"transformer.h.0.attn.v", 'f', 3, {3, 5, 16}},
    {"transformer.h.0.attn.probs", 'f', 4, {3, 4, 5, 5}},
    {"transformer.h.0.attn.context", 'f', 3, {3, 5, 16}},
    {"transformer.h.0.attn.c_proj", 'f', 3, {3, 5, 8}},
    {"transformer.h.0.attn_residual", 'f', 3, {3, 5, 8}},
    {"transformer.h.0.ln_2", 'f', 3, {3, 5, 8}},
    {"transformer.h.0.mlp.c_fc", 'f', 3, {3, 5, 12}},
    {"transformer.h.0.mlp.act", 'f', 3, {3, 5, 12}},
    {"transformer.h.0.mlp.c_proj", 'f', 3, {3, 5, 8}},
    {"transformer.h.0", 'f', 3, {3, 5, 8}},
    {"transformer.ln_f", 'f', 3, {3, 5, 8}},
    {"lm_head", 'f', 3, {3, 5, 11}},
    {"loss", 'f', 0, {0}},
    {"lm_head.logits", 'b', 3, {3, 5, 11}},
    {"lm_head", 'b', 3, {3, 5, 8}},
    {"transformer.ln_f", 'b', 3, {3, 5, 8}},
    {"transformer.ln_f.weight", 'g', 1, {8}},
    {"transformer.ln_f.bias", 'g', 1, {8}},
    {"transformer.h.0.mlp.c_proj", 'b', 3, {3, 5, 12}},
    {"transformer.h.0.mlp.c_proj.weight", 'g', 2, {12, 8}},
    {"transformer.h.0.mlp.c_proj.bias", 'g', 1, {8}},
    {"transformer.h.0.mlp.fc", 'b', 3, {3, 5, 12}},
    {"transformer.h.0.mlp.c_fc", 'b', 3, {3, 5, 8}},
    {"transformer.h.0.mlp.c_fc.weight", 'g', 2, {8, 12}},
    {"transformer.h.0.mlp.c_fc.bias", 'g', 1, {12}},
    {"transformer.h.0.ln_2", 'b', 3, {3, 5, 8}},
    {"transformer.h.0.ln_2.weight", 'g', 1, {8}},
    {"transformer.h.0.ln_2.bias", 'g', 1, {8}},
    {"transformer.h.0.attn_residual", 'b', 3, {3, 5, 8}},
    {"transformer.h.0.attn.c_proj", 'b', 3, {3, 5, 16}},
    {"transformer.h.0.attn.c_proj.weight", 'g', 2, {16, 8}},
    {"transformer.h.0.attn.c_proj.bias", 'g', 1, {8}},
    {"transformer.h.0.attn.probs", 'b', 4, {3, 4, 5, 5}},
    {"transformer.h.0.attn.v", 'b', 3, {3, 5, 16}},
    {"transformer.h.0.attn.q", 'b', 3, {3, 5, 16}},
    {"transformer.h.0.attn.k", 'b', 3, {3, 5, 16}},
    {"transformer.h.0.attn.c_attn", 'b', 3, {3, 5, 8}},
    {"transformer.h.0.attn.c_attn.weight", 'g', 2, {8, 48}},
    {"transformer.h.0.attn.c_attn.bias", 'g', 1, {48}},
    {"transformer.h.0.ln_1", 'b', 3, {3, 5, 8}},
    {"transformer.h.0.ln_1.weight", 'g', 1, {8}},
    {"transformer.h.0.ln_1.bias", 'g', 1, {8}},
    {"transformer.h.0", 'b', 3, {3, 5, 8}},
    {"transformer.wte.weight", 'g', 2, {11, 8}},
    {"transformer.wpe.weight", 'g', 2, {9, 8}},
};

static const expected_tensor stack_list[] = {
    {"embed.weight", 'i', 2, {11, 8}},
    {"layers.0.ln1.weight", 'i', 1, {8}},
    {"layers.0.ln1.bias", 'i', 1, {8}},
    {"layers.0.attn.wq.weight", 'i', 2, {16, 8}},
    {"layers.0.attn.wk.weight", 'i', 2, {8, 8}},
    {"layers.0.attn.wv.weight", 'i', 2, {8, 8}},
    {"layers.0.attn.wo.weight", 'i', 2, {8, 16}},
    {"layers.0.ln2.weight", 'i', 1, {8}},
    {"layers.0.ln2.bias", 'i', 1, {8}},
    {"layers.0.mlp.w1.weight", 'i', 2, {12, 8}},
    {"layers.0.mlp.w1.bias", 'i', 1, {12}},
    {"layers.0.mlp.w2.weight", 'i', 2, {8, 12}},
    {"layers.0.mlp.w2.bias", 'i', 1, {8}},
    {"embed", 'f', 3, {3, 5, 8}},
    {"layers.0.ln1", 'f', 3, {3, 5, 8}},
    {"layers.0.attn.wq", 'f', 3, {3, 5, 16}},
    {"layers.0.attn.wk", 'f', 3, {3, 5, 8}},
    {"layers.0.attn.wv", 'f', 3, {3, 5, 8}},
    {"layers.0.attn.probs", 'f', 4, {3, 4, 5, 5}},
    {"layers.0.attn.context", 'f', 3, {3, 5, 16}},
    {"layers.0.attn.wo", 'f', 3, {3, 5, 8}},
    {"layers.0.attn_residual", 'f', 3, {3, 5, 8}},
    {"layers.0.ln2", 'f', 3, {3, 5, 8}},
    {"layers.0.mlp.w1", 'f', 3, {3, 5, 12}},
    {"layers.0.mlp.act", 'f', 3, {3, 5, 12}},
    {"layers.0.mlp.w2", 'f', 3, {3, 5, 8}},
    {"layers.0", 'f', 3, {3, 5, 8}},
    {"loss", 'f', 0, {0}},
    {"layers.0.mlp.w2", 'b', 3, {3, 5, 12}},
    {"layers.0.mlp.w2.weight", 'g', 2, {8, 12}},
    {"layers.0.mlp.w2.bias", 'g', 1, {8}},
    {"layers.0.mlp.fc", 'b', 3, {3, 5, 12}},
    {"layers.0.mlp.w1", 'b', 3, {3, 5, 8}},
    {"layers.0.mlp.w1.weight", 'g', 2, {12, 8}},
    {"layers.0.mlp.w1.bias", 'g', 1, {12}},
    {"layers.0.ln2", 'b', 3, {3, 5, 8}},
    {"layers.0.ln2.weight", 'g', 1, {8}},
    {"layers.0.ln2.bias", 'g', 1, {8}},
    {"layers.0.attn_residual", 'b', 3, {3, 5, 8}},
    {"layers.0.attn.wo", 'b', 3, {3, 5, 16}},
    {"layers.0.attn.wo.weight", 'g', 2, {8, 16}},
    {"layers.0.attn.probs", 'b', 4, {3, 4, 5, 5}},
    {"layers.0.attn.v", 'b', 3, {3, 5, 8}},
    {"layers.0.attn.q", 'b', 3, {3, 5, 16}},
    {"layers.0.attn.k", 'b', 3, {3, 5, 8}},
    {"layers.0.attn", 'b', 3, {3, 5, 8}},
    {"layers.0.attn.wq.weight", 'g', 2, {16, 8}},
    {"layers.0.attn.wk.weight", 'g', 2, {8, 8}},
    {"layers.0.attn.wv.weight", 'g', 2, {8, 8}},
    {"layers.0.ln1", 'b', 3, {3, 5, 8}},
    {"layers.0.ln1.weight", 'g', 1, {8}},
    {"layers.0.ln1.bias", 'g', 1, {8}},
    {"layers.0", 'b', 3, {3, 5, 8}},
    {"embed.weight", 'g', 2, {11, 8}},
};

/* Names, passes and shapes one by one; every tensor finite and not all zero. */
static void check_list(const ar_config *c, ar_number_mode mode, const expected_tensor *list, size_t n)
{
    static tape t;
    const ar_batch batch = tiny_batch();
    const double loss = run_or_fail(c, mode, &batch, &t);
    for (size_t i = 0; i < n && i < t.n; i++) {
        const taped *a = &t.at[i];
        cr_assert(strcmp(a->name, list[i].name) == 0 && a->pass == list[i].pass, "%zu: %s:%c, expected %s:%c", i,
                  a->name, a->pass, list[i].name, list[i].pass);
        cr_assert_eq(a->ndim, list[i].ndim, "%s has %d dimensions", a->name, a->ndim);
        for (int d = 0; d < a->ndim; d++)
            cr_assert_eq(a->shape[d], list[i].shape[d], "%s: dimension %d is %zu", a->name, d, a->shape[d]);
        size_t zeros = 0;
        for (size_t k = 0; k < a->count; k++) {
            cr_assert(isfinite(a->values[k]), "%s[%zu] is not finite", a->name, k);
            cr_assert(mode == AR_MODE_F64 || (double)(float)a->values[k] == a->values[k], "%s[%zu]: more than fp32",
                      a->name, k);
            zeros += a->values[k] == 0.0;
        }
        cr_assert(zeros < a->count, "%s:%c is all zero", a->name, a->pass);
    }
    cr_assert_eq(t.n, n, "%zu tensors, expected %zu", t.n, n);
    cr_assert_eq(tape_find(&t, "loss", 'f')->values[0], loss);
    tape_clear(&t);
}

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

CLAIM(llama_emits_its_list_in_every_mode)
{
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    check_list(&c, AR_MODE_EXACT, llama_list, COUNT(llama_list));
    check_list(&c, AR_MODE_FP32, llama_list, COUNT(llama_list));
    check_list(&c, AR_MODE_F64, llama_list, COUNT(llama_list));
}

CLAIM(gpt2_emits_its_list_in_every_mode)
{
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    check_list(&c, AR_MODE_EXACT, gpt2_list, COUNT(gpt2_list));
    check_list(&c, AR_MODE_FP32, gpt2_list, COUNT(gpt2_list));
    check_list(&c, AR_MODE_F64, gpt2_list, COUNT(gpt2_list));
}

CLAIM(stack_emits_its_list_in_every_mode)
{
    const ar_config c = tiny_config(AR_ARCH_STACK, 1);
    check_list(&c, AR_MODE_EXACT, stack_list, COUNT(stack_list));
    check_list(&c, AR_MODE_FP32, stack_list, COUNT(stack_list));
    check_list(&c, AR_MODE_F64, stack_list, COUNT(stack_list));
}

CLAIM(tied_llama_has_no_head_weight)
{
    static tape t;
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    c.tied = true;
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    cr_assert_eq(t.n, COUNT(llama_list) - 2);
    for (size_t i = 0; i < t.n; i++)
        cr_assert_neq(strcmp(t.at[i].name, "lm_head.weight"), 0);
    tape_clear(&t);
}

CLAIM(forward_only_stops_after_the_loss)
{
    static tape t;
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.seed = 7, .forward_only = true, .emit = tape_emit, .emit_user = &t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(&c, &o, &batch, &loss));
    cr_assert_str_eq(t.at[t.n - 1].name, "loss");
    cr_assert_eq(t.at[t.n - 1].values[0], loss);
    tape_clear(&t);
}

/* The block inside a one-layer stack and the block alone, fed with its input and the gradient of its output. */
CLAIM(block_alone_emits_what_it_emits_inside_a_model)
{
    static tape model, block;
    const ar_config c = tiny_config(AR_ARCH_STACK, 1);
    const ar_batch batch = tiny_batch();
    float x[3 * 5 * 8], dy[3 * 5 * 8];
    run_or_fail(&c, AR_MODE_EXACT, &batch, &model);
    for (size_t i = 0; i < COUNT(x); i++) {
        x[i] = (float)tape_find(&model, "embed", 'f')->values[i];
        dy[i] = 1.0F;
    }
    const ar_baseline_options o = {.seed = 7, .emit = tape_emit, .emit_user = &block};
    cr_assert_ok(ar_baseline_block(&c, &o, &batch, x, dy));
    cr_assert_eq(block.n, COUNT(stack_list) - 4); /* without embed three times and loss */
    for (size_t i = 0; i < block.n; i++) {
        const taped *a = &block.at[i], *b = tape_find(&model, a->name, a->pass);
        cr_assert_eq(memcmp(a->values, b->values, a->count * sizeof *a->values), 0, "%s:%c differs", a->name, a->pass);
    }
    tape_clear(&model);
    tape_clear(&block);
}

/* --- fresh weights: numerics.md section 5 -------------------------------------------------------------------- */

CLAIM(fresh_matrix_is_xavier_normal_with_the_full_fans)
{
    static tape t;
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const char *name = "model.layers.0.self_attn.k_proj.weight";
    run_or_fail(&c, AR_MODE_F64, &batch, &t);
    const taped *a = tape_find(&t, name, 'i');
    for (size_t i = 0; i < a->count; i++) /* [8 out, 8 in] */
        cr_assert_eq(a->values[i], (double)ari_random_normal(ari_stream_key(7, name), i, sqrt(2.0 / (8 + 8))));
    a = tape_find(&t, "model.embed_tokens.weight", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_normal(ari_stream_key(7, a->name), i, 0.3));
    a = tape_find(&t, "model.norm.weight", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], 1.0);
    tape_clear(&t);
}

CLAIM(fresh_gpt2_counts_the_inputs_of_a_transposed_weight)
{
    static tape t;
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    const ar_batch batch = tiny_batch();
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    const taped *a = tape_find(&t, "transformer.h.0.mlp.c_proj.weight", 'i'); /* [12 in, 8 out] */
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_normal(ari_stream_key(7, a->name), i, sqrt(2.0 / (12 + 8))));
    a = tape_find(&t, "transformer.h.0.mlp.c_proj.bias", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_uniform(ari_stream_key(7, a->name), i, 1.0 / sqrt(12.0)));
    a = tape_find(&t, "transformer.h.0.ln_2.bias", 'i');
    for (size_t i = 0; i < a->count; i++)
        cr_assert_eq(a->values[i], (double)ari_random_uniform(ari_stream_key(7, a->name), i, 1.0 / sqrt(8.0)));
    tape_clear(&t);
}

EVERY_CLAIM(baseline_names)
