/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/check_routes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/axis.h"
#include "ref/core/size.h"
#include "ref/models/family.h"

/* The rank that routes each token of a batch, of those that share out the experts or have copies: [batch, seq]. Gives;
 * free(). */
static ar_status ranks_of_tokens(int **gives, const ar_run *run)
{
    const ar_parallel *p = &run->parallel;
    const int cp = ari_at_least_one(p->cp), dp = ari_at_least_one(p->dp), micro = ari_at_least_one(p->micro_batches);
    const int tp = ari_experts_whole(p) ? p->tp : 1; /* of these each has a part of the positions */
    AR_TRY(ari_alloc_zero((void **)gives, run->batch * run->seq, sizeof **gives, "ranks of tokens"));
    for (int at = 0; at < dp * cp * micro; at++) {
        const int d = at / micro / cp, c = at / micro % cp;
        const ar_positions own = ar_parallel_positions(p, run->seq, c);
        const size_t n = ar_positions_count(&own);
        size_t start = 0, count = 0;
        ar_parallel_rows(p, run->batch, d, at % micro, &start, &count);
        for (size_t row = start; row < start + count; row++) {
            for (size_t i = 0; i < n; i++)
                (*gives)[row * run->seq + ar_positions_at(&own, i)] = (d * cp + c) * tp + (int)(i / (n / (size_t)tp));
        }
    }
    return AR_OK;
}

/* Of a token, the experts that are on other ranks. */
static uint64_t rows_sent(const float *expert, const ar_experts *x, int ep, int rank)
{
    uint64_t rows = 0;
    for (size_t j = 0; j < x->per_token; j++)
        rows += (size_t)expert[j] / (x->n / (size_t)ep) != (size_t)(rank % ep);
    return rows;
}

/* The experts of a router's tokens: the layer, or SIZE_MAX of another tensor. */
static size_t routed_layer(const ari_ref_tensor *t, const ar_config *c)
{
    char name[sizeof t->name], number[24];
    for (size_t i = 0; i < ar_config_blocks(c) && t->pass == 'f' && t->ndim == 3; i++) {
        snprintf(number, sizeof number, "%zu", i);
        ari_role_path(name, sizeof name, c->arch, number, ARI_CHOSEN);
        if (ar_config_has_experts(c, i) && strcmp(name, t->name) == 0)
            return i;
    }
    return SIZE_MAX;
}

ar_status ari_check_routed(uint64_t *rows, const ari_reference *ref, const ari_step_case *c)
{
    const ar_parallel *p = &c->run.parallel;
    const int ep = ari_at_least_one(p->ep), alike = ari_experts_whole(p) ? 1 : ari_at_least_one(p->tp);
    const size_t k = c->config->experts.per_token;
    int *rank = NULL;
    *rows = 0;
    if (ep == 1)
        return AR_OK;
    AR_TRY(ranks_of_tokens(&rank, &c->run));
    for (size_t i = 0; i < ref->count; i++) {
        const ari_ref_tensor *t = &ref->tensor[i];
        const size_t layer = routed_layer(t, c->config);
        uint64_t sent = 0;
        const size_t tokens = t->count / k; /* rows of padding are copies */
        for (size_t token = 0; layer != SIZE_MAX && token < c->run.batch * c->run.seq; token++)
            sent += rows_sent(t->values + token % tokens * k, &c->config->experts, ep, rank[token]);
        *rows += layer == SIZE_MAX ? 0 : sent * (uint64_t)alike * ari_routed_exchanges(c, layer);
    }
    free(rank);
    return AR_OK;
}

/* --- a dry run's routes ------------------------------------------------------------------------------------------- */

/* The micro-batch whose samples the context is at: their first. */
static ar_status micro_of(int *micro, const ari_step_case *c, int d, const ar_ctx *ctx)
{
    const ar_parallel *p = &c->run.parallel;
    size_t start = 0, count = 0;
    for (*micro = 0; *micro < ari_at_least_one(p->micro_batches); ++*micro) {
        ar_parallel_rows(p, c->run.batch, d, *micro, &start, &count);
        if (count > 0 && start == ctx->first_sample)
            return AR_OK;
    }
    return ar_error_set(AR_ERR_INTERNAL, "no micro-batch of dp rank %d begins with sample %zu", d, ctx->first_sample);
}

ar_status ari_check_read_routes(void *user, const ar_ctx *ctx, int32_t *expert, const size_t shape[3],
                                const char *router)
{
    const ari_routed_rank *r = user;
    const ar_parallel *p = &r->c->run.parallel;
    const int cp = ari_at_least_one(p->cp), tp = ari_experts_whole(p) ? p->tp : 1, ranks = (int)shape[0];
    char name[160]; /* beside the router */
    snprintf(name, sizeof name, "%.*s.routes", (int)(strrchr(router, '.') - router), router);
    const size_t tensor = ari_reference_find_in(r->ref, name, 'f', (int)ctx->step), k = shape[2];
    const ari_ranks of = ari_ranks_of(p);
    const int own = ari_place_along(&of, r->rank, ari_expert_axes(p));
    int micro = 0;
    if (tensor == r->ref->count)
        return ar_error_set(AR_ERR_INTERNAL, "the baseline has no experts of %s in step %u", router, ctx->step);
    const ari_ref_tensor *known = &r->ref->tensor[tensor];
    AR_TRY(micro_of(&micro, r->c, own / tp / cp, ctx));
    for (int i = 0; i < ranks; i++) {
        const int at = own / ranks * ranks + i;
        const ar_positions positions = ar_parallel_positions(p, r->c->run.seq, at / tp % cp);
        const size_t each = ar_positions_count(&positions) / (size_t)tp, first = (size_t)(at % tp) * each;
        size_t start = 0, count = 0;
        ar_parallel_rows(p, r->c->run.batch, at / tp / cp, micro, &start, &count);
        if (count * each != shape[1])
            return ar_error_set(AR_ERR_INTERNAL, "%s: rank %d has %zu samples of %zu positions, not %zu tokens", router,
                                at, count, each, shape[1]);
        for (size_t t = 0; t < shape[1]; t++) {
            const size_t token = (start + t / each) * r->c->run.seq + ar_positions_at(&positions, first + t % each);
            for (size_t j = 0; j < k; j++)
                expert[((size_t)i * shape[1] + t) * k + j] = (int32_t)known->values[token % (known->count / k) * k + j];
        }
    }
    return AR_OK;
}
