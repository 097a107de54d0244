/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients in the exact arithmetic. Within a sample dW is one contraction, rounded once; across samples, tokens of a
 * bias, micro-batches and ranks the values go into the order-independent accumulator (numerics.md). */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/numerics/integer_sum.h"
#include "ref/numerics/sent_sum.h"

void ari_exact_grad_release(ar_param *p, ar_queue *q)
{
    if (!p->grad)
        return;
    p->device->ops->free(p->device, q, p->grad->t);
    p->device->ops->free(p->device, q, p->grad->hl);
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
    (void)ctx;
    if (p->grad)
        p->grad->none = true;
    return AR_OK;
}

/* For whoever adds to what is there, or writes a part of it. */
static ar_status begin_zeros(ar_ctx *ctx, ar_queue *q, ar_param_grad *g)
{
    if (!ari_exact_grad_begins(g))
        return AR_OK;
    AR_TRY(ctx->device->ops->zero(ctx->device, q, g->t, g->n));
    return ctx->device->ops->zero(ctx->device, q, g->hl, 2 * g->n * sizeof(int64_t));
}

/* Made when first needed: a model that only runs forward has no gradients. */
ar_status ari_exact_grad_ensure(ar_ctx *ctx, ar_param *p)
{
    if (p->grad)
        return AR_OK;
    size_t n = ar_tensor_count(&p->value), bytes = 0;
    AR_TRY(ari_mul_size(&bytes, n, 2 * sizeof(int64_t)));
    AR_TRY(ari_alloc_zero((void **)&p->grad, 1, sizeof *p->grad, "a gradient"));
    p->grad->n = n;
    p->grad->none = true;
    p->grad->narrow = p->value.dtype == AR_BF16;
    ar_status st = AR_OK;
    AR_TRY_TO(failed, st, ari_ctx_alloc(ctx, &p->grad->t, n));
    AR_TRY_TO(failed, st, ari_ctx_alloc(ctx, &p->grad->hl, bytes));
    return AR_OK;
failed:
    ari_exact_grad_release(p, ctx->queue);
    return st;
}

static size_t rows_of(const ar_param *p)
{
    return p->value.ndim > 1 ? ar_param_matrix(p).shape[0] : 1;
}

/* [tokens, features] as [samples, features, tokens of a sample]. */
static ar_tensor by_sample(const ar_tensor *t, size_t samples)
{
    const size_t each = t->shape[0] / samples;
    return (ar_tensor){.dtype = t->dtype,
                       .ndim = 3,
                       .shape = {samples, t->shape[1], each},
                       .stride = {(ptrdiff_t)each * t->stride[0], t->stride[1], t->stride[0]},
                       .data = t->data};
}

ar_status ari_exact_new_packed(ar_ctx *ctx, ar_packed **gives, size_t batch, size_t rows, size_t k, unsigned form)
{
    AR_TRY(ARI_KERNEL(ctx, packed_create, gives, batch, rows, k, form));
    ari_step_count_alloc(ctx, ctx->device->ops->packed_bytes(*gives));
    return AR_OK;
}

/* The integers of one operand, whose exponents are e. */
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

/* A contraction for each sample: A = dy^T [samples, out, tokens], B = x^T [samples, in, tokens], scaled by the tokens'
 * exponents c [samples, tokens]; and the exponents of their rows, e [samples, out] and f [samples, in]. A part of a
 * sample (ar_gradient_parts) counts as one. */
typedef struct contractions {
    ar_tensor a, b;
    ar_cbuf c, e, f;
    bool narrow;
} contractions;

/* Every sample's tokens are all here: rounded and added tile by tile. b: the integers of x. */
static ar_status add_samples(ar_ctx *ctx, ar_param *p, const contractions *k, const ar_packed *b, ar_buf e)
{
    ar_packed *a = NULL;
    ar_status st = ARI_KERNEL(ctx, row_exponents, e, &k->a, k->c, +1, false, k->narrow);
    if (st == AR_OK)
        st = quantise_gradient(ctx, &a, &k->a, k->c, +1, k->e, k->narrow);
    if (st == AR_OK)
        st = ARI_KERNEL(ctx, gemm_acc, p->grad->t, p->grad->hl, p->grad->narrow, a, b, k->e, k->f, NULL,
                        ari_exact_grad_begins(p->grad));
    ari_exact_end_packed(ctx, a);
    return st;
}

/* x is quantised once for all parameters. c: int32 [tokens]; samples: or parts of them, whose tokens are all here. */
static ar_status add_whole(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, ar_cbuf c,
                           size_t samples)
{
    const size_t in = x->shape[1];
    ar_packed *b = NULL;
    ar_buf f;
    if (samples == 0)
        return AR_OK;
    AR_TRY(ari_step_alloc(ctx, &f, samples * in * sizeof(int32_t)));
    contractions k = {.b = by_sample(x, samples),
                      .c = c,
                      .f = ar_const(f),
                      .narrow = ari_exact_is_narrow(ctx, x->shape[0] / samples)};
    AR_TRY(ARI_KERNEL(ctx, row_exponents, f, &k.b, k.c, -1, false, k.narrow));
    ar_status st = quantise_gradient(ctx, &b, &k.b, k.c, -1, k.f, k.narrow);
    for (int i = 0; i < n && st == AR_OK; i++) {
        ar_buf e = {NULL};
        if (!terms[i].to->requires_grad)
            continue;
        k.a = by_sample(&terms[i].dy, samples);
        st = ari_step_alloc(ctx, &e, samples * k.a.shape[1] * sizeof(int32_t));
        k.e = ar_const(e);
        if (st == AR_OK)
            st = add_samples(ctx, terms[i].to, &k, b, e);
        ari_step_free(ctx, e);
    }
    ari_exact_end_packed(ctx, b);
    ari_step_free(ctx, f);
    return st;
}

/* --- samples whose tokens are on several ranks -------------------------------------------------------------------- */

/* The rows of every part of every sample (ar_gradient_parts), and whose it is. */
static ar_status shared_parts(ari_moved_rows *m, ar_ctx *ctx, size_t samples, size_t seq)
{
    const size_t parts = ar_gradient_parts(seq), blocks = samples * parts, ranks = (size_t)ar_comm_size(ctx->sequence);
    ARI_OWNED int *owner = NULL;
    ARI_OWNED size_t *rows = NULL;
    AR_TRY(ARI_ALLOC(&owner, blocks, "parts of samples"));
    AR_TRY(ARI_ALLOC(&rows, ranks * blocks, "parts of samples"));
    for (size_t b = 0; b < blocks; b++) {
        owner[b] = ar_gradient_part_owner(&ctx->layout, seq, b / parts, b % parts);
        for (size_t r = 0; r < ranks; r++)
            rows[r * blocks + b] = ar_gradient_part_rows(&ctx->layout, seq, b % parts, (int)r);
    }
    return ari_moved_rows_init(m, ctx, &(ari_row_blocks){ctx->sequence, blocks, owner, rows});
}

/* The same contractions where each part is one rank's. */
static ar_status add_moved(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, const ar_tensor *c,
                           const ari_moved_rows *m, size_t samples)
{
    const char *tag = terms->to->name;
    ar_grad_terms moved[AR_MAX_PARTS];
    ar_tensor x_all, c_all;
    AR_TRY(ari_move_rows(&c_all, c, m, tag));
    AR_TRY(ari_move_rows(&x_all, x, m, tag));
    for (int i = 0; i < n; i++) {
        moved[i] = terms[i];
        if (terms[i].to->requires_grad)
            AR_TRY(ari_move_rows(&moved[i].dy, &terms[i].dy, m, terms[i].to->name));
    }
    AR_TRY(add_whole(ctx, moved, n, &x_all, ar_const(c_all.data), samples));
    for (int i = 0; i < n; i++) {
        if (terms[i].to->requires_grad)
            ar_ctx_release(ctx, &moved[i].dy);
    }
    ARI_RELEASE(ctx, &x_all, &c_all);
    return AR_OK;
}

static ar_status add_shared(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, const ar_tensor *c,
                            size_t samples)
{
    const size_t seq = x->shape[0] / samples * (size_t)ar_comm_size(ctx->sequence);
    ARI_ENDED(ari_moved_rows_end) ari_moved_rows m = {.ctx = NULL};
    AR_TRY(shared_parts(&m, ctx, samples, seq));
    return add_moved(ctx, terms, n, x, c, &m, m.rows / (seq / ar_gradient_parts(seq)));
}

ar_status ari_exact_grad_contract(ar_ctx *ctx, const ar_grad_terms *terms, int n, const ar_tensor *x, size_t samples,
                                  ar_comm *x_rows_over)
{
    const size_t tokens = x->shape[0];
    const ar_tensor x_t = ar_tensor_transposed(x);
    ar_tensor c; /* int32, of numbers that a kernel moves */
    size_t parts = 0;
    bool any = false;
    if (samples == 0 || tokens % samples != 0)
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient from %zu tokens in %zu samples", terms->to->name, tokens,
                            samples);
    for (int i = 0; i < n; i++) {
        bool begins = false;
        AR_TRY(ari_grad_begin(ctx, &begins, terms[i].to, &terms[i].dy, x));
        any = any || begins;
    }
    if (!any)
        return AR_OK;
    AR_TRY(ari_new_rows(ctx, &c, AR_F32, tokens, 1));
    AR_TRY(ARI_KERNEL(ctx, col_exponents, c.data, &x_t, false));
    AR_TRY(ari_exact_max(ctx, x_rows_over, c.data, tokens, terms->to->name));
    AR_TRY(ar_gradient_moves(&ctx->layout, tokens / samples * (size_t)ar_comm_size(ctx->sequence), &parts) > 0
               ? add_shared(ctx, terms, n, x, &c, samples)
               : add_whole(ctx, terms, n, x, ar_const(c.data), samples * parts));
    for (int i = 0; i < n; i++) {
        if (terms[i].to->requires_grad)
            ari_work_of_gradient(terms[i].dy.shape[1], x->shape[1], tokens);
    }
    ar_ctx_release(ctx, &c);
    return AR_OK;
}

ar_status ari_exact_grad_sum(ar_ctx *ctx, ar_param *p, ar_row_sum *borrows)
{
    *borrows = (ar_row_sum){.t = {NULL}};
    if (!p->requires_grad)
        return AR_OK;
    AR_TRY(ari_exact_grad_ensure(ctx, p));
    AR_TRY(begin_zeros(ctx, ctx->queue, p->grad));
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
    if (!p->grad || p->grad->none)
        return ARI_KERNEL(ctx, fill, g, 0.0f);
    const ar_tensor matrix = p->transposed ? ar_tensor_transposed(g) : *g;
    return ARI_KERNEL(ctx, acc_value, &matrix, ar_const(p->grad->t), ar_const(p->grad->hl), p->grad->n,
                      p->grad->narrow);
}

size_t ari_exact_grad_bytes(const ar_param *p)
{
    return p->grad ? p->grad->n * (sizeof(uint8_t) + 2 * sizeof(int64_t)) : 0;
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

/* A bucket holds the accumulators of its elements, each kind in a run of its own, and room for the largest t of all
 * ranks, to which H and L are raised before they are added. hl, int64 [2n] (all H, then all L), comes first, so that
 * everything is aligned. */
typedef struct runs {
    ar_buf hl, t, most; /* t, most: u8 [n] */
    bool narrow;
} runs;

static runs runs_of(ar_buf bucket, size_t n, ar_dtype storage)
{
    const size_t hl = 2 * n * sizeof(int64_t);
    return (runs){bucket, ar_buf_at(bucket, hl), ar_buf_at(bucket, hl + n), storage == AR_BF16};
}

size_t ari_exact_bucket_bytes(size_t n, ar_dtype storage)
{
    (void)storage;
    const size_t each = 2 * sizeof(int64_t) + 2;
    return n > SIZE_MAX / each ? SIZE_MAX : n * each;
}

ar_status ari_exact_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage)
{
    return ctx->device->ops->zero(ctx->device, q, bucket, ari_exact_bucket_bytes(n, storage));
}

ar_status ari_exact_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t at, ar_dtype storage,
                                const ar_param *p)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t count = ar_tensor_count(&p->value), word = sizeof(int64_t);
    const runs r = runs_of(bucket, n, storage);
    const ar_buf t = ar_buf_at(r.t, at), h = ar_buf_at(r.hl, at * word), l = ar_buf_at(r.hl, (n + at) * word);
    if (!p->grad || p->grad->none) {
        AR_TRY(dev->zero(ctx->device, q, t, count));
        AR_TRY(dev->zero(ctx->device, q, h, count * word));
        return dev->zero(ctx->device, q, l, count * word);
    }
    const ar_cbuf hl = ar_const(p->grad->hl);
    AR_TRY(dev->copy(ctx->device, q, t, ar_const(p->grad->t), count));
    AR_TRY(dev->copy(ctx->device, q, h, hl, count * word));
    return dev->copy(ctx->device, q, l, ar_cbuf_at(hl, count * word), count * word);
}

/* n values as the one row of a matrix: a row is what the accumulator's kernels know. */
static ar_tensor one_row(ar_dtype dtype, ar_buf data, size_t n)
{
    return (ar_tensor){.dtype = dtype, .ndim = 2, .shape = {1, n}, .stride = {(ptrdiff_t)n, 1}, .data = data};
}

static ar_status states_narrow(ar_ctx *ctx, ar_queue *q, ar_buf to, const runs *r, size_t n, size_t from, size_t count,
                               size_t width)
{
    const ar_cbuf h = ar_cbuf_at(ar_const(r->hl), from * sizeof(int64_t)), l = ar_cbuf_at(h, n * sizeof(int64_t));
    return ctx->device->ops->states_narrow(ctx->device, q, to, ar_cbuf_at(ar_const(r->t), from), h, l, count, width);
}

/* The values of all elements, of which every rank has its slice. room: 6n bytes. */
static ar_status gather_values(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *counts,
                               ar_buf room, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t start = ari_share_start(over, counts), own = counts[ar_comm_rank(over)];
    const ar_cbuf t = ar_cbuf_at(ar_const(r->t), start), h = ar_cbuf_at(ar_const(r->hl), start * sizeof(int64_t));
    const ar_buf kept = ar_buf_at(room, n * sizeof(float)), mine = ar_buf_at(kept, start * sizeof(uint16_t));
    const ar_tensor values = one_row(AR_F32, ar_buf_at(room, start * sizeof(float)), own);
    const ar_tensor rounded = one_row(AR_BF16, mine, own), came = one_row(AR_BF16, kept, n);
    const ar_tensor wide = one_row(AR_F32, room, n);
    AR_TRY(dev->acc_value(ctx->device, q, &values, t, h, n, true));
    AR_TRY(dev->copy_strided(ctx->device, q, &rounded, &values));
    AR_TRY(ar_comm_all_gather(over, q, kept, ar_const(mine), counts, AR_BF16, tag));
    AR_TRY(dev->copy_strided(ctx->device, q, &wide, &came));
    return dev->acc_put(ctx->device, q, r->t, r->hl, ar_const(room), n, true);
}

/* The states of all elements, of which every rank has its slice, in `width` bytes each. room: n of them. */
static ar_status gather_states(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *counts,
                               ar_buf room, size_t width, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t ranks = (size_t)ar_comm_size(over), start = ari_share_start(over, counts);
    const ar_buf mine = ar_buf_at(room, start * width), l = ar_buf_at(r->hl, n * sizeof(int64_t));
    ARI_OWNED size_t *bytes = NULL;
    AR_TRY(ARI_ALLOC(&bytes, ranks, "bytes of sums"));
    for (size_t i = 0; i < ranks; i++)
        bytes[i] = counts[i] * width;
    AR_TRY(states_narrow(ctx, q, mine, r, n, start, counts[ar_comm_rank(over)], width));
    AR_TRY(ar_comm_all_gather(over, q, room, ar_const(mine), bytes, AR_U8, tag));
    AR_TRY(dev->zero(ctx->device, q, r->t, n));
    AR_TRY(dev->zero(ctx->device, q, r->hl, 2 * n * sizeof(int64_t)));
    return dev->states_merge(ctx->device, q, r->t, r->hl, l, ar_const(room), 1, n, width);
}

/* Of narrow states. The own slice is merged with the other ranks' states, which come in the bytes that so many values
 * need; unless that is all that was asked for (gathers) its values are gathered, or its states where more is added to
 * them. No memory of the step: another queue has it. */
static ar_status reduce_states(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *counts,
                               bool gathers, const ar_most_terms *most, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t ranks = (size_t)ar_comm_size(over), own = counts[ar_comm_rank(over)];
    const size_t start = ari_share_start(over, counts), width = ari_sent_state_bytes(most->before);
    const size_t wider = ari_sent_state_bytes(most->after), kept = sizeof(float) + sizeof(uint16_t);
    const size_t there = (n + ranks * own) * width, back = n * (most->after > 0 ? wider : kept);
    const ar_buf t = ar_buf_at(r->t, start), h = ar_buf_at(r->hl, start * sizeof(int64_t));
    ar_buf sent = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, dev->alloc(ctx->device, q, &sent, there > back ? there : back));
    const ar_buf came = ar_buf_at(sent, n * width);
    AR_TRY_TO(done, st, states_narrow(ctx, q, sent, r, n, 0, start, width));
    AR_TRY_TO(done, st,
              states_narrow(ctx, q, ar_buf_at(sent, start * width), r, n, start + own, n - start - own, width));
    AR_TRY_TO(done, st, ari_exact_send(q, came, sent, counts, width, over, true, tag));
    AR_TRY_TO(done, st,
              dev->states_merge(ctx->device, q, t, h, ar_buf_at(h, n * sizeof(int64_t)), ar_const(came), ranks - 1, own,
                                width));
    if (gathers)
        st = most->after > 0 ? gather_states(ctx, q, r, n, over, counts, sent, wider, tag)
                             : gather_values(ctx, q, r, n, over, counts, sent, tag);
done:
    dev->free(ctx->device, q, sent);
    return st;
}

/* The one sum of gradients: of a bucket's runs, or of a gradient's own. counts and most as of bucket_reduce. */
static ar_status reduce_runs(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *counts,
                             const ar_most_terms *most, const char *tag)
{
    if (r->narrow && most) {
        size_t *slices = NULL;
        AR_TRY(ari_slice_counts(&slices, over, n, 1));
        const ar_status st = reduce_states(ctx, q, r, n, over, counts ? counts : slices, !counts, most, tag);
        free(slices);
        return st;
    }
    AR_TRY(ar_comm_all_reduce(over, q, r->most, ar_const(r->t), n, AR_U8, AR_MAX, tag));
    AR_TRY(ctx->device->ops->acc_raise(ctx->device, q, r->t, r->hl, ar_const(r->most), n));
    if (!counts)
        return ar_comm_all_reduce(over, q, r->hl, ar_const(r->hl), 2 * n, AR_I64, AR_SUM, tag);
    const ar_buf l = ar_buf_at(r->hl, n * sizeof(int64_t));
    const size_t own = ari_share_start(over, counts) * sizeof(int64_t);
    AR_TRY(ar_comm_reduce_scatter(over, q, ar_buf_at(r->hl, own), ar_const(r->hl), counts, AR_I64, AR_SUM, tag));
    return ar_comm_reduce_scatter(over, q, ar_buf_at(l, own), ar_const(l), counts, AR_I64, AR_SUM, tag);
}

ar_status ari_exact_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage, ar_comm *over,
                                  const size_t *counts, const ar_most_terms *most, const char *tag)
{
    const runs r = runs_of(bucket, n, storage);
    return ari_has_peers(over) ? reduce_runs(ctx, q, &r, n, over, counts, most, tag) : AR_OK;
}

ar_status ari_exact_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *over, const char *tag)
{
    if (!ari_has_peers(over))
        return AR_OK;
    AR_TRY(ari_exact_grad_ensure(ctx, p));
    AR_TRY(begin_zeros(ctx, ctx->queue, p->grad));
    runs r = {.hl = p->grad->hl, .t = p->grad->t, .narrow = p->grad->narrow};
    AR_TRY(ari_step_alloc(ctx, &r.most, p->grad->n));
    AR_TRY(reduce_runs(ctx, ctx->queue, &r, p->grad->n, over, NULL, NULL, tag));
    ari_step_free(ctx, r.most);
    return AR_OK;
}

ar_status ari_exact_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t at,
                                  ar_dtype storage)
{
    (void)storage;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t word = sizeof(int64_t), first = p->own_start, count = p->own_count, from = at + first;
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * word);
    const ar_buf l = ar_buf_at(p->grad->hl, p->grad->n * word);
    AR_TRY(begin_zeros(ctx, q, p->grad));
    AR_TRY(dev->copy(ctx->device, q, ar_buf_at(p->grad->t, first), ar_cbuf_at(t, from), count));
    AR_TRY(
        dev->copy(ctx->device, q, ar_buf_at(p->grad->hl, first * word), ar_cbuf_at(bucket, from * word), count * word));
    return dev->copy(ctx->device, q, ar_buf_at(l, first * word), ar_cbuf_at(bucket, (n + from) * word), count * word);
}

ar_status ari_exact_bucket_put(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_cbuf x, size_t n, ar_dtype storage)
{
    const ar_device_ops *dev = ctx->device->ops;
    const runs r = runs_of(bucket, n, storage);
    ar_tensor terms = one_row(AR_F32, (ar_buf){(void *)(uintptr_t)x.ptr}, n);
    ar_buf rounded = {NULL};
    AR_TRY(ari_exact_bucket_zero(ctx, q, bucket, n, storage));
    ar_status st = AR_OK;
    if (r.narrow) { /* to the nearest: slices would cut them */
        AR_TRY(dev->alloc(ctx->device, q, &rounded, n * sizeof(uint16_t)));
        const ar_tensor wide = terms;
        terms = one_row(AR_BF16, rounded, n);
        st = dev->copy_strided(ctx->device, q, &terms, &wide);
    }
    if (st == AR_OK)
        st = dev->acc_add(ctx->device, q, r.t, r.hl, r.narrow, 1, &terms, (ar_cbuf){NULL});
    dev->free(ctx->device, q, rounded);
    return st;
}

ar_status ari_exact_bucket_take(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n, size_t at, size_t count,
                                ar_dtype storage)
{
    const ar_device_ops *dev = ctx->device->ops;
    const ar_tensor values = one_row(AR_F32, y, count);
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * sizeof(int64_t) + at), hl = ar_cbuf_at(bucket, at * sizeof(int64_t));
    return dev->acc_value(ctx->device, q, &values, t, hl, n, storage == AR_BF16);
}
