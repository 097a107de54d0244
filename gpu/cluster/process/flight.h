/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/comm/comm_impl.h"

/* The collectives of a process, for the report when the world fails: those that it is in, and the last that it has
 * finished. The owner's lock guards a recorder. Groups have the same id on all their members; a send and the recv that
 * it meets are one collective of a group of two, the sender its member 0, the receiver its member 1. */
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
    struct ari_flight_call *next;
    uint64_t group, seq; /* seq: in the group, 1, 2, .. */
    uint64_t since_ns;   /* since when it waits for nothing but itself; when it ended, once it has */
    ari_call call;       /* its pointers lead nowhere */
    int n;
    size_t counts[ARI_FLIGHT_COUNTS], recv_counts[ARI_FLIGHT_COUNTS];
    char tag[ARI_FLIGHT_TAG];
} ari_flight_call;

typedef struct ari_flight {
    ari_flight_group *groups;
    ari_flight_call *open, **end; /* as they were entered; end: where the next one goes */
    int n_open;
    ari_flight_call done[ARI_FLIGHT_CALLS]; /* a ring: copies */
    uint64_t n_done;
} ari_flight;

/** Initialises a recorder. */
void ari_flight_init(ari_flight *f);
/** A group whose calls will be recorded; copies. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_flight_add(ari_flight *f, ari_flight_group **gives, uint64_t id, const int *rank, int n);
void ari_flight_remove(ari_flight *f, ari_flight_group *g);
/** An id that all members compute alike: of something of `id`. */
uint64_t ari_flight_id(uint64_t id, uint64_t a, uint64_t b);
/** A call of the group begins; c is the caller's, and borrowed until it leaves. */
void ari_flight_enter(ari_flight *f, ari_flight_call *c, ari_flight_group *g, const ari_call *call, uint64_t now_ns);
/** It has ended, and is remembered if `done`. */
void ari_flight_leave(ari_flight *f, ari_flight_call *c, bool done, uint64_t now_ns);
/** The recorder as text, a line for each group and each call; free(). NULL: no memory. */
char *ari_flight_text(const ari_flight *f, uint64_t now_ns);

/* A rank's answer when the world ends. */
typedef struct ari_flight_view {
    char *text; /* NULL: it has not answered; lines that make no sense are passed over */
    bool left;  /* it will call nothing more */
} ari_flight_view;

/** Finds the event from the views of `ranks` ranks, of which `late` was the first to complain, and writes it in one
 *  line, in the words of the simulator's reports. own[rank]: the ranks concerned. Returns AR_ERR_MISMATCH or
 *  AR_ERR_TIMEOUT. */
AR_NODISCARD ar_status ari_flight_judge(const ari_flight_view *views, int ranks, int late, bool *own, char *line,
                                        size_t size);
/** `line` and the table of the simulator's reports; free(). NULL: no memory. */
char *ari_flight_report(const ari_flight_view *views, int ranks, const char *line);
