/* SPDX-License-Identifier: Apache-2.0 */
/* Router losses (ar_router_losses). With p = softmax(z), n_i tokens for expert i and c_i = a*E*n_i / D:
 *
 *    dz_i += p_i*(c_i - sum over j of p_j*c_j)        D = k*S^2*B for one of B sequences of S tokens;
 *                                                     k*T^2 for a batch of T tokens; (L*T)^2 for all L layers
 *    dz_i += p_i*(2*z/T)*lse,  lse = log(sum of exp(z))
 *
 * Padding tokens are not counted in n, S and T. */
#include "ref/baseline/run.h"

#include "ref/numerics/elementary.h"

static ar_balance balance_of(const ari_bl_run *run)
{
    const ar_balance requested = run->o->loss.router.balance;
    return requested == AR_BALANCE_NONE && run->c->experts.balance_weight > 0.0 ? AR_BALANCE_LAYERS : requested;
}

static double weight_of(const ari_bl_run *run)
{
    const ar_router_losses *o = &run->o->loss.router;
    return o->balance == AR_BALANCE_NONE ? run->c->experts.balance_weight : o->balance_weight;
}

static bool is_padding(const ari_bl_run *run, size_t token)
{
    return run->batch->padding_mask != NULL && run->batch->padding_mask[token] == 0;
}

/* Adds to count[i] the number of tokens [first_token, first_token + n) that use expert i. Returns the number of counted
 * tokens. */
static size_t count_tokens(const ari_bl_run *run, double *count, const ari_bl_routed *r, size_t first_token, size_t n)
{
    const size_t k = run->c->experts.per_token;
    size_t tokens = 0;
    for (size_t t = first_token; t < first_token + n; t++) {
        tokens += !is_padding(run, t);
        for (size_t j = 0; j < k && !is_padding(run, t); j++)
            count[r->expert[t * k + j]] += 1.0;
    }
    return tokens;
}

ar_status ari_bl_balance_load(ari_bl_run *run, ari_bl_experts *e)
{
    e->router_stats = ari_bl_take(run, 1, 1, sizeof *e->router_stats);
    double *count = ari_bl_doubles(run, 1, run->c->experts.n), *p = ari_bl_doubles(run, 1, run->c->experts.n);
    AR_TRY(run->memory);
    *e->router_stats = (ari_bl_seen){.next = run->router_stats, .count = count, .p = p};
    run->router_stats = e->router_stats;
    return AR_OK;
}

/* n of all layers. Returns (L*T)^2. */
static double count_layers(const ari_bl_run *run, double *count)
{
    double slots = 0.0;
    for (const ari_bl_seen *layer = run->router_stats; layer != NULL; layer = layer->next)
        for (size_t i = 0; i < run->c->experts.n; i++) {
            count[i] += layer->count[i];
            slots += layer->count[i];
        }
    slots /= (double)run->c->experts.per_token;
    return slots * slots;
}

/* Computes c [E] for tokens [first_token, first_token + n) by their routes, or by those of all layers. count: zeros,
 * becomes c. */
static void make_c(const ari_bl_run *run, double *count, const ari_bl_routed *r, size_t first_token, size_t n)
{
    const ar_balance balance = balance_of(run);
    const size_t experts = run->c->experts.n, k = run->c->experts.per_token;
    double divisor;
    if (balance == AR_BALANCE_LAYERS) {
        divisor = count_layers(run, count);
    } else {
        const double slots = (double)(count_tokens(run, count, r, first_token, n) * k);
        divisor = slots * slots / (double)k;
        if (balance == AR_BALANCE_SEQUENCE)
            divisor = divisor * (double)run->b;
    }
    for (size_t i = 0; i < experts; i++)
        count[i] = divisor > 0.0 ? ari_bl_fl(run, weight_of(run) * (double)experts * count[i] / divisor) : 0.0;
}

static double balance_term(const ari_bl_run *run, const double *p, const double *c)
{
    double sum = 0.0;
    for (size_t i = 0; i < run->c->experts.n; i++)
        sum = ari_bl_fl(run, sum + ari_bl_fl(run, p[i] * c[i]));
    return sum;
}

/* z/T. */
static double z_of(const ari_bl_run *run)
{
    size_t tokens = 0;
    for (size_t t = 0; t < run->tokens; t++)
        tokens += !is_padding(run, t);
    return tokens > 0 ? run->o->loss.router.z_loss / (double)tokens : 0.0;
}

/* The losses of tokens [first_token, first_token + n). */
static ar_status add_terms(ari_bl_run *run, ari_bl_sums *sums, const ari_bl_routed *r, size_t first_token, size_t n)
{
    ARI_BL_SCOPE(run);
    const double z = z_of(run);
    const bool balances = balance_of(run) != AR_BALANCE_NONE;
    double *c = ari_bl_doubles(run, 1, run->c->experts.n);
    AR_TRY(run->memory);
    if (balances)
        make_c(run, c, r, first_token, n);
    for (size_t t = first_token; t < first_token + n; t++) {
        double term = balances ? balance_term(run, r->p + t * run->c->experts.n, c) : 0.0;
        if (z > 0.0)
            term = ari_bl_fl(run, term + ari_bl_fl(run, z * r->lse[t] * r->lse[t]));
        if (!is_padding(run, t))
            ari_bl_sums_add(sums, 0, &term, 1);
    }
    return AR_OK;
}

static size_t parts_of(const ari_bl_run *run)
{
    return balance_of(run) == AR_BALANCE_SEQUENCE ? run->b : 1;
}

static bool has_losses(const ari_bl_run *run)
{
    return balance_of(run) != AR_BALANCE_NONE || run->o->loss.router.z_loss > 0.0;
}

static ar_status losses_of(ari_bl_run *run, double *value, const ari_bl_routed *r)
{
    ARI_BL_SCOPE(run);
    const size_t part_tokens = run->tokens / parts_of(run);
    ari_bl_sums sums;
    AR_TRY(ari_bl_sums_open(run, &sums, 1, false));
    for (size_t part = 0; part < parts_of(run); part++)
        AR_TRY(add_terms(run, &sums, r, part * part_tokens, part_tokens));
    *value = ari_bl_sums_value(&sums, 0);
    return AR_OK;
}

/* Sums the losses that depend on one layer only: in binary64, of the balance over all layers, only the z-losses. */
ar_status ari_bl_balance_forward(ari_bl_run *run, const ari_bl_experts *e, const ari_bl_routed *r)
{
    const size_t n = run->c->experts.n;
    const double z = z_of(run);
    ari_bl_seen *layer = e->router_stats;
    if (!has_losses(run))
        return AR_OK;
    for (size_t i = 0; i < n; i++)
        layer->count[i] = layer->p[i] = 0.0;
    count_tokens(run, layer->count, r, 0, run->tokens);
    layer->routed = r;
    layer->value = 0.0;
    for (size_t i = 0; i < run->tokens * n; i++)
        layer->p[i % n] += is_padding(run, i / n) ? 0.0 : r->p[i];
    if (balance_of(run) != AR_BALANCE_LAYERS)
        return losses_of(run, &layer->value, r);
    for (size_t t = 0; t < run->tokens; t++)
        layer->value += is_padding(run, t) ? 0.0 : z * r->lse[t] * r->lse[t];
    return AR_OK;
}

/* Computes a layer's value in the balance of all layers after the whole forward pass. In binary64 it uses the saved
 * sums, because nothing else is left of a layer that ran in an earlier pass. */
static ar_status value_of(ari_bl_run *run, double *value, const ari_bl_seen *layer)
{
    ARI_BL_SCOPE(run);
    if (run->o->mode != AR_MODE_F64)
        return losses_of(run, value, layer->routed);
    double *c = ari_bl_doubles(run, 1, run->c->experts.n);
    AR_TRY(run->memory);
    make_c(run, c, NULL, 0, 0);
    *value = layer->value;
    for (size_t i = 0; i < run->c->experts.n; i++)
        *value += c[i] * layer->p[i];
    return AR_OK;
}

ar_status ari_bl_balance_add(ari_bl_run *run, double *loss)
{
    ARI_BL_SCOPE(run);
    const bool together = balance_of(run) == AR_BALANCE_LAYERS;
    size_t layers = 0, i = 0;
    double sum = 0.0;
    for (const ari_bl_seen *layer = run->router_stats; layer != NULL; layer = layer->next)
        layers++;
    if (layers == 0 || !has_losses(run))
        return AR_OK;
    double *layer_losses = ari_bl_doubles(run, layers, 1);
    AR_TRY(run->memory);
    for (const ari_bl_seen *layer = run->router_stats; layer != NULL;
         layer = layer->next) { /* the last layer is first */
        i++;
        layer_losses[layers - i] = layer->value;
        if (together)
            AR_TRY(value_of(run, &layer_losses[layers - i], layer));
    }
    for (i = 0; i < layers; i++)
        sum += layer_losses[i];
    *loss += sum;
    return AR_OK;
}

/* dz [n] of a token += fl(p*fl(c - sum of fl(p*c))). */
static void add_balance(const ari_bl_run *run, double *dz, const double *p, const double *c)
{
    const double sum = balance_term(run, p, c);
    for (size_t i = 0; i < run->c->experts.n; i++)
        dz[i] = ari_bl_branch(run, dz[i] + ari_bl_fl(run, p[i] * ari_bl_fl(run, c[i] - sum)));
}

static void add_z(const ari_bl_run *run, double *dz, const ari_bl_routed *r)
{
    const size_t n = run->c->experts.n;
    const double z = 2.0 * z_of(run);
    for (size_t t = 0; t < run->tokens; t++) {
        const double times = ari_bl_fl(run, z * r->lse[t]);
        for (size_t i = 0; i < n && !is_padding(run, t); i++)
            dz[t * n + i] = ari_bl_branch(run, dz[t * n + i] + ari_bl_fl(run, r->p[t * n + i] * times));
    }
}

ar_status ari_bl_balance_backward(ari_bl_run *run, double *dz, const ari_bl_routed *r)
{
    const size_t n = run->c->experts.n, part_tokens = run->tokens / parts_of(run);
    for (size_t part = 0; part < parts_of(run) && balance_of(run) != AR_BALANCE_NONE; part++) {
        ARI_BL_SCOPE(run);
        double *c = ari_bl_doubles(run, 1, n);
        AR_TRY(run->memory);
        make_c(run, c, r, part * part_tokens, part_tokens);
        for (size_t t = part * part_tokens; t < (part + 1) * part_tokens; t++)
            if (!is_padding(run, t))
                add_balance(run, dz + t * n, r->p + t * n, c);
    }
    if (run->o->loss.router.z_loss > 0.0)
        add_z(run, dz, r);
    return AR_OK;
}
