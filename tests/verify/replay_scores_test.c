/* SPDX-License-Identifier: Apache-2.0 */
/* Routers of sigmoids that were computed with one mistake are named by computing them again; here they are computed by
 * plain loops. */
#include "support/together.h"
#include "tests/verify/two_dumps.h"

enum {
    E = 8,
    K = 3,
    G = 4,
    KEPT = 2,
    EACH = E / G,
    T = B * S
}; /* experts, of a token; groups, those that stay; tokens */
#define MOVE 0.125f

#define GATE "model.layers.0.mlp.gate:fwd"
#define WEIGHTS "model.layers.0.mlp.weights:"
#define BIAS "model.layers.0.mlp.gate.e_score_correction_bias:"

static double sigmoid(float z)
{
    return 1.0 / (1.0 + exp(-(double)z));
}

typedef enum choice { RIGHT, BY_BEST, OF_ALL, UNBIASED, DEALT } choice;

/* of[K], ascending: the experts of a row of logits. */
static void choose(int32_t of[K], const float *z, const float *bias, choice how)
{
    double c[E], group[G];
    for (size_t i = 0; i < E; i++)
        c[i] = sigmoid(z[i]) + (how == UNBIASED ? 0.0 : (double)bias[i]);
    for (size_t g = 0; g < G; g++) {
        const double a = c[how == DEALT ? g : 2 * g], b = c[how == DEALT ? G + g : 2 * g + 1];
        group[g] = how == BY_BEST ? fmax(a, b) : a + b;
    }
    for (size_t i = 0; i < E && how != OF_ALL; i++) {
        size_t before = 0;
        for (size_t g = 0; g < G; g++)
            before += group[g] > group[how == DEALT ? i % G : i / EACH];
        c[i] -= before < KEPT ? 0.0 : 100.0;
    }
    for (size_t i = 0, n = 0; i < E; i++) {
        size_t before = 0;
        for (size_t j = 0; j < E; j++)
            before += c[j] > c[i];
        if (before < K)
            of[n++] = (int32_t)i;
    }
}

/* A dump with logits and a bias, and the experts of each token by them. */
static made begin(int32_t route[T][K], float **z, float **bias)
{
    made m = {.n = 0};
    *z = put(&m, GATE, 3, B, S, E);
    *bias = put(&m, BIAS "init", 1, E, 1, 1);
    for (size_t i = 0; i < T * E; i++)
        data_of(&m, 1, 0)[i] = (*z)[i] *= 8.0f;
    for (size_t i = 0; i < E; i++)
        data_of(&m, 1, 1)[i] = (*bias)[i] *= 0.25f;
    for (size_t t = 0; t < T; t++)
        choose(route[t], *z + t * E, *bias, RIGHT);
    return m;
}

static void put_routes(made *m, int32_t route[T][K], int32_t other[T][K])
{
    put_pair(m, (ar_st_tensor){.name = "model.layers.0.mlp.routes:fwd", .dtype = AR_I32, .ndim = 3, .shape = {B, S, K}},
             route, other);
}

/* --- the choice --------------------------------------------------------------------------------------------------- */

CLAIM(another_choice_by_groups_or_the_bias_is_named)
{
    static const struct {
        choice is;
        const char *words;
    } cases[] = {{BY_BEST, "of 2 of 4 groups, ranked by their best score, where the reference takes them of 2 of 4"},
                 {OF_ALL, "of all experts, where the reference takes them of 2 of 4 groups"},
                 {UNBIASED, "the sum of their two best, by scores without the bias, where"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        int32_t route[T][K], other[T][K];
        float *z, *bias;
        made m = begin(route, &z, &bias);
        for (size_t t = 0; t < T; t++)
            choose(other[t], z + t * E, bias, cases[k].is);
        put_routes(&m, route, other);
        expect_cause(&m, "other_experts_chosen", cases[k].words, k);
    }
}

/* +1, 0 or -1 for each expert: it has fewer tokens of these than the mean, as many, or more. */
static void signs(int sign[E], int32_t route[T][K], size_t from, size_t to)
{
    for (size_t i = 0; i < E; i++) {
        size_t own = 0;
        for (size_t slot = from * K; slot < to * K; slot++)
            own += route[slot / K][slot % K] == (int32_t)i;
        sign[i] = (own * E < (to - from) * K) - (own * E > (to - from) * K);
    }
}

static void put_moved(made *m, const float *bias, const int sign[E], const int other[E])
{
    float *moved = put(m, BIAS "new", 1, E, 1, 1), *wrong = other_of(m);
    for (size_t i = 0; i < E; i++) {
        moved[i] = bias[i] + (float)sign[i] * MOVE;
        wrong[i] = bias[i] + (float)other[i] * MOVE;
    }
}

CLAIM(experts_of_a_bias_that_has_moved_within_the_step_are_named)
{
    int32_t route[T][K], other[T][K];
    float *z, *bias, moved[E];
    int all[E], first[E];
    made m = begin(route, &z, &bias);
    signs(all, route, 0, T);
    signs(first, route, 0, S);
    put_moved(&m, bias, all, all);
    for (size_t i = 0; i < E; i++)
        moved[i] = bias[i] + (float)first[i] * MOVE;
    for (size_t t = 0; t < T; t++)
        choose(other[t], z + t * E, t < S ? bias : moved, RIGHT);
    put_routes(&m, route, other);
    expect_cause(&m, "router_bias_update", "moved by 0.125 after the first 1 samples", 0);
}

/* --- the update --------------------------------------------------------------------------------------------------- */

CLAIM(an_update_by_other_counts_or_more_than_one_is_named)
{
    enum { TWICE, OF_A_PART, OF_PLAIN, OF_OTHERS, WAYS };
    static const char *const words[WAYS] = {"here 2 times in one step", "by the counts of one of 2 parts of the batch",
                                            "the largest scores of all experts without the bias",
                                            "by other counts than those of the batch's routes"};
    static const float none[E];
    for (size_t way = 0; way < WAYS; way++) {
        int32_t route[T][K], plain[T][K];
        float *z, *bias;
        int all[E], is[E], last[E];
        made m = begin(route, &z, &bias);
        put_routes(&m, route, route);
        for (size_t t = 0; t < T; t++)
            choose(plain[t], z + t * E, none, OF_ALL);
        signs(all, route, 0, T);
        signs(last, route, S, T);
        signs(is, way == OF_PLAIN ? plain : route, 0, way == OF_PLAIN ? T : S);
        for (size_t i = 0; i < E; i++)
            is[i] = way == TWICE ? is[i] + last[i] : way == OF_A_PART ? last[i] : way == OF_OTHERS ? -all[i] : is[i];
        put_moved(&m, bias, all, is);
        expect_cause(&m, "router_bias_update", words[way], way);
    }
}

/* --- weights and their gradient ----------------------------------------------------------------------------------- */

typedef enum weighing { SHARES, PLAIN, BIASED, OF_ALL_SCORES } weighing;

static void weigh(float w[E], const int32_t of[K], const float *z, const float *bias, weighing how, double factor)
{
    double sum = 0.0;
    memset(w, 0, E * sizeof *w);
    for (size_t k = 0; k < K && how != OF_ALL_SCORES; k++)
        sum += sigmoid(z[of[k]]) + (how == BIASED ? (double)bias[of[k]] : 0.0);
    for (size_t i = 0; i < E && how == OF_ALL_SCORES; i++)
        sum += sigmoid(z[i]);
    for (size_t k = 0; k < K; k++) {
        const double a = sigmoid(z[of[k]]) + (how == BIASED ? (double)bias[of[k]] : 0.0);
        w[of[k]] = (float)(factor * a / (how == PLAIN ? 1.0 : sum));
    }
}

CLAIM(weights_with_the_bias_or_another_factor_are_named)
{
    static const struct {
        weighing was, is;
        double factor;
        const char *cause, *words;
    } cases[] = {{SHARES, BIASED, 2.5, "router_bias_in_weights", NULL},
                 {SHARES, SHARES, 1.0, "routing_weights_scaled", "has a factor of 2.5: it is left out"},
                 {SHARES, SHARES, 6.25, "routing_weights_scaled", "applied twice"},
                 {PLAIN, PLAIN, 2.0, "routing_weights_scaled", "multiplied by 2, where"},
                 {SHARES, PLAIN, 2.5, "routing_weights_not_normalised", "its expert's score"},
                 {PLAIN, SHARES, 2.5, "routing_weights_normalised", "divided by the sum"},
                 {SHARES, OF_ALL_SCORES, 2.5, "routing_weights_function", "by the sum of all experts' scores"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        int32_t route[T][K];
        float *z, *bias;
        made m = begin(route, &z, &bias);
        float *w = put(&m, WEIGHTS "fwd", 3, B, S, E), *other = other_of(&m);
        for (size_t t = 0; t < T; t++) {
            weigh(w + t * E, route[t], z + t * E, bias, cases[k].was, 2.5);
            weigh(other + t * E, route[t], z + t * E, bias, cases[k].is, cases[k].factor);
        }
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

/* Where a dump has no logits and no numbers of experts, but the router's input, its weight and what it gives: a token's
 * weights in the order of its choice. */
CLAIM(weights_alone_show_the_choice_too)
{
    static const struct {
        choice is;
        double factor;
        const char *cause, *words;
    } cases[] = {
        {RIGHT, 1.0, "routing_weights_scaled", "this is 0.4 times the router's gradient"}, /* of the router's input */
        {RIGHT, 1.0, "routing_weights_scaled", "it is left out"},
        {BY_BEST, 2.5, "other_experts_chosen", "2 of 4 groups, ranked by their best score, where"},
        {DEALT, 2.5, "other_experts_chosen", "2 of 4 groups of experts dealt round"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = {.n = 0};
        const float *x = put_tokens(&m, "model.layers.0.post_attention_layernorm:fwd");
        const float *w = put(&m, "model.layers.0.mlp.gate.weight:init", 2, E, H, 1);
        float *bias = put(&m, BIAS "init", 1, E, 1, 1), *same = other_of(&m);
        for (size_t i = 0; i < E; i++)
            same[i] = bias[i] *= 0.25f;
        float *weight = put(&m, GATE, 2, T, K, 1), *other = other_of(&m);
        for (size_t t = 0; t < T; t++) {
            double in[H];
            float z[E], row[E];
            int32_t of[K];
            for (size_t i = 0; i < H; i++)
                in[i] = (double)x[t * H + i];
            multiply(z, w, in, E, H);
            for (size_t side = 0; side < 2; side++) {
                choose(of, z, bias, side == 0 ? RIGHT : cases[k].is);
                weigh(row, of, z, bias, SHARES, side == 0 ? 2.5 : cases[k].factor);
                for (size_t i = 0; i < K; i++)
                    (side == 0 ? weight : other)[t * K + i] = row[of[(i + t) % K]];
            }
        }
        if (k > 0) {
            expect_cause(&m, cases[k].cause, cases[k].words, k);
            continue;
        }
        memcpy(other, weight, T * K * sizeof *weight);
        float *dx = put(&m, "model.layers.0.mlp.gate:bwd", 2, T, H, 1), *scaled = other_of(&m);
        for (size_t i = 0; i < T * H; i++)
            scaled[i] = dx[i] / 2.5f;
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

CLAIM(a_gradient_without_the_factor_or_the_sum_is_named)
{
    for (size_t way = 0; way < 2; way++) {
        int32_t route[T][K];
        float *z, *bias;
        made m = begin(route, &z, &bias);
        float *w = put(&m, WEIGHTS "fwd", 3, B, S, E);
        for (size_t t = 0; t < T; t++)
            weigh(w + t * E, route[t], z + t * E, bias, SHARES, 2.5);
        memcpy(other_of(&m), w, T * E * sizeof *w);
        const float *g = put(&m, WEIGHTS "bwd", 3, B, S, E);
        float *dz = put(&m, "model.layers.0.mlp.logits:bwd", 3, B, S, E), *other = other_of(&m);
        for (size_t t = 0; t < T; t++) {
            double mean = 0.0;
            for (size_t i = t * E; i < (t + 1) * E; i++)
                mean += (double)w[i] / 2.5 * (double)g[i];
            for (size_t i = t * E; i < (t + 1) * E; i++) {
                const double by = (double)w[i] * (1.0 - sigmoid(z[i]));
                dz[i] = (float)(by * ((double)g[i] - mean));
                other[i] = way == 0 ? dz[i] / 2.5f : (float)(by * (double)g[i]);
            }
        }
        expect_cause(&m, way == 0 ? "routing_weights_scaled" : "routing_sum_detached",
                     way == 0 ? "0.4 times the router's" : NULL, way);
    }
}

EVERY_CLAIM(replay_scores)
