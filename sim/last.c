/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/moves.h"
#include "sim/sum.h"

/* `last`: the last rank to arrive, the mover m, does the work of all while the others wait: one barrier instead of
 * two. Reads and writes of other ranks' memory by m's thread are counted on m, and add up to the ring's total. For that
 * no rank's memory is touched twice, and each rank does with its own buffers what needs no other rank:
 *
 *   all_reduce      m reads the N-1 other inputs and writes N-1 outputs:                                      2(N-1) D
 *   reduce_scatter  slice c != m: m adds ranks c+1 .. c-1, which is N-2 reads, and writes the sum to rank c, which adds
 *                   its own input, the last in the ring's order. Slice m: N-1 reads.                           (N-1) D
 *   all_gather      m reads what it lacks into its own output, D - D[m], and writes from there to each rank r what r
 *                   lacks, D - D[r]; each copies its own part.                                                 (N-1) D
 *   broadcast       m reads the buffer, unless it is the root, and writes it to all but itself and the root    (N-1) D
 *
 * The other kinds move as `direct` does: between two ranks, a third would touch everything twice. */
typedef struct last_call {
    ari_sim_comm *c;
    const ari_call *call;
    bool plain; /* the wire */
    bool moves; /* true if this rank arrived last */
} last_call;

static char *output(const ari_wire *w, int i)
{
    return ari_group_call(w->group, i)->out.ptr;
}

/* --- the mover's part --------------------------------------------------------------------------------------------- */

static bool move_all_reduce(ari_wire *w)
{
    bool good = true;
    for (int c = 0; good && c < w->n; c++)
        good = ari_slice_move(w, c);
    return good;
}

/* Moves one slice for rank c: the complete sum to the mover's output, or the sum without c's input to c's scratch
 * memory. */
static bool move_slice(ari_wire *w, int c, size_t start, size_t size)
{
    _Alignas(64) char partial[ARI_WIRE_PIECE_BYTES];
    const ari_sum sum = ari_sum_of(w, c, c == w->self);
    const size_t piece = ari_sum_piece_count(&sum);
    char *dst = c == w->self ? output(w, c) : ((ari_sim_comm *)ari_group_comm(w->group, c))->scratch;
    for (size_t offset = 0; offset < size; offset += piece) {
        const size_t count = size - offset < piece ? size - offset : piece, bytes = count * w->element;
        char *piece_dst = dst + offset * w->element;
        if (!ari_sum_piece(&sum, c == w->self ? piece_dst : partial, (start + offset) * w->element, count))
            return false;
        if (c != w->self && !ari_wire_put(w, c, piece_dst, partial, bytes, false))
            return false;
    }
    return true;
}

static bool move_slices(ari_wire *w)
{
    ari_parts slices = ari_parts_of(w->call, w->self, w->n, true);
    for (ari_part p; ari_next_part(&slices, &p);) {
        if (!move_slice(w, p.peer, p.start, p.count))
            return false;
    }
    return true;
}

static bool put_range(ari_wire *w, int dst_rank, size_t begin, size_t end)
{
    const char *local_output = output(w, w->self);
    return begin == end ||
           ari_wire_put(w, dst_rank, output(w, dst_rank) + begin, local_output + begin, end - begin, false);
}

static bool move_all_gather(ari_wire *w)
{
    const size_t total_bytes = ari_counts_before(w->call->counts, w->n) * w->element;
    size_t offset = 0;
    for (int i = 0; i < w->n; i++) {
        const size_t bytes = w->call->counts[i] * w->element;
        const void *src = ari_group_call(w->group, i)->input.ptr;
        if (bytes > 0 && i == w->self)
            ari_copy_bytes(output(w, i) + offset, src, bytes);
        else if (bytes > 0 && !ari_wire_take(w, output(w, w->self) + offset, i, src, bytes, false))
            return false;
        offset += bytes;
    }
    offset = 0;
    for (int i = 0; i < w->n; i++) {
        const size_t next_offset = offset + w->call->counts[i] * w->element;
        if (i != w->self && (!put_range(w, i, 0, offset) || !put_range(w, i, next_offset, total_bytes)))
            return false;
        offset = next_offset;
    }
    return true;
}

static bool move_broadcast(ari_wire *w)
{
    const int root = w->call->root;
    const size_t bytes = w->call->count * w->element;
    if (bytes == 0)
        return true;
    if (w->self != root && !ari_wire_take(w, output(w, w->self), root, output(w, root), bytes, false))
        return false;
    for (int i = 0; i < w->n; i++) {
        if (i != w->self && i != root && !ari_wire_put(w, i, output(w, i), output(w, w->self), bytes, false))
            return false;
    }
    return true;
}

static bool move_parts(ari_wire *w)
{
    switch (w->call->kind) {
    case ARI_ALL_REDUCE:
        return move_all_reduce(w);
    case ARI_REDUCE_SCATTER:
        return move_slices(w);
    case ARI_ALL_GATHER:
        return move_all_gather(w);
    case ARI_BROADCAST:
        return move_broadcast(w);
    default:
        return true;
    }
}

static void move_all(last_call *l)
{
    ari_wire wire = ari_wire_open(l->c);
    (void)move_parts(&wire);
    ari_wire_close(&wire);
}

/* --- each rank's own ---------------------------------------------------------------------------------------------- */

/* Completes this rank's output, if needed: adds the rank's input to a sum that lacks it, or copies the rank's part. */
static bool own_move(const ari_sim_comm *c, const ari_call *call, ari_move *m)
{
    ari_moves moves = ari_moves_within(call, c->member.index);
    *m = (ari_move){.count = 0};
    return call->kind != ARI_ALL_REDUCE && ari_next_move(&moves, m);
}

/* Completes the call on a rank that was not the mover, once the mover is done. */
static void complete_own(const last_call *l)
{
    const ari_call *call = l->call;
    ari_move m;
    if (!own_move(l->c, call, &m))
        return;
    if (ari_kind_of(call->kind)->combines)
        ari_reduce_kernel(call->dtype, call->op).pair(m.dst.ptr, l->c->scratch, m.src.ptr, m.count);
    else
        ari_copy_bytes(m.dst.ptr, m.src.ptr, m.count * ar_dtype_bytes(call->dtype));
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

/* Runs on the rank that arrives last. If transfers can fail, data move after this barrier, and a second barrier reports
 * failures to all ranks. */
static ar_status come_last(ari_group *g, void *arg)
{
    (void)g;
    last_call *l = arg;
    l->moves = true;
    if (l->plain)
        move_all(l);
    return AR_OK;
}

ar_status ari_last_run(ar_comm *base, const ari_call *call)
{
    ari_sim_comm *c = (ari_sim_comm *)base;
    ari_move m;
    if (!ari_kind_of(call->kind)->ring)
        return ari_direct_run(base, call);
    if (own_move(c, call, &m) && ari_kind_of(call->kind)->combines)
        AR_TRY(ari_sim_reserve(c, m.count * ar_dtype_bytes(call->dtype)));
    last_call l = {.c = c, .call = call, .plain = ari_wire_is_plain(c)};
    AR_TRY(ari_member_enter(&c->member, base, call, &(ari_alone){.run = come_last, .arg = &l}));
    if (!l.plain && l.moves)
        move_all(&l);
    if (!l.plain)
        AR_TRY(ari_member_leave(&c->member));
    if (!l.moves)
        complete_own(&l);
    if (l.plain)
        ari_member_done(&c->member);
    return AR_OK;
}
