/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"

/* Private functions of anyrank/arith.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Returns exact arithmetic for a precision; NULL: not supported. */
const ar_arith_ops *ari_arith_exact(ar_precision precision);
/** Returns native arithmetic for a precision; NULL: not supported. */
const ar_arith_ops *ari_arith_native(ar_precision precision);

AR_END_DECLS
