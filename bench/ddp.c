/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps of data-parallel ranks, beside the same ranks each for itself. */
#include <stdlib.h>

#include "anyrank/train.h"
#include "bench/bench.h"
#include "bench/harness.h"
#include "ref/context/context.h"
#include "ref/core/lane.h"
#include "ref/layers/parts.h"
#include "verify/check/check_run.h"
#include "verify/plan/estimate.h"
#include "verify/run/cluster_run.h"
#include "verify/run/run.h"

ARI_OWNER(ar_ddp, ar_ddp_destroy)

#define STEPS 3 /* counted ones of a repetition */

/* Options of the steps. */
typedef struct step_options {
    ar_run run; /* of the parallelism dp alone */
    const ar_config *config;
    int64_t *input_ids; /* [batch, seq]; owned */
    size_t repetitions;
} step_options;

/* Refuses, as training does, what the memory does not hold. */
static ar_status expect_memory(const step_options *o)
{
    const ari_estimate_case size = {
        .run = o->run, .config = o->config, .parallel = &o->run.parallel, .layouts = 1, .alone = true};
    ari_estimate e;
    AR_TRY(ari_estimate_layers(o->config));
    AR_TRY(ar_run_check(&o->run, o->config));
    AR_TRY(ari_estimate_check(&e, &size));
    return ari_estimate_fits(&e);
}

/* free(o->input_ids) in every case. */
static ar_status step_options_begin(step_options *o, ari_bench_session *s)
{
    const ari_bench_options *v = s->v;
    const int dp = v->r.run.parallel.dp;
    char folder[512];
    *o = (step_options){.run = ari_run_of(&v->r, &v->common), .config = &s->config, .repetitions = s->repetitions};
    ar_run *run = &o->run;
    run->batch = run->batch ? run->batch : 8;
    run->seq = run->seq ? run->seq : 64;
    run->threads = s->threads;
    run->parallel = (ar_parallel){.dp = dp > 1 ? dp : 2};
    run->numerics = (int)run->numerics >= 0 ? run->numerics : AR_NUMERICS_NATIVE;
    AR_TRY(ari_run_config(&s->config, folder, sizeof folder, &(ar_run){.model = v->model ? v->model : "llama-demo"}));
    AR_TRY(expect_memory(o));
    return ari_text_ids(&o->input_ids, run->batch, run->seq, s->config.vocab, NULL, v->common.seed);
}

/* One rank's model under training. */
typedef struct trainee {
    ar_model *model;
    ar_param **params;
    size_t count;
    ar_optimizer *optimizer;
    uint32_t step;
} trainee;

static ar_status trainee_create(trainee *t, ar_ctx *ctx, const step_options *o)
{
    const ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    AR_TRY(ar_model_create(&t->model, ctx, o->config, &o->run.plan));
    AR_TRY(ar_model_fresh(t->model, ctx, 1));
    AR_TRY(ari_module_list(&t->params, &t->count, ar_model_module(t->model)));
    return ar_optimizer_create(&t->optimizer, ctx, t->params, t->count, &adamw);
}

static void trainee_destroy(trainee *t)
{
    ar_optimizer_destroy(t->optimizer);
    free(t->params);
    ar_model_destroy(t->model);
}

static ar_status take_step(trainee *t, ar_ctx *ctx, const ar_batch *batch, const ar_train_options *o)
{
    ar_train_result result;
    return ar_train_step(&result, t->model, ctx, t->optimizer, batch, ++t->step, o);
}

typedef struct ddp_row {
    const char *model, *numerics, *mode_name;
    int ranks;
    size_t batch, seq;
    bool ddp;            /* false: the step without DDP; what follows of buckets is 0 */
    size_t bucket_bytes; /* the option */
    ar_bucket_mode mode;
    size_t buckets;
    uint64_t all_reduces, bytes; /* of rank 0, in one step */
    double virtual_seconds;      /* of one step, by the clock of the simulated cluster; NaN: there is none */
    double seconds;              /* median of one step */
    double over_alone;           /* median of (time)/(time of the step without DDP) */
    double spread;               /* of that ratio; of the seconds without DDP */
} ddp_row;

/* State that the ranks share; rank 0 writes the rows and the times. */
typedef struct ddp_run {
    const step_options *o;
    ddp_row *rows;
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
static ar_status count_step(ddp_rank *k, ar_ddp *ddp, ddp_row *row)
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

static ar_status time_row(ddp_rank *k, ddp_row *row, double *seconds)
{
    const ar_ddp_options options = {.bucket_bytes = row->bucket_bytes, .mode = row->mode};
    const ari_lane *lane = ari_lane_self();
    ARI_OWNED_BY(ar_ddp_destroy) ar_ddp *ddp = NULL;
    double start = 0.0;
    uint64_t virtual_start = 0;
    if (row->ddp)
        AR_TRY(ar_ddp_create_params(&ddp, k->together, k->r->o->config->name, k->t.params, k->t.count, &options));
    AR_TRY(count_step(k, ddp, row));
    AR_TRY(meet(k));
    virtual_start = lane ? lane->virtual_ns : 0;
    start = ari_bench_seconds();
    for (int i = 0; i < STEPS; i++)
        AR_TRY(ddp_step(k, ddp));
    row->virtual_seconds = lane ? (double)(lane->virtual_ns - virtual_start) * 1e-9 / STEPS : (double)NAN;
    AR_TRY(meet(k));
    *seconds = (ari_bench_seconds() - start) / STEPS;
    return AR_OK;
}

static ar_status ddp_rank_create(ddp_rank *k)
{
    const step_options *o = k->r->o;
    const ar_ctx_options alone = {.device = ar_ctx_device(k->together), .numerics = o->run.numerics};
    k->batch = (ar_batch){.batch = o->run.batch, .seq = o->run.seq, .input_ids = o->input_ids};
    ar_parallel_slice(&k->own, &o->run.parallel, &k->batch, ar_ctx_data_rank(k->together), 0);
    k->own.global_batch = 0;
    AR_TRY(ar_ctx_create(&k->alone, &alone));
    AR_TRY(trainee_create(&k->t, k->together, o));
    return meet(k);
}

static void ddp_rank_destroy(ddp_rank *k)
{
    trainee_destroy(&k->t);
    ar_ctx_destroy(k->alone);
}

static ar_status rank_ddp(void *user, ar_ctx *ctx)
{
    ddp_run *r = user;
    ARI_ENDED(ddp_rank_destroy)
    ddp_rank k = {.r = r, .together = ctx, .first = ar_comm_rank(ar_ctx_dp(ctx)) == 0};
    AR_TRY(ddp_rank_create(&k));
    for (size_t i = 0; i < r->s.n * r->n; i++) {
        ddp_row row = r->rows[i % r->n];
        double seconds = 0.0;
        AR_TRY(time_row(&k, &row, &seconds));
        if (k.first) {
            r->rows[i % r->n] = row;
            r->s.times[i] = seconds;
        }
    }
    return AR_OK;
}

static void ddp_run_fini(ddp_run *r)
{
    ari_bench_series_destroy(&r->s);
}

/* The first is the step without DDP. */
static ar_status time_rows(ddp_row *rows, size_t n, const step_options *o)
{
    ARI_ENDED(ddp_run_fini) ddp_run r = {.o = o, .rows = rows, .n = n};
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result result = {0};
    const ari_cluster_options cluster = {.run = o->run, .config = o->config, .body = rank_ddp, .body_user = &r};
    AR_TRY(ar_parallel_check(&cluster.run.parallel, o->config, &o->run.plan, o->run.batch, o->run.seq));
    AR_TRY(ari_bench_series_create(&r.s, n, o->repetitions));
    AR_TRY(ari_cluster_run(&result, &cluster));
    for (size_t i = 0; i < n; i++) {
        const ari_bench_stat seconds = ari_bench_times_of(&r.s, i), ratio = ari_bench_ratio_of(&r.s, i, 0);
        rows[i].seconds = seconds.median;
        rows[i].over_alone = ratio.median;
        rows[i].spread = i == 0 ? seconds.spread : ratio.spread;
    }
    return AR_OK;
}

#define ARI_ROW ddp_row
static const ari_field ddp_fields[] = {
    ARI_FIELD("model", NULL, TEXT, model),
    ARI_FIELD("ranks", NULL, INT, ranks),
    ARI_FIELD("numerics", NULL, TEXT, numerics),
    ARI_FIELD("batch", NULL, COUNT, batch),
    ARI_FIELD("seq", NULL, COUNT, seq),
    ARI_FIELD("ddp", NULL, FLAG, ddp),
    ARI_FIELD("bucket_bytes", "capacity", CAPACITY, bucket_bytes),
    ARI_FIELD("mode", "mode", TEXT, mode_name),
    ARI_FIELD("buckets", "buckets", COUNT, buckets),
    ARI_FIELD("all_reduces", "all-reduces", COUNT, all_reduces),
    ARI_FIELD("bytes", "MB", MEGABYTES, bytes),
    ARI_FIELD("virtual_seconds", "virtual", SECONDS, virtual_seconds),
    ARI_FIELD("seconds", "time", SECONDS, seconds),
    ARI_FIELD("over_alone", "of no DDP", RATIO, over_alone),
    ARI_FIELD("spread", "spread", SHARE, spread),
};
#undef ARI_ROW

enum { DDP_ROWS = 13 };
/* The step without DDP, then every capacity, a parameter each to 25 MiB, eager and overlapped. */
static void fill_rows(ddp_row rows[DDP_ROWS], const step_options *o)
{
    static const size_t capacities[] = {0, 65536, 262144, 1048576, 4194304, AR_BUCKET_BYTES};
    static const ar_bucket_mode modes[] = {AR_BUCKETS_EAGER, AR_BUCKETS_OVERLAP};
    for (size_t i = 0; i < DDP_ROWS; i++) {
        const ar_bucket_mode mode = modes[(i + 1) % 2];
        rows[i] = (ddp_row){.model = o->config->name,
                            .numerics = ari_numerics_names[o->run.numerics],
                            .mode_name = i > 0 ? ari_bucket_mode_names[mode] : NULL,
                            .ranks = ar_parallel_world(&o->run.parallel),
                            .batch = o->run.batch,
                            .seq = o->run.seq,
                            .ddp = i > 0,
                            .bucket_bytes = i > 0 ? capacities[(i - 1) / 2] : ARI_NO_CAPACITY,
                            .mode = mode};
    }
}

static ar_status run_ddp(ddp_row rows[DDP_ROWS], step_options *o, ari_bench_session *s)
{
    ar_sim_cluster cluster;
    if (s->v->cluster)
        AR_TRY(ar_sim_cluster_parse(&cluster, s->v->cluster));
    AR_TRY(step_options_begin(o, s));
    o->run.sim.cluster = s->v->cluster ? &cluster : NULL;
    o->run.sim.paced = s->v->paced;
    ari_bench_progress(s, 0, 1);
    fill_rows(rows, o);
    return time_rows(rows, DDP_ROWS, o);
}

ar_status ari_bench_ddp(ari_bench_session *s)
{
    ddp_row rows[DDP_ROWS];
    step_options o = {.input_ids = NULL};
    const ar_status st = run_ddp(rows, &o, s);
    free(o.input_ids);
    AR_TRY(st);
    return ari_bench_end(
        s, ARI_ROWS(ddp_fields, rows, DDP_ROWS), s->threads,
        "\nA training step of %s (AdamW, %s), batch %zu x seq %zu, dp=%d, %d thread%s in all; medians. 'no DDP': "
        "the\nsame ranks with the same samples, each for itself. 'all-reduces', 'MB': of rank 0 in one step, bytes "
        "read and\nwritten between ranks. 'spread': of the ratio, in the first row of the times, (largest - "
        "smallest)/median.\n",
        s->config.name, rows->numerics, o.run.batch, o.run.seq, rows->ranks, s->threads, ARI_PLURAL(s->threads));
}
