/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/config.h"
#include "ref/io/json.h"

/* A dimension of a model: large enough for any, small enough that a product of two fits in 64 bits. */
#define ARI_CONFIG_MAX_DIM ((size_t)1 << 31)
/* Layers are walked one by one before anything is refused for its size. */
#define ARI_CONFIG_MAX_LAYERS ((size_t)1 << 16)

/* Reader of a model_type (config_models.c): fills in values other than zero, refuses what cannot be computed, and notes
 * unknown keys. Checks over several keys are config.c's. */
typedef struct ari_model_reader {
    char name[16], class[16]; /* class: what the names of its classes begin with, "LlamaForCausalLM"; "": it has none */
    const struct ari_llama_form *form; /* of Llama's form; NULL: `read` has it */
    ar_status (*read)(ar_config *c, const ari_json_at *at);
    const char *reads; /* keys that it reads and that are refused elsewhere, separated by spaces */
} ari_model_reader;
/** In place of a file that describes more than a language model, and whose own model_type is not known, the object of its
 *  key 'text_config', if that one's is. Returns whether it is so. */
bool ari_config_language_model(json_t **object);
/** Static storage; *n: how many. */
const ari_model_reader *ari_model_readers(size_t *n);

/** The text of a config's config.json with what the config has otherwise (`changed`). *text is replaced; free().
 *  Errors: those of ar_config_parse, AR_ERR_MEMORY; on error *text is as it was. */
AR_NODISCARD ar_status ari_config_rewrite(unsigned char **text, size_t *bytes, const ar_config *c);

/* --- one key ------------------------------------------------------------------------------------------------------ */
/** A dimension, 1 .. ARI_CONFIG_MAX_DIM. */
static inline ar_status ari_config_dim(const ari_json_at *at, const char *key, size_t *out)
{
    return ari_json_size(at, key, 1, ARI_CONFIG_MAX_DIM, out);
}
/** The same, *out left as it is where the key is absent or null. */
static inline ar_status ari_config_dim_or(const ari_json_at *at, const char *key, size_t *out)
{
    return ari_json_size_or(at, key, 1, ARI_CONFIG_MAX_DIM, out);
}
/** A positive number, also as fp32; *out left as it is where the key is absent. */
AR_NODISCARD ar_status ari_config_positive(const ari_json_at *at, const char *key, double *out);
/** hidden / heads, where the file does not give head_dim. */
AR_NODISCARD ar_status ari_config_head_dim(ar_config *c, const ari_json_at *at, const char *hidden_key,
                                           const char *heads_key);
/** That in any case: a head_dim has to say the same. */
AR_NODISCARD ar_status ari_config_own_head_dim(ar_config *c, const ari_json_at *at);
/** Hugging Face's name of an activation; *out left as it is where the key is absent. */
AR_NODISCARD ar_status ari_config_activation(const ari_json_at *at, const char *key, ar_activation *out);

/* --- models of other forms than Llama's (config_models_other.c) ---------------------------------------------------- */
AR_NODISCARD ar_status ari_config_gpt2(ar_config *c, const ari_json_at *at);
AR_NODISCARD ar_status ari_config_stack(ar_config *c, const ari_json_at *at);

/* --- rotary positions --------------------------------------------------------------------------------------------- */
/* Differences between the models. */
typedef struct ari_rope_form {
    double theta;    /* rope_theta where the file has none; 0: 10000 */
    bool partial;    /* partial_rotary_factor may be less than 1 */
    double share;    /* and is this where the file has none; 0: 1 */
    bool phi3;       /* the types of Phi-3 alone, with their older names */
    size_t original; /* original_max_position_embeddings where the file has none beside the object; 0: not there */
} ari_rope_form;
/* An object that describes a rotation, where it stands. */
typedef struct ari_rope_object {
    const ari_json_at *at; /* what it is in */
    ari_json_at rope;
    const char *key;       /* of the object, for notes */
    const char *otherwise; /* the type where the object names none; NULL: it has to */
    const ari_rope_form *form;
} ari_rope_object;

/** c->rope: rope_theta with rope_scaling (before transformers 5), or rope_parameters (since). Notes what the object
 *  holds that is not used. max_positions and head_dim must be set; 'dynamic' makes max_positions the longest sequence
 *  that it is for. */
AR_NODISCARD ar_status ari_config_rope(ar_config *c, const ari_json_at *at, const ari_rope_form *form);
/** One of several objects, into *r, which has the theta and rotary_dim that hold where the object says nothing. */
AR_NODISCARD ar_status ari_config_rope_object(ar_config *c, ar_rope *r, const ari_rope_object *o);

/* --- models of Llama's form (config_models.c) ---------------------------------------------------------------------- */
/* Whose keys biases have: attention_bias those of q, k, v and the output, mlp_bias the MLP's. */
typedef enum ari_bias_rule {
    ARI_BIASES_ATTENTION, /* the MLP has none */
    ARI_BIASES_BOTH,
    ARI_BIASES_NONE,
    ARI_BIASES_OWN_ATTENTION, /* the MLP has none, the rest the model's own reader reads */
    ARI_BIASES_OWN
} ari_bias_rule;
/* Which keys a layer sees. Where layer_types does not say which layers have the sliding_window it is a rule that does, with
 * a number of its own: the size that the window has where the file has none (N), or of layers (n). */
typedef enum ari_window_rule {
    ARI_WINDOW_NONE,       /* all keys: ari_config_window_none */
    ARI_WINDOW_EVERYWHERE, /* N: every layer has it */
    ARI_WINDOW_UNTURNED,   /* N: those without rotary positions */
    ARI_WINDOW_PATTERN,    /* n: all but every n-th; 0: all, if there is one */
    ARI_WINDOW_QWEN2,      /* n: if use_sliding_window, those from max_window_layers (absent: n) on */
    ARI_WINDOW_QWEN2_MOE,  /* n: likewise, every other one of those before */
    ARI_WINDOW_DOTS1,      /* n: as Qwen2, whether used or not */
    ARI_WINDOW_OWN
} ari_window_rule;
enum { ARI_OWN_KEYS = 4 };
/* A form, with as many of its fields on a line as fit: a model is a row. */
#define ARI_FORM(...) \
    {                 \
        __VA_ARGS__   \
    }
/* What the models of Llama's form differ in. */
typedef struct ari_llama_form {
    ar_arch arch;
    const char *called;
    size_t kv_heads; /* where the file does not say; 0: as many as query heads */
    size_t positions;
    ari_rope_form rope;
    size_t head_dim; /* 0: hidden / heads */
    double norm_eps; /* 0: 1e-6 */
    bool tied;
    bool pads; /* by the id pad_id */
    size_t pad_id;
    bool two_ropes;             /* which the model's own reader reads */
    const char *activation_key; /* of a gate of GELU's tanh form; NULL: hidden_act, SiLU */
    ar_norm_place norm_place;
    ar_qk_norm qk_norm;
    ari_bias_rule biases;
    ari_window_rule window;
    size_t window_number;
    const struct ari_experts_form *experts;                 /* NULL: none */
    ar_status (*more)(ar_config *c, const ari_json_at *at); /* the model's own reader, after all of that but experts */
    const char *own[ARI_OWN_KEYS]; /* keys of its own, where Llama's of norms and biases are none of its */
} ari_llama_form;
/** All that the form says. Notes keys that the model has no use for. */
AR_NODISCARD ar_status ari_config_llama_form(ar_config *c, const ari_json_at *at, const ari_llama_form *form);
/** A choice of Llama's that another model has made for good: a file that says otherwise describes something else. */
AR_NODISCARD ar_status ari_config_expect_bias(const ari_json_at *at, const char *key, bool has, const char *model);

/** Two rotations: c->local_rope, of layers with a window, and c->rope, of the others, which alone may be scaled in files
 *  of transformers 4. global, local: their rope_theta and rope_local_base_freq where the file has none. */
AR_NODISCARD ar_status ari_config_two_ropes(ar_config *c, const ari_json_at *at, double global, double local);

/* --- those that differ in a rule for their layers, a norm or a bias (config_models_variants.c) --------------------- */
extern const ari_llama_form ari_config_ministral, ari_config_olmo3, ari_config_exaone4, ari_config_smollm3,
    ari_config_glm, ari_config_ernie4_5, ari_config_glm4, ari_config_granite, ari_config_seed_oss, ari_config_stablelm,
    ari_config_starcoder2, ari_config_cohere, ari_config_cohere2;
/** Whose own keys of the rotation say what the form has. */
AR_NODISCARD ar_status ari_config_gpt_neox(ar_config *c, const ari_json_at *at);

/* --- which keys of the attention a layer sees --------------------------------------------------------------------- */
/** For a model whose layers have no window: refuses keys that set one. */
AR_NODISCARD ar_status ari_config_window_none(const ari_json_at *at);
/** c->window and the layers that have it, by one of the other rules. called: the model, for messages. */
AR_NODISCARD ar_status ari_config_windows(ar_config *c, const ari_json_at *at, ari_window_rule rule, size_t number,
                                          const char *called);

/** Sets a layer's bit of one of the config's sets; every layer after the last bit must be as that one. what: in which
 *  layers differ, for the message. */
AR_NODISCARD ar_status ari_config_set_layer(uint64_t set[AR_CONFIG_LAYER_BITS / 64], const ari_json_at *at,
                                            size_t layer, bool in, const char *what);

/* --- experts ------------------------------------------------------------------------------------------------------ */
/* What the models with experts differ in. */
typedef struct ari_experts_form {
    size_t n, per_token; /* where the file does not say */
    bool one_width;      /* intermediate_size is the experts' width, and every layer has experts */
    bool normalised;     /* always; else norm_topk_prob says it */
    bool bias, w123;
    double balance_weight; /* router_aux_loss_coef where the file does not say */
    size_t shared;         /* shared_expert_intermediate_size where the file does not say; 0: no shared expert */
    size_t ffn;            /* moe_intermediate_size likewise */
    size_t dense;          /* first_k_dense_replace likewise, of models whose keys are DeepSeek's; */
    bool typed;            /* transformers reads mlp_layer_types instead of it */
    size_t groups, kept;   /* n_group and topk_group; 0: 1 */
    double scale;          /* and routed_scaling_factor; 0: 1 */
    bool softmax;          /* scores are a softmax, and DeepSeek-V2's */
    bool scored;           /* sigmoids and a bias choose; without one_width the keys are DeepSeek's */
} ari_experts_form;
/** c->experts and the layers without, by model->experts; c->layers and c->ffn must be set. */
AR_NODISCARD ar_status ari_config_experts(ar_config *c, const ari_json_at *at, const ari_llama_form *model);
/** The same of models whose keys are DeepSeek's, which most route by sigmoids. */
AR_NODISCARD ar_status ari_config_score_experts(ar_config *c, const ari_json_at *at, const ari_llama_form *model);

/* --- models with experts (config_models_experts.c) ---------------------------------------------------------------- */
extern const ari_llama_form ari_config_mixtral, ari_config_qwen2_moe, ari_config_qwen3_moe, ari_config_olmoe,
    ari_config_dots1, ari_config_glm4_moe, ari_config_gpt_oss, ari_config_deepseek_v2, ari_config_deepseek_v3,
    ari_config_glm4_moe_lite;

/** Whose own key of the rotation says what the form has. */
AR_NODISCARD ar_status ari_config_minimax_m2(ar_config *c, const ari_json_at *at);

/* --- keys that nobody asks for ------------------------------------------------------------------------------------ */
/** The refusal of one key. */
ar_status ari_config_refuse_key(const ari_json_at *at, const char *key, const char *wanted);
/** Notes in c->unknown every key of the object that is set and neither known nor among keys[n]. group: the object's
 *  own key, where only keys[n] are known; "": the file itself. */
/** Notes a key that the model is made without; group: of which object it is, or "". */
void ari_config_note(ar_config *c, const char *group, const char *key);
void ari_config_note_others(ar_config *c, const char *group, const json_t *object, const char *const *keys, size_t n);
