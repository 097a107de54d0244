/* SPDX-License-Identifier: Apache-2.0 */
/* A router and its experts (layers.h). Every rank routes all its tokens. A tensor-parallel rank has part of each
 * expert's width; the ranks' partial results are summed before the sum is rounded and weighted. Expert-parallel
 * ranks each have some of the experts: a token's rows are sent to the ranks with its experts, and the results are
 * sent back. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/context/context_private.h"
#include "ref/core/param_private.h"
#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/experts/routes.h"
#include "ref/layers/experts/scores.h"
#include "ref/layers/experts/shared.h"
#include "ref/layers/faults.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/linear/linear.h"
#include "ref/layers/module_private.h"

/* The weights of an expert. */
enum { GATE, UP, DOWN, WEIGHTS };

typedef struct experts_module {
    ar_module base;
    ar_experts_options o;
    ar_branch_split split;
    ar_placement token_placement; /* placement of the tokens that this rank routes: all, or its positions */
    ari_linear router;
    char router_name[ARI_PART_PATH], experts_name[ARI_PART_PATH];
    ar_param *weight;                   /* [n, WEIGHTS] weights, followed by as many biases if there are any; owned */
    ar_param **first_weights, **second; /* [n, 2] gate and up, and [n] down; owned */
    size_t initialised_count;           /* number of initialised entries in `weight`, including biases */
    size_t local_experts, first_expert; /* experts of this rank, and the number of the first */
    size_t width;                       /* width of an expert on this rank */
    ari_shared shared;                  /* the expert for all tokens */
    ari_balance balance;
    ari_scores scores; /* scores of a sigmoid router */
} experts_module;

/* Saved values of the forward pass. */
enum { SAVED_X, SAVED_P, SAVED_ROUTES, SAVED_WEIGHT, SAVED_PRE, SAVED_MADE, SAVED_ROWS };

static size_t tokens_of(const ar_tensor *x)
{
    return ari_tensor_rows(x).shape[0];
}

static const char *router_leaf(const experts_module *m)
{
    return m->o.router ? m->o.router : "gate";
}

/* Taps a value of the module's local tokens. */
static ar_status tap_own(const experts_module *m, ar_ctx *ctx, const char *part, char pass, const ar_tensor *t)
{
    return ari_tap_placed(ctx, m->base.name, part, pass, t, t->shape[t->ndim - 1], m->token_placement);
}

/* Returns the group that shards the experts; NULL: they are replicated. */
static ar_comm *cutting(const experts_module *m, const ar_ctx *ctx)
{
    return ari_is_colwise(&m->split.first) ? ctx->tp : NULL;
}

/* --- routing ------------------------------------------------------------------------------------------------------ */

/* Taps the slots' experts [tokens, k] or, if value is not NULL, values of the slots, for all experts. */
static ar_status tap_slots(const experts_module *m, ar_ctx *ctx, char pass, const ar_tensor *value,
                           const ar_tensor *expert, const ar_tensor *x)
{
    ar_tensor slot_values;
    if (!ari_tapped(ctx))
        return AR_OK;
    AR_TRY(ari_routes_as_numbers(ctx, &slot_values, expert, value, m->o.n, x));
    AR_TRY(tap_own(m, ctx, value ? "weights" : "routes", pass, &slot_values));
    ar_ctx_release(ctx, &slot_values);
    return AR_OK;
}

/* routes: experts for the tokens of all expert-parallel ranks. */
static ar_status route(experts_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *routes, ar_tensor *weight,
                       const ar_tensor *x, const ar_batch *batch)
{
    const size_t tokens = tokens_of(x), k = m->o.per_token;
    ar_tensor z, p, expert, lse = {0};
    AR_TRY(ari_linear_forward(&m->router, ctx, saved, &z, x, AR_ACT_NONE, NULL));
    AR_TRY(tap_own(m, ctx, router_leaf(m), 'f', &z));
    AR_TRY(ari_new_rows(ctx, &p, AR_F32, tokens, m->o.n));
    AR_TRY(ari_new_rows(ctx, &expert, AR_I32, tokens, k));
    AR_TRY(ari_new_rows(ctx, weight, AR_F32, tokens, k));
    if (ari_balance_needs_lse(&m->balance))
        AR_TRY(ar_ctx_tensor(ctx, &lse, AR_F32, 1, &tokens));
    const ari_chosen chosen = {&p, &expert, weight};
    AR_TRY(ari_scores_route(&m->scores, ctx, &chosen, &lse, &z));
    ari_work_moves(ARI_GPU_MOVES_ROUTE, false, ar_tensor_count(weight));
    const ar_tensor logits = z;
    ar_ctx_release(ctx, &z);
    AR_TRY(tap_slots(m, ctx, 'f', NULL, &expert, x));
    AR_TRY(tap_slots(m, ctx, 'f', weight, &expert, x));
    AR_TRY(ari_scores_count(&m->scores, ctx, &chosen, &(ari_routed_tokens){&expert, x, batch}));
    AR_TRY(ari_balance_forward(&m->balance, ctx, saved, &p, &lse, &(ari_routed_tokens){&expert, x, batch}));
    if (ari_faulty(ctx, "ep_outputs_not_returned"))
        AR_TRY(ari_fault_clear_remote(ctx, weight, &expert, m->first_expert, m->local_experts));
    AR_TRY(ari_routes_gather(ctx, routes, &expert, m->router_name));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ROUTE, .input = {&logits}, .out = {weight, routes},
                    .param = &(ar_param *){&m->scores.bias}, .params = m->scores.bias.device ? 1 : 0));
    AR_TRY(ar_saved_push(saved, m, SAVED_P, &p));
    AR_TRY(ar_saved_push(saved, m, SAVED_ROUTES, routes));
    return ar_saved_push(saved, m, SAVED_WEIGHT, weight);
}

static ar_status make_routes(const experts_module *m, ar_ctx *ctx, ari_routes *r, const ar_tensor *gathered_experts,
                             const ar_tensor *x)
{
    const ari_routing routing = {gathered_experts, m->o.n, ari_ctx_samples(ctx, x), m->router_name};
    return ari_routes_make(r, ctx, &routing);
}

/* --- the experts' products ---------------------------------------------------------------------------------------- */

/* Product of all experts: its weights, and (back) whether it computes gradients. */
typedef struct product {
    const experts_module *m;
    bool second, back, alone; /* alone: a product of this rank's part only, not reduced */
    size_t columns;           /* columns of the result on this rank */
} product;

/* Prepares the operand of an expert's weights like a linear layer. */
static ar_status make_operand(ar_ctx *ctx, const ar_operand **out, const void *user, size_t expert)
{
    const product *p = user;
    const experts_module *m = p->m;
    const size_t wide = (p->second ? 1 : 2) * m->o.ffn, k = p->second == p->back ? m->o.hidden : wide;
    ar_comm *tp = cutting(m, ctx), *k_over = p->second != p->back ? tp : NULL, *rows_over = k_over ? NULL : tp;
    const int n = p->second ? 1 : 2;
    return ctx->arith->param_operand(ctx, out, p->second ? &m->second[expert] : &m->first_weights[2 * expert], n, n,
                                     p->back ? AR_USE_BACKWARD : AR_USE_FORWARD, k, k_over, rows_over);
}

/* Computes y [slots, columns] from the experts' rows x; a product whose terms are divided is reduced. */
static ar_status multiply(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const product *p, const ari_routes *r)
{
    const char *not_reduced = p->back ? "experts_dx_not_reduced" : "experts_not_reduced";
    const bool folded = p->second != p->back && !p->alone && !ari_faulty(ctx, not_reduced);
    ar_comm *group = folded ? cutting(p->m, ctx) : NULL;
    AR_TRY(ari_new_rows(ctx, y, x->dtype, x->shape[0], p->columns));
    AR_TRY(ctx->arith->contract_groups(ctx, y, x, &(ar_group_operands){make_operand, p}, &r->groups, group,
                                       p->m->experts_name));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_PRODUCT, .name = p->m->experts_name, .input = {x}, .out = {y},
                    .param = p->second ? p->m->second : p->m->first_weights,
                    .params = p->m->local_experts * (p->second ? 1 : 2));
}

/* An expert's bias of a product. */
static ar_param *bias_of(const experts_module *m, size_t i, int weight)
{
    return &m->weight[(m->local_experts + i) * WEIGHTS + (size_t)weight];
}

static ar_tensor rows_of_expert(const ar_tensor *t, const ari_routes *r, size_t i)
{
    const size_t begin = r->groups.first[i];
    return ar_tensor_slice(t, 0, begin, r->groups.first[i + 1] - begin);
}

/* Adds to y, for each expert's rows, the biases of weights [first_weight, first_weight + n), side by side; each has
 * `width` columns on this rank. */
static ar_status add_biases(const experts_module *m, ar_ctx *ctx, const ar_tensor *y, const ari_routes *r,
                            int first_weight, size_t n, size_t width)
{
    ar_buf joined;
    if (!m->o.bias)
        return AR_OK;
    AR_TRY(ari_step_alloc(ctx, &joined, n * width * sizeof(float)));
    for (size_t i = 0; i < m->local_experts; i++) {
        const ar_tensor rows = rows_of_expert(y, r, i);
        for (size_t k = 0; k < n; k++) {
            ar_param *bias = bias_of(m, i, first_weight + (int)k);
            AR_TRY(ARI_KERNEL(ctx, copy, ar_buf_at(joined, k * width * sizeof(float)), ar_const(bias->value.data),
                              width * sizeof(float)));
            AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_BIAS, .name = bias->name, .input = {y}, .out = {y}, .param = &bias,
                            .params = 1));
        }
        AR_TRY(ARI_KERNEL(ctx, bias_act, &rows, ar_const(joined), AR_ACT_NONE, NULL));
    }
    ari_step_free(ctx, joined);
    return AR_OK;
}

/* The biases' gradients, of which every row of d[k] is a term of weight first_weight + k's. */
static ar_status add_bias_gradients(const experts_module *m, ar_ctx *ctx, const ar_tensor *d, const ari_routes *r,
                                    int first_weight, int n)
{
    for (size_t i = 0; m->o.bias && i < m->local_experts; i++) {
        for (int k = 0; k < n; k++) {
            const ar_tensor rows = rows_of_expert(&d[k], r, i);
            AR_TRY(ctx->arith->grad_rows(ctx, bias_of(m, i, first_weight + k), &rows, (ar_cbuf){NULL}));
            AR_TRY(ari_note_gradient(ctx, bias_of(m, i, first_weight + k), NULL, &d[k]));
        }
    }
    return AR_OK;
}

static ar_status activate(const experts_module *m, ar_ctx *ctx, ar_tensor *act, const ar_tensor *pre)
{
    const ar_tensor gate = ar_tensor_slice(pre, 1, 0, m->width), up = ar_tensor_slice(pre, 1, m->width, m->width);
    AR_TRY(ari_new_rows(ctx, act, pre->dtype, pre->shape[0], m->width));
    ari_work_moves(ARI_GPU_MOVES_GATE, false, ar_tensor_count(act));
    AR_TRY(ARI_KERNEL(ctx, gated_forward, act, &gate, &up, m->o.activation));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .input = {pre}, .out = {act});
}

/* --- rows, as a record has them ----------------------------------------------------------------------------------- */

static ar_status send_rows(const experts_module *m, ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x,
                           const ar_tensor *weight, const ari_routes *r)
{
    AR_TRY(ari_routes_send(ctx, rows, x, weight, r, m->experts_name));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_DISPATCH, .name = m->experts_name, .input = {x, weight}, .out = {rows});
}

static ar_status return_rows(const experts_module *m, ar_ctx *ctx, ar_tensor *returned, ar_tensor *rows,
                             const ari_routes *r)
{
    const ar_tensor input = *rows;
    AR_TRY(ari_routes_return(ctx, returned, rows, r, m->experts_name));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_DISPATCH, .name = m->experts_name, .operation = "return", .input = {&input},
                    .out = {returned});
}

static ar_status combine_rows(ar_ctx *ctx, ar_tensor *y, const ar_tensor *rows, const ar_tensor *weight,
                              const ari_routes *r, const ar_tensor *x)
{
    AR_TRY(ari_routes_combine(ctx, y, rows, weight, r, x));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_COMBINE, .input = {rows, weight}, .out = {y});
}

static ar_status note_gradients(const experts_module *m, ar_ctx *ctx, ar_param *const *param, size_t params,
                                const ar_tensor *x, const ar_tensor *dy)
{
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_WEIGHT_GRADIENT, .name = m->experts_name, .input = {dy, x}, .param = param,
                    .params = params);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* Saves the experts' rows for the gradients of weights if ranks shard the experts; otherwise they are recomputed. */
static ar_status keep_rows(const experts_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *rows)
{
    if (m->local_experts < m->o.n)
        return ar_saved_push(saved, m, SAVED_ROWS, rows);
    ar_ctx_release(ctx, rows);
    return AR_OK;
}

static ar_status take_rows(experts_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *rows, const ar_tensor *x,
                           const ari_routes *r)
{
    if (m->local_experts < m->o.n)
        return ar_saved_pop(saved, m, SAVED_ROWS, rows);
    AR_TRY(send_rows(m, ctx, rows, x, NULL, r));
    ari_work_moves(ARI_GPU_MOVES_DISPATCH, false, ar_tensor_count(rows));
    return AR_OK;
}

/* Computes the experts' outputs for the rows of x, in the order in which they are sent. */
static ar_status expert_rows(experts_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *expert_out, const ar_tensor *x,
                             const ari_routes *r)
{
    ar_tensor rows, pre, act, local_rows;
    AR_TRY(send_rows(m, ctx, &rows, x, NULL, r));
    ari_work_moves(ARI_GPU_MOVES_DISPATCH, false, ar_tensor_count(&rows));
    AR_TRY(multiply(ctx, &pre, &rows, &(product){.m = m, .columns = 2 * m->width}, r));
    AR_TRY(add_biases(m, ctx, &pre, r, GATE, 2, m->width));
    AR_TRY(keep_rows(m, ctx, saved, &rows));
    AR_TRY(activate(m, ctx, &act, &pre));
    AR_TRY(ar_saved_push(saved, m, SAVED_PRE, &pre));
    AR_TRY(multiply(ctx, &local_rows, &act, &(product){.m = m, .second = true, .columns = m->o.hidden}, r));
    AR_TRY(add_biases(m, ctx, &local_rows, r, DOWN, 1, m->o.hidden));
    AR_TRY(return_rows(m, ctx, expert_out, &local_rows, r));
    ar_tensor saved_out = *expert_out;
    if (ari_faulty(ctx, "router_grad_local")) {
        AR_TRY(multiply(ctx, &local_rows, &act,
                        &(product){.m = m, .second = true, .columns = m->o.hidden, .alone = true}, r));
        AR_TRY(return_rows(m, ctx, &saved_out, &local_rows, r));
    }
    ar_ctx_release(ctx, &act);
    return ar_saved_push(saved, m, SAVED_MADE, &saved_out);
}

static ar_status experts_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                 const ar_batch *batch)
{
    experts_module *m = (experts_module *)base;
    ar_tensor input, routes, weight, rows, output;
    ari_routes r;
    AR_TRY(ari_check_features(base->name, "input", x, m->o.hidden));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, &input, x, m->split.enter, false));
    AR_TRY(ar_saved_push(saved, m, SAVED_X, &input));
    AR_TRY(route(m, ctx, saved, &routes, &weight, &input, batch));
    ar_status st = make_routes(m, ctx, &r, &routes, &input);
    if (st == AR_OK)
        st = expert_rows(m, ctx, saved, &rows, &input, &r);
    if (st == AR_OK)
        st = combine_rows(ctx, &output, &rows, &weight, &r, &input);
    ari_routes_end(&r, ctx);
    AR_TRY(st);
    ari_work_moves(ARI_GPU_MOVES_COMBINE, false,
                   ctx->recomputing && m->local_experts == m->o.n ? 0 : ar_tensor_count(&output));
    AR_TRY(tap_own(m, ctx, "experts", 'f', &output));
    AR_TRY(ari_shared_forward(&m->shared, ctx, saved, &output, &input, batch));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, y, &output, m->split.leave, true));
    return ari_tap_placed(ctx, base->name, NULL, 'f', y, m->o.hidden, m->split.leave.dst);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Computes the gradient of the second products' input rows and of their weights from that of their output. */
static ar_status second_backward(experts_module *m, ar_ctx *ctx, ar_tensor *dact, const ar_tensor *dmade,
                                 const ar_tensor *pre, const ari_routes *r)
{
    ar_tensor act;
    AR_TRY(multiply(ctx, dact, dmade, &(product){.m = m, .second = true, .back = true, .columns = m->width}, r));
    AR_TRY(activate(m, ctx, &act, pre));
    AR_TRY(ctx->arith->grad_groups(ctx, m->second, dmade, 1, &act, &r->groups, cutting(m, ctx), m->experts_name));
    AR_TRY(note_gradients(m, ctx, m->second, m->local_experts, &act, dmade));
    AR_TRY(add_bias_gradients(m, ctx, dmade, r, DOWN, 1));
    ar_ctx_release(ctx, &act);
    return AR_OK;
}

static ar_status first_backward(experts_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *drows,
                                const ar_tensor *dact, const ar_tensor *pre, const ar_tensor *x, const ari_routes *r)
{
    const ar_row_sum empty_sum = {.t = {NULL}};
    const size_t w = m->width;
    const ar_tensor gate = ar_tensor_slice(pre, 1, 0, w), up = ar_tensor_slice(pre, 1, w, w);
    ar_tensor dpre, rows;
    AR_TRY(ari_new_rows(ctx, &dpre, pre->dtype, pre->shape[0], 2 * w));
    const ar_tensor d[2] = {ar_tensor_slice(&dpre, 1, 0, w), ar_tensor_slice(&dpre, 1, w, w)};
    AR_TRY(ARI_KERNEL(ctx, gated_backward, &d[0], &d[1], dact, &gate, &up, m->o.activation, &empty_sum, &empty_sum));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .input = {dact}, .out = {&dpre}));
    ari_work_moves(ARI_GPU_MOVES_GATE, true, ar_tensor_count(dact));
    AR_TRY(multiply(ctx, drows, &dpre, &(product){.m = m, .back = true, .columns = m->o.hidden}, r));
    AR_TRY(take_rows(m, ctx, saved, &rows, x, r));
    AR_TRY(ctx->arith->grad_groups(ctx, m->first_weights, d, 2, &rows, &r->groups, NULL, m->experts_name));
    AR_TRY(note_gradients(m, ctx, m->first_weights, 2 * m->local_experts, &rows, &dpre));
    AR_TRY(add_bias_gradients(m, ctx, d, r, GATE, 2));
    ARI_RELEASE(ctx, &rows, &dpre);
    return AR_OK;
}

/* Computes dx for the tokens that went to the experts; g [tokens, k]: the gradient of the slots' weights. */
static ar_status experts_gradient(experts_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *g,
                                  const ar_tensor *dy, const ar_tensor *x, const ar_tensor *weight, const ari_routes *r)
{
    ar_tensor expert_out, pre, dmade, dact, drows, dx_rows;
    AR_TRY(ar_saved_pop(saved, m, SAVED_MADE, &expert_out));
    AR_TRY(ar_saved_pop(saved, m, SAVED_PRE, &pre));
    const ar_tensor dy_rows = ari_tensor_rows(dy);
    AR_TRY(ARI_KERNEL(ctx, dot_rows, g->data, &dy_rows, &expert_out, ar_const(r->place.data), m->o.per_token));
    ari_work_moves(ARI_GPU_MOVES_COMBINE, true, ar_tensor_count(dy));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_COMBINE, .input = {dy, &expert_out}, .out = {g}));
    ar_ctx_release(ctx, &expert_out);
    AR_TRY(send_rows(m, ctx, &dmade, dy, weight, r));
    AR_TRY(second_backward(m, ctx, &dact, &dmade, &pre, r));
    ar_ctx_release(ctx, &dmade);
    AR_TRY(first_backward(m, ctx, saved, &drows, &dact, &pre, x, r));
    ARI_RELEASE(ctx, &dact, &pre);
    ari_work_moves(ARI_GPU_MOVES_DISPATCH, true, ar_tensor_count(&drows) + ar_tensor_count(g));
    AR_TRY(return_rows(m, ctx, &dx_rows, &drows, r));
    AR_TRY(combine_rows(ctx, dx, &dx_rows, NULL, r, x));
    ar_ctx_release(ctx, &dx_rows);
    return tap_own(m, ctx, "experts", 'b', dx);
}

/* Through the softmax, and dx += the gradient through the logits. */
static ar_status router_backward(experts_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dx,
                                 const ar_tensor *g, const ar_tensor *weight, const ari_routed_tokens *t)
{
    const ar_tensor *expert = t->expert;
    ar_tensor p, dz, router_dx;
    if (ari_faulty(ctx, "router_weights_detached"))
        AR_TRY(ARI_KERNEL(ctx, fill, g, 0.0f));
    AR_TRY(tap_slots(m, ctx, 'b', g, expert, dx));
    AR_TRY(ar_saved_pop(saved, m, SAVED_P, &p));
    AR_TRY(ari_like(ctx, &dz, dx, m->o.n));
    const ari_chosen chosen = {&p, expert, weight};
    AR_TRY(ari_scores_backward(&m->scores, ctx, &dz, &chosen, g));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ROUTE, .input = {g}, .out = {&dz}));
    ari_work_moves(ARI_GPU_MOVES_ROUTE, true, ar_tensor_count(g));
    AR_TRY(ari_balance_backward(&m->balance, ctx, saved, &dz, &p, t));
    ar_ctx_release(ctx, &p);
    AR_TRY(tap_own(m, ctx, "logits", 'b', &dz));
    AR_TRY(ari_linear_backward(&m->router, ctx, saved, &router_dx, &dz, m->router_name, NULL));
    ar_ctx_release(ctx, &dz);
    return ari_add_gradient(ctx, dx, &router_dx);
}

/* Computes dx from dy, both replicated. */
static ar_status gradient_of(experts_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                             const ar_batch *batch)
{
    ar_tensor x, routes, weight, g;
    ari_routes r;
    AR_TRY(ar_saved_pop(saved, m, SAVED_X, &x));
    AR_TRY(ar_saved_pop(saved, m, SAVED_ROUTES, &routes));
    AR_TRY(ar_saved_pop(saved, m, SAVED_WEIGHT, &weight));
    AR_TRY(ari_new_rows(ctx, &g, AR_F32, tokens_of(&x), m->o.per_token));
    const ar_tensor expert = ari_routes_local(ctx, &routes);
    ar_status st = make_routes(m, ctx, &r, &routes, &x);
    if (st == AR_OK)
        st = experts_gradient(m, ctx, saved, dx, &g, dy, &x, &weight, &r);
    ari_routes_end(&r, ctx);
    AR_TRY(st);
    AR_TRY(ari_shared_backward(&m->shared, ctx, saved, dx, dy, batch));
    AR_TRY(router_backward(m, ctx, saved, dx, &g, &weight, &(ari_routed_tokens){&expert, &x, batch}));
    ARI_RELEASE(ctx, &g, &weight, &routes);
    return AR_OK;
}

static ar_status experts_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                  const ar_batch *batch)
{
    experts_module *m = (experts_module *)base;
    ar_tensor dout, din, unwanted;
    AR_TRY(ari_check_features(base->name, "gradient", dy, m->o.hidden));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, &dout, dy, ari_tp_redistribution_backward(m->split.leave), false));
    AR_TRY(gradient_of(m, ctx, saved, &din, &dout, batch));
    ari_release_placed(ctx, &dout, dy);
    if (!dx)
        dx = &unwanted;
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, dx, &din, ari_tp_redistribution_backward(m->split.enter), true));
    return ari_tap_placed(ctx, base->name, NULL, 'b', dx, m->o.hidden, ari_placed_gradient(m->split.enter.src));
}

/* --- the module --------------------------------------------------------------------------------------------------- */

static size_t experts_params(const ar_module *base, ar_param **out, size_t cap)
{
    experts_module *m = (experts_module *)(uintptr_t)base;
    size_t n = ari_linear_params(&m->router, out, cap);
    n += ari_scores_params(&m->scores, out, cap, n);
    for (size_t i = 0; i < m->local_experts * WEIGHTS; i++, n++) {
        if (n < cap)
            out[n] = &m->weight[i];
        if (m->o.bias && ++n < cap)
            out[n] = &m->weight[m->local_experts * WEIGHTS + i];
    }
    return n;
}

static size_t experts_children(const ar_module *base, ar_module **out, size_t cap)
{
    const experts_module *m = (const experts_module *)base;
    return ari_shared_children(&m->shared, out, cap);
}

static void experts_destroy(ar_module *base)
{
    experts_module *m = (experts_module *)base;
    ari_linear_fini(&m->router);
    ari_balance_fini(&m->balance);
    ari_scores_fini(&m->scores);
    for (size_t i = 0; i < m->initialised_count; i++) {
        ar_param_fini(&m->weight[i]);
        if (m->o.bias)
            ar_param_fini(&m->weight[m->local_experts * WEIGHTS + i]);
    }
    free(m->weight);
    free(m->first_weights);
    free(m->second);
    ari_shared_fini(&m->shared);
    free(m);
}

/* Sets the ranks that hold copies of an expert's weight: for an unsharded one they are not the tensor-parallel
 * group's. */
static void set_copies(const experts_module *m, const ar_ctx *ctx, ar_param *p)
{
    p->expert = ctx->edp != ctx->dp;
    if (ari_placed_full(m->token_placement))
        return;
    p->layout.replica = 0;
    p->layout.replicas = 1;
}

static ar_status init_expert(experts_module *m, ar_ctx *ctx, size_t i)
{
    const char *const leaf[WEIGHTS] = {m->o.gate ? m->o.gate : "gate_proj", m->o.up ? m->o.up : "up_proj",
                                       m->o.down ? m->o.down : "down_proj"};
    for (int w = 0; w < WEIGHTS; w++) {
        char name[160], part[160];
        snprintf(part, sizeof part, "%zu.%s", m->first_expert + i, leaf[w]);
        AR_TRY(ari_path(name, sizeof name, m->experts_name, part));
        const ari_linear_spec spec = {.split = w == DOWN ? m->split.second : m->split.first,
                                      .n = 1,
                                      .part = {{.name = name, .out = w == DOWN ? m->o.hidden : m->o.ffn}},
                                      .in_features = w == DOWN ? m->o.ffn : m->o.hidden};
        AR_TRY(ari_linear_weight_init(&m->weight[i * WEIGHTS + (size_t)w], ctx, &spec, 0));
        set_copies(m, ctx, &m->weight[i * WEIGHTS + (size_t)w]);
        m->initialised_count++;
        if (m->o.bias) {
            AR_TRY(ari_linear_bias_init(bias_of(m, i, w), ctx, &spec, 0));
            bias_of(m, i, w)->spread = false; /* every rank has all rows */
            set_copies(m, ctx, bias_of(m, i, w));
        }
    }
    m->first_weights[2 * i] = &m->weight[i * WEIGHTS + GATE];
    m->first_weights[2 * i + 1] = &m->weight[i * WEIGHTS + UP];
    m->second[i] = &m->weight[i * WEIGHTS + DOWN];
    return AR_OK;
}

static ar_status init_experts(experts_module *m, ar_ctx *ctx, const ar_experts_options *o)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->ep);
    if (o->n == 0 || o->per_token == 0 || o->per_token > o->n || o->hidden == 0 || o->ffn == 0)
        return ar_error_set(AR_ERR_ARG, "%s: %zu of %zu experts [%zu, %zu], expected 1 to all of at least one",
                            m->base.name, o->per_token, o->n, o->ffn, o->hidden);
    if (o->n % ranks != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "%s: %zu experts cannot be shared out to %zu ranks", m->base.name, o->n,
                            ranks);
    m->o = *o;
    m->local_experts = o->n / ranks;
    m->first_expert = m->local_experts * (size_t)ar_comm_rank(ctx->ep);
    m->split = o->split ? *o->split : ari_experts_split(true, ari_placed_stream(ctx));
    m->token_placement = m->split.enter.dst;
    if (ari_experts_unsplit(&ctx->layout)) {
        m->token_placement = ari_shard_tokens;
        m->split.enter.dst = m->split.leave.src = m->token_placement;
        m->split.first.style = m->split.second.style = AR_STYLE_REPLICATE;
    }
    AR_TRY(ari_path(m->router_name, sizeof m->router_name, m->base.name, router_leaf(m)));
    AR_TRY(ari_path(m->experts_name, sizeof m->experts_name, m->base.name, "experts"));
    const ari_linear_spec router = {.split = {AR_STYLE_REPLICATE, m->token_placement, m->token_placement},
                                    .n = 1,
                                    .part = {{.name = m->router_name, .out = o->n}},
                                    .in_features = o->hidden,
                                    .bias = o->bias,
                                    .chooses = true};
    AR_TRY(ari_linear_init(&m->router, ctx, &router));
    m->balance = (ari_balance){.experts = o->n,
                               .per_token = o->per_token,
                               .name = m->router_name,
                               .spread = !ari_placed_full(m->token_placement)};
    AR_TRY(ari_balance_init(&m->balance, ctx, o->balance_weight));
    AR_TRY(ari_scores_init(&m->scores, ctx, o, m->base.name, &m->balance));
    AR_TRY(ARI_ALLOC_ZERO(&m->weight, 2 * m->local_experts * WEIGHTS, "experts"));
    AR_TRY(ARI_ALLOC(&m->first_weights, 2 * m->local_experts, "experts"));
    AR_TRY(ARI_ALLOC(&m->second, m->local_experts, "experts"));
    for (size_t i = 0; i < m->local_experts; i++)
        AR_TRY(init_expert(m, ctx, i));
    m->width = ari_param_matrix(&m->weight[GATE]).shape[0];
    return ari_shared_init(&m->shared, ctx, m->base.name, o, &m->split, m->token_placement);
}

static const ar_module_ops experts_ops = {.kind = "experts",
                                          .forward = experts_forward,
                                          .backward = experts_backward,
                                          .params = experts_params,
                                          .children = experts_children,
                                          .destroy = experts_destroy};

ari_balance *ari_experts_balance(ar_module *m)
{
    return m->ops == &experts_ops ? &((experts_module *)m)->balance : NULL;
}

ari_scores *ari_experts_scores(ar_module *m)
{
    ari_scores *s = m->ops == &experts_ops ? &((experts_module *)m)->scores : NULL;
    return s && s->bias.device ? s : NULL;
}

ar_status ar_experts_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_experts_options *o)
{
    experts_module *m = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&m, &experts_ops, name, AR_HELD_UNKNOWN));
    return ari_module_end(out, &m->base, init_experts(m, ctx, o));
}
