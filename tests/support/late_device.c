/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/late_device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "ref/core/queue_impl.h"
#include "ref/core/reduce.h"

enum { MOST_INPUTS = 16 };

typedef struct late_device {
    ar_device base; /* first */
    int fails_at;
    atomic_int calls;
} late_device;

/* Counted: a stream that still has to reach or to wait for it keeps it. */
typedef struct late_mark {
    ari_mark base; /* first */
    atomic_int refs;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t set, reached; /* how often */
} late_mark;

typedef enum task_kind { COPY, ZERO, COMBINE, REACH, WAIT } task_kind;
typedef struct task {
    struct task *next;
    task_kind kind;
    void *to;
    const void *from[MOST_INPUTS];
    int n;
    size_t count; /* bytes; combine: elements */
    ar_dtype dtype;
    ar_op op;
    late_mark *mark;
    uint64_t at; /* of the mark */
    void *owned; /* the bytes that the host lent */
} task;

typedef struct late_stream {
    ari_stream base; /* first */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    task *head, **tail;
    bool stop;
    uint64_t noise;
} late_stream;

/* --- marks -------------------------------------------------------------------------------------------------------- */

static void mark_release(late_mark *m)
{
    if (atomic_fetch_sub(&m->refs, 1) != 1)
        return;
    pthread_mutex_destroy(&m->lock);
    pthread_cond_destroy(&m->changed);
    free(m);
}

static void mark_await(late_mark *m, uint64_t at)
{
    pthread_mutex_lock(&m->lock);
    while (m->reached < at)
        pthread_cond_wait(&m->changed, &m->lock);
    pthread_mutex_unlock(&m->lock);
}

static void mark_reach(late_mark *m, uint64_t at)
{
    pthread_mutex_lock(&m->lock);
    m->reached = at > m->reached ? at : m->reached;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
}

static uint64_t mark_set(late_mark *m)
{
    pthread_mutex_lock(&m->lock);
    const uint64_t set = m->set;
    pthread_mutex_unlock(&m->lock);
    return set;
}

/* --- the thread of a stream --------------------------------------------------------------------------------------- */

static void dawdle(late_stream *s)
{
    s->noise = s->noise * UINT64_C(6364136223846793005) + 1;
    const struct timespec nap = {.tv_nsec = (long)(s->noise >> 33) % 60000};
    if (s->noise >> 62 == 0)
        nanosleep(&nap, NULL);
}

static void combine_all(const task *t)
{
    const ari_reduce kernel = ari_reduce_kernel(t->dtype, t->op);
    const size_t bytes = t->count * ar_dtype_bytes(t->dtype);
    void *sum = malloc(bytes + 1); /* `to` may be an input that comes later */
    memcpy(sum, t->from[0], bytes);
    for (int i = 1; i < t->n; i++)
        kernel.two(sum, sum, t->from[i], t->count);
    if (t->n > 1 && kernel.finish)
        kernel.finish(sum, t->count, t->n);
    memcpy(t->to, sum, bytes);
    free(sum);
}

static void run(const task *t)
{
    if (t->kind == COPY)
        memcpy(t->to, t->from[0], t->count);
    else if (t->kind == ZERO)
        memset(t->to, 0, t->count);
    else if (t->kind == COMBINE)
        combine_all(t);
    else if (t->kind == REACH)
        mark_reach(t->mark, t->at);
    else
        mark_await(t->mark, t->at);
}

static void task_free(task *t)
{
    if (t->mark)
        mark_release(t->mark);
    free(t->owned);
    free(t);
}

static void *work(void *arg)
{
    late_stream *s = arg;
    for (;;) {
        pthread_mutex_lock(&s->lock);
        while (!s->head && !s->stop)
            pthread_cond_wait(&s->changed, &s->lock);
        task *t = s->head;
        if (t) {
            s->head = t->next;
            s->tail = s->head ? s->tail : &s->head;
        }
        pthread_mutex_unlock(&s->lock);
        if (!t)
            return NULL;
        dawdle(s);
        run(t);
        task_free(t);
    }
}

static void enqueue(late_stream *s, const task *what)
{
    task *t = malloc(sizeof *t);
    *t = *what;
    t->next = NULL;
    pthread_mutex_lock(&s->lock);
    *s->tail = t;
    s->tail = &t->next;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* --- what a queue asks of a stream -------------------------------------------------------------------------------- */

static ar_status stream_mark(ari_stream *s, ari_mark **m)
{
    if (!*m) {
        late_mark *made = calloc(1, sizeof *made);
        made->base.ops = s->ops;
        atomic_init(&made->refs, 1);
        pthread_mutex_init(&made->lock, NULL);
        pthread_cond_init(&made->changed, NULL);
        *m = &made->base;
    }
    late_mark *mark = (late_mark *)*m;
    pthread_mutex_lock(&mark->lock);
    const uint64_t at = ++mark->set;
    pthread_mutex_unlock(&mark->lock);
    atomic_fetch_add(&mark->refs, 1);
    enqueue((late_stream *)s, &(task){.kind = REACH, .mark = mark, .at = at});
    return AR_OK;
}

static ar_status stream_wait(ari_stream *s, const ari_mark *m)
{
    late_mark *mark = (late_mark *)(uintptr_t)m;
    atomic_fetch_add(&mark->refs, 1);
    enqueue((late_stream *)s, &(task){.kind = WAIT, .mark = mark, .at = mark_set(mark)});
    return AR_OK;
}

static ar_status stream_await(const ari_mark *m, uint64_t timeout_ns)
{
    (void)timeout_ns;
    late_mark *mark = (late_mark *)(uintptr_t)m;
    mark_await(mark, mark_set(mark));
    return AR_OK;
}

static ar_status stream_poll(const ari_mark *m, bool *done)
{
    late_mark *mark = (late_mark *)(uintptr_t)m;
    pthread_mutex_lock(&mark->lock);
    *done = mark->reached >= mark->set;
    pthread_mutex_unlock(&mark->lock);
    return AR_OK;
}

static void stream_mark_destroy(ari_mark *m)
{
    mark_release((late_mark *)m);
}

static void stream_destroy(ari_stream *base)
{
    late_stream *s = (late_stream *)base;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_signal(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    pthread_mutex_destroy(&s->lock);
    pthread_cond_destroy(&s->changed);
    free(s);
}

static const ari_stream_ops stream_ops = {.mark = stream_mark,
                                          .wait = stream_wait,
                                          .await = stream_await,
                                          .poll = stream_poll,
                                          .mark_destroy = stream_mark_destroy,
                                          .destroy = stream_destroy};

/* --- the device --------------------------------------------------------------------------------------------------- */

static ar_status device_queue_create(ar_device *d, ar_queue **gives, ar_queue_kind kind, const char *name)
{
    static atomic_int streams;
    late_stream *s = calloc(1, sizeof *s);
    s->base = (ari_stream){&stream_ops, d};
    s->noise = (uint64_t)atomic_fetch_add(&streams, 1) * UINT64_C(0x9e3779b97f4a7c15);
    s->tail = &s->head;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    pthread_create(&s->thread, NULL, work, s);
    return ari_queue_create_on(gives, kind, name, &s->base);
}

/* All devices' memory lies in one region, by which it is told from the host's. Nothing is given back before the end. */
static const size_t REGION_BYTES = (size_t)1 << 30;
static char *region;
static atomic_size_t taken;
static pthread_once_t region_once = PTHREAD_ONCE_INIT;

static void make_region(void)
{
    void *at = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    region = at == MAP_FAILED ? NULL : at;
}

static bool is_lent(const void *address)
{
    return (const char *)address < region || (const char *)address >= region + REGION_BYTES;
}

static ar_status device_alloc(ar_device *d, ar_queue *q, ar_buf *gives, size_t bytes)
{
    (void)d;
    (void)q;
    const size_t room = (bytes + 64) / 64 * 64, at = atomic_fetch_add(&taken, room);
    if (!region || at + room > REGION_BYTES)
        return ar_error_set(AR_ERR_MEMORY, "the late devices' memory is used up");
    gives->ptr = region + at;
    return AR_OK;
}

static void device_free(ar_device *d, ar_queue *q, ar_buf b)
{
    (void)d;
    (void)q;
    (void)b;
}

static ar_status count_call(ar_device *base)
{
    late_device *d = (late_device *)base;
    const int call = atomic_fetch_add(&d->calls, 1) + 1;
    return call == d->fails_at ? ar_error_set(AR_ERR_DEVICE, "the late device fails in call %d", call) : AR_OK;
}

static ar_status device_copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes)
{
    task what = {.kind = COPY, .to = dst.ptr, .from = {src.ptr}, .count = bytes};
    AR_TRY(count_call(d));
    if (is_lent(src.ptr)) {
        what.owned = malloc(bytes + 1);
        memcpy(what.owned, src.ptr, bytes);
        what.from[0] = what.owned;
    }
    enqueue((late_stream *)ari_queue_stream(q), &what);
    return AR_OK;
}

static ar_status device_zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes)
{
    (void)d;
    enqueue((late_stream *)ari_queue_stream(q), &(task){.kind = ZERO, .to = dst.ptr, .count = bytes});
    return AR_OK;
}

static ar_status device_combine(ar_device *d, ar_queue *q, ar_buf out, const ar_cbuf *in, int n, size_t count,
                                ar_dtype t, ar_op op)
{
    task what = {.kind = COMBINE, .to = out.ptr, .n = n, .count = count, .dtype = t, .op = op};
    AR_TRY(count_call(d));
    for (int i = 0; i < n && i < MOST_INPUTS; i++)
        what.from[i] = in[i].ptr;
    enqueue((late_stream *)ari_queue_stream(q), &what);
    return AR_OK;
}

static void device_destroy(ar_device *d)
{
    free(d);
}

static const ar_device_ops device_ops = {.name = "late",
                                         .queue_create = device_queue_create,
                                         .destroy = device_destroy,
                                         .alloc = device_alloc,
                                         .free = device_free,
                                         .copy = device_copy,
                                         .zero = device_zero,
                                         .combine = device_combine};

ar_status late_device_create(ar_device **gives, int fails_at)
{
    pthread_once(&region_once, make_region);
    late_device *d = calloc(1, sizeof *d);
    if (!d)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a late device");
    d->base = (ar_device){.ops = &device_ops, .threads = 1, .block_bytes = 1 << 20};
    d->fails_at = fails_at;
    atomic_init(&d->calls, 0);
    *gives = &d->base;
    return AR_OK;
}
