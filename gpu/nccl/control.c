/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "gpu/nccl/control_impl.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Longest wait for the hub's word after a failure was told to it, above what it waits for views. */
#define VERDICT_NS UINT64_C(1500000000)

/* An exchange that this process is in. */
typedef struct asked {
    struct asked *next;
    ari_control_meeting id;
    char *answer;
    size_t bytes;
} asked;

struct ari_control {
    int rank, size;
    uint64_t timeout_ns;
    int fd, wake_fd, stop_fd;
    ari_hub *hub; /* of process 0 */
    pthread_t thread;
    bool started;
    pthread_mutex_t write_lock; /* of fd's other direction */
    pthread_mutex_t watch_lock; /* held while a watcher is called */
    ari_watcher watcher;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* guarded by `lock` */
    ar_status st;
    char *text;
    asked *exchanges;
    bool all_said;
};

void ari_gifts_fini(ari_gifts *g)
{
    free(g->at);
    free(g->start);
    *g = (ari_gifts){.at = NULL};
}

/* --- the failure -------------------------------------------------------------------------------------------------- */

static void keep_failure(ari_control *c, ar_status st, const char *text)
{
    const uint64_t one = 1;
    pthread_mutex_lock(&c->lock);
    const bool first = c->st == AR_OK;
    if (first) {
        c->text = strdup(text);
        c->st = st;
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->lock);
    if (!first)
        return;
    (void)!write(c->wake_fd, &one, sizeof one);
    pthread_mutex_lock(&c->watch_lock);
    if (c->watcher.failed)
        c->watcher.failed(c->watcher.user);
    pthread_mutex_unlock(&c->watch_lock);
}

ar_status ari_control_status(ari_control *c)
{
    pthread_mutex_lock(&c->lock);
    const ar_status st = c->st == AR_OK ? AR_OK : ar_error_set(c->st, "%s", c->text ? c->text : ar_status_text(c->st));
    pthread_mutex_unlock(&c->lock);
    return st;
}

int ari_control_wake_fd(const ari_control *c)
{
    return c->wake_fd;
}

static bool say(ari_control *c, ari_word word, const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const ari_net_limit l = {.idle_ns = c->timeout_ns, .wake_fd = c->stop_fd};
    pthread_mutex_lock(&c->write_lock);
    const ari_net_end end = ari_word_write(c->fd, word, a, a_bytes, b, b_bytes, &l);
    pthread_mutex_unlock(&c->write_lock);
    return end == ARI_NET_OK;
}

/* Until the world has failed, or `ns` are over. `lock` held. */
static bool await_failure(ari_control *c, uint64_t ns)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), ns);
    while (c->st == AR_OK) {
        if (ari_cond_wait_until(&c->changed, &c->lock, deadline) == ETIMEDOUT)
            return c->st != AR_OK;
    }
    return true;
}

static bool failed_within(ari_control *c, uint64_t ns)
{
    pthread_mutex_lock(&c->lock);
    const bool failed = await_failure(c, ns);
    pthread_mutex_unlock(&c->lock);
    return failed;
}

void ari_control_fail(ari_control *c, ar_status st, const char *why)
{
    const ari_control_verdict v = {.status = st};
    const bool in_thread = c->started && pthread_equal(pthread_self(), c->thread);
    if (failed_within(c, 0))
        return;
    const bool said = say(c, ARI_WORD_FAIL, &v, sizeof v, why, strlen(why));
    /* The hub's word comes by the control's own thread, which cannot wait for itself. */
    if (said && (in_thread || failed_within(c, VERDICT_NS)))
        return;
    keep_failure(c, st, why);
}

void ari_control_agree_failed(ari_control *c, ar_status st)
{
    const ari_control_verdict v = {.status = st};
    char why[1024];
    snprintf(why, sizeof why, "%s", ar_error_message());
    keep_failure(c, st, why);
    (void)say(c, ARI_WORD_FAIL, &v, sizeof v, why, strlen(why)); /* the others of the group say it too */
    (void)ar_error_set(st, "%s", why);
}

void ari_control_late(ari_control *c)
{
    if (!failed_within(c, 0) && !say(c, ARI_WORD_LATE, NULL, 0, NULL, 0))
        keep_failure(c, AR_ERR_TIMEOUT, "a rank waited too long, and process 0 does not hear of it");
}

/* --- exchanges ---------------------------------------------------------------------------------------------------- */

static void forget(ari_control *c, const asked *a)
{
    asked **at = &c->exchanges;
    while (*at && *at != a)
        at = &(*at)->next;
    if (*at)
        *at = a->next;
}

static ar_status open_gifts(ari_gifts *gives, char *answer, size_t bytes, int n)
{
    const size_t starts = ((size_t)n + 1) * sizeof(size_t), head = sizeof(ari_control_meeting) + starts;
    if (bytes < head)
        return ar_error_set(AR_ERR_INTERNAL, "an agreement of %d ranks has %zu bytes", n, bytes);
    AR_TRY(ari_alloc((void **)&gives->start, (size_t)n + 1, sizeof(size_t), "what ranks agree upon"));
    memcpy(gives->start, answer + sizeof(ari_control_meeting), starts);
    memmove(answer, answer + head, bytes - head);
    gives->at = answer;
    return AR_OK;
}

/* `lock` held. */
static ar_status await_answer(ari_control *c, const asked *a)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), c->timeout_ns);
    while (!a->answer && c->st == AR_OK) {
        if (ari_cond_wait_until(&c->changed, &c->lock, deadline) == ETIMEDOUT && !a->answer)
            return AR_ERR_TIMEOUT;
    }
    return a->answer ? AR_OK : AR_ERR_ABORTED;
}

ar_status ari_control_exchange(ari_control *c, uint64_t group, uint64_t seq, int index, int n, const void *bytes,
                               size_t size, ari_gifts *gives)
{
    asked a = {.id = {.group = group, .seq = seq, .index = index, .n = n}};
    *gives = (ari_gifts){.at = NULL};
    AR_TRY(ari_control_status(c));
    pthread_mutex_lock(&c->lock);
    a.next = c->exchanges;
    c->exchanges = &a;
    pthread_mutex_unlock(&c->lock);
    const bool said = say(c, ARI_WORD_EXCHANGE, &a.id, sizeof a.id, bytes, size);
    pthread_mutex_lock(&c->lock);
    ar_status st = said ? await_answer(c, &a) : AR_ERR_IO;
    if (st == AR_ERR_TIMEOUT) { /* what the others do tells more than that they have not come */
        pthread_mutex_unlock(&c->lock);
        ari_control_late(c);
        pthread_mutex_lock(&c->lock);
        (void)await_failure(c, VERDICT_NS);
    }
    forget(c, &a);
    pthread_mutex_unlock(&c->lock);
    if (st == AR_OK) {
        st = open_gifts(gives, a.answer, a.bytes, n);
        if (st != AR_OK)
            free(a.answer);
        return st;
    }
    AR_TRY(ari_control_status(c));
    return ar_error_set(st, "process 0 does not answer");
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

static void take_answer(ari_control *c, char *bytes, size_t size)
{
    ari_control_meeting id;
    memcpy(&id, bytes, sizeof id);
    pthread_mutex_lock(&c->lock);
    for (asked *a = c->exchanges; a; a = a->next) {
        if (a->id.group == id.group && a->id.seq == id.seq && !a->answer) {
            a->answer = bytes;
            a->bytes = size;
            bytes = NULL;
            pthread_cond_broadcast(&c->changed);
            break;
        }
    }
    pthread_mutex_unlock(&c->lock);
    free(bytes); /* nobody waits for it any more */
}

static void show(ari_control *c)
{
    size_t bytes = 0;
    pthread_mutex_lock(&c->watch_lock);
    void *view = c->watcher.view ? c->watcher.view(c->watcher.user, &bytes) : NULL;
    pthread_mutex_unlock(&c->watch_lock);
    if (!say(c, ARI_WORD_VIEW, view, view ? bytes : 0, NULL, 0))
        keep_failure(c, AR_ERR_ABORTED, "process 0 takes no word any more");
    free(view);
}

static void set_all_said(ari_control *c)
{
    pthread_mutex_lock(&c->lock);
    c->all_said = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* False: nothing more comes. */
static bool hear(ari_control *c)
{
    const ari_net_limit l = {.idle_ns = c->timeout_ns, .wake_fd = c->stop_fd};
    ari_word_head head;
    char *bytes = NULL;
    if (ari_word_read(c->fd, &head, &bytes, &l) != ARI_NET_OK) {
        pthread_mutex_lock(&c->lock);
        const bool expected = c->all_said;
        pthread_mutex_unlock(&c->lock);
        if (!expected)
            keep_failure(c, AR_ERR_ABORTED, "rank 0 is gone: its connection was closed");
        return false;
    }
    const size_t size = (size_t)head.bytes;
    if (head.word == ARI_WORD_EXCHANGED && size >= sizeof(ari_control_meeting)) {
        take_answer(c, bytes, size);
        return true;
    }
    if (head.word == ARI_WORD_FAILED && size >= sizeof(ari_control_verdict)) {
        ari_control_verdict v;
        memcpy(&v, bytes, sizeof v);
        keep_failure(c, v.own ? (ar_status)v.status : AR_ERR_ABORTED, bytes + sizeof v);
    } else if (head.word == ARI_WORD_SHOW) {
        show(c);
    } else if (head.word == ARI_WORD_ALL_SAID) {
        set_all_said(c);
    }
    free(bytes);
    return true;
}

static void *listen_main(void *arg)
{
    ari_control *c = arg;
    for (bool open = true;;) {
        struct pollfd p[2] = {{.fd = c->stop_fd, .events = POLLIN}, {.fd = c->fd, .events = POLLIN}};
        const int ready = poll(p, open ? 2 : 1, ARI_TICK_MS);
        if (ready < 0 && errno != EINTR)
            return NULL;
        if (ready > 0 && p[0].revents)
            return NULL;
        if (ready > 0 && open && p[1].revents)
            open = hear(c);
        pthread_mutex_lock(&c->watch_lock);
        if (c->watcher.tick)
            c->watcher.tick(c->watcher.user);
        pthread_mutex_unlock(&c->watch_lock);
    }
}

void ari_control_watch(ari_control *c, const ari_watcher *w)
{
    pthread_mutex_lock(&c->watch_lock);
    c->watcher = w ? *w : (ari_watcher){.user = NULL};
    if (c->watcher.failed && failed_within(c, 0)) /* before anybody looked */
        c->watcher.failed(c->watcher.user);
    pthread_mutex_unlock(&c->watch_lock);
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

static ar_status init_locks(ari_control *c)
{
    c->wake_fd = eventfd(0, EFD_CLOEXEC);
    c->stop_fd = eventfd(0, EFD_CLOEXEC);
    if (c->wake_fd < 0 || c->stop_fd < 0)
        return ar_error_set(AR_ERR_IO, "no event for what processes tell each other: %s", strerror(errno));
    pthread_mutexattr_t again; /* a watcher that is called may find the failure */
    pthread_mutexattr_init(&again);
    pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&c->watch_lock, &again);
    pthread_mutexattr_destroy(&again);
    pthread_mutex_init(&c->write_lock, NULL); /* mutexes of Linux need nothing that could be missing */
    pthread_mutex_init(&c->lock, NULL);
    const int rc = ari_cond_init(&c->changed);
    return rc == 0 ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no condition variable: %s", strerror(rc));
}

/* Process 0 speaks to its own hub like the others. */
static ar_status make_hub(ari_control *c, const ari_control_options *o)
{
    int pair[2];
    if (!o->hub)
        return AR_OK;
    const ar_status st = ari_net_pair(pair);
    if (st != AR_OK) {
        for (int r = 1; r < o->size; r++)
            close(o->hub[r]);
        return st;
    }
    o->hub[0] = pair[0];
    c->fd = pair[1];
    return ari_hub_create(&c->hub, o->size, o->hub, o->names);
}

static void free_control(ari_control *c)
{
    const int fds[] = {c->fd, c->wake_fd, c->stop_fd};
    ari_hub_destroy(c->hub);
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
    pthread_cond_destroy(&c->changed);
    pthread_mutex_destroy(&c->lock);
    pthread_mutex_destroy(&c->watch_lock);
    pthread_mutex_destroy(&c->write_lock);
    free(c->text);
    free(c);
}

ar_status ari_control_create(ari_control **gives, const ari_control_options *o)
{
    ari_control *c = NULL;
    *gives = NULL;
    AR_TRY(ari_alloc_zero((void **)&c, 1, sizeof *c, "what processes tell each other"));
    c->rank = o->rank;
    c->size = o->size;
    c->timeout_ns = o->timeout_ns;
    c->fd = o->fd;
    ar_status st = init_locks(c);
    for (int r = 1; st != AR_OK && o->hub && r < o->size; r++)
        close(o->hub[r]);
    if (st == AR_OK)
        st = make_hub(c, o);
    if (st == AR_OK) {
        const int rc = pthread_create(&c->thread, NULL, listen_main, c);
        c->started = rc == 0;
        if (rc != 0)
            st = ar_error_set(AR_ERR_MEMORY, "no thread for what processes tell each other: %s", strerror(rc));
    }
    if (st != AR_OK) {
        free_control(c);
        return st;
    }
    *gives = c;
    return AR_OK;
}

/* Waits until nobody needs anybody any more. */
static void take_leave(ari_control *c)
{
    if (!say(c, ARI_WORD_BYE, NULL, 0, NULL, 0))
        return;
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), c->timeout_ns);
    pthread_mutex_lock(&c->lock);
    while (!c->all_said && c->st == AR_OK) {
        if (ari_cond_wait_until(&c->changed, &c->lock, deadline) == ETIMEDOUT)
            break;
    }
    pthread_mutex_unlock(&c->lock);
}

void ari_control_destroy(ari_control *c)
{
    const uint64_t one = 1;
    if (!c)
        return;
    ari_control_watch(c, NULL);
    if (!failed_within(c, 0))
        take_leave(c);
    if (write(c->stop_fd, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(c->thread, NULL);
    free_control(c);
}
