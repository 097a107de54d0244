/* SPDX-License-Identifier: Apache-2.0 */
/* What a step does after its passes, and beside the last of them: sums of gradients in buckets, the loss, new weights. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/context_private.h"
#include "verify/plan/time_impl.h"

/* How far a rank is outside of its passes: its main queue, and that of its buckets. */
typedef struct tail {
    const ari_outside_rank *outside;
    int rank;
    double end;    /* of the last of its last backward passes */
    double shared; /* share of them in which collectives of tp and ep are on the same kind of link */
    size_t next;
    double main, buckets;
    double waits; /* seconds in which the main queue sums buckets, or waits for them */
} tail;

/* Adds a stage's pass. */
static void add_pass(const ari_composed *c, size_t i, ari_cost *all)
{
    const ari_walked *b = &c->passes->blocks;
    const ari_stage s = ari_stage_of(b, c->p, i);
    for (size_t section = 0; section < b->n + 2; section++) {
        const double times = ari_stage_times(b, &s, section);
        const ari_cost again = ari_composed_again(c, ARI_OF_LAST, section);
        ari_cost_add(all, &again, times);
        ari_cost_add(all, &c->passes->of[ARI_OF_LAST][ARI_GOES_BACKWARD][section], times);
    }
}

static ari_last_pass pass_of(const ari_composed *c, size_t i)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const bool pipeline = ari_at_least_one(layout->pp) > 1;
    const ari_span *at = &c->last[i];
    const size_t stages = (size_t)ari_parallel_stages(layout), after = c->passes->blocks.n + 1;
    ari_cost all = {.products = 0.0};
    ari_last_pass p = {.begin = pipeline ? at->begin : 0.0};
    if (i + 1 < stages)
        p.absent = ari_cost_sum(&c->passes->of[ARI_OF_LAST][ARI_GOES_BACKWARD][after]);
    ari_stage_layers(&p.first, &p.layers, &layout->stages, c->p->step.config->layers, stages, i);
    add_pass(c, i, &all);
    p.length = ari_cost_sum(&all);
    p.scale = pipeline && p.length > 0.0 ? (at->end - at->begin) / p.length : 1.0;
    return p;
}

/* The share of a rank's last passes in which collectives of tp and ep are on the kind of link that sums are on. */
static double share_on_links(const ari_composed *c, int rank)
{
    const ari_over over[] = {ARI_OVER_TP, ARI_OVER_EP};
    const ar_parallel *layout = &c->p->step.run.parallel;
    ari_cost all = {.products = 0.0};
    double called = 0.0;
    for (int i = rank; i < ari_parallel_stages(layout); i += ari_at_least_one(layout->pp))
        add_pass(c, (size_t)i, &all);
    for (int k = 0; k < 2; k++) {
        if (ari_links_of(c->p, c->o, over[k]).between == ari_links_of(c->p, c->o, ARI_OVER_DP).between)
            called += all.over[ari_time_kind_of(over[k])];
    }
    return called > 0.0 ? called / ari_cost_sum(&all) : 0.0;
}

/* before: micro-batches that have summed their gradients when the last ones begin. */
static tail tail_of(const ari_composed *c, int rank, double before, double pass_seconds)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    tail t = {.outside = &c->outside->rank[rank],
              .rank = rank,
              .end = c->outside->n > 1 ? c->ends[rank] : c->pass[0].length,
              .shared = c->o->shared_links ? share_on_links(c, rank) : 0.0,
              .buckets = INFINITY};
    for (int i = rank; i < ari_parallel_stages(layout); i += ari_at_least_one(layout->pp))
        t.buckets = fmin(t.buckets, c->pass[i].begin);
    t.main = t.end;
    t.buckets += before * fmax(0.0, t.outside->sums - pass_seconds / c->micro);
    return t;
}

/* When the bucket whose last gradient is this one is complete. */
static double ready_at(const ari_composed *c, int rank, const ari_op_param *last)
{
    const ar_parallel *layout = &c->p->step.run.parallel;
    const bool outside = last->layer == ARI_NO_LAYER, before = ari_section_of(last->role) == ARI_BEFORE_BLOCKS;
    const int pp = ari_at_least_one(layout->pp);
    ari_op_param param = *last;
    int i = outside && !before ? ari_parallel_stages(layout) - pp + rank : rank;
    for (; !outside && param.layer >= c->pass[i].layers; i += pp)
        param.layer -= c->pass[i].layers;
    const ari_last_pass *p = &c->pass[i];
    const double layers = (double)p->layers, done = outside ? (before ? layers : 0.0) : layers - (double)param.layer;
    param.layer += outside ? 0 : p->first;
    const double in_pass =
        ari_passes_ready(c->passes, &param, p->first, p->layers) - p->absent + done * c->layer[ARI_RECOMPUTED];
    return p->begin + p->scale * fmin(p->length, in_pass);
}

static void wait_for_buckets(tail *t)
{
    t->waits += fmax(0.0, t->buckets - t->main);
    t->main = fmax(t->main, t->buckets);
}

/* Makes a call that begins then. Of a bucket beside the passes those of tp and ep slow it down. */
static void call_from(tail *t, double at, double seconds)
{
    if (t->next == t->outside->n)
        return;
    const ari_outside_call *b = &t->outside->call[t->next++];
    if (!b->overlapped) {
        t->waits += b->bucket ? at + seconds - t->main : 0.0;
        t->main = at + seconds;
        return;
    }
    const double slowed = fmax(0.0, fmin(seconds, (t->end - at) * (1.0 - t->shared)));
    t->buckets = at + slowed / (1.0 - fmin(t->shared, 0.99)) + (seconds - slowed);
}

/* Goes on to the next call with other ranks of its pipeline; NULL: to the end. The first queue to which that belongs is
 * as far as it can be: each bucket waits for the gradient that completes it, and for those before it. */
static const ari_outside_call *go_on(const ari_composed *c, tail *t, double *at)
{
    const ari_outside_rank *s = t->outside;
    while (t->next < s->n) {
        const ari_outside_call *b = &s->call[t->next];
        if (b->after)
            wait_for_buckets(t);
        *at = b->overlapped ? fmax(t->buckets, ready_at(c, t->rank, &b->last)) : t->main;
        if (b->across != ARI_ACROSS_NONE && c->outside->n > 1)
            return b;
        call_from(t, *at, b->seconds);
    }
    wait_for_buckets(t);
    *at = t->main;
    return NULL;
}

/* A call of ranks of a pipeline, a step apart, which come at those times: the last one delays all; what the last of them
 * hands on in a chain those after it. */
static void call_together(tail *t, size_t n, size_t step, const ari_outside_call *call, const double at[])
{
    const size_t members = (n - 1) / step + 1;
    const double hop = call->seconds / (double)(members - 1);
    double last = 0.0;
    for (size_t r = 0; r < n; r += step)
        last = fmax(last, at[r]);
    if (call->across != ARI_ACROSS_CHAIN) {
        for (size_t r = 0; r < n; r += step)
            call_from(&t[r], last, call->seconds);
        return;
    }
    double come = at[n - 1];
    for (size_t r = 0; r < n; r++) {
        if (r + 1 == n) {
            call_from(&t[r], at[r], 0.0);
            break;
        }
        come = fmax(come, at[r]) + hop;
        call_from(&t[r], come, 0.0);
    }
}

/* When each rank's step ends: those of a pipeline call together in the order of their lists. */
static void finish(const ari_composed *c, tail t[], size_t n)
{
    double at[AR_MAX_STAGES];
    for (;;) {
        const ari_outside_call *first = NULL, *call = NULL;
        for (size_t r = 0; r < n; r++) {
            const ari_outside_call *next = go_on(c, &t[r], &at[r]);
            call = next ? next : call;
            first = r == 0 ? next : first;
        }
        if (!call)
            return;
        if (first && first->across == ARI_ACROSS_ENDS)
            call_together(t, n, n - 1, first, at);
        else
            call_together(t, n, 1, call, at);
    }
}

/* ZeRO-2 keeps shares of gradients, so that each micro-batch sums its own, beside the passes that follow. */
ar_status ari_composed_sums(ari_composed *c, double pass_seconds)
{
    ari_last_pass pass[AR_MAX_STAGES];
    tail *t = NULL;
    for (int i = 0; i < ari_parallel_stages(&c->p->step.run.parallel); i++)
        pass[i] = pass_of(c, (size_t)i);
    c->pass = pass;
    const double before = c->p->step.run.parallel.zero == 2 ? c->micro - 1.0 : 0.0;
    AR_TRY(ARI_ALLOC_ZERO(&t, c->outside->n, "ends of a step"));
    for (size_t r = 0; r < c->outside->n; r++)
        t[r] = tail_of(c, (int)r, before, pass_seconds);
    finish(c, t, c->outside->n);
    size_t longest_rank = 0;
    for (size_t r = 1; r < c->outside->n; r++) {
        if (t[r].main + t[r].outside->before > t[longest_rank].main + t[longest_rank].outside->before)
            longest_rank = r;
    }
    const tail last = t[longest_rank];
    free(t);
    const ari_outside_rank *longest = last.outside;
    const double most = fmax(longest->stages, last.main + longest->before - (c->outside->n > 1 ? c->end : last.end));
    const bool dp = ari_links_of(c->p, c->o, ARI_OVER_DP).n > 1.0,
               pp = ari_extent(&c->p->step.run.parallel, ARI_CUTS_LAYERS) > 1;
    c->t->of[dp ? ARI_TIME_DP : pp ? ARI_TIME_PP : ARI_TIME_TP] += most - longest->stages;
    c->t->of[ARI_TIME_PP] += longest->stages;
    c->beside += fmax(0.0, (before + 1.0) * longest->sums - last.waits);
    ari_traffic_add(&c->t->moved, &longest->moved, 1.0);
    for (int i = 0; i < c->t->moved.n && before > 0.0; i++) {
        ari_traffic_row *row = &c->t->moved.row[i];
        if (row->over == ARI_TIME_DP && strcmp(row->call, ari_call_name(ARI_CALL_REDUCE_SCATTER)) == 0) {
            row->calls *= c->micro;
            row->bytes *= c->micro;
            row->seconds *= c->micro;
        }
    }
    return AR_OK;
}
