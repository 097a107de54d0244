/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"
#include "anyrank/queue.h"
#include "anyrank/sim.h"
#include "tests/support/scoped.h"

/* Programs that overlap communication with computation, each with a mistake that only some orders of events show, and
 * without it. A rank that sees a wrong sum returns AR_ERR_DATA. */

enum { ORDERING_RANKS = 3, ORDERING_STEPS = 4, ORDERING_COUNT = 24 };

typedef struct ordering {
    const char *name;
    ar_rank_fn rank; /* its argument: a bool, whether the mistake is mended */
    ar_status fails; /* with what */
} ordering;

static inline int32_t ordering_gradient(int step, int rank, int i)
{
    return (step + 1) * 1000 + rank * 100 + i;
}

static inline void ordering_fill(int32_t *grad, int count, int step, int rank)
{
    for (int i = 0; i < count; i++)
        grad[i] = ordering_gradient(step, rank, i);
}

static inline ar_status ordering_check(const int32_t *sum, int count, int step, int ranks)
{
    for (int i = 0; i < count; i++) {
        int32_t want = 0;
        for (int r = 0; r < ranks; r++)
            want += ordering_gradient(step, r, i);
        if (sum[i] != want)
            return ar_error_set(AR_ERR_DATA, "step %d element %d: %d for %d", step, i, (int)sum[i], (int)want);
    }
    return AR_OK;
}

/* What else a step does takes so long that the gradients' all-reduce is over, nearly always. */
static inline ar_status reuse_metrics(ar_comm *metrics, ar_queue *host)
{
    enum { METRICS = 6 };
    int32_t value[METRICS];
    for (int i = 0; i < METRICS; i++) {
        value[i] = i;
        AR_TRY(
            ar_comm_all_reduce(metrics, host, (ar_buf){&value[i]}, (ar_cbuf){&value[i]}, 1, AR_I32, AR_MAX, "metrics"));
    }
    return AR_OK;
}

typedef struct reuse {
    ar_comm *gradients, *metrics;
    ar_queue *comm, *host;
    ar_event *sent;
    bool mended;
} reuse;

static inline ar_status reuse_steps(const reuse *u)
{
    int32_t grad[ORDERING_COUNT], sum[ORDERING_STEPS][ORDERING_COUNT];
    ar_status st = AR_OK;
    for (int s = 0; s < ORDERING_STEPS && st == AR_OK; s++) {
        if (u->mended)
            st = ar_event_sync(u->sent, 0);
        ordering_fill(grad, ORDERING_COUNT, s, ar_comm_rank(u->gradients));
        if (st == AR_OK)
            st = ar_comm_all_reduce(u->gradients, u->comm, (ar_buf){sum[s]}, (ar_cbuf){grad}, ORDERING_COUNT, AR_I32,
                                    AR_SUM, "gradients");
        if (st == AR_OK)
            st = ar_event_record(u->sent, u->comm);
        if (st == AR_OK)
            st = reuse_metrics(u->metrics, u->host);
    }
    const ar_status done = ar_queue_sync(u->comm, 0); /* in any case: the queue works on this function's memory */
    for (int s = 0; s < ORDERING_STEPS && st == AR_OK && done == AR_OK; s++)
        st = ordering_check(sum[s], ORDERING_COUNT, s, ar_comm_size(u->gradients));
    return st == AR_OK ? done : st;
}

static inline ar_status reuse_too_early(ar_comm *c, void *arg)
{
    OWNED(ar_comm_destroy) ar_comm *metrics = NULL;
    OWNED(ar_event_destroy) ar_event *sent = NULL;
    OWNED(ar_queue_destroy) ar_queue *comm = NULL, *host = NULL;
    AR_TRY(ar_comm_split(&metrics, c, 0, ar_comm_rank(c)));
    AR_TRY(ar_queue_create(&comm, AR_QUEUE_THREAD, "comm"));
    AR_TRY(ar_queue_create(&host, AR_QUEUE_INLINE, "host"));
    AR_TRY(ar_event_create(&sent));
    return reuse_steps(&(reuse){c, metrics, comm, host, sent, *(const bool *)arg});
}

/* Two queues do the backward pass, so the order in which buckets become ready differs between ranks. Mended, the
 * launches have one order, and wait for the buckets. */

typedef struct bucket {
    ar_comm *c;
    ar_queue *comm;
    int32_t grad[ORDERING_COUNT], sum[ORDERING_COUNT];
    int index, count;
    bool launches;
} bucket;

static inline ar_status bucket_launch(bucket *b)
{
    return ar_comm_all_reduce(b->c, b->comm, (ar_buf){b->sum}, (ar_cbuf){b->grad}, (size_t)b->count, AR_I32, AR_SUM,
                              b->index ? "bucket 1" : "bucket 0");
}

static inline ar_status bucket_backward(void *arg)
{
    bucket *b = arg;
    ordering_fill(b->grad, b->count, b->index, ar_comm_rank(b->c));
    return b->launches ? bucket_launch(b) : AR_OK;
}

static inline ar_status bucket_steps(bucket *b, ar_queue *const *backward, ar_queue *comm, ar_event *const *ready)
{
    for (int i = 0; i < 2; i++) {
        AR_TRY(ar_queue_host(backward[i], bucket_backward, &b[i]));
        AR_TRY(ar_event_record(ready[i], backward[i]));
    }
    for (int i = 0; i < 2 && !b[i].launches; i++) {
        AR_TRY(ar_queue_wait(comm, ready[i]));
        AR_TRY(bucket_launch(&b[i]));
    }
    for (int i = 0; i < 2; i++)
        AR_TRY(ar_queue_sync(backward[i], 0));
    AR_TRY(ar_queue_sync(comm, 0));
    for (int i = 0; i < 2; i++)
        AR_TRY(ordering_check(b[i].sum, b[i].count, i, ar_comm_size(b[i].c)));
    return AR_OK;
}

static inline ar_status launch_as_ready(ar_comm *c, void *arg)
{
    ar_queue *comm = NULL, *backward[2] = {NULL};
    ar_event *ready[2] = {NULL};
    bucket b[2] = {{.count = 8}, {.count = 12}};
    ar_status st = ar_queue_create(&comm, AR_QUEUE_THREAD, "comm");
    for (int i = 0; i < 2 && st == AR_OK; i++) {
        st = ar_queue_create(&backward[i], AR_QUEUE_THREAD, i ? "backward 1" : "backward 0");
        if (st == AR_OK)
            st = ar_event_create(&ready[i]);
        b[i].c = c;
        b[i].comm = comm;
        b[i].index = i;
        b[i].launches = !*(const bool *)arg;
    }
    if (st == AR_OK)
        st = bucket_steps(b, backward, comm, ready);
    for (int i = 0; i < 2; i++)
        ar_queue_destroy(backward[i]); /* before the queue that their tasks enqueue on */
    ar_queue_destroy(comm);
    for (int i = 0; i < 2; i++)
        ar_event_destroy(ready[i]);
    return st;
}

typedef struct early_step {
    int32_t grad[ORDERING_COUNT], sum[ORDERING_COUNT];
    int step, rank;
} early_step;

static inline ar_status early_fill(void *arg)
{
    early_step *s = arg;
    ordering_fill(s->grad, ORDERING_COUNT, s->step, s->rank);
    return AR_OK;
}

static inline ar_status early_launch(early_step *s, ar_comm *c, ar_queue *compute, ar_queue *comm, ar_event *ready,
                                     bool mended)
{
    if (!mended)
        AR_TRY(ar_event_record(ready, compute));
    AR_TRY(ar_queue_host(compute, early_fill, s));
    if (mended)
        AR_TRY(ar_event_record(ready, compute));
    AR_TRY(ar_queue_wait(comm, ready));
    return ar_comm_all_reduce(c, comm, (ar_buf){s->sum}, (ar_cbuf){s->grad}, ORDERING_COUNT, AR_I32, AR_SUM,
                              "gradients");
}

static inline ar_status record_too_early(ar_comm *c, void *arg)
{
    early_step step[ORDERING_STEPS] = {0};
    OWNED(ar_event_destroy) ar_event *ready = NULL;
    OWNED(ar_queue_destroy) ar_queue *compute = NULL, *comm = NULL;
    AR_TRY(ar_queue_create(&compute, AR_QUEUE_THREAD, "compute"));
    AR_TRY(ar_queue_create(&comm, AR_QUEUE_THREAD, "comm"));
    AR_TRY(ar_event_create(&ready));
    for (int s = 0; s < ORDERING_STEPS; s++) {
        step[s].step = s;
        step[s].rank = ar_comm_rank(c);
        AR_TRY(early_launch(&step[s], c, compute, comm, ready, *(const bool *)arg));
    }
    AR_TRY(ar_queue_sync(comm, 0));
    for (int s = 0; s < ORDERING_STEPS; s++)
        AR_TRY(ordering_check(step[s].sum, ORDERING_COUNT, s, ar_comm_size(c)));
    return AR_OK;
}

static const ordering orderings[] = {
    {"a buffer reused before its all-reduce has read it", reuse_too_early, AR_ERR_DATA},
    {"buckets launched in the order in which they are ready", launch_as_ready, AR_ERR_MISMATCH},
    {"an event recorded before the work it should cover", record_too_early, AR_ERR_DATA},
};
enum { ORDERINGS = sizeof orderings / sizeof *orderings };
