/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/training.h"

/* Private functions of anyrank/training.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Goes on with a checkpoint: takes from it what decides the values of the weights (data, steps, batch, seq, optimizer,
 *  clip, dropout, loss, numerics, seed), and leaves the rest. Borrows the checkpoint and its strings. */
void ari_training_resume(ar_training_options *o, ar_checkpoint *c);

AR_END_DECLS
