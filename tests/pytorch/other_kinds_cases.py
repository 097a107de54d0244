# SPDX-License-Identifier: Apache-2.0
"""Runs of the programs of other_kinds.py and reports.py, right and with mistakes that users of DDP and of parallel layers report."""

import dataclasses

from cases import TOLERANCE, Case
from further_kinds import PROGRAMS as FURTHER_KINDS
from further_kinds_cases import BROKEN as FURTHER_BROKEN
from more_kinds import PROGRAMS as MORE_KINDS
from more_kinds_cases import BROKEN as MORE_BROKEN
from other_kinds import PROGRAMS as OTHER_KINDS
from reports import PROGRAMS as REPORTS

PROGRAMS = {**OTHER_KINDS, **REPORTS, **MORE_KINDS, **FURTHER_KINDS}

# program, ranks, fault, causes (" |": partly right from there), where the first wrong tensor is
BROKEN = [
    # Each rank's samples are contrasted with its own alone (solo-learn 253).
    ("towers", 2, "negatives_of_own_rank", "| sum_for_mean mean_of_means", "loss:fwd"),
    # all_gather without a gradient for other ranks' features: half of each, as the ranks' gradients are averaged.
    ("towers", 2, "features_of_others_detached", "averaged_again partial_sum counted_twice", "text.3:bwd image.3:bwd"),
    # Each rank divides by its own number of targets.
    ("masked", 2, "own_number_of_targets", "mean_of_means", "loss:fwd"),
    # model.module(..) in place of model(..): DDP reduces nothing.
    ("masked", 2, "module_within_called", "missing_average", "*:grad"),
    # No sampler: each rank has all samples.
    ("masked", 2, "whole_batch_on_each_rank", "same_samples", "word:fwd"),
    ("masked", 2, "second_term_halved", "averaged_again wrong_scalar", "loss:fwd"),
    ("masked", 2, "clipped_element_by_element", "clipped", "*:new *:m"),
    # The learning rate times the number of ranks.
    ("convolutions", 2, "rate_times_ranks", "update_scaled other_learning_rate", "*:new"),
    ("convolutions", 2, "decay_left_out", "weight_decay", "*:m *:new"),
    ("convolutions", 3, "samples_in_turn", "samples_dealt_out batch_order", "stem:fwd"),
    ("recurrent", 2, "state_not_carried", "other_input |", "cells:fwd@2"),
    ("recurrent", 2, "labels_not_shifted", "other_labels labels_shifted", "loss:fwd"),
    ("recurrent", 2, "schedule_twice_a_step", "update_scaled other_learning_rate", "*:new@2"),
    ("vision", 2, "input_gradient_not_summed", "missing_all_reduce", "blocks.1*:bwd"),
    ("vision", 4, "packed_weight_cut_as_one", "packed_cut_as_one", "*.qkv.weight:init"),
    # Each rank's heads use their columns of a table that all have, and gradients are not summed.
    ("vision", 2, "relative_places_of_own_heads", "missing_all_reduce", "*.near.weight:grad"),
    # Norms and biases decay: too little for the rule in a weight, and plain in what the next step computes.
    ("vision", 2, "vectors_decay", "weight_decay", "*:new *@2"),
    ("pipeline", 2, "gradients_in_other_order", "slices_reordered input_of_other_micro_batch batch_order", "layers.1.*"),
    ("pipeline", 2, "first_gradient_sent_again", "input_of_other_micro_batch slices_repeated", "layers.1.*"),
    # BatchNorm2d in place of SyncBatchNorm.
    ("images", 3, "statistics_of_own_rank", "statistic_of_own_samples", "1:fwd"),
    # pos_weight=: the gradients of some samples are three times as large, which is no number of ranks.
    ("recommender", 2, "positives_weighted", "samples_weighted", "loss:fwd"),
    # The mean over a rank's own part of the classes.
    ("faces", 2, "smoothing_of_own_classes", "missing_all_reduce label_smoothing", "loss:fwd"),
    # Convolutions of a strip pad with zeros where a neighbour's rows belong.
    ("field", 4, "edges_not_exchanged", "halo_missing", "layers.0:fwd"),
    ("norms_of_weights", 2, "sum_for_mean", "sum_for_mean wrong_scalar", "loss:fwd 4:bwd"),
    # Padding is attended to, counts in the mean, or is what is pooled (the last place, not the last token).
    ("encoder", 2, "attention_without_padding_mask", "keys_masked |", "layers.0*"),
    ("encoder", 2, "mean_over_padding", "tokens_pooled", "pool:fwd"),
    ("encoder", 2, "last_place_pooled", "tokens_pooled", "pool:fwd"),
    ("encoder", 2, "smoothing_left_out", "label_smoothing |", "loss:fwd"),
    # One rank's scaler found an infinity and skipped the step.
    ("encoder", 2, "one_rank_skips_its_step", "no_update", "*:new"),
    # T5's bias of relative places: each rank takes the first heads' columns.
    ("translator", 2, "bias_of_first_heads", " |", "encode.o:fwd"),
    ("translator", 2, "t5_scale_left_out", "wrong_scalar logits_scale", "output:fwd"),
    # clip_grad_norm_ within the loop over micro-batches ends a step, for the capture too.
    ("decoder", 2, "clipped_each_micro_batch", "one_micro_batch", "word:fwd"),
    ("decoder", 2, "head_untied_by_copy", "tied_weight", "word.weight:grad"),
    ("decoder", 2, "noise_of_each_rank", "replicas_apart |", "*:grad"),
    ("preferences", 2, "answers_exchanged", "batch_order slices_reordered |", "word:fwd"),
    ("preferences", 2, "log_probabilities_not_shifted", "labels_shifted |", "loss:fwd"),
    ("preferences", 2, "prompt_counted", "target_count |", "head:bwd loss:fwd"),
    ("preferences", 2, "mean_for_sum", "sum_for_mean samples_weighted", "loss:fwd"),
    ("preferences", 2, "beta_left_out", "samples_weighted wrong_scalar", "loss:fwd"),
    # Rewards are normalised by each rank; a sum over tokens by the longest answer's; a ratio's limit, beyond which tokens
    # have no gradient, is left out.
    ("rewards", 2, "advantages_of_own_rank", "samples_weighted", "loss:fwd"),
    ("rewards", 2, "longest_for_own_length", "target_count wrong_scalar", "loss:fwd"),
    ("rewards", 2, "ratio_not_limited", " |", "loss:fwd"),
    ("adapters", 2, "low_rank_not_summed", "missing_all_reduce", "b:fwd"),
    ("adapters", 2, "scale_by_rank_alone", "residual_scale |", "out:fwd"),
    ("adapters", 2, "base_not_frozen", "frozen_trained", "base.weight:*"),
    ("denoiser", 2, "noise_alike_on_ranks", " |", "into:fwd"),
    ("denoiser", 2, "velocity_for_noise", " |", "loss:fwd"),
    ("denoiser", 2, "time_as_a_fraction", "other_input |", "time:fwd"),
    ("tables", 2, "tables_by_rank", " |", "top:fwd"),
    ("shared", 2, "gathered_keeps_own_gradient", "missing_reduce_scatter", "[kv].*:grad [kv]:bwd"),
    ("shared", 2, "mask_of_first_part", "causal_mask | later_tokens", "o:fwd"),
    # Data have one token more than a row, which is the last one's label.
    ("shared", 2, "shifted_after_the_cut", "labels_shifted", "loss:fwd"),
    ("shared", 2, "gradients_not_summed", "missing_all_reduce", "*:grad"),
]


@dataclasses.dataclass
class OtherKind(Case):
    ranks: int = 2

    @property
    def world(self):
        return self.ranks

    @property
    def hand(self):
        return True

    def prepare(self):
        """Nothing is made once for all ranks."""

    def reference(self):
        return "other-kind", self.model

    def run_reference(self, path):
        PROGRAMS[self.model](0, 1, None, path)

    def run(self, rank, path):
        PROGRAMS[self.model](rank, self.ranks, self.bug, path)

    def against(self, anyrank, reference):
        return reference, (*TOLERANCE, *(["--common"] if self.model in ("pipeline", "tied_stages") else []))


def runs():
    for model, n in [*((m, 2) for m in PROGRAMS), ("replicas", 4), ("vision", 4), ("masked", 4), ("convolutions", 3), ("images", 3), ("field", 4)]:
        yield OtherKind(f"other-kind-right-{model}{n}", model, ranks=n)
    for model, n, bug, causes, first in [*BROKEN, *MORE_BROKEN, *FURTHER_BROKEN]:
        good, partly = (tuple(part.split()) for part in (causes + " |").split(" |")[:2])
        yield OtherKind(f"other-kind-{model}{n}-{bug}", model, bug, causes=good, partly=partly, first=tuple(first.split()), ranks=n)


CASES = [*runs()]
