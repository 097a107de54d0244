/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/reference/tasks.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "ref/core/os/threads.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

/* A pool of threads for one job: each thread takes the next task until none is left. */
typedef struct pool {
    const ari_tasks *tasks;
    atomic_size_t next_task, done_count;
    pthread_mutex_t lock; /* protects the following fields */
    size_t failed;        /* the lowest task that failed; SIZE_MAX: none */
    ari_outcome outcome;  /* outcome of that task */
} pool;

typedef struct worker {
    pool *pool;
    int index;
    pthread_t thread;
} worker;

static void keep_failure(pool *p, size_t task, ar_status st)
{
    pthread_mutex_lock(&p->lock);
    if (task < p->failed) {
        p->failed = task;
        p->outcome = ari_outcome_of(st);
    }
    pthread_mutex_unlock(&p->lock);
    atomic_store(&p->next_task, p->tasks->n); /* nobody begins another */
}

static void work(pool *p, int index)
{
    const ari_tasks *t = p->tasks;
    for (;;) {
        const size_t task = atomic_fetch_add(&p->next_task, 1);
        if (task >= t->n)
            return;
        const ar_status st = t->run(t->user, task, index);
        if (st != AR_OK)
            keep_failure(p, task, st);
        const size_t done_count = atomic_fetch_add(&p->done_count, 1) + 1;
        if (index == 0 && t->progress)
            t->progress(t->user, done_count);
    }
}

static void *worker_main(void *user)
{
    const worker *w = user;
    work(w->pool, w->index);
    return NULL;
}

ar_status ari_tasks_run(const ari_tasks *t)
{
    pool p = {.tasks = t, .failed = SIZE_MAX, .lock = PTHREAD_MUTEX_INITIALIZER};
    worker *workers = NULL;
    const int threads = t->n < (size_t)t->threads ? (int)t->n : t->threads;
    int started = 1; /* the calling thread */
    AR_TRY(ARI_ALLOC_ZERO(&workers, (size_t)(threads > 0 ? threads : 1), "threads"));
    for (; started < threads; started++) {
        workers[started] = (worker){.pool = &p, .index = started};
        if (ari_thread_create(&workers[started].thread, worker_main, &workers[started]) != 0)
            break; /* fewer threads do the same work */
    }
    work(&p, 0);
    for (int i = 1; i < started; i++)
        pthread_join(workers[i].thread, NULL);
    free(workers);
    pthread_mutex_destroy(&p.lock);
    return ari_outcome_status(&p.outcome);
}
