/* SPDX-License-Identifier: Apache-2.0 */
/* One number for each class of elements, slices, rows, shards, shards of each row, features, positions: which the
 * reference is multiplied by, or which was added to it; and the parts that a mean was taken over. */
#include <stdlib.h>

#include "anyrank/parallel.h"
#include "ref/models/parallel_private.h"
#include "verify/diagnose/hypothesis.h"

/* --- classes ------------------------------------------------------------------------------------------------------ */

/* The fit of a class's values by the reference. */
typedef struct class
{
    ari_fit fit;
    size_t off;            /* elements that differ */
    double number, unsure; /* the factor, or what is added; unsure: six standard errors */
} class;

/* `side` adjacent elements are of one class; `n` classes follow each other, again and again. */
typedef struct classes {
    size_t side, n;
    bool added;   /* a class's number is added; else it is a factor */
    bool dropped; /* an element that is zero on both sides was dropped and does not count */
    class *of;    /* [n] */
} classes;

/* Shards of a dimension; as many as it has indices: slices. */
static classes along(const ari_grid *g, int dim, size_t n)
{
    return (classes){.side = g->shape[dim] / n * ari_grid_inner(g, dim), .n = n};
}

static bool is_silent(const classes *k, const ari_run *run, size_t i)
{
    return k->dropped && run->value[i] == 0.0f && run->ref[i] == 0.0f;
}

/* A class of which nothing is known has the number that changes nothing. */
static void solve(classes *k)
{
    for (size_t i = 0; i < k->n; i++) {
        class *s = &k->of[i];
        s->number = k->added ? 0.0 : 1.0;
        s->unsure = HUGE_VAL;
        if (!(s->fit.aa > 0.0))
            continue;
        ari_fit_one(&s->number, &s->fit);
        s->unsure = ari_fit_unsure(&s->fit) * fabs(s->number);
    }
}

/* Over all copies. */
static ar_status fit_classes(classes *k, const ari_case *c)
{
    AR_TRY(ARI_TAKE(&k->of, c->arena, k->n, c->d->name));
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        for (size_t i = 0, end; i < run.count; i = end) {
            const size_t at = run.index + i, left = k->side - at % k->side;
            class *s = &k->of[at / k->side % k->n];
            for (end = i; end < run.count && end - i < left; end++) {
                const double v = (double)run.value[end], r = (double)run.ref[end];
                if (!is_silent(k, &run, end))
                    ari_fit_add(&s->fit, k->added ? v - r : v, k->added ? 1.0 : r, 0.0);
                s->off += ari_survey_bit(&c->survey, run.index + end);
            }
        }
    }
    solve(k);
    return AR_OK;
}

static double of_its_class(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const classes *k = h->of;
    const double number = k->of[(run->index + i) / k->side % k->n].number, r = (double)run->ref[i];
    return is_silent(k, run, i) ? (double)NAN : k->added ? r + number : r * number;
}

/* Summary of the classes' factors. */
typedef struct spread {
    double low, high;
    size_t wrong, apart; /* classes with a difference; of those, whose factor is another than their group's first */
} spread;

/* The uncertainty of a factor due to noise or, if the noise has one sign, to all that the case allows. */
static double unknown_of(const ari_case *c, const class *s)
{
    return fmax(s->unsure, 4.0 * c->absolute * sqrt((double)s->fit.n / s->fit.aa));
}

static bool is_apart(const ari_case *c, const class *s, const class *first)
{
    const double known = fmax(2.0 * ARI_SUMS, c->relative) * fmax(1.0, fabs(s->number));
    return fabs(s->number - first->number) > known + unknown_of(c, s) + unknown_of(c, first);
}

/* True if each class that differs has a factor, and those within a group of this many classes are not all the same. */
static bool spread_of(spread *all, const ari_case *c, const classes *k, size_t group)
{
    const class *first = NULL;
    *all = (spread){.low = INFINITY, .high = -INFINITY};
    for (size_t i = 0; i < k->n; i++) {
        const class *s = &k->of[i];
        first = i % group == 0 ? NULL : first;
        if (s->off == 0)
            continue;
        if (!ari_is_multiple(c, &s->fit))
            return false;
        first = first ? first : s;
        all->wrong++;
        all->apart += is_apart(c, s, first);
        all->low = fmin(all->low, s->number);
        all->high = fmax(all->high, s->number);
    }
    return all->apart > 0;
}

static bool holds(const ari_case *c, const classes *k, const spread *all)
{
    const ari_hypothesis h = {.expect = of_its_class, .c = c, .of = k, .factor = fmax(-all->low, all->high)};
    return ari_holds_all(NULL, &h);
}

/* --- a factor for each slice, row or shard ------------------------------------------------------------------------ */

/* Fewer elements each have a factor. */
enum { ELEMENTS_TELL = 8 };

/* `dim` may be ROWS: all dimensions but the last as one. */
enum { ROWS = -1 };

static void measure_slices(ari_trace *t, const ari_case *c, int dim, const classes *k)
{
    const ari_grid *g = &c->grid;
    const int named = dim != ROWS ? dim : g->nd < 2 ? 0 : g->nd - 2;
    const double far = c->val ? 2.0 * ARI_KNOWN : ARI_SEEN;
    spread all;
    if (g->count / k->n < ELEMENTS_TELL || !spread_of(&all, c, k, k->n) || (!c->val && !(all.low > 0.0)) ||
        (fabs(all.low - 1.0) <= far && fabs(all.high - 1.0) <= far))
        return;
    ARI_FINDING(t, ARI_FOUND_SLICE_FACTORS,
                dim == g->nd - 1 ? ARI_IF(FEATURES)
                : dim == ROWS    ? ARI_IF(ROWS)
                                 : 0,
                {"axis", .text = ari_dim_name(g, named, false)}, {"axes", .text = ari_dim_name(g, named, true)},
                {"wrong", .count = all.wrong}, {"low", .number = all.low}, {"high", .number = all.high});
}

/* Every one of n shards along a dimension has a factor, and those that differ are not all the same. */
static void measure_shards(ari_trace *t, const ari_case *c, int dim, const classes *slices)
{
    for (size_t n = 2; n <= ARI_MOST_RANKS && n < slices->n; n++) {
        class of[ARI_MOST_RANKS] = {{.off = 0}};
        classes p = along(&c->grid, dim, n);
        spread all;
        p.of = of;
        for (size_t i = 0; i < slices->n && slices->n % n == 0; i++) {
            class *s = &of[i / (slices->n / n)];
            const ari_fit *f = &slices->of[i].fit;
            s->fit.yy += f->yy, s->fit.ya += f->ya, s->fit.aa += f->aa, s->fit.n += f->n;
            s->off += c->survey.hits[dim][i]; /* the factor of a right shard says nothing */
        }
        solve(&p);
        if (slices->n % n != 0 || c->count / n < ELEMENTS_TELL || !spread_of(&all, c, &p, n) || !holds(c, &p, &all))
            continue;
        ARI_FINDING(t, ARI_FOUND_SHARD_FACTORS, 0, {"shards", .count = n},
                    {"axes", .text = ari_dim_name(&c->grid, dim, true)});
        ari_text factors = ari_list(t, "factors");
        for (size_t k = 0; k < n && k < 6; k++)
            ari_say(&factors, " %.5g", of[k].number);
        ari_say(&factors, n > 6 ? " ..." : "");
        return;
    }
}

/* True if each row's n shards have factors, a quarter of them different from the row's first. */
static ar_status measure_row_shards(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    if (c->survey.different * 4 < c->count) /* in as much noise as is allowed all factors fit */
        return AR_OK;
    for (size_t n = 2; n <= ARI_MOST_RANKS && n * 4 <= g->cols && g->nd > 1 && t->kind == ARI_FOUND_NOTHING; n++) {
        classes k = {.side = g->cols / n, .n = g->rows * n};
        ARI_ARENA_SCOPE(c->arena);
        spread all;
        if (g->cols % n != 0)
            continue;
        AR_TRY(fit_classes(&k, c));
        if (spread_of(&all, c, &k, n) && all.apart * 4 > k.n && all.low > 0.0 && holds(c, &k, &all)) {
            ARI_FINDING(t, ARI_FOUND_ROW_SHARD_FACTORS, 0, {"shards", .count = n}, {"low", .number = all.low},
                        {"high", .number = all.high});
        }
    }
    return AR_OK;
}

/* True if the reference repeats itself every `length` elements: any fault of it then repeats too. */
static bool repeats(const ari_case *c, size_t length)
{
    const float *ref = c->d->reference;
    size_t i = length;
    while (i < c->grid.count && fabs((double)ref[i] - (double)ref[i - length]) <= 4.0 * c->absolute)
        i++;
    return i >= c->grid.count;
}

ar_status ari_measure_scales(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    classes k[AR_MAX_DIMS + 1] = {{0}}; /* of each dimension's indices, of rows */
    const int repeated = repeats(c, g->cols);
    for (int dim = 0; c->val && dim < g->nd && t->kind == ARI_FOUND_NOTHING; dim++) {
        k[dim] = along(g, dim, g->shape[dim]);
        AR_TRY(fit_classes(&k[dim], c));
        measure_shards(t, c, dim, &k[dim]);
    }
    for (int dim = 0; c->val && g->nd > 1 && dim < g->nd - repeated && t->kind == ARI_FOUND_NOTHING; dim++)
        measure_slices(t, c, dim, &k[dim]);
    if (t->kind == ARI_FOUND_NOTHING && ari_is_activation(g->d)) {
        k[AR_MAX_DIMS] = (classes){.side = g->cols, .n = g->rows};
        AR_TRY(fit_classes(&k[AR_MAX_DIMS], c));
        measure_slices(t, c, ROWS, &k[AR_MAX_DIMS]);
    }
    if (t->kind == ARI_FOUND_NOTHING && c->val)
        return measure_row_shards(t, c);
    return AR_OK;
}

/* --- the same added to all of a class ----------------------------------------------------------------------------- */

/* Whose vector, or table, it is. */
static ar_status say_source(ari_trace *t, const ari_case *c, const classes *k)
{
    const ar_dump_tensor *source = NULL;
    double factor = 0.0, *mean = NULL;
    AR_TRY(ARI_TAKE(&mean, c->arena, k->n, c->d->name));
    for (size_t i = 0; i < k->n; i++)
        mean[i] = k->of[i].number;
    AR_TRY(ari_find_multiple(&source, &factor, c, mean, k->n));
    const double whole = nearbyint(factor);
    const bool integer = fabs(factor - whole) <= ARI_KNOWN * fabs(factor);
    t->flags |= source ? ARI_IF(NAMED) : 0;
    t->penalty = t->kind == ARI_FOUND_VECTOR_ADDED ? source ? 0 : 6 : c->val ? 0 : 14;
    ari_text text = ari_list(t, "source");
    if (source)
        ari_say(&text, integer ? "; it is %.0f times %s" : "; it is %.5g times %s", factor, source->name);
    if (source && factor > 0.5 && integer)
        ari_say(&text,
                ari_is_alone(c) ? ", which counts %.0f times in place of once"
                                : ", which counts %.0f times in place of once (added on every one of %.0f ranks "
                                  "before the sum)",
                whole + 1.0, whole + 1.0);
    else if (source && ari_is_near(factor, -1.0, ARI_KNOWN))
        ari_say(&text, ", which was left out");
    return AR_OK;
}

/* A row of fewer elements may differ by one number by chance. */
enum { FEWEST_SHIFTED = 8 };

/* True if a class's mean difference is all that differs. A class of one element agrees with itself. */
static ar_status look_added(ari_trace *t, const ari_case *c, classes *k, ari_trace_kind kind)
{
    const bool to_rows = kind == ARI_FOUND_VECTOR_ADDED && k->side > 1;
    const bool of_tp = !to_rows && (c->is & ARI_IS_ROW_PARALLEL) && ari_along(c->d, ARI_CUTS_FEATURES) > 1;
    const ari_hypothesis h = {of_its_class, .c = c, .of = k, .beside = ARI_SUMS * c->survey.max_reference};
    size_t there = 0, all = 0;
    double squares = 0.0;
    ari_residual left;
    AR_TRY(fit_classes(k, c));
    for (size_t i = 0; i < k->n; i++) {
        there += k->of[i].fit.n > 0;
        all += k->of[i].fit.n;
        squares += k->of[i].fit.yy;
    }
    const double size = sqrt(squares / (double)all);
    if (!(size > 4.0 * c->absolute) || !isfinite(size) || all < there + there / 2 || !ari_holds_all(&left, &h))
        return AR_OK;
    ARI_FINDING(t, kind, (of_tp ? ARI_IF(OF_TP) : 0) | (to_rows ? ARI_IF(ROWS) : 0), {"size", .number = size},
                {"spread", .number = sqrt(left.left / left.all)}, {"added", .number = k->of[0].number},
                {"samples", .count = c->grid.shape[0]});
    return kind == ARI_FOUND_VECTOR_ADDED || kind == ARI_FOUND_TABLE_ADDED ? say_source(t, c, k) : AR_OK;
}

/* In copies of ranks, a vector or a table is sought in activations alone. */
ar_status ari_measure_added(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const size_t table = g->nd == 3 && g->shape[1] > 1 ? g->shape[1] * g->cols : 0;
    const struct {
        ari_trace_kind kind;
        size_t side, n;
    } all[] = {{ARI_FOUND_CONSTANT_ADDED, g->count, c->val ? 1 : 0},
               {ARI_FOUND_VECTOR_ADDED, 1, g->nd > 1 ? g->cols : 0},
               {ARI_FOUND_VECTOR_ADDED, g->cols, g->nd > 1 && g->cols >= FEWEST_SHIFTED ? g->rows : 0},
               {ARI_FOUND_TABLE_ADDED, 1, table}};
    if (!(c->survey.total.max_difference > ARI_LONG_SUMS * c->survey.max_reference) ||
        (c->val ? c->count < 8 : !ari_is_activation(g->d)))
        return AR_OK;
    for (size_t i = 0; i < sizeof all / sizeof *all && t->kind == ARI_FOUND_NOTHING; i++) {
        classes k = {.side = all[i].side, .n = all[i].n, .added = true};
        ARI_ARENA_SCOPE(c->arena);
        k.dropped = all[i].kind == ARI_FOUND_TABLE_ADDED && g->d->pass == 'f';
        if (k.n == 0 || k.n * 2 > g->count || repeats(c, k.n))
            continue;
        AR_TRY(look_added(t, c, &k, all[i].kind));
    }
    return AR_OK;
}

/* --- a mean over each part instead of the whole ------------------------------------------------------------------- */

/* If part k of the tokens was divided by its own count T_k instead of T, its values are the reference times f_k =
 * T/T_k, or T/(P T_k) if the P parts were averaged after that. Then the sum of 1/f_k is 1, or P. */
enum { PARTS_SAID = 8 };
typedef struct parts {
    int n;
    double inverse, low, high; /* sum of 1/f, smallest and largest f */
    double unsure;             /* what noise leaves unknown of an f, relative to it */
    double each[PARTS_SAID];   /* the first 1/f */
} parts;

/* In more noise than this, counts cannot be distinguished. */
static const double most_unsure = 5e-3;

static void add_part(parts *p, double factor)
{
    p->inverse += 1.0 / factor;
    if (p->n < PARTS_SAID)
        p->each[p->n] = 1.0 / factor;
    p->low = p->n == 0 ? factor : fmin(factor, p->low);
    p->high = p->n == 0 ? factor : fmax(factor, p->high);
    p->n++;
}

/* Samples [start, end) are a part: false if they have no factor in common. */
static bool add_samples(parts *p, const ari_case *c, const class *s, size_t start, size_t end)
{
    const class *last = NULL;
    for (size_t i = start; i < end; i++) {
        if (s[i].fit.aa == 0.0 && s[i].fit.yy == 0.0)
            continue;
        p->unsure = fmin(fmax(p->unsure, s[i].unsure / fabs(s[i].number)), most_unsure);
        if (!ari_is_multiple(c, &s[i].fit) || !(s[i].number > 0.0) ||
            (last && !ari_is_near(s[i].number, last->number, fmax(p->unsure, ARI_SEEN))))
            return false;
        last = &s[i];
    }
    if (last)
        add_part(p, last->number);
    return true;
}

/* The parts are runs of samples with one factor; of each rank's micro-batches their samples. */
static bool parts_of_samples(parts *p, const ari_case *c, const class *s, int micro_batches)
{
    const size_t samples = c->grid.shape[0];
    const ar_parallel layout = {.dp = ari_along(c->d, ARI_CUTS_SAMPLES), .micro_batches = micro_batches};
    bool all = true;
    *p = (parts){.n = 0};
    for (size_t start = 0, end = 0; micro_batches == 0 && all && start < samples; start = end) {
        while (end < samples && (end == start || ari_is_near(s[end].number, s[start].number, 2.0 * ARI_SUMS)))
            end++;
        all = add_samples(p, c, s, start, end);
    }
    for (int i = 0; all && i < layout.dp * micro_batches; i++) {
        size_t start, count;
        ari_parallel_rows(&layout, samples, i / micro_batches, i % micro_batches, &start, &count);
        all = add_samples(p, c, s, start, start + count);
    }
    return all && p->n > 1;
}

/* One factor for each rank: for a single value, or for the rank's samples or positions. The parts are the ranks along
 * `over`. */
static bool parts_of_ranks(parts *p, const ari_case *c, ari_axes over)
{
    const double noise = c->d->allowed / c->survey.max_reference;
    *p = (parts){.unsure = c->grid.count == 1 ? fmin(noise, most_unsure) : 0.0};
    for (int rank = 0; rank < c->d->ranks; rank++) {
        const ari_tally *own = &c->survey.rank[rank];
        const ari_fit fit = ari_fit_of(own);
        double factor = 1.0;
        if (!ari_in_group(c->d, rank, over, 0) || own->held == 0)
            continue;
        if (own->different > 0 && (ari_fit_one(&factor, &fit), !ari_is_multiple(c, &fit) || !(factor > 0.0)))
            return false;
        if (own->different > 0 && own->ss > ARI_KNOWN * own->rr) /* a part of it is right */
            return false;
        add_part(p, factor);
    }
    return p->n > 1;
}

enum { IDS_ASKED = 4096 };
/* The residual of a row to which no other part adds. */
static const double one_part_alone = 1e-9;

/* A parameter's gradient mixes the parts, but for ids that one part alone looks up: of at most IDS_ASKED those whose
 * rows are multiples of the reference's. A part has two such ids at least. */
static ar_status parts_of_ids(parts *p, const ari_case *c, const ar_dump_tensor *r)
{
    const ar_dump_tensor *v = ari_find_readable(c->known->other, r->name);
    double *factor = NULL;
    size_t n = 0;
    *p = (parts){.unsure = ARI_SEEN};
    if (!v || v->ndim != 2 || v->count != r->count || r->shape[1] < ELEMENTS_TELL)
        return AR_OK;
    AR_TRY(ARI_TAKE(&factor, c->arena, IDS_ASKED + 1, r->name));
    for (size_t id = 0, cols = r->shape[1]; id < r->shape[0]; id += r->shape[0] / IDS_ASKED + 1) {
        ari_fit f = {0};
        AR_TRY(ari_fit_read(&f, v, r, id * cols, cols));
        n += f.ya > 0.0 && ari_fit_one(&factor[n], &f) <= one_part_alone;
    }
    qsort(factor, n, sizeof *factor, ari_by_value);
    for (size_t first = 0, end; first < n; first = end) {
        for (end = first + 1; end < n && ari_is_near(factor[end], factor[first], p->unsure);)
            end++;
        if (end - first > 1)
            add_part(p, factor[(first + end) / 2]);
    }
    return AR_OK;
}

/* True if the dumps have a loss of the step, and it is right: a loss divided by another count is not; or if the values
 * are the first that are wrong, after the gradient of the logits, which would be. */
static bool loss_is_right(const ari_case *c)
{
    if (c->d->dump && c->d->pass == 'b' && ari_section_of(c->role) == ARI_IN_BLOCKS)
        return true;
    for (ari_walk w = ari_walk_of(c->known->reference, c->path, "f", c->d->step);
         c->known->other && ari_walk_next(&w);) {
        const ar_dump_tensor *a = w.t, *b = ari_find_readable(c->known->other, a->name);
        ari_fit f = {0};
        double ratio;
        if (b && a->count == 1 && b->count == 1 && (ari_name_is(a->name) & ARI_IS_LOSS) &&
            ari_fit_read(&f, b, a, 0, 1) == AR_OK)
            return ari_fit_one(&ratio, &f), ari_is_near(ratio, 1.0, ARI_KNOWN);
    }
    return false;
}

/* The parts' numbers of targets, as small as their ratios are whole: " (as 5 : 4)". */
static void say_targets(ari_trace *t, const parts *p)
{
    const double unsure = fmax(p->unsure, 2.0 * ARI_SUMS);
    ari_text to = ari_list(t, "targets");
    for (double all = p->n; p->n <= PARTS_SAID && all * unsure < 0.02; all++) {
        double off = 0.0;
        for (int i = 0; i < p->n; i++)
            off = fmax(off, fabs(remainder(all * p->each[i] / p->inverse, 1.0)));
        if (off > unsure * all)
            continue;
        for (int i = 0; i < p->n; i++)
            ari_say(&to, "%s%.0f", i > 0 ? " : " : " (as ", all * p->each[i] / p->inverse);
        ari_say(&to, ")");
        return;
    }
}

/* True if the parts' factors are those of means; gives the number of parts that an average would be over. */
static bool are_means(ari_trace *t, const ari_case *c, const parts *p, int expected, ari_properties flags)
{
    const double within = fmax(p->unsure, ARI_SEEN);
    const bool apart = !ari_is_near(p->low, p->high, 4.0 * within);
    const bool averaged = apart && (ari_is_near(p->inverse, p->n, within) || ari_is_near(p->inverse, expected, within));
    const bool added = ari_is_near(p->inverse, 1.0, within) && (apart || !(flags & ARI_IF(HIDDEN) || loss_is_right(c)));
    if (!averaged && !added)
        return false;
    ARI_FINDING(t, ARI_FOUND_MEANS, flags | (averaged ? ARI_IF(AVERAGE) : 0) | (apart ? 0 : ARI_IF(SAME)),
                {"parts", .count = (size_t)p->n}, {"low", .number = p->low}, {"high", .number = p->high},
                {"inverse", .number = p->inverse});
    say_targets(t, p);
    ARI_FACTS(t, {"of", .text = flags & ARI_IF(OF_DP)                         ? "data-parallel ranks"
                                : flags & ARI_IF(OF_CP)                       ? "context-parallel ranks"
                                : flags & ARI_IF(OF_MICRO) || ari_is_alone(c) ? "micro-batches"
                                                                              : "ranks or micro-batches"});
    return true;
}

/* The step's gradients of embeddings show what is wrong with all gradients. */
static ar_status means_of_ids(ari_trace *t, const ari_case *c)
{
    for (ari_walk w = ari_walk_of(c->known->reference, c->path, "g", c->d->step);
         t->kind == ARI_FOUND_NOTHING && ari_walk_next(&w);) {
        parts p;
        if (w.t->ndim != 2 || !(ari_name_is(w.t->name) & ARI_IS_EMBEDDING))
            continue;
        AR_TRY(parts_of_ids(&p, c, w.t));
        if (p.n > 1 && are_means(t, c, &p, p.n, ARI_IF(HIDDEN)))
            ari_words(t, "of", "%s (as %s shows, in rows of ids that one of them alone has)",
                      ari_is_alone(c) ? "micro-batches" : "ranks or micro-batches", w.t->name);
    }
    return AR_OK;
}

/* True if each data-parallel or context-parallel rank, or each pair of both, has a factor of its own. */
static bool are_means_of_ranks(ari_trace *t, const ari_case *c)
{
    static const struct {
        ari_axes over;
        ari_properties flags;
    } axes[] = {{ARI_CUTS_SAMPLES, ARI_IF(OF_DP)}, {ARI_CUTS_POSITIONS, ARI_IF(OF_CP)}, {ARI_CUTS_DATA, 0}};
    const bool one = ari_along(c->d, ARI_CUTS_SAMPLES) == 1 || ari_along(c->d, ARI_CUTS_POSITIONS) == 1;
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++) {
        const bool there = ari_along(c->d, axes[i].over) > 1 && !(one && axes[i].over == ARI_CUTS_DATA);
        parts p;
        if (there && parts_of_ranks(&p, c, axes[i].over) && are_means(t, c, &p, p.n, axes[i].flags))
            return true;
    }
    return false;
}

/* The tokens' factors, from small to large, of parts that are any of them: the `count` tokens of one factor f are those
 * of count*n*f/all parts, where n parts have all tokens and f is 1 on average, or n. */
static bool parts_of_tokens(parts *p, const double *factor, size_t all, double mean, int n)
{
    *p = (parts){.unsure = ARI_SEEN};
    for (size_t first = 0, end; first < all; first = end) {
        for (end = first + 1; end < all && ari_is_near(factor[end], factor[first], ARI_SEEN);)
            end++;
        const double f = factor[(first + end) / 2], of = (double)(end - first) * n * f / (double)all / mean;
        if (!(rint(of) >= 1.0 && fabs(of - rint(of)) <= ARI_KNOWN * rint(of)))
            return false;
        for (int i = 0; i < (int)rint(of); i++)
            add_part(p, f);
    }
    return p->n == n;
}

/* True if each of as many parts of the tokens as there are ranks and micro-batches has a factor of its own. */
static ar_status means_of_tokens(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const int ranks = ari_ranks_along(&c->known->mesh, ARI_ALL_AXES & ~(ari_axes)ARI_CUTS_LAYERS);
    const int micro = c->d->micro_batches > 1 ? c->d->micro_batches : 1;
    classes k = {.side = g->cols, .n = g->rows};
    double *factor = NULL, mean = 0.0;
    size_t n = 0;
    parts p;
    AR_TRY(fit_classes(&k, c));
    AR_TRY(ARI_TAKE(&factor, c->arena, k.n, g->d->name));
    for (size_t i = 0; i < k.n; i++) {
        const class *s = &k.of[i];
        if (s->fit.aa == 0.0 && s->fit.yy == 0.0)
            continue;
        if (!ari_is_multiple(c, &s->fit) || !(s->number > 0.0))
            return AR_OK;
        factor[n++] = s->number;
        mean += s->number;
    }
    mean /= (double)n;
    qsort(factor, n, sizeof *factor, ari_by_value);
    if (ranks * micro > 1 && n > 0 && parts_of_tokens(&p, factor, n, mean, ranks * micro))
        are_means(t, c, &p, p.n, 0);
    return AR_OK;
}

ar_status ari_measure_means(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->d;
    const int micro = d->hidden ? 0 : d->micro_batches;
    const bool samples = d->pass == 'b' && d->ndim >= 3, value = d->pass == 'f' && c->grid.count == 1;
    parts p;
    if (d->pass == 'g' && d->hidden && c->known->reference && c->known->other)
        return means_of_ids(t, c);
    if ((!d->hidden && (samples || value) && are_means_of_ranks(t, c)) || !samples)
        return AR_OK;
    if (d->hidden || micro > 1) {
        classes k = along(&c->grid, 0, c->grid.shape[0]);
        AR_TRY(fit_classes(&k, c));
        if (parts_of_samples(&p, c, k.of, micro))
            are_means(t, c, &p, d->hidden ? p.n : micro, d->hidden ? ARI_IF(HIDDEN) : ARI_IF(OF_MICRO));
    }
    return t->kind == ARI_FOUND_NOTHING ? means_of_tokens(t, c) : AR_OK;
}
