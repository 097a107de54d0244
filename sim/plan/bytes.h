/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_PLAN_BYTES_H
#define ARI_SIM_PLAN_BYTES_H

#include "anyrank/config.h"
#include "anyrank/context.h"
#include "anyrank/model.h"

/* What a step will move, from config and layout alone: nothing here looks at a run (docs/parallelism.md has the table).
 */
typedef struct ari_traffic_case {
    const ar_config *config;
    ar_plan plan;
    int tp;
    size_t batch, seq;
    ar_numerics numerics;
    bool forward_only;
} ari_traffic_case;

/** Bytes moved between ranks in one step with weights not used before, all ranks together.
 *  Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_traffic_bytes(uint64_t *bytes, const ari_traffic_case *c);

#endif
