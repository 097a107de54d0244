/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"
#include "ref/numerics/integer_sum.h"
#include "tests/support/together.h"

/* Exponents of scaled rows and quantised integers against their definitions in ref/numerics/integer_sum.h: bit patterns of
 * all kinds, also with exponents that belong to other values. */
static uint32_t next(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed ^ *seed >> 15;
}

/* How far exponents lie apart. */
typedef enum spread { NEAR, FAR, SUBNORMAL, EVERY, SPREADS } spread;

static float draw(spread s, uint32_t *seed)
{
    static const uint32_t base[SPREADS] = {118, 64, 0, 0}, width[SPREADS] = {16, 128, 3, 256};
    const uint32_t bits = next(seed), pick = next(seed) % 64;
    const uint32_t exponent = base[s] + next(seed) % width[s];
    if (pick == 0)
        return bits >> 31 ? -0.0f : 0.0f;
    const float x = ari_float32((bits & 0x807fffffu) | exponent << 23);
    return x != x ? INFINITY : x; /* a NaN has no integer */
}

/* [rows, k] as it is in memory, transposed, or every other element. */
enum { PLAIN, TRANSPOSED, STRIDED, LAYOUTS };

typedef struct problem {
    size_t rows, k;
    float *x;
    ar_tensor view;
    int32_t *c, *e;
    ar_device *d;
} problem;

static float value_at(const problem *p, size_t i, size_t k)
{
    return p->x[(ptrdiff_t)i * p->view.stride[0] + (ptrdiff_t)k * p->view.stride[1]];
}

static problem problem_create(size_t rows, size_t k, int layout, spread s, uint32_t seed)
{
    problem p = {.rows = rows, .k = k};
    const size_t n = rows * k * (layout == STRIDED ? 2 : 1);
    const ptrdiff_t row = layout == TRANSPOSED ? 1 : (ptrdiff_t)(n / rows), col = layout == TRANSPOSED ? (ptrdiff_t)rows
                                                                                  : layout == STRIDED  ? 2
                                                                                                       : 1;
    p.x = malloc(n * sizeof *p.x);
    p.c = malloc(k * sizeof *p.c);
    p.e = malloc(rows * sizeof *p.e);
    cr_assert(p.x && p.c && p.e);
    cr_assert_ok(ar_device_cpu_create(&p.d, 2));
    for (size_t i = 0; i < n; i++)
        p.x[i] = draw(s, &seed);
    if (rows > 3)
        p.x[3 * row + (ptrdiff_t)(k / 2) * col] = -INFINITY;
    p.view = (ar_tensor){.dtype = AR_F32, .ndim = 2, .shape = {rows, k}, .stride = {row, col}, .data = {p.x}};
    cr_assert_ok(p.d->ops->col_exponents(p.d, NULL, (ar_buf){p.c}, &p.view, false));
    for (size_t i = 0; i < k; i += 7) /* of another matrix, with columns of zeros */
        p.c[i] = i % 3 == 0 ? ARI_EXP_ZERO : i % 3 == 1 ? ARI_EXP_NONFINITE : (int32_t)(next(&seed) % 277) - 148;
    return p;
}

static void problem_destroy(problem *p)
{
    ar_device_destroy(p->d);
    free(p->x);
    free(p->c);
    free(p->e);
}

static void compare_exponents(problem *p, int sign, const char *what)
{
    cr_assert_ok(p->d->ops->row_exponents(p->d, NULL, (ar_buf){p->e}, &p->view, (ar_cbuf){p->c}, sign, false, false));
    for (size_t i = 0; i < p->rows; i++) {
        int32_t want = ARI_EXP_ZERO;
        for (size_t k = 0; k < p->k; k++) {
            const int32_t e = ari_contract_exponent(value_at(p, i, k), ari_contract_shift(p->c[k], sign));
            want = e > want ? e : want;
        }
        cr_assert_eq(p->e[i], want, "%s: row %zu: got %d, expected %d", what, i, p->e[i], want);
    }
}

static int32_t integer_at(const ar_packed *p, size_t row, size_t k)
{
    const void *q = ari_packed_at(p, 0, row, k);
    return p->narrow ? *(const int16_t *)q : *(const int32_t *)q;
}

static void compare_integers(problem *p, int sign, bool narrow, const char *what)
{
    ar_packed *q = NULL;
    cr_assert_ok(p->d->ops->packed_create(p->d, NULL, &q, 1, p->rows, p->k, narrow ? AR_PACKED_NARROW : 0));
    cr_assert_ok(p->d->ops->pack(p->d, NULL, q, 0, 0, &p->view, (ar_cbuf){p->c}, sign, (ar_cbuf){p->e}));
    for (size_t i = 0; i < p->rows; i++)
        for (size_t k = 0; k < p->k; k++) {
            const float x = value_at(p, i, k);
            const int32_t shift = ari_contract_shift(p->c[k], sign), got = integer_at(q, i, k);
            const bool none = shift == ARI_EXP_ZERO;
            const int32_t want = none     ? 0
                                 : narrow ? ari_contract_quantise_narrow(x, shift, p->e[i])
                                          : ari_contract_quantise(x, shift, p->e[i]);
            if (!none || isfinite(x))
                cr_assert_eq(got, want, "%s: [%zu, %zu] %a*2^%d, e %d: got %d, expected %d", what, i, k, (double)x,
                             shift, p->e[i], got, want);
        }
    p->d->ops->packed_destroy(p->d, NULL, q);
}

/* With the rows' own exponents, and then with others, of any size. */
static void one(size_t rows, size_t k, int layout, spread s, int sign)
{
    char what[96];
    uint32_t seed = (uint32_t)(rows * 31 + k * 7) + (uint32_t)s * 3u + (uint32_t)layout;
    snprintf(what, sizeof what, "[%zu, %zu], layout %d, spread %d, sign %d", rows, k, layout, (int)s, sign);
    SCOPED(problem_destroy) problem p = problem_create(rows, k, layout, s, seed);
    compare_exponents(&p, sign, what);
    compare_integers(&p, sign, false, what);
    compare_integers(&p, sign, true, what);
    for (size_t i = 0; i < rows; i++)
        p.e[i] = i % 5 == 4 ? ARI_EXP_NONFINITE : (int32_t)(next(&seed) % 554) - 297;
    compare_integers(&p, sign, false, what);
    compare_integers(&p, sign, true, what);
}

CLAIM(every_layout_and_spread)
{
    static const size_t shape[][2] = {{1, 1}, {3, 5}, {4, 4}, {64, 64}, {70, 131}, {130, 1030}};
    for (size_t n = 0; n < sizeof shape / sizeof *shape; n++)
        for (int layout = 0; layout < LAYOUTS; layout++)
            for (int s = 0; s < SPREADS; s++)
                for (int sign = -1; sign <= 1; sign += 2)
                    one(shape[n][0], shape[n][1], layout, (spread)s, sign);
}

/* The edges of the way by fp32: factors next to the smallest and the largest normal number, values next to the limit, to
 * ties and to the smallest normal number. */
CLAIM(edges_of_fp32)
{
    static const uint32_t bits[] = {0,          1,          0x007fffff, 0x00800000, 0x00800001, 0x3effffff,
                                    0x3f000000, 0x3f7fffff, 0x3f800000, 0x3fbfffff, 0x3fc00000, 0x3fc00001,
                                    0x4b7fffff, 0x4bffffff, 0x4c000000, 0x4c000001, 0x7f7fffff};
    enum { VALUES = sizeof bits / sizeof *bits, LEAST = -297, MOST = 256 };
    float x[2 * VALUES];
    int32_t c[2 * VALUES], e[1];
    OWNED(ar_device_destroy) ar_device *d = NULL;
    ar_packed *q = NULL;
    cr_assert_ok(ar_device_cpu_create(&d, 1));
    cr_assert_ok(d->ops->packed_create(d, NULL, &q, 1, 1, 2 * VALUES, false));
    for (size_t i = 0; i < 2 * VALUES; i++)
        x[i] = ari_float32(bits[i / 2] | (uint32_t)(i % 2) << 31);
    const ar_tensor row = {
        .dtype = AR_F32, .ndim = 2, .shape = {1, 2 * VALUES}, .stride = {2 * VALUES, 1}, .data = {x}};
    for (int32_t shift = -128; shift <= 128; shift += shift < -124 || shift > 123 || shift == -1 ? 1 : 3)
        for (e[0] = LEAST; e[0] <= MOST; e[0]++) {
            for (size_t i = 0; i < 2 * VALUES; i++)
                c[i] = shift;
            cr_assert_ok(d->ops->pack(d, NULL, q, 0, 0, &row, (ar_cbuf){c}, 1, (ar_cbuf){e}));
            for (size_t i = 0; i < 2 * VALUES; i++)
                cr_assert_eq(integer_at(q, 0, i), ari_contract_quantise(x[i], shift, e[0]), "%a*2^%d, e %d: got %d",
                             (double)x[i], shift, e[0], integer_at(q, 0, i));
        }
    d->ops->packed_destroy(d, NULL, q);
}

/* The largest of a row, next to the numbers where fp32 stops to tell its exponent: columns side by side and rows side by
 * side. */
CLAIM(exponents_at_the_edges_of_fp32)
{
    static const uint32_t bits[] = {0x007ffffe, 0x007fffff, 0x00800000, 0x00800001, 0x00fffffe, 0x00ffffff,
                                    0x01000000, 0x3f7fffff, 0x3f800000, 0x7effffff, 0x7f7ffffe, 0x7f7fffff};
    OWNED(ar_device_destroy) ar_device *d = NULL;
    cr_assert_ok(ar_device_cpu_create(&d, 1));
    for (size_t i = 0; i < sizeof bits / sizeof *bits; i++)
        for (int32_t shift = -126; shift <= 127; shift++) {
            const float large = ari_float32(bits[i]);
            float x[] = {0.0f, 0x1p-149f, large, 0x1p-149f, 0.0f, -large};
            int32_t c[] = {shift, shift, shift}, e[2];
            ar_tensor rows = {.dtype = AR_F32, .ndim = 2, .shape = {2, 3}, .stride = {3, 1}, .data = {x}};
            for (int layout = 0; layout < 2; layout++) {
                cr_assert_ok(d->ops->row_exponents(d, NULL, (ar_buf){e}, &rows, (ar_cbuf){c}, 1, false, false));
                const int32_t want = ari_contract_exponent(large, shift);
                cr_assert(e[0] == want && e[1] == want, "%a*2^%d, layout %d: got %d and %d, expected %d", (double)large,
                          shift, layout, e[0], e[1], want);
                memcpy(x, (float[]){0.0f, 0x1p-149f, 0x1p-149f, 0.0f, large, -large}, sizeof x);
                rows.stride[0] = 1;
                rows.stride[1] = 2;
            }
        }
}

EVERY_CLAIM(pack)
