/* SPDX-License-Identifier: Apache-2.0 */
/* The forward and the backward pass of a block, module by module. */
#include "sim/plan/ops_impl.h"

/* --- what works element by element, or head by head --------------------------------------------------------------- */

void ari_op_builder_take(ari_op_builder *w, size_t id)
{
    w->edges.now =
        (ari_values){.at = {ari_op_builder_activation(w, w->config->hidden, ari_op_builder_stream(w), 1)}, .n = 1};
    w->edges.now.at[0].id = id;
}

void ari_op_builder_dropout(ari_op_builder *w, ari_role role)
{
    if (w->c->run.dropout <= 0.0)
        return;
    ari_op_builder_local(w, ARI_OPERATION_DROPOUT, role, 1, w->config->hidden, ari_op_builder_stream(w));
    ari_op_builder_make(w);
}

/* The norms of a block that the config has. */
static bool has_norm(const ari_op_builder *w, ari_role role)
{
    const bool after = role == ARI_ATTENTION_NORM || role == ARI_MLP_NORM;
    if (role == ARI_NORM2 && w->config->residual == AR_RESIDUAL_PARALLEL_ONE_NORM)
        return false;
    return w->config->norm_place != (after ? AR_NORM_BEFORE : AR_NORM_AFTER);
}

/* The input of the block's attention. */
static size_t before_attention(ari_op_builder *w)
{
    return has_norm(w, ARI_NORM1) ? ari_op_builder_forward_of(w, ARI_OPERATION_NORM, ARI_NORM1)->out[0]
                                  : w->edges.entered;
}

/* What the branches of a block both have: the sum of the residual and attention, the block's input, or that normalised. */
static size_t used_twice(ari_op_builder *w)
{
    switch (w->config->residual) {
    case AR_RESIDUAL_IN_TURN:
        break;
    case AR_RESIDUAL_PARALLEL:
        return w->edges.entered;
    case AR_RESIDUAL_PARALLEL_ONE_NORM:
        return before_attention(w);
    }
    return ari_op_builder_forward_of(w, ARI_OPERATION_RESIDUAL, ARI_ATTENTION_SUM)->out[0];
}

/* Adds a branch's output to the residual. Backward: adds the gradients of a value used twice, by the next block or
 * between its branches. */
static void residual(ari_op_builder *w, ari_role role)
{
    const bool whole = role == ARI_LAYER, backward = w->pass == ARI_PASS_BACKWARD;
    ari_operation *op =
        ari_op_builder_local(w, ARI_OPERATION_RESIDUAL, role, 2, w->config->hidden, ari_op_builder_stream(w));
    op->input[1].id = w->edges.skip;
    if (whole && w->edges.section <= w->config->layers)
        op->output[0].id = ari_op_builder_stream_value(w, backward ? w->edges.section : w->edges.section + 1);
    if (backward) {
        const size_t of = whole ? w->edges.entered : used_twice(w);
        op->input[0].of = op->input[1].of = op->output[0].of = of;
    }
    ari_op_builder_make(w);
    w->edges.skip = ari_op_builder_now(w);
}

/* Placement of a norm's input. */
static ar_placement norm_at(const ari_op_builder *w, ari_role role)
{
    if (role == ARI_ATTENTION_NORM || role == ARI_MLP_NORM || ari_is_mtp_part(role))
        return ari_op_builder_stream(w);
    return ari_op_builder_placed(role == ARI_NORM1   ? w->block.norm1
                                 : role == ARI_NORM2 ? w->block.norm2
                                                     : w->outer.final_norm);
}

/* made: the number of what it makes; 0: a new one. */
static void norm_operation(ari_op_builder *w, ari_role role, size_t made)
{
    ari_operation *op = ari_op_builder_local(w, ARI_OPERATION_NORM, role, 1, w->config->hidden, norm_at(w, role));
    op->output[0].id = made;
    op->weight[op->weights++] = ari_op_builder_param(w, role, false);
    if (ari_op_builder_has_bias(w, role))
        op->weight[op->weights++] = ari_op_builder_param(w, role, true);
    ari_op_builder_make(w);
}

void ari_op_builder_norm(ari_op_builder *w, ari_role role, size_t made)
{
    ari_op_builder_move(w, (ar_tp_redistribution){ari_op_builder_stream(w), norm_at(w, role)}, role);
    norm_operation(w, role, made);
}

void ari_op_builder_norm_backward(ari_op_builder *w, ari_role role, size_t made)
{
    norm_operation(w, role, made);
    const ari_op_value dy = w->op.input[0];
    ari_op_builder_move(w, (ar_tp_redistribution){norm_at(w, role), ari_op_builder_stream(w)}, role);
    ari_op_builder_norm_gradient(w, role, &dy);
    if (ari_op_builder_has_bias(w, role))
        ari_op_builder_weight_gradient(w, role, true, NULL, &dy);
}

/* --- branches: linear layers with something between them ---------------------------------------------------------- */

typedef struct branch_ops {
    ar_tp_redistribution enter, leave;
    ari_linear_ops first, second;
    ari_role module;
} branch_ops;

static ar_tp_redistribution placed_redistribution(ar_tp_redistribution h)
{
    return (ar_tp_redistribution){ari_op_builder_placed(h.from), ari_op_builder_placed(h.to)};
}

ar_linear_split ari_op_builder_placed_split(ar_linear_split s)
{
    return (ar_linear_split){s.style, ari_op_builder_placed(s.from), ari_op_builder_placed(s.to)};
}

/* Without the parts of its first layer. */
static branch_ops branch_of(const ar_branch_split *s, ari_role module, ari_role last)
{
    return (branch_ops){
        .enter = placed_redistribution(s->enter),
        .leave = placed_redistribution(s->leave),
        .first = {.split = ari_op_builder_placed_split(s->first), .module = module},
        .second = {.part = {last}, .n = 1, .split = ari_op_builder_placed_split(s->second), .module = last},
        .module = module};
}

static void begin_branch(ari_op_builder *w, const branch_ops *b)
{
    ari_op_builder_move(w, b->enter, b->module);
    ari_op_builder_linear(w, &b->first);
}

static void end_branch(ari_op_builder *w, const branch_ops *b)
{
    ari_op_builder_linear(w, &b->second);
    ari_op_builder_move(w, b->leave, b->module);
}

static void begin_branch_backward(ari_op_builder *w, const branch_ops *b)
{
    ari_op_builder_move(w, ari_op_builder_back(b->leave), b->module);
    ari_op_builder_linear_backward(w, &b->second, NULL, b->first.n > 0 ? &b->first : NULL);
}

static void end_branch_backward(ari_op_builder *w, const branch_ops *b)
{
    ari_op_builder_linear_backward(w, &b->first, &b->second, NULL);
    ari_op_builder_move(w, ari_op_builder_back(b->enter), b->module);
}

static branch_ops attention_of(const ari_op_builder *w)
{
    static const ari_role parts[] = {ARI_Q, ARI_K, ARI_V};
    branch_ops b = branch_of(&w->block.attention, ARI_ATTENTION, ARI_OUT);
    const int n = w->config->latent.kv_rank > 0 ? 0 : w->form.packed ? 1 : 3; /* of latent attention others */
    for (b.first.n = 0; b.first.n < n; b.first.n++)
        b.first.part[b.first.n] = w->form.packed ? ARI_QKV : parts[b.first.n];
    return b;
}

static void up_to_context(ari_op_builder *w, const branch_ops *b)
{
    if (b->first.n > 0)
        begin_branch(w, b);
    else
        ari_op_builder_latent(w, b->enter, b->first.split);
    ari_op_builder_qk_norms(w);
    ari_op_builder_rope(w);
    ari_op_builder_attend(w);
}

static void attention(ari_op_builder *w)
{
    const branch_ops b = attention_of(w);
    up_to_context(w, &b);
    end_branch(w, &b);
}

static void recompute_attention(ari_op_builder *w)
{
    const branch_ops b = attention_of(w);
    up_to_context(w, &b);
    ari_op_builder_linear_recompute(w, &b.second);
}

static void attention_backward(ari_op_builder *w)
{
    const branch_ops b = attention_of(w);
    begin_branch_backward(w, &b);
    ari_op_builder_attend_backward(w);
    ari_op_builder_rope(w);
    ari_op_builder_qk_norms(w);
    if (b.first.n > 0)
        end_branch_backward(w, &b);
    else
        ari_op_builder_latent_backward(w, b.enter, b.first.split, before_attention(w));
}

static branch_ops mlp_of(const ari_op_builder *w)
{
    const bool gated = w->config->gated;
    branch_ops b = branch_of(&w->block.mlp, ARI_MLP, ARI_DOWN);
    b.first.n = gated && !w->form.gate_up ? 2 : 1;
    b.first.part[0] = w->form.gate_up ? ARI_GATE_UP : gated ? ARI_GATE : ARI_FIRST;
    b.first.part[1] = ARI_UP;
    return b;
}

/* Applied to the terms of a sum as if they were the whole, which no layout should ask for. */
static void activation(ari_op_builder *w, const branch_ops *b)
{
    const bool gated = w->config->gated, backward = w->pass == ARI_PASS_BACKWARD;
    const ar_placement left = b->first.split.to, at = left.kind == AR_PARTIAL_SUM ? ari_whole : left;
    ari_operation *op = ari_op_builder_local(w, gated ? ARI_OPERATION_GATE : ARI_OPERATION_ACTIVATION, ARI_ACTIVATION,
                                             gated && !backward ? 2 : 1, w->config->ffn, at);
    if (gated && backward) {
        op->output[op->outputs++] = op->output[0];
        op->output[0].id = op->output[1].id = w->form.gate_up ? ari_op_builder_new_value(w) : 0;
    }
    for (int i = 0; i < 2 && gated; i++)
        (backward ? op->output : op->input)[i].role = i == 0 ? ARI_GATE : ARI_UP;
    ari_op_builder_make(w);
}

static void mlp(ari_op_builder *w)
{
    if (ari_op_builder_experts(w, false))
        return;
    const branch_ops b = mlp_of(w);
    begin_branch(w, &b);
    activation(w, &b);
    end_branch(w, &b);
}

static void recompute_mlp(ari_op_builder *w)
{
    if (ari_op_builder_experts(w, true))
        return;
    const branch_ops b = mlp_of(w);
    begin_branch(w, &b);
    activation(w, &b);
    ari_op_builder_linear_recompute(w, &b.second);
}

static void mlp_backward(ari_op_builder *w)
{
    if (ari_op_builder_experts_backward(w))
        return;
    const branch_ops b = mlp_of(w);
    begin_branch_backward(w, &b);
    activation(w, &b);
    end_branch_backward(w, &b);
}

/* --- block -------------------------------------------------------------------------------------------------------- */

/* True if `part` is recomputed in this layer. */
static bool recomputes(const ari_op_builder *w, ar_recompute part)
{
    return w->c->run.parallel.recompute.what == part && ari_step_recomputes(w->c, w->layer);
}

static void enter(ari_op_builder *w, ar_recompute part)
{
    w->within = recomputes(w, part) ? part : w->within;
}

static void leave(ari_op_builder *w, ar_recompute part)
{
    w->within = w->within == part ? AR_RECOMPUTE_NONE : w->within;
}

/* Enters it in the backward pass: by its forward pass once more. The gradients wait. */
static void enter_back(ari_op_builder *w, ar_recompute part, size_t from, void (*recompute)(ari_op_builder *w))
{
    const ari_values gradient = w->edges.now;
    const size_t skip = w->edges.skip;
    enter(w, part);
    if (w->within != part)
        return;
    w->pass = ARI_PASS_FORWARD;
    w->recomputed = true;
    ari_op_builder_take(w, from);
    recompute(w);
    w->recomputed = false;
    w->pass = ARI_PASS_BACKWARD;
    w->edges.now = gradient;
    w->edges.skip = skip;
}

static void block_norm(ari_op_builder *w, ari_role role)
{
    if (has_norm(w, role))
        ari_op_builder_norm(w, role, 0);
}

static void block_norm_backward(ari_op_builder *w, ari_role role)
{
    if (has_norm(w, role))
        ari_op_builder_norm_backward(w, role, 0);
}

static void up_to_mlp(ari_op_builder *w)
{
    w->edges.entered = w->edges.skip = ari_op_builder_now(w);
    block_norm(w, ARI_NORM1);
    const size_t first = ari_op_builder_now(w);
    enter(w, AR_RECOMPUTE_SELECTIVE);
    attention(w);
    leave(w, AR_RECOMPUTE_SELECTIVE);
    block_norm(w, ARI_ATTENTION_NORM);
    ari_op_builder_dropout(w, ARI_OUT_DROPPED);
    residual(w, ARI_ATTENTION_SUM);
    if (w->config->residual != AR_RESIDUAL_IN_TURN)
        ari_op_builder_take(w, w->config->residual == AR_RESIDUAL_PARALLEL ? w->edges.entered : first);
    block_norm(w, ARI_NORM2);
}

void ari_op_builder_block(ari_op_builder *w)
{
    enter(w, AR_RECOMPUTE_FULL);
    up_to_mlp(w);
    mlp(w);
    block_norm(w, ARI_MLP_NORM);
    ari_op_builder_dropout(w, ARI_MLP_DROPPED);
    residual(w, ARI_LAYER);
    leave(w, AR_RECOMPUTE_FULL);
}

static void recompute_block(ari_op_builder *w)
{
    up_to_mlp(w);
    if (!has_norm(w, ARI_MLP_NORM)) {
        recompute_mlp(w);
        return;
    }
    mlp(w);
    ari_op_builder_norm(w, ARI_MLP_NORM, 0);
}

static void attention_branch_backward(ari_op_builder *w)
{
    ari_op_builder_dropout(w, ARI_OUT_DROPPED);
    block_norm_backward(w, ARI_ATTENTION_NORM);
    enter_back(w, AR_RECOMPUTE_SELECTIVE, before_attention(w), recompute_attention);
    attention_backward(w);
    leave(w, AR_RECOMPUTE_SELECTIVE);
}

/* The order of a block's sums of gradients: of what its branches both have, and with what goes past them. */
void ari_op_builder_block_backward(ari_op_builder *w)
{
    const size_t dy = w->edges.skip = ari_op_builder_now(w);
    const ar_residual form = w->config->residual;
    enter_back(w, AR_RECOMPUTE_FULL, w->edges.entered, recompute_block);
    ari_op_builder_dropout(w, ARI_MLP_DROPPED);
    block_norm_backward(w, ARI_MLP_NORM);
    mlp_backward(w);
    if (form == AR_RESIDUAL_PARALLEL_ONE_NORM) {
        const size_t of_mlp = ari_op_builder_now(w);
        ari_op_builder_take(w, dy);
        attention_branch_backward(w);
        w->edges.skip = of_mlp;
        residual(w, ARI_ATTENTION_SUM);
        w->edges.skip = dy;
    } else {
        block_norm_backward(w, ARI_NORM2);
        residual(w, ARI_ATTENTION_SUM);
        if (form == AR_RESIDUAL_PARALLEL)
            ari_op_builder_take(w, dy);
        attention_branch_backward(w);
    }
    block_norm_backward(w, ARI_NORM1);
    residual(w, ARI_LAYER);
    leave(w, AR_RECOMPUTE_FULL);
}
