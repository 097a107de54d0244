/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_REFERENCE_ADAM_ALLOWANCE_H
#define ARI_VERIFY_REFERENCE_ADAM_ALLOWANCE_H

#include "anyrank/optimizer.h"
#include "verify/reference/reference.h"

/* Adam divides a gradient by its own size: one that is mere rounding moves its weight by as much as any other, in
 * either direction, and a few runs with drawn rounding errors do not show it. What a ':new' tensor may be off follows
 * from what the gradients may be off, an element at a time (docs/numerics.md, section 7). */

typedef struct ari_adam_case {
    const ar_optimizer_options *optimizer;
    int steps;
    double clip;            /* largest norm of all gradients; 0: none */
    uint8_t *const *rounds; /* [ref->count], of ':grad' tensors: whether the element is other than zero in any run; one
                               that is zero in all of them is exact */
} ari_adam_case;

/** Where the optimizer is Adam or AdamW, sets `allowed` and `beside` of all ':new' tensors; `allowed` of the gradients
 *  and of their norm is known. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_adam_allow(ari_reference *ref, const ari_adam_case *c);

/** The most that step t = 1, 2, .. can move a weight, whatever the gradients, over its learning rate: the largest
 *  quotient of Adam's two moments. */
double ari_adam_reach(const ar_optimizer_options *o, int t);

#endif
