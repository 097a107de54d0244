/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/reduce.h"
#include "sim/sim_impl.h"
#include "sim/stream.h"

/* `direct`: every rank reads the other ranks' buffers itself. Slice c is still added in the ring's order, ranks c+1,
 * c+2, ..., c modulo N, so the bits are the ring's.
 *
 *   all_reduce, N = 3:   in[0]  a0 b0 c0     rank 0 adds a, rank 1 adds b, rank 2 adds c, each reading three inputs
 *                        in[1]  a1 b1 c1     and writing its sum to three outputs: every input is read once and every
 *                        in[2]  a2 b2 c2     output written once, which is the least there is. */

/* Sums are made in pieces that stay in the first-level cache while N inputs pass. */
enum { PIECE_BYTES = 8192 };
/* Outputs that are larger than this together are written past the cache: they would not stay in it, and a plain store
 * first reads the line that it overwrites. The last-level caches of common machines hold 16 MiB or more. */
enum { STREAM_BYTES = 1 << 24 };

static const char *input(const ari_group *g, int i)
{
    return ari_group_call(g, i)->in.ptr;
}

static char *output(const ari_group *g, int i)
{
    return ari_group_call(g, i)->out.ptr;
}

/* The count of what rank r moves between its own memory and that of other ranks. */
static ari_moved *moved_of(const ari_group *g, int r)
{
    return &ari_group_comm(g, r)->moved;
}

/* out = inputs[at ..] added in the order r+1, r+2, ..., r. r's own input comes last, so out may be in its place. Three
 * inputs at a time join the sum, so that it passes through the cache less often. */
static void add_piece(const ari_group *g, int r, char *out, size_t at, size_t count, size_t element,
                      const ari_reduce *add)
{
    const int n = ari_group_size(g);
    ari_moved *moved = moved_of(g, r);
    _Alignas(64) char partial[PIECE_BYTES];
    const char *sum = input(g, (r + 1) % n) + at;
    if (n == 1)
        ari_copy_bytes(out, sum, count * element);
    else
        ari_moved_read(moved, count * element);
    for (int k = 2; k <= n;) {
        const int joining = k + 2 <= n ? 3 : 1;
        char *to = k + joining > n ? out : partial;
        const char *next = input(g, (r + k) % n) + at;
        if (joining == 3)
            add->four(to, sum, next, input(g, (r + k + 1) % n) + at, input(g, (r + k + 2) % n) + at, count);
        else
            add->two(to, sum, next, count);
        k += joining;
        ari_moved_read(moved, (size_t)(k > n ? joining - 1 : joining) * count * element); /* the last one is its own */
        sum = partial;
    }
}

static void all_reduce_part(const ari_group *g, int r, const ari_call *call)
{
    const int n = ari_group_size(g);
    const size_t element = ar_dtype_bytes(call->dtype), piece = PIECE_BYTES / element;
    const ari_reduce add = ari_reduce_kernel(call->dtype, call->op);
    const bool past_cache = call->count * element >= STREAM_BYTES / (size_t)n;
    void (*const copy)(void *, const void *, size_t) = past_cache ? ari_stream_bytes : ari_copy_bytes;
    _Alignas(64) char sum[PIECE_BYTES];
    size_t start, size;
    ar_comm_slice(call->count, n, r, &start, &size);
    for (size_t done = 0; done < size; done += piece) {
        const size_t count = size - done < piece ? size - done : piece;
        const size_t at = (start + done) * element, bytes = count * element;
        char *own = past_cache ? sum : output(g, r) + at;
        add_piece(g, r, own, at, count, element, &add);
        if (past_cache)
            copy(output(g, r) + at, own, bytes);
        for (int k = 1; k < n; k++) {
            copy(output(g, (r + k) % n) + at, own, bytes);
            ari_moved_written(moved_of(g, r), bytes);
        }
    }
    if (past_cache)
        ari_stream_end();
}

static void reduce_scatter_part(const ari_group *g, int r, const ari_call *call)
{
    const size_t element = ar_dtype_bytes(call->dtype), piece = PIECE_BYTES / element;
    const ari_reduce add = ari_reduce_kernel(call->dtype, call->op);
    const size_t start = ari_counts_before(call->counts, r), size = call->counts[r];
    for (size_t done = 0; done < size; done += piece) {
        const size_t count = size - done < piece ? size - done : piece;
        add_piece(g, r, output(g, r) + done * element, (start + done) * element, count, element, &add);
    }
}

/* r reads `bytes` of rank `from`. */
static void take(const ari_group *g, int r, char *to, int from, const char *at, size_t bytes)
{
    ari_copy_bytes(to, at, bytes);
    if (from != r)
        ari_moved_read(moved_of(g, r), bytes);
}

static void all_gather_part(const ari_group *g, int r, const ari_call *call)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    char *to = output(g, r);
    for (int i = 0; i < ari_group_size(g); i++) {
        const size_t bytes = call->counts[i] * element;
        if (bytes == 0)
            continue; /* the pointers may be NULL */
        take(g, r, to, i, input(g, i), bytes);
        to += bytes;
    }
}

static void all_to_all_part(const ari_group *g, int r, const ari_call *call)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    char *to = output(g, r);
    for (int i = 0; i < ari_group_size(g); i++) {
        const ari_call *from = ari_group_call(g, i);
        const size_t bytes = call->recv_counts[i] * element;
        if (bytes == 0)
            continue;
        take(g, r, to, i, input(g, i) + ari_counts_before(from->counts, r) * element, bytes);
        to += bytes;
    }
}

static void broadcast_part(const ari_group *g, int r, const ari_call *call)
{
    if (r != call->root && call->count > 0)
        take(g, r, output(g, r), call->root, input(g, call->root), call->count * ar_dtype_bytes(call->dtype));
}

/* The k-th receive from a rank meets that rank's k-th send to r. */
static void exchange_part(const ari_group *g, int r, const ari_call *call)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    for (int i = 0; i < ari_group_size(g); i++) {
        const ari_call *from = ari_group_call(g, i);
        size_t s = 0;
        for (size_t k = 0; k < call->count; k++) {
            const ar_p2p *receive = &call->p2p[k];
            if (receive->send || receive->peer != i)
                continue;
            while (!from->p2p[s].send || from->p2p[s].peer != r)
                s++;
            take(g, r, receive->buf.ptr, i, from->p2p[s++].buf.ptr, receive->count * element);
        }
    }
}

void ari_direct_part(ari_group *g, int r)
{
    const ari_call *call = ari_group_call(g, r);
    switch (call->kind) {
    case ARI_ALL_REDUCE:
        all_reduce_part(g, r, call);
        break;
    case ARI_REDUCE_SCATTER:
        reduce_scatter_part(g, r, call);
        break;
    case ARI_ALL_GATHER:
        all_gather_part(g, r, call);
        break;
    case ARI_ALL_TO_ALL:
        all_to_all_part(g, r, call);
        break;
    case ARI_BROADCAST:
        broadcast_part(g, r, call);
        break;
    case ARI_EXCHANGE:
        exchange_part(g, r, call);
        break;
    case ARI_REDUCE:
    case ARI_GATHER:
    case ARI_SCATTER:
    case ARI_SEND:
    case ARI_RECV:
    case ARI_BARRIER:
    case ARI_SPLIT:
    case ARI_KIND_COUNT:
        break;
    }
}
