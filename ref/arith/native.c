/* SPDX-License-Identifier: Apache-2.0 */
/* Native arithmetic: the device's fp32 GEMM, and fp32 sums in the order of the communicator's ring, as in production.
 * Results depend on the layout by rounding. With TF32 the operands of a matmul are rounded first. With bf16 operands
 * and results are stored in bf16, except values that are computed in fp32 within a layer. */
#include <stdlib.h>

#include "anyrank/queue.h"
#include "ref/arith/arith_private.h"
#include "ref/arith/operand.h"
#include "ref/context/context.h"
#include "ref/core/context_private.h"
#include "ref/core/param_private.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"

struct ar_param_grad {
    ar_tensor sum; /* [n] in the order of the layer's matrix [out, in], with the value's dtype */
};

struct ar_operand {
    ari_extents x;
    ar_parts parts; /* views of the caller's memory; valid during the step */
    bool part;      /* true for a part of another operand */
};

struct ar_sum {
    const ar_operand *a, *b;
    ar_tensor folded;  /* the reduced matrix, or this rank's rows of it; data NULL: never reduced */
    ar_event *reduced; /* recorded after a reduction on another queue; NULL: the context's queue reduces */
    ar_tensor partial; /* result that is being reduced */
};

/* Ends an object of the step that owns only its memory. */
static void object_free(ar_ctx *ctx, void *object)
{
    (void)ctx;
    free(object);
}

static ar_status operand(ar_ctx *ctx, const ar_operand **out, const ar_parts *p, bool part)
{
    ari_extents x;
    AR_TRY(ari_parts_extents(&x, p));
    ar_operand *o = NULL;
    AR_TRY(ari_alloc_zero((void **)&o, 1, sizeof *o, "an operand"));
    o->x = x;
    o->parts = *p;
    o->part = part;
    AR_TRY(ari_step_own(ctx, o, object_free));
    *out = o;
    return AR_OK;
}

static ar_status native_operand_b(ar_ctx *ctx, const ar_operand **out, const ar_parts *b, bool scale, size_t k_full,
                                  ar_comm *k_over, ar_comm *rows_over, const char *tag)
{
    (void)scale, (void)k_full, (void)k_over, (void)rows_over, (void)tag;
    return operand(ctx, out, b, false);
}

static ar_status native_operand_a(ar_ctx *ctx, const ar_operand **out, const ar_parts *a, const ar_operand *b,
                                  const char *tag)
{
    AR_TRY(operand(ctx, out, a, false));
    return ari_check_pair(&(*out)->x, &b->x, tag);
}

/* Returns a part of one matrix as a matrix, or of several matrices as ari_tensor_part does. */
static ar_tensor part_of(const ar_tensor *t, const ar_part *part)
{
    if (t->ndim > 2)
        return ari_tensor_part(t, part);
    const ar_tensor rows = ar_tensor_slice(t, 0, part->row, part->rows);
    return ar_tensor_slice(&rows, 1, part->col, part->cols);
}

static ar_status native_operand_part(ar_ctx *ctx, const ar_operand **out, const ar_operand *full, const ar_part *part)
{
    ar_parts view = full->parts;
    AR_TRY(ari_check_part(&full->x, part));
    if (view.n > 1 && (!view.along_k || part->cols != full->x.k))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "part of an operand made of %d parts: of whole rows of parts side by "
                            "side alone",
                            view.n);
    for (int i = 0; i < view.n; i++) {
        ar_tensor *t = &view.part[i];
        *t = view.n > 1 ? ar_tensor_slice(t, 0, part->row, part->rows) : part_of(t, part);
    }
    return operand(ctx, out, &view, true);
}

static ar_status native_param_operand(ar_ctx *ctx, const ar_operand **borrows, ar_param *const *params, int n,
                                      int watched, ar_operand_use use, size_t k_full, ar_comm *k_over,
                                      ar_comm *rows_over)
{
    (void)watched, (void)k_full, (void)k_over, (void)rows_over;
    if (n < 1 || n > AR_MAX_PARTS)
        return ar_error_set(AR_ERR_ARG, "a contraction takes 1 to %d parameters, not %d", AR_MAX_PARTS, n);
    ar_parts parts = {.n = n, .along_k = use != AR_USE_FORWARD};
    for (int i = 0; i < n; i++) {
        const ar_tensor w = ari_param_matrix(params[i]);
        parts.part[i] = parts.along_k ? ari_tensor_transposed(&w) : w;
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

static ar_status native_contract(ar_ctx *ctx, ar_sum **out, const ar_operand *a, const ar_operand *b)
{
    ar_sum *s = NULL;
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, "a sum"));
    s->a = a;
    s->b = b;
    AR_TRY(ari_step_own(ctx, s, sum_destroy));
    *out = s;
    return AR_OK;
}

/* --- precision ---------------------------------------------------------------------------------------------------- */

/* Returns x as an operand of a product: itself, or a copy with fewer bits or transposed, which ari_release_placed
 * frees. */
static ar_status take_operand(ar_ctx *ctx, ar_tensor *out, const ar_tensor *x)
{
    enum { TF32_BITS = 11 };
    const ar_precision precision = ctx->arith->precision;
    *out = *x;
    if (precision == AR_PRECISION_F32 || x->dtype == AR_BF16)
        return AR_OK;
    const bool turned = x->stride[x->ndim - 2] == 1 && x->stride[x->ndim - 1] != 1;
    const ar_tensor src = turned ? ari_tensor_transposed(x) : *x;
    ar_tensor copy;
    AR_TRY(ar_ctx_tensor(ctx, &copy, ari_activations_of(precision), src.ndim, src.shape));
    AR_TRY(copy.dtype == AR_BF16 ? ARI_KERNEL(ctx, copy_strided, &copy, &src)
                                 : ARI_KERNEL(ctx, round_bits, &copy, &src, TF32_BITS));
    *out = turned ? ari_tensor_transposed(&copy) : copy;
    return AR_OK;
}

/* c (+)= a b^T. */
static ar_status add_product(ar_ctx *ctx, const ar_tensor *c, const ar_tensor *a, const ar_tensor *b, bool add)
{
    ar_tensor left, right;
    AR_TRY(take_operand(ctx, &left, a));
    AR_TRY(take_operand(ctx, &right, b));
    AR_TRY(ARI_KERNEL(ctx, gemm_f32, c, &left, &right, add, ctx->arith->precision));
    ari_release_placed(ctx, &left, a);
    ari_release_placed(ctx, &right, b);
    return AR_OK;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Computes y = A B^T, where parts along K are added and parts of B along rows are side by side in y's columns. Either A
 * or B has only one part. */
static ar_status multiply_parts(ar_ctx *ctx, const ar_tensor *y, const ar_sum *s)
{
    const ar_parts *a = &s->a->parts, *b = &s->b->parts;
    const int last_dim = y->ndim - 1;
    size_t column = 0, k = 0;
    for (int i = 0; i < b->n; i++) {
        const ar_tensor *bi = &b->part[i];
        const size_t rows = bi->shape[bi->ndim - 2], depth = bi->shape[bi->ndim - 1];
        ar_tensor ai = a->part[a->n > 1 ? i : 0];
        if (b->along_k && a->n == 1)
            ai = ar_tensor_slice(&ai, ai.ndim - 1, k, depth);
        const ar_tensor yi = b->along_k ? *y : ar_tensor_slice(y, last_dim, column, rows);
        AR_TRY(add_product(ctx, &yi, &ai, bi, b->along_k && i > 0));
        column += rows;
        k += depth;
    }
    if (!s->b->part) /* the caller counts the work of a part */
        ari_work_of_product(&s->a->x, &s->b->x);
    return AR_OK;
}

/* Rounds the sum to y once: parts along K are added in fp32. */
static ar_status multiply_sum(ar_ctx *ctx, const ar_tensor *y, const ar_sum *s)
{
    ar_tensor sum;
    if (!s->b->parts.along_k || s->b->parts.n == 1)
        return multiply_parts(ctx, y, s);
    AR_TRY(ari_wide_begin(ctx, &sum, y));
    AR_TRY(multiply_parts(ctx, &sum, s));
    return ari_wide_end(ctx, y, &sum);
}

/* Reduce-scatters the rows of a single matrix's sum over the group; every rank gets equally many. */
static ar_status scatter_rows(ar_ctx *ctx, ar_sum *s, ar_queue *q, ar_comm *group, const char *tag)
{
    const size_t n = (size_t)ar_comm_size(group), cols = s->b->x.rows;
    ar_tensor local_rows;
    ARI_OWNED size_t *counts = NULL;
    AR_TRY(ari_new_rows(ctx, &local_rows, s->folded.dtype, s->a->x.rows / n, cols));
    if (q != ctx->queue)
        AR_TRY(ar_event_create(&s->reduced));
    AR_TRY(ari_queue_follow(q, ctx->queue, s->reduced));
    AR_TRY(ari_slice_counts(&counts, group, s->a->x.rows * cols, 1));
    AR_TRY(ar_comm_reduce_scatter(group, q, local_rows.data, ar_const(s->folded.data), counts, local_rows.dtype, AR_SUM,
                                  tag));
    s->partial = s->folded;
    s->folded = local_rows;
    if (q != ctx->queue)
        return ar_event_record(s->reduced, q);
    ar_ctx_release(ctx, &s->partial);
    return AR_OK;
}

static ar_status native_fold(ar_ctx *ctx, ar_sum *s, ar_queue *q, ar_comm *group, ar_fold method, const char *tag)
{
    if (method == AR_KEEP || !ari_has_peers(group))
        return AR_OK;
    AR_TRY(ari_check_fold(ctx, &s->a->x, q, group, method, tag));
    const ari_extents *x = &s->a->x;
    size_t shape[AR_MAX_DIMS] = {0};
    for (int d = 0; d < x->batch_dims; d++)
        shape[d] = x->batch_shape[d];
    shape[x->batch_dims] = x->rows;
    shape[x->batch_dims + 1] = s->b->x.rows;
    AR_TRY(ar_ctx_tensor(ctx, &s->folded, s->a->parts.part[0].dtype, x->batch_dims + 2, shape));
    AR_TRY(multiply_sum(ctx, &s->folded, s));
    if (method == AR_SCATTER_ROWS)
        return scatter_rows(ctx, s, q, group, tag);
    return ar_comm_all_reduce(group, ctx->queue, s->folded.data, ar_const(s->folded.data), ar_tensor_count(&s->folded),
                              s->folded.dtype, AR_SUM, tag);
}

static ar_status native_round(ar_ctx *ctx, const ar_tensor *y, ar_sum *s, const ar_epilogue *epilogue)
{
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
        const ar_tensor dst = ari_tensor_flat(y->dtype, y->data, count);
        const ar_tensor src = ari_tensor_flat(s->folded.dtype, s->folded.data, count);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
        ar_ctx_release(ctx, &s->folded);
    } else {
        AR_TRY(multiply_sum(ctx, y, s));
    }
    if (epilogue && (epilogue->bias.ptr || epilogue->act != AR_ACT_NONE))
        AR_TRY(ARI_KERNEL(ctx, bias_act, y, epilogue->bias, epilogue->act, epilogue->z));
    ari_step_disown(ctx, s);
    return AR_OK;
}

/* --- blocks ------------------------------------------------------------------------------------------------------- */

struct ar_blocks {
    ar_blocks_options o;
    ar_tensor b, sum; /* b: [batch, n, k] with any strides; sum: fp32 [places, batch, rows of a place, n] */
};

static void blocks_destroy(ar_ctx *ctx, void *object)
{
    ar_blocks *s = object;
    ar_ctx_release(ctx, &s->sum);
    free(s);
}

static ar_status native_blocks_begin(ar_ctx *ctx, ar_blocks **out, const ar_tensor *b, const ar_blocks_options *o)
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
    *out = s;
    return ARI_KERNEL(ctx, zero, s->sum.data, ar_tensor_count(&s->sum) * sizeof(float));
}

static ar_status native_blocks_measure(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a)
{
    (void)ctx, (void)s, (void)part, (void)a;
    return AR_OK;
}

static ar_status native_blocks_measured(ar_ctx *ctx, ar_blocks *s)
{
    (void)ctx, (void)s;
    return AR_OK;
}

static ar_status native_blocks_add(ar_ctx *ctx, ar_blocks *s, const ar_part *part, const ar_tensor *a)
{
    const size_t batch = s->sum.shape[1], n = s->sum.shape[3], place_rows = s->sum.shape[2];
    const ar_part sums = ari_place_part(part, batch, place_rows, n);
    const ar_part terms = {part->matrix, part->matrices, 0, n, part->col, part->cols};
    AR_TRY(ari_part_check(part, batch, s->o.rows, s->b.shape[s->b.ndim - 1], s->o.tag));
    const ar_tensor c = ari_tensor_part(&s->sum, &sums), b = ari_tensor_part(&s->b, &terms);
    return add_product(ctx, &c, a, &b, true);
}

/* Reduce-scatters every place's rows, rounded to y's dtype before they are sent. */
static ar_status scatter_places(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, size_t place_elements)
{
    ar_tensor sent = s->sum;
    ARI_OWNED size_t *counts = NULL;
    if (y->dtype != AR_F32) {
        AR_TRY(ar_ctx_tensor(ctx, &sent, y->dtype, s->sum.ndim, s->sum.shape));
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &sent, &s->sum));
    }
    AR_TRY(ari_slice_counts(&counts, s->o.places, s->sum.shape[0], place_elements));
    const ar_status st = ar_comm_reduce_scatter(s->o.places, ctx->queue, y->data, ar_const(sent.data), counts, y->dtype,
                                                AR_SUM, s->o.tag);
    ari_release_placed(ctx, &sent, &s->sum);
    return st;
}

static ar_status native_blocks_end(ar_ctx *ctx, const ar_tensor *y, ar_blocks *s, ar_fold replicas)
{
    const size_t place_elements = ar_tensor_count(&s->sum) / s->sum.shape[0];
    if (ari_has_peers(s->o.places)) {
        AR_TRY(scatter_places(ctx, y, s, place_elements));
    } else {
        const ar_tensor dst = ari_tensor_flat(y->dtype, y->data, place_elements),
                        src = ari_tensor_flat(AR_F32, s->sum.data, place_elements);
        AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
    }
    if (replicas != AR_KEEP && ari_has_peers(s->o.replicas))
        AR_TRY(ar_comm_all_reduce(s->o.replicas, ctx->queue, y->data, ar_const(y->data), place_elements, y->dtype,
                                  AR_SUM, s->o.tag));
    ari_step_disown(ctx, s);
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static size_t native_grad_bytes(const ar_param *p)
{
    return p->grad ? ar_tensor_count(&p->grad->sum) * ar_dtype_bytes(p->grad->sum.dtype) : 0;
}

static void native_grad_release(ar_param *p, ar_queue *q)
{
    if (!p->grad)
        return;
    p->device->ops->free(p->device, q, p->grad->sum.data);
    free(p->grad);
    p->grad = NULL;
}

static void native_param_release(ar_param *p)
{
    native_grad_release(p, NULL);
}

static void native_operand_release(ar_param *p, ar_queue *q)
{
    (void)p;
    (void)q;
}

static ar_status native_grad_zero(ar_ctx *ctx, ar_param *p)
{
    if (!p->grad)
        return AR_OK;
    return ARI_KERNEL(ctx, zero, p->grad->sum.data, native_grad_bytes(p));
}

static ar_status native_grad_ensure(ar_ctx *ctx, ar_param *p)
{
    if (p->grad)
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&p->grad, 1, sizeof *p->grad, "a gradient"));
    const size_t n = ar_tensor_count(&p->value);
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ar_tensor_view(&p->grad->sum, p->value.dtype, 1, &n, (ar_buf){NULL}));
    AR_TRY_TO(failed, st, ARI_KERNEL(ctx, alloc, &p->grad->sum.data, n > 0 ? native_grad_bytes(p) : 1));
    AR_TRY_TO(failed, st, native_grad_zero(ctx, p));
    return AR_OK;
failed:
    native_grad_release(p, ctx->queue);
    return st;
}

static ar_status add_contraction(ar_ctx *ctx, ar_param *p, const ar_tensor *dy, const ar_tensor *x)
{
    const size_t shape[2] = {dy->shape[1], x->shape[1]};
    ar_tensor sum;
    bool is_trained = false;
    AR_TRY(ari_grad_begin(ctx, &is_trained, p, dy, x));
    if (!is_trained)
        return AR_OK;
    AR_TRY(ar_tensor_view(&sum, p->grad->sum.dtype, 2, shape, p->grad->sum.data));
    const ar_tensor dy_t = ari_tensor_transposed(dy), x_t = ari_tensor_transposed(x);
    AR_TRY(add_product(ctx, &sum, &dy_t, &x_t, true));
    ari_work_of_gradient(shape[0], shape[1], dy->shape[0]);
    return AR_OK;
}

static ar_status native_grad_contract(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x,
                                      size_t samples, ar_comm *x_rows_over)
{
    (void)samples, (void)x_rows_over;
    for (int i = 0; i < n; i++)
        AR_TRY(add_contraction(ctx, terms[i].param, &terms[i].dy, x));
    return AR_OK;
}

static ar_status native_grad_sum(ar_ctx *ctx, ar_param *p, ar_row_sum *borrows)
{
    *borrows = (ar_row_sum){.f32 = {NULL}};
    if (!p->requires_grad)
        return AR_OK;
    AR_TRY(native_grad_ensure(ctx, p));
    p->has_grad = true;
    *borrows = (ar_row_sum){.f32 = p->grad->sum.data};
    return AR_OK;
}

static ar_status native_grad_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms, ar_cbuf row_of)
{
    ar_tensor wide;
    if (!p->requires_grad)
        return AR_OK;
    AR_TRY(native_grad_ensure(ctx, p));
    p->has_grad = true;
    const size_t rows = p->value.ndim > 1 ? ari_param_matrix(p).shape[0] : 1, n = ar_tensor_count(&p->grad->sum);
    if (terms->ndim != 2 || terms->shape[1] * rows != n)
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient terms do not fit %zu elements", p->name, n);
    AR_TRY(ari_cast(ctx, &wide, &p->grad->sum, AR_F32));
    AR_TRY(ARI_KERNEL(ctx, sum_rows_f32, wide.data, rows, terms, row_of));
    return ari_wide_end(ctx, &p->grad->sum, &wide);
}

static ar_status native_grad_value(ar_ctx *ctx, const ar_tensor *g, const ar_param *p)
{
    if (!p->grad)
        return ARI_KERNEL(ctx, fill, g, 0.0f);
    const ar_tensor matrix = p->transposed ? ari_tensor_transposed(g) : *g;
    ar_tensor sum;
    AR_TRY(ar_tensor_view(&sum, p->grad->sum.dtype, matrix.ndim, matrix.shape, p->grad->sum.data));
    return ARI_KERNEL(ctx, copy_strided, &matrix, &sum);
}

/* --- buckets: the numbers themselves, stored as the gradients are, summed in ring order --------------------------- */

static size_t native_bucket_bytes(size_t n, ar_dtype storage)
{
    const size_t width = ar_dtype_bytes(storage);
    return n > SIZE_MAX / width ? SIZE_MAX : n * width;
}

static ar_status native_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t offset, ar_dtype storage,
                                    const ar_param *p)
{
    (void)n;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t count = ar_tensor_count(&p->value), width = ar_dtype_bytes(storage);
    const ar_buf dst = ar_buf_at(bucket, offset * width);
    if (!p->grad)
        return dev->zero(ctx->device, q, dst, count * width);
    return dev->copy(ctx->device, q, dst, ar_const(p->grad->sum.data), count * width);
}

static ar_status native_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage)
{
    return ctx->device->ops->zero(ctx->device, q, bucket, native_bucket_bytes(n, storage));
}

static size_t native_bucket_room(size_t n, ar_dtype storage, const ar_comm *group, const size_t *counts)
{
    (void)n, (void)storage, (void)group, (void)counts;
    return 0;
}

static ar_status native_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_buf scratch, size_t n,
                                      ar_dtype storage, ar_comm *group, const size_t *counts,
                                      const ar_most_terms *terms, const char *tag)
{
    (void)ctx, (void)scratch, (void)terms;
    if (!ari_has_peers(group))
        return AR_OK;
    if (!counts)
        return ar_comm_all_reduce(group, q, bucket, ar_const(bucket), n, storage, AR_SUM, tag);
    const ar_buf local_share = ar_buf_at(bucket, ari_share_start(group, counts) * ar_dtype_bytes(storage));
    return ar_comm_reduce_scatter(group, q, local_share, ar_const(bucket), counts, storage, AR_SUM, tag);
}

static ar_status native_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *group, const char *tag)
{
    if (!ari_has_peers(group))
        return AR_OK;
    AR_TRY(native_grad_ensure(ctx, p));
    const ar_tensor *sum = &p->grad->sum;
    return native_bucket_reduce(ctx, ctx->queue, sum->data, (ar_buf){NULL}, ar_tensor_count(sum), sum->dtype, group,
                                NULL, NULL, tag);
}

static ar_status native_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t offset,
                                      ar_dtype storage)
{
    (void)n;
    const size_t width = ar_dtype_bytes(storage);
    const ar_cbuf src = ar_cbuf_at(bucket, (offset + p->own_start) * width);
    const ar_buf dst = ar_buf_at(p->grad->sum.data, p->own_start * width);
    return ctx->device->ops->copy(ctx->device, q, dst, src, p->own_count * width);
}

static ar_status native_bucket_take(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n, size_t offset,
                                    size_t count, ar_dtype storage)
{
    (void)n;
    const ar_tensor values = ari_tensor_flat(AR_F32, y, count);
    const ar_buf src = {(void *)(uintptr_t)bucket.ptr};
    const ar_tensor stored = ari_tensor_flat(storage, ar_buf_at(src, offset * ar_dtype_bytes(storage)), count);
    return ctx->device->ops->copy_strided(ctx->device, q, &values, &stored);
}

/* Tables of the slots, one for each precision. */
#define FILL(slot) .slot = native_##slot,
#define NATIVE(of)                                                                                                  \
    {                                                                                                               \
        .name = "native", .precision = (of), .operand_done = ari_operand_done,                                      \
        .contract_groups = ari_native_contract_groups, .grad_groups = ari_native_grad_groups, ARI_ARITH_SLOTS(FILL) \
    }

const ar_arith_ops *ari_arith_native(ar_precision precision)
{
    static const ar_arith_ops ops[AR_PRECISION_COUNT] = {[AR_PRECISION_F32] = NATIVE(AR_PRECISION_F32),
                                                         [AR_PRECISION_TF32] = NATIVE(AR_PRECISION_TF32),
                                                         [AR_PRECISION_BF16] = NATIVE(AR_PRECISION_BF16)};
    return (unsigned)precision < AR_PRECISION_COUNT ? &ops[precision] : NULL;
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

/* Handles groups of rows in native numerics: one product per group, and one reduction over the ranks for all groups. */

ar_status ari_check_groups(const ar_groups *g, size_t rows, const char *tag)
{
    const size_t total = g->n > 0 ? g->first[g->n] : 0;
    if (total != rows)
        return ar_error_set(AR_ERR_SHAPE, "%s: %zu groups of %zu rows together, the tensor has %zu", tag, g->n, total,
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
                                     const ar_groups *g, ar_comm *group, const char *tag)
{
    AR_TRY(ari_check_groups(g, a->shape[0], tag));
    for (size_t i = 0; i < g->n; i++) {
        const ar_tensor dst = ari_group_rows(y, g, i), src = ari_group_rows(a, g, i);
        const ar_operand *group_operand = NULL;
        AR_TRY(b->make(ctx, &group_operand, b->user, i));
        if (dst.shape[0] > 0)
            AR_TRY(multiply_group(ctx, &dst, &src, group_operand, tag));
    }
    if (!ari_has_peers(group))
        return AR_OK;
    return ar_comm_all_reduce(group, ctx->queue, y->data, ar_const(y->data), ar_tensor_count(y), y->dtype, AR_SUM, tag);
}

/* A group without rows adds nothing but still has a gradient, which is zero. */
static ar_status add_nothing(ar_ctx *ctx, ar_param *p)
{
    if (!p->requires_grad)
        return AR_OK;
    p->has_grad = true;
    return ctx->arith->grad_ensure(ctx, p);
}

ar_status ari_native_grad_groups(ar_ctx *ctx, ar_param *const *sums, const ar_tensor *dy, int n, const ar_tensor *x,
                                 const ar_groups *g, ar_comm *x_rows_over, const char *tag)
{
    AR_TRY(ari_check_groups(g, x->shape[0], tag));
    for (size_t i = 0; i < g->n; i++) {
        const ar_tensor rows = ari_group_rows(x, g, i);
        for (int j = 0; j < n; j++) {
            ar_param *p = sums[i * (size_t)n + (size_t)j];
            const ar_grad_terms terms = {p, ari_group_rows(&dy[j], g, i)};
            AR_TRY(rows.shape[0] > 0 ? ctx->arith->grad_contract(ctx, &terms, 1, &rows, 1, x_rows_over)
                                     : add_nothing(ctx, p));
        }
    }
    return AR_OK;
}
