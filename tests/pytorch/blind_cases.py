# SPDX-License-Identifier: Apache-2.0
"""Broken runs of strangers_run.py that were written by one who had not seen `anyrank verify`'s code, nor what it says.

As BROKEN of strangers_cases.py: bug, model, where, options, causes (" |": partly right from there), where the first wrong
tensor has to be.
"""

import blind_mistakes  # noqa: F401 (registers its functions)
from strangers_cases import TWICE, UPDATE, Stranger

BROKEN = [
    # Ranks that share a sequence.
    # truth: In the ring the keys go round and the values do not, so that other ranks' keys weigh a rank's own values.
    ("values_stay_at_home", "rover", "hand cp2 ring", {},
     "ring_attention other_input slices_repeated | later_tokens", "blocks.0.attn*"),
    # truth: The ring's partial outputs are weighted with powers of 2 of sums that are natural logarithms.
    ("sums_in_base_two", "rover", "hand cp2 ring", {},
     "ring_attention row_statistic ring_weights | softmax_scale later_tokens", "blocks.0.attn*"),
    # truth: Of a block of keys that came round the ring no window is applied, so that the second layer sees too far back.
    ("window_of_own_block_alone", "rover", "hand cp2 ring", {}, "attention_window | causal_mask later_tokens", "blocks.1.attn*"),
    # truth: Tokens are dealt in a zigzag and labels in contiguous parts, so that tokens have labels of other places.
    ("labels_in_plain_order", "rover", "hand cp2 zigzag", {},
     "zigzag_order positions labels_of_other_places | labels_shifted labels_of_other_samples", "loss:fwd"),
    # truth: Tokens are dealt in a zigzag and positions in contiguous parts, so that RoPE turns by those of other tokens.
    ("positions_in_plain_order", "rover", "hand cp2 zigzag", {},
     "positions zigzag_order | later_tokens", "blocks.0.attn*"),
    # truth: Each rank numbers documents from the first of its own part, so that a part that begins in document 1 sees 0.
    ("documents_counted_in_part", "rover", "hand cp2", {"packed": True},
     "document_boundaries | later_documents causal_mask later_tokens", "blocks.0.attn*"),
    # Ranks that share layers.
    # truth: The MLP's input enters its column-parallel layers without the sum of its gradient over tp.
    ("mlp_entered_without_sum", "rover", "hand tp2", {},
     "missing_all_reduce | partial_sum replicas_apart", "blocks.1.ff:bwd blocks.1.ff_norm*"),
    # truth: The all-reduce after row-parallel layers takes the mean where the sum is wanted.
    ("outputs_averaged", "rover", "hand tp2 bf16", {}, "averaged_again | counted_twice wrong_scalar residual_scale", "blocks.0.attn*"),
    # truth: Tokens gathered over tp stay rank after rank, which mixes samples and tokens where a batch has several samples.
    ("gathered_rank_by_rank", "rover", "hand tp2 sp", {},
     "gathered_in_rank_order | dimension_flattened slices_reordered zigzag_order samples_dealt_out", "blocks.0.attn*"),
    # truth: The head's gather over tokens keeps a rank's own part of its gradient without adding the other ranks'.
    ("head_gathers_without_sum", "rover", "hand tp2 sp", {},
     "missing_reduce_scatter missing_all_reduce | partial_sum replicas_apart", "out_norm*"),
    # truth: A rank's range of ids begins at its rank in the world times the shard's size, so that the second replica finds none.
    ("ids_by_rank_in_the_world", "rover", "hand dp2 tp2", {},
     "world_rank_in_group | zeros_of_ranks ids_of_other_shards block_not_written never_written", "tok_emb:fwd"),
    # truth: What a rank looks up for ids that it does not own is not set to zero before the sum.
    ("rows_of_others_not_zeroed", "rover", "hand dp2 tp2", {}, "embedding_mask | tensor_added constant_added", "tok_emb:fwd"),
    # truth: Each rank of the vocabulary-parallel loss subtracts its own maximum, and denominators are added all the same.
    ("maximum_of_own_logits", "rover", "hand tp2", {}, "vocabulary_parallel_loss | replicas_apart", "loss:fwd"),
    # truth: The columns of wo are dealt to the ranks in turn where they have to be cut in contiguous parts.
    ("columns_dealt_in_turn", "rover", "hand tp2 bf16", {},
     "dimension_flattened packed_cut_as_one | slices_reordered shards_misplaced zigzag_order", "blocks.?.attn.wo.weight:init"),
    # truth: Gate and up, packed, are cut as one block: rank 0 has all of the gate's weight and rank 1 all of up's.
    ("gate_and_up_cut_as_one", "rover", "hand tp2", {},
     "packed_cut_as_one | other_module other_tensor shards_misplaced slices_reordered",
     "blocks.?.ff.w[13].weight:init"),
    # truth: Each rank clips by the norm of the shards that it has, without adding squares over tp.
    ("clipped_by_own_shards", "rover", "hand tp2", UPDATE,
     "norm_of_own_shards | update_scaled", "grad_norm:clip"),
    # truth: Accumulated gradients are summed over dp after each micro-batch, so that the first is added over dp twice.
    ("reduced_after_each_micro_batch", "rover", "hand dp2 tp2", {"micro": 2},
     "micro_batches_weighted counted_twice reduced_again | partial_sum wrong_scalar", "*:grad"),
    # Ranks that share samples.
    # truth: The loop calls the module inside of DDP, so that gradients are never averaged.
    ("inner_module_called", "mosaic", "ddp dp2", {},
     "missing_average | missing_all_reduce replicas_apart partial_sum", "*:grad"),
    # truth: The head was frozen while DDP was made and is trained, so that DDP does not average its gradient.
    ("thawed_after_wrapping", "rover", "ddp dp2", {},
     "missing_average | missing_all_reduce replicas_apart partial_sum", "unembed.weight:grad"),
    # truth: Each rank initialises with a seed of its own and nothing is broadcast, so that rank 1's shards are of other weights.
    ("seeded_by_rank", "mosaic", "fsdp2 dp2", {},
     "other_initial_values part_of_one_rank replicas_apart | weight_not_loaded", "*:init"),
    # truth: All ranks take the first rank's samples.
    ("no_sampler", "bloom", "ddp dp2", {},
     "same_samples | slices_repeated shards_misplaced", "*embeddings:fwd"),
    # truth: The last batch is filled up with the first sample in place of the last one.
    ("last_batch_filled_up", "mosaic", "ddp dp2", {},
     "same_samples slices_repeated | batch_order slices_reordered input_of_other_micro_batch", "tok_emb:fwd"),
    # truth: DDP's hook sends gradients in bf16.
    ("buckets_in_bf16", "vesper", "ddp dp2", {}, "fewer_bits | low_precision", "*:grad"),
    # The loss and what it is of.
    # truth: The loss is divided by all tokens of the batch, padding and prompts too, in place of the targets.
    ("divided_by_all_tokens", "mosaic", "ddp dp2 bf16", {},
     "target_count | wrong_scalar mean_of_means reduced_again", "loss:fwd"),
    # truth: Each micro-batch's loss is the mean over its own targets, and those means are averaged.
    ("mean_of_each_micro_batch", "mosaic", "ddp dp2", {"micro": 2},
     "mean_of_means | reduced_again micro_batches_weighted", "loss:fwd unembed:bwd ln_f:bwd"),
    # truth: Gradients are zeroed before each micro-batch, so that the last one's alone are left.
    ("zeroed_in_the_loop", "mosaic", "alone", {"micro": 4}, "one_micro_batch | partial_sum part_of_tokens", "*:grad"),
    # truth: The accumulated gradient is divided by the number of micro-batches after each of them.
    ("divided_in_the_loop", "rover", "alone", {"micro": 2},
     "micro_batches_weighted | averaged_again counted_twice partial_sum", "*:grad"),
    # truth: The last token of a packed document has the next document's first token as its target, which should be ignored.
    ("next_document_predicted", "vesper", "ddp dp2", {"packed": True},
     "target_count | later_documents document_boundaries", "loss:fwd"),
    # The model.
    # truth: KV heads are repeated as 0 1 0 1 and not as 0 0 1 1, so that query heads have another's keys and values.
    ("heads_repeated_in_turn", "rover", "ddp dp2 bf16", {}, "wrong_kv_head | slices_reordered", "blocks.0.attn*"),
    # truth: Positions begin at 2 (the offset of OPT's table), so that each token has the row of the second next.
    ("places_from_two", "vesper", "fsdp2 dp2", {}, "positions | tokens_shifted", "pos_emb:fwd"),
    # truth: Attention's scores are not capped, as where a kernel has no soft cap.
    ("scores_not_capped", "gemma2", "ddp dp2", {}, "softcap | softmax_scale", "model.layers.0.self_attn*"),
    # truth: The norm's weight is taken as it is, and not as 1 + weight.
    ("gain_without_one", "gemma2", "alone", {}, "norm_gain", "model.layers.0.input_layernorm:fwd"),
    # truth: GELU is the approximation by tanh and not the exact one.
    ("gelu_by_tanh", "mosaic", "ddp dp2", {}, "activation_function | small_change", "blocks.0.ff*"),
    # truth: The activation is on the up projection and not on the gate.
    ("up_is_activated", "rover", "ddp dp2 bf16", {}, "activation_arguments | activation_function other_module", "blocks.0.ff*"),
    # truth: The MLP reads the stream after attention in place of beside it (no parallel residual).
    ("one_after_the_other", "neox", "ddp dp2", {},
     "residual other_input | tensor_added", "gpt_neox.layers.0.post_attention_layernorm:fwd"),
    # truth: The MLP reads the stream itself and not its norm.
    ("mlp_reads_the_stream", "mosaic", "fsdp2 dp2", {}, "norm_missing other_input", "blocks.0.ff*"),
    # truth: The residual is added twice: once to attention's output and once more to the sum.
    ("stream_added_twice", "mosaic", "ddp dp2 bf16", {}, "residual residual_scale | tensor_added counted_twice", "blocks.0:fwd"),
    # truth: The causal mask is off by one: each token sees the next one too.
    ("next_token_seen", "mosaic", "alone bf16", {}, "causal_mask | later_tokens", "blocks.0.attn*"),
    # truth: Masked scores are 0 and not minus infinity, so that later tokens count in the softmax.
    ("masked_with_zero", "rover", "alone", {},
     "attention_softmax causal_mask | filled later_tokens", "blocks.0.attn*"),
    # truth: The padding mask goes by the id of padding, which is also a word's: four real tokens are masked as keys.
    ("padding_is_a_word", "cohere", "ddp dp2", {},
     "keys_masked padding_mask | causal_mask later_tokens", "model.layers.0.self_attn*"),
    # truth: YaRN's factor of the cosines and sines, 1.14, is left out.
    ("yarn_factor_left_out", "yarn", "ddp dp2", {},
     "wrong_scalar softmax_scale rope_settings", "model.rotary_emb* model.layers.0.self_attn*"),
    # truth: Dropout of 0.1 is on where the reference has none.
    ("dropout_by_default", "vesper", "ddp dp2", {}, "dropout | dropout_without_scale", "layers.0.drop:fwd"),
    # truth: The embedding's padding_idx is the id of a real word, whose row gets no gradient.
    ("padding_id_of_a_word", "mosaic", "ddp dp2", {},
     "no_gradient block_not_written | repeated_ids embedding_sum ids_of_other_shards",
     "tok_emb.weight:grad"),
    # truth: Heads and tokens are not transposed back before attention's output is flattened.
    ("heads_not_put_back", "mosaic", "ddp dp2", {},
     "transposed | dimension_flattened slices_reordered", "blocks.0.attn*"),
    # truth: The packed projection is read as q, k, v of each head in turn, and has all of q, all of k, all of v.
    ("packed_by_head", "vesper", "ddp dp2", {}, "dimension_flattened | packed_cut_as_one slices_reordered", "layers.0.attn*"),
    # truth: The norms of queries and keys take the mean square over all heads and not of each head.
    ("norm_over_all_heads", "rover", "ddp dp2", {}, "norm_statistic row_statistic", "blocks.0.attn.[qk]_norm:fwd"),
    # truth: RoPE's exponents are i/d and not 2i/d: the frequencies are those of the root of theta.
    ("frequencies_of_half", "rover", "ddp dp2 bf16", {}, "rope_settings | positions later_tokens", "blocks.0.attn*"),
    # truth: LayerNorm's epsilon is 1e-3 and not 1e-5.
    ("epsilon_of_keras", "mosaic", "alone", {}, "norm_epsilon | norm_statistic row_statistic", "emb_ln:fwd"),
    # truth: The second block has no RoPE (a pattern of layers without it that this model does not have).
    ("second_block_not_turned", "rover", "fsdp2 dp2", {}, "rope_turn | later_tokens", "blocks.1.attn*"),
    # What is loaded.
    # truth: The two blocks have each other's weights.
    ("layers_sorted_by_name", "mosaic", "ddp dp2 bf16", {}, "other_tensor | slices_reordered", "blocks.?.*:init"),
    # truth: The embedding's rows are one id further on: a special token was put in front.
    ("special_token_in_front", "mosaic", "ddp dp2", {},
     "ids_off_by_one | slices_reordered shifted shards_misplaced", "tok_emb.weight:init"),
    # truth: The rows of wq and wk were put in the order of RoPE by halves, and the model turns neighbours.
    ("permuted_for_halves", "rover", "ddp dp2", {},
     "rope_pairing dimension_flattened | slices_reordered", "blocks.?.attn.w[qk].weight:init"),
    # truth: The weights of the checkpoint are those before the step that its optimizer's state has made.
    ("weights_of_before_the_step", "vesper", "alone", {"resume": "before", **UPDATE},
     "stale_value other_point_of_step no_update stale_weights | other_initial_values weight_not_loaded", "*:init"),
    # The optimizer.
    # truth: Adam adds the weight decay to the gradient (Adam for AdamW).
    ("adam_with_l2", "mosaic", "ddp dp2", UPDATE, "weight_decay", "*:m *:v *:new"),
    # truth: Adam's betas are exchanged.
    ("betas_exchanged", "rover", "fsdp2 dp2", UPDATE, "other_betas", "*:m *:v"),
    # truth: The norm that gradients are clipped by is their largest element and not the root of the sum of squares.
    ("largest_element_for_norm", "mosaic", "ddp dp2 bf16", UPDATE, "norm_other_order | clip_factor", "grad_norm:clip"),
    # truth: Gradients are clipped after the optimizer's step, which has seen them unclipped.
    ("clipped_after_the_step", "vesper", "ddp dp2", UPDATE,
     "clip_factor | update_scaled missing_tensor loss_scale", "grad_norm:clip *:m *:v"),
    # truth: Only the first group of parameters, without biases and norms, is clipped, by its own norm.
    ("first_group_clipped", "vesper", "alone", UPDATE, "norm_leaves_out | clip_factor", "grad_norm:clip"),
    # truth: Frozen parameters have a gradient of zeros and not none, so that weight decay takes them down.
    ("frozen_has_zeros", "mosaic", "ddp dp2", {"frozen": ("tok_emb",), **UPDATE},
     "weight_decay", "tok_emb*"),
    # truth: SGD's momentum is dampened by 0.9, so that the second gradient counts a tenth.
    ("dampened", "rover", "ddp dp2", {"adam": "sgd", **TWICE},
     "sgd_dampening other_betas | partial_sum optimizer_state_lost update_scaled clip_factor", "*@2"),
]


def broken():
    for bug, model, where, options, causes, first in BROKEN:
        right, partly = (tuple(part.split()) for part in (causes + " |").split(" |")[:2])
        yield Stranger("-".join(["blind", model, *where.split(), bug]), model, bug, where, options, right, partly,
                       tuple(first.split()))


CASES = list(broken())
