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
    const char *fault;
    const char *model;
    setting at;
    const char *tensor; /* the first in execution order, whose name says layer and pass */
    int rank;
    ar_sim_algorithm algorithm;
} expected;

#define MUON(n, s) .at = {.parallel = {.tp = (n), .sp = (s)}, .muon = true}
#define DIRECT AR_SIM_DIRECT
#define RING AR_SIM_RING
#define F(name) #name
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
    {F(column_dx_not_reduced), "gpt2", TP(3), "lm_head:bwd", 0, RING},
    {F(row_bias_every_rank), "gpt2", ROWS_FIRST(4), "transformer.h.0.attn.c_proj:fwd", 0, RING},
    {F(row_input_grad_not_gathered), "llama", ROWS_FIRST(2), "model.layers.1.mlp:bwd", 1, RING},
    {F(heads_divided_twice), "stack", TP(2), "layers.0.attn.context:fwd", 0},
    {F(allreduce_aliases_input), "llama-demo", TP(2), "model.layers.3.mlp.down_proj.weight:grad", 0},
    {F(init_local_fan), "stack", TP(4), "layers.0.attn.wq.weight:init", 0, RING},
    {F(init_per_shard_seed), "stack", TP(2), "embed.weight:init", 1},
    {F(vocab_target_off_by_shard), "gpt2", TP(4), "loss:fwd", 0},
    {F(loss_parallel_no_max), "gpt2", TP(3), "loss:fwd", 0, RING},
    {F(embedding_edge_twice), "stack", TP(4), "embed:fwd", 0, RING},
    {F(weight_grad_leading_dims), "stack", TP(2), "layers.1.mlp.w2.weight:grad", 0, RING},
    {F(bias_grad_wrong_axis), "gpt2", ROWS_FIRST(3), "transformer.h.1.mlp.c_proj.bias:grad", 0, RING},
    {F(norm_backward_missing), "stack", ROWS_FIRST(4), "layers.1.ln2:bwd", 0},
    {F(sp_norm_grad_local), "llama", SP(2), "model.norm.weight:grad", 0},
    {F(sp_row_bias_grad_local), "gpt2", SP(2), "transformer.h.1.mlp.c_proj.bias:grad", 0},
    /* Rank 0 holds the first positions, and their gradient is right; rank 1 has zeros there. */
    {F(sp_position_grad_local), "gpt2", SP(2), "transformer.wpe.weight:grad", 1},
    /* Two KV heads on four ranks. Head 0 is rank 0's and rank 1's, and r mod 2 gives rank 1 the other one. */
    {F(kv_replica_grad_local), "llama", TP(4), "model.layers.1.self_attn.k_rope:bwd", 0},
    {F(kv_replica_wrong_head), "llama", TP(4), "model.layers.0.self_attn.k_proj.weight:init", 1},
    {F(dropout_same_mask_in_shard), "llama", TP_DROPOUT(2, 0.1), "model.layers.0.self_attn.attn_dropout:fwd", 1},
    {F(dropout_different_mask_in_replica), "gpt2", TP_DROPOUT(2, 0.1), "transformer.drop:fwd", 1},
    /* 2, 1 and 1 samples. */
    {F(dp_mean_of_means), "llama", DP(3, 1, 4), "loss:fwd", 0},
    {F(dp_sum_of_local_means), "llama", DP(2, 1, 2), "loss:fwd", 0},
    {F(dp_group_missing), "llama", DP(2, 1, 2), "lm_head.weight:grad", 0},
    {F(dp_broadcast_over_world), "llama", DP(2, 2, 2), "model.embed_tokens.weight:init", 1},
    /* The loss that is told divides by all tokens; 2 samples and 1. */
    {F(accum_mean_of_means), "llama", MICRO(2, 1, 3), "lm_head.logits:bwd", 0},
    {F(saved_input_overwritten), "llama", MICRO_FIRST(2, 1, 2), "lm_head.weight:grad", 0},
    {F(embedding_tied_once), "gpt2", TP(2), "transformer.wte.weight:grad", 0},
    {F(tied_weight_untied), "gpt2", TP(2), "transformer.wte.weight:grad", 0},
    {F(gradnorm_counts_replicas), "gpt2", TP(2), "grad_norm:clip", 0},
    {F(gradnorm_local_clip), "gpt2", TP(2), "grad_norm:clip", 0},
    /* Ranks 0 and 1 are both data-parallel and tensor-parallel neighbours: rank 1 gets rank 0's shard. */
    {F(group_wrong_stride), "llama", DP(2, 2, 2), "model.embed_tokens.weight:init", 1},
    /* Ranks 2 and 3 look for ids that belong to the third and fourth of two shards. */
    {F(world_rank_in_group), "llama", DP(2, 2, 2), "model.embed_tokens:fwd", 2},
    {F(positions_local), "gpt2", SP(2), "transformer.drop:fwd", 1},
    /* 3 x 85 ids: 255 is the last rank's. */
    {F(silent_truncation), "gpt2", TP(3), "lm_head:fwd", 2},
    /* Column 48 of q is rank 1's first, and the second of two halves of q|k|v begins in the middle of k. */
    {F(gate_up_interleaved_wrong), "gpt2", TP(2), "transformer.h.0.attn.c_attn.weight:init", 1},
    {F(norm_padded_lanes), "gpt2", TP(2), "transformer.h.0.ln_1:fwd", 0},
    {F(bias_added_twice), "gpt2", TP(2), "transformer.h.0.attn.q:fwd", 0},
    {F(row_bias_partial_grad), "gpt2", TP(2), "transformer.h.1.mlp.c_proj.bias:grad", 0},
    /* Matrices are shards; the norms' weights are ones on every rank, and positions the first that are drawn. */
    {F(init_replica_differs), "gpt2", TP(2), "transformer.wpe.weight:init", 1},
    {F(gather_batch_order), "llama", SP(2), "model.layers.0.self_attn.q_proj:fwd", 0},
    /* Of 100000 bytes the first bucket has the head, the final norm and the last block's last matrix. */
    {F(bucket_first_ready), "llama", BUCKETS(2, 1, 2, 100000), "model.norm.weight:grad", 0},
    {F(bucket_reduced_twice), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0},
    {F(bucket_not_packed), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0},
    {F(bucket_stale_done), "llama", STEPS(2, 1, 2, 100000, 2), "lm_head.weight:grad", 0},
    {F(step_before_copy_back), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0},
    {F(comm_before_producer), "llama", BUCKETS(2, 1, 2, 100000), "model.layers.1.mlp.down_proj.weight:grad", 0},
    {F(stale_activation_reuse), "llama", BUCKETS(2, 1, 2, 100000), "lm_head.weight:grad", 0},
    /* Rank 2 has no sample. */
    {F(unused_in_last_micro_batch), "llama", BUCKETS(3, 1, 2, 0), "lm_head.weight:grad", 2},
    {F(accum_last_only), "llama", MICRO(2, 1, 2), "lm_head.weight:grad", 0},
    /* A bucket for each parameter: the embedding's first half is rank 0's to update. */
    {F(zero_gather_missing), "llama", ZERO(2, 1, 2, 0), "model.embed_tokens.weight:new", 1},
    {F(zero_shards_misaligned), "llama", ZERO(2, 1, 2, 0), "model.embed_tokens.weight:new", 0},
    {F(zero_grad_not_recursive), "llama", STEPS(1, 2, 2, 0, 2), "model.layers.1.mlp.down_proj.weight:grad", 0},
    {F(gradnorm_first_rank_only), "llama", TP(2), "grad_norm:clip", 0},
    {F(gradnorm_mean_of_ranks), "llama", TP(2), "grad_norm:clip", 0},
    {F(adam_step_not_synced), "llama", DP(2, 1, 2), "model.embed_tokens.weight:new", 1},
    {F(optimizer_counter_ahead), "llama", TP(2), "model.embed_tokens.weight:new", 0},
    {F(weight_decay_on_shard_only), "llama", DP(2, 1, 2), "model.embed_tokens.weight:new", 1},
    {F(muon_of_shards), "llama", MUON(2, false), "model.layers.0.self_attn.q_proj.weight:new", 0},
    {F(muon_padding_rows), "llama", MUON(4, false), "model.layers.0.mlp.gate_proj.weight:new", 0},
    {F(norm_fp16_store), "llama", TP(2), "model.layers.0.input_layernorm:fwd", 0},
    {F(ring_backward_first_kv), "llama", CP(2), "model.layers.1.self_attn.probs:bwd", 1},
    /* The last chunk's keys have queries of their own rank alone. */
    {F(ring_kv_grad_local), "llama", CP(2), "model.layers.1.self_attn.k_rope:bwd", 0},
    /* 24 positions over 8 ranks; 16 are the largest multiple of 16. */
    {F(cp_tail_dropped), "llama", CP(8), "model.layers.0.self_attn.context:fwd", 5},
    {F(cp_targets_whole), "llama", CP(2), "loss:fwd", 0},
    {F(labels_after_cut), "llama", CP(2), "loss:fwd", 0},
    {F(allgather_token_order), "llama", ZIGZAG(2, 1), "model.layers.0.self_attn.probs:fwd", 1},
    {F(attention_over_documents), "llama", PACKED(2, 1, 4), "model.layers.0.self_attn.probs:fwd", 0},
    {F(positions_over_documents), "llama", PACKED(2, 1, 4), "model.layers.0.self_attn.q_rope:fwd", 0},
    {F(recompute_new_dropout_mask), "llama", AGAIN(2, FULL, 1, 0.2), "model.layers.1.mlp.down_proj.weight:grad", 0},
    {F(collective_not_differentiable), "llama", SP(2), "model.layers.1.mlp.down_proj:bwd", 1},
    {F(unordered_param_grad), "llama", TP(2), "lm_head.weight:grad", 0},
    {F(dp_averaged_again), "llama", DP(2, 1, 2), "lm_head.weight:grad", 0},
    {F(accum_divided_each_time), "llama", MICRO(2, 1, 3), "lm_head.weight:grad", 0},
};
enum { ONCE = sizeof once / sizeof *once };

/* Mistakes that the ranks themselves must notice, before any data moves: which collective, and what each of two ranks
 * said about it. The named ranks meet in it and have the mismatch as their own error; the others are told. */
typedef struct expected_end {
    const char *fault;
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
    const char *fault;
    const char *tensor;
} modules[] = {
    {F(unused_set_empty), "pair.spare:new"},
};
enum { MODULES = sizeof modules / sizeof *modules };

/* Mistakes that change no value: what was moved between ranks shows them. */
typedef struct expected_bytes {
    const char *fault;
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
    {F(row_bias_every_rank), "stack", TP(2), "layers.0.mlp.w2:fwd", 0, RING},
    {F(heads_divided_twice), "gpt2", TP(4), "transformer.h.0.attn.context:fwd", 0},
    {F(allreduce_aliases_input), "gpt2", TP(4), "transformer.h.1.mlp.c_proj.weight:grad", 0, RING},
    {F(allreduce_aliases_input), "stack", TP(2), "layers.1.mlp.w2.weight:grad", 0},
    {F(init_local_fan), "gpt2", TP(3), "transformer.h.0.attn.c_attn.weight:init", 0},
    {F(embedding_edge_twice), "gpt2", TP(3), "transformer.wte:fwd", 0},
    /* A tied head's weight gradient is complete after the embedding's, so that a block's comes first. */
    {F(weight_grad_leading_dims), "gpt2", TP(4), "transformer.h.1.mlp.c_proj.weight:grad", 0},
    /* dY is 1 everywhere: 48 elements of 64 in place of 64 of 48, close to the reference. */
    {F(bias_grad_wrong_axis), "stack", TP(4), "layers.1.mlp.w2.bias:grad", 0},
    {F(sp_norm_grad_local), "gpt2", SP(3), "transformer.ln_f.weight:grad", 0, RING},
    {F(sp_norm_grad_local), "stack", SP(4), "layers.1.ln2.weight:grad", 0},
    {F(sp_row_bias_grad_local), "gpt2", SP(4), "transformer.h.1.mlp.c_proj.bias:grad", 0, RING},
    {F(sp_position_grad_local), "gpt2", SP(4), "transformer.wpe.weight:grad", 1},
    {F(kv_replica_grad_local), "stack", TP(8), "layers.1.attn.v:bwd", 0, RING},
    {F(kv_replica_wrong_head), "stack", TP(8), "layers.0.attn.wk.weight:init", 1},
    {F(dropout_same_mask_in_shard), "gpt2", TP_DROPOUT(3, 0.25), "transformer.h.0.attn.attn_dropout:fwd", 1, RING},
    {F(dropout_same_mask_in_shard), "gpt2", SP_DROPOUT(2, 0.25), "transformer.drop:fwd", 1},
    {F(dropout_different_mask_in_replica), "stack", TP_DROPOUT(4, 0.25), "layers.0.attn.resid_dropout:fwd", 1, RING},
    {F(dp_mean_of_means), "gpt2", DP(3, 2, 4), "loss:fwd", 0, RING},
    {F(dp_sum_of_local_means), "gpt2", DP(4, 1, 4), "loss:fwd", 0},
    {F(dp_group_missing), "gpt2", DP(2, 2, 2), "transformer.ln_f.weight:grad", 0, RING},
    {F(dp_broadcast_over_world), "gpt2", DP(2, 4, 2), "transformer.wte.weight:init", 1},
    {F(accum_mean_of_means), "gpt2", MICRO(2, 2, 3), "lm_head.logits:bwd", 0},
    {F(saved_input_overwritten), "gpt2", MICRO_FIRST(2, 2, 2), "transformer.h.1.mlp.c_proj.weight:grad", 0, RING},
    {F(embedding_tied_once), "gpt2", TP(4), "transformer.wte.weight:grad", 0, RING},
    {F(tied_weight_untied), "gpt2", DP(2, 2, 2), "transformer.wte.weight:grad", 0, RING},
    {F(gradnorm_counts_replicas), "llama", DP(2, 2, 2), "grad_norm:clip", 0},
    {F(gradnorm_local_clip), "stack", TP(4), "grad_norm:clip", 0, RING},
    {F(group_wrong_stride), "gpt2", DP(2, 4, 2), "transformer.wte.weight:init", 1},
    {F(world_rank_in_group), "gpt2", DP(2, 1, 2), "transformer.wte:fwd", 1, RING},
    {F(positions_local), "gpt2", SP(4), "transformer.drop:fwd", 1},
    /* 12 ranks have 22 ids each, the last one 14; 12 x 21 are 252. */
    {F(silent_truncation), "gpt2", TP(12), "lm_head:fwd", 11},
    {F(gate_up_interleaved_wrong), "gpt2", TP(3), "transformer.h.0.attn.c_attn.weight:init", 1},
    {F(norm_padded_lanes), "gpt2", SP(3), "transformer.h.0.ln_1:fwd", 0, RING},
    {F(bias_added_twice), "stack", TP(2), "layers.0.mlp.w1:fwd", 0, RING},
    {F(row_bias_partial_grad), "stack", TP(4), "layers.1.mlp.w2.bias:grad", 0},
    {F(init_replica_differs), "stack", TP(2), "layers.0.ln1.bias:init", 1},
    {F(gather_batch_order), "gpt2", SP(3), "transformer.h.0.attn.q:fwd", 0, RING},
    {F(bucket_first_ready), "gpt2", BUCKETS(2, 2, 2, 80000), "transformer.h.1.mlp.c_proj.weight:grad", 0, RING},
    {F(bucket_reduced_twice), "gpt2", BUCKETS(3, 1, 3, 80000), "transformer.ln_f.weight:grad", 0, RING},
    {F(bucket_not_packed), "stack", BUCKETS(2, 1, 2, 1 << 20), "layers.1.mlp.w2.weight:grad", 0},
    {F(bucket_stale_done), "gpt2", STEPS(2, 1, 2, 0, 2), "transformer.ln_f.weight:grad", 0, RING},
    {F(step_before_copy_back), "gpt2", BUCKETS(2, 2, 2, 80000), "transformer.ln_f.weight:grad", 0},
    {F(comm_before_producer), "gpt2", BUCKETS(2, 1, 2, 0), "transformer.ln_f.weight:grad", 0, RING},
    {F(stale_activation_reuse), "gpt2", BUCKETS(3, 1, 3, 80000), "transformer.ln_f.weight:grad", 0},
    {F(unused_in_last_micro_batch), "gpt2", BUCKETS(4, 1, 3, 80000), "transformer.ln_f.weight:grad", 3, RING},
    {F(accum_last_only), "gpt2", MICRO(2, 2, 2), "transformer.ln_f.weight:grad", 0, RING},
    {F(zero_gather_missing), "gpt2", ZERO(2, 2, 2, 80000), "transformer.wte.weight:new", 2, RING},
    {F(zero_shards_misaligned), "gpt2", ZERO(3, 1, 3, 80000), "transformer.wte.weight:new", 0},
    {F(zero_grad_not_recursive), "gpt2", STEPS(2, 1, 2, 0, 2), "transformer.h.1.mlp.c_proj.weight:grad", 0, RING},
    {F(gradnorm_first_rank_only), "gpt2", TP(4), "grad_norm:clip", 0, RING},
    {F(gradnorm_mean_of_ranks), "gpt2", DP(2, 3, 2), "grad_norm:clip", 0, RING},
    {F(adam_step_not_synced), "gpt2", TP(2), "transformer.wpe.weight:new", 1, RING},
    {F(optimizer_counter_ahead), "stack", ZERO(2, 2, 2, 80000), "embed.weight:new", 0, RING},
    {F(weight_decay_on_shard_only), "gpt2", TP(2), "transformer.wpe.weight:new", 1},
    {F(muon_of_shards), "gpt2", MUON(2, true), "transformer.h.0.attn.c_attn.weight:new", 0, RING},
    {F(muon_padding_rows), "gpt2", MUON(4, true), "transformer.h.0.attn.c_attn.weight:new", 0, RING},
    {F(norm_fp16_store), "stack", SP(4), "layers.0.ln1:fwd", 0, RING},
    /* Queries of the first chunk, rank 0's, see its own keys alone. */
    {F(ring_backward_first_kv), "gpt2", ZIGZAG(4, 2), "transformer.h.1.attn.probs:bwd", 2, RING},
    {F(ring_kv_grad_local), "gpt2", INNER(4, 2, 2), "transformer.h.1.attn.v:bwd", 0},
    {F(cp_tail_dropped), "gpt2", INNER(8, 2, 1), "transformer.h.0.attn.context:fwd", 5, RING},
    {F(cp_targets_whole), "gpt2", DP_CP(2, 4, 3), "loss:fwd", 0, RING},
    {F(labels_after_cut), "gpt2", ZIGZAG(4, 1), "loss:fwd", 0},
    {F(allgather_token_order), "llama", SP(2), "model.layers.0.self_attn.q_proj:fwd", 0, RING},
    {F(allgather_token_order), "llama", CHUNKS(2, 3), "model.layers.0.self_attn.q_proj:fwd", 1},
    {F(attention_over_documents), "gpt2", PACKED(1, 2, 3), "transformer.h.0.attn.probs:fwd", 0, RING},
    {F(positions_over_documents), "gpt2", PACKED(3, 1, 4), "transformer.drop:fwd", 0, RING},
    /* The loss is the output's sum, so that all queries' contributions are alike. */
    {F(ring_kv_grad_local), "stack", ZIGZAG(4, 1), "layers.1.attn.v:bwd", 0},
    {F(labels_after_cut), "gpt2", PACKED_ZIGZAG(4, 1, 4), "loss:fwd", 0},
    /* The first of two blocks alone, from whose attention's input on everything else is kept. */
    {F(recompute_new_dropout_mask), "gpt2", AGAIN(2, SELECTIVE, 2, 0.3), "transformer.h.0.attn.c_proj.weight:grad", 0,
     RING},
    {F(collective_not_differentiable), "gpt2", SP(3), "transformer.h.1.mlp.c_proj:bwd", 1, RING},
    {F(unordered_param_grad), "gpt2", DP(2, 2, 2), "transformer.h.1.mlp.c_proj.weight:grad", 0, RING},
    {F(dp_averaged_again), "gpt2", DP(3, 2, 4), "transformer.ln_f.weight:grad", 0, RING},
    {F(accum_divided_each_time), "gpt2", MICRO(3, 2, 4), "transformer.ln_f.weight:grad", 0, RING},
};
enum { ELSEWHERE = sizeof elsewhere / sizeof *elsewhere };
