/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Attention as a recipe: a number for each choice that a model makes between q, k and v and the output. */
#include "verify/diagnose/replay/replay.h"

enum { ARI_MOST_HEAD = 256 };

enum { ARI_NO_PAIRS, ARI_HALVES, ARI_NEIGHBOURS };
/* Packing of q, k and v in one tensor: one after the other; each KV head's own together; or that with q last. */
enum { ARI_STRAIGHT, ARI_BY_HEADS, ARI_KEYS_FIRST };
/* Order of heads: query heads dealt out to the KV heads in turn; features [d, heads] of the inputs, or of the output; q
 * and k exchanged; the heads of the output reversed, or [heads, seq, d] flattened. */
enum { ARI_AS_THEY_ARE, ARI_DEALT_OUT, ARI_FEATURES_FIRST, ARI_BY_LANE, ARI_EXCHANGED, ARI_REVERSED, ARI_FLATTENED };
/* Extent of RoPE: v as well, not all, backwards, or the last features instead of the first. */
enum { ARI_TURNS_BOTH, ARI_NOT_Q, ARI_NOT_K, ARI_NEITHER, ARI_V_TOO, ARI_BACKWARDS, ARI_THE_LAST };
/* The softmax runs over the keys or the queries; over all keys, and the unseen ones are dropped afterwards; or over
 * unseen keys too, whose score is 0, or that of a cap applied after the mask; or over the unseen keys alone. */
enum { ARI_OVER_KEYS, ARI_OVER_QUERIES, ARI_OVER_ALL, ARI_UNSEEN_AS_ZERO, ARI_UNSEEN_AS_CAP, ARI_UNSEEN_ALONE };
/* Documents that share a row: one; the reference's; the other's; or the reference's for the tokens of one part, whose
 * heads these are, applied to the tokens of all parts. */
enum { ARI_ONE_DOCUMENT, ARI_REFERENCES, ARI_OTHERS, ARI_OF_OWN_PART };
/* A fault over the places of a ring: the mask, the mask without its window, or RoPE taken as if the tokens lay in the
 * ring's order, or began in each place anew; the farthest place's keys unseen; all keys of other places seen, or no window applied to them; a
 * softmax for each place's keys, the results averaged or weighted by powers of 2; the own place's values for other
 * places' keys. */
enum {
    ARI_NO_RING,
    ARI_RING_MASKED,
    ARI_RING_CAUSAL,
    ARI_RING_STOPS,
    ARI_RING_TURNED,
    ARI_RING_RESTARTS,
    ARI_RING_OPEN,
    ARI_RING_WIDE,
    ARI_RING_APART,
    ARI_RING_BASE_TWO,
    ARI_RING_AT_HOME
};

typedef struct ari_recipe {
    double head, packing, heads; /* head: features of one */
    double pairs, turns, turned, theta, stretch, restart,
        shift;                                        /* turned: features, the first ones; stretch divides positions;
                                                              restart: tokens after which they start again; 0: never;
                                                              below: with each of the reference's documents; shift: of
                                                              q's positions alone */
    double scale, cap;                                /* scale: of 1/sqrt(head); cap tanh(score/cap), 0: none */
    double slope, series, plain, shards;              /* ALiBi: slope times those of a series for so many heads, plain:
                                                              one geometric series for any number of them; each shard of
                                                              heads begins with the first one's */
    double ahead, window, cut, from, hidden, padding; /* keys after the query that it sees, -1: not its own; that it
                                                              sees in all, 0: all; where a second document begins, 0:
                                                              none; keys from this one on, and last ones, that are
                                                              unseen */
    double softmax, ringed, ring;                     /* ring: places, negative: in a zigzag */
    double sinks, documents, parts, dealt; /* sinks: each head has a score more; parts: of own documents; dealt: heads
                                                              of the output from so many parts in turn */
    double times;                          /* of what a head gives */
} ari_recipe;

typedef struct ari_replayed {
    ari_probe p;
    size_t out;           /* of a token: q, or, where the probe is of scores, [heads][keys] */
    float *x[3];          /* of the sample, [seq][width]: q, k, v, or what holds several */
    size_t width[3];      /* of those */
    size_t in[3];         /* which of x holds q, k, v */
    size_t q, kv;         /* features of q, of k */
    size_t keys, longest; /* keys, which another sequence may give; tokens of the longer of the two at most */
    float *sink;          /* a score of each head that has no value; NULL: none */
    size_t sinks;
    const float *given; /* weights [heads][seq][seq], whose logarithms replace the scores of q and k; NULL: none */
    double *k, *one, *weight, *context; /* [seq][head], [head], [seq], [tokens][out] */
    double *others;                     /* [tokens][out]: of all heads, for those before `first` and from `end` on */
    size_t first, end;                  /* the heads that follow a recipe; end 0: all */
    double *cosine, *sine;              /* [seq + 1][head / 2] of the recipe; the last row of the shift */
    double *column;                     /* [seq]: of each key, the logarithm of the sum over queries */
    double *place, *order, *back;       /* [seq]: in the ring; in its order; which token has a place in its order */
    double *own, *document[2];          /* [seq]: document of a head's tokens; of the reference's, of the other's */
    size_t taken;                       /* the KV head that k is of */
} ari_replayed;

/** For the sample of a->p. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_recipe_init(ari_replayed *a);
/** Puts the outputs of the probe's tokens. */
void ari_recipe_replay(ari_replayed *a, const ari_recipe *r);
/** From here on, heads outside first..end - 1 follow this recipe whatever is replayed; end 0: none. */
void ari_recipe_fix_others(ari_replayed *a, const ari_recipe *r, size_t first, size_t end);
/** Puts what a head takes from one key as the probe's first output; returns its weight. */
double ari_recipe_share(ari_replayed *a, const ari_recipe *r, size_t head, size_t query, size_t key);
/** Looks for weights of keys that dropout made 0 and larger, where the base alone is known. */
void ari_recipe_find_dropout(ari_trace *t, ari_replayed *a, const ari_recipe *base);
