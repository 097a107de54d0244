/* SPDX-License-Identifier: Apache-2.0 */
/* The reference times a number that is another one for each slice, sample, shard or row. */
#include <stdlib.h>

#include "anyrank/parallel.h"
#include "ref/core/size.h"
#include "verify/diagnose/case.h"
#include "verify/diagnose/roles.h"

/* --- a factor for each slice -------------------------------------------------------------------------------------- */

/* Whether values are the reference times a number, but for rounding of n of them. */
static bool scales(const ari_case *c, const ari_sums *s, double n)
{
    const double left = ari_factor_left(s);
    return s->rr > 0.0 && fabs(ari_factor_of(s)) > 1e-9 && left <= 1e-3 * s->vv &&
           left <= fmax(1e-10, 0.25 * c->relative * c->relative) * s->vv + n * c->absolute * c->absolute;
}

enum { ROWS = -1 }; /* all dimensions but the last as one axis */

/* Sums of each slice along an axis, over all copies; n counts what differs. */
static ar_status sum_slices(ari_sums **gives, size_t *n, const ari_case *c, int axis)
{
    const ari_grid *g = &c->grid;
    const bool last = axis == g->nd - 1;
    *n = axis == ROWS ? g->rows : g->shape[axis];
    AR_TRY(ari_alloc_zero((void **)gives, *n, sizeof **gives, g->d->name));
    ari_runs it = ari_runs_of(g);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        ari_sums *s = *gives + (axis == ROWS ? run.row : ari_grid_index(g, run.index, axis));
        for (size_t i = 0; i < run.count; i++, s += last) {
            ari_sums_add(s, (double)run.value[i], (double)run.ref[i]);
            s->n += ari_survey_bit(&c->survey, run.index + i);
        }
    }
    return AR_OK;
}

/* The range of the slices' factors; false unless each that differs has one, and not all the same. */
static bool range_of(double *low, double *high, size_t *wrong, const ari_case *c, const ari_sums *s, size_t n)
{
    const double size = (double)(c->grid.count / n);
    size_t apart = 0;
    double first = 0.0;
    bool far = false;
    *low = INFINITY;
    *high = -INFINITY;
    *wrong = 0;
    for (size_t k = 0; k < n; k++) {
        const double factor = ari_factor_of(&s[k]);
        if (s[k].n == 0)
            continue;
        if (!scales(c, &s[k], size))
            return false;
        first = (*wrong)++ ? first : factor;
        apart +=
            fabs(factor - first) > fmax(2e-5, c->relative) * fabs(first) + 4.0 * c->absolute * sqrt(size / s[k].rr);
        far = far || fabs(factor - 1.0) > (c->val ? 2e-3 : 1e-4);
        *low = fmin(*low, factor);
        *high = fmax(*high, factor);
    }
    return *wrong > 1 && apart > 0 && far && size >= 8.0;
}

static void measure_slices(ari_trace *t, const ari_case *c, int axis, const ari_sums *s, size_t n)
{
    const ari_grid *g = &c->grid;
    const int rows = g->nd < 2 ? 0 : g->nd - 2, dim = axis == ROWS ? rows : axis;
    double low = 0.0, high = 0.0;
    size_t wrong = 0;
    if (n < 2 || !range_of(&low, &high, &wrong, c, s, n) || (!c->val && !(low > 0.0)))
        return;
    ari_found(t, ARI_FOUND_SLICE_FACTORS, axis == g->nd - 1 ? ARI_IF(FEATURES) : axis == ROWS ? ARI_IF(ROWS) : 0);
    ari_words(t, "axis", "%s", ari_dim_name(g, dim, false));
    ari_words(t, "axes", "%s", ari_dim_name(g, dim, true));
    ari_count(t, "wrong", wrong);
    ari_number(t, "low", low);
    ari_number(t, "high", high);
}

/* --- a mean over each part in place of the whole ------------------------------------------------------------------ */

/* If part k of the tokens was divided by its own count T_k in place of T, what belongs to it is the reference times
 * f_k = T/T_k, or T/(P T_k) where the P parts were averaged after that. Then the sum of 1/f_k is 1, or P. */
typedef struct parts {
    int n;
    double inverse, low, high; /* sum of 1/f, smallest and largest f */
    double unsure;             /* what noise leaves unknown of an f, relative to it */
} parts;

static void add_part(parts *p, double factor)
{
    p->inverse += 1.0 / factor;
    p->low = p->n == 0 ? factor : fmin(factor, p->low);
    p->high = p->n == 0 ? factor : fmax(factor, p->high);
    p->n++;
}

/* Part k are samples [start, start + count): false if they have no factor in common. */
static bool add_samples(parts *p, const ari_case *c, const ari_sums *s, size_t start, size_t count)
{
    double factor = NAN;
    for (size_t i = start; i < start + count; i++) {
        const double own = ari_factor_of(&s[i]), size = (double)(c->grid.count / c->grid.shape[0]);
        if (s[i].rr == 0.0 && s[i].vv == 0.0)
            continue;
        /* Six standard errors, as of one factor. */
        const double unsure = 6.0 * sqrt(fmax(ari_factor_left(&s[i]), 0.0) / size / s[i].rr) / fabs(own);
        p->unsure = fmin(fmax(p->unsure, unsure), 5e-3);
        if (!scales(c, &s[i], size) || !(own > 0.0) ||
            (!isnan(factor) && !ari_is_near(own, factor, fmax(p->unsure, 1e-4))))
            return false;
        factor = own;
    }
    if (!isnan(factor))
        add_part(p, factor);
    return true;
}

/* The parts are the samples of a data-parallel rank, or of one of its micro-batches; where ranks are not seen, runs of
 * samples with one factor. */
static bool parts_of_samples(parts *p, const ari_case *c, const ari_sums *s, int micro_batches)
{
    const ari_difference *d = c->grid.d;
    const ar_parallel layout = {.dp = ari_along(d, ARI_CUTS_SAMPLES), .micro_batches = micro_batches};
    size_t start = 0, count = 0;
    for (size_t end = 0; d->hidden && start < c->grid.shape[0]; start = end) {
        for (end = start + 1; end < c->grid.shape[0]; end++) {
            if (!ari_is_near(ari_factor_of(&s[end]), ari_factor_of(&s[start]), 2e-5))
                break;
        }
        if (!add_samples(p, c, s, start, end - start))
            return false;
    }
    for (int i = 0; !d->hidden && i < layout.dp * micro_batches; i++) {
        ar_parallel_rows(&layout, c->grid.shape[0], i / micro_batches, i % micro_batches, &start, &count);
        if (!add_samples(p, c, s, start, count))
            return false;
    }
    return true;
}

/* One factor of all that a rank holds: of one value, or of its own positions. The parts are the ranks along `over`. */
static bool parts_of_ranks(parts *p, const ari_case *c, ari_axes over)
{
    const ari_difference *d = c->grid.d;
    *p = (parts){.n = 0};
    for (int rank = 0; rank < d->ranks; rank++) {
        const ari_tally *own = &c->survey.rank[rank];
        const ari_sums s = {own->vr, own->rr, own->vv, own->different};
        if (!ari_in_group(d, rank, over, 0) || own->held == 0)
            continue;
        const double factor = own->different > 0 ? ari_factor_of(&s) : 1.0;
        if (!(factor > 0.0) || !isfinite(factor) || (own->different > 0 && ari_factor_left(&s) > 1e-10 * s.vv))
            return false;
        add_part(p, factor);
    }
    return true;
}

enum { IDS_ASKED = 4096 };

/* The factors of the embedding's gradients of ids, of at most IDS_ASKED, where each is a multiple of the reference's:
 * those are of ids that one part alone looks up. */
static ar_status factors_of_ids(double *factor, size_t *n, const ar_dump_tensor *r, const ar_dump_tensor *v)
{
    const size_t cols = r->shape[1], step = r->shape[0] / IDS_ASKED + 1;
    float *row = NULL;
    ar_status st = AR_OK;
    *n = 0;
    AR_TRY(ari_alloc((void **)&row, 2 * cols, sizeof *row, r->name));
    for (size_t id = 0; id < r->shape[0] && st == AR_OK; id += step) {
        ari_sums s = {0};
        AR_TRY_TO(done, st, ar_dump_read_f32(r, id * cols, cols, row));
        AR_TRY_TO(done, st, ar_dump_read_f32(v, id * cols, cols, row + cols));
        for (size_t i = 0; i < cols; i++)
            ari_sums_add(&s, (double)row[cols + i], (double)row[i]);
        if (s.rr > 0.0 && s.vr > 0.0 && ari_factor_left(&s) <= 1e-9 * s.vv)
            factor[(*n)++] = ari_factor_of(&s);
    }
done:
    free(row);
    return st;
}

static int compare_factors(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* A parameter's gradient mixes the parts, but for ids that one part alone looks up. A part
 * has two such ids at least. */
static ar_status parts_of_ids(parts *p, const ari_case *c, const ar_dump_tensor *r)
{
    const ar_dump_tensor *v = ar_dump_find(c->known->other, r->name);
    double *factor = NULL;
    size_t n = 0;
    *p = (parts){.unsure = 1e-4};
    if (!v || v->ndim != 2 || v->count != r->count || r->shape[1] < 8)
        return AR_OK;
    AR_TRY(ari_alloc((void **)&factor, IDS_ASKED, sizeof *factor, r->name));
    const ar_status st = factors_of_ids(factor, &n, r, v);
    qsort(factor, n, sizeof *factor, compare_factors);
    for (size_t first = 0, end = 0; st == AR_OK && first < n; first = end) {
        while (end < n && ari_is_near(factor[end], factor[first], p->unsure))
            end++;
        if (end - first > 1)
            add_part(p, factor[(first + end) / 2]);
    }
    free(factor);
    return st;
}

/* Whether the parts' factors are those of means; how many parts an average would be over. */
static bool are_means(ari_trace *t, const parts *p, int expected, ari_properties is)
{
    const double within = fmax(p->unsure, 1e-4);
    const bool apart = !ari_is_near(p->low, p->high, 4.0 * within);
    const bool averaged = apart && (ari_is_near(p->inverse, p->n, within) || ari_is_near(p->inverse, expected, within));
    if (!averaged && !(p->n > 1 && ari_is_near(p->inverse, 1.0, within) && (apart || !(is & ARI_IF(HIDDEN)))))
        return false;
    ari_found(t, ARI_FOUND_MEANS, is | (averaged ? ARI_IF(AVERAGE) : 0) | (apart ? 0 : ARI_IF(SAME)));
    ari_count(t, "parts", (size_t)p->n);
    ari_number(t, "low", p->low);
    ari_number(t, "high", p->high);
    ari_number(t, "inverse", p->inverse);
    ari_words(t, "of", "%s",
              is & ARI_IF(OF_DP)      ? "data-parallel ranks"
              : is & ARI_IF(OF_CP)    ? "context-parallel ranks"
              : is & ARI_IF(OF_MICRO) ? "micro-batches"
                                      : "ranks or micro-batches");
    return true;
}

/* The step's gradients of embeddings say what is wrong with all gradients. */
static ar_status measure_ids(ari_trace *t, const ari_case *c)
{
    for (size_t i = 0; i < ar_dump_count(c->known->reference) && t->kind == ARI_FOUND_NOTHING; i++) {
        const ar_dump_tensor *r = ar_dump_at(c->known->reference, i);
        const ari_order_key key = ari_order_of(r->name, c->path);
        parts p;
        if (key.pass != 'g' || key.step != c->grid.d->step || r->ndim != 2 ||
            !(ari_name_is(r->name) & ARI_IS_EMBEDDING))
            continue;
        AR_TRY(parts_of_ids(&p, c, r));
        if (p.n > 1 && are_means(t, &p, p.n, ARI_IF(HIDDEN)))
            ari_words(t, "of", "ranks or micro-batches (as %s shows, in rows of ids that one of them alone has)",
                      r->name);
    }
    return AR_OK;
}

/* Whether all that each data-parallel or context-parallel rank holds, or each of both kinds, has a factor of its
 * own. */
static bool are_means_of_ranks(ari_trace *t, const ari_case *c)
{
    static const struct {
        ari_axes over;
        ari_properties is;
    } axes[] = {{ARI_CUTS_SAMPLES, ARI_IF(OF_DP)}, {ARI_CUTS_POSITIONS, ARI_IF(OF_CP)}, {ARI_CUTS_DATA, 0}};
    const bool one = ari_along(c->grid.d, ARI_CUTS_SAMPLES) == 1 || ari_along(c->grid.d, ARI_CUTS_POSITIONS) == 1;
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++) {
        const bool there = ari_along(c->grid.d, axes[i].over) > 1 && !(one && axes[i].over == ARI_CUTS_DATA);
        parts p;
        if (there && parts_of_ranks(&p, c, axes[i].over) && p.n > 1 && are_means(t, &p, p.n, axes[i].is))
            return true;
    }
    return false;
}

ar_status ari_measure_means(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const int dp = ari_along(d, ARI_CUTS_SAMPLES), micro = d->micro_batches > 1 ? d->micro_batches : 1;
    const bool shared = ari_along(d, ARI_CUTS_POSITIONS) > 1;
    const bool samples = d->pass == 'b' && d->ndim >= 3, value = d->pass == 'f' && c->grid.count == 1;
    parts p = {.n = 0}, of_micro = {.n = 0}, runs = {.n = 0};
    ari_sums *s = NULL;
    size_t n = 0;
    if (d->pass == 'g' && d->hidden && c->known->reference && c->known->other && c->survey.total.nan == 0)
        return measure_ids(t, c);
    if ((!samples && !(value && ari_along(d, ARI_CUTS_DATA) > 1)) || c->survey.total.nan > 0)
        return AR_OK;
    if (samples)
        AR_TRY(sum_slices(&s, &n, c, 0));
    if (d->hidden && n > 1 && parts_of_samples(&runs, c, s, 1) && runs.n > 1)
        are_means(t, &runs, runs.n, ARI_IF(HIDDEN));
    else if (dp > 1 && samples && parts_of_samples(&p, c, s, 1) && p.n > 1 && are_means(t, &p, p.n, ARI_IF(OF_DP)))
        ;
    else if (!d->hidden && (value || shared) && are_means_of_ranks(t, c))
        ;
    else if (micro > 1 && samples && parts_of_samples(&of_micro, c, s, micro))
        are_means(t, &of_micro, micro, ARI_IF(OF_MICRO));
    free(s);
    return AR_OK;
}

/* --- a factor for each shard -------------------------------------------------------------------------------------- */

typedef struct shards {
    int dim;
    size_t n, inner; /* shards; elements of one that lie side by side */
    ari_sums s[ARI_MOST_RANKS];
} shards;

/* Whether an element is the reference times a factor; what rounding left in the reference is scaled with it. */
static bool is_scaled(const ari_case *c, size_t i, double factor)
{
    const double expected = factor * (double)c->ref[i], off = fabs((double)c->val[i] - expected);
    return off <= fmax(1.0, fabs(factor)) * c->absolute + (c->relative + 0x1p-21) * fabs(expected);
}

/* The standard error of a factor; of the sums' elements, there are `outer` times as many as counted. */
static double noise_in_factor(const ari_sums *s, size_t outer)
{
    return sqrt(fmax(ari_factor_left(s), 0.0) / s->rr / (double)(s->n * outer));
}

/* Whether every shard of n along a dimension has a factor, and not all the same. */
static bool shards_scale(shards *p, const ari_case *c, int dim, size_t n, const ari_sums *slice)
{
    const ari_grid *g = &c->grid;
    const size_t inner = ari_grid_inner(g, dim), outer = g->count / inner / g->shape[dim];
    bool apart = false;
    *p = (shards){.dim = dim, .n = n, .inner = g->shape[dim] / n * inner};
    for (size_t i = 0; i < g->shape[dim]; i++) {
        ari_sums *s = &p->s[i / (g->shape[dim] / n)];
        s->vr += slice[i].vr;
        s->rr += slice[i].rr;
        s->vv += slice[i].vv;
        s->n += p->inner / (g->shape[dim] / n);
    }
    for (size_t k = 0; k < n; k++) {
        const double factor = ari_factor_of(&p->s[k]);
        if (!isfinite(factor) || fabs(factor) < 1e-9 || fabs(factor) * c->max_ref <= 4.0 * c->absolute)
            return false;
        const double unsure = noise_in_factor(&p->s[k], outer) + noise_in_factor(&p->s[0], outer);
        apart = apart || fabs(factor - ari_factor_of(&p->s[0])) > fmax(1e-3 * fabs(factor), 6.0 * unsure);
    }
    double worst = 0.0;
    for (size_t i = 0; apart && i < c->count; i++) {
        const double expected = ari_factor_of(&p->s[i / p->inner % n]) * (double)c->ref[i];
        if (!is_scaled(c, i, ari_factor_of(&p->s[i / p->inner % n])))
            return false;
        worst = fmax(worst, fabs((double)c->val[i] - expected));
    }
    return apart && ari_explains(c, worst);
}

static void found_shards(ari_trace *t, const ari_case *c, const shards *p)
{
    ari_found(t, ARI_FOUND_SHARD_FACTORS, 0);
    ari_count(t, "shards", p->n);
    ari_words(t, "axes", "%s", ari_dim_name(&c->grid, p->dim, true));
    ari_text factors = ari_list(t, "factors");
    for (size_t k = 0; k < p->n && k < 6; k++)
        ari_say(&factors, " %.5g", ari_factor_of(&p->s[k]));
    ari_say(&factors, p->n > 6 ? " ..." : "");
}

static void measure_shards(ari_trace *t, const ari_case *c, int dim, const ari_sums *slice)
{
    const size_t indices = c->grid.shape[dim];
    shards p;
    for (size_t n = 2; n <= ARI_MOST_RANKS && n < indices && t->kind == ARI_FOUND_NOTHING; n++) {
        if (indices % n == 0 && c->count / n >= 8 && shards_scale(&p, c, dim, n, slice))
            found_shards(t, c, &p);
    }
}

/* --- a factor for each shard of each row -------------------------------------------------------------------------- */

/* Whether a run of features is the reference times a number; what noise leaves unknown of it: six standard errors. */
static bool run_scales(const ari_case *c, size_t from, size_t n, double *factor, double *unsure)
{
    ari_sums s = {0};
    for (size_t i = from; i < from + n; i++)
        ari_sums_add(&s, (double)c->val[i], (double)c->ref[i]);
    *factor = s.rr > 0.0 ? ari_factor_of(&s) : 1.0;
    *unsure = s.rr > 0.0 ? 6.0 * sqrt(fmax(ari_factor_left(&s), 0.0) / (double)n / s.rr) : HUGE_VAL;
    for (size_t i = from; i < from + n; i++) {
        if (!is_scaled(c, i, *factor))
            return false;
    }
    return true;
}

/* Whether each row's n runs of features have factors, which differ from run to run. */
static bool row_shards_scale(const ari_case *c, size_t n, double *low, double *high)
{
    const size_t cols = c->grid.cols, size = cols / n;
    size_t apart = 0;
    *low = INFINITY;
    *high = -INFINITY;
    for (size_t row = 0; row < c->grid.rows; row++) {
        double first = 1.0, factor = 1.0, unsure = 0.0, of_first = 0.0;
        for (size_t k = 0; k < n; k++) {
            if (!run_scales(c, row * cols + k * size, size, &factor, &unsure))
                return false;
            first = k == 0 ? factor : first;
            of_first = k == 0 ? unsure : of_first;
            apart += fabs(factor - first) > (1e-3 + c->relative) * fmax(1.0, fabs(first)) + unsure + of_first;
            *low = fmin(*low, factor);
            *high = fmax(*high, factor);
        }
    }
    return apart * 4 > c->grid.rows * n && *low > 0.0;
}

static void measure_row_shards(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    double low, high;
    if (c->survey.different * 4 < c->count) /* in as much noise as is allowed all factors fit */
        return;
    for (size_t n = 2; n <= ARI_MOST_RANKS && n * 4 <= g->cols && g->nd > 1; n++) {
        if (g->cols % n != 0 || !row_shards_scale(c, n, &low, &high))
            continue;
        ari_found(t, ARI_FOUND_ROW_SHARD_FACTORS, 0);
        ari_count(t, "shards", n);
        ari_number(t, "low", low);
        ari_number(t, "high", high);
        return;
    }
}

ar_status ari_measure_scales(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    ari_sums *s[AR_MAX_DIMS + 1] = {NULL}; /* of each dimension's indices, of rows */
    size_t n = 0;
    ar_status st = AR_OK;
    if (c->survey.total.nan > 0)
        return AR_OK;
    const int repeats = ari_reference_repeats(c, g->cols);
    for (int dim = 0; c->val && dim < g->nd && t->kind == ARI_FOUND_NOTHING; dim++) {
        AR_TRY_TO(done, st, sum_slices(&s[dim], &n, c, dim));
        measure_shards(t, c, dim, s[dim]);
    }
    for (int dim = 0; c->val && g->nd > 1 && dim < g->nd - repeats && t->kind == ARI_FOUND_NOTHING; dim++)
        measure_slices(t, c, dim, s[dim], g->shape[dim]);
    if (t->kind == ARI_FOUND_NOTHING && ari_is_activation(g->d)) {
        AR_TRY_TO(done, st, sum_slices(&s[AR_MAX_DIMS], &n, c, ROWS));
        measure_slices(t, c, ROWS, s[AR_MAX_DIMS], n);
    }
    if (t->kind == ARI_FOUND_NOTHING && c->val)
        measure_row_shards(t, c);
done:
    for (int i = 0; i <= AR_MAX_DIMS; i++)
        free(s[i]);
    return st;
}

/* --- attention's probabilities ------------------------------------------------------------------------------------ */

/* How many keys a query sees, those up to itself: the width of a band that all queries have; 0: it is no band. */
static size_t band_of(const ari_grid *g, const float *probs)
{
    const size_t s = g->cols;
    size_t width = 0;
    for (size_t row = 0; row < g->rows; row++) {
        size_t seen = 0;
        for (size_t key = 0; key < s; key++)
            seen += probs[row * s + key] != 0.0f;
        width = seen > width ? seen : width;
    }
    for (size_t i = 0; i < g->count; i++) {
        const size_t key = i % s, query = i / s % s;
        if ((probs[i] != 0.0f) != (key <= query && key + width > query))
            return 0;
    }
    return width;
}

/* The factor k of softmax(k x) against softmax(x): within a row the logarithms differ by k times as much, less a
 * constant. 0: none holds. */
static double factor_of_scores(const ari_case *c)
{
    const ari_grid *g = &c->grid;
    double ab = 0.0, aa = 0.0, bb = 0.0;
    for (size_t row = 0; row < g->rows; row++) {
        const float *r = c->ref + row * g->cols, *v = c->val + row * g->cols;
        double mean_r = 0.0, mean_v = 0.0, n = 0.0;
        for (size_t i = 0; i < g->cols; i++) {
            if ((r[i] > 0.0f) != (v[i] > 0.0f))
                return 0.0;
            n += r[i] > 0.0f;
            mean_r += r[i] > 0.0f ? log((double)r[i]) : 0.0;
            mean_v += r[i] > 0.0f ? log((double)v[i]) : 0.0;
        }
        for (size_t i = 0; i < g->cols; i++) {
            const double a = r[i] > 0.0f ? log((double)r[i]) - mean_r / n : 0.0;
            const double b = r[i] > 0.0f ? log((double)v[i]) - mean_v / n : 0.0;
            ab += a * b;
            aa += a * a;
            bb += b * b;
        }
    }
    const double k = ab / aa, moved = (k - 1.0) * (k - 1.0) * aa;
    return k > 0.0 && bb - ab * k <= 1e-4 * moved ? k : 0.0;
}

ar_status ari_measure_probs(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    if (!(ari_name_is(g->d->name) & ARI_IS_PROBS) || g->d->pass != 'f' || g->nd < 3 || c->survey.total.nan > 0 ||
        g->shape[g->nd - 1] != g->shape[g->nd - 2])
        return AR_OK;
    const size_t before = band_of(g, c->ref), now = band_of(g, c->val);
    const double factor = factor_of_scores(c);
    if (before > 0 && now > 0 && before != now) {
        ari_found(t, ARI_FOUND_ATTENTION, ARI_IF(CUT) | ARI_IF(LOG));
        ari_number(t, "window", (double)now);
    } else if (factor > 0.0) {
        ari_found(t, ARI_FOUND_ATTENTION, ARI_IF(ROOT) | ARI_IF(LOG));
        ari_number(t, "factor", factor);
    }
    return AR_OK;
}
