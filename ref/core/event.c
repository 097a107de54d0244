/* SPDX-License-Identifier: Apache-2.0 */

#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/core/wait.h"

/* A mark that an event and the queues that wait for it hold together: recording again must not move it under them. */
typedef struct shared_mark {
    atomic_int refs;
    ari_mark *mark;
} shared_mark;

/* A point in a queue. Recording again moves it; queues that wait keep the point they were given. */
struct ar_event {
    ar_queue *q; /* kept; NULL: never recorded */
    uint64_t ticket;
    shared_mark *end; /* q stands on a stream and is inline: its tasks have run, what they enqueued is done there */
};

static void release_mark(shared_mark *m)
{
    if (!m || atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    ari_mark_destroy(m->mark);
    free(m);
}

static shared_mark *keep_mark(shared_mark *m)
{
    if (m)
        atomic_fetch_add(&m->refs, 1);
    return m;
}

ar_status ar_event_create(ar_event **gives)
{
    if (!gives)
        return ar_error_set(AR_ERR_ARG, "ar_event_create: no place for the event");
    *gives = calloc(1, sizeof **gives);
    return *gives ? AR_OK : ar_error_set(AR_ERR_MEMORY, "ar_event_create: no memory for an event");
}

void ar_event_destroy(ar_event *e)
{
    if (!e)
        return;
    release_mark(e->end);
    ari_queue_release(e->q);
    free(e);
}

/* A mark that this event alone holds, on a stream of such a kind. */
static ar_status own_mark(ar_event *e, const ari_stream *s)
{
    shared_mark *m = e->end;
    if (m && atomic_load(&m->refs) == 1 && m->mark && m->mark->ops == s->ops)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&m, 1, "an event's mark"));
    atomic_init(&m->refs, 1);
    release_mark(e->end);
    e->end = m;
    return AR_OK;
}

static ar_status mark_stream(ar_event *e, ar_queue *q)
{
    ari_stream *s = ari_queue_is_inline(q) ? ari_queue_stream(q) : NULL;
    if (!s) {
        release_mark(e->end);
        e->end = NULL;
        return AR_OK;
    }
    AR_TRY(own_mark(e, s));
    return ari_queue_note(q, s->ops->mark(s, &e->end->mark));
}

ar_status ar_event_record(ar_event *e, ar_queue *q)
{
    if (!e || !q)
        return ar_error_set(AR_ERR_ARG, "ar_event_record: %s is missing", e ? "the queue" : "the event");
    ari_wait_yield();
    ar_queue *before = e->q;
    e->q = ari_queue_keep(q);
    e->ticket = ari_queue_ticket(q);
    ari_queue_release(before);
    return mark_stream(e, q);
}

/* Waits until q's tasks are done as far as the host sees; from a queue on a stream only its first error is left to
 * get. */
static ar_status await_tasks(const ar_event *e, uint64_t timeout_ns)
{
    bool done;
    return e->end ? ari_queue_poll(e->q, e->ticket, &done) : ari_queue_await(e->q, e->ticket, timeout_ns);
}

static ar_status await_stream(const ar_event *e, uint64_t timeout_ns)
{
    const ari_mark *m = e->end ? e->end->mark : NULL;
    return m ? ari_queue_note(e->q, m->ops->await(m, timeout_ns)) : AR_OK;
}

ar_status ar_event_sync(ar_event *e, uint64_t timeout_ns)
{
    if (!e)
        return ar_error_set(AR_ERR_ARG, "ar_event_sync: the event is missing");
    AR_TRY(await_stream(e, timeout_ns));
    return e->q ? await_tasks(e, timeout_ns) : AR_OK;
}

ar_status ar_event_test(ar_event *e, bool *done)
{
    if (!e || !done)
        return ar_error_set(AR_ERR_ARG, "ar_event_test: %s is missing", e ? "the answer's place" : "the event");
    *done = true;
    if (!e->q)
        return AR_OK;
    AR_TRY(ari_queue_poll(e->q, e->ticket, done));
    const ari_mark *m = e->end ? e->end->mark : NULL;
    return *done && m ? ari_queue_note(e->q, m->ops->poll(m, done)) : AR_OK;
}

/* A wait of a queue for an event, as a task. */
typedef struct waiting {
    ar_event point;
    ari_stream *on; /* the waiting queue's; NULL: it has none */
} waiting;

static void destroy_waiting(waiting *w)
{
    release_mark(w->point.end);
    ari_queue_release(w->point.q);
    free(w);
}

/* A stream of the same kind waits by itself, any other queue by its host. */
static ar_status wait_for_point(void *arg)
{
    waiting *w = arg;
    const ari_mark *m = w->point.end ? w->point.end->mark : NULL;
    ar_status st = AR_OK;
    if (m && w->on && w->on->ops == m->ops)
        st = w->on->ops->wait(w->on, m);
    else
        st = await_stream(&w->point, 0);
    if (st == AR_OK)
        st = await_tasks(&w->point, 0);
    destroy_waiting(w);
    return st;
}

static void drop_point(void *arg, ar_status st, const char *why)
{
    (void)st;
    (void)why;
    destroy_waiting(arg);
}

ar_status ar_queue_wait(ar_queue *q, ar_event *e)
{
    if (!q || !e)
        return ar_error_set(AR_ERR_ARG, "ar_queue_wait: %s is missing", q ? "the event" : "the queue");
    if (!e->q || e->q == q)
        return AR_OK; /* a queue is in order: its own past is done anyway */
    waiting *w = NULL;
    AR_TRY(ARI_ALLOC(&w, 1, "a wait of a queue"));
    *w = (waiting){{ari_queue_keep(e->q), e->ticket, keep_mark(e->end)}, ari_queue_stream(q)};
    bool ran;
    const ar_status st = ari_queue_push(q, wait_for_point, drop_point, w, &ran);
    if (st != AR_OK && !ran)
        destroy_waiting(w);
    return st;
}
