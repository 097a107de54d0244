/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/comm/rendezvous_impl.h"
#include "ref/core/clock.h"
#include "ref/core/os/threads.h"
#include "ref/core/size.h"
#include "ref/core/status_private.h"

static ar_status init_ranks(ari_world *w, int ranks)
{
    const size_t bytes = (size_t)ranks * sizeof *w->rank;
    w->rank = aligned_alloc(ARI_CACHE_LINE, bytes);
    w->lines = calloc((size_t)ranks, sizeof *w->lines);
    if (!w->rank || !w->lines)
        return AR_ERR_MEMORY;
    memset(w->rank, 0, bytes);
    /* Use the ranks' clock, which may differ from the calling thread's: the thread may be a rank of another world. */
    const uint64_t now_ns = w->instruments.scheduler ? ari_scheduler_now_ns(w->instruments.scheduler) : ari_now_ns();
    for (; w->ranks < ranks; w->ranks++) {
        ari_rank_state *r = &w->rank[w->ranks];
        if (pthread_mutex_init(&r->lock, NULL) != 0)
            return AR_ERR_MEMORY;
        r->now_end = &r->activities;
        r->idle_since_ns = now_ns;
    }
    return AR_OK;
}

static ar_status init_whole(ari_world *w)
{
    ARI_OWNED int *rank_ids = malloc((size_t)w->ranks * sizeof *rank_ids);
    if (!rank_ids)
        return AR_ERR_MEMORY;
    for (int i = 0; i < w->ranks; i++)
        rank_ids[i] = i;
    return ari_group_create(&w->full_group, w, rank_ids, w->ranks);
}

ar_status ari_world_create(ari_world **out, int ranks, uint64_t timeout_ns, const ari_instruments *instruments)
{
    *out = NULL;
    ari_world *w = calloc(1, sizeof *w);
    if (!w)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a world of %d ranks", ranks);
    if (instruments)
        w->instruments = *instruments;
    w->timeout_ns = timeout_ns;
    /* Only one lane runs at a time, which needs one core, and a seed must give the same run on every machine. */
    w->cores = ari_cores();
    w->spins = !w->instruments.scheduler && ranks <= w->cores;
    w->failed_rank = -1;
    if (pthread_mutex_init(&w->lock, NULL) != 0) {
        free(w);
        return ar_error_set(AR_ERR_MEMORY, "no lock for a world of %d ranks", ranks);
    }
    if (init_ranks(w, ranks) != AR_OK || init_whole(w) != AR_OK) {
        ari_world_destroy(w);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a world of %d ranks", ranks);
    }
    *out = w;
    return AR_OK;
}

void ari_world_destroy(ari_world *w)
{
    if (!w)
        return;
    while (w->groups) { /* groups of members that were never dropped */
        ari_group *g = w->groups;
        w->groups = g->next;
        ari_group_free(g);
    }
    for (int i = 0; i < w->ranks; i++) {
        pthread_mutex_destroy(&w->rank[i].lock);
        free(w->lines[i].rows);
    }
    pthread_mutex_destroy(&w->lock);
    free(w->rank);
    free(w->lines);
    free(w->message);
    free(w);
}

bool ari_world_has_cores(const ari_world *w)
{
    return w->spins;
}

ari_group *ari_world_group(ari_world *w)
{
    return w->full_group;
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
    return &w->lines[rank].view;
}

uint64_t ari_world_number(ari_world *w, int rank)
{
    return atomic_fetch_add(&w->rank[rank].number, 1) + 1;
}

/* --- failure ------------------------------------------------------------------------------------------------------ */

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

/* Keeps only the first line of `reason`, because a world that failed inside another one adds a table. */
static void keep_line(ari_world *w, const char *reason)
{
    snprintf(w->line, sizeof w->line, "%.*s", (int)strcspn(reason, "\n"), reason);
}

void ari_world_fail(ari_world *w, int rank, const ari_group *group, ar_status st, const char *reason)
{
    pthread_mutex_lock(&w->lock);
    if (atomic_load(&w->st) == AR_OK) {
        ari_world_take_views(w);
        w->failed_rank = rank;
        w->failed_group = group ? group->id : 0;
        keep_line(w, reason);
        w->message = ari_rank_table(w->line, w->lines, w->ranks);
        atomic_store(&w->st, st);
        wake_all(w);
    }
    pthread_mutex_unlock(&w->lock);
}

ar_status ari_world_echo(ari_world *w, int rank, const ari_group *g)
{
    /* Everything about the failure was written before `st` and no longer changes. */
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
    char reason[sizeof w->line];
    snprintf(reason, sizeof reason, "rank %d failed with %s: %s", rank, ar_status_name(st),
             message[0] ? message : ari_status_text(st));
    ari_world_fail(w, rank, NULL, st, reason);
}
