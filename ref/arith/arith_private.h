/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"

/* Private functions of anyrank/arith.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** NULL: a precision that it does not have. */
const ar_arith_ops *ari_arith_exact(ar_precision precision);
/** NULL: a precision that it does not have. */
const ar_arith_ops *ari_arith_native(ar_precision precision);

AR_END_DECLS
