/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"

/* Private functions of anyrank/device.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Describes the int8 products of this process that cuBLAS refused and the device's own kernel computed: "none", or
 *  their number and the first shapes, such as "12: 1 x [4, 8] of 64 terms (10), 2 x [1, 4] of 16 terms (2)"; truncates.
 *  Returns the number. */
uint64_t ari_gpu_refused_products(char *text, size_t size);

AR_END_DECLS
