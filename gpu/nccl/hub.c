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
#include "gpu/nccl/flight.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Clients read at once, whatever their process does: one that does not take a word for so long is lost. */
#define CLIENT_NS UINT64_C(5000000000)
/* Longest wait for views, once one process is late. */
#define VIEWS_NS UINT64_C(500000000)

/* A meeting that not all have come to. */
typedef struct meeting {
    struct meeting *next;
    ari_control_meeting id; /* index is not looked at */
    int come;
    char **bytes;
    size_t *size;
    int *client; /* [n], by index; -1: has not come */
} meeting;

typedef struct client {
    int fd; /* -1: gone */
    bool said_bye;
    char name[ARI_NAME_BYTES];
    void *view;
    size_t view_bytes;
} client;

struct ari_hub {
    int size;
    client *client;
    struct pollfd *poll; /* [size + 1] */
    meeting *meetings;
    bool failed, asked; /* asked: for views */
    int first_late;
    uint64_t views_until_ns;
    int byes;
    int stop_fd;
    pthread_t thread;
    bool started;
};

static void lose(ari_hub *h, int r, const char *how);

static void tell(ari_hub *h, int r, ari_word word, const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const ari_net_limit l = {.idle_ns = CLIENT_NS, .wake_fd = -1};
    if (h->client[r].fd < 0)
        return;
    if (ari_word_write(h->client[r].fd, word, a, a_bytes, b, b_bytes, &l) != ARI_NET_OK)
        lose(h, r, "takes no word any more");
}

/* To process 0 last: it may end at once, and the hub with it. own: [size], whom it is about; NULL: `rank` alone. */
static void fail(ari_hub *h, ar_status st, const bool *own, int rank, const char *text)
{
    if (h->failed)
        return;
    h->failed = true;
    for (int r = h->size - 1; r >= 0; r--) {
        const ari_control_verdict v = {.status = st, .own = own ? own[r] : r == rank};
        tell(h, r, ARI_WORD_FAILED, &v, sizeof v, text, strlen(text));
    }
}

static void lose(ari_hub *h, int r, const char *how)
{
    client *c = &h->client[r];
    char text[256];
    if (c->fd < 0)
        return;
    close(c->fd);
    c->fd = -1;
    snprintf(text, sizeof text, "rank %d (%s) %s", r, c->name, how);
    if (!c->said_bye)
        fail(h, AR_ERR_ABORTED, NULL, -1, text);
}

/* --- who is where ------------------------------------------------------------------------------------------------- */

static void report(ari_hub *h)
{
    ari_flight_view *views = calloc((size_t)h->size, sizeof *views);
    bool *own = calloc((size_t)h->size, sizeof *own);
    char *text = NULL;
    ar_status st = AR_ERR_TIMEOUT;
    if (views && own) {
        for (int r = 0; r < h->size; r++)
            views[r] = (ari_flight_view){.bytes = h->client[r].view, .size = h->client[r].view_bytes};
        st = ari_flight_report(views, h->size, h->first_late, own, &text);
    }
    fail(h, st, text ? own : NULL, h->first_late,
         text ? text : "a rank waited too long, and no memory is left to say more");
    free(text);
    free(own);
    free(views);
}

static void ask_for_views(ari_hub *h, int late)
{
    if (h->asked || h->failed)
        return;
    h->asked = true;
    h->first_late = late;
    h->views_until_ns = ari_now_ns() + VIEWS_NS;
    for (int r = 0; r < h->size; r++)
        tell(h, r, ARI_WORD_SHOW, NULL, 0, NULL, 0);
}

static void take_view(ari_hub *h, int r, char *bytes, size_t size)
{
    free(h->client[r].view);
    h->client[r].view = bytes;
    h->client[r].view_bytes = size;
    bool all = true;
    for (int i = 0; i < h->size; i++)
        all = all && (h->client[i].view || h->client[i].fd < 0);
    if (all && h->asked)
        report(h);
}

/* --- meetings ----------------------------------------------------------------------------------------------------- */

static void free_meeting(meeting *m)
{
    for (int i = 0; m->bytes && i < m->id.n; i++)
        free(m->bytes[i]);
    free(m->bytes);
    free(m->size);
    free(m->client);
    free(m);
}

static meeting *new_meeting(ari_hub *h, const ari_control_meeting *id)
{
    meeting *m = calloc(1, sizeof *m);
    if (!m)
        return NULL;
    m->id = *id;
    m->bytes = calloc((size_t)id->n, sizeof *m->bytes);
    m->size = calloc((size_t)id->n, sizeof *m->size);
    m->client = malloc((size_t)id->n * sizeof *m->client);
    if (!m->bytes || !m->size || !m->client) {
        free_meeting(m);
        return NULL;
    }
    for (int i = 0; i < id->n; i++)
        m->client[i] = -1;
    m->next = h->meetings;
    h->meetings = m;
    return m;
}

static meeting *meeting_of(ari_hub *h, const ari_control_meeting *id)
{
    meeting *m = h->meetings;
    while (m && (m->id.group != id->group || m->id.seq != id->seq || m->id.n != id->n))
        m = m->next;
    return m ? m : new_meeting(h, id);
}

static void end_meeting(ari_hub *h, meeting *m)
{
    meeting **at = &h->meetings;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    free_meeting(m);
}

/* All have come: everybody gets everything. */
static void share(ari_hub *h, meeting *m)
{
    const size_t n = (size_t)m->id.n, starts = (n + 1) * sizeof(size_t);
    size_t total = sizeof m->id + starts;
    for (size_t i = 0; i < n; i++)
        total += m->size[i];
    char *all = malloc(total);
    if (!all) {
        fail(h, AR_ERR_MEMORY, NULL, -1, "process 0 has no memory for what ranks agree upon");
        return;
    }
    size_t at = 0;
    memcpy(all, &m->id, sizeof m->id);
    for (size_t i = 0; i <= n; i++) {
        memcpy(all + sizeof m->id + i * sizeof at, &at, sizeof at);
        if (i < n && m->size[i] > 0)
            memcpy(all + sizeof m->id + starts + at, m->bytes[i] + sizeof(ari_control_meeting), m->size[i]);
        at += i < n ? m->size[i] : 0;
    }
    for (size_t i = 0; i < n; i++)
        tell(h, m->client[i], ARI_WORD_EXCHANGED, all, total, NULL, 0);
    free(all);
}

/* Keeps `bytes`, which begin with the meeting's id. */
static void come_to(ari_hub *h, int r, char *bytes, size_t size)
{
    ari_control_meeting id;
    memcpy(&id, bytes, sizeof id);
    meeting *m = id.n > 0 && id.n <= h->size && id.index >= 0 && id.index < id.n ? meeting_of(h, &id) : NULL;
    if (!m || m->client[id.index] >= 0) {
        char text[160];
        snprintf(text, sizeof text, "rank %d comes to a meeting where it has no place, or no memory is left", r);
        free(bytes);
        fail(h, AR_ERR_INTERNAL, NULL, r, text);
        return;
    }
    m->client[id.index] = r;
    m->bytes[id.index] = bytes;
    m->size[id.index] = size - sizeof id;
    if (++m->come == m->id.n) {
        share(h, m);
        end_meeting(h, m);
    }
}

/* --- the thread --------------------------------------------------------------------------------------------------- */

static void say_bye(ari_hub *h, int r)
{
    if (h->client[r].said_bye)
        return;
    h->client[r].said_bye = true;
    if (++h->byes < h->size)
        return;
    for (int i = h->size - 1; i >= 0; i--)
        tell(h, i, ARI_WORD_ALL_SAID, NULL, 0, NULL, 0);
}

static void hear(ari_hub *h, int r)
{
    const ari_net_limit l = {.idle_ns = CLIENT_NS, .wake_fd = -1};
    ari_word_head head;
    char *bytes = NULL;
    const ari_net_end end = ari_word_read(h->client[r].fd, &head, &bytes, &l);
    if (end != ARI_NET_OK) {
        char how[128];
        snprintf(how, sizeof how, "is gone: %s",
                 end == ARI_NET_TIMEOUT ? "it stopped in the middle of a word"
                 : errno == 0           ? "its connection was closed"
                                        : strerror(errno));
        lose(h, r, how);
        return;
    }
    const size_t size = (size_t)head.bytes;
    if (head.word == ARI_WORD_VIEW) {
        take_view(h, r, bytes, size);
        return;
    }
    if (head.word == ARI_WORD_EXCHANGE && size >= sizeof(ari_control_meeting)) {
        come_to(h, r, bytes, size);
        return;
    }
    if (head.word == ARI_WORD_FAIL && size >= sizeof(ari_control_verdict)) {
        ari_control_verdict v;
        memcpy(&v, bytes, sizeof v);
        fail(h, (ar_status)v.status, NULL, r, bytes + sizeof v);
    } else if (head.word == ARI_WORD_LATE) {
        ask_for_views(h, r);
    } else if (head.word == ARI_WORD_BYE) {
        say_bye(h, r);
    } else {
        lose(h, r, "speaks another language");
    }
    free(bytes);
}

static void *hub_main(void *arg)
{
    ari_hub *h = arg;
    for (;;) {
        for (int r = 0; r < h->size; r++)
            h->poll[r] = (struct pollfd){.fd = h->client[r].fd, .events = POLLIN};
        h->poll[h->size] = (struct pollfd){.fd = h->stop_fd, .events = POLLIN};
        const bool waits = h->asked && !h->failed;
        const uint64_t now = ari_now_ns();
        const int ms = !waits ? -1 : now < h->views_until_ns ? (int)((h->views_until_ns - now) / 1000000) + 1 : 0;
        if (poll(h->poll, (nfds_t)h->size + 1, ms) < 0 && errno != EINTR)
            return NULL;
        for (int r = 0; r < h->size; r++) {
            if (h->poll[r].fd >= 0 && h->poll[r].revents && h->client[r].fd >= 0)
                hear(h, r);
        }
        if (waits && !h->failed && ari_now_ns() >= h->views_until_ns)
            report(h);
        if (h->poll[h->size].revents)
            return NULL;
    }
}

ar_status ari_hub_create(ari_hub **gives, int size, const int *fds, char (*names)[ARI_NAME_BYTES])
{
    ari_hub *h = calloc(1, sizeof *h);
    if (h) {
        h->stop_fd = -1;
        h->client = calloc((size_t)size, sizeof *h->client);
        h->poll = calloc((size_t)size + 1, sizeof *h->poll);
    }
    if (!h || !h->client || !h->poll) {
        for (int r = 0; r < size; r++)
            close(fds[r]);
        if (h)
            free(h->client), free(h->poll);
        free(h);
        return ar_error_set(AR_ERR_MEMORY, "no memory for %d connections", size);
    }
    h->size = size;
    for (int r = 0; r < size; r++) {
        h->client[r].fd = fds[r];
        memcpy(h->client[r].name, names[r], ARI_NAME_BYTES);
    }
    h->stop_fd = eventfd(0, EFD_CLOEXEC);
    int rc = h->stop_fd < 0 ? errno : 0;
    if (rc == 0)
        rc = pthread_create(&h->thread, NULL, hub_main, h);
    h->started = rc == 0;
    if (rc != 0) {
        ari_hub_destroy(h);
        return ar_error_set(AR_ERR_MEMORY, "no thread for what processes tell each other: %s", strerror(rc));
    }
    *gives = h;
    return AR_OK;
}

void ari_hub_destroy(ari_hub *h)
{
    if (!h)
        return;
    const uint64_t one = 1;
    if (h->started && write(h->stop_fd, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(h->thread, NULL);
    const uint64_t until = ari_now_ns() + ARI_NET_LAST_NS;
    for (int r = 0; r < h->size; r++) {
        ari_net_close(h->client[r].fd, until);
        free(h->client[r].view);
    }
    while (h->meetings)
        end_meeting(h, h->meetings);
    if (h->stop_fd >= 0)
        close(h->stop_fd);
    free(h->client);
    free(h->poll);
    free(h);
}
