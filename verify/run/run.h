/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/run.h"

/* Common start of all runs. */

/** Returns the number of forward and backward passes of a run. It is at least 1, because a run without updates has one
 *  pass. */
static inline size_t ari_run_steps(const ar_run *r)
{
    return r->steps > 1 ? (size_t)r->steps : 1;
}
/** Returns true if NCCL connects the run's ranks as threads of this process with a GPU each, which device.index
 *  AR_GPU_EACH asks for where it is possible. Never for features of the simulated cluster: faults and checks of
 *  transfers, schedules, traces, virtual time. */
bool ari_run_by_nccl(const ar_run *r, int ranks);
/** Finds a run's model and reads its config, shrunk if the run asks for that; then folder[cap] is the config's file,
 *  next to which no weights are looked for. Errors: those of ar_model_path, ar_config_load and ari_config_shrink. */
AR_NODISCARD ar_status ari_run_config(ar_config *c, char *folder, size_t cap, const ar_run *r);
/** Checks a run's training options without a model. name: of the model or module, for messages. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_run_check_training(const ar_run *r, const char *name);
/** Checks the part of ar_run_check that concerns losses in addition to the targets' loss. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_run_check_loss(const ar_run *r, const ar_config *c);
/** Refuses to train a language model on sequences of one token, whose loss would have no target. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_run_check_targets(const ar_run *r, const ar_config *c);
/** Refuses a sequence of `seq` tokens that exceeds the model's positions or has rotary angles of 2^20 and more, for
 *  which sine and cosine are not defined (numerics.md). The baseline would compute NaN and every rank would stop. Only
 *  a rope_theta below 1 or a very long sequence has such angles. Errors: AR_ERR_SHAPE, AR_ERR_CONFIG. */
AR_NODISCARD ar_status ari_run_check_positions(const ar_config *c, size_t seq);
/** Refuses a plan that declares wrong placements on several ranks: without a comparison, wrong numbers would pass for
 *  the model's. Errors: those of ari_plan_check_declared. */
AR_NODISCARD ar_status ari_run_check_declared(const ar_run *r, const ar_config *c);
/** Returns a note on surprising properties of a long sequence's tensors; NULL: none. Static storage. */
const char *ari_scores_note(size_t seq, ar_numerics numerics);
/** Refuses low precision in exact numerics. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_run_check_numerics(const ar_run *r);

/* --- weights ------------------------------------------------------------------------------------------------------ */
/* A model folder's weights as fp32, checked against its config. */
typedef struct ari_weights ari_weights;

/** Reads model.safetensors or its shards. *out = NULL with AR_OK if the folder has no weights, or `folder` is a config
 *  file. Errors, each with the tensor's name: those of the files; AR_ERR_NOT_FOUND (a missing parameter), AR_ERR_SHAPE,
 *  AR_ERR_DTYPE, AR_ERR_DATA (NaN or infinity with its index, or a tied head with bits other than the embedding's),
 *  AR_ERR_FORMAT (a tensor that the model does not have, or weights in files of other formats, which are named). */
AR_NODISCARD ar_status ari_weights_load(ari_weights **out, const ar_config *c, const char *folder);
void ari_weights_destroy(ari_weights *w);
/** Finds out whether there are weights to read. Errors: those of the files. */
AR_NODISCARD ar_status ari_weights_exist(bool *exists, const char *folder);
/** Finds a weight by Hugging Face name; NULL if there is none with `count` elements. user: an ari_weights. */
const float *ari_weights_find(void *user, const char *name, size_t count);

/* --- the order of samples ----------------------------------------------------------------------------------------- */
/* Returns the key that determines the order of each epoch. The shuffle is that of Fisher and Yates (Durstenfeld 1964,
 * Algorithm 235): for i = n-1 .. 1, element i is swapped with an element drawn uniformly from 0 .. i. */

/** The key of a seed's shuffles. */
uint64_t ari_shuffle_key(uint64_t seed);
/** Returns the number drawn for element i (below 2^32) in an epoch: w mod (i + 1) for the first word w = 0, 1, .. of
 *  the element's stream that lies below the largest multiple of i + 1. Every result is equally likely. */
size_t ari_shuffle_draw(uint64_t key, uint32_t epoch, size_t i);
/** Writes a permutation of 0 .. n-1 to order[0 .. n); n is at most 2^32. */
void ari_shuffle(size_t *order, size_t n, uint64_t key, uint32_t epoch);
