/* SPDX-License-Identifier: Apache-2.0 */
/* Losses that a router has besides, by the gradient that they give its logits: a balancing loss p_i*(c_i - sum of p*c),
 * whatever c it has of the experts' counts, a z-loss lse*p_i. Where the logits' own gradient differs, any c is fitted;
 * where that of the router's weight or input does, all but the coefficient is computed from these two. And a token's
 * weights that do not add up to 1. */
#include <stdlib.h>

#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

enum { MOST_WORK = 1 << 25, MOST_ELEMENTS = 1 << 20, MOST_CHOSEN = 8, MOST_SHARES = 16, ROUNDS = 60 };
/* Balanced over all tokens or over those of each sample, by a softmax or by shares of sigmoids; the square of the
 * logarithm of the softmax's sum. */
enum { SAMPLES = 1, SIGMOID = 2, Z = 4, FORMS };
static const char *const form_names[] = {"a balancing loss over all tokens", "a balancing loss of each sample",
                                         "a balancing loss over all tokens, of sigmoids",
                                         "a balancing loss of each sample, of sigmoids", "a z-loss"};

typedef struct router {
    const ari_case *c;
    size_t tokens, seq, n, cols;
    float *x, *w;           /* [tokens][cols]; [n][cols] */
    double *z, *p, *slope;  /* logits, shares, and what these change by besides, each [tokens][n] */
    double *d, *lse;        /* of the logits' gradient what differs, or is a loss's, [tokens][n]; [tokens] */
    double *count, *vector; /* [n]; [6][n] */
    double *is;             /* of the loss, in the case's elements */
} router;

/* --- a router ----------------------------------------------------------------------------------------------------- */

double ari_softmax(double *p, const double *z, size_t n)
{
    double most = z[0], sum = 0.0;
    for (size_t i = 1; i < n; i++)
        most = fmax(most, z[i]);
    for (size_t i = 0; i < n; i++)
        sum += p[i] = exp(z[i] - most);
    for (size_t i = 0; i < n; i++)
        p[i] /= sum;
    return most + log(sum);
}

static ar_status alloc_router(router *r)
{
    const size_t all = r->tokens * r->n;
    AR_TRY(ARI_TAKE(&r->z, r->c->arena, 4 * all + r->tokens + 7 * r->n, "a router's logits"));
    r->p = r->z + all;
    r->slope = r->p + all;
    r->d = r->slope + all;
    r->lse = r->d + all;
    r->count = r->lse + r->tokens;
    r->vector = r->count + r->n;
    return AR_OK;
}

static void share_out(router *r, bool sigmoids)
{
    for (size_t t = 0; t < r->tokens; t++) {
        const double *z = r->z + t * r->n;
        double *p = r->p + t * r->n, *slope = r->slope + t * r->n, sum = 0.0;
        r->lse[t] = ari_softmax(p, z, r->n);
        for (size_t i = 0; i < r->n; i++) {
            p[i] = sigmoids ? 1.0 / (1.0 + exp(-z[i])) : p[i];
            slope[i] = sigmoids ? 1.0 - p[i] : 1.0;
            sum += p[i];
        }
        for (size_t i = 0; i < r->n && sigmoids; i++)
            p[i] /= sum;
    }
}

static double dot(const double *a, const double *b, size_t n)
{
    double sum = 0.0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

/* The gradient of token t's logits, if its shares' is c. */
static void put_gradient(double *dz, const router *r, size_t t, const double *c)
{
    const double *p = r->p + t * r->n, *slope = r->slope + t * r->n, mean = dot(p, c, r->n);
    for (size_t i = 0; i < r->n; i++)
        dz[i] = p[i] * slope[i] * (c[i] - mean);
}

/* --- any counts, in the logits' gradient -------------------------------------------------------------------------- */

#define LEFT 1e-4 /* of the difference's squares, by rounding */

/* y += J J c, or (c NULL) J d, of tokens from `first` on: J c is the gradient above, and J of a softmax is
 * symmetric. */
static void add_normal(double *y, const router *r, size_t first, size_t tokens, const double *c)
{
    double *once = r->vector + 4 * r->n, *twice = once + r->n;
    for (size_t t = first; t < first + tokens; t++) {
        put_gradient(once, r, t, c ? c : r->d + t * r->n);
        put_gradient(twice, r, t, once);
        for (size_t i = 0; i < r->n; i++)
            y[i] += c ? twice[i] : once[i];
    }
}

/* The squares of d that the best c leaves, by conjugate gradients. */
static double left_by_balance(const router *r, size_t first, size_t tokens)
{
    const size_t n = r->n;
    double *c = r->vector, *rest = c + n, *s = rest + n, *as = s + n, *dz = as + n, left = 0.0;
    memset(c, 0, 2 * n * sizeof *c);
    add_normal(rest, r, first, tokens, NULL);
    memcpy(s, rest, n * sizeof *s);
    double size = dot(rest, rest, n);
    const double enough = 1e-28 * size;
    for (int round = 0; round < ROUNDS && size > enough; round++) {
        memset(as, 0, n * sizeof *as);
        add_normal(as, r, first, tokens, s);
        const double by = size / dot(s, as, n), before = size;
        for (size_t i = 0; i < n; i++) {
            c[i] += by * s[i];
            rest[i] -= by * as[i];
        }
        size = dot(rest, rest, n);
        for (size_t i = 0; i < n; i++)
            s[i] = rest[i] + size / before * s[i];
    }
    for (size_t t = first; t < first + tokens; t++) {
        put_gradient(dz, r, t, c);
        for (size_t i = 0; i < n; i++)
            left += pow(r->d[t * n + i] - dz[i], 2.0);
    }
    return left;
}

/* True if d is the gradient of a balancing loss in each of so many samples, whose tokens are consecutive. */
static bool is_balance(const router *r, size_t samples)
{
    const size_t each = r->tokens / samples;
    double left = 0.0;
    for (size_t i = 0; i < samples; i++)
        left += left_by_balance(r, i * each, each);
    return !(left > LEFT * dot(r->d, r->d, r->tokens * r->n));
}

ar_status ari_replay_balance(ari_trace *t, const ari_case *c, const float *z)
{
    const size_t samples = c->grid.nd > 2 ? c->grid.shape[0] : 1;
    router r = {.c = c, .tokens = c->grid.rows, .n = c->grid.cols};
    ari_fit of_z = {0};
    double weight;
    if (r.n < 3 || r.tokens < 4 || c->count > MOST_ELEMENTS)
        return AR_OK;
    AR_TRY(alloc_router(&r));
    for (size_t i = 0; i < c->count; i++) {
        r.z[i] = (double)z[i];
        r.d[i] = (double)c->val[i] - (double)c->ref[i];
    }
    share_out(&r, false);
    for (size_t i = 0; i < c->count; i++)
        ari_fit_add(&of_z, r.d[i], r.p[i] * r.lse[i / r.n], 0.0);
    if (ari_fit_one(&weight, &of_z) <= LEFT) {
        ARI_FINDING(t, ARI_FOUND_ROUTER, ARI_IF(LOG), {"weight", .number = weight});
    } else if (is_balance(&r, 1)) {
        ari_trace_set(t, ARI_FOUND_ROUTER, ARI_IF(AVERAGE));
    } else if (r.tokens / samples >= 4 && is_balance(&r, samples)) {
        ari_trace_set(t, ARI_FOUND_ROUTER, ARI_IF(SAMPLES));
    }
    return AR_OK;
}

/* --- counts of the largest logits, in other gradients ------------------------------------------------------------- */

/* Counts the k largest of `tokens` tokens from `first` on. */
static void count_chosen(router *r, size_t first, size_t tokens, size_t k)
{
    memset(r->count, 0, r->n * sizeof *r->count);
    for (size_t at = first * r->n; at < (first + tokens) * r->n; at++) {
        const double *z = r->z + at / r->n * r->n;
        const size_t i = at % r->n;
        size_t larger = 0;
        for (size_t j = 0; j < r->n; j++)
            larger += z[j] > z[i] || (j < i && !(z[j] < z[i]));
        r->count[i] += larger < k;
    }
}

/* The loss's gradient in the case's elements: of the weight, or of the input. */
static void put_loss(router *r, size_t form, size_t k)
{
    const size_t scope = form & SAMPLES ? r->seq : r->tokens;
    const bool of_weight = r->c->d->pass == 'g';
    for (size_t t = 0; t < r->tokens; t++) {
        if (t % scope == 0)
            count_chosen(r, t, scope, k);
        put_gradient(r->d + t * r->n, r, t, r->count);
        for (size_t i = t * r->n; i < (t + 1) * r->n && form == Z; i++)
            r->d[i] = r->p[i] * r->lse[t];
    }
    memset(r->is, 0, r->c->count * sizeof *r->is);
    for (size_t i = 0; i < r->tokens * r->n; i++) {
        const size_t t = i / r->n, e = i % r->n;
        const float *other = of_weight ? r->x + t * r->cols : r->w + e * r->cols;
        for (size_t f = 0; f < r->cols; f++)
            r->is[(of_weight ? e : t) * r->cols + f] += r->d[i] * (double)other[f];
    }
}

static bool look_at_form(ari_trace *t, const router *r, size_t form)
{
    const ari_case *c = r->c;
    ari_fit apart = {0}, alone = {0};
    double more, all;
    for (size_t i = 0; i < c->count; i++) {
        ari_fit_add(&apart, (double)c->val[i] - (double)c->ref[i], r->is[i], 0.0);
        ari_fit_add(&alone, (double)c->val[i], r->is[i], 0.0);
    }
    const bool is_alone = ari_fit_one(&all, &alone) <= ARI_UNFITTED;
    if (!is_alone && !(ari_fit_one(&more, &apart) <= ARI_UNFITTED))
        return false;
    ari_trace_set(t, ARI_FOUND_AUXILIARY, is_alone ? ARI_IF(ALONE) : more < 0.0 ? ARI_IF(NEGATIVE) : 0);
    t->flags |= form == Z && !is_alone ? ARI_IF(LOG) : 0;
    ARI_FACTS(t, {"loss", .text = form_names[form]});
    return true;
}

/* *weight: the only matrix of the case's module, or the case's own weight; NULL. True if the layer has experts. */
static bool has_experts(const ar_dump_tensor **weight, const ari_case *c)
{
    bool experts = false;
    size_t parameters = 0;
    *weight = NULL;
    for (ari_walk w = ari_replay_weights(c, c->known->reference); ari_walk_next(&w);) {
        if (labs(w.key.layer) != labs(c->own.layer))
            continue;
        const bool is_own = strncmp(w.t->name, c->own.name, c->own.stem) == 0;
        experts = experts || strstr(w.t->name, ".experts.");
        parameters += is_own;
        *weight = is_own ? w.t : *weight;
    }
    *weight = parameters == 1 && (*weight)->ndim == 2 ? *weight : NULL;
    return experts;
}

static ar_status look_at_losses(ari_trace *t, router *r, const ar_dump_tensor *x, const ar_dump_tensor *w)
{
    AR_TRY(ari_read_values(&r->x, x, r->c->arena));
    AR_TRY(ari_read_values(&r->w, w, r->c->arena));
    AR_TRY(alloc_router(r));
    AR_TRY(ARI_TAKE(&r->is, r->c->arena, r->c->count, r->c->d->name));
    for (size_t i = 0; i < r->tokens * r->n; i++) {
        for (size_t f = 0; f < r->cols; f++)
            r->z[i] += (double)r->x[i / r->n * r->cols + f] * (double)r->w[i % r->n * r->cols + f];
    }
    for (size_t form = 0; form < FORMS; form++) {
        share_out(r, form & SIGMOID);
        for (size_t k = 1; k <= MOST_CHOSEN && k < r->n && !(form == Z && k > 1); k++) {
            put_loss(r, form, k);
            if (look_at_form(t, r, form))
                return AR_OK;
        }
    }
    return AR_OK;
}

ar_status ari_measure_auxiliary(ari_trace *t, const ari_case *c)
{
    const ar_dump_tensor *w, *x = has_experts(&w, c) && w ? ari_replay_input(c, ARI_NORM2) : NULL;
    router r = {.c = c, .cols = c->grid.cols};
    if (!x || x->ndim != 3 || w->shape[1] != r.cols || x->shape[2] != r.cols || w->shape[0] < 2 ||
        c->count != (c->d->pass == 'g' ? w->count : x->count) || x->count > MOST_WORK / w->shape[0])
        return AR_OK;
    r.n = w->shape[0];
    r.seq = x->shape[1];
    r.tokens = x->shape[0] * r.seq;
    return look_at_losses(t, &r, x, w);
}

/* --- weights of a token ------------------------------------------------------------------------------------------- */

/* True if the rows of x add up to 1. */
static bool are_shares(const ari_case *c, const float *x)
{
    for (size_t row = 0; row < c->grid.rows; row++) {
        double sum = 0.0;
        for (size_t i = 0; i < c->grid.cols; i++)
            sum += (double)x[row * c->grid.cols + i];
        if (!ari_is_near(sum, 1.0, ARI_SEEN))
            return false;
    }
    return true;
}

/* Both dumps' rows are the same but for a number, and those of one alone add up to 1. */
ar_status ari_measure_shares(ari_trace *t, const ari_case *c)
{
    const bool were = are_shares(c, c->ref), are = are_shares(c, c->val);
    const ar_dump_tensor *weight;
    double low = HUGE_VAL, high = 0.0;
    if (were == are || c->grid.cols < 2 || c->grid.cols > MOST_SHARES || !has_experts(&weight, c) ||
        c->is & ARI_IS_SCORES)
        return AR_OK;
    for (size_t i = 0; i < c->count; i++) {
        const size_t first = i / c->grid.cols * c->grid.cols;
        const double by = (double)c->val[first] / (double)c->ref[first];
        if (!ari_is_near((double)c->val[i], by * (double)c->ref[i], ARI_SEEN))
            return AR_OK;
        low = fmin(low, by);
        high = fmax(high, by);
    }
    ARI_FINDING(t, ARI_FOUND_MIXTURE, ARI_IF(SAME) | (were ? ARI_IF(ZERO) : ARI_IF(ONE)), {"low", .number = low},
                {"high", .number = high});
    return AR_OK;
}
