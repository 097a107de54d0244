/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/sensitivity.h"
#include "anyrank/status.h"

/* Private functions of anyrank/sensitivity.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "f32", "tf32", "bf16", "bf16-pure", "f16", "f16-pure"; "unknown". */
const char *ari_sensitivity_name(ar_sensitivity s);

AR_END_DECLS
