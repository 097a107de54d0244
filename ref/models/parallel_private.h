/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arch.h"
#include "anyrank/parallel.h"
#include "anyrank/plan.h"

/* Private functions of anyrank/parallel.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Writes the difference of a layout from one rank: "tp=1", "tp=4 sp", "dp=2 tp=2 sp", "pp=4 interleaved (2 stages
 *  each)", "cp=4 (inner 2) zigzag", "dp=2 zero=1", "dp=4 zero=1 replicate=2", "dp=3 micro-batches=2". */
void ari_parallel_text(char *out, size_t cap, const ar_parallel *p);
/** Checks that a model can be sharded by a layout, without building anything. seq: tokens of a sequence; batch: samples
 *  of the global batch; 0 for either: unknown and not checked. With more dp ranks than samples the last ranks have
 *  none: they run no forward or backward pass and only reduce gradients and update. Errors: AR_ERR_INDIVISIBLE (names
 *  the dimension, its size and the number of ranks), AR_ERR_UNSUPPORTED (the plan), AR_ERR_ARG (negative extents, more
 *  micro-batches than samples on the rank with most), AR_ERR_OVERFLOW (more ranks than an int counts). */
AR_NODISCARD ar_status ari_parallel_check(const ar_parallel *p, const ar_config *c, const ar_plan *plan, size_t batch,
                                          size_t seq);
/** Does the part of that check that does not depend on a model: the layout's numbers. Errors: those of
 *  ari_parallel_check. */
AR_NODISCARD ar_status ari_parallel_check_ranks(const ar_parallel *p);
ar_parallel_rank ari_parallel_rank_of(const ar_parallel *p, int rank);
/** Returns the number of pipeline stages: pp * virtual_stages, or 1 without a pipeline. */
int ari_parallel_stages(const ar_parallel *p);
/** Returns the schedule of a layout that ari_parallel_check accepts: a copy of own_schedule, or a generated one for all
 *  micro-batches. A data-parallel rank with fewer micro-batches skips the missing ones. Release it with
 *  ari_pipeline_schedule_destroy. Errors: AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_parallel_schedule(ar_pipeline_schedule **out, const ar_parallel *p);
/** Describes a pipeline rank and its layers of a model with `layers` layers: "rank 5 (pp 1, dp 0, tp 1; stage 1, layers
 *  2..3)". Without a pipeline, and for a number that is not a rank, "rank 5". Truncates to AR_RANK_TEXT. */
void ari_parallel_rank_text(char out[AR_RANK_TEXT], const ar_parallel *p, size_t layers, int rank);
/** Computes the rows [start, start + count) of a global batch that micro-batch `micro` of data-parallel rank `dp_rank`
 *  holds. Ranks have consecutive runs of samples, the first (batch mod dp) ranks one more; a rank's micro-batches split
 *  its run in the same way. A micro-batch may be empty. */
void ari_parallel_rows(const ar_parallel *p, size_t batch, int dp_rank, int micro, size_t *start, size_t *count);
/** Returns micro-batch `micro` of `dp_rank` as a view of the global batch: rows, masks and position. Borrows from
 *  `global`. `targets` are those of the global batch (0 until counted). */
void ari_parallel_slice(ar_batch *out, const ar_parallel *p, const ar_batch *global, int dp_rank, int micro);

AR_END_DECLS
