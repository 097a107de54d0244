/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_PARALLEL_H
#define ARI_CPU_PARALLEL_H

#include <stddef.h>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "anyrank/device.h"

/* The number of this thread inside a parallel region; 0 outside and without OpenMP. */
static inline size_t ari_thread_number(void)
{
#if defined(_OPENMP)
    return (size_t)omp_get_thread_num();
#else
    return 0;
#endif
}

/* Threads for `items` independent pieces of `work` element operations in all: one below the size where a fork and join
 * (some microseconds) costs more than it saves, and one in a build without OpenMP. */
static inline int ari_threads_for(const ar_device *d, size_t items, size_t work)
{
#if defined(_OPENMP)
    if (d->threads <= 1 || items <= 1 || work < 32768)
        return 1;
    return items < (size_t)d->threads ? (int)items : d->threads;
#else
    (void)d;
    (void)items;
    (void)work;
    return 1;
#endif
}

#endif
