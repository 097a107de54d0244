/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/tensor.h"

/* Private functions of anyrank/tensor.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Returns the number of bits of one element; 0 for an unknown dtype. */
size_t ari_dtype_bits(ar_dtype t);
/** The inverse of ar_dtype_name (case-sensitive). AR_ERR_DTYPE if there is none. */
AR_NODISCARD ar_status ari_dtype_parse(ar_dtype *t, const char *name);
/** The n elements from `data` on, as a view of one dimension. */
ar_tensor ari_tensor_flat(ar_dtype dtype, ar_buf data, size_t n);
/** True if the elements lie in row-major order without gaps. */
bool ari_tensor_is_contiguous(const ar_tensor *t);
/** Returns the number of bytes from the first element's start to the last element's end. */
size_t ari_tensor_span(const ar_tensor *t);
/** The 2-D view [rows, cols] of a contiguous tensor, cols its last extent. */
ar_tensor ari_tensor_rows(const ar_tensor *t);
/** Returns a view with the last two dimensions swapped (ndim >= 2). */
ar_tensor ari_tensor_transposed(const ar_tensor *t);
/** Checks that the part lies inside matrices of this size. Errors: AR_ERR_SHAPE; label: names the tensor in the
 *  message. */
AR_NODISCARD ar_status ari_part_check(const ar_part *p, size_t batch, size_t rows, size_t cols, const char *label);
/** Returns that part of a tensor as a view of three dimensions. The tensor's last two dimensions are rows and columns,
 *  and its matrices are equally spaced. */
ar_tensor ari_tensor_part(const ar_tensor *t, const ar_part *p);
/** Describes the whole tensor as replica `replica` of `replicas`. */
AR_NODISCARD ar_status ari_layout_replicate(ar_layout *o, int ndim, const size_t *shape, int replica, int replicas);
/** Does the same as ar_layout_shard with parts of ceil(n/parts), of which the last ones are shorter or empty. */
AR_NODISCARD ar_status ari_layout_shard_uneven(ar_layout *o, int ndim, const size_t *shape, int dim, int part,
                                               int parts);
/** Describes `n` blocks of extents block[0..n) that are consecutive along `dim` and each evenly sharded: q|k|v. */
AR_NODISCARD ar_status ari_layout_packed(ar_layout *o, int ndim, const size_t *shape, int dim, const size_t *block,
                                         int n, int part, int parts);
/** Extent of the local tensor along `dim` (the sum of the boxes' extents along a packed dimension). */
size_t ari_layout_local(const ar_layout *o, int dim);
/** Splits unevenly, as every uneven split does: part i of n elements is [start, start + count) with count =
 *  ceil(n/parts), clipped at n. */
void ari_split_uneven(size_t n, int parts, int part, size_t *start, size_t *count);

AR_END_DECLS
