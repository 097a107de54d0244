/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"

/** Combines two or four arrays element by element from left to right: ((a op b) op c) op d. Each operation uses the
 *  type's arithmetic; BF16 and F16 use fp32 and round after each operation; integers wrap around (they are computed as
 *  unsigned). out may be one of the inputs; other overlap is not allowed. */
typedef struct ari_reduce {
    void (*pair)(void *out, const void *a, const void *b, size_t n);
    void (*four)(void *out, const void *a, const void *b, const void *c, const void *d, size_t n);
} ari_reduce;

/** The kernels for a type and operation that the public boundary accepts. */
ari_reduce ari_reduce_kernel(ar_dtype t, ar_op op);
