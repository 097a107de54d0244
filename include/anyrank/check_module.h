/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CHECK_MODULE_H
#define ANYRANK_CHECK_MODULE_H

#include "anyrank/check.h"
#include "anyrank/lint.h"
#include "anyrank/loss.h"
#include "anyrank/train.h"

AR_BEGIN_DECLS

/* Checks of a user-written module, defined with its loss and batches by an ar_module_case (train.h):
 *   ar_check_module      compares N ranks with one rank: training steps under every layout in exact numerics; each
 *                        reported tensor must have the same bits;
 *   ar_gradcheck_module  compares one rank's gradients with finite differences of the loss, since a user's
 *                        module has no independent baseline. */

/** Options of ar_check_module, ar_gradcheck_module and ar_prove_module. */
typedef struct ar_check_module_options {
    ar_run run; /* model, plan, parallel, batch, seq and ddp are ignored. Exact numerics (fp32 or bf16) on ranks that
                   are threads, without trace, virtual time and transport faults. run.fault is injected in the
                   layouts, not in the reference run on one rank */
    const ar_parallel *parallel; /* the layouts to check, [layouts] */
    size_t layouts;              /* number of layouts */
    const ar_ddp_options *ddp;   /* NULL: gradients are reduced one by one (with ZeRO: in default buckets) */
    bool explain;                /* as in ar_check_options */
} ar_check_module_options;

/** Checks a module: runs it on one rank as reference, then under every layout, and compares the initial parameters, the
 *  activations and gradients that modules report to the tap, the reduced gradients, clipping and updated weights.
 *  Returns AR_OK with a report also if runs differ or fail (as under an invalid layout); its `result` reports it. In
 *  the report, config holds only the module's name, seq is 1, max_error_vs_f64 NaN, and "baseline" values are those of
 *  the reference run. Bytes and memory are predicted by a dry run of every rank, except with expert parallelism. The
 *  caller releases *out with ar_check_report_destroy. Borrows the options until return. Errors (without report):
 *  AR_ERR_ARG (options; the reference run reports only some of a value's elements), AR_ERR_MEMORY, those of the case's
 *  functions and of the reference run. */
AR_NODISCARD ar_status ar_check_module(ar_check_report **out, const ar_module_case *c,
                                       const ar_check_module_options *o);
/** Writes the report as text to text[0, cap), truncated if necessary: a line for each layout, three if it differs. */
void ar_check_module_text(const ar_check_report *r, char *text, size_t cap);

/** An operation of a module as recorded by a dry run: a layer or operator of the library, or a value that the module
 *  reports (ar_module_init, ar_tap_value). Other computations of a user's module are opaque: the placement of their
 *  result is unknown until the module reports or redistributes it. */
typedef struct ar_module_operation {
    char name[128];             /* of the module or parameter */
    const char *operation;      /* "product", "contract", "norm", "sum", "enter_region", ..; static storage */
    const char *pass;           /* "forward", "backward" */
    char takes[AR_LINT_PLACED]; /* placement of its input over the tensor-parallel ranks; "?": unknown */
    char makes[AR_LINT_PLACED]; /* placement of its output; "": no output */
    int ndim;                   /* dimensions of the output */
    size_t shape[AR_MAX_DIMS];  /* shape of the output on this rank */
    uint64_t bytes;             /* bytes that the rank sends from this operation up to the next one */
} ar_module_operation;

/** Result of a static inspection of a module under one layout. */
typedef struct ar_module_inspection {
    char name[96];                  /* of the module */
    ar_parallel parallel;           /* the layout */
    ar_lint_report *lint;           /* problems with placements along every axis */
    ar_module_operation *operation; /* [operations] of one step on rank 0 (in a pipeline: on the first rank of each
                                       stage, one after the other) */
    size_t operations;
    uint64_t bytes;        /* bytes that all ranks send in run->steps steps */
    ar_rank_memory memory; /* of each kind the maximum over ranks */
} ar_module_inspection;
/** Inspects a module without computing values: a dry run of every rank of run->parallel that only tracks shapes,
 *  placements, bytes and memory. run: as ar_check_module_options.run, but gradients are reduced with run->ddp. Returns
 *  AR_OK also if problems are found. The caller releases *out with ar_module_inspection_destroy. Errors: those of
 *  ar_check_module's options and of the case's functions, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_inspect_module(ar_module_inspection **out, const ar_module_case *c, const ar_run *run);
/** Frees an inspection. Accepts NULL. */
void ar_module_inspection_destroy(ar_module_inspection *m);
/** Writes findings, bytes and memory as text to text[0, cap), truncated if needed; with flow a line per operation
 *  too. */
void ar_inspect_module_text(const ar_module_inspection *m, bool flow, char *text, size_t cap);

/** Gradient check of one tensor. A probe compares the gradient's prediction for one direction, in which the tensor's
 *  values are moved, with the difference of the loss. */
typedef struct ar_gradcheck_tensor {
    char name[176];    /* of a parameter, or "input" */
    size_t count;      /* elements */
    size_t probes;     /* number of probes */
    size_t wrong;      /* probes whose error exceeds the allowed one */
    size_t unresolved; /* probes whose allowed error exceeds 1/10 of the gradient, so that they say little */
    double largest;    /* largest |gradient| of an element */
    double error;      /* of the worst probe, relative to the gradient along its direction */
    double allowed;    /* allowed error of that probe, likewise relative */
} ar_gradcheck_tensor;

/** Report of ar_gradcheck_module. */
typedef struct ar_gradcheck_module_report {
    char name[96];               /* of the module */
    size_t batch;                /* samples */
    float loss;                  /* of the case's first batch */
    ar_gradcheck_tensor *tensor; /* [tensors] */
    size_t tensors;
    size_t probes, wrong, unresolved; /* of all tensors */
    size_t worst;                     /* index of the tensor with the largest error / allowed */
    bool ok;                          /* no probe is wrong, and at most a quarter are unresolved */
} ar_gradcheck_module_report;

/** Compares the gradients of the case's first batch with differences of its loss, on one rank in exact fp32 numerics.
 *  Each trainable parameter and the input are probed at two random elements with |g| > 1e-3*max|g|, at one with g = 0
 *  if there is one (three if the gradient is all zero), and along one direction that moves all elements at once, each
 *  up or down at random.
 *
 *  For a direction v and steps h, h/2, .., h/128 the error is e(h) = (L(w + hv) - L(w - hv) - g.(w+ - w-))/2h, where w+
 *  and w- are the moved values as rounded to fp32. A difference of two losses is one exact sum of the terms of both,
 *  rounded once, so that only the terms' own rounding remains. Richardson extrapolation of e, a series in h^2, to h = 0
 *  gives e and an estimate of its error from neighbouring entries (Ridders 1982, Advances in Engineering Software
 *  4:75). To the estimate are added 4*2^-24*|L|/h for the rounding of the terms, and the possible effect of kinks of
 *  the loss (ReLU) near w: the amount by which half the difference of the one-sided slopes is not proportional to h.
 *  The entry with the smallest estimate is used; the gradient does not affect this choice. A probe is wrong if |e| is
 *  more than 4 times the estimate plus 2^-20 of the gradient along v. h is 1/8 of the larger of the element's magnitude
 *  and the tensor's root mean square.
 *
 *  An error in elements that are not probed singly shows in the probe that moves all; errors below fp32's rounding do
 *  not show. The caller releases *out with free(). Errors: AR_ERR_ARG, AR_ERR_MEMORY, those of the case's functions and the
 *  module. */
AR_NODISCARD ar_status ar_gradcheck_module(ar_gradcheck_module_report **out, const ar_module_case *c,
                                           const ar_check_module_options *o);

/** Runs ar_check_module and ar_gradcheck_module. *right becomes true if every layout gives the bits of one rank and the
 *  gradients are right. Writes both reports as text to text[0, cap), truncated if needed. Errors: those of both. */
AR_NODISCARD ar_status ar_prove_module(bool *right, char *text, size_t cap, const ar_module_case *c,
                                       const ar_check_module_options *o);

AR_END_DECLS
#endif
