/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "ref/core/float_bits.h"
#include "ref/core/tensor_private.h"
#include "ref/io/file.h"
#include "ref/io/safetensors_private.h"
#include "verify/compare/verify_impl.h"

/* --- values ------------------------------------------------------------------------------------------------------- */

ari_format ari_format_of(ar_dtype t)
{
    static const struct {
        ar_dtype dtype;
        int mantissa, min_exponent;
        uint64_t finite;
        bool has_inf, is_unsigned;
    } floats[] = {
        {AR_F64, 52, -1022, 0x7fefffffffffffffu, true, false},
        {AR_F32, 23, -126, 0x7f7fffffu, true, false},
        {AR_F16, 10, -14, 0x7bffu, true, false},
        {AR_BF16, 7, -126, 0x7f7fu, true, false},
        {AR_F8_E5M2, 2, -14, 0x7bu, true, false},
        {AR_F8_E4M3, 3, -6, 0x7eu, false, false},
        {AR_F8_E8M0, 0, -127, 0xfeu, false, true},
        {AR_F6_E2M3, 3, 0, 0x1fu, false, false}, /* all bit patterns are numbers */
        {AR_F6_E3M2, 2, -2, 0x1fu, false, false},
        {AR_F4, 1, 0, 0x7u, false, false},
    };
    ari_format f = {.dtype = t, .bits = ari_dtype_bits(t), .parts = 1};
    if (t == AR_C64)
        f = (ari_format){.dtype = AR_F32, .bits = 32, .parts = 2};
    f.is_signed = f.dtype == AR_I8 || f.dtype == AR_I16 || f.dtype == AR_I32 || f.dtype == AR_I64;
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        if (floats[i].dtype != f.dtype)
            continue;
        f.is_float = true;
        f.is_signed = !floats[i].is_unsigned;
        f.mantissa = floats[i].mantissa;
        f.min_exponent = floats[i].min_exponent;
        f.finite = floats[i].finite;
        f.has_inf = floats[i].has_inf;
    }
    return f;
}

/* --- reading ------------------------------------------------------------------------------------------------------ */

size_t ari_raw_bytes(const ari_format *f, size_t n)
{
    return f->bits < 8 ? n : n * (f->bits / 8);
}

/* Unpacks 4-bit or 6-bit numbers, which are contiguous, starting with the lowest bits of each byte. */
static void unpack(unsigned char *dst, const unsigned char *src, const ari_format *f, size_t start, size_t n)
{
    const unsigned mask = (1u << f->bits) - 1u;
    for (size_t i = 0; i < n; i++) {
        const size_t bit = (start + i) * f->bits;
        unsigned byte = (unsigned)src[bit / 8] >> bit % 8;
        if (bit % 8 + f->bits > 8)
            byte |= (unsigned)src[bit / 8 + 1] << (8 - bit % 8);
        dst[i] = (unsigned char)(byte & mask);
    }
}

ar_status ari_chunk_raw(ari_chunk *c, const ar_dump_tensor *t, const ari_format *f, size_t start, size_t n)
{
    if (f->bits < 8) {
        if (!t->whole)
            return ar_error_set(AR_ERR_DTYPE, "%s: parts of dtype %s, several numbers a byte, are not put together",
                                ARI_SHOW(t->name), ar_dtype_name(t->dtype));
        unpack(c->space, t->whole, f, start, n);
        c->raw = c->space;
        return AR_OK;
    }
    if (t->whole) {
        c->raw = (const unsigned char *)t->whole + start * (f->bits / 8);
        return AR_OK;
    }
    c->raw = c->space;
    return ar_dump_read(t, start / f->parts, n / f->parts, c->space);
}

/* Decodes a small float: sign, exponent, mantissa; exponent 0 is subnormal. */
static double decode_small(const ari_format *f, unsigned u)
{
    const unsigned sign = u >> (f->bits - 1), magnitude = u & ((1u << (f->bits - 1)) - 1u);
    const unsigned exponent = magnitude >> f->mantissa, fraction = magnitude & ((1u << f->mantissa) - 1u);
    const unsigned significand = exponent ? fraction + (1u << f->mantissa) : fraction;
    const double x = ldexp((double)significand, f->min_exponent + (exponent ? (int)exponent - 1 : 0) - f->mantissa);
    return sign ? -x : x;
}

/* Fills chunk->value from chunk->raw. */
static ar_status chunk_values(ari_chunk *c, const ari_format *f, size_t n)
{
    if (f->bits >= 8)
        return ari_values_to_f64(f->dtype, c->raw, n, c->value);
    for (size_t i = 0; i < n; i++)
        c->value[i] = decode_small(f, c->raw[i]);
    return AR_OK;
}

/* Releases pages of a large tensor. A call costs as much as reading about ten KiB, so pages of small tensors are left
 * to the system. */
static void drop_pages(const void *data, size_t bytes)
{
    enum { LEAST = 1 << 16 };
    if (bytes >= LEAST)
        ari_pages_drop(data, bytes);
}

void ari_release(const ar_dump_tensor *t, const ari_format *f, size_t start, size_t n)
{
    if (t->whole) {
        const ar_st_entry *e = t->parts > 0 ? t->part[0].entry : NULL;
        const size_t offset = start * f->bits / 8;
        if (e && e->mapped && e->data == t->whole)
            drop_pages((const char *)t->whole + offset, (start + n) * f->bits / 8 - offset);
        return;
    }
    /* the parts of a combined tensor are read in scattered order, so they are released when the tensor is done */
    for (size_t i = 0; i < t->parts && start + n == t->count * f->parts; i++) {
        if (t->part[i].entry && t->part[i].entry->mapped)
            drop_pages(t->part[i].entry->data, t->part[i].entry->bytes);
    }
}

/* --- bits --------------------------------------------------------------------------------------------------------- */

#define COUNT_SPECIAL(type)                                           \
    for (size_t i = 0; i < n; i++) {                                  \
        type u;                                                       \
        memcpy(&u, raw + i * sizeof u, sizeof u);                     \
        u = (type)(u & (type)mask);                                   \
        above += (type)(u > (type)last);                              \
        infinite += (type)(u == (type)(f->finite + 1) && f->has_inf); \
    }

void ari_count_special(const ari_format *f, const unsigned char *raw, size_t n, size_t *nan, size_t *inf)
{
    const size_t width = f->bits < 8 ? 8 : f->bits;
    const uint64_t mask = f->is_signed ? ((uint64_t)1 << (f->bits - 1)) - 1 : UINT64_MAX;
    const uint64_t last = f->finite + f->has_inf;
    size_t above = 0, infinite = 0;
    if (!f->is_float || f->bits < 8)
        return;
    if (width == 8)
        COUNT_SPECIAL(uint8_t)
    else if (width == 16)
        COUNT_SPECIAL(uint16_t)
    else if (width == 32)
        COUNT_SPECIAL(uint32_t)
    else
        COUNT_SPECIAL(uint64_t)
    *nan += above;
    *inf += infinite;
}

/* Computes keys in the order of the numbers: negative floats descend, with -0 directly below +0; integers are shifted
 * by half their range. The bits to flip are selected before the loop over all elements. */
#define FILL_STEPS(type)                                                                        \
    {                                                                                           \
        const int top = (int)f->bits - 1;                                                       \
        const type sign = (type)(f->is_signed ? (type)1 << top : 0);                            \
        const type below = (type)(f->is_signed && f->is_float ? sign - 1 : 0);                  \
        for (size_t i = 0; i < n; i++) {                                                        \
            type u, v;                                                                          \
            memcpy(&u, a + i * sizeof u, sizeof u);                                             \
            memcpy(&v, b + i * sizeof v, sizeof v);                                             \
            const type x = (type)(u ^ sign ^ (type)((type)(0 - (type)(u >> top & 1)) & below)); \
            const type y = (type)(v ^ sign ^ (type)((type)(0 - (type)(v >> top & 1)) & below)); \
            steps[i] = x > y ? (type)(x - y) : (type)(y - x);                                   \
        }                                                                                       \
    }

/* steps[i]: the number of representable values from one number to the other; 0 for equal bits. */
ARI_SIMD static void ari_steps(uint64_t *steps, const ari_format *f, const unsigned char *a, const unsigned char *b,
                               size_t n)
{
    if (f->bits <= 8)
        FILL_STEPS(uint8_t)
    else if (f->bits == 16)
        FILL_STEPS(uint16_t)
    else if (f->bits == 32)
        FILL_STEPS(uint32_t)
    else
        FILL_STEPS(uint64_t)
}

/* The number of the format's numbers between 0 and |x|, rounded to the nearest. */
static double rank_of(const ari_format *f, double x)
{
    int e = 0;
    if (isinf(x))
        return (double)(f->finite + 1);
    (void)frexp(x, &e); /* x = m * 2^e with m in [1/2, 1) */
    e = x == 0.0 || e - 1 < f->min_exponent ? f->min_exponent : e - 1;
    return nearbyint(ldexp(fabs(x), f->mantissa - e)) + ldexp((double)(e - f->min_exponent), f->mantissa);
}

static uint64_t whole_steps(double x)
{
    return x < 0x1p63 ? (uint64_t)x : (uint64_t)1 << 63;
}

/* Returns the same for two values, the second of which is rounded to this format; not for NaN. */
static uint64_t steps_between(const ari_format *f, double a, double b)
{
    if (!f->is_float)
        return whole_steps(nearbyint(fabs(b - a)));
    const double x = rank_of(f, a), y = rank_of(f, b);
    return whole_steps(signbit(a) == signbit(b) ? fabs(x - y) : x + y);
}

/* a 64-bit significand represents every 64-bit integer */
static long double integer_at(const ari_format *f, const unsigned char *raw, size_t i)
{
    uint64_t u = 0;
    memcpy(&u, raw + i * (f->bits / 8), f->bits / 8); /* little-endian */
    if (f->dtype == AR_BOOL)
        return u ? 1.0L : 0.0L;
    if (f->is_signed && f->bits < 64 && u >> (f->bits - 1))
        u |= UINT64_MAX << f->bits;
    return f->is_signed ? (long double)(int64_t)u : (long double)u;
}

double ari_exact_difference(const ari_format *fa, const unsigned char *a, const ari_format *fb, const unsigned char *b,
                            size_t i)
{
    const long double d = integer_at(fb, b, i) - integer_at(fa, a, i);
    return (double)(d < 0 ? -d : d);
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

static void scaled_add(ari_scaled *total, ari_scaled s)
{
    if (s.sum == 0.0)
        return;
    if (total->sum == 0.0) {
        *total = s;
        return;
    }
    const int max_exponent = total->exponent > s.exponent ? total->exponent : s.exponent;
    total->sum = ldexp(total->sum, total->exponent - max_exponent) + ldexp(s.sum, s.exponent - max_exponent);
    total->exponent = max_exponent;
}

void ari_scaled_sums_add(ari_scaled_sums *total, const ari_scaled_sums *s)
{
    scaled_add(&total->aa, s->aa);
    scaled_add(&total->bb, s->bb);
    scaled_add(&total->ab, s->ab);
    scaled_add(&total->dd, s->dd);
}

/* Numbers are processed in blocks that fit in the L1 cache, with LANES independent partial results in a fixed order.
 * The last block is padded with zeros. */
enum { BLOCK = 1024, LANES = 8 };

/* Returns the larger of two magnitudes as integers, which have the order of the numbers, so that loops vectorise. */
static inline int64_t larger_bits(int64_t max_bits, double magnitude)
{
    const int64_t bits = (int64_t)ari_bits64(magnitude);
    return bits > max_bits ? bits : max_bits;
}

static double magnitude_of(int64_t bits)
{
    return ari_float64((uint64_t)bits);
}

/* Returns the bits of the largest |x|. They are at or above those of infinity if a value is not finite. */
ARI_SIMD static int64_t largest_bits(const double *x, size_t n)
{
    int64_t max_bits = 0;
    for (size_t i = 0; i < n; i++)
        max_bits = larger_bits(max_bits, fabs(x[i]));
    return max_bits;
}

/* Returns the exponent of the power of two that scales `largest` below 1 and is itself a normal number. */
static int exponent_of(double largest)
{
    int e = 0;
    (void)frexp(largest, &e);
    return e > 1000 ? 1000 : e < -1000 ? -1000 : e;
}

ARI_SIMD static double product(const double *x, double sx, const double *y, double sy, size_t n)
{
    double part[LANES] = {0.0};
    for (size_t i = 0; i < n; i += LANES) {
        for (size_t k = 0; k < LANES; k++)
            part[k] += (x[i + k] * sx) * (y[i + k] * sy);
    }
    for (size_t k = LANES / 2; k > 0; k /= 2)
        for (size_t l = 0; l < k; l++)
            part[l] += part[l + k];
    return part[0];
}

static ari_scaled scaled_product(const double *x, int ex, const double *y, int ey, size_t n)
{
    return (ari_scaled){product(x, ldexp(1.0, -ex), y, ldexp(1.0, -ey), n), ex + ey};
}

#define INFINITE_BITS INT64_C(0x7ff0000000000000)

/* Sets both elements to zero if one of them is not finite, so that they do not contribute to sums. Returns the number
 * of remaining elements. */
static size_t drop_infinite(double *a, double *b, size_t n)
{
    size_t finite = 0;
    for (size_t i = 0; i < n; i++) {
        if (isfinite(a[i]) && isfinite(b[i]))
            finite++;
        else
            a[i] = b[i] = 0.0;
    }
    return finite;
}

/* --- tallies ------------------------------------------------------------------------------------------------------ */

void ari_deviation_init(ari_deviation *t)
{
    *t = (ari_deviation){.first_element.index = SIZE_MAX, .worst.index = SIZE_MAX, .worst_ratio = -1.0};
}

static double larger(double a, double b)
{
    return a > b ? a : b;
}

static bool is_worse(const ari_deviation *t, double ratio, double difference, size_t index)
{
    if (ratio != t->worst_ratio)
        return ratio > t->worst_ratio;
    if (difference != t->worst_difference)
        return difference > t->worst_difference;
    return index < t->worst.index;
}

void ari_deviation_add(ari_deviation *total, const ari_deviation *t)
{
    total->different += t->different;
    total->bits_different += t->bits_different;
    total->doubted += t->doubted;
    total->finite += t->finite;
    for (int s = 0; s < 2; s++) {
        total->nan[s] += t->nan[s];
        total->inf[s] += t->inf[s];
    }
    total->max_abs = larger(total->max_abs, t->max_abs);
    total->max_rel = larger(total->max_rel, t->max_rel);
    total->max_reference = larger(total->max_reference, t->max_reference);
    total->from_zero = total->from_zero || t->from_zero;
    total->max_ulp = total->max_ulp > t->max_ulp ? total->max_ulp : t->max_ulp;
    for (size_t k = 0; k < AR_VERIFY_ULP_BINS; k++)
        total->ulp_bins[k] += t->ulp_bins[k];
    if (t->first_element.index < total->first_element.index)
        total->first_element = t->first_element;
    if (t->worst.index != SIZE_MAX && is_worse(total, t->worst_ratio, t->worst_difference, t->worst.index)) {
        total->worst = t->worst;
        total->worst_ratio = t->worst_ratio;
        total->worst_difference = t->worst_difference;
        total->allowed = t->allowed;
    }
}

/* --- one element -------------------------------------------------------------------------------------------------- */

/* Returns the bin of a distance in ulps: 0, 1, 2..3, 4..7 and so on. The last bin but one holds all larger distances,
 * the last one pairs with NaN on one side. */
static size_t bin_of(uint64_t steps)
{
    const size_t k = steps ? (size_t)(64 - __builtin_clzll(steps)) : 0;
    return k < AR_VERIFY_ULP_BINS - 2 ? k : AR_VERIFY_ULP_BINS - 2;
}

typedef struct judged {
    bool different, doubted;
    double allowed, ratio;
} judged;

/* Returns |difference| divided by the allowed difference; 0/0 is 0. */
static double ratio_over(double difference, double allowed)
{
    return difference == 0.0 ? 0.0 : isinf(difference) ? (double)INFINITY : difference / allowed;
}

/* Returns the distance from |x| to the next larger magnitude. */
static double spacing_of(const ari_format *f, double x)
{
    int e = 0;
    if (!f->is_float)
        return 1.0;
    (void)frexp(x, &e);
    return ldexp(1.0, (x == 0.0 || !isfinite(x) || e - 1 < f->min_exponent ? f->min_exponent : e - 1) - f->mantissa);
}

/* Judges a pair of values. `difference` is NaN if one value is NaN, or if both are and that counts as a difference.
 * `extra` is the allowance in addition to the tolerance. */
static judged judge(const ari_pair *p, double a, double difference, uint64_t steps, double extra)
{
    const ari_rule *r = &p->rule;
    judged j = {0};
    if (isnan(a) && difference == 0.0 && r->rule != AR_VERIFY_BITS)
        return j; /* NaN on both sides, whatever their payloads */
    if (r->rule == AR_VERIFY_BITS) {
        j.different = steps != 0 || difference != 0.0;
        j.ratio = j.different ? (double)INFINITY : 0.0;
    } else if (r->rule == AR_VERIFY_ULP) {
        j.different = isnan(difference) || steps > r->ulp;
        j.allowed = (double)r->ulp * spacing_of(&p->format[0], a);
        j.ratio = isnan(difference) ? (double)INFINITY : ratio_over((double)steps, (double)r->ulp);
    } else {
        const double plain = isfinite(a) ? r->atol + r->rtol * fabs(a) : 0.0;
        j.allowed = plain + extra;
        j.doubted = difference > plain && difference <= j.allowed;
        j.ratio = isnan(difference) ? (double)INFINITY : ratio_over(difference, j.allowed);
        j.different = !(difference <= j.allowed);
    }
    return j;
}

typedef struct element {
    ar_verify_element entry;
    double difference; /* |b - a|; NaN if one of them is NaN */
    uint64_t steps;
    double extra;
} element;

/* Returns what the map shows. */
static double take_element(const ari_pair *p, ari_deviation *t, const element *e)
{
    const double a = e->entry.value[0], b = e->entry.value[1];
    const judged j = judge(p, a, e->difference, e->steps, e->extra);
    const double difference = isnan(e->difference) ? (double)INFINITY : e->difference;
    t->bits_different += e->steps != 0 || (p->format[0].dtype != p->format[1].dtype && difference != 0.0);
    if (isnan(a) != isnan(b)) {
        t->ulp_bins[AR_VERIFY_ULP_BINS - 1]++;
    } else if (isnan(a)) {
        t->ulp_bins[0]++;
    } else {
        t->ulp_bins[bin_of(e->steps)]++;
        t->max_ulp = e->steps > t->max_ulp ? e->steps : t->max_ulp;
    }
    if (isfinite(a) && isfinite(b)) {
        t->max_abs = larger(t->max_abs, difference);
        if (a != 0.0)
            t->max_rel = larger(t->max_rel, difference / fabs(a));
        else
            t->from_zero = t->from_zero || difference != 0.0;
    }
    t->doubted += j.doubted;
    if (j.different) {
        t->different++;
        if (e->entry.index < t->first_element.index)
            t->first_element = e->entry;
    }
    if ((j.different || e->steps != 0 || difference != 0.0) && is_worse(t, j.ratio, difference, e->entry.index)) {
        t->worst = e->entry;
        t->worst_ratio = j.ratio;
        t->worst_difference = difference;
        t->allowed = j.allowed;
    }
    return p->rule.rule == AR_VERIFY_BITS || j.ratio == 0.0 ? difference : j.ratio;
}

bool ari_elements_differ(const ari_pair *p, const ari_format *f, const void *a, const void *b)
{
    bool differ = false;
    for (size_t k = 0; k < f->parts && !differ; k++) {
        const unsigned char *u = (const unsigned char *)a + k * (f->bits / 8);
        const unsigned char *v = (const unsigned char *)b + k * (f->bits / 8);
        double x, y;
        uint64_t steps = 0;
        if (ari_values_to_f64(f->dtype, u, 1, &x) != AR_OK || ari_values_to_f64(f->dtype, v, 1, &y) != AR_OK)
            return true;
        ari_steps(&steps, f, u, v, 1);
        const bool is_nan_pair = isnan(x) && isnan(y);
        const double difference = f->is_float ? (x == y ? 0.0 : fabs(y - x)) : ari_exact_difference(f, u, f, v, 0);
        differ =
            judge(p, x, is_nan_pair ? (p->rule.nan_differs ? (double)NAN : 0.0) : difference, steps, 0.0).different;
    }
    return differ;
}

/* --- a chunk ------------------------------------------------------------------------------------------------------ */

static bool is_integer(const ari_format *f)
{
    return !f->is_float;
}

/* The distance of number i, once the cheap answers are no. */
static element element_at(const ari_pair *p, const ari_scratch *s, size_t i, size_t index)
{
    const ari_format *f = p->format;
    element e = {.entry = {index, {s->side[0].value[i], s->side[1].value[i]}}, .extra = p->doubt ? s->extra[i] : 0.0};
    const double a = e.entry.value[0], b = e.entry.value[1];
    const bool same_format = f[0].dtype == f[1].dtype;
    if (isnan(a) && isnan(b)) {
        e.steps = same_format ? s->steps[i] : 0;
        e.difference = p->rule.nan_differs ? (double)NAN : 0.0;
        return e;
    }
    if (isnan(a) || isnan(b)) {
        e.difference = (double)NAN;
        e.steps = 1; /* only known not to be 0 */
        return e;
    }
    if (is_integer(&f[0]) && is_integer(&f[1])) {
        e.difference = ari_exact_difference(&f[0], s->side[0].raw, &f[1], s->side[1].raw, i);
    } else {
        e.difference = a == b ? 0.0 : fabs(b - a);
    }
    e.steps = same_format ? s->steps[i] : steps_between(&f[0], a, b);
    return e;
}

/* Processes each element separately. */
static void take_each(const ari_pair *p, const ari_scratch *s, size_t start, size_t n, ari_deviation *tally)
{
    const bool skip_equal = p->format[0].dtype == p->format[1].dtype && !p->rule.nan_differs;
    for (size_t i = 0; i < n; i++) {
        if (skip_equal && s->steps[i] == 0) {
            tally->ulp_bins[0]++;
            s->difference[i] = s->shown[i] = 0.0;
            continue;
        }
        const element e = element_at(p, s, i, start + i);
        s->shown[i] = take_element(p, tally, &e);
        s->difference[i] = e.difference;
    }
}

/* --- a block of finite floats ------------------------------------------------------------------------------------- */

/* Counts over numbers of one format that are all finite: everything except the indices. */
typedef struct block_tally {
    double difference, ratio; /* the largest difference and ratio */
    bool from_zero;
    size_t different, doubted; /* doubted: elements that differ only within the additional allowance */
    uint64_t steps;
} block_tally;

ARI_SIMD static void tally_differences(block_tally *t, double *difference, const double *a, const double *b, size_t n)
{
    int64_t max_bits = 0, zero = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = fabs(b[i] - a[i]);
        difference[i] = d;
        max_bits = larger_bits(max_bits, d);
        zero = larger_bits(zero, a[i] == 0.0 ? d : 0.0);
    }
    t->difference = magnitude_of(max_bits);
    t->from_zero = zero > 0;
}

/* Products of numbers of this size may be rounded by more than their last bits. */
static const double TINY = 0x1p-900;

/* Returns the largest relative difference if it exceeds `current_max`, otherwise some smaller value. Most blocks need
 * only multiplications for that. */
ARI_SIMD static double largest_part(const double *difference, const double *a, size_t n, double current_max)
{
    const double threshold = current_max * (1.0 - 0x1p-48); /* a rounded product below this threshold implies a ratio
                                                               below the maximum */
    int64_t max_bits = 0;
    size_t above = 0;
    for (size_t i = 0; i < n; i++)
        above += difference[i] > threshold * fabs(a[i]) || (a[i] != 0.0 && fabs(a[i]) < TINY && difference[i] > 0.0);
    for (size_t i = 0; above > 0 && i < n; i++)
        max_bits = larger_bits(max_bits, a[i] == 0.0 ? 0.0 : difference[i] / fabs(a[i]));
    return magnitude_of(max_bits);
}

/* extra: additional allowance; NULL: none. */
ARI_SIMD static void tally_tolerance(block_tally *t, double *shown, const double *a, const double *difference,
                                     const double *extra, size_t n, double rtol, double atol)
{
    int64_t max_bits = 0;
    size_t different = 0, above = 0;
    for (size_t i = 0; i < n; i++) {
        const double d = difference[i], plain = atol + rtol * fabs(a[i]), allowed = plain + (extra ? extra[i] : 0.0);
        const double ratio = d / (d == 0.0 ? 1.0 : allowed);
        shown[i] = ratio == 0.0 ? d : ratio;
        max_bits = larger_bits(max_bits, ratio);
        different += d > allowed;
        above += d > plain;
    }
    t->ratio = magnitude_of(max_bits);
    t->different = different;
    t->doubted = above - different;
}

/* ratios, from the steps. */
ARI_SIMD static void tally_ulp(block_tally *t, double *shown, const uint64_t *steps, const double *difference, size_t n,
                               uint64_t ulp)
{
    int64_t max_bits = 0;
    size_t different = 0;
    for (size_t i = 0; i < n; i++) {
        const double ratio = (double)steps[i] / (steps[i] == 0 ? 1.0 : (double)ulp);
        shown[i] = ratio == 0.0 ? difference[i] : ratio;
        max_bits = larger_bits(max_bits, ratio);
        different += steps[i] > ulp;
    }
    t->ratio = magnitude_of(max_bits);
    t->different = different;
}

/* Returns the largest difference among elements with the largest ratio. */
ARI_SIMD static double worst_difference(const double *shown, double ratio, const double *difference, size_t n)
{
    int64_t max_bits = 0;
    for (size_t i = 0; i < n; i++)
        max_bits = larger_bits(max_bits, shown[i] == ratio ? difference[i] : 0.0);
    return magnitude_of(max_bits);
}

ARI_SIMD static uint64_t most_steps(const uint64_t *steps, size_t n)
{
    uint64_t max_steps = 0;
    for (size_t i = 0; i < n; i++)
        max_steps = steps[i] > max_steps ? steps[i] : max_steps;
    return max_steps;
}

ARI_SIMD static size_t count_from(const uint64_t *steps, size_t n, uint64_t min_steps)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += steps[i] >= min_steps;
    return count;
}

/* Adds the n steps to the bins, and returns how many are not 0. */
static size_t add_bins(uint64_t *bin, const uint64_t *steps, size_t n, uint64_t max_steps)
{
    size_t remaining = n, any = 0;
    for (size_t k = 0;; k++) { /* at the end `remaining` elements have 2^(k - 1) steps or more; for k = 0, any number
                                  of steps */
        const bool is_last = k == AR_VERIFY_ULP_BINS - 2 || max_steps >> k == 0;
        const size_t above = is_last ? 0 : count_from(steps, n, (uint64_t)1 << k);
        bin[k] += remaining - above;
        any = k == 0 ? above : any;
        if (is_last)
            return any;
        remaining = above;
    }
}

static bool has_block_tally(const ari_pair *p)
{
    return p->format[0].dtype == p->format[1].dtype && p->format[0].is_float && !p->rule.nan_differs;
}

/* Processes a block of n finite numbers together. Returns false if the block may contain the first difference or the
 * worst element. */
static bool take_at_once(const ari_pair *p, const ari_scratch *s, size_t n, ari_deviation *tally)
{
    const ari_rule *r = &p->rule;
    const double *a = s->side[0].value;
    block_tally t = {.steps = most_steps(s->steps, n)};
    bool worse = false;
    if (t.steps == 0)
        return false;
    tally_differences(&t, s->difference, a, s->side[1].value, n);
    if (r->rule == AR_VERIFY_BITS) {
        t.different = count_from(s->steps, n, 1);
        memcpy(s->shown, s->difference, n * sizeof *s->shown);
        worse = !isinf(tally->worst_ratio) || t.difference > tally->worst_difference;
    } else {
        if (r->rule == AR_VERIFY_ULP)
            tally_ulp(&t, s->shown, s->steps, s->difference, n, r->ulp);
        else
            tally_tolerance(&t, s->shown, a, s->difference, p->doubt ? s->extra : NULL, n, r->rtol, r->atol);
        worse = t.ratio > tally->worst_ratio ||
                (t.ratio == tally->worst_ratio &&
                 (t.ratio == 0.0 || worst_difference(s->shown, t.ratio, s->difference, n) > tally->worst_difference));
    }
    if (worse || (t.different > 0 && tally->first_element.index == SIZE_MAX))
        return false;
    tally->bits_different += add_bins(tally->ulp_bins, s->steps, n, t.steps);
    tally->different += t.different;
    tally->doubted += t.doubted;
    tally->max_ulp = t.steps > tally->max_ulp ? t.steps : tally->max_ulp;
    tally->max_abs = larger(tally->max_abs, t.difference);
    tally->max_rel = larger(tally->max_rel, largest_part(s->difference, a, n, tally->max_rel));
    tally->from_zero = tally->from_zero || t.from_zero;
    return true;
}

/* --- the map ------------------------------------------------------------------------------------------------------ */

/* Returns the start of cell k when `size` elements are divided into n equal cells: ceil(k*size/n). */
static size_t cell_begin(size_t k, size_t n, size_t size)
{
    return (size_t)(((unsigned long long)k * size + n - 1) / n);
}

static void show(const ari_pair *p, const ari_scratch *s, size_t start, size_t n)
{
    const ar_verify_map *m = &p->row->map;
    const size_t cols = m->matrix_cols;
    size_t offset = 0;
    while (offset < n) {
        const size_t row = (start + offset) / cols, col = (start + offset) % cols;
        float *cells = &s->map[row * m->rows / m->matrix_rows * ARI_MAP_COLS];
        size_t cell = col * m->cols / cols;
        const size_t row_end = offset + (cols - col) < n ? offset + (cols - col) : n;
        while (offset < row_end) {
            const size_t cell_end = offset + (cell_begin(cell + 1, m->cols, cols) - (start + offset) % cols);
            const size_t end = cell_end < row_end ? cell_end : row_end;
            const double max_shown = magnitude_of(largest_bits(s->shown + offset, end - offset));
            const float shown = max_shown > (double)3.4e38f ? (float)INFINITY : (float)max_shown;
            cells[cell] = shown > cells[cell] ? shown : cells[cell];
            offset = end;
            cell++;
        }
    }
}

/* --- a chunk ------------------------------------------------------------------------------------------------------ */

static void add_products(ari_scaled_sums *sums, const ari_scratch *s, size_t n, int64_t a_bits, int64_t b_bits,
                         bool equal)
{
    const double *a = s->side[0].value, *b = s->side[1].value;
    const int ea = exponent_of(magnitude_of(a_bits));
    ari_scaled_sums block_sums = {.aa = scaled_product(a, ea, a, ea, n)};
    if (equal) {
        block_sums.bb = block_sums.ab = block_sums.aa;
    } else {
        const int eb = exponent_of(magnitude_of(b_bits));
        const int ed = exponent_of(magnitude_of(largest_bits(s->difference, n)));
        block_sums.bb = scaled_product(b, eb, b, eb, n);
        block_sums.ab = scaled_product(a, ea, b, eb, n);
        block_sums.dd = scaled_product(s->difference, ed, s->difference, ed, n);
    }
    ari_scaled_sums_add(sums, &block_sums);
}

static void fill_up(double *x, size_t n, size_t full)
{
    for (; n < full; n++)
        x[n] = 0.0;
}

static void count_special(const ari_pair *p, const ari_scratch *s, size_t n, ari_deviation *tally)
{
    for (int k = 0; k < 2; k++)
        ari_count_special(&p->format[k], s->side[k].raw, n, &tally->nan[k], &tally->inf[k]);
}

/* Handles a block with equal bytes on both sides: only the reference's magnitude is needed. */
static ar_status equal_block(const ari_pair *p, ari_scratch *s, size_t n, size_t full, ari_deviation *tally,
                             ari_scaled_sums *sums)
{
    double *a = s->side[0].value;
    AR_TRY(chunk_values(&s->side[0], &p->format[0], n));
    fill_up(a, n, full);
    int64_t max_bits = largest_bits(a, n);
    size_t finite = n;
    if (max_bits >= INFINITE_BITS) {
        count_special(p, s, n, tally);
        finite = drop_infinite(a, a, n);
        max_bits = largest_bits(a, n);
    }
    tally->finite += finite;
    tally->ulp_bins[0] += n;
    tally->max_reference = larger(tally->max_reference, magnitude_of(max_bits));
    add_products(sums, s, full, max_bits, max_bits, true);
    return AR_OK;
}

static ar_status different_block(const ari_pair *p, ari_scratch *s, size_t start, size_t n, size_t full,
                                 ari_deviation *tally, ari_scaled_sums *sums)
{
    double *a = s->side[0].value, *b = s->side[1].value;
    for (int k = 0; k < 2; k++) {
        AR_TRY(chunk_values(&s->side[k], &p->format[k], n));
        fill_up(s->side[k].value, n, full);
    }
    if (p->doubt)
        AR_TRY(ari_uncertainty_read(s->extra, p->doubt, start, n));
    if (p->format[0].dtype == p->format[1].dtype)
        ari_steps(s->steps, &p->format[0], s->side[0].raw, s->side[1].raw, n);
    for (size_t i = n; i < full; i++)
        s->steps[i] = 0;
    int64_t max_bits[2] = {largest_bits(a, n), largest_bits(b, n)};
    const bool all_finite = max_bits[0] < INFINITE_BITS && max_bits[1] < INFINITE_BITS;
    if (!all_finite || !has_block_tally(p) || !take_at_once(p, s, n, tally)) {
        take_each(p, s, start, n, tally);
        fill_up(s->difference, n, full);
    }
    show(p, s, start, n);
    size_t finite = n;
    if (!all_finite) {
        count_special(p, s, n, tally);
        for (size_t i = 0; i < n; i++) {
            if (!isfinite(a[i]) || !isfinite(b[i]))
                s->difference[i] = 0.0;
        }
        finite = drop_infinite(a, b, n);
        max_bits[0] = largest_bits(a, n);
        max_bits[1] = largest_bits(b, n);
    }
    tally->finite += finite;
    tally->max_reference = larger(tally->max_reference, magnitude_of(max_bits[0]));
    add_products(sums, s, full, max_bits[0], max_bits[1], false);
    return AR_OK;
}

ar_status ari_chunk_stats(const ari_pair *p, ari_scratch *s, size_t start, size_t n, ari_deviation *tally,
                          ari_scaled_sums *sums)
{
    ari_scratch block = *s;
    for (int k = 0; k < 2; k++)
        AR_TRY(ari_chunk_raw(&block.side[k], p->side[k], &p->format[k], start, n));
    const bool equal = p->side[0]->dtype == p->side[1]->dtype && !p->rule.nan_differs &&
                       memcmp(block.side[0].raw, block.side[1].raw, ari_raw_bytes(&p->format[0], n)) == 0;
    for (size_t offset = 0; offset < n; offset += BLOCK) {
        const size_t count = n - offset < BLOCK ? n - offset : BLOCK, full = (count + LANES - 1) / LANES * LANES;
        AR_TRY(equal ? equal_block(p, &block, count, full, tally, sums)
                     : different_block(p, &block, start + offset, count, full, tally, sums));
        for (int k = 0; k < 2; k++)
            block.side[k].raw += ari_raw_bytes(&p->format[k], count);
    }
    return AR_OK;
}
