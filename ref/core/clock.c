/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/clock.h"

int ari_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int rc = pthread_condattr_init(&attr);
    if (rc != 0)
        return rc;
    rc = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    if (rc == 0)
        rc = pthread_cond_init(cond, &attr);
    pthread_condattr_destroy(&attr);
    return rc;
}

int ari_cond_wait_until(pthread_cond_t *cond, pthread_mutex_t *lock, uint64_t deadline_ns)
{
    /* Some systems refuse times beyond a signed 32-bit second count; a day is as good as for ever, callers loop. */
    const uint64_t day_ns = 86400u * (uint64_t)1000000000u;
    const uint64_t latest = ari_now_ns() + day_ns;
    const uint64_t until = deadline_ns < latest ? deadline_ns : latest;
    const struct timespec t = {.tv_sec = (time_t)(until / 1000000000u), .tv_nsec = (long)(until % 1000000000u)};
    return pthread_cond_timedwait(cond, lock, &t);
}
