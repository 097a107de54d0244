/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/lint.h"

/* Private functions of anyrank/lint.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** "missing_reduction"; "?" for another number. Static storage. */
const char *ari_lint_rule_name(ar_lint_rule r);
/** Returns one line of English. Static storage. */
const char *ari_lint_rule_text(ar_lint_rule r);
/** Types one training step of a model under the run's layout, plan and batch. Nothing is computed and no weights are
 *  read: time and memory grow with the layers, but not with ranks, batch or widths.
 *  Returns:  *out, also without findings; release it with ari_lint_report_destroy.
 *  Errors:   those of ar_run_check; AR_ERR_UNSUPPORTED (run->fault: no list has one), AR_ERR_OVERFLOW, AR_ERR_MEMORY.
 *            On error *out is not set.
 *  Threads:  safe. */
AR_NODISCARD ar_status ari_lint(ar_lint_report **out, const ar_run *run, const ar_config *config);
/** Accepts NULL. */
void ari_lint_report_destroy(ar_lint_report *r);

AR_END_DECLS
