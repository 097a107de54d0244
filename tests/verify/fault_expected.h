/* SPDX-License-Identifier: Apache-2.0 */
/* What each injectable fault must look like from outside: the expectations stand here, written by hand from
 * models.md and the fault's own text; nothing that explains a difference knows which fault is on. */
#pragma once

#include "anyrank/check.h"
#include "support/row.h"
#include "tests/verify/tiny.h"

typedef struct setting {
    ar_parallel parallel;
    size_t batch; /* 0: BATCH */
    size_t documents;
    double dropout;
    ar_router_losses router;
    int steps; /* 0: 1 */
    bool muon;
    ar_ddp_options ddp;
    ar_mlp_order order;
} setting;

typedef struct expected {
    ar_fault fault;
    const char *model;
    setting at;
    const char *tensor; /* the first in execution order, whose name says layer and pass */
    int rank;
    const char *cause; /* causes.md; after ": ", words of the hint, which alone stand for parts that no rank has */
    ar_sim_algorithm algorithm;
} expected;

#define MUON(n, s) .at = {.parallel = {.tp = (n), .sp = (s)}, .muon = true}
#define DIRECT AR_SIM_DIRECT
#define RING AR_SIM_RING
#define F(name) AR_FAULT_##name
#define TP(n) .at = {.parallel = {.tp = (n)}}
#define ROWS_FIRST(n) .at = {.parallel = {.tp = (n)}, .order = AR_MLP_ROW_COLUMN}
#define SP(n) .at = {.parallel = {.tp = (n), .sp = true}}
#define CHUNKS(n, k) .at = {.parallel = {.tp = (n), .sp = true, .overlap = (k)}}
#define TP_DROPOUT(n, p) .at = {.parallel = {.tp = (n)}, .dropout = (p)}
#define SP_DROPOUT(n, p) .at = {.parallel = {.tp = (n), .sp = true}, .dropout = (p)}
#define DP(d, t, samples) .at = {.parallel = {.dp = (d), .tp = (t)}, .batch = (samples)}
#define MICRO(n, t, samples) .at = {.parallel = {.tp = (t), .micro_batches = (n)}, .batch = (samples)}
#define MICRO_FIRST(n, t, samples) \
    .at = {.parallel = {.tp = (t), .micro_batches = (n), .forward_first = true}, .batch = (samples)}

#define CP(n) .at = {.parallel = {.cp = (n)}}
#define ZIGZAG(n, t) .at = {.parallel = {.cp = (n), .zigzag = true, .tp = (t)}}
#define INNER(n, i, t) .at = {.parallel = {.cp = (n), .cp_inner = (i), .tp = (t)}}
#define DP_CP(d, n, samples) .at = {.parallel = {.dp = (d), .cp = (n)}, .batch = (samples)}
#define PACKED(n, t, most) .at = {.parallel = {.cp = (n), .tp = (t)}, .batch = 4, .documents = (most)}
#define PACKED_ZIGZAG(n, i, most) \
    .at = {.parallel = {.cp = (n), .cp_inner = (i), .zigzag = true}, .batch = 4, .documents = (most)}
#define BUCKETS(d, t, samples, bytes) \
    .at = {.parallel = {.dp = (d), .tp = (t)}, .batch = (samples), .ddp = {.bucket_bytes = (bytes)}}
#define ZERO(d, t, samples, bytes) \
    .at = {.parallel = {.dp = (d), .tp = (t), .zero = 1}, .batch = (samples), .ddp = {.bucket_bytes = (bytes)}}
#define STEPS(d, t, samples, bytes, n) \
    .at = {.parallel = {.dp = (d), .tp = (t)}, .batch = (samples), .steps = (n), .ddp = {.bucket_bytes = (bytes)}}

#define EP(d, n) .at = {.parallel = {.dp = (d), .ep = (n)}, .batch = (d)}
#define AGAIN(t, part, n, p) .at = {.parallel = {.tp = (t), .recompute = {AR_RECOMPUTE_##part, (n)}}, .dropout = (p)}

/* Small enough to be fast; every text below has, early on, the ids at which 2, 3 and 4 ranks split 256 of them. */
enum { BATCH = 2, SEQ = 24 };

static const expected once[] = {
    {F(column_dx_not_reduced), "gpt2", TP(3), "lm_head:bwd", 0, "missing_all_reduce", RING},
    {F(row_bias_every_rank), "gpt2", ROWS_FIRST(4), "transformer.h.0.attn.c_proj:fwd", 0, "bias_counted_again", RING},
    {F(row_input_grad_not_gathered), "llama", ROWS_FIRST(2), "model.layers.1.mlp:bwd", 1, "missing_all_gather", RING},
    {F(heads_divided_twice), "stack", TP(2), "layers.0.attn.context:fwd", 0, "divided_twice"},
    {F(allreduce_aliases_input), "llama-demo", TP(2), "model.layers.3.mlp.down_proj.weight:grad", 0,
     "input_overwritten"},
    {F(init_local_fan), "stack", TP(4), "layers.0.attn.wq.weight:init", 0, "init_scale_of_shard", RING},
    {F(init_per_shard_seed), "stack", TP(2), "embed.weight:init", 1, "shards_seeded_alike"},
    {F(vocab_target_off_by_shard), "gpt2", TP(4), "loss:fwd", 0, "target_logit"},
    {F(loss_parallel_no_max), "gpt2", TP(3), "loss:fwd", 0, "loss_without_common_maximum", RING},
    {F(embedding_edge_twice), "stack", TP(4), "embed:fwd", 0, "ids_at_shard_edge", RING},
    {F(weight_grad_leading_dims), "stack", TP(2), "layers.1.mlp.w2.weight:grad", 0, "one_sample", RING},
    {F(bias_grad_wrong_axis), "gpt2", ROWS_FIRST(3), "transformer.h.1.mlp.c_proj.bias:grad", 0,
     "bias_gradient_wrong_axis", RING},
    {F(norm_backward_missing), "stack", ROWS_FIRST(4), "layers.1.ln2:bwd", 0, "norm_backward_missing"},
    {F(sp_norm_grad_local), "llama", SP(2), "model.norm.weight:grad", 0, "missing_all_reduce: over tp"},
    {F(sp_row_bias_grad_local), "gpt2", SP(2), "transformer.h.1.mlp.c_proj.bias:grad", 0,
     "missing_all_reduce: over tp"},
    /* Rank 0 holds the first positions, and their gradient is right; rank 1 has zeros there. */
    {F(sp_position_grad_local), "gpt2", SP(2), "transformer.wpe.weight:grad", 1, "missing_all_reduce: over tp"},
    /* Two KV heads on four ranks. Head 0 is rank 0's and rank 1's, and r mod 2 gives rank 1 the other one. */
    {F(kv_replica_grad_local), "llama", TP(4), "model.layers.1.self_attn.k_rope:bwd", 0, "missing_all_reduce: over tp"},
    {F(kv_replica_wrong_head), "llama", TP(4), "model.layers.0.self_attn.k_proj.weight:init", 1, "wrong_kv_head"},
    {F(dropout_same_mask_in_shard), "llama", TP_DROPOUT(2, 0.1), "model.layers.0.self_attn.attn_dropout:fwd", 1,
     "mask_of_shard_index"},
    {F(dropout_different_mask_in_replica), "gpt2", TP_DROPOUT(2, 0.1), "transformer.drop:fwd", 1,
     "mask_differs_in_replica"},
    /* 2, 1 and 1 samples. */
    {F(dp_mean_of_means), "llama", DP(3, 1, 4), "loss:fwd", 0, "mean_of_means: data-parallel ranks"},
    {F(dp_sum_of_local_means), "llama", DP(2, 1, 2), "loss:fwd", 0, "sum_of_local_means: times 2"},
    {F(dp_group_missing), "llama", DP(2, 1, 2), "lm_head.weight:grad", 0, "missing_all_reduce: over dp"},
    {F(dp_broadcast_over_world), "llama", DP(2, 2, 2), "model.embed_tokens.weight:init", 1, "shards_seeded_alike"},
    /* The loss that is told divides by all tokens; 2 samples and 1. */
    {F(accum_mean_of_means), "llama", MICRO(2, 1, 3), "lm_head.logits:bwd", 0, "mean_of_means"},
    {F(saved_input_overwritten), "llama", MICRO_FIRST(2, 1, 2), "lm_head.weight:grad", 0, "input_of_other_micro_batch"},
    {F(embedding_tied_once), "gpt2", TP(2), "transformer.wte.weight:grad", 0, "tied_weight"},
    {F(tied_weight_untied), "gpt2", TP(2), "transformer.wte.weight:grad", 0, "tied_weight: use in the head"},
    {F(gradnorm_counts_replicas), "gpt2", TP(2), "grad_norm:clip", 0, "norm_counts_twice"},
    {F(gradnorm_local_clip), "gpt2", TP(2), "grad_norm:clip", 0, "norm_of_own_shards"},
    /* Ranks 0 and 1 are both data-parallel and tensor-parallel neighbours: rank 1 gets rank 0's shard. */
    {F(group_wrong_stride), "llama", DP(2, 2, 2), "model.embed_tokens.weight:init", 1, "wrong_group: groups"},
    /* Ranks 2 and 3 look for ids that belong to the third and fourth of two shards. */
    {F(world_rank_in_group), "llama", DP(2, 2, 2), "model.embed_tokens:fwd", 2, "world_rank_in_group"},
    {F(positions_local), "gpt2", SP(2), "transformer.drop:fwd", 1, "positions"},
    /* 3 x 85 ids: 255 is the last rank's. */
    {F(silent_truncation), "gpt2", TP(3), "lm_head:fwd", 2, "ids_of_nobody"},
    /* Column 48 of q is rank 1's first, and the second of two halves of q|k|v begins in the middle of k. */
    {F(gate_up_interleaved_wrong), "gpt2", TP(2), "transformer.h.0.attn.c_attn.weight:init", 1, "packed_cut_as_one"},
    {F(norm_padded_lanes), "gpt2", TP(2), "transformer.h.0.ln_1:fwd", 0, "norm_over_padding: padding included"},
    {F(bias_added_twice), "gpt2", TP(2), "transformer.h.0.attn.q:fwd", 0, "bias_counted_again"},
    {F(row_bias_partial_grad), "gpt2", TP(2), "transformer.h.1.mlp.c_proj.bias:grad", 0, "averaged_again: times 0.5"},
    /* Matrices are shards; the norms' weights are ones on every rank, and positions the first that are drawn. */
    {F(init_replica_differs), "gpt2", TP(2), "transformer.wpe.weight:init", 1, "replicas_apart"},
    {F(gather_batch_order), "llama", SP(2), "model.layers.0.self_attn.q_proj:fwd", 0, "gathered_in_rank_order"},
    /* Of 100000 bytes the first bucket has the head, the final norm and the last block's last matrix. */
    {F(bucket_first_ready), "llama", BUCKETS(2, 1, 2, 100000), "model.norm.weight:grad", 0,
     "no_gradient: bucket was reduced before"},
    {F(bucket_reduced_twice), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0, "reduced_again"},
    {F(bucket_not_packed), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0, "no_gradient"},
    {F(bucket_stale_done), "llama", STEPS(2, 1, 2, 100000, 2), "lm_head.weight:grad", 0,
     "missing_all_reduce: in the step before"},
    {F(step_before_copy_back), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0,
     "missing_all_reduce: over dp"},
    {F(comm_before_producer), "llama", BUCKETS(2, 1, 2, 100000), "model.layers.1.mlp.down_proj.weight:grad", 0,
     "no_gradient: bucket was reduced before"},
    {F(stale_activation_reuse), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0, "other_input"},
    /* Rank 2 has no sample. */
    {F(unused_in_last_micro_batch), "llama", BUCKETS(3, 1, 2, 0), "lm_head.weight:grad", 2,
     "zeros_of_ranks: rank 2 alone"},
    {F(accum_last_only), "llama", MICRO(2, 1, 2), "lm_head.weight:grad", 0,
     "one_micro_batch: of 2 micro-batches' contributions"},
    /* A bucket for each parameter: the embedding's first half is rank 0's to update. */
    {F(zero_gather_missing), "llama", ZERO(2, 1, 2, 0), "model.embed_tokens.weight:new", 1, "shares_not_gathered"},
    {F(zero_shards_misaligned), "llama", ZERO(2, 1, 2, 0), "model.embed_tokens.weight:new", 0, "shares_misaligned"},
    {F(zero_grad_not_recursive), "llama", STEPS(1, 2, 2, 0, 2), "model.layers.1.mlp.down_proj.weight:grad", 0,
     "gradient_not_zeroed: plus that of step 1"},
    {F(gradnorm_first_rank_only), "llama", TP(2), "grad_norm:clip", 0, "norm_leaves_out"},
    {F(gradnorm_mean_of_ranks), "llama", TP(2), "grad_norm:clip", 0, "norm_mean_of_ranks"},
    {F(adam_step_not_synced), "llama", DP(2, 1, 2), "model.embed_tokens.weight:new", 1, "adam_step_not_synced"},
    {F(optimizer_counter_ahead), "llama", TP(2), "model.embed_tokens.weight:new", 0,
     "adam_step_counter: step 2 would be in step 1"},
    {F(weight_decay_on_shard_only), "llama", DP(2, 1, 2), "model.embed_tokens.weight:new", 1, "decay_of_ranks_apart"},
    {F(muon_of_shards), "llama", MUON(2, false), "model.layers.0.self_attn.q_proj.weight:new", 0,
     "muon_of_shards: each of 2 parts of the matrix, cut along its rows"},
    {F(muon_padding_rows), "llama", MUON(4, false), "model.layers.0.mlp.gate_proj.weight:new", 0,
     "muon_padding_rows: 128 rows, and the matrix has 96"},
    {F(norm_fp16_store), "llama", TP(2), "model.layers.0.input_layernorm:fwd", 0, "fewer_bits"},
    {F(ring_backward_first_kv), "llama", CP(2), "model.layers.1.self_attn.probs:bwd", 1,
     "ring_own_keys: another of 2 places"},
    /* The last chunk's keys have queries of their own rank alone. */
    {F(ring_kv_grad_local), "llama", CP(2), "model.layers.1.self_attn.k_rope:bwd", 0,
     "missing_reduce_scatter: over the ring of 2"},
    /* 24 positions over 8 ranks; 16 are the largest multiple of 16. */
    {F(cp_tail_dropped), "llama", CP(8), "model.layers.0.self_attn.context:fwd", 5,
     "sequence_floored: 16 is 24 rounded down to a multiple of 16"},
    {F(cp_targets_whole), "llama", CP(2), "loss:fwd", 0, "averaged_again: 0.5 = 1/cp"},
    {F(labels_after_cut), "llama", CP(2), "loss:fwd", 0, "labels_shifted: by each of 2 ranks among its own tokens, so"},
    {F(allgather_token_order), "llama", ZIGZAG(2, 1), "model.layers.0.self_attn.probs:fwd", 1,
     "zigzag_order: those of 2 context-parallel ranks"},
    {F(attention_over_documents), "llama", PACKED(2, 1, 4), "model.layers.0.self_attn.probs:fwd", 0,
     "attention_across_documents: have a key of another document"},
    {F(positions_over_documents), "llama", PACKED(2, 1, 4), "model.layers.0.self_attn.q_rope:fwd", 0,
     "positions_over_documents"},
    {F(recompute_new_dropout_mask), "llama", AGAIN(2, FULL, 1, 0.2), "model.layers.1.mlp.down_proj.weight:grad", 0,
     "input_of_second_pass"},
    {F(collective_not_differentiable), "llama", SP(2), "model.layers.1.mlp.down_proj:bwd", 1,
     "collective_without_backward"},
    {F(unordered_param_grad), "llama", TP(2), "lm_head.weight:grad", 0, "unordered_sum"},
    {F(dp_averaged_again), "llama", DP(2, 1, 2), "lm_head.weight:grad", 0, "averaged_again: 0.5 = 1/dp"},
    {F(accum_divided_each_time), "llama", MICRO(2, 1, 3), "lm_head.weight:grad", 0,
     "accumulation_divided: 0.5, 1 are in it"},
};
enum { ONCE = sizeof once / sizeof *once };

/* Mistakes that the ranks themselves must notice, before any data moves: which collective, and what each of two ranks
 * said about it. The named ranks meet in it and have the mismatch as their own error; the others are told. */
typedef struct expected_end {
    ar_fault fault;
    const char *model;
    setting at;
    ar_sim_algorithm algorithm;
    const char *says[3];
    unsigned meet; /* bit r: rank r is among those that meet */
    unsigned left; /* bit r: rank r has returned, and knows of nothing */
} expected_end;

static const expected_end ends[] = {
    /* A bucket for each parameter, the last registered first: the last norm's bias and weight, of one shape. */
    ROW(F(collective_order_swapped), "gpt2", DP(2, 1, 0), DIRECT,
        {"ranks 0 and 1", "tag 'bucket 0: transformer.ln_f.bias' against 'bucket 1: transformer.ln_f.weight'",
         "different orders"},
        3, 0),
    ROW(F(collective_order_swapped), "gpt2", SP(2), RING,
        {"ranks 0 and 1", "tag 'bucket 0: transformer.ln_f.bias' against 'bucket 1: transformer.ln_f.weight'",
         "different orders"},
        3, 0),
    /* Of ranks 0 to 3 with tp 2, ranks 1 and 3 share their parameters. */
    ROW(F(collective_order_swapped), "llama", DP(2, 2, 0), DIRECT,
        {"ranks 1 and 3", "'bucket 1: model.norm.weight'", "'bucket 0: lm_head.weight'"}, 10, 0),
    ROW(F(collective_size_mismatch), "llama", TP(2), DIRECT, {"ranks 0 and 1", "'loss max'", "count 48 against 47"}, 3,
        0),
    ROW(F(collective_size_mismatch), "gpt2", SP(3), RING, {"ranks 0 and 1", "'loss max'", "count 48 against 47"}, 7, 0),
    ROW(F(collective_dtype_mismatch), "llama", DP(2, 1, 0), DIRECT,
        {"ranks 0 and 1", "'model.embed_tokens.weight'", "dtype F32 against BF16"}, 3, 0),
    ROW(F(collective_dtype_mismatch), "gpt2", DP(3, 1, 3), RING,
        {"ranks 0 and 1", "'transformer.wte.weight'", "dtype F32 against BF16"}, 7, 0),
    /* Rank 2 has no sample, and no gradient to reduce. */
    ROW(F(unused_skips_collective), "llama", BUCKETS(3, 1, 2, 100000), DIRECT,
        {"rank 2 returned while rank", "'bucket 0: lm_head.weight'", "collective #1 of ranks 0-2"}, 3, 4),
    ROW(F(unused_skips_collective), "gpt2", BUCKETS(3, 1, 2, 0), RING,
        {"rank 2 returned while rank", "'bucket 0: transformer.ln_f.bias'", "collective #1 of ranks 0-2"}, 3, 4),
};
enum { ENDS = sizeof ends / sizeof *ends };

/* Mistakes that a module shows and no transformer: of verify/faults/fault_module.c, in the fault's own case. */
static const struct {
    ar_fault fault;
    const char *tensor, *cause;
} modules[] = {
    {F(unused_set_empty), "pair.spare:new", "decay_without_gradient"},
};
enum { MODULES = sizeof modules / sizeof *modules };

/* Mistakes that change no value: what was moved between ranks shows them. */
typedef struct expected_bytes {
    ar_fault fault;
    const char *model;
    setting at;
    const char *cause, *says; /* of the collective that is another one */
} expected_bytes;

static const expected_bytes bytes_alone[] = {
    {F(qkv_gathered_three_times), "llama", SP(2), "collective_repeated",
     "all_gather of 2 ranks, 3072 F32, 'model.layers.0.self_attn.q_proj.weight' is made 2 times more"},
    {F(qkv_gathered_three_times), "gpt2", SP(3), "collective_repeated",
     "all_gather of 3 ranks, 4608 F32, 'transformer.h.0.attn.c_attn.weight' is made 2 times more"},
};
enum { BYTES_ALONE = sizeof bytes_alone / sizeof *bytes_alone };

/* The same on other models, numbers of ranks, orders of the MLP, and with the ring. */
static const char *const small_names[] = {"llama",     "gpt2",   "stack",    "llama-4", "gpt2-4", "mixtral",
                                          "qwen2-moe", "routed", "deepseek", "further", "open"};
static const char *const small_models[] = {LLAMA(256, 64, 96, 2, 8, 2, 8, false),
                                           GPT2(256, 96, 192, 2, 12),
                                           STACK(256, 64, 96, 2, 8, 4),
                                           LLAMA(256, 32, 48, 4, 4, 2, 8, false),
                                           GPT2(256, 48, 96, 4, 4),
                                           MIXTRAL(256, 32, 48, 2, 8, 2, 6, 2),
                                           QWEN_MOE(256, 32, 16, 24, 2, 8, 4, 32, 4),
                                           GLM_MOE(256, 32, 16, 2, 8, 4, 16, 4, 4, 2),
                                           DEEPSEEK(256, 32, 16, 2, 4, 12, 8, 2),
                                           FURTHER(256, 32, 48, 2, 4, 2, 8),
                                           OPEN(256, 32, 16, 2, 8, 4, 8, 2)};
enum { SMALL_MODELS = sizeof small_models / sizeof *small_models };

static const expected elsewhere[] = {
    {F(row_bias_every_rank), "stack", TP(2), "layers.0.mlp.w2:fwd", 0, "bias_counted_again", RING},
    {F(heads_divided_twice), "gpt2", TP(4), "transformer.h.0.attn.context:fwd", 0, "no_head_computed"},
    {F(allreduce_aliases_input), "gpt2", TP(4), "transformer.h.1.mlp.c_proj.weight:grad", 0, "other_input", RING},
    {F(allreduce_aliases_input), "stack", TP(2), "layers.1.mlp.w2.weight:grad", 0, "other_input"},
    {F(init_local_fan), "gpt2", TP(3), "transformer.h.0.attn.c_attn.weight:init", 0, "init_scale_of_shard"},
    {F(embedding_edge_twice), "gpt2", TP(3), "transformer.wte:fwd", 0, "ids_at_shard_edge"},
    /* A tied head's weight gradient is complete after the embedding's, so that a block's comes first. */
    {F(weight_grad_leading_dims), "gpt2", TP(4), "transformer.h.1.mlp.c_proj.weight:grad", 0, "one_sample"},
    /* dY is 1 everywhere: 48 elements of 64 in place of 64 of 48, close to the reference. */
    {F(bias_grad_wrong_axis), "stack", TP(4), "layers.1.mlp.w2.bias:grad", 0, "unknown"},
    {F(sp_norm_grad_local), "gpt2", SP(3), "transformer.ln_f.weight:grad", 0, "missing_all_reduce: over tp", RING},
    {F(sp_norm_grad_local), "stack", SP(4), "layers.1.ln2.weight:grad", 0, "missing_all_reduce: over tp"},
    {F(sp_row_bias_grad_local), "gpt2", SP(4), "transformer.h.1.mlp.c_proj.bias:grad", 0, "missing_all_reduce: over tp",
     RING},
    {F(sp_position_grad_local), "gpt2", SP(4), "transformer.wpe.weight:grad", 1, "missing_all_reduce: over tp"},
    {F(kv_replica_grad_local), "stack", TP(8), "layers.1.attn.v:bwd", 0, "missing_all_reduce: over tp", RING},
    {F(kv_replica_wrong_head), "stack", TP(8), "layers.0.attn.wk.weight:init", 1, "wrong_kv_head"},
    {F(dropout_same_mask_in_shard), "gpt2", TP_DROPOUT(3, 0.25), "transformer.h.0.attn.attn_dropout:fwd", 1,
     "mask_of_shard_index", RING},
    {F(dropout_same_mask_in_shard), "gpt2", SP_DROPOUT(2, 0.25), "transformer.drop:fwd", 1, "mask_of_shard_index"},
    {F(dropout_different_mask_in_replica), "stack", TP_DROPOUT(4, 0.25), "layers.0.attn.resid_dropout:fwd", 1,
     "mask_differs_in_replica", RING},
    {F(dp_mean_of_means), "gpt2", DP(3, 2, 4), "loss:fwd", 0, "mean_of_means: data-parallel ranks", RING},
    {F(dp_sum_of_local_means), "gpt2", DP(4, 1, 4), "loss:fwd", 0, "sum_of_local_means: times 4"},
    {F(dp_group_missing), "gpt2", DP(2, 2, 2), "transformer.ln_f.weight:grad", 0, "missing_all_reduce: over dp", RING},
    {F(dp_broadcast_over_world), "gpt2", DP(2, 4, 2), "transformer.wte.weight:init", 1, "shards_seeded_alike"},
    {F(accum_mean_of_means), "gpt2", MICRO(2, 2, 3), "lm_head.logits:bwd", 0, "mean_of_means"},
    {F(saved_input_overwritten), "gpt2", MICRO_FIRST(2, 2, 2), "transformer.h.1.mlp.c_proj.weight:grad", 0,
     "input_of_other_micro_batch", RING},
    {F(embedding_tied_once), "gpt2", TP(4), "transformer.wte.weight:grad", 0, "tied_weight", RING},
    {F(tied_weight_untied), "gpt2", DP(2, 2, 2), "transformer.wte.weight:grad", 0, "tied_weight: use in the head",
     RING},
    {F(gradnorm_counts_replicas), "llama", DP(2, 2, 2), "grad_norm:clip", 0, "norm_counts_twice"},
    {F(gradnorm_local_clip), "stack", TP(4), "grad_norm:clip", 0, "norm_of_own_shards", RING},
    {F(group_wrong_stride), "gpt2", DP(2, 4, 2), "transformer.wte.weight:init", 1, "wrong_group: groups"},
    {F(world_rank_in_group), "gpt2", DP(2, 1, 2), "transformer.wte:fwd", 1, "world_rank_in_group", RING},
    {F(positions_local), "gpt2", SP(4), "transformer.drop:fwd", 1, "positions"},
    /* 12 ranks have 22 ids each, the last one 14; 12 x 21 are 252. */
    {F(silent_truncation), "gpt2", TP(12), "lm_head:fwd", 11, "ids_of_nobody"},
    {F(gate_up_interleaved_wrong), "gpt2", TP(3), "transformer.h.0.attn.c_attn.weight:init", 1, "packed_cut_as_one"},
    {F(norm_padded_lanes), "gpt2", SP(3), "transformer.h.0.ln_1:fwd", 0, "norm_over_padding: padding included", RING},
    {F(bias_added_twice), "stack", TP(2), "layers.0.mlp.w1:fwd", 0, "bias_counted_again", RING},
    {F(row_bias_partial_grad), "stack", TP(4), "layers.1.mlp.w2.bias:grad", 0, "averaged_again: times 0.25"},
    {F(init_replica_differs), "stack", TP(2), "layers.0.ln1.bias:init", 1, "replicas_apart"},
    {F(gather_batch_order), "gpt2", SP(3), "transformer.h.0.attn.q:fwd", 0, "gathered_in_rank_order", RING},
    {F(bucket_first_ready), "gpt2", BUCKETS(2, 2, 2, 80000), "transformer.h.1.mlp.c_proj.weight:grad", 0,
     "no_gradient: bucket was reduced before", RING},
    {F(bucket_reduced_twice), "gpt2", BUCKETS(3, 1, 3, 80000), "transformer.ln_f.weight:grad", 0,
     "reduced_again: times 3 = dp", RING},
    {F(bucket_not_packed), "stack", BUCKETS(2, 1, 2, 1 << 20), "layers.1.mlp.w2.weight:grad", 0, "no_gradient"},
    {F(bucket_stale_done), "gpt2", STEPS(2, 1, 2, 0, 2), "transformer.ln_f.weight:grad", 0,
     "missing_all_reduce: over dp", RING},
    {F(step_before_copy_back), "gpt2", BUCKETS(2, 2, 2, 80000), "transformer.ln_f.weight:grad", 0,
     "missing_all_reduce: over dp"},
    {F(comm_before_producer), "gpt2", BUCKETS(2, 1, 2, 0), "transformer.ln_f.weight:grad", 0,
     "no_gradient: bucket was reduced before", RING},
    {F(stale_activation_reuse), "gpt2", BUCKETS(3, 1, 3, 80000), "transformer.ln_f.weight:grad", 0, "other_input"},
    {F(unused_in_last_micro_batch), "gpt2", BUCKETS(4, 1, 3, 80000), "transformer.ln_f.weight:grad", 3,
     "zeros_of_ranks: rank 3 alone", RING},
    {F(accum_last_only), "gpt2", MICRO(2, 2, 2), "transformer.ln_f.weight:grad", 0,
     "one_micro_batch: of 2 micro-batches' contributions", RING},
    {F(zero_gather_missing), "gpt2", ZERO(2, 2, 2, 80000), "transformer.wte.weight:new", 2, "shares_not_gathered",
     RING},
    {F(zero_shards_misaligned), "gpt2", ZERO(3, 1, 3, 80000), "transformer.wte.weight:new", 0, "shares_misaligned"},
    {F(zero_grad_not_recursive), "gpt2", STEPS(2, 1, 2, 0, 2), "transformer.h.1.mlp.c_proj.weight:grad", 0,
     "gradient_not_zeroed: plus 2 times that of step 1", RING},
    {F(gradnorm_first_rank_only), "gpt2", TP(4), "grad_norm:clip", 0, "norm_leaves_out", RING},
    {F(gradnorm_mean_of_ranks), "gpt2", DP(2, 3, 2), "grad_norm:clip", 0, "norm_mean_of_ranks", RING},
    {F(adam_step_not_synced), "gpt2", TP(2), "transformer.wpe.weight:new", 1, "adam_step_not_synced", RING},
    {F(optimizer_counter_ahead), "stack", ZERO(2, 2, 2, 80000), "embed.weight:new", 0,
     "adam_step_counter: step 2 would be in step 1", RING},
    {F(weight_decay_on_shard_only), "gpt2", TP(2), "transformer.wpe.weight:new", 1, "decay_of_ranks_apart"},
    {F(muon_of_shards), "gpt2", MUON(2, true), "transformer.h.0.attn.c_attn.weight:new", 0, "muon_of_shards: 2 parts",
     RING},
    {F(muon_padding_rows), "gpt2", MUON(4, true), "transformer.h.0.attn.c_attn.weight:new", 0,
     "muon_padding_rows: 128 rows, and the matrix has 96", RING},
    {F(norm_fp16_store), "stack", SP(4), "layers.0.ln1:fwd", 0, "fewer_bits", RING},
    /* Queries of the first chunk, rank 0's, see its own keys alone. */
    {F(ring_backward_first_kv), "gpt2", ZIGZAG(4, 2), "transformer.h.1.attn.probs:bwd", 2,
     "ring_own_keys: another of 4 places", RING},
    {F(ring_kv_grad_local), "gpt2", INNER(4, 2, 2), "transformer.h.1.attn.v:bwd", 0, "missing_reduce_scatter"},
    {F(cp_tail_dropped), "gpt2", INNER(8, 2, 1), "transformer.h.0.attn.context:fwd", 5, "sequence_floored", RING},
    {F(cp_targets_whole), "gpt2", DP_CP(2, 4, 3), "loss:fwd", 0, "averaged_again: 0.25 = 1/cp", RING},
    {F(labels_after_cut), "gpt2", ZIGZAG(4, 1), "loss:fwd", 0,
     "labels_shifted: by each of 4 ranks among its own tokens, the r-th chunk from either end"},
    {F(allgather_token_order), "llama", SP(2), "model.layers.0.self_attn.q_proj:fwd", 0, "zigzag_order", RING},
    {F(allgather_token_order), "llama", CHUNKS(2, 3), "model.layers.0.self_attn.q_proj:fwd", 1, "token_blocks_rotated"},
    {F(attention_over_documents), "gpt2", PACKED(1, 2, 3), "transformer.h.0.attn.probs:fwd", 0,
     "attention_across_documents", RING},
    {F(positions_over_documents), "gpt2", PACKED(3, 1, 4), "transformer.drop:fwd", 0, "positions_over_documents", RING},
    /* The loss is the output's sum, so that all queries' contributions are alike. */
    {F(ring_kv_grad_local), "stack", ZIGZAG(4, 1), "layers.1.attn.v:bwd", 0, "missing_reduce_scatter"},
    {F(labels_after_cut), "gpt2", PACKED_ZIGZAG(4, 1, 4), "loss:fwd", 0,
     "labels_shifted: by each of 4 ranks among its own tokens, the r-th chunk from either end"},
    /* The first of two blocks alone, from whose attention's input on everything else is kept. */
    {F(recompute_new_dropout_mask), "gpt2", AGAIN(2, SELECTIVE, 2, 0.3), "transformer.h.0.attn.c_proj.weight:grad", 0,
     "input_of_second_pass", RING},
    {F(collective_not_differentiable), "gpt2", SP(3), "transformer.h.1.mlp.c_proj:bwd", 1,
     "collective_without_backward", RING},
    {F(unordered_param_grad), "gpt2", DP(2, 2, 2), "transformer.h.1.mlp.c_proj.weight:grad", 0, "unordered_sum", RING},
    {F(dp_averaged_again), "gpt2", DP(3, 2, 4), "transformer.ln_f.weight:grad", 0, "averaged_again: 1/dp", RING},
    {F(accum_divided_each_time), "gpt2", MICRO(3, 2, 4), "transformer.ln_f.weight:grad", 0,
     "accumulation_divided: 0.1111, 0.3333, 1 are in it", RING},
};
enum { ELSEWHERE = sizeof elsewhere / sizeof *elsewhere };
