# SPDX-License-Identifier: Apache-2.0
"""Runs of experts_run.py, whose mistakes are those that threads of training libraries tell of mixtures of experts on
several ranks, by one who had not seen `anyrank verify`'s code, nor its tests.

The truths were written before one run was judged, and so were the tensors that differ first. As BROKEN of
blind2_cases.py: bug, model, where, options, causes, where the first wrong tensor is.
"""

import dataclasses
import re

import torch
import torch.utils.checkpoint  # noqa: F401 (no two ranks import it)

from experts_run import run
from strangers_cases import TOLERANCE, TWICE, UPDATE, Stranger

ROWS = ("--ignore", "*.experts:?wd*")  # each rank's rows of its own experts are in an order of its own


@dataclasses.dataclass
class Expert(Stranger):
    """other: how a right run is otherwise written."""
    other: str = None
    hand = True

    def __post_init__(self):
        super().__post_init__()
        self.ranks = {dim: int(n) for dim, n in re.findall(r"\b(dp|ep|tp)(\d)", self.where)}

    def prepare(self):
        import torch._dynamo  # noqa: F401 (what optimizers import when they are first made)
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])

    def on_one(self):
        return {**{k: v for k, v in self.options.items() if k not in ("mean", "checkpointing")}, "dtype": self.dtype}

    def reference(self):
        return "experts", self.model, repr(sorted(self.on_one().items()))

    def run_reference(self, path):
        options = self.on_one()
        run(self.model, path, **options)
        if self.dtype == "bf16":
            self.measure(path, lambda folder: run(self.model, folder, **options))

    def run(self, rank, path):
        run(self.model, path, rank, fault=self.bug or self.other, dtype=self.dtype, **self.ranks, **self.options)

    def against(self, anyrank, reference):
        ref, rule = super().against(anyrank, reference)
        return ref, rule if self.model == "mix" else (*rule, *ROWS)


# other way to write it, model, where, options
RIGHT = [
    ("masks", "tern", "dp4", {}),  # no rows are sent: all ranks have all experts, and masks
    (None, "tern", "ep4", {"mean": True, "checkpointing": True, **UPDATE}), (None, "mega", "ep2 tp2", TWICE),
    ("slots_from_the_last", "mega", "dp2 ep2", UPDATE), (None, "mix", "dp2 ep2", UPDATE), (None, "tern", "dp2 ep2 bf16", {}),
    (None, "deep", "dp2 ep2", TWICE), (None, "deep", "ep4", {}),
]
BROKEN = [
    # truth: Experts' gradients, which are of the rows of all ranks of the expert group, are divided by the number of their
    # copies and not by that of all ranks: ep times too large, all else is right (DeepSpeed 6545, pytorch 160285).
    ("experts_averaged_over_copies", "tern", "ep4", {"mean": True},
     "sum_for_mean target_count | reduced_again counted_twice wrong_scalar",
     "layers.1.moe.experts.w?:grad"),
    # truth: Experts' gradients are summed over the expert group, whose ranks have other experts, and not over the ranks with
    # copies of the same: the wrong group.
    ("experts_summed_over_ep", "tern", "dp2 ep2", {},
     "wrong_group missing_all_reduce | partial_sum replicas_apart",
     "layers.1.moe.experts.w?:grad"),
    # truth: The router is taken for a part of the experts, and its gradient is not summed over the expert group: each rank
    # has that of its own tokens (Megatron-LM 599).
    ("router_of_own_tokens", "mega", "ep4", {},
     "missing_all_reduce | partial_sum replicas_apart",
     "decoder.layers.1.mlp.router.weight:grad"),
    # truth: Rows that were sorted by expert are sent back without being put into the order of their senders again, so
    # that tokens get what experts made of other tokens.
    ("sent_back_by_expert", "tern", "ep2", {},
     "expert_rows_misplaced slices_reordered",
     "layers.0.moe:fwd"),
    # truth: Offsets of a rank's experts among its rows are one too high: the first row of each but the first expert is
    # computed by the expert before.
    ("offsets_off_by_one", "mega", "ep2 tp2", {},
     "expert_rows_misplaced",
     "decoder.layers.0.mlp:fwd"),
    # truth: Weights multiply what experts get and not what they make (as Llama 4 has it, torchtitan's score_before_experts).
    ("weights_before_experts", "tern", "dp2 ep2 bf16", {},
     "routing_weights",
     "layers.0.moe:fwd"),
    # truth: The weights of the chosen experts are not normalised to a sum of 1 where experts are shared out (norm_topk_prob).
    ("weights_not_normalised", "mix", "ep2", {},
     "routing_weights",
     "model.layers.0.mlp.gate:fwd"),
    # truth: The shared expert, which each rank has, is inside of the sum over the expert group: counted ep times.
    ("shared_expert_on_each_rank", "mix", "dp2 ep2", {},
     "counted_twice tensor_added",
     "model.layers.0.mlp:fwd"),
    # truth: The gradient of the experts' input is not summed over the expert group: each rank has what its own experts give,
    # and all that is before lacks the rest (transformers 48205).
    ("gradient_of_own_experts", "mix", "ep4", {},
     "missing_all_reduce collective_without_backward | partial_sum replicas_apart",
     "model.layers.1.mlp:bwd model.layers.1.post_attention_layernorm*"),
    # truth: Weights are sent to other ranks by an all-to-all without a gradient: the router learns from the auxiliary loss
    # alone (Automodel 2995).
    ("weights_sent_without_gradient", "mega", "ep2", {},
     "router_backward | partial_sum no_gradient",
     "decoder.layers.1.mlp.router*"),
    # truth: The auxiliary loss is divided by a rank's own tokens where all ranks' are due: four times as large on four ranks
    # (Megatron-LM 5047, 3672).
    ("auxiliary_by_own_tokens", "mega", "dp2 ep2", {},
     "balancing_loss | wrong_scalar",
     "decoder.layers.1.mlp.router*"),
    # truth: Each rank cuts an expert's rows off at a capacity of its own tokens: the last of those that chose an expert which
    # is much asked for lose it.
    ("capacity_of_own_rank", "mega", "ep4", {},
     "experts_left_out | block_not_written",
     "decoder.layers.0.mlp:fwd"),
    # truth: Gradients of an expert to which no token went are not written: what another layer left in that memory stays there
    # (grouped_gemm 36, pytorch 172439).
    ("idle_expert_keeps_workspace", "tern", "ep2", {},
     "never_written stale_value | other_tensor filled",
     "layers.0.moe.experts.w?:grad"),
    # truth: Each rank of the expert group takes the norm of its own experts and what is shared alone, and clips by that
    # (ColossalAI 2192, Automodel 3816).
    ("norm_of_own_experts", "tern", "ep2", UPDATE,
     "norm_of_own_shards",
     "grad_norm:clip"),
    # truth: Each rank's part of the experts' width gives a part of the gradient of the weights, and these are not summed over
    # tp: routers' gradients are parts, and their sum is right (torchtitan 2387, Megatron-LM 599).
    ("router_not_summed_over_tp", "mega", "ep2 tp2", {},
     "missing_all_reduce | partial_sum replicas_apart",
     "decoder.layers.1.mlp.router*"),
    # truth: Rows go to ranks as if experts were dealt round (rank i has i, i + ep, ..), and weights are cut in blocks: tokens
    # meet other experts than they chose.
    ("experts_dealt_round", "tern", "ep4", {},
     "expert_rows_misplaced shards_misplaced",
     "layers.0.moe:fwd"),
    # truth: Each rank of the expert group has the weights of the first experts: the index lacks the rank's offset.
    ("first_experts_on_each_rank", "tern", "ep2", {},
     "shards_seeded_alike slices_repeated shards_misplaced",
     "layers.0.moe.experts.w?:init"),
    # truth: The router's product is taken in bf16, so that weights are off in their third digit and some tokens choose
    # otherwise (sglang 38695).
    ("router_in_bf16", "mix", "ep2", {},
     "low_precision other_experts_chosen",
     "model.layers.0.mlp.gate:fwd"),
    # truth: Weights are sent in the order of tokens, and rows in that of experts: each row is weighted by another's weight.
    ("weights_sent_unsorted", "mega", "ep2", {},
     "expert_rows_misplaced",
     "decoder.layers.0.mlp:fwd"),
    # truth: The auxiliary loss rides on a tensor that is not used further: it has no gradient (Automodel 1408).
    ("auxiliary_result_dropped", "mega", "dp2 ep2", {},
     "balancing_loss | partial_sum",
     "decoder.layers.1.mlp.router*"),
    # Deep: written, as those above, before one of them was judged, when verify named the same mistakes of anyrank's own runs.
    # truth: Weights are gathered from the scores with the bias of the choice.
    # Deep: written, as those above, before one was judged, when verify named the same mistakes of anyrank's own runs.
    # truth: Weights are not multiplied by their factor where experts are shared out.
    ("factor_left_out", "deep", "ep2", {}, "routing_weights | wrong_scalar", "model.layers.0.mlp.gate:fwd"),
    # truth: The router applies the factor, and the layer once more.
    ("factor_twice", "deep", "ep4", {}, "routing_weights | wrong_scalar counted_twice", "model.layers.0.mlp:fwd"),
    # truth: The factor is missing in the gradient of the weights, which is written by hand.
    ("factor_not_in_gradient", "deep", "ep2", {}, "routing_weights | wrong_scalar", "model.layers.1.mlp.gate*"),
    # truth: The shared expert is multiplied by the factor of the routed ones.
    ("factor_on_shared", "deep", "dp2 ep2", {}, "counted_twice | wrong_scalar tensor_added", "model.layers.0.mlp:fwd"),
    # truth: Groups are ranked by their best score (DeepSeek-V2), not by the sum of their two best.
    ("groups_by_best", "deep", "dp2 ep2", {}, "other_experts_chosen", "model.layers.0.mlp.gate:fwd"),
    # truth: Groups do not restrict the choice.
    ("groups_not_masked", "deep", "ep2", {}, "other_experts_chosen", "model.layers.0.mlp.gate:fwd"),
    # truth: Experts of other groups are masked by 0, which is more than scores with a negative bias.
    ("masked_by_zero", "deep", "dp2 ep2", {}, "other_experts_chosen", "model.layers.0.mlp.gate:fwd"),
    # truth: Groups are of experts dealt round (i, i + 4, ..) and not of neighbours.
    ("groups_dealt_round", "deep", "ep4", {}, "other_experts_chosen", "model.layers.0.mlp.gate:fwd"),
    # truth: The bias is added to the logits before the sigmoid, where it is that of the scores.
    ("bias_before_sigmoid", "deep", "ep2", {}, "other_experts_chosen", "model.layers.0.mlp.gate:fwd"),
    # truth: Scores are a softmax where sigmoids are due: other weights, and other experts, as the bias weighs more.
    ("softmax_scores", "deep", "dp2 ep2", {}, "routing_weights other_experts_chosen", "model.layers.0.mlp.gate:fwd"),
    # truth: Scores are divided by the sum over all experts and not over those chosen.
    ("shares_of_all", "deep", "ep2", {}, "routing_weights | wrong_row_factor",
     "model.layers.0.mlp.gate:fwd"),
    # truth: The bias moves by each rank's own counts: from the second step on ranks choose other experts.
    ("counts_of_own_rank", "deep", "dp2 ep2", TWICE, "router_bias_update | other_experts_chosen", "model.layers.*.mlp.gate*"),
    # truth: Counts are summed over the expert group, and not over dp.
    ("counts_over_ep_alone", "deep", "dp2 ep2", TWICE, "router_bias_update | other_experts_chosen",
     "model.layers.*.mlp.gate*"),
    # truth: The bias moves the wrong way: experts that have many tokens get more.
    ("bias_moves_to_the_full", "deep", "ep2", TWICE, "router_bias_update | other_experts_chosen", "model.layers.*.mlp.gate*"),
]


def right():
    for other, model, where, options in RIGHT:
        name = "-".join(["experts-right", model, *where.split(), *options, other or "as-it-is"])
        yield Expert(name, model, None, where, options, other=other)


def broken():
    for bug, model, where, options, causes, first in BROKEN:
        good, partly = (tuple(part.split()) for part in (causes + " |").split(" |")[:2])
        yield Expert("-".join(["experts", model, *where.split(), bug]), model, bug, where, options, good, partly,
                     tuple(first.split()))


CASES = [*right(), *broken()]
