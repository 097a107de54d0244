/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "verify/check/check_run.h"
#include "verify/writer/dump_ranks.h"

/* A case in which an injected fault has an effect: a bundled model with a layout and a step, or a module
 * (ari_fault_module_check). All cases together run in a minute. The fault's symptoms are not part of the case. */
typedef struct ari_fault_case {
    const char *fault;
    ar_run run;  /* the run; its fault and plan are ignored */
    bool module; /* no model: the name is only for reports */
    bool routed; /* true if the model has experts */
    bool in_f32; /* true if exact bf16 rounds as the fault does, or chooses other experts; the case then uses fp32 */
    ar_mlp_order order;
    size_t documents;              /* most documents packed in a row (ar_check_options); 0: no packing */
    unsigned char requirements[6]; /* properties that a run needs for the fault to matter: ari_fault_case_check */
} ari_fault_case;

/** The case of a fault; not of NULL. */
ari_fault_case ari_fault_case_of(const char *fault);
/** True if two cases run the same, except for the fault. */
bool ari_fault_case_equal(const ari_fault_case *a, const ari_fault_case *b);
/** Returns the case's run with a fault, or without one for NULL. */
static inline ar_run ari_fault_run_of(const ari_fault_case *f, const char *fault, int threads, uint64_t seed)
{
    ar_run run = f->run;
    run.fault = fault;
    run.threads = threads;
    run.seed = seed;
    return run;
}
/** Refuses a run in which the fault has no effect, and says what would show it: "acts in a pipeline: give pp of at
 *  least 2". Effects that depend on values (such as an id at the edge of a shard) are not checked. fresh: the weights
 *  are generated; documents: rows contain several documents. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_fault_case_check(const ar_run *r, ar_mlp_order order, const ar_config *c, bool fresh,
                                            bool documents);
/** Loads the case's config and plan; not for a module. Errors: those of reading the model. */
AR_NODISCARD ar_status ari_fault_case_load(ar_config *c, ar_plan *plan, const ari_fault_case *f);

/* Number of baselines kept for cases to share. Cases with the same model, batch, steps, clipping and dropout share one;
 * the most recently used ones are kept. */
enum { ARI_FAULT_BASES = 4 };
typedef struct ari_fault_base {
    ari_fault_case fault_case;
    ari_check_base base;
    size_t used; /* time of the last use, counted from 1; 0: not created yet */
} ari_fault_base;

typedef struct ari_fault_bases {
    int threads; /* number of threads; 0: the machine's cores */
    uint64_t seed;
    bool explain;         /* as in ar_check_options */
    ar_numerics numerics; /* numerics of all cases except those that ari_fault_case_is_exact names */
    ar_precision precision;
    ari_fault_base base[ARI_FAULT_BASES];
    size_t uses;
} ari_fault_bases;

/** Returns true if a case always runs in exact numerics: a module, and experts in a precision so coarse that some
 *  tokens choose other experts, for which no allowance holds. */
bool ari_fault_case_is_exact(const ari_fault_case *f, ar_precision precision);
/** Compares a run of the case with `fault`, or NULL for the clean run. Call ari_check_run_fini on *run, also after a
 *  failure. Errors: those of reading the model, of ari_check_base_init and ari_check_base_run. */
AR_NODISCARD ar_status ari_fault_case_run(ar_check_run *run, ari_fault_bases *bases, const ari_fault_case *f,
                                          const char *fault);
void ari_fault_bases_fini(ari_fault_bases *bases);

/* --- a module ----------------------------------------------------------------------------------------------------- */

/** Compares a module under the case's layout with the same module on one rank: y = x W^T next to an unused matrix, with
 *  squared errors. `fault` is on under the layout. bases: for threads, seed and explain. Release *out with
 *  ar_check_report_destroy. Errors: those of ar_check_module. */
AR_NODISCARD ar_status ari_fault_module_check(ar_check_report **out, const ari_fault_case *f, const char *fault,
                                              const ari_fault_bases *bases);

/* --- a loss curve ------------------------------------------------------------------------------------------------- */

/* Two other ways to find a fault: a loss curve, and gradients compared with a tolerance. Both compare a faulty run with
 * a clean run of the same layout, so they need no baseline. */

enum { ARI_CURVE_STEPS = 20, ARI_CURVE_FIRST_STEPS = 10 };
/* Largest relative deviation of a loss that is invisible in a plot: one pixel of 500. */
#define ARI_CURVE_UNSEEN 2e-3

/* 20 AdamW steps of a fault's case. */
typedef struct ari_fault_trace {
    bool ended; /* false: an error of the ranks ended the run, and the other fields are not set */
    float loss[ARI_CURVE_STEPS];
    ari_dump_ranks gradients; /* gradients of each rank in the first step */
} ari_fault_trace;

/** Runs the case with `fault`, or NULL, and records a trace. Call ari_fault_trace_fini, also after a failure. Errors:
 *  those of reading model and text, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_fault_trace_run(ari_fault_trace *t, const ari_fault_case *f, const char *fault, int threads,
                                           uint64_t seed);
void ari_fault_trace_fini(ari_fault_trace *t);

typedef struct ari_fault_curve {
    double loss; /* largest relative deviation of the loss from the clean run; infinity: the loss is not finite */
    double first_losses; /* the same over the first ten steps */
    double gradient;     /* largest |difference| of a gradient relative to its tensor's largest element, in the first
                            step */
    char gradient_tensor[176];
} ari_fault_curve;

/** Compares two runs that have both ended. */
ari_fault_curve ari_fault_curve_of(const ari_fault_trace *clean, const ari_fault_trace *faulty);
