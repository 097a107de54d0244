/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/models/family.h"

#include <stdio.h>
#include <string.h>

#include "anyrank/activation.h"
#include "anyrank/config.h"
#include "ref/core/text.h"

/* --- the families ------------------------------------------------------------------------------------------------- */

/* Properties shared by models with Llama's structure and names. */
/* clang-format off */
#define LLAMA_NAMES(of_mlp) \
    .blocks = "model.layers", .attention = "self_attn", .embedded = "model.embed_tokens", .mlp = of_mlp
#define TABLE {ARI_TOKENS, "model.embed_tokens"}, {ARI_TOKENS_NORM, "enorm"}, {ARI_ENTERED_NORM, "hnorm"}, \
              {ARI_JOINED, "eh_proj"}
#define NORM1 {ARI_NORM1, "input_layernorm"}
#define QKV {ARI_Q, "self_attn.q_proj"}, {ARI_K, "self_attn.k_proj"}, {ARI_V, "self_attn.v_proj"}
#define QK_NORMS {ARI_Q_NORM, "self_attn.q_norm"}, {ARI_K_NORM, "self_attn.k_norm"}
#define OUT_NORM2 {ARI_OUT, "self_attn.o_proj"}, {ARI_NORM2, "post_attention_layernorm"}
#define OUT_NORMS(attention, second) \
    {ARI_OUT, "self_attn.o_proj"}, {ARI_ATTENTION_NORM, attention}, {ARI_NORM2, second}
#define MLP_NORM(name) {ARI_MLP_NORM, name}
#define GATED_MLP {ARI_GATE, "mlp.gate_proj"}, {ARI_UP, "mlp.up_proj"}, {ARI_DOWN, "mlp.down_proj"}
#define PACKED_MLP {ARI_GATE_UP, "mlp.gate_up_proj"}, {ARI_DOWN, "mlp.down_proj"}
#define SHARE {ARI_SHARED_SHARE, "mlp.shared_expert_gate"}
#define ROUTER {ARI_ROUTER, "mlp.gate"}
#define CHOOSING_ROUTER ROUTER, {ARI_ROUTER_BIAS, "mlp.gate.e_score_correction_bias"}
#define LATENT {ARI_Q, "self_attn.q_proj"}, {ARI_Q_A, "self_attn.q_a_proj"}, \
               {ARI_KV_A, "self_attn.kv_a_proj_with_mqa"}, {ARI_Q_A_NORM, "self_attn.q_a_layernorm"}, \
               {ARI_Q_B, "self_attn.q_b_proj"}, {ARI_KV_A_NORM, "self_attn.kv_a_layernorm"}, \
               {ARI_KV_B, "self_attn.kv_b_proj"}
#define EXPERTS {ARI_EXPERT_GATE, "mlp.experts.*.gate_proj"}, {ARI_EXPERT_UP, "mlp.experts.*.up_proj"}, \
                {ARI_EXPERT_DOWN, "mlp.experts.*.down_proj"}
#define SHARED(name) {ARI_SHARED_GATE, "mlp." name ".gate_proj"}, {ARI_SHARED_UP, "mlp." name ".up_proj"}, \
                     {ARI_SHARED_DOWN, "mlp." name ".down_proj"}
#define HEAD {ARI_MTP_NORM, "shared_head.norm"}, {ARI_FINAL_NORM, "model.norm"}, {ARI_HEAD, "lm_head"}
/* clang-format on */

static const ari_family families[] = {
    [AR_ARCH_LLAMA] = {LLAMA_NAMES("mlp"), .part = {TABLE, NORM1, QKV, OUT_NORM2, GATED_MLP, HEAD}},
    [AR_ARCH_GPT2] = {.blocks = "transformer.h",
                      .attention = "attn",
                      .mlp = "mlp",
                      .embedded = "transformer.drop",
                      .prefix = "transformer.",
                      .transposed = true,
                      .part = {{ARI_TOKENS, "transformer.wte"},
                               {ARI_POSITIONS, "transformer.wpe"},
                               {ARI_NORM1, "ln_1"},
                               {ARI_QKV, "attn.c_attn"},
                               {ARI_OUT, "attn.c_proj"},
                               {ARI_NORM2, "ln_2"},
                               {ARI_FIRST, "mlp.c_fc"},
                               {ARI_DOWN, "mlp.c_proj"},
                               {ARI_FINAL_NORM, "transformer.ln_f"},
                               {ARI_HEAD, "lm_head"}}},
    [AR_ARCH_GPT_NEOX] = {.blocks = "gpt_neox.layers",
                          .attention = "attention",
                          .mlp = "mlp",
                          .embedded = "gpt_neox.embed_in",
                          .prefix = "gpt_neox.",
                          .older_head = "embed_out",
                          .by_head = true,
                          .part = {{ARI_TOKENS, "gpt_neox.embed_in"},
                                   NORM1,
                                   {ARI_QKV, "attention.query_key_value"},
                                   {ARI_OUT, "attention.dense"},
                                   {ARI_NORM2, "post_attention_layernorm"},
                                   {ARI_FIRST, "mlp.dense_h_to_4h"},
                                   {ARI_DOWN, "mlp.dense_4h_to_h"},
                                   {ARI_FINAL_NORM, "gpt_neox.final_layer_norm"},
                                   {ARI_HEAD, "lm_head"}}},
    [AR_ARCH_PHI3] = {LLAMA_NAMES("mlp"),
                      .part = {TABLE, NORM1, {ARI_QKV, "self_attn.qkv_proj"}, OUT_NORM2, PACKED_MLP, HEAD}},
    [AR_ARCH_STACK] = {.blocks = "layers",
                       .attention = "attn",
                       .mlp = "mlp",
                       .embedded = "embed",
                       .part = {{ARI_TOKENS, "embed"},
                                {ARI_NORM1, "ln1"},
                                {ARI_Q, "attn.wq"},
                                {ARI_K, "attn.wk"},
                                {ARI_V, "attn.wv"},
                                {ARI_OUT, "attn.wo"},
                                {ARI_NORM2, "ln2"},
                                {ARI_FIRST, "mlp.w1"},
                                {ARI_DOWN, "mlp.w2"}}},
    [AR_ARCH_QWEN3] = {LLAMA_NAMES("mlp"), .part = {TABLE, NORM1, QKV, QK_NORMS, OUT_NORM2, GATED_MLP, HEAD}},
    [AR_ARCH_OLMO2] = {LLAMA_NAMES("mlp"), .part = {TABLE, NORM1, QKV, QK_NORMS,
                                                    OUT_NORMS("post_attention_layernorm", "pre_feedforward_layernorm"),
                                                    GATED_MLP, MLP_NORM("post_feedforward_layernorm"), HEAD}},
    [AR_ARCH_MIXTRAL] = {LLAMA_NAMES("block_sparse_moe"),
                         .part = {TABLE,
                                  NORM1,
                                  QKV,
                                  QK_NORMS,
                                  OUT_NORM2,
                                  {ARI_ROUTER, "block_sparse_moe.gate"},
                                  {ARI_ROUTER_BIAS, "block_sparse_moe.e_score_correction_bias"},
                                  {ARI_EXPERT_GATE, "block_sparse_moe.experts.*.w1"},
                                  {ARI_EXPERT_UP, "block_sparse_moe.experts.*.w3"},
                                  {ARI_EXPERT_DOWN, "block_sparse_moe.experts.*.w2"},
                                  HEAD}},
    [AR_ARCH_QWEN2_MOE] = {LLAMA_NAMES("mlp"), .part = {TABLE, NORM1, QKV, OUT_NORM2, GATED_MLP, ROUTER, EXPERTS,
                                                        SHARED("shared_expert"), SHARE, HEAD}},
    [AR_ARCH_QWEN3_MOE] = {LLAMA_NAMES("mlp"),
                           .part = {TABLE, NORM1, QKV, QK_NORMS, OUT_NORM2, GATED_MLP, ROUTER, EXPERTS, HEAD}},
    [AR_ARCH_GLM4_MOE] = {LLAMA_NAMES("mlp"), .shared_experts = true,
                          .part = {TABLE, NORM1, QKV, QK_NORMS, OUT_NORM2, GATED_MLP, CHOOSING_ROUTER, EXPERTS,
                                   SHARED("shared_experts"), HEAD}},
    [AR_ARCH_GPT_OSS] =
        {LLAMA_NAMES("mlp"), .interleaved = true,
         .part =
             {TABLE, NORM1, QKV, {ARI_SINKS, "self_attn.sinks"}, OUT_NORM2, {ARI_ROUTER, "mlp.router"}, EXPERTS, HEAD}},
    [AR_ARCH_STARCODER2] =
        {LLAMA_NAMES("mlp"),
         .part = {TABLE, NORM1, QKV, OUT_NORM2, {ARI_FIRST, "mlp.c_fc"}, {ARI_DOWN, "mlp.c_proj"}, HEAD}},
    [AR_ARCH_DEEPSEEK] = {LLAMA_NAMES("mlp"), .shared_experts = true,
                          .part = {TABLE, NORM1, LATENT, OUT_NORM2, GATED_MLP, CHOOSING_ROUTER, EXPERTS,
                                   SHARED("shared_experts"), HEAD}},
    [AR_ARCH_GLM4] = {LLAMA_NAMES("mlp"),
                      .part = {TABLE, NORM1, QKV, OUT_NORMS("post_self_attn_layernorm", "post_attention_layernorm"),
                               PACKED_MLP, MLP_NORM("post_mlp_layernorm"), HEAD}},
};

static const ari_part_kind kinds[ARI_ROLES] = {
    [ARI_TOKENS] = {ARI_FORM_TABLE, AR_STYLE_VOCAB, ARI_VOCABULARY, ARI_HIDDEN},
    [ARI_POSITIONS] = {ARI_FORM_TABLE, AR_STYLE_REPLICATE, ARI_POSITION_ROWS, ARI_HIDDEN},
    [ARI_TOKENS_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_ENTERED_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_JOINED] = {ARI_FORM_LINEAR, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_TWICE_HIDDEN},
    [ARI_NORM1] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_Q_A] = {ARI_FORM_LINEAR, AR_STYLE_REPLICATE, ARI_QUERY_RANK, ARI_HIDDEN},
    [ARI_KV_A] = {ARI_FORM_LINEAR, AR_STYLE_REPLICATE, ARI_KEY_LATENTS, ARI_HIDDEN},
    [ARI_Q_A_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_QUERY_RANK, ARI_NO_EXTENT},
    [ARI_Q_B] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_QUERY_HEADS, ARI_QUERY_RANK},
    [ARI_KV_A_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_KEY_RANK, ARI_NO_EXTENT},
    [ARI_KV_B] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_KEY_VALUE_HEADS, ARI_KEY_RANK},
    [ARI_QKV] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_PACKED_HEADS, ARI_HIDDEN},
    [ARI_Q] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_QUERY_HEADS, ARI_HIDDEN},
    [ARI_K] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_KV_HEADS, ARI_HIDDEN},
    [ARI_V] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_KV_HEADS, ARI_HIDDEN},
    [ARI_SINKS] = {ARI_FORM_HEADS, AR_STYLE_COLWISE, ARI_HEAD_COUNT, ARI_NO_EXTENT},
    [ARI_Q_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_NORMED_QUERIES, ARI_NO_EXTENT},
    [ARI_K_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_NORMED_KEYS, ARI_NO_EXTENT},
    [ARI_OUT] = {ARI_FORM_LINEAR, AR_STYLE_ROWWISE, ARI_HIDDEN, ARI_VALUE_HEADS},
    [ARI_ATTENTION_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_NORM2] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_FIRST] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_FFN, ARI_HIDDEN},
    [ARI_GATE] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_FFN, ARI_HIDDEN},
    [ARI_UP] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_FFN, ARI_HIDDEN},
    [ARI_GATE_UP] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_PACKED_FFN, ARI_HIDDEN},
    [ARI_DOWN] = {ARI_FORM_LINEAR, AR_STYLE_ROWWISE, ARI_HIDDEN, ARI_FFN},
    [ARI_ROUTER] = {ARI_FORM_LINEAR, AR_STYLE_REPLICATE, ARI_EXPERT_COUNT, ARI_HIDDEN},
    [ARI_ROUTER_BIAS] = {ARI_FORM_BUFFER, AR_STYLE_REPLICATE, ARI_EXPERT_COUNT, ARI_NO_EXTENT},
    [ARI_EXPERT_GATE] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_EXPERT_FFN, ARI_HIDDEN},
    [ARI_EXPERT_UP] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_EXPERT_FFN, ARI_HIDDEN},
    [ARI_EXPERT_DOWN] = {ARI_FORM_LINEAR, AR_STYLE_ROWWISE, ARI_HIDDEN, ARI_EXPERT_FFN},
    [ARI_SHARED_GATE] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_SHARED_FFN, ARI_HIDDEN},
    [ARI_SHARED_UP] = {ARI_FORM_LINEAR, AR_STYLE_COLWISE, ARI_SHARED_FFN, ARI_HIDDEN},
    [ARI_SHARED_DOWN] = {ARI_FORM_LINEAR, AR_STYLE_ROWWISE, ARI_HIDDEN, ARI_SHARED_FFN},
    [ARI_SHARED_SHARE] = {ARI_FORM_LINEAR, AR_STYLE_REPLICATE, ARI_ONE, ARI_HIDDEN},
    [ARI_MLP_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_MTP_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_FINAL_NORM] = {ARI_FORM_NORM, AR_STYLE_REPLICATE, ARI_HIDDEN, ARI_NO_EXTENT},
    [ARI_HEAD] = {ARI_FORM_TABLE, AR_STYLE_VOCAB, ARI_VOCABULARY, ARI_HIDDEN},
};

/* Values that layers of any family report (models.md), named below its attention, its MLP or the block; "": the module
 * itself. */
enum { IN_ATTENTION, IN_MLP, IN_BLOCK };
static const struct value {
    ari_role role;
    int scope;
    const char *leaf, *plural; /* plural: the name in families that call it shared_experts; NULL: the same name */
} values[] = {
    {ARI_Q_HEADS, IN_ATTENTION, "q", NULL},
    {ARI_K_HEADS, IN_ATTENTION, "k", NULL},
    {ARI_V_HEADS, IN_ATTENTION, "v", NULL},
    {ARI_Q_ROPE, IN_ATTENTION, "q_rope", NULL},
    {ARI_K_ROPE, IN_ATTENTION, "k_rope", NULL},
    {ARI_K_SHARED, IN_ATTENTION, "k_shared", NULL},
    {ARI_PROBS, IN_ATTENTION, "probs", NULL},
    {ARI_PROBS_DROPPED, IN_ATTENTION, "attn_dropout", NULL},
    {ARI_PROBS_DIGESTS, IN_ATTENTION, "probs_rows", NULL},
    {ARI_DROPPED_DIGESTS, IN_ATTENTION, "attn_dropout_rows", NULL},
    {ARI_CONTEXT, IN_ATTENTION, "context", NULL},
    {ARI_OUT_DROPPED, IN_ATTENTION, "resid_dropout", NULL},
    {ARI_ATTENTION, IN_ATTENTION, "", NULL},
    {ARI_FIRST_SUM, IN_MLP, "fc", NULL},
    {ARI_GATE_SUM, IN_MLP, "gate", NULL},
    {ARI_UP_SUM, IN_MLP, "up", NULL},
    {ARI_ACTIVATION, IN_MLP, "act", NULL},
    {ARI_MLP_DROPPED, IN_MLP, "dropout", NULL},
    {ARI_CHOSEN, IN_MLP, "routes", NULL},
    {ARI_ROUTES, IN_MLP, "weights", NULL},
    {ARI_ROUTER_LOGITS, IN_MLP, "logits", NULL},
    {ARI_EXPERTS, IN_MLP, "experts", NULL},
    {ARI_SHARED_ACTIVATION, IN_MLP, "shared_expert.act", "shared_experts.act"},
    {ARI_SHARED_EXPERT, IN_MLP, "shared_expert", "shared_experts"},
    {ARI_MLP, IN_MLP, "", NULL},
    {ARI_MTP_TOKENS, IN_BLOCK, "embed_tokens", NULL},
    {ARI_MTP_HEAD, IN_BLOCK, "shared_head.head", NULL},
    {ARI_MTP_LOGITS, IN_BLOCK, "shared_head.head.logits", NULL},
};

/* --- reading them ------------------------------------------------------------------------------------------------- */

const ari_part_kind *ari_part_kind_of(ari_role role)
{
    return &kinds[role];
}

const ari_family *ari_family_of(ar_arch arch)
{
    return &families[arch];
}

ar_status ari_arch_expect(ar_arch arch)
{
    return ari_check_choice("config: arch", (int)arch, (int)(sizeof families / sizeof *families));
}

ar_status ari_config_expect(const ar_config *c)
{
    const struct {
        const char *name;
        size_t value;
    } sizes[] = {{"vocab", c->vocab},
                 {"hidden", c->hidden},
                 {"heads", c->heads},
                 {"kv_heads", c->kv_heads},
                 {"head_dim", c->head_dim}};
    AR_TRY(ari_arch_expect(c->arch));
    AR_TRY(ari_check_choice("config: activation", (int)c->activation, AR_ACTIVATIONS));
    AR_TRY(ari_check_choice("config: norm", (int)c->norm, AR_NORM_RMS + 1));
    AR_TRY(ari_check_choice("config: norm_place", (int)c->norm_place, AR_NORM_AROUND + 1));
    AR_TRY(ari_check_choice("config: residual", (int)c->residual, AR_RESIDUAL_PARALLEL_ONE_NORM + 1));
    AR_TRY(ari_check_choice("config: qk_norm", (int)c->qk_norm, AR_QK_NORM_WIDTH + 1));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        if (sizes[i].value == 0)
            return ar_error_set(AR_ERR_ARG, "config: %s is 0, expected at least 1", sizes[i].name);
    }
    return c->heads % c->kv_heads == 0
               ? AR_OK
               : ar_error_set(AR_ERR_ARG, "config: kv_heads is %zu, expected a divisor of the %zu heads", c->kv_heads,
                              c->heads);
}

const ari_family *ari_family_at(size_t i)
{
    return i < sizeof families / sizeof *families ? &families[i] : NULL;
}

const char *ari_part_path(const ari_family *f, ari_role role)
{
    const ari_family_part *p = f->part;
    while (p->path && p->role != role)
        p++;
    return p->path;
}

bool ari_is_buffer_name(const char *name)
{
    for (size_t i = 0; ari_family_at(i); i++) {
        const char *path = ari_part_path(ari_family_at(i), ARI_ROUTER_BIAS);
        const size_t n = path ? strlen(path) : 0, name_length = strlen(name);
        if (n > 0 && name_length > n && name[name_length - n - 1] == '.' && strcmp(name + name_length - n, path) == 0)
            return true;
    }
    return false;
}

void ari_expert_path(char *out, size_t cap, const char *path, size_t expert)
{
    const char *star = strchr(path, '*');
    if (star)
        snprintf(out, cap, "%.*s%zu%s", (int)(star - path), path, expert, star + 1);
    else
        snprintf(out, cap, "%s", path);
}

bool ari_family_value(const char **module, const char **leaf, ari_role *role, const ari_family *f, size_t i)
{
    if (i >= sizeof values / sizeof *values)
        return false;
    *module = values[i].scope == IN_BLOCK ? "" : values[i].scope == IN_MLP ? f->mlp : f->attention;
    *leaf = f->shared_experts && values[i].plural ? values[i].plural : values[i].leaf;
    *role = values[i].role;
    return true;
}

/* Below a block, or in the model. */
static void leaf_path(char *out, size_t cap, const ari_family *f, ari_role role)
{
    const char *path = ari_part_path(f, role), *module, *leaf;
    ari_role found = ARI_NO_ROLE;
    for (size_t i = 0; !path && ari_family_value(&module, &leaf, &found, f, i); i++) {
        if (found != role)
            continue;
        snprintf(out, cap, "%s%s%s", module, module[0] && leaf[0] ? "." : "", leaf);
        return;
    }
    if (role == ARI_EMBEDDED)
        path = f->embedded;
    else if (role == ARI_ATTENTION_SUM)
        path = "attn_residual";
    else if (role == ARI_LOSS)
        path = "loss";
    snprintf(out, cap, "%s", path ? path : "");
}

void ari_role_path(char *out, size_t cap, ar_arch arch, const char *layer, ari_role role)
{
    const ari_family *f = ari_family_of(arch);
    char leaf[64];
    leaf_path(leaf, sizeof leaf, f, role);
    if (ari_section_of(role) == ARI_IN_BLOCKS)
        snprintf(out, cap, "%s.%s%s%s", f->blocks, layer, leaf[0] ? "." : "", leaf);
    else
        snprintf(out, cap, "%s", leaf);
}

/* --- the parameters of a model ------------------------------------------------------------------------------------ */

bool ari_is_mlp_part(ari_role role)
{
    return role == ARI_FIRST || role == ARI_GATE_UP || role == ARI_GATE || role == ARI_UP || role == ARI_DOWN;
}

bool ari_is_of_experts(ari_role role)
{
    return role >= ARI_ROUTER && role <= ARI_SHARED_SHARE;
}

bool ari_part_in_layer(const ar_config *c, ari_role role, size_t layer)
{
    const bool experts = ar_config_has_experts(c, layer);
    if (ari_is_mtp_part(role))
        return layer >= c->layers;
    if (ari_is_of_experts(role))
        return experts && (role < ARI_SHARED_GATE || c->experts.shared > 0) &&
               (role != ARI_SHARED_SHARE || !c->experts.ungated) &&
               (role != ARI_ROUTER_BIAS || ar_config_router_bias(c));
    return ari_part_present(c, role) && !(experts && ari_is_mlp_part(role));
}

bool ari_part_present(const ar_config *c, ari_role role)
{
    switch (role) {
    case ARI_POSITIONS:
        return c->learned_positions;
    case ARI_NORM1:
        return ar_config_norm_before(c);
    case ARI_NORM2:
        return ar_config_norm_before(c) && c->residual != AR_RESIDUAL_PARALLEL_ONE_NORM;
    case ARI_ATTENTION_NORM:
    case ARI_MLP_NORM:
        return c->norm_place != AR_NORM_BEFORE;
    case ARI_Q_NORM:
    case ARI_K_NORM:
        return c->qk_norm != AR_QK_NORM_NONE;
    case ARI_Q:
        return c->latent.kv_rank == 0 || c->latent.q_rank == 0;
    case ARI_Q_A:
    case ARI_Q_A_NORM:
    case ARI_Q_B:
        return c->latent.q_rank > 0;
    case ARI_SINKS:
        return c->sinks;
    case ARI_FINAL_NORM:
        return c->final_norm;
    default:
        return ari_is_mtp_part(role) ? c->mtp > 0 : role != ARI_HEAD || !c->tied;
    }
}

static bool part_has_bias(const ar_config *c, ari_role role)
{
    if (kinds[role].form == ARI_FORM_NORM)
        return c->norm == AR_NORM_LAYER && !c->norm_no_bias;
    if (kinds[role].form != ARI_FORM_LINEAR || role == ARI_JOINED)
        return false;
    if (role == ARI_OUT)
        return c->out_bias;
    if (ari_is_of_experts(role))
        return c->experts.bias;
    if (c->latent.kv_rank > 0 && role < ARI_NORM2)
        return c->qkv_bias && (role == ARI_Q_A || role == ARI_KV_A);
    return role == ARI_QKV || role == ARI_Q || role == ARI_K || role == ARI_V ? c->qkv_bias : c->mlp_bias;
}

static size_t extent_of(const ar_config *c, ari_shape_extent e)
{
    const size_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const bool by_head = c->qk_norm == AR_QK_NORM_HEAD;
    const ar_latent *l = &c->latent;
    const size_t extents[] = {[ARI_NO_EXTENT] = 0,
                              [ARI_HIDDEN] = c->hidden,
                              [ARI_TWICE_HIDDEN] = 2 * c->hidden,
                              [ARI_FFN] = c->ffn,
                              [ARI_VOCABULARY] = c->vocab,
                              [ARI_POSITION_ROWS] = c->max_positions,
                              [ARI_QUERY_HEADS] = q,
                              [ARI_KV_HEADS] = kv,
                              [ARI_VALUE_HEADS] = c->heads * ar_config_value_dim(c),
                              [ARI_QUERY_RANK] = l->q_rank,
                              [ARI_KEY_RANK] = l->kv_rank,
                              [ARI_KEY_LATENTS] = l->kv_rank + l->rope_dim,
                              [ARI_KEY_VALUE_HEADS] = c->heads * (c->head_dim - l->rope_dim + l->value_dim),
                              [ARI_NORMED_QUERIES] = by_head ? c->head_dim : q,
                              [ARI_NORMED_KEYS] = by_head ? c->head_dim : kv,
                              [ARI_PACKED_HEADS] = q + 2 * kv,
                              [ARI_PACKED_FFN] = 2 * c->ffn,
                              [ARI_HEAD_COUNT] = c->heads,
                              [ARI_EXPERT_COUNT] = c->experts.n,
                              [ARI_EXPERT_FFN] = c->experts.ffn,
                              [ARI_SHARED_FFN] = c->experts.shared,
                              [ARI_ONE] = 1};
    return extents[e];
}

typedef struct walk {
    const ar_config *config;
    ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape);
    void *user;
} walk;

/* Visits the weight in its stored orientation, then the bias. block: "model.layers.0.", or "". */
static ar_status visit_part(const walk *w, const ari_family_part *p, const char *block, size_t expert)
{
    const ari_part_kind *k = ari_part_kind_of(p->role);
    const bool transposed = k->form == ARI_FORM_LINEAR && ari_family_of(w->config->arch)->transposed;
    const size_t out = extent_of(w->config, k->out), in_extent = extent_of(w->config, k->in_extent);
    const size_t shape[2] = {transposed ? in_extent : out, transposed ? out : in_extent};
    char name[160], path[96];
    ari_expert_path(path, sizeof path, p->path, expert);
    snprintf(name, sizeof name, "%s%s%s", block, path, ari_param_suffix(p->role, false));
    AR_TRY(w->visit(w->user, name, k->in_extent == ARI_NO_EXTENT ? 1 : 2, shape));
    if (!part_has_bias(w->config, p->role))
        return AR_OK;
    snprintf(name, sizeof name, "%s%s.bias", block, path);
    return w->visit(w->user, name, 1, &out);
}

/* Visits the parts of one expert, from the first on, then those of the next expert. */
static ar_status visit_experts(const walk *w, const ari_family_part *first_part, const char *block)
{
    for (size_t i = 0; i < w->config->experts.n; i++) {
        for (const ari_family_part *p = first_part; p->path && ari_is_expert_part(p->role); p++)
            AR_TRY(visit_part(w, p, block, i));
    }
    return AR_OK;
}

/* layer: ignored outside of the blocks. */
static ar_status visit_section(const walk *w, ari_section section, const char *block, size_t layer)
{
    for (const ari_family_part *p = ari_family_of(w->config->arch)->part; p->path; p++) {
        const bool exists = section == ARI_IN_BLOCKS ? ari_part_in_layer(w->config, p->role, layer)
                                                     : ari_part_present(w->config, p->role);
        if (ari_section_of(p->role) != section || !exists)
            continue;
        if (p->role == ARI_EXPERT_GATE)
            AR_TRY(visit_experts(w, p, block));
        else if (!ari_is_expert_part(p->role))
            AR_TRY(visit_part(w, p, block, 0));
    }
    return AR_OK;
}

ar_status ari_param_list(const ar_config *c,
                         ar_status (*visit)(void *user, const char *name, int ndim, const size_t *shape), void *user)
{
    const walk w = {c, visit, user};
    AR_TRY(visit_section(&w, ARI_BEFORE_BLOCKS, "", 0));
    for (size_t i = 0; i < ar_config_blocks(c); i++) {
        char block[64];
        snprintf(block, sizeof block, "%s.%zu.", ari_family_of(c->arch)->blocks, i);
        AR_TRY(visit_section(&w, ARI_IN_BLOCKS, block, i));
    }
    return visit_section(&w, ARI_AFTER_BLOCKS, "", 0);
}
