/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/schedule.h"

/* Private functions of anyrank/schedule.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "1f1b", "gpipe", "interleaved", "zero-bubble"; "?" for an unknown value. Static storage. */
const char *ari_pp_schedule_name(ar_pp_schedule s);

AR_END_DECLS
