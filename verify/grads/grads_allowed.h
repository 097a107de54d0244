/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_GRADS_GRADS_ALLOWED_H
#define ARI_VERIFY_GRADS_GRADS_ALLOWED_H

#include "anyrank/grads.h"
#include "run/cluster_run.h"
#include "verify/grads/block_case.h"
#include "verify/grads/gather.h"
#include "verify/reference/sensitivity.h"

/** Fills `ref` (zeroed) with the baseline's tensors of the run, and what each may be off in the arithmetic that o asks
 *  for. Errors: those of ari_sensitivity_allow. */
AR_NODISCARD ar_status ari_grads_allow_model(ari_reference *ref, const ari_cluster_options *run,
                                             const ar_grads_options *o);
AR_NODISCARD ar_status ari_grads_allow_block(ari_reference *ref, const ari_block_case *b, const ar_grads_options *o);
/** Writes allowances of all tensors, those that are wanted under their names in their files too. */
AR_NODISCARD ar_status ari_grads_allowed_write(const ari_reference *ref, const ari_gatherer *wanted, const char *path,
                                               ar_sensitivity of, const char *hash);

#endif
