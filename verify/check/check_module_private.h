/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/check_module.h"

/* Private functions of anyrank/check_module.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** The report in words, a line for each tensor. Truncates to cap. */
void ari_gradcheck_module_text(const ar_gradcheck_module_report *r, char *text, size_t cap);

AR_END_DECLS
