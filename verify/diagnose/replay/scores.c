/* SPDX-License-Identifier: Apache-2.0 */
/* The choice and the weights of a router computed again: which of its forms gives what a dump has. */
#include "verify/diagnose/replay/scores.h"

#include <stdlib.h>

#include "verify/diagnose/hypothesis.h"

/* --- the choice --------------------------------------------------------------------------------------------------- */

/* Expert i of group g. */
static size_t member(const ari_score_choice *by, size_t n, size_t g, size_t i)
{
    return by->dealt ? i * by->groups + g : g * (n / by->groups) + i;
}

static double group_score(const double *c, size_t n, const ari_score_choice *by, size_t g)
{
    double first = -HUGE_VAL, second = -HUGE_VAL;
    for (size_t i = 0; i < n / by->groups; i++) {
        const double x = c[member(by, n, g, i)];
        second = x > first ? first : fmax(second, x);
        first = fmax(first, x);
    }
    return by->by_best || n / by->groups < 2 ? first : first + second;
}

void ari_router_scores(double *p, const float *z, size_t n, bool softmax)
{
    for (size_t i = 0; i < n; i++)
        p[i] = softmax ? (double)z[i] : 1.0 / (1.0 + exp(-(double)z[i]));
    if (softmax)
        (void)ari_softmax(p, p, n);
}

/* s->a: the scores of token t, and those by which it chooses. */
void ari_scored_score(ari_scored *s, size_t t, const ari_score_choice *by, const double *bias)
{
    const float *z = s->z + t * s->n;
    ari_router_scores(s->a, z, s->n, by->softmax);
    for (size_t i = 0; i < s->n; i++)
        s->a[s->n + i] =
            by->shifted ? 1.0 / (1.0 + exp(-(double)z[i] - bias[i])) : s->a[i] + (by->unbiased ? 0.0 : bias[i]);
}

/* Of groups that do not stay the scores become 0, or less than any. */
static void mask_groups(double *c, size_t n, const ari_score_choice *by)
{
    double best[ARI_MOST_SCORED];
    for (size_t g = 0; g < by->groups; g++)
        best[g] = group_score(c, n, by, g);
    for (size_t g = 0; g < by->groups; g++) {
        size_t before = 0;
        for (size_t other = 0; other < by->groups; other++)
            before += best[other] > best[g] || (other < g && best[other] == best[g]);
        for (size_t i = 0; i < n / by->groups && before >= by->kept; i++)
            c[member(by, n, g, i)] = by->zeros ? 0.0 : -HUGE_VAL;
    }
}

void ari_scored_choose(uint8_t *chosen, ari_scored *s, size_t t, const ari_score_choice *by, const double *bias)
{
    double *c = s->a + s->n;
    ari_scored_score(s, t, by, bias ? bias : s->bias);
    if (by->groups > 1)
        mask_groups(c, s->n, by);
    memset(chosen, 0, s->n);
    for (size_t round = 0; round < s->k; round++) {
        size_t best = s->n;
        for (size_t i = 0; i < s->n; i++) {
            if (!chosen[i] && (best == s->n || c[i] > c[best]))
                best = i;
        }
        chosen[best] = 1;
    }
}

void ari_say_choice(ari_trace *t, const char *fact, const ari_score_choice *by)
{
    ari_text text = ari_list(t, fact);
    if (by->groups == 1)
        ari_say(&text, "all experts");
    else
        ari_say(&text, "%zu of %zu groups%s, ranked by %s%s", by->kept, by->groups,
                by->dealt ? " of experts dealt round" : "",
                by->by_best ? "their best score" : "the sum of their two best",
                by->zeros ? " (the others' scores become 0)" : "");
    ari_say(&text, "%s%s", by->softmax ? ", by a softmax" : "",
            by->unbiased  ? ", by scores without the bias"
            : by->shifted ? ", by sigmoids of logits with the bias"
                          : "");
}

/* --- search ------------------------------------------------------------------------------------------------------- */

static double term_of(const ari_scored *s, size_t t, size_t i, size_t function)
{
    switch (function) {
    case ARI_BIASED_SHARES:
    case ARI_BIASED_SCORES:
        return s->a[i] + s->bias[i];
    case ARI_SOFT_AGAIN:
    case ARI_SOFT_OF_ALL:
        return exp(s->a[i]);
    case ARI_ONE_EACH:
        return 1.0;
    case ARI_RAW_LOGITS:
        return (double)s->z[t * s->n + i];
    default:
        return s->a[i];
    }
}

const char *ari_function_text(const ari_reading *r)
{
    switch (r->function) {
    case ARI_SOFT_AGAIN:
        return "a second softmax, over the experts chosen, of the scores";
    case ARI_SOFT_OF_ALL:
        return "a second softmax, over all experts, of the scores";
    case ARI_ONE_EACH:
        return "one share for each expert chosen";
    case ARI_RAW_LOGITS:
        return "the logits themselves";
    case ARI_SHARES:
        return r->by.softmax ? "a softmax, normalised over the experts chosen"
                             : "a sigmoid, normalised over the experts chosen";
    default:
        return r->by.softmax ? "a softmax, not normalised" : "a sigmoid, not normalised";
    }
}

/* The function of the scores of token t's experts, smallest first; s->a is that token's. Returns how many. */
static size_t values_of(double *out, const ari_scored *s, size_t t, const uint8_t *chosen, size_t function)
{
    const bool of_all = function == ARI_SHARES_OF_ALL || function == ARI_SOFT_OF_ALL;
    const bool divided =
        of_all || function == ARI_SHARES || function == ARI_BIASED_SHARES || function == ARI_SOFT_AGAIN;
    double sum = 0.0;
    size_t n = 0;
    for (size_t i = 0; i < s->n; i++) {
        const double x = term_of(s, t, i, function);
        sum += chosen[i] || of_all ? x : 0.0;
        if (chosen[i])
            out[n++] = x;
    }
    for (size_t i = 0; i < n && divided; i++)
        out[i] /= sum;
    qsort(out, n, sizeof *out, ari_by_value);
    return n;
}

static bool fits_first(ari_reading *r, ari_scored *s, const ari_reading_of *of, size_t tokens)
{
    double is[ARI_MOST_CHOSEN], made[ARI_MOST_CHOSEN];
    ari_fit f = {0};
    for (size_t t = 0; t < tokens; t++) {
        ari_scored_choose(s->chosen[1], s, t, &r->by, NULL);
        if (of->experts && memcmp(s->chosen[1], of->experts + t * s->n, s->n) != 0)
            return false;
        if (!of->weight)
            continue;
        ari_scored_score(s, t, &r->by, s->bias);
        const size_t n = values_of(made, s, t, s->chosen[1], r->function);
        for (size_t i = 0; i < n; i++)
            is[i] = (double)of->weight[t * s->k + i];
        qsort(is, n, sizeof *is, ari_by_value);
        for (size_t i = 0; i < n; i++)
            ari_fit_add(&f, is[i], made[i], 0.0);
    }
    return !of->weight || ari_fit_one(&r->factor, &f) <= s->unsure * s->unsure;
}

/* True if this choice and function give all that is wanted; fills the factor. */
static bool fits(ari_reading *r, ari_scored *s, const ari_reading_of *of)
{
    const size_t first = s->tokens < 4 ? s->tokens : 4;
    return fits_first(r, s, of, first) && fits_first(r, s, of, s->tokens);
}

/* The ways to choose, of which a reference has one of the first. */
static const ari_score_choice forms[] = {{.groups = 0},     {.unbiased = true},
                                         {.by_best = true}, {.by_best = true, .unbiased = true},
                                         {.zeros = true},   {.softmax = true, .unbiased = true},
                                         {.softmax = true}, {.softmax = true, .by_best = true, .unbiased = true},
                                         {.dealt = true},   {.shifted = true}};
enum { FORMS = sizeof forms / sizeof *forms, REFERENCE_FORMS = 6 };

/* Of all experts, then of `like` groups or (NULL) of any. */
static bool search_form(ari_reading *r, ari_scored *s, const ari_reading_of *of, size_t form,
                        const ari_score_choice *like)
{
    r->by = forms[form];
    r->by.groups = r->by.kept = 1;
    if (!r->by.by_best && !r->by.zeros && !r->by.dealt && fits(r, s, of))
        return true;
    for (size_t groups = 2; groups <= s->n / 2; groups++) {
        for (size_t kept = 1; kept < groups && s->n % groups == 0; kept++) {
            const bool other = like && like->groups > 1 && (like->groups != groups || like->kept != kept);
            r->by.groups = groups;
            r->by.kept = kept;
            if (!other && kept * (s->n / groups) >= s->k && fits(r, s, of))
                return true;
        }
    }
    return false;
}

/* like NULL: a reference. Else what is like it in one of choice and function, then in none. */
bool ari_scored_search(ari_reading *r, ari_scored *s, const ari_reading_of *of, const ari_reading *like)
{
    const size_t functions = of->weight ? ARI_FUNCTIONS : 1;
    for (size_t k = 0; k < functions && like; k++) {
        *r = (ari_reading){.by = like->by, .function = k};
        if (fits(r, s, of))
            return true;
    }
    for (size_t i = 0; i < 2 * functions; i++) {
        const size_t function = i % functions;
        if (like ? (i < functions) != (function == like->function) : i >= functions || function > ARI_SCORES)
            continue;
        for (size_t form = 0; form < (like ? (size_t)FORMS : (size_t)REFERENCE_FORMS); form++) {
            r->function = function;
            if (search_form(r, s, of, form, like ? &like->by : NULL))
                return true;
        }
    }
    return false;
}

void ari_scored_find(ari_scored *s)
{
    const ari_reading_of of = {.weight = s->weight};
    ari_reading base;
    s->known = s->weight && ari_scored_search(&base, s, &of, NULL);
    for (size_t t = 0; t < s->tokens && s->known; t++)
        ari_scored_choose(s->chosen[0] + t * s->n, s, t, &base.by, NULL);
}
