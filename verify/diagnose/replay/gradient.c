/* SPDX-License-Identifier: Apache-2.0 */
/* A parameter's gradient as what each micro-batch contributes to it, computed from the reference's own values: of a
 * linear layer dY^T X, of a bias the sum of dY, of a norm's weight that of dY times what was normalised. Which dY and X
 * are the parameter's is learned from the reference's gradient, at some elements. */
#include <stdio.h>

#include "anyrank/parallel.h"
#include "ref/models/parallel_private.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

enum { MOST_ELEMENTS = 192, MOST_NUMBERS = 1 << 19, MOST_VALUES = 96, MOST_MICRO = 32, PROBES = 8 };

/* The columns of a value [tokens, width] that the elements need, by their rows and by their columns. The single row of
 * a vector has ones, or what a norm's weight was multiplied with. */
enum { BY_ROW, BY_COLUMN };
typedef struct columns {
    char pass;
    double *by[2]; /* [elements, tokens]; NULL: it is not as wide */
} columns;

typedef struct gradient {
    const ari_case *c;
    size_t tokens, rows, cols; /* of the stored parameter: rows 1 for a vector */
    size_t n, element[MOST_ELEMENTS];
    columns value[MOST_VALUES];
    size_t values;
    const double *left, *right; /* [elements, tokens] of the pair that makes the reference */
    bool dealt; /* a micro-batch's samples of all data-parallel ranks follow one another, not all that one rank has */
} gradient;

/* by: BY_ROW or BY_COLUMN. */
static ar_status read_columns(double **gives, const gradient *g, const ar_dump_tensor *t, int by)
{
    const size_t width = by == BY_ROW ? g->rows : g->cols;
    float *row = NULL;
    AR_TRY(ARI_TAKE(&row, g->c->arena, width, t->name));
    AR_TRY(ARI_TAKE(gives, g->c->arena, g->n * g->tokens, t->name));
    for (size_t k = 0; k < g->tokens; k++) {
        AR_TRY(ar_dump_read_f32(t, k * width, width, row));
        for (size_t e = 0; e < g->n; e++)
            (*gives)[e * g->tokens + k] = (double)row[by == BY_ROW ? g->element[e] / g->cols : g->element[e] % g->cols];
    }
    return AR_OK;
}

/* The values of the step that may be a factor: as wide as the parameter is along one of its dimensions. */
static ar_status read_values(gradient *g)
{
    for (ari_walk w = ari_walk_of(g->c->known->reference, NULL, "fb", g->c->d->step);
         g->values + 2 < MOST_VALUES && ari_walk_next(&w);) {
        const ar_dump_tensor *t = w.t;
        const size_t width = t->ndim >= 2 ? t->shape[t->ndim - 1] : 0;
        if (width == 0 || (width != g->cols && width != g->rows) || t->count != g->tokens * width)
            continue;
        columns *v = &g->value[g->values++];
        *v = (columns){.pass = w.key.pass};
        if (width == g->rows)
            AR_TRY(read_columns(&v->by[BY_ROW], g, t, BY_ROW));
        if (width == g->cols)
            AR_TRY(read_columns(&v->by[BY_COLUMN], g, t, BY_COLUMN));
    }
    return AR_OK;
}

/* The factor of a norm's weight, whatever that is called, from the norm's output: (y - bias)/weight. */
static ar_status read_normed(gradient *g)
{
    const ar_dump *dump = g->c->known->reference;
    const char *name = g->c->d->name, *dot = strrchr(name, '.');
    const int step = g->c->d->step;
    const size_t n = dot ? (size_t)(dot - name) : 0;
    char of_bias[320];
    snprintf(of_bias, sizeof of_bias, "%.*s.bias", (int)n, name);
    const ar_dump_tensor *y = ari_tensor_of_step(dump, name, n, "fwd", step);
    const ar_dump_tensor *w = ari_weight_before(dump, name, strlen(name), step);
    const ar_dump_tensor *b = ari_weight_before(dump, of_bias, strlen(of_bias), step);
    float weight = 1.0f, bias = 0.0f;
    if (g->rows > 1 || !(g->c->is & ARI_IS_NORM) || !y || !w || y->count != g->tokens * g->cols || w->count != g->cols)
        return AR_OK;
    columns *v = &g->value[g->values++];
    *v = (columns){.pass = 'f'};
    AR_TRY(read_columns(&v->by[BY_ROW], g, y, BY_COLUMN));
    double *normed = v->by[BY_ROW];
    for (size_t e = 0; e < g->n; e++) {
        AR_TRY(ar_dump_read_f32(w, g->element[e], 1, &weight));
        if (b && b->count == g->cols)
            AR_TRY(ar_dump_read_f32(b, g->element[e], 1, &bias));
        for (size_t k = 0; k < g->tokens; k++)
            normed[e * g->tokens + k] = (normed[e * g->tokens + k] - (double)bias) / (double)weight;
    }
    return AR_OK;
}

/* The sum over tokens [first, first + count) of an element's terms. */
static double sum_of(const gradient *g, const double *left, const double *right, size_t e, size_t first, size_t count)
{
    double sum = 0.0;
    for (size_t k = e * g->tokens + first; k < e * g->tokens + first + count; k++)
        sum += left[k] * right[k];
    return sum;
}

/* True if the pair gives the first n elements of the reference's gradient. */
static bool is_pair(const gradient *g, const double *left, const double *right, size_t n)
{
    size_t e = 0;
    while (e < n &&
           fabs(sum_of(g, left, right, e, 0, g->tokens) - (double)g->c->ref[g->element[e]]) <= ARI_SEEN * g->c->max_ref)
        e++;
    return e == n;
}

/* dY, of a matrix [out, in] or [in, out] with X. */
static bool find_pair(gradient *g)
{
    const size_t probes = g->n < PROBES ? g->n : PROBES;
    for (size_t i = 0; i < 2 * g->values * g->values; i++) {
        const columns *dy = &g->value[i / 2 / g->values], *x = &g->value[i / 2 % g->values];
        const int along = i % 2 == 0 ? BY_ROW : BY_COLUMN;
        g->left = dy->by[along];
        g->right = x->by[1 - along];
        if (dy->pass == 'b' && x->pass == 'f' && g->left && g->right && is_pair(g, g->left, g->right, probes) &&
            is_pair(g, g->left, g->right, g->n))
            return true;
    }
    g->left = NULL;
    return false;
}

/* --- weights of the micro-batches --------------------------------------------------------------------------------- */

/* The contribution of micro-batch m of all data-parallel ranks to element e, by at most `most` samples of each. */
static double contribution(const gradient *g, int m, size_t e, size_t most)
{
    const ar_verify_facts *f = &g->c->facts;
    const ar_parallel p = {.tp = 1, .dp = f->dp, .micro_batches = g->c->d->micro_batches};
    double sum = 0.0;
    if (g->dealt) {
        const size_t each = f->batch / (size_t)p.micro_batches * f->seq;
        return sum_of(g, g->left, g->right, e, (size_t)m * each, each);
    }
    for (int r = 0; r < ari_at_least_one(f->dp); r++) {
        size_t start = 0, count = 0;
        ari_parallel_rows(&p, f->batch, r, m, &start, &count);
        sum += sum_of(g, g->left, g->right, e, start * f->seq, (count < most ? count : most) * f->seq);
    }
    return sum;
}

/* True if the values are so many times the micro-batches' contributions. */
static bool are_weights(const gradient *g, const double *weight, size_t most)
{
    double left = 0.0, all = 0.0;
    for (size_t e = 0; e < g->n; e++) {
        double off = (double)g->c->val[g->element[e]];
        const double apart = off - (double)g->c->ref[g->element[e]];
        for (int m = 0; m < ari_at_least_one(g->c->d->micro_batches); m++)
            off -= weight[m] * contribution(g, m, e, most);
        left += off * off;
        all += apart * apart;
    }
    return left <= ARI_UNFITTED * all;
}

/* weight[m]: how often micro-batch m is in the values, by least squares; false: they are no such sum. */
static bool fit_weights(const gradient *g, double *weight)
{
    const int n = g->c->d->micro_batches;
    double part[MOST_MICRO + 1], m[(MOST_MICRO + 1) * (MOST_MICRO + 1)] = {0.0};
    for (size_t e = 0; e < g->n; e++) {
        for (int i = 0; i < n; i++)
            part[i] = contribution(g, i, e, SIZE_MAX);
        part[n] = (double)g->c->val[g->element[e]];
        ari_equations_add(m, part, (size_t)n);
    }
    bool fits = ari_equations_solve(weight, m, (size_t)n) < HUGE_VAL && are_weights(g, weight, SIZE_MAX);
    for (int i = 0; i < n; i++) /* nothing takes a contribution back: a few elements fit such numbers */
        fits = fits && weight[i] > -ARI_KNOWN;
    return fits;
}

/* In the order in which they went back. */
static void state_weights(ari_trace *t, const ari_case *c, const double *weight)
{
    const int n = c->d->micro_batches;
    int ones = 0, zeros = 0;
    bool decays = true, grows = true, alike = true;
    double w[MOST_MICRO];
    for (int i = 0; i < n; i++)
        w[i] = weight[c->d->forward_first ? n - 1 - i : i];
    const double ranks = n > 1 && w[n - 1] > 0.5 ? nearbyint(w[n - 2] / w[n - 1]) : 0.0;
    for (int i = 0; i < n; i++) {
        const bool last = i + 1 == n;
        ones += fabs(w[i] - 1.0) < ARI_KNOWN;
        zeros += fabs(w[i]) < ARI_KNOWN;
        decays = decays && (last ? fabs(w[i] - 1.0) < ARI_KNOWN || fabs(w[i] * n - 1.0) < ARI_KNOWN
                                 : ari_is_near(w[i] * n, w[i + 1], ARI_KNOWN));
        grows = grows && (last ? fabs(w[i] - 1.0) < ARI_KNOWN : ari_is_near(w[i], ranks * w[i + 1], ARI_KNOWN));
        alike = alike && fabs(w[i] - w[0]) < ARI_KNOWN;
    }
    if (alike)
        return;
    const bool one = ones == 1 && zeros == n - 1;
    ari_trace_set(t, ARI_FOUND_ACCUMULATED,
                  one                    ? ARI_IF(ONE)
                  : decays               ? ARI_IF(INVERSE)
                  : grows && ranks > 1.0 ? ARI_IF(POWER)
                                         : 0);
    ARI_FACTS(t, {"ranks", .number = ranks}, {"which", .text = w[n - 1] > 0.5 ? "last" : w[0] > 0.5 ? "first" : "one"});
    ari_text list = ari_list(t, "weights");
    for (int i = 0; i < n; i++)
        ari_say(&list, "%s%.4g", i > 0 ? ", " : "", round(w[i] * 1e6) / 1e6 + 0.0);
}

static void look_at_micro_batches(ari_trace *t, gradient *g)
{
    const int n = g->c->d->micro_batches;
    double weight[MOST_MICRO];
    for (int dealt = 0; dealt < 2; dealt++) {
        g->dealt = dealt > 0;
        /* A layout of this run gives each rank its samples at once; so dealt they would be a micro-batch's. */
        if (g->dealt && (g->c->facts.dp < 2 || g->c->facts.batch % (size_t)n != 0 || !g->c->known->other))
            return;
        if (fit_weights(g, weight)) {
            state_weights(t, g->c, weight);
            return;
        }
    }
}

ar_status ari_measure_accumulated(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const size_t tokens = c->facts.batch * c->facts.seq;
    gradient g = {.c = c, .tokens = tokens, .rows = c->grid.rows, .cols = c->grid.cols};
    if (c->facts.batch < 2 || d->micro_batches > MOST_MICRO || d->ndim < 1 || d->ndim > 2 || tokens == 0 ||
        tokens > MOST_NUMBERS / PROBES || c->survey.different * 4 < c->count)
        return AR_OK;
    const size_t most = MOST_NUMBERS / tokens < MOST_ELEMENTS ? MOST_NUMBERS / tokens : MOST_ELEMENTS;
    g.n = c->count < most ? c->count : most;
    for (size_t e = 0; e < g.n; e++) /* all over it, whatever its shape */
        g.element[e] = c->count <= g.n ? e : (size_t)((uint64_t)e * 2654435761u % c->count);
    AR_TRY(read_values(&g));
    AR_TRY(read_normed(&g));
    if (g.rows == 1) {
        columns *ones = &g.value[g.values++];
        *ones = (columns){.pass = 'f'};
        AR_TRY(ARI_TAKE(&ones->by[BY_ROW], c->arena, g.n * tokens, "ones"));
        for (size_t k = 0; k < g.n * tokens; k++)
            ones->by[BY_ROW][k] = 1.0;
    }
    double once[MOST_MICRO];
    for (int m = 0; m < MOST_MICRO; m++)
        once[m] = 1.0;
    if (find_pair(&g) && are_weights(&g, once, 1)) /* of the first samples alone */
        ari_trace_set(t, ARI_FOUND_ACCUMULATED, ARI_IF(SAMPLES));
    else if (g.left && d->micro_batches > 1)
        look_at_micro_batches(t, &g);
    return AR_OK;
}
