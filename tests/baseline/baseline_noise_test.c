/* SPDX-License-Identifier: Apache-2.0 */
/* The binary64 baseline with errors of fp32's size: reproducible, of the size that fp32 makes, no more. */
#include "tests/baseline/support.h"

#include "ref/baseline/run.h"
#include "ref/numerics/philox.h"
#include "support/together.h"

static void run(tape *t, const ar_config *c, const ar_batch *batch, ar_number_mode mode, uint64_t noise)
{
    double loss[2];
    const ar_batch batches[2] = {*batch, *batch};
    const ar_baseline_options o = {
        .mode = mode,
        .seed = 7,
        .emit = tape_emit,
        .emit_user = t,
        .begin_step = tape_begin,
        .noise_seed = noise,
        .steps = 2,
        .clip = 1.0,
        .dropout = 0.1,
        .optimizer = {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}};
    cr_assert_ok(ar_baseline_run(c, &o, batches, loss));
}

static double largest_of(const taped *a)
{
    double largest = 0.0;
    for (size_t i = 0; i < a->count; i++)
        largest = fmax(largest, fabs(a->values[i]));
    return largest;
}

static double distance(const taped *a, const taped *b)
{
    double worst = 0.0;
    cr_assert_eq(a->count, b->count);
    cr_assert_str_eq(a->name, b->name);
    for (size_t i = 0; i < a->count; i++)
        worst = fmax(worst, fabs(a->values[i] - b->values[i]));
    return worst;
}

CLAIM(one_seed_errs_the_same_way_twice_and_another_errs_otherwise)
{
    SCOPED(tape_clear) tape a = {0}, b = {0}, other = {0};
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    const ar_batch batch = tiny_batch();
    run(&a, &c, &batch, AR_MODE_F64, 1);
    run(&b, &c, &batch, AR_MODE_F64, 1);
    run(&other, &c, &batch, AR_MODE_F64, 2);
    cr_assert(a.n == b.n && a.n == other.n);
    for (size_t i = 0; i < a.n; i++) {
        cr_assert_eq(distance(&a.at[i], &b.at[i]), 0.0, "%s:%c", a.at[i].name, a.at[i].pass);
        if (a.at[i].pass != 'i' && strcmp(a.at[i].name, "transformer.wte") != 0) /* a selection rounds nothing */
            cr_assert_gt(distance(&a.at[i], &other.at[i]), 0.0, "%s:%c", a.at[i].name, a.at[i].pass);
    }
}

/* Nothing is off by more than some hundred roundings, nor by much less than one. */
CLAIM(errors_have_the_size_of_fp32)
{
    SCOPED(tape_clear) tape quiet = {0}, noisy = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    const ar_batch batch = tiny_batch();
    run(&quiet, &c, &batch, AR_MODE_F64, 0);
    run(&noisy, &c, &batch, AR_MODE_F64, 1);
    for (size_t i = 0; i < quiet.n; i++) {
        const taped *a = &quiet.at[i];
        if (a->pass == 'i' || (a->step == 1 && strcmp(a->name, "model.embed_tokens") == 0))
            continue;
        const double error = distance(a, &noisy.at[i]) / largest_of(a);
        cr_expect(error > 0x1p-30 && error < 0x1p-16, "%s:%c of step %d: %.3g of the largest element", a->name, a->pass,
                  a->step, error);
    }
}

/* The use that check makes of it: eight times the largest difference of three draws, and the step of the largest
 * number, hold what fp32 sums from first to last do. */
static void check_cover(ar_arch arch, const char *what)
{
    static tape quiet, fp32, noisy[3];
    const ar_config c = tiny_config(arch, 2);
    const ar_batch batch = tiny_batch();
    double worst = 0.0;
    run(&quiet, &c, &batch, AR_MODE_F64, 0);
    run(&fp32, &c, &batch, AR_MODE_FP32, 0);
    for (uint64_t i = 0; i < 3; i++)
        run(&noisy[i], &c, &batch, AR_MODE_F64, i + 1);
    for (size_t i = 0; i < quiet.n; i++) {
        double spread = 0.0;
        for (int k = 0; k < 3; k++)
            spread = fmax(spread, distance(&quiet.at[i], &noisy[k].at[i]));
        const float largest = (float)largest_of(&quiet.at[i]);
        const double allowed = 8.0 * spread + (double)(nextafterf(largest, INFINITY) - largest);
        const double ratio = distance(&quiet.at[i], &fp32.at[i]) / allowed;
        cr_expect_leq(ratio, 1.0, "%s, %s:%c of step %d: %.3g", what, quiet.at[i].name, quiet.at[i].pass,
                      quiet.at[i].step, ratio);
        worst = fmax(worst, ratio);
    }
    fprintf(stderr, "%s: fp32 is off by at most %.2f of what is allowed\n", what, worst);
    cr_assert_gt(worst, 0.05, "the allowance is not empty of meaning");
    tape_clear(&quiet);
    tape_clear(&fp32);
    for (int k = 0; k < 3; k++)
        tape_clear(&noisy[k]);
}

CLAIM(eight_times_the_spread_of_three_seeds_covers_fp32)
{
    check_cover(AR_ARCH_LLAMA, "llama");
    check_cover(AR_ARCH_GPT2, "gpt2");
    check_cover(AR_ARCH_STACK, "stack");
}

CLAIM(numbers_have_the_stated_range_mean_and_variance)
{
    enum { N = 1 << 16 };
    ari_bl_noise noise = {.key = ari_stream_key(5, "noise")};
    double sum = 0.0, squares = 0.0, largest = 0.0;
    for (int i = 0; i < N; i++) {
        const double x = ari_bl_noise_uniform(&noise);
        sum += x;
        squares += x * x;
        largest = fmax(largest, fabs(x));
    }
    cr_assert(largest < 1.0 && largest > 0.999);
    cr_assert_lt(fabs(sum / N), 5.0 / sqrt(3.0 * N));
    cr_assert_lt(fabs(squares / N - 1.0 / 3.0), 5.0 * sqrt(4.0 / 45.0 / N)); /* x^2 has the variance 1/5 - 1/9 */
    sum = squares = 0.0;
    for (int i = 0; i < N; i++) {
        const double x = ari_bl_noise_normal(&noise);
        cr_assert_lt(fabs(x), 3.5);
        sum += x;
        squares += x * x;
    }
    cr_assert_lt(fabs(sum / N), 5.0 / sqrt(N));
    cr_assert_lt(fabs(squares / N - 1.0), 5.0 * sqrt(2.0 / N));
}

/* A sum of K ones errs, in K additions, by 2^-24 of 1, 2, .., K each: the root of the sum of their squares. K*2^-24
 * would be 18 times too small for K = 1000, K^2*2^-24 55 times too large. */
CLAIM(a_contraction_errs_as_its_partial_sums_do)
{
    enum { M = 64, K = 1000 };
    static double ones[M * K], c[M * M];
    const ar_baseline_options o = {.mode = AR_MODE_F64};
    ari_bl_noise noise = {.key = 3, .unit = {.product = 0x1p-24, .inner = 0x1p-24}};
    ari_bl_run r = {.o = &o, .noise = &noise};
    double squares = 0.0, model = 0.0;
    for (size_t i = 0; i < M * K; i++)
        ones[i] = 1.0;
    const ari_bl_matrix rows = {ones, K, 1};
    cr_assert_ok(ari_bl_contract(&r, c, M, M, K, rows, rows, true));
    for (size_t i = 0; i < M * M; i++)
        squares += (c[i] - K) * (c[i] - K);
    for (double k = 1.0; k <= K; k += 1.0)
        model += k * k + 1.0;
    const double expected = 0x1p-24 * sqrt(model), got = sqrt(squares / (M * M));
    cr_assert(got > 0.9 * expected && got < 1.1 * expected, "%.3g, expected %.3g", got, expected);
    ari_bl_release(&r, NULL);
}

EVERY_CLAIM(baseline_noise)
