/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SKETCH_H
#define ANYRANK_SKETCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/dump.h"

AR_BEGIN_DECLS

/* A sketch: a few kilobytes that stand for a tensor. Every element enters with its index in the full tensor, so the
 * sketches of ranks' parts add up to the sketch of the full tensor, whatever the layout (docs/design/sketches.md).
 *
 * Let n be the number of elements of the full tensor, i an element's row-major index, x its value and u its bits.
 *   digest     sum over i of K(i / 64) * L(i % 64) * spread(u) modulo 2^64, with an odd random key K for each group of 64
 *              neighbouring elements, an odd random factor L for each lane, and spread a one-to-one map of 32 bits. The
 *              upper half of a value of 64 bits enters with keys of its own. Equal bits give equal digests. A change of
 *              one element always changes the digest; other pairs of tensors have the same one with a probability of
 *              about 2^-57, and of at most 2^-56 for four equal changes in two groups (docs/design/sketches.md)
 *   places     sum of hashes of the indices of NaN, of +infinity and of -infinity, modulo 2^64
 *   buckets    block b has the elements [b*B, (b+1)*B), B = max(4096, ceil(n/64) rounded up to 64). In each block
 *              bucket[c(i)] += s(i)*x, with a bucket c of 32 and a sign s drawn by a hash of i: a count sketch (Charikar,
 *              Chen, Farach-Colton 2002, doi:10.1007/3-540-45465-9_59). It is linear, and the sum of the squares of
 *              a block's buckets estimates the sum of the squares of its elements without bias, with a standard
 *              deviation of at most sqrt(2/32) of it (Alon, Matias, Szegedy 1996, doi:10.1145/237814.237823). Each
 *              half of a group fills every bucket once, from a place that is drawn for it
 *   rows       of a tensor with two dimensions or more, a digest of 32 bits for each row (all dimensions but the last),
 *              or for groups of as many neighbouring rows as leave at most 1,024: the lower half of the rows' share of
 *              the digest
 * Sums are in binary64 and do not depend on the processor. An element that is infinite or NaN counts as 0 in them. */
#define AR_SKETCH_BLOCKS 64
#define AR_SKETCH_LEAST 4096 /* elements of a block, so that the sketch of a small tensor is small */
#define AR_SKETCH_BUCKETS 32
#define AR_SKETCH_GROUP 64 /* elements for which one hash is computed */
#define AR_SKETCH_ROWS 1024

typedef struct ar_sketch {
    ar_dtype dtype;
    int ndim;
    size_t shape[AR_ST_MAX_DIMS]; /* of the full tensor */
    size_t elements;              /* of the full tensor */
    size_t block;                 /* elements of a block, but the last */
    size_t row;                   /* elements that have one row digest; 0: there are none */
    size_t blocks, rows;
    uint64_t digest;
    uint64_t count, zeros, nan, inf; /* elements that have entered; of these, how many are 0, NaN, infinite */
    uint64_t places;                 /* digest of the indices of NaN, of +infinity and of -infinity */
    uint64_t first, last;            /* smallest and largest index that is not 0; first > last: all are 0 */
    double sum, sum_squares, max_abs;
    bool summed;          /* made of summands: digests, counts, first, last and sum_squares mean nothing, and max_abs
                             is an upper bound */
    double *bucket;       /* [blocks * AR_SKETCH_BUCKETS] */
    uint32_t *row_digest; /* [rows] */
} ar_sketch;

/** Starts the sketch of a tensor of this shape, without elements. ndim: 0 .. AR_ST_MAX_DIMS. Errors: AR_ERR_DTYPE (of 4,
 *  6 bits, F8 or complex), AR_ERR_OVERFLOW, AR_ERR_MEMORY; ar_sketch_fini in any case. */
AR_NODISCARD ar_status ar_sketch_init(ar_sketch *s, ar_dtype dtype, int ndim, const size_t *shape);
void ar_sketch_fini(ar_sketch *s);
/** Adds the elements of a box; values: the tensor that the box describes, as a file has it. Borrows. Errors:
 *  AR_ERR_SHAPE (the box reaches out of the full tensor). */
AR_NODISCARD ar_status ar_sketch_add(ar_sketch *s, const void *values, const ar_dump_box *box);
/** Adds the sketch of other elements of the same tensor or, with `summand`, of another summand of it, whose digests mean
 *  nothing after that (`summed`). Errors: AR_ERR_SHAPE, AR_ERR_DTYPE (another tensor). */
AR_NODISCARD ar_status ar_sketch_merge(ar_sketch *s, const ar_sketch *part, bool summand);

/** Two sketches of a tensor, compared. */
typedef struct ar_sketch_difference {
    bool same_bits;      /* by their digests; false where one of them has none */
    double norm;         /* estimated root of the sum of squares of b - a */
    double norm_error;   /* standard deviation of the estimate, relative to it */
    double norm_a;       /* the root of a's sum of squares; estimated if a is summed or its squares overflow */
    double norm_a_error; /* standard deviation of that estimate, relative to it; 0: it is exact */
    double factor;       /* the f for which f*a is nearest to b; NaN: a is 0 */
    double factor_left;  /* norm of b - f*a, in parts of that of b - a */
    size_t blocks;       /* that differ: by more than 1e-3 of the largest */
    size_t block;        /* which of them differs most */
    double block_share;  /* of the sum of squares of b - a that is this block's */
    size_t rows, row;    /* row digests that differ, and the first of them; 0 and SIZE_MAX where there are none */
} ar_sketch_difference;
/** Errors: AR_ERR_SHAPE (another shape). */
AR_NODISCARD ar_status ar_sketch_compare(ar_sketch_difference *d, const ar_sketch *a, const ar_sketch *b);

/* --- files -------------------------------------------------------------------------------------------------------- */

/* A rank's sketches, FOLDER/rank-NNNNN.sketch: the 16 bytes "anyrank sketch 2", then a record for each captured step.
 * A record is appended whole; what a killed run left of its last one is not read. Numbers are little-endian:
 *   u64 bytes of the rest; u64 hash of the rest (ar_sketch_hash); u64 bytes of the text
 *   text, JSON: {"step": 1, "rank": 0, "world": 2, "mesh": [["dp", 2]], "tensors": [{"name": "x.weight:grad", "dtype":
 *     "F32", "shape": [8, 4], "part": "0:8,0:4", "term": "", "tiny": 0, "left_out": ""}, ..], "samples": [1, 2]}, in execution order. Ranks whose part
 *     and term are equal have copies; other parts of one term are other elements; other terms are other summands
 *   figures of each tensor, one after the other (ar_sketch_encode) */
#define AR_SKETCH_MAGIC "anyrank sketch 2" /* format 1 had other hashes */

/** Bytes of a sketch's figures in a file. */
size_t ar_sketch_bytes(const ar_sketch *s);
/** Writes them: u64 digest, count, zeros, nan, inf, places, first, last; f64 sum, sum_squares, max_abs; u64 blocks, a bit for each
 *  whose buckets are not all +0; u32 first row, rows; f64 bucket[..] of these blocks; u32 row_digest[..] of these rows,
 *  before and after which all are 0. */
void ar_sketch_encode(unsigned char *out, const ar_sketch *s);
/** Reads them into an initialised sketch; *used: how many of the n bytes they are. Errors: AR_ERR_FORMAT (n is too few,
 *  or they are of another tensor). */
AR_NODISCARD ar_status ar_sketch_decode(ar_sketch *s, const unsigned char *data, size_t n, size_t *used);
/** Hash of a record: FNV-1a of its 64-bit words, the last one filled up with zeros. */
uint64_t ar_sketch_hash(const unsigned char *data, size_t n);

/** A part of a tensor of which a rank has another copy than the first rank that has it. */
typedef struct ar_sketch_copies {
    int first_rank, rank;
    ar_sketch original, copy; /* of the part alone, in the full tensor's shape */
} ar_sketch_copies;

/** A tensor of a run of sketches, put together from all ranks. */
typedef struct ar_sketch_tensor {
    const char *name; /* as in a dump: "x.weight:grad@3" */
    int step;         /* the record's */
    size_t order;     /* position in the record of the first rank that has it */
    ar_sketch sketch; /* of the full tensor */
    int copies;       /* largest number of ranks that have one part */
    int differing;    /* the first rank whose copy has another digest; -1: none */
    const ar_sketch_copies
        *differing_copies; /* [differing_parts] of each part, the copy that is furthest from the first */
    size_t differing_parts;
    const char *left_out; /* why it cannot be compared; "": it can */
    bool by_run;          /* the run reports it itself */
    bool incomplete;      /* not all ranks have a record of its step */
    size_t tiny;          /* elements that are not 0 and below 2^-18 of their rank's largest; of gradients */
    uint32_t samples[2];  /* digests of the step's samples: in their order, and whatever that is; 0: not known */
} ar_sketch_tensor;

typedef struct ar_sketch_run ar_sketch_run;
/** Opens FOLDER with its rank-NNNNN.sketch files, and adds up the ranks' parts. A step counts if all ranks have its
 *  record; a rank's second record of a step is skipped if it equals the first, else refused. Files of ranks beyond the
 *  run's are not read. Errors: AR_ERR_NOT_FOUND (no such file), AR_ERR_FORMAT (the file, the record and what is wrong),
 *  AR_ERR_IO, AR_ERR_MEMORY. The caller closes *out. */
AR_NODISCARD ar_status ar_sketch_run_open(ar_sketch_run **out, const char *folder);
void ar_sketch_run_close(ar_sketch_run *run);
/** Tensors in execution order, by step. */
size_t ar_sketch_run_count(const ar_sketch_run *run);
const ar_sketch_tensor *ar_sketch_run_tensor(const ar_sketch_run *run, size_t index);
int ar_sketch_run_ranks(const ar_sketch_run *run);

AR_END_DECLS
#endif
