/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/* Role of a tensor's module in a model. Roles with parameters have a part in a family's table. The others are modules
 * and values that layers report or that other programs' dumps contain (models.md). */
typedef enum ari_role {
    ARI_NO_ROLE,
    /* Before the blocks. */
    ARI_TOKENS,
    ARI_POSITIONS,
    ARI_EMBEDDED, /* input of the first block */
    /* In a block. */
    /* Parts of a block for further tokens: rows of the embedding table, norms of these and of the input, and a matrix
     * that combines both. */
    ARI_MTP_TOKENS,
    ARI_TOKENS_NORM,
    ARI_ENTERED_NORM,
    ARI_JOINED,
    ARI_NORM1, /* norm before attention */
    /* Latent attention: to low ranks, norms, from low ranks to heads. */
    ARI_Q_A,
    ARI_KV_A,
    ARI_Q_A_NORM,
    ARI_Q_B,
    ARI_KV_A_NORM,
    ARI_KV_B,
    ARI_K_SHARED, /* gradient of the key features that all heads share */
    ARI_QKV,      /* q | k | v in one parameter */
    ARI_Q,
    ARI_Q_HEADS,
    ARI_K,
    ARI_K_HEADS,
    ARI_V,
    ARI_V_HEADS,
    ARI_SINKS, /* one logit per head, added to the softmax's denominator */
    ARI_Q_NORM,
    ARI_K_NORM,
    ARI_Q_ROPE,
    ARI_K_ROPE,
    ARI_PROBS,
    ARI_PROBS_DROPPED,
    ARI_PROBS_DIGESTS, /* digests of the probabilities' rows, and of both */
    ARI_DROPPED_DIGESTS,
    ARI_CONTEXT,
    ARI_OUT,
    ARI_OUT_DROPPED,
    ARI_ATTENTION,
    ARI_ATTENTION_NORM, /* norm of the attention's output before the residual is added */
    ARI_ATTENTION_SUM,  /* sum with the residual */
    ARI_NORM2,          /* norm before the MLP */
    ARI_FIRST,          /* first layer of an MLP that is not gated */
    ARI_FIRST_SUM,      /* x W^T + b, before the activation */
    ARI_GATE_UP,        /* gate | up in one parameter */
    ARI_GATE,
    ARI_GATE_SUM,
    ARI_UP,
    ARI_UP_SUM,
    ARI_ACTIVATION,
    ARI_DOWN, /* gated or not */
    ARI_MLP_DROPPED,
    /* Experts in place of an MLP. Each of an expert's three parts exists once per expert. */
    ARI_ROUTER,
    ARI_ROUTER_BIAS,   /* bias for choosing experts, without a gradient */
    ARI_CHOSEN,        /* numbers of the chosen experts */
    ARI_ROUTES,        /* the weights of a token's experts */
    ARI_ROUTER_LOGITS, /* the logits' gradient */
    ARI_EXPERT_GATE,
    ARI_EXPERT_UP,
    ARI_EXPERT_DOWN,
    ARI_EXPERTS, /* the sum over a token's experts */
    ARI_SHARED_GATE,
    ARI_SHARED_UP,
    ARI_SHARED_ACTIVATION,
    ARI_SHARED_DOWN,
    ARI_SHARED_EXPERT, /* the expert for all tokens */
    ARI_SHARED_SHARE,  /* gate of that expert's output */
    ARI_MLP,
    ARI_MLP_NORM, /* norm of the MLP's output before the residual is added */
    /* Parts of a block for further tokens: a norm of its output, the logits, and their gradient. */
    ARI_MTP_NORM,
    ARI_MTP_HEAD,
    ARI_MTP_LOGITS,
    ARI_LAYER,
    /* After the blocks. */
    ARI_FINAL_NORM,
    ARI_HEAD_LOGITS, /* gradient with which the head's backward pass begins */
    ARI_HEAD,
    ARI_LOGITS,
    ARI_LOSS,
    ARI_ROLES
} ari_role;

/** Returns true for a part that each expert has. */
static inline bool ari_is_expert_part(ari_role role)
{
    return role == ARI_EXPERT_GATE || role == ARI_EXPERT_UP || role == ARI_EXPERT_DOWN;
}

/** Returns true for a part that only a block for further tokens has. */
static inline bool ari_is_mtp_part(ari_role role)
{
    return (role >= ARI_MTP_TOKENS && role <= ARI_JOINED) || (role >= ARI_MTP_NORM && role <= ARI_MTP_LOGITS);
}

/** Returns the suffix of a parameter's name after its module's. */
static inline const char *ari_param_suffix(ari_role role, bool bias)
{
    return role == ARI_ROUTER_BIAS || role == ARI_SINKS ? "" : bias ? ".bias" : ".weight";
}

typedef enum ari_section { ARI_BEFORE_BLOCKS, ARI_IN_BLOCKS, ARI_AFTER_BLOCKS } ari_section;
static inline ari_section ari_section_of(ari_role role)
{
    return role <= ARI_EMBEDDED ? ARI_BEFORE_BLOCKS : role <= ARI_LAYER ? ARI_IN_BLOCKS : ARI_AFTER_BLOCKS;
}
