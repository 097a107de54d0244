/* SPDX-License-Identifier: Apache-2.0 */
/* Mean squared error. */
#include <stdlib.h>

#include "anyrank/loss.h"
#include "ref/core/size.h"
#include "ref/layers/parts.h"

typedef struct squared_error {
    char name[112]; /* of the output */
} squared_error;

static size_t targets(const void *self, const ar_batch *batch)
{
    (void)self;
    return batch->target ? batch->batch * batch->target_width : 0;
}

/* difference = y - t, terms = its squares. */
static ar_status forward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                         const ar_batch *batch)
{
    const squared_error *s = self;
    const size_t n = ar_tensor_count(y);
    ar_tensor minus_t, difference, terms;
    if (y->ndim < 1 || !ar_tensor_is_contiguous(y) || y->shape[0] != batch->batch || n != targets(s, batch))
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: %zu elements (%d dimensions) and %zu targets of %zu samples, expected one for each",
                            s->name, n, y->ndim, targets(s, batch), batch->batch);
    AR_TRY(ar_like(ctx, &minus_t, y));
    AR_TRY(ar_ctx_upload(ctx, &minus_t, batch->target));
    AR_TRY(ctx->device->ops->scale(ctx->device, ctx->queue, minus_t.data, ar_const(minus_t.data), -1.0f, n));
    AR_TRY(ar_add(ctx, &difference, y, &minus_t));
    AR_TRY(ar_mul(ctx, &terms, &difference, &difference));
    AR_TRY(ar_loss_add(loss, ctx, &terms));
    ar_ctx_release(ctx, &terms);
    ar_ctx_release(ctx, &minus_t);
    return ar_saved_push(saved, self, 0, &difference);
}

static ar_status backward(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch,
                          double t)
{
    (void)loss, (void)batch;
    ar_tensor difference;
    AR_TRY(ar_saved_pop(saved, self, 0, &difference));
    AR_TRY(ar_like(ctx, dy, &difference));
    AR_TRY(ctx->device->ops->scale(ctx->device, ctx->queue, dy->data, ar_const(difference.data),
                                   t > 0.0 ? (float)(2.0 / t) : 0.0f, ar_tensor_count(dy)));
    return ar_tap_value(ctx, ((const squared_error *)self)->name, 'b', dy, AR_HELD_WHOLE);
}

ar_status ar_squared_error_create(ar_loss **gives, ar_ctx *ctx, const char *name)
{
    static const ar_loss_ops ops = {
        .kind = "squared_error", .targets = targets, .forward = forward, .backward = backward, .destroy = free};
    squared_error *s = NULL;
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, name));
    const ar_status st = ari_path(s->name, sizeof s->name, name, "output");
    if (st != AR_OK) {
        free(s);
        return st;
    }
    return ar_loss_create(gives, ctx, name, &ops, s);
}
