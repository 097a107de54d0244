/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/ddp.h"

#include <stdlib.h>

#include "anyrank/train.h"
#include "bench/measure.h"
#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/models/model.h"
#include "run/cluster_run.h"

#define STEPS 3 /* counted ones of a row in a repetition */

/* What the ranks share; rank 0 writes the rows and the times. */
typedef struct run {
    const ar_bench_ddp_options *o;
    ar_bench_ddp_row *rows;
    size_t n;
    double *times; /* [repetitions, n]: of one step */
} run;

/* One rank's model, and the two contexts in which it is trained: among all ranks, and for itself. */
typedef struct trainee {
    run *r;
    bool first; /* rank 0 */
    ar_ctx *together, *alone;
    ar_batch batch, own; /* the global one; this rank's samples of it */
    ar_model *model;
    ar_param **params;
    size_t count;
    ar_optimizer *optimizer;
    uint32_t step;
} trainee;

static ar_status take_step(trainee *t, ar_ddp *ddp)
{
    const ar_train_options o = {.parallel = {.dp = ddp ? ar_parallel_world(&t->r->o->run.parallel) : 1}, .ddp = ddp};
    ar_train_result result;
    return ar_train_step(&result, t->model, ddp ? t->together : t->alone, t->optimizer, ddp ? &t->batch : &t->own,
                         ++t->step, &o);
}

/* Collectives and bytes of one step. */
static ar_status count_step(trainee *t, ar_ddp *ddp, ar_bench_ddp_row *row)
{
    uint64_t read[2], written[2], calls[2];
    const ar_ctx *ctx = ddp ? t->together : t->alone;
    for (int i = 0; i < 2; i++) {
        if (i == 1)
            AR_TRY(take_step(t, ddp));
        ar_ctx_counted(ctx, &read[i], &written[i]);
        calls[i] = ar_ctx_calls(ctx, "all_reduce");
    }
    if (!t->first)
        return AR_OK;
    row->buckets = ddp ? ar_ddp_buckets(ddp) : 0;
    row->all_reduces = calls[1] - calls[0];
    row->bytes = read[1] - read[0] + written[1] - written[0];
    return AR_OK;
}

static ar_status meet(const trainee *t)
{
    AR_TRY(ar_comm_barrier(t->together->dp, t->together->queue, "bench"));
    AR_TRY(ar_queue_sync(t->together->queue, 0)); /* what a device has to do is done */
    return ar_queue_sync(t->alone->queue, 0);
}

static ar_status time_row(trainee *t, ar_bench_ddp_row *row, double *seconds)
{
    const ar_ddp_options options = {.bucket_bytes = row->bucket_bytes, .mode = row->mode};
    ar_ddp *ddp = NULL;
    double start = 0.0;
    ar_status st = AR_OK;
    if (!row->alone)
        AR_TRY(ar_ddp_create_params(&ddp, t->together, t->r->o->config->name, t->params, t->count, &options));
    AR_TRY_TO(done, st, count_step(t, ddp, row));
    AR_TRY_TO(done, st, meet(t));
    start = ari_bench_seconds();
    for (int i = 0; i < STEPS; i++)
        AR_TRY_TO(done, st, take_step(t, ddp));
    AR_TRY_TO(done, st, meet(t));
    if (t->first)
        *seconds = (ari_bench_seconds() - start) / STEPS;
done:
    ar_ddp_destroy(ddp);
    return st;
}

static ar_status create(trainee *t)
{
    const ar_bench_ddp_options *o = t->r->o;
    const ar_ctx_options alone = {.device = ar_ctx_device(t->together), .numerics = o->run.numerics};
    const ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    const ar_parallel parallel = o->run.parallel;
    t->batch = (ar_batch){.batch = o->run.batch, .seq = o->run.seq, .input_ids = o->input_ids};
    ar_parallel_slice(&t->own, &parallel, &t->batch, ar_comm_rank(ar_ctx_dp(t->together)), 0);
    t->own.global_batch = 0;
    AR_TRY(ar_ctx_create(&t->alone, &alone));
    AR_TRY(ar_model_create(&t->model, t->together, o->config, &o->run.plan));
    AR_TRY(ar_model_fresh(t->model, t->together, 1));
    AR_TRY(ari_model_list(&t->params, &t->count, t->model));
    AR_TRY(ar_optimizer_create(&t->optimizer, t->together, t->params, t->count, &adamw));
    return meet(t);
}

static ar_status rank_steps(void *user, ar_ctx *ctx)
{
    run *r = user;
    trainee t = {.r = r, .together = ctx, .first = ar_comm_rank(ar_ctx_dp(ctx)) == 0};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, create(&t));
    for (size_t i = 0; i < r->o->repetitions * r->n; i++) {
        ar_bench_ddp_row row = r->rows[i % r->n];
        AR_TRY_TO(done, st, time_row(&t, &row, &r->times[i]));
        if (t.first)
            r->rows[i % r->n] = row;
    }
done:
    ar_optimizer_destroy(t.optimizer);
    free(t.params);
    ar_model_destroy(t.model);
    ar_ctx_destroy(t.alone);
    return st;
}

static ar_status summarise(run *r)
{
    const size_t repetitions = r->o->repetitions;
    double *one = NULL;
    AR_TRY(ari_alloc((void **)&one, repetitions, sizeof *one, "times of a benchmark"));
    for (size_t k = 0; k < r->n; k++) {
        ar_bench_ddp_row *row = &r->rows[k];
        for (size_t i = 0; i < repetitions; i++)
            one[i] = r->times[i * r->n + k] / r->times[i * r->n];
        const ari_bench_stat ratio = ari_bench_stat_of(one, repetitions);
        for (size_t i = 0; i < repetitions; i++)
            one[i] = r->times[i * r->n + k];
        const ari_bench_stat seconds = ari_bench_stat_of(one, repetitions);
        row->seconds = seconds.median;
        row->over_alone = ratio.median;
        row->spread = k == 0 ? seconds.spread : ratio.spread;
    }
    free(one);
    return AR_OK;
}

ar_status ari_bench_ddp(ar_bench_ddp_row *rows, size_t n, const ar_bench_ddp_options *o)
{
    run r = {.o = o, .rows = rows, .n = n};
    ari_cluster_result result = {0};
    ar_status st = AR_OK;
    if (o->repetitions == 0 || n == 0)
        return ar_error_set(AR_ERR_ARG, "bench ddp: no %s", n == 0 ? "rows" : "repetitions");
    rows[0] = (ar_bench_ddp_row){.alone = true};
    const ari_cluster_options cluster = {.run = o->run, .config = o->config, .body = rank_steps, .body_user = &r};
    AR_TRY(ar_parallel_check(&cluster.run.parallel, o->config, &o->run.plan, o->run.batch, o->run.seq));
    AR_TRY(ari_alloc_zero((void **)&r.times, o->repetitions * n, sizeof *r.times, "times of a benchmark"));
    AR_TRY_TO(done, st, ari_cluster_run(&result, &cluster));
    st = summarise(&r);
done:
    free(r.times);
    free(result.loss);
    free(result.reports);
    return st;
}
