/* SPDX-License-Identifier: Apache-2.0 */
/* Effects of the injected faults of gradients that are sums of several terms. */

#include "ref/core/tensor_private.h"
#include "ref/layers/faults.h"

/* Creates int64 [n] on the device with 0, 1, .. n - 1. */
static ar_status every_row(ar_ctx *ctx, ar_tensor *rows, size_t n)
{
    ARI_OWNED int64_t *host = NULL;
    AR_TRY(ARI_ALLOC(&host, n, "rows of a gradient"));
    for (size_t i = 0; i < n; i++)
        host[i] = (int64_t)i;
    return ari_numbers(ctx, rows, AR_I64, n, host);
}

/* grad(p) += g, fp32, of the shape of the layer's matrix, or of p. */
static ar_status add_gradient(ar_ctx *ctx, ar_param *p, const ar_tensor *g)
{
    ar_tensor rows, terms = *g;
    if (g->ndim < 2) {
        const size_t shape[2] = {1, ar_tensor_count(g)};
        AR_TRY(ar_tensor_view(&terms, AR_F32, 2, shape, g->data));
        return ctx->arith->grad_rows(ctx, p, &terms, (ar_cbuf){NULL});
    }
    AR_TRY(every_row(ctx, &rows, g->shape[0]));
    AR_TRY(ctx->arith->grad_rows(ctx, p, &terms, ar_const(rows.data)));
    ar_ctx_release(ctx, &rows);
    return AR_OK;
}

/* Fault: adds terms one at a time in an order that changes from run to run, as atomic additions do. */
ar_status ari_fault_gradient_as_it_comes(ar_ctx *ctx, ar_param *p, const ar_tensor *dy, const ar_tensor *x)
{
    const size_t tokens = x->shape[0], shape[2] = {dy->shape[1], x->shape[1]};
    const size_t first_token = 1 + ctx->attempt + (size_t)ar_comm_rank(ctx->world);
    const ar_tensor dy_t = ari_tensor_transposed(dy), x_t = ari_tensor_transposed(x);
    ar_tensor sum;
    AR_TRY(ar_ctx_tensor(ctx, &sum, AR_F32, 2, shape));
    AR_TRY(ARI_KERNEL(ctx, zero, sum.data, ar_tensor_count(&sum) * sizeof(float)));
    for (size_t i = 0; i < tokens; i++) {
        const size_t t = (first_token + i) % tokens;
        const ar_tensor a = ar_tensor_slice(&dy_t, 1, t, 1), b = ar_tensor_slice(&x_t, 1, t, 1);
        AR_TRY(ARI_KERNEL(ctx, gemm_f32, &sum, &a, &b, true, AR_PRECISION_F32));
    }
    AR_TRY(add_gradient(ctx, p, &sum));
    ar_ctx_release(ctx, &sum);
    return AR_OK;
}

ar_status ari_fault_scale_gradient(ar_ctx *ctx, ar_param *p, float factor)
{
    ar_tensor g;
    if (!p->has_grad)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ctx->arith->grad_value(ctx, &g, p));
    AR_TRY(ARI_KERNEL(ctx, scale, &g, &g, factor));
    AR_TRY(ctx->arith->grad_zero(ctx, p));
    const ar_tensor matrix = p->transposed ? ari_tensor_transposed(&g) : g;
    AR_TRY(add_gradient(ctx, p, &matrix));
    ar_ctx_release(ctx, &g);
    return AR_OK;
}
