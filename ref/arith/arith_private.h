/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"

/* Functions of anyrank/arith.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** NULL: a precision that it does not have. */
const ar_arith_ops *ari_arith_exact(ar_precision precision);
/** NULL: a precision that it does not have. */
const ar_arith_ops *ari_arith_native(ar_precision precision);

AR_END_DECLS
