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

/** Opens MODEL/model.safetensors, or the shards that MODEL/model.safetensors.index.json lists, as one collection.
 *  *out = NULL with AR_OK if the folder has neither. Errors: as ari_st_open; AR_ERR_FORMAT, "InvalidIndex: ..." (a
 * file name with a / or .., a tensor unlisted or in two shards) or "TensorNotFound: ..." (listed, but not in its
 * shard). */
typedef struct ar_st_model ar_st_model;

/** A tensor to write. Borrows. */
typedef struct ar_st_tensor {
    const char *name;
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_ST_MAX_DIMS];
    const void *data; /* row-major */
} ar_st_tensor;

/** A file whose tensors are written piece by piece, so that none has to be in memory as a whole. The header comes first
 *  and is that of ari_st_write: `data` of the tensors is not used. The file appears with ari_st_writer_commit. Gives; end
 *  with ari_st_writer_commit or ari_st_writer_discard. Errors: as ari_st_write. */
typedef struct ar_st_writer ar_st_writer;

#define AR_ST_SHARD_NAME 64
AR_END_DECLS
#endif
