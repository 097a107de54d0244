/* SPDX-License-Identifier: Apache-2.0 */
/* Injected faults as edits of the list of operations, in one table: what the list would be in a program that has the
 * fault. The checker does not know of them. A fault that changes no placement, collective or operation has a reason
 * instead of an edit. */
#include <string.h>

#include "plan/lint.h"
#include "ref/core/size.h"

typedef enum edit_action {
    DROP_CALLS,    /* the collectives over `over` (with `tag`, those alone) */
    REPEAT_CALLS,  /* twice */
    REGROUP,       /* collectives over dp join neighbours, as many */
    OVER_WORLD,    /* collectives over dp join all ranks */
    CALLS_TO_NEXT, /* made after the next operation, if that adds this one's bias */
    DROP_OPERATION,
    REPEAT_OPERATION,
    COUNT_BEFORE, /* counts its own targets before it */
    SHARE_TWICE,  /* features of heads are divided by the ranks once more */
    FLOOR_ROWS,   /* rows of the vocabulary that do not divide are left out */
    NOT_SPREAD    /* the parameter is taken to be used alike by all ranks of tp: its gradient is not summed */
} edit_action;

typedef struct edit {
    const char *why; /* why lint cannot see the fault; NULL: it can, by what follows */
    edit_action action;
    bool (*where)(const ari_operation *op, const ari_step_case *c);
    ari_call_group over;
    const char *tag;
} edit;

/* --- where -------------------------------------------------------------------------------------------------------- */

static bool is(const ari_operation *op, ari_operation_kind kind, ari_operation_pass pass)
{
    return op->kind == kind && op->pass == pass && !op->recomputed;
}

static bool cut(const ari_op_value *v, int dim)
{
    return v->at[ARI_AXIS_TP].kind == AR_SHARD && v->at[ARI_AXIS_TP].dim == dim;
}

static bool has_head(const ari_step_case *c)
{
    return c->config->arch != AR_ARCH_STACK;
}

static bool column_dx(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_PRODUCT, ARI_PASS_BACKWARD) && cut(&op->weight[0], 0);
}

static bool row_product(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD) && cut(&op->weight[0], 1);
}

static bool row_dx_gather(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_BACKWARD) && !op->again && cut(&op->input[0], 2) &&
           op->calls > 0;
}

/* Of dY, which a reduce-scatter of the forward pass has left by tokens. */
static bool row_gradient_gather(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_BACKWARD) && !op->again && cut(&op->input[0], 1) &&
           op->calls > 0;
}

static bool qkv_gather(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_REDISTRIBUTE, ARI_PASS_FORWARD) && op->role == ARI_ATTENTION && cut(&op->input[0], 1) &&
           op->calls > 0;
}

static bool attention(const ari_operation *op, const ari_step_case *c)
{
    return is(op, ARI_OPERATION_ATTENTION, ARI_PASS_FORWARD) && c->run.parallel.tp > 1;
}

static bool attention_gradients(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_ATTENTION, ARI_PASS_BACKWARD);
}

static bool loss(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_LOSS, ARI_PASS_FORWARD);
}

static bool block_norm_backward(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_NORM, ARI_PASS_BACKWARD) && op->layer != ARI_NO_LAYER;
}

static bool spread_norm(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return ari_walk_is_norm(op->role);
}

static bool spread_row_bias(const ari_operation *op, const ari_step_case *c)
{
    return !spread_norm(op, c) && op->role != ARI_POSITIONS;
}

static bool spread_positions(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return op->role == ARI_POSITIONS;
}

static bool targets(const ari_operation *op, const ari_step_case *c)
{
    return op->kind == ARI_OPERATION_TARGETS && has_head(c);
}

/* Where dp is 1 a sum over dp alone is none. */
static bool shared_targets(const ari_operation *op, const ari_step_case *c)
{
    return targets(op, c) && c->run.parallel.cp > 1 && ari_at_least_one(c->run.parallel.dp) == 1;
}

static bool micro_batch(const ari_operation *op, const ari_step_case *c)
{
    return is(op, ARI_OPERATION_EMBEDDING, ARI_PASS_FORWARD) && has_head(c) && c->run.parallel.micro_batches > 1;
}

static bool gradients(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return op->kind == ARI_OPERATION_GRADIENT_SUM;
}

static bool broadcasts(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return op->kind == ARI_OPERATION_BROADCAST;
}

static bool broadcasts_among_shards(const ari_operation *op, const ari_step_case *c)
{
    return op->kind == ARI_OPERATION_BROADCAST && c->run.parallel.tp > 1;
}

static bool all_over_dp(const ari_operation *op, const ari_step_case *c)
{
    (void)op;
    return c->run.parallel.tp > 1 && op->kind != ARI_OPERATION_VERIFY && op->kind != ARI_OPERATION_AGREEMENT;
}

static bool embedding_gradient(const ari_operation *op, const ari_step_case *c)
{
    return op->kind == ARI_OPERATION_WEIGHT_GRADIENT && op->role == ARI_TOKENS && op->input[0].ndim == 2 &&
           c->config->tied;
}

static bool tied_head_gradient(const ari_operation *op, const ari_step_case *c)
{
    return op->kind == ARI_OPERATION_WEIGHT_GRADIENT && op->role == ARI_TOKENS && op->input[0].ndim == 3 &&
           c->config->tied;
}

static bool gradient_norm(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return op->kind == ARI_OPERATION_GRADIENT_NORM;
}

static bool uneven_vocabulary(const ari_operation *op, const ari_step_case *c)
{
    return op->pass == ARI_PASS_FORWARD && op->weights > 0 &&
           (op->weight[0].role == ARI_TOKENS || op->weight[0].role == ARI_HEAD) &&
           c->config->vocab % (size_t)ari_at_least_one(c->run.parallel.tp) != 0;
}

static bool biases(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return is(op, ARI_OPERATION_BIAS, ARI_PASS_FORWARD);
}

static bool weight_gathers(const ari_operation *op, const ari_step_case *c)
{
    (void)c;
    return op->kind == ARI_OPERATION_WEIGHT_GATHER;
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

#define BUFFER "it is about which buffer holds a value when, and a type belongs to the value"
#define TIME "it is about when a collective begins, and the list has its operations in order"
#define INDEX "it takes a wrong index: a part of the right length from the wrong place has the same type"
#define SEED "it is about the values that are drawn, and lint computes none"
#define KERNEL "it is inside one rank's computation of an operation, whose inputs and output keep their types"
#define FACTOR "a constant factor changes no placement"
#define ONE_RANK "one rank does otherwise than the others: lint types the one program that all of them run"
#define STATE "it is about what the step before left behind, and lint types one step"
#define COUNTED "which ranks count an element is a condition in the code of one operation, not a placement"
#define IN_GROUPS "lint types a sum over dp as one, whatever groups of ranks it is made in"
#define ONE_MICRO "it is about one micro-batch, and a type belongs to the values of all of them"
#define UNUSED "which parameters get a gradient is known when samples are there"

static const edit edits[AR_FAULT_COUNT] = {
    [AR_FAULT_column_dx_not_reduced] = {NULL, DROP_CALLS, column_dx, ARI_OVER_TP, NULL},
    [AR_FAULT_row_bias_every_rank] = {NULL, CALLS_TO_NEXT, row_product, ARI_OVER_TP, NULL},
    [AR_FAULT_row_input_grad_not_gathered] = {NULL, DROP_OPERATION, row_dx_gather, ARI_OVER_TP, NULL},
    [AR_FAULT_heads_divided_twice] = {NULL, SHARE_TWICE, attention, ARI_OVER_TP, NULL},
    [AR_FAULT_allreduce_aliases_input] = {.why = BUFFER},
    [AR_FAULT_init_local_fan] = {.why = SEED},
    [AR_FAULT_init_per_shard_seed] = {.why = SEED},
    [AR_FAULT_vocab_target_off_by_shard] = {.why = INDEX},
    [AR_FAULT_loss_parallel_no_max] = {NULL, DROP_CALLS, loss, ARI_OVER_TP, "loss max"},
    [AR_FAULT_embedding_edge_twice] = {.why = INDEX},
    [AR_FAULT_weight_grad_leading_dims] = {.why = KERNEL},
    [AR_FAULT_bias_grad_wrong_axis] = {.why = KERNEL},
    [AR_FAULT_norm_backward_missing] = {NULL, DROP_OPERATION, block_norm_backward, ARI_OVER_TP, NULL},
    [AR_FAULT_sp_norm_grad_local] = {NULL, NOT_SPREAD, spread_norm, ARI_OVER_TP, NULL},
    [AR_FAULT_sp_row_bias_grad_local] = {NULL, NOT_SPREAD, spread_row_bias, ARI_OVER_TP, NULL},
    [AR_FAULT_sp_position_grad_local] = {NULL, NOT_SPREAD, spread_positions, ARI_OVER_TP, NULL},
    [AR_FAULT_kv_replica_grad_local] = {NULL, DROP_CALLS, attention_gradients, ARI_OVER_COPIES, NULL},
    [AR_FAULT_kv_replica_wrong_head] = {.why = INDEX},
    [AR_FAULT_dropout_same_mask_in_shard] = {.why = SEED},
    [AR_FAULT_dropout_different_mask_in_replica] = {.why = SEED},
    [AR_FAULT_dp_mean_of_means] = {NULL, DROP_CALLS, targets, ARI_OVER_DP, NULL},
    [AR_FAULT_dp_sum_of_local_means] = {NULL, DROP_CALLS, targets, ARI_OVER_DP, NULL},
    [AR_FAULT_dp_group_missing] = {NULL, DROP_CALLS, gradients, ARI_OVER_DP, NULL},
    [AR_FAULT_dp_broadcast_over_world] = {NULL, OVER_WORLD, broadcasts_among_shards, ARI_OVER_DP, NULL},
    [AR_FAULT_accum_mean_of_means] = {NULL, COUNT_BEFORE, micro_batch, ARI_OVER_DP, NULL},
    [AR_FAULT_saved_input_overwritten] = {.why = BUFFER},
    [AR_FAULT_embedding_tied_once] = {NULL, DROP_OPERATION, embedding_gradient, ARI_OVER_TP, NULL},
    [AR_FAULT_tied_weight_untied] = {NULL, DROP_OPERATION, tied_head_gradient, ARI_OVER_TP, NULL},
    [AR_FAULT_gradnorm_counts_replicas] = {.why = COUNTED},
    [AR_FAULT_gradnorm_local_clip] = {NULL, DROP_CALLS, gradient_norm, ARI_OVER_TP, NULL},
    [AR_FAULT_group_wrong_stride] = {NULL, REGROUP, all_over_dp, ARI_OVER_DP, NULL},
    [AR_FAULT_world_rank_in_group] = {.why = INDEX},
    [AR_FAULT_positions_local] = {.why = INDEX},
    [AR_FAULT_silent_truncation] = {NULL, FLOOR_ROWS, uneven_vocabulary, ARI_OVER_TP, NULL},
    [AR_FAULT_gate_up_interleaved_wrong] = {.why = INDEX},
    [AR_FAULT_norm_padded_lanes] = {.why = KERNEL},
    [AR_FAULT_bias_added_twice] = {NULL, REPEAT_OPERATION, biases, ARI_OVER_TP, NULL},
    [AR_FAULT_row_bias_partial_grad] = {.why = FACTOR},
    [AR_FAULT_init_replica_differs] = {.why = SEED},
    [AR_FAULT_gather_batch_order] = {.why = INDEX},
    [AR_FAULT_collective_order_swapped] = {.why = ONE_RANK},
    [AR_FAULT_collective_size_mismatch] = {.why = ONE_RANK},
    [AR_FAULT_collective_dtype_mismatch] = {.why = ONE_RANK},
    [AR_FAULT_bucket_first_ready] = {.why = TIME},
    [AR_FAULT_bucket_reduced_twice] = {NULL, REPEAT_CALLS, gradients, ARI_OVER_DP, NULL},
    [AR_FAULT_bucket_not_packed] = {.why = BUFFER},
    [AR_FAULT_bucket_stale_done] = {.why = STATE},
    [AR_FAULT_step_before_copy_back] = {.why = TIME},
    [AR_FAULT_comm_before_producer] = {.why = TIME},
    [AR_FAULT_stale_activation_reuse] = {.why = BUFFER},
    [AR_FAULT_unused_skips_collective] = {.why = ONE_RANK},
    [AR_FAULT_unused_set_empty] = {.why = UNUSED},
    [AR_FAULT_unused_in_last_micro_batch] = {.why = UNUSED},
    [AR_FAULT_tied_reduced_at_first_use] = {.why = TIME},
    [AR_FAULT_accum_last_only] = {.why = BUFFER},
    [AR_FAULT_accum_sum_of_means] = {NULL, COUNT_BEFORE, micro_batch, ARI_OVER_DP, NULL},
    [AR_FAULT_mean_divides_by_world] = {.why = FACTOR},
    [AR_FAULT_dp_init_differs] = {NULL, DROP_OPERATION, broadcasts, ARI_OVER_DP, NULL},
    [AR_FAULT_zero_gather_missing] = {NULL, DROP_CALLS, weight_gathers, ARI_OVER_DP, NULL},
    [AR_FAULT_zero_shards_misaligned] = {.why = INDEX},
    [AR_FAULT_zero_grad_not_recursive] = {.why = STATE},
    [AR_FAULT_gradnorm_first_rank_only] = {.why = COUNTED},
    [AR_FAULT_gradnorm_copy_as_shard] = {.why = COUNTED},
    [AR_FAULT_gradnorm_mean_of_ranks] = {.why = KERNEL},
    [AR_FAULT_adam_step_not_synced] = {.why = STATE},
    [AR_FAULT_optimizer_counter_ahead] = {.why = STATE},
    [AR_FAULT_weight_decay_on_shard_only] = {.why = COUNTED},
    [AR_FAULT_norm_fp16_store] = {.why = KERNEL},
    [AR_FAULT_ring_backward_first_kv] = {.why = BUFFER},
    [AR_FAULT_ring_kv_grad_local] = {NULL, DROP_CALLS, attention_gradients, ARI_OVER_RING, NULL},
    [AR_FAULT_cp_tail_dropped] = {.why = KERNEL},
    [AR_FAULT_cp_targets_own] = {NULL, DROP_CALLS, shared_targets, ARI_OVER_DP, NULL},
    [AR_FAULT_cp_targets_whole] = {.why = COUNTED},
    [AR_FAULT_labels_after_cut] = {.why = INDEX},
    [AR_FAULT_zigzag_positions] = {.why = INDEX},
    [AR_FAULT_allgather_token_order] = {.why = INDEX},
    [AR_FAULT_chunk_not_awaited] = {.why = BUFFER},
    [AR_FAULT_attention_over_documents] = {.why = KERNEL},
    [AR_FAULT_document_boundaries_local] = {.why = INDEX},
    [AR_FAULT_positions_over_documents] = {.why = INDEX},
    [AR_FAULT_recompute_new_dropout_mask] = {.why = SEED},
    [AR_FAULT_recompute_stale_input] = {.why = BUFFER},
    [AR_FAULT_qkv_gathered_three_times] = {NULL, REPEAT_CALLS, qkv_gather, ARI_OVER_TP, NULL},
    [AR_FAULT_collective_not_differentiable] = {NULL, DROP_CALLS, row_gradient_gather, ARI_OVER_TP, NULL},
    [AR_FAULT_unordered_param_grad] = {.why = KERNEL},
    [AR_FAULT_dp_averaged_again] = {.why = FACTOR},
    [AR_FAULT_accum_divided_each_time] = {.why = FACTOR},
    [AR_FAULT_pp_sum_loss] = {.why = FACTOR},
    [AR_FAULT_pp_stage_divides] = {.why = FACTOR},
    [AR_FAULT_pp_layers_local] = {.why = INDEX},
    [AR_FAULT_pp_dropout_layer_local] = {.why = SEED},
    [AR_FAULT_pp_chunks_contiguous] = {.why = INDEX},
    [AR_FAULT_pp_gradnorm_own_stage] = {NULL, DROP_CALLS, gradient_norm, ARI_OVER_PP, NULL},
    [AR_FAULT_pp_loss_last_micro_batch] = {.why = BUFFER},
    [AR_FAULT_pp_tied_not_summed] = {NULL, DROP_CALLS, gradients, ARI_OVER_ENDS, NULL},
    [AR_FAULT_pp_stale_activation] = {.why = BUFFER},
    [AR_FAULT_pp_stale_gradient] = {.why = BUFFER},
    [AR_FAULT_zb_weight_pass_missing] = {.why = ONE_MICRO},
    [AR_FAULT_zb_tied_counted_twice] = {.why = FACTOR},
    [AR_FAULT_zb_hooks_skipped] = {NULL, DROP_CALLS, gradients, ARI_OVER_DP, NULL},
    [AR_FAULT_zero_last_micro_batch] = {.why = BUFFER},
    [AR_FAULT_zero_stale_weights] = {.why = STATE},
    [AR_FAULT_zero_backward_not_gathered] = {.why = TIME},
    [AR_FAULT_zero_gather_order] = {.why = INDEX},
    [AR_FAULT_zero_share_off_by_one] = {.why = INDEX},
    [AR_FAULT_hsdp_copies_not_summed] = {.why = IN_GROUPS},
};

const char *ar_lint_cannot_see(ar_fault f)
{
    static const char none[] = "nothing is known of it";
    if ((unsigned)f >= AR_FAULT_COUNT || (!edits[f].why && !edits[f].where))
        return none;
    return edits[f].why;
}

/* --- edits -------------------------------------------------------------------------------------------------------- */

static ar_status pass_on(ari_lint_editor *e, const ari_operation *op)
{
    return e->visit(e->user, op);
}

static bool meant(const edit *x, const ari_op_call *call)
{
    return call->over == x->over && (!x->tag || strcmp(x->tag, call->tag) == 0);
}

/* The operation with its calls dropped, repeated, or over other ranks. */
static void edit_calls(ari_lint_editor *e, const edit *x, ari_operation *op)
{
    const ari_operation was = *op;
    op->calls = 0;
    for (int i = 0; i < was.calls; i++) {
        ari_op_call call = was.call[i];
        const bool here = meant(x, &call);
        e->edits += here;
        if (here && x->action == DROP_CALLS)
            continue;
        if (here && x->action == REGROUP)
            call.over = ARI_OVER_TP;
        if (here && x->action == OVER_WORLD)
            call.ranks = (size_t)ar_parallel_world(&e->c->run.parallel);
        op->call[op->calls++] = call;
        if (here && x->action == REPEAT_CALLS && op->calls < ARI_OP_CALLS)
            op->call[op->calls++] = call;
    }
}

static void shorten(ari_lint_editor *e, ari_op_value *v, int dim, size_t to)
{
    e->edits += v->local[dim] != to;
    v->local[dim] = to;
}

/* --- gradients that are not summed -------------------------------------------------------------------------------- */

static void take_whole(ari_op_value *v)
{
    v->at[ARI_AXIS_TP] = (ar_placement){AR_INVARIANT, 0};
}

/* A bucket of gradients that are summed over tp: those that no longer are become one of their own. */
static ar_status split_bucket(ari_lint_editor *e, ari_operation *op)
{
    ari_operation other = *op;
    const edit calls = {.action = DROP_CALLS, .over = ARI_OVER_TP};
    if (op->input[0].at[ARI_AXIS_TP].kind != AR_PARTIAL_SUM || e->unspread == 0)
        return pass_on(e, op);
    other.params = e->unspread < op->params ? e->unspread : op->params;
    op->params -= other.params;
    e->unspread -= other.params;
    take_whole(&other.input[0]);
    other.made = other.input[0].at[ARI_AXIS_TP];
    edit_calls(e, &calls, &other);
    if (op->params > 0)
        AR_TRY(pass_on(e, op));
    return other.calls > 0 ? pass_on(e, &other) : AR_OK;
}

static ar_status not_spread(ari_lint_editor *e, const edit *x, ari_operation *op)
{
    if (op->kind == ARI_OPERATION_GRADIENT_SUM)
        return split_bucket(e, op);
    for (int i = 0; i < op->weights && x->where(op, e->c); i++) {
        if (op->weight[i].at[ARI_AXIS_TP].kind == AR_REPLICATE)
            take_whole(&op->weight[i]);
    }
    const bool gradient = op->kind == ARI_OPERATION_WEIGHT_GRADIENT && x->where(op, e->c) &&
                          op->output[0].at[ARI_AXIS_TP].kind == AR_PARTIAL_SUM && e->c->run.parallel.tp > 1;
    if (gradient) {
        take_whole(&op->output[0]);
        e->unspread += op->micro == e->first_micro;
        e->edits++;
    }
    if (op->kind == ARI_OPERATION_BROADCAST && x->where(op, e->c) && op->output[0].at[ARI_AXIS_TP].kind == AR_REPLICATE)
        take_whole(&op->output[0]);
    return pass_on(e, op);
}

/* --- one operation ------------------------------------------------------------------------------------------------ */

static void take_term(ari_op_value *v)
{
    const ar_placement tp = v->at[ARI_AXIS_TP];
    if (tp.kind == AR_SHARD)
        v->local[tp.dim] = v->shape[tp.dim];
    v->at[ARI_AXIS_TP] = (ar_placement){AR_PARTIAL_SUM, 0};
}

/* A held row-parallel product and what comes after it: where that adds the bias, the reduction comes after. */
static ar_status release(ari_lint_editor *e, ari_operation *next)
{
    ari_operation *held = &e->held;
    e->holds = false;
    if (next->kind == ARI_OPERATION_BIAS && next->role == held->role && held->calls > 0) {
        for (int i = 0; i < held->outputs; i++) {
            take_term(&held->output[i]);
            take_term(&next->input[i]);
        }
        for (int i = 0; i < held->calls; i++)
            next->call[next->calls++] = held->call[i];
        held->calls = 0;
        e->edits++;
    }
    return pass_on(e, held);
}

static ar_status count_targets(ari_lint_editor *e, const ari_operation *op)
{
    ari_operation count = {.kind = ARI_OPERATION_TARGETS,
                           .pass = op->pass,
                           .layer = op->layer,
                           .micro = op->micro,
                           .times = op->times,
                           .inputs = 1,
                           .outputs = 1};
    const ar_parallel *p = &e->c->run.parallel;
    const int ranks = ar_parallel_world(p) / ari_at_least_one(p->tp) / ari_at_least_one(p->pp);
    count.output[0] = count.input[0] = (ari_op_value){.dtype = AR_I64, .ndim = 1, .shape = {1}, .local = {1}};
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        const bool summed = ari_call_group_has(ARI_OVER_DP, axis);
        count.output[0].at[axis] = (ar_placement){AR_INVARIANT, 0};
        count.input[0].at[axis] = (ar_placement){summed ? AR_PARTIAL_SUM : AR_INVARIANT, 0};
    }
    if (ranks > 1)
        count.call[count.calls++] = (ari_op_call){.kind = ARI_CALL_ALL_REDUCE,
                                                  .over = ARI_OVER_DP,
                                                  .ranks = (size_t)ranks,
                                                  .elements = 1,
                                                  .dtype = AR_I64,
                                                  .often = ARI_EACH_STEP,
                                                  .repeats = 1,
                                                  .role = ARI_NO_ROLE,
                                                  .tag = "targets"};
    e->edits++;
    return pass_on(e, &count);
}

static ar_status edited(ari_lint_editor *e, const edit *x, ari_operation *op)
{
    const size_t tp = (size_t)ari_at_least_one(e->c->run.parallel.tp);
    switch (x->action) {
    case DROP_OPERATION:
        e->edits++;
        return AR_OK;
    case REPEAT_OPERATION:
        e->edits++;
        AR_TRY(pass_on(e, op));
        break;
    case CALLS_TO_NEXT:
        e->held = *op;
        e->holds = true;
        return AR_OK;
    case COUNT_BEFORE:
        AR_TRY(count_targets(e, op));
        break;
    case SHARE_TWICE:
        shorten(e, &op->output[0], 2, op->output[0].local[2] / tp);
        break;
    case FLOOR_ROWS:
        shorten(e, &op->weight[0], 0, op->weight[0].shape[0] / tp);
        break;
    default:
        edit_calls(e, x, op);
    }
    return pass_on(e, op);
}

ar_status ari_lint_edit(void *user, const ari_operation *op)
{
    ari_lint_editor *e = user;
    const edit *x = &edits[e->fault];
    ari_operation copy = *op;
    if (e->fault == AR_FAULT_NONE)
        return pass_on(e, op);
    if (op->kind == ARI_OPERATION_EMBEDDING && op->pass == ARI_PASS_FORWARD && !e->any_micro) {
        e->any_micro = true;
        e->first_micro = op->micro;
    }
    if (e->holds)
        AR_TRY(release(e, &copy));
    if (x->action == NOT_SPREAD)
        return not_spread(e, x, &copy);
    return x->where(op, e->c) ? edited(e, x, &copy) : pass_on(e, &copy);
}
