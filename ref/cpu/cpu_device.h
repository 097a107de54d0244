/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_CPU_DEVICE_H
#define ARI_CPU_CPU_DEVICE_H

#include "anyrank/device.h"
#include "ref/cpu/pool.h"

/* An instance of the CPU device. It has a table of its own, since the exact products depend on the processor
 * (gemm_paths.h). */
typedef struct ari_cpu_device {
    ar_device base; /* first: an ar_device of this kind is one of these */
    ar_device_ops ops;
    ari_pool pool;
} ari_cpu_device;

#endif
