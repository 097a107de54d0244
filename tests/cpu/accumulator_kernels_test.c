/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/sent_sum.h"
#include "tests/cpu/acc_state.h"
#include "tests/cpu/contract_paths.h"

/* The array kernels of the accumulator against ari_acc_add and ari_acc_value, element by element: the
 * whole state is compared, not just its value. */

/* Values of every slice, with a NaN here and there. */
static void fill_terms(float *x, size_t n, uint64_t seed, bool nonfinite)
{
    uint64_t random = seed;
    for (size_t i = 0; i < n; i++) {
        x[i] = case_any_finite(&random);
        if (nonfinite && case_random(&random) % 97 == 0)
            x[i] = case_random(&random) % 2 ? NAN : -INFINITY;
    }
}

/* One value an element: the shape of a weight gradient, added sample after sample. */
Test(accumulator_kernels, elementwise_addition_is_ari_acc_add)
{
    enum { rows = 13, cols = 700, samples = 20 };
    for (int form = 0; form < 2 * 3; form++) {
        const bool narrow = form % 2 != 0;
        const int threads = 1 + form / 2;
        OWNED(ar_device_destroy) ar_device *d = device(threads);
        SCOPED(state_destroy) state got = state_create(rows * cols, narrow), want = state_create(rows * cols, narrow);
        OWNED(free) float *x = case_alloc(rows * cols, 4);
        for (uint64_t s = 0; s < samples; s++) {
            fill_terms(x, rows * cols, s, s > 15);
            const ar_tensor t = case_view2(x, rows, cols);
            cr_assert_ok(
                d->ops->acc_add(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, got.narrow, rows, &t, (ar_cbuf){NULL}));
            for (size_t i = 0; i < rows * cols; i++)
                add_one(&want, i, x[i]);
            same_state(&got, &want, "elementwise");
        }
    }
}

/* Every exponent, both signs, onto states of every slice. */
Test(accumulator_kernels, every_exponent_meets_every_slice)
{
    enum { exponents = 256 };
    OWNED(ar_device_destroy) ar_device *d = device(1);
    float x[2 * exponents];
    for (uint32_t i = 0; i < 2 * exponents; i++)
        x[i] = ari_float32((i << 23) | 0x2aaaabu | (i * 2654435761u & 0x7fffffu));
    for (int first = 0; first < exponents; first += 5) {
        const bool narrow = first % 2 != 0;
        SCOPED(state_destroy)
        state got = state_create(2 * exponents, narrow), want = state_create(2 * exponents, narrow);
        for (size_t i = 0; i < got.n; i++) {
            add_one(&got, i, ari_float32(((uint32_t)first << 23) | 0x7fffffu));
            add_one(&want, i, ari_float32(((uint32_t)first << 23) | 0x7fffffu));
            add_one(&want, i, x[i]);
        }
        const ar_tensor t = case_view2(x, 2, exponents);
        cr_assert_ok(d->ops->acc_add(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, got.narrow, 2, &t, (ar_cbuf){NULL}));
        same_state(&got, &want, "exponents");
    }
}

/* Values of the lowest slices alone, where nothing lies below. */
Test(accumulator_kernels, the_smallest_values_are_kept)
{
    enum { n = 500 };
    OWNED(ar_device_destroy) ar_device *d = device(1);
    float x[n];
    for (int form = 0; form < 2; form++)
        for (uint32_t bits = 1; bits < 27; bits++) {
            SCOPED(state_destroy) state got = state_create(n, form == 1), want = state_create(n, form == 1);
            for (uint32_t i = 0; i < n; i++) {
                x[i] = ari_float32((i % 2 << 31) | (i * 2654435761u & ((1u << bits) - 1)));
                add_one(&want, i, x[i]);
            }
            const ar_tensor t = case_view2(x, 2, n / 2);
            cr_assert_ok(
                d->ops->acc_add(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, got.narrow, 2, &t, (ar_cbuf){NULL}));
            same_state(&got, &want, "smallest");
        }
}

/* Many rows into one: a bias gradient. The terms are a strided view. */
Test(accumulator_kernels, all_rows_meet_in_row_zero)
{
    enum { rows = 300, cols = 530, ld = 1100 };
    for (int form = 0; form < 2 * 2; form++) {
        const bool narrow = form % 2 != 0;
        const int threads = 1 + form / 2;
        OWNED(ar_device_destroy) ar_device *d = device(threads);
        SCOPED(state_destroy) state got = state_create(cols, narrow), want = state_create(cols, narrow);
        OWNED(free) float *x = case_alloc(rows * ld, 4);
        fill_terms(x, rows * ld, 3, true);
        ar_tensor t = case_view2(x, rows, cols);
        t.stride[0] = ld;
        t.stride[1] = 2;
        cr_assert_ok(d->ops->acc_add(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, got.narrow, 1, &t, (ar_cbuf){NULL}));
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < cols; j++)
                add_one(&want, j, x[r * ld + 2 * j]);
        same_state(&got, &want, "rows");
    }
}

/* An embedding's gradient: rows by number, some twice, some skipped. */
Test(accumulator_kernels, rows_are_scattered_by_row_of)
{
    enum { rows = 60, cols = 70, acc_rows = 9 };
    for (int form = 0; form < 2 * 3; form++) {
        const bool narrow = form % 2 != 0;
        const int threads = 1 + form / 2;
        OWNED(ar_device_destroy) ar_device *d = device(threads);
        SCOPED(state_destroy)
        state got = state_create(acc_rows * cols, narrow), want = state_create(acc_rows * cols, narrow);
        OWNED(free) float *x = case_alloc(rows * cols, 4);
        int64_t row_of[rows];
        fill_terms(x, rows * cols, 4, true);
        for (size_t r = 0; r < rows; r++)
            row_of[r] = (int64_t)(r * 7 % (acc_rows + 2)) - 2;
        const ar_tensor t = case_view2(x, rows, cols);
        cr_assert_ok(
            d->ops->acc_add(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, got.narrow, acc_rows, &t, (ar_cbuf){row_of}));
        for (size_t r = 0; r < rows; r++)
            for (size_t j = 0; j < cols && row_of[r] >= 0; j++)
                add_one(&want, (size_t)row_of[r] * cols + j, x[r * cols + j]);
        same_state(&got, &want, "scatter");
        row_of[5] = acc_rows;
        cr_expect_eq(
            d->ops->acc_add(d, NULL, (ar_buf){got.t}, (ar_buf){got.hl}, got.narrow, acc_rows, &t, (ar_cbuf){row_of}),
            AR_ERR_SHAPE);
        same_state(&got, &want, "after a refused call");
    }
}

/* Values, into a contiguous tensor and into a permuted view of four dimensions. */
static void values_through_strides(bool narrow)
{
    enum { a = 3, b = 4, c = 5, e = 60, n = a * b * c * e };
    OWNED(ar_device_destroy) ar_device *d = device(2);
    SCOPED(state_destroy) state s = state_create(n, narrow);
    OWNED(free) float *x = case_alloc(n, 4), *plain = case_alloc(n, 4), *permuted = case_alloc(n, 4);
    for (uint64_t i = 0; i < 4; i++) {
        fill_terms(x, n, 20 + i, i == 3);
        for (size_t j = 0; j < n; j++)
            add_one(&s, j, x[j]);
    }
    const ar_tensor y = case_view2(plain, a * b, c * e);
    const ar_tensor p = {
        .dtype = AR_F32, .ndim = 4, .shape = {a, b, c, e}, .stride = {c * e, a * c * e, 1, c}, .data = {permuted}};
    cr_assert_ok(d->ops->acc_value(d, NULL, &y, (ar_cbuf){s.t}, (ar_cbuf){s.hl}, n, s.narrow));
    cr_assert_ok(d->ops->acc_value(d, NULL, &p, (ar_cbuf){s.t}, (ar_cbuf){s.hl}, n, s.narrow));
    float part[7];
    const ar_tensor few = case_view2(part, 1, 7); /* elements 5 to 11: L begins where it does for all */
    cr_assert_ok(d->ops->acc_value(d, NULL, &few, (ar_cbuf){s.t + 5}, (ar_cbuf){s.hl + 5}, n, s.narrow));
    for (size_t i = 0; i < 7; i++)
        cr_assert_eq(ari_bits32(part[i]),
                     ari_bits32(ari_acc_value(s.t[5 + i], s.hl[5 + i], s.hl[n + 5 + i], s.narrow)));
    for (size_t i = 0; i < n; i++) {
        const uint32_t want = ari_bits32(ari_acc_value(s.t[i], s.hl[i], s.hl[n + i], s.narrow));
        const size_t i3 = i % e, i2 = i / e % c, i1 = i / (c * e) % b, i0 = i / (b * c * e);
        cr_assert_eq(ari_bits32(plain[i]), want, "element %zu", i);
        cr_assert_eq(ari_bits32(permuted[i0 * c * e + i1 * a * c * e + i2 + i3 * c]), want, "permuted element %zu", i);
    }
}

Test(accumulator_kernels, value_is_ari_acc_value_through_any_strides)
{
    values_through_strides(false);
    values_through_strides(true);
}

/* A state of `times` values x; extreme: with slices that are as large as they can be. */
static void state_of_many(state *s, size_t i, float x, size_t times, int extreme)
{
    const int64_t largest = ((int64_t)1 << ari_acc_bits(s->narrow)) - 1;
    s->t[i] = (uint8_t)ari_acc_top(x, s->narrow);
    s->hl[i] = ari_acc_slice(x, s->t[i], s->narrow) * (int64_t)times;
    s->hl[s->n + i] = ari_acc_slice(x, s->t[i] - 1, s->narrow) * (int64_t)times;
    if (extreme != 0) {
        s->hl[i] = extreme * largest * (int64_t)times;
        s->hl[s->n + i] = -s->hl[i];
    }
}

/* States of so many values go between ranks in as many bytes as hold them: what is merged is the state of all values.
 * The extremes of both slices, with as many values as the width is said to hold. */
static void send_states(size_t times, bool narrow)
{
    enum { n = 400, ranks = 3 };
    OWNED(ar_device_destroy) ar_device *d = device(2);
    SCOPED(state_destroy)
    state own = state_create(n, narrow), part = state_create(n, narrow), want = state_create(n, narrow);
    const size_t width = ari_sent_state_bytes(times, narrow);
    uint8_t sent[ranks * n * 17];
    uint64_t random = 7;
    for (size_t r = 0; r <= ranks; r++) {
        for (size_t i = 0; i < n; i++) {
            const float x = i == 0 ? NAN : case_any_finite(&random);
            state_of_many(&part, i, x, times, i % 2 == 1 && times > 1 ? (i % 4 == 1 ? 1 : -1) : 0);
            if (r == 0) {
                own.t[i] = want.t[i] = part.t[i];
                own.hl[i] = want.hl[i] = part.hl[i];
                own.hl[n + i] = want.hl[n + i] = part.hl[n + i];
            } else {
                ari_acc_merge(&want.t[i], &want.hl[i], &want.hl[n + i], part.t[i], part.hl[i], part.hl[n + i]);
            }
        }
        if (r > 0)
            cr_assert_ok(d->ops->states_narrow(d, NULL, (ar_buf){sent + (r - 1) * n * width}, (ar_cbuf){part.t},
                                               (ar_cbuf){part.hl}, (ar_cbuf){part.hl + n}, n, width, narrow));
    }
    cr_assert_ok(d->ops->states_merge(d, NULL, (ar_buf){own.t}, (ar_buf){own.hl}, (ar_buf){own.hl + n}, (ar_cbuf){sent},
                                      ranks, n, width, narrow));
    for (size_t i = 0; i < n; i++)
        cr_assert(own.t[i] == want.t[i] && own.hl[i] == want.hl[i] && own.hl[n + i] == want.hl[n + i],
                  "%zu values in %zu bytes, element %zu", times, width, i);
}

Test(accumulator_kernels, states_that_ranks_send_are_those_of_all_values)
{
    static const int bits[] = {0, 1, 3, 7, 15, 23, 26};
    for (size_t v = 0; v < 2 * sizeof bits / sizeof *bits; v++) {
        send_states((size_t)1 << bits[v / 2], v % 2 == 0);
        send_states(((size_t)1 << bits[v / 2]) + 1, v % 2 == 0);
    }
}

/* A value that is put into a state is its value, also an infinity, to which a sum overflowed; where sums are stored as
 * bf16, rounded to it, and what was put comes back when it is put again. */
Test(accumulator_kernels, a_value_put_into_a_state_is_read_back)
{
    enum { n = 3000 };
    OWNED(ar_device_destroy) ar_device *d = device(2);
    float x[n] = {INFINITY, -INFINITY, NAN, -0.0f, 0.0f, 0x1.fffffep127f, -0x1p-149f};
    uint64_t random = 9;
    for (size_t i = 7; i < n; i++)
        x[i] = case_any_finite(&random);
    for (int form = 0; form < 2; form++) {
        const bool narrow = form == 1;
        SCOPED(state_destroy) state s = state_create(n, narrow);
        cr_assert_ok(
            d->ops->acc_put(d, NULL, (ar_buf){s.t}, (ar_buf){s.hl}, (ar_buf){s.hl + n}, (ar_cbuf){x}, n, narrow));
        for (size_t i = 0; i < n; i++) {
            const float kept = narrow ? ari_f32_of_bf16(ari_bf16_of_f32(x[i])) : x[i];
            const float want = i == 2 ? ari_nan32() : kept == 0.0f && !narrow ? 0.0f : kept;
            cr_assert_eq(ari_bits32(ari_acc_value(s.t[i], s.hl[i], s.hl[n + i], narrow)), ari_bits32(want),
                         "element %zu", i);
        }
    }
}
