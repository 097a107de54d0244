/* SPDX-License-Identifier: Apache-2.0 */
/* Internals of the optimizer: its state for parameters and for shards of them, and its updates. */
#pragma once

#include "anyrank/train.h"
#include "ref/numerics/optimizer.h"

/* --- an update ---------------------------------------------------------------------------------------------------- */

/* Common part of an optimizer of full parameters and of one of shards: counting steps, resolving a parameter's options,
 * updating a run of its elements. */

/* Options of one parameter: those of the last matching group, otherwise the optimizer's and its decay rule's. */
typedef struct ari_update_rule {
    double lr_scale, weight_decay;
} ari_update_rule;

/** Returns how a parameter is updated. name: Hugging Face name; ndim: dimensions of the Hugging Face shape. */
ari_update_rule ari_update_rule_of(const ar_optimizer_options *o, const char *name, int ndim);

/** Begins a step: advances the clock. Call it once per ar_optimizer_step, also if this rank updates nothing. */
void ari_update_begin(ari_optimizer_clock *clock, const ar_optimizer_options *o, const ar_ctx *ctx);
/** Returns the constants for updating p's elements in the current step. */
ari_optimizer_constants ari_update_constants(const ari_optimizer_clock *clock, const ar_optimizer_options *o,
                                             const ar_param *p, const ar_ctx *ctx);

/* Consecutive elements of one parameter. All values are fp32, except a weight that has a master; ptr NULL: no such
 * value. */
typedef struct ari_update_part {
    ar_buf weight; /* the weight that the layers read */
    ar_buf master; /* for a BF16 weight: the unrounded weight, which `weight` stores rounded; otherwise NULL */
    ar_buf m, v;
} ari_update_part;

/** Updates the part with its gradients g, contiguous on the device. The caller increments the parameter's version. */
AR_NODISCARD ar_status ari_update_apply(ar_ctx *ctx, const ari_update_part *part, const ar_tensor *g,
                                        const ari_optimizer_constants *k);

/** Returns the optimizer that updates p: Muon updates matrices only, AdamW all other parameters. */
ar_optimizer_kind ari_update_kind(const ar_optimizer_options *o, const ar_param *p);

/* --- state -------------------------------------------------------------------------------------------------------- */

/* An optimizer's state for one parameter or a shard of it. It is loaded and saved by its position in the full
 * tensor. */
typedef struct ari_state {
    ar_param *param;     /* borrowed */
    bool is_full;        /* true: the state covers the whole value in its layout; false: the elements [start, start +
                            count) */
    size_t start, count; /* of the parameter's matrix, which begin at position `bucket_offset` of a bucket */
    size_t bucket, bucket_offset;
    ari_update_part part; /* `weight` is not part of it */
} ari_state;
typedef const float *(*ari_state_find)(void *user, const char *param, const char *state, size_t count);

/** True if a step changes a parameter. */
static inline bool ari_is_updated(const ar_param *p)
{
    return p->requires_grad && p->has_grad;
}
/** Initialises a state before the first step: moments are zero, and the master copy of a BF16 parameter is its value.
 *  The caller has set param, is_full, start and count. Adds the allocated bytes to *bytes. After a failure the caller
 *  calls ari_state_destroy. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_state_create(ari_state *s, size_t *bytes, ar_ctx *ctx, const ar_optimizer_options *o);
/** Gets a tensor with the value's shape for loading or saving a state: `state` itself, or for a shard temporary memory
 *  into which the shard is copied (filled) or from which it is copied back. */
AR_NODISCARD ar_status ari_state_begin(ar_tensor *local, const ari_state *s, ar_ctx *ctx, ar_buf state, bool filled);
AR_NODISCARD ar_status ari_state_end(ar_tensor *local, const ari_state *s, ar_ctx *ctx, ar_buf state, bool is_stored);
/** Sets *o to the positions of the state's elements in the Hugging Face shape. */
AR_NODISCARD ar_status ari_state_layout(ar_layout *o, const ari_state *s, ar_ctx *ctx);
/** Taps the first moment (SGD: the momentum) as ':m' and the second as ':v' if they exist. */
AR_NODISCARD ar_status ari_state_tap(const ari_state *s, ar_ctx *ctx);

/** Applies QK-Clip to a state's updated weights. */
AR_NODISCARD ar_status ari_update_clip(ar_ctx *ctx, const ari_state *s, const ari_update_part *part);

struct ar_optimizer {
    ar_optimizer_options options;
    ari_optimizer_clock clock;
    ar_device *device; /* the device that holds the state; borrowed */
    ar_ddp *ddp;       /* for ZeRO: the borrowed object whose buckets are sharded; NULL: the states cover whole
                          parameters */
    ari_state *states; /* [n] states of the parameters that require a gradient, or of this rank's shards of them */
    size_t n;
    size_t bytes; /* bytes of all states */
};

/* --- Muon --------------------------------------------------------------------------------------------------------- */

/** Updates a matrix. s: this rank's state of it, NULL if it has no share; g: the gradient of the state's elements. The
 *  caller increments the version. Collective over the ranks that hold parts of the matrix, in the order of the
 *  parameters. */
AR_NODISCARD ar_status ari_muon_step(const ar_optimizer *o, ar_ctx *ctx, const ar_param *p, const ari_state *s,
                                     const ar_tensor *g);

/* --- ZeRO ------------------------------------------------------------------------------------------------- */

/** Creates the states for this rank's shards of the buckets of o->ddp. After a failure ar_optimizer_destroy frees what
 *  was created. Errors: AR_ERR_ARG (a ddp without ZeRO), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_zero_init(ar_optimizer *o, ar_ctx *ctx);
/** Begins a step of the clock, updates the shares, below stage 3 receives the other shares from their ranks, and taps
 *  ':new', and ':m' and ':v' of the shares. Collective over the ranks that share. */
AR_NODISCARD ar_status ari_zero_step(ar_optimizer *o, ar_ctx *ctx, float scale);
