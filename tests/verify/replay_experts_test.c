/* SPDX-License-Identifier: Apache-2.0 */
/* Routing, experts and a shared expert that were computed with one mistake are named by computing them again; here they
 * are computed by plain loops. */
#include "support/together.h"
#include "tests/verify/two_dumps.h"

enum { E = 4, K = 2, F = 5, T = B * S }; /* experts, of a token, the width of one; tokens */

/* --- weights ------------------------------------------------------------------------------------------------------ */

/* The softmax of a row, or each logit's sigmoid. */
static void values_of(double p[E], const float *z, bool sigmoid)
{
    double sum = 0.0;
    for (size_t i = 0; i < E; i++)
        sum += p[i] = exp((double)z[i]);
    for (size_t i = 0; i < E; i++)
        p[i] = sigmoid ? 1.0 / (1.0 + exp(-(double)z[i])) : p[i] / sum;
}

/* True if expert i is one of the k that a row prefers. */
static bool is_chosen(const float *z, size_t i, size_t k)
{
    size_t before = 0;
    for (size_t other = 0; other < E; other++)
        before += z[other] > z[i] || (z[other] == z[i] && other < i);
    return before < k;
}

typedef enum how { NORMALISED, PLAIN, AGAIN, SIGMOID, EQUAL, LAST_FOR_FIRST, FEWER } how;

/* The weights of a row: of the K experts of the largest logits, or of others. */
static void weigh(float *w, const float *z, how h)
{
    double p[E], x[E], sum = 0.0;
    values_of(p, z, h == SIGMOID);
    for (size_t i = 0; i < E; i++) {
        const bool turned = h == LAST_FOR_FIRST && !is_chosen(z, i, K - 1) && is_chosen(z, i, K + 1);
        const bool there = h == LAST_FOR_FIRST ? is_chosen(z, i, K - 1) || (turned && !is_chosen(z, i, K))
                                               : is_chosen(z, i, h == FEWER ? K - 1 : K);
        x[i] = !there ? 0.0 : h == AGAIN ? exp(p[i]) : h == EQUAL ? 1.0 : p[i];
        sum += x[i];
    }
    for (size_t i = 0; i < E; i++)
        w[i] = (float)(h == PLAIN || h == SIGMOID ? x[i] : x[i] / sum);
}

CLAIM(another_function_of_the_logits_is_named)
{
    static const struct {
        how right, wrong;
        const char *cause, *words;
    } cases[] = {{NORMALISED, PLAIN, "routing_weights_not_normalised", NULL},
                 {PLAIN, NORMALISED, "routing_weights_normalised", NULL},
                 {NORMALISED, AGAIN, "routing_weights_function", "a second softmax, over the experts chosen"},
                 {PLAIN, SIGMOID, "routing_weights_function", "a sigmoid"},
                 {NORMALISED, EQUAL, "routing_weights_function", "one share"},
                 {NORMALISED, LAST_FOR_FIRST, "other_experts_chosen", "not the 2 largest"},
                 {NORMALISED, FEWER, "!other_experts_chosen", NULL}};
    static const char *const names[][2] = {
        {"model.layers.1.mlp.gate:fwd", "model.layers.1.mlp.weights:fwd"},
        {"model.layers.1.block_sparse_moe.gate:fwd", "model.layers.1.block_sparse_moe.weights:fwd"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *z = put(&m, names[k % 2][0], 3, B, S, E);
        float *w = put(&m, names[k % 2][1], 3, B, S, E), *other = other_of(&m);
        for (size_t t = 0; t < T; t++) {
            weigh(w + t * E, z + t * E, cases[k].right);
            weigh(other + t * E, z + t * E, cases[k].wrong);
        }
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

/* Two logits of one token are as near as bf16 keeps no numbers apart, and the other one is taken; or the logits of the
 * other dump are others, of which nothing is said then. */
CLAIM(experts_of_near_ties_are_told_from_those_of_other_logits)
{
    for (size_t way = 0; way < 2; way++) {
        made m = {.n = 0};
        float *z = put(&m, "model.layers.0.mlp.gate:fwd", 3, B, S, E), *others = other_of(&m);
        z[0] = others[0] = 3.0f, z[1] = others[1] = 1.501f, z[2] = others[2] = 1.5f, z[3] = others[3] = -1.0f;
        for (size_t i = 0; i < T * E && way == 1; i++)
            others[i] *= 1.01f;
        float *w = put(&m, "model.layers.0.mlp.weights:fwd", 3, B, S, E), *other = other_of(&m);
        for (size_t t = 0; t < T; t++) {
            weigh(w + t * E, z + t * E, NORMALISED);
            weigh(other + t * E, z + t * E, t == 0 ? LAST_FOR_FIRST : NORMALISED);
        }
        expect_cause(&m, way == 0 ? "other_experts_chosen" : "!other_experts_chosen", way == 0 ? "near ties" : NULL,
                     way);
    }
}

/* The experts of each token by number. In the other dump the fourth token of the second sample has another one: the
 * next largest, one of a near tie, or one where the logits differ already; or all have theirs in another order. */
CLAIM(a_token_that_goes_elsewhere_is_named)
{
    enum { NEXT_LARGEST, NEAR_TIE, OTHER_LOGITS, REVERSED, WAYS };
    static const char *const words[WAYS] = {
        "token 3 of sample 1 goes to expert 2 instead of 1 (tokens with other experts: 1), and of the same logits: not "
        "the 2 largest",
        "token 3 of sample 1 goes to expert 2 instead of 1 (tokens with other experts: 1), and of the same logits: "
        "near ties",
        "token 3 of sample 1 goes to expert 2 instead of 1 (tokens with other experts: 1); their logits differ",
        "the same experts, in another order"};
    for (size_t way = 0; way < WAYS; way++) {
        made m = {.n = 0};
        const size_t at = (S + 3) * E;
        float *z = put(&m, "model.layers.1.mlp.gate:fwd", 3, B, S, E), *others = other_of(&m);
        z[at] = others[at] = 3.0f, z[at + 1] = others[at + 1] = 1.501f, z[at + 3] = others[at + 3] = -1.0f;
        z[at + 2] = others[at + 2] = way == NEAR_TIE ? 1.5f : 0.5f;
        others[at + 2] *= way == OTHER_LOGITS ? 4.0f : 1.0f;
        int32_t route[T * K], other[T * K];
        for (size_t t = 0; t < T; t++) {
            for (size_t i = 0, k = 0; i < E; i++) {
                if (!is_chosen(z + t * E, i, K))
                    continue;
                other[t * K + (way == REVERSED ? K - 1 - k : k)] = (int32_t)i;
                route[t * K + k++] = (int32_t)i;
            }
        }
        other[(S + 3) * K + 1] = way == REVERSED ? 0 : 2;
        put_pair(
            &m, (ar_st_tensor){.name = "model.layers.1.mlp.routes:fwd", .dtype = AR_I32, .ndim = 3, .shape = {B, S, K}},
            route, other);
        expect_cause(&m, "other_experts_chosen", words[way], way);
    }
}

/* --- the gradient of the logits ----------------------------------------------------------------------------------- */

typedef enum form { OF_NORMALISED, OF_PLAIN, OF_CHOSEN, SUM_DETACHED } form;

static void slope(float *dz, const float *z, const float *g, form f)
{
    double p[E], chosen = 0.0, sum = 0.0;
    values_of(p, z, false);
    for (size_t i = 0; i < E; i++)
        chosen += is_chosen(z, i, K) ? p[i] : 0.0;
    chosen = f == OF_NORMALISED || f == SUM_DETACHED ? chosen : 1.0;
    for (size_t i = 0; i < E; i++)
        sum += is_chosen(z, i, K) ? p[i] / chosen * (double)g[i] : 0.0;
    for (size_t i = 0; i < E; i++) {
        const double own = p[i] / chosen * ((double)g[i] - (f == SUM_DETACHED ? chosen : 1.0) * sum);
        const double rest = f == OF_NORMALISED || f == OF_CHOSEN ? 0.0 : -p[i] * sum;
        dz[i] = (float)(is_chosen(z, i, K) ? own : rest);
    }
}

CLAIM(a_gradient_of_logits_that_lacks_a_part_is_named)
{
    static const struct {
        form right, wrong;
        const char *cause;
    } cases[] = {{OF_PLAIN, OF_CHOSEN, "router_gradient_of_chosen_alone"},
                 {OF_NORMALISED, SUM_DETACHED, "routing_sum_detached"},
                 {OF_NORMALISED, OF_PLAIN, "routing_weights_not_normalised"},
                 {OF_PLAIN, OF_NORMALISED, "routing_weights_normalised"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *z = put(&m, "model.layers.2.mlp.gate:fwd", 3, B, S, E);
        float *w = put(&m, "model.layers.2.mlp.weights:fwd", 3, B, S, E);
        for (size_t t = 0; t < T; t++)
            weigh(w + t * E, z + t * E, cases[k].right == OF_PLAIN ? PLAIN : NORMALISED);
        memcpy(other_of(&m), w, T * E * sizeof *w);
        const float *g = put(&m, "model.layers.2.mlp.weights:bwd", 3, B, S, E);
        float *dz = put(&m, "model.layers.2.mlp.logits:bwd", 3, B, S, E), *other = other_of(&m);
        for (size_t t = 0; t < T; t++) {
            slope(dz + t * E, z + t * E, g + t * E, cases[k].right);
            slope(other + t * E, z + t * E, g + t * E, cases[k].wrong);
        }
        expect_cause(&m, cases[k].cause, NULL, k);
    }
}

CLAIM(weights_without_a_gradient_are_named)
{
    made m = {.n = 0};
    put(&m, "model.layers.2.mlp.weights:bwd", 3, B, S, E);
    memset(other_of(&m), 0, T * E * sizeof(float));
    expect_cause(&m, "routing_weights_detached", NULL, 0);
}

/* Of the first half of the tokens experts 0 and 1 are on their own rank, of the others the rest. */
CLAIM(weights_of_other_ranks_experts_without_a_gradient_are_named)
{
    made m = {.n = 0};
    put(&m, "model.layers.2.mlp.weights:bwd", 3, B, S, E);
    float *other = other_of(&m);
    for (size_t i = 0; i < T * E; i++)
        other[i] = i % E / 2 == (i / E < T / 2 ? 0 : 1) ? other[i] : 0.0f;
    expect_cause(&m, "routing_weights_detached", "the experts of other ranks: of 2 ranks", 0);
}

/* --- experts ------------------------------------------------------------------------------------------------------ */

typedef enum mistake {
    RIGHT,
    BARE,
    TWICE,
    AT_INPUT,
    EXCHANGED,
    NO_EXPERT_2,
    FIRST_FOUR,
    SOME_LOST,
    OTHER_ROW,
    OF_ONE_RANK,
    NEXT_ROW,
    ROW_OF_RANK,
    HALVES, /* of gate and up that lie in turn */
    NO_LIMITS,
    OTHER_FUNCTION,
    NO_PLUS_ONE,
    BARE_BIAS,
    NO_BIAS
} mistake;

typedef enum gate_form { BY_SILU, OPEN, BY_RELU } gate_form; /* OPEN: GPT-OSS's */

typedef struct experts {
    const float *x, *of[E][3], *bias[E][3]; /* gate, up, down; biases NULL: not GPT-OSS's */
    float *w;
    gate_form form;
} experts;

/* What goes through gate (0) or up (1). */
static double gate_or_up(const experts *m, size_t t, size_t e, double scale, size_t which, size_t f)
{
    double sum = m->bias[e][which] ? (double)m->bias[e][which][f] : 0.0;
    for (size_t i = 0; i < H; i++)
        sum += (double)m->of[e][which][f * H + i] * scale * (double)m->x[t * H + i];
    return sum;
}

static double gated(double gate, double up, gate_form by, mistake is)
{
    const double most = is == NO_LIMITS ? 1e9 : 7.0;
    if (by == BY_RELU && is != OTHER_FUNCTION)
        return fmax(gate, 0.0) * up;
    if (by == BY_RELU || (by == OPEN) == (is == OTHER_FUNCTION))
        return gate / (1.0 + exp(-gate)) * up;
    gate = fmin(gate, most);
    return gate / (1.0 + exp(-1.702 * gate)) * (fmax(-most, fmin(up, most)) + (is == NO_PLUS_ONE ? 0.0 : 1.0));
}

/* y += times * what expert e makes of scale * x. */
static void add_expert(double y[H], const experts *m, size_t t, size_t e, double scale, double times, mistake is)
{
    for (size_t i = 0; i < H && m->bias[e][2] && is != NO_BIAS; i++)
        y[i] += (is == BARE_BIAS ? 1.0 : times) * (double)m->bias[e][2][i];
    for (size_t f = 0; f < F; f++) {
        const size_t halves[2] = {f, F + f}, own[2] = {is == EXCHANGED, is != EXCHANGED};
        double x[2];
        for (size_t k = 0; k < 2; k++)
            x[k] = is == HALVES ? gate_or_up(m, t, e, scale, halves[k] % 2, halves[k] / 2)
                                : gate_or_up(m, t, e, scale, own[k], f);
        for (size_t i = 0; i < H; i++)
            y[i] += times * (double)m->of[e][2][i * F + f] * gated(x[0], x[1], m->form, is);
    }
}

/* What each slot has instead of its own row, of token t and expert e: the next row, of those sorted by expert and then by
 * token; or one of an expert of the same two. */
static void take_other(size_t *t, size_t *e, const experts *m, mistake is)
{
    for (size_t steps = is == NEXT_ROW ? 1 : 5; steps > 0;) {
        *t = (*t + 1) % T;
        *e = *t > 0 ? *e : is == NEXT_ROW ? (*e + 1) % E : *e / 2 * 2 + (*e + 1) % 2;
        steps -= m->w[*t * E + *e] != 0.0f;
    }
}

static void combine(float *y, const experts *m, size_t t, mistake is, const size_t before[E])
{
    double sum[H] = {0.0};
    for (size_t e = 0; e < E; e++) {
        const double w = (double)m->w[t * E + e];
        size_t row = t, of = e;
        const bool lost = (is == NO_EXPERT_2 && e == 2) || (is == FIRST_FOUR && before[e] >= 4) ||
                          (is == OF_ONE_RANK && e / 2 != (t < T / 2 ? 0 : 1)) || (is == SOME_LOST && (t + e) % 5 == 0);
        if (w == 0.0 || lost)
            continue;
        if (is == NEXT_ROW || is == ROW_OF_RANK)
            take_other(&row, &of, m, is);
        add_expert(sum, m, is == OTHER_ROW ? (t + 1) % T : row, of, is == AT_INPUT ? w : 1.0,
                   is == BARE || is == AT_INPUT ? 1.0
                   : is == TWICE                ? w * w
                                                : w,
                   is);
    }
    for (size_t i = 0; i < H; i++)
        y[i] = (float)sum[i];
}

static made make_experts(mistake is, gate_form by)
{
    static const char *const names[3] = {"gate_proj", "up_proj", "down_proj"};
    static char name[E * 6][64];
    made m = {.n = 0};
    experts own = {.form = by};
    size_t before[E] = {0};
    own.x = put_tokens(&m, "model.layers.0.post_attention_layernorm:fwd");
    own.w = put(&m, "model.layers.0.mlp.weights:fwd", 3, B, S, E);
    for (size_t t = 0; t < T; t++) {
        float z[E];
        for (size_t i = 0; i < E; i++)
            z[i] = 3.0f * noise(t * E + i);
        weigh(own.w + t * E, z, NORMALISED);
    }
    memcpy(other_of(&m), own.w, T * E * sizeof(float));
    for (size_t i = 0; i < E * 3; i++) {
        snprintf(name[i], sizeof name[i], "model.layers.0.mlp.experts.%zu.%s.weight:init", i / 3, names[i % 3]);
        float *w = put(&m, name[i], 2, i % 3 == 2 ? H : F, i % 3 == 2 ? F : H, 0), *other = other_of(&m);
        for (size_t k = 0; k < F * H && by == OPEN && i % 3 < 2; k++) /* some of it beyond the limits */
            w[k] = other[k] = 4.0f * w[k];
        own.of[i / 3][i % 3] = w;
        snprintf(name[E * 3 + i], sizeof *name, "model.layers.0.mlp.experts.%zu.%s.bias:init", i / 3, names[i % 3]);
        own.bias[i / 3][i % 3] = by == OPEN ? put(&m, name[E * 3 + i], 1, i % 3 == 2 ? H : F, 0, 0) : NULL;
    }
    float *y = put_tokens(&m, "model.layers.0.mlp.experts:fwd"), *other = other_of(&m);
    for (size_t t = 0; t < T; t++) {
        combine(y + t * H, &own, t, RIGHT, before);
        combine(other + t * H, &own, t, is, before);
        for (size_t e = 0; e < E; e++)
            before[e] += own.w[t * E + e] != 0.0f;
    }
    return m;
}

CLAIM(one_mistake_of_experts_is_named)
{
    static const struct {
        mistake is;
        gate_form form;
        const char *cause, *words;
    } cases[] = {
        {BARE, BY_SILU, "expert_weights_applied", "without weights"},
        {TWICE, BY_SILU, "expert_weights_applied", "twice"},
        {AT_INPUT, BY_SILU, "expert_input_weighted", NULL},
        {EXCHANGED, BY_SILU, "activation_arguments", "gate and up exchanged"},
        {NO_EXPERT_2, BY_SILU, "experts_left_out", "that of expert 2 wherever it is chosen"},
        {FIRST_FOUR, BY_SILU, "experts_left_out", "none of them among an expert's first 4 rows"},
        {SOME_LOST, BY_SILU, "experts_left_out", "tokens dropped"},
        {OTHER_ROW, BY_SILU, "unknown", NULL}, /* of no row that there is */
        {OF_ONE_RANK, BY_SILU, "experts_left_out", "of 2 ranks that share out the experts each token has those of one"},
        {NEXT_ROW, BY_SILU, "expert_rows_misplaced", "the row after their own"},
        {ROW_OF_RANK, BY_SILU, "expert_rows_misplaced", "of an expert of the same of 2 ranks"},
        {OTHER_FUNCTION, BY_SILU, "activation_function", "GPT-OSS's"},
        {OTHER_FUNCTION, OPEN, "activation_function", "silu(gate)*up"},
        {NO_PLUS_ONE, OPEN, "activation_function", "with up, not up + 1"},
        {NO_LIMITS, OPEN, "activation_function", "without limits"},
        {HALVES, OPEN, "expert_halves", "columns that have them in turn"},
        {BARE_BIAS, OPEN, "expert_bias_not_weighted", NULL},
        {NO_BIAS, OPEN, "expert_bias_left_out", NULL},
        {TWICE, OPEN, "expert_weights_applied", "twice"},
        {NEXT_ROW, OPEN, "expert_rows_misplaced", "the row after their own"},
        {NEXT_ROW, BY_RELU, "expert_rows_misplaced", "the row after their own"},
        {OTHER_FUNCTION, BY_RELU, "activation_function", "with silu"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = make_experts(cases[k].is, cases[k].form);
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

/* --- a shared expert ---------------------------------------------------------------------------------------------- */

CLAIM(a_shared_expert_or_a_gate_that_is_left_out_is_named)
{
    static const struct {
        double routed, by; /* how often both count; by 2: the logit, 3: the sigmoid of the gate */
        const char *cause;
    } cases[] = {{1.0, 0.0, "shared_expert_left_out"},
                 {1.0, 1.0, "shared_gate_left_out"},
                 {1.0, 2.0, "shared_gate_left_out"},
                 {0.0, 3.0, "experts_left_out"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *routed = put_tokens(&m, "model.layers.0.mlp.experts:fwd");
        const float *shared = put_tokens(&m, "model.layers.0.mlp.shared_expert.down_proj:fwd");
        const float *logit = put(&m, "model.layers.0.mlp.shared_expert_gate:fwd", 3, B, S, 1);
        float *y = put_tokens(&m, "model.layers.0.mlp:fwd"), *other = other_of(&m);
        for (size_t i = 0; i < T * H; i++) {
            const double z = (double)logit[i / H], s = 1.0 / (1.0 + exp(-z)), by = cases[k].by;
            y[i] = (float)((double)routed[i] + s * (double)shared[i]);
            other[i] = (float)(cases[k].routed * (double)routed[i] + (by == 2.0   ? z
                                                                      : by == 3.0 ? s
                                                                                  : by) *
                                                                         (double)shared[i]);
        }
        expect_cause(&m, cases[k].cause, NULL, k);
    }
}

/* --- gradients of experts that ranks share out -------------------------------------------------------------------- */

static const char *gradient_of(size_t e)
{
    static char name[E][64];
    snprintf(name[e], sizeof name[e], "model.layers.0.mlp.experts.%zu.down_proj.weight:grad", e);
    return name[e];
}

/* Of four experts, two each of two ranks: the first two have the sums of both ranks' gradients. */
CLAIM(gradients_that_are_added_to_other_experts_are_named)
{
    made m = {.n = 0};
    const float *of[E];
    for (size_t e = E; e-- > 0;)
        of[e] = put(&m, gradient_of(e), 2, H, F, 0);
    for (size_t i = 0; i < H * F; i++)
        other_of(&m)[i] = of[0][i] + of[2][i];
    expect_cause(&m, "wrong_group", "the sum of the gradients of 2 experts, 0 and 2", 0);
}

/* All experts' twice, and nothing else; or that of a norm too. */
CLAIM(a_factor_of_all_experts_alone_is_their_divisor)
{
    for (size_t way = 0; way < 2; way++) {
        made m = {.n = 0};
        put(&m, "model.layers.0.input_layernorm.weight:grad", 1, H, 0, 0);
        for (size_t i = 0; i < H && way == 1; i++)
            other_of(&m)[i] *= 2.0f;
        for (size_t e = E; e-- > 0;) {
            put(&m, gradient_of(e), 2, H, F, 0);
            for (size_t i = 0; i < H * F; i++)
                other_of(&m)[i] *= 2.0f;
        }
        expect_cause(&m, way == 0 ? "divisor_of_experts" : "!divisor_of_experts",
                     way == 0 ? "of all weights of experts" : NULL, way);
    }
}

CLAIM(a_gradient_of_no_rows_that_is_not_zero_was_not_written)
{
    made m = {.n = 0};
    put(&m, gradient_of(1), 2, H, F, 0);
    memset(put(&m, gradient_of(0), 2, H, F, 0), 0, H * F * sizeof(float));
    expect_cause(&m, "never_written", "an expert that no token chose", 0);
}

/* Gradients of squares 1 (a norm) and, of experts, 4, 9, 16 and 25: the norm with those of one rank of two. */
CLAIM(a_norm_with_one_ranks_experts_is_named)
{
    made m = {.n = 0};
    put(&m, "model.layers.0.input_layernorm.weight:grad", 1, 1, 0, 0)[0] = 1.0f;
    other_of(&m)[0] = 1.0f;
    for (size_t e = 0; e < E; e++) {
        put(&m, gradient_of(e), 2, 1, 1, 0)[0] = (float)(e + 2);
        other_of(&m)[0] = (float)(e + 2);
    }
    put(&m, "grad_norm:clip", 0, 0, 0, 0)[0] = sqrtf(55.0f);
    other_of(&m)[0] = sqrtf(1.0f + 16.0f + 25.0f);
    expect_cause(&m, "norm_leaves_out", "the experts of one of 2 expert-parallel ranks alone, experts 2 to 3", 0);
}

EVERY_CLAIM(replay_experts)
