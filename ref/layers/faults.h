/* SPDX-License-Identifier: Apache-2.0 */
/* Effects of the layers' injected faults (ref/core/fault.c), separate so that a layer reads like its formula. A
 * function after an "if" replaces a step of the layer. The other functions are called at the place of the fault and
 * change nothing unless the fault is on. A fault that only drops or adds a condition is an ari_faulty in the layer. */
#pragma once

#include "ref/layers/loss.h"
#include "ref/layers/parts.h"

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* The distribution from which a fresh parameter's values are drawn. */
typedef struct ari_draw {
    uint64_t seed;
    size_t fan_in, fan_out;
    ar_layout src_layout; /* the boxes of the full tensor */
} ari_draw;

/** Faults init_replica_differs, init_per_shard_seed, init_local_fan, and those of ari_fault_source. */
void ari_fault_draw(ari_draw *d, const ar_param *p, const ar_ctx *ctx);
/** kv_replica_wrong_head, gate_up_interleaved_wrong: changes the boxes of the full tensor from which a rank takes the
 *  parameter's values. */
void ari_fault_source(ar_layout *src_layout, const ar_ctx *ctx);
/** Fault pp_layers_local: returns the name by which a parameter is drawn or read, with another layer's number in `out`,
 *  or the unchanged name. */
const char *ari_fault_layer_name(char *out, size_t cap, const ar_ctx *ctx, const char *name);
/** collective_order_swapped: returns which of n reductions this rank performs at turn i. */
size_t ari_fault_turn(const ar_ctx *ctx, size_t i, size_t n);
/** dp_broadcast_over_world: broadcasts a parameter over the whole world. */
AR_NODISCARD ar_status ari_fault_broadcast_over_world(ar_param *p, ar_ctx *ctx);
/** collective_dtype_mismatch: returns the dtype of a broadcast of fp32 weights. */
ar_dtype ari_fault_broadcast_dtype(const ar_ctx *ctx, ar_dtype right);

/* --- recomputation ------------------------------------------------------------------------------------------------ */

/** recompute_new_dropout_mask: returns the step whose masks are drawn. */
uint32_t ari_fault_mask_step(const ar_ctx *ctx);

/* --- linear ------------------------------------------------------------------------------------------------------- */

/** row_bias_every_rank, bias_added_twice, allreduce_aliases_input: called after y = x W^T + b. row: row-parallel. */
struct ari_output;
AR_NODISCARD ar_status ari_fault_linear_output(ar_ctx *ctx, bool row, const struct ari_output *o, const ar_tensor *x);
/** saved_input_overwritten: called before x is saved for `owner`. */
AR_NODISCARD ar_status ari_fault_saved_input(ar_ctx *ctx, ar_saved *saved, const void *owner, const ar_tensor *x);
/** column_dx_not_reduced: computes rows of dX from this rank's part of a sum with `total_rows` rows. */
AR_NODISCARD ar_status ari_fault_partial_dx(ar_ctx *ctx, const ar_tensor *dx_rows, ar_sum *s, size_t total_rows,
                                            const char *tag);
/** row_input_grad_not_gathered: returns this rank's slice of dX, with zeros elsewhere. */
AR_NODISCARD ar_status ari_fault_narrow_dx(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *slice);
/** weight_grad_leading_dims: changes the rows of x and dy over which a weight's gradient is summed. */
void ari_fault_weight_rows(const ar_ctx *ctx, const ar_tensor *x, ar_tensor *x_rows, ar_tensor *dy_rows,
                           size_t *samples);
/** collective_not_differentiable: returns dy [.., s, f] with the gradients local_dy [.., s/N, f] of this rank's
 *  positions, and zeros elsewhere. */
AR_NODISCARD ar_status ari_fault_own_gradient(ar_ctx *ctx, ar_tensor *dy, const ar_tensor *local_dy);
/** Fault qkv_gathered_three_times: redistributes x twice more without using the result. */
AR_NODISCARD ar_status ari_fault_gather_again(ar_ctx *ctx, const ar_tensor *x, const ari_features *f,
                                              ar_tp_redistribution change, const char *tag);
/** Fault latent_grads_summed_again: sums dY again before the weights' gradients of a layer whose last `shared` features
 *  are used by heads of all ranks; 0: no such features. */
AR_NODISCARD ar_status ari_fault_latents(ar_ctx *ctx, size_t shared, const ar_tensor *dy);
/** bias_grad_wrong_axis, row_bias_partial_grad: changes the rows of dy that are summed to a bias's gradient, and
 *  returns whether they differ from the correct ones. */
bool ari_fault_moves_bias_rows(const ar_ctx *ctx, bool row);
AR_NODISCARD ar_status ari_fault_bias_rows(ar_ctx *ctx, bool row, ar_tensor *dy);

/* --- sums of gradients (faults_gradient.c) ------------------------------------------------------------------------ */

/** unordered_param_grad: adds dy^T x to grad(p) in fp32, one term per token, starting at a token that depends on the
 *  run and the rank. dy [tokens, out], x [tokens, in]. */
AR_NODISCARD ar_status ari_fault_gradient_as_it_comes(ar_ctx *ctx, ar_param *p, const ar_tensor *dy,
                                                      const ar_tensor *x);
/** Multiplies the gradient that p has accumulated so far by a factor. */
AR_NODISCARD ar_status ari_fault_scale_gradient(ar_ctx *ctx, ar_param *p, float factor);

/* --- norm --------------------------------------------------------------------------------------------------------- */

/** norm_padded_lanes, norm_fp16_store: called after y, mean and rstd were written. x, y [rows, h]; bias: LayerNorm
 *  only. */
AR_NODISCARD ar_status ari_fault_norm_output(ar_ctx *ctx, ar_norm_kind kind, double eps, const ar_param *weight,
                                             const ar_param *bias, const ar_tensor *y, const ar_tensor *mean,
                                             const ar_tensor *rstd, const ar_tensor *x);
/** norm_backward_missing: called after dx and sum = dx + residual were written. residual NULL: not inside a block. */
AR_NODISCARD ar_status ari_fault_norm_gradient(ar_ctx *ctx, const ar_tensor *dx, const ar_tensor *sum,
                                               const ar_tensor *residual);

/* --- vocabulary, loss, attention ---------------------------------------------------------------------------------- */

/** world_rank_in_group, silent_truncation: changes this rank's ids [start, start + rows). */
void ari_fault_own_ids(const ar_ctx *ctx, size_t vocab, size_t *start, size_t *rows);
/** embedding_edge_twice: changes the token rows y of ids [start, start + rows) before the ranks' rows are combined. */
AR_NODISCARD ar_status ari_fault_token_rows(ar_ctx *ctx, const ar_tensor *y, const ar_param *token, size_t start,
                                            size_t rows, const ar_batch *batch);
/** silent_truncation: changes this rank's shard of the logits. */
AR_NODISCARD ar_status ari_fault_logits(ar_ctx *ctx, const ar_tensor *logits, size_t vocab);
/** vocab_target_off_by_shard: changes the n targets. */
void ari_fault_targets_at_edge(const ar_ctx *ctx, const ari_cross_entropy *c, int64_t *ids, size_t n);
/** collective_size_mismatch: returns for how many of the n tokens this rank reduces the maximum. */
size_t ari_fault_token_count(const ar_ctx *ctx, size_t n);
/** heads_divided_twice: changes how many heads of `context` are filled; the others are zero. */
AR_NODISCARD ar_status ari_fault_heads(ar_ctx *ctx, const ar_tensor *context, size_t *heads);

/** Fault ring_backward_first_kv: replaces keys and values of all positions in the backward pass; local[2] are this
 *  rank's. */
AR_NODISCARD ar_status ari_fault_ring_keys(ar_ctx *ctx, ar_tensor gathered[2], const ar_tensor local[2]);

/* --- experts ------------------------------------------------------------------------------------------------------ */

/** ep_outputs_not_returned: zeroes the weights of slots whose expert is not one of this rank's `count` experts from
 *  `first_expert` on. */
AR_NODISCARD ar_status ari_fault_clear_remote(ar_ctx *ctx, const ar_tensor *weight, const ar_tensor *expert,
                                              size_t first_expert, size_t count);

/* --- context parallelism, order of tokens (faults_context.c) ------------------------------------------------------ */

/** labels_after_cut: returns the target of the i-th of this rank's positions in a row. */
int64_t ari_fault_target(const ar_ctx *ctx, const ar_batch *batch, size_t row, const ar_positions *positions, size_t i,
                         int64_t target);
/** Fault allgather_token_order: returns the positions to which the chunk of a ring rank is written. */
ar_positions ari_fault_chunk(const ar_ctx *ctx, size_t seq, int place, ar_positions positions);
/** allgather_token_order: changes y [.., positions, features], gathered over tp. */
AR_NODISCARD ar_status ari_fault_gathered(ar_ctx *ctx, ar_tensor *y);
/** allgather_token_order, gather_batch_order: called after the rows `src` [ranks, samples, positions, features] of a
 *  chunk were copied to the view `dst` of a value with all positions. */
AR_NODISCARD ar_status ari_fault_chunk_put(ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src);
/** cp_tail_dropped: changes x [b, heads, positions, d] for queries at `rows` of a sequence: outputs, or gradients of
 *  outputs. */
AR_NODISCARD ar_status ari_fault_tail(ar_ctx *ctx, const ar_tensor *x, const ar_positions *rows, size_t seq);
