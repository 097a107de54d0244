/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CHECK_MODULE_H
#define ANYRANK_CHECK_MODULE_H

#include "anyrank/check.h"
#include "anyrank/lint.h"
#include "anyrank/loss.h"
#include "anyrank/train.h"

AR_BEGIN_DECLS

/* The checks of anyrank, of a module of one's own. Two questions, two answers:
 *   - Do N ranks compute what one rank computes? ar_check_module: training steps under every layout, in the exact
 *     numerics, every reported tensor bit for bit against the same code on one rank.
 *   - Is what one rank computes right? There is no independent baseline of somebody else's module, so that the first
 *     check cannot say. ar_gradcheck_module: the gradients against differences of the loss. */

typedef struct ar_check_module_options {
    ar_run run;                  /* model, plan, parallel, batch, seq and ddp are not looked at. Exact numerics, in fp32
                                    or bf16, threads; no trace, virtual time or faults of the transport. fault: in
                                    the layouts, not on the one rank */
    const ar_parallel *parallel; /* [layouts] */
    size_t layouts;
    const ar_ddp_options *ddp; /* NULL: each gradient is summed over dp on its own. A layout with zero needs none, and
                                  has buckets of the usual size then */
} ar_check_module_options;

/** Runs one rank, then every layout against it. Compared are the parameters' first values, what modules report of their
 *  activations and gradients, the parameters' complete gradients, clipping and new weights; each sample's part on the
 *  rank that holds it. Gives the report even where runs differ or end in an error; its `result` tells. config has the
 *  module's name alone; seq is 1, max_error_vs_f64 NaN; losses and hashes are those of one rank. Bytes and memory are
 *  predicted by a dry run of every rank, unless tokens go to experts of other ranks. Borrows the options until return;
 *  ar_check_report_destroy.
 *  A layout that is illegal is an error of that layout.
 *  Errors (no report): AR_ERR_ARG (options; what one rank reports has no place for each value), AR_ERR_MEMORY, what the
 *  case's functions give, and what ends the one rank. */
AR_NODISCARD ar_status ar_check_module(ar_check_report **out, const ar_module_case *c,
                                       const ar_check_module_options *o);
/** The report in words, a line for each layout, and three for one that differs. Truncates to cap. */
void ar_check_module_text(const ar_check_report *r, char *text, size_t cap);

/** An operation of a module, as a dry run has it: of the library's layers and operators, and of what a module reports
 *  (ar_module_init, ar_tap_value). What a module does besides is opaque: its value has no placement until it is reported
 *  or redistributed. */
typedef struct ar_module_operation {
    char name[128];             /* of the module or the parameter */
    const char *operation;      /* "linear", "contract", "norm", "sum", "enter_region" .. Static storage */
    const char *pass;           /* "forward", "backward" */
    char takes[AR_LINT_PLACED]; /* as its value arrives, over the tensor-parallel ranks; "?": not known */
    char makes[AR_LINT_PLACED]; /* and leaves; "": it makes none */
    int ndim;                   /* of what it makes */
    size_t shape[AR_MAX_DIMS];  /* on this rank */
    uint64_t bytes;             /* that the rank sends in it, up to the next */
} ar_module_operation;

/** A layout of a module judged without a number. */
typedef struct ar_module_inspection {
    char name[96];
    ar_parallel parallel;
    ar_lint_report *lint;           /* of the axis tp */
    ar_module_operation *operation; /* [operations] of one step: of the first rank, or of the first of each rank of a
                                       pipeline, one after the other; none without tensor-parallel ranks */
    size_t operations;
    uint64_t bytes;        /* that all ranks send in run->steps steps */
    ar_rank_memory memory; /* of each kind the most that a rank holds */
} ar_module_inspection;
/** Runs every rank of run->parallel on nothing: no weight is drawn and no value computed. run is as
 *  ar_check_module_options has it, and gradients are summed by a data-parallel object of run->ddp.
 *  Gives:  *out, also where there are findings; ar_module_inspection_destroy.
 *  Errors: those of ar_check_module's options and of the case's functions, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_inspect_module(ar_module_inspection **out, const ar_module_case *c, const ar_run *run);
/** Accepts NULL. */
void ar_module_inspection_destroy(ar_module_inspection *m);
/** The findings, bytes and memory in words, and (flow) a line for each operation. Truncates to cap. */
void ar_inspect_module_text(const ar_module_inspection *m, bool flow, char *text, size_t cap);

/** One tensor of a gradcheck. */
typedef struct ar_gradcheck_tensor {
    char name[176];    /* of a parameter, or "input" */
    size_t count;      /* elements */
    size_t probes;     /* directions in which its values were moved */
    size_t wrong;      /* of them: the loss went another way than the gradient says */
    size_t unresolved; /* of them: what is allowed is more than 1/10 of the gradient's size, so that they say little */
    double largest;    /* |gradient| */
    double error;      /* the worst probe's, over the gradient's size in that direction */
    double allowed;    /* of that probe, in the same measure */
} ar_gradcheck_tensor;

typedef struct ar_gradcheck_module_report {
    char name[96];
    size_t batch;
    float loss;
    ar_gradcheck_tensor *tensor; /* [tensors] */
    size_t tensors;
    size_t probes, wrong, unresolved;
    size_t worst; /* index of the tensor with the largest error over what is allowed */
    bool ok;      /* no probe is wrong, and at most a quarter of them are unresolved */
} ar_gradcheck_module_report;

/** The gradients of the case's first batch against differences of its loss, on one rank, in exact numerics and fp32. Every
 *  parameter that requires a gradient, and the input, are moved: two elements drawn among those with |g| > 1e-3*max|g|,
 *  one with g = 0 where there is one (of a gradient that is all zero: three), and all elements at once, each up or down
 *  as a drawn bit says.
 *
 *  For a direction v and steps h, h/2, .., h/128 the error e(h) = (L(w + hv) - L(w - hv) - g.(w+ - w-))/2h is taken,
 *  with the values w+ and w- that fp32 holds. Differences of two losses are one exact sum of the terms of both, rounded
 *  once, so that what is left of rounding is that of the terms. e has an expansion in h^2, which Richardson's
 *  extrapolation takes to h = 0, with an estimate of its error from its neighbours (Ridders 1982, Advances in
 *  Engineering Software 4:75). To it are added 4*2^-24*|L|/h, for the rounding of the terms, and what corners of the
 *  loss (ReLU) near w may do: half the difference of the slopes to both sides is proportional to h where there are
 *  none, and what departs from that counts. Of all entries the one with the smallest estimate is taken; the gradient
 *  has no part in the choice. A probe is wrong where |e| is more than 4 times the estimate, plus 2^-20 of the
 * gradient's size. h is 1/8 of the larger of an element's size and the tensor's root mean square.
 *
 *  A mistake in elements that no probe moves alone still shows in the one that moves all. What is smaller than the
 *  rounding of fp32 does not.
 *  Errors: AR_ERR_ARG, AR_ERR_MEMORY, what the case's functions and the module give. */
AR_NODISCARD ar_status ar_gradcheck_module(ar_gradcheck_module_report **out, const ar_module_case *c,
                                           const ar_check_module_options *o);

/** Both checks, one after the other: *right where every layout has one rank's bits and the gradients agree; text: both
 *  reports in words. Truncates to cap. Errors: those of the two. */
AR_NODISCARD ar_status ar_prove_module(bool *right, char *text, size_t cap, const ar_module_case *c,
                                       const ar_check_module_options *o);

AR_END_DECLS
#endif
