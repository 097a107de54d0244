/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "process/coordinator.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Longest wait for the coordinator's answer to a failure, above what it waits for views. */
#define VERDICT_NS UINT64_C(1500000000)

/* An exchange that this process is in. */
typedef struct exchange {
    struct exchange *next;
    ari_exchange_id id;
    char *answer;
    size_t bytes;
} exchange;

struct ari_control {
    uint64_t timeout_ns;
    int fd, wake_fd, stop_fd;
    ari_coordinator *coordinator; /* of process 0 */
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
    exchange *exchanges;
    bool all_bye;
};

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

static bool send_message(ari_control *c, ari_message kind, const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const ari_net_limit l = {.idle_ns = c->timeout_ns, .wake_fd = c->stop_fd};
    pthread_mutex_lock(&c->write_lock);
    const ari_net_end end = ari_message_write(c->fd, kind, a, a_bytes, b, b_bytes, &l);
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
    const bool sent = send_message(c, ARI_MESSAGE_FAIL, &v, sizeof v, why, strlen(why));
    /* The coordinator's answer comes by the control's own thread, which cannot wait for itself. */
    if (sent && (in_thread || failed_within(c, VERDICT_NS)))
        return;
    keep_failure(c, st, why);
}

void ari_control_agree_failed(ari_control *c, ar_status st)
{
    const ari_control_verdict v = {.status = st};
    char why[1024];
    snprintf(why, sizeof why, "%s", ar_error_message());
    keep_failure(c, st, why);
    (void)send_message(c, ARI_MESSAGE_FAIL, &v, sizeof v, why, strlen(why)); /* the others of the group send it too */
    (void)ar_error_set(st, "%s", why);
}

void ari_control_late(ari_control *c)
{
    if (!failed_within(c, 0) && !send_message(c, ARI_MESSAGE_LATE, NULL, 0, NULL, 0))
        keep_failure(c, AR_ERR_TIMEOUT, "a rank waited too long, and process 0 does not hear of it");
}

/* --- exchanges ---------------------------------------------------------------------------------------------------- */

static void forget(ari_control *c, const exchange *x)
{
    exchange **at = &c->exchanges;
    while (*at && *at != x)
        at = &(*at)->next;
    if (*at)
        *at = x->next;
}

/* `lock` held. */
static ar_status await_answer(ari_control *c, const exchange *x)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), c->timeout_ns);
    while (!x->answer && c->st == AR_OK) {
        if (ari_cond_wait_until(&c->changed, &c->lock, deadline) == ETIMEDOUT && !x->answer)
            return AR_ERR_TIMEOUT;
    }
    return x->answer ? AR_OK : AR_ERR_ABORTED;
}

ar_status ari_control_exchange(ari_control *c, uint64_t group, uint64_t seq, int index, int n, const void *bytes,
                               size_t size, ari_gather_result *gives)
{
    exchange x = {.id = {.group = group, .seq = seq, .index = index, .n = n}};
    const size_t head = sizeof x.id + ((size_t)n + 1) * sizeof(size_t);
    AR_TRY(ari_control_status(c));
    pthread_mutex_lock(&c->lock);
    x.next = c->exchanges;
    c->exchanges = &x;
    pthread_mutex_unlock(&c->lock);
    const bool sent = send_message(c, ARI_MESSAGE_EXCHANGE, &x.id, sizeof x.id, bytes, size);
    pthread_mutex_lock(&c->lock);
    ar_status st = sent ? await_answer(c, &x) : AR_ERR_IO;
    if (st == AR_ERR_TIMEOUT) { /* where the others are explains more than that they have not come */
        pthread_mutex_unlock(&c->lock);
        ari_control_late(c);
        pthread_mutex_lock(&c->lock);
        (void)await_failure(c, VERDICT_NS);
    }
    forget(c, &x);
    pthread_mutex_unlock(&c->lock);
    if (st != AR_OK) {
        free(x.answer); /* which came after all */
        AR_TRY(ari_control_status(c));
        return ar_error_set(st, "process 0 does not answer");
    }
    if (x.bytes < head) {
        free(x.answer);
        return ar_error_set(AR_ERR_INTERNAL, "an agreement of %d ranks has %zu bytes", n, x.bytes);
    }
    *gives = (ari_gather_result){
        .memory = x.answer, .start = (const size_t *)(const void *)(x.answer + sizeof x.id), .at = x.answer + head};
    return AR_OK;
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

static void take_answer(ari_control *c, char *bytes, size_t size)
{
    ari_exchange_id id;
    memcpy(&id, bytes, sizeof id);
    pthread_mutex_lock(&c->lock);
    for (exchange *x = c->exchanges; x; x = x->next) {
        if (x->id.group == id.group && x->id.seq == id.seq && !x->answer) {
            x->answer = bytes;
            x->bytes = size;
            bytes = NULL;
            pthread_cond_broadcast(&c->changed);
            break;
        }
    }
    pthread_mutex_unlock(&c->lock);
    free(bytes); /* where no call waits for it any more */
}

static void send_view(ari_control *c)
{
    size_t bytes = 0;
    pthread_mutex_lock(&c->watch_lock);
    void *view = c->watcher.view ? c->watcher.view(c->watcher.user, &bytes) : NULL;
    pthread_mutex_unlock(&c->watch_lock);
    if (!send_message(c, ARI_MESSAGE_VIEW, view, view ? bytes : 0, NULL, 0))
        keep_failure(c, AR_ERR_ABORTED, "process 0 takes no word any more");
    free(view);
}

static void set_all_bye(ari_control *c)
{
    pthread_mutex_lock(&c->lock);
    c->all_bye = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

/* False: nothing more comes. */
static bool receive(ari_control *c)
{
    const ari_net_limit l = {.idle_ns = c->timeout_ns, .wake_fd = c->stop_fd};
    ari_message_head head;
    char *bytes = NULL;
    if (ari_message_read(c->fd, &head, &bytes, &l) != ARI_NET_OK) {
        pthread_mutex_lock(&c->lock);
        const bool expected = c->all_bye;
        pthread_mutex_unlock(&c->lock);
        if (!expected)
            keep_failure(c, AR_ERR_ABORTED, "rank 0 is gone: its connection was closed");
        return false;
    }
    const size_t size = (size_t)head.bytes;
    if (head.kind == ARI_MESSAGE_EXCHANGED && size >= sizeof(ari_exchange_id)) {
        take_answer(c, bytes, size);
        return true;
    }
    if (head.kind == ARI_MESSAGE_FAILED && size >= sizeof(ari_control_verdict)) {
        ari_control_verdict v;
        memcpy(&v, bytes, sizeof v);
        keep_failure(c, v.own ? (ar_status)v.status : AR_ERR_ABORTED, bytes + sizeof v);
    } else if (head.kind == ARI_MESSAGE_SHOW) {
        send_view(c);
    } else if (head.kind == ARI_MESSAGE_ALL_BYE) {
        set_all_bye(c);
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
            open = receive(c);
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
    if (c->watcher.failed && failed_within(c, 0)) /* before there was a watcher */
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
    pthread_mutexattr_t again; /* a watcher may find the failure itself */
    pthread_mutexattr_init(&again);
    pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&c->watch_lock, &again);
    pthread_mutexattr_destroy(&again);
    pthread_mutex_init(&c->write_lock, NULL); /* mutexes of Linux need nothing that could be missing */
    pthread_mutex_init(&c->lock, NULL);
    const int rc = ari_cond_init(&c->changed);
    return rc == 0 ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no condition variable: %s", strerror(rc));
}

static void free_control(ari_control *c)
{
    const int fds[] = {c->fd, c->wake_fd, c->stop_fd};
    ari_coordinator_destroy(c->coordinator);
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
    c->timeout_ns = o->timeout_ns;
    c->fd = o->fd;
    c->wake_fd = c->stop_fd = -1;
    ar_status st = AR_OK;
    if (o->clients)
        st = ari_coordinator_create(&c->coordinator, &c->fd, o->size, o->clients, o->names);
    if (st == AR_OK)
        st = init_locks(c);
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

/* Waits until no process needs another any more. */
static void take_leave(ari_control *c)
{
    if (!send_message(c, ARI_MESSAGE_BYE, NULL, 0, NULL, 0))
        return;
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), c->timeout_ns);
    pthread_mutex_lock(&c->lock);
    while (!c->all_bye && c->st == AR_OK) {
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
