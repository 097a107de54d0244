/* SPDX-License-Identifier: Apache-2.0 */
/* Comparison of two runs of which at least one is stored as sketches. A dump is sketched while it is read. */
#pragma once

#include <jansson.h>

#include "anyrank/sketch.h"
#include "anyrank/verify.h"
#include "ref/core/size.h"
#include "verify/compare/verify_impl.h"
#include "verify/read/roles.h"

struct ari_sketch_row;

/* A tensor of one run. */
typedef struct ari_sketched {
    const char *name;
    int step;
    size_t order; /* the tensor's position in its run's order of execution */
    ari_order_key key;
    const ar_dump_tensor *dumped;   /* the dumped tensor; NULL: the run is stored as sketches */
    const ar_sketch *sketch;        /* NULL: the tensor cannot be compared */
    const char *unjudged;           /* why the tensor cannot be compared; "": it can be */
    const char *left_out;           /* the reason if the run says so; "": it does not */
    bool incomplete;                /* true if some rank has no record of the tensor's step */
    const ar_sketch_copies *copies; /* [differing_parts] copies whose digest differs from their part's first copy */
    size_t differing_parts;
    int differing;                    /* first rank whose copy differs; -1: none */
    size_t tiny;                      /* for a gradient: elements that may be only rounding */
    uint32_t samples[2];              /* digests of the step's samples: in order, and independent of order; 0:
                                         unknown */
    const struct ari_sketch_row *row; /* for a tensor of the reference: the judged row; NULL: none */
} ari_sketched;

/* Difference that a rule allows. */
typedef struct ari_sketch_allowance {
    double atol, rtol;     /* tolerances of an element, absolute and relative */
    double roundoff;       /* unit round-off of the runs' shortest format */
    double excused;        /* for new weights: the fraction of the norm explained by differences of the gradients */
    double excused_blocks; /* for new weights: the fraction of elements whose whole step the gradients explain */
    double norm;           /* allowed norm of the difference over all elements, `excused` included */
} ari_sketch_allowance;

/* A tensor of both runs, or of one of them. */
typedef struct ari_sketch_row {
    const char *name;
    int step;
    ari_order_key key;
    ar_verify_state state;
    const char *unjudged;     /* why no verdict is possible; "": a verdict is possible */
    bool left_out, reordered; /* not compared: a run says that it cannot be, or its samples are in a different order */
    bool lost_gradient;       /* only one run has this gradient, although both runs train the parameter */
    int differing;            /* rank whose copy differs from the first, of OTHER if it has one; -1: none */
    const ar_sketch_copies *copies; /* two copies that differ by more than the rule; NULL: none */
    ar_sketch_difference copies_d;  /* the difference between the two copies */
    ar_sketch_difference d;         /* the difference between the runs, for tensors of equal shape */
    ari_sketch_allowance allowed;
    size_t first_element, elements; /* the block with the largest difference */
    ari_sketched *side[2];          /* the tensor in each run; NULL: the run lacks it */
} ari_sketch_row;

/* Steps that only one run has. */
typedef struct ari_step_list {
    int *step; /* [count] step numbers, ascending */
    size_t count;
} ari_step_list;

typedef struct ari_sketch_report {
    ari_sketch_row *row; /* [rows] in the reference's order; rows that only the other run has come last, by step */
    size_t rows;
    size_t compared, different, unjudged; /* numbers of rows */
    size_t left_out;                      /* number of rows that a run marks as not comparable or whose samples are
                                             reordered */
    size_t reordered;                     /* how many of `left_out` are activations of reordered samples */
    size_t common_steps;
    ari_step_list alone[2];      /* steps that only the reference has, and that only the other run has */
    ari_step_list incomplete[2]; /* steps at each run's end that some ranks have not recorded; they are not compared */
    size_t renamed;              /* tensors matched without wrappers' components */
    char wrappers[2][ARI_WRAPPERS_TEXT];
    size_t skipped[2]; /* tensors of common steps that only one run has and that are not a difference */
    size_t first_row;  /* first row to print: a lost gradient, otherwise the first that differs; number of rows: none */
    ari_arena arena;
    ar_sketch_run *run[2]; /* NULL: a dump */
    ar_dump *dump[2];      /* NULL: sketches */
    ar_sketch *sketches;   /* [made_count] sketches computed from a dump's tensors and from copies in it */
    size_t made_count, made_room;
} ari_sketch_report;

/** Reports whether a folder contains sketches. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_is_sketched(bool *is_sketched, const char *folder);
/** Compares two runs of which at least one is sketched, by the options' rule: bits by digests, or the norm of the
 *  difference against the norm of what the rule allows each element; three standard deviations of the estimate count in
 *  favour of "same". Call ari_sketch_report_fini in any case. Errors: those of opening; AR_ERR_UNSUPPORTED (a rule that
 *  needs elements); AR_ERR_NOT_FOUND (nothing can be compared: no tensors, no common step, globs that match nothing or
 *  leave nothing, all tensors left out); AR_ERR_DATA (an equality that proves nothing). */
AR_NODISCARD ar_status ari_sketches_compare(ari_sketch_report *r, const ar_verify_options *o);
void ari_sketch_report_fini(ari_sketch_report *r);
/** Returns the report as JSON; verify.md lists its fields. The caller releases it with json_decref. NULL if memory is
 *  short. */
json_t *ari_sketch_report_json(const ari_sketch_report *r, const ar_verify_options *o);

/* --- sketches of a dump (dumped.c) -------------------------------------------------------------------------------- */

/** Sketches a dump's tensor: the first copy of each part, summand by summand, and copies that differ. The report owns
 *  the sketches. Errors: those of reading. */
AR_NODISCARD ar_status ari_dump_sketch(ari_sketched *out, ari_sketch_report *r, const ar_dump_tensor *t);

/* --- judging two sketches (judge.c) ------------------------------------------------------------------------------- */

/** Judges two sketches of one shape by how much `allowed` lets an element differ, and sets its `norm`. *differ: a
 *  difference is certain. *why: the reason why nothing can be said; else "". */
void ari_sketch_judge(bool *differ, const char **why, ari_sketch_allowance *allowed, const ar_sketch *a,
                      const ar_sketch *b, const ar_sketch_difference *d);
/** True if the best factor between two tensors is off by more than rounding explains, as verify judges it of dumps
 *  (verify.md, "All elements together"). */
bool ari_sketch_factor_differs(const ari_sketch_allowance *allowed, const ar_sketch *a, const ar_sketch_difference *d);
/** Returns true if one of the two tensors is an integer or BOOL tensor. Its values are compared exactly under every
 *  rule, as in dumps. */
bool ari_is_exact(const ar_sketch *a, const ar_sketch *b);

/* Known facts about a weight's update. */
typedef struct ari_sketch_update {
    const ar_sketch *before[2], *after[2]; /* the weights before and after the step, in the reference and in the
                                              other run */
    const ar_sketch *gradient;             /* the reference's */
    const ar_sketch_difference *gradients; /* the difference of the two runs' gradients */
    size_t tiny;                           /* elements of the gradient that may be only rounding */
    double largest_gradient;               /* root mean square of the step's largest gradient */
} ari_sketch_update;
/** Adds to `allowed` the difference of new weights that follows when an optimizer divides by the magnitude of gradients
 *  that differ by rounding (sketches.md, "Weights after Adam"). Errors: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ari_sketch_excuse(ari_sketch_allowance *allowed, const ari_sketch_update *update);
/** Returns true if more of an update is off by a full step than its gradient explains, for example blocks in which one
 *  run's weights did not change. */
bool ari_sketch_update_is_lost(const ari_sketch_allowance *allowed, const ari_sketch_update *update);
