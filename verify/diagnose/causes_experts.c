/* SPDX-License-Identifier: Apache-2.0 */
/* Causes of routers and experts, before the more general ones of their kinds. */
#define ARI_CAUSE_ROWS
#include "verify/diagnose/case.h"

#define ZERO "each zero where the reference is not"
#define AGAIN                                                                                              \
    "computed again from the reference's routes and the experts' weights, these values come out (but for " \
    "{left:.1e} of the difference's squares) with "
#define LEFT_OUT "an expert's output is missing in {lacking} of {slots} slots of the tokens looked at"
#define ROWS \
    "computed again, {moved} of {slots} slots of the tokens looked at have what an expert makes of another token"
#define SHARES \
    "how much of each expert there is in a token, by what each makes of the module's input computed again, shows that "
#define GRADIENT "computed again from the weights' gradient, this is that of "
#define NEAR_TIES                                                                                                \
    "near ties, whose logits are at most {gap:.1e} apart: logits rounded before the choice (bf16), or of equal " \
    "ones another was taken than the lower number" LOOK                                                          \
    "the dtype of the router's logits at `topk`, which promises no order of equal values"
#define NOT_LARGEST                                                                                     \
    "not the {k} largest, by up to {gap:.2g}: jitter, a bias, groups of experts, or another order" LOOK \
    "`router_jitter_noise`, the bias of the choice"
#define CHOSEN "{who} (tokens with other experts: {rows}), and of the same logits: "

#define MOVED "the bias of the choice moves by {by:.3g} a step, as it must, but "

static const ari_cause rows[] = {
    SECTION("Routers and experts"),
    {"other_experts_chosen", K(CHOICE), ARI_IDENTITY + 9, "f", 0, IF(SHIFT), 0, "in another order",
     "each token has the same experts, in another order of its {k} slots" LOOK "`topk(sorted=False)`"},
    {"other_experts_chosen", K(CHOICE), ARI_IDENTITY + 9, "f", 0, IF(SAME), 0, "of other experts", CHOSEN NEAR_TIES},
    {"other_experts_chosen", K(CHOICE), ARI_IDENTITY + 9, "f", 0, IF(FOREIGN), 0, "of other experts",
     "{who} (tokens with other experts: {rows}); their logits differ already, or are not known"},
    {"other_experts_chosen", K(CHOICE), ARI_IDENTITY + 9, "f", 0, 0, 0, "of other experts", CHOSEN NOT_LARGEST},
    {"router_bias_update", K(COUNTS), ARI_IDENTITY + 9, "n", 0, IF(OF_MICRO), 0, "multiples of one update",
     "the bias of the choice moves by {by:.3g} a step, and here {updates} times in one step, each by counts of a part of the "
     "batch: updated after each micro-batch" LOOK "where the update is called: once, in the optimizer's step"},
    {"router_bias_update", K(COUNTS), ARI_IDENTITY + 9, "n", 0, IF(OF_SHARDS), 0, "",
     MOVED "by the counts of one of {n} parts of the batch: each rank's own tokens, not summed over ranks" LOOK
           "the all-reduce of the tokens of each expert (`tokens_per_expert`), over dp, cp and ep"},
    {"router_bias_update", K(COUNTS), ARI_IDENTITY + 9, "n", 0, IF(ZERO), 0, "",
     MOVED "by counts of the largest scores of all experts without the bias, not by those of the routes" LOOK
           "a second `topk` for the counts"},
    {"router_bias_update", K(COUNTS), ARI_IDENTITY + 9, "n", 0, IF(SAME), 0, "",
     MOVED
     "with another sign where counts ({different} of them) are at most {gap:.3g} from the mean, {mean:.5g}: counts "
     "or their sum are rounded" LOOK "the dtype of the counts and of their all-reduce: integers"},
    {"router_bias_update", K(COUNTS), ARI_IDENTITY + 9, "n", 0, 0, 0, "",
     MOVED "with another sign for {different} experts: by other counts than those of the batch's routes" LOOK
           "which tokens are counted: padding, recomputation, the ranks' own"},
    {"router_bias_in_weights", K(SCORES), ARI_IDENTITY + 9, "f", 0, IF(SHIFT), 0, "",
     "computed again, these are weights of the scores with the bias of the choice added: the bias is for the choice of "
     "experts alone, and weights are of the scores without it" LOOK
     "which scores `gather` takes the weights from (DeepSeek-V3: `scores`, not `scores_for_choice`)"},
    {"routing_weights_scaled", K(SCORES), ARI_IDENTITY + 9, "f", 0, IF(COUNT), 0, "",
     "computed again, a token's scores are multiplied by {is:.4g}, where the reference has a factor of {was:.4g}{how}" LOOK
     "`routed_scaling_factor` (Megatron: `moe_router_topk_scaling_factor`)"},
    {"routing_weights_not_normalised", K(SCORES), ARI_IDENTITY + 9, "f", 0, IF(ZERO), 0, "each a score",
     "the weights are not normalised: each is its expert's score, which the reference divides by the sum of the token's "
     "experts'" LOOK "`norm_topk_prob`; a softmax over all experts where one over those chosen belongs (Megatron: "
     "`moe_router_pre_softmax`)"},
    {"routing_weights_function", K(SCORES), ARI_IDENTITY + 9, "f", 0, IF(ALL), 0, "",
     "each score is divided by the sum of all experts' scores, where the reference has the sum of the token's" LOOK
     "the sum that weights are divided by: after `gather`"},
    {"routing_weights_normalised", K(SCORES), ARI_IDENTITY + 9, "f", 0, IF(ONE), 0, "each a share of the token's sum",
     "the weights are normalised: each score is divided by the sum of the token's, which the reference does not do" LOOK
     "`norm_topk_prob`; a softmax over those chosen (Megatron: `moe_router_pre_softmax`)"},
    {"other_experts_chosen", K(SCORES), ARI_IDENTITY + 9, "f", 0, IF(BLOCKS), 0, "of other experts",
     CHOSEN "the {k} largest scores of {of}, where the reference takes them of {wanted}" LOOK
            "`n_group` and `topk_group`, how groups are ranked and masked, the bias of the choice"},
    {"router_bias_update", K(SCORES), ARI_IDENTITY + 9, "f", 0, IF(OF_MICRO), 0, "of other experts",
     CHOSEN
     "those of a bias that has moved by {by:.3g} after the first {first} samples: it is updated within the step, "
     "after each micro-batch" LOOK "where the update is called: once, in the optimizer's step"},
    {"routing_weights_function", K(SCORES), ARI_IDENTITY + 9, "f", 0, 0, 0, "each another function of the logit",
     "another function of the logits: {function}, where the reference has {reference}" LOOK
     "`scoring_func`, the order of softmax and `topk`, a softmax that is applied again"},
    {"routing_weights_scaled", K(SCORES), ARI_IDENTITY + 8, "b", 0, IF(COUNT), 0, "",
     "this is {times:.4g} times the router's gradient, by the factor of its weights: left out on the way back, or there "
     "twice" LOOK "`routed_scaling_factor` in a backward pass of one's own"},
    {"router_gradient_of_chosen_alone", K(ROUTER), ARI_IDENTITY + 8, "b", 0, IF(SOME), 0, "",
     GRADIENT
     "the chosen experts' logits alone: where weights are not normalised a softmax over all experts gives each "
     "logit a gradient" LOOK "probabilities masked or gathered before the softmax's backward pass"},
    {"routing_sum_detached", K(ROUTER), ARI_IDENTITY + 8, "b", 0, IF(CUT), 0, "",
     GRADIENT "weights whose divisor, the sum over the token's experts, is a constant: no gradient goes through it" LOOK
              "`detach` of the sum, a division in place under `no_grad`"},
    {"balancing_loss", K(ROUTER), ARI_IDENTITY + 8, "b", 0, IF(AVERAGE), 0, "",
     "the difference is the gradient of a balancing loss, the same function of every token's probabilities: one on this "
     "side alone or on the other, of another weight, or of other counts of tokens" LOOK
     "the coefficient of the auxiliary loss, the 1/k, and which tokens it counts: a micro-batch's, a rank's, the whole "
     "batch's, padding"},
    {"balancing_loss", K(ROUTER), ARI_IDENTITY + 8, "b", 0, IF(SAMPLES), 0, "",
     "the difference is in every sequence the gradient of a balancing loss of its own: one over a micro-batch, a "
     "rank or a sequence, where the other side's is over more tokens, or of another weight" LOOK
     "which tokens the auxiliary loss counts, its coefficient and its divisor"},
    {"router_z_loss", K(ROUTER), ARI_IDENTITY + 8, "b", 0, IF(LOG), 0, "",
     "the difference is the gradient of a router's z-loss: {weight:.3g} times lse*p, on this side more than on the "
     "other" LOOK "the coefficient of the z-loss, and the tokens that it is a mean over: a micro-batch's, a rank's"},
    {"routing_weights_normalised", K(ROUTER), ARI_IDENTITY + 8, "b", 0, IF(ONE), 0, "",
     GRADIENT "normalised weights, which the reference's are not"},
    {"routing_weights_not_normalised", K(ROUTER), ARI_IDENTITY + 8, "b", 0, IF(ZERO), 0, "",
     GRADIENT "weights that are not normalised, where the reference's are"},
    {"routing_weights_detached", K(ZERO), ARI_TRACE - 5, "b", ARI_IS_ROUTES, 0, IF(SOME), ZERO,
     "no gradient reaches the weights of the experts, and through them the router: they were detached, or gathered by "
     "a collective without a backward" LOOK
     "`detach`, `no_grad` around the routing; probabilities that a collective without a backward moves"},
    {"routing_weights_detached", K(ROUTES), ARI_IDENTITY + 8, "b", 0, IF(OF_SHARDS), 0, ZERO,
     "no gradient reaches the weights for the experts of other ranks: of {n} ranks that share out the experts each "
     "token's weights have that of one alone"},
    {"experts_left_out", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(SOME) | IF(ONE), 0, "",
     LEFT_OUT ", that of expert {expert} wherever it is chosen" LOOK
              "the bounds of the loop over experts, the experts of each rank"},
    {"experts_left_out", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(SOME) | IF(OF_SHARDS), 0, "",
     LEFT_OUT
     ": of {n} ranks that share out the experts each token has those of one: rows of the others were not sent, "
     "or did not return"},
    {"experts_left_out", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(SOME) | IF(CUT), 0, "",
     LEFT_OUT ", none of them among an expert's first {rows} rows: tokens beyond a capacity were dropped" LOOK
              "`moe_expert_capacity_factor`, token dropping"},
    {"experts_left_out", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(SOME), 0, "",
     LEFT_OUT ": tokens dropped (a capacity, lost in a permutation), or experts of other ranks" LOOK
              "`moe_expert_capacity_factor`, token dropping; the experts of each rank"},
    {"expert_input_weighted", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(OF_INPUT), 0, "",
     AGAIN
     "the weight multiplying what goes into the expert, not what comes out: another function, as an expert is not "
     "linear" LOOK "where routing weights are applied (Llama-4's experts have them at the input); "
     "`apply_router_weight_on_input`"},
    {"expert_weights_applied", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(TWICE), 0, "",
     AGAIN "each weight applied twice" LOOK "a fused kernel that applies the weights, and its caller"},
    {"expert_weights_applied", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(AVERAGE), 0, "",
     AGAIN "the mean of a token's experts, without weights"},
    {"expert_weights_applied", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(ZERO), 0, "",
     AGAIN "the sum of a token's experts, without weights"},
    {"activation_arguments", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(EXCHANGED), 0, "",
     AGAIN "gate and up exchanged" LOOK "the order of gate|up in the experts' packed weight (w1 and w3)"},
    {"expert_halves", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(PACKED), 0, "",
     AGAIN "gate and up of {how}" LOOK "`chunk(2, -1)` where the model has `[..., ::2]` and `[..., 1::2]` (GPT-OSS)"},
    {"expert_bias_not_weighted", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(LAST) | IF(ONE), 0, "",
     AGAIN "the bias of their second product added as it is, without the token's weights" LOOK
           "where the weights are applied: before or after the last bias"},
    {"expert_bias_left_out", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(LAST), 0, "",
     AGAIN "the bias of their second product left out"},
    {"activation_function", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(ALL), 0, "",
     AGAIN "another function of gate and up: {how}" LOOK "`swiglu_limit`, `alpha`, `up + 1`"},
    {"shared_expert_left_out", K(SHARED_EXPERT), ARI_IDENTITY + 9, "f", 0, IF(ZERO), 0, "",
     "the shared expert is left out: these are the values of the routed ones alone" LOOK
     "`shared_expert_intermediate_size`; the shared expert's stream or its overlap"},
    {"experts_left_out", K(SHARED_EXPERT), ARI_IDENTITY + 9, "f", 0, IF(ALL), 0, "",
     "the routed experts are left out: these are the values of the shared one alone"},
    {"shared_gate_left_out", K(SHARED_EXPERT), ARI_IDENTITY + 9, "f", 0, IF(LOG), 0, "",
     "the shared expert's output is multiplied by its gate's logit, not by the sigmoid of that"},
    {"shared_gate_left_out", K(SHARED_EXPERT), ARI_IDENTITY + 9, "f", 0, 0, 0, "",
     "the shared expert's gate is left out, or there is one on this side alone: the same sum of what the experts and "
     "the shared one make, with another factor" LOOK "`shared_expert_gate`; Megatron: `moe_shared_expert_gate`"},
    {"routing_weights_not_normalised", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(SAME) | IF(ZERO), 0, "",
     "each token's values add up to 1 in the reference, and are here multiplied by a number of each token's own, from "
     "{low:.3g} to {high:.3g}: weights that are not normalised" LOOK "`norm_topk_prob`"},
    {"routing_weights_normalised", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(SAME) | IF(ONE), 0, "",
     "each token's values add up to 1, and in the reference they do not: weights that are normalised" LOOK
     "`norm_topk_prob`"},
    {"routing_weights_detached", K(AUXILIARY), ARI_IDENTITY + 3, "bg", 0, IF(ALONE), 0, "",
     "this is the gradient of the router's auxiliary loss alone ({loss}, computed again): none reaches it through the "
     "weights of the experts" LOOK
     "`detach`, `no_grad` around the routing; probabilities that a collective without a backward moves"},
    {"router_z_loss", K(AUXILIARY), ARI_IDENTITY + 3, "bg", 0, IF(LOG), 0, "",
     "the difference is the gradient of the router's z-loss, computed again: another coefficient or divisor"},
    {"balancing_loss", K(AUXILIARY), ARI_IDENTITY + 3, "bg", 0, IF(NEGATIVE), 0, "",
     "the difference is the gradient of the router's auxiliary loss ({loss}, computed again), of which there is "
     "less or nothing: its coefficient, or its result is not used" LOOK
     "the coefficient; what the loss is divided by (tokens of all ranks, micro-batches); the tensor it is attached to"},
    {"balancing_loss", K(AUXILIARY), ARI_IDENTITY + 3, "bg", 0, 0, 0, "",
     "the difference is the gradient of the router's auxiliary loss ({loss}, computed again), of which there is "
     "more: its coefficient, or a divisor of a rank's own tokens" LOOK
     "the coefficient; what the loss is divided by (tokens of all ranks, micro-batches); recomputation"},
    {"counted_twice", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(ALL), 0, "",
     SHARES
     "the shared expert counts {times:.3g} times, and the routed ones are right: each of as many ranks has added "
     "it before their sum" LOOK "what is inside of the sum over the ranks that share out the experts"},
    {"routing_weights_not_normalised", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(ZERO), 0, "",
     SHARES
     "a token's weights, which add up to 1 in the reference, are multiplied by a number of each token's own: they "
     "are not normalised" LOOK "`norm_topk_prob`"},
    {"routing_weights_normalised", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(ONE), 0, "",
     SHARES "a token's weights add up to 1, which they do not in the reference" LOOK "`norm_topk_prob`"},
    {"routing_weights_scaled", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(COUNT) | IF(SAME), 0, "",
     SHARES
     "the weights of all tokens' experts are multiplied by {times:.4g}" LOOK
     "`routed_scaling_factor` (Megatron: `moe_router_topk_scaling_factor`): applied once, by the router or the layer"},
    {"wrong_scalar", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(COUNT), 0, "",
     SHARES "the weights of each token's experts are multiplied by one number of each token's own"},
    {"wrong_scalar", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(FRACTION), 0, "",
     SHARES "the shared expert is multiplied by {times:.4g}, and the routed ones are right" LOOK
            "`routed_scaling_factor`: what it multiplies"},
    {"expert_rows_misplaced", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(EXCHANGED), 0, "",
     SHARES
     "{moved} of {slots} slots of the tokens looked at have their weight, and another expert's output: expert {who}, "
     ".." LOOK "which expert a row is given to: offsets and counts of each expert's rows, and which rank has which "
     "experts"},
    {"expert_rows_misplaced", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, IF(ROWS), 0, "",
     SHARES
     "the experts are right and their weights are other tokens' (all of them are in {weights}): rows and weights "
     "are in different orders" LOOK "the permutation that sorts rows by expert: weights need the same"},
    {"expert_weights_applied", K(MIXTURE), ARI_IDENTITY + 8, "f", 0, 0, 0, "",
     SHARES "their weights are not those of the reference"},
    {"no_update", K(OTHER_TENSOR), ARI_IDENTITY + 9, "n", ARI_IS_EXPERT, IF(OF_BEFORE), 0,
     "each another tensor's value",
     "these are the values of {other} in the reference: all {different} different elements, {exact}; an expert's "
     "weights before the step: no update. If no token chose it, its gradient is zeros and not none, and it has its "
     "weight decay and its moments" LOOK
     "parameters whose `grad` is None in the optimizer's step; experts that no token chose"},
    {"expert_rows_misplaced", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(ROWS) | IF(SHIFT), 0, "",
     ROWS ", the row {where} their own in the order of experts and tokens: the permutation is off by one" LOOK
          "the indices that sort tokens by expert"},
    {"expert_rows_misplaced", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(ROWS) | IF(OF_SHARDS), 0, "",
     ROWS ", of an expert of the same of {n} ranks: rows that come back from an all-to-all lie in another order than "
          "they were sent in"},
    {"expert_rows_misplaced", K(EXPERTS), ARI_IDENTITY + 8, "f", 0, IF(ROWS), 0, "",
     ROWS ": they were put back in another order than they were taken in"},
    {"mtp_use_lost", K(FURTHER_USES), ARI_IDENTITY + 9, "g", 0, IF(ZERO), 0, "",
     "multi-token prediction: the weight's uses by further tokens are missing from its gradient" LOOK
     "`mtp` heads and embeddings that are detached; the copies of the first and the last stage"},
    {"mtp_use_twice", K(FURTHER_USES), ARI_IDENTITY + 9, "g", 0, IF(TWICE), 0, "",
     "multi-token prediction: the weight's uses by further tokens count {times:.0f} times in its gradient" LOOK
     "a sum over the first and the last stage that comes twice"},
    {"mtp_rolled_elsewhere", K(ANYTHING), ARI_LAST_RESORT, "f", ARI_IS_FURTHER, 0, 0, "",
     "the table is right, so ids of a further token are others: they end elsewhere than at a document's end" LOOK
     "`roll_tensor` of Megatron, its cp_group and packed_seq_params"},
    {"unknown", K(ANYTHING), ARI_LAST_RESORT, "g", ARI_IS_EXPERT, IF(RECOMPUTED), 0, "",
     "if this is the first difference, the gradients around it are right; with recomputation the tokens of an expert, "
     "their values and their weights are those of a second forward pass: did it route as the first did?"},
};

ARI_CAUSES(experts)
