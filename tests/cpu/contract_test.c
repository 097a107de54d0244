/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/activation.h"
#include "ref/core/tensor_private.h"
#include "tests/cpu/contract_paths.h"
#include "tests/support/contraction.h"

/* The exact contraction of the CPU device against its definition in 128-bit integers (tests/support/contraction.c):
 * every comparison is of bits, and on every path. */
PATH_SUITE(contract, .timeout = 300);

/* Both operands row-major, against the definition. */
static void check_form(size_t m, size_t n, size_t k, data_kind a_kind, data_kind b_kind, bool scale, bool narrow,
                       int threads)
{
    OWNED(ar_device_destroy) ar_device *d = device(threads);
    OWNED(free)
    float *a = case_alloc(m * k, 4), *b = case_alloc(n * k, 4), *y = case_alloc(m * n, 4), *want = case_alloc(m * n, 4);
    case_fill(a, m, k, a_kind, m + 3 * k);
    case_fill(b, n, k, b_kind, n + 7 * k);
    memset(y, 0x55, m * n * sizeof *y);
    const ar_tensor av = case_view2(a, m, k), bv = case_view2(b, n, k), yv = case_view2(y, m, n);
    cr_assert_ok(case_product(d, &yv, &av, &bv, scale, narrow));
    cr_assert_ok(ar_contract_definition(want, m, n, k, a, (ptrdiff_t)k, 1, b, (ptrdiff_t)k, 1, scale, narrow));
    char what[128];
    (void)snprintf(what, sizeof what, "m %zu n %zu k %zu, data %d x %d, scale %d, narrow %d, %d threads", m, n, k,
                   (int)a_kind, (int)b_kind, (int)scale, (int)narrow, threads);
    same_bits(y, want, m * n, what);
}

static void check_shape(size_t m, size_t n, size_t k, data_kind a_kind, data_kind b_kind, bool scale, int threads)
{
    check_form(m, n, k, a_kind, b_kind, scale, false, threads);
    check_form(m, n, k, a_kind, b_kind, scale, true, threads);
}

static const struct shape {
    size_t m, n, k;
} shapes[] = {{0, 5, 3},    {4, 0, 3},    {5, 4, 0},    {1, 1, 1},    {3, 5, 7},    {17, 33, 65},
              {64, 64, 32}, {1, 70, 100}, {70, 1, 100}, {13, 9, 513}, {2, 3, 8191}, {3, 2, 8192}};

PATH_TEST(contract, gives_the_bits_of_the_definition_for_every_pair_of_data)
{
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        const int step = shapes[s].k > 1000 ? 5 : 1; /* of long sums every kind for either operand */
        for (int kinds = 0; kinds < DATA_KINDS * DATA_KINDS; kinds += step)
            check_shape(shapes[s].m, shapes[s].n, shapes[s].k, (data_kind)(kinds / DATA_KINDS),
                        (data_kind)(kinds % DATA_KINDS), kinds % 3 != 1, 1 + kinds % 3);
    }
}

PATH_TEST(contract, gives_the_same_bits_with_and_without_equilibration_on_1_2_3_threads)
{
    for (int threads = 1; threads <= 3; threads++)
        for (int scale = 0; scale < 2; scale++) {
            check_shape(130, 67, 450, DATA_SPREAD, DATA_TINY_COLS, scale, threads);
            check_shape(67, 70, 450, DATA_NONFINITE, DATA_SPREAD, scale, threads);
        }
}

PATH_TEST(contract, is_exact_for_tiles_larger_than_one)
{
    check_shape(700, 1100, 40, DATA_PLAIN, DATA_SPREAD, true, 2);
    check_shape(1100, 70, 33, DATA_SPREAD, DATA_PLAIN, true, 1);
}

/* Register tiles are 4 to 32 rows by 8 to 32 columns, panels are packed up to 16 terms at a time. */
PATH_TEST(contract, is_exact_for_every_remainder_of_a_register_tile)
{
    for (size_t m = 1; m <= 17; m += m == 1 ? 6 : m == 9 ? 7 : 1)
        for (size_t n = 1; n <= 50; n++)
            check_shape(m, n, 1 + (m + n) % 19, n % 2 ? DATA_PLAIN : DATA_LARGEST, DATA_SPREAD, n % 3 == 0, 1);
}

/* Slices of K: one, one and a bit, several of unequal length; with results of more than one tile. */
PATH_TEST(contract, is_exact_for_every_remainder_of_a_slice)
{
    for (size_t k = 376; k <= 392; k++)
        check_shape(9, 26, k, DATA_LARGEST, DATA_PLAIN, true, 1);
    for (size_t k = 760; k <= 776; k++)
        check_shape(17, 9, k, DATA_PLAIN, DATA_LARGEST, false, 1);
    for (size_t k = 318; k <= 1345; k += k % 64 == 1 ? 61 : 1) /* about multiples of 64 */
        check_shape(3, 5, k, DATA_PLAIN, DATA_LARGEST, true, 1);
    check_shape(530, 40, 393, DATA_PLAIN, DATA_SPREAD, true, 2);
    check_shape(20, 790, 393, DATA_SPREAD, DATA_PLAIN, true, 2);
}

PATH_TEST(contract, is_exact_for_sums_of_40000_terms_and_more_than_65536)
{
    check_shape(3, 4, 40000, DATA_PLAIN, DATA_SPREAD, true, 1);
    check_shape(3, 4, 40000, DATA_SPREAD, DATA_PLAIN, false, 2);
    check_shape(5, 3, 131073, DATA_PLAIN, DATA_TINY_COLS, true, 2);
    check_shape(4, 3, 70001, DATA_NONFINITE, DATA_PLAIN, true, 1);
}

/* All integers 2^25 - 2 of one sign: the partial sums come as near to 2^53, and S to 2^63, as they can. */
PATH_TEST(contract, is_exact_where_partial_sums_are_largest)
{
    const size_t terms[] = {8191, 8192, 65535, 65536, 65537, 131072};
    for (size_t i = 0; i < sizeof terms / sizeof terms[0]; i++) {
        check_shape(2, 2, terms[i], DATA_ONES, DATA_ONES, true, 1);
        check_shape(2, 2, terms[i], DATA_LARGEST, DATA_ONES, false, 1);
    }
}

/* A binary64 sum of all the positive halves would pass 2^54 and lose its low bits, which then stay when the rest
 * cancels. */
PATH_TEST(contract, a_million_terms_cancel_to_plus_zero)
{
    const size_t k = 1000000;
    OWNED(ar_device_destroy) ar_device *d = device(1);
    float *a = case_alloc(k, 4), *b = case_alloc(k, 4), y = 1.0f;
    case_fill_cancelling(a, b, k);
    const ar_tensor av = case_view2(a, 1, k), bv = case_view2(b, 1, k), yv = case_view2(&y, 1, 1);
    cr_assert_ok(case_product(d, &yv, &av, &bv, true, false));
    cr_assert_eq(ari_bits32(y), 0u, "got %08x", ari_bits32(y));
    free(a);
    free(b);
}

/* Why halves of left integers are summed over 2^16 terms and no more: half of these terms pass 2^53 and end with an odd
 * product, whose last bit a binary64 sum over all of them would lose. The negatives, in the same order, take the sum
 * back. Those before the odd one are even and cost no rounding, so that what was lost would remain. */
PATH_TEST(contract, an_odd_sum_beyond_2_to_the_53_cancels_to_plus_zero)
{
    enum { half = 65 * 1024, k = 2 * half }; /* half: whole slices */
    OWNED(ar_device_destroy) ar_device *d = device(1);
    float *a = case_alloc(k, 4), *b = case_alloc(k, 4), y = 1.0f;
    case_fill(a, 1, k, DATA_ONES, 1);
    case_fill(b, 1, k, DATA_ONES, 2);
    a[half - 1] = 0x1p-12f;           /* qA = 2^13, whose upper half is 1 */
    b[half - 1] = 0x1p-1f - 0x1p-25f; /* qB = 2^24 - 1 */
    for (size_t i = 0; i < half; i++) {
        a[half + i] = -a[i];
        b[half + i] = b[i];
    }
    const ar_tensor av = case_view2(a, 1, k), bv = case_view2(b, 1, k), yv = case_view2(&y, 1, 1);
    cr_assert_ok(case_product(d, &yv, &av, &bv, false, false));
    cr_assert_eq(ari_bits32(y), 0u, "got %08x", ari_bits32(y));
    free(a);
    free(b);
}

/* a is stored transposed, b with gaps, y with longer rows: the bits of the contiguous product. */
PATH_TEST(contract, takes_transposed_and_strided_views)
{
    enum { m = 37, n = 45, k = 300, gap = 3, ld = 64 };
    OWNED(ar_device_destroy) ar_device *d = device(2);
    OWNED(free) float *a = case_alloc(m * k, 4), *b = case_alloc(n * k * gap, 4), *y = case_alloc(m * ld, 4);
    OWNED(free) float *want = case_alloc(m * n, 4), *got = case_alloc(m * n, 4);
    case_fill(a, k, m, DATA_SPREAD, 1);
    case_fill(b, n, k * gap, DATA_PLAIN, 2);
    const ar_tensor stored = case_view2(a, k, m), av = ari_tensor_transposed(&stored);
    const ar_tensor bv = {.dtype = AR_F32, .ndim = 2, .shape = {n, k}, .stride = {k * gap, gap}, .data = {b}};
    ar_tensor yv = case_view2(y, m, n);
    yv.stride[0] = ld;
    y[n] = 42.0f;
    cr_assert_ok(case_product(d, &yv, &av, &bv, true, false));
    cr_assert_ok(ar_contract_definition(want, m, n, k, a, 1, m, b, k * gap, gap, true, false));
    for (size_t i = 0; i < m; i++)
        memcpy(got + i * n, y + i * ld, n * sizeof *y);
    same_bits(got, want, m * n, "strided");
    cr_assert_eq(y[n], 42.0f, "the gap after a row of y was written");
}

/* Attention's views: q and k stored [b, s, heads, d], seen as [b, heads, s, d]; a batch of 6 products, each with its
 * own shifts and exponents. */
PATH_TEST(contract, runs_a_batch_of_permuted_heads)
{
    enum { b = 2, s = 33, h = 3, w = 40 };
    for (int threads = 1; threads <= 3; threads++) {
        OWNED(ar_device_destroy) ar_device *d = device(threads);
        OWNED(free) float *q = case_alloc(b * s * h * w, 4), *k = case_alloc(b * s * h * w, 4);
        OWNED(free) float *y = case_alloc(b * h * s * s, 4), *want = case_alloc(s * s, 4);
        case_fill(q, b * s, h * w, DATA_SPREAD, 11);
        case_fill(k, b * s, h * w, DATA_TINY_COLS, 12);
        q[5] = NAN;
        ar_tensor qv = {
            .dtype = AR_F32, .ndim = 4, .shape = {b, h, s, w}, .stride = {s * h * w, w, h * w, 1}, .data = {q}};
        ar_tensor kv = qv, yv;
        kv.data.ptr = k;
        cr_assert_ok(ar_tensor_view(&yv, AR_F32, 4, (const size_t[]){b, h, s, s}, (ar_buf){y}));
        cr_assert_ok(case_product(d, &yv, &qv, &kv, true, false));
        for (size_t i = 0; i < b * h; i++) {
            const size_t at = i / h * s * h * w + i % h * w;
            cr_assert_ok(ar_contract_definition(want, s, s, w, q + at, h * w, 1, k + at, h * w, 1, true, false));
            same_bits(y + i * s * s, want, s * s, "head");
        }
    }
}

/* y = fl32(product + bias), z = act(y): the same bits as the product, then bias_act. */
PATH_TEST(contract, bias_and_activation_in_the_epilogue_are_those_of_bias_act)
{
    enum { m = 70, n = 200, k = 50 };
    const ar_activation acts[] = {AR_ACT_NONE, AR_ACT_GELU_ERF, AR_ACT_GELU_TANH, AR_ACT_SILU, AR_ACT_RELU};
    OWNED(ar_device_destroy) ar_device *d = device(2);
    OWNED(free) float *a = case_alloc(m * k, 4), *b = case_alloc(n * k, 4), *bias = case_alloc(n, 4);
    OWNED(free)
    float *y = case_alloc(m * n, 4), *z = case_alloc(m * n, 4), *y2 = case_alloc(m * n, 4), *z2 = case_alloc(m * n, 4);
    case_fill(a, m, k, DATA_NONFINITE, 1);
    case_fill(b, n, k, DATA_PLAIN, 2);
    case_fill(bias, 1, n, DATA_SPREAD, 3);
    const ar_tensor av = case_view2(a, m, k), bv = case_view2(b, n, k), yv = case_view2(y, m, n);
    const ar_tensor zv = case_view2(z, m, n), y2v = case_view2(y2, m, n), z2v = case_view2(z2, m, n);
    prepared p;
    cr_assert_ok(prepared_create(&p, d, &av, &bv, true, false));
    for (int i = 0; i < 10; i++) {
        const ar_cbuf added = {i < 5 ? bias : NULL};
        cr_assert_ok(
            d->ops->gemm_round(d, NULL, &yv, p.a, p.b, ar_const(p.e), ar_const(p.f), added, acts[i % 5], &zv, NULL));
        cr_assert_ok(case_product(d, &y2v, &av, &bv, true, false));
        cr_assert_ok(d->ops->bias_act(d, NULL, &y2v, added, acts[i % 5], &z2v));
        same_bits(y, y2, m * n, "y");
        same_bits(z, z2, m * n, "z");
    }
    prepared_destroy(&p, d);
}

/* A device's workspace is fresh, or what an earlier product left. */
PATH_TEST(contract, a_sum_of_no_terms_is_zero_whatever_the_workspace_held)
{
    enum { m = 9, n = 50 };
    OWNED(ar_device_destroy) ar_device *d = device(1);
    const ari_exact_path *path = ((const ari_cpu_device *)d)->exact.path;
    const ar_packed none = {.batch = 1, .rows = n};
    ari_tile_plan plan = {.tile_rows = m, .tile_cols = n};
    path->plan(&plan, 0);
    ar_buf words = {NULL};
    cr_assert_ok(d->ops->alloc(d, NULL, &words, plan.path * sizeof(double)));
    memset(words.ptr, 0x55, plan.path * sizeof(double));
    const ari_tile t = {.rows = m, .cols = n, .a = &none, .b = &none, .plan = &plan, .words = words.ptr};
    path->sum(&t, 0, 0);
    for (size_t i = 0; i < m; i++) {
        int64_t s[n];
        path->row_to_int64(&t, i, s, false);
        for (size_t j = 0; j < n; j++)
            cr_assert_eq(s[j], 0, "row %zu, column %zu: %lld", i, j, (long long)s[j]);
    }
    d->ops->free(d, NULL, words);
}

PATH_TEST(contract, refuses_operands_that_do_not_belong_together)
{
    OWNED(ar_device_destroy) ar_device *d = device(1);
    const ar_device_ops *ops = d->ops;
    ar_packed *a = NULL, *b = NULL, *wide = NULL;
    float y[6];
    int64_t s[6];
    const ar_cbuf none = {NULL};
    cr_assert_ok(ops->packed_create(d, NULL, &a, 1, 2, 4, true));
    cr_assert_ok(ops->packed_create(d, NULL, &b, 1, 3, 5, false));
    cr_assert_ok(ops->packed_create(d, NULL, &wide, 1, 2, 8192, false));
    const ar_tensor yv = case_view2(y, 2, 3), part = case_view2(y, 2, 3);
    cr_expect_eq(ops->gemm_round(d, NULL, &yv, a, b, none, none, none, AR_ACT_NONE, NULL, NULL), AR_ERR_SHAPE);
    cr_expect_eq(ops->gemm_round(d, NULL, &yv, a, a, none, none, none, AR_ACT_NONE, NULL, NULL), AR_ERR_SHAPE);
    cr_expect_eq(ops->gemm_i64(d, NULL, (ar_buf){s}, a, b, 1, false), AR_ERR_SHAPE);
    cr_expect_eq(ops->gemm_i64(d, NULL, (ar_buf){s}, a, a, 3, false), AR_ERR_ARG);
    cr_expect_eq(ops->gemm_i64(d, NULL, (ar_buf){s}, wide, wide, 1, false), AR_ERR_ARG);
    cr_expect_eq(ops->pack(d, NULL, a, 1, 0, &part, none, 1, none), AR_ERR_SHAPE);
    cr_expect_eq(ops->pack(d, NULL, a, 0, 2, &part, none, 1, none), AR_ERR_SHAPE);
    cr_expect_eq(ops->packed_create(d, NULL, &a, SIZE_MAX, 2, 4, true), AR_ERR_OVERFLOW);
    ops->packed_destroy(d, NULL, a);
    ops->packed_destroy(d, NULL, b);
    ops->packed_destroy(d, NULL, wide);
    ops->packed_destroy(d, NULL, NULL);
}
