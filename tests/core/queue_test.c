/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>

#include "anyrank/queue.h"
#include "tests/support/test.h"

static const ar_queue_kind kinds[] = {AR_QUEUE_INLINE, AR_QUEUE_THREAD};
#define MS ((uint64_t)1000000)

typedef struct log_t {
    int seen[1000], n;
    pthread_t thread;
} log_t;

typedef struct entry {
    log_t *log;
    int number;
} entry;

static ar_status note(void *arg)
{
    entry *e = arg;
    e->log->seen[e->log->n++] = e->number;
    e->log->thread = pthread_self();
    return AR_OK;
}

static ar_status fail_with_7(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_DATA, "task says 7");
}

static ar_status fail_otherwise(void *arg)
{
    (void)arg;
    return ar_error_set(AR_ERR_IO, "a later failure");
}

/* A task that ends when the test says so: a lock held by the test. */
static ar_status pass_gate(void *arg)
{
    pthread_mutex_lock(arg);
    pthread_mutex_unlock(arg);
    return AR_OK;
}

static ar_queue *make_queue(ar_queue_kind kind)
{
    ar_queue *q = NULL;
    cr_assert_ok(ar_queue_create(&q, kind, "test"));
    return q;
}

static ar_event *make_event(void)
{
    ar_event *e = NULL;
    cr_assert_ok(ar_event_create(&e));
    return e;
}

Test(queue, tasks_run_in_order_in_the_thread_of_their_kind)
{
    for (int k = 0; k < 2; k++) {
        static log_t log;
        static entry entries[1000];
        log = (log_t){.n = 0};
        OWNED(ar_queue_destroy) ar_queue *q = make_queue(kinds[k]);
        for (int i = 0; i < 1000; i++) {
            entries[i] = (entry){&log, i};
            cr_assert_ok(ar_queue_host(q, note, &entries[i]));
            cr_assert(k == 1 || log.n == i + 1, "an inline queue runs at once");
        }
        cr_assert_ok(ar_queue_sync(q, 0));
        cr_assert_eq(log.n, 1000);
        for (int i = 0; i < 1000; i++)
            cr_assert_eq(log.seen[i], i);
        cr_assert_eq(pthread_equal(log.thread, pthread_self()) != 0, k == 0);
    }
}

Test(queue, destroy_runs_what_is_still_enqueued)
{
    static log_t log;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    ar_queue *q = make_queue(AR_QUEUE_THREAD);
    entry e = {&log, 5};
    pthread_mutex_lock(&gate);
    cr_assert_ok(ar_queue_host(q, pass_gate, &gate));
    cr_assert_ok(ar_queue_host(q, note, &e));
    pthread_mutex_unlock(&gate);
    ar_queue_destroy(q);
    cr_assert_eq(log.n, 1);
    ar_queue_destroy(NULL);
}

Test(queue, the_first_failure_poisons_and_every_wait_returns_it)
{
    for (int k = 0; k < 2; k++) {
        static log_t log;
        log = (log_t){.n = 0};
        entry e = {&log, 1};
        bool done = false;
        OWNED(ar_queue_destroy) ar_queue *q = make_queue(kinds[k]);
        ar_event *before = make_event(), *after = make_event();
        cr_assert_ok(ar_queue_host(q, note, &e));
        cr_assert_ok(ar_event_record(before, q));
        const ar_status first = ar_queue_host(q, fail_with_7, NULL);
        cr_assert_eq(first, k == 0 ? AR_ERR_DATA : AR_OK);
        /* The second failure and the note are dropped, whether they are enqueued before or after the first failed. */
        const ar_status second = ar_queue_host(q, fail_otherwise, NULL), third = ar_queue_host(q, note, &e);
        cr_assert(second == AR_ERR_DATA || (k == 1 && second == AR_OK));
        cr_assert(third == AR_ERR_DATA || (k == 1 && third == AR_OK));
        cr_assert_ok(ar_event_record(after, q));
        ar_error_clear();
        cr_assert_eq(ar_queue_sync(q, 0), AR_ERR_DATA);
        cr_assert_str_eq(ar_error_message(), "task says 7");
        ar_error_clear();
        cr_assert_eq(ar_event_sync(after, 0), AR_ERR_DATA);
        cr_assert_str_eq(ar_error_message(), "task says 7");
        cr_assert_eq(ar_event_test(after, &done), AR_ERR_DATA);
        cr_assert_eq(ar_event_sync(before, 0), AR_ERR_DATA);
        cr_assert_eq(ar_queue_host(q, note, &e), AR_ERR_DATA);
        cr_assert_eq(log.n, 1);
        ar_event_destroy(before);
        ar_event_destroy(after);
    }
}

Test(queue, a_wait_that_takes_too_long_says_so_and_the_work_goes_on)
{
    static log_t log;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    OWNED(ar_queue_destroy) ar_queue *q = make_queue(AR_QUEUE_THREAD);
    OWNED(ar_event_destroy) ar_event *e = make_event();
    entry n = {&log, 5};
    bool done = true;
    pthread_mutex_lock(&gate);
    cr_assert_ok(ar_queue_host(q, pass_gate, &gate));
    cr_assert_ok(ar_queue_host(q, note, &n));
    cr_assert_ok(ar_event_record(e, q));
    cr_assert_refused(ar_queue_sync(q, 20 * MS), AR_ERR_TIMEOUT, "'test': 2 tasks are not done after 0.020 s");
    cr_assert_eq(ar_event_sync(e, 20 * MS), AR_ERR_TIMEOUT);
    cr_assert_ok(ar_event_test(e, &done));
    cr_assert_eq(done, false);
    pthread_mutex_unlock(&gate);
    cr_assert_ok(ar_event_sync(e, 0));
    cr_assert_ok(ar_event_test(e, &done));
    cr_assert_eq(done, true);
    cr_assert_eq(log.n, 1);
}

static ar_status wait_for_own_queue(void *arg)
{
    return ar_queue_sync(arg, 0);
}

Test(queue, a_task_that_waits_for_its_own_queue_is_refused)
{
    OWNED(ar_queue_destroy) ar_queue *q = make_queue(AR_QUEUE_THREAD);
    cr_assert_ok(ar_queue_host(q, wait_for_own_queue, q));
    cr_assert_eq(ar_queue_sync(q, 0), AR_ERR_ARG);
}

Test(event, one_queue_waits_for_the_other_and_the_host_does_not)
{
    static log_t log;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    OWNED(ar_queue_destroy) ar_queue *first = make_queue(AR_QUEUE_THREAD), *second = make_queue(AR_QUEUE_THREAD);
    OWNED(ar_event_destroy) ar_event *e = make_event();
    entry a = {&log, 1}, b = {&log, 2};
    pthread_mutex_lock(&gate);
    cr_assert_ok(ar_queue_host(first, pass_gate, &gate));
    cr_assert_ok(ar_queue_host(first, note, &a));
    cr_assert_ok(ar_event_record(e, first));
    cr_assert_ok(ar_queue_wait(second, e));
    cr_assert_ok(ar_queue_host(second, note, &b));
    /* Recording elsewhere does not change what `second` was told to wait for. */
    cr_assert_ok(ar_event_record(e, second));
    pthread_mutex_unlock(&gate);
    cr_assert_ok(ar_event_sync(e, 0));
    cr_assert_eq(log.n, 2);
    cr_assert_eq(log.seen[0], 1);
    cr_assert_eq(log.seen[1], 2);
}

Test(event, a_queue_that_waits_for_a_failed_one_fails_with_its_error)
{
    for (int k = 0; k < 2; k++) {
        static log_t log;
        log = (log_t){.n = 0};
        entry n = {&log, 5};
        OWNED(ar_queue_destroy) ar_queue *first = make_queue(AR_QUEUE_THREAD), *second = make_queue(kinds[k]);
        OWNED(ar_event_destroy) ar_event *e = make_event();
        cr_assert_ok(ar_queue_host(first, fail_with_7, NULL));
        cr_assert_ok(ar_event_record(e, first));
        cr_assert_eq(ar_queue_wait(second, e), k == 0 ? AR_ERR_DATA : AR_OK);
        const ar_status enqueued = ar_queue_host(second, note, &n);
        cr_assert(enqueued == AR_ERR_DATA || (k == 1 && enqueued == AR_OK));
        cr_assert_eq(ar_queue_sync(second, 0), AR_ERR_DATA);
        cr_assert_str_eq(ar_error_message(), "task says 7");
        cr_assert_eq(log.n, 0);
    }
}

Test(event, never_recorded_it_is_done_and_it_outlives_its_queue)
{
    bool done = false;
    ar_event *e = make_event();
    ar_queue *q = make_queue(AR_QUEUE_THREAD), *other = make_queue(AR_QUEUE_THREAD);
    cr_assert_ok(ar_event_test(e, &done));
    cr_assert_eq(done, true);
    cr_assert_ok(ar_event_sync(e, 1));
    cr_assert_ok(ar_queue_wait(other, e));
    cr_assert_ok(ar_queue_host(q, fail_with_7, NULL));
    cr_assert_ok(ar_event_record(e, q));
    cr_assert_ok(ar_queue_wait(other, e));
    ar_queue_destroy(q);
    cr_assert_eq(ar_event_sync(e, 0), AR_ERR_DATA);
    cr_assert_eq(ar_queue_sync(other, 0), AR_ERR_DATA);
    ar_event_destroy(e);
    ar_event_destroy(NULL);
    ar_queue_destroy(other);
}

Test(event, missing_arguments_are_refused)
{
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    OWNED(ar_event_destroy) ar_event *e = make_event();
    bool done;
    cr_assert_eq(ar_queue_create(NULL, AR_QUEUE_INLINE, "x"), AR_ERR_ARG);
    cr_assert_eq(ar_queue_create(&q, (ar_queue_kind)9, "x"), AR_ERR_ARG);
    cr_assert_ok(ar_queue_create(&q, AR_QUEUE_INLINE, NULL));
    cr_assert_eq(ar_queue_host(NULL, note, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_queue_host(q, NULL, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_queue_sync(NULL, 0), AR_ERR_ARG);
    cr_assert_eq(ar_queue_wait(NULL, e), AR_ERR_ARG);
    cr_assert_eq(ar_queue_wait(q, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_event_create(NULL), AR_ERR_ARG);
    cr_assert_eq(ar_event_record(NULL, q), AR_ERR_ARG);
    cr_assert_eq(ar_event_record(e, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_event_sync(NULL, 0), AR_ERR_ARG);
    cr_assert_eq(ar_event_test(NULL, &done), AR_ERR_ARG);
    cr_assert_eq(ar_event_test(e, NULL), AR_ERR_ARG);
}
