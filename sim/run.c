/* SPDX-License-Identifier: Apache-2.0 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/os/threads.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "sim/sim_private.h"
#include "sim/wire.h"

enum { MOST_RANKS = 4096 };
#define DEFAULT_TIMEOUT_NS ((uint64_t)10000000000u)

/* All ranks start, or none: if a thread cannot be created, no rank's function runs. */
typedef struct start {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum { START_WAIT, START_GO, START_CANCEL } state;
    int core; /* core on which rank 0 starts */
} start;

typedef struct rank_run {
    pthread_t thread;
    start *gate;
    ari_world *world;
    ari_sim_comm *comm;
    ari_lane *lane; /* NULL: nothing watches */
    ar_rank_fn fn;
    void *arg;
    int rank;
    ar_status st; /* status returned by fn */
} rank_run;

static bool may_start(start *s)
{
    pthread_mutex_lock(&s->lock);
    while (s->state == START_WAIT)
        pthread_cond_wait(&s->changed, &s->lock);
    const bool go = s->state == START_GO;
    pthread_mutex_unlock(&s->lock);
    return go;
}

static void open_start(start *s, bool go)
{
    pthread_mutex_lock(&s->lock);
    s->state = go ? START_GO : START_CANCEL;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void *rank_main(void *arg)
{
    rank_run *r = arg;
    if (!may_start(r->gate))
        return NULL;
    /* otherwise the system may place two ranks on one core, where they would alternate at every barrier */
    if (ari_world_has_cores(r->world))
        ari_begin_on_core(r->gate->core + r->rank);
    ari_lane_enter(r->lane);
    ar_error_clear();
    r->st = r->fn(&r->comm->base, r->arg);
    ari_world_returned(r->world, r->rank, r->st, r->st == AR_OK ? "" : ar_error_message());
    ari_lane_leave(r->lane);
    return NULL;
}

/* Starts and joins all threads. */
static ar_status run_threads(rank_run *runs, int ranks)
{
    start gate = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, START_WAIT, ari_this_core()};
    ar_status st = AR_OK;
    int started = 0;
    for (; started < ranks; started++) {
        runs[started].gate = &gate;
        const int rc = ari_thread_create(&runs[started].thread, rank_main, &runs[started]);
        if (rc != 0) {
            st = ar_error_set(AR_ERR_MEMORY, "ar_sim_run: no thread for rank %d of %d: %s", started, ranks,
                              strerror(rc));
            break;
        }
    }
    open_start(&gate, st == AR_OK);
    for (int i = 0; i < started; i++)
        pthread_join(runs[i].thread, NULL);
    return st;
}

static void fill_reports(ar_sim_rank_report *reports, const rank_run *runs, int ranks)
{
    _Static_assert(sizeof reports->last == sizeof((ari_rank_view *)0)->last_finished, "one length of text");
    for (int i = 0; reports && i < ranks; i++) {
        const ari_rank_view *v = ari_world_view(runs[i].world, i);
        reports[i].rank = i;
        snprintf(reports[i].status, sizeof reports[i].status, "%s", ar_status_name(runs[i].st));
        memcpy(reports[i].last, v->last_finished, sizeof v->last_finished);
        memcpy(reports[i].current, v->current_row.current, sizeof v->current_row.current);
        reports[i].waiting_s = v->current_row.waiting_s;
    }
}

ar_status ari_sim_options_check(const ar_sim_options *o)
{
    AR_TRY(ari_check_choice("algorithm", (int)o->algorithm, AR_SIM_LAST + 1));
    if (o->cluster)
        AR_TRY(ari_virtual_check(o->cluster));
    if (o->paced && (!o->cluster || o->explore))
        return ar_error_set(AR_ERR_ARG, "links are paced by a cluster's virtual time, and not under a deterministic "
                                        "schedule, in which time stands still");
    if (o->trace && ari_trace_lanes(o->trace) > 0)
        return ar_error_set(AR_ERR_ARG, "the trace holds another run; an empty one is expected");
    return AR_OK;
}

static ar_status check_run(int ranks, const ar_sim_options *o, ar_rank_fn fn)
{
    if (ranks < 1 || ranks > MOST_RANKS)
        return ar_error_set(AR_ERR_ARG, "ar_sim_run: %d ranks; 1 to %d expected", ranks, MOST_RANKS);
    if (!fn)
        return ar_error_set(AR_ERR_ARG, "ar_sim_run: the ranks' function is missing");
    if (!o)
        return AR_OK;
    AR_TRY(ari_sim_options_check(o));
    return ari_fault_check(o->faults, o->fault_count, ranks);
}

/* Creates the run's instruments as the options request. */
static ar_status instruments_of(ari_instruments *instruments, const ar_sim_options *o)
{
    *instruments = (ari_instruments){.trace = o->trace};
    if (o->cluster) {
        instruments->rates = ari_rates_of(o->cluster->flops, o->cluster->gpu);
        instruments->paced = o->paced;
        instruments->virtual_cost = ari_virtual_cost;
        instruments->user = (void *)(uintptr_t)o->cluster;
    }
    return o->explore ? ari_scheduler_create(&instruments->scheduler, o->schedule_seed) : AR_OK;
}

/* The first failure of the world becomes this thread's. */
static void tell_failure(ar_status st, const ari_world *world, const ar_sim_options *o)
{
    /* If the message is too long, the table loses its end, not the line that replays the run. */
    enum { TABLE_BYTES = 8000 };
    if (o->explore)
        ar_error_set(st, "%.*s\nschedule seed %llu replays this run", TABLE_BYTES, ari_world_error(world),
                     (unsigned long long)o->schedule_seed);
    else
        ar_error_set(st, "%s", ari_world_error(world));
}

ar_status ar_sim_run(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg, ar_sim_rank_report *reports)
{
    AR_TRY(check_run(ranks, options, fn));
    if (reports)
        memset(reports, 0, (size_t)ranks * sizeof *reports);
    const ar_sim_options defaults = {.algorithm = AR_SIM_AUTO};
    const ar_sim_options o = options ? *options : defaults;
    ari_instruments instruments = {0};
    ari_world *world = NULL;
    ari_channels *channels = NULL;
    ar_status st = AR_OK;
    ARI_OWNED rank_run *runs = calloc((size_t)ranks, sizeof *runs);
    if (!runs)
        return ar_error_set(AR_ERR_MEMORY, "ar_sim_run: no memory for %d ranks", ranks);
    AR_TRY_TO(done, st, instruments_of(&instruments, &o));
    AR_TRY_TO(done, st,
              ari_world_create(&world, ranks, o.timeout_ns ? o.timeout_ns : DEFAULT_TIMEOUT_NS, &instruments));
    AR_TRY_TO(done, st, ari_channels_create(&channels, ari_world_group(world)));
    for (int i = 0; i < ranks; i++) {
        runs[i] = (rank_run){.world = world, .fn = fn, .arg = arg, .rank = i};
        AR_TRY_TO(done, st, ari_sim_comm_create(&runs[i].comm, ari_world_group(world), channels, i, &o));
        runs[i].comm->of_world = true;
        if (instruments.trace || instruments.scheduler || instruments.virtual_cost)
            AR_TRY_TO(done, st, ari_lane_create(&runs[i].lane, NULL, &instruments, i, "main"));
    }
    AR_TRY_TO(done, st, run_threads(runs, ranks));
    st = ari_world_status(world);
    if (st != AR_OK) {
        fill_reports(reports, runs, ranks);
        tell_failure(st, world, &o);
    }
    if (instruments.scheduler && o.schedule)
        ari_scheduler_choices(instruments.scheduler, &o.schedule->choices, &o.schedule->hash);
done:
    for (int i = 0; i < ranks; i++) {
        if (!runs[i].comm)
            ari_channels_leave(channels, i);
        ari_sim_comm_free(runs[i].comm);
        ari_lane_destroy(runs[i].lane);
    }
    ari_world_destroy(world);
    ari_scheduler_destroy(instruments.scheduler);
    return st;
}

/* --- schedules ---------------------------------------------------------------------------------------------------- */

static ar_status check_exploration(const ar_sim_options *o, uint64_t seed, uint64_t seeds, const uint64_t *failing)
{
    if (!failing)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: no place for the failing seed");
    if (seeds == 0)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: 0 seeds; at least 1 expected");
    if (seeds - 1 > UINT64_MAX - seed)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: %llu seeds from %llu on; the last seed is %llu",
                            (unsigned long long)seeds, (unsigned long long)seed, (unsigned long long)UINT64_MAX);
    if (o && o->trace && seeds > 1)
        return ar_error_set(AR_ERR_ARG, "ar_sim_explore: one trace for %llu runs; trace the run of one seed",
                            (unsigned long long)seeds);
    return AR_OK;
}

ar_status ar_sim_explore(int ranks, const ar_sim_options *options, ar_rank_fn fn, void *arg,
                         ar_status (*begin)(void *arg), uint64_t seed, uint64_t seeds, uint64_t *failing)
{
    AR_TRY(check_exploration(options, seed, seeds, failing));
    ar_sim_options o = {.algorithm = AR_SIM_AUTO};
    if (options)
        o = *options;
    o.explore = true;
    for (uint64_t i = 0; i < seeds; i++) {
        *failing = o.schedule_seed = seed + i;
        if (begin)
            AR_TRY(begin(arg));
        AR_TRY(ar_sim_run(ranks, &o, fn, arg, NULL));
    }
    return AR_OK;
}
