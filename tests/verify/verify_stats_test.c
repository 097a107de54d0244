/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/verify.h"
#include "support/together.h"
#include "tests/verify/two_dumps.h"

static const ar_verify_options by_bits = {.rule = AR_VERIFY_BITS};

CLAIM(equal_bytes_are_the_same_and_cost_no_figures)
{
    const float x[] = {1.0f, -2.0f, 0.0f, 4.0f};
    OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_vectors(by_bits, AR_F32, 4, x, x);
    cr_expect(r->same && r->compared == 1 && r->different == 0 && r->first == SIZE_MAX && r->worst == SIZE_MAX);
    cr_expect_eq(r->row[0].state, AR_VERIFY_SAME);
    cr_expect_null(r->row[0].map.cell);
    cr_expect_eq(r->bytes, 32);
}

CLAIM(every_figure_of_a_small_difference_is_what_it_is_defined_to_be)
{
    const float a[] = {3.0f, 0.0f, 4.0f, 1.0f}, b[] = {3.0f, 0.5f, 4.0f, 1.25f};
    OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_vectors(by_bits, AR_F32, 4, a, b);
    const ar_verify_row *w = &r->row[0];
    cr_expect(!r->same && r->different == 1 && r->elements_different == 2 && r->first == 0 && r->worst == 0);
    cr_expect(w->elements == 4 && w->elements_different == 2 && w->bits_different == 2);
    cr_expect(w->max_abs == 0.5 && w->max_rel == 0.25 && w->max_reference == 4.0);
    cr_expect_float_eq(w->rms, sqrt((0.25 + 0.0625) / 4.0), 1e-15);
    cr_expect_float_eq(w->rms_reference, sqrt(26.0 / 4.0), 1e-15);
    cr_expect_float_eq(w->scale, (9.0 + 16.0 + 1.25) / 26.0, 1e-15);
    cr_expect_float_eq(w->cosine, 26.25 / sqrt(26.0 * (25.0 + 0.25 + 1.5625)), 1e-15);
    cr_expect(w->first.index == 1 && w->first.value[0] == 0.0 && w->first.value[1] == 0.5);
    cr_expect(w->worst.index == 1 && w->worst.value[1] == 0.5 && isinf(w->ratio) && w->allowed == 0.0);
    cr_expect_eq(w->max_ulp, 0x3f000000u, "from 0 to 1/2 there are as many steps as the bits of 1/2 say");
    cr_expect(w->ulp_bins[0] == 2 && w->ulp_bins[22] == 1 && w->ulp_bins[30] == 1);
    cr_expect(w->map.rows == 1 && w->map.cols == 4 && w->map.cell[0] == 0.0f);
    cr_expect_float_eq((double)w->map.cell[1], 0.5 / w->rms_reference, 1e-7);
}

/* The bits of two numbers that are `steps` apart in a dtype. */
static const struct {
    ar_dtype dtype;
    uint64_t a, b, steps;
} neighbours[] = {
    {AR_F64, 0x3ff0000000000000u, 0x3ff0000000000001u, 1},
    {AR_F64, 0x8000000000000000u, 0x0000000000000000u, 1},
    {AR_F32, 0x3f800000u, 0x3f7fffffu, 1},
    {AR_F32, 0x80000001u, 0x00000001u, 3},
    {AR_F32, 0x7f7fffffu, 0x7f800000u, 1},
    {AR_BF16, 0x3f80u, 0x3f83u, 3},
    {AR_F16, 0x0001u, 0x8000u, 2},
    {AR_F8_E4M3, 0x38u, 0x3au, 2},
    {AR_F8_E5M2, 0x3cu, 0x3bu, 1},
    {AR_F8_E8M0, 0x7fu, 0x81u, 2},
    {AR_I8, 0xffu, 0x01u, 2},
    {AR_U8, 0xffu, 0x01u, 254},
    {AR_I16, 0x8000u, 0x7fffu, 65535},
    {AR_I32, 0xffffffffu, 0x00000000u, 1},
    {AR_U64, 0xffffffffffffffffu, 0x0000000000000000u, UINT64_MAX},
    {AR_I64, 0x8000000000000000u, 0x7fffffffffffffffu, UINT64_MAX},
    {AR_BOOL, 0, 1, 1},
};

CLAIM(steps_are_counted_in_the_bits_of_each_dtype)
{
    for (size_t i = 0; i < sizeof neighbours / sizeof *neighbours; i++) {
        ar_verify_report *r = verify_vectors(by_bits, neighbours[i].dtype, 1, &neighbours[i].a, &neighbours[i].b);
        cr_expect_eq(r->row[0].max_ulp, neighbours[i].steps, "case %zu, %s: %llu", i,
                     ar_dtype_name(neighbours[i].dtype), (unsigned long long)r->row[0].max_ulp);
        cr_expect_eq(r->row[0].state, AR_VERIFY_DIFFERENT);
        ar_verify_report_destroy(r);
    }
}

/* What each rule says of pairs that are no ordinary numbers. */
CLAIM(nan_infinities_and_signed_zeros_are_judged_as_documented)
{
    static const struct {
        uint32_t a, b;
        bool bits, ulp, tolerance, nan_differs; /* the same by 1000 ulp, by atol 1, by atol 1 where NaN differs */
    } cases[] = {
        {0x7fc00000u, 0x7fc00000u, true, true, true, false},    /* NaN, NaN */
        {0x7fc00000u, 0x7fc00001u, false, true, true, false},   /* another payload */
        {0x7fc00000u, 0x3f800000u, false, false, false, false}, /* NaN, 1 */
        {0x3f800000u, 0xffc00000u, false, false, false, false}, /* 1, NaN */
        {0x7f800000u, 0x7f800000u, true, true, true, true},     /* inf, inf */
        {0x7f800000u, 0xff800000u, false, false, false, false}, /* inf, -inf */
        {0x7f7fffffu, 0x7f800000u, false, true, false, false},  /* the largest number, inf */
        {0x80000000u, 0x00000000u, false, true, true, true},    /* -0, 0 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const bool expected[] = {cases[i].bits, cases[i].ulp, cases[i].tolerance, cases[i].nan_differs};
        const ar_verify_options rules[] = {by_bits,
                                           {.rule = AR_VERIFY_ULP, .ulp = 1000},
                                           {.rule = AR_VERIFY_TOLERANCE, .atol = 1.0},
                                           {.rule = AR_VERIFY_TOLERANCE, .atol = 1.0, .nan_differs = true}};
        for (size_t k = 0; k < 4; k++) {
            ar_verify_report *r = verify_vectors(rules[k], AR_F32, 1, &cases[i].a, &cases[i].b);
            cr_expect_eq(r->same, expected[k], "case %zu, rule %zu", i, k);
            cr_expect(r->same || isinf(r->row[0].ratio) || k == 1, "case %zu, rule %zu: ratio %g", i, k,
                      r->row[0].ratio);
            ar_verify_report_destroy(r);
        }
    }
}

CLAIM(what_is_no_number_is_counted_on_each_side_also_where_all_is_the_same)
{
    const float a[] = {NAN, 1.0f, INFINITY, NAN}, b[] = {NAN, NAN, -INFINITY, NAN};
    for (int same = 0; same < 2; same++) {
        OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_vectors(by_bits, AR_F32, 4, a, same ? a : b);
        cr_expect(r->row[0].nan[0] == 2 && r->row[0].inf[0] == 1 && r->row[0].inf[1] == 1);
        cr_expect_eq(r->row[0].nan[1], same ? 2 : 3);
    }
}

CLAIM(squares_of_large_and_small_numbers_neither_overflow_nor_vanish)
{
    const double a[] = {3e300, 4e300}, b[] = {3e300, 4.5e300}, c[] = {3e-300, 4e-300}, d[] = {3e-300, 4.5e-300};
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = verify_vectors(by_bits, AR_F64, 2, a, b), *s = verify_vectors(by_bits, AR_F64, 2, c, d);
    cr_expect_float_eq(r->row[0].rms_reference / 1e300, 5.0 / sqrt(2.0), 1e-14);
    cr_expect_float_eq(r->row[0].rms / 1e300, 0.5 / sqrt(2.0), 1e-14);
    cr_expect_float_eq(s->row[0].rms_reference / 1e-300, 5.0 / sqrt(2.0), 1e-14);
    cr_expect_float_eq(s->row[0].rms / 1e-300, 0.5 / sqrt(2.0), 1e-14);
    cr_expect_float_eq(s->row[0].scale, 27.0 / 25.0, 1e-14);
}

CLAIM(integers_are_compared_by_value_beyond_what_binary64_holds)
{
    const int64_t a[] = {INT64_MAX - 1, 5}, b[] = {INT64_MAX, 5};
    const ar_verify_options within = {.rule = AR_VERIFY_TOLERANCE, .atol = 0.5};
    OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_vectors(within, AR_I64, 2, a, b);
    cr_expect(!r->same && r->row[0].max_abs == 1.0 && r->row[0].elements_different == 1 && isinf(r->row[0].ratio));
}

CLAIM(complex_numbers_are_pairs)
{
    const float a[] = {1.0f, 2.0f, 3.0f, 4.0f}, b[] = {1.0f, 2.0f, 3.0f, 4.5f};
    OWNED(ar_verify_report_destroy) ar_verify_report *r = verify_vectors(by_bits, AR_C64, 2, a, b);
    const ar_verify_row *w = &r->row[0];
    cr_expect(w->ndim == 2 && w->shape[0] == 2 && w->shape[1] == 2 && w->elements == 4);
    cr_expect(w->elements_different == 1 && w->first.index == 3 && w->max_abs == 0.5);
}

CLAIM(numbers_below_a_byte_are_unpacked)
{
    /* F4: 0.5 1 | 2 6, and the same with 6 made -6. F6_E3M2: 1 1 1 1 in 3 bytes, the second made 1.25. */
    const unsigned char a[] = {0x21, 0x74}, b[] = {0x21, 0xf4}, c[] = {0x0c, 0xc3, 0x30}, d[] = {0x4c, 0xc3, 0x30};
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = verify_vectors(by_bits, AR_F4, 4, a, b), *s = verify_vectors(by_bits, AR_F6_E3M2, 4, c, d);
    cr_expect(r->row[0].first.index == 3 && r->row[0].first.value[0] == 6.0 && r->row[0].first.value[1] == -6.0);
    cr_expect_eq(r->row[0].max_ulp, 15, "through both zeros");
    cr_expect(s->row[0].first.index == 1 && s->row[0].first.value[0] == 1.0 && s->row[0].first.value[1] == 1.25);
}

/* --- many elements ------------------------------------------------------------------------------------------------ */

enum { LONG = 1499977 }; /* two blocks, the last not full; a prime, as units of elements are tried for each divisor */

static float *long_vector(bool changed)
{
    float *x = malloc(LONG * sizeof *x);
    for (size_t i = 0; x && i < LONG; i++)
        x[i] = (float)((i * 2654435761u) % 1000003u) / 1000.0f - 500.0f;
    if (x && changed) {
        x[1048576] += 1.0f; /* the first of the second block */
        x[1048577] *= 1.0000001f;
        x[LONG - 1] -= 2.0f; /* the last of all */
    }
    return x;
}

static void expect_the_same_figures(const ar_verify_row *x, const ar_verify_row *y, size_t number)
{
    cr_expect(x->state == y->state && x->elements_different == y->elements_different &&
                  x->bits_different == y->bits_different && x->max_ulp == y->max_ulp,
              "case %zu: %zu and %zu differ", number, x->elements_different, y->elements_different);
    cr_expect(x->max_abs == y->max_abs && x->max_rel == y->max_rel && x->ratio == y->ratio && x->allowed == y->allowed,
              "case %zu: %g and %g, ratio %g and %g", number, x->max_abs, y->max_abs, x->ratio, y->ratio);
    cr_expect(x->first.index == y->first.index && x->worst.index == y->worst.index, "case %zu: worst %zu and %zu",
              number, x->worst.index, y->worst.index);
    cr_expect_arr_eq(x->ulp_bins, y->ulp_bins, sizeof x->ulp_bins, "case %zu", number);
    cr_expect(x->rms == y->rms && x->rms_reference == y->rms_reference && x->scale == y->scale, "case %zu", number);
    cr_assert(!x->map.cell == !y->map.cell && x->map.rows == y->map.rows && x->map.cols == y->map.cols);
    if (x->map.cell) /* there is none where all is the same by the rule */
        cr_expect_arr_eq(x->map.cell, y->map.cell, x->map.rows * x->map.cols * sizeof *x->map.cell, "case %zu", number);
}

CLAIM(every_number_of_threads_gives_the_same_report)
{
    OWNED(free) float *a = long_vector(false), *b = long_vector(true);
    OWNED(ar_verify_report_destroy)
    ar_verify_report *one = verify_vectors((ar_verify_options){.threads = 1}, AR_F32, LONG, a, b),
                     *five = verify_vectors((ar_verify_options){.threads = 5}, AR_F32, LONG, a, b);
    const ar_verify_row *v = &one->row[0], *w = &five->row[0];
    uint64_t counted = 0;
    for (size_t k = 0; k < AR_VERIFY_ULP_BINS; k++)
        counted += v->ulp_bins[k];
    cr_expect_eq(counted, LONG);
    cr_expect(v->elements_different == 3 && v->first.index == 1048576 && v->worst.index == LONG - 1 &&
              v->max_abs == 2.0);
    cr_expect(v->map.cell[67] > 0.0f && v->map.cell[95] > 0.0f && v->map.cell[0] == 0.0f);
    cr_expect(v->cosine == w->cosine);
    expect_the_same_figures(v, w, 0);
}

CLAIM(a_map_has_the_differences_of_its_cells)
{
    static float a[100][200], b[100][200];
    made m = {.n = 0};
    for (size_t i = 0; i < 100 * 200; i++)
        (&a[0][0])[i] = (&b[0][0])[i] = 1.0f;
    b[99][0] = 3.0f;
    b[50][199] = 2.0f;
    put_pair(&m, (ar_st_tensor){.name = "x", .dtype = AR_F32, .ndim = 2, .shape = {100, 200}}, a, b);
    OWNED(ar_verify_report_destroy)
    ar_verify_report *r = judge(&m, (ar_verify_options){.rule = AR_VERIFY_TOLERANCE, .atol = 0.5});
    const ar_verify_row *w = &r->row[0];
    cr_assert(w->map.rows == 48 && w->map.cols == 96 && w->map.matrix_rows == 100 && w->map.matrix_cols == 200);
    static float expected[48 * 96];
    expected[47 * 96] = 4.0f;
    expected[24 * 96 + 95] = 2.0f;
    size_t i = 0; /* each assertion takes longer than the comparison */
    while (i + 1 < 48 * 96 && w->map.cell[i] == expected[i])
        i++;
    cr_expect(w->map.cell[i] == expected[i], "cell %zu %zu: %g", i / 96, i % 96, (double)w->map.cell[i]);
}

CLAIM(a_narrow_matrix_has_a_cell_for_each_element)
{
    static const float a[] = {1, 1, 1, 1, 1, 1}, b[] = {1, 2, 1, 1, 4, 1}, expected[] = {0, 1, 0, 0, 3, 0};
    made m = {.n = 0};
    put_pair(&m, (ar_st_tensor){.name = "x", .dtype = AR_F32, .ndim = 2, .shape = {3, 2}}, a, b);
    OWNED(ar_verify_report_destroy) ar_verify_report *r = judge(&m, (ar_verify_options){.rule = AR_VERIFY_BITS});
    cr_assert(r->row[0].map.rows == 3 && r->row[0].map.cols == 2);
    cr_expect_arr_eq(r->row[0].map.cell, expected, sizeof expected);
}

enum { MANY = 6000 };

/* Random numbers beside slightly others, some equal, zeros of both signs, infinities, NaN on one side, huge and tiny
 * ones; no NaN on both sides, so that it does not matter whether that is a difference. Without the odd ones, which are
 * larger than all others, the others' growing differences set what is largest. */
static void draw_pairs(float *a, float *b, float size, bool with_odd, size_t seed)
{
    static const float odd[][2] = {
        {0.0f, -0.0f}, {0.0f, 1.0f},     {1.0f, 0.0f},      {INFINITY, 1.0f}, {INFINITY, INFINITY},
        {NAN, 1.0f},   {-1.0f, NAN},     {0x1p-149f, 0.0f}, {3e38f, -3e38f},  {0x1p-140f, 0x1p-139f},
        {-2.0f, 2.0f}, {1e-30f, 1e-29f}, {5.0f, 5.0f}};
    /* Of two that are equally many steps off the one with the larger difference is the worst, below what a third
     * has. */
    static const float tied[][2] = {
        {1024.0f, 1024.0f + 900 * 0x1p-13f}, {1.5f, 1.5f + 1000 * 0x1p-23f}, {3.0f, 3.0f + 1000 * 0x1p-22f}};
    const size_t kinds = sizeof odd / sizeof *odd;
    for (size_t i = 0; i < MANY; i++) {
        const size_t draw = 2 * (seed * MANY + i);
        a[i] = noise(draw) * (i % 7 == 0 ? 8.0f : 1.0f);
        b[i] = i % 5 == 0 ? a[i] : a[i] * (1.0f + size * noise(draw + 1) * (float)i / MANY);
        if (with_odd && i % 97 == 96) {
            a[i] = odd[i / 97 % kinds][0];
            b[i] = odd[i / 97 % kinds][1];
        }
    }
    for (size_t k = 0; k < 3; k++) {
        a[MANY - 3 + k] = tied[k][0];
        b[MANY - 3 + k] = tied[k][1];
    }
}

CLAIM(ordinary_numbers_give_the_same_figures_on_the_shorter_way)
{
    static const ar_verify_options rules[] = {{.rule = AR_VERIFY_BITS},
                                              {.rule = AR_VERIFY_ULP, .ulp = 3},
                                              {.rule = AR_VERIFY_ULP},
                                              {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-4},
                                              {.rule = AR_VERIFY_TOLERANCE, .atol = 1e-5},
                                              {.rule = AR_VERIFY_TOLERANCE, .rtol = 1e-3, .atol = 1e-7}};
    static const float sizes[] = {1e-6f, 1e-3f, 2.0f};
    static float a[MANY], b[MANY];
    for (size_t i = 0; i < sizeof rules / sizeof *rules * 6; i++) {
        draw_pairs(a, b, sizes[i % 3], i / 3 % 2 == 1, i);
        ar_verify_options whole = rules[i / 6];
        whole.nan_differs = true; /* and with it every element is looked at in full */
        OWNED(ar_verify_report_destroy) ar_verify_report *shorter = verify_vectors(rules[i / 6], AR_F32, MANY, a, b);
        OWNED(ar_verify_report_destroy) ar_verify_report *full = verify_vectors(whole, AR_F32, MANY, a, b);
        expect_the_same_figures(&shorter->row[0], &full->row[0], i);
    }
}

EVERY_CLAIM(verify_stats)
