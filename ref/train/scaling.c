/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/step.h"

#include <math.h>

#include "anyrank/arith.h"
#include "ref/layers/parts.h"

/* Its reciprocal is a normal fp32 number, as is that of 1, below which nothing falls. */
#define LARGEST_SCALE 0x1p126

ar_loss_scaling ar_loss_scaling_defaults(bool dynamic)
{
    return (ar_loss_scaling){.dynamic = dynamic, .growth = 2.0, .backoff = 0.5, .interval = 2000, .scale = 65536.0};
}

static ar_status refuse_scaling(const char *option, double value, const char *range)
{
    return ar_error_set(AR_ERR_ARG, "loss scaling: %s is %g, expected %s", option, value, range);
}

ar_status ar_loss_scaling_check(const ar_loss_scaling *s)
{
    if (!(s->scale >= 1.0 && s->scale <= LARGEST_SCALE))
        return refuse_scaling("scale", s->scale, "a number from 1 to 2^126");
    if (!s->dynamic)
        return AR_OK;
    if (!(s->growth > 1.0 && isfinite(s->growth)))
        return refuse_scaling("growth", s->growth, "a finite number above 1");
    if (!(s->backoff > 0.0 && s->backoff < 1.0))
        return refuse_scaling("backoff", s->backoff, "a number between 0 and 1");
    return s->interval > 0 ? AR_OK : refuse_scaling("interval", 0.0, "at least 1 step");
}

ar_status ari_scaling_check(const ar_loss_scaling *s, const ar_ctx *ctx)
{
    if (ctx->arith == ar_arith_exact(ctx->arith->precision))
        return ar_error_set(AR_ERR_ARG,
                            "loss scaling in exact numerics: its gradients are sums of integers that lose "
                            "nothing however small they are, and its baseline scales none; give native numerics");
    return ar_loss_scaling_check(s);
}

void ari_scaling_unscale(const ar_loss_scaling *s, ar_param *const *params, size_t n)
{
    const float inverse = (float)(1.0 / s->scale);
    for (size_t i = 0; i < n; i++)
        params[i]->grad_scale *= inverse;
}

ar_status ari_scaling_finite(bool *finite, ar_ctx *ctx, float norm)
{
    int32_t wrong = !isfinite(norm);
    AR_TRY(ari_combine(ctx, ctx->tp, &wrong, 1, AR_I32, AR_MAX, "loss scale"));
    AR_TRY(ari_combine(ctx, ctx->dp, &wrong, 1, AR_I32, AR_MAX, "loss scale"));
    AR_TRY(ari_combine(ctx, ctx->pipeline, &wrong, 1, AR_I32, AR_MAX, "loss scale"));
    *finite = wrong == 0;
    return AR_OK;
}

ar_status ari_scaling_next(ar_loss_scaling *s, const ar_ctx *ctx, bool finite)
{
    if (!finite && (!s->dynamic || s->scale * s->backoff < 1.0))
        return ar_error_set(
            AR_ERR_DATA,
            "the gradient norm is not finite at step %u, with a %s loss scale of %g%s; no weight was changed",
            (unsigned)ctx->step, s->dynamic ? "dynamic" : "static", s->scale,
            s->dynamic ? ", which does not fall below 1" : "");
    if (!finite) {
        s->scale *= s->backoff;
        s->good = 0;
        s->skipped++;
    } else if (s->dynamic && ++s->good >= s->interval) {
        s->scale = s->scale * s->growth <= LARGEST_SCALE ? s->scale * s->growth : s->scale;
        s->good = 0;
    }
    return AR_OK;
}
