/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/attention/context_parallel.h"
#include "anyrank/comm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/layers/faults.h"
#include "ref/placement/parallel_private.h"

/* --- heads against positions -------------------------------------------------------------------------------------- */

ari_head_share ari_head_share_of(size_t heads, size_t n, size_t i)
{
    const size_t copies = heads < n ? n / heads : 1, count = heads < n ? 1 : heads / n;
    return (ari_head_share){.first_head = i / copies * count, .count = count, .copies = copies};
}

ar_status ari_head_shares_check(const char *name, const ar_ctx *ctx, size_t heads, size_t kv_heads)
{
    const size_t inner = (size_t)ar_comm_size(ctx->inner);
    if (heads % inner != 0 || (kv_heads % inner != 0 && inner % kv_heads != 0))
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s: %zu query heads and %zu KV heads of a tensor-parallel rank cannot be shared by %zu "
                            "inner neighbours of cp; use an inner cp that divides both, or is a multiple of %zu that "
                            "divides %zu",
                            name, heads, kv_heads, inner, kv_heads, heads);
    return AR_OK;
}

/* All-to-all of some tensors between n neighbours. On one side a neighbour has its local positions and all heads of its
 * tensor-parallel rank, on the other (by heads) all positions and its share of the heads. */
typedef struct exchange {
    size_t n, rank;      /* number of neighbours, and this rank's index among them */
    const size_t *heads; /* number of heads on a tensor-parallel rank, for each tensor */
    int tensors;
    bool together;           /* true for an exchange from local heads to all: the c-th copy of a head sends it to the
                                c-th copies of the others */
    size_t *sent, *received; /* elements sent to and received from each neighbour; owned */
    ar_buf input, out;       /* packed by neighbour and then by tensor; memory of the step */
} exchange;

static ar_status exchange_init(exchange *e, ar_ctx *ctx, const size_t *heads, int tensors, bool together)
{
    *e = (exchange){.n = (size_t)ar_comm_size(ctx->inner),
                    .rank = (size_t)ar_comm_rank(ctx->inner),
                    .heads = heads,
                    .tensors = tensors,
                    .together = together};
    AR_TRY(ARI_ALLOC_ZERO(&e->sent, e->n, "sizes of the neighbours' parts"));
    return ARI_ALLOC_ZERO(&e->received, e->n, "sizes of the neighbours' parts");
}

static void exchange_fini(exchange *e, ar_ctx *ctx)
{
    ari_step_free(ctx, e->out);
    ari_step_free(ctx, e->input);
    free(e->received);
    free(e->sent);
}

/* Returns the part of tensor t that moves between this neighbour and neighbour i, as a view of x; by_heads: x has this
 * neighbour's share of the heads. It has no heads if another replica sends them. */
static ar_tensor part_with(const exchange *e, const ar_tensor *x, int t, size_t i, bool sends)
{
    const bool by_heads = sends == e->together;
    const size_t rows = x->shape[2] / (by_heads ? e->n : 1);
    ari_head_share share = ari_head_share_of(e->heads[t], e->n, by_heads ? e->rank : i);
    if (e->together && e->rank % share.copies != i % share.copies)
        share.count = 0;
    const ar_tensor heads = ar_tensor_slice(x, 1, by_heads ? 0 : share.first_head, share.count);
    return ar_tensor_slice(&heads, 2, by_heads ? i * rows : 0, rows);
}

/* Counts what goes to each neighbour, or comes from it, and allocates memory for all of it. */
static ar_status count_parts(const exchange *e, ar_ctx *ctx, const ar_tensor *x, bool sends, size_t *counts,
                             ar_buf *packed)
{
    size_t total = 0;
    for (size_t i = 0; i < e->n; i++) {
        for (int t = 0; t < e->tensors; t++) {
            const ar_tensor part = part_with(e, &x[t], t, i, sends);
            counts[i] += ar_tensor_count(&part);
        }
        total += counts[i];
    }
    return ari_step_alloc(ctx, packed, total * ar_dtype_bytes(x[0].dtype));
}

static ar_status copy_parts(const exchange *e, ar_ctx *ctx, const ar_tensor *x, bool sends, ar_buf packed)
{
    const ar_dtype dtype = x[0].dtype;
    size_t offset = 0;
    for (size_t i = 0; i < e->n; i++) {
        for (int t = 0; t < e->tensors; t++) {
            const ar_tensor part = part_with(e, &x[t], t, i, sends);
            ar_tensor place;
            if (ar_tensor_count(&part) == 0)
                continue;
            AR_TRY(ar_tensor_view(&place, dtype, 4, part.shape, ar_buf_at(packed, offset * ar_dtype_bytes(dtype))));
            AR_TRY(ARI_KERNEL(ctx, copy_strided, sends ? &place : &part, sends ? &part : &place));
            offset += ar_tensor_count(&part);
        }
    }
    return AR_OK;
}

/* Replaces x's shape by that after the exchange. */
static ar_status replace(const exchange *e, ar_ctx *ctx, ar_tensor *x, int t)
{
    const size_t local_heads = ari_head_share_of(e->heads[t], e->n, e->rank).count;
    const size_t shape[4] = {x->shape[0], e->together ? e->heads[t] : local_heads,
                             e->together ? x->shape[2] / e->n : x->shape[2] * e->n, x->shape[3]};
    const ar_dtype dtype = x->dtype;
    ar_ctx_release(ctx, x);
    return ar_ctx_tensor(ctx, x, dtype, 4, shape);
}

static ar_status exchange_value(exchange *e, ar_ctx *ctx, ar_tensor *x, const char *tag)
{
    AR_TRY(count_parts(e, ctx, x, true, e->sent, &e->input));
    AR_TRY(copy_parts(e, ctx, x, true, e->input));
    for (int t = 0; t < e->tensors; t++)
        AR_TRY(replace(e, ctx, &x[t], t));
    AR_TRY(count_parts(e, ctx, x, false, e->received, &e->out));
    AR_TRY(
        ar_comm_all_to_all(ctx->inner, ctx->queue, e->out, ar_const(e->input), e->sent, e->received, x[0].dtype, tag));
    return copy_parts(e, ctx, x, false, e->out);
}

static ar_status exchange_heads(ar_ctx *ctx, ar_tensor *x, const size_t *heads, int n, bool together, const char *tag)
{
    exchange e;
    ar_tensor before[3] = {{0}};
    if (ar_comm_size(ctx->inner) == 1)
        return AR_OK;
    memcpy(before, x, (size_t)n * sizeof *x);
    ar_status st = exchange_init(&e, ctx, heads, n, together);
    if (st == AR_OK)
        st = exchange_value(&e, ctx, x, tag);
    exchange_fini(&e, ctx);
    AR_TRY(st);
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_HEADS, .name = tag,
                    .input = {&before[0], n > 1 ? &before[1] : NULL, n > 2 ? &before[2] : NULL},
                    .out = {&x[0], n > 1 ? &x[1] : NULL, n > 2 ? &x[2] : NULL});
}

ar_status ari_heads_scatter(ar_ctx *ctx, ar_tensor *x, const size_t *heads, int n, const char *tag)
{
    return exchange_heads(ctx, x, heads, n, false, tag);
}

ar_status ari_heads_together(ar_ctx *ctx, ar_tensor *x, const size_t *heads, int n, const char *tag)
{
    return exchange_heads(ctx, x, heads, n, true, tag);
}

/* --- the ring ----------------------------------------------------------------------------------------------------- */

ar_positions ari_ring_positions(const ar_ctx *ctx, size_t seq, int place)
{
    return ari_positions_ring((size_t)ar_comm_size(ctx->ring), ctx->layout.zigzag, seq, (size_t)place);
}

/* Returns the ring position whose keys and values arrive in hop 1, 2, .. R - 1. */
static int arriving(const ar_ctx *ctx, int hop)
{
    const int n = ar_comm_size(ctx->ring);
    return (ar_comm_rank(ctx->ring) + n - hop) % n;
}

ar_status ari_ring_transfers_init(ari_ring_transfers *h, const ar_ctx *ctx, const char *base)
{
    const int n = ar_comm_size(ctx->ring);
    *h = (ari_ring_transfers){.tag = NULL};
    if (n == 1)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&h->tag, (size_t)n - 1, "names of a ring's hops"));
    for (int hop = 1; hop < n; hop++) {
        const int chunk = arriving(ctx, hop);
        char *tag = h->tag[hop - 1];
        if (ctx->layout.zigzag)
            snprintf(tag, sizeof *h->tag, "%s: hop %d of %d, chunks %d and %d", base, hop, n - 1, chunk,
                     2 * n - 1 - chunk);
        else
            snprintf(tag, sizeof *h->tag, "%s: hop %d of %d, chunk %d", base, hop, n - 1, chunk);
    }
    return AR_OK;
}

void ari_ring_transfers_fini(ari_ring_transfers *h)
{
    free(h->tag);
    h->tag = NULL;
}

ar_status ari_ring_place(ar_ctx *ctx, const ar_tensor *gathered, const ar_tensor *chunk, int place)
{
    const size_t seq = gathered->shape[2];
    const ar_positions p = ari_fault_chunk(ctx, seq, place, ari_ring_positions(ctx, seq, place));
    for (size_t run = 0, run_begin = 0; run < 2; run_begin += p.count[run++]) {
        const ar_tensor dst = ar_tensor_slice(gathered, 2, p.first[run], p.count[run]);
        const ar_tensor src = ar_tensor_slice(chunk, 2, run_begin, p.count[run]);
        if (p.count[run] > 0)
            AR_TRY(ARI_KERNEL(ctx, copy_strided, &dst, &src));
    }
    return AR_OK;
}

/* Sends the keys and values of `src` to the next ring rank and receives those of the previous one. */
static ar_status hop_on(ar_ctx *ctx, ar_tensor dst[2], const ar_tensor src[2], const char *tag)
{
    const int n = ar_comm_size(ctx->ring), r = ar_comm_rank(ctx->ring);
    ar_p2p ops[4];
    for (int i = 0; i < 2; i++) {
        const size_t count = ar_tensor_count(&src[i]);
        ops[2 * i] = (ar_p2p){.peer = (r + 1) % n, .send = true, .buf = src[i].data, .count = count};
        ops[2 * i + 1] = (ar_p2p){.peer = (r + n - 1) % n, .buf = dst[i].data, .count = count};
    }
    return ar_comm_exchange(ctx->ring, ctx->queue, ops, 4, src[0].dtype, tag);
}

ar_status ari_ring_gather(ar_ctx *ctx, ar_tensor gathered[2], const ar_tensor local[2], size_t seq,
                          const ari_ring_transfers *h)
{
    const int n = ar_comm_size(ctx->ring);
    ar_tensor chunk[2][2] = {{{0}}},
              outgoing[2] = {local[0], local[1]}; /* chunk: one pair arrives while the other one leaves */
    gathered[0] = local[0];
    gathered[1] = local[1];
    if (n == 1)
        return AR_OK;
    for (int i = 0; i < 2; i++) {
        const size_t shape[4] = {local[i].shape[0], local[i].shape[1], seq, local[i].shape[3]};
        AR_TRY(ar_ctx_tensor(ctx, &gathered[i], local[i].dtype, 4, shape));
        AR_TRY(ari_ring_place(ctx, &gathered[i], &local[i], ar_comm_rank(ctx->ring)));
        for (int side = 0; side < 2 && side < n - 1; side++)
            AR_TRY(ar_ctx_tensor(ctx, &chunk[side][i], local[i].dtype, 4, local[i].shape));
    }
    for (int hop = 1; hop < n; hop++) {
        ar_tensor *const incoming = chunk[hop % 2 == 1 ? 0 : 1];
        AR_TRY(hop_on(ctx, incoming, outgoing, h->tag[hop - 1]));
        for (int i = 0; i < 2; i++) {
            AR_TRY(ari_ring_place(ctx, &gathered[i], &incoming[i], arriving(ctx, hop)));
            outgoing[i] = incoming[i];
        }
    }
    for (int i = 0; i < 4; i++)
        ar_ctx_release(ctx, &chunk[i / 2][i % 2]);
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_RING, .input = {&local[0], &local[1]}, .out = {&gathered[0], &gathered[1]});
}

void ari_ring_release(ar_ctx *ctx, ar_tensor gathered[2], const ar_tensor local[2])
{
    for (int i = 0; i < 2; i++)
        ari_release_placed(ctx, &gathered[i], &local[i]);
}
