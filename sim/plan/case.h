/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/config.h"
#include "anyrank/run.h"
#include "ref/core/axis.h"

/* A step as it is asked about. */
typedef struct ari_step_case {
    ar_run run; /* model, plan, layout, batch, steps, numerics, storage of the matrices, dropout, clip, loss, buckets */
    const ar_config *config;
    bool forward_only;
    uint64_t verified;        /* steps in which gradients and copies are verified */
    const ari_routed *routed; /* by all ranks in all of the run; NULL: as if every expert had as many tokens */
    bool halves;              /* the rank stands for a pipeline without bubbles: its backward pass is cut in two */
    bool repeats;             /* samples have packed documents, or positions of their own: one may come several times */
    bool tapped; /* somebody listens to the values: some are put together for that, in memory of the step */
} ari_step_case;
