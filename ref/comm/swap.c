/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"

/* Two ranks that both have a core meet for a short collective in the time that one line of memory takes to cross from
 * one core to the other. Each posts what it calls and a copy of its input in its own slot, then waits for the other's
 * post; nobody's own memory is read, so nobody has to be waited for at the end. There are two places for posts, used in
 * turn: a post of call k is overwritten by that of k + 2, which its owner reaches only after the other came to k + 1.
 *
 * The other may be late, fail, or call something else. All that is the business of ari_member_enter: a member that does
 * not find the same call posted soon *turns back* and enters in the usual way. Either both turn back or neither does:
 *
 *   A: turned back = k;  is B's post k there?  no:  A turns back.
 *                                              yes: A claims `decided` for "swap"; whoever claims first decides
 *   B: post k;  has A turned back from k?      no:  B goes on with A's post: A will find B's.
 *                                              yes: B claims `decided` for "turn back"
 *
 * (All of these are sequentially consistent; what is followed by a load is an exchange, since qemu 7.2 for ARM64 lets
 * that load pass a store.) Where A finds no post, B's comes later, so B finds that A turned back, and nobody contests
 * its claim. Where B does not find that A turned back, A will find B's post, and nobody contests A's. */

/* Turns of waiting for the other's post, about a microsecond: longer than any crossing takes, and shorter than a thread
 * waiting on the same core would need. */
enum { TURNS = 40 };

static uint64_t mix_word(uint64_t h, uint64_t x)
{
    h = (h ^ x) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ h >> 29;
}

static uint64_t hash_of(const char *tag)
{
    const size_t length = strlen(tag);
    uint64_t h = length;
    for (size_t offset = 0; offset < length; offset += sizeof h) {
        uint64_t word = 0;
        memcpy(&word, tag + offset, length - offset < sizeof word ? length - offset : sizeof word);
        h = mix_word(h, word);
    }
    return h;
}

static void write_head(ari_post *p, const ari_call *call)
{
    p->signature = (uint64_t)call->kind << 32 | (uint64_t)call->dtype << 16 | (uint64_t)call->op;
    p->count = call->counts ? call->counts[0] << 32 | call->counts[1] : call->count; /* swapped data are short, so
                                                                                        both counts fit in one word */
    p->tag = hash_of(call->tag);
}

static bool same_call(const ari_post *a, const ari_post *b)
{
    return a->signature == b->signature && a->count == b->count && a->tag == b->tag;
}

/* Decides for both members after one of them has withdrawn from call `seq`. */
static bool claim(ari_group *g, uint64_t seq, bool swap)
{
    uint64_t decided = atomic_load(&g->decided);
    while (decided >> 1 < seq) {
        if (atomic_compare_exchange_weak(&g->decided, &decided, seq << 1 | swap))
            return swap;
    }
    return decided & 1;
}

static bool is_there(const ari_slot *peer, uint64_t seq)
{
    const ari_post *post = &peer->post[seq % 2];
    for (int turn = 0; turn < TURNS; turn++) {
        if (atomic_load_explicit(&post->seq, memory_order_acquire) >= seq)
            return true;
        ari_wait_relax();
    }
    return false;
}

/* Returns true if both members continue with each other's post of this call. The other member may already be at the
 * next call. */
static bool both_swap(ari_group *g, ari_slot *local, const ari_slot *peer, uint64_t seq)
{
    if (is_there(peer, seq))
        return atomic_load(&peer->turned_back) != seq || claim(g, seq, false);
    (void)atomic_exchange(&local->turned_back, seq);
    return atomic_load(&peer->post[seq % 2].seq) >= seq && claim(g, seq, true);
}

bool ari_member_can_swap(const ari_member *m)
{
    const ari_world *w = m->group->world;
    return m->group->n == 2 && w->spins && !w->instruments.trace && !w->instruments.scheduler &&
           !w->instruments.virtual_cost;
}

static const void *swap(ari_member *m, const ari_call *call, const void *src, size_t bytes)
{
    ari_group *g = m->group;
    ari_slot *local = &g->slot[m->index], *peer = &g->slot[1 - m->index];
    const uint64_t seq = m->seq + 1, place = seq % 2;
    if (!local->data && !(local->data = aligned_alloc(ARI_CACHE_LINE, 2 * sizeof *local->data)))
        return NULL;
    ari_copy_bytes(local->data[place].bytes, src, bytes);
    write_head(&local->post[place], call);
    (void)atomic_exchange(&local->post[place].seq, seq);
    if (!both_swap(g, local, peer, seq) || !same_call(&local->post[place], &peer->post[place]))
        return NULL;
    /* The input crosses from core to core during what follows. */
    for (size_t offset = 0; offset < bytes; offset += ARI_CACHE_LINE)
        __builtin_prefetch(peer->data[place].bytes + offset);
    m->seq = seq;
    ari_world_swapped(m, call);
    return peer->data[place].bytes;
}

const void *ari_member_swap(ari_member *m, const ari_call *call, const void *src, size_t bytes)
{
    /* ari_member_enter reports the error. */
    if (ari_world_status(m->group->world) != AR_OK || atomic_exchange(&m->busy, 1) != 0)
        return NULL;
    const void *peer_input = swap(m, call, src, bytes);
    atomic_store_explicit(&m->busy, 0, memory_order_release);
    return peer_input;
}
