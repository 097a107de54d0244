/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/grads/grads_fault.h"

#include "ref/core/size.h"
#include "ref/models/family.h"

/* What a fault needs to matter. The first that a run lacks is the one it is told of. */
typedef enum need {
    UPDATE = 1 << 0,
    STEPS = 1 << 1,
    DROPOUT = 1 << 2,
    MODULE = 1 << 3,
    FRESH = 1 << 4,
    TIED = 1 << 5,
    POSITIONS = 1 << 6,
    PACKED = 1 << 7,
    BIAS = 1 << 8,
    TP = 1 << 9,
    DP = 1 << 10,
    SP = 1 << 11,
    KV_COPIES = 1 << 12,
    MICRO = 1 << 13,
    FORWARD_FIRST = 1 << 14,
    ROW_COLUMN = 1 << 15,
    BUCKETS = 1 << 16,
    ROW_BIAS = 1 << 17
} need;

static const struct {
    need need;
    const char *text;
} reasons[] = {
    {UPDATE, "acts after the backward pass, in clipping or in the update, and grads ends before: 'anyrank check "
             "--inject' shows it"},
    {STEPS, "acts from the second step on, and grads makes one: 'anyrank check --inject' shows it"},
    {DROPOUT, "is a mistake of dropout, and grads has none: 'anyrank check --inject' shows it"},
    {MODULE, "shows in a module, not in a model: 'anyrank check --inject' runs one"},
    {FRESH, "is a mistake of fresh weights, and these are read: give a MODEL without weights"},
    {TIED, "is a mistake of tied embeddings, which this model has not"},
    {POSITIONS, "is a mistake of learned positions, which this model has not"},
    {PACKED, "is a mistake of a fused q|k|v, which this model has not"},
    {BIAS, "is a mistake of biases, which this model has not"},
    {ROW_BIAS, "is a mistake of the biases of row-parallel layers, which this model has not"},
    {TP, "acts between tensor-parallel ranks: give --tp of at least 2"},
    {DP, "acts between data-parallel ranks: give --dp of at least 2"},
    {SP, "is a mistake of sequence parallelism: give --tp of at least 2 and --sp"},
    {KV_COPIES, "is about copies of KV heads, of which this run has none: give --tp above the model's KV heads"},
    {MICRO, "acts between micro-batches: give --micro-batches of at least 2"},
    {FORWARD_FIRST, "needs one micro-batch's forward pass before another's backward pass: give --micro-batches of at "
                    "least 2 and --forward-first"},
    {ROW_COLUMN, "is a mistake of an MLP that is split by rows first: give --mlp-order row-column"},
    {BUCKETS, "acts where ranks sum gradients in buckets: give --dp of at least 2, or --tp of at least 2 and --sp"},
};

/* Those that matter in any run are not here. */
static const struct {
    ar_fault fault;
    unsigned needs;
} rows[] = {
    {AR_FAULT_column_dx_not_reduced, TP},
    {AR_FAULT_row_bias_every_rank, TP | ROW_BIAS},
    {AR_FAULT_row_input_grad_not_gathered, TP | ROW_COLUMN},
    {AR_FAULT_heads_divided_twice, TP},
    {AR_FAULT_allreduce_aliases_input, TP},
    {AR_FAULT_init_local_fan, TP | FRESH},
    {AR_FAULT_init_per_shard_seed, TP | FRESH},
    {AR_FAULT_vocab_target_off_by_shard, TP},
    {AR_FAULT_loss_parallel_no_max, TP},
    {AR_FAULT_embedding_edge_twice, TP},
    {AR_FAULT_bias_grad_wrong_axis, BIAS},
    {AR_FAULT_sp_norm_grad_local, SP},
    {AR_FAULT_sp_row_bias_grad_local, SP | ROW_BIAS},
    {AR_FAULT_sp_position_grad_local, SP | POSITIONS},
    {AR_FAULT_kv_replica_grad_local, KV_COPIES},
    {AR_FAULT_kv_replica_wrong_head, KV_COPIES},
    {AR_FAULT_dropout_same_mask_in_shard, DROPOUT},
    {AR_FAULT_dropout_different_mask_in_replica, DROPOUT},
    {AR_FAULT_dp_mean_of_means, DP},
    {AR_FAULT_dp_sum_of_local_means, DP},
    {AR_FAULT_dp_group_missing, DP},
    {AR_FAULT_dp_broadcast_over_world, DP | TP},
    {AR_FAULT_accum_mean_of_means, MICRO},
    {AR_FAULT_saved_input_overwritten, FORWARD_FIRST},
    {AR_FAULT_embedding_tied_once, TIED},
    {AR_FAULT_gradnorm_counts_replicas, UPDATE},
    {AR_FAULT_gradnorm_local_clip, UPDATE},
    {AR_FAULT_group_wrong_stride, DP | TP},
    {AR_FAULT_world_rank_in_group, DP},
    {AR_FAULT_positions_local, SP | POSITIONS},
    {AR_FAULT_silent_truncation, TP},
    {AR_FAULT_gate_up_interleaved_wrong, TP | PACKED},
    {AR_FAULT_bias_added_twice, BIAS},
    {AR_FAULT_row_bias_partial_grad, TP | ROW_BIAS},
    {AR_FAULT_init_replica_differs, TP | FRESH},
    {AR_FAULT_gather_batch_order, SP},
    {AR_FAULT_collective_order_swapped, DP},
    {AR_FAULT_collective_size_mismatch, TP},
    {AR_FAULT_collective_dtype_mismatch, DP},
    {AR_FAULT_bucket_first_ready, BUCKETS},
    {AR_FAULT_bucket_reduced_twice, BUCKETS},
    {AR_FAULT_bucket_not_packed, BUCKETS},
    {AR_FAULT_bucket_stale_done, STEPS},
    {AR_FAULT_step_before_copy_back, BUCKETS},
    {AR_FAULT_comm_before_producer, BUCKETS},
    {AR_FAULT_stale_activation_reuse, BUCKETS},
    {AR_FAULT_unused_skips_collective, DP},
    {AR_FAULT_unused_set_empty, MODULE},
    {AR_FAULT_unused_in_last_micro_batch, DP},
    {AR_FAULT_tied_reduced_at_first_use, DP | TIED},
    {AR_FAULT_mean_divides_by_world, MODULE},
    {AR_FAULT_dp_init_differs, DP | FRESH},
    {AR_FAULT_zero_gather_missing, UPDATE},
    {AR_FAULT_zero_shards_misaligned, UPDATE},
    {AR_FAULT_accum_last_only, MICRO},
    {AR_FAULT_accum_sum_of_means, MICRO},
    {AR_FAULT_zero_grad_not_recursive, STEPS},
    {AR_FAULT_gradnorm_first_rank_only, UPDATE},
    {AR_FAULT_adam_step_not_synced, UPDATE},
    {AR_FAULT_optimizer_counter_ahead, UPDATE},
    {AR_FAULT_weight_decay_on_shard_only, UPDATE},
};

static unsigned needs_of(ar_fault fault)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].fault == fault)
            return rows[i].needs;
    }
    return 0;
}

static unsigned has(const ar_grads_options *o, const ar_config *c, bool fresh)
{
    const ar_parallel *p = &o->run.parallel;
    const bool tp = p->tp > 1, dp = p->dp > 1, sp = tp && p->sp, micro = p->micro_batches > 1;
    const bool row_bias = c->out_bias || c->mlp_bias, bias = row_bias || c->qkv_bias;
    return (fresh ? FRESH : 0u) | (c->tied ? TIED : 0u) | (c->learned_positions ? POSITIONS : 0u) |
           (ari_part_path(ari_family_of(c->arch), ARI_QKV) ? PACKED : 0u) | (bias ? BIAS : 0u) |
           (row_bias ? ROW_BIAS : 0u) | (tp ? TP : 0u) | (dp ? DP : 0u) | (sp ? SP : 0u) |
           ((size_t)ari_at_least_one(p->tp) > c->kv_heads ? KV_COPIES : 0u) | (micro ? MICRO : 0u) |
           (micro && p->forward_first ? FORWARD_FIRST : 0u) | (o->mlp_order == AR_MLP_ROW_COLUMN ? ROW_COLUMN : 0u) |
           (dp || sp ? BUCKETS : 0u);
}

ar_status ari_grads_fault_check(const ar_grads_options *o, const ar_config *c, bool fresh)
{
    const unsigned missing = needs_of(o->run.fault) & ~has(o, c, fresh);
    for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++) {
        if (missing & (unsigned)reasons[i].need)
            return ar_error_set(AR_ERR_ARG, "fault %s %s", ar_fault_name(o->run.fault), reasons[i].text);
    }
    return AR_OK;
}
