/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SAFETENSORS_H
#define ANYRANK_SAFETENSORS_H

#include "anyrank/tensor.h"

AR_BEGIN_DECLS

#define AR_ST_MAX_DIMS 8 /* most dimensions of a tensor in a file */

/** A tensor of an open safetensors file, which owns name and data. */
typedef struct ar_st_entry {
    const char *name;
    ar_dtype dtype;
    int ndim; /* 0 .. AR_ST_MAX_DIMS */
    size_t shape[AR_ST_MAX_DIMS];
    size_t count; /* elements */
    size_t bytes;
    const void *data; /* read-only, NOT necessarily aligned: copy out with memcpy */
    bool mapped;      /* data is a memory map of the file: pages may be released with MADV_DONTNEED */
} ar_st_entry;

typedef struct ar_st_file ar_st_file; /* an open safetensors file */

/** The open weights of a model folder as one collection of tensors: model.safetensors, or all shards that
 *  model.safetensors.index.json lists. An index is invalid if it names a file outside of the folder, or if a tensor is
 *  not listed, is in two shards, or is missing in its shard. */
typedef struct ar_st_model ar_st_model;

/** A tensor to write; name and data are borrowed. */
typedef struct ar_st_tensor {
    const char *name;
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_ST_MAX_DIMS];
    const void *data; /* row-major */
} ar_st_tensor;

AR_END_DECLS
#endif
