/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/gradients.h"

/* Private functions of anyrank/gradients.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Writes at most cap parameters that currently require a gradient, in list order. Returns their number. */
size_t ari_gradients_trainable(const ar_gradients *g, ar_param **out, size_t cap);
/** Writes a finding, such as "model.norm.weight: the gradient of ranks 2-3 differs from that of rank 0". */
void ari_finding_text(char *out, size_t cap, const ar_finding *f);
/** Returns the last verdict; before the first, an ok verdict without findings. */
ar_verdict ari_gradients_last(const ar_gradients *g);

AR_END_DECLS
