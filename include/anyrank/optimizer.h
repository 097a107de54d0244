/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_OPTIMIZER_H
#define ANYRANK_OPTIMIZER_H

#include <stdbool.h>

#include "anyrank/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Element-wise updates of a weight w from its gradient g: docs/numerics.md, section 6, has each formula in the order in
 * which it is evaluated; ref/numerics/optimizer.h is its one definition. */
typedef enum ar_optimizer_kind {
    AR_OPTIMIZER_SGD,  /* with momentum and Nesterov's variant (Sutskever et al. 2013), weight decay added to g */
    AR_OPTIMIZER_ADAM, /* Kingma, Ba 2015, arXiv:1412.6980; weight decay added to g */
    AR_OPTIMIZER_ADAMW /* Loshchilov, Hutter 2019, arXiv:1711.05101: decoupled weight decay */
} ar_optimizer_kind;

/** Plain data. */
typedef struct ar_optimizer_options {
    ar_optimizer_kind kind;
    double lr;
    double momentum;          /* SGD: 0 for none */
    bool nesterov;            /* SGD: needs a momentum */
    double beta1, beta2, eps; /* Adam, AdamW */
    double weight_decay;
} ar_optimizer_options;

/** PyTorch's defaults: SGD lr 1e-3, no momentum, no decay; Adam and AdamW lr 1e-3, betas 0.9 and 0.999, eps 1e-8, decay
 *  0 and 0.01. */
ar_optimizer_options ar_optimizer_defaults(ar_optimizer_kind kind);
/** Errors: AR_ERR_ARG, naming the option and its range: lr >= 0, 0 <= momentum < 1 .. finite, 0 <= beta < 1, eps > 0,
 *  weight_decay >= 0, nesterov with momentum 0. */
AR_NODISCARD ar_status ar_optimizer_check(const ar_optimizer_options *o);
/** "sgd", "adam", "adamw". Static storage. */
const char *ar_optimizer_name(ar_optimizer_kind kind);

#ifdef __cplusplus
}
#endif
#endif
