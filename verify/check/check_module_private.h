/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/check_module.h"

/* Functions of anyrank/check_module.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** The report in words, a line for each tensor. Truncates to cap. */
void ari_gradcheck_module_text(const ar_gradcheck_module_report *r, char *text, size_t cap);

AR_END_DECLS
