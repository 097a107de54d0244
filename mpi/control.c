/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mpi/mpi_impl.h"
#include "ref/core/clock.h"

/* How the first failure of a process becomes the end of all, with one text everywhere.
 *
 *   origin             every other process
 *   FAILURE ------->   takes a view of what it does
 *           <-------   VIEW
 *   TEXT    ------->   ends, with this text: one line, and the table of views
 *
 * Two may fail at once: the lower rank is the origin then, and the other one follows it, since each gets the other's
 * FAILURE instead of a view. A process that does not answer soon is left out of the table; one that follows and receives
 * no text ends with the line alone. Where the library takes calls of several threads, one of them listens, so that a
 * process that computes answers too. */

#define VIEW_NS UINT64_C(300000000)     /* what an origin waits for views */
#define TEXT_NS UINT64_C(700000000)     /* what others wait for the text */
#define FLUSH_NS UINT64_C(200000000)    /* what an origin waits for its text to leave */
#define GOODBYE_NS UINT64_C(2000000000) /* after a failure: what a process waits for the others to be done with it */
#define LISTEN_NS 5000000
#define ARRIVE_NS UINT64_C(500000000) /* what a message that has begun to come may take */

enum { TAG_FAILURE = 1, TAG_VIEW, TAG_TEXT, TAG_GOODBYE };

typedef enum phase { CALM, ORIGIN, FOLLOWER, ENDED } phase;

/* A FAILURE, and the beginning of a TEXT, followed by the text. */
typedef struct failure {
    ar_status st;
    bool own; /* to whom it is sent: this process gets `st`, and else AR_ERR_ABORTED */
    char line[768];
} failure;

typedef struct peer {
    _Atomic uint64_t returned_ns; /* 0: it may still call something */
    /* guarded by the control's `lock` */
    bool fails; /* of an origin: it gets the failure's status too */
    bool has_view;
} peer;

/* On its way. */
typedef struct message {
    struct message *next;
    MPI_Request request;
    int to;
    char bytes[];
} message;

struct ari_mpi_control {
    ari_mpi *p;
    pthread_mutex_t lock;
    _Atomic(phase) phase;
    peer *peer; /* [size] */
    /* guarded by `lock` */
    int origin;
    failure what;
    uint64_t deadline; /* of the phase */
    message *sent;     /* that have not left yet */
    /* the listener */
    pthread_t thread;
    bool listens;
    atomic_bool stop;
};

/* --- messages: the lock held -------------------------------------------------------------------------------------- */

/* One that cannot be sent does not arrive: the other process ends by its own timeout. */
static void post(ari_mpi_control *c, int to, int tag, const void *head, size_t head_bytes, const void *tail,
                 size_t tail_bytes)
{
    const size_t bytes = head_bytes + tail_bytes;
    message *m = bytes <= INT32_MAX ? malloc(sizeof *m + bytes) : NULL;
    if (!m)
        return;
    m->to = to;
    ari_copy_bytes(m->bytes, head, head_bytes);
    ari_copy_bytes(m->bytes + head_bytes, tail, tail_bytes);
    int rc = MPI_ERR_OTHER;
    if (ari_mpi_enter(c->p)) {
        rc = MPI_Isend(m->bytes, (int)bytes, MPI_BYTE, to, tag, c->p->control, &m->request);
        ari_mpi_leave(c->p);
    }
    if (rc != MPI_SUCCESS) {
        free(m);
        return;
    }
    m->next = c->sent;
    c->sent = m;
}

static void free_sent(ari_mpi_control *c)
{
    for (message **at = &c->sent; *at;) {
        message *m = *at;
        int left = 0;
        if (!ari_mpi_enter(c->p))
            return;
        const int rc = MPI_Test(&m->request, &left, MPI_STATUS_IGNORE);
        ari_mpi_leave(c->p);
        if (rc == MPI_SUCCESS && !left) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        free(m);
    }
}

/* The failure, and the text if there is one; but for TAG_GOODBYE. */
static void post_to_all(ari_mpi_control *c, int tag, const char *text)
{
    failure f = c->what;
    for (int i = 0; i < c->p->base.size; i++) {
        f.own = c->peer[i].fails;
        if (i != c->p->base.rank)
            post(c, i, tag, &f, tag == TAG_GOODBYE ? 0 : sizeof f, text, text ? strlen(text) + 1 : 0);
    }
}

/* The view, followed by its rows. */
static void post_view(ari_mpi_control *c, int to)
{
    ari_rank_state *own = &c->p->world->rank[c->p->base.rank];
    ari_world_take_view(c->p->world, c->p->base.rank);
    post(c, to, TAG_VIEW, &own->view, sizeof own->view, own->rows, own->rows ? own->row_count * sizeof *own->rows : 0);
}

/* --- the failure: the lock held ----------------------------------------------------------------------------------- */

static void end_with(ari_mpi_control *c, const char *text)
{
    ari_world_end_as(c->p->world, c->what.own ? c->p->base.rank : -1, c->what.st, text);
    atomic_store(&c->phase, ENDED);
}

static void fill_in_silent(ari_mpi_control *c)
{
    for (int i = 0; i < c->p->base.size; i++) {
        ari_rank_view *v = &c->p->world->rank[i].view;
        if (c->peer[i].has_view)
            continue;
        *v = (ari_rank_view){.last = "?", .now = {.current = "no answer"}};
    }
}

static void end_as_origin(ari_mpi_control *c)
{
    fill_in_silent(c);
    char *text = ari_world_make_message(c->p->world, c->what.line);
    post_to_all(c, TAG_TEXT, text ? text : c->what.line);
    end_with(c, text ? text : c->what.line);
    free(text);
}

static bool all_views_here(const ari_mpi_control *c)
{
    for (int i = 0; i < c->p->base.size; i++) {
        if (!c->peer[i].has_view)
            return false;
    }
    return true;
}

/* What is due at this time. */
static void act_on_deadline(ari_mpi_control *c)
{
    const phase now = atomic_load(&c->phase);
    if (now != ORIGIN && now != FOLLOWER)
        return;
    const bool late = ari_now_ns() >= c->deadline;
    if (now == ORIGIN && (late || all_views_here(c)))
        end_as_origin(c);
    else if (now == FOLLOWER && late)
        end_with(c, c->what.line);
}

/* A failure as another process reports it; false: it is none. */
static bool take_failure(ari_mpi_control *c, const char *bytes, size_t size)
{
    if (size < sizeof c->what)
        return false;
    memcpy(&c->what, bytes, sizeof c->what);
    c->what.line[sizeof c->what.line - 1] = '\0';
    return true;
}

static void receive_failure(ari_mpi_control *c, int from, const char *bytes, size_t size)
{
    const phase now = atomic_load(&c->phase);
    const int known = now == ORIGIN ? c->p->base.rank : c->origin;
    if (now == ENDED || (now != CALM && from > known) || !take_failure(c, bytes, size))
        return;
    c->origin = from;
    c->deadline = ari_now_ns() + TEXT_NS;
    post_view(c, from);
    atomic_store(&c->phase, FOLLOWER);
}

static void receive_view(ari_mpi_control *c, int from, const char *bytes, size_t size)
{
    ari_rank_state *r = &c->p->world->rank[from];
    if (atomic_load(&c->phase) != ORIGIN || c->peer[from].has_view || size < sizeof r->view)
        return;
    memcpy(&r->view, bytes, sizeof r->view);
    r->row_count = (size - sizeof r->view) / sizeof *r->rows;
    r->rows = r->row_count > 0 ? malloc(r->row_count * sizeof *r->rows) : NULL;
    if (r->rows)
        memcpy(r->rows, bytes + sizeof r->view, r->row_count * sizeof *r->rows);
    r->taken = true;
    c->peer[from].has_view = true;
}

static void receive_text(ari_mpi_control *c, const char *bytes, size_t size)
{
    if (atomic_load(&c->phase) != ENDED && size > sizeof c->what && bytes[size - 1] == '\0' &&
        take_failure(c, bytes, size))
        end_with(c, bytes + sizeof c->what);
}

static void receive_message(ari_mpi_control *c, int from, int tag, const char *bytes, size_t size)
{
    if (tag == TAG_FAILURE)
        receive_failure(c, from, bytes, size);
    else if (tag == TAG_VIEW)
        receive_view(c, from, bytes, size);
    else if (tag == TAG_TEXT)
        receive_text(c, bytes, size);
    else if (tag == TAG_GOODBYE)
        atomic_store(&c->peer[from].returned_ns, ari_now_ns());
}

/* --- listening: the lock held ------------------------------------------------------------------------------------- */

/* A message whose sender died half-way never comes to its end. */
static bool receive(ari_mpi_control *c, MPI_Message *m, char *to, int size)
{
    MPI_Request request;
    int done = 0;
    if (!ari_mpi_enter(c->p))
        return false;
    int rc = MPI_Imrecv(to, size, MPI_BYTE, m, &request);
    ari_mpi_leave(c->p);
    const uint64_t deadline = ari_now_ns() + ARRIVE_NS;
    while (rc == MPI_SUCCESS && !done && ari_now_ns() < deadline && ari_mpi_enter(c->p)) {
        rc = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        ari_mpi_leave(c->p);
    }
    return rc == MPI_SUCCESS && done;
}

static bool listen_once(ari_mpi_control *c)
{
    MPI_Message m;
    MPI_Status status;
    int here = 0, size = 0;
    if (!ari_mpi_enter(c->p))
        return false;
    int rc = MPI_Improbe(MPI_ANY_SOURCE, MPI_ANY_TAG, c->p->control, &here, &m, &status);
    if (rc == MPI_SUCCESS && here)
        rc = MPI_Get_count(&status, MPI_BYTE, &size);
    ari_mpi_leave(c->p);
    if (rc != MPI_SUCCESS || !here || size < 0)
        return false;
    char *bytes = malloc((size_t)size + 1); /* left behind where the message never comes to its end */
    if (!bytes || !receive(c, &m, bytes, size)) {
        atomic_store(&c->p->abandoned, true);
        return false;
    }
    receive_message(c, status.MPI_SOURCE, status.MPI_TAG, bytes, (size_t)size);
    free(bytes);
    return true;
}

void ari_mpi_control_turn(ari_mpi *p)
{
    ari_mpi_control *c = p->control_of;
    if (pthread_mutex_trylock(&c->lock) != 0)
        return; /* another thread listens */
    while (listen_once(c)) {
    }
    act_on_deadline(c);
    free_sent(c);
    pthread_mutex_unlock(&c->lock);
}

bool ari_mpi_control_has_failed(const ari_mpi *p)
{
    return atomic_load(&p->control_of->phase) != CALM;
}

uint64_t ari_mpi_control_returned_ns(const ari_mpi *p, int rank)
{
    return atomic_load(&p->control_of->peer[rank].returned_ns);
}

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

/* Whether no message is left to a process that has answered; `any`: to any process. */
static bool all_left(ari_mpi_control *c, bool any)
{
    bool all = true;
    pthread_mutex_lock(&c->lock);
    for (const message *m = c->sent; m; m = m->next)
        all = all && !any && !c->peer[m->to].has_view;
    pthread_mutex_unlock(&c->lock);
    return all;
}

void ari_mpi_control_finish(ari_mpi *p)
{
    ari_mpi_control *c = p->control_of;
    for (;;) {
        ari_mpi_control_turn(p);
        if (atomic_load(&c->phase) == ENDED)
            break;
        nap();
    }
    const uint64_t deadline = ari_now_ns() + FLUSH_NS;
    while (!all_left(c, false) && ari_now_ns() < deadline) {
        ari_mpi_control_turn(p);
        nap();
    }
}

void ari_mpi_control_fail(ari_mpi *p, const ari_group *with, ar_status st, const char *line)
{
    ari_mpi_control *c = p->control_of;
    const int own = p->base.rank;
    ari_mpi_control_turn(p); /* another process may have failed before */
    pthread_mutex_lock(&c->lock);
    if (atomic_load(&c->phase) == CALM) {
        c->what = (failure){.st = st, .own = true};
        snprintf(c->what.line, sizeof c->what.line, "%.*s", (int)strcspn(line, "\n"), line);
        for (int i = 0; with && i < with->n; i++)
            c->peer[with->rank[i]].fails = true;
        c->origin = own;
        c->deadline = ari_now_ns() + VIEW_NS;
        ari_world_take_view(p->world, own);
        c->peer[own].has_view = true;
        atomic_store(&c->phase, ORIGIN);
        post_to_all(c, TAG_FAILURE, NULL);
    }
    pthread_mutex_unlock(&c->lock);
    ari_mpi_control_finish(p);
}

/* --- the listener, and the end ------------------------------------------------------------------------------------ */

static void *listener(void *arg)
{
    ari_mpi_control *c = arg;
    while (!atomic_load(&c->stop)) {
        nanosleep(&(struct timespec){.tv_nsec = LISTEN_NS}, NULL);
        ari_mpi_control_turn(c->p);
    }
    return NULL;
}

ar_status ari_mpi_control_create(ari_mpi *p)
{
    ari_mpi_control *c = calloc(1, sizeof *c);
    peer *peers = calloc((size_t)p->base.size, sizeof *peers);
    if (!c || !peers) {
        free(peers);
        free(c);
        return ar_error_set(AR_ERR_MEMORY, "no memory for %d processes", p->base.size);
    }
    c->p = p;
    c->peer = peers;
    p->control_of = c;
    if (pthread_mutex_init(&c->lock, NULL) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no locks for %d processes", p->base.size);
    /* Without a thread for it, a process learns of failures where it waits. */
    c->listens = !p->one_at_a_time && p->base.size > 1 && pthread_create(&c->thread, NULL, listener, c) == 0;
    return AR_OK;
}

static bool all_returned(const ari_mpi_control *c)
{
    for (int i = 0; i < c->p->base.size; i++) {
        if (i != c->p->base.rank && atomic_load(&c->peer[i].returned_ns) == 0)
            return false;
    }
    return true;
}

/* Calls from before the failure that no peer answered: short messages, received so that MPI ends in order. A long one
 * waits in its sender's memory, and stays there. */
static void take_away(ari_mpi *p)
{
    char bytes[ARI_MPI_FIRST_BYTES];
    for (int here = 1, size = 0, done = 0; here;) {
        MPI_Message m;
        MPI_Status status;
        if (!ari_mpi_enter(p))
            return;
        int rc = MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, p->data, &here, &status);
        if (rc == MPI_SUCCESS && here)
            rc = MPI_Get_count(&status, MPI_BYTE, &size);
        here = here && rc == MPI_SUCCESS && size >= 0 && size <= ARI_MPI_FIRST_BYTES;
        if (here)
            rc = MPI_Improbe(status.MPI_SOURCE, status.MPI_TAG, p->data, &done, &m, &status);
        if (here && rc == MPI_SUCCESS && done)
            rc = MPI_Mrecv(bytes, ARI_MPI_FIRST_BYTES, MPI_BYTE, &m, &status);
        here = here && rc == MPI_SUCCESS && done;
        ari_mpi_leave(p);
    }
}

bool ari_mpi_control_goodbye(ari_mpi *p)
{
    ari_mpi_control *c = p->control_of;
    uint64_t deadline = UINT64_MAX;
    atomic_store(&p->world->rank[p->base.rank].returned, ARI_RETURNED_OK);
    pthread_mutex_lock(&c->lock);
    post_to_all(c, TAG_GOODBYE, NULL);
    pthread_mutex_unlock(&c->lock);
    for (;;) {
        ari_mpi_control_turn(p);
        if (all_left(c, true) && all_returned(c)) {
            if (ari_mpi_control_has_failed(p))
                take_away(p);
            return true;
        }
        const uint64_t now = ari_now_ns();
        if (ari_mpi_control_has_failed(p)) {
            deadline = deadline == UINT64_MAX ? now + GOODBYE_NS : deadline;
            take_away(p);
        }
        if (now >= deadline)
            return false;
        nap();
    }
}

void ari_mpi_control_destroy(ari_mpi *p)
{
    ari_mpi_control *c = p->control_of;
    if (!c)
        return;
    atomic_store(&c->stop, true);
    if (c->listens)
        pthread_join(c->thread, NULL);
    pthread_mutex_destroy(&c->lock);
    for (message *m = c->sent, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    free(c->peer);
    free(c);
    p->control_of = NULL;
}
