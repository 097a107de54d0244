/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

/* Fault, a bug that is injected into a run, identified by its name, so that a new fault recompiles only the files that
 * use it. NULL is none. Private functions, used by the library, the command and the tests. */

AR_BEGIN_DECLS

extern const char *const ari_fault_names[]; /* [ari_fault_count] names, terminated by NULL */
extern const size_t ari_fault_count;

/** The effect of a known fault in one line of English. Static storage. */
const char *ari_fault_text(const char *fault);
/** Returns true if `fault` is the fault with this name. */
bool ari_fault_is(const char *fault, const char *name);
/** AR_OK for a fault of the table and for NULL, else AR_ERR_NOT_FOUND, naming the nearest. */
AR_NODISCARD ar_status ari_fault_known(const char *fault);

AR_END_DECLS
