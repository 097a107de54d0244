/* SPDX-License-Identifier: Apache-2.0 */
/* Time outside the passes: sums of gradients in buckets, the loss, the norm, gathered weights. */
#include <math.h>
#include <stdlib.h>

#include "planner/time_impl.h"
#include "ref/core/size.h"

typedef struct walk {
    const ari_time_options *o;
    ari_outside_rank *to;
    ari_links links[ARI_OVER_COPIES + 1]; /* of each group */
} walk;

/* Of an update by Muon the products of each block. */
static double products(const walk *w, const ari_operation *op)
{
    const ari_rates rates = ari_time_rates(w->o);
    double sum = 0.0;
    for (int i = 1; i < op->inputs && op->kind == ARI_OPERATION_MATRIX; i++) {
        const double a = (double)op->input[i].shape[0], b = (double)op->input[i].shape[1], m = fmin(a, b);
        const ari_gpu_product gram = {1.0, m, m, fmax(a, b), false}, square = {1.0, m, m, m, false},
                              last = {1.0, m, fmax(a, b), m, false};
        sum +=
            5.0 * (double)op->input[i].copies *
            (ari_rates_product(&rates, &gram) + ari_rates_product(&rates, &square) + ari_rates_product(&rates, &last));
    }
    return sum;
}

static ar_status add_call(ari_outside_rank *s, const ari_outside_call *c)
{
    s->sums += c->bucket ? c->seconds : 0.0;
    if (c->seconds == 0.0 && c->across == ARI_ACROSS_NONE)
        return AR_OK;
    AR_TRY(ari_grow(&s->call, &s->room, s->n, sizeof *s->call, "calls after the passes"));
    s->call[s->n++] = *c;
    return AR_OK;
}

static ari_across across_of(const ari_op_call *call)
{
    return call->over == ARI_OVER_ENDS                      ? ARI_ACROSS_ENDS
           : !(ari_over_axes(call->over) & ARI_CUTS_LAYERS) ? ARI_ACROSS_NONE
           : call->kind == ARI_CALL_BROADCAST               ? ARI_ACROSS_CHAIN
                                                            : ARI_ACROSS_ALL;
}

static ar_status visit_operation(void *user, const ari_operation *op)
{
    walk *w = user;
    ari_outside_rank *s = w->to;
    const bool counts = op->input[0].dtype == AR_I64; /* of a router; else its losses, which are summed with the loss */
    const bool before = op->kind == ARI_OPERATION_TARGETS || (op->kind == ARI_OPERATION_ROUTER_SUM && counts);
    const bool loss = op->kind == ARI_OPERATION_LOSS_SUM || op->kind == ARI_OPERATION_ROUTER_SUM ||
                      op->kind == ARI_OPERATION_FURTHER_SUM;
    ari_outside_call c = {.last = op->last, .bucket = op->kind == ARI_OPERATION_GRADIENT_SUM};
    c.last.layer = c.bucket ? c.last.layer : ARI_NO_LAYER;
    c.after = !c.bucket && !loss;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const ari_links *l = &w->links[call->over];
        const double n = (double)call->elements, width = ari_time_element(w->o, op, call);
        const ari_time_kind kind = ari_time_kind_of(call->over);
        c.seconds = ari_links_call(l, call->kind, n, width);
        c.overlapped = call->queue == ARI_ON_BUCKETS;
        c.across = across_of(call);
        s->stages += !c.bucket && kind == ARI_TIME_PP ? c.seconds : 0.0;
        s->before += before ? c.seconds : 0.0;
        ari_traffic_count(&s->moved, kind, ari_call_name(call->kind), l, 1.0, ari_links_sent(l, call->kind, n, width),
                          c.seconds);
        if (!before)
            AR_TRY(add_call(s, &c));
    }
    c.seconds = products(w, op);
    c.across = ARI_ACROSS_NONE;
    return add_call(s, &c);
}

/* A rank of a layout's pipeline. */
typedef struct place {
    const ari_planned *p;
    const ari_outside *s; /* of all its ranks */
    size_t rank;
} place;

/* The rank's k-th layer, from its first stage on; ARI_NO_LAYER: it has fewer. */
static size_t layer_at(const place *at, size_t k)
{
    const ar_parallel *layout = &at->p->step.run.parallel;
    const size_t stages = (size_t)ar_parallel_stages(layout), pp = (size_t)ari_at_least_one(layout->pp);
    for (size_t i = at->rank, first = 0, n = 0; i < stages; i += pp, k -= n) {
        ar_stage_layers(&first, &n, &layout->stages, at->p->step.config->layers, stages, i);
        if (k < n)
            return first + k;
    }
    return ARI_NO_LAYER;
}

/* True if two ranks do the same outside of the passes: both the first of their pipelines, or none, and so on. */
static bool same_outside(const place *a, const place *b)
{
    const ar_config *c = a->p->step.config;
    bool same = (a->rank == 0) == (b->rank == 0) && (a->rank + 1 == a->s->n) == (b->rank + 1 == b->s->n) &&
                a->p->step.run.plan.rules == 0;
    for (size_t k = 0, layer = 0; same && layer != ARI_NO_LAYER; k++) {
        const size_t other = layer_at(b, k);
        layer = layer_at(a, k);
        same = (layer == ARI_NO_LAYER) == (other == ARI_NO_LAYER) &&
               (layer == ARI_NO_LAYER || ar_config_has_experts(c, layer) == ar_config_has_experts(c, other));
    }
    return same;
}

static ar_status copy_outside(ari_outside_rank *to, const place *from, const place *at)
{
    const ari_outside_rank *a = &from->s->rank[from->rank];
    *to = *a;
    to->call = NULL;
    to->room = a->n;
    AR_TRY(ari_alloc((void **)&to->call, a->n, sizeof *to->call, "calls after the passes"));
    for (size_t i = 0, k = 0; i < a->n; i++) {
        const size_t layer = a->call[i].last.layer;
        to->call[i] = a->call[i];
        if (layer == ARI_NO_LAYER)
            continue;
        for (k = layer_at(from, k) == layer ? k : 0; layer_at(from, k) != layer;)
            k++;
        to->call[i].last.layer = layer_at(at, k);
    }
    return AR_OK;
}

/* A rank that does the same: of those before it, or its own of another layout. */
static bool find_like(place *like, const place *at, const ari_outside *other, const ari_planned *of)
{
    for (*like = (place){at->p, at->s, 0}; like->rank < at->rank; like->rank++) {
        if (same_outside(like, at))
            return true;
    }
    *like = (place){of, other, at->rank};
    return other && same_outside(like, at);
}

ar_status ari_outside_init(ari_outside *s, const ari_planned *p, const ari_time_options *o, const ari_outside *other)
{
    ari_planned of = *p;
    const ari_step_case c = ari_time_rank_case(p, o);
    const ar_parallel *layout = &c.run.parallel;
    const int stages = ari_extent(layout, ARI_CUTS_LAYERS), each = ar_parallel_world(layout) / stages;
    walk w = {.o = o};
    ar_status st = AR_OK;
    of.step.run.parallel.virtual_stages = other ? other->virtual_stages : 1;
    *s = (ari_outside){.n = (size_t)stages, .virtual_stages = layout->virtual_stages};
    AR_TRY(ari_alloc_zero((void **)&s->rank, s->n, sizeof *s->rank, "ranks of a pipeline"));
    for (int g = 0; g <= ARI_OVER_COPIES; g++)
        w.links[g] = ari_links_of(p, o, (ari_over)g);
    for (size_t r = 0; r < s->n && st == AR_OK; r++) {
        const place at = {p, s, r};
        place like;
        w.to = &s->rank[r];
        st = find_like(&like, &at, other, &of) ? copy_outside(w.to, &like, &at)
                                               : ari_operations_step(&c, (int)r * each, visit_operation, &w);
    }
    if (st != AR_OK)
        ari_outside_fini(s);
    return st;
}

void ari_outside_fini(ari_outside *s)
{
    for (size_t r = 0; r < s->n && s->rank; r++)
        free(s->rank[r].call);
    free(s->rank);
    s->rank = NULL;
}
