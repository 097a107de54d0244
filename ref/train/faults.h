/* SPDX-License-Identifier: Apache-2.0 */
/* The effects of a training step's injected faults, as ref/layers/faults.h has those of the layers: each function is
 * called where the fault would be made, and changes nothing unless it is switched on. */
#pragma once

#include "ref/layers/faults.h"
#include "ref/train/ddp.h"
#include "ref/train/optimizer.h"

/** dp_mean_of_means, dp_sum_of_local_means, accum_mean_of_means, accum_sum_of_means, pp_sum_loss: T, and what each of
 *  this rank's n micro-batches is divided by; `pieces` are all that there are, own [pieces] the targets that this rank
 *  has in each, which do not outlive the call. Collective over the data-parallel ranks. */
AR_NODISCARD ar_status ari_fault_divisors(size_t *targets, ar_ctx *ctx, ar_batch *micro, int64_t *own, size_t n,
                                          size_t pieces);
/** accum_last_only, accum_divided_each_time: a gradient that micro-batches, of so many, have added to. */
AR_NODISCARD ar_status ari_fault_so_far(ar_param *p, ar_ctx *ctx, size_t pieces);
/** The same of all that are whole, before a micro-batch's backward pass. */
AR_NODISCARD ar_status ari_fault_accumulated(ar_param *const *params, size_t n, ar_ctx *ctx, int pieces);
/** optimizer_counter_ahead: before the clock is advanced. */
void ari_fault_clock(ari_optimizer_clock *clock, const ar_optimizer_options *o, const ar_ctx *ctx);
/** adam_step_not_synced, weight_decay_on_shard_only: what p is updated by. */
void ari_fault_update(ari_optimizer_clock *clock, ari_update_rule *rule, const ar_optimizer_options *o,
                      const ar_param *p, const ar_ctx *ctx);
/** empty_expert_not_updated: whether an update leaves p alone, of whose gradient g nothing is other than zero. */
AR_NODISCARD ar_status ari_fault_skips_update(bool *skip, ar_ctx *ctx, const ar_param *p, const ar_tensor *g);
/** gradnorm_without_experts, gradnorm_own_experts: whether a norm leaves p out. of: the rank of the expert-parallel
 *  group whose experts it is taken with. */
bool ari_fault_norm_without(const ar_ctx *ctx, const ar_param *p, int of);
/** gradnorm_own_experts: how many norms there are, one with the experts of each expert-parallel rank; else 1. */
int ari_fault_norms(const ar_ctx *ctx);
/** ep_grads_times_ep: what the gradient of p is multiplied by when it is complete. */
float ari_fault_gradient_times(const ar_ctx *ctx, const ar_param *p);
/** experts_summed_over_dp: the group that a bucket is summed over, in place of that of the experts' copies. */
ar_comm *ari_fault_expert_group(const ari_bucket *b, ar_comm *over);
/** gradnorm_counts_replicas, gradnorm_mean_of_ranks, gradnorm_copy_as_shard, gradnorm_latents_as_shards: whether a
 *  rank that holds a copy of params[i] counts it as the first of its holders does. */
bool ari_fault_counts_copy(const ar_ctx *ctx, ar_param *const *params, size_t n, size_t i);
/** gradnorm_mean_of_ranks: the norm of what each rank holds becomes their mean. Collective over the tp group. */
AR_NODISCARD ar_status ari_fault_mean_of_norms(float *norm, ar_ctx *ctx);
/** zero_shards_misaligned: where the gradient begins that this rank's slice of a bucket is updated with. */
size_t ari_fault_slice_start(const ar_ctx *ctx, const ar_bucket_info *b);

/** zb_hooks_skipped: before a rank goes through its list, while no bucket is under way. ddp: NULL: none. */
void ari_fault_hooks(ar_ddp *ddp, const ar_ctx *ctx, const ar_pp_operation *list, size_t n);
/** zero_share_off_by_one: the part of a slice that is updated with the gradient g. */
void ari_fault_share_start(const ar_ctx *ctx, const ar_bucket_info *b, const ari_state *s, ari_update_part *part,
                           ar_tensor *g);
/** zero_gather_order, zero_backward_not_gathered: after a unit's weights were put from where they were gathered. */
AR_NODISCARD ar_status ari_fault_weights(const ari_unit *u, ar_pass pass);

/* --- buckets ------------------------------------------------------------------------------------------------------ */

/** comm_before_producer: before the first backward pass of a step. */
AR_NODISCARD ar_status ari_fault_pack_before_backward(ar_ddp *d);
/** comm_before_producer, tied_reduced_at_first_use, bucket_first_ready: what a reduction reads is the gradient at
 *  another moment than that of its completion, here when s is ready. */
AR_NODISCARD ar_status ari_fault_pack_early(const ar_ddp *d, ari_ddp_slot *s);
/** stale_activation_reuse, collective_order_swapped, unused_in_last_micro_batch: whether buckets wait for the end of the backward pass, so that
 *  what these do in a race, or out of order, is the same in every run. */
bool ari_fault_waits_for_the_end(const ar_ddp *d);
/** unused_in_last_micro_batch: before a backward pass that this rank has no sample for. */
void ari_fault_absent(ar_ddp *d);
/** unused_in_last_micro_batch: whether a gradient is left out, as the last backward pass has not made it ready. */
bool ari_fault_left_out(const ari_ddp_slot *s);
/** unused_skips_collective: whether this rank leaves a bucket without gradients to the others. */
bool ari_fault_skips(const ari_bucket *b);
/** bucket_not_packed, unused_in_last_micro_batch: before a bucket is packed. *skip: it is not. */
AR_NODISCARD ar_status ari_fault_before_pack(bool *skip, const ari_bucket *b, ar_queue *q);
/** stale_activation_reuse: after a bucket was packed. */
AR_NODISCARD ar_status ari_fault_after_pack(const ari_bucket *b, ar_queue *q);
