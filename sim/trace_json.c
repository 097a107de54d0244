/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a trace as JSON for Chrome's trace viewer, which Perfetto also opens. simulated-cluster.md says how to read
 * the trace. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "sim/trace_view.h"

/* Kinds of tracks. The main thread's spans and its collectives have separate tracks, because inside of a computation's
 * span a collective would look like part of it. */
typedef enum track_kind { ALL_OF_LANE, COMPUTATION, COMMUNICATION } track_kind;

typedef struct writer {
    FILE *out;
    const ari_trace_view *view;
    bool any; /* true once an event has been written */
    uint64_t flows;
} writer;

/* Returns the number of a track. Track numbers are global in the file, and readers treat 0 as an idle processor. */
static size_t track_id(size_t lane, track_kind kind)
{
    return 2 * lane + (kind == COMMUNICATION ? 2 : 1);
}

static bool on_track(const ari_record *r, track_kind kind)
{
    const bool moves = r->kind == ARI_RECORD_COLLECTIVE || r->kind == ARI_RECORD_TRANSFER;
    return kind == ALL_OF_LANE || moves == (kind == COMMUNICATION);
}

static track_kind track_of(const ari_view_lane *lane, const ari_record *r)
{
    return lane->track > 0 ? ALL_OF_LANE : on_track(r, COMMUNICATION) ? COMMUNICATION : COMPUTATION;
}

static void begin_event(writer *w, const char *phase, int pid)
{
    fprintf(w->out, "%s{\"ph\":\"%s\",\"pid\":%d", w->any ? ",\n" : "", phase, pid);
    w->any = true;
}

/* Microseconds with three decimals. Readers that multiply by 1000 and cut off get `ns` back. */
static void say_us(FILE *out, uint64_t ns)
{
    /* Perfetto computes (int64_t)(us * 1000.0), which for some decimals is the preceding nanosecond. */
    const bool falls_short = (uint64_t)((double)ns / 1000.0 * 1000.0) < ns;
    fprintf(out, "%llu.%03u%s", (unsigned long long)(ns / 1000), (unsigned)(ns % 1000), falls_short ? "1" : "");
}

static void put_time(writer *w, const char *key, uint64_t ns)
{
    fprintf(w->out, ",\"%s\":", key);
    say_us(w->out, ns);
}

/* A JSON string, quoted. What is not UTF-8 becomes U+FFFD. */
static void put_text(FILE *out, const char *s)
{
    fputc('"', out);
    for (size_t n; *s; s += n ? n : 1) {
        n = ari_utf8_length(s, strnlen(s, 4));
        if (n == 0)
            fputs("\xef\xbf\xbd", out);
        else if (*s == '"' || *s == '\\')
            fprintf(out, "\\%c", *s);
        else if ((unsigned char)*s < 0x20 || *s == 0x7f)
            fprintf(out, "\\u%04x", (unsigned)*s);
        else
            fwrite(s, 1, n, out);
    }
    fputc('"', out);
}

static void put_string(writer *w, const char *key, const char *value)
{
    fprintf(w->out, ",\"%s\":", key);
    put_text(w->out, value);
}

/* --- names of processes and tracks -------------------------------------------------------------------------------- */

static void name_process(writer *w, int pid, const char *name, int sort)
{
    begin_event(w, "M", pid);
    fprintf(w->out, ",\"name\":\"process_name\",\"args\":{\"name\":\"%s\"}}", name);
    begin_event(w, "M", pid);
    fprintf(w->out, ",\"name\":\"process_sort_index\",\"args\":{\"sort_index\":%d}}", sort);
}

static void name_track(writer *w, size_t lane, track_kind kind, const char *name)
{
    const int pid = w->view->lanes[lane].rank;
    begin_event(w, "M", pid);
    fprintf(w->out, ",\"tid\":%zu,\"name\":\"thread_name\",\"args\":{\"name\":", track_id(lane, kind));
    put_text(w->out, name);
    fprintf(w->out, "}}");
    begin_event(w, "M", pid);
    fprintf(w->out, ",\"tid\":%zu,\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%d}}", track_id(lane, kind),
            2 * w->view->lanes[lane].track + (kind == COMMUNICATION));
}

static void put_names(writer *w)
{
    const ari_trace_view *v = w->view;
    name_process(w, v->ranks, "cluster", -1);
    for (size_t i = 0; i < v->lane_count; i++) {
        const ari_view_lane *lane = &v->lanes[i];
        if (i == 0 || lane->rank != v->lanes[i - 1].rank) {
            char name[32];
            snprintf(name, sizeof name, "rank %d", lane->rank);
            name_process(w, lane->rank, name, lane->rank);
        }
        if (lane->track > 0) {
            name_track(w, i, ALL_OF_LANE, lane->name[0] ? lane->name : "queue");
            continue;
        }
        name_track(w, i, COMPUTATION, "compute");
        if (lane->collectives > 0)
            name_track(w, i, COMMUNICATION, "communication");
    }
}

/* --- slices ------------------------------------------------------------------------------------------------------- */

static void begin_slice(writer *w, size_t lane, track_kind kind, const char *category, uint64_t begin, uint64_t end)
{
    begin_event(w, "X", w->view->lanes[lane].rank);
    fprintf(w->out, ",\"tid\":%zu,\"cat\":\"%s\"", track_id(lane, kind), category);
    put_time(w, "ts", begin);
    put_time(w, "dur", end - begin);
}

static void put_collective(writer *w, size_t lane, size_t place, track_kind kind)
{
    const ari_trace_view *v = w->view;
    const ari_record *r = v->lanes[lane].shown[place];
    const ari_rendezvous *m = &v->rendezvous[v->lanes[lane].rendezvous[place]];
    const uint64_t begin = ari_view_begin(v, r), end = ari_view_end(v, r), waiting = ari_view_waiting(v, m, r);
    char ranks[256];
    ari_view_ranks(v, m, ranks, sizeof ranks);
    begin_slice(w, lane, kind, "collective", begin, end);
    fprintf(w->out, ",\"name\":\"%s\",\"args\":{\"op\":\"%s\"", ari_kind_name(r->op_kind), ari_kind_name(r->op_kind));
    put_string(w, "tag", r->name);
    if (ari_kind_of(r->op_kind)->combines)
        fprintf(w->out, ",\"reduction\":\"%s\"", ari_op_name(r->op));
    if (ari_kind_of(r->op_kind)->from_root)
        fprintf(w->out, ",\"root\":%d", r->root);
    fprintf(w->out,
            ",\"dtype\":\"%s\",\"count\":%zu,\"bytes read\":%" PRIu64 ",\"bytes written\":%" PRIu64
            ",\"group\":%" PRIu64 ",\"sequence\":%" PRIu64 ",\"ranks\":\"%s\",\"group size\":%d,\"came last\":%d",
            ar_dtype_name(r->dtype), r->count, r->bytes_read, r->bytes_written, r->group, r->seq, ranks, r->ranks,
            m->last_rank);
    put_time(w, "waiting_us", waiting);
    put_time(w, "moving_us", end - begin - waiting);
    fprintf(w->out, "%s}}", r->broken ? ",\"broken off\":true" : "");
    if (waiting == 0)
        return;
    begin_slice(w, lane, kind, "waiting", begin, begin + waiting);
    fprintf(w->out, ",\"name\":\"waiting\",\"args\":{\"for rank\":%d}}", m->last_rank);
}

static void put_slice(writer *w, size_t lane, size_t place, track_kind kind)
{
    const ari_trace_view *v = w->view;
    const ari_record *r = v->lanes[lane].shown[place];
    const uint64_t begin = ari_view_begin(v, r), end = ari_view_end(v, r);
    switch (r->kind) {
    case ARI_RECORD_SPAN:
        begin_slice(w, lane, kind, "span", begin, end);
        put_string(w, "name", r->name);
        fprintf(w->out, "}");
        break;
    case ARI_RECORD_WORK:
        begin_slice(w, lane, kind, "work", begin, end);
        fprintf(w->out, ",\"name\":\"work\",\"args\":{\"flops\":%.17g}}", r->flops);
        break;
    case ARI_RECORD_WAIT:
        begin_slice(w, lane, kind, "queue", begin, end);
        fprintf(w->out, ",\"name\":\"waits for a queue\",\"args\":{\"queue\":");
        put_text(w->out, r->name);
        fprintf(w->out, "}}");
        break;
    case ARI_RECORD_TRANSFER:
        begin_slice(w, lane, kind, "transfer", begin, end);
        fprintf(w->out, ",\"name\":\"from rank %d\",\"args\":{\"from\":%d,\"bytes\":%" PRIu64 "}}", r->peer, r->peer,
                r->bytes);
        break;
    case ARI_RECORD_COLLECTIVE:
        put_collective(w, lane, place, kind);
        break;
    }
}

static void put_track(writer *w, size_t lane, track_kind kind)
{
    const ari_view_lane *l = &w->view->lanes[lane];
    for (size_t i = 0; i < l->count; i++) {
        if (on_track(l->shown[i], kind))
            put_slice(w, lane, i, kind);
    }
}

static void put_slices(writer *w)
{
    for (size_t i = 0; i < w->view->lane_count; i++) {
        const bool main_lane = w->view->lanes[i].track == 0;
        put_track(w, i, main_lane ? COMPUTATION : ALL_OF_LANE);
        if (main_lane && w->view->lanes[i].collectives > 0)
            put_track(w, i, COMMUNICATION);
    }
}

/* --- arrows ------------------------------------------------------------------------------------------------------- */

/* Returns true if an arrow may end at this time in a slice: before the slice's end, because at the end of one slice the
 * reader looks into the next. */
static bool lies_in(const ari_trace_view *v, const ari_record *r, uint64_t ns)
{
    return ari_view_begin(v, r) <= ns && ns < ari_view_end(v, r);
}

typedef struct place {
    size_t lane;
    const ari_record *record;
    uint64_t ns;
} place;

static void put_arrow_end(writer *w, const char *phase, const char *category, const char *name, const place *p)
{
    const ari_view_lane *lane = &w->view->lanes[p->lane];
    begin_event(w, phase, lane->rank);
    fprintf(w->out, ",\"tid\":%zu,\"id\":%" PRIu64 ",\"cat\":\"%s\",\"name\":\"%s\"",
            track_id(p->lane, track_of(lane, p->record)), w->flows, category, name);
    put_time(w, "ts", p->ns);
    fprintf(w->out, "%s}", phase[0] == 'f' ? ",\"bp\":\"e\"" : "");
}

/* An arrow whose ends cannot both be shown is left out. */
static void put_arrow(writer *w, const char *category, const char *name, const place *origin, const place *target)
{
    if (!lies_in(w->view, origin->record, origin->ns) || !lies_in(w->view, target->record, target->ns) ||
        target->ns < origin->ns)
        return;
    w->flows++;
    put_arrow_end(w, "s", category, name, origin);
    put_arrow_end(w, "f", category, name, target);
}

static place member_at(const ari_rendezvous_member *m, uint64_t ns)
{
    return (place){m->lane, m->record, ns};
}

/* Draws arrows from the member that arrived last to each member that waited for it. */
static void put_waits(writer *w, const ari_rendezvous *m)
{
    const ari_trace_view *v = w->view;
    const ari_rendezvous_member *last_member = ari_view_member(v, m, m->last_rank);
    const uint64_t ready = m->came_ns - v->start_ns;
    const place origin = member_at(last_member, ready);
    for (size_t i = m->first_member; i < m->first_member + m->members; i++) {
        const ari_rendezvous_member *x = &v->members[i];
        const place target = member_at(x, ready);
        if (x != last_member && !x->record->broken && ari_view_waiting(v, m, x->record) > 0)
            put_arrow(w, "last", "the last to come", &origin, &target);
    }
}

/* Draws an arrow from a sender to its receiver. */
static void put_message(writer *w, const ari_rendezvous *m)
{
    const ari_trace_view *v = w->view;
    const ari_rendezvous_member *a = &v->members[m->first_member], *b = a + 1;
    if (m->members != 2 || a->record->op_kind == b->record->op_kind)
        return;
    const bool a_sends = a->record->op_kind == ARI_SEND;
    const ari_rendezvous_member *sender = a_sends ? a : b, *receiver = a_sends ? b : a;
    const uint64_t end = ari_view_end(v, receiver->record);
    const place origin = member_at(sender, m->came_ns - v->start_ns),
                target = member_at(receiver, end > 0 ? end - 1 : 0);
    put_arrow(w, "data", "message", &origin, &target);
}

/* Draws the arrows of a ring. In virtual time, collectives use a ring, in which each member receives from its left
 * neighbour. */
static void put_ring(writer *w, const ari_rendezvous *m)
{
    const ari_trace_view *v = w->view;
    const ari_kind kind = m->record->op_kind;
    if (!ari_kind_of(kind)->ring || ari_kind_of(kind)->from_root || m->members < 2 ||
        m->members < (size_t)m->record->ranks)
        return;
    for (size_t i = 0; i < m->members; i++) {
        const ari_rendezvous_member *receiver = &v->members[m->first_member + i];
        const ari_rendezvous_member *left_member = &v->members[m->first_member + (i + m->members - 1) % m->members];
        const uint64_t end = ari_view_end(v, receiver->record);
        const place origin = member_at(left_member, m->came_ns - v->start_ns),
                    into = member_at(receiver, end > 0 ? end - 1 : 0);
        put_arrow(w, "data", "round the ring", &origin, &into);
    }
}

/* Draws the recorded steps of a ring, from the neighbour whose memory was read. */
static void put_transfers(writer *w, size_t lane)
{
    const ari_trace_view *v = w->view;
    const ari_view_lane *l = &v->lanes[lane];
    const ari_rendezvous *m = NULL;
    for (size_t i = 0; i < l->count; i++) {
        const ari_record *r = l->shown[i];
        if (r->kind == ARI_RECORD_COLLECTIVE)
            m = &v->rendezvous[l->rendezvous[i]];
        const ari_rendezvous_member *source =
            m && r->kind == ARI_RECORD_TRANSFER ? ari_view_member(v, m, r->peer) : NULL;
        if (!source)
            continue;
        const uint64_t begin = ari_view_begin(v, r);
        const place origin = member_at(source, begin), target = {lane, r, begin};
        put_arrow(w, "data", "step of the ring", &origin, &target);
    }
}

/* Returns the last activity of a lane that ended by this time, or NULL. Records are in the order in which they
 * began. */
static const ari_record *done_by(const ari_trace_view *v, const ari_view_lane *l, uint64_t ns)
{
    size_t low = 0;
    ARI_BISECT(low, l->count, i, ari_view_begin(v, l->shown[i]) < ns)
    while (low > 0) {
        const ari_record *r = l->shown[--low];
        if (ari_view_end(v, r) <= ns && ari_view_end(v, r) > ari_view_begin(v, r))
            return r;
    }
    return NULL;
}

/* Draws arrows from a queue's last activity to the thread that waited for it. */
static void put_queue_waits(writer *w, size_t lane)
{
    const ari_trace_view *v = w->view;
    const ari_view_lane *l = &v->lanes[lane];
    for (size_t i = 0; i < l->count; i++) {
        const ari_record *r = l->shown[i];
        const size_t peer = r->kind == ARI_RECORD_WAIT ? ari_view_lane_of(v, r->peer, r->peer_track) : SIZE_MAX;
        const uint64_t end = ari_view_end(v, r);
        const ari_record *last_record = peer != SIZE_MAX ? done_by(v, &v->lanes[peer], end) : NULL;
        if (!last_record || ari_view_begin(v, r) == end)
            continue;
        const place origin = {peer, last_record, ari_view_end(v, last_record) - 1}, target = {lane, r, end - 1};
        put_arrow(w, "queue", "waited for", &origin, &target);
    }
}

static void put_arrows(writer *w)
{
    const ari_trace_view *v = w->view;
    for (size_t i = 0; i < v->rendezvous_count; i++) {
        put_waits(w, &v->rendezvous[i]);
        put_message(w, &v->rendezvous[i]);
        if (v->clock == AR_TRACE_VIRTUAL)
            put_ring(w, &v->rendezvous[i]);
    }
    for (size_t i = 0; i < v->lane_count; i++) {
        put_transfers(w, i);
        put_queue_waits(w, i);
    }
}

/* --- counters ----------------------------------------------------------------------------------------------------- */

static void put_counter(writer *w, int pid, uint64_t ns, int64_t bytes)
{
    begin_event(w, "C", pid);
    fprintf(w->out, ",\"name\":\"bytes in flight\"");
    put_time(w, "ts", ns);
    fprintf(w->out, ",\"args\":{\"bytes\":%" PRId64 "}}", bytes);
}

/* Writes one change per moment, whatever begins and ends then, because of two values at one moment a reader may show
 * either. */
static void put_changes(writer *w, const ari_view_flight *list, size_t n, int64_t *of_rank)
{
    int64_t total = 0;
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i; end < n && list[end].ns == list[i].ns; end++) {
            total += list[end].bytes;
            of_rank[list[end].rank] += list[end].bytes;
        }
        for (size_t k = i; k < end; k++) {
            bool is_repeated = false;
            for (size_t b = i; b < k; b++)
                is_repeated = is_repeated || list[b].rank == list[k].rank;
            if (!is_repeated)
                put_counter(w, list[k].rank, list[k].ns, of_rank[list[k].rank]);
        }
        put_counter(w, w->view->ranks, list[i].ns, total);
    }
}

static ar_status put_counters(writer *w)
{
    ARI_OWNED ari_view_flight *list = NULL;
    ARI_OWNED int64_t *of_rank = NULL;
    size_t n = 0;
    AR_TRY(ari_view_flights(&list, &n, w->view));
    AR_TRY(ARI_ALLOC_ZERO(&of_rank, (size_t)w->view->ranks, "bytes in flight"));
    for (int rank = 0; n > 0 && rank <= w->view->ranks; rank++)
        put_counter(w, rank, 0, 0);
    put_changes(w, list, n, of_rank);
    return AR_OK;
}

/* --- the file ----------------------------------------------------------------------------------------------------- */

static void put_cut(writer *w)
{
    begin_event(w, "i", w->view->ranks);
    fprintf(w->out, ",\"tid\":0,\"s\":\"g\",\"name\":\"memory ran out here: the end of this trace is missing\"");
    put_time(w, "ts", w->view->end_ns - w->view->start_ns);
    fprintf(w->out, "}");
}

/* Writes the summary in seconds, as ar_trace_summary has it. */
static void put_summary(FILE *out, const ar_trace_summary *s)
{
    fprintf(out,
            "{\"seconds\":%.17g,\"compute\":%.17g,\"communication\":%.17g,\"exposed\":%.17g,\"overlap\":%.17g,"
            "\"bytes\":%" PRIu64 ",\"collectives\":%zu,",
            s->seconds, s->compute, s->communication, s->exposed, s->overlap, s->bytes, s->collectives);
    fprintf(out, "\"path\":{\"compute\":%.17g,\"communication\":%.17g,\"wait\":%.17g},\"longest\":[", s->path_compute,
            s->path_communication, s->path_wait);
    for (size_t i = 0; i < s->parts; i++) {
        fprintf(out, "%s[%d,%.17g,", i > 0 ? "," : "", s->longest[i].rank, s->longest[i].seconds);
        put_text(out, s->longest[i].what);
        fprintf(out, "]");
    }
    fprintf(out, "]}");
}

static ar_status put_all(writer *w, const ar_trace_summary *summary, const char *title)
{
    fprintf(w->out, "{\"displayTimeUnit\":\"ns\",\"otherData\":{\"title\":");
    put_text(w->out, title);
    fprintf(w->out, ",\"clock\":\"%s\",\"cut\":%s,\"summary\":", w->view->clock == AR_TRACE_REAL ? "real" : "virtual",
            w->view->cut ? "true" : "false");
    put_summary(w->out, summary);
    fprintf(w->out, "},\"traceEvents\":[\n");
    put_names(w);
    put_slices(w);
    put_arrows(w);
    AR_TRY(put_counters(w));
    if (w->view->cut)
        put_cut(w);
    fprintf(w->out, "\n]}\n");
    return AR_OK;
}

ar_status ar_trace_write_json(const ar_trace *t, ar_trace_clock clock, const char *title, const char *path)
{
    if (!t)
        return ar_error_set(AR_ERR_ARG, "ar_trace_write_json: the trace is missing");
    ARI_ENDED(ari_trace_view_fini) ari_trace_view view = {0};
    ARI_OWNED_BY(ari_atomic_file_discard) ari_atomic_file *out = NULL;
    ar_trace_summary summary;
    writer w = {.view = &view};
    AR_TRY(ari_trace_view_init(&view, t, clock));
    AR_TRY(ar_trace_summarise(&summary, t, clock));
    AR_TRY(ari_atomic_file_create(&out, path));
    AR_TRY(ari_atomic_file_stream(&w.out, out));
    const ar_status st = put_all(&w, &summary, title ? title : ""), written = ari_atomic_file_stream_end(w.out, out);
    AR_TRY(st);
    AR_TRY(written);
    return ari_atomic_file_commit(out);
}
