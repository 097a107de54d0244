/* SPDX-License-Identifier: Apache-2.0 */
/* Whole runs: targets, flags, the masks of dropout, and what is refused. That what a run computes is right the golden files
 * and gradients by differences hold, that it is the definition every check of the ranks, which have its bits. */
#include "tests/baseline/support.h"

#include "ref/baseline/baseline_private.h"
#include "ref/numerics/bits.h"
#include "support/together.h"

/* --- the loss ----------------------------------------------------------------------------------------------------- */

static void check_no_target(const ar_config *c, const ar_batch *batch, ar_number_mode mode)
{
    SCOPED(tape_clear) tape t = {0};
    cr_assert(isnan(run_or_fail(c, mode, batch, &t)));
    for (size_t i = 0; i < t.n; i++)
        for (size_t k = 0; t.at[i].pass == 'g' && k < t.at[i].count; k++)
            cr_assert_eq(ari_bits64(t.at[i].values[k]), 0U, "%s[%zu] is %g", t.at[i].name, k, t.at[i].values[k]);
}

CLAIM(no_target_gives_loss_nan_and_gradients_of_positive_zeros)
{
    const int64_t labels[] = {1,    -100, -100,   -100, -100, /**/ 2, -100, -100,
                              -100, -100, /**/ 3, -100, -100, -100,   -100};
    const ar_arch arch[] = {AR_ARCH_LLAMA, AR_ARCH_GPT2};
    for (size_t i = 0; i < 2; i++) {
        const ar_config c = tiny_config(arch[i], 2);
        ar_batch batch = tiny_batch();
        batch.labels = labels;
        check_no_target(&c, &batch, AR_MODE_EXACT);
        check_no_target(&c, &batch, AR_MODE_FP32);
        check_no_target(&c, &batch, AR_MODE_F64);
        batch = (ar_batch){.batch = 3, .seq = 1, .input_ids = tiny_ids}; /* a single token predicts nothing */
        check_no_target(&c, &batch, AR_MODE_EXACT);
    }
}

CLAIM(forward_only_stops_after_the_loss)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.seed = 7, .forward_only = true, .emit = tape_emit, .emit_user = &t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(&c, &o, &batch, &loss));
    cr_assert_str_eq(t.at[t.n - 1].name, "loss");
    cr_assert_eq(t.at[t.n - 1].values[0], loss);
}

static const float *infinite_up(void *user, const char *name, size_t count)
{
    static float values[64 * 64];
    (void)user;
    cr_assert_leq(count, 64 * 64);
    for (size_t i = 0; i < count; i++)
        values[i] = 0.125F * (float)(i % 7 + 1);
    if (strstr(name, "up_proj") != NULL)
        values[5] = INFINITY;
    return values;
}

CLAIM(infinite_weight_makes_what_depends_on_it_the_canonical_nan)
{
    static tape t;
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_number_mode modes[] = {AR_MODE_EXACT, AR_MODE_FP32, AR_MODE_F64};
    for (size_t m = 0; m < 3; m++) {
        const ar_baseline_options o = {.mode = modes[m], .weights = infinite_up, .emit = tape_emit, .emit_user = &t};
        double loss = 0.0;
        cr_assert_ok(ar_baseline_run(&c, &o, &batch, &loss));
        cr_assert_eq(ari_bits64(loss), ari_bits64((double)ari_nan32()));
        for (size_t i = 0; i < t.n; i++)
            for (size_t k = 0; k < t.at[i].count; k++)
                if (isnan(t.at[i].values[k]))
                    cr_assert_eq(ari_bits32((float)t.at[i].values[k]), ARI_NAN_BITS, "%s", t.at[i].name);
        if (modes[m] == AR_MODE_EXACT) { /* column 0 of up_proj's output, and nothing beside it */
            const taped *up = tape_find(&t, "model.layers.0.mlp.up_proj", 'f');
            for (size_t k = 0; k < up->count; k++)
                cr_assert_eq(isnan(up->values[k]) != 0, k % 12 == 0, "[%zu] is %g", k, up->values[k]);
        }
        tape_clear(&t);
    }
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

static double tape_threads(tape *t, const ar_config *c, ar_number_mode mode, bool bf16, int threads)
{
    enum { SAMPLES = 3, POSITIONS = 37 };
    int64_t ids[SAMPLES * POSITIONS];
    for (size_t i = 0; i < SAMPLES * POSITIONS; i++)
        ids[i] = (int64_t)(i * i % 23 % c->vocab);
    const ar_batch one = {.batch = SAMPLES, .seq = POSITIONS, .input_ids = ids}, batch[2] = {one, one};
    const ar_baseline_options o = {.mode = mode,
                                   .bf16 = bf16,
                                   .steps = 2,
                                   .clip = 0.1,
                                   .dropout = 0.1,
                                   .optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                   .emit = tape_emit,
                                   .emit_user = t,
                                   .threads = threads};
    double loss[2] = {NAN, NAN};
    cr_assert_ok(ar_baseline_run(c, &o, batch, loss));
    return loss[1];
}

/* More threads than heads, rows or experts, too. */
CLAIM(any_number_of_threads_has_the_same_bits)
{
    static const ar_number_mode modes[] = {AR_MODE_EXACT, AR_MODE_EXACT, AR_MODE_FP32, AR_MODE_F64};
    for (size_t i = 0; i < 3 * 4; i++) {
        static tape one, many;
        ar_config c = tiny_config(i / 4 == 1 ? AR_ARCH_GPT2 : AR_ARCH_LLAMA, 1);
        c.hidden = 24;
        c.ffn = 50;
        c.vocab = 37;
        c.max_positions = 64;
        if (i / 4 == 2)
            c.experts = (ar_experts){.n = 7, .per_token = 2, .ffn = 20, .normalised = true, .w123 = true};
        const double loss = tape_threads(&one, &c, modes[i % 4], i % 4 == 1, 1);
        for (int threads = 2; threads <= 19; threads += 17) {
            cr_expect_eq(loss, tape_threads(&many, &c, modes[i % 4], i % 4 == 1, threads));
            cr_assert_eq(one.n, many.n);
            for (size_t k = 0; k < one.n; k++)
                cr_expect_eq(memcmp(one.at[k].values, many.at[k].values, one.at[k].count * sizeof(double)), 0,
                             "%s:%c by %d threads", one.at[k].name, one.at[k].pass, threads);
            tape_clear(&many);
        }
        tape_clear(&one);
    }
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

static void run_with_dropout(tape *t, const ar_config *c, ar_number_mode mode, uint64_t seed)
{
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.mode = mode, .seed = seed, .emit = tape_emit, .emit_user = t, .dropout = 0.25};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(c, &o, &batch, &loss));
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
    static const char *const sites[] = {"model.layers.1.self_attn.attn_dropout",
                                        "model.layers.1.self_attn.resid_dropout", "model.layers.1.mlp.dropout"};
    SCOPED(tape_clear) tape exact = {0}, fp32 = {0}, f64 = {0}, other = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    run_with_dropout(&exact, &c, AR_MODE_EXACT, 7);
    run_with_dropout(&fp32, &c, AR_MODE_FP32, 7);
    run_with_dropout(&f64, &c, AR_MODE_F64, 7);
    run_with_dropout(&other, &c, AR_MODE_EXACT, 8);
    for (size_t i = 0; i < 3; i++) {
        const taped *y = tape_find(&exact, sites[i], 'f');
        cr_assert(same_mask(y, tape_find(&fp32, sites[i], 'f')));
        cr_assert(same_mask(y, tape_find(&f64, sites[i], 'f')));
        cr_assert(!same_mask(y, tape_find(&other, sites[i], 'f')));
    }
    cr_assert(!same_mask(tape_find(&exact, sites[1], 'f'), tape_find(&exact, sites[2], 'f')));
    cr_assert(!same_mask(tape_find(&exact, "model.layers.0.mlp.dropout", 'f'), tape_find(&exact, sites[2], 'f')));
}

CLAIM(refuses_elements_that_it_cannot_number)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_baseline_options o = {.dropout = 0.25};
    double loss;
    c.max_positions = (size_t)1 << 31; /* 3 samples, 4 heads, 2^62 pairs */
    cr_assert_eq(ar_baseline_run(&c, &o, &batch, &loss), AR_ERR_OVERFLOW);
}

/* --- what is refused ---------------------------------------------------------------------------------------------- */

static const float *nan_weight(void *user, const char *name, size_t count)
{
    static float values[64 * 64];
    (void)user;
    for (size_t i = 0; i < count && i < 64 * 64; i++)
        values[i] = 1.0F;
    if (strstr(name, "o_proj") != NULL)
        values[9] = NAN;
    return values;
}

static const float *no_weight(void *user, const char *name, size_t count)
{
    static float values[64 * 64];
    (void)user;
    (void)count;
    return strstr(name, "v_proj") != NULL ? NULL : values;
}

/* The message says so, and the loss is untouched. */
static void expect_refused(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch, ar_status status,
                           const char *says)
{
    double loss = 5.0;
    cr_assert_refused(ar_baseline_run(c, o, batch, &loss), status, says);
    cr_assert_eq(loss, 5.0);
}

static const ar_baseline_options exact = {.mode = AR_MODE_EXACT};

CLAIM(bad_values_are_named)
{
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch good = tiny_batch();
    ar_batch batch = good;
    int64_t ids[15] = {0};
    ids[7] = 11;
    batch.input_ids = ids;
    expect_refused(&c, &exact, &batch, AR_ERR_DATA, "input_ids[1, 2] is 11");
    batch.input_ids = good.input_ids;
    ids[7] = -1;
    batch.labels = ids;
    expect_refused(&c, &exact, &batch, AR_ERR_DATA, "labels[1, 2] is -1");
    expect_refused(&c, &(ar_baseline_options){.weights = nan_weight}, &good, AR_ERR_DATA,
                   "'model.layers.0.self_attn.o_proj.weight' holds a NaN at element 9");
    expect_refused(&c, &(ar_baseline_options){.weights = no_weight}, &good, AR_ERR_NOT_FOUND,
                   "model.layers.0.self_attn.v_proj.weight");
}

CLAIM(bad_masks_are_named)
{
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    float mask[25] = {0};
    uint8_t padding[15] = {0};
    ar_batch batch = tiny_batch();
    padding[11] = 2;
    batch.padding_mask = padding;
    expect_refused(&c, &exact, &batch, AR_ERR_DATA, "padding_mask[2, 1] is 2");
    batch.padding_mask = NULL;
    batch.additive_mask = mask;
    batch.mask_batch = batch.mask_heads = 1;
    mask[8] = NAN;
    expect_refused(&c, &exact, &batch, AR_ERR_DATA, "additive_mask[0, 0, 1, 3] is");
    mask[8] = INFINITY;
    expect_refused(&c, &exact, &batch, AR_ERR_DATA, "additive_mask[0, 0, 1, 3] is inf");
    mask[8] = -INFINITY;
    batch.mask_heads = 2;
    expect_refused(&c, &exact, &batch, AR_ERR_ARG, "additive_mask is [1, 2, s, s]");
}

CLAIM(bad_documents_are_named)
{
    static const struct {
        int32_t documents[15];
        const char *says;
    } bad[] = {{{0, 0, 0, 0, 0, 1}, "documents[1, 0] is 1, expected 0"},
               {{0, 0, 0, 0, 0, 0, 0, 2}, "documents[1, 2] is 2, expected 0 or one more"},
               {{0, 1, 1, 0}, "documents[0, 3] is 0, expected 1 or one more"},
               {{-1}, "documents[0, 0] is -1, expected 0"}};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ar_batch batch = tiny_batch();
        batch.documents = bad[i].documents;
        expect_refused(&c, &exact, &batch, AR_ERR_DATA, bad[i].says);
    }
}

CLAIM(bad_shapes_are_refused)
{
    const ar_config good = tiny_config(AR_ARCH_LLAMA, 1), stack = tiny_config(AR_ARCH_STACK, 1);
    const ar_batch batch = tiny_batch(), none = {.seq = 5, .input_ids = tiny_ids};
    const ar_baseline_options smoothed = {.loss.label_smoothing = 0.1};
    ar_config bad[6];
    for (size_t i = 0; i < 6; i++)
        bad[i] = good;
    bad[0].max_positions = 4;
    bad[1].kv_heads = 3;
    bad[2].head_dim = 3;
    bad[3].gated = false;
    bad[4].arch = (ar_arch)99;
    bad[5].vocab = SIZE_MAX / 8;
    expect_refused(&good, &exact, &none, AR_ERR_ARG, "batch 0");
    expect_refused(&bad[0], &exact, &batch, AR_ERR_ARG, "seq 5 is longer than max_positions 4");
    expect_refused(&bad[1], &exact, &batch, AR_ERR_ARG, "4 heads over 3 kv_heads");
    expect_refused(&bad[2], &exact, &batch, AR_ERR_ARG, "head_dim 3");
    expect_refused(&bad[3], &exact, &batch, AR_ERR_UNSUPPORTED, "gated 0");
    expect_refused(&bad[4], &exact, &batch, AR_ERR_UNSUPPORTED, "architecture 99");
    expect_refused(&bad[5], &exact, &batch, AR_ERR_OVERFLOW, "");
    expect_refused(NULL, &exact, &batch, AR_ERR_ARG, "NULL");
    cr_assert_refused(ar_baseline_run(&good, &exact, &batch, NULL), AR_ERR_ARG, "loss is NULL");
    expect_refused(&stack, &smoothed, &batch, AR_ERR_ARG, "has no logits");
    cr_assert_refused(ari_baseline_block(&stack, &exact, &batch, NULL, NULL), AR_ERR_ARG, "x or dy");
}

static bool stop_at_half(void *user, double fraction)
{
    double *seen = user;
    cr_assert(fraction > *seen && fraction <= 1.0);
    *seen = fraction;
    return fraction < 0.5;
}

static ar_status refuse_fifth(void *user, const char *name, char pass, int ndim, const size_t *shape,
                              const double *values)
{
    size_t *count = user;
    (void)name, (void)pass, (void)ndim, (void)shape, (void)values;
    return ++*count == 5 ? ar_error_set(AR_ERR_IO, "the disk is full") : AR_OK;
}

CLAIM(caller_can_end_a_run)
{
    const ar_config c = tiny_config(AR_ARCH_STACK, 2);
    const ar_batch batch = tiny_batch();
    double loss = 0.0, fraction = 0.0;
    size_t count = 0;
    ar_baseline_options o = {.progress = stop_at_half, .progress_user = &fraction};
    cr_assert_refused(ar_baseline_run(&c, &o, &batch, &loss), AR_ERR_ABORTED, "stopped by the caller");
    o = (ar_baseline_options){.emit = refuse_fifth, .emit_user = &count};
    cr_assert_refused(ar_baseline_run(&c, &o, &batch, &loss), AR_ERR_IO, "the disk is full");
    cr_assert_eq(count, 5U);
}

EVERY_CLAIM(baseline_run)
