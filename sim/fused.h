/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_FUSED_H
#define ARI_SIM_FUSED_H

#include <stdbool.h>

#include "anyrank/comm.h"

/* Many inputs added and written to many outputs in one go: a block of the sum is held in registers until it lies in
 * every output, so every input is read once, every output is written once, and nothing else touches memory. */

enum { ARI_FUSED_MOST = 64 }; /* inputs, and outputs */

/* The outputs of a block are written after all inputs of the block were read: an output may be one of the inputs. */
typedef struct ari_fused {
    const char *const *in; /* [inputs], in the order of additions: ((in[0] + in[1]) + in[2]) + ... */
    char *const *out;      /* [outputs] */
    int inputs, outputs;
    int divisor;     /* of each sum: a mean; 0: none */
    bool past_cache; /* outputs are written past the cache, until ari_stream_end; needs `at` as ari_fused_head gives
                      * it */
} ari_fused;

/** Computes the bytes [at, end) of the outputs from those of the inputs, as far as whole vectors go; returns where it
 *  stopped. */
typedef size_t (*ari_fused_fn)(const ari_fused *f, size_t at, size_t end);

/** For this type and operation: ari_reduce's bits. NULL: there is none. */
ari_fused_fn ari_fused_kernel(ar_dtype t, ar_op op);
/** How many bytes from `at` on come before a cache line of every output begins. False: the outputs do not lie alike to
 *  cache lines, or lines begin within an element. */
bool ari_fused_head(const ari_fused *f, size_t at, size_t element, size_t *head);

#endif
