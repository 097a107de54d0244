/* SPDX-License-Identifier: Apache-2.0 */
/* The part that a router's own losses have in its logits' gradient. A balancing loss adds p_i*(c_i - sum of p*c) to every
 * token, whatever c it has of the experts' counts, and a z-loss b*lse*p_i: a difference of either form is one of these
 * losses. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "verify/diagnose/replay/search.h"

enum { MOST_ELEMENTS = 1 << 20, ROUNDS = 60 };
static const double LEFT = 1e-4; /* of the difference's squares, by rounding */

typedef struct tokens {
    const double *p, *d; /* [n, experts]: the softmax, and what differs */
    size_t n, experts;
} tokens;

/* y += J^T J x, or (of_d) J^T d: of a token J = diag(p) - p p^T. */
static void add_normal(double *y, const tokens *t, const double *x, bool of_d)
{
    for (size_t k = 0; k < t->n; k++) {
        const double *p = t->p + k * t->experts, *v = of_d ? t->d + k * t->experts : x;
        double mean = 0.0, of_mean = 0.0;
        for (size_t i = 0; i < t->experts; i++)
            mean += p[i] * v[i];
        for (size_t i = 0; i < t->experts && !of_d; i++)
            of_mean += p[i] * p[i] * (v[i] - mean);
        for (size_t i = 0; i < t->experts; i++)
            y[i] += of_d ? p[i] * (v[i] - mean) : p[i] * (p[i] * (v[i] - mean) - of_mean);
    }
}

static double dot(const double *a, const double *b, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* The squares that are left of d by the best c, by conjugate gradients. work: [4, experts]. */
static double left_by_balance(const tokens *t, double *work)
{
    const size_t n = t->experts;
    double *c = work, *r = work + n, *s = work + 2 * n, *as = work + 3 * n, left = 0.0;
    memset(work, 0, 4 * n * sizeof *work);
    add_normal(r, t, NULL, true);
    memcpy(s, r, n * sizeof *s);
    double size = dot(r, r, n);
    const double enough = 1e-28 * size;
    for (int round = 0; round < ROUNDS && size > enough; round++) {
        memset(as, 0, n * sizeof *as);
        add_normal(as, t, s, false);
        const double by = size / dot(s, as, n), before = size;
        for (size_t i = 0; i < n; i++) {
            c[i] += by * s[i];
            r[i] -= by * as[i];
        }
        size = dot(r, r, n);
        for (size_t i = 0; i < n; i++)
            s[i] = r[i] + size / before * s[i];
    }
    for (size_t k = 0; k < t->n; k++) {
        const double *p = t->p + k * n, mean = dot(p, c, n);
        for (size_t i = 0; i < n; i++)
            left += pow(t->d[k * n + i] - p[i] * (c[i] - mean), 2.0);
    }
    return left;
}

/* Of all tokens together, or of each sample's, which are consecutive. */
static double left_by_balances(const tokens *t, size_t samples, double *work)
{
    double left = 0.0;
    for (size_t i = 0; i < samples; i++) {
        const size_t each = t->n / samples, at = i * each * t->experts;
        left += left_by_balance(&(tokens){t->p + at, t->d + at, each, t->experts}, work);
    }
    return left;
}

/* By b*lse*p, of the best b. */
static double left_by_z(double *b, const tokens *t, const double *lse)
{
    double xx = 0.0, xy = 0.0, yy = 0.0;
    for (size_t k = 0; k < t->n * t->experts; k++) {
        const double x = t->p[k] * lse[k / t->experts];
        xx += x * x;
        xy += x * t->d[k];
        yy += t->d[k] * t->d[k];
    }
    *b = xx > 0.0 ? xy / xx : 0.0;
    return yy - *b * xy;
}

static void fill(double *p, double *d, double *lse, const ari_case *c, const float *z)
{
    const size_t n = c->grid.cols;
    for (size_t k = 0; k < c->grid.rows; k++) {
        double most = (double)z[k * n], sum = 0.0;
        for (size_t i = 0; i < n; i++)
            most = fmax(most, (double)z[k * n + i]);
        for (size_t i = 0; i < n; i++)
            sum += p[k * n + i] = exp((double)z[k * n + i] - most);
        for (size_t i = 0; i < n; i++) {
            p[k * n + i] /= sum;
            d[k * n + i] = (double)c->val[k * n + i] - (double)c->ref[k * n + i];
        }
        lse[k] = most + log(sum);
    }
}

static void judge(ari_trace *trace, const ari_case *c, const tokens *t, const double *lse, double *work)
{
    const double all = dot(t->d, t->d, t->n * t->experts);
    const size_t samples = c->grid.nd > 2 ? c->grid.shape[0] : 1;
    double b = 0.0;
    if (!(left_by_z(&b, t, lse) > LEFT * all)) {
        ari_trace_set(trace, ARI_FOUND_ROUTER, ARI_IF(LOG));
        ari_number(trace, "weight", b);
        return;
    }
    const bool together = !(left_by_balances(t, 1, work) > LEFT * all);
    if (together || (t->n / samples >= 4 && !(left_by_balances(t, samples, work) > LEFT * all)))
        ari_trace_set(trace, ARI_FOUND_ROUTER, together ? ARI_IF(AVERAGE) : ARI_IF(SAMPLES));
}

ar_status ari_replay_balance(ari_trace *trace, const ari_case *c, const float *z)
{
    const size_t n = c->grid.cols, rows = c->grid.rows;
    double *work = NULL;
    if (n < 3 || rows < 4 || rows * n > MOST_ELEMENTS)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&work, 2 * rows * n + rows + 4 * n, "a router's softmax"));
    double *p = work, *d = p + rows * n, *lse = d + rows * n;
    fill(p, d, lse, c, z);
    judge(trace, c, &(tokens){p, d, rows, n}, lse, lse + rows);
    free(work);
    return AR_OK;
}
