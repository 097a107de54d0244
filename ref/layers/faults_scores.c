/* SPDX-License-Identifier: Apache-2.0 */
/* Effects of the injected faults of routers of sigmoids: which experts a token has, their weights, and the counts by which
 * the bias of the choice moves. */

#include "ref/core/float_bits.h"
#include "ref/layers/faults_routed.h"

void ari_fault_score_rule(const ar_ctx *ctx, ar_route_rule *rule, bool backward)
{
    if (ar_faulty(ctx, AR_FAULT_router_scale_left_out))
        rule->scale = 1.0f;
    if (ar_faulty(ctx, AR_FAULT_router_scale_twice))
        rule->scale *= rule->scale;
    if (ar_faulty(ctx, AR_FAULT_router_weights_not_normalised) ||
        (backward && ar_faulty(ctx, AR_FAULT_router_sum_detached)))
        rule->normalised = false;
}

/* --- which experts ------------------------------------------------------------------------------------------------ */

static bool goes_before(float a, size_t i, float b, size_t j)
{
    return a > b || (a == b && i < j);
}

static float best_of(const float *c, size_t n)
{
    float best = c[0];
    for (size_t i = 1; i < n; i++)
        best = c[i] > best ? c[i] : best;
    return best;
}

/* The group of expert i, of `each` experts, is one of the `kept` that have the best one. */
static bool group_stays(const float *c, size_t i, size_t each, const ar_route_rule *rule)
{
    const size_t own = i / each;
    size_t before = 0;
    for (size_t g = 0; g < rule->groups; g++)
        before += g != own && goes_before(best_of(c + g * each, each), g, best_of(c + own * each, each), own);
    return before < rule->kept;
}

/* The k experts with the largest c, ascending, of those groups that stay, or (rule NULL) of all n. */
static void choose_again(int32_t *expert, const float *c, size_t n, size_t k, const ar_route_rule *rule)
{
    const size_t each = rule ? n / rule->groups : n;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        size_t before = 0;
        if (rule && !group_stays(c, i, each, rule))
            continue;
        for (size_t j = 0; j < n; j++)
            before += j != i && goes_before(c[j], j, c[i], i) && (!rule || group_stays(c, j, each, rule));
        if (before < k)
            expert[count++] = (int32_t)i;
    }
}

/* With c = a + bias, or (bias NULL) a alone. work: [experts]. */
static void choose_all(ari_routed_host *r, const float *bias, const ar_route_rule *rule, float *work)
{
    for (size_t t = 0; t < r->tokens; t++) {
        for (size_t i = 0; i < r->experts; i++)
            work[i] = r->p[t * r->experts + i] + (bias ? bias[i] : 0.0f);
        choose_again(r->expert + t * r->k, work, r->experts, r->k, rule);
    }
}

static float weight_of(float score, float sum, const ar_route_rule *rule)
{
    return (rule->normalised ? score / (sum + 1e-20f) : score) * rule->scale;
}

/* The weights of the chosen, of a, or (bias) of a + bias. */
static void weigh_again(ari_routed_host *r, const float *bias, const ar_route_rule *rule)
{
    for (size_t i = 0; i < r->tokens * r->k; i += r->k) {
        float *w = r->weight + i, sum = 0.0f;
        for (size_t j = 0; j < r->k; j++) {
            const size_t e = (size_t)r->expert[i + j];
            w[j] = r->p[i / r->k * r->experts + e] + (bias ? bias[e] : 0.0f);
            sum += w[j];
        }
        for (size_t j = 0; j < r->k; j++)
            w[j] = weight_of(w[j], sum, rule);
    }
}

ar_status ari_fault_scored(ar_ctx *ctx, const ari_chosen *of, const ar_tensor *bias, const ar_route_rule *rule)
{
    const bool by_best = ar_faulty(ctx, AR_FAULT_router_groups_by_max),
               of_all = ar_faulty(ctx, AR_FAULT_router_groups_not_masked),
               biased = ar_faulty(ctx, AR_FAULT_router_bias_in_weights);
    ARI_ENDED(ari_routed_host_fini) ari_routed_host r = {.k = 0};
    ARI_OWNED float *b = NULL, *work = NULL;
    if (!by_best && !of_all && !biased)
        return AR_OK;
    AR_TRY(ari_routed_host_init(&r, ctx, of, NULL, NULL));
    AR_TRY(ari_to_host(ctx, (void **)&b, bias));
    AR_TRY(ARI_ALLOC(&work, r.experts, "scores"));
    if (by_best || of_all)
        choose_all(&r, b, of_all ? NULL : rule, work);
    weigh_again(&r, biased ? b : NULL, rule);
    AR_TRY(ar_ctx_upload(ctx, of->expert, r.expert));
    return ar_ctx_upload(ctx, of->weight, r.weight);
}

/* --- the gradient ------------------------------------------------------------------------------------------------- */

/* With c = a + bias and C their sum w = s*c/C, so da_j = (s/C)*(g_j - sum of c*g/C): s*a/C in the place of the weight, and
 * the difference in that of g, of a rule that does not divide. */
static void through_biased(ari_routed_host *r, const float *bias, const ar_route_rule *rule)
{
    for (size_t i = 0; i < r->tokens * r->k; i += r->k) {
        const float *p = r->p + i / r->k * r->experts;
        float *w = r->weight + i, *g = r->g + i, sum = 0.0f, mean = 0.0f;
        for (size_t j = 0; j < r->k; j++)
            sum += p[r->expert[i + j]] + bias[r->expert[i + j]];
        for (size_t j = 0; j < r->k && rule->normalised; j++)
            mean += w[j] / rule->scale * g[j];
        for (size_t j = 0; j < r->k; j++) {
            w[j] = weight_of(p[r->expert[i + j]], sum, rule);
            g[j] -= mean;
        }
    }
}

ar_status ari_fault_scores_gradient(ar_ctx *ctx, const ar_tensor *dz, const ari_chosen *of, const ar_tensor *g,
                                    const ar_tensor *bias, const ar_route_rule *rule)
{
    ARI_ENDED(ari_routed_host_fini) ari_routed_host r = {.k = 0};
    ARI_OWNED float *b = NULL;
    if (ar_faulty(ctx, AR_FAULT_router_scale_not_in_gradient))
        return ARI_KERNEL(ctx, scale, dz, dz, 1.0f / rule->scale);
    if (!ar_faulty(ctx, AR_FAULT_router_bias_in_weights))
        return AR_OK;
    AR_TRY(ari_routed_host_init(&r, ctx, of, NULL, g));
    AR_TRY(ari_to_host(ctx, (void **)&b, bias));
    through_biased(&r, b, rule);
    return ari_routed_host_backward(&r, ctx, dz, of, rule);
}

/* --- counts ------------------------------------------------------------------------------------------------------- */

ar_status ari_fault_counted(ar_ctx *ctx, ar_tensor *expert, const ari_chosen *of)
{
    ARI_ENDED(ari_routed_host_fini) ari_routed_host r = {.k = 0};
    ARI_OWNED float *work = NULL;
    *expert = *of->expert;
    if (!ar_faulty(ctx, AR_FAULT_router_bias_counts_plain))
        return AR_OK;
    AR_TRY(ari_routed_host_init(&r, ctx, of, NULL, NULL));
    AR_TRY(ARI_ALLOC(&work, r.experts, "scores"));
    choose_all(&r, NULL, NULL, work);
    AR_TRY(ar_ctx_tensor(ctx, expert, AR_I32, of->expert->ndim, of->expert->shape));
    return ar_ctx_upload(ctx, expert, r.expert);
}

static int64_t in_bf16(int64_t n)
{
    return (int64_t)ari_f32_of_bf16(ari_bf16_of_f32((float)n));
}

int64_t ari_fault_sum_of_counts(const ar_ctx *ctx, int64_t *counts, size_t n, int64_t right)
{
    int64_t sum = 0;
    if (!ar_faulty(ctx, AR_FAULT_router_bias_counts_bf16))
        return right;
    for (size_t i = 0; i < n; i++) {
        counts[i] = in_bf16(counts[i]);
        sum = in_bf16(sum + counts[i]);
    }
    return sum;
}
