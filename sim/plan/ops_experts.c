/* SPDX-License-Identifier: Apache-2.0 */
/* Experts in the MLP's place: a router, the rows of each token's experts, and their weighted sum. A rank has
 * all experts, or some of them, of each a part of its features where the plan cuts the MLP. */
#include "sim/plan/ops_impl.h"

typedef struct experts_ops {
    ar_tp_redistribution enter, leave;
    ar_placement wide; /* between the two products of the shared expert */
    ari_linear_ops router, first, second, shared_first, shared_second, share;
} experts_ops;

/* --- values ------------------------------------------------------------------------------------------------------- */

/* Placement of the tokens that a rank routes. */
static ar_placement tokens_at(const ari_op_builder *w)
{
    return w->whole ? ari_by_tokens : ari_whole;
}

static ari_op_value tokens(ari_op_builder *w, size_t features, size_t id)
{
    ari_op_value v = ari_op_builder_activation(w, features, tokens_at(w), 1);
    v.id = id;
    return v;
}

/* Makes this value the next operation's input. */
static void take(ari_op_builder *w, ari_op_value v)
{
    w->edges.now = (ari_values){.at = {v}, .n = 1};
}

/* The module's input, as all that take it have it. */
static ari_op_value module_input(ari_op_builder *w)
{
    return tokens(w, w->config->hidden, ari_op_builder_forward_of(w, ARI_OPERATION_DISPATCH, ARI_EXPERTS)->in[0]);
}

/* A value for each expert of a token: f32 whatever the activations are. */
static ari_op_value routes(ari_op_builder *w, size_t id)
{
    ari_op_value v = tokens(w, w->config->experts.n, id);
    v.role = ARI_ROUTES;
    v.dtype = AR_F32;
    return v;
}

/* A row for each of a token's experts, of the model's width. */
static ari_op_value rows(ari_op_builder *w, size_t id)
{
    w->in_experts = true;
    const ari_op_value v = tokens(w, w->config->hidden, id);
    w->in_experts = false;
    return v;
}

/* --- exchanges between expert-parallel ranks ---------------------------------------------------------------------- */

/* Of this rank's tokens. */
static size_t slots(ari_op_builder *w)
{
    const size_t each = w->config->experts.per_token;
    return ari_op_builder_mul(w, w->tokens, each) / (w->whole ? w->ranks[ARI_AXIS_TP] : 1);
}

/* In the operation that has been begun: the rows of all tokens go to their experts' ranks, or back. */
static void exchange_rows(ari_op_builder *w)
{
    const size_t rows = slots(w);
    const size_t others = ari_op_builder_mul(w, ari_op_builder_mul(w, rows, w->config->hidden), w->ep - 1);
    const int calls = w->op.calls;
    ari_op_builder_call(w, ARI_CALL_ALL_TO_ALL, ARI_OVER_EP, others, w->form.activations, ARI_EACH_PASS, ARI_EXPERTS,
                        "");
    if (w->op.calls > calls)
        w->op.call[calls].routed = true;
}

/* Every rank gets all tokens, and backward the weights of their experts. */
static void gather_tokens(ari_op_builder *w, bool weights)
{
    const size_t all = ari_op_builder_mul(w, slots(w), w->ep), k = w->config->experts.per_token;
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_EP, ari_op_builder_mul(w, all / k, w->config->hidden),
                        w->form.activations, ARI_EACH_PASS, ARI_EXPERTS, "");
    if (weights)
        ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_EP, all, AR_F32, ARI_EACH_PASS, ARI_EXPERTS, "");
}

/* To the experts, in either pass; what is backward comes with weights. */
static void send_rows(ari_op_builder *w)
{
    if (w->c->run.parallel.dispatch == AR_DISPATCH_ALL_GATHER)
        gather_tokens(w, w->pass == ARI_PASS_BACKWARD);
    else
        exchange_rows(w);
}

/* Each gets the experts of all tokens, by which the rows are counted and sorted. */
static void gather_routes(ari_op_builder *w)
{
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_EP, ari_op_builder_mul(w, slots(w), w->ep), AR_I32,
                        ARI_EACH_PASS, ARI_ROUTER, "");
}

bool ari_step_counts(const ari_step_case *c)
{
    return ar_config_balance(c->config, &c->run.loss) >= AR_BALANCE_BATCH;
}

size_t ari_routed_exchanges(const ari_step_case *c, size_t layer)
{
    const bool again = c->run.parallel.recompute.what == AR_RECOMPUTE_FULL && ari_step_recomputes(c, layer);
    const size_t ways = c->run.parallel.dispatch == AR_DISPATCH_ALL_GATHER ? 1 : 2; /* there and back, or back alone */
    return ways * ((c->forward_only ? 1u : again ? 3u : 2u) + ari_step_counts(c));
}

/* Counts of tokens, which the ranks that have parts of a sequence add up. */
static void sum_counts(ari_op_builder *w, ari_over over)
{
    ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, over, ari_op_builder_mul(w, w->own, w->config->experts.n), AR_I64,
                        ARI_EACH_PASS, ARI_ROUTER, "");
}

/* --- what stands between the products ----------------------------------------------------------------------------- */

/* Either pass; backward from the weights' gradients to those of the logits. */
static void route(ari_op_builder *w)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_ROUTE, ARI_ROUTES);
    const size_t id = ari_op_builder_now(w);
    const bool backward = w->pass == ARI_PASS_BACKWARD;
    op->produced_as = tokens_at(w);
    op->input[op->inputs++] = backward ? routes(w, id) : tokens(w, w->config->experts.n, id);
    op->output[op->outputs++] = backward ? tokens(w, w->config->experts.n, 0) : routes(w, 0);
    if (!backward && ar_config_router_bias(w->config))
        op->weight[op->weights++] = ari_op_builder_param(w, ARI_ROUTER_BIAS, false);
    if (!backward && ar_config_balance(w->config, &w->c->run.loss) == AR_BALANCE_SEQUENCE) {
        sum_counts(w, ARI_OVER_CP);
        if (w->whole)
            sum_counts(w, ARI_OVER_TP);
    }
    if (!backward)
        gather_routes(w);
    ari_op_builder_make(w);
}

/* x to rows; backward the sum of a token's rows. */
static void dispatch(ari_op_builder *w, size_t from, size_t by)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_DISPATCH, ARI_EXPERTS);
    const bool backward = w->pass == ARI_PASS_BACKWARD;
    op->produced_as = tokens_at(w);
    op->input[op->inputs++] = backward ? rows(w, from) : tokens(w, w->config->hidden, from);
    op->input[op->inputs++] = routes(w, by);
    op->output[op->outputs++] = backward ? tokens(w, w->config->hidden, 0) : rows(w, 0);
    if (backward)
        exchange_rows(w);
    else
        send_rows(w);
    ari_op_builder_make(w);
}

/* Backward to the rows, and to their weights. */
static void combine(ari_op_builder *w, size_t made, size_t by)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_COMBINE, ARI_EXPERTS);
    const bool backward = w->pass == ARI_PASS_BACKWARD;
    ari_op_value *const apart = backward ? op->output : op->input, *const sum = backward ? op->input : op->output;
    op->produced_as = tokens_at(w);
    op->inputs = backward ? 1 : 2;
    op->outputs = backward ? 2 : 1;
    apart[0] = rows(w, made);
    apart[1] = routes(w, by);
    sum[0] = tokens(w, w->config->hidden, backward ? ari_op_builder_now(w) : 0);
    if (backward)
        send_rows(w);
    else
        exchange_rows(w);
    ari_op_builder_make(w);
}

/* act(gate) * up of what a product has made, either pass. */
static void gate(ari_op_builder *w, ari_role role, size_t features, ar_placement at)
{
    const bool backward = w->pass == ARI_PASS_BACKWARD;
    ari_operation *op = ari_op_builder_local(w, ARI_OPERATION_GATE, role, backward ? 1 : 2, features, at);
    if (backward)
        op->output[op->outputs++] = op->output[0];
    ari_op_builder_make(w);
}

/* sigmoid(logit) * y of the shared expert. Backward to both. */
static void share(ari_op_builder *w, ari_op_value logit, ari_op_value y)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_GATE, ARI_SHARED_EXPERT);
    op->produced_as = tokens_at(w);
    op->inputs = 2;
    op->input[0] = logit;
    op->input[1] = y;
    op->output[op->outputs++] = tokens(w, w->config->hidden, 0);
    ari_op_builder_make(w);
}

static void share_backward(ari_op_builder *w, size_t dy)
{
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_GATE, ARI_SHARED_EXPERT);
    op->produced_as = tokens_at(w);
    op->input[op->inputs++] = tokens(w, w->config->hidden, dy);
    op->output[op->outputs++] = tokens(w, 1, 0);
    op->output[op->outputs++] = tokens(w, w->config->hidden, 0);
    ari_op_builder_make(w);
}

/* What there is, and another; of a gradient `of` is the value that is used several times. */
static void add(ari_op_builder *w, size_t other, size_t of)
{
    ari_operation *op = ari_op_builder_local(w, ARI_OPERATION_RESIDUAL, ARI_MLP, 2, w->config->hidden, tokens_at(w));
    op->input[1].id = other;
    op->input[0].of = op->input[1].of = op->output[0].of = of;
    ari_op_builder_make(w);
}

/* Of what is between the two products of an expert. */
static ar_placement wide_at(const ari_op_builder *w)
{
    return w->whole ? ari_by_tokens : w->block.mlp.first.style == AR_STYLE_COLWISE ? ari_by_features : ari_whole;
}

/* Made again before the gradients of the weights that they meet. */
static void experts_input_again(ari_op_builder *w)
{
    const ari_forward *f = ari_op_builder_forward_of(w, ARI_OPERATION_DISPATCH, ARI_EXPERTS);
    w->in_experts = false;
    dispatch(w, f->in[0], f->in[1]);
    w->in_experts = true;
}

static void activation_again(ari_op_builder *w)
{
    const ari_forward *f = ari_op_builder_forward_of(w, ARI_OPERATION_PRODUCT, ARI_EXPERT_GATE);
    w->edges.now = (ari_values){.at = {{.id = f->out[0]}, {.id = f->out[1]}}, .n = 2};
    gate(w, ARI_EXPERT_GATE, w->config->experts.ffn, wide_at(w));
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

/* Between the stream and the tokens that this rank routes, of which a router, and experts, take all features. */
static experts_ops experts_of(const ari_op_builder *w)
{
    const ar_branch_split *s = &w->block.mlp;
    const bool cut = s->first.style == AR_STYLE_COLWISE;
    const ar_placement at = tokens_at(w), wide = cut ? ari_by_features : ari_whole;
    const ar_linear_split none = {AR_STYLE_REPLICATE, at, at};
    const ar_linear_split first = {s->first.style, at, wide}, second = {s->second.style, wide, at};
    experts_ops e = {.enter = {ari_op_builder_placed(s->enter.from), at},
                     .leave = {at, ari_op_builder_placed(s->leave.to)},
                     .wide = s->shared_whole ? at : wide,
                     .router = {.part = {ARI_ROUTER}, .n = 1, .split = none, .module = ARI_ROUTER},
                     .first = {.part = {ARI_EXPERT_GATE, ARI_EXPERT_UP},
                               .n = 2,
                               .split = first,
                               .module = ARI_EXPERTS,
                               .remake = w->ep > 1 ? NULL : experts_input_again}, /* what has been sent is kept */
                     .second = {.part = {ARI_EXPERT_DOWN},
                                .n = 1,
                                .split = second,
                                .module = ARI_EXPERT_DOWN,
                                .remake = activation_again},
                     .shared_first = {.part = {ARI_SHARED_GATE, ARI_SHARED_UP},
                                      .n = 2,
                                      .split = s->shared_whole ? none : first,
                                      .module = ARI_SHARED_EXPERT},
                     .shared_second = {.part = {ARI_SHARED_DOWN},
                                       .n = 1,
                                       .split = s->shared_whole ? none : second,
                                       .module = ARI_SHARED_DOWN},
                     .share = {.part = {ARI_SHARED_SHARE}, .n = 1, .split = none, .module = ARI_SHARED_SHARE}};
    e.first.local = e.second.local = w->whole;
    if (w->whole)
        e.first.split = e.second.split = none;
    return e;
}

/* Notes what an operation's backward pass reads where the operation itself is not computed again. */
static void note(ari_op_builder *w, ari_operation_kind kind, ari_role role, size_t first, size_t second)
{
    ari_forward *f = ari_op_builder_forward_of(w, kind, role);
    f->in[0] = first;
    f->in[1] = second;
}

static void shared(ari_op_builder *w, const experts_ops *e, size_t x, size_t sum, bool again)
{
    const size_t h = w->config->hidden;
    take(w, tokens(w, h, x));
    ari_op_builder_linear(w, &e->shared_first);
    gate(w, ARI_SHARED_ACTIVATION, w->config->experts.shared, e->wide);
    ari_op_builder_linear(w, &e->shared_second);
    const size_t y = ari_op_builder_now(w);
    if (w->config->experts.ungated) {
        if (!again)
            add(w, sum, 0);
        return;
    }
    take(w, tokens(w, h, x));
    ari_op_builder_linear(w, &e->share);
    const size_t logit = ari_op_builder_now(w);
    if (again) {
        note(w, ARI_OPERATION_GATE, ARI_SHARED_EXPERT, logit, y);
        return;
    }
    share(w, tokens(w, 1, logit), tokens(w, h, y));
    add(w, sum, 0);
}

bool ari_op_builder_experts(ari_op_builder *w, bool again)
{
    const experts_ops e = experts_of(w);
    if (!ar_config_has_experts(w->config, w->layer))
        return false;
    ari_op_builder_move(w, e.enter, ARI_MLP);
    const size_t x = ari_op_builder_now(w);
    ari_op_builder_linear(w, &e.router);
    route(w);
    const size_t by = ari_op_builder_now(w);
    dispatch(w, x, by);
    w->in_experts = true;
    ari_op_builder_linear(w, &e.first);
    gate(w, ARI_EXPERT_GATE, w->config->experts.ffn, wide_at(w));
    ari_op_builder_linear(w, &e.second);
    w->in_experts = false;
    const size_t made = ari_op_builder_now(w);
    if (again && w->ep == 1)
        note(w, ARI_OPERATION_COMBINE, ARI_EXPERTS, made, by);
    else
        combine(w, made, by);
    if (w->config->experts.shared > 0)
        shared(w, &e, x, ari_op_builder_now(w), again);
    if (!again)
        ari_op_builder_move(w, e.leave, ARI_MLP);
    return true;
}

/* Leaves dx with the shared expert's part, and then its share's, added. */
static void shared_backward(ari_op_builder *w, const experts_ops *e, size_t dy, size_t of)
{
    const size_t dx = ari_op_builder_now(w);
    const bool gated = !w->config->experts.ungated;
    if (gated)
        share_backward(w, dy);
    const ari_op_value dlogit = w->edges.now.at[0];
    take(w, gated ? w->edges.now.at[1] : tokens(w, w->config->hidden, dy));
    ari_op_builder_linear_backward(w, &e->shared_second, NULL, NULL);
    gate(w, ARI_SHARED_ACTIVATION, w->config->experts.shared, e->wide);
    ari_op_builder_linear_backward(w, &e->shared_first, NULL, NULL);
    add(w, dx, of);
    if (!gated)
        return;
    const size_t sum = ari_op_builder_now(w);
    take(w, dlogit);
    ari_op_builder_linear_backward(w, &e->share, NULL, NULL);
    add(w, sum, of);
}

bool ari_op_builder_experts_backward(ari_op_builder *w)
{
    const experts_ops e = experts_of(w);
    if (!ar_config_has_experts(w->config, w->layer))
        return false;
    const size_t x = module_input(w).id;
    ari_op_builder_move(w, ari_op_builder_back(e.leave), ARI_MLP);
    const size_t dy = ari_op_builder_now(w);
    combine(w, 0, 0);
    const ari_op_value weights = w->edges.now.at[1];
    take(w, w->edges.now.at[0]);
    w->in_experts = true;
    ari_op_builder_linear_backward(w, &e.second, NULL, NULL);
    gate(w, ARI_EXPERT_GATE, w->config->experts.ffn, wide_at(w));
    ari_op_builder_linear_backward(w, &e.first, NULL, NULL);
    w->in_experts = false;
    dispatch(w, ari_op_builder_now(w), ari_op_builder_forward_of(w, ARI_OPERATION_DISPATCH, ARI_EXPERTS)->in[1]);
    if (w->config->experts.shared > 0)
        shared_backward(w, &e, dy, x);
    const size_t dx = ari_op_builder_now(w);
    take(w, weights);
    route(w);
    ari_op_builder_linear_backward(w, &e.router, NULL, NULL);
    add(w, dx, x);
    ari_op_builder_move(w, ari_op_builder_back(e.enter), ARI_MLP);
    return true;
}
