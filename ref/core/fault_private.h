/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/fault.h"

/* Functions of anyrank/fault.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** "column_dx_not_reduced"; "none" for AR_FAULT_NONE. Static storage. */
const char *ari_fault_name(ar_fault f);
/** One line of English. Static storage. */
const char *ari_fault_text(ar_fault f);
/** AR_ERR_NOT_FOUND, naming the nearest, if there is no such fault. */
AR_NODISCARD ar_status ari_fault_parse(ar_fault *f, const char *name);

AR_END_DECLS
