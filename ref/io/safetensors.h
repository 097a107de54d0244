/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "anyrank/safetensors.h"
#include "ref/io/file.h"

/* The format of huggingface/safetensors: 8 bytes of little-endian header length N, N bytes of JSON, the data. */
#define ARI_ST_PREFIX_BYTES ((size_t)8)
#define ARI_ST_MAX_HEADER ((size_t)100000000) /* the official library's cap, inclusive */
#define ARI_ST_METADATA "__metadata__"
/* Maximum nesting depth in serde_json, which the official reader uses. */
#define ARI_ST_MAX_DEPTH 128
/* Limit for the description of one tensor, which needs at most about 300 bytes; more would be fields that readers
 * ignore. It bounds the JSON tree of a description. */
#define ARI_ST_MAX_DESCRIPTION ((size_t)65536)
/* Limit of metadata entries. Real files have a handful; each entry costs about 80 bytes of memory for 6 bytes of
 * "":"",. */
#define ARI_ST_MAX_METADATA ((size_t)65536)

typedef struct ari_st_item {
    ar_st_entry entry; /* must be the first field, since callers get pointers to it */
    uint64_t begin, end;
} ari_st_item;

/* Contents of a header. */
typedef struct ari_st_header {
    ari_st_item *items; /* items in the order of the header */
    size_t n, cap;
    ari_st_item **by_name;
    char **metadata;                 /* key, value, key, value ... */
    size_t n_metadata, cap_metadata; /* pairs */
} ari_st_header;

/** Parses and validates a header of N bytes that is followed by `data_bytes` bytes of data. Sets everything in the
 *  entries except their data pointers. Errors: as ari_st_open. The caller frees `h` in every case. */
AR_NODISCARD ar_status ari_st_header_parse(ari_st_header *h, const char *text, size_t length, uint64_t data_bytes,
                                           const char *path);
void ari_st_header_free(ari_st_header *h);

/** Multiplies the extents of a shape from left to right: [0, huge, huge] is 0 and [huge, huge, 0] overflows, as in the
 *  official library. Returns false if the product overflows. */
AR_NODISCARD bool ari_st_count(uint64_t *count, int ndim, const size_t *shape);
/** Computes the size in bytes of a tensor to write. Errors: AR_ERR_ARG (name, dtype, ndim), AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_st_tensor_bytes(size_t *bytes, const ar_st_tensor *t);
/** Sorts the tensors by name into order[0..n). Errors: AR_ERR_ARG (a name occurs twice; the message begins with
 *  `prefix`). */
AR_NODISCARD ar_status ari_st_sort(const ar_st_tensor **order, const ar_st_tensor *tensors, size_t n,
                                   const char *prefix);
/* Names of a checkpoint's single file and of its index. */
#define ARI_ST_SINGLE "model.safetensors"
#define ARI_ST_INDEX "model.safetensors.index.json"

/** Does everything that ari_st_write does except the last step, for files that belong together. End with
 *  ari_atomic_file_commit, ari_atomic_file_commit_all or ari_atomic_file_discard. */
AR_NODISCARD ar_status ari_st_write_uncommitted(ari_atomic_file **result, const char *path, const ar_st_tensor *tensors,
                                                size_t n, const char *const *metadata, size_t n_meta);
/** Opens a model by the path of its index, which may have any name; the shards are in the same folder. */
AR_NODISCARD ar_status ari_st_model_open_index(ar_st_model **out, const char *path);
/** The files of a model, each once, and their paths; borrowed. */
size_t ari_st_model_files(const ar_st_model *m);
const ar_st_file *ari_st_model_file(const ar_st_model *m, size_t i, const char **path);
