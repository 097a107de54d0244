/* SPDX-License-Identifier: Apache-2.0 */
/* Which tensors a step of a one-layer model has, in which order: written by hand from models.md, so that a tensor that
 * nobody reports cannot pass for one that agrees. */
#pragma once

#include "anyrank/config.h"
#include "tests/support/test.h"

/* "name:shape" with ~ for the layer's name. b 3, s 5, h 8, H 4, G 2 (GPT-2: 4), d 4, F 12, V 11; of each of 2 experts F 6, of
 * the shared one 4. */
typedef struct tensor_list {
    ar_arch arch;
    const char *layer, *part[3]; /* initial values, forward, backward with gradients of parameters among them */
    size_t tensors;
    ar_experts experts; /* in the layer's MLP's place */
} tensor_list;

static const tensor_list tensor_lists[] = {
    {AR_ARCH_LLAMA,
     "model.layers.0.",
     {"model.embed_tokens.weight:11x8 ~input_layernorm.weight:8 ~self_attn.q_proj.weight:16x8 "
      "~self_attn.k_proj.weight:8x8 ~self_attn.v_proj.weight:8x8 ~self_attn.o_proj.weight:8x16 "
      "~post_attention_layernorm.weight:8 ~mlp.gate_proj.weight:12x8 ~mlp.up_proj.weight:12x8 "
      "~mlp.down_proj.weight:8x12 model.norm.weight:8 lm_head.weight:11x8",
      "model.embed_tokens:3x5x8 ~input_layernorm:3x5x8 ~self_attn.q_proj:3x5x16 ~self_attn.k_proj:3x5x8 "
      "~self_attn.v_proj:3x5x8 ~self_attn.q_rope:3x5x16 ~self_attn.k_rope:3x5x8 ~self_attn.probs:3x4x5x5 "
      "~self_attn.context:3x5x16 ~self_attn.o_proj:3x5x8 ~attn_residual:3x5x8 ~post_attention_layernorm:3x5x8 "
      "~mlp.gate_proj:3x5x12 ~mlp.up_proj:3x5x12 ~mlp.act:3x5x12 ~mlp.down_proj:3x5x8 model.layers.0:3x5x8 "
      "model.norm:3x5x8 lm_head:3x5x11 loss",
      "lm_head.logits:3x5x11 lm_head:3x5x8 lm_head.weight:11x8 model.norm:3x5x8 model.norm.weight:8 "
      "~mlp.down_proj:3x5x12 ~mlp.down_proj.weight:8x12 ~mlp.gate:3x5x12 ~mlp.up:3x5x12 ~mlp:3x5x8 "
      "~mlp.gate_proj.weight:12x8 ~mlp.up_proj.weight:12x8 ~post_attention_layernorm:3x5x8 "
      "~post_attention_layernorm.weight:8 ~attn_residual:3x5x8 ~self_attn.o_proj:3x5x16 "
      "~self_attn.o_proj.weight:8x16 ~self_attn.probs:3x4x5x5 ~self_attn.q_rope:3x5x16 ~self_attn.k_rope:3x5x8 "
      "~self_attn.v:3x5x8 ~self_attn.q:3x5x16 ~self_attn.k:3x5x8 ~self_attn:3x5x8 ~self_attn.q_proj.weight:16x8 "
      "~self_attn.k_proj.weight:8x8 ~self_attn.v_proj.weight:8x8 ~input_layernorm:3x5x8 ~input_layernorm.weight:8 "
      "model.layers.0:3x5x8 model.embed_tokens.weight:11x8"},
     63,
     {.n = 0}},
    {AR_ARCH_GPT2,
     "transformer.h.0.",
     {"transformer.wte.weight:11x8 transformer.wpe.weight:9x8 ~ln_1.weight:8 ~ln_1.bias:8 ~attn.c_attn.weight:8x48 "
      "~attn.c_attn.bias:48 ~attn.c_proj.weight:16x8 ~attn.c_proj.bias:8 ~ln_2.weight:8 ~ln_2.bias:8 "
      "~mlp.c_fc.weight:8x12 ~mlp.c_fc.bias:12 ~mlp.c_proj.weight:12x8 ~mlp.c_proj.bias:8 transformer.ln_f.weight:8 "
      "transformer.ln_f.bias:8",
      "transformer.wte:3x5x8 transformer.drop:3x5x8 ~ln_1:3x5x8 ~attn.q:3x5x16 ~attn.k:3x5x16 ~attn.v:3x5x16 "
      "~attn.probs:3x4x5x5 ~attn.context:3x5x16 ~attn.c_proj:3x5x8 ~attn_residual:3x5x8 ~ln_2:3x5x8 "
      "~mlp.c_fc:3x5x12 ~mlp.act:3x5x12 ~mlp.c_proj:3x5x8 transformer.h.0:3x5x8 transformer.ln_f:3x5x8 "
      "lm_head:3x5x11 loss",
      "lm_head.logits:3x5x11 lm_head:3x5x8 transformer.ln_f:3x5x8 transformer.ln_f.weight:8 transformer.ln_f.bias:8 "
      "~mlp.c_proj:3x5x12 ~mlp.c_proj.weight:12x8 ~mlp.c_proj.bias:8 ~mlp.fc:3x5x12 ~mlp.c_fc:3x5x8 "
      "~mlp.c_fc.weight:8x12 ~mlp.c_fc.bias:12 ~ln_2:3x5x8 ~ln_2.weight:8 ~ln_2.bias:8 ~attn_residual:3x5x8 "
      "~attn.c_proj:3x5x16 ~attn.c_proj.weight:16x8 ~attn.c_proj.bias:8 ~attn.probs:3x4x5x5 ~attn.v:3x5x16 "
      "~attn.q:3x5x16 ~attn.k:3x5x16 ~attn.c_attn:3x5x8 ~attn.c_attn.weight:8x48 ~attn.c_attn.bias:48 ~ln_1:3x5x8 "
      "~ln_1.weight:8 ~ln_1.bias:8 transformer.h.0:3x5x8 transformer.wte.weight:11x8 transformer.wpe.weight:9x8"},
     66,
     {.n = 0}},
    {AR_ARCH_STACK,
     "layers.0.",
     {"embed.weight:11x8 ~ln1.weight:8 ~ln1.bias:8 ~attn.wq.weight:16x8 ~attn.wk.weight:8x8 ~attn.wv.weight:8x8 "
      "~attn.wo.weight:8x16 ~ln2.weight:8 ~ln2.bias:8 ~mlp.w1.weight:12x8 ~mlp.w1.bias:12 ~mlp.w2.weight:8x12 "
      "~mlp.w2.bias:8",
      "embed:3x5x8 ~ln1:3x5x8 ~attn.wq:3x5x16 ~attn.wk:3x5x8 ~attn.wv:3x5x8 ~attn.probs:3x4x5x5 "
      "~attn.context:3x5x16 ~attn.wo:3x5x8 ~attn_residual:3x5x8 ~ln2:3x5x8 ~mlp.w1:3x5x12 ~mlp.act:3x5x12 "
      "~mlp.w2:3x5x8 layers.0:3x5x8 loss",
      "~mlp.w2:3x5x12 ~mlp.w2.weight:8x12 ~mlp.w2.bias:8 ~mlp.fc:3x5x12 ~mlp.w1:3x5x8 ~mlp.w1.weight:12x8 "
      "~mlp.w1.bias:12 ~ln2:3x5x8 ~ln2.weight:8 ~ln2.bias:8 ~attn_residual:3x5x8 ~attn.wo:3x5x16 "
      "~attn.wo.weight:8x16 ~attn.probs:3x4x5x5 ~attn.v:3x5x8 ~attn.q:3x5x16 ~attn.k:3x5x8 ~attn:3x5x8 "
      "~attn.wq.weight:16x8 ~attn.wk.weight:8x8 ~attn.wv.weight:8x8 ~ln1:3x5x8 ~ln1.weight:8 ~ln1.bias:8 "
      "layers.0:3x5x8 embed.weight:11x8"},
     54,
     {.n = 0}},
    {AR_ARCH_QWEN2_MOE,
     "model.layers.0.",
     {"model.embed_tokens.weight:11x8 ~input_layernorm.weight:8 ~self_attn.q_proj.weight:16x8 "
      "~self_attn.k_proj.weight:8x8 ~self_attn.v_proj.weight:8x8 ~self_attn.o_proj.weight:8x16 "
      "~post_attention_layernorm.weight:8 ~mlp.gate.weight:2x8 ~mlp.experts.0.gate_proj.weight:6x8 "
      "~mlp.experts.0.up_proj.weight:6x8 ~mlp.experts.0.down_proj.weight:8x6 ~mlp.experts.1.gate_proj.weight:6x8 "
      "~mlp.experts.1.up_proj.weight:6x8 ~mlp.experts.1.down_proj.weight:8x6 ~mlp.shared_expert.gate_proj.weight:4x8 "
      "~mlp.shared_expert.up_proj.weight:4x8 ~mlp.shared_expert.down_proj.weight:8x4 ~mlp.shared_expert_gate.weight:1x8 "
      "model.norm.weight:8 lm_head.weight:11x8",
      "model.embed_tokens:3x5x8 ~input_layernorm:3x5x8 ~self_attn.q_proj:3x5x16 ~self_attn.k_proj:3x5x8 "
      "~self_attn.v_proj:3x5x8 ~self_attn.q_rope:3x5x16 ~self_attn.k_rope:3x5x8 ~self_attn.probs:3x4x5x5 "
      "~self_attn.context:3x5x16 ~self_attn.o_proj:3x5x8 ~attn_residual:3x5x8 ~post_attention_layernorm:3x5x8 "
      "~mlp.gate:3x5x2 ~mlp.routes:3x5x2 ~mlp.weights:3x5x2 ~mlp.experts:3x5x8 ~mlp.shared_expert.gate_proj:3x5x4 "
      "~mlp.shared_expert.up_proj:3x5x4 ~mlp.shared_expert.act:3x5x4 ~mlp.shared_expert.down_proj:3x5x8 "
      "~mlp.shared_expert_gate:3x5x1 ~mlp:3x5x8 model.layers.0:3x5x8 model.norm:3x5x8 lm_head:3x5x11 loss",
      "lm_head.logits:3x5x11 lm_head:3x5x8 lm_head.weight:11x8 model.norm:3x5x8 model.norm.weight:8 "
      "~mlp.experts.0.down_proj.weight:8x6 ~mlp.experts.0.gate_proj.weight:6x8 ~mlp.experts.0.up_proj.weight:6x8 "
      "~mlp.experts.1.down_proj.weight:8x6 ~mlp.experts.1.gate_proj.weight:6x8 ~mlp.experts.1.up_proj.weight:6x8 "
      "~mlp.experts:3x5x8 ~mlp.shared_expert.down_proj.weight:8x4 ~mlp.shared_expert.down_proj:3x5x4 "
      "~mlp.shared_expert.gate:3x5x4 ~mlp.shared_expert.up:3x5x4 ~mlp.shared_expert.gate_proj.weight:4x8 "
      "~mlp.shared_expert.up_proj.weight:4x8 ~mlp.shared_expert:3x5x8 ~mlp.shared_expert_gate:3x5x8 "
      "~mlp.shared_expert_gate.weight:1x8 ~mlp.weights:3x5x2 ~mlp.logits:3x5x2 ~mlp.gate:3x5x8 ~mlp.gate.weight:2x8 "
      "~mlp:3x5x8 ~post_attention_layernorm:3x5x8 ~post_attention_layernorm.weight:8 ~attn_residual:3x5x8 "
      "~self_attn.o_proj:3x5x16 ~self_attn.o_proj.weight:8x16 ~self_attn.probs:3x4x5x5 ~self_attn.q_rope:3x5x16 "
      "~self_attn.k_rope:3x5x8 ~self_attn.v:3x5x8 ~self_attn.q:3x5x16 ~self_attn.k:3x5x8 ~self_attn:3x5x8 "
      "~self_attn.q_proj.weight:16x8 ~self_attn.k_proj.weight:8x8 ~self_attn.v_proj.weight:8x8 "
      "~input_layernorm:3x5x8 ~input_layernorm.weight:8 model.layers.0:3x5x8 model.embed_tokens.weight:11x8"},
     91,
     {.n = 2, .per_token = 2, .ffn = 6, .shared = 4}},
};

enum { TENSOR_LISTS = sizeof tensor_lists / sizeof *tensor_lists };

/* A walk over a list: .list given, the rest zero; then the tensor that stands there. */
typedef struct listed_tensor {
    const tensor_list *list;
    int part;
    const char *rest;
    char name[200], pass; /* 'i', 'f', 'b', 'g' */
    int ndim;
    size_t shape[4];
} listed_tensor;

static inline bool next_listed(listed_tensor *t)
{
    const char *at = t->rest ? t->rest : t->list->part[0];
    if (*at == '\0' && ++t->part < 3)
        at = t->list->part[t->part];
    if (*at == '\0')
        return false;
    const bool in_layer = *at == '~';
    const size_t length = strcspn(at, ": ");
    snprintf(t->name, sizeof t->name, "%s%.*s", in_layer ? t->list->layer : "", (int)length - in_layer, at + in_layer);
    const char *last = strrchr(t->name, '.');
    const bool parameter = last && (strcmp(last, ".weight") == 0 || strcmp(last, ".bias") == 0);
    t->pass = t->part == 2 && parameter ? 'g' : "ifb"[t->part];
    at += length;
    for (t->ndim = 0; *at == ':' || *at == 'x'; t->ndim++) {
        char *end;
        t->shape[t->ndim] = strtoull(at + 1, &end, 10);
        at = end;
    }
    t->rest = *at == ' ' ? at + 1 : at;
    return true;
}
