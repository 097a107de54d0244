/* SPDX-License-Identifier: Apache-2.0 */
/* Execution order and role by names. */
#include <limits.h>

#include "support/together.h"
#include "verify/read/roles.h"

static int compare(const void *a, const void *b)
{
    return ari_order_compare(a, b);
}

/* Sorts the names, given in execution order, from two other orders; they come out as given. */
static void expect_order(const char *const *names, size_t n, const char *path)
{
    OWNED(free) ari_order_key *key = malloc(n * sizeof *key);
    cr_assert_not_null(key);
    for (size_t turn = 0; turn < 2; turn++) {
        long layers = LONG_MAX;
        for (size_t i = 0; i < n; i++) {
            key[i] = ari_order_of(names[turn ? n - 1 - i : (i * 7 + 3) % n], path);
            layers = ari_order_layers(&key[i], layers);
        }
        for (size_t i = 0; i < n; i++)
            ari_order_further(&key[i], layers);
        if (turn || n % 7 != 0)
            qsort(key, n, sizeof *key, compare);
        for (size_t i = 0; i < n && (turn || n % 7 != 0); i++)
            cr_expect_str_eq(key[i].name, names[i], "place %zu", i);
    }
}
#define EXPECT_ORDER(path, ...)                                     \
    do {                                                            \
        static const char *const names_[] = {__VA_ARGS__};          \
        expect_order(names_, sizeof names_ / sizeof *names_, path); \
    } while (0)

#define B "model.layers.2."
#define A "model.layers.10."
CLAIM(a_llama_step_goes_forward_then_backward_then_updates)
{
    EXPECT_ORDER(
        NULL, "model.embed_tokens.weight:init", B "self_attn.q_proj.weight:init", A "self_attn.q_proj.weight:init",
        "model.norm.weight:init", "model.embed_tokens:fwd", B "input_layernorm:fwd", B "self_attn.q_proj:fwd",
        B "self_attn.k_proj:fwd", B "self_attn.v_proj:fwd", B "self_attn.q_rope:fwd", B "self_attn.k_rope:fwd",
        B "self_attn.probs:fwd", B "self_attn.context:fwd", B "self_attn.o_proj:fwd", B "attn_residual:fwd",
        B "post_attention_layernorm:fwd", B "mlp.gate_proj:fwd", B "mlp.up_proj:fwd", B "mlp.act:fwd",
        B "mlp.down_proj:fwd", "model.layers.2:fwd", A "input_layernorm:fwd", "model.layers.10:fwd", "model.norm:fwd",
        "lm_head:fwd", "loss:fwd", "lm_head.logits:bwd", "lm_head:bwd", "lm_head.weight:grad", "model.norm:bwd",
        "model.norm.weight:grad", A "mlp.down_proj:bwd", A "mlp.down_proj.weight:grad", "model.layers.10:bwd",
        B "mlp.down_proj:bwd", B "mlp.down_proj.weight:grad", B "mlp.gate:bwd", B "mlp.up:bwd", B "mlp:bwd",
        B "mlp.gate_proj.weight:grad", B "mlp.up_proj.weight:grad", B "post_attention_layernorm:bwd",
        B "post_attention_layernorm.weight:grad", B "attn_residual:bwd", B "self_attn.o_proj:bwd",
        B "self_attn.o_proj.weight:grad", B "self_attn.probs:bwd", B "self_attn.q_rope:bwd", B "self_attn.k_rope:bwd",
        B "self_attn.v:bwd", B "self_attn.q:bwd", B "self_attn.k:bwd", B "self_attn:bwd",
        B "self_attn.q_proj.weight:grad", B "self_attn.k_proj.weight:grad", B "self_attn.v_proj.weight:grad",
        B "input_layernorm:bwd", B "input_layernorm.weight:grad", "model.layers.2:bwd",
        "model.embed_tokens.weight:grad", "grad_norm:clip", "model.embed_tokens.weight:new", "model.norm.weight:new",
        "model.embed_tokens.weight:m", "model.norm.weight:m", "model.embed_tokens.weight:v", "model.embed_tokens:fwd@2",
        "loss:fwd@2", "model.norm.weight:grad@2", "model.norm.weight:new@10");
}

CLAIM(experts_are_run_after_their_router_and_go_back_before_it)
{
    EXPECT_ORDER(NULL, B "mlp.gate.weight:init", B "mlp.experts.2.gate_proj.weight:init",
                 B "mlp.experts.11.gate_proj.weight:init", B "mlp.shared_expert_gate.weight:init",
                 B "post_attention_layernorm:fwd", B "mlp.gate:fwd", B "mlp.routes:fwd", B "mlp.weights:fwd",
                 B "mlp.experts:fwd", B "mlp.shared_expert.gate_proj:fwd", B "mlp.shared_expert.up_proj:fwd",
                 B "mlp.shared_expert.act:fwd", B "mlp.shared_expert.down_proj:fwd", B "mlp.shared_expert_gate:fwd",
                 B "mlp:fwd", "model.layers.2:fwd", B "mlp.experts.0.down_proj.weight:grad",
                 B "mlp.experts.3.down_proj.weight:grad", B "mlp.experts.0.gate_proj.weight:grad",
                 B "mlp.experts.0.up_proj.weight:grad", B "mlp.experts:bwd", B "mlp.shared_expert.down_proj:bwd",
                 B "mlp.shared_expert.down_proj.weight:grad", B "mlp.shared_expert.gate:bwd",
                 B "mlp.shared_expert.up:bwd", B "mlp.shared_expert:bwd", B "mlp.shared_expert_gate:bwd",
                 B "mlp.shared_expert_gate.weight:grad", B "mlp.weights:bwd", B "mlp.logits:bwd", B "mlp.gate:bwd",
                 B "mlp.gate.weight:grad", B "mlp:bwd", B "post_attention_layernorm:bwd", "model.layers.2:bwd");
}

/* Of two, each after the one before; backward the last is the first, and the head's gradient is that of three uses. */
#define D(i) "model.layers." #i "."
CLAIM(blocks_for_further_tokens_come_after_the_head_and_go_back_before_it)
{
    EXPECT_ORDER(NULL, "model.embed_tokens:fwd", B "input_layernorm:fwd", "model.layers.2:fwd", "model.norm:fwd",
                 "lm_head:fwd", D(3) "embed_tokens:fwd", D(3) "enorm:fwd", D(3) "hnorm:fwd", D(3) "eh_proj:fwd",
                 D(3) "input_layernorm:fwd", D(3) "mlp:fwd", "model.layers.3:fwd", D(3) "shared_head.norm:fwd",
                 D(3) "shared_head.head:fwd", D(4) "embed_tokens:fwd", D(4) "input_layernorm:fwd",
                 D(4) "shared_head.norm:fwd", "loss:fwd", D(4) "shared_head.head.logits:bwd",
                 D(4) "shared_head.norm:bwd", D(4) "mlp:bwd", D(4) "eh_proj.weight:grad", D(4) "enorm:bwd",
                 D(3) "shared_head.head.logits:bwd", D(3) "shared_head.norm.weight:grad", "lm_head.logits:bwd",
                 "lm_head.weight:grad", "model.norm:bwd", "model.layers.2:bwd", "model.embed_tokens.weight:grad",
                 "grad_norm:clip");
}

#define H "transformer.h.0."
CLAIM(a_gpt2_block_as_names_md_has_it)
{
    EXPECT_ORDER(NULL, "transformer.wte:fwd", "transformer.drop:fwd", H "ln_1:fwd", H "attn.q:fwd", H "attn.k:fwd",
                 H "attn.v:fwd", H "attn.probs:fwd", H "attn.context:fwd", H "attn.c_proj:fwd", H "attn_residual:fwd",
                 H "ln_2:fwd", H "mlp.c_fc:fwd", H "mlp.act:fwd", H "mlp.c_proj:fwd", "transformer.h.0:fwd",
                 "transformer.ln_f:fwd", "lm_head:fwd", "loss:fwd", "lm_head.logits:bwd", "lm_head:bwd",
                 "transformer.ln_f:bwd", "transformer.ln_f.weight:grad", "transformer.ln_f.bias:grad",
                 H "mlp.c_proj:bwd", H "mlp.c_proj.weight:grad", H "mlp.c_proj.bias:grad", H "mlp.fc:bwd",
                 H "mlp.c_fc:bwd", H "mlp.c_fc.weight:grad", H "ln_2:bwd", H "ln_2.weight:grad", H "attn_residual:bwd",
                 H "attn.c_proj:bwd", H "attn.c_proj.weight:grad", H "attn.probs:bwd", H "attn.v:bwd", H "attn.q:bwd",
                 H "attn.k:bwd", H "attn.c_attn:bwd", H "attn.c_attn.weight:grad", H "ln_1:bwd", H "ln_1.weight:grad",
                 "transformer.h.0:bwd", "transformer.wte.weight:grad", "transformer.wpe.weight:grad");
}

CLAIM(a_file_of_gradients_runs_backward)
{
    EXPECT_ORDER("run/grads.safetensors", "lm_head.weight", "model.norm.weight", A "mlp.down_proj.weight",
                 A "input_layernorm.weight", B "mlp.down_proj.weight", B "self_attn.q_proj.weight",
                 B "input_layernorm.weight", "model.embed_tokens.weight");
}

CLAIM(a_file_of_weights_runs_forward)
{
    EXPECT_ORDER("model.safetensors", "model.embed_tokens.weight", B "input_layernorm.weight",
                 B "self_attn.q_proj.weight", B "self_attn.q_proj.bias", B "mlp.down_proj.weight",
                 A "input_layernorm.weight", "model.norm.weight", "lm_head.weight");
}

CLAIM(hidden_states_stand_behind_their_layers)
{
    EXPECT_ORDER("outputs.safetensors", "hidden_states.0", "hidden_states.1", "hidden_states.2", "hidden_states.10",
                 "logits", "loss");
}

CLAIM(unknown_names_compare_numbers_as_numbers)
{
    EXPECT_ORDER(NULL, "a", "a2", "a10", "a10b", "b0003", "b4", "b000000000000000000000000000005");
}

CLAIM(the_pass_and_the_step_are_in_the_name_or_the_file)
{
    static const struct {
        const char *name, *path;
        char pass;
        int step;
        size_t stem;
    } cases[] = {
        {"model.norm.weight:grad@12", NULL, 'g', 12, 17},
        {"loss", NULL, 'f', 1, 4},
        {"model.norm.weight", "x/grads.safetensors", 'g', 1, 17},
        {"model.norm.weight", "grads/model.safetensors", 'w', 1, 17},
        {"model.norm.weight.grad", NULL, 'g', 1, 22},
        {"grad_norm:clip@2", NULL, 'c', 2, 9},
        {"x@", NULL, 'w', 1, 2},
        {"@3", NULL, 'w', 1, 2},
        {"x@99999999999999999999", NULL, 'w', 1, 22},
        {"", "", 'w', 1, 0},
        {":fwd", NULL, 'f', 1, 0},
        {"hidden_states.3", "grads", 'f', 1, 15},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ari_order_key k = ari_order_of(cases[i].name, cases[i].path);
        cr_expect(k.pass == cases[i].pass && k.step == cases[i].step && k.stem == cases[i].stem, "%s: %c %d %zu",
                  cases[i].name, k.pass, k.step, k.stem);
    }
}

CLAIM(a_number_that_no_model_has_is_none)
{
    static const char *const names[] = {"hidden_states.-9223372036854775808", "hidden_states.-9223372036854775807",
                                        "hidden_states.99999999999999999999", "hidden_states."};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        cr_expect_eq(ari_order_of(names[i], NULL).layer, -1, "%s", names[i]);
    cr_expect_eq(ari_order_of("hidden_states.-9223372036854775807:bwd", NULL).layer, 1);
}

EVERY_CLAIM(order)
