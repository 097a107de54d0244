/* SPDX-License-Identifier: Apache-2.0 */
/* The reference times a number: everywhere, in some slices, or a number for each slice. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"
#include "verify/diagnose/roles.h"

/* --- numbers that mean something ---------------------------------------------------------------------------------- */

enum { NAMED = 80 };

/* What a factor is: an integer n and how it is used; 0: no such number. */
typedef struct meaning {
    int n;
    bool inverse, root;
    int power;    /* of 2, from 8 on: a loss scale */
    double apart; /* what is not known of the factor, relative to it */
} meaning;

static bool is_within(double a, double b, double relative)
{
    return fabs(a - b) <= relative * fabs(b);
}

/* What noise leaves unknown of a factor that fits to `left` of the sum of squares: six times its standard error. */
static double uncertainty(const ari_factor_sums *s, double left)
{
    const double factor = ari_factor_of(s), error = sqrt(fmax(left, 0.0) / (double)s->n / s->rr) / fabs(factor);
    return fmin(fmax(2e-5, 6.0 * error), 3e-3);
}

static meaning meaning_of(double factor, double apart)
{
    const double size = fabs(factor) < 1.0 ? 1.0 / fabs(factor) : fabs(factor);
    meaning m = {.inverse = fabs(factor) < 1.0, .apart = apart};
    const double power = nearbyint(log2(size));
    if (power >= 8.0 && is_within(size, exp2(power), apart))
        m.power = (int)power;
    for (int n = 2; n <= ARI_MOST_RANKS && !m.power; n++) {
        if (is_within(size, n, apart))
            m.n = n;
        if (n < 33 && is_within(size * size, n, apart) && m.n == 0) {
            m.n = n;
            m.root = true;
        }
    }
    return m;
}

/* p/q of small numbers: of counts that are divided by. */
static bool is_fraction(double factor, double apart, int *p, int *q)
{
    for (*q = 2; *q <= 9; (*q)++) {
        *p = (int)nearbyint(factor * *q);
        if (*p >= 2 && *p <= 16 && fabs(factor * *q - *p) <= fmin(fmax(2e-6, 0.8 * apart), 2e-4) * *p)
            return true;
    }
    return false;
}

static void name_factor(char *out, size_t cap, double factor, const meaning *m)
{
    const char *sign = factor < 0.0 ? "-" : "";
    int p = 0, q = 0;
    if (m->power)
        snprintf(out, cap, "%s2^%s%d", sign, m->inverse ? "-" : "", m->power);
    else if (m->n && m->root)
        snprintf(out, cap, "%.6g (%s%ssqrt(%d))", factor, sign, m->inverse ? "1/" : "", m->n);
    else if (m->n)
        snprintf(out, cap, "%s%s%d", sign, m->inverse ? "1/" : "", m->n);
    else if (ari_is_near(fabs(factor), 1.0))
        snprintf(out, cap, "%s1", sign);
    else if (is_fraction(fabs(factor), m->apart, &p, &q))
        snprintf(out, cap, "%.6g (%s%d/%d)", factor, sign, p, q);
    else
        snprintf(out, cap, "%.6g", factor);
}

/* --- the same in other tensors ------------------------------------------------------------------------------------ */

enum { TENSORS_ASKED = 12, ELEMENTS_ASKED = 512 };

/* Whether this factor takes the reference's first elements of another tensor to the other's: 1, 0, or -1 where they
 * say nothing. */
static int factor_in(const ar_dump_tensor *r, const ar_dump_tensor *v, double factor)
{
    float a[ELEMENTS_ASKED], b[ELEMENTS_ASKED];
    const size_t n = r->count < ELEMENTS_ASKED ? r->count : ELEMENTS_ASKED, from = (r->count - n) / 2;
    ari_factor_sums s = {0};
    if (ar_dump_read_f32(r, from, n, a) != AR_OK || ar_dump_read_f32(v, from, n, b) != AR_OK)
        return -1;
    for (size_t i = 0; i < n; i++) {
        s.vr += (double)a[i] * (double)b[i];
        s.rr += (double)a[i] * (double)a[i];
        s.vv += (double)b[i] * (double)b[i];
    }
    if (!(s.rr > 0.0) || !(s.vv > 0.0))
        return -1;
    return fabs(ari_factor_of(&s) - factor) <= 1e-4 * fabs(factor) && s.vv - s.vr * ari_factor_of(&s) <= 1e-6 * s.vv;
}

/* Of other tensors of the same pass: how many have the factor too, of how many asked. */
static void ask_others(const ari_whole *w, double factor, size_t *same, size_t *asked)
{
    const ar_dump *r = w->known->reference, *v = w->known->other;
    const char pass = w->view.grid.d->pass;
    *same = *asked = 0;
    const size_t all = r && v ? ar_dump_count(r) : 0, step = all / TENSORS_ASKED + 1;
    for (size_t i = 0; i < all && *asked < TENSORS_ASKED; i += step) {
        const ar_dump_tensor *a = ar_dump_at(r, i), *b = a ? ar_dump_find(v, a->name) : NULL;
        if (!b || a == w->full || a->count != b->count || a->count < 8 || ari_pass_of(w, a->name) != pass)
            continue;
        const int answer = factor_in(a, b, factor);
        *same += answer == 1;
        *asked += answer >= 0;
    }
}

/* --- words -------------------------------------------------------------------------------------------------------- */

/* "tp", "dp", or both if either could be it. */
static const char *over(const ari_whole *w, int n)
{
    const bool tp = w->known->tp == n, dp = w->known->dp == n;
    return tp && !dp ? "tp" : dp && !tp ? "dp" : "tp or dp";
}

static void say_rank_factor(ari_text *t, const ari_whole *w, const meaning *m, bool everywhere)
{
    const char pass = w->view.grid.d->pass;
    const char *group = everywhere && w->known->tp != m->n ? "dp" : over(w, m->n);
    if (m->inverse && everywhere && pass == 'g')
        ari_say(t,
                ": averaged over %d ranks or micro-batches where the sum was wanted, or divided by their number "
                "twice (a mean in place of a sum over dp)",
                m->n);
    else if (m->inverse)
        ari_say(t,
                ": looks like a missing all-reduce over %s of %d equal parts, or a mean over %d ranks in place of "
                "the sum (divided by N before each rank added its own)",
                group, m->n, m->n);
    else if (everywhere && pass == 'g')
        ari_say(t,
                ": a sum over %d ranks or micro-batches where the mean was wanted (dp), or each divided by its own "
                "number of targets in place of the global one",
                m->n);
    else
        ari_say(t,
                ": a value complete on each of %d ranks was added over %s (an all-reduce too many, or counted once "
                "per replica)",
                m->n, group);
    if (m->n == 2)
        ari_say(t, m->inverse ? "; or one of two equal contributions is missing" : "; or counted twice");
}

/* Whether the factor is the number of the batch's tokens, or of those that have a target; 0: neither. */
static size_t tokens_of(const ari_whole *w, double factor)
{
    const ari_difference *d = w->view.grid.d;
    const size_t counts[] = {d->batch * d->seq, d->seq > 1 ? d->batch * (d->seq - 1) : 0, d->seq};
    const double size = fabs(factor) < 1.0 ? 1.0 / fabs(factor) : fabs(factor);
    for (size_t i = 0; i < 3; i++) {
        if (counts[i] > 8 && is_within(size, (double)counts[i], 1e-4))
            return counts[i];
    }
    return 0;
}

/* Of initial values: Xavier's scale from a shard's sizes; the number of shards, 0: it is not. */
static int fan_shards(const ari_whole *w, double factor)
{
    const ari_difference *d = w->view.grid.d;
    if (d->ndim != 2 || d->pass == 'f' || d->pass == 'b' || d->pass == 'g')
        return 0;
    for (int n = 2; n <= ARI_MOST_RANKS; n++) {
        const double a = (double)d->shape[0], b = (double)d->shape[1];
        if (ari_is_near(factor * factor, (a + b) / (a / n + b)) || ari_is_near(factor * factor, (a + b) / (a + b / n)))
            return n;
    }
    return 0;
}

static void say_cause(ari_text *t, const ari_whole *w, double factor, const meaning *m, size_t same, size_t asked)
{
    const bool everywhere = asked > 0 && same == asked;
    const char pass = w->view.grid.d->pass;
    int p = 0, q = 0;
    const int shards = fan_shards(w, factor);
    if (ari_is_near(factor, -1.0))
        ari_say(t, ": the sign is flipped");
    else if (shards)
        ari_say(
            t,
            ": an initial scale from the shard's size: the root of the fans of the full tensor over those of one of "
            "%d shards",
            shards);
    else if (factor < 0.0)
        ari_say(t, ": the sign is flipped, and a scalar is wrong");
    else if (m->power)
        ari_say(t,
                m->inverse ? ": a loss scale divided out once too often" : ": a loss scale that was not divided out");
    else if (m->n && m->root && pass != 'g')
        ari_say(t, ": a scale by the square root of a size (a softmax scale, a fan, a number of ranks)");
    else if (tokens_of(w, factor))
        ari_say(t, ": the number of %s: %s (or %d ranks)",
                tokens_of(w, factor) == w->view.grid.d->seq ? "tokens of a sample" : "the batch's tokens or targets",
                m->inverse ? "a mean over tokens that was taken twice, or where the sum was wanted"
                           : "a sum over tokens where the mean was wanted",
                (int)tokens_of(w, factor));
    else if (m->n && !m->root)
        say_rank_factor(t, w, m, everywhere);
    else if (pass == 'g' && everywhere && factor < 1.0)
        ari_say(t, ": the gradient-clipping factor is in it (clipped on one side, or by another norm), or another "
                   "divisor of the loss");
    else if (is_fraction(factor, m->apart, &p, &q))
        ari_say(t,
                ": a divisor that counts others (targets, tokens, samples of one rank or micro-batch in place of all)");
    else if (everywhere)
        ari_say(t, ": one wrong scalar for the whole pass (the loss's divisor, a number of tokens)");
    else
        ari_say(t, ": one wrong scalar (a divisor, a clipping factor, a softmax scale, a number of tokens), not wrong "
                   "data");
    if (everywhere)
        ari_say(t, "; %zu other tensors looked at have the same factor", asked);
    else if (asked > 0 && same == 0)
        ari_say(t, "; %zu other tensors looked at do not have it", asked);
}

/* --- one factor --------------------------------------------------------------------------------------------------- */

static ari_factor_sums sums_of(const ari_whole *w)
{
    ari_factor_sums s = {0};
    for (size_t i = 0; i < w->count; i++) {
        const double v = (double)w->val[i], r = (double)w->ref[i];
        if (!ari_off(w, i))
            continue;
        s.vr += v * r;
        s.rr += r * r;
        s.vv += v * v;
        s.n++;
    }
    return s;
}

/* The largest |value - factor*reference| over what differs; infinity where it does not hold. */
static double worst_left(const ari_whole *w, double factor)
{
    const double beside = w->absolute * fmax(1.0, fabs(factor));
    double worst = 0.0;
    for (size_t i = 0; i < w->count; i++) {
        if (!ari_off(w, i))
            continue;
        const double expected = factor * (double)w->ref[i], left = fabs((double)w->val[i] - expected);
        if (!(left <= beside + (w->relative + 0x1p-21) * fabs(expected)))
            return INFINITY;
        worst = left > worst ? left : worst;
    }
    return worst;
}

ar_status ari_seek_factor(ari_clue *f, const ari_whole *w)
{
    const ari_factor_sums s = sums_of(w);
    const double factor = ari_factor_of(&s), left = s.vv - s.vr * factor;
    char name[NAMED];
    size_t same = 0, asked = 0;
    if (w->count < 2 || !(s.vv > 0.0) || !(s.rr > 0.0) || !(fabs(factor - 1.0) > 1e-4) || !(fabs(factor) > 1e-9) ||
        !(left <= fmax(1e-4 * s.vv, fmin(0.01 * s.vv, (double)s.n * w->absolute * w->absolute))))
        return AR_OK;
    const meaning m = meaning_of(factor, uncertainty(&s, left));
    const double worst = worst_left(w, factor);
    const bool telling = m.n > 0 || m.power > 0 || ari_is_near(factor, -1.0) || fan_shards(w, factor) > 0;
    if (!isfinite(worst) || (s.n < 4 && !(telling && s.n > 1)))
        return AR_OK;
    ask_others(w, factor, &same, &asked);
    name_factor(name, sizeof name, factor, &m);
    ari_text t = ari_find(f, telling ? ARI_IDENTITY + 5 : ARI_TRACE + 8);
    snprintf(f->value, sizeof f->value, "each %s times the reference", name);
    const double largest = worst / (w->max_ref * fabs(factor));
    ari_say(&t, "a factor of exactly %s in all %zu elements that differ (to within %.0e of the largest)", name, s.n,
            largest > 1e-9 ? largest : 1e-9);
    say_cause(&t, w, factor, &m, same, asked);
    return AR_OK;
}

/* --- one value ---------------------------------------------------------------------------------------------------- */

static void say_loss_off(ari_clue *f, double r, double v)
{
    ari_text t = ari_find(f, ARI_STATISTIC);
    ari_say(&t,
            "no known trace: the loss is off by %.3g (%.2g%%); if the logits are right, some target's logit came from "
            "elsewhere (labels "
            "shifted, ids at a shard's edge), denominators were added without a common maximum, or the number of "
            "targets is another",
            v - r, 100.0 * (v - r) / fabs(r));
}

ar_status ari_seek_loss(ari_clue *f, const ari_whole *w)
{
    const double r = (double)w->ref[0], v = (double)w->val[0], factor = v / r;
    char name[NAMED];
    if (w->count != 1 || !isfinite(v) || !isfinite(r) || r == 0.0)
        return AR_OK;
    for (int n = 2; n <= ARI_MOST_RANKS; n++) {
        const double unsure = 1e-5 * (1.0 + fabs(r)) + 0.5 * w->relative * fabs(v);
        if (fabs(v - r - log((double)n)) > unsure || log1p(1.0 / n) < 2.0 * unsure)
            continue;
        ari_text t = ari_find(f, ARI_IDENTITY);
        ari_say(&t,
                "the reference plus log(%d) = %.6f: softmax denominators added over %d ranks that each hold the "
                "whole vocabulary",
                n, log((double)n), n);
        return AR_OK;
    }
    const meaning m = meaning_of(factor, 2e-5);
    int p = 0, q = 0;
    const bool fraction = is_fraction(factor, m.apart, &p, &q);
    if (ari_is_near(factor, 1.0))
        return AR_OK;
    if (!(m.n || m.power || ari_is_near(factor, -1.0) || fraction)) {
        if (ari_name_is(w->view.grid.d->name) & ARI_IS_LOSS)
            say_loss_off(f, r, v);
        return AR_OK;
    }
    name_factor(name, sizeof name, factor, &m);
    ari_text t = ari_find(f, ARI_IDENTITY + 1);
    ari_say(&t, "a factor of %s", name);
    if (m.n && !m.root)
        ari_say(&t,
                m.inverse ? ": divided by %d too often: a mean over ranks or micro-batches of what was a mean already"
                          : ": a sum over %d ranks or micro-batches where the mean was wanted",
                m.n);
    else if (fraction)
        ari_say(&t,
                ": a divisor that counts others (the targets of one rank or micro-batch in place of all, or the other "
                "way round)");
    return AR_OK;
}
