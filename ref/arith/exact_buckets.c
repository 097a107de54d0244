/* SPDX-License-Identifier: Apache-2.0 */
/* Buckets of the exact arithmetic, and their sums over ranks. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/numerics/sent_sum.h"

/* A bucket holds the accumulators of its elements, each kind in a run of its own. hl, int64 [2n] (all H, then all L),
 * comes first, so that everything is aligned. */
typedef struct runs {
    ar_buf hl, t; /* t: u8 [n] */
    bool narrow;
} runs;

static runs runs_of(ar_buf bucket, size_t n, ar_dtype storage)
{
    return (runs){bucket, ar_buf_at(bucket, 2 * n * sizeof(int64_t)), storage == AR_BF16};
}

size_t ari_exact_bucket_bytes(size_t n, ar_dtype storage)
{
    (void)storage;
    const size_t each = 2 * sizeof(int64_t) + 1;
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
    AR_TRY(ari_exact_grad_reopen(ctx, q, p->grad));
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
    return ctx->device->ops->states_narrow(ctx->device, q, to, ar_cbuf_at(ar_const(r->t), from), h, l, count, width,
                                           r->narrow);
}

/* The values of all elements, each summed up on one rank. room: n in fp32 and n as they are stored. */
static ar_status gather_values(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *shares,
                               ar_buf room, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t start = ari_share_start(over, shares), own = shares[ar_comm_rank(over)];
    const ar_dtype dtype = r->narrow ? AR_BF16 : AR_F32;
    const ar_buf rounded = ar_buf_at(room, n * sizeof(float));
    const ar_buf mine = ar_buf_at(rounded, start * ar_dtype_bytes(dtype));
    const ar_tensor values = one_row(AR_F32, room, own), stored = one_row(dtype, mine, own);
    const ar_tensor wide = one_row(AR_F32, room, n), all = one_row(dtype, rounded, n);
    AR_TRY(dev->acc_value(ctx->device, q, &values, ar_cbuf_at(ar_const(r->t), start),
                          ar_cbuf_at(ar_const(r->hl), start * sizeof(int64_t)), n, r->narrow));
    AR_TRY(dev->copy_strided(ctx->device, q, &stored, &values));
    AR_TRY(ar_comm_all_gather(over, q, rounded, ar_const(mine), shares, dtype, tag));
    AR_TRY(dev->copy_strided(ctx->device, q, &wide, &all));
    return dev->acc_put(ctx->device, q, r->t, r->hl, ar_const(room), n, r->narrow);
}

/* The states of all elements, in `width` bytes each. room: n of them. */
static ar_status gather_states(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *shares,
                               ar_buf room, size_t width, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t start = ari_share_start(over, shares), ranks = (size_t)ar_comm_size(over);
    const ar_buf mine = ar_buf_at(room, start * width), l = ar_buf_at(r->hl, n * sizeof(int64_t));
    ARI_OWNED size_t *bytes = NULL;
    AR_TRY(ARI_ALLOC(&bytes, ranks, "bytes of sums"));
    for (size_t i = 0; i < ranks; i++)
        bytes[i] = shares[i] * width;
    AR_TRY(states_narrow(ctx, q, mine, r, n, start, shares[ar_comm_rank(over)], width));
    AR_TRY(ar_comm_all_gather(over, q, room, ar_const(mine), bytes, AR_U8, tag));
    AR_TRY(dev->zero(ctx->device, q, r->t, n));
    AR_TRY(dev->zero(ctx->device, q, r->hl, 2 * n * sizeof(int64_t)));
    return dev->states_merge(ctx->device, q, r->t, r->hl, l, ar_const(room), 1, n, width, r->narrow);
}

/* Each rank sends the others its states of their shares, in `width` bytes each, and merges those that come with its own
 * share's. room: all that leaves and arrives. */
static ar_status exchange_states(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *shares,
                                 ar_buf room, size_t width, const char *tag)
{
    const size_t ranks = (size_t)ar_comm_size(over), me = (size_t)ar_comm_rank(over);
    const size_t start = ari_share_start(over, shares), own = shares[me], end = start + own;
    const ar_buf came = ar_buf_at(room, (n - own) * width), h = ar_buf_at(r->hl, start * sizeof(int64_t));
    ARI_OWNED size_t *bytes = NULL; /* what goes to each rank, then what comes from it */
    AR_TRY(ARI_ALLOC(&bytes, 2 * ranks, "bytes of sums"));
    for (size_t i = 0; i < ranks; i++) {
        bytes[i] = i == me ? 0 : shares[i] * width;
        bytes[ranks + i] = i == me ? 0 : own * width;
    }
    AR_TRY(states_narrow(ctx, q, room, r, n, 0, start, width));
    AR_TRY(states_narrow(ctx, q, ar_buf_at(room, start * width), r, n, end, n - end, width));
    AR_TRY(ar_comm_all_to_all(over, q, came, ar_const(room), bytes, bytes + ranks, AR_U8, tag));
    return ctx->device->ops->states_merge(ctx->device, q, ar_buf_at(r->t, start), h, ar_buf_at(h, n * sizeof(int64_t)),
                                          ar_const(came), ranks - 1, own, width, r->narrow);
}

/* What leaves and arrives in the widest form, where the own share is as large as any; what comes back is no more. */
size_t ari_exact_bucket_room(size_t n, ar_dtype storage, const ar_comm *over, const size_t *counts)
{
    const size_t ranks = over ? (size_t)ar_comm_size(over) : 1,
                 width = ari_sent_state_bytes(SIZE_MAX, storage == AR_BF16);
    const size_t own = counts ? counts[ar_comm_rank(over)] : n / ranks + (n % ranks != 0);
    if (ranks == 1)
        return 0;
    const size_t most = SIZE_MAX / width;
    return n > most || (ranks > 2 && own > (most - n) / (ranks - 2)) ? SIZE_MAX : (n + (ranks - 2) * own) * width;
}

/* The one sum of gradients, of a bucket's runs or of a gradient's own: states, in the bytes that so many values need.
 * If all ranks need all (counts NULL) their values are gathered then, or their states where more is added to them.
 * room, counts and most as of bucket_reduce. */
static ar_status reduce_runs(ar_ctx *ctx, ar_queue *q, const runs *r, ar_buf room, size_t n, ar_comm *over,
                             const size_t *counts, const ar_most_terms *most, const char *tag)
{
    const size_t before = most ? most->before : SIZE_MAX, after = most ? most->after : SIZE_MAX;
    const size_t width = ari_sent_state_bytes(before, r->narrow), wider = ari_sent_state_bytes(after, r->narrow);
    ARI_OWNED size_t *equal = NULL;
    AR_TRY(ari_slice_counts(&equal, over, n, 1));
    const size_t *shares = counts ? counts : equal;
    AR_TRY(exchange_states(ctx, q, r, n, over, shares, room, width, tag));
    if (counts)
        return AR_OK;
    return after > 0 ? gather_states(ctx, q, r, n, over, shares, room, wider, tag)
                     : gather_values(ctx, q, r, n, over, shares, room, tag);
}

ar_status ari_exact_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_buf room, size_t n, ar_dtype storage,
                                  ar_comm *over, const size_t *counts, const ar_most_terms *most, const char *tag)
{
    const runs r = runs_of(bucket, n, storage);
    return ari_has_peers(over) ? reduce_runs(ctx, q, &r, room, n, over, counts, most, tag) : AR_OK;
}

ar_status ari_exact_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *over, const char *tag)
{
    if (!ari_has_peers(over))
        return AR_OK;
    AR_TRY(ari_exact_grad_ensure(ctx, p));
    AR_TRY(ari_exact_grad_zeros(ctx, ctx->queue, p->grad));
    const size_t n = p->grad->n;
    const runs r = {p->grad->hl, p->grad->t, p->grad->narrow};
    ar_buf room;
    AR_TRY(ari_step_alloc(ctx, &room, ari_exact_bucket_room(n, r.narrow ? AR_BF16 : AR_F32, over, NULL)));
    AR_TRY(reduce_runs(ctx, ctx->queue, &r, room, n, over, NULL, NULL, tag));
    ari_step_free(ctx, room);
    return AR_OK;
}

ar_status ari_exact_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t at,
                                  ar_dtype storage)
{
    (void)storage;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t word = sizeof(int64_t), first = p->own_start, count = p->own_count, from = at + first;
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * word);
    AR_TRY(ari_exact_grad_reopen(ctx, q, p->grad));
    AR_TRY(ari_exact_grad_zeros(ctx, q, p->grad));
    const ar_buf l = ar_buf_at(p->grad->hl, p->grad->n * word);
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
