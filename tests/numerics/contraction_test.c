/* SPDX-License-Identifier: Apache-2.0 */
/* The plain definition of a contraction against hand-computed cases, against an exact sum with its error bound, and
 * against the element steps that the kernels use, added in other orders and groups. numerics.md, section 2. */
#include "ref/numerics/scalar.h"
#include "support/together.h"
#include "tests/support/contraction.h"

typedef struct problem {
    size_t m, n, k;
    float *a, *b, *c; /* a [m,k], b [n,k], c [m,n] */
} problem;

static problem make(size_t m, size_t n, size_t k)
{
    problem p = {m, n, k, calloc(m * k, sizeof(float)), calloc(n * k, sizeof(float)), calloc(m * n, sizeof(float))};
    cr_assert(p.a != NULL && p.b != NULL && p.c != NULL);
    return p;
}

static void drop(problem *p)
{
    free(p->a);
    free(p->b);
    free(p->c);
}

static void define(const problem *p, bool scale)
{
    const ptrdiff_t k = (ptrdiff_t)p->k;
    cr_assert(ar_contract_definition(p->c, p->m, p->n, p->k, p->a, k, 1, p->b, k, 1, scale, false) == AR_OK);
}

static int32_t *column_shifts(const problem *p, bool scale)
{
    int32_t *c = malloc((p->k + 1) * sizeof *c);
    cr_assert(c != NULL);
    for (size_t k = 0; k < p->k; k++) {
        c[k] = ARI_EXP_ZERO;
        for (size_t j = 0; j < p->n; j++) {
            const int32_t e = ari_exponent32(p->b[j * p->k + k]);
            c[k] = e > c[k] ? e : c[k];
        }
        c[k] = !scale || c[k] == ARI_EXP_NONFINITE ? 0 : c[k];
    }
    return c;
}

/* Exponent and integers of one row; sign +1 for A, -1 for B. */
static int32_t quantise_row(int32_t *q, const float *x, size_t k_count, const int32_t *c, int sign)
{
    int32_t e = ARI_EXP_ZERO;
    for (size_t k = 0; k < k_count; k++) {
        const int32_t own = ari_exponent32(x[k]);
        int32_t moved = own;
        if (own != ARI_EXP_NONFINITE)
            moved = own == ARI_EXP_ZERO || c[k] == ARI_EXP_ZERO ? ARI_EXP_ZERO : own + sign * c[k];
        e = moved > e ? moved : e;
    }
    for (size_t k = 0; k < k_count; k++)
        q[k] = c[k] == ARI_EXP_ZERO ? 0 : ari_contract_quantise(x[k], sign * c[k], e);
    return e;
}

/* Blocks of `block` terms from the last to the first, each split into two limbs; inside a block `stride` apart. */
static float stepped_dot(const int32_t *qa, int32_t e, const int32_t *qb, int32_t f, size_t k_count, size_t block,
                         size_t stride)
{
    int64_t hi = 0, lo = 0, whole = 0;
    for (size_t done = k_count; done > 0;) {
        const size_t n = done < block ? done : block;
        const size_t first = done - n;
        int64_t s = 0;
        for (size_t phase = 0; phase < stride; phase++)
            for (size_t i = phase; i < n; i += stride)
                s = ari_add64(s, (int64_t)qa[first + i] * qb[first + i]);
        const int64_t low = (int64_t)((uint64_t)s & 0xffffffffu);
        lo = ari_add64(lo, low);
        hi = ari_add64(hi, (s - low) / 4294967296);
        whole = ari_add64(whole, s);
        done = first;
    }
    const float limbs = ari_contract_value2(hi, lo, e, f);
    if (k_count <= ARI_CONTRACT_BLOCK)
        cr_assert(ari_bits32(limbs) == ari_bits32(ari_contract_value(whole, e, f)));
    return limbs;
}

static void expect_steps_agree(const problem *p, bool scale, const char *what)
{
    OWNED(free)
    int32_t *c = column_shifts(p, scale), *qa = malloc((p->k + 1) * sizeof *qa), *qb = malloc((p->k + 1) * sizeof *qb);
    cr_assert(qa != NULL && qb != NULL);
    define(p, scale);
    for (size_t i = 0; i < p->m; i++)
        for (size_t j = 0; j < p->n; j++) {
            const int32_t e = quantise_row(qa, p->a + i * p->k, p->k, c, 1);
            const int32_t f = quantise_row(qb, p->b + j * p->k, p->k, c, -1);
            const uint32_t want = ari_bits32(p->c[i * p->n + j]);
            const size_t blocks[] = {8191, 1000, 7};
            for (size_t t = 0; t < 3; t++) {
                const uint32_t got = ari_bits32(stepped_dot(qa, e, qb, f, p->k, blocks[t], t + 1));
                cr_assert(got == want, "%s [%zu,%zu] blocks of %zu: %08x, defined %08x", what, i, j, blocks[t], got,
                          want);
            }
        }
}

static uint32_t word(uint64_t i)
{
    return ari_random_u32(0xc0117ac7, i, 0, 0);
}

typedef float (*generator)(uint64_t i, size_t row, size_t k);

static float gaussian(uint64_t i, size_t row, size_t k)
{
    (void)row, (void)k;
    return ari_random_normal(0x6a55, i, 1.0);
}

static float any_finite(uint64_t i, size_t row, size_t k)
{
    (void)row, (void)k;
    const uint32_t u = word(i);
    return ari_float32((u & 0x7f800000u) == 0x7f800000u ? u & 0xbfffffffu : u);
}

static float subnormal(uint64_t i, size_t row, size_t k)
{
    (void)row, (void)k;
    return ari_float32(word(i) & 0x80ffffffu);
}

static float largest(uint64_t i, size_t row, size_t k)
{
    (void)row, (void)k;
    return ari_float32(0x7f7fffffu | (word(i) & 0x80000000u));
}

static float sparse(uint64_t i, size_t row, size_t k)
{
    (void)row, (void)k;
    return word(i) % 4 == 0 ? ari_random_normal(9, i, 1e10) : (word(i) % 2 == 0 ? 0.0f : -0.0f);
}

/* Columns of B all zero beside columns near 1e-6; in A the same generator puts its largest values there. */
static float zero_columns(uint64_t i, size_t row, size_t k)
{
    (void)row;
    return k % 5 == 3 ? 0.0f : ari_random_normal(3, i, 1e-6);
}

static float outlier_columns(uint64_t i, size_t row, size_t k)
{
    (void)row;
    return ari_random_normal(4, i, k % 5 == 3 ? 3e4 : 1.0);
}

static float bad_rows(uint64_t i, size_t row, size_t k)
{
    if (row == 1 && k == 0)
        return ari_float32(0xff800001u);
    if (row == 2 && k % 7 == 0)
        return -INFINITY;
    return row == 3 ? 0.0f : gaussian(i, row, k);
}

typedef struct family {
    const char *name;
    generator a, b;
} family;

static const family families[] = {
    {"gaussian", gaussian, gaussian},
    {"all finite patterns", any_finite, any_finite},
    {"subnormal", subnormal, subnormal},
    {"subnormal times largest", subnormal, largest},
    {"largest", largest, largest},
    {"zeros of both signs", sparse, sparse},
    {"zero columns", outlier_columns, zero_columns},
    {"outliers in B", zero_columns, outlier_columns},
    {"NaN and infinity in A", bad_rows, gaussian},
    {"NaN and infinity in B", gaussian, bad_rows},
    {"NaN meets zero columns", bad_rows, zero_columns},
    {"NaN meets zero rows", bad_rows, bad_rows},
};
enum { FAMILIES = sizeof families / sizeof families[0] };

static void fill(problem *p, const family *f)
{
    for (size_t r = 0; r < p->m; r++)
        for (size_t k = 0; k < p->k; k++)
            p->a[r * p->k + k] = f->a(r * p->k + k, r, k);
    for (size_t r = 0; r < p->n; r++)
        for (size_t k = 0; k < p->k; k++)
            p->b[r * p->k + k] = f->b(0x10000000 + r * p->k + k, r, k);
}

CLAIM(element_steps_in_any_order_and_grouping_give_the_defined_bits)
{
    static const size_t lengths[] = {1, 2, 17, 300, 8190, 8191, 8192, 40000};
    for (size_t f = 0; f < FAMILIES; f++)
        for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++) {
            problem p = make(4, 4, lengths[l]);
            fill(&p, &families[f]);
            expect_steps_agree(&p, true, families[f].name);
            expect_steps_agree(&p, false, families[f].name);
            drop(&p);
        }
}

/* |error| <= K*2^-24*max|A'[i,:]|*max|B'[j,:]| + the final rounding, A' and B' the equilibrated operands (without step
 * 0: the operands). Long double sums are exact enough to judge: 2^-64 a term. */
static void expect_bound(const problem *p, bool scale, const char *what)
{
    OWNED(free) int32_t *c = column_shifts(p, scale);
    define(p, scale);
    for (size_t i = 0; i < p->m; i++)
        for (size_t j = 0; j < p->n; j++) {
            long double exact = 0.0L, a_max = 0.0L, b_max = 0.0L;
            for (size_t k = 0; k < p->k; k++) {
                const long double x = (long double)p->a[i * p->k + k], y = (long double)p->b[j * p->k + k];
                const int shift = c[k] == ARI_EXP_ZERO ? -100000 : c[k];
                exact += x * y;
                a_max = fmaxl(a_max, fabsl(ldexpl(x, shift)));
                b_max = fmaxl(b_max, c[k] == ARI_EXP_ZERO ? 0.0L : fabsl(ldexpl(y, -shift)));
            }
            const long double error = fabsl((long double)p->c[i * p->n + j] - exact);
            const long double rounding = fabsl(exact) * 0x1.0001p-24L + 0x1p-150L;
            cr_assert(error <= (long double)p->k * 0x1p-24L * a_max * b_max + rounding, "%s [%zu,%zu]: off by %Lg",
                      what, i, j, error);
        }
}

CLAIM(error_stays_below_the_stated_bound)
{
    static const size_t judged[] = {0, 2, 3, 5, 6, 7};
    static const size_t lengths[] = {1, 5, 257, 9000};
    for (size_t f = 0; f < sizeof judged / sizeof judged[0]; f++)
        for (size_t l = 0; l < 4; l++) {
            problem p = make(3, 5, lengths[l]);
            fill(&p, &families[judged[f]]);
            expect_bound(&p, true, families[judged[f]].name);
            expect_bound(&p, false, families[judged[f]].name);
            drop(&p);
        }
}

/* --- worked cases ------------------------------------------------------------------------------------------------- */

CLAIM(small_integers_are_exact)
{
    const float a[] = {1, 2, 3, 4, 5, 6}, b[] = {1, 0, -1, 7, 8, 9};
    float c[4];
    for (int scale = 0; scale < 2; scale++) {
        cr_assert(ar_contract_definition(c, 2, 2, 3, a, 3, 1, b, 3, 1, scale != 0, false) == AR_OK);
        cr_assert(c[0] == -2.0f && c[1] == 50.0f && c[2] == -2.0f && c[3] == 122.0f);
    }
}

CLAIM(strides_read_transposed_operands)
{
    const float a_transposed[] = {1, 4, 2, 5, 3, 6}, b_transposed[] = {1, 7, 0, 8, -1, 9};
    float c[4];
    cr_assert(ar_contract_definition(c, 2, 2, 3, a_transposed, 1, 2, b_transposed, 1, 2, true, false) == AR_OK);
    cr_assert(c[0] == -2.0f && c[1] == 50.0f && c[2] == -2.0f && c[3] == 122.0f);
    const float backwards[] = {3, 2, 1, 6, 5, 4};
    cr_assert(ar_contract_definition(c, 2, 2, 3, backwards + 2, 3, -1, b_transposed, 1, 2, true, false) == AR_OK);
    cr_assert(c[0] == -2.0f && c[3] == 122.0f);
}

CLAIM(one_product_of_25_bit_values_is_exact)
{
    const float a[] = {0x1.fffffep0f}, b[] = {-0x1.fffffep-3f};
    float c;
    cr_assert(ar_contract_definition(&c, 1, 1, 1, a, 1, 1, b, 1, 1, true, false) == AR_OK);
    cr_assert(c == (float)((double)a[0] * (double)b[0]));
}

/* Without step 0 the small column's 24 bits below the outlier are lost; with it they are kept. */
CLAIM(equilibration_keeps_a_small_column_beside_a_large_one)
{
    const float a[] = {0x1p40f, 0.0f, 1.0f}, b[] = {0x1p-40f, 0.0f, 1.0f, -0x1p-40f, 0.0f, 1.0f};
    float scaled[2], plain[2];
    cr_assert(ar_contract_definition(scaled, 1, 2, 3, a, 3, 1, b, 3, 1, true, false) == AR_OK);
    cr_assert(ar_contract_definition(plain, 1, 2, 3, a, 3, 1, b, 3, 1, false, false) == AR_OK);
    cr_assert(scaled[0] == 2.0f && ari_bits32(scaled[1]) == 0u);
    cr_assert(plain[0] == 0.0f && plain[1] == 0.0f, "the element 2^-40 and the element 1 are both below their units");
}

/* A large A beside a zero column of B takes part in no exponent: the other column keeps all its bits. */
CLAIM(a_zero_column_of_b_takes_part_in_no_exponent)
{
    const float a[] = {0x1.fffffep127f, 0x1.555556p-20f}, b[] = {0.0f, 0x1p-20f};
    float c;
    cr_assert(ar_contract_definition(&c, 1, 1, 2, a, 2, 1, b, 2, 1, true, false) == AR_OK);
    cr_assert(c == 0x1.555556p-40f);
    const float bad[] = {INFINITY, 1.0f};
    cr_assert(ar_contract_definition(&c, 1, 1, 2, bad, 2, 1, b, 2, 1, true, false) == AR_OK);
    cr_assert(ari_bits32(c) == ARI_NAN_BITS, "but an infinity there still flags its row");
}

CLAIM(a_flagged_row_makes_its_results_nan_and_no_other)
{
    const float a[] = {1, 2, NAN, 1, 0, 0}, b[] = {1, 1, 0, 0};
    float c[6];
    cr_assert(ar_contract_definition(c, 3, 2, 2, a, 2, 1, b, 2, 1, true, false) == AR_OK);
    cr_assert(c[0] == 3.0f && ari_bits32(c[1]) == 0u, "an all-zero row of B gives +0");
    cr_assert(ari_bits32(c[2]) == ARI_NAN_BITS && ari_bits32(c[3]) == ARI_NAN_BITS,
              "NaN wins over an all-zero partner");
    cr_assert(ari_bits32(c[4]) == 0u && ari_bits32(c[5]) == 0u);
}

CLAIM(a_non_finite_column_of_b_is_not_scaled)
{
    const float a[] = {0x1p30f, 1.0f}, b[] = {INFINITY, 1.0f, 0x1p-30f, 1.0f};
    float c[2];
    cr_assert(ar_contract_definition(c, 1, 2, 2, a, 2, 1, b, 2, 1, true, false) == AR_OK);
    cr_assert(ari_bits32(c[0]) == ARI_NAN_BITS);
    /* c = 0 and 1: in A' the element 2 is 2^-5 of the unit of 2^30, in B' 2^-30 is 2^-5 of the unit of 1/2. Shifting
     * the first column by its finite element would give 2. */
    cr_assert(ari_bits32(c[1]) == 0u);
}

CLAIM(an_empty_sum_is_plus_zero)
{
    float c[4] = {1, 1, 1, 1};
    cr_assert(ar_contract_definition(c, 2, 2, 0, NULL, 0, 1, NULL, 0, 1, true, false) == AR_OK);
    for (int i = 0; i < 4; i++)
        cr_assert(ari_bits32(c[i]) == 0u);
}

CLAIM(a_finite_sum_may_overflow_to_infinity)
{
    const float a[] = {0x1p100f, 0x1p100f}, b[] = {0x1p100f, -0x1p100f};
    float c;
    cr_assert(ar_contract_definition(&c, 1, 1, 1, a, 2, 1, b, 2, 1, true, false) == AR_OK);
    cr_assert(ari_bits32(c) == 0x7f800000u);
    cr_assert(ar_contract_definition(&c, 1, 1, 2, a, 2, 1, b, 2, 1, true, false) == AR_OK);
    cr_assert(ari_bits32(c) == 0u, "while the whole sum cancels");
}

CLAIM(the_longest_block_of_largest_terms_fits_63_bits)
{
    problem p = make(1, 1, 8191);
    for (size_t k = 0; k < p.k; k++)
        p.a[k] = p.b[k] = 0x1.fffffep-1f;
    define(&p, true);
    cr_assert(p.c[0] == (float)(8191.0 * (double)0x1.fffffep-1f * (double)0x1.fffffep-1f));
    drop(&p);
}

CLAIM(refuses_null_operands_and_sizes_that_overflow)
{
    float c[1] = {7.0f}, x[1] = {1.0f};
    cr_assert(ar_contract_definition(NULL, 1, 1, 1, x, 1, 1, x, 1, 1, true, false) == AR_ERR_ARG);
    cr_assert(ar_contract_definition(c, 1, 1, 1, NULL, 1, 1, x, 1, 1, true, false) == AR_ERR_ARG);
    cr_assert(ar_contract_definition(c, 1, 1, 1, x, 1, 1, NULL, 1, 1, true, false) == AR_ERR_ARG);
    cr_assert(ar_contract_definition(c, SIZE_MAX, 1, 2, x, 1, 1, x, 1, 1, true, false) == AR_ERR_OVERFLOW);
    cr_assert(c[0] == 7.0f);
}

CLAIM(one_flipped_bit_is_seen)
{
    problem p = make(2, 2, 64);
    fill(&p, &families[0]);
    define(&p, true);
    const uint32_t before = ari_bits32(p.c[0]);
    p.a[5] = ari_float32(ari_bits32(p.a[5]) ^ 0x00010000u);
    define(&p, true);
    cr_assert(ari_bits32(p.c[0]) != before);
    drop(&p);
}

EVERY_CLAIM(contraction)
