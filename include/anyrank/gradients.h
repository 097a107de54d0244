/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_GRADIENTS_H
#define ANYRANK_GRADIENTS_H

#include "anyrank/train.h"

AR_BEGIN_DECLS

/* Manages and verifies the gradients of a list of parameters across the ranks of all parallel groups (modules.md). In a
 * pipeline each rank has the list of its own stages. Functions that take an ar_gradients are collective over the groups
 * of the context, except ar_gradients_destroy; a rank takes part in all collectives even if it finds a problem. Only
 * one thread may use it. */
typedef struct ar_gradients ar_gradients;

/** Creates an ar_gradients for n parameters. All ranks must list the same parameters in the same order, each once.
 *  Borrows ctx and the parameters until ar_gradients_destroy, with which the caller releases *out. Errors: AR_ERR_ARG
 *  (a parameter is listed twice), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_gradients_create(ar_gradients **out, ar_ctx *ctx, ar_param *const *params, size_t n);
/** Creates an ar_gradients for the parameters of a module and its children; otherwise as ar_gradients_create. */
AR_NODISCARD ar_status ar_gradients_create_module(ar_gradients **out, ar_ctx *ctx, ar_module *m);
/** Frees an ar_gradients. Accepts NULL. */
void ar_gradients_destroy(ar_gradients *g);

/** Sets all gradients to zero, those of frozen parameters too. */
AR_NODISCARD ar_status ar_gradients_zero(ar_gradients *g);
/** Reduces the gradients of the trainable parameters after the last backward pass of a step: over the data-parallel
 *  group, those of ar_param.spread over the tensor-parallel group first. ddp: an ar_ddp that holds all of them, on
 *  which ar_ddp_wait is called instead; NULL: none. */
AR_NODISCARD ar_status ar_gradients_sync(ar_gradients *g, ar_ddp *ddp);

/** What ar_gradients_verify checks; usually {.gradients = true}. Plain data. */
typedef struct ar_gradients_verify_options {
    bool gradients;          /* reduced gradients exist, are finite, and are equal on ranks that hold copies */
    bool values;             /* values are equal on ranks that hold copies of a parameter, frozen ones included */
    ar_optimizer *optimizer; /* its state is equal on ranks that hold copies, and all ranks have taken the same number
                                of steps; NULL: not checked */
    bool allow_unused;       /* a trainable parameter without gradient on all ranks is a warning, not an error */
} ar_gradients_verify_options;

/* Kind of problem that the verification found. */
typedef enum ar_finding_kind {
    AR_FOUND_MISSING,    /* a trainable parameter has no gradient */
    AR_FOUND_FROZEN,     /* a parameter is frozen on these ranks and trainable on others */
    AR_FOUND_NOT_FINITE, /* a gradient has NaN or infinite elements */
    AR_FOUND_ZERO,       /* all elements of a gradient are 0 on every rank; a warning */
    AR_FOUND_VALUE,      /* copies of a parameter's value differ */
    AR_FOUND_GRADIENT,   /* copies of a gradient differ */
    AR_FOUND_STATE,      /* copies of an optimizer state differ */
    AR_FOUND_STEPS       /* the ranks' optimizers have taken different numbers of steps */
} ar_finding_kind;
#define AR_FINDING_RANKS 64 /* most ranks that a finding lists */
/** A problem with one parameter. Ranks are numbered as in the world (ar_parallel_rank). */
typedef struct ar_finding {
    ar_finding_kind kind;
    bool warning;               /* false: an error */
    char param[128];            /* the parameter's name; "" with AR_FOUND_STEPS */
    char state[24];             /* AR_FOUND_STATE: the state's name, such as "exp_avg" */
    size_t ranks;               /* number of ranks with the problem: where copies or step counts differ, those that
                                   differ from `against` */
    int rank[AR_FINDING_RANKS]; /* the first of these ranks */
    int against;     /* where copies or step counts differ: a rank with what the majority has (without a majority, or of
                        two ranks: the lowest one); else -1 */
    double value;    /* AR_FOUND_NOT_FINITE: the first such element; AR_FOUND_STEPS: the steps of rank[0]; else 0 */
    size_t elements; /* AR_FOUND_NOT_FINITE: number of such elements on all these ranks */
} ar_finding;

/** Result of a verification, equal on every rank. */
typedef struct ar_verdict {
    bool ok;                           /* errors == 0 */
    size_t errors, warnings, findings; /* findings: errors + warnings */
    const ar_finding *finding; /* [findings], in the order of the parameter list, one pipeline rank after the other;
                                  valid until the next verification by the same ar_gradients, or its destruction */
} ar_verdict;
/** Verifies what the options select on all ranks and writes the same verdict on each to *verdict. Ranks exchange an
 *  8-byte hash of each copy, not the copies; what ZeRO shards has no copies and is not compared. Problems are findings,
 *  not errors. Errors: AR_ERR_MISMATCH (parameter lists differ), AR_ERR_MEMORY, those of device and communicators. */
AR_NODISCARD ar_status ar_gradients_verify(ar_gradients *g, ar_verdict *verdict,
                                           const ar_gradients_verify_options *options);
/** Returns AR_OK if the verdict has no errors; else AR_ERR_DATA; the message has the first and counts the others. */
AR_NODISCARD ar_status ar_verdict_status(const ar_verdict *v);

AR_END_DECLS
#endif
