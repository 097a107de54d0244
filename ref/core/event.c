/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "anyrank/queue.h"
#include "ref/core/queue_impl.h"
#include "ref/core/wait.h"

/* A point in a queue. Recording again moves it; queues that wait keep the point they were given. */
struct ar_event {
    ar_queue *q; /* kept; NULL: never recorded */
    uint64_t ticket;
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
    ari_queue_release(e->q);
    free(e);
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
    return AR_OK;
}

ar_status ar_event_sync(ar_event *e, uint64_t timeout_ns)
{
    if (!e)
        return ar_error_set(AR_ERR_ARG, "ar_event_sync: the event is missing");
    return e->q ? ari_queue_await(e->q, e->ticket, timeout_ns) : AR_OK;
}

ar_status ar_event_test(ar_event *e, bool *done)
{
    if (!e || !done)
        return ar_error_set(AR_ERR_ARG, "ar_event_test: %s is missing", e ? "the answer's place" : "the event");
    *done = true;
    return e->q ? ari_queue_poll(e->q, e->ticket, done) : AR_OK;
}

static ar_status wait_for_point(void *arg)
{
    ar_event *point = arg;
    const ar_status st = ari_queue_await(point->q, point->ticket, 0);
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
    ar_event *point = NULL;
    AR_TRY(ar_event_create(&point));
    point->q = ari_queue_keep(e->q);
    point->ticket = e->ticket;
    bool ran;
    const ar_status st = ari_queue_push(q, wait_for_point, drop_point, point, &ran);
    if (st != AR_OK && !ran)
        ar_event_destroy(point);
    return st;
}
