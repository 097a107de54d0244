/* SPDX-License-Identifier: Apache-2.0 */
/* A language model of a user's: ids, blocks with residuals, an MLP written by hand between the ends of a region, logits
 * of a vocabulary that does not divide. Every layout that shares out anything of a model has something to share here. */
#pragma once

#include "anyrank/check_module.h"
#include "anyrank/layers.h"

enum { OWN_LM_SEQ = 8, OWN_LM_BATCH = 4, OWN_LM_HIDDEN = 8, OWN_LM_VOCAB = 13, OWN_LM_BLOCKS = 3 };

/* A wrong declaration or a forgotten operator, each of which a check has to find. */
typedef enum own_lm_mistake { OWN_LM_RIGHT, OWN_LM_MISTAKES } own_lm_mistake;

typedef struct own_lm {
    own_lm_mistake mistake;
    bool tied;
} own_lm;

/** A case of it on random ids; lm is borrowed. */
ar_module_case own_lm_case(const own_lm *lm);
