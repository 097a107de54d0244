/* SPDX-License-Identifier: Apache-2.0 */
#include "process/bootstrap.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "process/net.h"
#include "ref/core/clock.h"
#include "ref/core/out.h"
#include "ref/core/size.h"

/* Hello and answer: an answer differs from anything else by its beginning. */
static const char magic[8] = "anyrank";
enum { VERSION = 1, MOST_PENDING = 64 };
/* After a failure other than an absence: for those that are about to connect, and are to be told too. */
#define LINGER_NS UINT64_C(1000000000)
/* What the answer of process 0 may take after the timeout. */
#define ANSWER_NS UINT64_C(300000000)

typedef struct hello {
    char magic[8];
    uint32_t version, channel, rank, size;
    uint64_t key;
    char name[ARI_NAME_BYTES];
} hello;

typedef struct answer {
    char magic[8];
    uint32_t version;
    int32_t status; /* an ar_status */
    char text[496];
} answer;

static void process_name(char name[ARI_NAME_BYTES])
{
    char host[64] = "";
    if (gethostname(host, sizeof host - 1) != 0 || !host[0])
        snprintf(host, sizeof host, "an unknown host");
    snprintf(name, ARI_NAME_BYTES, "process %ld on %s", (long)getpid(), host);
}

/* --- process 0 ---------------------------------------------------------------------------------------------------- */

/* A connection whose hello is not whole yet. */
typedef struct pending {
    int fd;
    size_t have;
    hello hello;
} pending;

typedef struct acceptor {
    const ari_bootstrap *job;
    int channels; /* connections of each of the others */
    int listener;
    int *fds; /* [size * channels], by rank, then channel; -1: none yet. Then [size], for the control */
    char (*names)[ARI_NAME_BYTES];
    int missing; /* connections */
    uint64_t deadline_ns;
    ar_status st; /* the first failure; it stays */
    char why[400];
    pending pending[MOST_PENDING];
    int n_pending;
    struct pollfd *poll; /* [1 + MOST_PENDING + size * channels] */
} acceptor;

static void send_answer(int fd, ar_status st, const char *text)
{
    const ari_net_limit l = {.idle_ns = UINT64_C(1000000000), .wake_fd = -1};
    answer w = {.version = VERSION, .status = st};
    memcpy(w.magic, magic, sizeof magic);
    snprintf(w.text, sizeof w.text, "%s", text);
    (void)ari_net_write(fd, &w, sizeof w, &l); /* one that has gone needs none */
}

static void refuse(int fd, ar_status st, const char *text)
{
    send_answer(fd, st, text);
    ari_net_close(fd, ari_now_ns() + ARI_NET_LAST_NS);
}

static void drop_pending(acceptor *a, int i)
{
    a->pending[i] = a->pending[--a->n_pending];
}

/* "" if there is a place for this process. */
static void refusal(const acceptor *a, const hello *from, char *text, size_t size)
{
    const ari_bootstrap *g = a->job;
    text[0] = '\0';
    if ((int)from->size != g->size)
        snprintf(text, size, "rank %u (%s) was started as one of %u processes, process 0 as one of %d", from->rank,
                 ARI_SHOW(from->name), from->size, g->size);
    else if (from->rank == 0 || from->rank >= (uint32_t)g->size || from->channel >= (uint32_t)a->channels)
        snprintf(text, size, "another rank %u (%s) has come, of ranks 0 to %d", from->rank, ARI_SHOW(from->name),
                 g->size - 1);
    else if (a->fds[(int)from->rank * a->channels + (int)from->channel] >= 0)
        snprintf(text, size, "two processes have rank %u: %s and %s", from->rank, a->names[from->rank],
                 ARI_SHOW(from->name));
}

static void take_connection(acceptor *a, const hello *from, int fd)
{
    char text[sizeof a->why];
    refusal(a, from, text, sizeof text);
    if (!text[0]) {
        a->fds[(int)from->rank * a->channels + (int)from->channel] = fd;
        memcpy(a->names[from->rank], from->name, ARI_NAME_BYTES);
        a->missing--;
        return;
    }
    if (a->st == AR_OK) {
        const uint64_t end = ari_now_ns() + LINGER_NS;
        a->st = AR_ERR_ARG;
        memcpy(a->why, text, sizeof text);
        a->deadline_ns = end < a->deadline_ns ? end : a->deadline_ns;
    }
    refuse(fd, a->st, a->why);
}

/* A hello is whole. */
static void take_hello(acceptor *a, int i)
{
    pending *v = &a->pending[i];
    hello from = v->hello;
    const int fd = v->fd;
    from.name[sizeof from.name - 1] = '\0';
    drop_pending(a, i);
    if (from.version != VERSION) {
        refuse(fd, AR_ERR_ARG, "process 0 is of another version of anyrank");
    } else if (from.key != a->job->key) {
        refuse(
            fd, AR_ERR_ARG,
            "the port belongs to another job: ANYRANK_PORT chooses another one, the same for all processes of a job");
    } else {
        take_connection(a, &from, fd);
    }
}

static void read_hello(acceptor *a, int i)
{
    pending *v = &a->pending[i];
    const ssize_t got = recv(v->fd, (char *)&v->hello + v->have, sizeof v->hello - v->have, 0);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return;
    v->have += got > 0 ? (size_t)got : 0;
    const size_t known = v->have < sizeof magic ? v->have : sizeof magic;
    if (got <= 0 || memcmp(v->hello.magic, magic, known) != 0) { /* gone, or another program */
        close(v->fd);
        drop_pending(a, i);
    } else if (v->have == sizeof v->hello) {
        take_hello(a, i);
    }
}

static void accept_one(acceptor *a)
{
    const int fd = ari_net_accept(a->listener);
    if (fd < 0)
        return;
    if (a->n_pending == MOST_PENDING) { /* the oldest have had time to send theirs */
        close(a->pending[0].fd);
        drop_pending(a, 0);
    }
    a->pending[a->n_pending++] = (pending){.fd = fd};
}

/* A process sends nothing after its hello: what can be read is the end of the connection. One that was refused at its
 * second connection closes its first: then the refusal is what went wrong. */
static ar_status check_connections(const acceptor *a, const struct pollfd *polled)
{
    for (int i = 0; i < a->job->size * a->channels; i++) {
        const int r = i / a->channels;
        if (a->fds[i] < 0 || polled[i].fd != a->fds[i] || !polled[i].revents)
            continue;
        return a->st != AR_OK
                   ? ar_error_set(a->st, "%s", a->why)
                   : ar_error_set(AR_ERR_ABORTED, "rank %d (%s) was gone before all had come", r, a->names[r]);
    }
    return AR_OK;
}

static ar_status one_round(acceptor *a)
{
    const int waiting = a->n_pending, connections = a->job->size * a->channels;
    const uint64_t now = ari_now_ns(), left = a->deadline_ns > now ? (a->deadline_ns - now) / 1000000 + 1 : 0;
    struct pollfd *p = a->poll, *polled = p + waiting + 1;
    p[0] = (struct pollfd){.fd = a->listener, .events = POLLIN};
    for (int i = 0; i < waiting; i++)
        p[i + 1] = (struct pollfd){.fd = a->pending[i].fd, .events = POLLIN};
    for (int i = 0; i < connections; i++)
        polled[i] = (struct pollfd){.fd = a->fds[i], .events = POLLIN}; /* -1: ignored */
    if (poll(p, (nfds_t)(waiting + 1 + connections), left > 1000 ? 1000 : (int)left) < 0 && errno != EINTR)
        return ar_error_set(AR_ERR_IO, "waiting for the other processes: %s", strerror(errno));
    AR_TRY(check_connections(a, polled));
    for (int i = waiting - 1; i >= 0; i--) { /* downwards: dropping one puts the last in its place */
        if (p[i + 1].revents)
            read_hello(a, i);
    }
    if (p[0].revents)
        accept_one(a);
    return AR_OK;
}

/* "1, 3, 5": those of which a connection is missing. */
static void describe_missing(const acceptor *a, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int r = 1; r < a->job->size && used + 16 < size; r++) {
        bool all = true;
        for (int c = 0; c < a->channels; c++)
            all = all && a->fds[r * a->channels + c] >= 0;
        if (!all)
            used += (size_t)snprintf(text + used, size - used, "%s%d", used > 0 ? ", " : "", r);
    }
    if (used + 16 >= size)
        snprintf(text + used, size - used, ", ...");
}

static ar_status accept_all(acceptor *a)
{
    a->deadline_ns = ari_deadline_ns(ari_now_ns(), a->job->timeout_ns);
    while (a->missing > 0) {
        AR_TRY(one_round(a));
        if (a->missing == 0 || ari_now_ns() < a->deadline_ns)
            continue;
        if (a->st != AR_OK)
            break;
        char who[128];
        describe_missing(a, who, sizeof who);
        return ar_error_set(AR_ERR_TIMEOUT, "of %d processes these have not come within %.1f s: rank %s", a->job->size,
                            (double)a->job->timeout_ns * 1e-9, who);
    }
    return a->st == AR_OK ? AR_OK : ar_error_set(a->st, "%s", a->why);
}

/* Tells every connection how it ended; on failure all are closed. */
static void answer_all(acceptor *a, ar_status st, const char *why)
{
    const uint64_t until = ari_now_ns() + ARI_NET_LAST_NS;
    for (int i = 0; i < a->job->size * a->channels; i++) {
        if (a->fds[i] < 0)
            continue;
        send_answer(a->fds[i], st, why);
        if (st != AR_OK)
            ari_net_close(a->fds[i], until);
    }
    for (int i = 0; st != AR_OK && i < a->n_pending; i++)
        send_answer(a->pending[i].fd, st, why);
    for (int i = 0; i < a->n_pending; i++)
        ari_net_close(a->pending[i].fd, until);
    for (int fd = st == AR_OK ? -1 : ari_net_accept(a->listener); fd >= 0; fd = ari_net_accept(a->listener)) {
        send_answer(fd, st, why);
        ari_net_close(fd, until);
    }
}

static ar_status accept_and_answer(acceptor *a)
{
    char why[400];
    const ar_status st = accept_all(a);
    snprintf(why, sizeof why, "%s", st == AR_OK ? "" : ar_error_message());
    answer_all(a, st, why);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", why);
}

/* Takes over the connections. */
static ar_status create_control(acceptor *a, int *data, ari_control **gives)
{
    const int size = a->job->size;
    int *clients = a->fds + size * a->channels;
    for (int r = 0; r < size; r++) {
        clients[r] = a->fds[r * a->channels];
        if (data)
            data[r] = a->fds[r * a->channels + 1];
    }
    process_name(a->names[0]);
    const ari_control_options o = {
        .size = size, .timeout_ns = a->job->timeout_ns, .fd = -1, .clients = clients, .names = a->names};
    const ar_status st = ari_control_create(gives, &o);
    for (int r = 1; st != AR_OK && data && r < size; r++)
        close(data[r]);
    return st;
}

ar_status ari_bootstrap_accept(const ari_bootstrap *b, int listener, int *data, ari_control **gives)
{
    const int channels = data ? 2 : 1, connections = b->size * channels;
    ar_status st = AR_OK;
    acceptor *a = NULL;
    AR_TRY(ari_alloc_zero((void **)&a, 1, sizeof *a, "what waits at a port"));
    *a = (acceptor){.job = b, .channels = channels, .listener = listener, .missing = connections - channels};
    AR_TRY_TO(done, st, ari_alloc((void **)&a->fds, (size_t)(connections + b->size), sizeof *a->fds, "connections"));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&a->names, (size_t)b->size, sizeof *a->names, "names of processes"));
    AR_TRY_TO(done, st,
              ari_alloc((void **)&a->poll, (size_t)connections + MOST_PENDING + 1, sizeof *a->poll, "a port"));
    for (int i = 0; i < connections; i++)
        a->fds[i] = -1;
    AR_TRY_TO(done, st, accept_and_answer(a));
    st = create_control(a, data, gives);
done:
    free(a->poll);
    free(a->names);
    free(a->fds);
    free(a);
    return st;
}

/* --- the others --------------------------------------------------------------------------------------------------- */

static ar_status read_answer(int fd, const char *host, int port, uint64_t deadline)
{
    const uint64_t now = ari_now_ns();
    const ari_net_limit l = {.idle_ns = deadline > now ? deadline - now : 0, .wake_fd = -1};
    answer w;
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

static ar_status send_hello(const ari_bootstrap *g, int fd, int channel)
{
    const ari_net_limit l = {.idle_ns = g->timeout_ns, .wake_fd = -1};
    hello me = {.version = VERSION,
                .channel = (uint32_t)channel,
                .rank = (uint32_t)g->rank,
                .size = (uint32_t)g->size,
                .key = g->key};
    memcpy(me.magic, magic, sizeof magic);
    process_name(me.name);
    return ari_net_write(fd, &me, sizeof me, &l) == ARI_NET_OK
               ? AR_OK
               : ar_error_set(AR_ERR_IO, "process 0 does not take what this process sends it");
}

ar_status ari_bootstrap_connect(const ari_bootstrap *b, const char *host, int port, int *data, ari_control **gives)
{
    const uint64_t deadline = ari_deadline_ns(ari_now_ns(), b->timeout_ns);
    const int channels = data ? 2 : 1;
    int fds[2] = {-1, -1};
    ar_status st = AR_OK;
    for (int c = 0; c < channels && st == AR_OK; c++) {
        st = ari_net_connect(&fds[c], host, port, deadline);
        if (st == AR_OK)
            st = send_hello(b, fds[c], c);
    }
    /* Process 0 gives up after the same time, and says who is missing: its answer is worth a little more time. */
    for (int c = 0; c < channels && st == AR_OK; c++)
        st = read_answer(fds[c], host, port, ari_deadline_ns(deadline, ANSWER_NS));
    if (st == AR_OK) {
        const ari_control_options o = {.timeout_ns = b->timeout_ns, .fd = fds[0]};
        fds[0] = -1;
        st = ari_control_create(gives, &o);
    }
    if (st == AR_OK && data)
        *data = fds[1];
    for (int c = 0; c < channels && st != AR_OK; c++) {
        if (fds[c] >= 0)
            close(fds[c]);
    }
    return st;
}
