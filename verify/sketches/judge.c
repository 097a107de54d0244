/* SPDX-License-Identifier: Apache-2.0 */
/* Judges whether two sketches are of tensors that are the same by a rule. Properties that a sketch cannot show are not
 * judged, and three standard deviations of an estimate count in favour of "same". */
#include <math.h>
#include <string.h>

#include "verify/sketches/sketches.h"

#define DEVIATIONS 3.0 /* Deviations of an estimate that count as "same". */

bool ari_is_exact(const ar_sketch *a, const ar_sketch *b)
{
    return !ari_format_of(a->dtype).is_float || !ari_format_of(b->dtype).is_float;
}

static bool has_digests(const ar_sketch *a, const ar_sketch *b)
{
    return a->dtype == b->dtype && !a->summed && !b->summed;
}

/* Returns how many elements may differ: those in rows whose digests differ. */
static double elements_that_may_differ(const ar_sketch *a, const ar_sketch_difference *d)
{
    const double total_elements = (double)a->elements;
    return d->rows > 0 ? fmin(total_elements, (double)d->rows * (double)a->row) : total_elements;
}

/* Elements that each differ by at most rtol*|a| + e differ together by at most rtol*|a| + e*sqrt(n) in norm. */
static void set_norm(ari_sketch_allowance *allowed, const ar_sketch *a, const ar_sketch_difference *d)
{
    const double root = sqrt(elements_that_may_differ(a, d));
    const double size = d->norm_a * (1.0 + DEVIATIONS * d->norm_a_error);
    allowed->norm = allowed->rtol * fmin(size, a->max_abs * root) + allowed->atol * root + allowed->excused;
}

/* The root of the sum of squares of a block's buckets. */
static double block_size(const double *bucket, double largest)
{
    double squares = 0.0;
    for (size_t i = 0; i < AR_SKETCH_BUCKETS && largest > 0.0; i++)
        squares += bucket[i] / largest * (bucket[i] / largest);
    return largest * sqrt(squares);
}

/* Returns true if a few elements differ by more than the rule. A bucket sums a 32nd of a block's elements with random
 * signs, and n independent errors of at most e add up to e*sqrt(n). Two elements may share a bucket, however few there
 * are. */
static bool differs_in_bucket(const ari_sketch_allowance *allowed, const ar_sketch *a, const ar_sketch *b,
                              const ar_sketch_difference *d)
{
    const double differing = elements_that_may_differ(a, d);
    for (size_t block = 0; block < a->blocks; block++) {
        const size_t begin = block * a->block, rest = a->elements - begin;
        const double n = fmin((double)(rest < a->block ? rest : a->block), differing);
        const double *x = a->bucket + block * AR_SKETCH_BUCKETS, *y = b->bucket + block * AR_SKETCH_BUCKETS;
        double largest = 0.0, difference = 0.0;
        for (size_t i = 0; i < AR_SKETCH_BUCKETS; i++) {
            largest = fmax(largest, fabs(x[i]));
            difference = fmax(difference, fabs(y[i] - x[i]));
        }
        const double root = n > 1.0 ? sqrt(fmax(2.0, n / AR_SKETCH_BUCKETS)) : 1.0;
        const double size = fmin(block_size(x, largest), 2.0 * a->max_abs * root);
        if (difference > allowed->atol * root + allowed->rtol * size + allowed->excused)
            return true;
    }
    return false;
}

/* Returns true if NaN or infinities are at different elements or have different signs. *why: set if ranks hold
 * summands, so that nothing is known. */
static bool differ_in_places(const char **why, const ar_sketch *a, const ar_sketch *b)
{
    const bool any[] = {a->nan + a->inf > 0, b->nan + b->inf > 0};
    if (!a->summed && !b->summed)
        return a->nan != b->nan || a->inf != b->inf || a->places != b->places;
    if (any[0] && any[1])
        *why = "it has NaN or infinities, whose places in a sum over ranks a sketch does not have";
    return any[0] != any[1];
}

void ari_sketch_judge(bool *differ, const char **why, ari_sketch_allowance *allowed, const ar_sketch *a,
                      const ar_sketch *b, const ar_sketch_difference *d)
{
    const bool exact = ari_is_exact(a, b);
    *why = "";
    if (exact) {
        allowed->atol = 0.0;
        allowed->rtol = 0.0;
    }
    set_norm(allowed, a, d);
    *differ = !d->same_bits && differ_in_places(why, a, b);
    if (d->same_bits || *differ || *why[0] != '\0')
        return;
    if (!isfinite(d->norm) || !isfinite(d->norm_a))
        *why = "its sums are too large for binary64";
    else
        *differ = (exact && has_digests(a, b)) || d->norm * (1.0 - DEVIATIONS * d->norm_error) > allowed->norm ||
                  differs_in_bucket(allowed, a, b, d);
}

bool ari_sketch_factor_differs(const ari_sketch_allowance *allowed, const ar_sketch *a, const ar_sketch_difference *d)
{
    static const double deviations = 8.0, systematic = 64.0 * 0x1p-24, most_rest = 0.25;
    enum { LEAST_ELEMENTS = 16 };
    const double size = d->norm_a * (1.0 - DEVIATIONS * d->norm_a_error);
    if (d->same_bits || a->elements < LEAST_ELEMENTS || ari_is_exact(a, a) || !isfinite(d->factor) || !(size > 0.0) ||
        d->norm_a <= allowed->atol * sqrt((double)a->elements))
        return false;
    const double rest = d->factor_left * d->norm / d->norm_a, peak = size / a->max_abs;
    /* The estimate's error is that of as many sums as there are buckets. */
    const double count = fmin(peak * peak, (double)(a->blocks * AR_SKETCH_BUCKETS));
    const double max_deviation =
        fmax(fmax(deviations * rest / sqrt(count), allowed->roundoff + systematic), allowed->rtol);
    return rest <= most_rest && fabs(d->factor - 1.0) > max_deviation;
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

/* Sums of squares and products of the two runs' steps, over the buckets of some blocks. */
typedef struct steps {
    double aa, ab, bb, dd;
} steps;

static steps steps_of(const ari_sketch_update *u, size_t begin, size_t end)
{
    steps s = {0};
    for (size_t i = begin * AR_SKETCH_BUCKETS; i < end * AR_SKETCH_BUCKETS; i++) {
        const double a = u->after[0]->bucket[i] - u->before[0]->bucket[i],
                     b = u->after[1]->bucket[i] - u->before[1]->bucket[i];
        s.aa += a * a;
        s.ab += a * b;
        s.bb += b * b;
        s.dd += (b - a) * (b - a);
    }
    return s;
}

/* Returns true if b's step is a's times a factor. Signs that rounding flipped are not a factor: they leave a residual
 * larger than what they remove from the factor. */
static bool is_scaled_step(const ari_sketch_update *u)
{
    const steps s = steps_of(u, 0, u->after[0]->blocks);
    const double off = s.aa > 0.0 ? s.ab / s.aa - 1.0 : 0.0;
    const double rest = s.aa > 0.0 ? s.bb / s.aa - (1.0 + off) * (1.0 + off) : 0.0;
    return rest < 0.25 * off * off;
}

/* If an element's gradient is off by a fraction y, the element moves by up to min(2, 2y) of its step. A few tiny
 * elements may be off by their whole size. For the others let d be the norm of the gradients' difference relative to
 * the gradients, and assume elements as dense near zero as at the root mean square. Then the squares of the steps sum
 * up to at most the whole step's square times the mean of min(2, 2d/z)^2 over z, which is 8 d. A gradient that is pure
 * rounding, such as a key bias's, explains everything. */
ar_status ari_sketch_excuse(ari_sketch_allowance *allowed, const ari_sketch_update *u)
{
    static const double most_part = 0.125, most_tiny = 0.125, roundings = 256.0, max_square = 4.0;
    ar_sketch_difference moved;
    const ar_sketch_difference *g = u->gradients;
    const double part = g->norm_a > 0.0 ? g->norm / g->norm_a : g->norm > 0.0 ? (double)INFINITY : 0.0;
    const double root = sqrt((double)u->gradient->elements);
    const bool rounding = g->norm <= roundings * allowed->roundoff * u->largest_gradient * root;
    if (g->same_bits || (part > most_part && !rounding) || is_scaled_step(u))
        return AR_OK;
    AR_TRY(ar_sketch_compare(&moved, u->before[0], u->after[0]));
    const double tiny = fmin((double)u->tiny / (double)u->gradient->elements, most_tiny);
    const double squares = part > most_part ? max_square : fmin(8.0 * part + 4.0 * tiny, max_square);
    allowed->excused += moved.norm * (1.0 + DEVIATIONS * moved.norm_error) * sqrt(squares);
    allowed->excused_blocks = part > most_part ? 1.0 : fmax(allowed->excused_blocks, most_tiny);
    return AR_OK;
}

bool ari_sketch_update_is_lost(const ari_sketch_allowance *allowed, const ari_sketch_update *u)
{
    static const double whole_step = 0.75; /* fraction of a block's squared step; more than an eighth of flipped
                                              signs exceeds it */
    const ar_sketch *a = u->after[0];
    const double plain = allowed->norm - allowed->excused, total_elements = (double)a->elements;
    double elements = 0.0;
    for (size_t block = 0; block < a->blocks; block++) {
        const steps s = steps_of(u, block, block + 1);
        const double n = fmin((double)a->block, total_elements - (double)(block * a->block));
        if (s.dd > whole_step * s.aa && s.dd > plain * plain * n / total_elements)
            elements += n;
    }
    return elements > allowed->excused_blocks * total_elements;
}
