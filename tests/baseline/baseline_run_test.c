/* SPDX-License-Identifier: Apache-2.0 */
/* Whole runs: a case computed by hand, targets, flags, and what is refused. */
#include "tests/baseline/support.h"

#include "ref/numerics/bits.h"
#include "support/together.h"

/* --- by hand ------------------------------------------------------------------------------------------------------ */

typedef struct literal {
    const char *name;
    char pass;
    size_t count;
    double values[8];
} literal;

static const literal hand_weights[] = {
    {"embed.weight", 'i', 4, {0, 0, 3, 1}},
    {"layers.0.ln1.weight", 'i', 2, {1, 1}},
    {"layers.0.ln1.bias", 'i', 2, {0, 0}},
    {"layers.0.attn.wq.weight", 'i', 4, {1, 2, 3, 4}},
    {"layers.0.attn.wk.weight", 'i', 4, {4, 3, 2, 1}},
    {"layers.0.attn.wv.weight", 'i', 4, {1, 0, 0, 1}},
    {"layers.0.attn.wo.weight", 'i', 4, {1, 0, 0, 1}},
    {"layers.0.ln2.weight", 'i', 2, {1, 1}},
    {"layers.0.ln2.bias", 'i', 2, {0, 0}},
    {"layers.0.mlp.w1.weight", 'i', 4, {1, 0, 0, 1}},
    {"layers.0.mlp.w1.bias", 'i', 2, {0.5, 0.25}},
    {"layers.0.mlp.w2.weight", 'i', 4, {2, 0, 1, 1}},
    {"layers.0.mlp.w2.bias", 'i', 2, {0.25, 0.5}},
};

/* Token 1 alone: x = (3, 1), mean 2, xhat = (1, -1); one key, so the context is v = xhat and r = x + v = (4, 0); mean
 * 2, variance 4, xhat = (1, -1); fc = (1.5, -0.75), ReLU (1.5, 0); W2 and bias: (3.25, 2); y = (7.25, 2), loss 9.25.
 * Backwards from dy = (1, 1); two equal samples double every parameter's gradient. */
static const literal hand_expected[] = {
    {"layers.0.ln1", 'f', 4, {1, -1, 1, -1}},
    {"layers.0.attn.probs", 'f', 2, {1, 1}},
    {"layers.0.attn.context", 'f', 4, {1, -1, 1, -1}},
    {"layers.0.attn_residual", 'f', 4, {4, 0, 4, 0}},
    {"layers.0.mlp.w1", 'f', 4, {1.5, -0.75, 1.5, -0.75}},
    {"layers.0.mlp.act", 'f', 4, {1.5, 0, 1.5, 0}},
    {"layers.0.mlp.w2", 'f', 4, {3.25, 2, 3.25, 2}},
    {"layers.0", 'f', 4, {7.25, 2, 7.25, 2}},
    {"loss", 'f', 1, {18.5}},
    {"layers.0.mlp.w2", 'b', 4, {3, 1, 3, 1}},
    {"layers.0.mlp.w2.weight", 'g', 4, {3, 0, 3, 0}},
    {"layers.0.mlp.w2.bias", 'g', 2, {2, 2}},
    {"layers.0.mlp.fc", 'b', 4, {3, 0, 3, 0}},
    {"layers.0.mlp.w1", 'b', 4, {3, 0, 3, 0}},
    {"layers.0.mlp.w1.weight", 'g', 4, {6, -6, 0, 0}},
    {"layers.0.mlp.w1.bias", 'g', 2, {6, 0}},
    {"layers.0.ln2", 'b', 4, {0, 0, 0, 0}}, /* g = (3, 0): a = b = 1.5, ((3 - 1.5) - 1.5)/2 and ((0 - 1.5) + 1.5)/2 */
    {"layers.0.ln2.weight", 'g', 2, {6, 0}},
    {"layers.0.ln2.bias", 'g', 2, {6, 0}},
    {"layers.0.attn_residual", 'b', 4, {1, 1, 1, 1}},
    {"layers.0.attn.wo.weight", 'g', 4, {2, -2, 2, -2}},
    {"layers.0.attn.probs", 'b', 2, {0, 0}}, /* dP = (1, 1).(1, -1) */
    {"layers.0.attn.v", 'b', 4, {1, 1, 1, 1}},
    {"layers.0.attn.q", 'b', 4, {0, 0, 0, 0}},
    {"layers.0.attn.wq.weight", 'g', 4, {0, 0, 0, 0}},
    {"layers.0.attn.wv.weight", 'g', 4, {2, -2, 2, -2}},
    {"layers.0.attn", 'b', 4, {1, 1, 1, 1}},
    {"layers.0.ln1", 'b', 4, {0, 0, 0, 0}},
    {"layers.0.ln1.weight", 'g', 2, {2, -2}},
    {"layers.0.ln1.bias", 'g', 2, {2, 2}},
    {"layers.0", 'b', 4, {1, 1, 1, 1}},
    {"embed.weight", 'g', 4, {0, 0, 2, 2}},
};

static const float *hand_weight(void *user, const char *name, size_t count)
{
    float *out = user;
    for (size_t i = 0; i < sizeof hand_weights / sizeof hand_weights[0]; i++)
        if (strcmp(hand_weights[i].name, name) == 0 && hand_weights[i].count == count) {
            for (size_t k = 0; k < count; k++)
                out[i * 8 + k] = (float)hand_weights[i].values[k];
            return out + i * 8;
        }
    return NULL;
}

static ar_config hand_config(void)
{
    return (ar_config){.arch = AR_ARCH_STACK,
                       .vocab = 2,
                       .hidden = 2,
                       .layers = 1,
                       .heads = 1,
                       .kv_heads = 1,
                       .head_dim = 2,
                       .ffn = 2,
                       .max_positions = 4,
                       .activation = AR_ACT_RELU,
                       .norm = AR_NORM_LAYER,
                       .norm_eps = 0.0,
                       .mlp_bias = true,
                       .causal = true};
}

static void check_hand(ar_number_mode mode)
{
    SCOPED(tape_clear) tape t = {0};
    static float storage[8 * 16];
    const ar_config c = hand_config();
    const int64_t ids[] = {1, 1};
    const ar_batch batch = {.batch = 2, .seq = 1, .input_ids = ids};
    const ar_baseline_options o = {
        .mode = mode, .weights = hand_weight, .weights_user = storage, .emit = tape_emit, .emit_user = &t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(&c, &o, &batch, &loss));
    for (size_t i = 0; i < sizeof hand_expected / sizeof hand_expected[0]; i++) {
        const literal *want = &hand_expected[i];
        const taped *a = tape_find(&t, want->name, want->pass);
        cr_assert_eq(a->count, want->count);
        for (size_t k = 0; k < a->count; k++)
            cr_assert_eq(a->values[k], want->values[k], "mode %d, %s:%c[%zu] is %.17g, expected %.17g", (int)mode,
                         a->name, a->pass, k, a->values[k], want->values[k]);
    }
}

CLAIM(block_computed_by_hand_is_met_exactly_in_every_mode)
{
    check_hand(AR_MODE_EXACT);
    check_hand(AR_MODE_FP32);
    check_hand(AR_MODE_F64);
}

/* --- the loss ----------------------------------------------------------------------------------------------------- */

/* A head of zeros: p = 1/V everywhere, loss = log V. The logits' gradients are 1/(V*T) and (1/V - 1)/T at the
 * target. */
static const float *zero_head(void *user, const char *name, size_t count)
{
    static float values[64 * 64];
    (void)user;
    cr_assert_leq(count, 64 * 64);
    for (size_t i = 0; i < count; i++)
        values[i] = strcmp(name, "lm_head.weight") == 0 ? 0.0F : (float)(i % 3) * 0.5F;
    return values;
}

CLAIM(equal_logits_give_log_v_and_ignored_positions_nothing)
{
    SCOPED(tape_clear) tape t = {0};
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    c.vocab = 4;
    const int64_t ids[] = {0, 1, 2, 3}, labels[] = {0, 3, -100, 1};
    const ar_batch batch = {.batch = 1, .seq = 4, .input_ids = ids, .labels = labels}; /* targets 3, none, 1, none */
    const ar_baseline_options o = {.mode = AR_MODE_EXACT, .weights = zero_head, .emit = tape_emit, .emit_user = &t};
    const double expected[] = {0.125, 0.125, 0.125, -0.375, 0, 0, 0, 0, 0.125, -0.375, 0.125, 0.125, 0, 0, 0, 0};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(&c, &o, &batch, &loss));
    cr_assert_eq(loss, (double)(float)log(4.0));
    const taped *a = tape_find(&t, "lm_head.logits", 'b');
    for (size_t i = 0; i < 16; i++)
        cr_assert_eq(a->values[i], expected[i], "[%zu] is %g", i, a->values[i]);
}

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

/* Gradients are sums over samples whose order must not matter. */
CLAIM(exact_gradients_do_not_depend_on_the_order_of_samples)
{
    SCOPED(tape_clear) tape t = {0}, turned = {0};
    const ar_config c = tiny_config(AR_ARCH_GPT2, 2);
    ar_batch batch = tiny_batch();
    int64_t ids[15];
    for (size_t i = 0; i < 15; i++)
        ids[i] = tiny_ids[(2 - i / 5) * 5 + i % 5];
    const double loss = run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    batch.input_ids = ids;
    cr_assert_eq(run_or_fail(&c, AR_MODE_EXACT, &batch, &turned), loss);
    for (size_t i = 0; i < t.n; i++)
        if (t.at[i].pass == 'g') {
            const taped *a = &t.at[i], *b = tape_find(&turned, a->name, 'g');
            cr_assert_eq(memcmp(a->values, b->values, a->count * sizeof *a->values), 0, "%s differs", a->name);
        }
}

/* The masks say the same thing twice: equal bits. */
CLAIM(padding_and_an_additive_mask_of_minus_infinity_are_the_same)
{
    SCOPED(tape_clear) tape t = {0}, other = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const uint8_t padding[] = {0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0};
    float additive[3 * 25];
    ar_batch batch = tiny_batch();
    for (size_t i = 0; i < 75; i++)
        additive[i] = padding[i / 25 * 5 + i % 5] != 0 ? 0.0F : -INFINITY;
    batch.padding_mask = padding;
    run_or_fail(&c, AR_MODE_EXACT, &batch, &t);
    batch.padding_mask = NULL;
    batch.additive_mask = additive;
    batch.mask_batch = 3;
    batch.mask_heads = 1;
    run_or_fail(&c, AR_MODE_EXACT, &batch, &other);
    for (size_t i = 0; i < t.n; i++)
        cr_assert_eq(memcmp(t.at[i].values, other.at[i].values, t.at[i].count * sizeof(double)), 0, "%s:%c differs",
                     t.at[i].name, t.at[i].pass);
    const taped *probs = tape_find(&t, "model.layers.0.self_attn.probs", 'f');
    for (size_t key = 0; key < 5; key++) /* sample 0, head 0, query 1 sees only padded keys */
        cr_assert_eq(ari_bits64(probs->values[5 + key]), 0U);
}

/* --- flags -------------------------------------------------------------------------------------------------------- */

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

/* Logits of every document of a row, and those of the document as a row of its own. Terms that a mask leaves out are
 * zeros, which change no sum of the binary64 mode. */
static void expect_documents_alone(const ar_config *c)
{
    SCOPED(tape_clear) tape together = {0}, alone = {0};
    ar_batch batch = tiny_batch();
    batch.documents = tiny_documents;
    run_or_fail(c, AR_MODE_F64, &batch, &together);
    const taped *all = tape_find(&together, "lm_head", 'f');
    size_t documents = 0;
    for (size_t first = 0, end = 0; first < 15; first = end, documents++) {
        for (end = first + 1; end < 15 && end % 5 != 0 && tiny_documents[end] == tiny_documents[first];)
            end++;
        const ar_batch one = {.batch = 1, .seq = end - first, .input_ids = tiny_ids + first};
        run_or_fail(c, AR_MODE_F64, &one, &alone);
        const taped *own = tape_find(&alone, "lm_head", 'f');
        cr_assert_eq(own->count, (end - first) * c->vocab);
        cr_expect_arr_eq(own->values, all->values + first * c->vocab, own->count * sizeof *own->values,
                         "tokens %zu to %zu", first, end - 1);
        tape_clear(&alone);
    }
    cr_assert_eq(documents, 6U);
}

CLAIM(a_document_of_a_row_is_computed_as_if_it_were_a_row)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    expect_documents_alone(&c);
    c.window = 2;
    expect_documents_alone(&c);
    c.window = 0;
    c.causal = false;
    expect_documents_alone(&c);
    c = tiny_config(AR_ARCH_GPT2, 2);
    expect_documents_alone(&c);
}

/* Each token but the first of every document: 1 + 2, 4, 0 + 2 + 0. */
CLAIM(loss_is_that_of_the_documents_weighted_by_their_targets)
{
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    ar_batch batch = tiny_batch();
    batch.documents = tiny_documents;
    static const size_t first[] = {0, 2, 5, 11}, tokens[] = {2, 3, 5, 3};
    double sum = 0.0;
    for (size_t i = 0; i < 4; i++) {
        const ar_batch one = {.batch = 1, .seq = tokens[i], .input_ids = tiny_ids + first[i]};
        sum += (double)(tokens[i] - 1) * run_or_fail(&c, AR_MODE_F64, &one, NULL);
    }
    const double loss = run_or_fail(&c, AR_MODE_F64, &batch, NULL);
    cr_expect(fabs(loss - sum / 9.0) < 1e-14, "%.17g, expected %.17g", loss, sum / 9.0); /* a few roundings of 2^-53 */
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
    cr_assert_refused(ar_baseline_block(&stack, &exact, &batch, NULL, NULL), AR_ERR_ARG, "x or dy");
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
