/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/rendezvous_impl.h"
#include "ref/core/clock.h"

/* What a trace keeps of a member's collectives, and its virtual clock. */

static size_t count_of(const ari_call *call, int n)
{
    return call->counts && call->kind != ARI_ALL_TO_ALL ? ari_counts_before(call->counts, n) : call->count;
}

void ari_member_record_begin(ari_member *m, const ar_comm *c, const ari_call *call)
{
    const ari_lane *lane = ari_lane_self();
    ari_group *g = m->group;
    g->slot[m->index].virtual_begin_ns = lane ? lane->virtual_ns : 0;
    if (!lane || !lane->recording)
        return;
    m->record = (ari_record){.kind = ARI_RECORD_COLLECTIVE,
                             .begin_ns = ari_now_ns(),
                             .virtual_begin_ns = lane->virtual_ns,
                             .op_kind = call->kind,
                             .dtype = call->dtype,
                             .op = call->op,
                             .root = call->root,
                             .count = count_of(call, g->n),
                             .group = g->id,
                             .seq = m->seq,
                             .ranks = g->n,
                             .bytes_read = atomic_load_explicit(&c->moved.read, memory_order_relaxed),
                             .bytes_written = atomic_load_explicit(&c->moved.written, memory_order_relaxed)};
}

/* The collective is agreed upon: nobody writes what is read here before this member enters the next one. */
void ari_member_record_agreed(ari_member *m)
{
    const ari_lane *lane = ari_lane_self();
    const ari_group *g = m->group;
    if (!lane || !lane->recording)
        return;
    m->record.agreed_ns = ari_now_ns();
    m->record.last = g->last;
    m->record.virtual_last = g->virtual_last;
    m->record.virtual_from = g->slot[m->index].virtual_from;
    m->record.virtual_agreed_ns = g->virtual_begin_ns;
}

/* A collective that an error ended is recorded too: a trace of a failing run shows who was in what. */
void ari_member_record_end(ari_member *m, bool finished)
{
    ari_lane *lane = ari_lane_self();
    const ari_slot *slot = &m->group->slot[m->index];
    ari_record *r = &m->record;
    if (finished && ari_lane_is_virtual(lane))
        ari_lane_reach(lane, slot->virtual_end_ns);
    if (!lane || !lane->recording)
        return;
    r->broken = !finished;
    r->end_ns = ari_now_ns();
    r->virtual_end_ns = lane->virtual_ns;
    if (r->agreed_ns == 0) { /* it never was: all of it was waiting */
        r->agreed_ns = r->end_ns;
        r->virtual_agreed_ns = r->virtual_end_ns;
        r->last = r->virtual_last = m->rank;
    }
    r->bytes_read = atomic_load_explicit(&slot->comm->moved.read, memory_order_relaxed) - r->bytes_read;
    r->bytes_written = atomic_load_explicit(&slot->comm->moved.written, memory_order_relaxed) - r->bytes_written;
    ari_record_add(lane->recording, r, slot->call.tag);
}
