/* SPDX-License-Identifier: Apache-2.0 */
/* What the faults of routers and experts must look like, as fault_expected.h has those of the rest. */
#pragma once

#include "tests/verify/fault_expected_stages.h"

#define MOE(layer, name) "model.layers." #layer ".block_sparse_moe" name /* of mixtral */
#define EP_ZERO(d, n, stage, samples) .at = {.parallel = {.dp = (d), .ep = (n), .zero = (stage)}, .batch = (samples)}
#define EP_WHOLE(t, n) .at = {.parallel = {.tp = (t), .sp = true, .etp = 1, .ep = (n)}}
#define MLP(layer, name) "model.layers." #layer ".mlp" name /* of qwen2-moe and routed */

#define ATTENTION(layer, name) "model.layers." #layer ".self_attn" name

#define BALANCED(form, ...) .at = {.parallel = {__VA_ARGS__}, .router = {AR_BALANCE_##form, 0.5, 0.0}}
#define BIAS_MOVED(by, ...) .at = {.parallel = {__VA_ARGS__}, .router = {.bias_update = (by)}}
#define BIAS_MOVED_FOR(by, samples, ...) \
    .at = {.parallel = {__VA_ARGS__}, .batch = (samples), .router = {.bias_update = (by)}}
#define BIAS ".gate.e_score_correction_bias:new"
#define ROUTER_Z(...) .at = {.parallel = {__VA_ARGS__}, .router = {.z_loss = 0.1}}

static const expected experts_once[] = {
    {F(router_weights_not_normalised), "mixtral", TP(2), MOE(0, ".weights:fwd"), 0},
    /* The last block goes back first. */
    {F(router_weights_detached), "mixtral", TP(2), MOE(1, ".weights:bwd"), 0},
    {F(router_bias_own_counts), "routed", BIAS_MOVED(0.001, .dp = 2), MLP(0, BIAS), 1},
    {F(router_bias_counts_bf16), "routed", BIAS_MOVED_FOR(0.001, 60, .dp = 2), MLP(1, BIAS), 0},
    {F(router_bias_counts_plain), "routed", BIAS_MOVED(0.001, .tp = 2), MLP(0, BIAS), 0},
    {F(balance_detached), "mixtral", BALANCED(BATCH, .tp = 2), MOE(1, ".logits:bwd"), 0},
    {F(balance_divided_by_dp), "mixtral", BALANCED(BATCH, .dp = 2), MOE(1, ".logits:bwd"), 0},
    {F(router_z_loss_of_micro_batch), "mixtral", ROUTER_Z(.dp = 2), MOE(1, ".logits:bwd"), 0},
    {F(router_grad_local), "mixtral", TP(2), MOE(1, ".weights:bwd"), 0},
    {F(latent_key_grad_local), "deepseek", TP(2), ATTENTION(1, ".k_shared:bwd"), 0},
    {F(sp_latent_key_grad_summed), "deepseek", SP(2), ATTENTION(1, ".k_shared:bwd"), 0},
    {F(latent_grads_summed_again), "deepseek", TP(2), ATTENTION(1, ".kv_a_proj_with_mqa.weight:grad"), 0},
    {F(sinks_left_out), "open", TP(2), ATTENTION(0, ".probs:fwd"), 0},
    {F(mtp_mean_over_all), "further", DP(2, 1, 2), "loss:fwd", 0},
    {F(experts_not_reduced), "mixtral", TP(2), MOE(0, ".experts:fwd"), 0},
    {F(experts_dx_not_reduced), "mixtral", TP(2), MOE(1, ".experts:bwd"), 0},
    {F(gradnorm_without_experts), "mixtral", TP(2), "grad_norm:clip", 0},
    {F(ep_outputs_not_returned), "mixtral", EP(2, 2), MOE(0, ".experts:fwd"), 0},
    {F(ep_grads_times_ep), "mixtral", EP(4, 2), MOE(1, ".experts.0.w2.weight:grad"), 0},
};
enum { EXPERTS_ONCE = sizeof experts_once / sizeof *experts_once };

static const expected experts_elsewhere[] = {
    {F(router_weights_not_normalised), "mixtral", SP(4), MOE(0, ".weights:fwd"), 0, RING},
    {F(router_weights_detached), "qwen2-moe", CP(2), MLP(1, ".weights:bwd"), 0},
    {F(router_bias_own_counts), "routed", BIAS_MOVED(0.001, .cp = 2, .ep = 2), MLP(0, BIAS), 0, RING},
    {F(router_bias_counts_bf16), "routed", BIAS_MOVED_FOR(0.001, 72, .tp = 2, .sp = true), MLP(1, BIAS), 0},
    {F(router_bias_counts_plain), "routed", BIAS_MOVED(0.001, .dp = 2, .ep = 2, .zero = 1), MLP(0, BIAS), 0},
    {F(router_weights_not_normalised), "routed", SP(2), MLP(0, ".weights:fwd"), 0},
    {F(balance_detached), "qwen2-moe", BALANCED(SEQUENCE, .dp = 2), MLP(1, ".logits:bwd"), 0},
    {F(balance_divided_by_dp), "qwen2-moe", BALANCED(LAYERS, .dp = 2, .tp = 2), MLP(1, ".logits:bwd"), 0},
    {F(router_z_loss_of_micro_batch), "qwen2-moe", ROUTER_Z(.tp = 2, .micro_batches = 2), MLP(1, ".logits:bwd"), 0},
    {F(router_grad_local), "qwen2-moe", SP(2), MLP(1, ".weights:bwd"), 0, RING},
    {F(latent_key_grad_local), "deepseek", SP(4), ATTENTION(1, ".k_shared:bwd"), 0, RING},
    {F(sp_latent_key_grad_summed), "deepseek", SP(4), ATTENTION(1, ".k_shared:bwd"), 0},
    {F(latent_grads_summed_again), "deepseek", TP(4), ATTENTION(1, ".kv_a_proj_with_mqa.weight:grad"), 0, RING},
    {F(experts_not_reduced), "qwen2-moe", TP(4), MLP(0, ".experts:fwd"), 0, RING},
    {F(experts_dx_not_reduced), "qwen2-moe", DP(2, 2, 2), MLP(1, ".experts:bwd"), 0},
    {F(gradnorm_without_experts), "qwen2-moe", DP(2, 2, 2), "grad_norm:clip", 0, RING},
    {F(ep_outputs_not_returned), "qwen2-moe", EP_WHOLE(2, 2), MLP(0, ".experts:fwd"), 0, RING},
    {F(ep_grads_times_ep), "qwen2-moe", EP_ZERO(4, 4, 1, 4), MLP(1, ".experts.0.down_proj.weight:grad"), 0},
    {F(sinks_left_out), "open", CP(2), ATTENTION(0, ".probs:fwd"), 0},
    {F(positions_over_documents), "deepseek", PACKED(2, 1, 4), ATTENTION(0, ".q_rope:fwd"),
     0}, /* some of a head's features turn */
    {F(mtp_mean_over_all), "further", TP(4), "loss:fwd", 0},
};
enum { EXPERTS_ELSEWHERE = sizeof experts_elsewhere / sizeof *experts_elsewhere };
