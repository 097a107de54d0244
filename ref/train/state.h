/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_TRAIN_STATE_H
#define ARI_TRAIN_STATE_H

#include "anyrank/train.h"
#include "ref/train/update.h"

/* What an optimizer keeps of one parameter, or of a share of it, and how that comes and goes by its place in the full
 * tensor. */
typedef struct ari_state {
    ar_param *param;      /* borrowed */
    bool whole;           /* all of it, lying as the value does; else the elements [start, start + count) of the */
    size_t start, count;  /* matrix, one after the other */
    ari_update_part part; /* `weight` is none of it */
} ari_state;
typedef const float *(*ari_state_find)(void *user, const char *param, const char *state, size_t count);

/** Whether a step changes a parameter. */
static inline bool ari_is_updated(const ar_param *p)
{
    return p->requires_grad && p->has_grad;
}
/** Before the first step: moments zero, the master copy of bf16 storage the value. param, whole, start and count are
 *  set. Adds to *bytes what it takes. On failure what was made stays, for ari_state_destroy. Errors: AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_state_create(ari_state *s, size_t *bytes, ar_ctx *ctx, const ar_optimizer_options *o);
void ari_state_destroy(ari_state *s, ar_device *d);
/** One call of emit for each kind of state, with its place in the Hugging Face shape. Errors: emit's. */
AR_NODISCARD ar_status ari_state_save(const ari_state *s, ar_ctx *ctx, const ar_optimizer_options *o,
                                      ar_optimizer_state_fn emit, void *user);
/** Taps the first moment (SGD: the momentum) as ':m' and the second as ':v', where they are kept. */
AR_NODISCARD ar_status ari_state_tap(const ari_state *s, ar_ctx *ctx, const ar_optimizer_options *o);
/** Takes its elements out of full tensors. Errors: AR_ERR_NOT_FOUND. */
AR_NODISCARD ar_status ari_state_load(const ari_state *s, ar_ctx *ctx, const ar_optimizer_options *o,
                                      ari_state_find find, void *user);

#endif
