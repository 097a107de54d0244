/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_CPU_EMULATED_IFMA_H
#define TEST_CPU_EMULATED_IFMA_H

#include "anyrank/device.h"

/** Gives a CPU device the exact products that it would have on a processor with AVX-512 IFMA, on emulated
 *  instructions. */
void test_emulate_ifma(ar_device *d);

#endif
