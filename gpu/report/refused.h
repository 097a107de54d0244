/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Records an int8 product that the library refused, for ari_gpu_refused_products (anyrank/device.h). Threads: any. */
void ari_gpu_note_refused(size_t m, size_t n, size_t k, size_t batch);

#ifdef __cplusplus
}
#endif
