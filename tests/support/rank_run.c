/* SPDX-License-Identifier: Apache-2.0 */
#include "support/rank_run.h"

#include "anyrank/parallel.h"
#include "ref/core/size.h"

typedef struct job {
    const rank_run_options *o;
    rank_fn fn;
    void *user;
} job;

static ar_status rank_main(ar_comm *world, void *arg)
{
    const job *j = arg;
    const int r = ar_comm_rank(world);
    const int others = ari_at_least_one(j->o->dp) * ari_at_least_one(j->o->cp) * ari_at_least_one(j->o->pp);
    const ar_parallel layout = {.tp = j->o->ranks / others,
                                .dp = j->o->dp,
                                .dp_replicate = j->o->dp_replicate,
                                .cp = j->o->cp,
                                .cp_inner = j->o->cp_inner,
                                .zigzag = j->o->zigzag,
                                .pp = j->o->pp,
                                .virtual_stages = j->o->virtual_stages};
    ar_device *device = NULL;
    ar_parallel_groups groups = {.tp = NULL};
    ar_ctx *ctx = NULL;
    ar_status st = AR_OK;
    if (others > 1)
        AR_TRY_TO(done, st, ar_parallel_groups_begin(&groups, world, &layout));
    AR_TRY_TO(done, st, ar_device_create(&device, &j->o->device, 1));
    ar_ctx_options options = {.device = device,
                              .world = world,
                              .sp = j->o->sp,
                              .keep_gathered = j->o->keep_gathered,
                              .overlap = j->o->overlap,
                              .dropout = j->o->dropout,
                              .seed = j->o->seed,
                              .loss = j->o->loss,
                              .numerics = j->o->numerics,
                              .precision = j->o->precision,
                              .storage = j->o->storage,
                              .placements = j->o->placements,
                              .fault = j->o->fault,
                              .tap = j->o->tap,
                              .tap_user = j->o->tap_user ? j->o->tap_user[r] : NULL};
    ar_parallel_groups_use(&options, &groups);
    options.tp = others > 1 ? groups.tp : world;
    AR_TRY_TO(done, st, ar_ctx_create(&ctx, &options));
    AR_TRY_TO(done, st, j->fn(ctx, j->user));
done:
    ar_ctx_destroy(ctx);
    ar_device_destroy(device);
    ar_parallel_groups_end(&groups);
    return st;
}

ar_status rank_run(const rank_run_options *o, rank_fn fn, void *user)
{
    job j = {o, fn, user};
    const ar_sim_options options = {.algorithm = o->algorithm,
                                    .cluster = o->cluster,
                                    .explore = o->schedule != 0,
                                    .schedule_seed = o->schedule,
                                    .timeout_ns = 60000000000u}; /* ranks may be slow */
    ar_cpu_select_kernels();
    return ar_sim_run(o->ranks, &options, rank_main, &j, NULL);
}

size_t rank_of(const ar_ctx *ctx)
{
    return (size_t)ar_comm_rank(ar_ctx_tp(ctx));
}

size_t ranks_of(const ar_ctx *ctx)
{
    return (size_t)ar_comm_size(ar_ctx_tp(ctx));
}

ar_status rank_upload(ar_ctx *ctx, ar_tensor *t, int ndim, const size_t *shape, const float *values)
{
    AR_TRY(ar_ctx_tensor(ctx, t, AR_F32, ndim, shape));
    return ar_ctx_upload(ctx, t, values);
}

ar_status rank_add_gradient(ar_ctx *ctx, ar_param *p, const float *values)
{
    const ar_tensor matrix = ar_param_matrix(p);
    const size_t columns = matrix.shape[matrix.ndim - 1], shape[2] = {ar_tensor_count(&p->value) / columns, columns};
    ar_tensor terms;
    AR_TRY(rank_upload(ctx, &terms, 2, shape, values));
    AR_TRY(ar_ctx_arith(ctx)->grad_rows(ctx, p, &terms, (ar_cbuf){NULL}));
    ar_ctx_release(ctx, &terms);
    return AR_OK;
}

ar_status rank_read_gradient(ar_ctx *ctx, float *out, const ar_param *p)
{
    ar_tensor g;
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ar_param_grad_value(p, ctx, &g));
    AR_TRY(ar_ctx_download(ctx, out, &g));
    ar_ctx_release(ctx, &g);
    return AR_OK;
}
