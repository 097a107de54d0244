/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_OPTIMIZER_H
#define ANYRANK_OPTIMIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Updates of a weight w from its gradient g: numerics.md, section 6, has each formula in the order in which it is
 * evaluated; ref/numerics/optimizer.h is the one definition of those of single elements. */
typedef enum ar_optimizer_kind {
    AR_OPTIMIZER_SGD,   /* with momentum and Nesterov's variant (Sutskever et al. 2013), weight decay added to g */
    AR_OPTIMIZER_ADAM,  /* Kingma, Ba 2015, arXiv:1412.6980; weight decay added to g */
    AR_OPTIMIZER_ADAMW, /* Loshchilov, Hutter 2019, arXiv:1711.05101: decoupled weight decay */
    AR_OPTIMIZER_MUON   /* of matrices (ar_param.matrix) as a whole: Jordan et al. 2024, as torch.optim.Muon has it, in
                           fp32; the other parameters under AdamW */
} ar_optimizer_kind;

/* The learning rate of step t = 1, 2, ..: lr times a factor. Warm-up: t/warmup_steps for t < warmup_steps; then
 *   constant: 1
 *   cosine:   m + (1 - m)(1 + cos(pi*(t - warmup_steps)/(total_steps - warmup_steps)))/2, m = min_lr/lr, and m from
 *             total_steps on (Loshchilov, Hutter 2017, arXiv:1608.03983, without restarts) */
typedef enum ar_schedule { AR_SCHEDULE_CONSTANT, AR_SCHEDULE_COSINE } ar_schedule;
/* Which parameters decay where no group says otherwise. */
typedef enum ar_decay {
    AR_DECAY_ALL,
    AR_DECAY_MATRICES /* those of two dimensions: not norms, not biases */
} ar_decay;
#define AR_PARAM_GROUPS 8
/** Parameters with options of their own, by name. Plain data. */
typedef struct ar_param_group {
    char glob[64];   /* of Hugging Face names (fnmatch(3), '*' also matches dots); the last group that matches counts */
    double lr_scale; /* times the learning rate; 1 */
    double weight_decay; /* in place of what options and decay rule say; NaN: that */
} ar_param_group;

/** Plain data. */
typedef struct ar_optimizer_options {
    ar_optimizer_kind kind;
    double lr;
    double momentum; /* SGD: 0 for none; Muon */
    bool nesterov;   /* SGD: needs a momentum; Muon */
    bool match_rms;  /* Muon: the rate of a matrix [rows, cols] is lr*0.2*sqrt(max(rows, cols)) (Liu et al. 2025,
                       arXiv:2502.16982, section 2.2: torch's match_rms_adamw), else lr*sqrt(max(1, rows/cols)) */
    bool shards;     /* Muon: matrices that tensor-parallel ranks cut along their longer side stay cut, and X X^T and
                        the norm are sums over the ranks; else each gathers all. In exact numerics the same bits */
    /* Muon: after a step, of each KV head whose attention has had a logit S above this, the rows of q and k are
     * multiplied by fl32(sqrt(qk_clip/S)), of latent attention's features with positions those of q by fl32(qk_clip/S)
     * (QK-Clip, Kimi K2, arXiv:2507.20534, section 2.1); 0: not */
    double qk_clip;
    double beta1, beta2, eps; /* Adam, AdamW, and Muon of what is no matrix */
    double weight_decay;
    ar_schedule schedule;
    uint64_t warmup_steps, total_steps; /* total_steps: cosine only */
    double min_lr;                      /* cosine: what it ends at */
    ar_decay decay;
    size_t groups;
    ar_param_group group[AR_PARAM_GROUPS];
} ar_optimizer_options;

/** PyTorch's defaults: SGD lr 1e-3, no momentum, no decay; Adam and AdamW lr 1e-3, betas 0.9 and 0.999, eps 1e-8, decay
 *  0 and 0.01. Muon: lr 1e-3, momentum 0.95, Nesterov's, decay 0.1. */
ar_optimizer_options ar_optimizer_defaults(ar_optimizer_kind kind);

AR_END_DECLS
#endif
