# SPDX-License-Identifier: Apache-2.0
"""Runs with mistakes that threads of training libraries tell of, by one who had not seen `anyrank verify`'s code, nor its tests.

The sentences were written before causes.md was read, the truths before one run was judged. As BROKEN of blind2_cases.py: bug,
model, where, options, causes (" |": partly right from there; nothing before it: no cause is), where the first wrong tensor is.
"""

import blind3_mistakes  # noqa: F401 (registers its functions)
import blind_cases  # noqa: F401 (registers models of its own)
from blind2_cases import Stranger2
from blind2_models import HUGGING_FACE2, MODELS2
from strangers_cases import TWICE, UPDATE, Stranger

PACKED, LEFT = {"packed": True}, {"left": True}
# other way to write it, model, where, options
RIGHT = [
    (None, "qwen3moe", "ddp dp2", {}), (None, "harbor", "hand tp2 sp", {"checkpointing": True}),
    (None, "gemma2", "ddp dp2 bf16", {}), (None, "harbor", "hand pp2 bf16", {"micro": 2, **PACKED}),
    (None, "rover", "hand cp2 ring zigzag bf16", {}), ("places_run_on_under_rope", "harbor", "hand cp2", PACKED),
    ("gain_before_rounding", "harbor", "fsdp2 dp2 bf16", {}), ("loss_of_cut_vocabulary", "harbor", "hand tp4", {}),
    ("means_weighted_by_targets", "quarry", "ddp dp3", {"micro": 2}), ("fused_update", "quarry", "ddp dp2", TWICE),
    ("update_written_down_again", "harbor", "ddp dp2", TWICE), ("partials_added_in_pairs", "harbor", "hand tp4 sp bf16", {}),
    ("masked_with_lowest", "quarry", "ddp dp2", PACKED), ("targets_picked_first", "quarry", "fsdp2 dp2 bf16", {}),
    ("gradients_kept_apart", "harbor", "hand dp2 tp2", {"micro": 3}),
]
BROKEN = [
    # Ranks that share layers.
    # truth: The last norm's gradient is of a rank's own tokens and is not summed over tp (Megatron-LM 1446).
    ("final_norm_of_own_tokens", "harbor", "hand tp2 sp", {},
     "missing_all_reduce | partial_sum replicas_apart missing_average", "out_norm.gain:grad"),
    # truth: Gradients of norms of own tokens are averaged over tp where they have to be summed (gpt-neox 1259).
    ("norms_averaged_over_tokens", "harbor", "hand tp4 sp", {},
     "averaged_again | counted_twice missing_all_reduce wrong_scalar",
     "*attn_norm.gain:grad *mlp_norm.gain:grad out_norm.gain:grad"),
    # truth: Gains of norms of a rank's own heads are not summed over tp, since that is done under sp alone (Megatron-LM 7452).
    ("head_norms_without_sum", "rover", "hand tp2 bf16", {},
     "missing_all_reduce | partial_sum replicas_apart", "blocks.?.attn.[qk]_norm.gain:grad"),
    # truth: Gradients of keys and values that all ranks share are summed over tp, and then once more (AReno 496).
    ("shared_heads_summed_again", "skiff", "hand tp2", {},
     "reduced_again counted_twice | wrong_scalar", "*.[kv]_proj.*:grad *.k_norm.gain:grad"),
    # truth: Of the shared keys' layer the rows that RoPE turns are not summed over tp, and the others are (Megatron-LM 1699).
    ("turned_part_not_added", "skiff", "hand tp2", {}, "missing_all_reduce | partial_sum replicas_apart", "*.k_proj.*:grad"),
    # truth: Each parameter of one dimension, also a rank's own share of biases and gains, is taken for a copy whose gradient
    # has to be summed over tp: copies have twice theirs, shares have another rank's added (mcore-bridge 101).
    ("vectors_taken_for_copies", "harbor", "hand tp2 bf16", {},
     "reduced_again counted_twice wrong_group | wrong_scalar partial_sum", "*.bias:grad *.gain:grad"),
    # truth: Labels are smoothed by the mean over a rank's own part of the vocabulary (Megatron-LM 737, 7464).
    ("smoothing_of_own_vocabulary", "harbor", "hand tp2", {"smoothing": 0.1},
     "label_smoothing | replicas_apart part_of_one_rank", "loss:fwd"),
    # truth: Gathered logits go to the loss for cut ones, so that the softmax's denominator is summed over ranks that all have
    # all of it: the loss is larger by the logarithm of tp (Megatron-LM 7452).
    ("gathered_logits_as_a_shard", "harbor", "hand tp2", {}, "vocabulary_parallel_loss", "loss:fwd"),
    # truth: Of the logits' gradient only the rank that has the target has its part, the others zeros (ms-swift 9947).
    ("gradient_of_owner_alone", "harbor", "hand tp4", {},
     "collective_without_backward | partial_sum other_input part_of_one_rank no_gradient missing_all_reduce",
     "head:bwd output:bwd"),
    # truth: Row-parallel weights are initialised by the width of a rank's own shard: too large by the root of tp
    # (Megatron-Bridge 5840).
    ("fan_of_own_shard", "harbor", "hand tp2", {},
     "init_scale_of_shard | init_scale wrong_scalar", "*.o_proj.weight:init *.down_proj.weight:init"),
    # truth: A column layer takes local tensors by to_local(), whose gradient is not summed over tp (torchtitan 1805).
    ("local_tensors_used", "mosaic", "dtensor tp2", {},
     "missing_all_reduce collective_without_backward | partial_sum replicas_apart",
     "blocks.1.ff:bwd blocks.1.ff.up:bwd blocks.1.ln*"),
    # truth: Branches are added without Granite's residual multiplier of 0.5 (larql 276).
    ("residual_multiplier_left_out", "granite", "dtensor tp2", {},
     "residual_scale | residual wrong_scalar tensor_added", "model.layers.0*"),
    # truth: Gradients are divided by all ranks and not by those with other samples: by tp once too often (torchtune 2420).
    ("scaled_by_world", "rover", "hand dp2 tp2 bf16", {}, "averaged_again | counted_twice wrong_scalar", "*:grad"),
    # truth: The squares of shared keys' and values' gradients are counted once for each rank of tp (ROCm TransformerEngine 715).
    ("shared_heads_counted_by_each", "skiff", "hand tp2", UPDATE, "norm_counts_twice | norm_leaves_out", "grad_norm:clip"),
    # truth: One layer's gradient is overwritten and not accumulated, and is that of the last of three micro-batches
    # (TransformerEngine 2936).
    ("overwritten_in_one_layer", "harbor", "hand dp2 tp2", {"micro": 3},
     "one_micro_batch | partial_sum part_of_tokens", "*.down_proj.weight:grad"),
    # truth: The gradient of the head's input, a part on each rank, is taken for the whole and not summed (torchtitan 3412).
    ("head_gradient_not_summed", "harbor", "hand tp2 bf16", {},
     "missing_all_reduce collective_without_backward | partial_sum replicas_apart missing_reduce_scatter", "out_norm*"),
    # Ranks that share a sequence.
    # truth: The ring's backward pass takes the blocks' shares for constants (tt-metal 53216).
    ("shares_without_gradient", "harbor", "hand cp2 ring", {},
     "| no_backward partial_sum ring_attention row_statistic", "layers.2.attn*"),
    # truth: Gradients are averaged over all ranks, of which those that share a sequence have to be summed (DeepSpeed 5248, 5555).
    ("averaged_over_all_ranks", "harbor", "hand dp2 cp2 ulysses", {}, "averaged_again | counted_twice wrong_scalar", "*:grad"),
    # truth: Tokens are dealt to the ranks in turn, where mask and placement are those of contiguous parts (sglang 28463).
    ("tokens_dealt_round_robin", "harbor", "hand cp2", {},
     "zigzag_order | slices_reordered batch_order", "embed:fwd"),
    # truth: Blocks with a window attend to all earlier tokens once the sequence is cut (accelerate 4177).
    ("window_lost_in_parts", "harbor", "hand cp2 bf16", {},
     "attention_window | later_tokens causal_mask keys_masked", "layers.0.attn*"),
    # truth: The mask of labels is not cut as they are: each rank applies that of the first part (NeMo 7395).
    ("loss_mask_not_cut", "harbor", "hand cp2 zigzag", {},
     "target_count | zigzag_order labels_shifted", "loss:fwd"),
    # truth: Gradients of norms are reduced over dp and not over the ranks that share a sequence (InternLM 534).
    ("norms_left_out_of_sum", "harbor", "hand dp2 cp2 bf16", {},
     "missing_all_reduce | missing_average partial_sum replicas_apart wrong_group", "*norm.gain:grad"),
    # truth: The ring's backward pass reads the rank's own keys and values for those that came round (diffusers 14265).
    ("backward_with_own_keys", "harbor", "hand cp2 ring zigzag", {},
     "ring_attention other_input other_saved_input | partial_sum missing_reduce_scatter shards_misplaced", "layers.2.attn*"),
    # Stages of a pipeline.
    # truth: The schedule divides all of the accumulated gradient by the micro-batches after each of them (torchtitan 1733).
    ("divided_after_each_pass", "harbor", "hand pp2", {"micro": 3},
     "micro_batches_weighted | partial_sum averaged_again", "*:grad"),
    # truth: The loss is divided by the number of targets for the log, after its backward pass (torchtitan 2972).
    ("divided_for_the_log_alone", "harbor", "hand pp2", {},
     "sum_for_mean target_count | wrong_scalar loss_scale", "loss:fwd"),
    # truth: The schedule divides a loss by the micro-batches that is divided by all targets already (AReaL 1273).
    ("schedule_divides_again", "harbor", "hand pp2", {"micro": 2},
     "counted_twice target_count | averaged_again wrong_scalar micro_batches_weighted",
     "loss:fwd head:bwd"),
    # truth: The last stage's copy of the tied table was not synchronised with the first one's (Megatron-LM 299, 6747).
    ("tables_not_synchronised", "harbor", "hand pp2", {},
     "replicas_apart other_initial_values | part_of_one_rank tied_weight", "embed.weight:init"),
    # truth: Three blocks are cut for two stages with one each, and the last is on none (Megatron-LM 1304).
    ("last_block_left_out", "harbor", "hand pp2", {}, "| other_input other_tensor residual tensor_added", "layers.2* out_norm*"),
    # truth: The last stage has positions and documents of the first micro-batch for all of them (torchtitan 4098).
    ("places_of_first_micro_batch", "harbor", "hand pp2", {"micro": 3, **PACKED},
     "document_boundaries input_of_other_micro_batch first_sample_alone | attention_across_documents later_documents"
     "positions rope_positions causal_mask keys_masked later_tokens", "layers.2.attn*"),
    # Ranks that share samples.
    # truth: The last micro-batch's gradient is added after the all-reduce, and is a rank's own (DeepSpeed 7985).
    ("last_micro_batch_after_reduce", "quarry", "zero dp2 bf16", {"micro": 2},
     "missing_average missing_all_reduce | replicas_apart partial_sum one_micro_batch micro_batches_weighted", "*:grad"),
    # truth: The schedule is stepped once for each process, so that the second step has three quarters of the rate in place of
    # two (accelerate 2926).
    ("schedule_steps_for_each_process", "quarry", "ddp dp2", {"warmup": 4, **TWICE},
     "other_learning_rate update_scaled | wrong_scalar", "*:new@2"),
    # truth: FSDP2's divisor is set to 1 on the root alone: parameters outside of the blocks have the sum (pytorch 155903).
    ("factor_of_root_alone", "quarry", "fsdp2 dp2", {},
     "sum_for_mean reduced_again | counted_twice wrong_scalar", "wte.weight:grad wpe.weight:grad norm_f.*:grad"),
    # truth: Each rank clips its own gradients, which are averaged after that (mindcv 603).
    ("clipped_before_reduce", "quarry", "zero dp2", UPDATE,
     "missing_average average_after_use norm_of_own_shards clip_factor | missing_all_reduce replicas_apart clipped",
     "*:grad grad_norm:clip"),
    # truth: Each rank clips by the norm of the shards that FSDP2 left it (OpenDiloco 6, torchtitan 766).
    ("clipped_by_local_shards", "quarry", "fsdp2 dp2", UPDATE,
     "norm_of_own_shards | norm_leaves_out", "grad_norm:clip"),
    # truth: The loss is divided by the targets of all ranks and then averaged over them (transformers 34511).
    ("not_times_processes", "quarry", "ddp dp2 bf16", {"micro": 2},
     "averaged_again | counted_twice wrong_scalar target_count", "loss:fwd *:bwd"),
    # truth: Each rank divides by the targets of its own micro-batches, and ranks are averaged (transformers 34242).
    ("targets_of_own_rank", "quarry", "ddp dp3 bf16", {"micro": 2},
     "mean_of_means | target_count reduced_again", "loss:fwd *:bwd"),
    # truth: The optimizer keeps no weights in fp32: they are rounded to bf16 after the step (apex 1728).
    ("no_master_weights", "quarry", "fsdp2 dp2", UPDATE, "fewer_bits | low_precision", "*:new"),
    # truth: One norm's gain and bias are in the group that decays (Megatron-DeepSpeed 262).
    ("one_norm_decays", "mosaic", "ddp dp2 bf16", UPDATE,
     "weight_decay | decay_of_ranks_apart", "emb_ln.*:new"),
    # truth: Gradients of the experts are summed over the ranks and all others averaged (pytorch 160285).
    ("experts_summed_over_ranks", "qwen3moe", "ddp dp2", {},
     "reduced_again sum_for_mean | counted_twice wrong_scalar", "*.experts.*:grad"),
    # truth: RoPE's scaling is set in the configuration after the model was built, and has no effect (Soup 793).
    ("yarn_set_after_building", "yarn", "ddp dp2 bf16", {},
     "rope_settings positions | rope_turn softmax_scale wrong_scalar later_tokens",
     "model.rotary_emb* model.layers.0.self_attn*"),
    # truth: The last eight rows of the table, of tokens that were added, repeat the one before them (swiss-ai Megatron-LM 115).
    ("rows_repeat_the_last", "quarry", "fsdp2 dp2 bf16", {},
     "slices_repeated | block_not_written other_initial_values", "wte.weight:init"),
    # The loss, the batch and the mask.
    # truth: Three micro-batches are divided by the four that are configured, as at the end of an epoch (transformers 38872).
    ("divided_by_configured_steps", "quarry", "alone", {"micro": 3},
     "target_count | wrong_scalar averaged_again micro_batches_weighted",
     "loss:fwd *:bwd"),
    # truth: The loss is the sum over chunks of 16 tokens of their means (NeMo Automodel 3803).
    ("chunk_means_added", "vesper", "alone", {}, "mean_of_means reduced_again | sum_for_mean target_count", "loss:fwd"),
    # truth: The token that ends an answer is also the padding's, and is ignored as a target (transformers 23530).
    ("end_taken_for_padding", "quarry", "alone", {}, "target_count | labels_shifted", "loss:fwd"),
    # truth: The z-loss is also taken of tokens whose labels are ignored (arcee DAM 16).
    ("z_loss_of_ignored", "rover", "alone", {"loss_term": 0.01}, "loss_term | target_count constant_added", "loss:fwd"),
    # truth: Logits are divided by the sampling's temperature of 0.7 before the loss (tinker-cloud 26).
    ("temperature_left_on", "mosaic", "alone bf16", {}, "logits_scale | wrong_scalar softmax_scale", "loss:fwd"),
    # truth: Labels are copied from the ids, so that the prompt is learnt too (neuronx-distributed-training 22).
    ("prompt_is_learnt", "qwen3", "alone", {}, "target_count | labels_shifted keys_masked", "loss:fwd"),
    # truth: The mask of padding, on the left, is not given to attention (diffusers 8886).
    ("padding_attended", "quarry", "alone", LEFT,
     "keys_masked document_boundaries | causal_mask later_tokens",
     "layers.0.attn*"),
    # truth: A mask that is true where attention is forbidden is read the other way: tokens see later ones alone
    # (transformers 38094).
    ("mask_read_the_other_way", "quarry", "alone bf16", {},
     "keys_masked causal_mask | document_boundaries later_tokens slices_reordered",
     "layers.0.attn*"),
    # The model.
    # truth: One plus the norm's weight is rounded to bf16 (Liger-Kernel 1462).
    ("one_added_in_bf16", "gemma2", "alone", {}, "fewer_bits low_precision | norm_gain", "model.layers.0.input_layernorm:fwd"),
    # truth: The converter has added one to the norms' weights, and the model adds it again (mold 1078).
    ("one_added_twice", "gemma2", "alone", {},
     "norm_gain | norm_statistic", "model.layers.0.input_layernorm:fwd"),
    # truth: The flags of blocks without RoPE are read as those of blocks with it (transformers 43756).
    ("rope_flags_inverted", "smollm3", "alone bf16", {},
     "rope_turn | positions rope_settings later_tokens", "model.layers.0.self_attn*"),
    # truth: RoPE's frequencies are rounded to bf16 before they are multiplied by the positions (transformers 29496).
    ("frequencies_in_bf16", "harbor", "alone", {},
     "fewer_bits low_precision | rope_* later_tokens small_change", "layers.0.attn*"),
    # truth: The shares of the chosen experts are not normalised to add up to one (torchtitan 1448).
    ("top_shares_not_normalised", "qwen3moe", "alone", {},
     "routing_weights | row_statistic wrong_scalar other_input norm_gain", "model.layers.0.mlp*"),
    # truth: The experts' shares are gathered without a gradient, so that the router has none (NeMo Automodel 2995).
    ("router_detached", "qwen3moe", "alone", {},
     "no_gradient no_backward collective_without_backward | partial_sum", "model.layers.2.mlp* *.gate.weight:grad"),
    # Checkpoints and the optimizer.
    # truth: The biases of queries and keys are in the order of RoPE by neighbours, and the weights by halves
    # (compressed-tensors 679).
    ("bias_in_other_order", "harbor", "alone", {},
     "rope_pairing dimension_flattened | slices_reordered", "layers.?.attn.[qk]_proj.bias:init"),
    # truth: The checkpoint has the weights in bf16, from which the resumed run goes on (OpenTau 185).
    ("saved_in_bf16", "vesper", "alone", {"resume": "before", **UPDATE}, "fewer_bits | low_precision", "*:init"),
    # truth: The schedule steps once more when it is loaded: the second step has three quarters of the rate in place of two
    # (InternEvo 351).
    ("schedule_steps_on_load", "quarry", "alone", {"resume": "between", "warmup": 4, **TWICE},
     "other_learning_rate update_scaled | wrong_scalar adam_step_counter", "*:new@2"),
    # truth: The warm-up begins at a rate of 0, so that the first step changes no weight (verl 3674).
    ("warmup_from_zero", "mosaic", "alone", {"warmup": 4, **UPDATE},
     "no_update other_learning_rate update_scaled | wrong_scalar", "*:new"),
    # truth: Adam's counter is increased for each parameter and not for each step, so that only the first one's moments are
    # corrected rightly (flashlight 143).
    ("counter_of_parameters", "quarry", "alone", UPDATE,
     "adam_step_counter | update_scaled other_learning_rate", "*:new"),
]


def case(name, model, bug, where, options, *truth, other=None):
    kind = Stranger2 if model in MODELS2 or model in HUGGING_FACE2 else Stranger
    return kind(name, model, bug, where, options, *truth, other=other)


def right():
    for other, model, where, options in RIGHT:
        yield case("-".join(["blind3-right", model, *where.split(), *options, other or "as-it-is"]), model, None, where, options,
                   other=other)


def broken():
    for bug, model, where, options, causes, first in BROKEN:
        good, partly = (tuple(part.split()) for part in (causes + " |").split(" |")[:2])
        yield case("-".join(["blind3", model, *where.split(), bug]), model, bug, where, options, good, partly, tuple(first.split()))


CASES = [*right(), *broken()]
