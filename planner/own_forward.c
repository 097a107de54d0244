/* SPDX-License-Identifier: Apache-2.0 */
/* The forward pass: an operation takes its result, and gives its input back unless that stays for the backward pass. */
#include "planner/own.h"

static const double INDEX = 8.0, WORD = 4.0;

ari_memory_kind ari_account_kind(const ari_operation *op)
{
    if (op->layer == ARI_NO_LAYER)
        return op->kind == ARI_OPERATION_PRODUCT || op->kind == ARI_OPERATION_LOSS ? ARI_MEMORY_LOGITS
                                                                                   : ARI_MEMORY_OUTER;
    switch (op->role) {
    case ARI_NORM1:
    case ARI_NORM2:
    case ARI_ATTENTION_NORM:
    case ARI_MLP_NORM:
    case ARI_ATTENTION_SUM:
    case ARI_LAYER:
        return ARI_MEMORY_BETWEEN;
    case ARI_FIRST:
    case ARI_GATE_UP:
    case ARI_GATE:
    case ARI_DOWN:
    case ARI_ACTIVATION:
    case ARI_MLP:
        return ARI_MEMORY_MLP;
    default:
        return ARI_MEMORY_ATTENTION;
    }
}

bool ari_account_is_norm(ari_role role)
{
    return ari_walk_is_norm(role);
}

double ari_account_tokens(const ari_op_value *v)
{
    return (double)v->local[0] * (double)v->local[1];
}

bool ari_account_is_shard(const ari_op_value *v, int dim)
{
    return v->at[ARI_AXIS_TP].kind == AR_SHARD && v->at[ARI_AXIS_TP].dim == dim;
}

/* Parts of all ranks that are put together along dimension dim: first as they arrive, unless nothing lies before that
 * dimension. */
static void arrange(ari_account *a, const ari_operation *op, int dim)
{
    const ari_op_value *whole = &op->output[0];
    const bool blocks =
        dim == 2 && (op->outputs > 1 || whole->role == ARI_QKV || whole->role == ARI_GATE_UP); /* cut by themselves */
    size_t before = 1;
    for (int d = 0; d < dim; d++)
        before *= whole->local[d];
    if (before != 1 || blocks)
        ari_account_touch(a, ari_account_values(op->outputs, op->output));
}

void ari_account_redistribute(ari_account *a, const ari_operation *op, ari_memory_kind kind)
{
    const ari_op_value *in = &op->input[0], *out = &op->output[0];
    const ar_placement from = in->at[ARI_AXIS_TP], to = out->at[ARI_AXIS_TP];
    ari_account_take(a, kind, ari_account_values(op->outputs, op->output));
    if (from.kind != AR_SHARD)
        return;
    if (to.kind != AR_SHARD) {
        arrange(a, op, from.dim);
        return;
    }
    /* All to all: the parts for the ranks, then those from them. */
    const double given = to.dim > 1 || in->local[0] != 1 ? ari_account_bytes(in) : 0.0;
    const double got = from.dim > 1 || out->local[0] != 1 ? ari_account_bytes(out) : 0.0;
    ari_account_touch(a, given + got);
}

/* --- operations --------------------------------------------------------------------------------------------------- */

static void next(ari_account *a, double bytes, ari_memory_kind kind, bool kept)
{
    a->x = (ari_account_value){bytes, kind, kept};
    a->gathered = false;
}

void ari_account_finish(ari_account *a, ari_account_value *v)
{
    if (!v->kept)
        ari_account_give(a, v->kind, v->bytes);
    *v = (ari_account_value){.kept = true};
}

/* The row of each token stays. By vocabulary each rank makes rows of all tokens, of which it keeps the own ones. */
static void embed(ari_account *a, const ari_operation *op)
{
    const ari_op_value *table = &op->weight[0];
    const double tokens = ari_account_tokens(&op->input[0]), y = ari_account_bytes(&op->output[0]);
    const double all = a->word * tokens * (double)table->local[1];
    const bool cast = table->dtype != a->activations;
    const double rows = cast ? (double)ar_dtype_bytes(table->dtype) * tokens * (double)table->local[1] : 0.0;
    ari_account_take(a, ARI_MEMORY_OUTER, INDEX * tokens);
    ari_account_touch(a, INDEX * tokens);
    ari_account_take(a, ARI_MEMORY_OUTER, rows + all);
    ari_account_give(a, ARI_MEMORY_OUTER, rows);
    const bool copied = a->tokens == AR_EMBEDDING_HIDDEN && a->tp == 1;
    if (y != all || copied) {
        ari_account_take(a, ARI_MEMORY_OUTER, y);
        ari_account_give(a, ARI_MEMORY_OUTER, all);
    }
    next(a, y, ARI_MEMORY_OUTER, a->config->norm_place == AR_NORM_AFTER); /* what no norm keeps nobody ends */
}

static void positions(ari_account *a, const ari_operation *op)
{
    const double y = ari_account_bytes(&op->output[0]);
    ari_account_take(a, ARI_MEMORY_OUTER, INDEX * ari_account_tokens(&op->output[0]));
    ari_account_take(a, ARI_MEMORY_OUTER, y);
    ari_account_touch(a, y / a->word * (double)ar_dtype_bytes(op->weight[0].dtype));
    ari_account_finish(a, &a->x);
    next(a, y, ARI_MEMORY_OUTER, false);
}

double ari_account_gain(const ari_account *a, const ari_operation *op)
{
    return a->config->norm_plus_one ? WORD * (double)op->weight[0].local[0] : 0.0;
}

double ari_account_norm_rows(const ari_operation *op)
{
    return (8.0 + WORD) * ari_op_elements(&op->output[0]) / (double)op->weight[0].local[0];
}

/* y, and of each row its mean in binary64 and a scale. The input stays; so does y, but for a norm of what is added to
 * the residual. */
static void norm(ari_account *a, const ari_operation *op)
{
    const ari_memory_kind kind = ari_account_kind(op);
    const double y = ari_account_bytes(&op->output[0]);
    if (ari_account_is_qk_norm(op->role)) {
        ari_account_qk_norm(a, op);
        return;
    }
    a->prepared = true;
    ari_account_take(a, kind, y + ari_account_norm_rows(op));
    ari_account_touch(a, ari_account_gain(a, op));
    next(a, y, kind, op->role != ARI_ATTENTION_NORM && op->role != ARI_MLP_NORM);
}

/* Its input ends, unless it is to be redistributed again; what is between the branches, which a norm may gather, nobody
 * ends. */
static void redistribute(ari_account *a, const ari_operation *op)
{
    if (ari_account_is_qk_norm(op->role)) {
        ari_account_qk_gather(a, op);
        return;
    }
    const ari_memory_kind kind = a->x.kind == ARI_MEMORY_LOGITS ? ARI_MEMORY_LOGITS : ari_account_kind(op);
    a->x.kept = a->x.kept || op->stays || ari_account_is_norm(op->role);
    a->prepared = a->prepared || !op->stays;
    if (ari_account_is_cut(op)) {
        a->comes = op->call[0];
        a->in_chunks = true;
        a->all = (ari_account_value){op->stays ? 0.0 : ari_account_values(op->outputs, op->output), kind, true};
        return;
    }
    ari_account_redistribute(a, op, kind);
    ari_account_finish(a, &a->x);
    next(a, ari_account_values(op->outputs, op->output), kind, false);
    a->gathered = op->stays;
}

/* The biases of several weights, side by side. */
static double joined_biases(const ari_account *a, const ari_operation *op, double cols)
{
    const bool has = op->weight[0].role == ARI_Q ? a->config->qkv_bias : a->config->mlp_bias;
    return op->weights > 1 && has ? WORD * cols : 0.0;
}

void ari_account_keep_operand(ari_account *a, double rows, double k)
{
    const bool passed = a->passed[a->pass == ARI_PASS_BACKWARD && !a->again][a->stage];
    const double bytes = WORD * (rows * k + rows + k);
    if (a->exact && !ari_account_unit_keeps(a, bytes, passed) && !passed)
        a->operands += bytes;
}

/* The product of what is there, or comes in chunks; an input that does not stay ends. */
static void multiply(ari_account *a, const ari_account_product *p)
{
    if (a->in_chunks) {
        ari_account_take(a, a->all.kind, a->all.bytes);
        ari_account_multiply_chunks(a, p, &a->comes);
        a->in_chunks = false;
    } else {
        ari_account_multiply(a, p);
        a->x.kept = !a->gathered;
    }
}

static void product(ari_account *a, const ari_operation *op)
{
    const ari_op_value *x = &op->input[0];
    const ari_memory_kind kind = ari_account_kind(op);
    ari_account_product p = {.batch = 1.0,
                             .rows = ari_account_tokens(x),
                             .k = (double)op->weight[0].local[1],
                             .of = op,
                             .fold = ari_account_fold(a, op),
                             .rank = a->tp_rank};
    double y = 0.0;
    for (int i = 0; i < op->weights; i++)
        p.cols += (double)op->weight[i].local[0];
    y = ari_account_values(op->outputs, op->output);
    p.apart = op->role == ARI_FIRST && !a->moves ? 2.0 * y : y; /* with its activation */
    ari_account_take(a, kind, p.apart);
    if (!a->in_chunks && x->local[0] == 1)
        p.apart = 0.0;
    const double biases = joined_biases(a, op, p.cols);
    const double ordered = ari_account_ordered(op, a->word * p.rows * p.k);
    ari_account_take(a, ARI_MEMORY_WORKSPACE, biases + ordered);
    ari_account_keep_operand(a, p.cols, p.k);
    multiply(a, &p);
    ari_account_give(a, ARI_MEMORY_WORKSPACE, biases + ordered);
    ari_account_finish(a, &a->x);
    next(a, y, kind, false);
}

/* What the first layers made stays. Without a gate the product has made what follows it, unless that was
 * redistributed. */
static void activate(ari_account *a, const ari_operation *op)
{
    const double y = ari_account_bytes(&op->output[0]);
    if (op->kind == ARI_OPERATION_GATE || a->moves)
        ari_account_take(a, ARI_MEMORY_MLP, y);
    next(a, y, ARI_MEMORY_MLP, false);
}

static void add_residual(ari_account *a, const ari_operation *op)
{
    const double y = ari_account_bytes(&op->output[0]);
    ari_account_take(a, ARI_MEMORY_BETWEEN, y);
    ari_account_finish(a, &a->x);
    next(a, y, ARI_MEMORY_BETWEEN, true);
}

double ari_account_loss(const ari_account *a, double tokens)
{
    const double each = a->c->run.loss.label_smoothing > 0.0 ? 2.0 : 1.0;
    return tokens * (INDEX + 1.0 + each * (WORD + 8.0));
}

/* Each token's row of the logits and whether it counts, maximum and sum stay; its target's logit and its term go. */
static void loss(ari_account *a, const ari_operation *op)
{
    const double tokens = ari_account_tokens(&op->input[0]);
    if (!a->head)
        return;
    if (a->config->logit_cap > 0.0)
        ari_account_take(a, ARI_MEMORY_LOGITS, ari_account_bytes(&op->input[0]));
    ari_account_take(a, ARI_MEMORY_LOGITS, tokens * (INDEX + 1.0));
    ari_account_touch(a, INDEX * tokens);
    ari_account_take(a, ARI_MEMORY_LOGITS, ari_account_loss(a, tokens) - tokens * (INDEX + 1.0));
    ari_account_touch(a, 2.0 * WORD * tokens);
}

ar_status ari_account_forward(ari_account *a, const ari_operation *op)
{
    ari_account_part(a, op);
    switch (op->kind) {
    case ARI_OPERATION_EMBEDDING:
        embed(a, op);
        break;
    case ARI_OPERATION_POSITIONS:
        positions(a, op);
        break;
    case ARI_OPERATION_NORM:
        norm(a, op);
        break;
    case ARI_OPERATION_REDISTRIBUTE:
        redistribute(a, op);
        break;
    case ARI_OPERATION_PRODUCT:
        product(a, op);
        break;
    case ARI_OPERATION_ATTENTION:
        return ari_account_attend(a, op);
    case ARI_OPERATION_ACTIVATION:
    case ARI_OPERATION_GATE:
        activate(a, op);
        break;
    case ARI_OPERATION_RESIDUAL:
        add_residual(a, op);
        break;
    case ARI_OPERATION_LOSS:
        loss(a, op);
        break;
    default: /* in place, or with the attention */
        break;
    }
    return AR_OK;
}
