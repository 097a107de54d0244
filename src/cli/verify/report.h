/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdio.h>

#include "anyrank/verify.h"
#include "verify/dumps/normal.h"

/** Everything but the last line: nothing where nothing differs and nothing is odd. `most`: rows of a table. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_print(FILE *to, const ar_verify_report *r, size_t most);
/** The last line: the key fact. */
void ari_verify_print_verdict(FILE *to, const ar_verify_report *r);
/** The answer to --normal, what it was found by, and the ten most unusual tensors. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_print_normal(FILE *to, const ar_verify_report *r, const ari_normal *n);
