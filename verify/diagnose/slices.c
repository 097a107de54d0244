/* SPDX-License-Identifier: Apache-2.0 */
/* Slices of a dimension that stand in another slice's place: which, and by what rule. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/case.h"

enum { ROWS = -1 }; /* all dimensions but the last as one */

/* Slices along a dimension, and of which slice of the reference each has the values. */
typedef struct axis {
    int dim;              /* or ROWS */
    size_t n;             /* slices */
    size_t inner;         /* elements of a slice that lie side by side */
    size_t size;          /* elements of a slice */
    size_t *from;         /* [n]: its own index where it is right; n: no slice of the reference */
    bool *wrong;          /* [n] */
    bool *plain;          /* [n]: one value alone, or next to nothing: it proves nothing */
    size_t wrongs, moved; /* slices: that differ; that are another one and not plain */
    size_t lost;          /* that are none */
    double worst;         /* largest difference from the slice they are */
} axis;

/* --- one slice against another ------------------------------------------------------------------------------------ */

/* In (-1, 1): a weight of an element's place in a slice, so that slices of the same values in another order differ. */
static double weight_of(size_t i)
{
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (double)(int64_t)x * 0x1p-63;
}

static size_t place(const axis *a, size_t slice, size_t i)
{
    return (i / a->inner * a->n + slice) * a->inner + i % a->inner;
}

/* Whether slice i of the other is slice j of the reference; *worst: the largest that is off. */
static bool is_slice(const ari_case *c, const axis *a, size_t i, size_t j, double *worst)
{
    for (size_t k = 0; k < a->size; k++) {
        const float v = c->val[place(a, i, k)], r = c->ref[place(a, j, k)];
        if (!ari_holds(c, v, (double)r))
            return false;
        if (!ari_same_bits(v, r))
            *worst = fmax(*worst, fabs((double)v - (double)r));
    }
    return true;
}

typedef struct projected {
    double at;
    size_t slice;
} projected;

static int by_projection(const void *a, const void *b)
{
    const projected *x = a, *y = b;
    return x->at != y->at ? (x->at < y->at ? -1 : 1) : (x->slice > y->slice) - (x->slice < y->slice);
}

static void project(projected *out, const float *data, const axis *a)
{
    for (size_t i = 0; i < a->n; i++)
        out[i] = (projected){0.0, i};
    for (size_t k = 0; k < a->size; k++) {
        const double weight = weight_of(k);
        for (size_t i = 0; i < a->n; i++)
            out[i].at += weight * (double)data[place(a, i, k)];
    }
}

/* What a slice is: nothing in it differs; it has one value alone, or values too small to tell, so that it says nothing
 * of where it is from; or neither. */
static void survey_slice(const ari_case *c, axis *a, size_t i)
{
    const float first = c->val[place(a, i, 0)];
    double largest = 0.0;
    bool wrong = false, varies = a->size == 1;
    for (size_t k = 0; k < a->size; k++) {
        const size_t at = place(a, i, k);
        wrong = wrong || ari_off(c, at);
        varies = varies || !ari_same_bits(first, c->val[at]);
        largest = fmax(largest, fabs((double)c->val[at]));
    }
    a->wrong[i] = wrong;
    a->plain[i] = !varies || largest <= 8.0 * c->absolute;
}

/* --- where each slice is from ------------------------------------------------------------------------------------- */

enum { MOST_TRIED = 24 };

static size_t source_of(const ari_case *c, axis *a, const projected *sorted, double at, size_t i)
{
    const size_t expected = i > 0 && a->from[i - 1] < a->n ? (a->from[i - 1] + 1) % a->n : i;
    if (is_slice(c, a, i, i, &a->worst))
        return i;
    if (is_slice(c, a, i, expected, &a->worst))
        return expected;
    const double reach =
        (c->absolute + 0.1 * c->relative * c->max_ref + 1e-6 * fabs(at)) * (4.0 + sqrt((double)a->size));
    size_t low = 0, high = a->n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (sorted[middle].at < at - reach)
            low = middle + 1;
        else
            high = middle;
    }
    for (size_t tried = 0; low < a->n && sorted[low].at <= at + reach && tried < MOST_TRIED; low++, tried++) {
        if (is_slice(c, a, i, sorted[low].slice, &a->worst))
            return sorted[low].slice;
    }
    return a->n;
}

/* False as soon as too many wrong slices are no slice of the reference. */
static bool trace(const ari_case *c, axis *a, projected *sorted, projected *wanted)
{
    project(sorted, c->ref, a);
    project(wanted, c->val, a);
    qsort(sorted, a->n, sizeof *sorted, by_projection);
    for (size_t i = 0; i < a->n; i++)
        survey_slice(c, a, i);
    for (size_t i = 0; i < a->n; i++) {
        a->from[i] = a->wrong[i] ? source_of(c, a, sorted, wanted[i].at, i) : i;
        a->wrongs += a->wrong[i];
        a->lost += a->from[i] == a->n;
        a->moved += a->from[i] != i && a->from[i] != a->n && !a->plain[i];
        if (a->lost > a->n / 6 + 2)
            return false;
    }
    return a->moved > 0;
}

static void axis_fini(axis *a)
{
    free(a->from);
    free(a->wrong);
    free(a->plain);
}

static ar_status axis_init(axis *a, const ari_case *c)
{
    const size_t n = a->n;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&a->from, n, sizeof *a->from, c->grid.d->name));
    AR_TRY_TO(done, st, ari_alloc((void **)&a->wrong, n, sizeof *a->wrong, c->grid.d->name));
    AR_TRY_TO(done, st, ari_alloc((void **)&a->plain, n, sizeof *a->plain, c->grid.d->name));
done:
    if (st != AR_OK)
        axis_fini(a);
    return st;
}

/* --- the rule ----------------------------------------------------------------------------------------------------- */

typedef enum rule_kind {
    NO_RULE,
    ROTATED,     /* slice i has that of i + by, modulo n */
    SHIFTED,     /* the same, but what comes in from the edge is none */
    REVERSED,    /* that of n-1-i */
    INTERLEAVED, /* blocks written as a [p, q] table are read as [q, p] */
    ZIGZAG,      /* the r-th from either end are neighbours: those of place r of a balanced ring */
    EXCHANGED,   /* two and two */
    REPEATED,    /* several have the same one's */
    OTHER        /* another permutation */
} rule_kind;

/* A rule for units of `unit` slices each, within every period of `period` units. */
typedef struct rule {
    rule_kind kind;
    size_t unit, units, period;
    size_t by, p, q;
    size_t a, b; /* EXCHANGED, REPEATED: an example: a has b's */
    size_t moved;
} rule;

static bool counts(const axis *a, size_t i)
{
    return !a->plain[i] && a->from[i] < a->n;
}

/* The source of unit u of `unit` slices, if all of it that counts comes from one such unit in order: its index; n if
 * nothing counts; n + 1 if it does not. */
static size_t unit_source(const axis *a, size_t u, size_t unit)
{
    size_t source = a->n;
    for (size_t i = u * unit; i < (u + 1) * unit; i++) {
        if (a->from[i] == a->n && !a->plain[i])
            return a->n + 1;
        if (!counts(a, i))
            continue;
        const size_t offset = i - u * unit;
        if (a->from[i] % unit != offset || (source < a->n && a->from[i] / unit != source))
            return a->n + 1;
        source = a->from[i] / unit;
    }
    return source;
}

static bool moves_in_units(const axis *a, size_t unit)
{
    for (size_t u = 0; u < a->n / unit; u++) {
        if (unit_source(a, u, unit) > a->n)
            return false;
    }
    return true;
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

typedef bool (*formula)(const rule *r, size_t u, size_t source);

static bool is_rotated(const rule *r, size_t u, size_t source)
{
    return source == (u + r->by) % r->period;
}

static bool is_reversed(const rule *r, size_t u, size_t source)
{
    return source == r->period - 1 - u;
}

static bool is_interleaved(const rule *r, size_t u, size_t source)
{
    return source == u % r->p * r->q + u / r->p;
}

/* Places' chunks one after the other, where the reference has the sequence's; or the other way round. */
static size_t zigzag_at(size_t u, size_t n)
{
    return u % 2 == 0 ? u / 2 : n - 1 - u / 2;
}

static bool is_zigzag(const rule *r, size_t u, size_t source)
{
    return source == zigzag_at(u, r->period);
}

static bool is_out_of_zigzag(const rule *r, size_t u, size_t source)
{
    return u == zigzag_at(source, r->period);
}

/* Whether a formula gives the source of every unit within its period. */
static bool fits(const axis *a, const rule *r, formula f)
{
    for (size_t u = 0; u < r->units; u++) {
        const size_t source = unit_source(a, u, r->unit), start = u / r->period * r->period;
        if (source < a->n && (source < start || source >= start + r->period || !f(r, u - start, source - start)))
            return false;
    }
    return true;
}

static bool find_rotation(const axis *a, rule *r)
{
    for (size_t u = 0; u < r->units; u++) {
        const size_t source = unit_source(a, u, r->unit);
        if (source >= a->n)
            continue;
        if (source == u || source / r->period != u / r->period)
            return false;
        r->by = (source + r->period - u) % r->period;
        r->kind = ROTATED;
        return fits(a, r, is_rotated);
    }
    return false;
}

static bool find_interleaving(const axis *a, rule *r)
{
    r->kind = INTERLEAVED;
    for (r->p = 2; r->p * 2 <= r->period; r->p++) {
        r->q = r->period / r->p;
        if (r->period % r->p == 0 && fits(a, r, is_interleaved))
            return true;
    }
    return false;
}

/* Rules for the whole of a period; the smallest period that one holds for is the one that says most. */
static bool find_in_period(const axis *a, rule *r)
{
    if (r->period > 2 && (r->kind = REVERSED, fits(a, r, is_reversed)))
        return true;
    return find_rotation(a, r) || (r->period >= 4 && find_interleaving(a, r));
}

static void find_exchange(const axis *a, rule *r)
{
    bool pairs = true, repeated = false;
    r->kind = OTHER;
    r->moved = 0;
    for (size_t u = 0; u < r->units; u++) {
        const size_t source = unit_source(a, u, r->unit);
        if (source >= a->n || source == u)
            continue;
        if (r->moved++ == 0) {
            r->a = u;
            r->b = source;
        }
        const size_t back = unit_source(a, source, r->unit);
        pairs = pairs && (back == u || back == a->n);
        repeated = repeated || back == source;
    }
    r->kind = pairs ? EXCHANGED : repeated ? REPEATED : OTHER;
}

/* A shift whose edge is lost. */
static bool find_shift(const axis *a, rule *r)
{
    ptrdiff_t by = 0;
    size_t follow = 0;
    for (size_t i = 0; i < a->n; i++) {
        if (!counts(a, i) || a->from[i] == i)
            continue;
        const ptrdiff_t own = (ptrdiff_t)a->from[i] - (ptrdiff_t)i;
        if (by != 0 && own != by)
            return false;
        by = own;
        follow++;
    }
    const size_t size = (size_t)(by < 0 ? -by : by);
    if (by == 0 || follow < 3 || a->lost > size || size * 4 > a->n || size * 4 > a->wrongs ||
        (follow + a->lost) * 10 < a->wrongs * 8)
        return false;
    *r = (rule){.kind = SHIFTED, .unit = 1, .units = a->n, .period = a->n, .by = size, .a = by < 0};
    return true;
}

/* Units from the largest: shards before rows. Periods from the smallest: heads before the whole. */
static bool find_rule(const axis *a, rule *r)
{
    size_t unit = a->n / 2;
    if (find_shift(a, r) && a->lost > 0)
        return true;
    if (a->lost > 0)
        return false;
    while (unit > 1 && (a->n % unit != 0 || !moves_in_units(a, unit)))
        unit--;
    *r = (rule){.unit = unit, .units = a->n / unit};
    for (r->period = 2; r->period <= r->units; r->period++) {
        if (r->units % r->period == 0 && find_in_period(a, r))
            return true;
    }
    r->period = r->units;
    if (r->units % 2 == 0 && r->units >= 4 && (r->kind = ZIGZAG, fits(a, r, is_zigzag) || fits(a, r, is_out_of_zigzag)))
        return true;
    if (find_shift(a, r))
        return true;
    find_exchange(a, r);
    return true;
}

/* --- what is found ------------------------------------------------------------------------------------------------ */

static const char *axis_name(const ari_case *c, const axis *a, bool plural)
{
    if (a->dim == ROWS)
        return plural ? "tokens" : "token";
    return ari_dim_name(&c->grid, a->dim, plural);
}

static bool few_values(const ari_case *c)
{
    const ar_dtype t = c->reference ? c->reference->dtype : AR_F32;
    return t == AR_BOOL || t == AR_U8 || t == AR_I8;
}

static int confidence_of(const ari_case *c, const axis *a, const rule *r)
{
    const bool scalar = a->size == 1, ruled = r->kind != OTHER && r->kind != EXCHANGED && r->kind != REPEATED;
    if (scalar && (!ruled ? a->worst > 0.0 || a->moved < 4 : a->moved < 8))
        return ARI_SILENT;
    if (r->kind == SHIFTED && a->lost > 0)
        return ARI_IDENTITY + 1;
    if (ruled)
        return ARI_IDENTITY + 6 + (r->unit > 1);
    if (few_values(c) && a->size < 64) /* slices of a mask are alike by chance */
        return ARI_SILENT;
    if (a->moved < 2 && a->size < 8)
        return ARI_SILENT;
    return r->kind == OTHER ? ARI_IDENTITY + 2 + (r->unit > 1) : ARI_IDENTITY + 5;
}

/* "heads (16 rows each)", "blocks of 16 rows", "rows". */
static void say_units(ari_trace *t, const ari_case *c, const axis *a, const rule *r, size_t head)
{
    const char *axes = axis_name(c, a, true);
    if (r->unit > 1 && head == r->unit)
        ari_words(t, "units", "heads (%zu %s each)", head, axes);
    else if (r->unit > 1)
        ari_words(t, "units", "blocks of %zu %s", r->unit, axes);
    else
        ari_words(t, "units", "%s", axes);
}

/* The properties of a rotation, an interleaving, or a few slices in each other's place, and their numbers. */
static void describe_rule(ari_trace *t, const ari_case *c, const axis *a, const rule *r)
{
    const char *part[3];
    size_t size[3];
    const size_t head = a->dim >= 0 ? ari_head_size(c, a->dim) : 0, period = r->period * r->unit;
    const bool heads = a->dim >= 0 && ari_has_heads(c, a->dim), whole = r->period == r->units;
    const bool forward = r->kind == SHIFTED ? r->a == 0 : r->by <= r->period / 2;
    const size_t slices = r->kind == SHIFTED ? r->by : (forward ? r->by : r->period - r->by) * r->unit;
    const bool even = slices > 1 && a->n % slices == 0;
    const size_t by = head > 0 ? slices / head : 1;
    const bool head_steps = r->kind == ROTATED && heads && whole && (head > 0 ? slices % head == 0 : even);
    const char *what = axis_name(c, a, false);
    const char *unit = head == r->unit && head > 1 ? "head" : r->unit > 1 ? "block" : what;
    const int packed = a->dim >= 0 && r->kind == INTERLEAVED && whole ? ari_packed(c, a->dim, part, size) : 0;
    const bool rope = heads && !whole && r->unit == 1 && (r->p == 2 || r->q == 2);
    t->is |= (strcmp(what, "token") == 0 ? ARI_IF(TOKENS) : 0) | (strcmp(what, "sample") == 0 ? ARI_IF(SAMPLES) : 0) |
             (strcmp(what, "id") == 0 ? ARI_IF(IDS) : 0) | (whole ? ARI_IF(ALL) : 0) |
             (r->period == 2 ? ARI_IF(TWICE) : 0) | (even ? ARI_IF(BLOCKS) : 0) |
             (head_steps || (r->kind >= EXCHANGED && head == r->unit && head > 1) ? ARI_IF(HEADS) : 0) |
             (heads ? ARI_IF(BY_HEADS) : 0) | (packed ? ARI_IF(PACKED) : 0) | (rope ? ARI_IF(PAIRS) : 0) |
             (a->dim == ROWS ? ARI_IF(ROWS) : 0) | (r->unit > 1 && r->units <= 64 ? ARI_IF(OF_SHARDS) : 0);
    ari_words(t, "axis", "%s", what);
    ari_words(t, "axes", "%s", axis_name(c, a, slices != 1));
    ari_words(t, "sign", forward ? "+" : "-");
    ari_count(t, "n", a->n);
    ari_count(t, "by", r->by * r->unit);
    ari_count(t, "slices", slices);
    ari_count(t, "blocks", slices > 0 ? a->n / slices : 0);
    ari_words(t, "heads", by == 1 ? "one: by 1 head" : "%zu heads", by);
    ari_count(t, "head_by", by);
    ari_count(t, "head", head ? head : slices);
    ari_words(t, "within",
              period < a->n && r->kind <= INTERLEAVED && r->kind != SHIFTED ? " within every %zu %s%s" : "", period,
              axis_name(c, a, true), heads ? " (each head)" : "");
    ari_count(t, "p", r->p);
    ari_count(t, "q", r->q);
    ari_words(t, "packed", packed == 3 ? "q|k|v" : "gate|up");
    ari_words(t, "pairs", r->p == 2 ? "halves are interleaved" : "pairs are split into halves");
    ari_words(t, "unit", "%s", unit);
    ari_count(t, "a", r->a);
    ari_count(t, "b", r->b);
    ari_count(t, "shards", r->units);
    ari_count(t, "places", r->units / 2);
    ari_words(t, "moved", r->moved > 2 || (r->moved == 2 && r->kind != EXCHANGED) ? " (%zu of %zu %ss moved)" : "",
              r->moved, r->units, unit);
    say_units(t, c, a, r, head);
}

/* By what rule slices moved, if it is one. */
static void found_order(ari_trace *t, const ari_case *c, const axis *a)
{
    static const ari_trace_kind kinds[] = {ARI_FOUND_NOTHING,   ARI_FOUND_ROTATED,     ARI_FOUND_SHIFTED_SLICES,
                                           ARI_FOUND_REVERSED,  ARI_FOUND_INTERLEAVED, ARI_FOUND_ZIGZAG,
                                           ARI_FOUND_EXCHANGED, ARI_FOUND_REPEATED,    ARI_FOUND_REORDERED};
    rule r;
    if (!ari_explains(c, a->worst) || !find_rule(a, &r))
        return;
    const int confidence = confidence_of(c, a, &r);
    if (confidence == ARI_SILENT)
        return;
    const bool samples = a->dim == 0 && c->grid.nd == 3 && ari_is_activation(c->grid.d);
    ari_found(t, kinds[r.kind], samples ? ARI_IF(SAMPLES) : 0);
    t->less = ARI_IDENTITY + 7 - confidence;
    describe_rule(t, c, a, &r);
    ari_say_exactness(t, c, a->worst);
}

/* --- the axes ----------------------------------------------------------------------------------------------------- */

/* Whether a slice with a difference may be some slice of the reference, as far as its first elements say. */
static bool may_be_a_slice(const ari_case *c, const axis *a, size_t i)
{
    const size_t n = a->size < 4 ? a->size : 4;
    for (size_t from = 0; from < a->n; from++) {
        size_t k = 0;
        while (k < n && ari_holds(c, c->val[place(a, i, k)], (double)c->ref[place(a, from, k)]))
            k++;
        if (k == n)
            return true;
    }
    return false;
}

/* Whether it is worth looking: not where none of some slices with differences is any slice of the reference. */
static bool is_promising(const ari_case *c, const axis *a)
{
    enum { ASKED = 8 };
    size_t asked = 0;
    for (size_t k = 0; k < 8 * ASKED && asked < ASKED; k++) {
        const size_t i = a->n <= 8 * ASKED ? k : k * (a->n / (8 * ASKED));
        if (i >= a->n || (a->dim != ROWS && c->survey.hits[a->dim][i] == 0) ||
            (a->dim == ROWS && !ari_row_differs(c, i)))
            continue;
        if (may_be_a_slice(c, a, i))
            return true;
        asked++;
    }
    return asked < ASKED;
}

/* Looks along one axis; a more confident trace than *t takes its place. */
static ar_status look(ari_trace *t, const ari_case *c, int dim, size_t outer, size_t n, size_t inner)
{
    axis a;
    projected *sorted = NULL, *wanted = NULL;
    if (n < 2)
        return AR_OK;
    a = (axis){.dim = dim, .n = n, .inner = inner, .size = outer * inner};
    if (!is_promising(c, &a))
        return AR_OK;
    AR_TRY(axis_init(&a, c));
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&sorted, n, sizeof *sorted, c->grid.d->name));
    AR_TRY_TO(done, st, ari_alloc((void **)&wanted, n, sizeof *wanted, c->grid.d->name));
    ari_trace own = {.kind = ARI_FOUND_NOTHING};
    if (trace(c, &a, sorted, wanted))
        found_order(&own, c, &a);
    if (own.kind != ARI_FOUND_NOTHING && (t->kind == ARI_FOUND_NOTHING || own.less < t->less))
        *t = own;
done:
    free(sorted);
    free(wanted);
    axis_fini(&a);
    return st;
}

/* Of [b, s, h]: the parts of n ranks, [b, s/n, h] each, one after the other. Tokens of equal values have no place of
 * their own, so each is held against the place that this would give it. */
static bool is_rank_major(const ari_case *c, size_t n, double *worst)
{
    const ari_grid *g = &c->grid;
    const size_t b = g->shape[0], s = g->shape[1], part = s / n;
    const axis a = {.n = g->rows, .inner = g->cols, .size = g->cols};
    *worst = 0.0;
    for (size_t i = 0; i < g->rows; i++) {
        const size_t from = i / part % b * s + i / (b * part) * part + i % part;
        if (!is_slice(c, &a, i, from, worst))
            return false;
    }
    return ari_explains(c, *worst);
}

static void look_for_ranks(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    double worst = 0.0;
    if (g->nd != 3 || !ari_is_activation(g->d) || g->shape[0] < 2 || c->survey.different < 8)
        return;
    for (size_t n = 2; n <= ARI_MOST_RANKS && n <= g->shape[1]; n++) {
        if (g->shape[1] % n != 0 || !is_rank_major(c, n, &worst))
            continue;
        ari_found(t, ARI_FOUND_RANK_MAJOR, 0);
        ari_count(t, "n", n);
        ari_say_exactness(t, c, worst);
        return;
    }
}

ar_status ari_measure_order(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    if (c->count < 2)
        return AR_OK;
    look_for_ranks(t, c);
    for (int dim = 0; dim < g->nd && t->kind != ARI_FOUND_RANK_MAJOR; dim++) {
        const size_t inner = ari_grid_inner(g, dim), n = g->shape[dim];
        AR_TRY(look(t, c, dim, g->count / inner / n, n, inner));
    }
    /* Tokens of all samples in one row: what mixes samples and tokens. */
    if (g->nd > 2 && t->kind == ARI_FOUND_NOTHING)
        AR_TRY(look(t, c, ROWS, 1, g->rows, g->cols));
    return AR_OK;
}
