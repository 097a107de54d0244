/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "anyrank/device.h"
#include "ref/comm/moves.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

#define LINE ((size_t)64) /* a buffer begins at a multiple of it */

/* A device's data moved through the host's memory: what the call reads is copied down before it runs, and what it has
 * written is copied up after it. */

typedef struct staged {
    ari_call call; /* with buffers of the host */
    ar_device *device;
    ar_p2p pair[2];   /* the input and the output of a call that is no batch */
    const ar_p2p *of; /* [n], on the device */
    ar_p2p *on;       /* [n], the same on the host */
    size_t n;
    char *memory;
} staged;

/* The buffers that the rank's part of the call looks at. */
static void find_buffers(staged *s, const ar_comm *c, const ari_call *call)
{
    size_t in = ari_input_count(call, c->rank, c->size), out = ari_output_count(call, c->rank, c->size);
    if (ari_kind_of(call->kind)->from_root && in > 0) /* the root's, which is read */
        out = 0;
    s->pair[0] = (ar_p2p){.send = true, .buf = {(void *)(uintptr_t)call->in.ptr}, .count = in};
    s->pair[1] = (ar_p2p){.send = false, .buf = call->out, .count = out};
    s->of = call->kind == ARI_EXCHANGE ? call->p2p : s->pair;
    s->n = call->kind == ARI_EXCHANGE ? call->count : 2;
}

static size_t bytes_of(const staged *s, size_t i)
{
    return s->of[i].count * ar_dtype_bytes(s->call.dtype);
}

static ar_status copy_staged(const staged *s, ar_buf to, ar_buf from, size_t bytes)
{
    return bytes > 0 ? s->device->ops->copy(s->device, s->call.on, to, ar_const(from), bytes) : AR_OK;
}

static ar_status bring_down(staged *s, bool outputs)
{
    size_t bytes = 0, at = 0;
    for (size_t i = 0; i < s->n; i++)
        AR_TRY(ari_add_size(&bytes, bytes, ari_round_up(bytes_of(s, i), LINE)));
    AR_TRY(ARI_ALLOC(&s->on, s->n, "the buffers of a collective"));
    AR_TRY(ari_alloc((void **)&s->memory, bytes, 1, "a collective's data on the host"));
    for (size_t i = 0; i < s->n; at += ari_round_up(bytes_of(s, i++), LINE)) {
        s->on[i] = s->of[i];
        s->on[i].buf.ptr = bytes_of(s, i) > 0 ? s->memory + at : NULL;
        if (s->of[i].send || outputs)
            AR_TRY(copy_staged(s, s->on[i].buf, s->of[i].buf, bytes_of(s, i)));
    }
    return AR_OK;
}

/* The call on the host: a broadcast has its buffer in either place. */
static void put_buffers(staged *s)
{
    if (s->call.kind == ARI_EXCHANGE) {
        s->call.p2p = s->on;
        return;
    }
    const bool one = ari_kind_of(s->call.kind)->from_root;
    const ar_buf in = s->on[0].buf, out = s->on[1].buf;
    s->call.in = ar_const(one && !in.ptr ? out : in);
    s->call.out = one && !out.ptr ? in : out;
}

static ar_status bring_up(const staged *s)
{
    for (size_t i = 0; i < s->n; i++) {
        if (!s->of[i].send)
            AR_TRY(copy_staged(s, s->of[i].buf, s->on[i].buf, bytes_of(s, i)));
    }
    return AR_OK;
}

ar_status ari_staged_run(ar_comm *c, const ari_call *call, bool outputs, ari_run_fn run)
{
    ari_stream *stream = ari_queue_stream(call->on);
    staged s = {.call = *call, .device = stream->device};
    find_buffers(&s, c, call);
    ar_status st = bring_down(&s, outputs);
    if (st == AR_OK)
        st = ari_stream_sync(stream, 0);
    if (st == AR_OK) {
        put_buffers(&s);
        st = run(c, &s.call);
    }
    if (st == AR_OK)
        st = bring_up(&s);
    free(s.on);
    free(s.memory);
    return st;
}
