/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/verify.h"

/* Decides whether two dumps differ as two runs with different rounding do. "Draws" are runs with random rounding
 * errors. verify.md, "Is this difference normal?", has the rule and its derivation. */

/* A file of allowances also contains the differences of the draws, for each tensor an F64 [draws, ARI_NORMAL_SIZES]
 * under this prefix and the tensor's name: root mean square and largest |difference|, and the typical difference in
 * steps of the dtype, as 2^(mean number of binary digits of the steps) - 1. */
#define ARI_NORMAL_PREFIX "anyrank.draws/"
enum { ARI_NORMAL_RMS, ARI_NORMAL_LARGEST, ARI_NORMAL_TYPICAL, ARI_NORMAL_SIZES };

typedef struct ari_normal_row {
    const ar_verify_row *row; /* row of the report */
    double rms, largest;      /* of the difference, relative to the reference; infinite: the reference is 0 */
    double ratio;      /* ratio to the median draw for the most unusual size; without draws, ratio to the bound */
    double percentile; /* percentile of that size among the draws, in [0, 100); NaN: no draws */
} ari_normal_row;

typedef struct ari_normal {
    bool normal;
    size_t draws;                    /* number of draws; 0: judged by a bound */
    double statistic, max_statistic; /* with draws: how unusual the difference is, and the most unusual draw */
    size_t more_unusual;             /* number of draws that are more unusual than the difference */
    char precision[32];              /* precision of the rounding */
    char sentence[768];              /* the answer */
    ari_normal_row *row;             /* [rows] compared tensors, the most unusual first */
    size_t rows;
} ari_normal;

/** Finds the file of allowances in or next to the dump `reference`. Returns false if there is none. */
bool ari_normal_find_draws(char *path, size_t cap, const char *reference);
/** Judges a report's differences by the draws in a file, or by a bound if `draws` is NULL. Borrows the report while the
 *  result is used. Call ari_normal_fini in any case. Errors: AR_ERR_NOT_FOUND (a tensor without draws), AR_ERR_FORMAT,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_normal_judge(ari_normal *n, const ar_verify_report *r, const char *draws);
void ari_normal_fini(ari_normal *n);
/** Returns the judgement as JSON with the fields of verify.md, a new reference; NULL if memory is short. */
json_t *ari_normal_json(const ari_normal *n);
