/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a model, or one block, on the baseline and on N simulated ranks with the same weights, and compares every tensor
 * both report, bit for bit and in its place in the order of execution. */
#pragma once

#include "anyrank/model.h"
#include "support/rank_run.h"
#include "verify/check/compare.h"

typedef struct match_case {
    ar_config config;
    ar_batch batch;
    ar_run run; /* of it the layout, the plan's order and what ranks compute and run on; tp is a layout's own */
    const float *x, *dy; /* [b, s, hidden]: block 0 alone; NULL: the whole model */
    unsigned seed;       /* of the weights, and of dropout */
    double scale;        /* their largest magnitude; 0: 0.5 */
} match_case;

/* What weights are: up to a scale, as large as products overflow or nearly as the format has them, of few values so that
 * scores tie, zeros of both signs beside few others, subnormal, or of magnitudes from the smallest to large ones. */
typedef enum match_draw {
    MATCH_USUAL,
    MATCH_HUGE,
    MATCH_LARGEST,
    MATCH_TIES,
    MATCH_ZEROS,
    MATCH_SUBNORMAL,
    MATCH_MIXED,
    MATCH_DRAWS
} match_draw;
/** Fills a tensor of that name. scale: of MATCH_USUAL; 0: 0.5. */
void match_fill(float *values, size_t count, unsigned seed, const char *name, match_draw draw, double scale);

/* Weights by name, made by the baseline's run and looked up by the ranks. None is what a fresh parameter would hold. */
typedef struct match_weights {
    unsigned seed;
    double scale;
    match_draw draw;
    size_t count;
    struct {
        char name[128];
        size_t n;
        float *values;
    } at[512];
} match_weights;
/** An ar_baseline_weights that makes them; user: a match_weights, zeroed but for seed and scale. */
const float *match_weights_make(void *user, const char *name, size_t count);
/** A lookup that changes nothing, for ari_model_set; NULL for what was not made. */
const float *match_weights_find(void *user, const char *name, size_t count);
void match_weights_fini(match_weights *w);

/** The baseline's tensors (not finished where the run failed; ari_reference_fini either way). */
AR_NODISCARD ar_status match_baseline(const match_case *c, match_weights *w, ari_reference *r);
/** AR_OK: what n ranks have reported has the reference's bits in every copy, and every element is in some rank's first
 *  copy exactly once. Errors: AR_ERR_DATA with what differs. */
AR_NODISCARD ar_status match_found(const ari_comparator *ranks, int n, const ari_reference *r);
/** Runs fn on ranks as `run` says and compares what they tap with a reference: the same
 * names in the same order, every element held by somebody as first copy exactly once, and the same bits in every copy.
 * loss: NULL, or what each rank should have got, written by fn. AR_ERR_DATA says in ar_error_message what differs. */
AR_NODISCARD ar_status match_taps(const ari_reference *r, const ar_run *run, rank_fn fn, void *user, const float *loss);
/** One layout of a case against them. Errors: as match_taps. */
AR_NODISCARD ar_status match_ranks(const match_case *c, match_weights *w, const ari_reference *r, int tp);
/** The ranks' part of a case as `run` says (native numerics, a mistake): nothing is compared. */
AR_NODISCARD ar_status match_run(const match_case *c, match_weights *w, const ar_run *run);
/** Both, for every tp of a list that ends with 0. *tensors (NULL: not wanted): how many were compared in each
 *  layout. */
AR_NODISCARD ar_status match(const match_case *c, const int *tps, size_t *tensors);

/** Small models of each architecture, to vary: hidden 12, 4 heads of 4 features (2 KV heads but for GPT-2), MLP 8 wide,
 *  vocabulary 11, at most 9 positions. */
ar_config match_config(ar_arch arch, size_t layers);
/** Of a random number: norms of queries and keys and of what branches make, where the family has names for them, gains of
 *  1 + weight, caps low enough to bend, factors of scores and of the embedding. */
void match_draw_norms(ar_config *c, size_t number);
