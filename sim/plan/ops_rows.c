/* SPDX-License-Identifier: Apache-2.0 */
/* What ranks that share a sequence send each other for gradients of weights, in exact numerics. */
#include "sim/plan/ops_impl.h"

#include "ref/core/size.h"
#include "ref/placement/parallel_private.h"

/* The rows that ranks send each other of what several have a part of, and in how many blocks they are. */
typedef struct shared_rows {
    ari_over over;
    size_t rows, blocks;
} shared_rows;

/* Parts of samples, or the rows of each expert of each, as if all had as many. */
static shared_rows shared_rows_of(ari_op_builder *w, size_t experts)
{
    const size_t seq = w->c->run.seq;
    size_t parts = 0;
    if (!w->in_experts)
        return (shared_rows){ARI_OVER_CP,
                             ari_op_builder_mul(w, w->own, ari_gradient_moves(&w->c->run.parallel, seq, &parts)),
                             ari_op_builder_mul(w, w->own, ari_gradient_parts(seq))};
    const ari_over over = w->apart ? ARI_OVER_EXPERT_CP : ARI_OVER_CP;
    const size_t own = ari_op_builder_rows(w) / (w->whole ? w->ranks[ARI_AXIS_TP] : 1);
    return (shared_rows){over, ari_op_builder_mul(w, own, ari_op_builder_ranks(w, over) - 1),
                         ari_op_builder_mul(w, w->own, experts)};
}

static void move_rows(ari_op_builder *w, const shared_rows *s, size_t features, ar_dtype dtype, ari_role role)
{
    ari_op_builder_call_for(w, ARI_CALL_ALL_TO_ALL, s->over, ari_op_builder_mul(w, s->rows, features), dtype, role);
    ari_op_call *call = &w->op.call[w->op.calls - 1];
    call->routed = w->in_experts;
    call->row = s->rows / s->blocks * features;
}

/* Within a part of a sample dW is one sum over all positions: of those that share them one rank has the others' rows of
 * dY, and of X and its exponents, which go with the first weight that it meets. Of experts they tell each other first
 * how many rows each has. */
void ari_op_builder_share_rows(ari_op_builder *w, const ari_op_value *weight, const ari_op_value *x,
                               const ari_op_value *dy, ari_role role)
{
    const shared_rows s = shared_rows_of(w, weight->experts);
    if (!w->form.exact || s.rows == 0 || s.blocks == 0)
        return;
    if (!w->x_scaled && w->in_experts)
        ari_op_builder_call_for(w, ARI_CALL_ALL_GATHER, s.over,
                                ari_op_builder_mul(w, s.blocks, ari_op_builder_ranks(w, s.over)), AR_I64, role);
    if (!w->x_scaled) {
        move_rows(w, &s, 1, AR_F32, role);
        move_rows(w, &s, x->local[2], x->dtype, role);
    }
    move_rows(w, &s, dy->local[2], dy->dtype, role);
}
