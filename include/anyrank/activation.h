/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ACTIVATION_H
#define ANYRANK_ACTIVATION_H

#include "anyrank/block.h"

AR_BEGIN_DECLS

/* Values of ar_activation besides AR_ACT_NONE. */
enum ar_activations {
    AR_ACT_GELU_ERF,
    AR_ACT_GELU_TANH,
    AR_ACT_SILU,
    AR_ACT_RELU,
    /* GPT-OSS's gated MLP: g*sigmoid(1.702*g)*(1 + u), g = min(gate, 7), u = up clamped to [-7, 7] */
    AR_ACT_CLAMPED = AR_ACT_NONE + 1,
    AR_ACTIVATIONS /* number of activations, AR_ACT_NONE included */
};

AR_END_DECLS
#endif
