/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients against differences of the loss, on models of a few hundred weights: what is right passes, what is wrong in
 * one tensor by 1e-5 does not, and is named. */
#include "ref/core/size.h"
#include "tests/support/small.h"
#include "tests/support/test.h"
#include "tests/support/tiny_config.h"
#include "verify/gradcheck/gradcheck.h"

static ar_config tiny(ar_arch arch)
{
    ar_config c = tiny_config(arch, 2);
    c.vocab = 13;
    c.max_positions = 20;
    return c;
}

static const int64_t ids[3 * 18] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8,
                                    3, 2, 7, 9, 5, 0, 2, 8, 8, 4, 1, 9, 7, 1, 6, 9, 3, 9, 9, 3, 7, 5, 1, 0, 5, 8, 2};
static const ar_batch batch = {.batch = 3, .seq = 18, .input_ids = ids};

static ar_gradcheck check(const ari_gradcheck_case *c)
{
    ar_gradcheck g;
    memset(&g, 0x7f, sizeof g);
    cr_assert_ok(ari_gradcheck(&g, c));
    cr_assert_eq(g.rows, AR_GRADCHECK_STEPS);
    for (size_t i = 0; i < g.rows; i++) {
        cr_assert_eq(g.row[i].step, 0.0625 / pow(4.0, (double)i));
        cr_assert_geq(g.row[i].max_relative_error, g.max_relative_error);
    }
    cr_assert_eq(g.row[g.best].max_relative_error, g.max_relative_error);
    cr_assert_str_eq(g.row[g.best].worst_tensor, g.worst_tensor);
    return g;
}

static void expect_ok(const ar_config *c, size_t parameters)
{
    for (uint64_t seed = 0; seed < (uint64_t)by_scale(1, 1, 3); seed++) {
        const ar_gradcheck g = check(&(ari_gradcheck_case){.config = c, .batch = &batch, .seed = seed, .threads = 1});
        cr_expect(g.ok, "seed %d: %.3g in %s", (int)seed, g.max_relative_error, g.worst_tensor);
        cr_assert_lt(g.max_relative_error, 1e-6);
        cr_assert_str_neq(g.worst_tensor, "");
        cr_assert_eq(g.batch, 2);
        cr_assert_eq(g.seq, 16);
        cr_assert_eq(g.parameters, parameters);
        cr_assert(g.elements >= 2 * parameters && g.elements <= 3 * parameters, "%zu elements", g.elements);
        cr_assert_gt(g.row[0].max_relative_error, 10.0 * g.max_relative_error, "a step too long shows");
        cr_assert_gt(g.row[7].max_relative_error, 10.0 * g.max_relative_error, "a step too short shows");
    }
}

Test(gradcheck, passes_for_every_architecture_on_two_samples_of_sixteen_tokens)
{
    const ar_config llama = tiny(AR_ARCH_LLAMA), gpt2 = tiny(AR_ARCH_GPT2), stack = tiny(AR_ARCH_STACK);
    expect_ok(&llama, 2 * 9 + 3);
    expect_ok(&gpt2, 2 * 12 + 4);
    expect_ok(&stack, 2 * 12 + 1);
}

/* The gradient of a pad's embedding leaves out what the loss makes of it. */
Test(gradcheck, passes_where_the_text_has_pads)
{
    ar_config c = tiny(AR_ARCH_LLAMA);
    c.vocab = 10; /* all of them are there */
    c.pads = true;
    c.pad_id = 3;
    expect_ok(&c, 2 * 9 + 3);
}

/* Softmax ignores a shift of all scores: what binary64 leaves of the gradient is rounding. */
Test(gradcheck, passes_a_key_bias_whose_gradient_is_noise)
{
    ar_config c = tiny(AR_ARCH_LLAMA);
    c.rope.kind = AR_ROPE_NONE;
    c.qkv_bias = true;
    expect_ok(&c, 2 * 12 + 3);
}

/* Tokens change their experts at all but short steps, at which the gradients of an expert with one token are lost in the
 * rounding of the losses. */
Test(gradcheck, passes_experts_whose_gradients_are_small)
{
    ar_config c;
    cr_assert_ok(ar_config_load(&c, TEST_DATA_DIR "/qwen2-moe-demo"));
    c.experts.n = 12; /* as many as show it */
    const ar_gradcheck g = check(&(ari_gradcheck_case){.config = &c, .batch = &batch, .threads = 1});
    cr_expect(g.ok, "%.3g in %s", g.max_relative_error, g.worst_tensor);
}

static struct {
    const char *name;         /* of the tensor that is spoilt */
    double factor, zero, all; /* g becomes all + g*factor, zeros become `zero` */
    ar_baseline_emit emit;
    void *user;
} spoilt;

static ar_status spoil(void *user, const char *name, char pass, int ndim, const size_t *shape, const double *values)
{
    static double copy[4096];
    (void)user;
    if (pass != 'g' || strcmp(name, spoilt.name) != 0)
        return spoilt.emit(spoilt.user, name, pass, ndim, shape, values);
    for (size_t k = 0; k < ari_volume(shape, ndim); k++)
        copy[k] = spoilt.all + (values[k] == 0.0 ? spoilt.zero : values[k] * spoilt.factor);
    return spoilt.emit(spoilt.user, name, pass, ndim, shape, copy);
}

static ar_status wrong(const ar_config *c, const ar_baseline_options *o, const ar_batch *b, double *loss)
{
    ar_baseline_options with = *o;
    spoilt.emit = o->emit;
    spoilt.user = o->emit_user;
    with.emit = spoil;
    return ar_baseline_run(c, &with, b, loss);
}

/* Token 12 of 13 does not occur: its row of the embedding has the gradient zero. Of those no element is zero any more
 * where all are 1e-7, which is too little to be drawn. */
Test(gradcheck, fails_a_gradient_that_is_wrong_in_its_fifth_digit_or_more_and_names_it)
{
    static const struct {
        const char *name;
        double factor, zero, all;
        double least, most; /* of the error; 0: it passes */
    } rows[] = {
        {"model.norm.weight", 1.0, 0.0, 0.0, 0.0, 0.0},
        {"model.embed_tokens.weight", 1.0 + 1e-5, 0.0, 0.0, 0.9e-5, 1.1e-5},
        {"model.layers.0.self_attn.k_proj.weight", 1.0 + 1e-5, 0.0, 0.0, 0.9e-5, 1.1e-5},
        {"model.layers.1.mlp.up_proj.weight", 1.0 + 1e-5, 0.0, 0.0, 0.9e-5, 1.1e-5},
        {"model.norm.weight", 1.0 + 1e-5, 0.0, 0.0, 0.9e-5, 1.1e-5},
        {"lm_head.weight", 1.0 + 1e-5, 0.0, 0.0, 0.9e-5, 1.1e-5},
        {"model.embed_tokens.weight", 1.0, 1e-7, 0.0, 0.0, 0.0},
        {"model.embed_tokens.weight", 1.0, 1.0, 0.0, 1e-5, HUGE_VAL},
        {"model.layers.0.mlp.gate_proj.weight", 0.0, 0.0, 0.0, 0.1, HUGE_VAL},
        {"model.layers.1.self_attn.v_proj.weight", 1.0, 0.0, NAN, HUGE_VAL, HUGE_VAL},
    };
    const ar_config c = tiny(AR_ARCH_LLAMA);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].most < 1.0 && i > 1 && i < 6 && i % (size_t)by_scale(4, 2, 1) != 1)
            continue;
        spoilt.name = rows[i].name;
        spoilt.factor = rows[i].factor;
        spoilt.zero = rows[i].zero;
        spoilt.all = rows[i].all;
        const ar_gradcheck g =
            check(&(ari_gradcheck_case){.config = &c, .batch = &batch, .threads = 1, .gradients = wrong});
        cr_expect_eq(g.ok, rows[i].least == 0.0, "row %zu: %.3g in %s", i, g.max_relative_error, g.worst_tensor);
        if (g.ok)
            continue;
        cr_expect(g.max_relative_error >= rows[i].least && g.max_relative_error <= rows[i].most, "row %zu: %.3g", i,
                  g.max_relative_error);
        cr_expect_str_eq(g.worst_tensor, rows[i].name, "row %zu", i);
    }
}

Test(gradcheck, two_threads_find_what_one_finds)
{
    const ar_config c = tiny(AR_ARCH_GPT2);
    ari_gradcheck_case one = {.config = &c, .batch = &batch, .seed = 5, .threads = 1}, two = one;
    two.threads = 2;
    const ar_gradcheck a = check(&one), b = check(&two);
    cr_assert_eq(a.elements, b.elements);
    for (size_t i = 0; i < a.rows; i++) {
        cr_assert_eq(a.row[i].max_relative_error, b.row[i].max_relative_error);
        cr_assert_str_eq(a.row[i].worst_tensor, b.row[i].worst_tensor);
    }
}

Test(gradcheck, takes_what_a_short_model_and_a_small_batch_hold)
{
    ar_config c = tiny(AR_ARCH_LLAMA);
    c.max_positions = 7;
    ar_batch small = batch;
    small.batch = 1;
    const ar_gradcheck g = check(&(ari_gradcheck_case){.config = &c, .batch = &small, .threads = 1});
    cr_assert_eq(g.batch, 1);
    cr_assert_eq(g.seq, 7);
    cr_assert(g.ok, "%.3g in %s", g.max_relative_error, g.worst_tensor);
}

/* Of the documents that begin at 5 and 17 of row 0 and at 1 of row 1, what 16 tokens hold. */
static ar_status with_documents(const ar_config *c, const ar_baseline_options *o, const ar_batch *b, double *loss)
{
    cr_assert(b->documents && b->batch == 2 && b->seq == 16);
    for (size_t i = 0; i < 32; i++)
        cr_expect_eq(b->documents[i], i < 16 ? i >= 5 : i >= 17, "token %zu", i);
    return ar_baseline_run(c, o, b, loss);
}

Test(gradcheck, takes_the_documents_of_the_batch)
{
    const ar_config c = tiny(AR_ARCH_LLAMA);
    int32_t documents[3 * 18];
    for (size_t i = 0; i < 3 * 18; i++)
        documents[i] = i < 18 ? (i >= 5) + (i >= 17) : i < 36 ? i >= 19 : 0;
    ar_batch packed = batch;
    packed.documents = documents;
    const ar_gradcheck g =
        check(&(ari_gradcheck_case){.config = &c, .batch = &packed, .threads = 1, .gradients = with_documents});
    cr_assert(g.ok, "%.3g in %s", g.max_relative_error, g.worst_tensor);
}

static bool twice(void *user, double fraction)
{
    int *calls = user;
    return fraction >= 0.0 && fraction <= 1.0 && ++*calls < 2;
}

Test(gradcheck, ends_when_progress_says_so)
{
    const ar_config c = tiny(AR_ARCH_STACK);
    for (int threads = 1; threads <= 2; threads++) {
        int calls = 0;
        ar_gradcheck g;
        const ari_gradcheck_case k = {
            .config = &c, .batch = &batch, .threads = threads, .progress = twice, .progress_user = &calls};
        cr_assert_eq(ari_gradcheck(&g, &k), AR_ERR_ABORTED);
        cr_assert_eq(calls, 2);
    }
}

static const float *nothing(void *user, const char *name, size_t count)
{
    (void)user, (void)name, (void)count;
    return NULL;
}

Test(gradcheck, names_a_weight_that_is_not_there)
{
    const ar_config c = tiny(AR_ARCH_LLAMA);
    ar_gradcheck g;
    const ari_gradcheck_case k = {.config = &c, .batch = &batch, .weights = nothing};
    cr_assert_refused(ari_gradcheck(&g, &k), AR_ERR_NOT_FOUND, "model.embed_tokens.weight");
}
