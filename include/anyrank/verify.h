/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_VERIFY_H
#define ANYRANK_VERIFY_H

#include <stdbool.h>

#include "anyrank/dump.h"

AR_BEGIN_DECLS

/* Compares two dumps of tensors (dump.h), a reference and another one: which tensors differ, how much and where. The
 * command `anyrank verify` explains the first difference besides. */

/* When an element of the other dump counts as equal to the reference's. */
typedef enum ar_verify_rule {
    AR_VERIFY_BITS,       /* equal bits */
    AR_VERIFY_ULP,        /* at most `ulp` representable numbers of the reference's dtype apart */
    AR_VERIFY_TOLERANCE,  /* |other - reference| <= atol + rtol*|reference| */
    AR_VERIFY_SENSITIVITY /* |other - reference| <= the tensor's bound in the file `allowed`
                             (ar_grads_options.sensitivity) */
} ar_verify_rule;

/** Options of a comparison. */
typedef struct ar_verify_options {
    const char *reference, *other; /* paths of the dumps, as for ar_dump_open */
    const char *map;               /* mapping file of `other`; NULL: none */
    const char *reference_map;     /* mapping file of `reference`; NULL: none */
    ar_verify_rule rule;
    uint64_t ulp;             /* for AR_VERIFY_ULP */
    double rtol, atol;        /* for AR_VERIFY_TOLERANCE */
    const char *allowed;      /* path of allowed.safetensors, for AR_VERIFY_SENSITIVITY */
    const char *const *only;  /* [only_count] globs of the names to compare; none: all */
    const char *const *leave; /* [leave_count] globs of names to leave out */
    size_t only_count, leave_count;
    bool common;      /* tensors that only one dump has are skipped and counted; false: they are differences. Lost
                         gradients (ar_verify_row) always are */
    bool all_matched; /* a tensor that only one dump has, or an unused mapping rule, is an error; not with common */
    bool nan_differs; /* two NaNs are different; false: equal, except by AR_VERIFY_BITS if their payloads differ */
    /* What the command tells the explanation, if the other dump does not record it; 0: not known. */
    int tp, cp, dp;                                                   /* parallel ranks of the other run */
    size_t heads, kv_heads;                                           /* of the model */
    int threads;                                                      /* 0: number of cores */
    void (*progress)(void *user, double fraction, const char *phase); /* progress callback; NULL: none */
    void *progress_user;                                              /* first argument of progress */
} ar_verify_options;

/* Result of the comparison of one tensor. */
typedef enum ar_verify_state {
    AR_VERIFY_SAME,       /* equal by the rule */
    AR_VERIFY_DIFFERENT,  /* different by the rule */
    AR_VERIFY_SHAPE,      /* shapes differ; values are not compared */
    AR_VERIFY_DTYPE,      /* dtypes differ, and the rule is AR_VERIFY_BITS or AR_VERIFY_ULP */
    AR_VERIFY_MISSING,    /* only in the reference */
    AR_VERIFY_UNEXPECTED, /* only in the other dump */
    AR_VERIFY_REPLICAS    /* in both dumps, but in one of them ranks hold unequal copies of a part */
} ar_verify_state;

#define AR_VERIFY_ULP_BINS 34 /* bins of the histogram ar_verify_row.ulp_bins */
/* An element of a tensor. */
typedef struct ar_verify_element {
    size_t index;    /* row-major */
    double value[2]; /* in the reference; in the other dump */
} ar_verify_element;

/* A heat map of a tensor's differences: the tensor, as a matrix, is divided into a grid, and each cell has the largest
 * |difference| / allowed difference (without a tolerance: / rms of the reference). */
typedef struct ar_verify_map {
    float *cell;                     /* [rows, cols]; NULL if nothing differs */
    size_t rows, cols;               /* of the grid, at most 48 by 96 */
    size_t matrix_rows, matrix_cols; /* of the matrix: product of all extents but the last; the last extent */
} ar_verify_map;

/** Comparison of one tensor. Statistics cover all elements, also those that are equal by the rule. If all bytes are
 *  equal, only nan and inf are counted, and other statistics are 0. Complex numbers are pairs of F32. */
typedef struct ar_verify_row {
    const char *name;
    ar_verify_state state;
    /* Kind of tensor: 'i' 'f' 'b' 'g' 'c' 'n' 'm' 'v' 's' 'u' 'k' as in models.md; 'w' weights; '?' not known. */
    char pass;
    int step;                    /* training step 1, 2, .. */
    size_t order;                /* position in execution order, recorded or inferred from the name */
    ar_dtype dtype, other_dtype; /* in the reference; in the other dump (likewise below) */
    int ndim, other_ndim;
    size_t shape[AR_ST_MAX_DIMS], other_shape[AR_ST_MAX_DIMS];
    size_t elements;
    size_t elements_different; /* number of elements that differ by the rule */
    size_t bits_different;     /* number of elements whose bits differ */
    size_t nan[2], inf[2];     /* number of NaN and infinite elements in the reference; in the other dump */
    double max_abs, rms;       /* largest and root mean square of other - reference, over finite elements */
    double max_rel; /* largest |other - reference|/|reference| where the reference is not 0; infinite: only where it
                       is */
    double rms_reference, max_reference; /* root mean square and largest magnitude of the reference */
    uint64_t max_ulp;      /* largest distance in representable numbers of the reference's dtype (-0 to +0 is 1),
                              without NaN */
    double cosine;         /* cosine similarity of the two tensors; NaN: one is all zero, or all bytes are equal */
    double scale;          /* best-fitting factor: sum(other*reference) / sum(reference^2) */
    double factor_allowed; /* largest |scale - 1| that rounding or the rule explains; 0: not judged */
    bool off_by_factor;    /* each element is equal by the rule, but |scale - 1| > factor_allowed */
    bool unjudged;         /* equal, but the allowed difference is as large as the values: no evidence */
    double allowed;        /* difference that the rule allows for `worst`; 0: none */
    double ratio;          /* largest |difference| / allowed difference; infinity if none is allowed */
    ar_verify_element first, worst;        /* first differing element by the rule; the worst one */
    uint64_t ulp_bins[AR_VERIFY_ULP_BINS]; /* elements by distance: 0, 1, 2..3, 4..7, ..; last: NaN against number */
    size_t drift;            /* elements whose copies on ranks of a dump differ in bits but are equal by the rule */
    size_t elements_doubted; /* that differ no more than what earlier gradients and weights are off by explains */
    bool copies_differ;      /* ranks of one dump hold different copies: state AR_VERIFY_REPLICAS, or a tensor that only
                                one dump has; then elements_different and first compare the copies */
    bool in_reference;       /* with copies_differ: in the reference dump */
    bool excused_by_reduction; /* equal only because gradients are reduced in a format of 16 bits, as is recorded */
    bool lost_gradient;        /* a gradient that is missing in one dump, although that dump has the parameter and other
                                gradients of the step */
    int ranks[2]; /* with copies_differ: the two ranks; else [0] the rank that holds `first`, -1: unknown */
    ar_verify_map map;
} ar_verify_row;

/** Report of a comparison. */
typedef struct ar_verify_report {
    bool same;                     /* the verdict: no tensor differs */
    const char *reference, *other; /* paths of the dumps */
    ar_verify_rule rule;
    uint64_t ulp;
    double rtol, atol;
    char allows[32];    /* AR_VERIFY_SENSITIVITY: arithmetic that the bounds in `allowed` are for; "": not recorded */
    ar_verify_row *row; /* [rows], in execution order */
    size_t rows;
    /* Numbers of tensors; `different` includes differing shapes, dtypes and copies. */
    size_t compared, different, missing, unexpected;
    size_t lost_gradients; /* how many of the missing and unexpected tensors are lost gradients */
    size_t unjudged;       /* number of unjudged tensors, about which `same` says nothing */
    char reduced[8];       /* format of 16 bits in which one of the runs reduces gradients, as is recorded; "": none */
    size_t excused_by_reduction; /* number of tensors that are equal only because of it */
    size_t left_out[2];          /* with `common`: number of tensors only in the reference; only in the other dump */
    size_t ragged;               /* number of tensors skipped because their place in a full tensor is unknown */
    char ragged_first[288];      /* name of the first of these, and why */
    size_t reordered; /* number of activations whose samples are ordered differently; compared sample by sample */
    size_t reshaped;  /* number of activations of which one run has dimensions in one that the other has apart */
    char reshaped_first[288]; /* name of the first of these, and both shapes */
    size_t routed;            /* number of experts' activations, skipped: ranks or micro-batches have the rows of
                               * other tokens than the reference */
    size_t renamed; /* number of tensors that match the reference's although names differ by components of wrappers */
    char wrappers[2][128];  /* the components in the reference's names; in the other's names: "module." */
    char unwritten[2][256]; /* what the reference's run, and the other run, did not write to files, as their dumps
                               say */
    size_t drift;           /* number of tensors whose copies differ in bits but are equal by the rule */
    size_t elements, elements_different, elements_doubted; /* sums over the rows */
    size_t first;                     /* row of the first tensor in execution order that differs; SIZE_MAX: none */
    size_t worst;                     /* row with the largest ratio, or relative difference; SIZE_MAX: none */
    size_t *worst_order;              /* [different], differing rows, worst first */
    int ranks;                        /* of the other dump */
    ar_mesh mesh;                     /* device mesh of the other dump; no dimensions: not recorded */
    bool exact_numerics;              /* both runs used exact numerics: no difference is rounding */
    size_t bytes;                     /* bytes read from both dumps */
    double seconds;                   /* wall time */
    struct ari_verifying *comparison; /* private: the open dumps */
} ar_verify_report;

/** Compares two dumps. The caller releases *out with ar_verify_report_destroy. The dumps
 *  stay open, and the memory that the options point to must stay valid, until then. Memory: some kilobytes per tensor,
 *  whatever its size. Errors (without report): those of ar_dump_open and of reading, AR_ERR_ARG (options),
 *  AR_ERR_NOT_FOUND (a glob matches nothing, `allowed` lacks a tensor), AR_ERR_MEMORY, AR_ERR_DTYPE, AR_ERR_DATA (the
 *  dumps are equal but prove nothing: all gradients are zero, the loss is ln V in all steps, or all activations equal
 *  those of the first step). */
AR_NODISCARD ar_status ar_verify(ar_verify_report **out, const ar_verify_options *o);
/** Frees a report and closes its dumps. Accepts NULL. */
void ar_verify_report_destroy(ar_verify_report *r);

AR_END_DECLS
#endif
