/* SPDX-License-Identifier: Apache-2.0 */
/* A module of two dumps that was computed with one mistake is named by computing it again. The modules are computed
 * here by plain loops; replay_attention_test.c has attention. */
#include "ref/core/float_bits.h"
#include "support/together.h"
#include "tests/verify/two_dumps.h"

/* --- an MLP ------------------------------------------------------------------------------------------------------- */

static double silu(double x)
{
    return x / (1.0 + exp(-x));
}

static double relu(double x)
{
    return fmax(x, 0.0);
}

enum { WIDE = 20 };

/* Gate and up packed; out [B, S, H] = W2 (f(gate) * up). Names: of gate and up, the weight, the output. */
static made mlp(double (*f)(double), bool exchanged, const char *const names[3])
{
    made m = {.n = 0};
    const float *x = put(&m, names[0], 3, B, S, 2 * WIDE), *w = put(&m, names[1], 2, H, WIDE, 0);
    float *y = put_tokens(&m, names[2]), *z = other_of(&m);
    for (size_t row = 0; row < B * S; row++) {
        double right[WIDE], wrong[WIDE];
        for (size_t k = 0; k < WIDE; k++) {
            const double gate = (double)x[row * 2 * WIDE + k], up = (double)x[row * 2 * WIDE + WIDE + k];
            right[k] = silu(gate) * up;
            wrong[k] = exchanged ? f(up) * gate : f(gate) * up;
        }
        multiply(y + row * H, w, right, H, WIDE);
        multiply(z + row * H, w, wrong, H, WIDE);
    }
    return m;
}

CLAIM(one_mistake_of_an_mlp_is_named_whatever_its_names_are)
{
    static const char *const names[][3] = {{"decoder.layers.0.mlp.linear_fc1:fwd",
                                            "decoder.layers.0.mlp.linear_fc2.weight:init",
                                            "decoder.layers.0.mlp.linear_fc2:fwd"},
                                           {"layers.0.mix.a:fwd", "layers.0.mix.b.weight:init", "layers.0.mix.b:fwd"}};
    for (size_t k = 0; k < 2; k++) {
        made m = mlp(relu, false, names[k]);
        expect_cause(&m, "activation_function", "relu, where the reference has silu", k);
    }
    made m = mlp(silu, true, names[0]);
    expect_cause(&m, "activation_arguments", NULL, 2);
}

/* GPT-2's names, whose weights are [in, out]: the MLP's first layer reads what its norm should read. */
CLAIM(a_norm_that_is_left_out_or_another_is_named)
{
    for (size_t other = 0; other < 2; other++) {
        made m = {.n = 0};
        const float *x = put_tokens(&m, "transformer.h.0:fwd"), *first = put_tokens(&m, "transformer.h.1.ln_1:fwd");
        const float *y = put_tokens(&m, "transformer.h.1.attn:fwd"),
                    *normed = put_tokens(&m, "transformer.h.1.ln_2:fwd");
        const float *w = put(&m, "transformer.h.1.mlp.c_fc.weight:init", 2, H, WIDE, 0);
        float *a = put(&m, "transformer.h.1.mlp.c_fc:fwd", 3, B, S, WIDE), *b = other_of(&m);
        for (size_t i = 0; i < B * S * WIDE; i++) {
            double right = 0.0, wrong = 0.0;
            for (size_t k = 0; k < H; k++) {
                const size_t from = i / WIDE * H + k;
                right += (double)normed[from] * (double)w[k * WIDE + i % WIDE];
                wrong += (double)(other ? first[from] : x[from] + y[from]) * (double)w[k * WIDE + i % WIDE];
            }
            a[i] = (float)right;
            b[i] = (float)wrong;
        }
        expect_cause(&m, other ? "other_input" : "norm_missing", other ? "ln_1:fwd as its input" : NULL, other);
    }
}

/* --- a norm ------------------------------------------------------------------------------------------------------- */

typedef struct norm {
    double eps, of_x, of_y, plus; /* how often the two terms count; what is added to the weight */
    bool centred, dropout;        /* of y, a fifth of it */
    bool cut;                     /* the weight, with what is added to it, to bf16 */
} norm;

/* out [B, S, H] = the norm of of_x x + of_y y. */
static void normalise(float *out, const float *x, const float *y, const float *w, norm p)
{
    for (size_t at = 0; at < B * S * H; at += H) {
        double v[H], mean = 0.0, square = 0.0;
        for (size_t i = 0; i < H; i++) {
            const double m = !p.dropout ? 1.0 : (i * 7 + (size_t)fabs(1e4 * (double)x[at])) % 5 == 0 ? 0.0 : 1.25;
            v[i] = p.of_x * (double)x[at + i] + m * p.of_y * (double)y[at + i];
            mean += v[i] / H;
        }
        for (size_t i = 0; i < H; i++) {
            v[i] -= p.centred ? mean : 0.0;
            square += v[i] * v[i] / H;
        }
        for (size_t i = 0; i < H; i++) {
            const float gain = (float)((double)w[i] + p.plus);
            out[at + i] =
                (float)(v[i] / sqrt(square + p.eps) * (double)(p.cut ? ari_f32_of_bf16(ari_bf16_of_f32(gain)) : gain));
        }
    }
}

static const norm rms = {1e-6, 1.0, 1.0, 0.0, false, false, false},
                  gain_of_1 = {1e-6, 1.0, 1.0, 1.0, false, false, false};

typedef struct norm_tensors {
    const float *x, *y, *w, *branch;
    float *out, *other;
} norm_tensors;

static norm_tensors make_norm(made *m, norm right, norm wrong)
{
    norm_tensors t = {.x = put_tokens(m, "layers.0:fwd"), .y = put_tokens(m, "layers.1.attention:fwd")};
    t.w = put(m, "layers.1.ffn_norm.weight:init", 1, H, 0, 0);
    t.branch = put_tokens(m, "layers.1.attention.wo:fwd");
    t.out = put_tokens(m, "layers.1.ffn_norm:fwd");
    t.other = other_of(m);
    normalise(t.out, t.x, t.y, t.w, right);
    normalise(t.other, t.x, t.y, t.w, wrong);
    return t;
}

CLAIM(one_mistake_of_a_norm_is_named)
{
    static const norm centred = {1e-6, 1.0, 1.0, 0.0, true, false, false};
    const struct {
        norm right, wrong;
        const char *cause;
    } cases[] = {{rms, {1e-3, 1.0, 1.0, 0.0, false, false, false}, "norm_epsilon"},
                 {rms, centred, "norm_mean"},
                 {rms, {1e-6, 1.0, 0.0, 0.0, false, false, false}, "residual"},
                 {rms, {1e-6, 0.0, 1.0, 0.0, false, false, false}, "residual"},
                 {rms, {1e-6, 1.0, 2.0, 0.0, false, false, false}, "residual"},
                 {rms, {1e-6, 1.0, 1.0, 0.0, false, true, false}, "dropout"},
                 {rms, gain_of_1, "gain_offset"},
                 {gain_of_1, rms, "gain_offset"},
                 {gain_of_1, {.eps = 1e-6, .of_x = 1.0, .of_y = 1.0, .plus = 2.0}, "gain_offset"},
                 {gain_of_1, {.eps = 1e-6, .of_x = 1.0, .of_y = 1.0, .plus = 1.0, .cut = true}, "fewer_bits"},
                 {gain_of_1, {1e-3, 1.0, 1.0, 1.0, false, false, false}, "norm_epsilon"},
                 {centred, rms, "norm_mean"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        (void)make_norm(&m, cases[k].right, cases[k].wrong);
        expect_cause(&m, cases[k].cause, k == 2 || k == 3 ? "another mixture" : NULL, k);
    }
}

CLAIM(a_norm_of_another_statistic_or_place_is_named)
{
    enum { PASSED_ON, SAMPLES, SHARD, PLAIN, OWN, AFTER, ALONE, WAYS };
    static const char *const causes[WAYS] = {
        "norm_missing", "norm_statistic", "norm_statistic", "gain_twice_or_missing",
        "residual",     "residual",       "other_input"};
    static const char *const words[WAYS] = {[PLAIN] = "the norm's weight is left out", [OWN] = "as this run has them"};
    static const norm branch = {1e-6, 0.0, 1.0, 0.0, true, false, false};
    for (size_t way = 0; way < WAYS; way++) {
        made m = {.n = 0};
        norm right = rms;
        right.centred = way != PASSED_ON;
        const norm_tensors t = make_norm(&m, right, right);
        float *own = data_of(&m, 1, 3); /* the branch's values in the other */
        for (size_t i = 0; i < B * S * H && way == OWN; i++)
            own[i] = noise(i + 555);
        if (way == OWN)
            normalise(t.other, t.x, own, t.w, right);
        if (way >= AFTER)
            normalise(t.other, t.x, way == AFTER ? t.y : t.branch, t.w, branch);
        for (size_t i = 0; i < B * S * H; i++)
            t.other[i] = way == PASSED_ON ? t.x[i] + t.y[i]
                         : way == SAMPLES ? t.other[i] * sqrtf((float)(H - 1) / (float)H)
                         : way == SHARD   ? t.other[i] / sqrtf(2.0f)
                         : way == PLAIN   ? t.other[i] / t.w[i % H]
                         : way == AFTER   ? t.other[i] + t.x[i]
                                          : t.other[i];
        expect_cause_on(way == SHARD ? 2 : 1, &m, causes[way], words[way], way);
    }
}

/* A norm of a sum of two tensors, one of them the embedding's output, and the layer's own sum of both and a third, which
 * may be all there is. */
CLAIM(numbers_of_the_terms_of_a_sum_are_told_apart)
{
    static const struct {
        double of_x[2], of_y[2]; /* in the reference, in the other */
        const char *cause;
    } cases[] = {{{3.0, 1.0}, {0.5, 0.5}, "embedding_scale"},
                 {{1.4, 1.0}, {1.0, 1.4}, "residual_scale"},
                 {{1.0, 1.0}, {0.6, 1.0}, "residual_scale"}};
    for (size_t both = 0; both < 2 * sizeof cases / sizeof *cases; both++) {
        const size_t k = both / 2;
        made m = {.n = 0};
        const float *x = put_tokens(&m, "model.embed_tokens:fwd"), *y = put_tokens(&m, "model.layers.0.self_attn:fwd");
        const float *z = put_tokens(&m, "model.layers.0.mlp:fwd");
        float *sum[2] = {put_tokens(&m, "model.layers.0:fwd"), other_of(&m)};
        const float *w = both % 2 ? NULL : put(&m, "model.layers.0.post_attention_layernorm.weight:init", 1, H, 0, 0);
        float *out[2] = {w ? put_tokens(&m, "model.layers.0.post_attention_layernorm:fwd") : NULL, other_of(&m)};
        for (size_t side = 0; side < 2; side++) {
            const norm p = {1e-6, cases[k].of_x[side], cases[k].of_y[side], 0.0, false, false, false};
            for (size_t i = 0; i < B * S * H; i++)
                sum[side][i] = (float)(p.of_x * (double)x[i] + p.of_y * (double)y[i] + p.of_y * (double)z[i]);
            if (w)
                normalise(out[side], x, y, w, p);
        }
        expect_cause(&m, cases[k].cause, NULL, both);
    }
}

CLAIM(a_statistic_without_a_gradient_is_named)
{
    made m = {.n = 0};
    const float *x = put_tokens(&m, "layers.0:fwd"), *w = put(&m, "norm.weight:init", 1, H, 0, 0);
    float *y = put_tokens(&m, "norm:fwd");
    normalise(y, x, x, w, (norm){1e-6, 1.0, 0.0, 0.0, false, false, false});
    memcpy(other_of(&m), y, B * S * H * sizeof *y);
    float *d = put_tokens(&m, "norm:bwd"), *e = other_of(&m);
    for (size_t row = 0; row < B * S; row++) {
        double along = 0.0;
        for (size_t i = row * H; i < (row + 1) * H; i++) {
            along += (double)d[i] * (double)y[i] / (double)w[i - row * H] / H;
            e[i] = d[i];
        }
        for (size_t i = row * H; i < (row + 1) * H; i++)
            d[i] -= (float)(along * (double)y[i] / (double)w[i - row * H]);
    }
    expect_cause(&m, "norm_statistic_detached", NULL, 0);
}

CLAIM(a_sum_of_other_terms_is_named)
{
    made m = {.n = 0};
    const float *x = put_tokens(&m, "model.layers.0:fwd"), *y = put_tokens(&m, "model.layers.1.norm:fwd");
    const float *z = put_tokens(&m, "model.layers.1.attn:fwd");
    float *sum = put_tokens(&m, "model.layers.1:fwd");
    for (size_t i = 0; i < B * S * H; i++) {
        sum[i] = x[i] + z[i];
        other_of(&m)[i] = y[i] + z[i];
    }
    expect_cause(&m, "residual", NULL, 0);
}

CLAIM(the_scale_and_the_cap_of_logits_are_named)
{
    static const double cap[][2] = {{0.0, 0.0}, {2.0, 0.0}, {2.0, 5.0}};
    static const char *const causes[] = {"logits_scale", "softcap", "softcap"};
    for (size_t k = 0; k < sizeof causes / sizeof *causes; k++) {
        made m = {.n = 0};
        const float *x = put(&m, "lm_head:fwd", 3, B, S, IDS);
        float *y[2] = {put(&m, "output:fwd", 3, B, S, IDS), other_of(&m)};
        for (size_t i = 0; i < B * S * IDS; i++) {
            for (size_t side = 0; side < 2; side++) {
                const double c = cap[k][side], v = (double)x[i];
                y[side][i] = (float)(c > 0.0 ? c * tanh(v / c) : k == 0 && side == 0 ? 0.5 * v : v);
            }
        }
        expect_cause(&m, causes[k], NULL, k);
    }
}

/* --- tables ------------------------------------------------------------------------------------------------------- */

enum { SHARDS = 3 };

/* Each is one more, or that of the next of three shards. */
CLAIM(ids_that_are_others_by_one_number_are_named)
{
    for (size_t shards = 0; shards < 2; shards++) {
        made m = {.n = 0};
        float turned[IDS * H];
        const float *table = put(&m, "tok_embeddings.weight:init", 2, shards ? IDS : IDS + 1, H, 0);
        float *y = put_tokens(&m, "tok_embeddings:fwd");
        for (size_t i = 0; i < IDS * H; i++)
            turned[i] = table[shards ? (i + IDS / SHARDS * H) % (IDS * H) : i + H];
        look_up(y, table);
        look_up(other_of(&m), turned);
        expect_cause(&m, shards ? "shards_misplaced" : "ids_off_by_one", shards ? "a whole one of 3 shards" : NULL,
                     shards);
    }
}

/* In the table as it is now, which has moved. */
CLAIM(ids_of_an_earlier_step_are_named)
{
    made m = {.n = 0};
    const float *table = put(&m, "embed_tokens.weight:init", 2, IDS, H, 0);
    float *y = put_tokens(&m, "embed_tokens:fwd");
    look_up(y, table);
    look_up(other_of(&m), table);
    table = put(&m, "embed_tokens.weight:new", 2, IDS, H, 0);
    y = put_tokens(&m, "embed_tokens:fwd@2");
    look_up(other_of(&m), table);
    for (size_t row = 0; row < B * S; row++)
        memcpy(y + row * H, table + (id_at(row) * row + 3) % IDS * H, H * sizeof *y);
    expect_cause(&m, "batch_again", "of step 1 at step 2", 0);
}

CLAIM(rows_that_other_shards_add_are_named)
{
    made m = {.n = 0};
    const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
    float *y = put_tokens(&m, "tok_embeddings:fwd"), *z = other_of(&m);
    look_up(y, table);
    for (size_t row = 0; row < B * S; row++) {
        for (size_t i = 0; i < H; i++) {
            double sum = 0.0;
            for (size_t shard = 0; shard < SHARDS; shard++) {
                const size_t size = IDS / SHARDS, from = shard * size, id = id_at(row);
                const size_t nearest = id < from ? from : id >= from + size ? from + size - 1 : id;
                sum += (double)table[nearest * H + i];
            }
            z[row * H + i] = (float)sum;
        }
    }
    expect_cause(&m, "embedding_mask", "of 3", 0);
}

CLAIM(other_positions_are_named)
{
    static const struct {
        size_t by, restart;
        const char *cause;
    } cases[] = {{3, 2 * S, "position_offset"}, {0, 7, "positions"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *table = put(&m, "position_embeddings.weight:init", 2, 2 * S, H, 0);
        float *y = put(&m, "position_embeddings:fwd", 2, S, H, 0), *z = other_of(&m);
        for (size_t row = 0; row < S; row++) {
            memcpy(y + row * H, table + row * H, H * sizeof *y);
            memcpy(z + row * H, table + (row + cases[k].by) % cases[k].restart * H, H * sizeof *y);
        }
        expect_cause(&m, cases[k].cause, NULL, k);
    }
}

CLAIM(positions_that_run_on_over_documents_are_named)
{
    made m = {.n = 0};
    const float *table = put(&m, "pos.weight:init", 2, 2 * S, H, 0);
    float *y = put_tokens(&m, "pos:fwd"), *z = other_of(&m);
    for (size_t row = 0; row < B * S; row++) {
        const size_t at = row % S, cut = 5 + row / S;
        memcpy(y + row * H, table + (at < cut ? at : at - cut) * H, H * sizeof *y);
        memcpy(z + row * H, table + at * H, H * sizeof *y);
    }
    expect_cause(&m, "positions_over_documents", NULL, 0);
}

CLAIM(cosines_of_other_positions_are_named)
{
    enum { D = 8 };
    static const struct {
        double theta, slower;
        size_t by, from, restart; /* positions from this one on are others by this */
        double scale;             /* of the reference's cosines */
        const char *cause;
    } cases[] = {{5e5, 1.0, 0, 0, S, 1.0, "rope_theta"},    {5e5, 1.0, 0, 0, S, 1.1386, "rope_theta"},
                 {1e4, 4.0, 0, 0, S, 1.0, "rope_theta"},    {1e4, 1.0, 2, 0, 2 * S, 1.0, "rope_offset"},
                 {1e4, 1.0, 0, 0, 6, 1.0, "rope_restarts"}, {1e4, 1.0, 3, 4, 2 * S, 1.0, "rope_offset"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        float *y = put(&m, "model.rotary_emb:fwd", 3, 1, S, D), *z = other_of(&m);
        for (size_t i = 0; i < S * D; i++) {
            const size_t position = i / D, other = position + (position < cases[k].from ? 0 : cases[k].by);
            const double exponent = -2.0 * (double)(i % (D / 2)) / D;
            y[i] = (float)(cases[k].scale * cos((double)position * pow(1e4, exponent)));
            z[i] = (float)cos((double)(other % cases[k].restart) * pow(cases[k].theta, exponent) / cases[k].slower);
        }
        expect_cause(&m, cases[k].cause, NULL, k);
    }
}

EVERY_CLAIM(replay)
