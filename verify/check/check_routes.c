/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/check_run.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/axis.h"
#include "ref/models/family.h"

/* The ranks that route the tokens of a batch, of those that share out the experts or have copies. */
typedef struct token_ranks {
    int ep, sharers; /* of these ranks; that have copies of an expert and tokens of one sample */
    bool sliced;     /* these ranks each have a slice of the experts' gradients */
    int *rank;       /* of each token [batch, seq] */
    size_t *sample;  /* [batch]: of those whose rows come together, its number */
    size_t *rows;    /* [experts, sharers]: room for a sample's */
} token_ranks;

static void token_ranks_end(token_ranks *t)
{
    free(t->rank);
    free(t->sample);
    free(t->rows);
}

static ar_status ranks_of_tokens(token_ranks *t, const ar_run *run, size_t experts)
{
    const ar_parallel *p = &run->parallel;
    const int cp = ari_at_least_one(p->cp), dp = ari_at_least_one(p->dp), micro = ari_at_least_one(p->micro_batches);
    const int tp = ari_experts_whole(p) ? p->tp : 1; /* of these each has a part of the positions */
    *t = (token_ranks){.ep = ari_at_least_one(p->ep), .sharers = ari_expert_sequence(p)};
    AR_TRY(ARI_ALLOC_ZERO(&t->rank, run->batch * run->seq, "ranks of tokens"));
    AR_TRY(ARI_ALLOC_ZERO(&t->sample, run->batch, "samples"));
    AR_TRY(ARI_ALLOC(&t->rows, experts * (size_t)t->sharers, "rows of a sample"));
    for (int at = 0; at < dp * cp * micro; at++) {
        const int d = at / micro / cp, c = at / micro % cp, first = d * cp * tp;
        const ar_positions own = ar_parallel_positions(p, run->seq, c);
        const size_t n = ar_positions_count(&own);
        size_t start = 0, count = 0;
        ar_parallel_rows(p, run->batch, d, at % micro, &start, &count);
        for (size_t row = start; row < start + count; row++) {
            t->sample[row] = (size_t)(first % t->ep / (cp * tp)) * count + row - start;
            for (size_t i = 0; i < n; i++)
                t->rank[row * run->seq + ar_positions_at(&own, i)] = first + c * tp + (int)(i / (n / (size_t)tp));
        }
    }
    return AR_OK;
}

/* Adds what moves of a sample: the rows of tokens for experts of other ranks, and, of the ranks with copies of an expert,
 * the rows that the one that computes its gradient has not, or that each has not. */
static void count_sample(ari_routed *routed, const token_ranks *t, size_t sample, size_t seq, const float *expert,
                         size_t tokens, const ar_experts *x)
{
    const size_t sharers = (size_t)t->sharers, each = x->n / (size_t)t->ep;
    memset(t->rows, 0, x->n * sharers * sizeof *t->rows);
    for (size_t i = 0; i < seq; i++) {
        const size_t token = sample * seq + i, rank = (size_t)t->rank[token];
        for (size_t j = 0; j < x->per_token; j++) {
            const size_t e = (size_t)expert[token % tokens * x->per_token + j];
            routed->rows += e / each != rank % (size_t)t->ep;
            t->rows[e * sharers + rank / (size_t)t->ep % sharers]++;
        }
    }
    for (size_t e = 0; e < x->n; e++) {
        for (size_t r = 0; r < sharers; r++)
            routed->gradients += t->sliced ? (sharers - 1) * t->rows[e * sharers + r]
                                 : r == (e % each + t->sample[sample]) % sharers ? 0
                                                                                 : t->rows[e * sharers + r];
    }
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

ar_status ari_check_routed(ari_routed *routed, const ari_reference *ref, const ari_step_case *c)
{
    const uint64_t alike = ari_experts_whole(&c->run.parallel) ? 1 : (uint64_t)ari_at_least_one(c->run.parallel.tp);
    const ar_experts *x = &c->config->experts;
    ARI_ENDED(token_ranks_end) token_ranks of = {.rank = NULL};
    *routed = (ari_routed){.rows = 0};
    if (x->n == 0)
        return AR_OK;
    AR_TRY(ranks_of_tokens(&of, &c->run, x->n));
    for (size_t i = 0; i < ref->count; i++) {
        const ari_ref_tensor *t = &ref->tensor[i];
        const size_t layer = routed_layer(t, c->config);
        ari_routed sent = {.rows = 0};
        of.sliced = layer != SIZE_MAX && ari_step_slices_experts(c, layer);
        for (size_t row = 0; layer != SIZE_MAX && row < c->run.batch; row++) /* rows of padding are copies */
            count_sample(&sent, &of, row, c->run.seq, t->values, t->count / x->per_token, x);
        routed->rows += layer == SIZE_MAX ? 0 : sent.rows * alike * ari_routed_exchanges(c, layer);
        routed->gradients += c->forward_only ? 0 : 2 * sent.gradients * alike; /* of two products */
    }
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
                                const char *router, int sharer)
{
    const ari_routed_rank *r = user;
    const ar_parallel *p = &r->c->run.parallel;
    const int cp = ari_at_least_one(p->cp), tp = ari_experts_whole(p) ? p->tp : 1, ranks = (int)shape[0];
    char name[160]; /* beside the router */
    snprintf(name, sizeof name, "%.*s.routes", (int)(strrchr(router, '.') - router), router);
    const size_t tensor = ari_reference_find_in(r->ref, name, 'f', (int)ctx->step), k = shape[2];
    const ari_ranks of = ari_ranks_of(p);
    const int own = ari_place_along(&of, r->rank, ari_expert_axes(p)), sharers = ari_expert_sequence(p);
    const int team = own / ranks / sharers * sharers + sharer;
    int micro = 0;
    if (tensor == r->ref->count)
        return ar_error_set(AR_ERR_INTERNAL, "the baseline has no experts of %s in step %u", router, ctx->step);
    const ari_ref_tensor *known = &r->ref->tensor[tensor];
    AR_TRY(micro_of(&micro, r->c, own / tp / cp, ctx));
    for (int i = 0; i < ranks; i++) {
        const int at = team * ranks + i;
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
