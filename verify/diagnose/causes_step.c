/* SPDX-License-Identifier: Apache-2.0 */
/* Causes found by comparison with the step before: gradients of another step, optimizer and update. */
#define ARI_CAUSE_ROWS
#include "verify/diagnose/case.h"

#define ZERO "each zero where the reference is not"
#define UPDATE "the update is {factor:.4g} times the expected, and otherwise unchanged: "
#define CORRECTED                                                                                                      \
    "Adam's correction of another step: the update is {factor:.4g} times the expected, as that of step {as} would be " \
    "in step {step} (sqrt(1 - beta2^t)/(1 - beta1^t))"
#define OF_SHARES ", in what differs and not in the rest: the ranks whose shares these are (ZeRO) "
#define DECAY "weight decay {what}: the difference is {part:.4g} times the weight before the step, on {wrong}"

static const ari_cause rows[] = {
    SECTION("Gradients of another step, optimizer and update"),
    {"gradient_of_last_step", K(LAST), ARI_IDENTITY + 4, ANY, 0, IF(ALL), 0, "",
     "last step's value: every different element is the gradient of step {before}{times}, and nothing of this step's: "
     "a bucket that was not filled again, was believed to be reduced already, or was copied back before its reduction "
     "had ended"},
    {"gradient_not_zeroed", K(LAST), ARI_IDENTITY + 4, ANY, 0, 0, 0, "",
     "last step's value is still in it: the gradient is {times_now}the reference plus {times_last}that of step "
     "{before}: gradients add up from step to step where they are not zeroed (zero_grad did not reach this parameter), "
     "or a bucket still held it" LOOK "`optimizer.zero_grad()`"},
    {"update_of_ranks_apart", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(SOME), IF(LONE), "",
     "each rank's update is the expected one times a factor of its own, from {factor:.4g} to {high:.4g}: each clipped "
     "by the norm of its own shards, or has a learning rate of its own"},
    {"other_point_of_step", K(UPDATE), ARI_TRACE - 1, "i", 0, IF(ONE), 0, "",
     "one step apart: what differs is moved up or down by {size:.4g} each, whatever its size, and by {decay:.3g} of "
     "itself, as Adam's first step moves weights and decay takes them down: one side's are those of before a step" LOOK
     "what a resume loads: weights saved before `optimizer.step()`, of another step than the optimizer's state"},
    {"frozen_trained", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(FOREIGN), 0, "",
     "trained, where the reference has no gradient of it and leaves it as it was: a frozen weight" LOOK
     "`requires_grad` below adapters, set before wrapping"},
    {"no_update", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(ZERO), 0, "",
     "no update: these are the weights before the step, which was left out or whose result was lost" LOOK
     "parameters in the optimizer's groups; a skipped step"},
    {"adam_step_not_synced", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(OF_STEP) | IF(APART), IF(LONE), "",
     CORRECTED ", on {wrong} and not on the others that hold it: they count their steps differently" LOOK
               "`state[\"step\"]` of each rank; parameters without gradient"},
    {"adam_step_not_synced", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(OF_STEP) | IF(OF_SHARDS), IF(LONE), "",
     CORRECTED OF_SHARES "count their steps differently" LOOK "`state[\"step\"]` of each rank"},
    {"adam_step_counter", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(OF_STEP), 0, "",
     CORRECTED ": the counter was advanced without an update, or an update was not counted" LOOK
               "`state[\"step\"]` after loading or skipping"},
    {"update_of_ranks_apart", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(OF_SHARDS), IF(LONE) | IF(OF_BEFORE) | IF(NEGATIVE),
     "", "the update is {factor:.4g} times the expected" OF_SHARES "clip by norms or have learning rates of their own"},
    {"update_sign", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(NEGATIVE), 0, "",
     UPDATE "its sign is wrong: the step goes up the gradient" LOOK "the sign of the step; `maximize`"},
    {"adam_not_corrected", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(OF_BEFORE), 0, "",
     UPDATE "Adam's {moments} not corrected, {rule} with t = {step}" LOOK "`bias_correction` of fused optimizers"},
    {"update_of_ranks_apart", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(APART), IF(LONE), "",
     "the update is {factor:.4g} times the expected on {wrong}, and not on the others that hold it: each clipped by "
     "the norm of its own shards, or has a learning rate of its own"},
    {"nesterov", K(UPDATE), ARI_TRACE - 1, ANY, 0, IF(TWICE), 0, "",
     UPDATE "Nesterov's momentum of {momentum:.3g} on one side alone, of which a first step is 1 + momentum times as "
            "large" LOOK "`nesterov=` of SGD"},
    {"update_scaled", K(UPDATE), ARI_TRACE - 1, ANY, 0, 0, 0, "",
     UPDATE "the clip factor, the learning rate, or a gradient that was scaled on its way to the optimizer"},
    {"adam_eps", K(EPSILON), ARI_IDENTITY, ANY, 0, IF(ROOT), 0, "",
     "another epsilon in Adam: {where} the update is the other's over sqrt(1 + {epsilon:.3g}/r^2), r {root}, so that "
     "small gradients move less: it was added inside of the root"},
    {"adam_eps", K(EPSILON), ARI_IDENTITY, ANY, 0, 0, 0, "",
     "another epsilon in Adam: {where} the update is the other's over 1 + {epsilon:.3g}/r, r {root}, so that small "
     "gradients move less" LOOK "`eps` of `Adam`; added inside or outside of the root"},
    {"clipped", K(STATE), ARI_IDENTITY + 10, ANY, 0, IF(OF_GRADIENT) | IF(CUT), 0, "",
     "the gradients are equal, and {where} the optimizer got them cut at {limit:.4g} each, which {cut} elements exceed: "
     "clipped by value, where the other side clips by the norm or not at all" LOOK "`clip_grad_value_`"},
    {"weight_decay", K(STATE), ARI_IDENTITY + 10, ANY, 0, IF(OF_WEIGHT) | IF(AVERAGE), 0, "",
     "weight decay of SGD: the gradients are equal, and the momentum is the reference's {sign} {part:.3g} times the "
     "weight before the step"},
    {"zeros_for_gradient", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_GRADIENT) | IF(ZERO), 0, "",
     "the optimizer got zeros: the gradients are equal, and here the first moment is zero (under ZeRO a share of another "
     "parameter's gradient; a flat buffer or a main_grad that was not copied before the step)"},
    {"shares_misaligned", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_GRADIENT) | IF(FOREIGN), 0, "",
     "the optimizer got another gradient: the gradients are equal, and here the first moment is not this one's (cosine "
     "{cosine:.2f}): shares of weights and of gradients that do not line up (ZeRO, a flat buffer)"},
    {"decay_in_gradient", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_WEIGHT), 0, "",
     "the gradients are equal, and the first moment is {first:.4g} times the reference's plus {decay:.3g} times the "
     "weight before the step: weight decay was added to the gradient (Adam in place of AdamW)" LOOK
     "`Adam(weight_decay=)` against `AdamW`"},
    {"update_twice", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(TWICE), 0, "",
     "the optimizer stepped twice: the moments are {first:.4g} and {second:.4g} times the expected, 1 + beta1 and 1 + "
     "beta2, as of two steps with one gradient" LOOK "`optimizer.step()` called twice, by a hook and by hand"},
    {"loss_scale", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_GRADIENT) | IF(POWER), 0, "",
     "the gradients are equal, and the optimizer saw them times {name}: Adam's moments are {first:.6g} and "
     "{second:.6g} times the reference's; a loss scale that was not divided out, or twice"},
    {"update_sign", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_GRADIENT) | IF(NEGATIVE), 0, "",
     "the gradients are equal, and the optimizer saw them times {first:.6g}: Adam's first moment has the other sign, "
     "its second {second:.6g} times the reference's; the step goes up the gradient (maximize=True, a minus too many)"},
    {"clip_factor", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_GRADIENT) | IF(OF_STEP), 0, "",
     "the gradients are equal, and the optimizer saw them times another number: Adam's moments, which have a history, "
     "differ from the reference's by {first:.4g} times the gradient and {second:.4g} times its square, and by nothing "
     "else; the clip factor (left out, applied twice, of another norm or limit)"},
    {"clip_factor", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_GRADIENT), 0, "",
     "the gradients are equal, and the optimizer saw them times {first:.6g}: Adam's moments are {first:.6g} and, its "
     "square, {second:.6g} times the reference's; the clip factor (left out, applied twice, of another norm or limit)"},
    {"optimizer_state_lost", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(LAST), 0, "",
     "the optimizer's state was lost: the gradients are equal, and here the {lost} this step's gradient alone, as if "
     "Adam began anew, where the reference's have a history (a resume without the optimizer's state, or of a part of "
     "it)" LOOK "`optimizer.load_state_dict` at a resume; shards of it that were not loaded"},
    {"optimizer_state_misplaced", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(EXCHANGED), 0, "",
     "the optimizer's state of another parameter: the gradients are equal, and the moments have the history of {other} "
     "in the reference (parameters in another order when a checkpoint was saved or loaded)"},
    {"sgd_dampening", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(AVERAGE), 0, "",
     "SGD's dampening: the gradients are equal, the momentum keeps {kept:.3g} of what it was, as in the reference, and "
     "only {taken:.3g} of what the reference adds is added: a dampening of {dampening:.3g} on one side" LOOK
     "`dampening=` of SGD"},
    {"other_betas", K(STATE), ARI_IDENTITY + 8, ANY, 0, 0, IF(OF_BEFORE) | IF(ALL), "",
     "Adam's decay rates: the gradients are equal, the first moment is {first:.6g} times the expected and the second "
     "{second:.6g} times, not the square: (1 - beta) of other rates, perhaps exchanged" LOOK "`betas=`, their order"},
    {"other_learning_rate", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(ALL), 0, "",
     "another learning rate: gradients and moments are right, and the update is {factor:.6g} times the expected, its "
     "decay as well"},
    {"weight_decay", K(STATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_BEFORE), 0, "",
     "weight decay: gradients, moments and their part of the update are right; {other_decay:.3g} of the weight was "
     "taken away in place of {decay:.3g} (lr times decay)"},
    {"muon_of_shards", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(OF_SHARDS), IF(LONE), "",
     "Muon of shards: the update is what Newton-Schulz makes of each of {parts} parts of the matrix, cut along its "
     "{along}, by itself; the reference's is of the whole, which no part's says anything about" LOOK
     "what Muon gets under tensor parallelism or FSDP: a gathered matrix, not a local shard (`tp_mode`)"},
    {"muon_norm_of_shards", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(SOME), IF(LONE), "",
     "Muon's norm of a shard: the matrix is whole, but each of {parts} parts along its {along} was divided by the norm "
     "of that part before Newton-Schulz" LOOK "the all-reduce of the squared norm before Newton-Schulz"},
    {"muon_shards_gram_local", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(LAST), IF(LONE), "",
     "Muon's X X^T of a shard: in the last iteration each of {parts} parts of the matrix, cut along its {along}, used "
     "its own in place of the sum" LOOK "the all-reduce of X X^T in every iteration of Newton-Schulz"},
    {"muon_packed_as_one", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(PACKED), 0, "",
     "Muon of a packed weight: its {parts} matrices (q, k and v, or gate and up) were made orthogonal as one; the "
     "reference's are by themselves" LOOK "how Muon splits fused weights: sizes, heads of a rank after tp"},
    {"muon_stale_heads", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(HEADS), 0, "",
     "Muon of a packed weight: q, k and v were cut apart in the whole matrix where those of one of {parts} ranks end" LOOK
     "the head counts by which Muon splits a fused weight: the whole matrix's or a shard's"},
    {"muon_shards_misplaced", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(EXCHANGED), IF(LONE), "",
     "Muon's shards at other places: the update is the right one's {parts} parts of the matrix, cut along its {along}, "
     "in another order" LOOK "the order of ranks in Muon's gather"},
    {"muon_padding_rows", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(PADDED), 0, "",
     "Muon's scale with padding: the update is as large as that of {padded} rows, and the matrix has {rows}; rows of "
     "zeros change nothing but this" LOOK
     "the shape by which Muon scales: no rows that align shards (Megatron-LM 6740)"},
    {"qk_clip_local", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(ROWS), IF(LONE), "",
     "QK-Clip of own logits: each row is the reference's times a number, and the ranks have other numbers: the largest "
     "logit of a head is that of all tokens" LOOK "the all-reduce(max) of logits over dp and cp (ms-swift 9901)"},
    {"muon_of_vector", K(MUON), ARI_IDENTITY + 8, ANY, 0, IF(ONE), 0, "",
     "Muon of a vector: the update is this step's gradient times one number, as Newton-Schulz of one row makes it (SGD "
     "too), and the reference's, AdamW's, is not" LOOK "Muon's group of parameters: no vectors"},
    {"decay_without_gradient", K(DECAY), ARI_TRACE + 3, ANY, 0, IF(ZERO), 0, "",
     DECAY "; the reference leaves it as it was: a parameter without gradient on any rank was taken for one whose "
           "gradient is zero" LOOK "`grad is None` against a gradient of zero"},
    {"decay_of_ranks_apart", K(DECAY), ARI_TRACE + 3, ANY, 0, IF(OF_SHARDS), IF(LONE), "",
     DECAY OF_SHARES "decay differently"},
    {"decay_of_ranks_apart", K(DECAY), ARI_TRACE + 3, ANY, 0, IF(APART), IF(LONE), "",
     DECAY " and not on the others that hold it: replicas drift apart unless each decays alike"},
    {"weight_decay", K(DECAY), ARI_TRACE + 3, ANY, 0, 0, 0, "",
     DECAY "; a parameter in another group of the optimizer, or decay that was added to the gradient"},
    {"share_off_by_one", K(SHARE_UPDATE), ARI_IDENTITY + 8, ANY, 0, IF(OF_BEFORE) | IF(SOME), 0, "",
     "{different} of {count} elements have the value before the step, bit for bit, and all others are updated: no "
     "rank's share of the optimizer has them (ZeRO: a share that begins or ends one element off, a size rounded "
     "down)" LOOK "edges of the optimizer's shares: `//` and padding of flat buffers (ZeRO, FSDP1)"},
    {"shares_misaligned", K(SHARE_UPDATE), ARI_IDENTITY + 4, ANY, 0, IF(ZERO), IF(LONE), "",
     "shares that do not line up: no rank has updated what differs, but for decay, as where the rank whose share it is "
     "(ZeRO) takes another share of the gradient, which is zero there; or that update was lost"},
    {"shares_not_gathered", K(SHARE_UPDATE), ARI_IDENTITY + 4, ANY, 0, IF(OF_BEFORE), IF(LONE), "",
     "shares that were not gathered: what differs is the weight before the step, bit for bit, on {wrong} of {ranks} "
     "ranks; each data-parallel rank has updated its own share (ZeRO), and the others' must be gathered over {data}" LOOK
     "all-gather after a ZeRO step; `DistributedOptimizer`"},
    {"shares_misaligned", K(SHARE_UPDATE), ARI_STATISTIC + 5, ANY, 0, 0, 0, "",
     "shares that do not line up: the update is as large as the expected ({size:.3g} times) and has another direction "
     "(cosine {cosine:.2f}), as when a rank updates its share of the weights with another share of the gradient "
     "(ZeRO)"},
};

ARI_CAUSES(step)
