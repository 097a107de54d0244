/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/record.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/lane.h"
#include "ref/core/size.h"

enum { SPANS = 64, CHUNK_BYTES = 1 << 16 };

/* Names, one after the other in chunks that do not move. */
typedef struct text_chunk {
    struct text_chunk *next;
    size_t used;
    char text[CHUNK_BYTES];
} text_chunk;

typedef struct open_span {
    const char *name;
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
    open_span open[SPANS]; /* deeper ones are not recorded */
    uint32_t depth;
};

struct ar_trace {
    pthread_mutex_t lock;
    ari_recording *first; /* guarded by `lock`; newest first */
    atomic_bool cut, is_virtual;
};

ar_status ar_trace_create(ar_trace **gives)
{
    *gives = NULL;
    ar_trace *t = calloc(1, sizeof *t);
    if (!t || pthread_mutex_init(&t->lock, NULL) != 0) {
        free(t);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a trace");
    }
    *gives = t;
    return AR_OK;
}

void ar_trace_destroy(ar_trace *t)
{
    if (!t)
        return;
    while (t->first) {
        ari_recording *r = t->first;
        t->first = r->next;
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

ar_status ari_recording_create(ari_recording **gives, ar_trace *t, const ari_lane *l)
{
    ari_recording *r = calloc(1, sizeof *r);
    *gives = r;
    if (!r)
        return ar_error_set(AR_ERR_MEMORY, "no memory to record rank %d", l->rank);
    r->trace = t;
    r->rank = l->rank;
    r->track = l->track;
    memcpy(r->name, l->name, sizeof r->name);
    if (l->with->flops > 0)
        atomic_store(&t->is_virtual, true);
    pthread_mutex_lock(&t->lock);
    r->next = t->first;
    t->first = r;
    pthread_mutex_unlock(&t->lock);
    return AR_OK;
}

/* NULL: no memory. */
static const char *keep_name(ari_recording *r, const char *name)
{
    if (!name[0])
        return "";
    const size_t bytes = strnlen(name, 255) + 1;
    if (!r->text || r->text->used + bytes > CHUNK_BYTES) {
        text_chunk *c = malloc(sizeof *c);
        if (!c)
            return NULL;
        c->next = r->text;
        c->used = 0;
        r->text = c;
    }
    char *to = r->text->text + r->text->used;
    memcpy(to, name, bytes - 1);
    to[bytes - 1] = '\0';
    r->text->used += bytes;
    return to;
}

void ari_record_add(ari_recording *to, const ari_record *r, const char *name)
{
    if (!to || atomic_load_explicit(&to->trace->cut, memory_order_relaxed))
        return;
    const char *kept = keep_name(to, name);
    if (!kept || ari_grow(&to->records, &to->capacity, to->count, sizeof *to->records, "a trace") != AR_OK) {
        atomic_store(&to->trace->cut, true);
        return;
    }
    ari_record *record = &to->records[to->count++];
    *record = *r;
    record->name = kept;
    record->depth = to->depth;
}

void ar_trace_begin(const char *name)
{
    const ari_lane *l = ari_lane_self();
    if (!l || !l->recording)
        return;
    ari_recording *r = l->recording;
    if (r->depth < SPANS) {
        const char *kept = keep_name(r, name ? name : "");
        r->open[r->depth] = (open_span){kept ? kept : "", ari_now_ns(), l->virtual_ns};
    }
    r->depth++;
}

void ar_trace_end(void)
{
    const ari_lane *l = ari_lane_self();
    if (!l || !l->recording || l->recording->depth == 0)
        return;
    ari_recording *r = l->recording;
    if (--r->depth >= SPANS)
        return;
    const open_span *o = &r->open[r->depth];
    const ari_record span = {.kind = ARI_RECORD_SPAN,
                             .begin_ns = o->begin_ns,
                             .end_ns = ari_now_ns(),
                             .virtual_begin_ns = o->virtual_begin_ns,
                             .virtual_end_ns = l->virtual_ns};
    ari_record_add(r, &span, o->name);
}

void ar_trace_work(double flops)
{
    ari_lane *l = ari_lane_self();
    if (!ari_lane_is_virtual(l) || !(flops > 0))
        return;
    const uint64_t begin = l->virtual_ns;
    l->virtual_ns += (uint64_t)(flops / l->with->flops * 1e9 + 0.5);
    const uint64_t now = l->recording ? ari_now_ns() : 0;
    const ari_record work = {.kind = ARI_RECORD_WORK,
                             .begin_ns = now,
                             .end_ns = now,
                             .virtual_begin_ns = begin,
                             .virtual_end_ns = l->virtual_ns,
                             .flops = flops};
    ari_record_add(l->recording, &work, "");
}

size_t ari_trace_lanes(const ar_trace *t)
{
    size_t n = 0;
    for (const ari_recording *r = t->first; r; r = r->next)
        n++;
    return n;
}

ari_trace_lane ari_trace_lane_at(const ar_trace *t, size_t i)
{
    const ari_recording *r = t->first;
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
