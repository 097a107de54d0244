/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/experts/balance.h"
#include "ref/record/ledger.h"

#include <stdlib.h>
#include <string.h>

#include "ref/context/context_private.h"
#include "ref/layers/batch_private.h"
#include "ref/layers/loss.h"
#include "ref/layers/module_private.h"
#include "ref/layers/param_private.h"
#include "ref/placement/parallel_private.h"

enum { SAVED_WEIGHTS, SAVED_LSE, SAVED_VALID };

static bool has_losses(const ari_balance *b)
{
    return b->losses.balance != AR_BALANCE_NONE || ari_balance_needs_lse(b);
}

ar_status ari_balance_init(ari_balance *b, ar_ctx *ctx, double weight)
{
    b->losses = ctx->loss.router;
    if (b->losses.balance == AR_BALANCE_NONE && weight > 0.0) {
        b->losses.balance = AR_BALANCE_LAYERS;
        b->losses.balance_weight = weight;
    }
    if (b->losses.balance >= AR_BALANCE_BATCH)
        AR_TRY(ARI_ALLOC_ZERO(&b->counts, b->experts, "tokens of experts"));
    return has_losses(b) ? ari_loss_init(&b->sum, ctx, b->spread) : AR_OK;
}

void ari_balance_fini(ari_balance *b)
{
    free(b->counts);
    ar_param_fini(&b->sum);
}

/* --- tokens ------------------------------------------------------------------------------------------------------- */

/* Returns which of this rank's tokens are not padding, [tokens]; NULL: there is no padding. Release *out with
 * free(). */
static ar_status own_tokens(uint8_t **out, const ari_balance *b, const ar_ctx *ctx, const ari_routed_tokens *t)
{
    const uint8_t *mask = t->batch ? t->batch->padding_mask : NULL;
    *out = NULL;
    if (!mask)
        return AR_OK;
    const ar_positions local_positions = ari_local_positions(ctx, t->batch->seq, b->spread);
    const size_t per_sample = ari_positions_count(&local_positions), n = t->expert->shape[0];
    AR_TRY(ARI_ALLOC(out, n, "tokens that count"));
    for (size_t i = 0; i < n; i++)
        (*out)[i] = mask[i / per_sample * t->batch->seq + ari_positions_at(&local_positions, i % per_sample)];
    return AR_OK;
}

/* Adds to counts [groups, E] the number of tokens of each group of consecutive tokens that go to each expert. */
static ar_status count_tokens(int64_t *counts, size_t groups, const ari_balance *b, ar_ctx *ctx,
                              const ari_routed_tokens *t, const uint8_t *valid)
{
    const size_t slots = ar_tensor_count(t->expert), k = b->per_token, per_group = slots / groups;
    ARI_OWNED int32_t *expert = NULL;
    AR_TRY(ARI_ALLOC(&expert, slots, "the experts of tokens"));
    const ar_status st = ar_ctx_download(ctx, expert, t->expert);
    for (size_t i = 0; i < slots && st == AR_OK && !ctx->device->hollow; i++) {
        if (expert[i] >= 0 && (!valid || valid[i / k]))
            counts[i / per_group * b->experts + (size_t)expert[i]]++;
    }
    return st;
}

ar_status ari_balance_tally(int64_t *counts, const ari_balance *b, ar_ctx *ctx, const ari_routed_tokens *t)
{
    ARI_OWNED uint8_t *valid = NULL;
    AR_TRY(own_tokens(&valid, b, ctx, t));
    return count_tokens(counts, 1, b, ctx, t, valid);
}

/* --- the gradient ------------------------------------------------------------------------------------------------- */

static int64_t sum_of(const int64_t *counts, size_t n)
{
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += counts[i];
    return sum;
}

/* Computes c [E], the factors of p in the loss: a*E*n_i / divisor. */
static void weigh_counts(float *c, const ari_balance *b, const int64_t *counts, double divisor)
{
    const double weight = b->losses.balance_weight * (double)b->experts;
    for (size_t i = 0; i < b->experts; i++)
        c[i] = divisor > 0.0 ? (float)(weight * (double)counts[i] / divisor) : 0.0f;
}

/* Weights the counts of each sample, whose tokens several ranks may share: k*S^2*B, because the counts sum to k*S. */
static ar_status weigh_samples(float *c, size_t samples, const ari_balance *b, ar_ctx *ctx, const ari_routed_tokens *t,
                               const uint8_t *valid)
{
    const size_t total_samples = t->batch && t->batch->global_batch > 0 ? t->batch->global_batch : samples,
                 n = samples * b->experts;
    ARI_OWNED int64_t *counts = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&counts, n, "tokens of experts"));
    AR_TRY(count_tokens(counts, samples, b, ctx, t, valid));
    AR_TRY(ari_combine(ctx, ctx->sequence, counts, n, AR_I64, AR_SUM, b->name));
    if (b->spread)
        AR_TRY(ari_combine(ctx, ctx->tp, counts, n, AR_I64, AR_SUM, b->name));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_COUNTS, .name = b->name));
    for (size_t i = 0; i < samples; i++) {
        const double slots = (double)sum_of(counts + i * b->experts, b->experts);
        weigh_counts(c + i * b->experts, b, counts + i * b->experts,
                     slots * slots / (double)b->per_token * (double)total_samples);
    }
    return AR_OK;
}

/* Creates *c [groups, E] on the device, for groups of consecutive tokens, or one group of all tokens. */
static ar_status make_weights(const ari_balance *b, ar_ctx *ctx, ar_tensor *c, const ari_routed_tokens *t,
                              const uint8_t *valid)
{
    const size_t shape[2] = {b->counts ? 1 : ari_ctx_samples(ctx, t->x), b->experts};
    ARI_OWNED float *host = NULL;
    AR_TRY(ARI_ALLOC(&host, shape[0] * shape[1], "weights of the balance"));
    if (b->counts)
        weigh_counts(host, b, b->counts, b->divisor);
    else
        AR_TRY(weigh_samples(host, shape[0], b, ctx, t, valid));
    AR_TRY(ar_ctx_tensor(ctx, c, AR_F32, 2, shape));
    return ar_ctx_upload(ctx, c, host);
}

/* Returns z/T, the weight of a token's z-loss; 0 without tokens. */
static double z_of(const ari_balance *b, const ari_routed_tokens *t)
{
    const size_t total_tokens = t->batch ? ari_batch_tokens(t->batch) : t->expert->shape[0];
    return total_tokens > 0 ? b->losses.z_loss / (double)total_tokens : 0.0;
}

/* Returns the number of tokens for each row of c. */
static size_t tokens_of_group(const ar_tensor *c, const ari_routed_tokens *t)
{
    return c->data.ptr ? t->expert->shape[0] / c->shape[0] : 1;
}

static ar_status add_terms(ari_balance *b, ar_ctx *ctx, const ar_tensor *p, const ar_tensor *c, const ar_tensor *lse,
                           const ar_tensor *valid, const ari_routed_tokens *t)
{
    const size_t n = t->expert->shape[0];
    ar_tensor terms;
    AR_TRY(ar_ctx_tensor(ctx, &terms, AR_F32, 1, &n));
    AR_TRY(ARI_KERNEL(ctx, route_terms, terms.data, p, ar_const(c->data), tokens_of_group(c, t), ar_const(lse->data),
                      z_of(b, t), ar_const(valid->data)));
    AR_TRY(ari_loss_add(&b->sum, ctx, &terms));
    ar_ctx_release(ctx, &terms);
    return AR_OK;
}

ar_status ari_balance_forward(ari_balance *b, ar_ctx *ctx, ar_saved *saved, const ar_tensor *p, ar_tensor *lse,
                              const ari_routed_tokens *t)
{
    ARI_OWNED uint8_t *counted = NULL;
    ar_tensor c = {0}, valid = {0};
    if (ctx->counting) {
        ar_ctx_release(ctx, lse);
        return b->counts ? ari_balance_tally(b->counts, b, ctx, t) : AR_OK;
    }
    if (!has_losses(b))
        return AR_OK;
    if (b->counts && !b->counted)
        return ar_error_set(AR_ERR_ARG,
                            "%s: a balance of the step's batch needs its routes before the first pass: ar_train_step "
                            "counts them; or balance each sequence",
                            b->name);
    AR_TRY(own_tokens(&counted, b, ctx, t));
    if (counted)
        AR_TRY(ari_numbers(ctx, &valid, AR_U8, t->expert->shape[0], counted));
    if (b->losses.balance != AR_BALANCE_NONE)
        AR_TRY(make_weights(b, ctx, &c, t, counted));
    if (!ctx->recomputing)
        AR_TRY(add_terms(b, ctx, p, &c, lse, &valid, t));
    AR_TRY(ar_saved_push(saved, b, SAVED_WEIGHTS, &c));
    AR_TRY(ar_saved_push(saved, b, SAVED_VALID, &valid));
    return ar_saved_push(saved, b, SAVED_LSE, lse);
}

ar_status ari_balance_backward(const ari_balance *b, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dz,
                               const ar_tensor *p, const ari_routed_tokens *t)
{
    const bool alone = ari_faulty(ctx, "router_z_loss_of_micro_batch");
    const double z = alone ? b->losses.z_loss / (double)t->expert->shape[0] : z_of(b, t);
    double factor = ctx->loss_scale;
    ar_tensor c, valid, lse;
    if (!has_losses(b))
        return AR_OK;
    if (ari_faulty(ctx, "balance_detached"))
        factor = 0.0;
    if (ari_faulty(ctx, "balance_divided_by_dp"))
        factor /= (double)ar_comm_size(ctx->dp);
    AR_TRY(ar_saved_pop(saved, b, SAVED_LSE, &lse));
    AR_TRY(ar_saved_pop(saved, b, SAVED_VALID, &valid));
    AR_TRY(ar_saved_pop(saved, b, SAVED_WEIGHTS, &c));
    if (c.data.ptr && factor != 1.0)
        AR_TRY(ARI_KERNEL(ctx, scale, &c, &c, (float)factor));
    AR_TRY(ARI_KERNEL(ctx, route_losses, dz, ar_const(p->data), ar_const(c.data), tokens_of_group(&c, t),
                      ar_const(lse.data), 2.0 * z * ctx->loss_scale, ar_const(valid.data)));
    ARI_RELEASE(ctx, &c, &valid, &lse);
    return AR_OK;
}

/* --- the counts of a step ----------------------------------------------------------------------------------------- */

/* The step's counts of all layers, for models that balance all layers together. */
typedef struct totals {
    ar_ctx *ctx;
    int64_t *counts; /* [experts] */
    size_t experts;
    double value;
} totals;

static ar_status zero_sums(void *user, ar_module *m)
{
    ari_balance *b = ari_experts_balance(m);
    if (!b || !has_losses(b))
        return AR_OK;
    b->counted = false;
    if (b->counts)
        memset(b->counts, 0, b->experts * sizeof *b->counts);
    return ari_param_zero_grad(&b->sum, user);
}

static ar_status add_value(void *user, ar_module *m)
{
    ari_balance *b = ari_experts_balance(m);
    totals *total = user;
    float value = 0.0f;
    if (!b || !has_losses(b))
        return AR_OK;
    AR_TRY(ari_loss_total(&b->sum, total->ctx, &value));
    total->value += (double)value;
    return AR_OK;
}

static ar_status note_routers(void *user, ar_module *m)
{
    const ari_balance *b = ari_experts_balance(m);
    ari_routers *r = user;
    if (!b || !has_losses(b))
        return AR_OK;
    r->losses = true;
    r->counts = r->counts || b->counts;
    if (b->losses.balance == AR_BALANCE_LAYERS)
        r->experts = b->experts;
    return AR_OK;
}

/* k*T^2, of the slots' number k*T. */
static ar_status share_counts(void *user, ar_module *m)
{
    const totals *total = user;
    ari_balance *b = ari_experts_balance(m);
    if (!b || !b->counts)
        return AR_OK;
    if (b->spread)
        AR_TRY(ari_combine(total->ctx, total->ctx->tp, b->counts, b->experts, AR_I64, AR_SUM, b->name));
    AR_TRY(ari_combine(total->ctx, total->ctx->dp, b->counts, b->experts, AR_I64, AR_SUM, b->name));
    AR_TRY(ARI_NOTE(total->ctx, .kind = ARI_LEDGER_COUNTS, .name = b->name));
    const double slots = (double)sum_of(b->counts, b->experts);
    b->divisor = slots * slots / (double)b->per_token;
    b->counted = true;
    if (b->losses.balance == AR_BALANCE_LAYERS && b->experts != total->experts)
        return ar_error_set(AR_ERR_ARG, "%s: has %zu experts, and %zu are balanced over all layers: as many in each",
                            b->name, b->experts, total->experts);
    for (size_t i = 0; i < b->experts && b->losses.balance == AR_BALANCE_LAYERS; i++)
        total->counts[i] += b->counts[i];
    return AR_OK;
}

/* (L*T)^2. */
static ar_status set_totals(void *user, ar_module *m)
{
    const totals *total = user;
    ari_balance *b = ari_experts_balance(m);
    if (!b || !b->counts || b->losses.balance != AR_BALANCE_LAYERS)
        return AR_OK;
    memcpy(b->counts, total->counts, b->experts * sizeof *b->counts);
    const double tokens = (double)sum_of(b->counts, b->experts) / (double)b->per_token;
    b->divisor = tokens * tokens;
    return AR_OK;
}

ar_status ari_balance_routers(ari_routers *r, ar_module *m)
{
    const ari_stages *s = ari_sequential_stages(m, NULL);
    *r = s ? s->routers : (ari_routers){.experts = 0};
    return s ? AR_OK : ari_module_each(m, note_routers, r);
}

ar_status ari_balance_zero(ar_module *m, ar_ctx *ctx)
{
    return ari_module_each(m, zero_sums, ctx);
}

/* Adds the totals of a list of modules layer by layer, including layers on other pipeline ranks. */
static ar_status add_layers(totals *total, ar_module *m, const ari_stages *s, const ari_staged *staged)
{
    const size_t n = m->ops->children(m, NULL, 0);
    ARI_OWNED ar_module **child = NULL;
    ARI_OWNED float *layer_losses = NULL;
    AR_TRY(ARI_ALLOC(&child, n, "modules"));
    AR_TRY(ARI_ALLOC_ZERO(&layer_losses, s->layers, "losses of routers"));
    m->ops->children(m, child, n);
    for (size_t i = 0; i < n; i++) {
        totals child_total = {.ctx = total->ctx};
        AR_TRY(ari_module_each(child[i], add_value, &child_total));
        layer_losses[staged[i].layer] += (float)child_total.value;
    }
    AR_TRY(ari_combine(total->ctx, total->ctx->pipeline, layer_losses, s->layers, AR_F32, AR_SUM, "routers"));
    AR_TRY(ARI_NOTE(total->ctx, .kind = ARI_LEDGER_COUNTS, .name = "routers"));
    for (size_t i = 0; i < s->layers; i++)
        total->value += (double)layer_losses[i];
    return AR_OK;
}

ar_status ari_balance_value(ar_module *m, ar_ctx *ctx, double *value)
{
    const ari_staged *staged = NULL;
    const ari_stages *s = ari_sequential_stages(m, &staged);
    totals total = {.ctx = ctx};
    ari_routers r;
    AR_TRY(ari_balance_routers(&r, m));
    if (r.losses)
        AR_TRY(s ? add_layers(&total, m, s, staged) : ari_module_each(m, add_value, &total));
    *value = total.value;
    return AR_OK;
}

ar_status ari_balance_share(ar_module *m, ar_ctx *ctx)
{
    ari_routers r;
    ARI_OWNED int64_t *counts = NULL;
    AR_TRY(ari_balance_routers(&r, m));
    AR_TRY(ARI_ALLOC_ZERO(&counts, r.experts, "tokens of experts"));
    totals total = {.ctx = ctx, .experts = r.experts, .counts = counts};
    AR_TRY(ari_module_each(m, share_counts, &total));
    if (r.experts > 0)
        AR_TRY(ari_combine(ctx, ctx->pipeline, total.counts, r.experts, AR_I64, AR_SUM, "routers"));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_COUNTS, .name = "routers"));
    return ari_module_each(m, set_totals, &total);
}
