/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdio.h>

#include "anyrank/verify.h"
#include "verify/dumps/normal.h"

/** The verdict in the first line, and the two dumps: all that is known before anything is explained. Nothing where
 *  nothing differs. */
void ari_verify_print_head(FILE *to, const ar_verify_report *r);
/** What follows, up to the last line: nothing where nothing differs and nothing is odd. `most`: rows of a table. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_print(FILE *to, const ar_verify_report *r, size_t most);
/** The last line: the key fact. */
void ari_verify_print_verdict(FILE *to, const ar_verify_report *r);
/** The answer to --normal, what it was found by, and the ten most unusual tensors. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_verify_print_normal(FILE *to, const ari_normal *n);
/** The explanation of the first that differs, if the difference is not normal. */
void ari_verify_print_not_normal(FILE *to, const ar_verify_report *r, const ari_normal *n);

/** Explains a report in a child process, so that an explanation that crashes, hangs or is interrupted leaves the report
 *  as it was: `unexplained` says why, and a note on stderr. */
void ari_verify_explain_apart(ar_verify_report *r);
