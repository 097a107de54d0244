/* SPDX-License-Identifier: Apache-2.0 */
/* Models that differ from Llama, or from another of its form, in a rule for their layers, a norm or a bias
 * (transformers, the models' configuration_NAME.py). */

#include "anyrank/activation.h"
#include "ref/io/config_parts.h"

/* --- layers that differ ------------------------------------------------------------------------------------------- */

/* Mistral's form, with windows in some layers. */
const ari_llama_form ari_config_ministral = ARI_FORM(.called = "Ministral", .kv_heads = 8, .positions = 131072,
                                                     .biases = ARI_BIASES_NONE, .window = ARI_WINDOW_PATTERN);

/* OLMo2's form, with windows in three of four layers, whose rotation is never scaled. */
static ar_status read_olmo3(ar_config *c, const ari_json_at *at)
{
    static const double theta = 500000.0;
    double said = theta;
    AR_TRY(ari_json_real_or(at, "rope_theta", &said));
    if (said != theta) /* transformers 5 then gives layers with a window the default's, and 4 gave them this one */
        return ari_json_wrong(
            at, "rope_theta",
            " is %g, expected %g or no such key: versions of transformers turn different layers by it; write "
            "'rope_parameters' with 'full_attention' and 'sliding_attention' instead",
            said, theta);
    return ari_config_two_ropes(c, at, theta, theta);
}

const ari_llama_form ari_config_olmo3 =
    ARI_FORM(.arch = AR_ARCH_OLMO2, .called = "OLMo3", .positions = 2048, .norm_eps = 1e-5, .pads = true, .pad_id = 1,
             .two_ropes = true, .norm_place = AR_NORM_AFTER, .qk_norm = AR_QK_NORM_WIDTH, .window = ARI_WINDOW_PATTERN,
             .window_number = 4, .more = read_olmo3);

static ar_status set_unturned(ar_config *c, const ari_json_at *at, size_t layer, bool unturned)
{
    return ari_config_set_layer(c->unturned, at, layer, unturned, "rotary positions");
}

/* Layers without a window have no rotary positions. */
static ar_status turn_windows_alone(ar_config *c, const ari_json_at *at)
{
    for (size_t i = 0; i < c->layers; i++)
        AR_TRY(set_unturned(c, at, i, ar_config_window(c, i) == 0));
    return AR_OK;
}

/* OLMo2's form with norms of heads. Where some layers have windows the others have no rotary positions. */
static ar_status read_exaone4(ar_config *c, const ari_json_at *at)
{
    size_t pattern = 4;
    if (json_is_null(json_object_get(at->object, "sliding_window")))
        pattern = 0;
    else if (ari_json_get(at, "layer_types") == NULL) /* else it may be a word, as "LLLG" */
        AR_TRY(ari_json_size_or(at, "sliding_window_pattern", 1, ARI_CONFIG_MAX_DIM, &pattern));
    AR_TRY(ari_config_windows(c, at, ARI_WINDOW_PATTERN, pattern, "EXAONE 4.0"));
    return c->window > 0 ? turn_windows_alone(c, at) : AR_OK;
}

const ari_llama_form ari_config_exaone4 =
    ARI_FORM(.arch = AR_ARCH_OLMO2, .called = "EXAONE 4.0", .kv_heads = 32, .positions = 2048, .norm_eps = 1e-5,
             .norm_place = AR_NORM_AFTER, .qk_norm = AR_QK_NORM_HEAD, .biases = ARI_BIASES_NONE,
             .window = ARI_WINDOW_OWN, .more = read_exaone4);

/* no_rope_layers: 1 for each layer with rotary positions, 0 for one without; by default every
 * no_rope_layer_interval-th has none. */
static ar_status read_unturned(ar_config *c, const ari_json_at *at)
{
    const json_t *list = NULL;
    size_t interval = 4;
    AR_TRY(ari_json_size_or(at, "no_rope_layer_interval", 1, ARI_CONFIG_MAX_DIM, &interval));
    if (ari_json_get(at, "no_rope_layers") != NULL)
        AR_TRY(ari_json_array(at, "no_rope_layers", &list));
    if (list != NULL && json_array_size(list) < c->layers)
        return ari_json_wrong(at, "no_rope_layers", " has %zu entries, expected one for each of %zu layers",
                              json_array_size(list), c->layers);
    for (size_t i = 0; i < c->layers; i++) {
        const json_t *entry = list != NULL ? json_array_get(list, i) : NULL;
        const json_int_t turned = json_is_integer(entry) ? json_integer_value(entry) : json_is_true(entry);
        if (list != NULL && !json_is_boolean(entry) && (!json_is_integer(entry) || (turned != 0 && turned != 1)))
            return ari_json_wrong(at, "no_rope_layers", ": entry %zu is not 0 (without rotary positions) or 1 (with)",
                                  i);
        AR_TRY(set_unturned(c, at, i, list != NULL ? turned == 0 : (i + 1) % interval == 0));
    }
    return AR_OK;
}

/* Llama's form. Windows are used on request: in the layers that layer_types names, else in those without rotary
 * positions. */
static ar_status read_smollm3(ar_config *c, const ari_json_at *at)
{
    bool slides = false;
    AR_TRY(read_unturned(c, at));
    AR_TRY(ari_json_bool_or(at, "use_sliding_window", &slides));
    return slides ? ari_config_windows(c, at, ARI_WINDOW_UNTURNED, 0, "SmolLM3") : ari_config_window_none(at);
}

const ari_llama_form ari_config_smollm3 =
    ARI_FORM(.called = "SmolLM3", .kv_heads = 4, .positions = 32768, .rope = {.theta = 2000000.0}, .tied = true,
             .pads = true, .pad_id = 128004, .biases = ARI_BIASES_BOTH, .window = ARI_WINDOW_OWN, .more = read_smollm3);

/* --- factors ------------------------------------------------------------------------------------------------------ */

/* Llama's form, with factors of the embedding, the scores, what is added to the residual, and the logits. */
static ar_status read_granite(ar_config *c, const ari_json_at *at)
{
    double scores = 1.0, logits = 1.0;
    c->embed_scale = c->branch_scale = 1.0;
    AR_TRY(ari_config_positive(at, "embedding_multiplier", &c->embed_scale));
    AR_TRY(ari_config_positive(at, "residual_multiplier", &c->branch_scale));
    AR_TRY(ari_config_positive(at, "attention_multiplier", &scores));
    AR_TRY(ari_config_positive(at, "logits_scaling", &logits));
    c->query_scalar = 1.0 / (scores * scores);
    c->logit_scale = 1.0 / logits;
    return AR_OK;
}

const ari_llama_form ari_config_granite =
    ARI_FORM(.called = "Granite", .positions = 2048, .biases = ARI_BIASES_BOTH, .more = read_granite);

/* --- biases and norms --------------------------------------------------------------------------------------------- */

/* Where head_dim is null, and not absent, it is hidden / heads. */
static ar_status unset_head_dim(ar_config *c, const ari_json_at *at)
{
    return json_is_null(json_object_get(at->object, "head_dim"))
               ? ari_config_head_dim(c, at, "hidden_size", "num_attention_heads")
               : AR_OK;
}

static ar_status read_seed_oss(ar_config *c, const ari_json_at *at)
{
    AR_TRY(unset_head_dim(c, at));
    c->qkv_bias = true;
    AR_TRY(ari_json_bool_or(at, "attention_bias", &c->qkv_bias));
    AR_TRY(ari_json_bool_or(at, "attention_out_bias", &c->out_bias));
    return ari_json_bool_or(at, "mlp_bias", &c->mlp_bias);
}

const ari_llama_form ari_config_seed_oss =
    ARI_FORM(.called = "Seed-OSS", .kv_heads = 8, .positions = 524288, .head_dim = 128, .pads = true, .pad_id = 1,
             .biases = ARI_BIASES_OWN, .more = read_seed_oss);

/* Gate and up packed; neighbours turn together. */
static ar_status read_glm(ar_config *c, const ari_json_at *at)
{
    c->rope.interleaved = true;
    c->qkv_bias = true;
    return ari_json_bool_or(at, "attention_bias", &c->qkv_bias);
}

#define GLM(name, norms)                                                                                         \
    ARI_FORM(.arch = AR_ARCH_GLM4, .called = name, .kv_heads = 2, .positions = 131072, .head_dim = 128,          \
             .norm_eps = 0.00000015625, .rope = {.partial = true, .share = 0.5}, .pads = true, .pad_id = 151329, \
             .norm_place = norms, .biases = ARI_BIASES_OWN_ATTENTION, .more = read_glm)
const ari_llama_form ari_config_glm = GLM("GLM", AR_NORM_BEFORE), ari_config_glm4 = GLM("GLM-4", AR_NORM_AROUND);

static ar_status read_ernie4_5(ar_config *c, const ari_json_at *at)
{
    bool bias = false;
    AR_TRY(unset_head_dim(c, at));
    AR_TRY(ari_json_bool_or(at, "use_bias", &bias));
    c->qkv_bias = c->out_bias = c->mlp_bias = bias;
    c->rope.interleaved = true;
    return AR_OK;
}

const ari_llama_form ari_config_ernie4_5 =
    ARI_FORM(.called = "ERNIE 4.5", .kv_heads = 2, .positions = 131072, .head_dim = 128, .norm_eps = 1e-5,
             .rope = {.theta = 500000.0}, .tied = true, .pads = true, .biases = ARI_BIASES_OWN,
             .own = {"rms_norm_eps", "use_bias"}, .more = read_ernie4_5);

/* Features of a head are always hidden / heads: the class knows no head_dim. */
static ar_status read_layer_norm(ar_config *c, const ari_json_at *at, const char *eps_key)
{
    AR_TRY(ari_config_own_head_dim(c, at));
    c->norm = AR_NORM_LAYER;
    c->norm_eps = 1e-5;
    return ari_json_real_or(at, eps_key, &c->norm_eps);
}

static ar_status read_stablelm(ar_config *c, const ari_json_at *at)
{
    bool parallel = false;
    AR_TRY(read_layer_norm(c, at, "layer_norm_eps"));
    AR_TRY(ari_json_bool_or(at, "use_qkv_bias", &c->qkv_bias));
    AR_TRY(ari_json_bool_or(at, "use_parallel_residual", &parallel));
    c->residual = parallel ? AR_RESIDUAL_PARALLEL_ONE_NORM : AR_RESIDUAL_IN_TURN;
    return AR_OK;
}

const ari_llama_form ari_config_stablelm =
    ARI_FORM(.called = "StableLM", .kv_heads = 32, .positions = 4096, .rope = {.partial = true, .share = 0.25},
             .biases = ARI_BIASES_OWN, .own = {"layer_norm_eps", "use_qkv_bias", "use_parallel_residual"},
             .more = read_stablelm);

static ar_status read_starcoder2(ar_config *c, const ari_json_at *at)
{
    bool bias = true;
    AR_TRY(read_layer_norm(c, at, "norm_epsilon"));
    c->gated = false;
    c->initializer_range = 0.018042;
    AR_TRY(ari_json_bool_or(at, "use_bias", &bias));
    c->qkv_bias = c->out_bias = c->mlp_bias = bias;
    return AR_OK;
}

const ari_llama_form ari_config_starcoder2 =
    ARI_FORM(.arch = AR_ARCH_STARCODER2, .called = "StarCoder2", .kv_heads = 2, .positions = 4096, .tied = true,
             .activation_key = "hidden_act", .biases = ARI_BIASES_OWN, .window = ARI_WINDOW_EVERYWHERE,
             .own = {"norm_epsilon", "use_bias"}, .more = read_starcoder2);

/* Attention and MLP side by side behind one LayerNorm without offset; neighbouring features turn together. */
#define COHERE_KEYS                                                                 \
    {                                                                               \
        "layer_norm_eps", "attention_bias", "logit_scale", "sliding_window_pattern" \
    }
static ar_status read_cohere(ar_config *c, const ari_json_at *at)
{
    AR_TRY(read_layer_norm(c, at, "layer_norm_eps"));
    AR_TRY(ari_json_bool_or(at, "attention_bias", &c->qkv_bias));
    c->logit_scale = 0.0625;
    AR_TRY(ari_config_positive(at, "logit_scale", &c->logit_scale));
    c->out_bias = c->qkv_bias;
    c->norm_no_bias = true;
    c->residual = AR_RESIDUAL_PARALLEL_ONE_NORM;
    c->rope.interleaved = true;
    return AR_OK;
}

const ari_llama_form ari_config_cohere =
    ARI_FORM(.called = "Cohere", .positions = 8192, .rope = {.theta = 500000.0}, .tied = true, .pads = true,
             .biases = ARI_BIASES_OWN, .own = COHERE_KEYS, .more = read_cohere);

/* Only layers with a window have rotary positions. */
static ar_status read_cohere2(ar_config *c, const ari_json_at *at)
{
    size_t pattern = 4;
    AR_TRY(read_cohere(c, at));
    if (ari_json_get(at, "layer_types") == NULL)
        AR_TRY(ari_json_size_or(at, "sliding_window_pattern", 1, ARI_CONFIG_MAX_DIM, &pattern));
    AR_TRY(ari_config_windows(c, at, ARI_WINDOW_PATTERN, pattern, "Cohere2"));
    return turn_windows_alone(c, at);
}

const ari_llama_form ari_config_cohere2 =
    ARI_FORM(.called = "Cohere2", .positions = 8192, .tied = true, .pads = true, .biases = ARI_BIASES_OWN,
             .window = ARI_WINDOW_OWN, .own = COHERE_KEYS, .more = read_cohere2);

/* Attention and MLP beside each other, of one parameter q, k and v. Its own names of what turns count where
 * rope_parameters does not say it. */
static ar_status read_gpt_neox(ar_config *c, const ari_json_at *at)
{
    bool parallel = true;
    AR_TRY(read_layer_norm(c, at, "layer_norm_eps"));
    if (c->kv_heads != c->heads)
        return ari_json_wrong(at, "num_key_value_heads", " is %zu, expected the %zu heads", c->kv_heads, c->heads);
    if (c->mtp > 0)
        return ari_json_wrong(at, "num_nextn_predict_layers", " is %zu, which GPT-NeoX has no names for", c->mtp);
    if (ari_json_get(at, "hidden_act") == NULL)
        c->activation = AR_ACT_GELU_ERF;
    c->gated = false;
    c->qkv_bias = true;
    AR_TRY(ari_json_bool_or(at, "attention_bias", &c->qkv_bias));
    c->out_bias = c->qkv_bias;
    c->mlp_bias = true;
    AR_TRY(ari_json_bool_or(at, "use_parallel_residual", &parallel));
    c->residual = parallel ? AR_RESIDUAL_PARALLEL : AR_RESIDUAL_IN_TURN;
    return AR_OK;
}

ar_status ari_config_gpt_neox(ar_config *c, const ari_json_at *at)
{
    ari_llama_form form =
        ARI_FORM(.arch = AR_ARCH_GPT_NEOX, .called = "GPT-NeoX", .positions = 2048,
                 .rope = {.theta = 10000.0, .partial = true, .share = 0.25}, .biases = ARI_BIASES_OWN,
                 .own = {"layer_norm_eps", "attention_bias", "use_parallel_residual", "rotary_emb_base"},
                 .more = read_gpt_neox);
    if (ari_json_get(at, "partial_rotary_factor") != NULL) /* transformers looks for it in rope_parameters alone */
        return ari_config_refuse_key(at, "partial_rotary_factor", "no such key: 'rotary_pct' has it");
    AR_TRY(ari_json_real_or(at, "rotary_pct", &form.rope.share));
    AR_TRY(ari_json_real_or(at, "rotary_emb_base", &form.rope.theta));
    double said = form.rope.theta;
    AR_TRY(ari_json_real_or(at, "rope_theta", &said));
    if (said != form.rope.theta) /* which transformers does not look at */
        return ari_json_wrong(at, "rope_theta",
                              " is %g, but GPT-NeoX turns by 'rotary_emb_base', %g: expected the same or no such key",
                              said, form.rope.theta);
    return ari_config_llama_form(c, at, &form);
}
