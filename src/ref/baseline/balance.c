/* SPDX-License-Identifier: Apache-2.0 */
/* The losses of routers (ar_router_losses). With p = softmax(z), n_i tokens to expert i and c_i = a*E*n_i / D:
 *
 *     dz_i += p_i*(c_i - sum over j of p_j*c_j)        D = k*S^2*B of a sequence of S tokens, one of B;
 *                                                      k*T^2 of a batch of T; (L*T)^2 of L layers, n of all together
 *     dz_i += p_i*(2*z/T)*lse,  lse = log(sum of exp(z))
 *
 * of tokens that are not padding, which alone are counted in n, S and T. */
#include "ref/baseline/run.h"

#include "ref/numerics/scalar.h"

static ar_balance balance_of(const ari_bl_run *run)
{
    const ar_balance given = run->o->loss.router.balance;
    return given == AR_BALANCE_NONE && run->c->experts.balance_weight > 0.0 ? AR_BALANCE_LAYERS : given;
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

/* count[i] += tokens [first, first + n) that go to expert i. Returns how many tokens these are. */
static size_t count_tokens(const ari_bl_run *run, double *count, const ari_bl_routed *r, size_t first, size_t n)
{
    const size_t k = run->c->experts.per_token;
    size_t tokens = 0;
    for (size_t t = first; t < first + n; t++) {
        tokens += !is_padding(run, t);
        for (size_t j = 0; j < k && !is_padding(run, t); j++)
            count[r->expert[t * k + j]] += 1.0;
    }
    return tokens;
}

ar_status ari_bl_balance_load(ari_bl_run *run, ari_bl_experts *e)
{
    e->seen = ari_bl_take(run, 1, 1, sizeof *e->seen);
    double *count = ari_bl_doubles(run, 1, run->c->experts.n), *p = ari_bl_doubles(run, 1, run->c->experts.n);
    if (e->seen == NULL || count == NULL || p == NULL)
        return run->memory;
    *e->seen = (ari_bl_seen){.next = run->seen, .count = count, .p = p};
    run->seen = e->seen;
    return AR_OK;
}

/* What a sequence, or the batch, costs, by the last forward pass. */
static double cost(const double *count, const double *p, size_t experts, double weight, double divisor)
{
    double sum = 0.0;
    for (size_t i = 0; i < experts; i++)
        sum += count[i] * p[i];
    return divisor > 0.0 ? weight * (double)experts * sum / divisor : 0.0;
}

ar_status ari_bl_balance_forward(ari_bl_run *run, const ari_bl_experts *e, const ari_bl_routed *r)
{
    const ari_bl_memory *mark = run->top;
    const ar_balance balance = balance_of(run);
    const size_t n = run->c->experts.n, k = run->c->experts.per_token;
    const size_t parts = balance == AR_BALANCE_SEQUENCE ? run->b : 1, each = run->tokens / parts;
    double *count = ari_bl_doubles(run, 2, n), *p = count + n, squares = 0.0;
    size_t all = 0;
    if (count == NULL)
        return run->memory;
    e->seen->value = 0.0;
    for (size_t part = 0; part < parts; part++) {
        for (size_t i = 0; i < n; i++)
            count[i] = p[i] = 0.0;
        const size_t tokens = count_tokens(run, count, r, part * each, each);
        for (size_t t = part * each; t < (part + 1) * each; t++) {
            for (size_t i = 0; i < n && !is_padding(run, t); i++)
                p[i] += r->p[t * n + i];
            squares += is_padding(run, t) ? 0.0 : r->lse[t] * r->lse[t];
        }
        if (balance == AR_BALANCE_SEQUENCE || balance == AR_BALANCE_BATCH)
            e->seen->value +=
                cost(count, p, n, weight_of(run), (double)k * (double)tokens * (double)tokens) / (double)parts;
        all += tokens;
    }
    for (size_t i = 0; i < n; i++) {
        e->seen->count[i] = count[i];
        e->seen->p[i] = p[i];
    }
    e->seen->value += all > 0 ? run->o->loss.router.z_loss * squares / (double)all : 0.0;
    ari_bl_release(run, mark);
    return AR_OK;
}

/* n and the sums of p over the layers. Returns (L*T)^2. */
static double add_layers(const ari_bl_run *run, double *count, double *p)
{
    double slots = 0.0;
    for (const ari_bl_seen *layer = run->seen; layer != NULL; layer = layer->next)
        for (size_t i = 0; i < run->c->experts.n; i++) {
            count[i] += layer->count[i];
            p[i] += layer->p[i];
            slots += layer->count[i];
        }
    slots /= (double)run->c->experts.per_token;
    return slots * slots;
}

ar_status ari_bl_balance_value(ari_bl_run *run, double *value)
{
    const ari_bl_memory *mark = run->top;
    const size_t n = run->c->experts.n;
    double *count = ari_bl_doubles(run, 2, n + 1);
    *value = 0.0;
    if (count == NULL)
        return run->memory;
    for (const ari_bl_seen *layer = run->seen; layer != NULL; layer = layer->next)
        *value += layer->value;
    if (balance_of(run) == AR_BALANCE_LAYERS && run->seen != NULL) {
        const double divisor = add_layers(run, count, count + n);
        *value += cost(count, count + n, n, weight_of(run), divisor);
    }
    ari_bl_release(run, mark);
    return AR_OK;
}

/* dz [n] of a token += fl(p*fl(c - sum of fl(p*c))). */
static void add_balance(const ari_bl_run *run, double *dz, const double *p, const double *c)
{
    double sum = 0.0;
    for (size_t i = 0; i < run->c->experts.n; i++)
        sum = ari_bl_fl(run, sum + ari_bl_fl(run, p[i] * c[i]));
    for (size_t i = 0; i < run->c->experts.n; i++)
        dz[i] = ari_bl_branch(run, dz[i] + ari_bl_fl(run, p[i] * ari_bl_fl(run, c[i] - sum)));
}

/* Of tokens [first, first + each); count: [2, E], zero, to work with. */
static void balance_part(const ari_bl_run *run, double *dz, const ari_bl_routed *r, double *count, size_t first,
                         size_t each)
{
    const ar_balance balance = balance_of(run);
    const size_t n = run->c->experts.n, k = run->c->experts.per_token;
    double divisor;
    if (balance == AR_BALANCE_LAYERS) {
        divisor = add_layers(run, count, count + n);
    } else {
        const double slots = (double)(count_tokens(run, count, r, first, each) * k);
        divisor = slots * slots / (double)k;
        if (balance == AR_BALANCE_SEQUENCE)
            divisor = divisor * (double)run->b;
    }
    for (size_t i = 0; i < n; i++)
        count[i] = divisor > 0.0 ? ari_bl_fl(run, weight_of(run) * (double)n * count[i] / divisor) : 0.0;
    for (size_t t = first; t < first + each; t++)
        if (!is_padding(run, t))
            add_balance(run, dz + t * n, r->p + t * n, count);
}

static void add_z(const ari_bl_run *run, double *dz, const ari_bl_routed *r)
{
    const size_t n = run->c->experts.n;
    size_t tokens = 0;
    for (size_t t = 0; t < run->tokens; t++)
        tokens += !is_padding(run, t);
    for (size_t t = 0; t < run->tokens; t++) {
        if (is_padding(run, t))
            continue;
        const double times = ari_bl_fl(run, 2.0 * run->o->loss.router.z_loss / (double)tokens * r->lse[t]);
        for (size_t i = 0; i < n; i++)
            dz[t * n + i] = ari_bl_branch(run, dz[t * n + i] + ari_bl_fl(run, r->p[t * n + i] * times));
    }
}

ar_status ari_bl_balance_backward(ari_bl_run *run, double *dz, const ari_bl_routed *r)
{
    const size_t parts = balance_of(run) == AR_BALANCE_SEQUENCE ? run->b : 1, each = run->tokens / parts;
    for (size_t part = 0; part < parts && balance_of(run) != AR_BALANCE_NONE; part++) {
        const ari_bl_memory *mark = run->top;
        double *count = ari_bl_doubles(run, 2, run->c->experts.n);
        if (count == NULL)
            return run->memory;
        balance_part(run, dz, r, count, part * each, each);
        ari_bl_release(run, mark);
    }
    if (run->o->loss.router.z_loss > 0.0)
        add_z(run, dz, r);
    return AR_OK;
}
