/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps: a layout beside one rank, DDP beside the same ranks each for itself. */
#include <stdlib.h>

#include "anyrank/train.h"
#include "bench/harness.h"
#include "ref/context/context.h"
#include "ref/core/lane.h"
#include "ref/models/model.h"
#include "run/cluster_run.h"

#define STEPS 3 /* counted ones of a repetition */

/* One rank's model under training. */
typedef struct trainee {
    ar_model *model;
    ar_param **params;
    size_t count;
    ar_ddp *shares; /* ZeRO; NULL: none */
    ar_optimizer *optimizer;
    uint32_t step;
} trainee;

static ar_status trainee_create(trainee *t, ar_ctx *ctx, const ar_bench_step_options *o, int zero)
{
    const ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    ar_ddp_options ddp = ar_ddp_defaults();
    ddp.zero = zero;
    AR_TRY(ar_model_create(&t->model, ctx, o->config, &o->run.plan));
    AR_TRY(ar_model_fresh(t->model, ctx, 1));
    AR_TRY(ari_model_list(&t->params, &t->count, t->model));
    if (zero == 0)
        return ar_optimizer_create(&t->optimizer, ctx, t->params, t->count, &adamw);
    AR_TRY(ar_ddp_create_model(&t->shares, ctx, o->config->name, t->model, &ddp));
    return ar_optimizer_create_sharded(&t->optimizer, ctx, t->shares, &adamw);
}

static void trainee_destroy(trainee *t)
{
    ar_optimizer_destroy(t->optimizer);
    ar_ddp_destroy(t->shares);
    free(t->params);
    ar_model_destroy(t->model);
}

static ar_status take_step(trainee *t, ar_ctx *ctx, const ar_batch *batch, const ar_train_options *o)
{
    ar_train_result result;
    return ar_train_step(&result, t->model, ctx, t->optimizer, batch, ++t->step, o);
}

static ar_status run_ranks(const ari_cluster_options *cluster)
{
    ari_cluster_result result = {0};
    const ar_status st = ari_cluster_run(&result, cluster);
    free(result.loss);
    free(result.reports);
    return st;
}

/* --- a layout ----------------------------------------------------------------------------------------------------- */

/* What a rank is told, and where rank 0 leaves its time. */
typedef struct layout_run {
    const ar_bench_step_options *o;
    ar_parallel parallel;
    double *seconds; /* of one step: the mean of the counted ones */
} layout_run;

static ar_status rank_steps(void *user, ar_ctx *ctx)
{
    const layout_run *r = user;
    ar_train_options options = {.parallel = r->parallel, .clip = 1.0};
    const ar_batch batch = {.batch = r->o->run.batch, .seq = r->o->run.seq, .input_ids = r->o->input_ids};
    const bool first_rank = ar_comm_rank(ar_ctx_tp(ctx)) == 0 && ar_comm_rank(ar_ctx_dp(ctx)) == 0;
    const ari_bench_device on = {ar_ctx_device(ctx), ar_ctx_queue(ctx)};
    trainee t = {0};
    double start = 0.0, end = 0.0;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, trainee_create(&t, ctx, r->o, r->parallel.zero));
    options.ddp = t.shares;
    for (int i = 0; i <= STEPS; i++) {
        if (i == 1)
            AR_TRY_TO(done, st, ari_bench_clock(&on, &start));
        AR_TRY_TO(done, st, take_step(&t, ctx, &batch, &options));
    }
    AR_TRY_TO(done, st, ari_bench_clock(&on, &end));
    if (first_rank)
        *r->seconds = (end - start) / STEPS;
done:
    trainee_destroy(&t);
    return st;
}

static ar_status run_layout(const ar_bench_step_options *o, const ar_parallel *parallel, double *seconds)
{
    layout_run r = {.o = o, .parallel = *parallel, .seconds = seconds};
    ari_cluster_options cluster = {.run = o->run, .config = o->config, .body = rank_steps, .body_user = &r};
    cluster.run.parallel = *parallel;
    return run_ranks(&cluster);
}

typedef struct step_bench {
    const ar_bench_step_options *o;
    ari_gemm_list list;
} step_bench;

/* times: one rank, the products alone, the layout. */
static ar_status repetition(void *user, double times[3])
{
    const step_bench *b = user;
    const ar_parallel single = {.tp = 1};
    AR_TRY(run_layout(b->o, &single, &times[0]));
    AR_TRY(ari_gemm_list_run(&b->list, &times[1]));
    return run_layout(b->o, &b->o->run.parallel, &times[2]);
}

ar_status ari_bench_step(ar_bench_side_row row[2], const ar_bench_step_options *o)
{
    step_bench b = {.o = o};
    ari_bench_device on = {NULL, NULL};
    ar_status st = AR_OK;
    if (o->repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench step: no repetitions");
    AR_TRY(ar_parallel_check(&o->run.parallel, o->config, &o->run.plan, o->run.batch, o->run.seq));
    AR_TRY(ari_bench_device_create(&on, &o->run.device, o->run.threads));
    AR_TRY_TO(done, st, ari_gemm_list_create(&b.list, &on, o->config, o->run.batch, o->run.seq, true));
    st = ari_bench_sides(row, ari_gemm_list_operations(&b.list), o->repetitions, 1, repetition, &b);
done:
    ari_gemm_list_destroy(&b.list);
    ari_bench_device_destroy(&on);
    return st;
}

/* --- DDP ---------------------------------------------------------------------------------------------------------- */

/* What the ranks share; rank 0 writes the rows and the times. */
typedef struct ddp_run {
    const ar_bench_step_options *o;
    ar_bench_ddp_row *rows;
    size_t n;
    ari_bench_series s; /* of n sides: one step's times */
} ddp_run;

/* One rank, and the two contexts in which its model is trained: among all ranks, and for itself. */
typedef struct ddp_rank {
    ddp_run *r;
    bool first; /* rank 0 */
    ar_ctx *together, *alone;
    ar_batch batch, own; /* the global one; this rank's samples of it */
    trainee t;
} ddp_rank;

static ar_status ddp_step(ddp_rank *k, ar_ddp *ddp)
{
    const ar_train_options o = {.parallel = {.dp = ddp ? ar_parallel_world(&k->r->o->run.parallel) : 1}, .ddp = ddp};
    return take_step(&k->t, ddp ? k->together : k->alone, ddp ? &k->batch : &k->own, &o);
}

/* Collectives and bytes of one step. */
static ar_status count_step(ddp_rank *k, ar_ddp *ddp, ar_bench_ddp_row *row)
{
    uint64_t read[2], written[2], calls[2];
    const ar_ctx *ctx = ddp ? k->together : k->alone;
    for (int i = 0; i < 2; i++) {
        if (i == 1)
            AR_TRY(ddp_step(k, ddp));
        ar_ctx_counted(ctx, &read[i], &written[i]);
        calls[i] = ar_ctx_calls(ctx, "all_reduce");
    }
    row->buckets = ddp ? ar_ddp_buckets(ddp) : 0;
    row->all_reduces = calls[1] - calls[0];
    row->bytes = read[1] - read[0] + written[1] - written[0];
    return AR_OK;
}

static ar_status meet(const ddp_rank *k)
{
    AR_TRY(ar_comm_barrier(k->together->dp, k->together->queue, "bench"));
    AR_TRY(ar_queue_sync(k->together->queue, 0)); /* what a device has to do is done */
    return ar_queue_sync(k->alone->queue, 0);
}

static ar_status time_row(ddp_rank *k, ar_bench_ddp_row *row, double *seconds)
{
    const ar_ddp_options options = {.bucket_bytes = row->bucket_bytes, .mode = row->mode};
    const ari_lane *lane = ari_lane_self();
    ar_ddp *ddp = NULL;
    double start = 0.0;
    uint64_t virtual_start = 0;
    ar_status st = AR_OK;
    if (!row->alone)
        AR_TRY(ar_ddp_create_params(&ddp, k->together, k->r->o->config->name, k->t.params, k->t.count, &options));
    AR_TRY_TO(done, st, count_step(k, ddp, row));
    AR_TRY_TO(done, st, meet(k));
    virtual_start = lane ? lane->virtual_ns : 0;
    start = ari_bench_seconds();
    for (int i = 0; i < STEPS; i++)
        AR_TRY_TO(done, st, ddp_step(k, ddp));
    row->virtual_seconds = lane ? (double)(lane->virtual_ns - virtual_start) * 1e-9 / STEPS : 0.0;
    AR_TRY_TO(done, st, meet(k));
    *seconds = (ari_bench_seconds() - start) / STEPS;
done:
    ar_ddp_destroy(ddp);
    return st;
}

static ar_status ddp_rank_create(ddp_rank *k)
{
    const ar_bench_step_options *o = k->r->o;
    const ar_ctx_options alone = {.device = ar_ctx_device(k->together), .numerics = o->run.numerics};
    k->batch = (ar_batch){.batch = o->run.batch, .seq = o->run.seq, .input_ids = o->input_ids};
    ar_parallel_slice(&k->own, &o->run.parallel, &k->batch, ar_ctx_data_rank(k->together), 0);
    k->own.global_batch = 0;
    AR_TRY(ar_ctx_create(&k->alone, &alone));
    AR_TRY(trainee_create(&k->t, k->together, o, 0));
    return meet(k);
}

static ar_status rank_ddp(void *user, ar_ctx *ctx)
{
    ddp_run *r = user;
    ddp_rank k = {.r = r, .together = ctx, .first = ar_comm_rank(ar_ctx_dp(ctx)) == 0};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ddp_rank_create(&k));
    for (size_t i = 0; i < r->s.n * r->n; i++) {
        ar_bench_ddp_row row = r->rows[i % r->n];
        double seconds = 0.0;
        AR_TRY_TO(done, st, time_row(&k, &row, &seconds));
        if (k.first) {
            r->rows[i % r->n] = row;
            r->s.times[i] = seconds;
        }
    }
done:
    trainee_destroy(&k.t);
    ar_ctx_destroy(k.alone);
    return st;
}

size_t ari_bench_ddp_rows(ar_bench_ddp_row rows[ARI_BENCH_DDP_ROWS])
{
    static const size_t capacities[] = {0, 65536, 262144, 1048576, 4194304, AR_BUCKET_BYTES};
    size_t n = 0;
    rows[n++] = (ar_bench_ddp_row){.alone = true};
    for (size_t i = 0; n < ARI_BENCH_DDP_ROWS; i++) {
        rows[n++] = (ar_bench_ddp_row){.bucket_bytes = capacities[i], .mode = AR_BUCKETS_EAGER};
        rows[n++] = (ar_bench_ddp_row){.bucket_bytes = capacities[i], .mode = AR_BUCKETS_OVERLAP};
    }
    return n;
}

ar_status ari_bench_ddp(ar_bench_ddp_row *rows, size_t n, const ar_bench_step_options *o)
{
    ddp_run r = {.o = o, .rows = rows, .n = n};
    ar_status st = AR_OK;
    if (o->repetitions == 0 || n == 0)
        return ar_error_set(AR_ERR_ARG, "bench ddp: no %s", n == 0 ? "rows" : "repetitions");
    const ari_cluster_options cluster = {.run = o->run, .config = o->config, .body = rank_ddp, .body_user = &r};
    AR_TRY(ar_parallel_check(&cluster.run.parallel, o->config, &o->run.plan, o->run.batch, o->run.seq));
    AR_TRY_TO(done, st, ari_bench_series_create(&r.s, n, o->repetitions));
    AR_TRY_TO(done, st, run_ranks(&cluster));
    for (size_t i = 0; i < n; i++) {
        const ari_bench_stat seconds = ari_bench_times_of(&r.s, i), ratio = ari_bench_ratio_of(&r.s, i, 0);
        rows[i].seconds = seconds.median;
        rows[i].over_alone = ratio.median;
        rows[i].spread = i == 0 ? seconds.spread : ratio.spread;
    }
done:
    ari_bench_series_destroy(&r.s);
    return st;
}
