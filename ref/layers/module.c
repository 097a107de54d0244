/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/module.h"

#include <stddef.h>
#include <stdlib.h>

#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/layers/module_private.h"
#include "ref/layers/param_private.h"
#include "ref/layers/parts.h"

/* --- modules ------------------------------------------------------------------------------------------------------ */

static ar_param *first_param(const ar_module *m)
{
    return (ar_param *)((uintptr_t)m + m->ops->params_at);
}

static ar_module **first_child(const ar_module *m)
{
    return (ar_module **)((uintptr_t)m + m->ops->children_at);
}

/* Lists parameters of m without those of its children, as ar_module_ops.params does. */
static size_t own_params(const ar_module *m, ar_param **out, size_t cap)
{
    ar_param *p = first_param(m);
    size_t n = 0;
    if (m->ops->params)
        return m->ops->params(m, out, cap);
    for (size_t i = 0; i < m->ops->params_count; i++) {
        if (p[i].device && n++ < cap)
            out[n - 1] = &p[i];
    }
    return n;
}

static size_t own_children(const ar_module *m, ar_module **out, size_t cap)
{
    ar_module **child = first_child(m);
    size_t n = 0;
    if (m->ops->children)
        return m->ops->children(m, out, cap);
    for (size_t i = 0; i < m->ops->children_count; i++) {
        if (child[i] && n++ < cap)
            out[n - 1] = child[i];
    }
    return n;
}

/* Calls f for each of the module's direct parameters. */
static ar_status for_own(ar_module *m, ar_ctx *ctx, ar_status (*f)(ar_param *p, ar_ctx *ctx))
{
    ar_param *few[16], **params = few;
    const size_t n = own_params(m, few, sizeof few / sizeof *few);
    ar_status st = AR_OK;
    if (n > sizeof few / sizeof *few) {
        AR_TRY(ARI_ALLOC(&params, n, "a module's parameters"));
        own_params(m, params, n);
    }
    for (size_t i = 0; i < n && st == AR_OK; i++)
        st = f(params[i], ctx);
    if (params != few)
        free(params);
    return st;
}

static ar_status use(ar_param *p, ar_ctx *ctx)
{
    (void)ctx;
    ari_param_use(p);
    return AR_OK;
}

static ar_status use_own(ar_module *m, ar_ctx *ctx, const ar_saved *saved)
{
    return saved && !ctx->recomputing ? for_own(m, ctx, use) : AR_OK;
}

ar_status ari_module_done(ar_module *m, ar_ctx *ctx)
{
    return for_own(m, ctx, ari_param_done);
}

ar_status ar_module_init(ar_module *m, const ar_module_ops *ops, const char *name, ar_held tap)
{
    m->ops = ops;
    m->tap = m->tap_dx = tap;
    m->recomputed = false;
    m->hook = NULL;
    if (!ops->forward || !ops->backward)
        return ar_error_set(AR_ERR_ARG, "%s: a module needs forward and backward", name);
    return ari_path(m->name, sizeof m->name, name, NULL);
}

ar_status ari_module_begin(void **out, size_t bytes, const ar_module_ops *ops, const char *name, ar_held tap)
{
    ARI_OWNED ar_module *m = NULL;
    AR_TRY(ari_alloc_zero((void **)&m, 1, bytes, name));
    AR_TRY(ar_module_init(m, ops, name, tap));
    ARI_GIVE(out, m);
    return AR_OK;
}

ar_status ari_module_end(ar_module **out, ar_module *m, ar_status st)
{
    if (st == AR_OK)
        *out = m;
    else
        ar_module_destroy(m);
    return st;
}

ar_status ar_tap_value(ar_ctx *ctx, const char *name, char pass, const ar_tensor *t, ar_held placement)
{
    if (placement == AR_HELD_UNKNOWN)
        return AR_OK;
    const ar_placement placed = placement == AR_HELD_WHOLE ? ari_placed_stream(ctx) : ari_shard_features;
    AR_TRY(
        ARI_NOTE(ctx, .kind = ARI_LEDGER_REPORT, .name = name, .input = {t}, .input_placement = &placed, .pass = pass));
    if (!ari_tapped(ctx))
        return AR_OK;
    if (placement == AR_HELD_WHOLE || t->ndim < 1)
        return ari_tap_tokens(ctx, name, NULL, pass, t);
    const int feature_dim = t->ndim - 1;
    return ari_tap_copies(ctx, name, NULL, pass, t, feature_dim, t->shape[feature_dim] * (size_t)ar_comm_size(ctx->tp),
                          1);
}

/* --- recomputation ------------------------------------------------------------------------------------------------ */

enum { SAVED_INPUT = -1 }; /* key for the input, in addition to the module's saved values */

void ar_module_recompute(ar_module *m)
{
    m->recomputed = true;
}

static ar_status recompute_selected(void *user, ar_module *m)
{
    (void)user;
    m->recomputed = m->recomputed || m->ops->selective;
    return AR_OK;
}

ar_status ari_module_recompute(ar_module *m, ar_recompute mode)
{
    if (mode == AR_RECOMPUTE_FULL)
        ar_module_recompute(m);
    return mode == AR_RECOMPUTE_SELECTIVE ? ari_module_each(m, recompute_selected, NULL) : AR_OK;
}

/* Runs the forward pass but saves only x. */
static ar_status forward_for_now(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                 const ar_batch *batch)
{
    const uint64_t mark = ctx->newest_number;
    const size_t count = ari_saved_count(saved);
    AR_TRY(m->ops->forward(m, ctx, saved, y, x, batch));
    ari_saved_cut(saved, count);
    ari_step_release_since(ctx, mark, y);
    return ar_saved_push(saved, m, SAVED_INPUT, x);
}

/* Saves what forward saves, for a module that does not recompute itself. */
static ar_status recompute_saved(ar_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x, const ar_batch *batch)
{
    ar_tensor unwanted;
    ari_span_begin("%s:again", m->name);
    return ari_span_end(m->ops->recompute ? m->ops->recompute(m, ctx, saved, x, batch)
                                          : m->ops->forward(m, ctx, saved, &unwanted, x, batch));
}

ar_status ari_module_recompute_saved(ar_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                     const ar_batch *batch)
{
    return m->recomputed ? ar_saved_push(saved, m, SAVED_INPUT, x) : recompute_saved(m, ctx, saved, x, batch);
}

/* Repeats the forward pass without reporting values, which have been reported already. */
static ar_status recompute_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                   const ar_batch *batch)
{
    const ar_tap_fn tap = ctx->tap;
    const bool outer = ctx->recomputing;
    ctx->tap = NULL;
    ctx->recomputing = true;
    const ar_status st = recompute_saved(m, ctx, saved, x, batch);
    ctx->tap = tap;
    ctx->recomputing = outer;
    return st;
}

static ar_status backward_recomputed(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                     const ar_batch *batch)
{
    const uint64_t mark = ctx->newest_number;
    ar_tensor x;
    AR_TRY(ar_saved_pop(saved, m, SAVED_INPUT, &x));
    AR_TRY(recompute_forward(m, ctx, saved, &x, batch));
    AR_TRY(m->ops->backward(m, ctx, saved, dx, dy, batch));
    ari_step_release_since(ctx, mark, dx);
    return AR_OK;
}

/* --- both passes -------------------------------------------------------------------------------------------------- */

static ar_status begin_pass(const ar_module *m, ar_pass pass)
{
    return m->hook ? m->hook->begin(m->hook->user, pass) : AR_OK;
}

static ar_status end_pass(const ar_module *m, ar_pass pass)
{
    return m->hook ? m->hook->end(m->hook->user, pass) : AR_OK;
}

ar_status ar_module_forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                            const ar_batch *batch)
{
    if (!m)
        return ar_error_set(AR_ERR_ARG, "a pass of a module that is NULL");
    const ar_tensor input = x ? *x : (ar_tensor){0}; /* y may be x */
    const ar_tensor *src = x ? &input : NULL;
    if (batch)
        ari_ctx_place_batch(ctx, batch);
    AR_TRY(use_own(m, ctx, saved));
    AR_TRY(begin_pass(m, AR_FORWARD));
    const ari_ledger_place outer = ari_ledger_enter(ctx, m->name, 'f');
    ari_span_begin("%s:fwd", m->name);
    AR_TRY(ari_span_end((m->recomputed ? forward_for_now : m->ops->forward)(m, ctx, saved, y, src, batch)));
    ari_ledger_leave(ctx, outer);
    AR_TRY(end_pass(m, AR_FORWARD));
    return ar_tap_value(ctx, m->name, 'f', y, m->tap);
}

ar_status ar_module_backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                             const ar_batch *batch)
{
    const ar_tensor gradient = dy ? *dy : (ar_tensor){0}; /* dx may be dy */
    const ar_tensor *src = dy ? &gradient : NULL;
    if (batch)
        ari_ctx_place_batch(ctx, batch);
    AR_TRY(begin_pass(m, AR_BACKWARD));
    const ari_ledger_place outer = ari_ledger_enter(ctx, m->name, 'b');
    ari_span_begin("%s:bwd", m->name);
    AR_TRY(ari_span_end((m->recomputed ? backward_recomputed : m->ops->backward)(m, ctx, saved, dx, src, batch)));
    ari_ledger_leave(ctx, outer);
    if (dx)
        AR_TRY(ar_tap_value(ctx, m->name, 'b', dx, m->tap_dx));
    AR_TRY(ari_module_done(m, ctx));
    return end_pass(m, AR_BACKWARD);
}

static void add_once(ar_param *p, ar_param **out, size_t cap, size_t *count)
{
    for (size_t i = 0; i < *count && i < cap; i++) {
        if (out[i] == p)
            return;
    }
    if (*count < cap)
        out[*count] = p;
    (*count)++;
}

/* A module's lists have the length that the module states. */
ar_status ari_module_each(ar_module *m, ar_status (*f)(void *user, ar_module *m), void *user)
{
    const size_t n = own_children(m, NULL, 0);
    ARI_OWNED ar_module **children = NULL;
    AR_TRY(f(user, m));
    if (n == 0)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&children, n, "a list of modules"));
    own_children(m, children, n);
    for (size_t i = 0; i < n; i++)
        AR_TRY(ari_module_each(children[i], f, user));
    return AR_OK;
}

typedef struct param_list {
    ar_param **out; /* [cap] */
    size_t cap, count;
    bool trainable_only;
} param_list;

static ar_status collect_params(void *user, ar_module *m)
{
    param_list *list = user;
    const size_t n = own_params(m, NULL, 0);
    ARI_OWNED ar_param **params = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&params, n, "a list of parameters"));
    own_params(m, params, n);
    for (size_t i = 0; i < n; i++) {
        if (!list->trainable_only || params[i]->requires_grad)
            add_once(params[i], list->out, list->cap, &list->count);
    }
    return AR_OK;
}

size_t ar_module_params(ar_module *m, ar_param **out, size_t cap, bool trainable_only)
{
    param_list list = {.out = out, .cap = cap, .trainable_only = trainable_only};
    return ari_module_each(m, collect_params, &list) == AR_OK ? list.count : SIZE_MAX;
}

ar_status ari_module_list(ar_param ***out, size_t *count, ar_module *m)
{
    const size_t n = ar_module_params(m, NULL, 0, false);
    ARI_OWNED ar_param **params = NULL;
    if (n == SIZE_MAX)
        return ar_error_set(AR_ERR_MEMORY, "no memory to list the parameters of %s", m->name);
    AR_TRY(ARI_ALLOC(&params, n, "a list of parameters"));
    *count = ar_module_params(m, params, n, false);
    if (*count > n)
        return ar_error_set(AR_ERR_MEMORY, "no memory to list the parameters of %s", m->name);
    ARI_GIVE(out, params);
    return AR_OK;
}

/* Runs f on every parameter. */
static ar_status for_all(ar_module *m, ar_ctx *ctx, uint64_t seed,
                         ar_status (*f)(ar_param *p, ar_ctx *ctx, uint64_t seed))
{
    size_t n = 0;
    ARI_OWNED ar_param **params = NULL;
    AR_TRY(ari_module_list(&params, &n, m));
    ar_status st = AR_OK;
    for (size_t i = 0; i < n && st == AR_OK; i++)
        st = f(params[i], ctx, seed);
    return st;
}

static ar_status zero_grad(ar_param *p, ar_ctx *ctx, uint64_t seed)
{
    (void)seed;
    return ari_param_zero_grad(p, ctx);
}

/* Zeroes the gradients of m's own parameters; if m is a list, those of its modules. Does not descend further. */
static ar_status zero_not_recursive(ar_module *m, ar_ctx *ctx)
{
    const size_t n = ari_sequential_stages(m, NULL) ? own_children(m, NULL, 0) : 0;
    ARI_OWNED ar_module **child = NULL;
    AR_TRY(ARI_ALLOC(&child, n, "modules"));
    own_children(m, child, n);
    ar_status st = for_own(m, ctx, ari_param_zero_grad);
    for (size_t i = 0; i < n && st == AR_OK; i++)
        st = for_own(child[i], ctx, ari_param_zero_grad);
    return st;
}

ar_status ar_module_zero_grad(ar_module *m, ar_ctx *ctx)
{
    if (ari_faulty(ctx, "zero_grad_not_recursive"))
        return zero_not_recursive(m, ctx);
    return for_all(m, ctx, 0, zero_grad);
}

ar_status ar_module_fresh(ar_module *m, ar_ctx *ctx, uint64_t seed)
{
    return for_all(m, ctx, seed, ari_param_fresh);
}

ar_status ar_module_reduce_grads(ar_module *m, ar_ctx *ctx)
{
    size_t n = 0;
    ARI_OWNED ar_param **params = NULL;
    AR_TRY(ari_module_list(&params, &n, m));
    return ari_params_reduce(params, n, ctx);
}

void ar_module_destroy(ar_module *m)
{
    if (m && m->ops->destroy) {
        m->ops->destroy(m);
        return;
    }
    for (size_t i = 0; m && i < m->ops->params_count; i++)
        ar_param_fini(&first_param(m)[i]);
    for (size_t i = 0; m && i < m->ops->children_count; i++)
        ar_module_destroy(first_child(m)[i]);
    free(m);
}
