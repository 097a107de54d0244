# SPDX-License-Identifier: Apache-2.0
"""Runs of strangers_run.py, right ones and broken ones, as they come up in other people's programs.

They were written, with what is true of each, before `anyrank verify` had seen one of them: what it says of these is the
measure of what it says to a stranger.
"""

import dataclasses
import pathlib
import re

import torch

import strangers_mistakes  # noqa: F401 (registers its functions)
import strangers_models  # noqa: F401
from strangers_run import HUGGING_FACE, run

TOLERANCE = ("--rtol", "1e-4", "--atol", "1e-5")
OF_MANY = ("micro", "sp", "zigzag", "ring")  # options that say how, and not what, a run computes


@dataclasses.dataclass
class Stranger:
    """One run, as Case of cases.py is one; begin: what runs it, of_many: options that one rank has not."""
    trial, begin, of_many = "stranger", staticmethod(run), OF_MANY
    name: str
    model: str
    bug: str
    where: str
    options: dict
    causes: tuple = ()
    partly: tuple = ()
    first: tuple = ()
    other: str = None  # how a right run is otherwise written

    def __post_init__(self):
        self.way, *rest = self.where.split()
        self.ranks = {dim: int(n) for dim, n in re.findall(r"\b(dp|cp|tp)(\d)", self.where)}
        self.dtype = "bf16" if "bf16" in rest else "fp32"
        self.options = {**self.options, **{word: True for word in ("sp", "zigzag", "ring") if word in rest}}

    @property
    def hand(self):
        return self.model not in HUGGING_FACE

    @property
    def world(self):
        n = 1
        for size in self.ranks.values():
            n *= size
        return n

    def prepare(self):
        import torch._dynamo  # what optimizers import when they are first made
        import torch.distributed.fsdp
        import torch.distributed.tensor.parallel
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        if not self.hand:
            import transformers
            getattr(transformers, f"{HUGGING_FACE[self.model][0]}ForCausalLM")

    def on_one(self):
        """Under FSDP2 a model's own parameters are in bf16; one rank needs FSDP2 for the same numbers."""
        options = {k: v for k, v in self.options.items() if k not in self.of_many}
        way = "fsdp2" if self.way == "fsdp2" and self.dtype == "bf16" else "alone"
        return way, {**options, "dtype": self.dtype}

    def reference(self):
        way, options = self.on_one()
        return self.trial, self.model, way, repr(sorted(options.items()))

    def run_reference(self, path):
        way, options = self.on_one()
        self.begin(self.model, path, way=way, **options)
        if self.dtype == "bf16":
            self.measure(path, lambda folder: self.begin(self.model, folder, way=way, **options))

    @staticmethod
    def measure(path, once):
        """What rounding may change, as anyrank.compare_ranks measures it."""
        from anyrank import rounding
        draws = [pathlib.Path(f"{path}-{seed}") for seed in range(rounding.DRAWS)]
        for seed, draw in enumerate(draws):
            with rounding.Noise(seed):
                once(draw)
        rounding.allowances(path, draws, f"{path}-allowed.safetensors")

    def run(self, rank, path):
        self.begin(self.model, path, rank, way=self.way, fault=self.bug or self.other, dtype=self.dtype, **self.ranks,
                   **self.options)

    def against(self, _anyrank, reference):
        return reference, ("--sensitivity", f"{reference}-allowed.safetensors") if self.dtype == "bf16" else TOLERANCE


UPDATE = {"update": True}
TWICE = {"update": True, "steps": 2}
RIGHT = [
    ("mosaic", "alone", {"micro": 4, **TWICE}), ("mosaic", "ddp dp2", {"micro": 2, **UPDATE}), ("mosaic", "ddp dp4", TWICE),
    ("mosaic", "fsdp2 dp2", UPDATE), ("mosaic", "dtensor tp2", {}), ("mosaic", "fsdp2 dp2 tp2", {}),
    ("mosaic", "ddp dp2 bf16", UPDATE), ("mosaic", "alone", {"frozen": ("emb",), "checkpointing": True, **UPDATE}),
    ("vesper", "alone", {"packed": True, "resume": "before", "warmup": 4, **UPDATE}),
    ("vesper", "alone", {"dropout": 0.1, "checkpointing": True, "resume": "between", **TWICE}),
    ("vesper", "ddp dp2 bf16", {"packed": True}), ("vesper", "zero dp2", TWICE), ("vesper", "fsdp2 dp2", {"micro": 2, **UPDATE}),
    ("vesper", "alone bf16", {"scaled": True, **UPDATE}), ("vesper", "fsdp2 dp2 bf16", {}),
    ("rover", "hand tp2", {}), ("rover", "hand tp2 sp", {}), ("rover", "hand dp2 tp2", {"packed": True}),
    ("rover", "hand cp2", {}), ("rover", "hand cp2 zigzag", {"packed": True}), ("rover", "hand cp2 ring", {}),
    ("rover", "hand cp2 ring zigzag", {}), ("rover", "hand dp2 cp2", {}), ("rover", "hand tp2 bf16", {}),
    ("rover", "hand cp2 zigzag bf16", {}), ("rover", "fsdp2 dp2 bf16", {}), ("rover", "ddp dp2", {"loss_term": 0.01, "micro": 2}),
    ("rover", "fsdp2 dp2", {"smoothing": 0.1, **TWICE}), ("rover", "hand dp2 tp2 sp", {}),
    ("rover", "ddp dp2", {"adam": "sgd", **TWICE}),
    ("bloom", "ddp dp2", UPDATE), ("bloom", "fsdp2 dp2", {}), ("bloom", "ddp dp2 bf16", {}), ("gptj", "ddp dp2", {}),
    ("gptj", "fsdp2 dp2", UPDATE), ("granite", "fsdp2 dp2", {}), ("granite", "dtensor tp2", {}), ("granite", "ddp dp2 bf16", {}),
    ("cohere", "ddp dp4", {}), ("cohere", "dtensor tp2", {}), ("cohere", "ddp dp2 bf16", UPDATE),
]
# bug, model, where, options, causes (a cause after " |" is partly right), where the first different tensor has to be. A
# cause that causes.md lacks is one that it should have: the truth has no other name.
BROKEN = [
    # Ranks that share a sequence.
    # truth: Other ranks' keys and values come from a plain all-gather, through which no gradient flows back.
    # answer: the gradient of k and v lacks the other ranks' part (a reduction over cp is missing).
    ("kv_gathered_without_gradient", "rover", "hand cp2", {},
     "missing_reduce_scatter missing_all_reduce no_backward collective_without_backward | partial_sum",
     "blocks.1.attn*"),
    # truth: Each rank counts positions from 0 in its own part of the sequence.
    # answer: RoPE's positions start again at the part's beginning.
    ("positions_of_own_part", "rover", "hand cp2", {},
     "positions | later_tokens", "blocks.0.attn*"),
    # truth: Tokens are dealt in a zigzag and the causal mask is made for contiguous parts.
    # answer: the causal mask is wrong: a query sees other keys than those up to its own token.
    ("mask_of_contiguous_parts", "rover", "hand cp2 zigzag", {},
     "positions zigzag_order causal_mask | later_tokens", "blocks.0.attn*"),
    # truth: Gradients are summed over dp and not over the ranks that share a sequence.
    # answer: a missing all-reduce of the gradients over cp.
    ("reduced_over_dp_alone", "rover", "hand dp2 cp2", {},
     "missing_all_reduce | missing_average wrong_group partial_sum replicas_apart", "*:grad"),
    # truth: Gradients are averaged over cp although the loss is a share of the whole sequence's.
    # answer: divided by the ranks once too often.
    ("averaged_over_context", "rover", "hand cp2 bf16", {}, "averaged_again | counted_twice wrong_scalar", "*:grad"),
    # truth: Each rank takes the mean over its own tokens' targets, and those means are averaged.
    # answer: a mean of means: each rank divided by its own number of targets.
    ("mean_of_own_tokens", "rover", "hand cp2", {}, "mean_of_means | target_count", "loss:fwd"),
    # truth: Labels are shifted after the sequence is cut, so that each part's last token has no target.
    # answer: the targets at the ends of the parts are left out (another number of targets).
    ("shifted_after_the_cut", "rover", "hand dp2 cp2", {},
     "target_count labels_shifted | partial_sum later_tokens", "loss:fwd"),
    # truth: What the blocks of the ring give is averaged, and not weighted by their softmax denominators.
    # answer: attention's partial outputs are joined wrongly, each with a softmax of its own keys.
    ("ring_outputs_averaged", "rover", "hand cp2 ring", {},
     "ring_attention row_statistic | later_tokens", "blocks.0.attn*"),
    # truth: Of a block that came round the ring every key is allowed, those of later tokens among them.
    # answer: the causal mask is missing for the keys of other ranks.
    ("ring_sees_the_future", "rover", "hand cp2 ring zigzag", {},
     "causal_mask | later_tokens", "blocks.0.attn*"),
    # Ranks that share layers.
    # truth: The gather of the logits sums their gradient backward, which is whole on every rank.
    # answer: a gradient that was complete is summed over tp again.
    ("logits_gathered_with_sum", "rover", "hand tp2", {}, "reduced_again counted_twice | wrong_scalar", "unembed*"),
    # truth: The backward pass of the all-reduce after a row layer sums a gradient that is whole on every rank.
    # answer: a gradient that was complete is summed over tp again.
    ("all_reduce_that_sums_backward", "rover", "hand tp2 bf16", {},
     "reduced_again counted_twice | wrong_scalar", "blocks.1.ff.w2*"),
    # truth: Every rank takes ALiBi's slopes of the first heads for its own.
    # answer: ALiBi's slopes of rank 1's heads are those of other heads.
    ("slopes_of_first_heads", "mosaic", "dtensor tp2", {},
     "alibi_slopes | slices_reordered later_tokens", "blocks.0.attn*"),
    # truth: The one head of keys and values has the gradient of a rank's own query heads alone.
    # answer: a missing all-reduce over tp of the gradient of the shared keys and values.
    ("kv_gradient_of_own_heads", "mosaic", "dtensor tp2", {},
     "missing_all_reduce | partial_sum replicas_apart", "blocks.1.attn.wkv* blocks.1.attn:bwd"),
    # truth: Every rank loads the first KV head's rows of wk and wv.
    # answer: rank 1 has rank 0's shard of wk and wv.
    ("first_kv_head_on_all", "rover", "hand tp2", {},
     "shards_misplaced slices_repeated shards_seeded_alike wrong_kv_head",
     "blocks.?.attn.w[kv].weight:init"),
    # truth: The sequence is dealt token by token to the ranks, and gathered as if its parts were contiguous.
    # answer: the tokens are in another order: dealt in turn rather than cut in halves.
    ("cut_in_turn", "rover", "hand tp2 sp", {}, "zigzag_order | slices_reordered", "blocks.0.attn_norm:fwd"),
    # truth: The gradient of the embedding, whole on every rank of tp, is summed over tp.
    # answer: summed again over tp: twice the gradient.
    ("embedding_gradient_summed", "rover", "hand dp2 tp2", {},
     "reduced_again counted_twice | wrong_scalar", "tok_emb.weight:grad"),
    # truth: Gradients are reduced over all ranks, which mixes the shards of different ranks of tp.
    # answer: the gradient of a shard is mixed with that of another: reduced over the wrong group.
    ("averaged_over_world", "rover", "hand dp2 tp2", {"packed": True},
     "wrong_group | shards_misplaced slices_repeated other_saved_input", "*.weight:grad"),
    # truth: The gradient of the gains of q's and k's norms is averaged over tp where the heads' parts have to be
    #     added.
    # answer: averaged for summed: half of the gradient.
    ("gain_gradients_averaged", "rover", "hand tp2", {},
     "averaged_again | counted_twice missing_all_reduce wrong_scalar", "blocks.?.attn.[qk]_norm.gain:grad"),
    # truth: The gradient of the norm before the MLP is of a rank's own tokens and is not summed over tp.
    # answer: a missing all-reduce over tp.
    ("ff_norm_of_own_tokens", "rover", "hand tp2 sp bf16", {},
     "missing_all_reduce | partial_sum replicas_apart", "blocks.1.ff_norm.gain:grad"),
    # Ranks that share samples.
    # truth: DDP got process groups of two of the four ranks, so that the pairs are never averaged with each other.
    # answer: gradients are not averaged over the other pairs of ranks.
    ("ddp_in_pairs", "mosaic", "ddp dp4", {},
     "missing_average wrong_group | missing_all_reduce replicas_apart partial_sum", "*:grad"),
    # truth: The ranks of a tp group have different samples, since the loader goes by the global rank.
    # answer: the samples of ranks 1 and 2 are exchanged: the ranks of a tp group have other ids than each other.
    ("data_by_global_rank", "mosaic", "fsdp2 dp2 tp2", {},
     "world_rank_in_group batch_order shards_misplaced samples_of_global_rank | replicas_apart same_samples slices_repeated",
     "tok_emb:fwd"),
    # truth: The blocks are wrapped and the model is not, so that embedding, last norm and head are never averaged.
    # answer: a missing average over dp of the parameters outside of the blocks.
    ("root_not_wrapped", "mosaic", "fsdp2 dp2", {}, "missing_average | missing_all_reduce replicas_apart", "*:grad"),
    # truth: After the sharded update all parameters are broadcast from rank 0, also those that rank 1 has updated.
    # answer: those of rank 1 have no update (are not gathered from their owner).
    ("broadcast_from_first", "vesper", "zero dp2", UPDATE, "no_update", "*:new"),
    # truth: The updated parameters are sent in bf16.
    # answer: the weights are rounded to bf16 after the update.
    ("sent_in_bf16", "vesper", "zero dp2", UPDATE, "fewer_bits", "*:new"),
    # truth: The norm of the gradients is the sum of the ranks' norms, and not the root of the sum of their squares.
    # answer: the norm is combined wrongly from the ranks' own.
    ("norms_of_ranks_added", "vesper", "zero dp2", UPDATE,
     "norm_of_own_shards | norm_counts_twice", "grad_norm:clip"),
    # truth: Gradients that DDP has averaged are divided by the number of ranks again.
    # answer: averaged again: half of the gradient.
    ("averaged_by_hand_too", "mosaic", "ddp dp2 bf16", UPDATE,
     "averaged_again | counted_twice wrong_scalar", "*:grad"),
    # truth: Only the last micro-batch's loss is divided by the number of micro-batches.
    # answer: the first micro-batch counts twice.
    ("only_last_divided", "rover", "ddp dp2", {"micro": 2},
     "micro_batches_weighted counted_twice | mean_of_means reduced_again partial_sum wrong_scalar",
     "loss:fwd unembed:bwd"),
    # The loss, the batch and the mask.
    # truth: Ignored labels are 0, the id of padding, which the loss does not ignore.
    # answer: ignored labels count as targets.
    ("padding_counts", "vesper", "ddp dp2 bf16", {}, "target_count | labels_shifted", "loss:fwd"),
    # truth: Each sample has the labels of the next one.
    # answer: the labels belong to other samples.
    ("labels_of_next_sample", "bloom", "ddp dp2 bf16", {},
     "labels_of_other_samples batch_order | labels_shifted other_input target_count tokens_shifted", "loss:fwd lm_head:bwd"),
    # truth: The mask of labels is inverted: prompt and padding are learnt and the answer is ignored.
    # answer: other labels count: those that should be ignored.
    ("answers_ignored", "mosaic", "fsdp2 dp2", {}, "target_count keys_masked", "loss:fwd"),
    # truth: The z-loss of the reference is left out.
    # answer: the loss lacks a term of the logits' log-sum-exp; nothing in the model differs.
    ("z_loss_left_out", "rover", "alone", {"loss_term": 0.01}, "loss_term", "loss:fwd"),
    # truth: The loss smooths labels by 0.1.
    # answer: the loss has another definition: label smoothing.
    ("smoothing_left_on", "mosaic", "ddp dp2", {}, "label_smoothing", "loss:fwd"),
    # truth: The logits' log-softmax is taken in bf16.
    # answer: the loss has the bits of bf16.
    ("loss_of_bf16_logits", "rover", "alone bf16", {}, "fewer_bits low_precision", "loss:fwd unembed:bwd"),
    # truth: The loss is a mean over samples of their means, although samples have different numbers of targets.
    # answer: a mean of means.
    ("sample_means", "mosaic", "ddp dp2 bf16", {}, "mean_of_means | reduced_again", "loss:fwd unembed:bwd"),
    # truth: Packed documents see those before them.
    # answer: attention across documents.
    ("documents_not_kept_apart", "vesper", "ddp dp2", {"packed": True},
     "document_boundaries | later_documents later_tokens causal_mask",
     "layers.0.attn*"),
    # truth: Positions run on over packed documents where they have to start again at each.
    # answer: positions of the second document are wrong.
    ("positions_run_on", "vesper", "fsdp2 dp2", {"packed": True},
     "positions | later_documents later_tokens", "pos_emb:fwd"),
    # truth: Positions are clamped to 11: later tokens have the place of the twelfth.
    # answer: positions of the last tokens are wrong.
    ("places_clamped", "vesper", "ddp dp2 bf16", {}, "positions slices_repeated | later_tokens", "pos_emb:fwd"),
    # truth: The second block's window is of 7 tokens in place of 6.
    # answer: the attention window has another size.
    ("window_one_wider", "rover", "ddp dp2", {}, "attention_window | later_tokens causal_mask", "blocks.1.attn*"),
    # truth: ALiBi's slopes are those of eight heads, and the model has four.
    # answer: ALiBi's slopes are wrong.
    ("slopes_of_eight_heads", "mosaic", "alone", {}, "alibi_slopes | later_tokens", "blocks.0.attn*"),
    # truth: ALiBi's bias has the wrong sign: distant tokens count more.
    # answer: ALiBi's bias has the other sign.
    ("bias_grows_with_distance", "mosaic", "ddp dp2 bf16", {}, "alibi_slopes | later_tokens", "blocks.0.attn*"),
    # truth: The causal mask multiplies the probabilities after the softmax, so that they do not add up to 1.
    # answer: the softmax's denominator has the masked keys too.
    ("mask_after_softmax", "vesper", "alone", {},
     "attention_softmax row_statistic | causal_mask later_tokens",
     "layers.0.attn*"),
    # truth: Dropout does not divide what it keeps by 1 - p.
    # answer: 0.9 times the reference (one wrong scalar).
    ("kept_values_not_scaled", "vesper", "alone bf16", {"dropout": 0.1},
     "dropout_without_scale | wrong_scalar", "layers.0.drop:fwd"),
    # truth: Activation checkpointing computes the layer again with another dropout mask than in the forward pass.
    # answer: the backward pass has another dropout mask than the forward pass.
    ("recomputed_with_other_dropout", "vesper", "alone", {"dropout": 0.1, "checkpointing": True},
     "other_saved_input dropout_mask | other_input dropout", "layers.1*"),
    # truth: The embedding is frozen, so that reentrant checkpointing has no input with a gradient and the blocks get
    #     none.
    # answer: no gradient for the parameters of the blocks.
    ("reentrant_without_input_gradient", "mosaic", "alone", {"frozen": ("emb",), "checkpointing": True, **UPDATE},
     "no_gradient no_backward | missing_tensor", "ln_f:bwd blocks.*"),
    # The model.
    # truth: Norms are of the branch alone and not of the sum with the stream.
    # answer: the norm has another input: the branch without the stream (the residual).
    ("norm_on_the_branch", "vesper", "fsdp2 dp2", {}, "other_input residual", "layers.0.norm1:fwd"),
    # truth: DeepNorm's factor is on the branch and not on the stream.
    # answer: the factor scales the other term of the residual sum.
    ("alpha_on_the_branch", "vesper", "ddp dp2", {}, "residual_scale residual | other_input", "layers.0.norm1:fwd"),
    # truth: Norms of queries and keys come after RoPE and not before it.
    # answer: the norm's input is rotated already (order of norm and RoPE).
    ("norms_after_turning", "rover", "alone", {},
     "norm_after_rope other_input | rope_* other_point_of_step", "blocks.0.attn.[qk]_norm:fwd"),
    # truth: LayerNorm divides by torch.std, which divides by n - 1.
    # answer: the norm's statistic is wrong (by the root of 32/31).
    ("deviation_of_samples", "mosaic", "ddp dp2", {},
     "norm_statistic row_statistic | wrong_scalar norm_gain target_count",
     "emb_ln:fwd"),
    # truth: RMSNorm computes in bf16 where the reference does in fp32.
    # answer: the norm has fewer bits.
    ("norms_in_bf16", "rover", "fsdp2 dp2 bf16", {}, "fewer_bits low_precision", "*_norm:fwd"),
    # truth: The norm's statistic is computed without a gradient.
    # answer: the norm's backward pass lacks the part through its statistic.
    ("statistic_detached", "rover", "ddp dp2", {},
     "norm_statistic_detached no_backward | partial_sum norm_statistic row_statistic",
     "out_norm:bwd"),
    # truth: The residual stream is rounded to bf16 after each block.
    # answer: fewer bits in the blocks' outputs.
    ("stream_in_bf16", "mosaic", "alone", {}, "fewer_bits", "blocks.0:fwd"),
    # truth: The second block adds its branches without the factor 0.6.
    # answer: the residual's branch is not scaled.
    ("branch_scale_left_out", "rover", "ddp dp2 bf16", {},
     "residual_scale wrong_scalar residual | other_input tensor_added", "blocks.1.*:fwd"),
    # truth: RoPE's cosines and sines are rounded to bf16.
    # answer: RoPE's table has fewer bits.
    ("table_in_bf16", "rover", "alone", {}, "fewer_bits low_precision | rope_* later_tokens", "blocks.0.attn*"),
    # truth: The softmax of attention is in bf16 where the reference's is in fp32.
    # answer: fewer bits in attention, or nothing where rounding explains it.
    ("softmax_in_bf16", "rover", "ddp dp2 bf16", {}, "fewer_bits low_precision", "blocks.0.attn*"),
    # truth: Logits are capped at 30 and not at 6.
    # answer: the soft cap of the logits has another value.
    ("cap_of_thirty", "rover", "fsdp2 dp2", {}, "softcap*", "output:fwd"),
    # What is loaded.
    # truth: The biases of the norms are not in the checkpoint and stay zero.
    # answer: the norms' biases are not loaded.
    ("norm_biases_at_init", "vesper", "ddp dp2", {},
     "weight_not_loaded other_initial_values never_written block_not_written | zeros_*",
     "layers.?.norm?.bias:init"),
    # truth: The head is loaded from the embedding, although the model has one of its own.
    # answer: the head has the embedding's weight.
    ("head_from_embedding", "mosaic", "ddp dp2", {},
     "other_tensor other_module | tied_weight other_initial_values", "unembed.weight:init"),
    # truth: The table of positions was not loaded and has fresh random values.
    # answer: other initial values: not loaded.
    ("positions_at_init", "vesper", "ddp dp2 bf16", {},
     "weight_not_loaded other_initial_values | init_scale", "pos_emb.weight:init"),
    # truth: After a checkpoint is loaded the head is a copy of the embedding and no longer the same parameter.
    # answer: the tied weight is two weights; the embedding's gradient lacks the head's part.
    ("untied_after_loading", "vesper", "alone", {"resume": "before", **UPDATE},
     "tied_weight embedding_sum counted_twice | partial_sum missing_tensor", "tok_emb.weight:grad lm_head*"),
    # truth: The random state is not loaded with the checkpoint, so that the second step has the first one's masks.
    # answer: another dropout mask in step 2.
    ("random_state_not_loaded", "vesper", "alone", {"dropout": 0.1, "resume": "between", **TWICE},
     "dropout_mask | dropout", "layers.0.drop:fwd@2"),
    # truth: The optimizer's state is lost where the run resumes.
    # answer: the moments start from zero again.
    ("moments_lost", "vesper", "alone", {"resume": "before", **UPDATE},
     "optimizer_state_lost | partial_sum adam_step_counter", "*:[nmv]*"),
    # truth: wq and wo have each other's moments, since parameters have another order in the saved state.
    # answer: the moments belong to other parameters.
    ("moments_of_other_parameters", "mosaic", "alone", {"resume": "before", **UPDATE},
     "optimizer_state_misplaced other_tensor other_module | update_misplaced", "*.attn.w[qo].weight:[nmv]*"),
    # truth: The step counter of Adam starts at 0 again where the run resumes; the moments do not.
    # answer: Adam's step counter.
    ("steps_forgotten", "rover", "alone", {"resume": "before", **UPDATE},
     "adam_step_counter | other_learning_rate update_scaled", "*:new"),
    # truth: The schedule starts again at its first learning rate where the run resumes.
    # answer: another learning rate: half of it.
    ("schedule_not_loaded", "mosaic", "alone", {"resume": "before", **UPDATE, "warmup": 4},
     "other_learning_rate update_scaled | wrong_scalar", "*:new"),
    # The optimizer.
    # truth: The schedule is stepped before the optimizer: the learning rate is the next step's.
    # answer: another learning rate: twice.
    ("schedule_a_step_ahead", "rover", "ddp dp2", {**UPDATE, "warmup": 4},
     "other_learning_rate update_scaled | wrong_scalar", "*:new"),
    # truth: AdamW multiplies weights by 1 - decay and not by 1 - rate times decay.
    # answer: weight decay is too strong.
    ("decay_not_times_rate", "vesper", "alone", UPDATE, "weight_decay", "*:new"),
    # truth: Adam's epsilon is 1e-4 inside of the root and not 1e-8 outside.
    # answer: Adam's epsilon.
    ("epsilon_inside_root", "rover", "ddp dp2", UPDATE, "adam_eps | update_scaled", "*:new"),
    # truth: Adam does not correct its moments' bias.
    # answer: the bias correction is missing.
    ("bias_not_corrected", "mosaic", "fsdp2 dp2", UPDATE,
     "adam_step_counter | update_scaled", "*:new"),
    # truth: SGD has Nesterov's momentum where the reference has plain momentum.
    # answer: another optimizer: the update is 1.9 times that of plain momentum.
    ("nesterov", "rover", "ddp dp2", {"adam": "sgd", **UPDATE},
     "nesterov | update_scaled other_learning_rate", "*:new"),
    # truth: The head was made anew after the optimizer was, which updates the old one.
    # answer: the head's weight has no update.
    ("head_made_anew", "rover", "ddp dp2", UPDATE, "no_update | missing_tensor", "unembed.weight:[nmv]*"),
    # truth: Adam's moments are kept in bf16.
    # answer: the moments have fewer bits.
    ("moments_in_bf16", "mosaic", "ddp dp2 bf16", UPDATE, "fewer_bits", "*:m *:v"),
    # truth: Gradients are divided by the loss scale twice.
    # answer: the gradient is 1/1024 of the reference: the loss scale.
    ("unscaled_twice", "vesper", "alone bf16", {"scaled": True, **UPDATE}, "loss_scale | wrong_scalar", "*:grad"),
    # truth: Gradients are clipped while the loss scale is still in them.
    # answer: the gradient is 1024 times the reference at the clip: the loss scale.
    ("clipped_before_unscaled", "vesper", "alone", {"scaled": True, **UPDATE},
     "loss_scale | wrong_scalar clip_factor", "*:grad"),
    # truth: Each parameter's gradient is clipped by its own norm, and not all by the norm of all.
    # answer: clipped by the wrong norm.
    ("each_parameter_clipped", "mosaic", "alone bf16", UPDATE,
     "clipped_each norm_leaves_out clip_factor | norm_of_own_shards update_scaled", "grad_norm:clip *:m"),
    # truth: Gradients of biases and norms are not zeroed after the step.
    # answer: the gradient of the last step is still in it.
    ("one_group_zeroed", "vesper", "alone", {**TWICE}, "gradient_not_zeroed", "*:grad@2"),
    # Hugging Face's models.
    # truth: ALiBi's slopes of six heads are one geometric series, and not BLOOM's two.
    # answer: ALiBi's slopes are wrong.
    ("plain_slopes_for_all", "bloom", "ddp dp2", {}, "alibi_slopes | later_tokens", "transformer.h.0.self_attention*"),
    # truth: The norm after the embedding is skipped.
    # answer: the norm is missing.
    ("embedding_norm_skipped", "bloom", "fsdp2 dp2", {},
     "norm_missing | other_module other_tensor norm_gain norm_statistic row_statistic",
     "transformer.word_embeddings_layernorm:fwd"),
    # truth: The residual is taken after the norm and not before it.
    # answer: the residual is the norm's output.
    ("stream_taken_after_norm", "bloom", "ddp dp2 bf16", {},
     "residual tensor_added | other_input", "transformer.h.0.self_attention:fwd transformer.h.0.mlp:fwd"),
    # truth: RoPE turns 4 features of a head and not 8.
    # answer: RoPE is on fewer features, with other frequencies.
    ("fewer_features_turned", "gptj", "ddp dp2", {},
     "rope_settings positions | rope_turn later_tokens", "transformer.h.0.attn*"),
    # truth: The MLP's input is detached, so that the norm gets attention's gradient alone.
    # answer: the MLP's gradient does not flow back.
    ("mlp_reads_detached", "gptj", "fsdp2 dp2", {},
     "no_backward | partial_sum no_gradient missing_tensor residual",
     "transformer.h.1.mlp* transformer.h.1.ln_1*"),
    # truth: Scores are divided by the root of the head size where the model has a factor of its own.
    # answer: the softmax scale.
    ("scale_by_root_of_heads", "granite", "ddp dp2 bf16", {},
     "softmax_scale | later_tokens", "model.layers.0.self_attn*"),
    # truth: Logits are multiplied by the scaling that they have to be divided by.
    # answer: the logits are 4 times the reference.
    ("logits_multiplied", "granite", "dtensor tp2", {}, "logits_scale wrong_scalar", "output:fwd"),
    # truth: The embedding is not multiplied by 3.
    # answer: one wrong scalar on the embedding, a third.
    ("embedding_multiplier_left_out", "granite", "fsdp2 dp2", {},
     "residual_scale wrong_scalar | residual other_input tensor_added", "model.layers.0.*:fwd"),
    # truth: The norm is an RMSNorm: the mean is not subtracted.
    # answer: the norm's mean.
    ("mean_not_taken_off", "cohere", "ddp dp2 bf16", {},
     "norm_statistic | row_statistic", "model.layers.0.input_layernorm:fwd"),
    # truth: RoPE pairs the halves of a head and not neighbours.
    # answer: RoPE's pairing.
    ("halves_turned", "cohere", "dtensor tp2", {}, "rope_pairing | later_tokens", "model.layers.0.self_attn*"),
    # truth: Logits are not multiplied by the model's 0.5.
    # answer: one wrong scalar: the logits are twice the reference.
    ("logit_scale_left_out", "cohere", "ddp dp4", {}, "logits_scale wrong_scalar | counted_twice", "output:fwd"),
]


def name_of(model, where, what):
    return "-".join(["stranger", model, *where.split(), what])


def right():
    for model, where, options in RIGHT:
        what = "-".join([*(f"{key}" if value is True else f"{key}{value}" if isinstance(value, (int, str)) else key
                           for key, value in options.items()), "right"])
        yield Stranger(name_of(model, where, what), model, None, where, options)


def broken():
    for bug, model, where, options, causes, first in BROKEN:
        right_ones, partly = (tuple(part.split()) for part in (causes + " |").split(" |")[:2])
        yield Stranger(name_of(model, where, bug), model, bug, where, options, right_ones, partly, tuple(first.split()))


CASES = [*right(), *broken()]
