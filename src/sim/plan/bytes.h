/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_PLAN_BYTES_H
#define ARI_SIM_PLAN_BYTES_H

#include "sim/plan/ops.h"

/** Bytes moved between ranks from the first weight to the last step, all ranks together: the start (parameters made
 * equal over dp) and max(steps, 1) steps. A sum over the operations (parallelism.md has it as a table). Errors:
 * AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_traffic_bytes(uint64_t *bytes, const ari_step_case *c);

#endif
