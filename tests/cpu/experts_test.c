/* SPDX-License-Identifier: Apache-2.0 */
/* The slots of layers with experts, against numerics.md's paragraph on them written as plainly as the text. What they
 * do with bf16 is in storage_test.c. */
#include "tests/cpu/row_support.h"

/* --- the definitions ---------------------------------------------------------------------------------------------- */

/* The largest first, the lower number of equal ones; then in order. */
static void plain_choose(int32_t *expert, const float *z, size_t n, size_t k)
{
    OWNED(free) bool *taken = calloc(n, sizeof *taken);
    for (size_t j = 0; j < k; j++) {
        size_t best = n;
        for (size_t i = 0; i < n; i++)
            if (!taken[i] && (best == n || z[i] > z[best]))
                best = i;
        taken[best] = true;
    }
    for (size_t i = 0, j = 0; i < n; i++)
        if (taken[i])
            expert[j++] = (int32_t)i;
}

static void plain_softmax(float *p, const float *z, size_t n)
{
    const int bits = plain_bits(n);
    float m = -INFINITY;
    bool finite = true;
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) {
        finite = finite && isfinite(z[i]);
        m = z[i] > m ? z[i] : m;
    }
    for (size_t i = 0; i < n && finite; i++)
        sum += plain_quantised((double)ari_exp32(z[i] - m), 1, bits);
    for (size_t i = 0; i < n; i++)
        p[i] = finite ? (float)((double)ari_exp32(z[i] - m) / ldexp((double)sum, 1 - bits)) : stored(NAN);
}

static void plain_route(float *p, int32_t *expert, float *weight, const float *z, size_t n, size_t k, bool normalised)
{
    size_t nan = 0;
    while (nan < n && !isnan(z[nan]))
        nan++;
    plain_softmax(p, z, n);
    if (nan == n)
        plain_choose(expert, z, n, k);
    float sum = 0.0f;
    for (size_t j = 0; j < k; j++) {
        expert[j] = nan < n ? -1 - (int32_t)nan : expert[j];
        weight[j] = nan < n ? stored(NAN) : p[expert[j]];
        sum = stored(sum + weight[j]); /* p is no -0 */
    }
    for (size_t j = 0; j < k && normalised; j++)
        weight[j] = stored(weight[j] / sum);
}

static float plain_dot(const float *a, const float *b, size_t n)
{
    OWNED(free) double *products = calloc(n, sizeof *products);
    for (size_t i = 0; i < n; i++)
        products[i] = (double)a[i] * (double)b[i];
    const float sum = stored((float)plain_row_sum(products, n));
    return sum;
}

/* --- routing ------------------------------------------------------------------------------------------------------ */

/* n rows of logits to k of the experts each. */
typedef struct choice {
    size_t n, experts, k;
    bool normalised;
    int threads;
} choice;

/* Few different values, so that most rows have equal ones: quarters, and both zeros. */
static void make_ties(float *z, size_t count)
{
    for (size_t i = 0; i < count; i++)
        z[i] = rintf(z[i]) * 0.25f;
}

static ar_route_rule of_softmax(size_t k, bool normalised)
{
    return (ar_route_rule){.k = k, .groups = 1, .kept = 1, .normalised = normalised, .scale = 1.0f};
}

static void check_route(const choice *c, const float *z)
{
    ar_device d = test_device(c->threads);
    const size_t all = c->n * c->experts, slots = c->n * c->k;
    OWNED(free) float *p = new_values(all, SPECIAL, 1), *expected_p = new_copy(p, all);
    OWNED(free) float *weight = new_values(slots, SPECIAL, 2), *expected_weight = new_copy(weight, slots);
    OWNED(free) int32_t *expert = calloc(slots + 1, sizeof *expert), *expected = calloc(slots + 1, sizeof *expected);
    const ar_route_rule rule = of_softmax(c->k, c->normalised);
    assert_ok(
        ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(NULL), rows_of(z, c->n, c->experts), &rule));
    for (size_t t = 0; t < c->n; t++)
        plain_route(expected_p + t * c->experts, expected + t * c->k, expected_weight + t * c->k, z + t * c->experts,
                    c->experts, c->k, c->normalised);
    assert_bits(expert, expected, slots, "experts");
    assert_bits(p, expected_p, all, "probabilities");
    assert_bits(weight, expected_weight, slots, "weights");
}

static const size_t expert_counts[] = {1, 2, 3, 8, 33, 100, 257, 2100};
#define COUNTS (sizeof expert_counts / sizeof *expert_counts)

/* Calls one for k = 1, 2, 8 and E. */
static void every_choice(void (*one)(const choice *, uint64_t seed))
{
    for (size_t i = 0; i < COUNTS; i++)
        for (uint64_t which = 0; which < 4; which++) {
            const size_t experts = expert_counts[i], some[] = {1, 2, 8, experts};
            const size_t k = some[which] < experts ? some[which] : experts;
            if (k > 300)
                continue;
            one(&(choice){experts > 300 ? 19 : ROWS, experts, k, which % 2 == i % 2, 1 + (int)(which / 2)}, which);
        }
}

static void route_one(const choice *c, uint64_t seed)
{
    for (int kind = ORDINARY; kind <= VALUE_KINDS; kind++) {
        OWNED(free) float *z = new_values(c->n * c->experts, kind == VALUE_KINDS ? ORDINARY : (enum values)kind, seed);
        if (kind == VALUE_KINDS)
            make_ties(z, c->n * c->experts);
        check_route(c, z);
    }
}

Test(experts, routes_are_the_largest_logits_and_weights_their_probabilities)
{
    every_choice(route_one);
}

static void expect_experts(const float *z, size_t n, size_t k, const int32_t *expected)
{
    ar_device d = test_device(1);
    float p[8], weight[8];
    int32_t expert[8];
    const ar_route_rule rule = of_softmax(k, true);
    assert_ok(ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(NULL), rows_of(z, 1, n), &rule));
    assert_bits(expert, expected, k, "experts");
}

Test(experts, equal_logits_go_to_the_lower_number_and_zeros_are_equal)
{
    expect_experts((const float[]){1, 3, 3, 3, 2}, 5, 2, (const int32_t[]){1, 2});
    expect_experts((const float[]){-0.0f, -1, 0.0f, -0.0f}, 4, 2, (const int32_t[]){0, 2});
    expect_experts((const float[]){0.0f, -0.0f, 0.0f, 1}, 4, 2, (const int32_t[]){0, 3});
    expect_experts((const float[]){7, 7, 7}, 3, 3, (const int32_t[]){0, 1, 2});
    expect_experts((const float[]){-5}, 1, 1, (const int32_t[]){0});
    /* Infinities have an order too. */
    expect_experts((const float[]){-INFINITY, 1, INFINITY, INFINITY, -INFINITY}, 5, 4, (const int32_t[]){0, 1, 2, 3});
}

Test(experts, a_row_with_a_nan_says_which_and_the_others_are_routed)
{
    ar_device d = test_device(1);
    const float z[3][4] = {{1, 2, 3, 4}, {1, 2, NAN, NAN}, {-NAN, 0, 0, 0}};
    float p[12], weight[6];
    int32_t expert[6];
    const ar_route_rule rule = of_softmax(2, false);
    assert_ok(ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(NULL), rows_of(z, 3, 4), &rule));
    assert_bits(expert, ((const int32_t[]){2, 3, -3, -3, -1, -1}), 6, "experts");
    cr_assert(p[3] == weight[1]);
    for (size_t i = 4; i < 12; i++)
        assert_bits(p + i, &(uint32_t){0x7fc00000u}, 1, "p of a row with a NaN");
    assert_ok(ari_cpu_route(&d, NULL, buf(NULL), buf(NULL), buf(NULL), buf(NULL), rows_of(NULL, 0, 4), &rule));
}

/* The experts of ordinary rows. */
static int32_t *new_experts(const choice *c, uint64_t seed)
{
    OWNED(free) float *z = new_values(c->n * c->experts, ORDINARY, seed);
    int32_t *expert = calloc(c->n * c->k + 1, sizeof *expert);
    for (size_t t = 0; t < c->n; t++)
        plain_choose(expert + t * c->k, z + t * c->experts, c->experts, c->k);
    return expert;
}

/* dz_i = p_i*([i in K] s_i - r), of s = scale*g and r = the sum over K of p*s; normalised, of weights in place of p and
 * within K alone. */
static void gradient_one(const choice *c, uint64_t seed)
{
    ar_device d = test_device(c->threads);
    const size_t all = c->n * c->experts, slots = c->n * c->k;
    OWNED(free) int32_t *expert = new_experts(c, seed);
    OWNED(free) float *g = new_values(slots, SPECIAL, seed + 10), *p = new_values(all, SPECIAL, seed + 20);
    OWNED(free) float *weight = new_values(slots, ORDINARY, seed + 30);
    OWNED(free) float *dz = new_values(all, SPECIAL, 3), *expected = new_copy(dz, all);
    ar_route_rule rule = of_softmax(c->k, c->normalised);
    rule.scale = c->normalised ? 1.0f : 2.5f;
    for (size_t t = 0; t < c->n; t++) {
        float r = 0.0f;
        for (size_t i = t * c->k; i < (t + 1) * c->k; i++) {
            weight[i] = c->normalised ? weight[i] : p[t * c->experts + (size_t)expert[i]];
            r = stored(r + stored(weight[i] * stored(g[i] * rule.scale)));
        }
        for (size_t i = t * c->experts; i < (t + 1) * c->experts; i++)
            expected[i] = c->normalised ? 0.0f : stored(p[i] * -r);
        for (size_t i = t * c->k; i < (t + 1) * c->k; i++)
            expected[t * c->experts + (size_t)expert[i]] = stored(weight[i] * stored(stored(g[i] * rule.scale) - r));
    }
    assert_ok(ari_cpu_route_backward(&d, NULL, rows_of(dz, c->n, c->experts), cbuf(g), cbuf(p), cbuf(expert),
                                     cbuf(weight), &rule));
    assert_bits(dz, expected, all, "gradients of logits");
}

Test(experts, gradients_stand_where_the_row_goes)
{
    every_choice(gradient_one);
}

/* r = +0, also of terms that are -0: p*-r is -0, and where the weights are normalised there is no such product. */
Test(experts, zeros_of_the_router_s_gradient_have_their_signs)
{
    ar_device d = test_device(1);
    const float g[2] = {-0.0f, 0.0f}, p[3] = {0.25f, 0.5f, 0.25f}, w[2] = {0.5f, 0.25f};
    const int32_t expert[2] = {1, 2};
    float dz[3];
    ar_route_rule rule = of_softmax(2, false);
    assert_ok(ari_cpu_route_backward(&d, NULL, rows_of(dz, 1, 3), cbuf(g), cbuf(p), cbuf(expert), cbuf(w), &rule));
    assert_bits(dz, ((const float[]){-0.0f, -0.0f, 0.0f}), 3, "not normalised");
    rule.normalised = true;
    assert_ok(ari_cpu_route_backward(&d, NULL, rows_of(dz, 1, 3), cbuf(g), cbuf(p), cbuf(expert), cbuf(w), &rule));
    assert_bits(dz, ((const float[]){0.0f, -0.0f, 0.0f}), 3, "normalised");
}

/* --- routing by sigmoids ------------------------------------------------------------------------------------------ */

/* By the text: the sum of a group's two best, the groups that stay, the best of those, and weights without the bias. */
static void plain_scores(float *a, int32_t *expert, float *weight, const float *z, const float *bias, size_t n,
                         const ar_route_rule *rule)
{
    const size_t each = n / rule->groups;
    float *c = calloc(n, sizeof *c), *of = calloc(rule->groups, sizeof *of), sum = 0.0f;
    int32_t *group = calloc(rule->groups, sizeof *group), two[2];
    for (size_t i = 0; i < n; i++) {
        a[i] = ari_sigmoid32(z[i]);
        c[i] = stored(a[i] + bias[i]);
    }
    for (size_t g = 0; g < rule->groups && rule->groups > 1; g++) {
        plain_choose(two, c + g * each, each, 2);
        of[g] = stored(c[g * each + (size_t)two[0]] + c[g * each + (size_t)two[1]]);
    }
    plain_choose(group, of, rule->groups, rule->kept);
    for (size_t g = 0, kept = 0; g < rule->groups; g++) {
        const bool stays = kept < rule->kept && (size_t)group[kept] == g;
        kept += stays;
        for (size_t i = g * each; i < (g + 1) * each && !stays; i++)
            c[i] = -INFINITY;
    }
    plain_choose(expert, c, n, rule->k);
    for (size_t j = 0; j < rule->k; j++)
        sum = j == 0 ? a[expert[j]] : stored(sum + a[expert[j]]);
    for (size_t j = 0; j < rule->k; j++) {
        const float divided = stored(a[expert[j]] / stored(sum + 1e-20f));
        weight[j] = stored((rule->normalised ? divided : a[expert[j]]) * rule->scale);
    }
    free(c), free(of), free(group);
}

static void scores_one(const choice *c, uint64_t seed)
{
    ar_device d = test_device(c->threads);
    const size_t all = c->n * c->experts, slots = c->n * c->k;
    OWNED(free) float *z = new_values(all, ORDINARY, seed), *bias = new_values(c->experts, ORDINARY, seed + 1);
    OWNED(free) float *p = new_values(all, SPECIAL, 1), *expected_p = new_copy(p, all);
    OWNED(free) float *weight = new_values(slots, SPECIAL, 2), *expected_weight = new_copy(weight, slots);
    OWNED(free) int32_t *expert = calloc(slots + 1, sizeof *expert), *expected = calloc(slots + 1, sizeof *expected);
    ar_route_rule rule = {
        .k = c->k, .bias = cbuf(bias), .groups = 1, .kept = 1, .normalised = c->normalised, .scale = 2.5f};
    for (size_t groups = 2; groups < 8 && seed % 2 > 0; groups++)
        if (c->experts % groups == 0 && c->experts / groups > 1) {
            rule.groups = groups;
            rule.kept = (c->k + c->experts / groups - 1) / (c->experts / groups);
        }
    make_ties(bias, c->experts);
    if (seed % 4 > 1)
        make_ties(z, all);
    assert_ok(
        ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(NULL), rows_of(z, c->n, c->experts), &rule));
    for (size_t t = 0; t < c->n; t++)
        plain_scores(expected_p + t * c->experts, expected + t * c->k, expected_weight + t * c->k, z + t * c->experts,
                     bias, c->experts, &rule);
    assert_bits(expert, expected, slots, "experts");
    assert_bits(p, expected_p, all, "scores");
    assert_bits(weight, expected_weight, slots, "weights");
}

Test(experts, scores_with_a_bias_choose_by_groups_and_scores_without_it_weigh)
{
    every_choice(scores_one);
}

Test(experts, a_score_that_is_no_number_says_which)
{
    ar_device d = test_device(1);
    const float z[2][4] = {{1, 2, 3, 4}, {1, NAN, 2, NAN}}, bias[4] = {0, 0, 0, 0}, lost[4] = {0, 0, INFINITY, 0};
    float p[8], weight[4];
    int32_t expert[4];
    ar_route_rule rule = {.k = 2, .bias = cbuf(bias), .groups = 2, .kept = 1, .normalised = true, .scale = 1.0f};
    assert_ok(ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(NULL), rows_of(z, 2, 4), &rule));
    assert_bits(expert, ((const int32_t[]){2, 3, -2, -2}), 4, "experts");
    rule.bias = cbuf(lost);
    assert_ok(ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(NULL), rows_of(z, 1, 4), &rule));
    assert_bits(expert, ((const int32_t[]){-3, -3}), 2, "experts of a bias that is infinite");
}

/* The derivative of w*g by each logit: dz = w*(1 - a)*(g - r) where the weights are shares, w*(1 - a)*g where not. */
static void scores_gradient_one(const choice *c, uint64_t seed)
{
    ar_device d = test_device(c->threads);
    const size_t all = c->n * c->experts, slots = c->n * c->k;
    OWNED(free) int32_t *expert = new_experts(c, seed);
    OWNED(free) float *g = new_values(slots, SPECIAL, seed + 10), *p = new_values(all, ORDINARY, seed + 20);
    OWNED(free) float *weight = new_values(slots, ORDINARY, seed + 30);
    OWNED(free) float *dz = new_values(all, SPECIAL, 3), *expected = calloc(all + 1, sizeof *expected);
    const ar_route_rule rule = {
        .k = c->k, .bias = cbuf(p), .groups = 1, .kept = 1, .normalised = c->normalised, .scale = 2.5f};
    for (size_t i = 0; i < all; i++)
        p[i] = ari_sigmoid32(p[i]);
    for (size_t t = 0; t < c->n; t++) {
        const int32_t *own = expert + t * c->k;
        const float *a = p + t * c->experts;
        float sum = a[own[0]], r = 0.0f;
        for (size_t j = 1; j < c->k; j++)
            sum = stored(sum + a[own[j]]);
        for (size_t j = 0; j < c->k && c->normalised; j++)
            r = stored(r + stored(stored(a[own[j]] / stored(sum + 1e-20f)) * g[t * c->k + j]));
        for (size_t j = 0; j < c->k; j++)
            expected[t * c->experts + (size_t)own[j]] =
                stored(stored(weight[t * c->k + j] * stored(1.0f - a[own[j]])) * stored(g[t * c->k + j] - r));
    }
    assert_ok(ari_cpu_route_backward(&d, NULL, rows_of(dz, c->n, c->experts), cbuf(g), cbuf(p), cbuf(expert),
                                     cbuf(weight), &rule));
    assert_bits(dz, expected, all, "gradients of logits");
}

Test(experts, gradients_of_scores_go_through_the_sigmoids_and_their_sum)
{
    every_choice(scores_gradient_one);
}

/* --- routing by a softmax and groups ------------------------------------------------------------------------------ */

/* Of the softmax of all experts: the groups with the largest logits stay, and p times the scale weighs. */
static void groups_one(const choice *c, uint64_t seed)
{
    ar_device d = test_device(c->threads);
    const size_t all = c->n * c->experts, slots = c->n * c->k;
    OWNED(free) float *z = new_values(all, ORDINARY, seed), *p = new_values(all, SPECIAL, 1), *plain = new_copy(p, all);
    OWNED(free) float *weight = new_values(slots, SPECIAL, 2), *ignored = new_copy(weight, slots);
    OWNED(free) float *c_row = calloc(c->experts, 4);
    OWNED(free) int32_t *expert = calloc(slots + 1, sizeof *expert), *expected = calloc(slots + 1, sizeof *expected);
    int32_t group[8];
    ar_route_rule rule = {.k = c->k, .groups = 1, .kept = 1, .scale = 16.0f};
    const ar_route_rule all_together = of_softmax(c->k, false);
    for (size_t groups = 2; groups < 8 && seed % 2 > 0; groups++)
        if (c->experts % groups == 0) {
            rule.groups = groups;
            rule.kept = (c->k + c->experts / groups - 1) / (c->experts / groups);
        }
    if (seed % 4 > 1)
        make_ties(z, all);
    const size_t each = c->experts / rule.groups;
    assert_ok(
        ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(NULL), rows_of(z, c->n, c->experts), &rule));
    assert_ok(ari_cpu_route(&d, NULL, buf(plain), buf(expected), buf(ignored), (ar_buf){NULL},
                            rows_of(z, c->n, c->experts), &all_together));
    assert_bits(p, plain, all, "probabilities");
    for (size_t t = 0; t < c->n; t++) {
        float most[8];
        memcpy(c_row, z + t * c->experts, c->experts * sizeof *c_row);
        for (size_t g = 0; g < rule.groups; g++) {
            most[g] = c_row[g * each];
            for (size_t i = 1; i < each; i++)
                most[g] = c_row[g * each + i] > most[g] ? c_row[g * each + i] : most[g];
        }
        plain_choose(group, most, rule.groups, rule.kept);
        for (size_t g = 0, kept = 0; g < rule.groups; g++) {
            const bool stays = kept < rule.kept && (size_t)group[kept] == g;
            kept += stays;
            for (size_t i = g * each; i < (g + 1) * each && !stays; i++)
                c_row[i] = -INFINITY;
        }
        plain_choose(expected + t * c->k, c_row, c->experts, c->k);
        for (size_t j = 0; j < c->k; j++)
            ignored[t * c->k + j] = stored(plain[t * c->experts + (size_t)expected[t * c->k + j]] * 16.0f);
    }
    assert_bits(expert, expected, slots, "experts");
    assert_bits(weight, ignored, slots, "weights");
}

Test(experts, a_softmax_chooses_by_groups_and_its_scale_weighs)
{
    every_choice(groups_one);
}

/* --- losses of routers -------------------------------------------------------------------------------------------- */

/* Two rows a group, the last one padding: by the formulas, one element after the other. */
static void losses_one(size_t n, size_t experts, bool balances, bool has_z)
{
    ar_device d = test_device(2);
    const double z = 0.03;
    OWNED(free) float *p = new_values(n * experts, ORDINARY, 21), *c = new_values((n + 1) / 2 * experts, ORDINARY, 22);
    OWNED(free) float *lse = new_values(n, ORDINARY, 23), *terms = new_values(n, ORDINARY, 25);
    OWNED(free) float *dz = new_values(n * experts, ORDINARY, 24), *expected = new_copy(dz, n * experts);
    OWNED(free) uint8_t *valid = calloc(n + 1, 1);
    for (size_t t = 0; t + 1 < n; t++)
        valid[t] = 1;
    const ar_cbuf of_c = cbuf(balances ? c : NULL), of_lse = cbuf(has_z ? lse : NULL);
    assert_ok(ari_cpu_route_terms(&d, NULL, buf(terms), rows_of(p, n, experts), of_c, 2, of_lse, z, cbuf(valid)));
    assert_ok(ari_cpu_route_losses(&d, NULL, rows_of(dz, n, experts), cbuf(p), of_c, 2, of_lse, z, cbuf(valid)));
    for (size_t t = 0; t < n; t++) {
        float r = 0.0f, *out = expected + t * experts;
        for (size_t i = 0; i < experts && balances; i++)
            r = stored(r + stored(p[t * experts + i] * c[t / 2 * experts + i]));
        for (size_t i = 0; i < experts && valid[t] && balances; i++)
            out[i] = stored(out[i] + stored(p[t * experts + i] * stored(c[t / 2 * experts + i] - r)));
        for (size_t i = 0; i < experts && valid[t] && has_z; i++)
            out[i] = stored(out[i] + stored(p[t * experts + i] * (float)(z * (double)lse[t])));
        const float of_z = (float)(z * (double)lse[t] * (double)lse[t]);
        const float term = has_z ? stored(r + of_z) : r;
        assert_bits(&terms[t], valid[t] ? &term : &(float){0.0f}, 1, "a token's losses");
    }
    assert_bits(dz, expected, n * experts, "gradients of the losses");
}

Test(experts, losses_of_routers_are_their_formulas_and_leave_padding_out)
{
    static const size_t experts[] = {1, 3, 8, 257};
    for (size_t i = 0; i < sizeof experts / sizeof *experts; i++) {
        for (size_t n = 1; n < 6; n++) {
            losses_one(n, experts[i], true, false);
            losses_one(n, experts[i], false, true);
            losses_one(n, experts[i], true, true);
        }
    }
}

/* The one that training's z-loss has, of logits whose exponentials would overflow. */
Test(experts, the_logarithm_of_a_routers_denominator_is_that_of_the_sum)
{
    ar_device d = test_device(1);
    const float z[2][3] = {{200.0f, 199.0f, 100.0f}, {-5.0f, -5.0f, -5.0f}};
    float p[6], weight[2], lse[2];
    int32_t expert[2];
    const ar_route_rule rule = of_softmax(1, true);
    assert_ok(ari_cpu_route(&d, NULL, buf(p), buf(expert), buf(weight), buf(lse), rows_of(z, 2, 3), &rule));
    cr_expect(fabs((double)lse[0] - (200.0 + log1p(exp(-1.0)))) < 2e-5, "%.9g", (double)lse[0]);
    cr_expect(fabs((double)lse[1] - (log(3.0) - 5.0)) < 1e-6, "%.9g", (double)lse[1]);
}

/* --- rows of slots ------------------------------------------------------------------------------------------------ */

/* n tokens of k slots, whose rows lie in an order drawn by `seed`. */
typedef struct slots {
    size_t n, k;
    int64_t *place, *slot_of;
} slots;

static slots new_slots(size_t n, size_t k, uint64_t seed)
{
    slots s = {n, k, calloc(n * k + 1, sizeof(int64_t)), calloc(n * k + 1, sizeof(int64_t))};
    for (size_t i = 0; i < n * k; i++) {
        const size_t other = next_random(&seed) % (i + 1);
        s.slot_of[i] = s.slot_of[other];
        s.slot_of[other] = (int64_t)i;
    }
    for (size_t i = 0; i < n * k; i++)
        s.place[s.slot_of[i]] = (int64_t)i;
    return s;
}

static void check_rows(const slots *s, size_t cols, bool weighed, int threads)
{
    ar_device d = test_device(threads);
    const size_t n = s->n, count = n * s->k;
    OWNED(free) float *x = new_values(n * cols, SPECIAL, 4), *weight = new_values(count, SPECIAL, 5);
    OWNED(free) float *rows = new_values(count * cols, SPECIAL, 6), *expected = new_copy(rows, count * cols);
    OWNED(free) float *back = new_values(n * cols, SPECIAL, 7), *expected_back = new_copy(back, n * cols);
    x[0] = -0.0f;
    x[n * cols - 1] = ari_float32(0xffc12345u);
    for (size_t i = 0; i < count; i++)
        for (size_t c = 0; c < cols; c++) {
            const float *from = &x[i / s->k * cols + c];
            const float scaled = stored(weight[i] * *from);
            memcpy(&expected[(size_t)s->place[i] * cols + c], weighed ? &scaled : from, sizeof scaled);
        }
    for (size_t i = 0; i < count; i++)
        for (size_t c = 0; c < cols; c++) {
            const float value = expected[(size_t)s->place[i] * cols + c];
            const float term = weighed ? stored(weight[i] * value) : value;
            float *sum = &expected_back[i / s->k * cols + c];
            *sum = i % s->k == 0 ? term : stored(*sum + term);
        }
    const ar_cbuf weights = cbuf(weighed ? weight : NULL);
    assert_ok(ari_cpu_gather_rows(&d, NULL, rows_of(rows, count, cols), rows_of(x, n, cols), cbuf(s->slot_of), weights,
                                  s->k));
    assert_bits(rows, expected, count * cols, "dispatched");
    assert_ok(ari_cpu_combine_rows(&d, NULL, rows_of(back, n, cols), rows_of(rows, count, cols), weights,
                                   cbuf(s->place), s->k));
    assert_bits(back, expected_back, n * cols, "combined");
}

static void check_dots(const slots *s, size_t cols, enum values kind, int threads)
{
    ar_device d = test_device(threads);
    const size_t count = s->n * s->k;
    OWNED(free) float *dy = new_values(s->n * cols, kind, 8), *rows = new_values(count * cols, kind, 9);
    OWNED(free) float *g = new_values(count, SPECIAL, 10), *expected = calloc(count + 1, sizeof *expected);
    for (size_t c = 0; c < cols; c++)
        dy[c] = -0.0f; /* a row of zeros, whose sum is +0 */
    for (size_t i = 0; i < count; i++)
        expected[i] = plain_dot(dy + i / s->k * cols, rows + (size_t)s->place[i] * cols, cols);
    assert_ok(
        ari_cpu_dot_rows(&d, NULL, buf(g), rows_of(dy, s->n, cols), rows_of(rows, count, cols), cbuf(s->place), s->k));
    assert_bits(g, expected, count, "row sums");
}

/* Of several blocks too, the last of which is not full. */
static const size_t widths[] = {1, 3, 7, 16, 33, 257, 2 * 2048 + 9};
#define WIDTHS (sizeof widths / sizeof *widths)

Test(experts, rows_go_to_their_slots_and_come_back_in_slot_order)
{
    for (size_t i = 0; i < WIDTHS; i++)
        for (size_t k = 1; k <= 4; k++) {
            slots s = new_slots(widths[i] > 1000 ? 5 : 47, k, k);
            for (int variant = 0; variant < 4; variant++)
                check_rows(&s, widths[i], variant % 2, 1 + variant / 2);
            free(s.place), free(s.slot_of);
        }
}

Test(experts, gradients_of_weights_are_row_sums_of_exact_products)
{
    for (size_t i = 0; i < WIDTHS; i++)
        for (size_t k = 1; k <= 3; k++) {
            slots s = new_slots(widths[i] > 1000 ? 5 : 47, k, 7 * k);
            for (int kind = ORDINARY; kind < VALUE_KINDS; kind++)
                check_dots(&s, widths[i], (enum values)kind, 1 + kind % 2);
            free(s.place), free(s.slot_of);
        }
}

/* The first term is the sum, and not what is added to +0. */
Test(experts, a_sum_of_minus_zeros_is_minus_zero)
{
    ar_device d = test_device(1);
    const float rows[4] = {-0.0f, -0.0f, 0.0f, -0.0f}, weight[4] = {0.5f, 0.5f, 1.0f, 1.0f};
    const int64_t place[4] = {0, 1, 2, 3};
    for (int weighed = 0; weighed < 2; weighed++) {
        float y[2];
        assert_ok(ari_cpu_combine_rows(&d, NULL, rows_of(y, 2, 1), rows_of(rows, 4, 1), cbuf(weighed ? weight : NULL),
                                       cbuf(place), 2));
        assert_bits(y, ((const float[]){-0.0f, 0.0f}), 2, "zeros");
    }
}

/* --- an expert of all tokens -------------------------------------------------------------------------------------- */

enum where { APART, IN_DY, IN_X, WHERE };

static void check_gated(size_t n, size_t cols, enum values kind, enum where where, int threads)
{
    ar_device d = test_device(threads);
    OWNED(free) float *x = new_values(n * cols, kind, 11), *dy = new_values(n * cols, kind, 12);
    OWNED(free) float *y = new_copy(dy, n * cols);
    OWNED(free) float *logit = new_values(n, SPECIAL, 13), *dlogit = new_values(n, SPECIAL, 14);
    OWNED(free) float *apart = new_copy(x, n * cols);
    OWNED(free) float *expected = new_copy(x, n * cols), *expected_y = new_copy(x, n * cols);
    OWNED(free) float *expected_logit = new_copy(x, n);
    for (size_t t = 0; t < n; t++) {
        const float s = ari_sigmoid32(logit[t]);
        const double dot = (double)plain_dot(dy + t * cols, x + t * cols, cols);
        expected_logit[t] = stored((float)(dot * ((double)s * (1.0 - (double)s))));
        for (size_t i = t * cols; i < (t + 1) * cols; i++) {
            expected_y[i] = stored(y[i] + stored(s * x[i]));
            expected[i] = stored(s * dy[i]);
        }
    }
    assert_ok(ari_cpu_add_gated(&d, NULL, rows_of(y, n, cols), rows_of(x, n, cols), rows_of(logit, n, 1)));
    assert_bits(y, expected_y, n * cols, "sums");
    float *dx = where == APART ? apart : where == IN_DY ? dy : x;
    assert_ok(ari_cpu_add_gated_backward(&d, NULL, rows_of(dx, n, cols), rows_of(dlogit, n, 1), rows_of(dy, n, cols),
                                         rows_of(x, n, cols), rows_of(logit, n, 1)));
    assert_bits(dx, expected, n * cols, "gradients");
    assert_bits(dlogit, expected_logit, n, "gradients of logits");
}

Test(experts, what_all_tokens_share_is_added_by_a_sigmoid)
{
    for (size_t i = 0; i < WIDTHS; i++)
        for (int kind = ORDINARY; kind < VALUE_KINDS; kind++)
            for (int where = APART; where < WHERE; where++)
                check_gated(widths[i] > 1000 ? 5 : ROWS, widths[i], (enum values)kind, (enum where)where,
                            1 + (kind + where) % 2);
}
