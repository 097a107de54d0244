/* SPDX-License-Identifier: Apache-2.0 */
/* What is known besides the tensor that differs: the reference's other tensors, and the gradients that a norm is of. */
#include "dump/dump.h"
#include "support/together.h"
#include "tests/verify/pattern_support.h"

TestSuite(pattern_known, .timeout = 300);

/* --- the norm of known gradients ---------------------------------------------------------------------------------- */

/* Two shards and two copies on four ranks: squares 16, 36, 9 and 4. */
enum { TP = 4, GRADIENTS = 4 };
static const double held[GRADIENTS][TP] = {{1, 2, 4, 9}, {16, 9, 8, 3}, {9, 9, 9, 9}, {4, 4, 4, 4}};
static const ari_gradient gradients[GRADIENTS] = {{"model.layers.0.mlp.up_proj.weight", 2, 16.0, held[0]},
                                                  {"model.layers.0.mlp.down_proj.weight", 2, 36.0, held[1]},
                                                  {"model.layers.0.input_layernorm.weight", 1, 9.0, held[2]},
                                                  {"model.norm.weight", 1, 4.0, held[3]}};

static void expect_norm(double square, const char *cause, const char *words)
{
    world w;
    ari_diagnosis found;
    replicated(&w, "grad_norm", 'c', TP, 0, SHAPE(1));
    w.reference[0] = (float)sqrt(65.0);
    world_refresh(&w);
    w.d.tp = TP;
    w.d.gradient = gradients;
    w.d.gradients = GRADIENTS;
    for (int r = 0; r < TP; r++)
        *at(&w, r, 0) = (float)sqrt(square);
    cr_assert_eq(ari_diagnose(&found, &w.d), AR_OK);
    cr_expect_str_eq(found.evidence.cause, cause, "%g: %s: %s", square, found.evidence.cause, found.hint);
    cr_expect(strstr(found.hint, words), "%g: no \"%s\" in: %s", square, words, found.hint);
    world_free(&w);
}

static void a_norm_names_what_it_counts_too_often_or_leaves_out(void)
{
    expect_norm(65.0 + 3 * 9.0, "norm_counts_twice", "input_layernorm.weight (1 parameter) counted once per rank");
    expect_norm(65.0 + 3 * 4.0, "norm_counts_twice", "model.norm.weight (1 parameter) counted once per rank");
    expect_norm(65.0 + 36.0, "norm_counts_twice", "down_proj.weight (1 parameter) counted once more");
    expect_norm(65.0 - 13.0, "norm_leaves_out", "(2 parameters)");
    expect_norm(1.0 + 16.0 + 13.0, "norm_leaves_out", "the shards of all ranks of their group but rank 0");
    expect_norm(65.0 - 2.0 - 9.0, "norm_leaves_out", "the shards of rank 1 of their group");
    expect_norm(65.0 * 65.0, "norm_not_rooted", "its root");
    const double mean = (sqrt(30.0) + sqrt(24.0) + sqrt(25.0) + sqrt(25.0)) / TP;
    expect_norm(mean * mean, "norm_mean_of_ranks", "the mean over 4 ranks");
    expect_norm(71.0, "unknown", "no parameter");
}

/* --- the reference's other tensors -------------------------------------------------------------------------------- */

/* The cause of a tensor beside one of its shape; the caller has filled w. */
static void expect_among(world *w, const char *full, const char *other, const float *values, const char *cause)
{
    ar_dump_tensor beside = {.name = other, .dtype = AR_F32, .whole = values, .ndim = w->d.ndim, .count = w->count};
    memcpy(beside.shape, w->shape, sizeof w->shape);
    expect_beside(w, full, &beside, cause);
}

static void copies_of_ranks_are_compared_with_the_references_other_tensors(void)
{
    float other[2 * 8 * 16];
    world w;
    for (size_t i = 0; i < sizeof other / sizeof *other; i++)
        other[i] = noise(i + 9000);
    sharded(&w, "model.layers.0.mlp.gate_proj", 'f', 2, 3, SHAPE(2, 8, 16), 2);
    for (size_t i = 0; i < w.count; i++)
        *at(&w, i % 16 / 8, i) = other[i];
    expect_among(&w, "model.layers.0.mlp.gate_proj:fwd", "model.layers.0.mlp.up_proj:fwd", other, "other_module");
    for (size_t i = 0; i < w.count; i++)
        *at(&w, i % 16 / 8, i) = w.reference[i] - other[i];
    expect_among(&w, "model.layers.0.mlp.gate_proj:fwd", "model.layers.0.mlp.up_proj:fwd", other, "residual");
    world_free(&w);
}

static void a_layers_output_without_its_residual_is_that_and_no_other_module(void)
{
    static const struct {
        const char *name, *full, *other, *cause;
        char pass;
    } cases[] = {
        {"model.layers.1", "model.layers.1:bwd", "model.layers.1.input_layernorm:bwd", "residual", 'b'},
        {"model.layers.1", "model.layers.1:fwd", "model.layers.1.mlp.down_proj:fwd", "residual", 'f'},
        {"model.layers.1", "model.layers.1:fwd", "model.layers.1.self_attn.o_proj:fwd", "other_module", 'f'},
        {"model.layers.1", "model.layers.1:fwd", "model.layers.0.mlp.down_proj:fwd", "other_tensor", 'f'},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        float branch[2 * 8 * 16];
        world w;
        replicated(&w, cases[k].name, cases[k].pass, 2, 3, SHAPE(2, 8, 16));
        for (size_t i = 0; i < w.count; i++)
            branch[i] = *at(&w, 0, i) = *at(&w, 1, i) = noise(i + 9000);
        expect_among(&w, cases[k].full, cases[k].other, branch, cases[k].cause);
        world_free(&w);
    }
}

static void the_value_of_the_step_before_is_stale(void)
{
    float before[2 * 8 * 16];
    world w;
    replicated(&w, "model.layers.1.mlp", 'f', 2, 3, SHAPE(2, 8, 16));
    for (size_t i = 0; i < w.count; i++)
        before[i] = *at(&w, 0, i) = *at(&w, 1, i) = noise(i + 9000);
    expect_among(&w, "model.layers.1.mlp:fwd@2", "model.layers.1.mlp:fwd", before, "stale_value");
    expect_among(&w, "model.layers.1.mlp:fwd", "model.layers.1.mlp:bwd", before, "other_point_of_step");
    world_free(&w);
}

static void values_before_dropout_at_zeros_of_both_are_a_mask_without_its_scale(void)
{
    float before[2 * 8 * 16];
    world w;
    replicated(&w, "transformer.h.0.mlp.dropout", 'f', 2, 3, SHAPE(2, 8, 16));
    for (size_t i = 0; i < w.count; i++) {
        before[i] = noise(i + 9000);
        w.reference[i] = i % 5 == 0 ? 0.0f : 1.25f * before[i];
        *at(&w, 0, i) = *at(&w, 1, i) = i % 5 == 0 ? 0.0f : before[i];
    }
    expect_among(&w, "transformer.h.0.mlp.dropout:fwd", "transformer.h.0.mlp.c_proj:fwd", before,
                 "dropout_without_scale");
    for (size_t i = 0; i < w.count; i++)
        *at(&w, 0, i) = *at(&w, 1, i) = before[i];
    expect_among(&w, "transformer.h.0.mlp.dropout:fwd", "transformer.h.0.mlp.c_proj:fwd", before, "other_module");
    world_free(&w);
}

/* --- updates whose gradient is known ------------------------------------------------------------------------------ */

/* The update of a weight of gradient g: SGD's, or Adam's first one with that epsilon, and a decay. */
static float moved(float before, float g, double rate, double eps)
{
    const double own = (double)g, decay = 1e-3 * 0.01 * (double)before;
    return (float)((double)before - (eps > 0.0 ? decay + rate * own / (fabs(own) + eps) : rate * own));
}

static void updates_are_told_apart_by_their_gradient(void)
{
    static const struct {
        double rate, eps, other_rate, other_eps;
        const char *cause;
    } cases[] = {
        {0.1, 0.0, 0.05, 0.0, "update_scaled"},   {1e-3, 1e-8, 1e-3, 1e-2, "adam_eps"},
        {1e-3, 1e-2, 1e-3, 1e-8, "adam_eps"},     {1e-3, 1e-8, 0.7e-3, 1e-8, "update_scaled"},
        {1e-3, 1e-8, -1e-3, 1e-8, "update_sign"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        enum { COUNT = 128 };
        float before[COUNT], gradient[COUNT];
        world w;
        replicated(&w, "model.norm.weight", 'n', 2, 1, SHAPE(COUNT));
        for (size_t i = 0; i < COUNT; i++) {
            before[i] = 0.1f * noise(i + 50);
            gradient[i] = 0.02f * noise(i + 7000);
            w.reference[i] = moved(before[i], gradient[i], cases[k].rate, cases[k].eps);
            *at(&w, 0, i) = *at(&w, 1, i) = moved(before[i], gradient[i], cases[k].other_rate, cases[k].other_eps);
        }
        w.d.before = before;
        w.d.step = 1;
        expect_among(&w, "model.norm.weight:new", "model.norm.weight:grad", gradient, cases[k].cause);
        world_free(&w);
    }
}

/* Each query's softmax of its scores times `scale`, of its last `window` keys. */
static float probability(size_t index, double scale, size_t window)
{
    const size_t key = index % 8, query = index / 8 % 8, row = index - key;
    double sum = 0.0;
    for (size_t k = 0; k <= query; k++)
        sum += k + window > query ? exp(scale * (double)noise(row + k)) : 0.0;
    return key <= query && key + window > query ? (float)(exp(scale * (double)noise(index)) / sum) : 0.0f;
}

static void probabilities_show_another_scale_and_another_window(void)
{
    static const struct {
        double scale;
        size_t window;
        const char *cause;
    } cases[] = {{0.5, 8, "softmax_scale"}, {3.0, 8, "softmax_scale"}, {1.0, 4, "attention_window"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w;
        sharded(&w, "model.layers.0.self_attn.probs", 'f', 2, 4, SHAPE(2, 4, 8, 8), 1);
        for (size_t k = 0; k < w.count; k++)
            w.reference[k] = probability(k, 1.0, 8);
        world_refresh(&w);
        for (size_t k = 0; k < w.count; k++)
            *at(&w, k / 64 % 4 / 2, k) = probability(k, cases[i].scale, cases[i].window);
        expect_among(&w, "model.layers.0.self_attn.probs:fwd", "other", w.reference, cases[i].cause);
        world_free(&w);
    }
}

/* --- what a loss was divided by ----------------------------------------------------------------------------------- */

static void a_loss_divided_by_another_count_says_which(void)
{
    static const struct {
        double factor;
        const char *cause;
    } cases[] = {
        {92.0 / 96.0, "divisor_of_other_count"}, {92.0 / 71.0, "divisor_of_other_count"}, {1.0123, "target_logit"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        world w;
        ari_diagnosis found;
        replicated(&w, "loss", 'f', 2, 0, SHAPE(1));
        w.reference[0] = 5.6789f;
        world_refresh(&w);
        w.d.batch = 4;
        w.d.seq = 24;
        for (int r = 0; r < 2; r++)
            *at(&w, r, 0) = (float)((double)w.reference[0] * cases[i].factor);
        cr_assert_eq(ari_diagnose(&found, &w.d), AR_OK);
        cr_expect_str_eq(found.evidence.cause, cases[i].cause, "%g: %s", cases[i].factor, found.hint);
        world_free(&w);
    }
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

static void the_last_element_alone_is_not_an_id_of_nobody(void)
{
    world w;
    replicated(&w, "model.embed_tokens.weight", 'n', 2, 2, SHAPE(33, 16));
    for (int r = 0; r < 2; r++)
        *at(&w, r, w.count - 1) += 0.25f;
    expect_among(&w, "model.embed_tokens.weight:new", "other", w.reference, "few_elements");
    world_free(&w);
}

Test(pattern_known, every_claim)
{
    TOGETHER(a_norm_names_what_it_counts_too_often_or_leaves_out,
             copies_of_ranks_are_compared_with_the_references_other_tensors,
             a_layers_output_without_its_residual_is_that_and_no_other_module, the_value_of_the_step_before_is_stale,
             values_before_dropout_at_zeros_of_both_are_a_mask_without_its_scale,
             updates_are_told_apart_by_their_gradient, probabilities_show_another_scale_and_another_window,
             a_loss_divided_by_another_count_says_which, the_last_element_alone_is_not_an_id_of_nobody);
}
