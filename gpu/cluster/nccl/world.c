/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gpu/cluster/nccl/comm.h"
#include "gpu/native.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/core/status_private.h"

/* Interval at which NCCL is asked for errors of its threads. */
#define ERRORS_NS UINT64_C(100000000)
/* Longest wait for a thread inside of NCCL. NCCL's calls return at once unless a GPU accepts no more work. */
#define INSIDE_NS UINT64_C(10000000000)
enum { REAP_ABOVE = 16 };

/* --- the failure -------------------------------------------------------------------------------------------------- */

ar_status ari_nccl_world_status(ari_nccl_world *w)
{
    const char *message = NULL;
    const ar_status st = ari_failure_get(w->failure, &message);
    return st == AR_OK ? AR_OK : ar_error_set(st, "%s", message);
}

/* Takes over the failure of the store. What waits on a stream gets it once the stream continues. */
static void take_failure(ari_nccl_world *w)
{
    const ar_status st = ari_store_status(w->store);
    if (st == AR_OK)
        return;
    const size_t size = strlen(ar_error_message()) + 64;
    char *text = malloc(size);
    if (text)
        snprintf(text, size, "%s%s", st == AR_ERR_ABORTED ? "another rank failed: " : "", ar_error_message());
    ari_failure_set(w->failure, st, text ? text : ari_status_text(st));
    free(text);
}

/* Returns a communicator that no thread uses, and holds its `use`. With `by_force` it may be in use, and nothing is
 * held. *has_more: others remain. */
static ari_nccl_comm *next_to_abort(ari_nccl_world *w, void **comm, bool by_force, bool *has_more)
{
    ari_nccl_comm *c;
    *has_more = false;
    pthread_mutex_lock(&w->lock);
    for (c = w->comms; c; c = c->next) {
        if (!c->let_go && (by_force || pthread_mutex_trylock(&c->use) == 0))
            break;
        *has_more = *has_more || !c->let_go;
    }
    if (c) {
        c->let_go = true;
        *comm = atomic_exchange(&c->comm, NULL);
    }
    pthread_mutex_unlock(&w->lock);
    return c;
}

/* Releases everything that waits in NCCL, on the host or on the GPU; afterwards NCCL is not used any more.
 * ncclCommAbort frees the communicator, so no thread may be inside of NCCL with it, and later threads find none. A
 * thread that does not return is not waited for: it waits for the abort. */
static void abort_all(ari_nccl_world *w)
{
    const uint64_t patience = ari_deadline_ns(ari_now_ns(), INSIDE_NS);
    for (bool has_more = true; has_more;) {
        const bool by_force = ari_now_ns() > patience;
        void *comm = NULL;
        ari_nccl_comm *c = next_to_abort(w, &comm, by_force, &has_more);
        if (!c && has_more)
            usleep(100);
        if (!c)
            continue;
        if (comm)
            (void)w->nccl.CommAbort(comm); /* the earlier failure explains more than this result */
        if (!by_force)
            pthread_mutex_unlock(&c->use);
        has_more = true;
    }
}

static void world_failed(void *user)
{
    take_failure(user);
    abort_all(user);
}

void ari_nccl_world_end(ari_nccl_world *w, ar_status st, const char *why)
{
    ari_store_fail(w->store, st, why);
    take_failure(w); /* the store's thread does this too, but maybe not yet */
}

ar_status ari_nccl_world_fail(ari_nccl_world *w, ar_status st)
{
    char why[1024];
    snprintf(why, sizeof why, "rank %d: %s", w->rank, ar_error_message());
    ari_nccl_world_end(w, st, why);
    return ari_nccl_world_status(w);
}

/* --- calls under way ---------------------------------------------------------------------------------------------- */

/* NULL: NULL. */
static ari_pending *pending_at(ari_flight_call *c)
{
    return (ari_pending *)c;
}

/* `lock` held. */
static void leave(ari_nccl_world *w, ari_pending *p, bool is_done, uint64_t now_ns)
{
    ari_flight_leave(&w->flight, &p->flight_call, is_done, now_ns);
    p->flight_call.next = w->spare ? &w->spare->flight_call : NULL;
    w->spare = p;
}

/* Requires `lock`. Returns in *is_done whether the call is complete; if it is, the next call of its communicator no
 * longer waits for anything. Errors: those of the stream. */
static ar_status end_call(ari_nccl_world *w, ari_pending *p, uint64_t now_ns, bool *is_done)
{
    ari_flight_call *next_call = p->flight_call.next;
    *is_done = false;
    AR_TRY(p->enqueued ? p->mark->ops->poll(p->mark, is_done) : AR_OK);
    if (!*is_done)
        return AR_OK;
    leave(w, p, true, now_ns);
    while (next_call && pending_at(next_call)->comm != p->comm)
        next_call = next_call->next;
    if (next_call)
        next_call->since_ns = now_ns;
    return AR_OK;
}

/* Removes finished calls; `lock` is held. Thousands of short calls may come and go between two checks of the watcher,
 * so each new call removes up to two finished ones. Errors are left to the watcher. */
static void reap(ari_nccl_world *w, uint64_t now_ns)
{
    bool is_done = true;
    for (int i = 0; i < 2 && is_done && w->flight.n_open > REAP_ABOVE; i++) {
        if (end_call(w, pending_at(w->flight.open), now_ns, &is_done) != AR_OK)
            return;
    }
}

ar_status ari_nccl_world_enter(ari_nccl_world *w, ari_pending **result, ari_nccl_comm *c, ari_flight_group *g,
                               const ari_call *call)
{
    const uint64_t now_ns = ari_now_ns();
    pthread_mutex_lock(&w->lock);
    ari_pending *p = w->spare;
    if (p)
        w->spare = pending_at(p->flight_call.next);
    else
        p = calloc(1, sizeof *p);
    if (p) {
        p->comm = c;
        p->enqueued = false;
        ari_flight_enter(&w->flight, &p->flight_call, g, call, now_ns);
        reap(w, now_ns);
    }
    pthread_mutex_unlock(&w->lock);
    *result = p;
    return p ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for a collective");
}

ar_status ari_nccl_world_enqueued(ari_nccl_world *w, ari_pending *p, ari_stream *s)
{
    ar_status st = AR_OK;
    pthread_mutex_lock(&w->lock);
    if (!s) {
        leave(w, p, true, ari_now_ns());
    } else {
        if (p->mark && p->mark->ops != s->ops) {
            ari_mark_destroy(p->mark);
            p->mark = NULL;
        }
        st = s->ops->mark(s, &p->mark);
        p->enqueued = st == AR_OK;
    }
    pthread_mutex_unlock(&w->lock);
    return st;
}

void ari_nccl_world_drop(ari_nccl_world *w, ari_pending *p)
{
    pthread_mutex_lock(&w->lock);
    leave(w, p, false, 0);
    pthread_mutex_unlock(&w->lock);
}

/* Requires `lock`. Returns the oldest call of c in progress after `flight_call`; NULL: none. */
static ari_pending *call_of(const ari_nccl_comm *c, ari_flight_call *flight_call)
{
    while (flight_call && pending_at(flight_call)->comm != c)
        flight_call = flight_call->next;
    return pending_at(flight_call);
}

void ari_nccl_world_forget(ari_nccl_world *w, ari_nccl_comm *c)
{
    pthread_mutex_lock(&w->lock);
    for (ari_pending *p; (p = call_of(c, w->flight.open));)
        leave(w, p, true, ari_now_ns());
    pthread_mutex_unlock(&w->lock);
}

ar_status ari_nccl_world_drain(ari_nccl_world *w, const ari_nccl_comm *c)
{
    for (;; usleep(100)) {
        ari_pending *p;
        ar_status st = ari_nccl_world_status(w);
        bool is_done = true;
        pthread_mutex_lock(&w->lock);
        while (st == AR_OK && is_done && (p = call_of(c, w->flight.open)) && p->enqueued)
            st = end_call(w, p, ari_now_ns(), &is_done);
        pthread_mutex_unlock(&w->lock);
        if (st != AR_OK || is_done)
            return st;
    }
}

/* --- the watcher -------------------------------------------------------------------------------------------------- */

typedef enum look { ALL_WELL, TOO_LATE, BROKEN } look;

/* Checks the calls; `lock` is held. The calls of one communicator end in order, so only its oldest is queried. */
static look look_at_calls(ari_nccl_world *w, uint64_t now_ns)
{
    for (ari_nccl_comm *c = w->comms; c; c = c->next)
        c->looked_at = false;
    for (ari_flight_call *flight_call = w->flight.open, *next_call; flight_call; flight_call = next_call) {
        ari_pending *p = pending_at(flight_call);
        bool is_done;
        next_call = flight_call->next;
        if (p->comm->looked_at)
            continue;
        if (end_call(w, p, now_ns, &is_done) != AR_OK)
            return BROKEN;
        p->comm->looked_at = !is_done;
        /* `now` may be older than the call. */
        if (!is_done && now_ns > flight_call->since_ns && now_ns - flight_call->since_ns > w->timeout_ns)
            return TOO_LATE;
    }
    return ALL_WELL;
}

/* `lock` held. */
static look look_for_errors(ari_nccl_world *w, uint64_t now_ns)
{
    if (now_ns - w->errors_asked_ns < ERRORS_NS)
        return ALL_WELL;
    w->errors_asked_ns = now_ns;
    for (ari_nccl_comm *c = w->comms; c; c = c->next) {
        int error = ARI_NCCL_SUCCESS;
        ar_status st = AR_OK;
        if (pthread_mutex_trylock(&c->use) != 0) /* the thread that uses it will find the error */
            continue;
        if (c->comm) {
            const int query_result = w->nccl.CommGetAsyncError(c->comm, &error);
            st = ari_nccl_check(&w->nccl, query_result != ARI_NCCL_SUCCESS ? query_result : error, c->comm, "NCCL");
        }
        pthread_mutex_unlock(&c->use);
        if (st != AR_OK)
            return BROKEN;
    }
    return ALL_WELL;
}

static void world_tick(void *user)
{
    ari_nccl_world *w = user;
    const uint64_t now_ns = ari_now_ns();
    if (ari_nccl_world_status(w) != AR_OK)
        return;
    pthread_mutex_lock(&w->lock);
    look state = look_at_calls(w, now_ns);
    if (state == ALL_WELL)
        state = look_for_errors(w, now_ns);
    pthread_mutex_unlock(&w->lock);
    if (state == TOO_LATE) /* repeated until there is an answer, because the server accepts only the first one */
        ari_store_late(w->store);
    if (state == BROKEN)
        (void)ari_nccl_world_fail(w, AR_ERR_DEVICE);
}

static char *world_view(void *user)
{
    ari_nccl_world *w = user;
    pthread_mutex_lock(&w->lock);
    char *view = ari_flight_text(&w->flight, ari_now_ns());
    pthread_mutex_unlock(&w->lock);
    return view;
}

/* --- the device --------------------------------------------------------------------------------------------------- */

static ar_status check_device(const ari_nccl_world *w)
{
    const char *name = w->device->ops->name, *right = w->nccl.emulated_gpu ? "emulated" : "cuda";
    return strcmp(name, right) == 0
               ? AR_OK
               : ar_error_set(AR_ERR_ARG, "the device %s cannot be served by %s: the device %s expected", name,
                              w->nccl.emulated_gpu ? "what stands for NCCL" : "NCCL, which moves what lies on GPUs",
                              right);
}

/* --- beginning and end -------------------------------------------------------------------------------------------- */

/* Creates the resources of this process. */
static ar_status prepare(ari_nccl_world *w)
{
    AR_TRY(ari_failure_create(&w->failure));
    AR_TRY(ari_nccl_load(&w->nccl));
    AR_TRY(check_device(w));
    if (!w->nccl.emulated_gpu)
        ari_gpu_set_timeout(w->device, w->timeout_ns);
    return AR_OK;
}

ar_status ari_nccl_world_create(ari_nccl_world **result, ar_process *p, ar_device *d)
{
    ari_nccl_world *w = NULL;
    AR_TRY(ari_alloc_zero((void **)&w, 1, sizeof *w, "a communicator"));
    atomic_init(&w->refs, 1);
    pthread_mutex_init(&w->lock, NULL);
    w->rank = p->rank;
    w->size = p->size;
    w->timeout_ns = p->options.timeout_ns;
    w->checks_calls = p->options.check_calls;
    w->device = d;
    ari_flight_init(&w->flight);
    w->store = p->store;
    const ar_status st = prepare(w);
    if (st != AR_OK) {
        ari_nccl_world_release(w);
        return st;
    }
    const ari_watcher watcher = {.tick = world_tick, .view = world_view, .failed = world_failed, .user = w};
    if (w->size > 1)
        ari_store_watch(w->store, &watcher);
    *result = w;
    return AR_OK;
}

static void free_pending(ari_pending *p)
{
    while (p) {
        ari_pending *next_pending = pending_at(p->flight_call.next);
        ari_mark_destroy(p->mark);
        free(p);
        p = next_pending;
    }
}

void ari_nccl_world_release(ari_nccl_world *w)
{
    if (!w || atomic_fetch_sub(&w->refs, 1) != 1)
        return;
    ari_store_watch(w->store, NULL);
    free_pending(pending_at(w->flight.open));
    free_pending(w->spare);
    while (w->flight.groups)
        ari_flight_remove(&w->flight, w->flight.groups);
    ari_failure_release(w->failure);
    pthread_mutex_destroy(&w->lock);
    free(w);
}
