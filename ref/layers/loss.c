/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/loss.h"

#include "ref/layers/parts.h"
#include "ref/numerics/bits.h"

static const size_t one = 1;

ar_status ari_loss_init(ari_loss *l, ar_ctx *ctx, bool spread)
{
    ar_layout layout;
    AR_TRY(ar_layout_replicate(&layout, 1, &one, ar_comm_rank(ctx->tp), ar_comm_size(ctx->tp)));
    AR_TRY(ar_param_init(&l->sum, ctx, "loss", &layout, false));
    l->sum.spread = spread;
    return AR_OK;
}

void ari_loss_fini(ari_loss *l)
{
    ar_param_fini(&l->sum);
}

ar_status ari_loss_zero(ari_loss *l, ar_ctx *ctx)
{
    return ar_param_zero_grad(&l->sum, ctx);
}

ar_status ari_loss_add(ari_loss *l, ar_ctx *ctx, const ar_tensor *x)
{
    const size_t column[2] = {ar_tensor_count(x), 1};
    ar_tensor terms;
    AR_TRY(ar_tensor_view(&terms, AR_F32, 2, column, x->data));
    return ctx->arith->grad_rows(ctx, &l->sum, &terms, (ar_cbuf){NULL});
}

ar_status ari_loss_value(ari_loss *l, ar_ctx *ctx, float *loss, double divisor)
{
    ar_param *sum = &l->sum;
    ar_tensor value;
    float total = 0.0f;
    if (sum->spread)
        AR_TRY(ctx->arith->grads_reduce(ctx, &sum, 1, ctx->tp, "loss"));
    AR_TRY(ctx->arith->grads_reduce(ctx, &sum, 1, ctx->dp, "loss"));
    sum->has_grad = true; /* also where this rank added nothing: there is something to make zero now */
    AR_TRY(ar_ctx_tensor(ctx, &value, AR_F32, 1, &one));
    AR_TRY(ctx->arith->grad_value(ctx, &value, sum));
    AR_TRY(ar_ctx_download(ctx, &total, &value));
    *loss = divisor > 0.0 ? (float)((double)total / divisor) : ari_nan32();
    AR_TRY(ar_ctx_upload(ctx, &value, loss));
    value.ndim = 0;
    AR_TRY(ari_tap_world(ctx, "loss", 'f', &value));
    ar_ctx_release(ctx, &value);
    return AR_OK;
}
