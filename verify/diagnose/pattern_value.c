/* SPDX-License-Identifier: Apache-2.0 */
/* Relations of each value with its reference: a constant factor, zero, a mask, rounding. */
#include <stdio.h>

#include "verify/diagnose/pattern_impl.h"
#include "verify/diagnose/roles.h"

/* --- not a number ------------------------------------------------------------------------------------------------- */

ar_status ari_detect_nan(ari_clue *f, const ari_case *c)
{
    const ari_tally *t = &c->survey.total;
    if (t->nan == 0)
        return AR_OK;
    ari_text text = ari_find(f, ARI_SHAPE);
    ari_say(&text,
            "not a number in %zu of the %zu different values held: memory read before it was written (a collective "
            "before its producer, a stale buffer), an overflow in the exponential or in 16 bits, or 0/0 in a row whose "
            "keys are all masked",
            t->nan, t->different);
    return AR_OK;
}

/* --- a constant factor -------------------------------------------------------------------------------------------- */

static bool is_near(double a, double b, double tolerance)
{
    return fabs(a - b) <= tolerance * fabs(b);
}

/* |value - factor * reference| over the elements that rank r has different, relative to |value|. */
static double residual(const ari_case *c, int r, double factor)
{
    ari_runs it = ari_runs_of_rank(&c->grid, r);
    ari_run run;
    double error = 0.0;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            const double delta = (double)run.value[i] - factor * (double)run.ref[i];
            error += ari_run_differs(&c->grid, &run, i) ? delta * delta : 0.0;
        }
    }
    return sqrt(error / c->survey.rank[r].vv);
}

/* Where every dY is the same, a bias gradient over the wrong axis counts features in place of tokens. */
static bool is_features_per_token(const ari_difference *d, double c, double tolerance)
{
    const double tokens = (double)d->batch * (double)d->seq;
    if (d->pass != 'g' || d->ndim != 1 || !ari_leaf_has(d, "bias") || !(tokens > 0.0))
        return false;
    return is_near(c, (double)d->copy[0].shape[0] / tokens, tolerance);
}

/* Of a row-parallel bias alone a factor is the tensor-parallel group's, which holds it whole: one of the data-parallel
 * group would be in every gradient. */
static bool is_of_tp(const ari_difference *d)
{
    return ari_tp_of(d) > 1 && (ari_dp_of(d) == 1 || (d->pass == 'g' && d->ndim == 1 && ari_is_row_parallel(d)));
}

/* What the run's sizes would explain; NULL if nothing. */
static const char *factor_name(const ari_difference *d, double c, double tolerance, char *buffer, size_t cap)
{
    const bool of_tp = is_of_tp(d) && ari_tp_of(d) == ari_dp_of(d);
    const double n = ari_tp_of(d), dp = of_tp ? 1 : ari_dp_of(d), b = (double)d->batch,
                 tokens = d->seq > 1 ? b * (double)(d->seq - 1) : 0.0;
    const struct {
        double value;
        const char *text;
    } known[] = {
        {dp > 1 ? dp : 0, "dp"},
        {dp > 1 ? 1 / dp : 0, "1/dp"},
        {n > 1 ? n : 0, "N"},
        {n > 1 ? 1 / n : 0, "1/N"},
        {2, "2"},
        {0.5, "1/2"},
        {-1, "-1"},
        {n > 2 ? sqrt(n) : 0, "the square root of N"},
        {n > 2 ? n * n : 0, "N^2"},
        {n > 2 ? 1 / (n * n) : 0, "1/N^2"},
        {b > 1 ? b : 0, "the batch"},
        {b > 1 ? 1 / b : 0, "1/batch"},
        {tokens, "T, the number of targets"},
        {tokens > 0 ? 1 / tokens : 0, "1/T, of the number of targets"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (known[i].value != 0.0 && is_near(c, known[i].value, tolerance)) {
            snprintf(buffer, cap, "%s", known[i].text);
            return buffer;
        }
    }
    return NULL;
}

/* sqrt((fan_in + fan_out) / (the shard's)): Xavier's scale from the shard's sizes; 0 if this is not such a tensor. */
static double shard_scale(const ari_difference *d, int rank)
{
    const size_t *local = d->copy[rank].shape;
    if (d->pass != 'i' || d->ndim != 2 || local[0] + local[1] == 0)
        return 0.0;
    return sqrt(((double)d->shape[0] + (double)d->shape[1]) / ((double)local[0] + (double)local[1]));
}

static void say_initial_factor(ari_text *t, const ari_difference *d, int rank, double factor, const char *name)
{
    const size_t *local = d->copy[rank].shape;
    const double scale = shard_scale(d, rank);
    if (scale > 1.0 && is_near(factor, scale, 1e-5))
        ari_say(t,
                "initial scale from the shard's size: factor %.6g = sqrt((%zu + %zu) / (%zu + %zu)), fans of the full "
                "tensor over fans of the shard",
                factor, d->shape[0], d->shape[1], local[0], local[1]);
    else if (d->ranks > 1 && is_near(factor, sqrt((double)d->ranks), 1e-5))
        ari_say(t,
                "initial scale from the shard's size: factor %.6g = sqrt(%d), as 1/sqrt(fan_in) gives for 1/%d of the "
                "fan_in",
                factor, d->ranks, d->ranks);
    else
        ari_say(t, "initial values scaled by %.6g%s%s: another scheme, range or fan", factor, name ? " = " : "",
                name ? name : "");
}

static void say_factor(ari_text *t, const ari_case *c, int rank, double factor, const char *name)
{
    const ari_difference *d = c->grid.d;
    const int tp = ari_tp_of(d), dp = is_of_tp(d) && tp == ari_dp_of(d) ? 1 : ari_dp_of(d);
    if (d->pass == 'i') {
        say_initial_factor(t, d, rank, factor, name);
        return;
    }
    ari_say(t, "every different element is the reference times %.6g", factor);
    if (name && !is_features_per_token(d, factor, 1e-5))
        ari_say(t, " = %s", name);
    if (is_features_per_token(d, factor, 1e-5))
        ari_say(t,
                " = %zu features / %zu tokens: a bias gradient summed over the wrong axis, where each dY is the same; "
                "or, if dY is not, a wrong divisor",
                d->copy[rank].shape[0], d->batch * d->seq);
    else if (dp > 1 && is_near(factor, dp, 1e-5))
        ari_say(t,
                " (dp = %d ranks): a value that was complete on every data-parallel rank was added over dp%s, or each "
                "rank divided by its own number of targets in place of the global one%s",
                dp, d->pass == 'g' ? " (a bucket reduced a second time)" : "", tp == dp ? "; or the same over tp" : "");
    else if (dp > 1 && is_near(factor, 1.0 / dp, 1e-5))
        ari_say(t, " (dp = %d ranks): averaged over dp where the sum was wanted%s", dp,
                tp == dp ? ", or the same over tp" : "");
    else if (tp > 1 && is_near(factor, tp, 1e-5))
        ari_say(
            t,
            " (N = %d ranks): a value that was complete on every rank was summed over tp (reduced twice, or counted "
            "once per replica)",
            tp);
    else if (tp > 1 && is_near(factor, 1.0 / tp, 1e-5))
        ari_say(
            t,
            " (N = %d ranks): averaged over tp where the sum was wanted, or divided by N before each rank added its "
            "own",
            tp);
    else if (is_near(factor, 2, 1e-5))
        ari_say(t, ": counted twice (a bucket reduced twice, a gradient accumulated over an old one)");
    else if (is_near(factor, 0.5, 1e-5))
        ari_say(t, ": one of two equal contributions is missing, or a division by 2 too many");
    else if (name)
        ari_say(t, ": a sum where the mean was wanted, or the other way round");
    else
        ari_say(
            t, ": one wrong scalar (a divisor, a learning rate, a clipping factor, the softmax scale), not wrong data");
}

/* Every wrong rank has a factor, but not the same one. */
static void say_own_factors(ari_clue *f, const ari_case *c, const double first, const double last)
{
    const ari_difference *d = c->grid.d;
    ari_text t = ari_find(f, ARI_TRACE - 2);
    snprintf(f->value, sizeof f->value, "each rank's a constant times the reference");
    ari_say(&t,
            "each rank has the reference times a constant of its own, from %.6g to %.6g: ", first < last ? first : last,
            first < last ? last : first);
    ari_say(&t, d->pass == 'i' ? "a scale from the shard's size where the shards are not equal"
                               : "each rank divided or clipped by its own norm or count in place of the group's");
}

ar_status ari_detect_factor(ari_clue *f, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const ari_difference *d = c->grid.d;
    const bool few = s->different < 4; /* of one to three values any ratio is constant: only a telling one counts */
    double low = INFINITY, high = -INFINITY;
    int rank = -1;
    for (int r = 0; r < d->ranks; r++) {
        const ari_tally *t = &s->rank[r];
        if (t->different == 0)
            continue;
        const double factor = t->vr / t->rr;
        if (!(t->vv > 0.0 && fabs(factor) > 1e-6 && fabs(factor - 1.0) > 1e-4 && residual(c, r, factor) <= 1e-5))
            return AR_OK;
        low = factor < low ? factor : low;
        high = factor > high ? factor : high;
        rank = rank < 0 ? r : rank;
    }
    char buffer[64];
    if (!is_near(low, high, 1e-5)) {
        if (!few)
            say_own_factors(f, c, low, high);
        return AR_OK;
    }
    const char *name = factor_name(d, low, few ? 1e-6 : 1e-5, buffer, sizeof buffer);
    if (few && !name)
        return AR_OK;
    ari_text t = ari_find(f, name || d->pass == 'i' ? ARI_IDENTITY : ARI_TRACE);
    snprintf(f->value, sizeof f->value, "each %.6g%s%s times the reference", low, name ? " = " : "", name ? name : "");
    say_factor(&t, c, rank, low, name);
    return AR_OK;
}

/* --- zero --------------------------------------------------------------------------------------------------------- */

static void say_all_zero(ari_text *t, const ari_difference *d)
{
    if (d->pass == 'b' && ari_is_norm(d))
        ari_say(t, "the norm's gradient is missing: its dx is zero, so only the residual carries the gradient on");
    else if (d->pass == 'b')
        ari_say(
            t, "no gradient flows through this module: its backward is missing, detached, or a collective in it has no "
               "backward");
    else if (d->pass == 'g')
        ari_say(
            t,
            "this parameter got no gradient: it was not used, was detached, or its gradient was not added or copied "
            "back%s",
            ari_dp_of(d) > 1 ? "; or its bucket was reduced before it was written there" : "");
    else if (d->pass == 'f' && (ari_name_is(d->name) & (ARI_IS_CONTEXT | ARI_IS_PROBS)))
        ari_say(t,
                "heads: no head was computed; a local head count divided by the number of ranks twice can floor to 0");
    else
        ari_say(t, "this value was never written: the buffer is cleared and its producer did not run");
}

static bool is_off(const void *user, int rank)
{
    const ari_survey *s = user;
    return s->rank[rank].different > 0;
}

ar_status ari_detect_zero(ari_clue *f, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const ari_difference *d = c->grid.d;
    if (s->total.zero < s->total.different)
        return AR_OK;
    ari_text t = ari_find(f, ARI_TRACE - 5);
    snprintf(f->value, sizeof f->value, "each zero where the reference is not");
    if (s->wrong_ranks == s->holding_ranks && s->total.kept == 0) {
        say_all_zero(&t, d);
        return AR_OK;
    }
    if (s->wrong_ranks < s->holding_ranks) {
        ari_say(&t, "zeros from ");
        ari_say_ranks(&t, d->ranks, is_off, s);
        ari_say(&t, " alone: its part was not computed, not sent, or not copied back");
        return AR_OK;
    }
    ari_say(&t, "%zu elements were never written, or their contribution was dropped; those around them are right",
            s->different);
    return AR_OK;
}

/* --- another mask ------------------------------------------------------------------------------------------------- */

ar_status ari_detect_mask(ari_clue *f, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const ari_tally *t = &s->total;
    /* Both ways, and not a handful: elements dropped that the reference keeps, and kept that it drops. */
    if (t->zero + t->gained < t->different || t->zero * 20 < t->different || t->gained * 20 < t->different ||
        t->different < 16)
        return AR_OK;
    ari_text text = ari_find(f, ARI_TRACE - 1);
    snprintf(f->value, sizeof f->value, "zeros in other places");
    ari_say(
        &text,
        "another mask: %zu values are zero where the reference is not, %zu the other way round, all others are right; ",
        t->zero, t->gained);
    if (s->disagree > 0)
        ari_say(&text, "dropout in a replicated region needs the same mask on every rank, and the copies differ");
    else if (s->shared > 0)
        ari_say(&text, "the copies agree: a mask from another seed, step or layer");
    else
        ari_say(
            &text,
            "dropout in a sharded region needs the mask of the element's index in the full tensor, not in the shard");
    return AR_OK;
}

/* --- rounding ----------------------------------------------------------------------------------------------------- */

ar_status ari_detect_rounding(ari_clue *f, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    const ari_tally *t = &s->total;
    const double scale = s->max_reference;
    if (t->nan > 0 || !(scale > 0.0))
        return AR_OK;
    /* 2^-18 of the largest value is 64 units in its last place: sums of thousands of terms stay below. */
    if (t->max_difference <= 0x1p-18 * scale) {
        ari_text text = ari_find(f, ARI_TRACE - 10);
        snprintf(f->value, sizeof f->value, "within rounding");
        ari_say(
            &text,
            "rounding: the largest difference is %.1e of the largest value, in no pattern; sums taken in another order "
            "(a ring, atomics, another blocking), a fused multiply-add, or another exp or rsqrt",
            t->max_difference / scale);
        if (s->disagree > 0)
            ari_say(&text, "; even the copies of one value differ");
        return AR_OK;
    }
    if (t->coarse == t->different && t->different >= 16) {
        ari_text text = ari_find(f, ARI_TRACE);
        snprintf(f->value, sizeof f->value, "each of 16-bit precision");
        ari_say(&text,
                "stored in 16 bits on the way: every different value has a mantissa of at most 10 bits and lies within "
                "%.1e of its reference",
                t->max_relative);
    }
    return AR_OK;
}
