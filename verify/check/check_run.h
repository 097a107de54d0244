/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_CHECK_RUN_H
#define ARI_VERIFY_CHECK_CHECK_RUN_H

#include "anyrank/check.h"
#include "run/cluster_run.h"
#include "run/estimate.h"
#include "verify/check/compare.h"

/** Runs one layout and compares it with the reference; the listener of `o` hears what the comparing does. Fills
 * everything of `run` but bytes_predicted, which it reads. A run that ends in an error of its ranks is a result
 * (AR_CHECK_ERROR), not a failure; but for AR_ERR_MEMORY, which is the machine's and not the layout's. Errors:
 * AR_ERR_MEMORY, of a rank or of the comparing itself. */
AR_NODISCARD ar_status ari_check_run(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o);

/** Frees what it holds. */
void ari_check_run_fini(ar_check_run *run);

/** The same for an array of them, and the array; accepts NULL where there are none. */
void ari_check_runs_destroy(ar_check_run *run, size_t runs);

/** What a whole check takes: the estimate of its largest layout. Errors: those of ari_estimate_check. */
AR_NODISCARD ar_status ari_check_estimate(ari_estimate *e, const ar_check_options *o, const ar_config *c);

#endif
