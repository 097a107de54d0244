/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "anyrank/queue.h"
#include "ref/core/queue_impl.h"
#include "ref/core/stream.h"
#include "ref/core/wait.h"

/* A point in a queue. Recording again moves it; queues that wait keep the point they were given. */
struct ar_event {
    ar_queue *q; /* kept; NULL: never recorded */
    uint64_t ticket;
    bool on_stream; /* q's tasks have run, and what they enqueued is done at `mark` */
    ari_mark *mark; /* NULL: none, or of a queue that waits who has waited for it already */
};

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
    ari_mark_destroy(e->mark);
    ari_queue_release(e->q);
    free(e);
}

/* A queue that stands on a stream has run its tasks; what they enqueued there is done later. */
static ar_status mark_stream(ar_event *e, ar_queue *q)
{
    ari_stream *s = ari_queue_is_inline(q) ? ari_queue_stream(q) : NULL;
    if (e->mark && (!s || e->mark->ops != s->ops)) {
        ari_mark_destroy(e->mark);
        e->mark = NULL;
    }
    e->on_stream = s != NULL;
    return s ? ari_queue_note(q, s->ops->mark(s, &e->mark)) : AR_OK;
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

/* Of a queue that stands on a stream only its first error is left to ask for: the mark says the rest. */
static ar_status await_tasks(ar_event *e, uint64_t timeout_ns)
{
    bool done;
    return e->on_stream ? ari_queue_poll(e->q, e->ticket, &done) : ari_queue_await(e->q, e->ticket, timeout_ns);
}

ar_status ar_event_sync(ar_event *e, uint64_t timeout_ns)
{
    if (!e)
        return ar_error_set(AR_ERR_ARG, "ar_event_sync: the event is missing");
    if (e->mark)
        AR_TRY(ari_queue_note(e->q, e->mark->ops->await(e->mark, timeout_ns)));
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
    return *done && e->mark ? ari_queue_note(e->q, e->mark->ops->poll(e->mark, done)) : AR_OK;
}

static ar_status wait_for_point(void *arg)
{
    ar_event *point = arg;
    const ar_status st = await_tasks(point, 0);
    ar_event_destroy(point);
    return st;
}

static void drop_point(void *arg, ar_status st, const char *why)
{
    (void)st;
    (void)why;
    ar_event_destroy(arg);
}

ar_status ar_queue_wait(ar_queue *q, ar_event *e)
{
    if (!q || !e)
        return ar_error_set(AR_ERR_ARG, "ar_queue_wait: %s is missing", q ? "the event" : "the queue");
    if (!e->q || e->q == q)
        return AR_OK; /* a queue is in order: its own past is done anyway */
    /* What q enqueues earlier than its turn to wait, a thread's tasks, waits too: more than it must, and no harm. */
    ari_stream *s = ari_queue_stream(q);
    if (e->mark && s && s->ops == e->mark->ops)
        AR_TRY(ari_queue_note(q, s->ops->wait(s, e->mark)));
    else if (e->mark)
        AR_TRY(ari_queue_note(e->q, e->mark->ops->await(e->mark, 0)));
    ar_event *point = NULL;
    AR_TRY(ar_event_create(&point));
    point->q = ari_queue_keep(e->q);
    point->ticket = e->ticket;
    point->on_stream = e->on_stream;
    bool ran;
    const ar_status st = ari_queue_push(q, wait_for_point, drop_point, point, &ran);
    if (st != AR_OK && !ran)
        ar_event_destroy(point);
    return st;
}
