/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/cluster_run.h"

#include <stdlib.h>

#include "ref/core/budget.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

const char *const ari_collective_kind[ARI_COLLECTIVE_KINDS] = {
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "exchange", "barrier"};

/* Ranks that share cores with a busy machine are late, not dead. */
#define LONGEST_WAIT_NS UINT64_C(60000000000)

typedef struct rank_result {
    float loss;
    uint64_t read, written;
    uint64_t calls[ARI_COLLECTIVE_KINDS];
    size_t weights, gradients, stored, peak;
} rank_result;

typedef struct job {
    const ari_cluster_options *o;
    rank_result *rank; /* [tp] */
} job;

/* Memory that outlives the step: weights, and the gradients in the arithmetic's own form. */
static ar_status measure_params(ar_ctx *ctx, ar_model *m, rank_result *result)
{
    const size_t n = ar_model_params(m, NULL, 0);
    ar_param **all = NULL;
    AR_TRY(ari_alloc((void **)&all, n, sizeof *all, "a list of parameters"));
    const size_t found = ar_model_params(m, all, n);
    for (size_t i = 0; i < n && i < found; i++) {
        result->weights += ar_tensor_count(&all[i]->value) * sizeof(float);
        result->gradients += ar_ctx_arith(ctx)->grad_bytes(all[i]);
    }
    free(all);
    return AR_OK;
}

static ar_status forward_backward(ar_ctx *ctx, ar_model *m, ar_saved *saved, const ari_cluster_options *o,
                                  rank_result *result)
{
    size_t unused = 0;
    if (o->weights)
        AR_TRY(ar_model_set(m, ctx, o->weights, o->weights_user));
    else
        AR_TRY(ar_model_fresh(m, ctx, o->seed));
    AR_TRY(ar_model_forward(m, ctx, saved, &result->loss, o->batch));
    ar_ctx_memory(ctx, &result->stored, &unused);
    return o->forward_only ? AR_OK : ar_model_backward(m, ctx, saved, o->batch);
}

static ar_status step(ar_ctx *ctx, const ari_cluster_options *o, rank_result *result)
{
    ar_model *model = NULL;
    ar_saved *saved = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_saved_create(&saved));
    AR_TRY_TO(done, st, ar_model_create(&model, ctx, o->config, &o->plan));
    AR_TRY_TO(done, st, forward_backward(ctx, model, saved, o, result));
    AR_TRY_TO(done, st, measure_params(ctx, model, result));
done:
    ar_model_destroy(model);
    ar_saved_destroy(saved);
    return st;
}

static ar_status rank_main(ar_comm *world, void *arg)
{
    const job *j = arg;
    const ari_cluster_options *o = j->o;
    const int r = ar_comm_rank(world);
    rank_result *result = &j->rank[r];
    ar_device *device = NULL;
    ar_ctx *ctx = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st,
              ar_device_cpu_create(&device, ari_core_budget(o->threads > 0 ? o->threads : ari_cores(), o->tp)));
    const ar_ctx_options options = {.device = device,
                                    .tp = world,
                                    .numerics = o->numerics,
                                    .fault = o->fault,
                                    .tap = o->tap,
                                    .tap_user = o->tap_user ? o->tap_user[r] : NULL};
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &options));
    AR_TRY_TO(done, st, o->body ? o->body(o->body_user, ctx) : step(ctx, o, result));
    ar_comm_counted(world, &result->read, &result->written);
    for (int k = 0; k < ARI_COLLECTIVE_KINDS; k++)
        result->calls[k] = ar_comm_calls(world, ari_collective_kind[k]);
    size_t now = 0;
    ar_ctx_memory(ctx, &now, &result->peak);
done:
    ar_ctx_destroy(ctx);
    ar_device_destroy(device);
    return st;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

ar_status ari_cluster_run(ari_cluster_result *result, const ari_cluster_options *o)
{
    *result = (ari_cluster_result){0};
    job j = {.o = o};
    const size_t n = (size_t)o->tp;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&j.rank, n, sizeof *j.rank, "results of the ranks"));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&result->reports, n, sizeof *result->reports, "reports of the ranks"));
    const uint64_t start = ari_now_ns();
    ar_sim_options sim = o->sim;
    sim.timeout_ns = sim.timeout_ns ? sim.timeout_ns : LONGEST_WAIT_NS;
    AR_TRY_TO(done, st, ar_sim_run(o->tp, &sim, rank_main, &j, result->reports));
    result->seconds = (double)(ari_now_ns() - start) * 1e-9;
    result->loss = j.rank[0].loss;
    for (size_t r = 0; r < n; r++) {
        const rank_result *rank = &j.rank[r];
        const uint64_t moved = rank->read + rank->written;
        result->bytes += moved;
        result->bytes_per_rank_max = moved > result->bytes_per_rank_max ? moved : result->bytes_per_rank_max;
        result->weights_per_rank = larger(result->weights_per_rank, rank->weights);
        result->gradients_per_rank = larger(result->gradients_per_rank, rank->gradients);
        result->stored_per_rank = larger(result->stored_per_rank, rank->stored);
        result->peak_per_rank = larger(result->peak_per_rank, rank->peak);
    }
    for (int k = 0; k < ARI_COLLECTIVE_KINDS; k++)
        result->calls[k] = j.rank[0].calls[k];
    free(result->reports);
    result->reports = NULL;
done:
    free(j.rank);
    return st;
}
