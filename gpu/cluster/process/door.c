/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/door.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gpu/cluster/process/net.h"

static void remove_guest(ari_door *d, int i)
{
    d->guests--;
    memmove(&d->guest[i], &d->guest[i + 1], (size_t)(d->guests - i) * sizeof d->guest[0]);
}

static void drop(ari_door *d, int i)
{
    close(d->guest[i].fd);
    remove_guest(d, i);
}

/* Drops the guest that has said least that makes sense: otherwise whoever connects often enough would drive out a
 * process. */
static void make_room(ari_door *d)
{
    int i = 0;
    while (i < d->guests && !d->guest[i].leaves && d->guest[i].said.have >= sizeof(ari_opening))
        i++;
    drop(d, i < d->guests ? i : 0);
}

/* Sends what a new connection takes at once, or never will. */
static bool say(int fd, const void *bytes, size_t n)
{
    return send(fd, bytes, n, MSG_NOSIGNAL) == (ssize_t)n;
}

static void accept_one(ari_door *d)
{
    ari_guest new = {.fd = ari_net_accept(d->listener)};
    if (new.fd < 0)
        return;
    if (d->guests == ARI_DOOR_GUESTS)
        make_room(d);
    d->guest[d->guests++] = new;
    if (ari_opening_make(&d->guest[d->guests - 1].said.own, &d->key) != AR_OK)
        drop(d, d->guests - 1);
}

void ari_door_see_off(ari_door *d, int fd, const void *words, size_t bytes)
{
    /* Closed with something unread, a connection is reset, and the last words are lost. */
    const bool room = d->guests < ARI_DOOR_GUESTS; /* there is, for it was a guest itself until now */
    if (room && say(fd, words, bytes) && shutdown(fd, SHUT_WR) == 0)
        d->guest[d->guests++] = (ari_guest){.fd = fd, .leaves = true};
    else
        close(fd);
}

/* Answers what one has said until now. */
static void answer(ari_door *d, int i, ari_heard heard, ari_door_admit *admit, void *user)
{
    const ari_guest g = d->guest[i];
    unsigned char proof[ARI_SHA256_BYTES] = {0};
    if (heard == ARI_HEARD_PART || (heard == ARI_HEARD_OPENING && say(g.fd, &g.said.own, sizeof g.said.own)))
        return;
    if (heard == ARI_HEARD_STRANGER || heard == ARI_HEARD_OPENING) {
        drop(d, i);
        return;
    }
    remove_guest(d, i);
    if (heard == ARI_HEARD_PROCESS) {
        const ari_hello *hello = &g.said.heard.answer.hello;
        ari_proof_make(proof, &d->key, ARI_PROVER_SERVER, &g.said.heard.opening, &g.said.own, hello);
        if (say(g.fd, proof, sizeof proof))
            admit(user, hello, g.fd);
        else
            close(g.fd);
        return;
    }
    ari_heard_explain(d->refused, sizeof d->refused, heard, d->key.is_set, "another process");
    if (heard == ARI_HEARD_OTHER_KEY) /* no proof: it sees from that why */
        ari_door_see_off(d, g.fd, proof, sizeof proof);
    else
        ari_door_see_off(d, g.fd, &g.said.own, sizeof g.said.own);
}

static void hear(ari_door *d, int i, ari_door_admit *admit, void *user)
{
    ari_guest *g = &d->guest[i];
    const ssize_t got =
        g->leaves ? 0 : recv(g->fd, (char *)&g->said.heard + g->said.have, ari_handshake_wants(&g->said), 0);
    if (got > 0)
        answer(d, i, ari_handshake_hear(&g->said, &d->key, (size_t)got), admit, user);
    else if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        drop(d, i);
}

int ari_door_poll(const ari_door *d, struct pollfd *p)
{
    p[0] = (struct pollfd){.fd = d->listener, .events = POLLIN}; /* -1: ignored */
    for (int i = 0; i < d->guests; i++)
        p[1 + i] = (struct pollfd){.fd = d->guest[i].fd, .events = POLLIN};
    return 1 + d->guests;
}

void ari_door_serve(ari_door *d, const struct pollfd *p, int n, ari_door_admit *admit, void *user)
{
    for (int i = n - 2; i >= 0; i--) { /* downwards: what removing one moves has been heard */
        if (p[1 + i].revents)
            hear(d, i, admit, user);
    }
    if (p[0].revents)
        accept_one(d);
}

void ari_door_close(ari_door *d)
{
    while (d->guests > 0)
        drop(d, d->guests - 1);
    if (d->listener >= 0)
        close(d->listener);
    d->listener = -1;
}
