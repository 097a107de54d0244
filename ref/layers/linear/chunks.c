/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/linear/chunks.h"
#include "anyrank/queue.h"

#include <stdlib.h>

#include "ref/layers/faults.h"
#include "ref/placement/axis.h"

/* --- chunks ------------------------------------------------------------------------------------------------------- */

ari_chunks ari_chunks_of(const ar_ctx *ctx, const ar_tensor *x, bool is_local)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->tp), requested = (size_t)ctx->overlap;
    const size_t positions = x->ndim > 1 ? x->shape[x->ndim - 2] / (is_local ? 1 : ranks) : 0;
    ari_chunks c = {.n = 1,
                    .ranks = ranks,
                    .samples = ari_volume(x->shape, x->ndim - 2),
                    .local_seq = positions,
                    .chunk_seq = positions};
    if (!ari_ctx_sp(ctx) || requested == 1 || positions == 0)
        return c;
    c.chunk_seq = (positions + requested - 1) / requested;
    c.n = (positions + c.chunk_seq - 1) / c.chunk_seq;
    return c;
}

static size_t positions_in(const ari_chunks *c, size_t i)
{
    const size_t start = i * c->chunk_seq;
    return c->local_seq - start < c->chunk_seq ? c->local_seq - start : c->chunk_seq;
}

size_t ari_chunk_rows(const ari_chunks *c, size_t i)
{
    return c->ranks * c->samples * positions_in(c, i);
}

ar_tensor ari_chunk_view(const ari_chunks *c, const ar_tensor *t, size_t i, bool is_local)
{
    const size_t f = t->shape[t->ndim - 1], seq = is_local ? c->local_seq : c->ranks * c->local_seq;
    return (ar_tensor){.dtype = t->dtype,
                       .ndim = 4,
                       .shape = {is_local ? 1 : c->ranks, c->samples, positions_in(c, i), f},
                       .stride = {(ptrdiff_t)(c->local_seq * f), (ptrdiff_t)(seq * f), (ptrdiff_t)f, 1},
                       .data = ar_buf_at(t->data, i * c->chunk_seq * f * ar_dtype_bytes(t->dtype))};
}

ar_status ari_chunk_put(ar_ctx *ctx, const ari_chunks *c, const ar_tensor *t, size_t i, bool is_local,
                        const ar_tensor *rows)
{
    const ar_tensor dst = ari_chunk_view(c, t, i, is_local);
    ar_tensor src;
    AR_TRY(ar_tensor_view(&src, rows->dtype, 4, dst.shape, rows->data));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
    return is_local ? AR_OK : ari_fault_chunk_put(ctx, &dst, &src);
}

/* --- all-gathers in chunks ---------------------------------------------------------------------------------------- */

struct ari_gathering {
    ari_chunks c;
    ar_tensor x; /* the caller's */
    const ari_communication *overlapped;
    const char *tag;
    ar_buf rows[2];             /* rows of chunks 0, 2, .. and of chunks 1, 3, .. */
    ar_event *arrival_event[2]; /* events recorded when the chunks have arrived */
    size_t *counts;             /* [ranks] */
};

static void destroy_gathering(ar_ctx *ctx, void *object)
{
    ari_gathering *g = object;
    for (int i = 0; i < 2; i++) {
        ari_step_free(ctx, g->rows[i]);
        ar_event_destroy(g->arrival_event[i]);
    }
    free(g->counts);
    free(g);
}

/* The rank's own part is written to its position among all parts. */
static ar_status enqueue_chunk(ar_ctx *ctx, ari_gathering *g, size_t i)
{
    const size_t f = g->x.shape[g->x.ndim - 1], part = g->c.samples * positions_in(&g->c, i) * f;
    const size_t place = (size_t)ar_comm_rank(ctx->tp) * part * ar_dtype_bytes(g->x.dtype);
    const ar_tensor src = ari_chunk_view(&g->c, &g->x, i, true);
    ar_tensor local;
    AR_TRY(ar_tensor_view(&local, g->x.dtype, 4, src.shape, ar_buf_at(g->rows[i % 2], place)));
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &local, &src));
    for (size_t r = 0; r < g->c.ranks; r++)
        g->counts[r] = part;
    ar_queue *q = g->overlapped->queue;
    AR_TRY(ari_queue_follow(q, ctx->queue, g->arrival_event[i % 2]));
    AR_TRY(ar_comm_all_gather(g->overlapped->tp, q, g->rows[i % 2], ar_const(local.data), g->counts,
                              ari_moved_as(g->x.dtype), g->tag));
    return ar_event_record(g->arrival_event[i % 2], q);
}

ar_status ari_gather_begin(ar_ctx *ctx, ari_gathering **out, const ar_tensor *x, const ari_chunks *c, const char *tag)
{
    ari_gathering *g = NULL;
    const size_t row = x->shape[x->ndim - 1] * ar_dtype_bytes(x->dtype);
    AR_TRY(ARI_ALLOC_ZERO(&g, 1, "an all-gather in chunks"));
    AR_TRY(ari_step_own(ctx, g, destroy_gathering));
    *g = (ari_gathering){.c = *c, .x = *x, .tag = tag};
    AR_TRY(ARI_ALLOC(&g->counts, c->ranks, "sizes of the ranks' parts"));
    AR_TRY(ari_ctx_overlapped(ctx, &g->overlapped));
    for (size_t i = 0; i < 2 && i < c->n; i++) {
        AR_TRY(ar_event_create(&g->arrival_event[i]));
        AR_TRY(ari_step_alloc(ctx, &g->rows[i], ari_chunk_rows(c, i) * row));
    }
    *out = g;
    return enqueue_chunk(ctx, g, 0);
}

ar_status ari_gather_chunk(ar_ctx *ctx, ari_gathering *g, size_t i, ar_tensor *rows)
{
    const size_t shape[2] = {ari_chunk_rows(&g->c, i), g->x.shape[g->x.ndim - 1]};
    AR_TRY(ar_tensor_view(rows, g->x.dtype, 2, shape, g->rows[i % 2]));
    AR_TRY(ar_queue_wait(ctx->queue, g->arrival_event[i % 2]));
    return i + 1 < g->c.n ? enqueue_chunk(ctx, g, i + 1) : AR_OK;
}

void ari_gather_end(ar_ctx *ctx, ari_gathering *g)
{
    ari_step_disown(ctx, g);
}

ar_status ari_gather_full(ar_ctx *ctx, ari_gathering *g, ar_tensor *gathered)
{
    ar_tensor rows;
    AR_TRY(ari_gather_chunk(ctx, g, 0, &rows));
    if (g->c.samples == 1) { /* rows are already in that order */
        *gathered = g->x;
        gathered->shape[gathered->ndim - 2] *= g->c.ranks;
        gathered->data = rows.data;
        g->rows[0].ptr = NULL;
    } else {
        AR_TRY(ari_like_tokens(ctx, gathered, &g->x, g->c.ranks * g->c.local_seq, g->x.shape[g->x.ndim - 1]));
        AR_TRY(ari_chunk_put(ctx, &g->c, gathered, 0, false, &rows));
    }
    ari_gather_end(ctx, g);
    return AR_OK;
}
