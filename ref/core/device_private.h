/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"

/* Private functions of anyrank/device.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "f32", "tf32", "bf16". */
const char *ari_precision_name(ar_precision p);
/** "cpu", "cuda", "emulated"; "?" for an unknown value. */
const char *ari_device_kind_name(ar_device_kind k);

AR_END_DECLS
