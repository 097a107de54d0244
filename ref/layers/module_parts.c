/* SPDX-License-Identifier: Apache-2.0 */
/* Building blocks of user-defined layers: parameters, sums, broadcasts, activations. */
#include <string.h>

#include "ref/core/tensor_private.h"
#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"

static ar_status init_as(ar_param *p, ar_ctx *ctx, const char *name, const ar_layout *layout, ar_init_scheme init)
{
    const int ndim = layout->ndim;
    AR_TRY(ar_param_init(p, ctx, name, layout, false));
    p->init = init;
    p->init_range = 0.02; /* GPT-2's; at 0 a normal distribution is all zeros */
    p->fan_in = ndim > 0 ? layout->shape[ndim - 1] : 1;
    p->fan_out = ndim > 0 ? layout->shape[0] : 1;
    p->spread = ari_ctx_sp(ctx) && ndim == 1;
    p->matrix = ndim == 2;
    return AR_OK;
}

ar_status ar_param_init_whole(ar_param *p, ar_ctx *ctx, const char *module, const char *part, int ndim,
                              const size_t *shape, ar_init_scheme init)
{
    char name[sizeof p->name];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, module, part));
    AR_TRY(ari_layout_replicate(&layout, ndim, shape, ar_comm_rank(ctx->tp), ar_comm_size(ctx->tp)));
    return init_as(p, ctx, name, &layout, init);
}

ar_status ar_param_init_shard(ar_param *p, ar_ctx *ctx, const char *module, const char *part, const size_t shape[2],
                              int dim, ar_init_scheme init)
{
    char name[sizeof p->name];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, module, part));
    if (ar_layout_shard(&layout, 2, shape, dim, ar_comm_rank(ctx->tp), ar_comm_size(ctx->tp)) != AR_OK)
        return ar_error_set(AR_ERR_INDIVISIBLE, "%s: dimension %d of %zu x %zu cannot be split over tp=%d", name, dim,
                            shape[0], shape[1], ar_comm_size(ctx->tp));
    return init_as(p, ctx, name, &layout, init);
}

size_t ari_ctx_samples(const ar_ctx *ctx, const ar_tensor *x)
{
    return x->ndim > 2 || ctx->samples > 0 ? x->shape[0] : 1;
}

ar_status ar_spread_rows(ar_ctx *ctx, ar_tensor *y, const ar_tensor *v, const ar_tensor *x)
{
    if (v->ndim != 1 || x->ndim < 1 || v->shape[0] != x->shape[x->ndim - 1])
        return ar_error_set(AR_ERR_SHAPE, "a vector of %zu elements for rows of %zu", ar_tensor_count(v),
                            x->ndim > 0 ? x->shape[x->ndim - 1] : 1);
    const ar_tensor vector = *v; /* y may be v or x */
    ar_tensor row;
    AR_TRY(ari_cast(ctx, &row, &vector, x->dtype));
    AR_TRY(ar_like(ctx, y, x));
    const ar_tensor dst = ari_tensor_rows(y);
    const ar_tensor src = {.dtype = row.dtype,
                           .ndim = 2,
                           .shape = {dst.shape[0], dst.shape[1]},
                           .stride = {0, row.stride[0]},
                           .data = row.data};
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
    ari_release_placed(ctx, &row, &vector);
    return AR_OK;
}

static ar_status check_same(const char *label, const ar_tensor *a, const ar_tensor *b)
{
    if (a->ndim == b->ndim && memcmp(a->shape, b->shape, (size_t)a->ndim * sizeof *a->shape) == 0 &&
        ari_tensor_is_contiguous(a) && ari_tensor_is_contiguous(b))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s of %zu elements (%d dimensions) and %zu (%d), expected one shape, contiguous",
                        label, ar_tensor_count(a), a->ndim, ar_tensor_count(b), b->ndim);
}

static ar_status combine_inputs(ar_ctx *ctx, ar_tensor *y, const ar_tensor *a, const ar_tensor *b,
                                const char *operation, ari_ledger_kind kind,
                                ar_status (*kernel)(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a,
                                                    const ar_tensor *b))
{
    AR_TRY(check_same(operation, a, b));
    AR_TRY(ari_unsummed_refuse(ctx, a, operation));
    AR_TRY(ari_unsummed_refuse(ctx, b, operation));
    const ar_tensor left = *a, right = *b; /* y may be a or b */
    AR_TRY(ar_like(ctx, y, &left));
    AR_TRY(ARI_NOTE(ctx, .kind = kind, .operation = operation, .input = {&left, &right}, .out = {y}));
    return kernel(ctx->device, ctx->queue, y, &left, &right);
}

ar_status ar_add(ar_ctx *ctx, ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return combine_inputs(ctx, y, a, b, "sum", ARI_LEDGER_SUM, ctx->device->ops->add);
}

ar_status ar_mul(ar_ctx *ctx, ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return combine_inputs(ctx, y, a, b, "product", ARI_LEDGER_MULTIPLY, ctx->device->ops->mul);
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

ar_status ar_grad_add_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms)
{
    if (p->value.ndim != 1 || terms->ndim < 1 || terms->shape[terms->ndim - 1] != p->value.shape[0] ||
        !ari_tensor_is_contiguous(terms))
        return ar_error_set(AR_ERR_SHAPE, "%s: terms of %zu features, expected %zu, contiguous", p->name,
                            terms->ndim > 0 ? terms->shape[terms->ndim - 1] : 0, ar_tensor_count(&p->value));
    const ar_tensor rows = ari_tensor_rows(terms);
    AR_TRY(ari_note_gradient(ctx, p, NULL, terms));
    return ctx->arith->grad_rows(ctx, p, &rows, (ar_cbuf){NULL});
}

/* --- fused operators ---------------------------------------------------------------------------------------------- */

ar_status ari_check_rows(const char *label, const ar_tensor *t, const ar_tensor *like)
{
    if (t->dtype != AR_F32 && t->dtype != AR_BF16)
        return ar_error_set(AR_ERR_DTYPE, "%s is of %s, expected f32 or bf16", label, ar_dtype_name(t->dtype));
    if (t->dtype != like->dtype)
        return ar_error_set(AR_ERR_DTYPE, "%s is of %s beside %s, expected one type", label, ar_dtype_name(t->dtype),
                            ar_dtype_name(like->dtype));
    if (t->ndim < 1)
        return ar_error_set(AR_ERR_SHAPE, "%s has no dimension, expected rows of features", label);
    return check_same(label, t, like);
}

ar_status ari_check_vector(const ar_param *p, const ar_tensor *x)
{
    if (p->value.ndim == 1 && p->value.shape[0] == x->shape[x->ndim - 1])
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: %zu elements in %d dimensions for rows of %zu, expected a vector as long",
                        p->name, ar_tensor_count(&p->value), p->value.ndim, x->shape[x->ndim - 1]);
}

static ar_status check_bias_act(const ar_tensor *x, const ar_param *bias, ar_activation act)
{
    AR_TRY(ari_check_rows("an activation's input", x, x));
    if (act >= AR_ACT_NONE)
        return ar_error_set(AR_ERR_ARG, "%d is no activation", (int)act);
    return bias ? ari_check_vector(bias, x) : AR_OK;
}

ar_status ar_bias_act_forward(ar_ctx *ctx, ar_tensor *y, ar_tensor *x, const ar_param *bias, ar_activation act)
{
    AR_TRY(check_bias_act(x, bias, act));
    if (y == x)
        return ar_error_set(AR_ERR_ARG,
                            "an activation's output y is its input x, expected another tensor: x becomes x + "
                            "bias, which the backward pass takes");
    AR_TRY(ari_unsummed_refuse(ctx, x, "an activation"));
    AR_TRY(ar_like(ctx, y, x));
    if (bias)
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_BIAS, .name = bias->name, .input = {x}, .out = {x},
                        .param = &(ar_param *){(ar_param *)(uintptr_t)bias}, .params = 1));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ACTIVATION, .input = {x}, .out = {y}));
    const ar_tensor x_rows = ari_tensor_rows(x), y_rows = ari_tensor_rows(y);
    return ARI_KERNEL(ctx, bias_act, &x_rows, bias ? ar_const(bias->value.data) : (ar_cbuf){NULL}, act, &y_rows);
}

ar_status ar_bias_act_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x, ar_param *bias,
                               ar_activation act)
{
    ar_row_sum sum = {.t = {NULL}};
    AR_TRY(check_bias_act(x, bias, act));
    AR_TRY(ari_check_rows("an activation's gradient", dy, x));
    AR_TRY(ari_unsummed_refuse(ctx, dy, "an activation's gradient"));
    const ar_tensor gradient = *dy, input = *x; /* dx may be dy or x */
    AR_TRY(ar_like(ctx, dx, &input));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ACTIVATION, .input = {&gradient}, .out = {dx}));
    if (bias)
        AR_TRY(ari_note_gradient(ctx, bias, NULL, dx));
    if (bias)
        AR_TRY(ctx->arith->grad_sum(ctx, bias, &sum));
    return ARI_KERNEL(ctx, act_backward, dx, &gradient, &input, act, &sum);
}

/* --- activations -------------------------------------------------------------------------------------------------- */

typedef struct activation_module {
    ar_module base;
    ar_activation act;
} activation_module;

static ar_status activation_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                    const ar_batch *batch)
{
    (void)batch;
    ar_tensor input = *x; /* without a bias the input is not written to */
    AR_TRY(ar_bias_act_forward(ctx, y, &input, NULL, ((activation_module *)base)->act));
    return ar_saved_push(saved, base, 0, x);
}

static ar_status activation_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                                     const ar_batch *batch)
{
    (void)batch;
    ar_tensor x;
    AR_TRY(ar_saved_pop(saved, base, 0, &x));
    return dx ? ar_bias_act_backward(ctx, dx, dy, &x, NULL, ((activation_module *)base)->act) : AR_OK;
}

ar_status ar_activation_create(ar_module **out, ar_ctx *ctx, const char *name, ar_activation act, ar_held placement)
{
    static const ar_module_ops ops = {
        .kind = "activation", .forward = activation_forward, .backward = activation_backward};
    (void)ctx;
    activation_module *m = NULL;
    if (act >= AR_ACT_NONE)
        return ar_error_set(AR_ERR_ARG, "%s: %d is no activation", name, (int)act);
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, placement));
    m->act = act;
    *out = &m->base;
    return AR_OK;
}
