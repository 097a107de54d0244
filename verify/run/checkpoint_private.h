/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/checkpoint.h"
#include "anyrank/train.h"

/* Private functions of anyrank/checkpoint.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** The folder of the last checkpoint written; "" before the first. Borrowed until the next save. */
const char *ari_checkpoint_written(const ar_checkpoint_writer *w);
/** Returns the folder that contains training.json, with links resolved. Borrowed. */
const char *ari_checkpoint_path(const ar_checkpoint *c);
/** Hash of the weights; borrowed. */
const char *ari_checkpoint_weights_hash(const ar_checkpoint *c);
/** Returns the full tensor of a parameter, or NULL, like the find of ari_model_set. user: an ar_checkpoint. */
const float *ari_checkpoint_find(void *user, const char *name, size_t count);

AR_END_DECLS
