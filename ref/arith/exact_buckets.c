/* SPDX-License-Identifier: Apache-2.0 */
/* Buckets of the exact arithmetic, and their sums over ranks. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/numerics/sent_sum.h"

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

/* Elements of each rank of a group, in runs; between ranks they lie rank after rank. */
typedef struct elements {
    size_t *count; /* [ranks] elements, */
    size_t *start; /* [ranks] which begin there, */
    size_t *first; /* [ranks + 1] and are these runs */
    ar_bucket_run *run;
} elements;

typedef struct dealt {
    ari_arena memory;
    ar_comm *over;
    size_t n, ranks, me;
    const ar_bucket_slices *slices;
    bool one_source;        /* of each element one rank has all terms */
    elements sums;          /* that each rank sums up; */
    elements leave, arrive; /* whose terms go to each other one, and come from each */
} dealt;

static void dealt_end(dealt *d)
{
    ari_arena_free(&d->memory);
}

static ar_status elements_begin(elements *e, dealt *d, size_t most_runs)
{
    AR_TRY(ARI_TAKE(&e->count, &d->memory, d->ranks, "elements of ranks"));
    AR_TRY(ARI_TAKE(&e->start, &d->memory, d->ranks, "elements of ranks"));
    AR_TRY(ARI_TAKE(&e->first, &d->memory, d->ranks + 1, "runs of a bucket"));
    return ARI_TAKE(&e->run, &d->memory, most_runs, "runs of a bucket");
}

static void elements_add(elements *e, size_t rank, size_t start, size_t count)
{
    e->run[e->first[rank + 1]++] = (ar_bucket_run){start, count};
    e->count[rank] += count;
}

/* The next rank's come behind those of this one. */
static void elements_end_rank(elements *e, size_t rank, size_t ranks)
{
    if (rank + 1 == ranks)
        return;
    e->start[rank + 1] = e->start[rank] + e->count[rank];
    e->first[rank + 2] = e->first[rank + 1];
}

/* Rank r's of those of its kind, whose ranks share them out evenly. */
static void deal_kind(dealt *d, size_t r)
{
    const ar_bucket_slices *of = d->slices;
    const int kind = of->kind[r];
    size_t total = 0, at = 0, start = 0, share = 0;
    int ranks = 0, own = 0;
    for (size_t i = 0; i < d->ranks; i++) {
        own = i == r ? ranks : own;
        ranks += of->kind[i] == kind;
    }
    for (size_t i = of->first[kind]; i < of->first[kind + 1]; i++)
        total += of->run[i].count;
    ari_comm_slice(total, ranks, own, &start, &share);
    for (size_t i = of->first[kind]; i < of->first[kind + 1]; at += of->run[i++].count) {
        size_t from = 0, count = 0;
        if (ari_overlap(&from, &count, at, of->run[i].count, start, share))
            elements_add(&d->sums, r, of->run[i].start + from - at, count);
    }
}

/* Those of `owner`'s elements that the sender has terms of. */
static void deal_terms(const dealt *d, elements *e, size_t to, size_t sender, size_t owner)
{
    const ar_bucket_run all = {0, d->n}, *has = &all;
    size_t pieces = 1, start = 0, count = 0;
    if (d->slices) {
        const size_t *first = d->slices->first + d->slices->kind[sender];
        has = d->slices->run + first[0];
        pieces = first[1] - first[0];
    }
    for (size_t i = d->sums.first[owner]; i < d->sums.first[owner + 1]; i++) {
        const ar_bucket_run *own = &d->sums.run[i];
        for (size_t k = 0; k < pieces; k++) {
            if (ari_overlap(&start, &count, own->start, own->count, has[k].start, has[k].count))
                elements_add(e, to, start, count);
        }
    }
}

/* counts as of bucket_reduce. */
static ar_status deal(dealt *d, ar_comm *over, size_t n, const size_t *counts, const ar_bucket_slices *slices)
{
    const size_t ranks = (size_t)ar_comm_size(over), in_slices = slices ? slices->first[slices->kinds] : 0;
    *d = (dealt){.over = over, .n = n, .ranks = ranks, .me = (size_t)ar_comm_rank(over), .slices = slices};
    d->one_source = slices && slices->kinds == ranks;
    AR_TRY(elements_begin(&d->sums, d, ranks + in_slices));
    for (size_t r = 0, start = 0; r < ranks; r++) {
        size_t at = start, share = counts ? counts[r] : 0;
        if (!counts)
            ari_comm_slice(n, (int)ranks, (int)r, &at, &share);
        if (slices && !counts)
            deal_kind(d, r);
        else
            elements_add(&d->sums, r, at, share);
        start += share;
        elements_end_rank(&d->sums, r, ranks);
    }
    AR_TRY(elements_begin(&d->leave, d, 2 * (ranks + in_slices)));
    AR_TRY(elements_begin(&d->arrive, d, ranks * (1 + in_slices + d->sums.first[d->me + 1] - d->sums.first[d->me])));
    for (size_t r = 0; r < ranks; r++) {
        if (r != d->me) {
            deal_terms(d, &d->leave, r, d->me, r);
            deal_terms(d, &d->arrive, r, r, d->me);
        }
        elements_end_rank(&d->leave, r, ranks);
        elements_end_rank(&d->arrive, r, ranks);
    }
    return AR_OK;
}

static size_t elements_in_all(const elements *e, size_t ranks)
{
    return e->start[ranks - 1] + e->count[ranks - 1];
}

/* The values of all elements, of which every rank has its runs. room: 6n bytes. */
static ar_status gather_values(ar_ctx *ctx, ar_queue *q, const runs *r, const dealt *d, ar_buf room, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const ar_buf kept = ar_buf_at(room, d->n * sizeof(float));
    size_t at = d->sums.start[d->me];
    for (size_t i = d->sums.first[d->me]; i < d->sums.first[d->me + 1]; at += d->sums.run[i++].count) {
        const ar_bucket_run *run = &d->sums.run[i];
        const ar_cbuf t = ar_cbuf_at(ar_const(r->t), run->start);
        const ar_cbuf h = ar_cbuf_at(ar_const(r->hl), run->start * sizeof(int64_t));
        const ar_tensor values = one_row(AR_F32, ar_buf_at(room, run->start * sizeof(float)), run->count);
        const ar_tensor rounded = one_row(AR_BF16, ar_buf_at(kept, at * sizeof(uint16_t)), run->count);
        AR_TRY(dev->acc_value(ctx->device, q, &values, t, h, d->n, true));
        AR_TRY(dev->copy_strided(ctx->device, q, &rounded, &values));
    }
    AR_TRY(ar_comm_all_gather(d->over, q, kept, ar_cbuf_at(ar_const(kept), d->sums.start[d->me] * sizeof(uint16_t)),
                              d->sums.count, AR_BF16, tag));
    at = 0;
    for (size_t i = 0; i < d->sums.first[d->ranks]; at += d->sums.run[i++].count) {
        const ar_bucket_run *run = &d->sums.run[i];
        const ar_tensor wide = one_row(AR_F32, ar_buf_at(room, run->start * sizeof(float)), run->count);
        const ar_tensor came = one_row(AR_BF16, ar_buf_at(kept, at * sizeof(uint16_t)), run->count);
        AR_TRY(dev->copy_strided(ctx->device, q, &wide, &came));
    }
    return dev->acc_put(ctx->device, q, r->t, r->hl, ar_const(room), d->n, true);
}

/* The states of all elements, of which every rank has one run, in `width` bytes each. room: n of them. */
static ar_status gather_states(ar_ctx *ctx, ar_queue *q, const runs *r, const dealt *d, ar_buf room, size_t width,
                               const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t start = d->sums.start[d->me];
    const ar_buf mine = ar_buf_at(room, start * width), l = ar_buf_at(r->hl, d->n * sizeof(int64_t));
    ARI_OWNED size_t *bytes = NULL;
    AR_TRY(ARI_ALLOC(&bytes, d->ranks, "bytes of sums"));
    for (size_t i = 0; i < d->ranks; i++)
        bytes[i] = d->sums.count[i] * width;
    AR_TRY(states_narrow(ctx, q, mine, r, d->n, start, d->sums.count[d->me], width));
    AR_TRY(ar_comm_all_gather(d->over, q, room, ar_const(mine), bytes, AR_U8, tag));
    AR_TRY(dev->zero(ctx->device, q, r->t, d->n));
    AR_TRY(dev->zero(ctx->device, q, r->hl, 2 * d->n * sizeof(int64_t)));
    return dev->states_merge(ctx->device, q, r->t, r->hl, l, ar_const(room), 1, d->n, width);
}

/* Each rank sends the others what it has of theirs, in states of so many bytes, and gets what they have of its own. sent,
 * came: room for all that leaves, and arrives. */
static ar_status exchange_states(ar_ctx *ctx, ar_queue *q, const runs *r, const dealt *d, ar_buf sent, ar_buf came,
                                 size_t width, const char *tag)
{
    ARI_OWNED size_t *bytes = NULL; /* what goes to each rank, then what comes from it */
    size_t at = 0;
    AR_TRY(ARI_ALLOC(&bytes, 2 * d->ranks, "bytes of sums"));
    for (size_t rank = 0; rank < d->ranks; rank++) {
        bytes[rank] = d->leave.count[rank] * width;
        bytes[d->ranks + rank] = d->arrive.count[rank] * width;
    }
    for (size_t i = 0; i < d->leave.first[d->ranks]; at += d->leave.run[i++].count)
        AR_TRY(states_narrow(ctx, q, ar_buf_at(sent, at * width), r, d->n, d->leave.run[i].start, d->leave.run[i].count,
                             width));
    return ar_comm_all_to_all(d->over, q, came, ar_const(sent), bytes, bytes + d->ranks, AR_U8, tag);
}

/* Own states are merged with what came of them, each run of a rank; without slices those of all ranks at once, which
 * follow each other. */
static ar_status merge_states(ar_ctx *ctx, ar_queue *q, const runs *r, const dealt *d, ar_cbuf came, size_t width)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t runs_that_came = d->arrive.first[d->ranks], at_once = d->slices ? 1 : runs_that_came;
    size_t at = 0;
    for (size_t i = 0; i < runs_that_came; i += at_once) {
        const ar_bucket_run *run = &d->arrive.run[i];
        const ar_buf h = ar_buf_at(r->hl, run->start * sizeof(int64_t));
        AR_TRY(dev->states_merge(ctx->device, q, ar_buf_at(r->t, run->start), h, ar_buf_at(h, d->n * sizeof(int64_t)),
                                 ar_cbuf_at(came, at * width), at_once, run->count, width));
        at += run->count;
    }
    return AR_OK;
}

/* Of narrow states. The own elements are merged with the other ranks' states, which come in the bytes that so many values
 * need, or as values where each has all terms and nothing is added; if all ranks need all (gathers) their values are
 * gathered, or their states where more is added to them. No memory of the step: another queue has it. */
static ar_status reduce_states(ar_ctx *ctx, ar_queue *q, const runs *r, const dealt *d, bool gathers,
                               const ar_most_terms *most, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const bool complete = d->one_source && most->after == 0;
    const size_t width = complete ? ARI_SENT_COMPLETE : ari_sent_state_bytes(most->before);
    const size_t wider = ari_sent_state_bytes(most->after);
    const size_t leave = elements_in_all(&d->leave, d->ranks) * width;
    const size_t there = leave + elements_in_all(&d->arrive, d->ranks) * width;
    const size_t back = d->n * (most->after > 0 ? wider : sizeof(float) + sizeof(uint16_t));
    ar_buf sent = {NULL};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, dev->alloc(ctx->device, q, &sent, ari_larger(there, back)));
    const ar_buf came = ar_buf_at(sent, leave);
    if (!d->one_source || !gathers) { /* else they are where they are summed up */
        AR_TRY_TO(done, st, exchange_states(ctx, q, r, d, sent, came, width, tag));
        AR_TRY_TO(done, st, merge_states(ctx, q, r, d, ar_const(came), width));
    }
    if (gathers)
        st = most->after > 0 ? gather_states(ctx, q, r, d, sent, wider, tag) : gather_values(ctx, q, r, d, sent, tag);
done:
    dev->free(ctx->device, q, sent);
    return st;
}

/* The one sum of gradients: of a bucket's runs, or of a gradient's own. counts and most as of bucket_reduce. */
static ar_status reduce_runs(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *counts,
                             const ar_most_terms *most, const char *tag)
{
    if (r->narrow && most) {
        ARI_ENDED(dealt_end) dealt d = {.n = 0};
        AR_TRY(deal(&d, over, n, counts, most->slices));
        return reduce_states(ctx, q, r, &d, !counts, most, tag);
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
    AR_TRY(ari_exact_grad_zeros(ctx, ctx->queue, p->grad));
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
    AR_TRY(ari_exact_grad_zeros(ctx, q, p->grad));
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
