/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CHECK_H
#define ANYRANK_CHECK_H

#include "anyrank/model.h"
#include "anyrank/sim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The check: a step on N simulated ranks against the independent baseline, every named tensor bit for bit. */

typedef struct ar_check_options {
    const char *model; /* folder, .json file or bundled name */
    const int *tp;     /* layouts: numbers of tensor-parallel ranks */
    size_t layouts;
    size_t batch, seq; /* default of the command: 8 x 64 */
    const char *text;  /* one byte one token; NULL: the project's own */
    uint64_t seed;     /* of fresh weights and of the place in the text */
    ar_fault fault;
    ar_plan plan;
    ar_sim_algorithm algorithm;
    int threads;         /* of the whole process; 0: the cores of the machine */
    uint64_t timeout_ns; /* longest wait of a rank for another; 0: 60 s */
    bool skip_f64;       /* do not run the binary64 baseline (max_error_vs_f64 is NaN) */
    void (*progress)(void *user, double fraction, const char *what); /* NULL: nobody listens */
    void *progress_user;
} ar_check_options;

typedef enum ar_check_result { AR_CHECK_SAME, AR_CHECK_DIFFERENT, AR_CHECK_ERROR } ar_check_result;

/** The first tensor in execution order in which a run leaves the baseline. */
typedef struct ar_first_difference {
    int step;             /* 1 */
    char pass[16];        /* "init", "forward", "backward" */
    char tensor[176];     /* with its suffix, "model.layers.0.mlp.down_proj:fwd" */
    int layer;            /* -1: outside the blocks */
    int ndim, local_ndim; /* 0: the value has no dimensions, or no rank holds a difference (rank -1) */
    size_t index[AR_MAX_DIMS], local_index[AR_MAX_DIMS]; /* in the full tensor; in the rank's own part */
    float reference, actual;                             /* the baseline's value; the rank's */
    uint64_t ulp;
    int rank; /* that holds it: of a replicated value the lowest whose copy is wrong; -1: the tensor was not reported */
    size_t elements, elements_different; /* of this tensor */
    char pattern[256], hint[512];
} ar_first_difference;

typedef struct ar_check_run {
    int tp;
    ar_check_result result;
    size_t tensors, tensors_different, elements, elements_different;
    uint64_t max_ulp;
    uint64_t bytes_counted, bytes_predicted, bytes_per_rank_max;
    uint64_t calls[7]; /* all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, exchange, barrier */
    /* Per rank, the largest: weights; gradient state; what the forward pass keeps; the most of a step at once. */
    size_t weights_bytes, gradients_bytes, stored_bytes, peak_bytes;
    double seconds;
    float loss;
    char weights_hash[65], gradients_hash[65];
    bool has_difference;
    ar_first_difference first;
    char *error;                 /* NULL, or why the run ended: one line, then the table of ranks */
    ar_sim_rank_report *reports; /* [tp] with an error, else NULL */
} ar_check_run;

typedef struct ar_check_report {
    ar_config config;
    char folder[512];
    bool fresh;        /* weights made here, not read */
    size_t parameters; /* elements */
    size_t batch, seq;
    size_t tensors, elements; /* compared per run */
    float loss;               /* the baseline's */
    double baseline_seconds;
    double max_error_vs_f64; /* worst |exact - binary64| of a gradient over its largest |binary64|; NaN: not measured,
                                or gradients are NaN; infinity: only one of the two is finite */
    char weights_hash[65], gradients_hash[65]; /* the baseline's */
    char nan_tensor[176];                      /* the first baseline tensor with a NaN; "" if none */
    ar_check_run *run;                         /* [runs] */
    size_t runs;
    ar_check_result result; /* the worst of the runs */
} ar_check_report;

/** Runs the baseline once and every layout against it. Gives the report even where runs differ or end in an error; its
 *  `result` tells. Borrows the options until return. Errors (no report):
 *  AR_ERR_ARG (batch, seq or layouts of 0; memory that would not suffice), AR_ERR_SHAPE (seq longer than the model's),
 *  AR_ERR_INDIVISIBLE and AR_ERR_UNSUPPORTED (illegal layouts), AR_ERR_MEMORY (also of one rank), and those of reading
 *  the model and the text. */
AR_NODISCARD ar_status ar_check(ar_check_report **gives, const ar_check_options *o);
/** Accepts NULL. */
void ar_check_report_destroy(ar_check_report *r);

/** The layouts that `anyrank check` takes by default: those of {2, 3, 4, 6, 8, 12} that are legal for the model, or 1
 * if none is. Returns how many, at most cap. */
size_t ar_check_default_layouts(const ar_config *c, const ar_plan *plan, int *tp, size_t cap);

#ifdef __cplusplus
}
#endif
#endif
