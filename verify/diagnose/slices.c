/* SPDX-License-Identifier: Apache-2.0 */
/* Slices of a dimension found in another slice's place: which ones, and by what rule. */
#include "verify/diagnose/hypothesis.h"
#include "verify/diagnose/replay/replay.h"

enum { ROWS = -1 }; /* all dimensions but the last as one */

typedef struct axis {
    int dim;              /* or ROWS */
    const char *name[2];  /* "token", "tokens" */
    bool heads;           /* the dimension consists of heads */
    size_t head;          /* slices of one; 0: not known */
    size_t n;             /* slices */
    size_t inner;         /* contiguous elements of a slice */
    size_t size;          /* elements of a slice */
    size_t *from;         /* [n]: its own index if it is right; n: no slice of the reference */
    bool *plain;          /* [n]: one value alone, or next to nothing: it proves nothing */
    size_t wrongs, moved; /* slices: that differ; that are another one and not plain */
    size_t lost;          /* that are no slice of the reference */
    size_t compared;      /* to find them */
    size_t unit, units;   /* slices that move together; how many times as many there are */
    size_t *source;       /* [units]: of which unit each has the slices; n: nothing in it counts */
    size_t places;        /* of the other run's context-parallel ranks; 0, 1: none, or not known */
} axis;

/* --- the reference's slice that each slice equals ----------------------------------------------------------------- */

static size_t index_in_slice(const axis *a, size_t slice, size_t i)
{
    return (i / a->inner * a->n + slice) * a->inner + i % a->inner;
}

/* True if slice i of the other is slice j of the reference. */
static bool is_slice(const ari_case *c, const axis *a, size_t i, size_t j)
{
    size_t k = 0;
    while (k < a->size && ari_holds(c, c->val[index_in_slice(a, i, k)], (double)c->ref[index_in_slice(a, j, k)]))
        k++;
    return k == a->size;
}

/* True if anything in a slice differs. A slice is plain if it has one value alone, or values too small to tell its
 * source. */
static bool survey_slice(const ari_case *c, axis *a, size_t i)
{
    const float first = c->val[index_in_slice(a, i, 0)];
    double largest = 0.0;
    bool wrong = false, varies = a->size == 1;
    for (size_t k = 0; k < a->size; k++) {
        const size_t at = index_in_slice(a, i, k);
        wrong = wrong || ari_off(c, at);
        varies = varies || !ari_same_bits(first, c->val[at]);
        largest = fmax(largest, fabs((double)c->val[at]));
    }
    a->plain[i] = !varies || largest <= 8.0 * c->absolute;
    return wrong;
}

/* Comparisons of slices, nearly all of which end with their first element. */
enum { MOST_COMPARED = 1 << 25 };

/* Its own place, then the one after the previous slice's, then any; n: none. */
static size_t source_of(const ari_case *c, axis *a, size_t i)
{
    const size_t expected = i > 0 && a->from[i - 1] < a->n ? (a->from[i - 1] + 1) % a->n : i;
    size_t j = 0;
    if (is_slice(c, a, i, i))
        return i;
    if (is_slice(c, a, i, expected))
        return expected;
    while (j < a->n && a->compared < MOST_COMPARED && !is_slice(c, a, i, j)) {
        a->compared++;
        j++;
    }
    return a->compared < MOST_COMPARED ? j : a->n;
}

/* False as soon as too many wrong slices are no slice of the reference. */
static bool trace(const ari_case *c, axis *a)
{
    for (size_t i = 0; i < a->n; i++) {
        const bool wrong = survey_slice(c, a, i);
        a->from[i] = wrong ? source_of(c, a, i) : i;
        a->wrongs += wrong;
        a->lost += a->from[i] == a->n;
        a->moved += a->from[i] != i && a->from[i] != a->n && !a->plain[i];
        if (a->lost > a->n / 6 + 2)
            return false;
    }
    return a->moved > 0;
}

/* --- units -------------------------------------------------------------------------------------------------------- */

static bool counts(const axis *a, size_t i)
{
    return !a->plain[i] && a->from[i] < a->n;
}

/* Fills a->source; false where what counts in some unit does not come from one such unit in order. */
static bool moves_in_units(axis *a, size_t unit)
{
    a->unit = unit;
    a->units = a->n / unit;
    for (size_t u = 0; u < a->units; u++)
        a->source[u] = a->n;
    for (size_t i = 0; i < a->n; i++) {
        size_t *source = &a->source[i / unit];
        const size_t from = a->from[i] / unit;
        if (a->from[i] == a->n && !a->plain[i])
            return false;
        if (!counts(a, i))
            continue;
        if (a->from[i] % unit != i % unit || (*source < a->n && *source != from))
            return false;
        *source = from;
    }
    return true;
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

/* A rule for units within every period of this many, or within some periods alone, the others being right. */
typedef struct rule {
    ari_trace_kind kind;
    size_t period, by, p, q;
    size_t first, many; /* of a period: units that a formula moves, where it leaves the others */
    size_t a, b;        /* of a few: an example, a has b's */
    size_t moved;       /* units */
    size_t right;       /* periods that are */
    size_t start;       /* of a period: what a formula is asked of */
    const size_t *from; /* a->source */
} rule;

/* The unit of a period whose slices unit u has. */
typedef size_t (*formula)(const rule *r, size_t u);

static size_t rotated(const rule *r, size_t u)
{
    return (u + r->by) % r->period;
}

static size_t reversed(const rule *r, size_t u)
{
    return r->period - 1 - u;
}

/* Blocks written as a [p, q] table are read as [q, p]. */
static size_t interleaved(const rule *r, size_t u)
{
    const size_t at = u - r->first; /* before the first: larger than any */
    return at < r->many ? r->first + at % r->p * r->q + at / r->p : u;
}

/* The r-th from either end are neighbours, those of one place of a balanced ring, whatever the order of the places. */
static size_t zigzag(const rule *r, size_t u)
{
    const size_t beside = r->from[r->start + (u ^ 1u)] - r->start;
    return beside < r->period ? r->period - 1 - beside : r->from[r->start + u] - r->start;
}

static size_t out_of_zigzag(const rule *r, size_t u)
{
    return u < r->period / 2 ? 2 * u : 2 * (r->period - 1 - u) + 1;
}

/* True if in every period all telling slices follow the formula, or all are right. Two or three moved slices among
 * right ones are no rule. */
static bool fits_formula(const axis *a, rule *r, formula f)
{
    size_t least = a->n, all = 0;
    r->right = 0;
    r->from = a->source;
    for (r->start = 0; r->start < a->units; r->start += r->period) {
        size_t counted = 0, moved = 0, held = 0;
        for (size_t u = 0; u < r->period; u++) {
            const size_t source = a->source[r->start + u];
            counted += source < a->n;
            moved += source < a->n && source != r->start + u;
            held += source / r->period == r->start / r->period && source == r->start + f(r, u);
        }
        if (held < counted && moved > 0)
            return false;
        r->right += held < counted;
        least = moved > 0 && moved < least ? moved : least;
        all += moved;
    }
    return all > 0 && (r->right == 0 || least > (a->unit > 1 ? 2 : 3));
}

static bool find_rotation(const axis *a, rule *r)
{
    size_t u = 0;
    while (u < a->units && (a->source[u] == a->n || a->source[u] == u))
        u++;
    if (u == a->units || a->source[u] / r->period != u / r->period)
        return false;
    r->by = (a->source[u] + r->period - u) % r->period;
    r->kind = ARI_FOUND_ROTATED;
    return fits_formula(a, r, rotated);
}

static bool find_interleaving(const axis *a, rule *r)
{
    r->kind = ARI_FOUND_INTERLEAVED;
    r->first = 0;
    r->many = r->period;
    for (r->p = 2; r->p * 2 <= r->period; r->p++) {
        r->q = r->period / r->p;
        if (r->period % r->p == 0 && fits_formula(a, r, interleaved))
            return true;
    }
    return false;
}

/* RoPE's pairs of the first or the last features of each head, where it turns a part of them. */
static bool find_pairs(const axis *a, rule *r, size_t head)
{
    *r = (rule){.kind = ARI_FOUND_INTERLEAVED, .period = head};
    for (r->many = head - 1; r->many >= 4; r->many--) {
        for (size_t i = 0; r->many % 2 == 0 && i < 4; i++) {
            r->first = i < 2 ? 0 : head - r->many;
            r->p = i % 2 == 0 ? 2 : r->many / 2;
            r->q = r->many / r->p;
            if (fits_formula(a, r, interleaved))
                return true;
        }
    }
    return false;
}

/* Rules for the whole of a period; the smallest period for which one holds says most. */
static bool find_in_period(const axis *a, rule *r)
{
    if (r->period > 2 && (r->kind = ARI_FOUND_REVERSED, fits_formula(a, r, reversed)))
        return true;
    if (find_rotation(a, r))
        return true;
    if (r->period < 4)
        return false;
    if (find_interleaving(a, r))
        return true;
    r->kind = ARI_FOUND_ZIGZAG;
    return r->period % 2 == 0 && (a->places < 2 || r->period == 2 * a->places) &&
           (fits_formula(a, r, zigzag) || fits_formula(a, r, out_of_zigzag)) && a->moved > 2 * a->unit;
}

/* Units in each other's place two and two, several that have one's, or any other order. */
static void find_exchange(const axis *a, rule *r)
{
    bool pairs = true, repeated = false;
    *r = (rule){.period = a->units};
    for (size_t u = 0; u < a->units; u++) {
        const size_t source = a->source[u], back = source < a->n ? a->source[source] : a->n;
        if (source == a->n || source == u)
            continue;
        if (r->moved++ == 0) {
            r->a = u;
            r->b = source;
        }
        pairs = pairs && (back == u || back == a->n);
        repeated = repeated || back == source;
    }
    r->kind = pairs ? ARI_FOUND_EXCHANGED : repeated ? ARI_FOUND_REPEATED : ARI_FOUND_REORDERED;
}

/* Each slice has the values of the one so many further on; those from beyond the edge are unknown or right. */
static bool find_shift(axis *a, rule *r)
{
    ptrdiff_t by = 0;
    size_t follow = 0, first = a->n, stay = 0;
    for (size_t i = 0; i < a->n; i++) {
        const ptrdiff_t own = (ptrdiff_t)a->from[i] - (ptrdiff_t)i;
        if (!counts(a, i))
            continue;
        stay += own == 0 && first < a->n;
        if (own == 0)
            continue;
        if (stay > 0 || (by != 0 && own != by))
            return false;
        first = i < first ? i : first;
        by = own;
        follow++;
    }
    const size_t size = (size_t)(by < 0 ? -by : by);
    if (by == 0 || follow < 3 || a->lost > size || size * 4 > a->n || size * 4 > a->wrongs ||
        (follow + a->lost) * 10 < a->wrongs * 8)
        return false;
    *r = (rule){.kind = ARI_FOUND_SHIFTED_SLICES, .period = a->n, .by = size, .a = by < 0};
    a->unit = 1;
    a->units = a->n;
    return true;
}

/* Units from the largest: shards before rows. Periods from the smallest: heads before the whole. */
static bool find_rule(axis *a, rule *r)
{
    size_t unit = a->n / 2;
    if (a->lost > 0)
        return find_shift(a, r);
    while (unit > 1 && (a->n % unit != 0 || !moves_in_units(a, unit)))
        unit--;
    if (!moves_in_units(a, unit))
        return false;
    *r = (rule){.period = 2};
    for (; r->period <= a->units; r->period++) {
        if (a->units % r->period == 0 && find_in_period(a, r))
            return true;
    }
    const size_t least = a->head > 0 ? a->head : 5, most = a->head > 0 ? a->head : a->n / 2;
    for (size_t head = least; a->heads && a->unit == 1 && head <= most && head < a->n; head++) {
        if (a->n % head == 0 && find_pairs(a, r, head)) {
            a->head = head;
            return true;
        }
    }
    if (!find_shift(a, r))
        find_exchange(a, r);
    return true;
}

/* --- what is found ------------------------------------------------------------------------------------------------ */

/* Tokens of all samples in a row are tokens: periods that no sample's border cuts are those of a sample's tokens. */
static bool is_within_samples(const ari_case *c, const axis *a, const rule *r)
{
    return a->dim == ROWS && r->period < a->units && c->grid.shape[c->grid.nd - 2] % (r->period * a->unit) == 0;
}

static bool few_values(const ari_case *c)
{
    const ar_dtype t = c->reference ? c->reference->dtype : AR_F32;
    return t == AR_BOOL || t == AR_U8 || t == AR_I8 || c->role == ARI_CHOSEN;
}

static bool is_few(const rule *r)
{
    return r->kind == ARI_FOUND_EXCHANGED || r->kind == ARI_FOUND_REPEATED || r->kind == ARI_FOUND_REORDERED;
}

/* A rule of RoPE's pairs is complete; for another that holds in a part, a look at that part may say more. */
static int confidence_of(const ari_case *c, const axis *a, const rule *r, bool pairs, double worst)
{
    const bool ruled = !is_few(r);
    if (a->size == 1 && (ruled ? a->moved < 8 : worst > 0.0 || a->moved < 4))
        return ARI_SILENT;
    if (r->kind == ARI_FOUND_SHIFTED_SLICES && a->lost > 0)
        return ARI_IDENTITY + 1;
    if (ruled)
        return ARI_IDENTITY + 6 + (a->unit > 1) - (r->right > 0 && !pairs ? 2 : 0);
    if (few_values(c) && a->size < 64) /* slices of a mask, or of experts' numbers, are equal by chance */
        return ARI_SILENT;
    if (a->moved < 2 && a->size < 8)
        return ARI_SILENT;
    return r->kind == ARI_FOUND_REORDERED ? ARI_IDENTITY + 2 + (a->unit > 1) : ARI_IDENTITY + 5;
}

/* True if a rule may hold within each head. */
static bool is_of_heads(const axis *a, const rule *r)
{
    return a->heads && r->period < a->units && a->head % (r->period * a->unit) == 0;
}

enum { MOST_LISTED = 16 };

/* " within every 8 rows (each head)", " within 2 of 6 times 8 rows", " (4 of 6 heads moved)"; and ": 0, 3, 1, 2", the
 * units' places in the reference, if they say more than the rule's name. */
static void say_within(ari_trace *t, const axis *a, const rule *r)
{
    const size_t period = r->period * a->unit, periods = a->n / period;
    const bool few = r->moved > (r->kind == ARI_FOUND_EXCHANGED ? 2 : 1);
    ari_text text = ari_list(t, "within");
    if (r->right > 0)
        ari_say(&text, " within %zu of %zu times %zu %s", periods - r->right, periods, period, a->name[1]);
    else if (periods > 1)
        ari_say(&text, " within every %zu %s%s", period, a->name[1], is_of_heads(a, r) ? " (each head)" : "");
    if (few)
        ari_say(&text, " (%zu of %zu moved", r->moved, a->units);
    for (size_t u = 0; u < a->units && a->units <= MOST_LISTED && (few || r->kind == ARI_FOUND_ZIGZAG); u++)
        ari_say(&text, "%s%zu", u ? ", " : ": ", a->source[u] < a->n ? a->source[u] : u);
    ari_say(&text, few ? ")" : "");
}

/* "heads (16 rows each)", "blocks of 16 rows", "rows"; one of them; of units in other units' places an example. */
static void describe_units(ari_trace *t, const axis *a, const rule *r)
{
    const bool heads = a->head > 1 && a->head == a->unit;
    t->flags |= heads && is_few(r) ? ARI_IF(HEADS) : 0;
    ARI_FACTS(t,
              {"unit", .text = heads         ? "head"
                               : a->unit > 1 ? "block"
                                             : a->name[0]},
              {"a", .count = r->a}, {"b", .count = r->b});
    if (a->unit == 1)
        ARI_FACTS(t, {"units", .text = a->name[1]});
    else
        ari_words(t, "units", heads ? "heads (%zu %s each)" : "blocks of %zu %s", a->unit, a->name[1]);
}

/* States by how many slices a rotation or a shift moves, and which way. */
static void describe_steps(ari_trace *t, const axis *a, const rule *r)
{
    const bool shift = r->kind == ARI_FOUND_SHIFTED_SLICES, forward = shift ? r->a == 0 : r->by <= r->period / 2;
    const size_t slices = (shift || forward ? r->by : r->period - r->by) * a->unit, head = a->head ? a->head : slices;
    const bool even = slices > 1 && a->n % slices == 0, by_heads = a->head > 0 ? slices % head == 0 : even;
    t->flags |= (even ? ARI_IF(BLOCKS) : 0) |
                (a->heads && by_heads && r->kind == ARI_FOUND_ROTATED && r->period == a->units ? ARI_IF(HEADS) : 0);
    ARI_FACTS(t, {"axes", .text = a->name[slices != 1]}, {"sign", .text = forward ? "+" : "-"}, {"n", .count = a->n},
              {"by", .count = r->by * a->unit}, {"slices", .count = slices},
              {"blocks", .count = slices > 0 ? a->n / slices : 0}, {"head", .count = head},
              {"head_by", .count = slices > 0 ? slices / head : 0});
}

/* True if a rule deals pairs of a head's features out as RoPE's halves, or the inverse. */
static bool is_of_pairs(const axis *a, const rule *r)
{
    return r->kind == ARI_FOUND_INTERLEAVED && is_of_heads(a, r) && a->unit == 1 && (r->p == 2 || r->q == 2);
}

static void describe_rule(ari_trace *t, const ari_case *c, const axis *a, const rule *r)
{
    const size_t tokens = a->dim == ROWS ? c->grid.shape[c->grid.nd - 2] : 0;
    const bool all = r->period == a->units || (is_within_samples(c, a, r) && r->period * a->unit == tokens);
    const char *part[3];
    size_t size[3];
    const int packed = a->dim >= 0 && r->period == a->units ? ari_packed(c, a->dim, part, size) : 0;
    t->flags |= (strcmp(a->name[0], "token") == 0 ? ARI_IF(TOKENS) : 0) |
                (strcmp(a->name[0], "id") == 0 ? ARI_IF(IDS) : 0) |
                (strcmp(a->name[0], "sample") == 0 ? ARI_IF(SAMPLES) : 0) | (all ? ARI_IF(ALL) : 0) |
                (r->period == 2 ? ARI_IF(TWICE) : 0) | (a->unit > 1 && a->units <= 64 ? ARI_IF(OF_SHARDS) : 0) |
                (packed ? ARI_IF(PACKED) : 0) | (is_of_pairs(a, r) ? ARI_IF(PAIRS) : 0) |
                (a->dim == ROWS && !is_within_samples(c, a, r) ? ARI_IF(ROWS) : 0);
    ARI_FACTS(t, {"axis", .text = a->name[0]}, {"shards", .count = r->kind == ARI_FOUND_ZIGZAG ? r->period : a->units},
              {"places", .count = r->period / 2}, {"p", .count = r->p}, {"q", .count = r->q},
              {"packed", .text = packed == 3 ? "q|k|v" : "gate|up"},
              {"pairs", .text = r->p == 2 ? "halves are interleaved" : "pairs are split into halves"});
    if (r->kind == ARI_FOUND_ROTATED || r->kind == ARI_FOUND_SHIFTED_SLICES)
        describe_steps(t, a, r);
    describe_units(t, a, r);
    say_within(t, a, r);
}

/* Element i of a run: that of its slice's source. */
static double expected(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const axis *a = h->of;
    const size_t at = run->index + i, slice = at / a->inner % a->n, from = a->from[slice];
    return from < a->n ? (double)h->c->ref[at + from * a->inner - slice * a->inner] : (double)NAN;
}

/* By what rule slices moved, if it is one. */
static void found_order(ari_trace *t, const ari_case *c, axis *a)
{
    rule r;
    if (!find_rule(a, &r))
        return;
    const ari_hypothesis h = {
        .expect = expected, .c = c, .of = a, .may_miss = a->lost * a->size, .differs_only = true, .kind = r.kind};
    ari_residual left = ari_residual_of(&h);
    const size_t missed = left.missed;
    left.missed = 0;
    const int confidence = confidence_of(c, a, &r, is_of_pairs(a, &r), left.worst);
    if (missed > h.may_miss || !ari_explains_all(&left, c) || confidence == ARI_SILENT)
        return;
    ari_trace_set(t, r.kind, 0);
    t->penalty = ARI_IDENTITY + 7 - confidence;
    describe_rule(t, c, a, &r);
    ari_say_exactness(t, c, left.worst);
}

/* --- the axes ----------------------------------------------------------------------------------------------------- */

/* Looks along one axis; a more confident trace than *t takes its place. */
static ar_status look_along_axis(ari_trace *t, const ari_case *c, int dim, size_t n, size_t inner)
{
    axis a = {.dim = dim, .name = {"token", "tokens"}, .n = n, .inner = inner, .size = c->count / n};
    ari_trace own = {.kind = ARI_FOUND_NOTHING};
    if (n < 2)
        return AR_OK;
    for (int plural = 0; plural < 2 && dim >= 0; plural++)
        a.name[plural] = ari_dim_name(&c->grid, dim, plural);
    a.places = (size_t)ari_ranks_along(&c->known->mesh, ARI_CUTS_POSITIONS);
    a.heads = dim >= 0 && ari_has_heads(c, dim);
    a.head = dim >= 0 ? ari_head_size(c, dim) : 0;
    AR_TRY(ARI_TAKE(&a.from, c->arena, n, c->d->name));
    AR_TRY(ARI_TAKE(&a.source, c->arena, n, c->d->name));
    AR_TRY(ARI_TAKE(&a.plain, c->arena, n, c->d->name));
    if (trace(c, &a))
        found_order(&own, c, &a);
    if (own.kind != ARI_FOUND_NOTHING && (t->kind == ARI_FOUND_NOTHING || own.penalty < t->penalty))
        *t = own;
    return AR_OK;
}

ar_status ari_measure_order(ari_trace *t, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    for (int dim = 0; dim < g->nd && c->count > 1; dim++)
        AR_TRY(look_along_axis(t, c, dim, g->shape[dim], ari_grid_inner(g, dim)));
    /* Tokens of all samples in one row: what mixes samples and tokens, or holds in some samples alone. */
    if (g->nd > 2 && t->kind == ARI_FOUND_NOTHING)
        AR_TRY(look_along_axis(t, c, ROWS, g->rows, g->cols));
    return AR_OK;
}
