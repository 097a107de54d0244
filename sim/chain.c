/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/ring_impl.h"

/* Broadcast and reduce of `ring`: what is at one end of a chain of N-1 hops, each to the right neighbour, comes to the
 * other end, segment after segment, so that all hops are busy at once.
 *
 *   broadcast from 0, N = 4:   0 > 1 > 2 > 3     each copies what its left neighbour has
 *   reduce to 0, N = 4:        1 > 2 > 3 > 0     each adds its own input to what its left neighbour has: ((1+2)+3)+0
 *
 *   At step s the rank p places from the beginning receives segment s-p+1, and sends segment s-p. */
typedef struct chain {
    const ari_ring *g;
    int phase, place; /* of the rank in the chain: 0 .. N-1 */
    size_t bytes;
} chain;

static chain chain_of(const ari_ring *g, int phase, int first)
{
    return (chain){.g = g, .phase = phase, .place = (g->r - first + g->n) % g->n, .bytes = g->call->count * g->element};
}

static size_t segment_bytes(const chain *h, size_t k)
{
    const size_t rest = h->bytes - k * ARI_CHAIN_SEGMENT_BYTES;
    return rest < ARI_CHAIN_SEGMENT_BYTES ? rest : ARI_CHAIN_SEGMENT_BYTES;
}

/* The left neighbour has segment k; the first of the chain has all of them from the beginning. */
static bool await_left(const chain *h, size_t k)
{
    return h->place == 1 || ari_member_await(&h->g->c->member, h->g->left, k + 1);
}

static void step(const chain *h, ari_moment since, size_t k)
{
    const bool sends = k > 0 && h->place < h->g->n - 1;
    ari_ring_step(h->g, since, k + 1,
                  (ar_ring_step){.phase = h->phase,
                                 .step = (int)k + h->place - 1,
                                 .chunk = sends ? (int)k - 1 : -1,
                                 .read_chunk = (int)k,
                                 .bytes = segment_bytes(h, k)});
}

void ari_chain_broadcast(const ari_ring *g)
{
    const chain h = chain_of(g, 1, g->call->root);
    for (size_t k = 0, at = 0; h.place > 0 && at < h.bytes; k++, at += ARI_CHAIN_SEGMENT_BYTES) {
        const char *from = (const char *)g->left_call->out.ptr + at;
        if (!await_left(&h, k))
            return;
        const ari_moment since = ari_record_moment();
        if (!ari_wire_take(g->wire, (char *)g->call->out.ptr + at, g->left, from, segment_bytes(&h, k), false))
            return;
        step(&h, since, k);
    }
}

/* Partial sums of a reduce: two places in turn. */
static char *partial(const ari_sim_comm *c, size_t k)
{
    return (char *)c->scratch + k % 2 * ARI_CHAIN_SEGMENT_BYTES;
}

size_t ari_chain_scratch(const ari_sim_comm *c, const ari_call *call)
{
    if (call->kind != ARI_REDUCE || c->member.index == call->root)
        return 0;
    const size_t bytes = call->count * ar_dtype_bytes(call->dtype);
    return bytes <= ARI_CHAIN_SEGMENT_BYTES ? bytes : 2 * ARI_CHAIN_SEGMENT_BYTES;
}

/* A place of partial sums is written again only after the right neighbour has read it. */
void ari_chain_reduce(const ari_ring *g)
{
    const chain h = chain_of(g, 0, (g->call->root + 1) % g->n);
    const bool ends = h.place == g->n - 1;
    for (size_t k = 0, at = 0; h.place > 0 && at < h.bytes; k++, at += ARI_CHAIN_SEGMENT_BYTES) {
        if (!await_left(&h, k))
            return;
        if (!ends && k >= 2 && !ari_member_await(&g->c->member, g->right, k - 1))
            return;
        const ari_moment since = ari_record_moment();
        const ari_sim_comm *left = (const ari_sim_comm *)ari_group_comm(g->c->member.group, g->left);
        const char *from = h.place == 1 ? (const char *)g->left_call->in.ptr + at : partial(left, k);
        char *to = ends ? (char *)g->call->out.ptr + at : partial(g->c, k);
        if (!ari_ring_add(g, to, from, (const char *)g->call->in.ptr + at, segment_bytes(&h, k), ends))
            return;
        step(&h, since, k);
    }
}
