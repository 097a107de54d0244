/* SPDX-License-Identifier: Apache-2.0 */
/* Contractions whose A comes in blocks (anyrank/arith.h): exponents of A's rows are maxima over blocks and ranks, then
 * the integers of each block are multiplied and added to sums that all blocks of a row share. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/numerics/integer_sum.h"

struct ar_blocks {
    ar_blocks_options o;
    ar_operand *b;
    ar_buf e; /* int32 [batch, rows] */
    ar_buf s; /* int64 [places, batch, rows of a place, n] of `limbs`; ptr NULL: not all is measured */
    int limbs;
};

static void blocks_destroy(ar_ctx *ctx, void *object)
{
    ar_blocks *s = object;
    if (s->b)
        ari_operand_done(ctx, s->b);
    ari_step_free(ctx, s->e);
    ari_step_free(ctx, s->s);
    free(s);
}

ar_status ari_exact_blocks_begin(ar_ctx *ctx, ar_blocks **gives, const ar_tensor *b, const ar_blocks_options *o)
{
    ari_extents x;
    size_t n = 0, bytes = 0;
    ar_blocks *s = NULL;
    const ar_parts parts = {.n = 1, .part = {*b}};
    AR_TRY(ari_parts_extents(&x, &parts));
    AR_TRY(ari_check_blocks(&x, o));
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, "a contraction in blocks"));
    AR_TRY(ari_step_own(ctx, s, blocks_destroy));
    s->o = *o;
    s->limbs = ari_exact_limbs(ari_exact_is_narrow(ctx, o->k_full), o->k_full);
    AR_TRY(ari_exact_operand_over(ctx, &s->b, &parts, true, o->k_full, (ar_comm *const[2]){o->places, o->replicas},
                                  NULL, o->tag));
    AR_TRY(ari_mul_size(&n, x.batch, o->rows));
    AR_TRY(ari_mul_size(&bytes, n, sizeof(int32_t)));
    AR_TRY(ari_step_alloc(ctx, &s->e, bytes));
    *gives = s;
    /* -0 has the bits of AR_EXP_ZERO, the exponent of no terms. */
    const ar_tensor none = ar_tensor_flat(AR_F32, s->e, n);
    return ARI_KERNEL(ctx, fill, &none, -0.0f);
}

/* A block's exponents in an array of one for each of `width` rows or terms of every matrix. */
static ar_buf exponents_of(ar_buf all, const ar_part *at, size_t width, size_t first)
{
    return ar_buf_at(all, (at->matrix * width + first) * sizeof(int32_t));
}

static ar_status check_block(const ar_blocks *s, const ar_part *at)
{
    const ari_extents a = {.batch = s->b->x.batch, .rows = s->o.rows, .k = s->b->x.k};
    return ari_check_part(&a, at);
}

ar_status ari_exact_blocks_measure(ar_ctx *ctx, ar_blocks *s, const ar_part *at, const ar_tensor *a)
{
    AR_TRY(check_block(s, at));
    const ar_buf c = exponents_of(s->b->c, at, s->b->x.k, at->col);
    return ARI_KERNEL(ctx, row_exponents, exponents_of(s->e, at, s->o.rows, at->row), a, ar_const(c), +1, true,
                      s->b->narrow);
}

ar_status ari_exact_blocks_measured(ar_ctx *ctx, ar_blocks *s)
{
    const size_t n = s->b->x.batch * s->o.rows;
    size_t bytes = 0;
    AR_TRY(ari_exact_max(ctx, s->o.places, s->e, n, s->o.tag));
    AR_TRY(ari_exact_max(ctx, s->o.replicas, s->e, n, s->o.tag));
    AR_TRY(ari_mul_size(&bytes, n, s->b->x.rows));
    AR_TRY(ari_mul_size(&bytes, bytes, (size_t)s->limbs * sizeof(int64_t)));
    AR_TRY(ari_step_alloc(ctx, &s->s, bytes));
    return ARI_KERNEL(ctx, zero, s->s, bytes);
}

ar_status ari_exact_blocks_add(ar_ctx *ctx, ar_blocks *s, const ar_part *at, const ar_tensor *a)
{
    const size_t n = s->b->x.rows, each = s->o.rows / ari_places(&s->o);
    const ar_part sums = ari_place_part(at, s->b->x.batch, each, n);
    const ar_part terms = {at->matrix, at->matrices, 0, n, at->col, at->cols};
    const size_t first = (sums.matrix * each + sums.row) * n * (size_t)s->limbs;
    const ar_buf c = exponents_of(s->b->c, at, s->b->x.k, at->col);
    const ar_buf e = exponents_of(s->e, at, s->o.rows, at->row);
    ar_packed *left = NULL, *right = NULL;
    ar_status st = AR_OK;
    AR_TRY(check_block(s, at));
    AR_TRY(ari_exact_new_packed(ctx, &left, at->matrices, at->rows, at->cols, ari_exact_form(true, s->b->narrow)));
    AR_TRY_TO(done, st, ARI_KERNEL(ctx, pack, left, 0, 0, a, ar_const(c), +1, ar_const(e)));
    AR_TRY_TO(done, st, ARI_KERNEL(ctx, packed_part, &right, s->b->packed, &terms));
    AR_TRY_TO(done, st,
              ARI_KERNEL(ctx, gemm_i64, ar_buf_at(s->s, first * sizeof(int64_t)), left, right, s->limbs, true));
done:
    ARI_KERNEL(ctx, packed_destroy, right);
    ari_exact_end_packed(ctx, left);
    return st;
}

/* The own place's sums, of all ranks that have terms of them. */
static ar_status fold_places(ar_ctx *ctx, ar_blocks *s, ari_sum_slice *own)
{
    const size_t places = ari_places(&s->o);
    if (places == 1)
        return AR_OK;
    AR_TRY(ari_exact_slice(ctx, own, ctx->queue, NULL, s->o.places, s->o.tag));
    own->start = 0; /* of the place's own elements */
    own->e = ar_cbuf_at(own->e, (size_t)ar_comm_rank(s->o.places) * own->rows * sizeof(int32_t));
    return AR_OK;
}

ar_status ari_exact_blocks_end(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, ar_fold replicas)
{
    const size_t places = ari_places(&s->o), total = s->b->x.batch * s->o.rows * s->b->x.rows;
    ar_comm *over = replicas != AR_KEEP && ari_has_peers(s->o.replicas) ? s->o.replicas : NULL;
    ari_sum_slice own = {.s = s->s,
                         .limbs = s->limbs,
                         .narrow = s->b->narrow,
                         .terms = s->o.k_full,
                         .count = total,
                         .rows = s->o.rows / places,
                         .cols = s->b->x.rows,
                         .e = ar_const(s->e),
                         .f = ar_const(s->b->e),
                         .e_step = s->o.rows};
    if (!ar_tensor_is_contiguous(y) || ar_tensor_count(y) * places != total)
        return ar_error_set(AR_ERR_SHAPE, "%s: a contraction of %zu elements is rounded into %zu", s->o.tag,
                            total / places, ar_tensor_count(y));
    s->s.ptr = NULL; /* whoever folds it ends it */
    AR_TRY(fold_places(ctx, s, &own));
    if (over)
        AR_TRY(ari_exact_slice(ctx, &own, ctx->queue, NULL, over, s->o.tag));
    AR_TRY(ari_exact_round_slice(ctx, y, own.start, &own));
    ari_step_free(ctx, own.s);
    if (over)
        AR_TRY(ari_exact_gather(ctx, y, over));
    ari_step_disown(ctx, s);
    return AR_OK;
}
