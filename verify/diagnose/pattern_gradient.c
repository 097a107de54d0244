/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of parameters that are whole and wrong: how much of the reference is in them, and what is not. */
#include "verify/diagnose/pattern_impl.h"

double ari_cosine(const ari_tally *t)
{
    return t->vr / sqrt(t->vv * t->rr);
}

/* --- a bias ------------------------------------------------------------------------------------------------------- */

/* What the local gradients look like if element t stands for token t. */
typedef struct per_token {
    bool ends;      /* on every rank zero from element `end` on, and the reference is not */
    bool last_only; /* zero exactly at the last token of each sample, which predicts nothing */
    size_t end;
} per_token;

static bool zero_at_last_tokens(const ari_difference *d, int r)
{
    const size_t n = d->copy[r].shape[0];
    if (d->seq < 2 || n < d->seq)
        return false;
    for (size_t i = 0; i < n; i++) {
        if ((d->copy[r].local[i] == 0.0f) != (i % d->seq == d->seq - 1))
            return false;
    }
    return true;
}

static per_token look_per_token(const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    per_token p = {.ends = true, .last_only = true, .end = SIZE_MAX};
    for (int r = 0; r < d->ranks; r++) {
        if (c->survey.rank[r].held == 0)
            continue;
        size_t n = d->copy[r].shape[0];
        p.last_only = p.last_only && zero_at_last_tokens(d, r);
        while (n > 0 && d->copy[r].local[n - 1] == 0.0f)
            n--;
        /* A handful of zeros at the end is no evidence. */
        p.ends = p.ends && n > 0 && n + 8 <= d->copy[r].shape[0] && (p.end == SIZE_MAX || p.end == n);
        p.end = n;
    }
    return p;
}

/* Tokens that go through a rank at once: of all samples, of a data-parallel rank's, or of a micro-batch. The last token
 * has no target, so that its own zero belongs to the tail. */
static bool ends_at_tokens(const ari_difference *d, size_t end, size_t *tokens)
{
    const size_t dp = (size_t)ari_dp_of(d), micro = d->micro_batches > 1 ? (size_t)d->micro_batches : 1;
    const size_t of_rank = (d->batch + dp - 1) / dp, samples[] = {d->batch, of_rank, (of_rank + micro - 1) / micro};
    for (size_t i = 0; i < 3; i++) {
        *tokens = samples[i] * d->seq;
        if (*tokens > 0 && (end == *tokens || end + 1 == *tokens))
            return true;
    }
    return false;
}

ar_status ari_detect_bias(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    size_t tokens = 0;
    if (d->pass != 'g' || d->ndim != 1 || !ari_leaf_has(d, "bias") || all->kept * 10 > all->held ||
        all->different < 16 || !(fabs(ari_cosine(all)) < 0.7))
        return AR_OK;
    const per_token p = look_per_token(c);
    const bool exact = p.ends && ends_at_tokens(d, p.end, &tokens);
    if (d->hidden && !exact && !p.last_only && !p.ends) /* without ranks a part of a sum looks the same */
        return AR_OK;
    ari_text t = ari_find(f, exact || p.last_only ? ARI_TRACE + 5 : ARI_SHAPE);
    ari_say(&t, "a bias gradient summed over the wrong axis: it is unrelated to the reference (cosine %.2f)",
            ari_cosine(all));
    if (p.last_only)
        ari_say(&t,
                ", and zero at elements %zu, %zu, ... alone, where the last tokens of the samples stand, which predict "
                "nothing: element t holds token t's sum over features",
                d->seq - 1, 2 * d->seq - 1);
    else if (exact)
        ari_say(
            &t,
            ", and only the first %zu elements are written, one for each of the %zu tokens that a rank has at once: "
            "features were summed in place of tokens",
            p.end, tokens);
    else if (p.ends)
        ari_say(&t, ", and zero from element %zu on, as if an element were a token", p.end);
    else
        ari_say(&t, "; a bias gradient sums dY over all tokens of all samples, one sum a feature");
    return AR_OK;
}

/* --- a weight ----------------------------------------------------------------------------------------------------- */

/* A row-parallel layer reads x [tokens, in/N] and writes y [tokens, out]. If y was put where x lay, the tokens that it
 * did not reach are right, a share of 1 - out/(in/N); 0 if this is not such a weight or nothing is left. */
static double share_after_overwriting(const ari_difference *d, size_t *out, size_t *in)
{
    const size_t *local = d->copy[0].shape;
    if (d->ndim != 2 || d->copy[0].layout->nbox != 1)
        return 0.0;
    const int split = local[0] < d->shape[0] ? 0 : 1; /* [in, out] or [out, in] */
    *out = d->shape[1 - split];
    *in = local[split];
    return local[split] < d->shape[split] && *out < *in ? 1.0 - (double)*out / (double)*in : 0.0;
}

/* How many times too large or too small: log of the ratio, without sign. */
static double distance(double share, double expected)
{
    return expected > 0.0 ? fabs(log(share / expected)) : HUGE_VAL;
}

static void say_overwritten(ari_text *t, const ari_difference *d, double angle, double share, double samples)
{
    size_t out = 0, in = 0;
    (void)share_after_overwriting(d, &out, &in);
    ari_say(t,
            "the saved input was overwritten in part: %.3g of the reference is left in the gradient (cosine %.2f), "
            "about 1 - "
            "%zu/%zu, as when a reduction in place writes %zu outputs a token over the %zu inputs that the backward "
            "pass needs",
            share, angle, out, in, out, in);
    if (samples < log(1.25))
        ari_say(t, "; or one of %zu samples counted alone", d->batch);
}

/* Between its forward and its backward pass other micro-batches go forward through a layer, and it keeps an input for
 * each. */
static bool keeps_several_inputs(const ari_difference *d)
{
    return d->forward_first && d->micro_batches > 1 && d->ndim == 2;
}

static void say_other_input(ari_clue *f, double angle, double share)
{
    ari_text t = ari_find(f, ARI_STATISTIC + 5);
    ari_say(&t,
            "the saved input of another micro-batch: the gradient points the reference's way (cosine %.2f, its share "
            "of it is %.3g), but is not a part of its sum; all micro-batches went forward before the first went back, "
            "so each needs its own saved input, and a later forward pass has overwritten it",
            angle, share);
}

static void say_missing(ari_text *t, const ari_case *c, double angle, double share, double samples, double overwritten)
{
    const ari_difference *d = c->grid.d;
    const double n = d->ranks;
    size_t out = 0, in = 0;
    ari_say(
        t,
        "a part of the sum is missing: the gradient points the reference's way (cosine %.2f), its share of it is %.3g",
        angle, share);
    if (d->micro_batches > 1 && !d->forward_first && distance(share, 1.0 / d->micro_batches) < log(1.3))
        ari_say(t,
                ", about 1/%d: as if one of %d micro-batches counted; each one's gradients are added to those of the "
                "ones before, not written over them",
                d->micro_batches, d->micro_batches);
    else if (samples < log(1.5)) /* samples differ, and this still tells 1/8 from 1/2 */
        ari_say(t,
                ", about 1/%zu: as if one of %zu samples counted; leading dimensions not flattened, or the last "
                "micro-batch alone%s",
                d->batch, d->batch, keeps_several_inputs(d) ? ", or its saved input used for all" : "");
    else if (c->survey.shared == c->grid.count && n > 1 && distance(share, 1 / n) < log(1.5))
        ari_say(t, ", about 1/%d: what one of %d ranks contributes; a reduction is missing", d->ranks, d->ranks);
    else if (d->hidden)
        ari_say(
            t, ": of the ranks, samples, micro-batches or uses of a tied weight some are left out (not reduced over tp "
               "or dp, leading dimensions not flattened, overwritten in place of added)");
    else if (d->batch > 1)
        ari_say(
            t,
            " (one of %zu samples is about %.3g): leading dimensions not flattened, or tokens, a micro-batch or one of "
            "two uses of a tied weight left out",
            d->batch, 1 / (double)d->batch);
    else
        ari_say(t, ": tokens, a micro-batch or one of two uses of a tied weight are left out");
    if (overwritten < log(1.25) && share_after_overwriting(d, &out, &in) > 0.0)
        ari_say(t, "; or, as it is also about 1 - %zu/%zu, outputs written over a saved input", out, in);
}

static void say_part(ari_clue *f, const ari_case *c, double angle, double share)
{
    const ari_difference *d = c->grid.d;
    /* What samples leave out of a sum is at worst unrelated to what they leave in: then cosine^2 = share, and larger if
     * samples agree. A smaller one means that something foreign was added. */
    const bool foreign = angle * angle < 0.8 * share;
    size_t out = 0, in = 0;
    const double overwritten = distance(share, share_after_overwriting(d, &out, &in));
    const double samples = d->batch > 1 ? distance(share, 1 / (double)d->batch) : HUGE_VAL;
    ari_text t = ari_find(f, ARI_STATISTIC + 5);
    if (overwritten < log(1.4) && (foreign || overwritten < samples))
        say_overwritten(&t, d, angle, share, foreign ? HUGE_VAL : samples);
    else if (foreign) {
        ari_say(&t,
                "%.3g of the reference is in the gradient (cosine %.2f), and something foreign: part of the saved "
                "input or of dY was overwritten, in place or by a reused buffer",
                share, angle);
        if (d->micro_batches > 1)
            ari_say(&t, ", or by the forward pass of another micro-batch before this one's backward");
    } else
        say_missing(&t, c, angle, share, samples, overwritten);
}

ar_status ari_detect_gradient(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    if (d->pass != 'g' || all->different < 64 || all->kept * 10 > all->held)
        return AR_OK;
    const double angle = ari_cosine(all), share = all->vr / all->rr;
    /* A part of a sum, as in say_part; with other samples' inputs the foreign is alike, and less of it is enough. */
    const bool part = share < 0.9 && angle * angle >= 0.91 * share;
    if (keeps_several_inputs(d) && angle >= 0.2 && share > 0.0 && share < 2.0 && !part)
        say_other_input(f, angle, share);
    else if (angle >= 0.2 && share > 0.0 && share < 0.9)
        say_part(f, c, angle, share);
    else if (fabs(angle) < 0.2) {
        ari_text t = ari_find(f, ARI_STATISTIC);
        ari_say(&t,
                "computed from other data: the gradient is unrelated to the reference (cosine %.3f, size %.3g of it); "
                "if dY and this module's dX are right, then the saved input is not: overwritten in place by a "
                "reduction or by a second forward, or released too early%s",
                angle, sqrt(all->vv / all->rr),
                ari_dp_of(d) > 1 ? "; or its bucket was filled anew while it was being reduced" : "");
    }
    return AR_OK;
}
