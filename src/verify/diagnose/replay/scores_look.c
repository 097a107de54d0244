/* SPDX-License-Identifier: Apache-2.0 */
/* Routers of sigmoids: weights and choices that another form of the router gives, and the logits' gradient from that of
 * the weights. */
#include "verify/diagnose/replay/scores.h"

#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"

/* Of fewer tokens, groups that the reference has not may explain a near tie by accident. */
enum { LEAST_ROWS = 4 };

/* --- the bias of later samples ------------------------------------------------------------------------------------ */

static void move_bias(double *bias, const ari_scored *s, double by, const uint8_t *chosen, size_t tokens)
{
    for (size_t i = 0; i < s->n; i++) {
        size_t own = 0;
        for (size_t t = 0; t < tokens; t++)
            own += chosen[t * s->n + i];
        const double mean = (double)(tokens * s->k) / (double)s->n;
        bias[i] += (double)own < mean ? by : (double)own > mean ? -by : 0.0;
    }
}

/* True if the first of `pieces` equal numbers of samples are right, and the next one's experts are those of a bias that
 * has moved by the first one's counts. */
static bool is_moved(ari_scored *s, const ari_score_choice *base, const uint8_t *is, double by, size_t pieces)
{
    double bias[ARI_MOST_SCORED];
    const size_t each = s->tokens / pieces;
    if (memcmp(is, s->chosen[0], each * s->n) != 0)
        return false;
    memcpy(bias, s->bias, s->n * sizeof *bias);
    move_bias(bias, s, by, is, each);
    for (size_t t = each; t < 2 * each; t++) {
        ari_scored_choose(s->chosen[1], s, t, base, bias);
        if (memcmp(s->chosen[1], is + t * s->n, s->n) != 0)
            return false;
    }
    return true;
}

static ar_status look_at_moved(ari_trace *t, ari_scored *s, const ari_case *c, const ari_score_choice *base,
                               const uint8_t *is)
{
    double before[ARI_MOST_SCORED], after[ARI_MOST_SCORED], by = 0.0;
    bool held = false;
    AR_TRY(ari_scored_bias(before, after, &held, c, s->n));
    for (size_t i = 0; i < s->n && held; i++)
        by = fmax(by, fabs(after[i] - before[i]));
    for (size_t pieces = 2; pieces <= s->samples && by > 0.0; pieces++) {
        if (s->samples % pieces != 0 || !is_moved(s, base, is, by, pieces))
            continue;
        ari_trace_set(t, ARI_FOUND_SCORES, ARI_IF(OF_MICRO));
        ari_number(t, "by", by);
        ari_count(t, "first", s->samples / pieces);
        return AR_OK;
    }
    return AR_OK;
}

/* --- numbers of experts ------------------------------------------------------------------------------------------- */

static size_t first_only(const uint8_t *a, const uint8_t *b, size_t n)
{
    size_t i = 0;
    while (i < n && !(a[i] && !b[i]))
        i++;
    return i;
}

/* States the tokens whose experts differ; is: [tokens][n]. Returns how many. */
static size_t say_rows(ari_trace *t, const ari_scored *s, const uint8_t *is, bool say)
{
    const size_t seq = s->tokens / s->samples;
    size_t rows = 0;
    for (size_t k = 0; k < s->tokens; k++) {
        const uint8_t *was = s->chosen[0] + k * s->n, *now = is + k * s->n;
        if (memcmp(was, now, s->n) != 0 && rows++ == 0 && say)
            ari_words(t, "who", "token %zu of sample %zu goes to expert %zu instead of %zu", k % seq, k / seq,
                      first_only(now, was, s->n), first_only(was, now, s->n));
    }
    if (say) {
        ari_count(t, "rows", rows);
        ari_count(t, "k", s->k);
    }
    return rows;
}

static void found_choice(ari_trace *t, const ari_score_choice *is, const ari_score_choice *base)
{
    ari_trace_set(t, ARI_FOUND_SCORES, ARI_IF(BLOCKS));
    ari_say_choice(t, "of", is);
    ari_say_choice(t, "wanted", base);
}

static ar_status look_at_choice(ari_trace *t, ari_scored *s, const ari_case *c)
{
    uint8_t *is = NULL;
    ari_reading base, now;
    ar_status st = AR_OK;
    if (!s->known || s->k != c->grid.cols ||
        !ari_scored_search(&base, s, &(ari_reading_of){.experts = s->chosen[0]}, NULL))
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&is, s->tokens * s->n, "experts of tokens"));
    for (size_t i = 0; i < c->count; i++) {
        if (!(c->val[i] >= 0.0f && c->val[i] < (float)s->n))
            goto done;
        is[i / s->k * s->n + (size_t)c->val[i]] = 1;
    }
    const size_t rows = say_rows(t, s, is, false);
    if (rows > 0 && (base.by.groups > 1 || rows >= LEAST_ROWS) &&
        ari_scored_search(&now, s, &(ari_reading_of){.experts = is}, &base))
        found_choice(t, &now.by, &base.by);
    else if (rows > 0)
        st = look_at_moved(t, s, c, &base.by, is);
    if (t->kind != ARI_FOUND_NOTHING)
        (void)say_rows(t, s, is, true);
done:
    free(is);
    return st;
}

/* --- weights ------------------------------------------------------------------------------------------------------ */

static void say_factor(ari_trace *t, double was, double is)
{
    ari_number(t, "was", was);
    ari_number(t, "is", is);
    ari_words(t, "how", "%s",
              ari_is_near(is, 1.0, ARI_SEEN)         ? ": it is left out"
              : ari_is_near(is, was * was, ARI_SEEN) ? ": it is applied twice"
                                                     : "");
}

/* The weights of those chosen, [tokens][k] of a row's n; false: some row has others than `experts` (NULL: as it
 * has). */
static bool take_weights(float *out, uint8_t *experts, bool given, const ari_scored *s, const float *x)
{
    for (size_t i = 0, k = 0; i < s->tokens * s->n; i++) {
        k = i % s->n == 0 ? 0 : k;
        if ((x[i] != 0.0f && k == s->k) || (given && (x[i] != 0.0f) != (experts[i] != 0)))
            return false;
        if (x[i] != 0.0f)
            out[i / s->n * s->k + k++] = x[i];
        if (i % s->n + 1 == s->n && k != s->k)
            return false;
    }
    return true;
}

static void compare_readings(ari_trace *t, const ari_reading *base, const ari_reading *now)
{
    const size_t f = now->function;
    if (f == base->function && ari_is_near(now->factor, base->factor, ARI_SEEN))
        return;
    const bool biased = f >= ARI_BIASED_SHARES && base->function < ARI_BIASED_SHARES;
    ari_trace_set(t, ARI_FOUND_SCORES,
                  f == base->function      ? ARI_IF(COUNT)
                  : biased                 ? ARI_IF(SHIFT)
                  : f == ARI_SHARES_OF_ALL ? ARI_IF(ALL)
                  : f == ARI_SHARES        ? ARI_IF(ONE)
                                           : ARI_IF(ZERO));
    say_factor(t, base->factor, now->factor);
}

/* ref, val: [tokens][k]. Weights alone show a choice, too, where a dump has no numbers. */
static ar_status look_at_weights(ari_trace *t, ari_scored *s, const float *ref, const float *val)
{
    ari_reading base, now;
    if (!ari_scored_search(&base, s, &(ari_reading_of){s->known ? s->chosen[0] : NULL, ref}, NULL) ||
        !ari_scored_search(&now, s, &(ari_reading_of){s->known ? s->chosen[0] : NULL, val}, &base))
        return AR_OK;
    if (memcmp(&base.by, &now.by, sizeof base.by) == 0 || s->known) {
        compare_readings(t, &base, &now);
        return AR_OK;
    }
    uint8_t *is = NULL;
    AR_TRY(ARI_ALLOC(&is, s->tokens * s->n, "experts of tokens"));
    for (size_t k = 0; k < s->tokens; k++) {
        ari_scored_choose(s->chosen[0] + k * s->n, s, k, &base.by, NULL);
        ari_scored_choose(is + k * s->n, s, k, &now.by, NULL);
    }
    if (base.by.groups > 1 || say_rows(t, s, is, false) >= LEAST_ROWS) {
        found_choice(t, &now.by, &base.by);
        (void)say_rows(t, s, is, true);
    }
    free(is);
    return AR_OK;
}

/* --- the gradient of the logits ----------------------------------------------------------------------------------- */

/* Fits x by the gradient of the logits, through the sum of the scores or without. weight, g: [tokens][n]. */
static bool is_gradient(double *factor, ari_scored *s, const float *weight, const float *g, bool sum, const float *x)
{
    ari_fit f = {0};
    for (size_t t = 0; t < s->tokens; t++) {
        const float *w = weight + t * s->n, *slope = g + t * s->n;
        double all = 0.0, mean = 0.0;
        ari_scored_score(s, t, &(ari_score_choice){.groups = 1}, s->bias);
        for (size_t i = 0; i < s->n; i++) {
            all += (double)w[i];
            mean += (double)w[i] * (double)slope[i];
        }
        for (size_t i = 0; i < s->n; i++)
            ari_fit_add(&f, (double)x[t * s->n + i],
                        (double)w[i] * (1.0 - s->a[i]) * ((double)slope[i] - (sum ? mean / all : 0.0)), 0.0);
    }
    return ari_fit_one(factor, &f) <= ARI_SUMS * ARI_SUMS;
}

static ar_status look_at_gradient(ari_trace *t, ari_scored *s, const ari_case *c)
{
    float *w = NULL, *g = NULL;
    double was = 0.0, is = 0.0;
    bool held = true;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_replay_rows(&w, &held, c, c->count, ARI_ROUTES, 'f'));
    AR_TRY_TO(done, st, ari_replay_rows(&g, &held, c, c->count, ARI_ROUTES, 'b'));
    if (!held)
        goto done;
    const bool sum = is_gradient(&was, s, w, g, true, c->ref);
    if (!sum && !is_gradient(&was, s, w, g, false, c->ref))
        goto done;
    if (is_gradient(&is, s, w, g, sum, c->val) && !ari_is_near(is, was, ARI_SEEN)) {
        ari_trace_set(t, ARI_FOUND_SCORES, ARI_IF(COUNT));
        ari_number(t, "times", is / was);
    } else if (sum && is_gradient(&is, s, w, g, false, c->val) && ari_is_near(is, was, ARI_SEEN)) {
        ari_trace_set(t, ARI_FOUND_SCORES, ARI_IF(CUT));
    }
done:
    free(w);
    free(g);
    return st;
}

/* The gradient of a router's input is multiplied by the factor of its weights, or divided. */
static void look_at_factor(ari_trace *t, ari_scored *s, const ari_case *c)
{
    const ari_fit f = ari_fit_of(&c->survey.total);
    ari_reading base;
    double times;
    if (ari_fit_one(&times, &f) > ARI_UNFITTED ||
        !ari_scored_search(&base, s, &(ari_reading_of){.weight = s->weight}, NULL) ||
        ari_is_near(base.factor, 1.0, ARI_SEEN) ||
        !(ari_is_near(times, base.factor, ARI_SEEN) || ari_is_near(times * base.factor, 1.0, ARI_SEEN)))
        return;
    ari_trace_set(t, ARI_FOUND_SCORES, ARI_IF(COUNT));
    ari_number(t, "times", times);
}

/* Of a tensor of all experts' weights, those of the chosen. */
static ar_status look_at_all_weights(ari_trace *t, ari_scored *s, const ari_case *c)
{
    float *ref = NULL, *val = NULL;
    ar_status st = AR_OK;
    if (!s->known || s->k == 0 || s->k > ARI_MOST_CHOSEN || c->count != s->tokens * s->n)
        return AR_OK;
    AR_TRY_TO(done, st, ARI_ALLOC(&ref, s->tokens * s->k, "weights of tokens"));
    AR_TRY_TO(done, st, ARI_ALLOC(&val, s->tokens * s->k, "weights of tokens"));
    if (take_weights(ref, s->chosen[0], true, s, c->ref) && take_weights(val, s->chosen[0], true, s, c->val))
        st = look_at_weights(t, s, ref, val);
done:
    free(ref);
    free(val);
    return st;
}

ar_status ari_measure_scores(ari_trace *t, const ari_case *c)
{
    const ari_role role = ari_replay_role(c);
    const bool forward = c->grid.d->pass == 'f';
    ari_scored s;
    bool held = false;
    if (role != ARI_ROUTER && (forward ? role != ARI_CHOSEN && role != ARI_ROUTES : role != ARI_ROUTER_LOGITS))
        return AR_OK;
    ar_status st = ari_scored_read(&s, &held, c);
    held = held && c->grid.rows == s.tokens && s.k <= ARI_MOST_CHOSEN;
    if (st == AR_OK && held && !forward && role == ARI_ROUTER && s.weight)
        look_at_factor(t, &s, c);
    else if (st == AR_OK && held && !forward)
        st = c->grid.cols == s.n ? look_at_gradient(t, &s, c) : AR_OK;
    else if (st == AR_OK && held && role == ARI_CHOSEN)
        st = look_at_choice(t, &s, c);
    else if (st == AR_OK && held && role == ARI_ROUTES)
        st = look_at_all_weights(t, &s, c);
    else if (st == AR_OK && held && s.weight && c->grid.cols == s.k)
        st = look_at_weights(t, &s, c->ref, c->val);
    ari_scored_fini(&s);
    return st;
}
