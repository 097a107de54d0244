/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/mpi/mpi_impl.h"
#include "ref/core/size.h"
#include "ref/core/wait.h"

/* Before data move, each member sends its call to every other member and compares the calls that it receives. One short
 * message goes to each member, so that every member knows who has not arrived, and all find the same disagreement. A
 * longer call is sent again in full. */

/* Header of an encoded call, which follows the header if there is space. */
typedef struct head {
    uint64_t bytes;
} head;
enum { ROOM = ARI_MPI_FIRST_BYTES - sizeof(head) };

/* --- beginning and end -------------------------------------------------------------------------------------------- */

ar_status ari_mpi_rendezvous_init(ari_mpi_rendezvous *m, ari_mpi *p, uint64_t id, const int *rank, int n, int index,
                                  int tag)
{
    *m = (ari_mpi_rendezvous){.p = p, .index = index, .tag = tag};
    pthread_mutex_lock(&p->lock);
    ar_status st = ari_flight_add(&p->flight, &m->group, id, rank, n);
    pthread_mutex_unlock(&p->lock);
    if (st == AR_OK)
        st = ari_calls_init(&m->calls, m->group->rank, n);
    if (st == AR_OK)
        st = ari_alloc_zero((void **)&m->first_messages, (size_t)n, ARI_MPI_FIRST_BYTES, "a group of ranks");
    if (st == AR_OK)
        st = ARI_ALLOC_ZERO(&m->first_bytes, 2 * (size_t)n, "a group of ranks");
    for (int i = 0; i < n && st == AR_OK; i++)
        m->first_bytes[i] = ARI_MPI_FIRST_BYTES;
    m->long_bytes = st == AR_OK ? m->first_bytes + n : NULL;
    if (st != AR_OK)
        ari_mpi_rendezvous_fini(m);
    return st;
}

void ari_mpi_rendezvous_fini(ari_mpi_rendezvous *m)
{
    if (m->group) {
        ari_calls_fini(&m->calls);
        pthread_mutex_lock(&m->p->lock);
        ari_flight_remove(&m->p->flight, m->group);
        pthread_mutex_unlock(&m->p->lock);
    }
    free(m->first_messages);
    free(m->long_messages);
    free(m->first_bytes);
    free(m->requests.request);
    free(m->requests.member);
    free(m->requests.index);
    *m = (ari_mpi_rendezvous){.p = NULL};
}

/* --- what the members call ---------------------------------------------------------------------------------------- */

/* Receive buffers have space for the longest message; a message is sent with its actual length. */
static char *first_of(const ari_mpi_rendezvous *m, int i)
{
    return m->first_messages + ari_counts_before(m->first_bytes, i);
}

static size_t bytes_of(const ari_mpi_rendezvous *m, int i)
{
    head h;
    memcpy(&h, first_of(m, i), sizeof h);
    return (size_t)h.bytes;
}

/* Gathers the members' data; this rank's part is already in place. */
static ar_status gather(ari_mpi_rendezvous *m, const size_t *counts, char *gathered)
{
    const char *local_part = gathered + ari_counts_before(counts, m->index);
    const ari_call call = {
        .kind = ARI_ALL_GATHER, .dtype = AR_U8, .counts = counts, .input = {local_part}, .out = {gathered}};
    return ari_mpi_direct(m, &call, NULL);
}

/* The calls that are longer than a first message, if any are. */
static ar_status gather_long(ari_mpi_rendezvous *m)
{
    const int n = m->group->n;
    size_t total = 0;
    for (int i = 0; i < n; i++) {
        const size_t bytes = bytes_of(m, i);
        m->long_bytes[i] = bytes > ROOM ? bytes : 0;
        AR_TRY(ari_add_size(&total, total, m->long_bytes[i]));
    }
    if (total == 0)
        return AR_OK;
    free(m->long_messages);
    m->long_messages = NULL;
    AR_TRY(ari_alloc((void **)&m->long_messages, total, 1, "calls of other ranks"));
    if (m->long_bytes[m->index] > 0)
        ari_call_encode(m->long_messages + ari_counts_before(m->long_bytes, m->index), m->call, n);
    return gather(m, m->long_bytes, m->long_messages);
}

static ar_status exchange(ari_mpi_rendezvous *m)
{
    AR_TRY(gather(m, m->first_bytes, m->first_messages));
    ar_status st = gather_long(m);
    for (int i = 0; i < m->group->n && st == AR_OK; i++) {
        const bool is_long = m->long_bytes[i] > 0;
        const char *encoded =
            is_long ? m->long_messages + ari_counts_before(m->long_bytes, i) : first_of(m, i) + sizeof(head);
        st = ari_calls_take(&m->calls, i, m->open.seq, encoded, bytes_of(m, i));
    }
    if (st != AR_OK && st != AR_ERR_ABORTED)
        ari_mpi_broken(m, st);
    return st;
}

static ar_status compare(ari_mpi_rendezvous *m)
{
    char why[768];
    const ar_status st = ari_calls_compare(&m->calls.group, why, sizeof why);
    if (st != AR_OK)
        ari_mpi_fail(m->p, m->group, st, why);
    return st;
}

/* --- the rendezvous ----------------------------------------------------------------------------------------------- */

static ar_status write_own(ari_mpi_rendezvous *m, const ari_call *call)
{
    size_t bytes = 0;
    AR_TRY(ari_call_encoded_bytes(&bytes, call, m->group->n));
    const head h = {.bytes = bytes};
    char *first_message = first_of(m, m->index);
    memcpy(first_message, &h, sizeof h);
    m->first_bytes[m->index] = sizeof h + (bytes <= ROOM ? bytes : 0);
    if (bytes <= ROOM)
        ari_call_encode(first_message + sizeof h, call, m->group->n);
    return AR_OK;
}

static ar_status used_twice(const ari_mpi_rendezvous *m, const ari_call *call)
{
    char text[160], why[768];
    const int caller_rank = m->p->base.rank;
    ari_call_describe(call, m->group->n, text, sizeof text);
    snprintf(why, sizeof why, "rank %d calls %s while another of its threads is in a call of the same communicator",
             caller_rank, text);
    ari_mpi_fail(m->p, NULL, AR_ERR_ARG, why);
    return ari_mpi_status(m->p);
}

ar_status ari_mpi_part(ari_mpi_rendezvous *m, ar_status st)
{
    pthread_mutex_lock(&m->p->lock);
    ari_flight_leave(&m->p->flight, &m->open, st == AR_OK, ari_wait_coarse_ns());
    pthread_mutex_unlock(&m->p->lock);
    atomic_store(&m->is_busy, 0);
    if (st != AR_OK) /* of this rank only, unless the world has ended */
        AR_TRY(ari_mpi_status(m->p));
    return st;
}

ar_status ari_mpi_meet(ari_mpi_rendezvous *m, const ari_call *call)
{
    AR_TRY(ari_mpi_status(m->p));
    if (atomic_exchange(&m->is_busy, 1) != 0)
        return used_twice(m, call);
    ar_status st = write_own(m, call);
    if (st != AR_OK) {
        atomic_store(&m->is_busy, 0);
        return st;
    }
    pthread_mutex_lock(&m->p->lock);
    ari_flight_enter(&m->p->flight, &m->open, m->group, call, ari_wait_coarse_ns());
    pthread_mutex_unlock(&m->p->lock);
    m->call = call;
    m->phase = "in";
    st = exchange(m);
    if (st == AR_OK)
        st = compare(m);
    m->phase = "in the middle of";
    return st == AR_OK ? AR_OK : ari_mpi_part(m, st);
}
