/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_CHECK_CALLS_H
#define ARI_VERIFY_CHECK_CHECK_CALLS_H

#include "anyrank/trace.h"
#include "sim/plan/ops.h"
#include "verify/check/call_causes.h"

/** AR_OK: on every rank and queue the collectives of the run are those of the list, in its order, each with kind,
 *  ranks, elements, dtype and tag; and, where the trace has virtual time, the flops of all products are 2 a
 *  multiply-add. The run is of max(steps, 1) steps. Errors: AR_ERR_DATA with the first that differs in the message,
 *  *cause is then one of ari_call_causes, or NULL where the products differ; AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_recorded_calls(const char **cause, const ari_step_case *c, const ar_trace *t);

#endif
