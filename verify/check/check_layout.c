/* SPDX-License-Identifier: Apache-2.0 */
/* Checks one layout: under the requested number of schedules, again if a difference requires that, and with its
 * dump. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/axis.h"
#include "ref/models/family.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/parallel_private.h"
#include "verify/bytes/bytes.h"
#include "verify/check/check_run.h"
#include "verify/read/dump.h"
#include "verify/writer/dump_ranks.h"

/* --- routes ------------------------------------------------------------------------------------------------------- */

/* The ranks that exchange the tokens of a batch: those that share the experts and those with copies of an expert. */
typedef struct token_ranks {
    int ep, sharers; /* number of ranks that share the experts; number of ranks that have copies of an expert and
                        tokens of one sample */
    int *rank;       /* [batch, seq] rank of each token */
    size_t *sample;  /* [batch] number of the sample group whose rows are exchanged together */
    size_t *rows;    /* [experts, sharers] scratch for one sample */
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
    const int tp = ari_experts_unsplit(p) ? p->tp : 1; /* ranks that each have part of the positions */
    *t = (token_ranks){.ep = ari_at_least_one(p->ep), .sharers = ari_expert_sequence(p)};
    AR_TRY(ARI_ALLOC_ZERO(&t->rank, run->batch * run->seq, "ranks of tokens"));
    AR_TRY(ARI_ALLOC_ZERO(&t->sample, run->batch, "samples"));
    AR_TRY(ARI_ALLOC(&t->rows, experts * (size_t)t->sharers, "rows of a sample"));
    for (int part = 0; part < dp * cp * micro; part++) {
        const int d = part / micro / cp, c = part / micro % cp, first_rank = d * cp * tp;
        const ar_positions positions = ari_parallel_positions(p, run->seq, c);
        const size_t n = ari_positions_count(&positions);
        size_t start = 0, count = 0;
        ari_parallel_rows(p, run->batch, d, part % micro, &start, &count);
        for (size_t row = start; row < start + count; row++) {
            t->sample[row] = (size_t)(first_rank % t->ep / (cp * tp)) * count + row - start;
            for (size_t i = 0; i < n; i++)
                t->rank[row * run->seq + ari_positions_at(&positions, i)] =
                    first_rank + c * tp + (int)(i / (n / (size_t)tp));
        }
    }
    return AR_OK;
}

/* Adds a sample's traffic: rows of tokens for experts on other ranks, and rows that a rank needs to compute the
 * gradient of an expert with copies. */
static void count_sample(ari_routed *routed, const token_ranks *t, size_t sample, size_t seq, const float *expert,
                         size_t tokens, const ar_experts *x)
{
    const size_t sharers = (size_t)t->sharers, experts_per_rank = x->n / (size_t)t->ep;
    memset(t->rows, 0, x->n * sharers * sizeof *t->rows);
    for (size_t i = 0; i < seq; i++) {
        const size_t token = sample * seq + i, rank = (size_t)t->rank[token];
        for (size_t j = 0; j < x->per_token; j++) {
            const size_t e = (size_t)expert[token % tokens * x->per_token + j];
            routed->rows += e / experts_per_rank != rank % (size_t)t->ep;
            t->rows[e * sharers + rank / (size_t)t->ep % sharers]++;
        }
    }
    for (size_t e = 0; e < x->n; e++) {
        for (size_t r = 0; r < sharers; r++)
            routed->gradients +=
                r == (e % experts_per_rank + t->sample[sample]) % sharers ? 0 : t->rows[e * sharers + r];
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

/* Predicts what the routes move in a run, from the baseline's routes and the layout only: each token's experts, and the
 * ranks of the experts and of the token. */
static ar_status check_routed(ari_routed *routed, const ari_reference *ref, const ari_step_case *c)
{
    const uint64_t copies = ari_experts_unsplit(&c->run.parallel) ? 1 : (uint64_t)ari_at_least_one(c->run.parallel.tp);
    const ar_experts *x = &c->config->experts;
    ARI_ENDED(token_ranks_end) token_ranks token_owners = {.rank = NULL};
    *routed = (ari_routed){.rows = 0};
    if (x->n == 0)
        return AR_OK;
    AR_TRY(ranks_of_tokens(&token_owners, &c->run, x->n));
    for (size_t i = 0; i < ref->count; i++) {
        const ari_ref_tensor *t = &ref->tensor[i];
        const size_t layer = routed_layer(t, c->config);
        ari_routed sent = {.rows = 0};
        for (size_t row = 0; layer != SIZE_MAX && row < c->run.batch; row++) /* rows of padding are copies */
            count_sample(&sent, &token_owners, row, c->run.seq, t->values, t->count / x->per_token, x);
        routed->rows += layer == SIZE_MAX ? 0 : sent.rows * copies * ari_bytes_routed_exchanges(c, layer);
        routed->gradients += c->forward_only ? 0 : 2 * sent.gradients * copies; /* for two products */
    }
    return AR_OK;
}

/* --- a dry run's routes ------------------------------------------------------------------------------------------- */

/* Finds the micro-batch that the context is processing, by its first sample. */
static ar_status micro_of(int *micro, const ari_step_case *c, int d, const ar_ctx *ctx)
{
    const ar_parallel *p = &c->run.parallel;
    size_t start = 0, count = 0;
    for (*micro = 0; *micro < ari_at_least_one(p->micro_batches); ++*micro) {
        ari_parallel_rows(p, c->run.batch, d, *micro, &start, &count);
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
    const int cp = ari_at_least_one(p->cp), tp = ari_experts_unsplit(p) ? p->tp : 1, ranks = (int)shape[0];
    char name[160]; /* beside the router */
    snprintf(name, sizeof name, "%.*s.routes", (int)(strrchr(router, '.') - router), router);
    const size_t tensor = ari_reference_find_in(r->ref, name, 'f', (int)ctx->step), k = shape[2];
    const ari_ranks mesh = ari_ranks_of(p);
    const int local_place = ari_place_along(&mesh, r->rank, ari_expert_axes(p)), sharers = ari_expert_sequence(p);
    const int team = local_place / ranks / sharers * sharers + sharer;
    int micro = 0;
    if (tensor == r->ref->count)
        return ar_error_set(AR_ERR_INTERNAL, "the baseline has no experts of %s in step %u", router, ctx->step);
    const ari_ref_tensor *routes = &r->ref->tensor[tensor];
    AR_TRY(micro_of(&micro, r->c, local_place / tp / cp, ctx));
    for (int i = 0; i < ranks; i++) {
        const int peer_place = team * ranks + i;
        const ar_positions positions = ari_parallel_positions(p, r->c->run.seq, peer_place / tp % cp);
        const size_t local_seq = ari_positions_count(&positions) / (size_t)tp,
                     seq_begin = (size_t)(peer_place % tp) * local_seq;
        size_t start = 0, count = 0;
        ari_parallel_rows(p, r->c->run.batch, peer_place / tp / cp, micro, &start, &count);
        if (count * local_seq != shape[1])
            return ar_error_set(AR_ERR_INTERNAL, "%s: rank %d has %zu samples of %zu positions, not %zu tokens", router,
                                peer_place, count, local_seq, shape[1]);
        for (size_t t = 0; t < shape[1]; t++) {
            const size_t token =
                (start + t / local_seq) * r->c->run.seq + ari_positions_at(&positions, seq_begin + t % local_seq);
            for (size_t j = 0; j < k; j++)
                expert[((size_t)i * shape[1] + t) * k + j] =
                    (int32_t)routes->values[token % (routes->count / k) * k + j];
        }
    }
    return AR_OK;
}

/* --- check layout ------------------------------------------------------------------------------------------------- */

/* Runs one layout under the requested number of schedules until one run differs. The dump is that of the last run. */
static ar_status run_schedules(ar_check_run *run, const ari_reference *ref, ari_cluster_options *o, uint64_t first_seed,
                               uint64_t schedules, ari_dump_ranks *dump)
{
    const uint64_t predicted = run->bytes_predicted;
    o->run.sim.explore = schedules > 0;
    for (uint64_t k = 0; k < (schedules > 0 ? schedules : 1); k++) {
        ari_check_run_fini(run);
        ari_dump_ranks_clear(dump);
        run->bytes_predicted = predicted;
        o->run.sim.schedule_seed = first_seed + k;
        AR_TRY(ari_check_run(run, ref, o));
        run->schedules = schedules > 0 ? k + 1 : 0;
        run->schedule_seed = o->run.sim.schedule_seed;
        if (run->result != AR_CHECK_SAME && run->result != AR_CHECK_VACUOUS)
            break;
    }
    return AR_OK;
}

/* Explains a different number of bytes when all values are right: repeats the run with recorded collectives to find the
 * one that differs. */
static ar_status explain_bytes(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o)
{
    ari_cluster_options repeat_options = *o;
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result result = {0};
    ARI_OWNED_BY(ar_trace_destroy) ar_trace *repeat_trace = NULL;
    if (run->error || run->tensors_different > 0 || run->bytes_counted == run->bytes_predicted || o->run.process)
        return AR_OK;
    repeat_options.tap = NULL;
    if (!o->run.sim.trace) {
        AR_TRY(ar_trace_create(&repeat_trace));
        repeat_options.run.sim.trace = repeat_trace;
        AR_TRY(ari_cluster_run(&result, &repeat_options));
    }
    const ar_status st = ari_recorded_calls(&run->call_cause, ref, &repeat_options, repeat_options.run.sim.trace);
    if (st != AR_ERR_DATA)
        return st;
    snprintf(run->call_difference, sizeof run->call_difference, "%s", ar_error_message());
    return AR_OK;
}

/* "tp2-sp", "dp2-tp2-zero1", "tp1": ari_parallel_text as a file's name. */
static void layout_name(char *out, size_t cap, const ar_parallel *p)
{
    char text[96];
    size_t n = 0;
    ari_parallel_text(text, sizeof text, p);
    for (const char *c = text; *c && n + 1 < cap; c++) {
        if (isalnum((unsigned char)*c) || *c == '-')
            out[n++] = *c;
        else if (*c == ' ' || *c == ',')
            out[n++] = '-';
    }
    if (cap > 0)
        out[n] = '\0';
}

/* A failed run has reported only some tensors of some ranks, which cannot be assembled. */
static ar_status write_dump(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                            const ari_dump_ranks *dump)
{
    ari_dump_facts facts;
    char layout[96];
    if (run->reports)
        return AR_OK;
    layout_name(layout, sizeof layout, &dump->parallel);
    AR_TRY(ari_folder_path(run->dump, sizeof run->dump, o->dump, layout));
    ar_run dump_run = o->run;
    dump_run.parallel = dump->parallel;
    AR_TRY(ari_dump_facts_of(&facts, &b->config, &dump_run, b->batch));
    ari_dump_fact(&facts, "cu_seqlens", b->documents_text);
    return ari_dump_ranks_write(dump, run->dump, &facts);
}

static ar_status traffic_in_bf16(uint64_t *bytes, const ari_step_case *exact)
{
    ari_step_case c = *exact;
    c.run.numerics = AR_NUMERICS_NATIVE;
    c.run.precision = AR_PRECISION_BF16;
    return ari_bytes_predict(bytes, &c);
}

ar_status ari_check_base_run(ar_check_run *run, const ari_check_base *b, const ar_check_options *o,
                             const ar_parallel *p)
{
    ari_cluster_options cluster = {.run = o->run,
                                   .config = &b->config,
                                   .batch = b->padded ? b->padded : b->batch,
                                   .weights = b->weights ? ari_weights_find : NULL,
                                   .weights_user = b->weights};
    cluster.run.parallel = *p;
    cluster.run.batch += o->padding;
    ari_routed routed = {0, 0};
    const ari_step_case traffic = {
        .run = cluster.run, .config = &b->config, .routed = &routed, .repeats = b->documents};
    *run = (ar_check_run){.parallel = *p};
    if (o->run.numerics == AR_NUMERICS_EXACT) /* otherwise rounding may make ranks route differently from the
                                                 baseline */
        AR_TRY(check_routed(&routed, &b->ref, &traffic));
    AR_TRY(ari_bytes_predict(&run->bytes_predicted, &traffic));
    ARI_ENDED(ari_dump_ranks_fini) ari_dump_ranks dump = {.ranks = 0};
    if (o->dump) {
        AR_TRY(ari_dump_ranks_create(&dump, p, NULL));
        cluster.tap = ar_dump_listener_tap;
        cluster.tap_user = dump.user;
    }
    AR_TRY(run_schedules(run, &b->ref, &cluster, o->run.sim.schedule_seed, o->schedules, &dump));
    if (o->explain)
        AR_TRY(ari_check_explain(run, &b->ref, &cluster));
    AR_TRY(explain_bytes(run, &b->ref, &cluster));
    AR_TRY(traffic_in_bf16(&run->bytes_bf16, &traffic));
    return o->dump ? write_dump(run, b, o, &dump) : AR_OK;
}
