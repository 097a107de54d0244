/* SPDX-License-Identifier: Apache-2.0 */
/* Effects of the injected faults of routers and experts. What is routed is changed on the host: it is small. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/float_bits.h"
#include "ref/layers/faults_routed.h"
#include "ref/numerics/philox.h"

/* --- what is chosen ----------------------------------------------------------------------------------------------- */

/* Jitter of up to 1 % either way: no two routers that have it agree. */
#define JITTER 1e-2
enum { JITTER_SEED = 20210111 };

static ar_status jitter(ar_ctx *ctx, const ar_tensor *z)
{
    const size_t n = ar_tensor_count(z);
    ARI_OWNED float *host = NULL;
    AR_TRY(ARI_ALLOC(&host, n, "logits"));
    ar_status st = ar_ctx_download_floats(ctx, host, z);
    for (size_t i = 0; i < n; i++)
        host[i] *= 1.0f + ari_random_uniform(JITTER_SEED, i, JITTER);
    if (st == AR_OK)
        st = ar_ctx_upload_floats(ctx, z, host);
    return st;
}

ar_status ari_fault_router_logits(ar_ctx *ctx, const ar_tensor *z)
{
    if (ctx->recomputing && ar_faulty(ctx, AR_FAULT_recompute_routes_differ))
        return jitter(ctx, z);
    if (z->dtype == AR_F32 && ar_faulty(ctx, AR_FAULT_router_logits_bf16))
        return ARI_KERNEL(ctx, round_bits, z, z, 8);
    return AR_OK;
}

bool ari_fault_normalised(const ar_ctx *ctx, bool normalised, bool backward)
{
    if (ar_faulty(ctx, AR_FAULT_router_weights_not_normalised))
        return false;
    if (ar_faulty(ctx, AR_FAULT_router_weights_normalised))
        return true;
    return normalised || (backward && ar_faulty(ctx, AR_FAULT_router_grad_chosen_alone));
}

void ari_routed_host_fini(ari_routed_host *r)
{
    free(r->z);
    free(r->p);
    free(r->weight);
    free(r->g);
    free(r->expert);
}

ar_status ari_to_host(ar_ctx *ctx, void **gives, const ar_tensor *t)
{
    AR_TRY(ari_alloc(gives, ar_tensor_count(t), sizeof(float), "what is routed"));
    return t->dtype == AR_I32 ? ar_ctx_download(ctx, *gives, t) : ar_ctx_download_floats(ctx, *gives, t);
}

ar_status ari_routed_host_init(ari_routed_host *r, ar_ctx *ctx, const ari_chosen *of, const ar_tensor *z,
                               const ar_tensor *g)
{
    *r = (ari_routed_host){.tokens = of->p->shape[0], .experts = of->p->shape[1], .k = of->expert->shape[1]};
    AR_TRY(ari_to_host(ctx, (void **)&r->p, of->p));
    AR_TRY(ari_to_host(ctx, (void **)&r->weight, of->weight));
    AR_TRY(ari_to_host(ctx, (void **)&r->expert, of->expert));
    if (z)
        AR_TRY(ari_to_host(ctx, (void **)&r->z, z));
    return g ? ari_to_host(ctx, (void **)&r->g, g) : AR_OK;
}

/* The probability of the j-th expert of token t. */
static float chosen_p(const ari_routed_host *r, size_t t, size_t j)
{
    return r->p[t * r->experts + (size_t)r->expert[t * r->k + j]];
}

/* As where the softmax comes after the choice too, where only the gate of another model has it. */
static void soften(ari_routed_host *r)
{
    for (size_t t = 0; t < r->tokens; t++) {
        double sum = 0.0;
        for (size_t j = 0; j < r->k; j++)
            sum += exp((double)chosen_p(r, t, j));
        for (size_t j = 0; j < r->k; j++)
            r->weight[t * r->k + j] = (float)(exp((double)chosen_p(r, t, j)) / sum);
    }
}

/* True if expert a is chosen before b, of two that bf16 keeps apart the larger logit, else the higher number. */
static bool goes_before(const float *z, size_t a, size_t b)
{
    const float x = ari_f32_of_bf16(ari_bf16_of_f32(z[a])), y = ari_f32_of_bf16(ari_bf16_of_f32(z[b]));
    return x > y || (x == y && a > b);
}

static void choose_in_bf16(ari_routed_host *r, bool normalised)
{
    for (size_t t = 0; t < r->tokens; t++) {
        const float *z = r->z + t * r->experts;
        size_t count = 0;
        float sum = 0.0f;
        for (size_t i = 0; i < r->experts; i++) {
            size_t before = 0;
            for (size_t other = 0; other < r->experts; other++)
                before += other != i && goes_before(z, other, i);
            if (before < r->k)
                r->expert[t * r->k + count++] = (int32_t)i;
        }
        for (size_t j = 0; j < r->k; j++)
            sum += chosen_p(r, t, j);
        for (size_t j = 0; j < r->k; j++)
            r->weight[t * r->k + j] = normalised ? chosen_p(r, t, j) / sum : chosen_p(r, t, j);
    }
}

ar_status ari_fault_routed(ar_ctx *ctx, const ari_chosen *of, const ar_tensor *z, bool normalised)
{
    const bool twice = ar_faulty(ctx, AR_FAULT_router_softmax_twice);
    ARI_ENDED(ari_routed_host_fini) ari_routed_host r = {.k = 0};
    if (!twice && !ar_faulty(ctx, AR_FAULT_router_ties_higher_index))
        return AR_OK;
    AR_TRY(ari_routed_host_init(&r, ctx, of, z, NULL));
    if (twice)
        soften(&r);
    else
        choose_in_bf16(&r, normalised);
    AR_TRY(ar_ctx_upload(ctx, of->expert, r.expert));
    return ar_ctx_upload(ctx, of->weight, r.weight);
}

/* --- the router's gradient ---------------------------------------------------------------------------------------- */

/* Zeros for the slots whose expert another rank has. */
static ar_status clear_remote(ar_ctx *ctx, const ar_tensor *of_slots, const ar_tensor *expert,
                              const ari_own_experts *of)
{
    ARI_OWNED float *host = NULL;
    ARI_OWNED int32_t *chosen = NULL;
    AR_TRY(ari_to_host(ctx, (void **)&host, of_slots));
    AR_TRY(ari_to_host(ctx, (void **)&chosen, expert));
    for (size_t i = 0; i < ar_tensor_count(of_slots); i++)
        host[i] = (size_t)chosen[i] - of->from < of->own ? host[i] : 0.0f;
    return ar_ctx_upload(ctx, of_slots, host);
}

ar_status ari_fault_weights_gradient(ar_ctx *ctx, const ar_tensor *g, const ar_tensor *expert,
                                     const ari_own_experts *of)
{
    if (ar_faulty(ctx, AR_FAULT_ep_weights_detached))
        return clear_remote(ctx, g, expert, of);
    return ar_faulty(ctx, AR_FAULT_router_weights_detached) ? ARI_KERNEL(ctx, fill, g, 0.0f) : AR_OK;
}

/* The gradient of each chosen probability, and that probability in the place of its weight: through the softmax alone
 * their gradient is that of weights that are not normalised. router_sum_detached: w = p/s, and s has no gradient. */
static void through_softmax(ari_routed_host *r, bool twice)
{
    for (size_t t = 0; t < r->tokens; t++) {
        float *w = r->weight + t * r->k, *g = r->g + t * r->k, sum = 0.0f;
        for (size_t j = 0; j < r->k; j++)
            sum += w[j] * g[j];
        for (size_t j = 0; j < r->k; j++) {
            g[j] = twice ? w[j] * (g[j] - sum) : g[j] * (w[j] / chosen_p(r, t, j));
            w[j] = chosen_p(r, t, j);
        }
    }
}

ar_status ari_routed_host_backward(const ari_routed_host *r, ar_ctx *ctx, const ar_tensor *dz, const ari_chosen *of,
                                   const ar_route_rule *rule)
{
    ar_route_rule plain = *rule;
    ar_tensor weight, slopes;
    plain.normalised = false;
    AR_TRY(ari_numbers(ctx, &weight, AR_F32, r->tokens * r->k, r->weight));
    AR_TRY(ari_numbers(ctx, &slopes, AR_F32, r->tokens * r->k, r->g));
    const ar_status st = ARI_KERNEL(ctx, route_backward, dz, ar_const(slopes.data), ar_const(of->p->data),
                                    ar_const(of->expert->data), ar_const(weight.data), &plain);
    ARI_RELEASE(ctx, &slopes, &weight);
    return st;
}

ar_status ari_fault_router_gradient(ar_ctx *ctx, const ar_tensor *dz, const ari_chosen *of, const ar_tensor *g,
                                    const ar_route_rule *rule)
{
    const bool twice = ar_faulty(ctx, AR_FAULT_router_softmax_twice);
    ARI_ENDED(ari_routed_host_fini) ari_routed_host r = {.k = 0};
    if (!twice && !ar_faulty(ctx, AR_FAULT_router_sum_detached))
        return AR_OK;
    AR_TRY(ari_routed_host_init(&r, ctx, of, NULL, g));
    through_softmax(&r, twice);
    return ari_routed_host_backward(&r, ctx, dz, of, rule);
}

/* --- rows of the experts ------------------------------------------------------------------------------------------ */

const ar_tensor *ari_fault_input_weight(const ar_ctx *ctx, const ar_tensor *weight)
{
    return ar_faulty(ctx, AR_FAULT_expert_input_weighted) ? weight : NULL;
}

const ar_tensor *ari_fault_output_weight(const ar_ctx *ctx, const ar_tensor *weight)
{
    return ar_faulty(ctx, AR_FAULT_expert_input_weighted) ? NULL : weight;
}

ar_status ari_fault_halves(ar_ctx *ctx, const ar_tensor *pre, bool back)
{
    ar_tensor was;
    if (!ar_faulty(ctx, AR_FAULT_experts_gate_up_in_halves))
        return AR_OK;
    AR_TRY(ari_copy_of(ctx, &was, pre));
    AR_TRY(ari_part_pairs(ctx, pre, &was, back));
    ar_ctx_release(ctx, &was);
    return AR_OK;
}

/* expert_rows_off_by_one: the last slot of all takes the first row. */
static ar_status next_rows(ar_ctx *ctx, const ar_tensor *place)
{
    const size_t n = ar_tensor_count(place);
    ARI_OWNED int64_t *host = NULL;
    AR_TRY(ARI_ALLOC(&host, n, "rows of experts"));
    ar_status st = ar_ctx_download(ctx, host, place);
    for (size_t i = 0; i < n; i++)
        host[i] = (host[i] + 1) % (int64_t)n;
    if (st == AR_OK)
        st = ar_ctx_upload(ctx, place, host);
    return st;
}

ar_status ari_fault_places(ar_ctx *ctx, const ar_tensor *place)
{
    return ar_faulty(ctx, AR_FAULT_expert_rows_off_by_one) ? next_rows(ctx, place) : AR_OK;
}

/* The weight of a slot whose row is dropped is 0. expert_capacity_drops: an expert takes no more rows than an even
 * share of all, rounded up, the first ones. */
static void drop_slots(float *weight, const int32_t *expert, size_t slots, size_t *rows, size_t experts, bool last)
{
    const size_t most = (slots + experts - 1) / experts;
    for (size_t i = 0; i < slots; i++) {
        const size_t e = (size_t)expert[i];
        if (last ? e + 1 == experts : rows[e]++ >= most)
            weight[i] = 0.0f;
    }
}

ar_status ari_fault_dropped(ar_ctx *ctx, const ar_tensor *weight, const ar_tensor *expert, const ari_own_experts *of)
{
    const bool last = ar_faulty(ctx, AR_FAULT_last_expert_left_out);
    ARI_OWNED float *host = NULL;
    ARI_OWNED int32_t *chosen = NULL;
    ARI_OWNED size_t *rows = NULL;
    if (ar_faulty(ctx, AR_FAULT_ep_outputs_not_returned))
        return clear_remote(ctx, weight, expert, of);
    if (!last && !ar_faulty(ctx, AR_FAULT_expert_capacity_drops))
        return AR_OK;
    AR_TRY(ari_to_host(ctx, (void **)&host, weight));
    AR_TRY(ari_to_host(ctx, (void **)&chosen, expert));
    AR_TRY(ARI_ALLOC_ZERO(&rows, of->all, "rows of experts"));
    drop_slots(host, chosen, ar_tensor_count(weight), rows, of->all, last);
    return ar_ctx_upload(ctx, weight, host);
}

/* --- expert parallelism ------------------------------------------------------------------------------------------- */

const char *ari_fault_expert_name(char *out, size_t cap, const ar_ctx *ctx, const char *name)
{
    const char *at = strstr(name, ".experts.");
    char *end = NULL;
    if (!at || !ar_faulty(ctx, AR_FAULT_ep_experts_drawn_alike))
        return name;
    at += strlen(".experts.");
    const size_t number = strtoul(at, &end, 10) % ctx->own_experts;
    snprintf(out, cap, "%.*s%zu%s", (int)(at - name), name, number, end);
    return out;
}

void ari_fault_splits(const ar_ctx *ctx, size_t *sends, size_t ranks)
{
    if (!ar_faulty(ctx, AR_FAULT_ep_splits_swapped) || ar_comm_rank(ctx->world) != 1)
        return;
    const size_t first = sends[0];
    sends[0] = sends[ranks - 1];
    sends[ranks - 1] = first;
}

/* As where a grouped product goes over the rows alone, into memory that held the gradient of the first expert that has
 * any. */
ar_status ari_fault_empty_gradients(ar_ctx *ctx, ar_param *const *weight, size_t each, const ar_groups *groups)
{
    size_t from = 0;
    if (!ar_faulty(ctx, AR_FAULT_empty_expert_grad_unwritten))
        return AR_OK;
    while (from < groups->n && groups->first[from + 1] == groups->first[from])
        from++;
    for (size_t i = 0; from < groups->n && i < groups->n * each; i++) {
        if (groups->first[i / each + 1] == groups->first[i / each])
            AR_TRY(ari_fault_add_gradient_of(ctx, weight[i], weight[from * each + i % each]));
    }
    return AR_OK;
}

/* --- sums over the ranks' parts of the experts -------------------------------------------------------------------- */

ar_comm *ari_fault_fold_over(const ar_ctx *ctx, bool backward, ar_comm *over)
{
    const bool forward =
        ar_faulty(ctx, AR_FAULT_experts_not_reduced) || ar_faulty(ctx, AR_FAULT_experts_combined_first);
    return (backward ? ar_faulty(ctx, AR_FAULT_experts_dx_not_reduced) : forward) ? NULL : over;
}

ar_status ari_fault_combined(ar_ctx *ctx, const ar_tensor *y, ar_comm *over, const char *tag)
{
    if (!over || !ar_faulty(ctx, AR_FAULT_experts_combined_first))
        return AR_OK;
    return ar_comm_all_reduce(over, ctx->queue, y->data, ar_const(y->data), ar_tensor_count(y), y->dtype, AR_SUM, tag);
}

/* --- the shared expert -------------------------------------------------------------------------------------------- */

bool ari_fault_of_shared(const ar_ctx *ctx)
{
    return ar_faulty(ctx, AR_FAULT_shared_expert_left_out) || ar_faulty(ctx, AR_FAULT_shared_gate_left_out);
}

ar_status ari_fault_add_shared(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *made)
{
    return ar_faulty(ctx, AR_FAULT_shared_gate_left_out) ? ARI_KERNEL(ctx, add, y, y, made) : AR_OK;
}

ar_status ari_fault_shared_gradient(ar_ctx *ctx, const ar_tensor *dmade, const ar_tensor *dlogit, const ar_tensor *dy)
{
    if (ari_fault_of_shared(ctx) || ar_faulty(ctx, AR_FAULT_shared_gate_detached))
        AR_TRY(ARI_KERNEL(ctx, fill, dlogit, 0.0f));
    if (ar_faulty(ctx, AR_FAULT_shared_expert_left_out))
        return ARI_KERNEL(ctx, fill, dmade, 0.0f);
    if (ar_faulty(ctx, AR_FAULT_shared_gate_left_out))
        return ARI_KERNEL(ctx, copy_strided, dmade, dy);
    return AR_OK;
}

ar_status ari_fault_ungated_gradient(ar_ctx *ctx, ar_tensor *dmade, const ar_tensor *dy)
{
    *dmade = (ar_tensor){0};
    if (!ar_faulty(ctx, AR_FAULT_shared_expert_left_out))
        return AR_OK;
    AR_TRY(ari_like(ctx, dmade, dy, dy->shape[dy->ndim - 1]));
    return ARI_KERNEL(ctx, fill, dmade, 0.0f);
}
