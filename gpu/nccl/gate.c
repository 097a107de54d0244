/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/nccl/gate.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gpu/nccl/net.h"
#include "ref/core/clock.h"
#include "ref/core/out.h"
#include "ref/core/size.h"

/* Both messages have one size, so that an answer can be told from anything else by its beginning. */
static const char magic[8] = "anyrank";
enum { VERSION = 1, STRANGERS_MOST = 64 };
/* After a failure that is nobody's absence: for those who are about to come, and are to hear of it too. */
#define LINGER_NS UINT64_C(1000000000)
#define WORD_NS UINT64_C(300000000)

typedef struct hello {
    char magic[8];
    uint32_t version, channel, rank, size;
    uint64_t key;
    char name[ARI_NAME_BYTES];
} hello;

typedef struct welcome {
    char magic[8];
    uint32_t version;
    int32_t status; /* an ar_status */
    char text[496];
} welcome;

void ari_gate_name(char name[ARI_NAME_BYTES])
{
    char host[64] = "";
    if (gethostname(host, sizeof host - 1) != 0 || !host[0])
        snprintf(host, sizeof host, "an unknown host");
    snprintf(name, ARI_NAME_BYTES, "process %ld on %s", (long)getpid(), host);
}

/* --- process 0 ---------------------------------------------------------------------------------------------------- */

/* One who has connected and not yet said all. */
typedef struct guest {
    int fd;
    size_t have;
    hello said;
} guest;

typedef struct hall {
    const ari_gate *gate;
    int listener;
    int *fds;
    char (*names)[ARI_NAME_BYTES];
    int missing; /* connections */
    uint64_t deadline_ns;
    ar_status st; /* the first failure; it stays */
    char why[400];
    guest guest[STRANGERS_MOST];
    int guests;
    struct pollfd *poll; /* [1 + STRANGERS_MOST + places] */
} hall;

static void answer(int fd, ar_status st, const char *text)
{
    const ari_net_limit l = {.idle_ns = UINT64_C(1000000000), .wake_fd = -1};
    welcome w = {.version = VERSION, .status = st};
    memcpy(w.magic, magic, sizeof magic);
    snprintf(w.text, sizeof w.text, "%s", text);
    (void)ari_net_write(fd, &w, sizeof w, &l); /* one who has gone hears nothing */
}

static void turn_away(int fd, ar_status st, const char *text)
{
    answer(fd, st, text);
    ari_net_close(fd, ari_now_ns() + ARI_NET_LAST_NS);
}

static void drop_guest(hall *h, int i)
{
    h->guest[i] = h->guest[--h->guests];
}

/* "" if there is a place for one who says this. */
static void refusal(const hall *h, const hello *said, char *text, size_t size)
{
    const ari_gate *g = h->gate;
    text[0] = '\0';
    if ((int)said->size != g->size)
        snprintf(text, size, "rank %u (%s) was started as one of %u processes, process 0 as one of %d", said->rank,
                 ARI_SHOW(said->name), said->size, g->size);
    else if (said->rank == 0 || said->rank >= (uint32_t)g->size || said->channel >= (uint32_t)g->channels)
        snprintf(text, size, "another rank %u (%s) has come, of ranks 0 to %d", said->rank, ARI_SHOW(said->name),
                 g->size - 1);
    else if (h->fds[(int)said->rank * g->channels + (int)said->channel] >= 0)
        snprintf(text, size, "two processes have rank %u: %s and %s", said->rank, h->names[said->rank],
                 ARI_SHOW(said->name));
}

static void seat(hall *h, const hello *said, int fd)
{
    char text[sizeof h->why];
    refusal(h, said, text, sizeof text);
    if (!text[0]) {
        h->fds[(int)said->rank * h->gate->channels + (int)said->channel] = fd;
        memcpy(h->names[said->rank], said->name, ARI_NAME_BYTES);
        h->missing--;
        return;
    }
    if (h->st == AR_OK) {
        const uint64_t end = ari_now_ns() + LINGER_NS;
        h->st = AR_ERR_ARG;
        memcpy(h->why, text, sizeof text);
        h->deadline_ns = end < h->deadline_ns ? end : h->deadline_ns;
    }
    turn_away(fd, h->st, h->why);
}

/* All of a greeting has come. */
static void judge(hall *h, int i)
{
    guest *v = &h->guest[i];
    hello said = v->said;
    const int fd = v->fd;
    said.name[sizeof said.name - 1] = '\0';
    drop_guest(h, i);
    if (said.version != VERSION) {
        turn_away(fd, AR_ERR_ARG, "process 0 is of another version of anyrank");
    } else if (said.key != h->gate->key) {
        turn_away(
            fd, AR_ERR_ARG,
            "the port belongs to another job: ANYRANK_PORT chooses another one, the same for all processes of a job");
    } else {
        seat(h, &said, fd);
    }
}

static void listen_to(hall *h, int i)
{
    guest *v = &h->guest[i];
    const ssize_t got = recv(v->fd, (char *)&v->said + v->have, sizeof v->said - v->have, 0);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    v->have += got > 0 ? (size_t)got : 0;
    const size_t known = v->have < sizeof magic ? v->have : sizeof magic;
    if (got <= 0 || memcmp(v->said.magic, magic, known) != 0) { /* gone, or no process of ours */
        close(v->fd);
        drop_guest(h, i);
    } else if (v->have == sizeof v->said) {
        judge(h, i);
    }
}

static void greet(hall *h)
{
    const int fd = ari_net_accept(h->listener);
    if (fd < 0)
        return;
    if (h->guests == STRANGERS_MOST) { /* the oldest have had time to speak */
        close(h->guest[0].fd);
        drop_guest(h, 0);
    }
    h->guest[h->guests++] = (guest){.fd = fd};
}

/* Who has a place says nothing more: what can be read is the end of the connection. One that was turned away at its
 * next connection leaves its first: then that is what went wrong. */
static ar_status look_at_seats(const hall *h, const struct pollfd *seats)
{
    for (int i = 0; i < h->gate->size * h->gate->channels; i++) {
        const int r = i / h->gate->channels;
        if (h->fds[i] < 0 || seats[i].fd != h->fds[i] || !seats[i].revents)
            continue;
        return h->st != AR_OK
                   ? ar_error_set(h->st, "%s", h->why)
                   : ar_error_set(AR_ERR_ABORTED, "rank %d (%s) was gone before all had come", r, h->names[r]);
    }
    return AR_OK;
}

static ar_status one_round(hall *h)
{
    const int guests = h->guests, places = h->gate->size * h->gate->channels;
    const uint64_t now = ari_now_ns(), left = h->deadline_ns > now ? (h->deadline_ns - now) / 1000000 + 1 : 0;
    struct pollfd *p = h->poll, *seats = p + guests + 1;
    p[0] = (struct pollfd){.fd = h->listener, .events = POLLIN};
    for (int i = 0; i < guests; i++)
        p[i + 1] = (struct pollfd){.fd = h->guest[i].fd, .events = POLLIN};
    for (int i = 0; i < places; i++)
        seats[i] = (struct pollfd){.fd = h->fds[i], .events = POLLIN}; /* -1: nobody */
    if (poll(p, (nfds_t)(guests + 1 + places), left > 1000 ? 1000 : (int)left) < 0 && errno != EINTR)
        return ar_error_set(AR_ERR_IO, "waiting for the other processes: %s", strerror(errno));
    AR_TRY(look_at_seats(h, seats));
    for (int i = guests - 1; i >= 0; i--) { /* downwards: dropping one puts the last in its place */
        if (p[i + 1].revents)
            listen_to(h, i);
    }
    if (p[0].revents)
        greet(h);
    return AR_OK;
}

/* "1, 3, 5": those of whom a connection is missing. */
static void name_missing(const hall *h, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int r = 1; r < h->gate->size && used + 16 < size; r++) {
        bool all = true;
        for (int c = 0; c < h->gate->channels; c++)
            all = all && h->fds[r * h->gate->channels + c] >= 0;
        if (!all)
            used += (size_t)snprintf(text + used, size - used, "%s%d", used > 0 ? ", " : "", r);
    }
    if (used + 16 >= size)
        snprintf(text + used, size - used, ", ...");
}

static ar_status admit_all(hall *h)
{
    h->deadline_ns = ari_deadline_ns(ari_now_ns(), h->gate->timeout_ns);
    while (h->missing > 0) {
        AR_TRY(one_round(h));
        if (h->missing == 0 || ari_now_ns() < h->deadline_ns)
            continue;
        if (h->st != AR_OK)
            break;
        char who[128];
        name_missing(h, who, sizeof who);
        return ar_error_set(AR_ERR_TIMEOUT, "of %d processes these have not come within %.1f s: rank %s", h->gate->size,
                            (double)h->gate->timeout_ns * 1e-9, who);
    }
    return h->st == AR_OK ? AR_OK : ar_error_set(h->st, "%s", h->why);
}

ar_status ari_gate_admit(const ari_gate *g, int listener, int *fds, char (*names)[ARI_NAME_BYTES])
{
    const int places = g->size * g->channels;
    hall *h = NULL;
    AR_TRY(ari_alloc_zero((void **)&h, 1, sizeof *h, "what waits at a port"));
    *h = (hall){.gate = g, .listener = listener, .fds = fds, .names = names, .missing = places - g->channels};
    for (int i = 0; i < places; i++)
        fds[i] = -1;
    const ar_status room = ari_alloc((void **)&h->poll, (size_t)places + STRANGERS_MOST + 1, sizeof *h->poll, "a port");
    const ar_status st = room == AR_OK ? admit_all(h) : room;
    char why[400];
    snprintf(why, sizeof why, "%s", st == AR_OK ? "" : ar_error_message());
    const uint64_t until = ari_now_ns() + ARI_NET_LAST_NS;
    for (int i = 0; i < places; i++) {
        if (fds[i] < 0)
            continue;
        answer(fds[i], st, why);
        if (st != AR_OK) {
            ari_net_close(fds[i], until);
            fds[i] = -1;
        }
    }
    for (int i = 0; st != AR_OK && i < h->guests; i++)
        answer(h->guest[i].fd, st, why);
    for (int i = 0; i < h->guests; i++)
        ari_net_close(h->guest[i].fd, until);
    for (int fd = st == AR_OK ? -1 : ari_net_accept(listener); fd >= 0; fd = ari_net_accept(listener)) {
        answer(fd, st, why);
        ari_net_close(fd, until);
    }
    free(h->poll);
    free(h);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", why);
}

/* --- the others --------------------------------------------------------------------------------------------------- */

static ar_status hear(int fd, const char *host, int port, uint64_t deadline)
{
    const uint64_t now = ari_now_ns();
    const ari_net_limit l = {.idle_ns = deadline > now ? deadline - now : 0, .wake_fd = -1};
    welcome w;
    memset(&w, 0, sizeof w);
    const ari_net_end end = ari_net_read(fd, &w, sizeof w, &l);
    if (end == ARI_NET_TIMEOUT)
        return ar_error_set(AR_ERR_TIMEOUT,
                            "what listens at %.128s, port %d, has not let this process in for so long; "
                            "process 0 knows who is missing",
                            host, port);
    if (end == ARI_NET_OK && (memcmp(w.magic, magic, sizeof magic) != 0 || w.version != VERSION))
        return ar_error_set(AR_ERR_IO,
                            "what listens at %.128s, port %d, is no process 0 of this program: choose another "
                            "port by ANYRANK_PORT, the same for all processes",
                            host, port);
    if (end != ARI_NET_OK)
        return ar_error_set(AR_ERR_IO,
                            "what listens at %.128s, port %d, closed the connection: process 0 has ended, or "
                            "the port is another program's (ANYRANK_PORT chooses another one)",
                            host, port);
    w.text[sizeof w.text - 1] = '\0';
    return w.status == AR_OK ? AR_OK : ar_error_set((ar_status)w.status, "process 0: %s", w.text);
}

static ar_status knock(const ari_gate *g, int fd, int channel)
{
    const ari_net_limit l = {.idle_ns = g->timeout_ns, .wake_fd = -1};
    hello me = {.version = VERSION,
                .channel = (uint32_t)channel,
                .rank = (uint32_t)g->rank,
                .size = (uint32_t)g->size,
                .key = g->key};
    memcpy(me.magic, magic, sizeof magic);
    ari_gate_name(me.name);
    return ari_net_write(fd, &me, sizeof me, &l) == ARI_NET_OK
               ? AR_OK
               : ar_error_set(AR_ERR_IO, "process 0 does not take what this process sends it");
}

ar_status ari_gate_visit(const ari_gate *g, const char *host, int port, int *fds)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), g->timeout_ns);
    ar_status st = AR_OK;
    for (int c = 0; c < g->channels; c++)
        fds[c] = -1;
    for (int c = 0; c < g->channels && st == AR_OK; c++) {
        st = ari_net_connect(&fds[c], host, port, deadline);
        if (st == AR_OK)
            st = knock(g, fds[c], c);
    }
    /* Process 0 gives up after the same time, and says who is missing: its word is worth a little more time. */
    for (int c = 0; c < g->channels && st == AR_OK; c++)
        st = hear(fds[c], host, port, ari_deadline_ns(deadline, WORD_NS));
    for (int c = 0; c < g->channels && st != AR_OK; c++) {
        if (fds[c] >= 0)
            close(fds[c]);
        fds[c] = -1;
    }
    return st;
}
