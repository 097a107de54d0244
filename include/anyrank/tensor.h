/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TENSOR_H
#define ANYRANK_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The data types, X(name, bits per element), with safetensors' names in safetensors' alignment order. */
/* clang-format off */
#define AR_DTYPE_TABLE(X)                                                                                              \
    X(BOOL, 8) X(F4, 4) X(F6_E2M3, 6) X(F6_E3M2, 6) X(U8, 8) X(I8, 8) X(F8_E5M2, 8) X(F8_E4M3, 8) X(F8_E8M0, 8)        \
    X(I16, 16) X(U16, 16) X(F16, 16) X(BF16, 16) X(I32, 32) X(U32, 32) X(F32, 32) X(C64, 64) X(F64, 64) X(I64, 64)     \
    X(U64, 64)
/* clang-format on */
typedef enum ar_dtype {
#define AR_DTYPE_ENUM(name, bits) AR_##name,
    AR_DTYPE_TABLE(AR_DTYPE_ENUM)
#undef AR_DTYPE_ENUM
        AR_DTYPE_COUNT
} ar_dtype;
/** Returns the name of a data type, such as "F32"; "?" for an unknown value. Static storage. */
const char *ar_dtype_name(ar_dtype t);
/** Returns the bytes of one element; 0 for unknown types and those of fewer than 8 bits. */
size_t ar_dtype_bytes(ar_dtype t);

/* Pointers to memory of a device, writable (ar_buf) and read-only (ar_cbuf). Only the owning device dereferences
 * them. */
typedef struct ar_buf {
    void *ptr;
} ar_buf;
typedef struct ar_cbuf {
    const void *ptr;
} ar_cbuf;
/** Returns the read-only pointer to the same memory. */
static inline ar_cbuf ar_const(ar_buf b)
{
    ar_cbuf c = {b.ptr};
    return c;
}
/** ar_buf_at, ar_cbuf_at: return the pointer `bytes` bytes after b. */
static inline ar_buf ar_buf_at(ar_buf b, size_t bytes)
{
    ar_buf c = {(char *)b.ptr + bytes};
    return c;
}
static inline ar_cbuf ar_cbuf_at(ar_cbuf b, size_t bytes)
{
    ar_cbuf c = {(const char *)b.ptr + bytes};
    return c;
}

#define AR_MAX_DIMS 4   /* most dimensions of an ar_tensor */
#define AR_MAX_BOXES 12 /* most boxes of an ar_layout */

/** A strided view of memory on one rank. It does not own it. Strides may have any order, as in a transposed view. */
typedef struct ar_tensor {
    ar_dtype dtype;
    int ndim;                      /* 0 .. AR_MAX_DIMS */
    size_t shape[AR_MAX_DIMS];     /* extents on this rank */
    ptrdiff_t stride[AR_MAX_DIMS]; /* in elements */
    ar_buf data;
} ar_tensor;

/** Makes *t a row-major (contiguous) view of `data`. Errors: AR_ERR_ARG (ndim out of range). */
AR_NODISCARD ar_status ar_tensor_view(ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape, ar_buf data);
/** Returns the number of elements; 1 if ndim is 0. The product cannot overflow: the view's creation checked it. */
size_t ar_tensor_count(const ar_tensor *t);
/** Returns the view of elements [start, start + extent) of t along dimension `dim`. */
ar_tensor ar_tensor_slice(const ar_tensor *t, int dim, size_t start, size_t extent);

/** A block of a tensor [batch, rows, columns]: matrices [matrix, matrix + matrices) of the batch, and of each of them
 *  rows [row, row + rows) and columns [col, col + cols). */
typedef struct ar_part {
    size_t matrix, matrices, row, rows, col, cols;
} ar_part;

/** A box (hyperrectangle) of elements: elements [global, global + extent) of the full tensor are elements
 *  [local, local + extent) of the rank's tensor, in each dimension. */
typedef struct ar_box {
    size_t global[AR_MAX_DIMS], local[AR_MAX_DIMS], extent[AR_MAX_DIMS];
} ar_box;
/** The part of a full (global) tensor that one rank holds, as boxes: one, or several of a packed tensor such as q|k|v
 *  or gate|up. */
typedef struct ar_layout {
    int ndim;
    size_t shape[AR_MAX_DIMS]; /* of the full tensor */
    size_t nbox;               /* boxes in use; 0: this rank holds nothing */
    ar_box box[AR_MAX_BOXES];
    int replica, replicas; /* `replicas` ranks hold copies of these boxes; this is copy number `replica` from 0 */
} ar_layout;

/** Makes *layout the one-box layout of shard number `part` when a tensor of `shape` [ndim] is cut into `parts` equal
 *  shards along dimension `dim`. Errors: AR_ERR_INDIVISIBLE (`parts` does not divide shape[dim]; the message names the
 *  dimension and both numbers). */
AR_NODISCARD ar_status ar_layout_shard(ar_layout *layout, int ndim, const size_t *shape, int dim, int part, int parts);

AR_END_DECLS
#endif
