/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SCHEDULE_H
#define ANYRANK_SCHEDULE_H

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Pipeline schedules as data: for each pipeline rank the list of operations that it runs, in order, sends and receives
 * included. Rank r of P has stages r, r + P, r + 2P, .. */

#define AR_MAX_STAGES 256
#define AR_MAX_STAGE_MICRO_BATCHES (1 << 22) /* largest stages * micro-batches, so that the lists fit into memory */

/* The built-in schedules, X(enumerator, name):
 *    1f1b         warm-up with forward passes, then one forward, one backward in turn (Narayanan et al. 2019,
 *                 PipeDream-Flush in arXiv:2104.04473)
 *    gpipe        all micro-batches forward, then all backward (Huang et al. 2019, arXiv:1811.06965)
 *    interleaved  1F1B with several stages on each rank, which take turns (Narayanan et al. 2021, arXiv:2104.04473)
 *    zero-bubble  1F1B with split backward passes: input gradients as in 1F1B, weight gradients when the rank
 *                 would otherwise wait (ZB-H1 of Qi et al. 2023, arXiv:2401.10241) */
/* clang-format off */
#define AR_PP_SCHEDULE_TABLE(X)      \
    X(1F1B, "1f1b")                  \
    X(GPIPE, "gpipe")                \
    X(INTERLEAVED, "interleaved")    \
    X(ZERO_BUBBLE, "zero-bubble")
/* clang-format on */
typedef enum ar_pp_schedule {
#define AR_PP_SCHEDULE_ENUM(name, text) AR_PP_##name,
    AR_PP_SCHEDULE_TABLE(AR_PP_SCHEDULE_ENUM)
#undef AR_PP_SCHEDULE_ENUM
        AR_PP_SCHEDULES
} ar_pp_schedule;

/* The kinds of operation, X(enumerator, name in files); the names are those of torch.distributed.pipelining. */
/* clang-format off */
#define AR_PP_OPERATION_TABLE(X)                                                                       \
    X(FORWARD, "F")                                                                                    \
    X(BACKWARD, "B")              /* computes input and weight gradients */                            \
    X(BACKWARD_INPUT, "I")        /* computes input gradients only */                                  \
    X(BACKWARD_WEIGHT, "W")       /* computes weight gradients, after BACKWARD_INPUT */                \
    X(SEND_ACTIVATION, "SEND_F")  /* sends the output to the next stage */                             \
    X(RECV_ACTIVATION, "RECV_F")  /* posts the receive of the input from the stage before, for which   \
                                     FORWARD waits */                                                  \
    X(SEND_GRADIENT, "SEND_B")    /* sends the input gradient to the stage before */                   \
    X(RECV_GRADIENT, "RECV_B")    /* posts the receive of the output gradient from the next stage */
/* clang-format on */
typedef enum ar_pp_kind {
#define AR_PP_OPERATION_ENUM(name, text) AR_PP_##name,
    AR_PP_OPERATION_TABLE(AR_PP_OPERATION_ENUM)
#undef AR_PP_OPERATION_ENUM
        AR_PP_KINDS
} ar_pp_kind;

/** One operation of a rank's list: its kind, the stage that it belongs to, and the micro-batch (both from 0). */
typedef struct ar_pp_operation {
    ar_pp_kind kind;
    int stage, micro;
} ar_pp_operation;

/** Size of a schedule. `stages` is a multiple of `ranks`; rank r has stages r, r + ranks, r + 2 ranks, .. */
typedef struct ar_pipeline_shape {
    int ranks, stages, micro_batches;
} ar_pipeline_shape;

/** A checked pipeline schedule. Every micro-batch goes forward and backward through every stage once, in an order that
 *  its data dependencies allow; each transfer is sent once and received once, in the same order on both ranks; and the
 *  ranks cannot deadlock. Functions that create a schedule refuse lists that break these rules. Immutable. */
typedef struct ar_pipeline_schedule ar_pipeline_schedule;

/* --- simulated time ----------------------------------------------------------------------------------------------- */

/** Durations for simulating a schedule, in any one unit: a micro-batch's forward pass, input gradients and weight
 *  gradients in a stage (operation B takes the sum of both), and a transfer between stages. */
typedef struct ar_pp_times {
    double forward, backward_input, backward_weight, transfer;
} ar_pp_times;
/** Results of one rank in a simulated schedule. */
typedef struct ar_pp_rank_run {
    double busy, end; /* total time of its computations; time at which its last computation ends */
    size_t in_flight; /* peak number of (stage, micro-batch) pairs with stored activations: from F's begin to the end of
                         B or W */
} ar_pp_rank_run;
/** Results of a simulated schedule. */
typedef struct ar_pp_run {
    double makespan; /* time at which the last rank ends */
    double bubble;   /* idle time of all ranks over their compute time: ranks * makespan / (sum of busy) - 1 */
    ar_pp_rank_run rank[AR_MAX_STAGES];
} ar_pp_run;
/** Callback of the simulation for each operation o of `rank`: a computation, or a transfer (reported for the receiving
 *  rank; it begins when both ranks are ready). `begin` and `end` are in the unit of ar_pp_times. */
typedef void (*ar_pp_event_fn)(void *user, int rank, const ar_pp_operation *o, double begin, double end);

AR_END_DECLS
#endif
