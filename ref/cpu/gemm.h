/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of contractions: packed operands, integer sums of exact contractions in tiles, and their rounding. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/device.h"

/* --- operands ----------------------------------------------------------------------------------------------------- */

/* Quantised rows [batch, rows, k] of integers with at most ARI_QUANTISED_BITS bits and a sign, row-major: int32, or
 * int16 if narrow. A kernel converts both operands to its form tile by tile while the integers are in the cache
 * (gemm_exact.c), so a cached weight takes no more memory than the weight. */
struct ar_packed {
    size_t batch, rows, k;
    size_t ld, step; /* distance from one row to the next, and from one matrix to the next */
    void *q;
    bool part; /* true for part of another operand's memory */
    bool narrow;
};

/** Returns the size of an integer in bytes. */
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

/* Sets the factors 2^(sign*c) of n = batch*k columns: 1 for a column with a NaN or an infinity (treated as c = 0), and
 * 0 for an all-zero column, whose products are all zero. */
typedef struct ari_shifts {
    double *wide;                 /* [n] */
    float *narrow;                /* [n]: the same as fp32; NULL if one of them is not a normal fp32 number */
    int32_t min_power, max_power; /* smallest and largest power in `narrow`, 0 included */
} ari_shifts;

/* --- tiles -------------------------------------------------------------------------------------------------------- */

/* An exact contraction is computed in tiles of the result that stay in the cache. gemm_exact.c divides the result into
 * tiles, distributes them over threads, rounds, adds the bias and applies the activation. A kernel (exact/) computes
 * the integer sums of one tile: in binary64 on every processor, or with instructions that some processors have. Every
 * kernel's sums are exact integers, so the choice, which a device makes when it is created (exact/paths.c), affects the
 * time but not the bits. */

/* Tiling of an [m, n] result, and the memory that a thread needs for one tile. Sizes are in elements. */
typedef struct ari_tile_plan {
    size_t tile_rows, tile_cols; /* size of a full tile */
    size_t down, across;         /* tiles */
    size_t slice;                /* length along K that is packed at a time; set by the kernel */
    size_t path;                 /* 8-byte words of the kernel's workspace, a multiple of 8; set by the kernel */
    const struct ari_panel_kernel *kernel; /* for kernels with panels (exact/panels.h), set by them */
    size_t wide;                           /* int64 words for sums over more terms than the kernel keeps in one sum */
    size_t panels; /* panels of a right matrix that is packed before the tiles, col_step rows each */
    size_t panel;  /* words of one panel, set by the path; 0: no panels */
    size_t row;    /* words for rounded values of accumulated products, which are not part of a result */
    bool narrow;   /* true for operands of 15 bits */
    bool direct;   /* true if `sum` should round like round_row; a kernel that does not support it clears this */
    bool parts;    /* true if sums are kept for part of the tile at a time; set by the kernel */
    size_t total;  /* 8-byte words per thread */
} ari_tile_plan;

/* Destination of a tile's rounded sums for a path that writes them itself (`direct`), instead of the sums. */
typedef struct ari_tile_result {
    float *y; /* NULL: nowhere */
    size_t ld;
    double *row; /* [rows] factors from ari_round_row_factor */
} ari_tile_result;

/* Rows [row, row + rows) and columns [col, col + cols) of one matrix of the result. */
typedef struct ari_tile {
    size_t matrix, row, rows, col, cols;
    const ar_packed *a, *b;
    const ari_tile_plan *plan;
    const double *panels; /* panels of all right matrices if plan->panel is not 0 */
    void *words;          /* plan->path words, 64-byte aligned */
    double *scale;        /* [cols], padded to whole panels */
    ari_tile_result result;
    int64_t *wide; /* [rows, 2*cols] */
    float *values; /* [1, or rows if direct; and rows of a product before; cols] if plan->row is not 0 */
} ari_tile;

typedef struct ari_exact_path {
    const char *name;        /* name as in ANYRANK_EXACT_PATH */
    const char *requirement; /* required processor features in words */
    bool (*supported)(void); /* returns whether this processor supports it and the operating system saves its
                                registers */
    size_t rows, cols;       /* size of the largest tile */
    size_t col_step;         /* tile columns are multiples of this, tile rows multiples of 8 */
    size_t terms;            /* longest sum that `sum` computes and round_row accepts */
    size_t least_terms;      /* shorter sums are computed by another path if the processor has one */
    /** Sets slice, path and direct for tiles of p->tile_rows by p->tile_cols over k terms. */
    void (*plan)(ari_tile_plan *p, size_t k);
    /** Packs the col_step rows of matrix `matrix` from row `row` on, if the plan sets `panel`. */
    void (*pack)(void *panel, const ar_packed *b, size_t matrix, size_t row);
    /** The tile's sums over k in [begin, end), at most `terms`, stay in t->words for the functions below. */
    void (*sum)(const ari_tile *t, size_t begin, size_t end);
    /** y[j] = fl32(fl64(S_ij)*row*t->scale[j]). */
    void (*round_row)(const ari_tile *t, size_t i, float *y, double row);
    /** Computes s[j] = S_ij, or adds S_ij to it, for sums of at most 8191 terms. */
    void (*row_to_int64)(const ari_tile *t, size_t i, int64_t *s, bool add);
    /** Computes s[2j] = S_ij >> 32 and s[2j+1] = S_ij & 0xffffffff, or adds to them. */
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
#if !defined(ARI_HAVE_X86_PATHS) /* tests that emulate the instructions define these for any processor */
#if defined(__x86_64__) && defined(__GNUC__)
#define ARI_HAVE_X86_PATHS 1
#else
#define ARI_HAVE_X86_PATHS 0
#endif
#endif
#if !defined(ARI_HAVE_ARM_PATHS)
/* clang 16, Apple's clang 15, and gcc support intrinsics for instructions that the compile target lacks */
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
/** Computes s[j] = S_j, or s[j] += S_j; S and the sum must fit in int64. */
void ari_halves_to_int64(int64_t *s, const double *hi, const double *lo, bool add, size_t n);
/** Computes s[2j] = S_j >> 32 and s[2j+1] = S_j & 0xffffffff, or adds to s. |hi|, |lo| <= 2^53. */
void ari_halves_to_limbs(int64_t *s, const double *hi, const double *lo, bool add, size_t n);

/** Do what ari_round_halves and ari_halves_to_limbs do, for int64 sums. */
void ari_round_sums(float *y, const int64_t *s, double row, const double *scale, size_t n);
/** Does the same with half the instructions, for |S_j| <= 2^51: sums of narrow integers. */
void ari_round_small_sums(float *y, const int64_t *s, double row, const double *scale, size_t n);
void ari_sums_to_limbs(int64_t *s, const int64_t *sums, bool add, size_t n);

/** Adds the first n values of each row to n elements of the order-independent accumulator, whose state starts at t, h,
 *  l; fresh: starts from zero instead. narrow: width of the slices. */
void ari_accumulate(uint8_t *t, int64_t *h, int64_t *l, const float *const *row, size_t rows, size_t n, bool fresh,
                    bool narrow);
