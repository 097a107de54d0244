/* SPDX-License-Identifier: Apache-2.0 */
/* What the faults of pipelines and of shared-out weights must look like, as fault_expected.h has those of the rest. */
#pragma once

#include "tests/verify/fault_expected.h"

#define PP_MUON(n, micro, samples) \
    .at = {.parallel = {.pp = (n), .micro_batches = (micro)}, .batch = (samples), .muon = true}
#define PP(n, micro, samples) .at = {.parallel = {.pp = (n), .micro_batches = (micro)}, .batch = (samples)}
#define PP_TP(n, t, micro, samples) \
    .at = {.parallel = {.pp = (n), .tp = (t), .micro_batches = (micro)}, .batch = (samples)}
#define PP_DP(n, d, micro, samples) \
    .at = {.parallel = {.pp = (n), .dp = (d), .micro_batches = (micro)}, .batch = (samples)}
#define PP_DROPOUT(n, t, p) .at = {.parallel = {.pp = (n), .tp = (t)}, .dropout = (p)}
#define TURNS(n, t, micro) \
    .at = {.parallel = {   \
               .pp = (n), .tp = (t), .virtual_stages = 2, .schedule = AR_PP_INTERLEAVED, .micro_batches = (micro)}}

#define BUBBLE(d, micro, samples)                                                                     \
    .at = {.parallel = {.pp = 2, .dp = (d), .schedule = AR_PP_ZERO_BUBBLE, .micro_batches = (micro)}, \
           .batch = (samples)}
#define SHARED(d, stage, micro, samples) \
    .at = {.parallel = {.dp = (d), .zero = (stage), .micro_batches = (micro)}, .batch = (samples)}

#define SHARED_STEPS(d, stage, n) .at = {.parallel = {.dp = (d), .zero = (stage)}, .steps = (n)}
#define COPIES(d, groups, stage, samples) \
    .at = {.parallel = {.dp = (d), .dp_replicate = (groups), .zero = (stage)}, .batch = (samples)}

static const expected staged_once[] = {
    {F(pp_sum_loss), "llama", PP(2, 2, 2), "lm_head.logits:bwd", 1, "sum_for_mean: 46 = T, the number of targets"},
    /* The last of four stages divides as it must, the one before it once more. */
    {F(pp_stage_divides), "llama-4", PP(4, 2, 2), "model.layers.2.mlp.down_proj:bwd", 2,
     "scaled_by_stage: layers 3 times 1, 2 times 0.5, 1 times 0.25, 0 times 0.125"},
    {F(pp_layers_local), "llama", PP(2, 2, 2), "model.layers.1.self_attn.q_proj.weight:init", 1,
     "other_layer: model.layers.0.self_attn.q_proj.weight"},
    {F(pp_dropout_layer_local), "llama", PP_DROPOUT(2, 1, 0.1), "model.layers.1.self_attn.attn_dropout:fwd", 1,
     "mask_of_other_layer: model.layers.0.self_attn.attn_dropout"},
    /* Stages 0 and 2 are rank 0's, 1 and 3 rank 1's; counted in a row layers 1 and 2 are exchanged. */
    {F(pp_chunks_contiguous), "llama-4", TURNS(2, 1, 2), "model.layers.1.self_attn.q_proj.weight:init", 1,
     "other_layer: model.layers.2.self_attn.q_proj.weight"},
    {F(pp_gradnorm_own_stage), "llama", PP(2, 1, 2), "grad_norm:clip", 0, "norm_of_own_stages"},
    {F(pp_loss_last_micro_batch), "llama", PP(2, 2, 2), "loss:fwd", 0, "one_micro_batch: the last 1 of 2 samples"},
    {F(muon_of_tied_copy), "gpt2", PP_MUON(2, 2, 2), "transformer.wte.weight:new", 1, "replicas_apart"},
    {F(pp_tied_not_summed), "gpt2", PP(2, 2, 2), "transformer.wte.weight:grad", 0, "missing_all_reduce: over pp"},
    {F(pp_stale_activation), "llama", PP(2, 2, 2), "model.layers.1.input_layernorm:fwd", 1,
     "input_of_other_micro_batch"},
    {F(pp_stale_gradient), "llama", PP(2, 2, 2), "model.layers.0.mlp.down_proj:bwd", 0, "input_of_other_micro_batch"},
    {F(zb_weight_pass_missing), "llama", BUBBLE(1, 2, 2), "lm_head.weight:grad", 1, "one_micro_batch: 0, 1 are in it"},
    {F(zb_tied_counted_twice), "gpt2", BUBBLE(1, 2, 2), "transformer.wte.weight:grad", 0,
     "tied_weight: the head's use of the weight is counted twice"},
    {F(zb_hooks_skipped), "llama", BUBBLE(2, 1, 2), "lm_head.weight:grad", 2, "missing_all_reduce: over dp"},
    {F(zero_last_micro_batch), "llama", SHARED(2, 2, 2, 4), "lm_head.weight:grad", 0, "one_micro_batch"},
    {F(zero_stale_weights), "llama", SHARED_STEPS(2, 3, 2), "model.embed_tokens:fwd", 0, "stale_weights"},
    {F(zero_backward_not_gathered), "llama", SHARED(2, 3, 1, 2), "model.layers.1.mlp.down_proj:bwd", 0,
     "partial_sum: own share alone"},
    {F(zero_gather_order), "llama", SHARED(2, 3, 1, 2), "model.embed_tokens:fwd", 0,
     "shards_misplaced: gathered or loaded in another order"},
    /* A bucket for each parameter: the second half of the embedding is rank 1's. */
    {F(zero_share_off_by_one), "llama", SHARED(2, 2, 1, 2), "model.embed_tokens.weight:new", 0, "share_off_by_one"},
    {F(hsdp_copies_not_summed), "llama", COPIES(4, 2, 2, 3), "lm_head.weight:grad", 0, "missing_all_reduce: over dp"},
};
enum { STAGED_ONCE = sizeof staged_once / sizeof *staged_once };

static const expected staged_elsewhere[] = {
    {F(pp_sum_loss), "gpt2", PP_TP(2, 2, 1, 2), "lm_head.logits:bwd", 2, "sum_for_mean", RING},
    {F(pp_stage_divides), "gpt2", PP_DP(2, 2, 2, 4), "transformer.h.0.mlp.c_proj:bwd", 0,
     "scaled_by_stage: 1 times 1, 0 times 0.5"},
    {F(pp_layers_local), "gpt2", PP_TP(2, 2, 2, 2), "transformer.h.1.ln_1.bias:init", 2,
     "other_layer: transformer.h.0.ln_1.bias"},
    {F(pp_dropout_layer_local), "gpt2", PP_DROPOUT(2, 2, 0.1), "transformer.h.1.attn.attn_dropout:fwd", 2,
     "mask_of_other_layer: transformer.h.0.attn.attn_dropout"},
    {F(pp_chunks_contiguous), "gpt2-4", TURNS(2, 2, 2), "transformer.h.1.ln_1.bias:init", 2,
     "other_layer: transformer.h.2.ln_1.bias"},
    {F(pp_gradnorm_own_stage), "gpt2", PP_TP(2, 2, 2, 2), "grad_norm:clip", 0, "norm_of_own_stages", RING},
    {F(gradnorm_counts_replicas), "gpt2", PP_TP(2, 2, 2, 2), "grad_norm:clip", 0, "norm_counts_twice"},
    {F(pp_loss_last_micro_batch), "gpt2", PP_DP(2, 2, 2, 4), "loss:fwd", 0, "one_micro_batch: the last 1 of 2 samples"},
    {F(muon_of_tied_copy), "gpt2-4", PP_MUON(4, 1, 2), "transformer.wte.weight:new", 3, "replicas_apart"},
    {F(pp_tied_not_summed), "gpt2-4", PP(4, 1, 2), "transformer.wte.weight:grad", 0, "missing_all_reduce: over pp"},
    {F(pp_tied_not_summed), "gpt2", PP_TP(2, 2, 1, 2), "transformer.wte.weight:grad", 0, "missing_all_reduce: over pp",
     RING},
    {F(pp_stale_activation), "gpt2", PP_TP(2, 2, 2, 2), "transformer.h.1.ln_1:fwd", 2, "input_of_other_micro_batch"},
    {F(pp_stale_gradient), "gpt2", PP_DP(2, 2, 2, 4), "transformer.h.0.mlp.c_proj:bwd", 0,
     "input_of_other_micro_batch"},
    {F(zb_weight_pass_missing), "gpt2", BUBBLE(2, 2, 4), "transformer.h.1.mlp.c_proj.weight:grad", 2,
     "one_micro_batch"},
    {F(zb_tied_counted_twice), "gpt2", BUBBLE(2, 2, 4), "transformer.wte.weight:grad", 0,
     "tied_weight: the head's use of the weight is counted twice", RING},
    /* Of four samples two are alike: each rank of dp has half of the sum. */
    {F(zb_hooks_skipped), "gpt2", BUBBLE(2, 2, 4), "transformer.ln_f.weight:grad", 2, "missing_all_reduce: over dp",
     RING},
    {F(zero_last_micro_batch), "gpt2", SHARED(2, 3, 2, 4), "transformer.ln_f.weight:grad", 0, "one_micro_batch", RING},
    {F(zero_stale_weights), "stack", SHARED_STEPS(2, 3, 2), "embed:fwd", 0, "stale_weights"},
    {F(zero_backward_not_gathered), "gpt2", SHARED(4, 3, 1, 4), "transformer.h.1.mlp.c_proj:bwd", 0, "partial_sum"},
    {F(zero_gather_order), "gpt2", SHARED(4, 3, 1, 4), "transformer.wte:fwd", 0, "shards_misplaced"},
    {F(bucket_reduced_twice), "llama", SHARED(2, 2, 1, 4), "lm_head.weight:grad", 0, "reduced_again: a second time"},
    {F(accum_last_only), "llama", SHARED(2, 2, 2, 4), "lm_head.weight:grad", 0, "one_micro_batch"},
    {F(accum_divided_each_time), "gpt2", SHARED(2, 3, 3, 6), "transformer.ln_f.weight:grad", 0,
     "accumulation_divided: 0.1111, 0.3333, 1 are in it"},
    {F(bucket_not_packed), "llama", SHARED(2, 3, 1, 2), "lm_head.weight:grad", 0, "no_gradient"},
    /* Rank 1 keeps the gradients of its only micro-batch. */
    {F(unused_in_last_micro_batch), "llama", SHARED(2, 0, 2, 3), "lm_head.weight:grad", 0, "missing_all_reduce"},
    {F(hsdp_copies_not_summed), "gpt2", COPIES(4, 2, 3, 3), "transformer.ln_f.weight:grad", 0, "missing_all_reduce",
     RING},
    /* The root unit's own buckets alone are reduced together. */
    {F(stale_activation_reuse), "llama", SHARED(4, 3, 1, 4), "lm_head.weight:grad", 0, "unknown"},
};
enum { STAGED_ELSEWHERE = sizeof staged_elsewhere / sizeof *staged_elsewhere };
