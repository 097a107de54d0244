/* SPDX-License-Identifier: Apache-2.0 */
/* Exact arithmetic: every sum is a sum of integers (numerics.md), so no result depends on how K, the rows or the
 * samples are divided among ranks, tiles or threads. */
#include <stdlib.h>

#include "anyrank/queue.h"
#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/param_private.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/integer_sum.h"

struct ar_sum {
    const ar_operand *a, *b;
    ar_comm *group;      /* group over which the sum was reduced; NULL: complete on this rank */
    bool scattered;      /* AR_SCATTER_ROWS: the result is the slice, in full rows; otherwise the rounded slices are
                            gathered */
    ari_sum_slice slice; /* slice of the reduced sums if `over` is set */
    int limbs;
    ar_event *reduced; /* recorded after a reduction on another queue; NULL: the context's queue reduces */
};

ar_status ari_exact_max(ar_ctx *ctx, ar_comm *group, ar_buf e, size_t n, const char *tag)
{
    if (!ari_has_peers(group))
        return AR_OK;
    return ar_comm_all_reduce(group, ctx->queue, e, ar_const(e), n, AR_I32, AR_MAX, tag);
}

static void operand_fini(ar_device *d, ar_queue *q, ar_operand *o)
{
    d->ops->packed_destroy(d, q, o->packed);
    if (o->is_cached) {
        d->ops->free(d, q, o->c);
        d->ops->free(d, q, o->e);
    }
    free(o);
}

static void operand_destroy(ar_ctx *ctx, void *object)
{
    ar_operand *o = object;
    ari_step_count_free(ctx, o->counted);
    if (!o->part) {
        ari_step_free(ctx, o->c);
        ari_step_free(ctx, o->e);
    }
    operand_fini(ctx->device, ctx->queue, o);
}

/* Exponent arrays are memory of the step, unless the operand is kept with a parameter. */
static ar_status exponent_array(ar_ctx *ctx, const ar_operand *o, ar_buf *out, size_t n)
{
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, n ? n : 1, sizeof(int32_t)));
    return o->is_cached ? ARI_KERNEL(ctx, alloc, out, bytes) : ari_step_alloc(ctx, out, bytes);
}

/* Equilibrates: computes one exponent per column of B, over the rows of all parts and all ranks. */
static ar_status equilibrate(ar_ctx *ctx, ar_operand *o, const ar_parts *p, ar_comm *rows_over, const char *tag)
{
    AR_TRY(exponent_array(ctx, o, &o->c, o->x.batch * o->x.k));
    size_t column = 0;
    for (int i = 0; i < p->n; i++) {
        const ar_tensor *t = &p->part[i];
        AR_TRY(ARI_KERNEL(ctx, col_exponents, ar_buf_at(o->c, column * sizeof(int32_t)), t, i > 0 && !p->along_k));
        column += p->along_k ? t->shape[t->ndim - 1] : 0;
    }
    return ari_exact_max(ctx, rows_over, o->c, o->x.batch * o->x.k, tag);
}

/* Computes row exponents of all parts, scaled by 2^(sign*c), over all ranks that share K; then quantises. sign: +1 for
 * A, -1 for B, so that every product is unchanged. split: packed as A. */
static ar_status quantise_operand(ar_ctx *ctx, ar_operand *o, const ar_parts *p, ar_cbuf c, int sign, bool split,
                                  const char *tag)
{
    AR_TRY(exponent_array(ctx, o, &o->e, o->x.batch * o->x.rows));
    size_t row = 0, k = 0;
    for (int i = 0; i < p->n; i++) {
        const ar_tensor *t = &p->part[i];
        const ar_cbuf part_c = c.ptr ? ar_cbuf_at(c, k * sizeof(int32_t)) : c;
        AR_TRY(ARI_KERNEL(ctx, row_exponents, ar_buf_at(o->e, row * sizeof(int32_t)), t, part_c, sign,
                          i > 0 && p->along_k, o->narrow));
        row += p->along_k ? 0 : t->shape[t->ndim - 2];
        k += p->along_k ? t->shape[t->ndim - 1] : 0;
    }
    for (int i = 0; i < 2; i++)
        AR_TRY(ari_exact_max(ctx, o->k_groups[i], o->e, o->x.batch * o->x.rows, tag));
    AR_TRY(ARI_KERNEL(ctx, packed_create, &o->packed, o->x.batch, o->x.rows, o->x.k, ari_exact_form(split, o->narrow)));
    o->counted = o->is_cached ? 0 : ctx->device->ops->packed_bytes(o->packed);
    ari_step_count_alloc(ctx, o->counted);
    row = k = 0;
    for (int i = 0; i < p->n; i++) {
        const ar_tensor *t = &p->part[i];
        const ar_cbuf part_c = c.ptr ? ar_cbuf_at(c, k * sizeof(int32_t)) : c;
        AR_TRY(ARI_KERNEL(ctx, pack, o->packed, row, k, t, part_c, sign, ar_const(o->e)));
        row += p->along_k ? 0 : t->shape[t->ndim - 2];
        k += p->along_k ? t->shape[t->ndim - 1] : 0;
    }
    return AR_OK;
}

static ar_status operand_init(ar_operand *o, const ar_parts *p, size_t k_full, ar_comm *const k_groups[2],
                              bool is_cached, bool narrow, const char *tag)
{
    AR_TRY(ari_parts_extents(&o->x, p));
    o->narrow = narrow;
    if (!ari_has_peers(k_groups[0]) && !ari_has_peers(k_groups[1]) && o->x.k != k_full)
        return ar_error_set(AR_ERR_SHAPE, "%s: a contraction over %zu terms was given %zu", tag, k_full, o->x.k);
    o->k_full = k_full;
    o->k_groups[0] = k_groups[0];
    o->k_groups[1] = k_groups[1];
    o->is_cached = is_cached;
    return AR_OK;
}

/* Creates an empty operand that ends with the step. */
static ar_status step_operand(ar_ctx *ctx, ar_operand **out)
{
    AR_TRY(ari_alloc_zero((void **)out, 1, sizeof **out, "an operand"));
    return ari_step_own(ctx, *out, operand_destroy);
}

ar_status ari_exact_operand_over(ar_ctx *ctx, ar_operand **out, const ar_parts *b, bool scale, size_t k_full,
                                 ar_comm *const k_groups[2], ar_comm *rows_over, const char *tag)
{
    ar_operand *o = NULL;
    AR_TRY(step_operand(ctx, &o));
    AR_TRY(operand_init(o, b, k_full, k_groups, false, ari_exact_is_narrow(ctx, k_full), tag));
    if (scale)
        AR_TRY(equilibrate(ctx, o, b, rows_over, tag));
    AR_TRY(quantise_operand(ctx, o, b, ar_const(o->c), -1, false, tag));
    *out = o;
    return AR_OK;
}

ar_status ari_exact_operand_b(ar_ctx *ctx, const ar_operand **out, const ar_parts *b, bool scale, size_t k_full,
                              ar_comm *k_over, ar_comm *rows_over, const char *tag)
{
    ar_operand *o = NULL;
    AR_TRY(ari_exact_operand_over(ctx, &o, b, scale, k_full, (ar_comm *const[2]){k_over, NULL}, rows_over, tag));
    *out = o;
    return AR_OK;
}

ar_status ari_exact_operand_a(ar_ctx *ctx, const ar_operand **out, const ar_parts *a, const ar_operand *b,
                              const char *tag)
{
    ar_operand *o = NULL;
    AR_TRY(step_operand(ctx, &o));
    AR_TRY(operand_init(o, a, b->k_full, b->k_groups, false, b->narrow, tag));
    AR_TRY(ari_check_pair(&o->x, &b->x, tag));
    AR_TRY(quantise_operand(ctx, o, a, ar_const(b->c), +1, true, tag));
    *out = o;
    return AR_OK;
}

static ar_buf exponents_at(ar_buf exponents, size_t offset)
{
    return exponents.ptr ? ar_buf_at(exponents, offset * sizeof(int32_t)) : exponents;
}

ar_status ari_exact_operand_part(ar_ctx *ctx, const ar_operand **out, const ar_operand *full, const ar_part *part)
{
    ar_operand *o = NULL;
    AR_TRY(ari_check_part(&full->x, part));
    AR_TRY(step_operand(ctx, &o));
    o->part = true;
    o->narrow = full->narrow;
    o->x = (ari_extents){.batch = part->matrices, .rows = part->rows, .k = part->cols};
    o->k_full = part->cols;
    o->c = exponents_at(full->c, part->matrix * full->x.k + part->col);
    o->e = exponents_at(full->e, part->matrix * full->x.rows + part->row);
    AR_TRY(ARI_KERNEL(ctx, packed_part, &o->packed, full->packed, part));
    o->counted = ctx->device->ops->packed_bytes(o->packed);
    ari_step_count_alloc(ctx, o->counted);
    *out = o;
    return AR_OK;
}

/* --- operands kept with their parameters -------------------------------------------------------------------------- */

/* A cached operand; params[0] holds the list. */
struct ar_param_cache {
    struct ar_param_cache *next;
    ar_param *params[AR_MAX_PARTS];
    uint64_t version[AR_MAX_PARTS];
    int n, watched; /* n operands were packed together; the versions of all `watched` parameters count */
    ar_operand_use use;
    ar_operand *operand;
    size_t counted; /* its bytes in the step's memory */
};

static bool same_use(const ar_param_cache *k, ar_param *const *params, int n, int watched, ar_operand_use use)
{
    if (k->n != n || k->watched != watched || k->use != use)
        return false;
    for (int i = 0; i < watched; i++) {
        if (k->params[i] != params[i])
            return false;
    }
    return true;
}

static bool is_current(const ar_param_cache *k)
{
    for (int i = 0; i < k->watched; i++) {
        if (k->version[i] != k->params[i]->version)
            return false;
    }
    return true;
}

static ar_status cache_fill(ar_ctx *ctx, ar_param_cache *k, size_t k_full, ar_comm *k_over, ar_comm *rows_over)
{
    const bool narrow = ari_exact_narrow_use(ctx, k->use);
    ar_parts parts = {.n = k->n, .along_k = k->use != AR_USE_FORWARD};
    for (int i = 0; i < k->n; i++) {
        const ar_tensor w = ari_param_matrix(k->params[i]);
        parts.part[i] = parts.along_k ? ari_tensor_transposed(&w) : w;
    }
    for (int i = 0; i < k->watched; i++)
        k->version[i] = k->params[i]->version;
    const char *tag = k->params[0]->name;
    AR_TRY(ari_alloc_zero((void **)&k->operand, 1, sizeof *k->operand, "a kept operand"));
    ar_operand *o = k->operand;
    AR_TRY(operand_init(o, &parts, k_full, (ar_comm *const[2]){k_over, NULL}, true, narrow, tag));
    AR_TRY(equilibrate(ctx, o, &parts, rows_over, tag));
    return quantise_operand(ctx, o, &parts, ar_const(o->c), -1, false, tag);
}

static size_t kept_bytes(ar_device *d, const ar_operand *o)
{
    const bool any = o && o->packed;
    return any ? d->ops->packed_bytes(o->packed) + o->x.batch * (o->x.k + o->x.rows) * sizeof(int32_t) : 0;
}

/* Returns true if ZeRO-3 gathers the parameter, so that its value is memory of the step. */
static bool is_gathered(const ar_param *p)
{
    return p->share && p->share->value.ptr;
}

ar_status ari_exact_param_operand(ar_ctx *ctx, const ar_operand **borrows, ar_param *const *params, int n, int watched,
                                  ar_operand_use use, size_t k_full, ar_comm *k_over, ar_comm *rows_over)
{
    if (n < 1 || n > watched || watched > AR_MAX_PARTS)
        return ar_error_set(AR_ERR_ARG, "a contraction takes 1 to %d parameters, not %d of %d", AR_MAX_PARTS, n,
                            watched);
    ar_param_cache *k = params[0]->cache;
    while (k && !same_use(k, params, n, watched, use))
        k = k->next;
    if (!k) {
        AR_TRY(ari_alloc_zero((void **)&k, 1, sizeof *k, "a kept operand"));
        for (int i = 0; i < watched; i++)
            k->params[i] = params[i];
        k->watched = watched;
        k->n = n;
        k->use = use;
        k->next = params[0]->cache;
        params[0]->cache = k;
    }
    if (k->operand && !is_current(k)) {
        operand_fini(ctx->device, ctx->queue, k->operand);
        k->operand = NULL;
    }
    if (!k->operand) {
        const ar_status st = cache_fill(ctx, k, k_full, k_over, rows_over);
        if (st != AR_OK) {
            if (k->operand)
                operand_fini(ctx->device, ctx->queue, k->operand);
            k->operand = NULL;
            return st;
        }
        k->operand->cache = k;
        k->counted = ctx->operands_once && !is_gathered(params[0]) ? kept_bytes(ctx->device, k->operand) : 0;
        if (k->counted > 0 || is_gathered(params[0]))
            ari_step_count_alloc(ctx, kept_bytes(ctx->device, k->operand));
    }
    *borrows = k->operand;
    return AR_OK;
}

/* If each weight is used once, no other use has to wait. Operands of gathered weights are released here. */
void ari_exact_operand_done(ar_ctx *ctx, const ar_operand *o)
{
    ar_param_cache *k = o->cache;
    if (!k) {
        ari_operand_done(ctx, o);
    } else if (k->counted > 0) {
        ari_step_count_free(ctx, k->counted);
        operand_fini(ctx->device, ctx->queue, k->operand);
        k->operand = NULL;
        k->counted = 0;
    }
}

size_t ari_exact_operand_bytes(const ar_param *p)
{
    size_t bytes = 0;
    for (const ar_param_cache *k = p->cache; k; k = k->next)
        bytes += k->counted > 0 ? 0 : kept_bytes(p->device, k->operand);
    return bytes;
}

void ari_exact_operand_release(ar_param *p, ar_queue *q)
{
    while (p->cache) {
        ar_param_cache *k = p->cache;
        p->cache = k->next;
        if (k->operand)
            operand_fini(p->device, q, k->operand);
        free(k);
    }
}

/* --- contract, fold, round ---------------------------------------------------------------------------------------- */

static void sum_destroy(ar_ctx *ctx, void *object)
{
    ar_sum *s = object;
    (void)ctx;
    ar_event_destroy(s->reduced);
    free(s);
}

ar_status ari_exact_contract(ar_ctx *ctx, ar_sum **out, const ar_operand *a, const ar_operand *b)
{
    ar_sum *s = NULL;
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, "a sum"));
    s->a = a;
    s->b = b;
    s->limbs = ari_exact_limbs(b->narrow, b->k_full);
    AR_TRY(ari_step_own(ctx, s, sum_destroy));
    *out = s; /* the multiplication waits for fold or round: a sum that is not folded is rounded tile by tile */
    return AR_OK;
}

ar_status ari_exact_slice(ar_ctx *ctx, ari_sum_slice *s, ar_queue *q, ar_event *reduced, ar_comm *group,
                          const char *tag)
{
    const size_t total = s->count, limbs = (size_t)s->limbs;
    const ar_buf partial = s->s;
    ARI_OWNED size_t *counts = NULL;
    AR_TRY(ari_slice_counts(&counts, group, total, limbs));
    ari_comm_slice(total, ar_comm_size(group), ar_comm_rank(group), &s->start, &s->count);
    AR_TRY(ari_step_alloc(ctx, &s->s, s->count * limbs * sizeof(int64_t)));
    AR_TRY(ari_queue_follow(q, ctx->queue, reduced));
    AR_TRY(ar_comm_reduce_scatter(group, q, s->s, ar_const(partial), counts, AR_I64, AR_SUM, tag));
    if (q != ctx->queue) {
        s->sent = partial;
        return ar_event_record(reduced, q);
    }
    ari_step_free(ctx, partial);
    return AR_OK;
}

ar_status ari_exact_fold(ar_ctx *ctx, ar_sum *s, ar_queue *q, ar_comm *group, ar_fold method, const char *tag)
{
    if (method == AR_KEEP || !ari_has_peers(group))
        return AR_OK;
    const ari_extents *a = &s->a->x, *b = &s->b->x;
    size_t bytes = 0;
    s->slice = (ari_sum_slice){.limbs = s->limbs,
                               .count = a->batch * a->rows * b->rows,
                               .rows = a->rows,
                               .cols = b->rows,
                               .e = ar_const(s->a->e),
                               .f = ar_const(s->b->e),
                               .e_step = a->rows};
    AR_TRY(ari_check_fold(ctx, a, q, group, method, tag));
    AR_TRY(ari_mul_size(&bytes, s->slice.count, (size_t)s->limbs * sizeof(int64_t)));
    AR_TRY(ari_step_alloc(ctx, &s->slice.s, bytes));
    AR_TRY(ARI_KERNEL(ctx, gemm_i64, s->slice.s, s->a->packed, s->b->packed, s->limbs, false));
    ari_work_of_product(a, b);
    if (q != ctx->queue)
        AR_TRY(ar_event_create(&s->reduced));
    AR_TRY(ari_exact_slice(ctx, &s->slice, q, s->reduced, group, tag));
    s->group = group;
    s->scattered = method == AR_SCATTER_ROWS;
    return AR_OK;
}

/* y, contiguous fp32, = the slice rounded. */
static ar_status round_sums(ar_ctx *ctx, ar_buf y, const ari_sum_slice *s)
{
    const size_t matrix = s->rows * s->cols, end = s->start + s->count;
    for (size_t position = s->start; position < end;) {
        const size_t batch = position / matrix, stop = (batch + 1) * matrix < end ? (batch + 1) * matrix : end;
        const size_t offset = position - s->start;
        AR_TRY(ARI_KERNEL(ctx, round_i64, ar_buf_at(y, offset * sizeof(float)),
                          ar_cbuf_at(ar_const(s->s), offset * (size_t)s->limbs * sizeof(int64_t)), s->limbs,
                          position - batch * matrix, stop - position, s->cols,
                          ar_cbuf_at(s->e, batch * s->e_step * sizeof(int32_t)),
                          ar_cbuf_at(s->f, batch * s->cols * sizeof(int32_t))));
        position = stop;
    }
    return AR_OK;
}

ar_status ari_exact_round_slice(ar_ctx *ctx, const ar_tensor *y, size_t offset, const ari_sum_slice *s)
{
    const ar_tensor dst = ari_tensor_flat(y->dtype, ar_buf_at(y->data, offset * ar_dtype_bytes(y->dtype)), s->count);
    ar_tensor wide;
    AR_TRY(ari_wide_begin(ctx, &wide, &dst));
    AR_TRY(round_sums(ctx, wide.data, s));
    return ari_wide_end(ctx, &dst, &wide);
}

ar_status ari_exact_gather(ar_ctx *ctx, const ar_tensor *y, ar_comm *group)
{
    ARI_OWNED size_t *counts = NULL;
    size_t start = 0, count = 0;
    const size_t total = ar_tensor_count(y);
    AR_TRY(ari_slice_counts(&counts, group, total, 1));
    ari_comm_slice(total, ar_comm_size(group), ar_comm_rank(group), &start, &count);
    const ar_cbuf local_slice = ar_cbuf_at(ar_const(y->data), start * ar_dtype_bytes(y->dtype));
    return ar_comm_all_gather(group, ctx->queue, y->data, local_slice, counts, y->dtype, "rounded sums");
}

static ar_status finish(ar_ctx *ctx, const ar_tensor *y, const ar_epilogue *ep)
{
    if (!ep->bias.ptr && ep->act == AR_ACT_NONE)
        return AR_OK;
    return ARI_KERNEL(ctx, bias_act, y, ep->bias, ep->act, ep->z);
}

/* Rounds the rank's slice and, unless only the slice is requested, gathers the rounded numbers: 8 + 4 bytes per element
 * instead of 16. */
static ar_status round_folded(ar_ctx *ctx, const ar_tensor *y, ar_sum *s, const ar_epilogue *ep)
{
    if (!ari_tensor_is_contiguous(y))
        return ar_error_set(AR_ERR_SHAPE, "a folded sum is rounded into a contiguous tensor");
    AR_TRY(ari_exact_round_slice(ctx, y, s->scattered ? 0 : s->slice.start, &s->slice));
    if (!s->scattered)
        AR_TRY(ari_exact_gather(ctx, y, s->group));
    return finish(ctx, y, ep);
}

/* Multiplies and rounds in one pass a sum that was not reduced. A result stored as bf16 is rounded to bf16 before the
 * bias is added, as a reduced sum is. */
static ar_status round_product(ar_ctx *ctx, const ar_tensor *y, const ar_sum *s, const ar_epilogue *ep)
{
    const bool narrow = y->dtype != AR_F32;
    const ar_epilogue no_epilogue = {.act = AR_ACT_NONE, .band = ep->band}, *fused = narrow ? &no_epilogue : ep;
    ar_tensor wide;
    AR_TRY(ari_wide_begin(ctx, &wide, y));
    AR_TRY(ARI_KERNEL(ctx, gemm_round, &wide, s->a->packed, s->b->packed, ar_const(s->a->e), ar_const(s->b->e),
                      fused->bias, fused->act, fused->z, fused->band));
    AR_TRY(ari_wide_end(ctx, y, &wide));
    if (!s->b->part) /* the caller counts the work of a part */
        ari_work_of_product(&s->a->x, &s->b->x);
    return narrow ? finish(ctx, y, ep) : AR_OK;
}

ar_status ari_exact_round(ar_ctx *ctx, const ar_tensor *y, ar_sum *s, const ar_epilogue *epilogue)
{
    const size_t expected = s->scattered ? s->slice.count : s->a->x.batch * s->a->x.rows * s->b->x.rows;
    if (ar_tensor_count(y) != expected)
        return ar_error_set(AR_ERR_SHAPE, "a contraction of %zu elements is rounded into %zu", expected,
                            ar_tensor_count(y));
    const ar_epilogue no_epilogue = {.act = AR_ACT_NONE};
    const ar_epilogue *ep = epilogue ? epilogue : &no_epilogue;
    if (s->reduced) {
        AR_TRY(ar_queue_wait(ctx->queue, s->reduced));
        ari_step_free(ctx, s->slice.sent);
    }
    if (s->group) {
        AR_TRY(round_folded(ctx, y, s, ep));
        ari_step_free(ctx, s->slice.s);
    } else {
        AR_TRY(round_product(ctx, y, s, ep));
    }
    ari_step_disown(ctx, s);
    return AR_OK;
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */

/* Contractions whose A arrives in blocks (anyrank/arith.h). Exponents of A's rows are maxima over blocks and ranks;
 * then the integers of each block are multiplied and added to sums that all blocks of a row share. */

struct ar_blocks {
    ar_blocks_options o;
    ar_operand *b;
    ar_buf e; /* int32 [batch, rows] */
    ar_buf s; /* int64 [places, batch, rows of a place, n] of `limbs`; ptr NULL: not all blocks have been measured */
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

ar_status ari_exact_blocks_begin(ar_ctx *ctx, ar_blocks **out, const ar_tensor *b, const ar_blocks_options *o)
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
    *out = s;
    /* -0 has the bits of AR_EXP_ZERO, the exponent of no terms. */
    const ar_tensor exponents = ari_tensor_flat(AR_F32, s->e, n);
    return ARI_KERNEL(ctx, fill, &exponents, -0.0f);
}

/* A block's exponents in an array of one for each of `width` rows or terms of every matrix. */
static ar_buf exponents_of(ar_buf exponents, const ar_part *part, size_t width, size_t offset)
{
    return ar_buf_at(exponents, (part->matrix * width + offset) * sizeof(int32_t));
}

static ar_status check_block(const ar_blocks *s, const ar_part *part)
{
    const ari_extents a = {.batch = s->b->x.batch, .rows = s->o.rows, .k = s->b->x.k};
    return ari_check_part(&a, part);
}

ar_status ari_exact_blocks_measure(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a)
{
    AR_TRY(check_block(s, part));
    const ar_buf c = exponents_of(s->b->c, part, s->b->x.k, part->col);
    return ARI_KERNEL(ctx, row_exponents, exponents_of(s->e, part, s->o.rows, part->row), a, ar_const(c), +1, true,
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

ar_status ari_exact_blocks_add(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a)
{
    const size_t n = s->b->x.rows, place_rows = s->o.rows / ari_places(&s->o);
    const ar_part sums = ari_place_part(part, s->b->x.batch, place_rows, n);
    const ar_part terms = {part->matrix, part->matrices, 0, n, part->col, part->cols};
    const size_t sum_offset = (sums.matrix * place_rows + sums.row) * n * (size_t)s->limbs;
    const ar_buf c = exponents_of(s->b->c, part, s->b->x.k, part->col);
    const ar_buf e = exponents_of(s->e, part, s->o.rows, part->row);
    ar_packed *left = NULL, *right = NULL;
    ar_status st = AR_OK;
    AR_TRY(check_block(s, part));
    AR_TRY(
        ari_exact_new_packed(ctx, &left, part->matrices, part->rows, part->cols, ari_exact_form(true, s->b->narrow)));
    AR_TRY_TO(done, st, ARI_KERNEL(ctx, pack, left, 0, 0, a, ar_const(c), +1, ar_const(e)));
    AR_TRY_TO(done, st, ARI_KERNEL(ctx, packed_part, &right, s->b->packed, &terms));
    AR_TRY_TO(done, st,
              ARI_KERNEL(ctx, gemm_i64, ar_buf_at(s->s, sum_offset * sizeof(int64_t)), left, right, s->limbs, true));
done:
    ARI_KERNEL(ctx, packed_destroy, right);
    ari_exact_end_packed(ctx, left);
    return st;
}

/* Sums this place's terms over all ranks that have some. */
static ar_status fold_places(ar_ctx *ctx, ar_blocks *s, ari_sum_slice *slice)
{
    const size_t places = ari_places(&s->o);
    if (places == 1)
        return AR_OK;
    AR_TRY(ari_exact_slice(ctx, slice, ctx->queue, NULL, s->o.places, s->o.tag));
    slice->start = 0; /* of the place's elements */
    slice->e = ar_cbuf_at(slice->e, (size_t)ar_comm_rank(s->o.places) * slice->rows * sizeof(int32_t));
    return AR_OK;
}

ar_status ari_exact_blocks_end(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, ar_fold replicas)
{
    const size_t places = ari_places(&s->o), total = s->b->x.batch * s->o.rows * s->b->x.rows;
    ar_comm *group = replicas != AR_KEEP && ari_has_peers(s->o.replicas) ? s->o.replicas : NULL;
    ari_sum_slice slice = {.s = s->s,
                           .limbs = s->limbs,
                           .count = total,
                           .rows = s->o.rows / places,
                           .cols = s->b->x.rows,
                           .e = ar_const(s->e),
                           .f = ar_const(s->b->e),
                           .e_step = s->o.rows};
    if (!ari_tensor_is_contiguous(y) || ar_tensor_count(y) * places != total)
        return ar_error_set(AR_ERR_SHAPE, "%s: a contraction of %zu elements is rounded into %zu", s->o.tag,
                            total / places, ar_tensor_count(y));
    s->s.ptr = NULL; /* ended after the reduction by its caller */
    AR_TRY(fold_places(ctx, s, &slice));
    if (group)
        AR_TRY(ari_exact_slice(ctx, &slice, ctx->queue, NULL, group, s->o.tag));
    AR_TRY(ari_exact_round_slice(ctx, y, slice.start, &slice));
    ari_step_free(ctx, slice.s);
    if (group)
        AR_TRY(ari_exact_gather(ctx, y, group));
    ari_step_disown(ctx, s);
    return AR_OK;
}
