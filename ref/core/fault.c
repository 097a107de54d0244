/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/fault_private.h"

#include <string.h>

#include "ref/core/text.h"

/* Bugs of real training systems that can be injected into a run, X(name, effect). */
#define FAULTS(X)                                                                                                      \
    X(column_dx_not_reduced, "the input gradient of a column-parallel layer is left partial")                          \
    X(row_bias_every_rank, "every rank adds the row-parallel bias before the reduction")                               \
    X(row_input_grad_not_gathered, "a row-parallel layer with replicated input returns only its slice of dX")          \
    X(heads_divided_twice, "the local head count is divided by the number of ranks again")                             \
    X(allreduce_aliases_input, "a row-parallel output is reduced into the buffer of the saved input")                  \
    X(init_local_fan, "the initial scale comes from the shard's size")                                                 \
    X(init_per_shard_seed, "every shard draws the values of the first one")                                            \
    X(vocab_target_off_by_shard, "the shard before takes the target at a shard's edge")                                \
    X(loss_parallel_no_max, "softmax denominators are combined without a common maximum")                              \
    X(embedding_edge_twice, "the first id of a shard is looked up by two shards")                                      \
    X(weight_grad_leading_dims, "weight gradients use the first sample only: leading dimensions not flattened")        \
    X(bias_grad_wrong_axis, "bias gradients are summed over features in place of tokens")                              \
    X(norm_backward_missing, "a norm inside a block returns no gradient: only the residual carries it")                \
    X(sp_norm_grad_local, "sequence parallelism: a norm's gradient covers the rank's own tokens only")                 \
    X(sp_row_bias_grad_local, "sequence parallelism: a row-parallel bias's gradient covers the own tokens only")       \
    X(sp_position_grad_local, "sequence parallelism: learned positions' gradient covers the own tokens only")          \
    X(kv_replica_grad_local, "dK and dV of a replicated KV head are not summed over its replicas")                     \
    X(kv_replica_wrong_head, "a rank takes KV head r mod n_kv in place of floor(r * n_kv / N)")                        \
    X(dropout_same_mask_in_shard, "every shard drops the elements of the first one")                                   \
    X(dropout_different_mask_in_replica, "the ranks that hold a replicated value drop different elements")             \
    X(dp_mean_of_means, "each rank divides by its own token count, and the ranks' means are averaged")                 \
    X(dp_sum_of_local_means, "each rank divides by its own token count, and the ranks' means are added")               \
    X(dp_group_missing, "gradients are not summed over the data-parallel ranks")                                       \
    X(dp_broadcast_over_world, "parameters are broadcast over the world: every tp rank gets shard 0")                  \
    X(accum_mean_of_means, "each micro-batch divides by its own token count, and the means are averaged")              \
    X(saved_input_overwritten, "a second forward overwrites the input saved for the first one's backward")             \
    X(embedding_tied_once, "only the LM head's use of a tied weight contributes to its gradient")                      \
    X(tied_weight_untied, "a tied weight has two storages: only the embedding's use contributes to its gradient")      \
    X(gradnorm_counts_replicas, "clipping counts replicated parameters once per rank")                                 \
    X(gradnorm_local_clip, "each rank clips by the norm of its own shards")                                            \
    X(group_wrong_stride, "data-parallel groups are made of neighbours: stride 1 in the mesh in place of tp")          \
    X(world_rank_in_group, "the rank in the world is used where the rank in the tp group belongs")                     \
    X(positions_local, "sequence parallelism: learned positions count from 0 on every rank")                           \
    X(silent_truncation, "a vocabulary that does not divide is floored: the last ids belong to nobody")                \
    X(gate_up_interleaved_wrong, "a fused q|k|v is sharded as one block, so that a rank holds rows of q only")         \
    X(norm_padded_lanes, "a norm's mean and variance include lanes of padding")                                        \
    X(bias_added_twice, "a linear layer's bias is added in the product's epilogue and again after it")                 \
    X(row_bias_partial_grad, "a row-parallel bias's gradient is divided by the number of ranks")                       \
    X(init_replica_differs, "replicated parameters are drawn with the rank in their seed")                             \
    X(gather_batch_order, "sequence parallelism: gathered tokens are interleaved wrongly when batch > 1")              \
    X(collective_order_swapped, "one rank reduces the gradients of two parameters in the other order")                 \
    X(collective_size_mismatch, "one rank leaves the last token out of a reduction over tokens")                       \
    X(collective_dtype_mismatch, "one rank takes part in a parameter's broadcast as if it were bf16")                  \
    X(bucket_first_ready, "a bucket is reduced when the first of its gradients is ready")                              \
    X(bucket_reduced_twice, "a bucket is reduced a second time")                                                       \
    X(bucket_not_packed, "a bucket is reduced with what it held in the step before")                                   \
    X(bucket_stale_done, "a bucket's completion flag of the step before is believed")                                  \
    X(step_before_copy_back, "weights are updated before the reduced gradients are copied back")                       \
    X(comm_before_producer, "a reduction is started before the gradient that it reads is written")                     \
    X(stale_activation_reuse, "a buffer is used again before the asynchronous reduction that reads it has finished")   \
    X(unused_skips_collective, "a rank without a gradient for a bucket skips its reduction")                           \
    X(unused_set_empty, "the set of unused parameters is taken to be empty")                                           \
    X(unused_in_last_micro_batch, "gradients that the last micro-batch did not add to are not reduced")                \
    X(accum_last_only, "each micro-batch overwrites the gradients: only the last one counts")                          \
    X(zero_gather_missing, "ZeRO: the weights that other ranks have updated are not gathered")                         \
    X(zero_shards_misaligned, "ZeRO: a rank updates its weights with the next rank's share of the gradient")           \
    X(zero_grad_not_recursive, "zero_grad does not reach a module's children: their gradients add up")                 \
    X(gradnorm_first_rank_only, "clipping counts sharded parameters on the first rank of the group only")              \
    X(gradnorm_mean_of_ranks, "clipping takes the mean of the ranks' norms in place of the root of all squares")       \
    X(adam_step_not_synced, "the ranks that hold copies of a parameter count their Adam steps differently")            \
    X(optimizer_counter_ahead, "a step without gradients has advanced Adam's counter: bias corrections begin at 2")    \
    X(weight_decay_on_shard_only, "weight decay reaches the first of the ranks that hold copies of a parameter only")  \
    X(muon_of_shards, "Muon makes each tensor-parallel rank's shard of a matrix orthogonal, not the whole matrix")     \
    X(muon_padding_rows, "Muon scales by the shape of a matrix whose shards have rows of padding")                     \
    X(norm_fp16_store, "a norm's output is stored in 16 bits")                                                         \
    X(ring_backward_first_kv, "a ring's backward pass has a rank's own keys and values in place of those of each hop") \
    X(ring_kv_grad_local,                                                                                              \
      "ring attention: dK and dV of a chunk cover the queries of its own rank, not of all of them")                    \
    X(cp_tail_dropped, "context parallelism: attention floors the length to a multiple of 2 cp and drops the rest")    \
    X(cp_targets_whole, "context parallelism: every rank counts the targets of whole sequences: T is cp times that")   \
    X(labels_after_cut, "context parallelism: labels are shifted within a rank's positions, after the cut")            \
    X(allgather_token_order, "gathered tokens are put down in another order than they were cut (zigzag, contiguous)")  \
    X(attention_over_documents, "packed documents: attention crosses their ends")                                      \
    X(positions_over_documents, "packed documents: positions run on over the row in place of restarting in each")      \
    X(recompute_new_dropout_mask, "recomputation: the second forward pass draws other dropout masks than the first")   \
    X(qkv_gathered_three_times, "sequence parallelism: q, k and v each gather the same input")                         \
    X(collective_not_differentiable,                                                                                   \
      "sequence parallelism: the backward pass of a row-parallel layer's reduce-scatter is the identity")              \
    X(unordered_param_grad, "the gradients of linear layers' weights are sums in fp32 in an order of each run's own")  \
    X(dp_averaged_again, "gradients of a loss that is divided by all targets are averaged over the dp ranks besides")  \
    X(accum_divided_each_time, "the accumulated gradients are divided after each micro-batch, not once")               \
    X(pp_sum_loss, "pipeline: the backward pass begins from the sum of the losses, not divided by the targets")        \
    X(pp_stage_divides, "pipeline: each stage divides the gradient by the micro-batches, not the last one alone")      \
    X(pp_layers_local, "pipeline: each stage counts its layers from 0, and takes those layers' weights")               \
    X(pp_loss_last_micro_batch, "pipeline: the loss that is reported has the last micro-batch's terms alone")          \
    X(pp_tied_not_summed, "pipeline: the two ends' gradients of a tied weight are not added")                          \
    X(zb_tied_counted_twice, "zero bubble: both parts of the backward pass count a tied weight's use in the head")     \
    X(zero_stale_weights, "ZeRO-3: weights are not gathered again after the update")                                   \
    X(router_weights_not_normalised, "experts: a token's weights are not divided by their sum")                        \
    X(router_weights_detached, "experts: no gradient goes through the weights to the router")                          \
    X(router_bias_own_counts, "experts: the router's bias moves by the counts of each rank's own tokens")              \
    X(router_bias_counts_bf16,                                                                                         \
      "experts: the counts by which the router's bias moves, and their sum, are kept in bf16")                         \
    X(router_bias_counts_plain,                                                                                        \
      "experts: the router's bias moves by counts of the largest scores without it, of all groups")                    \
    X(balance_detached, "experts: the balancing loss is reported and has no gradient")                                 \
    X(balance_divided_by_dp, "experts: the balancing loss of the batch is divided by the data-parallel ranks besides") \
    X(router_z_loss_of_micro_batch, "experts: the router's z-loss is a mean over each rank's micro-batch")             \
    X(router_grad_local, "experts: the weights' gradient is of the rank's own part of the experts alone")              \
    X(latent_key_grad_local,                                                                                           \
      "latent attention: the gradient of the key that all heads share is a sum over the rank's own heads alone")       \
    X(sp_latent_key_grad_summed,                                                                                       \
      "sequence parallelism: the gradient of the key that all heads share, whole on each rank, is summed over tp")     \
    X(latent_grads_summed_again,                                                                                       \
      "latent attention: gradients of what is whole on each rank are summed over tp, but for the shared key's rows")   \
    X(sinks_left_out, "attention: the sinks, a logit of each head, are left out of the softmax's denominator")         \
    X(mtp_mean_over_all, "multi-token prediction: a depth's loss is divided by the next token's number of targets")    \
    X(experts_not_reduced, "experts: the ranks' parts of what the experts make are not summed")                        \
    X(experts_dx_not_reduced, "experts: the ranks' parts of the gradient of the experts' input are not summed")        \
    X(gradnorm_without_experts, "clipping leaves the experts' gradients out of the norm")                              \
    X(ep_outputs_not_returned, "experts: a rank adds what its own ones make alone, not those of other ranks")          \
    X(ep_grads_times_ep, "experts: gradients are divided as if there were only the ranks with copies: ep times")

const char *const ari_fault_names[] = {
#define NAME(name, effect) #name,
    FAULTS(NAME)
#undef NAME
        NULL};
const size_t ari_fault_count = sizeof ari_fault_names / sizeof *ari_fault_names - 1;

static const char *const effects[] = {
#define EFFECT(name, effect) effect,
    FAULTS(EFFECT)
#undef EFFECT
};

const char *ari_fault_text(const char *fault)
{
    return effects[ari_word_of(fault, ari_fault_names, ari_fault_count - 1)];
}

bool ari_fault_is(const char *fault, const char *name)
{
    return fault && strcmp(fault, name) == 0;
}

ar_status ari_fault_known(const char *fault)
{
    if (!fault || ari_word_of(fault, ari_fault_names, ari_fault_count) < ari_fault_count)
        return AR_OK;
    const char *near = ari_nearest(fault, ari_fault_names, ari_fault_count);
    return ar_error_set(AR_ERR_NOT_FOUND, "there is no fault '%s'%s%s%s 'anyrank bugs' lists them", fault,
                        near ? "; did you mean '" : ";", near ? near : "", near ? "'?" : "");
}
