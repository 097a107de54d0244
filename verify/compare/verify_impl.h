/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>

#include "anyrank/verify.h"
#include "ref/core/size.h"
#include "verify/read/roles.h"
#include "verify/reference/tasks.h"

/* Parts of ar_verify.
 *
 * A tensor is compared in blocks of consecutive elements. One thread processes each block in chunks that fit a core's
 * cache. A first pass compares bytes and counts NaN. Only tensors that differ are read again for statistics. All
 * figures except sums are independent of the order; sums are combined by chunk and by block, so no figure depends on
 * the number of threads. */

#define ARI_CHUNK ((size_t)1 << 13) /* elements */
#define ARI_SCAN_BLOCK ((size_t)1 << 20)
#define ARI_MAP_ROWS 48
#define ARI_MAP_COLS 96

/* --- values (verify_stats.c) ------------------------------------------------------------------------------------- */

/* Bit layout of a dtype's elements. Complex numbers are pairs of their parts. */
typedef struct ari_format {
    ar_dtype dtype;   /* dtype of a single number */
    size_t bits;      /* bits of a single number */
    size_t parts;     /* numbers per element: 2 for complex dtypes */
    bool is_float;    /* true for a float, false for an integer or BOOL */
    bool is_signed;   /* a sign bit, or two's complement */
    int mantissa;     /* floats: number of stored mantissa bits */
    int min_exponent; /* floats: exponent of the smallest normal number */
    uint64_t finite;  /* floats: bit pattern of the largest finite magnitude */
    bool has_inf;     /* floats: true if the next bit pattern is infinity, followed by NaNs; false if all larger
                         patterns are NaN */
} ari_format;
ari_format ari_format_of(ar_dtype t);

/* A chunk of one side. Numbers below 8 bits are unpacked to a byte each. */
typedef struct ari_chunk {
    const unsigned char *raw; /* values in the tensor's memory, or in `space` */
    unsigned char *space;     /* [ARI_CHUNK * 8] scratch */
    double *value;            /* [ARI_CHUNK] */
} ari_chunk;
/** Points chunk->raw at numbers [start, start + n) of the tensor. Errors: those of ar_dump_read, AR_ERR_DTYPE. */
AR_NODISCARD ar_status ari_chunk_raw(ari_chunk *c, const ar_dump_tensor *t, const ari_format *f, size_t start,
                                     size_t n);
/** Returns the size in bytes of n numbers in chunk->raw. */
size_t ari_raw_bytes(const ari_format *f, size_t n);
/** Counts NaN and infinities among n numbers. */
void ari_count_special(const ari_format *f, const unsigned char *raw, size_t n, size_t *nan, size_t *inf);
/** Computes |b - a| for number i without rounding the operands first. */
double ari_exact_difference(const ari_format *fa, const unsigned char *a, const ari_format *fb, const unsigned char *b,
                            size_t i);
/** Returns the pages of data that has been read to the system. */
void ari_release(const ar_dump_tensor *t, const ari_format *f, size_t start, size_t n);

/* --- tensors of dumps (doubt.c, repeated.c) ----------------------------------------------------------------------- */

enum { ARI_LOCKSTEP_TENSORS = 5, ARI_LOCKSTEP_ELEMENTS = 512 };
/* A walk over elements [start, start + n) of up to ARI_LOCKSTEP_TENSORS tensors; the values of a NULL tensor are 0. */
typedef struct ari_lockstep {
    const ar_dump_tensor *const *tensor;
    int tensors;
    size_t start, n;
    size_t index;                   /* index of the current element */
    double x[ARI_LOCKSTEP_TENSORS]; /* x[k] of the k-th tensor */
    ar_status status;               /* status of reading, whose failure ends the walk */
    double read[ARI_LOCKSTEP_TENSORS][ARI_LOCKSTEP_ELEMENTS];
} ari_lockstep;
/** Begins a walk: ari_lockstep b = ari_lockstep_begin(..); while (ari_lockstep_next(&b)) .. AR_TRY(b.status); */
ari_lockstep ari_lockstep_begin(const ar_dump_tensor *const *tensor, int tensors, size_t start, size_t n);
bool ari_lockstep_next(ari_lockstep *b);
/** Returns a tensor of a step by the first n bytes of its name and its kind ("grad"); NULL: none. */
const ar_dump_tensor *ari_tensor_of_step(const ar_dump *d, const char *stem, size_t n, const char *kind, int step);
/** Returns a parameter before the step by the first n bytes of its name; NULL: none. */
const ar_dump_tensor *ari_weight_before(const ar_dump *d, const char *stem, size_t n, int step);

/* Steps of Adam for which differences of gradients are followed. Adam divides a gradient by its own size: if a gradient
 * is only rounding, its weight moves by a full step in either direction. The difference of two runs' gradients bounds
 * that of their weights (numerics.md, section 7), whatever the decay rates of the moments. With y the largest |other -
 * reference|/|reference| of an element's gradients so far, each step separates its weight by at most 2 R min(1, y/(1 -
 * y)), where R is the largest move of any weight in that step. */
enum { ARI_UNCERTAINTY_STEPS = 64 };
typedef struct ari_uncertainty {
    const ar_dump_tensor *grad[ARI_UNCERTAINTY_STEPS][2]; /* gradients of the reference and of the other run */
    double reach[ARI_UNCERTAINTY_STEPS];                  /* R */
    int steps;
    /* for a weight or moment: the value before its step in each dump, because a difference there persists; NULL:
     * none */
    const ar_dump_tensor *before[2];
    /* for a moment: the gradient that its step adds, in each dump, and the reference's moment; NULL: none */
    const ar_dump_tensor *added[2], *moment;
    bool squared; /* a second moment */
    /* for an output of a later step: |db_j|, and |dw_j| times the size of the input relative to that of the output's
     * row, for the weights of its module; NULL: none. Also the differences that earlier tensors explain, for all
     * elements. */
    double *bias, *weight;       /* [width] */
    double *row;                 /* [rows] sizes */
    double uniform, max_element; /* most: largest effect of the weights on one element */
    size_t width;                /* extent of the dimension to which the weights apply; 0: for weights themselves */
    size_t inner;                /* distance of consecutive elements along that dimension: 1 for the last dimension */
} ari_uncertainty;
/** Computes the reference's R of a step: 0 if the dump lacks the weights before or after the step. Errors: those of
 *  reading. */
AR_NODISCARD ar_status ari_uncertainty_reach(double *reach, const ar_dump *reference, int step);
/** Finds the largest root mean square among the reference's tensors of these passes ("g") in a step; 0 if it has none.
 *  Errors: those of reading. */
AR_NODISCARD ar_status ari_largest_rms(double *rms, const ar_dump *reference, const char *passes, int step);
/** Computes the uncertainty of an output y = W x + b of a later step from both dumps' weights before it; NULL: none.
 *  `name`: class of its module, which gives the dimension along which the weights apply; NULL: shapes give it. Memory
 *  is from the arena. Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_uncertainty_output(ari_uncertainty *d, const ar_dump_tensor *output,
                                              const ar_dump_tensor *const *weight, const ar_dump_tensor *const *bias,
                                              const char *name, ari_arena *arena);
/** Computes extra[i], the difference that known causes allow for element start + i. Errors: those of reading. */
AR_NODISCARD ar_status ari_uncertainty_read(double *extra, const ari_uncertainty *d, size_t start, size_t n);

/* A dump's tensor in another shape. */
typedef struct ari_repeated {
    ar_dump_tensor tensor;
    ar_dump_part *part;
    ar_dump_box *box; /* [boxes] boxes of all parts */
    size_t boxes;
} ari_repeated;
/** Repeats a tensor along its dimensions of extent 1 until it has this shape. Borrows the tensor, which must have
 *  parts. Allocates in the arena. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_repeated_init(ari_repeated *s, const ar_dump_tensor *t, const size_t *shape,
                                         ari_arena *arena);
/** Describes the tensor in the shape of `target`, which has as many elements in a different number of dimensions: each
 *  dimension of one shape is a dimension, a product of adjacent dimensions or a factor of a dimension of the other, so
 *  the row-major order of elements is equal. [b, s, h*d] as [b, h, s, d], heads before tokens, is accepted too. *fits
 *  tells whether the shapes and all boxes correspond; if not, *s is undefined. Memory is from the arena. Errors: those
 *  of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_reshaped_init(bool *fits, ari_repeated *s, const ar_dump_tensor *t,
                                         const ar_dump_tensor *target, ari_arena *arena);
/** True if two tensors have the same shape. */
bool ari_same_shape(const ar_dump_tensor *a, const ar_dump_tensor *b);

/* --- statistics (verify_stats.c) ---------------------------------------------------------------------------------- */

/* The number sum * 2^exponent, in which squares of binary64 numbers do not overflow. */
typedef struct ari_scaled {
    double sum;
    int exponent;
} ari_scaled;
typedef struct ari_scaled_sums {
    ari_scaled aa, bb, ab, dd; /* sums over reference, other and difference, for elements that are finite in both */
} ari_scaled_sums;
void ari_scaled_sums_add(ari_scaled_sums *total, const ari_scaled_sums *s);

/* Statistics that do not depend on the order of elements. */
typedef struct ari_deviation {
    size_t different, bits_different, finite, nan[2], inf[2];
    size_t doubted; /* different, had their gradients not differed */
    double max_abs, max_rel, max_reference;
    bool from_zero; /* an element differs whose reference is 0 */
    uint64_t max_ulp;
    ar_verify_element first_element, worst; /* index SIZE_MAX: none */
    double worst_ratio, worst_difference, allowed;
    uint64_t ulp_bins[AR_VERIFY_ULP_BINS];
} ari_deviation;
void ari_deviation_init(ari_deviation *t);
void ari_deviation_add(ari_deviation *total, const ari_deviation *t);

/* The rule for one tensor. */
typedef struct ari_rule {
    ar_verify_rule rule;
    uint64_t ulp;
    double rtol, atol; /* for allowances: atol */
    bool nan_differs;
} ari_rule;

/* Scratch buffers of one thread. */
typedef struct ari_scratch {
    ari_chunk side[2];
    double *difference; /* [ARI_CHUNK] */
    uint64_t *steps;    /* [ARI_CHUNK] */
    double *shown;      /* [ARI_CHUNK] for the map: the difference relative to the allowance, or the difference */
    double *extra;      /* [ARI_CHUNK] allowance in addition to the rule's */
    float *map;         /* [ARI_MAP_ROWS * ARI_MAP_COLS] map of differences */
} ari_scratch;

/* A tensor that both dumps have. */
typedef struct ari_pair {
    const ar_dump_tensor *side[2];
    ari_format format[2];
    ari_rule rule;
    ar_verify_row *row;
    size_t numbers; /* number of elements times numbers per element */
    size_t blocks;
    atomic_bool unequal; /* true if the bits differ, or bytes cannot be compared */
    ari_deviation tally;
    ari_scaled_sums *sums;  /* [blocks] */
    ari_uncertainty *doubt; /* uncertainty of weights that differ; NULL: none */
} ari_pair;
/** True if two elements with different bits differ by the rule of this side of the pair. */
bool ari_elements_differ(const ari_pair *p, const ari_format *f, const void *a, const void *b);
/** Computes all statistics for numbers [start, start + n) of a pair, at most ARI_CHUNK. */
AR_NODISCARD ar_status ari_chunk_stats(const ari_pair *p, ari_scratch *s, size_t start, size_t n, ari_deviation *tally,
                                       ari_scaled_sums *sums);

/* --- the whole (verify.c, and verify_ with wrappers, experts, match, scan, excuse, moments, whole, facts,
 * proof and shape) */

/* Tensors of a row; NULL if a dump has none of that name. */
typedef struct ari_sides {
    const ar_dump_tensor *tensors[2];
    const ari_pair *pair; /* NULL: their values are not compared */
} ari_sides;

typedef struct ari_verifying {
    ar_verify_options options;
    const ar_verify_options *o; /* those */
    ar_dump *dump[2];           /* the reference's dump and the other one */
    ar_dump *allowed;           /* NULL: another rule */
    ar_verify_report *report;
    ari_arena arena;  /* memory of the following fields; not for the run's threads */
    ari_sides *sides; /* [report->rows] */
    ari_pair *pair;   /* [pairs] */
    size_t pairs;
    int threads;
    double roundoff;            /* roundoff of the run's shortest format, including the format in which gradients are
                                   reduced */
    double roundoff_of_tensors; /* the same without the format in which gradients are reduced */
    bool many_excused;          /* gradients excuse so many new weights that nothing of the update was compared */
    double reduced;             /* roundoff of the format in which gradients are reduced; 0: the gradients' format */
    const char **orthogonal;    /* [orthogonals] parameters whose update is orthogonalised in 16 bits */
    size_t orthogonals;
    double largest[4]; /* ari_largest_rms of "b", "g", "m", "v" in a step; 0: not computed yet */
    int largest_step;
} ari_verifying;

/** Returns true if only one of the two dumps has the tensor. */
bool ari_is_one_sided(const ar_verify_row *r);
/** Tells whoever listens. */
void ari_verify_progress(const ari_verifying *v, double fraction, const char *label);

enum { ARI_WRAPPERS_TEXT = sizeof((ar_verify_report *)0)->wrappers[0] };
typedef struct ari_names {
    const char *const *name; /* [count] */
    size_t count;
} ari_names;
/* Names of a run after removing or adding wrapper components, so that they match another run's names. */
typedef struct ari_unwrapped {
    const char *const *name; /* [names[1].count] new names; NULL: the names are unchanged */
    size_t renamed;
    char wrappers[2][ARI_WRAPPERS_TEXT]; /* components that only one of the runs has, for each run */
} ari_unwrapped;
/** Maps names of the second run to the first run's names if they differ only in wrapper components ("module.",
 *  "_orig_mod."). out->name is NULL if no name does, or if two names would become equal. Memory is from the arena.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_names_unwrap(ari_unwrapped *out, const ari_names *names, ari_arena *arena);
/** Gives tensors of the other dump the reference's names if they differ only in wrappers' components ("module.",
 *  "_orig_mod."), and reports which. Does nothing if two names of a dump would become equal. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_unwrap(ari_verifying *v);
/** Gives tensors of the other dump the reference's names if both mean the same, such as "x.weight" in a file of
 *  gradients and "x.weight:grad" in a dump of ranks. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_name_by_meaning(ari_verifying *v);
/** Reads how much each element of a tensor may differ from a file of allowances, which lists the tensor under either of
 *  two names. path is for messages. Errors: AR_ERR_NOT_FOUND, AR_ERR_FORMAT (more than one number), AR_ERR_DATA (not a
 *  finite number >= 0), those of reading. */
AR_NODISCARD ar_status ari_allowance_read(double *allowed, const ar_dump *allowances, const char *path,
                                          const char *name, const char *other_name);
/** Creates the rows in execution order and the pairs of tensors whose values are compared. Errors: AR_ERR_NOT_FOUND (a
 *  glob matches nothing, or the file of allowances lacks a tensor), AR_ERR_DATA (an allowance is NaN or negative),
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_match(ari_verifying *v);
/** Returns true for tensors that are compared if both runs have them, and are not a difference if one lacks them:
 *  inputs, buffers, the number of steps. */
bool ari_is_optional(const ari_order_key *key);
/** Returns true if one of n globs of --only or --ignore matches the tensor. A model's input, "input.NAME:fwd", is not a
 *  module's output, so that a glob for outputs such as "*:fwd" does not match it. */
bool ari_any_glob_means(const char *const *globs, size_t n, const char *name);
/** Refuses a glob that matches none of these names, and suggests the nearest name. option: "only" or "ignore". Always
 *  AR_ERR_NOT_FOUND. */
AR_NODISCARD ar_status ari_glob_unmatched(const char *option, const char *glob, const char *const *names, size_t count);
/** Moves a lost gradient to the front of the differences if it precedes the first. */
void ari_verify_begin_with_lost(ar_verify_report *r);
/** Reads the facts about the runs' arithmetic that no tensor shows. Errors: AR_ERR_FORMAT (a dump has invalid JSON
 *  there), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_formats(ari_verifying *v);
/** Sets pair->doubt of gradients, moments and norms by the format in which gradients are reduced. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_excuse_reduced(ari_pair *pair, ari_verifying *v);
/** Marks and counts the tensors that are the same only because of that format. Call it after all have been measured. */
void ari_find_excused_by_reduction(const ari_verifying *v);
/** Returns true if a parameter's update is made orthogonal in 16 bits; the parameter is given by the first n bytes of
 *  its name. */
bool ari_is_orthogonalised(const ari_verifying *v, const char *stem, size_t n);
/* A parameter's update in both dumps, and the inputs of the reference's update. */
typedef struct ari_update {
    const ar_dump_tensor *before[2], *after[2];
    const ar_dump_tensor *gradient, *moment; /* the optimizer's inputs; moment: NULL if not recorded */
} ari_update;
/** Compares the orthogonalised updates of both dumps. Sets *equal to true if they are the same except in directions in
 *  which their input (gradient or moment) is close to zero.
 *  Errors: those of reading, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_is_same_orthogonal(bool *equal, const ari_update *u);
/** Compares copies of a part with each other, then bytes, then computes statistics of what differs. Fills the rows. */
AR_NODISCARD ar_status ari_verify_scan(ari_verifying *v);
/* Size of a step of the reference, computed on first use; negative: not computed yet. */
typedef struct ari_step_size {
    double reach, gradient; /* ari_uncertainty_reach, ari_largest_rms of gradients */
} ari_step_size;
/** Finds out whether all of the other run's moments are bf16 numbers, beyond chance, while the reference's are not.
 *  Errors: those of reading. */
AR_NODISCARD ar_status ari_verify_find_short_moments(bool *found, const ari_verifying *v);
/** Returns the round-off of a format; 0 for integers and for formats below 16 bits, whose values say too little. */
double ari_roundoff_of(ar_dtype t);
/** Returns the unit round-off of the arithmetic that a file of allowances names ("bf16 .."); 0: it names none. */
double ari_roundoff_allowed(const char *allows);
/** If copies of a tensor in the second dump differ in bits, lets its pair compare the copy that is furthest from the
 *  reference. Complex numbers and numbers below one byte keep the first copy. Errors: AR_ERR_MEMORY, those of
 *  reading. */
AR_NODISCARD ar_status ari_verify_furthest_copies(ari_verifying *v);
/** Finds out whether the larger of two tensors has equal values along the dimensions in which the other has size 1, as
 *  positions of all samples do; the smaller one is then repeated. *which is the larger tensor, 0 or 1; -1: neither. */
AR_NODISCARD ar_status ari_verify_repeats(int *which, const ar_dump_tensor *reference, const ar_dump_tensor *candidate);
/** Sets *zero to true if all elements are 0. Errors: those of reading. */
AR_NODISCARD ar_status ari_is_zero(bool *zero, const ar_dump_tensor *t);
/** True for the loss of a step. */
bool ari_is_loss(const ar_verify_row *r);
/** Refuses equality that proves nothing: gradients without a finite non-zero number (verify_proof.h), a loss that is
 *  never finite or ln V in all steps, activations of later steps that equal those of the first. Errors: AR_ERR_DATA
 *  (says which), those of reading. */
AR_NODISCARD ar_status ari_verify_refuse_dead(const ari_verifying *v);
/** Compares two tensors. *equal: they have the same shape and bits; *varies: the compared elements are not all one
 *  number. Errors: those of reading. */
AR_NODISCARD ar_status ari_are_equal(bool *equal, bool *varies, const ar_dump_tensor *a, const ar_dump_tensor *b);
