/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <stdlib.h>

#include "gpu/cluster/mpi/mpi_impl.h"
#include "ref/core/size.h"

/* A message under way to `n` ranks. */
typedef struct sent {
    struct sent *next;
    ari_message *message;
    int n;
    MPI_Request request[];
} sent;

/* Number of links that this process has created, equal in all processes. It is part of the tag, so messages that a
 * failed link left behind are not received by the next one. */
static atomic_int links;

typedef struct mpi_link {
    ari_link base; /* first */
    ari_mpi *p;
    int tag;
    pthread_mutex_t lock; /* guards `sent` */
    sent *sent;
    ari_message *incoming; /* NULL: no message in progress */
    MPI_Request request;   /* its */
} mpi_link;

static void add_sent(mpi_link *l, sent *x)
{
    pthread_mutex_lock(&l->lock);
    x->next = l->sent;
    l->sent = x;
    pthread_mutex_unlock(&l->lock);
}

static bool link_send(ari_link *base, const int *dst_ranks, int n, const ari_message *m)
{
    mpi_link *l = (mpi_link *)base;
    const size_t bytes = sizeof *m + (size_t)m->bytes;
    ari_message *copy = bytes <= INT_MAX ? ari_message_copy(m) : NULL;
    sent *x = copy ? calloc(1, sizeof *x + (size_t)n * sizeof *x->request) : NULL;
    if (!x || !ari_mpi_enter(l->p)) {
        (void)ar_error_set(AR_ERR_IO, "a message of %zu bytes between processes", bytes);
        free(copy);
        free(x);
        return false;
    }
    x->message = copy;
    bool ok = true;
    while (x->n < n && ok) {
        const int rc = MPI_Isend(copy, (int)bytes, MPI_BYTE, dst_ranks[x->n], l->tag, l->p->control, &x->request[x->n]);
        ok = ari_mpi_error(rc, "MPI_Isend") == AR_OK;
        x->n += ok;
    }
    ari_mpi_leave(l->p);
    add_sent(l, x);
    return ok;
}

/* Frees messages that have arrived. */
static void reap(mpi_link *l)
{
    pthread_mutex_lock(&l->lock);
    for (sent **slot = &l->sent; *slot;) {
        sent *x = *slot;
        int is_done = 0;
        if (MPI_Testall(x->n, x->request, &is_done, MPI_STATUSES_IGNORE) != MPI_SUCCESS || !is_done) {
            slot = &x->next;
            continue;
        }
        *slot = x->next;
        free(x->message);
        free(x);
    }
    pthread_mutex_unlock(&l->lock);
}

/* Begins to receive the next message, if there is one. */
static void begin_next(mpi_link *l)
{
    MPI_Status status;
    int has_message = 0, bytes = 0;
    if (MPI_Iprobe(MPI_ANY_SOURCE, l->tag, l->p->control, &has_message, &status) != MPI_SUCCESS || !has_message)
        return;
    (void)MPI_Get_count(&status, MPI_BYTE, &bytes);
    l->incoming = ari_message_create(0, 0, (uint64_t)bytes);
    if (l->incoming)
        (void)MPI_Irecv(l->incoming, bytes, MPI_BYTE, status.MPI_SOURCE, l->tag, l->p->control, &l->request);
}

static ari_message *link_receive(ari_link *base)
{
    mpi_link *l = (mpi_link *)base;
    ari_message *m = NULL;
    int is_done = 0;
    if (!ari_mpi_enter(l->p))
        return NULL;
    reap(l);
    if (!l->incoming)
        begin_next(l);
    if (l->incoming && MPI_Test(&l->request, &is_done, MPI_STATUS_IGNORE) == MPI_SUCCESS && is_done) {
        m = l->incoming;
        l->incoming = NULL;
        m->data[m->bytes] = '\0';
    }
    ari_mpi_leave(l->p);
    return m;
}

/* Finds no ended process, because the launcher ends all processes when one dies. */
static int find_ended(ari_link *l, int rank, char *text, size_t size)
{
    (void)l, (void)rank, (void)text, (void)size;
    return -1;
}

/* Destroys a link. Requests in progress keep their memory, because MPI still reads and writes it. */
static void link_destroy(ari_link *base)
{
    mpi_link *l = (mpi_link *)base;
    if (ari_mpi_enter(l->p)) {
        reap(l);
        ari_mpi_leave(l->p);
    }
    pthread_mutex_destroy(&l->lock);
    free(l);
}

static const ari_link_ops link_ops = {link_send, link_receive, find_ended, link_destroy};

ar_status ari_mpi_link_create(ari_link **result, ari_mpi *p)
{
    mpi_link *l = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&l, 1, "a process"));
    l->base = (ari_link){.ops = &link_ops, .rank = p->base.rank, .size = p->base.size};
    l->p = p;
    l->tag = atomic_fetch_add(&links, 1) % p->last_context;
    pthread_mutex_init(&l->lock, NULL);
    *result = &l->base;
    return AR_OK;
}
