/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_REFERENCE_USE_NAMES_H
#define ARI_VERIFY_REFERENCE_USE_NAMES_H

#include "anyrank/context.h"

/* A module may be used twice in one forward pass, and then reports under one name twice. Between begin and end the
 * second report of a value with the same place is passed on as "name (use 2)"; the micro-batches of a rank have other
 * places. */
typedef struct ari_use_names {
    ar_tap_fn tap; /* who listened before */
    void *tap_user;
    struct ari_use *use; /* [count], of the step under way */
    size_t count, capacity;
    uint32_t step;
} ari_use_names;

/** Comes between the context and its listener; does nothing where nobody listens. */
void ari_use_names_begin(ari_use_names *n, ar_ctx *ctx);
void ari_use_names_end(ari_use_names *n, ar_ctx *ctx);

#endif
