/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Index computations of the exact contraction's own kernel for compute capability 9.0 (gpu/sm90/body.h): a block's part
 * of the result, the layout of shared memory, the tensor core's reads and each thread's results. Plain functions, which
 * the kernel calls, and used to check the model of the machine (gpu/emulated/sm90.h).
 *
 * Sources: PTX ISA 8.7, sections "Asynchronous Warpgroup Level Matrix Instructions" (matrix descriptor, register
 * fragments of wgmma.mma_async.m64nNk32), "Tensors" (swizzling modes, out-of-bound access) and "mbarrier". The same
 * facts as code: CUTLASS, include/cute/arch/mma_sm90_desc.hpp (fields of the descriptor) and
 * include/cute/atom/mma_traits_sm90_gmma.hpp (CLayout_64xN; 128-byte swizzle as Swizzle<3,4,3>). */
#include "gpu/packed.h"
#include "gpu/tiles/plan.h"

/* Functions for both host and GPU. */
#if defined(__CUDACC__)
#define ARI_BOTH __host__ __device__
#else
#define ARI_BOTH
#endif

namespace ARI_GPU
{
namespace sm90
{

/* --- a block's part of the result --------------------------------------------------------------------------------- */

const uint32_t TILE = 128;      /* rows and columns of a block's part of the result */
const uint32_t STEP = 128;      /* terms, and bytes, that a stage holds of each row: one span of the swizzle */
const uint32_t MMA_TERMS = 32;  /* of one instruction, m64n128k32 */
const uint32_t GROUPS = 2;      /* consumer warpgroups */
const uint32_t GROUP_ROWS = 64; /* rows of the result that one of them has */
const uint32_t GROUP_THREADS = 128;
const uint32_t GROUP_WARPS = 4;
const uint32_t RESULTS = 64; /* of a thread: GROUP_ROWS * TILE / GROUP_THREADS */

/* A sum stays within int64 while it has at most 8191 terms (ARI_CONTRACT_BLOCK). Longer ones are cut: after each
 * segment what is above CARRY_BITS moves to a carry, so that a sum is carry*2^40 + rest. 8064*(2^25 - 1)^2 + 2^40 <
 * 2^63. */
const uint32_t SEGMENT_STEPS = 63;
const int CARRY_BITS = 40;

/* --- shared memory ------------------------------------------------------------------------------------------------ */

/* STAGES stages, each TILE rows of STEP bytes of the left operand, then of the right one; the area where a thread parks
 * results; the barriers. Offsets in bytes from a base that is a multiple of 1024, the span of the swizzle's pattern. */
const uint32_t STAGES = 5;
const uint32_t OPERAND_BYTES = TILE * STEP;
const uint32_t STAGE_BYTES = 2 * OPERAND_BYTES;
const uint32_t PARK_OFFSET = STAGES * STAGE_BYTES;
const uint32_t PARK_BYTES = GROUPS * RESULTS * GROUP_THREADS * 4;
const uint32_t FULL_OFFSET = PARK_OFFSET + PARK_BYTES;
const uint32_t EMPTY_OFFSET = FULL_OFFSET + STAGES * 8;
const uint32_t SHARED_BYTES = EMPTY_OFFSET + STAGES * 8;
const uint32_t SHARED_ALIGNMENT = 1024;
const uint32_t SHARED_MOST = 227 * 1024; /* that a block may ask for: CUDA programming guide, compute capability 9.0 */
static_assert(SHARED_BYTES + SHARED_ALIGNMENT <= SHARED_MOST, "shared memory of a block");

/* A thread's carries, and, once it has taken them back, PARKED results at a time with theirs: 12 bytes each. */
const uint32_t PARKED = 16;
static_assert(PARKED * 12 <= RESULTS * 4 && RESULTS % PARKED == 0, "a thread's part of the park");

/* Word i of a thread's part: threads next to each other use banks next to each other. */
ARI_ON_GPU inline uint32_t park_offset(uint32_t group, uint32_t thread, uint32_t word)
{
    return PARK_OFFSET + ((group * RESULTS + word) * GROUP_THREADS + thread) * 4;
}

/* TMA and the tensor core agree about where a byte lies (CU_TENSOR_MAP_SWIZZLE_128B): its 16-byte chunk's number within
 * the row, bits 4 to 6 of the address, is exchanged by bits 7 to 9, so that eight rows' chunks of one column lie in
 * different banks. The kernel itself never looks. */

/* The matrix descriptor of rows of STEP bytes from `address` on, which is a multiple of 1024, or of 32 terms further.
 * Bits 0-13: address / 16; 16-29: leading dimension offset, not used with a swizzle and 1; 32-45: bytes from 8 rows to
 * the next 8, / 16; 49-51: base offset, 0 where the pattern begins at a multiple of 1024; 62-63: 1, 128-byte swizzle.
 * */
ARI_ON_GPU inline uint64_t descriptor(uint32_t address)
{
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | 1ull << 16 | static_cast<uint64_t>(8 * STEP / 16) << 32 |
           1ull << 62;
}

/* --- the accumulator's fragments ---------------------------------------------------------------------------------- */

/* Row and column, within the warpgroup's 64 x 128, of a thread's result i. */
ARI_ON_GPU inline uint32_t fragment_row(uint32_t thread, uint32_t i)
{
    return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
}
ARI_ON_GPU inline uint32_t fragment_col(uint32_t thread, uint32_t i)
{
    return i / 4 * 8 + thread % 4 * 2 + i % 2;
}

/* --- the ring of stages ------------------------------------------------------------------------------------------- */

/* Producer and consumers go through the same stages in the same order. A stage's barrier is awaited by the parity of
 * its phase: `full` by `parity`, `empty` by the other one, whose wait is over at once in the first round. */
struct ring {
    uint32_t stage, parity;

    ARI_ON_GPU void next()
    {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

/* --- clusters ----------------------------------------------------------------------------------------------------- */

/* Blocks of a cluster share what they load: those in one row the left operand's rows, those in one column the right
 * one's. Each loads its share of both and sends it to all that need it. */
struct cluster {
    uint32_t rows, cols; /* blocks: 1 or 2 */

    ARI_BOTH uint32_t size() const
    {
        return rows * cols;
    }
    /* Which blocks, a bit each, are in the same row, and in the same column, as the one of this rank. */
    ARI_ON_GPU uint32_t row_mask(uint32_t rank) const
    {
        return ((1u << cols) - 1) << rank / cols * cols;
    }
    ARI_ON_GPU uint32_t col_mask(uint32_t rank) const
    {
        return (rows == 2 ? 1u | 1u << cols : 1u) << rank % cols;
    }
    /* Warps that must have read a stage of a block before anyone writes to it again. */
    ARI_ON_GPU uint32_t readers() const
    {
        return (rows + cols - 1) * GROUPS * GROUP_WARPS;
    }
};

/* --- the work ----------------------------------------------------------------------------------------------------- */

/* The sum takes high*2^32 + low times the number of a plane (gpu/packed.h). Low is signed: then a plane takes one
 * 32-bit multiply-add into 64 bits, and one into the upper half. */
struct weighted_product {
    uint32_t a, b, count; /* runs, as run_product has them */
    int32_t low, high;
};

/* One contraction, or the part of one that a band leaves; see work_of. */
struct work {
    result x;
    uint32_t batch;
    bool serial;                         /* one block has all matrices, in their order */
    uint32_t row, row_end, col, col_end; /* of the result, what is computed */
    uint32_t row_tiles, col_tiles;       /* of that */
    cluster shape;
    uint32_t clusters;                  /* tiles of a cluster's size, in all */
    uint32_t blocks, runs, term, steps; /* blocks of terms, runs of a block, a run's first term, steps from there */
    uint32_t planes;
    weighted_product product[PLANES_10];
};

/* A block's part of the result. */
struct place {
    uint32_t rank;          /* in the cluster */
    uint32_t matrix, count; /* the first, and how many */
    uint32_t row, col;      /* of the first result; those past the work's end are of padding */
};

const uint32_t BAND = 6; /* rows of clusters that are gone through together: what 132 blocks load is about a square */

ARI_BOTH inline uint32_t ceil_div32(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* The place of tile number `index` of a cluster's size: matrix after matrix (serial: only one), band after band, column
 * after column. */
ARI_ON_GPU inline place place_of(const work &w, uint32_t index, uint32_t rank)
{
    const uint32_t down = ceil_div32(w.row_tiles, w.shape.rows), across = ceil_div32(w.col_tiles, w.shape.cols);
    const uint32_t in_matrix = index % (down * across), band = in_matrix / (BAND * across) * BAND;
    const uint32_t in_band = in_matrix % (BAND * across), height = down - band < BAND ? down - band : BAND;
    place p;
    p.rank = rank;
    p.matrix = w.serial ? 0 : index / (down * across);
    p.count = w.serial ? w.batch : 1;
    p.row = w.row + ((band + in_band % height) * w.shape.rows + rank / w.shape.cols) * TILE;
    p.col = w.col + (in_band / height * w.shape.cols + rank % w.shape.cols) * TILE;
    return p;
}

/* The terms of a segment, in one plane: steps [from, to) of the runs of a block. */
struct span {
    uint32_t block, from, to;
};

/* Both, producer and consumers, go through a block's terms like this: plane(product, span) for each plane of a segment,
 * whose chunks are, for each of the product's runs, each step; then segment(more). */
template <class PLANE, class SEGMENT> ARI_ON_GPU inline void walk(const work &w, PLANE plane, SEGMENT segment)
{
    for (uint32_t block = 0; block < w.blocks; block++)
        for (uint32_t from = 0; from < w.steps; from += SEGMENT_STEPS) {
            const span s = {block, from, w.steps - from < SEGMENT_STEPS ? w.steps : from + SEGMENT_STEPS};
            for (uint32_t p = 0; p < w.planes; p++)
                plane(w.product[p], s);
            segment(block + 1 < w.blocks || s.to < w.steps);
        }
}

/* --- on the host -------------------------------------------------------------------------------------------------- */

/* The tensor map of an operand: bytes [matrix, row, run of any block, term], the last dimension first. Terms past the
 * part's last, a multiple of 16 but seldom of STEP, are outside the tensor and read as 0, though other bytes follow in
 * memory; so are rows past the last. */
struct tensor {
    const int8_t *data;
    uint64_t extent[4]; /* width, runs, rows, matrices */
    uint64_t stride[3]; /* bytes: a run, a row, a matrix */
    uint32_t box_rows;  /* the box: STEP terms of one run of so many rows */
};

inline tensor tensor_of(const packed &p, const ari_tile_part &part, const int8_t *runs, uint32_t sharers)
{
    tensor t = {};
    t.data = runs;
    t.extent[0] = part.term + part.terms;
    t.extent[1] = p.blocks * (p.ten ? RUNS_10 : RUNS_16);
    t.extent[2] = p.rows;
    t.extent[3] = p.batch;
    t.stride[0] = p.width;
    t.stride[1] = p.row_bytes;
    t.stride[2] = p.step;
    t.box_rows = TILE / sharers;
    return t;
}

/* The multiple of 2^32 and the signed rest. */
inline weighted_product weighted(const run_product &p, int64_t weight)
{
    const int32_t low = static_cast<int32_t>(static_cast<uint32_t>(weight));
    return {static_cast<uint32_t>(p.a), static_cast<uint32_t>(p.b), static_cast<uint32_t>(p.count), low,
            static_cast<int32_t>((weight - low) / 4294967296)};
}

/* A dimension's tiles in pairs where none, or few, are left over. */
inline uint32_t pairs(uint32_t tiles)
{
    return tiles % 2 == 0 || tiles >= 15 ? 2 : 1;
}

/* True if the non-empty operands are within the limits of 32-bit indices, a tensor map (extents up to 2^32, strides
 * below 2^40 bytes), a grid and a carry (128 segments). */
inline bool fits(const packed &a, const packed &b)
{
    const size_t segments = a.blocks * ceil_div(ceil_div(a.width, STEP), SEGMENT_STEPS);
    const size_t most = static_cast<size_t>(1) << 30, stride = static_cast<size_t>(1) << 40;
    return a.k > 0 && segments <= 128 && a.rows < most && b.rows < most && a.batch < most / TILE && a.step < stride &&
           b.step < stride && ceil_div(a.rows, TILE) + 1 <= most / (ceil_div(b.rows, TILE) + 1) / a.batch;
}

/* The weights of gpu/packed.h's sum_of_16 and sum_of_10, which are linear, plane by plane. H and L: those of the
 * products of the two upper digits, and of the two lower ones, among themselves; each is Karatsuba's 2^14 hh' +
 * 2^7 ((h + l)(h' + l') - hh' - ll') + ll' = 16256 hh' + 128 (h + l)(h' + l') - 127 ll'. */
const int64_t H = (1 << 28) - (1 << 14), L = 1 - (1 << 14);
const int64_t WEIGHTS_16[PLANES_16] = {1, 1 << 7, 1 << 14, 1 << 21, 1 << 28, 1ll << 35, 1ll << 42};
const int64_t WEIGHTS_10[PLANES_10] = {-127 * L, 16256 * L, -127 * H, 16256 * H, 128 * L,
                                       128 * H,  1 << 21,   1 << 21,  1 << 14,   1 << 28};

/* Products of one weight whose runs follow each other are one plane. */
inline uint32_t weigh(weighted_product *to, bool ten)
{
    const run_product *products = ten ? PRODUCTS_10 : PRODUCTS_16;
    const int64_t *weights = ten ? WEIGHTS_10 : WEIGHTS_16;
    uint32_t n = 0;
    for (size_t i = 0; i < (ten ? PLANES_10 : PLANES_16); i++) {
        const run_product &p = products[i], &last = products[i > 0 ? i - 1 : 0];
        if (i > 0 && weights[i] == weights[i - 1] && p.a == last.a + last.count && p.b == last.b + last.count)
            to[n - 1].count += static_cast<uint32_t>(p.count);
        else
            to[n++] = weighted(p, weights[i]);
    }
    return n;
}

/* The operands fit. The part's columns may end in the right operand's padding. */
inline work work_of(const packed &a, const packed &b, const ari_tile_part &part, bool serial)
{
    work w = {};
    w.x = {a.rows, b.rows};
    w.batch = static_cast<uint32_t>(a.batch);
    w.serial = serial;
    w.row = static_cast<uint32_t>(part.row);
    w.row_end = static_cast<uint32_t>(part.row + part.rows);
    w.col = static_cast<uint32_t>(part.col);
    w.col_end = static_cast<uint32_t>(part.col + part.cols < b.rows ? part.col + part.cols : b.rows);
    w.row_tiles = ceil_div32(w.row_end - w.row, TILE);
    w.col_tiles = ceil_div32(w.col_end - w.col, TILE);
    w.shape = {pairs(w.row_tiles), pairs(w.col_tiles)};
    w.blocks = static_cast<uint32_t>(a.blocks);
    w.runs = a.ten ? RUNS_10 : RUNS_16;
    w.term = static_cast<uint32_t>(part.term);
    w.steps = static_cast<uint32_t>(ceil_div(part.terms, STEP));
    w.planes = weigh(w.product, a.ten);
    w.clusters = ceil_div32(w.row_tiles, w.shape.rows) * ceil_div32(w.col_tiles, w.shape.cols) * (serial ? 1 : w.batch);
    return w;
}

} // namespace sm90
} // namespace ARI_GPU
