/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/module_loss.h"

#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/core/span.h"
#include "ref/layers/loss.h"
#include "ref/layers/parts.h"

struct ar_loss {
    const ar_loss_ops *ops;
    void *self; /* owned */
    char name[96];
    ari_loss sum;
    bool subtract;
};

ar_status ar_loss_create(ar_loss **gives, ar_ctx *ctx, const char *name, const ar_loss_ops *ops, void *self)
{
    ar_loss *l = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ari_alloc_zero((void **)&l, 1, sizeof *l, name));
    if (!ops->targets || !ops->forward || !ops->backward || !ops->destroy)
        AR_TRY_TO(failed, st, ar_error_set(AR_ERR_ARG, "%s: a loss needs all its functions", name));
    l->ops = ops;
    AR_TRY_TO(failed, st, ari_path(l->name, sizeof l->name, name, NULL));
    AR_TRY_TO(failed, st, ari_loss_init(&l->sum, ctx, false));
    l->self = self;
    *gives = l;
    return AR_OK;
failed:
    free(l);
    if (ops->destroy)
        ops->destroy(self);
    return st;
}

void ar_loss_destroy(ar_loss *loss)
{
    if (!loss)
        return;
    loss->ops->destroy(loss->self);
    ari_loss_fini(&loss->sum);
    free(loss);
}

size_t ar_loss_targets(const ar_loss *loss, const ar_batch *batch)
{
    return loss->ops->targets(loss->self, batch);
}

ar_status ar_loss_forward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y, const ar_batch *batch)
{
    ar_ctx_place(ctx, batch);
    ari_span_begin("%s:fwd", loss->name);
    return ari_span_end(loss->ops->forward(loss->self, loss, ctx, saved, y, batch));
}

ar_status ar_loss_backward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch)
{
    const size_t t = batch->global_batch > 0 ? batch->targets : ar_loss_targets(loss, batch);
    ar_ctx_place(ctx, batch);
    ari_span_begin("%s:bwd", loss->name);
    return ari_span_end(loss->ops->backward(loss->self, loss, ctx, saved, dy, batch, (double)t / ctx->loss_scale));
}

ar_status ar_loss_value(ar_loss *loss, ar_ctx *ctx, float *value, size_t t)
{
    return ari_loss_value(&loss->sum, ctx, value, (double)t);
}

ar_status ar_loss_zero(ar_loss *loss, ar_ctx *ctx)
{
    return ari_loss_zero(&loss->sum, ctx);
}

void ari_loss_subtract(ar_loss *loss, bool subtract)
{
    loss->subtract = subtract;
}

ar_status ar_loss_add(ar_loss *loss, ar_ctx *ctx, const ar_tensor *terms)
{
    ar_tensor negated;
    if (!ar_tensor_is_contiguous(terms) || terms->dtype != AR_F32)
        return ar_error_set(AR_ERR_SHAPE, "%s: terms are contiguous fp32", loss->name);
    if (!loss->subtract)
        return ari_loss_add(&loss->sum, ctx, terms);
    AR_TRY(ar_like(ctx, &negated, terms));
    AR_TRY(ctx->device->ops->scale(ctx->device, ctx->queue, negated.data, ar_const(terms->data), -1.0f,
                                   ar_tensor_count(terms)));
    AR_TRY(ari_loss_add(&loss->sum, ctx, &negated));
    ar_ctx_release(ctx, &negated);
    return AR_OK;
}
