/* SPDX-License-Identifier: Apache-2.0 */
/* Between the projections and the output layer: what turns, travels and attends. */
#include "ref/placement/parallel_private.h"
#include "sim/plan/ops_impl.h"

#include <string.h>

/* The features of heads: cut by heads, or all of them on every rank. */
static ar_placement by_heads(const ari_op_builder *w)
{
    return ari_op_builder_by_heads(w) ? ari_by_features : ari_whole;
}

/* Placement of an attention's values: as the projections make them; with fewer heads, of all positions of the
 * neighbours that exchange them; keys and values of all positions of the sequence. */
typedef enum heads_at { AS_PROJECTED, EXCHANGED, EVERYWHERE } heads_at;

static ari_op_value head_value(ari_op_builder *w, size_t heads, ari_role role, heads_at at)
{
    const bool of_keys = role == ARI_K || role == ARI_V;
    const bool of_queries = role == ARI_Q || role == ARI_K || role == ARI_QKV;
    const size_t each = of_queries ? w->config->head_dim : ar_config_value_dim(w->config);
    ari_op_value v = ari_op_builder_activation(w, ari_op_builder_mul(w, heads, each), by_heads(w), 1);
    v.role = role;
    v.copies = of_keys ? ari_op_builder_kv_copies(w, at != AS_PROJECTED) : 1;
    if (at != AS_PROJECTED)
        v.at[ARI_AXIS_INNER] = ari_by_features;
    if (at == EVERYWHERE && of_keys)
        v.at[ARI_AXIS_RING] = (ar_placement){AR_REPLICATE, 0};
    ari_op_builder_place(w, &v);
    return v;
}

static ari_op_value context(ari_op_builder *w, heads_at at)
{
    return head_value(w, w->config->heads, ARI_NO_ROLE, at);
}

/* Queries, keys and values, or their gradients. Of one parameter they are one value, unless keys and values go
 * elsewhere than queries. */
static ari_values qkv_values(ari_op_builder *w, heads_at at)
{
    static const ari_role roles[] = {ARI_Q, ARI_K, ARI_V};
    const ar_config *c = w->config;
    ari_values x = {.n = ARI_OP_VALUES};
    if (w->form.packed && ari_op_builder_cp(w) == 1)
        return (ari_values){.at = {head_value(w, c->heads + 2 * c->kv_heads, ARI_QKV, at)}, .n = 1};
    for (int i = 0; i < x.n; i++)
        x.at[i] = head_value(w, i == 0 ? c->heads : c->kv_heads, roles[i], at);
    return x;
}

ari_values ari_op_builder_qkv(ari_op_builder *w)
{
    return qkv_values(w, AS_PROJECTED);
}

/* True if the projections' output is one value, used in parts. */
static bool in_parts(const ari_op_builder *w)
{
    return w->form.packed && ari_op_builder_cp(w) > 1;
}

/* Those that there are, held to be there. */
static ari_values qkv_now(ari_op_builder *w, heads_at at)
{
    ari_values x = qkv_values(w, at);
    for (int i = 0; i < x.n; i++)
        x.at[i] = ari_op_builder_held(w, x.at[i], i);
    return x;
}

/* Gradients that an operation makes for the projections: of a value in parts as its parts, but of queries and keys what
 * their rotary positions still turn. */
static void name_parts(ari_op_builder *w, ari_op_value *v)
{
    if (w->pass != ARI_PASS_BACKWARD || !in_parts(w))
        return;
    v[2].id = ari_op_builder_new_value(w);
    for (int i = 0; i < 2 && !ar_config_turns(w->config, w->layer); i++)
        v[i].id = v[2].id;
}

static void set_values(ari_op_value *to, int *n, const ari_values *x)
{
    memcpy(to, x->at, sizeof x->at);
    *n = x->n;
}

static size_t local_elements(ari_op_builder *w, int n, const ari_op_value *v)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++) {
        size_t elements = 1;
        for (int d = 0; d < v[i].ndim; d++)
            elements = ari_op_builder_mul(w, elements, v[i].local[d]);
        sum = ari_op_builder_add(w, sum, elements);
    }
    return sum;
}

/* Queries, or keys. Of a head a rank has all features; of all heads together each rank gathers those of the others: an
 * all-gather of the parts of all, in which copies of a head count as often as there are. */
static ari_op_value gathered_heads(ari_op_builder *w, ari_role role, size_t heads)
{
    const bool together = w->config->qk_norm == AR_QK_NORM_WIDTH;
    ari_op_value v = head_value(w, heads, role, AS_PROJECTED);
    if (together) {
        v.at[ARI_AXIS_TP] = ari_whole;
        v.copies = 1;
        ari_op_builder_place(w, &v);
    }
    return v;
}

/* From the own heads to all of them, or (back) the own ones of them, which moves nothing. */
static void gather_heads(ari_op_builder *w, ari_role norm, ari_role of, size_t heads, bool back)
{
    const ari_op_value own = head_value(w, heads, of, AS_PROJECTED), all = gathered_heads(w, of, heads);
    const size_t ranks = w->ranks[ARI_AXIS_TP];
    if (w->config->qk_norm != AR_QK_NORM_WIDTH || ranks == 1 || !ari_op_builder_by_heads(w))
        return;
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_REDISTRIBUTE, norm);
    op->input[op->inputs++] = ari_op_builder_held(w, back ? all : own, 0);
    op->output[op->outputs++] = back ? own : all;
    op->produced_as = op->input[0].at[ARI_AXIS_TP];
    if (!back)
        ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_TP,
                            ari_op_builder_mul(w, ranks, local_elements(w, 1, &own)), w->form.activations,
                            ARI_EACH_PASS, norm, "");
    ari_op_builder_make(w);
}

/* The norm reads the first value present. */
static void qk_norm(ari_op_builder *w, ari_role norm, ari_role of, size_t heads)
{
    gather_heads(w, norm, of, heads, false);
    const ari_op_value x = ari_op_builder_held(w, gathered_heads(w, of, heads), 0);
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_NORM, norm);
    op->input[op->inputs++] = x;
    op->output[op->outputs++] = gathered_heads(w, of, heads);
    op->produced_as = x.at[ARI_AXIS_TP];
    op->weight[op->weights++] = ari_op_builder_param(w, norm, false);
    ari_op_builder_make(w);
    if (w->pass == ARI_PASS_BACKWARD)
        ari_op_builder_norm_gradient(w, norm, &x);
    gather_heads(w, norm, of, heads, true);
}

void ari_op_builder_qk_norms(ari_op_builder *w)
{
    const ari_role norms[] = {ARI_Q_NORM, ARI_K_NORM}, of[] = {ARI_Q, ARI_K};
    ari_values all = w->edges.now;
    for (int i = 0; i < 2 && w->config->qk_norm != AR_QK_NORM_NONE; i++) {
        w->edges.now = (ari_values){.at = {all.at[i]}, .n = 1};
        qk_norm(w, norms[i], of[i], i == 0 ? w->config->heads : w->config->kv_heads);
        all.at[i] = w->edges.now.at[0];
    }
    w->edges.now = all;
}

void ari_op_builder_rope(ari_op_builder *w)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_ROPE, ARI_ATTENTION);
    if (!ar_config_turns(w->config, w->layer))
        return;
    const bool backward = w->pass == ARI_PASS_BACKWARD;
    ari_values in = qkv_now(w, AS_PROJECTED), out = qkv_values(w, AS_PROJECTED);
    set_values(op->input, &op->inputs, &in);
    for (int i = 0; i < 2 && backward && in_parts(w); i++)
        out.at[i].id = in.at[2].id;
    set_values(op->output, &op->outputs, &out);
    op->produced_as = by_heads(w);
    op->inputs = op->outputs = in.n == 1 ? 1 : 2;
    ari_op_builder_make(w);
    for (int i = 0; i < op->outputs; i++)
        in.at[i] = op->output[i];
    w->edges.now = in; /* values as they were */
}

/* Between the projections and attention; or of the context alone. Of what a rank works on with the positions of all
 * neighbours the own ones stay; backward the C copies of a KV head share out whom they send it to. */
static void exchange_heads(ari_op_builder *w, bool of_context, heads_at from, heads_at to)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_HEADS, ARI_ATTENTION);
    const size_t inner = w->ranks[ARI_AXIS_INNER];
    size_t n = 0;
    if (inner == 1)
        return;
    const ari_values in =
        of_context ? (ari_values){{ari_op_builder_held(w, context(w, from), 0)}, 1} : qkv_now(w, from);
    const ari_values out = of_context ? (ari_values){{context(w, to)}, 1} : qkv_values(w, to);
    const ari_values exchanged = of_context ? (ari_values){{context(w, EXCHANGED)}, 1} : qkv_values(w, EXCHANGED);
    op->produced_as = by_heads(w);
    set_values(op->input, &op->inputs, &in);
    set_values(op->output, &op->outputs, &out);
    if (!of_context && to == AS_PROJECTED)
        name_parts(w, op->output);
    for (int i = 0; i < out.n; i++) {
        const size_t copies = to == AS_PROJECTED ? exchanged.at[i].copies / out.at[i].copies : 1;
        n = ari_op_builder_add(w, n, ari_op_builder_mul(w, inner / copies - 1, local_elements(w, 1, &exchanged.at[i])));
    }
    ari_op_builder_call(w, ARI_CALL_ALL_TO_ALL, ARI_OVER_INNER, n, w->form.activations, ARI_EACH_PASS, ARI_ATTENTION,
                        "");
    ari_op_builder_make(w);
}

/* Each hop passes on the keys and values of one place. Queries stay where they are. */
static void pass_round(ari_op_builder *w)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_RING, ARI_ATTENTION);
    if (w->ranks[ARI_AXIS_RING] == 1)
        return;
    const ari_values in = qkv_now(w, EXCHANGED), out = qkv_values(w, EVERYWHERE);
    op->produced_as = by_heads(w);
    op->regathered = w->pass == ARI_PASS_BACKWARD;
    set_values(op->input, &op->inputs, &in);
    set_values(op->output, &op->outputs, &out);
    op->output[0].id = in.at[0].id;
    ari_op_builder_call(w, ARI_CALL_EXCHANGE, ARI_OVER_RING, local_elements(w, 2, &in.at[1]), w->form.activations,
                        ARI_EACH_PASS, ARI_ATTENTION, "");
    ari_op_builder_repeat(w, w->ranks[ARI_AXIS_RING] - 1);
    ari_op_builder_make(w);
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
static double pairs_seen(const ari_op_builder *w)
{
    const ar_positions own =
        ari_positions_ring(w->ranks[ARI_AXIS_RING], w->c->run.parallel.zigzag, w->c->run.seq, w->at[ARI_AXIS_RING]);
    const size_t window = ar_config_window(w->config, w->layer);
    double pairs = 0.0;
    for (int run = 0; run < 2; run++) {
        const size_t first = own.first[run], count = own.count[run];
        const double before = ari_keys_seen(first, count, 0), too_far = before - ari_keys_seen(first, count, window);
        pairs += (w->config->causal ? before : (double)count * (double)w->c->run.seq) - too_far;
    }
    return pairs;
}

/* `n` products [queries, keys] x d for every query head of this rank, half of them over a key's features and half over
 * a value's. */
static double head_products(ari_op_builder *w, double n)
{
    const ari_op_value queries = context(w, EXCHANGED);
    const double heads = (double)queries.local[2] / (double)ar_config_value_dim(w->config);
    const double both = (double)(w->config->head_dim + ar_config_value_dim(w->config)) / 2.0;
    return n * (double)queries.local[0] * heads * both * pairs_seen(w);
}

/* Scores and P V. */
void ari_op_builder_attend(ari_op_builder *w)
{
    exchange_heads(w, false, AS_PROJECTED, EXCHANGED);
    pass_round(w);
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_ATTENTION, ARI_ATTENTION);
    const ari_values in = qkv_now(w, EVERYWHERE);
    op->produced_as = by_heads(w);
    set_values(op->input, &op->inputs, &in);
    op->output[op->outputs++] = context(w, EXCHANGED);
    if (w->config->sinks)
        op->weight[op->weights++] = ari_op_builder_param(w, ARI_SINKS, false);
    op->multiply_adds = head_products(w, 2);
    ari_op_builder_make(w);
    exchange_heads(w, true, EXCHANGED, AS_PROJECTED);
}

/* dK and dV [s, d] of a KV head are each one sum over the queries of all its query heads, of which its copies and the
 * places of the ring have parts. Each place gets the rows of its own positions. Exact: exponents of B's rows, then of
 * A's, each of all that have terms; then the integers. */
static void sum_over_queries(ari_op_builder *w)
{
    const ari_op_value own[2] = {head_value(w, w->config->kv_heads, ARI_K, EXCHANGED),
                                 head_value(w, w->config->kv_heads, ARI_V, EXCHANGED)};
    const size_t ring = w->ranks[ARI_AXIS_RING], heads = own[0].local[2] / w->config->head_dim;
    const size_t matrices = ari_op_builder_mul(w, w->own, heads), rows = ari_op_builder_mul(w, matrices, w->c->run.seq);
    const size_t n[2] = {local_elements(w, 1, &own[0]), local_elements(w, 1, &own[1])};
    const size_t all[2] = {ari_op_builder_mul(w, n[0], ring), ari_op_builder_mul(w, n[1], ring)};
    const size_t exponents[] = {ari_op_builder_mul(w, w->own, own[0].local[2]),
                                ari_op_builder_mul(w, w->own, own[1].local[2]), rows, rows};
    const size_t terms = ari_op_builder_mul(w, w->config->heads / w->config->kv_heads, w->c->run.seq);
    const bool narrow = ari_op_builder_is_narrow(w, terms);
    const ari_over over[] = {ARI_OVER_RING, ARI_OVER_COPIES};
    for (int i = 0; i < 8 && w->form.exact; i++)
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, over[i % 2], exponents[i / 2], AR_I32, ARI_EACH_PASS, ARI_ATTENTION,
                            "");
    for (int i = 0; i < 2 && w->form.exact; i++) {
        ari_op_builder_scatter_sums(w, ARI_OVER_RING, all[i], terms, narrow, ARI_ATTENTION, "");
        ari_op_builder_scatter_sums(w, ARI_OVER_COPIES, n[i], terms, narrow, ARI_ATTENTION, "");
        ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_COPIES, n[i], w->form.activations, ARI_EACH_PASS,
                            ARI_NO_ROLE, "rounded sums");
    }
    for (int i = 0; i < 2 && !w->form.exact; i++) {
        ari_op_builder_call(w, ARI_CALL_REDUCE_SCATTER, ARI_OVER_RING, all[i], w->form.activations, ARI_EACH_PASS,
                            ARI_ATTENTION, "");
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_COPIES, n[i], w->form.activations, ARI_EACH_PASS,
                            ARI_ATTENTION, "");
    }
}

/* Operands of attention in the backward pass: keys and values go round the ring once more. */
static ari_values attended(ari_op_builder *w)
{
    const bool ring = w->ranks[ARI_AXIS_RING] > 1;
    const ari_forward *f =
        ari_op_builder_forward_of(w, ring ? ARI_OPERATION_RING : ARI_OPERATION_ATTENTION, ARI_ATTENTION);
    const ari_values gradient = w->edges.now;
    w->edges.now = qkv_values(w, EXCHANGED);
    for (int i = 0; i < w->edges.now.n; i++)
        w->edges.now.at[i].id = f->in[i];
    pass_round(w);
    const ari_values x = w->edges.now;
    w->edges.now = gradient;
    return x;
}

/* dP, dQ, dK, dV. */
void ari_op_builder_attend_backward(ari_op_builder *w)
{
    exchange_heads(w, true, AS_PROJECTED, EXCHANGED);
    const ari_values x = attended(w), out = qkv_values(w, EXCHANGED);
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_ATTENTION, ARI_ATTENTION);
    op->produced_as = by_heads(w);
    const ari_op_value dout = ari_op_builder_held(w, context(w, EXCHANGED), 0);
    op->input[op->inputs++] = dout;
    set_values(op->output, &op->outputs, &out);
    for (int i = 0; i < x.n; i++)
        op->saved[op->saves++] = x.at[i].id;
    if (w->ranks[ARI_AXIS_INNER] == 1)
        name_parts(w, op->output);
    op->multiply_adds = head_products(w, 4);
    sum_over_queries(w);
    ari_op_builder_make(w);
    if (w->config->sinks)
        ari_op_builder_weight_gradient(w, ARI_SINKS, false, NULL, &dout);
    exchange_heads(w, false, EXCHANGED, AS_PROJECTED);
}
