/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SAFETENSORS_H
#define ANYRANK_SAFETENSORS_H

#include "anyrank/tensor.h"

AR_BEGIN_DECLS

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
 *  Errors: AR_ERR_IO; AR_ERR_FORMAT with the rule's name first ("HeaderTooLarge: ..."), the path and the tensor, or, of
 *  a file of another format, with that; AR_ERR_UNSUPPORTED (more than AR_ST_MAX_DIMS dimensions); AR_ERR_MEMORY.
 *  Duplicate names and keys, which the format forbids and its official library lets pass, are refused; so are names that
 *  hold a NUL. Memory stays within a small multiple of the header's bytes. The file must not shrink while it is open, or
 *  reading its data ends in SIGBUS. Gives; close with ar_st_close. Threads: an open file may be read by many. */
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

/** `count` elements of `dtype`, at any alignment, as binary64: exact but for I64 and U64, which are rounded once. BOOL
 * is its byte; F8_E4M3 has no infinities, F8_E8M0 is a power of two. Errors: AR_ERR_DTYPE (C64, F4, F6). */
AR_NODISCARD ar_status ar_values_to_f64(ar_dtype dtype, const void *data, size_t count, double *out);
/** The same as fp32, rounded once where fp32 has no such value. */
AR_NODISCARD ar_status ar_values_to_f32(ar_dtype dtype, const void *data, size_t count, float *out);
/** Binary64 values as F64, F32, F16 or BF16, at any alignment, each rounded once. Errors: AR_ERR_DTYPE (another). */
AR_NODISCARD ar_status ar_values_of_f64(ar_dtype dtype, const double *values, size_t count, void *out);

/** A tensor to write. Borrows. */
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

/** A file whose tensors are written piece by piece, so that none has to be in memory as a whole. The header comes first
 *  and is that of ar_st_write: `data` of the tensors is not used. The file appears with ar_st_writer_commit. Gives; end
 *  with ar_st_writer_commit or ar_st_writer_discard. Errors: as ar_st_write. */
typedef struct ar_st_writer ar_st_writer;
AR_NODISCARD ar_status ar_st_writer_open(ar_st_writer **gives, const char *path, const ar_st_tensor *tensors, size_t n,
                                         const char *const *metadata, size_t n_meta);
/** The next `bytes` bytes of tensor i of the list that the writer was opened with. Tensors may come in any order, and
 *  in turns. (A pipe takes them only in the file's order: dtypes from the end of AR_DTYPE_TABLE, then names.)
 *  Errors: AR_ERR_ARG (no such tensor, more bytes than it has), AR_ERR_IO. */
AR_NODISCARD ar_status ar_st_writer_put(ar_st_writer *w, size_t i, const void *data, size_t bytes);
/** Frees `w` in both cases. Errors: AR_ERR_ARG (a tensor is not whole), AR_ERR_IO; nothing is left behind then. */
AR_NODISCARD ar_status ar_st_writer_commit(ar_st_writer *w);
/** Accepts NULL. */
void ar_st_writer_discard(ar_st_writer *w);

/** A sharded checkpoint as Hugging Face writes it: tensors in the given order, a new file where the next one would
 *  take it past shard_bytes (a larger tensor has a file of its own). shard[i]: the number of tensor i's file, from 0;
 * *shards: how many files, at least one. Errors: AR_ERR_ARG, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ar_st_shard_plan(size_t *shard, size_t *shards, const ar_st_tensor *tensors, size_t n,
                                        size_t shard_bytes);
#define AR_ST_SHARD_NAME 64
/** "model-00001-of-00003.safetensors"; "model.safetensors" where it is the only one. Returns `name`. */
const char *ar_st_shard_name(char name[AR_ST_SHARD_NAME], size_t shard, size_t shards);
/** Writes folder/model.safetensors.index.json. Errors: AR_ERR_ARG (a name that is there twice or ill-formed; a
 *  model.safetensors in the folder, which readers would take in place of the shards), AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_st_write_index(const char *folder, const ar_st_tensor *tensors, size_t n, const size_t *shard,
                                         size_t shards);
AR_END_DECLS
#endif
