/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_FAULT_H
#define ANYRANK_FAULT_H

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Mistakes that real systems have made, each of which can be switched on. name, what it does. */
#define AR_FAULT_TABLE(X)                                                                                              \
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
    X(tied_reduced_at_first_use, "a tied weight is reduced when the first of its two uses is done")                    \
    X(accum_last_only, "each micro-batch overwrites the gradients: only the last one counts")                          \
    X(accum_sum_of_means, "each micro-batch divides by its own token count, and the means are added")                  \
    X(mean_divides_by_world, "a mean over the data-parallel ranks divides by the size of the world")                   \
    X(dp_init_differs, "each data-parallel rank draws its own weights, and none are broadcast")                        \
    X(zero_gather_missing, "ZeRO: the weights that other ranks have updated are not gathered")                         \
    X(zero_shards_misaligned, "ZeRO: a rank updates its weights with the next rank's share of the gradient")           \
    X(zero_grad_not_recursive, "zero_grad does not reach a module's children: their gradients add up")                 \
    X(gradnorm_first_rank_only, "clipping counts sharded parameters on the first rank of the group only")              \
    X(gradnorm_copy_as_shard, "clipping takes one replicated parameter for a sharded one: it counts once per rank")    \
    X(gradnorm_mean_of_ranks, "clipping takes the mean of the ranks' norms in place of the root of all squares")       \
    X(adam_step_not_synced, "the ranks that hold copies of a parameter count their Adam steps differently")            \
    X(optimizer_counter_ahead, "a step without gradients has advanced Adam's counter: bias corrections begin at 2")    \
    X(weight_decay_on_shard_only, "weight decay reaches the first of the ranks that hold copies of a parameter only")  \
    X(muon_of_shards, "Muon makes each tensor-parallel rank's shard of a matrix orthogonal, not the whole matrix")     \
    X(muon_norm_of_shards, "Muon divides a matrix by the norm of each tensor-parallel rank's own shard")               \
    X(muon_packed_as_one, "Muon makes q, k and v orthogonal as the one matrix that they are stored in")                \
    X(muon_stale_heads, "Muon cuts q, k and v apart by the heads that one tensor-parallel rank has")                   \
    X(muon_shards_misplaced, "Muon lays each shard of the momentum where the next rank's belongs")                     \
    X(muon_shards_gram_local, "Muon on shards: in the last iteration X X^T is each rank's own, not the sum of all")    \
    X(muon_of_biases, "Muon also updates biases, not AdamW")                                                           \
    X(muon_of_tied_copy, "Muon updates the last stage's copy of a tied embedding, and AdamW the first's")              \
    X(muon_padding_rows, "Muon scales by the shape of a matrix whose shards have rows of padding")                     \
    X(qk_clip_local, "QK-Clip takes the largest logits of a data-parallel rank's own tokens")                          \
    X(norm_fp16_store, "a norm's output is stored in 16 bits")                                                         \
    X(ring_backward_first_kv, "a ring's backward pass has a rank's own keys and values in place of those of each hop") \
    X(ring_kv_grad_local,                                                                                              \
      "ring attention: dK and dV of a chunk cover the queries of its own rank, not of all of them")                    \
    X(cp_tail_dropped, "context parallelism: attention floors the length to a multiple of 2 cp and drops the rest")    \
    X(cp_targets_own, "context parallelism: targets are counted over dp alone: each rank divides by its positions'")   \
    X(cp_targets_whole, "context parallelism: every rank counts the targets of whole sequences: T is cp times that")   \
    X(labels_after_cut, "context parallelism: labels are shifted within a rank's positions, after the cut")            \
    X(zigzag_positions, "context parallelism: a zigzag's tokens get the positions of contiguous ones")                 \
    X(allgather_token_order, "gathered tokens are put down in another order than they were cut (zigzag, contiguous)")  \
    X(chunk_not_awaited, "a chunk of gathered tokens is multiplied before it has come: as the chunk before it")        \
    X(attention_over_documents, "packed documents: attention crosses their ends")                                      \
    X(document_boundaries_local, "packed documents: a rank takes the ends of the row's first positions for its own's") \
    X(positions_over_documents, "packed documents: positions run on over the row in place of restarting in each")      \
    X(recompute_new_dropout_mask, "recomputation: the second forward pass draws other dropout masks than the first")   \
    X(recompute_stale_input, "recomputation: the kept input has been written over by its module's output")             \
    X(qkv_gathered_three_times, "sequence parallelism: q, k and v each gather the same input")                         \
    X(collective_not_differentiable,                                                                                   \
      "sequence parallelism: the backward pass of a row-parallel layer's reduce-scatter is the identity")              \
    X(unordered_param_grad, "the gradients of linear layers' weights are sums in fp32 in an order of each run's own")  \
    X(dp_averaged_again, "gradients of a loss that is divided by all targets are averaged over the dp ranks besides")  \
    X(accum_divided_each_time, "the accumulated gradients are divided after each micro-batch, not once")               \
    X(pp_sum_loss, "pipeline: the backward pass begins from the sum of the losses, not divided by the targets")        \
    X(pp_stage_divides, "pipeline: each stage divides the gradient by the micro-batches, not the last one alone")      \
    X(pp_layers_local, "pipeline: each stage counts its layers from 0, and takes those layers' weights")               \
    X(pp_dropout_layer_local, "pipeline: dropout counts layers from 0 in each stage: stages drop alike")               \
    X(pp_chunks_contiguous, "interleaved: a rank's stages take the weights of neighbours, as if they were in a row")   \
    X(pp_gradnorm_own_stage, "pipeline: each rank clips by the norm of its own stages")                                \
    X(pp_loss_last_micro_batch, "pipeline: the loss that is reported has the last micro-batch's terms alone")          \
    X(pp_tied_not_summed, "pipeline: the two ends' gradients of a tied weight are not added")                          \
    X(pp_stale_activation, "pipeline: a stage goes forward from the activation that it received before")               \
    X(pp_stale_gradient, "pipeline: a gradient is sent before it is written: the one before it arrives")               \
    X(zb_weight_pass_missing, "zero bubble: the weights' part of the first micro-batch's backward pass is left out")   \
    X(zb_tied_counted_twice, "zero bubble: both parts of the backward pass count a tied weight's use in the head")     \
    X(zb_hooks_skipped, "zero bubble: the weights' part runs no hooks, and gradients are not summed over dp")          \
    X(zero_last_micro_batch, "ZeRO-2: a reduction writes over the share of the micro-batches before it")               \
    X(zero_stale_weights, "ZeRO-3: weights are not gathered again after the update")                                   \
    X(zero_backward_not_gathered, "ZeRO-3: the backward pass begins before its weights are gathered: a share alone")   \
    X(zero_gather_order, "ZeRO-3: gathered shares are put down in another order of the ranks")                         \
    X(zero_share_off_by_one, "ZeRO: a rank's share begins an element late, and nobody updates its first")              \
    X(hsdp_copies_not_summed, "hybrid sharding: gradients are not summed over the copies of the shards")               \
    X(router_weights_not_normalised, "experts: a token's weights are not divided by their sum")                        \
    X(router_weights_normalised, "experts: a token's weights are divided by their sum, which this model does not do")  \
    X(router_softmax_twice, "experts: weights are a second softmax, of the probabilities of those chosen")             \
    X(router_ties_higher_index, "experts: chosen by logits in bf16, of which equal ones go to the higher number")      \
    X(router_logits_bf16, "experts: the router's logits are rounded to bf16")                                          \
    X(expert_input_weighted, "experts: the weight multiplies an expert's input in place of its output")                \
    X(router_weights_detached, "experts: no gradient goes through the weights to the router")                          \
    X(router_grad_chosen_alone, "experts: the logits of those not chosen get no gradient")                             \
    X(router_sum_detached, "experts: no gradient goes through the sum that the weights are divided by")                \
    X(router_bias_in_weights, "experts: the bias by which a router of sigmoids chooses is in the weights too")         \
    X(router_bias_own_counts, "experts: the router's bias moves by the counts of each rank's own tokens")              \
    X(router_bias_each_micro_batch, "experts: the router's bias moves after each micro-batch, not once a step")        \
    X(router_bias_counts_bf16,                                                                                         \
      "experts: the counts by which the router's bias moves, and their sum, are kept in bf16")                         \
    X(router_bias_counts_plain,                                                                                        \
      "experts: the router's bias moves by counts of the largest scores without it, of all groups")                    \
    X(router_scale_left_out, "experts: the weights are not multiplied by their scaling factor")                        \
    X(router_scale_twice, "experts: the weights are multiplied by their scaling factor twice")                         \
    X(router_scale_not_in_gradient, "experts: the gradient of the weights lacks their scaling factor")                 \
    X(router_groups_by_max,                                                                                            \
      "experts: groups of experts are ranked by their best score, not by the sum of their two best")                   \
    X(router_groups_not_masked, "experts: the groups that do not stay are not masked: a token goes to experts of all") \
    X(balance_of_micro_batch, "experts: the balancing loss counts the tokens of each rank's micro-batch alone")        \
    X(balance_without_k, "experts: the balancing loss is not divided by the number of a token's experts")              \
    X(balance_detached, "experts: the balancing loss is reported and has no gradient")                                 \
    X(balance_divided_by_dp, "experts: the balancing loss of the batch is divided by the data-parallel ranks besides") \
    X(balance_divided_by_samples,                                                                                      \
      "experts: a sequence's balancing loss is divided by the micro-batch's samples besides")                          \
    X(router_z_loss_of_micro_batch, "experts: the router's z-loss is a mean over each rank's micro-batch")             \
    X(router_grad_local, "experts: the weights' gradient is of the rank's own part of the experts alone")              \
    X(sp_router_grad_summed, "sequence parallelism: the router's gradient, whole on each rank, is summed over tp")     \
    X(sp_router_grad_local,                                                                                            \
      "sequence parallelism: the gradient of a router that sees its own tokens is not summed over tp")                 \
    X(latent_key_grad_local,                                                                                           \
      "latent attention: the gradient of the key that all heads share is a sum over the rank's own heads alone")       \
    X(sp_latent_key_grad_summed,                                                                                       \
      "sequence parallelism: the gradient of the key that all heads share, whole on each rank, is summed over tp")     \
    X(latent_grads_summed_again,                                                                                       \
      "latent attention: gradients of what is whole on each rank are summed over tp, but for the shared key's rows")   \
    X(gradnorm_latents_as_shards, "clipping counts latent attention's matrices that are whole on each rank by rank")   \
    X(latent_norm_before_split, "latent attention: the norm of the keys' latent covers the shared key too")            \
    X(sinks_left_out, "attention: the sinks, a logit of each head, are left out of the softmax's denominator")         \
    X(sinks_of_first_heads, "attention: each tensor-parallel rank has the first heads' sinks")                         \
    X(sinks_head_off_by_one, "attention: each head has the sink of the next one")                                      \
    X(cp_sinks_grad_twice, "context parallelism: the gradient of the sinks is summed over cp twice")                   \
    X(mtp_rolled_after_cut,                                                                                            \
      "multi-token prediction: each context-parallel rank rolls its own positions: tokens across the cuts are lost")   \
    X(mtp_rolled_over_documents,                                                                                       \
      "multi-token prediction: tokens and labels are rolled over the borders of packed documents")                     \
    X(mtp_mean_over_all, "multi-token prediction: a depth's loss is divided by the next token's number of targets")    \
    X(mtp_mean_of_own, "multi-token prediction: each rank divides a depth's loss by its own number of targets")        \
    X(mtp_not_divided, "multi-token prediction: a depth's loss is not divided by its targets")                         \
    X(mtp_head_grad_lost, "multi-token prediction: the head's gradient lacks its uses by further tokens")              \
    X(mtp_embedding_grad_lost, "multi-token prediction: the embedding's gradient lacks its uses by further tokens")    \
    X(mtp_embedding_grad_twice,                                                                                        \
      "multi-token prediction: the embedding's gradient has its uses by further tokens twice")                         \
    X(experts_not_reduced, "experts: the ranks' parts of what the experts make are not summed")                        \
    X(experts_dx_not_reduced, "experts: the ranks' parts of the gradient of the experts' input are not summed")        \
    X(experts_combined_first, "experts: each rank rounds and weights its part of their output before the parts' sum")  \
    X(experts_gate_up_in_halves, "experts: gate and up, interleaved, are taken for two halves")                        \
    X(expert_bias_not_weighted, "experts: the last bias is added without the token's weight")                          \
    X(expert_rows_off_by_one, "experts: each slot takes the row after its own of what they make")                      \
    X(expert_capacity_drops, "experts: tokens beyond an even share of the slots are dropped")                          \
    X(last_expert_left_out, "experts: the loop over them ends before the last one")                                    \
    X(shared_expert_left_out, "experts: the one that all tokens share is left out")                                    \
    X(shared_gate_left_out, "experts: what the shared one makes is added without its gate")                            \
    X(shared_gate_detached, "experts: the shared one's gate gets no gradient")                                         \
    X(recompute_routes_differ, "recomputation: the router has jitter in the second forward pass, and chooses again")   \
    X(empty_expert_not_updated, "experts: one that no token chose is left out of the update, decay and moments")       \
    X(gradnorm_without_experts, "clipping leaves the experts' gradients out of the norm")                              \
    X(ep_experts_drawn_alike, "experts: each expert-parallel rank draws its own as if they were the first ones")       \
    X(ep_splits_swapped, "experts: one expert-parallel rank exchanges the counts of rows for two ranks")               \
    X(ep_rows_not_put_back, "experts: rows return in the experts' order, not in that in which they came")              \
    X(ep_outputs_not_returned, "experts: a rank adds what its own ones make alone, not those of other ranks")          \
    X(ep_weights_detached, "experts: weights for those of other ranks get no gradient")                                \
    X(ep_grads_times_ep, "experts: gradients are divided as if there were only the ranks with copies: ep times")       \
    X(edp_group_missing, "experts: gradients are not summed over the ranks with copies (edp)")                         \
    X(experts_summed_over_dp, "experts: gradients are summed over dp, not over the ranks with copies (edp)")           \
    X(empty_expert_grad_unwritten, "experts: the gradient of one without rows is not written")                         \
    X(gradnorm_own_experts, "clipping counts the experts of the rank's own part alone")

typedef enum ar_fault {
    AR_FAULT_NONE,
#define AR_FAULT_ENUM(name, text) AR_FAULT_##name,
    AR_FAULT_TABLE(AR_FAULT_ENUM)
#undef AR_FAULT_ENUM
        AR_FAULT_COUNT
} ar_fault;

/** "column_dx_not_reduced"; "none" for AR_FAULT_NONE. Static storage. */
const char *ar_fault_name(ar_fault f);
/** One line of English. Static storage. */
const char *ar_fault_text(ar_fault f);
/** AR_ERR_NOT_FOUND, naming the nearest, if there is no such fault. */
AR_NODISCARD ar_status ar_fault_parse(ar_fault *f, const char *name);

AR_END_DECLS
#endif
