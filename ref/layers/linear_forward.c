/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/faults.h"
#include "ref/layers/linear.h"
#include "ref/layers/parts.h"
#include "ref/layers/sequence.h"

/* The biases side by side, as the outputs are. */
static ar_status joined_bias(ari_linear *l, ar_ctx *ctx, ar_cbuf *bias)
{
    *bias = (ar_cbuf){NULL};
    if (!l->has_bias)
        return AR_OK;
    if (l->n == 1) {
        *bias = ar_const(l->bias[0].value.data);
        return AR_OK;
    }
    ar_tensor all;
    size_t at = 0;
    AR_TRY(ar_ctx_tensor(ctx, &all, AR_F32, 1, &l->local_total));
    for (int i = 0; i < l->n; i++) {
        AR_TRY(ctx->device->ops->copy(ctx->device, ctx->queue, ar_buf_at(all.data, at * sizeof(float)),
                                      ar_const(l->bias[i].value.data), l->local_out[i] * sizeof(float)));
        at += l->local_out[i];
    }
    *bias = ar_const(all.data);
    return AR_OK;
}

/* Whether X is gathered for the product only, and what is kept for the backward pass is x. */
static bool gathered_for_now(const ari_linear *l, const ar_ctx *ctx)
{
    return l->sequence && l->style == ARI_COLUMN && !ctx->keep_gathered;
}

/* X as the product takes it: all positions, of a row-parallel group the own features. */
static ar_status product_input(ari_linear *l, ar_ctx *ctx, ar_tensor *in, const ar_tensor *x)
{
    const bool row = l->style == ARI_ROW;
    *in = *x;
    if (row && l->input_is_sharded)
        return AR_OK;
    if (l->sequence)
        AR_TRY(ari_gather_tokens(ctx, in, x, l->weight[0]->name));
    if (!row)
        return AR_OK;
    ar_tensor whole = *in;
    AR_TRY(ari_own_features(ctx, in, &whole));
    if (l->sequence)
        ar_ctx_release(ctx, &whole);
    return AR_OK;
}

static ar_status keep(ari_linear *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x)
{
    AR_TRY(ari_fault_saved_input(ctx, saved, l, x));
    return ar_saved_push(saved, l, 0, x);
}

static ar_status new_output(ari_linear *l, ar_ctx *ctx, ar_tensor *y, const ar_tensor *in)
{
    return l->sequence && l->style == ARI_ROW ? ari_like_own_tokens(ctx, y, in, l->local_total)
                                              : ari_like(ctx, y, in, l->local_total);
}

/* y = the product's sum over the ranks that share it, and what follows it. */
static ar_status multiply(ari_linear *l, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *in, const ar_epilogue *ep)
{
    const bool row = l->style == ARI_ROW, scattered = row && l->sequence;
    const ar_operand *a = NULL, *b = NULL;
    ar_sum *s = NULL;
    ar_parts parts = {.n = 1, .part = {ar_tensor_rows(in)}};
    if (scattered)
        AR_TRY(ari_rank_major(ctx, &parts.part[0], in));
    AR_TRY(ctx->arith->param_operand(ctx, &b, l->weight, l->n, l->n, false, l->in, row ? ctx->tp : NULL,
                                     row ? NULL : ctx->tp));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, l->weight[0]->name));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    AR_TRY(ctx->arith->fold(ctx, s, row ? ctx->tp : NULL,
                            scattered ? AR_SCATTER_ROWS
                            : row     ? AR_ALL
                                      : AR_KEEP,
                            l->weight[0]->name));
    const ar_tensor rows = ar_tensor_rows(y);
    AR_TRY(ctx->arith->round(ctx, &rows, s, ep));
    ctx->arith->operand_done(ctx, a);
    ari_release_rows(ctx, &parts.part[0], in);
    return AR_OK;
}

ar_status ari_linear_forward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             ar_activation act, ar_tensor *z)
{
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    const bool sharded = l->style == ARI_ROW && l->input_is_sharded;
    ar_tensor in;
    ar_epilogue epilogue = {.act = act};
    AR_TRY(ari_check_features(l->weight[0]->name, "input", x, sharded ? l->in / n : l->in));
    AR_TRY(product_input(l, ctx, &in, x));
    AR_TRY(new_output(l, ctx, y, &in));
    if (act != AR_ACT_NONE)
        AR_TRY(new_output(l, ctx, z, &in));
    const ar_tensor z_rows = ar_tensor_rows(act != AR_ACT_NONE ? z : y);
    epilogue.z = &z_rows;
    AR_TRY(joined_bias(l, ctx, &epilogue.bias));
    AR_TRY(multiply(l, ctx, y, &in, &epilogue));
    AR_TRY(ari_fault_linear_output(ctx, l->style == ARI_ROW, y, &in, &epilogue));
    if (!gathered_for_now(l, ctx))
        return keep(l, ctx, saved, &in);
    ar_ctx_release(ctx, &in);
    return keep(l, ctx, saved, x);
}
