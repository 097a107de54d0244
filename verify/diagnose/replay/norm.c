/* SPDX-License-Identifier: Apache-2.0 */
/* Norms: rows whose mean or variance is another, and norms computed again from their input with one mistake. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/search.h"

/* --- a norm's mean and variance ----------------------------------------------------------------------------------- */

static bool run_is_wrong(const ari_grid *g, const ari_run *run)
{
    for (size_t i = 0; i < run->count; i++) {
        if (ari_run_differs(g, run, i))
            return true;
    }
    return false;
}

typedef struct lines {
    bool possible, moved; /* moved: some row is not a mere multiple */
    size_t n;             /* rows */
    double low, high;     /* slopes */
} lines;

/* Of the values' squares, in fp32 with some to spare; and how near numbers are that are taken from single features. */
static const double rounding = 1e-10, hundredth = 1e-2;

/* Fits value = slope * reference + shift. What is left must be small beside the difference, not beside the values: a
 * bias that is added after the stretching leaves that much. */
static void add_line(lines *l, const ari_run *run)
{
    double sr = 0.0, sv = 0.0, rr = 0.0, rv = 0.0, vv = 0.0, dd = 0.0, sd = 0.0;
    const double n = (double)run->count;
    for (size_t i = 0; i < run->count; i++) {
        const double r = (double)run->ref[i], v = (double)run->value[i], apart = v - r;
        sr += r, sv += v, rr += r * r, rv += r * v, vv += v * v, dd += apart * apart, sd += apart;
    }
    const double slope = (rv - sr * sv / n) / (rr - sr * sr / n);
    const double left = (vv - sv * sv / n) - slope * (rv - sr * sv / n);
    l->possible = l->possible && slope > 0.0 && left <= 0.05 * (dd - sd * sd / n) + rounding * vv;
    l->low = l->n == 0 || slope < l->low ? slope : l->low;
    l->high = l->n == 0 || slope > l->high ? slope : l->high;
    l->moved = l->moved || vv - rv * rv / rr > rounding * vv;
    l->n++;
}

ar_status ari_measure_statistic(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    lines l = {.possible = true};
    if (!(ari_name_is(g->d->name) & ARI_IS_NORM) || g->nd < 2 || g->cols < 8)
        return AR_OK;
    for (ari_run run = ari_runs_of(g); l.possible && ari_runs_next(&run);) {
        if (run.count == g->cols && run_is_wrong(g, &run))
            add_line(&l, &run);
    }
    if (!l.possible || l.n == 0 || (fabs(l.low - 1.0) < ARI_KNOWN && fabs(l.high - 1.0) < ARI_KNOWN))
        return AR_OK;
    size_t padded = 1;
    while (padded < g->cols)
        padded *= 2;
    const double factor = sqrt((double)padded / (double)g->cols);
    const bool by_padding = padded > g->cols && fabs(l.low / factor - 1.0) < 0.02 && fabs(l.high / factor - 1.0) < 0.02;
    if (!l.moved && !by_padding) /* a factor for each row */
        return AR_OK;
    ari_found(t, ARI_FOUND_STATISTIC, by_padding ? ARI_IF(PADDED) : 0);
    ari_number(t, "low", l.low);
    ari_number(t, "high", l.high);
    ari_count(t, "padded", padded);
    ari_count(t, "lanes", g->cols);
    ari_number(t, "factor", factor);
    return AR_OK;
}

/* --- a norm computed again ---------------------------------------------------------------------------------------- */

enum { NEAR = 28, ROWS = 12, FEWEST_ROWS = 4 };

/* What a norm computes of a row: x = the sum of some tensors, y = (x - mean)/sqrt(mean of squares + eps)*gain + shift. */
typedef struct recipe {
    ari_terms in;
    bool centred;           /* the mean is subtracted */
    double eps, plus, less; /* plus: what is added to the gain; less: of the features that squares are divided by */
    bool bare, raw;         /* no gain; no norm */
    double after;           /* all terms but the last are added to its norm, times this; 0: they are in the norm */
    ari_properties is;      /* what a mistake that is this recipe is called */
} recipe;

typedef struct norm {
    const ari_case *c;
    float *gain, *shift; /* [cols]: zero where there is none */
    const ar_dump_tensor *near[NEAR];
    size_t n, rows, row[ROWS];
    const float *ref[ROWS], *val[ROWS];
    float *x;          /* [n][rows][cols] */
    ari_products *of;  /* [rows] */
    double *is, *base; /* [rows][cols] */
    double allowed;    /* share of squares that an input may leave: small beside the differences */
} norm;

/* In the products, after what is near: what a row would be of one; the rows without gain, with it as it is or 1 more. */
enum { ONES, REFERENCE, REFERENCE_PLUS, OTHER, OTHER_PLUS, VECTORS };
_Static_assert(NEAR + VECTORS <= ARI_MOST_VECTORS, "all vectors have a place");

ar_status ari_norm_parameters(float **gain, float **shift, bool *found, const ari_case *c)
{
    const ar_dump *dumps[] = {c->known->other, c->known->reference};
    const char *own = c->grid.d->name;
    const size_t stem = strlen(own), cols = c->grid.cols;
    AR_TRY(ARI_ALLOC(gain, cols, own));
    AR_TRY(ARI_ALLOC_ZERO(shift, cols, own));
    for (size_t i = 0; i < cols; i++)
        (*gain)[i] = 1.0f;
    for (size_t k = 0; k < 2; k++) { /* the reference's last, which stays */
        for (size_t i = 0; dumps[k] && i < ar_dump_count(dumps[k]); i++) {
            const ar_dump_tensor *t = ar_dump_at(dumps[k], i);
            const ari_order_key key = ari_order_of(t->name, ar_dump_path(dumps[k]));
            const char *kind = t->name + stem + 1;
            if (t->count != cols || t->ndim != 1 || (key.pass != 'i' && key.pass != 'w') || key.stem <= stem ||
                memcmp(t->name, own, stem) != 0 || t->name[stem] != '.' || memchr(kind, '.', key.stem - stem - 1))
                continue;
            const bool shifts = kind[0] == 'b'; /* bias, beta; else weight, gain, gamma, scale */
            *found = *found || !shifts;
            AR_TRY(ar_dump_read_f32(t, 0, cols, shifts ? *shift : *gain));
        }
    }
    return AR_OK;
}

static const float *row_of(const norm *n, size_t which, size_t row)
{
    return n->x + (which * n->rows + row) * n->c->grid.cols;
}

/* Rows that differ, and what their inputs may be. */
static ar_status read_rows(norm *n)
{
    const size_t cols = n->c->grid.cols;
    for (ari_run run = ari_runs_of(&n->c->grid); n->rows < ROWS && ari_runs_next(&run);) {
        if (run.count != cols || !run_is_wrong(&n->c->grid, &run))
            continue;
        n->row[n->rows] = run.row;
        n->ref[n->rows] = run.ref;
        n->val[n->rows++] = run.value;
    }
    n->n = ari_replay_near(n->near, NEAR, n->c, cols);
    AR_TRY(ARI_ALLOC(&n->x, n->n * n->rows * cols + 1, "rows"));
    AR_TRY(ARI_ALLOC(&n->is, n->rows * cols + 1, "rows"));
    AR_TRY(ARI_ALLOC(&n->base, n->rows * cols + 1, "rows"));
    AR_TRY(ARI_ALLOC_ZERO(&n->of, n->rows + 1, "products"));
    for (size_t i = 0; i < n->n * n->rows; i++)
        AR_TRY(ar_dump_read_f32(n->near[i / n->rows], n->row[i % n->rows] * cols, cols, n->x + i * cols));
    return AR_OK;
}

static double without(const norm *n, const float *row, size_t i, double plus)
{
    return ((double)row[i] - (double)n->shift[i]) / ((double)n->gain[i] + plus);
}

static void multiply(norm *n)
{
    const size_t cols = n->c->grid.cols;
    for (size_t row = 0; row < n->rows; row++) {
        n->of[row].n = n->n + VECTORS;
        for (size_t i = 0; i < cols; i++) {
            double x[ARI_MOST_VECTORS];
            for (size_t k = 0; k < n->n; k++)
                x[k] = (double)row_of(n, k, row)[i];
            x[n->n + ONES] = 1.0;
            x[n->n + REFERENCE] = without(n, n->ref[row], i, 0.0);
            x[n->n + REFERENCE_PLUS] = without(n, n->ref[row], i, 1.0);
            x[n->n + OTHER] = without(n, n->val[row], i, 0.0);
            x[n->n + OTHER_PLUS] = without(n, n->val[row], i, 1.0);
            ari_products_add(&n->of[row], x);
        }
    }
}

/* --- what it computes --------------------------------------------------------------------------------------------- */

/* Element i of the terms [from, to). */
static double sum_of(const norm *n, const recipe *r, size_t row, size_t i, size_t from, size_t to)
{
    double sum = 0.0;
    for (size_t k = from; k < to; k++)
        sum += r->in.times[k] * (double)row_of(n, r->in.of[k], row)[i];
    return sum;
}

/* The input of a row, less its mean where that is subtracted; its mean of squares. */
static double input_of(double *x, const norm *n, const recipe *r, size_t row)
{
    const size_t cols = n->c->grid.cols;
    double mean = 0.0, square = 0.0;
    for (size_t i = 0; i < cols; i++) {
        x[i] = sum_of(n, r, row, i, r->after != 0.0 ? r->in.terms - 1 : 0, r->in.terms);
        mean += x[i] / (double)cols;
    }
    for (size_t i = 0; i < cols; i++) {
        x[i] -= r->centred ? mean : 0.0;
        square += x[i] * x[i] / ((double)cols - r->less);
    }
    return square;
}

static void replay(norm *n, const recipe *r)
{
    const size_t cols = n->c->grid.cols;
    for (size_t row = 0; row < n->rows; row++) {
        double *y = n->is + row * cols;
        const double scale = 1.0 / sqrt(input_of(y, n, r, row) + r->eps);
        for (size_t i = 0; i < cols && !r->raw; i++) {
            y[i] *= r->bare ? scale : scale * ((double)n->gain[i] + r->plus);
            y[i] += (double)n->shift[i];
            y[i] += r->after != 0.0 ? r->after * sum_of(n, r, row, i, 0, r->in.terms - 1) : 0.0;
        }
    }
}

/* What is left of the differences' squares; where `base` is none, of the reference's. */
static double left_of(const norm *n, bool base)
{
    const size_t cols = n->c->grid.cols;
    double left = 0.0, all = 0.0;
    for (size_t i = 0; i < n->rows * cols; i++) {
        const double r = (double)n->ref[i / cols][i % cols];
        const double target = base ? (double)n->val[i / cols][i % cols] - r : r;
        const double off = target - (base ? n->is[i] - n->base[i] : n->is[i]);
        left += off * off;
        all += target * target;
    }
    return all > 0.0 ? left / all : HUGE_VAL;
}

/* The epsilon that gives the rows: mean of squares + eps is x^2/z^2. *apart: what the rows' contradict each other by, and
 * what is not known of them. */
static double epsilon_of(norm *n, const recipe *r, const float *const data[ROWS], double *apart)
{
    const size_t cols = n->c->grid.cols;
    double low = HUGE_VAL, high = -HUGE_VAL, unsure = 0.0;
    for (size_t row = 0; row < n->rows; row++) {
        const double square = input_of(n->is, n, r, row);
        double xz = 0.0, zz = 0.0;
        for (size_t i = 0; i < cols; i++) {
            const double z = without(n, data[row], i, r->plus);
            xz += n->is[i] * z;
            zz += z * z;
        }
        const double under = pow(square * (double)cols / xz, 2.0);
        low = fmin(low, under - square);
        high = fmax(high, under - square);
        unsure = fmax(unsure,
                      under * (2.0 * ARI_OF_A_MEAN + n->c->relative + 2.0 * n->c->absolute / sqrt(zz / (double)cols)));
    }
    *apart = fmax(high - low, 2.0 * unsure);
    return 0.5 * (low + high);
}

/* The tensors near by, each times a number, that give the rows of the reference or of the other (`here`), sharing terms
 * with `like`. */
static ari_terms find_input(const norm *n, const recipe *r, bool here, const ari_terms *like)
{
    const size_t y = here ? OTHER : REFERENCE;
    ari_terms s;
    ari_terms_find(&s, n->of, n->rows, n->n + y + (r->plus > 0.0), r->centred ? n->n + ONES : SIZE_MAX, n->n,
                   ARI_MOST_TERMS, n->allowed, like);
    return s;
}

/* The simplest norm that is about as near to the reference as any; *here: what the other's rows are such a norm of. */
static bool find_base(norm *n, recipe *base, ari_terms *here)
{
    double apart;
    *base = (recipe){.in.left = HUGE_VAL};
    for (int way = 0; way < 4; way++) {
        recipe own = {.centred = way % 2 == 1, .plus = way / 2};
        const ari_terms is = find_input(n, &own, true, NULL);
        own.in = find_input(n, &own, false, is.left <= n->allowed ? &is : NULL);
        if (!(own.in.left < 0.25 * base->in.left))
            continue;
        *base = own;
        *here = is;
    }
    if (!(base->in.left <= n->allowed))
        return false;
    base->eps = fmax(epsilon_of(n, base, n->ref, &apart), 0.0);
    replay(n, base);
    memcpy(n->base, n->is, n->rows * n->c->grid.cols * sizeof *n->is);
    return left_of(n, false) <= ARI_REPLAY_BASE;
}

/* --- what is wrong with it ---------------------------------------------------------------------------------------- */

enum { MISTAKES = 12 };

/* An epsilon says something where the input's own numbers are known. */
static bool has_own_size(const ari_terms *in)
{
    size_t k = 0;
    while (k < in->terms && ari_is_near(fabs(in->times[k]), 1.0, ARI_KNOWN))
        k++;
    return k == in->terms;
}

/* All terms but the k-th are added after the norm of that, times what the other's rows say. */
static recipe without_stream(norm *n, const recipe *base, size_t k)
{
    const size_t cols = n->c->grid.cols, last = base->in.terms - 1;
    recipe r = *base;
    double more = 0.0, all = 0.0;
    r.is = ARI_IF(OF_INPUT);
    r.after = 1.0;
    r.in.of[k] = base->in.of[last];
    r.in.times[k] = base->in.times[last];
    r.in.of[last] = base->in.of[k];
    r.in.times[last] = base->in.times[k];
    replay(n, &r);
    for (size_t i = 0; i < n->rows * cols; i++) {
        const double out = sum_of(n, &r, i / cols, i % cols, 0, last);
        more += out * ((double)n->val[i / cols][i % cols] - n->is[i]);
        all += out * out;
    }
    r.after += more / all;
    return r;
}

/* Each with one mistake. What numbers it needs are fitted to the other's rows. */
static size_t list_mistakes(recipe *out, norm *n, const recipe *base, const ari_terms *here)
{
    size_t found = 0;
    double apart;
    const double epsilon = epsilon_of(n, base, n->val, &apart);
    for (size_t i = 0; i < 7; i++)
        out[i] = *base;
    out[found].is = ARI_IF(SHIFT) | (base->centred ? ARI_IF(ZERO) : 0);
    out[found++].centred = !base->centred;
    out[found].is = ARI_IF(ONE);
    out[found++].plus = 1.0 - base->plus;
    out[found].is = ARI_IF(ZERO);
    out[found++].bare = true;
    out[found].is = ARI_IF(ALL);
    out[found++].raw = true;
    out[found].is = ARI_IF(ROOT);
    out[found++].less = 1.0;
    if (here->left <= n->allowed) {
        out[found].is = ARI_IF(OF_INPUT) | ARI_IF(SOME);
        out[found++].in = *here;
    }
    if (epsilon > 2.0 * apart && has_own_size(&base->in)) {
        out[found].is = ARI_IF(ROWS);
        out[found++].eps = epsilon;
    }
    for (size_t k = 0; k < base->in.terms && base->in.terms > 1; k++)
        out[found++] = without_stream(n, base, k);
    return found;
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

/* Whether the row is the norm of x + m y, each m 0 or one number above 1, which goes to *times. Where m is 0 the ratio
 * to x is the same. */
static bool is_dropped(double *times, norm *n, const recipe *base, size_t row, size_t kept)
{
    const size_t cols = n->c->grid.cols;
    const float *val = n->val[row];
    const float *x = row_of(n, base->in.of[kept], row), *y = row_of(n, base->in.of[!kept], row);
    const double by = base->in.times[!kept] / base->in.times[kept];
    double far = 0.0;
    for (size_t i = 0; i < cols; i++)
        n->is[i] = without(n, val, i, base->plus) / (double)x[i];
    const double scale = recurring(n->is, cols);
    *times = 0.0;
    for (size_t i = 0; i < cols && scale != 0.0; i++) {
        const double added = by * (double)y[i], m = (without(n, val, i, base->plus) / scale - (double)x[i]) / added;
        if (fabs(m) > hundredth && fabs(added) > far) {
            far = fabs(added);
            *times = m;
        }
    }
    for (size_t i = 0; i < cols; i++) {
        const double added = by * (double)y[i], unsure = ARI_SEEN * (fabs((double)x[i]) + fabs(added));
        const double apart = without(n, val, i, base->plus) / scale - (double)x[i];
        if (!(fabs(apart) <= unsure || fabs(apart - *times * added) <= unsure))
            return false;
    }
    return *times > 1.01;
}

/* Dropout of one of the input's two terms, in every wrong row at the same rate. */
static void find_dropout(ari_trace *t, norm *n, const recipe *base)
{
    for (size_t kept = 0; kept < 2 && t->kind == ARI_FOUND_NOTHING; kept++) {
        double least = HUGE_VAL, most = 0.0;
        bool held = true;
        for (size_t row = 0; row < n->rows && held; row++) {
            double times;
            held = is_dropped(&times, n, base, row, kept);
            least = fmin(least, times);
            most = fmax(most, times);
        }
        if (!held || most - least > hundredth * most)
            continue;
        ari_found(t, ARI_FOUND_NORM_AGAIN, ARI_IF(FRACTION));
        ari_words(t, "what", "%.150s", n->near[base->in.of[!kept]]->name);
        ari_number(t, "factor", 0.5 * (least + most));
        ari_number(t, "rate", 1.0 - 2.0 / (least + most));
    }
}

/* --- what is said of it ------------------------------------------------------------------------------------------- */

/* Products of the same tensors, all rows together, as a dump has them; those that it lacks are zero. */
static ar_status multiply_of(ari_products *out, const norm *n, const ar_dump *dump)
{
    const size_t cols = n->c->grid.cols;
    float *x = NULL;
    ar_status st = AR_OK;
    *out = (ari_products){.n = n->n};
    AR_TRY(ARI_ALLOC_ZERO(&x, n->n * cols + 1, "rows"));
    for (size_t row = 0; row < n->rows; row++) {
        for (size_t k = 0; k < n->n; k++) {
            const ar_dump_tensor *t = ar_dump_find(dump, n->near[k]->name);
            if (t && t->count == n->near[k]->count)
                AR_TRY_TO(done, st, ar_dump_read_f32(t, n->row[row] * cols, cols, x + k * cols));
        }
        for (size_t i = 0; i < cols; i++) {
            double each[ARI_MOST_VECTORS];
            for (size_t k = 0; k < n->n; k++)
                each[k] = (double)x[k * cols + i];
            ari_products_add(out, each);
        }
    }
done:
    free(x);
    return st;
}

/* A norm does not say which of its terms counts more than it should; a later sum of them and another does, as both dumps
 * have it of their own tensors: whether it is the embedding alone. */
static ar_status is_of_embedding(bool *is, const norm *n, const ari_terms *in)
{
    ari_products p[2];
    AR_TRY(multiply_of(&p[0], n, n->c->known->reference));
    AR_TRY(multiply_of(&p[1], n, n->c->known->other));
    for (size_t i = 0; i < n->n * n->n && in->terms < ARI_MOST_TERMS && !*is; i++) {
        const size_t y = i / n->n;
        bool any = false;
        ari_terms s[2] = {*in, *in};
        for (size_t k = 0; k < 2; k++) {
            s[k].of[s[k].terms++] = i % n->n;
            ari_terms_fit(&s[k], &p[k], 1, y, SIZE_MAX);
        }
        *is = ari_terms_shared(&(ari_terms){.terms = 1, .of = {y}}, &s[0]) == 0 && s[0].left <= ARI_REPLAY_EXACT &&
              s[1].left <= ARI_REPLAY_EXACT;
        for (size_t k = 0; k < s->terms; k++) {
            const bool embedded = k < in->terms && (ari_name_is(n->near[s->of[k]]->name) & ARI_IS_EMBEDDING);
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
    t->is |= (same && !has_own_size(wanted) ? ARI_IF(POWER) : 0) | (embedded ? ARI_IF(POWER) | ARI_IF(TOKENS) : 0) |
             (ari_terms_shared(wanted, is) == 0 ? ARI_IF(FOREIGN) : 0);
    ari_terms_say(t, "wanted", wanted, n->near);
    ari_terms_say(t, "other", is, n->near);
    return AR_OK;
}

static ar_status look_at_norm(ari_trace *t, norm *n)
{
    recipe base, list[MISTAKES];
    ari_terms here;
    if (!find_base(n, &base, &here))
        return AR_OK;
    const size_t mistakes = list_mistakes(list, n, &base, &here);
    const recipe *found = NULL;
    double best = ARI_REPLAY_MISTAKE;
    for (size_t i = 0; i < mistakes; i++) {
        replay(n, &list[i]);
        const double left = left_of(n, true);
        found = left < best ? &list[i] : found;
        best = fmin(left, best);
    }
    if (!found) {
        if (base.in.terms == 2)
            find_dropout(t, n, &base);
        return AR_OK;
    }
    ari_found(t, ARI_FOUND_NORM_AGAIN, found->is);
    t->unexplained = best;
    ari_number(t, "epsilon", found->eps);
    ari_count(t, "lanes", n->c->grid.cols);
    ari_words(t, "branch", "%s", n->near[found->in.of[found->in.terms - 1]]->name);
    return found->is & ARI_IF(SOME) ? say_mixture(t, n, &base.in, &found->in) : AR_OK;
}

ar_status ari_measure_normed(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    norm n = {.c = c, .allowed = fmin(ARI_REPLAY_BASE, ARI_REPLAY_MISTAKE * all->dd / all->rr)};
    bool found = (ari_name_is(c->grid.d->name) & ARI_IS_NORM) != 0;
    ar_status st = AR_OK;
    if (c->grid.nd < 2 || c->grid.cols < 8 || !c->known->other)
        return AR_OK;
    AR_TRY_TO(done, st, ari_norm_parameters(&n.gain, &n.shift, &found, c));
    if (!found)
        goto done;
    AR_TRY_TO(done, st, read_rows(&n));
    multiply(&n);
    if (n.rows >= FEWEST_ROWS)
        st = look_at_norm(t, &n);
done:
    free(n.gain);
    free(n.shift);
    free(n.x);
    free(n.of);
    free(n.is);
    free(n.base);
    return st;
}

/* --- its backward pass -------------------------------------------------------------------------------------------- */

/* With u the gradient of what was normalised, z, the input's is r (u - z mean(u z)), which has no part along z; of a
 * statistic without a gradient it is r u: all that differs is along z, and, with the mean detached too, along 1. */
ar_status ari_measure_detached(ari_trace *t, const ari_case *c)
{
    const int step = c->grid.d->step;
    char name[320];
    norm n = {.c = c};
    double left = 0.0, all = 0.0, along = 0.0, ref = 0.0, p, q;
    bool found = false;
    size_t rows = 0;
    ar_status st = AR_OK;
    snprintf(name, sizeof name, step > 1 ? "%s:fwd@%d" : "%s:fwd", c->grid.d->name, step);
    const ar_dump_tensor *y = ar_dump_find(c->known->reference, name);
    if (!y || y->count != c->grid.count || c->grid.nd < 2 || c->grid.cols < 8)
        return AR_OK;
    AR_TRY_TO(done, st, ari_norm_parameters(&n.gain, &n.shift, &found, c));
    AR_TRY_TO(done, st, ARI_ALLOC(&n.x, c->grid.cols, y->name));
    for (size_t row = 0; row < c->grid.rows && found; row++) {
        ari_fit f = {0}, own = {0};
        if (!ari_row_differs(c, row))
            continue;
        AR_TRY_TO(done, st, ar_dump_read_f32(y, row * c->grid.cols, c->grid.cols, n.x));
        for (size_t i = 0, at = row * c->grid.cols; i < c->grid.cols; i++, at++) {
            const double z = without(&n, n.x, i, 0.0);
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
        ari_found(t, ARI_FOUND_NORM_AGAIN, ARI_IF(OF_GRADIENT));
done:
    free(n.gain);
    free(n.shift);
    free(n.x);
    return st;
}
