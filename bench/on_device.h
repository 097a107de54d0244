/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_ON_DEVICE_H
#define ARI_BENCH_ON_DEVICE_H

#include <stdint.h>

#include "anyrank/device.h"

/* A device and the queue on which a benchmark's kernels run. */
typedef struct ari_bench_device {
    ar_device *d;
    ar_queue *q;
} ari_bench_device;

/** which NULL: the CPU device, with `threads` threads. Errors: those of ar_device_create. On error *b is all NULL. */
AR_NODISCARD ar_status ari_bench_device_create(ari_bench_device *b, const ar_device_choice *which, int threads);
/** Accepts one that is all NULL. */
void ari_bench_device_destroy(ari_bench_device *b);
/** Device memory of n fp32 words with the values of ari_bench_fill. Gives; the device's `free`. Errors: AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW, AR_ERR_DEVICE. */
AR_NODISCARD ar_status ari_bench_values(const ari_bench_device *b, ar_buf *gives, size_t n, uint64_t seed);
/** *seconds: on the monotonic clock, when all work enqueued so far is done. Errors: the queue's first error. */
AR_NODISCARD ar_status ari_bench_clock(const ari_bench_device *b, double *seconds);

#endif
