/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A router computed again: which experts a token has by scores, a bias and groups, and their weights. */
#include "verify/diagnose/replay/replay.h"

/* Where a token's k largest scores are taken from: of groups that stay, ranked by the sum of their two best scores.
 * What else a router may do: */
typedef struct ari_score_choice {
    size_t groups, kept; /* groups 1: of all experts */
    bool by_best;        /* groups are ranked by the best score alone */
    bool unbiased;       /* the bias is left out */
    bool dealt;          /* group i has experts i, i + groups, .. */
    bool zeros;          /* scores of groups that do not stay are 0 */
    bool softmax;        /* scores are those of a softmax */
    bool shifted;        /* the bias is added to the logits */
} ari_score_choice;

enum { ARI_MOST_SCORED = 1024, ARI_MOST_CHOSEN = 32 }; /* experts; of a token */

/* A dump's router as it is computed again: its choice, a function of the scores of those chosen, and a factor. */
enum {
    ARI_SHARES,
    ARI_SCORES,
    ARI_SHARES_OF_ALL,
    ARI_BIASED_SHARES,
    ARI_BIASED_SCORES,
    ARI_SOFT_AGAIN, /* a second softmax, of the scores: over the experts chosen, or over all */
    ARI_SOFT_OF_ALL,
    ARI_ONE_EACH,
    ARI_RAW_LOGITS,
    ARI_FUNCTIONS
};
typedef struct ari_reading {
    ari_score_choice by;
    size_t function;
    double factor;
} ari_reading;

/* What is to be read: experts [tokens][n], weights in the order of some choice [tokens][k], or both; NULL: not
 * known. */
typedef struct ari_reading_of {
    const uint8_t *experts;
    const float *weight;
} ari_reading_of;

/* The router of a case's layer. */
typedef struct ari_scored {
    size_t tokens, n, k;
    size_t samples;     /* of which these are the tokens */
    float *z;           /* logits [tokens][n], of both dumps */
    float *weight;      /* [tokens][k], where a dump has the weights of a token in the order of its choice; NULL */
    double *bias, *a;   /* [n]; a token's scores, and what it chooses by, [2][n] */
    uint8_t *chosen[2]; /* [tokens][n]: the reference's experts, if they are known; to work in */
    bool known;         /* they are */
    double unsure;      /* by which share of itself a weight may be off */
} ari_scored;

/** Reads what the reference has of its layer's router in this step: logits, or the input and the weight that they are
 *  computed from, the bias, and experts; *held: logits are known, and the same in the other dump. Errors: AR_ERR_MEMORY, those of
 *  reading. */
AR_NODISCARD ar_status ari_scored_read(ari_scored *s, bool *held, const ari_case *c);
/** The bias in this step's passes (0: no dump has it), in `bias` [n], and after its update, in `moved` [n] (NULL: not
 *  wanted); *held: the latter is known. Errors: those of reading. */
AR_NODISCARD ar_status ari_scored_bias(double *bias, double *moved, bool *held, const ari_case *c, size_t n);
/** A token's scores, a softmax of its n logits or a sigmoid of each. */
void ari_router_scores(double *p, const float *z, size_t n, bool softmax);
/** s->a: the scores of token t, and those by which it chooses before groups are masked. */
void ari_scored_score(ari_scored *s, size_t t, const ari_score_choice *by, const double *bias);
/** The experts of token t by a choice, in `chosen` [n]. bias NULL: s->bias. */
void ari_scored_choose(uint8_t *chosen, ari_scored *s, size_t t, const ari_score_choice *by, const double *bias);
/** Fills s->chosen[0] from the weights of the reference's own choice, if that is found. */
void ari_scored_find(ari_scored *s);
/** Finds what gives all that is wanted. like NULL: a reference. Else what is like it in one of choice and function,
 *  then in none. */
bool ari_scored_search(ari_reading *r, ari_scored *s, const ari_reading_of *of, const ari_reading *like);
/** Words for the function of a reading's weights. */
const char *ari_function_text(const ari_reading *r);
/** The fact `fact`: "2 of 4 groups, ranked by their best score". */
void ari_say_choice(ari_trace *t, const char *fact, const ari_score_choice *by);
