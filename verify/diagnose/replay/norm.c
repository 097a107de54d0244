/* SPDX-License-Identifier: Apache-2.0 */
/* Norms: rows whose mean or variance is another, and norms computed again from their input with one mistake. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/replay/replay.h"

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
    l->possible = l->possible && slope > 0.0 && left <= 0.05 * (dd - sd * sd / n) + 1e-10 * vv;
    l->low = l->n == 0 || slope < l->low ? slope : l->low;
    l->high = l->n == 0 || slope > l->high ? slope : l->high;
    l->moved = l->moved || vv - rv * rv / rr > 1e-10 * vv;
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
    if (!l.possible || l.n == 0 || (fabs(l.low - 1.0) < 1e-3 && fabs(l.high - 1.0) < 1e-3))
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

enum { INPUTS = 32, ROWS_ASKED = 3 };

/* A norm's row taken apart: z, its value without weight and bias, is (x - mean)*scale of its input x. */
typedef struct norm {
    float *weight;                  /* [cols]: what z is multiplied by */
    double other_way;               /* the parameter may count as 1 + itself: what to add for the other of the two */
    const float *bias;              /* [cols]; NULL: RMSNorm, which subtracts no mean */
    const ar_dump_tensor *input[2]; /* whose sum is x; the first NULL: not found */
    float *x, *y;                   /* [cols] */
} norm;

/* The norm's parameter, where a dump has it as it was in this step. */
static ar_status read_parameter(float **gives, const ari_case *c, const char *kind)
{
    const ar_dump *dumps[] = {c->known->reference, c->known->other};
    static const char *const suffixes[] = {":init", ""};
    for (size_t k = 0; k < 4; k++) {
        char name[320];
        snprintf(name, sizeof name, "%s.%s%s", c->grid.d->name, kind, suffixes[k % 2]);
        const ar_dump_tensor *t = dumps[k / 2] ? ar_dump_find(dumps[k / 2], name) : NULL;
        if (!t || t->count != c->grid.cols)
            continue;
        AR_TRY(ARI_ALLOC(gives, t->count, t->name));
        return ar_dump_read_f32(t, 0, t->count, *gives);
    }
    return AR_OK;
}

/* The input's row; its mean of squares, less its mean where the norm subtracts that. */
static ar_status read_input(norm *n, const ari_case *c, size_t row, double *square)
{
    const size_t cols = c->grid.cols;
    double mean = 0.0;
    AR_TRY(ar_dump_read_f32(n->input[0], row * cols, cols, n->x));
    if (n->input[1])
        AR_TRY(ar_dump_read_f32(n->input[1], row * cols, cols, n->y));
    for (size_t i = 0; i < cols; i++) {
        n->x[i] += n->input[1] ? n->y[i] : 0.0f;
        mean += (double)n->x[i] / (double)cols;
    }
    *square = 0.0;
    for (size_t i = 0; i < cols; i++) {
        n->x[i] -= n->bias ? (float)mean : 0.0f;
        *square += (double)n->x[i] * (double)n->x[i] / (double)cols;
    }
    return AR_OK;
}

static double without(const norm *n, const float *row, size_t i)
{
    return ((double)row[i] - (n->bias ? (double)n->bias[i] : 0.0)) / (double)n->weight[i];
}

/* Whether the reference's first rows are these tensors' sum, normalised. */
static ar_status is_input(bool *held, norm *n, const ari_case *c)
{
    *held = true;
    for (size_t row = 0; row < ROWS_ASKED && row < c->grid.rows && *held; row++) {
        double square, xz = 0.0, zz = 0.0;
        AR_TRY(read_input(n, c, row, &square));
        for (size_t i = 0; i < c->grid.cols; i++) {
            const double z = without(n, c->grid.d->reference + row * c->grid.cols, i);
            xz += (double)n->x[i] * z;
            zz += z * z;
        }
        *held = xz > 0.0 && xz * xz >= (1.0 - 1e-6) * square * (double)c->grid.cols * zz;
    }
    return AR_OK;
}

/* The input is one of them or the sum of two. */
static ar_status find_input(norm *n, const ari_case *c)
{
    const ar_dump_tensor *near[INPUTS + 1] = {NULL};
    const size_t found = ari_replay_near(near, INPUTS, c, c->grid.cols);
    bool held = false;
    for (size_t i = 0; i < found && !held; i++) {
        for (size_t k = found + 1; k-- > i + 1 && !held;) { /* near[found] is NULL: it alone */
            n->input[0] = near[i];
            n->input[1] = near[k];
            AR_TRY(is_input(&held, n, c));
        }
    }
    if (!held)
        n->input[0] = NULL;
    return AR_OK;
}

static bool is_anywhere_zero(const norm *n, const ari_case *c)
{
    size_t i = 0;
    while (i < c->grid.cols && n->weight[i] != 0.0f)
        i++;
    return i < c->grid.cols;
}

/* The same, where the weight may count as 1 + itself. */
static ar_status find_input_either_way(norm *n, const ari_case *c)
{
    if (!is_anywhere_zero(n, c))
        AR_TRY(find_input(n, c));
    for (int turn = 0; turn < 2 && !n->input[0]; turn++) { /* there, and back where it is not found so either */
        for (size_t i = 0; i < c->grid.cols; i++)
            n->weight[i] += (float)n->other_way;
        n->other_way = -n->other_way;
        if (turn == 0 && !is_anywhere_zero(n, c))
            AR_TRY(find_input(n, c));
    }
    return AR_OK;
}

/* Sums over a row of what the other has against z: of z, and of the row's mistakes. */
typedef struct against {
    ari_sums same, moved, plus, bare; /* v against w z; w (z - mean) or w (z + its mean); (w + 1) z or (w - 1) z; z */
} against;

static against add_row(const norm *n, const ari_grid *g, const ari_run *run)
{
    against a = {.same = {0}};
    double mean = 0.0;
    for (size_t i = 0; i < g->cols; i++)
        mean += without(n, run->ref, i) / (double)g->cols;
    for (size_t i = 0; i < g->cols; i++) {
        const double w = (double)n->weight[i], b = n->bias ? (double)n->bias[i] : 0.0;
        const double z = without(n, run->ref, i), v = (double)run->value[i] - b;
        ari_sums_add(&a.same, v, w * z);
        ari_sums_add(&a.moved, v, w * (z - mean));
        ari_sums_add(&a.plus, v, (w + n->other_way) * z);
        ari_sums_add(&a.bare, v, z);
    }
    return a;
}

/* Whether v is a positive multiple, but for what the noise that is allowed leaves. */
static bool follows(const ari_sums *s, const ari_case *c)
{
    const double noise = (double)c->grid.cols * c->absolute * c->absolute;
    return s->vr > 0.0 && ari_factor_left(s) <= 1e-8 * s->vv + noise + c->relative * c->relative * s->vv;
}

typedef struct verdict {
    size_t rows;
    bool same, moved, plus, bare, raw;
    double low, high, unsure; /* of the epsilon that each row gives */
    bool mixed;               /* each row is a norm of the input's two terms in another mixture */
    double least, most;       /* the angles of the mixture, pi/4 where both count once */
} verdict;

/* The row is the norm of a x + b y; the angle of (a, b). NaN: it is not. The row's own mean counts where the norm
 * subtracts it. */
static double mixture_of(const norm *n, const ari_case *c, const ari_run *run)
{
    const size_t cols = c->grid.cols;
    double mx = 0.0, my = 0.0, xx = 0.0, xy = 0.0, yy = 0.0, ux = 0.0, uy = 0.0, uu = 0.0;
    for (size_t i = 0; i < cols && n->bias; i++) {
        mx += (double)n->x[i] / (double)cols;
        my += (double)n->y[i] / (double)cols;
    }
    for (size_t i = 0; i < cols; i++) {
        const double x = (double)n->x[i] - mx, y = (double)n->y[i] - my, u = without(n, run->value, i);
        xx += x * x, xy += x * y, yy += y * y, ux += u * x, uy += u * y, uu += u * u;
    }
    const double det = xx * yy - xy * xy, a = (ux * yy - uy * xy) / det, b = (uy * xx - ux * xy) / det;
    const double left = uu - a * ux - b * uy, unsure = c->relative + c->absolute / sqrt(uu / (double)cols);
    return det > 1e-6 * xx * yy && left <= (1e-8 + 4.0 * unsure * unsure) * uu ? atan2(b, a) : (double)NAN;
}

static ar_status add_mixture(verdict *v, norm *n, const ari_case *c, const ari_run *run)
{
    const size_t cols = c->grid.cols;
    AR_TRY(ar_dump_read_f32(n->input[0], run->row * cols, cols, n->x));
    AR_TRY(ar_dump_read_f32(n->input[1], run->row * cols, cols, n->y));
    const double angle = mixture_of(n, c, run);
    v->mixed = isfinite(angle);
    v->least = fmin(v->least, angle);
    v->most = fmax(v->most, angle);
    return AR_OK;
}

/* The number that recurs most often, to rounding; 0: none does in a fiftieth of them. Sorts them. */
static double recurring(double *x, size_t n)
{
    size_t from = 0, longest = 0;
    double found = 0.0;
    qsort(x, n, sizeof *x, ari_by_value);
    for (size_t i = 1; i <= n; i++) {
        if (i < n && x[i] - x[i - 1] <= 1e-5 * fabs(x[i]))
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
static bool is_dropped(double *times, double *ratio, const norm *n, const float *x, const float *y, const ari_run *run)
{
    size_t at = 0;
    for (size_t i = 0; i < run->count; i++)
        ratio[i] = without(n, run->value, i) / (double)x[i];
    const double scale = recurring(ratio, run->count);
    if (scale == 0.0)
        return false;
    *times = 0.0;
    for (size_t i = 0; i < run->count; i++) {
        const double m = (without(n, run->value, i) / scale - (double)x[i]) / (double)y[i];
        if (fabs((double)y[i]) * (fabs(m) > 1e-2) > fabs((double)y[at]) * (*times > 0.0)) {
            at = i;
            *times = m;
        }
    }
    for (size_t i = 0; i < run->count; i++) {
        const double unsure = 1e-4 * (fabs((double)x[i]) + fabs((double)y[i]));
        const double apart = without(n, run->value, i) / scale - (double)x[i];
        if (fabs(apart) > unsure && fabs(apart - *times * (double)y[i]) > unsure)
            return false;
    }
    return *times > 1.01;
}

/* Whether the row is the norm's input as it is. */
static ar_status is_raw(bool *raw, norm *n, const ari_case *c, const ari_run *run)
{
    AR_TRY(ar_dump_read_f32(n->input[0], run->row * run->count, run->count, n->x));
    if (n->input[1])
        AR_TRY(ar_dump_read_f32(n->input[1], run->row * run->count, run->count, n->y));
    for (size_t i = 0; i < run->count && *raw; i++)
        *raw = ari_holds(c, run->value[i], (double)n->x[i] + (n->input[1] ? (double)n->y[i] : 0.0));
    return AR_OK;
}

/* Dropout of one of the input's two terms, in every wrong row at the same rate. */
static ar_status find_dropout(ari_trace *t, norm *n, const ari_case *c)
{
    const size_t cols = c->grid.cols;
    double *ratio = NULL, least = HUGE_VAL, most = 0.0;
    AR_TRY(ARI_ALLOC(&ratio, cols, c->grid.d->name));
    ar_status st = AR_OK;
    for (size_t k = 0; k < 2 && t->kind == ARI_FOUND_NOTHING; k++) {
        bool held = true;
        least = HUGE_VAL, most = 0.0;
        for (ari_run run = ari_runs_of(&c->grid); held && ari_runs_next(&run);) {
            double times;
            if (run.count != cols || !run_is_wrong(&c->grid, &run))
                continue;
            AR_TRY_TO(done, st, ar_dump_read_f32(n->input[k], run.row * cols, cols, n->x));
            AR_TRY_TO(done, st, ar_dump_read_f32(n->input[!k], run.row * cols, cols, n->y));
            held = is_dropped(&times, ratio, n, n->x, n->y, &run);
            least = fmin(least, times);
            most = fmax(most, times);
        }
        if (!held || most - least > 1e-2 * most)
            continue;
        ari_found(t, ARI_FOUND_NORM_AGAIN, ARI_IF(FRACTION));
        ari_words(t, "what", "%.150s", n->input[!k]->name);
        ari_number(t, "factor", 0.5 * (least + most));
        ari_number(t, "rate", 1.0 - 2.0 / (least + most));
    }
done:
    free(ratio);
    return st;
}

/* Which of the two terms is missing, or how often it counts. */
static void found_mixture(ari_trace *t, const norm *n, const verdict *v)
{
    const double middle = 0.5 * (v->least + v->most), b = tan(middle);
    const bool second = fabs(b) > 1.0; /* the second is more than it should be, or the first less */
    const double times = second ? 1.0 / b : b;
    ari_found(t, ARI_FOUND_NORM_AGAIN, ARI_IF(OF_INPUT));
    if (fabs(times) < 0.01)
        ari_words(t, "what", "%.80s was not added to %.80s", n->input[!second]->name, n->input[second]->name);
    else
        ari_words(t, "what", "for each %.70s, %.70s counts %.4g times", n->input[second]->name, n->input[!second]->name,
                  times);
}

/* The epsilon that gives the row: of the reference mean(x^2) + eps is x^2/z^2, of the other that over the factor's. */
static ar_status add_epsilon(verdict *v, norm *n, const ari_case *c, const ari_run *run, const ari_sums *same)
{
    double square, zz = 0.0;
    AR_TRY(read_input(n, c, run->row, &square));
    for (size_t i = 0; i < c->grid.cols; i++)
        zz += pow(without(n, run->ref, i), 2.0) / (double)c->grid.cols;
    const double factor = ari_factor_of(same), under = square / zz / (factor * factor);
    v->low = fmin(v->low, under - square);
    v->high = fmax(v->high, under - square);
    v->unsure =
        fmax(v->unsure, under * (4e-6 + c->relative + 2.0 * c->absolute / sqrt(same->vv / (double)c->grid.cols)));
    return AR_OK;
}

static ar_status look_at_norm(ari_trace *t, norm *n, const ari_case *c)
{
    verdict v = {.same = true,
                 .moved = !n->bias,
                 .plus = true,
                 .bare = true,
                 .raw = n->input[0] != NULL,
                 .low = HUGE_VAL,
                 .high = -HUGE_VAL,
                 .mixed = n->input[0] && n->input[1],
                 .least = HUGE_VAL,
                 .most = -HUGE_VAL};
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        if (run.count != c->grid.cols || !run_is_wrong(&c->grid, &run))
            continue;
        const against a = add_row(n, &c->grid, &run);
        v.rows++;
        v.same = v.same && follows(&a.same, c);
        v.moved = v.moved && follows(&a.moved, c);
        v.plus = v.plus && follows(&a.plus, c) && ari_is_near(ari_factor_of(&a.plus), 1.0, 1e-3 + c->relative);
        v.bare = v.bare && follows(&a.bare, c) && ari_is_near(ari_factor_of(&a.bare), 1.0, 1e-3 + c->relative);
        if (v.same && n->input[0])
            AR_TRY(add_epsilon(&v, n, c, &run, &a.same));
        if (v.mixed && !v.same)
            AR_TRY(add_mixture(&v, n, c, &run));
        if (v.raw && !v.same)
            AR_TRY(is_raw(&v.raw, n, c, &run));
    }
    if (v.rows < 4)
        return AR_OK;
    if (v.same && n->input[0] && v.high > 0.0 && v.high - v.low <= 0.02 * v.high + 2.0 * v.unsure &&
        v.high > 4.0 * v.unsure) {
        ari_found(t, ARI_FOUND_NORM_AGAIN, ARI_IF(ROWS));
        ari_number(t, "epsilon", 0.5 * (v.low + v.high));
    } else if (!v.same && v.raw) {
        ari_found(t, ARI_FOUND_NORM_AGAIN, ARI_IF(ALL));
    } else if (!v.same && (v.moved || v.plus || v.bare)) {
        ari_found(t, ARI_FOUND_NORM_AGAIN, v.moved ? ARI_IF(SHIFT) : v.plus ? ARI_IF(ONE) : ARI_IF(ZERO));
    } else if (!v.same && v.mixed && v.most - v.least < 1e-3 && fabs(v.least - atan(1.0)) > 1e-2) {
        found_mixture(t, n, &v);
    } else if (!v.same && !n->bias && n->input[0] && n->input[1]) {
        return find_dropout(t, n, c);
    }
    return AR_OK;
}

ar_status ari_measure_normed(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    float *bias = NULL;
    norm n = {.other_way = 1.0};
    ar_status st = AR_OK;
    if (!(ari_name_is(g->d->name) & ARI_IS_NORM) || g->nd < 2 || g->cols < 8)
        return AR_OK;
    AR_TRY_TO(done, st, read_parameter(&n.weight, c, "weight"));
    AR_TRY_TO(done, st, read_parameter(&bias, c, "bias"));
    if (!n.weight)
        goto done;
    n.bias = bias;
    AR_TRY_TO(done, st, ARI_ALLOC(&n.x, g->cols, g->d->name));
    AR_TRY_TO(done, st, ARI_ALLOC(&n.y, g->cols, g->d->name));
    AR_TRY_TO(done, st, find_input_either_way(&n, c));
    if (!is_anywhere_zero(&n, c))
        st = look_at_norm(t, &n, c);
done:
    free(n.weight);
    free(bias);
    free(n.x);
    free(n.y);
    return st;
}
