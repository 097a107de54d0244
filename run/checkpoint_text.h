/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_CHECKPOINT_TEXT_H
#define ARI_RUN_CHECKPOINT_TEXT_H

#include <jansson.h>

#include "run/checkpoint_json.h"

/* What the reader and the writer of training.json agree on. */

#define ARI_CHECKPOINT_FORMAT "anyrank checkpoint"
#define ARI_CHECKPOINT_OWN_HASH "training_hash" /* over all other keys */

extern const char *const ari_checkpoint_numerics[2]; /* by ar_numerics */
extern const char *const ari_checkpoint_decay[2];    /* by ar_decay */

/** SHA-256 of the object's one canonical text: sorted keys, no spaces, numbers as they are read back. Errors:
 *  AR_ERR_MEMORY, AR_ERR_INTERNAL. */
AR_NODISCARD ar_status ari_checkpoint_text_hash(char hex[65], const json_t *o);

#endif
