/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/baseline.h"

/* Private functions of anyrank/baseline.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Runs one transformer block with given x and dy [b,s,h] and with weights named as in `c`'s layer 0 (for
 *  AR_ARCH_STACK: layers.0.ln1.weight ...). Emits the same tensors as the block inside a model; y is "<block>:fwd", dx
 *  "<block>:bwd". batch: batch, seq and masks are used; input_ids and labels are not. */
AR_NODISCARD ar_status ari_baseline_block(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch,
                                          const float *x, const float *dy);

AR_END_DECLS
