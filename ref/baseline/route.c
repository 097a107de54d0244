/* SPDX-License-Identifier: Apache-2.0 */
/* Routers: a token's experts and their weights from its logits, and the gradients of the weights. experts.c has the
 * formulas. */
#include "anyrank/config.h"
#include "ref/baseline/run.h"

#include <math.h>

#include "ref/numerics/elementary.h"

/* The k experts with the largest z, ascending. -0 and +0 are equal. */
static void choose(size_t *expert, const double *z, size_t n, size_t k)
{
    for (size_t j = 0; j < k; j++) {
        size_t best_index = n;
        for (size_t i = 0; i < n; i++) {
            bool is_chosen = false;
            for (size_t slot = 0; slot < j; slot++)
                is_chosen = is_chosen || expert[slot] == i;
            if (!is_chosen && (best_index == n || z[i] > z[best_index]))
                best_index = i;
        }
        expert[j] = best_index;
    }
    for (size_t j = 1; j < k; j++) /* insertion sort */
        for (size_t pos = j; pos > 0 && expert[pos - 1] > expert[pos]; pos--) {
            const size_t larger = expert[pos - 1];
            expert[pos - 1] = expert[pos];
            expert[pos] = larger;
        }
}

static void weigh(const ari_bl_run *run, double *weight, const double *p, const size_t *expert)
{
    const ar_experts *x = &run->c->experts;
    double sum = p[expert[0]];
    for (size_t j = 1; j < x->per_token; j++)
        sum = ari_bl_fl(run, sum + p[expert[j]]);
    for (size_t j = 0; j < x->per_token; j++)
        weight[j] = x->normalised ? ari_bl_branch(run, p[expert[j]] / sum) : p[expert[j]];
}

double ari_bl_sigmoid(const ari_bl_run *run, double x)
{
    return run->o->mode == AR_MODE_F64 ? ari_bl_branch(run, ari_sigmoid64(x)) : (double)ari_sigmoid32((float)x);
}

/* The sum of the two largest of c. */
static double best_two(const ari_bl_run *run, const double *c, size_t n)
{
    size_t top_pair[2];
    choose(top_pair, c, n, 2);
    return ari_bl_fl(run, c[top_pair[0]] + c[top_pair[1]]);
}

static double largest_of(const double *c, size_t n)
{
    double largest = c[0];
    for (size_t i = 1; i < n; i++)
        largest = c[i] > largest ? c[i] : largest;
    return largest;
}

/* Chooses the experts of a row in which only some groups stay: c [n] of all other groups is set below any score. group:
 * [n], scratch. */
static void choose_of_groups(const ari_bl_run *run, size_t *expert, double *c, double *score)
{
    const ar_experts *x = &run->c->experts;
    const size_t groups = x->scores.groups, group_size = x->n / groups;
    for (size_t g = 0; g < groups && groups > 1; g++)
        score[g] = x->scores.softmax ? largest_of(c + g * group_size, group_size)
                                     : best_two(run, c + g * group_size, group_size);
    for (size_t g = 0; g < groups && groups > 1; g++) {
        size_t better = 0;
        for (size_t rival = 0; rival < groups; rival++)
            better += score[rival] > score[g] || (score[rival] == score[g] && rival < g);
        for (size_t i = 0; i < group_size && better >= x->scores.kept; i++)
            c[g * group_size + i] = -INFINITY;
    }
    choose(expert, c, x->n, x->per_token);
}

/* Returns the divisor of a token's scores. */
static double score_divisor(const ari_bl_run *run, const double *a, const size_t *expert)
{
    double sum = a[expert[0]];
    for (size_t j = 1; j < run->c->experts.per_token; j++)
        sum = ari_bl_fl(run, sum + a[expert[j]]);
    return ari_bl_fl(run, sum + ari_bl_fl(run, 1e-20));
}

/* Computes a token's a, experts and weights from its logits. work: [2, n]. */
static void route_by_scores(const ari_bl_run *run, const double *bias, double *a, size_t *expert, double *weight,
                            const double *z, double *work)
{
    const ar_experts *x = &run->c->experts;
    for (size_t i = 0; i < x->n; i++) {
        a[i] = ari_bl_sigmoid(run, z[i]);
        work[i] = ari_bl_fl(run, a[i] + bias[i]);
    }
    choose_of_groups(run, expert, work, work + x->n);
    const double divisor = score_divisor(run, a, expert), scale = ari_bl_fl(run, x->scores.scale);
    for (size_t j = 0; j < x->per_token; j++) {
        const double share = x->normalised ? ari_bl_branch(run, a[expert[j]] / divisor) : a[expert[j]];
        weight[j] = ari_bl_branch(run, share * scale);
    }
}

/* DeepSeek-V2: chooses a token's experts by its logits, and their weights from its softmax p. work: [2, n]. */
static void route_by_groups(const ari_bl_run *run, const double *p, size_t *expert, double *weight, const double *z,
                            double *work)
{
    const ar_experts *x = &run->c->experts;
    for (size_t i = 0; i < x->n; i++)
        work[i] = z[i];
    choose_of_groups(run, expert, work, work + x->n);
    for (size_t j = 0; j < x->per_token; j++)
        weight[j] = ari_bl_branch(run, p[expert[j]] * ari_bl_fl(run, x->scores.scale));
}

void ari_bl_route_token(const ari_bl_run *run, const double *bias, const ari_bl_routed *r, size_t t, const double *z,
                        double *work)
{
    const size_t k = run->c->experts.per_token, n = run->c->experts.n;
    double *p = r->p + t * n, *weight = r->weight + t * k, m, l;
    size_t *expert = r->expert + t * k;
    if (bias != NULL) {
        route_by_scores(run, bias, p, expert, weight, z, work);
        return;
    }
    ari_bl_softmax(run, p, z, NULL, n, &m, &l);
    r->lse[t] = ari_bl_fl(run, m + ari_log64(l));
    if (run->c->experts.scores.groups > 0) {
        route_by_groups(run, p, expert, weight, z, work);
        return;
    }
    choose(expert, z, n, k);
    weigh(run, weight, p, expert);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Backward pass through the softmax from g [tokens, k], the gradients of the weights. With r = sum over K of w*g: dz_j
 * = w_j*(g_j - r) in K and 0 elsewhere if the weights are normalised, else dz_i = p_i*([i in K] g_i - r). */
static void softmax_gradient(const ari_bl_run *run, double *dz, const double *g, const ari_bl_routed *r)
{
    const ar_experts *x = &run->c->experts;
    for (size_t t = 0; t < run->tokens; t++) {
        const size_t *expert = r->expert + t * x->per_token;
        const double *w = r->weight + t * x->per_token, *gt = g + t * x->per_token;
        double sum = 0.0;
        for (size_t j = 0; j < x->per_token; j++)
            sum = ari_bl_fl(run, sum + ari_bl_fl(run, w[j] * gt[j]));
        for (size_t i = 0; i < x->n && !x->normalised; i++)
            dz[t * x->n + i] = ari_bl_branch(run, r->p[t * x->n + i] * -sum);
        for (size_t j = 0; j < x->per_token; j++)
            dz[t * x->n + expert[j]] = ari_bl_branch(run, w[j] * ari_bl_fl(run, gt[j] - sum));
    }
}

/* Computes the gradient for weights scale*p_j: dz_i = p_i*([i in K] s_i - r), with s = scale*g and r = sum over K of
 * p*s. */
static void groups_gradient(const ari_bl_run *run, double *dz, const double *g, const ari_bl_routed *r)
{
    const ar_experts *x = &run->c->experts;
    const double scale = ari_bl_fl(run, x->scores.scale);
    for (size_t t = 0; t < run->tokens; t++) {
        const size_t *expert = r->expert + t * x->per_token;
        const double *p = r->p + t * x->n, *gt = g + t * x->per_token;
        double sum = 0.0;
        for (size_t j = 0; j < x->per_token; j++)
            sum = ari_bl_fl(run, sum + ari_bl_fl(run, p[expert[j]] * ari_bl_fl(run, gt[j] * scale)));
        for (size_t i = 0; i < x->n; i++)
            dz[t * x->n + i] = ari_bl_branch(run, p[i] * -sum);
        for (size_t j = 0; j < x->per_token; j++) {
            const double slope = ari_bl_fl(run, ari_bl_fl(run, gt[j] * scale) - sum);
            dz[t * x->n + expert[j]] = ari_bl_branch(run, p[expert[j]] * slope);
        }
    }
}

/* Backward pass through the sigmoids. With D the divisor of a token's scores, s_j = a_j/D and r = sum over K of s*g (r
 * = 0 if they are not divided): dz_j = w_j*(1 - a_j)*(g_j - r) in K, and 0 elsewhere. */
static void scores_gradient(const ari_bl_run *run, double *dz, const double *g, const ari_bl_routed *r)
{
    const ar_experts *x = &run->c->experts;
    for (size_t t = 0; t < run->tokens; t++) {
        const size_t *expert = r->expert + t * x->per_token;
        const double *a = r->p + t * x->n, *w = r->weight + t * x->per_token, *gt = g + t * x->per_token;
        const double divisor = score_divisor(run, a, expert);
        double sum = 0.0;
        for (size_t j = 0; j < x->per_token && x->normalised; j++)
            sum = ari_bl_fl(run, sum + ari_bl_fl(run, ari_bl_branch(run, a[expert[j]] / divisor) * gt[j]));
        for (size_t j = 0; j < x->per_token; j++) {
            const double slope = ari_bl_fl(run, w[j] * ari_bl_fl(run, 1.0 - a[expert[j]]));
            dz[t * x->n + expert[j]] = ari_bl_branch(run, slope * ari_bl_fl(run, gt[j] - sum));
        }
    }
}

void ari_bl_router_gradient(const ari_bl_run *run, double *dz, const double *g, const ari_bl_routed *r)
{
    const ar_route_scores *s = &run->c->experts.scores;
    (s->groups == 0 ? softmax_gradient : s->softmax ? groups_gradient : scores_gradient)(run, dz, g, r);
}
