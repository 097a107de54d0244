/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/context.h"

/* Private functions of anyrank/context.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Computes the layers [*first_layer, *first_layer + *count) of stage i of n, of a model with `layers` layers. If they
 *  are not given and n does not divide their number, the middle stages have one more, because the first stage also has
 *  the embedding and the last one the head: 126 layers over 16 stages are 7, 14 times 8, and 7, as in Llama 3
 *  (arXiv:2407.21783, section 3.3.2). */
void ari_stage_layers(size_t *first_layer, size_t *count, const ar_stages *stages, size_t layers, size_t n, size_t i);

AR_END_DECLS
