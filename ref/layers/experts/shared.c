/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/experts/shared.h"
#include "ref/core/record.h"

#include "ref/layers/layers_private.h"
#include "ref/layers/linear/linear.h"

enum { SAVED_SHARED, SAVED_LOGIT };

ar_status ari_shared_init(ari_shared *s, ar_ctx *ctx, const char *module, const ar_experts_options *o,
                          const ar_branch_split *cut, ar_placement at)
{
    const ar_linear_split whole = {AR_STYLE_REPLICATE, at, at};
    const bool alike = cut->shared_whole || ari_placed_whole(at);
    const ar_branch_split as_others = {.enter = {at, at},
                                       .first = cut->shared_whole ? whole : cut->first,
                                       .second = cut->shared_whole ? whole : cut->second,
                                       .leave = {at, at}};
    const ar_branch_split split = alike ? as_others : ari_branch_of(AR_STYLE_COLWISE, AR_STYLE_ROWWISE, at);
    const ar_mlp_options of = {.hidden = o->hidden,
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
    AR_TRY(ar_mlp_create(&s->expert, ctx, name, &of));
    if (o->ungated)
        return AR_OK;
    AR_TRY(ari_path(name, sizeof name, module, "shared_expert_gate"));
    AR_TRY(ari_linear_module_create(&s->gate, ctx, name, s->hidden, 1, false,
                                    (ar_linear_split){AR_STYLE_REPLICATE, at, at}));
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
    ar_module *const all[2] = {s->expert, s->gate};
    const size_t n = !s->expert ? 0 : s->gate ? 2 : 1;
    for (size_t i = 0; i < n && i < cap; i++)
        out[i] = all[i];
    return n;
}

/* y += sigmoid(x*v^T)*shared(x), or without a gate shared(x). */
ar_status ari_shared_forward(ari_shared *s, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y, const ar_tensor *x,
                             const ar_batch *batch)
{
    ar_tensor made, logit;
    if (!s->expert)
        return AR_OK;
    AR_TRY(ar_module_forward(s->expert, ctx, saved, &made, x, batch));
    if (!ctx->recomputing) /* else nobody takes the sum */
        ari_work_moves(ARI_GPU_MOVES_RESIDUAL, false, ar_tensor_count(y));
    if (!s->gate) {
        AR_TRY(ARI_KERNEL(ctx, add, y, y, &made));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .in = {&made, y}, .out = {y}));
        ar_ctx_release(ctx, &made);
        return AR_OK;
    }
    AR_TRY(ar_module_forward(s->gate, ctx, saved, &logit, x, batch));
    if (!ctx->recomputing)
        ari_work_moves(ARI_GPU_MOVES_GATE, false, ar_tensor_count(y));
    AR_TRY(ar_saved_push(saved, s, SAVED_SHARED, &made));
    AR_TRY(ar_saved_push(saved, s, SAVED_LOGIT, &logit));
    AR_TRY(ARI_KERNEL(ctx, add_gated, y, &made, &logit));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_RESIDUAL, .in = {&made, y, &logit}, .out = {y});
}

ar_status ari_shared_backward(ari_shared *s, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dx, const ar_tensor *dy,
                              const ar_batch *batch)
{
    ar_tensor made, logit, dmade, dlogit, more;
    if (!s->expert)
        return AR_OK;
    if (!s->gate) {
        AR_TRY(ar_module_backward(s->expert, ctx, saved, &more, dy, batch));
        return ari_add_gradient(ctx, dx, &more);
    }
    AR_TRY(ar_saved_pop(saved, s, SAVED_SHARED, &made));
    AR_TRY(ar_saved_pop(saved, s, SAVED_LOGIT, &logit));
    AR_TRY(ari_like(ctx, &dmade, dy, s->hidden));
    AR_TRY(ari_like(ctx, &dlogit, &logit, 1));
    AR_TRY(ARI_KERNEL(ctx, add_gated_backward, &dmade, &dlogit, dy, &made, &logit));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .in = {dy}, .out = {&dmade}));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GATE, .in = {dy}, .out = {&dlogit}));
    ari_work_moves(ARI_GPU_MOVES_GATE, true, ar_tensor_count(dy));
    ARI_RELEASE(ctx, &made, &logit);
    AR_TRY(ar_module_backward(s->expert, ctx, saved, &more, &dmade, batch));
    ar_ctx_release(ctx, &dmade);
    AR_TRY(ari_add_gradient(ctx, dx, &more));
    AR_TRY(ar_module_backward(s->gate, ctx, saved, &more, &dlogit, batch));
    ar_ctx_release(ctx, &dlogit);
    return ari_add_gradient(ctx, dx, &more);
}
