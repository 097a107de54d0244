/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SAFETENSORS_H
#define ANYRANK_SAFETENSORS_H

#include "anyrank/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

#define AR_ST_MAX_DIMS 8

/** One tensor of an open file. Borrows everything from the file. */
typedef struct ar_st_entry {
    const char *name;
    ar_dtype dtype;
    int ndim; /* 0 .. AR_ST_MAX_DIMS */
    size_t shape[AR_ST_MAX_DIMS];
    size_t count; /* elements */
    size_t bytes;
    const void *data; /* read-only, NOT necessarily aligned: copy out with memcpy */
    bool mapped;      /* data are pages of the file: whoever streams through may give them back (MADV_DONTNEED) */
} ar_st_entry;

typedef struct ar_st_file ar_st_file;

/** Maps and validates a safetensors file, every rule of the format checked before this returns; hostile input is safe.
 *  Errors: AR_ERR_IO; AR_ERR_FORMAT with the rule's name first ("HeaderTooLarge: ..."), the path and the tensor;
 *  AR_ERR_UNSUPPORTED (more than AR_ST_MAX_DIMS dimensions); AR_ERR_MEMORY. Duplicate names and keys, which the format
 *  forbids and its official library lets pass, are refused; so are names that hold a NUL. Memory stays within a small
 *  multiple of the header's bytes. The file must not shrink while it is open, or reading its data ends in SIGBUS.
 *  Gives; close with ar_st_close. Threads: an open file may be read by many. */
AR_NODISCARD ar_status ar_st_open(ar_st_file **gives, const char *path);
void ar_st_close(ar_st_file *f);
size_t ar_st_count(const ar_st_file *f);
/** Entry i in the order of the header; NULL out of range. */
const ar_st_entry *ar_st_at(const ar_st_file *f, size_t i);
/** By name; NULL if there is none. */
const ar_st_entry *ar_st_find(const ar_st_file *f, const char *name);
/** Value of `key` in __metadata__; NULL if there is none. */
const char *ar_st_metadata(const ar_st_file *f, const char *key);

/** Opens MODEL/model.safetensors, or the shards that MODEL/model.safetensors.index.json lists, as one collection.
 *  *gives = NULL with AR_OK if the folder has neither. Errors: as ar_st_open; AR_ERR_FORMAT, "InvalidIndex: ..." (a
 * file name with a / or .., a tensor unlisted or in two shards) or "TensorNotFound: ..." (listed, but not in its
 * shard). */
typedef struct ar_st_model ar_st_model;
AR_NODISCARD ar_status ar_st_model_open(ar_st_model **gives, const char *folder);
void ar_st_model_close(ar_st_model *m);
size_t ar_st_model_count(const ar_st_model *m);
const ar_st_entry *ar_st_model_at(const ar_st_model *m, size_t i);
const ar_st_entry *ar_st_model_find(const ar_st_model *m, const char *name);

/** Copies an entry to fp32, converting F64 (rounded), F16, BF16, F32. Errors: AR_ERR_DTYPE (another dtype, named). */
AR_NODISCARD ar_status ar_st_to_f32(const ar_st_entry *e, float *out);
/** Copies an entry to int64 from any integer dtype or BOOL. Errors: AR_ERR_DTYPE; AR_ERR_DATA (a U64 above 2^63-1). */
AR_NODISCARD ar_status ar_st_to_i64(const ar_st_entry *e, int64_t *out);

/** What to write. Borrows. */
typedef struct ar_st_tensor {
    const char *name;
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_ST_MAX_DIMS];
    const void *data; /* row-major */
} ar_st_tensor;
/** Writes a file as the official library does: __metadata__ first, entries sorted by alignment (descending) then name,
 *  header padded with spaces to 8 bytes. Until it is whole it has no name, or a temporary one in the same folder where
 *  the file system knows none without, so that a half-written file never appears. metadata: n_meta pairs key, value,
 *  written in their order. Errors: AR_ERR_ARG (a NULL, repeated or ill-formed name or key, an unknown dtype, missing
 *  data), AR_ERR_OVERFLOW, AR_ERR_IO (nothing is left behind). */
AR_NODISCARD ar_status ar_st_write(const char *path, const ar_st_tensor *tensors, size_t n, const char *const *metadata,
                                   size_t n_meta);

#ifdef __cplusplus
}
#endif
#endif
