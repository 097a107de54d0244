/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/training.h"

/* Private functions of anyrank/training.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Resumes from a checkpoint: takes from the checkpoint everything that determines the weights (data, steps, batch,
 *  seq, optimizer, clip, dropout, loss, numerics, seed) and leaves the other options. Borrows the checkpoint and its
 *  strings. */
void ari_training_resume(ar_training_options *o, ar_checkpoint *c);

AR_END_DECLS
