/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_OPTIMIZER_H
#define ANYRANK_OPTIMIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Optimizers, which update a weight w from its gradient g. numerics.md, section 6, has the formulas in their order of
 * evaluation; ref/numerics/optimizer.h defines the element-wise ones. */
typedef enum ar_optimizer_kind {
    AR_OPTIMIZER_SGD,   /* with momentum and Nesterov's variant (Sutskever et al. 2013), weight decay added to g */
    AR_OPTIMIZER_ADAM,  /* Kingma, Ba 2015, arXiv:1412.6980; weight decay added to g */
    AR_OPTIMIZER_ADAMW, /* Loshchilov, Hutter 2019, arXiv:1711.05101: decoupled weight decay */
    AR_OPTIMIZER_MUON   /* Jordan et al. 2024, as in torch.optim.Muon but in fp32, for weight matrices
                           (ar_param.matrix); AdamW for all other parameters */
} ar_optimizer_kind;

/* Learning-rate schedule: the rate of step t = 1, 2, .. is lr times a factor. The factor is t/warmup_steps for t <
 * warmup_steps; then
 *   constant: 1
 *   cosine:   m + (1 - m)(1 + cos(pi*(t - warmup_steps)/(total_steps - warmup_steps)))/2 with m = min_lr/lr; m
 *             for t >= total_steps (Loshchilov, Hutter 2017, arXiv:1608.03983, without restarts) */
typedef enum ar_schedule { AR_SCHEDULE_CONSTANT, AR_SCHEDULE_COSINE } ar_schedule;
/* The parameters that get weight decay unless an ar_param_group sets their decay. */
typedef enum ar_decay {
    AR_DECAY_ALL,     /* all parameters */
    AR_DECAY_MATRICES /* parameters of two dimensions: no norms, no biases */
} ar_decay;
#define AR_PARAM_GROUPS 8 /* most groups of an optimizer */
/** A parameter group: learning rate and weight decay of the parameters whose names match a glob. Plain data. */
typedef struct ar_param_group {
    char glob[64];       /* of Hugging Face names (fnmatch(3); '*' also matches dots). The last matching group
                            applies */
    double lr_scale;     /* multiplies the learning rate */
    double weight_decay; /* replaces ar_optimizer_options.weight_decay; NaN: keeps it, subject to ar_decay */
} ar_param_group;

/** Hyperparameters of an optimizer. Plain data. */
typedef struct ar_optimizer_options {
    ar_optimizer_kind kind;
    double lr;       /* learning rate */
    double momentum; /* SGD (0: none) and Muon */
    bool nesterov;   /* SGD (needs momentum > 0) and Muon: Nesterov momentum */
    bool match_rms;  /* Muon: the learning rate of a matrix [rows, cols] is lr*0.2*sqrt(max(rows, cols)) (Liu et al.
                        2025, arXiv:2502.16982, section 2.2: torch's match_rms_adamw); false: lr*sqrt(max(1,
                        rows/cols)) */
    bool shards;     /* Muon: a matrix that tensor parallelism shards along its longer side stays sharded, and X X^T and
                        the norm are summed over the ranks; false: each rank gathers the whole matrix. Exact numerics
                        give the same bits either way */
    /* Muon with QK-Clip (Kimi K2, arXiv:2507.20534, section 2.1): if the largest attention logit S of a KV head
     * exceeded qk_clip in the step, the head's rows of the q and k weights are then multiplied by
     * fl32(sqrt(qk_clip/S)); of latent attention's rotary features only the q rows are, by fl32(qk_clip/S). 0: no
     * QK-Clip */
    double qk_clip;
    double beta1, beta2, eps;           /* Adam, AdamW, and Muon's AdamW */
    double weight_decay;                /* of the parameters that `decay` selects */
    ar_schedule schedule;               /* of the learning rate */
    uint64_t warmup_steps, total_steps; /* of the schedule; total_steps: cosine only */
    double min_lr;                      /* cosine: final learning rate */
    ar_decay decay;
    size_t groups; /* entries of group[] */
    ar_param_group group[AR_PARAM_GROUPS];
} ar_optimizer_options;

/** Returns PyTorch's defaults for an optimizer. SGD: lr 1e-3, no momentum, no weight decay. Adam and AdamW: lr 1e-3,
 *  betas 0.9 and 0.999, eps 1e-8, weight decay 0 (Adam), 0.01 (AdamW). Muon: lr 1e-3, Nesterov momentum 0.95, decay
 *  0.1. */
ar_optimizer_options ar_optimizer_defaults(ar_optimizer_kind kind);

AR_END_DECLS
#endif
