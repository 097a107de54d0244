/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "mpi/mpi_impl.h"
#include "ref/core/size.h"
#include "ref/core/stream.h"

/* Data in memory that the host does not reach: copied down before the call and up after it, in host memory of the
 * call's own. */

static size_t sum_of(const size_t *counts, int n)
{
    return ari_counts_before(counts, n);
}

/* Elements that this rank's call reads and writes. Of the sums and the products the public boundary has made sure. */
static size_t elements_in(const ar_comm *c, const ari_call *call)
{
    switch (call->kind) {
    case ARI_ALL_REDUCE:
    case ARI_REDUCE:
    case ARI_SEND:
        return call->count;
    case ARI_REDUCE_SCATTER:
    case ARI_ALL_TO_ALL:
        return sum_of(call->counts, c->size);
    case ARI_ALL_GATHER:
    case ARI_GATHER:
        return call->counts[c->rank];
    case ARI_SCATTER:
        return call->root == c->rank ? sum_of(call->counts, c->size) : 0;
    case ARI_BROADCAST:
        return call->root == c->rank ? call->count : 0;
    default:
        return 0;
    }
}

static size_t elements_out(const ar_comm *c, const ari_call *call)
{
    switch (call->kind) {
    case ARI_ALL_REDUCE:
    case ARI_RECV:
        return call->count;
    case ARI_REDUCE:
        return call->root == c->rank ? call->count : 0;
    case ARI_REDUCE_SCATTER:
    case ARI_SCATTER:
        return call->counts[c->rank];
    case ARI_ALL_GATHER:
        return sum_of(call->counts, c->size);
    case ARI_GATHER:
        return call->root == c->rank ? sum_of(call->counts, c->size) : 0;
    case ARI_ALL_TO_ALL:
        return sum_of(call->recv_counts, c->size);
    case ARI_BROADCAST:
        return call->root == c->rank ? 0 : call->count;
    default:
        return 0;
    }
}

static ar_status copy(const ari_call *call, ar_buf to, ar_cbuf from, size_t bytes)
{
    ar_device *d = ari_queue_stream(call->on)->device;
    return bytes > 0 ? d->ops->copy(d, call->on, to, from, bytes) : AR_OK;
}

static size_t round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static ar_status stage_exchange(ari_mpi_stage *s, const ari_call *call)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    size_t bytes = 0;
    for (size_t i = 0; i < call->count; i++)
        AR_TRY(ari_add_size(&bytes, bytes, round_up(call->p2p[i].count * element)));
    AR_TRY(ari_alloc((void **)&s->p2p, call->count, sizeof *s->p2p, "the operations of an exchange"));
    AR_TRY(ari_alloc(&s->memory, bytes, 1, "what ranks exchange, on the host"));
    char *at = s->memory;
    for (size_t i = 0; i < call->count; i++) {
        const ar_p2p *op = &call->p2p[i];
        s->p2p[i] = *op;
        s->p2p[i].buf.ptr = at;
        at += round_up(op->count * element);
        if (op->send)
            AR_TRY(copy(call, s->p2p[i].buf, ar_const(op->buf), op->count * element));
    }
    s->call.p2p = s->p2p;
    return AR_OK;
}

ar_status ari_mpi_stage_down(ari_mpi_stage *s, const ar_comm *c, const ari_call *call)
{
    *s = (ari_mpi_stage){.call = *call};
    if (call->kind == ARI_EXCHANGE) {
        AR_TRY(stage_exchange(s, call));
    } else {
        const size_t element = ar_dtype_bytes(call->dtype);
        const size_t in = elements_in(c, call) * element, out = elements_out(c, call) * element;
        size_t bytes = 0;
        AR_TRY(ari_add_size(&bytes, round_up(in), out));
        AR_TRY(ari_alloc(&s->memory, bytes, 1, "what ranks move, on the host"));
        s->call.in.ptr = s->memory;
        s->call.out.ptr = call->kind == ARI_BROADCAST ? s->memory : (char *)s->memory + round_up(in);
        AR_TRY(copy(call, (ar_buf){s->memory}, call->in, in));
    }
    return ari_stream_sync(ari_queue_stream(call->on), 0);
}

ar_status ari_mpi_stage_up(const ari_mpi_stage *s, const ar_comm *c, const ari_call *call)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    for (size_t i = 0; call->kind == ARI_EXCHANGE && i < call->count; i++) {
        if (!call->p2p[i].send)
            AR_TRY(copy(call, call->p2p[i].buf, ar_const(s->p2p[i].buf), call->p2p[i].count * element));
    }
    return copy(call, call->out, ar_const(s->call.out), elements_out(c, call) * element);
}

void ari_mpi_stage_end(ari_mpi_stage *s)
{
    free(s->p2p);
    free(s->memory);
}
