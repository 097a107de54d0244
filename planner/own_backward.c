/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass: an operation takes its gradient, then gives back the one that it was given and what the forward
 * pass kept for it. A linear layer holds its dY, and what it put together, until its weights' gradients are made. */
#include "planner/own.h"

static const double WORD = 4.0, LONG = 8.0;

static void take(ari_account *a, double bytes)
{
    ari_account_take(a, ARI_MEMORY_WORKSPACE, bytes);
}

static void give(ari_account *a, double bytes)
{
    ari_account_give(a, ARI_MEMORY_WORKSPACE, bytes);
}

static void next(ari_account *a, double bytes)
{
    a->x = (ari_account_value){bytes, ARI_MEMORY_WORKSPACE, false};
}

/* --- linear layers ------------------------------------------------------------------------------------------------ */

/* The end of one, if one is open. */
static void close_linear(ari_account *a)
{
    if (!a->open)
        return;
    give(a, a->together);
    if (a->puts_off)
        a->dy = (ari_account_value){.kept = true};
    ari_account_finish(a, &a->dy);
    ari_account_finish(a, &a->given);
    a->together = 0.0;
    a->open = a->summed = a->puts_off = false;
}

/* X and dY of the open layer stay: whoever else would end dY does not. A part that is computed again may hold either
 * from before it began. */
static void put_off(ari_account *a, const ari_operation *op)
{
    const ari_memory_kind kind = ari_account_kind(op);
    const double x = ari_account_bytes(&op->input[0]), dy = ari_account_values(op->outputs, op->output);
    const bool of_block = a->dropped == 0.0 && op->role == ARI_DOWN;
    const bool first = op->role == ARI_Q || op->role == ARI_QKV; /* its X is the block's own where no norm is before */
    const bool given = a->within == AR_RECOMPUTE_FULL ? first && !ar_config_norm_before(a->config)
                                                      : op->role != ARI_OUT && !a->prepared;
    a->puts_off = true;
    a->life->later[kind] += x + dy;
    if (a->within != AR_RECOMPUTE_NONE && given)
        a->later[kind] += x;
    if (!a->dy.kept)
        return;
    if (a->within == AR_RECOMPUTE_SELECTIVE || (a->within == AR_RECOMPUTE_FULL && of_block))
        a->later[kind] += dy;
    if (a->dropped > 0.0)
        a->dropped -= dy;
    else if (of_block)
        a->block = 0.0;
    else
        a->residual.kept = true;
}

/* dX, a sum over the weights that this rank counts. */
static void input_gradient(ari_account *a, const ari_operation *op)
{
    const ari_op_value *dy = &op->input[0], *dx = &op->output[0];
    double all = 0.0;
    ari_account_product p = {.batch = 1.0,
                             .rows = ari_account_tokens(dy),
                             .cols = (double)op->weight[0].local[1],
                             .of = op,
                             .along_k = true,
                             .fold = ari_account_fold(a, op),
                             .rank = a->tp_rank};
    for (int i = 0; i < op->weights; i++) {
        p.k += ari_account_counts(a, &op->weight[i]) ? (double)op->weight[i].local[0] : 0.0;
        all += ari_account_bytes(&op->input[i]);
    }
    const double ordered = ari_account_ordered(op, all);
    take(a, ordered + ari_account_bytes(dx));
    ari_account_keep_operand(a, p.cols, p.k);
    p.apart = a->in_chunks || dy->local[0] != 1 ? ari_account_bytes(dx) : 0.0;
    if (a->in_chunks) {
        take(a, a->x.bytes);
        ari_account_multiply_chunks(a, &p, &a->comes);
        a->in_chunks = false;
    } else {
        ari_account_multiply(a, &p);
    }
    give(a, ordered);
    a->dy = a->x;
    a->open = true;
    a->placing = false;
    next(a, ari_account_bytes(dx));
}

/* The gradient that goes past the attention or the MLP is added to a norm's dX. Ends what the norm was given. */
static void pass_norm(ari_account *a, const ari_operation *op, double dx)
{
    ari_account_finish(a, &a->x);
    next(a, dx);
    if (op->layer == ARI_NO_LAYER)
        return;
    give(a, dx);
    ari_account_finish(a, &a->residual);
    a->residual = a->x;
    a->x.kept = op->role == ARI_NORM2; /* it goes past the attention */
}

/* A norm's dX, placed as its input; then the sum. */
static void place_norm(ari_account *a, const ari_operation *op)
{
    const double dx = ari_account_bytes(&op->output[0]), made = ari_account_bytes(&op->input[0]);
    ari_account_redistribute(a, op, ARI_MEMORY_WORKSPACE);
    give(a, made);
    take(a, op->layer == ARI_NO_LAYER ? 0.0 : dx);
    pass_norm(a, op, dx);
}

/* The gradients of all rows of the table, as the ranks have them one after the other, or of the own features. */
static void gather_rows(ari_account *a, const ari_operation *op)
{
    if (a->tokens == AR_EMBEDDING_HIDDEN)
        ari_account_redistribute(a, op, ARI_MEMORY_WORKSPACE);
    else
        take(a, ari_account_bytes(&op->output[0]));
    a->rows = ari_account_bytes(&op->output[0]);
}

/* Of a bias, a norm or a table of rows: 16-bit ones are added up in fp32, beside what was gathered of the rows. By
 * hidden one rank has a copy of them. */
static void add_rows(ari_account *a, const ari_operation *op)
{
    const ari_op_value *weight = &op->output[0];
    if (op->role == ARI_TOKENS && a->tokens == AR_EMBEDDING_HIDDEN && a->tp == 1) {
        a->rows = ari_account_bytes(&op->input[op->inputs - 1]);
        take(a, a->rows);
    }
    if (op->role == ARI_TOKENS && a->rows == 0.0 && a->config->embed_scale > 0.0) {
        a->rows = ari_account_bytes(&op->input[op->inputs - 1]); /* scaled, beside the gradient itself */
        take(a, a->rows);
    }
    if (!a->exact && weight->dtype != AR_F32)
        ari_account_touch(a, WORD * ari_op_elements(weight));
    if (op->role == ARI_TOKENS) {
        give(a, a->rows);
        a->rows = 0.0;
    }
}

/* It is there, rank by rank, until the gradients of its weights are made. */
static void gather_early(ari_account *a, const ari_operation *op, double bytes)
{
    ari_account_early *e = &a->early[a->early[0].bytes > 0.0];
    *e = (ari_account_early){op->call[0].role, bytes};
    take(a, bytes);
}

/* Several samples are put into their order, in memory of their own. */
static void take_early(ari_account *a, const ari_operation *op, double samples)
{
    for (int i = 0; i < 2; i++) {
        ari_account_early *e = &a->early[i];
        if (e->bytes == 0.0 || e->role != op->role)
            continue;
        if (samples > 1.0)
            ari_account_touch(a, e->bytes);
        a->together += e->bytes;
        e->bytes = 0.0;
    }
}

/* Of dX the input ends, and of what dY becomes on its way; the dY that was given stays until the layer closes. */
static void redistribute(ari_account *a, const ari_operation *op)
{
    const double out = ari_account_values(op->outputs, op->output);
    if (ari_account_is_qk_norm(op->role)) {
        ari_account_qk_gather(a, op);
        return;
    }
    if (op->role == ARI_TOKENS) {
        gather_rows(a, op);
        return;
    }
    if (ari_account_is_norm(op->role)) {
        place_norm(a, op);
        return;
    }
    if (op->again && op->call[0].queue == ARI_ON_TP) {
        gather_early(a, op, out);
        return;
    }
    a->in_chunks = ari_account_is_cut(op);
    if (a->in_chunks) /* its product puts it together */
        a->comes = op->call[0];
    else
        ari_account_redistribute(a, op, ARI_MEMORY_WORKSPACE);
    if (op->again) {
        a->together += out;
        return;
    }
    if (a->open || a->placing) {
        ari_account_finish(a, &a->x);
    } else {
        a->given = a->x;
        a->placing = true;
    }
    next(a, out);
}

/* Of ranks that share the tokens each completes some rows of every sample's sums [out, in], one sample after the other:
 * the sums of all rows, and the numbers and rounded values of its own. */
static void sum_over_positions(ari_account *a, const ari_op_call *sums, double tokens, double out, double in)
{
    const size_t rows = (size_t)out, ranks = sums->ranks;
    const double own = (double)(rows / ranks + (a->cp_rank < rows % ranks));
    ari_account_touch(a, LONG * (double)sums->elements + (WORD * in + LONG) * own + WORD * tokens * (out + in));
}

/* Of each sample a product of integers, whose exponents are those of its tokens. A bias, a norm or a table of rows needs
 * nothing. */
static void weight_gradient(ari_account *a, const ari_operation *op)
{
    const ari_op_value *x = &op->input[0], *weight = &op->output[0];
    const double tokens = ari_account_tokens(x), samples = (double)x->local[0];
    const double out = (double)weight->local[0], in = (double)weight->local[1];
    a->summed = a->open && op->inputs > 1; /* biases come first */
    if (op->inputs < 2 || x->ndim != 3 || weight->ndim != 2) {
        add_rows(a, op);
        return;
    }
    take_early(a, op, samples);
    const ari_op_call *sums =
        op->calls > 0 && op->call[op->calls - 1].over == ARI_OVER_CP ? &op->call[op->calls - 1] : NULL;
    const double exponents = WORD * (tokens + samples * (out + in));
    take(a, a->exact ? exponents : 0.0);
    if (sums)
        sum_over_positions(a, sums, tokens / samples, out, in);
    else if (a->exact)
        ari_account_touch(a, WORD * tokens * (out + in));
    give(a, a->exact ? exponents : 0.0);
    ari_account_touch(a, ari_account_copied(a, a->activations, tokens * (out + in)));
}

void ari_account_weights(ari_account *a, const ari_operation *op)
{
    const bool among_others = op->role == ARI_Q || op->role == ARI_K || op->role == ARI_GATE;
    if (op->kind == ARI_OPERATION_REDISTRIBUTE) { /* X, gathered again */
        a->together = ari_account_values(op->outputs, op->output);
        a->kept = ari_account_bytes(&op->input[0]);
        ari_account_redistribute(a, op, ARI_MEMORY_WORKSPACE);
        return;
    }
    a->kept += (a->kept > 0.0 ? 0.0 : ari_account_bytes(&op->input[0])) + ari_account_bytes(&op->input[1]);
    weight_gradient(a, op);
    if (among_others)
        return;
    give(a, a->together);
    ari_account_give(a, ari_account_kind(op), a->kept);
    a->life->later[ari_account_kind(op)] -= a->kept;
    a->together = a->kept = 0.0;
}

/* --- between linear layers ---------------------------------------------------------------------------------------- */

/* A block begins: its gradient goes past the MLP too. */
static void begin_block(ari_account *a, size_t layer)
{
    a->layer = layer;
    if (layer == ARI_NO_LAYER)
        return;
    a->block = a->x.bytes;
    a->residual = a->x;
    a->residual.kept = true; /* the block before ends it */
    a->x.kept = true;
}

static void end_block(ari_account *a)
{
    give(a, a->block);
    a->block = 0.0;
}

static void drop(ari_account *a, const ari_operation *op)
{
    a->dropped = ari_account_bytes(&op->output[0]);
    take(a, a->dropped);
    a->x.bytes = a->dropped;
    a->x.kept = true;
}

/* The gradient that goes into a branch, beside that of what the branch added to the residual: until the branch ends. */
static void norm_of_branch(ari_account *a, const ari_operation *op, double y)
{
    take(a, y);
    ari_account_touch(a, ari_account_gain(a, op));
    a->dropped += y;
    a->x.bytes = y;
    a->x.kept = true;
}

/* dX, and in a block dX with the gradient that went past; unless dX is still to be placed as the input. */
static void norm(ari_account *a, const ari_operation *op)
{
    const double y = ari_account_bytes(&op->output[0]);
    if (ari_account_is_qk_norm(op->role)) {
        ari_account_qk_norm_backward(a, op);
        return;
    }
    if (op->role == ARI_ATTENTION_NORM || op->role == ARI_MLP_NORM) {
        norm_of_branch(a, op, y);
        return;
    }
    const bool moved = a->sequence && a->tp > 1 && !ari_account_is_shard(&op->output[0], 1);
    give(a, a->dropped);
    a->dropped = 0.0;
    take(a, (op->layer == ARI_NO_LAYER || moved ? 1.0 : 2.0) * y);
    ari_account_touch(a, ari_account_gain(a, op));
    if (!moved)
        pass_norm(a, op, y);
}

/* Without a norm of what a branch gets its gradient is added to the one that went past. */
static void add_past(ari_account *a, const ari_operation *op)
{
    const double y = ari_account_bytes(&op->output[0]);
    if (a->config->norm_place != AR_NORM_AFTER)
        return;
    give(a, a->dropped);
    a->dropped = 0.0;
    take(a, y);
    ari_account_finish(a, &a->x);
    next(a, y);
    ari_account_finish(a, &a->residual);
    a->residual = a->x;
    a->x.kept = op->role == ARI_ATTENTION_SUM;
}

static void activate(ari_account *a, const ari_operation *op)
{
    double pre = 0.0;
    for (int i = 0; i < op->outputs; i++)
        pre += ari_account_bytes(&op->output[i]);
    take(a, pre);
    ari_account_finish(a, &a->x);
    ari_account_give(a, ARI_MEMORY_MLP, pre);
    next(a, pre);
}

/* In place of the logits; without them every element of the output is a term. */
static void loss(ari_account *a, const ari_operation *op)
{
    const double x = ari_account_bytes(&op->input[0]);
    if (a->head) {
        ari_account_give(a, ARI_MEMORY_LOGITS, ari_account_loss(a, ari_account_tokens(&op->input[0])));
        ari_account_give(a, ARI_MEMORY_LOGITS, a->config->logit_cap > 0.0 ? x : 0.0);
        a->x = (ari_account_value){x, ARI_MEMORY_LOGITS, false};
    } else {
        take(a, x);
        next(a, x);
    }
}

void ari_account_backward_end(ari_account *a)
{
    close_linear(a);
    a->dropped = 0.0; /* that of the embedding stays */
    a->layer = ARI_NO_LAYER;
}

/* --- what is computed again ---------------------------------------------------------------------------------------- */

/* The gradient waits meanwhile; the input is what the forward pass has kept. */
static ar_status go_again(ari_account *a, const ari_operation *op)
{
    if (!a->again) {
        a->again = true;
        a->prepared = false;
        a->waiting = a->x;
        a->x = (ari_account_value){.kept = true};
    }
    return ari_account_forward(a, op);
}

static void end_again(ari_account *a)
{
    if (a->again)
        a->x = a->waiting;
    a->again = false;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

ar_status ari_account_backward(ari_account *a, const ari_operation *op)
{
    const bool inside = op->kind == ARI_OPERATION_WEIGHT_GRADIENT || op->kind == ARI_OPERATION_PUT_OFF ||
                        (op->kind == ARI_OPERATION_REDISTRIBUTE && !a->summed);
    if (!inside)
        close_linear(a);
    ari_account_part(a, op);
    if (op->layer != a->layer)
        begin_block(a, op->layer);
    if (op->recomputed)
        return go_again(a, op);
    end_again(a);
    switch (op->kind) {
    case ARI_OPERATION_LOSS:
        loss(a, op);
        break;
    case ARI_OPERATION_PRODUCT:
        input_gradient(a, op);
        break;
    case ARI_OPERATION_REDISTRIBUTE:
        redistribute(a, op);
        break;
    case ARI_OPERATION_WEIGHT_GRADIENT:
        weight_gradient(a, op);
        break;
    case ARI_OPERATION_PUT_OFF:
        put_off(a, op);
        break;
    case ARI_OPERATION_NORM:
        norm(a, op);
        break;
    case ARI_OPERATION_GATE:
    case ARI_OPERATION_ACTIVATION:
        activate(a, op);
        break;
    case ARI_OPERATION_ATTENTION:
        return ari_account_attend_backward(a, op);
    case ARI_OPERATION_DROPOUT:
        drop(a, op);
        break;
    case ARI_OPERATION_RESIDUAL:
        add_past(a, op);
        if (op->role == ARI_LAYER) {
            ari_account_leave(a);
            ari_account_unit_ends(a);
            end_block(a);
        }
        break;
    default:
        break;
    }
    return AR_OK;
}
