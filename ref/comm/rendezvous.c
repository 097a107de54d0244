/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/rendezvous.h"

#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* --- the table of ranks ------------------------------------------------------------------------------------------- */

/* Records each rank's current activity, and writes the table of activities when the world fails. */

/* The member begins and ends a collective; kept for reports. */
static void world_begin(ari_member *m, const ari_call *call)
{
    ari_rank_state *r = &m->group->world->rank[m->rank];
    ari_activity *a = &m->activity;
    const size_t length = strnlen(call->tag, sizeof a->tag - 1);
    pthread_mutex_lock(&r->lock);
    *a = (ari_activity){
        .kind = call->kind, .group = m->group, .seq = m->seq, .since_ns = ari_wait_coarse_ns(), .link = r->now_end};
    memcpy(a->tag, call->tag, length);
    *a->link = a;
    r->now_end = &a->next;
    pthread_mutex_unlock(&r->lock);
}

/* The member begins and ends a collective; kept for reports. */
static void world_end(ari_member *m, bool finished)
{
    ari_rank_state *r = &m->group->world->rank[m->rank];
    ari_activity *a = &m->activity;
    pthread_mutex_lock(&r->lock);
    *a->link = a->next;
    if (a->next)
        a->next->link = a->link;
    else
        r->now_end = a->link;
    if (finished)
        r->last_finished = *a;
    r->idle_since_ns = ari_wait_coarse_ns();
    pthread_mutex_unlock(&r->lock);
}

void ari_world_swapped(ari_member *m, const ari_call *call)
{
    ari_rank_state *r = &m->group->world->rank[m->rank];
    const size_t length = strnlen(call->tag, sizeof r->last_finished.tag - 1);
    pthread_mutex_lock(&r->lock);
    r->last_finished.kind = call->kind;
    r->last_finished.group = m->group;
    r->last_finished.seq = m->seq;
    memcpy(r->last_finished.tag, call->tag, length);
    r->last_finished.tag[length] = '\0';
    r->idle_since_ns = ari_wait_coarse_ns();
    pthread_mutex_unlock(&r->lock);
}

/* --- taking views ------------------------------------------------------------------------------------------------- */

/* Kind, number and tag, with room for all of them. */
enum { ACTIVITY_BYTES = 32 + 20 + ARI_TAG_BYTES };

int ari_activity_name(char *text, size_t size, ari_kind kind, uint64_t seq, const char *tag)
{
    return snprintf(text, size, "%s #%llu%s%s", ari_kind_name(kind), (unsigned long long)seq, tag[0] ? " " : "", tag);
}

static int write_activity(char *text, size_t size, const ari_activity *a)
{
    return ari_activity_name(text, size, a->kind, a->seq, a->tag);
}

static double seconds_since(uint64_t since_ns, uint64_t now_ns)
{
    return now_ns > since_ns ? (double)(now_ns - since_ns) * 1e-9 : 0.0;
}

/* Joins all activities of the rank into one text; the rank's lock is held. */
static void join_activities(const ari_rank_state *r, char *text, size_t size)
{
    static const char ellipsis[] = "; ...";
    size_t used = 0;
    for (const ari_activity *a = r->activities; a; a = a->next) {
        char entry[ACTIVITY_BYTES];
        const size_t length = (size_t)write_activity(entry, sizeof entry, a) + (used > 0 ? 2 : 0);
        const size_t capacity =
            size - used - (a->next ? sizeof ellipsis - 1 : 0); /* `more` fits behind all but the last */
        if (used > 0 && length >= capacity) {
            snprintf(text + used, size - used, "%s", ellipsis);
            return;
        }
        snprintf(text + used, capacity, "%s%s", used > 0 ? "; " : "", entry);
        used += length < capacity ? length : capacity - 1;
    }
}

/* The rank's lock held. */
static void take_rows(ari_rank_lines *l, const ari_rank_state *r, uint64_t now_ns)
{
    for (const ari_activity *a = r->activities; a; a = a->next)
        l->row_count++;
    l->rows = calloc(l->row_count, sizeof *l->rows);
    ari_rank_row *row = l->rows;
    for (const ari_activity *a = r->activities; row && a; a = a->next, row++) {
        write_activity(row->current, sizeof row->current, a);
        ari_ranks_describe(a->group->rank, a->group->n, row->group, sizeof row->group);
        row->waiting_s = seconds_since(a->since_ns, now_ns);
    }
}

static void take_view(ari_rank_lines *l, ari_rank_state *r, uint64_t now_ns)
{
    ari_rank_view *v = &l->view;
    pthread_mutex_lock(&r->lock);
    if (r->last_finished.group)
        write_activity(v->last_finished, sizeof v->last_finished, &r->last_finished);
    else
        snprintf(v->last_finished, sizeof v->last_finished, "none");
    const ari_activity *oldest = r->activities;
    if (oldest) {
        ari_ranks_describe(oldest->group->rank, oldest->group->n, v->current_row.group, sizeof v->current_row.group);
        join_activities(r, v->current_row.current, sizeof v->current_row.current);
        take_rows(l, r, now_ns);
    } else {
        snprintf(v->current_row.current, sizeof v->current_row.current, "%s",
                 atomic_load(&r->returned) == ARI_RUNS ? "running" : "returned");
    }
    v->current_row.waiting_s = seconds_since(oldest ? oldest->since_ns : r->idle_since_ns, now_ns);
    pthread_mutex_unlock(&r->lock);
}

void ari_world_take_views(ari_world *w)
{
    const uint64_t now_ns = ari_wait_now_ns();
    for (int i = 0; i < w->ranks; i++)
        take_view(&w->lines[i], &w->rank[i], now_ns);
}

/* --- the table ---------------------------------------------------------------------------------------------------- */

static size_t rows_of(const ari_rank_lines *l)
{
    return l->rows ? l->row_count : 1;
}

static const ari_rank_row *row_at(const ari_rank_lines *l, size_t i)
{
    return l->rows ? &l->rows[i] : &l->view.current_row;
}

static bool same_place(const ari_rank_lines *a, const ari_rank_lines *b)
{
    bool equal = strcmp(a->view.last_finished, b->view.last_finished) == 0 && rows_of(a) == rows_of(b);
    for (size_t i = 0; equal && i < rows_of(a); i++) {
        const ari_rank_row *x = row_at(a, i), *y = row_at(b, i);
        equal = strcmp(x->current, y->current) == 0 && strcmp(x->group, y->group) == 0;
    }
    return equal;
}

/* Widths of the table's columns, as wide as their contents, which include names of layers and tensors. */
typedef struct widths {
    int last_finished, current, group;
} widths;

static void widen_column(int *width, const char *text)
{
    const int length = (int)strlen(text);
    *width = length > *width ? length : *width;
}

static widths widths_of(const ari_rank_lines *lines, int ranks)
{
    widths width = {36, 36, 12};
    for (int i = 0; i < ranks; i++) {
        widen_column(&width.last_finished, lines[i].view.last_finished);
        for (size_t k = 0; k < rows_of(&lines[i]); k++) {
            widen_column(&width.current, row_at(&lines[i], k)->current);
            widen_column(&width.group, row_at(&lines[i], k)->group);
        }
    }
    return width;
}

static void write_row(FILE *stream, const widths *width, const char *rank_label, const char *last_finished,
                      const ari_rank_row *row, const char *time)
{
    fprintf(stream, "\n%9s  %-*s  %-*s  %-*s  %s", rank_label, width->last_finished, last_finished, width->current,
            row->current, width->group, row->group, time);
}

/* Neighbouring ranks at the same point share their lines, so that the table of a large world is readable. A rank in
 * several collectives has one line for each, the oldest first. */
static void write_table(FILE *stream, const ari_rank_lines *lines, int ranks)
{
    const widths width = widths_of(lines, ranks);
    write_row(stream, &width, "rank", "last finished", &(ari_rank_row){.current = "now", .group = "with ranks"}, "for");
    for (int begin = 0, end; begin < ranks; begin = end) {
        const ari_rank_lines *l = &lines[begin];
        for (end = begin + 1; end < ranks && same_place(l, &lines[end]);)
            end++;
        char rank_label[32];
        snprintf(rank_label, sizeof rank_label, end == begin + 1 ? "%d" : "%d-%d", begin, end - 1);
        for (size_t i = 0; i < rows_of(l); i++) {
            const ari_rank_row *row = row_at(l, i);
            double longest = row->waiting_s;
            for (int k = begin + 1; k < end; k++) {
                const double waits = row_at(&lines[k], i)->waiting_s;
                longest = waits > longest ? waits : longest;
            }
            char time[32];
            snprintf(time, sizeof time, "%.3f s", longest);
            write_row(stream, &width, i == 0 ? rank_label : "", i == 0 ? l->view.last_finished : "", row, time);
        }
    }
}

char *ari_rank_table(const char *line, const ari_rank_lines *lines, int ranks)
{
    char *text = NULL;
    size_t size = 0;
    FILE *stream = open_memstream(&text, &size);
    if (!stream)
        return NULL;
    fputs(line, stream);
    write_table(stream, lines, ranks);
    if (ari_text_closed(stream, &text))
        return text;
    free(text);
    return NULL;
}

/* --- rendezvous --------------------------------------------------------------------------------------------------- */

#define COUNT_MASK ((uint64_t)0xffff) /* worlds have at most 4096 ranks */
#define DEAD ((uint64_t)1 << 16)
enum { EPOCH_SHIFT = 17 };

/* --- waiting ------------------------------------------------------------------------------------------------------ */

enum { WHY_BYTES = 768 };

static ari_wait wait_in(ari_group *g)
{
    return (ari_wait){.sleepers = &g->sleepers, .other_word = &g->world->signals, .spins = g->world->spins};
}

/* Wait in an agreed collective. Only other members' progress ends it, which it checks from time to time. */
typedef struct inner_wait {
    ari_wait wait;
    uint64_t progress, since_ns; /* progress of all members, and the time of its last change; 0: not read yet */
} inner_wait;

/* Longest delay of a report after the timeout. */
#define LONGEST_POLL_NS ((uint64_t)25000000)

static uint64_t poll_ns(const ari_world *w)
{
    const uint64_t part = w->timeout_ns / 16;
    return part > LONGEST_POLL_NS ? LONGEST_POLL_NS : part + (w->timeout_ns > 0);
}

static bool is_broken(const ari_group *g)
{
    return (atomic_load(&g->leaves) & ARI_BROKEN) != 0;
}

/* Returns the count of leaves at which all members have left the member's collective. */
static uint64_t all_have_left(const ari_member *m)
{
    return (m->leaves + 1) * (uint64_t)m->group->n;
}

/* Returns a number that grows whenever any member makes progress. */
static uint64_t progress_of(const ari_group *g)
{
    uint64_t sum = atomic_load(&g->leaves);
    for (int i = 0; i < g->n; i++)
        sum += atomic_load(&g->slot[i].steps) + atomic_load_explicit(&g->slot[i].pulses, memory_order_relaxed);
    return sum;
}

/* Returns true if nothing has moved for the timeout; waited_ns is the time waited. Also informs the other members that
 * this member waits. */
static bool is_stuck(ari_member *m, inner_wait *s, uint64_t *waited_ns)
{
    ari_group *g = m->group;
    if (!ari_wait_is_over(&s->wait) || is_broken(g))
        return false;
    const uint64_t now_ns = s->wait.now_ns, progress = progress_of(g);
    s->wait.timeout_ns = now_ns - s->wait.start_ns + poll_ns(g->world);
    atomic_store(&g->slot[m->index].waits, true);
    if (s->since_ns == 0 || progress != s->progress) {
        s->progress = progress;
        s->since_ns = now_ns;
    }
    *waited_ns = now_ns - s->since_ns;
    return *waited_ns >= g->world->timeout_ns;
}

void ari_member_describe(const ari_member *m, const ari_call *call, char *text, size_t size)
{
    const ari_group *g = m->group;
    const bool message = call->kind == ARI_SEND || call->kind == ARI_RECV;
    const uint64_t seq = m->seq + (atomic_load(&m->busy) ? 0 : 1);
    char call_text[192], group[96];
    ari_call_describe(call, g->n, call_text, sizeof call_text);
    ari_ranks_describe(g->rank, g->n, group, sizeof group);
    snprintf(text, size, "%s, %s #%llu of rank%s %s", call_text, message ? "message" : "collective",
             (unsigned long long)seq, ARI_PLURAL(g->n), group);
}

/* Writes the ranks of the members for which `is_missing` holds, and returns their number. */
static int describe_missing(ari_member *m, bool (*is_missing)(const ari_member *m, const ari_slot *s), char *text,
                            size_t size)
{
    const ari_group *g = m->group;
    ARI_OWNED int *missing = calloc((size_t)g->n, sizeof *missing);
    int n = 0;
    for (int i = 0; missing && i < g->n; i++) {
        if (is_missing(m, &g->slot[i]))
            missing[n++] = g->rank[i];
    }
    ari_ranks_describe(missing, n, text, size);
    return missing ? n : -1;
}

static bool does_not_wait(const ari_member *m, const ari_slot *s)
{
    (void)m;
    return !atomic_load(&s->waits);
}

static bool has_not_entered(const ari_member *m, const ari_slot *s)
{
    return atomic_load(&s->entered) < m->seq;
}

/* Ends the world after a timeout, unless an awaited member has just made progress. */
static void fail_of_timeout(ari_member *m, uint64_t waited_ns, const char *location,
                            bool (*is_missing)(const ari_member *m, const ari_slot *s))
{
    const ari_group *g = m->group;
    char collective[384], missing[128], why[WHY_BYTES];
    const int n = describe_missing(m, is_missing, missing, sizeof missing);
    if (n == 0)
        return;
    ari_member_describe(m, &g->slot[m->index].call, collective, sizeof collective);
    snprintf(why, sizeof why, "rank %d waited %.3f s %s %s, for rank%s %s", m->rank, (double)waited_ns * 1e-9, location,
             collective, ARI_PLURAL(n), n < 0 ? "?" : missing);
    ari_world_fail(g->world, m->rank, NULL, AR_ERR_TIMEOUT, why);
}

/* Marks the collective as aborted, unless all members have started to leave it. The world has already failed, so a
 * member that sees the mark finds the reason. */
static void mark_broken(ari_group *g, uint64_t total_leaves)
{
    uint64_t observed = atomic_load(&g->leaves);
    while ((observed & ~ARI_BROKEN) < total_leaves &&
           !atomic_compare_exchange_weak(&g->leaves, &observed, observed | ARI_BROKEN)) {
    }
    ari_world_signal(g->world, g);
}

static void look_for_progress(ari_member *m, inner_wait *s, uint64_t total_leaves)
{
    ari_world *w = m->group->world;
    uint64_t waited_ns;
    if (!is_stuck(m, s, &waited_ns))
        return;
    fail_of_timeout(m, waited_ns, "in the middle of", does_not_wait);
    if (ari_world_status(w) != AR_OK)
        mark_broken(m->group, total_leaves);
}

/* Waits until word without ARI_BROKEN reaches the target. Returns false if the collective is aborted, unless the member
 * is only waiting for it to end (`leaving`). `total_leaves`: count of leaves at the end of the collective. */
static bool wait_inside(ari_member *m, const _Atomic uint64_t *word, uint64_t target, uint64_t total_leaves,
                        bool leaving)
{
    ari_group *g = m->group;
    inner_wait s = {.wait = wait_in(g)};
    s.wait.timeout_ns = poll_ns(g->world);
    bool good;
    for (;;) {
        const uint64_t signals = atomic_load(&g->world->signals);
        const uint64_t observed = atomic_load_explicit(word, memory_order_acquire);
        good = leaving || !is_broken(g);
        if (!good || (observed & ~ARI_BROKEN) >= target)
            break;
        ari_wait_turn(&s.wait, word, observed, signals);
        look_for_progress(m, &s, total_leaves);
    }
    if (s.since_ns)
        atomic_store(&g->slot[m->index].waits, false);
    return good;
}

void ari_member_advance(ari_member *m, uint64_t steps_done)
{
    atomic_store(&m->group->slot[m->index].steps, steps_done);
    ari_group_wake(m->group);
    ari_wait_yield();
}

void ari_member_pulse(ari_member *m)
{
    _Atomic uint64_t *pulses = &m->group->slot[m->index].pulses;
    atomic_store_explicit(pulses, atomic_load_explicit(pulses, memory_order_relaxed) + 1, memory_order_relaxed);
}

bool ari_member_await(ari_member *m, int index, uint64_t steps_done)
{
    return wait_inside(m, &m->group->slot[index].steps, steps_done, all_have_left(m), false);
}

void ari_member_break(ari_member *m, ar_status st, const char *why)
{
    ari_world_fail(m->group->world, m->rank, m->group, st, why);
    mark_broken(m->group, all_have_left(m));
}

/* --- ranks that are late or lost ---------------------------------------------------------------------------------- */

void ari_member_sleep(ari_member *m, uint64_t ns)
{
    ari_group *g = m->group;
    ari_world *w = g->world;
    const uint64_t deadline = ari_deadline_ns(ari_wait_now_ns(), ns);
    for (;;) {
        const uint64_t signals = atomic_load(&w->signals);
        if (ari_world_status(w) != AR_OK || ari_wait_now_ns() >= deadline)
            return;
        ari_wait_until(&g->sleepers, &w->signals, signals, deadline);
    }
}

/* Returns true if every other rank has returned or is held. */
static bool nobody_is_left(const ari_world *w, int rank)
{
    for (int i = 0; i < w->ranks; i++) {
        if (i != rank && atomic_load(&w->rank[i].returned) == ARI_RUNS && atomic_load(&w->rank[i].hold_count) == 0)
            return false;
    }
    return true;
}

void ari_member_hold(ari_member *m, const char *why)
{
    ari_group *g = m->group;
    ari_world *w = g->world;
    const uint64_t deadline = w->timeout_ns ? ari_deadline_ns(ari_wait_now_ns(), w->timeout_ns) : UINT64_MAX;
    atomic_fetch_add(&w->rank[m->rank].hold_count, 1);
    ari_world_signal(w, NULL);
    for (;;) {
        const uint64_t signals = atomic_load(&w->signals);
        const bool late = ari_wait_now_ns() >= deadline;
        if (ari_world_status(w) == AR_OK && late && nobody_is_left(w, m->rank))
            ari_world_fail(w, m->rank, NULL, AR_ERR_TIMEOUT, why);
        if (ari_world_status(w) != AR_OK)
            break;
        ari_wait_until(&g->sleepers, &w->signals, signals, late ? UINT64_MAX : deadline);
    }
    atomic_fetch_sub(&w->rank[m->rank].hold_count, 1);
}

/* --- entering ----------------------------------------------------------------------------------------------------- */

static void fail_of_departed(ari_member *m, int index, bool returned)
{
    const ari_group *g = m->group;
    char collective[384], why[WHY_BYTES];
    ari_member_describe(m, &g->slot[m->index].call, collective, sizeof collective);
    snprintf(why, sizeof why, "rank %d %s while rank %d waits for it in %s", g->rank[index],
             returned ? "returned" : "destroyed its communicator", m->rank, collective);
    ari_world_fail(g->world, m->rank, g, AR_ERR_MISMATCH, why);
}

/* Time that other ranks wait for a failed rank to return with its own error, which is the error to report. A failed
 * rank destroys its communicators before it returns. */
static const uint64_t WAY_OUT_NS = 500000000;

typedef struct gate_wait {
    ari_wait wait;
    uint64_t signals;    /* the world's, when the waiter last looked */
    uint64_t leaving_ns; /* time at which this member first saw that a member has left the group; 0: none has */
} gate_wait;

/* Checks for an awaited member that will never arrive: its rank has returned, or it left the group some time ago. */
static void look_for_departed(ari_member *m, gate_wait *s)
{
    const ari_group *g = m->group;
    for (int i = 0; i < g->n; i++) {
        /* Read in this order, so that a rank that entered and then returned is seen as entered. */
        const ari_return returned = atomic_load(&g->world->rank[g->rank[i]].returned);
        const bool is_dropped = atomic_load(&g->slot[i].is_dropped);
        const bool has_left =
            returned == ARI_RETURNED_OK || (returned == ARI_RUNS && is_dropped); /* an error is reported by the rank
                                                                                    itself */
        if (!has_left || atomic_load(&g->slot[i].entered) >= m->seq)
            continue;
        const uint64_t now_ns = ari_wait_now_ns();
        s->leaving_ns = s->leaving_ns ? s->leaving_ns : now_ns;
        if (returned == ARI_RUNS && now_ns - s->leaving_ns < WAY_OUT_NS)
            continue;
        fail_of_departed(m, i, returned == ARI_RETURNED_OK);
        return;
    }
}

/* Limits the next turn to the timeout, or to the time at which a member that left must have reported its error. */
static void limit_turn(gate_wait *s, const ari_world *w)
{
    const uint64_t limit_ns = s->leaving_ns ? s->leaving_ns - s->wait.start_ns + WAY_OUT_NS : 0;
    const bool comes_first = w->timeout_ns == 0 || limit_ns < w->timeout_ns;
    const bool is_ahead = limit_ns > s->wait.now_ns - s->wait.start_ns;
    s->wait.timeout_ns = comes_first && is_ahead ? limit_ns : w->timeout_ns;
}

/* Returns true if this member must stop waiting for the others to enter. Ends the world if it is the first to know. */
static bool must_give_up(ari_member *m, gate_wait *s)
{
    ari_world *w = m->group->world;
    const uint64_t signals = atomic_load(&w->signals), waited_ns = s->wait.now_ns - s->wait.start_ns;
    if (signals != s->signals || s->leaving_ns) {
        s->signals = signals;
        if (ari_world_status(w) == AR_OK)
            look_for_departed(m, s);
        limit_turn(s, w);
    }
    if (w->timeout_ns && s->wait.start_ns && waited_ns >= w->timeout_ns)
        fail_of_timeout(m, waited_ns, "in", has_not_entered);
    return ari_world_status(w) != AR_OK;
}

/* All members have entered, so the last one decides for all: it opens the gate or kills it. It may be held up in the
 * work that it does for all; then the world fails here, which releases it. */
static bool wait_for_last(ari_member *m)
{
    ari_group *g = m->group;
    const uint64_t target = m->seq << EPOCH_SHIFT;
    inner_wait s = {.wait = wait_in(g)};
    s.wait.timeout_ns = poll_ns(g->world);
    uint64_t gate, waited_ns;
    while ((gate = atomic_load_explicit(&g->gate, memory_order_acquire)) < target && !(gate & DEAD)) {
        const uint64_t signals = atomic_load(&g->world->signals);
        if (atomic_load(&g->gate) != gate)
            continue;
        ari_wait_turn(&s.wait, &g->gate, gate, signals);
        if (ari_world_status(g->world) == AR_OK && is_stuck(m, &s, &waited_ns))
            fail_of_timeout(m, waited_ns, "in the middle of", does_not_wait);
    }
    if (s.since_ns)
        atomic_store(&g->slot[m->index].waits, false);
    return gate >= target;
}

/* Waits for the gate to open. Returns false if it will not; this member's entry is then cancelled for all members. */
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
        if ((gate & COUNT_MASK) == (uint64_t)g->n)
            return wait_for_last(m);
        /* A member may withdraw; the same atomic step closes the gate for good, so that no member counts on it. */
        if (must_give_up(m, &s)) {
            if (atomic_compare_exchange_strong(&g->gate, &gate, gate | DEAD)) {
                ari_group_wake(g);
                return false;
            }
            continue;
        }
        ari_wait_turn(&s.wait, &g->gate, gate, s.signals);
    }
}

/* Called by the last member: compares the calls, runs the function that one member runs alone, and opens the gate.
 * Returns false if it closed the gate for good. */
static bool open_gate(ari_member *m, const ari_alone *alone)
{
    ari_group *g = m->group;
    char why[WHY_BYTES];
    if (ari_calls_compare(g, why, sizeof why) != AR_OK) {
        ari_world_fail(g->world, m->rank, g, AR_ERR_MISMATCH, why);
    } else if (ari_world_status(g->world) == AR_OK && alone) {
        const ar_status st = alone->run(g, alone->arg);
        if (st != AR_OK)
            ari_world_fail(g->world, m->rank, g, st, ar_error_message());
    }
    const bool open = ari_world_status(g->world) == AR_OK;
    g->last_rank = m->rank;
    if (open && g->world->instruments.virtual_cost)
        g->world->instruments.virtual_cost(g->world->instruments.user, g);
    if (open && g->world->instruments.paced)
        g->paced_ns = ari_now_ns();
    if (open)
        atomic_store(&g->gate, m->seq << EPOCH_SHIFT);
    else
        atomic_fetch_or(&g->gate, DEAD);
    ari_group_wake(g);
    return open;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

/* Trace records of a member's collectives, and its virtual clock. */

static size_t count_of(const ari_call *call, int n)
{
    return call->counts && call->kind != ARI_ALL_TO_ALL ? ari_counts_before(call->counts, n) : call->count;
}

/* Record the collective that the member enters, then the agreement (agree_record), then the member's exit. */
static void begin_record(ari_member *m, const ar_comm *c, const ari_call *call)
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

/* Returns when the collective may end on the real clock. */
static uint64_t paced_end(const ari_member *m)
{
    const ari_group *g = m->group;
    const uint64_t end = g->slot[m->index].virtual_end_ns, begin = g->virtual_begin_ns;
    const uint64_t duration_ns = end > begin ? end - begin : 0;
    return g->paced_ns + (duration_ns < g->world->timeout_ns ? duration_ns : g->world->timeout_ns);
}

/* Sleeps, unless the world ends. */
static void wait_for_pace(const ari_member *m)
{
    enum { LOOKS_UP_NS = 50000000 };
    ari_group *g = m->group;
    for (uint64_t now_ns = ari_now_ns(); now_ns < m->paced_ns && ari_world_status(g->world) == AR_OK;
         now_ns = ari_now_ns()) {
        const uint64_t observed = atomic_load(&g->gate), soon = now_ns + LOOKS_UP_NS;
        ari_wait_until(&g->sleepers, &g->gate, observed, soon < m->paced_ns ? soon : m->paced_ns);
    }
}

/* Records that the collective is agreed upon. No other member writes the data read here before this member enters its
 * next collective. */
static void agree_record(ari_member *m)
{
    const ari_lane *lane = ari_lane_self();
    const ari_group *g = m->group;
    m->paced_ns = g->world->instruments.paced ? paced_end(m) : 0;
    if (!lane || !lane->recording)
        return;
    m->record.agreed_ns = ari_now_ns();
    m->record.last_rank = g->last_rank;
    m->record.virtual_last = g->virtual_last;
    m->record.virtual_from = g->slot[m->index].virtual_from;
}

/* A collective that an error ended is recorded too, so that a trace of a failing run shows what each rank was doing. */
static void end_record(ari_member *m, bool finished)
{
    ari_lane *lane = ari_lane_self();
    const ari_slot *slot = &m->group->slot[m->index];
    ari_record *r = &m->record;
    if (finished && ari_lane_is_virtual(lane))
        ari_lane_reach(lane, slot->virtual_end_ns);
    if (finished && m->paced_ns > 0)
        wait_for_pace(m);
    m->paced_ns = 0;
    if (!lane || !lane->recording)
        return;
    r->broken = !finished;
    r->end_ns = ari_now_ns();
    r->virtual_end_ns = lane->virtual_ns;
    if (r->agreed_ns == 0) { /* never reached: all of the time was waiting */
        r->agreed_ns = r->end_ns;
        r->last_rank = r->virtual_last = m->rank;
    }
    r->bytes_read = atomic_load_explicit(&slot->comm->moved.read, memory_order_relaxed) - r->bytes_read;
    r->bytes_written = atomic_load_explicit(&slot->comm->moved.written, memory_order_relaxed) - r->bytes_written;
    ari_record_add(lane->recording, r, slot->call.tag);
}

/* --- entering and leaving ----------------------------------------------------------------------------------------- */

static void out(ari_member *m, bool finished)
{
    end_record(m, finished);
    world_end(m, finished);
    atomic_store(&m->busy, 0);
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

ar_status ari_member_enter(ari_member *m, ar_comm *c, const ari_call *call, const ari_alone *alone)
{
    ari_group *g = m->group;
    ari_wait_yield();
    if (ari_world_status(g->world) != AR_OK)
        return ari_world_echo(g->world, m->rank, g);
    if (atomic_exchange(&m->busy, 1) != 0)
        return used_twice(m, call);
    ari_slot *slot = &g->slot[m->index];
    m->seq++;
    slot->call = *call;
    slot->comm = c;
    atomic_store_explicit(&slot->steps, 0, memory_order_relaxed);
    world_begin(m, call);
    begin_record(m, c, call);
    atomic_store(&slot->entered, m->seq);
    const uint64_t before = atomic_fetch_add(&g->gate, 1);
    bool entered = false;
    if (!(before & DEAD))
        entered = (before & COUNT_MASK) + 1 == (uint64_t)g->n ? open_gate(m, alone) : wait_for_gate(m);
    if (entered) {
        agree_record(m);
        return AR_OK;
    }
    if (alone && alone->undo)
        alone->undo(c);
    out(m, false);
    return ari_world_echo(g->world, m->rank, g);
}

void ari_member_part_done(ari_member *m)
{
    ari_group *g = m->group;
    const uint64_t before = atomic_fetch_add(&g->leaves, 1);
    if ((before & ~ARI_BROKEN) + 1 == all_have_left(m))
        ari_group_wake(g);
}

ar_status ari_member_leave_shared(ari_member *m)
{
    ari_group *g = m->group;
    const uint64_t total_leaves = all_have_left(m);
    (void)wait_inside(m, &g->leaves, total_leaves, total_leaves, true);
    m->leaves++;
    /* All members find the same: a mark that is set later belongs to a later collective, which this member has not
     * entered, so it cannot have been agreed upon. */
    const bool broken = is_broken(g);
    out(m, !broken);
    ari_wait_yield();
    return broken ? ari_world_echo(g->world, m->rank, g) : AR_OK;
}

ar_status ari_member_leave(ari_member *m)
{
    ari_member_part_done(m);
    return ari_member_leave_shared(m);
}

void ari_member_done(ari_member *m)
{
    out(m, true);
    ari_wait_yield();
}
