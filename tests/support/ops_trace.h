/* SPDX-License-Identifier: Apache-2.0 */
/* The list of operations against what a run recorded: each rank's collectives, one by one, and its products. */
#ifndef TESTS_SUPPORT_OPS_TRACE_H
#define TESTS_SUPPORT_OPS_TRACE_H

#include "anyrank/trace.h"
#include "sim/plan/ops.h"

/** AR_OK: on every rank and queue the collectives of the run are those of the list, in its order, each with kind, ranks,
 *  elements, dtype and tag; and, where the trace has virtual time, the flops of all products are 2 a multiply-add. The
 *  run is of max(steps, 1) steps. Errors: AR_ERR_DATA with the first that differs, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ops_trace_compare(const ari_step_case *c, const ar_trace *t);

#endif
