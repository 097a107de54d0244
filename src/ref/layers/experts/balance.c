/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/experts/balance.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"

ar_status ari_balance_init(ari_balance *b, const ar_ctx *ctx, double weight)
{
    b->losses = ctx->loss.router;
    if (b->losses.balance == AR_BALANCE_NONE && weight > 0.0) {
        b->losses.balance = AR_BALANCE_LAYERS;
        b->losses.balance_weight = weight;
    }
    if (b->losses.balance < AR_BALANCE_BATCH)
        return AR_OK;
    return ari_alloc_zero((void **)&b->counts, b->experts, sizeof *b->counts, "tokens of experts");
}

void ari_balance_fini(ari_balance *b)
{
    free(b->counts);
}

/* --- tokens ------------------------------------------------------------------------------------------------------- */

/* Which of this rank's tokens are not padding: [tokens]; NULL: all are none. Gives; free(). */
static ar_status own_tokens(uint8_t **gives, const ari_balance *b, const ar_ctx *ctx, const ari_routed_tokens *t)
{
    const uint8_t *mask = t->batch ? t->batch->padding_mask : NULL;
    *gives = NULL;
    if (!mask)
        return AR_OK;
    const ar_positions own = ari_own_positions(ctx, t->batch->seq, b->spread);
    const size_t each = ar_positions_count(&own), n = t->expert->shape[0];
    AR_TRY(ari_alloc((void **)gives, n, sizeof **gives, "tokens that count"));
    for (size_t i = 0; i < n; i++)
        (*gives)[i] = mask[i / each * t->batch->seq + ar_positions_at(&own, i % each)];
    return AR_OK;
}

/* counts [groups, E] += the tokens of each group of consecutive ones that go to each expert. */
static ar_status count_tokens(int64_t *counts, size_t groups, const ari_balance *b, ar_ctx *ctx,
                              const ari_routed_tokens *t, const uint8_t *valid)
{
    const size_t slots = ar_tensor_count(t->expert), k = b->per_token, each = slots / groups;
    int32_t *expert = NULL;
    AR_TRY(ari_alloc((void **)&expert, slots, sizeof *expert, "the experts of tokens"));
    const ar_status st = ar_ctx_download(ctx, expert, t->expert);
    for (size_t i = 0; i < slots && st == AR_OK && !ctx->device->hollow; i++) {
        if (expert[i] >= 0 && (!valid || valid[i / k]))
            counts[i / each * b->experts + (size_t)expert[i]]++;
    }
    free(expert);
    return st;
}

ar_status ari_balance_count(ari_balance *b, ar_ctx *ctx, const ari_routed_tokens *t)
{
    uint8_t *valid = NULL;
    if (!b->counts)
        return AR_OK;
    AR_TRY(own_tokens(&valid, b, ctx, t));
    const ar_status st = count_tokens(b->counts, 1, b, ctx, t, valid);
    free(valid);
    return st;
}

/* --- the gradient ------------------------------------------------------------------------------------------------- */

static int64_t sum_of(const int64_t *counts, size_t n)
{
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += counts[i];
    return sum;
}

/* c [E], what the loss multiplies p by: a*E*n_i / divisor. */
static void weigh_counts(float *c, const ari_balance *b, const ar_ctx *ctx, const int64_t *counts, double divisor)
{
    const double each = b->losses.balance_weight * (double)b->experts;
    for (size_t i = 0; i < b->experts; i++)
        c[i] = divisor > 0.0 ? (float)(each * (double)counts[i] / divisor * ctx->loss_scale) : 0.0f;
}

/* Of each sample's tokens, which several ranks may share. k*S^2*B: the counts' sum is k*S. */
static ar_status weigh_samples(float *c, size_t samples, const ari_balance *b, ar_ctx *ctx, const ari_routed_tokens *t,
                               const uint8_t *valid)
{
    const size_t all = t->batch && t->batch->global_batch > 0 ? t->batch->global_batch : samples,
                 n = samples * b->experts;
    int64_t *counts = NULL;
    AR_TRY(ari_alloc_zero((void **)&counts, n, sizeof *counts, "tokens of experts"));
    ar_status st = count_tokens(counts, samples, b, ctx, t, valid);
    if (st == AR_OK)
        st = ari_combine(ctx, ctx->sequence, counts, n, AR_I64, AR_SUM, b->name);
    if (st == AR_OK && b->spread)
        st = ari_combine(ctx, ctx->tp, counts, n, AR_I64, AR_SUM, b->name);
    for (size_t i = 0; i < samples && st == AR_OK; i++) {
        const double slots = (double)sum_of(counts + i * b->experts, b->experts);
        weigh_counts(c + i * b->experts, b, ctx, counts + i * b->experts,
                     slots * slots / (double)b->per_token * (double)all);
    }
    free(counts);
    return st;
}

/* *c: [groups, E] on the device. */
static ar_status make_weights(const ari_balance *b, ar_ctx *ctx, ar_tensor *c, size_t *groups,
                              const ari_routed_tokens *t, const uint8_t *valid)
{
    float *host = NULL;
    ar_status st = AR_OK;
    *groups = b->counts ? 1 : ar_ctx_samples(ctx, t->x);
    AR_TRY(ari_alloc((void **)&host, *groups * b->experts, sizeof *host, "weights of the balance"));
    if (b->counts)
        weigh_counts(host, b, ctx, b->counts, b->divisor);
    else
        st = weigh_samples(host, *groups, b, ctx, t, valid);
    if (st == AR_OK)
        st = ari_numbers(ctx, c, AR_F32, *groups * b->experts, host);
    free(host);
    return st;
}

ar_status ari_balance_backward(const ari_balance *b, ar_ctx *ctx, const ar_tensor *dz, const ar_tensor *p,
                               const ar_tensor *lse, const ari_routed_tokens *t)
{
    const size_t tokens = t->expert->shape[0], all = t->batch ? ar_batch_tokens(t->batch) : tokens;
    const double z = all > 0 ? 2.0 * b->losses.z_loss / (double)all * ctx->loss_scale : 0.0;
    const bool balances = b->losses.balance != AR_BALANCE_NONE;
    uint8_t *counted = NULL;
    ar_tensor c = {0}, valid = {0};
    size_t groups = 1;
    if (!balances && !ari_balance_wants_lse(b))
        return AR_OK;
    AR_TRY(own_tokens(&counted, b, ctx, t));
    ar_status st = counted ? ari_numbers(ctx, &valid, AR_U8, tokens, counted) : AR_OK;
    if (st == AR_OK && balances)
        st = make_weights(b, ctx, &c, &groups, t, counted);
    if (st == AR_OK)
        st = ARI_KERNEL(ctx, route_losses, dz, ar_const(p->data), ar_const(c.data), tokens / groups,
                        ar_const(lse->data), z, ar_const(valid.data));
    free(counted);
    ar_ctx_release(ctx, &c);
    ar_ctx_release(ctx, &valid);
    return st;
}

/* --- the counts of a step ----------------------------------------------------------------------------------------- */

/* The step's counts of all layers, where these are balanced together. */
typedef struct totals {
    ar_ctx *ctx;
    int64_t *counts; /* [experts] */
    size_t experts;
} totals;

static ar_status begin_counts(void *user, ar_module *m)
{
    const ari_balance *b = ari_experts_balance(m);
    (void)user;
    if (b && b->counts)
        memset(b->counts, 0, b->experts * sizeof *b->counts);
    return AR_OK;
}

static ar_status note_counts(void *user, ar_module *m)
{
    const ari_balance *b = ari_experts_balance(m);
    bool *any = user;
    *any = *any || (b && b->counts);
    return AR_OK;
}

/* k*T^2, of the slots' number k*T. */
static ar_status share_counts(void *user, ar_module *m)
{
    const totals *all = user;
    ari_balance *b = ari_experts_balance(m);
    if (!b || !b->counts)
        return AR_OK;
    AR_TRY(ari_combine(all->ctx, all->ctx->dp, b->counts, b->experts, AR_I64, AR_SUM, b->name));
    if (b->spread)
        AR_TRY(ari_combine(all->ctx, all->ctx->tp, b->counts, b->experts, AR_I64, AR_SUM, b->name));
    const double slots = (double)sum_of(b->counts, b->experts);
    b->divisor = slots * slots / (double)b->per_token;
    if (b->losses.balance == AR_BALANCE_LAYERS && b->experts != all->experts)
        return ar_error_set(AR_ERR_ARG, "%s: has %zu experts, and %zu are balanced over all layers: as many in each",
                            b->name, b->experts, all->experts);
    for (size_t i = 0; i < b->experts && b->losses.balance == AR_BALANCE_LAYERS; i++)
        all->counts[i] += b->counts[i];
    return AR_OK;
}

/* (L*T)^2. */
static ar_status set_totals(void *user, ar_module *m)
{
    const totals *all = user;
    ari_balance *b = ari_experts_balance(m);
    if (!b || !b->counts || b->losses.balance != AR_BALANCE_LAYERS)
        return AR_OK;
    memcpy(b->counts, all->counts, b->experts * sizeof *b->counts);
    const double tokens = (double)sum_of(b->counts, b->experts) / (double)b->per_token;
    b->divisor = tokens * tokens;
    return AR_OK;
}

static ar_status each_of(ar_module *const *modules, size_t n, ar_status (*f)(void *, ar_module *), void *user)
{
    for (size_t i = 0; i < n; i++)
        AR_TRY(ari_module_each(modules[i], f, user));
    return AR_OK;
}

ar_status ari_balance_counts(bool *counts, ar_module *const *modules, size_t n)
{
    *counts = false;
    return each_of(modules, n, note_counts, counts);
}

ar_status ari_balance_begin(ar_module *const *modules, size_t n)
{
    return each_of(modules, n, begin_counts, NULL);
}

ar_status ari_balance_share(ar_module *const *modules, size_t n, ar_ctx *ctx, size_t experts)
{
    totals all = {.ctx = ctx, .experts = experts};
    AR_TRY(ARI_ALLOC_ZERO(&all.counts, experts, "tokens of experts"));
    ar_status st = each_of(modules, n, share_counts, &all);
    if (st == AR_OK && experts > 0)
        st = ari_combine(ctx, ctx->pipeline, all.counts, experts, AR_I64, AR_SUM, "tokens of experts");
    if (st == AR_OK)
        st = each_of(modules, n, set_totals, &all);
    free(all.counts);
    return st;
}
