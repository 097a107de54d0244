/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout in the baseline: where it is, what it keeps and scales, that a mask depends on an element's place alone, and
 * that the backward pass is the derivative of the forward pass with its mask. */
#include "tests/baseline/support.h"

#include "ref/baseline/perturb.h"
#include "ref/numerics/philox.h"
#include "support/together.h"

#define P 0.25

static void run(tape *t, const ar_config *c, ar_number_mode mode, const ar_batch *batch, double p, uint64_t seed)
{
    double loss = NAN;
    const ar_baseline_options o = {
        .mode = mode, .seed = seed, .emit = tape_emit, .emit_user = t, .begin_step = tape_begin, .dropout = p};
    cr_assert_ok(ar_baseline_run(c, &o, batch, &loss));
}

/* A site and the value that enters it. */
typedef struct site {
    ar_arch arch;
    const char *name, *input;
    size_t features; /* 0: attention probabilities */
} site;

static const site sites[] = {
    {AR_ARCH_LLAMA, "model.layers.1.self_attn.attn_dropout", "model.layers.1.self_attn.probs", 0},
    {AR_ARCH_LLAMA, "model.layers.1.self_attn.resid_dropout", "model.layers.1.self_attn.o_proj", 8},
    {AR_ARCH_LLAMA, "model.layers.1.mlp.dropout", "model.layers.1.mlp.down_proj", 8},
    {AR_ARCH_GPT2, "transformer.h.0.attn.attn_dropout", "transformer.h.0.attn.probs", 0},
    {AR_ARCH_GPT2, "transformer.h.0.attn.resid_dropout", "transformer.h.0.attn.c_proj", 8},
    {AR_ARCH_GPT2, "transformer.h.0.mlp.dropout", "transformer.h.0.mlp.c_proj", 8},
    {AR_ARCH_STACK, "layers.0.attn.attn_dropout", "layers.0.attn.probs", 0},
    {AR_ARCH_STACK, "layers.0.attn.resid_dropout", "layers.0.attn.wo", 8},
    {AR_ARCH_STACK, "layers.0.mlp.dropout", "layers.0.mlp.w2", 8},
};
enum { SITES = sizeof sites / sizeof *sites };

CLAIM(names_the_sites_and_nothing_without_dropout)
{
    static tape with, without;
    const ar_batch batch = tiny_batch();
    const ar_arch archs[] = {AR_ARCH_LLAMA, AR_ARCH_GPT2, AR_ARCH_STACK};
    for (int a = 0; a < 3; a++) {
        const ar_config c = tiny_config(archs[a], 2);
        run(&with, &c, AR_MODE_EXACT, &batch, P, 7);
        run(&without, &c, AR_MODE_EXACT, &batch, 0.0, 7);
        size_t forward = 0, backward = 0;
        for (size_t i = 0; i < with.n; i++)
            if (strstr(with.at[i].name, "dropout") != NULL) {
                forward += with.at[i].pass == 'f';
                backward += with.at[i].pass == 'b';
                cr_assert(with.at[i].pass == 'f' || strstr(with.at[i].name, "attn_dropout") == NULL);
            }
        cr_assert_eq(forward, 2 * 3);
        cr_assert_eq(backward, 2 * 2);
        cr_assert_eq(with.n, without.n + forward + backward);
        for (size_t i = 0; i < without.n; i++)
            cr_assert_null(strstr(without.at[i].name, "dropout"), "%s", without.at[i].name);
        tape_clear(&with);
        tape_clear(&without);
    }
}

/* Each element by the formulas of numerics.md, section 5, written once more. */
static void check_site(const site *s, const tape *t, const ar_config *c)
{
    const taped *x = tape_find(t, s->input, 'f'), *y = tape_find(t, s->name, 'f');
    const uint64_t key = ari_stream_key(7, s->name), longest = c->max_positions;
    const float scale = (float)(1.0 / (1.0 - P));
    size_t dropped = 0;
    cr_assert_eq(x->count, y->count);
    cr_assert_eq(memcmp(x->shape, y->shape, sizeof x->shape), 0);
    for (size_t i = 0; i < y->count; i++) {
        const uint64_t columns = s->features > 0 ? s->features : 5, row = i / columns;
        const uint64_t features = s->features > 0 ? s->features : longest;
        const uint64_t index = (row / 5 * longest + row % 5) * features + i % columns;
        const uint32_t key32[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
        const uint32_t counter[4] = {(uint32_t)(index >> 2), (uint32_t)(index >> 34), 1, 0};
        uint32_t word[4];
        ari_philox4x32(counter, key32, word);
        const bool keep = word[index & 3] >= 0x40000000U; /* a quarter of 2^32 */
        const double expected = keep ? (double)((float)x->values[i] * scale) : 0.0;
        cr_assert(y->values[i] == expected && !signbit(keep ? 0.0 : y->values[i]), "%s[%zu]: %g, expected %g", s->name,
                  i, y->values[i], expected);
        dropped += !keep;
    }
    cr_assert(dropped > 0 && dropped < y->count, "%s: %zu of %zu dropped", s->name, dropped, y->count);
}

CLAIM(drops_and_scales_as_the_formulas_say)
{
    static tape t;
    const ar_batch batch = tiny_batch();
    for (size_t i = 0; i < SITES; i++) {
        const ar_config c = tiny_config(sites[i].arch, 2);
        run(&t, &c, AR_MODE_EXACT, &batch, P, 7);
        check_site(&sites[i], &t, &c);
        tape_clear(&t);
    }
}

/* Of n independent elements n*P are dropped, within 5 standard deviations. */
CLAIM(keeps_the_stated_share)
{
    SCOPED(tape_clear) tape t = {0};
    ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    int64_t ids[8 * 64];
    c.hidden = 64;
    c.max_positions = 64;
    for (int i = 0; i < 8 * 64; i++)
        ids[i] = i % 11;
    const ar_batch batch = {.batch = 8, .seq = 64, .input_ids = ids};
    run(&t, &c, AR_MODE_FP32, &batch, 0.1, 3);
    const char *const names[] = {"transformer.drop", "transformer.h.0.attn.resid_dropout",
                                 "transformer.h.0.mlp.dropout"};
    for (int i = 0; i < 3; i++) {
        const taped *y = tape_find(&t, names[i], 'f');
        double zeros = 0.0;
        for (size_t k = 0; k < y->count; k++)
            zeros += y->values[k] == 0.0;
        const double n = (double)y->count, deviation = sqrt(n * 0.1 * 0.9);
        cr_expect_lt(fabs(zeros - 0.1 * n), 5.0 * deviation, "%s: %g of %g dropped", names[i], zeros, n);
    }
}

static bool same_mask(const taped *a, const taped *b)
{
    size_t same = 0;
    cr_assert_eq(a->count, b->count);
    for (size_t i = 0; i < a->count; i++)
        same += (a->values[i] == 0.0) == (b->values[i] == 0.0);
    return same == a->count;
}

CLAIM(number_modes_share_their_masks_and_seeds_and_sites_do_not)
{
    SCOPED(tape_clear) tape exact = {0}, fp32 = {0}, f64 = {0}, other = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    const ar_batch batch = tiny_batch();
    run(&exact, &c, AR_MODE_EXACT, &batch, P, 7);
    run(&fp32, &c, AR_MODE_FP32, &batch, P, 7);
    run(&f64, &c, AR_MODE_F64, &batch, P, 7);
    run(&other, &c, AR_MODE_EXACT, &batch, P, 8);
    for (size_t i = 0; i < 3; i++) {
        const taped *y = tape_find(&exact, sites[i].name, 'f');
        cr_assert(same_mask(y, tape_find(&fp32, sites[i].name, 'f')));
        cr_assert(same_mask(y, tape_find(&f64, sites[i].name, 'f')));
        cr_assert(!same_mask(y, tape_find(&other, sites[i].name, 'f')));
    }
    cr_assert(!same_mask(tape_find(&exact, sites[1].name, 'f'), tape_find(&exact, sites[2].name, 'f')));
    cr_assert(!same_mask(tape_find(&exact, "model.layers.0.mlp.dropout", 'f'),
                         tape_find(&exact, "model.layers.1.mlp.dropout", 'f')));
}

/* The same samples, cut after three tokens: what stands at (sample, position) is dropped as before. */
CLAIM(a_mask_does_not_know_how_long_the_batch_is)
{
    SCOPED(tape_clear) tape whole = {0}, cut = {0};
    int64_t ids[3 * 3];
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    for (size_t i = 0; i < 9; i++)
        ids[i] = tiny_ids[i / 3 * 5 + i % 3];
    const ar_batch shorter = {.batch = 3, .seq = 3, .input_ids = ids};
    run(&whole, &c, AR_MODE_EXACT, &batch, P, 7);
    run(&cut, &c, AR_MODE_EXACT, &shorter, P, 7);
    const taped *a = tape_find(&whole, "model.layers.0.mlp.dropout", 'f');
    const taped *b = tape_find(&cut, "model.layers.0.mlp.dropout", 'f');
    for (size_t i = 0; i < b->count; i++) {
        const size_t row = i / 8, at = (row / 3 * 5 + row % 3) * 8 + i % 8;
        cr_assert_eq(a->values[at] == 0.0, b->values[i] == 0.0, "element %zu", i);
    }
    a = tape_find(&whole, "model.layers.0.self_attn.attn_dropout", 'f');
    b = tape_find(&cut, "model.layers.0.self_attn.attn_dropout", 'f');
    for (size_t i = 0; i < b->count; i++) {
        const size_t query = i / 3 % 3, at = (i / 9 * 5 + query) * 5 + i % 3;
        cr_assert_eq(a->values[at] == 0.0, b->values[i] == 0.0, "probability %zu", i);
    }
}

CLAIM(every_step_has_its_own_mask)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    const ar_batch batch[2] = {tiny_batch(), tiny_batch()};
    double loss[2];
    const ar_baseline_options o = {.seed = 7,
                                   .emit = tape_emit,
                                   .emit_user = &t,
                                   .begin_step = tape_begin,
                                   .dropout = P,
                                   .steps = 2,
                                   .optimizer = {.kind = AR_OPTIMIZER_SGD, .lr = 0.1}};
    cr_assert_ok(ar_baseline_run(&c, &o, batch, loss));
    const char *const names[] = {"transformer.drop", "transformer.h.0.attn.attn_dropout",
                                 "transformer.h.0.attn.resid_dropout", "transformer.h.0.mlp.dropout"};
    for (int i = 0; i < 4; i++)
        cr_assert(!same_mask(tape_find_step(&t, names[i], 'f', 1), tape_find_step(&t, names[i], 'f', 2)), "%s",
                  names[i]);
}

/* --- the derivative ----------------------------------------------------------------------------------------------- */

enum { DRAWS = 5 };

/* The loss with this mask is a function of the weights: its differences are the gradients. Step 2^-10 of the weight's
 * size and twice that, combined: an error of the order of the step's fourth power. */
static double difference(const ar_config *c, const ar_batch *batch, const char *name, size_t element)
{
    const ar_baseline_options o = {.mode = AR_MODE_F64, .seed = 7, .dropout = P};
    ari_perturbation p[4];
    for (int i = 0; i < 4; i++)
        p[i] = (ari_perturbation){
            .name = name, .element = element, .by = (i % 2 == 0 ? 1.0 : -1.0) * (i < 2 ? 0x1p-10 : 0x1p-9)};
    cr_assert_ok(ari_baseline_perturb(c, &o, batch, p, 4));
    const double near = (p[0].loss - p[1].loss) / (p[0].value - p[1].value);
    const double far = (p[2].loss - p[3].loss) / (p[2].value - p[3].value);
    return (4.0 * near - far) / 3.0;
}

static void check_derivative(ar_arch arch)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(arch, 1);
    const ar_batch batch = tiny_batch();
    run(&t, &c, AR_MODE_F64, &batch, P, 7);
    for (size_t i = 0; i < t.n && t.at[i].pass == 'i'; i++) {
        const taped *g = tape_find(&t, t.at[i].name, 'g');
        double largest = 0.0;
        for (size_t k = 0; k < g->count; k++)
            largest = fmax(largest, fabs(g->values[k]));
        for (size_t k = 0; k < DRAWS; k++) {
            const size_t at = (k * 31 + 3) % g->count;
            const double d = difference(&c, &batch, g->name, at);
            cr_expect_lt(fabs(d - g->values[at]), 1e-7 * fmax(largest, 1e-3), "%s[%zu]: %.12g, difference %.12g",
                         g->name, at, g->values[at], d);
        }
    }
}

CLAIM(the_backward_pass_is_the_derivative_with_the_same_mask)
{
    check_derivative(AR_ARCH_LLAMA);
    check_derivative(AR_ARCH_GPT2);
    check_derivative(AR_ARCH_STACK);
}

/* What was dropped has no gradient, what was kept has it scaled; at the last block's MLP it is that of the block. */
CLAIM(gradients_of_a_site_are_those_of_its_input)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_STACK, 1);
    const ar_batch batch = tiny_batch();
    run(&t, &c, AR_MODE_EXACT, &batch, P, 7);
    const taped *y = tape_find(&t, "layers.0.mlp.dropout", 'f'), *dx = tape_find(&t, "layers.0.mlp.dropout", 'b');
    for (size_t i = 0; i < y->count; i++) /* the loss is the sum of the output: its gradient is 1 */
        cr_assert_eq(dx->values[i], y->values[i] == 0.0 ? 0.0 : (double)(float)(1.0 / (1.0 - P)), "element %zu", i);
}

/* --- what is refused ---------------------------------------------------------------------------------------------- */

CLAIM(refuses_elements_that_it_cannot_number)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.dropout = P};
    double loss;
    c.max_positions = (size_t)1 << 31; /* 3 samples, 4 heads, 2^62 pairs */
    cr_assert_eq(ar_baseline_run(&c, &o, &batch, &loss), AR_ERR_OVERFLOW);
}

EVERY_CLAIM(baseline_dropout)
