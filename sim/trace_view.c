/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/trace_view.h"

#include <stdlib.h>

#include "ref/core/text.h"

static uint64_t begin_of(const ari_trace_view *v, const ari_record *r)
{
    return v->clock == AR_TRACE_REAL ? r->begin_ns : r->virtual_begin_ns;
}

static uint64_t end_of(const ari_trace_view *v, const ari_record *r)
{
    return v->clock == AR_TRACE_REAL ? r->end_ns : r->virtual_end_ns;
}

uint64_t ari_view_begin(const ari_trace_view *v, const ari_record *r)
{
    return begin_of(v, r) - v->start_ns;
}

uint64_t ari_view_end(const ari_trace_view *v, const ari_record *r)
{
    return end_of(v, r) - v->start_ns;
}

/* Returns true if the record is part of the view's clock. Computation has no duration on the real clock. The virtual
 * clock has a collective's duration but not its transfers'. A wait on the real clock may have no duration on the
 * virtual clock. */
static bool shows(const ari_trace_view *v, const ari_record *r)
{
    if (v->clock == AR_TRACE_REAL)
        return r->kind != ARI_RECORD_WORK;
    if (r->kind == ARI_RECORD_TRANSFER)
        return false;
    return r->kind != ARI_RECORD_WAIT || r->virtual_end_ns - r->virtual_begin_ns >= ARI_SHORTEST_WAIT_NS;
}

/* --- lanes -------------------------------------------------------------------------------------------------------- */

/* A collective precedes its transfers, which have the same number. */
static int by_order(const void *a, const void *b)
{
    const ari_record *x = *(const ari_record *const *)a, *y = *(const ari_record *const *)b;
    ARI_ASCENDING(x->order, y->order);
    const bool x_in = x->kind == ARI_RECORD_TRANSFER, y_in = y->kind == ARI_RECORD_TRANSFER;
    ARI_ASCENDING(x_in, y_in);
    return x < y ? -1 : x > y;
}

static int by_place(const void *a, const void *b)
{
    const ari_view_lane *x = a, *y = b;
    return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1) : (x->track > y->track) - (x->track < y->track);
}

static ar_status show_lane(ari_view_lane *view_lane, ari_trace_view *v, const ari_trace_lane *trace_lane)
{
    *view_lane = (ari_view_lane){.rank = trace_lane->rank, .track = trace_lane->track, .name = trace_lane->name};
    AR_TRY(ARI_ALLOC(&view_lane->shown, trace_lane->count, "a view of a trace"));
    AR_TRY(ARI_ALLOC(&view_lane->rendezvous, trace_lane->count, "a view of a trace"));
    for (size_t i = 0; i < trace_lane->count; i++) {
        const ari_record *r = &trace_lane->records[i];
        if (!shows(v, r))
            continue;
        view_lane->rendezvous[view_lane->count] = SIZE_MAX;
        view_lane->shown[view_lane->count++] = r;
        view_lane->collectives += r->kind == ARI_RECORD_COLLECTIVE;
        v->start_ns = begin_of(v, r) < v->start_ns ? begin_of(v, r) : v->start_ns;
        v->end_ns = end_of(v, r) > v->end_ns ? end_of(v, r) : v->end_ns;
    }
    qsort(view_lane->shown, view_lane->count, sizeof *view_lane->shown, by_order);
    v->ranks = view_lane->rank >= v->ranks ? view_lane->rank + 1 : v->ranks;
    v->member_count += view_lane->collectives;
    return AR_OK;
}

static ar_status show_lanes(ari_trace_view *v, const ar_trace *t)
{
    const size_t n = ari_trace_lanes(t);
    AR_TRY(ARI_ALLOC_ZERO(&v->lanes, n, "a view of a trace"));
    v->lane_count = n;
    v->start_ns = UINT64_MAX;
    for (size_t i = 0; i < n; i++) {
        const ari_trace_lane lane = ari_trace_lane_at(t, i);
        AR_TRY(show_lane(&v->lanes[i], v, &lane));
    }
    if (v->start_ns > v->end_ns)
        v->start_ns = v->end_ns; /* nothing was recorded */
    qsort(v->lanes, n, sizeof *v->lanes, by_place);
    return AR_OK;
}

/* --- rendezvous --------------------------------------------------------------------------------------------------- */

static bool same_rendezvous(const ari_record *x, const ari_record *y)
{
    return x->group == y->group && x->seq == y->seq;
}

/* Members of the same rank stay in the order of the lanes. */
static int by_rendezvous(const void *a, const void *b)
{
    const ari_rendezvous_member *x = a, *y = b;
    ARI_ASCENDING(x->record->group, y->record->group);
    ARI_ASCENDING(x->record->seq, y->record->seq);
    return x->lane < y->lane ? -1 : x->lane > y->lane;
}

/* Finds the last member. Among members that arrived at the same time it is the one that the collective itself saw
 * last. */
static void find_last(const ari_trace_view *v, ari_rendezvous *m)
{
    for (size_t i = 0; i < m->members; i++) {
        const ari_rendezvous_member *x = &v->members[m->first_member + i];
        const int rank = v->lanes[x->lane].rank;
        const int recorded_last = v->clock == AR_TRACE_REAL ? x->record->last_rank : x->record->virtual_last;
        const uint64_t ns = begin_of(v, x->record);
        if (i == 0 || ns > m->came_ns || (ns == m->came_ns && rank == recorded_last)) {
            m->came_ns = ns;
            m->last_rank = rank;
        }
    }
}

static ar_status put_together(ari_trace_view *v)
{
    AR_TRY(ARI_ALLOC(&v->members, v->member_count, "a view of a trace"));
    AR_TRY(ARI_ALLOC(&v->rendezvous, v->member_count, "a view of a trace"));
    size_t n = 0;
    for (size_t l = 0; l < v->lane_count; l++) {
        for (size_t i = 0; i < v->lanes[l].count; i++) {
            if (v->lanes[l].shown[i]->kind == ARI_RECORD_COLLECTIVE)
                v->members[n++] = (ari_rendezvous_member){v->lanes[l].shown[i], l, i};
        }
    }
    qsort(v->members, n, sizeof *v->members, by_rendezvous);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && same_rendezvous(v->members[end].record, v->members[i].record);)
            end++;
        ari_rendezvous *m = &v->rendezvous[v->rendezvous_count];
        *m = (ari_rendezvous){.first_member = i, .members = end - i, .record = v->members[i].record};
        find_last(v, m);
        for (size_t k = i; k < end; k++)
            v->lanes[v->members[k].lane].rendezvous[v->members[k].place] = v->rendezvous_count;
        v->rendezvous_count++;
    }
    return AR_OK;
}

ar_status ari_trace_view_init(ari_trace_view *v, const ar_trace *t, ar_trace_clock clock)
{
    *v = (ari_trace_view){.clock = clock, .cut = ari_trace_is_cut(t)};
    if (clock != AR_TRACE_REAL && clock != AR_TRACE_VIRTUAL)
        return ar_error_set(AR_ERR_ARG, "a trace has no clock %d", (int)clock);
    if (clock == AR_TRACE_VIRTUAL && !ari_trace_is_virtual(t))
        return ar_error_set(AR_ERR_ARG, "the run that was traced had no virtual time: its options named no cluster");
    AR_TRY(show_lanes(v, t));
    return put_together(v);
}

void ari_trace_view_fini(ari_trace_view *v)
{
    for (size_t i = 0; i < v->lane_count; i++) {
        free(v->lanes[i].shown);
        free(v->lanes[i].rendezvous);
    }
    free(v->lanes);
    free(v->members);
    free(v->rendezvous);
}

uint64_t ari_view_waiting(const ari_trace_view *v, const ari_rendezvous *m, const ari_record *r)
{
    const uint64_t begin = begin_of(v, r), end = end_of(v, r);
    const bool incomplete = r->broken && m->members < (size_t)r->ranks;
    const uint64_t until = incomplete || m->came_ns > end ? end : m->came_ns;
    return until > begin ? until - begin : 0;
}

const ari_rendezvous_member *ari_view_member(const ari_trace_view *v, const ari_rendezvous *m, int rank)
{
    for (size_t i = m->first_member; i < m->first_member + m->members; i++) {
        if (v->lanes[v->members[i].lane].rank == rank)
            return &v->members[i];
    }
    return NULL;
}

size_t ari_view_lane_of(const ari_trace_view *v, int rank, int track)
{
    for (size_t i = 0; i < v->lane_count; i++) {
        if (v->lanes[i].rank == rank && v->lanes[i].track == track)
            return i;
    }
    return SIZE_MAX;
}

void ari_view_ranks(const ari_trace_view *v, const ari_rendezvous *m, char *text, size_t size)
{
    ari_text t = ari_plain_text_in(text, size);
    for (size_t i = 0, end; i < m->members; i = end) {
        const int first_rank = v->lanes[v->members[m->first_member + i].lane].rank;
        int last_rank = first_rank;
        for (end = i + 1; end < m->members && v->lanes[v->members[m->first_member + end].lane].rank == last_rank + 1;
             end++)
            last_rank++;
        ari_say(&t, last_rank > first_rank ? "%s%d-%d" : "%s%d", i > 0 ? ", " : "", first_rank, last_rank);
    }
}

/* --- bytes in flight ---------------------------------------------------------------------------------------------- */

static int by_time(const void *a, const void *b)
{
    const ari_view_flight *x = a, *y = b;
    ARI_ASCENDING(x->ns, y->ns);
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

ar_status ari_view_flights(ari_view_flight **out, size_t *count, const ari_trace_view *v)
{
    ari_view_flight *list = NULL;
    size_t n = 0, max_changes = 0;
    AR_TRY(ari_mul_size(&max_changes, v->member_count, 2));
    AR_TRY(ARI_ALLOC(&list, max_changes, "bytes in flight"));
    for (size_t i = 0; i < v->rendezvous_count; i++) {
        const ari_rendezvous *m = &v->rendezvous[i];
        for (size_t k = m->first_member; k < m->first_member + m->members; k++) {
            const ari_record *r = v->members[k].record;
            const uint64_t begin = ari_view_begin(v, r) + ari_view_waiting(v, m, r), end = ari_view_end(v, r);
            const int64_t bytes = (int64_t)(r->bytes_read + r->bytes_written);
            const int rank = v->lanes[v->members[k].lane].rank;
            if (bytes == 0 || end <= begin) /* takes no time */
                continue;
            list[n++] = (ari_view_flight){begin, rank, bytes};
            list[n++] = (ari_view_flight){end, rank, -bytes};
        }
    }
    qsort(list, n, sizeof *list, by_time);
    *out = list;
    *count = n;
    return AR_OK;
}
