/* SPDX-License-Identifier: Apache-2.0 */
/* Latent attention's projections: small whole matrices, norms of what they make, matrices cut by heads; then keys are
 * joined with the features that all heads share. */
#include "sim/plan/ops_impl.h"

/* The input's layer, and those behind the norms. Queries without a rank take the input too. */
typedef struct latent_ops {
    ari_linear_ops down, q, kv;
    bool rank;
    size_t shared, plain; /* features of a key */
} latent_ops;

static latent_ops latent_of(const ari_op_builder *w, ar_linear_split first)
{
    const ar_latent *l = &w->config->latent;
    const ar_linear_split low = {first.style, ari_whole, first.to};
    latent_ops o = {
        .down = {.split = {AR_STYLE_REPLICATE, first.from, ari_whole}, .module = ARI_ATTENTION},
        .q = {.part = {ARI_Q_B}, .n = 1, .split = low, .module = ARI_Q_B},
        .kv = {.part = {ARI_KV_B}, .n = 1, .split = low, .module = ARI_KV_B},
        .rank = l->q_rank > 0,
        .shared = l->rope_dim,
        .plain = w->config->head_dim - l->rope_dim,
    };
    if (o.rank)
        o.down.part[o.down.n++] = ARI_Q_A;
    else
        o.q = (ari_linear_ops){.part = {ARI_Q}, .n = 1, .split = first, .module = ARI_ATTENTION};
    o.down.part[o.down.n++] = ARI_KV_A;
    return o;
}

static void take(ari_op_builder *w, ari_op_value v)
{
    w->edges.now = (ari_values){.at = {v}, .n = 1};
}

/* What a norm takes of the small matrices' output: of keys the part that is not shared. */
static ari_op_value low_value(ari_op_builder *w, ari_role norm, size_t id)
{
    const ar_latent *l = &w->config->latent;
    ari_op_value v = ari_op_builder_activation(w, norm == ARI_KV_A_NORM ? l->kv_rank : l->q_rank, ari_whole, 1);
    v.role = norm;
    v.id = id;
    return v;
}

/* Either pass; backward what it makes has a number already. */
static void norm(ari_op_builder *w, ari_role role, size_t id)
{
    const bool backward = w->pass == ARI_PASS_BACKWARD;
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_NORM, role);
    const ari_op_value low = low_value(w, role, backward ? id : ari_op_builder_now(w));
    ari_op_value high = low;
    high.role = ARI_NO_ROLE;
    high.id = backward ? ari_op_builder_now(w) : 0;
    op->input[op->inputs++] = backward ? high : low;
    op->output[op->outputs++] = backward ? low : high;
    op->produced_as = ari_whole;
    op->weight[op->weights++] = ari_op_builder_param(w, role, false);
    ari_op_builder_make(w);
}

/* Queries, keys and values as their layers have made them: up has keys' own features and values. */
static ari_op_value up_value(ari_op_builder *w, const latent_ops *o)
{
    const size_t each = ari_op_builder_add(w, o->plain, w->config->latent.value_dim);
    ari_op_value v = ari_op_builder_activation(w, ari_op_builder_mul(w, w->config->heads, each), o->kv.split.to, 1);
    v.role = ARI_KV_B;
    return v;
}

static ari_op_value shared_value(ari_op_builder *w, const latent_ops *o)
{
    ari_op_value v = ari_op_builder_activation(w, o->shared, ari_whole, 1);
    v.role = ARI_K_SHARED;
    return v;
}

/* The sum over the heads of all ranks. Exact: exponents of ones, one a sample, and of the terms. */
static void sum_over_heads(ari_op_builder *w, const latent_ops *o)
{
    const size_t n = ari_op_builder_mul(w, w->tokens, o->shared);
    if (!ari_op_builder_by_heads(w))
        return;
    if (!w->form.exact) {
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, w->form.activations, ARI_EACH_PASS, ARI_ATTENTION,
                            "");
        return;
    }
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, w->own, AR_I32, ARI_EACH_PASS, ARI_ATTENTION, "");
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I32, ARI_EACH_PASS, ARI_ATTENTION, "");
    ari_op_builder_scatter_sums(w, ARI_OVER_TP, n, w->config->heads, w->form.activations == AR_BF16, ARI_ATTENTION, "");
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_TP, n, w->form.activations, ARI_EACH_PASS, ARI_NO_ROLE,
                        "rounded sums");
}

/* Forward of the values with these ids: q, up, what all heads share. Backward (NULL) to their gradients; that of what
 * all heads share is a part of a value that the norm completes. */
static void join(ari_op_builder *w, const latent_ops *o, const size_t *ids)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_JOIN, ARI_K_SHARED);
    const ari_values heads = ari_op_builder_qkv(w);
    const ari_op_value apart[] = {heads.at[0], up_value(w, o), shared_value(w, o)};
    ari_op_value *const side = ids ? op->input : op->output;
    op->produced_as = o->kv.split.to;
    op->inputs = op->outputs = heads.n;
    for (int i = 0; i < heads.n; i++) {
        (ids ? op->output : op->input)[i] = ids ? heads.at[i] : ari_op_builder_held(w, heads.at[i], i);
        side[i] = apart[i];
        side[i].id = ids ? ids[i] : apart[i].id;
    }
    side[0].role = o->q.part[0];
    if (!ids)
        sum_over_heads(w, o);
    ari_op_builder_make(w);
}

void ari_op_builder_latent(ari_op_builder *w, ar_tp_redistribution enter, ar_linear_split first)
{
    const latent_ops o = latent_of(w, first);
    ari_op_builder_move(w, enter, ARI_ATTENTION);
    const ari_op_value x = w->edges.now.at[0];
    size_t q = 0;
    if (!o.rank) {
        ari_op_builder_linear(w, &o.q);
        q = ari_op_builder_now(w);
        take(w, x);
    }
    ari_op_builder_linear(w, &o.down);
    const ari_values low = w->edges.now;
    const ari_op_value keys = low.at[low.n - 1];
    if (o.rank) {
        take(w, low.at[0]);
        norm(w, ARI_Q_A_NORM, 0);
        ari_op_builder_linear(w, &o.q);
        q = ari_op_builder_now(w);
    }
    take(w, keys);
    norm(w, ARI_KV_A_NORM, 0);
    ari_op_builder_linear(w, &o.kv);
    join(w, &o, (const size_t[]){q, ari_op_builder_now(w), keys.id});
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Through a path, from the gradient of what its layer has made; id: of what its norm has taken. */
static ari_op_value path_backward(ari_op_builder *w, const ari_linear_ops *l, ari_role role, size_t id)
{
    ari_op_builder_linear_backward(w, l, NULL, NULL);
    norm(w, role, id);
    ari_op_value dy = w->op.input[0];
    const ari_op_value made = w->edges.now.at[0];
    dy.role = role;
    ari_op_builder_norm_gradient(w, role, &dy);
    return made;
}

static void add(ari_op_builder *w, size_t other, size_t of)
{
    ari_operation *op = ari_op_builder_local(w, ARI_OPERATION_RESIDUAL, ARI_ATTENTION, 2, w->config->hidden,
                                             w->edges.now.at[0].at[ARI_AXIS_TP]);
    op->input[0].id = other;
    op->input[1].id = ari_op_builder_now(w);
    op->input[0].of = op->input[1].of = op->output[0].of = of;
    ari_op_builder_make(w);
}

void ari_op_builder_latent_backward(ari_op_builder *w, ar_tp_redistribution enter, ar_linear_split first, size_t x)
{
    const latent_ops o = latent_of(w, first);
    join(w, &o, NULL);
    const ari_op_value q = w->edges.now.at[0], shared = w->edges.now.at[2];
    take(w, w->edges.now.at[1]);
    ari_values low = {.n = 0};
    const ari_op_value keys = path_backward(w, &o.kv, ARI_KV_A_NORM, shared.id);
    take(w, q);
    if (o.rank)
        low.at[low.n++] = path_backward(w, &o.q, ARI_Q_A_NORM, 0);
    low.at[low.n++] = keys;
    w->edges.now = low;
    ari_op_builder_linear_backward(w, &o.down, NULL, NULL);
    if (!o.rank) {
        const size_t dx = ari_op_builder_now(w);
        take(w, q);
        ari_op_builder_linear_backward(w, &o.q, NULL, NULL);
        add(w, dx, x);
    }
    ari_op_builder_move(w, ari_op_builder_back(enter), ARI_ATTENTION);
}
