/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_REDUCE_H
#define ARI_SIM_REDUCE_H

#include "anyrank/comm.h"

/** out[i] = a[i] op b[i] for i < n. One addition per element, in the type's own arithmetic; integer sums wrap (they are
 *  computed unsigned). out may be a or b; other overlap is not allowed. */
typedef void (*ari_reduce_fn)(void *out, const void *a, const void *b, size_t n);

/** The kernel for a type and operation that the public boundary accepts. */
ari_reduce_fn ari_reduce_kernel(ar_dtype t, ar_op op);

#endif
