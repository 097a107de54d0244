/* SPDX-License-Identifier: Apache-2.0 */
/* The backward pass in binary64 against central differences of the loss, for every element of every parameter of tiny
 * models. Weights are multiples of 2^-12, so that w + H and w - H are fp32 values exactly. Richardson's combination of
 * the steps H and H/2 leaves a truncation error of order H^4 f^(5): with H = 2^-8 about 2^-32 = 2.3e-10 times a
 * derivative of order one, and a rounding error of 2^-53/H = 3e-14 of the loss. */
#include "anyrank/activation.h"
#include "ref/core/batch_private.h"
#include "tests/baseline/support.h"
#include "tests/support/small.h"

#define H 0x1p-8
#define BOUND 1e-6 /* of max(|g|, 1e-3*max|g| of the tensor) */

typedef struct pool {
    ar_loss_options loss; /* of the run */
    size_t n;
    struct {
        char name[100];
        size_t count;
        float *values;
    } at[80];
} pool;

static const float *pool_weight(void *user, const char *name, size_t count)
{
    pool *p = user;
    for (size_t i = 0; i < p->n; i++)
        if (strcmp(p->at[i].name, name) == 0)
            return p->at[i].count == count ? p->at[i].values : NULL;
    return NULL;
}

/* The fresh weights of a run, rounded; norm weights moved off one, so that they matter. */
static void pool_fill(pool *p, const tape *t)
{
    p->n = 0;
    for (size_t i = 0; i < t->n && t->at[i].pass == 'i'; i++) {
        const taped *a = &t->at[i];
        float *values = malloc(a->count * sizeof *values);
        cr_assert_not_null(values);
        for (size_t k = 0; k < a->count; k++) {
            const double moved = a->values[k] == 1.0 ? 1.0 + 0.1 * (double)(k % 5) - 0.2 : a->values[k];
            values[k] = (float)(rint(moved * 4096.0) / 4096.0);
        }
        snprintf(p->at[p->n].name, sizeof p->at[p->n].name, "%s", a->name);
        p->at[p->n].count = a->count;
        p->at[p->n++].values = values;
    }
}

static double loss_at(const ar_config *c, const ar_batch *batch, pool *p, float *w, double value)
{
    const ar_baseline_options o = {
        .mode = AR_MODE_F64, .weights = pool_weight, .weights_user = p, .loss = p->loss, .forward_only = true};
    const float before = *w;
    double loss = NAN;
    *w = (float)value;
    cr_assert_eq((double)*w, value);
    cr_assert_ok(ar_baseline_run(c, &o, batch, &loss));
    *w = before;
    return loss;
}

static double difference(const ar_config *c, const ar_batch *batch, pool *p, float *w)
{
    const double x = (double)*w;
    const double wide = (loss_at(c, batch, p, w, x + H) - loss_at(c, batch, p, w, x - H)) / (2.0 * H);
    const double half = (loss_at(c, batch, p, w, x + H / 2) - loss_at(c, batch, p, w, x - H / 2)) / H;
    return (4.0 * half - wide) / 3.0;
}

static void check_gradients_of(const char *what, const ar_config *c, const ar_batch *batch,
                               const ar_loss_options *loss_of)
{
    SCOPED(tape_clear) tape t = {0};
    static pool p;
    size_t elements = 0;
    double worst = 0.0;
    run_or_fail(c, AR_MODE_F64, batch, &t);
    p.loss = *loss_of;
    pool_fill(&p, &t);
    tape_clear(&t);
    const ar_baseline_options o = {.mode = AR_MODE_F64,
                                   .weights = pool_weight,
                                   .weights_user = &p,
                                   .loss = p.loss,
                                   .emit = tape_emit,
                                   .emit_user = &t};
    double loss = NAN;
    cr_assert_ok(ar_baseline_run(c, &o, batch, &loss));
    for (size_t i = 0; i < p.n; i++) {
        const taped *g = tape_find(&t, p.at[i].name, 'g');
        double largest = 1e-6; /* of a gradient of zeros */
        for (size_t k = 0; k < g->count; k++)
            largest = fmax(largest, fabs(g->values[k]));
        for (size_t k = 0; k < g->count; k += (size_t)by_scale(4, 2, 1), elements++) {
            const double d = difference(c, batch, &p, &p.at[i].values[k]);
            const double error = fabs(d - g->values[k]) / fmax(fabs(g->values[k]), 1e-3 * largest);
            cr_expect(error < BOUND, "%s, %s[%zu]: backward %.12g, difference %.12g", what, g->name, k, g->values[k],
                      d);
            worst = fmax(worst, error);
        }
    }
    fprintf(stderr, "%s: %zu elements of %zu parameters, worst relative error %.3g (allowed %.3g)\n", what, elements,
            p.n, worst, BOUND);
    for (size_t i = 0; i < p.n; i++)
        free(p.at[i].values);
}

static void check_gradients(const char *what, const ar_config *c, const ar_batch *batch)
{
    check_gradients_of(what, c, batch, &(ar_loss_options){0});
}

/* Sample 0: padded on the left; sample 1: full; sample 2: padded on the right. */
static const uint8_t padding[] = {0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0};
static const int64_t some_labels[] = {-100, -100, 4, 1, 5, /**/ 9, 2, 6, -100, 3, /**/ 5, 8, 9, -100, -100};

Test(baseline_gradcheck, llama_with_smoothed_labels_and_z_loss)
{
    static const ar_loss_options losses[] = {
        {.label_smoothing = 0.2}, {.z_loss = 0.1}, {.label_smoothing = 0.3, .z_loss = 0.05}};
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    ar_batch batch = tiny_batch();
    batch.labels = some_labels;
    for (size_t i = 0; i < sizeof losses / sizeof *losses; i++)
        check_gradients_of("llama, smoothed labels, z-loss", &c, &batch, &losses[i]);
}

Test(baseline_gradcheck, llama_with_padding_and_ignored_labels)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    ar_batch batch = tiny_batch();
    c.rope.kind = AR_ROPE_LINEAR;
    c.rope.factor = 2.0;
    batch.padding_mask = padding;
    batch.labels = some_labels;
    check_gradients("llama, padding, ignored labels, scaled rope", &c, &batch);
}

/* Queries 2 to 4 of layer 0 each leave keys behind; layer 1 sees all. Frequencies 1 and 0.1 of theta 100: the second
 * is a wave of 63 positions, between 40 and 80. */
Test(baseline_gradcheck, llama_with_a_window_in_one_layer_and_blended_frequencies)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    ar_batch batch = tiny_batch();
    c.window = 2;
    c.full_attention[0] = 2;
    c.rope = (ar_rope){.kind = AR_ROPE_LLAMA3,
                       .theta = 100.0,
                       .factor = 8.0,
                       .low_freq_factor = 1.0,
                       .high_freq_factor = 2.0,
                       .original_positions = 80};
    batch.padding_mask = padding;
    check_gradients("llama, a window in layer 0, llama3", &c, &batch);
}

Test(baseline_gradcheck, tied_bidirectional_llama_with_biases_and_one_kv_head)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    c.kv_heads = 1;
    c.tied = c.qkv_bias = c.out_bias = c.mlp_bias = true;
    c.causal = false;
    check_gradients("llama, tied, bidirectional, multi-query, biases", &c, &batch);
}

/* No token of these is near enough to another expert to change it within a difference. */
Test(baseline_gradcheck, qwen_with_experts_and_a_shared_one)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    ar_batch batch = tiny_batch();
    batch.padding_mask = padding;
    c.dense[0] = 1; /* layer 0 has an MLP */
    for (int normalised = 0; normalised < 2; normalised++) {
        c.experts = (ar_experts){.n = 4, .per_token = 2, .ffn = 6, .shared = 5, .normalised = normalised == 1};
        check_gradients(normalised ? "experts, normalised" : "experts", &c, &batch);
        for (ar_balance b = AR_BALANCE_NONE; b < AR_BALANCES; b++)
            check_gradients_of(ari_balance_name(b), &c, &batch,
                               &(ar_loss_options){.router = {b, b != AR_BALANCE_NONE ? 0.7 : 0.0, 0.05}});
    }
}

Test(baseline_gradcheck, gpt2_tied_with_padding)
{
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    ar_batch batch = tiny_batch();
    batch.padding_mask = padding;
    check_gradients("gpt2, tied, padding", &c, &batch);
}

Test(baseline_gradcheck, gpt2_untied_with_erf_activation_and_ignored_labels)
{
    ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    ar_batch batch = tiny_batch();
    c.tied = false;
    c.activation = AR_ACT_GELU_ERF;
    batch.labels = some_labels;
    check_gradients("gpt2, untied, erf, ignored labels", &c, &batch);
}

/* Sinks, of queries that see few keys or none, biases of router and experts. */
Test(baseline_gradcheck, gpt_oss_with_a_window_and_padding)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    ar_batch batch = tiny_batch();
    c.arch = AR_ARCH_GPT_OSS;
    c.sinks = c.qkv_bias = c.out_bias = true;
    c.window = 2;
    c.activation = AR_ACT_CLAMPED;
    c.experts = (ar_experts){.n = 3, .per_token = 2, .ffn = 4, .normalised = true, .bias = true};
    batch.padding_mask = padding;
    check_gradients("gpt-oss, a window, padding", &c, &batch);
}

/* A window that ends inside a document, padding inside another, a label that only a crossing would predict (4). */
Test(baseline_gradcheck, llama_with_documents_a_window_and_padding)
{
    ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    ar_batch batch = tiny_batch();
    c.window = 2;
    batch.documents = tiny_documents;
    batch.padding_mask = padding;
    batch.labels = some_labels;
    check_gradients("llama, documents, a window, padding", &c, &batch);
}

Test(baseline_gradcheck, gpt2_with_documents)
{
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    ar_batch batch = tiny_batch();
    batch.documents = tiny_documents;
    check_gradients("gpt2, documents", &c, &batch);
}

/* An additive mask a sample and head, with a query row that sees nothing. */
Test(baseline_gradcheck, stack_with_an_additive_mask_and_a_blind_query)
{
    const ar_config c = tiny_config(AR_ARCH_STACK, 2);
    ar_batch batch = tiny_batch();
    float mask[3 * 4 * 5 * 5];
    for (size_t i = 0; i < sizeof mask / sizeof mask[0]; i++)
        mask[i] = i % 7 == 3 ? -INFINITY : (float)(i % 5) * 0.25F - 0.5F;
    for (size_t key = 0; key < 5; key++)
        mask[((1 * 4 + 2) * 5 + 3) * 5 + key] = -INFINITY;
    batch.additive_mask = mask;
    batch.mask_batch = 3;
    batch.mask_heads = 4;
    check_gradients("stack, additive mask, blind query", &c, &batch);
}
