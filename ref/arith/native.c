/* SPDX-License-Identifier: Apache-2.0 */
/* The native arithmetic: the device's fp32 GEMM, and fp32 sums in the order the communicator's ring gives them. What
 * production does; its results depend on the layout by rounding. With a precision below fp32's, what enters a product
 * is rounded to it first, and in bf16 what leaves one too. */
#include <stdlib.h>

#include "ref/arith/operand.h"
#include "ref/core/context.h"
#include "ref/core/size.h"

struct ar_param_grad {
    size_t n;
    ar_buf sum; /* fp32 [n], in the order of the layer's matrix [out, in] */
};

struct ar_operand {
    ari_extents x;
    ar_parts parts; /* views: the caller's memory, valid for the step */
    bool part;      /* of another operand */
};

struct ar_sum {
    const ar_operand *a, *b;
    ar_tensor folded;  /* the reduced matrix, or the own rows of it; data NULL: never folded */
    ar_event *reduced; /* on another queue than the context's; NULL: on that */
    ar_tensor partial; /* what is reduced there, until it is */
};

static ar_status operand(ar_ctx *ctx, const ar_operand **gives, const ar_parts *p, bool part)
{
    ari_extents x;
    AR_TRY(ari_parts_extents(&x, p));
    ar_operand *o = NULL;
    AR_TRY(ari_alloc_zero((void **)&o, 1, sizeof *o, "an operand"));
    o->x = x;
    o->parts = *p;
    o->part = part;
    AR_TRY(ari_step_own(ctx, o, ari_object_free));
    *gives = o;
    return AR_OK;
}

static ar_status native_operand_b(ar_ctx *ctx, const ar_operand **gives, const ar_parts *b, bool scale, size_t k_full,
                                  ar_comm *k_over, ar_comm *rows_over, const char *tag)
{
    (void)scale, (void)k_full, (void)k_over, (void)rows_over, (void)tag;
    return operand(ctx, gives, b, false);
}

static ar_status native_operand_a(ar_ctx *ctx, const ar_operand **gives, const ar_parts *a, const ar_operand *b,
                                  const char *tag)
{
    AR_TRY(operand(ctx, gives, a, false));
    return ari_check_pair(&(*gives)->x, &b->x, tag);
}

/* Of one matrix as one, of more as ar_tensor_part has it. */
static ar_tensor part_of(const ar_tensor *t, const ar_part *part)
{
    if (t->ndim > 2)
        return ar_tensor_part(t, part);
    const ar_tensor rows = ar_tensor_slice(t, 0, part->row, part->rows);
    return ar_tensor_slice(&rows, 1, part->col, part->cols);
}

static ar_status native_operand_part(ar_ctx *ctx, const ar_operand **gives, const ar_operand *whole,
                                     const ar_part *part)
{
    ar_parts view = whole->parts;
    AR_TRY(ari_check_part(&whole->x, part));
    if (view.n > 1 && (!view.along_k || part->cols != whole->x.k))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "part of an operand made of %d parts: of whole rows of parts side by "
                            "side alone",
                            view.n);
    for (int i = 0; i < view.n; i++) {
        ar_tensor *t = &view.part[i];
        *t = view.n > 1 ? ar_tensor_slice(t, 0, part->row, part->rows) : part_of(t, part);
    }
    return operand(ctx, gives, &view, true);
}

static ar_status native_param_operand(ar_ctx *ctx, const ar_operand **borrows, ar_param *const *params, int n,
                                      int watched, bool along_k, size_t k_full, ar_comm *k_over, ar_comm *rows_over)
{
    (void)watched, (void)k_full, (void)k_over, (void)rows_over;
    if (n < 1 || n > AR_MAX_PARTS)
        return ar_error_set(AR_ERR_ARG, "a contraction takes 1 to %d parameters, not %d", AR_MAX_PARTS, n);
    ar_parts parts = {.n = n, .along_k = along_k};
    for (int i = 0; i < n; i++) {
        const ar_tensor w = ar_param_matrix(params[i]);
        parts.part[i] = along_k ? ar_tensor_transposed(&w) : w;
    }
    return operand(ctx, borrows, &parts, false);
}

static size_t native_operand_bytes(const ar_param *p)
{
    (void)p;
    return 0;
}

static void sum_destroy(ar_ctx *ctx, void *object)
{
    ar_sum *s = object;
    (void)ctx;
    ar_event_destroy(s->reduced);
    free(s);
}

static ar_status native_contract(ar_ctx *ctx, ar_sum **gives, const ar_operand *a, const ar_operand *b)
{
    ar_sum *s = NULL;
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, "a sum"));
    s->a = a;
    s->b = b;
    AR_TRY(ari_step_own(ctx, s, sum_destroy));
    *gives = s;
    return AR_OK;
}

/* --- precision ---------------------------------------------------------------------------------------------------- */

/* Bits of significand of what enters a product, and of what leaves one. */
enum { F32_BITS = 24 };
static const int operand_bits[] = {[AR_PRECISION_F32] = F32_BITS, [AR_PRECISION_TF32] = 11, [AR_PRECISION_BF16] = 8};
static const int result_bits[] = {
    [AR_PRECISION_F32] = F32_BITS, [AR_PRECISION_TF32] = F32_BITS, [AR_PRECISION_BF16] = 8};

/* x as it enters a product: itself, or a copy that drop_operand ends. The copy of a transposed matrix is one too. */
static ar_status take_operand(ar_ctx *ctx, ar_tensor *taken, const ar_tensor *x)
{
    const int bits = operand_bits[ctx->arith->precision];
    *taken = *x;
    if (bits == F32_BITS)
        return AR_OK;
    const bool turned = x->stride[x->ndim - 2] == 1 && x->stride[x->ndim - 1] != 1;
    const ar_tensor from = turned ? ar_tensor_transposed(x) : *x;
    ar_tensor copy;
    AR_TRY(ar_ctx_tensor(ctx, &copy, AR_F32, from.ndim, from.shape));
    AR_TRY(ctx->device->ops->round_bits(ctx->device, ctx->queue, &copy, &from, bits));
    *taken = turned ? ar_tensor_transposed(&copy) : copy;
    return AR_OK;
}

static void drop_operand(ar_ctx *ctx, ar_tensor *taken, const ar_tensor *x)
{
    if (taken->data.ptr != x->data.ptr)
        ar_ctx_release(ctx, taken);
}

/* y as it leaves a product. */
static ar_status leave(ar_ctx *ctx, const ar_tensor *y)
{
    const int bits = result_bits[ctx->arith->precision];
    return bits == F32_BITS ? AR_OK : ctx->device->ops->round_bits(ctx->device, ctx->queue, y, y, bits);
}

/* c (+)= a b^T. */
static ar_status product(ar_ctx *ctx, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add)
{
    ar_tensor left, right;
    AR_TRY(take_operand(ctx, &left, a));
    AR_TRY(take_operand(ctx, &right, b));
    AR_TRY(ctx->device->ops->gemm_f32(ctx->device, ctx->queue, c, &left, &right, add, ctx->arith->precision));
    drop_operand(ctx, &left, a);
    drop_operand(ctx, &right, b);
    return AR_OK;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* y = A B^T, parts along K added up, parts of B along rows side by side in y's columns. A has one part, or B's. */
static ar_status multiply(ar_ctx *ctx, const ar_tensor *y, const ar_sum *s)
{
    const ar_parts *a = &s->a->parts, *b = &s->b->parts;
    const int last = y->ndim - 1;
    size_t column = 0, k = 0;
    for (int i = 0; i < b->n; i++) {
        const ar_tensor *bi = &b->part[i];
        const size_t rows = bi->shape[bi->ndim - 2], depth = bi->shape[bi->ndim - 1];
        ar_tensor ai = a->part[a->n > 1 ? i : 0];
        if (b->along_k && a->n == 1)
            ai = ar_tensor_slice(&ai, ai.ndim - 1, k, depth);
        const ar_tensor yi = b->along_k ? *y : ar_tensor_slice(y, last, column, rows);
        AR_TRY(product(ctx, &yi, &ai, bi, b->along_k && i > 0));
        column += rows;
        k += depth;
    }
    if (!s->b->part) /* whose work who cuts it counts */
        ari_work_of_product(&s->a->x, &s->b->x);
    return AR_OK;
}

/* The own rows of the one matrix's sum over the group: an equal number on every rank. */
static ar_status scatter_rows(ar_ctx *ctx, ar_sum *s, ar_queue *q, ar_comm *over, const char *tag)
{
    const size_t n = (size_t)ar_comm_size(over), cols = s->b->x.rows;
    const size_t shape[2] = {s->a->x.rows / n, cols};
    ar_tensor own;
    size_t *counts = NULL;
    AR_TRY(ar_ctx_tensor(ctx, &own, AR_F32, 2, shape));
    if (q != ctx->queue)
        AR_TRY(ar_event_create(&s->reduced));
    AR_TRY(ari_queue_follow(q, ctx->queue, s->reduced));
    AR_TRY(ari_slice_counts(&counts, over, s->a->x.rows * cols, 1));
    const ar_status st =
        ar_comm_reduce_scatter(over, q, own.data, ar_const(s->folded.data), counts, AR_F32, AR_SUM, tag);
    free(counts);
    AR_TRY(st);
    s->partial = s->folded;
    s->folded = own;
    if (q != ctx->queue)
        return ar_event_record(s->reduced, q);
    ar_ctx_release(ctx, &s->partial);
    return AR_OK;
}

static ar_status native_fold(ar_ctx *ctx, ar_sum *s, ar_queue *q, ar_comm *over, ar_fold how, const char *tag)
{
    if (how == AR_KEEP || !ari_has_peers(over))
        return AR_OK;
    AR_TRY(ari_check_fold(ctx, &s->a->x, q, over, how, tag));
    const ari_extents *x = &s->a->x;
    size_t shape[AR_MAX_DIMS] = {0};
    for (int d = 0; d < x->batch_dims; d++)
        shape[d] = x->batch_shape[d];
    shape[x->batch_dims] = x->rows;
    shape[x->batch_dims + 1] = s->b->x.rows;
    AR_TRY(ar_ctx_tensor(ctx, &s->folded, AR_F32, x->batch_dims + 2, shape));
    AR_TRY(multiply(ctx, &s->folded, s));
    AR_TRY(leave(ctx, &s->folded));
    if (how == AR_SCATTER_ROWS)
        return scatter_rows(ctx, s, q, over, tag);
    return ar_comm_all_reduce(over, ctx->queue, s->folded.data, ar_const(s->folded.data), ar_tensor_count(&s->folded),
                              AR_F32, AR_SUM, tag);
}

/* Bias and activation; what leaves the product has the bias, and the activation is of that. */
static ar_status finish(ar_ctx *ctx, const ar_tensor *y, const ar_epilogue *e)
{
    const ar_device_ops *dev = ctx->device->ops;
    const bool rounds = result_bits[ctx->arith->precision] != F32_BITS;
    const ar_activation at_once = rounds ? AR_ACT_NONE : e->act;
    if (e->bias.ptr || at_once != AR_ACT_NONE)
        AR_TRY(dev->bias_act(ctx->device, ctx->queue, y, e->bias, at_once, e->z));
    AR_TRY(leave(ctx, y));
    if (!rounds || e->act == AR_ACT_NONE)
        return AR_OK;
    return dev->bias_act(ctx->device, ctx->queue, y, (ar_cbuf){NULL}, e->act, e->z);
}

static ar_status native_round(ar_ctx *ctx, const ar_tensor *y, ar_sum *s, const ar_epilogue *epilogue)
{
    const ar_device_ops *dev = ctx->device->ops;
    const bool folded = s->folded.data.ptr != NULL;
    const size_t count = folded ? ar_tensor_count(&s->folded) : s->a->x.batch * s->a->x.rows * s->b->x.rows;
    if (ar_tensor_count(y) != count)
        return ar_error_set(AR_ERR_SHAPE, "a contraction of %zu elements is rounded into %zu", count,
                            ar_tensor_count(y));
    if (s->reduced) {
        AR_TRY(ar_queue_wait(ctx->queue, s->reduced));
        ar_ctx_release(ctx, &s->partial);
    }
    if (folded) {
        AR_TRY(dev->copy(ctx->device, ctx->queue, y->data, ar_const(s->folded.data), count * sizeof(float)));
        ar_ctx_release(ctx, &s->folded);
    } else {
        AR_TRY(multiply(ctx, y, s));
    }
    AR_TRY(finish(ctx, y, epilogue ? epilogue : &(ar_epilogue){.act = AR_ACT_NONE}));
    ari_step_disown(ctx, s);
    return AR_OK;
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */

struct ar_blocks {
    ar_blocks_options o;
    ar_tensor b, sum; /* [batch, n, k] of any strides; fp32 [places, batch, rows of a place, n] */
};

static void blocks_destroy(ar_ctx *ctx, void *object)
{
    ar_blocks *s = object;
    ar_ctx_release(ctx, &s->sum);
    free(s);
}

static ar_status native_blocks_begin(ar_ctx *ctx, ar_blocks **gives, const ar_tensor *b, const ar_blocks_options *o)
{
    ari_extents x;
    ar_blocks *s = NULL;
    AR_TRY(ari_parts_extents(&x, &(ar_parts){.n = 1, .part = {*b}}));
    AR_TRY(ari_check_blocks(&x, o));
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, "a contraction in blocks"));
    AR_TRY(ari_step_own(ctx, s, blocks_destroy));
    s->o = *o;
    s->b = *b;
    const size_t places = ari_places(o), shape[4] = {places, x.batch, o->rows / places, x.rows};
    AR_TRY(ar_ctx_tensor(ctx, &s->sum, AR_F32, 4, shape));
    *gives = s;
    return ctx->device->ops->zero(ctx->device, ctx->queue, s->sum.data, ar_tensor_count(&s->sum) * sizeof(float));
}

static ar_status native_blocks_measure(ar_ctx *ctx, ar_blocks *s, const ar_part *at, const ar_tensor *a)
{
    (void)ctx, (void)s, (void)at, (void)a;
    return AR_OK;
}

static ar_status native_blocks_measured(ar_ctx *ctx, ar_blocks *s)
{
    (void)ctx, (void)s;
    return AR_OK;
}

static ar_status native_blocks_add(ar_ctx *ctx, ar_blocks *s, const ar_part *at, const ar_tensor *a)
{
    const size_t batch = s->sum.shape[1], n = s->sum.shape[3], each = s->sum.shape[2];
    const ar_part sums = ari_place_part(at, batch, each, n);
    const ar_part terms = {at->matrix, at->matrices, 0, n, at->col, at->cols};
    AR_TRY(ar_part_check(at, batch, s->o.rows, s->b.shape[s->b.ndim - 1], s->o.tag));
    const ar_tensor c = ar_tensor_part(&s->sum, &sums), b = ar_tensor_part(&s->b, &terms);
    return product(ctx, &c, a, &b, true);
}

static ar_status native_blocks_end(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, ar_fold replicas)
{
    const size_t each = ar_tensor_count(&s->sum) / s->sum.shape[0];
    AR_TRY(leave(ctx, &s->sum));
    if (ari_has_peers(s->o.places)) {
        size_t *counts = NULL;
        AR_TRY(ari_slice_counts(&counts, s->o.places, s->sum.shape[0], each));
        const ar_status st = ar_comm_reduce_scatter(s->o.places, ctx->queue, y->data, ar_const(s->sum.data), counts,
                                                    AR_F32, AR_SUM, s->o.tag);
        free(counts);
        AR_TRY(st);
    } else {
        AR_TRY(ctx->device->ops->copy(ctx->device, ctx->queue, y->data, ar_const(s->sum.data), each * sizeof(float)));
    }
    if (replicas != AR_KEEP && ari_has_peers(s->o.replicas))
        AR_TRY(
            ar_comm_all_reduce(s->o.replicas, ctx->queue, y->data, ar_const(y->data), each, AR_F32, AR_SUM, s->o.tag));
    ari_step_disown(ctx, s);
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static void grad_release(ar_param *p)
{
    if (!p->grad)
        return;
    p->device->ops->free(p->device, p->grad->sum);
    free(p->grad);
    p->grad = NULL;
}

static ar_status native_grad_zero(ar_ctx *ctx, ar_param *p)
{
    if (!p->grad)
        return AR_OK;
    return ctx->device->ops->zero(ctx->device, ctx->queue, p->grad->sum, p->grad->n * sizeof(float));
}

static ar_status native_grad_ensure(ar_ctx *ctx, ar_param *p)
{
    if (p->grad)
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&p->grad, 1, sizeof *p->grad, "a gradient"));
    p->grad->n = ar_tensor_count(&p->value);
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st,
              ctx->device->ops->alloc(ctx->device, &p->grad->sum, (p->grad->n ? p->grad->n : 1) * sizeof(float)));
    AR_TRY_TO(failed, st, native_grad_zero(ctx, p));
    return AR_OK;
failed:
    grad_release(p);
    return st;
}

static ar_status native_grad_contract(ar_ctx *ctx, ar_param *p, const ar_tensor *dy, const ar_tensor *x, size_t samples,
                                      ar_comm *x_rows_over, const char *tag)
{
    (void)samples, (void)x_rows_over, (void)tag;
    const size_t shape[2] = {dy->shape[1], x->shape[1]};
    if (x->shape[0] != dy->shape[0] || shape[0] * shape[1] != ar_tensor_count(&p->value))
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient from dy [%zu, %zu] and x [%zu, %zu]", p->name, dy->shape[0],
                            dy->shape[1], x->shape[0], x->shape[1]);
    if (!p->requires_grad)
        return AR_OK;
    AR_TRY(native_grad_ensure(ctx, p));
    p->has_grad = true;
    ar_tensor sum;
    AR_TRY(ar_tensor_view(&sum, AR_F32, 2, shape, p->grad->sum));
    const ar_tensor dy_t = ar_tensor_transposed(dy), x_t = ar_tensor_transposed(x);
    AR_TRY(product(ctx, &sum, &dy_t, &x_t, true));
    ari_work_of_product(&(ari_extents){.batch = 1, .rows = shape[0], .k = dy->shape[0]},
                        &(ari_extents){.rows = shape[1]});
    return AR_OK;
}

static ar_status native_grad_sum(ar_ctx *ctx, ar_param *p, ar_row_sum *borrows)
{
    *borrows = (ar_row_sum){.f32 = {NULL}};
    if (!p->requires_grad)
        return AR_OK;
    AR_TRY(native_grad_ensure(ctx, p));
    p->has_grad = true;
    *borrows = (ar_row_sum){.f32 = p->grad->sum};
    return AR_OK;
}

static ar_status native_grad_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms, ar_cbuf row_of)
{
    ar_row_sum sum;
    AR_TRY(native_grad_sum(ctx, p, &sum));
    if (!sum.f32.ptr)
        return AR_OK;
    const size_t rows = p->value.ndim > 1 ? ar_param_matrix(p).shape[0] : 1;
    if (terms->ndim != 2 || terms->shape[1] * rows != p->grad->n)
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient terms do not fit %zu elements", p->name, p->grad->n);
    return ctx->device->ops->sum_rows_f32(ctx->device, ctx->queue, sum.f32, rows, terms, row_of);
}

static ar_status native_grad_value(ar_ctx *ctx, const ar_tensor *g, const ar_param *p)
{
    if (!p->grad)
        return ctx->device->ops->fill(ctx->device, ctx->queue, g, 0.0f);
    const ar_tensor matrix = p->transposed ? ar_tensor_transposed(g) : *g;
    ar_tensor sum;
    AR_TRY(ar_tensor_view(&sum, AR_F32, matrix.ndim, matrix.shape, p->grad->sum));
    return ctx->device->ops->copy_strided(ctx->device, ctx->queue, &matrix, &sum);
}

static size_t native_grad_bytes(const ar_param *p)
{
    return p->grad ? p->grad->n * sizeof(float) : 0;
}

/* --- buckets: the numbers themselves, fp32 or bf16, summed in ring order ------------------------------------------ */

static size_t native_bucket_bytes(size_t n, ar_dtype storage)
{
    const size_t width = ar_dtype_bytes(storage);
    return n > SIZE_MAX / width ? SIZE_MAX : n * width;
}

static ar_status native_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t at, ar_dtype storage,
                                    const ar_param *p)
{
    (void)n;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t count = ar_tensor_count(&p->value), width = ar_dtype_bytes(storage);
    const ar_buf to = ar_buf_at(bucket, at * width);
    if (!p->grad || !p->has_grad)
        return dev->zero(ctx->device, q, to, count * width);
    if (storage == AR_BF16)
        return dev->narrow_bf16(ctx->device, q, to, ar_const(p->grad->sum), count);
    return dev->copy(ctx->device, q, to, ar_const(p->grad->sum), count * width);
}

static ar_status native_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage)
{
    return ctx->device->ops->zero(ctx->device, q, bucket, native_bucket_bytes(n, storage));
}

static ar_status native_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage,
                                      ar_comm *over, const size_t *counts, const char *tag)
{
    (void)ctx;
    if (!ari_has_peers(over))
        return AR_OK;
    if (!counts)
        return ar_comm_all_reduce(over, q, bucket, ar_const(bucket), n, storage, AR_SUM, tag);
    const ar_buf own = ar_buf_at(bucket, ari_share_start(over, counts) * ar_dtype_bytes(storage));
    return ar_comm_reduce_scatter(over, q, own, ar_const(bucket), counts, storage, AR_SUM, tag);
}

static ar_status native_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *over, const char *tag)
{
    if (!ari_has_peers(over))
        return AR_OK;
    AR_TRY(native_grad_ensure(ctx, p));
    return native_bucket_reduce(ctx, ctx->queue, p->grad->sum, p->grad->n, AR_F32, over, NULL, tag);
}

static ar_status native_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t at,
                                      ar_dtype storage)
{
    (void)n;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t width = ar_dtype_bytes(storage);
    const ar_cbuf from = ar_cbuf_at(bucket, (at + p->own_start) * width);
    const ar_buf to = ar_buf_at(p->grad->sum, p->own_start * sizeof(float));
    if (storage == AR_BF16)
        return dev->widen_bf16(ctx->device, q, to, from, p->own_count);
    return dev->copy(ctx->device, q, to, from, p->own_count * width);
}

/* One table a precision, alike but for it. */
#define NATIVE(of)                                                                                                   \
    {                                                                                                                \
        .name = "native", .precision = (of), .operand_b = native_operand_b, .operand_a = native_operand_a,           \
        .param_operand = native_param_operand, .operand_bytes = native_operand_bytes,                                \
        .operand_part = native_operand_part, .operand_done = ari_operand_done, .contract = native_contract,          \
        .fold = native_fold, .round = native_round, .blocks_begin = native_blocks_begin,                             \
        .blocks_measure = native_blocks_measure, .blocks_measured = native_blocks_measured,                          \
        .blocks_add = native_blocks_add, .blocks_end = native_blocks_end, .grad_contract = native_grad_contract,     \
        .grad_rows = native_grad_rows, .grad_sum = native_grad_sum, .grad_reduce = native_grad_reduce,               \
        .grad_value = native_grad_value, .grad_zero = native_grad_zero, .bucket_bytes = native_bucket_bytes,         \
        .bucket_pack = native_bucket_pack, .bucket_zero = native_bucket_zero, .bucket_reduce = native_bucket_reduce, \
        .bucket_unpack = native_bucket_unpack, .grad_ensure = native_grad_ensure, .grad_bytes = native_grad_bytes,   \
        .param_release = grad_release                                                                                \
    }

const ar_arith_ops *ar_arith_native(ar_precision precision)
{
    static const ar_arith_ops ops[AR_PRECISION_COUNT] = {[AR_PRECISION_F32] = NATIVE(AR_PRECISION_F32),
                                                         [AR_PRECISION_TF32] = NATIVE(AR_PRECISION_TF32),
                                                         [AR_PRECISION_BF16] = NATIVE(AR_PRECISION_BF16)};
    return &ops[precision];
}
