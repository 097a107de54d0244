/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that are threads of one process, each with a process's ends: messages lie in memory that all of them reach. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/process/process.h"
#include "ref/core/size.h"

typedef struct inbox {
    ari_message *first, **end; /* in order */
    char *ended;               /* why the rank is gone; NULL: it is not */
} inbox;

struct ari_thread_ranks {
    pthread_mutex_t lock;
    int size;
    inbox inbox[]; /* [size] */
};

typedef struct thread_link {
    ari_link base; /* first */
    ari_thread_ranks *ranks;
} thread_link;

static bool thread_send(ari_link *l, const int *to, int n, const ari_message *m)
{
    ari_thread_ranks *t = ((thread_link *)l)->ranks;
    for (int i = 0; i < n; i++) {
        inbox *b = &t->inbox[to[i]];
        ari_message *copy = ari_message_copy(m);
        if (!copy)
            return false;
        pthread_mutex_lock(&t->lock);
        *b->end = copy;
        b->end = &copy->next;
        pthread_mutex_unlock(&t->lock);
    }
    return true;
}

static ari_message *thread_receive(ari_link *l)
{
    ari_thread_ranks *t = ((thread_link *)l)->ranks;
    inbox *b = &t->inbox[l->rank];
    pthread_mutex_lock(&t->lock);
    ari_message *m = b->first;
    if (m && !(b->first = m->next))
        b->end = &b->first;
    pthread_mutex_unlock(&t->lock);
    return m;
}

static int thread_find_ended(ari_link *l, int rank, char *text, size_t size)
{
    ari_thread_ranks *t = ((thread_link *)l)->ranks;
    pthread_mutex_lock(&t->lock);
    while (rank < t->size && !t->inbox[rank].ended)
        rank++;
    if (rank < t->size)
        snprintf(text, size, "%s", t->inbox[rank].ended);
    pthread_mutex_unlock(&t->lock);
    return rank < t->size ? rank : -1;
}

static void thread_destroy(ari_link *l)
{
    free(l);
}

static const ari_link_ops thread_ops = {thread_send, thread_receive, thread_find_ended, thread_destroy};

ar_status ari_thread_ranks_create(ari_thread_ranks **out, int size)
{
    ari_thread_ranks *t = calloc(1, sizeof *t + (size_t)size * sizeof *t->inbox);
    if (!t)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %d ranks", size);
    t->size = size;
    pthread_mutex_init(&t->lock, NULL);
    for (int r = 0; r < size; r++)
        t->inbox[r].end = &t->inbox[r].first;
    *out = t;
    return AR_OK;
}

void ari_thread_ranks_destroy(ari_thread_ranks *t)
{
    for (int r = 0; r < t->size; r++) {
        for (ari_message *m = t->inbox[r].first, *next; m; m = next) {
            next = m->next;
            free(m);
        }
        free(t->inbox[r].ended);
    }
    pthread_mutex_destroy(&t->lock);
    free(t);
}

void ari_thread_rank_ended(ari_thread_ranks *t, int rank, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "rank %d is gone: %s", rank, why);
    pthread_mutex_lock(&t->lock);
    free(t->inbox[rank].ended);
    t->inbox[rank].ended = strdup(text);
    pthread_mutex_unlock(&t->lock);
}

ar_status ari_process_thread_begin(ar_process **out, ari_thread_ranks *t, int rank, const ar_process_options *o)
{
    ARI_OWNED ar_process *p = NULL;
    thread_link *l = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&p, 1, "a rank"));
    AR_TRY(ARI_ALLOC_ZERO(&l, 1, "a rank"));
    l->base = (ari_link){.ops = &thread_ops, .rank = rank, .size = t->size};
    l->ranks = t;
    *p = (ar_process){.ops = &ari_process_store_ops, .rank = rank, .size = t->size, .local_rank = rank, .options = *o};
    AR_TRY(ari_store_create(&p->store, &l->base, o->timeout_ns));
    ARI_GIVE(out, p);
    return AR_OK;
}
