/* SPDX-License-Identifier: Apache-2.0 */
/* The baseline's rotations and learning rates against those of ref/numerics, bit by bit, for more configs than checks
 * run. A formula has two texts so that a mistake in one of them is seen. */
#include "tests/baseline/support.h"

#include "ref/numerics/optimizer.h"
#include "ref/numerics/rope_check.h"
#include "ref/numerics/scalar.h"
#include "support/together.h"

enum { SEQ = 40, HEAD = 20, STEPS = 12 };

/* --- rotations ---------------------------------------------------------------------------------------------------- */

/* Compares each head's rotated queries with the rotation of the queries by ref/numerics. */
static void expect_rotated(const tape *t, const ar_rope *rope)
{
    const taped *q = tape_find(t, "model.layers.0.self_attn.q_proj", 'f');
    const taped *turned = tape_find(t, "model.layers.0.self_attn.q_rope", 'f');
    const size_t d = ar_rope_dim(rope, HEAD), half = d / 2;
    const ar_rope at = ari_rope_at(rope, SEQ, HEAD);
    const float attention = ari_rope_attention(rope);
    for (size_t row = 0; row < q->count; row += HEAD) /* [SEQ, heads, HEAD] */
        for (size_t i = 0; i < half; i++) {
            const size_t position = row / (q->count / SEQ);
            const float angle = ari_rope_angle(position, ari_rope_frequency(&at, i, d));
            const float c = ari_cos32(angle) * attention, s = ari_sin32(angle) * attention;
            const float x1 = (float)q->values[row + i], x2 = (float)q->values[row + half + i];
            const bool same = turned->values[row + i] == (double)ari_rope_first(x1, x2, c, s) &&
                              turned->values[row + half + i] == (double)ari_rope_second(x1, x2, c, s);
            cr_assert(same, "kind %d, factor %g, theta %g, %zu features: pair %zu at position %zu", (int)rope->kind,
                      rope->factor, rope->theta, d, i, position);
        }
}

static void compare_rotations(ar_rope rope)
{
    SCOPED(tape_clear) tape t = {0};
    static int64_t ids[SEQ];
    for (size_t i = 0; i < SEQ; i++)
        ids[i] = (int64_t)(i * i % 11);
    for (size_t i = 0; i < HEAD / 2; i++) {
        rope.short_factor[i] = 1.0f + 0.1f * (float)i;
        rope.long_factor[i] = 1.5f + 0.7f * (float)i;
    }
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    c.head_dim = HEAD;
    c.max_positions = SEQ;
    c.rope = rope;
    run_or_fail(&c, AR_MODE_EXACT, &(ar_batch){.batch = 1, .seq = SEQ, .input_ids = ids}, &t);
    expect_rotated(&t, &rope);
}

CLAIM(rotations_have_the_same_bits_in_both_texts)
{
    static const double theta[] = {100.0, 10000.0, 500000.0}, factor[] = {1.0, 1.7, 8.0};
    static const size_t original[] = {7, 24, 300};
    for (int kind = AR_ROPE_DEFAULT; kind <= AR_ROPE_LONGROPE; kind++)
        for (size_t i = 0; i < 27; i++)
            compare_rotations((ar_rope){.kind = (ar_rope_kind)kind,
                                        .theta = theta[i % 3],
                                        .factor = factor[i / 3 % 3],
                                        .original_positions = original[i / 9],
                                        .rotary_dim = i % 2 == 0 ? 0 : 12,
                                        .low_freq_factor = i % 3 == 0 ? 0.7 : 1.0,
                                        .high_freq_factor = i % 3 == 0 ? 2.9 : 4.0,
                                        .beta_fast = i % 2 == 0 ? 2.0 : 32.0,
                                        .beta_slow = 0.5,
                                        .truncate = i % 4 < 2,
                                        .mscale = i % 5 == 0 ? 1.5 : 0.0,
                                        .mscale_all_dim = i % 5 == 0 ? 0.5 : 0.0,
                                        .attention_factor = i % 7 == 0 ? 1.25 : 0.0});
}

/* --- learning rates ----------------------------------------------------------------------------------------------- */

/* With SGD in binary64 a step takes rate*gradient from a weight. */
static void compare_rates(const ar_optimizer_options *optimizer)
{
    static const char name[] = "model.norm.weight";
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    ar_batch batch[STEPS];
    double loss[STEPS];
    for (size_t i = 0; i < STEPS; i++)
        batch[i] = tiny_batch();
    const ar_baseline_options o = {.mode = AR_MODE_F64,
                                   .seed = 7,
                                   .emit = tape_emit,
                                   .emit_user = &t,
                                   .begin_step = tape_begin,
                                   .steps = STEPS,
                                   .optimizer = *optimizer};
    cr_assert_ok(ar_baseline_run(&c, &o, batch, loss));
    const double *w = tape_find_step(&t, name, 'i', 1)->values;
    for (int step = 1; step <= STEPS; step++) {
        const taped *updated = tape_find_step(&t, name, 'n', step);
        const double *g = tape_find_step(&t, name, 'g', step)->values;
        for (size_t k = 0; k < updated->count; k++)
            cr_assert(updated->values[k] == w[k] - ari_schedule_lr(optimizer, (uint64_t)step) * g[k],
                      "schedule %d, %d of %d steps of warm-up, min_lr %g: step %d", (int)optimizer->schedule,
                      (int)optimizer->warmup_steps, (int)optimizer->total_steps, optimizer->min_lr, step);
        w = updated->values;
    }
}

CLAIM(learning_rates_have_the_same_bits_in_both_texts)
{
    static const double lr[] = {0.0, 0.3, 7.0};
    for (uint64_t i = 0; i < 54; i++) {
        ar_optimizer_options o = {.kind = AR_OPTIMIZER_SGD, .lr = lr[i % 3], .warmup_steps = i / 3 % 3 * 3};
        o.schedule = i / 9 % 3 == 0 ? AR_SCHEDULE_CONSTANT : AR_SCHEDULE_COSINE;
        o.min_lr = i / 9 % 3 == 1 ? 0.1 * o.lr : 0.0;
        o.total_steps = i / 27 == 0 ? 6 : STEPS - 1;
        compare_rates(&o);
    }
}

EVERY_CLAIM(two_texts)
