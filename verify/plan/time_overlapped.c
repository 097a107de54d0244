/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives beside products: a second clock, that of the queue which gathers and scatters tokens. The main queue
 * waits for a chunk before it multiplies it, and for all that it has scattered. With chunks of t_a and t_g and nothing
 * else on either queue that is t_a + (K-1) max(t_a, t_g) + t_g (parallelism.md). */
#include <math.h>

#include "verify/plan/time_impl.h"

static double chunk_seconds(const ari_cut *c, size_t i)
{
    return i + 1 < ari_call_chunks(&c->call) ? c->each : c->last;
}

double ari_cut_share(const ari_cut *c, size_t i)
{
    return (double)ari_call_chunk(&c->call, i) / (double)c->call.elements;
}

double ari_cut_seconds(const ari_cut *c)
{
    return (double)(ari_call_chunks(&c->call) - 1) * c->each + c->last;
}

ari_cut ari_cut_of(const ari_links *l, const ari_op_call *call, double element_bytes)
{
    const size_t n = ari_call_chunks(call);
    return (ari_cut){.call = *call,
                     .each = ari_links_call(l, call->kind, (double)ari_call_chunk(call, 0), element_bytes),
                     .last = ari_links_call(l, call->kind, (double)ari_call_chunk(call, n - 1), element_bytes)};
}

/* Behind what the queue has to do already; when it has done it. */
static double enqueue(ari_overlapped *b, double now, double seconds)
{
    b->until = fmax(b->until, now) + seconds;
    return b->until;
}

void ari_overlapped_gather(ari_overlapped *b, double now, const ari_cut *c, bool regather)
{
    ari_prefetch *to = !regather ? &b->next : b->regather[0].waits ? &b->regather[1] : &b->regather[0];
    *to = (ari_prefetch){.chunks = *c, .waits = true, .begun = regather && !b->next.waits};
    if (to->begun)
        to->done = enqueue(b, now, ari_cut_seconds(c));
}

/* Behind the last chunk that a product takes. */
static void begin_regathers(ari_overlapped *b, double now)
{
    for (int i = 0; i < ARI_REGATHERS; i++) {
        ari_prefetch *g = &b->regather[i];
        if (!g->waits || g->begun)
            continue;
        g->begun = true;
        g->done = enqueue(b, now, ari_cut_seconds(&g->chunks));
    }
}

static double multiply_gathered(ari_overlapped *b, double now, const ari_chunked *p, const ari_cut *c)
{
    const size_t n = ari_call_chunks(&c->call);
    double come = enqueue(b, now, chunk_seconds(c, 0));
    for (size_t i = 0; i < n; i++) {
        now = fmax(now, come);
        if (i + 1 < n)
            come = enqueue(b, now, chunk_seconds(c, i + 1));
        if (i + 2 >= n)
            begin_regathers(b, now);
        now += i + 1 < n ? p->each : p->last;
    }
    return now;
}

/* A chunk's sum is waited for when the next one has been multiplied. */
static double multiply_scattered(ari_overlapped *b, double now, const ari_chunked *p, const ari_cut *c)
{
    const size_t n = ari_call_chunks(&c->call);
    double before = now;
    for (size_t i = 0; i < n; i++) {
        const double made = now + (i + 1 < n ? p->each : p->last);
        now = fmax(made, before);
        before = enqueue(b, made, chunk_seconds(c, i));
    }
    return fmax(now, before);
}

const ari_cut *ari_overlapped_next(const ari_overlapped *b)
{
    return b->next.waits ? &b->next.chunks : NULL;
}

double ari_overlapped_multiply(ari_overlapped *b, double now, const ari_chunked *product, const ari_cut *scattered)
{
    if (scattered)
        return multiply_scattered(b, now, product, scattered);
    if (!b->next.waits)
        return now + product->whole;
    b->next.waits = false;
    return multiply_gathered(b, now, product, &b->next.chunks);
}

double ari_overlapped_wait(ari_overlapped *b, double now, ari_role role)
{
    for (int i = 0; i < ARI_REGATHERS; i++) {
        ari_prefetch *g = &b->regather[i];
        if (!g->waits || g->chunks.call.role != role)
            continue;
        g->waits = false;
        now = fmax(now, g->done);
    }
    return now;
}
