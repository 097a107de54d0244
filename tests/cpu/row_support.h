/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the tests of the row kernels share: data, comparison of bits, and the row sum of numerics.md written as
 * plainly as the text, with frexp, ldexp and rint in place of the kernels' bit arithmetic. */

#include "ref/cpu/kernels.h"
#include "ref/numerics/accumulator.h"
#include "ref/numerics/scalar.h"
#include "tests/support/test.h"

/* Odd row lengths, below, at and above the widths of vector registers. */
static const size_t row_lengths[] = {1, 3, 7, 16, 33, 100, 257};
#define ROW_LENGTHS (sizeof row_lengths / sizeof *row_lengths)
/* ROWS * 257 elements are enough for a kernel to use its second thread. */
#define ROWS ((size_t)131)

enum values {
    ORDINARY, /* uniform in (-4, 4) */
    WIDE,     /* exponents from 2^-149 to 2^60, so that squares and sums stay finite */
    SPECIAL,  /* ordinary, one in forty replaced by NaN, infinities, zeros, subnormals, the largest value */
    VALUE_KINDS
};

static inline uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u); /* splitmix64 */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static inline float next_value(uint64_t *state, enum values kind)
{
    static const uint32_t specials[] = {0x7fc00000u, 0xffc12345u, 0x7f800000u, 0xff800000u, 0x80000000u,
                                        0x00000001u, 0x807fffffu, 0x7f7fffffu, 0xff7fffffu, 0x00000000u};
    const uint64_t r = next_random(state);
    const double unit = (double)(r >> 11) * 0x1p-53;
    const float ordinary = (float)(8.0 * unit - 4.0);
    if (kind == WIDE)
        return (float)ldexp(2.0 * unit - 1.0, (int)(r % 209u) - 148);
    if (kind == SPECIAL && r % 40u == 0)
        return ari_float32(specials[(r >> 8) % (sizeof specials / sizeof *specials)]);
    return ordinary;
}

/* n values in memory of exactly that size, so that a sanitizer sees the first element too many. Not inlined: gcc 12
 * would warn of sizes that only its own splitting of the case n = 0 makes possible. */
__attribute__((noinline, unused)) static float *new_values(size_t n, enum values kind, uint64_t seed)
{
    float *x = calloc(n + (n == 0), sizeof *x);
    uint64_t state = seed * 1000003u + (uint64_t)kind;
    for (size_t i = 0; i < n; i++)
        x[i] = next_value(&state, kind);
    return x;
}

static inline float *new_copy(const float *x, size_t n)
{
    float *y = calloc(n + (n == 0), sizeof *y);
    memcpy(y, x, n * sizeof *y);
    return y;
}

static inline ar_device test_device(int threads)
{
    ar_device d = {.ops = NULL, .threads = threads};
    return d;
}

static inline ar_buf buf(void *p)
{
    ar_buf b = {p};
    return b;
}

static inline ar_cbuf cbuf(const void *p)
{
    ar_cbuf b = {p};
    return b;
}

/* Row-major 2-D view with `ld` elements from row to row. */
static inline ar_tensor view2(float *p, size_t rows, size_t cols, size_t ld)
{
    ar_tensor t = {.dtype = AR_F32, .ndim = 2, .shape = {rows, cols}, .stride = {(ptrdiff_t)ld, 1}, .data = {p}};
    return t;
}

/* The address of a contiguous view, for an argument. */
#define rows_of(p, n, h) \
    (&(ar_tensor){       \
        .dtype = AR_F32, .ndim = 2, .shape = {n, h}, .stride = {(ptrdiff_t)(h), 1}, .data = {(void *)(uintptr_t)(p)}})

/* Equal bits, or a failure with the first index and both values in hex. */
#define assert_bits(actual, expected, n, ...) assert_bits_at(__LINE__, actual, expected, n, __VA_ARGS__)
static inline void assert_bits_at(int line, const void *actual, const void *expected, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t a, e;
        memcpy(&a, (const char *)actual + 4 * i, 4);
        memcpy(&e, (const char *)expected + 4 * i, 4);
        cr_assert(a == e, "line %d, %s: word %zu of %zu is 0x%08x, expected 0x%08x", line, what, i, n, a, e);
    }
}

#define assert_ok(call) cr_assert_ok((call))

/* The one NaN where x is a NaN; the definitions in the tests store through this. */
static inline float stored(float x)
{
    return isnan(x) ? ari_float32(0x7fc00000u) : x;
}

static inline int plain_bits(size_t n)
{
    int log2_up = 0; /* ceil(log2(n + 1)) */
    while (((size_t)1 << log2_up) < n + 1)
        log2_up++;
    return 62 - log2_up < 40 ? 62 - log2_up : 40;
}

/* rint(x*2^(p-e)) as an integer. */
static inline int64_t plain_quantised(double x, int e, int p)
{
    return (int64_t)rint(ldexp(x, p - e));
}

/* Row sum of n known values: numerics.md, "Sums along a row". */
static inline double plain_row_sum(const double *x, size_t n)
{
    int e = INT32_MIN;
    for (size_t i = 0; i < n; i++) {
        int of_this = 0;
        if (!isfinite(x[i]))
            return (double)NAN;
        frexp(x[i], &of_this); /* |x| = m*2^e, 0.5 <= m < 1 */
        if (x[i] != 0.0 && of_this > e)
            e = of_this;
    }
    if (e == INT32_MIN)
        return 0.0;
    const int p = plain_bits(n);
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += plain_quantised(x[i], e, p);
    return ldexp((double)sum, e - p);
}

/* A sum over rows of n elements, exact or native, to which terms are added one by one, by the scalar definitions. It
 * begins with something in it. */
typedef struct plain_sum {
    size_t n;
    ar_row_sum at;
} plain_sum;

static inline void plain_add(const plain_sum *s, size_t j, float term)
{
    int64_t *h = s->at.hl.ptr;
    float *f = s->at.f32.ptr;
    if (s->at.t.ptr)
        ari_acc_add((uint8_t *)s->at.t.ptr + j, h + j, h + s->n + j, term, s->at.narrow);
    else if (f)
        f[j] = stored(f[j] + term);
}

static inline plain_sum plain_sum_new(size_t n, bool exact)
{
    plain_sum s = {n, {.t = {NULL}}};
    if (exact)
        s.at = (ar_row_sum){.t = {calloc(n + 1, 1)}, .hl = {calloc(2 * n + 1, 8)}};
    else
        s.at.f32.ptr = calloc(n + 1, 4);
    for (size_t j = 0; j < n; j++)
        plain_add(&s, j, (float)j * 0.37f);
    return s;
}

/* As it is now. */
static inline plain_sum plain_sum_copy(const plain_sum *s)
{
    plain_sum copy = plain_sum_new(s->n, s->at.t.ptr != NULL);
    if (s->at.t.ptr) {
        memcpy(copy.at.t.ptr, s->at.t.ptr, s->n);
        memcpy(copy.at.hl.ptr, s->at.hl.ptr, 16 * s->n);
    } else {
        memcpy(copy.at.f32.ptr, s->at.f32.ptr, 4 * s->n);
    }
    return copy;
}

static inline void plain_sum_free(plain_sum *s)
{
    free(s->at.t.ptr), free(s->at.hl.ptr), free(s->at.f32.ptr);
}

#define assert_sum(actual, expected, what) assert_sum_at(__LINE__, actual, expected, what)
static inline void assert_sum_at(int line, const plain_sum *actual, const plain_sum *expected, const char *what)
{
    const size_t n = expected->n;
    if (expected->at.f32.ptr) {
        assert_bits_at(line, actual->at.f32.ptr, expected->at.f32.ptr, n, what);
        return;
    }
    cr_assert(memcmp(actual->at.t.ptr, expected->at.t.ptr, n) == 0, "line %d, %s: highest slices", line, what);
    assert_bits_at(line, actual->at.hl.ptr, expected->at.hl.ptr, 4 * n, what);
}

/* No sum. */
static const ar_row_sum unsummed = {.t = {NULL}};
