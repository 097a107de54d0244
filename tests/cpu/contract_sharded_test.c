/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/integer_sum.h"
#include "tests/cpu/contract_paths.h"
#include "tests/support/contraction.h"

/* What ranks do with a contraction: exponents combined by maximum, integers of parts, partial sums added, rounding in
 * pieces. Whatever the cut, the bits are those of the definition on the whole operands. */
PATH_SUITE(contract_sharded, .timeout = 300);

typedef struct problem {
    size_t m, n, k;
    float *a, *b, *want;
} problem;

static problem problem_create(size_t m, size_t n, size_t k, data_kind a_kind, data_kind b_kind)
{
    problem p = {m, n, k, case_alloc(m * k, 4), case_alloc(n * k, 4), case_alloc(m * n, 4)};
    case_fill(p.a, m, k, a_kind, 5);
    case_fill(p.b, n, k, b_kind, 6);
    cr_assert_ok(ar_contract_definition(p.want, m, n, k, p.a, (ptrdiff_t)k, 1, p.b, (ptrdiff_t)k, 1, true, false));
    return p;
}

static void problem_destroy(problem *p)
{
    free(p->a);
    free(p->b);
    free(p->want);
}

/* Columns [from, to) of a row-major matrix. */
static ar_tensor columns(float *x, size_t rows, size_t cols, size_t from, size_t to)
{
    ar_tensor t = case_view2(x, rows, cols);
    return ar_tensor_slice(&t, 1, from, to - from);
}

/* K cut at cuts[0..parts]: each part computes its integers alone, the limbs are added, the result is rounded in pieces
 * of `piece` elements. */
static void check_sharded_k(const problem *p, const size_t *cuts, size_t parts, int limbs, size_t piece, int threads)
{
    OWNED(ar_device_destroy) ar_device *d = device(threads);
    const ar_device_ops *ops = d->ops;
    const size_t words = p->m * p->n * (size_t)limbs;
    OWNED(free) int32_t *c = case_alloc(p->k, 4), *e = case_alloc(p->m, 4), *f = case_alloc(p->n, 4);
    OWNED(free) int64_t *sum = case_alloc(words, 8), *partial = case_alloc(words, 8);
    OWNED(free) float *y = case_alloc(p->m * p->n, 4);
    for (size_t i = 0; i < parts; i++) {
        const ar_tensor a = columns(p->a, p->m, p->k, cuts[i], cuts[i + 1]);
        const ar_tensor b = columns(p->b, p->n, p->k, cuts[i], cuts[i + 1]);
        const ar_cbuf shifts = {c + cuts[i]};
        cr_assert_ok(ops->col_exponents(d, NULL, (ar_buf){c + cuts[i]}, &b, false));
        cr_assert_ok(ops->row_exponents(d, NULL, (ar_buf){e}, &a, shifts, 1, i > 0, false));
        cr_assert_ok(ops->row_exponents(d, NULL, (ar_buf){f}, &b, shifts, -1, i > 0, false));
    }
    for (size_t i = 0; i < parts; i++) {
        const ar_tensor a = columns(p->a, p->m, p->k, cuts[i], cuts[i + 1]);
        const ar_tensor b = columns(p->b, p->n, p->k, cuts[i], cuts[i + 1]);
        const ar_cbuf shifts = {c + cuts[i]};
        ar_packed *pa = NULL, *pb = NULL;
        cr_assert_ok(ops->packed_create(d, NULL, &pa, 1, p->m, cuts[i + 1] - cuts[i], true));
        cr_assert_ok(ops->packed_create(d, NULL, &pb, 1, p->n, cuts[i + 1] - cuts[i], false));
        cr_assert_ok(ops->pack(d, NULL, pa, 0, 0, &a, shifts, 1, (ar_cbuf){e}));
        cr_assert_ok(ops->pack(d, NULL, pb, 0, 0, &b, shifts, -1, (ar_cbuf){f}));
        memset(partial, 0x77, words * sizeof *partial);
        cr_assert_ok(ops->gemm_i64(d, NULL, (ar_buf){partial}, pa, pb, limbs, false));
        for (size_t j = 0; j < words; j++)
            sum[j] = ari_add64(sum[j], partial[j]);
        ops->packed_destroy(d, NULL, pa);
        ops->packed_destroy(d, NULL, pb);
    }
    for (size_t start = 0; start < p->m * p->n; start += piece) {
        const size_t count = p->m * p->n - start < piece ? p->m * p->n - start : piece;
        cr_assert_ok(ops->round_i64(d, NULL, (ar_buf){y + start}, (ar_cbuf){sum + start * (size_t)limbs}, limbs, start,
                                    count, p->n, (ar_cbuf){e}, (ar_cbuf){f}));
    }
    same_bits(y, p->want, p->m * p->n, limbs == 1 ? "one limb" : "two limbs");
}

PATH_TEST(contract_sharded, k_in_uneven_parts_gives_the_bits_of_the_whole)
{
    const size_t cuts[][6] = {{0, 301}, {0, 1, 301}, {0, 100, 200, 301}, {0, 7, 7, 150, 300, 301}};
    const size_t parts[] = {1, 2, 3, 5};
    for (int kind = 0; kind < DATA_KINDS; kind++) {
        SCOPED(problem_destroy)
        problem p = problem_create(19, 23, 301, (data_kind)kind, kind % 2 ? DATA_PLAIN : DATA_TINY_COLS);
        for (size_t i = 0; i < 4; i++) {
            check_sharded_k(&p, cuts[i], parts[i], 1, 19 * 23, 1);
            check_sharded_k(&p, cuts[i], parts[i], 1, 50, 2);
            check_sharded_k(&p, cuts[i], parts[i], 2, 31, 3);
        }
    }
}

PATH_TEST(contract_sharded, one_limb_holds_the_largest_sum_of_8191_terms)
{
    SCOPED(problem_destroy) problem p = problem_create(3, 2, 8191, DATA_ONES, DATA_ONES);
    check_sharded_k(&p, (const size_t[]){0, 8191}, 1, 1, 6, 1);
    check_sharded_k(&p, (const size_t[]){0, 4000, 8191}, 2, 1, 5, 1);
}

PATH_TEST(contract_sharded, two_limbs_hold_sums_of_40000_terms)
{
    const data_kind kinds[][2] = {{DATA_ONES, DATA_ONES},      {DATA_LARGEST, DATA_LARGEST}, {DATA_ONES, DATA_PLAIN},
                                  {DATA_LARGEST, DATA_SPREAD}, {DATA_SPREAD, DATA_LARGEST},  {DATA_PLAIN, DATA_ONES}};
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        SCOPED(problem_destroy) problem p = problem_create(4, 3, 40000, kinds[i][0], kinds[i][1]);
        check_sharded_k(&p, (const size_t[]){0, 40000}, 1, 2, 12, 1);
        check_sharded_k(&p, (const size_t[]){0, 8192, 17000, 40000}, 3, 2, 5, 2);
    }
}

PATH_TEST(contract_sharded, two_limbs_lose_nothing_of_a_million_terms)
{
    SCOPED(problem_destroy)
    problem p = {1, 1, 1000000, case_alloc(1000000, 4), case_alloc(1000000, 4), case_alloc(1, 4)};
    case_fill_cancelling(p.a, p.b, p.k); /* the sum is 0, as p.want is */
    check_sharded_k(&p, (const size_t[]){0, 1000000}, 1, 2, 1, 1);
    check_sharded_k(&p, (const size_t[]){0, 500001, 1000000}, 2, 2, 1, 1);
}

static int64_t quantised(float x, int32_t c, int32_t sign, int32_t e)
{
    if (c == ARI_EXP_ZERO || e == ARI_EXP_NONFINITE)
        return 0;
    return ari_contract_quantise(x, c == ARI_EXP_NONFINITE ? 0 : sign * c, e);
}

/* hi*2^32 + lo of gemm_i64 is the plain sum of the quantised products, for one limb and for two. */
static void check_integers(data_kind kind)
{
    enum { m = 9, n = 11, k = 200 };
    OWNED(ar_device_destroy) ar_device *d = device(1);
    OWNED(free) float *a = case_alloc(m * k, 4), *b = case_alloc(n * k, 4);
    int64_t one[m * n], two[2 * m * n];
    case_fill(a, m, k, kind, 1);
    case_fill(b, n, k, kind, 2);
    const ar_tensor av = case_view2(a, m, k), bv = case_view2(b, n, k);
    prepared p;
    cr_assert_ok(prepared_create(&p, d, &av, &bv, true, false));
    cr_assert_ok(d->ops->gemm_i64(d, NULL, (ar_buf){one}, p.a, p.b, 1, false));
    cr_assert_ok(d->ops->gemm_i64(d, NULL, (ar_buf){two}, p.a, p.b, 2, false));
    const int32_t *c = p.c.ptr, *e = p.e.ptr, *f = p.f.ptr;
    for (size_t i = 0; i < m * n; i++) {
        int64_t want = 0;
        for (size_t t = 0; t < k; t++)
            want += quantised(a[i / n * k + t], c[t], 1, e[i / n]) * quantised(b[i % n * k + t], c[t], -1, f[i % n]);
        cr_assert_eq(one[i], want, "element %zu: got %lld, expected %lld", i, (long long)one[i], (long long)want);
        cr_assert_eq(two[2 * i] * 4294967296 + two[2 * i + 1], want, "limbs of element %zu", i);
        cr_assert(two[2 * i + 1] >= 0 && two[2 * i + 1] < 4294967296, "low limb of element %zu", i);
    }
    prepared_destroy(&p, d);
}

PATH_TEST(contract_sharded, integers_are_the_sum_of_quantised_products)
{
    for (int kind = 0; kind < DATA_KINDS; kind++)
        check_integers((data_kind)kind);
}

/* round_i64 against ari_contract_value on sums, exponents and flags of every kind; pieces stand in memory of their own,
 * so that an element outside a piece shows. */
Test(contract_sharded, rounding_any_piece_is_ari_contract_value)
{
    enum { m = 7, n = 29, guard = 4 };
    uint64_t random = 99;
    int32_t e[m], f[n];
    for (size_t i = 0; i < m + n; i++) {
        const int32_t special = i % 9 == 4 ? ARI_EXP_ZERO : ARI_EXP_NONFINITE;
        *(i < m ? &e[i] : &f[i - m]) = i % 5 == 4 ? special : (int32_t)(case_random(&random) % 240) - 120;
    }
    for (int i = 0; i < 300; i++) {
        OWNED(ar_device_destroy) ar_device *d = device(1);
        const int limbs = 1 + i % 2;
        const size_t start = case_random(&random) % (m * n), count = case_random(&random) % (m * n - start + 1);
        OWNED(free) int64_t *s = case_alloc(count * (size_t)limbs, 8);
        OWNED(free) float *y = case_alloc(count + 2 * guard, 4);
        for (size_t j = 0; j < count * (size_t)limbs; j++)
            s[j] =
                (int64_t)(((uint64_t)case_random(&random) << 32) | case_random(&random)) >> case_random(&random) % 50;
        cr_assert_ok(d->ops->round_i64(d, NULL, (ar_buf){y + guard}, (ar_cbuf){s}, limbs, start, count, n, (ar_cbuf){e},
                                       (ar_cbuf){f}));
        for (size_t j = 0; j < count + 2 * guard; j++) {
            const size_t at = start + j - guard;
            float want = 0.0f;
            if (j >= guard && j < count + guard && limbs == 1)
                want = ari_contract_value(s[j - guard], e[at / n], f[at % n]);
            else if (j >= guard && j < count + guard)
                want = ari_contract_value2(s[2 * (j - guard)], s[2 * (j - guard) + 1], e[at / n], f[at % n]);
            cr_assert_eq(ari_bits32(y[j]), ari_bits32(want),
                         "start %zu count %zu limbs %d: element %zu: %08x, not %08x", start, count, limbs, j,
                         ari_bits32(y[j]), ari_bits32(want));
        }
    }
}

/* Parts packed side by side along k (a fused dX) and along the rows of one operand, out of order. */
PATH_TEST(contract_sharded, parts_packed_into_one_operand_are_one_contraction)
{
    enum { m = 21, n = 34, k = 310, cut = 130, row_cut = 5 };
    SCOPED(problem_destroy) problem p = problem_create(m, n, k, DATA_SPREAD, DATA_NONFINITE);
    OWNED(ar_device_destroy) ar_device *d = device(2);
    const ar_device_ops *ops = d->ops;
    int32_t c[k], e[m], f[n];
    OWNED(free) float *y = case_alloc(m * n, 4);
    ar_packed *pa = NULL, *pb = NULL;
    const ar_tensor bv = case_view2(p.b, n, k);
    const ar_tensor upper = ar_tensor_slice(&bv, 0, 0, row_cut), lower = ar_tensor_slice(&bv, 0, row_cut, n - row_cut);
    cr_assert_ok(ops->col_exponents(d, NULL, (ar_buf){c}, &lower, false));
    cr_assert_ok(ops->col_exponents(d, NULL, (ar_buf){c}, &upper, true));
    cr_assert_ok(ops->row_exponents(d, NULL, (ar_buf){f}, &upper, (ar_cbuf){c}, -1, false, false));
    cr_assert_ok(ops->row_exponents(d, NULL, (ar_buf){f + row_cut}, &lower, (ar_cbuf){c}, -1, false, false));
    cr_assert_ok(ops->packed_create(d, NULL, &pa, 1, m, k, true));
    cr_assert_ok(ops->packed_create(d, NULL, &pb, 1, n, k, false));
    const ar_tensor left = columns(p.a, m, k, 0, cut), right = columns(p.a, m, k, cut, k);
    cr_assert_ok(ops->row_exponents(d, NULL, (ar_buf){e}, &right, (ar_cbuf){c + cut}, 1, false, false));
    cr_assert_ok(ops->row_exponents(d, NULL, (ar_buf){e}, &left, (ar_cbuf){c}, 1, true, false));
    cr_assert_ok(ops->pack(d, NULL, pa, 0, cut, &right, (ar_cbuf){c + cut}, 1, (ar_cbuf){e}));
    cr_assert_ok(ops->pack(d, NULL, pa, 0, 0, &left, (ar_cbuf){c}, 1, (ar_cbuf){e}));
    cr_assert_ok(ops->pack(d, NULL, pb, row_cut, 0, &lower, (ar_cbuf){c}, -1, (ar_cbuf){f}));
    cr_assert_ok(ops->pack(d, NULL, pb, 0, 0, &upper, (ar_cbuf){c}, -1, (ar_cbuf){f}));
    const ar_tensor yv = case_view2(y, m, n);
    cr_assert_ok(
        ops->gemm_round(d, NULL, &yv, pa, pb, (ar_cbuf){e}, (ar_cbuf){f}, (ar_cbuf){NULL}, AR_ACT_NONE, NULL, NULL));
    same_bits(y, p.want, m * n, "parts");
    ops->packed_destroy(d, NULL, pa);
    ops->packed_destroy(d, NULL, pb);
}

/* Exponents against ari_exponent32, on contiguous, transposed and strided views, alone and into what is there. */
Test(contract_sharded, exponents_are_the_maximum_over_the_group)
{
    enum { rows = 40, cols = 700 };
    for (int kind = 0; kind < DATA_KINDS; kind++)
        for (int layout = 0; layout < 3; layout++) {
            OWNED(ar_device_destroy) ar_device *d = device(1 + kind % 3);
            OWNED(free) float *x = case_alloc(rows * cols * 2, 4);
            int32_t row[rows], col[cols], start = kind == 0 ? 3 : ARI_EXP_ZERO;
            case_fill(x, rows, cols * 2, (data_kind)kind, 9);
            const ptrdiff_t rs = layout == 1 ? 1 : layout == 0 ? cols : cols * 2;
            const ptrdiff_t cs = layout == 1 ? rows : layout == 0 ? 1 : 2;
            const ar_tensor t = {.dtype = AR_F32, .ndim = 2, .shape = {rows, cols}, .stride = {rs, cs}, .data = {x}};
            for (size_t i = 0; i < cols; i++)
                col[i] = start;
            cr_assert_ok(d->ops->row_exponents(d, NULL, (ar_buf){row}, &t, (ar_cbuf){NULL}, 1, false, false));
            cr_assert_ok(d->ops->col_exponents(d, NULL, (ar_buf){col}, &t, true));
            int32_t want_row[rows], want_col[cols];
            for (size_t i = 0; i < rows; i++)
                want_row[i] = ARI_EXP_ZERO;
            for (size_t k = 0; k < cols; k++)
                want_col[k] = start;
            for (size_t i = 0; i < rows; i++)
                for (size_t k = 0; k < cols; k++) {
                    const int32_t e = ari_exponent32(x[(ptrdiff_t)i * rs + (ptrdiff_t)k * cs]);
                    want_row[i] = e > want_row[i] ? e : want_row[i];
                    want_col[k] = e > want_col[k] ? e : want_col[k];
                }
            cr_assert_eq(memcmp(row, want_row, sizeof row), 0, "rows, data %d, layout %d", kind, layout);
            cr_assert_eq(memcmp(col, want_col, sizeof col), 0, "columns, data %d, layout %d", kind, layout);
        }
}

/* The specials of c: an all-zero column is left out, a flagged one counts as unshifted, and a NaN flags its row even on
 * a column that is left out. */
Test(contract_sharded, row_exponents_honour_the_specials_of_c)
{
    const int32_t c[3] = {ARI_EXP_ZERO, ARI_EXP_NONFINITE, -10};
    float x[5 * 3] = {8, 2, 1024, 8, 0, 0, NAN, 1, 1, 8, 0, 64, INFINITY, 0, 0};
    int32_t plus[5], minus[5];
    OWNED(ar_device_destroy) ar_device *d = device(1);
    const ar_tensor t = case_view2(x, 5, 3);
    cr_assert_ok(d->ops->row_exponents(d, NULL, (ar_buf){plus}, &t, (ar_cbuf){c}, 1, false, false));
    cr_assert_ok(d->ops->row_exponents(d, NULL, (ar_buf){minus}, &t, (ar_cbuf){c}, -1, false, false));
    const int32_t want_plus[5] = {2, ARI_EXP_ZERO, ARI_EXP_NONFINITE, -3, ARI_EXP_NONFINITE};
    const int32_t want_minus[5] = {21, ARI_EXP_ZERO, ARI_EXP_NONFINITE, 17, ARI_EXP_NONFINITE};
    for (size_t i = 0; i < 5; i++) {
        cr_expect_eq(plus[i], want_plus[i], "row %zu: got %d, expected %d", i, plus[i], want_plus[i]);
        cr_expect_eq(minus[i], want_minus[i], "row %zu: got %d, expected %d", i, minus[i], want_minus[i]);
    }
}
