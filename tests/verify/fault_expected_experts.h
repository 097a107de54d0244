/* SPDX-License-Identifier: Apache-2.0 */
/* What the faults of routers and experts must look like, as fault_expected.h has those of the rest. */
#ifndef TESTS_VERIFY_FAULT_EXPECTED_EXPERTS_H
#define TESTS_VERIFY_FAULT_EXPECTED_EXPERTS_H

#include "tests/verify/fault_expected_stages.h"

#define MOE(layer, name) "model.layers." #layer ".block_sparse_moe" name /* of mixtral */
#define EP_TP(d, n, t, samples) .at = {.parallel = {.dp = (d), .ep = (n), .tp = (t)}, .batch = (samples)}
#define EP_CP(d, c, n, samples) .at = {.parallel = {.dp = (d), .cp = (c), .ep = (n)}, .batch = (samples)}
#define EP_ZERO(d, n, stage, samples) .at = {.parallel = {.dp = (d), .ep = (n), .zero = (stage)}, .batch = (samples)}
#define EP_PP(d, n, micro, samples) \
    .at = {.parallel = {.pp = 2, .dp = (d), .ep = (n), .micro_batches = (micro)}, .batch = (samples)}
#define EP_WHOLE(t, n) .at = {.parallel = {.tp = (t), .sp = true, .etp = 1, .ep = (n)}}
#define MLP(layer, name) "model.layers." #layer ".mlp" name /* of qwen2-moe */

#define BALANCED(form, ...) .at = {.parallel = {__VA_ARGS__}, .router = {AR_BALANCE_##form, 0.5, 0.0}}
#define ROUTER_Z(...) .at = {.parallel = {__VA_ARGS__}, .router = {.z_loss = 0.1}}

static const expected experts_once[] = {
    {F(router_weights_not_normalised), "mixtral", TP(2), MOE(0, ".weights:fwd"), 0, "routing_weights_not_normalised"},
    {F(router_weights_normalised), "qwen2-moe", TP(2), MLP(0, ".weights:fwd"), 0, "routing_weights_normalised"},
    {F(router_softmax_twice), "mixtral", TP(2), MOE(0, ".weights:fwd"), 0,
     "routing_weights_function: a second softmax, over the experts chosen"},
    {F(router_ties_higher_index), "qwen2-moe", TP(2), MLP(0, ".routes:fwd"), 0, "other_experts_chosen: near ties"},
    {F(router_logits_bf16), "mixtral", TP(2), MOE(0, ".gate:fwd"), 0, "fewer_bits: exactly the reference rounded"},
    {F(expert_input_weighted), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0, "expert_input_weighted"},
    /* The last block goes back first. */
    {F(router_weights_detached), "mixtral", TP(2), MOE(1, ".weights:bwd"), 0, "routing_weights_detached"},
    {F(router_grad_chosen_alone), "qwen2-moe", TP(2), MLP(1, ".logits:bwd"), 0, "router_gradient_of_chosen_alone"},
    {F(router_sum_detached), "mixtral", TP(2), MOE(1, ".logits:bwd"), 0, "routing_sum_detached"},
    {F(balance_of_micro_batch), "mixtral", BALANCED(BATCH, .micro_batches = 2), MOE(1, ".logits:bwd"), 0,
     "balancing_loss: a micro-batch"},
    {F(balance_without_k), "mixtral", BALANCED(SEQUENCE, .tp = 2), MOE(1, ".logits:bwd"), 0, "balancing_loss"},
    {F(router_z_loss_of_micro_batch), "mixtral", ROUTER_Z(.dp = 2), MOE(1, ".logits:bwd"), 0, "router_z_loss"},
    {F(router_grad_local), "mixtral", TP(2), MOE(1, ".weights:bwd"), 0, "missing_all_reduce: over tp"},
    {F(sp_router_grad_summed), "mixtral", SP(2), MOE(1, ".gate.weight:grad"), 0, "reduced_again: over tp"},
    {F(experts_not_reduced), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0, "missing_all_reduce: over tp"},
    {F(experts_dx_not_reduced), "mixtral", TP(2), MOE(1, ".experts:bwd"), 0, "missing_all_reduce: over tp"},
    {F(experts_combined_first), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0, "parts_rounded_first"},
    {F(expert_rows_off_by_one), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0,
     "expert_rows_misplaced: the row after their own"},
    {F(expert_capacity_drops), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0, "experts_left_out: beyond a capacity"},
    {F(last_expert_left_out), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0, "experts_left_out: that of expert 5"},
    {F(shared_expert_left_out), "qwen2-moe", TP(2), MLP(0, ":fwd"), 0, "shared_expert_left_out"},
    {F(shared_gate_left_out), "qwen2-moe", TP(2), MLP(0, ":fwd"), 0, "shared_gate_left_out"},
    {F(shared_gate_detached), "qwen2-moe", TP(2), MLP(1, ".shared_expert_gate:bwd"), 0, "no_backward"},
    {F(recompute_routes_differ), "mixtral", AGAIN(2, FULL, 1, 0.0), MOE(1, ".experts.0.w2.weight:grad"), 0,
     "unknown: did it route as the first did"},
    {F(empty_expert_not_updated), "qwen2-moe", TP(2), MLP(1, ".experts.5.gate_proj.weight:new"), 0,
     "no_update: no token chose it"},
    {F(gradnorm_without_experts), "mixtral", TP(2), "grad_norm:clip", 0, "norm_leaves_out"},
    /* Of six experts, and two ranks that share them out, the second has 3 to 5. */
    {F(ep_experts_drawn_alike), "mixtral", EP(2, 2), MOE(0, ".experts.3.w1.weight:init"), 1,
     "shards_seeded_alike: block_sparse_moe.experts.0.w1.weight"},
    {F(ep_rows_not_put_back), "mixtral", EP(2, 2), MOE(0, ".experts:fwd"), 0,
     "expert_rows_misplaced: of an expert of the same of 2 ranks"},
    {F(ep_outputs_not_returned), "mixtral", EP(2, 2), MOE(0, ".experts:fwd"), 0,
     "experts_left_out: of 2 ranks that share out the experts each token has those of one"},
    {F(ep_weights_detached), "mixtral", EP(2, 2), MOE(1, ".weights:bwd"), 0,
     "routing_weights_detached: the weights for the experts of other ranks"},
    {F(ep_grads_times_ep), "mixtral", EP(4, 2), MOE(1, ".experts.0.w2.weight:grad"), 0,
     "divisor_of_experts: times 2 = 2: of all weights of experts"},
    {F(edp_group_missing), "mixtral", EP(4, 2), MOE(1, ".experts.0.w2.weight:grad"), 0, "missing_all_reduce: (edp)"},
    {F(experts_summed_over_dp), "mixtral", EP(2, 2), MOE(1, ".experts.0.w2.weight:grad"), 0,
     "wrong_group: 2 experts, 0 and 3"},
    {F(empty_expert_grad_unwritten), "qwen2-moe", EP(2, 2), MLP(1, ".experts.5.down_proj.weight:grad"), 0,
     "never_written: an expert that no token chose"},
    {F(gradnorm_own_experts), "mixtral", EP(2, 2), "grad_norm:clip", 0,
     "norm_of_own_experts: each of 2 expert-parallel ranks"},
};
enum { EXPERTS_ONCE = sizeof experts_once / sizeof *experts_once };

static const expected experts_elsewhere[] = {
    {F(router_weights_not_normalised), "mixtral", SP(4), MOE(0, ".weights:fwd"), 0, "routing_weights_not_normalised",
     RING},
    {F(router_weights_normalised), "qwen2-moe", CP(2), MLP(0, ".weights:fwd"), 0, "routing_weights_normalised"},
    {F(router_softmax_twice), "qwen2-moe", DP(2, 2, 2), MLP(0, ".weights:fwd"), 0,
     "routing_weights_function: a second softmax, over the experts chosen", RING},
    {F(router_ties_higher_index), "qwen2-moe", SP(2), MLP(0, ".routes:fwd"), 0, "other_experts_chosen: near ties"},
    {F(router_logits_bf16), "qwen2-moe", PP(2, 2, 2), MLP(0, ".gate:fwd"), 0, "fewer_bits"},
    {F(expert_input_weighted), "qwen2-moe", SP(2), MLP(0, ".experts:fwd"), 0, "expert_input_weighted", RING},
    {F(router_weights_detached), "qwen2-moe", CP(2), MLP(1, ".weights:bwd"), 0, "routing_weights_detached"},
    {F(router_grad_chosen_alone), "qwen2-moe", SP(4), MLP(1, ".logits:bwd"), 0, "router_gradient_of_chosen_alone",
     RING},
    {F(router_sum_detached), "mixtral", MICRO(2, 2, 2), MOE(1, ".logits:bwd"), 0, "routing_sum_detached"},
    {F(balance_of_micro_batch), "qwen2-moe", BALANCED(LAYERS, .dp = 2, .ep = 2), MLP(1, ".logits:bwd"), 0,
     "balancing_loss"},
    {F(balance_without_k), "qwen2-moe", BALANCED(SEQUENCE, .tp = 2, .sp = true), MLP(1, ".logits:bwd"), 0,
     "balancing_loss"},
    {F(router_z_loss_of_micro_batch), "qwen2-moe", ROUTER_Z(.tp = 2, .micro_batches = 2), MLP(1, ".logits:bwd"), 0,
     "router_z_loss"},
    {F(router_grad_local), "qwen2-moe", SP(2), MLP(1, ".weights:bwd"), 0, "missing_all_reduce: over tp", RING},
    {F(sp_router_grad_summed), "qwen2-moe", SP(4), MLP(1, ".gate.weight:grad"), 0, "reduced_again"},
    {F(experts_not_reduced), "qwen2-moe", TP(4), MLP(0, ".experts:fwd"), 0, "missing_all_reduce: over tp", RING},
    {F(experts_dx_not_reduced), "qwen2-moe", DP(2, 2, 2), MLP(1, ".experts:bwd"), 0, "missing_all_reduce: over tp"},
    {F(experts_combined_first), "qwen2-moe", SP(2), MLP(0, ".experts:fwd"), 0, "parts_rounded_first", RING},
    {F(expert_rows_off_by_one), "qwen2-moe", DP(2, 1, 2), MLP(0, ".experts:fwd"), 0,
     "expert_rows_misplaced: the row after their own"},
    {F(expert_capacity_drops), "qwen2-moe", DP(2, 1, 2), MLP(0, ".experts:fwd"), 0, "experts_left_out"},
    {F(last_expert_left_out), "qwen2-moe", CP(2), MLP(0, ".experts:fwd"), 0, "experts_left_out: that of expert 31"},
    {F(shared_expert_left_out), "qwen2-moe", SP(2), MLP(0, ":fwd"), 0, "shared_expert_left_out", RING},
    {F(shared_gate_left_out), "qwen2-moe", MICRO(2, 1, 2), MLP(0, ":fwd"), 0, "shared_gate_left_out"},
    {F(shared_gate_detached), "qwen2-moe", SP(2), MLP(1, ".shared_expert_gate:bwd"), 0, "no_backward"},
    {F(recompute_routes_differ), "qwen2-moe", AGAIN_DP(2, FULL, 4), MLP(1, ".experts.0.down_proj.weight:grad"), 0,
     "unknown: did it route as the first did"},
    {F(empty_expert_not_updated), "qwen2-moe", DP(2, 2, 2), MLP(1, ".experts.5.gate_proj.weight:new"), 0, "no_update"},
    {F(gradnorm_without_experts), "qwen2-moe", DP(2, 2, 2), "grad_norm:clip", 0, "norm_leaves_out", RING},
    {F(ep_experts_drawn_alike), "qwen2-moe", EP_TP(2, 2, 2, 2), MLP(0, ".experts.16.gate_proj.weight:init"), 2,
     "shards_seeded_alike"},
    {F(ep_rows_not_put_back), "qwen2-moe", EP_CP(2, 2, 4, 2), MLP(0, ".experts:fwd"), 0, "expert_rows_misplaced"},
    {F(ep_outputs_not_returned), "qwen2-moe", EP_WHOLE(2, 2), MLP(0, ".experts:fwd"), 0,
     "experts_left_out: of 2 ranks that share out", RING},
    {F(ep_weights_detached), "qwen2-moe", EP_CP(2, 2, 2, 2), MLP(1, ".weights:bwd"), 0,
     "routing_weights_detached: of 2 ranks that share out"},
    {F(ep_grads_times_ep), "qwen2-moe", EP_ZERO(4, 4, 1, 4), MLP(1, ".experts.0.down_proj.weight:grad"), 0,
     "divisor_of_experts: of all weights of experts"},
    {F(edp_group_missing), "qwen2-moe", EP_PP(4, 2, 1, 4), MLP(1, ".experts.0.down_proj.weight:grad"), 4,
     "missing_all_reduce: (edp)"},
    {F(experts_summed_over_dp), "qwen2-moe", EP_TP(4, 2, 2, 4), MLP(1, ".experts.0.down_proj.weight:grad"), 0,
     "wrong_group: 2 experts, 0 and 16"},
    {F(empty_expert_grad_unwritten), "qwen2-moe", EP_TP(2, 2, 2, 2), MLP(1, ".experts.5.down_proj.weight:grad"), 0,
     "never_written"},
    {F(gradnorm_own_experts), "qwen2-moe", EP_ZERO(4, 2, 2, 4), "grad_norm:clip", 0,
     "norm_of_own_experts: each of 2 expert-parallel ranks"},
};
enum { EXPERTS_ELSEWHERE = sizeof experts_elsewhere / sizeof *experts_elsewhere };

#endif
