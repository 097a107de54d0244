/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#include "anyrank/status.h"

/* Work in pieces, on threads: one task; `worker` below the number of threads. */
typedef ar_status (*ari_task_fn)(void *user, size_t task, int worker);
typedef struct ari_tasks {
    size_t n;
    int threads; /* at least 1; the calling thread is the first */
    ari_task_fn run;
    void *user;
    void (*progress)(void *user, size_t done_count); /* by the calling thread, now and then; NULL */
} ari_tasks;
/** Runs all. Errors: the lowest task's that failed; others may then not have run. */
AR_NODISCARD ar_status ari_tasks_run(const ari_tasks *t);
