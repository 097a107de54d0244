/* SPDX-License-Identifier: Apache-2.0 */
/* A function of each value: a flipped bit, a coarser format, a clamp, NaN. */
#include "ref/core/float_bits.h"
#include "verify/diagnose/hypothesis.h"

/* --- few elements ------------------------------------------------------------------------------------------------- */

enum { FEW = 4 };

/* The one bit that turns a into b, in noise about b; -1: none. */
static int flipped_bit(const ari_case *c, size_t i)
{
    int found = -1;
    for (int bit = 0; bit < 32; bit++) {
        const float back = ari_float32(ari_bits32(c->val[i]) ^ (1u << bit));
        if (c->noisy ? !ari_holds(c, back, (double)c->ref[i]) : !ari_same_bits(back, c->ref[i]))
            continue;
        if (found >= 0)
            return -1;
        found = bit;
    }
    return found;
}

ar_status ari_measure_bits(ari_trace *t, const ari_case *c)
{
    const ari_survey *s = &c->survey;
    size_t which[FEW], n = 0;
    if (s->different == 0 || s->different > FEW || c->count < 16)
        return AR_OK;
    for (size_t i = 0; i < c->count && n < s->different; i++) {
        if (ari_off(c, i))
            which[n++] = i;
    }
    for (size_t i = 0; i < n && c->noisy; i++) { /* the largest of much rounding is no write to one place */
        if (fabs((double)c->val[which[i]] - (double)c->ref[which[i]]) < 100.0 * c->absolute)
            return AR_OK;
    }
    int bit = flipped_bit(c, which[0]);
    for (size_t i = 1; i < n; i++)
        bit = flipped_bit(c, which[i]) == bit ? bit : -1;
    const bool exchanged = n == 2 && ari_same_bits(c->ref[which[0]], c->val[which[1]]) &&
                           ari_same_bits(c->ref[which[1]], c->val[which[0]]);
    ari_trace_set(t, ARI_FOUND_BITS, exchanged ? ARI_IF(EXCHANGED) : bit >= 0 ? ARI_IF(ONE) : 0);
    ari_words(t, "which", n == 1 ? "one element alone" : "%zu elements alone", n);
    ari_words(t, "flipped", n == 1 ? "one bit flipped" : "the same bit flipped in %zu elements", n);
    ari_words(t, "bit", bit == 31 ? "bit 31, the sign" : "bit %d, of the %s", bit, bit >= 23 ? "exponent" : "mantissa");
    ari_words(t, "others", "all others are equal%s", c->noisy ? " to rounding" : "");
    ari_text text = ari_list(t, "elements");
    for (size_t i = 0; i < n; i++) {
        ari_say(&text, i ? ", [" : "[");
        for (int dim = 0; dim < c->grid.nd; dim++)
            ari_say(&text, dim ? ", %zu" : "%zu", ari_grid_index(&c->grid, which[i], dim));
        ari_say(&text, "] (%.9g, reference %.9g)", (double)c->val[which[i]], (double)c->ref[which[i]]);
    }
    return AR_OK;
}

/* --- formats ------------------------------------------------------------------------------------------------------ */

/* x to `kept` bits of mantissa: to nearest (ties to even), or cut off. */
static float round_to(float x, int kept, bool cut)
{
    const uint32_t u = ari_bits32(x), unit = 1u << (23 - kept);
    if (!isfinite(x))
        return x;
    if (cut)
        return ari_float32(u & ~(unit - 1));
    return ari_float32((u + unit / 2 - 1 + ((u >> (23 - kept)) & 1u)) & ~(unit - 1));
}

/* Mantissa bits that are used, of values that differ. */
static int mantissa_bits(uint32_t all)
{
    int used = 23;
    while (used > 0 && (all & (1u << (23 - used))) == 0)
        used--;
    return used;
}

typedef struct fit {
    size_t different, nearest, cut, near; /* elements; near: within one step of the format */
} fit;

/* All that differ, on every rank; their mantissas' bits go to *value and *ref. */
static fit fit_format(const ari_case *c, int kept, uint32_t *value, uint32_t *ref)
{
    fit r = {0};
    for (ari_run run = ari_runs_of(&c->grid); ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count; i++) {
            if (!ari_run_differs(&c->grid, &run, i))
                continue;
            const float v = run.value[i], x = run.ref[i];
            /* The smallest numbers of fp16 have a step of their own. */
            const double step = ldexp(fabs((double)x), -kept) + (kept == 10 ? 0x1p-24 : 0.0);
            *value |= isfinite(v) ? ari_bits32(v) & 0x7fffffu : 0;
            *ref |= isfinite(x) ? ari_bits32(x) & 0x7fffffu : 0;
            r.different++;
            r.nearest += ari_same_bits(v, round_to(x, kept, false));
            r.cut += ari_same_bits(v, round_to(x, kept, true));
            r.near += fabs((double)v - (double)x) <= step + c->absolute;
        }
    }
    return r;
}

/* True if the differing elements are off by a part of their own update: after a step, a missing update may be as small
 * as rounding. */
static bool is_part_of_update(const ari_case *c)
{
    double moved = 0.0;
    for (ari_run run = ari_runs_of(&c->grid); c->d->pass == 'n' && c->d->before && ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count; i++) {
            const double own = (double)run.ref[i] - (double)c->d->before[run.index + i];
            moved += ari_run_differs(&c->grid, &run, i) ? own * own : 0.0;
        }
    }
    return c->survey.total.dd > 0.01 * moved && moved > 0.0;
}

ar_status ari_measure_precision(ari_trace *t, const ari_case *c)
{
    static const int formats[] = {2, 3, 7, 10};
    const ari_survey *s = &c->survey;
    uint32_t value = 0, ref = 0;
    size_t k = 0;
    if (!(s->max_reference > 0.0))
        return AR_OK;
    if (s->total.max_difference <= ARI_LONG_SUMS * s->max_reference) {
        if (is_part_of_update(c))
            return AR_OK;
        ARI_FINDING(t, c->d->unsteady ? ARI_FOUND_UNSTEADY : ARI_FOUND_ROUNDING, c->d->exact ? ARI_IF(SAME) : 0,
                    {"largest", .number = s->total.max_difference / s->max_reference});
        return AR_OK;
    }
    (void)fit_format(c, formats[3], &value, &ref);
    const int used = mantissa_bits(value);
    while (k < 4 && formats[k] < used)
        k++;
    if (used < 1 || k == 4 || mantissa_bits(ref) <= formats[k] || s->total.different < 16)
        return AR_OK;
    const int kept = formats[k];
    const fit r = fit_format(c, kept, &value, &ref);
    /* A reference from elsewhere is rounding off itself, and moves a value now and then to the next step. */
    const bool sums =
        strchr("gmv", c->d->pass) && s->total.dd < 0x1p-10 * s->total.rr; /* terms of a sum are larger than it */
    if (r.near < r.different && !sums)
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_PRECISION,
                r.near < r.different                                 ? ARI_IF(SOME)
                : r.cut * 10 >= r.different * 9 && r.cut > r.nearest ? ARI_IF(CUT)
                : r.nearest * 2 >= r.different                       ? ARI_IF(SAME)
                                                                     : 0,
                {"format", .text = kept == 10  ? s->max_reference < 65504.0 ? "fp16 or tf32" : "tf32"
                                   : kept == 7 ? "bf16"
                                   : kept == 3 ? "fp8 (e4m3)"
                                               : "fp8 (e5m2)"},
                {"mantissa", .count = (size_t)kept}, {"bits", .count = kept < 4 ? 8 : 16},
                {"nearest", .count = t->flags & ARI_IF(CUT) ? r.cut : r.nearest}, {"wrong", .count = r.different});
    return AR_OK;
}

/* --- functions ---------------------------------------------------------------------------------------------------- */

/* Functions of the reference: a mask inverted; the value clamped. */
static double inverted(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    (void)h;
    return 1.0 - (double)run->ref[i];
}

static double within_bounds(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    const double *bound = h->of;
    return fmin(fmax((double)run->ref[i], bound[0]), bound[1]);
}

static void range_of(double range[2], const float *x, size_t n)
{
    range[0] = INFINITY, range[1] = -INFINITY;
    for (size_t i = 0; i < n; i++) {
        const double here = (double)x[i]; /* no fmin, fmax: gcc 12 for ARM64 breaks off where it vectorises them */
        range[0] = here < range[0] ? here : range[0];
        range[1] = here > range[1] ? here : range[1];
    }
}

/* True if all values are 0 or 1, and both occur. */
static bool is_mask(const ari_case *c)
{
    size_t ones = 0, i = 0;
    for (; i < c->count && (c->ref[i] == 0.0f || c->ref[i] == 1.0f); i++)
        ones += c->ref[i] == 1.0f;
    return i == c->count && ones > 0 && ones < c->count;
}

/* True if all differing values of [from, to) are multiples of a step, and within one of the reference. */
static bool is_grid(const ari_case *c, size_t from, size_t to, double step)
{
    size_t several = 0; /* of zeros alone any step is one */
    for (size_t i = from; i < to; i++) {
        const double v = (double)c->val[i];
        if (!ari_off(c, i))
            continue;
        several += fabs(v) > 0.5 * step;
        if (!(fabs(v - nearbyint(v / step) * step) <= 1e-4 * step) || fabs(v - (double)c->ref[i]) > 1.01 * step)
            return false;
    }
    return several >= 4;
}

/* The step of a grid of at most 256 steps that all different values of [from, to) lie on: the smallest value, or that
 * of signed integers of 8 or 4 bits up to the largest. NAN if all are zeros, 0 if there is none or too few values. */
static double grid_step(const ari_case *c, size_t from, size_t to, size_t fewest)
{
    double least = INFINITY, largest = 0.0;
    size_t n = 0;
    for (size_t i = from; i < to; i++) {
        const double v = fabs((double)c->val[i]);
        largest = v > largest ? v : largest; /* itself a multiple, and often right */
        n += ari_off(c, i) && v != 0.0;
        least = ari_off(c, i) && v != 0.0 ? fmin(v, least) : least;
    }
    const double steps[] = {largest / 127.0, largest / 128.0, largest / 7.0, largest / 8.0, least};
    for (size_t k = 0; k < sizeof steps / sizeof *steps && isfinite(largest) && n >= fewest; k++) {
        if (steps[k] > 2.0 * c->absolute && largest <= 256.0 * steps[k] && is_grid(c, from, to, steps[k]))
            return steps[k];
    }
    return n == 0 ? (double)NAN : 0.0;
}

static void measure_grid(ari_trace *t, const ari_case *c)
{
    const size_t cols = c->grid.cols;
    const double step = grid_step(c, 0, c->count, 64);
    size_t rows = 0;
    for (size_t row = 0; !(step > 0.0) && row * cols < c->count; row++) {
        const double of_row = grid_step(c, row * cols, (row + 1) * cols, 12);
        if (of_row == 0.0)
            return;
        rows += of_row > 0.0;
    }
    if (!(step > 0.0) && rows < 2)
        return;
    ARI_FINDING(t, ARI_FOUND_GRID, step > 0.0 ? 0 : ARI_IF(ROWS), {"step", .number = step},
                {"steps", .count = step > 0.0 ? (size_t)nearbyint(c->max_ref / step) : 0}, {"rows", .count = rows});
}

/* True if different values of the reference beyond a bound became that bound: one value may be replaced by another, as
 * Adam's first steps from one are. */
static bool gathers_values(const ari_case *c, const double *bound)
{
    double beyond[2][2] = {{HUGE_VAL, -HUGE_VAL}, {HUGE_VAL, -HUGE_VAL}};
    for (size_t i = 0; i < c->count; i++) {
        const double x = (double)c->ref[i];
        for (int side = 0; side < 2; side++) {
            if (side == 0 ? x < bound[0] : x > bound[1]) {
                beyond[side][0] = fmin(beyond[side][0], x);
                beyond[side][1] = fmax(beyond[side][1], x);
            }
        }
    }
    return fmax(beyond[0][1] - beyond[0][0], beyond[1][1] - beyond[1][0]) > c->absolute;
}

ar_status ari_measure_function(ari_trace *t, const ari_case *c)
{
    double own[2], there[2];
    if (c->count < 8)
        return AR_OK;
    range_of(own, c->val, c->count);
    range_of(there, c->ref, c->count);
    const bool cuts =
        own[1] - own[0] > 4.0 * c->absolute && (own[0] > there[0] + c->absolute || own[1] < there[1] - c->absolute);
    const ari_hypothesis mask = {.expect = inverted, .c = c}, clamp = {.expect = within_bounds, .c = c, .of = own};
    if (is_mask(c) && ari_holds_all(NULL, &mask))
        ari_trace_set(t, ARI_FOUND_FUNCTION, ARI_IF(EXCHANGED));
    else if (cuts && c->survey.different >= 4 && gathers_values(c, own) && ari_holds_all(NULL, &clamp))
        ari_trace_set(t, ARI_FOUND_FUNCTION, ARI_IF(CUT) | (own[0] == 0.0 && own[1] == there[1] ? ARI_IF(ZERO) : 0));
    else
        measure_grid(t, c);
    ARI_FACTS(t, {"wrong", .count = c->survey.different}, {"low", .number = own[0]}, {"high", .number = own[1]});
    return AR_OK;
}

/* --- NaN ---------------------------------------------------------------------------------------------------------- */

ar_status ari_measure_nan(ari_trace *t, const ari_case *c)
{
    const ari_tally *all = &c->survey.total;
    if (all->nan == 0)
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_NAN, 0, {"nan", .count = all->nan}, {"wrong", .count = all->different});
    return AR_OK;
}
