/* SPDX-License-Identifier: Apache-2.0 */
/* Inside of the contractions: packed operands, the integer sums of an exact one in tiles, and how they are rounded. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/device.h"

/* --- operands ----------------------------------------------------------------------------------------------------- */

/* Quantised rows: [batch, rows, k] integers of at most ARI_QUANTISED_BITS bits and a sign, row-major: int32, narrow
 * ones int16. A path brings either operand into its own form tile by tile while the integers are in the cache
 * (gemm_exact.c), so that a cached weight costs what the weight costs. */
struct ar_packed {
    size_t batch, rows, k;
    size_t ld, step; /* integers from one row to the next, from one matrix to the next */
    void *q;
    bool part; /* of another's memory */
    bool narrow;
};

/** Bytes of an integer. */
static inline size_t ari_packed_width(bool narrow)
{
    return narrow ? sizeof(int16_t) : sizeof(int32_t);
}

/** The integers of row `row` of matrix `matrix` from term k on. */
static inline void *ari_packed_at(const ar_packed *p, size_t matrix, size_t row, size_t k)
{
    return (char *)p->q + (matrix * p->step + row * p->ld + k) * ari_packed_width(p->narrow);
}

#define ARI_QUANTISED_BITS 25
#define ARI_QUANTISED_MAX ((1 << ARI_QUANTISED_BITS) - 1)

/* The factors 2^(sign*c) of n = batch*k columns: 1 for a column with a NaN or an infinity (it counts as c = 0), 0 for
 * an all-zero column (every product is zero, so it takes no part). */
typedef struct ari_shifts {
    double *wide;                 /* [n] */
    float *narrow;                /* [n]: the same as fp32; NULL if one of them is not a normal fp32 number */
    int32_t min_power, max_power; /* of the powers in `narrow`: the smallest and the largest, 0 among them */
} ari_shifts;

/* --- tiles -------------------------------------------------------------------------------------------------------- */

/* The exact contraction is made in tiles of the result that stay in the cache. gemm_exact.c cuts the result, spreads
 * the tiles over the threads, rounds, adds the bias and applies the activation. A path makes the integer sums of one
 * tile (exact/): in binary64 everywhere, or with instructions that some processors have. The sums are integers that are
 * exact on every path, so the choice, which a device makes when it is created (exact/paths.c), changes the time and
 * never the bits. */

/* Tiling of an [m, n] result, and the memory that a thread needs for one tile. Sizes in elements. */
typedef struct ari_tile_plan {
    size_t tile_rows, tile_cols; /* of a full tile */
    size_t down, across;         /* tiles */
    size_t slice;                /* of K, packed at a time: set by the path */
    size_t path;                 /* 8-byte words of the path's own workspace, a multiple of 8: set by the path */
    const struct ari_panel_kernel *kernel; /* of a path by panels (exact/panels.h): set by it */
    size_t wide;                           /* int64 for sums over more terms than the path keeps in one */
    size_t panels; /* of a right matrix that is packed before the tiles, of col_step rows each */
    size_t panel;  /* words of one panel, set by the path; 0: no panels */
    size_t row;    /* words of rounded values that no result holds, of products that are accumulated */
    bool narrow;   /* of operands of 15 bits */
    bool direct;   /* `sum` is to round as round_row does; a path that does not clears it */
    bool parts;    /* then sums are kept of a part of the tile at a time: set by the path */
    size_t total;  /* 8-byte words a thread */
} ari_tile_plan;

/* Destination of a tile's rounded sums for a path that writes them itself (`direct`), instead of the sums. */
typedef struct ari_tile_result {
    float *y; /* NULL: nowhere */
    size_t ld;
    double *row; /* [rows]: ari_round_row_factor */
} ari_tile_result;

/* Rows [row, row + rows) and columns [col, col + cols) of one matrix of the result. */
typedef struct ari_tile {
    size_t matrix, row, rows, col, cols;
    const ar_packed *a, *b;
    const ari_tile_plan *plan;
    const double *panels; /* panels of all right matrices if plan->panel is not 0 */
    void *words;          /* plan->path words, 64-byte aligned */
    double *scale;        /* [cols], with room for whole panels */
    ari_tile_result result;
    int64_t *wide; /* [rows, 2*cols] */
    float *values; /* [1, or rows if direct; and rows of a product before; cols] if plan->row is not 0 */
} ari_tile;

typedef struct ari_exact_path {
    const char *name;        /* as ANYRANK_EXACT_PATH has it */
    const char *requirement; /* of the processor, in words */
    bool (*supported)(void); /* whether this processor has it, and the operating system saves its registers */
    size_t rows, cols;       /* of the largest tile */
    size_t col_step;         /* tile columns come in multiples of it, tile rows in multiples of 8 */
    size_t terms;            /* the longest sum that `sum` makes and round_row takes */
    size_t least_terms;      /* shorter sums are computed by another path if the processor has one */
    /** Sets slice, path and direct for tiles of p->tile_rows by p->tile_cols over k terms. */
    void (*plan)(ari_tile_plan *p, size_t k);
    /** Packs the col_step rows of matrix `matrix` from row `row` on, if the plan sets `panel`. */
    void (*pack)(void *panel, const ar_packed *b, size_t matrix, size_t row);
    /** The tile's sums over k in [begin, end), at most `terms`, stay in t->words for the functions below. */
    void (*sum)(const ari_tile *t, size_t begin, size_t end);
    /** y[j] = fl32(fl64(S_ij)*row*t->scale[j]). */
    void (*round_row)(const ari_tile *t, size_t i, float *y, double row);
    /** s[j] = S_ij, or added to it, of at most 8191 terms. */
    void (*row_to_int64)(const ari_tile *t, size_t i, int64_t *s, bool add);
    /** s[2j] = S_ij >> 32, s[2j+1] = S_ij & 0xffffffff, or added to them. */
    void (*row_to_limbs)(const ari_tile *t, size_t i, int64_t *s, bool add);
} ari_exact_path;

/** Panel `number` of the right matrix that is the tile's. */
static inline const void *ari_tile_panel(const ari_tile *t, size_t number)
{
    return t->panels + (t->matrix * t->plan->panels + number) * t->plan->panel;
}

extern const ari_exact_path ari_exact_portable;
/* Defined if ARI_HAVE_X86_PATHS or ARI_HAVE_ARM_PATHS is 1. */
extern const ari_exact_path ari_exact_amx, ari_exact_avx512vnni, ari_exact_avxvnni, ari_exact_avx2;
extern const ari_exact_path ari_exact_smmla, ari_exact_sdot, ari_exact_neon;
#if !defined(ARI_HAVE_X86_PATHS) /* tests that emulate the instructions set them for any processor */
#if defined(__x86_64__) && defined(__GNUC__)
#define ARI_HAVE_X86_PATHS 1
#else
#define ARI_HAVE_X86_PATHS 0
#endif
#endif
#if !defined(ARI_HAVE_ARM_PATHS)
/* clang 16, Apple's 15, and gcc have intrinsics of instructions that the target at large lacks. */
#if defined(__aarch64__) && defined(__GNUC__) && \
    (!defined(__clang__) || __clang_major__ >= 16 || (defined(__APPLE__) && __clang_major__ >= 15))
#define ARI_HAVE_ARM_PATHS 1
#else
#define ARI_HAVE_ARM_PATHS 0
#endif
#endif

static inline size_t ari_round_up8(size_t n)
{
    return (n + 7) & ~(size_t)7;
}

/* --- from sums to numbers ----------------------------------------------------------------------------------------- */

/* Row loops from exact integer sums to fp32 and to int64 limbs. A sum is given as two binary64 halves with integer
 * values, S = hi*2^13 + lo (exact/portable.c), or as an int64. The result does not depend on where a row is split. */

/** y[j] = fl32(fl64(S_j)*row*scale[j]) for |hi|, |lo| <= 2^53. */
void ari_round_halves(float *y, const double *hi, const double *lo, double row, const double *scale, size_t n);
/** s[j] = S_j, or s[j] += S_j; S and the sum must fit int64. */
void ari_halves_to_int64(int64_t *s, const double *hi, const double *lo, bool add, size_t n);
/** s[2j] = S_j >> 32, s[2j+1] = S_j & 0xffffffff, or added to what s holds. |hi|, |lo| <= 2^53. */
void ari_halves_to_limbs(int64_t *s, const double *hi, const double *lo, bool add, size_t n);

/** ari_round_halves and ari_halves_to_limbs of sums that are int64. */
void ari_round_sums(float *y, const int64_t *s, double row, const double *scale, size_t n);
/** The same, in half the instructions, for |S_j| <= 2^51: sums of narrow integers. */
void ari_round_small_sums(float *y, const int64_t *s, double row, const double *scale, size_t n);
void ari_sums_to_limbs(int64_t *s, const int64_t *sums, bool add, size_t n);

/** Adds the first n values of each row to n elements of the order-independent accumulator, whose state starts at t, h,
 *  l; fresh: to zeros, whatever these hold. narrow: its slices are. */
void ari_accumulate(uint8_t *t, int64_t *h, int64_t *l, const float *const *row, size_t rows, size_t n, bool fresh,
                    bool narrow);
