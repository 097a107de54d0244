/* SPDX-License-Identifier: Apache-2.0 */
/* Buckets of the exact arithmetic, and their sums over ranks. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/numerics/sent_sum.h"

/* Accumulators of a bucket's elements, each kind as a contiguous run. hl, int64 [2n] (all H, then all L), comes first
 * for alignment. */
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
    const size_t element_bytes = 2 * sizeof(int64_t) + 1;
    return n > SIZE_MAX / element_bytes ? SIZE_MAX : n * element_bytes;
}

ar_status ari_exact_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage)
{
    return ctx->device->ops->zero(ctx->device, q, bucket, ari_exact_bucket_bytes(n, storage));
}

ar_status ari_exact_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t offset, ar_dtype storage,
                                const ar_param *p)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t count = ar_tensor_count(&p->value), word = sizeof(int64_t);
    const runs r = runs_of(bucket, n, storage);
    const ar_buf t = ar_buf_at(r.t, offset), h = ar_buf_at(r.hl, offset * word),
                 l = ar_buf_at(r.hl, (n + offset) * word);
    if (!p->grad || p->grad->is_empty) {
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

/* Views n values as a matrix of one row, which the accumulator's kernels process. */
static ar_tensor one_row(ar_dtype dtype, ar_buf data, size_t n)
{
    return (ar_tensor){.dtype = dtype, .ndim = 2, .shape = {1, n}, .stride = {(ptrdiff_t)n, 1}, .data = data};
}

/* --- sums over ranks ---------------------------------------------------------------------------------------------- */

/* Maximum number of elements exchanged at once by all ranks together, which bounds memory for any bucket size. */
enum { ELEMENTS_AT_ONCE = 1 << 21 };

/* Returns the largest size of a rank's share. */
static size_t most_of_share(size_t ranks)
{
    return ranks < ELEMENTS_AT_ONCE ? ELEMENTS_AT_ONCE / ranks : 1;
}

/* Sum of n elements that is exchanged part by part: of rank i's share, count[i] elements from start[i] on. */
typedef struct exchange {
    ar_ctx *ctx;
    ar_queue *q;
    const runs *r;
    size_t n;
    ar_comm *group;
    size_t ranks, me;
    const size_t *shares;          /* [ranks] */
    size_t *start, *count, *bytes; /* [ranks], [ranks], [2*ranks] */
    size_t total;                  /* number of elements in the part */
    ar_buf room;
    const char *tag;
} exchange;

/* Sets the next part, after `done_count` elements of each share. Returns false if there is none. */
static bool take_part(exchange *x, size_t done_count)
{
    const size_t max_share = most_of_share(x->ranks);
    size_t start = 0;
    x->total = 0;
    for (size_t i = 0; i < x->ranks; i++) {
        const size_t share = x->shares[i], remaining = share > done_count ? share - done_count : 0;
        x->start[i] = start + (share - remaining);
        x->count[i] = remaining < max_share ? remaining : max_share;
        x->total += x->count[i];
        start += share;
    }
    return x->total > 0;
}

/* Processes `count` elements of the sum from `start` on, which are at `place` in the part. */
typedef ar_status range_fn(const exchange *x, size_t start, size_t count, size_t place, size_t width);

/* Calls use for each range, merging adjacent ranges. include_local: also for this rank's. */
static ar_status each_range(const exchange *x, bool include_local, range_fn *use, size_t width)
{
    size_t place = 0;
    for (size_t i = 0; i < x->ranks;) {
        size_t count = 0, start = 0;
        for (; i < x->ranks && (include_local || i != x->me) && (count == 0 || x->start[i] == start + count); i++) {
            start = count == 0 ? x->start[i] : start;
            count += x->count[i];
        }
        if (count > 0)
            AR_TRY(use(x, start, count, place, width));
        place += count;
        i += !include_local && i == x->me;
    }
    return AR_OK;
}

static ar_buf at_h(const exchange *x, size_t start)
{
    return ar_buf_at(x->r->hl, start * sizeof(int64_t));
}

static ar_buf at_l(const exchange *x, size_t start)
{
    return at_h(x, x->n + start);
}

static ar_status narrow_states(const exchange *x, size_t start, size_t count, size_t place, size_t width)
{
    return x->ctx->device->ops->states_narrow(x->ctx->device, x->q, ar_buf_at(x->room, place * width),
                                              ar_cbuf_at(ar_const(x->r->t), start), ar_const(at_h(x, start)),
                                              ar_const(at_l(x, start)), count, width, x->r->narrow);
}

static ar_status put_values(const exchange *x, size_t start, size_t count, size_t place, size_t width)
{
    return x->ctx->device->ops->acc_put(x->ctx->device, x->q, ar_buf_at(x->r->t, start), at_h(x, start), at_l(x, start),
                                        ar_cbuf_at(ar_const(x->room), place * width), count, x->r->narrow);
}

static ar_status put_states(const exchange *x, size_t start, size_t count, size_t place, size_t width)
{
    const ar_device_ops *dev = x->ctx->device->ops;
    const ar_buf t = ar_buf_at(x->r->t, start), h = at_h(x, start), l = at_l(x, start);
    AR_TRY(dev->zero(x->ctx->device, x->q, t, count));
    AR_TRY(dev->zero(x->ctx->device, x->q, h, count * sizeof(int64_t)));
    AR_TRY(dev->zero(x->ctx->device, x->q, l, count * sizeof(int64_t)));
    return dev->states_merge(x->ctx->device, x->q, t, h, l, ar_cbuf_at(ar_const(x->room), place * width), 1, count,
                             width, x->r->narrow);
}

/* Returns the number of elements in the part that belong to earlier ranks. */
static size_t elements_before(const exchange *x)
{
    size_t before = 0;
    for (size_t i = 0; i < x->me; i++)
        before += x->count[i];
    return before;
}

/* Gathers the values of all elements, each summed on one rank. Scratch: the part in fp32 and in its storage format. */
static ar_status gather_values(const exchange *x)
{
    ar_ctx *ctx = x->ctx;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t local_count = x->count[x->me];
    const ar_dtype dtype = x->r->narrow ? AR_BF16 : AR_F32;
    const ar_buf rounded = ar_buf_at(x->room, x->total * sizeof(float));
    const ar_buf mine = ar_buf_at(rounded, elements_before(x) * ar_dtype_bytes(dtype));
    const ar_tensor values = one_row(AR_F32, x->room, local_count), stored = one_row(dtype, mine, local_count);
    const ar_tensor wide = one_row(AR_F32, x->room, x->total), gathered = one_row(dtype, rounded, x->total);
    AR_TRY(dev->acc_value(ctx->device, x->q, &values, ar_cbuf_at(ar_const(x->r->t), x->start[x->me]),
                          ar_const(at_h(x, x->start[x->me])), x->n, x->r->narrow));
    AR_TRY(dev->copy_strided(ctx->device, x->q, &stored, &values));
    AR_TRY(ar_comm_all_gather(x->group, x->q, rounded, ar_const(mine), x->count, dtype, x->tag));
    AR_TRY(dev->copy_strided(ctx->device, x->q, &wide, &gathered));
    return each_range(x, true, put_values, sizeof(float));
}

/* Gathers the states of all elements, `width` bytes each. Scratch: the part's states. */
static ar_status gather_states(const exchange *x, size_t width)
{
    const size_t before = elements_before(x);
    for (size_t i = 0; i < x->ranks; i++)
        x->bytes[i] = x->count[i] * width;
    AR_TRY(narrow_states(x, x->start[x->me], x->count[x->me], before, width));
    AR_TRY(ar_comm_all_gather(x->group, x->q, x->room, ar_const(ar_buf_at(x->room, before * width)), x->bytes, AR_U8,
                              x->tag));
    return each_range(x, true, put_states, width);
}

/* Sends each rank its share's states of this rank, `width` bytes each, and merges the received states of this rank's
 * share. room: buffer for all that is sent and received. */
static ar_status exchange_states(const exchange *x, size_t width)
{
    const size_t local_count = x->count[x->me], start = x->start[x->me];
    const ar_buf received = ar_buf_at(x->room, (x->total - local_count) * width);
    for (size_t i = 0; i < x->ranks; i++) { /* bytes sent to each rank, then received from each */
        x->bytes[i] = i == x->me ? 0 : x->count[i] * width;
        x->bytes[x->ranks + i] = i == x->me ? 0 : local_count * width;
    }
    AR_TRY(each_range(x, false, narrow_states, width));
    AR_TRY(
        ar_comm_all_to_all(x->group, x->q, received, ar_const(x->room), x->bytes, x->bytes + x->ranks, AR_U8, x->tag));
    return x->ctx->device->ops->states_merge(x->ctx->device, x->q, ar_buf_at(x->r->t, start), at_h(x, start),
                                             at_l(x, start), ar_const(received), x->ranks - 1, local_count, width,
                                             x->r->narrow);
}

/* Returns the buffer size of a bucket: the sent and received integers in the widest form, for a part in which this
 * rank's share is as large as any. The returned gradients need no more. */
size_t ari_exact_bucket_room(size_t n, ar_dtype storage, const ar_comm *group, const size_t *counts)
{
    const size_t ranks = group ? (size_t)ar_comm_size(group) : 1, max_share = most_of_share(ranks);
    const size_t share = counts ? counts[ar_comm_rank(group)] : n / ranks + (n % ranks != 0);
    const size_t local_count = share < max_share ? share : max_share,
                 total = n / ranks < max_share ? n : max_share * ranks;
    return ranks == 1 ? 0 : (total + (ranks - 2) * local_count) * ari_sent_state_bytes(SIZE_MAX, storage == AR_BF16);
}

/* Sums gradients over ranks, for a bucket's runs or a single gradient: exchanges states in as many bytes as the number
 * of values needs. If all ranks need all sums (counts NULL), the values are gathered afterwards, or the states if more
 * is added later. room, counts and most as in bucket_reduce. */
static ar_status reduce_runs(ar_ctx *ctx, ar_queue *q, const runs *r, ar_buf scratch, size_t n, ar_comm *group,
                             const size_t *counts, const ar_most_terms *terms, const char *tag)
{
    const size_t before = terms ? terms->before : SIZE_MAX, after = terms ? terms->after : SIZE_MAX;
    const size_t width = ari_sent_state_bytes(before, r->narrow), wider = ari_sent_state_bytes(after, r->narrow);
    const size_t ranks = (size_t)ar_comm_size(group), me = (size_t)ar_comm_rank(group);
    ARI_OWNED size_t *equal = NULL, *numbers = NULL;
    AR_TRY(ari_slice_counts(&equal, group, n, 1));
    AR_TRY(ARI_ALLOC(&numbers, 4 * ranks, "shares of sums"));
    exchange x = {
        .ctx = ctx, .q = q, .r = r, .n = n, .group = group, .ranks = ranks, .me = me, .room = scratch, .tag = tag};
    x.shares = counts ? counts : equal;
    x.start = numbers;
    x.count = numbers + ranks;
    x.bytes = numbers + 2 * ranks;
    for (size_t done_count = 0; take_part(&x, done_count) || done_count == 0; done_count += most_of_share(ranks)) {
        AR_TRY(exchange_states(&x, width));
        if (!counts)
            AR_TRY(after > 0 ? gather_states(&x, wider) : gather_values(&x));
    }
    return AR_OK;
}

ar_status ari_exact_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_buf scratch, size_t n, ar_dtype storage,
                                  ar_comm *group, const size_t *counts, const ar_most_terms *terms, const char *tag)
{
    const runs r = runs_of(bucket, n, storage);
    return ari_has_peers(group) ? reduce_runs(ctx, q, &r, scratch, n, group, counts, terms, tag) : AR_OK;
}

ar_status ari_exact_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *group, const char *tag)
{
    if (!ari_has_peers(group))
        return AR_OK;
    AR_TRY(ari_exact_grad_ensure(ctx, p));
    AR_TRY(ari_exact_grad_zeros(ctx, ctx->queue, p->grad));
    const size_t n = p->grad->n;
    const runs r = {p->grad->hl, p->grad->t, p->grad->narrow};
    ar_buf scratch;
    AR_TRY(ari_step_alloc(ctx, &scratch, ari_exact_bucket_room(n, r.narrow ? AR_BF16 : AR_F32, group, NULL)));
    AR_TRY(reduce_runs(ctx, ctx->queue, &r, scratch, n, group, NULL, NULL, tag));
    ari_step_free(ctx, scratch);
    return AR_OK;
}

ar_status ari_exact_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t offset,
                                  ar_dtype storage)
{
    (void)storage;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t word = sizeof(int64_t), local_start = p->own_start, count = p->own_count,
                 bucket_start = offset + local_start;
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * word);
    AR_TRY(ari_exact_grad_reopen(ctx, q, p->grad));
    AR_TRY(ari_exact_grad_zeros(ctx, q, p->grad));
    const ar_buf l = ar_buf_at(p->grad->hl, p->grad->n * word);
    AR_TRY(dev->copy(ctx->device, q, ar_buf_at(p->grad->t, local_start), ar_cbuf_at(t, bucket_start), count));
    AR_TRY(dev->copy(ctx->device, q, ar_buf_at(p->grad->hl, local_start * word),
                     ar_cbuf_at(bucket, bucket_start * word), count * word));
    return dev->copy(ctx->device, q, ar_buf_at(l, local_start * word), ar_cbuf_at(bucket, (n + bucket_start) * word),
                     count * word);
}

ar_status ari_exact_bucket_put(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_cbuf x, size_t n, ar_dtype storage)
{
    const ar_device_ops *dev = ctx->device->ops;
    const runs r = runs_of(bucket, n, storage);
    ar_tensor terms = one_row(AR_F32, (ar_buf){(void *)(uintptr_t)x.ptr}, n);
    ar_buf rounded = {NULL};
    AR_TRY(ari_exact_bucket_zero(ctx, q, bucket, n, storage));
    ar_status st = AR_OK;
    if (r.narrow) { /* rounded to nearest, because slices would truncate */
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

ar_status ari_exact_bucket_take(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n, size_t offset,
                                size_t count, ar_dtype storage)
{
    const ar_device_ops *dev = ctx->device->ops;
    const ar_tensor values = one_row(AR_F32, y, count);
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * sizeof(int64_t) + offset),
                  hl = ar_cbuf_at(bucket, offset * sizeof(int64_t));
    return dev->acc_value(ctx->device, q, &values, t, hl, n, storage == AR_BF16);
}
