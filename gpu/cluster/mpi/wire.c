/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "gpu/cluster/mpi/mpi_impl.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

ar_status ari_mpi_status(ari_mpi *p)
{
    bool is_local;
    const char *text;
    const ar_status st = ari_store_failure(p->base.store, &is_local, &text);
    if (st == AR_OK)
        return AR_OK;
    return ar_error_set(is_local ? st : AR_ERR_ABORTED, "%s%.*s",
                        is_local ? "" : "another rank failed: ", (int)strcspn(text, "\n"), text);
}

void ari_mpi_fail(ari_mpi *p, const ari_flight_group *group, ar_status st, const char *line)
{
    char first_line[768]; /* the first line of a message from a world that failed inside another one, without its
                             table */
    snprintf(first_line, sizeof first_line, "%.*s", (int)strcspn(line, "\n"), line);
    ari_store_report(p->base.store, st, group ? group->rank : &p->base.rank, group ? group->n : 1, first_line);
}

/* --- calls of MPI ------------------------------------------------------------------------------------------------- */

void ari_mpi_leave(ari_mpi *p)
{
    pthread_rwlock_unlock(&p->calls);
    if (p->one_at_a_time)
        pthread_mutex_unlock(&p->turn);
}

bool ari_mpi_enter(ari_mpi *p)
{
    if (p->one_at_a_time)
        pthread_mutex_lock(&p->turn);
    pthread_rwlock_rdlock(&p->calls);
    const bool open = !p->closed;
    if (!open)
        ari_mpi_leave(p);
    return open;
}

static ar_status closed(void)
{
    return ar_error_set(AR_ERR_ABORTED, "MPI is called no more after a failure that left messages behind");
}

ar_status ari_mpi_error(int rc, const char *label)
{
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    if (rc == MPI_SUCCESS)
        return AR_OK;
    if (MPI_Error_string(rc, text, &length) != MPI_SUCCESS)
        snprintf(text, sizeof text, "error %d", rc);
    return ar_error_set(AR_ERR_IO, "%s: %s", label, text);
}

ar_status ari_mpi_send(ari_mpi *p, const void *src, size_t bytes, int rank, int tag, MPI_Request *request)
{
    if (!ari_mpi_enter(p))
        return closed();
    const int rc = MPI_Isend(src, (int)bytes, MPI_BYTE, rank, tag, p->data, request);
    ari_mpi_leave(p);
    return ari_mpi_error(rc, "MPI_Isend");
}

ar_status ari_mpi_receive(ari_mpi *p, void *dst, size_t bytes, int rank, int tag, MPI_Request *request)
{
    if (!ari_mpi_enter(p))
        return closed();
    const int rc = MPI_Irecv(dst, (int)bytes, MPI_BYTE, rank, tag, p->data, request);
    ari_mpi_leave(p);
    return ari_mpi_error(rc, "MPI_Irecv");
}

/* Tests requests. *ended: number of newly completed requests, which become MPI_REQUEST_NULL; MPI_UNDEFINED: all had
 * completed before. index: [n] their indices. */
static ar_status test(ari_mpi *p, MPI_Request *requests, int n, int *ended, int *index)
{
    if (!ari_mpi_enter(p))
        return closed();
    const int rc = MPI_Testsome(n, requests, ended, index, MPI_STATUSES_IGNORE);
    ari_mpi_leave(p);
    return ari_mpi_error(rc, "MPI_Testsome");
}

#define DROP_NS UINT64_C(100000000)

static void close_calls(ari_mpi *p)
{
    atomic_store(&p->abandoned, true);
    pthread_rwlock_wrlock(&p->calls);
    p->closed = true;
    pthread_rwlock_unlock(&p->calls);
}

static bool all_ended(ari_mpi *p, MPI_Request *requests, int n, bool cancel)
{
    int is_done = 0;
    if (!ari_mpi_enter(p))
        return true;
    /* A sent message needs no cancelling, because a failed peer no longer asks for it. */
    for (int i = 0; cancel && i < n; i++) {
        if (requests[i] != MPI_REQUEST_NULL)
            (void)MPI_Cancel(&requests[i]);
    }
    const int rc = MPI_Testall(n, requests, &is_done, MPI_STATUSES_IGNORE);
    ari_mpi_leave(p);
    return rc == MPI_SUCCESS && is_done;
}

void ari_mpi_drop(ari_mpi *p, MPI_Request *requests, int n)
{
    const uint64_t deadline = ari_now_ns() + DROP_NS;
    bool ended = all_ended(p, requests, n, true);
    while (!ended && ari_now_ns() < deadline) {
        sched_yield();
        ended = all_ended(p, requests, n, false);
    }
    if (!ended)
        close_calls(p);
}

void ari_mpi_take_away(ari_mpi *p)
{
    char bytes[ARI_MPI_FIRST_BYTES];
    for (int has_message = 1, size = 0, is_matched = 0; has_message;) {
        MPI_Message m;
        MPI_Status status;
        if (!ari_mpi_enter(p))
            return;
        int rc = MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, p->data, &has_message, &status);
        if (rc == MPI_SUCCESS && has_message)
            rc = MPI_Get_count(&status, MPI_BYTE, &size);
        has_message = has_message && rc == MPI_SUCCESS && size >= 0 && size <= ARI_MPI_FIRST_BYTES;
        if (has_message)
            rc = MPI_Improbe(status.MPI_SOURCE, status.MPI_TAG, p->data, &is_matched, &m, &status);
        if (has_message && rc == MPI_SUCCESS && is_matched)
            rc = MPI_Mrecv(bytes, ARI_MPI_FIRST_BYTES, MPI_BYTE, &m, &status);
        has_message = has_message && rc == MPI_SUCCESS && is_matched;
        ari_mpi_leave(p);
    }
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

/* Phases of a wait: a short wait polls; then other threads get the core between two polls; a long wait sleeps, because
 * the awaited rank may compute on this core. */
enum { POLLS = 64, YIELDS = 2048, LOOK_TURNS = 32, NAP_NS = 50000 };

typedef struct waiting {
    unsigned turns;
    uint64_t start_ns; /* time since which nothing has moved; 0: not checked yet */
    uint64_t waited_ns;
} waiting;
typedef enum turn_end { GO_ON, LATE, FAILED } turn_end;

/* Does one turn of a wait in which nothing moved: looks for failures, and yields the core for longer and longer. */
static turn_end take_turn(ari_mpi *p, waiting *w)
{
    const unsigned turn = w->turns++;
    if (turn >= YIELDS)
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    else if (turn >= POLLS)
        sched_yield();
    if (turn < YIELDS && turn % LOOK_TURNS != LOOK_TURNS - 1)
        return GO_ON;
    if (ari_mpi_status(p) != AR_OK)
        return FAILED;
    const uint64_t now_ns = ari_now_ns();
    w->start_ns = w->start_ns ? w->start_ns : now_ns;
    w->waited_ns = now_ns - w->start_ns;
    return w->waited_ns >= p->base.options.timeout_ns ? LATE : GO_ON;
}

/* "all_reduce(F32, count 8, sum) 'x', collective #3 of ranks 0-3" */
static void describe(const ari_mpi_rendezvous *m, char *text, size_t size)
{
    const bool message = m->call->kind == ARI_SEND || m->call->kind == ARI_RECV;
    char description[192];
    ari_call_describe(m->call, m->group->n, description, sizeof description);
    snprintf(text, size, "%s, %s #%llu of rank%s %s", description, message ? "message" : "collective",
             (unsigned long long)m->open.seq, ARI_PLURAL(m->group->n), m->group->ranks);
}

void ari_mpi_broken(const ari_mpi_rendezvous *m, ar_status st)
{
    char description[384], why[768];
    describe(m, description, sizeof description);
    snprintf(why, sizeof why, "rank %d in %s: %.300s", m->p->base.rank, description, ar_error_message());
    ari_mpi_fail(m->p, m->group, st, why);
}

/* Ends the world because this member has waited too long for the peers of unfinished requests, each of which is named
 * once. */
static void be_late(const ari_mpi_rendezvous *m, uint64_t waited_ns)
{
    const ari_mpi_requests *r = &m->requests;
    ARI_OWNED int *missing = calloc((size_t)m->group->n, sizeof *missing);
    char description[384], ranks[128], why[768];
    int found = 0;
    for (int k = 0; missing && k < m->group->n; k++) {
        for (size_t i = 0; i < r->n; i++) {
            if (r->request[i] != MPI_REQUEST_NULL && r->member[i] == k) {
                missing[found++] = m->group->rank[k];
                break;
            }
        }
    }
    describe(m, description, sizeof description);
    ari_ranks_describe(missing, found, ranks, sizeof ranks);
    snprintf(why, sizeof why, "rank %d waited %.3f s %s %s, for rank%s %s", m->p->base.rank, (double)waited_ns * 1e-9,
             m->phase, description, ARI_PLURAL(found), ranks);
    ari_mpi_fail(m->p, NULL, AR_ERR_TIMEOUT, why);
}

/* Longest delay for messages that a rank sent before it returned. */
#define WAY_OUT_NS UINT64_C(200000000)

/* Ends the world if an awaited member has returned, since it will never arrive. */
static void look_for_returned(const ari_mpi_rendezvous *m)
{
    const ari_mpi_requests *r = &m->requests;
    for (size_t i = 0; i < r->n; i++) {
        const int rank = m->group->rank[r->member[i]];
        const uint64_t since = r->request[i] == MPI_REQUEST_NULL ? 0 : ari_store_left_ns(m->p->base.store, rank);
        if (since == 0 || ari_now_ns() - since < WAY_OUT_NS)
            continue;
        char description[384], why[768];
        describe(m, description, sizeof description);
        snprintf(why, sizeof why, "rank %d returned while rank %d waits for it in %s", rank, m->p->base.rank,
                 description);
        ari_mpi_fail(m->p, m->group, AR_ERR_MISMATCH, why);
        return;
    }
}

ar_status ari_mpi_await(ari_mpi_rendezvous *m)
{
    const ari_mpi_requests *r = &m->requests;
    waiting w = {0};
    ar_status st = AR_OK;
    int ended = 0;
    while (st == AR_OK) {
        st = test(m->p, r->request, (int)r->n, &ended, r->index);
        if (st != AR_OK) {
            ari_mpi_broken(m, st);
            break;
        }
        if (ended == MPI_UNDEFINED)
            return AR_OK;
        if (ended > 0) {
            w = (waiting){0};
            continue;
        }
        const turn_end end = take_turn(m->p, &w);
        if (end == LATE)
            be_late(m, w.waited_ns);
        else if (end == GO_ON && w.start_ns)
            look_for_returned(m);
        if (end != GO_ON)
            st = AR_ERR_ABORTED;
    }
    ari_mpi_drop(m->p, r->request, (int)r->n);
    return AR_ERR_ABORTED;
}
