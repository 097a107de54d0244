/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CONFIG_H
#define ANYRANK_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/arch.h"
#include "anyrank/batch.h"
#include "anyrank/block.h"
#include "anyrank/rope.h"
#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Of sequences up to this length attention's probabilities are reported one by one; of longer ones, whose pairs of tokens
 * would fill the memory, two numbers of each row tell whether any bit of it differs. */
#define AR_SCORES_WHOLE 2048

/* Length of ar_config's per-layer bit sets (window, rotary positions, experts); layers beyond it use the last bit. */
#define AR_CONFIG_LAYER_BITS 1024
/* ar_config.unknown: most unknown keys of a config.json that are kept by name, and bytes of each with its final 0. */
#define AR_CONFIG_NOTES 8
#define AR_CONFIG_NOTE 48

/* Mixture of experts (MoE) instead of a layer's MLP: a router chooses k of E experts for each token. */
typedef struct ar_experts {
    size_t n;         /* E, the number of routed experts; 0: every layer has an MLP */
    size_t per_token; /* k, experts of each token; at most E */
    size_t ffn;       /* intermediate width of each expert */
    size_t shared;    /* width of the shared expert, which every token uses, weighted by a sigmoid gate; 0: none */
    bool ungated;     /* the shared expert has no gate */
    bool normalised;  /* the weights of a token's k experts are divided by their sum */
    bool bias;        /* router and the experts' gate, up and down projections have biases */
    ar_route_scores scores; /* how the router scores */
    double balance_weight;  /* weight of the loss AR_BALANCE_LAYERS if the file sets output_router_logits; 0: no loss */
    bool w123;              /* Mixtral's names: block_sparse_moe.experts.N.w1 (gate), w3 (up) and w2 (down) */
} ar_experts;

/** A model's architecture and sizes, parsed from a Hugging Face config.json. Plain data. */
struct ar_config {
    ar_arch arch;
    char name[64];        /* of the folder or bundled model, for reports */
    size_t vocab;         /* V */
    size_t hidden;        /* h */
    size_t layers;        /* L */
    size_t heads;         /* query heads */
    size_t kv_heads;      /* key/value heads; divides heads */
    size_t head_dim;      /* d; q has heads*d features */
    size_t ffn;           /* width of the MLP */
    size_t max_positions; /* longest sequence; rows of the learned positions */
    ar_activation activation;
    bool gated; /* the MLP is act(gate)*up instead of act(fc1) */
    ar_norm_kind norm;
    double norm_eps;
    ar_rope rope;       /* rotary positions; AR_ROPE_NONE: the model has none */
    ar_rope local_rope; /* of layers with a sliding window; AR_ROPE_NONE: they use `rope` too */
    uint64_t unturned[AR_CONFIG_LAYER_BITS / 64]; /* bit per layer; 1: the layer has no rotary positions (NoPE) */
    ar_norm_place norm_place;
    bool norm_plus_one; /* a norm's gain is 1 + its weight */
    bool norm_no_bias;  /* LayerNorm without bias */
    ar_residual residual;
    ar_qk_norm qk_norm;
    ar_latent latent;
    bool learned_positions;            /* learned position embeddings [max_positions, hidden] */
    bool qkv_bias, out_bias, mlp_bias; /* projections that have biases */
    bool final_norm;                   /* a norm before the LM head */
    bool tied;                         /* the LM head's weight is the token embedding */
    bool causal;                       /* causal attention */
    size_t window;                     /* length of the sliding window (ar_config_window); 0: no layer has one */
    uint64_t full_attention[AR_CONFIG_LAYER_BITS / 64]; /* bit per layer; 1: the layer has no sliding window */
    double query_scalar;                                /* scores are divided by its square root; 0: head_dim */
    bool sinks;          /* attention sinks: a learned logit per head, added to the softmax's denominator only */
    double score_cap;    /* attention scores become cap*tanh(score/cap) before mask and softmax; 0: no cap */
    double logit_cap;    /* logits become cap*tanh(logit/cap); 0: no cap */
    double embed_scale;  /* factor of the token embeddings, rounded to fp32; 0: none */
    double branch_scale; /* factor of attention's and the MLP's outputs before the residual addition; 0: none */
    double logit_scale;  /* factor of the logits; 0: none */
    bool pads;           /* the embedding's row pad_id gets no gradient (padding_idx of nn.Embedding) */
    size_t pad_id;       /* token id of padding, if pads */
    ar_experts experts;  /* mixture of experts, if any */
    uint64_t dense[AR_CONFIG_LAYER_BITS / 64]; /* bit per layer; 1: the layer has an MLP instead of experts */
    size_t mtp;        /* multi-token prediction: extra blocks after the layers, each for one more token (models.md) */
    double mtp_weight; /* factor of the mean of the mtp losses */
    size_t mtp_unused; /* mtp blocks that config.json names but that are not built, as in transformers */
    double initializer_range; /* standard deviation of fresh normal weights */
    bool within;              /* read from key 'text_config' of a multimodal model's config.json */
    char quantized[24];    /* quant_method of quantised weights (only GPT-OSS's mxfp4 can be read); "": not quantised */
    double config_dropout; /* largest dropout probability in the file; not applied */
    size_t unknown_keys;   /* number of unknown keys in the file; they are ignored */
    char unknown[AR_CONFIG_NOTES][AR_CONFIG_NOTE]; /* the first unknown keys; printable; a truncated one ends in ".." */
    char changed[400];                             /* a sentence on deviations from the file (ar_run.shrink); "":
                                                      none */
};

/** Returns the number of transformer blocks: the layers, then the blocks of multi-token prediction. */
static inline size_t ar_config_blocks(const ar_config *c)
{
    return c->layers + c->mtp;
}

/** Returns a layer's bit in one of the per-layer bit sets. Multi-token-prediction blocks have the last layer's bit. */
static inline bool ar_config_bit(const ar_config *c, const uint64_t *bits, size_t layer)
{
    const size_t own_layer = layer < c->layers || c->mtp == 0 ? layer : c->layers - 1;
    const size_t bit = own_layer < AR_CONFIG_LAYER_BITS ? own_layer : AR_CONFIG_LAYER_BITS - 1;
    return (bits[bit / 64] >> (bit % 64) & 1) != 0;
}

/** Returns true if this layer has a router and experts instead of an MLP. */
static inline bool ar_config_has_experts(const ar_config *c, size_t layer)
{
    return c->experts.n > 0 && !ar_config_bit(c, c->dense, layer);
}

/** Returns true if the routers add a bias per expert to their scores for the choice of experts. */
static inline bool ar_config_router_bias(const ar_config *c)
{
    return c->experts.scores.groups > 0 && !c->experts.scores.softmax;
}

/** Returns the balancing loss of a model's routers: that of the options if they have one, else that of its config.json;
 *  AR_BALANCE_NONE without experts. */
static inline ar_balance ar_config_balance(const ar_config *c, const ar_loss_options *o)
{
    const bool of_file = o->router.balance == AR_BALANCE_NONE && c->experts.balance_weight > 0.0;
    return c->experts.n == 0 ? AR_BALANCE_NONE : of_file ? AR_BALANCE_LAYERS : o->router.balance;
}

/** Returns true if the model's routers have an auxiliary loss: balancing or z-loss. */
static inline bool ar_config_router_losses(const ar_config *c, const ar_loss_options *o)
{
    return ar_config_balance(c, o) != AR_BALANCE_NONE || (c->experts.n > 0 && o->router.z_loss > 0.0);
}

/** Returns the number of features of a head's values. */
static inline size_t ar_config_value_dim(const ar_config *c)
{
    return c->latent.kv_rank > 0 ? c->latent.value_dim : c->head_dim;
}

/** Returns the layer's sliding window: query i does not attend to keys j with j + window <= i. 0: no window. */
static inline size_t ar_config_window(const ar_config *c, size_t layer)
{
    return ar_config_bit(c, c->full_attention, layer) ? 0 : c->window;
}

/** Returns true if a layer has rotary positions. */
static inline bool ar_config_turns(const ar_config *c, size_t layer)
{
    return c->rope.kind != AR_ROPE_NONE && !ar_config_bit(c, c->unturned, layer);
}
/** Returns a layer's RoPE options, a pointer into *c. */
static inline const ar_rope *ar_config_layer_rope(const ar_config *c, size_t layer)
{
    return c->local_rope.kind != AR_ROPE_NONE && ar_config_window(c, layer) > 0 ? &c->local_rope : &c->rope;
}

/** Returns true if a block normalises the inputs of attention and MLP. */
static inline bool ar_config_norm_before(const ar_config *c)
{
    return c->norm_place != AR_NORM_AFTER;
}

/** Reads `path`/config.json, or `path` itself if it is a .json file, into *c. The key model_type decides the
 *  architecture; models.md lists the supported ones and their keys. Sizes must be in the file; other missing keys take
 *  transformers' defaults. Unknown keys are ignored and listed in c->unknown. Errors: AR_ERR_IO, AR_ERR_FORMAT (not
 *  JSON: line and column), AR_ERR_CONFIG (unknown model_type, a missing or ill-typed key, a value that changes the
 *  mathematics and is not supported, heads that do not divide; the message names the key), AR_ERR_OVERFLOW (a file far
 *  larger than any config). On error *c is unchanged. */
AR_NODISCARD ar_status ar_config_load(ar_config *c, const char *path);
/** Parses a config as ar_config_load does, from JSON text of `length` bytes. `name` is used in error messages. */
AR_NODISCARD ar_status ar_config_parse(ar_config *c, const char *json, size_t length, const char *name);

/** Resolves a model's path: `model` itself if it is an existing folder or file, else the folder of the bundled model of
 *  that name (models.md) in the data directory ($ANYRANK_DATA, else the installed one). Writes the path to out, `cap`
 *  bytes. Errors: AR_ERR_NOT_FOUND (the message lists the bundled names and suggests the nearest). */
AR_NODISCARD ar_status ar_model_path(char *out, size_t cap, const char *model);

AR_END_DECLS
#endif
