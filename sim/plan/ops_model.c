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

/* What a norm works on. */
static ar_placement norm_at(const ari_walk *w, ari_role role)
{
    return ari_walk_placed(role == ARI_NORM1   ? w->block.norm1
                           : role == ARI_NORM2 ? w->block.norm2
                                               : w->outer.final_norm);
}

static void norm_operation(ari_walk *w, ari_role role)
{
    ari_operation *op = local(w, ARI_OPERATION_NORM, role, 1, w->config->hidden, norm_at(w, role));
    op->weight[op->weights++] = ari_walk_param(w, role, false);
    if (ari_walk_has_bias(w, role))
        op->weight[op->weights++] = ari_walk_param(w, role, true);
    ari_walk_visit(w);
}

static void norm(ari_walk *w, ari_role role)
{
    ari_walk_move(w, (ar_hop){ari_walk_stream(w), norm_at(w, role)}, role);
    norm_operation(w, role);
}

static void norm_backward(ari_walk *w, ari_role role)
{
    const ari_op_value x = ari_walk_activation(w, w->config->hidden, norm_at(w, role), 1);
    norm_operation(w, role);
    ari_walk_move(w, (ar_hop){norm_at(w, role), ari_walk_stream(w)}, role);
    ari_walk_weight_gradient(w, role, false, &x, &x);
    if (ari_walk_has_bias(w, role))
        ari_walk_weight_gradient(w, role, true, NULL, &x);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/* The features of heads: cut by heads, or all of them on every rank. */
static ar_placement by_heads(const ari_walk *w)
{
    return ari_walk_by_heads(w) ? ari_by_features : ari_whole;
}

/* Where the values of an attention are on their way: as the projections make them; with fewer heads, of all positions
 * of the neighbours that exchange them; keys and values of all positions of the sequence. */
typedef enum heads_at { AS_PROJECTED, EXCHANGED, EVERYWHERE } heads_at;

static ari_op_value head_value(ari_walk *w, size_t heads, ari_role role, heads_at at)
{
    const bool of_keys = role == ARI_K || role == ARI_V;
    ari_op_value v = ari_walk_activation(w, ari_walk_mul(w, heads, w->config->head_dim), by_heads(w), 1);
    v.role = role;
    v.copies = of_keys ? ari_walk_kv_copies(w, at != AS_PROJECTED) : 1;
    if (at != AS_PROJECTED)
        v.at[ARI_AXIS_INNER] = ari_by_features;
    if (at == EVERYWHERE && of_keys)
        v.at[ARI_AXIS_RING] = (ar_placement){AR_REPLICATE, 0};
    ari_walk_place(w, &v);
    return v;
}

static ari_op_value context(ari_walk *w, heads_at at)
{
    return head_value(w, w->config->heads, ARI_NO_ROLE, at);
}

/* The first n of q, k and v. Of one parameter they are one value, unless keys and values go elsewhere than queries. */
static int qkv_values(ari_walk *w, ari_op_value *v, int n, heads_at at)
{
    static const ari_role roles[] = {ARI_Q, ARI_K, ARI_V};
    const ar_config *c = w->config;
    if (w->packed && ari_walk_cp(w) == 1) {
        v[0] = head_value(w, c->heads + 2 * c->kv_heads, ARI_QKV, at);
        return 1;
    }
    for (int i = 0; i < n; i++)
        v[i] = head_value(w, i == 0 ? c->heads : c->kv_heads, roles[i], at);
    return n;
}

static size_t local_elements(ari_walk *w, int n, const ari_op_value *v)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++) {
        size_t elements = 1;
        for (int d = 0; d < v[i].ndim; d++)
            elements = ari_walk_mul(w, elements, v[i].local[d]);
        sum = ari_walk_add(w, sum, elements);
    }
    return sum;
}

static void rope(ari_walk *w)
{
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_ROPE, ARI_ATTENTION);
    if (!w->config->rope)
        return;
    op->made = by_heads(w);
    op->inputs = qkv_values(w, op->input, 2, AS_PROJECTED);
    op->outputs = qkv_values(w, op->output, 2, AS_PROJECTED);
    ari_walk_visit(w);
}

/* Between the projections and attention; or of the context alone. Of what a rank works on with the positions of all
 * neighbours the own ones stay; backward the C copies of a KV head share out whom they send it to. */
static void exchange_heads(ari_walk *w, bool of_context, heads_at from, heads_at to)
{
    ari_op_value exchanged[ARI_OP_VALUES];
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_HEADS, ARI_ATTENTION);
    const size_t inner = w->ranks[ARI_AXIS_INNER];
    size_t n = 0;
    if (inner == 1)
        return;
    op->made = by_heads(w);
    if (of_context) {
        op->input[op->inputs++] = context(w, from);
        op->output[op->outputs++] = context(w, to);
        exchanged[0] = context(w, EXCHANGED);
    } else {
        op->inputs = qkv_values(w, op->input, ARI_OP_VALUES, from);
        op->outputs = qkv_values(w, op->output, ARI_OP_VALUES, to);
        (void)qkv_values(w, exchanged, ARI_OP_VALUES, EXCHANGED);
    }
    for (int i = 0; i < op->outputs; i++) {
        const size_t copies = to == AS_PROJECTED ? exchanged[i].copies / op->output[i].copies : 1;
        n = ari_walk_add(w, n, ari_walk_mul(w, inner / copies - 1, local_elements(w, 1, &exchanged[i])));
    }
    ari_walk_call(w, ARI_CALL_ALL_TO_ALL, ARI_OVER_INNER, n, w->activations, ARI_EACH_PASS, ARI_ATTENTION, "");
    ari_walk_visit(w);
}

/* Each hop passes on the keys and values of one place. */
static void pass_round(ari_walk *w)
{
    const ar_config *c = w->config;
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_RING, ARI_ATTENTION);
    if (w->ranks[ARI_AXIS_RING] == 1)
        return;
    op->made = by_heads(w);
    op->again = w->pass == ARI_PASS_BACKWARD;
    op->inputs = qkv_values(w, op->input, ARI_OP_VALUES, EXCHANGED);
    op->outputs = qkv_values(w, op->output, ARI_OP_VALUES, EVERYWHERE);
    const ari_op_value kv[] = {head_value(w, c->kv_heads, ARI_K, EXCHANGED),
                               head_value(w, c->kv_heads, ARI_V, EXCHANGED)};
    ari_walk_call(w, ARI_CALL_EXCHANGE, ARI_OVER_RING, local_elements(w, 2, kv), w->activations, ARI_EACH_PASS,
                  ARI_ATTENTION, "");
    ari_walk_repeat(w, w->ranks[ARI_AXIS_RING] - 1);
    ari_walk_visit(w);
}

/* Keys that the first n queries of a sequence see of a window's. */
static double keys_before(double n, double window)
{
    return n <= window ? n * (n + 1.0) / 2.0 : window * (window + 1.0) / 2.0 + (n - window) * window;
}

double ari_keys_seen(size_t first, size_t count, size_t window)
{
    const double end = (double)(first + count), w = window > 0 ? (double)window : end;
    return keys_before(end, w) - keys_before((double)first, w);
}

/* Pairs of a key and a query of the rank's place of the ring that causal attention and its window leave: what is
 * multiplied. Masks and documents are the batch's own. */
static double pairs_seen(const ari_walk *w)
{
    const ar_parallel places = {.cp = (int)w->ranks[ARI_AXIS_RING], .zigzag = w->c->run.parallel.zigzag};
    const ar_positions own = ar_parallel_positions(&places, w->c->run.seq, (int)w->at[ARI_AXIS_RING]);
    const size_t window = ar_config_window(w->config, w->layer);
    double pairs = 0.0;
    for (int run = 0; run < 2; run++) {
        const size_t first = own.first[run], count = own.count[run];
        const double before = ari_keys_seen(first, count, 0), too_far = before - ari_keys_seen(first, count, window);
        pairs += (w->config->causal ? before : (double)count * (double)w->c->run.seq) - too_far;
    }
    return pairs;
}

/* Of `n` products [queries, keys] x d of every query head that this rank attends with. */
static double head_products(ari_walk *w, double n)
{
    const ari_op_value queries = context(w, EXCHANGED);
    return n * (double)queries.local[0] * (double)queries.local[2] * pairs_seen(w);
}

/* Scores and P V. */
static void attend(ari_walk *w)
{
    exchange_heads(w, false, AS_PROJECTED, EXCHANGED);
    pass_round(w);
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_ATTENTION, ARI_ATTENTION);
    op->made = by_heads(w);
    op->inputs = qkv_values(w, op->input, ARI_OP_VALUES, EVERYWHERE);
    op->output[op->outputs++] = context(w, EXCHANGED);
    op->multiply_adds = head_products(w, 2);
    ari_walk_visit(w);
    exchange_heads(w, true, EXCHANGED, AS_PROJECTED);
}

/* dK and dV [s, d] of a KV head are each one sum over the queries of all its query heads, of which its copies and the
 * places of the ring have parts. Each place gets the rows of its own positions. Exact: exponents of B's rows, then of
 * A's, each of all that have terms; then the integers. */
static void sum_over_queries(ari_walk *w)
{
    const ari_op_value own = head_value(w, w->config->kv_heads, ARI_K, EXCHANGED);
    const size_t n = local_elements(w, 1, &own), d = w->config->head_dim, ring = w->ranks[ARI_AXIS_RING];
    const size_t matrices = ari_walk_mul(w, w->own, own.local[2] / d), all = ari_walk_mul(w, n, ring);
    const size_t exponents[] = {ari_walk_mul(w, matrices, d), ari_walk_mul(w, matrices, w->c->run.seq)};
    const size_t limbs = ari_sum_limbs(ari_walk_mul(w, w->config->heads / w->config->kv_heads, w->c->run.seq));
    const ari_call_group over[] = {ARI_OVER_RING, ARI_OVER_COPIES};
    for (int i = 0; i < 8 && w->exact; i++)
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, over[i % 2], exponents[i / 4], AR_I32, ARI_EACH_PASS, ARI_ATTENTION, "");
    for (int i = 0; i < 2 && w->exact; i++) {
        ari_walk_call(w, ARI_CALL_REDUCE_SCATTER, ARI_OVER_RING, ari_walk_mul(w, all, limbs), AR_I64, ARI_EACH_PASS,
                      ARI_ATTENTION, "");
        ari_walk_call(w, ARI_CALL_REDUCE_SCATTER, ARI_OVER_COPIES, ari_walk_mul(w, n, limbs), AR_I64, ARI_EACH_PASS,
                      ARI_ATTENTION, "");
        ari_walk_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_COPIES, n, AR_F32, ARI_EACH_PASS, ARI_NO_ROLE, "rounded sums");
    }
    for (int i = 0; i < 2 && !w->exact; i++) {
        ari_walk_call(w, ARI_CALL_REDUCE_SCATTER, ARI_OVER_RING, all, w->activations, ARI_EACH_PASS, ARI_ATTENTION, "");
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_COPIES, n, w->activations, ARI_EACH_PASS, ARI_ATTENTION, "");
    }
}

/* dP, dQ, dK, dV. */
static void attend_backward(ari_walk *w)
{
    exchange_heads(w, true, AS_PROJECTED, EXCHANGED);
    pass_round(w);
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_ATTENTION, ARI_ATTENTION);
    op->made = by_heads(w);
    op->input[op->inputs++] = context(w, EXCHANGED);
    op->outputs = qkv_values(w, op->output, ARI_OP_VALUES, EXCHANGED);
    op->multiply_adds = head_products(w, 4);
    sum_over_queries(w);
    ari_walk_visit(w);
    exchange_heads(w, false, EXCHANGED, AS_PROJECTED);
}

/* --- branches: linear layers with something between them ---------------------------------------------------------- */

typedef struct branch_ops {
    ar_hop enter, leave;
    ari_linear_ops first, second;
    ari_role module;
} branch_ops;

static ar_hop placed_hop(ar_hop h)
{
    return (ar_hop){ari_walk_placed(h.from), ari_walk_placed(h.to)};
}

static ar_linear_split placed_split(ar_linear_split s)
{
    return (ar_linear_split){s.style, ari_walk_placed(s.from), ari_walk_placed(s.to)};
}

/* Without the parts of its first layer. */
static branch_ops branch_of(const ar_branch_split *s, ari_role module, ari_role last)
{
    return (branch_ops){.enter = placed_hop(s->enter),
                        .leave = placed_hop(s->leave),
                        .first = {.split = placed_split(s->first), .module = module},
                        .second = {.part = {last}, .n = 1, .split = placed_split(s->second), .module = last},
                        .module = module};
}

static void begin_branch(ari_walk *w, const branch_ops *b)
{
    ari_walk_move(w, b->enter, b->module);
    ari_walk_linear(w, &b->first);
}

static void end_branch(ari_walk *w, const branch_ops *b)
{
    ari_walk_linear(w, &b->second);
    ari_walk_move(w, b->leave, b->module);
}

static void begin_branch_backward(ari_walk *w, const branch_ops *b)
{
    ari_walk_move(w, ari_walk_back(b->leave), b->module);
    ari_walk_linear_backward(w, &b->second, NULL, &b->first);
}

static void end_branch_backward(ari_walk *w, const branch_ops *b)
{
    ari_walk_linear_backward(w, &b->first, &b->second, NULL);
    ari_walk_move(w, ari_walk_back(b->enter), b->module);
}

static branch_ops attention_of(const ari_walk *w)
{
    static const ari_role parts[] = {ARI_Q, ARI_K, ARI_V};
    branch_ops b = branch_of(&w->block.attention, ARI_ATTENTION, ARI_OUT);
    for (b.first.n = 0; b.first.n < (w->packed ? 1 : 3); b.first.n++)
        b.first.part[b.first.n] = w->packed ? ARI_QKV : parts[b.first.n];
    return b;
}

static void attention(ari_walk *w)
{
    const branch_ops b = attention_of(w);
    begin_branch(w, &b);
    rope(w);
    attend(w);
    end_branch(w, &b);
}

static void attention_backward(ari_walk *w)
{
    const branch_ops b = attention_of(w);
    begin_branch_backward(w, &b);
    attend_backward(w);
    rope(w);
    end_branch_backward(w, &b);
}

static branch_ops mlp_of(const ari_walk *w)
{
    const bool gated = w->config->gated;
    branch_ops b = branch_of(&w->block.mlp, ARI_MLP, ARI_DOWN);
    b.first.n = gated ? 2 : 1;
    b.first.part[0] = gated ? ARI_GATE : ARI_FIRST;
    b.first.part[1] = ARI_UP;
    return b;
}

/* Of terms of a sum, which nothing should be a function of, as if they were the whole. */
static void activation(ari_walk *w, const branch_ops *b)
{
    const bool gated = w->config->gated, backward = w->pass == ARI_PASS_BACKWARD;
    const ar_placement left = b->first.split.to, at = left.kind == AR_PARTIAL_SUM ? ari_whole : left;
    ari_operation *op = local(w, gated ? ARI_OPERATION_GATE : ARI_OPERATION_ACTIVATION, ARI_ACTIVATION,
                              gated && !backward ? 2 : 1, w->config->ffn, at);
    if (gated && backward)
        op->output[op->outputs++] = op->output[0];
    ari_walk_visit(w);
}

static void mlp(ari_walk *w)
{
    const branch_ops b = mlp_of(w);
    begin_branch(w, &b);
    activation(w, &b);
    end_branch(w, &b);
}

static void mlp_backward(ari_walk *w)
{
    const branch_ops b = mlp_of(w);
    begin_branch_backward(w, &b);
    activation(w, &b);
    end_branch_backward(w, &b);
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
        ari_walk_call(w, w->sp ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n,
                      w->activations == AR_F32 ? AR_I32 : w->activations, ARI_EACH_PASS, ARI_TOKENS, ".weight");
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
    return (ari_linear_ops){.part = {w->config->tied ? ARI_TOKENS : ARI_HEAD},
                            .n = 1,
                            .split = placed_split(w->outer.head),
                            .module = ARI_HEAD};
}

/* Whether the loss works on shards of the logits. */
static bool loss_parallel(const ari_walk *w)
{
    return ari_walk_same(ari_walk_placed(w->outer.head.to), ari_by_features);
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
        ari_walk_linear_backward(w, &head, NULL, NULL);
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
