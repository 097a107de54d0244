/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/trace.h"
#include "sim/plan/ops.h"

/** AR_OK: on every rank and queue the collectives of the run are those of the list, in its order, each with kind,
 *  ranks, elements, dtype and tag; and, where the trace has virtual time, the flops of all products are 2 a
 *  multiply-add. The run is of max(steps, 1) steps. Errors: AR_ERR_DATA with the first that differs in the message,
 *  *cause is then one of ari_call_causes, or NULL where the products differ; AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_recorded_calls(const char **cause, const ari_step_case *c, const ar_trace *t);

/* Causes of a difference in calls alone: identifiers of causes.md for runs whose values all agree. */
typedef enum ari_call_cause { ARI_CALL_REPEATED, ARI_CALL_ADDED, ARI_CALL_LEFT_OUT, ARI_CALL_CAUSES } ari_call_cause;
extern const char *const ari_call_causes[ARI_CALL_CAUSES];
