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
/** "1f1b", "gpipe", "interleaved", "zero-bubble"; "?" for an unknown value. Static storage. */
const char *ar_pp_schedule_name(ar_pp_schedule s);

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
/** "F", "RECV_B"; "?" for an unknown value. Static storage. */
const char *ar_pp_kind_name(ar_pp_kind k);

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

/** The schedule of a kind, of stages = ranks * virtual_stages, with the transfers between ranks: SEND follows what
 *  makes the value, RECV precedes the computation before the one that takes it, so that the transfer goes on meanwhile.
 *  On rank r of p, with m micro-batches and v stages of each rank, w forward passes precede the first backward pass:
 *    gpipe        w = v m
 *    1f1b         w = min(m, p-r)
 *    interleaved  w = min(v m, 2(p-r-1) + (v-1)p + 1): stages take turns every p micro-batches (arXiv:2104.04473).
 *                 If p does not divide m: the schedule of the next multiple, without the missing micro-batches
 *    zero-bubble  w = min(m, p-r), and W follows r micro-batches behind I (ZB-H1, arXiv:2401.10241, section 2.2)
 *  and then the two take turns. v is 1 but for interleaved, which is 1f1b with v = 1.
 *  Errors: AR_ERR_ARG (extents of less than 1, more than AR_MAX_STAGES stages, v), AR_ERR_OVERFLOW (more than
 *  AR_MAX_STAGE_MICRO_BATCHES), AR_ERR_MEMORY. Gives; ar_pipeline_schedule_destroy. */
AR_NODISCARD ar_status ar_pipeline_schedule_create(ar_pipeline_schedule **gives, ar_pp_schedule kind, int ranks,
                                                   int virtual_stages, int micro_batches);
/** A schedule of one's own: copies the counts[r] operations of each rank's list. Where no list has a SEND or RECV, they
 *  are put in as above. Errors: AR_ERR_FORMAT with rank, stage, operation and micro-batch of what is wrong: an
 *  operation missing, double, of a stage that another rank has, before what it needs, B of what also has I or W; a
 *  transfer in another order at its two ends; and who waits for whom in a deadlock. AR_ERR_ARG (the shape),
 *  AR_ERR_OVERFLOW, AR_ERR_MEMORY. Gives. */
AR_NODISCARD ar_status ar_pipeline_schedule_own(ar_pipeline_schedule **gives, ar_pipeline_shape shape,
                                                const ar_pp_operation *const *lists, const size_t *counts);
/** Accepts NULL. */
void ar_pipeline_schedule_destroy(ar_pipeline_schedule *s);

ar_pipeline_shape ar_pipeline_schedule_shape(const ar_pipeline_schedule *s);
/** The operations of a rank in their order; lives as long as the schedule. */
const ar_pp_operation *ar_pipeline_schedule_rank(const ar_pipeline_schedule *s, int rank, size_t *count);

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

/** Goes through a schedule in time: a rank's computations one after the other, transfers next to them, those of a pair
 *  of ranks and a direction one after the other. times: one of each stage, finite and not negative. each NULL: no
 *  listener; it hears a rank's computations in their order. Errors: AR_ERR_ARG (a time), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_pipeline_schedule_run(ar_pp_run *out, const ar_pipeline_schedule *s, const ar_pp_times *times,
                                                ar_pp_event_fn each, void *user);

/* --- files -------------------------------------------------------------------------------------------------------- */

/** Reads PyTorch's CSV of torch.distributed.pipelining: a line for each rank, a cell for each operation, as "0F0",
 *  "2SEND_F1": stage, kind, micro-batch. Empty cells are passed over, and UNSHARD, RESHARD, REDUCE_GRAD, and what waits
 *  for these and for sends: the layout and the step decide those. Errors: AR_ERR_FORMAT with file, line and cell, and
 *  as ar_pipeline_schedule_own; AR_ERR_UNSUPPORTED (OVERLAP_F_B), AR_ERR_OVERFLOW (more than AR_MAX_STAGES stages, a
 *  file of more than 256 MiB), AR_ERR_IO, AR_ERR_MEMORY. Gives. */
AR_NODISCARD ar_status ar_pipeline_schedule_read(ar_pipeline_schedule **gives, const char *path);
/** The same from text in memory; `name` stands for the file in messages. */
AR_NODISCARD ar_status ar_pipeline_schedule_parse(ar_pipeline_schedule **gives, const char *text, size_t length,
                                                  const char *name);
/** Writes that; "-" is stdout. transfers false: the computations alone, PyTorch's "compute_only" format. Errors:
 *  AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_pipeline_schedule_write(const char *path, const ar_pipeline_schedule *s, bool transfers);

AR_END_DECLS
#endif
