/* SPDX-License-Identifier: Apache-2.0 */
/* Queues that stand on a device's stream, whose work is done later than the host enqueues it. */
#include <stdatomic.h>

#include "ref/core/queue_private.h"
#include "tests/core/fake_stream.h"
#include "tests/support/test.h"

#define MS ((uint64_t)1000000)

/* What was done, in order. Written by one thread at a time where the test is right. */
typedef struct log_t {
    atomic_int n;
    int seen[16];
} log_t;

typedef struct entry {
    log_t *log;
    int number;
} entry;

static void write_down(const entry *e)
{
    const int at = atomic_fetch_add(&e->log->n, 1);
    e->log->seen[at] = e->number;
}

static bool note(void *arg)
{
    write_down(arg);
    return true;
}

static ar_status note_on_host(void *arg)
{
    write_down(arg);
    return AR_OK;
}

static bool fail(void *arg)
{
    (void)arg;
    return false;
}

/* Work that goes on when the test says so. */
static bool pass_gate(void *arg)
{
    const atomic_bool *open = arg;
    while (!atomic_load(open))
        nanosleep(&(struct timespec){0, 100000}, NULL);
    return true;
}

static ar_status pass_gate_on_host(void *arg)
{
    pass_gate(arg);
    return AR_OK;
}

static ar_status fail_on_host(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_DATA, "a task failed");
}

static ar_event *recorded(ar_queue *q)
{
    ar_event *e = NULL;
    cr_assert_ok(ar_event_create(&e));
    cr_assert_ok(ar_event_record(e, q));
    return e;
}

static bool is_done(ar_event *e)
{
    bool done = false;
    cr_assert_ok(ar_event_test(e, &done));
    return done;
}

static void expect_log(const log_t *log, const int *want, int n)
{
    cr_assert_eq(atomic_load(&log->n), n);
    for (int i = 0; i < n; i++)
        cr_assert_eq(log->seen[i], want[i]);
}

Test(stream, event_is_done_when_the_stream_has_reached_it)
{
    OWNED(ar_queue_destroy) ar_queue *q = fake_queue(AR_QUEUE_INLINE, "main");
    atomic_bool open = false;
    fake_enqueue(ari_queue_stream(q), pass_gate, &open);
    OWNED(ar_event_destroy) ar_event *e = recorded(q);
    cr_assert(!is_done(e));
    cr_assert_eq(ar_event_sync(e, 5 * MS), AR_ERR_TIMEOUT);
    cr_assert_eq(ar_queue_sync(q, 5 * MS), AR_ERR_TIMEOUT);
    atomic_store(&open, true);
    cr_assert_ok(ar_event_sync(e, 0)); /* a wait that was too long has poisoned nothing */
    cr_assert(is_done(e));
    cr_assert_ok(ar_queue_sync(q, 0));
}

Test(stream, host_task_comes_after_what_was_enqueued)
{
    OWNED(ar_queue_destroy) ar_queue *q = fake_queue(AR_QUEUE_INLINE, "main");
    log_t log = {0};
    entry first = {&log, 1}, second = {&log, 2};
    atomic_bool open = true;
    fake_enqueue(ari_queue_stream(q), pass_gate, &open);
    fake_enqueue(ari_queue_stream(q), note, &first);
    cr_assert_ok(ar_queue_host(q, note_on_host, &second));
    expect_log(&log, (int[]){1, 2}, 2);
}

Test(stream, queue_waits_for_another_streams_event_and_the_host_does_not)
{
    OWNED(ar_queue_destroy) ar_queue *a = fake_queue(AR_QUEUE_INLINE, "a"), *b = fake_queue(AR_QUEUE_INLINE, "b");
    log_t log = {0};
    entry first = {&log, 1}, second = {&log, 2};
    atomic_bool open = false;
    fake_enqueue(ari_queue_stream(a), pass_gate, &open);
    fake_enqueue(ari_queue_stream(a), note, &first);
    ar_event *e = recorded(a);
    cr_assert_ok(ar_queue_wait(b, e)); /* returns, though the gate is shut */
    fake_enqueue(ari_queue_stream(b), note, &second);
    ar_event_destroy(e); /* b goes on waiting */
    atomic_store(&open, true);
    cr_assert_ok(ar_queue_sync(b, 0));
    expect_log(&log, (int[]){1, 2}, 2);
}

Test(stream, queue_without_a_stream_waits_for_an_event_of_one)
{
    OWNED(ar_queue_destroy) ar_queue *a = fake_queue(AR_QUEUE_INLINE, "a"), *thread = NULL;
    log_t log = {0};
    entry first = {&log, 1}, second = {&log, 2};
    atomic_bool open = false;
    cr_assert_ok(ar_queue_create(&thread, AR_QUEUE_THREAD, "thread"));
    fake_enqueue(ari_queue_stream(a), pass_gate, &open);
    fake_enqueue(ari_queue_stream(a), note, &first);
    OWNED(ar_event_destroy) ar_event *e = recorded(a);
    cr_assert_ok(ar_queue_wait(thread, e));
    cr_assert_ok(ar_queue_host(thread, note_on_host, &second));
    atomic_store(&open, true);
    cr_assert_ok(ar_queue_sync(thread, 0));
    expect_log(&log, (int[]){1, 2}, 2);
}

typedef struct later {
    entry what;
    atomic_bool *open;
} later;

/* A chain that enqueues and does not wait. */
static ar_status enqueue_later(void *arg, ar_queue *on)
{
    later *l = arg;
    if (l->open)
        fake_enqueue(ari_queue_stream(on), pass_gate, l->open);
    fake_enqueue(ari_queue_stream(on), note, &l->what);
    return AR_OK;
}

Test(stream, thread_waits_in_its_turn_and_not_with_earlier_tasks)
{
    OWNED(ar_queue_destroy)
    ar_queue *q = fake_queue(AR_QUEUE_INLINE, "main"), *comm = fake_queue(AR_QUEUE_THREAD, "comm");
    log_t log = {0};
    later early = {.what = {&log, 1}}, late = {.what = {&log, 3}};
    entry middle = {&log, 2};
    atomic_bool host_gate = false, gate = false, later_gate = false;
    cr_assert_ok(ar_queue_host(comm, pass_gate_on_host, &host_gate));
    cr_assert_ok(ari_queue_chain(comm, enqueue_later, &early));
    OWNED(ar_event_destroy) ar_event *early_done = recorded(comm);
    fake_enqueue(ari_queue_stream(q), pass_gate, &gate);
    fake_enqueue(ari_queue_stream(q), note, &middle);
    OWNED(ar_event_destroy) ar_event *e = recorded(q);
    cr_assert_ok(ar_queue_wait(comm, e));
    cr_assert_ok(ari_queue_chain(comm, enqueue_later, &late));
    fake_enqueue(ari_queue_stream(q), pass_gate, &later_gate);
    cr_assert_ok(ar_event_record(e, q)); /* comm keeps the point that it was given */
    atomic_store(&host_gate, true);
    cr_assert_ok(ar_event_sync(early_done, 600000 * MS));
    atomic_store(&gate, true);
    cr_assert_ok(ar_queue_sync(comm, 600000 * MS));
    expect_log(&log, (int[]){1, 2, 3}, 3);
    atomic_store(&later_gate, true);
}

Test(stream, threads_task_ends_when_its_stream_has_done_it)
{
    OWNED(ar_queue_destroy)
    ar_queue *q = fake_queue(AR_QUEUE_INLINE, "main"), *comm = fake_queue(AR_QUEUE_THREAD, "comm");
    log_t log = {0};
    atomic_bool open = false;
    later l = {{&log, 1}, &open};
    entry after = {&log, 2};
    cr_assert_ok(ari_queue_chain(comm, enqueue_later, &l));
    OWNED(ar_event_destroy) ar_event *e = recorded(comm);
    cr_assert(!is_done(e));
    cr_assert_eq(ar_event_sync(e, 5 * MS), AR_ERR_TIMEOUT);
    atomic_store(&open, true);
    cr_assert_ok(ar_queue_wait(q, e));
    fake_enqueue(ari_queue_stream(q), note, &after);
    cr_assert_ok(ar_queue_sync(q, 0));
    expect_log(&log, (int[]){1, 2}, 2);
}

Test(stream, failing_stream_poisons_its_queue_and_those_that_wait_for_it)
{
    OWNED(ar_queue_destroy) ar_queue *a = fake_queue(AR_QUEUE_INLINE, "a"), *b = fake_queue(AR_QUEUE_INLINE, "b");
    log_t log = {0};
    entry never = {&log, 1};
    fake_enqueue(ari_queue_stream(a), fail, NULL);
    OWNED(ar_event_destroy) ar_event *e = recorded(a);
    cr_assert_eq(ar_queue_sync(a, 0), AR_ERR_DEVICE);
    cr_assert_str_eq(ar_error_message(), "the stream failed");
    cr_assert_eq(ar_queue_host(a, note_on_host, &never), AR_ERR_DEVICE);
    cr_assert_eq(ar_queue_wait(b, e), AR_ERR_DEVICE);
    cr_assert_eq(ar_queue_host(b, note_on_host, &never), AR_ERR_DEVICE);
    expect_log(&log, NULL, 0);
}

Test(stream, event_tells_of_a_failing_stream)
{
    ar_queue *q = fake_queue(AR_QUEUE_INLINE, "main");
    bool done;
    fake_enqueue(ari_queue_stream(q), fail, NULL);
    OWNED(ar_event_destroy) ar_event *e = recorded(q);
    cr_assert_eq(ar_event_sync(e, 0), AR_ERR_DEVICE);
    cr_assert_eq(ar_event_test(e, &done), AR_ERR_DEVICE);
    ar_queue_destroy(q);
    cr_assert_eq(ar_event_sync(e, 0), AR_ERR_DEVICE); /* it outlives its queue */
}

static ar_status enqueue_and_fail(void *arg, ar_queue *on)
{
    const ar_status st = enqueue_later(arg, on);
    return st == AR_OK ? fail_on_host(NULL) : st;
}

Test(stream, failing_task_of_a_thread_ends_when_its_stream_is_done)
{
    OWNED(ar_queue_destroy) ar_queue *comm = fake_queue(AR_QUEUE_THREAD, "comm");
    log_t log = {0};
    atomic_bool open = false;
    later l = {{&log, 1}, &open};
    cr_assert_ok(ari_queue_chain(comm, enqueue_and_fail, &l));
    cr_assert_eq(ar_queue_sync(comm, 5 * MS), AR_ERR_TIMEOUT);
    atomic_store(&open, true);
    cr_assert_eq(ar_queue_sync(comm, 0), AR_ERR_DATA);
    expect_log(&log, (int[]){1}, 1);
}

Test(stream, destroying_a_queue_finishes_its_stream)
{
    for (int kind = AR_QUEUE_INLINE; kind <= AR_QUEUE_THREAD; kind++) {
        ar_queue *q = fake_queue((ar_queue_kind)kind, "main");
        log_t log = {0};
        atomic_bool open = true;
        later l = {{&log, 1}, &open};
        cr_assert_ok(ari_queue_chain(q, enqueue_later, &l));
        OWNED(ar_event_destroy) ar_event *e = recorded(q);
        ar_queue_destroy(q);
        expect_log(&log, (int[]){1}, 1);
        cr_assert_ok(ar_event_sync(e, 0));
    }
}
