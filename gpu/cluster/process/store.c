/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/store.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/cluster/process/server.h"
#include "ref/core/clock.h"
#include "ref/core/os/threads.h"
#include "ref/core/size.h"

/* Longest wait for the server's answer to a failure, above what it waits for views. */
#define VERDICT_NS UINT64_C(1500000000)
/* Time that the server's answer to joining processes may take after the timeout: it names the missing ones. */
#define ANSWER_NS UINT64_C(300000000)
/* Message with a host and a port. */
#define NOT_LET_IN \
    "what listens at %.128s, port %d, has not let this process in for so long; process 0 knows who is missing"
enum { RETRY_MS = 50 };

/* A value that this process waits for. */
typedef struct wanted {
    struct wanted *next;
    ari_store_value is;
    char *answer;
    size_t bytes;
} wanted;

struct ari_store {
    ari_store_options is;
    int fd, stop[2];    /* the first can be read once the second was written */
    ari_server *server; /* of process 0 */
    pthread_t thread;
    bool started;
    pthread_mutex_t write_lock; /* of fd's other direction */
    pthread_mutex_t watch_lock; /* held while a watcher is called */
    ari_watcher watcher;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* guarded by `lock` */
    _Atomic(ar_status) st; /* of those whom the failure is about; set after what follows, which then stays */
    bool own;              /* this process is one of them */
    char *text;
    wanted *wanted;
    uint64_t *left_ns; /* [size] */
    bool welcome, said_bye, all_bye;
};

/* --- messages ----------------------------------------------------------------------------------------------------- */

static bool send_message(ari_store *s, ari_message kind, const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const ari_net_limit l = {.idle_ns = s->is.timeout_ns, .wake_fd = s->stop[0]};
    pthread_mutex_lock(&s->write_lock);
    const ari_net_end end = ari_message_write(s->fd, kind, a, a_bytes, b, b_bytes, &l);
    pthread_mutex_unlock(&s->write_lock);
    return end == ARI_NET_OK;
}

/* --- the end of the world ----------------------------------------------------------------------------------------- */

static void keep_verdict(ari_store *s, ari_store_verdict v, const char *text)
{
    pthread_mutex_lock(&s->lock);
    const bool first = s->st == AR_OK;
    if (first) {
        s->text = strdup(text);
        s->own = v.own != 0;
        s->st = (ar_status)v.status;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    if (!first)
        return;
    pthread_mutex_lock(&s->watch_lock);
    if (s->watcher.failed)
        s->watcher.failed(s->watcher.user);
    pthread_mutex_unlock(&s->watch_lock);
}

static void keep_failure(ari_store *s, ar_status st, const char *text)
{
    keep_verdict(s, (ari_store_verdict){.status = st, .own = true}, text);
}

ar_status ari_store_failure(const ari_store *s, bool *own, const char **text)
{
    const ar_status st = atomic_load(&s->st);
    *own = st != AR_OK && s->own;
    *text = st == AR_OK ? "" : s->text ? s->text : ar_status_text(st);
    return st;
}

ar_status ari_store_status(ari_store *s)
{
    bool own;
    const char *text;
    const ar_status st = ari_store_failure(s, &own, &text);
    return st == AR_OK ? AR_OK : ar_error_set(own ? st : AR_ERR_ABORTED, "%s", text);
}

/* `lock` held. Until *flag, where there is one, or a failure; false: `ns` were over before. */
static bool await_change(ari_store *s, const bool *flag, uint64_t ns)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), ns);
    while (s->st == AR_OK && !(flag && *flag)) {
        if (ari_cond_wait_until(&s->changed, &s->lock, deadline) == ETIMEDOUT)
            return s->st != AR_OK || (flag && *flag);
    }
    return true;
}

static bool changed_within(ari_store *s, const bool *flag, uint64_t ns)
{
    pthread_mutex_lock(&s->lock);
    const bool changed = await_change(s, flag, ns);
    pthread_mutex_unlock(&s->lock);
    return changed;
}

/* The server's answer comes by the store's own thread, which cannot wait for itself. */
static void end_world(ari_store *s, ari_message kind, const ari_store_verdict *v, size_t bytes, const char *why)
{
    const bool in_thread = pthread_equal(pthread_self(), s->thread);
    if (changed_within(s, NULL, 0))
        return;
    const bool sent = send_message(s, kind, v, bytes, why, strlen(why));
    if (!sent || !(in_thread || changed_within(s, NULL, VERDICT_NS)))
        keep_failure(s, (ar_status)v->status, why);
}

void ari_store_fail(ari_store *s, ar_status st, const char *why)
{
    const ari_store_verdict v = {.status = st};
    end_world(s, ARI_MESSAGE_FAIL, &v, sizeof v, why);
}

void ari_store_report(ari_store *s, ar_status st, const int *rank, int n, const char *line)
{
    const size_t ranks = (size_t)n * sizeof *rank;
    ARI_OWNED ari_store_verdict *v = malloc(sizeof *v + ranks);
    if (!v) {
        ari_store_fail(s, st, line);
        return;
    }
    *v = (ari_store_verdict){.status = st, .own = n};
    memcpy(v + 1, rank, ranks);
    end_world(s, ARI_MESSAGE_REPORT, v, sizeof *v + ranks, line);
}

void ari_store_agree_failed(ari_store *s, ar_status st)
{
    const ari_store_verdict v = {.status = st};
    char why[1024];
    snprintf(why, sizeof why, "%s", ar_error_message());
    keep_failure(s, st, why);
    (void)send_message(s, ARI_MESSAGE_FAIL, &v, sizeof v, why, strlen(why)); /* the others of the group send it too */
    (void)ar_error_set(st, "%s", why);
}

static void be_late(ari_store *s, const ari_store_value *v, const char *who)
{
    if (!changed_within(s, NULL, 0) &&
        !send_message(s, ARI_MESSAGE_LATE, v, v ? sizeof *v : 0, who, who ? strlen(who) : 0))
        keep_failure(s, AR_ERR_TIMEOUT, "a rank waited too long, and process 0 does not hear of it");
}

void ari_store_late(ari_store *s)
{
    be_late(s, NULL, NULL);
}

/* --- values ------------------------------------------------------------------------------------------------------- */

ar_status ari_store_set(ari_store *s, const ari_store_value *v, const void *bytes, size_t size)
{
    AR_TRY(ari_store_status(s));
    if (send_message(s, ARI_MESSAGE_SET, v, sizeof *v, bytes, size))
        return AR_OK;
    (void)changed_within(s, NULL, VERDICT_NS); /* why it does not, if that becomes known */
    AR_TRY(ari_store_status(s));
    return ar_error_set(AR_ERR_IO, "process 0 takes nothing from this process");
}

/* `lock` held. */
static void forget(ari_store *s, const wanted *x)
{
    wanted **at = &s->wanted;
    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
}

/* `lock` held. False: it did not come in time. */
static bool await_answer(ari_store *s, const wanted *x, uint64_t timeout_ns)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), timeout_ns);
    while (!x->answer && s->st == AR_OK) {
        if (ari_cond_wait_until(&s->changed, &s->lock, deadline) == ETIMEDOUT && !x->answer)
            return false;
    }
    return true;
}

/* From now on the answer to x is kept, and asked for. */
static bool ask(ari_store *s, wanted *x)
{
    pthread_mutex_lock(&s->lock);
    x->next = s->wanted;
    s->wanted = x;
    pthread_mutex_unlock(&s->lock);
    return send_message(s, ARI_MESSAGE_GET, &x->is, sizeof x->is, NULL, 0);
}

/* The answer to x, which was asked for. An answer that has come is given, whatever has failed since. */
static ar_status take_answer(ari_store *s, wanted *x, bool asked, uint64_t timeout_ns, const char *who,
                             ari_gather_result *gives)
{
    const size_t head = sizeof x->is + ((size_t)x->is.n + 1) * sizeof(size_t);
    pthread_mutex_lock(&s->lock);
    const bool in_time = await_answer(s, x, timeout_ns);
    if (!in_time || !asked) { /* who is missing explains more than that this has not come */
        pthread_mutex_unlock(&s->lock);
        be_late(s, &x->is, who);
        pthread_mutex_lock(&s->lock);
        (void)await_change(s, NULL, VERDICT_NS);
    }
    forget(s, x);
    pthread_mutex_unlock(&s->lock);
    if (x->answer && in_time && x->bytes >= head) {
        *gives = (ari_gather_result){.memory = x->answer,
                                     .start = (const size_t *)(const void *)(x->answer + sizeof x->is),
                                     .at = x->answer + head};
        memcpy(&gives->number, x->answer + offsetof(ari_store_value, number), sizeof gives->number);
        return AR_OK;
    }
    free(x->answer);
    AR_TRY(ari_store_status(s));
    return ar_error_set(AR_ERR_TIMEOUT, "process 0 does not answer");
}

ar_status ari_store_get(ari_store *s, const ari_store_value *v, uint64_t timeout_ns, const char *who,
                        ari_gather_result *gives)
{
    wanted x = {.is = *v};
    AR_TRY(ari_store_status(s));
    const bool asked = ask(s, &x);
    return take_answer(s, &x, asked, timeout_ns, who, gives);
}

/* Asked for before the own part is there: so every member gets the whole at the same time, before a failure to which it
 * leads one of the others. */
ar_status ari_store_exchange(ari_store *s, uint64_t group, uint64_t seq, int index, int n, const void *bytes,
                             size_t size, ari_gather_result *gives)
{
    wanted x = {.is = {.group = group, .seq = seq, .index = index, .n = n, .readers = n}};
    AR_TRY(ari_store_status(s));
    const bool asked = ask(s, &x);
    const ar_status st = ari_store_set(s, &x.is, bytes, size);
    if (st == AR_OK)
        return take_answer(s, &x, asked, s->is.timeout_ns, NULL, gives);
    pthread_mutex_lock(&s->lock);
    forget(s, &x);
    pthread_mutex_unlock(&s->lock);
    free(x.answer);
    return st;
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

/* Keeps `bytes`. */
static void take_value(ari_store *s, char *bytes, size_t size)
{
    ari_store_value v;
    memcpy(&v, bytes, sizeof v);
    pthread_mutex_lock(&s->lock);
    for (wanted *x = s->wanted; x; x = x->next) {
        if (x->is.group == v.group && x->is.seq == v.seq && !x->answer) {
            x->answer = bytes;
            x->bytes = size;
            bytes = NULL;
            pthread_cond_broadcast(&s->changed);
            break;
        }
    }
    pthread_mutex_unlock(&s->lock);
    free(bytes); /* where no call waits for it any more */
}

static void send_view(ari_store *s)
{
    pthread_mutex_lock(&s->watch_lock);
    ARI_OWNED char *view = s->watcher.view ? s->watcher.view(s->watcher.user) : NULL;
    pthread_mutex_unlock(&s->watch_lock);
    if (!send_message(s, ARI_MESSAGE_VIEW, view, view ? strlen(view) : 0, NULL, 0))
        keep_failure(s, AR_ERR_ABORTED, "process 0 takes no word any more");
}

static void take_departure(ari_store *s, const char *bytes)
{
    int32_t rank;
    memcpy(&rank, bytes, sizeof rank);
    pthread_mutex_lock(&s->lock);
    if (rank >= 0 && rank < s->is.size)
        s->left_ns[rank] = ari_now_ns();
    pthread_mutex_unlock(&s->lock);
}

static void set_flag(ari_store *s, bool *flag)
{
    pthread_mutex_lock(&s->lock);
    *flag = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void end_connection(ari_store *s)
{
    pthread_mutex_lock(&s->lock);
    const bool welcome = s->welcome, expected = s->all_bye;
    pthread_mutex_unlock(&s->lock);
    if (!welcome)
        keep_failure(s, AR_ERR_IO, "process 0 has ended before all had come");
    else if (!expected)
        keep_failure(s, AR_ERR_ABORTED, "rank 0 is gone: its connection was closed");
}

/* False: nothing more comes. */
static bool receive(ari_store *s)
{
    const ari_net_limit l = {.idle_ns = s->is.timeout_ns, .wake_fd = s->stop[0]};
    ari_message_head head;
    char *bytes = NULL;
    if (ari_message_read(s->fd, &head, &bytes, &l) != ARI_NET_OK) {
        end_connection(s);
        return false;
    }
    const size_t size = (size_t)head.bytes;
    if (head.kind == ARI_MESSAGE_VALUE && size >= sizeof(ari_store_value)) {
        take_value(s, bytes, size);
        return true;
    }
    if (head.kind == ARI_MESSAGE_FAILED && size >= sizeof(ari_store_verdict)) {
        ari_store_verdict v;
        memcpy(&v, bytes, sizeof v);
        keep_verdict(s, v, bytes + sizeof v);
    } else if (head.kind == ARI_MESSAGE_LEFT && size >= sizeof(int32_t)) {
        take_departure(s, bytes);
    } else if (head.kind == ARI_MESSAGE_SHOW) {
        send_view(s);
    } else if (head.kind == ARI_MESSAGE_WELCOME) {
        set_flag(s, &s->welcome);
    } else if (head.kind == ARI_MESSAGE_ALL_BYE) {
        set_flag(s, &s->all_bye);
    }
    free(bytes);
    return true;
}

static void *listen_main(void *arg)
{
    ari_store *s = arg;
    for (bool open = true;;) {
        struct pollfd p[2] = {{.fd = s->stop[0], .events = POLLIN}, {.fd = s->fd, .events = POLLIN}};
        const int ready = poll(p, open ? 2 : 1, ARI_TICK_MS);
        if ((ready < 0 && errno != EINTR) || (ready > 0 && p[0].revents))
            return NULL;
        if (ready > 0 && open && p[1].revents)
            open = receive(s);
        pthread_mutex_lock(&s->watch_lock);
        if (s->watcher.tick)
            s->watcher.tick(s->watcher.user);
        pthread_mutex_unlock(&s->watch_lock);
    }
}

void ari_store_watch(ari_store *s, const ari_watcher *w)
{
    pthread_mutex_lock(&s->watch_lock);
    s->watcher = w ? *w : (ari_watcher){.user = NULL};
    if (s->watcher.failed && changed_within(s, NULL, 0)) /* before there was a watcher */
        s->watcher.failed(s->watcher.user);
    pthread_mutex_unlock(&s->watch_lock);
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

static ar_status init_locks(ari_store *s)
{
    pthread_mutexattr_t again; /* a watcher may find the failure itself */
    pthread_mutexattr_init(&again);
    pthread_mutexattr_settype(&again, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&s->watch_lock, &again);
    pthread_mutexattr_destroy(&again);
    pthread_mutex_init(&s->write_lock, NULL); /* mutexes of Linux need nothing that could be missing */
    pthread_mutex_init(&s->lock, NULL);
    const int rc = ari_cond_init(&s->changed);
    return rc == 0 ? ari_net_pair(s->stop) : ar_error_set(AR_ERR_MEMORY, "no lock for what processes share");
}

static void free_store(ari_store *s)
{
    if (!s)
        return;
    if (s->started && write(s->stop[1], "", 1) == 1)
        pthread_join(s->thread, NULL);
    if (s->fd >= 0)
        close(s->fd); /* the server waits until its clients have */
    ari_server_destroy(s->server);
    for (int i = 0; i < 2 && s->stop[0] >= 0; i++)
        close(s->stop[i]);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    pthread_mutex_destroy(&s->watch_lock);
    pthread_mutex_destroy(&s->write_lock);
    free(s->left_ns);
    free(s->text);
    free(s);
}
ARI_OWNER(ari_store, free_store)

/* Why process 0 and this process do not belong together. */
static ar_status turned_away(const ari_store *s, ari_heard heard)
{
    char text[256];
    const char *host = s->is.host;
    if (heard == ARI_HEARD_NOTHING)
        return ar_error_set(AR_ERR_TIMEOUT, NOT_LET_IN, host, s->is.port);
    if (heard == ARI_HEARD_PART)
        return ar_error_set(AR_ERR_IO,
                            "what listens at %.128s, port %d, closed the connection: process 0 has ended, or the port "
                            "is another program's (ANYRANK_PORT chooses another one)",
                            host, s->is.port);
    if (heard == ARI_HEARD_STRANGER)
        return ar_error_set(AR_ERR_IO,
                            "what listens at %.128s, port %d, is no process 0 of this program: choose another port by "
                            "ANYRANK_PORT, the same for all processes",
                            host, s->is.port);
    ari_heard_explain(text, sizeof text, heard, heard == ARI_HEARD_NO_KEY ? !s->is.key.is_set : s->is.key.is_set,
                      "this process");
    return ar_error_set(AR_ERR_ARG, "%s (process 0 at %.128s, port %d)", text, host, s->is.port);
}

/* Again where process 0, to which strangers may come by the hundred, made room for others. */
static ar_status connect_to_server(ari_store *s, uint64_t deadline_ns)
{
    const ari_hello hello = ari_hello_of(&s->is);
    ari_opening own;
    if (s->is.rank == 0)
        return ari_server_create(&s->server, &s->fd, &s->is);
    for (;;) {
        AR_TRY(ari_opening_make(&own, &s->is.key));
        AR_TRY(ari_net_connect(&s->fd, s->is.host, s->is.port, deadline_ns));
        const ari_heard heard = ari_handshake_ask(s->fd, &s->is.key, &own, &hello, deadline_ns);
        if (heard == ARI_HEARD_PROCESS)
            return AR_OK;
        close(s->fd);
        s->fd = -1;
        if (heard != ARI_HEARD_PART || ari_now_ns() >= deadline_ns)
            return turned_away(s, heard);
        (void)poll(NULL, 0, RETRY_MS);
    }
}

static ar_status join_store(ari_store *s)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), s->is.timeout_ns);
    AR_TRY(connect_to_server(s, deadline));
    const int rc = ari_thread_create(&s->thread, listen_main, s);
    s->started = rc == 0;
    if (rc != 0)
        return ar_error_set(AR_ERR_MEMORY, "no thread for what processes share: %s", strerror(rc));
    const uint64_t now = ari_now_ns(), end = ari_deadline_ns(deadline, ANSWER_NS);
    if (!changed_within(s, &s->welcome, end > now ? end - now : 0))
        return ar_error_set(AR_ERR_TIMEOUT, NOT_LET_IN, s->is.host, s->is.port);
    pthread_mutex_lock(&s->lock);
    const bool welcome = s->welcome; /* then a failure is one of what follows */
    pthread_mutex_unlock(&s->lock);
    return welcome ? AR_OK : ari_store_status(s);
}

ar_status ari_store_create(ari_store **gives, const ari_store_options *o)
{
    ARI_OWNED_BY(free_store) ari_store *s = NULL;
    *gives = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&s, 1, "what processes share"));
    s->is = *o;
    s->fd = s->stop[0] = s->stop[1] = -1;
    AR_TRY(init_locks(s));
    AR_TRY(ARI_ALLOC_ZERO(&s->left_ns, (size_t)o->size, "what processes share"));
    AR_TRY(join_store(s));
    ARI_GIVE(gives, s);
    return AR_OK;
}

uint64_t ari_store_left_ns(ari_store *s, int rank)
{
    pthread_mutex_lock(&s->lock);
    const uint64_t since = s->left_ns[rank];
    pthread_mutex_unlock(&s->lock);
    return since;
}

bool ari_store_leave(ari_store *s, uint64_t after_failure_ns)
{
    const bool sent = s->said_bye || send_message(s, ARI_MESSAGE_BYE, NULL, 0, NULL, 0);
    s->said_bye = true;
    pthread_mutex_lock(&s->lock);
    if (sent)
        (void)await_change(s, &s->all_bye, s->is.timeout_ns);
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), after_failure_ns);
    while (sent && s->st != AR_OK && !s->all_bye && ari_cond_wait_until(&s->changed, &s->lock, deadline) != ETIMEDOUT) {
    }
    const bool all = s->all_bye;
    pthread_mutex_unlock(&s->lock);
    return all;
}

void ari_store_destroy(ari_store *s)
{
    if (!s)
        return;
    ari_store_watch(s, NULL);
    if (!s->said_bye)
        (void)ari_store_leave(s, 0);
    free_store(s);
}
