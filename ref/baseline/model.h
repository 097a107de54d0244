/* SPDX-License-Identifier: Apache-2.0 */
/* A whole model of the baseline: its parameters, and what one pass over it keeps. */
#ifndef ARI_BASELINE_MODEL_H
#define ARI_BASELINE_MODEL_H

#include "ref/baseline/run.h"

typedef struct ari_bl_model {
    const double *embed;     /* [V, h] */
    const double *positions; /* [max_positions, h], or NULL */
    ari_bl_params *block;    /* one a layer */
    ari_bl_norm final_norm;  /* where the config has one */
    ari_bl_linear head;      /* its weight is the embedding where they are tied */
    size_t *ids;             /* [tokens]: rows of the embedding */
    double *head_x;          /* [tokens, h]: the head's input, or the stack's output */
    double *dlogits;         /* [tokens, V]: first the logits, then their gradient */
    double *dx;              /* [tokens, h]: the gradient on its way back */
} ari_bl_model;

/** Whether there is an LM head and a cross-entropy. */
bool ari_bl_has_head(const ar_config *c);
/** A run's struct from the caller's: checked, nothing loaded. Whatever it returns, ari_bl_release(run, NULL) ends
 *  it. */
AR_NODISCARD ar_status ari_bl_begin(ari_bl_run *run, const ar_config *c, const ar_baseline_options *o,
                                    const ar_batch *batch);
/** The batch, checked before, becomes that of a step: 1, 2, .. */
AR_NODISCARD ar_status ari_bl_enter_step(ari_bl_run *run, const ar_batch *batch, uint32_t step);
/** Loads or makes all parameters, in the order of their first use. */
AR_NODISCARD ar_status ari_bl_load_model(ari_bl_run *run, ari_bl_model *m);
/** Takes what lives through a whole pass. */
AR_NODISCARD ar_status ari_bl_take_buffers(ari_bl_run *run, ari_bl_model *m);
/** The final norm (or none), the loss, and back, unless forward_only: m->dx is then the gradient of x, the last block's
 *  output. */
AR_NODISCARD ar_status ari_bl_end(ari_bl_run *run, ari_bl_model *m, const double *x, double *loss);
/** x [tokens, h]: rows of the embedding plus learned positions; emitted. */
AR_NODISCARD ar_status ari_bl_embed(ari_bl_run *run, const ari_bl_model *m, double *x);
/** Gradients of the embedding (tied: of both uses) and of the learned positions, from m->dx, which dropout overwrites;
 * emitted. */
AR_NODISCARD ar_status ari_bl_embed_gradients(ari_bl_run *run, const ari_bl_model *m);
/** Logits and loss from m->head_x; m->dlogits is left holding the gradient of the logits. */
AR_NODISCARD ar_status ari_bl_loss_forward(ari_bl_run *run, ari_bl_model *m, double *loss);
/** dx [tokens, h] of m->head_x, and the untied head's gradient; emitted. */
AR_NODISCARD ar_status ari_bl_loss_backward(ari_bl_run *run, const ari_bl_model *m, double *dx);

#endif
