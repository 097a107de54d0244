/* SPDX-License-Identifier: Apache-2.0 */
/* Each fault's action in the case in which it matters, the values that show it, and the real systems that had it: more
 * than the line of AR_FAULT_TABLE, for a person who asks about one. */
#include "cli/bugs/bugs.h"

static const char *const explained[AR_FAULT_COUNT] = {
    [AR_FAULT_column_dx_not_reduced] =
        "The all-reduce of a column-parallel layer's input gradient is left out, so each rank keeps its own part. The "
        "LM head is column-parallel (by vocabulary) and comes first in the backward pass. The copies add up to the "
        "reference.",
    [AR_FAULT_row_bias_every_rank] =
        "Each rank adds the bias of a row-parallel layer to its partial sum, so the bias counts N times. All ranks "
        "agree and the bytes are right: comparing ranks with each other would show nothing. One vector is added to "
        "every token. Llama has no biases.",
    [AR_FAULT_row_input_grad_not_gathered] =
        "A row-parallel layer whose input was replicated uses only its slice of that input. Its input gradient must "
        "be gathered along features; here each rank keeps its slice among zeros. Only a row-column MLP has such a "
        "layer (--mlp-order row-column). A different half is right on each rank.",
    [AR_FAULT_heads_divided_twice] =
        "The local head count is divided by N again: of its H/N heads a rank fills H/N² and leaves the others zero. "
        "The pattern names the heads of `context` that are zero.",
    [AR_FAULT_allreduce_aliases_input] =
        "The reduction of a row-parallel layer's output overwrites the input saved for the backward pass. Only the "
        "gradients of row-parallel weights are wrong, two in each of 4 blocks: dW = dYᵀ·X with another X. Nothing "
        "later in the step depends on them. In this case 256 outputs per token are written over 344 inputs.",
    [AR_FAULT_init_local_fan] =
        "xavier_normal takes its scale from the shard's shape instead of the full tensor's. The embedding has the "
        "configuration's own range. Every element of `q_proj` is the reference times one factor, sqrt((256 + 256) / "
        "(128 + 256)) = 1.1547.",
    [AR_FAULT_init_per_shard_seed] =
        "Each shard is drawn as if it were the first: rows 128 and up of the embedding, rank 1's, repeat rows 0 to "
        "127.",
    [AR_FAULT_vocab_target_off_by_shard] =
        "A target that is the first id of a shard counts as the previous shard's, whose last logit is used. Only "
        "tokens at an edge are affected; with 8 ranks of 32 ids that includes the space, id 32. The loss is off by "
        "1.2 %, equally on all ranks. With 2 ranks the edge is id 128, which few texts contain: then the fault "
        "hides.",
    [AR_FAULT_loss_parallel_no_max] =
        "Each rank takes exponentials relative to its own shard's maximum, and the denominators are added all the "
        "same. The loss is wrong and differs between ranks. One all-reduce of T int32 is missing: 768 bytes.",
    [AR_FAULT_embedding_edge_twice] =
        "The first id of a shard is looked up by its owner and by the previous rank, which contributes its last row. "
        "The all-reduce adds bit patterns, so the result is nonsense of up to 1e35. Only tokens with that id are "
        "wrong, here the 15 spaces among 96 tokens.",
    [AR_FAULT_weight_grad_leading_dims] =
        "The weight gradient of a batch [b, s, ..] covers only the first sample, as if leading dimensions were not "
        "flattened. A part of the sum is missing, about three of four samples. Fewer tokens have fewer exponents, so "
        "bytes are missing too.",
    [AR_FAULT_bias_grad_wrong_axis] =
        "A bias gradient is summed over features instead of tokens: token t's sum lands in element t. The values are "
        "unrelated to the reference, and as many elements are written as there are tokens that predict something. "
        "Norm biases take another path.",
    [AR_FAULT_norm_backward_missing] =
        "A norm inside a block returns no gradient; only the residual passes one on. The model still learns "
        "something.",
    [AR_FAULT_sp_norm_grad_local] =
        "With sequence parallelism each rank normalises its own positions, so a norm's weight gradient must be summed "
        "over tp; here each rank keeps its part. After the update the copies of the weight drift apart slowly.",
    [AR_FAULT_sp_row_bias_grad_local] =
        "With sequence parallelism a row-parallel bias is added after the reduce-scatter, to the rank's own "
        "positions, so its gradient must be summed over tp; here each rank keeps its part.",
    [AR_FAULT_sp_position_grad_local] =
        "With sequence parallelism rank r has a gradient only for rows [r·s/N, (r+1)·s/N) of the learned positions, "
        "and the ranks' parts must be summed over tp; here they are not. No other gradient is wrong, and the parts "
        "add up without rounding. More than half of all bytes are missing: the table's 1,024 positions are most of "
        "what this small step sends.",
    [AR_FAULT_kv_replica_grad_local] =
        "With more ranks than KV heads several ranks hold copies of one head, each with some of its query heads. dK "
        "and dV must be summed over the copies; here each keeps its own. dQ is right. The bytes of two reductions per "
        "block are missing.",
    [AR_FAULT_kv_replica_wrong_head] =
        "Rank r takes KV head r mod 2 instead of floor(r·2/4): ranks 0 and 3 are right by accident. Training "
        "continues, with queries that read another head's keys.",
    [AR_FAULT_dropout_same_mask_in_shard] =
        "A sharded value's mask must follow the element's index in the full tensor; here every rank counts from its "
        "own shard. In attention probabilities, which are split by heads, rank 1 drops where rank 0 does. As many "
        "elements are dropped as should be, so no statistic shows it.",
    [AR_FAULT_dropout_different_mask_in_replica] =
        "A value that all tp ranks hold must lose the same elements on all of them; here each rank has a different "
        "random stream. From GPT-2's dropped embedding on the copies of one tensor differ, and reductions add parts "
        "that do not belong together.",
    [AR_FAULT_dp_mean_of_means] =
        "Each data-parallel rank divides by its own number of target tokens, and the means are averaged, which is "
        "wrong for 46, 23 and 23 targets. Every rank's loss is the reference times T/(3·T_r).",
    [AR_FAULT_dp_sum_of_local_means] =
        "Each data-parallel rank divides by its own number of target tokens, and the means are added: loss and "
        "gradients are exactly twice the reference. Clipping hides it: the clipped gradients have the same bits, "
        "since a factor of 2 loses none.",
    [AR_FAULT_dp_group_missing] =
        "Gradients are not summed over data-parallel ranks: each trains its own model, and only the first step's "
        "weights are shared. Nearly all bytes are missing.",
    [AR_FAULT_dp_broadcast_over_world] =
        "At the start, rank 0 of the world sends its parameters to all ranks instead of the first rank of each "
        "data-parallel group to its group, so every tp rank holds shard 0. The values are those of "
        "init_per_shard_seed; the bytes differ.",
    [AR_FAULT_accum_mean_of_means] =
        "Each micro-batch divides by its own number of target tokens, and the means are averaged, though 2 samples "
        "and 1 should weigh 2 to 1. The reported loss divides by all tokens and is right, so the logits' gradient is "
        "the first difference. A sample's factor is T/(M·T_m), 0.75 or 1.5.",
    [AR_FAULT_saved_input_overwritten] =
        "All micro-batches go forward first, and a layer keeps only one input: the second overwrites the first. Both "
        "forward passes are right; the first weight gradient holds the second micro-batch's share and something "
        "foreign.",
    [AR_FAULT_embedding_tied_once] =
        "A tied weight is used by the embedding and the LM head, and only the head's use reaches its gradient. Only "
        "the rows of ids in the batch, 32 of 256, are wrong.",
    [AR_FAULT_tied_weight_untied] =
        "The LM head's use of a tied weight goes to a storage of its own, as sharding or `to_empty()` leave it "
        "(facebookresearch/lingua PR 75, volcengine/verl 7834), and only the embedding's use reaches the gradient. "
        "Rows of ids that the batch does not hold, 224 of 256, are zero, where the head has a gradient for each.",
    [AR_FAULT_gradnorm_counts_replicas] =
        "The norm for clipping counts parameters that all ranks hold once per rank: 4.42 instead of 4.16. Comparing "
        "gradients passes; the norm is a tensor of its own in the check.",
    [AR_FAULT_gradnorm_local_clip] =
        "Each rank clips by the norm of its own shards: 3.76 and 1.78, where 4.16 is right. After the update the "
        "copies of replicated parameters differ. The all-reduces of the norm, 40 bytes, are missing.",
    [AR_FAULT_group_wrong_stride] =
        "The data-parallel groups consist of neighbours, like the tensor-parallel ones, instead of ranks a stride of "
        "tp apart. Ranks that hold different shards are made equal and add their gradients; shapes and bytes fit.",
    [AR_FAULT_world_rank_in_group] =
        "The world rank is used as the rank in the tp group: ranks 2 and 3 look for ids of a third and fourth shard "
        "of two, find none, and have zeros. The first group is right, so a test with dp=1 passes.",
    [AR_FAULT_positions_local] =
        "With sequence parallelism every rank counts positions from 0 instead of from the beginning of its part of "
        "the sequence. Rank 1's tokens, 12 and up, get positions 0 and up. The difference depends on the position "
        "alone.",
    [AR_FAULT_silent_truncation] =
        "256 ids do not divide by 3; floor(256/3)·3 = 255 have an owner and id 255 has none: its row is never looked "
        "up and its logit is -infinity. The gradient norm is NaN from there on, so the case runs without clipping; "
        "with clipping the run ends in an error.",
    [AR_FAULT_gate_up_interleaved_wrong] =
        "GPT-2's `c_attn` holds q, k and v side by side; each must be split, but here the whole is: rank 0 holds all "
        "of q and half of k. (A Llama's gate and up are two tensors and are not split as one.)",
    [AR_FAULT_norm_padded_lanes] =
        "Mean and variance are taken over 256 lanes, the width rounded up to a power of two, of which 192 are used. A "
        "width that is a power of two shows nothing: wrong for 768, right for 4096. Each row is scaled by nearly "
        "sqrt(256/192).",
    [AR_FAULT_bias_added_twice] =
        "The bias is added in the GEMM's epilogue and again after it. It looks like row_bias_every_rank, but affects "
        "every layer with a bias, on one rank too.",
    [AR_FAULT_row_bias_partial_grad] =
        "The gradient of a row-parallel bias, which every rank has in full without communication, is divided by N as "
        "if it had been summed. The bias learns half as fast, and with Adam hardly differently.",
    [AR_FAULT_init_replica_differs] =
        "Replicated parameters are drawn with the rank in their seed. Learned positions differ (norm weights start as "
        "ones). Data-parallel copies are made equal at the start; tensor-parallel copies are not.",
    [AR_FAULT_gather_batch_order] =
        "An all-gather along the sequence delivers the ranks' parts one after the other, [N, b, s/N, h]; with several "
        "samples they must be reordered sample by sample, and here they are not. Every wrong row of block 0's "
        "`q_proj` is another token's, bit for bit.",
    [AR_FAULT_collective_order_swapped] =
        "Every parameter has its own bucket (--bucket-bytes 0), and rank 1 swaps each pair of neighbours, as when "
        "gradients are reduced as they become ready and one rank is slower. GPT-2's first two, the final norm's bias "
        "and weight, have the same kind, type, operation and count. A system that compares no more than that adds the "
        "bias's gradient to the weight's, and training continues. Here the tags, which name the tensor, differ, and "
        "the run ends before any data moves. It matters where gradients are reduced: over data-parallel ranks, and "
        "over tensor-parallel ones with sp.",
    [AR_FAULT_collective_size_mismatch] =
        "Rank 1 of a tensor-parallel group leaves the last token, which predicts nothing, out of the loss's maximum: "
        "95 elements against 96. A collective that trusts its callers would read past the end of a buffer or wait "
        "forever. The message names both counts, and its table shows both ranks in `loss max`.",
    [AR_FAULT_collective_dtype_mismatch] =
        "Rank 1 of a data-parallel group joins the broadcast of parameters as if its copy were bf16: the same count, "
        "half the bytes. The first parameter is the embedding. A library that counts bytes would leave half of the "
        "copy as it was.",
    [AR_FAULT_bucket_first_ready] =
        "A bucket is packed and reduced as soon as its first gradient is ready; the others are still zero. A gradient "
        "norm that changes with the bucket size or with overlap is microsoft/DeepSpeed issues 4298, 5294 and 6351. "
        "With one bucket per parameter (--bucket-bytes 0) nothing is wrong.",
    [AR_FAULT_bucket_reduced_twice] =
        "A complete bucket is reduced again, which makes it N times too large. Clipping hides it, since the norm has "
        "the same factor; the bytes are nearly doubled.",
    [AR_FAULT_bucket_not_packed] =
        "The gradients are not copied into their bucket, which is reduced as it was: empty in the first step, with "
        "the sum of all previous steps later. All ranks agree.",
    [AR_FAULT_bucket_stale_done] =
        "The flag \"bucket is reduced\" is not reset: the second step reduces nothing. The first step is right in "
        "every tensor, so a test of one step passes. The case takes two.",
    [AR_FAULT_step_before_copy_back] =
        "The weights are updated before the reduced gradients are copied back: each rank uses its own. The gradients "
        "that the update reads are compared, and they add up to the reference; the reductions all took place.",
    [AR_FAULT_comm_before_producer] =
        "A reduction starts without waiting for the kernels that write its gradients. On real hardware it is chance "
        "which are late; here it is always the last of each bucket, read as it was when the step began: zero. "
        "Suspected in the threads of bucket_first_ready, which ended with overlap disabled.",
    [AR_FAULT_stale_activation_reuse] =
        "Two buckets share a buffer: the next is packed into it before the reduction of this one has read it. The "
        "gradients are another parameter's, as far as they fit; the last bucket has no successor and is right.",
    [AR_FAULT_unused_skips_collective] =
        "A rank without a gradient for a bucket skips its reduction. Three data-parallel ranks share two samples, so "
        "rank 2 has none. Elsewhere this hangs; here the run ends with an error on all ranks once rank 2 has "
        "finished.",
    [AR_FAULT_unused_set_empty] =
        "The set of parameters without a gradient anywhere is taken to be empty: their gradient counts as zero, and "
        "AdamW's weight decay and moments move them. A transformer uses every parameter, so the case is a module "
        "(verify/faults/fault_module.c) with a matrix that nothing uses, compared with itself on one rank. "
        "`pair.spare:new` is the only tensor that differs, by lr times the decay of the weight.",
    [AR_FAULT_unused_in_last_micro_batch] =
        "Only gradients to which the last micro-batch has added are reduced and copied back: pytorch/pytorch issue "
        "69031, PR 124193; mosaicml/composer issue 9. A rank whose last micro-batch has no sample, here rank 2 of "
        "three, contributes and keeps zeros; the others' copies are right. Rank 0 reports the loss.",
    [AR_FAULT_tied_reduced_at_first_use] =
        "A tied weight's bucket is packed when the LM head's part is there; the embedding's comes last. Exactly the "
        "rows of the ids in the batch are wrong, as with embedding_tied_once, the same fault in the layer.",
    [AR_FAULT_accum_last_only] =
        "Each micro-batch overwrites the gradients of the previous ones, so only the last counts. Seen as ZeRO-2 "
        "resetting its accumulator in each backward pass (microsoft/DeepSpeed PR 545, allenai/open-instruct PR 1498) "
        "and as gradients set to none between micro-batches (NVIDIA-NeMo/Automodel PR 3530: \"loss looked fine\", the "
        "gradient norm showed it).",
    [AR_FAULT_accum_sum_of_means] =
        "Each micro-batch divides by its own number of target tokens, and the means are added. Many trainers did this "
        "before huggingface/transformers PR 34191 and meta-pytorch/torchtune PR 1875 and 1917; microsoft/DeepSpeed "
        "issue 7773 is the same over a pipeline's micro-batches. The reported loss is right. The inverses of the "
        "micro-batches' factors add up to 1.",
    [AR_FAULT_mean_divides_by_world] =
        "A mean over data-parallel ranks divides by the size of the world: pytorch/pytorch issues 36516 and 155903, "
        "ByteDance-Seed/VeOmni PR 338. The case is the module of unused_set_empty on dp=2 tp=2, whose loss each rank "
        "divides by its own samples, so the mean over dp is one rank's gradient. Here it is half of that.",
    [AR_FAULT_dp_init_differs] =
        "Each data-parallel rank draws its own weights, without a broadcast: meta-pytorch/torchtune issue 166, "
        "allenai/OLMo-core PR 319 (\"the model was still training\"). Gradients of different models are added from "
        "there on.",
    [AR_FAULT_zero_gather_missing] =
        "With ZeRO each rank updates its share of the weights and must give it to the others; here it does not. What "
        "differs is, bit for bit, the weight before the step, on the ranks that have not updated it.",
    [AR_FAULT_zero_shards_misaligned] =
        "A rank updates its share of the weights with the next rank's share of the gradient: NVIDIA/Megatron-LM issue "
        "844, where shards did not line up after a reduce-scatter. The update has the right size and nothing to do "
        "with the gradient. All ranks agree.",
    [AR_FAULT_zero_grad_not_recursive] =
        "zero_grad clears what the model and its blocks hold, but not their children: from the second step on, "
        "gradients of inner layers are the sum of all steps. The case takes two.",
    [AR_FAULT_gradnorm_first_rank_only] =
        "The norm counts sharded parameters on the first tensor-parallel rank only, as if they were copies: "
        "NVIDIA/Megatron-LM PR 5916, PR 7530. 13.89 instead of 14.85: every gradient is right, and the clip factor is "
        "7 % too large.",
    [AR_FAULT_gradnorm_copy_as_shard] =
        "One replicated parameter, here the learned positions, is marked as sharded, so its squares count once per "
        "rank (ROCm/TransformerEngine 715). The surplus is three times that parameter's squares; all gradients are "
        "right.",
    [AR_FAULT_gradnorm_mean_of_ranks] =
        "Each rank takes the norm of all that it holds, and the ranks' norms are averaged (deepspeedai/DeepSpeed "
        "8475). All gradients are right.",
    [AR_FAULT_adam_step_not_synced] =
        "Ranks that hold copies of a parameter count Adam steps differently: every other one is a step ahead. Its "
        "first update is sqrt(1 - beta2^2)/(1 - beta1^2) to sqrt(1 - beta2)/(1 - beta1), 0.744 times the expected "
        "one; the copies drift apart.",
    [AR_FAULT_optimizer_counter_ahead] =
        "A step without gradients has advanced Adam's counter on all ranks, so bias corrections begin at 2 "
        "(NVIDIA/Megatron-LM issue 5974, \"first step about 1.34 times too small\"). All ranks agree.",
    [AR_FAULT_weight_decay_on_shard_only] =
        "Weight decay reaches only the first of the ranks that hold copies of a parameter. The others lack lr times "
        "the decay of each weight, 166 ulp here; after thousands of steps the copies are different models.",
    [AR_FAULT_muon_of_shards] =
        "Newton-Schulz runs on each rank's shard (deepspeedai/DeepSpeed 8437: equal gradients, updates 39 % apart at "
        "tp=2). A shard's orthogonal matrix is no part of the whole one's. Gradients, momenta and all that AdamW "
        "updates are right, and a gather is missing in the bytes.",
    [AR_FAULT_muon_norm_of_shards] =
        "The matrix is whole, but each rank divides it by the norm of its own shard, so Newton-Schulz begins with "
        "singular values that are too large, by another factor on each rank.",
    [AR_FAULT_muon_packed_as_one] =
        "q, k and v lie in one parameter and are made orthogonal together (deepspeedai/DeepSpeed 8384 has stale head "
        "counts there). Their updates mix; all ranks agree, also one alone.",
    [AR_FAULT_norm_fp16_store] =
        "A norm's output is stored in 16 bits. Every value is within 2^-8 of the right one and has a short mantissa; "
        "all ranks agree.",
    [AR_FAULT_ring_backward_first_kv] =
        "The backward pass of ring attention keeps the keys and values of its first step, the rank's own, and uses "
        "them at every hop (huggingface/diffusers 14265). The gradient of the probabilities is first: the columns of "
        "other ranks' keys hold the values for the rank's own. One rank is right, the error is the same in any dtype, "
        "and the bytes are as predicted: everything was sent.",
    [AR_FAULT_ring_kv_grad_local] =
        "dK and dV of a key are sums over the queries of all ranks of the ring, and here a rank does not send the "
        "others what its queries contribute. In causal attention the last chunk's keys have no other queries, so rank "
        "1 of two is right.",
    [AR_FAULT_cp_tail_dropped] =
        "Attention works on the length rounded down to a multiple of 2 cp and drops the rest: 24 positions over 8 "
        "ranks become 16 (NVIDIA/TransformerEngine 1930: 7 become 6). The last tokens' outputs and gradients are "
        "zero. A zigzag of such a length is refused, with the multiple that would be right; contiguous chunks need "
        "only a multiple of cp.",
    [AR_FAULT_cp_targets_own] =
        "The targets are counted over data parallelism alone, so each context-parallel rank divides by those of its "
        "own positions, 48 or 44 of 92, and the loss is twice as large (volcengine/verl 5983, NVIDIA/Megatron-LM "
        "673). The factors of the ranks are T/T_c; their inverses add up to 1.",
    [AR_FAULT_cp_targets_whole] =
        "Every context-parallel rank counts the targets of whole sequences, and the counts are added over all ranks: "
        "loss and gradients are exactly 1/cp of the reference (huggingface/transformers 39674 has it the other way "
        "round). Clipping hides a power of two, as with dp_sum_of_local_means.",
    [AR_FAULT_labels_after_cut] =
        "Labels are shifted after the sequence was cut, within each rank's own positions: the last of a chunk has no "
        "target, or a zigzag's first chunk is followed by its second (volcengine/verl PR 4250). T is smaller by one "
        "per sample and cut. The loss is off by 0.14 %; the logits are right.",
    [AR_FAULT_zigzag_positions] =
        "The tokens of a zigzag get the positions of contiguous chunks: rank 1 of two has chunks 1 and 2 of four, and "
        "its tokens count as those of 2 and 3. RoPE turns each row by the number of positions that it is off; with "
        "learned positions the rows are others of the table.",
    [AR_FAULT_allgather_token_order] =
        "Tokens of several ranks are put together in another order than they were cut in. In a ring the chunks of a "
        "zigzag are laid out as contiguous ones, so that keys and masks do not belong together: within a row the "
        "logarithms of the probabilities are those of other keys. With sequence parallelism the gathered rows are in "
        "the order of a zigzag: every wrong row of `q_proj` is another token's, bit for bit. Where they come in "
        "chunks that overlap the GEMM (--overlap), each rank lays them out in the order in which a ring brings them, "
        "its own first: rank 0 is right, and on the others blocks of tokens are rotated.",
    [AR_FAULT_chunk_not_awaited] =
        "A gather in chunks that overlaps a GEMM (--overlap) has two buffers, and the GEMM does not wait: it "
        "multiplies what the buffer held, the chunk before. Shapes, bytes and the number of calls are right. From the "
        "second chunk on every token of `q_proj` has the values of one of the chunk before it, bit for bit. On a real "
        "machine it depends on which is faster; here it happens each time.",
    [AR_FAULT_attention_over_documents] =
        "Attention crosses the ends of packed documents (axolotl-ai-cloud/axolotl 3608: a loss 1.83 times as large "
        "with five documents). Rows that hold one document are right. Every score that is seen and should not be has "
        "a key of another document.",
    [AR_FAULT_document_boundaries_local] =
        "A context-parallel rank takes the ends of documents among the row's first positions for those among its own "
        "(PrimeIntellect-ai/prime-rl PR 2392). Rank 0 is right. Scores across documents are seen, and others within "
        "one are not.",
    [AR_FAULT_positions_over_documents] =
        "Positions run on over the row instead of restarting in each document (huggingface/transformers PR 35941). "
        "The first document of every row is right; from the second on RoPE turns each token by the tokens before its "
        "document. RoPE is relative, so attention inside a document is the same except for rounding: the loss hardly "
        "moves, and only long rows or learned positions make it another model.",
    [AR_FAULT_recompute_new_dropout_mask] =
        "The second forward pass of a recomputed part continues in the stream of random numbers instead of drawing "
        "the masks of the first (PyTorch's `checkpoint` keeps and restores the generator's state for this, unless "
        "`preserve_rng_state=False`). The loss is right; the gradients are those of a network that dropped other "
        "elements. The first to differ is the gradient of the last matrix that is not recomputed: dY is right, its "
        "input is not.",
    [AR_FAULT_recompute_stale_input] =
        "The input that is kept has been overwritten by the module's output, as by a residual that is added in place "
        "or a buffer that is reused. The second forward pass begins from there: every gradient of the block is that "
        "of another input, and the whole forward pass is right.",
    [AR_FAULT_qkv_gathered_three_times] =
        "With sequence parallelism the input of q, k and v is gathered once, for their common GEMM. Here each of the "
        "three gathers it, as three separate column-parallel layers do. All values are right, so only the traffic "
        "shows it: if every tensor is right and the bytes are not those of the layout, check runs the layout again, "
        "records its collectives, and names the first that the layout does not have (`collective_repeated`). On two "
        "ranks an eighth more bytes move.",
    [AR_FAULT_collective_not_differentiable] =
        "The reduce-scatter of a row-parallel layer's output has the identity for a backward pass, as a collective "
        "that autograd does not know (pytorch/pytorch 120386, and `torch.distributed.reduce_scatter_tensor` where the "
        "functional one belongs). Each rank then has the gradient of its own positions and none of the others'. The "
        "first difference is the gradient of the last block's activation: each rank's features are right at its own "
        "positions, and zero elsewhere.",
    [AR_FAULT_unordered_param_grad] =
        "The gradient of a linear layer's weight is added up in fp32, one token at a time, in an order that differs "
        "from run to run and from rank to rank, as atomic additions of floats do. All is right except for rounding, "
        "and no tolerance would see it. In exact numerics there is no rounding to allow: for a difference that small, "
        "check runs the layout a second time, and other bits in it are the cause `unordered_sum`. Injected, the order "
        "depends on a counter of the runs, not on chance.",
    [AR_FAULT_dp_averaged_again] =
        "The loss is divided by the targets of all ranks, so its gradients must be added; here they are averaged, as "
        "DDP does by default (huggingface/transformers 34191, PrimeIntellect-ai/prime-rl PR 1960). Every gradient is "
        "1/dp of the reference. Clipping hides it from the loss.",
    [AR_FAULT_accum_divided_each_time] =
        "The accumulated gradient is divided by the number of micro-batches each time that one is added, not once "
        "(pytorch/torchtitan PR 1732): an exponential average, in which the last micro-batch weighs most. From the "
        "reference's own values the report finds the weight of each micro-batch, here 1/2 and 1.",
    [AR_FAULT_pp_sum_loss] =
        "The last stage's backward pass begins from the sum of the targets' losses, which is not divided by their "
        "number (pytorch/torchtitan 2972): the gradients of every stage are T times the reference. The loss that is "
        "reported is right, and clipping hides the rest.",
    [AR_FAULT_pp_stage_divides] =
        "Each stage divides the gradient that it receives by the number of micro-batches, where the last stage's "
        "division is enough (DeepSpeed 8152). In the last stage all is right; the one before it has 1/g of its "
        "gradients, the one before that 1/g²: the layers' factors are geometric.",
    [AR_FAULT_pp_layers_local] =
        "Each stage counts its layers from 0, and draws or loads the weights of those, so all stages begin with the "
        "same ones. Names and shapes are right. The first difference is the initial value of a weight of the second "
        "stage, which is that of another layer in the reference.",
    [AR_FAULT_pp_dropout_layer_local] =
        "Dropout's random stream is chosen by the number of a layer in its stage, so that layers of different stages "
        "drop the same elements. Weights and scales are right. The mask is found in another layer of the reference.",
    [AR_FAULT_pp_chunks_contiguous] =
        "With several stages per rank (interleaving), rank r has stages r, r + p, r + 2p. Here its weights are those "
        "of consecutive stages, as in a checkpoint that was converted for a pipeline without interleaving. With two "
        "ranks of two stages, layers are exchanged between the ranks.",
    [AR_FAULT_pp_gradnorm_own_stage] =
        "The sum of squares is not added over the pipeline, so every pipeline rank clips by the norm of its own "
        "stages. The root of the sum of the ranks' squares is the reference's norm.",
    [AR_FAULT_pp_loss_last_micro_batch] =
        "The loss that the last stage reports has the terms of its last micro-batch alone. All gradients are right. "
        "Computed again from the reference's logits, it is the sum over the last samples divided by all targets.",
    [AR_FAULT_pp_tied_not_summed] =
        "A tied table is on the first and on the last stage, and the gradients of the two copies are not added (verl "
        "7834, facebookresearch/lingua PR 75): the first has the embedding's part, the last the head's. They add up "
        "to the reference; after the update the copies are two weights.",
    [AR_FAULT_pp_stale_activation] =
        "A stage goes forward from what its receive buffer held before: from the second micro-batch on, each has the "
        "activation of the one before it, as where a buffer is reused before the transfer into it has ended. The "
        "first difference is the first value that the second stage computes; its samples are those of another "
        "micro-batch, bit for bit.",
    [AR_FAULT_pp_stale_gradient] =
        "In the backward pass a stage receives the buffer before its gradient is written, and uses that of the "
        "micro-batch before.",
    [AR_FAULT_zb_weight_pass_missing] =
        "Zero bubble splits a backward pass in two, for the input and for the weights. Here the first micro-batch's "
        "second part is left out. Activations and their gradients are right; the weights' gradients lack one "
        "micro-batch.",
    [AR_FAULT_zb_tied_counted_twice] =
        "Both parts of the backward pass count a tied weight's use in the head (pytorch/pytorch 180952). Rows of ids "
        "that the batch does not hold have the head's gradient alone, and are twice the reference, by which the fault "
        "is recognised.",
    [AR_FAULT_zb_hooks_skipped] =
        "The second part of the backward pass runs outside of autograd's, so that no hook sees its gradients, and "
        "they are not summed over dp (pytorch/pytorch 144530). The copies add up to the reference, and then drift "
        "apart.",
    [AR_FAULT_zero_last_micro_batch] =
        "With sharded gradients each backward pass reduces them into a rank's share. Here it overwrites what the "
        "micro-batches before have left there (Megatron-LM PR 7186: no_sync that does nothing): only the last one "
        "counts.",
    [AR_FAULT_zero_stale_weights] =
        "The weights that a unit gathered are believed to be there still in the next step, and are those before the "
        "update. The update itself is right, on every rank: the first difference is in the second step's forward "
        "pass.",
    [AR_FAULT_zero_backward_not_gathered] =
        "The forward pass frees a unit's weights; the backward pass begins before they have been gathered again, with "
        "a rank's own share among zeros. The root unit's stay (fully_shard's default), so the head's gradients are "
        "right, and the last block's are not.",
    [AR_FAULT_zero_gather_order] =
        "Gathered shares are laid out in another order than the ranks': the first one's comes last. Nothing is right "
        "from the embedding on, though norms and losses look like those of another seed.",
    [AR_FAULT_zero_share_off_by_one] =
        "A rank's share of a bucket begins one element late, at an edge that divides it unevenly: one weight of each "
        "bucket keeps its value forever. No loss shows it.",
    [AR_FAULT_hsdp_copies_not_summed] =
        "Hybrid sharding sums gradients inside a group of ranks, then over the groups, which hold copies of the same "
        "shards. Here the second sum is left out: each group trains its own model on its part of the batch.",
};

const char *ari_bugs_explained(ar_fault fault)
{
    return explained[fault] ? explained[fault] : ari_bugs_experts_explained[fault];
}
