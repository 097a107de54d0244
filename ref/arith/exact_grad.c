/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients in exact arithmetic. Within a sample dW is one contraction, rounded once. Across samples, a bias's tokens,
 * micro-batches and ranks the values are added in the order-independent accumulator (numerics.md). */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/context/context.h"
#include "ref/core/param_private.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/integer_sum.h"
#include "ref/placement/parallel_private.h"

void ari_exact_grad_release(ar_param *p, ar_queue *q)
{
    if (!p->grad)
        return;
    p->device->ops->free(p->device, q, p->grad->hl);
    p->device->ops->free(p->device, q, p->grad->value);
    free(p->grad);
    p->grad = NULL;
}

void ari_exact_param_release(ar_param *p)
{
    ari_exact_operand_release(p, NULL);
    ari_exact_grad_release(p, NULL);
}

ar_status ari_exact_grad_zero(ar_ctx *ctx, ar_param *p)
{
    if (!p->grad)
        return AR_OK;
    p->grad->is_empty = true;
    ctx->device->ops->free(ctx->device, ctx->queue, p->grad->value);
    p->grad->value.ptr = NULL;
    return AR_OK;
}

ar_status ari_exact_grad_zeros(ar_ctx *ctx, ar_queue *q, ar_param_grad *g)
{
    if (!ari_exact_grad_begins(g))
        return AR_OK;
    AR_TRY(ctx->device->ops->zero(ctx->device, q, g->t, g->n));
    return ctx->device->ops->zero(ctx->device, q, g->hl, 2 * g->n * sizeof(int64_t));
}

static ar_status alloc_on(ar_ctx *ctx, ar_queue *q, ar_buf *out, size_t bytes)
{
    return ctx->device->ops->alloc(ctx->device, q, out, bytes > 0 ? bytes : 1);
}

/* t follows hl, as in a bucket. */
ar_status ari_exact_grad_reopen(ar_ctx *ctx, ar_queue *q, ar_param_grad *g)
{
    const ar_device_ops *dev = ctx->device->ops;
    if (!g->hl.ptr)
        AR_TRY(alloc_on(ctx, q, &g->hl, ari_exact_bucket_bytes(g->n, AR_F32)));
    g->t = ar_buf_at(g->hl, 2 * g->n * sizeof(int64_t));
    if (g->value.ptr && !g->is_empty)
        AR_TRY(dev->acc_put(ctx->device, q, g->t, g->hl, ar_buf_at(g->hl, g->n * sizeof(int64_t)), ar_const(g->value),
                            g->n, g->narrow));
    dev->free(ctx->device, q, g->value);
    g->value.ptr = NULL;
    return AR_OK;
}

ar_status ari_exact_grad_bucket(ar_ctx *ctx, ar_queue *q, ar_buf *borrows, ar_param *p)
{
    AR_TRY(ari_exact_grad_reopen(ctx, q, p->grad));
    AR_TRY(ari_exact_grad_zeros(ctx, q, p->grad));
    *borrows = p->grad->hl;
    return AR_OK;
}

/* Completes a gradient, also if there is none: a rank's memory does not depend on its tokens' experts. */
ar_status ari_exact_grad_complete(ar_ctx *ctx, ar_queue *q, ar_param *p)
{
    const ar_device_ops *dev = ctx->device->ops;
    ar_param_grad *g = p->grad;
    if (!g || g->value.ptr)
        return AR_OK;
    AR_TRY(alloc_on(ctx, q, &g->value, g->n * sizeof(float)));
    const ar_tensor value = ari_tensor_flat(AR_F32, g->value, g->n);
    if (!g->is_empty)
        AR_TRY(dev->acc_value(ctx->device, q, &value, ar_const(g->t), ar_const(g->hl), g->n, g->narrow));
    dev->free(ctx->device, q, g->hl);
    g->t.ptr = g->hl.ptr = NULL;
    return AR_OK;
}

/* Allocated on first use, because a model that only runs forward has no gradients. */
ar_status ari_exact_grad_ensure(ar_ctx *ctx, ar_param *p)
{
    const size_t n = ar_tensor_count(&p->value);
    if (!p->grad) {
        AR_TRY(ari_alloc_zero((void **)&p->grad, 1, sizeof *p->grad, "a gradient"));
        p->grad->n = n;
        p->grad->is_empty = true;
        p->grad->narrow = p->value.dtype == AR_BF16;
    }
    const ar_status st = ari_exact_grad_reopen(ctx, ctx->queue, p->grad);
    if (st != AR_OK)
        ari_exact_grad_release(p, ctx->queue);
    return st;
}

static size_t rows_of(const ar_param *p)
{
    return p->value.ndim > 1 ? ari_param_matrix(p).shape[0] : 1;
}

/* Views [tokens, features] as [samples, features, tokens of a sample]. */
static ar_tensor by_sample(const ar_tensor *t, size_t samples)
{
    const size_t sample_tokens = t->shape[0] / samples;
    return (ar_tensor){.dtype = t->dtype,
                       .ndim = 3,
                       .shape = {samples, t->shape[1], sample_tokens},
                       .stride = {(ptrdiff_t)sample_tokens * t->stride[0], t->stride[1], t->stride[0]},
                       .data = t->data};
}

ar_status ari_exact_new_packed(ar_ctx *ctx, ar_packed **out, size_t batch, size_t rows, size_t k, unsigned form)
{
    AR_TRY(ARI_KERNEL(ctx, packed_create, out, batch, rows, k, form));
    ari_step_count_alloc(ctx, ctx->device->ops->packed_bytes(*out));
    return AR_OK;
}

/* Quantises one operand with exponents e. */
static ar_status quantise_gradient(ar_ctx *ctx, ar_packed **packed, const ar_tensor *t, ar_cbuf c, int sign, ar_cbuf e,
                                   bool narrow)
{
    AR_TRY(ari_exact_new_packed(ctx, packed, t->shape[0], t->shape[1], t->shape[2], ari_exact_form(sign > 0, narrow)));
    return ARI_KERNEL(ctx, pack, *packed, 0, 0, t, c, sign, e);
}

void ari_exact_end_packed(ar_ctx *ctx, ar_packed *p)
{
    ari_step_count_free(ctx, p ? ctx->device->ops->packed_bytes(p) : 0);
    ARI_KERNEL(ctx, packed_destroy, p);
}

/* One contraction per sample: A = dy^T [samples, out, tokens], B = x^T [samples, in, tokens], scaled by the tokens'
 * exponents c [samples, tokens], with the row exponents e [samples, out] and f [samples, in]. A part of a sample
 * (ari_gradient_parts) counts as a sample. */
typedef struct contractions {
    ar_tensor a, b;
    ar_cbuf c, e, f;
    bool narrow;
} contractions;

/* Used if every sample's tokens are all on this rank: results are rounded and added tile by tile. b: the integers of
 * x. */
static ar_status add_samples(ar_ctx *ctx, ar_param *p, const contractions *k, const ar_packed *b, ar_buf e)
{
    ar_packed *a = NULL;
    const bool fresh = ari_exact_grad_begins(p->grad);
    ar_status st = ARI_KERNEL(ctx, row_exponents, e, &k->a, k->c, +1, false, k->narrow);
    if (st == AR_OK)
        st = quantise_gradient(ctx, &a, &k->a, k->c, +1, k->e, k->narrow);
    if (st == AR_OK)
        st = ARI_KERNEL(ctx, gemm_acc, p->grad->t, p->grad->hl, p->grad->n, p->grad->narrow, a, b, k->e, k->f, NULL,
                        fresh);
    ari_exact_end_packed(ctx, a);
    return st;
}

/* Adds gradients of samples, or parts of samples, whose tokens are all on this rank. x is quantised once for all
 * parameters. c: int32 [tokens]. */
static ar_status add_whole(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, ar_cbuf c,
                           size_t samples)
{
    const size_t in_features = x->shape[1];
    ar_packed *b = NULL;
    ar_buf f;
    if (samples == 0)
        return AR_OK;
    AR_TRY(ari_step_alloc(ctx, &f, samples * in_features * sizeof(int32_t)));
    contractions k = {.b = by_sample(x, samples),
                      .c = c,
                      .f = ar_const(f),
                      .narrow = ari_exact_is_narrow(ctx, x->shape[0] / samples)};
    AR_TRY(ARI_KERNEL(ctx, row_exponents, f, &k.b, k.c, -1, false, k.narrow));
    ar_status st = quantise_gradient(ctx, &b, &k.b, k.c, -1, k.f, k.narrow);
    for (int i = 0; i < n && st == AR_OK; i++) {
        ar_buf e = {NULL};
        k.a = by_sample(&terms[i].dy, samples);
        st = ari_step_alloc(ctx, &e, samples * k.a.shape[1] * sizeof(int32_t));
        k.e = ar_const(e);
        if (st == AR_OK)
            st = add_samples(ctx, terms[i].param, &k, b, e);
        ari_step_free(ctx, e);
    }
    ari_exact_end_packed(ctx, b);
    ari_step_free(ctx, f);
    return st;
}

/* --- samples whose tokens are on several ranks -------------------------------------------------------------------- */

/* Lists the rows of every part of every sample (ari_gradient_parts) and the rank that owns it. */
static ar_status shared_parts(ari_moved_rows *m, ar_ctx *ctx, size_t samples, size_t seq)
{
    const size_t parts = ari_gradient_parts(seq), blocks = samples * parts, ranks = (size_t)ar_comm_size(ctx->sequence);
    ARI_OWNED int *owner = NULL;
    ARI_OWNED size_t *rows = NULL;
    AR_TRY(ARI_ALLOC(&owner, blocks, "parts of samples"));
    AR_TRY(ARI_ALLOC(&rows, ranks * blocks, "parts of samples"));
    for (size_t b = 0; b < blocks; b++) {
        owner[b] = ari_gradient_part_owner(&ctx->layout, seq, b / parts, b % parts);
        for (size_t r = 0; r < ranks; r++)
            rows[r * blocks + b] = ari_gradient_part_rows(&ctx->layout, seq, b % parts, (int)r);
    }
    return ari_moved_rows_init(m, ctx, &(ari_row_blocks){ctx->sequence, blocks, owner, rows});
}

/* Computes the same contractions if each part belongs to one rank. */
static ar_status add_moved(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, const ar_tensor *c,
                           const ari_moved_rows *m, size_t samples, const char *tag)
{
    ar_grad_terms moved[AR_MAX_PARTS];
    ar_tensor x_all, c_all;
    AR_TRY(ari_move_rows(&c_all, c, m, tag));
    AR_TRY(ari_move_rows(&x_all, x, m, tag));
    for (int i = 0; i < n; i++) {
        moved[i] = terms[i];
        AR_TRY(ari_move_rows(&moved[i].dy, &terms[i].dy, m, terms[i].param->name));
    }
    AR_TRY(add_whole(ctx, moved, n, &x_all, ar_const(c_all.data), samples));
    for (int i = 0; i < n; i++)
        ar_ctx_release(ctx, &moved[i].dy);
    ARI_RELEASE(ctx, &x_all, &c_all);
    return AR_OK;
}

static ar_status add_shared(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, const ar_tensor *c,
                            size_t samples, const char *tag)
{
    const size_t seq = x->shape[0] / samples * (size_t)ar_comm_size(ctx->sequence);
    ARI_ENDED(ari_moved_rows_end) ari_moved_rows m = {.ctx = NULL};
    AR_TRY(shared_parts(&m, ctx, samples, seq));
    return add_moved(ctx, terms, n, x, c, &m, m.rows / (seq / ari_gradient_parts(seq)), tag);
}

ar_status ari_exact_grad_contract(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, size_t samples,
                                  ar_comm *x_rows_over)
{
    const size_t tokens = x->shape[0];
    const ar_tensor x_t = ari_tensor_transposed(x);
    const char *tag = terms->param->name;
    ar_grad_terms trained[AR_MAX_PARTS];
    int count = 0;
    ar_tensor c; /* int32, because the data are not floats */
    size_t parts = 0;
    if (samples == 0 || tokens % samples != 0)
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient from %zu tokens in %zu samples", tag, tokens, samples);
    for (int i = 0; i < n; i++) {
        bool is_trained = false;
        AR_TRY(ari_grad_begin(ctx, &is_trained, terms[i].param, &terms[i].dy, x));
        if (is_trained)
            trained[count++] = terms[i];
    }
    if (count == 0)
        return AR_OK;
    AR_TRY(ari_new_rows(ctx, &c, AR_F32, tokens, 1));
    AR_TRY(ARI_KERNEL(ctx, col_exponents, c.data, &x_t, false));
    AR_TRY(ari_exact_max(ctx, x_rows_over, c.data, tokens, tag));
    const bool moves =
        ari_gradient_moves(&ctx->layout, tokens / samples * (size_t)ar_comm_size(ctx->sequence), &parts) > 0;
    AR_TRY(moves ? add_shared(ctx, trained, count, x, &c, samples, tag)
                 : add_whole(ctx, trained, count, x, ar_const(c.data), samples * parts));
    for (int i = 0; i < count; i++)
        ari_work_of_gradient(trained[i].dy.shape[1], x->shape[1], tokens);
    ar_ctx_release(ctx, &c);
    return AR_OK;
}

ar_status ari_exact_grad_sum(ar_ctx *ctx, ar_param *p, ar_row_sum *borrows)
{
    *borrows = (ar_row_sum){.t = {NULL}};
    if (!p->requires_grad)
        return AR_OK;
    AR_TRY(ari_exact_grad_ensure(ctx, p));
    AR_TRY(ari_exact_grad_zeros(ctx, ctx->queue, p->grad));
    p->has_grad = true;
    *borrows = (ar_row_sum){.t = p->grad->t, .hl = p->grad->hl, .narrow = p->grad->narrow};
    return AR_OK;
}

ar_status ari_exact_grad_rows(ar_ctx *ctx, ar_param *p, const ar_tensor *terms, ar_cbuf row_of)
{
    ar_row_sum sum;
    AR_TRY(ari_exact_grad_sum(ctx, p, &sum));
    if (!sum.t.ptr)
        return AR_OK;
    const size_t rows = rows_of(p);
    if (terms->ndim != 2 || terms->shape[1] * rows != p->grad->n)
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient terms of %zu columns for %zu x %zu elements", p->name,
                            terms->ndim == 2 ? terms->shape[1] : 0, rows, p->grad->n / (rows ? rows : 1));
    return ARI_KERNEL(ctx, acc_add, sum.t, sum.hl, sum.narrow, rows, terms, row_of);
}

ar_status ari_exact_grad_value(ar_ctx *ctx, const ar_tensor *g, const ar_param *p)
{
    if (!p->grad || p->grad->is_empty)
        return ARI_KERNEL(ctx, fill, g, 0.0f);
    const ar_tensor matrix = p->transposed ? ari_tensor_transposed(g) : *g;
    if (p->grad->value.ptr) {
        ar_tensor value;
        AR_TRY(ar_tensor_view(&value, AR_F32, matrix.ndim, matrix.shape, p->grad->value));
        return ARI_KERNEL(ctx, copy_strided, &matrix, &value);
    }
    return ARI_KERNEL(ctx, acc_value, &matrix, ar_const(p->grad->t), ar_const(p->grad->hl), p->grad->n,
                      p->grad->narrow);
}

size_t ari_exact_grad_bytes(const ar_param *p)
{
    const ar_param_grad *g = p->grad;
    return !g ? 0 : g->value.ptr ? g->n * sizeof(float) : g->hl.ptr ? ari_exact_bucket_bytes(g->n, AR_F32) : 0;
}
