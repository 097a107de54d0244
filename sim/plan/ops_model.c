/* SPDX-License-Identifier: Apache-2.0 */
/* The forward and the backward pass of a model, module by module. */
#include "sim/plan/ops_impl.h"

/* --- what works element by element, or head by head --------------------------------------------------------------- */

/* An operation from activations of these features to others, placed alike. */
static ari_operation *local(ari_walk *w, ari_operation_kind kind, ari_role role, int inputs, size_t features,
                            ar_placement at)
{
    ari_operation *op = ari_walk_begin(w, kind, role);
    op->made = at;
    while (op->inputs < inputs)
        op->input[op->inputs++] = ari_walk_activation(w, features, at, 1);
    op->output[op->outputs++] = op->input[0];
    return op;
}

static void elementwise(ari_walk *w, ari_operation_kind kind, ari_role role, int inputs)
{
    local(w, kind, role, inputs, w->config->hidden, ari_walk_stream(w));
    ari_walk_visit(w);
}

static void dropout(ari_walk *w, ari_role role)
{
    if (w->c->run.dropout > 0.0)
        elementwise(w, ARI_OPERATION_DROPOUT, role, 1);
}

static void norm(ari_walk *w, ari_role role)
{
    ari_operation *op = local(w, ARI_OPERATION_NORM, role, 1, w->config->hidden, ari_walk_stream(w));
    op->weight[op->weights++] = ari_walk_param(w, role, false);
    if (ari_walk_has_bias(w, role))
        op->weight[op->weights++] = ari_walk_param(w, role, true);
    ari_walk_visit(w);
}

static void norm_backward(ari_walk *w, ari_role role)
{
    const ari_op_value x = ari_walk_activation(w, w->config->hidden, ari_walk_stream(w), 1);
    norm(w, role);
    ari_walk_weight_gradient(w, role, false, &x, &x);
    if (ari_walk_has_bias(w, role))
        ari_walk_weight_gradient(w, role, true, NULL, &x);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* The features of heads: cut by heads, or all of them on every rank. */
static ar_placement by_heads(const ari_walk *w)
{
    return w->block.attention_whole ? ari_whole : ari_by_features;
}

static ari_op_value head_value(ari_walk *w, size_t heads, size_t copies, ari_role role)
{
    ari_op_value v = ari_walk_activation(w, ari_walk_mul(w, heads, w->config->head_dim), by_heads(w), copies);
    v.role = role;
    return v;
}

static ari_op_value context(ari_walk *w)
{
    return head_value(w, w->config->heads, 1, ARI_NO_ROLE);
}

/* The first n of q, k and v, or all of them in one. */
static int qkv_values(ari_walk *w, ari_op_value *v, int n)
{
    static const ari_role roles[] = {ARI_Q, ARI_K, ARI_V};
    const ar_config *c = w->config;
    if (w->packed) {
        v[0] = head_value(w, c->heads + 2 * c->kv_heads, 1, ARI_QKV);
        return 1;
    }
    for (int i = 0; i < n; i++)
        v[i] = head_value(w, i == 0 ? c->heads : c->kv_heads, i == 0 ? 1 : ari_walk_kv_copies(w), roles[i]);
    return n;
}

static void rope(ari_walk *w)
{
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_ROPE, ARI_ATTENTION);
    if (!w->config->rope)
        return;
    op->made = by_heads(w);
    op->inputs = qkv_values(w, op->input, 2);
    op->outputs = qkv_values(w, op->output, 2);
    ari_walk_visit(w);
}

/* Of `n` products [s, s] x d of every local query head: the masked half is computed too. */
static double head_products(const ari_walk *w, double n)
{
    const size_t ranks = w->block.attention_whole ? 1 : w->tp;
    const double s = (double)w->c->run.seq, heads = (double)(w->config->heads / ranks);
    return n * (double)w->own * heads * s * s * (double)w->config->head_dim;
}

/* Scores and P V. */
static void attend(ari_walk *w)
{
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_ATTENTION, ARI_ATTENTION);
    op->made = by_heads(w);
    op->inputs = qkv_values(w, op->input, 3);
    op->output[op->outputs++] = context(w);
    op->multiply_adds = head_products(w, 2);
    ari_walk_visit(w);
}

/* dP, dQ, dK, dV. dK and dV [s, d] of a KV head are one sum over the queries of all its query heads, which its copies
 * share. */
static void attend_backward(ari_walk *w)
{
    const ar_config *c = w->config;
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_ATTENTION, ARI_ATTENTION);
    op->made = by_heads(w);
    op->input[op->inputs++] = context(w);
    op->outputs = qkv_values(w, op->output, 3);
    op->multiply_adds = head_products(w, 4);
    const ari_fold_ops fold = {.over = ARI_OVER_COPIES,
                               .batch = w->own,
                               .rows = w->c->run.seq,
                               .cols = c->head_dim,
                               .terms = ari_walk_mul(w, c->heads / c->kv_heads, w->c->run.seq),
                               .b = ARI_EACH_PASS,
                               .role = ARI_ATTENTION,
                               .tag = ""};
    for (int i = 0; i < 2; i++)
        ari_walk_fold(w, &fold);
    ari_walk_visit(w);
}

static ari_linear_ops qkv_of(const ari_walk *w)
{
    ari_linear_ops qkv = {.part = {ARI_Q, ARI_K, ARI_V},
                          .n = 3,
                          .cut = w->block.attention_whole ? ARI_CUT_NONE : ARI_CUT_ROWS,
                          .from = ari_walk_stream(w),
                          .to = by_heads(w),
                          .module = ARI_ATTENTION,
                          .by_module = w->block.attention_whole};
    if (w->packed) {
        qkv.part[0] = ARI_QKV;
        qkv.n = 1;
    }
    return qkv;
}

static ari_linear_ops out_of(const ari_walk *w)
{
    return (ari_linear_ops){.part = {ARI_OUT},
                            .n = 1,
                            .cut = w->block.attention_whole ? ARI_CUT_NONE : ARI_CUT_COLUMNS,
                            .from = by_heads(w),
                            .to = ari_walk_stream(w),
                            .module = ARI_ATTENTION,
                            .by_module = w->block.attention_whole,
                            .partial = w->block.attention_partial};
}

static void attention(ari_walk *w)
{
    const ari_linear_ops qkv = qkv_of(w), out = out_of(w);
    ari_walk_linear(w, &qkv);
    rope(w);
    attend(w);
    ari_walk_linear(w, &out);
}

static void attention_backward(ari_walk *w)
{
    const ari_linear_ops qkv = qkv_of(w), out = out_of(w);
    ari_walk_linear_backward(w, &out);
    attend_backward(w);
    rope(w);
    ari_walk_linear_backward(w, &qkv);
}

/* --- MLP ---------------------------------------------------------------------------------------------------------- */

typedef struct mlp_ops {
    ari_linear_ops first, second;
} mlp_ops;

/* Column then row: the middle is cut along its features. Else it is whole on every rank. */
static mlp_ops mlp_of(const ari_walk *w)
{
    static const ari_linear_cut cuts[][2] = {[AR_MLP_COLUMN_ROW] = {ARI_CUT_ROWS, ARI_CUT_COLUMNS},
                                             [AR_MLP_ROW_COLUMN] = {ARI_CUT_COLUMNS, ARI_CUT_ROWS},
                                             [AR_MLP_WHOLE] = {ARI_CUT_NONE, ARI_CUT_NONE}};
    const bool whole_middle = w->block.mlp != AR_MLP_COLUMN_ROW, gated = w->config->gated;
    const ar_placement stream = ari_walk_stream(w), middle = whole_middle ? ari_whole : ari_by_features;
    return (mlp_ops){.first = {.part = {gated ? ARI_GATE : ARI_FIRST, ARI_UP},
                               .n = gated ? 2 : 1,
                               .cut = cuts[w->block.mlp][0],
                               .from = stream,
                               .to = middle,
                               .module = ARI_MLP,
                               .by_module = whole_middle},
                     .second = {.part = {ARI_DOWN},
                                .n = 1,
                                .cut = cuts[w->block.mlp][1],
                                .from = middle,
                                .to = stream,
                                .module = ARI_MLP,
                                .by_module = whole_middle,
                                .partial = w->block.mlp_partial}};
}

static void activation(ari_walk *w, const mlp_ops *m)
{
    const bool gated = w->config->gated, backward = w->pass == ARI_PASS_BACKWARD;
    ari_operation *op = local(w, gated ? ARI_OPERATION_GATE : ARI_OPERATION_ACTIVATION, ARI_ACTIVATION,
                              gated && !backward ? 2 : 1, w->config->ffn, m->first.to);
    if (gated && backward)
        op->output[op->outputs++] = op->output[0];
    ari_walk_visit(w);
}

static void mlp(ari_walk *w)
{
    const mlp_ops m = mlp_of(w);
    ari_walk_linear(w, &m.first);
    activation(w, &m);
    ari_walk_linear(w, &m.second);
}

static void mlp_backward(ari_walk *w)
{
    const mlp_ops m = mlp_of(w);
    ari_walk_linear_backward(w, &m.second);
    activation(w, &m);
    ari_walk_linear_backward(w, &m.first);
}

/* --- block -------------------------------------------------------------------------------------------------------- */

static void block(ari_walk *w)
{
    norm(w, ARI_NORM1);
    attention(w);
    dropout(w, ARI_OUT_DROPPED);
    elementwise(w, ARI_OPERATION_RESIDUAL, ARI_ATTENTION_SUM, 2);
    norm(w, ARI_NORM2);
    mlp(w);
    dropout(w, ARI_MLP_DROPPED);
    elementwise(w, ARI_OPERATION_RESIDUAL, ARI_LAYER, 2);
}

static void block_backward(ari_walk *w)
{
    dropout(w, ARI_MLP_DROPPED);
    mlp_backward(w);
    norm_backward(w, ARI_NORM2);
    elementwise(w, ARI_OPERATION_RESIDUAL, ARI_ATTENTION_SUM, 2);
    dropout(w, ARI_OUT_DROPPED);
    attention_backward(w);
    norm_backward(w, ARI_NORM1);
    elementwise(w, ARI_OPERATION_RESIDUAL, ARI_LAYER, 2);
}

/* --- embedding ---------------------------------------------------------------------------------------------------- */

static ari_op_value ids(ari_walk *w)
{
    ari_op_value v = ari_walk_activation(w, 1, ari_whole, 1);
    v.ndim = 2;
    v.dtype = AR_I64;
    return v;
}

/* By vocabulary a selection of bit patterns: one rank has a token's row, the others zeros. By hidden every rank has its
 * features of it. */
static void embedding(ari_walk *w)
{
    static const ar_placement made[] = {[AR_EMBEDDING_VOCAB] = {AR_PARTIAL_SUM, 0},
                                        [AR_EMBEDDING_HIDDEN] = {AR_SHARD, 2},
                                        [AR_EMBEDDING_WHOLE] = {AR_INVARIANT, 0}};
    const size_t h = w->config->hidden, n = ari_walk_mul(w, w->tokens, h);
    const bool vocab = w->outer.tokens == AR_EMBEDDING_VOCAB;
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_EMBEDDING, ARI_TOKENS);
    op->input[op->inputs++] = ids(w);
    op->weight[op->weights++] = ari_walk_param(w, ARI_TOKENS, false);
    op->made = made[w->outer.tokens];
    op->output[op->outputs++] = ari_walk_activation(w, h, vocab ? ari_walk_stream(w) : op->made, 1);
    if (vocab)
        ari_walk_call(w, w->sp ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I32, ARI_EACH_PASS,
                      ARI_TOKENS, ".weight");
    ari_walk_visit(w);
    if (!vocab)
        ari_walk_exchange(w, h, made[w->outer.tokens], ari_walk_stream(w), ARI_TOKENS);
    if (!w->config->learned_positions)
        return;
    op = local(w, ARI_OPERATION_POSITIONS, ARI_POSITIONS, 1, h, ari_walk_stream(w));
    op->weight[op->weights++] = ari_walk_param(w, ARI_POSITIONS, false);
    ari_walk_visit(w);
    dropout(w, ARI_EMBEDDED);
}

/* A token's row may be on any rank: each gets the gradients of all tokens, by hidden of its own features. */
static void embedding_backward(ari_walk *w)
{
    const size_t h = w->config->hidden;
    const ari_op_value id = ids(w), own = ari_walk_activation(w, h, ari_walk_stream(w), 1);
    static const ar_placement wanted[] = {[AR_EMBEDDING_VOCAB] = {AR_REPLICATE, 0},
                                          [AR_EMBEDDING_HIDDEN] = {AR_SHARD, 2},
                                          [AR_EMBEDDING_WHOLE] = {AR_INVARIANT, 0}};
    const ari_op_value whole = ari_walk_activation(w, h, wanted[w->outer.tokens], 1);
    if (w->config->learned_positions)
        dropout(w, ARI_EMBEDDED);
    ari_walk_exchange(w, h, own.at[ARI_AXIS_TP], whole.at[ARI_AXIS_TP], ARI_TOKENS);
    ari_walk_weight_gradient(w, ARI_TOKENS, false, &id, &whole);
    if (w->config->learned_positions)
        ari_walk_weight_gradient(w, ARI_POSITIONS, false, NULL, &own);
}

/* --- head and loss ------------------------------------------------------------------------------------------------ */

/* A tied weight is the table of tokens. */
static ari_linear_ops head_of(const ari_walk *w)
{
    const bool whole = w->outer.head == AR_HEAD_WHOLE;
    return (ari_linear_ops){.part = {w->config->tied ? ARI_TOKENS : ARI_HEAD},
                            .n = 1,
                            .cut = whole ? ARI_CUT_NONE : ARI_CUT_ROWS,
                            .from = ari_walk_stream(w),
                            .to = whole ? ari_whole : ari_by_features,
                            .module = ARI_HEAD,
                            .by_module = whole};
}

/* Whether the loss works on shards of the logits. */
static bool loss_parallel(const ari_walk *w)
{
    return w->outer.head == AR_HEAD_VOCAB;
}

static ari_operation *loss_of(ari_walk *w)
{
    const size_t width = w->head ? w->config->vocab : w->config->hidden;
    const ar_placement logits = loss_parallel(w) ? ari_by_features : ari_whole;
    return local(w, ARI_OPERATION_LOSS, ARI_LOSS, 1, width, w->head ? logits : ari_walk_stream(w));
}

/* Of logits that stay sharded a maximum, a denominator and the target's bits are found for each token; with label
 * smoothing the exponent and the sum of the logits go with the first two. Without a head every element is a term. */
static void loss(ari_walk *w)
{
    if (w->head) {
        const ari_linear_ops head = head_of(w);
        ari_walk_linear(w, &head);
        if (!loss_parallel(w))
            ari_walk_redistribute(w, w->config->vocab, head.to, ari_whole, ARI_HEAD, ARI_HEAD, "");
    }
    ari_operation *op = loss_of(w);
    if (w->head) {
        op->output[0] = ids(w);
        op->output[0].dtype = AR_F32;
    }
    if (w->head && loss_parallel(w)) {
        op->made = (ar_placement){AR_PARTIAL_SUM, 0};
        const size_t n = ari_walk_mul(w, w->c->run.loss.label_smoothing > 0.0 ? 2 : 1, w->tokens);
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I32, ARI_EACH_PASS, ARI_NO_ROLE, "loss max");
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I64, ARI_EACH_PASS, ARI_NO_ROLE, "loss sum");
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, w->tokens, AR_I32, ARI_EACH_PASS, ARI_NO_ROLE,
                      "loss target");
    }
    ari_walk_visit(w);
}

static void loss_backward(ari_walk *w)
{
    loss_of(w);
    ari_walk_visit(w);
    if (w->head) {
        const ari_linear_ops head = head_of(w);
        if (!loss_parallel(w))
            ari_walk_redistribute(w, w->config->vocab, ari_whole, head.to, ARI_HEAD, ARI_HEAD, "");
        ari_walk_linear_backward(w, &head);
    }
}

/* --- the model ---------------------------------------------------------------------------------------------------- */

void ari_walk_forward(ari_walk *w)
{
    embedding(w);
    for (size_t i = 0; i < w->config->layers && w->st == AR_OK; i++) {
        ari_walk_layer(w, i);
        block(w);
    }
    ari_walk_layer(w, ARI_NO_LAYER);
    if (w->config->final_norm)
        norm(w, ARI_FINAL_NORM);
    loss(w);
}

void ari_walk_backward(ari_walk *w)
{
    loss_backward(w);
    if (w->config->final_norm)
        norm_backward(w, ARI_FINAL_NORM);
    for (size_t i = w->config->layers; i-- > 0 && w->st == AR_OK;) {
        ari_walk_layer(w, i);
        block_backward(w);
    }
    ari_walk_layer(w, ARI_NO_LAYER);
    embedding_backward(w);
}
