/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/config.h"
#include "anyrank/loss.h"
#include "anyrank/model.h"

/** Does the same as ari_config_check_ranks for experts that are sharded over `of_expert` of the ranks. Errors: those of
 *  ari_config_check_ranks. */
AR_NODISCARD ar_status ari_config_check_tp(const ar_config *c, int ranks, int of_expert, const ar_plan *plan);
/** Returns the model's loss, on the last rank of a pipeline; NULL on the other ranks. Borrowed. */
ar_loss *ari_model_criterion(ar_model *m);

/* A random stream of a model: one for each parameter's initial values, and one for each dropout. Streams with equal
 * keys would produce equal numbers. */
typedef struct ari_random_stream {
    uint64_t key;
    char name[160];
} ari_random_stream;

/** Sorts streams by key. Errors: AR_ERR_UNSUPPORTED (two keys are equal; names both). */
AR_NODISCARD ar_status ari_streams_distinct(ari_random_stream *s, size_t n);
/** Checks that a model's streams have distinct keys for this seed. Errors: as above, AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_streams_check(const ar_config *c, uint64_t seed);
