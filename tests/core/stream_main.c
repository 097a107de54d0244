/* SPDX-License-Identifier: Apache-2.0 */
/* A main queue and a communication queue on streams, as a training step uses them, for ThreadSanitizer: buckets of
 * numbers that one stream makes, the other doubles, and the first adds up. */
#include <stdio.h>

#include "ref/core/queue_private.h"
#include "tests/core/fake_stream.h"

enum { BUCKETS = 8, STEPS = 40 };

typedef struct bucket {
    long value, sum;
    ar_event *produced, *carried;
} bucket;

static bool produce(void *arg)
{
    ((bucket *)arg)->value += 1;
    return true;
}

static bool carry(void *arg)
{
    ((bucket *)arg)->value *= 2;
    return true;
}

static bool add_up(void *arg)
{
    bucket *b = arg;
    b->sum += b->value;
    return true;
}

static ar_status enqueue_carry(void *arg, ar_queue *on)
{
    fake_enqueue(ari_queue_stream(on), carry, arg);
    return AR_OK;
}

static ar_status step(bucket *b, ar_queue *q, ar_queue *comm)
{
    for (int i = 0; i < BUCKETS; i++) {
        fake_enqueue(ari_queue_stream(q), produce, &b[i]);
        AR_TRY(ar_event_record(b[i].produced, q));
        AR_TRY(ar_queue_wait(comm, b[i].produced));
        AR_TRY(ari_queue_chain(comm, enqueue_carry, &b[i]));
        AR_TRY(ar_event_record(b[i].carried, comm));
    }
    for (int i = 0; i < BUCKETS; i++) {
        AR_TRY(ar_queue_wait(q, b[i].carried));
        fake_enqueue(ari_queue_stream(q), add_up, &b[i]);
    }
    return AR_OK;
}

static ar_status run(bucket *b, ar_queue *q, ar_queue *comm)
{
    for (int i = 0; i < BUCKETS; i++) {
        AR_TRY(ar_event_create(&b[i].produced));
        AR_TRY(ar_event_create(&b[i].carried));
    }
    for (int i = 0; i < STEPS; i++)
        AR_TRY(step(b, q, comm));
    AR_TRY(ar_queue_sync(comm, 0));
    return ar_queue_sync(q, 0);
}

int main(void)
{
    bucket b[BUCKETS] = {{0}};
    ar_queue *q = fake_queue(AR_QUEUE_INLINE, "main"), *comm = fake_queue(AR_QUEUE_THREAD, "comm");
    if (!q || !comm)
        return 1;
    const ar_status st = run(b, q, comm);
    long value = 0, sum = 0;
    for (int i = 0; i < STEPS; i++) {
        value = (value + 1) * 2;
        sum += value;
    }
    ar_queue_destroy(comm);
    ar_queue_destroy(q);
    int wrong = st != AR_OK;
    for (int i = 0; i < BUCKETS; i++) {
        wrong += b[i].value != value || b[i].sum != sum;
        ar_event_destroy(b[i].produced);
        ar_event_destroy(b[i].carried);
    }
    if (wrong)
        fprintf(stderr, "%d buckets are wrong: %s\n", wrong, ar_error_message());
    return wrong ? 1 : 0;
}
