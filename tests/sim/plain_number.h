/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "anyrank/comm.h"
#include "anyrank/tensor.h"

/* The arithmetic of reductions by its definition, one element at a time: floats as exact values in a double, integers
 * in 64 bits. Nothing here uses the code under test. */

static inline size_t plain_size(ar_dtype t)
{
    return t == AR_U8 ? 1 : t == AR_BF16 || t == AR_F16 ? 2 : t == AR_F32 || t == AR_I32 ? 4 : 8;
}

static inline bool plain_is_float(ar_dtype t)
{
    return t == AR_F32 || t == AR_F64 || t == AR_BF16 || t == AR_F16;
}

/* splitmix64: Steele, Lea, Flood 2014. */
static inline uint64_t plain_hash(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline double plain_power_of_two(int exponent)
{
    const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline int plain_half_infinity(ar_dtype t)
{
    return t == AR_BF16 ? 0x7f80 : 0x7c00;
}

/* Of a code without sign. The infinity counts as the power of two after the largest number. */
static inline double plain_half_magnitude(ar_dtype t, int code)
{
    const int fraction_bits = t == AR_BF16 ? 7 : 10, bias = t == AR_BF16 ? 127 : 15;
    const int exponent = code >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
    if (exponent == 0)
        return fraction * plain_power_of_two(1 - bias - fraction_bits);
    return ((1 << fraction_bits) + fraction) * plain_power_of_two(exponent - bias - fraction_bits);
}

static inline double plain_half_value(ar_dtype t, uint16_t code)
{
    const int magnitude = code & 0x7fff, infinity = plain_half_infinity(t);
    double x = magnitude > infinity ? (double)NAN : (double)INFINITY;
    if (magnitude < infinity)
        x = plain_half_magnitude(t, magnitude);
    return code & 0x8000 ? -x : x;
}

/* The nearest code, the even one of two that are equally near: by search. */
static inline uint16_t plain_half_nearest(ar_dtype t, double x)
{
    const int infinity = plain_half_infinity(t);
    const double magnitude = fabs(x);
    int low = 0, high = infinity;
    if (isnan(x))
        return (uint16_t)(infinity + (t == AR_BF16 ? 0x40 : 0x200));
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (plain_half_magnitude(t, middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    const double below = magnitude - plain_half_magnitude(t, low), above = plain_half_magnitude(t, high) - magnitude;
    const int nearest = below < above || (below == above && low % 2 == 0) ? low : high;
    return (uint16_t)(nearest | (signbit(x) ? 0x8000 : 0));
}

static inline double plain_load_float(const void *at, ar_dtype t)
{
    double f64;
    float f32;
    uint16_t code;
    if (t == AR_F64) {
        memcpy(&f64, at, sizeof f64);
        return f64;
    }
    if (t == AR_F32) {
        memcpy(&f32, at, sizeof f32);
        return (double)f32;
    }
    memcpy(&code, at, sizeof code);
    return plain_half_value(t, code);
}

/* Rounds to the type; of a 16-bit type, first to fp32. NaN becomes the canonical one. */
static inline void plain_store_float(void *to, ar_dtype t, double x)
{
    const uint64_t nan64 = 0x7ff8000000000000u;
    const uint32_t nan32 = 0x7fc00000u;
    const float f32 = (float)x;
    if (t == AR_F64) {
        memcpy(to, isnan(x) ? (const void *)&nan64 : &x, sizeof x);
    } else if (t == AR_F32) {
        memcpy(to, isnan(x) ? (const void *)&nan32 : &f32, sizeof f32);
    } else {
        const uint16_t code = plain_half_nearest(t, (double)f32);
        memcpy(to, &code, sizeof code);
    }
}

static inline int64_t plain_load_integer(const void *at, ar_dtype t)
{
    int64_t i64;
    int32_t i32;
    if (t == AR_U8)
        return *(const unsigned char *)at;
    if (t == AR_I32) {
        memcpy(&i32, at, sizeof i32);
        return i32;
    }
    memcpy(&i64, at, sizeof i64);
    return i64;
}

static inline void plain_store_integer(void *to, ar_dtype t, uint64_t x)
{
    for (size_t i = 0; i < plain_size(t); i++)
        ((unsigned char *)to)[i] = (unsigned char)(x >> 8 * i); /* lowest byte first, as on the machines tested */
}

/* IEEE 754-2019, maximum and minimum. */
static inline double plain_extreme(double x, double y, bool larger)
{
    if (isnan(x) || isnan(y))
        return (double)NAN;
    if (x == y)
        return (signbit(x) != 0) == larger ? y : x;
    return (x > y) == larger ? x : y;
}

/* acc = acc op value. Sums of fp32 numbers rounded to double and then to fp32 are rounded as if once: 53 >= 2 * 24 + 2
 * bits (Figueroa 1995). */
static inline void plain_combine(void *acc, const void *value, ar_dtype t, ar_op op)
{
    if (plain_is_float(t)) {
        const double x = plain_load_float(acc, t), y = plain_load_float(value, t);
        plain_store_float(acc, t, op == AR_SUM ? x + y : plain_extreme(x, y, op == AR_MAX));
        return;
    }
    const int64_t x = plain_load_integer(acc, t), y = plain_load_integer(value, t);
    const uint64_t u = (uint64_t)x, v = (uint64_t)y;
    if (op == AR_SUM)
        plain_store_integer(acc, t, u + v);
    else
        plain_store_integer(acc, t, (x > y) == (op == AR_MAX) ? u : v);
}

/* Zeros, infinities and NaN of both signs, the smallest and the largest numbers. */
static inline void plain_store_special(void *to, ar_dtype t, uint64_t which)
{
    static const uint64_t f64[] = {0, 0x7ff0000000000000u, 0x7ff8000000000000u, 0x7ff0000000000001u,
                                   1, 0x7fefffffffffffffu};
    static const uint32_t f32[] = {0, 0x7f800000u, 0x7fc00000u, 0x7f800001u, 1, 0x7f7fffffu};
    static const uint16_t bf16[] = {0, 0x7f80, 0x7fc0, 0x7f81, 1, 0x7f7f},
                          f16[] = {0, 0x7c00, 0x7e00, 0x7c01, 1, 0x7bff};
    const size_t e = plain_size(t), i = which / 2 % 6;
    const void *from = &f64[i];
    if (t == AR_F32)
        from = &f32[i];
    else if (t != AR_F64)
        from = t == AR_BF16 ? &bf16[i] : &f16[i];
    memcpy(to, from, e);
    if (which % 2)
        ((unsigned char *)to)[e - 1] |= 0x80;
}

/* Element i of rank r: depends on both, spans the whole range of integers (sums wrap), and fractions whose sum depends
 * on the order (exponents -4 .. 3, full significands). special: every eighth float is one. */
static inline void plain_fill_with(void *to, ar_dtype t, uint64_t seed, int r, size_t n, bool special)
{
    for (size_t i = 0; i < n; i++) {
        const uint64_t h = plain_hash(seed ^ plain_hash((uint64_t)r * 1000003u + i));
        const double f = ((double)(h >> 11) * 0x1p-53 + 0.5) * (double)(1 << (h & 7)) * (h & 8 ? -0.0625 : 0.0625);
        char *at = (char *)to + i * plain_size(t);
        if (!plain_is_float(t))
            plain_store_integer(at, t, h);
        else if (special && h >> 61 == 0)
            plain_store_special(at, t, h >> 4);
        else
            plain_store_float(at, t, f);
    }
}

static inline void plain_fill(void *to, ar_dtype t, uint64_t seed, int r, size_t n)
{
    plain_fill_with(to, t, seed, r, n, false);
}
