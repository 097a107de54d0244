/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SIM_H
#define ANYRANK_SIM_H

#include "anyrank/comm.h"
#include "anyrank/trace.h"

AR_BEGIN_DECLS

/* The simulated cluster: N ranks run as threads of this process, with collectives through shared memory. The group of
 * all N ranks is the world.
 *
 * The algorithm of the collectives changes neither bits nor the total number of bytes, which is that of a ring. Each
 * rank counts the bytes of other ranks' memory that its thread reads and writes: with RING and DIRECT every rank counts
 * a ring's share; with LAST the last rank to arrive counts everything; with AUTO and more ranks than cores, running
 * ranks move data for waiting ones.
 *
 * If a call's queue is a device stream (CUDA), the buffers are memory of that device, which all ranks of the group must
 * share (else AR_ERR_MISMATCH). Then every algorithm moves data as DIRECT does, as work on the ranks' streams, without
 * blocking the host. With faults, verify_transfers or ring_trace, data go through host memory, and the host blocks. */
typedef enum ar_sim_algorithm {
    AR_SIM_AUTO,   /* LAST for short messages, else DIRECT; two ranks with a core each swap the shortest ones */
    AR_SIM_DIRECT, /* rank r reduces slice r of all N inputs and writes it to all N outputs; two barriers */
    AR_SIM_RING,   /* a ring: 2(N-1) steps, in which each rank reads from its left neighbour only */
    AR_SIM_LAST    /* the last rank to arrive moves the data of all ranks; one barrier */
} ar_sim_algorithm;

/* One step of a rank in a ring collective, for ar_sim_options.ring_trace. phase: 0 reduce-scatter, 1 all-gather. A
 * reduce is a chain of phase 0 and a broadcast a chain of phase 1, whose chunks are segments of the whole buffer. */
typedef struct ar_ring_step {
    int rank, phase;
    int step;       /* from 0 in each phase */
    int chunk;      /* the chunk that `rank` sends in this step; -1: none, possible in a chain */
    int read_from;  /* the rank from whose memory `rank` receives: a step without a receive is not traced */
    int read_chunk; /* the chunk that it receives */
    size_t bytes;   /* bytes received */
} ar_ring_step;

/* --- transport faults --------------------------------------------------------------------------------------------- */

/* Faults that the simulated transport injects. Collectives are numbered 1, 2, .. by each rank in the order in which it
 * begins them, over all its communicators, splits included. Transfers are the pieces of other ranks' memory that the
 * rank's thread moves in a collective, numbered 0, 1, .. */
typedef enum ar_sim_fault_kind {
    AR_SIM_DELAY,     /* the rank joins the collective `ns` nanoseconds late */
    AR_SIM_STALL,     /* the rank hangs before the given transfer (0: before the collective) until the world has failed;
                         other ranks get AR_ERR_TIMEOUT */
    AR_SIM_KILL,      /* the rank dies before the given transfer. All ranks learn of it at once, as from a launcher, and
                         get AR_ERR_ABORTED, "rank 2 was killed ..", the dead one included */
    AR_SIM_CORRUPT,   /* one bit of the transfer is flipped */
    AR_SIM_DUPLICATE, /* the transfer's data arrive again instead of the next transfer's */
    AR_SIM_DROP,      /* the transfer does not arrive; the receiver's memory is unchanged */
    AR_SIM_SLOW,      /* every collective from this one on takes the rank `ns` nanoseconds longer */
    AR_SIM_FAULT_KINDS
} ar_sim_fault_kind;
/* A fault to inject: what happens to which rank, and when. */
typedef struct ar_sim_fault {
    ar_sim_fault_kind kind;
    int rank;            /* the faulty rank, numbered in the world */
    uint64_t collective; /* number of the rank's collective */
    uint64_t transfer;   /* number of the transfer, except for DELAY and SLOW; no effect if the collective has fewer */
    uint64_t bit;        /* CORRUPT: number of the bit in the transfer, modulo its length */
    uint64_t ns;         /* DELAY, SLOW: nanoseconds */
} ar_sim_fault;

/* --- the modelled cluster of virtual time ------------------------------------------------------------------------- */

/* Speed of a link between two ranks. */
typedef struct ar_sim_link {
    double latency_s;   /* latency of one step of a ring, in seconds */
    double bytes_per_s; /* bandwidth of one rank in one direction */
} ar_sim_link;
/* A cluster whose speed the virtual clock models. Ranks r and q are on one node if r / ranks_per_node == q /
 * ranks_per_node. A collective takes the time of a ring over its group, step by step, whatever algorithm really moves
 * the data. Rates may be infinite: then the work takes no time. */
typedef struct ar_sim_cluster {
    int ranks_per_node;          /* 0: all ranks are on one node */
    ar_sim_link inside, between; /* links inside a node, and between nodes (unused if all ranks are on one node) */
    double flops;                /* FLOP/s that one rank achieves */
    double peak_flops;           /* FLOP/s that utilization (MFU) refers to; 0: flops */
    double memory_bytes;         /* memory of one rank; 0: not given. Does not affect time */
    int gpu;                     /* i > 0: the GPU ar_sim_cluster_names[i - 1], which times operations and collectives
                                    by their shapes and sizes; 0: matrix products run at `flops` */
} ar_sim_cluster;
/** Parses a cluster from words separated by spaces or commas, such as
 *      8x inside=2us:300GB/s between=5us:25GB/s flops=400T
 *  RANKSx is the number of ranks per node (omitted: one node, without `between`). A link is LATENCY:RATE or one of
 *  nvlink3, nvlink4, nvlink5, pcie4, pcie5, hdr, ndr, roce100; `nvlink` and `net` are synonyms of `inside` and
 *  `between`. peak=RATE and memory=80GB are optional. Latencies are in ns, us, ms, s; link rates in B/s to TB/s or
 *  Mbit/s to Tbit/s; flops and peak are plain or with G, T, P; memory is in MB, GB, TB (powers of 1000), MiB, GiB. A
 *  first word a100, h100, h200, b200 or gb200-nvl72 sets that machine's peak rates, which further words override: with
 *  "h100 flops=400T" every matrix product runs at 400 TFLOP/s. Errors: AR_ERR_ARG (the message names the wrong word and
 *  valid ones; *c is unchanged). */
AR_NODISCARD ar_status ar_sim_cluster_parse(ar_sim_cluster *c, const char *text);
/** The machine names that ar_sim_cluster_parse knows, NULL-terminated. */
extern const char *const ar_sim_cluster_names[];

/* --- running ------------------------------------------------------------------------------------------------------ */

/* Fingerprint of a deterministic thread schedule (ar_sim_options.explore); equal runs have equal ones. */
typedef struct ar_sim_schedule {
    uint64_t choices; /* number of times that the next thread was chosen */
    uint64_t hash;    /* of the chosen threads in order */
} ar_sim_schedule;

/* Options of ar_sim_run. */
typedef struct ar_sim_options {
    ar_sim_algorithm algorithm; /* of the collectives */
    uint64_t timeout_ns;        /* longest wait for a peer, in nanoseconds; 0: 10 s */
    /* Callback in each step of an AR_SIM_RING collective, on the receiving rank's thread; NULL: none. */
    void (*ring_trace)(void *user, const ar_ring_step *step);
    void *ring_trace_user; /* its first argument */
    /* Adds number, length and checksum to each transfer, which the receiver checks: a transport error becomes
     * AR_ERR_DATA, naming both ranks, collective and element, instead of a wrong result. Slower. */
    bool verify_transfers;
    const ar_sim_fault *faults; /* faults to inject, [fault_count]; borrowed */
    size_t fault_count;
    /* Deterministic scheduling: the ranks' threads run one at a time, and at each point where a thread could wait or be
     * overtaken a random generator with schedule_seed chooses the next one. Time advances only if all wait. Runs with
     * equal seeds are equal. */
    bool explore;
    uint64_t schedule_seed;
    ar_sim_schedule *schedule;     /* with explore: output, the schedule that was run; borrowed; NULL: not wanted */
    ar_trace *trace;               /* an empty trace that records the run; borrowed; NULL: no trace */
    const ar_sim_cluster *cluster; /* turns on virtual time, by this cluster; borrowed; NULL: none */
    bool paced; /* with a cluster: makes each collective take its virtual time in real time too (at most the timeout),
                   from the arrival of the last rank on; ranks sleep meanwhile. For measuring a schedule's overlap */
} ar_sim_options;

/** The state of one rank when the world failed. */
typedef struct ar_sim_rank_report {
    int rank;
    char status[32];  /* "AR_OK", or the name of the rank's own error */
    char last[96];    /* last collective that it completed, "all_reduce #12 layers.0.mlp.down_proj"; "none" */
    char current[96]; /* collective that it was in; "running" if in none, "returned" if its function had returned */
    double waiting_s; /* seconds that it had been in this state */
} ar_sim_rank_report;

/* A rank's function; it runs once for each rank, on that rank's thread. world: the rank's communicator of all ranks. */
typedef ar_status (*ar_rank_fn)(ar_comm *world, void *arg);

/** Runs fn(world, arg) on `ranks` threads, one for each rank, and joins them. Returns AR_OK if every rank returned it;
 *  else the first error, with a message (ar_error_message) of one line about the cause and a table of all ranks. A rank
 *  that returns an error, or returns while others wait for it in a collective, fails the world; no rank waits longer
 *  than the timeout. reports: [ranks], filled if the result is not AR_OK, else zeroed; NULL: not wanted. Borrows
 *  options and arg until return. Errors: AR_ERR_ARG (ranks < 1 or > 4096, contradictory options), AR_ERR_MEMORY, the
 *  first failing rank's. */
AR_NODISCARD ar_status ar_sim_run(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg,
                                  ar_sim_rank_report *reports);

/** Runs fn as ar_sim_run does under the deterministic schedules seed, seed + 1, .., at most `seeds` of them, until a
 *  run fails. Then it returns the run's status, sets *failing to its seed, and ends the message with that seed;
 *  ar_sim_run with `explore` and this schedule_seed repeats the run. begin: called before each run to prepare *arg;
 *  NULL: none; its error ends the exploration like a failed run. options: further options (explore and schedule_seed
 *  are ignored); NULL: none. Errors: as ar_sim_run; AR_ERR_ARG also if seeds is 0 or seed + seeds overflows, failing is
 *  NULL, or a trace is given for more than one run. */
AR_NODISCARD ar_status ar_sim_explore(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg,
                                      ar_status (*begin)(void *arg), uint64_t seed, uint64_t seeds, uint64_t *failing);

AR_END_DECLS
#endif
