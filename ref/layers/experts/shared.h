/* SPDX-License-Identifier: Apache-2.0 */
/* Shared expert: all tokens go to it, in addition to the experts that a router chooses. */
#pragma once

#include "anyrank/layers.h"

typedef struct ari_shared {
    ar_module *expert, *gate; /* NULL: no shared expert; owned */
    size_t hidden;
} ari_shared;

/** Initialises the shared expert, sharded like the others or replicated (cut, and placement: the rank's tokens). Does
 *  nothing if o has none. Errors: those of ar_mlp_create. */
AR_NODISCARD ar_status ari_shared_init(ari_shared *s, ar_ctx *ctx, const char *module, const ar_experts_options *o,
                                       const ar_branch_split *cut, ar_placement placement);
void ari_shared_fini(ari_shared *s);
size_t ari_shared_children(const ari_shared *s, ar_module **out, size_t cap);
/** y += sigmoid(x*v^T)*shared(x), or without a gate shared(x). */
AR_NODISCARD ar_status ari_shared_forward(ari_shared *s, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                                          const ar_tensor *x, const ar_batch *batch);
/** dx += the gradient through both. */
AR_NODISCARD ar_status ari_shared_backward(ari_shared *s, ar_ctx *ctx, ar_saved *saved, const ar_tensor *dx,
                                           const ar_tensor *dy, const ar_batch *batch);
