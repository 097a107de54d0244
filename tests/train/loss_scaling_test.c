/* SPDX-License-Identifier: Apache-2.0 */
/* Loss scaling in native numerics: a power of two changes no bit, what overflows is left out on all ranks alike. */
#include "anyrank/context.h"
#include "ref/train/step.h"
#include "ref/train/train_private.h"
#include "tests/train/native_expect.h"

static native_run run_of(ar_parallel parallel, int steps, ar_loss_scaling *scaling)
{
    native_run run = native_run_of(parallel, steps);
    run.scaling = scaling;
    return run;
}

Test(loss_scaling, a_static_power_of_two_changes_no_bit)
{
    for (size_t i = 0; i < 2 * NATIVE_LAYOUTS - 1; i++) { /* all, then those without ZeRO on their own */
        native_run plain = run_of(native_layouts[i % NATIVE_LAYOUTS], 3, NULL);
        ar_loss_scaling scaling = ar_loss_scaling_defaults(false);
        native_run scaled = run_of(native_layouts[i % NATIVE_LAYOUTS], 3, &scaling);
        plain.no_ddp = scaled.no_ddp = i >= NATIVE_LAYOUTS;
        native_must(&plain);
        native_must(&scaled);
        native_expect_same_weights(&plain.rank[0], &scaled.rank[0], "weights");
        cr_expect_eq(first_different_bits(scaled.rank[0].norm, plain.rank[0].norm, 3), 3);
        cr_expect(scaled.rank[0].norm[0] > 0.0f && scaled.rank[0].scaling.scale == 65536.0);
    }
}

Test(loss_scaling, a_dynamic_scale_leaves_steps_out_until_it_fits_and_all_ranks_agree)
{
    for (size_t i = 0; i < NATIVE_LAYOUTS; i++) {
        ar_loss_scaling scaling = ar_loss_scaling_defaults(true);
        scaling.scale = 0x1p126;
        scaling.backoff = 0x1p-20;
        native_run run = run_of(native_layouts[i], 4, &scaling), none = run_of(native_layouts[i], 3, NULL);
        run.large = none.large = true;
        native_must(&run);
        native_must(&none);
        const native_rank *first = &run.rank[0];
        cr_expect(first->skipped[0] && !first->skipped[1] && !first->skipped[2] && !first->skipped[3]);
        cr_expect(isnan(first->norm[0]) && isfinite(first->norm[1]));
        cr_expect(first->scale[0] == 0x1p106 && first->scale[3] == 0x1p106);
        cr_expect(first->scaling.skipped == 1 && first->scaling.good == 3 && first->updates == 3);
        cr_expect_eq(first->loss[1], first->loss[0], "no weight has changed");
        native_expect_same_weights(first, &none.rank[0], "three updates");
        for (int r = 1; r < native_layouts[i].dp * (native_layouts[i].tp ? native_layouts[i].tp : 1); r++)
            cr_expect(run.rank[r].updates == 3 && run.rank[r].scaling.scale == 0x1p106 && run.rank[r].skipped[0]);
    }
}

typedef struct one_rank {
    int wrong; /* the rank whose norm is not finite; -1: none */
    bool finite[NATIVE_RANKS];
} one_rank;

static ar_status ask(ar_ctx *ctx, void *user)
{
    one_rank *o = user;
    const int r = ar_comm_rank(ar_ctx_dp(ctx)) * (int)ranks_of(ctx) + (int)rank_of(ctx);
    return ari_scaling_finite(&o->finite[r], ctx, r == o->wrong ? NAN : 1.0f);
}

Test(loss_scaling, one_ranks_overflow_is_every_ranks)
{
    for (int wrong = -1; wrong < 4; wrong++) {
        one_rank o = {.wrong = wrong};
        const ar_run options = {.parallel = {.tp = 2, .dp = 2}, .numerics = AR_NUMERICS_NATIVE};
        cr_assert_ok(rank_run(&options, ask, &o));
        for (int r = 0; r < 4; r++)
            cr_expect_eq(o.finite[r], wrong < 0, "rank %d, where rank %d is wrong", r, wrong);
    }
}

Test(loss_scaling, a_scale_grows_after_an_interval_of_updates_and_begins_to_count_anew)
{
    ar_loss_scaling scaling = ar_loss_scaling_defaults(true);
    scaling.scale = 8.0;
    scaling.interval = 2;
    native_run run = run_of((ar_parallel){.dp = 2}, 5, &scaling);
    native_must(&run);
    static const double expected[] = {8.0, 16.0, 16.0, 32.0, 32.0};
    for (int i = 0; i < 5; i++)
        cr_expect_eq(run.rank[1].scale[i], expected[i], "step %d: %g", i + 1, run.rank[1].scale[i]);
    cr_expect_eq(run.rank[1].scaling.good, 1);
}

Test(loss_scaling, a_static_scale_that_overflows_is_an_error_before_a_weight_has_changed)
{
    ar_loss_scaling scaling = ar_loss_scaling_defaults(false);
    scaling.scale = 0x1p126;
    native_run run = run_of((ar_parallel){.dp = 2}, 1, &scaling), none = run_of((ar_parallel){.dp = 2}, 0, NULL);
    run.large = none.large = true;
    cr_expect_refused(native_train(&run), AR_ERR_DATA, "static loss scale of 8.50706e+37");
    native_must(&none);
    native_expect_same_weights(&run.rank[0], &none.rank[0], "weights");
}

Test(loss_scaling, a_scale_does_not_fall_below_1)
{
    ar_loss_scaling scaling = ar_loss_scaling_defaults(true);
    scaling.scale = 0x1p126;
    scaling.backoff = 0x1p-127; /* at once */
    native_run run = run_of((ar_parallel){0}, 1, &scaling);
    run.large = true;
    cr_expect_refused(native_train(&run), AR_ERR_DATA, "does not fall below 1");
}

Test(loss_scaling, exact_numerics_refuse_it_and_say_why)
{
    ar_loss_scaling scaling = ar_loss_scaling_defaults(true);
    native_run run = run_of((ar_parallel){.dp = 2}, 1, &scaling);
    run.run.numerics = AR_NUMERICS_EXACT;
    cr_expect_refused(native_train(&run), AR_ERR_ARG,
                      "loss scaling in exact numerics: its gradients are sums of integers");
}

Test(loss_scaling, an_option_out_of_its_range_is_refused_by_name)
{
    ar_loss_scaling s[8];
    for (size_t i = 0; i < 8; i++)
        s[i] = ar_loss_scaling_defaults(true);
    cr_expect_ok(ari_loss_scaling_check(&s[0]));
    s[0].scale = 0.5;
    s[1].scale = 0x1p127;
    s[2].scale = NAN;
    s[3].growth = 1.0;
    s[4].growth = INFINITY;
    s[5].backoff = 1.0;
    s[6].backoff = 0.0;
    s[7].interval = 0;
    static const char *const names[] = {"scale",  "scale",   "scale",   "growth",
                                        "growth", "backoff", "backoff", "interval"};
    for (size_t i = 0; i < 8; i++) {
        cr_expect_refused(ari_loss_scaling_check(&s[i]), AR_ERR_ARG, names[i]);
    }
    s[7].dynamic = false; /* asks for nothing but the scale */
    cr_expect_ok(ari_loss_scaling_check(&s[7]));
}
