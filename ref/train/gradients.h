/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/gradients.h"

struct ar_gradients {
    ar_ctx *ctx;       /* borrowed */
    ar_param **params; /* [n] parameters; borrowed */
    size_t n;
    ar_finding *finding; /* [findings] of the last verdict */
    size_t findings, capacity;
};

/* A rank's claims: a header, then a row for each parameter. They are exchanged as 64-bit words. */
typedef struct ari_claims_header {
    uint64_t rank;  /* the rank's number in the layout */
    uint64_t steps; /* the optimizer's step count; 0 without an optimizer */
} ari_claims_header;

/* Elements that a rank holds a copy of, with a hash of their values; place 0: none. */
typedef struct ari_copy {
    uint64_t place, hash;
} ari_copy;

enum { ARI_COPY_VALUE, ARI_COPY_GRADIENT, ARI_COPY_STATE, ARI_STATES = 4, ARI_COPIES = ARI_COPY_STATE + ARI_STATES };
/** The kinds of optimizer state, in the order of their copies. */
extern const char *const ari_state_name[ARI_STATES];

enum { ARI_CLAIM_HOLDS = 1, ARI_CLAIM_TRAINABLE = 2, ARI_CLAIM_GRADIENT = 4, ARI_CLAIM_NONZERO = 8 };
typedef struct ari_claim {
    uint64_t name;      /* hash */
    uint64_t flags;     /* ARI_CLAIM_HOLDS: an element at least */
    uint64_t bad;       /* number of gradient elements that are not finite */
    uint64_t first_bad; /* bit pattern of the first of them */
    ari_copy copy[ARI_COPIES];
} ari_claim;

/* All claims of some ranks: [ranks] a header and [n] rows each, one rank after the other. */
typedef struct ari_claims {
    uint64_t *words;
    size_t ranks, n, row_words; /* row_words: words in one rank's row */
    ar_param **params;          /* [n] the parameters that the rows describe */
} ari_claims;

/* The claims to judge. Without a pipeline the last two are empty. */
typedef struct ari_all_claims {
    ari_claims stages;       /* claims about all parameters by the ranks with this rank's stages */
    ari_claims tied_weights; /* claims about the tied weights by those ranks and by the ranks at the other end of the
                                pipeline */
    ari_claims heads;        /* of all ranks of the pipeline, only headers */
} ari_all_claims;

static inline const ari_claims_header *ari_claims_header_of(const ari_claims *t, size_t rank)
{
    return (const ari_claims_header *)(t->words + rank * t->row_words);
}
/** Claim of rank `rank` about parameter i. */
static inline const ari_claim *ari_claim_of(const ari_claims *t, size_t rank, size_t i)
{
    return (const ari_claim *)(ari_claims_header_of(t, rank) + 1) + i;
}
