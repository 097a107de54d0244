# SPDX-License-Identifier: Apache-2.0
"""Runs of blind2_run.py, broken and right, by one who had not seen `anyrank verify`'s code, nor causes.md, nor its tests.

Written, and their truths decided, before one was judged. As BROKEN of strangers_cases.py: bug, model, where, options,
causes (" |": partly right from there; nothing before it: no cause is), where the first wrong tensor has to be. Threads are
those where somebody had this mistake, or one of its kind.
"""

import re

import blind2_mistakes  # noqa: F401 (registers its functions)
from blind2_run import run
from strangers_cases import OF_MANY, TWICE, UPDATE, Stranger


class Stranger2(Stranger):
    trial, begin, of_many = "blind2", staticmethod(run), (*OF_MANY, "ulysses")

    def __post_init__(self):
        super().__post_init__()
        self.ranks = {dim: int(n) for dim, n in re.findall(r"\b(dp|cp|tp|pp)(\d)", self.where)}
        self.options = {**self.options, **({"ulysses": True} if "ulysses" in self.where.split() else {})}


ADAPTER = {"frozen": ("base", "k_proj", "o_proj", "mlp", "norm", "embed"), **UPDATE}
# other way to write it, model, where, options
RIGHT = [
    (None, "harbor", "hand tp4", {}), (None, "harbor", "hand cp2 ring zigzag", {"packed": True}),
    (None, "harbor", "hand pp2", {"micro": 3, **TWICE}), (None, "skiff", "hand dp2 tp2 sp bf16", {}),
    ("fused_attention", "harbor", "hand cp2 ulysses bf16", {}), ("added_backwards", "harbor", "hand tp4 bf16",
     {"packed": True}),
    ("keys_in_blocks", "quarry", "ddp dp3", {"left": True}), ("keys_in_blocks", "quarry", "fsdp2 dp2 bf16", {"packed": True}),
    ("adapter_in_fp32", "anchor", "ddp dp2 bf16", ADAPTER), ("silent_backward_alone", "quarry", "ddp dp2", {"micro": 3}),
    ("statistics_in_double", "quarry", "alone bf16", {"micro": 2, "checkpointing": True, **UPDATE}),
    ("compiled", "quarry", "ddp dp2", {}), ("loss_in_chunks", "harbor", "hand tp2 sp", {"packed": True}),
]
BROKEN = [
    # Ranks that share a sequence.
    # truth: The ring makes one hop too few, so that the last rank of four never sees the first one's keys.
    ("ring_stops_early", "harbor", "hand cp4 ring", {},
     "keys_masked causal_mask | attention_window ring_attention later_tokens", "layers.2.attn*"),
    # truth: Gradients of keys and values go on round the ring where they have to come back, and reach other ranks.
    ("gradient_goes_on", "harbor", "hand cp4 ring", {},
     "shards_misplaced | missing_reduce_scatter partial_sum other_input slices_reordered", "layers.2.attn*"),
    # truth: The logarithms of sums that a ring's partial outputs are joined by are rounded to bf16.
    ("sums_of_ring_in_bf16", "harbor", "hand cp2 ring", {},
     "fewer_bits low_precision | ring_attention row_statistic later_tokens", "layers.0.attn*"),
    # truth: Of a zigzag's blocks those of lower ranks are seen as a whole and those of higher ones not at all.
    ("blocks_judged_by_rank", "harbor", "hand cp2 ring zigzag bf16", {},
     "causal_mask zigzag_order positions keys_masked | later_tokens", "layers.0.attn*"),
    # truth: The loss is multiplied by the ranks that share a sequence, whose gradients are added and not averaged
    # (Megatron-LM 673, 906).
    ("loss_times_context", "harbor", "hand cp2", {}, "reduced_again counted_twice sum_for_mean | wrong_scalar loss_scale",
     "loss:fwd"),
    # truth: Documents' boundaries are divided by the ranks that share a sequence and taken in each rank's part.
    ("boundaries_divided", "harbor", "hand cp2", {"packed": True},
     "document_boundaries | later_documents causal_mask keys_masked later_tokens", "layers.0.attn*"),
    # truth: After Ulysses' second exchange the heads of the ranks are dealt out in turn, and not rank after rank.
    ("heads_back_in_turn", "harbor", "hand cp2 ulysses bf16", {},
     "slices_reordered dimension_flattened | transposed zigzag_order other_input",
     "layers.0.attn*"),
    # truth: In Ulysses' attention over all tokens a rank repeats the documents of its own part.
    ("documents_of_own_part", "harbor", "hand cp2 ulysses", {"packed": True},
     "document_boundaries | later_documents causal_mask keys_masked later_tokens", "layers.0.attn*"),
    # Ranks that share layers.
    # truth: Of the one head of keys and values that all ranks have, the biases' gradients are not added over tp
    # (bigcode-project/Megatron-LM 11).
    ("kv_biases_not_added", "skiff", "hand tp2", {},
     "missing_all_reduce | partial_sum replicas_apart", "*.[kv]_proj.bias:grad"),
    # truth: Each rank adds its share of the bias before the sum and has that share of its gradient, a quarter.
    ("bias_shared_out", "harbor", "hand tp4", {},
     "missing_all_reduce averaged_again counted_twice | wrong_scalar partial_sum",
     "*.o_proj.bias:grad *.down_proj.bias:grad"),
    # truth: In the backward pass of the loss of a cut vocabulary only the first rank takes 1 off the targets' probabilities.
    ("targets_of_first_rank", "harbor", "hand tp2", {},
     "| partial_sum other_input vocabulary_parallel_loss part_of_one_rank", "head:bwd output:bwd"),
    # truth: The gradient of tokens that were cut for the ranks is not gathered: each has zeros for the others'.
    ("tokens_cut_without_gather", "harbor", "hand tp2 sp", {},
     "missing_all_gather missing_all_reduce collective_without_backward | partial_sum replicas_apart rows_left_out no_gradient"
     "block_not_written", "embed.weight:grad"),
    # truth: Partial outputs are added over the ranks with other samples, and not over those with the other heads.
    ("sums_in_other_group", "harbor", "hand dp2 tp2 bf16", {},
     "wrong_group | missing_all_reduce other_input partial_sum replicas_apart", "layers.0.attn*"),
    # truth: Eight ids that fill up the vocabulary have logits of 0, and count in the softmax.
    ("padded_ids_count", "harbor", "hand tp2", {}, "vocabulary_parallel_loss", "loss:fwd"),
    # truth: The gate and up weights' gradients read a buffer of gathered tokens in which each rank has its own everywhere.
    ("buffer_of_own_tokens", "harbor", "hand tp2 sp", {},
     "other_input input_overwritten missing_all_gather | partial_sum input_of_other_micro_batch shard_repeated"
     "one_shard_on_all_ranks",
     "*.gate_up_proj.weight:grad"),
    # truth: Ids are dealt to the ranks in turn, and the table's rows are cut in contiguous parts.
    ("rows_looked_up_in_turn", "harbor", "hand tp2", {},
     "| ids_of_other_shards ids_off_by_one slices_reordered zigzag_order other_input", "embed:fwd"),
    # truth: The norm over all heads has the mean square of a rank's own heads.
    ("norm_of_own_heads", "harbor", "hand tp2", {},
     "row_statistic norm_statistic", "layers.0.attn.[qk]_norm:fwd"),
    # truth: The squares in that norm are added over tp, and their gradient is not.
    ("squares_without_gradient", "harbor", "hand tp2", {},
     "norm_statistic_detached missing_all_reduce collective_without_backward | partial_sum norm_statistic row_statistic",
     "layers.2.attn*"),
    # Stages of a pipeline.
    # truth: The first and the last stage each keep the gradient of their own use of the tied table.
    ("table_of_each_stage", "harbor", "hand pp2", {},
     "tied_weight missing_all_reduce embedding_sum | partial_sum replicas_apart counted_twice", "embed.weight:grad"),
    # truth: Each stage clips by the norm of its own gradients.
    ("norm_of_own_stage", "harbor", "hand pp2", {"micro": 2, **UPDATE},
     "norm_of_own_shards | norm_leaves_out", "grad_norm:clip"),
    # truth: Each stage numbers its blocks from 0, so that the third has the first one's window, where it has none.
    ("blocks_counted_in_stage", "harbor", "hand pp2", {}, "attention_window | causal_mask keys_masked later_tokens",
     "layers.2.attn*"),
    # truth: The second stage is not sent which documents tokens are of, and its block sees across them.
    ("documents_not_sent", "harbor", "hand pp2", {"packed": True},
     "document_boundaries | later_documents causal_mask later_tokens", "layers.2.attn*"),
    # truth: The second stage works on what the first gave for the micro-batch before, with this one's labels.
    ("micro_batch_before", "harbor", "hand pp2", {"micro": 3},
     "input_of_other_micro_batch stale_value | batch_order slices_repeated same_samples other_input",
     "layers.2*"),
    # truth: The first stage divides the gradient that it is sent by the number of micro-batches again.
    ("divided_on_each_stage", "harbor", "hand pp2", {"micro": 2},
     "scaled_by_stage wrong_scalar counted_twice | averaged_again micro_batches_weighted", "layers.1*"),
    # truth: The last norm is taken twice: by the stage, and by the head.
    ("last_norm_twice", "harbor", "hand pp2", {},
     "| norm_gain norm_statistic row_statistic other_input norm_missing", "head:fwd output:fwd"),
    # Ranks that share samples.
    # truth: FSDP2 reduces the gradients of the first of three micro-batches and no others.
    ("first_micro_batch_synchronised", "quarry", "fsdp2 dp2", {"micro": 3}, "one_micro_batch | partial_sum", "*:grad"),
    # truth: Each rank's shares of the weights are sent before they are updated.
    ("sent_before_the_step", "quarry", "zero dp2", UPDATE,
     "no_update replicas_apart | part_of_one_rank", "*:new"),
    # truth: Each rank shuffles the samples with a seed of its own before it takes its part.
    ("shuffled_by_each_rank", "quarry", "ddp dp2", {},
     "same_samples batch_order | slices_repeated slices_reordered shards_misplaced other_input",
     "wte:fwd"),
    # truth: Gradients are accumulated in bf16.
    ("accumulated_in_bf16", "quarry", "ddp dp2", {"micro": 3}, "fewer_bits low_precision", "*:grad"),
    # truth: Squares of the weights are added to the loss, whose gradient has a part of the weights then.
    ("squares_of_weights_in_loss", "quarry", "alone", {}, "loss_term |", "loss:fwd"),
    # truth: Accumulated gradients are clipped after each micro-batch's backward pass, and not once.
    ("clipped_at_each_micro_batch", "quarry", "ddp dp2", {"micro": 3, **UPDATE},
     "clip_factor clipped | partial_sum micro_batches_weighted norm_of_own_shards", "*:grad"),
    # The loss, the batch and the mask.
    # truth: The mask of labels is not shifted as the labels are: each answer's first token is left out, one after it counts.
    ("mask_not_shifted", "quarry", "ddp dp2 bf16", {}, "target_count | labels_shifted keys_masked",
     "loss:fwd norm_f:bwd"),
    # truth: The loss is taken in chunks of 32 tokens, and those after the last whole one are left out.
    ("last_chunk_left_out", "quarry", "alone", {}, "target_count | partial_sum one_micro_batch", "loss:fwd"),
    # truth: Batches are collated as [tokens, samples] and read as [samples, tokens].
    ("collated_tokens_first", "quarry", "fsdp2 dp2 bf16", {},
     "transposed dimension_flattened | zigzag_order samples_dealt_out slices_reordered",
     "wte:fwd"),
    # truth: Each sample begins with a beginning-of-sequence token of its own and has another put in front.
    ("begun_twice", "anchor", "ddp dp2 bf16", ADAPTER, "tokens_shifted shifted | rotated slices_reordered ids_off_by_one"
     "other_input",
     "embed:fwd"),
    # truth: Samples are filled up on the left and positions count what fills them (transformers 22161, trl 6800).
    ("places_count_padding", "quarry", "ddp dp2", {"left": True},
     "positions | tokens_shifted slices_reordered", "wpe:fwd"),
    # truth: The mask of documents is made of the first row's and used for all.
    ("documents_of_first_row", "quarry", "ddp dp2", {"packed": True},
     "first_sample_alone document_boundaries | later_documents causal_mask keys_masked",
     "layers.0.attn*"),
    # truth: A run that resumes reads its data from the start, so that the second step has the first one's batch
    # (accelerate 2016, 4071).
    ("data_from_the_start", "quarry", "alone", {"resume": "between", **TWICE},
     "stale_value other_point_of_step batch_of_other_step | other_input same_samples", "wte:fwd@2"),
    # The model.
    # truth: Where part of a head is rotated, the last features are and not the first.
    ("last_features_turned", "harbor", "ddp dp2", {},
     "rope_settings rope_pairing | rope_turn positions later_tokens", "layers.0.attn*"),
    # truth: The keys' bias is added after norm and rotation.
    ("key_bias_after_turning", "harbor", "alone", {},
     "| bias_counted_again constant_added other_input norm_after_rope rope_turn positions", "layers.0.attn*"),
    # truth: Gate and up, one after the other in their weight, are taken as every other feature.
    ("gate_and_up_in_turn", "harbor", "fsdp2 dp2 bf16", {},
     "dimension_flattened packed_cut_as_one | activation_arguments slices_reordered other_module", "layers.0.mlp*"),
    # truth: The MLP's sum is written over the stream that the norm before it has saved for the backward pass.
    ("added_in_place", "harbor", "ddp dp2", {},
     "other_saved_input other_input | partial_sum norm_statistic_detached norm_statistic",
     "layers.2.mlp_norm* layers.2:bwd"),
    # truth: All blocks have the first one's weights (a list of one block, three times).
    ("one_block_thrice", "harbor", "ddp dp2 bf16", {}, "other_tensor", "layers.[12]*:init"),
    # truth: Attention's sinks are left out of the softmax. (That cause is younger than this table.)
    ("sinks_left_out", "quarry", "alone", {}, "sinks_missing | row_statistic softmax_scale ring_attention", "layers.0.attn*"),
    # truth: Scores are capped after they are masked, so that masked ones are -3 and later tokens count.
    ("capped_after_the_mask", "quarry", "ddp dp2 bf16", {},
     "causal_mask_missing masked_with_zero causal_mask | softcap mask_after_softmax filled attention_across_documents"
     "later_tokens",
     "layers.0.attn*"),
    # truth: Logits of the tied head are not scaled by the root of the width.
    ("logits_not_scaled", "quarry", "ddp dp2 bf16", {}, "logits_scale wrong_scalar", "output:fwd loss:fwd"),
    # truth: The factor of the embedding is rounded to bf16, as Gemma's is (transformers 29402).
    ("embedding_scale_in_bf16", "quarry", "ddp dp2", {},
     "residual_scale wrong_scalar | fewer_bits other_input small_change tensor_added", "layers.0*"),
    # truth: Queries are scaled by the gain of the keys' norm.
    ("gain_of_keys_for_queries", "qwen3", "alone", {},
     "other_module norm_gain | other_tensor", "model.layers.0.self_attn.q_norm:fwd"),
    # truth: The block without a window is rotated as the others are, where it has no positions.
    ("all_blocks_turned", "cohere2", "ddp dp2 bf16", {}, "rope_turn | rope_* later_tokens", "model.layers.1.self_attn*"),
    # truth: Norms are taken of the branches' inputs and not of their outputs.
    ("norms_come_first", "olmo2", "ddp dp2", {},
     "other_input residual norm_missing | norm_gain norm_statistic row_statistic", "model.layers.0*"),
    # truth: The embedding divides gradients by how often an id is in the batch.
    ("scaled_by_frequency", "quarry", "alone bf16", {}, "repeated_ids embedding_sum | row_statistic", "wte.weight:grad"),
    # truth: The embedding shrinks rows whose norm is above 1.
    ("rows_renormed", "quarry", "alone", {}, "row_statistic norm_statistic", "wte:fwd"),
    # Adapters.
    # truth: The adapter is scaled by alpha and not by alpha over its rank (LLMs-from-scratch 821).
    ("alpha_not_divided", "anchor", "ddp dp2", ADAPTER,
     "residual_scale | residual tensor_added wrong_scalar", "layers.0.attn.[qv]_proj:fwd"),
    # truth: The layers below the adapters are trained too.
    ("base_trained", "anchor", "alone", ADAPTER, "frozen_trained | missing_tensor no_update update_scaled other_learning_rate"
     "norm_counts_twice norm_leaves_out", ""),
    # truth: The adapter was merged into the weights and is added once more.
    ("merged_and_still_there", "anchor", "ddp dp2", ADAPTER,
     "| tensor_added other_initial_values weight_not_loaded counted_twice", "layers.?.attn.[qv]_proj.base.weight:init"),
    # truth: The weights below the adapters are in eight bits, with one step for each row.
    ("base_in_eight_bits", "anchor", "fsdp2 dp2", ADAPTER, "quantised | fewer_bits low_precision",
     "layers.?.attn.[qv]_proj.base.weight:init"),
    # The optimizer.
    # truth: Biases, gains and sinks decay as all other weights do.
    ("everything_decays", "quarry", "ddp dp2 bf16", UPDATE, "weight_decay | decay_of_ranks_apart",
     "*:new"),
    # truth: Adam divides by the largest second moment so far (AMSGrad).
    ("amsgrad", "quarry", "alone", TWICE, "| update_scaled other_betas adam_eps other_learning_rate", "*:new@2"),
    # truth: The table has a tenth of the learning rate.
    ("table_at_a_tenth", "quarry", "fsdp2 dp2", UPDATE, "other_learning_rate update_scaled | wrong_scalar", "wte.weight:new"),
    # truth: The norm of the gradients is added up in bf16.
    ("norm_added_in_bf16", "quarry", "zero dp2", UPDATE,
     "fewer_bits low_precision | small_change clip_factor wrong_scalar norm_leaves_out norm_counts_twice rounding",
     "grad_norm:clip"),
]


def right():
    for other, model, where, options in RIGHT:
        words = [k for k, v in options.items() if v and k != "frozen"]
        name = "-".join(["blind2-right", model, *where.split(), *words, other or "as-it-is"])
        yield Stranger2(name, model, None, where, options, other=other)


def broken():
    for bug, model, where, options, causes, first in BROKEN:
        good, partly = (tuple(part.split()) for part in (causes + " |").split(" |")[:2])
        yield Stranger2("-".join(["blind2", model, *where.split(), bug]), model, bug, where, options, good, partly,
        tuple(first.split()))


CASES = [*right(), *broken()]
