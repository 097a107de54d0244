/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_GRADS_FAULT_H
#define ARI_VERIFY_GRADS_FAULT_H

#include "anyrank/grads.h"

/** Refuses a fault that could not matter in one forward and backward of such a run, and says what would show it.
 *  Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_grads_fault_check(const ar_grads_options *o);

#endif
