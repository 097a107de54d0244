/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/rendezvous.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/rendezvous_impl.h"

#define COUNT_MASK ((uint64_t)0xffff) /* worlds have at most 4096 ranks */
#define DEAD ((uint64_t)1 << 16)
enum { EPOCH_SHIFT = 17 };

/* --- groups ------------------------------------------------------------------------------------------------------- */

void ari_group_free(ari_group *g)
{
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
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
    if (!g->rank || !g->slot || pthread_mutex_init(&g->lock, NULL) != 0)
        goto no_lock;
    if (ari_cond_init(&g->changed) != 0)
        goto no_cond;
    memset(g->slot, 0, (size_t)n * sizeof *g->slot);
    return g;
no_cond:
    pthread_mutex_destroy(&g->lock);
no_lock:
    free(g->slot);
    free(g->rank);
    free(g);
    return NULL;
}

ar_status ari_group_create(ari_group **gives, ari_world *w, const int *ranks, int n)
{
    *gives = NULL;
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
    g->at = &w->groups;
    if (g->next)
        g->next->at = &g->next;
    w->groups = g;
    pthread_mutex_unlock(&w->lock);
    *gives = g;
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

void ari_member_init(ari_member *m, ari_group *g, int index)
{
    *m = (ari_member){.group = g, .index = index, .rank = g->rank[index], .activity = -1};
}

void ari_member_fini(ari_member *m)
{
    ari_group *g = m->group;
    ari_world *w = g->world;
    pthread_mutex_lock(&w->lock);
    atomic_store(&g->slot[m->index].gone, true);
    const bool last = --g->members_left == 0;
    if (last) {
        *g->at = g->next;
        if (g->next)
            g->next->at = g->at;
    } else {
        atomic_fetch_add(&w->signals, 1);
        ari_group_wake(g);
    }
    pthread_mutex_unlock(&w->lock);
    if (last)
        ari_group_free(g);
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

/* A waiter spins while every rank has a core, then yields, then sleeps. Measured on two cores: with more ranks than
 * cores any spinning before the first yield costs a time slice of the rank that is waited for, and so it does where
 * other processes want the cores: hence a few microseconds. Sleeping at once costs ten times what yielding does; after
 * a millisecond the peer is busy and the core belongs to it. */
enum { SPIN_TURNS = 200 };
#define YIELD_NS ((uint64_t)1000000)
/* A sleeper looks again at least this often. Every change wakes it; this bounds the damage if one did not. */
#define SLEEP_NS ((uint64_t)1000000000)

typedef struct wait_state {
    unsigned turns;
    uint64_t start_ns, now_ns; /* 0: the clock has not been read yet */
    uint64_t signals;          /* the world's, when the waiter last looked */
    uint64_t leaving_ns;       /* when it first saw that a member has left the group; 0: none has */
} wait_state;

static inline void relax_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void ari_group_wake(ari_group *g)
{
    /* Sequentially consistent with sleep_on: either the sleeper's count is seen here, or the change is seen there. */
    if (atomic_load(&g->sleepers) == 0)
        return;
    pthread_mutex_lock(&g->lock);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static void sleep_on(ari_group *g, wait_state *s, const _Atomic uint64_t *word, uint64_t seen, uint64_t deadline_ns)
{
    const uint64_t slice = ari_deadline_ns(s->now_ns, SLEEP_NS);
    pthread_mutex_lock(&g->lock);
    atomic_fetch_add(&g->sleepers, 1);
    if (atomic_load(word) == seen && atomic_load(&g->world->signals) == s->signals)
        ari_cond_wait_until(&g->changed, &g->lock, slice < deadline_ns ? slice : deadline_ns);
    atomic_fetch_sub(&g->sleepers, 1);
    pthread_mutex_unlock(&g->lock);
    s->now_ns = ari_now_ns();
}

/* One turn of waiting for `word` to change from `seen`; may return for no reason. */
static void wait_turn(ari_group *g, wait_state *s, const _Atomic uint64_t *word, uint64_t seen, uint64_t deadline_ns)
{
    s->turns++;
    if (g->world->spins && s->turns < SPIN_TURNS) {
        relax_core();
        return;
    }
    if (s->start_ns == 0)
        s->start_ns = s->now_ns = ari_now_ns();
    if (s->now_ns - s->start_ns >= YIELD_NS) {
        sleep_on(g, s, word, seen, deadline_ns);
        return;
    }
    sched_yield();
    s->now_ns = ari_now_ns(); /* every time: a turn among thousands of ranks takes long */
}

/* For waits inside an agreed collective: nothing but other members' progress ends them (see the header). */
static void wait_for_members(ari_group *g, const _Atomic uint64_t *word, uint64_t target)
{
    wait_state s = {.signals = atomic_load(&g->world->signals)};
    for (;;) {
        const uint64_t seen = atomic_load_explicit(word, memory_order_acquire);
        if (seen >= target)
            return;
        wait_turn(g, &s, word, seen, UINT64_MAX);
        s.signals = atomic_load(&g->world->signals);
    }
}

void ari_member_advance(ari_member *m, uint64_t steps_done)
{
    atomic_store(&m->group->slot[m->index].steps, steps_done);
    ari_group_wake(m->group);
}

void ari_member_await(ari_member *m, int index, uint64_t steps_done)
{
    wait_for_members(m->group, &m->group->slot[index].steps, steps_done);
}

/* --- entering ----------------------------------------------------------------------------------------------------- */

enum { WHY_BYTES = 768 };

static void fail_of_departed(ari_member *m, int index, bool returned)
{
    const ari_group *g = m->group;
    char call[160], why[WHY_BYTES];
    ari_call_describe(&g->slot[m->index].call, g->n, call, sizeof call);
    snprintf(why, sizeof why, "rank %d %s while rank %d waits for it in %s, collective #%llu of their group",
             g->rank[index], returned ? "returned" : "destroyed its communicator", m->rank, call,
             (unsigned long long)m->seq);
    ari_world_fail(g->world, m->rank, g, AR_ERR_MISMATCH, why);
}

/* A rank that fails destroys its communicators on its way out, and returns with its own error, which is the one to
 * tell: so long the others wait for it. */
static const uint64_t WAY_OUT_NS = 500000000;

/* Whether a member that this one waits for will never come: its rank has returned, or it left the group a while ago. */
static void look_for_departed(ari_member *m, wait_state *s)
{
    const ari_group *g = m->group;
    for (int i = 0; i < g->n; i++) {
        /* In this order: a rank that entered and then returned is seen to have entered. */
        const ari_return returned = atomic_load(&g->world->rank[g->rank[i]].returned);
        const bool gone = atomic_load(&g->slot[i].gone);
        const bool left = returned == ARI_RETURNED_OK || (returned == ARI_RUNS && gone); /* an error tells itself */
        if (!left || atomic_load(&g->slot[i].entered) >= m->seq)
            continue;
        const uint64_t now_ns = ari_now_ns();
        s->leaving_ns = s->leaving_ns ? s->leaving_ns : now_ns;
        if (returned == ARI_RUNS && now_ns - s->leaving_ns < WAY_OUT_NS)
            continue;
        fail_of_departed(m, i, !gone);
        return;
    }
}

static void fail_of_timeout(ari_member *m, uint64_t waited_ns)
{
    const ari_group *g = m->group;
    char call[160], missing_text[128], group[96], why[WHY_BYTES];
    ari_call_describe(&g->slot[m->index].call, g->n, call, sizeof call);
    ari_ranks_describe(g->rank, g->n, group, sizeof group);
    int *missing = malloc((size_t)g->n * sizeof *missing), n = 0;
    for (int i = 0; missing && i < g->n; i++) {
        if (atomic_load(&g->slot[i].entered) < m->seq)
            missing[n++] = g->rank[i];
    }
    ari_ranks_describe(missing, n, missing_text, sizeof missing_text);
    const bool all_came = missing && n == 0; /* just now: the gate is about to open */
    free(missing);
    if (all_came)
        return;
    snprintf(why, sizeof why, "rank %d waited %.3f s in %s, collective #%llu of ranks %s, for rank%s %s", m->rank,
             (double)waited_ns * 1e-9, call, (unsigned long long)m->seq, group, n == 1 ? "" : "s", missing_text);
    ari_world_fail(g->world, m->rank, NULL, AR_ERR_TIMEOUT, why);
}

/* Whether this member must give up waiting for the others to enter. Ends the world where it is the first to know. */
static bool must_give_up(ari_member *m, wait_state *s)
{
    ari_world *w = m->group->world;
    const uint64_t signals = atomic_load(&w->signals);
    if (signals != s->signals || s->leaving_ns) {
        s->signals = signals;
        if (ari_world_status(w) == AR_OK)
            look_for_departed(m, s);
    }
    if (s->now_ns - s->start_ns >= w->timeout_ns)
        fail_of_timeout(m, s->now_ns - s->start_ns);
    return ari_world_status(w) != AR_OK;
}

/* Waits for the gate to open. False: it will not, and this member's entry is void for everybody. */
static bool wait_for_gate(ari_member *m)
{
    ari_group *g = m->group;
    const uint64_t target = m->seq << EPOCH_SHIFT;
    wait_state s = {0};
    for (;;) {
        uint64_t gate = atomic_load_explicit(&g->gate, memory_order_acquire);
        if (gate >= target)
            return true;
        if (gate & DEAD)
            return false;
        /* Once all have entered, the last one decides for all: opens the gate, or kills it. Before that, a member may
         * withdraw; it closes the gate for good in the same atomic step, so that nobody can count on it. */
        if ((gate & COUNT_MASK) < (uint64_t)g->n && must_give_up(m, &s)) {
            if (atomic_compare_exchange_strong(&g->gate, &gate, gate | DEAD)) {
                ari_group_wake(g);
                return false;
            }
            continue;
        }
        wait_turn(g, &s, &g->gate, gate, s.start_ns ? ari_deadline_ns(s.start_ns, g->world->timeout_ns) : UINT64_MAX);
    }
}

/* The last member: compares, does what is done alone, opens the gate. False: it killed the gate. */
static bool open_gate(ari_member *m, ari_alone_fn alone, void *arg)
{
    ari_group *g = m->group;
    char why[WHY_BYTES];
    if (ari_calls_compare(g, why, sizeof why) != AR_OK) {
        ari_world_fail(g->world, m->rank, g, AR_ERR_MISMATCH, why);
    } else if (ari_world_status(g->world) == AR_OK && alone) {
        const ar_status st = alone(g, arg);
        if (st != AR_OK)
            ari_world_fail(g->world, m->rank, g, st, ar_error_message());
    }
    const bool open = ari_world_status(g->world) == AR_OK;
    if (open)
        atomic_store(&g->gate, m->seq << EPOCH_SHIFT);
    else
        atomic_fetch_or(&g->gate, DEAD);
    ari_group_wake(g);
    return open;
}

static void out(ari_member *m, bool finished)
{
    ari_world_end(m->group->world, m->rank, m->activity, finished);
    m->activity = -1;
    atomic_store(&m->in, 0);
}

static ar_status used_twice(ari_member *m, const ari_call *call)
{
    char text[160], why[WHY_BYTES];
    ari_call_describe(call, m->group->n, text, sizeof text);
    snprintf(why, sizeof why, "rank %d calls %s while another of its threads is in a call of the same communicator",
             m->rank, text);
    ari_world_fail(m->group->world, m->rank, NULL, AR_ERR_ARG, why);
    return ari_world_echo(m->group->world, m->rank, m->group);
}

ar_status ari_member_enter(ari_member *m, ar_comm *c, const ari_call *call, ari_alone_fn alone, void *arg)
{
    ari_group *g = m->group;
    if (ari_world_status(g->world) != AR_OK)
        return ari_world_echo(g->world, m->rank, g);
    if (atomic_exchange(&m->in, 1) != 0)
        return used_twice(m, call);
    ari_slot *slot = &g->slot[m->index];
    m->seq++;
    slot->call = *call;
    slot->comm = c;
    atomic_store_explicit(&slot->steps, 0, memory_order_relaxed);
    m->activity = ari_world_begin(g->world, m->rank, g, call, m->seq);
    atomic_store(&slot->entered, m->seq);
    const uint64_t before = atomic_fetch_add(&g->gate, 1);
    bool entered = false;
    if (!(before & DEAD))
        entered = (before & COUNT_MASK) + 1 == (uint64_t)g->n ? open_gate(m, alone, arg) : wait_for_gate(m);
    if (entered)
        return AR_OK;
    out(m, false);
    return ari_world_echo(g->world, m->rank, g);
}

void ari_member_leave(ari_member *m)
{
    ari_group *g = m->group;
    const uint64_t target = ++m->leaves * (uint64_t)g->n;
    if (atomic_fetch_add(&g->leaves, 1) + 1 == target)
        ari_group_wake(g);
    else
        wait_for_members(g, &g->leaves, target);
    out(m, true);
}

void ari_member_done(ari_member *m)
{
    out(m, true);
}
