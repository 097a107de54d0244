/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ROPE_H
#define ANYRANK_ROPE_H

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/** How the frequencies of rotary position embeddings (RoPE) are computed from theta: transformers' rope_type. models.md
 *  has the formulas, numerics.md, section 4, their roundings. */
typedef enum ar_rope_kind {
    AR_ROPE_NONE, /* no rotary positions */
    AR_ROPE_DEFAULT,
    AR_ROPE_LINEAR,  /* positions are divided by `factor` */
    AR_ROPE_DYNAMIC, /* dynamic NTK: theta grows with the length of sequences longer than original_positions */
    AR_ROPE_YARN,    /* Peng et al. 2023, arXiv:2309.00071 */
    AR_ROPE_LLAMA3,
    AR_ROPE_LONGROPE /* Ding et al. 2024, arXiv:2402.13753: a factor for each pair, chosen by the sequence's length */
} ar_rope_kind;

/* Longest list of LongRoPE factors: one for each rotated pair of features. */
#define AR_ROPE_PAIRS 128

/** Options of a layer's rotary position embedding (RoPE). Plain data; fields that the kind does not use are ignored. */
typedef struct ar_rope {
    ar_rope_kind kind; /* how frequencies are computed */
    size_t rotary_dim; /* rotated features of a head, the first ones unless `last`; even; 0: all of them */
    bool last;         /* the last rotary_dim features are rotated instead of the first */
    bool interleaved;  /* feature 2i is paired with 2i+1; false: i with rotary_dim/2 + i */
    double theta;      /* base of the frequencies */
    double factor;     /* scaling factor of all kinds but default */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn: rotations within original_positions that bound the blend */
    bool truncate;                            /* yarn: the blend's first and last pair are rounded to integers */
    double mscale, mscale_all_dim;            /* yarn: determine the attention factor if both are set; 0: not set */
    double attention_factor;                  /* yarn, longrope: factor of cosines and sines; 0: from `factor` */
    size_t original_positions;                /* context length of the pretraining: dynamic, yarn, llama3, longrope */
    float short_factor[AR_ROPE_PAIRS];        /* longrope: for sequences up to original_positions */
    float long_factor[AR_ROPE_PAIRS];         /* longrope: for longer sequences */
} ar_rope;

/** Returns how many of a head's head_dim features are rotated. */
static inline size_t ar_rope_dim(const ar_rope *r, size_t head_dim)
{
    return r->rotary_dim > 0 ? r->rotary_dim : head_dim;
}

AR_END_DECLS
#endif
