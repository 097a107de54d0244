# SPDX-License-Identifier: Apache-2.0
"""Faults of the programs of further_kinds.py: program, ranks, fault, causes (" |": partly right from there), where the first
wrong tensor is. Their truths were decided before one was judged; threads are those where somebody had this mistake."""

BROKEN = [
    # The flag is set between forward and backward, so that it is the next micro-batch's: the first is reduced and the second
    # is not (karpathy/build-nanogpt 30).
    ("accumulating", 2, "flag_set_after_forward",
     "missing_average missing_all_reduce | replicas_apart partial_sum one_micro_batch micro_batches_weighted", "*:grad"),
    # A buffer is added to itself after each micro-batch (Megatron-LM 6660): the first counts four times, the second twice.
    ("accumulating", 2, "doubled_by_each_micro_batch", "micro_batches_weighted | counted_twice reduced_again partial_sum", "*:grad"),
    # Labels are counted before they are shifted (transformers 46204).
    ("accumulating", 2, "first_position_counted", "target_count | wrong_scalar", "loss:fwd *:bwd *:grad"),
    # Squares are added over all ranks, also those with copies (VeOmni 184, torchtitan 2318).
    ("replicas", 4, "norm_over_the_world", "norm_counts_twice clip_factor wrong_scalar", "*:grad *:m"),
    # One replica's gradients are clipped and the other's are not.
    ("replicas", 4, "replicas_not_clipped", "clip_factor part_of_one_rank scaled_by_rank | wrong_scalar replicas_apart", "*:grad *:m"),
    # Each rank loads the blocks that follow each other, as without interleaved stages (Megatron-LM 1304 and its like).
    ("interleaved", 2, "blocks_in_a_row", "other_tensor", "blocks.*:init"),
    # The last rank sends the gradient of its second stage's input for that of its first one's.
    ("interleaved", 2, "gradient_of_other_stage", "| other_input other_tensor partial_sum", "*:grad"),
    # The padding of the other text is seen by attention across (transformers 8071 and its like).
    ("summary", 2, "padding_seen_across", "keys_masked", "cross*:fwd"),
    ("summary", 2, "causal_across", "causal_mask", "cross*:fwd"),
    # The padded row of the head has a logit of 0, which counts in the softmax (Megatron-LM 1754).
    ("uneven", 2, "padding_in_the_softmax", "vocabulary_parallel_loss |", "loss:fwd head:bwd"),
    # Each rank takes a target for its own, the nearest of its words where it is another's.
    ("uneven", 2, "target_of_each_rank", "vocabulary_parallel_loss other_labels |", "loss:fwd"),
    # A window of w keys and itself (transformers 35896 and its like).
    ("windowed", 2, "window_one_wider", "attention_window", "blocks.0*"),
    # A weight in groups is taken as q, k and v one after the other.
    ("windowed", 2, "parts_in_a_row", "dimension_flattened packed_cut_as_one | slices_reordered wrong_kv_head", "blocks.0*"),
]
