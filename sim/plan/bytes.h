/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_PLAN_BYTES_H
#define ARI_SIM_PLAN_BYTES_H

#include "anyrank/config.h"
#include "anyrank/context.h"
#include "anyrank/model.h"
#include "anyrank/parallel.h"

/* What a step will move, from config and layout alone: nothing here looks at a run (docs/parallelism.md has the table).
 */
typedef struct ari_traffic_case {
    const ar_config *config;
    ar_plan plan;
    ar_parallel parallel;
    size_t batch, seq; /* of the global batch */
    int steps;         /* 0: one forward and backward, no update */
    bool clip;
    ar_numerics numerics;
    ar_dtype storage; /* of the matrices: AR_BF16 in native numerics; 0: AR_F32 */
    bool forward_only;
    bool find_unused;  /* of the DDP options */
    uint64_t verified; /* steps in which gradients and copies are verified */
} ari_traffic_case;

/** Bytes moved between ranks from the first weight to the last step, all ranks together: the start (parameters made
 * equal over dp) and max(steps, 1) steps. Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_traffic_bytes(uint64_t *bytes, const ari_traffic_case *c);

#endif
