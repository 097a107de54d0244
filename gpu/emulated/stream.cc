/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/emulated/stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/emulated/memory.h"

namespace ari_emulated
{

namespace
{

struct stream;

/* A point in a stream. */
struct point {
    size_t refs;
    stream *owner;
    bool reached;
};

struct alignas(16) task {
    task *next;
    ar_status (*run)(const void *arg); /* NULL: the task only waits, or is only a point */
    point *waits_for;                  /* the point to wait for, referenced; NULL: none */
    point *completion;                 /* owned; reached when the task has run; NULL: none */

    void *arg() /* argument of `run`, stored after the task */
    {
        return this + 1;
    }
};

struct stream {
    ari_stream base; /* must be the first field, since an ari_stream * points to it */
    stream *next;    /* next stream of the process */
    task *head, **tail;
    chunk *freed;     /* memory that the tasks will free, the newest first */
    bool early;       /* chosen to run before it is waited for */
    worker *executor; /* runs its tasks if these run at once */
};

struct mark {
    ari_mark base;   /* first */
    point *position; /* the stream's position, referenced; NULL: a stream that works at once was already there */
};

/* Policy that chooses which stream runs next. */
enum class policy {
    eager,
    late,  /* random, one task at a time */
    latest /* some streams run as far as they can; then only what is waited for, with its dependencies */
};

/* Tasks between two looks at all guards: about as many as there are blocks. */
const size_t LOOK_EVERY = 1000;

/* State of the emulated GPU, one per process. */
struct machine {
    pthread_mutex_t
        lock;    /* guards everything before `failed`, the streams, their tasks and points; held while a task runs */
    policy runs; /* constant while streams exist */
    uint64_t random;
    stream *streams;
    ar_status failed;       /* sticky error; may be read at any time */
    size_t unchecked_count; /* number of kernels and copies since guards were checked; atomic */
    char why[512];
};
machine gpu_state = {PTHREAD_MUTEX_INITIALIZER, policy::eager, 0, nullptr, AR_OK, 0, ""};

struct locked {
    locked()
    {
        pthread_mutex_lock(&gpu_state.lock);
    }
    ~locked()
    {
        pthread_mutex_unlock(&gpu_state.lock);
    }
};

stream *cast_stream(ari_stream *s)
{
    return reinterpret_cast<stream *>(s);
}

/* Splitmix64. In [0, n). */
size_t draw(size_t n)
{
    uint64_t z = gpu_state.random += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return static_cast<size_t>((z ^ (z >> 31)) % n);
}

bool is_late()
{
    return gpu_state.runs != policy::eager;
}

/* The first failure stays. */
void fail(ar_status st)
{
    static pthread_mutex_t writes = PTHREAD_MUTEX_INITIALIZER;
    if (st == AR_OK)
        return;
    pthread_mutex_lock(&writes);
    if (gpu_state.failed == AR_OK) {
        snprintf(gpu_state.why, sizeof gpu_state.why, "%s", ar_error_message());
        __atomic_store_n(&gpu_state.failed, st, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&writes);
}

/* --- tasks and points --------------------------------------------------------------------------------------------- */

point *retain_point(point *p)
{
    if (p)
        p->refs++;
    return p;
}

void release(point *p)
{
    if (p && --p->refs == 0)
        ::free(p);
}

/* Creates a task without work. Errors: AR_ERR_MEMORY. */
ar_status new_task(task **result, size_t bytes)
{
    *result = static_cast<task *>(calloc(1, sizeof(task) + bytes));
    return *result ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for what a stream is to do");
}

/* The task is a point too. Errors: AR_ERR_MEMORY. */
ar_status make_point(task *t, stream *s)
{
    t->completion = static_cast<point *>(calloc(1, sizeof(point)));
    if (!t->completion)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a point in a stream");
    t->completion->refs = 1;
    t->completion->owner = s;
    return AR_OK;
}

void append(stream *s, task *t)
{
    *s->tail = t;
    s->tail = &t->next;
}

/* Returns a point after all work of a stream that runs its tasks at once, for ThreadSanitizer. NULL: not requested. */
ar_status reached_point(stream *s, point **result)
{
    if (!ARI_WATCHED)
        return AR_OK;
    point *p = static_cast<point *>(calloc(1, sizeof *p));
    if (!p)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a point in a stream");
    p->owner = s;
    p->reached = true;
    worker_before(s->executor, p);
    *result = p;
    return AR_OK;
}

/* Appends a task that does nothing, as a point. */
ar_status append_point(stream *s, point **borrows)
{
    task *t = nullptr;
    AR_TRY(new_task(&t, 0));
    const ar_status st = make_point(t, s);
    if (st != AR_OK) {
        ::free(t);
        return st;
    }
    *borrows = t->completion;
    append(s, t);
    return AR_OK;
}

ar_status append_wait(stream *s, point *p)
{
    task *t = nullptr;
    if (p && p->reached && !is_late())
        worker_after(s->executor, p);
    if (!p || p->reached)
        return AR_OK;
    AR_TRY(new_task(&t, 0));
    t->waits_for = retain_point(p);
    append(s, t);
    return AR_OK;
}

ar_status append_call(stream *s, ar_status (*run)(const void *), const void *arg, size_t bytes)
{
    task *t = nullptr;
    AR_TRY(new_task(&t, bytes));
    t->run = run;
    memcpy(t->arg(), arg, bytes);
    append(s, t);
    return AR_OK;
}

/* --- the scheduler ------------------------------------------------------------------------------------------------ */

bool is_blocked(const stream *s)
{
    return s->head && s->head->waits_for && !s->head->waits_for->reached;
}
bool can_run(const stream *s)
{
    return s->head && !is_blocked(s);
}

ar_status give_back(const void *arg);

/* Runs the stream's next task, which must be able to run. After a failure no kernel runs, as on a GPU, but points are
 * still reached. */
void step(stream *s)
{
    task *t = s->head;
    if (t->run && (gpu_state.failed == AR_OK || t->run == give_back))
        fail(t->run(t->arg()));
    s->head = t->next;
    s->tail = s->head ? s->tail : &s->head;
    if (t->completion)
        t->completion->reached = true;
    release(t->completion);
    release(t->waits_for);
    ::free(t);
}

/* Returns any stream that can run; NULL: none. */
stream *any_that_can_run(bool early)
{
    stream *chosen = nullptr;
    size_t n = 0;
    for (stream *s = gpu_state.streams; s; s = s->next)
        if (can_run(s) && (!early || s->early) && draw(++n) == 0)
            chosen = s;
    return chosen;
}

/* Returns the stream whose next task must run to reach p. */
stream *needed_for(const point *p)
{
    stream *s = p->owner;
    while (is_blocked(s))
        s = s->head->waits_for->owner;
    return s;
}

/* Lets some streams run ahead of what is waited for, to their ends or for a few tasks. */
void run_ahead(void)
{
    if (draw(2))
        return;
    for (stream *s = gpu_state.streams; s; s = s->next)
        s->early = draw(2);
    size_t remaining = draw(2) ? SIZE_MAX : draw(16);
    for (stream *s; remaining > 0 && (s = any_that_can_run(true)); remaining--)
        step(s);
}

void run_until(const point *p)
{
    if (!p->reached && gpu_state.runs == policy::latest)
        run_ahead();
    while (!p->reached)
        step(gpu_state.runs == policy::late ? any_that_can_run(false) : needed_for(p));
}

void run_all(void)
{
    for (stream *s; (s = any_that_can_run(false));)
        step(s);
}

/* Runs all remaining tasks of s. */
void finish(stream *s)
{
    while (s->head)
        step(is_blocked(s) ? needed_for(s->head->waits_for) : s);
}

/* --- what a queue asks of a stream -------------------------------------------------------------------------------- */

void mark_destroy(ari_mark *m)
{
    locked scoped_lock;
    release(reinterpret_cast<mark *>(m)->position);
    ::free(m);
}

ar_status stream_mark(ari_stream *s, ari_mark **m)
{
    locked scoped_lock;
    point *position = nullptr;
    AR_TRY(is_late() ? append_point(cast_stream(s), &position) : reached_point(cast_stream(s), &position));
    mark *target = reinterpret_cast<mark *>(*m);
    if (!target)
        target = static_cast<mark *>(calloc(1, sizeof *target));
    if (!target)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a mark in a stream");
    release(target->position);
    target->base.ops = s->ops;
    target->position = retain_point(position);
    *m = &target->base;
    return AR_OK;
}

ar_status stream_wait(ari_stream *s, const ari_mark *m)
{
    locked scoped_lock;
    return append_wait(cast_stream(s), reinterpret_cast<const mark *>(m)->position);
}

/* Checks guards of allocated blocks, about one for each task. */
void look_at_guards(void)
{
    if (ARI_WATCHED || __atomic_load_n(&gpu_state.unchecked_count, __ATOMIC_RELAXED) <
                           LOOK_EVERY) /* under a sanitizer these belong to the streams */
        return;
    __atomic_store_n(&gpu_state.unchecked_count, 0, __ATOMIC_RELAXED);
    fail(guards_check());
}

/* Nothing here waits for the host, so the time limit is not needed. */
ar_status mark_await(const ari_mark *m, uint64_t timeout_ns)
{
    (void)timeout_ns;
    locked scoped_lock;
    const point *position = reinterpret_cast<const mark *>(m)->position;
    if (position) {
        run_until(position);
        ordered_after(position);
    }
    look_at_guards();
    return streams_failed();
}

/* Each query runs a task, so that a polling caller makes progress. */
ar_status mark_poll(const ari_mark *m, bool *is_done)
{
    locked scoped_lock;
    const point *position = reinterpret_cast<const mark *>(m)->position;
    if (position && !position->reached)
        step(draw(2) ? needed_for(position) : any_that_can_run(false));
    *is_done = !position || position->reached;
    if (position && position->reached)
        ordered_after(position);
    return streams_failed();
}

/* The last stream to be destroyed clears a failure. */
void stream_destroy(ari_stream *base)
{
    locked scoped_lock;
    stream *s = cast_stream(base), **slot = &gpu_state.streams;
    finish(s);
    worker_before(s->executor, s);
    ordered_after(s);
    worker_destroy(s->executor);
    while (*slot != s)
        slot = &(*slot)->next;
    *slot = s->next;
    if (!gpu_state.streams)
        __atomic_store_n(&gpu_state.failed, AR_OK, __ATOMIC_RELEASE);
    ::free(s);
}

const ari_stream_ops stream_ops = {stream_mark,  stream_wait,    mark_await, mark_poll,
                                   mark_destroy, stream_destroy, nullptr,    nullptr};

/* --- memory ------------------------------------------------------------------------------------------------------- */

struct lease {
    void *address;
    size_t bytes;
    stream *owner; /* stream that frees it; NULL: none */
};

void unlist(chunk *c, stream *s)
{
    if (c->next)
        c->next->prev = c->prev;
    (c->prev ? c->prev->next : s->freed) = c->next;
    c->freed_by = nullptr;
}

/* Frees a block when a stream reaches that task. Later work may have allocated it already. */
ar_status give_back(const void *arg)
{
    const lease &b = *static_cast<const lease *>(arg);
    chunk *c = arena_chunk(b.address);
    const ar_status st = guard_end(b.address, b.bytes);
    if (c && c->freed_by != static_cast<const task *>(arg) - 1) {
        arena_spoil(b.address);
        return st;
    }
    if (c)
        unlist(c, b.owner);
    arena_give(b.address);
    return st;
}

ar_status set_guard(const void *arg)
{
    const lease &b = *static_cast<const lease *>(arg);
    guard_set(b.address, b.bytes);
    return AR_OK;
}

/* Returns the block that the stream will free last among those that are large enough. */
chunk *find_freed(const stream *s, size_t bytes)
{
    chunk *c = s->freed;
    while (c && !arena_fits(c, bytes))
        c = c->next;
    return c;
}

/* Returns memory that s, or by chance another stream, will free; s then waits for that stream. NULL: none is
 * suitable. */
ar_status take_freed(chunk **result, stream *s, size_t bytes)
{
    stream *owner = s;
    chunk *c = find_freed(s, bytes);
    for (stream *peer = gpu_state.streams; peer && !c; peer = peer->next)
        if (draw(2) && (c = find_freed(peer, bytes)))
            owner = peer;
    if (!c)
        return AR_OK;
    if (owner != s)
        AR_TRY(append_wait(s, static_cast<const task *>(c->freed_by)->completion));
    const lease b = {arena_address(c), bytes, nullptr};
    AR_TRY(append_call(s, set_guard, &b, sizeof b));
    unlist(c, owner);
    c->bytes = bytes;
    *result = c;
    return AR_OK;
}

} // namespace

ar_status streams_failed(void)
{
    const ar_status st = __atomic_load_n(&gpu_state.failed, __ATOMIC_ACQUIRE);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", gpu_state.why);
}

ar_status stream_alloc(ari_stream *s, void **result, size_t bytes)
{
    if (!is_late())
        return arena_take_by(cast_stream(s)->executor, result, bytes);
    locked scoped_lock;
    chunk *c = nullptr;
    AR_TRY(take_freed(&c, cast_stream(s), bytes));
    if (c) {
        *result = arena_address(c);
        return AR_OK;
    }
    if (arena_take(result, bytes) == AR_OK)
        return AR_OK;
    run_all(); /* runs everything, so that all pending frees are done */
    return arena_take(result, bytes);
}

static size_t bytes_of(const void *address)
{
    const chunk *c = arena_chunk(address);
    return c ? c->bytes : 0;
}

static void end_now(const lease &b)
{
    fail(guard_end(b.address, b.bytes));
    arena_give(b.address);
}

/* If there is no memory for a task, waits for everything enqueued. */
void stream_free(ari_stream *base, void *address)
{
    const lease b = {address, bytes_of(address), cast_stream(base)};
    task *t = nullptr;
    if (!is_late()) {
        fail(arena_give_by(b.owner->executor, b.address, b.bytes));
        return;
    }
    locked scoped_lock;
    if (new_task(&t, sizeof b) != AR_OK || make_point(t, cast_stream(base)) != AR_OK) {
        ::free(t);
        finish(cast_stream(base));
        end_now(b);
        return;
    }
    t->run = give_back;
    memcpy(t->arg(), &b, sizeof b);
    append(cast_stream(base), t);
    chunk *c = arena_chunk(address);
    if (c) {
        c->prev = nullptr;
        c->next = cast_stream(base)->freed;
        if (c->next)
            c->next->prev = c;
        cast_stream(base)->freed = c;
        c->freed_by = t;
    }
}

void device_free(ar_device *d, void *address)
{
    locked scoped_lock;
    for (stream *s = gpu_state.streams; s; s = s->next)
        if (s->base.device == d) {
            finish(s);
            worker_before(s->executor, s);
            ordered_after(s);
        }
    end_now({address, bytes_of(address), nullptr});
}

ar_status submit(ar_queue *q, ar_status (*run)(const void *arg), const void *arg, size_t bytes)
{
    __atomic_add_fetch(&gpu_state.unchecked_count, 1, __ATOMIC_RELAXED);
    if (!is_late())
        return worker_call(cast_stream(ari_queue_stream(q))->executor, run, arg, bytes);
    locked scoped_lock;
    return append_call(cast_stream(ari_queue_stream(q)), run, arg, bytes);
}

ari_stream *stream_of(const ar_queue *q)
{
    ari_stream *s = q && ari_queue_is_inline(q) ? ari_queue_stream(q) : nullptr;
    return s && s->ops == &stream_ops ? s : nullptr;
}

ar_status stream_create(ari_stream **result, ar_device *d)
{
    stream *s = static_cast<stream *>(calloc(1, sizeof *s));
    if (!s)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a stream of the emulated device");
    s->base.ops = &stream_ops;
    s->base.device = d;
    s->tail = &s->head;
    const ar_status st = worker_create(&s->executor);
    if (st != AR_OK) {
        ::free(s);
        return st;
    }
    locked scoped_lock;
    s->next = gpu_state.streams;
    gpu_state.streams = s;
    *result = &s->base;
    return AR_OK;
}

ar_status streams_open(void)
{
    static const struct {
        const char *name;
        policy runs;
    } names[] = {{"late:", policy::late}, {"latest:", policy::latest}};
    const char *text = getenv("ANYRANK_EMULATED_STREAMS");
    policy runs = policy::eager;
    char *end = nullptr;
    uint64_t seed = 0;
    for (const auto &n : names) {
        if (text && strncmp(text, n.name, strlen(n.name)) == 0) {
            const char *number = text + strlen(n.name);
            runs = n.runs;
            errno = 0;
            seed = strtoull(number, &end, 10);
            end = *number >= '0' && *number <= '9' && errno == 0 ? end : nullptr;
        }
    }
    if (text && strcmp(text, "eager") != 0 && (!end || *end))
        return ar_error_set(AR_ERR_ARG,
                            "ANYRANK_EMULATED_STREAMS is '%.40s'; it takes eager, late:SEED or latest:SEED, SEED a "
                            "number below 2^64",
                            text);
    locked scoped_lock;
    if (!gpu_state.streams) {
        gpu_state.runs = runs;
        gpu_state.random = seed;
    }
    return AR_OK;
}

} // namespace ari_emulated
