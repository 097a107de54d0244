/* SPDX-License-Identifier: Apache-2.0 */
/* The gradients of parameters. */
#include "plan/lint.h"

/* Which gradient the list means: of what the last operation with weights has got, what has come out of it, and what was
 * there before that was gathered, the one that is placed as it says. */
static ari_lint_type gradient_of(ari_lint_state *l, const ari_operation *op, const ari_op_value *v)
{
    const ari_lint_type stated = ari_lint_stated(v);
    ari_lint_type from[ARI_OP_VALUES + 2];
    int n = 0;
    for (int i = 0; i < l->dys; i++)
        from[n++] = l->dy[i];
    from[n++] = l->at[0];
    from[n++] = l->before;
    for (int i = 0; i < n; i++) {
        bool same = true;
        for (int axis = 0; axis < ARI_LINT_AXES; axis++)
            same = same && (l->size[axis] == 1 || ari_lint_same(from[i].at[axis], stated.at[axis]));
        if (same)
            return stated;
    }
    return ari_lint_agree(l, op, v, from[0]);
}

bool ari_lint_norm_of_heads(const ari_lint_state *l, ari_role role)
{
    return (role == ARI_Q_NORM || role == ARI_K_NORM) && l->c->config->qk_norm == AR_QK_NORM_HEAD;
}

/* Of a norm of heads they are summed over as tokens are. */
static ari_lint_type sum_over_tokens(ari_lint_state *l, const ari_operation *op, ari_lint_type dy)
{
    static const ar_placement tokens = {AR_SHARD, 1};
    const bool of_heads = ari_lint_norm_of_heads(l, op->role);
    ari_lint_type out;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        const ar_placement at = of_heads && dy.at[axis].kind == AR_SHARD ? tokens : dy.at[axis];
        ari_lint_judge(l, op, axis, &out, ari_lint_sum_over_tokens(at, op->output[0].ndim == 1 ? 0 : 1));
    }
    return out;
}

static ari_lint_type weight_gradient_of(ari_lint_state *l, const ari_operation *op, const ari_lint_param *p)
{
    const ari_op_value *last = &op->input[op->inputs - 1];
    const ari_lint_type dy = gradient_of(l, op, last);
    if (op->inputs == 1 || op->output[0].ndim == 1)
        return sum_over_tokens(l, op, dy);
    if (op->input[0].ndim == 2) /* ids */
        return ari_lint_by(l, op, ari_lint_lookup_gradient, dy, p->is);
    const ari_lint_record *r = l->multiplied;
    const ari_lint_type x = ari_lint_agree(l, op, &op->input[0], !r ? l->dy[0] : r->has_again ? r->again : r->stored);
    return ari_lint_by(l, op, ari_lint_product_dw, x, dy);
}

void ari_lint_weight_gradient(ari_lint_state *l, const ari_operation *op)
{
    ari_op_value weight = op->output[0];
    ari_lint_param *p = ari_lint_parameter(l, op->layer, &weight);
    if (!p)
        return;
    p->gradients++;
    ari_lint_type out = weight_gradient_of(l, op, p);
    if (p->is.at[ARI_AXIS_PP].kind == AR_REPLICATE) /* of one use of a weight that stages share */
        out.at[ARI_AXIS_PP] = (ar_placement){AR_PARTIAL_SUM, 0};
    out = ari_lint_agree(l, op, &op->output[0], out);
    const size_t copies = ari_lint_partial(out.at[ARI_AXIS_PP]) ? 2 : 1; /* of a tied weight, at both ends */
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        if (!p->seen[axis] && ari_lint_partial(out.at[axis]))
            l->partial[axis] += copies;
        p->seen[axis] = p->seen[axis] || ari_lint_partial(out.at[axis]);
    }
}
