/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_CHECK_REPORT_H
#define ARI_CLI_CHECK_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/check.h"
#include "cli/watch.h"

/* One model's report, and what it was asked for. */
typedef struct ari_checked {
    ar_check_report *report;
    ar_run run;
    bool module; /* bytes are counted alone */
    const ari_watch *watch;
    bool has_net_fault;
    ar_sim_fault net_fault;
} ari_checked;

/** Whether every run is the same and every gradcheck passed. */
bool ari_check_same(const ari_checked *checked, size_t n);
/** Whether a check against central differences failed. */
bool ari_check_failed_gradcheck(const ari_checked *checked, size_t n);
/** The table of one model, and what its runs differ in; `memory`: a table of what a rank holds too. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_print(FILE *to, const ari_checked *c, bool memory);
/** The last line: the key fact. */
void ari_check_print_verdict(FILE *to, const ari_checked *checked, size_t n, ar_fault fault);
/** The stable JSON of the whole check. Gives; NULL without memory. */
json_t *ari_check_json(const ari_checked *checked, size_t n);

#endif
