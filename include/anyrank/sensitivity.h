/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_SENSITIVITY_H
#define ANYRANK_SENSITIVITY_H

#include <stdbool.h>

#include "anyrank/context.h"

AR_BEGIN_DECLS

/* The change that rounding alone may cause in a tensor: derived from the model and the inputs at hand, for an
 * arithmetic that rounds in a given way (numerics.md, section 7). */
typedef enum ar_sensitivity {
    AR_SENSITIVITY_F32,
    AR_SENSITIVITY_TF32,      /* products of TF32 numbers, all else fp32 */
    AR_SENSITIVITY_BF16,      /* mixed precision, as autocast: products of bf16 numbers, and what lies between two
                                 products is bf16; parameters, the residual stream and norms fp32 */
    AR_SENSITIVITY_BF16_PURE, /* every tensor is stored in bf16: parameters, activations, gradients */
    AR_SENSITIVITY_F16,       /* the same two with fp16, for numbers that stay in its normal range */
    AR_SENSITIVITY_F16_PURE,
    AR_SENSITIVITY_COUNT
} ar_sensitivity;

AR_END_DECLS
#endif
