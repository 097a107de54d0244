/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_PACKED_H
#define ARI_GPU_PACKED_H

/* Quantised rows on a GPU. An integer q of at most 2^25 - 1 in magnitude is
 *     q = d0 + d1*2^7 + d2*2^14 + d3*2^21,  -64 <= d0, d1, d2 <= 63,  -16 <= d3 <= 16.
 * A row is cut into blocks of `width` terms; a block of a row is its runs of int8, one after the other, `width` bytes
 * each. The product of two integers takes the sums over digits i of the one and j of the other with i + j alike; the
 * runs lie in opposite orders in the two operands, so that such a sum is one product over a contiguous window of runs:
 *     imma16:  left d0 d1 d2 d3,  right d3 d2 d1 d0.
 * Karatsuba's rule, q = h*2^14 + l with two digits each, takes hh', ll' and (h + l)(h' + l'), and each of the first two
 * again from three products of digits or of sums of two. Those sums, at most 128 in magnitude and never +128, are runs
 * of their own:
 *     imma10:  left  d0 d1 d2 d3 d0+d1 d2+d3 d0+d2 d1+d3,
 *              right d0 d1 d2 d3 d0+d1 d2+d3 d1+d3 d0+d2. */
#include "gpu/runtime.h"

namespace ARI_GPU
{

/* What a device's ar_packed is. */
struct packed {
    size_t batch, rows, k;
    bool left;
    bool ten;         /* imma10 */
    size_t width;     /* terms of a block: a multiple of 16, which cuBLAS asks for; the last ones of the last are 0 */
    size_t blocks;    /* 0 where k is */
    size_t all_rows;  /* of a matrix in memory: a multiple of 4, which cuBLAS asks for; those past `rows` are 0 */
    size_t row_bytes; /* from one row to the next */
    ar_buf runs;      /* int8 [batch, all_rows, row_bytes] */

    size_t block_bytes() const
    {
        return width * (ten ? 8 : 4);
    }
};

inline packed *packed_of(ar_packed *p)
{
    return reinterpret_cast<packed *>(p);
}
inline const packed *packed_of(const ar_packed *p)
{
    return reinterpret_cast<const packed *>(p);
}

} // namespace ARI_GPU

#endif
