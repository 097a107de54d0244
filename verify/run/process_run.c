/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/process_run.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/process/process.h"
#include "gpu/cluster/process/process_private.h"
#include "gpu/cluster/process/transport/process_private.h"
#include "gpu/device_private.h"
#include "ref/comm/comm_impl.h"
#include "ref/comm/comm_private.h"
#include "ref/core/device_private.h"
#include "ref/core/os/threads.h"
#include "ref/core/process_private.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

/* --- a rank ------------------------------------------------------------------------------------------------------- */

/* Chooses the process's GPU by its local number. Processes that share a GPU on purpose are assigned to the GPUs in
 * turn. */
static ar_status choose_gpu(ar_device_choice *c, const ar_process *p)
{
    const int gpus = ari_gpu_count();
    c->index = p->local_rank;
    if (p->options.share_gpus && gpus > 0)
        c->index %= gpus;
    if (gpus > 0 && c->index >= gpus)
        return ar_error_set(
            AR_ERR_ARG,
            "process %d is number %d on its machine, which has %d GPU%s: start one process for each, or "
            "say that they are to share them",
            p->rank, p->local_rank, gpus, ARI_PLURAL(gpus));
    return AR_OK;
}

static ar_status check_device(const ar_process *p, const ar_device_choice *which)
{
    const ar_transport t = p->options.transport;
    /* The emulated device needs a library that stands in for NCCL; the communicator distinguishes the two. */
    const bool nccl = which->kind == AR_DEVICE_CUDA || which->kind == AR_DEVICE_EMULATED;
    if (t == AR_TRANSPORT_NCCL ? nccl : which->kind != AR_DEVICE_CUDA)
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED, "transport %s between ranks on the device %s: %s", ari_transport_name(t),
                        ari_device_kind_name(which->kind),
                        t == AR_TRANSPORT_NCCL ? "NCCL moves what lies on GPUs, which is the device cuda"
                                               : "MPI moves what lies in the memory of hosts; between GPUs take nccl");
}

ar_status ari_process_fail(ar_comm *world, ar_status local_status)
{
    const ari_outcome outcome = ari_outcome_of(local_status);
    const char *message = "";
    if (local_status != AR_ERR_ABORTED)
        ari_comm_abort(world, local_status, outcome.message);
    const ar_status first_status = world->ops->error(world, &message);
    return first_status == AR_OK ? ari_outcome_status(&outcome) : ar_error_set(first_status, "%s", message);
}

ar_status ari_process_run(ar_process *p, const ar_device_choice *which, int threads,
                          ar_status (*fn)(ar_comm *world, ar_device *d, void *arg), void *arg)
{
    ar_device_choice choice = *which;
    ar_device *d = NULL;
    ar_comm *world = NULL;
    /* A process that cannot take part, for example for lack of a GPU, must not leave the others waiting. */
    ar_status st = check_device(p, which);
    if (st == AR_OK && choice.kind == AR_DEVICE_CUDA)
        st = choose_gpu(&choice, p);
    if (st == AR_OK)
        st = ar_device_create(&d, &choice, threads);
    st = ari_process_agree(p, st);
    if (st == AR_OK)
        st = ar_process_comm(&world, p, d);
    if (st == AR_OK)
        st = fn(world, d, arg);
    if (st != AR_OK && world)
        st = ari_process_fail(world, st);
    ar_comm_destroy(world);
    ar_device_destroy(d);
    return st;
}

/* --- ranks as threads --------------------------------------------------------------------------------------------- */

typedef struct thread_rank {
    pthread_t thread;
    ari_thread_ranks *ranks;
    int rank;
    const ar_process_options *options;
    const ar_device_choice *which;
    int threads;
    ar_status (*fn)(ar_comm *world, ar_device *d, void *arg);
    void *arg;
    ari_outcome outcome;
} thread_rank;

static void *thread_rank_main(void *user)
{
    thread_rank *t = user;
    ar_process *p = NULL;
    ar_error_clear();
    ar_status st = ari_process_thread_create(&p, t->ranks, t->rank, t->options);
    if (st == AR_OK)
        st = ari_process_run(p, t->which, t->threads, t->fn, t->arg);
    t->outcome = ari_outcome_of(st);
    if (!p)
        ari_thread_rank_ended(t->ranks, t->rank, t->outcome.message);
    ar_process_destroy(p);
    return NULL;
}

/* Returns the outcome of the first rank whose message says more than that another rank failed. */
static ar_status outcome_of_all(const thread_rank *rank, int n)
{
    const ari_outcome *first_failure = NULL;
    for (int r = 0; r < n; r++) {
        const ari_outcome *o = &rank[r].outcome;
        if (o->status != AR_OK &&
            (!first_failure || (first_failure->status == AR_ERR_ABORTED && o->status != AR_ERR_ABORTED)))
            first_failure = o;
    }
    return first_failure ? ari_outcome_status(first_failure) : AR_OK;
}

ar_status ari_process_run_threads(int ranks, const ar_process_options *o, const ar_device_choice *which, int threads,
                                  ar_status (*fn)(ar_comm *world, ar_device *d, void *arg), void *arg)
{
    char nccl[1024];
    ARI_OWNED thread_rank *rank = NULL;
    ari_thread_ranks *thread_ranks = NULL;
    /* NCCL is loaded before any thread starts, because loading sets environment variables that threads read. */
    if (!ari_transport_describe(AR_TRANSPORT_NCCL, nccl, sizeof nccl))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s", nccl);
    AR_TRY(ARI_ALLOC_ZERO(&rank, (size_t)ranks, "ranks"));
    AR_TRY(ari_thread_ranks_create(&thread_ranks, ranks));
    int started = 0, rc = 0;
    for (; started < ranks && rc == 0; started += rc == 0) {
        rank[started] = (thread_rank){.ranks = thread_ranks,
                                      .rank = started,
                                      .options = o,
                                      .which = which,
                                      .threads = threads,
                                      .fn = fn,
                                      .arg = arg};
        rc = ari_thread_create(&rank[started].thread, thread_rank_main, &rank[started]);
    }
    for (int r = started; r < ranks; r++)
        ari_thread_rank_ended(thread_ranks, r, strerror(rc));
    for (int r = 0; r < started; r++)
        pthread_join(rank[r].thread, NULL);
    ari_thread_ranks_destroy(thread_ranks);
    if (started < ranks)
        return ar_error_set(AR_ERR_MEMORY, "no thread for rank %d of %d: %s", started, ranks, strerror(rc));
    return outcome_of_all(rank, ranks);
}

/* --- agreement ---------------------------------------------------------------------------------------------------- */

/* Takes the outcome of the lowest rank that has one. */
static void first_of(ari_outcome *v, const ari_outcome *outcomes, int n)
{
    *v = (ari_outcome){.status = AR_OK};
    for (int r = n - 1; r >= 0; r--) {
        if (outcomes[r].status != AR_OK)
            *v = outcomes[r];
    }
}

static void take_verdicts(ari_outcome *v, const void *gathered, const size_t *sizes, int n)
{
    int r = 0;
    while (r < n && sizes[r] == sizeof *v)
        r++;
    if (r == n) {
        first_of(v, gathered, n);
        return;
    }
    *v = (ari_outcome){.status = AR_ERR_INTERNAL};
    snprintf(v->message, sizeof v->message,
             "process %d is elsewhere than process 0: all processes run the same program with the same options", r);
}

ar_status ari_process_give_up(ar_process *p, ar_status st)
{
    const ari_outcome outcome = ari_outcome_of(st);
    ari_process_abort(p, st, outcome.message);
    return ari_outcome_status(&outcome);
}

ar_status ari_process_agree(ar_process *p, ar_status local_status)
{
    ari_outcome v = ari_outcome_of(local_status);
    ARI_OWNED void *gathered = NULL;
    ARI_OWNED size_t *sizes = NULL;
    ar_status st = ARI_ALLOC_ZERO(&sizes, (size_t)p->size, "what the processes say");
    if (st != AR_OK)
        return ari_process_give_up(p, st);
    st = ari_process_gather(p, &gathered, sizes, &v, sizeof v);
    if (st == AR_OK && gathered)
        take_verdicts(&v, gathered, sizes, p->size);
    if (st == AR_OK)
        st = ari_process_broadcast(p, &v, sizeof v);
    AR_TRY(st);
    return ari_outcome_status(&v);
}

/* --- bytes -------------------------------------------------------------------------------------------------------- */

ar_status ari_bytes_put(ari_bytes *b, const void *src, size_t n)
{
    size_t total_bytes = 0;
    AR_TRY(ari_add_size(&total_bytes, b->count, n));
    if (total_bytes > b->capacity) {
        const size_t capacity = total_bytes > SIZE_MAX / 2 ? total_bytes : 2 * total_bytes;
        void *larger = realloc(b->data, capacity);
        if (!larger)
            return ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes of a rank's results", capacity);
        b->data = larger;
        b->capacity = capacity;
    }
    if (n > 0)
        memcpy(b->data + b->count, src, n);
    b->count = total_bytes;
    return AR_OK;
}

void ari_bytes_fini(ari_bytes *b)
{
    free(b->data);
    *b = (ari_bytes){.count = 0};
}

ar_status ari_bytes_take(ari_bytes *b, void *dst, size_t n)
{
    if (n > b->count)
        return ar_error_set(AR_ERR_INTERNAL,
                            "a process sent %zu bytes where %zu were expected: do all processes run the "
                            "same program with the same options?",
                            b->count, n);
    if (n > 0)
        memcpy(dst, b->data, n);
    b->data += n;
    b->count -= n;
    return AR_OK;
}

static ar_status take_each(int ranks, unsigned char *gathered, const size_t *sizes,
                           ar_status (*consumer)(void *user, int rank, ari_bytes *b), void *user)
{
    for (int r = 0; r < ranks; r++) {
        ari_bytes rank_bytes = {.data = gathered, .count = sizes[r]};
        AR_TRY(consumer(user, r, &rank_bytes));
        gathered += sizes[r];
    }
    return AR_OK;
}

ar_status ari_process_collect(ar_process *p, const ari_bytes *local_bytes,
                              ar_status (*consumer)(void *user, int rank, ari_bytes *b), void *user)
{
    ARI_OWNED void *gathered = NULL;
    ARI_OWNED size_t *sizes = NULL;
    ar_status st = ARI_ALLOC_ZERO(&sizes, (size_t)p->size, "sizes of the processes' results");
    if (st == AR_OK)
        st = ari_process_gather(p, &gathered, sizes, local_bytes->data, local_bytes->count);
    if (st == AR_ERR_MEMORY) /* a failure of this process only */
        st = ari_process_give_up(p, st);
    if (st == AR_OK) {
        if (p->rank == 0)
            st = take_each(p->size, gathered, sizes, consumer, user);
        st = ari_process_agree(p, st);
    }
    return st;
}
