/* SPDX-License-Identifier: Apache-2.0 */
/* What each injectable fault must look like from outside: the expectations stand here, written by hand from
 * docs/names.md and the fault's own text; nothing that explains a difference knows which fault is on. */
#include "tests/verify/support.h"
#include "verify/check_base.h"
#include "verify/check_run.h"
#include "verify/fault_module.h"

typedef struct setting {
    ar_parallel parallel;
    size_t batch; /* 0: BATCH */
    double dropout;
    int steps; /* 0: 1 */
    ar_ddp_options ddp;
} setting;

typedef struct expected {
    ar_fault fault;
    const char *model;
    setting at;
    ar_mlp_order order;
    ar_sim_algorithm algorithm;
    const char *tensor; /* the first in execution order */
    const char *pass;
    int layer, rank;
    const char *hint; /* words that it must contain */
} expected;

#define CR AR_MLP_COLUMN_ROW
#define RC AR_MLP_ROW_COLUMN
#define DIRECT AR_SIM_DIRECT
#define RING AR_SIM_RING
#define F(name) AR_FAULT_##name
#define TP(n)                    \
    {                            \
        .parallel = {.tp = (n) } \
    }
#define SP(n)                                \
    {                                        \
        .parallel = {.tp = (n), .sp = true } \
    }
#define TP_DROPOUT(n, p)                        \
    {                                           \
        .parallel = {.tp = (n)}, .dropout = (p) \
    }
#define SP_DROPOUT(n, p)                                    \
    {                                                       \
        .parallel = {.tp = (n), .sp = true}, .dropout = (p) \
    }
#define DP(d, t, samples)                                      \
    {                                                          \
        .parallel = {.dp = (d), .tp = (t)}, .batch = (samples) \
    }
#define MICRO(n, t, samples)                                              \
    {                                                                     \
        .parallel = {.tp = (t), .micro_batches = (n)}, .batch = (samples) \
    }
#define MICRO_FIRST(n, t, samples)                                                               \
    {                                                                                            \
        .parallel = {.tp = (t), .micro_batches = (n), .forward_first = true}, .batch = (samples) \
    }

#define BUCKETS(d, t, samples, bytes)                                                             \
    {                                                                                             \
        .parallel = {.dp = (d), .tp = (t)}, .batch = (samples), .ddp = {.bucket_bytes = (bytes) } \
    }
#define ZERO(d, t, samples, bytes)                                                                           \
    {                                                                                                        \
        .parallel = {.dp = (d), .tp = (t), .zero = 1}, .batch = (samples), .ddp = {.bucket_bytes = (bytes) } \
    }
#define STEPS(d, t, samples, bytes, n)                                                                          \
    {                                                                                                           \
        .parallel = {.dp = (d), .tp = (t)}, .batch = (samples), .steps = (n), .ddp = {.bucket_bytes = (bytes) } \
    }

/* Small enough to be fast; every text below has, early on, the ids at which 2, 3 and 4 ranks split 256 of them. */
enum { BATCH = 2, SEQ = 24 };

static const expected once[] = {
    {F(column_dx_not_reduced), "llama-demo", TP(2), CR, DIRECT, "lm_head:bwd", "backward", -1, 0, "missing all-reduce"},
    {F(row_bias_every_rank), "gpt2-demo", TP(2), CR, DIRECT, "transformer.h.0.attn.c_proj:fwd", "forward", 0, 0,
     "bias"},
    {F(row_input_grad_not_gathered), "gpt2-demo", TP(2), RC, DIRECT, "transformer.h.3.mlp.c_fc:bwd", "backward", 3, 1,
     "missing all-gather"},
    {F(heads_divided_twice), "llama-demo", TP(2), CR, DIRECT, "model.layers.0.self_attn.context:fwd", "forward", 0, 0,
     "local head count"},
    {F(allreduce_aliases_input), "llama-demo", TP(2), CR, DIRECT, "model.layers.3.mlp.down_proj.weight:grad",
     "backward", 3, 0, "overwritten"},
    {F(init_local_fan), "llama-demo", TP(2), CR, DIRECT, "model.layers.0.self_attn.q_proj.weight:init", "init", 0, 0,
     "fans of the shard"},
    {F(init_per_shard_seed), "llama-demo", TP(2), CR, DIRECT, "model.embed_tokens.weight:init", "init", -1, 1,
     "seeded alike"},
    {F(vocab_target_off_by_shard), "llama-demo", TP(2), CR, DIRECT, "loss:fwd", "forward", -1, 0, "target"},
    {F(loss_parallel_no_max), "llama-demo", TP(2), CR, DIRECT, "loss:fwd", "forward", -1, 0, "maximum"},
    {F(embedding_edge_twice), "llama-demo", TP(2), CR, DIRECT, "model.embed_tokens:fwd", "forward", -1, 0,
     "shard's edge"},
    {F(weight_grad_leading_dims), "llama-demo", TP(2), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0, "samples"},
    {F(bias_grad_wrong_axis), "gpt2-demo", TP(2), CR, DIRECT, "transformer.h.3.mlp.c_proj.bias:grad", "backward", 3, 0,
     "wrong axis"},
    {F(norm_backward_missing), "gpt2-demo", TP(2), CR, DIRECT, "transformer.h.3.ln_2:bwd", "backward", 3, 0, "norm"},
    {F(sp_norm_grad_local), "llama", SP(2), CR, DIRECT, "model.norm.weight:grad", "backward", -1, 0,
     "missing all-reduce over tp"},
    {F(sp_row_bias_grad_local), "gpt2", SP(2), CR, DIRECT, "transformer.h.1.mlp.c_proj.bias:grad", "backward", 1, 0,
     "missing all-reduce over tp"},
    /* Rank 0 holds the first positions, and their gradient is right; rank 1 has zeros there. */
    {F(sp_position_grad_local), "gpt2", SP(2), CR, DIRECT, "transformer.wpe.weight:grad", "backward", -1, 1,
     "missing all-reduce over tp"},
    /* Two KV heads on four ranks. Head 0 is rank 0's and rank 1's, and r mod 2 gives rank 1 the other one. */
    {F(kv_replica_grad_local), "llama", TP(4), CR, DIRECT, "model.layers.1.self_attn.k_rope:bwd", "backward", 1, 0,
     "missing all-reduce over tp"},
    {F(kv_replica_wrong_head), "llama", TP(4), CR, DIRECT, "model.layers.0.self_attn.k_proj.weight:init", "init", 0, 1,
     "wrong KV head"},
    {F(dropout_same_mask_in_shard), "llama", TP_DROPOUT(2, 0.1), CR, DIRECT,
     "model.layers.0.self_attn.attn_dropout:fwd", "forward", 0, 1, "mask"},
    {F(dropout_different_mask_in_replica), "gpt2", TP_DROPOUT(2, 0.1), CR, DIRECT, "transformer.drop:fwd", "forward",
     -1, 1, "mask"},
    /* 2, 1 and 1 samples. */
    {F(dp_mean_of_means), "llama", DP(3, 1, 4), CR, DIRECT, "loss:fwd", "forward", -1, 0,
     "data-parallel ranks divided by its own number of target tokens"},
    {F(dp_sum_of_local_means), "llama", DP(2, 1, 2), CR, DIRECT, "loss:fwd", "forward", -1, 0, "times 2"},
    {F(dp_group_missing), "llama", DP(2, 1, 2), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "missing all-reduce over dp"},
    {F(dp_broadcast_over_world), "llama", DP(2, 2, 2), CR, DIRECT, "model.embed_tokens.weight:init", "init", -1, 1,
     "broadcast over the whole world"},
    /* The loss that is told divides by all tokens; 2 samples and 1. */
    {F(accum_mean_of_means), "llama", MICRO(2, 1, 3), CR, DIRECT, "lm_head.logits:bwd", "backward", -1, 0,
     "micro-batches divided by its own number of target tokens"},
    {F(saved_input_overwritten), "llama", MICRO_FIRST(2, 1, 2), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "micro-batch"},
    {F(embedding_tied_once), "gpt2", TP(2), CR, DIRECT, "transformer.wte.weight:grad", "backward", -1, 0, "tied"},
    {F(gradnorm_counts_replicas), "gpt2", TP(2), CR, DIRECT, "grad_norm:clip", "clip", -1, 0, "counts something twice"},
    {F(gradnorm_local_clip), "gpt2", TP(2), CR, DIRECT, "grad_norm:clip", "clip", -1, 0, "own shards"},
    /* Ranks 0 and 1 are both data-parallel and tensor-parallel neighbours: rank 1 gets rank 0's shard. */
    {F(group_wrong_stride), "llama", DP(2, 2, 2), CR, DIRECT, "model.embed_tokens.weight:init", "init", -1, 1,
     "groups"},
    /* Ranks 2 and 3 look for ids that belong to the third and fourth of two shards. */
    {F(world_rank_in_group), "llama", DP(2, 2, 2), CR, DIRECT, "model.embed_tokens:fwd", "forward", -1, 2, "world"},
    {F(positions_local), "gpt2", SP(2), CR, DIRECT, "transformer.drop:fwd", "forward", -1, 1, "positions"},
    /* 3 x 85 ids: 255 is the last rank's. */
    {F(silent_truncation), "gpt2", TP(3), CR, DIRECT, "lm_head:fwd", "forward", -1, 2, "belong to nobody"},
    /* Column 48 of q is rank 1's first, and the second of two halves of q|k|v begins in the middle of k. */
    {F(gate_up_interleaved_wrong), "gpt2", TP(2), CR, DIRECT, "transformer.h.0.attn.c_attn.weight:init", "init", 0, 1,
     "packed"},
    {F(norm_padded_lanes), "gpt2", TP(2), CR, DIRECT, "transformer.h.0.ln_1:fwd", "forward", 0, 0, "padding included"},
    {F(bias_added_twice), "gpt2", TP(2), CR, DIRECT, "transformer.h.0.attn.q:fwd", "forward", 0, 0, "bias"},
    {F(row_bias_partial_grad), "gpt2", TP(2), CR, DIRECT, "transformer.h.1.mlp.c_proj.bias:grad", "backward", 1, 0,
     "times 0.5"},
    /* Matrices are shards; the norms' weights are ones on every rank, and positions the first that are drawn. */
    {F(init_replica_differs), "gpt2", TP(2), CR, DIRECT, "transformer.wpe.weight:init", "init", -1, 1,
     "replicas apart"},
    {F(gather_batch_order), "llama", SP(2), CR, DIRECT, "model.layers.0.self_attn.q_proj:fwd", "forward", 0, 0,
     "order"},
    /* Of 100000 bytes the first bucket has the head, the final norm and the last block's last matrix. */
    {F(bucket_first_ready), "llama", BUCKETS(2, 1, 2, 100000), CR, DIRECT, "model.norm.weight:grad", "backward", -1, 0,
     "its bucket was reduced before it was written"},
    {F(bucket_reduced_twice), "llama", BUCKETS(2, 1, 2, 100000), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "a bucket reduced a second time"},
    {F(bucket_not_packed), "llama", BUCKETS(2, 1, 2, 100000), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "got no gradient"},
    {F(bucket_stale_done), "llama", STEPS(2, 1, 2, 100000, 2), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "in the step before they were"},
    {F(step_before_copy_back), "llama", BUCKETS(2, 1, 2, 100000), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "missing all-reduce over dp"},
    {F(comm_before_producer), "llama", BUCKETS(2, 1, 2, 100000), CR, DIRECT, "model.layers.1.mlp.down_proj.weight:grad",
     "backward", 1, 0, "its bucket was reduced before it was written"},
    {F(stale_activation_reuse), "llama", BUCKETS(2, 1, 2, 100000), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "overwritten"},
    /* Rank 2 has no sample. */
    {F(unused_in_last_micro_batch), "llama", BUCKETS(3, 1, 2, 0), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 2,
     "zeros from rank 2 alone"},
    {F(tied_reduced_at_first_use), "gpt2", BUCKETS(2, 1, 2, 100000), CR, DIRECT, "transformer.wte.weight:grad",
     "backward", -1, 0, "tied"},
    {F(accum_last_only), "llama", MICRO(2, 1, 2), CR, DIRECT, "lm_head.weight:grad", "backward", -1, 0,
     "as if one of 2 micro-batches counted"},
    {F(accum_sum_of_means), "llama", MICRO(2, 1, 3), CR, DIRECT, "lm_head.logits:bwd", "backward", -1, 0,
     "sum of local means"},
    {F(dp_init_differs), "llama", DP(2, 1, 2), CR, DIRECT, "model.embed_tokens.weight:init", "init", -1, 1,
     "never broadcast"},
    /* A bucket for each parameter: the embedding's first half is rank 0's to update. */
    {F(zero_gather_missing), "llama", ZERO(2, 1, 2, 0), CR, DIRECT, "model.embed_tokens.weight:new", "update", -1, 1,
     "were not gathered"},
    {F(zero_shards_misaligned), "llama", ZERO(2, 1, 2, 0), CR, DIRECT, "model.embed_tokens.weight:new", "update", -1, 0,
     "do not line up"},
    {F(zero_grad_not_recursive), "llama", STEPS(1, 2, 2, 0, 2), CR, DIRECT, "model.layers.1.mlp.down_proj.weight:grad",
     "backward", 1, 0, "the reference plus that of step 1"},
    {F(gradnorm_first_rank_only), "llama", TP(2), CR, DIRECT, "grad_norm:clip", "clip", -1, 0, "leaves something out"},
    {F(adam_step_not_synced), "llama", DP(2, 1, 2), CR, DIRECT, "model.embed_tokens.weight:new", "update", -1, 1,
     "count their steps differently"},
    {F(optimizer_counter_ahead), "llama", TP(2), CR, DIRECT, "model.embed_tokens.weight:new", "update", -1, 0,
     "as that of step 2 would be in step 1"},
    {F(weight_decay_on_shard_only), "llama", DP(2, 1, 2), CR, DIRECT, "model.embed_tokens.weight:new", "update", -1, 1,
     "weight decay left out"},
    {F(norm_fp16_store), "llama", TP(2), CR, DIRECT, "model.layers.0.input_layernorm:fwd", "forward", 0, 0, "16 bits"},
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
    {F(collective_order_swapped),
     "gpt2",
     DP(2, 1, 0),
     DIRECT,
     {"ranks 0 and 1", "tag 'bucket 0: transformer.ln_f.bias' against 'bucket 1: transformer.ln_f.weight'",
      "different orders"},
     3,
     0},
    {F(collective_order_swapped),
     "gpt2",
     SP(2),
     RING,
     {"ranks 0 and 1", "tag 'bucket 0: transformer.ln_f.bias' against 'bucket 1: transformer.ln_f.weight'",
      "different orders"},
     3,
     0},
    /* Of ranks 0 to 3 with tp 2, ranks 1 and 3 share their parameters. */
    {F(collective_order_swapped),
     "llama",
     DP(2, 2, 0),
     DIRECT,
     {"ranks 1 and 3", "'bucket 1: model.norm.weight'", "'bucket 0: lm_head.weight'"},
     10,
     0},
    {F(collective_size_mismatch), "llama", TP(2), DIRECT, {"ranks 0 and 1", "'loss max'", "count 48 against 47"}, 3, 0},
    {F(collective_size_mismatch), "gpt2", SP(3), RING, {"ranks 0 and 1", "'loss max'", "count 48 against 47"}, 7, 0},
    {F(collective_dtype_mismatch),
     "llama",
     DP(2, 1, 0),
     DIRECT,
     {"ranks 0 and 1", "'model.embed_tokens.weight'", "dtype F32 against BF16"},
     3,
     0},
    {F(collective_dtype_mismatch),
     "gpt2",
     DP(3, 1, 3),
     RING,
     {"ranks 0 and 1", "'transformer.wte.weight'", "dtype F32 against BF16"},
     7,
     0},
    /* Rank 2 has no sample, and no gradient to reduce. */
    {F(unused_skips_collective),
     "llama",
     BUCKETS(3, 1, 2, 100000),
     DIRECT,
     {"rank 2 returned while rank", "'bucket 0: lm_head.weight'", "collective #1 of ranks 0-2"},
     3,
     4},
    {F(unused_skips_collective),
     "gpt2",
     BUCKETS(3, 1, 2, 0),
     RING,
     {"rank 2 returned while rank", "'bucket 0: transformer.ln_f.bias'", "collective #1 of ranks 0-2"},
     3,
     4},
};
enum { ENDS = sizeof ends / sizeof *ends };

/* Mistakes that a module shows and no transformer: of verify/fault_module.c, in the fault's own case. */
static const struct {
    ar_fault fault;
    const char *tensor, *hint;
} modules[] = {
    {F(unused_set_empty), "pair.spare:new", "without gradient on any rank"},
    {F(mean_divides_by_world), "pair.weight:grad", "times 0.5"},
};
enum { MODULES = sizeof modules / sizeof *modules };

/* The same on other models, numbers of ranks, orders of the MLP, and with the ring. */
static const char *const small_names[] = {"llama", "gpt2", "stack"};
static const char *const small_models[] = {LLAMA(256, 64, 96, 2, 8, 2, 8, false), GPT2(256, 96, 192, 2, 12),
                                           STACK(256, 64, 96, 2, 8, 4)};
enum { SMALL_MODELS = 3 };

static const expected elsewhere[] = {
    {F(column_dx_not_reduced), "stack", TP(4), CR, RING, "layers.1.mlp.w1:bwd", "backward", 1, 0, "missing all-reduce"},
    {F(column_dx_not_reduced), "gpt2", TP(3), CR, RING, "lm_head:bwd", "backward", -1, 0, "missing all-reduce"},
    {F(row_bias_every_rank), "stack", TP(2), CR, RING, "layers.0.mlp.w2:fwd", "forward", 0, 0, "bias"},
    {F(row_bias_every_rank), "gpt2", TP(4), CR, DIRECT, "transformer.h.0.attn.c_proj:fwd", "forward", 0, 0, "bias"},
    {F(row_bias_every_rank), "gpt2", TP(4), RC, RING, "transformer.h.0.attn.c_proj:fwd", "forward", 0, 0, "bias"},
    {F(row_input_grad_not_gathered), "stack", TP(4), RC, DIRECT, "layers.1.mlp.w1:bwd", "backward", 1, 1,
     "missing all-gather"},
    {F(row_input_grad_not_gathered), "llama", TP(2), RC, RING, "model.layers.1.mlp:bwd", "backward", 1, 1,
     "missing all-gather"},
    {F(heads_divided_twice), "gpt2", TP(3), CR, RING, "transformer.h.0.attn.context:fwd", "forward", 0, 0, "heads"},
    {F(heads_divided_twice), "gpt2", TP(4), CR, DIRECT, "transformer.h.0.attn.context:fwd", "forward", 0, 0,
     "local head count"},
    {F(heads_divided_twice), "stack", TP(2), CR, DIRECT, "layers.0.attn.context:fwd", "forward", 0, 0,
     "local head count"},
    {F(allreduce_aliases_input), "gpt2", TP(4), CR, RING, "transformer.h.1.mlp.c_proj.weight:grad", "backward", 1, 0,
     "overwritten"},
    {F(allreduce_aliases_input), "stack", TP(2), CR, DIRECT, "layers.1.mlp.w2.weight:grad", "backward", 1, 0,
     "overwritten"},
    {F(init_local_fan), "gpt2", TP(3), CR, DIRECT, "transformer.h.0.attn.c_attn.weight:init", "init", 0, 0,
     "fans of the shard"},
    {F(init_local_fan), "stack", TP(4), CR, RING, "layers.0.attn.wq.weight:init", "init", 0, 0, "fans of the shard"},
    {F(init_per_shard_seed), "gpt2", TP(4), CR, RING, "transformer.wte.weight:init", "init", -1, 1, "seeded alike"},
    {F(init_per_shard_seed), "stack", TP(2), CR, DIRECT, "embed.weight:init", "init", -1, 1, "seeded alike"},
    {F(vocab_target_off_by_shard), "gpt2", TP(3), CR, RING, "loss:fwd", "forward", -1, 0, "target"},
    {F(vocab_target_off_by_shard), "gpt2", TP(4), CR, DIRECT, "loss:fwd", "forward", -1, 0, "target"},
    {F(loss_parallel_no_max), "gpt2", TP(3), CR, RING, "loss:fwd", "forward", -1, 0, "maximum"},
    {F(embedding_edge_twice), "gpt2", TP(3), CR, DIRECT, "transformer.wte:fwd", "forward", -1, 0, "shard's edge"},
    {F(embedding_edge_twice), "stack", TP(4), CR, RING, "embed:fwd", "forward", -1, 0, "shard's edge"},
    /* A tied head's weight gradient is complete after the embedding's, so that a block's comes first. */
    {F(weight_grad_leading_dims), "gpt2", TP(4), CR, DIRECT, "transformer.h.1.mlp.c_proj.weight:grad", "backward", 1, 0,
     "samples"},
    {F(weight_grad_leading_dims), "stack", TP(2), CR, RING, "layers.1.mlp.w2.weight:grad", "backward", 1, 0, "samples"},
    /* dY is 1 everywhere: 48 elements of 64 in place of 64 of 48, close to the reference. */
    {F(bias_grad_wrong_axis), "stack", TP(4), CR, DIRECT, "layers.1.mlp.w2.bias:grad", "backward", 1, 0,
     "sum over tokens"},
    {F(bias_grad_wrong_axis), "gpt2", TP(3), RC, RING, "transformer.h.1.mlp.c_proj.bias:grad", "backward", 1, 0,
     "wrong axis"},
    {F(norm_backward_missing), "llama", TP(2), CR, RING, "model.layers.1.post_attention_layernorm:bwd", "backward", 1,
     0, "norm"},
    {F(norm_backward_missing), "stack", TP(4), RC, DIRECT, "layers.1.ln2:bwd", "backward", 1, 0, "norm"},
    {F(sp_norm_grad_local), "gpt2", SP(3), CR, RING, "transformer.ln_f.weight:grad", "backward", -1, 0,
     "missing all-reduce over tp"},
    {F(sp_norm_grad_local), "stack", SP(4), CR, DIRECT, "layers.1.ln2.weight:grad", "backward", 1, 0,
     "missing all-reduce over tp"},
    {F(sp_row_bias_grad_local), "gpt2", SP(4), CR, RING, "transformer.h.1.mlp.c_proj.bias:grad", "backward", 1, 0,
     "missing all-reduce over tp"},
    {F(sp_position_grad_local), "gpt2", SP(4), CR, DIRECT, "transformer.wpe.weight:grad", "backward", -1, 1,
     "missing all-reduce over tp"},
    {F(kv_replica_grad_local), "stack", TP(8), CR, RING, "layers.1.attn.v:bwd", "backward", 1, 0,
     "missing all-reduce over tp"},
    {F(kv_replica_wrong_head), "stack", TP(8), CR, DIRECT, "layers.0.attn.wk.weight:init", "init", 0, 1,
     "wrong KV head"},
    {F(dropout_same_mask_in_shard), "gpt2", TP_DROPOUT(3, 0.25), CR, RING, "transformer.h.0.attn.attn_dropout:fwd",
     "forward", 0, 1, "mask"},
    {F(dropout_same_mask_in_shard), "gpt2", SP_DROPOUT(2, 0.25), CR, DIRECT, "transformer.drop:fwd", "forward", -1, 1,
     "mask"},
    {F(dropout_different_mask_in_replica), "stack", TP_DROPOUT(4, 0.25), CR, RING, "layers.0.attn.resid_dropout:fwd",
     "forward", 0, 1, "mask"},
    {F(dp_mean_of_means), "gpt2", DP(3, 2, 4), CR, RING, "loss:fwd", "forward", -1, 0,
     "data-parallel ranks divided by its own number of target tokens"},
    {F(dp_sum_of_local_means), "gpt2", DP(4, 1, 4), CR, DIRECT, "loss:fwd", "forward", -1, 0, "times 4"},
    {F(dp_group_missing), "gpt2", DP(2, 2, 2), CR, RING, "transformer.ln_f.weight:grad", "backward", -1, 0,
     "missing all-reduce over dp"},
    {F(dp_broadcast_over_world), "gpt2", DP(2, 4, 2), CR, DIRECT, "transformer.wte.weight:init", "init", -1, 1,
     "broadcast over the whole world"},
    {F(accum_mean_of_means), "gpt2", MICRO(2, 2, 3), CR, DIRECT, "lm_head.logits:bwd", "backward", -1, 0,
     "micro-batches divided by its own number of target tokens"},
    {F(saved_input_overwritten), "gpt2", MICRO_FIRST(2, 2, 2), CR, RING, "transformer.h.1.mlp.c_proj.weight:grad",
     "backward", 1, 0, "micro-batch"},
    {F(embedding_tied_once), "gpt2", TP(4), CR, RING, "transformer.wte.weight:grad", "backward", -1, 0, "tied"},
    {F(gradnorm_counts_replicas), "llama", DP(2, 2, 2), CR, DIRECT, "grad_norm:clip", "clip", -1, 0,
     "counts something twice"},
    {F(gradnorm_local_clip), "stack", TP(4), CR, RING, "grad_norm:clip", "clip", -1, 0, "own shards"},
    {F(group_wrong_stride), "gpt2", DP(2, 4, 2), CR, DIRECT, "transformer.wte.weight:init", "init", -1, 1, "groups"},
    {F(world_rank_in_group), "gpt2", DP(2, 2, 2), CR, RING, "transformer.wte:fwd", "forward", -1, 2, "world"},
    {F(positions_local), "gpt2", SP(4), CR, DIRECT, "transformer.drop:fwd", "forward", -1, 1, "positions"},
    /* 12 ranks have 22 ids each, the last one 14; 12 x 21 are 252. */
    {F(silent_truncation), "gpt2", TP(12), CR, DIRECT, "lm_head:fwd", "forward", -1, 11, "belong to nobody"},
    {F(gate_up_interleaved_wrong), "gpt2", TP(3), CR, DIRECT, "transformer.h.0.attn.c_attn.weight:init", "init", 0, 1,
     "packed"},
    {F(norm_padded_lanes), "gpt2", SP(3), CR, RING, "transformer.h.0.ln_1:fwd", "forward", 0, 0, "padding included"},
    {F(bias_added_twice), "stack", TP(2), CR, RING, "layers.0.mlp.w1:fwd", "forward", 0, 0, "bias"},
    {F(row_bias_partial_grad), "stack", TP(4), CR, DIRECT, "layers.1.mlp.w2.bias:grad", "backward", 1, 0, "times 0.25"},
    {F(init_replica_differs), "stack", TP(2), CR, DIRECT, "layers.0.ln1.bias:init", "init", 0, 1, "replicas apart"},
    {F(gather_batch_order), "gpt2", SP(3), CR, RING, "transformer.h.0.attn.q:fwd", "forward", 0, 0, "order"},
    {F(bucket_first_ready), "gpt2", BUCKETS(2, 2, 2, 80000), CR, RING, "transformer.h.1.mlp.c_proj.weight:grad",
     "backward", 1, 0, "its bucket was reduced before it was written"},
    {F(bucket_reduced_twice), "gpt2", BUCKETS(3, 1, 3, 80000), CR, RING, "transformer.ln_f.weight:grad", "backward", -1,
     0, "times 3 = dp"},
    {F(bucket_not_packed), "stack", BUCKETS(2, 1, 2, 1 << 20), CR, DIRECT, "layers.1.mlp.w2.weight:grad", "backward", 1,
     0, "got no gradient"},
    {F(bucket_stale_done), "gpt2", STEPS(2, 1, 2, 0, 2), CR, RING, "transformer.ln_f.weight:grad", "backward", -1, 0,
     "missing all-reduce over dp"},
    {F(step_before_copy_back), "gpt2", BUCKETS(2, 2, 2, 80000), CR, DIRECT, "transformer.ln_f.weight:grad", "backward",
     -1, 0, "missing all-reduce over dp"},
    {F(comm_before_producer), "gpt2", BUCKETS(2, 1, 2, 0), CR, RING, "transformer.ln_f.weight:grad", "backward", -1, 0,
     "its bucket was reduced before it was written"},
    {F(stale_activation_reuse), "gpt2", BUCKETS(3, 1, 3, 80000), CR, DIRECT, "transformer.ln_f.weight:grad", "backward",
     -1, 0, "overwritten"},
    {F(unused_in_last_micro_batch), "gpt2", BUCKETS(4, 1, 3, 80000), CR, RING, "transformer.ln_f.weight:grad",
     "backward", -1, 3, "zeros from rank 3 alone"},
    {F(tied_reduced_at_first_use), "gpt2", BUCKETS(2, 2, 2, 1 << 20), CR, RING, "transformer.wte.weight:grad",
     "backward", -1, 0, "tied"},
    {F(accum_last_only), "gpt2", MICRO(2, 2, 2), CR, RING, "transformer.ln_f.weight:grad", "backward", -1, 0,
     "as if one of 2 micro-batches counted"},
    {F(accum_sum_of_means), "gpt2", MICRO(2, 2, 3), CR, RING, "lm_head.logits:bwd", "backward", -1, 0,
     "sum of local means"},
    {F(dp_init_differs), "gpt2", DP(2, 2, 2), CR, DIRECT, "transformer.wte.weight:init", "init", -1, 2,
     "never broadcast"},
    {F(zero_gather_missing), "gpt2", ZERO(2, 2, 2, 80000), CR, RING, "transformer.wte.weight:new", "update", -1, 2,
     "were not gathered"},
    {F(zero_shards_misaligned), "gpt2", ZERO(3, 1, 3, 80000), CR, DIRECT, "transformer.wte.weight:new", "update", -1, 0,
     "do not line up"},
    {F(zero_grad_not_recursive), "gpt2", STEPS(2, 1, 2, 0, 2), CR, RING, "transformer.h.1.mlp.c_proj.weight:grad",
     "backward", 1, 0, "the reference plus 2 times that of step 1"},
    {F(gradnorm_first_rank_only), "gpt2", TP(4), CR, RING, "grad_norm:clip", "clip", -1, 0, "leaves something out"},
    {F(adam_step_not_synced), "gpt2", TP(2), CR, RING, "transformer.wpe.weight:new", "update", -1, 1,
     "count their steps differently"},
    {F(optimizer_counter_ahead), "stack", ZERO(2, 2, 2, 80000), CR, RING, "embed.weight:new", "update", -1, 0,
     "as that of step 2 would be in step 1"},
    {F(weight_decay_on_shard_only), "gpt2", TP(2), CR, DIRECT, "transformer.wpe.weight:new", "update", -1, 1,
     "weight decay left out"},
    {F(norm_fp16_store), "stack", SP(4), CR, RING, "layers.0.ln1:fwd", "forward", 0, 0, "16 bits"},
};
enum { ELSEWHERE = sizeof elsewhere / sizeof *elsewhere };

/* What runs of one model, batch, steps, dropout and clipping are compared with: once, however many they are. */
typedef struct shared {
    char model[64];
    size_t batch;
    int steps;
    double dropout, clip;
    ari_check_base base;
    char weights_hash[65], gradients_hash[65];
} shared;
enum { MOST_SHARED = 64 };

/* The text of all cases, and the small models, each in a folder of its own. */
typedef struct place {
    char folder[64], model[SMALL_MODELS][64], text[80];
    shared base[MOST_SHARED];
    int bases;
} place;

static void place_init(place *p)
{
    static const char edges[] = "\x80V@\xac\xc0";
    char text[BATCH * SEQ + 1];
    p->bases = 0;
    for (size_t i = 0; i < sizeof text - 1; i++)
        text[i] = i % 5 == 2 ? edges[i / 5 % 5] : (char)(1 + i * i * 7 % 97);
    text[sizeof text - 1] = '\0';
    make_folder(p->folder);
    write_file(p->folder, "text", text);
    snprintf(p->text, sizeof p->text, "%s/text", p->folder);
    for (int m = 0; m < SMALL_MODELS; m++) {
        make_folder(p->model[m]);
        write_file(p->model[m], "config.json", small_models[m]);
    }
}

static void place_fini(place *p)
{
    for (int i = 0; i < p->bases; i++)
        ari_check_base_fini(&p->base[i].base);
    remove_folder(p->folder);
    for (int m = 0; m < SMALL_MODELS; m++)
        remove_folder(p->model[m]);
}

/* "gpt2-demo" and "gpt2" alike. */
static ar_arch arch_of(const char *model)
{
    return model[0] == 'l' ? AR_ARCH_LLAMA : model[0] == 'g' ? AR_ARCH_GPT2 : AR_ARCH_STACK;
}

static ar_check_options options_of(const expected *e, ar_fault fault, const place *p)
{
    const char *model = e->model;
    for (int m = 0; m < SMALL_MODELS; m++)
        model = strcmp(model, small_names[m]) == 0 ? p->model[m] : model;
    ar_check_options o = check_layouts(model, &e->at.parallel, 1, e->at.batch ? e->at.batch : BATCH, SEQ);
    o.fault = fault;
    o.steps = e->at.steps ? e->at.steps : 1;
    o.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.clip = e->fault == F(silent_truncation) ? 0.0 : 1.0; /* of gradients that are no numbers there is no norm */
    o.dropout = e->at.dropout;
    o.ddp = e->at.ddp;
    o.plan = plan_of(arch_of(e->model), e->order);
    o.algorithm = e->algorithm;
    o.text = p->text;
    return o;
}

static const shared *base_of(place *p, const ar_check_options *o)
{
    for (int i = 0; i < p->bases; i++) {
        const shared *b = &p->base[i];
        if (strcmp(b->model, o->model) == 0 && b->batch == o->batch && b->steps == o->steps &&
            b->dropout == o->dropout && b->clip == o->clip)
            return b;
    }
    char folder[512];
    ar_config c;
    cr_assert_lt(p->bases, MOST_SHARED);
    shared *b = &p->base[p->bases++];
    *b = (shared){.batch = o->batch, .steps = o->steps, .dropout = o->dropout, .clip = o->clip};
    snprintf(b->model, sizeof b->model, "%s", o->model);
    cr_assert_eq(ar_model_path(folder, sizeof folder, o->model), AR_OK, "%s", ar_error_message());
    cr_assert_eq(ar_config_load(&c, folder), AR_OK, "%s", ar_error_message());
    cr_assert_eq(ari_check_base_init(&b->base, o, &c, folder), AR_OK, "%s", ar_error_message());
    cr_assert_eq(ari_reference_hash(b->weights_hash, &b->base.ref, ari_reference_is_weight, NULL), AR_OK);
    cr_assert_eq(ari_reference_hash(b->gradients_hash, &b->base.ref, ari_reference_is_gradient, NULL), AR_OK);
    return b;
}

static ar_check_run run_case(const expected *e, ar_fault fault, place *p, const shared **base)
{
    const ar_check_options o = options_of(e, fault, p);
    ar_check_run run;
    *base = base_of(p, &o);
    cr_assert_eq(ari_check_base_run(&run, &(*base)->base, &o, &e->at.parallel), AR_OK, "%s", ar_error_message());
    return run;
}

static void expect_caught(const expected *e, place *p)
{
    const shared *base = NULL;
    ar_check_run made = run_case(e, e->fault, p, &base);
    const ar_check_run *run = &made;
    const ar_first_difference *f = &run->first;
    char what[160], layout[96];
    ar_parallel_text(layout, sizeof layout, &e->at.parallel);
    snprintf(what, sizeof what, "%s, %s %s", ar_fault_name(e->fault), e->model, layout);
    cr_expect(run->result == AR_CHECK_DIFFERENT && run->has_difference && run->tensors_different > 0 && !run->error,
              "%s: %s", what, run->error ? run->error : "");
    cr_expect_str_eq(f->tensor, e->tensor, "%s: %s, expected %s", what, f->tensor, e->tensor);
    cr_expect_str_eq(f->pass, e->pass, "%s: %s", what, f->pass);
    cr_expect(f->layer == e->layer && f->step == (e->at.steps ? e->at.steps : 1), "%s: layer %d, expected %d", what,
              f->layer, e->layer);
    cr_expect_eq(f->rank, e->rank, "%s: rank %d, expected %d", what, f->rank, e->rank);
    cr_expect(strstr(f->hint, e->hint), "%s: no \"%s\" in \"%s\"", what, e->hint, f->hint);
    cr_expect(f->pattern[0] && f->hint[0], "%s: says nothing", what);
    /* Gradients that are twice as large have the same bits when they are clipped; those of a wrong norm were right. And
     * of copies the first one's are hashed. */
    cr_expect(strcmp(run->weights_hash, base->weights_hash) != 0 ||
                  strcmp(run->gradients_hash, base->gradients_hash) != 0 || strstr(f->pattern, "copies differ"),
              "%s: the same hashes", what);
    ari_check_run_fini(&made);
}

/* The run ends in the mismatch, on all ranks, with a table of all of them. */
static void expect_ended(const expected_end *e, place *p)
{
    const expected as = {.fault = e->fault, .model = e->model, .at = e->at, .algorithm = e->algorithm};
    const int world = ar_parallel_world(&e->at.parallel);
    const char *name = ar_fault_name(e->fault);
    const shared *base = NULL;
    ar_check_run made = run_case(&as, e->fault, p, &base);
    const ar_check_run *run = &made;
    cr_expect_eq(run->result, AR_CHECK_ERROR, "%s: result %d", name, (int)run->result);
    cr_assert(run->error && run->reports, "%s: no error, or no reports", name);
    for (size_t i = 0; i < sizeof e->says / sizeof *e->says; i++)
        cr_expect(strstr(run->error, e->says[i]), "%s: no \"%s\" in:\n%s", name, e->says[i], run->error);
    cr_expect(strstr(run->error, "last finished"), "%s: no table in:\n%s", name, run->error);
    for (int k = 0; k < world; k++) {
        const ar_sim_rank_report *rank = &run->reports[k];
        const bool meets = (e->meet >> k & 1) != 0;
        cr_expect_eq(rank->rank, k);
        const char *status = meets ? "AR_ERR_MISMATCH" : (e->left >> k & 1) != 0 ? "AR_OK" : "AR_ERR_ABORTED";
        cr_expect_str_eq(rank->status, status, "%s: rank %d", name, k);
        cr_expect(rank->current[0] && rank->last[0], "%s: rank %d: where was it?", name, k);
    }
    ari_check_run_fini(&made);
}

static bool same_run(const expected *a, const expected *b)
{
    const ar_parallel *p = &a->at.parallel, *q = &b->at.parallel;
    return strcmp(a->model, b->model) == 0 && p->tp == q->tp && p->sp == q->sp && p->dp == q->dp &&
           p->micro_batches == q->micro_batches && p->forward_first == q->forward_first && a->order == b->order &&
           a->algorithm == b->algorithm && a->at.batch == b->at.batch && a->at.dropout == b->at.dropout &&
           p->zero == q->zero && a->at.steps == b->at.steps && a->at.ddp.bucket_bytes == b->at.ddp.bucket_bytes &&
           a->at.ddp.mode == b->at.ddp.mode && a->at.ddp.find_unused == b->at.ddp.find_unused;
}

static bool left_out(const expected *e)
{
    return small_only() && strstr(e->model, "-demo") != NULL;
}

static void expect_clean(const expected *e, place *p)
{
    const shared *base = NULL;
    ar_check_run run = run_case(e, AR_FAULT_NONE, p, &base);
    char layout[96];
    ar_parallel_text(layout, sizeof layout, &e->at.parallel);
    cr_expect_eq(run.result, AR_CHECK_SAME, "%s, %s: %s", e->model, layout, first_of(&run));
    cr_expect_str_eq(run.weights_hash, base->weights_hash);
    cr_expect_str_eq(run.gradients_hash, base->gradients_hash);
    ari_check_run_fini(&run);
}

/* Every fault of the table, and each distinct layout once without one. */
static void expect_all(const expected *table, size_t n, place *p)
{
    for (size_t i = 0; i < n; i++) {
        size_t before = 0;
        while (before < i && !same_run(&table[before], &table[i]))
            before++;
        if (left_out(&table[i]))
            continue;
        expect_caught(&table[i], p);
        if (before == i)
            expect_clean(&table[i], p);
    }
}

TestSuite(fault, .timeout = 280);

Test(fault, tables_have_every_fault)
{
    for (int f = 1; f < AR_FAULT_COUNT; f++) {
        size_t rows = 0, ended = 0;
        for (size_t i = 0; i < ONCE; i++)
            rows += once[i].fault == (ar_fault)f;
        for (size_t i = 0; i < ENDS; i++)
            ended += ends[i].fault == (ar_fault)f;
        for (size_t i = 0; i < MODULES; i++)
            ended += modules[i].fault == (ar_fault)f;
        cr_expect(rows == 1 ? ended == 0 : rows == 0 && ended > 0, "%s", ar_fault_name((ar_fault)f));
    }
}

Test(fault, collectives_that_do_not_match_end_the_run_on_all_ranks)
{
    place p;
    place_init(&p);
    for (size_t i = 0; i < ENDS; i++) {
        const expected as = {.model = ends[i].model, .at = ends[i].at, .algorithm = ends[i].algorithm};
        expect_ended(&ends[i], &p);
        expect_clean(&as, &p);
    }
    place_fini(&p);
}

Test(fault, each_is_caught_where_it_arises_and_without_it_the_bits_are_the_same)
{
    place p;
    place_init(&p);
    expect_all(once, ONCE, &p);
    place_fini(&p);
}

Test(fault, each_is_caught_in_other_layouts_and_models)
{
    place p;
    place_init(&p);
    expect_all(elsewhere, ELSEWHERE, &p);
    place_fini(&p);
}

Test(fault, those_that_no_transformer_shows_are_caught_in_a_module)
{
    for (size_t i = 0; i < MODULES; i++) {
        const ari_fault_case c = ari_fault_case_of(modules[i].fault);
        const char *name = ar_fault_name(modules[i].fault);
        for (int with = 0; with < 2; with++) {
            ar_check_module_report *r = NULL;
            const ar_fault fault = with ? c.fault : AR_FAULT_NONE;
            cr_assert(c.module && c.fault == modules[i].fault, "%s has another case", name);
            cr_assert_eq(ari_fault_module_check(&r, &c, fault, 1, 0), AR_OK, "%s", ar_error_message());
            const ar_check_run *run = &r->run[0];
            cr_expect_eq(r->result, with ? AR_CHECK_DIFFERENT : AR_CHECK_SAME, "%s: %s", name, first_of(run));
            cr_expect(!with || strcmp(run->first.tensor, modules[i].tensor) == 0, "%s: %s", name, run->first.tensor);
            cr_expect(!with || strstr(run->first.hint, modules[i].hint), "%s: %s", name, run->first.hint);
            ar_check_module_report_destroy(r);
        }
    }
}

/* A mistake in what ranks do together cannot matter to a rank alone; those of one rank's arithmetic do. */
Test(fault, those_of_communication_change_nothing_on_one_rank)
{
    char folder[64];
    const int one = 1;
    make_folder(folder);
    write_file(folder, "config.json", tiny_models[TINY_GPT2]);
    for (int f = 1; f < AR_FAULT_COUNT; f++) {
        const bool local = f == F(weight_grad_leading_dims) || f == F(bias_grad_wrong_axis) ||
                           f == F(norm_backward_missing) || f == F(embedding_tied_once) || f == F(norm_padded_lanes) ||
                           f == F(bias_added_twice) || f == F(norm_fp16_store);
        ar_check_options o = check_of(folder, &one, 1, 2, 12);
        o.fault = (ar_fault)f;
        ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(r->result, local ? AR_CHECK_DIFFERENT : AR_CHECK_SAME, "%s: first %s", ar_fault_name((ar_fault)f),
                     first_of(&r->run[0]));
        ar_check_report_destroy(r);
    }
    remove_folder(folder);
}
