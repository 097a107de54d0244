/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/queue.h"

#include <stdio.h>
#include <string.h>

#include "ref/core/lane.h"
#include "ref/core/os/threads.h"
#include "ref/core/queue_impl.h"
#include "ref/core/queue_private.h"
#include "ref/core/size.h"
#include "ref/core/status_private.h"
#include "ref/core/wait.h"

/* Time after which an idle worker sleeps. It is short because the ranks compute meanwhile and need the cores. Measured:
 * a queue whose tasks arrive at shorter intervals needs no system call to sleep or wake. */
#define IDLE_AWAKE_NS ((uint64_t)50000)

typedef struct task {
    struct task *next;
    ar_status (*fn)(void *);
    ari_drop_fn drop; /* NULL: nothing to release */
    void *arg;
    uint64_t virtual_ns; /* time of enqueuing, on the enqueuing lane's clock */
} task;

struct ar_queue {
    ar_queue_kind kind;
    char name[32];
    atomic_int refs; /* references: the owner, events recorded on the queue, queues that wait for it */
    /* Words to wait for, written under `lock`. */
    _Atomic uint64_t posted;    /* changes with every task enqueued, and at the end */
    _Atomic uint64_t finished;  /* tasks ended since creation */
    ari_sleepers work, waiters; /* waiters for `posted` (the worker) and for `finished` */
    pthread_mutex_t lock;
    /* The following fields are guarded by `lock`. */
    task *head, **tail;
    uint64_t pushed; /* tasks enqueued since creation */
    bool stop;
    ar_status st;           /* the first error, which is never replaced */
    char *error;            /* its message; NULL if memory was short */
    ari_failure *failure;   /* failure of an outside source, referenced; NULL: none is observed */
    uint64_t *virtual_ends; /* [finished] end time of each task on the lane's virtual clock; empty without a virtual
                               clock */
    size_t virtual_capacity;
    /* Not guarded: set at creation. */
    pthread_t thread;
    ari_lane *lane;     /* the thread's lane if a simulated rank created the queue */
    ar_queue *chain;    /* for a thread: the inline queue on which chains run */
    ari_stream *stream; /* stream on which tasks enqueue further work; NULL: tasks do all work themselves */
    bool owns_stream;   /* false for a chain's queue, which uses its thread's stream */
};

/* The first error is kept, since later errors are consequences. */
static void poison(ar_queue *q, ar_status st, const char *message)
{
    pthread_mutex_lock(&q->lock);
    if (q->st == AR_OK) {
        q->st = st;
        q->error = strdup(message[0] ? message : ari_status_text(st));
    }
    pthread_mutex_unlock(&q->lock);
}

/* Repeats the first error in the calling thread. `lock` held: `error` is not written again while st != AR_OK. */
static ar_status repeat_error(ar_queue *q)
{
    const char *message = NULL;
    if (q->st == AR_OK && q->failure && (q->st = ari_failure_get(q->failure, &message)) != AR_OK)
        q->error = strdup(message);
    return q->st == AR_OK ? AR_OK : ar_error_set(q->st, "%s", q->error ? q->error : ari_status_text(q->st));
}

static ar_status first_error(ar_queue *q)
{
    pthread_mutex_lock(&q->lock);
    const ar_status st = repeat_error(q);
    pthread_mutex_unlock(&q->lock);
    return st;
}

static void run_task(ar_queue *q, const task *t)
{
    pthread_mutex_lock(&q->lock);
    const ar_status before = q->st;
    pthread_mutex_unlock(&q->lock);
    if (before != AR_OK) {
        if (t->drop)
            t->drop(t->arg, before, q->error ? q->error : ari_status_text(before));
        return;
    }
    ar_error_clear();
    const ar_status st = t->fn(t->arg);
    if (st != AR_OK)
        poison(q, st, ar_error_message());
    if (q->stream) { /* a task has ended when everything that it enqueued is done */
        (void)ari_queue_note(q, ari_stream_sync(q->stream, 0));
        (void)ari_queue_note(q, first_error(q->chain)); /* the work that it enqueued may have failed */
    }
}

static void count_ended(ar_queue *q)
{
    pthread_mutex_lock(&q->lock);
    const size_t n = (size_t)atomic_load(&q->finished);
    if (ari_lane_is_virtual(q->lane)) {
        if (ARI_GROW(&q->virtual_ends, &q->virtual_capacity, n, "virtual times") == AR_OK)
            q->virtual_ends[n] = q->lane->virtual_ns;
        else if (q->st == AR_OK)
            q->st = AR_ERR_MEMORY;
    }
    atomic_store(&q->finished, n + 1);
    pthread_mutex_unlock(&q->lock);
    ari_wake(&q->waiters);
}

/* Returns the next task; NULL: the queue was stopped, and all tasks are done. */
static task *next_task(ar_queue *q)
{
    ari_wait w = {.sleepers = &q->work, .awake_ns = IDLE_AWAKE_NS};
    for (;;) {
        const uint64_t observed = atomic_load(&q->posted);
        pthread_mutex_lock(&q->lock);
        task *t = q->head;
        const bool stop = q->stop;
        if (t) {
            q->head = t->next;
            if (!q->head)
                q->tail = &q->head;
        }
        pthread_mutex_unlock(&q->lock);
        if (t || stop)
            return t;
        ari_wait_turn(&w, &q->posted, observed, 0);
    }
}

static void *worker(void *arg)
{
    ar_queue *q = arg;
    ari_lane_enter(q->lane);
    for (task *t = next_task(q); t; t = next_task(q)) {
        ari_lane_reach(q->lane, t->virtual_ns);
        run_task(q, t);
        free(t);
        count_ended(q);
        ari_wait_yield();
    }
    ari_lane_leave(q->lane);
    return NULL;
}

static int init_locks(ar_queue *q)
{
    int rc = pthread_mutex_init(&q->lock, NULL);
    if (rc != 0)
        return rc;
    rc = ari_sleepers_init(&q->work);
    if (rc != 0)
        goto no_work;
    rc = ari_sleepers_init(&q->waiters);
    if (rc == 0)
        return 0;
    ari_sleepers_fini(&q->work);
no_work:
    pthread_mutex_destroy(&q->lock);
    return rc;
}

static void queue_release(ar_queue *q);

static ar_status create_queue(ar_queue **out, ar_queue_kind kind, const char *name, ari_stream *stream, bool owns)
{
    if (!out)
        return ar_error_set(AR_ERR_ARG, "ar_queue_create: no place for the queue");
    *out = NULL;
    if (kind != AR_QUEUE_INLINE && kind != AR_QUEUE_THREAD)
        return ar_error_set(AR_ERR_ARG, "ar_queue_create: unknown kind %d", (int)kind);
    ar_queue *q = calloc(1, sizeof *q);
    if (!q)
        return ar_error_set(AR_ERR_MEMORY, "ar_queue_create: no memory for queue '%s'", name ? name : "");
    q->kind = kind;
    snprintf(q->name, sizeof q->name, "%s", name ? name : "");
    atomic_init(&q->refs, 1);
    q->tail = &q->head;
    q->stream = stream;
    int rc = init_locks(q);
    if (rc != 0) {
        free(q);
        return ar_error_set(AR_ERR_MEMORY, "ar_queue_create: no lock for queue '%s': %s", name ? name : "",
                            strerror(rc));
    }
    /* before the lane is created: this may pass the turn on, which a lane must not receive before it has a thread */
    if (kind == AR_QUEUE_THREAD) {
        const ar_status st = create_queue(&q->chain, AR_QUEUE_INLINE, q->name, stream, false);
        if (st != AR_OK) {
            queue_release(q);
            return st;
        }
    }
    ari_lane *self = ari_lane_self();
    if (kind == AR_QUEUE_THREAD && self) {
        const ar_status st = ari_lane_create(&q->lane, self, self->instruments, self->rank, q->name);
        if (st != AR_OK) {
            queue_release(q);
            return st;
        }
    }
    rc = kind == AR_QUEUE_THREAD ? ari_thread_create(&q->thread, worker, q) : 0;
    if (rc != 0) {
        queue_release(q);
        return ar_error_set(AR_ERR_MEMORY, "ar_queue_create: no thread for queue '%s': %s", name ? name : "",
                            strerror(rc));
    }
    q->owns_stream = owns; /* set last: after an earlier failure the stream belongs to the caller */
    *out = q;
    ari_wait_yield();
    return AR_OK;
}

ar_status ar_queue_create(ar_queue **out, ar_queue_kind kind, const char *name)
{
    return create_queue(out, kind, name, NULL, false);
}

ar_status ari_queue_create_on(ar_queue **out, ar_queue_kind kind, const char *name, ari_stream *s)
{
    return create_queue(out, kind, name, s, true);
}

ari_stream *ari_queue_stream(const ar_queue *q)
{
    return q->stream;
}

void ari_queue_heed(ar_queue *q, ari_failure *f)
{
    pthread_mutex_lock(&q->lock);
    if (q->failure != f) {
        ari_failure_release(q->failure);
        q->failure = ari_failure_keep(f);
    }
    pthread_mutex_unlock(&q->lock);
}

static ar_queue *queue_keep(ar_queue *q)
{
    atomic_fetch_add(&q->refs, 1);
    return q;
}

static void queue_release(ar_queue *q)
{
    if (!q || atomic_fetch_sub(&q->refs, 1) != 1)
        return;
    ari_sleepers_fini(&q->waiters);
    ari_sleepers_fini(&q->work);
    pthread_mutex_destroy(&q->lock);
    ari_lane_destroy(q->lane);
    queue_release(q->chain);
    ari_failure_release(q->failure);
    free(q->virtual_ends);
    free(q->error);
    free(q);
}

void ar_queue_destroy(ar_queue *q)
{
    if (!q)
        return;
    if (q->kind == AR_QUEUE_THREAD) {
        ari_wait_yield();
        pthread_mutex_lock(&q->lock);
        q->stop = true;
        atomic_fetch_add(&q->posted, 1);
        pthread_mutex_unlock(&q->lock);
        ari_wake(&q->work);
        const ari_moment since = ari_record_moment();
        ari_lane_join(q->lane);
        pthread_join(q->thread, NULL);
        if (q->lane)
            ari_lane_reach(ari_lane_self(), q->lane->virtual_ns);
        ari_record_wait(since, q->lane);
    } else if (q->owns_stream) {
        (void)ari_queue_note(q, ari_stream_sync(q->stream, 0)); /* events that outlive the queue report its error */
    }
    if (q->owns_stream) /* now, and not with the last event, by when the device may be gone */
        q->stream->ops->destroy(q->stream);
    queue_release(q);
}

const char *ari_queue_name(const ar_queue *q)
{
    return q->name;
}

bool ari_queue_is_inline(const ar_queue *q)
{
    return q->kind == AR_QUEUE_INLINE;
}

ar_queue *ari_queue_inner(ar_queue *q)
{
    return q->kind == AR_QUEUE_INLINE ? q : q->chain;
}

/* Begins an inline task: the calling thread is the queue. Allocates nothing, so that a small collective costs no more
 * than its data. */
ar_status ari_queue_begin(ar_queue *q)
{
    ari_wait_yield();
    return first_error(q);
}

ar_status ari_queue_end(ar_queue *q, ar_status st)
{
    if (st != AR_OK)
        poison(q, st, ar_error_message());
    return st;
}

ar_status ari_queue_push(ar_queue *q, ar_status (*fn)(void *), ari_drop_fn drop, void *arg, bool *ran)
{
    *ran = false;
    if (q->kind == AR_QUEUE_INLINE) {
        AR_TRY(ari_queue_begin(q));
        *ran = true;
        return ari_queue_end(q, fn(arg));
    }
    ari_wait_yield();
    ARI_OWNED task *t = malloc(sizeof *t);
    if (!t)
        return ar_error_set(AR_ERR_MEMORY, "queue '%s': no memory for a task", q->name);
    const ari_lane *self = ari_lane_self();
    *t = (task){.fn = fn, .drop = drop, .arg = arg, .virtual_ns = self ? self->virtual_ns : 0};
    pthread_mutex_lock(&q->lock);
    const ar_status st = repeat_error(q);
    if (st == AR_OK) {
        *q->tail = t;
        q->tail = &t->next;
        q->pushed++;
        atomic_fetch_add(&q->posted, 1);
        t = NULL;
    }
    pthread_mutex_unlock(&q->lock);
    ari_wake(&q->work);
    ari_wait_yield();
    return st;
}

ar_status ar_queue_host(ar_queue *q, ar_status (*fn)(void *), void *arg)
{
    if (!q || !fn)
        return ar_error_set(AR_ERR_ARG, "ar_queue_host: %s is missing", q ? "the function" : "the queue");
    bool ran;
    if (q->stream && q->kind == AR_QUEUE_INLINE) /* its tasks have run, but their work may not be done */
        AR_TRY(ari_queue_await(q, ari_queue_ticket(q), 0));
    return ari_queue_push(q, fn, NULL, arg, &ran);
}

typedef struct chain {
    ar_status (*fn)(void *arg, ar_queue *queue);
    void *arg;
    ar_queue *queue;
} chain;

static ar_status run_chain(void *arg)
{
    const chain c = *(chain *)arg;
    free(arg);
    return c.fn(c.arg, c.queue);
}

static void drop_chain(void *arg, ar_status st, const char *why)
{
    (void)st, (void)why;
    free(arg);
}

ar_status ari_queue_chain(ar_queue *q, ar_status (*fn)(void *arg, ar_queue *queue), void *arg)
{
    if (!q || !fn)
        return ar_error_set(AR_ERR_ARG, "ari_queue_chain: %s is missing", q ? "the function" : "the queue");
    if (q->kind == AR_QUEUE_INLINE) {
        AR_TRY(first_error(q));
        return fn(arg, q);
    }
    chain *c = NULL;
    bool ran;
    AR_TRY(ARI_ALLOC(&c, 1, "a chain of a queue"));
    *c = (chain){fn, arg, q->chain};
    const ar_status st = ari_queue_push(q, run_chain, drop_chain, c, &ran);
    if (st != AR_OK)
        free(c);
    return st;
}

uint64_t ari_queue_ticket(ar_queue *q)
{
    pthread_mutex_lock(&q->lock);
    const uint64_t ticket = q->pushed;
    pthread_mutex_unlock(&q->lock);
    return ticket;
}

/* Advances the calling lane's virtual clock to the end of a ticket; `lock` is held. The lane has waited for the ticket,
 * so its clock must not be earlier. */
static void reach_ticket(const ar_queue *q, uint64_t ticket)
{
    if (ticket > 0 && ticket <= q->virtual_capacity) /* otherwise memory for it ran out, which poisoned the queue */
        ari_lane_reach(ari_lane_self(), q->virtual_ends[ticket - 1]);
}

static ar_status wait_for_ticket(ar_queue *q, uint64_t ticket, uint64_t timeout_ns)
{
    ari_wait w = {.sleepers = &q->waiters, .timeout_ns = timeout_ns, .gives_up = timeout_ns == 0};
    w.outside = !q->lane || !q->lane->turn;
    for (;;) {
        const uint64_t finished = atomic_load(&q->finished);
        if (finished >= ticket)
            return AR_OK;
        const unsigned long long remaining = ticket - finished;
        if (pthread_equal(q->thread, pthread_self()))
            return ar_error_set(AR_ERR_ARG, "queue '%s': one of its own tasks waits for it", q->name);
        if (ari_wait_is_over(&w))
            return ar_error_set(AR_ERR_TIMEOUT, "queue '%s': %llu tasks are not done after %.3f s", q->name, remaining,
                                (double)timeout_ns * 1e-9);
        if (w.stuck)
            return ar_error_set(AR_ERR_TIMEOUT,
                                "queue '%s': %llu tasks are not done, and never will be: no rank can go on", q->name,
                                remaining);
        ari_wait_turn(&w, &q->finished, finished, 0);
    }
}

ar_status ari_queue_note(ar_queue *q, ar_status st)
{
    if (st != AR_OK && st != AR_ERR_TIMEOUT)
        poison(q, st, ar_error_message());
    return st;
}

ar_status ari_queue_await(ar_queue *q, uint64_t ticket, uint64_t timeout_ns)
{
    ari_wait_yield();
    const ari_moment since = ari_record_moment();
    AR_TRY(wait_for_ticket(q, ticket, timeout_ns));
    if (q->stream && q->kind == AR_QUEUE_INLINE)
        AR_TRY(ari_queue_note(q, ari_stream_sync(q->stream, timeout_ns)));
    pthread_mutex_lock(&q->lock);
    reach_ticket(q, ticket);
    const ar_status st = repeat_error(q);
    pthread_mutex_unlock(&q->lock);
    ari_record_wait(since, q->lane);
    return st;
}

/* Does the same without waiting. */
static ar_status queue_poll(ar_queue *q, uint64_t ticket, bool *is_done)
{
    ari_wait_poll();
    pthread_mutex_lock(&q->lock);
    *is_done = atomic_load(&q->finished) >= ticket;
    const ar_status st = repeat_error(q);
    pthread_mutex_unlock(&q->lock);
    return st;
}

ar_status ar_queue_sync(ar_queue *q, uint64_t timeout_ns)
{
    if (!q)
        return ar_error_set(AR_ERR_ARG, "ar_queue_sync: the queue is missing");
    return ari_queue_await(q, ari_queue_ticket(q), timeout_ns);
}

/* --- events ------------------------------------------------------------------------------------------------------- */

/* A mark that an event shares with the queues waiting for it, since recording the event again must not move their
 * mark. */
typedef struct shared_mark {
    atomic_int refs;
    ari_mark *mark;
} shared_mark;

/* A point in a queue. Recording again moves the point; queues that already wait keep the old one. */
struct ar_event {
    ar_queue *q; /* the queue, referenced; NULL: never recorded */
    uint64_t ticket;
    shared_mark *end; /* for an inline queue on a stream: its tasks have run, and what they enqueued is done at this
                         mark */
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

ar_status ar_event_create(ar_event **out)
{
    if (!out)
        return ar_error_set(AR_ERR_ARG, "ar_event_create: no place for the event");
    *out = calloc(1, sizeof **out);
    return *out ? AR_OK : ar_error_set(AR_ERR_MEMORY, "ar_event_create: no memory for an event");
}

void ar_event_destroy(ar_event *e)
{
    if (!e)
        return;
    release_mark(e->end);
    queue_release(e->q);
    free(e);
}

/* Ensures that only this event holds the mark, on a stream of this kind. */
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
    e->q = queue_keep(q);
    e->ticket = ari_queue_ticket(q);
    queue_release(before);
    return mark_stream(e, q);
}

/* Waits until q's tasks are done as far as the host knows; for a queue on a stream this only finds its first error. */
static ar_status await_tasks(const ar_event *e, uint64_t timeout_ns)
{
    bool is_done;
    return e->end ? queue_poll(e->q, e->ticket, &is_done) : ari_queue_await(e->q, e->ticket, timeout_ns);
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

ar_status ar_event_test(ar_event *e, bool *is_done)
{
    if (!e || !is_done)
        return ar_error_set(AR_ERR_ARG, "ar_event_test: %s is missing", e ? "the answer's place" : "the event");
    *is_done = true;
    if (!e->q)
        return AR_OK;
    AR_TRY(queue_poll(e->q, e->ticket, is_done));
    const ari_mark *m = e->end ? e->end->mark : NULL;
    return *is_done && m ? ari_queue_note(e->q, m->ops->poll(m, is_done)) : AR_OK;
}

/* A wait of a queue for an event, as a task. */
typedef struct waiting {
    ar_event point;
    ari_stream *stream; /* stream of the waiting queue; NULL: none */
} waiting;

static void destroy_waiting(waiting *w)
{
    release_mark(w->point.end);
    queue_release(w->point.q);
    free(w);
}

/* Waits for a point: a stream of the same kind waits on the device, any other queue on the host. */
static ar_status wait_for_point(void *arg)
{
    waiting *w = arg;
    const ari_mark *m = w->point.end ? w->point.end->mark : NULL;
    ar_status st = AR_OK;
    if (m && w->stream && w->stream->ops == m->ops)
        st = w->stream->ops->wait(w->stream, m);
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
        return AR_OK; /* a queue runs in order, so its earlier tasks are done anyway */
    waiting *w = NULL;
    AR_TRY(ARI_ALLOC(&w, 1, "a wait of a queue"));
    *w = (waiting){{queue_keep(e->q), e->ticket, keep_mark(e->end)}, ari_queue_stream(q)};
    bool ran;
    const ar_status st = ari_queue_push(q, wait_for_point, drop_point, w, &ran);
    if (st != AR_OK && !ran)
        destroy_waiting(w);
    return st;
}
