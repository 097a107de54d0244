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
#include "process/flight.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Clients read at once, whatever their process does: one that does not take a message for so long is lost. */
#define CLIENT_NS UINT64_C(5000000000)
/* Longest wait for views, once one process is late. */
#define VIEWS_NS UINT64_C(500000000)
/* What claims to be longer is no message of ours. */
#define LONGEST_MESSAGE ((uint64_t)1 << 30)

/* --- messages ----------------------------------------------------------------------------------------------------- */

ari_net_end ari_message_write(int fd, ari_message kind, const void *a, size_t a_bytes, const void *b, size_t b_bytes,
                              const ari_net_limit *l)
{
    const ari_message_head head = {.kind = (uint32_t)kind, .bytes = a_bytes + b_bytes};
    ari_net_end end = ari_net_write(fd, &head, sizeof head, l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, a, a_bytes, l);
    if (end == ARI_NET_OK)
        end = ari_net_write(fd, b, b_bytes, l);
    return end;
}

ari_net_end ari_message_read(int fd, ari_message_head *head, char **gives, const ari_net_limit *l)
{
    *gives = NULL;
    const ari_net_end end = ari_net_read(fd, head, sizeof *head, l);
    if (end != ARI_NET_OK)
        return end;
    const bool fits = head->bytes <= LONGEST_MESSAGE;
    char *bytes = fits ? malloc((size_t)head->bytes + 1) : NULL;
    if (!bytes) {
        errno = fits ? ENOMEM : EBADMSG;
        return ARI_NET_GONE;
    }
    bytes[head->bytes] = '\0';
    const ari_net_end rest = ari_net_read(fd, bytes, (size_t)head->bytes, l);
    if (rest == ARI_NET_OK)
        *gives = bytes;
    else
        free(bytes);
    return rest;
}

/* --- the coordinator ---------------------------------------------------------------------------------------------- */

/* What a member of an exchange has sent. */
typedef struct part {
    int client;  /* -1: nothing yet */
    char *bytes; /* begins with the exchange's id */
    size_t size; /* of what follows it */
} part;

/* An exchange that not all members have come to. */
typedef struct exchange {
    struct exchange *next;
    ari_exchange_id id; /* index is not looked at */
    int come;
    part part[]; /* [id.n] */
} exchange;

typedef struct client {
    int fd; /* -1: gone */
    bool said_bye;
    char name[ARI_NAME_BYTES];
    void *view;
    size_t view_bytes;
} client;

struct ari_coordinator {
    int size;
    client *client;
    struct pollfd *poll; /* [size + 1] */
    exchange *exchanges;
    bool failed, asked; /* asked: for views */
    int first_late;
    uint64_t views_until_ns;
    int byes;
    int stop_fd;
    pthread_t thread;
    bool started;
};

static void lose(ari_coordinator *c, int r, const char *how);

static void send_to(ari_coordinator *c, int r, ari_message kind, const void *a, size_t a_bytes, const void *b,
                    size_t b_bytes)
{
    const ari_net_limit l = {.idle_ns = CLIENT_NS, .wake_fd = -1};
    if (c->client[r].fd < 0)
        return;
    if (ari_message_write(c->client[r].fd, kind, a, a_bytes, b, b_bytes, &l) != ARI_NET_OK)
        lose(c, r, "takes no word any more");
}

/* To process 0 last: it may end at once, and the coordinator with it. own: [size], whom it is about; NULL: `rank` alone. */
static void fail(ari_coordinator *c, ar_status st, const bool *own, int rank, const char *text)
{
    if (c->failed)
        return;
    c->failed = true;
    for (int r = c->size - 1; r >= 0; r--) {
        const ari_control_verdict v = {.status = st, .own = own ? own[r] : r == rank};
        send_to(c, r, ARI_MESSAGE_FAILED, &v, sizeof v, text, strlen(text));
    }
}

static void lose(ari_coordinator *c, int r, const char *how)
{
    client *from = &c->client[r];
    char text[256];
    if (from->fd < 0)
        return;
    close(from->fd);
    from->fd = -1;
    snprintf(text, sizeof text, "rank %d (%s) %s", r, from->name, how);
    if (!from->said_bye)
        fail(c, AR_ERR_ABORTED, NULL, -1, text);
}

/* --- who is where ------------------------------------------------------------------------------------------------- */

static void report(ari_coordinator *c)
{
    ari_flight_view *views = calloc((size_t)c->size, sizeof *views);
    bool *own = calloc((size_t)c->size, sizeof *own);
    char *text = NULL;
    ar_status st = AR_ERR_TIMEOUT;
    if (views && own) {
        for (int r = 0; r < c->size; r++)
            views[r] = (ari_flight_view){.bytes = c->client[r].view, .size = c->client[r].view_bytes};
        st = ari_flight_report(views, c->size, c->first_late, own, &text);
    }
    fail(c, st, text ? own : NULL, c->first_late,
         text ? text : "a rank waited too long, and no memory is left to say more");
    free(text);
    free(own);
    free(views);
}

static void ask_for_views(ari_coordinator *c, int late)
{
    if (c->asked || c->failed)
        return;
    c->asked = true;
    c->first_late = late;
    c->views_until_ns = ari_now_ns() + VIEWS_NS;
    for (int r = 0; r < c->size; r++)
        send_to(c, r, ARI_MESSAGE_SHOW, NULL, 0, NULL, 0);
}

static void take_view(ari_coordinator *c, int r, char *bytes, size_t size)
{
    free(c->client[r].view);
    c->client[r].view = bytes;
    c->client[r].view_bytes = size;
    bool all = true;
    for (int i = 0; i < c->size; i++)
        all = all && (c->client[i].view || c->client[i].fd < 0);
    if (all && c->asked)
        report(c);
}

/* --- exchanges ---------------------------------------------------------------------------------------------------- */

static void end_exchange(ari_coordinator *c, exchange *x)
{
    exchange **at = &c->exchanges;
    while (*at != x)
        at = &(*at)->next;
    *at = x->next;
    for (int i = 0; i < x->id.n; i++)
        free(x->part[i].bytes);
    free(x);
}

/* NULL: no memory. */
static exchange *exchange_of(ari_coordinator *c, const ari_exchange_id *id)
{
    exchange *x = c->exchanges;
    while (x && (x->id.group != id->group || x->id.seq != id->seq || x->id.n != id->n))
        x = x->next;
    if (x || !(x = calloc(1, sizeof *x + (size_t)id->n * sizeof *x->part)))
        return x;
    x->id = *id;
    for (int i = 0; i < id->n; i++)
        x->part[i].client = -1;
    x->next = c->exchanges;
    c->exchanges = x;
    return x;
}

/* All have come: everyone gets everything. */
static void share(ari_coordinator *c, const exchange *x)
{
    const size_t n = (size_t)x->id.n, starts = (n + 1) * sizeof(size_t);
    size_t total = sizeof x->id + starts;
    for (size_t i = 0; i < n; i++)
        total += x->part[i].size;
    char *all = malloc(total);
    if (!all) {
        fail(c, AR_ERR_MEMORY, NULL, -1, "process 0 has no memory for what ranks agree upon");
        return;
    }
    size_t at = 0;
    memcpy(all, &x->id, sizeof x->id);
    for (size_t i = 0; i <= n; i++) {
        const size_t size = i < n ? x->part[i].size : 0;
        memcpy(all + sizeof x->id + i * sizeof at, &at, sizeof at);
        if (size > 0)
            memcpy(all + sizeof x->id + starts + at, x->part[i].bytes + sizeof x->id, size);
        at += size;
    }
    for (size_t i = 0; i < n; i++)
        send_to(c, x->part[i].client, ARI_MESSAGE_EXCHANGED, all, total, NULL, 0);
    free(all);
}

/* Keeps `bytes`, which begin with the exchange's id. */
static void come_to(ari_coordinator *c, int r, char *bytes, size_t size)
{
    ari_exchange_id id;
    memcpy(&id, bytes, sizeof id);
    exchange *x = id.n > 0 && id.n <= c->size && id.index >= 0 && id.index < id.n ? exchange_of(c, &id) : NULL;
    if (!x || x->part[id.index].client >= 0) {
        char text[160];
        snprintf(text, sizeof text, "rank %d comes to a meeting where it has no place, or no memory is left", r);
        free(bytes);
        fail(c, AR_ERR_INTERNAL, NULL, r, text);
        return;
    }
    x->part[id.index] = (part){.client = r, .bytes = bytes, .size = size - sizeof id};
    if (++x->come == x->id.n) {
        share(c, x);
        end_exchange(c, x);
    }
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

static void take_bye(ari_coordinator *c, int r)
{
    if (c->client[r].said_bye)
        return;
    c->client[r].said_bye = true;
    if (++c->byes < c->size)
        return;
    for (int i = c->size - 1; i >= 0; i--)
        send_to(c, i, ARI_MESSAGE_ALL_BYE, NULL, 0, NULL, 0);
}

static void receive(ari_coordinator *c, int r)
{
    const ari_net_limit l = {.idle_ns = CLIENT_NS, .wake_fd = -1};
    ari_message_head head;
    char *bytes = NULL;
    const ari_net_end end = ari_message_read(c->client[r].fd, &head, &bytes, &l);
    if (end != ARI_NET_OK) {
        char how[128];
        snprintf(how, sizeof how, "is gone: %s",
                 end == ARI_NET_TIMEOUT ? "it stopped in the middle of a word"
                 : errno == 0           ? "its connection was closed"
                                        : strerror(errno));
        lose(c, r, how);
        return;
    }
    const size_t size = (size_t)head.bytes;
    if (head.kind == ARI_MESSAGE_VIEW) {
        take_view(c, r, bytes, size);
        return;
    }
    if (head.kind == ARI_MESSAGE_EXCHANGE && size >= sizeof(ari_exchange_id)) {
        come_to(c, r, bytes, size);
        return;
    }
    if (head.kind == ARI_MESSAGE_FAIL && size >= sizeof(ari_control_verdict)) {
        ari_control_verdict v;
        memcpy(&v, bytes, sizeof v);
        fail(c, (ar_status)v.status, NULL, r, bytes + sizeof v);
    } else if (head.kind == ARI_MESSAGE_LATE) {
        ask_for_views(c, r);
    } else if (head.kind == ARI_MESSAGE_BYE) {
        take_bye(c, r);
    } else {
        lose(c, r, "speaks another language");
    }
    free(bytes);
}

static void *coordinate(void *arg)
{
    ari_coordinator *c = arg;
    for (;;) {
        for (int r = 0; r < c->size; r++)
            c->poll[r] = (struct pollfd){.fd = c->client[r].fd, .events = POLLIN};
        c->poll[c->size] = (struct pollfd){.fd = c->stop_fd, .events = POLLIN};
        const bool waits = c->asked && !c->failed;
        const uint64_t now = ari_now_ns();
        const int ms = !waits ? -1 : now < c->views_until_ns ? (int)((c->views_until_ns - now) / 1000000) + 1 : 0;
        if (poll(c->poll, (nfds_t)c->size + 1, ms) < 0 && errno != EINTR)
            return NULL;
        for (int r = 0; r < c->size; r++) {
            if (c->poll[r].fd >= 0 && c->poll[r].revents && c->client[r].fd >= 0)
                receive(c, r);
        }
        if (waits && !c->failed && ari_now_ns() >= c->views_until_ns)
            report(c);
        if (c->poll[c->size].revents)
            return NULL;
    }
}

static ari_coordinator *new_coordinator(int size)
{
    ari_coordinator *c = calloc(1, sizeof *c);
    if (!c)
        return NULL;
    c->size = size;
    c->stop_fd = -1;
    c->client = calloc((size_t)size, sizeof *c->client);
    c->poll = calloc((size_t)size + 1, sizeof *c->poll);
    if (c->client && c->poll)
        return c;
    free(c->client);
    free(c->poll);
    free(c);
    return NULL;
}

static ar_status start(ari_coordinator *c, int *own_fd)
{
    int pair[2];
    AR_TRY(ari_net_pair(pair));
    c->client[0].fd = pair[0];
    *own_fd = pair[1];
    c->stop_fd = eventfd(0, EFD_CLOEXEC);
    const int rc = c->stop_fd < 0 ? errno : pthread_create(&c->thread, NULL, coordinate, c);
    c->started = rc == 0;
    return rc == 0 ? AR_OK
                   : ar_error_set(AR_ERR_MEMORY, "no thread for what processes tell each other: %s", strerror(rc));
}

ar_status ari_coordinator_create(ari_coordinator **gives, int *own_fd, int size, const int *fds,
                                 char (*names)[ARI_NAME_BYTES])
{
    ari_coordinator *c = new_coordinator(size);
    for (int r = 1; !c && r < size; r++)
        close(fds[r]);
    if (!c)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %d connections", size);
    for (int r = 0; r < size; r++) {
        c->client[r].fd = r > 0 ? fds[r] : -1;
        memcpy(c->client[r].name, names[r], ARI_NAME_BYTES);
    }
    const ar_status st = start(c, own_fd);
    if (st == AR_OK)
        *gives = c;
    else
        ari_coordinator_destroy(c);
    return st;
}

void ari_coordinator_destroy(ari_coordinator *c)
{
    if (!c)
        return;
    const uint64_t one = 1;
    if (c->started && write(c->stop_fd, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(c->thread, NULL);
    const uint64_t until = ari_now_ns() + ARI_NET_LAST_NS;
    for (int r = 0; r < c->size; r++) {
        ari_net_close(c->client[r].fd, until);
        free(c->client[r].view);
    }
    while (c->exchanges)
        end_exchange(c, c->exchanges);
    if (c->stop_fd >= 0)
        close(c->stop_fd);
    free(c->client);
    free(c->poll);
    free(c);
}
