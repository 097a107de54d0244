/* SPDX-License-Identifier: Apache-2.0 */
/* Exponentials, activations and quotients of rows are their definitions' bits (tests/extended/rows_sweep.c: for every
 * number). */
#include "anyrank/activation.h"
#include "ref/cpu/row_sum.h"
#include "ref/numerics/activation.h"
#include "tests/cpu/row_support.h"

static const float maxima[] = {0.0f, 3.5f, -90.0f, 0x1p100f};

static void check_exps(const float *x, float m, size_t n)
{
    OWNED(free) float *defined = new_copy(x, n), *own = new_copy(x, n), *in_place = new_copy(x, n);
    for (size_t j = 0; j < n; j++)
        defined[j] = ari_softmax_exp(x[j], m);
    for (size_t way = 0; way < ARI_ROW_KERNELS; way++) {
        if (!ari_row_kernels_at(way))
            continue;
        memcpy(in_place, x, n * sizeof *x);
        ari_row_kernels_at(way)->exps(own, x, m, n);
        ari_row_kernels_at(way)->exps(in_place, in_place, m, n);
        assert_bits(own, defined, n, "exponentials");
        assert_bits(in_place, defined, n, "exponentials in place");
    }
}

Test(exponentials, of_rows_of_every_length_are_the_definitions)
{
    for (size_t n = 1; n <= 50; n++)
        for (enum values kind = 0; kind < VALUE_KINDS; kind++)
            for (size_t i = 0; i < sizeof maxima / sizeof *maxima; i++) {
                OWNED(free) float *x = new_values(n, kind, n);
                check_exps(x, maxima[i], n);
            }
}

/* One in 1,021 of all numbers: 2,500 of them are near the middle between two results, and 700 have subnormal ones. */
Test(exponentials, of_bits_from_all_over_are_the_definitions)
{
    enum { N = 4096, STEP = 1021 };
    float x[N];
    for (uint64_t first = 0; first < UINT64_C(1) << 32; first += (uint64_t)N * STEP) {
        for (uint64_t j = 0; j < N; j++)
            x[j] = ari_float32((uint32_t)(first + j * STEP));
        check_exps(x, 0.0f, N);
    }
}

static void define(ar_activation kind, const ari_act_row *r, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        if (!r->dy)
            r->y[j] = r->up ? ari_gated_act(kind, r->x[j], r->up[j]) : ari_act32(kind, r->x[j]);
        else if (!r->up)
            r->y[j] = ari_mul32(r->dy[j], ari_dact32(kind, r->x[j]));
        else {
            r->y[j] = ari_gated_dgate(kind, r->dy[j], r->up[j], r->x[j]);
            r->dup[j] = ari_gated_dup(kind, r->dy[j], r->up[j], r->x[j]);
        }
    }
}

/* A pass, and the same where it writes what it reads: y over x or dy, dup over up. */
static void check_pass(const ari_row_kernels *way, ar_activation kind, const float *x, size_t n, bool backward,
                       bool gated)
{
    enum { X, DY, UP, Y, DUP, WANTED, WANTED_DUP, ROWS_ };
    float *row[ROWS_];
    for (size_t i = 0; i < ROWS_; i++)
        row[i] = new_copy(x, n);
    for (size_t j = 0; j < n; j++) {
        row[DY][j] = 1.0f - x[n - 1 - j];
        row[UP][j] = 2.0f * x[j / 2];
    }
    ari_act_row r = {.y = row[WANTED],
                     .dup = backward && gated ? row[WANTED_DUP] : NULL,
                     .x = row[X],
                     .up = gated ? row[UP] : NULL,
                     .dy = backward ? row[DY] : NULL};
    define(kind, &r, n);
    r.y = row[Y];
    r.dup = r.dup ? row[DUP] : NULL;
    ari_activations(way, &r, n, kind);
    assert_bits(row[Y], row[WANTED], n, "an activation");
    if (r.dup)
        assert_bits(row[DUP], row[WANTED_DUP], n, "what up gets");
    r.y = row[backward ? DY : X];
    r.dup = r.dup ? row[UP] : NULL;
    ari_activations(way, &r, n, kind);
    assert_bits(r.y, row[WANTED], n, "an activation in place");
    if (r.dup)
        assert_bits(r.dup, row[WANTED_DUP], n, "what up gets in place");
    for (size_t i = 0; i < ROWS_; i++)
        free(row[i]);
}

static void check_activation(const ari_row_kernels *way, ar_activation kind, const float *x, size_t n)
{
    for (int pass = 0; pass < 4; pass++)
        check_pass(way, kind, x, n, pass & 1, pass & 2);
}

/* One in some thousands of all numbers, in rows of 1 to 1024. */
static void check_numbers(const ari_row_kernels *way, ar_activation kind)
{
    enum { N = 1024, STEP = 8191 };
    float x[N];
    for (uint64_t first = kind; first < UINT64_C(1) << 32; first += (uint64_t)N * STEP) {
        for (uint64_t j = 0; j < N; j++)
            x[j] = ari_float32((uint32_t)(first + j * STEP));
        check_activation(way, kind, x, first / (N * STEP) % 8 == 0 ? first / (N * STEP) % N + 1 : N);
    }
}

/* As activations meet them: nearly all around zero. */
static void check_usual(const ari_row_kernels *way, ar_activation kind)
{
    enum { N = 1000 };
    for (uint64_t seed = 1; seed <= 12; seed++) {
        OWNED(free) float *x = new_values(N, seed % 4 == 0 ? SPECIAL : ORDINARY, seed);
        check_activation(way, kind, x, N);
    }
}

Test(activations, of_bits_from_all_over_are_the_definitions)
{
    for (size_t i = 0; i < ARI_ROW_KERNELS; i++)
        for (ar_activation kind = AR_ACT_GELU_ERF; ari_row_kernels_at(i) && kind < AR_ACTIVATIONS; kind++) {
            check_numbers(ari_row_kernels_at(i), kind);
            check_usual(ari_row_kernels_at(i), kind);
        }
}

static void check_quotients(const float *x, double l, size_t n)
{
    OWNED(free) float *defined = new_copy(x, n), *own = new_copy(x, n), *in_place = new_copy(x, n);
    for (size_t j = 0; j < n; j++)
        defined[j] = ari_softmax_p(x[j], l);
    for (size_t way = 0; way < ARI_ROW_KERNELS; way++) {
        if (!ari_row_kernels_at(way))
            continue;
        memcpy(in_place, x, n * sizeof *x);
        ari_row_kernels_at(way)->quotients(own, x, l, n);
        ari_row_kernels_at(way)->quotients(in_place, in_place, l, n);
        assert_bits(own, defined, n, "quotients");
        assert_bits(in_place, defined, n, "quotients in place");
    }
}

Test(quotients, of_every_kind_are_the_definitions)
{
    static const double divisors[] = {1.0, 3.0, 0x1.fffffffffffffp0, 0x1.000001p0, 1e6 / 3.0, 0x1.8p40};
    for (size_t n = 1; n <= 600; n = n * 5 / 3 + 1)
        for (enum values kind = 0; kind < VALUE_KINDS; kind++)
            for (size_t i = 0; i < sizeof divisors / sizeof *divisors; i++) {
                OWNED(free) float *x = new_values(n, kind, n);
                check_quotients(x, divisors[i], n);
            }
}

/* The sum is the binary64 number next to x over the middle between two fp32 numbers, or one of its neighbours. */
Test(quotients, that_are_all_but_between_two_results_are_the_definitions)
{
    uint64_t state = 1;
    for (int i = 0; i < 20000; i++) {
        const uint64_t random = next_random(&state);
        const float x[3] = {1.0f, ari_float32(0x3f000000u | (uint32_t)(random & 0x7fffffu)), 0.25f};
        const double middle = 0x1p-25 * (double)(0x1000001u | (random >> 30 & 0xfffffeu));
        const double l = ari_float64(ari_bits64((double)x[1] / middle) + random % 3u - 1u);
        check_quotients(x, l, 3);
    }
}

/* Of numbers up to 1, with halves between two integers among them; larger ones as a row sum of them is. */
Test(exponentials, sum_as_their_definitions)
{
    enum { N = 3000 };
    static float x[N];
    for (int32_t bits = 40; bits >= 22; bits -= 6)
        for (int most = 0; most < 8; most++) {
            uint64_t state = (uint64_t)bits, sum = 0;
            for (size_t j = 0; j < N; j++) {
                const uint64_t random = next_random(&state);
                const float part = ldexpf((float)(random >> 41), -22 - (int)(random % 24));
                x[j] = most == 0 && part > 1.0f ? 1.0f : (float)(1 << most) * part;
                sum += (uint64_t)ari_rowsum_quantise((double)x[j], 1, bits);
            }
            cr_assert(ari_row_unit_integer(x, N, bits) == sum, "%d bits, numbers of up to %d", (int)bits, 2 << most);
        }
}
