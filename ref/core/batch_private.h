/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/batch.h"

/* Private functions of anyrank/batch.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "none", "sequence", "batch", "layers"; "?" for an unknown value. Static storage. */
const char *ari_balance_name(ar_balance b);

AR_END_DECLS
