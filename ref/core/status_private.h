/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/status.h"

/* Private functions of anyrank/status.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Returns one line of English for the code. Static storage. */
const char *ari_status_text(ar_status st);

AR_END_DECLS
