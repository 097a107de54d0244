/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/trace_view.h"

/* A lane's activities in order: collectives, work, waits. Spans only name the activities within them. */
typedef struct stretch {
    uint64_t begin, end; /* begin < end */
    const ari_record *record;
    size_t rendezvous; /* SIZE_MAX: none */
} stretch;

typedef struct lane_line {
    stretch *list; /* sorted by time, without overlaps */
    size_t count;
} lane_line;

typedef struct walk {
    const ari_trace_view *v;
    ari_arena *arena;
    lane_line *lanes;
    size_t lane;      /* lane on which the path currently is */
    uint64_t time_ns; /* time at which the path is */
    ari_path_step *steps;
    size_t count, capacity;
} walk;

/* --- lanes as lines of stretches ---------------------------------------------------------------------------------- */

static ar_status make_line(lane_line *line, ari_arena *arena, const ari_trace_view *v, const ari_view_lane *lane)
{
    AR_TRY(ARI_TAKE(&line->list, arena, lane->count, "a critical path"));
    for (size_t i = 0; i < lane->count; i++) {
        const ari_record *r = lane->shown[i];
        const uint64_t begin = ari_view_begin(v, r), end = ari_view_end(v, r);
        if (r->kind != ARI_RECORD_SPAN && r->kind != ARI_RECORD_TRANSFER && begin < end)
            line->list[line->count++] = (stretch){begin, end, r, lane->rendezvous[i]};
    }
    return AR_OK;
}

/* Returns the last stretch of the lane that began before `ns`, or NULL. */
static const stretch *stretch_before(const walk *w, size_t lane, uint64_t ns)
{
    const lane_line *l = &w->lanes[lane];
    size_t low = 0;
    ARI_BISECT(low, l->count, i, l->list[i].begin < ns)
    return low > 0 ? &l->list[low - 1] : NULL;
}

/* --- going back --------------------------------------------------------------------------------------------------- */

/* Moves the path back to `begin` on this lane. */
static ar_status go_back(walk *w, ari_path_kind kind, uint64_t begin, const ari_record *record)
{
    if (begin >= w->time_ns)
        return AR_OK;
    AR_TRY(ARI_GROW_IN(w->arena, &w->steps, &w->capacity, w->count, "a critical path"));
    w->steps[w->count++] = (ari_path_step){kind, w->lane, begin, w->time_ns, record};
    w->time_ns = begin;
    return AR_OK;
}

/* Continues with the member whose arrival determined when this one was done. On the real clock that is the last member
 * to arrive, for which the others waited; on the virtual clock the collective has recorded the member. */
static ar_status through_collective(walk *w, const stretch *s)
{
    const ari_trace_view *v = w->v;
    const ari_rendezvous *m = &v->rendezvous[s->rendezvous];
    const bool is_virtual = v->clock == AR_TRACE_VIRTUAL;
    const ari_rendezvous_member *source = ari_view_member(v, m, is_virtual ? s->record->virtual_from : m->last_rank);
    if (!source || s->record->broken) {
        const uint64_t ready = s->begin + ari_view_waiting(v, m, s->record);
        AR_TRY(go_back(w, ARI_PATH_COMMUNICATION, ready, s->record));
        return go_back(w, ARI_PATH_WAIT, s->begin, NULL);
    }
    AR_TRY(go_back(w, ARI_PATH_COMMUNICATION, ari_view_begin(v, source->record), s->record));
    w->lane = source->lane;
    return AR_OK;
}

/* Continues with the other lane's last activity, unless it had ended before the wait began. */
static ar_status through_wait(walk *w, const stretch *s)
{
    const size_t peer = ari_view_lane_of(w->v, s->record->peer, s->record->peer_track);
    const stretch *peer_stretch = peer != SIZE_MAX && peer != w->lane ? stretch_before(w, peer, w->time_ns) : NULL;
    if (!peer_stretch || peer_stretch->end <= s->begin)
        return go_back(w, ARI_PATH_WAIT, s->begin, NULL);
    AR_TRY(go_back(w, ARI_PATH_WAIT, peer_stretch->end, NULL));
    w->lane = peer;
    return AR_OK;
}

/* Returns the lane of the same rank from which this lane got its time: a stretch of that lane ends exactly now, or
 * enqueued something in the middle of its work. The main lane is tried first. SIZE_MAX: none. */
static size_t lane_that_gave_time(const walk *w)
{
    const int rank = w->v->lanes[w->lane].rank;
    size_t works = SIZE_MAX;
    for (size_t i = 0; i < w->v->lane_count; i++) {
        const stretch *s = i != w->lane && w->v->lanes[i].rank == rank ? stretch_before(w, i, w->time_ns) : NULL;
        if (s && s->end == w->time_ns)
            return i;
        if (s && s->end > w->time_ns && s->record->kind == ARI_RECORD_WORK && works == SIZE_MAX)
            works = i;
    }
    return works;
}

/* Handles a gap before the current time. On the virtual clock, the time came from another lane, which enqueued the task
 * or whose wait was too short to be recorded. On the real clock, the main lane was computing, and a queue was idle
 * until the main lane enqueued something. `before`: end of the preceding stretch. */
static ar_status through_gap(walk *w, uint64_t before)
{
    const ari_view_lane *lane = &w->v->lanes[w->lane];
    const size_t main_lane = ari_view_lane_of(w->v, lane->rank, 0);
    if (w->v->clock == AR_TRACE_VIRTUAL) {
        const size_t source_lane = lane_that_gave_time(w);
        if (source_lane == SIZE_MAX)
            return go_back(w, ARI_PATH_WAIT, before, NULL);
        w->lane = source_lane;
        return AR_OK;
    }
    if (lane->track == 0 || main_lane == SIZE_MAX)
        return go_back(w, ARI_PATH_COMPUTE, before, NULL);
    w->lane = main_lane;
    return AR_OK;
}

static ar_status step_back(walk *w)
{
    const stretch *s = stretch_before(w, w->lane, w->time_ns);
    if (!s || s->end < w->time_ns)
        return through_gap(w, s ? s->end : 0);
    if (s->record->kind == ARI_RECORD_COLLECTIVE)
        return through_collective(w, s);
    if (s->record->kind == ARI_RECORD_WAIT)
        return through_wait(w, s);
    return go_back(w, ARI_PATH_COMPUTE, s->begin, NULL);
}

/* If times of several lanes are equal by chance, the path could become a circle; then it continues back on the same
 * lane. */
static ar_status walk_back(walk *w)
{
    size_t jumps = 0;
    while (w->time_ns > 0) {
        const uint64_t time_ns = w->time_ns;
        if (jumps > 2 * w->v->lane_count) {
            const stretch *s = stretch_before(w, w->lane, w->time_ns);
            AR_TRY(go_back(w, ARI_PATH_WAIT, !s ? 0 : s->end < time_ns ? s->end : s->begin, NULL));
        } else {
            AR_TRY(step_back(w));
        }
        jumps = w->time_ns < time_ns ? 0 : jumps + 1;
    }
    return AR_OK;
}

/* Finds the lane that ends last; the first of several. */
static void find_end(walk *w)
{
    const ari_trace_view *v = w->v;
    for (size_t i = 0; i < v->lane_count; i++) {
        for (size_t k = 0; k < v->lanes[i].count; k++) {
            const uint64_t end = ari_view_end(v, v->lanes[i].shown[k]);
            if (end > w->time_ns) {
                w->time_ns = end;
                w->lane = i;
            }
        }
    }
}

ar_status ari_critical_path(ari_path_step **out, size_t *count, ari_arena *arena, const ari_trace_view *v)
{
    walk w = {.v = v, .arena = arena};
    AR_TRY(ARI_TAKE(&w.lanes, arena, v->lane_count, "a critical path"));
    for (size_t i = 0; i < v->lane_count; i++)
        AR_TRY(make_line(&w.lanes[i], arena, v, &v->lanes[i]));
    find_end(&w);
    AR_TRY(walk_back(&w));
    *out = w.steps;
    *count = w.count;
    return AR_OK;
}
