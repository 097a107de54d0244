/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_PLAN_H
#define ARI_CLI_PLAN_H

#include <jansson.h>
#include <stdio.h>

#include "plan/flow.h"

/** The table, a line an operation, then what the passes come to; markdown: as a table of Markdown. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_flow_print(FILE *to, const ari_flow *f, const ari_step_case *c, bool markdown);
/** "flow", an array of operations, and "totals". Gives; NULL without memory. */
json_t *ari_flow_json(const ari_flow *f, const ari_step_case *c);

#endif
