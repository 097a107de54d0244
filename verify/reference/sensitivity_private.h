/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"
#include "anyrank/sensitivity.h"
#include "anyrank/status.h"

/* Private functions of anyrank/sensitivity.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Returns the sensitivity for a native run in a precision. */
ar_sensitivity ari_sensitivity_of_precision(ar_precision p);

AR_END_DECLS
