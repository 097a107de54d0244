/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_CHECK_REPORT_H
#define ARI_CLI_CHECK_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/check.h"

/** The table of one model, and what its runs differ in. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_print(FILE *to, const ar_check_report *r);
/** The last line: the key fact. */
void ari_check_print_verdict(FILE *to, ar_check_report *const *reports, size_t n, ar_fault fault);
/** The stable JSON of the whole check. Gives; NULL without memory. */
json_t *ari_check_json(ar_check_report *const *reports, size_t n);

#endif
