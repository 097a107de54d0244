/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/experts/scores.h"
#include "ref/record/ledger.h"

#include <stdlib.h>
#include <string.h>

#include "ref/context/context_private.h"
#include "ref/core/float_bits.h"
#include "ref/layers/param_private.h"

/* --- the router --------------------------------------------------------------------------------------------------- */

static ar_status check_groups(const ar_experts_options *o, const ari_balance *b)
{
    const ar_route_scores *s = &o->scores;
    const size_t group_size = o->n / s->groups;
    if (s->groups > AR_ROUTE_GROUPS || s->kept == 0 || s->kept > s->groups || o->n % s->groups != 0 ||
        (s->groups > 1 && group_size < 2 && !s->softmax) || s->kept * group_size < o->per_token)
        return ar_error_set(AR_ERR_ARG,
                            "%s: %zu of %zu groups of %zu experts, of which a token has %zu: expected up to %d groups "
                            "of equal size, two or more each, and in those that stay enough",
                            b->name, s->kept, s->groups, o->n, o->per_token, AR_ROUTE_GROUPS);
    if (b->losses.balance != AR_BALANCE_NONE || b->losses.z_loss > 0.0)
        return ar_error_set(AR_ERR_ARG,
                            "%s: its scores are sigmoids, or chosen by groups; balance and router_z_loss are of a "
                            "softmax alone: expected neither",
                            b->name);
    return AR_OK;
}

ar_status ari_scores_init(ari_scores *s, ar_ctx *ctx, const ar_experts_options *o, const char *name,
                          const ari_balance *balance)
{
    const char *bias = o->router_bias ? o->router_bias : "gate.e_score_correction_bias";
    s->tokens = balance;
    s->rule = (ar_route_rule){.k = o->per_token, .groups = 1, .kept = 1, .normalised = o->normalised, .scale = 1.0f};
    if (o->scores.groups == 0) /* softmax over all experts */
        return AR_OK;
    AR_TRY(check_groups(o, balance));
    s->rule.groups = o->scores.groups;
    s->rule.kept = o->scores.kept;
    s->rule.scale = (float)o->scores.scale;
    if (o->scores.softmax)
        return AR_OK;
    AR_TRY(ar_param_init_whole(&s->bias, ctx, name, bias, 1, &o->n, AR_INIT_UNIFORM_BIAS));
    s->bias.requires_grad = false;
    if (ctx->loss.router.bias_update > 0.0)
        AR_TRY(ARI_ALLOC_ZERO(&s->counts, o->n, "tokens of experts"));
    return AR_OK;
}

void ari_scores_fini(ari_scores *s)
{
    ar_param_fini(&s->bias);
    free(s->counts);
}

size_t ari_scores_params(ari_scores *s, ar_param **out, size_t cap, size_t index)
{
    if (!s->bias.device)
        return 0;
    if (index < cap)
        out[index] = &s->bias;
    return 1;
}

/* Returns the routing rule with the current bias. */
static ar_route_rule rule_of(const ari_scores *s, const ar_ctx *ctx)
{
    ar_route_rule rule = s->rule;
    rule.bias = s->bias.device ? ar_const(s->bias.value.data) : (ar_cbuf){NULL};
    rule.normalised = rule.normalised && !ari_faulty(ctx, "router_weights_not_normalised");
    return rule;
}

ar_status ari_scores_route(const ari_scores *s, ar_ctx *ctx, const ari_chosen *chosen, const ar_tensor *lse,
                           const ar_tensor *z)
{
    const ar_route_rule rule = rule_of(s, ctx);
    return ARI_KERNEL(ctx, route, chosen->p->data, chosen->expert->data, chosen->weight->data, lse->data, z, &rule);
}

ar_status ari_scores_backward(const ari_scores *s, ar_ctx *ctx, const ar_tensor *dz, const ari_chosen *chosen,
                              const ar_tensor *g)
{
    const ar_route_rule rule = rule_of(s, ctx);
    return ARI_KERNEL(ctx, route_backward, dz, ar_const(g->data), ar_const(chosen->p->data),
                      ar_const(chosen->expert->data), ar_const(chosen->weight->data), &rule);
}

/* --- the bias ----------------------------------------------------------------------------------------------------- */

/* router_bias_counts_plain: chooses the experts with the largest scores, ignoring bias and groups. */
static ar_status choose_plainly(ar_tensor *expert, ar_ctx *ctx, const ari_chosen *chosen)
{
    const size_t tokens = chosen->expert->shape[0], k = chosen->expert->shape[1];
    const ar_route_rule rule = {.k = k, .groups = 1, .kept = 1, .scale = 1.0f};
    ar_tensor p, weight;
    AR_TRY(ari_new_rows(ctx, &p, AR_F32, tokens, chosen->p->shape[1]));
    AR_TRY(ari_new_rows(ctx, &weight, AR_F32, tokens, k));
    AR_TRY(ari_new_rows(ctx, expert, AR_I32, tokens, k));
    return ARI_KERNEL(ctx, route, p.data, expert->data, weight.data, (ar_buf){NULL}, chosen->p, &rule);
}

ar_status ari_scores_count(ari_scores *s, ar_ctx *ctx, const ari_chosen *chosen, const ari_routed_tokens *t)
{
    ar_tensor expert = *chosen->expert;
    ari_routed_tokens counted = *t;
    if (!s->counts || ctx->counting || ctx->recomputing)
        return AR_OK;
    if (ari_faulty(ctx, "router_bias_counts_plain"))
        AR_TRY(choose_plainly(&expert, ctx, chosen));
    counted.expert = &expert;
    return ari_balance_tally(s->counts, s->tokens, ctx, &counted);
}

static ar_status zero_counts(void *user, ar_module *m)
{
    const ari_scores *s = ari_experts_scores(m);
    (void)user;
    if (s && s->counts)
        memset(s->counts, 0, s->tokens->experts * sizeof *s->counts);
    return AR_OK;
}

/* router_bias_counts_bf16: rounds a count as it is stored. */
static int64_t round_count(const ar_ctx *ctx, int64_t n)
{
    return ari_faulty(ctx, "router_bias_counts_bf16") ? (int64_t)ari_f32_of_bf16(ari_bf16_of_f32((float)n)) : n;
}

/* b_i += u*sign(sum n - E*n_i). */
static void step_bias(float *bias, int64_t *counts, size_t n, const ar_ctx *ctx)
{
    const float u = (float)ctx->loss.router.bias_update;
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        counts[i] = round_count(ctx, counts[i]);
        sum = round_count(ctx, sum + counts[i]);
    }
    for (size_t i = 0; i < n; i++) {
        const int64_t missing = sum - (int64_t)n * counts[i];
        bias[i] += missing > 0 ? u : missing < 0 ? -u : 0.0f;
    }
}

static ar_status change_bias(ari_scores *s, ar_ctx *ctx)
{
    const size_t n = s->tokens->experts;
    const bool is_local = ari_faulty(ctx, "router_bias_own_counts");
    ARI_OWNED float *host = NULL;
    if (s->tokens->spread && !is_local)
        AR_TRY(ari_combine(ctx, ctx->tp, s->counts, n, AR_I64, AR_SUM, s->tokens->name));
    if (!is_local)
        AR_TRY(ari_combine(ctx, ctx->dp, s->counts, n, AR_I64, AR_SUM, s->tokens->name));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_COUNTS, .name = s->tokens->name));
    AR_TRY(ARI_ALLOC(&host, n, "a router's bias"));
    ar_status st = ar_ctx_download(ctx, host, &s->bias.value);
    if (st == AR_OK && !ctx->device->hollow)
        step_bias(host, s->counts, n, ctx);
    if (st == AR_OK)
        st = ar_ctx_upload(ctx, &s->bias.value, host);
    memset(s->counts, 0, n * sizeof *s->counts);
    s->bias.version++;
    return st;
}

static ar_status update(void *user, ar_module *m)
{
    ari_scores *s = ari_experts_scores(m);
    ar_ctx *ctx = user;
    if (!s)
        return AR_OK;
    if (s->counts)
        AR_TRY(change_bias(s, ctx));
    return ari_param_tap(&s->bias, ctx, 'n', &s->bias.value);
}

ar_status ari_scores_zero(ar_module *m)
{
    return ari_module_each(m, zero_counts, NULL);
}

ar_status ari_scores_update(ar_module *m, ar_ctx *ctx)
{
    return ari_module_each(m, update, ctx);
}
