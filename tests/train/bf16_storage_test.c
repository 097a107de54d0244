/* SPDX-License-Identifier: Apache-2.0 */
/* Matrices of bf16 numbers with fp32 copies in the optimizer, in native numerics. */
#include "anyrank/train.h"
#include "ref/core/float_bits.h"
#include "tests/train/native_expect.h"

static native_run run_of(ar_parallel parallel, int steps, ar_dtype storage)
{
    native_run run = native_run_of(parallel, steps);
    run.run.storage = storage;
    return run;
}

static size_t bf16_numbers(const float *x, size_t n)
{
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        count += (ari_bits32(x[i]) & 0xffffu) == 0;
    return count;
}

Test(bf16_storage, matrices_are_bf16_numbers_before_and_after_steps_and_vectors_are_not)
{
    for (size_t i = 0; i < NATIVE_LAYOUTS; i++)
        for (int steps = 0; steps <= 3; steps += 3) {
            native_run run = run_of(native_layouts[i], steps, AR_BF16);
            native_must(&run);
            const native_rank *r = &run.rank[0];
            cr_expect_eq(bf16_numbers(r->weights, r->matrices), r->matrices, "layout %zu after %d steps", i, steps);
            cr_expect(r->matrices > 0 && r->matrices < r->n);
            if (steps > 0) /* norms began as ones, which are bf16 numbers */
                cr_expect_lt(bf16_numbers(r->weights + r->matrices, r->n - r->matrices), (r->n - r->matrices) / 2);
        }
}

Test(bf16_storage, the_optimizer_keeps_what_the_weights_round)
{
    for (size_t i = 0; i < 3; i++) { /* with ZeRO a rank has masters of its shares only */
        native_run run = run_of(native_layouts[i], 3, AR_BF16);
        native_must(&run);
        const native_rank *r = &run.rank[0];
        cr_assert_eq(r->n_masters, r->matrices);
        cr_expect_lt(bf16_numbers(r->masters, r->n_masters), r->n_masters / 100, "they hold more");
        float rounded[NATIVE_WEIGHTS];
        for (size_t k = 0; k < r->n_masters; k++)
            rounded[k] = ari_f32_of_bf16(ari_bf16_of_f32(r->masters[k]));
        cr_expect_eq(first_different_bits(r->weights, rounded, r->matrices), r->matrices);
    }
}

/* From 1/8 to 1/4 bf16 numbers are 2^-10 apart: an update of 2^-14 changes none, ten of them do. */
Test(bf16_storage, steps_too_small_for_bf16_add_up)
{
    native_run run = run_of((ar_parallel){0}, 10, AR_BF16), none = run_of((ar_parallel){0}, 0, AR_BF16);
    run.run.optimizer.lr = 0x1p-14;
    native_must(&run);
    native_must(&none);
    size_t large = 0, moved = 0, of_masters = 0;
    for (size_t k = 0; k < run.rank[0].matrices; k++) {
        const float before = none.rank[0].weights[k];
        if (fabsf(before) < 0.125f || fabsf(before) > 0.25f)
            continue;
        large++;
        moved += run.rank[0].weights[k] != before;
        of_masters += run.rank[0].masters[k] != before;
    }
    cr_expect(large > 100 && moved > large / 10, "%zu of %zu", moved, large);
    cr_expect_gt(of_masters, large / 2);
}

Test(bf16_storage, a_run_has_the_same_bits_each_time)
{
    for (size_t i = 0; i < NATIVE_LAYOUTS; i++) {
        native_run a = run_of(native_layouts[i], 3, AR_BF16), b = run_of(native_layouts[i], 3, AR_BF16);
        native_must(&a);
        native_must(&b);
        native_expect_same_weights(&a.rank[0], &b.rank[0], "weights");
        cr_expect_eq(first_different_bits(a.rank[0].loss, b.rank[0].loss, 3), 3);
    }
}

Test(bf16_storage, zero_and_buckets_of_one_parameter_have_the_bits_of_whole_ones)
{
    native_run whole = run_of((ar_parallel){.dp = 2}, 3, AR_BF16);
    native_run buckets = run_of((ar_parallel){.dp = 2}, 3, AR_BF16);
    buckets.run.ddp.bucket_bytes = 1; /* of two ranks' numbers there is one sum, whatever the slices */
    native_must(&whole);
    native_must(&buckets);
    for (int stage = 1; stage <= 3; stage++) {
        native_run zero = run_of((ar_parallel){.dp = 2, .zero = stage}, 3, AR_BF16);
        native_must(&zero);
        native_expect_same_weights(&zero.rank[0], &whole.rank[0], "zero");
        native_expect_same_weights(&zero.rank[1], &whole.rank[1], "zero, rank 1");
    }
    native_expect_same_weights(&buckets.rank[1], &whole.rank[1], "a bucket for each parameter");
}

/* A weight is off by 2^-9 of itself at most; measured: a loss by 0.2 %. */
Test(bf16_storage, losses_are_close_to_those_of_fp32)
{
    native_run narrow = run_of((ar_parallel){.dp = 2}, 12, AR_BF16), wide = run_of((ar_parallel){.dp = 2}, 12, AR_F32);
    narrow.run.optimizer.lr = wide.run.optimizer.lr = 0.01;
    native_must(&narrow);
    native_must(&wide);
    double worst = 0.0;
    for (int i = 0; i < 12; i++)
        worst = fmax(worst, fabs((double)narrow.rank[0].loss[i] / (double)wide.rank[0].loss[i] - 1.0));
    cr_log_info("worst relative difference %g; losses %g to %g", worst, (double)wide.rank[0].loss[0],
                (double)wide.rank[0].loss[11]);
    cr_expect(worst > 0.0 && worst < 0x1p-7, "%g", worst);
    cr_expect_lt(wide.rank[0].loss[11], 0.8f * wide.rank[0].loss[0], "it learns");
    cr_expect_eq(wide.rank[0].n_masters, 0);
}

Test(bf16_storage, weights_set_between_steps_reach_the_master_copies)
{
    native_run run = run_of((ar_parallel){.dp = 2}, 2, AR_BF16);
    run.set_between = true;
    run.run.optimizer.lr = 0x1p-20;
    run.run.optimizer.weight_decay = 0.0;
    native_must(&run);
    for (size_t k = 0; k < run.rank[0].n_masters; k++)
        cr_expect_lt(fabsf(run.rank[0].masters[k] - 0.25f), 0x1p-18f, "element %zu: %g", k,
                     (double)run.rank[0].masters[k]);
}

Test(bf16_storage, it_goes_with_loss_scaling)
{
    ar_loss_scaling scaling = ar_loss_scaling_defaults(true);
    native_run scaled = run_of((ar_parallel){.tp = 2, .dp = 2}, 3, AR_BF16);
    native_run plain = run_of((ar_parallel){.tp = 2, .dp = 2}, 3, AR_BF16);
    scaled.scaling = &scaling;
    native_must(&scaled);
    native_must(&plain);
    native_expect_same_weights(&scaled.rank[0], &plain.rank[0], "a power of two, in bf16 too");
}

Test(bf16_storage, exact_numerics_refuse_it_and_say_why)
{
    native_run run = run_of((ar_parallel){0}, 1, AR_BF16);
    run.run.numerics = AR_NUMERICS_EXACT;
    cr_expect_refused(native_train(&run), AR_ERR_ARG, "BF16 in exact numerics, whose weights and baseline are fp32");
    run = run_of((ar_parallel){0}, 1, AR_F16);
    cr_expect_refused(native_train(&run), AR_ERR_ARG, "stored as F16, expected F32 or BF16");
}
