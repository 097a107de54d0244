/* SPDX-License-Identifier: Apache-2.0 */
/* Norms computed again from their input with one fault. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/float_bits.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/search.h"

/* --- a norm computed again ---------------------------------------------------------------------------------------- */

enum { FEWEST_ROWS = 4, MOST_LISTED = 16 };
/* The tolerance of numbers taken from single features. */
static const double hundredth = 1e-2;

/* A norm of a row: x = the sum of some tensors, y = (x - mean)/sqrt(mean of squares + eps)*gain + shift. */
typedef struct recipe {
    ari_terms in;
    double centred;       /* 1: the mean is subtracted */
    double plus, less;    /* what is added to the gain; subtracted from the features that squares are divided by */
    double bare, raw;     /* 1: no gain; no norm */
    double cut;           /* 1: the gain is rounded to bf16, with what is added to it */
    double eps, after;    /* after: all terms but the last are added to its norm, times this; 0: they are in it */
    ari_properties flags; /* of the fault that this recipe is */
} recipe;

/* Numbers of a recipe that are 0 or 1, and may be the other. */
static const struct {
    size_t at;
    ari_properties flags;
} switches[] = {{offsetof(recipe, centred), ARI_IF(SHIFT)}, {offsetof(recipe, plus), ARI_IF(ONE)},
                {offsetof(recipe, bare), ARI_IF(ZERO)},     {offsetof(recipe, cut), ARI_IF(CUT)},
                {offsetof(recipe, raw), ARI_IF(ALL)},       {offsetof(recipe, less), ARI_IF(ROOT)}};
enum { SWITCHES = sizeof switches / sizeof *switches };

typedef struct norm {
    const ari_case *c;
    ari_probe p;
    float *gain, *shift; /* [cols]; zero if there is none */
    ari_near near;
    ari_products *of;         /* [tokens] */
    double *y;                /* [cols] */
    double allowed;           /* share of squares that an input may leave: small compared to the differences */
    recipe list[MOST_LISTED]; /* the reference's, then each with one fault */
    size_t n;
} norm;

/* Vectors after the near ones in the products: an input of ones; the rows without their gain, or without gain + 1. */
enum { ONES, REFERENCE, REFERENCE_PLUS, OTHER, OTHER_PLUS };

ar_status ari_norm_parameters(float **gain, float **shift, bool *found, const ari_case *c)
{
    const ar_dump *dumps[] = {c->known->other, c->known->reference};
    const char *own = c->d->name;
    const size_t stem = strlen(own), cols = c->grid.cols;
    AR_TRY(ARI_TAKE(gain, c->arena, cols, own));
    AR_TRY(ARI_TAKE(shift, c->arena, cols, own));
    for (size_t i = 0; i < cols; i++)
        (*gain)[i] = 1.0f;
    for (size_t k = 0; k < 2; k++) { /* the reference's last, which stays */
        for (ari_walk w = ari_replay_weights(c, dumps[k]); ari_walk_next(&w);) {
            if (w.t->count != cols || w.t->ndim != 1 || !ari_is_part_of(&w.key, own, stem))
                continue;
            const bool shifts = w.t->name[stem + 1] == 'b'; /* bias, beta; else weight, gain, gamma, scale */
            *found = *found || !shifts;
            AR_TRY(ar_dump_read_f32(w.t, 0, cols, shifts ? *shift : *gain));
        }
    }
    return AR_OK;
}

static const float *row_of(const norm *n, size_t which, size_t k)
{
    return n->near.x + (which * n->p.tokens + k) * n->near.width;
}

/* The factor of a feature. */
static double gain_of(const norm *n, const recipe *r, size_t i)
{
    const double gain = r->bare != 0.0 ? 1.0 : (double)n->gain[i] + r->plus;
    return r->cut != 0.0 ? (double)ari_f32_of_bf16(ari_bf16_of_f32((float)gain)) : gain;
}

static double without(const norm *n, const float *row, size_t i, double plus)
{
    return ((double)row[i] - (double)n->shift[i]) / ((double)n->gain[i] + plus);
}

static void multiply_rows(norm *n)
{
    const size_t at = n->near.n;
    for (size_t k = 0; k < n->p.tokens; k++) {
        for (size_t i = 0; i < n->near.width; i++) {
            double x[ARI_MOST_VECTORS] = {0.0};
            x[at + ONES] = 1.0;
            for (size_t plus = 0; plus < 2; plus++) {
                x[at + REFERENCE + plus] = without(n, n->p.ref[k], i, (double)plus);
                x[at + OTHER + plus] = without(n, n->p.val[k], i, (double)plus);
            }
            ari_near_multiply(&n->of[k], &n->near, n->p.tokens, k, i, x, OTHER_PLUS + 1);
        }
    }
}

/* --- what it computes --------------------------------------------------------------------------------------------- */

/* Element i of the terms [from, to). */
static double sum_of(const norm *n, const recipe *r, size_t k, size_t i, size_t from, size_t to)
{
    double sum = 0.0;
    for (size_t term = from; term < to; term++)
        sum += r->in.times[term] * (double)row_of(n, r->in.of[term], k)[i];
    return sum;
}

/* The input of a row, less its mean where that is subtracted; its mean of squares. */
static double input_of(double *x, const norm *n, const recipe *r, size_t k)
{
    const size_t cols = n->near.width;
    double mean = 0.0, square = 0.0;
    for (size_t i = 0; i < cols; i++) {
        x[i] = sum_of(n, r, k, i, r->after != 0.0 ? r->in.terms - 1 : 0, r->in.terms);
        mean += x[i] / (double)cols;
    }
    for (size_t i = 0; i < cols; i++) {
        x[i] -= r->centred * mean;
        square += x[i] * x[i] / ((double)cols - r->less);
    }
    return square;
}

static void put_recipe(ari_probe *p, void *of, size_t candidate)
{
    norm *n = of;
    const recipe *r = &n->list[candidate];
    for (size_t k = 0; k < p->tokens; k++) {
        const double scale = 1.0 / sqrt(input_of(n->y, n, r, k) + r->eps);
        for (size_t i = 0; i < n->near.width && r->raw == 0.0; i++) {
            n->y[i] *= scale * gain_of(n, r, i);
            n->y[i] += (double)n->shift[i];
            n->y[i] += r->after != 0.0 ? r->after * sum_of(n, r, k, i, 0, r->in.terms - 1) : 0.0;
        }
        ari_probe_put(p, k, n->y);
    }
}

/* The epsilon that gives the rows: mean of squares + eps is x^2/z^2. *apart: the rows' contradiction, at least their
 * uncertainty; *times: the mean of squares with the recipe's epsilon as a multiple of its own, on average. */
static double epsilon_of(norm *n, const recipe *r, const float *const *data, double *apart, double *times)
{
    const double cols = (double)n->near.width;
    double low = HUGE_VAL, high = -HUGE_VAL, unsure = 0.0;
    *times = 0.0;
    for (size_t k = 0; k < n->p.tokens; k++) {
        const double square = input_of(n->y, n, r, k);
        double xz = 0.0, zz = 0.0;
        for (size_t i = 0; i < n->near.width; i++) {
            const double z = without(n, data[k], i, r->plus);
            xz += n->y[i] * z;
            zz += z * z;
        }
        const double under = pow(square * cols / xz, 2.0);
        *times += (under - r->eps) / square / (double)n->p.tokens;
        low = fmin(low, under - square);
        high = fmax(high, under - square);
        unsure = fmax(unsure, under * (2.0 * ARI_OF_A_MEAN + n->c->relative + 2.0 * n->c->absolute / sqrt(zz / cols)));
    }
    *apart = fmax(high - low, 2.0 * unsure);
    return 0.5 * (low + high);
}

/* The tensors near by, each times a number, that give the rows of the reference or of the other, sharing terms with
 * `like`. */
static ari_terms find_input(const norm *n, const recipe *r, size_t y, const ari_terms *like)
{
    const size_t at = n->near.n;
    ari_terms s;
    ari_terms_find(&s, n->of, n->p.tokens, at + y + (r->plus > 0.0), r->centred != 0.0 ? at + ONES : SIZE_MAX, at,
                   ARI_MOST_TERMS, n->allowed, like);
    return s;
}

/* The simplest norm that is about as near to the reference as any; *here: what the other's rows are such a norm of. */
static bool find_base(norm *n, ari_terms *here)
{
    recipe *base = &n->list[0];
    double apart, times, exact = HUGE_VAL;
    *base = (recipe){.in.left = HUGE_VAL};
    for (int way = 0; way < 4; way++) {
        recipe own = {.centred = way % 2, .plus = way / 2};
        const ari_terms is = find_input(n, &own, OTHER, NULL);
        own.in = find_input(n, &own, REFERENCE, is.left <= n->allowed ? &is : NULL);
        if (!(own.in.left < 0.25 * base->in.left))
            continue;
        *base = own;
        *here = is;
    }
    if (!(base->in.left <= n->allowed))
        return false;
    base->eps = fmax(epsilon_of(n, base, n->p.ref, &apart, &times), 0.0);
    put_recipe(&n->p, n, 0);
    return ari_probe_try_base(&n->p, &exact);
}

/* --- what is wrong with it ---------------------------------------------------------------------------------------- */

/* True if the input's terms count once each: only then an epsilon is evidence. */
static bool has_own_size(const ari_terms *in)
{
    size_t k = 0;
    while (k < in->terms && ari_is_near(fabs(in->times[k]), 1.0, ARI_KNOWN))
        k++;
    return k == in->terms;
}

/* The base with one fault. */
static recipe *list_one(norm *n, ari_properties flags)
{
    recipe *r = &n->list[n->n++];
    *r = n->list[0];
    r->flags = flags;
    return r;
}

/* All terms but the k-th are added after the norm of that one, times one number that the other's rows give. */
static void list_stream(norm *n, size_t k)
{
    recipe *r = list_one(n, ARI_IF(OF_INPUT));
    const ari_terms *in = &n->list[0].in;
    const size_t last = in->terms - 1;
    double more = 0.0, all = 0.0;
    r->after = 1.0;
    r->in.of[k] = in->of[last];
    r->in.times[k] = in->times[last];
    r->in.of[last] = in->of[k];
    r->in.times[last] = in->times[k];
    put_recipe(&n->p, n, n->n - 1);
    for (size_t at = 0; at < n->p.tokens * n->p.outs; at++) {
        const size_t row = at / n->p.outs, i = n->p.out[at % n->p.outs];
        const double out = sum_of(n, r, row, i, 0, last);
        more += out * ((double)n->p.val[row][i] - n->p.is[at]);
        all += out * out;
    }
    r->after += more / all;
    n->n -= fabs(r->after) < hundredth; /* they are not there at all */
}

/* Lists the faults; their numbers are fitted to the other's rows. */
static void list_mistakes(norm *n, const ari_terms *here)
{
    const recipe *base = &n->list[0];
    const double cols = (double)n->near.width;
    double apart, times;
    const double epsilon = epsilon_of(n, base, n->p.val, &apart, &times);
    n->n = 1;
    for (size_t i = 0; i < SWITCHES; i++) {
        double *is = (double *)(void *)((char *)list_one(n, switches[i].flags) + switches[i].at);
        *is = 1.0 - *is;
    }
    n->list[1].flags |= base->centred != 0.0 ? ARI_IF(ZERO) : 0;
    if (base->plus > 0.0)
        list_one(n, ARI_IF(ONE))->plus = 2.0 * base->plus;
    if (here->left <= n->allowed)
        list_one(n, ARI_IF(OF_INPUT) | ARI_IF(SOME))->in = *here;
    if (epsilon > 2.0 * apart && has_own_size(&base->in))
        list_one(n, ARI_IF(ROWS))->eps = epsilon;
    if (times > 0.0 && fabs(cols - cols / times) > 2.0)
        list_one(n, ARI_IF(ROOT) | ARI_IF(OF_SHARDS))->less = cols - cols / times;
    for (size_t k = 0; k < base->in.terms && base->in.terms > 1; k++)
        list_stream(n, k);
}

/* The number that recurs most often, to rounding; 0: none does in a fiftieth of them. Sorts them. */
static double recurring(double *x, size_t n)
{
    size_t from = 0, longest = 0;
    double found = 0.0;
    qsort(x, n, sizeof *x, ari_by_value);
    for (size_t i = 1; i <= n; i++) {
        if (i < n && x[i] - x[i - 1] <= ARI_SUMS * fabs(x[i]))
            continue;
        if (i - from > longest) {
            longest = i - from;
            found = x[from + longest / 2];
        }
        from = i;
    }
    return longest >= 3 && longest * 50 >= n ? found : 0.0;
}

/* A row is the norm of x + m y, and m is each feature's count: the ratio to x recurs where m is 0. NaN where rounding
 * hides it. */
static void count_features(double *count, norm *n, size_t k, size_t kept)
{
    const recipe *base = &n->list[0];
    const float *x = row_of(n, base->in.of[kept], k), *y = row_of(n, base->in.of[!kept], k);
    const double by = base->in.times[!kept] / base->in.times[kept];
    for (size_t i = 0; i < n->near.width; i++)
        n->y[i] = without(n, n->p.val[k], i, base->plus) / (double)x[i];
    const double scale = recurring(n->y, n->near.width);
    for (size_t i = 0; i < n->near.width; i++) {
        const double added = by * (double)y[i],
                     m = (without(n, n->p.val[k], i, base->plus) / scale - (double)x[i]) / added;
        count[i] = fabs((double)x[i]) + fabs(added) > 4.0 * fabs(added) ? (double)NAN : scale != 0.0 ? m : -1.0;
    }
}

/* Dropout of one of the input's two terms. */
static ar_status find_dropout(ari_trace *t, norm *n)
{
    const recipe *base = &n->list[0];
    double *count = NULL;
    AR_TRY(ARI_TAKE(&count, n->c->arena, n->p.tokens * n->near.width, "features"));
    for (size_t kept = 0; kept < 2 && base->in.terms == 2 && t->kind == ARI_FOUND_NOTHING; kept++) {
        for (size_t k = 0; k < n->p.tokens; k++)
            count_features(count + k * n->near.width, n, k, kept);
        if (ari_dropped(t, ARI_FOUND_NORM_AGAIN, count, n->p.tokens * n->near.width))
            ari_words(t, "what", "%.150s", n->near.of[base->in.of[!kept]]->name);
    }
    return AR_OK;
}

/* --- what the other's rows read ----------------------------------------------------------------------------------- */

/* The sum of the other's own values that it normalised, if that has other terms than the reference's: what those are
 * was computed in another order, as a branch before its norm. */
static ar_status find_own_input(bool *found, ari_terms *here, norm *n)
{
    const recipe *base = &n->list[0];
    AR_TRY(ari_near_read(&n->near, &n->p, n->near.width, n->c->known->other));
    memset(n->of, 0, n->p.tokens * sizeof *n->of);
    multiply_rows(n);
    ari_terms same = base->in;
    const size_t at = n->near.n;
    ari_terms_fit(&same, n->of, n->p.tokens, at + OTHER + (base->plus > 0.0),
                  base->centred != 0.0 ? at + ONES : SIZE_MAX);
    *here = find_input(n, base, OTHER, &base->in);
    *found = here->left <= n->allowed && !(same.left <= ARI_REPLAY_MISTAKE) &&
             !(here->terms == base->in.terms && ari_terms_shared(here, &base->in) == here->terms);
    return AR_OK;
}

/* --- what is said of it ------------------------------------------------------------------------------------------- */

/* A norm does not show which of its terms counts too often; a later sum of these and another does, as each dump has it
 * of its own tensors. *is: the embedding alone does. */
static ar_status is_of_embedding(bool *is, const norm *n, const ari_terms *in)
{
    const ar_dump *const dumps[] = {n->c->known->reference, n->c->known->other};
    ari_products p[2] = {{0}, {0}};
    for (size_t side = 0; side < 2; side++) {
        ari_near own = n->near;
        AR_TRY(ari_near_read(&own, &n->p, n->near.width, dumps[side]));
        for (size_t at = 0; at < n->p.tokens * n->near.width; at++) {
            double x[ARI_MOST_VECTORS];
            ari_near_multiply(&p[side], &own, n->p.tokens, at / n->near.width, at % n->near.width, x, 0);
        }
    }
    for (size_t i = 0; i < n->near.n * n->near.n && in->terms < ARI_MOST_TERMS && !*is; i++) {
        const size_t y = i / n->near.n;
        bool any = false;
        ari_terms s[2] = {*in, *in};
        for (size_t k = 0; k < 2; k++) {
            s[k].of[s[k].terms++] = i % n->near.n;
            ari_terms_fit(&s[k], &p[k], 1, y, SIZE_MAX);
        }
        *is = ari_terms_shared(&(ari_terms){.terms = 1, .of = {y}}, &s[0]) == 0 && s[0].left <= ARI_REPLAY_EXACT &&
              s[1].left <= ARI_REPLAY_EXACT;
        for (size_t k = 0; k < s->terms; k++) {
            const bool embedded = k < in->terms && (ari_name_is(n->near.of[s->of[k]]->name) & ARI_IS_EMBEDDING);
            *is = *is && fabs(s[0].times[k]) > hundredth &&
                  ari_is_near(s[1].times[k], s[0].times[k], hundredth) == !embedded;
            any = any || embedded;
        }
        *is = *is && any;
    }
    return AR_OK;
}

/* The same terms in another mixture; some of them alone; or others. */
static ar_status say_mixture(ari_trace *t, const norm *n, const ari_terms *wanted, const ari_terms *is)
{
    const bool same = wanted->terms == is->terms && ari_terms_shared(wanted, is) == is->terms;
    bool embedded = false;
    if (same)
        AR_TRY(is_of_embedding(&embedded, n, wanted));
    t->flags |= (same && !has_own_size(wanted) ? ARI_IF(POWER) : 0) | (embedded ? ARI_IF(POWER) | ARI_IF(TOKENS) : 0) |
                (ari_terms_shared(wanted, is) == 0 ? ARI_IF(FOREIGN) : 0);
    ari_terms_say(t, "wanted", wanted, n->near.of);
    ari_terms_say(t, "other", is, n->near.of);
    return AR_OK;
}

/* True for the width of one of the ranks' shards of the features, or of as many times all of them. */
static bool is_of_shards(const norm *n, double features)
{
    const double ranks = ari_ranks_along(&n->c->known->mesh, ARI_CUTS_FEATURES), all = (double)n->near.width;
    return ranks > 1.0 && (ari_is_near(features * ranks, all, ARI_KNOWN + n->c->relative) ||
                           ari_is_near(features, all * ranks, ARI_KNOWN + n->c->relative));
}

static ar_status look_at_norm(ari_trace *t, norm *n)
{
    ari_terms here;
    size_t other;
    double left;
    if (!find_base(n, &here))
        return AR_OK;
    list_mistakes(n, &here);
    if (!ari_choose_other(&other, &left, &n->p, put_recipe, n, 0, n->n)) {
        bool reads = false;
        AR_TRY(find_dropout(t, n));
        if (t->kind == ARI_FOUND_NOTHING)
            AR_TRY(find_own_input(&reads, &here, n));
        if (!reads)
            return AR_OK;
        ari_trace_set(t, ARI_FOUND_NORM_AGAIN, ARI_IF(OF_INPUT) | ARI_IF(SOME) | ARI_IF(OF_MODULE));
        return say_mixture(t, n, &n->list[0].in, &here);
    }
    const recipe *found = &n->list[other];
    const double features = (double)n->near.width - found->less;
    if ((found->flags & ARI_IF(OF_SHARDS)) && !is_of_shards(n, features)) /* a number for all of it */
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_NORM_AGAIN, found->flags, {"epsilon", .number = found->eps},
                {"lanes", .count = n->near.width}, {"features", .number = features},
                {"branch", .text = n->near.of[found->in.of[found->in.terms - 1]]->name});
    return found->flags & ARI_IF(SOME) ? say_mixture(t, n, &n->list[0].in, &found->in) : AR_OK;
}

ar_status ari_measure_normed(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    norm n = {.c = c, .allowed = fmin(ARI_REPLAY_BASE, ARI_REPLAY_MISTAKE * all->dd / all->rr)};
    bool found = (c->is & ARI_IS_NORM) != 0;
    if (c->grid.nd < 2 || c->grid.cols < 8 || !c->known->other)
        return AR_OK;
    ari_probe_choose_rows(&n.p, c);
    AR_TRY(ari_norm_parameters(&n.gain, &n.shift, &found, c));
    if (!found || n.p.tokens < FEWEST_ROWS)
        return AR_OK;
    AR_TRY(ari_near_read(&n.near, &n.p, c->grid.cols, c->known->reference));
    AR_TRY(ARI_TAKE(&n.y, c->arena, c->grid.cols, "a row"));
    AR_TRY(ARI_TAKE(&n.of, c->arena, n.p.tokens, "products"));
    multiply_rows(&n);
    return look_at_norm(t, &n);
}

/* --- its backward pass -------------------------------------------------------------------------------------------- */

/* With u the gradient of what was normalised, z, the input's is r (u - z mean(u z)), which has no part along z; of a
 * statistic without a gradient it is r u: all that differs is along z, and, with the mean detached too, along 1. */
ar_status ari_measure_detached(ari_trace *t, const ari_case *c)
{
    norm n = {.c = c};
    float *x = NULL;
    double left = 0.0, all = 0.0, along = 0.0, ref = 0.0, p, q;
    bool found = false;
    size_t rows = 0;
    const char *name = c->d->name;
    const ar_dump_tensor *y = ari_tensor_of_step(c->known->reference, name, strlen(name), "fwd", c->d->step);
    if (!y || y->count != c->grid.count || c->grid.nd < 2 || c->grid.cols < 8)
        return AR_OK;
    AR_TRY(ari_norm_parameters(&n.gain, &n.shift, &found, c));
    AR_TRY(ARI_TAKE(&x, c->arena, c->grid.cols, y->name));
    for (size_t row = 0; row < c->grid.rows && found; row++) {
        ari_fit f = {0}, own = {0};
        if (!ari_row_differs(c, row))
            continue;
        AR_TRY(ar_dump_read_f32(y, row * c->grid.cols, c->grid.cols, x));
        for (size_t i = 0, at = row * c->grid.cols; i < c->grid.cols; i++, at++) {
            const double z = without(&n, x, i, 0.0);
            ari_fit_add(&f, (double)c->val[at] - (double)c->ref[at], z, 1.0);
            ari_fit_add(&own, (double)c->ref[at], z, 0.0);
        }
        left += f.yy * ari_fit_two(&p, &q, &f);
        all += f.yy;
        along += own.ya * own.ya / own.aa;
        ref += own.yy;
        rows++;
    }
    if (found && rows >= FEWEST_ROWS && left <= ARI_REPLAY_MISTAKE * all && along <= ARI_REPLAY_BASE * ref)
        ari_trace_set(t, ARI_FOUND_NORM_AGAIN, ARI_IF(OF_GRADIENT));
    return AR_OK;
}
