/* SPDX-License-Identifier: Apache-2.0 */
/* Time outside the passes: sums of gradients in buckets, the loss, the norm, gathered weights. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/context_private.h"
#include "verify/plan/time_impl.h"

typedef struct walk {
    const ari_planned *p;
    const ari_time_options *o;
    size_t rank; /* of the pipeline */
    ari_outside_rank *to;
    ari_links links[ARI_OVER_COPIES + 1]; /* of each group */
} walk;

/* Of an update by Muon the products of each block. */
static double products(const walk *w, const ari_operation *op)
{
    const ari_rates rates = ari_time_rates(w->o);
    double sum = 0.0;
    const bool whole = op->kind == ARI_OPERATION_MATRIX;
    for (int i = 1; i < op->inputs && (whole || op->kind == ARI_OPERATION_MATRIX_PRODUCT); i++) {
        const ari_op_value *v = &op->input[i];
        const double m = fmin((double)v->shape[0], (double)v->shape[1]);
        const double n = (double)v->local[0] * (double)v->local[1] / m;
        const ari_gpu_product gram = {1.0, m, m, n, false}, square = {1.0, m, m, m, false},
                              last = {1.0, m, n, m, false};
        sum +=
            (whole ? 5.0 : 1.0) * (double)v->copies *
            (ari_rates_product(&rates, &gram) + ari_rates_product(&rates, &square) + ari_rates_product(&rates, &last));
    }
    return sum;
}

static ar_status add_call(ari_outside_rank *s, const ari_outside_call *c)
{
    s->sums += c->bucket ? c->seconds : 0.0;
    if (c->seconds == 0.0 && c->across == ARI_ACROSS_NONE)
        return AR_OK;
    AR_TRY(ARI_GROW(&s->call, &s->room, s->n, "calls after the passes"));
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

/* Which one a layer is of the rank's. */
static size_t place_of_layer(const walk *w, size_t layer)
{
    const ar_parallel *layout = &w->p->step.run.parallel;
    size_t first = 0, n = 0, before = 0, i = w->rank;
    if (ari_outside_layers(w->p->step.config, layer))
        return ARI_NO_LAYER;
    for (;; i += (size_t)ari_at_least_one(layout->pp), before += n) {
        ari_stage_layers(&first, &n, &layout->stages, w->p->step.config->layers, (size_t)ari_parallel_stages(layout),
                         i);
        if (layer >= first && layer < first + n)
            return before + layer - first;
    }
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
    c.last.layer = c.bucket ? place_of_layer(w, c.last.layer) : ARI_NO_LAYER;
    c.after = !c.bucket && !loss;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const ari_links *l = &w->links[call->over];
        const double n = ari_links_elements(call), width = ari_time_element(w->o, op, call);
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

/* True if ranks of two layouts do the same outside of the passes. */
static bool same_outside(const ari_planned *p, size_t rank, const ari_planned *q, size_t other)
{
    const ari_walked b = ari_walked_of(&p->step, true);
    const ari_stage s = ari_stage_of_rank(&b, p, rank), t = ari_stage_of_rank(&b, q, other);
    return (b.n == 1 || b.by_experts) && s.share[ARI_PART_BEFORE] == t.share[ARI_PART_BEFORE] &&
           s.share[ARI_PART_AFTER] == t.share[ARI_PART_AFTER] && s.layers == t.layers && s.experts == t.experts &&
           (s.experts == 0.0 || s.experts == s.layers);
}

/* A rank that does the same: of those before it, or its own of another layout; NULL: none. */
static const ari_outside_rank *find_like(const ari_outside *s, const ari_planned *p, size_t rank,
                                         const ari_outside *other)
{
    ari_planned of = *p;
    for (size_t r = 0; r < rank; r++) {
        if (same_outside(p, r, p, rank))
            return &s->rank[r];
    }
    if (!other)
        return NULL;
    of.step.run.parallel.virtual_stages = other->virtual_stages;
    return same_outside(&of, rank, p, rank) ? &other->rank[rank] : NULL;
}

ar_status ari_outside_init(ari_outside *s, const ari_planned *p, const ari_time_options *o, const ari_outside *other)
{
    const ari_step_case c = ari_time_rank_case(p, o);
    const ar_parallel *layout = &c.run.parallel;
    const int stages = ari_extent(layout, ARI_CUTS_LAYERS), each = ar_parallel_world(layout) / stages;
    walk w = {.p = p, .o = o};
    *s = (ari_outside){.n = (size_t)stages, .virtual_stages = layout->virtual_stages};
    AR_TRY(ARI_ALLOC_ZERO(&s->rank, s->n, "ranks of a pipeline"));
    for (int g = 0; g <= ARI_OVER_COPIES; g++)
        w.links[g] = ari_links_of(p, o, (ari_over)g);
    for (w.rank = 0; w.rank < s->n; w.rank++) {
        const ari_outside_rank *like = find_like(s, p, w.rank, other);
        w.to = &s->rank[w.rank];
        if (like)
            *w.to = *like;
        else
            AR_TRY(ari_operations(&c, ARI_OPS_OUTSIDE, (int)w.rank * each, visit_operation, &w));
        w.to->room = like ? 0 : w.to->room;
    }
    return AR_OK;
}

void ari_outside_fini(ari_outside *s)
{
    for (size_t r = 0; r < s->n && s->rank; r++) {
        if (s->rank[r].room > 0)
            free(s->rank[r].call);
    }
    free(s->rank);
    s->rank = NULL;
}
