/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of fine-tuning, of classifiers and of attention to another sequence are named: pooling over padding, an
 * adapter's scale, smoothing of a few classes, dropout of one rank's samples, steps of one micro-batch, frozen weights.
 * Next to each is one that looks like it and is not. */
#include "support/together.h"
#include "tests/verify/two_dumps.h"

/* --- pooling ------------------------------------------------------------------------------------------------------ */

enum { ROWS = 4, PLACES = 9, CLASSES = 5 };

static size_t length_of(size_t row)
{
    return 4 + row % 3;
}

/* The row of a layer whose input is the mean over places [from, to) of x, times `times`. */
static void pool(float *out, const float *x, const float *w, size_t from, size_t to, double times)
{
    double mean[H] = {0.0};
    for (size_t i = from * H; i < to * H; i++)
        mean[i % H] += times * (double)x[i] / (double)(to - from);
    multiply(out, w, mean, H, H);
}

CLAIM(tokens_that_are_pooled_are_named)
{
    static const struct {
        bool last, all;
        double times;
        const char *cause, *words;
    } cases[] = {{false, true, 1.0, "tokens_pooled", "over all places"},
                 {true, true, 1.0, "tokens_pooled", "the last place"},
                 {true, false, 1.0, "tokens_pooled", "one token of each"},
                 {false, true, 1.3, "!tokens_pooled", NULL}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *x = put(&m, "norm:fwd", 3, ROWS, PLACES, H), *w = put(&m, "pool.weight:init", 2, H, H, 0);
        float *y = put(&m, "pool:fwd", 2, ROWS, H, 0), *z = other_of(&m);
        for (size_t row = 0; row < ROWS; row++) {
            const size_t n = length_of(row), to = cases[k].all ? PLACES : n;
            pool(y + row * H, x + row * PLACES * H, w, 0, n, 1.0);
            pool(z + row * H, x + row * PLACES * H, w, cases[k].last ? to - 1 : 0, to, cases[k].times);
        }
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

/* --- adapters ----------------------------------------------------------------------------------------------------- */

/* A layer reads base + 2 b; the other side another multiple of b, or of one that the reference does not read. */
CLAIM(the_scale_of_a_term_that_a_layer_reads_is_named)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        const float *base = put(&m, "base:fwd", 2, S, H, 0), *b = put(&m, "b:fwd", 2, S, H, 0),
                    *foreign = put(&m, "a:fwd", 2, S, H, 0), *w = put(&m, "out.weight:init", 2, 7, H, 0);
        float *y = put(&m, "out:fwd", 2, S, 7, 0), *z = other_of(&m);
        for (size_t row = 0; row < S; row++) {
            double right[H], wrong[H];
            for (size_t i = 0; i < H; i++) {
                right[i] = (double)base[row * H + i] + 2.0 * (double)b[row * H + i];
                wrong[i] = (double)base[row * H + i] + 0.5 * (double)(k ? foreign : b)[row * H + i];
            }
            multiply(y + row * 7, w, right, 7, H);
            multiply(z + row * 7, w, wrong, 7, H);
        }
        expect_cause(&m, k ? "!residual_scale" : "residual_scale", NULL, k);
    }
}

/* --- a classifier ------------------------------------------------------------------------------------------------- */

/* The mean loss with this label smoothing, and the gradient of the head's input, d W; sample 0 counts `weight` times. */
static float classify(float *dx, const float *z, const float *w, double smoothing, double weight)
{
    double total = 0.0;
    for (size_t row = 0; row < ROWS; row++) {
        const size_t y = row * 2 % CLASSES;
        double sum = 0.0, d[CLASSES];
        for (size_t c = 0; c < CLASSES; c++)
            sum += exp((double)z[row * CLASSES + c]);
        for (size_t c = 0; c < CLASSES; c++) {
            const double wanted = smoothing / CLASSES + (c == y ? 1.0 - smoothing : 0.0), by = row == 0 ? weight : 1.0;
            d[c] = by * (exp((double)z[row * CLASSES + c]) / sum - wanted) / ROWS;
            total += by * wanted * (log(sum) - (double)z[row * CLASSES + c]) / ROWS;
        }
        for (size_t i = 0; i < H; i++) {
            double x = 0.0;
            for (size_t c = 0; c < CLASSES; c++)
                x += d[c] * (double)w[c * H + i];
            dx[row * H + i] = (float)x;
        }
    }
    return (float)total;
}

CLAIM(label_smoothing_of_a_classifier_is_named)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        const float *w = put(&m, "out.weight:init", 2, CLASSES, H, 0), *z = put(&m, "out:fwd", 2, ROWS, CLASSES, 0);
        float *dx = put(&m, "out:bwd", 2, ROWS, H, 0), *dy = other_of(&m);
        const float loss = classify(dx, z, w, 0.1, 1.0);
        const float other = classify(dy, z, w, k ? 0.1 : 0.0, k ? 1.7 : 1.0);
        *put(&m, "loss:fwd", 0, 0, 0, 0) = loss;
        *other_of(&m) = other;
        expect_cause(&m, k ? "!label_smoothing" : "label_smoothing",
                     k ? NULL : "smoothing 0 where the reference has 0.1", k);
    }
}

/* --- dropout of one rank ------------------------------------------------------------------------------------------ */

/* Every second sample is dropped from and scaled; or is scaled, and zero in its first features. */
CLAIM(dropout_of_some_samples_is_named)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        const float *x = put(&m, "layers.0.drop:fwd", 3, 4, 32, H);
        float *y = other_of(&m);
        for (size_t i = 0; i < (size_t)4 * 32 * H; i++) {
            const bool zero = k ? i % H < 5 : noise(i + 77) < -0.6f;
            y[i] = i / (32 * H) % 2 == 0 ? x[i] : zero ? 0.0f : x[i] / 0.8f;
        }
        expect_cause(&m, k ? "!dropout" : "dropout", NULL, k);
    }
}

/* Of a weight's gradient one row is zero, and a third of others: rows are no samples. */
CLAIM(rows_of_a_gradient_that_differ_are_no_dropout)
{
    made m = {.n = 0};
    (void)put(&m, "tok.weight:grad", 2, 64, 32, 0);
    float *y = other_of(&m);
    for (size_t i = 0; i < 32; i++) {
        y[56 * 32 + i] = 0.0f;
        y[i] *= i % 3 ? 1.0f : 0.0f;
        y[32 + i] = y[i] == 0.0f ? 0.0f : y[32 + i];
    }
    expect_cause(&m, "!dropout_without_scale", NULL, 0);
}

/* --- attention to another sequence -------------------------------------------------------------------------------- */

enum { HEADS = 3, D = H / HEADS, HIDDEN = 3 };

/* What queries [S] find among keys [PLACES], the last `hidden` of which are unseen. */
static void attend(float *out, const float *q, const float *k, const float *v, const float *w, size_t hidden)
{
    for (size_t at = 0; at < B * S; at++) {
        double mixed[H] = {0.0};
        const size_t from = at / S * PLACES;
        for (size_t h = 0; h < HEADS; h++) {
            double weight[PLACES] = {0.0}, sum = 0.0;
            for (size_t key = 0; key + hidden < PLACES; key++) {
                for (size_t i = h * D; i < (h + 1) * D; i++)
                    weight[key] += (double)q[at * H + i] * (double)k[(from + key) * H + i] / sqrt(D);
                weight[key] = exp(weight[key]);
                sum += weight[key];
            }
            for (size_t i = h * D; i < (h + 1) * D; i++) {
                for (size_t key = 0; key + hidden < PLACES; key++)
                    mixed[i] += weight[key] / sum * (double)v[(from + key) * H + i];
            }
        }
        multiply(out + at * H, w, mixed, H, H);
    }
}

/* The module is one of three with parts of the same names; or what it finds has another sequence's values. */
CLAIM(padding_of_another_sequence_that_is_seen_is_named)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        for (size_t i = 0; i < 3; i++)
            (void)put_tokens(&m, (const char *[]){"decoder.q:fwd", "decoder.k:fwd", "decoder.v:fwd"}[i]);
        const float *own = data_of(&m, 0, 2), *q = put_tokens(&m, "cross.q:fwd");
        const float *key = put(&m, "cross.k:fwd", 3, B, PLACES, H), *v = put(&m, "cross.v:fwd", 3, B, PLACES, H),
                    *w = put(&m, "cross.o.weight:init", 2, H, H, 0);
        float *y = put_tokens(&m, "cross.o:fwd"), *z = other_of(&m);
        attend(y, q, key, v, w, HIDDEN);
        attend(z, q, key, k ? own : v, w, k ? HIDDEN : 0);
        expect_cause(&m, k ? "!keys_masked" : "keys_masked", k ? NULL : "3 keys at the end", k);
    }
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

/* The next step has the other half of the samples; or it has others. */
CLAIM(a_step_of_one_micro_batch_is_named)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        const float *x = put_tokens(&m, "embed:fwd");
        float *first = other_of(&m);
        (void)put_tokens(&m, "embed:fwd@2");
        float *second = other_of(&m);
        m.tensor[1][0].shape[0] = m.tensor[1][1].shape[0] = B / 2;
        for (size_t i = 0; i < B / 2 * S * H; i++) {
            first[i] = x[i];
            second[i] = k ? second[i] : x[B / 2 * S * H + i];
        }
        OWNED(ar_verify_report_destroy)
        ar_verify_report *r = judge(&m, (ar_verify_options){.heads = 0});
        expect_row(&r->row[0], k ? "!one_micro_batch" : "one_micro_batch", NULL, k);
    }
}

/* The reference has no gradient of the weight, which stays; or it has one, and the step was left out. */
CLAIM(a_frozen_weight_that_is_trained_is_named)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        const float *w = put(&m, "base.weight:init", 2, H, H, 0);
        (void)put(&m, "base.weight:grad", 2, H, H, 0);
        if (k == 0)
            m.tensor[0][1].name = "other.weight:grad";
        float *y = put(&m, "base.weight:new", 2, H, H, 0), *z = other_of(&m);
        for (size_t i = 0; i < H * H; i++) {
            y[i] = w[i];
            z[i] = w[i] + 1e-3f * noise(i + 5);
        }
        expect_cause(&m, k ? "!frozen_trained" : "frozen_trained", NULL, k);
    }
}

/* --- what no other row of the table names ------------------------------------------------------------------------- */

static float in_steps_of_row(size_t i, float x)
{
    const float steps = (float)(20 + i / (4 * H));
    return rintf(x * steps) / steps;
}

static float times_256(size_t i, float x)
{
    (void)i;
    return 256.0f * x;
}

static float times_root_8(size_t i, float x)
{
    (void)i;
    return 2.8284271f * x;
}

CLAIM(a_single_tensor_is_named)
{
    static const struct {
        const char *name;
        size_t rows, cols;
        float (*is)(size_t i, float x);
        const char *cause, *words;
    } cases[] = {{"base.weight:init", 4, 4 * H, in_steps_of_row, "quantised", "one step of that row's"},
                 {"loss:fwd", 1, 1, times_256, "wrong_scalar", "2^8"},
                 {"layers.0.mlp:fwd", S, H, times_root_8, "scale_by_root", "sqrt(8)"},
                 {"layers.0.mlp.weight:grad", S, H, times_root_8, "!scale_by_root", NULL}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *x = put(&m, cases[k].name, 2, cases[k].rows, cases[k].cols, 0);
        float *y = other_of(&m);
        for (size_t i = 0; i < cases[k].rows * cases[k].cols; i++)
            y[i] = cases[k].is(i, x[i]);
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

CLAIM(decay_in_a_gradient_is_named)
{
    made m = {.n = 0};
    const float *w = put(&m, "base.weight:init", 2, H, H, 0), *g = put(&m, "base.weight:grad", 2, H, H, 0);
    float *other = other_of(&m);
    for (size_t i = 0; i < H * H; i++)
        other[i] = g[i] + 0.01f * w[i];
    expect_cause(&m, "decay_in_gradient", "weight decay of 0.01", 0);
}

/* Gradients are equal; the moments are, and the step is left out but for its decay, or the first moment is of other
 * gradients. */
CLAIM(a_step_without_its_update_and_a_scale_of_moments_are_named)
{
    static const struct {
        float by;
        const char *cause, *words;
    } cases[] = {{1.0f, "no_update", "before the step"},
                 {1024.0f, "loss_scale", "the optimizer saw them times 2^10"},
                 {-1.0f, "update_sign", "the optimizer saw them times -1"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        const float by = cases[k].by;
        made m = {.n = 0};
        const float *w = put(&m, "base.weight:init", 2, H, H, 0), *g = put(&m, "base.weight:grad", 2, H, H, 0);
        memcpy(data_of(&m, 1, 0), w, H * H * sizeof *w);
        memcpy(other_of(&m), g, H * H * sizeof *g);
        const size_t of_m = k ? 4 : 3, of_new = 7 - of_m; /* the last one is looked at */
        (void)put(&m, "base.weight:v", 2, H, H, 0);
        (void)put(&m, k ? "base.weight:new" : "base.weight:m", 2, H, H, 0);
        (void)put(&m, k ? "base.weight:m" : "base.weight:new", 2, H, H, 0);
        for (size_t i = 0; i < H * H; i++) {
            const float moments[] = {0.001f * g[i] * g[i], 0.1f * g[i]},
                        now = w[i] - 1e-4f * w[i] - copysignf(1e-3f, g[i]);
            for (int side = 0; side < 2; side++) {
                const float times = side ? by : 1.0f;
                data_of(&m, side, 2)[i] = times * times * moments[0];
                data_of(&m, side, of_m)[i] = times * moments[1];
                data_of(&m, side, of_new)[i] = side && k == 0 ? w[i] - 1e-4f * w[i] : now;
            }
        }
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

CLAIM(values_of_another_tensor_are_named)
{
    static const struct {
        const char *there, *here, *cause;
    } cases[] = {{"base.weight:grad", "base.weight:grad@2", "gradient_of_last_step"},
                 {"model.layers.0.self_attn.q:fwd", "model.layers.0.self_attn.q_rope:fwd", "rope_missing"},
                 {"model.layers.0:fwd", "model.norm:fwd", "norm_missing"},
                 {"blocks.1.norm1:bwd", "blocks.1:bwd", "residual"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *there = put_tokens(&m, cases[k].there);
        (void)put_tokens(&m, cases[k].here);
        memcpy(other_of(&m), there, B * S * H * sizeof *there);
        expect_cause(&m, cases[k].cause, NULL, k);
    }
}

/* What the other adds, or lacks and has under a name of its own. */
CLAIM(gradients_of_others_are_named)
{
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        (void)put_tokens(&m, k ? "lm_head.weight:grad" : "embed.weight:grad");
        const float *there = other_of(&m);
        if (k) {
            m.tensor[0][0].name = "of_nothing.weight:grad";
            memset(data_of(&m, 0, 0), 0, B * S * H * sizeof *there);
        }
        const float *x = put_tokens(&m, k ? "embed.weight:grad" : "embed.weight:grad@3");
        for (size_t i = 0; i < B * S * H; i++)
            other_of(&m)[i] = k ? x[i] - there[i] : x[i] + there[i];
        expect_cause(&m, k ? "tied_weight" : "gradient_not_zeroed", NULL, k);
    }
}

/* Each of two experts has the other's weights. */
CLAIM(experts_in_each_others_place_are_named)
{
    made m = {.n = 0};
    const float *w = put(&m, "model.layers.1.mlp.experts.0.up_proj.weight:init", 2, H, H, 0);
    float *other = other_of(&m);
    const float *v = put(&m, "model.layers.1.mlp.experts.1.up_proj.weight:init", 2, H, H, 0);
    memcpy(other, v, H * H * sizeof *v);
    memcpy(other_of(&m), w, H * H * sizeof *w);
    expect_cause(&m, "shards_misplaced", "the two are exchanged", 0);
}

EVERY_CLAIM(replay_further)
