/* SPDX-License-Identifier: Apache-2.0 */
#include "support/rank_run.h"
#include "anyrank/context.h"
#include "anyrank/param.h"

#include "ref/core/param_private.h"
#include "support/scoped.h"
#include "verify/run/cluster_run.h"

typedef struct job {
    rank_fn fn;
    void *user;
} job;

static ar_status rank_main(void *arg, ar_ctx *ctx)
{
    const job *j = arg;
    return j->fn(ctx, j->user);
}

ar_status rank_run_heard(const ar_run *run, ar_tap_fn tap, void **tap_user, rank_fn fn, void *user)
{
    job j = {fn, user};
    ari_cluster_options o = {.run = *run, .tap = tap, .tap_user = tap_user, .body = rank_main, .body_user = &j};
    SCOPED(ari_cluster_result_fini) ari_cluster_result result = {0};
    o.run.threads = 1;
    return ari_cluster_run(&result, &o);
}

ar_status rank_nothing(ar_ctx *ctx, void *user)
{
    (void)ctx, (void)user;
    return AR_OK;
}

ar_status rank_run(const ar_run *run, rank_fn fn, void *user)
{
    return rank_run_heard(run, NULL, NULL, fn, user);
}

size_t rank_of(const ar_ctx *ctx)
{
    return (size_t)ar_comm_rank(ar_ctx_tp(ctx));
}

size_t ranks_of(const ar_ctx *ctx)
{
    return (size_t)ar_comm_size(ar_ctx_tp(ctx));
}

void rank_params_begin(rank_params *p)
{
    *p = (rank_params){.all = {NULL}};
    for (size_t i = 0; i < RANK_PARAMS; i++)
        p->all[i] = &p->at[i];
}

void rank_params_end(rank_params *p)
{
    for (size_t i = 0; i < RANK_PARAMS; i++)
        ar_param_fini(&p->at[i]);
}

ar_status rank_upload(ar_ctx *ctx, ar_tensor *t, int ndim, const size_t *shape, const float *values)
{
    AR_TRY(ar_ctx_tensor(ctx, t, AR_F32, ndim, shape));
    return ar_ctx_upload(ctx, t, values);
}

ar_status rank_add_gradient(ar_ctx *ctx, ar_param *p, const float *values)
{
    const ar_tensor matrix = ari_param_matrix(p);
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
