/* SPDX-License-Identifier: Apache-2.0 */
/* Label smoothing and z-loss, from the gradient of the logits or the loss alone. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/loss.h"

/* A target token's row of the gradient of logits is, with p = softmax(z) and 1 at y,
 *
 *     d = s (p - 1_y) + s e (1_y - 1/V) + s c 2 lse p,    s = 1/T:
 *
 * three numbers that least squares give. */
enum { NUMBERS = 3, EQUATIONS = (NUMBERS + 1) * (NUMBERS + 1), SURE = 10 }; /* SURE: standard errors */

static const double z_rounding = 1e-8; /* of a weight of squares of lse, which are some tens */

/* Unknown unless the gradient has this form to 1 %, as it has not with other scales of rows. A number's uncertainty
 * follows from the residual per cell and the inverse's diagonal. */
static void solve(ari_loss_extra *o, const double *equations, size_t cells)
{
    double m[EQUATIONS], number[NUMBERS], inverse[NUMBERS];
    memcpy(m, equations, sizeof m);
    const double left = ari_equations_solve(number, m, NUMBERS);
    if (left == HUGE_VAL)
        return;
    o->known = number[0] > 0.0 && left <= ARI_UNFITTED * equations[EQUATIONS - 1];
    for (size_t k = 1; k < NUMBERS; k++) {
        memcpy(m, equations, sizeof m);
        for (size_t i = 0; i < NUMBERS; i++)
            m[i * (NUMBERS + 1) + NUMBERS] = i == k ? 1.0 : 0.0;
        const double unsure = ari_equations_solve(inverse, m, NUMBERS) < HUGE_VAL
                                  ? SURE * sqrt(left / (double)cells * inverse[k]) / number[0]
                                  : HUGE_VAL;
        o->is[k - 1] = number[k] / number[0];
        o->unsure[k - 1] = unsure + (k - 1 == ARI_SMOOTHING ? ARI_SUMS : z_rounding);
    }
}

ar_status ari_loss_extra_read(ari_loss_side *s, const ari_losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = ari_loss_tensor(l->c, dump, 'b');
    const size_t n = l->vocabulary;
    double m[EQUATIONS] = {0.0};
    float *d = NULL;
    if (!t || t->shape[0] != l->samples || t->shape[1] != l->seq || t->shape[2] != n || s->targets < 2)
        return AR_OK;
    AR_TRY(ARI_TAKE(&d, l->c->arena, n, t->name));
    for (size_t i = 0; i < l->tokens; i++) {
        size_t y = 0; /* the one logit that a step is to raise */
        AR_TRY(ar_dump_read_f32(t, i * n, n, d));
        for (size_t k = 1; k < n; k++)
            y = d[k] < d[y] ? k : y;
        for (size_t k = 0; k < n && s->counts[i]; k++) {
            const double p = exp((double)s->logits[i * n + k] - s->lse[i]), one = k == y ? 1.0 : 0.0;
            const double x[NUMBERS + 1] = {p - one, one - 1.0 / (double)n, 2.0 * s->lse[i] * p, (double)d[k]};
            ari_equations_add(m, x, NUMBERS);
        }
    }
    solve(&s->options, m, s->targets * n);
    return AR_OK;
}

/* Rounds x to a number that someone would write (0, 0.1, 0.15, 0.0005), if it is within `unsure` of one; false: it is
 * not, or may well be by accident. */
static bool round_option(double *x, double unsure)
{
    if (fabs(*x) <= unsure) {
        *x = 0.0;
        return true;
    }
    const double step = 0.5 * pow(10.0, floor(log10(fabs(*x) + unsure))), near = step * nearbyint(*x / step);
    const bool is = fabs(*x - near) <= unsure && unsure <= 0.04 * step;
    *x = is ? near : *x;
    return is;
}

/* Sums over the targets, whose labels are the next ids, divided by their number: the cross-entropy's, and per[] what
 * smoothing and z-loss add to it for 1 of each. */
static double terms_of(double *per, const ari_losses *l, const ari_loss_side *s)
{
    double entropy = per[ARI_SMOOTHING] = per[ARI_Z_LOSS] = 0.0;
    for (size_t i = 0; i + 1 < l->tokens; i++) {
        const float *row = s->logits + i * l->vocabulary;
        double mean = 0.0;
        for (size_t k = 0; s->counts[i] && k < l->vocabulary; k++)
            mean += (double)row[k] / (double)l->vocabulary;
        if (!s->counts[i])
            continue;
        entropy += ari_loss_entropy(l, s, i, l->ids[i + 1]) / (double)s->targets;
        per[ARI_SMOOTHING] += ((double)row[l->ids[i + 1]] - mean) / (double)s->targets;
        per[ARI_Z_LOSS] += s->lse[i] * s->lse[i] / (double)s->targets;
    }
    return entropy;
}

/* The loss alone is one number for two unknowns: takes the one that is a round number by itself, if the other is not.
 * With a gradient: tests that the loss follows from its e and c. */
void ari_loss_extra_fit(ari_loss_side *s, const ari_losses *l)
{
    ari_loss_extra *o = &s->options;
    double per[ARI_LOSS_EXTRAS];
    bool last = s->targets == 0, is[ARI_LOSS_EXTRAS]; /* last: of a sample, which has no next id */
    for (size_t i = 1; i <= l->samples; i++)
        last = last || s->counts[i * l->seq - 1];
    if (last) {
        o->known = false;
        return;
    }
    double more = s->value - terms_of(per, l, s), off = 0.0;
    const double unsure = (ARI_OF_A_MEAN + 0.1 * l->c->relative) * fabs(s->value);
    const bool plain = fabs(more) <= unsure;
    for (size_t k = 0; k < ARI_LOSS_EXTRAS && o->known; k++) {
        off += o->unsure[k] * fabs(per[k]);
        more -= o->is[k] * per[k];
    }
    if (o->known) {
        o->known = fabs(more) <= 10.0 * unsure + off;
        return;
    }
    for (size_t k = 0; k < ARI_LOSS_EXTRAS; k++) {
        o->is[k] = more / per[k];
        is[k] = round_option(&o->is[k], unsure / fabs(per[k])) && o->is[k] >= 0.0 && o->is[k] < 1.0;
        o->is[k] = !plain && is[k] ? o->is[k] : 0.0;
    }
    o->known = plain || is[ARI_SMOOTHING] != is[ARI_Z_LOSS];
}

void ari_loss_extra_of_all(ari_trace *t, const ari_losses *l)
{
    const ari_loss_side *ref = &l->of[0], *other = &l->of[1];
    const ari_loss_extra *o = &ref->options;
    const double unsure = 10.0 * (ARI_OF_A_MEAN + 0.1 * l->c->relative);
    double per[ARI_LOSS_EXTRAS], loss;
    if (!o->known || !(o->is[ARI_Z_LOSS] > 0.0))
        return;
    loss = terms_of(per, l, ref) + o->is[ARI_SMOOTHING] * per[ARI_SMOOTHING];
    for (size_t i = 0; i < l->tokens; i++)
        loss += o->is[ARI_Z_LOSS] * other->lse[i] * other->lse[i] / (double)ref->targets;
    if (!ari_is_near(other->value, loss, unsure) || ari_is_near(ref->value, loss, unsure))
        return;
    ARI_FINDING(t, ARI_FOUND_LOSS_OPTIONS, ARI_IF(LOG) | ARI_IF(TOKENS), {"z", .number = o->is[ARI_Z_LOSS]},
                {"targets", .count = ref->targets}, {"tokens", .count = l->tokens});
}

void ari_loss_extra_compare(ari_trace *t, ari_losses *l)
{
    static const char *const facts[2][ARI_LOSS_EXTRAS] = {{"smoothing_there", "z_there"}, {"smoothing", "z"}};
    static const ari_properties flags[] = {ARI_IF(FRACTION), ARI_IF(LOG)};
    ari_properties differ = 0;
    for (size_t k = 0; k < ARI_LOSS_EXTRAS; k++) {
        const ari_loss_extra *ref = &l->of[0].options, *other = &l->of[1].options;
        differ |= fabs(ref->is[k] - other->is[k]) > ref->unsure[k] + other->unsure[k] ? flags[k] : 0;
    }
    if (!l->of[0].options.known || !l->of[1].options.known || !differ)
        return;
    ari_trace_set(t, ARI_FOUND_LOSS_OPTIONS, differ);
    for (size_t i = 0; i < 2 * (size_t)ARI_LOSS_EXTRAS; i++) {
        ari_loss_extra *o = &l->of[i / 2].options;
        round_option(&o->is[i % 2], o->unsure[i % 2]);
        ARI_FACTS(t, {facts[i / 2][i % 2], .number = o->is[i % 2]});
    }
}
