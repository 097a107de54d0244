/* SPDX-License-Identifier: Apache-2.0 */
/* Causes of relations between the values: factors, single values, functions, parts of sums. */
#define ARI_CAUSE_ROWS
#include "verify/diagnose/case.h"

#define TIMES "each {name} times the reference"
#define FACTOR "every different element is the reference times {name}{fit}"
#define PRECISION \
    "{format}: every different value has a mantissa of {mantissa} bits and is within one step of the reference; "
#define ZERO "each zero where the reference is not"
#define BIAS_AXIS "a bias gradient summed over the wrong axis: it is unrelated to the reference (cosine {angle:.2f})"
#define PART                                                                                                          \
    "a part of the sum is missing: the gradient points the reference's way (cosine {angle:.2f}), its share of it is " \
    "{share:.3g}"
#define SCATTER                                                                                                 \
    "looks like a missing reduce-scatter over tp: every token has about 1/{tp} of the reference (its share is " \
    "{share:.3g}, cosine {angle:.2f}), what one of {tp} ranks contributes; "

static const ari_cause rows[] = {
    SECTION("The reference times a number"),
    {"scaled_by_stage", K(FACTOR), ARI_IDENTITY + 7, "bg", 0, IF(STAGES), 0, TIMES,
     FACTOR
     ": their gradients are the reference's, layers {levels}: each stage of a pipeline multiplies the gradient that it "
     "receives by {ratio:.4g}, as where each divides by the number of micro-batches; the last stage alone divides, "
     "once" LOOK "the loss alone is divided by the micro-batches (DeepSpeed #8152)"},
    {"divisor_of_experts", K(FACTOR), ARI_IDENTITY + 7, "g", ARI_IS_EXPERT, IF(OF_EP), IF(NEGATIVE), TIMES,
     FACTOR
     ": of all weights of experts ({experts} others looked at), and of nothing else: an expert has the tokens of "
     "all expert-parallel ranks, and its gradient is divided by the count that all others are, not by one of the "
     "ranks with its copies (edp)" LOOK "the group of the mean of experts' gradients (DeepSpeed #6545)"},
    {"latents_reduced_again", K(FACTOR), ARI_IDENTITY + 7, "g", 0, IF(BLOCKS), IF(NEGATIVE), TIMES,
     "two ratios in one tensor: rows {first_row} to {last_row}, of the {which}, are the reference times {name}{fit}, and "
     "the others are right: what column-parallel layers take is complete on every rank after their backward pass, and "
     "the key that all heads share after a sum over them; gradients of latents and key were not summed over tp once "
     "each" LOOK "sums over tp of gradients of what is whole on each rank (inclusionAI/AReno 496, Megatron 6839)"},
    {"samples_weighted", K(FACTOR), ARI_IDENTITY + 5, "b", 0, IF(ROWS), 0, TIMES,
     "some {rows} are the reference times {name}{fit}, and the others, in between, are right: these count more or less in "
     "the loss (weights of classes, of samples or of positives)" LOOK "`pos_weight=`, `weight=` of a loss"},
    {"sign_flipped", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(ONE) | IF(NEGATIVE), 0, TIMES,
     FACTOR ": the sign is flipped"},
    {"init_scale_of_shard", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_SHARDS), 0, TIMES,
     FACTOR ": initial scale from the shard's size, {fans}: fans of the full tensor over fans of the shard" LOOK
            "initialise the full tensor and cut it; Megatron: `_initialize_affine_weight`"},
    {"init_scale_of_shard", K(FACTOR), ARI_IDENTITY + 5, "i", 0, IF(SEEN) | IF(ROOT), 0, TIMES,
     FACTOR
     ": initial scale from the shard's size, sqrt({ranks}), as 1/sqrt(fan_in) gives for 1/{ranks} of the fan_in"},
    {"init_scale", K(FACTOR), ARI_IDENTITY + 5, "i", 0, 0, 0, TIMES,
     FACTOR ": another scheme, range or fan" LOOK "`std`, fan and scheme of the initialiser"},
    {"other_betas", K(FACTOR), ARI_IDENTITY + 5, "mv", 0, IF(APART), 0, TIMES,
     FACTOR ", and its copies differ: 1 less the decay rate of this moment is so many times as large on {wrong}, or "
            "their gradients were scaled on their way to the optimizer" LOOK "`betas` of all ranks and groups"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_DP) | IF(INVERSE), 0, TIMES,
     FACTOR " ({data} = {dp} ranks): averaged over {data} where the sum was wanted{as_many}" LOOK
            "DDP's mean and a loss divided by the world size; `ReduceOp.AVG` for a sum"},
    {"reduced_again", K(FACTOR), ARI_IDENTITY + 5, "g", 0, IF(OF_DP) | IF(SEEN), IF(EQUAL) | IF(APART), TIMES,
     FACTOR
     " ({data} = {dp} ranks), of which each holds a part of its own (a shard, its experts): reduced over {data} a second "
     "time, or summed where the mean was wanted{as_many}" LOOK "the divisor after a reduce-scatter, or of experts"},
    {"reduced_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_DP), 0, TIMES,
     FACTOR
     " ({data} = {dp} ranks): a value that was complete on every data-parallel rank was added over {data} (a bucket "
     "reduced a second time), or each rank divided by its own number of targets in place of the global "
     "one{as_many}" LOOK "a second `all_reduce`; a mean that became a sum"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_CP) | IF(INVERSE), 0, TIMES,
     FACTOR
     " (cp = {cp} ranks): every context-parallel rank counted the targets of whole sequences, and the counts were "
     "added over cp too; or averaged over cp where the sum was wanted{as_many}"},
    {"reduced_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_CP), 0, TIMES,
     FACTOR " (cp = {cp} ranks): targets were counted over {data} alone, so that each rank divided by those of its own "
            "positions; or a value that was complete on every context-parallel rank was added over cp{as_many}"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_TP) | IF(INVERSE), 0, TIMES,
     FACTOR " (N = {tp} ranks): averaged over tp where the sum was wanted, or divided by N before each rank added its "
            "own"},
    {"reduced_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_TP), 0, TIMES,
     FACTOR " (N = {tp} ranks): a value that was complete on every rank was summed over tp (reduced twice, or counted "
            "once per replica)"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(OF_MICRO) | IF(INVERSE), 0, TIMES,
     FACTOR " ({micro} micro-batches): averaged over the micro-batches where the sum was wanted"},
    {"dropout_without_scale", K(FACTOR), ARI_IDENTITY + 5, "fb", 0, IF(ZERO), 0, TIMES,
     FACTOR ", and {percent:.3g}% of the elements, scattered, are zero on both sides: a dropout mask without its scale "
            "1/(1-p)"},
    {"half_is_missing", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(SEEN) | IF(TWICE) | IF(INVERSE), 0, TIMES,
     FACTOR ": one of two equal contributions is missing, or a division by 2 too many"},
    {"counted_twice", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(SEEN) | IF(TWICE), 0, TIMES,
     FACTOR ": counted twice (a bucket reduced twice, a gradient accumulated over an old one)"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, "g", 0, IF(SEEN) | IF(NAMED) | IF(COUNT) | IF(INVERSE), 0, TIMES,
     FACTOR ": averaged over all of these where the sum was wanted, or once more"},
    {"sum_for_mean", K(FACTOR), ARI_IDENTITY + 5, "f", ARI_IS_LOSS, IF(SEEN) | IF(NAMED), 0, TIMES,
     FACTOR ": a sum where the mean was wanted, or the other way round" LOOK "`reduction=\"sum\"` against `\"mean\"`"},
    {"sum_for_mean", K(FACTOR), ARI_IDENTITY + 5, "^f", 0, IF(SEEN) | IF(NAMED), 0, TIMES,
     FACTOR ": a sum where the mean was wanted, or the other way round, or what was complete was added again"},
    {"loss_scale", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(POWER), 0, TIMES,
     FACTOR ": a loss scale that was not divided out, or once too often" LOOK "`GradScaler.unscale_`"},
    {"scale_by_root", K(FACTOR), ARI_IDENTITY + 5, "^g", 0, IF(ROOT), 0, TIMES,
     FACTOR ": a scale by the square root of a size (a softmax scale, a fan, a number of ranks)" LOOK
            "`1/sqrt(d)` applied twice or with another d; fan of an initialiser"},
    {"mean_over_tokens", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(TOKENS) | IF(INVERSE), 0, TIMES,
     FACTOR ": the number of {what}: a mean over tokens that was taken twice, or where the sum was wanted (or {tokens} "
            "ranks)"},
    {"sum_over_tokens", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(TOKENS), 0, TIMES,
     FACTOR ": the number of {what}: a sum over tokens where the mean was wanted (or {tokens} ranks)"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, "g", 0, IF(COUNT) | IF(INVERSE) | IF(EVERYWHERE), IF(LONE), TIMES,
     FACTOR ": averaged over {n} ranks or micro-batches where the sum was wanted, or divided by their number twice (a "
            "mean in place of a sum over {mesh})"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(COUNT) | IF(INVERSE) | IF(LONE), 0, TIMES,
     FACTOR ": divided by {n} too often: by the number of micro-batches twice, or once where the sum was wanted"},
    {"reduced_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(COUNT) | IF(LONE), IF(INVERSE), TIMES,
     FACTOR ": a sum over {n} micro-batches where the mean was wanted, or the same was added {n} times"},
    {"averaged_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(COUNT) | IF(INVERSE) | IF(EQUAL), 0, TIMES,
     FACTOR
     ": the ranks' copies are equal, so that it was reduced, and divided by {n} once more (by hand beside DDP or "
     "FSDP, which take the mean, or where the sum was wanted)"},
    {"missing_all_reduce", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(COUNT) | IF(INVERSE), IF(LONE), TIMES,
     FACTOR ": looks like a missing all-reduce over {over} of {n} equal parts, or a mean over {n} ranks in place of "
            "the sum (divided by N before each rank added its own)" LOOK
            "`dist.all_reduce` after a row-parallel forward and a column-parallel input gradient; DDP hooks; Megatron: "
            "`reduce_from_tensor_model_parallel_region`, `finalize_model_grads`"},
    {"reduced_again", K(FACTOR), ARI_IDENTITY + 5, "g", 0, IF(COUNT) | IF(EVERYWHERE), 0, TIMES,
     FACTOR ": a sum over {n} ranks or micro-batches where the mean was wanted (dp), or each divided by its own number "
            "of targets in place of the global one"},
    {"reduced_again", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(COUNT), 0, TIMES,
     FACTOR ": a value complete on each of {n} ranks was added over {over} (an all-reduce too many, or counted once "
            "per replica)"},
    {"clip_factor", K(FACTOR), ARI_IDENTITY + 5, "g", 0, IF(INVERSE) | IF(EVERYWHERE), 0, TIMES,
     FACTOR ": the gradient-clipping factor is in it (clipped on one side, or by another norm), or another divisor of "
            "the loss" LOOK "`clip_grad_norm_` on one side, or by another norm"},
    {"divisor_of_other_count", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(FRACTION), 0, TIMES,
     FACTOR ": a divisor that counts others (targets, tokens, samples of one rank or micro-batch in place of all)" LOOK
            "the count that the loss is divided by: padding, ignored labels, an uneven last batch"},
    {"wrong_scalar", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, IF(EVERYWHERE), 0, TIMES,
     FACTOR ": one wrong scalar for the whole pass (the loss's divisor, a number of tokens)"},
    {"routes_of_second_pass", K(FACTOR), ARI_IDENTITY + 5, "g", ARI_IS_EXPERT, IF(RECOMPUTED), 0, TIMES,
     FACTOR ": with recomputation the tokens of an expert and their weights are those of a second forward pass, which "
            "has to route as the first did" LOOK
            "`router_jitter_noise` and dropout before the router under recomputation; routes that are not kept"},
    {"wrong_scalar", K(FACTOR), ARI_IDENTITY + 5, ANY, 0, 0, 0, TIMES,
     FACTOR
     ": one wrong scalar (a divisor, a learning rate, a clipping factor, the softmax scale, a number of tokens), "
     "not wrong data"},
    ALWAYS(K(FACTOR), ANY, IF(HIDDEN) | IF(TWICE) | IF(INVERSE), 0, "; or one of two equal contributions is missing"),
    ALWAYS(K(FACTOR), ANY, IF(HIDDEN) | IF(TWICE), IF(INVERSE), "; or counted twice"),
    ALWAYS(K(FACTOR), ANY, IF(EVERYWHERE), 0, "; {asked} other tensors looked at have the same factor"),
    ALWAYS(K(FACTOR), ANY, IF(ALONE), 0, "; {asked} other tensors looked at do not have it"),
    SECTION("A number for each rank, slice or shard"),
    {"scaled_by_rank", K(RANK_FACTORS), ARI_TRACE - 2, ANY, 0, 0, 0, "each rank's a constant times the reference",
     "each rank has the reference times a constant of its own, from {low} to {high}: each rank divided, clipped or "
     "scaled by its own norm, count or size of a shard in place of the group's"},
    {"scaled_by_rank", K(SHARD_FACTORS), ARI_IDENTITY + 3, ANY, 0, 0, 0, "each shard a constant times the reference",
     "each of {shards} shards of the {axes} has a factor of its own:{factors}; each rank divided, clipped or scaled by "
     "its own count, norm or size in place of the group's"},
    {"gain_twice_or_missing", K(SLICE_FACTORS), ARI_SHAPE + 7, ANY, 0, IF(FEATURES), 0, "",
     "each {axis} is scaled by a factor of its own, from {low} to {high}, and not otherwise changed: a gain (norm "
     "weight) that was applied twice, or left out, or a scale of another tensor"},
    {"row_statistic", K(SLICE_FACTORS), ARI_SHAPE + 5, ANY, 0, IF(ROWS), 0, "",
     "each of {wrong} {axes} is scaled by a factor of its own, from {low} to {high}, and not otherwise changed: a "
     "per-row statistic is wrong (a variance, a mean square, a denominator), as when it includes padded lanes or "
     "covers the shard alone"},
    {"row_statistic", K(SLICE_FACTORS), ARI_SHAPE + 7, ANY, 0, 0, 0, "",
     "each {axis} is scaled by a factor of its own, from {low} to {high}, and not otherwise changed: a statistic of "
     "each {axis} is wrong (a variance, a mean square, a denominator, a weight of samples)"},
    {"statistic_of_one_shard", K(ROW_SHARD_FACTORS), ARI_IDENTITY + 1, ANY, 0, 0, 0,
     "each shard of each {row} a constant times the reference",
     "in each {row}, each of {shards} shards of the {columns} has a factor of its own ({low:.4g} to {high:.4g}): a "
     "statistic of the row (mean square, variance, maximum, denominator) taken over one rank's part in place of all of "
     "it"},
    {"mean_of_means", K(MEANS), ARI_IDENTITY + 3, ANY, 0, IF(AVERAGE), 0, "",
     "mean of means: what belongs to each of {parts} {of} is the reference times its own factor, from {low} to {high}, "
     "and the sum of 1/factor is {inverse}: each divided by its own number of target tokens{targets}, and the results "
     "were averaged; all must divide by T, the count of the global batch" LOOK
     "divide by the global number of target tokens; Megatron: `calculate_per_token_loss`"},
    {"sum_of_local_means", K(MEANS), ARI_IDENTITY + 3, ANY, 0, IF(SAME), 0, "",
     "sum of local means: all is the reference times {low}, and the sum of 1/factor is {inverse}: each of the {parts} "
     "{of} divided by its own number of target tokens, and the results were added; all must divide by T, the count of "
     "the global batch"},
    {"sum_of_local_means", K(MEANS), ARI_IDENTITY + 3, ANY, 0, 0, 0, "",
     "sum of local means: what belongs to each of {parts} {of} is the reference times its own factor, from {low} to "
     "{high}, and the sum of 1/factor is {inverse}: each divided by its own number of target tokens{targets}, and the "
     "results were added; all must divide by T, the count of the global batch"},
    SECTION("The loss and the norm of the gradients"),
    {"label_smoothing", K(LOSS_OPTIONS), ARI_IDENTITY + 6, ANY, 0, IF(FRACTION) | IF(LOG), 0, "",
     "computed again from the logits, the loss has label smoothing {smoothing:.4g} where the reference has "
     "{smoothing_there:.4g}, and a z-loss of {z:.4g} where that has {z_there:.4g} (0: none)" LOOK
     "`label_smoothing` of `cross_entropy`; of targets alone, or spread over the vocabulary's padding too"},
    {"label_smoothing", K(LOSS_OPTIONS), ARI_IDENTITY + 6, ANY, 0, IF(FRACTION), 0, "",
     "computed again from the logits, the loss has label smoothing {smoothing:.4g} where the reference has "
     "{smoothing_there:.4g} (0: none)"},
    {"loss_term", K(LOSS_OPTIONS), ARI_TRACE + 1, ANY, 0, IF(ALONE), 0, "",
     "the loss is off by {off:.6g}, and its gradient next to the logits is the reference's: a term of it that does not "
     "come from the logits (a penalty of weights, a router's auxiliary loss), or the loss that is reported is not the "
     "one of the backward pass" LOOK "terms that are added to the loss; what is returned or logged as the loss"},
    {"vocabulary_padding", K(LOSS_OPTIONS), ARI_IDENTITY + 6, ANY, 0, IF(PADDED), 0, "",
     "computed again from the logits, the loss has {padding} more in the softmax, whose logits are 0: rows of the head "
     "that pad the vocabulary" LOOK "padded logits: -inf"},
    {"z_loss", K(LOSS_OPTIONS), ARI_IDENTITY + 6, ANY, 0, IF(LOG) | IF(TOKENS), 0, "",
     "computed again from the logits, the loss has the z-loss of {z:.4g} of all {tokens} tokens, where the reference "
     "has that of its {targets} targets: labels to be ignored count in it"},
    {"logits_scale", K(LOSS_OPTIONS), ARI_IDENTITY + 6, ANY, 0, IF(POWER), 0, "",
     "the loss computed again from the logits times {times:.4g}, which is also what the gradients of the targets say: "
     "a temperature, or a scale of the logits, inside the loss" LOOK "a sampling temperature left on; `logit_scale`"},
    {"z_loss", K(LOSS_OPTIONS), ARI_IDENTITY + 6, ANY, 0, IF(LOG), 0, "",
     "computed again from the logits, the loss has a z-loss of {z:.4g} where the reference has one of {z_there:.4g} "
     "(0: none): the coefficient of the squared logarithm of the softmax's denominator" LOOK
     "the coefficient of lse² (PaLM), of each token before the mean; whether the printed loss includes it"},
    {"labels_shifted", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT) | IF(BLOCKS), 0, "",
     "the loss computed again from the logits: labels were shifted after the sequence was cut, by each of {ranks} "
     "ranks among its own tokens{order}, so that the last of a rank's has no target, where the reference has {targets} "
     "targets" LOOK "labels shifted by the data and by the model; `labels[..., 1:]`"},
    {"labels_shifted", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(SHIFT), 0, "",
     "the loss computed again from the logits: it is that of the ids {by:.0f} tokens on, where the reference takes the "
     "next one (labels shifted in the data and in the model, or in neither)"},
    {"zigzag_order", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(TOKENS), IF(LONE), "",
     "the labels of contiguous chunks for the tokens of a zigzag of {ranks} ranks" LOOK
     "labels cut in the same order as the tokens (balanced ring attention)"},
    {"labels_of_other_samples", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(FOREIGN), 0, "",
     "the loss computed again from the logits: each sample has the labels of the one {by:.0f} further on, and counts "
     "the tokens that are targets there (labels that were shuffled, dealt out or rolled apart from their ids)" LOOK
     "a loader that shuffles or deals out ids and labels apart, `roll` along the samples"},
    {"micro_batches_weighted", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(OF_MICRO), IF(COUNT), "",
     "micro-batches with weights of their own: of {micro} the gradients count {weights} times the reference's, and so "
     "do their terms of the loss; all must divide by T, the count of the global batch, and be added once"},
    {"ignored_labels", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(PADDED) | IF(EXCHANGED), 0, "",
     "{more} tokens count in the loss, none of which is one of the reference's {targets} targets: the mask of labels "
     "is inverted, what is to be ignored (padding, the prompt, -100) is learnt and the rest is not"},
    {"ignored_labels", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(PADDED), 0, "",
     "{more} tokens that are none of the reference's {targets} targets count in the loss{where}: labels to be ignored "
     "(padding, the prompt, -100) are not" LOOK "`ignore_index`, masks of padding and prompts"},
    {"other_labels", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(SOME), 0, "",
     "by the gradients of the logits {n} of {targets} targets have other labels, or are none in one of the runs"
     "{where}{which}" LOOK "labels that a rank's loader, roll or cut makes of its own part; those of another step"},
    {"samples_weighted", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(ROWS) | IF(IDS), 0, "",
     "labels with weights of their own: the gradient of each token is the reference's times a number from {low:.3g} to "
     "{high:.3g}, one for each label (weights of classes, `weight=` of `cross_entropy`)"},
    {"samples_weighted", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(ROWS), 0, "",
     "samples with weights of their own: their gradients are the reference's times {weights}, sample by sample (weights "
     "of sequences, of ranks or of micro-batches that are others, or normalised by another count)"},
    {"ignored_labels", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(OF_CP), IF(LONE), "",
     "the loss computed again from the logits: the labels are the next ids, and which of them count each of {ranks} "
     "ranks takes from the first part of the sequence: the mask of labels is not cut as the tokens are" LOOK
     "what a context-parallel batch is cut by: the mask of the loss too"},
    {"collective_without_backward", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(OF_SHARDS), IF(LONE), "",
     "each target's gradient, computed again, is that of its label's shard of the vocabulary alone, of {ranks}: what "
     "the other ranks' logits have of the softmax is missing in it" LOOK
     "the backward pass of a cross-entropy of cut logits, on ranks without the target"},
    {"one_micro_batch", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(SAMPLES), IF(COUNT), "",
     "the loss computed again from the logits: it has the terms of the {which} {n} of {of} samples alone, divided by "
     "all {targets} targets: those of one micro-batch, where the sum over all of them is wanted" LOOK
     "`=` where `+=` belongs; `zero_grad` inside the loop"},
    {"target_count", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(COUNT) | IF(CUT), 0, "",
     "the loss computed again from the logits: {less} of the reference's {targets} targets do not count in it" LOOK
     "`num_items_in_batch`; targets, not tokens"},
    {"target_count", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(COUNT) | IF(SAMPLES), 0, "",
     "the loss computed again from the logits: it has the terms of the {which} {n} of {of} samples alone, divided by "
     "all {targets} targets; the rest do not count in it: a chunk or a batch that is not whole is left out"},
    {"divisor_of_other_count", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(COUNT) | IF(OF_MICRO), 0, "",
     "the loss computed again from the logits: the same sum divided by {n}, {others:.0f}/{micro:.0f} of the reference's "
     "{targets} targets: divided as if there were {others:.0f} micro-batches, of which there are {micro:.0f}" LOOK
     "`gradient_accumulation_steps` where the last steps of an epoch are fewer"},
    {"target_count", K(TARGETS), ARI_IDENTITY + 6, ANY, 0, IF(COUNT), 0, "",
     "the loss computed again from the logits: the same sum divided by {n}, where the reference has {targets} "
     "targets{which}"},
    {"loss_of_all_vocabularies", K(LOSS), ARI_IDENTITY, ANY, 0, IF(LOG), IF(LONE), "",
     "the reference plus log({n}) = {log:.6f}: softmax denominators added over {n} ranks that each hold the whole "
     "vocabulary" LOOK
     "denominators summed over ranks that each hold the whole vocabulary; Megatron: `vocab_parallel_cross_entropy`"},
    {"loss_without_common_maximum", K(LOSS), ARI_TRACE + 2, ANY, 0, IF(APART) | IF(OF_TP), IF(LONE) | IF(AVERAGE), "",
     "softmax maximum: the ranks do not agree on the loss (from {low:.9g} to {high:.9g}, reference {reference:.9g}); "
     "each took the exponentials relative to its own shard's maximum, but denominators add up only under one maximum "
     "(an all-reduce(max)); or each rank has the loss of its own tokens, or divided by their number" LOOK
     "`all_reduce(MAX)` of the logits before the exponentials; a loss of own samples is declared `partial` or a mean"},
    {"loss_of_own_part", K(LOSS), ARI_TRACE + 3, ANY, 0, IF(APART), IF(LONE), "",
     "the ranks do not agree on the loss (from {low:.9g} to {high:.9g}, reference {reference:.9g}): each has that of "
     "its own tokens, or divided by their number, or a mean over its own part of the vocabulary in it (label "
     "smoothing)"},
    {"divisor_of_other_count", K(LOSS), ARI_TRACE + 3, ANY, 0, IF(TOKENS), 0, "",
     "divided by {divisor} in place of the {targets} positions that have a next one: tokens without a target counted, "
     "or targets left out"},
    {"target_logit", K(LOSS), ARI_TRACE + 2, ANY, 0, IF(SEEN) | IF(TP), 0, "",
     "target logit: the loss is off by {off:.3g} ({percent:.2g}%); if the logits are right, "
     "the target's logit came from the wrong shard (check ids at a shard's edge), labels were shifted inside a shard, "
     "or the number of targets is another"},
    {"averaged_again", K(LOSS), ARI_IDENTITY + 1, ANY, 0, IF(COUNT) | IF(INVERSE) | IF(LONE), 0, "",
     "a factor of {name}: divided by {n} too often: a mean over micro-batches of what was a mean already"},
    {"reduced_again", K(LOSS), ARI_IDENTITY + 1, ANY, 0, IF(COUNT) | IF(LONE), IF(INVERSE), "",
     "a factor of {name}: a sum over {n} micro-batches where the mean was wanted"},
    {"averaged_again", K(LOSS), ARI_IDENTITY + 1, ANY, 0, IF(COUNT) | IF(INVERSE), 0, "",
     "a factor of {name}: divided by {n} too often: a mean over ranks or micro-batches of what was a mean already"},
    {"reduced_again", K(LOSS), ARI_IDENTITY + 1, ANY, 0, IF(COUNT), 0, "",
     "a factor of {name}: a sum over {n} ranks or micro-batches where the mean was wanted"},
    {"divisor_of_other_count", K(LOSS), ARI_IDENTITY + 1, ANY, 0, IF(FRACTION), 0, "",
     "a factor of {name}: a divisor that counts others (the targets of one rank or micro-batch in place of all, or the "
     "other way round)"},
    {"sign_flipped", K(LOSS), ARI_IDENTITY + 1, ANY, 0, IF(ONE), 0, "", "a factor of {name}: the sign is flipped"},
    {"wrong_scalar", K(LOSS), ARI_IDENTITY + 1, ANY, 0, IF(NAMED), 0, "", "a factor of {name}: one wrong scalar"},
    {"unknown", K(LOSS), ARI_STATISTIC, ANY, 0, 0, 0, "",
     "no known trace: the loss is off by {off:.3g} ({percent:.2g}%); if the logits are right, some target's logit came "
     "from elsewhere (labels shifted, ids at a shard's edge), denominators were added without a common maximum, or the "
     "number of targets is another"},
    {"norm_of_own_gradients", K(NORM), ARI_IDENTITY + 5, ANY, 0, IF(SAME), 0, "",
     "this is the norm of the gradients of its own dump, {low}, which differ from the reference's already: the norm "
     "itself is computed right"},
    {"norm_of_own_stages", K(NORM), ARI_TRACE + 2, ANY, 0, IF(APART) | IF(STAGES), 0, "",
     "each pipeline rank clips by the norm of its own stages: the ranks' norms differ (from {low} to {high}), and the "
     "pipeline's squares add up to the reference's, {reference} (a parameter of two stages counts in both); squares "
     "are added over pp before the root, each parameter's once" LOOK
     "sum squares over pp before the root; Megatron: `grad_stats_parallel_group`; torch: `clip_grad_norm_` over one "
     "stage's parameters"},
    {"norm_of_own_experts", K(NORM), ARI_TRACE + 4, ANY, 0, IF(OF_EP) | IF(APART), IF(LONE), "",
     "each of {n} expert-parallel ranks clips by a norm of its own, of its own experts and all else: the ranks' norms "
     "differ (from {low} to {high}), and what all have drifts apart; the squares of experts are added over the "
     "expert-parallel ranks before the root, {reference}" LOOK "ColossalAI #2192"},
    {"norm_of_own_shards", K(NORM), ARI_TRACE + 2, ANY, 0, IF(APART), IF(LONE), "",
     "each rank clips by the norm of its own shards: the ranks' norms differ (from {low} to {high}, reference "
     "{reference}; the root of the sum of a group's squares is {root}); squares are added over {over} before the "
     "root" LOOK "sum squares over tp before the root; FSDP: `model.clip_grad_norm_`"},
    {"norm_not_rooted", K(NORM), ARI_TRACE + 2, ANY, 0, IF(ROOT), 0, "",
     "the sum of all squares, {low}, in place of its root"},
    {"norm_mean_of_ranks", K(NORM), ARI_TRACE + 2, ANY, 0, IF(AVERAGE), IF(LONE), "",
     "the mean over {sharers} ranks of the norms of what each holds, {low}, in place of the root of the sum of all "
     "squares; squares are added over {over} before the root, replicated parameters once"},
    {"norm_sum_of_ranks", K(NORM), ARI_TRACE + 2, ANY, 0, IF(COUNT), IF(LONE), "",
     "the sum over {sharers} ranks of the norms of what each has, {low}, in place of the root of the sum of all "
     "squares: squares are added over {over} before the root, not norms"},
    {"clipped_each", K(NORM), ARI_TRACE + 2, ANY, 0, IF(ONE), 0, "",
     "the norm of one parameter alone, {low}: it is that of {which}, and the reference's is of all gradients "
     "together" LOOK "`clip_grad_norm_` once, of all parameters"},
    {"norm_other_order", K(NORM), ARI_TRACE + 2, ANY, 0, IF(POWER), 0, "",
     "a norm of another order: {low} is {which}; the reference is the root of the sum of their squares" LOOK
     "`norm_type` of `clip_grad_norm_`, 2 on the other side"},
    {"clipped", K(NORM), ARI_TRACE + 2, ANY, 0, IF(CUT), 0, "",
     "clipped by value first: the norm is {low}, that of the reference's gradients with each element within +-{limit} "
     "(clip_grad_value_ before the norm is taken, or in place of clip_grad_norm_)" LOOK
     "`clamp`, ReLU, overflow to a format's largest value; `clip_grad_value_`"},
    {"unknown", K(NORM), ARI_TRACE + 2, ANY, 0, IF(OF_GRADIENT), 0, "",
     "the norm counts {trained} parameters that have a gradient here and none in the reference: it is {low}, the root "
     "of all squares; parameters are trained that are frozen on the other side (requires_grad), or are one with another "
     "there (a tied weight, of which two stages have a copy each)"},
    {"low_precision", K(NORM), ARI_TRACE + 2, ANY, 0, IF(FRACTION), 0, "",
     "the gradients are right and their norm is a number of bf16: it is {low}, {times:.6g} times the reference; its "
     "squares are added up in 16 bits, or it is cast" LOOK "`.float()` before squares are added"},
    {"unknown", K(NORM), ARI_TRACE + 2, ANY, 0, IF(FOREIGN), 0, "",
     "the gradients are right and their norm is not: it is {low}, {times:.6g} times the reference, and no parameter, "
     "kind of parameter or rank's part counted again or left out makes that; another norm (of clipped or scaled "
     "gradients, the largest value), or several sets"},
    {"norm_counts_twice", K(NORM), ARI_TRACE + 2, ANY, 0, IF(TWICE), 0, "",
     "the norm counts something twice: it is {low}{everywhere}, {times:.6g} times the reference, as if {which} counted "
     "{often}; what ranks share counts once; clip factor: where it is below 1, gradients are {expected:.4g} times the "
     "expected" LOOK "replicated parameters count once; Megatron: `param_is_not_tensor_parallel_duplicate`"},
    {"norm_leaves_out", K(NORM), ARI_TRACE + 2, ANY, 0, 0, IF(OF_EP), "",
     "the norm leaves something out: it is {low}{everywhere}, {times:.6g} times the reference, as if without {which}; "
     "clip factor: where it is below 1, gradients are {expected:.4g} times the expected"},
    {"norm_leaves_out", K(NORM), ARI_TRACE + 4, ANY, 0, IF(OF_EP), 0, "",
     "the norm has the experts of one of {n} expert-parallel ranks alone, experts {first} to {last}: it is {low} on "
     "every rank, and the reference's is {reference}"},
    SECTION("Rounding, formats and functions of each value"),
    {"two_exchanged", K(BITS), ARI_SHAPE + 15, ANY, 0, IF(EXCHANGED), 0, "",
     "two elements exchanged: {elements}; {others}: a write to one place, or one value from elsewhere"},
    {"bit_flipped", K(BITS), ARI_IDENTITY + 7, ANY, 0, IF(ONE), 0, "",
     "{flipped}: {bit}, of {elements}; {others}: memory or storage, not arithmetic"},
    {"few_elements", K(BITS), ARI_SHAPE + 15, ANY, 0, 0, 0, "",
     "{which}: {elements}; {others}: a write to one place, or one value from elsewhere"},
    {"unordered_sum", K(UNSTEADY), ARI_TRACE - 10, ANY, 0, 0, 0, "within rounding",
     "a sum in an order of each run's own: the largest difference is {largest:.1e} of the largest value, in no "
     "pattern, and the same layout, run again, has other bits (atomic additions of floats, what comes first is added "
     "first)" LOOK
     "`torch.use_deterministic_algorithms`, `index_add_`, `atomicAdd` of floats in backward kernels; sums in the order "
     "of arrival"},
    {"parts_rounded_first", K(ROUNDING), ARI_TRACE - 10, "f", ARI_IS_ROW_PARALLEL, IF(SAME) | IF(TP) | IF(EQUAL), 0,
     "by little",
     "rounding, which exact numerics have once: the largest difference is {largest:.1e} of the largest value, in the "
     "output of a layer whose inputs are cut over tp, and its copies are equal: each of {tp} ranks rounded its part "
     "(and weighted it, of experts) before the parts were summed" LOOK "reductions of fp32 parts"},
    {"small_change", K(ROUNDING), ARI_TRACE - 10, ANY, 0, IF(SAME), 0, "by little",
     "small, and no rounding, as exact numerics have the same bits in any order of their sums: the largest difference "
     "is {largest:.1e} of the largest value, in no pattern; a value that changed on its way (transport, memory), or "
     "sums of floats in code of one's own"},
    {"rounding", K(ROUNDING), ARI_TRACE - 10, ANY, 0, 0, 0, "within rounding",
     "rounding: the largest difference is {largest:.1e} of the largest value; sums taken in another order (a ring, "
     "atomics, another blocking), a fused multiply-add, or another exp or rsqrt"},
    ALWAYS(K(UNSTEADY), ANY, IF(APART), 0, "; even the copies of one value differ"),
    ALWAYS(K(ROUNDING), ANY, IF(APART), 0, "; even the copies of one value differ"),
    {"fewer_bits", K(PRECISION), ARI_IDENTITY + 3, "mv", 0, 0, 0, "each of {format} precision",
     "{format}: every moment that differs has a mantissa of {mantissa} bits, and the reference's have more: the "
     "optimizer keeps its state in {bits} bits"},
    {"fewer_bits", K(PRECISION), ARI_IDENTITY + 3, ANY, 0, IF(SOME), 0, "each of {format} precision",
     "{format}: every different value has a mantissa of {mantissa} bits, and the reference's have more; a gradient "
     "that was added up or sent in {bits} bits (a reduce_dtype, a bf16 hook of DDP)" LOOK
     "casts on the way: `param_dtype`, `reduce_dtype`, communication in bf16"},
    {"fewer_bits", K(PRECISION), ARI_IDENTITY + 3, ANY, 0, IF(CUT), 0, "each of {format} precision",
     PRECISION "{nearest} of {wrong} are the reference truncated (cut off, not rounded) to {format}; stored or sent in "
               "{bits} bits on the way"},
    {"fewer_bits", K(PRECISION), ARI_IDENTITY + 3, ANY, 0, IF(SAME), 0, "each of {format} precision",
     PRECISION "{nearest} of {wrong} are exactly the reference rounded to {format}; stored or sent in {bits} bits on "
               "the way"},
    {"fewer_bits", K(PRECISION), ARI_IDENTITY + 3, ANY, 0, 0, 0, "each of {format} precision",
     PRECISION "{nearest} of {wrong} are the reference rounded: the values were computed in it too; stored or sent in "
               "{bits} bits on the way"},
    {"mask_inverted", K(FUNCTION), ARI_IDENTITY + 9, ANY, 0, IF(EXCHANGED), 0, "each 1 for 0 and 0 for 1",
     "inverted: every 1 is a 0 here and every 0 a 1: a mask of what is kept against one of what is left out"},
    {"clipped", K(FUNCTION), ARI_IDENTITY + 4, ANY, 0, IF(CUT) | IF(ZERO), 0,
     "each zero where the reference is negative",
     "clipped: all {wrong} different elements are negative in the reference and zero here (a ReLU, or an unsigned "
     "format)"},
    {"clipped", K(FUNCTION), ARI_IDENTITY + 4, ANY, 0, IF(CUT), 0, "each at a bound",
     "clipped: all {wrong} different elements lie outside [{low}, {high}] in the reference and on that bound here (a "
     "clamp, or the largest value of a format)"},
    {"quantised", K(GRID), ARI_TRACE + 4, ANY, 0, IF(ROWS), 0, "",
     "quantised: in each of {rows} rows every different value is a multiple of one step of that row's and within one "
     "step of the reference: an integer format with a scale for each row" LOOK "int8 and int4 weights"},
    {"quantised", K(GRID), ARI_TRACE + 4, ANY, 0, 0, 0, "each a multiple of {step}",
     "quantised: every different value is a multiple of {step} and within one step of the reference ({steps} steps to "
     "the largest): an integer format with one scale"},
    {"not_a_number", K(NAN), ARI_SHAPE, ANY, 0, 0, 0, "",
     "not a number in {nan} of the {wrong} different values held: memory read before it was written (a collective "
     "before its producer, a stale buffer), an overflow in the exponential or in 16 bits, or 0/0 in a row whose keys "
     "are all masked"},
    SECTION("How much of the reference there is"),
    {"bias_gradient_wrong_axis", K(BIAS_AXIS), ARI_TRACE + 5, ANY, 0, IF(LAST), 0, "",
     BIAS_AXIS ", and zero at elements {first}, {second}, ... alone, where the last tokens of the samples stand, which "
               "predict nothing: element t holds token t's sum over features"},
    {"bias_gradient_wrong_axis", K(BIAS_AXIS), ARI_TRACE + 5, ANY, 0, IF(TOKENS), 0, "",
     BIAS_AXIS
     ", and only the first {end} elements are written, one for each of the {tokens} tokens that a rank has at "
     "once: features were summed in place of tokens"},
    {"bias_gradient_wrong_axis", K(BIAS_AXIS), ARI_TRACE + 5, ANY, 0, IF(SOME), 0, "",
     BIAS_AXIS ", and zero from element {end} on, as if an element were a token"},
    {"bias_gradient_wrong_axis", K(BIAS_AXIS), ARI_TRACE + 5, ANY, 0, 0, 0, "",
     BIAS_AXIS "; a bias gradient sums dY over all tokens of all samples, one sum a feature"},
    {"input_of_second_pass", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(TWICE) | IF(FOREIGN), 0, "",
     "{share:.3g} of the reference is in the gradient (cosine {angle:.2f}), and something foreign: with recomputation "
     "its input is that of a second forward pass, which has to begin from the same input (kept, and not written over "
     "in between) and to draw the same dropout masks as the first"},
    {"input_of_other_micro_batch", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(OF_INPUT) | IF(FOREIGN), 0, "",
     "the saved input of another micro-batch: the gradient points the reference's way (cosine {angle:.2f}, its share "
     "of "
     "it is {share:.3g}), but is not a part of its sum; all micro-batches went forward before the first went back, so "
     "each needs its own saved input, and a later forward pass has overwritten it"},
    {"missing_all_reduce", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(FOREIGN) | IF(APART), IF(LONE), "",
     "the copies of this gradient differ from each other, and {share:.3g} of the reference is in them (cosine "
     "{angle:.2f}) beside something foreign: it was not added over the ranks that hold copies of it, or over another "
     "group"},
    {"input_overwritten", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(CUT), 0, "",
     "the saved input was overwritten in part: {share:.3g} of the reference is left in the gradient (cosine "
     "{angle:.2f}), about 1 - {out}/{in}, as when a reduction in place writes {out} outputs a token over the {in} "
     "inputs that the backward pass needs"},
    ALSO(ANY, IF(SAMPLES), 0, "; or one of {batch} samples counted alone"),
    {"input_overwritten", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(FOREIGN), 0, "",
     "{share:.3g} of the reference is in the gradient (cosine {angle:.2f}), and something foreign: part of the saved "
     "input or of dY was overwritten, in place or by a reused buffer"},
    ALSO(ANY, IF(MICRO), 0, ", or by the forward pass of another micro-batch before this one's backward"),
    {"other_input", K(GRADIENT), ARI_STATISTIC, ANY, 0, IF(ALL), 0, "",
     "computed from other data: the gradient is unrelated to the reference (cosine {angle:.3f}, size {size:.3g} of "
     "it); "
     "if dY and this module's dX are right, then the saved input is not: overwritten in place by a reduction or by a "
     "second forward, or released too early"},
    ALSO(ANY, IF(DP), 0, "; or its bucket was filled anew while it was being reduced"),
    {"accumulation_divided", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(OF_MICRO) | IF(INVERSE), 0, "",
     "the accumulated gradient was divided by {micro} after each of {micro} micro-batches in place of once: a share of "
     "{share:.3g} and a cosine of {angle:.2f} are those of 1/{micro} of the last micro-batch, of the one before as "
     "much less, and so on"},
    {"one_micro_batch", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(OF_MICRO), 0, "",
     PART ", about 1/{micro}: as if one of {micro} micro-batches counted; each one's gradients are added to those of "
          "the ones before, not written over them"},
    {"reduced_again", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(OF_SHARDS) | IF(SAME), 0, "",
     "more than the sum: what is added to the reference is {share:.3g} of it and points its way, as what all ranks but "
     "the one that has the share (ZeRO) contribute: a bucket that is reduced a second time"},
    {"missing_reduce_scatter", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(OF_SHARDS), IF(LONE), "",
     PART "; each rank updates a share of this parameter (ZeRO), whose gradient was not added over the ranks that hold "
          "copies of it, or over another group; or samples or micro-batches were left out"},
    {"one_sample", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(SAMPLES), 0, "",
     PART ", about 1/{batch}: as if one of {batch} samples counted; leading dimensions not flattened, or the last "
          "micro-batch alone"},
    {"missing_all_reduce", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(COUNT), IF(LONE), "",
     PART ", about 1/{ranks}: what one of {ranks} ranks contributes; a reduction is missing"},
    {"partial_sum", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(HIDDEN), IF(LONE), "",
     PART ": of the ranks, samples, micro-batches or uses of a tied weight some are left out (not reduced over {mesh}, "
          "leading dimensions not flattened, overwritten in place of added)"},
    {"partial_sum", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, IF(BATCH), 0, "",
     PART " (one of {batch} samples is about {sample:.3g}): leading dimensions not flattened, or tokens, a micro-batch "
          "or one of two uses of a tied weight left out"},
    {"partial_sum", K(GRADIENT), ARI_STATISTIC + 5, ANY, 0, 0, 0, "",
     PART ": tokens, a micro-batch or one of two uses of a tied weight are left out"},
    ALWAYS(K(GRADIENT), ANY, IF(PERHAPS), 0,
           "; or, as it is also about 1 - {out}/{in}, outputs written over a saved input"),
    ALWAYS(
        K(GRADIENT), ANY, IF(TWICE), IF(FOREIGN),
        "; or, where its input is recomputed, the second forward pass began from another input or drew other dropout "
        "masks"),
    {"reduction_operator", K(EXTREME), ARI_STATISTIC + 9, ANY, 0, 0, IF(LONE), "",
     "the {which} of {n} ranks' parts in place of their sum, an all-reduce by {op}: no element is beyond the mean of the "
     "reference's {n} parts on the other side" LOOK "`ReduceOp`"},
    {"unknown", K(SHARE), ARI_LAST_RESORT, "fb", 0, IF(EQUAL), IF(LONE), "",
     "no known trace: its share of the reference is {share:.3g}, and all ranks have the same"},
    {"counted_twice", K(SHARE), ARI_STATISTIC + 6, ANY, 0, IF(TWICE), 0, "",
     "a contribution counted twice: the difference is {share:.3g} of the reference and orthogonal to the rest: "
     "{contributes} was added once more"},
    {"one_sample", K(ACCUMULATED), ARI_IDENTITY + 3, ANY, 0, IF(SAMPLES), 0, "",
     "the first sample of each rank's micro-batch alone, computed again from the reference's values: leading dimensions "
     "are not flattened" LOOK "`x.reshape(-1, n)` before a product over tokens"},
    {"one_micro_batch", K(ACCUMULATED), ARI_IDENTITY + 3, ANY, 0, IF(ONE), 0, "",
     "the {which} micro-batch's gradient alone: of {micro} micro-batches' contributions, computed again from the "
     "reference's values, {weights} are in it, in the order in which they went back; each one's gradients are added to "
     "those of the ones before, not written over them, and reduced once all are there"},
    {"accumulation_divided", K(ACCUMULATED), ARI_IDENTITY + 3, ANY, 0, IF(INVERSE), 0, "",
     "the accumulated gradient was divided by {micro} after each of {micro} micro-batches in place of once: of their "
     "contributions, computed again from the reference's values, {weights} are in it, in the order in which they went "
     "back" LOOK
     "`grad /= n` inside the loop over micro-batches; a divisor applied by every call of a pipeline schedule"},
    {"reduced_again", K(ACCUMULATED), ARI_IDENTITY + 3, ANY, 0, IF(POWER), IF(LONE), "",
     "the accumulated gradient was summed over {ranks} ranks after each of {micro} micro-batches in place of once, after "
     "the last: of their contributions, computed again from the reference's values, {weights} are in it, in the order in "
     "which they went back" LOOK "`no_sync`"},
    {"micro_batches_weighted", K(ACCUMULATED), ARI_IDENTITY + 3, ANY, 0, 0, 0, "",
     "micro-batches with weights of their own: of the contributions of {micro}, computed again from the reference's "
     "values, {weights} are in the gradient, in the order in which they went back; all must divide by T, the count of "
     "the global batch, and be added once"},
    {"no_gradient", K(UNGIVEN), ARI_SHAPE + 5, ANY, 0, 0, 0, "",
     "a part of what this module computes got no gradient: {outputs} of {weight}'s are zero here and not in the "
     "reference, others are there, and what they give to this gradient is missing (detached, as the keys of a packed "
     "q|k|v, or not used)"},
    {"one_micro_batch", K(SHARE), ARI_STATISTIC + 7, ANY, 0, IF(OF_MICRO), 0, "",
     "one micro-batch alone: cosine with the reference {angle:.2f}, its share of it {share:.3g}, about 1/{micro}, and "
     "what is missing is orthogonal to it: each of {micro} micro-batches' gradients are added to those of the ones "
     "before, not written over them"},
    {"partial_sum", K(SHARE), ARI_STATISTIC + 7, ANY, 0, 0, 0, "",
     "a partial sum: cosine with the reference {angle:.2f}, its share of it {share:.3g}, and what is missing is "
     "orthogonal to it: {contributes}"},
    ALSO("g", IF(LONE), 0,
         "; a gradient of one sample or micro-batch alone, or one that lacks some (leading dimensions not flattened, "
         "overwritten in place of added)"),
    ALSO("g", 0, IF(LONE),
         "; a gradient of one rank's tokens or heads that was not reduced over {mesh}, or of one sample or "
         "micro-batch alone (leading dimensions not flattened, overwritten in place of added)"),
    {NULL, K(NOTHING), 0, "g", ARI_IS_EXPERT, 0, IF(LONE), "",
     "; an expert's is added over the ranks with copies of it alone (edp)"},
    ALSO("b", IF(GATHERED), IF(LONE),
         "; its weights are gathered for the backward pass (ZeRO-3): here perhaps in part, a rank's own share alone"),
    ALSO("b", 0, IF(GATHERED) | IF(LONE),
         "; a missing all-reduce (or reduce-scatter) over tp of a column-parallel layer's input gradient"),
    ALSO("^gb", 0, IF(LONE), "; a missing all-reduce (or reduce-scatter) over tp of a row-parallel layer's output"),
    {"missing_reduce_scatter", K(SCATTER), ARI_STATISTIC + 6, "b", 0, IF(OF_CP), IF(LONE), "",
     "looks like a missing reduce-scatter over the ring of {cp} context-parallel ranks: gradients of keys and values "
     "are sums over the queries of all of them, and here {share:.3g} of them is left (cosine {angle:.2f}), what the "
     "own queries contribute" LOOK
     "`reduce_scatter_tensor` under sequence parallelism; Megatron: `reduce_scatter_to_sequence_parallel_region`"},
    {"missing_reduce_scatter", K(SCATTER), ARI_STATISTIC + 6, ANY, 0, 0, IF(LONE), "",
     SCATTER "a row-parallel output, or the input gradient of a column-parallel layer, is partial until the ranks' are "
             "added and each keeps its positions (sequence parallelism)"},
    {"routes_of_second_pass", K(NOISE), ARI_STATISTIC - 4, "g", ARI_IS_EXPERT, IF(RECOMPUTED), 0, "",
     "the difference is {size:.1e} of the values, spread evenly: with recomputation the tokens of an expert and their "
     "weights are those of a second forward pass, which has to route as the first did; or rounding of low precision"},
    {"low_precision", K(NOISE), ARI_STATISTIC - 4, ANY, 0, 0, 0, "",
     "rounding of low precision, perhaps: the difference is {size:.1e} of the values, spread evenly and unrelated to "
     "them, the size that {arithmetic} arithmetic leaves; exact numerics have none, of native ones a sensitivity file "
     "says what is honest" LOOK "autocast, TF32, bf16 weights"},
};

ARI_CAUSES(numbers)
