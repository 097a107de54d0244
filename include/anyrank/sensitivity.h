/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SENSITIVITY_H
#define ANYRANK_SENSITIVITY_H

#include <stdbool.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The arithmetic for which a sensitivity analysis estimates how much rounding alone may change each tensor of a model's
 * forward and backward pass on given inputs (numerics.md, section 7). */
typedef enum ar_sensitivity {
    AR_SENSITIVITY_F32,       /* everything in fp32 */
    AR_SENSITIVITY_TF32,      /* matrix products of TF32 numbers, everything else in fp32 */
    AR_SENSITIVITY_BF16,      /* mixed precision as in torch.autocast: matrix products and the activations between them
                                 in bf16; parameters, residual stream and norms in fp32 */
    AR_SENSITIVITY_BF16_PURE, /* parameters, activations and gradients are all stored in bf16 */
    AR_SENSITIVITY_F16,       /* as AR_SENSITIVITY_BF16 with fp16, for values in fp16's normal range */
    AR_SENSITIVITY_F16_PURE,  /* as AR_SENSITIVITY_BF16_PURE with fp16, for values in fp16's normal range */
    AR_SENSITIVITY_COUNT
} ar_sensitivity;

AR_END_DECLS
#endif
