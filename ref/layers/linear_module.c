/* SPDX-License-Identifier: Apache-2.0 */
/* Linear layers as modules: a group of one weight. */
#include <stdlib.h>

#include "ref/layers/linear.h"
#include "ref/layers/parts.h"

typedef struct linear_module {
    ar_module base;
    ari_linear linear;
    bool gather_output;
} linear_module;

static ar_status tap_output(const linear_module *m, ar_ctx *ctx, const ar_tensor *y)
{
    if (m->linear.style != ARI_COLUMN || m->gather_output)
        return ari_tap_tokens(ctx, m->base.name, NULL, 'f', y);
    return ari_tap_shard(ctx, m->base.name, NULL, 'f', y, y->ndim - 1, m->linear.out[0]);
}

/* All features of Y, with sequence parallelism of the own positions. */
static ar_status gather_output(const linear_module *m, ar_ctx *ctx, ar_tensor *y, const ar_tensor *local)
{
    ar_tensor whole;
    AR_TRY(ari_gather_dim(ctx, &whole, local, local->ndim - 1, m->base.name));
    *y = whole;
    if (!m->linear.sequence)
        return AR_OK;
    AR_TRY(ari_own_tokens(ctx, y, &whole));
    ar_ctx_release(ctx, &whole);
    return AR_OK;
}

/* Its transpose for values that are equal on every rank: the own features, of all positions. */
static ar_status own_output(const linear_module *m, ar_ctx *ctx, ar_tensor *own, const ar_tensor *dy)
{
    ar_tensor whole = *dy;
    AR_TRY(ari_check_features(m->base.name, "gradient", dy, m->linear.out[0]));
    if (m->linear.sequence)
        AR_TRY(ari_gather_tokens(ctx, &whole, dy, m->base.name));
    AR_TRY(ari_own_features(ctx, own, &whole));
    if (m->linear.sequence)
        ar_ctx_release(ctx, &whole);
    return AR_OK;
}

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    (void)batch;
    linear_module *m = (linear_module *)base;
    ar_tensor local;
    AR_TRY(ari_linear_forward(&m->linear, ctx, saved, &local, x, AR_ACT_NONE, NULL));
    *y = local;
    if (m->gather_output)
        AR_TRY(gather_output(m, ctx, y, &local));
    return tap_output(m, ctx, y);
}

static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    (void)batch;
    linear_module *m = (linear_module *)base;
    ar_tensor own = *dy;
    if (m->gather_output)
        AR_TRY(own_output(m, ctx, &own, dy));
    return ari_linear_backward(&m->linear, ctx, saved, dx, &own, base->name);
}

static size_t params(const ar_module *base, ar_param **out, size_t cap)
{
    return ari_linear_params(&((linear_module *)(uintptr_t)base)->linear, out, cap);
}

static void destroy(ar_module *base)
{
    ari_linear_fini(&((linear_module *)base)->linear);
    free(base);
}

ar_status ari_linear_module_create(ar_module **gives, ar_ctx *ctx, const ari_linear_spec *s, bool gather_output)
{
#define OPS(text)                                                                                    \
    {                                                                                                \
        .kind = text, .forward = forward, .backward = backward, .params = params, .destroy = destroy \
    }
    static const ar_module_ops ops[] = {
        [ARI_COLUMN] = OPS("column_linear"), [ARI_ROW] = OPS("row_linear"), [ARI_WHOLE] = OPS("whole_linear")};
    linear_module *m = NULL;
    AR_TRY(ari_module_begin((void **)&m, sizeof *m, &ops[s->style], s->part[0].name, AR_HELD_UNTOLD));
    m->gather_output = s->style == ARI_COLUMN && gather_output;
    return ari_module_end(gives, &m->base, ari_linear_init(&m->linear, ctx, s));
}

static ar_status create(ar_module **gives, ar_ctx *ctx, const char *name, size_t in, size_t out, ari_linear_style style,
                        const ar_linear_options *o)
{
    const ari_linear_spec spec = {.style = style,
                                  .n = 1,
                                  .part = {{.name = name, .out = out}},
                                  .in = in,
                                  .bias = o->bias,
                                  .input_is_sharded = o->input_is_sharded,
                                  .sequence = ari_ctx_sp(ctx)};
    return ari_linear_module_create(gives, ctx, &spec, o->gather_output);
}

ar_status ar_column_linear_create(ar_module **gives, ar_ctx *ctx, const char *name, size_t in, size_t out,
                                  const ar_linear_options *o)
{
    return create(gives, ctx, name, in, out, ARI_COLUMN, o);
}

ar_status ar_row_linear_create(ar_module **gives, ar_ctx *ctx, const char *name, size_t in, size_t out,
                               const ar_linear_options *o)
{
    return create(gives, ctx, name, in, out, ARI_ROW, o);
}
