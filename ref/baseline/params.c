/* SPDX-License-Identifier: Apache-2.0 */
/* Names, shapes and values of the parameters. */
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <stdio.h>

#include "ref/numerics/philox.h"

/* Names common to Llama's family, and to its members with a weight for each of q, k and v, gate and up. */
#define FAMILY_NAMES(mlp, down)                                                                                    \
    .embed = "model.embed_tokens", .blocks = "model.layers", .ln1 = "input_layernorm", .final_norm = "model.norm", \
    .head = "lm_head", .o_param = "self_attn.o_proj", .down_param = "mlp." down,                                   \
    .rope = {"self_attn.q_rope", "self_attn.k_rope"}, .probs = "self_attn.probs", .context = "self_attn.context",  \
    .residual = "attn_residual", .act = "mlp.act", .dqkv = {"self_attn.q", "self_attn.k", "self_attn.v"},          \
    .drop_probs = "self_attn.attn_dropout", .drop_attention = "self_attn.resid_dropout", .drop_mlp = mlp ".dropout"
#define QKV_NAMES                                                              \
    .qkv_param = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, \
    .qkv = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}, .dattention = "self_attn"
#define UNPACKED_NAMES                                                                               \
    QKV_NAMES, .fc_param = {"mlp.gate_proj", "mlp.up_proj"}, .fc = {"mlp.gate_proj", "mlp.up_proj"}, \
               .dfc = {"mlp.gate", "mlp.up"}, .dmlp = "mlp"

static const ari_bl_names llama_names = {
    FAMILY_NAMES("mlp", "down_proj"),
    UNPACKED_NAMES,
    .ln2 = "post_attention_layernorm",
};

static const ari_bl_names phi3_names = {
    FAMILY_NAMES("mlp", "down_proj"),
    .ln2 = "post_attention_layernorm",
    .qkv_param = {"self_attn.qkv_proj"},
    .fc_param = {"mlp.gate_up_proj"},
    .qkv = {"self_attn.q", "self_attn.k", "self_attn.v"},
    .fc = {"mlp.gate", "mlp.up"},
    .dfc = {"mlp.gate", "mlp.up"},
    .dattention = "self_attn.qkv_proj",
    .dmlp = "mlp.gate_up_proj",
};

static const ari_bl_names gpt2_names = {
    .embed = "transformer.wte",
    .positions = "transformer.wpe",
    .embedded = "transformer.drop",
    .blocks = "transformer.h",
    .ln1 = "ln_1",
    .ln2 = "ln_2",
    .final_norm = "transformer.ln_f",
    .head = "lm_head",
    .qkv_param = {"attn.c_attn"},
    .o_param = "attn.c_proj",
    .fc_param = {"mlp.c_fc"},
    .down_param = "mlp.c_proj",
    .qkv = {"attn.q", "attn.k", "attn.v"},
    .rope = {"attn.q_rope", "attn.k_rope"},
    .probs = "attn.probs",
    .context = "attn.context",
    .residual = "attn_residual",
    .fc = {"mlp.c_fc"},
    .act = "mlp.act",
    .dqkv = {"attn.q", "attn.k", "attn.v"},
    .dattention = "attn.c_attn",
    .dfc = {"mlp.fc"},
    .dmlp = "mlp.c_fc",
    .drop_embed = "transformer.drop",
    .drop_probs = "attn.attn_dropout",
    .drop_attention = "attn.resid_dropout",
    .drop_mlp = "mlp.dropout",
    .conv1d = true,
};

static const ari_bl_names gpt_neox_names = {
    .embed = "gpt_neox.embed_in",
    .blocks = "gpt_neox.layers",
    .ln1 = "input_layernorm",
    .ln2 = "post_attention_layernorm",
    .final_norm = "gpt_neox.final_layer_norm",
    .head = "lm_head",
    .qkv_param = {"attention.query_key_value"},
    .o_param = "attention.dense",
    .fc_param = {"mlp.dense_h_to_4h"},
    .down_param = "mlp.dense_4h_to_h",
    .qkv = {"attention.q", "attention.k", "attention.v"},
    .rope = {"attention.q_rope", "attention.k_rope"},
    .probs = "attention.probs",
    .context = "attention.context",
    .residual = "attn_residual",
    .fc = {"mlp.dense_h_to_4h"},
    .act = "mlp.act",
    .dqkv = {"attention.q", "attention.k", "attention.v"},
    .dattention = "attention.query_key_value",
    .dfc = {"mlp.fc"},
    .dmlp = "mlp.dense_h_to_4h",
    .drop_probs = "attention.attn_dropout",
    .drop_attention = "attention.resid_dropout",
    .drop_mlp = "mlp.dropout",
    .by_head = true,
};

static const ari_bl_names stack_names = {
    .embed = "embed",
    .blocks = "layers",
    .ln1 = "ln1",
    .ln2 = "ln2",
    .final_norm = "norm",
    .qkv_param = {"attn.wq", "attn.wk", "attn.wv"},
    .o_param = "attn.wo",
    .fc_param = {"mlp.w1"},
    .down_param = "mlp.w2",
    .qkv = {"attn.wq", "attn.wk", "attn.wv"},
    .rope = {"attn.q_rope", "attn.k_rope"},
    .probs = "attn.probs",
    .context = "attn.context",
    .residual = "attn_residual",
    .fc = {"mlp.w1"},
    .act = "mlp.act",
    .dqkv = {"attn.q", "attn.k", "attn.v"},
    .dattention = "attn",
    .dfc = {"mlp.fc"},
    .dmlp = "mlp.w1",
    .drop_probs = "attn.attn_dropout",
    .drop_attention = "attn.resid_dropout",
    .drop_mlp = "mlp.dropout",
};

static const ari_bl_names mixtral_names = {
    FAMILY_NAMES("block_sparse_moe", "down_proj"),
    UNPACKED_NAMES,
    .ln2 = "post_attention_layernorm",
    .qk_norm = {"self_attn.q_norm", "self_attn.k_norm"},
};

static const ari_bl_names qwen3_names = {
    FAMILY_NAMES("mlp", "down_proj"),
    UNPACKED_NAMES,
    .ln2 = "post_attention_layernorm",
    .qk_norm = {"self_attn.q_norm", "self_attn.k_norm"},
};

static const ari_bl_names olmo2_names = {
    FAMILY_NAMES("mlp", "down_proj"),         UNPACKED_NAMES,
    .ln2 = "pre_feedforward_layernorm",       .attention_norm = "post_attention_layernorm",
    .mlp_norm = "post_feedforward_layernorm", .qk_norm = {"self_attn.q_norm", "self_attn.k_norm"},
};

static const ari_bl_names gpt_oss_names = {
    FAMILY_NAMES("mlp", "down_proj"),
    UNPACKED_NAMES,
    .ln2 = "post_attention_layernorm",
    .sinks = "self_attn.sinks",
};

static const ari_bl_names starcoder2_names = {
    FAMILY_NAMES("mlp", "c_proj"),
    QKV_NAMES,
    .ln2 = "post_attention_layernorm",
    .fc_param = {"mlp.c_fc"},
    .fc = {"mlp.c_fc"},
    .dfc = {"mlp.fc"},
    .dmlp = "mlp.c_fc",
};

static const ari_bl_names deepseek_names = {
    FAMILY_NAMES("mlp", "down_proj"),
    .ln2 = "post_attention_layernorm",
    .qkv_param = {"self_attn.q_proj"},
    .q_a = "self_attn.q_a_proj",
    .q_norm = "self_attn.q_a_layernorm",
    .q_b = "self_attn.q_b_proj",
    .kv_a = "self_attn.kv_a_proj_with_mqa",
    .kv_norm = "self_attn.kv_a_layernorm",
    .kv_b = "self_attn.kv_b_proj",
    .dshared = "self_attn.k_shared",
    .fc_param = {"mlp.gate_proj", "mlp.up_proj"},
    .fc = {"mlp.gate_proj", "mlp.up_proj"},
    .dfc = {"mlp.gate", "mlp.up"},
    .dattention = "self_attn",
    .dmlp = "mlp",
};

static const ari_bl_names glm4_names = {
    FAMILY_NAMES("mlp", "down_proj"),  QKV_NAMES,
    .ln2 = "post_attention_layernorm", .attention_norm = "post_self_attn_layernorm",
    .mlp_norm = "post_mlp_layernorm",  .fc_param = {"mlp.gate_up_proj"},
    .fc = {"mlp.gate", "mlp.up"},      .dfc = {"mlp.gate", "mlp.up"},
    .dmlp = "mlp.gate_up_proj",
};

const ari_bl_names *ari_bl_names_of(ar_arch arch)
{
    static const ari_bl_names *const names[] = {
        [AR_ARCH_LLAMA] = &llama_names,       [AR_ARCH_GPT2] = &gpt2_names,
        [AR_ARCH_GPT_NEOX] = &gpt_neox_names, [AR_ARCH_STACK] = &stack_names,
        [AR_ARCH_QWEN3] = &qwen3_names,       [AR_ARCH_OLMO2] = &olmo2_names,
        [AR_ARCH_PHI3] = &phi3_names,         [AR_ARCH_MIXTRAL] = &mixtral_names,
        [AR_ARCH_QWEN2_MOE] = &llama_names,   [AR_ARCH_QWEN3_MOE] = &qwen3_names,
        [AR_ARCH_GLM4_MOE] = &qwen3_names,    [AR_ARCH_STARCODER2] = &starcoder2_names,
        [AR_ARCH_DEEPSEEK] = &deepseek_names, [AR_ARCH_GLM4] = &glm4_names,
        [AR_ARCH_GPT_OSS] = &gpt_oss_names,
    };
    return (size_t)arch < sizeof names / sizeof *names ? names[arch] : NULL;
}

/* Draws the values of a fresh parameter; flatten: compiles all called functions for each instruction set too. */
ARI_SIMD __attribute__((flatten)) static void draw(double *v, size_t count, ar_init_scheme scheme, uint64_t key,
                                                   size_t fan_in, size_t fan_out, double range)
{
    float drawn[256];
    for (size_t i = 0; i < count; i++) {
        const size_t index = i % (sizeof drawn / sizeof *drawn), remaining = count - i;
        if (index == 0)
            ari_init_values(drawn, scheme, key, i, remaining < 256 ? remaining : 256, fan_in, fan_out, range);
        v[i] = (double)drawn[index];
    }
}

ar_status ari_bl_parameter(ari_bl_run *run, double **values, const char *part, size_t rows, size_t cols,
                           ar_init_scheme scheme, size_t fan_in, size_t fan_out)
{
    char name[ARI_BL_NAME_SIZE]; /* name used for the weights' callback and the random streams */
    ari_bl_name(run, name, part);
    double *v = ari_bl_doubles(run, rows, cols > 0 ? cols : 1);
    AR_TRY(run->memory);
    const size_t count = rows * (cols > 0 ? cols : 1);
    const float *weights = NULL;
    if (run->o->weights != NULL) {
        weights = run->o->weights(run->o->weights_user, name, count);
        if (weights == NULL)
            return ar_error_set(AR_ERR_NOT_FOUND, "baseline: no weight '%s' of %zu values", name, count);
    }
    if (weights == NULL)
        draw(v, count, scheme, ari_stream_key(run->o->seed, name), fan_in, fan_out, run->c->initializer_range);
    for (size_t i = 0; weights != NULL && i < count; i++) {
        if (weights[i] != weights[i])
            return ar_error_set(AR_ERR_DATA, "baseline: weight '%s' holds a NaN at element %zu of %zu", name, i, count);
        v[i] = (double)weights[i];
    }
    if (cols > 0)
        ari_bl_keep_all(run, v, count);
    if (run->noise != NULL)
        ari_bl_shorten(run->noise, v, count, run->noise->unit.weight);
    *values = v;
    const size_t shape[2] = {rows, cols};
    return ari_bl_emit(run, part, 'i', cols > 0 ? 2 : 1, shape, v);
}

ar_status ari_bl_load_norm(ari_bl_run *run, ari_bl_norm *norm, const char *name, size_t h, size_t per_token)
{
    char part[200];
    double *weight = NULL, *bias = NULL;
    const ar_init_scheme fresh = run->c->norm_plus_one ? AR_INIT_ZEROS : AR_INIT_ONES;
    snprintf(part, sizeof part, "%s.weight", name);
    AR_TRY(ari_bl_parameter(run, &weight, part, h, 0, fresh, h, h));
    ari_bl_training_add(run, part, h, 0, weight, 1, 1);
    if (run->c->norm == AR_NORM_LAYER && !run->c->norm_no_bias) {
        snprintf(part, sizeof part, "%s.bias", name);
        AR_TRY(ari_bl_parameter(run, &bias, part, h, 0, AR_INIT_UNIFORM_BIAS, h, h));
        ari_bl_training_add(run, part, h, 0, bias, 1, 1);
    }
    *norm = (ari_bl_norm){name, h, per_token, run->c->norm_eps, weight, bias};
    return AR_OK;
}

/* Loads one parameter tensor into rows [first_output, first_output + width) of the stacked weight. */
static ar_status load_part(ari_bl_run *run, const ari_bl_linear *l, int p, size_t first_output, double *weight,
                           double *bias)
{
    char part[200];
    const size_t in_features = l->in_features, width = l->width[p];
    const size_t rows = l->conv1d ? in_features : width, cols = l->conv1d ? width : in_features;
    const size_t row = l->conv1d ? 1 : in_features,
                 col = l->conv1d ? in_features : 1; /* within the stacked weight, [out, in] */
    double *w = NULL, *part_weight = weight + first_output * in_features;
    snprintf(part, sizeof part, "%s.weight", l->name[p]);
    AR_TRY(ari_bl_parameter(run, &w, part, rows, cols, AR_INIT_XAVIER_NORMAL, in_features, width));
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < cols; i++)
            part_weight[r * row + i * col] = w[r * cols + i];
    ari_bl_training_add(run, part, rows, cols, part_weight, row, col);
    if (run->training != NULL)
        run->training->params[run->training->n - 1].matrix = true;
    if (bias != NULL) {
        snprintf(part, sizeof part, "%s.bias", l->name[p]);
        AR_TRY(ari_bl_parameter(run, &w, part, width, 0, AR_INIT_UNIFORM_BIAS, in_features, width));
        for (size_t o = 0; o < width; o++)
            bias[first_output + o] = w[o];
        ari_bl_training_add(run, part, width, 0, bias + first_output, 1, 1);
    }
    return AR_OK;
}

ar_status ari_bl_load_linear(ari_bl_run *run, ari_bl_linear *l, size_t in_features, const char *const name[3],
                             const size_t width[3], bool with_bias)
{
    *l = (ari_bl_linear){.in_features = in_features, .conv1d = run->names->conv1d};
    for (int p = 0; p < 3 && name[p] != NULL; p++) {
        l->name[l->parts] = name[p];
        l->width[l->parts++] = width[p];
        l->out += width[p];
    }
    double *weight = ari_bl_doubles(run, l->out, in_features);
    double *bias = with_bias ? ari_bl_doubles(run, l->out, 1) : NULL;
    AR_TRY(run->memory);
    size_t first_output = 0;
    for (int p = 0; p < l->parts; p++) {
        ARI_BL_SCOPE(run);
        AR_TRY(load_part(run, l, p, first_output, weight, bias));
        first_output += l->width[p];
    }
    l->weight = weight;
    l->bias = bias;
    return AR_OK;
}

/* Loads norms of each head, or of all heads of a token together. */
static ar_status load_qk_norms(ari_bl_run *run, ari_bl_params *p)
{
    const ar_config *c = run->c;
    const size_t heads[2] = {c->heads, c->kv_heads};
    for (int i = 0; i < 2 && c->qk_norm != AR_QK_NORM_NONE; i++) {
        const size_t together = c->qk_norm == AR_QK_NORM_HEAD ? 1 : heads[i];
        AR_TRY(
            ari_bl_load_norm(run, &p->qk_norm[i], run->names->qk_norm[i], together * c->head_dim, heads[i] / together));
    }
    return AR_OK;
}

/* A logit of each head. */
static ar_status load_sinks(ari_bl_run *run, ari_bl_params *p)
{
    double *sinks;
    const size_t heads = run->c->heads, d = run->c->head_dim;
    if (!run->c->sinks)
        return AR_OK;
    AR_TRY(ari_bl_parameter(run, &sinks, run->names->sinks, heads, 0, AR_INIT_UNIFORM_BIAS, d, d));
    ari_bl_training_add(run, run->names->sinks, heads, 0, sinks, 1, 1);
    p->sinks = sinks;
    return AR_OK;
}

/* Loads three parameters (gate, up and down), or two if gate and up are packed or there is no gate. */
static ar_status load_mlp(ari_bl_run *run, ari_bl_mlp *mlp)
{
    const ar_config *c = run->c;
    const ari_bl_names *n = run->names;
    const char *const fc_name[3] = {n->fc_param[0], n->fc_param[1], NULL};
    const bool packed = c->gated && n->fc_param[1] == NULL; /* gate | up */
    const size_t fc_width[3] = {packed ? 2 * c->ffn : c->ffn, c->ffn, 0}, width[3] = {c->hidden, 0, 0};
    const char *const down_name[3] = {n->down_param, NULL, NULL};
    AR_TRY(ari_bl_load_linear(run, &mlp->fc, c->hidden, fc_name, fc_width, c->mlp_bias));
    if (packed)
        ari_bl_training_cut(run, 2, (const size_t[3]){c->ffn, c->ffn});
    return ari_bl_load_linear(run, &mlp->down, c->ffn, down_name, width, c->mlp_bias);
}

ar_status ari_bl_load_block(ari_bl_run *run, ari_bl_params *p, size_t layer)
{
    const ar_config *c = run->c;
    const ari_bl_names *n = run->names;
    const size_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    const bool fused = n->qkv_param[1] == NULL;
    const size_t qkv_width[3] = {fused ? q + 2 * kv : q, kv, kv};
    const char *const o_name[3] = {n->o_param, NULL, NULL};
    const size_t o_width[3] = {c->hidden, 0, 0};
    const bool before = c->norm_place != AR_NORM_AFTER, after = c->norm_place != AR_NORM_BEFORE;
    if (before)
        AR_TRY(ari_bl_load_norm(run, &p->ln1, n->ln1, c->hidden, 1));
    const size_t first_param = run->training != NULL ? run->training->n : 0;
    AR_TRY(c->latent.kv_rank > 0 ? ari_bl_load_latent(run, &p->latent)
                                 : ari_bl_load_linear(run, &p->qkv, c->hidden, n->qkv_param, qkv_width, c->qkv_bias));
    if (fused && !n->by_head && c->latent.kv_rank == 0)
        ari_bl_training_cut(run, 3, (const size_t[3]){q, kv, kv});
    AR_TRY(ari_bl_training_clip(run, p, first_param));
    AR_TRY(load_qk_norms(run, p));
    AR_TRY(load_sinks(run, p));
    AR_TRY(ari_bl_load_linear(run, &p->o, c->heads * ar_config_value_dim(c), o_name, o_width, c->out_bias));
    if (after)
        AR_TRY(ari_bl_load_norm(run, &p->attention_norm, n->attention_norm, c->hidden, 1));
    if (before && c->residual != AR_RESIDUAL_PARALLEL_ONE_NORM)
        AR_TRY(ari_bl_load_norm(run, &p->ln2, n->ln2, c->hidden, 1));
    AR_TRY(ar_config_has_experts(c, layer) ? ari_bl_load_experts(run, &p->experts) : load_mlp(run, &p->mlp));
    return after ? ari_bl_load_norm(run, &p->mlp_norm, n->mlp_norm, c->hidden, 1) : AR_OK;
}

ar_status ari_bl_emit_gradient(ari_bl_run *run, const char *name, const char *kind, size_t rows, size_t cols,
                               const double *gradient)
{
    char part[200];
    const size_t shape[2] = {rows, cols};
    snprintf(part, sizeof part, "%s%s%s", name, kind[0] != '\0' ? "." : "", kind);
    if (ari_bl_is_frozen(run, part))
        return ari_bl_training_keep(run, part, NULL);
    AR_TRY(ari_bl_training_keep(run, part, gradient));
    return ari_bl_emit(run, part, 'g', cols > 0 ? 2 : 1, shape, gradient);
}
