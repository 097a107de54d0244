/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/experts/shared.h"
#include "ref/core/record.h"

#include "ref/layers/layers_private.h"
#include "ref/layers/linear/linear.h"

enum { SAVED_SHARED, SAVED_LOGIT };

ar_status ari_shared_init(ari_shared *s, ar_ctx *ctx, const char *module, const ar_experts_options *o,
                          const ar_branch_split *cut, ar_placement placement)
{
    const ar_linear_split replicated = {AR_STYLE_REPLICATE, placement, placement};
    const bool equal_split = cut->shared_whole || ari_placed_full(placement);
    const ar_branch_split as_others = {.enter = {placement, placement},
                                       .first = cut->shared_whole ? replicated : cut->first,
                                       .second = cut->shared_whole ? replicated : cut->second,
                                       .leave = {placement, placement}};
    const ar_branch_split split =
        equal_split ? as_others : ari_branch_of(AR_STYLE_COLWISE, AR_STYLE_ROWWISE, placement);
    const ar_mlp_options mlp_options = {.hidden = o->hidden,
                                        .ffn = o->shared,
                                        .activation = o->activation,
                                        .gated = true,
                                        .split = &split,
                                        .first = "gate_proj",
                                        .up = "up_proj",
                                        .second = "down_proj"};
    char name[ARI_PART_PATH];
    if (o->shared == 0)
        return AR_OK;
    s->hidden = o->hidden;
    AR_TRY(ari_path(name, sizeof name, module, o->shared_name ? o->shared_name : "shared_expert"));
    AR_TRY(ar_mlp_create(&s->expert, ctx, name, &mlp_options));
    if (o->ungated)
        return AR_OK;
    AR_TRY(ari_path(name, sizeof name, module, "shared_expert_gate"));
    AR_TRY(ari_linear_module_create(&s->gate, ctx, name, s->hidden, 1, false,
                                    (ar_linear_split){AR_STYLE_REPLICATE, placement, placement}));
    ar_param *vector = NULL;
    (void)ar_module_params(s->gate, &vector, 1, false);
    vector->matrix = false;
    return AR_OK;
}

void ari_shared_fini(ari_shared *s)
{
    ar_module_destroy(s->expert);
    ar_module_destroy(s->gate);
}

size_t ari_shared_children(const ari_shared *s, ar_module **out, size_t cap)
{
    ar_module *const children[2] = {s->expert, s->gate};
    const size_t n = !s->expert ? 0 : s->gate ? 2 : 1;
    for (size_t i = 0; i < n && i < cap; i++)
        out[i] = children[i];
    return n;
}

/* y += sigmoid(x*v^T)*shared(x), or without a gate shared(x). */
ar_status ari_shared_forward(ari_shared *s, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y, const ar_tensor *x,
                             const ar_batch *batch)
{
    ar_tensor shared_out, logit;
    if (!s->expert)
        return AR_OK;
    AR_TRY(ar_module_forward(s->expert, ctx, saved, &shared_out, x, batch));
    if (!ctx->recomputing) /* otherwise the sum is not used */
        ari_work_moves(ARI_GPU_MOVES_RESIDUAL, false, ar_tensor_count(y));
    if (!s->gate) {
        AR_TRY(ARI_KERNEL(ctx, add, y, y, &shared_out));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .input = {&shared_out, y}, .out = {y}));
        ar_ctx_release(ctx, &shared_out);
        return AR_OK;
    }
    AR_TRY(ar_module_forward(s->gate, ctx, saved, &logit, x, batch));
    if (!ctx->recomputing)
        ari_work_moves(ARI_GPU_MOVES_GATE, false, ar_tensor_count(y));
    AR_TRY(ar_saved_push(saved, s, SAVED_SHARED, &shared_out));
    AR_TRY(ar_saved_push(saved, s, SAVED_LOGIT, &logit));
    AR_TRY(ARI_KERNEL(ctx, add_gated, y, &shared_out, &logit));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .input = {&shared_out, y, &logit}, .out = {y});
}

ar_status ari_shared_backward(ari_shared *s, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dx, const ar_tensor *dy,
                              const ar_batch *batch)
{
    ar_tensor shared_out, logit, dmade, dlogit, branch_dx;
    if (!s->expert)
        return AR_OK;
    if (!s->gate) {
        AR_TRY(ar_module_backward(s->expert, ctx, saved, &branch_dx, dy, batch));
        return ari_add_gradient(ctx, dx, &branch_dx);
    }
    AR_TRY(ar_saved_pop(saved, s, SAVED_SHARED, &shared_out));
    AR_TRY(ar_saved_pop(saved, s, SAVED_LOGIT, &logit));
    AR_TRY(ari_like(ctx, &dmade, dy, s->hidden));
    AR_TRY(ari_like(ctx, &dlogit, &logit, 1));
    AR_TRY(ARI_KERNEL(ctx, add_gated_backward, &dmade, &dlogit, dy, &shared_out, &logit));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .input = {dy}, .out = {&dmade}));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .input = {dy}, .out = {&dlogit}));
    ari_work_moves(ARI_GPU_MOVES_GATE, true, ar_tensor_count(dy));
    ARI_RELEASE(ctx, &shared_out, &logit);
    AR_TRY(ar_module_backward(s->expert, ctx, saved, &branch_dx, &dmade, batch));
    ar_ctx_release(ctx, &dmade);
    AR_TRY(ari_add_gradient(ctx, dx, &branch_dx));
    AR_TRY(ar_module_backward(s->gate, ctx, saved, &branch_dx, &dlogit, batch));
    ar_ctx_release(ctx, &dlogit);
    return ari_add_gradient(ctx, dx, &branch_dx);
}
