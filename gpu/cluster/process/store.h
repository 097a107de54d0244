/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"
#include "gpu/cluster/process/handshake.h"

/* Everything that processes share besides their data: values, and the end of the world. A thread of process 0, the
 * server, keeps the values; a thread of every process listens to it, also while the process computes or waits. The
 * first failure ends the world, as does a connection that closes too early: every process gets it, whatever it waits
 * for. */
typedef struct ari_store ari_store;

typedef struct ari_store_options {
    int rank, size;
    uint64_t job;        /* the same in all its processes */
    uint64_t timeout_ns; /* longest wait for another process */
    const char *host;    /* of process 0, or several, "a,b", of which one is it; borrowed until all have come */
    int port;
    int listener; /* process 0 of several: the socket at that port, owned from then on; else -1 */
    ari_key key;  /* the same in all; none: whoever knows the job may come in */
} ari_store_options;

/** Collective: returns when all have come. Other programs that connect to the port are turned away, and keep no process
 *  waiting. Gives; ari_store_destroy. Errors, the same for all that have come: AR_ERR_TIMEOUT, naming who is missing
 *  and that one had another key; AR_ERR_ARG, two processes with one rank, another number of processes; AR_ERR_ABORTED,
 *  one that came has gone; AR_ERR_IO; AR_ERR_MEMORY. Of one alone: AR_ERR_ARG, another job, key or version. */
AR_NODISCARD ar_status ari_store_create(ari_store **gives, const ari_store_options *o);
/** This process will call nothing more. Waits for the same of all others, and from a failure on only so long. Returns
 *  whether all have left. */
bool ari_store_leave(ari_store *s, uint64_t after_failure_ns);
/** Leaves, unless it has left, and waits for no other process after a failure. Accepts NULL. */
void ari_store_destroy(ari_store *s);
/** Since when it is known that this rank has left; 0: it may still call something. */
uint64_t ari_store_left_ns(ari_store *s, int rank);

/* --- values ------------------------------------------------------------------------------------------------------- */

/* A value has n parts, each set once by one process, and is there when all are. It is forgotten when `readers` have got
 * it. All who set or get it give the same n and readers. */
typedef struct ari_store_value {
    uint64_t group, seq; /* its name. Group 0: the calls of ar_process, whose parts are those of the ranks */
    int32_t index;       /* the part that is set; of no meaning to those who get */
    int32_t n, readers;
    uint64_t number; /* to those who get it: 1, 2, ..: no other value of a group but 0 has the same */
} ari_store_value;

/* The parts one after the other: i begins at `at + start[i]` and ends at `at + start[i + 1]`; `at` is aligned for all
 * types. */
typedef struct ari_gather_result {
    const char *at;
    const size_t *start;
    uint64_t number;
    void *memory; /* free() */
} ari_gather_result;

/** Does not wait. Errors: AR_ERR_IO; what ended the world. */
AR_NODISCARD ar_status ari_store_set(ari_store *s, const ari_store_value *v, const void *bytes, size_t size);
/** Waits. After the timeout the world ends with a report of who is missing: `who`, and the ranks whose parts are not
 *  there; NULL: what all processes' views say. Errors: AR_ERR_TIMEOUT, AR_ERR_ABORTED, what ended the world. */
AR_NODISCARD ar_status ari_store_get(ari_store *s, const ari_store_value *v, uint64_t timeout_ns, const char *who,
                                     ari_gather_result *gives);
/** The n members of a group, of which this process is `index`, give each other `bytes`. Errors: as ari_store_get. */
AR_NODISCARD ar_status ari_store_exchange(ari_store *s, uint64_t group, uint64_t seq, int index, int n,
                                          const void *bytes, size_t size, ari_gather_result *gives);

/* --- the end of the world ----------------------------------------------------------------------------------------- */

/* Who looks after the work of a process. Called in the store's thread. */
typedef struct ari_watcher {
    void (*tick)(void *user); /* every ARI_TICK_MS */
    /* Location of this process, as text for ari_flight_report; free(). NULL: no memory. */
    char *(*view)(void *user);
    void (*failed)(void *user); /* once; see ari_store_status */
    void *user;
} ari_watcher;
enum { ARI_TICK_MS = 10 };

/** Copied; NULL: no watcher any more. Returns when no call to an earlier one is under way. */
void ari_store_watch(ari_store *s, const ari_watcher *w);
/** AR_OK, or the failure, with its message. */
ar_status ari_store_status(ari_store *s);
/** The same with the status of those whom it is about, whether this process is one of them, and the text, which stays
 *  as long as the store. */
ar_status ari_store_failure(const ari_store *s, bool *own, const char **text);
/** Ends the world: this process gets `st`, the others AR_ERR_ABORTED with `why`, and so does this one if another was
 *  first. Returns when all have been notified, or after two seconds. */
void ari_store_fail(ari_store *s, ar_status st, const char *why);
/** The same, where all whom it is about find the same failure: each keeps `st`, with the calling thread's message. */
void ari_store_agree_failed(ari_store *s, ar_status st);
/** The same with the table of what every rank is doing behind `line`: these ranks get `st`, the others AR_ERR_ABORTED.
 *  */
void ari_store_report(ari_store *s, ar_status st, const int *rank, int n, const char *line);
/** This process waits too long: asks where every process is, and ends the world with what follows from that. */
void ari_store_late(ari_store *s);
