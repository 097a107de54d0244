/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_RESHARD_H
#define ANYRANK_RESHARD_H

#include "anyrank/config.h"
#include "anyrank/dump.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Checkpoints split over ranks and merged again. Bits are copied, never computed. */

typedef struct ar_reshard_options {
    const char *in;        /* a Hugging Face folder, or a folder of per-rank files (ar_dump_open) */
    const char *map;       /* of `in`; NULL: none */
    const char *config;    /* config.json, or a folder with one, where `in` has none; NULL */
    const char *out;       /* folder */
    int tp, dp, pp;        /* of the output; 0: 1. All 1: merged, as a Hugging Face folder */
    bool embedding_hidden; /* embeddings are split along the hidden dimension in place of the vocabulary */
    size_t shard_bytes;    /* merged: the largest file of a sharded checkpoint; 0: 5 GB */
    bool dry_run;          /* say what would be written */
    void (*progress)(void *user, double fraction, const char *what);
    void *progress_user;
} ar_reshard_options;

typedef struct ar_reshard_result {
    size_t tensors, files, files_kept; /* kept: of an interrupted run, whole already */
    size_t bytes, largest_tensor;
    double seconds;
} ar_reshard_result;

/** Where rank `tp_rank` of `tp` holds its part of parameter `name` of a model: exactly what the model's own layers hold
 *  there (column, row, q|k|v with KV replicas, vocabulary, hidden). Errors: AR_ERR_NOT_FOUND (no such parameter),
 *  AR_ERR_INDIVISIBLE, AR_ERR_UNSUPPORTED. */
AR_NODISCARD ar_status ar_param_placement(ar_layout *o, const ar_config *c, const char *name, int tp, int tp_rank,
                                          bool embedding_hidden);
/** The stage of `pp` that holds parameter `name`, layers shared out evenly, the first stages one more where they do not
 *  divide; the embedding goes to the first, final norm and LM head to the last, tied weights to both. */
AR_NODISCARD ar_status ar_param_stage(bool *held, const ar_config *c, const char *name, int pp, int stage);

/** Reads `in`, writes `out`. Memory: the largest tensor and some megabytes. A run that was interrupted goes on where it
 *  stopped; a file appears whole. Errors: those of opening; AR_ERR_INDIVISIBLE, AR_ERR_SHAPE, AR_ERR_NOT_FOUND,
 * AR_ERR_DATA (copies that differ), AR_ERR_ARG, AR_ERR_IO. */
AR_NODISCARD ar_status ar_reshard(ar_reshard_result *result, const ar_reshard_options *o);

#ifdef __cplusplus
}
#endif
#endif
