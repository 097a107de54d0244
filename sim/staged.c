/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "anyrank/device.h"
#include "ref/core/size.h"
#include "ref/core/stream.h"
#include "sim/wire.h"

/* A device's data moved through the host's memory: where a transport may be at fault, transfers are verified or
 * somebody listens to the steps of a ring, the host has to see the bytes. Each rank brings what the call reads and
 * writes to the host, moves there as ranks without a device do, and brings back what it was given. So the same fault
 * strikes the same transfer, and is reported in the same words, wherever the data lie. */

typedef struct staged {
    ar_device *device;
    ari_stream *stream;
    ari_call call;  /* with buffers of the host: these */
    void *in, *out; /* NULL where there is nothing in them */
    ar_p2p *p2p;    /* [call.count], of an exchange; else NULL */
} staged;

bool ari_is_staged(const ari_sim_comm *c)
{
    return !ari_wire_is_plain(c) || (c->options->algorithm == AR_SIM_RING && c->options->ring_trace);
}

/* Bytes of the two buffers, as far as the rank's part of the call looks at them; validated, so they cannot overflow. */
static void bytes_of(const ari_sim_comm *c, const ari_call *call, size_t *in, size_t *out)
{
    const int n = c->base.size, r = c->base.rank;
    const size_t whole = call->counts ? ari_counts_before(call->counts, n) : call->count;
    const size_t own = call->counts ? call->counts[r] : call->count;
    const bool is_root = r == call->root;
    *in = *out = 0;
    switch (call->kind) {
    case ARI_ALL_REDUCE:
        *in = *out = call->count;
        break;
    case ARI_REDUCE_SCATTER:
        *in = whole;
        *out = own;
        break;
    case ARI_ALL_GATHER:
        *in = own;
        *out = whole;
        break;
    case ARI_ALL_TO_ALL:
        *in = whole;
        *out = ari_counts_before(call->recv_counts, n);
        break;
    case ARI_BROADCAST:
    case ARI_RECV:
        *out = call->count;
        break;
    case ARI_REDUCE:
        *in = call->count;
        *out = is_root ? call->count : 0;
        break;
    case ARI_GATHER:
        *in = own;
        *out = is_root ? whole : 0;
        break;
    case ARI_SCATTER:
        *in = is_root ? whole : 0;
        *out = own;
        break;
    case ARI_SEND:
        *in = call->count;
        break;
    case ARI_EXCHANGE:
    case ARI_BARRIER:
    case ARI_SPLIT:
    case ARI_KIND_COUNT:
        break;
    }
    *in *= ar_dtype_bytes(call->dtype);
    *out *= ar_dtype_bytes(call->dtype);
}

/* A copy of `bytes` at `from` in new memory of the host; NULL where there are none. It has come after a sync. */
static ar_status bring(void **gives, const staged *s, ar_cbuf from, size_t bytes)
{
    *gives = NULL;
    if (bytes == 0)
        return AR_OK;
    AR_TRY(ari_alloc(gives, bytes, 1, "a collective's data on the host"));
    return s->device->ops->copy(s->device, s->call.on, (ar_buf){*gives}, from, bytes);
}

static ar_status take_back(const staged *s, ar_buf to, const void *from, size_t bytes)
{
    return bytes == 0 ? AR_OK : s->device->ops->copy(s->device, s->call.on, to, (ar_cbuf){from}, bytes);
}

static ar_status bring_exchange(staged *s, const ari_call *call)
{
    if (call->count == 0)
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&s->p2p, call->count, sizeof *s->p2p, "an exchange's operations"));
    s->call.p2p = s->p2p;
    for (size_t i = 0; i < call->count; i++)
        s->p2p[i] = (ar_p2p){.peer = call->p2p[i].peer, .send = call->p2p[i].send, .count = call->p2p[i].count};
    for (size_t i = 0; i < call->count; i++)
        AR_TRY(
            bring(&s->p2p[i].buf.ptr, s, ar_const(call->p2p[i].buf), call->p2p[i].count * ar_dtype_bytes(call->dtype)));
    return AR_OK;
}

/* Outputs too: what a transfer that never arrives leaves as it was. */
static ar_status bring_all(staged *s, const ari_call *call, size_t in, size_t out)
{
    AR_TRY(bring(&s->out, s, ar_const(call->out), out));
    AR_TRY(bring(&s->in, s, call->in, in));
    s->call.out.ptr = s->out;
    s->call.in.ptr = call->kind == ARI_BROADCAST ? s->out : s->in;
    if (call->kind == ARI_EXCHANGE)
        AR_TRY(bring_exchange(s, call));
    return ari_stream_sync(s->stream, 0);
}

static ar_status take_all_back(const staged *s, const ari_call *call, size_t out)
{
    AR_TRY(take_back(s, call->out, s->out, out));
    for (size_t i = 0; s->p2p && i < call->count; i++) {
        if (!call->p2p[i].send)
            AR_TRY(take_back(s, call->p2p[i].buf, s->p2p[i].buf.ptr, call->p2p[i].count * ar_dtype_bytes(call->dtype)));
    }
    return AR_OK;
}

ar_status ari_staged_run(ari_sim_comm *c, const ari_call *call, ar_status (*run)(ar_comm *c, const ari_call *call))
{
    ari_stream *stream = ari_queue_stream(call->on);
    staged s = {.device = stream->device, .stream = stream, .call = *call};
    size_t in, out;
    bytes_of(c, call, &in, &out);
    ar_status st = bring_all(&s, call, in, out);
    if (st == AR_OK)
        st = run(&c->base, &s.call);
    if (st == AR_OK)
        st = take_all_back(&s, call, out);
    for (size_t i = 0; s.p2p && i < call->count; i++)
        free(s.p2p[i].buf.ptr);
    free(s.p2p);
    free(s.in);
    free(s.out);
    return st;
}
