/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/schedule.h"

/* Private functions of anyrank/schedule.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "F", "RECV_B"; "?" for an unknown value. Static storage. */
const char *ari_pp_kind_name(ar_pp_kind k);
/** Creates the schedule of a kind for stages = ranks * virtual_stages, including transfers between ranks. A SEND
 *  follows the computation of its value, and a RECV precedes the computation before the one that needs it, so that the
 *  transfer overlaps. On rank r of p, with m micro-batches and v stages per rank, w forward passes precede the first
 *  backward pass:
 *    gpipe        w = v m
 *    1f1b         w = min(m, p-r)
 *    interleaved  w = min(v m, 2(p-r-1) + (v-1)p + 1): stages alternate every p micro-batches (arXiv:2104.04473).
 *                 If p does not divide m: the schedule of the next multiple, without the missing micro-batches
 *    zero-bubble  w = min(m, p-r), and W is r micro-batches behind I (ZB-H1, arXiv:2401.10241, section 2.2)
 *  Then forward and backward passes alternate. v is 1 except for interleaved, which is 1f1b with v = 1. Release it with
 *  ari_pipeline_schedule_destroy.
 *  Errors: AR_ERR_ARG (extents below 1, more than AR_MAX_STAGES stages, v), AR_ERR_OVERFLOW (more than
 *  AR_MAX_STAGE_MICRO_BATCHES), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_pipeline_schedule_create(ar_pipeline_schedule **out, ar_pp_schedule kind, int ranks,
                                                    int virtual_stages, int micro_batches);
/** Creates a schedule from the caller's lists by copying the counts[r] operations of each rank r. If no list has a SEND
 *  or RECV, transfers are inserted. The caller releases *out with ari_pipeline_schedule_destroy. Errors: AR_ERR_FORMAT,
 *  whose message names rank, stage, operation and micro-batch: an operation is missing or occurs twice, belongs to
 *  another rank's stage, precedes an operation that it needs, or is a B next to an I or W of the same micro-batch; the
 *  two ends of a transfer order it differently; or the ranks deadlock (the message says who waits for whom). AR_ERR_ARG
 *  (the shape), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_pipeline_schedule_from_lists(ar_pipeline_schedule **out, ar_pipeline_shape shape,
                                                        const ar_pp_operation *const *lists, const size_t *counts);
/** Accepts NULL. */
void ari_pipeline_schedule_destroy(ar_pipeline_schedule *s);
ar_pipeline_shape ari_pipeline_schedule_shape(const ar_pipeline_schedule *s);
/** Returns the operations of a rank in order; they live as long as the schedule. */
const ar_pp_operation *ari_pipeline_schedule_rank(const ar_pipeline_schedule *s, int rank, size_t *count);
/** Simulates a schedule in time. A rank's computations are sequential; transfers overlap with them, and transfers
 *  between two ranks in one direction are sequential. times: the duration of each stage, finite and not negative.
 *  each NULL: no listener; a listener hears a rank's computations in order. Errors: AR_ERR_ARG (a duration),
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_pipeline_schedule_run(ar_pp_run *out, const ar_pipeline_schedule *s,
                                                 const ar_pp_times *times, ar_pp_event_fn on_event, void *user);
/** Reads the CSV format of PyTorch's torch.distributed.pipelining: a line for each rank and a cell for each operation,
 *  such as "0F0" or "2SEND_F1": stage, kind, micro-batch. Skips empty cells, UNSHARD, RESHARD, REDUCE_GRAD, and waits
 *  for these and for sends, because the layout and the step determine them. The caller owns *out. Errors: AR_ERR_FORMAT
 *  with file, line and cell, and those of ari_pipeline_schedule_from_lists; AR_ERR_UNSUPPORTED (OVERLAP_F_B),
 *  AR_ERR_OVERFLOW (more than AR_MAX_STAGES stages, or a file of more than 256 MiB), AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_pipeline_schedule_read(ar_pipeline_schedule **out, const char *path);
/** Does the same with text in memory; `name` replaces the file's name in messages. */
AR_NODISCARD ar_status ari_pipeline_schedule_parse(ar_pipeline_schedule **out, const char *text, size_t length,
                                                   const char *name);
/** Writes a schedule in that format; "-" is stdout. transfers false: only computations, PyTorch's "compute_only"
 *  format. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_pipeline_schedule_write(const char *path, const ar_pipeline_schedule *s, bool transfers);

AR_END_DECLS
