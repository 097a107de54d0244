/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdint.h>
#include <time.h>

/* Waits and reports use the monotonic clock: a changed wall clock must not end a world. */
static inline uint64_t ari_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/** Returns the processor time of the calling thread, which other programs do not increase. */
static inline uint64_t ari_thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/** Returns now + wait, limited to the largest value, which means "forever". */
static inline uint64_t ari_deadline_ns(uint64_t now_ns, uint64_t wait_ns)
{
    return wait_ns > UINT64_MAX - now_ns ? UINT64_MAX : now_ns + wait_ns;
}

/** A condition variable whose timed waits use the monotonic clock. Returns an errno value. */
int ari_cond_init(pthread_cond_t *cond);
/** Waits on cond at most until the deadline. Returns 0 or ETIMEDOUT. */
int ari_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns);
