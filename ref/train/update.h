/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_TRAIN_UPDATE_H
#define ARI_TRAIN_UPDATE_H

#include "anyrank/param.h"
#include "ref/numerics/optimizer.h"

/* What an optimizer of whole parameters and one of shares of them do alike: count steps, resolve the options of one
 * parameter, update a run of its elements. */

/* The options of one parameter: those of the last group that matches, else the optimizer's and its decay rule's. */
typedef struct ari_update_rule {
    double lr_scale, weight_decay;
} ari_update_rule;

/** name: Hugging Face name; ndim: of the Hugging Face shape. */
ari_update_rule ari_update_rule_of(const ar_optimizer_options *o, const char *name, int ndim);

/** Begins a step: advances the clock. Once per ar_optimizer_step, also where this rank updates nothing. */
void ari_update_begin(ari_optimizer_clock *clock, const ar_optimizer_options *o, const ar_ctx *ctx);
/** The clock after `steps` steps, by as many multiplications: at most UINT32_MAX of them, what a training step counts.
 *  Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_update_clock(ari_optimizer_clock *clock, const ar_optimizer_options *o, uint64_t steps);
/** What the updates of p's elements share in the step that has begun. */
ari_optimizer_constants ari_update_constants(const ari_optimizer_clock *clock, const ar_optimizer_options *o,
                                             const ar_param *p, const ar_ctx *ctx);

/* Neighbouring elements of one parameter. fp32 each; ptr NULL: there is none. */
typedef struct ari_update_part {
    ar_buf weight; /* what the layers read */
    ar_buf master; /* bf16 storage: the weight itself, which `weight` holds rounded */
    ar_buf m, v;
} ari_update_part;

/** The part from its n gradients g on the device. The caller counts a new version of the parameter. */
AR_NODISCARD ar_status ari_update_apply(ar_ctx *ctx, const ari_update_part *part, ar_cbuf g,
                                        const ari_optimizer_constants *k, size_t n);

#endif
