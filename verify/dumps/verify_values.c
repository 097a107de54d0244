/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <string.h>

#include "ref/io/file.h"
#include "verify/dumps/verify_impl.h"

ari_format ari_format_of(ar_dtype t)
{
    static const struct {
        ar_dtype dtype;
        int mantissa, least;
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
        {AR_F6_E2M3, 3, 0, 0x1fu, false, false}, /* all bits are numbers */
        {AR_F6_E3M2, 2, -2, 0x1fu, false, false},
        {AR_F4, 1, 0, 0x7u, false, false},
    };
    ari_format f = {.dtype = t, .bits = ar_dtype_bits(t), .parts = 1};
    if (t == AR_C64)
        f = (ari_format){.dtype = AR_F32, .bits = 32, .parts = 2};
    f.is_signed = f.dtype == AR_I8 || f.dtype == AR_I16 || f.dtype == AR_I32 || f.dtype == AR_I64;
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++) {
        if (floats[i].dtype != f.dtype)
            continue;
        f.is_float = true;
        f.is_signed = !floats[i].is_unsigned;
        f.mantissa = floats[i].mantissa;
        f.least = floats[i].least;
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

/* Numbers of 4 or 6 bits lie one after the other, the lowest bits of a byte first. */
static void unpack(unsigned char *to, const unsigned char *from, const ari_format *f, size_t start, size_t n)
{
    const unsigned mask = (1u << f->bits) - 1u;
    for (size_t i = 0; i < n; i++) {
        const size_t bit = (start + i) * f->bits;
        unsigned byte = (unsigned)from[bit / 8] >> bit % 8;
        if (bit % 8 + f->bits > 8)
            byte |= (unsigned)from[bit / 8 + 1] << (8 - bit % 8);
        to[i] = (unsigned char)(byte & mask);
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

/* A number of a few bits: sign, exponent, mantissa; exponent 0 is subnormal. */
static double decode_small(const ari_format *f, unsigned u)
{
    const unsigned sign = u >> (f->bits - 1), magnitude = u & ((1u << (f->bits - 1)) - 1u);
    const unsigned exponent = magnitude >> f->mantissa, fraction = magnitude & ((1u << f->mantissa) - 1u);
    const unsigned whole = exponent ? fraction + (1u << f->mantissa) : fraction;
    const double x = ldexp((double)whole, f->least + (exponent ? (int)exponent - 1 : 0) - f->mantissa);
    return sign ? -x : x;
}

ar_status ari_chunk_values(ari_chunk *c, const ari_format *f, size_t n)
{
    if (f->bits >= 8)
        return ar_values_to_f64(f->dtype, c->raw, n, c->value);
    for (size_t i = 0; i < n; i++)
        c->value[i] = decode_small(f, c->raw[i]);
    return AR_OK;
}

void ari_release(const ar_dump_tensor *t, const ari_format *f, size_t start, size_t n)
{
    if (t->whole) {
        const ar_st_entry *e = t->parts > 0 ? t->part[0].entry : NULL;
        const size_t from = start * f->bits / 8;
        if (e && e->mapped && e->data == t->whole)
            ari_pages_drop((const char *)t->whole + from, (start + n) * f->bits / 8 - from);
        return;
    }
    /* A combined tensor's stretches lie all over its parts, which are released when it is done. */
    for (size_t i = 0; i < t->parts && start + n == t->count * f->parts; i++) {
        if (t->part[i].entry && t->part[i].entry->mapped)
            ari_pages_drop(t->part[i].entry->data, t->part[i].entry->bytes);
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

/* Keys that order like the numbers: negative floats count downwards, -0 directly below +0; integers are moved up by
 * half their range. Which bits of a number that turns over is decided before the loop: it goes through every element.
 * */
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

void ari_steps(uint64_t *steps, const ari_format *f, const unsigned char *a, const unsigned char *b, size_t n)
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
    e = x == 0.0 || e - 1 < f->least ? f->least : e - 1;
    return nearbyint(ldexp(fabs(x), f->mantissa - e)) + ldexp((double)(e - f->least), f->mantissa);
}

static uint64_t whole_steps(double x)
{
    return x < 0x1p63 ? (uint64_t)x : (uint64_t)1 << 63;
}

uint64_t ari_steps_between(const ari_format *f, double a, double b)
{
    if (!f->is_float)
        return whole_steps(nearbyint(fabs(b - a)));
    const double x = rank_of(f, a), y = rank_of(f, b);
    return whole_steps(signbit(a) == signbit(b) ? fabs(x - y) : x + y);
}

/* 64 bits of significand hold every integer of 64 bits. */
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
