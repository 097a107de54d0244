/* SPDX-License-Identifier: Apache-2.0 */
/* The faults of routers, experts and latent attention, as explained.c has the others. */
#include "cli/bugs/bugs.h"

const char *const ari_bugs_experts_explained[AR_FAULT_COUNT] = {
    [AR_FAULT_sinks_left_out] =
        "GPT-OSS's heads have one logit more each, in the softmax's denominator alone. A kernel that does not know it "
        "makes rows that sum to 1, all larger than they should be.",
    [AR_FAULT_cp_sinks_grad_twice] =
        "The sinks are no key of any rank, so their gradient is a sum over all queries, and over cp once. Here it comes "
        "twice; all else is right, and the loss of ten steps hardly shows it.",
    [AR_FAULT_mtp_rolled_after_cut] =
        "Tokens and labels of a further token are those of later positions of the whole sequence. Each rank here rolls "
        "its own positions after the cut: the last ones of each part have no token and no target, and depth d has "
        "fewer targets by d for each cut.",
    [AR_FAULT_mtp_rolled_over_documents] =
        "In packed rows the last positions of a document have no further token. Here they take the next document's "
        "(pytorch/torchtitan 4544): more targets, across the borders.",
    [AR_FAULT_mtp_mean_over_all] =
        "Each depth's loss is a mean over its own targets, which are fewer than the next token's (NVIDIA/Megatron-LM "
        "3159). Divided by those of the next token all of its gradients are too small by one ratio.",
    [AR_FAULT_mtp_head_grad_lost] =
        "The head has a use for the next token and one for each further one. Here only the first reaches its gradient.",
    [AR_FAULT_mtp_embedding_grad_lost] =
        "The blocks for further tokens, in a pipeline on the last stage, look up rows of the embedding, and that use's "
        "gradient is lost, as where the stages' copies are not summed. Rows of ids in the batch lack a part.",
    [AR_FAULT_mtp_embedding_grad_twice] =
        "The same use counts twice, as where the stages' copies are summed once more.",
    [AR_FAULT_router_weights_not_normalised] =
        "A token's weights are the softmax's values of its two experts, not divided by their sum "
        "(`norm_topk_prob` read as false). Each row of the weights is the reference times that sum, 0.41 to 0.89. "
        "The model trains, with smaller outputs of its experts.",
    [AR_FAULT_router_weights_normalised] =
        "The other way round: a token's four weights are divided by their sum, in a model that does not do so. "
        "Each row is 1.4 to 3.3 times the reference.",
    [AR_FAULT_router_softmax_twice] =
        "The softmax over all experts is followed by one over the values of those chosen, as where the gate of a "
        "model that chooses by logits (GPT-OSS) is given probabilities. Weights move towards one half each; their "
        "order stays, so the same experts are chosen.",
    [AR_FAULT_router_ties_higher_index] =
        "The choice is made by logits that were rounded to bf16, where ties are frequent, and of equal ones the "
        "higher number is taken: `topk` promises no order (vllm-project/vllm 55514, ViperEkura/AstrAI 57). Here "
        "one token of 96 has another fourth expert in the first block, whose probability is 0.3 % less.",
    [AR_FAULT_router_logits_bf16] =
        "The router multiplies in bf16 (sgl-project/sglang 38695), so its logits have 8 bits. The softmax and all "
        "after it are in fp32. Every logit is the reference rounded.",
    [AR_FAULT_expert_input_weighted] =
        "The weight multiplies what goes into an expert in place of what comes out, as Llama-4's experts have it. "
        "An expert is not linear, so this is another function. Its backward pass is its own, and all shapes and "
        "bytes are right.",
    [AR_FAULT_router_weights_detached] =
        "The weights are used without a gradient, as where a collective without a backward moves them (NVIDIA- "
        "NeMo/Automodel PR 2995). The router gets none at all, and keeps the experts that it began with; the loss "
        "still falls.",
    [AR_FAULT_router_grad_chosen_alone] =
        "Where weights are not normalised the softmax gives each logit a gradient, those of the experts that were "
        "not chosen too. Here these get none: 28 of 32 logits of each token. The loss of ten steps shows nothing.",
    [AR_FAULT_router_sum_detached] =
        "The sum that weights are divided by is taken for a constant. All logits get a gradient, those of experts "
        "not chosen too, which must have exactly none where weights are normalised.",
    [AR_FAULT_router_bias_in_weights] =
        "A router of sigmoids (DeepSeek-V3) chooses by the scores and a bias, and weighs by the scores alone. Here "
        "the weights have the bias too: what is meant to balance experts changes what they make.",
    [AR_FAULT_router_bias_own_counts] =
        "The bias moves once a step by how many tokens of the whole batch went to each expert. Each rank here "
        "counts its own tokens: copies of the bias drift apart, and with them which experts ranks choose.",
    [AR_FAULT_router_bias_each_micro_batch] =
        "The update comes once for each micro-batch, by that one's counts: the bias moves as many times as far, and "
        "later micro-batches of the same step are routed by another one.",
    [AR_FAULT_router_bias_counts_bf16] =
        "Counts that go through a bf16 buffer have 8 bits (NVIDIA/Megatron-LM 7081: 40,840 becomes 41,216 or "
        "40,704), and so has their sum. Where a count is about the mean the update's sign flips. Below 256 tokens "
        "an expert nothing does.",
    [AR_FAULT_router_bias_counts_plain] =
        "The counts are those of the largest scores without bias and groups, as Megatron-LM counts by a second "
        "top-k. Experts to which the bias has brought tokens get no less of it: it never settles.",
    [AR_FAULT_router_scale_left_out] =
        "A token's weights, which add up to 1, are multiplied by a factor (`routed_scaling_factor`, 2.5). Here they "
        "are not, so that the routed experts add less beside the shared one and the residual. Gradients agree with "
        "it.",
    [AR_FAULT_router_scale_twice] =
        "The factor is applied by the router and again where the experts' outputs are added up: weights add up to "
        "6.25.",
    [AR_FAULT_router_scale_not_in_gradient] =
        "A backward pass written by hand forgets the factor of the weights. The forward pass and all gradients but "
        "those through the router are right; these are 1/2.5 of what they must be.",
    [AR_FAULT_router_groups_by_max] =
        "Groups of experts are ranked by the largest score in each (DeepSeek-V2), where DeepSeek-V3 adds the two "
        "largest. For some tokens other groups stay, and with them other experts.",
    [AR_FAULT_router_groups_not_masked] =
        "The scores of the groups that do not stay are not masked, so that a token's experts lie in more groups, on "
        "more ranks, than they should.",
    [AR_FAULT_balance_of_micro_batch] =
        "The balancing loss multiplies how many tokens go to an expert by how probable it is, so a mean over micro-batches "
        "and ranks is another loss than that of the whole batch: it wants every micro-batch to be balanced, and its "
        "gradient depends on the layout. Only the gradient of the router's logits differs, and no shape or loss "
        "says so.",
    [AR_FAULT_balance_without_k] =
        "Each token is counted once for each of its experts, so the counts add up to k times the tokens. Without the 1/k "
        "the balancing loss is k times as heavy as its coefficient says (allenai/OLMoE#45).",
    [AR_FAULT_balance_detached] =
        "The balancing loss is reported, and the tensor that carries its gradient is not used further (NVIDIA- "
        "NeMo/Automodel 1408), or its coefficient is missing (NVIDIA-NeMo/Megatron-Bridge 5165). Experts are not "
        "balanced, and no loss shows it.",
    [AR_FAULT_balance_divided_by_dp] =
        "The balancing loss is already of the whole batch, and its gradient is averaged over the data-parallel "
        "ranks besides (NVIDIA/Megatron-LM 3672): 1/dp of its coefficient, on the router alone.",
    [AR_FAULT_balance_divided_by_samples] =
        "The balancing loss of a sequence (DeepSeek-V3) is a mean over the batch's sequences. Here the sum over a "
        "micro-batch's samples is divided by their number once more (NVIDIA/Megatron-LM 5798): a fourth of its "
        "coefficient, and another part under another micro-batch size.",
    [AR_FAULT_router_z_loss_of_micro_batch] =
        "The router's z-loss is a mean over the tokens of the step's batch. A mean over a rank's own tokens, summed over "
        "the ranks and micro-batches, is as many times as heavy (NVIDIA/Megatron-LM#5047).",
    [AR_FAULT_router_grad_local] =
        "The experts are cut over tp, and each rank takes the products of the weights' gradient with its own part "
        "of what they made (pytorch/torchtitan 2387). The forward pass is right. The copies of the gradient "
        "differ, and their sum is the reference.",
    [AR_FAULT_sp_router_grad_summed] =
        "With sequence parallelism the gradients of replicated parameters that see a rank's own tokens are summed "
        "over tp. This router sees all tokens on each rank, and is summed all the same: its gradient is exactly "
        "tp times the reference. (A router that sees its own tokens alone and is not summed: Megatron-LM 599.)",
    [AR_FAULT_sp_router_grad_local] =
        "Experts that are whole on each rank (etp=1) let each tensor-parallel rank route its own positions, so a "
        "router's gradient is a sum over tp (NVIDIA/Megatron-LM 599; of a shared expert's gate: alibaba/Pai- "
        "Megatron-Patch 397). Here each rank keeps its own: the copies differ, their sum is right.",
    [AR_FAULT_latent_key_grad_local] =
        "All heads share the last features of latent attention's keys (DeepSeek-V2), so their gradient is a sum over "
        "heads, and over tp. Here each rank sums its own (NVIDIA/Megatron-LM 1699, pytorch/torchtitan 1373): of "
        "`kv_a` the key's rows are wrong alone; a large model's loss showed it after a thousand steps.",
    [AR_FAULT_sp_latent_key_grad_summed] =
        "The sum over heads is over tp already, and a copy of the sequence-parallel input sums it again "
        "(NVIDIA/Megatron-LM 6839): tp times the gradient, in the key's rows alone.",
    [AR_FAULT_latent_grads_summed_again] =
        "A column-parallel layer's input gradient is complete on each rank, and the gradients of `q_a` and `kv_a` "
        "are summed over tp as if it were not (inclusionAI/AReno 496): tp times the latents' rows; each rank had a "
        "part of the key's.",
    [AR_FAULT_gradnorm_latents_as_shards] =
        "`q_a` and `kv_a`, whole on every rank, are marked as sharded: the norm counts them tp times "
        "(ROCm/TransformerEngine 715: 1.52 times the norm). All gradients are right.",
    [AR_FAULT_experts_not_reduced] =
        "The sum over tp of the ranks' parts of what the experts make is left out, so that each rank combines its "
        "own. The copies add up to the reference; the bytes of two reductions a block are missing.",
    [AR_FAULT_experts_dx_not_reduced] =
        "The sum over tp of the ranks' parts of the gradient of the experts' input is left out "
        "(pytorch/torchtitan PR 4054). The forward pass, the loss and the experts' own gradients are right; "
        "everything from the last layer with experts backward is wrong.",
    [AR_FAULT_experts_combined_first] =
        "Each rank rounds its part of the experts' outputs, weights and combines it, and the sum over tp comes "
        "last: less is sent, and all is right but for rounding. Only equal bits show it; the difference is 1e-7 "
        "of the largest value.",
    [AR_FAULT_expert_rows_off_by_one] =
        "The permutation that brings rows back from the experts is off by one: each slot takes the row after its "
        "own, mostly that of another token of the same expert. Nothing fails; the values look like outputs of "
        "experts.",
    [AR_FAULT_expert_capacity_drops] =
        "An expert takes no more rows than an even share of the slots, 24 of 192, and the tokens beyond it are "
        "dropped, as with a capacity factor of 1. Which ones depends on the layout: each rank counts its own "
        "tokens. Here 57 of 96 tokens lack an expert.",
    [AR_FAULT_last_expert_left_out] =
        "The loop over experts ends one too early, and what the last one makes is zero. Tokens without it, 68 of "
        "96, are right.",
    [AR_FAULT_shared_expert_left_out] =
        "What the shared expert makes is not added, and its weights get gradients of zero. The layer's output is "
        "that of the routed experts alone, bit for bit.",
    [AR_FAULT_shared_gate_left_out] =
        "What the shared expert makes is added as it is, without the sigmoid of its gate, which is about one half "
        "at the start.",
    [AR_FAULT_shared_gate_detached] =
        "The shared expert's gate is used without a gradient, and stays as it was drawn. The shared expert itself "
        "has the right gradient.",
    [AR_FAULT_recompute_routes_differ] =
        "The router has jitter of 1 % in the second forward pass and none in the first, so weights differ, and "
        "for near ties experts (NVIDIA-NeMo/Automodel 3140: 2,791 rows against 2,701). The forward pass and the "
        "gradients around the experts are right; those of the experts' weights come first. Here expert 0 of the "
        "last block has one token, whose weight is 0.5 % less.",
    [AR_FAULT_empty_expert_not_updated] =
        "No token chose expert 4 of the first block in this step. Its gradient is zeros, with which it has weight "
        "decay and its moments shrink; an optimizer that is given no gradient leaves it out (NVIDIA- "
        "NeMo/Automodel PR 2995). Its weights are those before the step.",
    [AR_FAULT_gradnorm_without_experts] =
        "The norm for clipping is taken over the parameters that all expert-parallel ranks have (Megatron-LM "
        "6099): 4.905 instead of 4.944. All gradients are right before clipping.",
    [AR_FAULT_ep_experts_drawn_alike] =
        "Each expert-parallel rank numbers its experts from 0 and draws them by these numbers, or reads those of a "
        "checkpoint. Expert 4 begins as a copy of expert 0, and the loss is a plausible one.",
    [AR_FAULT_ep_splits_swapped] =
        "The counts that one rank sends are those of two other ranks exchanged. A transport that compares both ends' "
        "counts stops; one that does not waits for ever, or gives an expert another's rows.",
    [AR_FAULT_ep_rows_not_put_back] =
        "What the experts made is sent back in the order in which they work on it, by expert, and not in that in "
        "which the rows arrived, by rank: a token has another token's output, of an expert of the same rank. All "
        "counts and shapes are right.",
    [AR_FAULT_ep_outputs_not_returned] =
        "Each rank adds what its own experts make for its tokens, and nothing of the others' comes back "
        "(huggingface/transformers PR 48205). Half of all slots are missing at ep=2, and the loss still falls.",
    [AR_FAULT_ep_weights_detached] =
        "Weights go with the rows to other ranks, and the collective that carries them has no backward (NVIDIA- "
        "NeMo/Automodel PR 2995). The router has a gradient, but from the experts of its own rank alone, whichever "
        "these are.",
    [AR_FAULT_ep_grads_times_ep] =
        "The mean of an expert's gradient is taken over the ranks with its copies, dp/ep of them, though it has the "
        "tokens of all dp (deepspeedai/DeepSpeed 6545, 5618; databricks/megablocks 86). Gradients of experts, and "
        "no others, are ep times the reference. Adam hides most of it.",
    [AR_FAULT_edp_group_missing] =
        "An expert's gradient is not summed over the ranks that have copies of it, which are other groups than "
        "those of all else. The copies drift apart; every rank's values look like gradients.",
    [AR_FAULT_experts_summed_over_dp] =
        "Gradients of experts are summed over dp as all others are, where a bucket's bytes are those of other "
        "experts on other ranks. Each expert is trained with the sum of ep experts' gradients.",
    [AR_FAULT_empty_expert_grad_unwritten] =
        "A grouped product goes over the rows that there are, and writes nothing for an expert without any: its "
        "gradient is what the memory held (tgale96/grouped_gemm 36, pytorch/pytorch 172439), here another expert's. "
        "No token chose expert 5 of the last block in this step; all others are right.",
    [AR_FAULT_gradnorm_own_experts] =
        "The squares of experts' gradients are not added over the ranks that share them out, so that each clips by a "
        "norm of its own (hpcaitech/ColossalAI 2192): 4.914 and 4.936 instead of 4.944. What all ranks have drifts "
        "apart from the first clipped step on.",
};
