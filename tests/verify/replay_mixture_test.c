/* SPDX-License-Identifier: Apache-2.0 */
/* Of experts without routes in the dumps, one mistake is named by what all of them make of the module's input; and the
 * part of a router's gradient that its auxiliary loss gives. */
#include "support/together.h"
#include "tests/verify/two_dumps.h"

enum { E = 4, F = 5, T = B * S }; /* experts, the width of one; tokens */

/* --- experts ------------------------------------------------------------------------------------------------------ */

/* How weights are stored: of all experts, gate and up apart, packed and in turn as [in, out], or of each expert. */
typedef enum storage { STACKED, PACKED, EACH } storage;
typedef struct experts {
    const float *x, *shared, *of[E][3]; /* gate, up, down; where packed, 2F rows of [in, out] */
    storage how;
} experts;

static double weight(const experts *m, size_t e, size_t part, size_t row, size_t col)
{
    if (m->how == PACKED)
        return (double)(part == 2 ? m->of[e][2][col * H + row] : m->of[e][0][col * 2 * F + 2 * row + part]);
    return (double)m->of[e][part][row * (part == 2 ? F : H) + col];
}

/* y += times * what expert e makes of scale * x; exchanged: gate and up are. */
static void add_expert(double y[H], const experts *m, size_t t, size_t e, double scale, double times, bool exchanged)
{
    for (size_t f = 0; f < F; f++) {
        double gate = 0.0, up = 0.0;
        for (size_t i = 0; i < H; i++) {
            gate += weight(m, e, exchanged, f, i) * scale * (double)m->x[t * H + i];
            up += weight(m, e, !exchanged, f, i) * scale * (double)m->x[t * H + i];
        }
        for (size_t i = 0; i < H; i++)
            y[i] += times * weight(m, e, 2, i, f) * gate / (1.0 + exp(-gate)) * up;
    }
}

typedef enum mistake {
    RIGHT,
    SHARED_TWICE,
    NEXT_EXPERT,
    NOT_NORMALISED,
    OTHER_WEIGHTS,
    LOST,
    OTHER_ROW,
    SOME_ROWS,
    BARE,
    EXCHANGED,
    AT_INPUT,
    MEANS,
    SCALED,
    SHARED_MORE,
    NORMALISED,
    BY_TOKEN,
    FOREIGN_WEIGHTS
} mistake;

/* Token t has expert t % E with its share, and the next but one with the rest. */
static double share_of(size_t t)
{
    return 0.5 + 0.3 * sin(1.0 + (double)t);
}

static void combine(float *y, const experts *m, size_t t, mistake is)
{
    double sum[H] = {0.0};
    for (size_t slot = 0; slot < 2; slot++) {
        const double share = is == FOREIGN_WEIGHTS ? 0.5 + 0.2 * cos((double)(3 * t))
                                                   : share_of(is == OTHER_WEIGHTS ? (t + 5) % T : t),
                     w = slot ? 1.0 - share : share;
        const size_t e = (t + 2 * slot + (is == NEXT_EXPERT)) % E,
                     of = is == OTHER_ROW || (is == SOME_ROWS && t % 3) ? (t + 7 * (slot + 1)) % T : t;
        if (is == LOST && slot == 1 && t % 3 != 0)
            continue;
        add_expert(sum, m, of, e, is == AT_INPUT ? w : 1.0,
                   is == AT_INPUT || is == BARE             ? 1.0
                   : is == MEANS                            ? 0.5
                   : is == SCALED                           ? 1.7 * w
                   : is == NOT_NORMALISED || is == BY_TOKEN ? w * (0.5 + 0.3 * cos((double)t))
                                                            : w,
                   is == EXCHANGED);
    }
    for (size_t i = 0; i < H; i++)
        sum[i] += is == SOME_ROWS && t % 3 == 0 ? 0.01 * cos((double)(t + i * i)) : 0.0;
    for (size_t i = 0; i < H; i++)
        y[i] = (float)(sum[i] + (is == SHARED_TWICE  ? 2.0
                                 : is == SHARED_MORE ? 1.5
                                                     : 1.0) *
                                    (double)m->shared[t * H + i]);
}

static void put_weights(made *m, experts *own)
{
    static const char *const names[3] = {"w1", "w3", "w2"};
    static char name[E * 3][64];
    for (size_t i = 0; i < E * 3 && own->how == EACH; i++) {
        snprintf(name[i], sizeof name[i], "layers.0.moe.experts.local.%zu.%s.weight:init", i / 3, names[i % 3]);
        own->of[i / 3][i % 3] = put(m, name[i], 2, i % 3 == 2 ? H : F, i % 3 == 2 ? F : H, 0);
    }
    for (size_t k = own->how == PACKED ? 1 : 0; k < 3 && own->how != EACH; k++) {
        const bool down = k == 2, packed = own->how == PACKED;
        snprintf(name[k], sizeof name[k], "layers.0.moe.experts.%s:init", names[k]);
        const float *w = packed ? put(m, name[k], 3, E, down ? F : H, down ? H : 2 * F)
                                : put(m, name[k], 3, E, down ? H : F, down ? F : H);
        for (size_t e = 0; e < E; e++)
            own->of[e][down ? 2 : packed ? 0 : k] = w + e * (packed && !down ? 2 : 1) * F * H;
    }
}

static made make_experts(storage how, mistake is)
{
    made m = {.n = 0};
    experts own = {.how = how};
    own.x = put_tokens(&m, "layers.0.ffn_norm:fwd");
    memcpy(other_of(&m), own.x, T * H * sizeof(float));
    own.shared = put_tokens(&m, "layers.0.moe.shared_experts:fwd");
    memcpy(other_of(&m), own.shared, T * H * sizeof(float));
    float *w = put(&m, "layers.0.moe.router:fwd", 2, T, 2, 0);
    for (size_t t = 0; t < T; t++) {
        w[2 * t] = (float)share_of(t);
        w[2 * t + 1] = (float)(1.0 - share_of(t));
    }
    memcpy(other_of(&m), w, 2 * T * sizeof(float));
    put_weights(&m, &own);
    float *y = put_tokens(&m, "layers.0.moe:fwd"), *other = other_of(&m);
    for (size_t t = 0; t < T; t++) {
        combine(y + t * H, &own, t, is == NORMALISED ? NOT_NORMALISED : is == BY_TOKEN ? SCALED : RIGHT);
        combine(other + t * H, &own, t, is);
    }
    return m;
}

CLAIM(one_mistake_of_experts_without_routes_is_named)
{
    static const struct {
        mistake is;
        const char *cause, *words;
    } cases[] = {{SHARED_TWICE, "counted_twice", "the shared expert counts 2 times"},
                 {NEXT_EXPERT, "expert_rows_misplaced", "expert 1 for 0, 2 for 1, 3 for 2, 0 for 3"},
                 {NOT_NORMALISED, "routing_weights_not_normalised", "of each token's own"},
                 {OTHER_WEIGHTS, "expert_rows_misplaced", "layers.0.moe.router:fwd"},
                 {LOST, "experts_left_out", "tokens dropped"},
                 {OTHER_ROW, "expert_rows_misplaced", "of another token"},
                 {SOME_ROWS, "expert_rows_misplaced", "of another token"},
                 {BARE, "expert_weights_applied", "without weights"},
                 {EXCHANGED, "activation_arguments", "gate and up exchanged"},
                 {AT_INPUT, "expert_input_weighted", NULL},
                 {MEANS, "expert_weights_applied", "the mean of"},
                 {SCALED, "routing_weights_scaled", "are multiplied by 1.7"},
                 {SHARED_MORE, "wrong_scalar", "the shared expert is multiplied by 1.5"},
                 {NORMALISED, "routing_weights_normalised", "add up to 1, which they do not"},
                 {BY_TOKEN, "wrong_scalar", "one number of each token's own"},
                 {FOREIGN_WEIGHTS, "expert_weights_applied", "not those of the reference"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        made m = make_experts((storage)(k % 3), cases[k].is);
        expect_cause(&m, cases[k].cause, cases[k].words, k);
    }
}

/* As in a router's own output. */
CLAIM(weights_that_do_not_add_up_to_1_are_named)
{
    for (size_t way = 0; way < 2; way++) {
        made m = {.n = 0};
        put(&m, "layers.0.moe.experts.w1:init", 3, E, F, H);
        float *w = put(&m, "layers.0.moe.router:fwd", 2, T, 2, 0), *other = other_of(&m);
        for (size_t i = 0; i < 2 * T; i++) {
            const double share = i % 2 ? 1.0 - share_of(i / 2) : share_of(i / 2);
            (way ? w : other)[i] = (float)(share * (0.5 + 0.3 * cos((double)(i / 2))));
            (way ? other : w)[i] = (float)share;
        }
        expect_cause(&m, way ? "routing_weights_normalised" : "routing_weights_not_normalised", NULL, way);
    }
}

/* --- a router's auxiliary loss ------------------------------------------------------------------------------------ */

/* The gradient of a balancing loss, of the 2 largest of E logits, over all tokens, or of the z-loss, in row t of the
 * logits. */
static void slope(double dz[E], double (*z)[E], size_t t, bool of_z)
{
    double count[E] = {0.0}, p[E], sum = 0.0, mean = 0.0;
    for (size_t i = 0; i < T * E; i++) {
        size_t larger = 0;
        for (size_t other = 0; other < E; other++)
            larger += z[i / E][other] > z[i / E][i % E];
        count[i % E] += larger < 2;
    }
    for (size_t i = 0; i < E; i++)
        sum += p[i] = exp(z[t][i]);
    for (size_t i = 0; i < E; i++)
        mean += p[i] / sum * count[i];
    for (size_t i = 0; i < E; i++)
        dz[i] = 1e-2 * p[i] / sum * (of_z ? log(sum) : count[i] - mean);
}

CLAIM(the_auxiliary_loss_of_a_router_is_named)
{
    static const struct {
        double rest, times; /* of the other dump's gradient, whose reference has both once */
        bool of_z;
        const char *cause, *words;
    } cases[] = {{1.0, 4.0, false, "balancing_loss", "of which there is more"},
                 {1.0, 0.0, false, "balancing_loss", "of which there is less"},
                 {1.0, 3.0, true, "router_z_loss", "computed again"},
                 {0.0, 1.0, false, "routing_weights_detached", "a balancing loss over all tokens"}};
    for (size_t k = 0; k < 2 * sizeof cases / sizeof *cases; k++) {
        const bool of_weight = k % 2;
        made m = {.n = 0};
        double z[T][E], dz[E], loss[T * H] = {0.0};
        const float *x = put_tokens(&m, "layers.0.ffn_norm:fwd");
        memcpy(other_of(&m), x, T * H * sizeof(float));
        put(&m, "layers.0.moe.experts.w1:init", 3, E, F, H);
        const float *w = put(&m, "layers.0.moe.router.weight:init", 2, E, H, 0);
        for (size_t i = 0; i < T * E; i++) {
            z[i / E][i % E] = 0.0;
            for (size_t f = 0; f < H; f++)
                z[i / E][i % E] += (double)x[i / E * H + f] * (double)w[i % E * H + f];
        }
        for (size_t t = 0; t < T; t++) {
            slope(dz, z, t, cases[k / 2].of_z);
            for (size_t i = 0; i < E * H; i++)
                loss[of_weight ? i : t * H + i % H] += dz[i / H] * (double)(of_weight ? x[t * H + i % H] : w[i]);
        }
        float *g = of_weight ? put(&m, "layers.0.moe.router.weight:grad", 2, E, H, 0)
                             : put(&m, "layers.0.moe.router:bwd", 2, T, H, 0),
              *other = other_of(&m);
        for (size_t i = 0; i < (of_weight ? E : T) * H; i++) {
            other[i] = (float)(cases[k / 2].rest * (double)g[i] + cases[k / 2].times * loss[i]);
            g[i] = (float)((double)g[i] + loss[i]);
        }
        expect_cause(&m, cases[k / 2].cause, cases[k / 2].words, k);
    }
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* The last expert of layer 0 has no tokens, and another layer's gradient in its place. */
CLAIM(a_gradient_that_nothing_wrote_is_named)
{
    made m = {.n = 0};
    const float *before = put(&m, "layers.1.moe.experts.w1:grad", 3, E, F, H);
    memcpy(other_of(&m), before, E * F * H * sizeof *before);
    float *g = put(&m, "layers.0.moe.experts.w1:grad", 3, E, F, H), *other = other_of(&m);
    memset(g + (E - 1) * F * H, 0, F * H * sizeof *g);
    memcpy(other, g, (E - 1) * F * H * sizeof *g);
    memcpy(other + (E - 1) * F * H, before + (E - 1) * F * H, F * H * sizeof *g);
    expect_cause(&m, "never_written", "the reference is zero there", 0);
}

EVERY_CLAIM(replay_mixture)
