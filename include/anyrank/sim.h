/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SIM_H
#define ANYRANK_SIM_H

#include "anyrank/comm.h"
#include "anyrank/trace.h"

AR_BEGIN_DECLS

/* The simulated cluster: N ranks as threads of this process, collectives through shared memory.
 *
 * All algorithms give the same bits. Bytes are counted where they move, as what each rank's thread reads and writes of
 * other ranks' memory: over all ranks together the ring's total in each of them; over one rank the ring's share in ring
 * and direct, while in `last` the rank that happened to come last moved everything, and with more ranks than cores
 * `auto` lets those that have a core move what the others would.
 *
 * Where a call's queue stands on a device's stream its buffers are that device's memory, which all ranks of the group
 * share (else AR_ERR_MISMATCH): every algorithm is then work on the ranks' streams, moved as `direct` moves it, and the
 * host does not wait for it. With faults, verification or somebody who listens to a ring's steps the data go through
 * the host's memory, which then does wait. */
typedef enum ar_sim_algorithm {
    AR_SIM_AUTO,   /* last for short messages, else direct; two ranks with a core each swap the shortest sums */
    AR_SIM_DIRECT, /* rank r reduces slice r of N inputs into N outputs: two barriers */
    AR_SIM_RING,   /* 2(N-1) steps, each rank reads its left neighbour only */
    AR_SIM_LAST    /* the last rank to arrive does the work of all: one barrier */
} ar_sim_algorithm;

/* One step of a ring, as the trace sees it. phase 0: reduce-scatter, 1: all-gather. A reduce is a chain of phase 0, a
 * broadcast one of phase 1, whose chunks are segments of the whole buffer. */
typedef struct ar_ring_step {
    int rank, phase, step;
    int chunk;      /* the chunk that `rank` sends in this step; -1: none, in a chain */
    int read_from;  /* the rank whose memory was read to receive */
    int read_chunk; /* the chunk received */
    size_t bytes;   /* received */
} ar_ring_step;

/* --- transport faults --------------------------------------------------------------------------------------------- */

/* Faults between ranks. A collective's number counts what the rank takes part in, over all its communicators, splits
 * included, in the order in which it begins them: 1, 2, ... A transfer's number counts the pieces of other ranks'
 * memory that the rank's thread moves in that collective: 0, 1, ... */
typedef enum ar_sim_fault_kind {
    AR_SIM_DELAY,     /* the rank comes `ns` later to the collective */
    AR_SIM_STALL,     /* it stands still, before the collective (transfer 0) or in its middle, before that transfer; its
                         thread goes on when the world has failed. Others miss it after the timeout */
    AR_SIM_KILL,      /* it dies, at one of the same places. As where a launcher watches its processes, everybody hears
                         of it at once: AR_ERR_ABORTED, "rank 2 was killed ..." on every rank, its own included */
    AR_SIM_CORRUPT,   /* one bit of one element of a transfer arrives inverted */
    AR_SIM_DUPLICATE, /* a transfer arrives a second time, in place of the next one */
    AR_SIM_DROP,      /* a transfer never arrives: the receiver's memory stays as it was */
    AR_SIM_SLOW,      /* from that collective on, each takes the rank `ns` longer */
    AR_SIM_FAULT_KINDS
} ar_sim_fault_kind;
typedef struct ar_sim_fault {
    ar_sim_fault_kind kind;
    int rank;            /* in the world */
    uint64_t collective; /* 1, 2, ... */
    uint64_t transfer;   /* all but DELAY, SLOW; past the last of the collective: nothing happens */
    uint64_t bit;        /* CORRUPT: of the transfer, modulo its bits */
    uint64_t ns;         /* DELAY, SLOW */
} ar_sim_fault;

/* --- the cluster that virtual time pretends ----------------------------------------------------------------------- */

typedef struct ar_sim_link {
    double latency_s;   /* alpha: of one step of a ring */
    double bytes_per_s; /* beta: of one rank in one direction */
} ar_sim_link;
/* Ranks r and q share a node iff r / ranks_per_node == q / ranks_per_node. A collective takes what a ring over its
 * group takes, step by step, whatever algorithm moves the data here; the bytes are those that really move. */
typedef struct ar_sim_cluster {
    int ranks_per_node;          /* 0: all ranks share one node */
    ar_sim_link inside, between; /* between: not looked at while all ranks share one node */
    double flops;                /* of one rank, per second */
    double peak_flops;           /* what utilization (MFU) is a share of; 0: flops */
    double memory_bytes;         /* of one rank; 0: not given. Virtual time has no use for it */
    int gpu;                     /* whose operations and collectives are timed by their shapes and sizes:
                                    ar_sim_cluster_names[gpu - 1]; 0: each product at `flops` */
} ar_sim_cluster;                /* rates may be infinite: then it takes no time */
/** Reads a cluster from words with spaces or commas between them, as
 *      8x inside=2us:300GB/s between=5us:25GB/s flops=400T
 *  RANKSx: ranks of a node (left out: all share one, and there is no `between`); LINK: LATENCY:RATE or one of nvlink3,
 *  nvlink4, nvlink5, pcie4, pcie5, hdr, ndr, roce100; `nvlink` and `net` are other words for `inside` and `between`;
 *  peak=RATE and memory=80GB may be left out. Latencies in ns, us, ms, s; rates in B/s to TB/s or Mbit/s to Tbit/s;
 *  flops and peak bare or with G, T, P; memory in MB, GB, TB (powers of 1000), MiB, GiB. A machine's name in front,
 *  a100, h100, h200, b200 or gb200-nvl72, stands for the vendor's peak rates, which the words after it change: "h100
 *  flops=400T", with which every product runs at that rate. Errors: AR_ERR_ARG, naming the word and what would be right; *c is as it was. */
AR_NODISCARD ar_status ar_sim_cluster_parse(ar_sim_cluster *c, const char *text);
/** The machines that have names; ends with NULL. */
extern const char *const ar_sim_cluster_names[];

/* --- running ------------------------------------------------------------------------------------------------------ */

/* Figures of a deterministic schedule: equal for equal runs. */
typedef struct ar_sim_schedule {
    uint64_t choices; /* how often it was decided who goes on */
    uint64_t hash;    /* of all who did, in this order */
} ar_sim_schedule;

typedef struct ar_sim_options {
    ar_sim_algorithm algorithm;
    uint64_t timeout_ns; /* longest wait for a peer; 0: 10 s */
    /* Called by the receiving rank's thread in each step of AR_SIM_RING; NULL: nobody listens. */
    void (*ring_trace)(void *user, const ar_ring_step *step);
    void *ring_trace_user;
    /* Every transfer carries its number, length and a checksum, which the receiver compares: what the transport does
     * wrong becomes AR_ERR_DATA with both ranks, collective and element named, instead of a wrong result. Slower. */
    bool verify_transfers;
    const ar_sim_fault *faults; /* [fault_count]; borrowed */
    size_t fault_count;
    /* The threads of all ranks run one at a time; wherever one could wait or another overtake it, `schedule_seed`
     * decides who runs next. Time stands still except where all wait. The same seed, the same run. */
    bool explore;
    uint64_t schedule_seed;
    ar_sim_schedule *schedule;     /* explore: what became of it, when the run has ended; NULL: nobody asks. Borrowed */
    ar_trace *trace;               /* empty: records the run; NULL: nothing does. Borrowed */
    const ar_sim_cluster *cluster; /* virtual time; NULL: none. Borrowed */
    bool paced; /* with a cluster: a collective takes on this machine too what its links take by virtual time, from when
                   its last member came, at most the timeout; its ranks sleep meanwhile, so that a schedule can be
                   measured, not the links */
} ar_sim_options;

/** The world's failure as one rank saw it: the last collective it finished and the one it was in. */
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
 *  Errors: AR_ERR_ARG (ranks < 1 or > 4096; options that make no sense), AR_ERR_MEMORY, or the first rank's.
 *  Ownership: borrows options and arg until return. */
AR_NODISCARD ar_status ar_sim_run(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg,
                                  ar_sim_rank_report *reports);

/** Runs fn under schedules seed, seed + 1, ..., at most `seeds` of them, until one run is not AR_OK; that one's status
 *  is returned, its seed is in *failing, and the message ends with a line that names it: `explore` with that
 *  schedule_seed replays the run. begin (NULL: nothing) is called before each run, to set up what arg points to; its
 *  error ends the exploration as a run's does.
 *  Errors: as ar_sim_run; AR_ERR_ARG also for no seeds, more than there are from `seed` on, no place for the failing
 *  one, and a trace for more than one run. options: NULL, or the rest of the options (explore and schedule_seed are set
 *  here). */
AR_NODISCARD ar_status ar_sim_explore(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg,
                                      ar_status (*begin)(void *arg), uint64_t seed, uint64_t seeds, uint64_t *failing);

AR_END_DECLS
#endif
