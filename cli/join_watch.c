/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/join_watch.h"

#include <stdio.h>
#include <unistd.h>

#include "ref/core/clock.h"

/* A library that keeps the timeout itself says more; and none begins in no time. */
static const double least_seconds = 10, more_seconds = 2;

static void *watch(void *arg)
{
    ari_join_watch *w = arg;
    pthread_mutex_lock(&w->lock);
    while (!w->over && ari_now_ns() < w->deadline_ns)
        (void)ari_cond_wait_until(&w->changed, &w->lock, w->deadline_ns);
    const bool over = w->over;
    pthread_mutex_unlock(&w->lock);
    if (over)
        return NULL;
    if (w->errors >= 0)
        dprintf(w->errors,
                "anyrank: waited %.0f s for the launcher's other processes to join: do all of them run the same "
                "command, with the same --transport?\n",
                w->seconds);
    _exit(w->exit_code);
}

void ari_join_watch_begin(ari_join_watch *w, double timeout_s, int errors, int exit_code)
{
    const double seconds = (timeout_s > least_seconds ? timeout_s : least_seconds) + more_seconds;
    *w = (ari_join_watch){.seconds = seconds,
                          .deadline_ns = ari_now_ns() + (uint64_t)(seconds * 1e9),
                          .errors = errors,
                          .exit_code = exit_code};
    if (pthread_mutex_init(&w->lock, NULL) != 0)
        return;
    if (ari_cond_init(&w->changed) != 0) {
        pthread_mutex_destroy(&w->lock);
        return;
    }
    w->runs = pthread_create(&w->thread, NULL, watch, w) == 0;
    if (!w->runs) {
        pthread_cond_destroy(&w->changed);
        pthread_mutex_destroy(&w->lock);
    }
}

void ari_join_watch_end(ari_join_watch *w)
{
    if (!w->runs)
        return;
    pthread_mutex_lock(&w->lock);
    w->over = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    w->runs = false;
}
