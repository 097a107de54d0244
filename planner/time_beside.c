/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives beside products: a second clock, that of the queue which gathers and scatters tokens. The main queue
 * waits for a chunk before it multiplies it, and for all that it has scattered. With chunks of t_a and t_g and nothing
 * else on either queue that is t_a + (K-1) max(t_a, t_g) + t_g (docs/overlap.md). */
#include <math.h>

#include "planner/time_impl.h"

static double chunk_seconds(const ari_chunks *c, size_t i)
{
    return i + 1 < ari_call_chunks(&c->call) ? c->each : c->last;
}

static double share(const ari_chunks *c, size_t i)
{
    return (double)ari_call_chunk(&c->call, i) / (double)c->call.elements;
}

double ari_chunks_seconds(const ari_chunks *c)
{
    return (double)(ari_call_chunks(&c->call) - 1) * c->each + c->last;
}

ari_chunks ari_chunks_of(const ari_links *l, const ari_op_call *call, double element_bytes)
{
    const size_t n = ari_call_chunks(call);
    return (ari_chunks){.call = *call,
                        .each = ari_links_call(l, call->kind, (double)ari_call_chunk(call, 0), element_bytes),
                        .last = ari_links_call(l, call->kind, (double)ari_call_chunk(call, n - 1), element_bytes)};
}

/* Behind what the queue has to do already. */
static double enqueue(ari_beside *b, double now, double seconds)
{
    const double begin = fmax(b->until, now);
    b->until = begin + seconds;
    return begin;
}

void ari_beside_gather(ari_beside *b, double now, const ari_chunks *c, bool again)
{
    const double begin = enqueue(b, now, ari_chunks_seconds(c));
    ari_gathered *to = again ? &b->again[b->agains++ % ARI_AGAINS] : &b->next;
    *to = (ari_gathered){.chunks = *c, .begin = begin, .waits = true};
}

double ari_beside_multiply(ari_beside *b, double now, double seconds, const ari_chunks *scattered)
{
    const bool gathered = b->next.waits;
    const ari_chunks *cut = gathered ? &b->next.chunks : scattered;
    const size_t n = cut ? ari_call_chunks(&cut->call) : 1;
    double came = b->next.begin, scatters = b->until;
    for (size_t i = 0; i < n; i++) {
        came += gathered ? chunk_seconds(&b->next.chunks, i) : 0.0;
        now = fmax(now, gathered ? came : now) + seconds * (cut ? share(cut, i) : 1.0);
        scatters = scattered ? fmax(scatters, now) + chunk_seconds(scattered, i) : scatters;
    }
    b->next.waits = false;
    b->until = scatters;
    return scattered ? fmax(now, scatters) : now;
}

double ari_beside_wait(ari_beside *b, double now, ari_role role)
{
    for (int i = 0; i < ARI_AGAINS; i++) {
        ari_gathered *g = &b->again[i];
        if (!g->waits || g->chunks.call.role != role)
            continue;
        g->waits = false;
        now = fmax(now, g->begin + ari_chunks_seconds(&g->chunks));
    }
    return now;
}
