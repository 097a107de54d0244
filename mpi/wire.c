/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdlib.h>
#include <time.h>

#include "mpi/mpi_impl.h"
#include "ref/core/clock.h"

/* --- calls of MPI ------------------------------------------------------------------------------------------------- */

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

void ari_mpi_leave(ari_mpi *p)
{
    pthread_rwlock_unlock(&p->calls);
    if (p->one_at_a_time)
        pthread_mutex_unlock(&p->turn);
}

static ar_status closed(void)
{
    return ar_error_set(AR_ERR_ABORTED, "MPI is called no more after a failure that left messages behind");
}

ar_status ari_mpi_error(int rc, const char *what)
{
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    if (rc == MPI_SUCCESS)
        return AR_OK;
    if (MPI_Error_string(rc, text, &length) != MPI_SUCCESS)
        snprintf(text, sizeof text, "error %d", rc);
    return ar_error_set(AR_ERR_IO, "%s: %s", what, text);
}

ar_status ari_mpi_send(ari_mpi *p, const void *from, size_t bytes, int rank, int tag, MPI_Request *gives)
{
    if (!ari_mpi_enter(p))
        return closed();
    const int rc = MPI_Isend(from, (int)bytes, MPI_BYTE, rank, tag, p->data, gives);
    ari_mpi_leave(p);
    return ari_mpi_error(rc, "MPI_Isend");
}

ar_status ari_mpi_receive(ari_mpi *p, void *to, size_t bytes, int rank, int tag, MPI_Request *gives)
{
    if (!ari_mpi_enter(p))
        return closed();
    const int rc = MPI_Irecv(to, (int)bytes, MPI_BYTE, rank, tag, p->data, gives);
    ari_mpi_leave(p);
    return ari_mpi_error(rc, "MPI_Irecv");
}

ar_status ari_mpi_test(ari_mpi *p, MPI_Request *requests, int n, int *ended, int *index)
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
    int done = 0;
    if (!ari_mpi_enter(p))
        return true;
    /* Of a message that was sent nothing is to be done: a peer that failed does not ask for it any more. */
    for (int i = 0; cancel && i < n; i++) {
        if (requests[i] != MPI_REQUEST_NULL)
            (void)MPI_Cancel(&requests[i]);
    }
    const int rc = MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE);
    ari_mpi_leave(p);
    return rc == MPI_SUCCESS && done;
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

/* --- waiting ------------------------------------------------------------------------------------------------------ */

/* A wait that is short is spent polling; then others get the core between two polls; a long one sleeps, since whom it
 * waits for may compute on this very core. */
enum { POLLS = 64, YIELDS = 2048, CONTROL_TURNS = 32, NAP_NS = 50000 };

ari_mpi_turn_end ari_mpi_turn(ari_mpi *p, ari_mpi_wait *w)
{
    const unsigned turn = w->turns++;
    if (turn >= YIELDS)
        nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
    else if (turn >= POLLS)
        sched_yield();
    if (turn < YIELDS && turn % CONTROL_TURNS != CONTROL_TURNS - 1)
        return ARI_MPI_GO_ON;
    ari_mpi_control_turn(p);
    if (ari_mpi_control_has_failed(p)) {
        ari_mpi_control_finish(p);
        return ARI_MPI_FAILED;
    }
    const uint64_t now = ari_now_ns();
    w->start_ns = w->start_ns ? w->start_ns : now;
    w->waited_ns = now - w->start_ns;
    return w->waited_ns >= p->base.options.timeout_ns ? ARI_MPI_LATE : ARI_MPI_GO_ON;
}

void ari_mpi_late(const ari_mpi_place *at, uint64_t waited_ns, int *members, int n)
{
    char what[384], missing[128], why[768];
    const ari_group *g = at->member->group;
    for (int i = 0; i < n; i++)
        members[i] = g->rank[members[i]];
    ari_member_describe(at->member, at->call, what, sizeof what);
    ari_ranks_describe(members, n, missing, sizeof missing);
    snprintf(why, sizeof why, "rank %d waited %.3f s %s %s, for rank%s %s", at->member->rank, (double)waited_ns * 1e-9,
             at->where, what, n == 1 ? "" : "s", missing);
    ari_mpi_control_fail(at->p, NULL, AR_ERR_TIMEOUT, why);
}

void ari_mpi_broken(const ari_mpi_place *at, ar_status st)
{
    char what[384], why[768];
    ari_member_describe(at->member, at->call, what, sizeof what);
    snprintf(why, sizeof why, "rank %d in %s: %.300s", at->member->rank, what, ar_error_message());
    ari_mpi_control_fail(at->p, at->member->group, st, why);
}

/* The members that unfinished requests need, each once, in their order. */
static void late_for_requests(const ari_mpi_place *at, uint64_t waited_ns, const MPI_Request *requests,
                              const int *member, int n)
{
    const int size = at->member->group->n;
    int *missing = calloc((size_t)size, sizeof *missing), found = 0;
    for (int m = 0; missing && m < size; m++) {
        for (int i = 0; i < n; i++) {
            if (requests[i] != MPI_REQUEST_NULL && member[i] == m) {
                missing[found++] = m;
                break;
            }
        }
    }
    ari_mpi_late(at, waited_ns, missing, found);
    free(missing);
}

ar_status ari_mpi_await(const ari_mpi_place *at, MPI_Request *requests, const int *member, int n)
{
    ari_mpi_wait w = {0};
    int *index = malloc((size_t)n * sizeof *index + 1), ended = 0;
    ar_status st = index ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for %d requests of MPI", n);
    while (st == AR_OK) {
        st = ari_mpi_test(at->p, requests, n, &ended, index);
        if (st != AR_OK || ended == MPI_UNDEFINED)
            break;
        if (ended > 0) {
            w = (ari_mpi_wait){0};
            continue;
        }
        const ari_mpi_turn_end end = ari_mpi_turn(at->p, &w);
        if (end == ARI_MPI_LATE)
            late_for_requests(at, w.waited_ns, requests, member, n);
        if (end != ARI_MPI_GO_ON)
            st = AR_ERR_ABORTED;
    }
    free(index);
    if (st == AR_OK)
        return AR_OK;
    if (st != AR_ERR_ABORTED)
        ari_mpi_broken(at, st);
    ari_mpi_drop(at->p, requests, n);
    return st;
}
