/* SPDX-License-Identifier: Apache-2.0 */
/* Effects of a training step's injected faults, like ref/layers/faults.h for the layers: each function is called at the
 * place of the fault and changes nothing unless the fault is on. */
#pragma once

#include "ref/layers/faults.h"
#include "ref/train/ddp.h"
#include "ref/train/optimizer.h"

/** dp_mean_of_means, dp_sum_of_local_means, accum_mean_of_means, cp_targets_whole, pp_sum_loss: sets T and the divisors
 *  of this rank's n micro-batches. `pieces` is the number of micro-batches of all ranks; micro_targets [pieces] are
 *  this rank's targets in each, and need not outlive the call. Collective over the data-parallel ranks. */
AR_NODISCARD ar_status ari_fault_divisors(size_t *targets, ar_ctx *ctx, ar_batch *micro, int64_t *micro_targets,
                                          size_t n, size_t pieces);
/** Faults accum_last_only and accum_divided_each_time: changes a gradient to which `pieces` micro-batches have
 *  added. */
AR_NODISCARD ar_status ari_fault_so_far(ar_param *p, ar_ctx *ctx, size_t pieces);
/** Does the same for all full gradients before a micro-batch's backward pass. */
AR_NODISCARD ar_status ari_fault_accumulated(ar_param *const *params, size_t n, ar_ctx *ctx, int pieces);
/** adam_step_not_synced, weight_decay_on_shard_only: changes the clock or the rule by which p is updated. */
void ari_fault_update(ari_optimizer_clock *clock, ari_update_rule *rule, const ar_optimizer_options *o,
                      const ar_param *p, const ar_ctx *ctx);
/* --- buckets ------------------------------------------------------------------------------------------------------ */

/** comm_before_producer: called before the first backward pass of a step. */
AR_NODISCARD ar_status ari_fault_pack_before_backward(ar_ddp *d);
/** Faults comm_before_producer and bucket_first_ready: packs the gradients for a reduction when s is ready instead of
 *  when they are complete. */
AR_NODISCARD ar_status ari_fault_pack_early(const ar_ddp *d, ari_ddp_slot *s);
/** stale_activation_reuse, collective_order_swapped, unused_in_last_micro_batch: returns whether buckets wait for the
 *  end of the backward pass, so that a race or a wrong order has the same effect in every run. */
bool ari_fault_waits_for_the_end(const ar_ddp *d);
/** unused_in_last_micro_batch: called before a backward pass for which this rank has no sample. */
void ari_fault_absent(ar_ddp *d);
/** unused_in_last_micro_batch: returns whether a gradient is omitted because the last backward pass did not compute
 *  it. */
bool ari_fault_left_out(const ari_ddp_slot *s);
/** Fault unused_skips_collective: returns true if this rank skips the collective of a bucket without gradients. */
bool ari_fault_skips(const ari_bucket *b);
/** bucket_not_packed, unused_in_last_micro_batch: called before a bucket is packed. *skip: the bucket is not packed. */
AR_NODISCARD ar_status ari_fault_before_pack(bool *skip, const ari_bucket *b, ar_queue *q);
/** stale_activation_reuse: called after a bucket was packed. */
AR_NODISCARD ar_status ari_fault_after_pack(const ari_bucket *b, ar_queue *q);
