/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

/* Which equality of gradients proves nothing, by counts of their values alone: dumps and sketches ask the same. */

/* Of one tensor of one run. Zeros, NaN and infinities need not be counted beyond the first finite number that is not 0. */
typedef struct ari_value_counts {
    uint64_t elements, zeros, nan, inf;
} ari_value_counts;

/* What has been asked so far; begins with zeros. */
typedef struct ari_proof {
    size_t gradients; /* that both runs have */
    size_t zero;      /* of these: all zero in both */
    size_t dead;      /* of these: without any finite number other than 0 in both */
} ari_proof;

/** Counts a tensor that both runs have and that is the same. pass: its kind, as ar_verify_row's; only a gradient, 'g',
 *  counts. */
void ari_proof_add(ari_proof *proof, char pass, const ari_value_counts *reference, const ari_value_counts *other);
/** Refuses gradients without any finite number other than 0. Gradients that are all zero are refused from two on, and
 *  not where globs have chosen them: zeros may be what is asked for. Errors: AR_ERR_DATA. */
AR_NODISCARD ar_status ari_proof_refuse(const ari_proof *proof, bool chosen);
