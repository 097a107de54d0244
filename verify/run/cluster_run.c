/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/cluster_run.h"
#include "anyrank/comm.h"

#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/process/process_private.h"
#include "ref/context/context_private.h"
#include "ref/core/clock.h"
#include "ref/core/fault_private.h"
#include "ref/core/wait.h"
#include "ref/layers/parts.h"
#include "ref/models/model.h"
#include "ref/models/model_private.h"
#include "ref/models/stages.h"
#include "ref/record/dry.h"
#include "ref/record/ledger.h"
#include "ref/train/ddp_private.h"
#include "ref/train/train_private.h"
#include "verify/run/process_run.h"
#include "verify/run/run.h"

ARI_OWNER(ar_comm, ar_comm_destroy)

/* --- what a rank trains with -------------------------------------------------------------------------------------- */
static ar_status create_optimizer(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o)
{
    if (o->forward_only || o->run.steps == 0)
        return AR_OK;
    if (o->run.parallel.zero)
        return ar_optimizer_create_sharded(&t->optimizer, ctx, t->ddp, &o->run.optimizer);
    return ar_optimizer_create(&t->optimizer, ctx, t->params, t->n, &o->run.optimizer);
}

static ar_status create_ddp(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o)
{
    ar_ddp_options ddp = o->run.ddp;
    ddp.zero = o->run.parallel.zero;
    ddp.matrices_apart = o->run.optimizer.kind == AR_OPTIMIZER_MUON;
    if (o->forward_only || (o->module && o->each_alone && ddp.zero == 0))
        return AR_OK;
    ddp.keep_weights = ddp.keep_weights || t->model; /* ari_model_set and ar_model_fresh have already broadcast the
                                                        weights */
    AR_TRY(ar_ddp_create(&t->ddp, ctx, t->module, &ddp));
    t->step.ddp = t->ddp;
    return AR_OK;
}

static ar_status create_model(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o)
{
    AR_TRY(ar_model_create(&t->model, ctx, o->config, &o->run.plan));
    t->module = ar_model_module(t->model);
    t->loss = ari_model_criterion(t->model);
    AR_TRY(ari_module_list(&t->params, &t->n, t->module));
    if (o->weights)
        return ari_model_set(t->model, ctx, o->weights, o->weights_user);
    return ar_model_fresh(t->model, ctx, o->run.seed);
}

static ar_status create_module(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o)
{
    AR_TRY(ari_module_build(o->module, o->run.seed, ctx, &t->module, &t->loss));
    return ari_module_list(&t->params, &t->n, t->module);
}

static ar_status create_parts(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o)
{
    AR_TRY((o->module ? create_module : create_model)(t, ctx, o));
    AR_TRY(create_ddp(t, ctx, o));
    for (size_t i = 0; o->module && i < t->n; i++)
        AR_TRY(ari_value_tap(t->params[i], ctx, 'i'));
    return create_optimizer(t, ctx, o);
}

ar_status ari_trainer_create(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o)
{
    *t = (ari_trainer){.step = {.parallel = o->run.parallel, .clip = o->run.clip, .forward_only = o->forward_only}};
    const ar_status st = create_parts(t, ctx, o);
    if (st != AR_OK)
        ari_trainer_destroy(t);
    return st;
}

void ari_trainer_destroy(ari_trainer *t)
{
    ar_optimizer_destroy(t->optimizer);
    ar_ddp_destroy(t->ddp);
    free(t->params);
    if (!t->model) {
        ar_loss_destroy(t->loss);
        ar_module_destroy(t->module);
    }
    ar_model_destroy(t->model);
    *t = (ari_trainer){0};
}

ar_status ari_trainer_step(ar_train_result *result, ari_trainer *t, ar_ctx *ctx, const ar_batch *global, uint32_t step)
{
    return ar_module_train_step(result, t->module, t->loss, ctx, t->optimizer, global, step, &t->step);
}

/* --- the ranks ---------------------------------------------------------------------------------------------------- */
const char *const ari_collective_kind[ARI_COLLECTIVE_KINDS] = {
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "exchange", "barrier"};

/* Ranks that share cores with a busy machine are late, not dead. */
#define LONGEST_WAIT_NS UINT64_C(60000000000)

typedef struct rank_result {
    float *loss; /* [max(steps, 1)] losses */
    uint64_t read, written;
    ari_routed routed;
    uint64_t calls[ARI_COLLECTIVE_KINDS];
    ari_dry_memory memory;
} rank_result;

typedef struct job {
    const ari_cluster_options *o;
    rank_result *rank; /* [world] */
} job;

/* Measures memory that outlives the step. */
static void measure_memory(const ar_ctx *ctx, const ari_trainer *t, ar_rank_memory *m)
{
    const ar_arith_ops *arith = ar_ctx_arith(ctx);
    for (size_t i = 0; i < t->n; i++) {
        const ar_param *p = t->params[i];
        const size_t local_count = ari_value_is_shared(p) ? p->share->count : ar_tensor_count(&p->value);
        m->weights += local_count * ar_dtype_bytes(p->value.dtype);
        m->operands += arith->operand_bytes(p);
        m->gradients += p->share ? arith->bucket_bytes(p->share->count, p->value.dtype) : arith->grad_bytes(p);
    }
    m->gradients += t->ddp ? ari_ddp_open_bytes(t->ddp) : 0;
    m->optimizer = t->optimizer ? ari_optimizer_bytes(t->optimizer) : 0;
    m->buckets = t->ddp ? ari_ddp_bytes(t->ddp) : 0;
}

static ar_status run_steps(ari_trainer *t, ar_ctx *ctx, const ari_cluster_options *o, rank_result *result)
{
    for (size_t i = 0; i < ari_run_steps(&o->run); i++) {
        ar_train_result step;
        AR_TRY(ari_trainer_step(&step, t, ctx, &o->batch[i], (uint32_t)i + 1));
        result->loss[i] = step.loss;
        result->memory.rank.stored = ari_larger(result->memory.rank.stored, step.stored_bytes);
    }
    measure_memory(ctx, t, &result->memory.rank);
    memcpy(result->memory.stored, ctx->stored, sizeof ctx->stored);
    return AR_OK;
}

static ar_status train_rank(ar_ctx *ctx, const ari_cluster_options *o, rank_result *result)
{
    ari_trainer t = {0};
    ari_use_names names;
    if (o->module)
        ari_use_names_begin(&names, ctx);
    ar_status st = ari_trainer_create(&t, ctx, o);
    if (st == AR_OK)
        st = run_steps(&t, ctx, o, result);
    ari_trainer_destroy(&t);
    if (o->module)
        ari_use_names_end(&names, ctx);
    return st;
}

/* is_isolated: a failure does not reach other ranks automatically, as it does in the simulated cluster. */
static ar_status run_rank(ar_comm *world, ar_device *device, const ari_cluster_options *o, bool is_isolated,
                          rank_result *result)
{
    const int r = ar_comm_rank(world);
    const bool compared = o->tap || o->run.fault || o->dry; /* a fault has to show in numbers, so dry runs, faults
                                                               and taps compare them */
    ar_ctx *ctx = NULL;
    ar_parallel_groups groups = {.tp = NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st,
              ari_groups_begin(&groups, world, &o->run.parallel, ari_fault_is(o->run.fault, "group_wrong_stride")));
    ar_ctx_options options = {.device = device,
                              .world = world,
                              .sp = o->run.parallel.sp,
                              .keep_gathered = o->run.parallel.keep_gathered,
                              .overlap = o->run.parallel.overlap,
                              .recompute = o->run.parallel.recompute,
                              .dropout = o->run.dropout,
                              .loss = o->run.loss,
                              .seed = o->run.seed,
                              .numerics = o->run.numerics,
                              .precision = o->run.precision,
                              .storage = o->run.storage,
                              .placements = compared ? AR_DECLARED_TRUSTED : o->run.placements,
                              .fault = o->run.fault,
                              .attempt = o->attempt,
                              .tap = o->tap,
                              .tap_user = o->tap_user ? o->tap_user[r] : NULL};
    ar_parallel_groups_use(&options, &groups);
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &options));
    ctx->routes = o->routes;
    if (o->dry && o->ledger)
        ari_ledger_use(ctx, o->ledger);
    AR_TRY_TO(done, st, o->body ? o->body(o->body_user, ctx) : train_rank(ctx, o, result));
    ari_ctx_counted(ctx, &result->read, &result->written);
    result->routed = ctx->routed;
    for (int k = 0; k < ARI_COLLECTIVE_KINDS; k++)
        result->calls[k] = ari_ctx_calls(ctx, ari_collective_kind[k]);
    size_t current_bytes = 0;
    ar_ctx_memory(ctx, &current_bytes, &result->memory.rank.peak);
done:
    if (st != AR_OK && is_isolated)
        st = ari_process_fail(world, st);
    ar_ctx_destroy(ctx);
    ar_parallel_groups_end(&groups);
    return st;
}

/* A rank of a transport's. */
static ar_status rank_apart(ar_comm *world, ar_device *device, void *arg)
{
    const job *j = arg;
    return run_rank(world, device, j->o, true, &j->rank[ar_comm_rank(world)]);
}

static int threads_of(const ari_cluster_options *o, int ranks)
{
    return ari_core_budget(ari_threads(o->run.threads), ranks);
}

static ar_status rank_main(ar_comm *world, void *arg)
{
    const job *j = arg;
    ARI_OWNED_BY(ar_device_destroy) ar_device *device = NULL;
    AR_TRY(ar_device_create(&device, &j->o->run.device, threads_of(j->o, ar_comm_size(world))));
    return run_rank(world, device, j->o, false, &j->rank[ar_comm_rank(world)]);
}

/* Runs the ranks as threads that NCCL connects, with one GPU each. Each collective's arguments are compared before data
 * move, except when only a step's speed counts. */
static ar_status run_nccl_threads(job *j, int ranks)
{
    const ar_sim_options *sim = &j->o->run.sim;
    const ar_process_options o = {.transport = AR_TRANSPORT_NCCL,
                                  .timeout_ns = sim->timeout_ns ? sim->timeout_ns : LONGEST_WAIT_NS,
                                  .check_calls = j->o->tap != NULL};
    return ari_process_run_threads(ranks, &o, &j->o->run.device, threads_of(j->o, ranks), rank_apart, j);
}

static ar_status run_threads(ari_cluster_result *result, job *j, int ranks)
{
    if (ari_run_by_nccl(&j->o->run, ranks))
        return run_nccl_threads(j, ranks);
    ar_sim_options sim = j->o->run.sim;
    ARI_OWNED_BY(ar_trace_destroy) ar_trace *owned_trace = NULL;
    sim.timeout_ns = sim.timeout_ns ? sim.timeout_ns : LONGEST_WAIT_NS;
    /* Bytes are counted and predicted per rank, so the last rank to arrive must not move the data of all ranks. */
    sim.algorithm = sim.algorithm == AR_SIM_AUTO ? AR_SIM_DIRECT : sim.algorithm;
    if (sim.cluster && !sim.trace) {
        AR_TRY(ar_trace_create(&owned_trace));
        sim.trace = owned_trace;
    }
    AR_TRY(ar_sim_run(ranks, &sim, rank_main, j, result->reports));
    if (!sim.cluster)
        return AR_OK;
    AR_TRY(ar_trace_summarise(&result->predicted, sim.trace, AR_TRACE_VIRTUAL));
    result->has_predicted = true;
    return AR_OK;
}

/* --- ranks as processes ------------------------------------------------------------------------------------------- */

static ar_status check_processes(const ari_cluster_options *o, int ranks)
{
    const ar_sim_options *sim = &o->run.sim;
    if (ranks != ari_process_size(o->run.process))
        return ar_error_set(AR_ERR_ARG, "a layout of %d ranks on %d processes: as many are expected", ranks,
                            ari_process_size(o->run.process));
    if (sim->fault_count > 0 || sim->verify_transfers || sim->explore || sim->trace || sim->cluster)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "faults and checks of transfers, schedules, traces and virtual time are "
                            "the simulated cluster's: ranks are processes here");
    return AR_OK;
}

static ar_status take_result(void *user, int rank, ari_bytes *b)
{
    job *j = user;
    float *loss = j->rank[rank].loss;
    AR_TRY(ari_bytes_take(b, &j->rank[rank], sizeof *j->rank));
    j->rank[rank].loss = loss;
    return ari_bytes_take(b, loss, ari_run_steps(&j->o->run) * sizeof *loss);
}

/* Sends every process's result to process 0, and all results to every process. */
static ar_status share_results(job *j, int ranks, float *losses)
{
    const size_t steps = ari_run_steps(&j->o->run);
    const rank_result *local_result = &j->rank[ar_process_rank(j->o->run.process)];
    ARI_ENDED(ari_bytes_fini) ari_bytes bytes = {.count = 0};
    ar_status st = ari_bytes_put(&bytes, local_result, sizeof *local_result);
    if (st == AR_OK)
        st = ari_bytes_put(&bytes, local_result->loss, steps * sizeof *local_result->loss);
    st = ari_process_agree(j->o->run.process, st);
    if (st == AR_OK)
        st = ari_process_collect(j->o->run.process, &bytes, take_result, j);
    AR_TRY(st);
    AR_TRY(ari_process_broadcast(j->o->run.process, losses, (size_t)ranks * steps * sizeof *losses));
    AR_TRY(ari_process_broadcast(j->o->run.process, j->rank, (size_t)ranks * sizeof *j->rank));
    for (int r = 0; r < ranks; r++)
        j->rank[r].loss = losses + (size_t)r * steps;
    return AR_OK;
}

static ar_status run_processes(job *j, int ranks, float *losses)
{
    AR_TRY(check_processes(j->o, ranks));
    /* A process runs one rank, so it may use all its threads. Without --threads other ranks may share the cores. */
    const int threads = j->o->run.threads > 0 ? j->o->run.threads : threads_of(j->o, ranks);
    AR_TRY(ari_process_run(j->o->run.process, &j->o->run.device, threads, rank_apart, j));
    return share_results(j, ranks, losses);
}

/* --- a rank on nothing -------------------------------------------------------------------------------------------- */

/* Listener that ignores events. It is installed where another run has a listener, because the memory prepared for a tap
 * counts. */
static ar_status ignore(void *user, const ar_tap_event *event)
{
    (void)user, (void)event;
    return AR_OK;
}

ar_status ari_cluster_dry(ari_dry_memory *m, const ari_cluster_options *o, int rank, const ar_device *like)
{
    ari_cluster_options dry_options = *o;
    ARI_OWNED float *losses = NULL;
    ARI_OWNED_BY(ar_comm_destroy) ar_comm *world = NULL;
    ARI_OWNED_BY(ar_device_destroy) ar_device *device = NULL;
    dry_options.run.steps = o->routes || o->module || o->ledger ? o->run.steps : o->run.steps > 0;
    dry_options.run.fault = o->faulty ? o->run.fault : NULL;
    dry_options.run.process = NULL;
    dry_options.dry = true;
    dry_options.weights = NULL;
    if (!o->dry) {
        dry_options.tap = o->tap ? ignore : NULL;
        dry_options.tap_user = NULL;
    }
    AR_TRY(ARI_ALLOC(&losses, ari_run_steps(&dry_options.run), "losses"));
    rank_result result = {.loss = losses};
    AR_TRY(ari_dry_comm_create(&world, rank, ar_parallel_world(&o->run.parallel), o->ledger));
    AR_TRY(ari_dry_device_create(&device, like, o->ledger));
    AR_TRY(run_rank(world, device, &dry_options, false, &result));
    *m = result.memory;
    m->bytes = result.read + result.written;
    m->routed = result.routed;
    return AR_OK;
}

/* --- all ranks ---------------------------------------------------------------------------------------------------- */

static void collect(ari_cluster_result *result, ar_rank_memory *memory, const rank_result *rank, size_t n)
{
    for (size_t r = 0; r < n; r++) {
        const uint64_t moved = rank[r].read + rank[r].written;
        result->bytes += moved;
        result->routed.rows += rank[r].routed.rows;
        result->routed.gradients += rank[r].routed.gradients;
        result->bytes_per_rank_max = moved > result->bytes_per_rank_max ? moved : result->bytes_per_rank_max;
        if (memory)
            memory[r] = rank[r].memory.rank;
    }
    memcpy(result->calls, rank[0].calls, sizeof result->calls);
}

/* Adds the pipeline stages to the message, because a rank's number does not show its stage. */
static ar_status name_stages(ar_status st, const ari_cluster_options *o)
{
    char text[8192];
    ari_name_ranks(text, sizeof text, ar_error_message(), &o->run.parallel, o->config ? o->config->layers : 0);
    return ar_error_set(st, "%s", text);
}

ar_status ari_cluster_run(ari_cluster_result *result, const ari_cluster_options *o)
{
    *result = (ari_cluster_result){0};
    const size_t n = (size_t)ar_parallel_world(&o->run.parallel), steps = ari_run_steps(&o->run);
    ARI_OWNED float *losses = NULL; /* [n, steps] losses */
    ARI_OWNED rank_result *ranks = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&ranks, n, "results of the ranks"));
    AR_TRY(ARI_ALLOC_ZERO(&losses, n * steps, "losses"));
    for (size_t r = 0; r < n; r++)
        ranks[r].loss = losses + r * steps;
    AR_TRY(ARI_ALLOC_ZERO(&result->reports, n, "reports of the ranks"));
    job j = {.o = o, .rank = ranks};
    const uint64_t start = ari_now_ns();
    const ar_status st = o->run.process ? run_processes(&j, (int)n, losses) : run_threads(result, &j, (int)n);
    result->seconds = (double)(ari_now_ns() - start) * 1e-9;
    /* messages of NCCL and MPI contain the table of ranks, and nothing else is known about the other ranks */
    if (st == AR_OK || o->run.process || ari_run_by_nccl(&o->run, (int)n)) {
        free(result->reports);
        result->reports = NULL;
    }
    if (st != AR_OK)
        return name_stages(st, o);
    collect(result, o->memory, ranks, n);
    ARI_GIVE(&result->loss, losses);
    return AR_OK;
}
