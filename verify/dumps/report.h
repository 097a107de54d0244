/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/verify.h"

/* A report for programs, as the command prints it and the page reads it: verify.md lists the fields. */

/** Sets what is said of the whole. */
void ari_verify_set_facts(json_t *o, const ar_verify_report *r);
/** A row; places: where it differs too. Gives. */
json_t *ari_verify_row_json(const ar_verify_row *r, bool places);

/** True if a tensor differs by so little that another order of sums explains it. The rms difference is then a few
 *  round-offs, the largest some hundred; for short formats less is accepted, as so many would be a large part. */
bool ari_is_by_rounding(const ar_verify_row *row);
