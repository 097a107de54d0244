/* SPDX-License-Identifier: Apache-2.0 */
/* Linear layers as modules: groups of one weight. */
#include <stdlib.h>

#include "ref/layers/faults.h"
#include "ref/layers/linear/linear.h"

typedef struct linear_module {
    ar_module base;
    ari_linear linear;
} linear_module;

static ar_status linear_module_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                                       const ar_batch *batch)
{
    (void)batch;
    linear_module *m = (linear_module *)base;
    AR_TRY(ari_linear_forward(&m->linear, ctx, saved, y, x, AR_ACT_NONE, NULL));
    if (m->linear.peaked) {
        ctx->use = ARI_USE_LOGITS;
        ari_step_claim(ctx, y);
        if (ari_placed_by_features(m->linear.split.output))
            AR_TRY(ari_fault_logits(ctx, y, m->linear.out.width[0]));
    }
    return ari_tap_placed(ctx, base->name, NULL, 'f', y, m->linear.out.width[0], m->linear.split.output);
}

static ar_status linear_module_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx,
                                        const ar_tensor *dy, const ar_batch *batch)
{
    (void)batch;
    return ari_linear_backward(&((linear_module *)base)->linear, ctx, saved, dx, dy, base->name, NULL);
}

static size_t linear_module_params(const ar_module *base, ar_param **out, size_t cap)
{
    return ari_linear_params(&((linear_module *)(uintptr_t)base)->linear, out, cap);
}

static void linear_module_destroy(ar_module *base)
{
    ari_linear_fini(&((linear_module *)base)->linear);
    free(base);
}

static ar_status module_of(ar_module **result, ar_ctx *ctx, const char *name, const ari_linear_spec *spec)
{
#define OPS(text)                                                                           \
    {                                                                                       \
        .kind = text, .forward = linear_module_forward, .backward = linear_module_backward, \
        .params = linear_module_params, .destroy = linear_module_destroy                    \
    }
    static const ar_module_ops ops[] = {[AR_STYLE_COLWISE] = OPS("column_linear"),
                                        [AR_STYLE_ROWWISE] = OPS("row_linear"),
                                        [AR_STYLE_REPLICATE] = OPS("whole_linear")};
    linear_module *m = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops[spec->split.style], name, AR_HELD_UNKNOWN));
    return ari_module_end(result, &m->base, ari_linear_init(&m->linear, ctx, spec));
}

ar_status ari_linear_module_create(ar_module **result, ar_ctx *ctx, const char *name, size_t in_features, size_t out,
                                   bool bias, ar_linear_split split)
{
    const ari_linear_spec spec = {
        .split = split, .n = 1, .part = {{.name = name, .out = out}}, .in_features = in_features, .bias = bias};
    return module_of(result, ctx, name, &spec);
}

ar_status ar_logits_create(ar_module **result, ar_ctx *ctx, const ar_linear_split *split, const char *name,
                           size_t vocab, size_t h, ar_param *tied)
{
    const ari_linear_spec spec = {
        .split = split ? *split : (ar_linear_split){AR_STYLE_COLWISE, ari_placed_stream(ctx), ari_shard_features},
        .n = 1,
        .part = {{.name = name, .out = vocab, .tied = tied}},
        .in_features = h,
        .uneven = true};
    return module_of(result, ctx, name, &spec);
}

ar_status ar_column_linear_create(ar_module **result, ar_ctx *ctx, const char *name, size_t in_features, size_t out,
                                  const ar_linear_options *o)
{
    const ar_placement stream = ari_placed_stream(ctx);
    const ar_linear_split split = {AR_STYLE_COLWISE, stream, o->gather_output ? stream : ari_shard_features};
    return ari_linear_module_create(result, ctx, name, in_features, out, o->bias, split);
}

ar_status ar_row_linear_create(ar_module **result, ar_ctx *ctx, const char *name, size_t in_features, size_t out,
                               const ar_linear_options *o)
{
    const ar_placement stream = ari_placed_stream(ctx);
    const ar_linear_split split = {AR_STYLE_ROWWISE, o->input_is_sharded ? ari_shard_features : stream, stream};
    return ari_linear_module_create(result, ctx, name, in_features, out, o->bias, split);
}
