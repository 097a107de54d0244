/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_GRADIENTS_H
#define ANYRANK_GRADIENTS_H

#include "anyrank/train.h"

AR_BEGIN_DECLS

/* The gradients of a list of parameters over all tensor- and data-parallel ranks, and of those of a pipeline, each of
 * which has a list of its own: which train, made zero, summed, and verified: modules.md. Everything but the
 * queries is collective over the groups of the context, and a rank goes through all of its collectives whatever it
 * finds. One thread calls it. */
typedef struct ar_gradients ar_gradients;

/** Borrows ctx and the parameters until ar_gradients_destroy. The ranks' lists must be the same parameters in the same
 *  order, each once. Gives; ar_gradients_destroy. Errors: AR_ERR_ARG (a parameter twice), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_gradients_create(ar_gradients **out, ar_ctx *ctx, ar_param *const *params, size_t n);
/** The same for a module's parameters and its children's. */
AR_NODISCARD ar_status ar_gradients_create_module(ar_gradients **out, ar_ctx *ctx, ar_module *m);
/** Accepts NULL. */
void ar_gradients_destroy(ar_gradients *g);

/** Every gradient becomes zero, those of parameters that require none too. */
AR_NODISCARD ar_status ar_gradients_zero(ar_gradients *g);
/** Completes the gradients of the trainable parameters after the last backward pass: sums them over the data-parallel
 * group, partial ones over the tensor-parallel group first. ddp given: ar_ddp_wait of it, which holds them all. */
AR_NODISCARD ar_status ar_gradients_sync(ar_gradients *g, ar_ddp *ddp);

/** Values to verify. Plain data; {.gradients = true} is the usual one. */
typedef struct ar_gradients_verify_options {
    bool gradients; /* synchronised: there, finite, copies equal */
    bool values;    /* copies of the parameters are equal, of frozen ones too */
    ar_optimizer
        *optimizer;    /* copies of its state are equal, and all ranks have taken as many steps; NULL: not asked */
    bool allow_unused; /* a trainable parameter without gradient on any rank is a warning */
} ar_gradients_verify_options;

typedef enum ar_finding_kind {
    AR_FOUND_MISSING,    /* a trainable parameter without gradient */
    AR_FOUND_FROZEN,     /* one that is trainable on other ranks only */
    AR_FOUND_NOT_FINITE, /* NaN or infinities in a gradient */
    AR_FOUND_ZERO,       /* a gradient whose elements are all 0, on every rank: a warning */
    AR_FOUND_VALUE,      /* copies of the parameter differ */
    AR_FOUND_GRADIENT,   /* copies of its gradient differ */
    AR_FOUND_STATE,      /* copies of its optimizer state differ */
    AR_FOUND_STEPS       /* the optimizers have not taken as many steps */
} ar_finding_kind;
#define AR_FINDING_RANKS 64
/** Ranks are numbered as in the world (ar_parallel_rank). */
typedef struct ar_finding {
    ar_finding_kind kind;
    bool warning;
    char param[128]; /* "" with AR_FOUND_STEPS */
    char state[24];  /* AR_FOUND_STATE: "exp_avg" */
    size_t ranks;    /* on which it is so; of more than AR_FINDING_RANKS the first are listed */
    int rank[AR_FINDING_RANKS];
    int against;     /* where copies differ: a rank with the copy that most have, and where no copy has most of them, or
                        of two, the lowest rank; else -1 */
    double value;    /* AR_FOUND_NOT_FINITE: the first such element; AR_FOUND_STEPS: of rank[0]; else 0 */
    size_t elements; /* AR_FOUND_NOT_FINITE: how many on those ranks together */
} ar_finding;

/** The same on every rank. */
typedef struct ar_verdict {
    bool ok; /* no errors */
    size_t errors, warnings, findings;
    const ar_finding *finding; /* [findings], by parameter in the order of the list, one pipeline rank after the other;
                                  borrowed until the next verdict of the same ar_gradients, or its end */
} ar_verdict;
/** Asks all ranks and gives them one verdict. A hash of each copy travels, 8 bytes and which elements it is a copy of,
 *  not the copies. Under ZeRO what ranks share out is no copy, and is not compared. Errors (not findings):
 *  AR_ERR_MISMATCH (lists of parameters that differ), AR_ERR_MEMORY, those of the device and the communicators. */
AR_NODISCARD ar_status ar_gradients_verify(ar_gradients *g, ar_verdict *v, const ar_gradients_verify_options *o);
/** AR_OK, or AR_ERR_DATA with the first error's text and the number of those that follow. */
AR_NODISCARD ar_status ar_verdict_status(const ar_verdict *v);

AR_END_DECLS
#endif
