/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_LOGPROBS_H
#define ANYRANK_LOGPROBS_H

#include "anyrank/run.h"
#include "anyrank/sensitivity.h"

AR_BEGIN_DECLS

/* Log-probabilities of given tokens, and whose of two programs (a trainer's, a rollout engine's) are not the model's.
 *
 * Of a sequence x_0 .. x_(n-1) with logits z_t behind token t: logprob_t = fl32(z_(t-1)[x_t] - lse(z_(t-1))), t >= 1,
 * with lse as in the cross-entropy (numerics.md, section 4), and the entropy of place t is that of softmax(z_(t-1)),
 * natural logarithms. Each sequence is computed at its own length, so that neither the batch that it stands in, nor
 * padding, packing or the layout changes a bit in exact numerics, and none in binary64, which rounds to fp32
 * nowhere. */

enum { AR_LOGPROBS_TRAINER, AR_LOGPROBS_ROLLOUT, AR_LOGPROBS_SIDES };
extern const char *const ar_logprobs_side_name[AR_LOGPROBS_SIDES]; /* "trainer", "rollout" */

typedef struct ar_logprobs_options {
    ar_run run;        /* model. batch, seq, steps, clip and dropout are 0; storage fp32, ranks that are threads */
    const char *input; /* tokens: .safetensors as ar_grads reads them, or JSON or JSON Lines as `side`. NULL: those of
                          the first side */
    const char *side[AR_LOGPROBS_SIDES]; /* JSON or JSON Lines with tokens and log-probabilities; NULL: none */
    const char *other;                   /* another model folder, whose weights may be what a side used; NULL */
    const char *out;                     /* JSON Lines, a line for each sequence; NULL: none */
    size_t top;                          /* entries of the largest probabilities in `out`, for each place */
    ar_sensitivity of;                   /* in which arithmetic the sides compute */
    bool binary64; /* the baseline's numbers in AR_MODE_F64: one rank of the CPU, exact numerics, precision f32 */
    double within; /* what a side may be off; 0: what rounding makes in `of`, by runs of the baseline */
    void (*progress)(void *user, double fraction, const char *what); /* NULL: nobody listens */
    void *progress_user;
} ar_logprobs_options;

/* One place of a sequence where a side gives another number. */
typedef struct ar_logprobs_place {
    size_t sequence, at; /* in the order of the input, from 0 */
    int64_t token;
    double given, reference;
} ar_logprobs_place;

enum { AR_LOGPROBS_WORST = 5 };
typedef struct ar_logprobs_side {
    size_t tokens;           /* that it gives a number for; 0: there is no such side */
    bool off;                /* more than rounding */
    double rms, mean, worst; /* of given - reference; the largest magnitude */
    double share_off;        /* of its tokens: further off than rounding makes any */
    size_t places;           /* in `place`: the most different, the largest first */
    ar_logprobs_place place[AR_LOGPROBS_WORST];
    const char *cause; /* identifier (causes.md), "temperature"; "unknown"; NULL: nothing to explain. Static storage */
    const char *look_at; /* static storage; NULL */
    char says[256];      /* a sentence */
    double explained;    /* share of the squares of the differences */
} ar_logprobs_side;

typedef struct ar_logprobs_result {
    ar_config config;
    bool fresh;               /* the folder has no weights: they were drawn by the seed */
    size_t sequences, tokens; /* tokens: those with a log-probability */
    double mean, entropy;     /* over all of them; natural logarithms */
    char hash[65];            /* of all sequences' log-probabilities, in whatever order they are given */
    double seconds;
    double rounding_rms, rounding_worst; /* what rounding makes in `of`; 0: it was not asked for */
    ar_logprobs_side side[AR_LOGPROBS_SIDES];
} ar_logprobs_result;

/** Errors: everything wrong with the inputs, by file and sequence; those of ar_run_check, for the length that has them.
 *  A file that could not be written whole does not appear. */
AR_NODISCARD ar_status ar_logprobs(ar_logprobs_result *result, const ar_logprobs_options *o);

AR_END_DECLS
#endif
