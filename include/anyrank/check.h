/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CHECK_H
#define ANYRANK_CHECK_H

#include "anyrank/config.h"
#include "anyrank/run.h"

AR_BEGIN_DECLS

/* The check runs training steps of a model on N simulated ranks, under several parallel layouts, and compares every
 * reported tensor of every step with an independent single-process baseline (baseline.h): bit for bit in exact
 * numerics, within derived rounding bounds (sensitivity.h) in native numerics (ar_numerics in context.h). */

/** Options of ar_check. */
typedef struct ar_check_options {
    ar_run run; /* run.parallel is ignored; run.sim.algorithm may not be AR_SIM_LAST, whose bytes per rank depend on
                   timing. run.sim.trace and run.sim.faults need a single layout and a single run */
    const ar_parallel *parallel; /* the layouts to check, [layouts] */
    size_t layouts;              /* number of layouts */
    bool gradcheck;   /* also compares the binary64 baseline's gradients with central differences, on a smaller batch */
    const char *text; /* text file of the training data, one token per byte; NULL: the bundled text */
    size_t documents; /* each sequence is packed from up to this many documents, cut at random; 0 or 1: no packing */
    size_t padding;   /* rows without targets that are appended to the ranks' batch but not to the baseline's;
                         results of the other rows must not change */
    /* Number of deterministic thread schedules (ar_sim_options.explore) that each layout runs under, with seeds from
     * run.sim.schedule_seed on, until one gives a difference. 0: one run under the system's scheduler. */
    uint64_t schedules;
    bool strict_predictions; /* mispredicted bytes or shapes fail the check (ar_check_passes) */
    bool explain;            /* ask the Python package for the cause of each difference, which runs the layout again */
    bool skip_f64;           /* do not run the binary64 baseline; max_error_vs_f64 is then NaN */
    const char *dump;        /* output folder, created if missing: reference.safetensors with the baseline's tensors,
                                a folder with one file per rank for each layout (pytorch.md), and model.json.
                                Replaces an earlier dump only. NULL: none */
    void (*progress)(void *user, double fraction, const char *phase); /* NULL: none */
    void *progress_user;                                              /* first argument of progress */
} ar_check_options;

/* Result of a check, from best to worst. */
typedef enum ar_check_result {
    AR_CHECK_SAME,         /* all tensors equal (native numerics: within the bounds) */
    AR_CHECK_MISPREDICTED, /* SAME, but bytes moved, memory used or shapes differ from what model and layout predict */
    AR_CHECK_VACUOUS,      /* SAME, but from some tensor on values are NaN or infinite in the baseline too, so that
                              equality proves nothing */
    AR_CHECK_DIFFERENT,    /* a tensor differs */
    AR_CHECK_ERROR         /* the run failed */
} ar_check_result;

/** The baseline's first tensor, in execution order, with a NaN or infinite element (AR_CHECK_VACUOUS). */
typedef struct ar_check_vacuous {
    char tensor[176];                /* name with suffix, as in ar_first_difference; "": there is none */
    char pass[16];                   /* as in ar_first_difference */
    int step, ndim;                  /* training step; dimensions of the tensor */
    size_t index[AR_MAX_DIMS];       /* of the first NaN or infinite element */
    float value;                     /* of this element */
    size_t elements, elements_empty; /* of that tensor: all elements; NaN or infinite ones */
    size_t tensors;                  /* number of tensors with NaN or infinite elements, in all steps */
} ar_check_vacuous;

/** The first tensor, in execution order, that differs between a run and the baseline. */
typedef struct ar_first_difference {
    int step;             /* 1, 2, .. */
    char pass[16];        /* "init", "forward", "backward", "clip", "update" */
    char tensor[176];     /* name with a suffix for the pass: "model.layers.0.mlp.down_proj:fwd" */
    int layer;            /* index of the transformer block; -1: outside of the blocks */
    int ndim, local_ndim; /* 0: a scalar, or rank is -1 */
    size_t index[AR_MAX_DIMS], local_index[AR_MAX_DIMS]; /* of the first differing element: in full; in the part */
    float reference, actual;                             /* the baseline's value; the rank's */
    uint64_t ulp;                                        /* distance of the two values in units in the last place */
    int rank; /* the rank with the element (of replicas the lowest wrong one); -1: no rank reported the tensor */
    size_t elements, elements_different; /* of this tensor: all elements; those that differ */
    /* The explanation, if it was asked for; "": not known. */
    char pattern[256];     /* which elements differ */
    char cause[48];        /* identifier in causes.md; "unknown": no known cause fits */
    char hint[512];        /* what happened, in a sentence */
    char look[512];        /* what to look at in the program */
    char unexplained[400]; /* why nothing could be asked: no Python, no numpy */
} ar_first_difference;

/** Results of one layout. */
typedef struct ar_check_run {
    ar_parallel parallel;                                            /* the layout */
    ar_check_result result;                                          /* of this layout */
    size_t tensors, tensors_different, elements, elements_different; /* compared; and how many of them differ */
    uint64_t max_ulp;                                                /* largest difference in units in the last place */
    uint64_t bytes_counted, bytes_predicted, bytes_per_rank_max; /* sent by all ranks; predicted; a rank's largest */
    uint64_t bytes_bf16;    /* bytes if bf16 were sent where exact numerics sends integers; 0: not known */
    uint64_t calls[7];      /* of all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, exchange, barrier */
    double max_ratio;       /* native numerics: largest |difference| over its rounding bound; 0 in exact numerics.
                               Weights after Adam count only above 1, because correct runs reach their bound */
    char ratio_tensor[176]; /* the tensor with this ratio */
    ar_rank_memory memory, memory_predicted; /* of each kind the maximum over ranks */
    bool has_memory_predicted;               /* false: see `unpredicted`, or a failed run */
    const char *unpredicted; /* why memory and shapes have no prediction to compare with; NULL: they have, or the run
                                failed */
    char memory_difference[160]; /* the first rank and kind of memory that differ from the prediction; "": none */
    double seconds;              /* wall time */
    bool has_predicted;          /* `predicted` is set: a cluster was given, and the run completed */
    ar_trace_summary predicted;  /* times of the run by the cluster's virtual clock */
    uint64_t schedules;          /* deterministic schedules run; 0: the operating system's scheduler */
    uint64_t schedule_seed;      /* of the last schedule; it repeats the run if the result is not AR_CHECK_SAME */
    float *loss;                 /* [max(steps, 1)], of each step */
    char weights_hash[65], gradients_hash[65]; /* SHA-256: weights after the last step; its gradients before clipping */
    char outputs_hash[65];      /* of the model's outputs in the last step; "" if they differ from the baseline's,
                                   and in native numerics */
    size_t shapes;              /* number of weights and module outputs whose shapes on each rank were compared */
    char shape_difference[448]; /* the first tensor and rank whose shape differs from the layout's; "": none */
    char call_difference[448];  /* the first collective that differs from the predicted ones, if all tensors are
                                   right but other bytes moved; "": none */
    const char *call_cause;     /* identifier of that difference in causes.md; NULL: none. Static storage */
    bool has_difference;        /* `first` is set */
    ar_first_difference first;
    char dump[600];              /* folder with the ranks' files; "": no dump */
    char *error;                 /* message of a failed run: one line, then the table of ranks; NULL: no error */
    ar_sim_rank_report *reports; /* [world], if ranks are threads and the run failed; else NULL */
} ar_check_run;

/** Central differences of the loss compared with the binary64 baseline's gradients g, for one step size. Of each
 *  parameter two random elements with |g| > 1e-3*max|g| and one with g = 0, if there is one, are tested; errors are
 *  relative to max(|g|, 1e-3*max|g|). */
typedef struct ar_gradcheck_row {
    double step; /* step size, relative to the larger of the element's magnitude and the tensor's root mean square */
    double max_relative_error; /* over all tested elements */
    char worst_tensor[176];    /* the parameter with this error */
} ar_gradcheck_row;
#define AR_GRADCHECK_STEPS 8 /* most step sizes */
/** Results of the gradient check over all step sizes. */
typedef struct ar_gradcheck {
    size_t batch, seq; /* of the smaller batch that it uses */
    size_t elements;   /* number of elements tested */
    size_t parameters; /* number of parameter tensors, all of which are tested */
    ar_gradcheck_row row[AR_GRADCHECK_STEPS];
    size_t rows;               /* entries of row[] */
    size_t best;               /* index of the row with the smallest error */
    double max_relative_error; /* of that row */
    char worst_tensor[176];    /* of that row */
    bool ok;                   /* max_relative_error < 1e-6 */
} ar_gradcheck;

/** Report of a check. */
typedef struct ar_check_report {
    ar_config config;
    char folder[512];                      /* of the model */
    bool fresh;                            /* weights were initialised randomly, not read from files */
    size_t parameters;                     /* elements of all parameters */
    size_t batch, seq, documents, padding; /* those of the options */
    size_t tensors, elements;              /* compared in each run */
    int steps;                             /* training steps */
    ar_numerics numerics;
    ar_precision precision;
    float *loss;             /* [max(steps, 1)], the baseline's */
    double baseline_seconds; /* wall time of the baseline */
    size_t kinks;            /* native numerics: arguments of ReLU so near to 0 that rounding may change the slope */
    double max_error_vs_f64; /* largest |exact - binary64| of a gradient tensor over its largest |binary64|, over all
                                gradients; NaN: not measured, or gradients are NaN; infinity: only one is finite */
    char weights_hash[65], gradients_hash[65], outputs_hash[65]; /* of the baseline */
    bool has_gradcheck;                                          /* `gradcheck` is set */
    ar_gradcheck gradcheck;
    char dump[600]; /* path of the baseline's reference.safetensors; "": no dump */
    ar_check_vacuous vacuous;
    ar_check_run *run; /* [runs], one for each layout */
    size_t runs;
    ar_check_result result;  /* the worst of the runs */
    bool strict_predictions; /* that of the options */
} ar_check_report;

/** Returns true if a result of report r or of one of its runs means success: AR_CHECK_SAME or, unless the check has
 *  strict_predictions, AR_CHECK_MISPREDICTED. */
static inline bool ar_check_passes(const ar_check_report *r, ar_check_result result)
{
    return result == AR_CHECK_SAME || (result == AR_CHECK_MISPREDICTED && !r->strict_predictions);
}

/** Checks a model: runs the baseline once and every layout, and compares them. Returns AR_OK with a report also if runs
 *  differ or fail; its `result` reports it. The caller releases *out with ar_check_report_destroy. Borrows the options
 *  until return. Errors (without report): AR_ERR_ARG (batch, seq or layouts is 0; too little memory; contradictory
 *  options), AR_ERR_SHAPE (seq exceeds the model's maximum), AR_ERR_INDIVISIBLE and AR_ERR_UNSUPPORTED (invalid
 *  layouts), AR_ERR_MEMORY (also of a rank), those of reading model and text. */
AR_NODISCARD ar_status ar_check(ar_check_report **out, const ar_check_options *o);
/** Frees a report. Accepts NULL. */
void ar_check_report_destroy(ar_check_report *r);

/** Callback that receives each tensor that a check compares: name with suffix and pass as in ar_first_difference, and
 *  its full shape [ndim]. Listing ends with the returned status if it is not AR_OK. */
typedef ar_status (*ar_check_tensor_fn)(void *user, const char *tensor, const char *pass, int ndim,
                                        const size_t *shape);

AR_END_DECLS
#endif
