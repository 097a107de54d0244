/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/hypothesis.h"
#include "verify/dump/dump_private.h"

/* A hypothesis whose residual reaches a fifth of the largest difference explains no more than rounding would. */
static const double small_beside = 0.2;

static void look_at(ari_residual *r, const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const ari_case *c = h->c;
    const bool differs = c->val ? ari_off(c, run->index + i) : ari_run_differs(&c->grid, run, i);
    const double value = (double)run->value[i], reference = (double)run->ref[i];
    if (!differs && h->differs_only)
        return;
    const double expected = h->expect(h, run, i);
    /* With rounding of the reference scaled as the hypothesis does. */
    const double absolute = fmax(1.0, fabs(h->factor)) * c->absolute + h->beside;
    const bool told = !isnan(expected) || isnan(value), holds = told && ari_holds_within(c, value, expected, absolute);
    const double apart = value - reference, off = told ? value - expected : apart;
    r->broken += !differs && told && !holds;
    r->left += differs || (told && !holds) ? off * off : 0.0;
    if (!differs)
        return;
    r->held += holds;
    r->missed += !holds;
    r->worst = holds ? fmax(r->worst, fabs(off)) : r->worst; /* of infinities a NaN, which fmax leaves */
    r->all += apart * apart;
}

/* True if it fails by too much to be worth mentioning. */
static bool is_ruled_out(const ari_hypothesis *h, const ari_residual *r)
{
    enum { FIRST = 512 }; /* elements, of which enough is as expected where a hypothesis is near */
    if (r->missed <= h->may_miss && (r->broken == 0 || h->may_miss > 0))
        return false;
    const bool near = r->held + r->missed + r->broken < FIRST || r->left <= (1.0 - ARI_NEAR) * r->all;
    return !h->kind || !h->c->considered || !near;
}

ari_residual ari_residual_of(const ari_hypothesis *h)
{
    ari_residual r = {0};
    for (ari_run run = ari_runs_of(&h->c->grid); ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count; i++) {
            look_at(&r, h, &run, i);
            if (is_ruled_out(h, &r))
                return r;
        }
    }
    if (h->kind)
        ari_consider(h->c, h->kind, h->flags, r.left / r.all);
    return r;
}

bool ari_explains_all(const ari_residual *r, const ari_case *c)
{
    return r->held > 0 && r->missed == 0 && r->broken == 0 &&
           (!(r->worst > small_beside * c->survey.total.max_difference) ||
            r->left <= small_beside * small_beside * r->all);
}

bool ari_holds_all(ari_residual *r, const ari_hypothesis *h)
{
    const ari_residual own = ari_residual_of(h);
    if (r)
        *r = own;
    return ari_explains_all(&own, h->c);
}

void ari_explained(ari_trace *t, const ari_residual *r)
{
    t->unexplained = r->all > 0.0 ? fmin(fmax(r->left / r->all, 0.0), 1.0) : 0.0;
    t->weighed = true;
}

double ari_expect_values(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    return (double)((const float *)h->of)[run->index + i];
}

/* --- least squares ------------------------------------------------------------------------------------------------ */

/* NaN stays NaN, which fmax would make 0: that infinite values fit. */
static double share_left(double left, double of)
{
    return (left < 0.0 ? 0.0 : left) / of;
}

double ari_fit_one(double *p, const ari_fit *f)
{
    *p = f->ya / f->aa;
    return share_left(f->yy - *p * f->ya, f->yy);
}

/* Two directions are distinct if their angle's square exceeds rounding; the second is worth a number if the first
 * leaves more than that. */
double ari_fit_two(double *p, double *q, const ari_fit *f)
{
    const double determinant = f->aa * f->bb - f->ab * f->ab, left = ari_fit_one(p, f);
    *q = 0.0;
    if (!(left > 1e-8) || !(determinant > 1e-6 * f->aa * f->bb))
        return left;
    *p = (f->ya * f->bb - f->yb * f->ab) / determinant;
    *q = (f->yb * f->aa - f->ya * f->ab) / determinant;
    return share_left(f->yy - *p * f->ya - *q * f->yb, f->yy);
}

double ari_fit_unsure(const ari_fit *f)
{
    double p;
    const double left = ari_fit_one(&p, f) * f->yy;
    return 6.0 * sqrt(left / (double)f->n / f->aa) / fabs(p);
}

/* With more than a thousandth of the squares left, there is enough noise for any number to fit. */
static const double most_left = 1e-3;

bool ari_is_multiple(const ari_case *c, const ari_fit *f)
{
    double p;
    const double left = ari_fit_one(&p, f), relative = fmax(ARI_SUMS, 0.5 * c->relative);
    const double absolute = fmax(1.0, fabs(p)) * c->absolute;
    return p != 0.0 && left <= most_left && left <= relative * relative + (double)f->n * absolute * absolute / f->yy;
}

void ari_equations_add(double *m, const double *x, size_t n)
{
    for (size_t i = 0; i <= n; i++) {
        for (size_t k = 0; k <= n; k++)
            m[i * (n + 1) + k] += x[i] * x[k];
    }
}

/* A pivot that is less of the first one is what rounding left of a zero. */
static const double least_pivot = 1e-9;

/* Gauss's elimination with the largest pivots. In the last row, which is none of the equations, y's squares become what
 * is left of them. */
double ari_equations_solve(double *number, double *m, size_t n)
{
    const size_t cols = n + 1;
    const double first = n > 0 ? fabs(m[0]) : 0.0;
    for (size_t col = 0; col < n; col++) {
        size_t best = col;
        for (size_t row = col + 1; row < n; row++)
            best = fabs(m[row * cols + col]) > fabs(m[best * cols + col]) ? row : best;
        if (!(fabs(m[best * cols + col]) > least_pivot * first))
            return HUGE_VAL;
        for (size_t i = 0; i <= n; i++) {
            const double x = m[col * cols + i];
            m[col * cols + i] = m[best * cols + i];
            m[best * cols + i] = x;
        }
        for (size_t row = 0; row <= n; row++) {
            const double by = row == col ? 0.0 : m[row * cols + col] / m[col * cols + col];
            for (size_t i = col; i <= n; i++)
                m[row * cols + i] -= by * m[col * cols + i];
        }
    }
    for (size_t i = 0; i < n; i++)
        number[i] = m[i * cols + n] / m[i * cols + i];
    return m[n * cols + n] < 0.0 ? 0.0 : m[n * cols + n]; /* a NaN stays */
}

/* --- tensors side by side ----------------------------------------------------------------------------------------- */

ari_beside ari_beside_of(const ar_dump_tensor *const *tensor, int tensors, size_t from, size_t n)
{
    return (ari_beside){.tensor = tensor, .tensors = tensors, .from = from, .n = n, .at = SIZE_MAX};
}

bool ari_beside_next(ari_beside *b)
{
    const size_t at = ++b->at; /* to 0 before the first */
    const size_t some = b->n - at < ARI_BESIDE_AT_ONCE ? b->n - at : ARI_BESIDE_AT_ONCE;
    for (int k = 0; at < b->n && at % ARI_BESIDE_AT_ONCE == 0 && k < b->tensors && b->status == AR_OK; k++)
        b->status = b->tensor[k] ? ari_dump_read_f64(b->tensor[k], b->from + at, some, b->read[k]) : AR_OK;
    for (int k = 0; k < b->tensors; k++)
        b->x[k] = b->read[k][at % ARI_BESIDE_AT_ONCE];
    return at < b->n && b->status == AR_OK;
}

ar_status ari_fit_read(ari_fit *f, const ar_dump_tensor *y, const ar_dump_tensor *a, size_t from, size_t n)
{
    const ar_dump_tensor *const two[] = {y, a};
    ari_beside b = ari_beside_of(two, 2, from, n);
    while (ari_beside_next(&b))
        ari_fit_add(f, b.x[0], b.x[1], 0.0);
    return b.status;
}
