/* SPDX-License-Identifier: Apache-2.0 */
/* A few steps of what tests/extended/trajectories.c does for many: the weights of the baseline, however the run is
 * split, also where it was interrupted. */
#include "anyrank/train.h"
#include "ref/train/optimizer_private.h"
#include "support/small.h"
#include "support/trajectory.h"
#include "tests/support/temporary.h"
#include "tests/support/test.h"

static uint64_t steps(void)
{
    return small_only() ? 3 : 6;
}

Test(trajectory, every_layout_ends_with_the_baselines_weights)
{
    static const trajectory_layout layouts[] = {
        {{.tp = 2, .dp = 2, .sp = true, .micro_batches = 2}, 20000, AR_BUCKETS_OVERLAP},
        {{.dp = 4, .zero = 1}, 20000, AR_BUCKETS_OVERLAP},
        {{.dp = 7, .zero = 1}, 0, AR_BUCKETS_EAGER},
        {{.cp = 4, .cp_inner = 2, .zigzag = true, .dp = 2, .zero = 1}, 20000, AR_BUCKETS_OVERLAP},
    };
    const char *const types[] = {"llama", "gpt2"};
    for (size_t m = 0; m < 2; m++) {
        const char *path = trajectory_model(types[m], 2);
        cr_assert_not_null(path);
        const ar_training_options o = trajectory_options(path, steps());
        char expected[65], hash[65];
        float reference = 0.0f, loss = 1.0f;
        cr_assert_ok(trajectory_baseline(expected, &reference, &o));
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            cr_assert_ok(trajectory_run(hash, &loss, &o, &layouts[i]));
            cr_assert_str_eq(hash, expected, "%s, layout %zu", types[m], i);
            cr_assert_eq(loss, reference);
        }
    }
}

Test(trajectory, an_interruption_and_another_layout_change_no_bit)
{
    static const trajectory_layout first = {
        {.dp = 2, .cp = 2, .zero = 1, .tp = 2, .sp = true}, 20000, AR_BUCKETS_OVERLAP};
    static const trajectory_layout then = {{.cp = 3, .zigzag = true, .micro_batches = 2}, 0, AR_BUCKETS_EAGER};
    SCOPED(temp_end) const temp_path folder = temp_folder();
    char straight[65], hash[65];
    const char *path = trajectory_model("gpt2", 2);
    cr_assert_not_null(path);
    const ar_training_options o = trajectory_options(path, steps());
    cr_assert_ok(trajectory_run(straight, NULL, &o, &then));
    cr_assert_ok(trajectory_resumed(hash, &o, &first, 2, &then, folder.path));
    cr_assert_str_eq(hash, straight);
}

Test(trajectory, another_order_of_the_data_would_show)
{
    static const trajectory_layout one = {{.tp = 1}, 0, AR_BUCKETS_EAGER};
    ar_training_options o = trajectory_options(trajectory_model("llama", 2), 2);
    char hash[65], other[65];
    cr_assert_ok(trajectory_run(hash, NULL, &o, &one));
    o.in_order = true;
    cr_assert_ok(trajectory_run(other, NULL, &o, &one));
    cr_assert_str_neq(hash, other);
}

static void on_step(void *user, const ar_training_step *s)
{
    ((ar_training_step *)user)[s->step - 1] = *s;
}

/* The first update makes weights so large that gradients times the scale overflow: steps are left out until it has
 * fallen, and the warm-up goes on where it was. */
Test(trajectory, the_learning_rate_counts_updates_not_steps_left_out)
{
    static ar_training_step kept[8];
    ar_training_options o = trajectory_options(trajectory_model("gpt2", 2), 8);
    OWNED(ar_training_report_destroy) ar_training_report *r = NULL;
    size_t updates = 0;
    o.run.numerics = AR_NUMERICS_NATIVE;
    o.run.optimizer.lr = 3.0;
    o.run.optimizer.warmup_steps = 6;
    o.scale_loss = true;
    o.scaling = ar_loss_scaling_defaults(true);
    o.scaling.scale = 0x1p126;
    o.scaling.backoff = 0x1p-8;
    o.listener.step = on_step;
    o.listener.user = kept;
    cr_assert_ok(ar_train_run(&r, &o));
    cr_assert_eq(r->steps, 8, "%s", r->message);
    for (size_t i = 0; i < 8; i++) {
        cr_expect_eq(kept[i].lr, ari_optimizer_lr(&o.run.optimizer, updates + 1), "step %zu", i + 1);
        cr_expect_eq(r->lr[i], kept[i].lr);
        updates += !kept[i].skipped;
    }
    cr_expect(updates > 3 && updates < 8, "%zu of 8 steps had an update", updates);
}
