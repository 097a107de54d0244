/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "anyrank/device.h"
#include "ref/comm/moves.h"
#include "ref/core/queue_impl.h"
#include "ref/core/stream.h"
#include "sim/wire.h"

/* Ranks that share a device: what they move lies in its memory, and each moves by enqueuing on a stream of its own. As
 * in `direct`, a rank reads what it needs where it lies, and for all_reduce writes its slice to every member; slice c
 * is combined in the ring's order, ranks c+1, ..., c modulo N. The host only says what comes after what:
 *
 *   rank r   .. its kernels | ready |      wait for every ready, move, | done |     wait for every done | its kernels
 * .. host                       enter                                     advance                    leave
 *
 * A mark is read by the members between the two meetings and moved by its rank outside of them, so that nobody waits
 * for a point of another collective, and no member is gone while another looks at its marks. */

typedef struct mover {
    ari_sim_comm *c;
    const ari_call *call;
    ari_stream *stream;
    ari_wire *wire; /* counts */
    int n, r;
    size_t element;
} mover;

static const ari_call *call_of(const mover *v, int i)
{
    return ari_group_call(v->c->member.group, i);
}

static ari_sim_comm *comm_of(const mover *v, int i)
{
    return (ari_sim_comm *)ari_group_comm(v->c->member.group, i);
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

static ar_status copy(const mover *v, ar_buf to, ar_cbuf from, size_t bytes)
{
    ar_device *d = v->stream->device;
    return bytes == 0 || to.ptr == from.ptr ? AR_OK : d->ops->copy(d, v->call->on, to, from, bytes);
}

/* From the memory of member `from` into the own. */
static ar_status take(const mover *v, ar_buf to, int from, ar_cbuf at, size_t bytes)
{
    if (from != v->r)
        ari_wire_account(v->wire, bytes, 0);
    return copy(v, to, at, bytes);
}

/* reduce_scatter and reduce, and a slice of all_reduce: `count` elements from `start` on of all inputs, in the ring's
 * order, into `to`. */
static ar_status combine(const mover *v, ar_buf to, size_t start, size_t count)
{
    const size_t at = start * v->element;
    ar_device *d = v->stream->device;
    ar_cbuf *in = v->c->scratch; /* [n] */
    if (count == 0)
        return AR_OK;
    if (v->n == 1)
        return copy(v, to, ar_cbuf_at(call_of(v, 0)->in, at), count * v->element);
    for (int k = 0; k < v->n; k++)
        in[k] = ar_cbuf_at(call_of(v, (v->r + 1 + k) % v->n)->in, at);
    ari_wire_account(v->wire, (size_t)(v->n - 1) * count * v->element, 0);
    return d->ops->combine(d, v->call->on, to, in, v->n, count, v->call->dtype, v->call->op);
}

static ar_status all_reduce(const mover *v)
{
    size_t start, count;
    ar_comm_slice(v->call->count, v->n, v->r, &start, &count);
    const size_t at = start * v->element, bytes = count * v->element;
    if (bytes == 0)
        return AR_OK;
    const ar_buf sum = ar_buf_at(v->call->out, at);
    AR_TRY(combine(v, sum, start, count));
    for (int k = 1; k < v->n; k++) {
        const ar_buf out = call_of(v, (v->r + k) % v->n)->out;
        ari_wire_account(v->wire, 0, bytes);
        AR_TRY(copy(v, ar_buf_at(out, at), ar_const(sum), bytes));
    }
    return AR_OK;
}

static ar_status move(const mover *v)
{
    const bool combines = ari_kind_of(v->call->kind)->combines;
    if (v->call->kind == ARI_ALL_REDUCE)
        return all_reduce(v);
    ari_moves moves = combines ? ari_moves_within(v->call, v->r) : ari_moves_to(v->c->member.group, v->r);
    for (ari_move m; ari_next_move(&moves, &m);)
        AR_TRY(combines ? combine(v, m.to, m.start, m.count) : take(v, m.to, m.peer, m.from, m.count * v->element));
    return AR_OK;
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

/* A mark of another kind of stream cannot be moved here. */
static ar_status set_mark(ari_mark **m, ari_stream *s)
{
    if (*m && (*m)->ops != s->ops) {
        ari_mark_destroy(*m);
        *m = NULL;
    }
    return s->ops->mark(s, m);
}

static ar_status wait_for_all_ready(const mover *v)
{
    for (int i = 0; i < v->n; i++) {
        if (i != v->r)
            AR_TRY(v->stream->ops->wait(v->stream, comm_of(v, i)->ready));
    }
    return AR_OK;
}

static ar_status enqueue(const mover *v)
{
    AR_TRY(wait_for_all_ready(v));
    AR_TRY(move(v));
    return set_mark(&v->c->done, v->stream);
}

/* *whole: every member has set its mark. */
static ar_status wait_for_all_done(const mover *v, bool *whole)
{
    ari_member_advance(&v->c->member, 1);
    for (int i = 0; i < v->n; i++) {
        if (i == v->r)
            continue;
        *whole = ari_member_await(&v->c->member, i, 1);
        if (!*whole)
            return AR_OK;
        AR_TRY(v->stream->ops->wait(v->stream, comm_of(v, i)->done));
    }
    *whole = true;
    return AR_OK;
}

static void break_off(const mover *v, ar_status st)
{
    char what[384], why[768];
    ari_member_describe(&v->c->member, v->call, what, sizeof what);
    snprintf(why, sizeof why, "rank %d in %s: %s", v->c->member.rank, what, ar_error_message());
    ari_member_break(&v->c->member, st, why);
}

/* Between the two meetings. Where the collective is broken off, nothing of this rank's is under way when it leaves: its
 * own memory and its peers' may end then. */
static void take_part(const mover *v)
{
    bool whole = false;
    ar_status st = enqueue(v);
    if (st == AR_OK)
        st = wait_for_all_done(v, &whole);
    if (st != AR_OK)
        break_off(v, st);
    if (st != AR_OK || !whole)
        (void)ari_queue_note(v->call->on, ari_stream_sync(v->stream, v->c->options->timeout_ns)); /* as the world has */
}

ar_status ari_on_device_run(ari_sim_comm *c, const ari_call *call)
{
    ari_stream *stream = ari_queue_stream(call->on);
    AR_TRY(ari_sim_reserve(c, (size_t)c->base.size * sizeof(ar_cbuf)));
    AR_TRY(set_mark(&c->ready, stream));
    AR_TRY(ari_member_enter(&c->member, &c->base, call, NULL, NULL));
    ari_wire wire = ari_wire_open(c);
    const mover v = {.c = c,
                     .call = call,
                     .stream = stream,
                     .wire = &wire,
                     .n = c->base.size,
                     .r = c->member.index,
                     .element = ar_dtype_bytes(call->dtype)};
    take_part(&v);
    ari_wire_close(&wire);
    return ari_member_leave(&c->member);
}
