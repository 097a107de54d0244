/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_CHECK_ROUTES_H
#define ARI_VERIFY_CHECK_CHECK_ROUTES_H

#include "sim/plan/ops.h"
#include "verify/reference/reference.h"

/** Rows that a layout's expert-parallel ranks send each other in a run, from the baseline's logits and the layout alone:
 *  each token's experts, and where they and the token are. 0 without such ranks. */
AR_NODISCARD ar_status ari_check_routed(uint64_t *rows, const ari_reference *ref, const ari_step_case *c);

#endif
