/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TENSOR_H
#define ANYRANK_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* dtype: name as safetensors spells it, bits per element. Order: safetensors' alignment order. */
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
/** "F32"; "?" for an unknown value. Static storage. */
const char *ar_dtype_name(ar_dtype t);
/** Bytes of one element; 0 for sub-byte and unknown types. */
size_t ar_dtype_bytes(ar_dtype t);

/* Typed pointers: memory of a device, never dereferenced outside the device that owns it. */
typedef struct ar_buf {
    void *ptr;
} ar_buf;
typedef struct ar_cbuf {
    const void *ptr;
} ar_cbuf;
static inline ar_cbuf ar_const(ar_buf b)
{
    ar_cbuf c = {b.ptr};
    return c;
}
/** The buffer `bytes` further on. */
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

#define AR_MAX_DIMS 4
#define AR_MAX_BOXES 12

/** A local view. Borrows its memory. Strides are in elements and may be any order (a transposed view is a view). */
typedef struct ar_tensor {
    ar_dtype dtype;
    int ndim;                      /* 0 .. AR_MAX_DIMS */
    size_t shape[AR_MAX_DIMS];     /* local extents */
    ptrdiff_t stride[AR_MAX_DIMS]; /* elements */
    ar_buf data;
} ar_tensor;

/** Row-major view of `data`. Errors: AR_ERR_ARG (ndim out of range). */
AR_NODISCARD ar_status ar_tensor_view(ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape, ar_buf data);
/** Number of elements (1 for ndim 0). Extents were checked when the view was made, so the product fits. */
size_t ar_tensor_count(const ar_tensor *t);
/** Elements [start, start + extent) along dimension `dim`, as a view. */
ar_tensor ar_tensor_slice(const ar_tensor *t, int dim, size_t start, size_t extent);

/** Part of [batch, rows, cols] matrices: columns [col, col + cols) of rows [row, row + rows) of some of them. */
typedef struct ar_part {
    size_t matrix, matrices, row, rows, col, cols;
} ar_part;

/** A layout says which boxes of a global tensor a rank holds. Several boxes: packed q|k|v, gate|up. A box copies
 *  local[..local+extent) <-> global[..global+extent). Replicated values carry their replica number. */
typedef struct ar_box {
    size_t global[AR_MAX_DIMS], local[AR_MAX_DIMS], extent[AR_MAX_DIMS];
} ar_box;
typedef struct ar_layout {
    int ndim;
    size_t shape[AR_MAX_DIMS]; /* of the global tensor */
    size_t nbox;               /* 0: this rank holds nothing */
    ar_box box[AR_MAX_BOXES];
    int replica, replicas; /* which copy of these boxes this is, of how many */
} ar_layout;

/** Part `part` of `parts` along `dim`; AR_ERR_INDIVISIBLE names the dimension and both numbers where it does not divide
 *  (ari_split_uneven is for the vocabulary, the one dimension that need not). */
AR_NODISCARD ar_status ar_layout_shard(ar_layout *o, int ndim, const size_t *shape, int dim, int part, int parts);

AR_END_DECLS
#endif
