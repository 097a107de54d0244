/* SPDX-License-Identifier: Apache-2.0 */
/* One training step on one rank. */
#include <stdlib.h>

#include "anyrank/train.h"
#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/models/model.h"

/* T over all micro-batches and data-parallel ranks, known before the first backward pass. */
static ar_status count_targets(size_t *targets, ar_ctx *ctx, const ar_batch *micro, size_t n)
{
    const size_t one = 1;
    int64_t count = 0;
    ar_tensor t;
    for (size_t i = 0; i < n; i++)
        count += (int64_t)ar_batch_targets(&micro[i]);
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_I64, 1, &one));
    AR_TRY(ar_ctx_upload(ctx, &t, &count));
    AR_TRY(ar_comm_all_reduce(ctx->dp, ctx->queue, t.data, ar_const(t.data), 1, AR_I64, AR_SUM, "targets"));
    AR_TRY(ar_ctx_download(ctx, &count, &t));
    ar_ctx_release(ctx, &t);
    *targets = (size_t)count;
    return AR_OK;
}

/* This rank's micro-batches that hold samples. Gives; free(). */
static ar_status own_batches(ar_batch **gives, size_t *n, const ar_ctx *ctx, const ar_batch *global,
                             const ar_parallel *p)
{
    const int pieces = p->micro_batches > 1 ? p->micro_batches : 1;
    ar_batch *micro = NULL;
    AR_TRY(ari_alloc((void **)&micro, (size_t)pieces, sizeof *micro, "micro-batches"));
    *n = 0;
    for (int i = 0; i < pieces; i++) {
        ar_parallel_slice(&micro[*n], p, global, ar_comm_rank(ctx->dp), i);
        *n += micro[*n].batch > 0;
    }
    *gives = micro;
    return AR_OK;
}

static ar_status forward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch, ar_train_result *result)
{
    size_t now = 0, peak = 0;
    AR_TRY(ar_model_forward(m, ctx, saved, batch));
    ar_ctx_memory(ctx, &now, &peak);
    result->stored_bytes = now > result->stored_bytes ? now : result->stored_bytes;
    return AR_OK;
}

/* Each micro-batch forward and backward, its memory given back before the next; or all forward, then all backward. */
static ar_status run_batches(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *micro, size_t n,
                             const ar_train_options *o, ar_train_result *result)
{
    const bool all_first = o->parallel.forward_first;
    for (size_t i = 0; i < n; i++) {
        AR_TRY(forward(m, ctx, saved, &micro[i], result));
        if (!o->forward_only && !all_first)
            AR_TRY(ar_model_backward(m, ctx, saved, &micro[i]));
        if (!all_first) {
            ar_saved_clear(saved);
            ar_ctx_end_step(ctx);
        }
    }
    for (size_t i = n; all_first && !o->forward_only && i-- > 0;)
        AR_TRY(ar_model_backward(m, ctx, saved, &micro[i]));
    return AR_OK;
}

ar_status ar_train_step(ar_train_result *result, ar_model *m, ar_ctx *ctx, ar_optimizer *optimizer,
                        const ar_batch *global, uint32_t step, const ar_train_options *o)
{
    ar_batch *micro = NULL;
    ar_saved *saved = NULL;
    size_t n = 0;
    ar_status st = AR_OK;
    *result = (ar_train_result){0};
    (void)optimizer;
    ar_ctx_begin_step(ctx, step);
    AR_TRY_TO(done, st, own_batches(&micro, &n, ctx, global, &o->parallel));
    AR_TRY_TO(done, st, ar_saved_create(&saved));
    AR_TRY_TO(done, st, count_targets(&result->targets, ctx, micro, n));
    for (size_t i = 0; i < n; i++)
        micro[i].targets = result->targets;
    AR_TRY_TO(done, st, ar_model_zero_grad(m, ctx));
    AR_TRY_TO(done, st, run_batches(m, ctx, saved, micro, n, o, result));
    AR_TRY_TO(done, st, ar_model_loss(m, ctx, &result->loss, result->targets));
    if (!o->forward_only)
        AR_TRY_TO(done, st, ar_model_reduce_grads(m, ctx));
    ar_ctx_end_step(ctx);
done:
    ar_saved_destroy(saved);
    free(micro);
    return st;
}
