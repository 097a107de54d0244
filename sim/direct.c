/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/moves.h"
#include "sim/sum.h"

/* `direct`: every rank reads the other ranks' buffers itself. Slice c is still added in the ring's order, ranks c+1,
 * c+2, ..., c modulo N, so the bits are the ring's.
 *
 *   all_reduce, N = 3:   in[0]  a0 b0 c0     rank 0 adds a, rank 1 adds b, rank 2 adds c, each reading three inputs
 *                        in[1]  a1 b1 c1     and writing its sum to three outputs: every input is read once and every
 *                        in[2]  a2 b2 c2     output written once, which is the least there is. */

/* Reduces the inputs of all ranks for this rank's output of a reduce_scatter. */
static void reduce_own(ari_wire *w)
{
    const ari_sum sum = ari_sum_of(w, w->self, true);
    const size_t piece = ari_sum_piece_count(&sum);
    ari_moves moves = ari_moves_within(w->call, w->self);
    ari_move m = {.count = 0};
    (void)ari_next_move(&moves, &m);
    for (size_t offset = 0; offset < m.count; offset += piece) {
        const size_t count = m.count - offset < piece ? m.count - offset : piece;
        if (!ari_sum_piece(&sum, ar_buf_at(m.dst, offset * w->element).ptr, (m.start + offset) * w->element, count))
            return;
    }
}

/* True if the outputs with the same source are too large for the cache together. */
static bool passes_cache(const ari_wire *w)
{
    const ari_kind_row *k = ari_kind_of(w->call->kind);
    const size_t bytes = ari_output_count(w->call, w->self, w->n) * w->element;
    return (k->out == ARI_EXTENT_PARTS || k->from_root) && ari_stream_pays(bytes, w->n);
}

static void take_all(ari_wire *w)
{
    const bool past_cache = passes_cache(w);
    ari_moves moves = ari_moves_to(w->group, w->self);
    bool good = true;
    for (ari_move m; good && ari_next_move(&moves, &m);) {
        const size_t bytes = m.count * w->element;
        if (m.dst.ptr == m.src.ptr)
            continue;
        if (m.peer != w->self)
            good = ari_wire_take(w, m.dst.ptr, m.peer, m.src.ptr, bytes, past_cache);
        else
            (past_cache ? ari_stream_bytes : ari_copy_bytes)(m.dst.ptr, m.src.ptr, bytes);
    }
    if (past_cache)
        ari_stream_end();
}

ar_status ari_direct_run(ar_comm *base, const ari_call *call)
{
    ari_sim_comm *c = (ari_sim_comm *)base;
    AR_TRY(ari_member_enter(&c->member, base, call, NULL));
    if (call->kind == ARI_BARRIER) { /* once all have arrived, all may leave */
        ari_member_done(&c->member);
        return AR_OK;
    }
    ari_wire wire = ari_wire_open(c);
    if (call->kind == ARI_ALL_REDUCE)
        (void)ari_slice_move(&wire, wire.self);
    else if (ari_kind_of(call->kind)->combines)
        reduce_own(&wire);
    else
        take_all(&wire);
    ari_wire_close(&wire);
    return ari_member_leave(&c->member);
}

/* --- ranks that have no core each --------------------------------------------------------------------------------- */

/* With fewer cores than ranks, every rank would have to be scheduled twice per collective: to do its slice, and to
 * learn that all slices are done. Therefore the ranks that are running when the last one arrives do all slices, and the
 * others find everything done when they are scheduled. */

static ar_status share_group(ari_group *g, void *arg)
{
    (void)arg;
    ari_group_share(g);
    return AR_OK;
}

ar_status ari_share_run(ari_sim_comm *c, const ari_call *call)
{
    ari_member *m = &c->member;
    AR_TRY(ari_member_enter(m, &c->base, call, &(ari_alone){.run = share_group}));
    ari_wire wire = ari_wire_open(c);
    for (int part; (part = ari_member_next_part(m)) >= 0;) {
        (void)ari_slice_move(&wire, part);
        ari_member_part_done(m);
    }
    ari_wire_close(&wire);
    return ari_member_leave_shared(m);
}
