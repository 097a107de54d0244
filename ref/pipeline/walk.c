/* SPDX-License-Identifier: Apache-2.0 */
/* Walks through a schedule: every rank as far as it can, until all have finished or none can continue. */
#include <math.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/pipeline/schedule.h"
#include "ref/pipeline/schedule_private.h"

#define NOT_YET (-1.0)
/* For each (stage, micro-batch) and direction: when the stage's input was sent, could be received, and had arrived. */
typedef struct moments {
    double sent, posted, arrived;
} moments;

/* Transfers to a rank in one direction, in list order. */
typedef struct channel {
    size_t position;     /* position in the receiver's list */
    double previous_end; /* time at which the preceding transfer ended */
} channel;

typedef struct walker {
    const ar_pipeline_schedule *s;
    const ari_pp_timed *times;
    ar_pp_run *out;
    ar_pp_event_fn on_event;
    void *user;
    double *output_times[ARI_PP_DIRECTIONS]; /* [stages * micro-batches] time at which each output was ready */
    moments *transfers[ARI_PP_DIRECTIONS];   /* times of transfers; NULL: values are available at once */
    channel channels[ARI_PP_DIRECTIONS][AR_MAX_STAGES];
    size_t positions[AR_MAX_STAGES], in_flight[AR_MAX_STAGES];
    double clock[AR_MAX_STAGES];
} walker;

static moments *find_transfer(const walker *w, ari_pp_direction d, int stage, int micro)
{
    return &w->transfers[d][ari_pp_item(&w->s->shape, stage, micro)];
}

static double duration(const walker *w, const ar_pp_operation *o)
{
    if (!w->times)
        return 0;
    int kind = w->times->kinds - 1;
    while (w->times->first_micro[kind] > o->micro)
        kind--;
    const ar_pp_times *t = &w->times->stage_times[kind * w->s->shape.stages + o->stage];
    switch (o->kind) {
    case AR_PP_FORWARD:
        return t->forward;
    case AR_PP_BACKWARD:
        return t->backward_input + t->backward_weight;
    case AR_PP_BACKWARD_INPUT:
        return t->backward_input;
    case AR_PP_BACKWARD_WEIGHT:
        return t->backward_weight;
    case AR_PP_RECV_ACTIVATION:
        return t[-1].transfer;
    case AR_PP_RECV_GRADIENT:
        return t->transfer;
    case AR_PP_SEND_ACTIVATION:
    case AR_PP_SEND_GRADIENT:
    case AR_PP_KINDS:
        break;
    }
    return 0;
}

/* The transfers to a rank that both ends are ready for. */
static void transfer(walker *w, int rank, ari_pp_direction d)
{
    channel *c = &w->channels[d][rank];
    for (; c->position < w->positions[rank]; c->position++) {
        const ar_pp_operation *o = &w->s->lists[rank].operations[c->position];
        if (o->kind != ari_pp_recv(d))
            continue;
        moments *m = find_transfer(w, d, o->stage, o->micro);
        if (m->sent == NOT_YET)
            return;
        const double begin = fmax(c->previous_end, fmax(m->sent, m->posted));
        c->previous_end = m->arrived = begin + duration(w, o);
        if (w->on_event)
            w->on_event(w->user, rank, o, begin, m->arrived);
    }
}

/* Returns the time at which an operation's input from another stage is available; NOT_YET: unknown. */
static double ready(const walker *w, const ar_pp_operation *o)
{
    const ari_pp_direction d = ari_pp_direction_of(o->kind);
    const int source = ari_pp_takes(o->kind) ? ari_pp_source(&w->s->shape, d, o->stage) : -1;
    if (source < 0)
        return 0;
    return w->transfers[d] && ari_pp_on_different_ranks(&w->s->shape, o->stage, source)
               ? find_transfer(w, d, o->stage, o->micro)->arrived
               : w->output_times[d][ari_pp_item(&w->s->shape, source, o->micro)];
}

static void compute(walker *w, int rank, const ar_pp_operation *o, double ready_time)
{
    ar_pp_rank_run *r = &w->out->rank[rank];
    const double begin = fmax(w->clock[rank], ready_time), length = duration(w, o);
    w->clock[rank] = r->end = begin + length;
    r->busy += length;
    if (ari_pp_takes(o->kind))
        w->output_times[ari_pp_direction_of(o->kind)][ari_pp_item(&w->s->shape, o->stage, o->micro)] = r->end;
    if (o->kind == AR_PP_FORWARD && ++w->in_flight[rank] > r->in_flight)
        r->in_flight = w->in_flight[rank];
    if (o->kind == AR_PP_BACKWARD || o->kind == AR_PP_BACKWARD_WEIGHT)
        w->in_flight[rank]--;
    if (w->on_event)
        w->on_event(w->user, rank, o, begin, r->end);
}

/* Advances a rank as far as possible. Returns whether it advanced. */
static bool advance_rank(walker *w, int rank)
{
    const ari_pp_list *list = &w->s->lists[rank];
    const size_t start_position = w->positions[rank];
    for (; w->positions[rank] < list->count; w->positions[rank]++) {
        const ar_pp_operation *o = &list->operations[w->positions[rank]];
        const ari_pp_direction d = ari_pp_direction_of(o->kind);
        if (!ari_pp_computes(o->kind)) {
            if (w->transfers[d] && ari_pp_receives(o->kind))
                find_transfer(w, d, o->stage, o->micro)->posted = w->clock[rank];
            else if (w->transfers[d])
                find_transfer(w, d, ari_pp_target(&w->s->shape, d, o->stage), o->micro)->sent = w->clock[rank];
        } else {
            if (w->transfers[d])
                transfer(w, rank, d);
            const double ready_time = ready(w, o);
            if (ready_time == NOT_YET)
                break;
            compute(w, rank, o, ready_time);
        }
    }
    return w->positions[rank] > start_position;
}

/* Returns the rank for which a rank waits. */
static int waits_for(const walker *w, int rank)
{
    const ar_pp_operation *o = &w->s->lists[rank].operations[w->positions[rank]];
    return ari_pp_source(&w->s->shape, ari_pp_direction_of(o->kind), o->stage) % w->s->shape.ranks;
}

static ar_status deadlock(const walker *w, int rank)
{
    char text[384];
    ari_text t = ari_text_in(text, sizeof text);
    for (int i = 0; i < w->s->shape.ranks; i++) /* to a rank that waits for itself through others */
        rank = waits_for(w, rank);
    const int start_rank = rank;
    do {
        const ar_pp_operation *o = &w->s->lists[rank].operations[w->positions[rank]];
        const ari_pp_direction d = ari_pp_direction_of(o->kind);
        const int source = ari_pp_source(&w->s->shape, d, o->stage), peer = waits_for(w, rank);
        const ar_pp_kind awaited_kind = peer != rank ? ari_pp_send(d) : o->kind;
        ari_say(&t, "%srank %d with %d%s%d (stage %d, micro-batch %d) waits for %d%s%d of rank %d",
                rank == start_rank ? "" : "; ", rank, o->stage, ari_pp_kind_name(o->kind), o->micro, o->stage, o->micro,
                source, ari_pp_kind_name(awaited_kind), o->micro, peer);
        rank = peer;
    } while (rank != start_rank);
    return ar_error_set(AR_ERR_FORMAT, "the schedule ends in a deadlock: %s", text);
}

static void sum_up(walker *w)
{
    double busy = 0;
    w->out->makespan = 0;
    for (int r = 0; r < w->s->shape.ranks; r++) {
        w->out->makespan = fmax(w->out->makespan, w->out->rank[r].end);
        busy += w->out->rank[r].busy;
    }
    w->out->bubble = busy > 0 ? (double)w->s->shape.ranks * w->out->makespan / busy - 1 : 0;
}

static ar_status walk_ranks(walker *w)
{
    bool moved = true;
    for (bool back = false; moved; back = !back) { /* activations go up, gradients down */
        moved = false;
        for (int r = 0; r < w->s->shape.ranks; r++)
            moved |= advance_rank(w, back ? w->s->shape.ranks - 1 - r : r);
    }
    for (int r = 0; r < w->s->shape.ranks; r++)
        if (w->positions[r] < w->s->lists[r].count)
            return deadlock(w, r);
    sum_up(w);
    return AR_OK;
}

ar_status ari_schedule_walk(ar_pp_run *out, const ar_pipeline_schedule *s, const ari_pp_timed *times,
                            ar_pp_event_fn on_event, void *user)
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {0};
    size_t items = 0;
    walker *w = NULL;
    AR_TRY(ARI_TAKE(&w, &arena, 1, "a schedule"));
    *w = (walker){.s = s, .times = times, .out = out, .on_event = on_event, .user = user};
    memset(out, 0, sizeof *out);
    AR_TRY(ari_mul_size(&items, (size_t)s->shape.stages, (size_t)s->shape.micro_batches));
    for (int d = 0; d < ARI_PP_DIRECTIONS; d++) {
        AR_TRY(ARI_TAKE(&w->output_times[d], &arena, items, "a schedule"));
        for (size_t i = 0; i < items; i++)
            w->output_times[d][i] = NOT_YET;
        if (times && times->at_once)
            continue;
        AR_TRY(ARI_TAKE(&w->transfers[d], &arena, items, "a schedule"));
        for (size_t i = 0; i < items; i++)
            w->transfers[d][i] = (moments){NOT_YET, NOT_YET, NOT_YET};
    }
    return walk_ranks(w);
}

static bool is_time(double t)
{
    return isfinite(t) && t >= 0;
}

ar_status ari_pipeline_schedule_run(ar_pp_run *out, const ar_pipeline_schedule *s, const ar_pp_times *times,
                                    ar_pp_event_fn on_event, void *user)
{
    for (int i = 0; i < s->shape.stages; i++)
        if (!is_time(times[i].forward) || !is_time(times[i].backward_input) || !is_time(times[i].backward_weight) ||
            !is_time(times[i].transfer))
            return ar_error_set(AR_ERR_ARG,
                                "stage %d takes %g forward, %g and %g backward, %g to move: times are 0 or more", i,
                                times[i].forward, times[i].backward_input, times[i].backward_weight, times[i].transfer);
    static const int first_micro = 0;
    const ari_pp_timed timed = {times, &first_micro, 1, false};
    return ari_schedule_walk(out, s, &timed, on_event, user);
}
