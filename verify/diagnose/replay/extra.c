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

/* Adds a token's row of the gradient; returns its label, the one logit that a step is to raise. */
static size_t add_row(double *m, const ari_losses *l, const ari_loss_side *s, size_t i, const double *d)
{
    const size_t n = l->vocabulary;
    size_t y = 0;
    for (size_t k = 1; k < n; k++)
        y = d[k] < d[y] ? k : y;
    for (size_t k = 0; k < n; k++) {
        const double p = exp((double)s->logits[i * n + k] - s->lse[i]), one = k == y ? 1.0 : 0.0;
        const double x[NUMBERS + 1] = {p - one, one - 1.0 / (double)n, 2.0 * s->lse[i] * p, d[k]};
        ari_equations_add(m, x, NUMBERS);
    }
    return y;
}

ar_status ari_loss_extra_read(ari_loss_side *s, const ari_losses *l, const ar_dump *dump)
{
    const ar_dump_tensor *t = ari_loss_tensor(l->c, dump, 'b');
    const size_t n = l->vocabulary;
    double m[EQUATIONS] = {0.0}, *d = NULL;
    float *read = NULL;
    if (!t || t->shape[0] != l->samples || t->shape[1] != l->seq || t->shape[2] != n || s->targets < 2)
        return AR_OK;
    AR_TRY(ARI_TAKE(&d, l->c->arena, n, t->name));
    AR_TRY(ARI_TAKE(&read, l->c->arena, n, t->name));
    for (size_t i = 0; i < l->tokens; i++) {
        AR_TRY(ar_dump_read_f32(t, i * n, n, read));
        for (size_t k = 0; k < n; k++)
            d[k] = (double)read[k];
        if (s->counts[i])
            add_row(m, l, s, i, d);
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

/* --- a classifier ------------------------------------------------------------------------------------------------- */

enum { MOST_CLASSES = 64, MOST_READ = 1 << 20 };

/* A head of so few classes that their gradient d follows from that of what it reads, x = d W, by least squares. */
typedef struct head {
    const ar_dump_tensor *y, *w;
    const float *weight; /* [classes][width] */
    size_t samples, classes, width;
    double *equations, *d; /* [(classes + 1)^2], [classes] */
} head;

/* Fills one side from a dump; *held: it has logits and gradients, which are those of the same labels as l->ids. Samples
 * are tokens of one row, which has one more without a label. */
static ar_status read_classes(ari_loss_side *s, bool *held, ari_losses *l, const head *h, const ar_dump *dump,
                              bool first)
{
    const size_t stem = ari_order_of(h->y->name, NULL).stem, n = h->classes;
    const ar_dump_tensor *y = ari_find_readable(dump, h->y->name),
                         *dx = ari_tensor_of_step(dump, h->y->name, stem, "bwd", l->c->own.step);
    double m[EQUATIONS] = {0.0};
    float *x = NULL;
    *held = *held && y && dx && y->count == h->samples * n && dx->count == h->samples * h->width;
    if (!*held)
        return AR_OK;
    AR_TRY(ari_read_values(&s->logits, y, l->c->arena));
    AR_TRY(ari_read_values(&x, dx, l->c->arena));
    AR_TRY(ARI_TAKE(&s->lse, l->c->arena, l->tokens, y->name));
    AR_TRY(ARI_TAKE(&s->counts, l->c->arena, l->tokens, y->name));
    s->targets = h->samples;
    for (size_t i = 0; i < h->samples; i++) {
        double terms[MOST_CLASSES + 1];
        memset(h->equations, 0, (n + 1) * (n + 1) * sizeof *h->equations);
        for (size_t k = 0; k < h->width; k++) {
            for (size_t c = 0; c < n; c++)
                terms[c] = (double)h->weight[c * h->width + k];
            terms[n] = (double)x[i * h->width + k];
            ari_equations_add(h->equations, terms, n);
        }
        if (!(ari_equations_solve(h->d, h->equations, n) < HUGE_VAL))
            *held = false;
        for (size_t c = 0; c < n; c++)
            terms[c] = (double)s->logits[i * n + c];
        s->lse[i] = ari_softmax(terms, terms, n);
        s->counts[i] = true;
        const size_t label = add_row(m, l, s, i, h->d);
        *held = *held && (first || label == l->ids[i + 1]);
        l->ids[i + 1] = label;
    }
    solve(&s->options, m, h->samples * n);
    return AR_OK;
}

static ar_status compare_classes(ari_trace *t, const ari_case *c, head *h)
{
    ari_losses l = {.c = c, .samples = 1, .seq = h->samples + 1, .vocabulary = h->classes, .tokens = h->samples + 1};
    float *weight = NULL;
    bool held = true;
    AR_TRY(ari_read_values(&weight, h->w, c->arena));
    h->weight = weight;
    AR_TRY(ARI_TAKE(&h->equations, c->arena, (h->classes + 1) * (h->classes + 1), h->y->name));
    AR_TRY(ARI_TAKE(&h->d, c->arena, h->classes, h->y->name));
    AR_TRY(ARI_TAKE(&l.ids, c->arena, l.tokens, h->y->name));
    for (int k = 0; k < 2; k++) {
        l.of[k].value = (double)(k == 0 ? c->ref : c->val)[0];
        AR_TRY(read_classes(&l.of[k], &held, &l, h, k == 0 ? c->known->reference : c->known->other, k == 0));
        if (held)
            ari_loss_extra_fit(&l.of[k], &l);
    }
    if (held)
        ari_loss_extra_compare(t, &l);
    return AR_OK;
}

ar_status ari_loss_classes_compare(ari_trace *t, const ari_case *c)
{
    const ar_dump *dump = c->known->reference;
    for (ari_walk v = ari_walk_of(dump, NULL, "f", c->own.step); t->kind == ARI_FOUND_NOTHING && ari_walk_next(&v);) {
        head h = {.y = v.t};
        ari_walk w = ari_replay_weights(c, dump);
        if (v.t->ndim != 2 || v.t->shape[1] < 2 || v.t->shape[1] > MOST_CLASSES || v.t->shape[0] < 2)
            continue;
        while (ari_walk_next(&w) && !h.w)
            h.w = w.key.stem == v.key.stem + strlen(".weight") && memcmp(w.t->name, v.t->name, v.key.stem) == 0 ? w.t
                                                                                                                : NULL;
        h.samples = v.t->shape[0], h.classes = v.t->shape[1];
        h.width = h.w && h.w->ndim == 2 && h.w->shape[0] == h.classes ? h.w->shape[1] : 0;
        if (h.width > h.classes && h.samples < MOST_READ / h.width / h.classes / h.classes)
            AR_TRY(compare_classes(t, c, &h));
    }
    return AR_OK;
}
