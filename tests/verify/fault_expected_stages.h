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
    {F(pp_sum_loss), "llama", PP(2, 2, 2), "lm_head.logits:bwd", 1, "sum_for_mean: 46 = T, the number of targets"},
    /* The last of four stages divides as it must, the one before it once more. */
    {F(pp_stage_divides), "llama-4", PP(4, 2, 2), "model.layers.2.mlp.down_proj:bwd", 2,
     "scaled_by_stage: layers 3 times 1, 2 times 0.5, 1 times 0.25, 0 times 0.125"},
    {F(pp_layers_local), "llama", PP(2, 2, 2), "model.layers.1.self_attn.q_proj.weight:init", 1,
     "other_layer: model.layers.0.self_attn.q_proj.weight"},
    {F(pp_loss_last_micro_batch), "llama", PP(2, 2, 2), "loss:fwd", 0, "one_micro_batch: the last 1 of 2 samples"},
    {F(pp_tied_not_summed), "gpt2", PP(2, 2, 2), "transformer.wte.weight:grad", 0, "missing_all_reduce: over pp"},
    {F(zb_tied_counted_twice), "gpt2", BUBBLE(1, 2, 2), "transformer.wte.weight:grad", 0,
     "tied_weight: the head's use of the weight is counted twice"},
    {F(zero_stale_weights), "llama", SHARED_STEPS(2, 3, 2), "model.embed_tokens:fwd", 0, "stale_weights"},
};
enum { STAGED_ONCE = sizeof staged_once / sizeof *staged_once };

static const expected staged_elsewhere[] = {
    {F(pp_sum_loss), "gpt2", PP_TP(2, 2, 1, 2), "lm_head.logits:bwd", 2, "sum_for_mean", RING},
    {F(pp_stage_divides), "gpt2", PP_DP(2, 2, 2, 4), "transformer.h.0.mlp.c_proj:bwd", 0,
     "scaled_by_stage: 1 times 1, 0 times 0.5"},
    {F(pp_layers_local), "gpt2", PP_TP(2, 2, 2, 2), "transformer.h.1.ln_1.bias:init", 2,
     "other_layer: transformer.h.0.ln_1.bias"},
    {F(gradnorm_counts_replicas), "gpt2", PP_TP(2, 2, 2, 2), "grad_norm:clip", 0, "norm_counts_twice"},
    {F(pp_loss_last_micro_batch), "gpt2", PP_DP(2, 2, 2, 4), "loss:fwd", 0, "one_micro_batch: the last 1 of 2 samples"},
    {F(pp_tied_not_summed), "gpt2-4", PP(4, 1, 2), "transformer.wte.weight:grad", 0, "missing_all_reduce: over pp"},
    {F(pp_tied_not_summed), "gpt2", PP_TP(2, 2, 1, 2), "transformer.wte.weight:grad", 0, "missing_all_reduce: over pp",
     RING},
    {F(zb_tied_counted_twice), "gpt2", BUBBLE(2, 2, 4), "transformer.wte.weight:grad", 0,
     "tied_weight: the head's use of the weight is counted twice", RING},
    {F(zero_stale_weights), "stack", SHARED_STEPS(2, 3, 2), "embed:fwd", 0, "stale_weights"},
    {F(bucket_reduced_twice), "llama", SHARED(2, 2, 1, 4), "lm_head.weight:grad", 0, "reduced_again: a second time"},
    {F(accum_last_only), "llama", SHARED(2, 2, 2, 4), "lm_head.weight:grad", 0, "one_micro_batch"},
    {F(accum_divided_each_time), "gpt2", SHARED(2, 3, 3, 6), "transformer.ln_f.weight:grad", 0,
     "accumulation_divided: 0.1111, 0.3333, 1 are in it"},
    {F(bucket_not_packed), "llama", SHARED(2, 3, 1, 2), "lm_head.weight:grad", 0, "no_gradient"},
    /* Rank 1 keeps the gradients of its only micro-batch. */
    {F(unused_in_last_micro_batch), "llama", SHARED(2, 0, 2, 3), "lm_head.weight:grad", 0, "missing_all_reduce"},
    /* The root unit's own buckets alone are reduced together. */
    {F(stale_activation_reuse), "llama", SHARED(4, 3, 1, 4), "lm_head.weight:grad", 0, "unknown"},
};
enum { STAGED_ELSEWHERE = sizeof staged_elsewhere / sizeof *staged_elsewhere };
