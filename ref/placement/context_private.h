/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/context.h"

/* Functions of anyrank/context.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** The layers [*first_layer, *first_layer + *count) of stage i of n, of a model with so many. If they are not given and
 *  n does not divide their number, the middle stages have one more, since the first also has the embedding and the last
 *  the head: 126 over 16 are 7, 14 times 8, and 7, as Llama 3 has it (arXiv:2407.21783, section 3.3.2). */
void ari_stage_layers(size_t *first_layer, size_t *count, const ar_stages *stages, size_t layers, size_t n, size_t i);

AR_END_DECLS
