/* SPDX-License-Identifier: Apache-2.0 */
/* Summary of a run's time (simulated-cluster.md). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/trace_view.h"

/* --- sets of time ------------------------------------------------------------------------------------------------- */

typedef struct interval {
    uint64_t begin, end;
} interval;

typedef struct intervals {
    interval *list;
    size_t count, capacity;
} intervals;

static ar_status add_interval(ari_arena *arena, intervals *set, uint64_t begin, uint64_t end)
{
    if (begin >= end)
        return AR_OK;
    AR_TRY(ARI_GROW_IN(arena, &set->list, &set->capacity, set->count, "a summary"));
    set->list[set->count++] = (interval){begin, end};
    return AR_OK;
}

static int by_begin(const void *a, const void *b)
{
    const interval *x = a, *y = b;
    return x->begin < y->begin ? -1 : x->begin > y->begin;
}

/* Sorts the intervals and merges those that touch. */
static void unite(intervals *s)
{
    size_t n = 0;
    ARI_SORT(s->list, s->count, by_begin);
    for (size_t i = 0; i < s->count; i++) {
        if (n > 0 && s->list[i].begin <= s->list[n - 1].end)
            s->list[n - 1].end = s->list[i].end > s->list[n - 1].end ? s->list[i].end : s->list[n - 1].end;
        else
            s->list[n++] = s->list[i];
    }
    s->count = n;
}

static uint64_t length(const intervals *s)
{
    uint64_t ns = 0;
    for (size_t i = 0; i < s->count; i++)
        ns += s->list[i].end - s->list[i].begin;
    return ns;
}

/* The length of their intersection; their union. */
static uint64_t common(const intervals *a, const intervals *b)
{
    uint64_t ns = 0;
    for (size_t i = 0, k = 0; i < a->count && k < b->count;) {
        const interval *x = &a->list[i], *y = &b->list[k];
        const uint64_t begin = x->begin > y->begin ? x->begin : y->begin;
        const uint64_t end = x->end < y->end ? x->end : y->end;
        ns += end > begin ? end - begin : 0;
        if (x->end < y->end)
            i++;
        else
            k++;
    }
    return ns;
}

/* --- ranks -------------------------------------------------------------------------------------------------------- */

/* Activities of one rank. */
typedef struct rank_time {
    ari_arena arena;     /* memory of the intervals */
    intervals moves;     /* time in collectives, on any lane */
    intervals computes;  /* virtual clock: work on any lane; real clock: the main lane outside of collectives and
                            waits */
    intervals idles;     /* real clock: the main lane in collectives and waits */
    uint64_t begin, end; /* times of the main lane */
} rank_time;

static ar_status add_record(rank_time *activity, const ari_trace_view *v, const ari_view_lane *lane,
                            const ari_record *r)
{
    const uint64_t begin = ari_view_begin(v, r), end = ari_view_end(v, r);
    const bool moves = r->kind == ARI_RECORD_COLLECTIVE;
    if (lane->track == 0) {
        activity->begin = begin < activity->begin ? begin : activity->begin;
        activity->end = end > activity->end ? end : activity->end;
        if (moves || r->kind == ARI_RECORD_WAIT)
            AR_TRY(add_interval(&activity->arena, &activity->idles, begin, end));
    }
    if (r->kind == ARI_RECORD_WORK)
        AR_TRY(add_interval(&activity->arena, &activity->computes, begin, end));
    return moves ? add_interval(&activity->arena, &activity->moves, begin, end) : AR_OK;
}

/* On the real clock, a main lane counts as computing whenever nothing else is recorded for it. */
static ar_status rest_computes(rank_time *t)
{
    uint64_t compute_begin = t->begin;
    for (size_t i = 0; i < t->idles.count; i++) {
        AR_TRY(add_interval(&t->arena, &t->computes, compute_begin, t->idles.list[i].begin));
        compute_begin = t->idles.list[i].end;
    }
    return add_interval(&t->arena, &t->computes, compute_begin, t->end);
}

static ar_status time_of_rank(rank_time *activity, const ari_trace_view *v, int rank)
{
    activity->begin = UINT64_MAX;
    for (size_t l = 0; l < v->lane_count; l++) {
        const ari_view_lane *lane = &v->lanes[l];
        for (size_t i = 0; lane->rank == rank && i < lane->count; i++)
            AR_TRY(add_record(activity, v, lane, lane->shown[i]));
    }
    unite(&activity->moves);
    unite(&activity->idles);
    if (v->clock == AR_TRACE_REAL)
        AR_TRY(rest_computes(activity));
    unite(&activity->computes);
    return AR_OK;
}

static void end_rank(rank_time *t)
{
    ari_arena_free(&t->arena);
}

static void count_rank(ar_trace_summary *s, const rank_time *t, int rank)
{
    const uint64_t moves_ns = length(&t->moves), exposed_ns = moves_ns - common(&t->moves, &t->computes);
    const double computes = (double)length(&t->computes) * 1e-9, moves = (double)moves_ns * 1e-9;
    const double exposed = (double)exposed_ns * 1e-9;
    s->compute = computes > s->compute ? computes : s->compute;
    if (rank == 0 || moves > s->communication) {
        s->communication = moves;
        s->overlap = moves_ns > 0 ? 1 - (double)exposed_ns / (double)moves_ns : 0;
    }
    s->exposed = exposed > s->exposed ? exposed : s->exposed;
}

static ar_status count_ranks(ar_trace_summary *s, const ari_trace_view *v)
{
    for (int rank = 0; rank < v->ranks; rank++) {
        ARI_ENDED(end_rank) rank_time t = {.begin = 0};
        AR_TRY(time_of_rank(&t, v, rank));
        count_rank(s, &t, rank);
    }
    for (size_t i = 0; i < v->member_count; i++)
        s->bytes += v->members[i].record->bytes_read + v->members[i].record->bytes_written;
    s->collectives = v->member_count;
    return AR_OK;
}

/* --- names of computation ----------------------------------------------------------------------------------------- */

/* Interval of a lane, and the innermost span that contains it. */
typedef struct named {
    uint64_t begin, end;
    const char *name;
} named;

typedef struct names {
    ari_arena *arena;
    named *list;
    size_t count, capacity;
    const ari_record *open[64]; /* nested open spans; deeper ones are not recorded */
    size_t depth;
    uint64_t named_end;
} names;

static ar_status name_until(names *n, uint64_t end)
{
    if (end <= n->named_end || n->depth == 0) {
        n->named_end = end > n->named_end ? end : n->named_end;
        return AR_OK;
    }
    AR_TRY(ARI_GROW_IN(n->arena, &n->list, &n->capacity, n->count, "a summary"));
    n->list[n->count++] = (named){n->named_end, end, n->open[n->depth - 1]->name};
    n->named_end = end;
    return AR_OK;
}

static ar_status close_until(names *n, const ari_trace_view *v, uint64_t ns)
{
    while (n->depth > 0 && ari_view_end(v, n->open[n->depth - 1]) <= ns) {
        AR_TRY(name_until(n, ari_view_end(v, n->open[n->depth - 1])));
        n->depth--;
    }
    return name_until(n, ns);
}

static ar_status name_lane(names *n, const ari_trace_view *v, const ari_view_lane *lane)
{
    for (size_t i = 0; i < lane->count; i++) {
        const ari_record *r = lane->shown[i];
        if (r->kind != ARI_RECORD_SPAN)
            continue;
        AR_TRY(close_until(n, v, ari_view_begin(v, r)));
        if (n->depth < sizeof n->open / sizeof *n->open)
            n->open[n->depth++] = r;
    }
    return close_until(n, v, UINT64_MAX);
}

/* --- parts of the path -------------------------------------------------------------------------------------------- */

typedef struct parts {
    ari_arena *arena;
    ar_trace_part *list;
    size_t count, capacity;
    names *lanes; /* [lanes of the view] names of spans */
} parts;

static ar_status add_part(parts *path_parts, const char *kind, const char *name, int rank, uint64_t ns)
{
    if (ns == 0)
        return AR_OK;
    AR_TRY(ARI_GROW_IN(path_parts->arena, &path_parts->list, &path_parts->capacity, path_parts->count, "a summary"));
    ar_trace_part *p = &path_parts->list[path_parts->count++];
    *p = (ar_trace_part){.rank = rank, .seconds = (double)ns * 1e-9};
    snprintf(p->what, sizeof p->what, "%s%s%s", kind, kind[0] && name[0] ? " " : "", name);
    return AR_OK;
}

/* Adds an interval of computation under the innermost span that contains it; without a span it is plain computation. */
static ar_status add_compute(parts *path_parts, const names *n, int rank, uint64_t begin, uint64_t end)
{
    size_t low = 0;
    ARI_BISECT(low, n->count, i, n->list[i].end <= begin)
    for (; low < n->count && n->list[low].begin < end; low++) {
        const named *s = &n->list[low];
        const uint64_t span_begin = s->begin > begin ? s->begin : begin, until = s->end < end ? s->end : end;
        AR_TRY(add_part(path_parts, "compute", "", rank, span_begin - begin));
        AR_TRY(add_part(path_parts, s->name[0] ? "" : "compute", s->name, rank, until - span_begin));
        begin = until;
    }
    return add_part(path_parts, "compute", "", rank, end - begin);
}

static ar_status add_step(parts *path_parts, const ari_trace_view *v, const ari_path_step *p)
{
    const int rank = v->lanes[p->lane].rank;
    if (p->kind == ARI_PATH_COMPUTE)
        return add_compute(path_parts, &path_parts->lanes[p->lane], rank, p->begin_ns, p->end_ns);
    if (p->kind == ARI_PATH_WAIT)
        return add_part(path_parts, "wait", "", rank, p->end_ns - p->begin_ns);
    return add_part(path_parts, ari_kind_name(p->record->op_kind), p->record->name, rank, p->end_ns - p->begin_ns);
}

static int by_what(const void *a, const void *b)
{
    const ar_trace_part *x = a, *y = b;
    const int order = strcmp(x->what, y->what);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static int by_length(const void *a, const void *b)
{
    const ar_trace_part *x = a, *y = b;
    if (x->seconds > y->seconds || x->seconds < y->seconds)
        return x->seconds > y->seconds ? -1 : 1;
    return by_what(a, b);
}

/* Parts of one name and rank together, the longest in front. */
static void gather_parts(ar_trace_summary *s, parts *p)
{
    size_t n = 0;
    if (p->count == 0)
        return;
    qsort(p->list, p->count, sizeof *p->list, by_what);
    for (size_t i = 0; i < p->count; i++) {
        if (n > 0 && by_what(&p->list[n - 1], &p->list[i]) == 0)
            p->list[n - 1].seconds += p->list[i].seconds;
        else
            p->list[n++] = p->list[i];
    }
    qsort(p->list, n, sizeof *p->list, by_length);
    const size_t max_parts = sizeof s->longest / sizeof *s->longest;
    s->parts = n < max_parts ? n : max_parts;
    memcpy(s->longest, p->list, s->parts * sizeof *p->list);
}

static ar_status add_steps(ar_trace_summary *s, parts *p, const ari_trace_view *v)
{
    ari_path_step *steps = NULL;
    size_t count = 0;
    uint64_t ns[ARI_PATH_KINDS] = {0};
    AR_TRY(ari_critical_path(&steps, &count, p->arena, v));
    for (size_t i = 0; i < count; i++) {
        ns[steps[i].kind] += steps[i].end_ns - steps[i].begin_ns;
        AR_TRY(add_step(p, v, &steps[i]));
    }
    s->path_compute = (double)ns[ARI_PATH_COMPUTE] * 1e-9;
    s->path_communication = (double)ns[ARI_PATH_COMMUNICATION] * 1e-9;
    s->path_wait = (double)ns[ARI_PATH_WAIT] * 1e-9;
    return AR_OK;
}

static ar_status find_path(ar_trace_summary *s, const ari_trace_view *v)
{
    ARI_ENDED(ari_arena_free) ari_arena arena = {0};
    parts p = {.arena = &arena};
    AR_TRY(ARI_TAKE(&p.lanes, &arena, v->lane_count, "a summary"));
    for (size_t i = 0; i < v->lane_count; i++) {
        p.lanes[i].arena = &arena;
        AR_TRY(name_lane(&p.lanes[i], v, &v->lanes[i]));
    }
    AR_TRY(add_steps(s, &p, v));
    gather_parts(s, &p);
    return AR_OK;
}

ar_status ar_trace_summarise(ar_trace_summary *s, const ar_trace *t, ar_trace_clock clock)
{
    if (!s || !t)
        return ar_error_set(AR_ERR_ARG, "ar_trace_summarise: %s is missing", s ? "the trace" : "the summary's place");
    ARI_ENDED(ari_trace_view_fini) ari_trace_view v = {0};
    *s = (ar_trace_summary){.seconds = 0};
    AR_TRY(ari_trace_view_init(&v, t, clock));
    s->seconds = (double)(v.end_ns - v.start_ns) * 1e-9;
    AR_TRY(count_ranks(s, &v));
    return find_path(s, &v);
}
