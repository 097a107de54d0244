/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/layers/attention/blocks.h"
#include "ref/layers/attention/core.h"

/* Saved activations of an attention besides q, k and v. An object of the step. */
typedef struct ari_core_kept {
    size_t batch;
    ari_keys *visible; /* [b, rows], on the host: the keys that a query sees by order alone; NULL: no documents */
    ari_keys *seen;    /* [rows], likewise: those that it sees in some sample; NULL: not read */
    ar_tensor keys, padding, additive; /* the same on the device, and the masks; additive: of the rows here */
    ar_tensor max, sum;                /* int32, f64 [b * heads * rows]: of the scores' rows */
} ari_core_kept;

/** An empty one, with the masks of a batch. Ends with the step, or by ari_step_disown. Errors: AR_ERR_MEMORY,
 *  AR_ERR_SHAPE (a sequence too long to number), those of the device. */
AR_NODISCARD ar_status ari_core_masks(const ari_core *c, ar_ctx *ctx, ari_core_kept **gives, const ar_batch *batch);
/** The masks as the device's slots take them. */
ar_mask ari_core_mask(const ari_core *c, const ari_core_kept *kept);
/** Without documents. */
ari_order ari_core_order(const ari_core *c);
