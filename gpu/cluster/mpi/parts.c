/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/mpi/mpi_impl.h"
#include "ref/comm/comm_private.h"
#include "ref/core/reduce.h"

/* Collectives whose buffer is split into one part per rank: by the call's counts, otherwise into equal slices. In each
 * exchange every rank has a message for every other rank, so all links are busy at the same time.
 *
 *   reduce_scatter  each rank gets its part of every input, and combines the parts in the order r+1, ..., r
 *   all_reduce      reduce_scatter, then an all_gather of the parts
 *   broadcast       each rank gets its own part and the root's from the root, then the other parts from their owners */

enum { PIECE_BYTES = 1 << 18 }; /* piece of a combined part: received data waits in scratch memory */

/* Returns the number of elements in a rank's part; *start: number of elements before it. */
static size_t part_of(const ari_mpi_comm *c, const ari_call *call, int rank, size_t *start)
{
    size_t size = 0;
    if (call->counts) {
        *start = ari_counts_before(call->counts, rank);
        return call->counts[rank];
    }
    ari_comm_slice(call->count, c->base.size, rank, start, &size);
    return size;
}

/* Adds a message of up to `max_count` elements of a rank's part, from element `offset` on. */
static void add_message(ari_mpi_comm *c, const ari_call *call, int peer, bool send, char *full_buffer, int part,
                        size_t offset, size_t max_count)
{
    size_t start = 0;
    const size_t size = part_of(c, call, part, &start), rest = size > offset ? size - offset : 0;
    if (peer != c->base.rank)
        c->op[c->ops++] = (ar_p2p){.peer = peer,
                                   .send = send,
                                   .buf = {full_buffer + (start + offset) * ar_dtype_bytes(call->dtype)},
                                   .count = rest < max_count ? rest : max_count};
}

static ar_status exchange(ari_mpi_comm *c, const ari_call *call)
{
    const ari_call exchange_call = {.kind = ARI_EXCHANGE, .dtype = call->dtype, .count = c->ops, .p2p = c->op};
    c->ops = 0;
    return ari_mpi_direct(&c->rendezvous, &exchange_call, &c->base.moved);
}

static size_t piece_count(const ari_call *call)
{
    return PIECE_BYTES / ar_dtype_bytes(call->dtype);
}

size_t ari_mpi_parts_scratch(const ari_mpi_comm *c, const ari_call *call)
{
    return ari_kind_of(call->kind)->combines ? (size_t)c->base.size * PIECE_BYTES : 0;
}

/* Combines the received copies of this rank's part with its own input, and writes the result to out. */
static void combine(ari_mpi_comm *c, const ari_call *call, const char *local_input, char *out, size_t count)
{
    const int n = c->base.size, r = c->base.rank;
    const ari_reduce kernel = ari_reduce_kernel(call->dtype, call->op);
    char *scratch = c->scratch, *sum = scratch + (size_t)((r + 1) % n) * PIECE_BYTES;
    for (int k = 2; k < n; k++)
        kernel.pair(sum, sum, scratch + (size_t)((r + k) % n) * PIECE_BYTES, count);
    kernel.pair(out, sum, local_input, count);
}

/* Reduces piece by piece over all parts. out: destination of this rank's part. */
static ar_status reduce_parts(ari_mpi_comm *c, const ari_call *call, char *out)
{
    const size_t piece = piece_count(call), element = ar_dtype_bytes(call->dtype);
    char *input = (char *)(uintptr_t)call->input.ptr;
    size_t own_start = 0, start = 0, largest = 0;
    const size_t local_count = part_of(c, call, c->base.rank, &own_start);
    for (int p = 0; p < c->base.size; p++) {
        const size_t size = part_of(c, call, p, &start);
        largest = size > largest ? size : largest;
    }
    for (size_t offset = 0; offset < largest; offset += piece) {
        const size_t count = local_count <= offset ? 0 : local_count - offset < piece ? local_count - offset : piece;
        for (int p = 0; p < c->base.size; p++) {
            add_message(c, call, p, true, input, p, offset, piece);
            if (p != c->base.rank)
                c->op[c->ops++] =
                    (ar_p2p){.peer = p, .buf = {(char *)c->scratch + (size_t)p * PIECE_BYTES}, .count = count};
        }
        AR_TRY(exchange(c, call));
        if (count > 0)
            combine(c, call, input + (own_start + offset) * element, out + offset * element, count);
    }
    return AR_OK;
}

static ar_status all_reduce(ari_mpi_comm *c, const ari_call *call)
{
    const int r = c->base.rank;
    size_t start = 0;
    (void)part_of(c, call, r, &start);
    AR_TRY(reduce_parts(c, call, (char *)call->out.ptr + start * ar_dtype_bytes(call->dtype)));
    for (int p = 0; p < c->base.size; p++) {
        add_message(c, call, p, true, call->out.ptr, r, 0, SIZE_MAX);
        add_message(c, call, p, false, call->out.ptr, p, 0, SIZE_MAX);
    }
    return exchange(c, call);
}

static ar_status broadcast(ari_mpi_comm *c, const ari_call *call)
{
    const int r = c->base.rank, root = call->root;
    char *full_buffer = call->out.ptr;
    for (int p = 0; p < c->base.size; p++) {
        if (r != root && p != root)
            continue;
        add_message(c, call, p, r == root, full_buffer, r == root ? p : r, 0, SIZE_MAX);
        add_message(c, call, p, r == root, full_buffer, root, 0, SIZE_MAX);
    }
    AR_TRY(exchange(c, call));
    for (int p = 0; p < c->base.size && r != root; p++) {
        if (p == root)
            continue;
        add_message(c, call, p, true, full_buffer, r, 0, SIZE_MAX);
        add_message(c, call, p, false, full_buffer, p, 0, SIZE_MAX);
    }
    return exchange(c, call);
}

ar_status ari_mpi_parts(ari_mpi_comm *c, const ari_call *call)
{
    if (c->base.size == 1)
        return ari_mpi_direct(&c->rendezvous, call, NULL);
    switch (call->kind) {
    case ARI_ALL_REDUCE:
        return all_reduce(c, call);
    case ARI_REDUCE_SCATTER:
        return reduce_parts(c, call, call->out.ptr);
    default:
        return broadcast(c, call);
    }
}
