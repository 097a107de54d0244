/* SPDX-License-Identifier: Apache-2.0 */
/* A function of each value: a flipped bit, a coarser format, a clamp, a lost sign, zero. */
#include <stdio.h>

#include "ref/core/float_bits.h"
#include "verify/diagnose/explain_impl.h"

/* --- few elements ------------------------------------------------------------------------------------------------- */

enum { FEW = 4 };

static void say_bit(ari_text *t, int bit)
{
    if (bit == 31)
        ari_say(t, "bit 31, the sign");
    else
        ari_say(t, "bit %d, of the %s", bit, bit >= 23 ? "exponent" : "mantissa");
}

/* The one bit that takes a to b, in noise to about b; -1: there is none. */
static int flipped_bit(const ari_whole *w, size_t i)
{
    int found = -1;
    for (int bit = 0; bit < 32; bit++) {
        const float back = ari_float32(ari_bits32(w->val[i]) ^ (1u << bit));
        if (w->noisy ? !ari_holds(w, back, (double)w->ref[i]) : !ari_same_bits(back, w->ref[i]))
            continue;
        if (found >= 0)
            return -1;
        found = bit;
    }
    return found;
}

static void say_element(ari_text *t, const ari_whole *w, size_t i)
{
    const ari_grid *g = &w->view.grid;
    ari_say(t, "[");
    for (int dim = 0; dim < g->nd; dim++)
        ari_say(t, dim ? ", %zu" : "%zu", ari_grid_index(g, i, dim));
    ari_say(t, "] (%.9g, reference %.9g)", (double)w->val[i], (double)w->ref[i]);
}

ar_status ari_seek_bits(ari_clue *f, const ari_whole *w)
{
    const ari_survey *s = &w->view.survey;
    size_t which[FEW], n = 0;
    if (s->different == 0 || s->different > FEW || w->count < 16)
        return AR_OK;
    for (size_t i = 0; i < w->count && n < s->different; i++) {
        if (ari_off(w, i))
            which[n++] = i;
    }
    for (size_t i = 0; i < n && w->noisy; i++) { /* the largest of much rounding is no write to one place */
        if (fabs((double)w->val[which[i]] - (double)w->ref[which[i]]) < 100.0 * w->absolute)
            return AR_OK;
    }
    int bit = flipped_bit(w, which[0]);
    for (size_t i = 1; i < n; i++)
        bit = flipped_bit(w, which[i]) == bit ? bit : -1;
    ari_text t = ari_find(f, bit >= 0 ? ARI_IDENTITY + 7 : ARI_SHAPE + 15);
    if (n == 2 && ari_same_bits(w->ref[which[0]], w->val[which[1]]) &&
        ari_same_bits(w->ref[which[1]], w->val[which[0]]))
        ari_say(&t, "two elements exchanged: ");
    else if (bit >= 0) {
        ari_say(&t, n == 1 ? "one bit flipped: " : "the same bit flipped in %zu elements: ", n);
        say_bit(&t, bit);
        ari_say(&t, ", of ");
    } else
        ari_say(&t, n == 1 ? "one element alone: " : "%zu elements alone: ", n);
    for (size_t i = 0; i < n; i++) {
        ari_say(&t, i ? ", " : "");
        say_element(&t, w, which[i]);
    }
    ari_say(&t, "; all others are equal%s%s", w->noisy ? " to rounding" : "",
            bit >= 0 ? ": memory or storage, not arithmetic" : ": a write to one place, or one value from elsewhere");
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

/* Mantissa bits that the other's values use, of elements that differ; -1: none differs. */
static int mantissa_used(const ari_whole *w, const float *data)
{
    uint32_t all = 0;
    bool any = false;
    for (size_t i = 0; i < w->count; i++) {
        if (!ari_off(w, i) || !isfinite(data[i]))
            continue;
        all |= ari_bits32(data[i]) & 0x7fffffu;
        any = any || data[i] != 0.0f;
    }
    if (!any)
        return -1;
    int used = 23;
    while (used > 0 && (all & (1u << (23 - used))) == 0)
        used--;
    return used;
}

typedef struct fit {
    size_t different, nearest, cut, near; /* elements; near: within one step of the format */
} fit;

static fit fit_format(const ari_whole *w, int kept)
{
    fit r = {0};
    for (size_t i = 0; i < w->count; i++) {
        if (!ari_off(w, i))
            continue;
        const double step = ldexp(fabs((double)w->ref[i]), -kept);
        r.different++;
        r.nearest += ari_same_bits(w->val[i], round_to(w->ref[i], kept, false));
        r.cut += ari_same_bits(w->val[i], round_to(w->ref[i], kept, true));
        r.near += fabs((double)w->val[i] - (double)w->ref[i]) <= step + w->absolute;
    }
    return r;
}

static const char *format_name(const ari_whole *w, int kept)
{
    switch (kept) {
    case 10:
        return w->max_ref < 65504.0 ? "fp16 or tf32" : "tf32";
    case 7:
        return "bf16";
    case 3:
        return "fp8 (e4m3)";
    default:
        return "fp8 (e5m2)";
    }
}

ar_status ari_seek_precision(ari_clue *f, const ari_whole *w)
{
    const int used = mantissa_used(w, w->val), before = mantissa_used(w, w->ref);
    static const int formats[] = {2, 3, 7, 10};
    size_t k = 0;
    while (k < 4 && formats[k] < used)
        k++;
    if (used < 1 || k == 4 || before <= formats[k] || w->view.survey.different < 16)
        return AR_OK;
    const int kept = formats[k];
    const fit r = fit_format(w, kept);
    /* A reference from elsewhere is rounding off itself, and moves a value now and then to the next step. */
    if (r.near < r.different)
        return AR_OK;
    ari_text t = ari_find(f, ARI_IDENTITY + 3);
    snprintf(f->value, sizeof f->value, "each of %s precision", format_name(w, kept));
    ari_say(&t, "%s: every different value has a mantissa of %d bits and is within one step of the reference; ",
            format_name(w, kept), kept);
    if (r.cut * 10 >= r.different * 9 && r.cut > r.nearest)
        ari_say(&t, "%zu of %zu are the reference truncated (cut off, not rounded) to %s", r.cut, r.different,
                format_name(w, kept));
    else if (r.nearest * 2 >= r.different)
        ari_say(&t, "%zu of %zu are exactly the reference rounded to %s", r.nearest, r.different, format_name(w, kept));
    else
        ari_say(&t, "%zu of %zu are the reference rounded: the values were computed in it too", r.nearest, r.different);
    ari_say(&t, "; stored or sent in %d bits on the way", kept < 4 ? 8 : 16);
    return AR_OK;
}

/* --- functions ---------------------------------------------------------------------------------------------------- */

typedef struct bounds {
    double low, high;         /* of the other's values */
    double ref_low, ref_high; /* of the reference's */
    size_t at_low, at_high, different, lost_sign, negative;
} bounds;

static bounds bounds_of(const ari_whole *w)
{
    bounds b = {INFINITY, -INFINITY, INFINITY, -INFINITY, 0, 0, 0, 0, 0};
    for (size_t i = 0; i < w->count; i++) {
        const double v = (double)w->val[i], r = (double)w->ref[i];
        b.low = fmin(b.low, v);
        b.high = fmax(b.high, v);
        b.ref_low = fmin(b.ref_low, r);
        b.ref_high = fmax(b.ref_high, r);
    }
    for (size_t i = 0; i < w->count; i++) {
        const double v = (double)w->val[i], r = (double)w->ref[i];
        if (!ari_off(w, i))
            continue;
        b.different++;
        b.at_low += v == b.low && r < v;
        b.at_high += v == b.high && r > v;
        b.negative += r < 0.0;
        b.lost_sign += r < 0.0 && ari_holds(w, w->val[i], -r);
    }
    return b;
}

static bool clamps(const ari_whole *w, const bounds *b)
{
    return b->different >= 4 && b->low < b->high && b->at_low + b->at_high == b->different &&
           (b->low > b->ref_low + w->absolute || b->high < b->ref_high - w->absolute);
}

/* Whether all different values of [from, to) are multiples of a step, and within one of the reference. */
static bool is_grid(const ari_whole *w, size_t from, size_t to, double step)
{
    size_t several = 0; /* of zeros alone any step is one */
    for (size_t i = from; i < to; i++) {
        const double v = (double)w->val[i];
        if (!ari_off(w, i))
            continue;
        several += fabs(v) > 0.5 * step;
        if (!(fabs(v - nearbyint(v / step) * step) <= 1e-4 * step) || fabs(v - (double)w->ref[i]) > 1.01 * step)
            return false;
    }
    return several >= 4;
}

/* The step of a grid of at most 256 steps that all different values of [from, to) lie on; 0 if there is none: the
 * smallest value, or what signed integers of 8 and 4 bits make of the largest. */
static double grid_step(const ari_whole *w, size_t from, size_t to, size_t *n)
{
    double least = INFINITY, largest = 0.0;
    for (size_t i = from; i < to; i++) {
        const double v = fabs((double)w->val[i]);
        largest = fmax(largest, v); /* itself a multiple, and often right */
        if (!ari_off(w, i) || v == 0.0)
            continue;
        (*n)++;
        least = fmin(least, v);
    }
    const double steps[] = {largest / 127.0, largest / 128.0, largest / 7.0, largest / 8.0, least};
    for (size_t k = 0; k < sizeof steps / sizeof *steps && isfinite(largest); k++) {
        if (steps[k] > 0.0 && largest <= 256.0 * steps[k] && is_grid(w, from, to, steps[k]))
            return steps[k];
    }
    return 0.0;
}

static void seek_grid(ari_clue *f, const ari_whole *w)
{
    const size_t cols = w->view.grid.cols;
    size_t n = 0, rows = 0;
    const double step = grid_step(w, 0, w->count, &n);
    if (step > 4.0 * w->absolute && n >= 64) {
        ari_text t = ari_find(f, ARI_TRACE + 4);
        snprintf(f->value, sizeof f->value, "each a multiple of %.6g", step);
        ari_say(&t,
                "quantised: every different value is a multiple of %.6g and within one step of the reference (%.0f "
                "steps to the largest): an integer format with one scale",
                step, w->max_ref / step);
        return;
    }
    for (size_t row = 0; row * cols < w->count; row++) {
        size_t own = 0;
        const double of_row = grid_step(w, row * cols, (row + 1) * cols, &own);
        if (own > 0 && !(of_row > 2.0 * w->absolute && own >= 12))
            return;
        rows += own > 0;
    }
    if (rows < 2)
        return;
    ari_text t = ari_find(f, ARI_TRACE + 4);
    ari_say(&t,
            "quantised: in each of %zu rows every different value is a multiple of one step of that row's and within "
            "one step of the reference: an integer format with a scale for each row",
            rows);
}

/* Whether all values are 0 or 1, and each the other one of the reference's. */
static bool is_inverted(const ari_whole *w)
{
    size_t ones = 0;
    for (size_t i = 0; i < w->count; i++) {
        const float r = w->ref[i];
        if ((r != 0.0f && r != 1.0f) || w->val[i] != 1.0f - r)
            return false;
        ones += r == 1.0f;
    }
    return ones > 0 && ones < w->count;
}

ar_status ari_seek_function(ari_clue *f, const ari_whole *w)
{
    const bounds b = bounds_of(w);
    if (w->view.survey.total.nan > 0 || b.different < 4 || w->count < 8)
        return AR_OK;
    if (is_inverted(w)) {
        ari_text t = ari_find(f, ARI_IDENTITY + 9);
        snprintf(f->value, sizeof f->value, "each 1 for 0 and 0 for 1");
        ari_say(&t, "inverted: every 1 is a 0 here and every 0 a 1: a mask of what is kept against one of what is left "
                    "out");
        return AR_OK;
    }
    if (b.lost_sign == b.different) {
        ari_text t = ari_find(f, ARI_IDENTITY + 6);
        snprintf(f->value, sizeof f->value, "each the negative of the reference");
        ari_say(
            &t,
            "the sign is flipped in %zu elements, all of them negative in the reference: the absolute value was taken",
            b.different);
        return AR_OK;
    }
    if (clamps(w, &b)) {
        const bool relu = b.low == 0.0 && b.at_low == b.different;
        ari_text t = ari_find(f, ARI_IDENTITY + 4);
        snprintf(f->value, sizeof f->value, relu ? "each zero where the reference is negative" : "each at a bound");
        if (relu)
            ari_say(&t,
                    "clipped: all %zu different elements are negative in the reference and zero here (a ReLU, or an "
                    "unsigned format)",
                    b.different);
        else
            ari_say(&t,
                    "clipped: all %zu different elements lie outside [%.6g, %.6g] in the reference and on that bound "
                    "here (a clamp, or the largest value of a format)",
                    b.different, b.low, b.high);
        return AR_OK;
    }
    seek_grid(f, w);
    return AR_OK;
}

/* --- zero --------------------------------------------------------------------------------------------------------- */

/* Of n = 2 .. shards along a dimension each has zeros from the same place on, and only there; that place. */
static size_t cut_of_shards(const ari_whole *w, int dim, size_t n)
{
    const size_t *hits = w->view.survey.hits[dim], size = w->view.grid.shape[dim] / n;
    size_t cut = 0;
    while (cut < size && hits[cut] == 0)
        cut++;
    if (cut == 0 || cut == size)
        return 0;
    for (size_t i = 0; i < n * size; i++) {
        if ((hits[i] > 0) != (i % size >= cut))
            return 0;
    }
    return cut;
}

static bool seek_cut_shards(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    for (int dim = g->nd - 1; dim >= 0; dim--) {
        for (size_t n = 2; n <= ARI_MOST_RANKS && n * 2 <= g->shape[dim]; n++) {
            const size_t size = g->shape[dim] / n, cut = g->shape[dim] % n == 0 ? cut_of_shards(w, dim, n) : 0;
            if (cut == 0)
                continue;
            ari_text t = ari_find(f, ARI_TRACE + 4);
            snprintf(f->value, sizeof f->value, "each zero where the reference is not");
            ari_say(&t, "%s of each of %zu shards only the first %zu of %zu %s are there, the rest is zero",
                    ari_has_heads(w, dim) ? "heads:" : "shards:", n, cut, size, ari_axis_name(w, dim, true));
            ari_say(&t,
                    size % cut == 0 && size / cut == n
                        ? "; that is 1/%zu for %zu shards: the local count was divided by the number of ranks twice"
                        : "; the rest was left out of the loop, or a size was rounded down",
                    n, n);
            return true;
        }
    }
    return false;
}

ar_status ari_seek_zero(ari_clue *f, const ari_whole *w)
{
    const ari_survey *s = &w->view.survey;
    size_t covered = 1;
    if (s->total.zero < s->total.different || s->total.different < 2 || s->total.kept == 0 || seek_cut_shards(f, w))
        return AR_OK;
    for (int dim = 0; dim < w->view.grid.nd; dim++) {
        size_t from, to;
        ari_hull(w, dim, &from, &to);
        if (s->hit[dim] * 10 < (to - from) * 9)
            return AR_OK;
        covered *= to - from;
    }
    if (covered == w->count || s->total.different * 4 < covered)
        return AR_OK;
    ari_text t = ari_find(f, ARI_TRACE + 3);
    snprintf(f->value, sizeof f->value, "each zero where the reference is not");
    ari_say(&t, "a block of zeros: all %zu different elements are zero here and make up one block, the rest is right",
            s->total.different);
    ari_say_part(&t, w);
    ari_say(&t, "; that part was never written, not gathered or left out of a loop (a size rounded down)");
    return AR_OK;
}
