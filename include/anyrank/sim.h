/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SIM_H
#define ANYRANK_SIM_H

#include "anyrank/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The simulated cluster: N ranks as threads of this process, collectives through shared memory.
 *
 * `direct` and `ring` give the same bits and count the same total of bytes; they differ in how data moves. */
typedef enum ar_sim_algorithm {
    AR_SIM_DIRECT, /* rank r reduces slice r of N inputs into N outputs: two barriers */
    AR_SIM_RING    /* 2(N-1) steps, each rank reads its left neighbour only */
} ar_sim_algorithm;

/* One step of a ring, as the trace sees it. phase 0: reduce-scatter, 1: all-gather. */
typedef struct ar_ring_step {
    int rank, phase, step;
    int chunk;      /* the chunk that `rank` sends in this step */
    int read_from;  /* the rank whose memory was read to receive */
    int read_chunk; /* the chunk received */
    size_t bytes;   /* received */
} ar_ring_step;

typedef struct ar_sim_options {
    ar_sim_algorithm algorithm;
    uint64_t timeout_ns; /* longest wait for a peer; 0: 10 s */
    /* Called by the receiving rank's thread in each step of AR_SIM_RING; NULL: nobody listens. */
    void (*ring_trace)(void *user, const ar_ring_step *step);
    void *ring_trace_user;
} ar_sim_options;

/** What the world's failure looked like for one rank: the last collective it finished and the one it was in. */
typedef struct ar_sim_rank_report {
    int rank;
    char status[32];  /* AR_OK, or the name of its own error */
    char last[96];    /* "all_reduce #12 layers.0.mlp.down_proj" or "none" */
    char current[96]; /* the same for the one it is in; "returned" if its function returned, "running" between two */
    double waiting_s; /* how long it had been there */
} ar_sim_rank_report;

typedef ar_status (*ar_rank_fn)(ar_comm *world, void *arg); /* runs once per rank, on that rank's thread */

/** Runs fn on `ranks` threads, each with its communicator over the whole world, and joins them all. Returns AR_OK if
 *  every rank did; otherwise the first error, with its message in ar_error_message of the calling thread: one line that
 *  says what happened, then the table of ranks. A rank that returns an error, or returns while others wait for it in a
 *  collective, ends the world; nobody waits longer than the timeout.
 *  reports: NULL, or `ranks` entries, filled when the result is not AR_OK (a world that succeeds leaves them zeroed).
 *  Errors: AR_ERR_ARG (ranks < 1 or > 4096), AR_ERR_MEMORY, or the first rank's.
 *  Ownership: borrows options and arg until return. */
AR_NODISCARD ar_status ar_sim_run(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg,
                                  ar_sim_rank_report *reports);

/** A mesh of named dimensions, outermost first (pp, dp, cp, tp): coordinates of a rank and its groups. */
typedef struct ar_mesh {
    int pp, dp, cp, tp; /* extents; their product is the world */
} ar_mesh;
/** Errors: AR_ERR_INDIVISIBLE if world is not pp*dp*cp*tp (the message names both). */
AR_NODISCARD ar_status ar_mesh_check(const ar_mesh *m, int world);
void ar_mesh_coords(const ar_mesh *m, int rank, int *pp, int *dp, int *cp, int *tp);
/** The ranks of `rank`'s group along `dim` ("pp", "dp", "cp", "tp"), in order; returns how many, 0 for another name.
 *  W = 16, tp = 4: tp groups {0..3}, {4..7}, ...; dp groups {0,4,8,12}, {1,5,9,13}, ... */
int ar_mesh_group(const ar_mesh *m, int rank, const char *dim, int *ranks, int cap);

#ifdef __cplusplus
}
#endif
#endif
