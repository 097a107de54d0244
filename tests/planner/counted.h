/* SPDX-License-Identifier: Apache-2.0 */
/* Floating-point operations of a training step, counted in the list of operations: what the formulas are held to. */
#pragma once

#include "ref/core/size.h"
#include "verify/plan/planner.h"

/* Multiply-adds. One layer may be walked for all. */
typedef struct counted {
    double layers;            /* that a walked one stands for */
    size_t walked;            /* of the walk */
    double all;               /* of both passes */
    double blocks, attention; /* of the forward pass: of the blocks, and of attention in them */
} counted;

static ar_status count_operation(void *user, const ari_operation *op)
{
    counted *n = user;
    const bool block = op->layer < n->walked;
    const double all = op->multiply_adds * (block ? n->layers : 1.0);
    n->all += all;
    if (block && op->pass == ARI_PASS_FORWARD) {
        n->blocks += all;
        n->attention += op->kind == ARI_OPERATION_ATTENTION ? all : 0.0;
    }
    return AR_OK;
}

static ar_status count_ranks(counted *n, const ari_step_case *step, int ranks)
{
    ari_step_case one = *step;
    ar_config config = *step->config;
    one.run.parallel.recompute.what = AR_RECOMPUTE_NONE;
    if (config.window == 0) /* else layers may see other keys than the first */
        config.layers = ari_walked_of(&one, false).n;
    one.config = &config;
    one.run.parallel.tp = ranks;
    one.run.batch = 1;
    *n = (counted){.layers = (double)(step->config->layers / config.layers), .walked = config.layers};
    for (int r = 0; r < ranks; r++) {
        AR_TRY(ari_operations(&one, ARI_OPS_FORWARD, r, count_operation, n));
        if (!step->forward_only)
            AR_TRY(ari_operations(&one, ARI_OPS_BACKWARD, r, count_operation, n));
    }
    return AR_OK;
}

/* Two for each multiply-add of the list of operations: what one rank would do, and what all ranks do
 *  together, with the products of KV copies and what recomputation adds. It is the forward pass of attention there, a
 *  third of what Korthikanti et al. count. Errors: AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan). */
static ar_status flops_counted(double *model, double *hardware, const ari_planned *p)
{
    counted one, all;
    const ari_step_case whole = ari_planned_whole(p);
    AR_TRY(count_ranks(&one, &whole, 1));
    AR_TRY(count_ranks(&all, &whole, ari_at_least_one(p->step.run.parallel.tp)));
    /* Flash attention, whose backward pass computes scores from rows, has nothing to compute again beforehand. */
    const ar_recompute what = p->step.run.parallel.recompute.what;
    const double again = p->step.forward_only                          ? 0.0
                         : what == AR_RECOMPUTE_FULL                   ? all.blocks
                         : what == AR_RECOMPUTE_SELECTIVE && !p->flash ? all.attention
                                                                       : 0.0;
    const double tokens = (double)p->step.run.seq;
    *model = 2.0 * one.all / tokens;
    *hardware = 2.0 * (all.all + ari_recomputed_share(&p->step) * again) / tokens;
    return AR_OK;
}
