/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_CHECK_LIST_H
#define ARI_CLI_CHECK_LIST_H

#include <jansson.h>
#include <stdio.h>

#include "anyrank/check.h"

/** `anyrank check --list-tensors`: prints the tensors that a check of these options compares at each step, in the order
 *  of execution; to NULL: prints nothing. Gives the same as JSON. Errors: those of ar_check_tensors, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_check_list(json_t **gives, FILE *to, const ar_check_options *o);
/** The whole result, from what ari_check_list gave for each model. Takes `models`. Gives; NULL without memory. */
json_t *ari_check_list_json(json_t *models);

#endif
