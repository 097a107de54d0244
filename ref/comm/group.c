/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"
#include "ref/core/os/threads.h"

void ari_group_free(ari_group *g)
{
    ari_sleepers_fini(&g->sleepers);
    for (int i = 0; i < g->n; i++)
        free(g->slot[i].data);
    free(g->slot);
    free(g->rank);
    free(g);
}

static ari_group *group_alloc(int n)
{
    ari_group *g = aligned_alloc(ARI_CACHE_LINE, sizeof *g);
    if (!g)
        return NULL;
    memset(g, 0, sizeof *g);
    g->rank = malloc((size_t)n * sizeof *g->rank);
    g->slot = aligned_alloc(ARI_CACHE_LINE, (size_t)n * sizeof *g->slot);
    if (g->rank && g->slot && ari_sleepers_init(&g->sleepers) == 0) {
        memset(g->slot, 0, (size_t)n * sizeof *g->slot);
        return g;
    }
    free(g->slot);
    free(g->rank);
    free(g);
    return NULL;
}

ar_status ari_group_create(ari_group **out, ari_world *w, const int *ranks, int n)
{
    *out = NULL;
    ari_group *g = group_alloc(n);
    if (!g)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a group of %d ranks", n);
    g->world = w;
    g->n = n;
    g->members_left = n;
    memcpy(g->rank, ranks, (size_t)n * sizeof *ranks);
    pthread_mutex_lock(&w->lock);
    g->id = ++w->groups_made;
    g->next = w->groups;
    g->link = &w->groups;
    if (g->next)
        g->next->link = &g->next;
    w->groups = g;
    pthread_mutex_unlock(&w->lock);
    *out = g;
    return AR_OK;
}

int ari_group_size(const ari_group *g)
{
    return g->n;
}

ari_world *ari_group_world(const ari_group *g)
{
    return g->world;
}

int ari_group_rank(const ari_group *g, int index)
{
    return g->rank[index];
}

const ari_call *ari_group_call(const ari_group *g, int index)
{
    return &g->slot[index].call;
}

ar_comm *ari_group_comm(const ari_group *g, int index)
{
    return g->slot[index].comm;
}

/* Inserts into a sorted list. */
int ari_group_members_of(const ari_group *g, int color, int *members)
{
    int n = 0;
    for (int i = 0; i < g->n; i++) {
        const ari_call *call = &g->slot[i].call;
        if (call->color != color)
            continue;
        int pos = n++;
        for (; pos > 0 && g->slot[members[pos - 1]].call.key > call->key; pos--)
            members[pos] = members[pos - 1];
        members[pos] = i;
    }
    return n;
}

void ari_member_init(ari_member *m, ari_group *g, int index)
{
    *m = (ari_member){.group = g, .index = index, .rank = g->rank[index]};
}

void ari_member_fini(ari_member *m)
{
    ari_group *g = m->group;
    ari_world *w = g->world;
    pthread_mutex_lock(&w->lock);
    atomic_store(&g->slot[m->index].is_dropped, true);
    const bool is_last = --g->members_left == 0;
    if (is_last) {
        *g->link = g->next;
        if (g->next)
            g->next->link = g->link;
    } else {
        atomic_fetch_add(&w->signals, 1);
        ari_group_wake(g);
    }
    pthread_mutex_unlock(&w->lock);
    if (is_last)
        ari_group_free(g);
}

void ari_group_wake(ari_group *g)
{
    ari_wake(&g->sleepers);
}

/* --- shared work -------------------------------------------------------------------------------------------------- */

/* Collective split into parts, each of which one of the members that have a core does. */

void ari_group_share(ari_group *g)
{
    /* All members have left the previous such collective, because all have entered this one. */
    atomic_store_explicit(&g->parts, 0, memory_order_relaxed);
}

/* Claims the part, unless it has begun. */
static bool take_part(ari_group *g, int part)
{
    const uint64_t bit = (uint64_t)1 << part;
    return !(atomic_load_explicit(&g->parts, memory_order_relaxed) & bit) &&
           !(atomic_fetch_or_explicit(&g->parts, bit, memory_order_relaxed) & bit);
}

/* An explored schedule has no cores, because it must be the same each time. */
static int core_of(const ari_world *w)
{
    return w->instruments.scheduler ? 0 : ari_this_core() % w->cores;
}

/* Two cores work towards each other, each pair from the ends of its range, so that a core that finishes early takes the
 * parts that the other would have done last. */
int ari_member_next_part(ari_member *m)
{
    ari_group *g = m->group;
    const int n = g->n, cores = g->world->cores, core = core_of(g->world);
    const int start_part = core % 2 == 0 ? core * n / cores : (core + 1) * n / cores + n - 1;
    ari_wait_yield();
    for (int k = 0; k < n; k++) {
        const int part = (core % 2 == 0 ? start_part + k : start_part - k) % n;
        if (take_part(g, part))
            return part;
    }
    return -1;
}
