/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <poll.h>

#include "gpu/cluster/process/handshake.h"

/* The socket at which process 0 listens until all processes have come. Other programs, and processes without the job's
 * key, may connect too. They delay nobody, however many and however slow they are: nothing here waits, few connections
 * are served at a time, and a new one replaces the oldest. */
enum { ARI_DOOR_GUESTS = 64, ARI_DOOR_POLLED = 1 + ARI_DOOR_GUESTS };

typedef struct ari_guest {
    int fd;
    bool leaves; /* it has been answered, and stays until it has read that */
    ari_handshake said;
} ari_guest;

typedef struct ari_door {
    int listener; /* -1: closed */
    ari_key key;
    ari_guest guest[ARI_DOOR_GUESTS]; /* the oldest first */
    int guests;
    char refused[256]; /* why a process was turned away for its key or version, the last one; "": none was */
} ari_door;

/** One that has proved itself, over a connection that the callee owns from then on. */
typedef void ari_door_admit(void *user, const ari_hello *hello, int fd);

/** Fills in the descriptors to wait for; returns how many of p[ARI_DOOR_POLLED]. */
int ari_door_poll(const ari_door *d, struct pollfd *p);
/** After a poll of these n. */
void ari_door_serve(ari_door *d, const struct pollfd *p, int n, ari_door_admit *admit, void *user);
/** The connection ends once these last words were read, or at the latest with the door. */
void ari_door_see_off(ari_door *d, int fd, const void *words, size_t bytes);
void ari_door_close(ari_door *d);
