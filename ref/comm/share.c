/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>

#include "ref/comm/rendezvous_impl.h"
#include "ref/core/wait.h"

/* A collective cut into parts, each of which is done by one of the members that have a core. */

void ari_group_share(ari_group *g)
{
    /* The members of the last such collective have left it: this one they have all entered. */
    atomic_store_explicit(&g->parts, 0, memory_order_relaxed);
}

/* Takes the part, unless it has begun. */
static bool take_part(ari_group *g, int part)
{
    const uint64_t bit = (uint64_t)1 << part;
    return !(atomic_load_explicit(&g->parts, memory_order_relaxed) & bit) &&
           !(atomic_fetch_or_explicit(&g->parts, bit, memory_order_relaxed) & bit);
}

/* A schedule that is explored has no cores: it must be the same each time. */
static int core_of(const ari_world *w)
{
    const int cpu = w->with.scheduler ? 0 : sched_getcpu();
    return cpu < 0 ? 0 : cpu % w->cores;
}

/* Two cores walk towards each other, each pair from the ends of its range, so that one which is done early takes what
 * the other would have come to last. */
int ari_member_next_part(ari_member *m)
{
    ari_group *g = m->group;
    const int n = g->n, cores = g->world->cores, core = core_of(g->world);
    const int first = core % 2 == 0 ? core * n / cores : (core + 1) * n / cores + n - 1;
    ari_wait_yield();
    for (int k = 0; k < n; k++) {
        const int part = (core % 2 == 0 ? first + k : first - k) % n;
        if (take_part(g, part))
            return part;
    }
    return -1;
}
