/* SPDX-License-Identifier: Apache-2.0 */
/* What the faults of routers and experts must look like, as fault_expected.h has those of the rest. */
#ifndef TESTS_VERIFY_FAULT_EXPECTED_EXPERTS_H
#define TESTS_VERIFY_FAULT_EXPECTED_EXPERTS_H

#include "tests/verify/fault_expected_stages.h"

#define MOE(layer, name) "model.layers." #layer ".block_sparse_moe" name /* of mixtral */
#define MLP(layer, name) "model.layers." #layer ".mlp" name              /* of qwen2-moe */

#define BALANCED(form, ...) .at = {.parallel = {__VA_ARGS__}, .router = {AR_BALANCE_##form, 0.5, 0.0}}
#define ROUTER_Z(...) .at = {.parallel = {__VA_ARGS__}, .router = {.z_loss = 0.1}}

static const expected experts_once[] = {
    {F(router_weights_not_normalised), "mixtral", TP(2), MOE(0, ".weights:fwd"), 0, "routing_weights_not_normalised"},
    {F(router_weights_normalised), "qwen2-moe", TP(2), MLP(0, ".weights:fwd"), 0, "routing_weights_normalised"},
    {F(router_softmax_twice), "mixtral", TP(2), MOE(0, ".weights:fwd"), 0,
     "routing_weights_function: a second softmax, over the experts chosen"},
    {F(router_ties_higher_index), "qwen2-moe", TP(2), MLP(0, ".weights:fwd"), 0, "other_experts_chosen: near ties"},
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
    {F(experts_combined_first), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0, "small_change"},
    {F(expert_rows_off_by_one), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0, "unknown: no known trace"},
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
};
enum { EXPERTS_ONCE = sizeof experts_once / sizeof *experts_once };

static const expected experts_elsewhere[] = {
    {F(router_weights_not_normalised), "mixtral", SP(4), MOE(0, ".weights:fwd"), 0, "routing_weights_not_normalised",
     RING},
    {F(router_weights_normalised), "qwen2-moe", CP(2), MLP(0, ".weights:fwd"), 0, "routing_weights_normalised"},
    {F(router_softmax_twice), "qwen2-moe", DP(2, 2, 2), MLP(0, ".weights:fwd"), 0,
     "routing_weights_function: a second softmax, over the experts chosen", RING},
    {F(router_ties_higher_index), "qwen2-moe", SP(2), MLP(0, ".weights:fwd"), 0, "other_experts_chosen: near ties"},
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
    {F(experts_combined_first), "qwen2-moe", SP(2), MLP(0, ".experts:fwd"), 0, "small_change", RING},
    {F(expert_rows_off_by_one), "qwen2-moe", DP(2, 1, 2), MLP(0, ".experts:fwd"), 0, "unknown: no known trace"},
    {F(expert_capacity_drops), "qwen2-moe", DP(2, 1, 2), MLP(0, ".experts:fwd"), 0, "experts_left_out"},
    {F(last_expert_left_out), "qwen2-moe", CP(2), MLP(0, ".experts:fwd"), 0, "experts_left_out: that of expert 31"},
    {F(shared_expert_left_out), "qwen2-moe", SP(2), MLP(0, ":fwd"), 0, "shared_expert_left_out", RING},
    {F(shared_gate_left_out), "qwen2-moe", MICRO(2, 1, 2), MLP(0, ":fwd"), 0, "shared_gate_left_out"},
    {F(shared_gate_detached), "qwen2-moe", SP(2), MLP(1, ".shared_expert_gate:bwd"), 0, "no_backward"},
    {F(recompute_routes_differ), "qwen2-moe", AGAIN_DP(2, FULL, 4), MLP(1, ".experts.0.down_proj.weight:grad"), 0,
     "unknown: did it route as the first did"},
    {F(empty_expert_not_updated), "qwen2-moe", DP(2, 2, 2), MLP(1, ".experts.5.gate_proj.weight:new"), 0, "no_update"},
    {F(gradnorm_without_experts), "qwen2-moe", DP(2, 2, 2), "grad_norm:clip", 0, "norm_leaves_out", RING},
};
enum { EXPERTS_ELSEWHERE = sizeof experts_elsewhere / sizeof *experts_elsewhere };

#endif
