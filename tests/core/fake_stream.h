/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A stream whose work a thread does, as a GPU would: later than it is enqueued, and in order. */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "ref/core/queue_impl.h"

typedef bool (*fake_work)(void *arg); /* false: the stream fails */

typedef struct fake_item {
    struct fake_item *next;
    fake_work fn;
    void *arg;
} fake_item;

/* Counted references: the stream, its thread, marks. */
typedef struct fake_state {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    fake_item *head, **tail;
    uint64_t enqueued, done;
    int refs;
    bool stop, failed;
} fake_state;

typedef struct fake_stream {
    ari_stream base;
    fake_state *state;
    pthread_t thread;
} fake_stream;

typedef struct fake_mark {
    ari_mark base;
    fake_state *state;
    uint64_t at;
} fake_mark;

static inline fake_state *fake_keep(fake_state *s)
{
    pthread_mutex_lock(&s->lock);
    s->refs++;
    pthread_mutex_unlock(&s->lock);
    return s;
}

static inline void fake_release(fake_state *s)
{
    pthread_mutex_lock(&s->lock);
    const bool last = --s->refs == 0;
    pthread_mutex_unlock(&s->lock);
    if (!last)
        return;
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

static inline void *fake_worker(void *arg)
{
    fake_state *s = arg;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->head && !s->stop)
            pthread_cond_wait(&s->changed, &s->lock);
        if (s->stop)
            break;
        fake_item *item = s->head;
        s->head = item->next;
        if (!s->head)
            s->tail = &s->head;
        pthread_mutex_unlock(&s->lock);
        const bool ok = item->fn(item->arg);
        free(item);
        pthread_mutex_lock(&s->lock);
        s->failed |= !ok;
        s->done++;
        pthread_cond_broadcast(&s->changed);
    }
    while (s->head) { /* never done: who destroys a stream has waited for it */
        fake_item *item = s->head;
        s->head = item->next;
        free(item);
    }
    pthread_mutex_unlock(&s->lock);
    fake_release(s);
    return NULL;
}

static inline void fake_enqueue(ari_stream *stream, fake_work fn, void *arg)
{
    fake_state *s = ((fake_stream *)stream)->state;
    fake_item *item = malloc(sizeof *item);
    *item = (fake_item){.fn = fn, .arg = arg};
    pthread_mutex_lock(&s->lock);
    *s->tail = item;
    s->tail = &item->next;
    s->enqueued++;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static inline ar_status fake_await(const ari_mark *mark, uint64_t timeout_ns)
{
    const fake_mark *m = (const fake_mark *)mark;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    const uint64_t ns = (uint64_t)until.tv_nsec + timeout_ns;
    until = (struct timespec){until.tv_sec + (time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    pthread_mutex_lock(&m->state->lock);
    int rc = 0;
    while (m->state->done < m->at && rc == 0)
        rc = timeout_ns ? pthread_cond_timedwait(&m->state->changed, &m->state->lock, &until)
                        : pthread_cond_wait(&m->state->changed, &m->state->lock);
    const bool failed = m->state->failed;
    pthread_mutex_unlock(&m->state->lock);
    if (rc != 0)
        return ar_error_set(AR_ERR_TIMEOUT, "the stream is not there yet");
    return failed ? ar_error_set(AR_ERR_DEVICE, "the stream failed") : AR_OK;
}

static inline ar_status fake_poll(const ari_mark *mark, bool *done)
{
    const fake_mark *m = (const fake_mark *)mark;
    pthread_mutex_lock(&m->state->lock);
    *done = m->state->done >= m->at;
    const bool failed = m->state->failed;
    pthread_mutex_unlock(&m->state->lock);
    return failed ? ar_error_set(AR_ERR_DEVICE, "the stream failed") : AR_OK;
}

static inline void fake_mark_destroy(ari_mark *mark)
{
    fake_mark *m = (fake_mark *)mark;
    fake_release(m->state);
    free(m);
}

static inline ar_status fake_mark_at(ari_stream *stream, ari_mark **gives)
{
    fake_state *s = ((fake_stream *)stream)->state;
    fake_mark *m = (fake_mark *)*gives;
    if (!m) {
        m = malloc(sizeof *m);
        m->base.ops = stream->ops;
    } else {
        fake_release(m->state);
    }
    m->state = fake_keep(s);
    pthread_mutex_lock(&s->lock);
    m->at = s->enqueued;
    pthread_mutex_unlock(&s->lock);
    *gives = &m->base;
    return AR_OK;
}

static inline bool fake_do_wait(void *arg)
{
    ari_mark *copy = arg;
    (void)fake_await(copy, 0); /* whoever waits on the host hears of its error */
    fake_mark_destroy(copy);
    return true;
}

static inline ar_status fake_wait(ari_stream *stream, const ari_mark *mark)
{
    fake_mark *copy = malloc(sizeof *copy);
    *copy = *(const fake_mark *)mark;
    fake_keep(copy->state);
    fake_enqueue(stream, fake_do_wait, copy);
    return AR_OK;
}

static inline void fake_destroy(ari_stream *stream)
{
    fake_stream *s = (fake_stream *)stream;
    pthread_mutex_lock(&s->state->lock);
    s->state->stop = true;
    pthread_cond_broadcast(&s->state->changed);
    pthread_mutex_unlock(&s->state->lock);
    pthread_join(s->thread, NULL);
    fake_release(s->state);
    free(s);
}

static const ari_stream_ops fake_ops = {.mark = fake_mark_at,
                                        .wait = fake_wait,
                                        .await = fake_await,
                                        .poll = fake_poll,
                                        .mark_destroy = fake_mark_destroy,
                                        .destroy = fake_destroy};

/* NULL where anything fails. */
static inline ar_queue *fake_queue(ar_queue_kind kind, const char *name)
{
    fake_stream *s = calloc(1, sizeof *s);
    s->base.ops = &fake_ops;
    s->state = calloc(1, sizeof *s->state);
    pthread_mutex_init(&s->state->lock, NULL);
    pthread_cond_init(&s->state->changed, NULL);
    s->state->tail = &s->state->head;
    s->state->refs = 2;
    ar_queue *q = NULL;
    if (pthread_create(&s->thread, NULL, fake_worker, s->state) != 0 ||
        ari_queue_create_on(&q, kind, name, &s->base) != AR_OK)
        return NULL;
    return q;
}
