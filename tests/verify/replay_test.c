/* SPDX-License-Identifier: Apache-2.0 */
/* A module of two dumps that was computed with one mistake is named by computing it again; where an input is missing, or
 * the mistake is none that is known, there is no such answer. The modules are computed here by plain loops. */
#include "support/together.h"
#include "tests/verify/replay_support.h"

/* --- attention ---------------------------------------------------------------------------------------------------- */

enum { HEADS = 4, KV = 2, D = 8, Q = HEADS * D, K = KV * D };

static double either(double x, double otherwise)
{
    return x > 0.0 ? x : otherwise;
}

typedef struct how {
    double theta, slower, scale; /* 0: 1e4, 1 and 1, which is right; scale: of 1/sqrt(D) */
    size_t ahead, window, start, restart;
    size_t from, blind;    /* so many keys from this one on are unseen */
    size_t turned;         /* features of a head that rotate, in the reference too; 0: all */
    double cap;            /* of scores, in the reference too unless `bare`; 0: none */
    size_t within;         /* a window that the reference has too; 0: none */
    bool alibi;            /* in place of RoPE, in the reference too */
    double slope;          /* times ALiBi's; 0: 1 */
    size_t series, shards; /* heads that its slopes are for; shards that each have the first one's; 0: HEADS, 1 */
    size_t fewer, wider;   /* features that are turned; what is added to `within` */
    bool late, open;       /* a mask after the softmax; all keys of the other half are seen */
    bool zero;             /* unseen keys have a score of 0 */
    bool tiled, plain_k, of_v, backward, document, dropout, not_own, by_lane, bare;
    bool flat; /* heads and tokens are not transposed back */
    enum {
        RING_NONE,
        RING_MASKED,
        RING_TURNED,
        RING_WIDE,
        RING_APART,
        RING_BASE_TWO,
        RING_AT_HOME
    } ring; /* what goes by the places of a ring of two */
    bool zigzag;
} how;

/* Where a token lies in a ring of two; *order: in the ring's order. */
static size_t place_of(size_t token, const how *o, size_t *order)
{
    const size_t size = o->zigzag ? S / 4 : S / 2, chunk = token / size;
    const size_t place = o->zigzag && chunk >= 2 ? 3 - chunk : chunk;
    *order = place * (S / 2) + token % size + (o->zigzag && chunk >= 2 ? size : 0);
    return place;
}

static size_t in_order(size_t token, const how *o)
{
    size_t order;
    (void)place_of(token, o, &order);
    return order;
}

static bool is_foreign(size_t token, size_t other, const how *o)
{
    size_t unused;
    return place_of(token, o, &unused) != place_of(other, o, &unused);
}

/* The token with the same index in the own place. */
static size_t at_home(size_t at, size_t key, const how *o)
{
    size_t token = 0;
    while (is_foreign(at, token, o) || in_order(token, o) % (S / 2) != in_order(key, o) % (S / 2))
        token++;
    return token;
}

static void turn(double *x, const float *from, size_t token, const how *o)
{
    const size_t position = o->restart ? token % o->restart : o->ring == RING_TURNED ? in_order(token, o) : token;
    const size_t n = o->alibi ? 0 : o->fewer ? o->fewer : o->turned ? o->turned : D;
    for (size_t i = n; i < D; i++)
        x[i] = (double)from[i];
    for (size_t i = 0; i < n / 2; i++) {
        const double angle =
            (double)position * pow(either(o->theta, 1e4), -2.0 * (double)i / (double)n) / either(o->slower, 1.0);
        const double sine = o->backward ? -sin(angle) : sin(angle);
        x[i] = (double)from[i] * cos(angle) - (double)from[i + n / 2] * sine;
        x[i + n / 2] = (double)from[i + n / 2] * cos(angle) + (double)from[i] * sine;
    }
}

static double slope_of(size_t head, const how *o)
{
    const size_t own = head % (HEADS / (o->shards ? o->shards : 1));
    return o->alibi ? either(fabs(o->slope), 1.0) * (o->slope < 0.0 ? -1.0 : 1.0) *
                          exp2(-8.0 * (double)(own + 1) / (double)(o->series ? o->series : HEADS))
                    : 0.0;
}

static double score_of(const float *q, const float *k, size_t at, size_t key, const how *o)
{
    double x[D], y[D], sum = 0.0;
    turn(x, q, at, o);
    turn(y, k, key, o);
    for (size_t i = 0; i < D; i++)
        sum += x[i] * (o->plain_k ? (double)k[i] : y[i]);
    sum *= either(o->scale, 1.0) / sqrt((double)D);
    return o->cap > 0.0 && !o->bare ? o->cap * tanh(sum / o->cap) : sum;
}

static bool sees(size_t at, size_t key, const how *o)
{
    const size_t window = o->ring == RING_WIDE && is_foreign(at, key, o) ? 0 : o->within;
    if (o->open && key / (S / 2) != at / (S / 2))
        return true;
    if (o->ring == RING_MASKED)
        return in_order(key, o) <= in_order(at, o);
    return key <= at + o->ahead && !(o->not_own && key == at && at > 0) &&
           !(key >= o->from && key < o->from + o->blind) && (!window || key + window + o->wider > at) &&
           (!o->window || key + o->window > at) && key >= o->start && !(o->document && at >= 6 && key < 6);
}

/* What a head takes from each key, and 0 from unseen ones. */
static void weigh(double weight[S], const float *q, const float *k, size_t k_width, size_t h, size_t at, const how *o)
{
    double sum[2] = {0.0}, share[2], all = 0.0;
    size_t unused;
    for (size_t key = 0; key < S; key++) {
        const bool seen = sees(at, key, o);
        weight[key] =
            !seen && o->zero
                ? 1.0
                : exp(score_of(q, k + key * k_width, at, key, o) - slope_of(h, o) * ((double)at - (double)key));
        weight[key] = seen || o->zero || o->late ? weight[key] : 0.0;
        sum[o->ring >= RING_APART ? place_of(key, o, &unused) : 0] += weight[key];
        weight[key] = seen || o->zero ? weight[key] : 0.0;
    }
    for (size_t p = 0; p < 2; p++) {
        share[p] = sum[p] == 0.0              ? 0.0
                   : o->ring == RING_APART    ? 1.0
                   : o->ring == RING_BASE_TWO ? exp2(log(sum[p]))
                                              : sum[p];
        all += share[p];
    }
    for (size_t key = 0; key < S; key++) {
        const size_t p = o->ring >= RING_APART ? place_of(key, o, &unused) : 0;
        weight[key] *= sum[p] > 0.0 ? share[p] / sum[p] / all : 0.0;
    }
}

/* out = attention of one sample's token, through the weight [H, Q]. Heads lie in q, k and v at `step` apart. */
static void attend(float *out, const float *const x[3], const size_t width[3], size_t row, const float *w, const how *o)
{
    double context[Q] = {0.0}, weight[S];
    for (size_t slot = 0; slot < HEADS; slot++) {
        const size_t h = o->flat ? (row * HEADS + slot) / S : slot, at = o->flat ? (row * HEADS + slot) % S : row;
        const size_t kv = o->tiled ? h % KV : h / (HEADS / KV);
        weigh(weight, x[0] + at * width[0] + h * D, x[1] + kv * D, width[1], h, at, o);
        for (size_t key = 0; key < S; key++) {
            const double m = !o->dropout ? 1.0 : (3 * at + 5 * h + key) % 4 == 0 ? 0.0 : 4.0 / 3.0;
            const float *from = x[2] + (o->ring == RING_AT_HOME ? at_home(at, key, o) : key) * width[2] + kv * D;
            double value[D];
            turn(value, from, key, o);
            for (size_t i = 0; i < D; i++)
                context[o->by_lane ? i * HEADS + slot : slot * D + i] +=
                    m * weight[key] * (o->of_v ? value[i] : (double)from[i]);
        }
    }
    for (size_t i = 0; i < H; i++) {
        double sum = 0.0;
        for (size_t k = 0; k < Q; k++)
            sum += context[k] * (double)w[i * Q + k];
        out[i] = (float)sum;
    }
}

/* Meta's names, q, k and v apart; `lacks`: a tensor that the dumps do not have. */
static void make_attention(made *m, const how *o, const char *lacks)
{
    const char *const names[] = {"layers.1.attention.wq:fwd", "layers.1.attention.wk:fwd", "layers.1.attention.wv:fwd"};
    const size_t width[] = {Q, K, K};
    const how right = {.turned = o->turned, .cap = o->cap, .within = o->within, .alibi = o->alibi};
    float *x[3];
    for (size_t i = 0; i < 3; i++)
        x[i] = put(m, names[i], 3, B, S, width[i]);
    const float *w = put(m, "layers.1.attention.wo.weight:init", 2, H, Q, 0);
    float *y = put(m, "layers.1.attention.wo:fwd", 3, B, S, H), *z = other_of(m);
    for (size_t row = 0; row < B * S; row++) {
        const size_t sample = row / S * S;
        const float *const of[] = {x[0] + sample * Q, x[1] + sample * K, x[2] + sample * K};
        attend(y + row * H, of, width, row % S, w, &right);
        attend(z + row * H, of, width, row % S, w, o);
    }
    for (size_t i = 0; i < m->n; i++) {
        if (lacks && strcmp(m->tensor[0][i].name, lacks) == 0)
            m->tensor[0][i].name = m->tensor[1][i].name = "layers.1.other:fwd";
    }
}

typedef struct attention_case {
    how o;
    const char *cause;
} attention_case;

static const attention_case attention_cases[] = {
    {{.scale = 2.3}, "softmax_scale"},
    {{.theta = 5e5}, "rope_theta"},
    {{.theta = 3e3}, "rope_theta"},
    {{.slower = 4.0}, "rope_theta"},
    {{.backward = true}, "rope_direction"},
    {{.plain_k = true}, "rope_missing"},
    {{.restart = 5}, "rope_restarts"},
    {{.ahead = 1}, "causal_mask"},
    {{.ahead = S}, "causal_mask_missing"},
    {{.not_own = true}, "causal_mask"},
    {{.of_v = true}, "rope_on_values"},
    {{.theta = 10.0}, "rope_theta"}, /* 1e4 to the power of a head's share of the width */
    {{.by_lane = true}, "dimension_flattened"},
    {{.cap = 0.4, .bare = true}, "softcap"},
    {{.cap = 0.4, .within = 5, .scale = 0.7}, "softmax_scale"},
    {{.window = 4}, "attention_window"},
    {{.start = 2}, "keys_masked"},
    {{.from = 5, .blind = 3}, "keys_masked"},
    {{.document = true}, "attention_across_documents"},
    {{.tiled = true}, "wrong_kv_head"},
    {{.dropout = true}, "dropout"},
    {{.scale = 2.3, .turned = D / 2}, "softmax_scale"},
    {{.backward = true, .turned = D / 2}, "rope_direction"},
    {{.fewer = D / 2}, "rope_width"},
    {{.within = 4, .wider = 1}, "attention_window"},
    {{.late = true}, "mask_after_softmax"},
    {{.zero = true}, "causal_mask"},
    {{.open = true}, "causal_mask_missing"},
    {{.alibi = true, .slope = -1.0}, "alibi_slopes"},
    {{.alibi = true, .slope = 1.7}, "alibi_slopes"},
    {{.alibi = true, .series = 2 * HEADS}, "alibi_slopes"},
    {{.alibi = true, .shards = 2}, "alibi_slopes"},
    {{.alibi = true, .scale = 2.0}, "softmax_scale"},
    {{.ring = RING_APART}, "softmax_of_own_keys"},
    {{.ring = RING_APART, .zigzag = true}, "softmax_of_own_keys"},
    {{.ring = RING_BASE_TWO}, "softmax_of_own_keys"},
    {{.ring = RING_AT_HOME, .zigzag = true}, "ring_own_keys"},
    {{.ring = RING_MASKED, .zigzag = true}, "causal_mask"},
    {{.ring = RING_TURNED, .zigzag = true}, "zigzag_positions"},
    {{.ring = RING_WIDE, .within = 5}, "attention_window"},
    {{.flat = true}, "heads_and_tokens_exchanged"},
    {{.cap = 0.4, .within = 5, .bare = true}, "softcap"},
};

CLAIM(one_mistake_of_attention_is_named)
{
    for (size_t k = 0; k < sizeof attention_cases / sizeof *attention_cases; k++) {
        const attention_case *p = &attention_cases[k];
        made m = {.n = 0};
        make_attention(&m, &p->o, NULL);
        const ar_verify_row row = look(&m, 0.0);
        cr_expect_str_eq(row.evidence.cause, p->cause, "%zu: %s", k, row.hint);
    }
}

static const char *const of_attention[] = {"softmax_scale", "rope_theta", "causal_mask", "attention_window",
                                           "keys_masked"};

static void expect_no_replay(const ar_verify_row *row)
{
    for (size_t i = 0; i < sizeof of_attention / sizeof *of_attention; i++)
        cr_expect_str_neq(row->evidence.cause, of_attention[i], "%s", row->hint);
}

CLAIM(an_input_that_no_dump_has_gives_no_answer)
{
    made m = {.n = 0};
    make_attention(&m, &(how){.scale = 3.0}, "layers.1.attention.wk:fwd");
    const ar_verify_row row = look(&m, 0.0);
    expect_no_replay(&row);
}

/* The output has a mistake of its own, but what arrives is off by as much already. */
CLAIM(an_input_that_is_wrong_itself_gives_no_answer)
{
    for (size_t wrong = 0; wrong < 3; wrong++) {
        made m = {.n = 0};
        make_attention(&m, &(how){.scale = 3.0}, NULL);
        float *x = (float *)(uintptr_t)m.tensor[1][wrong].data;
        for (size_t i = 0; i < count_of(&m.tensor[1][wrong]); i++)
            x[i] *= 1.5f;
        const ar_verify_row row = look(&m, 0.0);
        expect_no_replay(&row);
    }
}

CLAIM(attention_of_names_that_say_nothing_is_found_by_widths)
{
    static const char *const names[] = {"layers.1.mix.a:fwd", "layers.1.mix.b:fwd", "layers.1.mix.c:fwd",
                                        "layers.1.mix.d.weight:init", "layers.1.mix.d:fwd"};
    made m = {.n = 0};
    make_attention(&m, &(how){.scale = 3.0}, NULL);
    for (size_t i = 0; i < m.n; i++)
        m.tensor[0][i].name = m.tensor[1][i].name = names[i];
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "softmax_scale", "%s", row.hint);
}

CLAIM(two_mistakes_at_once_give_no_answer_of_one)
{
    made m = {.n = 0};
    make_attention(&m, &(how){.scale = 3.0, .tiled = true, .backward = true}, NULL);
    const ar_verify_row row = look(&m, 0.0);
    expect_no_replay(&row);
}

CLAIM(a_mistake_is_named_in_bf16_noise)
{
    made m = {.n = 0};
    make_attention(&m, &(how){.ahead = 1}, NULL);
    float *z = other_of(&m);
    for (size_t i = 0; i < B * S * H; i++)
        z[i] *= 1.0f + 0x1p-9f * noise(i);
    const ar_verify_row row = look(&m, 0x1p-8);
    cr_expect_str_eq(row.evidence.cause, "causal_mask", "%s", row.hint);
}

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

/* Megatron's names, gate and up packed; out [B, S, H] = W2 (f(gate) * up). */
static void make_mlp(made *m, double (*f)(double), bool exchanged)
{
    const float *x = put(m, "decoder.layers.0.mlp.linear_fc1:fwd", 3, B, S, 2 * WIDE);
    const float *w = put(m, "decoder.layers.0.mlp.linear_fc2.weight:init", 2, H, WIDE, 0);
    float *y = put(m, "decoder.layers.0.mlp.linear_fc2:fwd", 3, B, S, H), *z = other_of(m);
    for (size_t row = 0; row < B * S; row++) {
        const float *gate = x + row * 2 * WIDE, *up = gate + WIDE;
        for (size_t i = 0; i < H; i++) {
            double right = 0.0, wrong = 0.0;
            for (size_t k = 0; k < WIDE; k++) {
                const double a = (double)gate[k], b = (double)up[k], by = (double)w[i * WIDE + k];
                right += silu(a) * b * by;
                wrong += (exchanged ? f(b) * a : f(a) * b) * by;
            }
            y[row * H + i] = (float)right;
            z[row * H + i] = (float)wrong;
        }
    }
}

CLAIM(the_function_of_an_mlp_is_named)
{
    made m = {.n = 0};
    make_mlp(&m, relu, false);
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "activation_function", "%s", row.hint);
    cr_expect(strstr(row.hint, "relu") && strstr(row.hint, "silu"), "%s", row.hint);
}

CLAIM(an_mlp_of_names_that_say_nothing_is_found_by_widths)
{
    static const char *const names[] = {"layers.0.mix.a:fwd", "layers.0.mix.b.weight:init", "layers.0.mix.b:fwd"};
    made m = {.n = 0};
    make_mlp(&m, relu, false);
    for (size_t i = 0; i < m.n; i++)
        m.tensor[0][i].name = m.tensor[1][i].name = names[i];
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "activation_function", "%s", row.hint);
}

CLAIM(gate_and_up_exchanged_are_named)
{
    made m = {.n = 0};
    make_mlp(&m, silu, true);
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "activation_arguments", "%s", row.hint);
}

/* GPT-2's names, whose weights are [in, out]: the MLP's first layer reads what its norm should read. */
CLAIM(a_norm_that_is_left_out_is_named)
{
    made m = {.n = 0};
    const float *x = put(&m, "transformer.h.0:fwd", 3, B, S, H), *y = put(&m, "transformer.h.1.attn:fwd", 3, B, S, H);
    const float *normed = put(&m, "transformer.h.1.ln_2:fwd", 3, B, S, H);
    const float *w = put(&m, "transformer.h.1.mlp.c_fc.weight:init", 2, H, WIDE, 0);
    float *a = put(&m, "transformer.h.1.mlp.c_fc:fwd", 3, B, S, WIDE), *b = other_of(&m);
    for (size_t i = 0; i < B * S * WIDE; i++) {
        double right = 0.0, wrong = 0.0;
        for (size_t k = 0; k < H; k++) {
            const size_t from = i / WIDE * H + k;
            right += (double)normed[from] * (double)w[k * WIDE + i % WIDE];
            wrong += ((double)x[from] + (double)y[from]) * (double)w[k * WIDE + i % WIDE];
        }
        a[i] = (float)right;
        b[i] = (float)wrong;
    }
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "norm_missing", "%s", row.hint);
}

/* --- a norm ------------------------------------------------------------------------------------------------------- */

typedef struct norm_case {
    double eps, of_x, of_y, plus; /* other epsilon; how often the two terms count; what is added to the weight */
    bool centred;
    const char *cause;
    bool dropout; /* of y, a fifth of it */
} norm_case;

static void normalise(float *out, const float *x, const float *y, const float *w, const norm_case *p)
{
    double v[H], mean = 0.0, square = 0.0;
    for (size_t i = 0; i < H; i++) {
        const double m = !p->dropout ? 1.0 : (i * 7 + (size_t)fabs(1e4 * (double)x[0])) % 5 == 0 ? 0.0 : 1.25;
        v[i] = p->of_x * (double)x[i] + m * p->of_y * (double)y[i];
        mean += v[i] / H;
    }
    for (size_t i = 0; i < H; i++) {
        v[i] -= p->centred ? mean : 0.0;
        square += v[i] * v[i] / H;
    }
    for (size_t i = 0; i < H; i++)
        out[i] = (float)(v[i] / sqrt(square + p->eps) * ((double)w[i] + p->plus));
}

static const norm_case norm_cases[] = {
    {1e-3, 1.0, 1.0, 0.0, false, "norm_epsilon", false}, {1e-6, 1.0, 1.0, 0.0, true, "norm_mean", false},
    {1e-6, 1.0, 0.0, 0.0, false, "residual", false},     {1e-6, 0.0, 1.0, 0.0, false, "residual", false},
    {1e-6, 1.0, 2.0, 0.0, false, "residual", false},     {1e-6, 1.0, 1.0, 1.0, false, "gain_offset", false},
    {1e-6, 1.0, 1.0, 0.0, false, "dropout", true},
};

static void make_norm(made *m, const norm_case *right, const norm_case *wrong)
{
    const float *x = put(m, "layers.0:fwd", 3, B, S, H), *y = put(m, "layers.1.attention:fwd", 3, B, S, H);
    const float *w = put(m, "layers.1.ffn_norm.weight:init", 1, H, 0, 0);
    float *a = put(m, "layers.1.ffn_norm:fwd", 3, B, S, H), *b = other_of(m);
    for (size_t row = 0; row < B * S; row++) {
        normalise(a + row * H, x + row * H, y + row * H, w, right);
        normalise(b + row * H, x + row * H, y + row * H, w, wrong);
    }
}

CLAIM(one_mistake_of_a_norm_is_named)
{
    for (size_t k = 0; k < sizeof norm_cases / sizeof *norm_cases; k++) {
        const norm_case *p = &norm_cases[k];
        made m = {.n = 0};
        make_norm(&m, &(norm_case){1e-6, 1.0, 1.0, 0.0, false, NULL, false}, p);
        const ar_verify_row row = look(&m, 0.0);
        cr_expect_str_eq(row.evidence.cause, p->cause, "%zu: %s", k, row.hint);
    }
}

CLAIM(a_gain_that_counts_as_1_more_in_the_reference_is_read_so)
{
    const norm_case right = {1e-6, 1.0, 1.0, 1.0, false, NULL, false};
    const norm_case cases[] = {{1e-6, 1.0, 1.0, 0.0, false, "gain_offset", false},
                               {1e-3, 1.0, 1.0, 1.0, false, "norm_epsilon", false}};
    for (size_t k = 0; k < 2; k++) {
        made m = {.n = 0};
        make_norm(&m, &right, &cases[k]);
        const ar_verify_row row = look(&m, 0.0);
        cr_expect_str_eq(row.evidence.cause, cases[k].cause, "%s", row.hint);
    }
}

CLAIM(a_norm_that_passes_its_input_on_is_left_out)
{
    made m = {.n = 0};
    const norm_case right = {1e-6, 1.0, 1.0, 0.0, false, NULL, false};
    make_norm(&m, &right, &right);
    const float *x = m.tensor[0][0].data, *y = m.tensor[0][1].data;
    for (size_t i = 0; i < B * S * H; i++)
        other_of(&m)[i] = x[i] + y[i];
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "norm_missing", "%s", row.hint);
}

/* What a norm of a sum of two tensors makes of them where one is the embedding's output, and the layer's own sum of both
 * and a third. */
CLAIM(numbers_of_the_terms_of_a_sum_are_told_apart)
{
    static const struct {
        double of_x[2], of_y[2]; /* in the reference, in the other */
        const char *cause;
    } cases[] = {{{3.0, 1.0}, {0.5, 0.5}, "embedding_scale"},
                 {{1.4, 1.0}, {1.0, 1.4}, "residual_scale"},
                 {{1.0, 1.0}, {0.6, 1.0}, "residual_scale"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *x = put(&m, "model.embed_tokens:fwd", 3, B, S, H);
        const float *y = put(&m, "model.layers.0.self_attn:fwd", 3, B, S, H);
        const float *z = put(&m, "model.layers.0.mlp:fwd", 3, B, S, H);
        float *sum[2] = {put(&m, "model.layers.0:fwd", 3, B, S, H), other_of(&m)};
        const float *w = put(&m, "model.layers.0.post_attention_layernorm.weight:init", 1, H, 0, 0);
        float *out[2] = {put(&m, "model.layers.0.post_attention_layernorm:fwd", 3, B, S, H), other_of(&m)};
        for (size_t side = 0; side < 2; side++) {
            const norm_case p = {1e-6, cases[k].of_x[side], cases[k].of_y[side], 0.0, false, NULL, false};
            for (size_t i = 0; i < B * S * H; i++)
                sum[side][i] = (float)(p.of_x * (double)x[i] + p.of_y * (double)y[i] + p.of_y * (double)z[i]);
            for (size_t row = 0; row < B * S; row++)
                normalise(out[side] + row * H, x + row * H, y + row * H, w, &p);
        }
        const ar_verify_row row = look(&m, 0.0);
        cr_expect_str_eq(row.evidence.cause, cases[k].cause, "%zu: %s", k, row.hint);
    }
}

CLAIM(a_norm_of_another_statistic_or_place_is_named)
{
    enum { NO_MEAN, SAMPLES, AFTER, ALONE, WAYS };
    static const char *const causes[WAYS] = {"norm_mean", "norm_statistic", "residual", "other_input"};
    for (int way = 0; way < WAYS; way++) {
        made m = {.n = 0};
        const norm_case right = {1e-6, 1.0, 1.0, 0.0, true, NULL, false};
        const norm_case branch = {1e-6, 0.0, 1.0, 0.0, true, NULL, false};
        make_norm(&m, &right, &right);
        const float *x = m.tensor[0][0].data, *y = m.tensor[0][1].data, *w = m.tensor[0][2].data;
        const float *z = put(&m, "layers.1.attention.wo:fwd", 3, B, S, H);
        const size_t last = m.n - 1;
        const ar_st_tensor both[2] = {m.tensor[0][3], m.tensor[1][3]}; /* the norm is the last one again */
        for (int k = 0; k < 2; k++) {
            m.tensor[k][3] = m.tensor[k][last];
            m.tensor[k][last] = both[k];
        }
        for (size_t row = 0; row < B * S; row++) {
            float *out = other_of(&m) + row * H;
            const norm_case bare = {1e-6, 1.0, 1.0, 0.0, false, NULL, false};
            if (way == NO_MEAN)
                normalise(out, x + row * H, y + row * H, w, &bare);
            else if (way == ALONE)
                normalise(out, x, z + row * H, w, &branch);
            else if (way == AFTER)
                normalise(out, x, y + row * H, w, &branch);
            for (size_t i = 0; i < H; i++)
                out[i] = way == SAMPLES ? out[i] * sqrtf((float)(H - 1) / (float)H)
                         : way == AFTER ? out[i] + x[row * H + i]
                                        : out[i];
        }
        const ar_verify_row row = look(&m, 0.0);
        cr_expect_str_eq(row.evidence.cause, causes[way], "%s", row.hint);
    }
}

CLAIM(a_statistic_without_a_gradient_is_named)
{
    made m = {.n = 0};
    const norm_case right = {1e-6, 1.0, 0.0, 0.0, false, NULL, false};
    const float *x = put(&m, "layers.0:fwd", 3, B, S, H), *w = put(&m, "norm.weight:init", 1, H, 0, 0);
    float *y = put(&m, "norm:fwd", 3, B, S, H);
    for (size_t row = 0; row < B * S; row++)
        normalise(y + row * H, x + row * H, x + row * H, w, &right);
    memcpy(other_of(&m), y, B * S * H * sizeof *y);
    float *d = put(&m, "norm:bwd", 3, B, S, H), *e = other_of(&m);
    for (size_t row = 0; row < B * S; row++) {
        double along = 0.0;
        for (size_t i = row * H; i < (row + 1) * H; i++) {
            along += (double)d[i] * (double)y[i] / (double)w[i - row * H] / H;
            e[i] = d[i];
        }
        for (size_t i = row * H; i < (row + 1) * H; i++)
            d[i] -= (float)(along * (double)y[i] / (double)w[i - row * H]);
    }
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "norm_statistic_detached", "%s", row.hint);
}

CLAIM(a_sum_of_other_terms_is_named)
{
    made m = {.n = 0};
    const float *x = put(&m, "model.layers.0:fwd", 3, B, S, H), *y = put(&m, "model.layers.1.norm:fwd", 3, B, S, H);
    const float *z = put(&m, "model.layers.1.attn:fwd", 3, B, S, H);
    float *sum = put(&m, "model.layers.1:fwd", 3, B, S, H);
    for (size_t i = 0; i < B * S * H; i++) {
        sum[i] = x[i] + z[i];
        other_of(&m)[i] = y[i] + z[i];
    }
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "residual", "%s", row.hint);
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
        const ar_verify_row row = look(&m, 0.0);
        cr_expect_str_eq(row.evidence.cause, causes[k], "%s", row.hint);
    }
}

/* --- tables ------------------------------------------------------------------------------------------------------- */

enum { SHARDS = 3 };

CLAIM(ids_that_are_others_by_one_number_are_named)
{
    made m = {.n = 0};
    const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS + 1, H, 0);
    float *y = put(&m, "tok_embeddings:fwd", 3, B, S, H);
    look_up(y, table);
    look_up(other_of(&m), table + H);
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "ids_off_by_one", "%s", row.hint);
}

CLAIM(rows_that_other_shards_add_are_named)
{
    made m = {.n = 0};
    const float *table = put(&m, "tok_embeddings.weight:init", 2, IDS, H, 0);
    float *y = put(&m, "tok_embeddings:fwd", 3, B, S, H), *z = other_of(&m);
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
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "embedding_mask", "%s", row.hint);
    cr_expect(strstr(row.hint, "of 3"), "%s", row.hint);
}

static void make_positions(made *m, size_t by, size_t restart)
{
    const float *table = put(m, "position_embeddings.weight:init", 2, 2 * S, H, 0);
    float *y = put(m, "position_embeddings:fwd", 2, S, H, 0), *z = other_of(m);
    for (size_t row = 0; row < S; row++) {
        memcpy(y + row * H, table + row * H, H * sizeof *y);
        memcpy(z + row * H, table + (restart ? row % restart : row + by) * H, H * sizeof *y);
    }
}

CLAIM(positions_from_another_start_are_named)
{
    made m = {.n = 0};
    make_positions(&m, 3, 0);
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "position_offset", "%s", row.hint);
}

CLAIM(positions_that_start_again_are_named)
{
    made m = {.n = 0};
    make_positions(&m, 0, 7);
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "positions", "%s", row.hint);
}

CLAIM(positions_that_run_on_over_documents_are_named)
{
    made m = {.n = 0};
    const float *table = put(&m, "pos.weight:init", 2, 2 * S, H, 0);
    float *y = put(&m, "pos:fwd", 3, B, S, H), *z = other_of(&m);
    for (size_t row = 0; row < B * S; row++) {
        const size_t at = row % S, cut = 5 + row / S;
        memcpy(y + row * H, table + (at < cut ? at : at - cut) * H, H * sizeof *y);
        memcpy(z + row * H, table + at * H, H * sizeof *y);
    }
    const ar_verify_row row = look(&m, 0.0);
    cr_expect_str_eq(row.evidence.cause, "positions_over_documents", "%s", row.hint);
}

typedef struct cosine_case {
    double theta, slower;
    size_t by, restart;
    const char *cause;
    size_t from; /* the first position that is another */
} cosine_case;

static const cosine_case cosine_cases[] = {
    {5e5, 1.0, 0, 0, "rope_theta", 0},    {1e4, 4.0, 0, 0, "rope_theta", 0},  {1e4, 1.0, 2, 0, "rope_offset", 0},
    {1e4, 1.0, 0, 6, "rope_restarts", 0}, {1e4, 1.0, 3, 0, "rope_offset", 4},
};

CLAIM(cosines_of_other_positions_are_named)
{
    for (size_t k = 0; k < sizeof cosine_cases / sizeof *cosine_cases; k++) {
        const cosine_case *p = &cosine_cases[k];
        made m = {.n = 0};
        float *y = put(&m, "model.rotary_emb:fwd", 3, 1, S, D), *z = other_of(&m);
        for (size_t i = 0; i < S * D; i++) {
            const size_t position = i / D, on = position < p->from ? 0 : p->by,
                         other = p->restart ? position % p->restart : position + on;
            const double exponent = -2.0 * (double)(i % (D / 2)) / D;
            y[i] = (float)cos((double)position * pow(1e4, exponent));
            z[i] = (float)cos((double)other * pow(p->theta, exponent) / p->slower);
        }
        const ar_verify_row row = look(&m, 0.0);
        cr_expect_str_eq(row.evidence.cause, p->cause, "%zu: %s", k, row.hint);
    }
}

EVERY_CLAIM(replay)
