/* SPDX-License-Identifier: Apache-2.0 */
/* Overhead of data parallelism in a training step: the same simulated ranks, each with its share of 8 sequences of 64
 * tokens, with and without summing gradients in buckets of several capacities, after the backward pass (eager) and
 * during it (overlap). AdamW, native numerics; no clipping, no taps. A repetition takes some steps of every row, one
 * row after another.
 *
 *   build/bench/ddp [--model MODEL] [--ranks N] [--cluster SPEC] [--json FILE]
 *
 * bucket_bytes  capacity, 0: a parameter each; null in the row without DDP, over whose time over_alone is
 * all_reduces, bytes  of rank 0 in one step; read and written between ranks */
#include <stdlib.h>

#include "anyrank/config.h"
#include "anyrank/ddp.h"
#include "anyrank/model.h"
#include "anyrank/sim.h"
#include "anyrank/train.h"
#include "bench/harness.h"
#include "ref/context/context_private.h"
#include "ref/core/names.h"
#include "ref/core/os/threads.h"
#include "ref/layers/parts.h"
#include "ref/models/parallel_private.h"
#include "verify/run/run.h"

ARI_OWNER(ar_ddp, ar_ddp_destroy)

enum { BATCH = 8, SEQ = 64, STEPS = 3, CAPACITIES = 6, ROWS = 1 + 2 * CAPACITIES };
static const size_t capacities[CAPACITIES] = {0, 65536, 262144, 1048576, 4194304, AR_BUCKET_BYTES};

/* Row 0 is the step without DDP, then every capacity has two. */
static ar_ddp_options options_of(size_t row)
{
    ar_ddp_options o = ar_ddp_defaults();
    o.bucket_bytes = row > 0 ? capacities[(row - 1) / 2] : 0;
    o.mode = row % 2 == 1 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
    return o;
}

/* What the ranks share; rank 0 writes the times and what a step of each row has. */
typedef struct ddp_bench {
    const ari_bench *b;
    ar_config config;
    ar_parallel parallel;
    int64_t input_ids[BATCH * SEQ];
    ari_bench_series s; /* of ROWS sides: one step's times */
    struct {
        uint64_t buckets, all_reduces, bytes;
    } counted[ROWS];
} ddp_bench;

/* One rank, and the two contexts in which its model is trained: among all ranks, and for itself. */
typedef struct ddp_rank {
    ddp_bench *shared;
    ar_parallel_groups groups;
    ar_device *device;
    ar_ctx *together, *alone;
    ar_batch batch, local_batch; /* the global one; this rank's samples of it */
    ar_model *model;
    ar_param **params;
    size_t count;
    ar_optimizer *optimizer;
    uint32_t step;
} ddp_rank;

static ar_status take_step(ddp_rank *k, ar_ddp *ddp)
{
    const ar_train_options o = {.parallel = {.dp = ddp ? k->shared->parallel.dp : 1}, .ddp = ddp};
    ar_train_result result;
    return ar_train_step(&result, k->model, ddp ? k->together : k->alone, k->optimizer,
                         ddp ? &k->batch : &k->local_batch, ++k->step, &o);
}

static ar_status count_step(ddp_rank *k, ar_ddp *ddp, size_t row)
{
    uint64_t read[2], written[2], calls[2];
    const ar_ctx *ctx = ddp ? k->together : k->alone;
    for (int i = 0; i < 2; i++) {
        if (i == 1)
            AR_TRY(take_step(k, ddp));
        ari_ctx_counted(ctx, &read[i], &written[i]);
        calls[i] = ari_ctx_calls(ctx, "all_reduce");
    }
    if (ar_comm_rank(ar_ctx_dp(k->together)) == 0) {
        k->shared->counted[row].buckets = ddp ? ar_ddp_buckets(ddp) : 0;
        k->shared->counted[row].all_reduces = calls[1] - calls[0];
        k->shared->counted[row].bytes = read[1] - read[0] + written[1] - written[0];
    }
    return AR_OK;
}

static ar_status meet(const ddp_rank *k)
{
    return ar_comm_barrier(ar_ctx_dp(k->together), ar_ctx_queue(k->together), "bench");
}

static ar_status time_row(ddp_rank *k, size_t row, double *seconds)
{
    const ar_ddp_options options = options_of(row);
    ARI_OWNED_BY(ar_ddp_destroy) ar_ddp *ddp = NULL;
    if (row > 0)
        AR_TRY(ar_ddp_create_params(&ddp, k->together, "bench", k->params, k->count, &options));
    AR_TRY(count_step(k, ddp, row));
    AR_TRY(meet(k));
    const double start = ari_bench_seconds();
    for (int i = 0; i < STEPS; i++)
        AR_TRY(take_step(k, ddp));
    AR_TRY(meet(k));
    *seconds = (ari_bench_seconds() - start) / STEPS;
    return AR_OK;
}

static ar_status rank_create(ddp_rank *k, ar_comm *world)
{
    const ddp_bench *b = k->shared;
    const int threads = (int)b->b->threads / b->parallel.dp;
    const ar_optimizer_options adamw = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    ar_ctx_options o = {.world = world, .numerics = AR_NUMERICS_NATIVE};
    AR_TRY(ar_device_cpu_create(&k->device, threads > 0 ? threads : 1));
    AR_TRY(ar_parallel_groups_begin(&k->groups, world, &b->parallel));
    o.device = k->device;
    AR_TRY(ar_ctx_create(&k->alone, &(ar_ctx_options){.device = k->device, .numerics = o.numerics}));
    ar_parallel_groups_use(&o, &k->groups);
    AR_TRY(ar_ctx_create(&k->together, &o));
    k->batch = (ar_batch){.batch = BATCH, .seq = SEQ, .input_ids = b->input_ids};
    ari_parallel_slice(&k->local_batch, &b->parallel, &k->batch, ari_ctx_data_rank(k->together), 0);
    k->local_batch.global_batch = 0;
    AR_TRY(ar_model_create(&k->model, k->together, &b->config, NULL));
    AR_TRY(ar_model_fresh(k->model, k->together, 1));
    AR_TRY(ari_module_list(&k->params, &k->count, ar_model_module(k->model)));
    return ar_optimizer_create(&k->optimizer, k->together, k->params, k->count, &adamw);
}

static void rank_destroy(ddp_rank *k)
{
    ar_optimizer_destroy(k->optimizer);
    free(k->params);
    ar_model_destroy(k->model);
    ar_ctx_destroy(k->together);
    ar_ctx_destroy(k->alone);
    ar_device_destroy(k->device);
    ar_parallel_groups_end(&k->groups);
}

static ar_status rank_main(ar_comm *world, void *user)
{
    ddp_bench *b = user;
    ARI_ENDED(rank_destroy) ddp_rank k = {.shared = b};
    AR_TRY(rank_create(&k, world));
    for (size_t i = 0; i < b->s.n * ROWS; i++) {
        double seconds = 0.0;
        AR_TRY(time_row(&k, i % ROWS, &seconds));
        if (ar_comm_rank(world) == 0)
            b->s.times[i] = seconds;
    }
    return AR_OK;
}

static ar_status add_row(ari_bench *out, const ddp_bench *b, size_t row)
{
    const ar_ddp_options o = options_of(row);
    const ari_bench_stat seconds = ari_bench_times_of(&b->s, row), ratio = ari_bench_ratio_of(&b->s, row, 0);
    return ari_bench_add(
        out, "rows",
        json_pack("{s:s, s:i, s:o, s:s?, s:I, s:I, s:I, s:f, s:f, s:f}", "model", b->config.name, "ranks",
                  b->parallel.dp, "bucket_bytes", row > 0 ? json_integer((json_int_t)o.bucket_bytes) : json_null(),
                  "mode", row > 0 ? ari_bucket_mode_names[o.mode] : NULL, "buckets",
                  (json_int_t)b->counted[row].buckets, "all_reduces", (json_int_t)b->counted[row].all_reduces, "bytes",
                  (json_int_t)b->counted[row].bytes, "seconds", seconds.median, "over_alone", ratio.median, "spread",
                  row == 0 ? seconds.spread : ratio.spread));
}

static ar_status time_rows(ari_bench *out, const char *model, size_t ranks, const char *spec)
{
    ddp_bench b = {.b = out, .parallel = {.dp = (int)ranks}};
    ARI_ENDED(ari_bench_series_destroy) ari_bench_series s = {0};
    ar_sim_cluster cluster;
    char folder[512];
    if (ranks < 2 || ranks > BATCH)
        return ar_error_set(AR_ERR_ARG, "--ranks from 2 to %d, so that each has a sequence", BATCH);
    if (spec)
        AR_TRY(ar_sim_cluster_parse(&cluster, spec));
    AR_TRY(ari_run_config(&b.config, folder, sizeof folder, &(ar_run){.model = model}));
    for (size_t i = 0; i < BATCH * SEQ; i++)
        b.input_ids[i] = (int64_t)(i * 7919 % b.config.vocab);
    AR_TRY(ari_bench_series_create(&s, ROWS, out->repetitions));
    b.s = s;
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT,
                              .timeout_ns = 60000000000u,
                              .cluster = spec ? &cluster : NULL,
                              .paced = spec != NULL};
    AR_TRY(ar_sim_run(b.parallel.dp, &o, rank_main, &b, NULL));
    for (size_t row = 0; row < ROWS; row++)
        AR_TRY(add_row(out, &b, row));
    return AR_OK;
}

int main(int argc, char **argv)
{
    const char *model = "llama-demo", *cluster = NULL;
    size_t ranks = 2;
    const ari_bench_option options[] = {
        {"model", "as anyrank check has it (default llama-demo)", .text = &model},
        {"ranks", "data-parallel ranks (default 2)", .number = &ranks},
        {"cluster", "collectives take here, asleep, what that cluster's links take; words as check has them",
         .text = &cluster}};
    ari_bench b = {.name = "ddp", .threads = (size_t)ari_cores(), .repetitions = 7};
    (void)argc;
    ari_bench_begin(&b, argv, options, sizeof options / sizeof *options);
    return ari_bench_end(&b, time_rows(&b, model, ranks, cluster));
}
