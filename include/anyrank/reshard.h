/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_RESHARD_H
#define ANYRANK_RESHARD_H

#include "anyrank/dump.h"
#include "anyrank/parallel.h"

AR_BEGIN_DECLS

/* Checkpoints split over ranks and merged again. Bits are copied, never computed. */

/** A file of the output that is there, or would be. */
typedef struct ar_reshard_file {
    const char *name; /* in the folder; borrowed during the call */
    size_t tensors, bytes;
    bool kept; /* of an interrupted run, whole already */
} ar_reshard_file;

typedef struct ar_reshard_options {
    const char *in;     /* a Hugging Face folder, a folder of per-rank files, a checkpoint of training or a folder of
                           them, one file (ar_dump_open) */
    const char *map;    /* of `in`; NULL: none */
    const char *config; /* config.json, or a folder with one, where `in` has none; NULL */
    const char *out;    /* folder; made where it is missing */
    int tp, dp, pp;     /* of the output; 0: 1. All 1: merged, as a Hugging Face folder */
    int virtual_stages; /* that each rank of pp holds; 0: 1 */
    ar_stages stages;   /* and their layers */
    bool dp_copies;     /* a file for every data-parallel rank; false: those of coordinate 0, which all of them read */
    bool embedding_hidden; /* embeddings are split along the hidden dimension in place of the vocabulary */
    bool strict;           /* what is otherwise noted and done is an error: tensors that the config does not have, ones
                              that it has and `in` lacks, rows past the vocabulary */
    size_t pad_vocab;      /* the vocabulary gets rows of zeros up to a multiple of this, at most 2^20; 0, 1: none */
    size_t shard_bytes;    /* merged: the largest file of a sharded checkpoint; 0: 5 GB */
    bool dry_run;          /* say what would be written; nothing of `out` is looked at */
    void (*progress)(void *user, double fraction, const char *what);
    void (*note)(void *user, const char *text);            /* what somebody may not expect; borrowed during the call */
    void (*file)(void *user, const ar_reshard_file *file); /* as each is done */
    void *user;                                            /* of the three; any of them may be NULL */
} ar_reshard_options;

typedef struct ar_reshard_result {
    size_t tensors;           /* of the model */
    size_t files, files_kept; /* with tensors; kept: of an interrupted run, whole already */
    size_t copied;            /* small files taken along: config.json, tokenizer.json, .. */
    size_t bytes;             /* of all tensors in all files */
    size_t largest_tensor;    /* in bytes, in full */
    double seconds;
} ar_reshard_result;

/** Reads `in`, writes `out`: a file for each rank, rank-00000.safetensors, and of packed tensors of which it holds
 *  several boxes the second ones in rank-00000-2.safetensors, and so on, as ar_dump_write. Optimizer state
 *  ("PARAMETER.exp_avg", ..) and gradients lie as their parameters do; what the config does not know is copied whole.
 *  Memory: some megabytes, or the largest tensor where a sum of partial parts or one row of it needs that. A run that
 *  was interrupted goes on where it stopped, and keeps the files that are whole by their header and hash; a file
 *  appears whole. A folder that holds anything else at the start is refused. Errors: those of opening;
 * AR_ERR_INDIVISIBLE, AR_ERR_SHAPE (the config's is another), AR_ERR_NOT_FOUND (no config), AR_ERR_DATA (copies that
 * differ), AR_ERR_ARG
 *  (`out` was begun with another request, or holds other files), AR_ERR_UNSUPPORTED, AR_ERR_IO, AR_ERR_OVERFLOW,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_reshard(ar_reshard_result *result, const ar_reshard_options *o);

AR_END_DECLS
#endif
