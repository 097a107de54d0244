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
