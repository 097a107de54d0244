/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/verify.h"

/* A report for programs: docs/guide/verify.md lists the fields. */

/** The whole: the facts, the first tensor that differs, and all that do, the worst first. For the caller to json_decref;
 *  NULL without memory. */
json_t *ari_verify_report_json(const ar_verify_report *r);
/** The row of a tensor, as the whole has those that differ; NULL: there is none. For the caller to json_decref. */
json_t *ari_verify_row_json(const ar_verify_report *r, const char *tensor);
/** A list of all rows in execution order, with histograms and heat maps, for a page. For the caller to json_decref. */
json_t *ari_verify_rows_json(const ar_verify_report *r);

/** True if a tensor differs by so little that another order of sums explains it. The rms difference is then a few
 *  round-offs, the largest some hundred; for short formats less is accepted, as so many would be a large part. */
bool ari_is_by_rounding(const ar_verify_row *row);
