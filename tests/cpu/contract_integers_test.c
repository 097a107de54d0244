/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/contract_paths.h"

/* Products of chosen integers against 128-bit sums, on every path. A path cuts its integers into digits, whose sums have
 * limits; the integers here have all digits at the ends of their ranges, and the sums as many terms as its blocks hold,
 * one less and one more. */
PATH_SUITE(contract_integers, .timeout = 300);

__extension__ typedef __int128 wide_int;

enum { LARGEST = (1 << 25) - 1, MOST = 128 };

typedef struct integers {
    int32_t q[MOST];
    size_t n;
    bool narrow; /* |q| <= 32639 */
} integers;

/* q and -q, if an operand can hold it: |q| <= 2^25 - 1. From 2^24 on the integers of fp32 values are even, or the
 * largest, to which pack clamps. */
static void add_both(integers *s, int32_t q)
{
    const int32_t size = q < 0 ? -q : q;
    const int32_t held = size < 1 << 24 || size == LARGEST ? size : size & ~1;
    for (size_t i = 0; i < s->n; i++)
        if (s->q[i] == held)
            return;
    if (size > LARGEST || s->n + 2 > MOST)
        return;
    s->q[s->n++] = held;
    s->q[s->n++] = -held;
}

/* q = h*2^13 + l, |h| <= 2^12, -2^12 <= l < 2^12. */
static void add_halves(integers *s)
{
    const int32_t high[] = {4096, 4095, -4096, 1, 0}, low[] = {-4096, 4095, -1, 0};
    for (size_t i = 0; i < sizeof high / sizeof *high; i++)
        for (size_t j = 0; j < sizeof low / sizeof *low; j++)
            add_both(s, high[i] * 8192 + low[j]);
}

/* q in balanced digits of base 128, the highest of which is at most 16. */
static void add_digits(integers *s)
{
    const int32_t highest[] = {16, 15, -16, 7, -8}, ends[] = {-64, 63};
    for (size_t i = 0; i < sizeof highest / sizeof *highest; i++)
        for (size_t j = 0; j < 8; j++)
            add_both(s, ((highest[i] * 128 + ends[j & 1]) * 128 + ends[j >> 1 & 1]) * 128 + ends[j >> 2]);
}

static integers extremes(void)
{
    integers s = {.n = 0};
    add_both(&s, LARGEST);
    add_halves(&s);
    add_digits(&s);
    cr_assert(s.n > 60 && s.n < MOST, "%zu integers", s.n);
    return s;
}

/* q = h*2^8 + l, -128 <= h, l <= 127. */
static integers narrow_extremes(void)
{
    const int32_t high[] = {127, 126, 1, 0, -1}, low[] = {-128, 127, -1, 0};
    integers s = {.narrow = true};
    for (size_t i = 0; i < sizeof high / sizeof *high; i++)
        for (size_t j = 0; j < sizeof low / sizeof *low; j++)
            add_both(&s, high[i] * 256 + low[j]);
    return s;
}

/* Rows of integers, packed: row i, term k is pick(i, k). */
typedef int32_t pick_fn(const void *from, size_t i, size_t k);

static ar_packed *packed_of(ar_device *d, size_t rows, size_t k, unsigned form, pick_fn *pick, const void *from)
{
    ar_packed *p = NULL;
    OWNED(free) float *x = case_alloc(rows * k, sizeof *x);
    OWNED(free) int32_t *e = case_alloc(rows, sizeof *e); /* 0: q = clamp(rint(x*2^25)) */
    for (size_t i = 0; i < rows * k; i++)
        x[i] = (float)pick(from, i / k, i % k) * 0x1p-25f;
    const ar_tensor view = case_view2(x, rows, k);
    cr_assert_ok(d->ops->packed_create(d, NULL, &p, 1, rows, k, form));
    cr_assert_ok(d->ops->pack(d, NULL, p, 0, 0, &view, (ar_cbuf){NULL}, 1, (ar_cbuf){e}));
    return p;
}

/* The sums as int64 where they fit, as two limbs, and rounded. */
static void check_sums(ar_device *d, const ar_packed *a, const ar_packed *b, const wide_int *want, size_t m, size_t n,
                       size_t k)
{
    OWNED(free) int64_t *s = case_alloc(2 * m * n, sizeof *s);
    OWNED(free) float *y = case_alloc(m * n, sizeof *y);
    OWNED(free) int32_t *e = case_alloc(m + n, sizeof *e);
    const ar_tensor yv = case_view2(y, m, n);
    for (int limbs = k > 8191 && !a->narrow ? 2 : 1; limbs <= 2; limbs++) {
        cr_assert_ok(d->ops->gemm_i64(d, NULL, (ar_buf){s}, a, b, limbs, false));
        for (size_t i = 0; i < m * n; i++) {
            const wide_int got = limbs == 1 ? s[i] : s[2 * i] * ((wide_int)1 << 32) + s[2 * i + 1];
            cr_assert(got == want[i], "k %zu, row %zu, column %zu, %d limbs: off by %g", k, i / n, i % n, limbs,
                      (double)(got - want[i]));
        }
    }
    cr_assert_ok(
        d->ops->gemm_round(d, NULL, &yv, a, b, (ar_cbuf){e}, (ar_cbuf){e}, (ar_cbuf){NULL}, AR_ACT_NONE, NULL, NULL));
    for (size_t i = 0; i < m * n; i++) {
        const float rounded = (float)((double)want[i] * 0x1p-50);
        cr_assert(ari_bits32(y[i]) == ari_bits32(rounded), "k %zu, row %zu, column %zu: got %a, expected %a", k, i / n,
                  i % n, (double)y[i], (double)rounded);
    }
}

static const size_t lengths[] = {1, 63, 64, 65, 127, 128, 129, 1023, 8191};

static int32_t one_for_a_row(const void *from, size_t i, size_t k)
{
    (void)k;
    return ((const integers *)from)->q[i];
}

static void check_pairings(const integers *s, size_t k)
{
    OWNED(ar_device_destroy) ar_device *d = device(1);
    const unsigned form = s->narrow ? AR_PACKED_NARROW : 0;
    ar_packed *a = packed_of(d, s->n, k, AR_PACKED_LEFT | form, one_for_a_row, s);
    ar_packed *b = packed_of(d, s->n, k, form, one_for_a_row, s);
    OWNED(free) wide_int *want = case_alloc(s->n * s->n, sizeof *want);
    for (size_t i = 0; i < s->n * s->n; i++)
        want[i] = (wide_int)s->q[i / s->n] * s->q[i % s->n] * (wide_int)k;
    check_sums(d, a, b, want, s->n, s->n, k);
    d->ops->packed_destroy(d, NULL, a);
    d->ops->packed_destroy(d, NULL, b);
}

PATH_TEST(contract_integers, every_pairing_of_extremes_is_exact_over_every_length_of_a_block)
{
    const integers s = extremes();
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        check_pairings(&s, lengths[i]);
}

PATH_TEST(contract_integers, every_pairing_of_narrow_extremes_is_exact)
{
    const integers s = narrow_extremes();
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        check_pairings(&s, lengths[i]);
    check_pairings(&s, 40000);
}

PATH_TEST(contract_integers, the_largest_are_exact_over_40000_terms)
{
    integers s = {.n = 0};
    add_both(&s, LARGEST);
    add_both(&s, (1 << 25) - 4096); /* h 4096, l -4096 */
    add_both(&s, 15 * 2097152 + 63 * 16384 + 63 * 128 + 62);
    add_both(&s, 4095);
    check_pairings(&s, 40000);
}

typedef struct matrix {
    const int32_t *q;
    size_t k;
} matrix;

static int32_t of_matrix(const void *from, size_t i, size_t k)
{
    const matrix *m = from;
    return m->q[i * m->k + k];
}

static wide_int *sums_of(size_t m, size_t n, size_t k, const matrix *a, const matrix *b)
{
    wide_int *want = case_alloc(m * n, sizeof *want);
    for (size_t i = 0; i < m * n; i++)
        for (size_t t = 0; t < k; t++)
            want[i] += (wide_int)of_matrix(a, i / n, t) * of_matrix(b, i % n, t);
    return want;
}

static void check_matrices(size_t m, size_t n, size_t k, const int32_t *qa, const int32_t *qb, unsigned form)
{
    const matrix am = {qa, k}, bm = {qb, k};
    OWNED(ar_device_destroy) ar_device *d = device(2);
    ar_packed *a = packed_of(d, m, k, AR_PACKED_LEFT | form, of_matrix, &am),
              *b = packed_of(d, n, k, form, of_matrix, &bm);
    OWNED(free) wide_int *want = sums_of(m, n, k, &am, &bm);
    check_sums(d, a, b, want, m, n, k);
    d->ops->packed_destroy(d, NULL, a);
    d->ops->packed_destroy(d, NULL, b);
}

static int32_t *mixture(integers s, size_t n, uint64_t seed)
{
    int32_t *q = case_alloc(n, sizeof *q);
    for (size_t t = 0; t < n; t++)
        q[t] = s.q[case_random(&seed) % s.n];
    return q;
}

PATH_TEST(contract_integers, mixtures_of_extremes_are_exact)
{
    enum { m = 19, n = 53 };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        OWNED(free) int32_t *q = mixture(extremes(), (m + n) * lengths[i], i);
        check_matrices(m, n, lengths[i], q, q + m * lengths[i], 0);
        OWNED(free) int32_t *narrow = mixture(narrow_extremes(), (m + n) * lengths[i], i);
        check_matrices(m, n, lengths[i], narrow, narrow + m * lengths[i], AR_PACKED_NARROW);
    }
}

/* Some rows and terms of what was packed, against an operand packed as it is and against such a part. */
PATH_TEST(contract_integers, parts_of_operands_have_the_sums_of_their_terms)
{
    enum { rows = 40, terms = 300 };
    const ar_part parts[] = {
        {0, 1, 0, rows, 64, 128}, {0, 1, 3, 21, 5, 131}, {0, 1, 8, 32, 299, 1}, {0, 1, 39, 1, 0, 290}};
    OWNED(free) int32_t *q = mixture(extremes(), 2 * rows * terms, 7);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        const ar_part *p = &parts[i];
        const matrix whole[2] = {{q, terms}, {q + rows * terms, terms}};
        const matrix cut[2] = {{q + p->row * terms + p->col, terms}, {q + (rows + p->row) * terms + p->col, terms}};
        OWNED(ar_device_destroy) ar_device *d = device(1);
        ar_packed *of_whole[2], *part[2], *alone[2];
        for (int s = 0; s < 2; s++) {
            of_whole[s] = packed_of(d, rows, terms, s == 0 ? AR_PACKED_LEFT : 0, of_matrix, &whole[s]);
            alone[s] = packed_of(d, p->rows, p->cols, s == 0 ? AR_PACKED_LEFT : 0, of_matrix, &cut[s]);
            cr_assert_ok(d->ops->packed_part(d, NULL, &part[s], of_whole[s], p));
        }
        OWNED(free) wide_int *want = sums_of(p->rows, p->rows, p->cols, &cut[0], &cut[1]);
        check_sums(d, part[0], alone[1], want, p->rows, p->rows, p->cols);
        check_sums(d, alone[0], part[1], want, p->rows, p->rows, p->cols);
        check_sums(d, part[0], part[1], want, p->rows, p->rows, p->cols);
        for (int s = 0; s < 2; s++) {
            d->ops->packed_destroy(d, NULL, part[s]);
            d->ops->packed_destroy(d, NULL, alone[s]);
            d->ops->packed_destroy(d, NULL, of_whole[s]);
        }
    }
}

/* Row i of A has its one term where row j of B has one if i = j: each term of a sum is its own, and none is lost. */
PATH_TEST(contract_integers, no_term_is_taken_for_another)
{
    enum { k = 131 };
    OWNED(free) int32_t *q = case_alloc(2 * k * k, sizeof *q);
    for (int32_t i = 0; i < k; i++) {
        q[i * k + i] = LARGEST;
        q[k * k + i * k + i] = -1 - 131 * i;
    }
    check_matrices(k, k, k, q, q + k * k, 0);
}
