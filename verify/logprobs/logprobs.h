/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of ar_logprobs: sequences that are read, runs of the model on them, what a row of logits says, and why a
 * side's numbers differ. */
#pragma once

#include "anyrank/logprobs.h"
#include "ref/core/size.h"
#include "verify/run/run.h"

/* --- sequences (sequences.c, records.c) --------------------------------------------------------------------------- */

typedef struct ari_sequence {
    size_t n;        /* tokens, at least 1 */
    size_t prompt;   /* the first of them, which were given and not sampled; 0: not known */
    int64_t *tokens; /* [n] */
    double *given;   /* [n]: what a side says; NaN where it says nothing. NULL: it is a file of tokens */
} ari_sequence;

typedef struct ari_sequences {
    ari_sequence *list;
    size_t count, capacity;
    ari_arena arena; /* of their tokens and numbers */
} ari_sequences;

void ari_sequences_fini(ari_sequences *s);
/** Makes a sequence of n >= 1 tokens; `given` [n] NaN where it is asked for. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sequences_add(ari_sequence **borrows, ari_sequences *s, size_t n, bool given);
/** Reads a file: .safetensors (input_ids, with attention_mask or cu_seqlens, which are taken apart), or JSON or JSON
 *  Lines. given: it must have log-probabilities. Errors: those of the file, AR_ERR_DATA (an id that is no token of the
 *  model), AR_ERR_FORMAT, each with the sequence's number. */
AR_NODISCARD ar_status ari_sequences_read(ari_sequences *s, const ar_config *c, const char *path, bool given);
/** Adds the sequences of one JSON value: {"tokens", "logprobs"} and the names that others give these, a response of
 *  vLLM's or SGLang's server, or a list of such. where: for messages. Errors: AR_ERR_FORMAT. */
AR_NODISCARD ar_status ari_records_add(ari_sequences *s, const void *json, const char *where, bool given);

/* --- rows (row.c) ------------------------------------------------------------------------------------------------- */

/* What a row of logits says of one token. */
typedef struct ari_place {
    double logprob, entropy;
    double largest; /* the largest log-probability of the row */
    double lse;     /* what is taken from a logit */
} ari_place;

/** Of fp32 logits, as fp32 numbers. */
ari_place ari_place_of(const double *logits, size_t v, int64_t token);
/** In binary64 throughout, each sum from the first entry to the last. */
ari_place ari_place_of_f64(const double *logits, size_t v, int64_t token);

/* --- runs (forward.c) --------------------------------------------------------------------------------------------- */

/* How the sequences are laid into rows, and with which weights: as they are, or as a broken program would. */
typedef enum ari_lp_reading {
    ARI_ALONE,             /* each sequence at its own length */
    ARI_FROM_ONE,          /* positions count from 1 */
    ARI_RESPONSE_RESTARTS, /* positions of the response count from 0 */
    ARI_PADDED_POSITIONS,  /* positions count the padding in front, which is not attended to */
    ARI_PADDING_ATTENDED,  /* the padding in front is attended to */
    ARI_PACKED_TOGETHER,   /* all in one row, each attends to those before */
    ARI_PACKED_RESTARTS,   /* the same, positions restart */
    ARI_READINGS
} ari_lp_reading;

typedef struct ari_lp_model {
    ar_run run;
    const ar_config *config;
    ari_weights *weights, *other; /* NULL: fresh; none */
    const char *replaced;         /* the module whose weights are `other`'s; "": all; NULL: none */
    bool binary64;                /* by the baseline on one rank */
    double seconds;               /* of all runs so far */
} ari_lp_model;

/** Called for places 1 .. n-1 of each sequence: the logits [V] that predict the token there and what they say of it,
 *  borrowed. */
typedef ar_status (*ari_row_fn)(void *user, size_t sequence, size_t at, const double *logits, const ari_place *place);
/** Whether the model can read them so: positions enough, and memory. */
bool ari_lp_reading_fits(const ari_sequences *s, const ar_config *c, ari_lp_reading r);
/** Refuses a layout that a length of the sequences does not allow. Errors: those of ar_run_check. */
AR_NODISCARD ar_status ari_lp_check(const ari_lp_model *m, const ari_sequences *s);
AR_NODISCARD ar_status ari_lp_forward(ari_lp_model *m, const ari_sequences *s, ari_lp_reading r, ari_row_fn fn,
                                      void *user);
/** What rounding in `of` makes of the log-probabilities of the longest sequence: root mean square and largest, over
 *  some runs of the baseline. */
AR_NODISCARD ar_status ari_lp_rounding(double *rms, double *worst, ari_lp_model *m, const ari_sequences *s,
                                       const ar_logprobs_options *o);

/* --- causes (causes.c) -------------------------------------------------------------------------------------------- */

/* A number of a side's, with what the model says there. */
typedef struct ari_lp_claim {
    size_t sequence, at;
    double given, reference;
    const float *row; /* [V], the logits; NULL: not kept */
} ari_lp_claim;

/** The claim of that place, of `n` in the order of sequences and places; n: there is none. */
size_t ari_lp_claim_at(const ari_lp_claim *claim, size_t n, size_t sequence, size_t at);

typedef struct ari_lp_case {
    ari_lp_model *model;
    const ari_sequences *sequences;
    ari_place *const *place;   /* [sequences][n]; entry 0 of each is not set */
    const ari_lp_claim *claim; /* [claims], with rows */
    size_t claims;
    double rounding; /* root mean square that rounding makes */
} ari_lp_case;

/** What may be wrong with a side, as the table of causes lists it; the first row is a title. */
const struct ari_cause *ari_lp_causes(size_t *n);
/** Sets cause, says, look_at and explained of a side; of one that is not off only where a cause explains nearly all,
 *  and then it is off, unless the cause is a rounding. */
AR_NODISCARD ar_status ari_lp_explain(ar_logprobs_side *side, const ari_lp_case *c);

/* --- supports (support.c) ----------------------------------------------------------------------------------------- */

/* Log-probabilities as a sampler has them: of logits over a temperature, in a support that is not the whole
 * vocabulary. */

typedef enum ari_support {
    ARI_ALL,
    ARI_LARGEST_K, /* the k largest logits */
    ARI_LARGEST_P, /* the fewest of the largest whose probabilities add up to p or more */
    ARI_LEAST_P,   /* probabilities of at least p times the largest */
    ARI_SUPPORTS
} ari_support;

typedef struct ari_sampler {
    double temperature, number; /* number: k or p */
    double left;                /* squares of the differences that it leaves */
} ari_sampler;

/** The sampler of each kind that leaves least of the differences, with a temperature of 1 where another one does not
 *  leave much less. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_samplers_fit(ari_sampler found[ARI_SUPPORTS], const ari_lp_case *c);
