/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/layers_private.h"
#include "ref/layers/linear/linear.h"

/* An MLP: linear layers with an activation between them. The activation's input is sharded by features or tokens, or
 * replicated, as the first layers leave it. */
typedef struct mlp_module {
    ar_module base;
    ar_mlp_options o;
    ar_branch_split split;
    ari_linear first_layer, second;
    char first_name[ARI_PART_PATH], up_name[ARI_PART_PATH], second_name[ARI_PART_PATH];
} mlp_module;

enum { SAVED_PRE };

static ar_status tap_middle(const mlp_module *m, ar_ctx *ctx, const char *base, const char *part, char pass,
                            const ar_tensor *t)
{
    return ari_tap_placed(ctx, base, part, pass, t, m->o.ffn, m->split.first.output);
}

/* Returns the gate (0) or up (1) half of the first layer's output as a view. */
static ar_tensor half_of(const mlp_module *m, const ar_tensor *t, int i)
{
    const size_t width = m->first_layer.output_width[0] / 2;
    return m->o.fused ? ar_tensor_slice(t, t->ndim - 1, (size_t)i * width, width)
                      : ari_linear_part_of(&m->first_layer, t, i);
}

/* Computes the activation's output from the first layers' output, fused with the bias unless gated. */
static ar_status first_half(mlp_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *act, const ar_tensor *x)
{
    ar_tensor pre;
    if (!m->o.gated) {
        AR_TRY(ari_linear_forward(&m->first_layer, ctx, saved, &pre, x, m->o.activation, act));
        AR_TRY(tap_middle(m, ctx, m->first_name, NULL, 'f', &pre));
    } else {
        AR_TRY(ari_linear_forward(&m->first_layer, ctx, saved, &pre, x, AR_ACT_NONE, NULL));
        const ar_tensor gate = half_of(m, &pre, 0), up = half_of(m, &pre, 1);
        AR_TRY(tap_middle(m, ctx, m->o.fused ? m->base.name : m->first_name, m->o.fused ? "gate" : NULL, 'f', &gate));
        AR_TRY(tap_middle(m, ctx, m->o.fused ? m->base.name : m->up_name, m->o.fused ? "up" : NULL, 'f', &up));
        AR_TRY(ari_like(ctx, act, &pre, gate.shape[gate.ndim - 1]));
        const ar_tensor rows = ari_tensor_rows(&pre), y = ari_tensor_rows(act);
        const ar_tensor gate_rows = half_of(m, &rows, 0);
        const ar_tensor up_rows = half_of(m, &rows, 1);
        AR_TRY(ARI_KERNEL(ctx, gated_forward, &y, &gate_rows, &up_rows, m->o.activation));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .input = {&gate, &up}, .out = {act}));
    }
    ari_work_moves(m->o.gated ? ARI_GPU_MOVES_GATE : ARI_GPU_MOVES_ACTIVATION, false, ar_tensor_count(act));
    AR_TRY(ar_saved_push(saved, m, SAVED_PRE, &pre));
    return tap_middle(m, ctx, m->base.name, "act", 'f', act);
}

/* The second layer's input from the module's. */
static ar_status up_to_second(mlp_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *act, const ar_tensor *x)
{
    ar_tensor input;
    AR_TRY(ari_check_features(m->base.name, "input", x, m->o.hidden));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, &input, x, m->split.enter, false));
    return first_half(m, ctx, saved, act, &input);
}

static ar_status mlp_forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             const ar_batch *batch)
{
    (void)batch;
    mlp_module *m = (mlp_module *)base;
    ar_tensor act, out;
    AR_TRY(up_to_second(m, ctx, saved, &act, x));
    AR_TRY(ari_linear_forward(&m->second, ctx, saved, &out, &act, AR_ACT_NONE, NULL));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, y, &out, m->split.leave, true));
    return ari_tap_placed(ctx, m->second_name, NULL, 'f', y, m->o.hidden, m->split.leave.dst);
}

static ar_status recompute_saved(ar_module *base, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                 const ar_batch *batch)
{
    (void)batch;
    mlp_module *m = (mlp_module *)base;
    ar_tensor act;
    AR_TRY(up_to_second(m, ctx, saved, &act, x));
    return ari_linear_recompute(&m->second, ctx, saved, &act);
}

/* Gradient of the first layer's output(s) from the activation's, and of its biases in the same pass. */
static ar_status middle_backward(mlp_module *m, ar_ctx *ctx, ar_tensor *dpre, const ar_tensor *dact,
                                 const ar_tensor *pre, ari_input_prefetch *prefetch)
{
    ar_row_sum sums[AR_MAX_PARTS];
    ari_work_moves(m->o.gated ? ARI_GPU_MOVES_GATE : ARI_GPU_MOVES_ACTIVATION, true, ar_tensor_count(dact));
    AR_TRY(ari_linear_bias_sums(ctx, sums, prefetch));
    AR_TRY(ari_like(ctx, dpre, pre, pre->shape[pre->ndim - 1]));
    if (!m->o.gated) {
        AR_TRY(ARI_KERNEL(ctx, act_backward, dpre, dact, pre, m->o.activation, &sums[0]));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_ACTIVATION, .input = {dact}, .out = {dpre}));
        return tap_middle(m, ctx, m->base.name, "fc", 'b', dpre);
    }
    const ar_tensor d = ari_tensor_rows(dpre), p = ari_tensor_rows(pre), dy = ari_tensor_rows(dact);
    const ar_tensor dgate = half_of(m, &d, 0), dup = half_of(m, &d, 1);
    const ar_tensor gate = half_of(m, &p, 0), up = half_of(m, &p, 1);
    AR_TRY(ARI_KERNEL(ctx, gated_backward, &dgate, &dup, &dy, &gate, &up, m->o.activation, &sums[0], &sums[1]));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .input = {dact}, .out = {dpre}));
    const ar_tensor tap_gate = half_of(m, dpre, 0), tap_up = half_of(m, dpre, 1);
    AR_TRY(tap_middle(m, ctx, m->base.name, "gate", 'b', &tap_gate));
    return tap_middle(m, ctx, m->base.name, "up", 'b', &tap_up);
}

static ar_status mlp_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const ar_batch *batch)
{
    (void)batch;
    mlp_module *m = (mlp_module *)base;
    ar_tensor dout, dact, dpre, pre, din;
    ari_input_prefetch prefetch = {.layer = &m->first_layer};
    AR_TRY(ari_check_features(base->name, "gradient", dy, m->o.hidden));
    AR_TRY(ARI_REDISTRIBUTE(m, ctx, &dout, dy, ari_tp_redistribution_backward(m->split.leave), false));
    AR_TRY(ari_linear_backward(&m->second, ctx, saved, &dact, &dout, m->second_name, &prefetch));
    ari_release_placed(ctx, &dout, dy);
    AR_TRY(ar_saved_pop(saved, m, SAVED_PRE, &pre));
    AR_TRY(middle_backward(m, ctx, &dpre, &dact, &pre, &prefetch));
    ARI_RELEASE(ctx, &dact, &pre);
    /* gate and up share one dX, that of the full MLP or of their packed layer. */
    const bool shared = m->o.gated && !m->o.fused;
    AR_TRY(ari_linear_backward(&m->first_layer, ctx, saved, dx ? &din : NULL, &dpre,
                               shared ? base->name : m->first_name, &prefetch));
    ar_ctx_release(ctx, &dpre);
    return dx ? ARI_REDISTRIBUTE(m, ctx, dx, &din, ari_tp_redistribution_backward(m->split.enter), true) : AR_OK;
}

static size_t mlp_params(const ar_module *base, ar_param **out, size_t cap)
{
    mlp_module *m = (mlp_module *)(uintptr_t)base;
    const size_t n = ari_linear_params(&m->first_layer, out, cap);
    return n + ari_linear_params(&m->second, out + (n < cap ? n : cap), n < cap ? cap - n : 0);
}

static void mlp_destroy(ar_module *base)
{
    mlp_module *m = (mlp_module *)base;
    ari_linear_fini(&m->first_layer);
    ari_linear_fini(&m->second);
    free(m);
}

static ar_status init_linears(mlp_module *m, ar_ctx *ctx)
{
    const ar_mlp_options *o = &m->o;
    ari_linear_spec first_spec = {.split = m->split.first,
                                  .n = o->gated ? 2 : 1,
                                  .part = {{.name = m->first_name, .out = o->ffn}, {.name = m->up_name, .out = o->ffn}},
                                  .in_features = o->hidden,
                                  .bias = o->bias,
                                  .transposed = o->transposed,
                                  .owns_input = !ari_placed_equal(m->split.enter.src, m->split.enter.dst)};
    if (o->fused && (!o->gated || o->bias))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: one parameter of gate and up%s", m->base.name,
                            o->gated ? " has no bias here" : ", and no gate");
    if (o->fused) {
        first_spec.n = 1;
        first_spec.part[0].out = 2 * o->ffn;
        first_spec.part[0].blocks = 2;
        first_spec.part[0].block[0] = first_spec.part[0].block[1] = o->ffn;
    }
    const ari_linear_spec second = {.split = m->split.second,
                                    .n = 1,
                                    .part = {{.name = m->second_name, .out = o->hidden}},
                                    .in_features = o->ffn,
                                    .bias = o->bias,
                                    .transposed = o->transposed,
                                    .owns_input = true};
    AR_TRY(ari_linear_init(&m->first_layer, ctx, &first_spec));
    return ari_linear_init(&m->second, ctx, &second);
}

ar_status ari_mlp_paths(char first_path[ARI_PART_PATH], char up[ARI_PART_PATH], char second[ARI_PART_PATH],
                        const char *name, const ar_mlp_options *o)
{
    AR_TRY(ari_path(first_path, ARI_PART_PATH, name, o->first ? o->first : o->gated ? "gate" : "fc1"));
    AR_TRY(ari_path(up, ARI_PART_PATH, name, o->up ? o->up : "up"));
    return ari_path(second, ARI_PART_PATH, name, o->second ? o->second : "fc2");
}

static ar_status init_mlp(mlp_module *m, ar_ctx *ctx, const ar_mlp_options *o)
{
    m->o = *o;
    m->split = o->split ? *o->split : ari_branch_of(AR_STYLE_COLWISE, AR_STYLE_ROWWISE, ari_placed_stream(ctx));
    AR_TRY(ari_mlp_paths(m->first_name, m->up_name, m->second_name, m->base.name, o));
    return init_linears(m, ctx);
}

ar_status ar_mlp_create(ar_module **out, ar_ctx *ctx, const char *name, const ar_mlp_options *o)
{
    static const ar_module_ops ops = {.kind = "mlp",
                                      .forward = mlp_forward,
                                      .backward = mlp_backward,
                                      .recompute = recompute_saved,
                                      .params = mlp_params,
                                      .destroy = mlp_destroy};
    mlp_module *m = NULL;
    AR_TRY(ARI_MODULE_BEGIN(&m, &ops, name, AR_HELD_UNKNOWN));
    return ari_module_end(out, &m->base, init_mlp(m, ctx, o));
}
