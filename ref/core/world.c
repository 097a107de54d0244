/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/clock.h"
#include "ref/core/rendezvous_impl.h"

static ar_status init_ranks(ari_world *w, int ranks)
{
    const size_t bytes = (size_t)ranks * sizeof *w->rank;
    w->rank = aligned_alloc(ARI_CACHE_LINE, bytes);
    if (!w->rank)
        return AR_ERR_MEMORY;
    memset(w->rank, 0, bytes);
    const uint64_t now = ari_wait_now_ns();
    for (; w->ranks < ranks; w->ranks++) {
        ari_rank_state *r = &w->rank[w->ranks];
        if (pthread_mutex_init(&r->lock, NULL) != 0)
            return AR_ERR_MEMORY;
        r->idle_since_ns = now;
    }
    return AR_OK;
}

static ar_status init_whole(ari_world *w)
{
    int *all = malloc((size_t)w->ranks * sizeof *all);
    if (!all)
        return AR_ERR_MEMORY;
    for (int i = 0; i < w->ranks; i++)
        all[i] = i;
    const ar_status st = ari_group_create(&w->whole, w, all, w->ranks);
    free(all);
    return st;
}

ar_status ari_world_create(ari_world **gives, int ranks, uint64_t timeout_ns, const ari_instruments *with)
{
    *gives = NULL;
    ari_world *w = calloc(1, sizeof *w);
    if (!w)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a world of %d ranks", ranks);
    if (with)
        w->with = *with;
    w->timeout_ns = timeout_ns;
    w->spins = ranks <= ari_usable_cores();
    w->failed_rank = -1;
    if (pthread_mutex_init(&w->lock, NULL) != 0) {
        free(w);
        return ar_error_set(AR_ERR_MEMORY, "no lock for a world of %d ranks", ranks);
    }
    if (init_ranks(w, ranks) != AR_OK || init_whole(w) != AR_OK) {
        ari_world_destroy(w);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a world of %d ranks", ranks);
    }
    *gives = w;
    return AR_OK;
}

void ari_world_destroy(ari_world *w)
{
    if (!w)
        return;
    while (w->groups) { /* of members that were never dropped */
        ari_group *g = w->groups;
        w->groups = g->next;
        ari_group_free(g);
    }
    for (int i = 0; i < w->ranks; i++)
        pthread_mutex_destroy(&w->rank[i].lock);
    pthread_mutex_destroy(&w->lock);
    free(w->rank);
    free(w->message);
    free(w);
}

const ari_instruments *ari_world_instruments(const ari_world *w)
{
    return &w->with;
}

ari_group *ari_world_group(ari_world *w)
{
    return w->whole;
}

ar_status ari_world_status(const ari_world *w)
{
    return atomic_load(&w->st);
}

const char *ari_world_error(const ari_world *w)
{
    if (ari_world_status(w) == AR_OK)
        return "";
    return w->message ? w->message : w->line;
}

const ari_rank_view *ari_world_view(const ari_world *w, int rank)
{
    return &w->rank[rank].view;
}

/* --- what each rank is doing -------------------------------------------------------------------------------------- */

int ari_world_begin(ari_world *w, int rank, const ari_group *g, const ari_call *call, uint64_t seq)
{
    ari_rank_state *r = &w->rank[rank];
    const uint64_t now = ari_wait_now_ns();
    int line = 0;
    pthread_mutex_lock(&r->lock);
    while (line < ARI_ACTIVITIES && r->now[line].on)
        line++;
    if (line < ARI_ACTIVITIES) {
        ari_activity *a = &r->now[line];
        a->on = true;
        a->kind = call->kind;
        a->group = g;
        a->seq = seq;
        a->since_ns = now;
        const size_t length = strnlen(call->tag, sizeof a->tag - 1);
        memcpy(a->tag, call->tag, length);
        a->tag[length] = '\0';
    }
    pthread_mutex_unlock(&r->lock);
    return line < ARI_ACTIVITIES ? line : -1;
}

void ari_world_end(ari_world *w, int rank, int activity, bool finished)
{
    if (activity < 0)
        return;
    ari_rank_state *r = &w->rank[rank];
    const uint64_t now = ari_wait_now_ns();
    pthread_mutex_lock(&r->lock);
    if (finished)
        r->last = r->now[activity];
    r->now[activity].on = false;
    r->idle_since_ns = now;
    pthread_mutex_unlock(&r->lock);
}

static int write_activity(char *text, size_t size, const ari_activity *a)
{
    return snprintf(text, size, "%s #%llu%s%s", ari_kind_name(a->kind), (unsigned long long)a->seq,
                    a->tag[0] ? " " : "", a->tag);
}

/* The rank's lock held. */
static const ari_activity *oldest_after(const ari_rank_state *r, const ari_activity *after)
{
    const ari_activity *best = NULL;
    for (const ari_activity *a = r->now; a < r->now + ARI_ACTIVITIES; a++) {
        const bool later = !after || a->since_ns > after->since_ns || (a->since_ns == after->since_ns && a > after);
        if (a->on && later && (!best || a->since_ns < best->since_ns))
            best = a;
    }
    return best;
}

static void take_view(ari_rank_state *r, uint64_t now_ns)
{
    ari_rank_view *v = &r->view;
    pthread_mutex_lock(&r->lock);
    uint64_t since = r->idle_since_ns;
    if (r->last.on)
        write_activity(v->last, sizeof v->last, &r->last);
    else
        snprintf(v->last, sizeof v->last, "none");
    const ari_activity *a = oldest_after(r, NULL);
    if (!a) {
        snprintf(v->current, sizeof v->current, "%s", atomic_load(&r->returned) == ARI_RUNS ? "running" : "returned");
    } else {
        since = a->since_ns;
        ari_ranks_describe(a->group->rank, a->group->n, v->group, sizeof v->group);
        size_t used = 0;
        for (; a && used < sizeof v->current; a = oldest_after(r, a)) {
            if (used > 0)
                used += (size_t)snprintf(v->current + used, sizeof v->current - used, "; ");
            if (used < sizeof v->current)
                used += (size_t)write_activity(v->current + used, sizeof v->current - used, a);
        }
    }
    v->waiting_s = now_ns > since ? (double)(now_ns - since) * 1e-9 : 0.0;
    pthread_mutex_unlock(&r->lock);
}

/* --- failure ------------------------------------------------------------------------------------------------------ */

/* Neighbouring ranks that were at the same place share a line, so that the table of a large world can be read. */
static void write_table(FILE *to, const ari_world *w)
{
    const char *const row = "\n%9s  %-36s  %-36s  %-12s  %s";
    fprintf(to, row, "rank", "last finished", "now", "with ranks", "for");
    for (int i = 0, end; i < w->ranks; i = end) {
        const ari_rank_view *v = &w->rank[i].view;
        double longest = v->waiting_s;
        for (end = i + 1; end < w->ranks; end++) {
            const ari_rank_view *u = &w->rank[end].view;
            if (strcmp(u->last, v->last) != 0 || strcmp(u->current, v->current) != 0 || strcmp(u->group, v->group) != 0)
                break;
            longest = u->waiting_s > longest ? u->waiting_s : longest;
        }
        char who[32], time[32];
        snprintf(time, sizeof time, "%.3f s", longest);
        if (end == i + 1)
            snprintf(who, sizeof who, "%d", i);
        else
            snprintf(who, sizeof who, "%d-%d", i, end - 1);
        fprintf(to, row, who, v->last, v->current, v->group, time);
    }
}

static char *make_message(const ari_world *w)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    if (!to)
        return NULL;
    fputs(w->line, to);
    write_table(to, w);
    if (fclose(to) != 0) {
        free(text);
        return NULL;
    }
    return text;
}

static void wake_all(ari_world *w)
{
    atomic_fetch_add(&w->signals, 1);
    for (ari_group *g = w->groups; g; g = g->next)
        ari_group_wake(g);
}

void ari_world_signal(ari_world *w, ari_group *g)
{
    pthread_mutex_lock(&w->lock);
    if (g) {
        atomic_fetch_add(&w->signals, 1);
        ari_group_wake(g);
    } else {
        wake_all(w);
    }
    pthread_mutex_unlock(&w->lock);
}

/* Only the first line of `what`: a world that failed inside another one brings a table of its own. */
static void keep_line(ari_world *w, const char *what)
{
    snprintf(w->line, sizeof w->line, "%.*s", (int)strcspn(what, "\n"), what);
}

void ari_world_fail(ari_world *w, int rank, const ari_group *with, ar_status st, const char *what)
{
    pthread_mutex_lock(&w->lock);
    if (atomic_load(&w->st) == AR_OK) {
        const uint64_t now = ari_wait_now_ns();
        for (int i = 0; i < w->ranks; i++)
            take_view(&w->rank[i], now);
        w->failed_rank = rank;
        w->failed_group = with ? with->id : 0;
        keep_line(w, what);
        w->message = make_message(w);
        atomic_store(&w->st, st);
        wake_all(w);
    }
    pthread_mutex_unlock(&w->lock);
}

ar_status ari_world_echo(ari_world *w, int rank, const ari_group *g)
{
    /* Everything about the failure was written before `st` and does not change any more. */
    const ar_status st = ari_world_status(w);
    if (rank == w->failed_rank || (g && g->id == w->failed_group))
        return ar_error_set(st, "%s", w->line);
    return ar_error_set(AR_ERR_ABORTED, "another rank failed: %s", w->line);
}

void ari_world_returned(ari_world *w, int rank, ar_status st, const char *message)
{
    atomic_store(&w->rank[rank].returned, st == AR_OK ? ARI_RETURNED_OK : ARI_RETURNED_ERROR);
    if (st == AR_OK) {
        ari_world_signal(w, NULL);
        return;
    }
    char what[sizeof w->line];
    snprintf(what, sizeof what, "rank %d failed with %s: %s", rank, ar_status_name(st),
             message[0] ? message : ar_status_text(st));
    ari_world_fail(w, rank, NULL, st, what);
}
