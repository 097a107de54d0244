/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/linear/product.h"

#include "ref/core/tensor_private.h"
#include "ref/layers/faults.h"

static ar_status make_operand(ar_ctx *ctx, const ar_operand **a, const ari_product *p, const ar_tensor *rows)
{
    ar_parts parts = {.n = p->n, .along_k = true};
    for (int i = 0; i < p->n; i++)
        parts.part[i] = ar_tensor_slice(rows, 1, p->column[i], p->width[i]);
    return ctx->arith->operand_a(ctx, a, &parts, p->b, p->tag);
}

/* Rounds the sum to y; this rank has `rows` rows of it. */
static ar_status round_sum(ar_ctx *ctx, const ari_product *p, const ari_output *o, ar_sum *s, size_t rows)
{
    const ar_tensor y = ari_tensor_rows(&o->y), z = ari_tensor_rows(&o->z);
    const ar_epilogue ep = {.bias = o->bias, .act = o->act, .z = &z};
    if (p->unreduced)
        return ari_fault_partial_dx(ctx, &y, s, rows, p->tag);
    return ctx->arith->round(ctx, &y, s, &ep);
}

ar_status ari_multiply(ar_ctx *ctx, const ari_product *p, const ari_output *o, const ar_tensor *input)
{
    const ar_operand *a = NULL;
    ar_sum *s = NULL;
    ar_tensor rows = ari_tensor_rows(input);
    if (p->scattered)
        AR_TRY(ari_rank_major(ctx, &rows, input));
    AR_TRY(make_operand(ctx, &a, p, &rows));
    AR_TRY(ctx->arith->contract(ctx, &s, a, p->b));
    if (!p->unreduced)
        AR_TRY(ctx->arith->fold(ctx, s, ctx->queue, p->group,
                                p->scattered ? AR_SCATTER_ROWS
                                : p->group   ? AR_ALL
                                             : AR_KEEP,
                                p->tag));
    AR_TRY(round_sum(ctx, p, o, s, rows.shape[0]));
    ctx->arith->operand_done(ctx, a);
    ari_release_placed(ctx, &rows, input);
    return AR_OK;
}

/* --- in chunks ---------------------------------------------------------------------------------------------------- */

/* Returns memory for chunk i of o: its own if that is contiguous, otherwise step memory. */
static ar_status take_chunk(ar_ctx *ctx, ar_tensor *rows, const ari_chunks *c, const ar_tensor *t, size_t i,
                            bool is_local)
{
    const ar_tensor view = ari_chunk_view(c, t, i, is_local);
    const size_t shape[2] = {view.shape[0] * view.shape[1] * view.shape[2], view.shape[3]};
    return ari_tensor_is_contiguous(&view) ? ar_tensor_view(rows, t->dtype, 2, shape, view.data)
                                           : ar_ctx_tensor(ctx, rows, t->dtype, 2, shape);
}

static ar_status leave_chunk(ar_ctx *ctx, ar_tensor *rows, const ari_chunks *c, const ar_tensor *t, size_t i,
                             bool is_local)
{
    const ar_tensor view = ari_chunk_view(c, t, i, is_local);
    if (ari_tensor_is_contiguous(&view))
        return AR_OK;
    AR_TRY(ari_chunk_put(ctx, c, t, i, is_local, rows));
    ar_ctx_release(ctx, rows);
    return AR_OK;
}

static ar_status round_chunk(ar_ctx *ctx, const ari_product *p, const ari_output *o, const ari_chunks *c, size_t i,
                             ar_sum *s)
{
    const bool is_local = p->scattered, active = o->act != AR_ACT_NONE;
    ari_output chunk = *o;
    AR_TRY(take_chunk(ctx, &chunk.y, c, &o->y, i, is_local));
    if (active)
        AR_TRY(take_chunk(ctx, &chunk.z, c, &o->z, i, is_local));
    AR_TRY(round_sum(ctx, p, &chunk, s, ari_chunk_rows(c, i)));
    AR_TRY(leave_chunk(ctx, &chunk.y, c, &o->y, i, is_local));
    return active ? leave_chunk(ctx, &chunk.z, c, &o->z, i, is_local) : AR_OK;
}

ar_status ari_multiply_chunk(ar_ctx *ctx, const ari_product *p, const ari_output *o, const ari_chunks *c, size_t i,
                             const ar_tensor *rows)
{
    const ar_operand *a = NULL;
    ar_sum *s = NULL;
    AR_TRY(make_operand(ctx, &a, p, rows));
    AR_TRY(ctx->arith->contract(ctx, &s, a, p->b));
    AR_TRY(round_chunk(ctx, p, o, c, i, s));
    ctx->arith->operand_done(ctx, a);
    return AR_OK;
}

/* A product in progress: the rows of a chunk, and their sum over the ranks. */
typedef struct under_way {
    const ar_operand *a;
    ar_sum *s;
} under_way;

static ar_status begin_chunk(ar_ctx *ctx, under_way *u, const ari_product *p, const ari_chunks *c, size_t i,
                             const ar_operand *full_operand)
{
    const ari_communication *overlapped = NULL;
    ar_part part = {.matrices = 1, .row = i * c->ranks * c->samples * c->chunk_seq, .rows = ari_chunk_rows(c, i)};
    for (int k = 0; k < p->n; k++)
        part.cols += p->width[k];
    AR_TRY(ari_ctx_overlapped(ctx, &overlapped));
    AR_TRY(ctx->arith->operand_part(ctx, &u->a, full_operand, &part));
    AR_TRY(ctx->arith->contract(ctx, &u->s, u->a, p->b));
    return p->unreduced ? AR_OK
                        : ctx->arith->fold(ctx, u->s, overlapped->queue, overlapped->tp, AR_SCATTER_ROWS, p->tag);
}

static ar_status end_chunk(ar_ctx *ctx, under_way *u, const ari_product *p, const ari_output *o, const ari_chunks *c,
                           size_t i)
{
    AR_TRY(round_chunk(ctx, p, o, c, i, u->s));
    ctx->arith->operand_done(ctx, u->a);
    return AR_OK;
}

/* Copies t [.., s, f] to rows [tokens, f] chunk by chunk, in memory of the step. */
static ar_status chunk_order(ar_ctx *ctx, ar_tensor *rows, const ari_chunks *c, const ar_tensor *t)
{
    const size_t total_rows = c->ranks * c->samples * c->local_seq;
    AR_TRY(ari_new_rows(ctx, rows, t->dtype, total_rows, t->shape[t->ndim - 1]));
    for (size_t i = 0, row_offset = 0; i < c->n; row_offset += ari_chunk_rows(c, i++)) {
        const ar_tensor src = ari_chunk_view(c, t, i, false),
                        chunk = ar_tensor_slice(rows, 0, row_offset, total_rows - row_offset);
        ar_tensor dst;
        AR_TRY(ar_tensor_view(&dst, t->dtype, 4, src.shape, chunk.data));
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
    }
    return AR_OK;
}

ar_status ari_multiply_scattered(ar_ctx *ctx, const ari_product *p, const ari_output *o, const ari_chunks *c,
                                 const ar_tensor *input)
{
    const ar_operand *full_operand = NULL;
    under_way u[2] = {{NULL}};
    ar_tensor rows;
    AR_TRY(chunk_order(ctx, &rows, c, input));
    AR_TRY(make_operand(ctx, &full_operand, p, &rows));
    for (size_t i = 0; i < c->n; i++) {
        AR_TRY(begin_chunk(ctx, &u[i % 2], p, c, i, full_operand));
        if (i > 0)
            AR_TRY(end_chunk(ctx, &u[(i + 1) % 2], p, o, c, i - 1));
    }
    AR_TRY(end_chunk(ctx, &u[(c->n + 1) % 2], p, o, c, c->n - 1));
    ctx->arith->operand_done(ctx, full_operand);
    ar_ctx_release(ctx, &rows);
    return AR_OK;
}
