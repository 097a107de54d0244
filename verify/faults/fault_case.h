/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "verify/check/check_run.h"
#include "verify/writer/dump_ranks.h"

/* A case in which an injectable fault matters: a bundled model, a layout and a step in which it changes something; or a
 * module (ari_fault_module_check). Small, so that all of them run in a minute. The fault's symptoms are not known
 * here. */
typedef struct ari_fault_case {
    const char *fault;
    ar_run run;  /* its fault and plan are not looked at */
    bool module; /* no model: the name is only for reports */
    bool routed; /* its model has experts */
    bool in_f32; /* exact bf16 rounds as the fault does, or chooses other experts: the case keeps to fp32 then */
    ar_mlp_order order;
    size_t documents;              /* most documents packed in a row (ar_check_options); 0: no packing */
    unsigned char requirements[6]; /* properties that a run needs for the fault to matter: ari_fault_case_check */
} ari_fault_case;

/** The case of a fault; not of NULL. */
ari_fault_case ari_fault_case_of(const char *fault);
/** True if two cases run the same, except for the fault. */
bool ari_fault_case_equal(const ari_fault_case *a, const ari_fault_case *b);
/** Its run with a fault, or NULL. */
static inline ar_run ari_fault_run_of(const ari_fault_case *f, const char *fault, int threads, uint64_t seed)
{
    ar_run run = f->run;
    run.fault = fault;
    run.threads = threads;
    run.seed = seed;
    return run;
}
/** Refuses a run whose fault cannot matter in it, and says what would show it: "acts in a pipeline: give pp of at least
 *  2". What depends on the values (an id at the edge of a shard) is not looked at. fresh: the weights are made here;
 *  documents: rows hold several. Errors: AR_ERR_ARG. */
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
    size_t used; /* when it was last, counted from 1; 0: not made */
} ari_fault_base;

typedef struct ari_fault_bases {
    int threads; /* 0: the machine's cores */
    uint64_t seed;
    bool explain;         /* as in ar_check_options */
    ar_numerics numerics; /* of all but those that ari_fault_case_is_exact names */
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

/* Other ways to find a fault: a loss curve, and gradients compared within a tolerance. Both compare a faulty run with a
 * clean one of the same layout, so no baseline is needed. */

enum { ARI_CURVE_STEPS = 20, ARI_CURVE_FIRST_STEPS = 10 };
/* A loss that deviates by less is the same curve to the eye: a pixel of a plot that is 500 of them high. */
#define ARI_CURVE_UNSEEN 2e-3

/* 20 AdamW steps of a fault's case. */
typedef struct ari_fault_trace {
    bool ended; /* false: an error of the ranks ended the run, and there is nothing else */
    float loss[ARI_CURVE_STEPS];
    ari_dump_ranks gradients; /* of each rank, at the first step */
} ari_fault_trace;

/** Runs the case with `fault`, or NULL, and records a trace. Call ari_fault_trace_fini, also after a failure. Errors:
 *  those of reading model and text, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_fault_trace_run(ari_fault_trace *t, const ari_fault_case *f, const char *fault, int threads,
                                           uint64_t seed);
void ari_fault_trace_fini(ari_fault_trace *t);

typedef struct ari_fault_curve {
    double loss; /* largest relative deviation of the loss from the clean run's over the steps; infinity: not finite */
    double first_losses; /* the same over the first ten */
    double gradient;     /* largest |difference| of a gradient over its tensor's largest element, at the first step */
    char gradient_tensor[176];
} ari_fault_curve;

/** Both runs must have ended. */
ari_fault_curve ari_fault_curve_of(const ari_fault_trace *clean, const ari_fault_trace *faulty);
