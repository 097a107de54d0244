/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"
#include "gpu/cluster/process/link.h"

/* Everything that processes share besides their data: values, and the end of the world. Messages come by a link; a
 * thread of every process takes them in, also while the process computes, and so does whoever waits. The first failure
 * ends the world, as does a process that dies: every process gets it, whatever it waits for. Process 0 decides which
 * failure is the first. */
typedef struct ari_store ari_store;

/** Collective. `link` is owned from then on, also on failure. timeout_ns: longest wait for another process. Gives;
 *  ari_store_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_store_create(ari_store **gives, ari_link *link, uint64_t timeout_ns);
/** This process will call nothing more. Waits for the same of all others, and from a failure on only so long. Returns
 *  whether all have left. */
bool ari_store_leave(ari_store *s, uint64_t after_failure_ns);
/** Leaves, unless it has left, and waits for no other process after a failure. Accepts NULL. */
void ari_store_destroy(ari_store *s);
/** Since when it is known that this rank has left; 0: it may still call something. */
uint64_t ari_store_left_ns(ari_store *s, int rank);

/* --- values ------------------------------------------------------------------------------------------------------- */

/* Groups of the values of ar_process, whose seq counts both. */
#define ARI_STORE_GATHER UINT64_C(2)
#define ARI_STORE_BROADCAST UINT64_C(3)

/* Parts of several ranks, one after the other: i begins at `at + start[i]` and ends at `at + start[i + 1]`; `at` is
 * aligned for all types. */
typedef struct ari_gather_result {
    const char *at;
    const size_t *start;
    void *memory; /* free() */
} ari_gather_result;

/** Gives this process's part of value `seq` of a group to the ranks to [n]; does not wait. Errors: AR_ERR_IO; what ended
 *  the world. */
AR_NODISCARD ar_status ari_store_set(ari_store *s, uint64_t group, uint64_t seq, const int *to, int n,
                                     const void *bytes, size_t size);
/** The parts of the ranks rank [n], in their order; this process's own is `bytes`. Waits. After the timeout the world
 *  ends with a report of who is missing: `who`, and the ranks whose parts are not there; NULL: what all processes' views
 *  say. Errors: AR_ERR_TIMEOUT, AR_ERR_ABORTED, AR_ERR_MEMORY, what ended the world. */
AR_NODISCARD ar_status ari_store_get(ari_store *s, uint64_t group, uint64_t seq, const int *rank, int n,
                                     const void *bytes, size_t size, uint64_t timeout_ns, const char *who,
                                     ari_gather_result *gives);
/** The ranks rank [n] of a group, of which this process is one, give each other `bytes`. Errors: as ari_store_get. */
AR_NODISCARD ar_status ari_store_exchange(ari_store *s, uint64_t group, uint64_t seq, const int *rank, int n,
                                          const void *bytes, size_t size, ari_gather_result *gives);

/* --- the end of the world ----------------------------------------------------------------------------------------- */

/* Who looks after the work of a process. */
typedef struct ari_watcher {
    void (*tick)(void *user); /* in the store's thread, every ARI_TICK_MS */
    /* Location of this process, as text for ari_flight_report; free(). NULL: no memory. */
    char *(*view)(void *user);
    void (*failed)(void *user); /* in the store's thread, once; see ari_store_status */
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
 *  first. Returns when process 0 has decided, or after two seconds. */
void ari_store_fail(ari_store *s, ar_status st, const char *why);
/** The same, where all whom it is about, rank [n], find the same failure: each keeps `st`, with the calling thread's
 *  message. */
void ari_store_agree_failed(ari_store *s, ar_status st, const int *rank, int n);
/** The same with the table of what every rank is doing behind `line`: these ranks get `st`, the others AR_ERR_ABORTED.
 *  */
void ari_store_report(ari_store *s, ar_status st, const int *rank, int n, const char *line);
/** This process waits too long: asks where every process is, and ends the world with what follows from that. */
void ari_store_late(ari_store *s);
