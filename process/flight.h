/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PROCESS_FLIGHT_H
#define ARI_PROCESS_FLIGHT_H

#include "ref/comm/comm_impl.h"

/* The last collectives of a process, for the report when the world fails: which it has entered, which are done. The
 * owner's lock guards a recorder. Groups have the same id on all their members; a send and the recv that it meets are
 * one collective of a group of two, the sender its member 0, the receiver its member 1. */
enum { ARI_FLIGHT_CALLS = 64, ARI_FLIGHT_RANKS = 48, ARI_FLIGHT_TAG = 72 };

typedef struct ari_flight_group {
    uint64_t id;
    uint64_t entered; /* collectives */
    int32_t n;
    char ranks[ARI_FLIGHT_RANKS]; /* "0-3" */
    int *rank;                    /* [n], of the world */
    struct ari_flight_group *next;
} ari_flight_group;

/* A call as it is kept: without the memory that the caller's points to. Words are made of it only for a view. */
enum { ARI_FLIGHT_COUNTS = 9 }; /* as many as a description has room for, and one that shows that there are more */
typedef struct ari_flight_call {
    uint64_t group, seq; /* seq: in the group, 1, 2, ..; 0: no call */
    uint64_t since_ns;   /* since when it waits for nothing but itself; when it ended, once it has */
    bool done;
    ari_call call; /* its pointers lead nowhere */
    int n;
    size_t counts[ARI_FLIGHT_COUNTS], recv_counts[ARI_FLIGHT_COUNTS];
    char tag[ARI_FLIGHT_TAG];
} ari_flight_call;

typedef struct ari_flight {
    ari_flight_group *groups;
    ari_flight_call call[ARI_FLIGHT_CALLS]; /* a ring: number i is at i % ARI_FLIGHT_CALLS */
    uint64_t calls;
} ari_flight;

/** A group whose calls will be recorded; copies. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_flight_add(ari_flight *f, ari_flight_group **gives, uint64_t id, const int *rank, int n);
void ari_flight_remove(ari_flight *f, ari_flight_group *g);
/** Returns the call's number, for ari_flight_done. */
uint64_t ari_flight_enter(ari_flight *f, ari_flight_group *g, const ari_call *call, int n, uint64_t now_ns);
void ari_flight_done(ari_flight *f, uint64_t number, uint64_t now_ns);
/** From now on the call waits for nothing but itself. */
void ari_flight_begin(ari_flight *f, uint64_t number, uint64_t now_ns);
/** The recorder as bytes; free(). NULL: no memory. */
void *ari_flight_pack(const ari_flight *f, uint64_t now_ns, size_t *bytes);

/* A recorder as bytes, as another process sent it; its texts are ended where they are not. size 0: nothing. */
typedef struct ari_flight_view {
    void *bytes; /* aligned for uint64_t */
    size_t size;
} ari_flight_view;

/** From the views of `size` ranks, of which `late` was the first to complain: what happened, in the words and with the
 *  table of the simulator's reports. own[rank]: whom it is about. *gives NULL: no memory; else free(). Returns
 *  AR_ERR_MISMATCH or AR_ERR_TIMEOUT. */
AR_NODISCARD ar_status ari_flight_report(const ari_flight_view *views, int size, int late, bool *own, char **gives);

#endif
