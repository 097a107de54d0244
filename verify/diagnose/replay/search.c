/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/diagnose/replay/search.h"

#include "verify/diagnose/hypothesis.h"

bool ari_choose(size_t *base, size_t *other, double *left, ari_probe *p, ari_put put, void *of, size_t n)
{
    double nearest = HUGE_VAL;
    *base = n;
    for (size_t i = 0; i < n; i++) {
        put(p, of, i);
        *base = ari_probe_try_base(p, &nearest) ? i : *base;
    }
    return *base < n && ari_choose_other(other, left, p, put, of, *base, n);
}

bool ari_choose_other(size_t *other, double *left, ari_probe *p, ari_put put, void *of, size_t base, size_t n)
{
    *left = ARI_REPLAY_MISTAKE;
    *other = n;
    for (size_t i = 0; i < n; i++) {
        if (i == base)
            continue;
        put(p, of, i);
        const double own = ari_probe_left(p, false);
        *other = own < *left ? i : *other;
        *left = fmin(own, *left);
    }
    return *other < n;
}

bool ari_dropped(ari_trace *t, ari_trace_kind kind, const double *count, size_t n)
{
    double times = 0.0;
    size_t zero = 0, known = 0;
    for (size_t i = 0; i < n; i++)
        times = fmax(times, count[i]);
    for (size_t i = 0; i < n; i++) {
        known += isnan(count[i]) ? 0 : 1;
        zero += fabs(count[i]) < ARI_KNOWN;
        if (fabs(count[i]) >= ARI_KNOWN && !ari_is_near(count[i], times, ARI_KNOWN))
            return false;
    }
    if (known < 8 || zero == 0 || zero == known || !(times > 1.01))
        return false;
    ARI_FINDING(t, kind, ARI_IF(FRACTION), {"factor", .number = times}, {"rate", .number = 1.0 - 1.0 / times});
    return true;
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

void ari_products_add(ari_products *p, const double *x)
{
    for (size_t i = 0; i < p->n; i++) {
        for (size_t k = 0; k < p->n; k++)
            p->of[i][k] += x[i] * x[k];
    }
}

ar_status ari_near_read(ari_near *near, const ari_probe *p, size_t width, const ar_dump *dump)
{
    near->width = width;
    near->n = near->n ? near->n : ari_replay_near(near->of, p->c, width);
    near->x = NULL;
    AR_TRY(ARI_TAKE(&near->x, p->c->arena, near->n * p->tokens * width + 1, "rows"));
    for (size_t at = 0; at < near->n * p->tokens; at++) {
        const size_t row = p->sample * p->seq + p->token[at % p->tokens];
        const ar_dump_tensor *t = ari_find_readable(dump, near->of[at / p->tokens]->name);
        if (t && t->count == near->of[at / p->tokens]->count)
            AR_TRY(ar_dump_read_f32(t, row * width, width, near->x + at * width));
    }
    return AR_OK;
}

void ari_near_multiply(ari_products *out, const ari_near *near, size_t tokens, size_t k, size_t i, double *x,
                       size_t more)
{
    for (size_t of = 0; of < near->n; of++)
        x[of] = (double)near->x[(of * tokens + k) * near->width + i];
    out->n = near->n + more;
    ari_products_add(out, x);
}

enum { TERMS = ARI_MOST_TERMS + 1 };

/* The nearest in one group; the squares that it leaves. */
static double fit(double *times, const ari_terms *s, const ari_products *p, size_t y, size_t with)
{
    const size_t n = s->terms + (with != SIZE_MAX);
    size_t of[TERMS];
    double m[(TERMS + 1) * (TERMS + 1)] = {0.0}, left = p->of[y][y];
    for (size_t i = 0; i < n; i++)
        of[i] = i < s->terms ? s->of[i] : with;
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k <= n; k++) /* of unit vectors, so that a small one is not taken for none */
            m[i * (n + 1) + k] =
                p->of[of[i]][k < n ? of[k] : y] / sqrt(p->of[of[i]][of[i]]) / (k < n ? sqrt(p->of[of[k]][of[k]]) : 1.0);
    }
    if (ari_equations_solve(times, m, n) == HUGE_VAL)
        return HUGE_VAL;
    for (size_t i = 0; i < n; i++) {
        times[i] /= sqrt(p->of[of[i]][of[i]]);
        left -= times[i] * p->of[of[i]][y];
    }
    return fmax(left, 0.0);
}

/* By how much more than rounding leaves the numbers of groups may differ, as angles. */
static const double alike = 1e-3;

void ari_terms_fit(ari_terms *s, const ari_products *p, size_t groups, size_t y, size_t with)
{
    double low[ARI_MOST_TERMS], high[ARI_MOST_TERMS], left = 0.0, all = 0.0, apart = 0.0;
    for (size_t g = 0; g < groups; g++) {
        double times[TERMS] = {0.0};
        left += fit(times, s, &p[g], y, with);
        all += p[g].of[y][y];
        for (size_t k = 0; k < s->terms; k++) {
            const double angle = groups > 1 ? atan2(times[k], fabs(times[0])) : times[k];
            low[k] = g == 0 ? angle : fmin(low[k], angle);
            high[k] = g == 0 ? angle : fmax(high[k], angle);
            apart = fmax(apart, high[k] - low[k]);
        }
    }
    s->left = left / all;
    if (!isfinite(s->left) || apart > alike + 8.0 * sqrt(s->left))
        s->left = HUGE_VAL;
    for (size_t k = 0; k < s->terms; k++)
        s->times[k] = groups == 1 ? low[k] : tan(0.5 * (low[k] + high[k]));
}

/* The next combination of s->terms of n vectors; false: that was the last. */
static bool next(ari_terms *s, size_t n)
{
    size_t k = s->terms;
    while (k > 0 && s->of[k - 1] + s->terms - k + 1 == n)
        k--;
    if (k == 0)
        return false;
    s->of[k - 1]++;
    for (; k < s->terms; k++)
        s->of[k] = s->of[k - 1] + 1;
    return true;
}

size_t ari_terms_shared(const ari_terms *a, const ari_terms *b)
{
    size_t shared = 0;
    for (size_t i = 0; i < a->terms * b->terms; i++)
        shared += a->of[i / b->terms] == b->of[i % b->terms];
    return shared;
}

bool ari_terms_find(ari_terms *s, const ari_products *p, size_t groups, size_t y, size_t with, size_t n, size_t most,
                    double allowed, const ari_terms *like)
{
    *s = (ari_terms){.left = HUGE_VAL};
    for (size_t terms = 1; terms <= most && terms <= n && !(s->left <= allowed); terms++) {
        ari_terms own = {.terms = terms};
        size_t most_shared = 0;
        for (size_t k = 0; k < terms; k++)
            own.of[k] = k;
        do {
            ari_terms_fit(&own, p, groups, y, with);
            const size_t shared = like && own.left <= allowed ? ari_terms_shared(&own, like) : 0;
            if (shared < most_shared || (shared == most_shared && !(own.left < s->left)))
                continue;
            most_shared = shared;
            *s = own;
        } while (next(&own, n));
    }
    return s->left <= allowed;
}

void ari_terms_say(ari_trace *t, const char *fact, const ari_terms *s, const ar_dump_tensor *const *near)
{
    ari_text text = ari_list(t, fact);
    for (size_t k = 0; k < s->terms; k++) {
        ari_say(&text, k > 0 ? " + " : "");
        if (!ari_is_near(s->times[k], 1.0, ARI_KNOWN))
            ari_say(&text, "%.4g ", s->times[k]);
        ari_say(&text, "%.55s", near[s->of[k]]->name);
    }
}
