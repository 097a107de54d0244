/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PROCESS_CONTROL_H
#define ARI_PROCESS_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/process.h"

/* What processes send each other besides their data: that one has failed or is gone, where each of them is, and what
 * they agree upon. A thread of process 0, the coordinator, has a connection to each; a thread of every process listens
 * to it, also while the process computes or waits. The first failure ends the world: it is kept, and every process gets
 * it. */
typedef struct ari_control ari_control;

enum { ARI_NAME_BYTES = 96 };

typedef struct ari_control_options {
    uint64_t timeout_ns; /* longest wait for another process */
    int fd;              /* to process 0; process 0: -1. Owned from then on */
    /* Process 0; else 0 and NULL */
    int size;
    const int *clients;            /* [size], to the others, owned; [0] is not looked at */
    char (*names)[ARI_NAME_BYTES]; /* [size], copied */
} ari_control_options;

/* Who looks after the work of a process. Called in the control's thread. */
typedef struct ari_watcher {
    void (*tick)(void *user); /* every ARI_TICK_MS */
    /* Where this process is, as bytes for ari_flight_report; free(). NULL: no memory. */
    void *(*view)(void *user, size_t *bytes);
    void (*failed)(void *user); /* once; see ari_control_status */
    void *user;
} ari_watcher;
enum { ARI_TICK_MS = 10 };

/* What each of `n` gave, one after the other: bytes[i] begins at `at + start[i]` and ends at `at + start[i + 1]`.
 * `at` is aligned for all types. */
typedef struct ari_gather_result {
    const char *at;
    const size_t *start;
    void *memory; /* free() */
} ari_gather_result;

/** Gives; ari_control_destroy. On failure the connections are closed. Errors: AR_ERR_MEMORY, AR_ERR_IO. */
AR_NODISCARD ar_status ari_control_create(ari_control **gives, const ari_control_options *o);
/** Collective, unless the world has failed: then it waits for no other process. Accepts NULL. */
void ari_control_destroy(ari_control *c);

/** Copied; NULL: no watcher any more. Returns when no call to an earlier one is under way. */
void ari_control_watch(ari_control *c, const ari_watcher *w);
/** AR_OK, or the failure, with its message. */
ar_status ari_control_status(ari_control *c);
/** Can be read once there is a failure. */
int ari_control_wake_fd(const ari_control *c);

/** Ends the world: this process gets `st`, the others AR_ERR_ABORTED with `why`, and so does this one if another was
 *  first. Returns when all have been notified, or after a second. */
void ari_control_fail(ari_control *c, ar_status st, const char *why);
/** The same, where all whom it is about find the same failure: each keeps `st`, with the calling thread's message. */
void ari_control_agree_failed(ari_control *c, ar_status st);
/** This process waits too long: asks where every process is, and ends the world with what follows from that. */
void ari_control_late(ari_control *c);
/** The n members of a group, of which this process is `index`, give each other `bytes`; `group` and `seq` belong to
 *  this exchange alone. Errors: AR_ERR_TIMEOUT, AR_ERR_ABORTED, what ended the world. */
AR_NODISCARD ar_status ari_control_exchange(ari_control *c, uint64_t group, uint64_t seq, int index, int n,
                                            const void *bytes, size_t size, ari_gather_result *gives);

#endif
