/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "anyrank/device.h"
#include "ref/comm/moves.h"
#include "ref/core/queue_impl.h"
#include "sim/wire.h"

/* Ranks that share a device: what they move lies in its memory, and each moves by enqueuing on a stream of its own. As
 * in `direct`, a rank reads what it needs where it lies, and for all_reduce writes its slice to every member; slice c
 * is combined in the ring's order, ranks c+1, ..., c modulo N. The host only says what comes after what:
 *
 *   rank r   .. its kernels | ready |      wait for every ready, move, | done |     wait for every done | its kernels
 * .. host                       enter                                     advance                    leave
 *
 * A mark is read by the members between the two barriers and moved by its rank outside of them, so that nobody waits
 * for a point of another collective, and no member is gone while another looks at its marks. */

static const ari_call *call_of(const ari_wire *w, int i)
{
    return ari_group_call(w->group, i);
}

static ari_sim_comm *comm_of(const ari_wire *w, int i)
{
    return (ari_sim_comm *)ari_group_comm(w->group, i);
}

static ari_stream *stream_of(const ari_wire *w)
{
    return ari_queue_stream(w->call->on);
}

/* --- pieces ------------------------------------------------------------------------------------------------------- */

static ar_status copy(ari_wire *w, ar_buf to, ar_cbuf from, size_t bytes)
{
    ar_device *d = stream_of(w)->device;
    return bytes == 0 || to.ptr == from.ptr ? AR_OK : d->ops->copy(d, w->call->on, to, from, bytes);
}

/* From the memory of member `from` into the own. */
static ar_status copy_part(ari_wire *w, ar_buf to, int from, ar_cbuf at, size_t bytes)
{
    if (from != w->self)
        ari_wire_account(w, bytes, 0);
    return copy(w, to, at, bytes);
}

/* reduce_scatter and reduce, and a slice of all_reduce: `count` elements from `start` on of all inputs, in the ring's
 * order, into `to`. */
static ar_status combine_parts(ari_wire *w, ar_buf to, size_t start, size_t count)
{
    const size_t at = start * w->element;
    ar_device *d = stream_of(w)->device;
    ar_cbuf *in = w->mover->scratch; /* [n] */
    if (count == 0)
        return AR_OK;
    if (w->n == 1)
        return copy(w, to, ar_cbuf_at(call_of(w, 0)->in, at), count * w->element);
    for (int k = 0; k < w->n; k++)
        in[k] = ar_cbuf_at(call_of(w, (w->self + 1 + k) % w->n)->in, at);
    ari_wire_account(w, (size_t)(w->n - 1) * count * w->element, 0);
    return d->ops->combine(d, w->call->on, to, in, w->n, count, w->call->dtype, w->call->op);
}

static ar_status all_reduce(ari_wire *w)
{
    size_t start, count;
    ar_comm_slice(w->call->count, w->n, w->self, &start, &count);
    const size_t at = start * w->element, bytes = count * w->element;
    if (bytes == 0)
        return AR_OK;
    const ar_buf sum = ar_buf_at(w->call->out, at);
    AR_TRY(combine_parts(w, sum, start, count));
    for (int k = 1; k < w->n; k++) {
        const ar_buf out = call_of(w, (w->self + k) % w->n)->out;
        ari_wire_account(w, 0, bytes);
        AR_TRY(copy(w, ar_buf_at(out, at), ar_const(sum), bytes));
    }
    return AR_OK;
}

static ar_status move_parts(ari_wire *w)
{
    const bool combines = ari_kind_of(w->call->kind)->combines;
    if (w->call->kind == ARI_ALL_REDUCE)
        return all_reduce(w);
    ari_moves moves = combines ? ari_moves_within(w->call, w->self) : ari_moves_to(w->group, w->self);
    for (ari_move m; ari_next_move(&moves, &m);)
        AR_TRY(combines ? combine_parts(w, m.to, m.start, m.count)
                        : copy_part(w, m.to, m.peer, m.from, m.count * w->element));
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

static ar_status wait_for_all_ready(ari_wire *w)
{
    ari_stream *s = stream_of(w);
    for (int i = 0; i < w->n; i++) {
        if (i != w->self)
            AR_TRY(s->ops->wait(s, comm_of(w, i)->ready));
    }
    return AR_OK;
}

static ar_status enqueue(ari_wire *w)
{
    AR_TRY(wait_for_all_ready(w));
    AR_TRY(move_parts(w));
    return set_mark(&w->mover->done, stream_of(w));
}

/* *whole: every member has set its mark. */
static ar_status wait_for_all_done(ari_wire *w, bool *whole)
{
    ari_stream *s = stream_of(w);
    ari_member_advance(&w->mover->member, 1);
    for (int i = 0; i < w->n; i++) {
        if (i == w->self)
            continue;
        *whole = ari_member_await(&w->mover->member, i, 1);
        if (!*whole)
            return AR_OK;
        AR_TRY(s->ops->wait(s, comm_of(w, i)->done));
    }
    *whole = true;
    return AR_OK;
}

static void break_off(ari_wire *w, ar_status st)
{
    char what[384], why[768];
    ari_member_describe(&w->mover->member, w->call, what, sizeof what);
    snprintf(why, sizeof why, "rank %d in %s: %s", w->mover->member.rank, what, ar_error_message());
    ari_member_break(&w->mover->member, st, why);
}

/* Runs between the two barriers. If the collective is broken off, no transfer of this rank is under way when it
 * leaves: its own memory and its peers' may be freed then. */
static void take_part(ari_wire *w)
{
    bool whole = false;
    ar_status st = enqueue(w);
    if (st == AR_OK)
        st = wait_for_all_done(w, &whole);
    if (st != AR_OK)
        break_off(w, st);
    if (st != AR_OK || !whole)
        (void)ari_queue_note(w->call->on,
                             ari_stream_sync(stream_of(w), w->mover->options->timeout_ns)); /* as the world has */
}

ar_status ari_on_device_run(ari_sim_comm *c, const ari_call *call)
{
    ari_stream *stream = ari_queue_stream(call->on);
    AR_TRY(ari_sim_reserve(c, (size_t)c->base.size * sizeof(ar_cbuf)));
    AR_TRY(set_mark(&c->ready, stream));
    AR_TRY(ari_member_enter(&c->member, &c->base, call, NULL));
    ari_wire wire = ari_wire_open(c);
    take_part(&wire);
    ari_wire_close(&wire);
    return ari_member_leave(&c->member);
}
