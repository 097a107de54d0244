/* SPDX-License-Identifier: Apache-2.0 */
/* The effects of the layers' injected faults (anyrank/fault.h), so that a layer reads as its formula. A function after
 * an "if" replaces a step of the layer. The others are called where the fault would be made: unless it is on, they
 * change nothing. A fault that only drops or adds a condition is an ar_faulty in the layer. */
#pragma once

#include "ref/layers/loss.h"
#include "ref/layers/parts.h"

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* The distribution from which a fresh parameter's values are drawn. */
typedef struct ari_draw {
    uint64_t seed;
    size_t fan_in, fan_out;
    ar_layout from; /* the boxes of the full tensor */
} ari_draw;

/** init_replica_differs, dp_init_differs, init_per_shard_seed, init_local_fan, and those of ari_fault_source. */
void ari_fault_draw(ari_draw *d, const ar_param *p, const ar_ctx *ctx);
/** kv_replica_wrong_head, gate_up_interleaved_wrong, sinks_of_first_heads: the boxes of the full tensor that a rank takes
 *  the parameter's values from. */
void ari_fault_source(ar_layout *from, const ar_ctx *ctx, const char *name);
/** collective_order_swapped: the place among n that this rank reduces in i's turn. */
size_t ari_fault_turn(const ar_ctx *ctx, size_t i, size_t n);
/** if dp_broadcast_over_world */
AR_NODISCARD ar_status ari_fault_broadcast_over_world(ar_param *p, ar_ctx *ctx);
/** collective_dtype_mismatch: the dtype of a broadcast of fp32 weights. */
ar_dtype ari_fault_broadcast_dtype(const ar_ctx *ctx, ar_dtype right);

/* --- recomputation ------------------------------------------------------------------------------------------------ */

/** recompute_stale_input: after y = module(x), of which x alone is kept. */
AR_NODISCARD ar_status ari_fault_kept_input(ar_ctx *ctx, const ar_tensor *x, const ar_tensor *y);
/** recompute_new_dropout_mask: the step whose masks are drawn. */
uint32_t ari_fault_mask_step(const ar_ctx *ctx);

/* --- pipelines (faults_pipeline.c) -------------------------------------------------------------------------------- */

/** pp_layers_local, pp_chunks_contiguous, of what a parameter is drawn or read by (values); pp_dropout_layer_local, of
 *  what a mask is drawn by: the name with another layer in it, in `out`, or the name. */
const char *ari_fault_layer_name(char *out, size_t cap, const ar_ctx *ctx, const char *name, bool values);
/** pp_stage_divides: what a stage received, before it goes backward from it. */
AR_NODISCARD ar_status ari_fault_stage_gradient(ar_ctx *ctx, const ar_tensor *dy, int micro_batches);
/** pp_stale_activation, pp_stale_gradient: what a stage received. before: what it did before, in the step's memory;
 *  data NULL: nothing yet. */
AR_NODISCARD ar_status ari_fault_received(ar_ctx *ctx, ar_fault fault, ar_tensor *before, const ar_tensor *taken);

/* --- linear ------------------------------------------------------------------------------------------------------- */

/** row_bias_every_rank, bias_added_twice, allreduce_aliases_input: after y = x W^T + b. row: row-parallel. */
struct ari_output;
AR_NODISCARD ar_status ari_fault_linear_output(ar_ctx *ctx, bool row, const struct ari_output *o, const ar_tensor *x);
/** saved_input_overwritten: before x is saved for `owner`. */
AR_NODISCARD ar_status ari_fault_saved_input(ar_ctx *ctx, ar_saved *saved, const void *owner, const ar_tensor *x);
/** if column_dx_not_reduced: the rows of dX from this rank's part of their sum, which has `all` rows. */
AR_NODISCARD ar_status ari_fault_partial_dx(ar_ctx *ctx, const ar_tensor *dx_rows, ar_sum *s, size_t all,
                                            const char *tag);
/** if row_input_grad_not_gathered: this rank's slice of dX among zeros. */
AR_NODISCARD ar_status ari_fault_narrow_dx(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *slice);
/** weight_grad_leading_dims: the rows of x and dy that a weight's gradient is summed over. */
void ari_fault_weight_rows(const ar_ctx *ctx, const ar_tensor *x, ar_tensor *x_rows, ar_tensor *dy_rows,
                           size_t *samples);
/** if collective_not_differentiable: dy [.., s, f] of the own positions' gradients own [.., s/N, f], among zeros. */
AR_NODISCARD ar_status ari_fault_own_gradient(ar_ctx *ctx, ar_tensor *dy, const ar_tensor *own);
/** qkv_gathered_three_times: x is placed twice more, as the change says, for nobody. */
AR_NODISCARD ar_status ari_fault_gather_again(ar_ctx *ctx, const ar_tensor *x, const ari_features *f,
                                              ar_tp_redistribution change, const char *tag);
/** sp_router_grad_local, of a replicated layer whose tokens are shared out: of dY [.., positions, out], gathered, the
 *  other ranks' positions become zero. */
AR_NODISCARD ar_status ari_fault_own_tokens(ar_ctx *ctx, const ar_tensor *dy);
/** latent_grads_summed_again: before the weights' gradients the dY of a layer of which heads of all ranks take the last
 *  `shared` features; 0: they take none. */
AR_NODISCARD ar_status ari_fault_latents(ar_ctx *ctx, size_t shared, const ar_tensor *dy);
/** sp_latent_key_grad_summed: the gradient of what all heads share. */
AR_NODISCARD ar_status ari_fault_shared_key(ar_ctx *ctx, const ar_tensor *dy);
/** bias_grad_wrong_axis, row_bias_partial_grad: the rows of dy that a bias's gradient is the sum of, and whether they
 *  are other ones than without a fault. */
bool ari_fault_moves_bias_rows(const ar_ctx *ctx, bool row);
AR_NODISCARD ar_status ari_fault_bias_rows(ar_ctx *ctx, bool row, ar_tensor *dy);

/* --- sums of gradients (faults_gradient.c) ------------------------------------------------------------------------ */

/** if unordered_param_grad: grad(p) += dy^T x, a term a token, in fp32, begun at a token that depends on the run and
 *  the rank. dy [tokens, out], x [tokens, in]. */
AR_NODISCARD ar_status ari_fault_gradient_as_it_comes(ar_ctx *ctx, ar_param *p, const ar_tensor *dy,
                                                      const ar_tensor *x);
/** grad(p) += what the gradient of `from` is so far. */
AR_NODISCARD ar_status ari_fault_add_gradient_of(ar_ctx *ctx, ar_param *p, const ar_param *from);
/** Multiplies the gradient that p has accumulated so far by a factor. */
AR_NODISCARD ar_status ari_fault_scale_gradient(ar_ctx *ctx, ar_param *p, float factor);

/* --- norm --------------------------------------------------------------------------------------------------------- */

/** norm_padded_lanes, norm_fp16_store: after y, mean and rstd were written. x, y [rows, h]; bias: LayerNorm only. */
AR_NODISCARD ar_status ari_fault_norm_output(ar_ctx *ctx, ar_norm_kind kind, double eps, const ar_param *weight,
                                             const ar_param *bias, const ar_tensor *y, const ar_tensor *mean,
                                             const ar_tensor *rstd, const ar_tensor *x);
/** latent_norm_before_split: after y was written, the norm of a latent whose features begin those of `row`, and its
 *  statistics. */
AR_NODISCARD ar_status ari_fault_latent_norm(ar_ctx *ctx, const ar_tensor *y, const ar_norm_saved *rows,
                                             const ar_tensor *row, const ar_param *gain);
/** norm_backward_missing: after dx and sum = dx + residual were written. residual NULL: not inside a block. */
AR_NODISCARD ar_status ari_fault_norm_gradient(ar_ctx *ctx, const ar_tensor *dx, const ar_tensor *sum,
                                               const ar_tensor *residual);

/* --- vocabulary, loss, attention ---------------------------------------------------------------------------------- */

/** world_rank_in_group, silent_truncation: the ids [start, start + rows) of this rank. */
void ari_fault_own_ids(const ar_ctx *ctx, size_t vocab, size_t *start, size_t *rows);
/** embedding_edge_twice: the token rows y of ids [start, start + rows), before the ranks' rows are combined. */
AR_NODISCARD ar_status ari_fault_token_rows(ar_ctx *ctx, const ar_tensor *y, const ar_param *token, size_t start,
                                            size_t rows, const ar_batch *batch);
/** silent_truncation: this rank's shard of the logits. */
AR_NODISCARD ar_status ari_fault_logits(ar_ctx *ctx, const ar_tensor *logits, size_t vocab);
/** vocab_target_off_by_shard: the n targets. */
void ari_fault_targets_at_edge(const ar_ctx *ctx, const ari_cross_entropy *c, int64_t *ids, size_t n);
/** collective_size_mismatch: how many of the n tokens this rank reduces the maximum of. */
size_t ari_fault_token_count(const ar_ctx *ctx, size_t n);
/** heads_divided_twice: how many heads of `context`, which is then zero, are filled. */
AR_NODISCARD ar_status ari_fault_heads(ar_ctx *ctx, const ar_tensor *context, size_t *heads);

/** sinks_head_off_by_one: the sinks of this rank's heads, and the terms [b, rows, heads] of their gradient. */
AR_NODISCARD ar_status ari_fault_sinks(ar_ctx *ctx, ar_cbuf *sinks, size_t heads);
AR_NODISCARD ar_status ari_fault_sink_terms(ar_ctx *ctx, const ar_tensor *terms);
/** ring_backward_first_kv: keys and values of all positions, of which own[2] are this rank's, in the backward pass. */
AR_NODISCARD ar_status ari_fault_ring_keys(ar_ctx *ctx, ar_tensor all[2], const ar_tensor own[2]);

/* --- multi-token prediction (faults_mtp.c) ------------------------------------------------------------------------ */

/** ar_batch_roll; mtp_rolled_after_cut, mtp_rolled_over_documents, mtp_mean_over_all, mtp_mean_of_own,
 *  mtp_not_divided. */
AR_NODISCARD ar_status ari_fault_roll(const ar_ctx *ctx, ar_batch *rolled, int64_t **memory, const ar_batch *b,
                                      size_t depth);
/** mtp_head_grad_lost: uses of the head's weight make no gradient from here on, or (begins false) do again. */
void ari_fault_further_use(const ar_ctx *ctx, ar_param *head, bool begins);

/* --- experts (faults_experts.c) ----------------------------------------------------------------------------------- */

/* Of the tokens of a pass: p [tokens, experts] of all, the experts and weights of the slots [tokens, k]. */
typedef struct ari_chosen {
    const ar_tensor *p, *expert, *weight;
} ari_chosen;

/** router_logits_bf16; recompute_routes_differ: the logits z, before anything is made of them. */
AR_NODISCARD ar_status ari_fault_router_logits(ar_ctx *ctx, const ar_tensor *z);
/** router_weights_not_normalised, router_weights_normalised; router_grad_chosen_alone: whether weights are normalised,
 *  or are so in the backward pass. */
bool ari_fault_normalised(const ar_ctx *ctx, bool normalised, bool backward);
/** router_softmax_twice, router_ties_higher_index: after z was routed. */
AR_NODISCARD ar_status ari_fault_routed(ar_ctx *ctx, const ari_chosen *of, const ar_tensor *z, bool normalised);
/* A layer's experts, of which this rank has `own`, from `from` on. */
typedef struct ari_own_experts {
    size_t all, from, own;
} ari_own_experts;
/** router_weights_detached, ep_weights_detached: the gradient of the weights, of slots that go to `expert`. */
AR_NODISCARD ar_status ari_fault_weights_gradient(ar_ctx *ctx, const ar_tensor *g, const ar_tensor *expert,
                                                  const ari_own_experts *of);
/** ep_experts_drawn_alike, of what a parameter is drawn or read by: the name with the number of a rank's expert among
 *  its own in it, in `out`, or the name. */
const char *ari_fault_expert_name(char *out, size_t cap, const ar_ctx *ctx, const char *name);
/** ep_splits_swapped: the counts [ranks] that this rank sends. */
void ari_fault_splits(const ar_ctx *ctx, size_t *sends, size_t ranks);
/** empty_expert_grad_unwritten: after the gradients of n weights were made, each of the rows of its group. */
AR_NODISCARD ar_status ari_fault_empty_gradients(ar_ctx *ctx, ar_param *const *weight, size_t each,
                                                 const ar_groups *groups);
/** router_softmax_twice, router_sum_detached: after the logits' gradient was written. */
AR_NODISCARD ar_status ari_fault_router_gradient(ar_ctx *ctx, const ar_tensor *dz, const ari_chosen *of,
                                                 const ar_tensor *g, const ar_route_rule *rule);
/** router_scale_left_out, router_scale_twice, router_weights_not_normalised; router_sum_detached: the rule of a router of
 *  sigmoids, in one pass or both. */
void ari_fault_score_rule(const ar_ctx *ctx, ar_route_rule *rule, bool backward);
/** router_groups_by_max, router_groups_not_masked, router_bias_in_weights: after scores were routed. bias: [experts]. */
AR_NODISCARD ar_status ari_fault_scored(ar_ctx *ctx, const ari_chosen *of, const ar_tensor *bias,
                                        const ar_route_rule *rule);
/** router_bias_in_weights, router_scale_not_in_gradient: after the logits' gradient was written. */
AR_NODISCARD ar_status ari_fault_scores_gradient(ar_ctx *ctx, const ar_tensor *dz, const ari_chosen *of,
                                                 const ar_tensor *g, const ar_tensor *bias, const ar_route_rule *rule);
/** router_bias_counts_plain: the experts that are counted, in the step's memory if they are others than of->expert. */
AR_NODISCARD ar_status ari_fault_counted(ar_ctx *ctx, ar_tensor *expert, const ari_chosen *of);
/** router_bias_counts_bf16: the sum of n counts, which are rounded too; else `right`. */
int64_t ari_fault_sum_of_counts(const ar_ctx *ctx, int64_t *counts, size_t n, int64_t right);
/** expert_input_weighted: what multiplies the rows that go to the experts, and those that come from them; NULL:
 *  nothing. */
const ar_tensor *ari_fault_input_weight(const ar_ctx *ctx, const ar_tensor *weight);
const ar_tensor *ari_fault_output_weight(const ar_ctx *ctx, const ar_tensor *weight);
/** experts_gate_up_in_halves: gate | up [slots, 2F] as the halves of what has them column by column, or (back) the way
 *  back of their gradient. */
AR_NODISCARD ar_status ari_fault_halves(ar_ctx *ctx, const ar_tensor *pre, bool back);
/** expert_rows_off_by_one: the rows of the slots. */
AR_NODISCARD ar_status ari_fault_places(ar_ctx *ctx, const ar_tensor *place);
/** expert_capacity_drops, last_expert_left_out, ep_outputs_not_returned: after the weights were told and kept. */
AR_NODISCARD ar_status ari_fault_dropped(ar_ctx *ctx, const ar_tensor *weight, const ar_tensor *expert,
                                         const ari_own_experts *of);
/** experts_not_reduced, experts_dx_not_reduced, experts_combined_first: the group over which a product is summed. */
ar_comm *ari_fault_fold_over(const ar_ctx *ctx, bool backward, ar_comm *over);
/** experts_combined_first: what the experts made, combined, and the weights' gradient, of which each rank has its part.
 *  over: the group that cuts the experts. */
AR_NODISCARD ar_status ari_fault_combined(ar_ctx *ctx, const ar_tensor *y, ar_comm *over, const char *tag);
/** if ari_fault_of_shared (shared_expert_left_out, shared_gate_left_out): y += what the shared expert made, or not. */
bool ari_fault_of_shared(const ar_ctx *ctx);
AR_NODISCARD ar_status ari_fault_add_shared(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *made);
/** shared_expert_left_out, shared_gate_left_out, shared_gate_detached: after both gradients were written. */
AR_NODISCARD ar_status ari_fault_shared_gradient(ar_ctx *ctx, const ar_tensor *dmade, const ar_tensor *dlogit,
                                                 const ar_tensor *dy);

/** shared_expert_left_out, of one without a gate: *dmade, zeros like dy in dy's place; else nothing. */
AR_NODISCARD ar_status ari_fault_ungated_gradient(ar_ctx *ctx, ar_tensor *dmade, const ar_tensor *dy);

/* --- context parallelism, order of tokens, documents (faults_context.c) ------------------------------------------- */

/** zigzag_positions: the positions that this rank's tokens get. stream: as of ari_own_positions. */
ar_positions ari_fault_positions(const ar_ctx *ctx, size_t seq, bool stream, ar_positions own);
/** positions_over_documents: the position of a place of a row (ar_batch_position). */
size_t ari_fault_position(const ar_ctx *ctx, const ar_batch *batch, size_t row, size_t at);
/** attention_over_documents, document_boundaries_local: the batch as attention of queries at `rows` sees it. Its
 *  documents may be *made; free(). */
AR_NODISCARD ar_status ari_fault_documents(ar_batch *seen, int32_t **made, const ar_ctx *ctx, const ar_batch *batch,
                                           const ar_positions *rows);
/** labels_after_cut: what the i-th of the own positions of a row predicts. */
int64_t ari_fault_target(const ar_ctx *ctx, const ar_batch *batch, size_t row, const ar_positions *own, size_t i,
                         int64_t target);
/** allgather_token_order: where the chunk of a place of the ring is put down. */
ar_positions ari_fault_chunk(const ar_ctx *ctx, size_t seq, int place, ar_positions positions);
/** allgather_token_order: y [.., positions, features], gathered over tp. */
AR_NODISCARD ar_status ari_fault_gathered(ar_ctx *ctx, ar_tensor *y);
/** allgather_token_order, gather_batch_order: after the rows `from` [ranks, samples, positions, features] of a chunk
 *  were put to their places, the view `to` of a value of all positions. */
AR_NODISCARD ar_status ari_fault_chunk_put(ar_ctx *ctx, const ar_tensor *to, const ar_tensor *from);
/** chunk_not_awaited: the rows of a chunk, in whose place those of the one before it may still lie. */
AR_NODISCARD ar_status ari_fault_chunk_rows(ar_ctx *ctx, const ar_tensor *rows, ar_buf before);
/** cp_tail_dropped: x [b, heads, positions, d] of queries at `rows` of a sequence: outputs, or gradients of them. */
AR_NODISCARD ar_status ari_fault_tail(ar_ctx *ctx, const ar_tensor *x, const ar_positions *rows, size_t seq);
