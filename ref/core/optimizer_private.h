/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/optimizer.h"

/* Private functions of anyrank/optimizer.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "constant", "cosine". Static storage. */
const char *ari_schedule_name(ar_schedule schedule);
/** "sgd", "adam", "adamw", "muon". Static storage. */
const char *ari_optimizer_name(ar_optimizer_kind kind);

AR_END_DECLS
