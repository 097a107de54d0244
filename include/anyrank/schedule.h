/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SCHEDULE_H
#define ANYRANK_SCHEDULE_H

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The schedule of a pipeline as data: for each of its ranks a list of operations, which it does in that order. What
 * moves between ranks is in the lists too. Stage s of S is rank s mod ranks's. */

#define AR_MAX_STAGES 256
#define AR_MAX_STAGE_MICRO_BATCHES (1 << 22) /* stages times micro-batches; so many fit into memory with their lists */

/* A kind, and its name:
 *    1f1b         each rank goes forward as far as it must, then one forward, one backward (Narayanan et al. 2019,
 *                 PipeDream-Flush in arXiv:2104.04473)
 *    gpipe        all micro-batches forward, then all backward (Huang et al. 2019, arXiv:1811.06965)
 *    interleaved  1F1B of several stages of a rank, which take turns (Narayanan et al. 2021, arXiv:2104.04473)
 *    zero-bubble  1F1B whose backward passes are cut in two: gradients of the input when they are due, gradients of the
 *                 weights where the rank would wait (ZB-H1 of Qi et al. 2023, arXiv:2401.10241) */
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

/* Kind, and its name in files, which is PyTorch's (torch.distributed.pipelining). */
/* clang-format off */
#define AR_PP_OPERATION_TABLE(X)                                                                       \
    X(FORWARD, "F")                                                                                    \
    X(BACKWARD, "B")              /* gradients of the input and of the weights */                      \
    X(BACKWARD_INPUT, "I")        /* of the input alone */                                             \
    X(BACKWARD_WEIGHT, "W")       /* of the weights, once those of the input are there */              \
    X(SEND_ACTIVATION, "SEND_F")  /* what the stage made, to the stage after it */                     \
    X(RECV_ACTIVATION, "RECV_F")  /* what the stage takes, from the one before it; from here on the    \
                                     rank is ready for it, and the forward pass waits for it */        \
    X(SEND_GRADIENT, "SEND_B")    /* of what the stage took, to the stage before it */                 \
    X(RECV_GRADIENT, "RECV_B")    /* of what the stage made, from the one after it; as RECV_ACTIVATION */
/* clang-format on */
typedef enum ar_pp_kind {
#define AR_PP_OPERATION_ENUM(name, text) AR_PP_##name,
    AR_PP_OPERATION_TABLE(AR_PP_OPERATION_ENUM)
#undef AR_PP_OPERATION_ENUM
        AR_PP_KINDS
} ar_pp_kind;

/** An operation of a rank on a micro-batch in one of its stages. */
typedef struct ar_pp_operation {
    ar_pp_kind kind;
    int stage, micro;
} ar_pp_operation;

/** Size of a schedule. Rank r has the stages r, r + ranks, r + 2 ranks, ...; stages is a multiple of ranks. */
typedef struct ar_pipeline_shape {
    int ranks, stages, micro_batches;
} ar_pipeline_shape;

/** Lists of operations that are legal together: every micro-batch goes forward and backward through every stage once,
 *  in an order that its data allows; every transfer between ranks is sent once and received once, in the same order by
 *  both; and no rank waits for ever. Whatever makes one refuses all else. Immutable; may be read by many threads. */
typedef struct ar_pipeline_schedule ar_pipeline_schedule;

/* --- running through one ------------------------------------------------------------------------------------------ */

/** Times that a micro-batch takes in a stage, and that its output takes to the next stage, or the output's gradient
 *  back. In any unit. B takes backward_input + backward_weight. */
typedef struct ar_pp_times {
    double forward, backward_input, backward_weight, transfer;
} ar_pp_times;
typedef struct ar_pp_rank_run {
    double busy, end; /* time of its computations, and when the last of them ends */
    size_t in_flight; /* the most (stage, micro-batch) at once whose forward pass has begun and whose B or W has not
                          ended: whose activations it keeps */
} ar_pp_rank_run;
typedef struct ar_pp_run {
    double makespan; /* until the last rank ends */
    double bubble;   /* time in which ranks wait, as a share of that in which they compute: ranks * makespan / sum of
                        busy - 1 */
    ar_pp_rank_run rank[AR_MAX_STAGES];
} ar_pp_run;
/** A computation, or a transfer on the rank that receives it, from when both ends are ready for it. */
typedef void (*ar_pp_event_fn)(void *user, int rank, const ar_pp_operation *o, double begin, double end);

AR_END_DECLS
#endif
