/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_GRADS_GRADS_FAULT_H
#define ARI_VERIFY_GRADS_GRADS_FAULT_H

#include "anyrank/grads.h"

/** Refuses a fault that could not matter in one forward and backward of such a run, and says what would show it. What
 *  depends on the values (an id at the edge of a shard, unlike numbers of tokens) is not looked at. fresh: the weights
 *  are made here. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_grads_fault_check(const ar_grads_options *o, const ar_config *c, bool fresh);

#endif
