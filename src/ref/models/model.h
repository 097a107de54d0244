/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_MODELS_MODEL_H
#define ARI_MODELS_MODEL_H

#include "anyrank/config.h"
#include "anyrank/model.h"

/** ar_config_check_tp, of experts that are cut over so many of the ranks. Errors: the same. */
AR_NODISCARD ar_status ari_config_check_tp(const ar_config *c, int ranks, int of_expert, const ar_plan *plan);
/** A model's parameters in an array, in the order of their first use. Gives; free(). Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_model_list(ar_param ***gives, size_t *n, ar_model *m);

/** Borrowed from the model. */
const ar_config *ari_model_config(const ar_model *m);
/** The targets of each block for further tokens in the global batch, which a forward pass sets too. */
void ari_model_mtp_targets(ar_model *m, const size_t *targets);
/** ari_scores_update of all blocks. */
AR_NODISCARD ar_status ari_model_update_biases(ar_model *m, ar_ctx *ctx);
/** True if a step has to count the routes first; after that the counts become those of all ranks (ari_balance_share). */
bool ari_model_counts(const ar_model *m, const ar_ctx *ctx);
AR_NODISCARD ar_status ari_model_share_counts(ar_model *m, ar_ctx *ctx);

/** A fresh tensor for what goes between two stages of a pipeline: an activation, or its gradient. */
AR_NODISCARD ar_status ari_model_between(const ar_model *m, ar_ctx *ctx, ar_tensor *t, const ar_batch *batch);

/* The random streams of a model: one for each parameter's fresh values, one for each place that drops elements. Two
 * with the same key would hold the same numbers. */
typedef struct ari_random_stream {
    uint64_t key;
    char name[160];
} ari_random_stream;

/** Sorts by key. Errors: AR_ERR_UNSUPPORTED (two keys are equal; names both). */
AR_NODISCARD ar_status ari_streams_distinct(ari_random_stream *s, size_t n);
/** Checks that a model's streams have distinct keys with this seed. Errors: as above, AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_streams_check(const ar_config *c, uint64_t seed);

#endif
