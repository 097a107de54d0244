/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Quantised rows on a GPU, as digits (ref/numerics/digits.h). A row is divided into blocks of `width` terms. A block
 * stores its runs of int8 one after the other, `width` bytes each. The left and right operands have opposite orders of
 * runs, so that the sum of all products of digits with equal weight is one product over a contiguous window of runs:
 *    imma16:  left d0 d1 d2 d3,  right d3 d2 d1 d0.
 * Of Karatsuba's ten products, product i multiplies run i of the left operand by run i of the right one, at a constant
 * distance from the preceding product, so that one call computes all ten; for that purpose two runs are stored twice:
 *    imma10:  left  d0 d1 d2 d3 d0+d1 d2+d3 d0+d2 d1+d3 d0+d2 d1+d3,
 *             right d0 d1 d2 d3 d0+d1 d2+d3 d1+d3 d0+d2 d0+d2 d1+d3. */
#include "gpu/kernels.h"
#include "ref/numerics/integer_sum.h"

namespace ARI_GPU
{

const size_t RUNS_16 = 4, RUNS_10 = 10; /* number of runs in a block of a row */

/* A device's ar_packed. */
struct packed {
    size_t batch, rows, k;
    bool is_left, narrow;
    bool ten;         /* imma10 */
    size_t width;     /* terms in a block, padded with zeros to a multiple of 16, which cuBLAS requires */
    size_t blocks;    /* number of blocks; 0 if k is 0 */
    size_t all_rows;  /* rows of a matrix in memory, padded with zeros to a multiple of 4, which cuBLAS requires */
    size_t row_bytes; /* distance between rows in bytes */
    size_t step;      /* distance between matrices in bytes */
    ar_buf runs;      /* int8 [batch, all_rows, row_bytes] */
    bool part;        /* true for part of another operand's memory, whose padding rows contain arbitrary data */

    unsigned form() const
    {
        const unsigned left_form = AR_PACKED_LEFT, narrow_form = AR_PACKED_NARROW;
        return (is_left ? left_form : 0u) | (narrow ? narrow_form : 0u);
    }
    size_t block_bytes() const
    {
        return width * (ten ? RUNS_10 : RUNS_16);
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

/* --- from int8 products to sums ---------------------------------------------------------------------------------- */

/* numerics.md, "Contraction", step 4: for each block of terms, a tile of the result is 7 or 10 planes of int32 written
 * by blas_int8; an element's sum combines its value in each plane. */

/* One int8 product: `count` runs of the left operand from run `a` on, multiplied by those of the right operand from `b`
 * on. */
struct run_product {
    size_t a, b, count;
};

/* Plane w: the products of digits i and j with i + j = w. */
const size_t PLANES_16 = 7;
const run_product PRODUCTS_16[PLANES_16] = {{0, 3, 1}, {0, 2, 2}, {0, 1, 3}, {0, 0, 4},
                                            {1, 0, 3}, {2, 0, 2}, {3, 0, 1}};
/* Each run with its counterpart: digits, sums of two digits, these sums crosswise, and once more each with itself. */
const size_t PLANES_10 = RUNS_10;
const run_product PRODUCTS_10[PLANES_10] = {{0, 0, 1}, {1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 1},
                                            {5, 5, 1}, {6, 6, 1}, {7, 7, 1}, {8, 8, 1}, {9, 9, 1}};

/* high*2^32 + low, 0 <= low < 2^32. */
struct wide_sum {
    int64_t high, low;
};

/* high*2^28 + low, both below 2^53 in magnitude. */
struct partial_sum {
    int64_t high, low;
};

ARI_ON_GPU inline partial_sum sum_of_16(const int64_t *p)
{
    return {p[4] + p[5] * 128 + p[6] * 16384, p[0] + p[1] * 128 + p[2] * 16384 + p[3] * 2097152};
}

/* (h*2^7 + l)(h'*2^7 + l') from hh', ll' and (h + l)(h' + l'). */
ARI_ON_GPU inline int64_t karatsuba(int64_t high, int64_t low, int64_t sum_product)
{
    return high * 16384 + (sum_product - high - low) * 128 + low;
}

ARI_ON_GPU inline partial_sum sum_of_10(const int64_t *p)
{
    const int64_t low = karatsuba(p[1], p[0], p[4]), high = karatsuba(p[3], p[2], p[5]);
    const int64_t cross = p[9] * 16384 + (p[6] + p[7]) * 128 + p[8] - high - low;
    const int64_t rest = cross & 16383;
    return {high + (cross - rest) / 16384, low + rest * 16384}; /* the division leaves no remainder */
}

/* The planes of a tile of several matrices: plane `plane` of block `block` lies (block*planes + plane)*step further. */
template <bool TEN> struct tile_sums {
    const int32_t *words;
    size_t step, ld, blocks;

    /* The sums of four columns from `col` on, a multiple of 4, in line `line` of the tile: line = matrix*rows + row. */
    ARI_ON_GPU void load_sums(size_t line, size_t col, wide_sum (&sums)[4]) const
    {
        const size_t planes = TEN ? PLANES_10 : PLANES_16;
        const int32_t *src = words + line * ld + col;
        partial_sum sum[4] = {{0, 0}, {0, 0}, {0, 0}, {0, 0}};
        for (size_t block = 0; block < blocks; block++, src += planes * step) {
            four<int32_t> p[planes];
            for (size_t i = 0; i < planes; i++)
                p[i] = load_whole<4>(src + i * step);
            for (size_t j = 0; j < 4; j++) {
                int64_t plane_values[planes];
                for (size_t i = 0; i < planes; i++)
                    plane_values[i] = p[i].lane[j];
                const partial_sum part = TEN ? sum_of_10(plane_values) : sum_of_16(plane_values);
                sum[j] = {sum[j].high + part.high, sum[j].low + part.low};
            }
        }
        for (size_t j = 0; j < 4; j++)
            sums[j] = widen_sum(sum[j]);
    }

    ARI_ON_GPU static wide_sum widen_sum(const partial_sum &sum)
    {
        const int64_t low_bits = sum.low & 0xfffffff, high = sum.high + (sum.low - low_bits) / 268435456;
        const int64_t rest = high & 15; /* sum = high*2^28 + low_bits */
        return {(high - rest) / 16, rest * 268435456 + low_bits};
    }
};

} // namespace ARI_GPU
