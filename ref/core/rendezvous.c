/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/rendezvous.h"

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
    ari_sleepers_fini(&g->sleepers);
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

void ari_group_wake(ari_group *g)
{
    ari_wake(&g->sleepers);
}

static ari_wait wait_in(ari_group *g)
{
    return (ari_wait){.at = &g->sleepers, .other = &g->world->signals, .spins = g->world->spins};
}

/* For waits inside an agreed collective: nothing but other members' progress ends them (see the header). */
static void wait_for_members(ari_group *g, const _Atomic uint64_t *word, uint64_t target)
{
    ari_wait s = wait_in(g);
    for (;;) {
        const uint64_t signals = atomic_load(&g->world->signals);
        const uint64_t seen = atomic_load_explicit(word, memory_order_acquire);
        if (seen >= target)
            return;
        ari_wait_turn(&s, word, seen, signals);
    }
}

void ari_member_advance(ari_member *m, uint64_t steps_done)
{
    atomic_store(&m->group->slot[m->index].steps, steps_done);
    ari_group_wake(m->group);
}

bool ari_member_await(ari_member *m, int index, uint64_t steps_done)
{
    wait_for_members(m->group, &m->group->slot[index].steps, steps_done);
    return true;
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

typedef struct gate_wait {
    ari_wait wait;
    uint64_t signals;    /* the world's, when the waiter last looked */
    uint64_t leaving_ns; /* when it first saw that a member has left the group; 0: none has */
} gate_wait;

/* Whether a member that this one waits for will never come: its rank has returned, or it left the group a while ago. */
static void look_for_departed(ari_member *m, gate_wait *s)
{
    const ari_group *g = m->group;
    for (int i = 0; i < g->n; i++) {
        /* In this order: a rank that entered and then returned is seen to have entered. */
        const ari_return returned = atomic_load(&g->world->rank[g->rank[i]].returned);
        const bool gone = atomic_load(&g->slot[i].gone);
        const bool left = returned == ARI_RETURNED_OK || (returned == ARI_RUNS && gone); /* an error tells itself */
        if (!left || atomic_load(&g->slot[i].entered) >= m->seq)
            continue;
        const uint64_t now_ns = ari_wait_now_ns();
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
static bool must_give_up(ari_member *m, gate_wait *s)
{
    ari_world *w = m->group->world;
    const uint64_t signals = atomic_load(&w->signals);
    if (signals != s->signals || s->leaving_ns) {
        s->signals = signals;
        if (ari_world_status(w) == AR_OK)
            look_for_departed(m, s);
    }
    if (ari_wait_is_over(&s->wait))
        fail_of_timeout(m, s->wait.now_ns - s->wait.start_ns);
    return ari_world_status(w) != AR_OK;
}

/* Waits for the gate to open. False: it will not, and this member's entry is void for everybody. */
static bool wait_for_gate(ari_member *m)
{
    ari_group *g = m->group;
    const uint64_t target = m->seq << EPOCH_SHIFT;
    gate_wait s = {.wait = wait_in(g)};
    s.wait.timeout_ns = g->world->timeout_ns;
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
        ari_wait_turn(&s.wait, &g->gate, gate, s.signals);
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
    g->last = m->rank;
    if (open && g->world->with.virtual_cost)
        g->world->with.virtual_cost(g->world->with.user, g);
    if (open)
        atomic_store(&g->gate, m->seq << EPOCH_SHIFT);
    else
        atomic_fetch_or(&g->gate, DEAD);
    ari_group_wake(g);
    return open;
}

/* --- what watches ------------------------------------------------------------------------------------------------- */

uint64_t ari_group_virtual_begin(const ari_group *g, int index)
{
    return g->slot[index].virtual_begin_ns;
}

void ari_group_set_virtual_end(ari_group *g, int index, uint64_t ns)
{
    g->slot[index].virtual_end_ns = ns;
}

void ari_group_set_virtual_last(ari_group *g, int index)
{
    g->virtual_last = g->rank[index];
    g->virtual_begin_ns = g->slot[index].virtual_begin_ns;
}

static size_t count_of(const ari_call *call, int n)
{
    return call->counts && call->kind != ARI_ALL_TO_ALL ? ari_counts_before(call->counts, n) : call->count;
}

static void record_begin(ari_member *m, const ar_comm *c, const ari_call *call)
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
static void record_agreed(ari_member *m)
{
    const ari_lane *lane = ari_lane_self();
    const ari_group *g = m->group;
    if (!lane || !lane->recording)
        return;
    m->record.agreed_ns = ari_now_ns();
    m->record.last = g->last;
    m->record.virtual_last = g->virtual_last;
    m->record.virtual_agreed_ns = g->virtual_begin_ns;
}

static void record_end(ari_member *m)
{
    ari_lane *lane = ari_lane_self();
    const ari_slot *slot = &m->group->slot[m->index];
    ari_record *r = &m->record;
    if (ari_lane_is_virtual(lane))
        ari_lane_reach(lane, slot->virtual_end_ns);
    if (!lane || !lane->recording)
        return;
    r->end_ns = ari_now_ns();
    r->virtual_end_ns = lane->virtual_ns;
    r->bytes_read = atomic_load_explicit(&slot->comm->moved.read, memory_order_relaxed) - r->bytes_read;
    r->bytes_written = atomic_load_explicit(&slot->comm->moved.written, memory_order_relaxed) - r->bytes_written;
    ari_record_add(lane->recording, r, slot->call.tag);
}

static void out(ari_member *m, bool finished)
{
    if (finished)
        record_end(m);
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
    record_begin(m, c, call);
    atomic_store(&slot->entered, m->seq);
    const uint64_t before = atomic_fetch_add(&g->gate, 1);
    bool entered = false;
    if (!(before & DEAD))
        entered = (before & COUNT_MASK) + 1 == (uint64_t)g->n ? open_gate(m, alone, arg) : wait_for_gate(m);
    if (entered) {
        record_agreed(m);
        return AR_OK;
    }
    out(m, false);
    return ari_world_echo(g->world, m->rank, g);
}

ar_status ari_member_leave(ari_member *m)
{
    ari_group *g = m->group;
    const uint64_t target = ++m->leaves * (uint64_t)g->n;
    if (atomic_fetch_add(&g->leaves, 1) + 1 == target)
        ari_group_wake(g);
    else
        wait_for_members(g, &g->leaves, target);
    out(m, true);
    return AR_OK;
}

void ari_member_done(ari_member *m)
{
    out(m, true);
}
