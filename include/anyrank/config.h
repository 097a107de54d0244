/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CONFIG_H
#define ANYRANK_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/batch.h"
#include "anyrank/rope.h"
#include "anyrank/status.h"

AR_BEGIN_DECLS

typedef enum ar_arch {
    AR_ARCH_LLAMA,      /* LlamaForCausalLM and those of the same form and names */
    AR_ARCH_GPT2,       /* GPT2LMHeadModel */
    AR_ARCH_STACK,      /* the project's own: embedding, pre-LayerNorm blocks, loss = sum of the output */
    AR_ARCH_QWEN3,      /* Qwen3ForCausalLM: Llama's names, and norms of queries and keys */
    AR_ARCH_OLMO2,      /* Olmo2, Gemma2, Gemma3ForCausalLM: the same with norms after attention and MLP */
    AR_ARCH_PHI3,       /* Phi3ForCausalLM: of Llama's form, q | k | v and gate | up packed */
    AR_ARCH_MIXTRAL,    /* MixtralForCausalLM: Llama's form and names but for the experts in the MLP's place */
    AR_ARCH_QWEN2_MOE,  /* Qwen2MoeForCausalLM: the same by other names, a shared expert, some layers without experts */
    AR_ARCH_QWEN3_MOE,  /* Qwen3MoeForCausalLM, OlmoeForCausalLM: the same with Qwen3's norms, no shared expert */
    AR_ARCH_GLM4_MOE,   /* Glm4Moe, Dots1ForCausalLM: the same, routed by sigmoids, a shared expert without a gate */
    AR_ARCH_STARCODER2, /* Starcoder2ForCausalLM: Llama's names and GPT-2's form, with rotary positions */
    AR_ARCH_DEEPSEEK,   /* DeepseekV2, DeepseekV3ForCausalLM: GLM4_MOE's form with latent attention */
    AR_ARCH_GLM4,       /* Glm4ForCausalLM: Gemma2's form by other names, gate | up packed */
    AR_ARCH_GPT_OSS,    /* GptOssForCausalLM: Mixtral's form with biases and sinks */
    AR_ARCH_GPT_NEOX    /* GPTNeoXForCausalLM: GPT-2's form with RoPE, attention and MLP beside each other */
} ar_arch;
typedef enum ar_activation {
    AR_ACT_GELU_ERF,
    AR_ACT_GELU_TANH,
    AR_ACT_SILU,
    AR_ACT_RELU,
    AR_ACT_NONE,
    AR_ACT_CLAMPED /* of a gate alone (GPT-OSS): g*sigmoid(1.702*g), g = min(gate, 7), times 1 + up limited to +-7 */
} ar_activation;
typedef enum ar_norm_kind { AR_NORM_LAYER, AR_NORM_RMS } ar_norm_kind;
/* Norms of a block's attention and MLP: on their input, on what they add to the residual, or on both. */
typedef enum ar_norm_place { AR_NORM_BEFORE, AR_NORM_AFTER, AR_NORM_AROUND } ar_norm_place;
/* What a block's MLP works on: the sum of residual and attention; the block's input, as attention does (the parallel
 * residual of GPT-J and GPT-NeoX); or the same, by one norm for both, the attention's. */
typedef enum ar_residual { AR_RESIDUAL_IN_TURN, AR_RESIDUAL_PARALLEL, AR_RESIDUAL_PARALLEL_ONE_NORM } ar_residual;
/* A norm of queries and one of keys, before they are rotated: of each head's d features, or of all heads' together. */
typedef enum ar_qk_norm { AR_QK_NORM_NONE, AR_QK_NORM_HEAD, AR_QK_NORM_WIDTH } ar_qk_norm;

/* Layers of a model that can each say whether its attention has a window and rotary positions, and whether it has
 * experts; the ones after them do as the last. */
#define AR_CONFIG_LAYER_BITS 1024
/* Keys of a file that are not known, by name; how long a kept name is at most, with its end. */
#define AR_CONFIG_NOTES 8
#define AR_CONFIG_NOTE 48

/* A router whose scores are sigmoids of its logits, and which a bias of its own helps to choose (DeepSeek-V3): of
 * `groups` groups of consecutive experts the `kept` best stay, and of their experts it takes the best; the weights are
 * times `scale`. */
typedef struct ar_route_scores {
    size_t groups, kept; /* 0: scores are a softmax, and there is no bias; 1, 1: no groups. At most AR_ROUTE_GROUPS */
    double scale;
    bool softmax; /* scores are a softmax, there is no bias, and a group's score is its largest one (DeepSeek-V2) */
} ar_route_scores;
#define AR_ROUTE_GROUPS 64

/* Experts in place of a layer's MLP: a router chooses some of them for each token. */
typedef struct ar_experts {
    size_t n;         /* E, that the router scores; 0: every layer has an MLP */
    size_t per_token; /* k, at most E: experts that a token goes to */
    size_t ffn;       /* width of each, gate, up and down */
    size_t shared;    /* width of one more that every token goes to, weighted by a sigmoid gate of its own; 0: none */
    bool ungated;     /* that one has no such gate */
    bool normalised;  /* the weights of a token's experts are divided by their sum */
    bool bias;        /* of the router, gate, up and down */
    ar_route_scores scores;
    double balance_weight; /* of AR_BALANCE_LAYERS, which the file asks for (output_router_logits); 0: it does not */
    bool w123;             /* Mixtral's names: block_sparse_moe.experts.N.w1 (gate), w3 (up) and w2 (down) */
} ar_experts;

/* Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys without positions and values are made of one
 * low-rank projection, normalised, and the features of a key that turn are the same for all heads. */
typedef struct ar_latent {
    size_t kv_rank;  /* 0: an attention without it */
    size_t q_rank;   /* of the queries' own low-rank projection; 0: they are made of the input */
    size_t rope_dim; /* the last features of queries and keys, which turn; even, less than head_dim */
    size_t value_dim;
} ar_latent;
#define AR_LATENT_EPS 1e-6 /* of its norms, whatever the model's others have (transformers) */

/** A model's shape and mathematics, parsed from a Hugging Face config.json. Plain data. */
typedef struct ar_config {
    ar_arch arch;
    char name[64];        /* folder or bundled name, for reports */
    size_t vocab;         /* V */
    size_t hidden;        /* h */
    size_t layers;        /* L */
    size_t heads;         /* query heads */
    size_t kv_heads;      /* divides heads */
    size_t head_dim;      /* d; q has heads*d features */
    size_t ffn;           /* width of the MLP */
    size_t max_positions; /* longest sequence; rows of the learned positions */
    ar_activation activation;
    bool gated; /* silu(gate)*up in place of act(fc1) */
    ar_norm_kind norm;
    double norm_eps;
    ar_rope rope;       /* rotary positions; AR_ROPE_NONE: the model has none */
    ar_rope local_rope; /* of the layers with a window, where they have their own; AR_ROPE_NONE: `rope` */
    uint64_t unturned[AR_CONFIG_LAYER_BITS / 64]; /* bit 1: a layer without rotary positions, whatever `rope` is */
    ar_norm_place norm_place;
    bool norm_plus_one; /* a norm's gain is 1 + its weight */
    bool norm_no_bias;  /* LayerNorm has no offset */
    ar_residual residual;
    ar_qk_norm qk_norm;
    ar_latent latent;
    bool learned_positions; /* wpe [max_positions, hidden] */
    bool qkv_bias, out_bias, mlp_bias;
    bool final_norm;
    bool tied; /* the LM head is the embedding */
    bool causal;
    size_t window; /* sliding window of the layers that have one: ar_config_window. 0: no layer has */
    uint64_t full_attention[AR_CONFIG_LAYER_BITS / 64]; /* bit 1: a layer without window, whatever `window` is */
    double query_scalar;                                /* scores are divided by its root; 0: head_dim */
    bool sinks;          /* each head has one more logit, in the softmax's denominator alone */
    double score_cap;    /* scores become cap * tanh(score / cap) before masks and softmax; 0: they stay */
    double logit_cap;    /* logits likewise */
    double embed_scale;  /* rows of the embedding are multiplied by it, rounded to fp32; 0: they are not */
    double branch_scale; /* what attention and MLP add to the residual, likewise */
    double logit_scale;  /* and the logits */
    bool pads;           /* uses of pad_id are no part of the embedding's gradient */
    size_t pad_id;
    ar_experts experts;
    uint64_t dense[AR_CONFIG_LAYER_BITS / 64]; /* bit 1: a layer with an MLP, whatever `experts` has */
    size_t mtp;        /* D: blocks after the last layer that each predict a token further on (models.md); 0: none */
    double mtp_weight; /* of the mean of their losses */
    size_t mtp_unused; /* such blocks that the file names without a weight, as those that transformers leaves out */
    double initializer_range;
    bool within;        /* the file describes more, of which this is key 'text_config' */
    char quantized[24]; /* quant_method of weights stored in few bits, read of GPT-OSS in mxfp4 alone; "": none are */
    double config_dropout;                         /* largest dropout probability in the file: ignored, with a note */
    size_t unknown_keys;                           /* of the file, all of them: ignored, with a note */
    char unknown[AR_CONFIG_NOTES][AR_CONFIG_NOTE]; /* the first of them; printable, a long one ends in ".." */
    char changed[400];                             /* what is otherwise than in the file, a sentence; "": nothing */
} ar_config;

/** Number of blocks, those for further tokens after the layers. */
static inline size_t ar_config_blocks(const ar_config *c)
{
    return c->layers + c->mtp;
}

/** A layer's bit. A block for further tokens is as the last layer. */
static inline bool ar_config_bit(const ar_config *c, const uint64_t *bits, size_t layer)
{
    const size_t at = layer < c->layers || c->mtp == 0 ? layer : c->layers - 1;
    const size_t bit = at < AR_CONFIG_LAYER_BITS ? at : AR_CONFIG_LAYER_BITS - 1;
    return (bits[bit / 64] >> (bit % 64) & 1) != 0;
}

/** True if a router and experts stand in the place of this layer's MLP. */
static inline bool ar_config_has_experts(const ar_config *c, size_t layer)
{
    return c->experts.n > 0 && !ar_config_bit(c, c->dense, layer);
}

/** True if they have a bias by which they choose. */
static inline bool ar_config_router_bias(const ar_config *c)
{
    return c->experts.scores.groups > 0 && !c->experts.scores.softmax;
}

/** What the routers of a model balance: as the options say, else as its file does; nothing without experts. */
static inline ar_balance ar_config_balance(const ar_config *c, const ar_loss_options *o)
{
    const bool of_file = o->router.balance == AR_BALANCE_NONE && c->experts.balance_weight > 0.0;
    return c->experts.n == 0 ? AR_BALANCE_NONE : of_file ? AR_BALANCE_LAYERS : o->router.balance;
}

/** True if its routers have losses of their own. */
static inline bool ar_config_router_losses(const ar_config *c, const ar_loss_options *o)
{
    return ar_config_balance(c, o) != AR_BALANCE_NONE || (c->experts.n > 0 && o->router.z_loss > 0.0);
}

/** Features of a value, of which a head makes its output. */
static inline size_t ar_config_value_dim(const ar_config *c)
{
    return c->latent.kv_rank > 0 ? c->latent.value_dim : c->head_dim;
}

/** Largest number of keys that a query of this layer sees, its own and those before it: key j of query i is masked
 *  where j + window <= i. 0: all. */
static inline size_t ar_config_window(const ar_config *c, size_t layer)
{
    return ar_config_bit(c, c->full_attention, layer) ? 0 : c->window;
}

/** True if a layer has rotary positions; and those that it has. Borrows c. */
static inline bool ar_config_turns(const ar_config *c, size_t layer)
{
    return c->rope.kind != AR_ROPE_NONE && !ar_config_bit(c, c->unturned, layer);
}
static inline const ar_rope *ar_config_layer_rope(const ar_config *c, size_t layer)
{
    return c->local_rope.kind != AR_ROPE_NONE && ar_config_window(c, layer) > 0 ? &c->local_rope : &c->rope;
}

/** True if a block's attention and MLP have norms on their input. */
static inline bool ar_config_norm_before(const ar_config *c)
{
    return c->norm_place != AR_NORM_AFTER;
}

/** Reads MODEL/config.json, or MODEL itself if it is a .json file. model_type decides the architecture; models.md
 *  lists them and their keys. The sizes must be in the file; everything else that Hugging Face leaves out has its
 *  default. A key that is not known is ignored and named in c->unknown. Errors: AR_ERR_IO, AR_ERR_FORMAT (not JSON:
 *  line and column), AR_ERR_CONFIG (unknown model_type, a missing or ill-typed key, a value that changes the
 *  mathematics and is not supported, heads that do not divide; the message names the key), AR_ERR_OVERFLOW (more JSON
 *  than any config). On error *c is untouched. */
AR_NODISCARD ar_status ar_config_load(ar_config *c, const char *path);
/** The same from JSON text. `name` is for messages. */
AR_NODISCARD ar_status ar_config_parse(ar_config *c, const char *json, size_t length, const char *name);

/** Resolves MODEL: an existing folder or file as it is, else a bundled name (models.md) in the data directory
 *  (ari_data_dir). Writes the path to out[cap]. AR_ERR_NOT_FOUND lists the bundled names and the nearest one. */
AR_NODISCARD ar_status ar_model_path(char *out, size_t cap, const char *model);

/* --- parameters by Hugging Face name ------------------------------------------------------------------------------ */
typedef enum ar_init_scheme {
    AR_INIT_XAVIER_NORMAL,   /* normal, std sqrt(2/(fan_in+fan_out)) */
    AR_INIT_KAIMING_UNIFORM, /* uniform +-1/sqrt(fan_in) (a = sqrt(5)) */
    AR_INIT_NORMAL,          /* normal, std initializer_range */
    AR_INIT_UNIFORM_BIAS,    /* uniform +-1/sqrt(fan_in) of the layer */
    AR_INIT_ZEROS,
    AR_INIT_ONES
} ar_init_scheme;

AR_END_DECLS
#endif
