/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdbool.h>

#include "ref/core/os/os.h"

#if ARI_OS_LINUX
#include <semaphore.h>
typedef sem_t ari_semaphore;
#else /* Darwin's sem_init always fails */
typedef struct ari_semaphore {
    pthread_mutex_t lock;
    pthread_cond_t raised;
    unsigned int count;
} ari_semaphore;
#endif
/** Stack size of every thread, independent of `ulimit -s`: Linux's default. */
enum { ARI_STACK_BYTES = 8 * 1024 * 1024 };
/** Calls pthread_create with such a stack. Returns an errno value. */
int ari_thread_create(pthread_t *thread, void *(*run)(void *), void *user);

/** Creates a semaphore for this process with value 0. Returns false if the system has none left. */
bool ari_semaphore_init(ari_semaphore *s);
void ari_semaphore_fini(ari_semaphore *s);
void ari_semaphore_post(ari_semaphore *s);
void ari_semaphore_wait(ari_semaphore *s);

/** Returns the number of cores on which this process may run (its affinity mask, if there is one), at least 1. */
int ari_cores(void);
/** Returns the core that the calling thread is on; 0 if unknown. */
int ari_this_core(void);
/** Moves the calling thread to the i-th core (modulo their number) on which it may run. The system may move it away
 *  later. */
void ari_begin_on_core(int i);
