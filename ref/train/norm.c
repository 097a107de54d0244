/* SPDX-License-Identifier: Apache-2.0 */
/* The gradient norm: sums of integers in either arithmetic, so that no layout changes it. */
#include "anyrank/train.h"
#include "ref/core/context.h"
#include "ref/numerics/optimizer.h"

/* What this rank's gradients add up to, on the device. */
typedef struct norm_sum {
    ar_tensor exponent; /* int32 [1]: the largest */
    ar_tensor squares;  /* int64 [2] */
} norm_sum;

typedef ar_status (*gradient_fn)(const norm_sum *s, ar_ctx *ctx, const ar_tensor *g);

static ar_status raise_exponent(const norm_sum *s, ar_ctx *ctx, const ar_tensor *g)
{
    const size_t shape[2] = {1, ar_tensor_count(g)};
    ar_tensor row;
    AR_TRY(ar_tensor_view(&row, AR_F32, 2, shape, g->data));
    return ctx->device->ops->row_exponents(ctx->device, ctx->queue, s->exponent.data, &row, (ar_cbuf){NULL}, +1, true);
}

static ar_status add_squares(const norm_sum *s, ar_ctx *ctx, const ar_tensor *g)
{
    return ctx->device->ops->sum_squares(ctx->device, ctx->queue, s->squares.data, ar_const(g->data),
                                         ar_const(s->exponent.data), ar_tensor_count(g));
}

/* Whether this rank counts a parameter's elements: of ranks that hold the same ones, the first does. */
static bool counts(const ar_param *p, const ar_ctx *ctx)
{
    return p->requires_grad && (p->layout.replica == 0 || ar_faulty(ctx, AR_FAULT_gradnorm_counts_replicas));
}

static ar_status for_each_gradient(const norm_sum *s, ar_ctx *ctx, ar_param *const *params, size_t n, gradient_fn f)
{
    for (size_t i = 0; i < n; i++) {
        const ar_param *p = params[i];
        ar_tensor g;
        if (!counts(p, ctx))
            continue;
        AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
        AR_TRY(ar_param_grad_value(p, ctx, &g));
        AR_TRY(f(s, ctx, &g));
        ar_ctx_release(ctx, &g);
    }
    return AR_OK;
}

ar_status ar_gradient_norm(float *norm, ar_ctx *ctx, ar_param *const *params, size_t n)
{
    const bool local = ar_faulty(ctx, AR_FAULT_gradnorm_local_clip);
    const size_t one = 1, two = 2;
    int32_t e = ARI_EXP_ZERO;
    int64_t squares[2] = {0, 0};
    norm_sum s;
    AR_TRY(ar_ctx_tensor(ctx, &s.exponent, AR_I32, 1, &one));
    AR_TRY(ar_ctx_tensor(ctx, &s.squares, AR_I64, 1, &two));
    const ar_buf exponent = s.exponent.data, sums = s.squares.data;
    AR_TRY(ar_ctx_upload(ctx, &s.exponent, &e));
    AR_TRY(ar_ctx_upload(ctx, &s.squares, squares));
    AR_TRY(for_each_gradient(&s, ctx, params, n, raise_exponent));
    if (!local)
        AR_TRY(ar_comm_all_reduce(ctx->tp, ctx->queue, exponent, ar_const(exponent), 1, AR_I32, AR_MAX, "grad_norm"));
    AR_TRY(for_each_gradient(&s, ctx, params, n, add_squares));
    if (!local)
        AR_TRY(ar_comm_all_reduce(ctx->tp, ctx->queue, sums, ar_const(sums), 2, AR_I64, AR_SUM, "grad_norm"));
    AR_TRY(ar_ctx_download(ctx, &e, &s.exponent));
    AR_TRY(ar_ctx_download(ctx, squares, &s.squares));
    ar_ctx_release(ctx, &s.squares);
    ar_ctx_release(ctx, &s.exponent);
    *norm = ari_norm_value(squares[0], squares[1], e);
    return AR_OK;
}
