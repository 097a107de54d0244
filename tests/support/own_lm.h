/* SPDX-License-Identifier: Apache-2.0 */
/* A language model of a user's: ids, blocks with residuals, an MLP written by hand between the ends of a region, logits
 * of a vocabulary that does not divide. Every layout that shares out anything of a model has something to share here. */
#pragma once

#include "anyrank/check_module.h"
#include "anyrank/layers.h"

enum { OWN_LM_SEQ = 8, OWN_LM_BATCH = 4, OWN_LM_HIDDEN = 8, OWN_LM_VOCAB = 13, OWN_LM_BLOCKS = 3 };

typedef struct own_lm {
    bool tied;   /* the head's table is the embedding's */
    bool copied; /* it has the embedding's name, and nothing says that it is the same: a mistake */
} own_lm;

/** A case of it on random ids; lm is borrowed. */
ar_module_case own_lm_case(const own_lm *lm);
