/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/training.h"

/* Functions of anyrank/training.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** Goes on with a checkpoint: takes from it what decides the values of the weights (data, steps, batch, seq, optimizer,
 *  clip, dropout, loss, numerics, seed), and leaves the rest. Borrows the checkpoint and its strings. */
void ari_training_resume(ar_training_options *o, ar_checkpoint *c);

AR_END_DECLS
