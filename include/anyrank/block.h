/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_BLOCK_H
#define ANYRANK_BLOCK_H

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The kinds of a transformer block's parts, as config.json and layers name them, and how parameters begin. */

/* Activation function of an MLP: a constant of anyrank/activation.h. */
typedef unsigned ar_activation;
#define AR_ACT_NONE 4u /* the identity */

typedef enum ar_norm_kind { AR_NORM_LAYER, AR_NORM_RMS } ar_norm_kind; /* LayerNorm or RMSNorm */
/* Which side of a block's attention and MLP is normalised: inputs (pre-norm), outputs before the residual, or both. */
typedef enum ar_norm_place { AR_NORM_BEFORE, AR_NORM_AFTER, AR_NORM_AROUND } ar_norm_place;
/* The input of a block's MLP branch. IN_TURN: residual plus attention output (sequential). PARALLEL: the block's input,
 * as for attention, but with a separate norm (GPT-NeoX). PARALLEL_ONE_NORM: attention's normalised input (GPT-J). */
typedef enum ar_residual { AR_RESIDUAL_IN_TURN, AR_RESIDUAL_PARALLEL, AR_RESIDUAL_PARALLEL_ONE_NORM } ar_residual;
/* Norms of queries and keys before RoPE: over the d features of each head, or over all heads' features together. */
typedef enum ar_qk_norm { AR_QK_NORM_NONE, AR_QK_NORM_HEAD, AR_QK_NORM_WIDTH } ar_qk_norm;

/* How a mixture-of-experts router scores and chooses experts. With groups > 0 it chooses the `kept` best of `groups`
 * groups of consecutive experts, then the best experts within these, and multiplies their weights by `scale`. Scores
 * are then sigmoids of the logits, plus a bias per expert for the choice alone (DeepSeek-V3), unless softmax. */
typedef struct ar_route_scores {
    size_t groups, kept; /* 1, 1: one group; 0: softmax scores without bias or groups. At most AR_ROUTE_GROUPS */
    double scale;        /* factor of the weights */
    bool softmax;        /* softmax scores without bias; a group's score is that of its best expert (DeepSeek-V2) */
} ar_route_scores;
#define AR_ROUTE_GROUPS 64

/* Multi-head latent attention (MLA: DeepSeek-V2, arXiv:2405.04434, section 2.1): values and the non-rotary features of
 * keys are computed from one normalised low-rank projection; all heads share the rotary features of a key. */
typedef struct ar_latent {
    size_t kv_rank;   /* rank of the projection of keys and values; 0: ordinary attention */
    size_t q_rank;    /* rank of the queries' low-rank projection; 0: queries are computed from the input directly */
    size_t rope_dim;  /* rotary features, the last ones of queries and keys; even, less than head_dim */
    size_t value_dim; /* features of a head's values */
} ar_latent;
#define AR_LATENT_EPS 1e-6 /* eps of latent attention's norms, whatever norm_eps is, as in transformers */

/* --- initialisation of parameters --------------------------------------------------------------------------------- */
/* Distribution of a fresh parameter's values. fan_in and fan_out are those of the full weight matrix. */
typedef enum ar_init_scheme {
    AR_INIT_XAVIER_NORMAL,   /* normal, std sqrt(2/(fan_in+fan_out)) */
    AR_INIT_KAIMING_UNIFORM, /* uniform in +-1/sqrt(fan_in), as nn.Linear's weight */
    AR_INIT_NORMAL,          /* normal, std initializer_range */
    AR_INIT_UNIFORM_BIAS,    /* uniform in +-1/sqrt(fan_in of the layer's weight), as nn.Linear's bias */
    AR_INIT_ZEROS,
    AR_INIT_ONES
} ar_init_scheme;

AR_END_DECLS
#endif
