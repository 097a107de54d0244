/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a check: its input, the baseline's result for that input, and the comparison of one layout with it. */
#pragma once

#include "anyrank/check_module.h"
#include "anyrank/trace.h"
#include "ref/record/ledger.h"
#include "verify/bytes/bytes.h"
#include "verify/check/check_module_private.h"
#include "verify/check/compare.h"
#include "verify/lint/lint.h"
#include "verify/plan/estimate.h"
#include "verify/run/cluster_run.h"
#include "verify/run/run.h"

ARI_OWNER(ar_check_report, ar_check_report_destroy)

/** Estimates a whole check by its largest layout. Errors: those of ari_parallel_check and ari_estimate_check. */
AR_NODISCARD ar_status ari_check_estimate(ari_estimate *e, const ar_check_options *o, const ar_config *c);

/* --- the baseline (check_base.c) ---------------------------------------------------------------------------------- */

/** Cuts input_ids [batch, seq] from a text, one byte per token (modulo the vocabulary), row after row from a position
 *  that the seed determines (0: the start), wrapping around at the end. Release *ids with free(). Errors: those of
 *  reading the text, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_text_ids(int64_t **ids, size_t batch, size_t seq, size_t vocab, const char *text,
                                    uint64_t seed);

/** Cuts consecutive pieces of the text, one global batch per step. Release both results with free(), also after a
 *  failure. */
AR_NODISCARD ar_status ari_text_batches(int64_t **ids, ar_batch **batch, const ar_run *r, size_t vocab,
                                        const char *text);

/** Splits every row of these batches, all of one size, into 1 to `max_documents` documents of random lengths that
 *  depend on the seed, the step and the row. Release the shared array *document_ids with free(). Errors: AR_ERR_ARG
 *  (more documents than tokens), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_random_documents(int32_t **document_ids, ar_batch *batch, size_t batches,
                                            size_t max_documents, uint64_t seed);

/* The reference of a check: the model, its input, and the baseline's tensors. One base serves any number of layouts,
 * faults and reduction algorithms. */
typedef struct ari_check_base {
    ar_config config;
    ari_weights *weights; /* NULL: fresh */
    int64_t *ids;
    int32_t *documents;   /* [tokens] document numbers; NULL: each sequence is one document */
    char *documents_text; /* ari_documents_text of all steps */
    ar_batch *batch;      /* [max(steps, 1)] global batches */
    ar_batch *padded;     /* the same with the ranks' padding; NULL: no padding */
    int64_t *padded_ids;  /* all padded ids, then all labels */
    int32_t *padded_documents;
    ari_reference ref;
    float *loss;             /* [max(steps, 1)] losses */
    double max_error_vs_f64; /* as in ar_check_report */
    double seconds;          /* of the baseline */
} ari_check_base;

/** Reads weights and text and runs the baseline. Layouts and faults are ignored, options are not checked. `folder`:
 *  folder of the config. Call ari_check_base_fini, also after a failure. Errors: those of reading and of the baseline,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_base_init(ari_check_base *b, const ar_check_options *o, const ar_config *c,
                                           const char *folder);
void ari_check_base_fini(ari_check_base *b);
/** Does the part of ari_check_base_init after reading. Runs the exact baseline into b->ref and b->loss. Unless
 *  o->skip_f64, runs the binary64 baseline for max_error_vs_f64: the worst |exact - binary64| of a gradient of step 1
 *  relative to its tensor's largest |binary64|, NaN if unknown, infinity if only one of the two is finite. In native
 *  numerics also runs binary64 with rounding errors for every tensor's `allowed`. Errors: those of ar_baseline_run,
 *  AR_ERR_INTERNAL (the baselines emit different tensors). */
AR_NODISCARD ar_status ari_check_baseline(ari_check_base *b, const ar_check_options *o);

/* --- a layout (check_layout.c, check_run.c) ---------------------------------------------------------------------- */

/** Runs one layout with the options o, under each schedule that they ask for, and compares it with the reference. o is
 *  as ari_check_base_init filled it, except for the fields named above. Release *run with ari_check_run_fini, also
 *  after a failure. Errors: those of ari_check_run. */
AR_NODISCARD ar_status ari_check_base_run(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                                          const ar_parallel *p);
/** Runs one layout and compares it with the reference; the listener of `o` receives the comparison's messages. Sets
 *  all fields of `run` except bytes_predicted, which is an input. An error of the ranks is a result (AR_CHECK_ERROR)
 *  and not a failure, except AR_ERR_MEMORY, which is the machine's. Errors: AR_ERR_MEMORY, in a rank or in the
 *  comparison. */
AR_NODISCARD ar_status ari_check_run(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o);
/** Finds out why a run differs: runs the layout again, writes its dumps and the reference's to a temporary folder, and
 *  fills cause, hint, look and pattern of run->first, or sets `unexplained`. Does nothing for a run that ended with an
 *  error, a run whose ranks are processes, or a run that has a hint already. Errors: those of ari_check_run and of
 *  writing dumps, AR_ERR_IO. */
AR_NODISCARD ar_status ari_check_explain(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o);
/** Fills memory and shapes of `run` with the ranks' measured figures next to those of a dry run of each rank. ranks,
 *  counted: [world]. Errors: those of ari_cluster_dry and of a device, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_memory(ar_check_run *run, const ari_comparator *ranks, const ari_cluster_options *o,
                                        const ar_rank_memory *counted);
/** Makes each kind of memory the larger of the two. */
void ari_memory_raise(ar_rank_memory *peak, const ar_rank_memory *m);
/** Records that the run ended, or did not begin, with the error of ar_error_message. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_run_failed(ar_check_run *run);
/** Frees the run's memory. */
void ari_check_run_fini(ar_check_run *run);
/** Releases an array of runs. Accepts NULL if runs is 0. */
void ari_check_runs_destroy(ar_check_run *run, size_t runs);
/** Describes the reference's tensors in the report. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_describe(ar_check_report *r, const ari_reference *ref);
/** Sets `pattern` and `hint` for a tensor that the ranks' reports do not cover exactly once: which ranks hold the same
 *  part, or what is missing, and what kind of fault causes that. */
void ari_explain_coverage(ar_first_difference *f, const ari_comparator *ranks, int n, size_t tensor);

/* --- routes (check_layout.c) -------------------------------------------------------------------------------------- */

/* A rank of a dry run that uses the expert choices of the baseline. */
typedef struct ari_routed_rank {
    const ari_reference *ref;
    const ari_step_case *c;
    int rank;
} ari_routed_rank;
/** Reads which experts the baseline has chosen for the tokens of a dry run's rank, as ari_known_routes.read does. user:
 *  an ari_routed_rank. Errors: AR_ERR_INTERNAL (the baseline has no such router, or the layout no such tokens). */
AR_NODISCARD ar_status ari_check_read_routes(void *user, const ar_ctx *ctx, int32_t *expert, const size_t shape[3],
                                             const char *router, int sharer);

/* --- modules (check_module.c) ------------------------------------------------------------------------------------- */

/** Saves every tensor of a run on one rank (an ar_tap_fn). user: an ari_reference, zeroed before the first call.
 *  Errors: AR_ERR_ARG (a tensor that is not full fp32), those of ari_reference_emit. */
AR_NODISCARD ar_status ari_reference_tap(void *user, const ar_tap_event *event);

/** Refuses options that no check of a module supports; name: the module's. Errors: AR_ERR_ARG, AR_ERR_UNSUPPORTED. */
AR_NODISCARD ar_status ari_module_run_check(const ar_run *r, const char *name);

/** Checks the case and the options except for the layouts. Errors: those of ar_check_module. */
AR_NODISCARD ar_status ari_module_options_check(const ar_module_case *c, const ar_check_module_options *o);
/** Writes a finding such as "mlp.down.weight, linear (forward): has P(sum), needs R, missing_reduction: all-reduce over
 *  tp". Returns text. */
const char *ari_lint_finding_text(char *text, size_t cap, const ar_lint_finding *f);

/** Checks that on every rank and queue the run has made the collectives of a fault-free dry run, in order, with equal
 *  kind, ranks, elements, dtype and tag. ref: source of the experts' routes; NULL: experts in turn. Errors:
 *  AR_ERR_DATA, whose message has the first difference and for which *cause is one of ari_call_causes; those of
 *  ari_cluster_dry. */
AR_NODISCARD ar_status ari_recorded_calls(const char **cause, const ari_reference *ref, const ari_cluster_options *o,
                                          const ar_trace *t);
/* Causes of a difference in the calls only: identifiers of causes.md for runs whose values are all equal. */
typedef enum ari_call_cause { ARI_CALL_REPEATED, ARI_CALL_ADDED, ARI_CALL_LEFT_OUT, ARI_CALL_CAUSES } ari_call_cause;
extern const char *const ari_call_causes[ARI_CALL_CAUSES];
