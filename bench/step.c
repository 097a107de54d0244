/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/step.h"

#include <stdlib.h>

#include "anyrank/train.h"
#include "bench/gemm_list.h"
#include "bench/measure.h"
#include "ref/core/size.h"
#include "ref/models/model.h"
#include "run/cluster_run.h"

#define STEPS 3 /* counted ones of a repetition */

/* What a rank is told, and where rank 0 leaves its time. */
typedef struct run {
    const ar_bench_step_options *o;
    ar_parallel parallel;
    double seconds; /* of one step: the mean of the counted ones */
} run;

static ar_status create_optimizer(ar_optimizer **gives, ar_ctx *ctx, ar_model *m)
{
    const ar_optimizer_options options = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    size_t n = 0;
    ar_param **all = NULL;
    AR_TRY(ari_model_list(&all, &n, m));
    const ar_status st = ar_optimizer_create(gives, ctx, all, n, &options);
    free(all);
    return st;
}

static ar_status rank_steps(void *user, ar_ctx *ctx)
{
    run *r = user;
    const ar_train_options options = {.parallel = r->parallel, .clip = 1.0};
    const ar_batch batch = {.batch = r->o->run.batch, .seq = r->o->run.seq, .input_ids = r->o->input_ids};
    const bool first_rank = ar_comm_rank(ar_ctx_tp(ctx)) == 0 && ar_comm_rank(ar_ctx_dp(ctx)) == 0;
    ar_model *model = NULL;
    ar_optimizer *optimizer = NULL;
    ar_train_result result;
    const ari_bench_device on = {ar_ctx_device(ctx), ar_ctx_queue(ctx)};
    double start = 0.0, end = 0.0;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ar_model_create(&model, ctx, r->o->config, &r->o->run.plan));
    AR_TRY_TO(done, st, ar_model_fresh(model, ctx, 1));
    AR_TRY_TO(done, st, create_optimizer(&optimizer, ctx, model));
    for (uint32_t i = 0; i <= STEPS; i++) {
        if (i == 1)
            AR_TRY_TO(done, st, ari_bench_clock(&on, &start));
        AR_TRY_TO(done, st, ar_train_step(&result, model, ctx, optimizer, &batch, i + 1, &options));
    }
    AR_TRY_TO(done, st, ari_bench_clock(&on, &end));
    if (first_rank)
        r->seconds = (end - start) / STEPS;
done:
    ar_optimizer_destroy(optimizer);
    ar_model_destroy(model);
    return st;
}

static ar_status run_layout(const ar_bench_step_options *o, const ar_parallel *parallel, double *seconds)
{
    run r = {.o = o, .parallel = *parallel};
    ari_cluster_options cluster = {.run = o->run, .config = o->config, .body = rank_steps, .body_user = &r};
    cluster.run.parallel = *parallel;
    ari_cluster_result result = {0};
    const ar_status st = ari_cluster_run(&result, &cluster);
    free(result.loss);
    free(result.reports);
    *seconds = r.seconds;
    return st;
}

/* times: one rank, the products alone, the layout. */
static ar_status repetition(const ar_bench_step_options *o, const ari_gemm_list *list, double times[3])
{
    const ar_parallel single = {.tp = 1};
    AR_TRY(run_layout(o, &single, &times[0]));
    AR_TRY(ari_gemm_list_run(list, &times[1]));
    return run_layout(o, &o->run.parallel, &times[2]);
}

static ar_status measure(ar_bench_step_row row[2], const ar_bench_step_options *o, const ari_gemm_list *list)
{
    ari_bench_series s = {0};
    double times[3];
    ar_status st = AR_OK;
    AR_TRY(ari_bench_series_create(&s, o->repetitions));
    AR_TRY_TO(done, st, repetition(o, list, times)); /* warms caches, page tables and BLIS's buffers */
    for (size_t i = 0; i < o->repetitions; i++) {
        AR_TRY_TO(done, st, repetition(o, list, times));
        ari_bench_series_put(&s, i, times);
    }
    const double operations = ari_gemm_list_operations(list);
    for (int i = 0; i < 2; i++) {
        const ari_bench_summary of = ari_bench_series_summary(&s, i);
        row[i] = (ar_bench_step_row){.seconds = of.seconds.median,
                                     .gflops = 1e-9 * operations / of.seconds.median,
                                     .gemm_fraction = of.products,
                                     .over_single = of.ratio.median,
                                     .spread = i == 0 ? of.seconds.spread : of.ratio.spread};
    }
done:
    ari_bench_series_destroy(&s);
    return st;
}

ar_status ari_bench_step(ar_bench_step_row row[2], const ar_bench_step_options *o)
{
    ari_gemm_list list = {0};
    ari_bench_device on = {NULL, NULL};
    ar_status st = AR_OK;
    if (o->repetitions == 0)
        return ar_error_set(AR_ERR_ARG, "bench step: no repetitions");
    AR_TRY(ar_parallel_check(&o->run.parallel, o->config, &o->run.plan, o->run.batch, o->run.seq));
    AR_TRY(ari_bench_device_create(&on, &o->run.device, o->run.threads));
    AR_TRY_TO(done, st, ari_gemm_list_model(&list, &on, o->config, o->run.batch, o->run.seq));
    st = measure(row, o, &list);
done:
    ari_gemm_list_destroy(&list);
    ari_bench_device_destroy(&on);
    return st;
}
