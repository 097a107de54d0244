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

/** "f32", "tf32", "bf16", "bf16-pure", "f16", "f16-pure"; "unknown". */
const char *ar_sensitivity_name(ar_sensitivity s);
/** That of a native run in a precision. */
ar_sensitivity ar_sensitivity_of_precision(ar_precision p);

AR_END_DECLS
#endif
