/* SPDX-License-Identifier: Apache-2.0 */
/* The device's updates, sums of squares and scaling over many blocks, against the definition of one element. */
#include "anyrank/device.h"
#include "ref/core/float_bits.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/optimizer.h"
#include "support/bits.h"
#include "tests/support/test.h"

/* Five blocks of 8192 and a rest: enough that three threads share them. */
enum { N = 5 * 8192 + 37 };
static float g[N], w[N], m[N], v[N], w_expected[N], m_expected[N], v_expected[N];
static const size_t lengths[] = {0, 1, 8191, 8192, 8193, N};
enum { LENGTHS = sizeof lengths / sizeof *lengths };

static ar_device *device_of(int threads)
{
    ar_device *d = NULL;
    cr_assert_ok(ar_device_cpu_create(&d, threads));
    return d;
}

static void fill_all(void)
{
    fill_values(g, N, 1, 1.0);
    fill_values(w, N, 2, 1.0);
    fill_values(m, N, 3, 1.0);
    fill_values(v, N, 4, 1.0);
    for (size_t i = 0; i < N; i++)
        v[i] = fabsf(v[i]);
    g[3] = 0x1p-149f;
    g[5] = -0.0f;
    g[N - 2] = NAN;
    g[N - 1] = -INFINITY;
    memcpy(w_expected, w, sizeof w);
    memcpy(m_expected, m, sizeof m);
    memcpy(v_expected, v, sizeof v);
}

static const ar_optimizer_options kinds[] = {
    {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .weight_decay = 0.1},
    {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.9, .nesterov = true},
    {.kind = AR_OPTIMIZER_ADAM, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1},
    {.kind = AR_OPTIMIZER_ADAMW, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1},
    {.kind = AR_OPTIMIZER_MUON, .lr = 0.1, .momentum = 0.9, .nesterov = true},
    {.kind = AR_OPTIMIZER_MUON, .lr = 0.1, .weight_decay = 0.1}};

/* The second step: one with moments before it. */
static ari_optimizer_constants second_step(const ar_optimizer_options *o)
{
    ari_optimizer_clock clock = {0};
    ari_optimizer_tick(&clock, o);
    ari_optimizer_tick(&clock, o);
    return ari_optimizer_constants_of(&clock, o, 1.0, o->weight_decay);
}

static void expect_step(const ar_optimizer_options *o, size_t n, int threads)
{
    const ari_optimizer_constants k = second_step(o);
    const bool adam = o->kind == AR_OPTIMIZER_ADAM || o->kind == AR_OPTIMIZER_ADAMW;
    const bool momentum = adam || o->momentum != 0.0;
    OWNED(ar_device_destroy) ar_device *d = device_of(threads);
    fill_all();
    for (size_t i = 0; i < n; i++) {
        if (adam)
            ari_adam_update(&k, &w_expected[i], &m_expected[i], &v_expected[i], g[i]);
        else
            ari_sgd_update(&k, &w_expected[i], momentum ? &m_expected[i] : NULL, g[i]);
    }
    const ar_buf first = {momentum ? m : NULL}, second = {adam ? v : NULL};
    const ar_tensor weight = ari_tensor_flat(AR_F32, (ar_buf){w}, n),
                    gradient = ari_tensor_flat(AR_F32, (ar_buf){g}, n);
    cr_assert_ok(d->ops->optimizer_step(d, NULL, &weight, (ar_buf){NULL}, first, second, &gradient, &k));
    cr_expect_eq(first_different_bits(w, w_expected, N), N, "%s, %zu elements", ari_optimizer_name(o->kind), n);
    cr_expect_eq(first_different_bits(m, m_expected, N), N, "%s, %zu elements", ari_optimizer_name(o->kind), n);
    cr_expect_eq(first_different_bits(v, v_expected, N), N, "%s, %zu elements", ari_optimizer_name(o->kind), n);
}

Test(optimizer_kernels, a_step_is_the_definition_for_any_length_and_number_of_threads)
{
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        for (size_t i = 0; i < LENGTHS; i++) {
            expect_step(&kinds[kind], lengths[i], 1);
            expect_step(&kinds[kind], lengths[i], 3);
        }
    }
}

Test(optimizer_kernels, squares_add_up_to_the_same_two_integers_in_any_number_of_threads)
{
    for (size_t i = 0; i < LENGTHS; i++) {
        for (int threads = 1; threads <= 3; threads++) {
            int64_t sums[2] = {5, -7}, expected[2] = {5, -7}; /* they are added to */
            const int32_t e = 0;
            OWNED(ar_device_destroy) ar_device *d = device_of(threads);
            fill_values(g, N, 1, 1.0);
            for (size_t k = 0; k < lengths[i]; k++) {
                expected[0] += ari_norm_high(ari_norm_square(g[k], e));
                expected[1] += ari_norm_low(ari_norm_square(g[k], e));
            }
            const ar_tensor gradient = ari_tensor_flat(AR_F32, (ar_buf){g}, lengths[i]);
            cr_assert_ok(d->ops->sum_squares(d, NULL, (ar_buf){sums}, &gradient, (ar_cbuf){&e}));
            cr_expect(sums[0] == expected[0] && sums[1] == expected[1], "%zu elements, %d threads", lengths[i],
                      threads);
        }
    }
}

Test(optimizer_kernels, scaling_rounds_once_keeps_signed_zeros_and_writes_the_one_nan)
{
    for (int threads = 1; threads <= 3; threads += 2) {
        OWNED(ar_device_destroy) ar_device *d = device_of(threads);
        fill_all();
        g[7] = ari_float32(0xffc00001u); /* another NaN */
        for (size_t i = 0; i < N; i++)
            w_expected[i] = isnan(g[i]) ? NAN : g[i] * 0.3f;
        const ar_tensor all = ari_tensor_flat(AR_F32, (ar_buf){g}, N);
        cr_assert_ok(d->ops->scale(d, NULL, &all, &all, 0.3f));
        cr_expect_eq(first_different_bits(g, w_expected, N), N);
    }
}

/* The values of one in sixteen are set: others than the copies round to. */
static void fill_copies(float *copies, float *stored)
{
    fill_values(copies, N, 5, 1.0);
    copies[11] = ari_float32(0x3f808000u); /* halfway between two bf16 numbers: to the even one, 1 */
    copies[12] = ari_float32(0x3f818000u); /* the even one is the larger */
    copies[13] = -0.0f;
    for (size_t i = 0; i < N; i++)
        stored[i] = i % 16 == 3 ? 7.0f : ari_f32_of_bf16(ari_bf16_of_f32(copies[i]));
}

/* A step of a master copy: the stored weights are what it rounds to then; those that it did not round to before were
 * set since, and are its own. */
Test(optimizer_kernels, a_master_copy_takes_what_it_does_not_round_to_and_is_what_is_updated)
{
    static uint16_t halves[N], expected[N];
    const ari_optimizer_constants k = second_step(&kinds[0]);
    for (size_t i = 0; i < LENGTHS; i++)
        for (int threads = 1; threads <= 3; threads += 2) {
            OWNED(ar_device_destroy) ar_device *d = device_of(threads);
            const ar_tensor weight = ari_tensor_flat(AR_BF16, (ar_buf){halves}, lengths[i]);
            const ar_tensor gradient = ari_tensor_flat(AR_F32, (ar_buf){g}, lengths[i]);
            fill_all();
            fill_copies(m, w);
            memcpy(m_expected, m, sizeof m);
            for (size_t at = 0; at < N; at++)
                halves[at] = expected[at] = ari_bf16_of_f32(w[at]);
            for (size_t at = 0; at < lengths[i]; at++) {
                m_expected[at] = at % 16 == 3 ? 7.0f : m[at];
                ari_sgd_update(&k, &m_expected[at], NULL, g[at]);
                expected[at] = ari_bf16_of_f32(m_expected[at]);
            }
            cr_assert_ok(
                d->ops->optimizer_step(d, NULL, &weight, (ar_buf){m}, (ar_buf){NULL}, (ar_buf){NULL}, &gradient, &k));
            cr_expect_eq(first_different_bits(m, m_expected, N), N, "%zu elements, %d threads", lengths[i], threads);
            cr_expect_eq(memcmp(halves, expected, sizeof halves), 0, "%zu elements, %d threads", lengths[i], threads);
        }
}
