/* SPDX-License-Identifier: Apache-2.0 */
/* What the faults of pipelines and of shared-out weights must look like, as fault_expected.h has those of the rest. */
#pragma once

#include "tests/verify/fault_expected.h"

#define PP(n, micro, samples) .at = {.parallel = {.pp = (n), .micro_batches = (micro)}, .batch = (samples)}
#define PP_TP(n, t, micro, samples) \
    .at = {.parallel = {.pp = (n), .tp = (t), .micro_batches = (micro)}, .batch = (samples)}
#define PP_DP(n, d, micro, samples) \
    .at = {.parallel = {.pp = (n), .dp = (d), .micro_batches = (micro)}, .batch = (samples)}

#define BUBBLE(d, micro, samples)                                                                     \
    .at = {.parallel = {.pp = 2, .dp = (d), .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = (micro)}, \
           .batch = (samples)}
#define SHARED(d, stage, micro, samples) \
    .at = {.parallel = {.dp = (d), .zero = (stage), .micro_batches = (micro)}, .batch = (samples)}

#define SHARED_STEPS(d, stage, n) .at = {.parallel = {.dp = (d), .zero = (stage)}, .steps = (n)}

static const expected staged_once[] = {
    {F(pp_sum_loss), "llama", PP(2, 2, 2), "lm_head.logits:bwd", 1},
    /* The last of four stages divides as it must, the one before it once more. */
    {F(pp_stage_divides), "llama-4", PP(4, 2, 2), "model.layers.2.mlp.down_proj:bwd", 2},
    {F(pp_layers_local), "llama", PP(2, 2, 2), "model.layers.1.self_attn.q_proj.weight:init", 1},
    {F(pp_loss_last_micro_batch), "llama", PP(2, 2, 2), "loss:fwd", 0},
    {F(pp_tied_not_summed), "gpt2", PP(2, 2, 2), "transformer.wte.weight:grad", 0},
    {F(zb_tied_counted_twice), "gpt2", BUBBLE(1, 2, 2), "transformer.wte.weight:grad", 0},
    {F(zero_stale_weights), "llama", SHARED_STEPS(2, 3, 2), "model.embed_tokens:fwd", 0},
};
enum { STAGED_ONCE = sizeof staged_once / sizeof *staged_once };

static const expected staged_elsewhere[] = {
    {F(pp_sum_loss), "gpt2", PP_TP(2, 2, 1, 2), "lm_head.logits:bwd", 2, RING},
    {F(pp_stage_divides), "gpt2", PP_DP(2, 2, 2, 4), "transformer.h.0.mlp.c_proj:bwd", 0},
    {F(pp_layers_local), "gpt2", PP_TP(2, 2, 2, 2), "transformer.h.1.ln_1.bias:init", 2},
    {F(gradnorm_counts_replicas), "gpt2", PP_TP(2, 2, 2, 2), "grad_norm:clip", 0},
    {F(pp_loss_last_micro_batch), "gpt2", PP_DP(2, 2, 2, 4), "loss:fwd", 0},
    {F(pp_tied_not_summed), "gpt2-4", PP(4, 1, 2), "transformer.wte.weight:grad", 0},
    {F(pp_tied_not_summed), "gpt2", PP_TP(2, 2, 1, 2), "transformer.wte.weight:grad", 0, RING},
    {F(zb_tied_counted_twice), "gpt2", BUBBLE(2, 2, 4), "transformer.wte.weight:grad", 0, RING},
    {F(zero_stale_weights), "stack", SHARED_STEPS(2, 3, 2), "embed:fwd", 0},
    {F(bucket_reduced_twice), "llama", SHARED(2, 2, 1, 4), "lm_head.weight:grad", 0},
    {F(accum_last_only), "llama", SHARED(2, 2, 2, 4), "lm_head.weight:grad", 0},
    {F(accum_divided_each_time), "gpt2", SHARED(2, 3, 3, 6), "transformer.ln_f.weight:grad", 0},
    {F(bucket_not_packed), "llama", SHARED(2, 3, 1, 2), "lm_head.weight:grad", 0},
    /* Rank 1 keeps the gradients of its only micro-batch. */
    {F(unused_in_last_micro_batch), "llama", SHARED(2, 0, 2, 3), "lm_head.weight:grad", 0},
    /* The root unit's own buckets alone are reduced together. */
    {F(stale_activation_reuse), "llama", SHARED(4, 3, 1, 4), "lm_head.weight:grad", 0},
};
enum { STAGED_ELSEWHERE = sizeof staged_elsewhere / sizeof *staged_elsewhere };
