/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/record.h"

#include "ref/core/clock.h"
#include "ref/core/lane.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

enum { SPANS = 64, CHUNK_BYTES = 1 << 16, NAME_BYTES = 160 };

/* Names, one after the other in chunks that do not move. */
typedef struct text_chunk {
    struct text_chunk *next;
    size_t used;
    char text[CHUNK_BYTES];
} text_chunk;

typedef struct open_span {
    const char *name;
    uint32_t order;
    uint64_t begin_ns, virtual_begin_ns;
} open_span;

struct ari_recording {
    ari_recording *next;
    ar_trace *trace;
    int rank, track;
    char name[32];
    ari_record *records;
    size_t count, capacity;
    text_chunk *text;
    open_span open[SPANS]; /* open spans; deeper ones are not recorded */
    uint32_t depth, order; /* order: number of records begun so far */
    bool waited;           /* true if a wait since the last record was too short to be recorded */
};

struct ar_trace {
    pthread_mutex_t lock;
    ari_recording *recordings; /* guarded by `lock`; the newest first */
    atomic_bool cut, is_virtual;
};

ar_status ar_trace_create(ar_trace **out)
{
    if (!out)
        return ar_error_set(AR_ERR_ARG, "ar_trace_create: no place for the trace");
    *out = NULL;
    ARI_OWNED ar_trace *t = calloc(1, sizeof *t);
    if (!t || pthread_mutex_init(&t->lock, NULL) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a trace");
    ARI_GIVE(out, t);
    return AR_OK;
}

void ar_trace_destroy(ar_trace *t)
{
    if (!t)
        return;
    while (t->recordings) {
        ari_recording *r = t->recordings;
        t->recordings = r->next;
        while (r->text) {
            text_chunk *c = r->text;
            r->text = c->next;
            free(c);
        }
        free(r->records);
        free(r);
    }
    pthread_mutex_destroy(&t->lock);
    free(t);
}

ar_status ari_recording_create(ari_recording **out, ar_trace *t, const ari_lane *l)
{
    ari_recording *r = calloc(1, sizeof *r);
    *out = r;
    if (!r)
        return ar_error_set(AR_ERR_MEMORY, "no memory to record rank %d", l->rank);
    r->trace = t;
    r->rank = l->rank;
    r->track = l->track;
    memcpy(r->name, l->name, sizeof r->name);
    if (l->instruments->rates.flops > 0)
        atomic_store(&t->is_virtual, true);
    pthread_mutex_lock(&t->lock);
    r->next = t->recordings;
    t->recordings = r;
    pthread_mutex_unlock(&t->lock);
    return AR_OK;
}

/* NULL: no memory. */
static const char *keep_name(ari_recording *r, const char *name)
{
    if (!name[0])
        return "";
    const size_t length = strlen(name), bytes = (length < 255 ? length : 255) + 1;
    if (!r->text || r->text->used + bytes > CHUNK_BYTES) {
        text_chunk *c = malloc(sizeof *c);
        if (!c)
            return NULL;
        c->next = r->text;
        c->used = 0;
        r->text = c;
    }
    char *dst = r->text->text + r->text->used;
    memcpy(dst, name, bytes - 1);
    dst[bytes - 1] = '\0';
    r->text->used += bytes;
    return dst;
}

/* Returns true if r only extends the last recorded work. A span that began or ended in between would have changed the
 * depth or been recorded itself. A wait in between separates the two even if it is not recorded, because its length is
 * real time and must not affect the virtual clock. */
static bool prolongs_work(ari_recording *recording, const ari_record *r)
{
    ari_record *before = recording->count > 0 ? &recording->records[recording->count - 1] : NULL;
    if (!before || r->kind != ARI_RECORD_WORK || before->kind != ARI_RECORD_WORK || before->depth != recording->depth ||
        recording->waited || before->virtual_end_ns != r->virtual_begin_ns)
        return false;
    before->virtual_end_ns = r->virtual_end_ns;
    before->flops += r->flops;
    return true;
}

void ari_record_add(ari_recording *recording, const ari_record *r, const char *name)
{
    if (!recording || atomic_load_explicit(&recording->trace->cut, memory_order_relaxed) || prolongs_work(recording, r))
        return;
    const char *saved_name = keep_name(recording, name);
    if (!saved_name || ARI_GROW(&recording->records, &recording->capacity, recording->count, "a trace") != AR_OK) {
        atomic_store(&recording->trace->cut, true);
        return;
    }
    ari_record *record = &recording->records[recording->count++];
    *record = *r;
    recording->waited = false;
    record->name = saved_name;
    record->depth = recording->depth;
    if (r->kind != ARI_RECORD_SPAN) /* already reserved when it began */
        record->order = r->kind == ARI_RECORD_TRANSFER ? recording->order : recording->order++;
}

static void begin_span(ari_recording *r, const char *name, uint64_t virtual_ns)
{
    if (r->depth < SPANS) {
        const char *saved_name = keep_name(r, name);
        if (!saved_name)
            atomic_store(&r->trace->cut, true);
        r->open[r->depth] = (open_span){saved_name ? saved_name : "", r->order++, ari_now_ns(), virtual_ns};
    }
    r->depth++;
}

static void end_span(ari_recording *r, uint64_t virtual_ns)
{
    if (--r->depth >= SPANS)
        return;
    const open_span *o = &r->open[r->depth];
    const ari_record span = {.kind = ARI_RECORD_SPAN,
                             .order = o->order,
                             .begin_ns = o->begin_ns,
                             .end_ns = ari_now_ns(),
                             .virtual_begin_ns = o->virtual_begin_ns,
                             .virtual_end_ns = virtual_ns};
    ari_record_add(r, &span, o->name);
}

void ar_trace_begin(const char *name)
{
    const ari_lane *l = ari_lane_self();
    if (l && l->recording)
        begin_span(l->recording, name ? name : "", l->virtual_ns);
}

void ari_span_begin(const char *format, ...)
{
    const ari_lane *l = ari_lane_self();
    if (!l || !l->recording)
        return;
    char name[NAME_BYTES];
    ARI_FORMAT(name, format);
    begin_span(l->recording, name, l->virtual_ns);
}

void ar_trace_end(void)
{
    const ari_lane *l = ari_lane_self();
    if (l && l->recording && l->recording->depth > 0)
        end_span(l->recording, l->virtual_ns);
}

void ari_recording_close(ari_recording *r, uint64_t virtual_ns)
{
    while (r && r->depth > 0)
        end_span(r, virtual_ns);
}

ari_moment ari_record_moment(void)
{
    const ari_lane *l = ari_lane_self();
    return l && l->recording ? (ari_moment){ari_now_ns(), l->virtual_ns} : (ari_moment){0, 0};
}

void ari_record_wait(ari_moment since, const ari_lane *peer)
{
    const ari_lane *l = ari_lane_self();
    if (!l || !l->recording || !since.ns)
        return;
    const uint64_t now_ns = ari_now_ns();
    l->recording->waited = true;
    if (now_ns - since.ns < ARI_SHORTEST_WAIT_NS && l->virtual_ns - since.virtual_ns < ARI_SHORTEST_WAIT_NS)
        return;
    const ari_record wait = {.kind = ARI_RECORD_WAIT,
                             .begin_ns = since.ns,
                             .end_ns = now_ns,
                             .virtual_begin_ns = since.virtual_ns,
                             .virtual_end_ns = l->virtual_ns,
                             .peer = l->rank,
                             .peer_track = peer ? peer->track : -1};
    ari_record_add(l->recording, &wait, peer ? peer->name : "");
}

void ari_record_transfer(ari_moment since, int src_rank, uint64_t bytes)
{
    const ari_lane *l = ari_lane_self();
    if (!l || !l->recording || !since.ns)
        return;
    const ari_record transfer = {.kind = ARI_RECORD_TRANSFER,
                                 .begin_ns = since.ns,
                                 .end_ns = ari_now_ns(),
                                 .virtual_begin_ns = since.virtual_ns,
                                 .virtual_end_ns = l->virtual_ns,
                                 .peer = src_rank,
                                 .peer_track = -1,
                                 .bytes = bytes};
    ari_record_add(l->recording, &transfer, "");
}

/* Adds work to a lane's virtual clock. Small products take less than a nanosecond each, and there are many of them. */
static void work(ari_lane *l, double seconds, double flops)
{
    const double exact_ns = seconds * 1e9 + l->virtual_rest;
    const uint64_t begin = l->virtual_ns;
    l->virtual_ns = ari_virtual_after(begin, exact_ns);
    const double rest = exact_ns - (double)(l->virtual_ns - begin);
    l->virtual_rest = rest > -1.0 && rest < 1.0 ? rest : 0.0; /* otherwise the clock has reached its maximum */
    const uint64_t now_ns = l->recording ? ari_now_ns() : 0;
    const ari_record r = {.kind = ARI_RECORD_WORK,
                          .begin_ns = now_ns,
                          .end_ns = now_ns,
                          .virtual_begin_ns = begin,
                          .virtual_end_ns = l->virtual_ns,
                          .flops = flops};
    ari_record_add(l->recording, &r, "");
}

void ar_trace_work(double flops)
{
    ari_lane *l = ari_lane_self();
    if (ari_lane_is_virtual(l) && flops > 0)
        work(l, flops / l->instruments->rates.flops, flops);
}

void ari_work_product(const ari_gpu_product *p)
{
    ari_lane *l = ari_lane_self();
    const double flops = 2.0 * p->count * p->m * p->n * p->k;
    if (ari_lane_is_virtual(l) && flops > 0)
        work(l, ari_rates_product(&l->instruments->rates, p), flops);
}

void ari_work_scores(const ari_gpu_scores *s)
{
    ari_lane *l = ari_lane_self();
    if (ari_lane_is_virtual(l) && s->flops > 0)
        work(l, ari_rates_scores(&l->instruments->rates, s), s->flops);
}

void ari_work_moves(ari_gpu_moves kernel_kind, bool backward, size_t elements)
{
    ari_lane *l = ari_lane_self();
    const double seconds = ari_lane_is_virtual(l)
                               ? ari_rates_kernel(&l->instruments->rates, kernel_kind, backward, (double)elements)
                               : 0.0;
    if (seconds > 0.0)
        work(l, seconds, 0.0);
}

size_t ari_trace_lanes(const ar_trace *t)
{
    size_t n = 0;
    for (const ari_recording *r = t->recordings; r; r = r->next)
        n++;
    return n;
}

ari_trace_lane ari_trace_lane_at(const ar_trace *t, size_t i)
{
    const ari_recording *r = t->recordings;
    while (i-- > 0)
        r = r->next;
    return (ari_trace_lane){r->rank, r->track, r->name, r->records, r->count};
}

bool ari_trace_is_virtual(const ar_trace *t)
{
    return atomic_load(&t->is_virtual);
}

bool ari_trace_is_cut(const ar_trace *t)
{
    return atomic_load(&t->cut);
}
