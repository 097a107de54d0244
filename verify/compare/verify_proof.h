/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

/* Rules for an equality that proves nothing. Dumps and sketches share them. */

/* Counts of special values in one tensor of one run. Counting zeros, NaN and infinities may stop at the first finite
 * number other than 0. */
typedef struct ari_value_counts {
    uint64_t elements, zeros, nan, inf;
} ari_value_counts;

/* State of the checks so far. Initialise it with zeros. */
typedef struct ari_proof {
    size_t gradients; /* number of gradients that both runs have */
    size_t zero;      /* how many of them are all zero in both */
    size_t dead;      /* how many of them have no finite number other than 0 in both */
} ari_proof;

/** Counts a tensor that is the same in both runs. pass: its kind, as in ar_verify_row; only gradients, 'g', count. */
void ari_proof_add(ari_proof *proof, char pass, const ari_value_counts *reference, const ari_value_counts *candidate);
/** Refuses gradients without any finite number other than 0. Gradients that are all zero are refused if there are two
 *  or more, but not if globs chose them, because the user may be asking for zeros. Errors: AR_ERR_DATA. */
AR_NODISCARD ar_status ari_proof_refuse(const ari_proof *proof, bool chosen);

/* Losses of all steps. Initialise it with zeros. A run without a finite loss has computed nothing that another run
 * could differ in. ln V is the loss of equal logits, where V is a dimension of some tensor, and it never stays constant
 * while anything is learned. A single step has it if the last layer starts with zeros. */
typedef struct ari_loss_proof {
    size_t steps, without_number; /* number of steps that both runs have; how many of them have a NaN or infinite
                                     loss in the reference */
    double first_loss;            /* the reference's first loss */
    bool changes;                 /* true if a later loss or the other run's loss is different */
} ari_loss_proof;

/** Counts a step's loss, which both runs have. */
void ari_loss_proof_add(ari_loss_proof *proof, double reference, double candidate);
/** Refuses losses if none of them is finite. Errors: AR_ERR_DATA. */
AR_NODISCARD ar_status ari_loss_proof_refuse_numbers(const ari_loss_proof *proof);
/** Returns V if the loss is ln V in each of several steps, else 0. */
size_t ari_loss_proof_logits(const ari_loss_proof *proof);
/** Refuses such a loss once the caller has found V among the dimensions. Always AR_ERR_DATA. */
AR_NODISCARD ar_status ari_loss_proof_refuse_constant(const ari_loss_proof *proof);
/** Refuses activations of later steps that all equal those of the first step bit for bit. Always returns
 *  AR_ERR_DATA. */
AR_NODISCARD ar_status ari_proof_refuse_repeated(size_t activations);
