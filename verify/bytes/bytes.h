/* SPDX-License-Identifier: Apache-2.0 */
/* The bytes that a run moves between its ranks, by closed formulas of the model's sizes, the plan and the layout. A
 * check compares the sum with the bytes that a run counts, so nothing here may use the code that makes the
 * collectives. */
#pragma once

#include "anyrank/arch.h"
#include "anyrank/run.h"
#include "ref/core/axis.h"

/* A step as it is asked about. */
typedef struct ari_step_case {
    ar_run run; /* model, plan, layout, batch, steps, numerics, storage of the matrices, dropout, clip, loss, buckets */
    const ar_config *config;
    bool forward_only;
    uint64_t verified;        /* steps in which gradients and copies are verified */
    const ari_routed *routed; /* rows that all ranks send in the run; NULL: every expert gets equally many tokens */
    bool repeats; /* a position may come several times in a sample: packed documents, or the batch's own positions */
    bool tapped;  /* somebody listens to the values: some are put together for that, in memory of the step */
} ari_step_case;

/** Predicts the bytes of all ranks together, from the first weight to the last of max(steps, 1) steps: over all
 *  collectives of N ranks and D bytes the sum of 2(N-1)D (all-reduce), (N-1)D (reduce-scatter, all-gather, broadcast),
 *  D (all-to-all, send) and ND (a hop of a ring).
 *  Source:  docs/design/parallelism.md, "Bytes"; each formula names its own.
 *  Errors:  AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan), AR_ERR_MEMORY. The case is one that ar_run_check accepts.
 *  Threads: safe. */
AR_NODISCARD ar_status ari_bytes_predict(uint64_t *bytes, const ari_step_case *c);

/** True if a step goes forward twice, first to count the routes of all tokens (ar_router_losses). */
bool ari_bytes_counts_routes(const ari_step_case *c);
/** How often the rows of a layer's experts are exchanged for the tokens of a pass and their gradients. */
size_t ari_bytes_routed_exchanges(const ari_step_case *c, size_t layer);
