/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_GEMM_TILES_H
#define ARI_CPU_GEMM_TILES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ref/cpu/packed.h"

/* The exact contraction is made in tiles of the result that stay in the cache. gemm_exact.c cuts the result, spreads
 * the tiles over the threads, rounds, adds the bias and applies the activation. A path makes the integer sums of one
 * tile: in binary64 everywhere (gemm_portable.c), or with AVX-512 IFMA (gemm_ifma.c). The sums are integers that are
 * exact on every path, so the choice changes the time and never the bits. */

/* How an [m, n] result is cut, and what a thread needs to make one tile. Sizes in elements. */
typedef struct ari_tile_plan {
    size_t tile_rows, tile_cols; /* of a full tile */
    size_t down, across;         /* tiles */
    size_t slice;                /* of K, packed at a time: set by the path */
    size_t path;                 /* 8-byte words of the path's own workspace, a multiple of 8: set by the path */
    size_t wide;                 /* int64 for sums over more terms than the path keeps in one */
    size_t row;                  /* words of a row of rounded values, where no result holds it */
    size_t total;                /* 8-byte words a thread */
} ari_tile_plan;

/* Rows [row, row + rows) and columns [col, col + cols) of matrix `at` of the result. */
typedef struct ari_tile {
    size_t at, row, rows, col, cols;
    const ar_packed *a, *b;
    const ari_tile_plan *plan;
    void *words;   /* plan->path words, 64-byte aligned */
    double *scale; /* [cols] */
    int64_t *wide; /* [rows, 2*cols] */
    float *values; /* [cols], where plan->row is not 0 */
} ari_tile;

typedef struct ari_exact_path {
    size_t rows, cols; /* of the largest tile */
    size_t col_step;   /* tile columns come in multiples of it, tile rows in multiples of 8 */
    size_t terms;      /* the longest sum that `sum` makes and round_row takes */
    /** Sets slice and path for tiles of p->tile_rows by p->tile_cols over k terms. */
    void (*plan)(ari_tile_plan *p, size_t k);
    /** The tile's sums over k in [from, to), at most `terms`, stay in t->words for the functions below. */
    void (*sum)(const ari_tile *t, size_t from, size_t to);
    /** y[j] = fl32(fl64(S_ij)*row*t->scale[j]). */
    void (*round_row)(const ari_tile *t, size_t i, float *y, double row);
    /** s[j] = S_ij, or added to it, of at most 8191 terms. */
    void (*row_to_int64)(const ari_tile *t, size_t i, int64_t *s, bool add);
    /** s[2j] = S_ij >> 32, s[2j+1] = S_ij & 0xffffffff, or added to them. */
    void (*row_to_limbs)(const ari_tile *t, size_t i, int64_t *s, bool add);
} ari_exact_path;

extern const ari_exact_path ari_exact_portable;
extern const ari_exact_path ari_exact_ifma; /* defined where ARI_HAVE_IFMA is 1 */
#if !defined(ARI_HAVE_IFMA)                 /* tests that emulate the instructions set it for any processor */
#if defined(__x86_64__) && defined(__GNUC__)
#define ARI_HAVE_IFMA 1
#else
#define ARI_HAVE_IFMA 0
#endif
#endif

static inline size_t ari_round_up8(size_t n)
{
    return (n + 7) & ~(size_t)7;
}

#endif
