/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/context.h"
#include "anyrank/process.h"
#include "ref/core/size.h"
#include "verify/reference/reference.h"

/* One rank's result for one tensor. A rank that processes its samples in micro-batches reports a tensor once for each,
 * in any order. Reports of adjacent rows are merged; the local tensor is the reports concatenated along dimension 0. */
typedef struct ari_finding {
    bool is_reported;
    bool broken;        /* true if reports are still waiting for rows between: the same part was reported twice, or
                           rows are missing */
    bool misshapen;     /* reported as a tensor of another shape, the layout's, and not compared */
    size_t covered;     /* number of elements of the full tensor that this rank holds */
    size_t different;   /* number of this rank's elements that differ: in bits, or by more than the allowance */
    uint64_t max_ulp;   /* largest distance among them */
    double max_ratio;   /* largest |difference| relative to the allowance; 0 if equal bits are required */
    size_t first_index; /* lowest index in the full tensor of an element that differs */
    size_t first_local; /* index of the same element in the rank's local tensor, row-major */
    float actual;       /* the run's value at that index */
    ar_layout layout;   /* position of this rank's part */
    int ndim;           /* shape of that part */
    size_t shape[AR_MAX_DIMS];
} ari_finding;

/* A rank's copy of a tensor that differs, kept for the pattern. */
typedef struct ari_saved_tensor {
    size_t tensor; /* index in the reference */
    float *local;  /* contiguous, the finding's shape */
} ari_saved_tensor;

enum { ARI_SAVED_COPIES = 4 };

/* A report whose rows do not join the existing ones until the rows between arrive. */
typedef struct ari_waiting_report {
    struct ari_waiting_report *next;
    size_t tensor;   /* index in the reference */
    ar_tensor local; /* contiguous, of `values` */
    ar_layout layout;
    float values[];
} ari_waiting_report;

/* A run's values of requested tensors. If every bit equals the reference's, the reference's values are used. Ranks
 * share the struct, and each writes its own boxes. Parts that no rank reported are zero (ari_run_tensors_finish). */
typedef struct ari_run_tensors {
    const ari_reference *reference;
    bool *requested; /* [reference->count] */
    float **values;  /* [reference->count]: set for a requested tensor in which an element differs; else NULL */
} ari_run_tensors;
/** Requests the final weights and gradients. Allocates in the arena; the caller also calls ari_run_tensors_fini.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_run_tensors_init(ari_run_tensors *v, const ari_reference *reference, ari_arena *arena);
void ari_run_tensors_fini(ari_run_tensors *v);

/* Compares the values reported by one rank. */
typedef struct ari_comparator {
    const ari_reference *reference;
    ari_run_tensors *run_values;                    /* NULL: the run's values are not requested */
    ari_finding *finding;                           /* [reference->count] */
    ari_saved_tensor kept_copies[ARI_SAVED_COPIES]; /* copies of the first tensors in execution order that differ, in
                                                       any order */
    size_t kept_count;
    ari_waiting_report *waiting;
    char unexpected[320]; /* first report that cannot be compared, and why; "" if none */
} ari_comparator;

AR_NODISCARD ar_status ari_comparator_init(ari_comparator *c, const ari_reference *reference,
                                           ari_run_tensors *run_values);
void ari_comparator_fini(ari_comparator *c);
/** Compares a reported value. Has the type ar_tap_fn; user: the rank's ari_comparator. */
AR_NODISCARD ar_status ari_comparator_tap(void *user, const ar_tap_event *event);

/* All ranks' results for one tensor. */
typedef struct ari_verdict {
    bool complete;    /* true if the ranks' boxes cover the full tensor exactly once in every replica */
    size_t different; /* number of elements of the full tensor that differ; for replicas, the number in the worst
                         replica */
    uint64_t max_ulp;
    double max_ratio;
    size_t first_index, first_local;
    float actual;
    int rank; /* lowest rank with the first difference; -1: none */
} ari_verdict;
ari_verdict ari_verdict_of(const ari_comparator *ranks, int n, size_t tensor);

/** Elements of the rank's local tensor. */
size_t ari_finding_count(const ari_finding *f);
/** Returns the rank's local tensor, contiguous: its saved copy, or the reference's values if it does not differ. Memory
 *  is from the arena. Errors: AR_ERR_MEMORY, AR_ERR_NOT_FOUND (it differs but was not saved). */
AR_NODISCARD ar_status ari_comparator_copy(float **out, const ari_comparator *c, size_t tensor, ari_arena *arena);

/** With ranks as processes: collects every process's findings about its rank in the comparators of process 0, with the
 *  values of first copies. Errors: those of the processes, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_comparators_collect(ar_process *p, ari_comparator *ranks, int n, ari_run_tensors *values);
/** Sets requested tensors to zero where the ranks did not report them completely, so that the reference's values are
 *  not used. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_run_tensors_finish(ari_run_tensors *v, const ari_comparator *ranks, int n);

/** Returns the distance of two fp32 values in units in the last place; UINT32_MAX if exactly one is NaN. */
uint64_t ari_ulp_distance(float a, float b);
