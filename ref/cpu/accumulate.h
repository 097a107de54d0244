/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_ACCUMULATE_H
#define ARI_CPU_ACCUMULATE_H

#include <stddef.h>
#include <stdint.h>

/** Adds v[0..n) to n elements of the order-independent accumulator, one value each, whose state starts at t, h, l. */
void ari_accumulate(uint8_t *t, int64_t *h, int64_t *l, const float *v, size_t n);

#endif
