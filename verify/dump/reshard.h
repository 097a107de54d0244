/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/reshard.h"
#include "ref/core/axis.h"
#include "ref/io/hash.h"
#include "ref/models/placement.h"
#include "ref/models/stages.h"
#include "verify/dump/placement.h"

/* Resharding: the input's tensors by the config's names (reshard_experts.c) and what the config says of them
 * (reshard_source.c), the files of the output and
 * which boxes each holds (reshard_items.c), the folder with what an interrupted run left in it (reshard_folder.c), and
 * on top of these the moving of elements (reshard.c). */

/* A tensor of the input. */
typedef struct ari_rs_tensor {
    const ar_dump_tensor *from;
    bool known;          /* it lies as a parameter of the config does: that one, or its gradient or optimizer state */
    ari_placing placing; /* known */
    size_t layer;        /* that it belongs to, known or not; SIZE_MAX: none */
    bool state;          /* without ranks it goes into optimizer.safetensors */
    bool partial;        /* the ranks' parts are summed */
    size_t rows;         /* of the input's dimension 0 that are taken: all but those past the vocabulary */
    int ndim;
    size_t shape[AR_ST_MAX_DIMS]; /* of the output, with padding */
    size_t bytes;                 /* of all of it */
    size_t order;                 /* of the parameter, in order of first use; SIZE_MAX: unknown */
} ari_rs_tensor;

/* A file of the output. */
typedef struct ari_rs_file {
    char name[ARI_RANK_FILE];
    int rank;                           /* whose it is */
    size_t box;                         /* and which of its boxes of each tensor */
    const ari_rs_tensor *const *tensor; /* merged: what it holds; NULL: a rank's, told by items */
    size_t tensors;
    size_t items, bytes;
} ari_rs_file;

typedef struct ari_rs {
    const ar_reshard_options *o;
    ar_parallel layout; /* of the output */
    ari_ranks ranks;    /* and its ranks */
    bool merged;
    ari_arena arena; /* of all lists and paths */
    char *folder;    /* of the input: what stands beside its tensors; NULL: none */
    char *config_path;
    bool has_config;
    ar_config config;
    ar_dump *dump;
    size_t stacked;        /* tensors of the input that held several parameters */
    ari_rs_tensor *tensor; /* in order of use, then by name */
    size_t tensors;
    const ari_rs_tensor **list; /* of merged files: the same tensors, file after file */
    size_t *shard;              /* and the number of the file that each is in, for the index */
    size_t shards;
    ari_rs_file *file;
    size_t files;
    size_t bytes, done; /* of all files' tensors */
} ari_rs;

/** Says what may not be expected, or refuses it: AR_ERR_UNSUPPORTED. */
ar_status ari_rs_note(const ari_rs *r, bool refused, const char *format, ...) AR_PRINTF(3, 4);
/** AR_ERR_SHAPE: the config makes the tensor of another shape. */
ar_status ari_rs_wrong_shape(const ar_dump_tensor *t, int ndim, const size_t *shape);
void ari_rs_progress(ari_rs *r, size_t bytes, const char *what);
/** A tensor of the output, or a part of this shape, without its data. */
ar_st_tensor ari_rs_described(const ari_rs_tensor *t, const size_t *shape);

/** Gives the dumps' tensors the config's names: in place of those that hold several of its parameters these. */
AR_NODISCARD ar_status ari_rs_unstack(ari_rs *r);
/** Opens the input and tells what each tensor is. */
AR_NODISCARD ar_status ari_rs_open(ari_rs *r);
void ari_rs_close(ari_rs *r);

/* A file's part of a tensor. */
typedef struct ari_rs_item {
    const ari_rs_tensor *tensor;
    ar_dump_box box; /* all of it there, row-major */
    size_t boxes;    /* that the rank has of it, in as many files */
    int replica, replicas;
    size_t bytes;
} ari_rs_item;

/** Lists the files, each with the number of its tensors and bytes. */
AR_NODISCARD ar_status ari_rs_plan(ari_rs *r);
/* Contents of a file. */
typedef struct ari_rs_contents {
    const ari_rs_file *file;
    ari_rs_item *item; /* [n] in the order of the data: dtypes from the end of their table, then names */
    size_t n;
    const char *pair[2 * (ARI_RANK_METADATA + 1)]; /* of its __metadata__; [pairs] */
    size_t pairs;
    char *owned[2]; /* by them */
    ari_arena arena;
} ari_rs_contents;
/** Makes the contents of a file to be written; a dry run has no metadata. ari_rs_contents_free, also after an error. */
AR_NODISCARD ar_status ari_rs_contents_make(ari_rs_contents *c, const ari_rs *r, const ari_rs_file *f);
void ari_rs_contents_free(ari_rs_contents *c);

/* The output's folder: locked while it is written, with the request and the hashes of whole files beside them. */
typedef struct ari_rs_folder {
    const char *path;
    int fd; /* -1: none */
    json_t *journal;
    char *journal_path;
    ari_arena *arena; /* of its files' paths: the resharding's */
} ari_rs_folder;
/** Makes or takes up the folder. Errors: AR_ERR_ARG (it holds other files, or was begun with another request, or
 *  another process writes there), AR_ERR_IO. ari_rs_folder_end in every case. */
AR_NODISCARD ar_status ari_rs_folder_begin(ari_rs_folder *d, ari_rs *r);
void ari_rs_folder_end(ari_rs_folder *d);
/** *kept: whether a former run has written this file and it is whole still. */
AR_NODISCARD ar_status ari_rs_folder_kept(bool *kept, ari_rs_folder *d, ari_rs *r, const ari_rs_contents *c);
/** Takes down that a file is whole, with its hash. */
AR_NODISCARD ar_status ari_rs_folder_add(ari_rs_folder *d, const ari_rs_file *f, const char hash[65]);
#define ARI_RS_SMALL_BYTES ((size_t)64 << 20)
/** Copies what stands beside the input's tensors: config.json, tokenizer.json, .. *copied: how many. */
AR_NODISCARD ar_status ari_rs_copy_small(ari_rs_folder *d, const ari_rs *r, size_t *copied);
