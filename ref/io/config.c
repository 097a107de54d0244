/* SPDX-License-Identifier: Apache-2.0 */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>

#include "anyrank/activation.h"
#include "ref/io/config_parts.h"
#include "ref/io/file.h"

/* --- known keys --------------------------------------------------------------------------------------------------- */

/* Keys that several readers ask for, and those that none does: those that would change the mathematics, those that
 * change nothing, and all others. The first two lists come from the config classes of transformers 5.17 and 4.57 and
 * from the models of Llama's family that add to it. */

/* --- one key ------------------------------------------------------------------------------------------------------ */

ar_status ari_config_activation(const ari_json_at *at, const char *key, ar_activation *out)
{
    static const struct {
        char name[20];
        ar_activation value;
    } names[] = {{"gelu", AR_ACT_GELU_ERF},       {"gelu_fast", AR_ACT_GELU_TANH},
                 {"gelu_new", AR_ACT_GELU_TANH},  {"gelu_pytorch_tanh", AR_ACT_GELU_TANH},
                 {"gelu_tanh", AR_ACT_GELU_TANH}, {"silu", AR_ACT_SILU},
                 {"swish", AR_ACT_SILU},          {"relu", AR_ACT_RELU}};
    const char *text = NULL;
    AR_TRY(ari_json_string_or(at, key, &text));
    if (text == NULL)
        return AR_OK;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(text, names[i].name) == 0) {
            *out = names[i].value;
            return AR_OK;
        }
    }
    return ari_json_wrong(
        at, key, " is '%s', expected gelu, gelu_fast, gelu_new, gelu_pytorch_tanh, gelu_tanh, silu, swish or relu",
        ARI_SHOW(text));
}

ar_status ari_config_positive(const ari_json_at *at, const char *key, double *out)
{
    AR_TRY(ari_json_real_or(at, key, out));
    if (!((float)*out > 0.0f) || isinf((float)*out))
        return ari_json_wrong(at, key, " is %g, expected a positive number", *out);
    return AR_OK;
}

/* --- probabilities of dropout ------------------------------------------------------------------------------------- */

static const char *const dropout_keys[] = {"attn_pdrop",         "embd_pdrop",       "resid_pdrop",
                                           "attention_dropout",  "hidden_dropout",   "hidden_dropout_prob",
                                           "embedding_dropout",  "residual_dropout", "attention_probs_dropout_prob",
                                           "activation_dropout", "dropout",          "ffn_dropout"};
#define DROPOUT_KEYS (sizeof dropout_keys / sizeof dropout_keys[0])

/* The largest probability of dropout: check says that it ignores them, so it must know whether there is one. */
static ar_status config_dropout(ar_config *c, const ari_json_at *at)
{
    for (size_t i = 0; i < DROPOUT_KEYS; i++) {
        double p = 0;
        AR_TRY(ari_json_real_or(at, dropout_keys[i], &p));
        if (!(p >= 0 && p <= 1))
            return ari_json_wrong(at, dropout_keys[i], " is %g, expected a probability from 0 to 1", p);
        c->config_dropout = p > c->config_dropout ? p : c->config_dropout;
    }
    return AR_OK;
}

/* --- how weights are stored --------------------------------------------------------------------------------------- */

/* c->quantized: by which method, where the weights beside the file are stored in few bits. */
static ar_status config_quantized(ar_config *c, const ari_json_at *at)
{
    const json_t *said = ari_json_get(at, "quantization_config");
    const char *method = json_string_value(json_object_get(said, "quant_method"));
    if (said != NULL && !json_is_object(said))
        return ari_json_wrong(at, "quantization_config", " is not an object");
    if (json_object_size(said) > 0)
        (void)ari_printable(c->quantized, sizeof c->quantized, method != NULL ? method : "few bits");
    return AR_OK;
}

/* --- what is not computed ----------------------------------------------------------------------------------------- */

typedef enum neutral { OFF, ZERO, ONE, ON, EMPTY, UNLIMITED, SOFTMAX, GREEDY, NORMS } neutral;

static bool is_neutral(const json_t *value, neutral kind)
{
    const bool number = json_is_number(value);
    switch (kind) {
    case ZERO:
        return json_is_false(value) || (number && json_number_value(value) == 0);
    case ONE:
        return number && json_number_value(value) == 1;
    case ON:
        return json_is_true(value);
    case EMPTY:
        return (json_is_object(value) && json_object_size(value) == 0) ||
               (json_is_array(value) && json_array_size(value) == 0);
    case SOFTMAX:
        return json_is_string(value) && strcmp(json_string_value(value), "softmax") == 0;
    case GREEDY:
        return json_is_string(value) && strcmp(json_string_value(value), "greedy") == 0;
    case UNLIMITED: /* Megatron writes -1 for no capacity too */
        return json_is_false(value) || (number && json_number_value(value) < 0);
    case OFF:
    case NORMS:
        break;
    }
    return json_is_false(value);
}

/* Words of keys that no model has unless it reads them, the value with which they change nothing, and what another
 * changes; NULL: the mathematics, in a way of their own. */
static const struct {
    const char *keys;
    neutral kind;
    const char *why;
} refused[] = {
    /* which weights are there */
    {"pruned_heads per_layer_config", EMPTY, NULL},
    /* which keys a query sees */
    {"is_causal", ON, NULL},
    {"is_prefix_lm prefix_lm use_bidirectional_attention attention_chunk_size sliding_window_pattern "
     "window_size",
     OFF, NULL},
    {"attention_types full_attn_idxs", EMPTY, NULL},
    /* positions */
    {"partial_rotary_factor rotary_pct rotary_percentage", ONE, NULL},
    {"rotary_dim rope_interleaved rope_interleave rope_local_base_freq use_dynamic_ntk use_mrope alibi", OFF, NULL},
    {"no_rope_layers", EMPTY, NULL},
    {"no_rope_layer_interval", ZERO, NULL},
    /* scores, logits and other factors */
    {"attn_logit_softcapping final_logit_softcapping attn_logit_cap logits_soft_cap query_pre_attn_scalar "
     "softmax_scale attn_temperature_tuning use_logn_attn attention_multiplier scale_embedding scale_depth "
     "scale_attn_by_inverse_layer_idx layer_scale clip_qkv",
     OFF, NULL},
    {"logit_scale logits_scaling embedding_multiplier residual_multiplier scale_emb", ONE, NULL},
    /* other parts of a block */
    {"use_qk_norm qk_norm qk_layernorm qk_ln", NORMS, NULL},
    {"qk_norm_type parallel_attn use_parallel_residual "
     "apply_residual_connection_post_layernorm hidden_activation norm_after use_post_norm "
     "new_decoder_architecture use_cla attention_out_bias q_lora_rank kv_lora_rank qk_rope_head_dim "
     "qk_nope_head_dim qk_head_dim v_head_dim lambda_std_dev mamba_d_state",
     OFF, NULL},
    {"num_kv_shared_layers", ZERO, NULL},
    /* experts */
    {"moe is_moe output_router_logits", OFF, NULL},
    {"moe_layers", EMPTY, NULL},
    {"num_local_experts num_experts router_jitter_noise n_routed_experts shared_expert_intermediate_size", ZERO, NULL},
    /* other kinds of models */
    {"is_encoder_decoder tie_encoder_decoder add_cross_attention", OFF, NULL},
    {"vision_config text_config audio_config", EMPTY, NULL},
    /* experts, by what they change */
    {"scoring_func score_func score_function router_scoring_func moe_router_score_function", SOFTMAX,
     "weights of experts are another function of the logits than their softmax"},
    {"topk_method", GREEDY, "experts are not chosen by their own scores alone"},
    {"n_group topk_group num_expert_group num_limited_groups moe_router_num_groups moe_router_group_topk", ONE,
     "experts are chosen by groups, of which some are left out first"},
    {"routed_scaling_factor router_scaling_factor route_scale moe_router_topk_scaling_factor", ONE,
     "weights of experts are multiplied by a factor"},
    {"router_bias use_router_bias gate_bias moe_gate_bias use_expert_bias moe_router_bias "
     "moe_router_enable_expert_bias use_routing_bias",
     OFF, "a bias takes part in the choice of experts"},
    {"n_shared_experts num_shared_experts moe_num_shared_experts shared_intermediate_size "
     "moe_shared_expert_intermediate_size",
     ZERO, "all tokens go to further experts, which this model has not"},
    {"expert_capacity moe_expert_capacity expert_capacity_factor moe_expert_capacity_factor capacity_factor "
     "moe_capacity_factor moe_capacity train_capacity_factor eval_capacity_factor moe_train_capacity_factor "
     "moe_eval_capacity_factor min_capacity moe_min_capacity",
     UNLIMITED,
     "of a capacity each rank drops tokens by its own count, so that the result depends on the number of ranks by "
     "definition"},
    {"drop_tokens token_dropping moe_token_dropping use_token_dropping token_drop_policy moe_token_drop_policy "
     "moe_pad_expert_input_to_capacity",
     OFF, "tokens are dropped, by each rank's own count, so that the result depends on the number of ranks"},
    {"moe_apply_probs_on_input apply_router_weight_on_input", OFF,
     "weights multiply what goes into an expert, not what comes out"},
    {"swiglu_limit swiglu_alpha", OFF, "an expert's gate is clamped"},
    {"jitter_noise moe_input_jitter_eps zero_expert_num", ZERO, "the router's input, or its experts, are others"},
    {"first_k_dense_replace", ZERO, "the first layers have no experts, which mlp_only_layers would say"},
    {"moe_layer_freq", ONE, "some layers have no experts, which decoder_sparse_step or mlp_only_layers would say"}};

ar_status ari_config_refuse_key(const ari_json_at *at, const char *key, const char *wanted)
{
    return ari_json_wrong(at, key, " changes the mathematics in a way that is not supported, expected %s", wanted);
}

/* Among words with spaces between. */
static bool is_word_of(const char *key, const char *words)
{
    const size_t n = strlen(key);
    for (const char *at = words; at != NULL && n > 0 && (at = strstr(at, key)) != NULL; at += n) {
        if ((at == words || at[-1] == ' ') && (at[n] == ' ' || at[n] == '\0'))
            return true;
    }
    return false;
}

#define REFUSED (sizeof refused / sizeof refused[0])

/* The row that has the key; REFUSED: none. */
static size_t refused_row(const char *key)
{
    size_t i = 0;
    while (i < REFUSED && !is_word_of(key, refused[i].keys))
        i++;
    return i;
}

/* Keys that other models of the family use to change the mathematics. Whatever is set and not neutral is refused, but
 *  for what the model reads. */
static ar_status config_refuse(const ari_json_at *at, const ari_model_reader *model)
{
    static const char wanted[][20] = {"null or false", "0",    "1",         "true",
                                      "empty or null", "null", "'softmax'", "'greedy'"};
    const char *key;
    json_t *value;
    /* jansson's iterators take an object that may change; this one does not. */
    json_object_foreach((json_t *)(uintptr_t)at->object, key, value)
    {
        const size_t i = refused_row(key);
        if (i == REFUSED || json_is_null(value) || is_word_of(key, model->reads))
            continue;
        /* What Qwen3's form, say, always has, a file may also say. */
        const bool normed = model->form != NULL && model->form->qk_norm != AR_QK_NORM_NONE;
        const neutral kind = refused[i].kind != NORMS ? refused[i].kind : normed ? ON : OFF;
        if (is_neutral(value, kind))
            continue;
        if (!refused[i].why)
            return ari_config_refuse_key(at, key, wanted[kind]);
        return ari_json_wrong(at, key, " changes the mathematics: %s; expected %s or no such key", refused[i].why,
                              wanted[refused[i].kind]);
    }
    return AR_OK;
}

/* --- what changes nothing here ------------------------------------------------------------------------------------ */

static const char *const neutral_keys[] = {
    /* where the file comes from and how others run it */
    "_name_or_path", "name_or_path", "_commit_hash", "_attn_implementation", "_attn_implementation_autoset",
    "_attn_implementation_internal", "attn_implementation", "_experts_implementation", "experts_implementation",
    "_flash_attn_2_enabled", "architectures", "auto_map", "model_type", "torch_dtype", "dtype", "torchscript",
    "transformers_version", "use_bfloat16", "tf_legacy_loss", "use_cache", "cache_implementation", "return_dict",
    "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "tokenizer_class", "prefix",
    "pretraining_tp", "use_flash_attn", "unsloth_version", "unsloth_fixed", "is_llama_config", "transformers.js_config",
    /* tokens with a meaning */
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
    /* other heads than that of a language model */
    "id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task",
    "classifier_dropout", "router_aux_loss_coef", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "is_decoder", "cross_attention_hidden_size",
    /* generation */
    "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids", "begin_suppress_tokens",
    "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "generation_config", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "target_lookbehind",
    "temperature", "top_k", "top_p", "typical_p",
    /* read for every model */
    "initializer_range", "quantization_config"};

/* A key that is read for every model, or that changes nothing here. */
static bool is_known(const char *key)
{
    /* A refused key has a neutral value, or the file would have been refused. */
    return ARI_IS_AMONG(key, neutral_keys) || ARI_IS_AMONG(key, dropout_keys) || refused_row(key) < REFUSED;
}

/* --- all others --------------------------------------------------------------------------------------------------- */

void ari_config_note(ar_config *c, const char *group, const char *key)
{
    if (c->unknown_keys < AR_CONFIG_NOTES) {
        char whole[ARI_PRINTABLE];
        snprintf(whole, sizeof whole, "%s%s%s", group, group[0] == '\0' ? "" : ".", ARI_SHOW(key));
        (void)ari_printable(c->unknown[c->unknown_keys], sizeof c->unknown[0], whole);
    }
    c->unknown_keys++;
}

void ari_config_note_others(ar_config *c, const char *group, const json_t *object, const char *const *keys, size_t n)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        if (!json_is_null(value) && ari_word_of(key, keys, n) == n && (group[0] != '\0' || !is_known(key)))
            ari_config_note(c, group, key);
    }
}

/* --- between keys ------------------------------------------------------------------------------------------------- */

/* Parameters, counted a little high, so that no later sum of sizes can wrap: below 2^60 elements, 2^62 bytes. */
static bool size_is_sane(const ar_config *c)
{
    size_t q = 0, kv = 0, context = 0, low = 0, attention = 0, experts = 0, mlp = 0, block = 0, all = 0, table = 0;
    const size_t rows = c->vocab > c->max_positions ? c->vocab : c->max_positions;
    if (__builtin_mul_overflow(c->heads, c->head_dim, &q) || q > ARI_CONFIG_MAX_DIM)
        return false;
    kv = c->kv_heads * c->head_dim; /* at most q */
    if (__builtin_mul_overflow(c->heads, ar_config_value_dim(c), &context) || context > ARI_CONFIG_MAX_DIM)
        return false;
    if (c->latent.kv_rank > 0) { /* what is between hidden size and heads, and behind it, counts as wider heads */
        const size_t ranks = c->latent.kv_rank + c->latent.q_rank;
        if (__builtin_mul_overflow((q + context + c->hidden) / c->hidden + 1, ranks, &low) || low > ARI_CONFIG_MAX_DIM)
            return false;
        kv = context + low + c->latent.rope_dim;
    }
    if (__builtin_mul_overflow(2 * q + 2 * kv + 4, c->hidden, &attention) ||
        __builtin_mul_overflow(c->experts.n, 3 * c->experts.ffn + 1, &experts) ||
        __builtin_add_overflow(3 * c->ffn + 3 * c->experts.shared + 5, experts, &mlp) ||
        __builtin_mul_overflow(mlp, c->hidden, &mlp) || __builtin_add_overflow(attention, mlp, &block) ||
        __builtin_mul_overflow(block, c->layers, &all) || __builtin_mul_overflow(3 * rows, c->hidden, &table) ||
        __builtin_add_overflow(all, table, &all))
        return false;
    return all < (size_t)1 << 60;
}

/* Checks the relations between the members of a config, whichever reader filled it in. */
static ar_status check_config(const ar_config *c, const ari_json_at *at)
{
    const char *name = ARI_SHOW(at->name);
    if (c->kv_heads > c->heads || c->heads % c->kv_heads != 0)
        return ari_json_wrong(at, "num_key_value_heads", " is %zu, expected a divisor of the %zu heads", c->kv_heads,
                              c->heads);
    if (c->rope.kind && ar_rope_dim(&c->rope, c->head_dim) % 2 != 0)
        return ari_json_wrong(at, "head_dim", " is %zu, expected an even number for rotary positions", c->head_dim);
    if (!(c->norm_eps >= 0) || isinf(c->norm_eps))
        return ar_error_set(AR_ERR_CONFIG, "%s: the normalisation's eps is %g, expected a finite number from 0", name,
                            c->norm_eps);
    if (!(c->initializer_range >= 0) || isinf(c->initializer_range))
        return ari_json_wrong(at, "initializer_range", " is %g, expected a finite number from 0", c->initializer_range);
    if (!size_is_sane(c))
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: absurd sizes: vocabulary %zu, hidden %zu, %zu layers, %zu heads of %zu, MLP %zu", name,
                            c->vocab, c->hidden, c->layers, c->heads, c->head_dim, c->ffn);
    return AR_OK;
}

/* --- a file ------------------------------------------------------------------------------------------------------- */

/* "GPT-2" and "gpt2". */
static bool same_letters(const char *a, const char *b)
{
    for (;; a++, b++) {
        while (*a == '-' || *a == '_' || *a == ' ')
            a++;
        while (*b == '-')
            b++;
        if (tolower((unsigned char)*a) != tolower((unsigned char)*b))
            return false;
        if (*a == '\0')
            return true;
    }
}

/* "GemmaForCausalLM" with a model_type of llama: a file whose model_type was changed, and whose weights are another
 * architecture's. */
static ar_status check_classes(const ari_json_at *at, const ari_model_reader *m)
{
    static const char *const ends[] = {"For", "LMHead", "DoubleHeads", "Model", "PreTrained"};
    const json_t *classes = json_object_get(at->object, "architectures");
    for (size_t i = 0; i < json_array_size(classes) && m->class[0]; i++) {
        const char *name = json_string_value(json_array_get(classes, i));
        size_t n = name ? strlen(name) : 0;
        for (size_t k = 0; name && k < sizeof ends / sizeof ends[0]; k++) {
            const char *end = strstr(name, ends[k]);
            n = end && (size_t)(end - name) < n ? (size_t)(end - name) : n;
        }
        if (name && (n != strlen(m->class) || strncasecmp(name, m->class, n) != 0))
            return ari_json_wrong(
                at, "architectures",
                " is '%s', and 'model_type' is '%s': one of the two is another model's, and its weights would be "
                "computed with wrongly",
                ARI_SHOW(name), m->name);
    }
    return AR_OK;
}

/* Known models that are not computed, and what of them is not, as transformers has it. A row is also for the language
 * model of a larger one, "qwen3_5_text". */
static const char *lacking(const char *type)
{
    static const char apart[] = "its tensors of experts and routers are others, with other names";
    static const char delta[] = "most layers are Gated DeltaNet, a linear attention with a recurrent state and a "
                                "convolution, and a gate multiplies the output of attention in the others";
    static const char scan[] = "every layer is a selective state-space model with a causal convolution, without "
                               "attention";
    static const char decoder[] = "it has an encoder, cross-attention from the decoder to it, and a learned bias of "
                                  "scores by relative position";
    static const struct {
        const char *type, *lacks;
    } all[] = {
        {"phimoe", "sparsemixer routes: each expert of a token by a softmax of its own, of logits near the largest"},
        {"llama4", "an expert's input is multiplied by a sigmoid, and layers differ in positions and masks"},
        {"jamba", "layers of a state-space model stand between those of attention"},
        {"dbrx", "q, k and v are clamped, and a token's weights have a norm of another kind"},
        {"granitemoe", apart},
        {"granitemoeshared", apart},
        {"qwen3_next", "layers of linear attention stand between those of attention"},
        {"lfm2_moe", "layers of convolution stand between those of attention"},
        {"ernie4_5_moe", apart},
        {"exaone_moe", apart},
        {"flex_olmo", "layers with experts have their norms behind them"},
        {"switch_transformers", "it has an encoder and experts of limited capacity"},
        {"nllb-moe", "it has an encoder and experts of limited capacity"},
        {"kimi_linear", "most layers are Kimi Delta Attention, a linear attention with a recurrent state and "
                        "convolutions"},
        {"qwen3_5", delta},
        {"qwen3_5_moe", delta},
        {"mamba", scan},
        {"mamba2", scan},
        {"falcon_h1", "in every layer a state-space model (Mamba-2) works beside attention, on the same input"},
        {"nemotron_h", "layers of a state-space model (Mamba-2) stand between layers that are attention, an MLP or "
                       "experts alone"},
        {"deepseek_v32", "DeepSeek Sparse Attention: an indexer chooses the keys that each query attends to"},
        {"gemma3n", "layers have embeddings of their own, several residual streams (AltUp), low-rank residual branches "
                    "(LAuReL) and MLPs of sparse activations, and the last layers reuse keys and values of others"},
        {"bert", "it is an encoder: tokens attend in both directions, and the loss is of masked tokens"},
        {"t5", decoder},
        {"mt5", decoder}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        const size_t n = strlen(all[i].type);
        if (strncmp(type, all[i].type, n) == 0 && (type[n] == '\0' || strcmp(type + n, "_text") == 0))
            return all[i].lacks;
    }
    return NULL;
}

/* type: NULL where there is none. */
static ar_status unknown_model(const ari_json_at *at, const char *type)
{
    /* Another spelling is suggested, never another architecture: that would invite to rename it. */
    size_t n;
    const ari_model_reader *models = ari_model_readers(&n);
    const char *near = NULL;
    char names[512];
    ari_text list = ari_plain_text_in(names, sizeof names);
    for (size_t i = 0; i < n; i++) {
        near = type && same_letters(type, models[i].name) ? models[i].name : near;
        ari_say(&list, "%s'%s'", i ? ", " : "", models[i].name);
    }
    if (type == NULL)
        return ari_json_wrong(at, "model_type", " is missing, expected one of %s", names);
    const char *lacks = lacking(type);
    if (lacks != NULL)
        return ari_json_wrong(at, "model_type", " is '%s', which is not computed: %s; expected one of %s",
                              ARI_SHOW(type), lacks, names);
    return ari_json_wrong(at, "model_type", " is '%s', expected one of %s%s%s%s", ARI_SHOW(type), names,
                          near == NULL ? "" : "; did you mean '", near == NULL ? "" : near, near == NULL ? "" : "'?");
}

static const ari_model_reader *reader_of(const json_t *object)
{
    size_t n;
    const ari_model_reader *models = ari_model_readers(&n);
    const char *type = json_string_value(json_object_get(object, "model_type"));
    for (size_t i = 0; type && i < n; i++) {
        if (strcmp(type, models[i].name) == 0)
            return &models[i];
    }
    return NULL;
}

bool ari_config_language_model(json_t **object)
{
    /* Of configuration_gemma3.py, on which Google's files rely. */
    static const struct {
        char key[24];
        int value;
    } sizes[] = {{"vocab_size", 262208}, {"num_attention_heads", 8}};
    static const char *const outer[] = {"tie_word_embeddings", "quantization_config"};
    const json_t *text = json_object_get(*object, "text_config");
    const ari_model_reader *model = reader_of(text);
    if (model == NULL || reader_of(*object) != NULL)
        return false;
    json_t *made = json_deep_copy(text);
    for (size_t i = 0; i < sizeof outer / sizeof *outer; i++) {
        if (json_object_get(*object, outer[i]) != NULL)
            json_object_set(made, outer[i], json_object_get(*object, outer[i]));
    }
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes && strcmp(model->name, "gemma3_text") == 0; i++) {
        if (json_object_get(made, sizes[i].key) == NULL)
            json_object_set_new(made, sizes[i].key, json_integer(sizes[i].value));
    }
    json_decref(*object);
    *object = made;
    return true;
}

static ar_status read_config(ar_config *c, const ari_json_at *at)
{
    const ari_model_reader *model = reader_of(at->object);
    const char *type = NULL;
    if (!ari_json_get(at, "model_type"))
        return unknown_model(at, NULL);
    AR_TRY(ari_json_string(at, "model_type", &type));
    if (model == NULL)
        return unknown_model(at, type);
    c->initializer_range = 0.02; /* every Hugging Face default so far */
    c->causal = true;
    AR_TRY(config_refuse(at, model));
    AR_TRY(check_classes(at, model));
    AR_TRY(model->form ? ari_config_llama_form(c, at, model->form) : model->read(c, at));
    AR_TRY(ari_json_real_or(at, "initializer_range", &c->initializer_range));
    AR_TRY(config_dropout(c, at));
    AR_TRY(config_quantized(c, at));
    return check_config(c, at);
}

ar_status ar_config_parse(ar_config *c, const char *json, size_t length, const char *name)
{
    if (c == NULL || json == NULL)
        return ar_error_set(AR_ERR_ARG, "config_parse: no %s", c == NULL ? "place for the config" : "text");
    const ari_json_at at0 = {NULL, name == NULL ? "config" : name, AR_ERR_CONFIG};
    json_t *root = NULL;
    AR_TRY(ari_json_parse(&root, json, length, at0.name));
    ar_config read = {.within = ari_config_language_model(&root)};
    const ari_json_at at = {root, at0.name, AR_ERR_CONFIG};
    ar_status st = AR_OK;
    if (!json_is_object(root))
        st = ar_error_set(AR_ERR_CONFIG, "%s: expected a JSON object", ARI_SHOW(at.name));
    else
        st = read_config(&read, &at);
    json_decref(root);
    if (st != AR_OK)
        return st;
    snprintf(read.name, sizeof read.name, "%s", ari_printable((char[sizeof read.name]){0}, sizeof read.name, at.name));
    *c = read; /* last: all or nothing */
    return AR_OK;
}

/* The name a report calls the model by: the folder's, or a .json file's own unless it is config.json. */
static void model_name(char *out, size_t cap, const char *path)
{
    ARI_OWNED char *real = realpath(path, NULL);
    char *text = real != NULL ? real : (char[]){"model"};
    char *base = strrchr(text, '/');
    if (base != NULL && strcmp(base, "/config.json") == 0) {
        *base = '\0';
        base = strrchr(text, '/');
    }
    base = base == NULL ? text : base + 1;
    const size_t n = strlen(base);
    if (n > 5 && strcmp(base + n - 5, ".json") == 0)
        base[n - 5] = '\0';
    (void)ari_printable(out, cap, base[0] == '\0' ? "model" : base);
}

ar_status ar_config_load(ar_config *c, const char *path)
{
    if (c == NULL || path == NULL)
        return ar_error_set(AR_ERR_ARG, "config_load: no %s", c == NULL ? "place for the config" : "path");
    const bool folder = ari_is_folder(path);
    ARI_OWNED char *file = NULL;
    AR_TRY(ari_config_path(&file, path));
    ARI_OWNED unsigned char *text = NULL;
    size_t length = 0;
    ar_config read = {.layers = 0};
    struct stat there;
    if (folder && lstat(file, &there) != 0) /* then what the folder holds says more than that the file is missing */
        AR_TRY(ari_unsupported_format_check_folder(path));
    AR_TRY(ari_file_read_text(&text, &length, file, ARI_JSON_MAX_BYTES));
    AR_TRY(ar_config_parse(&read, (const char *)text, length, file));
    model_name(read.name, sizeof read.name, file);
    *c = read;
    return AR_OK;
}
