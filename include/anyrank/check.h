/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CHECK_H
#define ANYRANK_CHECK_H

#include "anyrank/cause.h"
#include "anyrank/run.h"

AR_BEGIN_DECLS

/* The check: training steps on N simulated ranks against the independent baseline, every named tensor of every step:
 * bit for bit in the exact numerics, within a stated allowance in the native ones. */

typedef struct ar_check_options {
    ar_run run;                  /* batch and seq: default of the command 8 x 64. `parallel` is not looked at. Not
                                    AR_SIM_LAST: the bytes of a rank would be chance. A trace records the one run of the
                                    one layout; faults of the transport strike it */
    const ar_parallel *parallel; /* [layouts] */
    size_t layouts;
    bool gradcheck;   /* the binary64 baseline against central differences, on a shrunk batch */
    const char *text; /* one byte one token; NULL: the project's own */
    size_t documents; /* each sequence is that many packed documents at most, cut where the seed says; 0 or 1: one */
    size_t padding;   /* rows that the ranks' batch has behind the baseline's: copies of its rows that predict nothing.
                         They split the batch otherwise, and change nothing of its rows */
    /* 0: the system's scheduler. Else each layout runs under the deterministic scheduler's schedules
     * run.sim.schedule_seed and after it, so many of them, until one run is not the same. */
    uint64_t schedules;
    bool strict_predictions; /* a wrong prediction fails the check: ar_check_passes */
    bool skip_f64;           /* do not run the binary64 baseline (max_error_vs_f64 is NaN) */
    const char *dump; /* folder, made if it is not there: the baseline's tensors as reference.safetensors, each layout's
                         ranks as a folder of its own (pytorch.md), and beside them model.json; replaces an earlier
                         dump, and nothing else. NULL: none */
    void (*progress)(void *user, double fraction, const char *phase); /* NULL: nobody listens */
    void *progress_user;
} ar_check_options;

/* From the best to the worst. Mispredicted: the same bits, but other bytes were moved or held, or parts had other
 * shapes, than model and layout predict. Vacuous: the same bits, but from some tensor on they are NaN or infinite, on
 * one rank already, and say nothing. */
typedef enum ar_check_result {
    AR_CHECK_SAME,
    AR_CHECK_MISPREDICTED,
    AR_CHECK_VACUOUS,
    AR_CHECK_DIFFERENT,
    AR_CHECK_ERROR
} ar_check_result;

/** The one rank's first tensor, in execution order, with a NaN or an infinity; from there on tensors say nothing. */
typedef struct ar_check_vacuous {
    char tensor[176]; /* with its suffix; "": there is none */
    char pass[16];
    int step, ndim;
    size_t index[AR_MAX_DIMS]; /* of the first such element */
    float value;
    size_t elements, elements_empty; /* of that tensor; empty: NaN or infinite */
    size_t tensors;                  /* that have such an element, of all steps */
} ar_check_vacuous;

/** The first tensor in execution order in which a run leaves the baseline. */
typedef struct ar_first_difference {
    int step;             /* 1, 2, .. */
    char pass[16];        /* "init", "forward", "backward", "clip", "update" */
    char tensor[176];     /* with its suffix, "model.layers.0.mlp.down_proj:fwd" */
    int layer;            /* -1: outside the blocks */
    int ndim, local_ndim; /* 0: the value has no dimensions, or no rank holds a difference (rank -1) */
    size_t index[AR_MAX_DIMS], local_index[AR_MAX_DIMS]; /* in the full tensor; in the rank's own part */
    float reference, actual;                             /* the baseline's value; the rank's */
    uint64_t ulp;
    int rank; /* that holds it: of a replicated value the lowest whose copy is wrong; -1: the tensor was not reported */
    size_t elements, elements_different; /* of this tensor */
    char pattern[256], hint[512];
    ar_evidence evidence; /* of the hint */
} ar_first_difference;

typedef struct ar_check_run {
    ar_parallel parallel;
    ar_check_result result;
    size_t tensors, tensors_different, elements, elements_different;
    uint64_t max_ulp;
    uint64_t bytes_counted, bytes_predicted, bytes_per_rank_max;
    uint64_t bytes_bf16; /* what the same steps would move in bf16, where exact sums travel as integers; 0: not known */
    uint64_t calls[7];   /* all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, exchange, barrier */
    double max_ratio;    /* native: the worst |difference| over what is allowed; 0 in the exact numerics. Of weights
                               after Adam, whose allowance is a bound that right runs reach, only what is above 1 */
    char ratio_tensor[176];                  /* the tensor that has it */
    ar_rank_memory memory, memory_predicted; /* of each kind the most that a rank holds */
    bool has_memory_predicted;   /* false: of packed documents, of a module's routed tokens, or where the run failed */
    char memory_difference[160]; /* "", or the first rank that holds other bytes than are predicted, and of what */
    double seconds;
    bool has_predicted;         /* with a cluster, of a run that came to its end */
    ar_trace_summary predicted; /* of the whole run, by the virtual clock */
    uint64_t schedules;         /* run; 0: the system's scheduler */
    uint64_t schedule_seed;     /* of the last one: the one to replay where the result is not AR_CHECK_SAME */
    float *loss;                /* [max(steps, 1)] */
    char weights_hash[65], gradients_hash[65]; /* after the last step; of the last step, before clipping */
    char outputs_hash[65];      /* of the model's outputs in the last step; "" where they differ from the baseline's,
                                   and in the native numerics */
    size_t shapes;              /* weights and outputs of modules whose shape on a rank is in the list of operations */
    char shape_difference[448]; /* "", or the first rank that holds another shape than the layout has, and of what */
    char call_difference[448];  /* "", or where other bytes moved than the layout has, and all tensors are right: the
                                   first collective that is another one */
    const char *call_cause;     /* what kind of difference that is (causes.md); NULL: none. Static storage */
    bool has_difference;
    ar_first_difference first;
    char dump[600];              /* the folder of its ranks' files; "": none (none was asked for, or the run failed) */
    char *error;                 /* NULL, or why the run ended: one line, then the table of ranks */
    ar_sim_rank_report *reports; /* [world] with an error of ranks that are threads, else NULL */
} ar_check_run;

/** Central differences against the binary64 baseline's gradients: of every parameter two elements drawn among those
 *  with |g| > 1e-3*max|g| and one with g = 0, where there is one; errors relative to max(|g|, 1e-3*max|g|). */
typedef struct ar_gradcheck_row {
    double step; /* of the difference, relative to the element's size or the tensor's root mean square, the larger */
    double max_relative_error; /* over all elements drawn */
    char worst_tensor[176];
} ar_gradcheck_row;
#define AR_GRADCHECK_STEPS 8
typedef struct ar_gradcheck {
    size_t batch, seq; /* shrunk */
    size_t elements;   /* drawn */
    size_t parameters; /* tensors, all of them */
    ar_gradcheck_row row[AR_GRADCHECK_STEPS];
    size_t rows;
    size_t best;               /* the row with the smallest error */
    double max_relative_error; /* of that row */
    char worst_tensor[176];
    bool ok; /* below 1e-6 */
} ar_gradcheck;

typedef struct ar_check_report {
    ar_config config;
    char folder[512];
    bool fresh;        /* weights made here, not read */
    size_t parameters; /* elements */
    size_t batch, seq, documents, padding;
    size_t tensors, elements; /* compared per run */
    int steps;
    ar_numerics numerics;
    ar_precision precision;
    float *loss; /* [max(steps, 1)], the baseline's */
    double baseline_seconds;
    size_t kinks;            /* native: arguments of relu that may be on either side of 0: so may the slope */
    double max_error_vs_f64; /* worst |exact - binary64| of a gradient over its largest |binary64|; NaN: not measured,
                                or gradients are NaN; infinity: only one of the two is finite */
    char weights_hash[65], gradients_hash[65], outputs_hash[65]; /* the baseline's */
    bool has_gradcheck;
    ar_gradcheck gradcheck;
    char dump[600]; /* the file of the reference; "" */
    ar_check_vacuous vacuous;
    ar_check_run *run; /* [runs] */
    size_t runs;
    ar_check_result result;  /* the worst of the runs */
    bool strict_predictions; /* as asked for */
} ar_check_report;

/** True if a result, of the report or of one of its runs, passes: the same bits and, in a check that is strict about
 *  predictions, the predicted figures too. */
static inline bool ar_check_passes(const ar_check_report *r, ar_check_result result)
{
    return result == AR_CHECK_SAME || (result == AR_CHECK_MISPREDICTED && !r->strict_predictions);
}

/** Runs the baseline once and every layout against it. Gives the report even where runs differ or end in an error; its
 *  `result` tells. Borrows the options until return. Errors (no report):
 *  AR_ERR_ARG (batch, seq or layouts of 0; memory that would not suffice; options that contradict each other),
 *  AR_ERR_SHAPE (seq longer than the model's),
 *  AR_ERR_INDIVISIBLE and AR_ERR_UNSUPPORTED (illegal layouts), AR_ERR_MEMORY (also of one rank), and those of reading
 *  the model and the text. */
AR_NODISCARD ar_status ar_check(ar_check_report **out, const ar_check_options *o);
/** Accepts NULL. */
void ar_check_report_destroy(ar_check_report *r);

/** One tensor that a check compares: its name with its suffix, its pass as in ar_first_difference, its full shape. A
 *  status other than AR_OK ends the listing with it. */
typedef ar_status (*ar_check_tensor_fn)(void *user, const char *tensor, const char *pass, int ndim,
                                        const size_t *shape);

AR_END_DECLS
#endif
