/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/server.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gpu/cluster/process/door.h"
#include "gpu/cluster/process/flight.h"
#include "ref/core/clock.h"
#include "ref/core/os/threads.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

/* Clients read at once, whatever their process does: one that does not take a message for so long is lost. */
#define CLIENT_NS UINT64_C(5000000000)
/* Longest wait for views, once one process is late. */
#define VIEWS_NS UINT64_C(500000000)
/* After a refusal: for those that are about to connect, and are to be told too. */
#define LINGER_NS UINT64_C(1000000000)

typedef struct client {
    int fd; /* -1: not come yet, or gone */
    char name[ARI_NAME_BYTES];
} client;

typedef struct part {
    bool is_set;
    char *message; /* SET's, with the part behind the value's name */
    size_t size;
} part;

typedef struct value {
    struct value *next;
    ari_store_value is; /* index: of the process that named it first */
    int come, got;
    bool *awaited; /* [size]: by this client */
    part part[];   /* [is.n] */
} value;

struct ari_server {
    ari_store_options is;
    int size;
    client *client;
    ari_flight_view *view; /* [size] */
    ari_door door;
    bool joining;
    int missing; /* clients that have not come */
    uint64_t join_until_ns;
    ar_status refusal; /* the first, of a process of this job: none can begin */
    char why[400];
    struct pollfd *poll; /* [1 + ARI_DOOR_POLLED + size] */
    value *values;
    bool failed, asked; /* asked: for views */
    int first_late, byes;
    ar_status
        verdict; /* of a report that names its reason, `line`, and `own`, whom it is about; AR_OK: the views say */
    char line[1024];
    bool *own; /* [size] */
    uint64_t views_until_ns;
    uint64_t numbers; /* of values */
    int stop[2];      /* the first can be read once the second was written */
    pthread_t thread;
    bool started;
};

/* --- what ends the world ------------------------------------------------------------------------------------------ */

static void lose(ari_server *s, int r, const char *how);

static void send_to(ari_server *s, int r, ari_message kind, const void *a, size_t a_bytes, const void *b,
                    size_t b_bytes)
{
    const ari_net_limit l = {.idle_ns = CLIENT_NS, .wake_fd = -1};
    if (s->client[r].fd < 0)
        return;
    if (ari_message_write(s->client[r].fd, kind, a, a_bytes, b, b_bytes, &l) != ARI_NET_OK)
        lose(s, r, "takes no word any more");
}

/* To process 0 last: it may end at once, and the server with it. own: [size], whom it is about; NULL: `rank` alone, or
 * none, -1, or all, size. */
static void fail_job(ari_server *s, ar_status st, const bool *own, int rank, const char *text)
{
    if (s->failed)
        return;
    s->failed = true;
    for (int r = s->size - 1; r >= 0; r--) {
        const ari_store_verdict v = {.status = st, .own = own ? own[r] : r == rank || rank == s->size};
        send_to(s, r, ARI_MESSAGE_FAILED, &v, sizeof v, text, strlen(text));
    }
}

static void lose(ari_server *s, int r, const char *how)
{
    client *from = &s->client[r];
    char text[256];
    if (from->fd < 0)
        return;
    close(from->fd);
    from->fd = -1;
    snprintf(text, sizeof text, "rank %d (%s) %s", r, ARI_SHOW(from->name), how);
    if (!s->view[r].left)
        fail_job(s, AR_ERR_ABORTED, NULL, -1, text);
}

/* --- coming together ---------------------------------------------------------------------------------------------- */

static void refuse(ari_server *s, int fd, ar_status st, const char *text)
{
    struct {
        ari_message_head head;
        ari_store_verdict verdict;
        char text[sizeof s->why];
    } words = {.verdict = {.status = st, .own = true}};
    snprintf(words.text, sizeof words.text, "%s", text);
    const size_t bytes = sizeof words.verdict + strlen(words.text);
    words.head = ari_message_head_of(ARI_MESSAGE_FAILED, bytes);
    ari_door_see_off(&s->door, fd, &words, sizeof words.head + bytes);
}

/* "" if there is a place for this process. */
static void find_refusal(const ari_server *s, const ari_hello *from, char *text, size_t size)
{
    text[0] = '\0';
    if ((int)from->size != s->size)
        snprintf(text, size, "rank %u (%s) was started as one of %u processes, process 0 as one of %d", from->rank,
                 ARI_SHOW(from->name), from->size, s->size);
    else if (from->rank == 0 || from->rank >= (uint32_t)s->size)
        snprintf(text, size, "another rank %u (%s) has come, of ranks 0 to %d", from->rank, ARI_SHOW(from->name),
                 s->size - 1);
    else if (s->client[from->rank].fd >= 0)
        snprintf(text, size, "two processes have rank %u: %s and %s", from->rank, ARI_SHOW(s->client[from->rank].name),
                 ARI_SHOW(from->name));
}

static void admit(void *server, const ari_hello *from, int fd)
{
    ari_server *s = server;
    char text[sizeof s->why];
    if (from->job != s->is.job) {
        refuse(
            s, fd, AR_ERR_ARG,
            "the port belongs to another job: ANYRANK_PORT chooses another one, the same for all processes of a job");
        return;
    }
    find_refusal(s, from, text, sizeof text);
    if (!text[0] && s->refusal == AR_OK) {
        s->client[from->rank].fd = fd;
        memcpy(s->client[from->rank].name, from->name, ARI_NAME_BYTES);
        s->missing--;
        return;
    }
    if (s->refusal == AR_OK) {
        const uint64_t end = ari_now_ns() + LINGER_NS;
        s->refusal = AR_ERR_ARG;
        memcpy(s->why, text, sizeof text);
        s->join_until_ns = end < s->join_until_ns ? end : s->join_until_ns;
    }
    refuse(s, fd, s->refusal, s->why);
}

/* "1, 3, 5" */
static void list_missing(const ari_server *s, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int r = 1; r < s->size && used + 16 < size; r++) {
        if (s->client[r].fd < 0)
            used += (size_t)snprintf(text + used, size - used, "%s%d", used > 0 ? ", " : "", r);
    }
    if (used + 16 >= size)
        snprintf(text + used, size - used, ", ...");
}

/* Begins where all have come, and gives up where some have not in time. */
static void end_joining(ari_server *s)
{
    char who[128], text[512];
    if (s->missing > 0 && !s->failed && ari_now_ns() < s->join_until_ns)
        return;
    if (s->refusal != AR_OK) {
        fail_job(s, s->refusal, NULL, s->size, s->why);
    } else if (s->missing > 0) {
        list_missing(s, who, sizeof who);
        snprintf(text, sizeof text, "of %d processes these have not come within %.1f s: rank %s%s%s", s->size,
                 (double)s->is.timeout_ns * 1e-9, who, s->door.refused[0] ? "; " : "", s->door.refused);
        fail_job(s, AR_ERR_TIMEOUT, NULL, s->size, text);
    }
    ari_door_close(&s->door);
    s->joining = false;
    for (int r = s->size - 1; r >= 0 && !s->failed; r--)
        send_to(s, r, ARI_MESSAGE_WELCOME, NULL, 0, NULL, 0);
}

/* --- who is where ------------------------------------------------------------------------------------------------- */

static void report_ranks(ari_server *s)
{
    if (s->verdict == AR_OK)
        s->verdict = ari_flight_judge(s->view, s->size, s->first_late, s->own, s->line, sizeof s->line);
    ARI_OWNED char *text = ari_flight_report(s->view, s->size, s->line);
    fail_job(s, s->verdict, s->own, -1, text ? text : s->line);
}

static void ask_for_views(ari_server *s, int late)
{
    if (s->asked || s->failed)
        return;
    s->asked = true;
    s->first_late = late;
    s->views_until_ns = ari_now_ns() + VIEWS_NS;
    for (int r = 0; r < s->size; r++)
        send_to(s, r, ARI_MESSAGE_SHOW, NULL, 0, NULL, 0);
}

/* Takes a report about these ranks, now that the views are here. */
static void take_report(ari_server *s, int r, const char *message, size_t size)
{
    ari_store_verdict v;
    memcpy(&v, message, sizeof v);
    if (s->asked || s->failed || v.own < 0 || (size_t)v.own > (size - sizeof v) / sizeof(int32_t))
        return;
    for (int i = 0; i < v.own; i++) {
        int32_t rank;
        memcpy(&rank, message + sizeof v + (size_t)i * sizeof rank, sizeof rank);
        if (rank >= 0 && rank < s->size)
            s->own[rank] = true;
    }
    s->verdict = (ar_status)v.status;
    snprintf(s->line, sizeof s->line, "%s", message + sizeof v + (size_t)v.own * sizeof(int32_t));
    ask_for_views(s, r);
}

static void take_view(ari_server *s, int r, char *view)
{
    free(s->view[r].text);
    s->view[r].text = view;
    bool all = true;
    for (int i = 0; i < s->size; i++)
        all = all && (s->view[i].text || s->client[i].fd < 0);
    if (all && s->asked)
        report_ranks(s);
}

/* --- values ------------------------------------------------------------------------------------------------------- */

static void forget(ari_server *s, value *x)
{
    value **at = &s->values;
    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
    for (int i = 0; i < x->is.n; i++)
        free(x->part[i].message);
    free(x->awaited);
    free(x);
}

static const char *name_of(const ari_store_value *v)
{
    return v->group != 0 ? "collective" : v->n == 1 ? "broadcast" : "gather";
}

/* The value of that name, perhaps a new one. NULL: the world has ended, for two do not mean the same by it. */
static value *value_of(ari_server *s, int r, const ari_store_value *v)
{
    char text[256];
    value *x = s->values;
    while (x && (x->is.group != v->group || x->is.seq != v->seq))
        x = x->next;
    if (x && x->is.n == v->n && x->is.readers == v->readers)
        return x;
    if (x) {
        snprintf(text, sizeof text, "processes disagree: call %llu of rank %d is a %s, that of rank %d a %s",
                 (unsigned long long)v->seq, x->is.index, name_of(&x->is), r, name_of(v));
        fail_job(s, AR_ERR_MISMATCH, NULL, r, text);
        return NULL;
    }
    const bool fits = v->n > 0 && v->n <= s->size && v->readers > 0 && v->readers <= s->size;
    x = fits ? calloc(1, sizeof *x + (size_t)v->n * sizeof *x->part) : NULL;
    bool *awaited = x ? calloc((size_t)s->size, sizeof *awaited) : NULL;
    if (!awaited) {
        free(x);
        fail_job(s, AR_ERR_MEMORY, NULL, r, "process 0 has no memory for what ranks agree upon");
        return NULL;
    }
    x->is = *v;
    x->is.index = r;
    x->is.number = v->group != 0 ? ++s->numbers : 0;
    x->awaited = awaited;
    x->next = s->values;
    s->values = x;
    return x;
}

/* All parts are there: to those who wait. */
static void deliver(ari_server *s, value *x)
{
    const size_t n = (size_t)x->is.n, head = sizeof x->is + (n + 1) * sizeof(size_t);
    size_t total = head, at = 0;
    for (size_t i = 0; i < n; i++)
        total += x->part[i].size;
    ARI_OWNED char *all = malloc(total);
    if (!all) {
        fail_job(s, AR_ERR_MEMORY, NULL, -1, "process 0 has no memory for what ranks agree upon");
        return;
    }
    memcpy(all, &x->is, sizeof x->is);
    for (size_t i = 0; i <= n; i++) {
        const part *p = i < n ? &x->part[i] : NULL;
        memcpy(all + sizeof x->is + i * sizeof at, &at, sizeof at);
        if (p)
            memcpy(all + head + at, p->message + sizeof x->is, p->size);
        at += p ? p->size : 0;
    }
    for (int r = 0; r < s->size; r++) {
        if (!x->awaited[r])
            continue;
        x->awaited[r] = false;
        x->got++;
        send_to(s, r, ARI_MESSAGE_VALUE, all, total, NULL, 0);
    }
    if (x->got == x->is.readers)
        forget(s, x);
}

/* True: `message`, which begins with a value's name, is kept. */
static bool take_part(ari_server *s, int r, ari_message kind, char *message, size_t size)
{
    ari_store_value v;
    memcpy(&v, message, sizeof v);
    value *x = value_of(s, r, &v);
    const bool sets = kind == ARI_MESSAGE_SET;
    if (!x)
        return false;
    if (sets && (v.index < 0 || v.index >= v.n || x->part[v.index].is_set)) {
        char text[160];
        snprintf(text, sizeof text, "rank %d enters a rendezvous that it is not a member of", r);
        fail_job(s, AR_ERR_INTERNAL, NULL, r, text);
        return false;
    }
    if (sets) {
        x->part[v.index] = (part){.is_set = true, .message = message, .size = size - sizeof v};
        x->come++;
    }
    x->awaited[r] = x->awaited[r] || !sets;
    bool is_awaited = false;
    for (int i = 0; i < s->size; i++)
        is_awaited = is_awaited || x->awaited[i];
    if (is_awaited && x->come == x->is.n)
        deliver(s, x);
    return sets;
}

/* A process waits too long: of group 0 the server knows for whom. */
static void take_late(ari_server *s, int r, const char *message, size_t size)
{
    ari_store_value v = {.group = 1};
    char text[512];
    if (size >= sizeof v)
        memcpy(&v, message, sizeof v);
    value *x = v.group == 0 ? value_of(s, r, &v) : NULL;
    if (!x) {
        ask_for_views(s, r);
        return;
    }
    size_t used = (size_t)snprintf(text, sizeof text, "%.256s for rank", message + sizeof v);
    for (int i = 0, k = 0; i < x->is.n && used + 16 < sizeof text; i++) {
        if (!x->part[i].is_set)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s %d", k++ > 0 ? "," : "", i);
    }
    fail_job(s, AR_ERR_TIMEOUT, NULL, r, text);
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

static void take_bye(ari_server *s, int r)
{
    const int32_t rank = r;
    if (s->view[r].left)
        return;
    s->view[r].left = true;
    for (int i = 0; i < s->size; i++)
        send_to(s, i, ARI_MESSAGE_LEFT, &rank, sizeof rank, NULL, 0);
    if (++s->byes < s->size)
        return;
    for (int i = s->size - 1; i >= 0; i--)
        send_to(s, i, ARI_MESSAGE_ALL_BYE, NULL, 0, NULL, 0);
}

static void receive(ari_server *s, int r)
{
    const ari_net_limit l = {.idle_ns = CLIENT_NS, .wake_fd = -1};
    ari_message_head head;
    char *bytes = NULL;
    const ari_net_end end = ari_message_read(s->client[r].fd, &head, &bytes, &l);
    if (end != ARI_NET_OK) {
        char how[128];
        snprintf(how, sizeof how, "is gone: %s",
                 end == ARI_NET_TIMEOUT ? "it stopped in the middle of a word"
                 : errno == 0           ? "its connection was closed"
                                        : strerror(errno));
        lose(s, r, how);
        return;
    }
    const size_t size = (size_t)head.bytes;
    bool kept = false;
    if (head.kind == ARI_MESSAGE_VIEW) {
        kept = true;
        take_view(s, r, bytes);
    } else if ((head.kind == ARI_MESSAGE_SET || head.kind == ARI_MESSAGE_GET) && size >= sizeof(ari_store_value)) {
        kept = take_part(s, r, (ari_message)head.kind, bytes, size);
    } else if (head.kind == ARI_MESSAGE_FAIL && size >= sizeof(ari_store_verdict)) {
        ari_store_verdict v;
        memcpy(&v, bytes, sizeof v);
        fail_job(s, (ar_status)v.status, NULL, r, bytes + sizeof v);
    } else if (head.kind == ARI_MESSAGE_REPORT && size >= sizeof(ari_store_verdict)) {
        take_report(s, r, bytes, size);
    } else if (head.kind == ARI_MESSAGE_LATE) {
        take_late(s, r, bytes, size);
    } else if (head.kind == ARI_MESSAGE_BYE) {
        take_bye(s, r);
    } else {
        lose(s, r, "speaks another language");
    }
    if (!kept)
        free(bytes);
}

/* Milliseconds until the server has something to do by itself; -1: for ever. */
static int patience_ms(const ari_server *s)
{
    const bool views = s->asked && !s->failed;
    const uint64_t now = ari_now_ns(), until = s->joining ? s->join_until_ns : s->views_until_ns;
    if (!s->joining && !views)
        return -1;
    if (s->joining && s->missing == 0)
        return 0;
    const uint64_t ms = until > now ? (until - now) / 1000000 + 1 : 0;
    return ms > 1000 ? 1000 : (int)ms;
}

/* False: the end. */
static bool one_round(ari_server *s)
{
    struct pollfd *p = s->poll, *door = p + 1;
    p[0] = (struct pollfd){.fd = s->stop[0], .events = POLLIN};
    const int waiting = ari_door_poll(&s->door, door);
    struct pollfd *clients = door + waiting;
    for (int r = 0; r < s->size; r++)
        clients[r] = (struct pollfd){.fd = s->client[r].fd, .events = POLLIN};
    if (poll(p, (nfds_t)(1 + waiting + s->size), patience_ms(s)) < 0 && errno != EINTR)
        return false;
    for (int r = 0; r < s->size; r++) {
        if (clients[r].fd >= 0 && clients[r].revents && s->client[r].fd >= 0)
            receive(s, r);
    }
    ari_door_serve(&s->door, door, waiting, admit, s);
    if (s->joining)
        end_joining(s);
    if (s->asked && !s->failed && ari_now_ns() >= s->views_until_ns)
        report_ranks(s);
    return !p[0].revents;
}

static void *serve(void *arg)
{
    while (one_round(arg)) {
    }
    return NULL;
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

static ar_status begin_server(ari_server *s, int *own_fd)
{
    int pair[2];
    AR_TRY(ARI_ALLOC_ZERO(&s->client, (size_t)s->size, "connections"));
    for (int r = 0; r < s->size; r++)
        s->client[r].fd = -1;
    AR_TRY(ARI_ALLOC_ZERO(&s->view, (size_t)s->size, "connections"));
    AR_TRY(ARI_ALLOC_ZERO(&s->own, (size_t)s->size, "connections"));
    AR_TRY(ARI_ALLOC(&s->poll, (size_t)s->size + 1 + ARI_DOOR_POLLED, "connections"));
    AR_TRY(ari_net_pair(s->stop));
    AR_TRY(ari_net_pair(pair));
    const ari_hello own = ari_hello_of(&s->is);
    s->client[0].fd = pair[0];
    memcpy(s->client[0].name, own.name, ARI_NAME_BYTES);
    *own_fd = pair[1];
    const int rc = ari_thread_create(&s->thread, serve, s);
    s->started = rc == 0;
    if (rc == 0)
        return AR_OK;
    close(*own_fd);
    *own_fd = -1;
    return ar_error_set(AR_ERR_MEMORY, "no thread for what processes share: %s", strerror(rc));
}

ar_status ari_server_create(ari_server **gives, int *own_fd, const ari_store_options *o)
{
    ari_server *s = NULL;
    ar_status st = ARI_ALLOC_ZERO(&s, 1, "what processes share");
    if (st != AR_OK) {
        if (o->listener >= 0)
            close(o->listener);
        return st;
    }
    s->is = *o;
    s->size = o->size;
    s->missing = o->size - 1;
    s->joining = true;
    s->door = (ari_door){.listener = o->listener, .key = o->key};
    s->join_until_ns = ari_deadline_ns(ari_now_ns(), o->timeout_ns);
    s->stop[0] = s->stop[1] = -1;
    st = begin_server(s, own_fd);
    if (st == AR_OK)
        *gives = s;
    else
        ari_server_destroy(s);
    return st;
}

void ari_server_destroy(ari_server *s)
{
    if (!s)
        return;
    if (s->started && write(s->stop[1], "", 1) == 1)
        pthread_join(s->thread, NULL);
    const uint64_t until = ari_now_ns() + ARI_NET_LAST_NS;
    for (int r = 0; s->client && r < s->size; r++) {
        ari_net_close(s->client[r].fd, until);
        if (s->view)
            free(s->view[r].text);
    }
    while (s->values)
        forget(s, s->values);
    ari_door_close(&s->door);
    for (int i = 0; i < 2 && s->stop[0] >= 0; i++)
        close(s->stop[i]);
    free(s->client);
    free(s->view);
    free(s->own);
    free(s->poll);
    free(s);
}
