/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer's state: what gradients explain of weights, Adam's moments, and what is made of them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/roles.h"

/* --- tensors of a step --------------------------------------------------------------------------------------------- */

const ar_dump_tensor *ari_tensor_of_step(const ar_dump *d, const char *stem, size_t n, const char *kind, int step)
{
    char name[512];
    const int length = step > 1 ? snprintf(name, sizeof name, "%.*s:%s@%d", (int)n, stem, kind, step)
                                : snprintf(name, sizeof name, "%.*s:%s", (int)n, stem, kind);
    return d && length > 0 && (size_t)length < sizeof name ? ar_dump_find(d, name) : NULL;
}

const ar_dump_tensor *ari_weight_before(const ar_dump *d, const char *stem, size_t n, int step)
{
    return step > 1 ? ari_tensor_of_step(d, stem, n, "new", step - 1) : ari_tensor_of_step(d, stem, n, "init", 1);
}

/* --- what gradients explain --------------------------------------------------------------------------------------- */

enum { CHUNK = 1024 };

ar_status ari_doubt_reach(double *reach, const ar_dump *reference, int step)
{
    double x[CHUNK], y[CHUNK];
    *reach = 0.0;
    for (size_t i = 0; i < ar_dump_count(reference); i++) {
        const ar_dump_tensor *t = ar_dump_at(reference, i);
        const ari_order_key key = ari_order_of(t->name, NULL);
        const ar_dump_tensor *before = ari_weight_before(reference, t->name, key.stem, step);
        if (key.pass != 'n' || key.step != step || !before || before->count != t->count)
            continue;
        for (size_t at = 0; at < t->count; at += CHUNK) {
            const size_t n = t->count - at < CHUNK ? t->count - at : CHUNK;
            AR_TRY(ar_dump_read_f64(before, at, n, x));
            AR_TRY(ar_dump_read_f64(t, at, n, y));
            for (size_t k = 0; k < n; k++)
                *reach = fabs(y[k] - x[k]) > *reach && isfinite(y[k] - x[k]) ? fabs(y[k] - x[k]) : *reach;
        }
    }
    return AR_OK;
}

/* The root of a second moment is a norm of the gradients so far, whatever their weights. Each is off by y of its size at
 * most, so that the root s is off by d <= y s, and the bound's d/(s - d) is y/(1 - y) at most. */
ar_status ari_doubt_read(double *beside, const ari_doubt *d, size_t start, size_t n)
{
    double reference[CHUNK], other[CHUNK], y[CHUNK];
    for (size_t at = 0; at < n; at += CHUNK) {
        const size_t here = n - at < CHUNK ? n - at : CHUNK;
        memset(y, 0, sizeof y);
        memset(beside + at, 0, here * sizeof *beside);
        for (int k = 0; k < d->steps; k++) {
            AR_TRY(ar_dump_read_f64(d->grad[k][0], start + at, here, reference));
            AR_TRY(ar_dump_read_f64(d->grad[k][1], start + at, here, other));
            for (size_t i = 0; i < here; i++) {
                const double apart = fabs(other[i] - reference[i]);
                if (apart > 0.0 && isfinite(apart))
                    y[i] = fmax(y[i], apart / fabs(reference[i]));
                beside[at + i] += 2.0 * d->reach[k] * (y[i] < 0.5 ? y[i] / (1.0 - y[i]) : 1.0);
            }
        }
    }
    return AR_OK;
}

/* --- the decay rates ---------------------------------------------------------------------------------------------- */

/* A moment of the reference by the gradient, or its square, and by what it was a step before; NULL tensors: zero. */
static ar_status fit_moment(ari_fit *f, const ar_dump_tensor *now, const ar_dump_tensor *last,
                            const ar_dump_tensor *grad, bool squared)
{
    double m[CHUNK], before[CHUNK] = {0.0}, g[CHUNK];
    for (size_t at = 0; at < grad->count; at += CHUNK) {
        const size_t n = grad->count - at < CHUNK ? grad->count - at : CHUNK;
        AR_TRY(ar_dump_read_f64(grad, at, n, g));
        AR_TRY(ar_dump_read_f64(now, at, n, m));
        if (last)
            AR_TRY(ar_dump_read_f64(last, at, n, before));
        for (size_t i = 0; i < n; i++)
            ari_fit_add(f, m[i], squared ? g[i] * g[i] : g[i], before[i]);
    }
    return AR_OK;
}

/* Of step 1, m = (1 - beta1) x g and v = (1 - beta2) (x g)^2 for the clip factor x: Adam's usual decay rates. */
static void usual_betas(double beta[2], double first, double second)
{
    static const double usual[2][6] = {{0.9, 0.95, 0.8, 0.85, 0.5}, {0.999, 0.95, 0.99, 0.98, 0.9, 0.9999}};
    for (size_t i = 0; i < 30; i++) {
        const double b1 = usual[0][i / 6], b2 = usual[1][i % 6], by = (1.0 - b2) / ((1.0 - b1) * (1.0 - b1));
        if (!ari_is_near(second / (first * first), by, ARI_KNOWN) || first / (1.0 - b1) > 1.0 + ARI_KNOWN)
            continue;
        beta[0] = b1, beta[1] = b2;
        return;
    }
}

/* The decay rates: what the reference's moments keep of those of the step before, or, where they do not tell, those that
 * the run says. */
static ar_status find_betas(double beta[2], const ari_case *c)
{
    static const char *const kinds[] = {"m", "v"};
    const ari_difference *d = c->grid.d;
    const ar_dump *dump = c->known->reference;
    const size_t n = strlen(d->name);
    const ar_dump_tensor *grad = ari_tensor_of_step(dump, d->name, n, "grad", d->step);
    double by_gradient[2], kept[2];
    beta[0] = d->beta1, beta[1] = d->beta2;
    for (int k = 0; k < 2; k++) {
        const ar_dump_tensor *now = ari_tensor_of_step(dump, d->name, n, kinds[k], d->step);
        const ar_dump_tensor *last = d->step > 1 ? ari_tensor_of_step(dump, d->name, n, kinds[k], d->step - 1) : NULL;
        ari_fit f = {0};
        if (!grad || !now || now->count != grad->count || (last ? last->count != grad->count : d->step > 1))
            return AR_OK;
        AR_TRY(fit_moment(&f, now, last, grad, k == 1));
        if (!(ari_fit_two(&by_gradient[k], &kept[k], &f) < ARI_FIT))
            return AR_OK;
    }
    if (d->step == 1)
        usual_betas(beta, by_gradient[0], by_gradient[1]);
    else if (kept[0] > 0.0 && kept[0] < 1.0 && kept[1] > 0.0 && kept[1] < 1.0)
        beta[0] = kept[0], beta[1] = kept[1];
    return AR_OK;
}

/* sqrt(1 - beta2^t)/(1 - beta1^t): what Adam corrects its moments by at step t. */
static double correction(const double beta[2], int t)
{
    return sqrt(1.0 - pow(beta[1], t)) / (1.0 - pow(beta[0], t));
}

/* Of which step Adam's correction would make the update `factor` times the expected; 0: of none. */
static int corrected_as(const double beta[2], int step, double factor)
{
    enum { AHEAD = 4 };
    for (int t = 1; beta[0] > 0.0 && beta[1] > 0.0 && t <= step + AHEAD; t++) {
        if (t != step && ari_is_near(factor, correction(beta, t) / correction(beta, step), 2.0 * ARI_KNOWN))
            return t;
    }
    return 0;
}

/* A first step of SGD with momentum is the gradient, with Nesterov's the gradient and as much of it as the momentum keeps;
 * Adam's second moment says that it is no SGD. */
static void find_nesterov(ari_trace *t, const ari_case *c, double factor)
{
    static const double usual[] = {0.9, 0.95, 0.99};
    const ari_difference *d = c->grid.d;
    const size_t n = strlen(d->name);
    if (d->step != 1 || !ari_tensor_of_step(c->known->other, d->name, n, "m", 1) ||
        ari_tensor_of_step(c->known->other, d->name, n, "v", 1))
        return;
    for (size_t i = 0; i < sizeof usual / sizeof *usual; i++) {
        const bool here = ari_is_near(factor, 1.0 + usual[i], ARI_KNOWN);
        if (!here && !ari_is_near(factor * (1.0 + usual[i]), 1.0, ARI_KNOWN))
            continue;
        t->is |= ARI_IF(TWICE);
        ari_number(t, "momentum", usual[i]);
    }
}

ar_status ari_name_update(ari_trace *t, const ari_case *c, double factor)
{
    const int step = c->grid.d->step;
    double beta[2];
    AR_TRY(find_betas(beta, c));
    const double first = 1.0 - pow(beta[0], step), second = sqrt(1.0 - pow(beta[1], step));
    const bool adam = beta[1] > 0.0 && step > 0;
    const int as = corrected_as(beta, step, factor);
    if (factor == 0.0)
        t->is |= ARI_IF(ZERO);
    else if (as > 0)
        t->is |= ARI_IF(OF_STEP);
    else if (ari_is_near(factor, -1.0, ARI_KNOWN))
        t->is |= ARI_IF(NEGATIVE);
    else if (adam && ari_is_near(factor, first / second, ARI_KNOWN))
        t->is |= ARI_IF(FIRST_MOMENT) | ARI_IF(SECOND_MOMENT);
    else if (adam && ari_is_near(factor, 1.0 / second, ARI_KNOWN))
        t->is |= ARI_IF(SECOND_MOMENT);
    else if (adam && ari_is_near(factor, first, ARI_KNOWN))
        t->is |= ARI_IF(FIRST_MOMENT);
    else
        find_nesterov(t, c, factor);
    ari_count(t, "as", (size_t)as);
    ari_count(t, "step", (size_t)step);
    return AR_OK;
}

/* --- the optimizer's state ---------------------------------------------------------------------------------------- */

/* One parameter's tensors of a step in both dumps, and what they leave of each other: k stands for a run, j for the first
 * or the second moment, which the gradient or its square is added to. */
enum { BEFORE, GRADIENT, FIRST, SECOND, NEW, KINDS };
typedef struct state {
    const ar_dump_tensor *tensor[KINDS][2];
    ari_sample sample[KINDS][2];
    double x[KINDS][2][CHUNK];
    double largest[2];         /* of the second moments */
    ari_fit gradients;         /* the other's by the reference's */
    ari_fit moment[2];         /* [j], the other's by the reference's, the first beside the weight before */
    ari_fit by_gradient[2][2]; /* [k][j], a moment by its gradient */
    ari_fit moved[2];          /* [j], how much larger the other's is, by its gradient, the weight, the moment itself */
    ari_fit update[2];         /* [k], what a weight lost by first/sqrt(second), and by the weight before */
} state;

static ar_status open_state(bool *whole, state *s, const ari_case *c)
{
    static const char *const kinds[] = {"", "grad", "m", "v", "new"};
    const ar_dump *dump[] = {c->known->reference, c->known->other};
    const char *stem = c->grid.d->name;
    *whole = true;
    for (int i = 0; i < KINDS * 2; i++) {
        const int kind = i / 2, step = c->grid.d->step;
        const ar_dump_tensor *t = kind == BEFORE
                                      ? ari_weight_before(dump[i % 2], stem, strlen(stem), step)
                                      : ari_tensor_of_step(dump[i % 2], stem, strlen(stem), kinds[kind], step);
        *whole = *whole && t && t->count == c->full->count && (!c->step || t->parts > 0);
        if (!*whole)
            return AR_OK;
        s->tensor[kind][i % 2] = t;
        if (!c->step)
            continue;
        AR_TRY(ari_sample_init(&s->sample[kind][i % 2], t, c->step));
        s->tensor[kind][i % 2] = &s->sample[kind][i % 2].tensor;
    }
    return AR_OK;
}

static void close_state(state *s)
{
    for (int i = 0; i < KINDS * 2; i++)
        ari_sample_fini(&s->sample[i / 2][i % 2]);
}

static void add_moments(state *s, size_t i)
{
    const double w = s->x[BEFORE][0][i];
    ari_fit_add(&s->gradients, s->x[GRADIENT][1][i], s->x[GRADIENT][0][i], 0.0);
    for (int j = 0; j < 2; j++) {
        const double m = s->x[FIRST + j][0][i], other = s->x[FIRST + j][1][i], g = s->x[GRADIENT][0][i];
        ari_fit_add(&s->moment[j], other, m, j == 0 ? w : 0.0);
        ari_fit_add(&s->moved[j], other - m, j == 0 ? g : g * g, j == 0 ? w : m);
        for (int k = 0; k < 2; k++) {
            const double own = s->x[GRADIENT][k][i];
            ari_fit_add(&s->by_gradient[k][j], s->x[FIRST + j][k][i], j == 0 ? own : own * own, 0.0);
        }
    }
    for (int k = 0; k < 2; k++)
        s->largest[k] = fmax(s->largest[k], s->x[SECOND][k][i]);
}

/* Small gradients, of which Adam's epsilon is a part, say nothing. */
static void add_update(state *s, size_t i)
{
    for (int k = 0; k < 2; k++) {
        const double second = s->x[SECOND][k][i], w = s->x[BEFORE][k][i];
        if (second > 1e-6 * s->largest[k])
            ari_fit_add(&s->update[k], w - s->x[NEW][k][i], s->x[FIRST][k][i] / sqrt(second), w);
    }
}

static ar_status walk_state(state *s, const ari_case *c, void (*add)(state *, size_t))
{
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        for (int i = 0; i < KINDS * 2; i++)
            AR_TRY(ar_dump_read_f64(s->tensor[i / 2][i % 2], c->start + at, n, s->x[i / 2][i % 2]));
        for (size_t i = 0; i < n; i++)
            add(s, i);
    }
    return AR_OK;
}

/* --- moments that are others -------------------------------------------------------------------------------------- */

/* The moments' own factors. */
static ar_status found_moments(ari_trace *t, const ari_case *c, double first, double second)
{
    double beta[2] = {0.0, 0.0};
    if (c->grid.d->step == 1)
        AR_TRY(find_betas(beta, c));
    ari_found(t, ARI_FOUND_STATE, 0);
    if (ari_is_near(second, first * first, 2.0 * ARI_KNOWN)) {
        ari_name_number(t, first, ARI_SEEN);
        t->is = ARI_IF(OF_GRADIENT) | (t->is & (ARI_IF(POWER) | ARI_IF(NEGATIVE)));
    } else if (beta[1] > 0.0 && ari_is_near(first, 1.0 + beta[0], ARI_KNOWN) &&
               ari_is_near(second, 1.0 + beta[1], ARI_KNOWN)) {
        t->is = ARI_IF(TWICE);
    }
    ari_number(t, "first", first);
    ari_number(t, "second", second);
    return AR_OK;
}

/* Moments that have a history: what each step adds to them is the gradient times a number, and its square times that
 * number's; where these alone differ, so does the number. */
static void found_moved(ari_trace *t, const state *s)
{
    double by[2];
    for (int j = 0; j < 2; j++) {
        double besides;
        if (!(ari_fit_two(&by[j], &besides, &s->moved[j]) < ARI_FIT) ||
            fabs(besides) * sqrt(s->moved[j].bb / s->moved[j].yy) > ARI_KNOWN)
            return;
    }
    if (!(by[0] * by[1] > 0.0))
        return;
    ari_found(t, ARI_FOUND_STATE, ARI_IF(OF_GRADIENT) | ARI_IF(OF_STEP));
    ari_number(t, "first", by[0]);
    ari_number(t, "second", by[1]);
}

/* Moments that begin anew in this step are its gradient, or its square, times a number; the reference's are not. */
static void found_lost(ari_trace *t, const state *s)
{
    static const ari_properties which[] = {ARI_IF(FIRST_MOMENT), ARI_IF(SECOND_MOMENT)};
    ari_properties lost = 0;
    double by;
    for (int j = 0; j < 2; j++)
        lost |= ari_fit_one(&by, &s->by_gradient[1][j]) < ARI_FIT && ari_fit_one(&by, &s->by_gradient[0][j]) > ARI_KNOWN
                    ? which[j]
                    : 0;
    if (!lost)
        return;
    ari_found(t, ARI_FOUND_STATE, lost);
    ari_words(t, "which", "%s",
              lost == which[0]   ? "first moment is"
              : lost == which[1] ? "second moment is"
                                 : "moments are");
}

/* Whether the other's first moment has the history of parameter `stem` of the reference: what it has more than that
 * one's moment is a multiple of what its gradient is more than that one's. */
static ar_status has_history_of(bool *has, state *s, const ari_case *c, const char *stem, size_t length)
{
    const int step = c->grid.d->step;
    const ar_dump_tensor *m = ari_tensor_of_step(c->known->reference, stem, length, "m", step);
    const ar_dump_tensor *g = ari_tensor_of_step(c->known->reference, stem, length, "grad", step);
    double x[CHUNK], y[CHUNK], by;
    ari_fit f = {0};
    *has = false;
    if (!g || !ari_same_shape(m, c->full) || !ari_same_shape(g, c->full))
        return AR_OK;
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        AR_TRY(ar_dump_read_f64(m, c->start + at, n, x));
        AR_TRY(ar_dump_read_f64(g, c->start + at, n, y));
        for (int i = 0; i < 2; i++)
            AR_TRY(ar_dump_read_f64(s->tensor[FIRST - i][1], c->start + at, n, s->x[FIRST - i][1]));
        for (size_t i = 0; i < n; i++)
            ari_fit_add(&f, s->x[FIRST][1][i] - x[i], s->x[GRADIENT][1][i] - y[i], 0.0);
    }
    *has = ari_fit_one(&by, &f) < ARI_FIT;
    return AR_OK;
}

static ar_status found_history(ari_trace *t, state *s, const ari_case *c)
{
    const ar_dump *dump = c->known->reference;
    bool has = false;
    for (size_t i = 0; !c->step && i < ar_dump_count(dump) && !has; i++) {
        const char *name = ar_dump_at(dump, i)->name;
        const ari_order_key key = ari_order_of(name, c->path);
        if (key.pass != 'm' || key.step != c->grid.d->step || strncmp(name, c->grid.d->name, key.stem) == 0)
            continue;
        AR_TRY(has_history_of(&has, s, c, name, key.stem));
        if (!has)
            continue;
        ari_found(t, ARI_FOUND_STATE, ARI_IF(EXCHANGED));
        ari_words(t, "other", "%.*s", (int)key.stem, name);
    }
    return AR_OK;
}

/* --- steps with the right moments --------------------------------------------------------------------------------- */

/* The state is the reference's, the update is not. */
static ar_status found_step(ari_trace *t, const ari_case *c, const state *s)
{
    double rate[2], decay[2];
    for (int k = 0; k < 2; k++) {
        if (!(ari_fit_two(&rate[k], &decay[k], &s->update[k]) < 10.0 * ARI_FIT))
            return AR_OK;
    }
    const double factor = rate[1] / rate[0], least = ARI_KNOWN * fmax(fabs(decay[0]), fabs(decay[1]));
    const bool same_decay = fabs(decay[1] - decay[0]) <= fmax(least, ARI_FIT);
    const bool same_rate = ari_is_near(factor, 1.0, ARI_SEEN);
    if (same_rate && !same_decay) {
        ari_found(t, ARI_FOUND_STATE, ARI_IF(OF_BEFORE));
    } else if (!same_rate && fabs(decay[0]) > ARI_FIT && ari_is_near(decay[1] / decay[0], factor, 10.0 * ARI_KNOWN)) {
        ari_found(t, ARI_FOUND_STATE, fabs(factor) < ARI_FIT ? ARI_IF(ZERO) : ARI_IF(ALL));
    } else if (!same_rate && same_decay) {
        ari_found(t, ARI_FOUND_UPDATE, 0);
        AR_TRY(ari_name_update(t, c, factor));
    }
    ari_number(t, "factor", factor);
    ari_number(t, "decay", decay[0]);
    ari_number(t, "other_decay", decay[1]);
    return AR_OK;
}

/* Where the gradients are equal, what became of the moments, or, if they are too, of the step. */
static ar_status compare_states(ari_trace *t, state *s, const ari_case *c)
{
    double factor, none, by[2], decay;
    if (!(ari_fit_one(&factor, &s->gradients) < ARI_FIT) || !ari_is_near(factor, 1.0, ARI_KNOWN))
        return AR_OK;
    const bool first = ari_fit_two(&by[0], &decay, &s->moment[0]) < ARI_FIT;
    const bool second = ari_fit_two(&by[1], &none, &s->moment[1]) < ARI_FIT;
    if (!first || !second)
        found_lost(t, s);
    if (!first && t->kind == ARI_FOUND_NOTHING)
        found_moved(t, s);
    if (!first && t->kind == ARI_FOUND_NOTHING)
        return found_history(t, s, c);
    if (!first || t->kind != ARI_FOUND_NOTHING)
        return AR_OK;
    if (fabs(decay * sqrt(s->moment[0].bb / s->moment[0].yy)) >
        ARI_KNOWN) { /* part of the first moment is the weight */
        ari_found(t, ARI_FOUND_STATE, ARI_IF(OF_WEIGHT));
        ari_number(t, "first", by[0]);
        ari_number(t, "decay", decay);
        return AR_OK;
    }
    if (!second)
        return AR_OK;
    if (!ari_is_near(by[0], 1.0, 2.0 * ARI_SEEN) || !ari_is_near(by[1], 1.0, 4.0 * ARI_SEEN))
        return found_moments(t, c, by[0], by[1]);
    AR_TRY(walk_state(s, c, add_update));
    return found_step(t, c, s);
}

ar_status ari_measure_state(ari_trace *t, const ari_case *c)
{
    state *s = NULL;
    bool whole = false;
    ar_status st = AR_OK;
    if (!c->known->other || c->count < 8)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&s, 1, c->grid.d->name));
    AR_TRY_TO(done, st, open_state(&whole, s, c));
    if (!whole)
        goto done;
    AR_TRY_TO(done, st, walk_state(s, c, add_moments));
    st = compare_states(t, s, c);
done:
    close_state(s);
    free(s);
    return st;
}

/* --- Adam's epsilon ----------------------------------------------------------------------------------------------- */

/* The first step of Adam moves a weight by lr*g/(|g| + eps), and by a decay: of two epsilons of which one is small beside
 * the gradients, (the larger update - s)*|g| is E*s for the smaller update s, but for the decay in s. */
ar_status ari_measure_epsilon(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ar_dump_tensor *grad = ari_tensor_of_step(c->known->reference, d->name, strlen(d->name), "grad", d->step);
    double g[CHUNK], size[2] = {0.0, 0.0}, eps, none;
    ari_fit by_gradient[2] = {{0}}, plain[2] = {{0}};
    if (d->step != 1 || !grad || c->step || grad->count != c->full->count)
        return AR_OK;
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        AR_TRY(ar_dump_read_f64(grad, c->start + at, n, g));
        for (size_t i = 0; i < n; i++) {
            const double w = (double)d->before[at + i], r = (double)c->ref[at + i], v = (double)c->val[at + i];
            if (!ari_off(c, at + i))
                continue;
            size[0] += (r - w) * (r - w), size[1] += (v - w) * (v - w);
            ari_fit_add(&by_gradient[0], (v - r) * fabs(g[i]), r - w, w);
            ari_fit_add(&by_gradient[1], (r - v) * fabs(g[i]), v - w, w);
            ari_fit_add(&plain[0], v - r, r - w, w);
            ari_fit_add(&plain[1], r - v, v - w, w);
        }
    }
    const int smaller = size[1] < size[0];
    const double left = ari_fit_two(&eps, &none, &by_gradient[smaller]),
                 of_factor = ari_fit_two(&none, &none, &plain[smaller]);
    if (!(left < 1e-3) || !(left < 0.01 * of_factor) || !(eps > 0.0))
        return AR_OK;
    ari_found(t, ARI_FOUND_EPSILON, 0);
    ari_number(t, "epsilon", eps);
    ari_words(t, "where", smaller ? "here" : "in the reference");
    return AR_OK;
}
