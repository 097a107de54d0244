/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes that layers make on request change nothing in layouts that have nothing to get wrong. Where each is seen,
 * and in which tensor first, is in tests/verify/fault_expected.h. */
#include "support/match.h"
#include "support/row.h"
#include "tests/support/test.h"

typedef struct harmless {
    const char *why;
    const char *fault;
    ar_arch arch;
    ar_parallel in;
    bool plus_one;
    double dropout;
    size_t heads, kv_heads, hidden; /* 0: match_config's */
} harmless;

#define LLAMA .arch = AR_ARCH_LLAMA
#define GPT2 .arch = AR_ARCH_GPT2
#define STACK .arch = AR_ARCH_STACK
static const harmless table[] = {
    ROW("norms see every position", "sp_norm_grad_local", LLAMA, .in.tp = 2),
    ROW("biases see every position", "sp_row_bias_grad_local", GPT2, .in.tp = 2),
    ROW("there are no biases", "sp_row_bias_grad_local", LLAMA, .in.tp = 2, .in.sp = true),
    ROW("the table sees every position", "sp_position_grad_local", GPT2, .in.tp = 4),
    ROW("a rank has all positions", "positions_local", GPT2, .in.tp = 2),
    ROW("nothing is gathered", "gather_batch_order", STACK, .in.tp = 2),
    ROW("one sample at a time", "gather_batch_order", STACK, .in.tp = 2, .in.dp = 2, .in.micro_batches = 2,
        .in.forward_first = true, .in.sp = true),
    ROW("not tied", "embedding_tied_once", LLAMA, .in.tp = 1),
    ROW("one rank has the vocabulary", "silent_truncation", LLAMA, .in.tp = 1),
    ROW("the group is the world", "world_rank_in_group", LLAMA, .in.tp = 2, .in.sp = true),
    ROW("one micro-batch", "saved_input_overwritten", LLAMA, .in.tp = 2, .in.sp = true),
    ROW("there are no biases", "bias_added_twice", LLAMA, .in.tp = 2, .in.sp = true),
    ROW("one rank has all terms", "row_bias_partial_grad", STACK, .in.tp = 1),
    ROW("16 lanes need no padding", "norm_padded_lanes", GPT2, .in.tp = 2, .hidden = 16),
    ROW("16 lanes, gains of 1 + weight", "norm_padded_lanes", LLAMA, .in.tp = 2, .hidden = 16, .plus_one = true),
    ROW("no copies of KV heads", "kv_replica_grad_local", LLAMA, .in.tp = 3, .heads = 12, .kv_heads = 3),
    ROW("no copies of KV heads", "kv_replica_wrong_head", LLAMA, .in.tp = 2, .heads = 8, .kv_heads = 2),
    ROW("any head is the right one", "kv_replica_wrong_head", LLAMA, .in.tp = 8, .heads = 8, .kv_heads = 1),
    ROW("one rank has q, k and v", "gate_up_interleaved_wrong", GPT2, .in.tp = 1),
    ROW("one shard", "dropout_same_mask_in_shard", LLAMA, .in.tp = 1, .dropout = 0.3),
    ROW("nothing is replicated", "dropout_different_mask_in_replica", LLAMA, .in.tp = 2, .in.sp = true, .dropout = 0.3),
};

Test(layer_faults, none_changes_a_layout_that_it_is_not_about)
{
    static const int64_t ids[2 * 8] = {0, 10, 3, 7, 1, 9, 4, 4, 2, 10, 8, 5, 6, 0, 3, 10};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        const harmless *f = &table[i];
        const int tps[] = {f->in.tp, 0};
        match_case c = {.config = match_config(f->arch, 1),
                        .batch = {2, 8, ids},
                        .seed = 8,
                        .run = {.parallel = f->in, .dropout = f->dropout, .fault = f->fault}};
        c.config.norm_plus_one = f->plus_one;
        c.config.heads = f->heads ? f->heads : c.config.heads;
        c.config.kv_heads = f->kv_heads ? f->kv_heads : c.config.kv_heads;
        c.config.hidden = f->hidden ? f->hidden : c.config.hidden;
        c.config.ffn = f->heads ? 4 * f->heads : c.config.ffn;
        cr_expect_eq(match(&c, tps, NULL), AR_OK, "row %zu, %s, %s: %s", i, f->fault, f->why, ar_error_message());
    }
}
