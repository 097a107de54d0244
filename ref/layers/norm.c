/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/module.h"
#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/faults.h"

/* --- the operator ------------------------------------------------------------------------------------------------- */

static ar_status check_norm(ar_norm_kind kind, const ar_tensor *x, const ar_param *gain, const ar_param *offset)
{
    AR_TRY(ari_check_rows("a norm's input", x, x));
    AR_TRY(ari_check_vector(gain, x));
    if (kind != AR_NORM_LAYER && offset)
        return ar_error_set(AR_ERR_ARG, "%s: RMSNorm has no offset", gain->name);
    return offset ? ari_check_vector(offset, x) : AR_OK;
}

/* Gets a norm's factor: the weight itself, or weight + 1 in memory of the step, which ari_release_placed frees. */
static ar_status gain_of(ar_ctx *ctx, ar_tensor *gain, const ar_param *weight)
{
    *gain = weight->value;
    if (!weight->plus_one)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, gain, AR_F32, 1, weight->value.shape));
    AR_TRY(ARI_KERNEL(ctx, fill, gain, 1.0f));
    return ARI_KERNEL(ctx, add, gain, gain, &weight->value);
}

ar_status ar_norm_forward(ar_ctx *ctx, ar_norm_kind kind, ar_tensor *y, ar_norm_saved *saved, const ar_tensor *x,
                          const ar_param *gain, const ar_param *offset, double eps)
{
    AR_TRY(check_norm(kind, x, gain, offset));
    if (!(eps >= 0.0))
        return ar_error_set(AR_ERR_ARG, "%s: eps is %g, expected a number that is not negative", gain->name, eps);
    const ar_tensor input = *x; /* y may be x */
    const size_t rows = ari_tensor_rows(x).shape[0];
    if (y == &saved->mean || y == &saved->rstd)
        return ar_error_set(AR_ERR_ARG, "%s: y is one of the saved tensors, expected another", gain->name);
    AR_TRY(ari_unsummed_refuse(ctx, x, "a norm"));
    AR_TRY(ar_like(ctx, y, &input));
    AR_TRY(ar_ctx_tensor(ctx, &saved->mean, AR_F64, 1, &rows));
    AR_TRY(ar_ctx_tensor(ctx, &saved->rstd, AR_F32, 1, &rows));
    ar_tensor gain_tensor;
    AR_TRY(gain_of(ctx, &gain_tensor, gain));
    AR_TRY(ARI_KERNEL(ctx, norm_forward, kind, y, saved->mean.data, saved->rstd.data, &input,
                      ar_const(gain_tensor.data), offset ? ar_const(offset->value.data) : (ar_cbuf){NULL}, eps));
    ari_release_placed(ctx, &gain_tensor, &gain->value);
    ari_work_moves(ARI_GPU_MOVES_NORM, false, ar_tensor_count(y));
    ar_param *const params[2] = {(ar_param *)(uintptr_t)gain, (ar_param *)(uintptr_t)offset};
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_NORM, .name = gain->name, .input = {&input}, .out = {y}, .param = params,
                    .params = offset ? 2 : 1);
}

static ar_status check_saved(const ar_norm_saved *s, const ar_tensor *x, const char *name)
{
    const size_t rows = ari_tensor_rows(x).shape[0];
    if (ar_tensor_count(&s->mean) == rows && s->mean.dtype == AR_F64 && ar_tensor_count(&s->rstd) == rows &&
        s->rstd.dtype == AR_F32)
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: means of %zu rows and deviations of %zu, expected %zu of each, f64 and f32",
                        name, ar_tensor_count(&s->mean), ar_tensor_count(&s->rstd), rows);
}

ar_status ari_norm_gradients(ar_ctx *ctx, ar_norm_kind kind, const ar_tensor *dx, const ar_tensor *sum,
                             const ar_tensor *dy, const ar_tensor *x, const ar_norm_saved *saved, ar_param *gain,
                             ar_param *offset, const ar_tensor *residual, bool counts)
{
    ar_row_sum of_gain, of_offset = {.t = {NULL}};
    ar_tensor gain_tensor;
    AR_TRY(check_norm(kind, x, gain, offset));
    AR_TRY(check_saved(saved, x, gain->name));
    AR_TRY(ari_check_rows("a norm's gradient", dy, x));
    if (residual)
        AR_TRY(ari_check_rows("the gradient that goes past a norm", residual, x));
    AR_TRY(ctx->arith->grad_sum(ctx, gain, &of_gain));
    if (offset)
        AR_TRY(ctx->arith->grad_sum(ctx, offset, &of_offset));
    if (!counts)
        of_gain = of_offset = (ar_row_sum){.t = {NULL}};
    AR_TRY(gain_of(ctx, &gain_tensor, gain));
    AR_TRY(ARI_KERNEL(ctx, norm_backward, kind, dx, sum, dy, x, ar_const(saved->mean.data), ar_const(saved->rstd.data),
                      ar_const(gain_tensor.data), residual, &of_gain, &of_offset));
    ari_release_placed(ctx, &gain_tensor, &gain->value);
    ari_work_moves(ARI_GPU_MOVES_NORM, true, ar_tensor_count(dy));
    AR_TRY(ari_note_gradient(ctx, gain, NULL, dy)); /* dx may be dy */
    if (offset)
        AR_TRY(ari_note_gradient(ctx, offset, NULL, dy));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_NORM, .name = gain->name, .input = {dy}, .out = {dx}));
    if (!residual)
        return AR_OK;
    ari_work_moves(ARI_GPU_MOVES_RESIDUAL, true, 2 * ar_tensor_count(residual));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .input = {dx, residual}, .out = {sum});
}

ar_status ar_norm_backward(ar_ctx *ctx, ar_norm_kind kind, ar_tensor *dx, ar_tensor *sum, const ar_tensor *dy,
                           const ar_tensor *x, const ar_norm_saved *saved, ar_param *gain, ar_param *offset,
                           const ar_tensor *residual)
{
    const ar_tensor input = *x, gradient = *dy, past = residual ? *residual : *x; /* copies, because dx or sum may be
                                                                                     one of them */
    const ar_norm_saved rows = *saved;
    AR_TRY(check_norm(kind, x, gain, offset));
    if (residual && dx == sum)
        return ar_error_set(AR_ERR_ARG, "%s: dx and sum are one tensor, expected two", gain->name);
    AR_TRY(ar_like(ctx, dx, &input));
    if (residual)
        AR_TRY(ar_like(ctx, sum, &input));
    return ari_norm_gradients(ctx, kind, dx, sum, &gradient, &input, &rows, gain, offset, residual ? &past : NULL,
                              true);
}

/* --- the layer ---------------------------------------------------------------------------------------------------- */

typedef struct norm_module {
    ar_module base;
    ar_norm_kind kind;
    bool no_bias;
    size_t h;
    double eps;
    ar_tp_redistribution change; /* redistribution from the arriving placement to that of the norm's input and output */
    ar_param param[2];           /* weight, and of LayerNorm bias */
} norm_module;

enum { SAVED_X, SAVED_MEAN, SAVED_RSTD };

static ar_param *offset_of(norm_module *m)
{
    return m->kind == AR_NORM_LAYER && !m->no_bias ? &m->param[1] : NULL;
}

static ar_status norm_module_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                     const ar_batch *batch)
{
    (void)batch;
    norm_module *m = (norm_module *)base;
    if (x->ndim < 1 || x->shape[x->ndim - 1] != m->h || !ari_tensor_is_contiguous(x))
        return ar_error_set(AR_ERR_SHAPE, "%s: input's last dimension must be %zu, contiguous", base->name, m->h);
    ar_tensor input;
    ar_norm_saved rows;
    AR_TRY(ari_tp_redistribute(ctx, &input, x, &(ari_features){1, {m->h}}, m->change, base->name, false));
    AR_TRY(ar_norm_forward(ctx, m->kind, y, &rows, &input, &m->param[0], offset_of(m), m->eps));
    const ar_tensor x_rows = ari_tensor_rows(&input), y_rows = ari_tensor_rows(y);
    AR_TRY(ari_fault_norm_output(ctx, m->kind, m->eps, &m->param[0], offset_of(m), &y_rows, &rows.mean, &rows.rstd,
                                 &x_rows));
    AR_TRY(ar_saved_push(saved, m, SAVED_X, &input));
    AR_TRY(ar_saved_push(saved, m, SAVED_MEAN, &rows.mean));
    AR_TRY(ar_saved_push(saved, m, SAVED_RSTD, &rows.rstd));
    return ari_tap_placed(ctx, base->name, NULL, 'f', y, m->h, m->change.dst);
}

/* Computes dx in the norm's placement, and the parameters' gradients; with a residual *sum = residual + dx, in one
 * pass. */
static ar_status gradients(norm_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *sum,
                           const ar_tensor *dy, const ar_tensor *residual)
{
    ar_tensor x;
    ar_norm_saved rows;
    AR_TRY(ar_saved_pop(saved, m, SAVED_RSTD, &rows.rstd));
    AR_TRY(ar_saved_pop(saved, m, SAVED_MEAN, &rows.mean));
    AR_TRY(ar_saved_pop(saved, m, SAVED_X, &x));
    if (ar_tensor_count(dy) != ar_tensor_count(&x))
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient of %zu elements, expected %zu", m->base.name,
                            ar_tensor_count(dy), ar_tensor_count(&x));
    AR_TRY(ar_norm_backward(ctx, m->kind, dx, sum, dy, &x, &rows, &m->param[0], offset_of(m), residual));
    return ari_fault_norm_gradient(ctx, dx, sum, residual);
}

ar_status ari_norm_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *sum,
                            const ar_tensor *dy, const ar_tensor *residual)
{
    norm_module *m = (norm_module *)base;
    /* The residual is not available if the norm works in another placement. */
    const bool moved = ar_comm_size(ctx->tp) > 1 && !ari_placed_equal(m->change.src, m->change.dst);
    ar_tensor norm_dx;
    AR_TRY(gradients(m, ctx, saved, &norm_dx, sum, dy, moved ? NULL : residual));
    AR_TRY(ari_tp_redistribute(ctx, dx, &norm_dx, &(ari_features){1, {m->h}}, ari_tp_redistribution_backward(m->change),
                               base->name, true));
    if (moved && residual)
        AR_TRY(ar_add(ctx, sum, residual, dx));
    return ari_tap_placed(ctx, base->name, NULL, 'b', dx, m->h, m->change.src);
}

static ar_status norm_module_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                      const ar_batch *batch)
{
    (void)batch;
    ar_tensor unwanted;
    return ari_norm_backward(base, ctx, saved, dx ? dx : &unwanted, NULL, dy, NULL);
}

ar_status ari_norm_gain_init(ar_param *p, ar_ctx *ctx, const char *name, size_t h, bool plus_one)
{
    AR_TRY(ar_param_init_whole(p, ctx, name, "weight", 1, &h, plus_one ? AR_INIT_ZEROS : AR_INIT_ONES));
    p->plus_one = plus_one;
    return AR_OK;
}

static void set_spread(ar_param *p, const ar_ctx *ctx, const norm_module *m)
{
    p->spread =
        ar_comm_size(ctx->tp) > 1 && ari_placed_by_tokens(m->change.dst) && !ari_faulty(ctx, "sp_norm_grad_local");
}

static ar_status init_params(norm_module *m, ar_ctx *ctx, bool plus_one)
{
    AR_TRY(ari_norm_gain_init(&m->param[0], ctx, m->base.name, m->h, plus_one));
    set_spread(&m->param[0], ctx, m);
    if (!offset_of(m))
        return AR_OK;
    AR_TRY(ar_param_init_whole(&m->param[1], ctx, m->base.name, "bias", 1, &m->h, AR_INIT_UNIFORM_BIAS));
    set_spread(&m->param[1], ctx, m);
    return AR_OK;
}

ar_status ari_norm_create(ar_module **out, ar_ctx *ctx, const char *name, const ari_norm_options *o,
                          ar_tp_redistribution change)
{
    static const ar_module_ops ops = {.kind = "norm",
                                      .forward = norm_module_forward,
                                      .backward = norm_module_backward,
                                      .params_at = offsetof(norm_module, param),
                                      .params_count = 2};
    norm_module *m = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, AR_HELD_UNKNOWN));
    m->kind = o->kind;
    m->no_bias = o->no_bias;
    m->h = o->h;
    m->eps = o->eps;
    m->change = change;
    return ari_module_end(out, &m->base, init_params(m, ctx, o->plus_one));
}

ar_status ar_norm_create(ar_module **out, ar_ctx *ctx, const char *name, ar_norm_kind kind, size_t h, double eps)
{
    const ari_norm_options o = {.kind = kind, .h = h, .eps = eps};
    return ari_norm_create(out, ctx, name, &o, (ar_tp_redistribution){ari_placed_stream(ctx), ari_placed_stream(ctx)});
}
