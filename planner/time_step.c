/* SPDX-License-Identifier: Apache-2.0 */
/* What is outside of the passes: sums of gradients in buckets, the loss, the norm, weights gathered. */
#include <stdlib.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

typedef struct walk {
    const ari_time_options *o;
    ari_outside *to;
    ari_links tp, dp;
} walk;

static double calls(walk *w, const ari_operation *op)
{
    double sum = 0.0;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const bool dp = call->over == ARI_OVER_DP;
        const ari_links *l = dp ? &w->dp : &w->tp;
        const double n = (double)call->elements, width = ari_time_element(w->o, op, call);
        const double seconds = ari_links_call(l, call->kind, n, width);
        sum += seconds;
        ari_moves_row(&w->to->moved, dp ? ARI_TIME_DP : ARI_TIME_TP, ari_call_name(call->kind), l, 1.0,
                      ari_links_sent(l, call->kind, n, width), seconds);
    }
    return sum;
}

static ar_status add_bucket(ari_outside *s, const ari_operation *op, double seconds)
{
    AR_TRY(ari_grow(&s->bucket, &s->room, s->n, sizeof *s->bucket, "buckets"));
    s->bucket[s->n++] = (ari_bucket_cost){op->last, seconds, op->calls > 0 && op->call[0].queue == ARI_ON_BUCKETS};
    return AR_OK;
}

static ar_status visit(void *user, const ari_operation *op)
{
    walk *w = user;
    ari_outside *s = w->to;
    const double seconds = calls(w, op);
    if (op->kind == ARI_OPERATION_GRADIENT_SUM)
        return add_bucket(s, op, seconds);
    if (op->kind == ARI_OPERATION_TARGETS)
        s->before += seconds;
    else if (op->kind == ARI_OPERATION_LOSS_SUM)
        s->loss += seconds;
    else
        s->after += seconds;
    return AR_OK;
}

/* The embedding is of the first stage, the head of the last. */
ar_status ari_outside_init(ari_outside *s, const ari_planned *p, const ari_time_options *o)
{
    ar_config config = *p->step.config;
    const ari_step_case c = ari_time_case(p, o, &config);
    *s = (ari_outside){.layers = ari_stage_count(p, 0)};
    config.layers = s->layers;
    config.tied = config.tied || ari_at_least_one(p->pp) > 1;
    walk w = {.o = o, .to = s, .tp = ari_links_of(p, o, ARI_OVER_TP), .dp = ari_links_of(p, o, ARI_OVER_DP)};
    const ar_status st = ari_operations_step(&c, 0, visit, &w);
    if (st != AR_OK)
        ari_outside_fini(s);
    return st;
}

void ari_outside_fini(ari_outside *s)
{
    free(s->bucket);
    s->bucket = NULL;
}
