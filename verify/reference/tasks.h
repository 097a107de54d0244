/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "anyrank/status.h"

/* A function that runs one task of a larger job; `worker` is below the number of threads. */
typedef ar_status (*ari_task_fn)(void *user, size_t task, int worker);
typedef struct ari_tasks {
    size_t n;
    int threads; /* number of threads, at least 1; the calling thread is the first */
    ari_task_fn run;
    void *user;
    void (*progress)(void *user, size_t done_count); /* called by the calling thread from time to time; may be NULL */
} ari_tasks;
/** Runs all tasks. Errors: that of the lowest task that failed; other tasks may then not have run. */
AR_NODISCARD ar_status ari_tasks_run(const ari_tasks *t);
