/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/verify.h"

/* A report for programs: docs/guide/verify.md lists the fields. */

/** Returns the whole report: the facts, the first tensor that differs, and all that differ, the worst first. The caller
 *  releases it with json_decref; NULL if memory is short. */
json_t *ari_verify_report_json(const ar_verify_report *r);
/** Returns the row of a tensor, in the form in which the report lists those that differ; NULL: no row. A new
 *  reference. */
json_t *ari_verify_row_json(const ar_verify_report *r, const char *tensor);
/** A list of all rows in execution order, with histograms and heat maps, for a page. For the caller to json_decref. */
json_t *ari_verify_rows_json(const ar_verify_report *r);

/** Returns true if a tensor differs so little that another order of sums explains it. The rms difference is then a few
 *  round-offs, and the largest a few hundred. For short formats the limit is lower, because so many round-offs would be
 *  a large part of the value. */
bool ari_is_by_rounding(const ar_verify_row *row);
