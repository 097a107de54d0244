/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_VERIFY_H
#define ANYRANK_VERIFY_H

#include <stdbool.h>

#include "anyrank/cause.h"
#include "anyrank/dump.h"

AR_BEGIN_DECLS

/* Two dumps of tensors side by side: which differ, how much, where, and what kind of mistake leaves such a trace. */

typedef enum ar_verify_rule {
    AR_VERIFY_BITS,       /* equal bits or different */
    AR_VERIFY_ULP,        /* at most so many steps of the reference's dtype apart */
    AR_VERIFY_TOLERANCE,  /* |other - reference| <= atol + rtol*|reference| */
    AR_VERIFY_SENSITIVITY /* |other - reference| <= what a file of ar_grads' sensitivity allows the tensor */
} ar_verify_rule;

typedef struct ar_verify_options {
    const char *reference, *other; /* what ar_dump_open takes */
    const char *map;               /* for `other`; NULL: none */
    const char *reference_map;     /* for `reference` */
    ar_verify_rule rule;
    uint64_t ulp;
    double rtol, atol;
    const char *allowed;      /* with AR_VERIFY_SENSITIVITY */
    const char *const *only;  /* [only_count] globs of names; none: all */
    const char *const *leave; /* [leave_count] globs of names that are left out */
    size_t only_count, leave_count;
    bool
        common; /* what one dump lacks is left out, and counted; else a difference, as are lost gradients in any case */
    bool all_matched; /* a tensor that one dump lacks, or a map rule without a match, is an error; not with common */
    bool nan_differs; /* NaN against NaN is a difference too; else equal by every rule but bits, whose payloads count */
    int tp, cp, dp; /* ranks of the other run, where its dump does not tell: for the explanation alone; 0: not known */
    size_t heads, kv_heads; /* of the model, for the explanation alone; 0: not known */
    size_t explain;         /* how many of the tensors that differ are explained: the first in execution order, then the
                               worst; 0: 8 */
    int threads;            /* 0: the machine's cores */
    void (*progress)(void *user, double fraction, const char *phase); /* NULL: nobody listens */
    void *progress_user;
} ar_verify_options;

typedef enum ar_verify_state {
    AR_VERIFY_SAME, /* by the rule */
    AR_VERIFY_DIFFERENT,
    AR_VERIFY_SHAPE,      /* another shape: values are not compared */
    AR_VERIFY_DTYPE,      /* another dtype, and the rule asks for bits or ulps */
    AR_VERIFY_MISSING,    /* only in the reference */
    AR_VERIFY_UNEXPECTED, /* only in the other */
    AR_VERIFY_REPLICAS    /* copies of one part differ from each other, in either dump; both have the tensor */
} ar_verify_state;

#define AR_VERIFY_ULP_BINS 34
typedef struct ar_verify_element {
    size_t index;    /* row-major */
    double value[2]; /* in the reference, in the other */
} ar_verify_element;

/* For a picture: the largest |difference| over what is allowed (over the reference's rms without a tolerance) in each
 * cell of a grid over the tensor as a matrix. */
typedef struct ar_verify_map {
    float *cell;                     /* [rows, cols]; NULL where nothing differs */
    size_t rows, cols;               /* at most 48 by 96 */
    size_t matrix_rows, matrix_cols; /* of the tensor: all dimensions but the last, the last */
} ar_verify_map;

/** Results for one tensor. Differences are those of all elements, also of those that the rule lets pass. For a tensor
 *  with the same bytes in both only nan and inf are counted; the other figures are 0. Complex numbers are pairs of F32,
 *  along a last dimension of 2. */
typedef struct ar_verify_row {
    const char *name;
    ar_verify_state state;
    char
        pass; /* 'i' 'f' 'b' 'g' 'c' 'n' 'm' 'v' 's' 'u' 'k' as in models.md, by name or file; 'w' weights; '?' not known */
    int step;     /* 1, 2, .. */
    size_t order; /* place in execution order, as far as it is known or can be told by the name */
    ar_dtype dtype, other_dtype;
    int ndim, other_ndim;
    size_t shape[AR_ST_MAX_DIMS], other_shape[AR_ST_MAX_DIMS];
    size_t elements;
    size_t elements_different; /* by the rule */
    size_t bits_different;     /* whose bits differ */
    size_t nan[2], inf[2];     /* in the reference, in the other */
    double max_abs, rms;       /* of other - reference, over finite elements */
    double max_rel; /* of |other - reference|/|reference| where the reference is not 0; infinite: only where it is */
    double rms_reference, max_reference;
    uint64_t max_ulp;      /* in steps of the reference's dtype, of which -0 to +0 is one; NaN apart */
    double cosine;         /* of the two as vectors; NaN: one is all zero, or the bytes are the same */
    double scale;          /* the factor that fits best: sum(other*reference) / sum(reference^2) */
    double factor_allowed; /* |scale - 1| that rounding explains, or the rule allows; 0: not judged */
    bool off_by_factor;    /* each element is the same by the rule, and the factor is not */
    bool unjudged;         /* the same by an allowance that is as large as what the tensor shows: nothing is said */
    double allowed;        /* that the rule allows the worst element; 0: nothing */
    double ratio;          /* worst |difference| over what is allowed; infinity where nothing is */
    ar_verify_element first,
        worst; /* the first that differs by the rule, the one with the largest ratio or difference */
    uint64_t
        ulp_bins[AR_VERIFY_ULP_BINS]; /* elements by distance: 0, 1, 2..3, 4..7, .., the last: NaN against a number */
    size_t drift; /* elements of two copies, in either dump, that differ in bits and are the same by the rule */
    size_t elements_doubted; /* weights after a step that differ no more than their gradients' differences explain */
    bool copies_differ;      /* AR_VERIFY_REPLICAS, or so are the copies of a tensor that only one dump has; then
                           elements_different and first are those of the copies */
    bool in_reference;       /* copies_differ: of the reference */
    bool lost_gradient;      /* that one dump lacks, which has the parameter and other gradients of the step */
    int ranks[2];            /* copies_differ: the two that differ; else ranks[0] the rank that holds `first`, -1 */
    char pattern[256], hint[512]; /* "" where it was not explained */
    ar_evidence evidence;
    ar_verify_map map;
} ar_verify_row;

/* The other over the reference as p/q, both at most 16, or p the reference's targets; q 0: no such ratio, or not known. */
typedef struct ar_verify_ratio {
    unsigned p, q;
    size_t count, among; /* tensors that have it, of so many looked at */
} ar_verify_ratio;

/* Facts about the two runs that the dumps give before anything is explained, and on which explanations rely. */
typedef struct ar_verify_facts {
    int steps;                      /* the last one; 0: none is told */
    size_t batch, seq;              /* tokens of a step; 0: not known */
    size_t heads, kv_heads;         /* 0: not known */
    size_t targets;                 /* of the reference's first step; 0: not known */
    int micro_batches;              /* of each of the other run's ranks; 0: not known */
    int dp;                         /* its data-parallel ranks; 0: not known */
    bool exact_numerics;            /* of both */
    bool sp;                        /* ranks hold different positions between the tensor-parallel regions */
    size_t exact;                   /* tensors with the same bits in both */
    ar_verify_ratio loss, norm;     /* of the first step that has it */
    ar_verify_ratio gradients;      /* of most parameters' gradients of the first step that has any */
    size_t copies_apart;            /* tensors of the other of which copies differ */
    bool apart_along[AR_MESH_DIMS]; /* dimensions of the mesh along which some of them do */
    bool has_m, has_v, has_new;     /* the optimizer's moments, weights after a step */
} ar_verify_facts;

typedef struct ar_verify_report {
    bool same;                     /* the verdict */
    const char *reference, *other; /* paths */
    ar_verify_rule rule;
    uint64_t ulp;
    double rtol, atol;
    char allows[32];    /* of the sensitivity: what arithmetic its file was made for, as it says; "": it does not */
    ar_verify_row *row; /* [rows] in execution order */
    size_t rows;
    size_t compared, different, missing,
        unexpected;        /* tensors; different: with those of another shape or dtype or unequal copies */
    size_t lost_gradients; /* of the missing and the unexpected */
    size_t unjudged;       /* tensors; where all else is the same, that is no verdict */
    size_t left_out[2];    /* tensors that only the reference, only the other has, where those are not compared */
    size_t ragged;         /* values and gradients without a place in a full tensor: left out */
    char ragged_first[288];
    size_t reordered; /* activations whose samples are in another order in the other: compared sample by sample */
    size_t routed;    /* tensors within experts of tokens that a router chose, of which each rank has other rows than
                              the reference: not compared */
    size_t renamed;   /* tensors of the other that are compared under the reference's name, from which only .. */
    char wrappers[2][128]; /* .. these components tell theirs apart, in the reference's and in the other's: "module." */
    char unwritten[2][256]; /* what of the reference's and the other's run is in no file, as its capture says */
    size_t drift;           /* tensors of which copies differ in bits, within the rule */
    size_t elements, elements_different, elements_doubted;
    size_t first_different; /* row of the first in execution order that is not the same; SIZE_MAX */
    size_t first;           /* the same or, if explanations found one, the first that is more than rounding */
    size_t rounded;         /* tensors before `first` that differ by rounding alone */
    size_t worst;           /* row with the largest ratio, or difference relative to the reference; SIZE_MAX */
    size_t *worst_order;    /* [different] rows that differ, worst first */
    int ranks;              /* of the other dump */
    ar_mesh mesh;           /* its mesh; of no dimensions: not told */
    bool explained;         /* or nothing differs; else facts are zero, and no row has a pattern or hint */
    char unexplained[160];  /* why not, if the caller knows: "SIGSEGV" */
    ar_verify_facts facts;  /* of dumps that differ */
    size_t bytes;           /* read of both */
    double seconds;
    struct ari_verifying *comparison; /* private: the open dumps, until ari_verify_explain */
} ar_verify_report;

/** Compares, and explains nothing yet: the verdict and all figures are final. Gives the report;
 *  ar_verify_report_destroy. Keeps what the options point to, and the dumps open, until the report is explained or
 *  destroyed. Memory: some kilobytes a tensor and the maps, whatever the tensors' size.
 *  Errors (no report): those of opening, AR_ERR_ARG (options), AR_ERR_NOT_FOUND (globs that match nothing, an allowed
 *  file that lacks a tensor), AR_ERR_DTYPE, AR_ERR_DATA (equal, and that proves nothing: all gradients are zero,
 *  the loss is ln V in all steps, or all activations are those of the first step). */
AR_NODISCARD ar_status ar_verify_compare(ar_verify_report **out, const ar_verify_options *o);
/** Both, one after the other. Errors (no report): those of both. */
AR_NODISCARD ar_status ar_verify(ar_verify_report **out, const ar_verify_options *o);
/** Accepts NULL. */
void ar_verify_report_destroy(ar_verify_report *r);

AR_END_DECLS
#endif
