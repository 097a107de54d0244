/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of rows in native numerics: a product for each, and one sum over the ranks of them all. */
#include "ref/arith/operand.h"
#include "ref/context/context.h"

ar_status ari_check_groups(const ar_groups *g, size_t rows, const char *tag)
{
    const size_t all = g->n > 0 ? g->first[g->n] : 0;
    if (all != rows)
        return ar_error_set(AR_ERR_SHAPE, "%s: %zu groups of %zu rows together, the tensor has %zu", tag, g->n, all,
                            rows);
    return AR_OK;
}

static ar_status multiply_group(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_operand *b,
                                const char *tag)
{
    const ar_operand *rows = NULL;
    ar_sum *s = NULL;
    AR_TRY(ctx->arith->operand_a(ctx, &rows, &(ar_parts){.n = 1, .part = {*a}}, b, tag));
    AR_TRY(ctx->arith->contract(ctx, &s, rows, b));
    AR_TRY(ctx->arith->round(ctx, y, s, NULL));
    ctx->arith->operand_done(ctx, rows);
    return AR_OK;
}

ar_status ari_native_contract_groups(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *a, const ar_group_operands *b,
                                     const ar_groups *g, ar_comm *over, const char *tag)
{
    AR_TRY(ari_check_groups(g, a->shape[0], tag));
    for (size_t i = 0; i < g->n; i++) {
        const ar_tensor to = ari_group_rows(y, g, i), from = ari_group_rows(a, g, i);
        const ar_operand *of = NULL;
        AR_TRY(b->make(ctx, &of, b->user, i));
        if (to.shape[0] > 0)
            AR_TRY(multiply_group(ctx, &to, &from, of, tag));
    }
    if (!ari_has_peers(over))
        return AR_OK;
    return ar_comm_all_reduce(over, ctx->queue, y->data, ar_const(y->data), ar_tensor_count(y), y->dtype, AR_SUM, tag);
}

/* A group without rows adds nothing, and yet has a gradient: zeros. */
static ar_status add_nothing(ar_ctx *ctx, ar_param *p)
{
    if (!p->requires_grad)
        return AR_OK;
    p->has_grad = true;
    return ctx->arith->grad_ensure(ctx, p);
}

ar_status ari_native_grad_groups(ar_ctx *ctx, ar_param *const *to, const ar_tensor *dy, int n, const ar_tensor *x,
                                 const ar_groups *g, ar_comm *x_rows_over, const char *tag)
{
    AR_TRY(ari_check_groups(g, x->shape[0], tag));
    for (size_t i = 0; i < g->n; i++) {
        const ar_tensor rows = ari_group_rows(x, g, i);
        for (int j = 0; j < n; j++) {
            ar_param *p = to[i * (size_t)n + (size_t)j];
            const ar_grad_terms terms = {p, ari_group_rows(&dy[j], g, i)};
            AR_TRY(rows.shape[0] > 0 ? ctx->arith->grad_contract(ctx, &terms, 1, &rows, 1, x_rows_over)
                                     : add_nothing(ctx, p));
        }
    }
    return AR_OK;
}
