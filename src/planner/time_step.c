/* SPDX-License-Identifier: Apache-2.0 */
/* Time outside the passes: sums of gradients in buckets, the loss, the norm, gathered weights. */
#include <stdlib.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

typedef struct walk {
    const ari_time_options *o;
    ari_outside_rank *to;
    ari_links links[ARI_OVER_COPIES + 1]; /* of each group */
} walk;

static double calls(walk *w, const ari_operation *op)
{
    double sum = 0.0;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const ari_links *l = &w->links[call->over];
        const double n = (double)call->elements, width = ari_time_element(w->o, op, call);
        const double seconds = ari_links_call(l, call->kind, n, width);
        sum += seconds;
        const ari_time_kind kind = ari_time_kind_of(call->over);
        w->to->stages += op->kind != ARI_OPERATION_GRADIENT_SUM && kind == ARI_TIME_PP ? seconds : 0.0;
        ari_traffic_count(&w->to->moved, kind, ari_call_name(call->kind), l, 1.0,
                          ari_links_sent(l, call->kind, n, width), seconds);
    }
    return sum;
}

static ar_status add_bucket(ari_outside_rank *s, const ari_operation *op, double seconds)
{
    AR_TRY(ari_grow(&s->bucket, &s->room, s->n, sizeof *s->bucket, "buckets"));
    s->bucket[s->n++] = (ari_bucket_cost){op->last, seconds, op->calls > 0 && op->call[0].queue == ARI_ON_BUCKETS};
    return AR_OK;
}

static ar_status visit_operation(void *user, const ari_operation *op)
{
    walk *w = user;
    ari_outside_rank *s = w->to;
    const double seconds = calls(w, op);
    if (op->kind == ARI_OPERATION_GRADIENT_SUM)
        return add_bucket(s, op, seconds);
    const bool counts = op->input[0].dtype == AR_I64; /* of a router; else its losses, which are summed with the loss */
    if (op->kind == ARI_OPERATION_TARGETS || (op->kind == ARI_OPERATION_ROUTER_SUM && counts))
        s->before += seconds;
    else if (op->kind == ARI_OPERATION_LOSS_SUM || op->kind == ARI_OPERATION_ROUTER_SUM ||
             op->kind == ARI_OPERATION_FURTHER_SUM)
        s->loss += seconds;
    else
        s->after += seconds;
    return AR_OK;
}

/* Layers of a rank's stage, and the first of them. */
static size_t layers_of(const ari_planned *p, size_t stage, size_t *first)
{
    const ar_parallel *layout = &p->step.run.parallel;
    size_t count = 0;
    ar_stage_layers(first, &count, &layout->stages, p->step.config->layers, (size_t)ar_parallel_stages(layout), stage);
    return count;
}

/* True if two ranks between the first and the last of a pipeline do the same outside of the passes. */
static bool same_outside(const ari_planned *p, size_t a, size_t b)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t stages = (size_t)ar_parallel_stages(layout), pp = (size_t)ari_at_least_one(layout->pp);
    bool same = a > 0 && b + 1 < pp && p->step.run.plan.rules == 0;
    for (size_t i = 0, first = 0, other = 0; same && i < stages; i += pp) {
        const size_t n = layers_of(p, a + i, &first);
        same = n == layers_of(p, b + i, &other);
        for (size_t l = 0; l < n && same; l++)
            same = ar_config_has_experts(p->step.config, first + l) == ar_config_has_experts(p->step.config, other + l);
    }
    return same;
}

/* The layer of b at the place of a's. */
static size_t same_place(const ari_planned *p, size_t layer, size_t a, size_t b)
{
    const ar_parallel *layout = &p->step.run.parallel;
    const size_t stages = (size_t)ar_parallel_stages(layout), pp = (size_t)ari_at_least_one(layout->pp);
    size_t first = 0, other = 0;
    for (size_t i = 0; i < stages && layer != ARI_NO_LAYER; i += pp) {
        const size_t count = layers_of(p, a + i, &first);
        if (layer < first || layer >= first + count)
            continue;
        (void)layers_of(p, b + i, &other);
        return other + (layer - first);
    }
    return layer;
}

static ar_status copy_outside(ari_outside *s, const ari_planned *p, size_t from, size_t to)
{
    const ari_outside_rank *a = &s->rank[from];
    ari_outside_rank *b = &s->rank[to];
    *b = *a;
    b->bucket = NULL;
    b->room = a->n;
    AR_TRY(ari_alloc((void **)&b->bucket, a->n, sizeof *b->bucket, "buckets"));
    for (size_t i = 0; i < a->n; i++) {
        b->bucket[i] = a->bucket[i];
        b->bucket[i].last.layer = same_place(p, a->bucket[i].last.layer, from, to);
    }
    return AR_OK;
}

ar_status ari_outside_init(ari_outside *s, const ari_planned *p, const ari_time_options *o)
{
    const ari_step_case c = ari_time_rank_case(p, o);
    const ar_parallel *layout = &c.run.parallel;
    const int stages = ari_extent(layout, ARI_CUTS_LAYERS), each = ar_parallel_world(layout) / stages;
    walk w = {.o = o};
    ar_status st = AR_OK;
    *s = (ari_outside){.n = (size_t)stages};
    AR_TRY(ari_alloc_zero((void **)&s->rank, s->n, sizeof *s->rank, "ranks of a pipeline"));
    for (int g = 0; g <= ARI_OVER_COPIES; g++)
        w.links[g] = ari_links_of(p, o, (ari_over)g);
    for (size_t r = 0; r < s->n && st == AR_OK; r++) {
        size_t like = 0;
        w.to = &s->rank[r];
        while (like < r && !same_outside(p, like, r))
            like++;
        st = like < r ? copy_outside(s, p, like, r) : ari_operations_step(&c, (int)r * each, visit_operation, &w);
    }
    if (st != AR_OK)
        ari_outside_fini(s);
    return st;
}

void ari_outside_fini(ari_outside *s)
{
    for (size_t r = 0; r < s->n && s->rank; r++)
        free(s->rank[r].bucket);
    free(s->rank);
    s->rank = NULL;
}
