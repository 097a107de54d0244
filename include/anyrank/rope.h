/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ROPE_H
#define ANYRANK_ROPE_H

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/** The rule that derives a rotation's frequencies from theta: transformers' rope_type. models.md has the formulas,
 *  numerics.md, section 4, their roundings. */
typedef enum ar_rope_kind {
    AR_ROPE_NONE, /* nothing turns */
    AR_ROPE_DEFAULT,
    AR_ROPE_LINEAR,
    AR_ROPE_DYNAMIC, /* theta grows with a sequence that is longer than original_positions */
    AR_ROPE_YARN,    /* Peng et al. 2023, arXiv:2309.00071 */
    AR_ROPE_LLAMA3,
    AR_ROPE_LONGROPE /* Ding et al. 2024, arXiv:2402.13753: a factor for each pair, by the sequence's length */
} ar_rope_kind;

/* Pairs of features that a list of factors has at most. */
#define AR_ROPE_PAIRS 128

/** Rotary positions of a layer. Plain data; members that the kind does not use are not
 *  looked at. */
typedef struct ar_rope {
    ar_rope_kind kind;
    size_t rotary_dim; /* the first features of a head, which turn; the others pass. Even. 0: all turn */
    bool last;         /* it is the last ones that turn */
    bool interleaved;  /* pairs are features 0 and 1, 2 and 3, ..; else the i-th of both halves */
    double theta;
    double factor;                            /* all but default */
    double low_freq_factor, high_freq_factor; /* llama3 */
    double beta_fast, beta_slow;              /* yarn: turns within original_positions */
    bool truncate;                            /* yarn: the blended pairs begin and end at whole ones */
    double mscale, mscale_all_dim;            /* yarn: of the attention factor; one is 0: not given */
    double attention_factor;                  /* yarn, longrope: cosines and sines are multiplied by it. 0: it follows
                                                 from `factor` */
    size_t original_positions;                /* that the model was first trained on: dynamic, yarn, llama3, longrope */
    float short_factor[AR_ROPE_PAIRS];        /* longrope: of sequences up to original_positions */
    float long_factor[AR_ROPE_PAIRS];         /* longrope: of longer ones */
} ar_rope;

/** The features of a head that turn. */
static inline size_t ar_rope_dim(const ar_rope *r, size_t head_dim)
{
    return r->rotary_dim > 0 ? r->rotary_dim : head_dim;
}

AR_END_DECLS
#endif
