/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NCCL_CONTROL_H
#define ARI_NCCL_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/nccl/gate.h"

/* What processes tell each other beside their data: that one has failed or is gone, where each of them is, and what
 * they agree upon. A thread of process 0, the hub, has a connection to each; a thread of every process listens to it,
 * and so hears while the process computes or waits. The first failure ends the world: it is kept, and everybody gets
 * it. */
typedef struct ari_control ari_control;

typedef struct ari_control_options {
    int rank, size;
    uint64_t timeout_ns;           /* longest wait for another process */
    int fd;                        /* to process 0; process 0: -1. Owned from then on */
    int *hub;                      /* process 0: [size], to the others, owned; [0] is not looked at. Else NULL */
    char (*names)[ARI_NAME_BYTES]; /* process 0: [size], copied. Else NULL */
} ari_control_options;

/* Who looks after the work of a process. Called in the control's thread. */
typedef struct ari_watcher {
    void (*tick)(void *user); /* every ARI_TICK_MS */
    /* Where this process is, as bytes for ari_flight_report; free(). NULL: no memory. */
    void *(*view)(void *user, size_t *bytes);
    void (*failed)(void *user); /* once; ari_control_status tells */
    void *user;
} ari_watcher;
enum { ARI_TICK_MS = 10 };

/* What each of `n` gave, one after the other: bytes[i] begins at `at + start[i]` and ends at `at + start[i + 1]`. */
typedef struct ari_gifts {
    char *at;
    size_t *start;
} ari_gifts;
void ari_gifts_fini(ari_gifts *g);

/** Gives; ari_control_destroy. On failure the connections are closed. Errors: AR_ERR_MEMORY, AR_ERR_IO. */
AR_NODISCARD ar_status ari_control_create(ari_control **gives, const ari_control_options *o);
/** Collective, unless the world has failed: then it waits for nobody. Accepts NULL. */
void ari_control_destroy(ari_control *c);

/** Copied; NULL: nobody looks any more. Returns when no call to an earlier one is under way. */
void ari_control_watch(ari_control *c, const ari_watcher *w);
/** AR_OK, or the failure, with its message. */
ar_status ari_control_status(ari_control *c);
/** Can be read once there is a failure. */
int ari_control_wake_fd(const ari_control *c);

/** Ends the world: this process gets `st`, the others AR_ERR_ABORTED with `why`, and so does this one if another was
 *  first. Returns when all is said, or after a second. */
void ari_control_fail(ari_control *c, ar_status st, const char *why);
/** The same, where all whom it is about find it alike: each keeps `st`, with the calling thread's message. */
void ari_control_agree_failed(ari_control *c, ar_status st);
/** This process waits too long: asks where everybody is, and ends the world with what that tells. */
void ari_control_late(ari_control *c);
/** The n members of a group, of which this process is `index`, give each other `bytes`; `group` and `seq` are the
 *  meeting's own. Errors: AR_ERR_TIMEOUT, AR_ERR_ABORTED, what ended the world. */
AR_NODISCARD ar_status ari_control_exchange(ari_control *c, uint64_t group, uint64_t seq, int index, int n,
                                            const void *bytes, size_t size, ari_gifts *gives);

#endif
