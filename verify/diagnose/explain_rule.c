/* SPDX-License-Identifier: Apache-2.0 */
/* By what rule slices moved: rotated, reversed, in blocks, interleaved, within each head. */
#include <stdio.h>

#include "verify/diagnose/explain_slices.h"

typedef enum rule_kind {
    NO_RULE,
    ROTATED,     /* slice i has that of i + by, modulo n */
    SHIFTED,     /* the same, but what comes in from the edge is none */
    REVERSED,    /* that of n-1-i */
    INTERLEAVED, /* blocks written as a [p, q] table are read as [q, p] */
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

static bool counts(const ari_axis *a, size_t i)
{
    return !a->plain[i] && a->from[i] < a->n;
}

/* The source of unit u of `unit` slices, if all of it that counts comes from one such unit in order: its index; n if
 * nothing counts; n + 1 if it does not. */
static size_t unit_source(const ari_axis *a, size_t u, size_t unit)
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

static bool moves_in_units(const ari_axis *a, size_t unit)
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

/* Whether a formula gives the source of every unit within its period. */
static bool fits(const ari_axis *a, const rule *r, formula f)
{
    for (size_t u = 0; u < r->units; u++) {
        const size_t source = unit_source(a, u, r->unit), start = u / r->period * r->period;
        if (source < a->n && (source < start || source >= start + r->period || !f(r, u - start, source - start)))
            return false;
    }
    return true;
}

static bool find_rotation(const ari_axis *a, rule *r)
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

static bool find_interleaving(const ari_axis *a, rule *r)
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
static bool find_in_period(const ari_axis *a, rule *r)
{
    if (r->period > 2 && (r->kind = REVERSED, fits(a, r, is_reversed)))
        return true;
    return find_rotation(a, r) || (r->period >= 4 && find_interleaving(a, r));
}

static void find_exchange(const ari_axis *a, rule *r)
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
static bool find_shift(const ari_axis *a, rule *r)
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
static bool find_rule(const ari_axis *a, rule *r)
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
    if (find_shift(a, r))
        return true;
    find_exchange(a, r);
    return true;
}

/* --- words -------------------------------------------------------------------------------------------------------- */

static const char *axis_name(const ari_whole *w, const ari_axis *a, bool plural)
{
    if (a->dim == ARI_AXIS_ROWS)
        return plural ? "tokens" : "token";
    return ari_axis_name(w, a->dim, plural);
}

static bool is_tokens(const ari_whole *w, const ari_axis *a)
{
    return strcmp(axis_name(w, a, false), "token") == 0;
}

static bool is_samples(const ari_whole *w, const ari_axis *a)
{
    return strcmp(axis_name(w, a, false), "sample") == 0;
}

/* "blocks of 16 rows", "rows". */
static void say_units(ari_text *t, const ari_whole *w, const ari_axis *a, const rule *r)
{
    const size_t head = a->dim >= 0 ? ari_head_size(w, a->dim) : 0;
    if (r->unit > 1 && head == r->unit)
        ari_say(t, "heads (%zu %s each)", head, axis_name(w, a, true));
    else if (r->unit > 1)
        ari_say(t, "blocks of %zu %s", r->unit, axis_name(w, a, true));
    else
        ari_say(t, "%s", axis_name(w, a, true));
}

static void say_within(ari_text *t, const ari_whole *w, const ari_axis *a, const rule *r)
{
    const size_t size = r->period * r->unit;
    const bool heads = a->dim >= 0 && ari_has_heads(w, a->dim);
    if (size < a->n)
        ari_say(t, " within every %zu %s%s", size, axis_name(w, a, true), heads ? " (each head)" : "");
}

static void say_rotated(ari_text *t, const ari_whole *w, const ari_axis *a, const rule *r)
{
    const size_t size = a->n / r->period, shift = r->by <= r->period / 2 ? r->by : r->period - r->by;
    const size_t slices = shift * r->unit, head = a->dim >= 0 ? ari_head_size(w, a->dim) : 0;
    const bool heads = a->dim >= 0 && ari_has_heads(w, a->dim), whole = r->period == r->units;
    if (!whole && r->period == 2) {
        ari_say(t, "the two halves are exchanged%s",
                heads ? " (rotate_half, or RoPE's halves the wrong way round)" : "");
    } else if (whole && is_samples(w, a)) {
        ari_say(t, "batch order: sample i has that of sample i + %zu, modulo %zu", r->by * r->unit, a->n);
    } else if (whole && r->period == 2) {
        ari_say(t, is_tokens(w, a)
                       ? "rotated token blocks: the two halves stand in rank-rotated order, each rank's own "
                         "chunk first (chunked all-gather), or"
                       : "the two halves are exchanged:");
        ari_say(t, " shards 0 and 1 of 2 in each other's place");
    } else if (is_tokens(w, a) && slices > 1 && a->n % slices == 0) {
        ari_say(t,
                "rotated token blocks: block k of %zu has block k%s1's tokens: chunks of an all-gather put down "
                "starting with the rank's own",
                a->n / slices, r->by <= r->period / 2 ? "+" : "-");
    } else if (is_tokens(w, a)) {
        ari_say(t, "shifted by %zu token%s (the end wraps round): positions or labels rolled", slices,
                slices == 1 ? "" : "s");
    } else if (heads && whole &&
               ((head > 0 && slices % head == 0) || (head == 0 && a->n % slices == 0 && slices > 1))) {
        const size_t by = head ? slices / head : 1;
        ari_say(t, "off by %s%zu head%s: head i has head i%s%zu's, if a head has %zu %s", by == 1 ? "one: by " : "", by,
                by == 1 ? "" : "s", r->by <= r->period / 2 ? "+" : "-", by, head ? head : slices,
                axis_name(w, a, true));
    } else if (whole && slices > 1 && a->n % slices == 0) {
        ari_say(t, "shards in rotated order: block k of %zu has block k%s1's (rank r took the shard of its neighbour)",
                a->n / slices, r->by <= r->period / 2 ? "+" : "-");
    } else {
        ari_say(t, "rotated by %zu", slices);
        if (size > 1)
            ari_say(t, " in each of %zu", size);
        if (strcmp(axis_name(w, a, false), "id") == 0)
            ari_say(t, ": off-by-one ids");
    }
}

static void say_interleaved(ari_text *t, const ari_whole *w, const ari_axis *a, const rule *r)
{
    const char *part[3];
    size_t size[3];
    const bool whole = r->period == r->units, heads = a->dim >= 0 && ari_has_heads(w, a->dim);
    const int packed = a->dim >= 0 ? ari_packed(w, a->dim, part, size) : 0;
    if (heads && !whole && r->unit == 1 && (r->p == 2 || r->q == 2)) {
        ari_say(
            t,
            "RoPE: %s: its pairs are neighbours on one side and halves on the other (interleaved against rotate_half)",
            r->p == 2 ? "halves are interleaved" : "pairs are split into halves");
        return;
    }
    ari_say(t, "interleaved: %zu runs of %zu are dealt out in turn", r->p, r->q);
    if (packed && whole)
        ari_say(t, "; a packed tensor (%s) cut into shards as one block, or put together shard by shard",
                packed == 3 ? "q|k|v" : "gate|up");
    else if (a->dim == ARI_AXIS_ROWS)
        ari_say(t,
                "; tokens gathered over %zu ranks left one part after the other ([ranks, b, s/N] against [b, s]), or "
                "batch and sequence exchanged",
                r->q);
    else if (is_samples(w, a))
        ari_say(t, "; samples dealt out to ranks in turn on one side, in runs on the other (dp sharding of the batch)");
    else if (is_tokens(w, a))
        ari_say(t, "; tokens dealt out to ranks in turn on one side, in runs on the other (sequence sharding)");
    else
        ari_say(
            t, "; a [%zu, %zu] dimension flattened the other way round (heads and lanes, gate and up, shards and rows)",
            r->p, r->q);
}

static void say_exchange(ari_text *t, const ari_whole *w, const ari_axis *a, const rule *r)
{
    const size_t head = a->dim >= 0 ? ari_head_size(w, a->dim) : 0;
    const char *unit = head == r->unit && head > 1 ? "head" : r->unit > 1 ? "block" : axis_name(w, a, false);
    const bool shards = r->unit > 1 && r->units <= 64;
    if (r->kind == EXCHANGED)
        ari_say(t, "exchanged: %s %zu has %zu's and the other way round", unit, r->a, r->b);
    else if (r->kind == REPEATED)
        ari_say(t, "duplicated: %s %zu has %zu's values, which stand at %zu too", unit, r->a, r->b, r->b);
    else
        ari_say(t, "in another order: %s %zu has %zu's", unit, r->a, r->b);
    if (r->moved > 2 || (r->moved == 2 && r->kind != EXCHANGED))
        ari_say(t, " (%zu of %zu %ss moved)", r->moved, r->units, unit);
    if (shards && head != r->unit)
        ari_say(t, "; shard %zu of %zu is %s", r->a, r->units,
                r->kind == REPEATED ? "another rank's (one shard loaded, seeded or sent twice)"
                                    : "at another rank's place");
    else if (head == r->unit && head > 1)
        ari_say(t, "; heads assigned by the wrong rule (KV head r mod n_kv in place of floor(r n_kv / N))");
}

static bool few_values(const ari_whole *w)
{
    const ar_dtype t = w->reference->dtype;
    return t == AR_BOOL || t == AR_U8 || t == AR_I8;
}

static int confidence_of(const ari_whole *w, const ari_axis *a, const rule *r)
{
    const bool scalar = a->size == 1, ruled = r->kind != OTHER && r->kind != EXCHANGED && r->kind != REPEATED;
    if (scalar && (!ruled ? a->worst > 0.0 || a->moved < 4 : a->moved < 8))
        return ARI_SILENT;
    if (r->kind == SHIFTED && a->lost > 0)
        return ARI_IDENTITY + 1;
    if (ruled)
        return ARI_IDENTITY + 6 + (r->unit > 1);
    if (few_values(w) && a->size < 64) /* slices of a mask are alike by chance */
        return ARI_SILENT;
    if (a->moved < 2 && a->size < 8)
        return ARI_SILENT;
    return r->kind == OTHER ? ARI_IDENTITY + 2 + (r->unit > 1) : ARI_IDENTITY + 5;
}

void ari_name_order(ari_clue *f, const ari_whole *w, const ari_axis *a)
{
    rule r;
    if (!ari_explains(w, a->worst) || !find_rule(a, &r))
        return;
    const int confidence = confidence_of(w, a, &r);
    if (confidence == ARI_SILENT)
        return;
    ari_text t = ari_find(f, confidence);
    snprintf(f->value, sizeof f->value, "the reference's values in another place");
    switch (r.kind) {
    case ROTATED:
        say_rotated(&t, w, a, &r);
        break;
    case SHIFTED:
        ari_say(&t, "shifted by %zu %s%s: %s i has that of i %c %zu%s", r.by, axis_name(w, a, r.by > 1), "",
                axis_name(w, a, false), r.a ? '-' : '+', r.by,
                strcmp(axis_name(w, a, false), "id") == 0 ? " (off-by-one ids)" : "");
        break;
    case REVERSED:
        ari_say(&t, is_tokens(w, a) ? "sequence reversed" : "reversed");
        break;
    case INTERLEAVED:
        say_interleaved(&t, w, a, &r);
        break;
    default:
        say_exchange(&t, w, a, &r);
    }
    if (r.kind == ROTATED || r.kind == REVERSED || r.kind == INTERLEAVED)
        say_within(&t, w, a, &r);
    ari_say(&t, "; ");
    say_units(&t, w, a, &r);
    ari_say(&t, " of the reference, ");
    ari_say_exactness(&t, w, a->worst);
}
