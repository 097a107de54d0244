/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_PLAN_BYTES_H
#define ARI_SIM_PLAN_BYTES_H

#include "anyrank/config.h"
#include "anyrank/context.h"
#include "anyrank/model.h"
#include "anyrank/run.h"

/* What a step will move, from config and layout alone: nothing here looks at a run (docs/parallelism.md has the
 * table). */
typedef struct ari_traffic_case {
    ar_run run; /* of its ddp only find_unused; storage: of the matrices */
    const ar_config *config;
    bool forward_only;
    uint64_t verified; /* steps in which gradients and copies are verified */
} ari_traffic_case;

/** Bytes moved between ranks from the first weight to the last step, all ranks together: the start (parameters made
 * equal over dp) and max(steps, 1) steps. Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_traffic_bytes(uint64_t *bytes, const ari_traffic_case *c);

#endif
