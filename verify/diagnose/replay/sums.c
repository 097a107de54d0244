/* SPDX-License-Identifier: Apache-2.0 */
/* Modules that read or are a sum of tensors near by: a layer's first linear module with other inputs than the norm's
 * output, a residual sum with other terms or numbers, logits with another scale or cap. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/search.h"

typedef struct sums {
    ari_probe p;
    ari_near near;
    ari_products products; /* of what the module makes of each without bias, of the reference and of the other */
} sums;

/* A module that is no layer counts as reading its own output, the sum of other tensors. The last two vectors are the
 * reference's and the other's values. */
static ar_status multiply_terms(sums *s)
{
    const size_t in = s->near.width, n = s->near.n, outs = s->p.outs;
    double *x = NULL, (*of)[ARI_MOST_VECTORS] = NULL;
    AR_TRY(ARI_TAKE(&x, s->p.c->arena, in, "a row"));
    AR_TRY(ARI_TAKE(&of, s->p.c->arena, s->p.tokens * outs, "products"));
    for (size_t at = 0; at < n * s->p.tokens; at++) {
        const size_t k = at % s->p.tokens;
        for (size_t j = 0; j < in; j++)
            x[j] = (double)s->near.x[at * in + j];
        ari_probe_put(&s->p, k, x);
        for (size_t i = 0; i < outs; i++)
            of[k * outs + i][at / s->p.tokens] = s->p.is[k * outs + i] - (s->p.w ? (double)s->p.bias[i] : 0.0);
    }
    s->products = (ari_products){.n = n + 2};
    for (size_t k = 0; k < s->p.tokens * outs; k++) {
        const size_t out = s->p.out[k % outs];
        const double bias = s->p.w ? (double)s->p.bias[k % outs] : 0.0;
        of[k][n] = (double)s->p.ref[k / outs][out] - bias;
        of[k][n + 1] = (double)s->p.val[k / outs][out] - bias;
        ari_products_add(&s->products, of[k]);
    }
    return AR_OK;
}

static unsigned what_is(const ar_dump_tensor *t)
{
    return ari_role_place_of(ari_module_of(t->name, ari_order_of(t->name, NULL).stem).role)->is;
}

/* The same tensors with other numbers: which one's. */
static bool is_same(size_t *scaled, const ari_terms *a, const ari_terms *b)
{
    for (size_t k = 0; k < a->terms; k++)
        *scaled = ari_is_near(b->times[k], a->times[k], 10.0 * ARI_KNOWN) ? *scaled : k;
    return a->terms == b->terms && ari_terms_shared(a, b) == a->terms;
}

static void look_at_sums(ari_trace *t, const sums *s)
{
    const ari_tally *all = &s->p.c->survey.total;
    const ari_products *p = &s->products;
    const size_t n = s->near.n;
    const double differ = p->of[n][n] + p->of[n + 1][n + 1] - 2.0 * p->of[n][n + 1];
    const double allowed = fmin(ARI_REPLAY_BASE, ARI_REPLAY_MISTAKE * all->dd / all->rr);
    const bool layer = s->p.w != NULL;
    ari_terms wanted, is, own = {.terms = 1, .of = {n}};
    size_t scaled = 0;
    ari_terms_fit(&own, p, 1, n + 1, SIZE_MAX);
    if (!ari_terms_find(&is, p, 1, n + 1, SIZE_MAX, n, layer ? 2 : 3,
                        ARI_REPLAY_MISTAKE * fmin(differ / p->of[n + 1][n + 1], 1.0), NULL) ||
        !ari_terms_find(&wanted, p, 1, n, SIZE_MAX, n, layer ? 2 : 3, allowed, &is) || (!layer && wanted.terms < 2) ||
        own.left <= 4.0 * is.left) /* a multiple of the reference is no other sum */
        return;
    const bool same = is_same(&scaled, &wanted, &is), sum = !layer || wanted.terms > 1;
    if (layer && sum && !same) /* what a layer reads may be no sum of these */
        return;
    const bool left_out = !sum && (what_is(s->near.of[wanted.of[0]]) & ARI_IS_NORM) &&
                          !(is.terms == 1 && (what_is(s->near.of[is.of[0]]) & ARI_IS_NORM));
    ari_trace_set(t, ARI_FOUND_LINEAR, left_out ? ARI_IF(ZERO) : sum ? ARI_IF(OF_INPUT) : 0);
    t->flags |= same ? ARI_IF(POWER) : 0;
    t->flags |= same && (ari_name_is(s->near.of[wanted.of[scaled]]->name) & ARI_IS_EMBEDDING) ? ARI_IF(TOKENS) : 0;
    ari_terms_say(t, "wanted", &wanted, s->near.of);
    ari_terms_say(t, "other", &is, s->near.of);
    ARI_FACTS(t, {"left", .number = is.left * p->of[n + 1][n + 1] / differ});
}

ar_status ari_measure_sums(ari_trace *t, const ari_case *c)
{
    bool layer = c->role == ARI_NO_ROLE || c->role == ARI_Q || c->role == ARI_K || c->role == ARI_V ||
                 c->role == ARI_QKV || c->role == ARI_GATE || c->role == ARI_UP || c->role == ARI_GATE_UP ||
                 c->role == ARI_FIRST;
    sums s = {.near = {.n = 0}};
    bool held = true;
    if (!ari_may_replay(c) && (c->grid.nd != 2 || c->count > ARI_PROBE_ELEMENTS))
        return AR_OK;
    if (c->grid.nd == 2)
        ari_probe_choose_rows(&s.p, c);
    else
        ari_probe_choose(&s.p, c);
    if (layer)
        AR_TRY(ari_probe_read_layer(&s.p, &held, c->role));
    layer = layer && held;
    if (!held && c->role != ARI_NO_ROLE) /* a module without a weight may be a sum */
        return AR_OK;
    AR_TRY(ari_near_read(&s.near, &s.p, layer ? s.p.in : c->grid.cols, c->known->reference));
    AR_TRY(multiply_terms(&s));
    look_at_sums(t, &s);
    return AR_OK;
}

/* --- one function of each element --------------------------------------------------------------------------------- */

/* y = number times x, or number tanh(x/number). */
typedef struct curve {
    bool capped;
    double number;
} curve;

/* True if the rows lie on one curve through the largest of them, to within `off` of that. A cap is found by bisection,
 * since |y| grows with it. */
static bool find_curve(curve *f, const float *x, const float *y, size_t n, double off)
{
    size_t top = 0, i = 0;
    for (size_t k = 1; k < n; k++)
        top = fabsf(x[k]) > fabsf(x[top]) ? k : top;
    const double from = fabs((double)x[top]), to = fabs((double)y[top]), most = 1e6; /* a larger cap does nothing */
    for (int capped = 0; capped < 2 && (i < n || !isfinite(f->number)); capped++) {
        double low = to, high = most * to;
        for (int k = 0; capped && k < 64; k++) {
            const double middle = sqrt(low * high);
            *(middle * tanh(from / middle) < to ? &low : &high) = middle;
        }
        *f = (curve){capped, capped ? low : (double)y[top] / (double)x[top]};
        bool on = true;
        for (i = 0; i < n && on; i += on) {
            const double by = (double)x[i], is = capped ? low * tanh(by / low) : f->number * by;
            on = fabs((double)y[i] - is) <= off * to;
        }
    }
    return i == n && isfinite(f->number);
}

/* Explains an output after the layers as one function of another tensor of its width that is right. */
ar_status ari_measure_curve(ari_trace *t, const ari_case *c)
{
    const ar_dump_tensor *near[ARI_MOST_NEAR];
    ari_probe p;
    if (!ari_may_replay(c) || !c->known->other || c->own.section == ARI_AT_LAYERS)
        return AR_OK;
    ari_probe_choose(&p, c);
    const size_t n = ari_replay_near(near, c, c->grid.cols), each = p.seq * c->grid.cols;
    for (size_t i = 0; i < n && t->kind == ARI_FOUND_NOTHING; i++) {
        const double off = 2.0 * ARI_SUMS + c->relative;
        float *x = NULL;
        size_t width = 0;
        bool held = true;
        curve ref, val;
        ARI_ARENA_SCOPE(c->arena);
        AR_TRY(ari_probe_read_input(&x, &width, &held, &p, near[i]));
        const bool fits = held && width == c->grid.cols && find_curve(&ref, x, c->ref + p.sample * each, each, off) &&
                          find_curve(&val, x, c->val + p.sample * each, each, off);
        if (!fits || (!ref.capped && !val.capped && ari_is_near(ref.number, 1.0, ARI_KNOWN)))
            continue;
        ari_trace_set(t, ARI_FOUND_CURVE, ref.capped || val.capped ? ARI_IF(CUT) : 0);
        t->flags |= val.capped ? 0 : ARI_IF(ZERO);
        ARI_FACTS(t, {"number", .number = val.number}, {"wanted", .number = ref.number});
        ari_words(t, "of", "%.120s", near[i]->name);
    }
    return AR_OK;
}
