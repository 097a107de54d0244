/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/philox.h"
#include "tests/cpu/row_support.h"

/* One element by the definition. */
static float plain(float x, const ar_dropout *w, uint64_t number)
{
    return ari_dropout_keep(w->key, number, w->step, w->threshold) ? ari_mul32(x, w->scale) : 0.0f;
}

static ar_device *new_device(int threads)
{
    ar_device *d = NULL;
    cr_assert_ok(ar_device_cpu_create(&d, threads));
    return d;
}

static ar_tensor view(int ndim, const size_t *shape, float *data)
{
    ar_tensor t;
    cr_assert_ok(ar_tensor_view(&t, AR_F32, ndim, shape, (ar_buf){data}));
    return t;
}

/* Rows of every length and place in a block of four, with and without their own memory. */
Test(dropout_kernel, rows_that_begin_anywhere_in_a_block_have_the_definitions_bits)
{
    OWNED(ar_device_destroy) ar_device *d = new_device(1);
    for (size_t n = 1; n <= 140; n += n < 70 ? 1 : 23) {
        OWNED(free) float *x = new_values(n, SPECIAL, n), *y = new_values(n, ORDINARY, 1);
        for (uint64_t first = 0; first < 6; first++) {
            const ar_dropout w = {
                .key = 77, .step = 3, .threshold = 0x60000000u, .scale = 1.6f, .first = first, .stride = {1}};
            const ar_tensor tx = view(1, &n, x), ty = view(1, &n, y);
            cr_assert_ok(d->ops->dropout(d, NULL, &ty, NULL, &tx, NULL, &w));
            for (size_t i = 0; i < n; i++)
                cr_assert_eq(ari_bits32(y[i]), ari_bits32(plain(x[i], &w, first + i)), "%zu of %zu from %d", i, n,
                             (int)first);
        }
        const ar_dropout w = {.key = 78, .step = 4, .threshold = 0x60000000u, .scale = 1.6f, .first = 2, .stride = {1}};
        const ar_tensor tx = view(1, &n, x), ty = view(1, &n, y);
        cr_assert_ok(d->ops->dropout(d, NULL, &ty, NULL, &tx, NULL, &w));
        cr_assert_ok(d->ops->dropout(d, NULL, &tx, NULL, &tx, NULL, &w));
        cr_assert_eq(memcmp(x, y, n * sizeof *x), 0, "in place, %zu", n);
    }
}

/* y and its sum with the residual, the sum alone in the residual's place: the bits of the two one after the other. */
Test(dropout_kernel, the_sum_with_the_residual_has_the_bits_of_dropout_then_add)
{
    OWNED(ar_device_destroy) ar_device *d = new_device(2);
    const size_t shape[2] = {17, 141}, n = shape[0] * shape[1];
    OWNED(free) float *x = new_values(n, SPECIAL, 5), *residual = new_values(n, SPECIAL, 6), *y = new_copy(x, n);
    OWNED(free) float *dropped = new_copy(x, n), *sum = new_copy(x, n), *expected = new_copy(x, n);
    const ar_dropout w = {.key = 9, .step = 2, .threshold = 0x60000000u, .scale = 1.6f, .first = 3, .stride = {141, 1}};
    const ar_tensor tx = view(2, shape, x), ty = view(2, shape, y), tr = view(2, shape, residual);
    const ar_tensor td = view(2, shape, dropped), ts = view(2, shape, sum), te = view(2, shape, expected);
    cr_assert_ok(d->ops->dropout(d, NULL, &td, NULL, &tx, NULL, &w));
    cr_assert_ok(d->ops->add(d, NULL, &te, &tr, &td));
    cr_assert_ok(d->ops->dropout(d, NULL, &ty, &ts, &tx, &tr, &w));
    assert_bits(y, dropped, n, "what is dropped");
    assert_bits(sum, expected, n, "its sum with the residual");
    cr_assert_ok(d->ops->dropout(d, NULL, NULL, &tr, &tx, &tr, &w));
    assert_bits(residual, expected, n, "the sum in the residual's place");
}

/* Numbers beyond 2^34, where the counter's second word begins, up to the last of 64 bits. */
Test(dropout_kernel, large_element_numbers_have_the_definitions_bits)
{
    static const uint64_t firsts[] = {((uint64_t)1 << 34) - 40, ((uint64_t)1 << 63) + 1, UINT64_MAX - 99};
    const size_t n = 100;
    OWNED(ar_device_destroy) ar_device *d = new_device(1);
    float x[100], y[100];
    for (size_t i = 0; i < n; i++)
        x[i] = 1.0f;
    for (size_t k = 0; k < 3; k++) {
        const ar_dropout w = {
            .key = 5, .step = 1, .threshold = 0x80000000u, .scale = 2.0f, .first = firsts[k], .stride = {1}};
        const ar_tensor tx = view(1, &n, x), ty = view(1, &n, y);
        cr_assert_ok(d->ops->dropout(d, NULL, &ty, NULL, &tx, NULL, &w));
        for (size_t i = 0; i < n; i++)
            cr_assert_eq(ari_bits32(y[i]), ari_bits32(plain(1.0f, &w, firsts[k] + i)), "%zu from place %zu", i, k);
    }
}

Test(dropout_kernel, strides_number_every_dimension_on_one_and_two_threads)
{
    const size_t shape[4] = {3, 5, 64, 37}, n = 3 * 5 * 64 * 37;
    const ar_dropout w = {
        .key = 9, .step = 2, .threshold = 0x40000000u, .scale = 1.0f, .first = 1000, .stride = {100000, 10000, 101, 1}};
    OWNED(free)
    float *x = new_values(n, ORDINARY, 8), *one = new_values(n, ORDINARY, 9), *two = new_values(n, ORDINARY, 10);
    ar_device *d1 = new_device(1), *d2 = new_device(2);
    const ar_tensor tx = view(4, shape, x), t1 = view(4, shape, one), t2 = view(4, shape, two);
    cr_assert_ok(d1->ops->dropout(d1, NULL, &t1, NULL, &tx, NULL, &w));
    cr_assert_ok(d2->ops->dropout(d2, NULL, &t2, NULL, &tx, NULL, &w));
    for (size_t i = 0; i < n; i++) {
        const uint64_t number =
            1000 + i / (5 * 64 * 37) * 100000 + i / (64 * 37) % 5 * 10000 + i / 37 % 64 * 101 + i % 37;
        cr_assert_eq(ari_bits32(one[i]), ari_bits32(plain(x[i], &w, number)), "element %zu", i);
    }
    cr_assert_eq(memcmp(one, two, n * sizeof *one), 0);
    ar_device_destroy(d1);
    ar_device_destroy(d2);
}

Test(dropout_kernel, an_empty_value_is_left_alone)
{
    const size_t shape[2] = {0, 4};
    const ar_dropout w = {.stride = {4, 1}};
    OWNED(ar_device_destroy) ar_device *d = new_device(1);
    float x = 7.0f;
    const ar_tensor t = view(2, shape, &x);
    cr_assert_ok(d->ops->dropout(d, NULL, &t, NULL, &t, NULL, &w));
    cr_assert_eq(ari_bits32(x), ari_bits32(7.0f));
}

Test(dropout_kernel, a_kept_nan_stays_and_a_dropped_one_becomes_zero)
{
    const size_t n = 64;
    OWNED(ar_device_destroy) ar_device *d = new_device(1);
    float x[64], y[64];
    const ar_dropout w = {.key = 11, .step = 1, .threshold = 0x80000000u, .scale = 2.0f, .stride = {1}};
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        x[i] = NAN;
    const ar_tensor tx = view(1, &n, x), ty = view(1, &n, y);
    cr_assert_ok(d->ops->dropout(d, NULL, &ty, NULL, &tx, NULL, &w));
    for (size_t i = 0; i < n; i++) {
        const bool keep = ari_dropout_keep(11, i, 1, 0x80000000u);
        cr_assert(keep ? isnan(y[i]) : ari_bits32(y[i]) == 0, "element %zu", i);
        kept += keep;
    }
    cr_assert(kept > 10 && kept < 54);
}
