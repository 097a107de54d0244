/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps: a layout beside one rank, DDP beside the same ranks each for itself. */
#include <stdlib.h>

#include "anyrank/train.h"
#include "bench/bench.h"
#include "bench/harness.h"
#include "ref/context/context.h"
#include "ref/core/lane.h"
#include "ref/layers/parts.h"
#include "run/cluster_run.h"
#include "run/run.h"
#include "verify/check/check_run.h"

#define STEPS 3 /* counted ones of a repetition */

/* Options of the steps. */
typedef struct step_options {
    ar_run run; /* ddp: of the parallelism dp alone */
    const ar_config *config;
    int64_t *input_ids; /* [batch, seq]; owned */
    size_t repetitions;
} step_options;

static void step_options_end(step_options *o)
{
    ari_layout_unload(&o->run);
    free(o->input_ids);
}

/* step_options_end in every case. */
static ar_status step_options_begin(step_options *o, ari_bench_session *s)
{
    const ari_bench_options *v = s->v;
    char folder[512];
    *o = (step_options){.run = ari_run_of(&v->r, &v->common), .config = &s->config, .repetitions = s->repetitions};
    ar_run *run = &o->run;
    run->batch = run->batch ? run->batch : 8;
    run->seq = run->seq ? run->seq : 64;
    run->threads = s->threads;
    AR_TRY(ari_layout_check(&v->r));
    AR_TRY(ari_layout_load(&v->r, run));
    AR_TRY(ari_run_config(&s->config, folder, sizeof folder, &(ar_run){.model = v->model ? v->model : "llama-demo"}));
    return ari_text_ids(&o->input_ids, run->batch, run->seq, s->config.vocab, NULL, v->common.seed);
}

/* One rank's model under training. */
typedef struct trainee {
    ar_model *model;
    ar_param **params;
    size_t count;
    ar_ddp *shares; /* ZeRO; NULL: none */
    ar_optimizer *optimizer;
    uint32_t step;
} trainee;

static ar_status trainee_create(trainee *t, ar_ctx *ctx, const step_options *o, int zero)
{
    const ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    ar_ddp_options ddp = ar_ddp_defaults();
    ddp.zero = zero;
    AR_TRY(ar_model_create(&t->model, ctx, o->config, &o->run.plan));
    AR_TRY(ar_model_fresh(t->model, ctx, 1));
    AR_TRY(ari_module_list(&t->params, &t->count, ar_model_module(t->model)));
    if (zero == 0)
        return ar_optimizer_create(&t->optimizer, ctx, t->params, t->count, &adamw);
    AR_TRY(ar_ddp_create(&t->shares, ctx, ar_model_module(t->model), &ddp));
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

/* Input of a rank's thread; rank 0 leaves its time here. */
typedef struct layout_run {
    const step_options *o;
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

static ar_status run_layout(const step_options *o, const ar_parallel *parallel, double *seconds)
{
    layout_run r = {.o = o, .parallel = *parallel, .seconds = seconds};
    ari_cluster_options cluster = {.run = o->run, .config = o->config, .body = rank_steps, .body_user = &r};
    cluster.run.parallel = *parallel;
    return run_ranks(&cluster);
}

typedef struct step_bench {
    const step_options *o;
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

/* sides: one rank, the layout. */
static ar_status time_step(ari_bench_side sides[2], const step_options *o)
{
    step_bench b = {.o = o};
    ari_bench_device on = {NULL, NULL};
    ar_status st = AR_OK;
    AR_TRY(ar_parallel_check(&o->run.parallel, o->config, &o->run.plan, o->run.batch, o->run.seq));
    AR_TRY(ari_bench_device_create(&on, &o->run.device, o->run.threads));
    AR_TRY_TO(done, st, ari_gemm_list_create(&b.list, &on, o->config, o->run.batch, o->run.seq, true));
    st = ari_bench_sides(sides, 2, ari_gemm_list_operations(&b.list), o->repetitions, 1, repetition, &b);
done:
    ari_gemm_list_destroy(&b.list);
    ari_bench_device_destroy(&on);
    return st;
}

/* A step in one layout and one of the numerics. */
typedef struct step_row {
    const char *model, *numerics;
    char layout[ARI_LAYOUT_TEXT], shown[ARI_LAYOUT_TEXT];
    size_t batch, seq;
    ari_bench_side side;
} step_row;

static step_row step_row_of(const step_options *o, const ar_parallel *parallel, ari_bench_side side)
{
    step_row row = {.model = o->config->name,
                    .numerics = ari_numerics_names[o->run.numerics],
                    .batch = o->run.batch,
                    .seq = o->run.seq,
                    .side = side};
    ar_parallel_text(row.layout, sizeof row.layout, parallel);
    ari_layout_text(row.shown, parallel, o->run.batch);
    return row;
}

#define ARI_ROW step_row
static const ari_field step_fields[] = {
    ARI_FIELD("model", NULL, TEXT, model),
    ARI_FIELD("layout", NULL, WORDS, layout),
    ARI_FIELD(NULL, "layout", WORDS, shown),
    ARI_FIELD("numerics", "numerics", TEXT, numerics),
    ARI_FIELD("batch", NULL, COUNT, batch),
    ARI_FIELD("seq", NULL, COUNT, seq),
    ARI_FIELD("seconds", "time", SECONDS, side.seconds),
    ARI_FIELD("gflops", "GF/s", RATE, side.gflops),
    ARI_FIELD("gemm_fraction", "products", RATIO, side.gemm_fraction),
    ARI_FIELD("over_single", "of tp=1", RATIO, side.over_first),
    ARI_FIELD("spread", "spread", SHARE, side.spread),
};
#undef ARI_ROW

/* One rank and the layout, in the numerics asked for or in both. */
static ar_status time_steps(step_row *rows, size_t *n, step_options *o, ari_bench_session *s)
{
    static const ar_numerics all[] = {AR_NUMERICS_NATIVE, AR_NUMERICS_EXACT};
    const ar_parallel single = {.tp = 1};
    const int asked = (int)s->v->r.run.numerics;
    if (!ari_layout_given(&s->v->r))
        o->run.parallel = (ar_parallel){.tp = 4};
    for (size_t i = 0; i < 2; i++) {
        ari_bench_side sides[2] = {0};
        if (asked >= 0 && asked != (int)all[i])
            continue;
        ari_bench_progress(s, *n, 4);
        o->run.numerics = all[i];
        AR_TRY(time_step(sides, o));
        rows[(*n)++] = step_row_of(o, &single, sides[0]);
        rows[(*n)++] = step_row_of(o, &o->run.parallel, sides[1]);
    }
    return AR_OK;
}

ar_status ari_bench_step(ari_bench_session *s)
{
    step_row rows[4];
    size_t n = 0;
    step_options o;
    ar_status st = step_options_begin(&o, s);
    if (st == AR_OK)
        st = time_steps(rows, &n, &o, s);
    step_options_end(&o);
    AR_TRY(st);
    return ari_bench_end(
        s, ARI_ROWS(step_fields, rows, n), s->threads,
        "\nA training step of %s (AdamW, clipping), batch %zu x seq %zu, %d thread%s in all; medians. 'products': "
        "time\nof the model's matrix products alone, by sgemm, over that of the step. 'of tp=1': over the time of "
        "one rank's\nstep. 'spread': of that ratio, in the first row of the times, (largest - smallest)/median.\n",
        s->config.name, o.run.batch, o.run.seq, s->threads, ARI_PLURAL(s->threads));
}

/* --- DDP ---------------------------------------------------------------------------------------------------------- */

typedef struct ddp_row {
    const char *model, *numerics, *mode_name;
    int ranks;
    size_t batch, seq;
    bool ddp;            /* false: the step without DDP; what follows of buckets is 0 */
    size_t bucket_bytes; /* the option */
    ar_bucket_mode mode;
    size_t buckets;
    uint64_t all_reduces, bytes; /* of rank 0, in one step */
    double virtual_seconds;      /* of one step, by the clock of the simulated cluster; 0: there is none */
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
    ar_ddp *ddp = NULL;
    double start = 0.0;
    uint64_t virtual_start = 0;
    ar_status st = AR_OK;
    if (row->ddp)
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
    const step_options *o = k->r->o;
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
        ddp_row row = r->rows[i % r->n];
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

/* The first is the step without DDP. */
static ar_status time_rows(ddp_row *rows, size_t n, const step_options *o)
{
    ddp_run r = {.o = o, .rows = rows, .n = n};
    ar_status st = AR_OK;
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
    const ari_bench_options *v = s->v;
    ar_sim_cluster cluster;
    ari_run_values others = v->r;
    others.run.parallel.dp = 0;
    if (v->cluster)
        AR_TRY(ar_sim_cluster_parse(&cluster, v->cluster));
    if (ari_layout_given(&others))
        return ar_error_set(AR_ERR_ARG, "bench ddp splits the samples alone: use --dp");
    AR_TRY(step_options_begin(o, s));
    o->run.parallel = (ar_parallel){.dp = v->r.run.parallel.dp > 1 ? v->r.run.parallel.dp : 2};
    o->run.numerics = (int)v->r.run.numerics >= 0 ? v->r.run.numerics : AR_NUMERICS_NATIVE;
    o->run.sim.cluster = v->cluster ? &cluster : NULL;
    o->run.sim.paced = v->paced;
    ari_bench_progress(s, 0, 1);
    fill_rows(rows, o);
    return time_rows(rows, DDP_ROWS, o);
}

ar_status ari_bench_ddp(ari_bench_session *s)
{
    ddp_row rows[DDP_ROWS];
    step_options o = {.input_ids = NULL};
    const ar_status st = run_ddp(rows, &o, s);
    step_options_end(&o);
    AR_TRY(st);
    return ari_bench_end(
        s, ARI_ROWS(ddp_fields, rows, DDP_ROWS), s->threads,
        "\nA training step of %s (AdamW, %s), batch %zu x seq %zu, dp=%d, %d thread%s in all; medians. 'no DDP': "
        "the\nsame ranks with the same samples, each for itself. 'all-reduces', 'MB': of rank 0 in one step, bytes "
        "read and\nwritten between ranks. 'spread': of the ratio, in the first row of the times, (largest - "
        "smallest)/median.\n",
        s->config.name, rows->numerics, o.run.batch, o.run.seq, rows->ranks, s->threads, ARI_PLURAL(s->threads));
}
